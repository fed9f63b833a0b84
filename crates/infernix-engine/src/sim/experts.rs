//! Which experts to keep where the model is larger than the device: policies over a recorded or made-up routing.

use std::collections::{BTreeSet, HashMap};

/// An expert of the whole model: layer and number.
pub type Expert = (u32, u32);

/// What to give up when a frame is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPolicy {
    /// The one not used for longest.
    Lru,
    /// The one with the least uses per time since its last (engine.md 6.3: global, over evicted ones too).
    Lfru,
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

/// The frames of a device and the policy over them.
#[derive(Clone, Debug)]
pub struct ExpertCache {
    frames: usize,
    policy: ExpertPolicy,
    resident: HashMap<Expert, u64>,
    /// Uses and last use of every expert ever seen.
    seen: HashMap<Expert, (f64, u64)>,
    /// Resident experts by their key under [`ExpertPolicy::Lru`] and [`ExpertPolicy::Optimum`].
    order: BTreeSet<(u64, Expert)>,
    time: u64,
}

impl ExpertCache {
    /// An empty cache of `frames` frames.
    pub fn new(frames: usize, policy: ExpertPolicy) -> Self {
        let (resident, seen, order) = (HashMap::new(), HashMap::new(), BTreeSet::new());
        ExpertCache { frames, policy, resident, seen, order, time: 0 }
    }

    /// Uses an expert; `next` is when it is used again (only the optimum asks). Gives whether it was resident.
    pub fn touch(&mut self, expert: Expert, next: u64) -> bool {
        self.time += 1;
        let seen = self.seen.entry(expert).or_insert((0.0, 0));
        *seen = (seen.0 + 1.0, self.time);
        // Both orders give up their first: the oldest use, or the farthest next one.
        let key = if self.policy == ExpertPolicy::Optimum { u64::MAX - next } else { self.time };
        if let Some(old) = self.resident.insert(expert, key) {
            self.order.remove(&(old, expert));
            self.order.insert((key, expert));
            return true;
        }
        self.order.insert((key, expert));
        if self.resident.len() > self.frames {
            let victim = match self.policy {
                ExpertPolicy::Lfru => self.least_frequent(expert),
                _ => self.order.first().map(|o| o.1),
            };
            if let Some((victim, key)) = victim.and_then(|v| self.resident.remove_entry(&v)) {
                self.order.remove(&(key, victim));
            }
        }
        false
    }

    /// Of the residents not used for longest, the one with the least uses per age; ties to the lower id. Looking at 64
    /// of them is as good as looking at all: the rest were used lately.
    fn least_frequent(&self, new: Expert) -> Option<Expert> {
        let score = |e: &Expert| {
            let (uses, last) = self.seen[e];
            uses / (self.time - last + 1) as f64
        };
        let old = self.order.iter().map(|o| o.1).filter(|e| *e != new).take(64);
        old.min_by(|a, b| score(a).total_cmp(&score(b)).then(a.cmp(b)))
    }
}

/// Runs a routing (by call, layer, row) through a cache. Experts of one layer and call count once.
pub fn simulate(routing: &[Vec<Vec<Vec<u32>>>], frames: usize, policy: ExpertPolicy) -> ExpertHits {
    let mut uses: Vec<Expert> = Vec::new();
    for call in routing {
        for (layer, rows) in call.iter().enumerate() {
            let distinct: BTreeSet<u32> = rows.iter().flatten().copied().collect();
            uses.extend(distinct.into_iter().map(|e| (layer as u32, e)));
        }
    }
    let mut next = vec![u64::MAX >> 1; uses.len()];
    if policy == ExpertPolicy::Optimum {
        let mut later = HashMap::new();
        for (t, expert) in uses.iter().enumerate().rev() {
            if let Some(n) = later.insert(*expert, t as u64) {
                next[t] = n;
            }
        }
    }
    let mut cache = ExpertCache::new(frames, policy);
    let mut hits = ExpertHits { uses: uses.len() as u64, misses: 0 };
    for (expert, next) in uses.into_iter().zip(next) {
        hits.misses += u64::from(!cache.touch(expert, next));
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

    #[test]
    fn no_policy_beats_the_optimum_and_lfru_beats_lru() {
        let routing = synthetic_routing(1, 400, 8, 64, 6, 1.2, 0.3);
        for frames in [64, 128, 256] {
            let [lru, lfru, best] = [ExpertPolicy::Lru, ExpertPolicy::Lfru, ExpertPolicy::Optimum]
                .map(|p| simulate(&routing, frames, p).rate());
            assert!(best >= lfru && best >= lru, "{frames}: {lru} {lfru} {best}");
            assert!(lfru > lru - 0.01, "{frames}: {lru} {lfru}");
        }
        assert_eq!(simulate(&routing, 8 * 64, ExpertPolicy::Lru).misses, 8 * 64 - unused(&routing));
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
