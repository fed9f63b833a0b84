//! Giving up what is worth least.
//!
//! A snapshot's worth is GreedyDual-Size-Frequency (Cherkasova 1998): `L + (1 + hits) x cost / size`, cost = tokens that would
//! have to be read again, size = its state and the blocks that only it needs, L = worth of the last one dropped, so that
//! what is not used ages. Superseded snapshots go first. Blocks are taken oldest first and deepest first, blocks
//! without a snapshot below before all others.

use super::tree::{HostSnap, NodeId, Snap, SnapId};
use super::{CacheEvent, PrefixCache};
use crate::error::EngineError;
use crate::sched::Runner;
use crate::state::PAGE_TOKENS;
use std::cmp::Reverse;

impl<S: Clone> PrefixCache<S> {
    /// Worth of a snapshot.
    pub(super) fn value(&self, id: SnapId) -> f64 {
        let (s, cost) = (self.tree.snap(id), self.tree.cost(id));
        let blocks = (cost / PAGE_TOKENS) as u64 * self.limits.page_bytes;
        if let Some(future) = &self.future {
            let size = (s.bytes + blocks).max(1) as f64;
            return future.next(id).map_or(0.0, |(tokens, until)| tokens as f64 / (size * until as f64));
        }
        s.floor + f64::from(1 + s.hits) * cost as f64 / (s.bytes + blocks).max(1) as f64
    }

    /// Whether a deeper snapshot has taken its place; who knows the future need not guess.
    fn superseded(&self, id: SnapId) -> bool {
        self.tree.snap(id).superseded && self.future.is_none()
    }

    /// The least valuable snapshot of those that `which` admits.
    fn least(&self, which: impl Fn(SnapId) -> bool) -> Option<SnapId> {
        let key = |id: &SnapId| {
            let superseded = self.superseded(*id);
            (!superseded, if superseded { self.tree.snap(*id).used as f64 } else { self.value(*id) })
        };
        self.tree
            .snap_ids()
            .filter(|id| self.tree.snap(*id).pins == 0 && which(*id))
            .min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal))
    }

    /// Makes at least `n` pages free, if lanes do not hold them.
    ///
    /// # Errors
    /// [`EngineError::OutOfPages`] where that is impossible.
    pub(crate) fn free_pages<R: Runner<State = S>>(
        &mut self,
        runner: &mut R,
        n: usize,
    ) -> Result<(), EngineError> {
        if runner.pool().available() >= n {
            return Ok(());
        }
        // Some more than needed, so that the index is searched once for many.
        let goal = n + (self.limits.pages / 32).min(64);
        let mut victims: Vec<(bool, u64, Reverse<usize>, NodeId)> = Vec::new();
        for id in self.tree.node_ids() {
            let node = self.tree.node(id);
            if node.page.is_some_and(|p| !runner.pool().is_shared(p)) {
                let used = self.future.as_ref().map_or(node.used, |f| {
                    u64::MAX - f.next_through(node.chain).map_or(u64::MAX, |n| n as u64)
                });
                victims.push((node.live > 0, used, Reverse(node.depth), id));
            }
        }
        victims.sort_unstable();
        for (_, _, _, id) in victims {
            if runner.pool().available() >= goal {
                break;
            }
            // Dropping one node may have taken others with it.
            if self.tree.nodes[id].as_ref().is_some_and(|node| node.page.is_some()) {
                self.evict_block(runner, id);
            }
        }
        while runner.pool().available() < n {
            let own_tail = |id: &SnapId| {
                let page = self.tree.snap(*id).device.as_ref().and_then(|d| d.page);
                page.is_some_and(|p| !runner.pool().is_shared(p))
            };
            let tails: Vec<SnapId> = self.tree.snap_ids().filter(own_tail).collect();
            match self.least(|id| tails.contains(&id)) {
                Some(id) => self.demote(runner, id),
                None => return Err(EngineError::OutOfPages { pages: self.limits.pages }),
            }
        }
        Ok(())
    }

    /// Takes a block's page away; a block that snapshots need goes to RAM if it can.
    pub(super) fn evict_block<R: Runner<State = S>>(&mut self, runner: &mut R, id: NodeId) {
        let needed = |c: &Self| c.tree.node(id).live > 0 && c.tree.node(id).host.is_none();
        if needed(self) {
            let fits = self.room(runner, self.limits.page_bytes, id, f64::INFINITY);
            // Making room may have cost the last snapshot that needs the block.
            if needed(self) {
                let page = self.tree.node(id).page.filter(|_| fits);
                let Some(words) = page.and_then(|p| runner.save_page(p).ok()) else {
                    return self.drop_subtree(runner, id);
                };
                self.host_bytes += self.limits.page_bytes;
                self.tree.node_mut(id).host = Some(words.into());
            }
        }
        let node = self.tree.node_mut(id);
        if let Some(page) = node.page.take() {
            runner.pool().release(page);
        }
        if node.host.is_none() {
            self.events.push(CacheEvent::DroppedBlock);
        }
        self.tree.prune(id);
    }

    /// Drops a block with everything that cannot be used without it.
    fn drop_subtree<R: Runner<State = S>>(&mut self, runner: &mut R, top: NodeId) {
        let mut order = vec![top];
        let mut next = 0;
        while next < order.len() {
            order.extend_from_slice(&self.tree.node(order[next]).children);
            next += 1;
        }
        for id in order.into_iter().rev() {
            // Pruning a child takes an emptied parent along.
            if self.tree.nodes[id].is_none() {
                continue;
            }
            for snap in self.tree.node(id).snaps.clone() {
                if self.tree.snap(snap).pins == 0 {
                    self.drop_snap_only(runner, snap);
                }
            }
            self.drop_host_block(id);
            let node = self.tree.node_mut(id);
            if let Some(page) = node.page.take() {
                runner.pool().release(page);
                self.events.push(CacheEvent::DroppedBlock);
            }
            self.tree.prune(id);
        }
    }

    fn drop_host_block(&mut self, id: NodeId) {
        if self.tree.node_mut(id).host.take().is_some() {
            self.host_bytes -= self.limits.page_bytes;
        }
    }

    /// Removes a snapshot from every tier, and the blocks that only it needed from RAM.
    pub(super) fn drop_snap<R: Runner<State = S>>(&mut self, runner: &mut R, id: SnapId) {
        let node = self.drop_snap_only(runner, id);
        self.drop_dead_host(node);
        self.tree.prune(node);
    }

    fn remove_snap(&mut self, id: SnapId) -> Snap<S> {
        if let Some(future) = &mut self.future {
            future.removed(id);
        }
        self.tree.remove_snap(id)
    }

    fn drop_snap_only<R: Runner<State = S>>(&mut self, runner: &mut R, id: SnapId) -> NodeId {
        self.events.push(CacheEvent::DroppedSnapshot { tokens: self.tree.frontier(id) });
        self.tree.note_lost(id);
        let snap = self.remove_snap(id);
        if let Some(device) = snap.device {
            self.device_bytes -= snap.bytes;
            if let Some(page) = device.page {
                runner.pool().release(page);
            }
        }
        if let Some(host) = snap.host {
            self.host_bytes -= host.bytes;
        }
        snap.node
    }

    /// Drops RAM copies of blocks at and above `node` that no snapshot needs.
    pub(super) fn drop_dead_host(&mut self, node: NodeId) {
        let mut at = Some(node);
        while let Some(id) = at {
            if self.tree.node(id).live > 0 {
                return;
            }
            at = self.tree.node(id).parent;
            self.drop_host_block(id);
        }
    }

    /// Brings the device's snapshots within their budget.
    pub(super) fn fit_device<R: Runner<State = S>>(&mut self, runner: &mut R) {
        while self.device_bytes > self.options.device_bytes {
            match self.least(|id| self.tree.snap(id).device.is_some()) {
                Some(id) => self.demote(runner, id),
                None => return,
            }
        }
    }

    /// Moves a snapshot from the device to RAM, or drops it.
    fn demote<R: Runner<State = S>>(&mut self, runner: &mut R, id: SnapId) {
        if self.tree.snap(id).host.is_none() {
            let s = self.tree.snap(id);
            let needed = s.bytes + self.limits.page_bytes * u64::from(!s.tail.is_empty());
            let fits = self.room(runner, needed, s.node, self.value(id));
            let Some(host) = fits.then(|| self.save(runner, id)).flatten() else {
                return self.drop_snap(runner, id);
            };
            self.host_bytes += host.bytes;
            self.tree.snap_mut(id).host = Some(host);
        }
        let bytes = self.tree.snap(id).bytes;
        if let Some(device) = self.tree.snap_mut(id).device.take() {
            self.device_bytes -= bytes;
            if let Some(page) = device.page {
                runner.pool().release(page);
            }
        }
    }

    pub(super) fn save<R: Runner<State = S>>(&self, runner: &mut R, id: SnapId) -> Option<HostSnap> {
        let device = self.tree.snap(id).device.as_ref()?;
        let state = runner.save_state(&device.image.state).ok()?;
        let page = match device.page {
            Some(page) => Some(runner.save_page(page).ok()?.into()),
            None => None,
        };
        let bytes = self.tree.snap(id).bytes + self.limits.page_bytes * u64::from(page.is_some());
        Some(HostSnap { image: device.image.map(state.into()), page, bytes })
    }

    /// Whether RAM has more room without a snapshot: it has a copy there, or blocks that only it needs are there.
    fn fills_ram(&self, id: SnapId) -> bool {
        let s = self.tree.snap(id);
        let own = |at: &NodeId| self.tree.node(*at).live == 1;
        let mut blocks = std::iter::successors(Some(s.node), |at| self.tree.node(*at).parent).take_while(own);
        s.host.is_some() || blocks.any(|at| self.tree.node(at).host.is_some())
    }

    /// Makes room for `bytes` in RAM, for something worth `worth` at `keep`. Gives up superseded snapshots, then the least
    /// valuable, if they are worth less; never one at `keep`. A snapshot of the device whose blocks are in RAM is such a one
    /// too, or RAM would be full of what nobody asks for any more. RAM holds no blocks that no snapshot needs.
    fn room<R: Runner<State = S>>(&mut self, runner: &mut R, bytes: u64, keep: NodeId, worth: f64) -> bool {
        if bytes > self.options.host_bytes {
            return false;
        }
        while self.host_bytes + bytes > self.options.host_bytes {
            let other = |id: SnapId| self.tree.snap(id).node != keep && self.fills_ram(id);
            let Some(id) = self.least(other) else { return false };
            let (value, superseded) = (self.value(id), self.superseded(id));
            if !superseded && value > worth {
                // What is refused ages the others as what is dropped does, or what was once worth much would stay for ever.
                if worth.is_finite() {
                    self.inflation = self.inflation.max(worth);
                }
                return false;
            }
            if !superseded {
                self.inflation = self.inflation.max(value);
            }
            self.tree.node_mut(keep).pins += 1;
            self.drop_snap(runner, id);
            self.tree.node_mut(keep).pins -= 1;
        }
        true
    }
}
