//! Which experts to keep where the model is larger than the device: the engine's policy over a recorded or made-up routing,
//! beside the simplest one and the best that there can be.

use crate::residency::{Move, Residency};
use std::collections::{BTreeSet, HashMap};

/// An expert of the whole model: layer and number.
pub type Expert = (u32, u32);

/// What to give up when a frame is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPolicy {
    /// The one not used for longest.
    Lru,
    /// What the engine does: [`Residency`], whose moves take effect a round later and are bounded.
    Engine,
    /// The one whose next use is farthest: no policy misses less (Belady 1966).
    Optimum,
}

/// Uses and misses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertHits {
    /// Distinct experts per layer and call, summed.
    pub uses: u64,
    /// Of these, not resident.
    pub misses: u64,
}

impl ExpertHits {
    /// Share of uses that were resident.
    pub fn rate(&self) -> f64 {
        1.0 - self.misses as f64 / self.uses.max(1) as f64
    }
}

/// Frames of a device under a policy that brings every missing expert at once.
struct Frames {
    frames: usize,
    resident: HashMap<Expert, u64>,
    /// Residents by the key that says who goes first.
    order: BTreeSet<(u64, Expert)>,
}

impl Frames {
    /// Uses an expert; the resident of the least key makes room. Gives whether it was resident.
    fn touch(&mut self, expert: Expert, key: u64) -> bool {
        let old = self.resident.insert(expert, key);
        if let Some(old) = old {
            self.order.remove(&(old, expert));
        }
        self.order.insert((key, expert));
        if self.resident.len() > self.frames
            && let Some((_, victim)) = self.order.pop_first()
        {
            self.resident.remove(&victim);
        }
        old.is_some()
    }
}

/// Runs a routing (by call, layer, row) through a cache. Experts of one layer and call count once.
pub fn simulate(routing: &[Vec<Vec<Vec<u32>>>], frames: usize, policy: ExpertPolicy) -> ExpertHits {
    if policy == ExpertPolicy::Engine {
        return engine(routing, frames);
    }
    let mut uses: Vec<Expert> = Vec::new();
    for call in routing {
        for (layer, rows) in call.iter().enumerate() {
            let distinct: BTreeSet<u32> = rows.iter().flatten().copied().collect();
            uses.extend(distinct.into_iter().map(|e| (layer as u32, e)));
        }
    }
    // Both give up the least key: the oldest use, or the farthest next one.
    let mut keys: Vec<u64> = (0..uses.len() as u64).collect();
    if policy == ExpertPolicy::Optimum {
        let mut later = HashMap::new();
        for (t, expert) in uses.iter().enumerate().rev() {
            let next = later.insert(*expert, t as u64);
            // Never again goes before all others, the earliest of them first.
            keys[t] = next.map_or(t as u64, |n| u64::MAX - n);
        }
    }
    let mut cache = Frames { frames, resident: HashMap::new(), order: BTreeSet::new() };
    let mut hits = ExpertHits { uses: uses.len() as u64, misses: 0 };
    for (expert, key) in uses.into_iter().zip(keys) {
        hits.misses += u64::from(!cache.touch(expert, key));
    }
    hits
}

/// The engine's own policy, as its decode rounds run it.
fn engine(routing: &[Vec<Vec<Vec<u32>>>], frames: usize) -> ExpertHits {
    let layers = routing.iter().map(Vec::len).max().unwrap_or(0);
    let width = 1 + routing.iter().flatten().flatten().flatten().copied().max().unwrap_or(0) as usize;
    let ranges: Vec<_> = (0..layers).map(|l| l * width..(l + 1) * width).collect();
    let mut residency = Residency::new(layers * width, frames.min(layers * width), Residency::even(&ranges));
    let mut hits = ExpertHits::default();
    let mut moving: Vec<Move> = Vec::new();
    for call in routing {
        residency.end_moves(&moving);
        moving = residency.begin_moves(|_| true, |_, _| true);
        for (layer, rows) in call.iter().enumerate() {
            let ids = rows.iter().flatten().map(|e| layer * width + *e as usize);
            let uses = residency.note(ids.collect());
            hits.uses += uses.experts;
            hits.misses += uses.missing;
        }
        residency.advance(call.iter().map(Vec::len).max().unwrap_or(0));
    }
    hits
}

/// A routing like measured ones: Zipf(`skew`) over a permutation of each layer's experts, each row repeating a pick of the
/// row before it with chance `repeat` (decisions.md F).
pub fn synthetic_routing(
    seed: u64,
    calls: usize,
    layers: usize,
    experts: usize,
    top_k: usize,
    skew: f64,
    repeat: f64,
) -> Vec<Vec<Vec<Vec<u32>>>> {
    use crate::numerics::round::mix;
    let mut weights: Vec<f64> = (1..=experts).map(|r| (r as f64).powf(-skew)).collect();
    let mut sum = 0.0;
    for w in &mut weights {
        sum += *w;
        *w = sum;
    }
    let mut state = seed;
    let mut dice = move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        (mix(state) >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut last: Vec<Vec<u32>> = vec![Vec::new(); layers];
    let mut out = Vec::with_capacity(calls);
    for _ in 0..calls {
        let mut call = Vec::with_capacity(layers);
        for (layer, last) in last.iter_mut().enumerate() {
            let mut picks: Vec<u32> = last.iter().copied().filter(|_| dice() < repeat).collect();
            while picks.len() < top_k.min(experts) {
                let at = dice() * sum;
                let rank = weights.partition_point(|w| *w <= at).min(experts - 1);
                // An affine permutation by layer: an odd step over a power of two, else a shift.
                let shift = (mix(seed ^ layer as u64) % experts as u64) as usize;
                let expert = ((rank + shift) % experts) as u32;
                if !picks.contains(&expert) {
                    picks.push(expert);
                }
            }
            last.clone_from(&picks);
            call.push(vec![picks]);
        }
        out.push(call);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The engine may move only a few experts a round, so that on a short run it is behind policies that bring every missing
    /// one at once; over a longer one it must be near them, and nothing beats the optimum.
    #[test]
    fn the_engines_expert_policy_is_near_lru_in_the_long_run_and_nothing_beats_the_optimum() {
        let routing = synthetic_routing(1, 4000, 8, 64, 6, 1.2, 0.3);
        for frames in [64, 128, 256] {
            let [lru, own, best] = [ExpertPolicy::Lru, ExpertPolicy::Engine, ExpertPolicy::Optimum]
                .map(|p| simulate(&routing, frames, p).rate());
            assert!(best >= own && best >= lru, "{frames}: {lru} {own} {best}");
            assert!(own > lru - 0.01, "{frames}: {lru} {own}");
            assert!(own > 0.75 * best, "{frames}: {own} {best}");
        }
        assert_eq!(simulate(&routing, 8 * 64, ExpertPolicy::Lru).misses, 8 * 64 - unused(&routing));
        assert_eq!(simulate(&routing, 8 * 64, ExpertPolicy::Engine).misses, 0);
    }

    fn unused(routing: &[Vec<Vec<Vec<u32>>>]) -> u64 {
        let mut all = BTreeSet::new();
        for call in routing {
            for (l, rows) in call.iter().enumerate() {
                all.extend(rows.iter().flatten().map(|e| (l, *e)));
            }
        }
        8 * 64 - all.len() as u64
    }

    #[test]
    fn beladys_example_has_its_known_misses() {
        // 1 2 3 4 1 2 5 1 2 3 4 5 with three frames: 7 misses at best, 10 for LRU.
        let call = |e: u32| vec![vec![vec![e]]];
        let routing: Vec<_> = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5].into_iter().map(call).collect();
        assert_eq!(simulate(&routing, 3, ExpertPolicy::Optimum).misses, 7);
        assert_eq!(simulate(&routing, 3, ExpertPolicy::Lru).misses, 10);
    }
}
