//! An evictor that knows what will be asked, to judge the real one by: the simulator gives it the whole trace.
//!
//! A snapshot is worth the tokens that its next use saves, over its bytes and the requests until then (Belady's rule,
//! weighted as for objects of several sizes and costs). A request uses the deepest snapshot it can, so what a deeper one
//! makes superfluous is worth nothing.

use super::tree::{SnapId, chains};
use crate::sim::TraceRequest;
use crate::state::PAGE_TOKENS;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Requests to come, and the snapshots that would serve them.
pub(crate) struct Future {
    prompts: Vec<Vec<u32>>,
    /// Requests that pass through a block, or a salt's root, and read the cache; ascending.
    through: HashMap<u64, Vec<usize>>,
    /// By request: tokens and snapshots that it could resume at.
    serving: Vec<BTreeSet<(usize, SnapId)>>,
    /// By snapshot: requests that could resume there.
    served: HashMap<SnapId, Vec<usize>>,
    /// Requests that have been admitted.
    now: Arc<AtomicUsize>,
}

impl Future {
    pub(crate) fn new(requests: &[TraceRequest], now: Arc<AtomicUsize>) -> Self {
        let mut through: HashMap<u64, Vec<usize>> = HashMap::new();
        for (r, request) in requests.iter().enumerate().filter(|(_, r)| !r.bypass && !r.reread) {
            let chains = chains(&request.salt, &request.prompt);
            chains.into_iter().for_each(|c| through.entry(c).or_default().push(r));
        }
        let serving = vec![BTreeSet::new(); requests.len()];
        let prompts = requests.iter().map(|r| r.prompt.clone()).collect();
        Future { prompts, through, serving, served: HashMap::new(), now }
    }

    /// A snapshot was taken after the block of `chain` at `depth` and its tail.
    pub(super) fn added(&mut self, id: SnapId, chain: u64, depth: usize, tail: &[u32]) {
        let tokens = depth * PAGE_TOKENS + tail.len();
        let list: &[usize] = self.through.get(&chain).map_or(&[], |l| l);
        let now = self.now.load(Ordering::Relaxed);
        let fits = |r: &&usize| {
            let p = &self.prompts[**r];
            **r >= now && p.len() > tokens && p[depth * PAGE_TOKENS..].starts_with(tail)
        };
        let requests: Vec<usize> = list.iter().filter(fits).copied().collect();
        for r in &requests {
            self.serving[*r].insert((tokens, id));
        }
        self.served.insert(id, requests);
    }

    /// It was dropped.
    pub(super) fn removed(&mut self, id: SnapId) {
        for r in self.served.remove(&id).unwrap_or_default() {
            self.serving[r].retain(|s| s.1 != id);
        }
    }

    /// Tokens that the next use saves, and requests until then.
    pub(super) fn next(&self, id: SnapId) -> Option<(usize, usize)> {
        let now = self.now.load(Ordering::Relaxed);
        let list = self.served.get(&id)?;
        list[list.partition_point(|r| *r < now)..].iter().find_map(|r| {
            let mut best = self.serving[*r].iter().rev();
            let own = best.next().filter(|s| s.1 == id)?;
            Some((own.0 - best.next().map_or(0, |s| s.0), 1 + r - now))
        })
    }

    /// Requests until a block is passed through again.
    pub(super) fn next_through(&self, chain: u64) -> Option<usize> {
        let now = self.now.load(Ordering::Relaxed);
        let list = self.through.get(&chain)?;
        list.get(list.partition_point(|r| *r < now)).map(|r| 1 + r - now)
    }
}
