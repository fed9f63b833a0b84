//! The tier that outlives the process.
//!
//! `INFXPFXC`, version, identity, sizes, blocks (parents first), snapshots, BLAKE3-256 of all of it. Written beside its
//! name, readable by its owner alone, and renamed when complete. A file that is damaged, or belongs to another model or
//! other settings, is ignored and said so.

use super::tree::{HostSnap, Kind, NodeId, Snap, SnapId};
use super::{PrefixCache, TierStatus};
use crate::driver::Image;
use crate::sched::Runner;
use crate::state::PAGE_TOKENS;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// How a cache file begins.
pub const MAGIC: &[u8; 8] = b"INFXPFXC";
const VERSION: u32 = 2;
/// A block's parent is a root: the root's number follows.
const ROOT: u64 = 1 << 63;

/// Hashes what it writes.
struct Output {
    file: BufWriter<File>,
    hash: blake3::Hasher,
    bytes: u64,
}

impl Output {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    fn number(&mut self, n: u64) -> std::io::Result<()> {
        self.put(&n.to_le_bytes())
    }

    fn list(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.number(bytes.len() as u64)?;
        self.put(bytes)
    }

    fn ids(&mut self, ids: &[u32]) -> std::io::Result<()> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.list(&bytes)
    }
}

struct Input {
    file: BufReader<File>,
    left: u64,
}

type Bad = String;

impl Input {
    fn take(&mut self, n: u64) -> Result<Vec<u8>, Bad> {
        if n > self.left {
            return Err(format!("{n} bytes expected, {} left", self.left));
        }
        self.left -= n;
        let mut out = vec![0; n as usize];
        self.file.read_exact(&mut out).map_err(|e| e.to_string())?;
        Ok(out)
    }

    fn number(&mut self) -> Result<u64, Bad> {
        let mut word = [0; 8];
        word.copy_from_slice(&self.take(8)?);
        Ok(u64::from_le_bytes(word))
    }

    fn list(&mut self) -> Result<Vec<u8>, Bad> {
        let n = self.number()?;
        self.take(n)
    }

    fn ids(&mut self) -> Result<Vec<u32>, Bad> {
        let bytes = self.list()?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn floats(&mut self) -> Result<Vec<f32>, Bad> {
        Ok(self.ids()?.into_iter().map(f32::from_bits).collect())
    }
}

/// A file's folder, and how the names of its unfinished versions begin: the number of the process that writes one follows.
fn parts(path: &Path) -> (&Path, String) {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    (folder, format!(".{}.", path.file_name().unwrap_or_default().to_string_lossy()))
}

/// Creates a file for its owner alone and holds it, so that [`remove_leftovers`] lets it be.
fn create_locked(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    loop {
        let file = options.open(path)?;
        // A file system without locks has nobody who would take the file for a leftover.
        let held = file.lock().is_ok();
        if !held || path.exists() {
            return Ok(file);
        }
    }
}

/// Removes what processes left that ended while they wrote.
fn remove_leftovers(path: &Path) {
    let (folder, start) = parts(path);
    for entry in folder.read_dir().into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|n| n.strip_prefix(&start));
        if process.is_none_or(|p| p.is_empty() || !p.bytes().all(|b| b.is_ascii_digit()))
            || !entry.file_type().is_ok_and(|t| t.is_file())
        {
            continue;
        }
        let Ok(file) = File::options().read(true).write(true).open(entry.path()) else { continue };
        let mut begin = Vec::new();
        let read = (&file).take(MAGIC.len() as u64).read_to_end(&mut begin);
        // Whoever still writes it holds it.
        if read.is_ok() && MAGIC.starts_with(&begin) && file.try_lock().is_ok() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// What two identities, of lines `name: value`, do not have in common.
fn differences(saved: &str, own: &str) -> String {
    let value = |text: &str, name: &str| {
        text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(": ").map(str::to_owned))
    };
    let names = own.lines().filter_map(|l| l.split_once(": ")).map(|(name, _)| name);
    let differ = names.filter_map(|name| {
        let (saved, own) = (value(saved, name)?, value(own, name)?);
        (saved != own).then(|| format!("{name} was {saved} and is {own}"))
    });
    let differ: Vec<String> = differ.collect();
    if differ.is_empty() { "other settings".to_owned() } else { differ.join(", ") }
}

fn kind_code(kind: Kind) -> u64 {
    match kind {
        Kind::Marker => 0,
        Kind::Prompt => 1,
        Kind::Ladder => 2,
        Kind::End => 3,
    }
}

impl<S: Clone> PrefixCache<S> {
    /// Writes the file, if there is to be one. Gives the number of snapshots written.
    pub(crate) fn save_file<R: Runner<State = S>>(&mut self, runner: &mut R) -> Result<usize, String> {
        let Some(path) = self.options.file.clone() else { return Ok(0) };
        if !self.limits.saves {
            return Err("the backend keeps no state outside its memory".into());
        }
        let bad = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let place = crate::files::place(&path).map_err(|e| bad(&e))?;
        let (snaps, nodes) = self.worth_saving();
        if snaps.is_empty() && place.exists() && !self.cleared {
            // What an earlier process left there is worth more than nothing.
            if self.tree.snap_ids().next().is_none() {
                return Ok(0);
            }
            let mib = self.options.file_bytes >> 20;
            return Err(bad(&format!(
                "nothing of the cache fits into {mib} MiB (--prefix-cache-file-mib); the file stays as it is"
            )));
        }
        let written = self.write_file(runner, &place, &snaps, &nodes).map_err(|e| bad(&e))?;
        self.file = written;
        Ok(written.snapshots)
    }

    fn write_file<R: Runner<State = S>>(
        &mut self,
        runner: &mut R,
        path: &Path,
        snaps: &[SnapId],
        nodes: &[NodeId],
    ) -> std::io::Result<TierStatus> {
        let (folder, name) = parts(path);
        let partial = folder.join(format!("{name}{}", std::process::id()));
        let file = create_locked(&partial)?;
        let mut out =
            Output { file: BufWriter::with_capacity(1 << 20, file), hash: blake3::Hasher::new(), bytes: 0 };
        let done = self.write_all(runner, &mut out, snaps, nodes).and_then(|()| {
            let digest = out.hash.finalize();
            out.file.write_all(digest.as_bytes())?;
            out.file.flush()?;
            out.file.get_ref().sync_all()?;
            std::fs::rename(&partial, path)
        });
        if done.is_err() {
            let _ = std::fs::remove_file(&partial);
        }
        done.map(|()| TierStatus {
            blocks: nodes.len(),
            snapshots: snaps.len(),
            bytes: out.bytes,
            budget: self.options.file_bytes,
        })
    }

    /// The most valuable snapshots that fit, and the blocks they need, parents first.
    fn worth_saving(&self) -> (Vec<SnapId>, Vec<NodeId>) {
        let mut order: Vec<SnapId> = self.tree.snap_ids().collect();
        let key = |id: SnapId| (self.tree.snap(id).superseded, -self.value(id));
        order.sort_by(|a, b| key(*a).partial_cmp(&key(*b)).unwrap_or(std::cmp::Ordering::Equal));
        let (mut snaps, mut nodes, mut bytes) = (Vec::new(), Vec::new(), 0);
        let mut chosen = vec![false; self.tree.nodes.len()];
        for id in order {
            let snap = self.tree.snap(id);
            let mut path = Vec::new();
            let (mut at, mut whole) = (snap.node, true);
            while let Some(parent) = self.tree.node(at).parent {
                if chosen[at] {
                    break;
                }
                let n = self.tree.node(at);
                whole &= n.page.is_some() || n.host.is_some();
                path.push(at);
                at = parent;
            }
            let own = path.len() as u64 * (self.limits.page_bytes + 8 * PAGE_TOKENS as u64)
                + snap.bytes
                + self.limits.page_bytes;
            if !whole || bytes + own > self.options.file_bytes {
                continue;
            }
            bytes += own;
            path.iter().for_each(|n| chosen[*n] = true);
            nodes.extend(path);
            snaps.push(id);
        }
        nodes.sort_by_key(|id| self.tree.node(*id).depth);
        (snaps, nodes)
    }

    fn write_all<R: Runner<State = S>>(
        &self,
        runner: &mut R,
        out: &mut Output,
        snaps: &[SnapId],
        nodes: &[NodeId],
    ) -> std::io::Result<()> {
        let other = |e: crate::EngineError| std::io::Error::other(e.to_string());
        out.put(MAGIC)?;
        out.put(&VERSION.to_le_bytes())?;
        out.list(self.options.identity.as_bytes())?;
        out.number(self.limits.page_bytes)?;
        let roots: Vec<(&String, NodeId)> = self.tree.roots().collect();
        out.number(roots.len() as u64)?;
        for (salt, _) in &roots {
            out.list(salt.as_bytes())?;
        }
        let mut number: HashMap<NodeId, u64> =
            roots.iter().enumerate().map(|(i, (_, id))| (*id, ROOT | i as u64)).collect();
        out.number(nodes.len() as u64)?;
        for (i, id) in nodes.iter().enumerate() {
            let n = self.tree.node(*id);
            out.number(n.parent.and_then(|p| number.get(&p)).copied().unwrap_or(ROOT))?;
            out.ids(&n.ids)?;
            match (&n.host, n.page) {
                (Some(words), _) => out.list(words)?,
                (None, Some(page)) => out.list(&runner.save_page(page).map_err(other)?)?,
                (None, None) => return Err(std::io::Error::other("a block without a copy")),
            }
            number.insert(*id, i as u64);
        }
        out.number(snaps.len() as u64)?;
        for id in snaps {
            let s = self.tree.snap(*id);
            let made;
            let host = match &s.host {
                Some(host) => host,
                None => {
                    made = self.save(runner, *id);
                    made.as_ref().ok_or_else(|| std::io::Error::other("a snapshot without a copy"))?
                }
            };
            out.number(number.get(&s.node).copied().unwrap_or(ROOT))?;
            out.number(kind_code(s.kind))?;
            out.ids(&s.tail)?;
            out.number(host.image.rope_delta as u64)?;
            out.number(host.image.drafted as u64)?;
            let frontier: Vec<u32> = host.image.frontier.iter().map(|v| v.to_bits()).collect();
            out.ids(&frontier)?;
            out.number(s.bytes)?;
            out.list(&host.image.state)?;
            out.list(host.page.as_deref().unwrap_or(&[]))?;
        }
        Ok(())
    }

    /// Reads the file into RAM, as much of it as fits.
    ///
    /// # Errors
    /// Why the file is ignored. A missing file is no error.
    pub(crate) fn load_file<R: Runner<State = S>>(&mut self, runner: &mut R) -> Result<usize, String> {
        let Some(path) = self.options.file.clone() else { return Ok(0) };
        let place = crate::files::place(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        remove_leftovers(&place);
        let file = match File::open(&place) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(0),
            Err(e) => return Err(format!("{}: {e}", path.display())),
        };
        self.read_file(runner, file)
            .map_err(|e| format!("{} is ignored, and replaced when the cache is saved: {e}", path.display()))
    }

    fn read_file<R: Runner<State = S>>(&mut self, runner: &mut R, mut file: File) -> Result<usize, Bad> {
        let io = |e: std::io::Error| e.to_string();
        let len = file.metadata().map_err(io)?.len();
        if len < 32 {
            return Err("it is too short".into());
        }
        let mut hash = blake3::Hasher::new();
        std::io::copy(&mut Read::by_ref(&mut file).take(len - 32), &mut hash).map_err(io)?;
        let mut digest = [0; 32];
        file.read_exact(&mut digest).map_err(io)?;
        if hash.finalize() != blake3::Hash::from_bytes(digest) {
            return Err("it is damaged".into());
        }
        file.seek(SeekFrom::Start(0)).map_err(io)?;
        let mut input = Input { file: BufReader::with_capacity(1 << 20, file), left: len - 32 };
        if input.take(8)? != MAGIC || input.take(4)? != VERSION.to_le_bytes() {
            return Err("it is no prefix cache of this version".into());
        }
        let identity = input.list()?;
        if identity != self.options.identity.as_bytes() {
            let saved = String::from_utf8_lossy(&identity);
            let what = differences(&saved, &self.options.identity);
            return Err(format!("it belongs to another model or other settings: {what}"));
        }
        if input.number()? != self.limits.page_bytes {
            return Err("it belongs to another model or other settings: its pages have another size".into());
        }
        let mut roots = Vec::new();
        for _ in 0..input.number()? {
            let salt = String::from_utf8(input.list()?).map_err(|e| e.to_string())?;
            roots.push(self.tree.root(&salt));
        }
        let mut nodes = Vec::new();
        for _ in 0..input.number()? {
            let parent = input.number()?;
            let at = if parent & ROOT != 0 {
                roots.get((parent & !ROOT) as usize)
            } else {
                nodes.get(parent as usize)
            };
            let parent = *at.ok_or("a block without its parent")?;
            let ids = input.ids()?;
            if ids.len() != PAGE_TOKENS {
                return Err(format!("a block of {} tokens", ids.len()));
            }
            let words = input.list()?;
            let id = self.tree.child_or_new(parent, &ids);
            if self.host_bytes + self.limits.page_bytes <= self.options.host_bytes
                && self.tree.node(id).host.is_none()
            {
                self.host_bytes += self.limits.page_bytes;
                self.tree.node_mut(id).host = Some(words.into());
            }
            nodes.push(id);
        }
        let mut loaded = 0;
        for _ in 0..input.number()? {
            loaded += usize::from(self.read_snap(runner, &mut input, &roots, &nodes)?);
        }
        // Blocks whose snapshots did not fit.
        for id in nodes.into_iter().rev() {
            if self.tree.nodes[id].is_some() {
                self.drop_dead_host(id);
                self.tree.prune(id);
            }
        }
        let status = self.status();
        self.file = TierStatus {
            blocks: status.host.blocks,
            snapshots: loaded,
            bytes: len,
            budget: self.options.file_bytes,
        };
        Ok(loaded)
    }

    fn read_snap<R: Runner<State = S>>(
        &mut self,
        runner: &mut R,
        input: &mut Input,
        roots: &[NodeId],
        nodes: &[NodeId],
    ) -> Result<bool, Bad> {
        let node = input.number()?;
        let at = if node & ROOT != 0 { roots.get((node & !ROOT) as usize) } else { nodes.get(node as usize) };
        let node = *at.ok_or("a snapshot without its block")?;
        let kind = match input.number()? {
            0 => Kind::Marker,
            1 => Kind::Prompt,
            2 => Kind::Ladder,
            _ => Kind::End,
        };
        let tail = input.ids()?;
        let (rope_delta, drafted) = (input.number()? as i64, input.number()? as usize);
        let frontier = input.floats()?;
        let own = input.number()?;
        let state: Box<[u8]> = input.list()?.into();
        let page: Option<Box<[u8]>> = Some(input.list()?).filter(|p| !p.is_empty()).map(Into::into);
        let tokens = self.tree.node(node).depth * PAGE_TOKENS + tail.len();
        if tail.len() >= PAGE_TOKENS || page.is_some() == tail.is_empty() || drafted > tokens {
            return Err("a snapshot that contradicts itself".into());
        }
        // States are checked here, once, so that a hit can rely on them.
        runner.load_state(&state).map_err(|e| e.to_string())?;
        let bytes = own.saturating_add(self.limits.page_bytes * u64::from(page.is_some()));
        let host = HostSnap { image: Image { state, tokens, rope_delta, drafted, frontier }, page, bytes };
        let mut at = node;
        let mut whole = true;
        while let Some(parent) = self.tree.node(at).parent {
            whole &= self.tree.node(at).host.is_some();
            at = parent;
        }
        if !whole || self.host_bytes.saturating_add(host.bytes) > self.options.host_bytes {
            return Ok(false);
        }
        self.host_bytes += host.bytes;
        self.tree.add_snap(Snap {
            node,
            tail,
            kind,
            device: None,
            host: Some(host),
            bytes: own,
            gap: 0,
            above: None,
            hits: 0,
            floor: self.inflation,
            superseded: false,
            used: 0,
            pins: 0,
        });
        Ok(true)
    }
}
