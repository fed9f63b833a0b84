//! Where routed experts are: frames of device memory for some, page-locked host memory for all.
//!
//! A table of addresses on the device says where each record is; kernels read it there, over the link if it is the
//! host's. Bits do not depend on it. Between rounds the host moves records it has seen used into frames of records that
//! it has not; copies run beside the next round and count once they are done. Prompt calls, which use nearly every
//! expert, stream the records of the next layers into a ring while a layer computes.

use super::context::Routing;
use super::disk::Disk;
use super::vram::{Vram, fault};
use crate::backend::weights::Bytes;
use crate::backend::{FileRange, Part};
use crate::error::EngineError;
use crate::residency::{CATCH_UP, HALF_LIFE, MOVES, least_worth};
use infernix_cuda::DeviceBuffer;
use infernix_cuda::driver::{Event, PinnedBuffer, Registered, Stream};
use infernix_cuda::kernels::zipf::ZipfRoute;
use std::ops::Range;

/// A ring half holds this much more than the evenly spread absent records of a layer.
const RING_SLACK: f64 = 1.15;

/// How many experts get a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// As many as fit.
    #[default]
    Auto,
    /// This many frames.
    Frames(usize),
    /// None at first, and none ever: every record crosses the link.
    Host,
    /// A random half, never moved (tests).
    RandomHalf(u64),
}

struct Bank {
    part: Part,
    bytes: Bytes,
    /// Where they lie in a file.
    file: Option<FileRange>,
    stride: usize,
    /// In the flat numbering of all experts.
    experts: Range<usize>,
    host: Option<Registered>,
}

/// Where a layer's records are: device addresses of arrays of addresses.
#[derive(Clone, Copy, Default)]
pub(super) struct Records {
    pub(super) whole: u64,
    pub(super) down: u64,
}

fn put(words: &mut PinnedBuffer, i: usize, value: u64) {
    words.as_mut_slice()[8 * i..8 * i + 8].copy_from_slice(&value.to_le_bytes());
}

struct Move {
    expert: usize,
    frame: usize,
}

/// Counters of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// Picks of decode rounds.
    pub picks: u64,
    /// Picks whose expert had no frame.
    pub misses: u64,
    /// Distinct records that decode rounds read over the link.
    pub miss_records: u64,
    /// Records moved into frames.
    pub promotions: u64,
    /// Records streamed for prompts.
    pub streamed: u64,
    /// Records read from disk.
    pub disk_reads: u64,
    /// Microseconds that rounds waited for them.
    pub disk_waited: u64,
    /// Microseconds that rounds waited for n-gram rows.
    pub ngram_waited: u64,
}

pub(super) struct Tiers {
    placement: Placement,
    /// A known law of routing says which experts come first.
    routing: Option<Routing>,
    banks: Vec<Bank>,
    record: usize,
    frame: usize,
    frames: Option<DeviceBuffer>,
    frame_of: Vec<Option<u32>>,
    owner: Vec<Option<u32>>,
    addresses: Option<PinnedBuffer>,
    table: Option<DeviceBuffer>,
    dirty: bool,
    score: Vec<f32>,
    used_at: Vec<f32>,
    now: f32,
    victims: Vec<usize>,
    wanted: Vec<usize>,
    moving: Vec<Move>,
    copies: Option<(Stream, Event)>,
    ring: Option<Ring>,
    /// Host memory for experts, in bytes; 0: for all of them.
    ram: usize,
    disk: Option<Disk>,
    pub(super) counts: TierCounts,
}

struct Ring {
    memory: DeviceBuffer,
    /// Records a half.
    half: usize,
    addresses: PinnedBuffer,
    table: DeviceBuffer,
    copied: [Event; 2],
    used: [Event; 2],
    /// Banks of the round in order, and how many of them were asked for.
    order: Vec<usize>,
    next: usize,
}

impl Tiers {
    pub(super) fn new(placement: Placement, routing: Option<Routing>, ram: usize) -> Self {
        Tiers {
            placement,
            routing,
            banks: Vec::new(),
            record: 0,
            frame: 0,
            frames: None,
            frame_of: Vec::new(),
            owner: Vec::new(),
            addresses: None,
            table: None,
            dirty: false,
            score: Vec::new(),
            used_at: Vec::new(),
            now: 0.0,
            victims: Vec::new(),
            wanted: Vec::new(),
            moving: Vec::new(),
            copies: None,
            ring: None,
            ram,
            disk: None,
            counts: TierCounts::default(),
        }
    }

    /// Takes a bank of records `stride` apart; gives its number.
    pub(super) fn add(
        &mut self,
        name: &str,
        bytes: Bytes,
        file: Option<FileRange>,
        stride: usize,
        record: usize,
        experts: usize,
    ) -> usize {
        let first = self.banks.last().map_or(0, |b| b.experts.end);
        let part = if name.starts_with("mtp/") { Part::Drafter } else { Part::Target };
        self.record = self.record.max(record);
        self.frame = self.record.next_multiple_of(256);
        self.banks.push(Bank { part, bytes, file, stride, experts: first..first + experts, host: None });
        self.banks.len() - 1
    }

    fn total(&self) -> usize {
        self.banks.last().map_or(0, |b| b.experts.end)
    }

    /// Layers with experts of the exact arithmetic.
    pub(super) fn layers(&self) -> usize {
        self.banks.iter().filter(|b| b.part == Part::Target).count()
    }

    /// Whether some experts have no frame.
    pub(super) fn is_partial(&self) -> bool {
        self.copies.is_some()
    }

    /// Frames in all.
    pub(super) fn frames(&self) -> usize {
        self.owner.len()
    }

    /// Bytes of a record.
    pub(super) fn record_bytes(&self) -> usize {
        self.record
    }

    /// Where the device finds an expert in host memory; 0 if it is on disk only.
    fn host_address(&self, expert: usize) -> u64 {
        if let Some(d) = &self.disk {
            return d.address(expert).unwrap_or(0);
        }
        let b = self.banks.partition_point(|b| b.experts.end <= expert);
        let bank = &self.banks[b];
        let at = ((expert - bank.experts.start) * bank.stride) as u64;
        bank.host.as_ref().map_or(0, |h| h.device_ptr() + at)
    }

    /// Gives frames to experts, keeping `reserve` bytes free, and fills them.
    pub(super) fn place(&mut self, vram: &Vram, stream: &Stream, reserve: usize) -> Result<(), EngineError> {
        let n = self.total();
        if n == 0 {
            return Ok(());
        }
        let room = vram.left()?.saturating_sub(reserve) / self.frame;
        let layers = self.banks.len();
        let most = self.banks.iter().map(|b| b.experts.len()).max().unwrap_or(0);
        let (frames, ring) = match self.placement {
            Placement::Auto if room >= n => (n, 0),
            Placement::Frames(f) if f >= n => (n, 0),
            Placement::Auto => {
                // frames + 2 halves of slack * (most - frames / layers) records fill the room.
                let share = 1.0 - 2.0 * RING_SLACK / layers as f64;
                let f = (room as f64 - 2.0 * RING_SLACK * most as f64) / share;
                if f < 0.0 {
                    return Err(EngineError::Unsupported(format!(
                        "room for {room} expert records of {} KiB, but streaming a layer needs {}; raise \
                         --vram-budget-mib",
                        self.frame >> 10,
                        (2.0 * RING_SLACK * most as f64) as usize
                    )));
                }
                let f = (f as usize).min(n);
                (f, (RING_SLACK * (most as f64 - f as f64 / layers as f64)).ceil() as usize)
            }
            Placement::Frames(f) => (f, most),
            Placement::RandomHalf(_) => (n / 2, most),
            Placement::Host => (0, most),
        };
        // Host memory that does not hold what device memory leaves: the rest stays on disk. A layer of a prompt then goes through
        // the ring whole.
        let from_disk = self.ram > 0 && (n - frames) * self.record > self.ram;
        let (frames, ring) = match (from_disk, self.placement) {
            (true, Placement::Auto) => (room.saturating_sub(2 * most).min(frames), most),
            (true, _) => (frames, most),
            _ => (frames, ring.min(most)),
        };
        self.frame_of = vec![None; n];
        self.owner = vec![None; frames];
        self.score = vec![0.0; n];
        self.used_at = vec![0.0; n];
        self.expect_uses();
        let memory = vram.alloc("expert frames", frames * self.frame)?;
        let order = self.fill_frames(frames);
        if from_disk {
            self.open_disk(vram)?;
        } else if frames < n {
            self.pin(vram)?;
        } else {
            // Copies from page-locked memory run at the link's rate; where it cannot be locked, through the driver's buffers.
            for b in &mut self.banks {
                b.host = vram.device.register(b.bytes.clone()).ok();
            }
        }
        if let Some(disk) = &mut self.disk {
            let held = self.owner.iter().enumerate().filter_map(|(f, o)| Some((f, (*o)? as usize)));
            let moves: Vec<_> = held.map(|(f, e)| (e, memory.at(f * self.frame))).collect();
            disk.land(stream, &moves)?;
            // Then what is likeliest of the rest.
            let mut rest: Vec<usize> = order.into_iter().skip(frames).take(disk.len()).collect();
            rest.sort_unstable();
            if let Some((e, what)) = disk.fetch(&rest, |_| 0.0, |_| false).into_iter().next() {
                return Err(EngineError::Round(format!("expert {e} could not be read: {what}")));
            }
            disk.counts = Default::default();
        }
        for (frame, expert) in self.owner.iter().enumerate().filter(|_| self.disk.is_none()) {
            let Some(expert) = expert.map(|e| e as usize) else { continue };
            let to = memory.at(frame * self.frame);
            let b = self.banks.partition_point(|b| b.experts.end <= expert);
            let bank = &self.banks[b];
            if bank.host.is_some() {
                stream.copy(to, self.host_address(expert), self.record).map_err(fault)?;
            } else {
                let at = (expert - bank.experts.start) * bank.stride;
                let words = &(*bank.bytes).as_ref()[at..at + self.record];
                memory.write(frame * self.frame, words).map_err(fault)?;
            }
        }
        stream.synchronize().map_err(fault)?;
        let addresses = vram.device.pinned(16 * n).map_err(fault)?;
        self.table = Some(vram.alloc("rounds", 16 * n)?);
        self.frames = Some(memory);
        self.addresses = Some(addresses);
        for e in 0..n {
            self.set_address(e);
        }
        if frames == n {
            self.banks.iter_mut().for_each(|b| b.host = None);
        } else {
            let (dev, event) = (&vram.device, || vram.device.event().map_err(fault));
            self.copies = Some((dev.stream().map_err(fault)?, event()?));
            self.ring = Some(Ring {
                memory: vram.alloc("expert ring", 2 * ring * self.frame)?,
                half: ring,
                addresses: dev.pinned(16 * n).map_err(fault)?,
                table: vram.alloc("rounds", 16 * n)?,
                copied: [event()?, event()?],
                used: [event()?, event()?],
                order: Vec::new(),
                next: 0,
            });
        }
        self.before_round(stream)
    }

    /// The first owners of frames: the same number in every layer, or as a test asks. Gives all experts in that order.
    fn fill_frames(&mut self, frames: usize) -> Vec<usize> {
        let n = self.frame_of.len();
        let mut order: Vec<usize> = Vec::with_capacity(n);
        let most = self.banks.iter().map(|b| b.experts.len()).max().unwrap_or(0);
        for i in 0..most {
            for (layer, b) in self.banks.iter().enumerate().filter(|(_, b)| i < b.experts.len()) {
                let n = b.experts.len();
                let place = self.routing.map_or(i, |law| {
                    let (a, c) = ZipfRoute::permutation(n, law.layer_seed(layer as u16));
                    (a * i + c) % n
                });
                order.push(b.experts.start + place);
            }
        }
        if let Placement::RandomHalf(seed) = self.placement {
            order.sort_by_key(|e| crate::numerics::round::mix(seed ^ *e as u64));
        }
        for (frame, e) in order.iter().copied().take(frames).enumerate() {
            self.owner[frame] = Some(e as u32);
            self.frame_of[e] = Some(frame as u32);
        }
        order
    }

    fn open_disk(&mut self, vram: &Vram) -> Result<(), EngineError> {
        let mut banks = Vec::with_capacity(self.banks.len());
        for b in &self.banks {
            let Some(file) = &b.file else {
                return Err(EngineError::Unsupported(format!(
                    "experts need {} MiB of host memory and lie in no file; raise --expert-ram-mib above {}",
                    (self.total() * self.record).div_ceil(1 << 20),
                    self.ram >> 20
                )));
            };
            banks.push((file.clone(), b.stride, b.experts.clone()));
        }
        self.disk = Some(Disk::new(&vram.device, &banks, self.record, self.ram)?);
        Ok(())
    }

    /// Whether some experts are on disk only.
    pub(super) fn on_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Reads of an expert fail from now on.
    pub(super) fn break_expert(&mut self, bank: usize, expert: Option<usize>) {
        if let (Some(d), Some(b)) = (&mut self.disk, self.banks.get(bank)) {
            d.break_expert(expert.map(|e| b.experts.start + e));
        }
    }

    /// Brings the picked experts of a bank to memory and tells the device where; gives those that could not be read.
    pub(super) fn ensure(
        &mut self,
        stream: &Stream,
        bank: usize,
        picks: &[i32],
    ) -> Result<Vec<(usize, String)>, EngineError> {
        let start = self.banks[bank].experts.start;
        let mut wanted: Vec<usize> = picks.iter().map(|i| start + *i as usize).collect();
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|e| self.frame_of[*e].is_none());
        let Some(mut disk) = self.disk.take() else { return Ok(Vec::new()) };
        let held = |e: usize| self.moving.iter().any(|m| m.expert == e);
        let before = disk.counts;
        let failed = disk.fetch(&wanted, |e| self.worth(e), held);
        self.counts.disk_reads += disk.counts.reads - before.reads;
        self.counts.disk_waited += disk.counts.waited - before.waited;
        self.disk = Some(disk);
        // Any record will do where one is missing: its lanes have failed, shapes must stay.
        let stand_in = (0..self.total()).map(|e| self.record_address(e)).find(|a| *a != 0).unwrap_or(0);
        let n = self.total();
        for e in &wanted {
            let address = Some(self.record_address(*e)).filter(|a| *a != 0).unwrap_or(stand_in);
            let down = address + self.down_offset();
            if let Some(a) = &mut self.addresses {
                put(a, *e, address);
                put(a, n + *e, down);
            }
        }
        if let (Some(t), Some(a), false) = (&self.table, &self.addresses, wanted.is_empty()) {
            // Records that left their slots are looked for again before they are used: what the table says of them does not matter.
            stream.copy(t.ptr(), a.device_ptr(), a.as_slice().len()).map_err(fault)?;
        }
        Ok(failed.into_iter().map(|(e, what)| (e - start, what)).collect())
    }

    /// Where the device finds an expert, 0 if nowhere.
    fn record_address(&self, expert: usize) -> u64 {
        match (self.frame_of[expert], &self.frames) {
            (Some(f), Some(m)) => m.at(f as usize * self.frame),
            _ => self.host_address(expert),
        }
    }

    /// A known law's ranking comes with how often each expert is used, as a saved ranking does.
    fn expect_uses(&mut self) {
        let Some(law) = self.routing else { return };
        for (layer, b) in self.banks.iter().enumerate() {
            let n = b.experts.len();
            let total: f64 = (0..n).map(|i| ((i + 1) as f64).powf(-law.s)).sum();
            let (a, c) = ZipfRoute::permutation(n, law.layer_seed(layer as u16));
            for i in 0..n {
                let share = ((i + 1) as f64).powf(-law.s) / total;
                // A use a token, half of it forgotten after the half-life, sums to 1.44 half-lives; ten picks a token.
                let uses = (10.0 * share).min(1.0) * f64::from(HALF_LIFE) / std::f64::consts::LN_2;
                self.score[b.experts.start + (a * i + c) % n] = uses as f32;
            }
        }
    }

    fn pin(&mut self, vram: &Vram) -> Result<(), EngineError> {
        for b in &mut self.banks {
            let direct = vram.device.register(b.bytes.clone());
            b.host = Some(match direct {
                Ok(r) => r,
                // A file's pages cannot be locked everywhere: a copy in anonymous memory can.
                Err(_) => {
                    let copy: Bytes =
                        std::sync::Arc::new(crate::memory::HugeMemory::copy_of((*b.bytes).as_ref())?);
                    b.bytes = copy.clone();
                    vram.device.register(copy).map_err(fault)?
                }
            });
        }
        Ok(())
    }

    fn set_address(&mut self, expert: usize) {
        let address = self.record_address(expert);
        let down = address + self.down_offset();
        let n = self.total();
        if let Some(a) = &mut self.addresses {
            put(a, expert, address);
            put(a, n + expert, down);
        }
        self.dirty = true;
    }

    /// Bytes of gate and up before down in a record: two of three equal parts.
    fn down_offset(&self) -> u64 {
        (self.record / 3 * 2) as u64
    }

    /// Addresses of the records of a bank's experts and of their down parts, U64 each.
    pub(super) fn records(&self, bank: usize) -> Records {
        self.table.as_ref().map_or(Records::default(), |t| self.in_table(t, bank))
    }

    fn in_table(&self, t: &DeviceBuffer, bank: usize) -> Records {
        let first = self.banks[bank].experts.start;
        Records { whole: t.at(8 * first), down: t.at(8 * (self.total() + first)) }
    }

    /// Counts what a decode round used: `ids` of `bank`.
    pub(super) fn note(&mut self, bank: usize, ids: &[i32]) {
        let start = self.banks[bank].experts.start;
        let mut distinct: Vec<usize> = ids.iter().map(|i| start + *i as usize).collect();
        self.counts.picks += distinct.len() as u64;
        self.counts.misses += distinct.iter().filter(|e| self.frame_of[**e].is_none()).count() as u64;
        distinct.sort_unstable();
        distinct.dedup();
        for e in distinct {
            let age = self.now - self.used_at[e];
            self.score[e] = self.score[e] * (-age / HALF_LIFE).exp2() + 1.0;
            self.used_at[e] = self.now;
            if self.frame_of[e].is_none() {
                self.counts.miss_records += 1;
                self.wanted.push(e);
            }
        }
    }

    /// Counts what a part of a prompt call of `rows` rows used: picks of expert e of `bank` are `firsts[e]..firsts[e + 1]`. They count
    /// as if spread over the call, which the clock has passed.
    pub(super) fn note_prompt(&mut self, bank: usize, firsts: &[i32], rows: usize) {
        let span = rows as f32 * std::f32::consts::LN_2 / HALF_LIFE;
        let kept = if span > 0.0 { (1.0 - (-span).exp()) / span } else { 1.0 };
        let start = self.banks[bank].experts.start;
        for (i, w) in firsts.windows(2).enumerate().take(self.banks[bank].experts.len()) {
            let e = start + i;
            let age = self.now - self.used_at[e];
            self.score[e] = self.score[e] * (-age / HALF_LIFE).exp2() + (w[1] - w[0]) as f32 * kept;
            self.used_at[e] = self.now;
        }
    }

    /// `tokens` more tokens have been read.
    pub(super) fn advance(&mut self, tokens: usize) {
        self.now += tokens as f32;
    }

    /// Worth of keeping an expert: how often it was used lately. Replayed against uses over age (LFRU), on routings with and without
    /// repeats, it hits as often or up to 1 % more and moves a third of the records: a record that was used just now and never
    /// before is not worth the link.
    fn worth(&self, e: usize) -> f32 {
        self.score[e] * (-(self.now - self.used_at[e]) / HALF_LIFE).exp2()
    }

    fn victim(&mut self) -> Option<usize> {
        if self.victims.is_empty() {
            let worth = |o: &Option<u32>| o.map_or(-1.0, |e| self.worth(e as usize));
            self.victims = least_worth(self.owner.iter().enumerate().map(|(f, o)| (worth(o), f)));
        }
        self.victims.pop()
    }

    /// Between rounds: finished moves count, new ones start, and the device learns where records are.
    pub(super) fn before_round(&mut self, stream: &Stream) -> Result<(), EngineError> {
        if let Some((_, done)) = &self.copies
            && !self.moving.is_empty()
            && done.is_done().map_err(fault)?
        {
            for m in std::mem::take(&mut self.moving) {
                self.frame_of[m.expert] = Some(m.frame as u32);
                self.owner[m.frame] = Some(m.expert as u32);
                self.set_address(m.expert);
            }
        }
        let moves = matches!(self.placement, Placement::Auto | Placement::Frames(_));
        let mut wanted = std::mem::take(&mut self.wanted);
        let mut started = Vec::new();
        if moves && self.moving.is_empty() && !wanted.is_empty() && self.copies.is_some() {
            wanted.sort_unstable();
            wanted.dedup();
            wanted.retain(|e| self.frame_of[*e].is_none() && self.host_address(*e) != 0);
            wanted.sort_by(|a, b| self.worth(*b).total_cmp(&self.worth(*a)));
            let most = if wanted.len() > 2 * CATCH_UP { CATCH_UP } else { MOVES };
            for e in wanted.into_iter().take(most) {
                let Some(frame) = self.victim() else { break };
                let old = self.owner[frame].map(|o| o as usize);
                if old.is_some_and(|o| self.worth(o) >= self.worth(e) || !self.may_leave(o)) {
                    continue;
                }
                if let Some(o) = old {
                    self.frame_of[o] = None;
                    self.owner[frame] = None;
                    self.set_address(o);
                }
                started.push(Move { expert: e, frame });
            }
        }
        if self.dirty
            && let (Some(t), Some(a)) = (&self.table, &self.addresses)
        {
            stream.copy(t.ptr(), a.device_ptr(), a.as_slice().len()).map_err(fault)?;
            self.dirty = false;
        }
        if let (Some((copies, done)), Some(memory)) = (&self.copies, &self.frames)
            && !started.is_empty()
        {
            // The last round is over: nothing reads the frames, whose old owners the next round looks for in host memory.
            for m in &started {
                copies
                    .copy(memory.at(m.frame * self.frame), self.host_address(m.expert), self.record)
                    .map_err(fault)?;
            }
            copies.record(done).map_err(fault)?;
            self.counts.promotions += started.len() as u64;
            self.moving = started;
        }
        Ok(())
    }

    /// Whether a layer may lose one more frame: its absent records must fit a half of the ring.
    fn may_leave(&self, expert: usize) -> bool {
        let b = self.banks.partition_point(|b| b.experts.end <= expert);
        let absent = self.frame_of[self.banks[b].experts.clone()].iter().filter(|f| f.is_none()).count();
        self.ring.as_ref().is_none_or(|r| absent < r.half)
    }

    /// Before a prompt call that uses most experts of a part: starts streaming its first two layers.
    pub(super) fn begin_stream(&mut self, stream: &Stream, part: Part) -> Result<(), EngineError> {
        let Some(mut ring) = self.ring.take() else { return Ok(()) };
        ring.order = (0..self.banks.len()).filter(|b| self.banks[*b].part == part).collect();
        ring.next = 0;
        for (i, b) in ring.order.iter().enumerate() {
            let mut place = 0;
            for e in self.banks[*b].experts.clone() {
                let address = match (self.frame_of[e], &self.frames) {
                    (Some(f), Some(m)) => m.at(f as usize * self.frame),
                    _ if place < ring.half => {
                        place += 1;
                        ring.memory.at(((i % 2) * ring.half + place - 1) * self.frame)
                    }
                    _ => self.host_address(e),
                };
                put(&mut ring.addresses, e, address);
                put(&mut ring.addresses, self.total() + e, address + self.down_offset());
            }
        }
        let sent =
            stream.copy(ring.table.ptr(), ring.addresses.device_ptr(), ring.addresses.as_slice().len());
        self.ring = Some(ring);
        sent.map_err(fault)?;
        self.stream_layer(0)?;
        self.stream_layer(1)
    }

    fn stream_layer(&mut self, i: usize) -> Result<(), EngineError> {
        let (Some(ring), Some((copies, _)), Some(frames)) = (&self.ring, &self.copies, &self.frames) else {
            return Ok(());
        };
        let Some(bank) = ring.order.get(i).map(|b| &self.banks[*b]) else { return Ok(()) };
        if i >= 2 {
            copies.wait(&ring.used[i % 2]).map_err(fault)?;
        }
        let mut streamed = 0;
        let mut moves = Vec::new();
        let home = frames.ptr()..frames.ptr() + frames.len() as u64;
        for e in bank.experts.clone() {
            let at = &ring.addresses.as_slice()[8 * e..8 * e + 8];
            let to = at.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
            let from = self.host_address(e);
            if to != from && !home.contains(&to) {
                streamed += 1;
                if from == 0 {
                    moves.push((e, to));
                    continue;
                }
                copies.copy(to, from, self.record).map_err(fault)?;
            }
        }
        if let Some(disk) = &mut self.disk {
            let before = disk.counts;
            disk.land(copies, &moves)?;
            self.counts.disk_reads += disk.counts.reads - before.reads;
            self.counts.disk_waited += disk.counts.waited - before.waited;
        }
        copies.record(&ring.copied[i % 2]).map_err(fault)?;
        self.counts.streamed += streamed;
        Ok(())
    }

    /// Records of a bank in a streamed prompt call; work enqueued from now on waits for them.
    pub(super) fn streamed(&mut self, stream: &Stream, bank: usize) -> Result<Records, EngineError> {
        let Some(ring) = &self.ring else { return Ok(self.records(bank)) };
        match ring.order.iter().position(|b| *b == bank) {
            Some(i) if i == ring.next => {
                stream.wait(&ring.copied[i % 2]).map_err(fault)?;
                Ok(self.in_table(&ring.table, bank))
            }
            _ => Ok(self.records(bank)),
        }
    }

    /// The work on a streamed bank has been enqueued: its half of the ring is the next but one layer's.
    pub(super) fn streamed_done(&mut self, stream: &Stream, bank: usize) -> Result<(), EngineError> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let i = ring.next;
        if ring.order.get(i) != Some(&bank) {
            return Ok(());
        }
        stream.record(&ring.used[i % 2]).map_err(fault)?;
        ring.next += 1;
        self.stream_layer(i + 2)
    }
}
