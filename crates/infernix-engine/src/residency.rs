//! Which experts have a frame of device memory: the policy of the CUDA tiers and of the simulator, without the memory itself.
//!
//! An expert's worth is how often it was used lately, with a half-life in tokens. (Uses over age, LFRU, hits 0 to 5 % less where
//! moves are bounded: what was used just now and never before takes the moves.) Between rounds experts that were used without a frame take frames of those
//! worth less, a bounded number at a time, as each costs a copy.

/// Moves that may run beside one round: 8 records of 2.8 MB are 0.4 ms of a 55 GB/s link; a cache that misses most picks anyway
/// may spend more.
pub(crate) const MOVES: usize = 8;
pub(crate) const CATCH_UP: usize = 64;
/// Tokens after which a use counts half.
pub(crate) const HALF_LIFE: f32 = 2048.0;
/// Frames of least worth that are looked for at once.
const VICTIMS: usize = 256;

/// An expert on its way into a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// In the flat numbering of all experts.
    pub expert: usize,
    /// Its frame to be.
    pub frame: usize,
}

/// What one layer of a round used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// Different experts.
    pub experts: u64,
    /// Of these, without a frame.
    pub missing: u64,
}

/// Experts, frames, and who has which.
#[derive(Clone, Debug, Default)]
pub struct Residency {
    frame_of: Vec<Option<u32>>,
    owner: Vec<Option<u32>>,
    score: Vec<f32>,
    used_at: Vec<f32>,
    /// Tokens so far.
    now: f32,
    /// Frames of least worth as last looked for, the least last.
    victims: Vec<usize>,
    /// Used without a frame since moves last began.
    wanted: Vec<usize>,
}

impl Residency {
    /// `frames` frames for `experts` experts; the first ones of `order` own them.
    pub fn new(experts: usize, frames: usize, order: impl IntoIterator<Item = usize>) -> Self {
        let mut r = Residency {
            frame_of: vec![None; experts],
            owner: vec![None; frames],
            score: vec![0.0; experts],
            used_at: vec![0.0; experts],
            ..Residency::default()
        };
        for (frame, expert) in order.into_iter().take(frames).enumerate() {
            r.owner[frame] = Some(expert as u32);
            r.frame_of[expert] = Some(frame as u32);
        }
        r
    }

    /// An order for [`Residency::new`] that serves all layers alike: the first expert of each, then the second ones.
    pub fn even(layers: &[std::ops::Range<usize>]) -> Vec<usize> {
        let most = layers.iter().map(std::ops::Range::len).max().unwrap_or(0);
        let at = |i: usize| layers.iter().filter(move |l| i < l.len()).map(move |l| l.start + i);
        (0..most).flat_map(at).collect()
    }

    /// Frames in all.
    pub fn frames(&self) -> usize {
        self.owner.len()
    }

    /// The frame of an expert.
    pub fn frame_of(&self, expert: usize) -> Option<usize> {
        self.frame_of[expert].map(|f| f as usize)
    }

    /// The expert in a frame.
    pub fn owner(&self, frame: usize) -> Option<usize> {
        self.owner[frame].map(|e| e as usize)
    }

    /// Counts the experts that one layer of a round used; an expert counts once however many rows chose it.
    pub fn note(&mut self, mut experts: Vec<usize>) -> Uses {
        experts.sort_unstable();
        experts.dedup();
        let mut uses = Uses { experts: experts.len() as u64, missing: 0 };
        for e in experts {
            let age = self.now - self.used_at[e];
            self.score[e] = self.score[e] * (-age / HALF_LIFE).exp2() + 1.0;
            self.used_at[e] = self.now;
            if self.frame_of[e].is_none() {
                uses.missing += 1;
                self.wanted.push(e);
            }
        }
        uses
    }

    /// `tokens` more tokens have been read.
    pub fn advance(&mut self, tokens: usize) {
        self.now += tokens as f32;
    }

    /// Worth of keeping an expert.
    pub fn worth(&self, expert: usize) -> f32 {
        let age = self.now - self.used_at[expert];
        self.score[expert] * (-age / HALF_LIFE).exp2()
    }

    /// Between rounds, when earlier moves have ended: experts that shall move. Those whose frames they take have none from
    /// here on; `may_leave` may keep one where it is.
    pub fn begin_moves(&mut self, may_leave: impl Fn(&Self, usize) -> bool) -> Vec<Move> {
        let mut wanted = std::mem::take(&mut self.wanted);
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|e| self.frame_of[*e].is_none());
        wanted.sort_by(|a, b| self.worth(*b).total_cmp(&self.worth(*a)));
        let most = if wanted.len() > 2 * CATCH_UP { CATCH_UP } else { MOVES };
        let mut moves = Vec::new();
        for expert in wanted.into_iter().take(most) {
            let Some(frame) = self.victim() else { break };
            let old = self.owner(frame);
            if old.is_some_and(|o| self.worth(o) >= self.worth(expert) || !may_leave(self, o)) {
                continue;
            }
            if let Some(o) = old {
                self.frame_of[o] = None;
                self.owner[frame] = None;
            }
            moves.push(Move { expert, frame });
        }
        moves
    }

    /// The copies of these moves are complete: the experts are in their frames.
    pub fn end_moves(&mut self, moves: &[Move]) {
        for m in moves {
            self.frame_of[m.expert] = Some(m.frame as u32);
            self.owner[m.frame] = Some(m.expert as u32);
        }
    }

    fn victim(&mut self) -> Option<usize> {
        if self.victims.is_empty() {
            let worth = |o: &Option<u32>| o.map_or(-1.0, |e| self.worth(e as usize));
            self.victims = least_worth(self.owner.iter().enumerate().map(|(f, o)| (worth(o), f)));
        }
        self.victims.pop()
    }
}

/// Places of least worth, the least last: as many as serve for a while, as looking at all for each would cost as much as a copy.
pub(crate) fn least_worth(places: impl Iterator<Item = (f32, usize)>) -> Vec<usize> {
    let mut all: Vec<(f32, usize)> = places.collect();
    let Some(last) = all.len().min(VICTIMS).checked_sub(1) else { return Vec::new() };
    all.select_nth_unstable_by(last, |a, b| a.0.total_cmp(&b.0));
    all.truncate(VICTIMS);
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    all.into_iter().map(|(_, place)| place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn consistent(r: &Residency) {
        for f in 0..r.frames() {
            assert!(r.owner(f).is_none_or(|e| r.frame_of(e) == Some(f)), "frame {f}");
        }
        let owned = (0..r.frame_of.len()).filter(|e| r.frame_of(*e).is_some()).count();
        assert_eq!(owned, (0..r.frames()).filter(|f| r.owner(*f).is_some()).count());
    }

    #[test]
    fn what_is_used_moves_in_and_what_is_not_moves_out() {
        let mut r = Residency::new(8, 3, Residency::even(&[0..4, 4..8]));
        assert_eq!((0..8).filter(|e| r.frame_of(*e).is_some()).collect::<Vec<_>>(), [0, 1, 4]);
        for _ in 0..6 {
            r.note(vec![2, 3, 3]);
            r.note(vec![4]);
            r.advance(1);
            let moves = r.begin_moves(|_, _| true);
            assert!(moves.iter().all(|m| r.frame_of(m.expert).is_none()), "not before the copy has ended");
            r.end_moves(&moves);
            consistent(&r);
        }
        assert!([2, 3, 4].iter().all(|e| r.frame_of(*e).is_some()));
        assert_eq!(r.note(vec![2, 3, 0]), Uses { experts: 3, missing: 1 });
    }

    #[test]
    fn moves_of_a_round_are_bounded_and_nothing_leaves_that_must_stay() {
        let mut r = Residency::new(64, 16, 0..64);
        r.note((0..16).collect());
        r.advance(100);
        r.note((16..64).collect());
        let moves = r.begin_moves(|_, e| e >= 8);
        assert!(moves.len() <= MOVES);
        r.end_moves(&moves);
        assert!((0..8).all(|e| r.frame_of(e).is_some()));
        consistent(&r);
    }
}
