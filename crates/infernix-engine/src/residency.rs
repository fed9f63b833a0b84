//! Which experts have a frame of device memory: the policy of the CUDA tiers and of the simulator, without the memory itself.
//!
//! An expert's worth is how often it was used lately, with a half-life in tokens. (Uses over age, LFRU, hits 0 to 5 % less where
//! moves are bounded: what was used just now and never before takes the moves.) Between rounds experts that were used without a frame take frames of those
//! worth less, a bounded number at a time, as each costs a copy.

/// Moves that may run beside one round: 8 records of 2.8 MB are 0.4 ms of a 55 GB/s link; a cache that misses most picks anyway
/// may spend more.
const MOVES: usize = 8;
pub(crate) const CATCH_UP: usize = 64;
/// More moves beside a round while frames are empty that served a prompt: 24 records are 1.3 ms of the link, which lies idle for
/// more than half of a decode round.
const RETURNING: usize = 24;
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
    /// Who had the frame.
    pub left: Option<usize>,
}

/// What one layer of a round used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// Different experts.
    pub experts: u64,
    /// Of these, without a frame.
    pub missing: u64,
}

/// A resident that keeps its place in device memory by going to another frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shift {
    /// In the flat numbering of all experts.
    pub expert: usize,
    /// Its frame so far.
    pub from: usize,
    /// Its frame from now on.
    pub to: usize,
}

/// Experts, frames, and who has which.
#[derive(Clone, Debug, Default)]
pub struct Residency {
    frame_of: Vec<Option<u32>>,
    owner: Vec<Option<u32>>,
    /// What may be done with each frame.
    use_of: Vec<Use>,
    score: Vec<f32>,
    used_at: Vec<f32>,
    /// Tokens so far.
    now: f32,
    /// Frames of least worth as last looked for, the least last.
    victims: Vec<usize>,
    /// Used without a frame since moves last began.
    wanted: Vec<usize>,
    /// Experts of most worth without a frame, the most last: they fill frames that have come back.
    returning: Vec<usize>,
}

/// What a frame is for at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Experts,
    /// An expert is on its way into it.
    Filling,
    /// Its memory serves something else.
    Closed,
}

impl Residency {
    /// `frames` frames for `experts` experts; the first ones of `order` own them.
    pub fn new(experts: usize, frames: usize, order: impl IntoIterator<Item = usize>) -> Self {
        let mut r = Residency {
            frame_of: vec![None; experts],
            owner: vec![None; frames],
            use_of: vec![Use::Experts; frames],
            score: vec![0.0; experts],
            used_at: vec![0.0; experts],
            ..Residency::default()
        };
        for (frame, expert) in order.into_iter().take(frames).enumerate() {
            r.own(frame, expert);
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

    /// Whether a frame is for experts at the moment.
    pub fn is_open(&self, frame: usize) -> bool {
        self.use_of[frame] != Use::Closed
    }

    /// Says how often an expert is used lately, as a saved ranking knows it.
    pub fn preset(&mut self, expert: usize, uses: f32) {
        self.score[expert] = uses;
    }

    /// Counts the experts that one layer of a round used; an expert counts once however many rows chose it.
    pub fn note(&mut self, mut experts: Vec<usize>) -> Uses {
        experts.sort_unstable();
        experts.dedup();
        let mut uses = Uses { experts: experts.len() as u64, missing: 0 };
        for e in experts {
            self.used(e, 1.0);
            if self.frame_of[e].is_none() {
                uses.missing += 1;
                self.wanted.push(e);
            }
        }
        uses
    }

    /// Counts what one layer of a prompt call of `rows` rows used, experts with their picks. They count as if spread over the call,
    /// which the clock has passed.
    pub fn note_prompt(&mut self, picks: impl IntoIterator<Item = (usize, usize)>, rows: usize) {
        let span = rows as f32 * std::f32::consts::LN_2 / HALF_LIFE;
        let kept = if span > 0.0 { (1.0 - (-span).exp()) / span } else { 1.0 };
        for (e, n) in picks {
            self.used(e, n as f32 * kept);
        }
    }

    fn used(&mut self, expert: usize, uses: f32) {
        self.score[expert] = self.worth(expert) + uses;
        self.used_at[expert] = self.now;
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

    /// Between rounds, when earlier moves have ended: experts that shall move, of those that `may_come`. Those whose frames they
    /// take have none from here on; `may_leave` may keep one where it is.
    pub fn begin_moves(
        &mut self,
        may_come: impl Fn(usize) -> bool,
        may_leave: impl Fn(&Self, usize) -> bool,
    ) -> Vec<Move> {
        let mut wanted = std::mem::take(&mut self.wanted);
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|e| self.frame_of[*e].is_none() && may_come(*e));
        wanted.sort_by(|a, b| self.worth(*b).total_cmp(&self.worth(*a)));
        let most = if wanted.len() > 2 * CATCH_UP { CATCH_UP } else { MOVES };
        wanted.truncate(most);
        // Frames that came back are worth more moves, by what is known of all experts.
        for _ in 0..RETURNING {
            let Some(e) = self.returning.pop() else { break };
            if self.frame_of[e].is_none() && may_come(e) && !wanted.contains(&e) {
                wanted.push(e);
            }
        }
        let mut moves = Vec::new();
        for expert in wanted {
            let Some(frame) = self.victim() else { break };
            let old = self.owner(frame);
            if old.is_some_and(|o| self.worth(o) >= self.worth(expert) || !may_leave(self, o)) {
                continue;
            }
            self.empty(frame);
            self.use_of[frame] = Use::Filling;
            moves.push(Move { expert, frame, left: old });
        }
        moves
    }

    /// Instead of [`Residency::begin_moves`] where earlier moves have not ended: what was used up to here has to be used again to move.
    pub fn skip_moves(&mut self) {
        self.wanted.clear();
    }

    /// The copies of these moves are complete: the experts are in their frames.
    pub fn end_moves(&mut self, moves: &[Move]) {
        for m in moves {
            self.own(m.frame, m.expert);
        }
    }

    /// Between rounds and with no move begun: from now on the memory of the frames that are not `open` serves something else. Their
    /// residents have no frame from here on, but for those that other residents, worth less, make room for: these have to
    /// be copied before anything is written to the frames that close. Frames that open again are empty.
    pub fn keep_open(
        &mut self,
        open: impl Fn(usize) -> bool,
        may_leave: impl Fn(&Self, usize) -> bool,
    ) -> Vec<Shift> {
        let (mut opened, mut homeless) = (0, Vec::new());
        for frame in 0..self.frames() {
            match (self.use_of[frame], open(frame)) {
                (Use::Closed, true) => {
                    self.use_of[frame] = Use::Experts;
                    opened += 1;
                }
                (Use::Experts | Use::Filling, false) => {
                    homeless.extend(self.owner(frame).map(|e| (e, frame)));
                    self.empty(frame);
                    self.use_of[frame] = Use::Closed;
                }
                _ => {}
            }
        }
        if opened > 0 {
            let absent = (0..self.frame_of.len()).filter(|e| self.frame_of[*e].is_none());
            let mut absent: Vec<(f32, usize)> = absent.map(|e| (self.worth(e), e)).collect();
            absent.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
            absent.truncate(opened);
            self.returning = absent.into_iter().rev().map(|(_, e)| e).collect();
        }
        let mut shifts = Vec::new();
        if opened > 0 || !homeless.is_empty() {
            self.victims.clear();
        }
        homeless.sort_by(|a, b| self.worth(b.0).total_cmp(&self.worth(a.0)));
        let worth_of = |r: &Self, frame: usize| r.owner(frame).map_or(-1.0, |e| r.worth(e));
        let mut homes: Vec<usize> = match homeless.is_empty() {
            true => Vec::new(),
            false => (0..self.frames()).filter(|f| self.use_of[*f] == Use::Experts).collect(),
        };
        homes.sort_by(|a, b| worth_of(self, *a).total_cmp(&worth_of(self, *b)));
        let mut homes = homes.into_iter();
        for (expert, from) in homeless {
            let Some(to) = homes.find(|f| self.owner(*f).is_none_or(|o| may_leave(self, o))) else { break };
            if worth_of(self, to) >= self.worth(expert) {
                // Nor is any of the rest worth more.
                break;
            }
            self.empty(to);
            self.own(to, expert);
            shifts.push(Shift { expert, from, to });
        }
        shifts
    }

    fn own(&mut self, frame: usize, expert: usize) {
        self.frame_of[expert] = Some(frame as u32);
        self.owner[frame] = Some(expert as u32);
        self.use_of[frame] = Use::Experts;
    }

    fn empty(&mut self, frame: usize) {
        if let Some(e) = self.owner[frame].take() {
            self.frame_of[e as usize] = None;
        }
    }

    fn victim(&mut self) -> Option<usize> {
        if self.victims.is_empty() {
            let worth = |o: &Option<u32>| o.map_or(-1.0, |e| self.worth(e as usize));
            let usable = self.owner.iter().zip(&self.use_of).enumerate();
            let usable = usable.filter(|(_, (_, u))| **u == Use::Experts);
            self.victims = least_worth(usable.map(|(f, (o, _))| (worth(o), f)));
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
            let moves = r.begin_moves(|_| true, |_, _| true);
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
        let moves = r.begin_moves(|_| true, |_, e| e >= 8);
        assert!(moves.len() <= MOVES);
        r.end_moves(&moves);
        assert!((0..8).all(|e| r.frame_of(e).is_some()));
        consistent(&r);
    }

    #[test]
    fn frames_that_close_keep_their_worthiest_residents_elsewhere_and_fill_again_when_they_open() {
        let mut r = Residency::new(20, 8, 0..8);
        (0..20).for_each(|e| r.preset(e, e as f32));
        // Residents 6 and 7 are worth more than 0 and 1; 1 must stay.
        let shifts = r.keep_open(|f| f < 6, |_, e| e != 1);
        assert_eq!(shifts, [Shift { expert: 7, from: 7, to: 0 }, Shift { expert: 6, from: 6, to: 2 }]);
        assert!([0, 2].iter().all(|e| r.frame_of(*e).is_none()));
        consistent(&r);
        for _ in 0..30 {
            r.note(vec![8]);
            let moves = r.begin_moves(|_| true, |_, _| true);
            assert!(moves.iter().all(|m| m.frame < 6), "closed frames take nobody");
            r.end_moves(&moves);
        }
        assert!(r.keep_open(|_| true, |_, _| true).is_empty());
        let moves = r.begin_moves(|e| e != 19, |_, _| true);
        assert_eq!(moves.iter().map(|m| (m.expert, m.frame > 5)).collect::<Vec<_>>(), [(18, true)]);
        r.note(vec![9, 19]);
        let more = r.begin_moves(|_| true, |_, _| true);
        assert!(more.iter().all(|m| moves.iter().all(|n| n.frame != m.frame)), "a frame is filled once");
        r.end_moves(&moves);
        consistent(&r);
    }
}
