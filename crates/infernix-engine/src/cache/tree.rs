//! The index: which texts have KV blocks, and where snapshots of the recurrent state stand on them.
//!
//! A node is a block of [`PAGE_TOKENS`] ids after the ids of its ancestors; there is one root per salt. Hashes only find a
//! child, the ids themselves decide. A snapshot stands on a node, up to 63 ids further (its tail). A prefix can be
//! resumed where a snapshot stands and every block above it is in some tier.

use super::miss::{Excerpt, Miss, MissCause};
use crate::driver::Image;
use crate::state::PAGE_TOKENS;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Index of a node.
pub(crate) type NodeId = usize;
/// Index of a snapshot.
pub(crate) type SnapId = usize;

/// Why a snapshot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The request asked for it, or another request diverged there.
    Marker,
    /// End of a prompt.
    Prompt,
    /// On the way through a long prompt.
    Ladder,
    /// End of an answer, or where a request was cancelled or paused.
    End,
}

/// A block of the text.
#[derive(Debug)]
pub(super) struct Node {
    pub parent: Option<NodeId>,
    /// Blocks from the root, this one included; 0 for a root.
    pub depth: usize,
    pub ids: Box<[u32]>,
    /// Hash of all ids from the root.
    pub chain: u64,
    pub page: Option<u32>,
    pub host: Option<Box<[u8]>>,
    pub children: Vec<NodeId>,
    pub snaps: Vec<SnapId>,
    /// Snapshots on this node and below.
    pub live: usize,
    /// Running sequences that stand on this node.
    pub pins: usize,
    /// When it was last used.
    pub used: u64,
}

/// State after a text.
pub(super) struct Snap<S> {
    pub node: NodeId,
    pub tail: Vec<u32>,
    pub kind: Kind,
    pub device: Option<DeviceSnap<S>>,
    pub host: Option<HostSnap>,
    /// Bytes of the state.
    pub bytes: u64,
    /// Tokens since the nearest snapshot above: what its loss costs.
    pub gap: usize,
    /// That snapshot.
    pub above: Option<SnapId>,
    pub hits: u32,
    /// The evictor's inflation when it was last used.
    pub floor: f64,
    /// A deeper snapshot of the same conversation exists.
    pub superseded: bool,
    /// When it was last used.
    pub used: u64,
    /// A paused request needs it.
    pub pins: usize,
}

pub(super) struct DeviceSnap<S> {
    pub image: Image<S>,
    /// Page of the tail's KV.
    pub page: Option<u32>,
}

pub(super) struct HostSnap {
    pub image: Image<Box<[u8]>>,
    /// Words of the tail's page.
    pub page: Option<Box<[u8]>>,
    /// Bytes of both.
    pub bytes: u64,
}

/// What is known of a prompt.
#[derive(Debug)]
pub(crate) struct Found {
    /// Blocks from the root to the snapshot.
    pub path: Vec<NodeId>,
    /// Where to resume.
    pub snap: Option<SnapId>,
    /// Tokens the snapshot stands after.
    pub tokens: usize,
    /// Prompt tokens in common with some cached text.
    pub shared: usize,
    /// Why not more of the prompt can be resumed.
    pub miss: Option<Miss>,
}

pub(crate) struct Tree<S> {
    pub(super) nodes: Vec<Option<Node>>,
    free_nodes: Vec<NodeId>,
    pub(super) snaps: Vec<Option<Snap<S>>>,
    free_snaps: Vec<SnapId>,
    children: HashMap<(NodeId, u64), Vec<NodeId>>,
    roots: HashMap<String, NodeId>,
    /// Chains of dropped blocks, to tell what was known from what is new.
    ghosts: HashSet<u64>,
    /// Dropped snapshots, by the chain of their block: length and hash of their tails.
    lost: HashMap<u64, Vec<(usize, u64)>>,
    /// Whole prompts by salt and text: what ends within a block leaves nothing that could be compared.
    served: HashSet<u64>,
    hash: fn(u64, &[u32]) -> u64,
    pub(super) tick: u64,
}

/// Dropped blocks, blocks with dropped snapshots, and whole prompts, to remember.
const GHOSTS: usize = 1 << 16;
/// Ids shown on each side of a divergence: an identifier of 26 characters, of which each may be a token, and its name.
const EXCERPT: usize = 32;

fn hash(chain: u64, ids: &[u32]) -> u64 {
    let mut h = DefaultHasher::new();
    (chain, ids).hash(&mut h);
    h.finish()
}

/// The chain of a salt's root.
fn root_chain(hash: fn(u64, &[u32]) -> u64, salt: &str) -> u64 {
    hash(0, &salt.bytes().map(u32::from).collect::<Vec<_>>())
}

/// Chains of a salt's root and of a text's blocks under it, as an index has them.
pub(crate) fn chains(salt: &str, ids: &[u32]) -> Vec<u64> {
    let mut chain = root_chain(hash, salt);
    let blocks = ids.chunks_exact(PAGE_TOKENS).map(|block| {
        chain = hash(chain, block);
        chain
    });
    std::iter::once(root_chain(hash, salt)).chain(blocks).collect()
}

/// Length of the common prefix.
pub(crate) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl<S> Tree<S> {
    pub(super) fn new() -> Self {
        Tree {
            nodes: Vec::new(),
            free_nodes: Vec::new(),
            snaps: Vec::new(),
            free_snaps: Vec::new(),
            children: HashMap::new(),
            roots: HashMap::new(),
            ghosts: HashSet::new(),
            lost: HashMap::new(),
            served: HashSet::new(),
            hash,
            tick: 0,
        }
    }

    pub(super) fn node(&self, id: NodeId) -> &Node {
        self.nodes[id].as_ref().expect("a node id is used only while its node lives")
    }

    pub(super) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id].as_mut().expect("a node id is used only while its node lives")
    }

    pub(super) fn snap(&self, id: SnapId) -> &Snap<S> {
        self.snaps[id].as_ref().expect("a snapshot id is used only while its snapshot lives")
    }

    pub(super) fn snap_mut(&mut self, id: SnapId) -> &mut Snap<S> {
        self.snaps[id].as_mut().expect("a snapshot id is used only while its snapshot lives")
    }

    pub(super) fn node_ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        (0..self.nodes.len()).filter(|id| self.nodes[*id].is_some())
    }

    pub(super) fn snap_ids(&self) -> impl Iterator<Item = SnapId> + '_ {
        (0..self.snaps.len()).filter(|id| self.snaps[*id].is_some())
    }

    pub(super) fn roots(&self) -> impl Iterator<Item = (&String, NodeId)> {
        self.roots.iter().map(|(salt, id)| (salt, *id))
    }

    /// Tokens a snapshot stands after.
    pub(super) fn frontier(&self, snap: SnapId) -> usize {
        let s = self.snap(snap);
        self.node(s.node).depth * PAGE_TOKENS + s.tail.len()
    }

    /// The root of a salt.
    pub(super) fn root(&mut self, salt: &str) -> NodeId {
        if let Some(id) = self.roots.get(salt) {
            return *id;
        }
        let id = self.insert(Node {
            parent: None,
            depth: 0,
            ids: Box::default(),
            chain: root_chain(self.hash, salt),
            page: None,
            host: None,
            children: Vec::new(),
            snaps: Vec::new(),
            live: 0,
            pins: 0,
            used: 0,
        });
        self.roots.insert(salt.to_owned(), id);
        id
    }

    /// Remembers a whole prompt.
    pub(super) fn served(&mut self, salt: &str, prompt: &[u32]) {
        if self.served.len() >= GHOSTS {
            self.served.clear();
        }
        self.served.insert((self.hash)(root_chain(self.hash, salt), prompt));
    }

    fn insert(&mut self, node: Node) -> NodeId {
        match self.free_nodes.pop() {
            Some(id) => {
                self.nodes[id] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        }
    }

    /// The child of `parent` with these ids.
    pub(super) fn child(&self, parent: NodeId, ids: &[u32]) -> Option<NodeId> {
        let chain = (self.hash)(self.node(parent).chain, ids);
        let same = self.children.get(&(parent, chain))?;
        same.iter().copied().find(|id| *self.node(*id).ids == *ids)
    }

    /// The same, made if it is not there.
    pub(super) fn child_or_new(&mut self, parent: NodeId, ids: &[u32]) -> NodeId {
        if let Some(id) = self.child(parent, ids) {
            return id;
        }
        let (depth, chain) = (self.node(parent).depth + 1, (self.hash)(self.node(parent).chain, ids));
        self.ghosts.remove(&chain);
        let id = self.insert(Node {
            parent: Some(parent),
            depth,
            ids: ids.into(),
            chain,
            page: None,
            host: None,
            children: Vec::new(),
            snaps: Vec::new(),
            live: 0,
            pins: 0,
            used: self.tick,
        });
        self.children.entry((parent, chain)).or_default().push(id);
        self.node_mut(parent).children.push(id);
        id
    }

    /// Adds a snapshot. Its place among those above and below is found here.
    pub(super) fn add_snap(&mut self, mut snap: Snap<S>) -> SnapId {
        let node = snap.node;
        let frontier = self.node(node).depth * PAGE_TOKENS + snap.tail.len();
        snap.above = self.nearest_above(node, frontier);
        snap.gap = frontier - snap.above.map_or(0, |a| self.frontier(a));
        snap.used = self.tick;
        let above = snap.above;
        let id = match self.free_snaps.pop() {
            Some(id) => {
                self.snaps[id] = Some(snap);
                id
            }
            None => {
                self.snaps.push(Some(snap));
                self.snaps.len() - 1
            }
        };
        let below: Vec<SnapId> = self.snap_ids().filter(|s| self.snap(*s).above == above).collect();
        for other in below {
            let deeper = self.frontier(other);
            if other != id && deeper > frontier && self.is_below(self.snap(other).node, node) {
                let s = self.snap_mut(other);
                (s.above, s.gap) = (Some(id), deeper - frontier);
            }
        }
        self.node_mut(node).snaps.push(id);
        self.each_above(node, |n| n.live += 1);
        id
    }

    /// Whether `node` is `top` or lies below it.
    fn is_below(&self, mut node: NodeId, top: NodeId) -> bool {
        let depth = self.node(top).depth;
        while self.node(node).depth > depth {
            let Some(parent) = self.node(node).parent else { return false };
            node = parent;
        }
        node == top
    }

    /// The deepest snapshot above `frontier` on the way to the root.
    fn nearest_above(&self, node: NodeId, frontier: usize) -> Option<SnapId> {
        let mut at = Some(node);
        while let Some(id) = at {
            let n = self.node(id);
            let above = n.snaps.iter().copied().filter(|s| self.frontier(*s) < frontier);
            if let Some(s) = above.max_by_key(|s| self.frontier(*s)) {
                return Some(s);
            }
            at = n.parent;
        }
        None
    }

    /// Tokens that the loss of a snapshot costs: since the nearest above that has not been superseded.
    pub(super) fn cost(&self, id: SnapId) -> usize {
        let s = self.snap(id);
        let (mut cost, mut at) = (s.gap, s.above);
        while let Some(above) = at.map(|a| self.snap(a)).filter(|a| a.superseded) {
            cost += above.gap;
            at = above.above;
        }
        cost
    }

    fn each_above(&mut self, node: NodeId, mut f: impl FnMut(&mut Node)) {
        let mut at = Some(node);
        while let Some(id) = at {
            let n = self.node_mut(id);
            f(n);
            at = n.parent;
        }
    }

    /// Notes that a snapshot is dropped, so that whoever misses it can be told.
    pub(super) fn note_lost(&mut self, id: SnapId) {
        let s = self.snap(id);
        let chain = self.node(s.node).chain;
        let tail = (s.tail.len(), (self.hash)(chain, &s.tail));
        if self.lost.len() >= GHOSTS {
            self.lost.clear();
        }
        let tails = self.lost.entry(chain).or_default();
        if !tails.contains(&tail) {
            // As many as a block has places.
            tails.truncate(PAGE_TOKENS - 1);
            tails.insert(0, tail);
        }
    }

    /// Forgets what was dropped.
    pub(super) fn forget_lost(&mut self) {
        self.ghosts.clear();
        self.lost.clear();
        self.served.clear();
    }

    /// Whether a snapshot of this text after more than `tokens` and at most `limit` was dropped. `chain` is that of the text's
    /// block `depth`, and no deeper than `tokens`.
    fn lost_past(&self, mut chain: u64, mut depth: usize, ids: &[u32], tokens: usize, limit: usize) -> bool {
        loop {
            let (whole, rest) = (depth * PAGE_TOKENS, &ids[depth * PAGE_TOKENS..]);
            let lost = |(n, hash): &(usize, u64)| {
                let within = whole + n > tokens && whole + n <= limit;
                within && rest.get(..*n).is_some_and(|tail| (self.hash)(chain, tail) == *hash)
            };
            if self.lost.get(&chain).is_some_and(|tails| tails.iter().any(lost)) {
                return true;
            }
            let Some(block) = rest.get(..PAGE_TOKENS) else { return false };
            (chain, depth) = ((self.hash)(chain, block), depth + 1);
        }
    }

    /// Removes a snapshot from the index and gives it back.
    pub(super) fn remove_snap(&mut self, id: SnapId) -> Snap<S> {
        let snap = self.snaps[id].take().expect("a snapshot id is used only while its snapshot lives");
        self.free_snaps.push(id);
        self.node_mut(snap.node).snaps.retain(|s| *s != id);
        self.each_above(snap.node, |n| n.live -= 1);
        for s in self.snaps.iter_mut().flatten().filter(|s| s.above == Some(id)) {
            (s.above, s.gap) = (snap.above, s.gap + snap.gap);
        }
        snap
    }

    /// Removes `node` and then its ancestors as long as nothing needs them: no child, no snapshot, no copy, no pin.
    pub(super) fn prune(&mut self, node: NodeId) {
        let mut at = node;
        loop {
            let n = self.node(at);
            let copies = n.page.is_some() || n.host.is_some();
            if copies || !n.children.is_empty() || !n.snaps.is_empty() || n.pins > 0 {
                return;
            }
            let Some(parent) = n.parent else {
                self.roots.retain(|_, id| *id != at);
                self.nodes[at] = None;
                self.free_nodes.push(at);
                return;
            };
            let chain = n.chain;
            if self.ghosts.len() >= GHOSTS {
                self.ghosts.clear();
            }
            self.ghosts.insert(chain);
            if let Some(same) = self.children.get_mut(&(parent, chain)) {
                same.retain(|id| *id != at);
                if same.is_empty() {
                    self.children.remove(&(parent, chain));
                }
            }
            self.nodes[at] = None;
            self.free_nodes.push(at);
            self.node_mut(parent).children.retain(|id| *id != at);
            at = parent;
        }
    }

    /// Looks up a text; a snapshot may stand after at most `limit` tokens. Marks what it finds as used.
    pub(super) fn find(&mut self, salt: &str, ids: &[u32], limit: usize) -> Found {
        self.tick += 1;
        let tick = self.tick;
        let root = self.root(salt);
        let mut path = vec![root];
        let mut resident = 0;
        for block in ids.chunks_exact(PAGE_TOKENS) {
            let Some(id) = self.child(path[path.len() - 1], block) else { break };
            let n = self.node_mut(id);
            n.used = tick;
            if resident == path.len() - 1 && (n.page.is_some() || n.host.is_some()) {
                resident += 1;
            }
            path.push(id);
        }
        let mut best: Option<(usize, SnapId)> = None;
        for (depth, id) in path.iter().enumerate().take(resident + 1).rev() {
            let rest = &ids[depth * PAGE_TOKENS..];
            for snap in &self.node(*id).snaps {
                let (s, f) = (self.snap(*snap), self.frontier(*snap));
                if f <= limit && f > 0 && rest.starts_with(&s.tail) && best.is_none_or(|(b, _)| f > b) {
                    best = Some((f, *snap));
                }
            }
            if best.is_some() {
                break;
            }
        }
        let (shared, mut cached) = self.nearest(&path, ids);
        let tokens = best.map_or(0, |b| b.0);
        let next = (path.len() - 1) * PAGE_TOKENS..path.len() * PAGE_TOKENS;
        let chain = ids.get(next).map(|b| (self.hash)(self.node(path[path.len() - 1]).chain, b));
        // The very prompt was asked before, but its end left neither a block nor a snapshot.
        let again = self.served.contains(&(self.hash)(self.node(root).chain, ids));
        let depth = tokens / PAGE_TOKENS;
        let cause = match chain {
            _ if tokens >= limit.min(ids.len().saturating_sub(1)) => None,
            _ if self.lost_past(self.node(path[depth]).chain, depth, ids, tokens, limit) => {
                Some(MissCause::Evicted)
            }
            Some(c) if self.ghosts.contains(&c) => Some(MissCause::NoSnapshot),
            _ if resident + 1 < path.len() => Some(MissCause::NoSnapshot),
            _ if again => Some(MissCause::NoSnapshot),
            _ if shared == 0 => Some(MissCause::Cold),
            _ if shared < limit && cached.ids.len() > cached.before => Some(MissCause::Diverged),
            _ if shared > tokens => Some(MissCause::NoSnapshot),
            // The prompt goes on from all that was known of it.
            _ => None,
        };
        let miss = cause.map(|cause| {
            let mut shared = shared;
            if again && cause == MissCause::NoSnapshot {
                shared = ids.len();
                let from = shared.saturating_sub(EXCERPT);
                cached = Excerpt { ids: ids[from..].to_vec(), before: shared - from };
            }
            let from = shared.saturating_sub(EXCERPT);
            let around = &ids[from..ids.len().min(shared + EXCERPT)];
            let prompt = Excerpt { ids: around.to_vec(), before: shared - from };
            Miss { shared, reused: tokens, cause, cached, prompt }
        });
        path.truncate(tokens / PAGE_TOKENS + 1);
        Found { path, snap: best.map(|b| b.1), tokens, shared, miss }
    }

    /// Tokens in common with the nearest text past the last whole block, and that text around the divergence.
    fn nearest(&self, path: &[NodeId], ids: &[u32]) -> (usize, Excerpt) {
        let last = path[path.len() - 1];
        let whole = (path.len() - 1) * PAGE_TOKENS;
        let rest = &ids[whole..];
        let mut best: (usize, &[u32], Option<NodeId>) = (0, &[], None);
        let n = self.node(last);
        let tails = n.snaps.iter().map(|s| (&self.snap(*s).tail[..], None));
        for (text, id) in n.children.iter().map(|c| (&self.node(*c).ids[..], Some(*c))).chain(tails) {
            let c = common(text, rest);
            if (c, text.len()) > (best.0, best.1.len()) {
                best = (c, text, id);
            }
        }
        let shared = whole + best.0;
        let from = shared.saturating_sub(EXCERPT);
        let mut around: Vec<u32> = if from < whole { ids[from..whole].to_vec() } else { Vec::new() };
        around.extend(&best.1[from.saturating_sub(whole)..]);
        // Where they part near a block's end, its text goes on in a block below it.
        let mut below = best.2;
        while let Some(id) = below.filter(|_| around.len() < shared - from + EXCERPT) {
            let n = self.node(id);
            below = n.children.iter().copied().max_by_key(|c| self.node(*c).used);
            match below {
                Some(next) => around.extend(&self.node(next).ids),
                None => around.extend(n.snaps.first().map_or(&[][..], |s| &self.snap(*s).tail)),
            }
        }
        around.truncate(shared - from + EXCERPT);
        (shared, Excerpt { ids: around, before: shared - from })
    }

    /// Replaces the hash that finds children (tests force collisions).
    #[cfg(test)]
    pub(super) fn with_hash(mut self, hash: fn(u64, &[u32]) -> u64) -> Self {
        self.hash = hash;
        self
    }
}
