//! The prefix cache of a hybrid model.
//!
//! Attention layers keep KV of every token; recurrent layers keep one state, which can be resumed only where a copy of it
//! was taken. So there are many content-addressed KV blocks and few snapshots ([`tree`]), and a prompt resumes at its
//! deepest snapshot. Blocks and snapshots live in the backend's memory, in RAM, or both; each tier has its budget and
//! gives up what is worth least ([`evict`]); a file carries the RAM tier over a restart ([`file`]).

mod evict;
mod file;
mod future;
mod habit;
mod miss;
mod tree;

pub use file::MAGIC;
pub(crate) use future::Future;
pub use habit::{Habit, habit};
pub use miss::{Excerpt, Miss, MissCause};
pub(crate) use tree::{Found, Kind, SnapId, chains, common};

use crate::driver::Sequence;
use crate::error::EngineError;
use crate::sched::{CacheOptions, CacheStatus, Limits, Runner, TierStatus};
use crate::state::PAGE_TOKENS;
use tree::{DeviceSnap, NodeId, Snap, Tree};

/// Where a running sequence stands in the index: the node of its last published block. Pins it.
#[derive(Debug)]
pub(crate) struct Cursor {
    node: NodeId,
}

/// What happened, for counters and traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheEvent {
    Snapshot { tokens: usize, bytes: u64 },
    DroppedSnapshot { tokens: usize },
    DroppedBlock,
    Restored { bytes: u64 },
}

/// Blocks, snapshots and their tiers.
pub(crate) struct PrefixCache<S> {
    options: CacheOptions,
    limits: Limits,
    tree: Tree<S>,
    device_bytes: u64,
    host_bytes: u64,
    file: TierStatus,
    /// It was emptied by an order, which the file is to follow.
    cleared: bool,
    /// The evictor's inflation: the value of the last snapshot dropped.
    inflation: f64,
    /// What will be asked, where a simulation knows it.
    pub future: Option<Future>,
    /// Events since they were last taken.
    pub events: Vec<CacheEvent>,
}

impl<S: Clone> PrefixCache<S> {
    pub(crate) fn new(mut options: CacheOptions, limits: Limits) -> Self {
        if !limits.saves {
            options.host_bytes = 0;
        }
        PrefixCache {
            options,
            limits,
            tree: Tree::new(),
            device_bytes: 0,
            host_bytes: 0,
            file: TierStatus::default(),
            cleared: false,
            inflation: 0.0,
            future: None,
            events: Vec::new(),
        }
    }

    /// Looks up a text whose state may be resumed after at most `limit` tokens.
    pub(crate) fn find(&mut self, salt: &str, ids: &[u32], limit: usize) -> Found {
        self.tree.find(salt, ids, limit)
    }

    /// Remembers that a prompt was asked, so that asking it again is not taken for something new.
    pub(crate) fn served(&mut self, salt: &str, prompt: &[u32]) {
        self.tree.served(salt, prompt);
    }

    /// Starts following an empty sequence.
    pub(crate) fn start(&mut self, salt: &str) -> Cursor {
        let node = self.tree.root(salt);
        self.tree.node_mut(node).pins += 1;
        Cursor { node }
    }

    /// Stops following a sequence.
    pub(crate) fn stop(&mut self, cursor: Cursor) {
        self.tree.node_mut(cursor.node).pins -= 1;
        self.tree.prune(cursor.node);
    }

    /// Drops a snapshot and all that only it needs.
    pub(crate) fn forget<R: Runner<State = S>>(&mut self, runner: &mut R, id: SnapId) {
        self.drop_snap(runner, id);
    }

    /// Drops every snapshot that no request uses, and the blocks that are then good for nothing; gives the number of
    /// snapshots.
    pub(crate) fn clear<R: Runner<State = S>>(&mut self, runner: &mut R) -> usize {
        let idle: Vec<SnapId> = self.tree.snap_ids().filter(|id| self.tree.snap(*id).pins == 0).collect();
        for id in &idle {
            self.drop_snap(runner, *id);
        }
        let blocks: Vec<NodeId> = self.tree.node_ids().collect();
        for id in blocks {
            // Dropping one node may have taken others with it.
            let Some(node) = &self.tree.nodes[id] else { continue };
            if node.live == 0 && node.page.is_some_and(|p| !runner.pool().is_shared(p)) {
                self.evict_block(runner, id);
            }
        }
        // It was not for want of room.
        self.tree.forget_lost();
        self.cleared = true;
        idle.len()
    }

    fn move_to(&mut self, cursor: &mut Cursor, node: NodeId) {
        self.tree.node_mut(node).pins += 1;
        self.tree.node_mut(cursor.node).pins -= 1;
        let old = std::mem::replace(&mut cursor.node, node);
        self.tree.prune(old);
    }

    /// Pages that [`PrefixCache::attach`] would have to take.
    pub(crate) fn pages_to_bring(&self, found: &Found) -> usize {
        let blocks = found.path[1..].iter().filter(|id| self.tree.node(**id).page.is_none()).count();
        let tail = found.snap.is_some_and(|id| {
            let s = self.tree.snap(id);
            s.device.is_none() && !s.tail.is_empty()
        });
        blocks + usize::from(tail)
    }

    /// Resumes an empty sequence at what was found. False: it could not be brought to the backend, nothing has changed.
    ///
    /// # Errors
    /// The state did not take; the sequence must be closed.
    pub(crate) fn attach<R: Runner<State = S>>(
        &mut self,
        runner: &mut R,
        found: &Found,
        s: &mut Sequence,
        cursor: &mut Cursor,
        ids: &[u32],
    ) -> Result<bool, EngineError> {
        let Some(snap) = found.snap else { return Ok(false) };
        let last = found.path[found.path.len() - 1];
        // Nothing of the path may be evicted while pages are sought for the rest of it.
        self.tree.node_mut(last).pins += 1;
        self.tree.snap_mut(snap).pins += 1;
        let mut pages = Vec::with_capacity(found.path.len());
        let result = self.bring(runner, found, snap, &mut pages);
        self.tree.node_mut(last).pins -= 1;
        self.tree.snap_mut(snap).pins -= 1;
        match result {
            Ok(image) => {
                runner.attach(s, &ids[..found.tokens], pages, &image)?;
                self.move_to(cursor, last);
                let (tick, inflation) = (self.tree.tick, self.inflation);
                let snap = self.tree.snap_mut(snap);
                (snap.used, snap.floor) = (tick, inflation);
                snap.hits += 1;
                Ok(true)
            }
            Err(_) => {
                pages.into_iter().for_each(|p| runner.pool().release(p));
                Ok(false)
            }
        }
    }

    /// Collects the pages of a path, held once more, and the state at its end.
    fn bring<R: Runner<State = S>>(
        &mut self,
        runner: &mut R,
        found: &Found,
        snap: SnapId,
        pages: &mut Vec<u32>,
    ) -> Result<crate::driver::Image<S>, EngineError> {
        // Pages already there are held first: a page held twice is not evicted.
        for id in &found.path[1..] {
            if let Some(page) = self.tree.node(*id).page {
                runner.pool().retain(page);
            }
        }
        let mut failed = None;
        for id in &found.path[1..] {
            if let Some(page) = self.tree.node(*id).page {
                pages.push(page);
                continue;
            }
            if failed.is_some() {
                continue;
            }
            match self.load_block(runner, *id) {
                Ok(page) => pages.push(page),
                Err(e) => failed = Some(e),
            }
        }
        if let Some(e) = failed {
            return Err(e);
        }
        let s = self.tree.snap(snap);
        if let Some(device) = &s.device {
            if let Some(page) = device.page {
                runner.pool().retain(page);
                pages.push(page);
            }
            return Ok(device.image.clone());
        }
        if s.host.as_ref().is_some_and(|h| h.page.is_some()) {
            self.free_pages(runner, 1)?;
            let page = runner.pool().take()?;
            pages.push(page);
            if let Some(words) = self.tree.snap(snap).host.as_ref().and_then(|h| h.page.as_ref()) {
                runner.load_page(page, words)?;
                self.events.push(CacheEvent::Restored { bytes: self.limits.page_bytes });
            }
        }
        let Some(host) = &self.tree.snap(snap).host else {
            return Err(EngineError::Round("a snapshot without a copy".into()));
        };
        self.events.push(CacheEvent::Restored { bytes: self.tree.snap(snap).bytes });
        let state = runner.load_state(&host.image.state)?;
        Ok(host.image.map(state))
    }

    /// Brings a block from RAM to a page of its own; the caller gets a hold of it too.
    fn load_block<R: Runner<State = S>>(&mut self, runner: &mut R, id: NodeId) -> Result<u32, EngineError> {
        self.free_pages(runner, 1)?;
        let page = runner.pool().take()?;
        let Some(words) = &self.tree.node(id).host else {
            runner.pool().release(page);
            return Err(EngineError::Round("a block without a copy".into()));
        };
        if let Err(e) = runner.load_page(page, words) {
            runner.pool().release(page);
            return Err(e);
        }
        self.events.push(CacheEvent::Restored { bytes: self.limits.page_bytes });
        runner.pool().retain(page);
        self.tree.node_mut(id).page = Some(page);
        Ok(page)
    }

    /// Publishes the blocks of a sequence up to `tokens`, which must not change any more.
    pub(crate) fn publish<R: Runner<State = S>>(
        &mut self,
        runner: &mut R,
        s: &Sequence,
        cursor: &mut Cursor,
        tokens: usize,
    ) {
        let mut at = cursor.node;
        for block in self.tree.node(at).depth..tokens / PAGE_TOKENS {
            at = self.tree.child_or_new(at, &s.ids[block * PAGE_TOKENS..(block + 1) * PAGE_TOKENS]);
            let (tick, page) = (self.tree.tick, s.pages[block]);
            let n = self.tree.node_mut(at);
            n.used = tick;
            if n.page.is_none() {
                runner.pool().retain(page);
                n.page = Some(page);
            }
        }
        if at != cursor.node {
            self.move_to(cursor, at);
        }
    }

    /// Takes a snapshot of a sequence where it stands, unless there is one.
    pub(crate) fn snapshot<R: Runner<State = S>>(
        &mut self,
        runner: &mut R,
        s: &mut Sequence,
        cursor: &mut Cursor,
        kind: Kind,
    ) -> Result<Option<SnapId>, EngineError> {
        if s.is_empty() {
            return Ok(None);
        }
        // First, since it completes what the drafter keeps of these tokens: a block that is published before has its page copied
        // for that, if there is one left, and others get the incomplete one.
        let image = runner.image(s)?;
        self.publish(runner, s, cursor, s.len());
        let tail = s.ids[s.len() / PAGE_TOKENS * PAGE_TOKENS..].to_vec();
        let same = self.tree.node(cursor.node).snaps.iter().copied();
        if let Some(id) = same.into_iter().find(|id| self.tree.snap(*id).tail == tail) {
            let (tick, inflation) = (self.tree.tick, self.inflation);
            let snap = self.tree.snap_mut(id);
            (snap.used, snap.floor, snap.superseded) = (tick, inflation, false);
            return Ok(Some(id));
        }
        let page = (!tail.is_empty()).then(|| s.pages[s.len() / PAGE_TOKENS]);
        if let Some(page) = page {
            runner.pool().retain(page);
        }
        let bytes = runner.state_bytes(&image);
        let id = self.tree.add_snap(Snap {
            node: cursor.node,
            tail,
            kind,
            device: Some(DeviceSnap { image, page }),
            host: None,
            bytes,
            gap: 0,
            above: None,
            hits: 0,
            floor: self.inflation,
            superseded: false,
            used: 0,
            pins: 0,
        });
        if let Some(future) = &mut self.future {
            let (node, snap) = (self.tree.node(cursor.node), self.tree.snap(id));
            future.added(id, node.chain, node.depth, &snap.tail);
        }
        self.device_bytes += bytes;
        self.events.push(CacheEvent::Snapshot { tokens: s.len(), bytes });
        self.fit_device(runner);
        Ok(self.tree.snaps[id].is_some().then_some(id))
    }

    /// A conversation went on past `resumed` to a deeper snapshot: what it resumed from, and what its own last prompt left
    /// on the way there, is what eviction takes first. The shallowest stays: the head of the prompt is others' too.
    pub(crate) fn supersede(&mut self, cursor: &Cursor, resumed: usize) {
        let mut at = Some(cursor.node);
        while let Some(id) = at {
            let n = self.tree.node(id);
            at = n.parent;
            for snap in n.snaps.clone() {
                let f = self.tree.frontier(snap);
                let s = self.tree.snap_mut(snap);
                if f <= resumed && s.above.is_some() && s.hits <= 1 {
                    s.superseded = true;
                }
            }
        }
    }

    /// Keeps a snapshot from being dropped, for a paused request.
    pub(crate) fn pin(&mut self, id: SnapId, on: bool) {
        let s = self.tree.snap_mut(id);
        s.pins = if on { s.pins + 1 } else { s.pins - 1 };
    }

    /// Where the tiers stand.
    pub(crate) fn status(&self) -> CacheStatus {
        let mut c = CacheStatus { file: self.file, ..CacheStatus::default() };
        for id in self.tree.node_ids() {
            let n = self.tree.node(id);
            c.device.blocks += usize::from(n.page.is_some());
            c.host.blocks += usize::from(n.host.is_some());
        }
        for id in self.tree.snap_ids() {
            c.device.snapshots += usize::from(self.tree.snap(id).device.is_some());
            c.host.snapshots += usize::from(self.tree.snap(id).host.is_some());
        }
        c.device.bytes = self.device_bytes + c.device.blocks as u64 * self.limits.page_bytes;
        c.device.budget = self.options.device_bytes + self.limits.pages as u64 * self.limits.page_bytes;
        (c.host.bytes, c.host.budget) = (self.host_bytes, self.options.host_bytes);
        c.file.budget = if self.options.file.is_some() { self.options.file_bytes } else { 0 };
        c
    }

    /// Pages that eviction could free: held by the cache alone.
    pub(crate) fn idle_pages<R: Runner<State = S>>(&self, runner: &mut R) -> usize {
        let blocks = self.tree.node_ids().filter_map(|id| self.tree.node(id).page);
        let tails = self.tree.snap_ids().filter_map(|id| self.tree.snap(id).device.as_ref()?.page);
        let pool = runner.pool();
        blocks.chain(tails).filter(|p| !pool.is_shared(*p)).count()
    }

    /// Whether all counts agree with what is there.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (mut device, mut host) = (0, 0);
        for id in self.tree.snap_ids() {
            let s = self.tree.snap(id);
            device += if s.device.is_some() { s.bytes } else { 0 };
            host += s.host.as_ref().map_or(0, |h| h.bytes);
            if s.device.is_none() && s.host.is_none() {
                return Err(format!("snapshot {id} has no copy"));
            }
            if s.pins > 0 {
                return Err(format!("snapshot {id} is pinned {} times", s.pins));
            }
        }
        for id in self.tree.node_ids() {
            let n = self.tree.node(id);
            host += n.host.as_ref().map_or(0, |_| self.limits.page_bytes);
            let below: usize = n.children.iter().map(|c| self.tree.node(*c).live).sum();
            if n.live != below + n.snaps.len() {
                return Err(format!(
                    "node {id} counts {} snapshots, {} are there",
                    n.live,
                    below + n.snaps.len()
                ));
            }
            if n.pins > 0 {
                return Err(format!("node {id} is pinned {} times", n.pins));
            }
        }
        if (device, host) != (self.device_bytes, self.host_bytes) {
            return Err(format!(
                "{device} and {host} bytes are cached, {} and {} are counted",
                self.device_bytes, self.host_bytes
            ));
        }
        if host > self.options.host_bytes {
            return Err(format!("{host} bytes are in RAM, {} are allowed", self.options.host_bytes));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
