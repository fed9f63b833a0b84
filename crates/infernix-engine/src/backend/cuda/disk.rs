//! Experts on disk: page-locked host memory holds some of them, the rest is read past the page cache when it is picked.
//!
//! Which experts a layer wants is known on the device only: a round stops at each layer, reads the picks, and goes on once their
//! records are in host memory. A record that cannot be read fails the lanes that picked it and no others.

use super::context::Cuda;
use super::vram::{CudaBuf, fault};
use crate::backend::FileRange;
use crate::error::EngineError;
use crate::residency::{CATCH_UP, least_worth};
use infernix_cuda::Device;
use infernix_cuda::driver::{Event, PinnedBuffer, Stream};
use rayon::prelude::*;
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// What direct reads align to, in memory and in the file.
const ALIGN: usize = 4096;
/// Pieces of a record that are read side by side: a few picks alone must keep the disk busy.
const PIECES: usize = 4;
/// Records of a half of the landing ring of prompts.
const LANDING: usize = 32;

/// A bank's records in a file.
struct Source {
    file: File,
    path: PathBuf,
    offset: u64,
    stride: u64,
    /// Bytes of a record.
    record: usize,
    /// In the flat numbering of all experts.
    experts: Range<usize>,
}

impl Source {
    fn open(at: &FileRange, (stride, record): (usize, usize), experts: Range<usize>) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        // Where the file system has no direct reads, through the page cache.
        let direct = rustix::fs::open(&*at.path, flags | OFlags::DIRECT, Mode::empty());
        let file = direct.map_or_else(|_| File::open(&at.path), |fd| Ok(File::from(fd)))?;
        let path = at.path.to_path_buf();
        Ok(Source { file, path, offset: at.offset, stride: stride as u64, record, experts })
    }

    /// First byte of an expert's record.
    fn at(&self, expert: usize) -> u64 {
        self.offset + (expert - self.experts.start) as u64 * self.stride
    }
}

/// Fills `out`, which begins on a block, from `at` on, at least its first `least` bytes: the file may end after them.
fn read_blocks(file: &File, mut at: u64, out: &mut [u8], least: usize) -> io::Result<()> {
    let mut done = 0;
    while done < least {
        match file.read_at(&mut out[done..], at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                done += n;
                at += n as u64;
                // A direct read cannot go on inside a block; only the end of a file stops there.
                if done < least && !done.is_multiple_of(ALIGN) {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads the record of each expert to its place, from `skew` bytes after the start on; gives the experts that failed twice.
fn read_records(
    sources: &[Source],
    broken: Option<usize>,
    jobs: Vec<(usize, &mut [u8])>,
) -> Vec<(usize, String)> {
    let read = |(expert, out): (usize, &mut [u8])| {
        let source = sources.iter().find(|s| s.experts.contains(&expert))?;
        let (first, record) = (source.at(expert), source.record);
        let begin = first - first % ALIGN as u64;
        let span = ((first - begin) as usize + record).next_multiple_of(ALIGN);
        let size = span.div_ceil(PIECES).next_multiple_of(ALIGN);
        let needed = (first - begin) as usize + record;
        let once = |out: &mut [u8]| {
            if broken == Some(expert) {
                return Err(io::Error::other("a read error was asked for"));
            }
            let pieces = out[..span].par_chunks_mut(size).enumerate();
            pieces
                .map(|(i, piece)| {
                    let least = needed.saturating_sub(i * size).min(piece.len());
                    read_blocks(&source.file, begin + (i * size) as u64, piece, least)
                })
                .collect::<io::Result<()>>()
        };
        let failed = once(out).or_else(|_| once(out)).err()?;
        Some((expert, format!("{}: record of {record} bytes at {first}: {failed}", source.path.display())))
    };
    jobs.into_par_iter().filter_map(read).collect()
}

/// Which expert each slot of host memory holds.
struct Slots {
    slot_of: Vec<Option<u32>>,
    owner: Vec<Option<u32>>,
    /// Slots of the least worthy when it was last looked, worthiest first: looking at all for every read would cost as much as it.
    victims: Vec<usize>,
}

impl Slots {
    fn new(experts: usize, slots: usize) -> Self {
        Slots { slot_of: vec![None; experts], owner: vec![None; slots], victims: Vec::new() }
    }

    /// Gives slots to those of `wanted` that have none, rising and distinct, at the cost of the least worthy that are neither wanted
    /// nor `held`. Gives what must be read where; fewer if slots run out.
    fn assign(
        &mut self,
        wanted: &[usize],
        worth: impl Fn(usize) -> f32,
        held: impl Fn(usize) -> bool,
    ) -> Vec<(usize, usize)> {
        let free = |owner: &Option<u32>| {
            owner.is_none_or(|o| wanted.binary_search(&(o as usize)).is_err() && !held(o as usize))
        };
        let mut out = Vec::new();
        for e in wanted {
            if self.slot_of[*e].is_some() {
                continue;
            }
            let Some(s) = self.victim(&worth, free) else { break };
            if let Some(old) = self.owner[s].replace(*e as u32) {
                self.slot_of[old as usize] = None;
            }
            self.slot_of[*e] = Some(s as u32);
            out.push((*e, s));
        }
        out
    }

    fn victim(&mut self, worth: impl Fn(usize) -> f32, free: impl Fn(&Option<u32>) -> bool) -> Option<usize> {
        while let Some(s) = self.victims.pop() {
            if free(&self.owner[s]) {
                return Some(s);
            }
        }
        let owners = self.owner.iter().enumerate().filter(|(_, o)| free(o));
        self.victims = least_worth(owners.map(|(s, o)| (o.map_or(-1.0, |e| worth(e as usize)), s)));
        self.victims.pop()
    }

    /// An expert's slot holds nothing.
    fn forget(&mut self, expert: usize) {
        if let Some(s) = self.slot_of[expert].take() {
            self.owner[s as usize] = None;
        }
    }
}

/// What was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DiskCounts {
    /// Records.
    pub(super) reads: u64,
    /// Microseconds that rounds waited for them.
    pub(super) waited: u64,
}

/// The tier.
pub(super) struct Disk {
    sources: Vec<Source>,
    memory: PinnedBuffer,
    /// Bytes of a slot; after all slots come the landing places of prompts.
    stride: usize,
    slots: Slots,
    landed: [Event; 2],
    half: usize,
    pub(super) counts: DiskCounts,
    /// Reads of this expert fail (tests).
    broken: Option<usize>,
}

impl Disk {
    /// Slots for `bytes` of host memory; `banks`: where each is, bytes from one of its records to the next and of one, its experts.
    /// `record`: bytes of the largest.
    pub(super) fn new(
        device: &Arc<Device>,
        banks: &[(FileRange, (usize, usize), Range<usize>)],
        record: usize,
        bytes: usize,
    ) -> Result<Self, EngineError> {
        let stride = (record + 2 * ALIGN).next_multiple_of(ALIGN);
        let most = banks.iter().map(|b| b.2.len()).max().unwrap_or(0);
        let slots = bytes / stride;
        // All experts of a layer, and those on their way to device memory.
        let least = most + CATCH_UP;
        if slots < least {
            return Err(EngineError::Unsupported(format!(
                "--expert-ram-mib {} holds {slots} experts, a layer of {most} needs {least} at a time: at least {} MiB",
                bytes >> 20,
                (least * stride).div_ceil(1 << 20)
            )));
        }
        let open = |(at, sizes, experts): &(FileRange, (usize, usize), Range<usize>)| {
            Source::open(at, *sizes, experts.clone())
                .map_err(|e| EngineError::Source { name: at.path.display().to_string(), source: Box::new(e) })
        };
        let sources = banks.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let experts = banks.last().map_or(0, |b| b.2.end);
        Ok(Disk {
            sources,
            memory: device.pinned((slots + 2 * LANDING) * stride).map_err(fault)?,
            stride,
            slots: Slots::new(experts, slots),
            landed: [device.event().map_err(fault)?, device.event().map_err(fault)?],
            half: 0,
            counts: DiskCounts::default(),
            broken: None,
        })
    }

    /// Host memory forgets an expert and reads of it fail from now on, or of none.
    pub(super) fn break_expert(&mut self, expert: Option<usize>) {
        self.broken = expert;
        if let Some(e) = expert {
            self.slots.forget(e);
        }
    }

    /// Slots in all.
    pub(super) fn len(&self) -> usize {
        self.slots.owner.len()
    }

    fn source(&self, expert: usize) -> Option<&Source> {
        self.sources.iter().find(|s| s.experts.contains(&expert))
    }

    fn skew(&self, expert: usize) -> u64 {
        self.source(expert).map_or(0, |s| s.at(expert) % ALIGN as u64)
    }

    /// Where the device finds an expert in host memory.
    pub(super) fn address(&self, expert: usize) -> Option<u64> {
        let slot = self.slots.slot_of[expert]?;
        Some(self.memory.device_ptr() + (slot as usize * self.stride) as u64 + self.skew(expert))
    }

    /// Reads `jobs`, experts and places, rising places.
    fn read(&mut self, jobs: &[(usize, usize)]) -> Vec<(usize, String)> {
        let clock = Instant::now();
        let stride = self.stride;
        let mut rest = self.memory.as_mut_slice();
        let (mut at, mut pieces) = (0, Vec::with_capacity(jobs.len()));
        for (expert, place) in jobs {
            let (_, tail) = rest.split_at_mut((place - at) * stride);
            let (own, tail) = tail.split_at_mut(stride);
            pieces.push((*expert, own));
            (rest, at) = (tail, place + 1);
        }
        let failed = read_records(&self.sources, self.broken, pieces);
        self.counts.reads += jobs.len() as u64;
        self.counts.waited += clock.elapsed().as_micros() as u64;
        failed
    }

    /// Brings `wanted` (rising, distinct) to slots; gives those that could not be read.
    pub(super) fn fetch(
        &mut self,
        wanted: &[usize],
        worth: impl Fn(usize) -> f32,
        held: impl Fn(usize) -> bool,
    ) -> Vec<(usize, String)> {
        let mut jobs = self.slots.assign(wanted, worth, held);
        jobs.sort_unstable_by_key(|j| j.1);
        let mut failed = self.read(&jobs);
        for (e, _) in &failed {
            self.slots.forget(*e);
        }
        let lacks = |e: &&usize| self.slots.slot_of[**e].is_none() && !failed.iter().any(|f| f.0 == **e);
        let rest: Vec<_> =
            wanted.iter().filter(lacks).map(|e| (*e, "no room in host memory".to_owned())).collect();
        failed.extend(rest);
        failed
    }

    /// Reads records and sends them on to `to`, a ring's or frames' places, by `copies`.
    pub(super) fn land(&mut self, copies: &Stream, moves: &[(usize, u64)]) -> Result<(), EngineError> {
        for chunk in moves.chunks(LANDING) {
            let half = self.half;
            self.half = 1 - half;
            let first = self.len() + half * LANDING;
            // What the half held before must have left it.
            self.landed[half].wait().map_err(fault)?;
            let jobs: Vec<_> = chunk.iter().enumerate().map(|(i, (e, _))| (*e, first + i)).collect();
            if let Some((_, what)) = self.read(&jobs).into_iter().next() {
                return Err(EngineError::Round(format!("reading an expert: {what}")));
            }
            for ((e, to), (_, place)) in chunk.iter().zip(&jobs) {
                let from = self.memory.device_ptr() + (place * self.stride) as u64 + self.skew(*e);
                let record = self.source(*e).map_or(0, |s| s.record);
                copies.copy(*to, from, record).map_err(fault)?;
            }
            copies.record(&self.landed[half]).map_err(fault)?;
        }
        Ok(())
    }
}

impl Cuda {
    /// Before the experts of a layer run: their records are in memory, or the lanes that picked them have failed.
    pub(super) fn fetch_experts(
        &mut self,
        bank: usize,
        ids: &CudaBuf,
        top: usize,
    ) -> Result<(), EngineError> {
        if !self.tiers.on_disk() {
            return Ok(());
        }
        let held = self.holding;
        self.flush()?;
        let picks: Vec<i32> = self.stream.read(ids.ptr, ids.rows * top).map_err(fault)?;
        let failed = self.tiers.ensure(&self.stream, bank, &picks)?;
        if !failed.is_empty() {
            let lane_rows = self.round()?.lane_rows.clone();
            for (l, rows) in lane_rows.into_iter().enumerate() {
                let own = &picks[rows.start * top..rows.end * top];
                let what = failed.iter().find(|(e, _)| own.contains(&(*e as i32)));
                if let (Some((e, what)), false) = (what, self.failed_lanes.iter().any(|f| f.0 == l)) {
                    self.failed_lanes.push((l, format!("expert {e} could not be read: {what}")));
                }
            }
        }
        if held {
            self.stream.hold();
            self.holding = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn aligned(memory: &mut [u8], slots: usize, stride: usize) -> &mut [u8] {
        let start = memory.as_ptr().align_offset(ALIGN);
        &mut memory[start..start + slots * stride]
    }

    #[test]
    fn records_at_any_offset_are_read_whole_and_a_failing_one_fails_alone() {
        const RECORD: usize = 9_000;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bank");
        let (offset, step) = (776usize, 9_216usize);
        let mut bytes = vec![0u8; offset + 4 * step];
        bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 31 % 251) as u8);
        // The last record ends with the file.
        bytes.truncate(offset + 3 * step + RECORD);
        File::create(&path).unwrap().write_all(&bytes).unwrap();
        let at = FileRange { path: path.as_path().into(), offset: offset as u64 };
        let sources = [Source::open(&at, (step, RECORD), 10..14).unwrap()];
        let stride = (RECORD + 2 * ALIGN).next_multiple_of(ALIGN);
        for broken in [None, Some(12)] {
            let mut memory = vec![0xAAu8; 5 * stride + ALIGN];
            let slots = aligned(&mut memory, 5, stride);
            let jobs = slots.chunks_mut(stride).enumerate().take(4).map(|(i, s)| (13 - i, s)).collect();
            let failed = read_records(&sources, broken, jobs);
            assert_eq!(
                failed.iter().map(|f| f.0).collect::<Vec<_>>(),
                broken.into_iter().collect::<Vec<_>>()
            );
            for (i, slot) in slots.chunks(stride).take(4).enumerate().filter(|(i, _)| broken != Some(13 - i))
            {
                let first = offset + (3 - i) * step;
                assert_eq!(
                    slot[first % ALIGN..][..RECORD],
                    bytes[first..first + RECORD],
                    "expert {}",
                    13 - i
                );
            }
        }
    }

    #[test]
    fn a_file_that_lost_its_end_fails_the_records_that_lay_there() {
        const RECORD: usize = 5_000;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bank");
        File::create(&path).unwrap().write_all(&vec![7u8; 3 * RECORD - 1]).unwrap();
        let at = FileRange { path: path.as_path().into(), offset: 0 };
        let sources = [Source::open(&at, (RECORD, RECORD), 0..3).unwrap()];
        let stride = (RECORD + 2 * ALIGN).next_multiple_of(ALIGN);
        let mut memory = vec![0u8; 3 * stride + ALIGN];
        let jobs = aligned(&mut memory, 3, stride).chunks_mut(stride).enumerate().collect();
        let failed = read_records(&sources, None, jobs);
        assert_eq!(failed.iter().map(|f| f.0).collect::<Vec<_>>(), [2]);
        assert!(failed[0].1.contains("bank: record of 5000 bytes at 10000"), "{}", failed[0].1);
    }

    #[test]
    fn slots_go_to_what_is_wanted_at_the_cost_of_the_least_worthy() {
        let mut s = Slots::new(10, 4);
        let worth = |e: usize| e as f32;
        assert_eq!(s.assign(&[1, 3, 5, 7], worth, |_| false).len(), 4);
        // 1 is worth least but held; 3 goes.
        let made = s.assign(&[5, 9], worth, |e| e == 1);
        assert_eq!(made.iter().map(|m| m.0).collect::<Vec<_>>(), [9]);
        assert_eq!([1, 3, 5, 7, 9].map(|e| s.slot_of[e].is_some()), [true, false, true, true, true]);
        // More than there is room for: what fits.
        assert_eq!(s.assign(&[0, 2, 4, 6, 8], worth, |e| e == 1).len(), 3);
        s.forget(1);
        assert_eq!(s.assign(&[0, 2, 4, 6, 8], worth, |_| false).len(), 1);
        let owners: Vec<_> = s.owner.iter().flatten().collect();
        assert_eq!(owners.len(), 4);
    }
}
