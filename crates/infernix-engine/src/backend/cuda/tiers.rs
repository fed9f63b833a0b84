//! Where routed experts are: frames of device memory for some, page-locked host memory for all.
//!
//! A table of addresses on the device says where each record is; kernels read it there, over the link if it is the
//! host's. Bits do not depend on it. Between rounds the host moves records it has seen used into frames of records that
//! it has not; copies run beside the next round and count once they are done. Prompt calls, which use nearly every
//! expert, stream the records of the next layers into a ring while a layer computes. While no prompt runs, the ring and the
//! activations of prompts hold more frames: what a round needs of them it takes back before it begins.

use super::context::Routing;
use super::disk::Disk;
use super::plan::{Frames, HEADROOM};
use super::vram::{Vram, fault};
use super::workers::Matrices;
use crate::backend::weights::Bytes;
use crate::backend::{FileRange, Part};
use crate::error::EngineError;
use crate::residency::{HALF_LIFE, Move, Residency};
use infernix_cuda::DeviceBuffer;
use infernix_cuda::driver::{Event, PinnedBuffer, Registered, Stream};
use infernix_cuda::kernels::stored::StoredExperts;
use infernix_cuda::kernels::zipf::ZipfRoute;
use std::ops::Range;
use std::sync::Arc;

/// Records whose copies tell the link's rate.
const MEASURED: usize = 64;

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
    shape: RecordShape,
    /// What the CPU computes missing experts from; `None` where it cannot.
    matrices: Option<Arc<Matrices>>,
    /// In the flat numbering of all experts.
    experts: Range<usize>,
    host: Option<Registered>,
}

/// How a bank's records lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordShape {
    pub(super) experts: usize,
    /// Bytes from one record to the next.
    pub(super) stride: usize,
    /// Bytes of a record.
    pub(super) record: usize,
    /// Bytes of a record before its down part.
    pub(super) down: usize,
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

/// Counters of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// Picks of decode rounds.
    pub picks: u64,
    /// Picks whose expert had no frame.
    pub misses: u64,
    /// Distinct records that decode rounds read over the link.
    pub miss_records: u64,
    /// Of these, records whose experts the CPU computed instead.
    pub cpu_records: u64,
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
    /// Bytes of the largest record.
    record: usize,
    frame: usize,
    frames: Option<DeviceBuffer>,
    /// Where a decode round brings records that the CPU's threads do not know and kernels do not read over the link.
    stage: Option<DeviceBuffer>,
    /// Address of every frame: those of `frames`, then the lent ones.
    places: Vec<u64>,
    /// Whether memory of prompts is lent, and the addresses of the arena that is.
    lend: bool,
    lent_arena: Range<u64>,
    residency: Residency,
    addresses: Option<PinnedBuffer>,
    table: Option<DeviceBuffer>,
    dirty: bool,
    moving: Vec<Move>,
    copies: Option<(Stream, Event)>,
    /// What the round's stream did up to here, for the copies that must come after it.
    before: Option<Event>,
    ring: Option<Ring>,
    /// Host memory for experts, in bytes; 0: for all of them.
    ram: usize,
    disk: Option<Disk>,
    link_seconds: Option<f64>,
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
    pub(super) fn new(placement: Placement, routing: Option<Routing>, ram: usize, lend: bool) -> Self {
        Tiers {
            placement,
            routing,
            banks: Vec::new(),
            record: 0,
            frame: 0,
            frames: None,
            stage: None,
            places: Vec::new(),
            lend: lend && matches!(placement, Placement::Auto | Placement::Frames(_)),
            lent_arena: 0..0,
            residency: Residency::default(),
            addresses: None,
            table: None,
            dirty: false,
            moving: Vec::new(),
            copies: None,
            before: None,
            ring: None,
            ram,
            disk: None,
            link_seconds: None,
            counts: TierCounts::default(),
        }
    }

    /// Takes a bank; gives its number.
    pub(super) fn add(
        &mut self,
        name: &str,
        bytes: Bytes,
        file: Option<FileRange>,
        shape: RecordShape,
        matrices: Option<Matrices>,
    ) -> usize {
        let first = self.banks.last().map_or(0, |b| b.experts.end);
        let part = if name.starts_with("mtp/") { Part::Drafter } else { Part::Target };
        self.record = self.record.max(shape.record);
        self.frame = self.record.next_multiple_of(256);
        let experts = first..first + shape.experts;
        let matrices = matrices.map(Arc::new);
        self.banks.push(Bank { part, bytes, file, shape, matrices, experts, host: None });
        self.banks.len() - 1
    }

    fn total(&self) -> usize {
        self.banks.last().map_or(0, |b| b.experts.end)
    }

    /// Layers whose experts are records here.
    pub(super) fn layers(&self) -> usize {
        self.banks.iter().filter(|b| b.part == Part::Target).count()
    }

    /// Whether some experts have no frame.
    pub(super) fn is_partial(&self) -> bool {
        self.copies.is_some()
    }

    /// Frames that always are, and those in memory of prompts.
    pub(super) fn frames(&self) -> (usize, usize) {
        let own = self.frames.as_ref().map_or(0, |m| m.len() / self.frame.max(1));
        (own, self.places.len() - own)
    }

    /// Bytes of the largest record.
    pub(super) fn record_bytes(&self) -> usize {
        self.record
    }

    /// Where the device finds an expert in host memory; 0 if it is on disk only.
    fn host_address(&self, expert: usize) -> u64 {
        if let Some(d) = &self.disk {
            return d.address(expert).unwrap_or(0);
        }
        let bank = self.bank_of(expert);
        let at = ((expert - bank.experts.start) * bank.shape.stride) as u64;
        bank.host.as_ref().map_or(0, |h| h.device_ptr() + at)
    }

    fn bank_of(&self, expert: usize) -> &Bank {
        &self.banks[self.banks.partition_point(|b| b.experts.end <= expert)]
    }

    fn record_of(&self, expert: usize) -> usize {
        self.bank_of(expert).shape.record
    }

    /// Gives frames to experts, in what all else has left, and fills them. `arena`: addresses of activations that only prompts use.
    pub(super) fn place(
        &mut self,
        vram: &Vram,
        stream: &Stream,
        arena: Range<u64>,
    ) -> Result<(), EngineError> {
        let n = self.total();
        if n == 0 {
            return Ok(());
        }
        let banks: Vec<usize> = self.banks.iter().map(|b| b.experts.len()).collect();
        let room = vram.left()?.saturating_sub(HEADROOM);
        let plan = |room| Frames::plan(self.placement, room, &banks, (self.record, self.frame), self.ram);
        let mut planned = plan(room)?;
        if planned.own < n && self.banks.iter().any(|b| b.matrices.is_none()) {
            let stage = StoredExperts::PICKS * self.frame;
            planned = plan(room.saturating_sub(stage))?;
            self.stage = Some(vram.alloc("expert stage", stage)?);
        }
        let Frames { own: frames, ring, from_disk } = planned;
        let memory = vram.alloc("expert frames", frames * self.frame)?;
        self.places = (0..frames).map(|f| memory.at(f * self.frame)).collect();
        if frames < n {
            let (dev, event) = (&vram.device, || vram.device.event().map_err(fault));
            self.copies = Some((dev.stream().map_err(fault)?, event()?));
            self.before = Some(event()?);
            let ring = Ring {
                memory: vram.alloc("expert ring", 2 * ring * self.frame)?,
                half: ring,
                addresses: dev.pinned(16 * n).map_err(fault)?,
                table: vram.alloc("rounds", 16 * n)?,
                copied: [event()?, event()?],
                used: [event()?, event()?],
                order: Vec::new(),
                next: 0,
            };
            // What is read from disk on the way to a frame has no place of its own in host memory to be found at again.
            if self.lend && !from_disk {
                let step = self.frame as u64;
                let start = arena.start.next_multiple_of(256);
                self.lent_arena = start..arena.end;
                let in_arena = (0..arena.end.saturating_sub(start) / step).map(|i| start + i * step);
                let in_ring = (0..2 * ring.half).map(|i| ring.memory.at(i * self.frame));
                self.places.extend(in_ring.chain(in_arena).take(n - frames));
            }
            self.ring = Some(ring);
        }
        let order = self.first_order();
        self.residency = Residency::new(n, self.places.len(), order.iter().copied());
        self.expect_uses();
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
            let held = self.places.iter().enumerate();
            let moves: Vec<_> = held.filter_map(|(f, to)| Some((self.residency.owner(f)?, *to))).collect();
            disk.land(stream, &moves)?;
            // Then what is likeliest of the rest.
            let mut rest: Vec<usize> = order.into_iter().skip(frames).take(disk.len()).collect();
            rest.sort_unstable();
            if let Some((e, what)) = disk.fetch(&rest, |_| 0.0, |_| false).into_iter().next() {
                return Err(EngineError::Round(format!("expert {e} could not be read: {what}")));
            }
            disk.counts = Default::default();
        }
        let (start, end) = (vram.device.event().map_err(fault)?, vram.device.event().map_err(fault)?);
        stream.record(&start).map_err(fault)?;
        for (frame, to) in self.places.iter().enumerate().filter(|_| self.disk.is_none()) {
            let Some(expert) = self.residency.owner(frame) else { continue };
            let bank = self.bank_of(expert);
            if bank.host.is_some() {
                stream.copy(*to, self.host_address(expert), bank.shape.record).map_err(fault)?;
            } else {
                let at = (expert - bank.experts.start) * bank.shape.stride;
                let words = &(*bank.bytes).as_ref()[at..at + bank.shape.record];
                memory.write(frame * self.frame, words).map_err(fault)?;
            }
        }
        stream.record(&end).map_err(fault)?;
        stream.synchronize().map_err(fault)?;
        if self.places.len() >= MEASURED && self.banks.iter().all(|b| b.host.is_some()) {
            self.link_seconds =
                Some(end.micros_since(&start).map_err(fault)? * 1e-6 / self.places.len() as f64);
        }
        let addresses = vram.device.pinned(20 * n).map_err(fault)?;
        self.table = Some(vram.alloc("rounds", 20 * n)?);
        self.frames = Some(memory);
        self.addresses = Some(addresses);
        for e in 0..n {
            self.set_address(e);
        }
        if frames == n {
            self.banks.iter_mut().for_each(|b| b.host = None);
        }
        self.upload(stream)
    }

    /// All experts, those first that frames are for: the same number in every layer, or as a test asks.
    fn first_order(&self) -> Vec<usize> {
        let n = self.total();
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
            banks.push((file.clone(), (b.shape.stride, b.shape.record), b.experts.clone()));
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
        wanted.retain(|e| self.residency.frame_of(*e).is_none());
        let Some(mut disk) = self.disk.take() else { return Ok(Vec::new()) };
        let held = |e: usize| self.moving.iter().any(|m| m.expert == e);
        let before = disk.counts;
        let failed = disk.fetch(&wanted, |e| self.residency.worth(e), held);
        self.counts.disk_reads += disk.counts.reads - before.reads;
        self.counts.disk_waited += disk.counts.waited - before.waited;
        self.disk = Some(disk);
        // Any record will do where one is missing: its lanes have failed, shapes must stay.
        let stand_in = (0..self.total()).map(|e| self.record_address(e)).find(|a| *a != 0).unwrap_or(0);
        let n = self.total();
        for e in &wanted {
            let address = Some(self.record_address(*e)).filter(|a| *a != 0).unwrap_or(stand_in);
            let down = address + self.down_offset(*e);
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
        match self.residency.frame_of(expert) {
            Some(f) => self.places[f],
            None => self.host_address(expert),
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
                self.residency.preset(b.experts.start + (a * i + c) % n, uses as f32);
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
                    let copy: Bytes = Arc::new(crate::memory::HugeMemory::copy_of((*b.bytes).as_ref())?);
                    b.bytes = copy.clone();
                    vram.device.register(copy).map_err(fault)?
                }
            });
        }
        Ok(())
    }

    fn set_address(&mut self, expert: usize) {
        let address = self.record_address(expert);
        let down = address + self.down_offset(expert);
        let n = self.total();
        if let Some(a) = &mut self.addresses {
            put(a, expert, address);
            put(a, n + expert, down);
            let away = u32::from(self.residency.frame_of(expert).is_none()).to_le_bytes();
            a.as_mut_slice()[16 * n + 4 * expert..][..4].copy_from_slice(&away);
        }
        self.dirty = true;
    }

    fn down_offset(&self, expert: usize) -> u64 {
        self.bank_of(expert).shape.down as u64
    }

    /// Addresses of the records of a bank's experts and of their down parts, U64 each.
    pub(super) fn records(&self, bank: usize) -> Records {
        self.table.as_ref().map_or(Records::default(), |t| self.in_table(t, bank))
    }

    fn in_table(&self, t: &DeviceBuffer, bank: usize) -> Records {
        let first = self.banks[bank].experts.start;
        Records { whole: t.at(8 * first), down: t.at(8 * (self.total() + first)) }
    }

    /// U32 of each expert of a bank: whether it has no frame.
    pub(super) fn away(&self, bank: usize) -> u64 {
        let at = 16 * self.total() + 4 * self.banks[bank].experts.start;
        self.table.as_ref().map_or(0, |t| t.at(at))
    }

    /// Every bank's records in host memory; `None` where the CPU cannot compute some.
    pub(super) fn in_memory(&self) -> Option<Vec<(Bytes, Arc<Matrices>)>> {
        self.banks.iter().map(|b| Some((b.bytes.clone(), b.matrices.clone()?))).collect()
    }

    /// Places of [`StoredExperts::PICKS`] records and the bytes between them; 0 where every record has a frame.
    pub(super) fn stage(&self) -> (u64, usize) {
        (self.stage.as_ref().map_or(0, DeviceBuffer::ptr), self.frame)
    }

    /// Seconds that a record took over the link when frames were filled, if enough were.
    pub(super) fn link_seconds(&self) -> Option<f64> {
        self.link_seconds
    }

    /// Counts what a decode round used: `ids` of `bank`.
    pub(super) fn note(&mut self, bank: usize, ids: &[i32]) {
        let start = self.banks[bank].experts.start;
        let picks: Vec<usize> = ids.iter().map(|i| start + *i as usize).collect();
        self.counts.picks += picks.len() as u64;
        self.counts.misses += picks.iter().filter(|e| self.residency.frame_of(**e).is_none()).count() as u64;
        self.counts.miss_records += self.residency.note(picks).missing;
    }

    /// Counts what a part of a prompt call of `rows` rows used: picks of expert e of `bank` are `firsts[e]..firsts[e + 1]`.
    pub(super) fn note_prompt(&mut self, bank: usize, firsts: &[i32], rows: usize) {
        let picks = firsts.windows(2).map(|w| (w[1] - w[0]) as usize);
        self.residency.note_prompt(self.banks[bank].experts.clone().zip(picks), rows);
    }

    /// `tokens` more tokens have been read.
    pub(super) fn advance(&mut self, tokens: usize) {
        self.residency.advance(tokens);
    }

    /// Between rounds: finished moves count, frames make way for what the next round needs of their memory, new moves start, and the
    /// device learns where records are. `arena`: where the activations of the round end; `ring`: whether it streams experts.
    pub(super) fn before_round(
        &mut self,
        stream: &Stream,
        arena: u64,
        ring: bool,
    ) -> Result<(), EngineError> {
        let Some((_, done)) = &self.copies else { return Ok(()) };
        let own = self.frames().0;
        let in_ring = self.ring.as_ref().map_or(0, |r| 2 * r.half);
        let open: Vec<bool> = (0..self.places.len())
            .map(|f| f < own || if f < own + in_ring { !ring } else { self.places[f] >= arena })
            .collect();
        let changes = (own..open.len()).any(|f| self.residency.is_open(f) != open[f]);
        if !self.moving.is_empty() {
            if changes {
                // What is on its way to a frame must not arrive after it has become something else.
                done.wait().map_err(fault)?;
            }
            if done.is_done().map_err(fault)? {
                let moved = std::mem::take(&mut self.moving);
                self.residency.end_moves(&moved);
                moved.iter().for_each(|m| self.set_address(m.expert));
            }
        }
        let mut residency = std::mem::take(&mut self.residency);
        let may_leave = |r: &Residency, e: usize| self.may_leave(r, e);
        let shifts = match changes {
            true => residency.keep_open(|f| open[f], may_leave),
            false => Vec::new(),
        };
        let mut started = Vec::new();
        if matches!(self.placement, Placement::Auto | Placement::Frames(_)) && self.moving.is_empty() {
            started = residency.begin_moves(|e| self.host_address(e) != 0, may_leave);
        } else {
            residency.skip_moves();
        }
        self.residency = residency;
        for s in &shifts {
            stream.copy(self.places[s.to], self.places[s.from], self.record).map_err(fault)?;
        }
        match changes {
            true => (0..self.total()).for_each(|e| self.set_address(e)),
            false => started.iter().filter_map(|m| m.left).for_each(|e| self.set_address(e)),
        }
        self.upload(stream)?;
        let (Some((copies, done)), Some(before)) = (&self.copies, &self.before) else { return Ok(()) };
        if changes {
            // Memory that changes hands may be read or written by the stream up to here.
            stream.record(before).map_err(fault)?;
            copies.wait(before).map_err(fault)?;
        }
        if !started.is_empty() {
            // The last round is over: nothing reads the frames, whose old owners the next round looks for in host memory.
            for m in &started {
                let (to, from) = (self.places[m.frame], self.host_address(m.expert));
                copies.copy(to, from, self.record_of(m.expert)).map_err(fault)?;
            }
            copies.record(done).map_err(fault)?;
            self.counts.promotions += started.len() as u64;
            self.moving = started;
        }
        Ok(())
    }

    /// Sends the table if it has changed.
    fn upload(&mut self, stream: &Stream) -> Result<(), EngineError> {
        if let (Some(t), Some(a), true) = (&self.table, &self.addresses, self.dirty) {
            stream.copy(t.ptr(), a.device_ptr(), a.as_slice().len()).map_err(fault)?;
            self.dirty = false;
        }
        Ok(())
    }

    /// Whether a resident may leave its frame: records of its layer that are absent while a prompt runs must fit a half of the ring.
    fn may_leave(&self, residency: &Residency, expert: usize) -> bool {
        let own = self.frames().0;
        let stays = |e: usize| residency.frame_of(e).is_some_and(|f| f < own);
        let absent = self.bank_of(expert).experts.clone().filter(|e| !stays(*e)).count();
        !stays(expert) || self.ring.as_ref().is_none_or(|r| absent < r.half)
    }

    /// Before a prompt call that uses most experts of a part: starts streaming its first two layers.
    pub(super) fn begin_stream(&mut self, stream: &Stream, part: Part) -> Result<(), EngineError> {
        let Some(mut ring) = self.ring.take() else { return Ok(()) };
        ring.order = (0..self.banks.len()).filter(|b| self.banks[*b].part == part).collect();
        ring.next = 0;
        for (i, b) in ring.order.iter().enumerate() {
            let mut place = 0;
            for e in self.banks[*b].experts.clone() {
                let address = match self.residency.frame_of(e) {
                    Some(f) => self.places[f],
                    _ if place < ring.half => {
                        place += 1;
                        ring.memory.at(((i % 2) * ring.half + place - 1) * self.frame)
                    }
                    _ => self.host_address(e),
                };
                put(&mut ring.addresses, e, address);
                put(&mut ring.addresses, self.total() + e, address + self.down_offset(e));
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
        let (Some(ring), Some((copies, _))) = (&self.ring, &self.copies) else { return Ok(()) };
        let Some(bank) = ring.order.get(i).map(|b| &self.banks[*b]) else { return Ok(()) };
        if i >= 2 {
            copies.wait(&ring.used[i % 2]).map_err(fault)?;
        }
        let mut streamed = 0;
        let mut moves = Vec::new();
        for e in bank.experts.clone() {
            let at = &ring.addresses.as_slice()[8 * e..8 * e + 8];
            let to = at.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
            let from = self.host_address(e);
            if to != from && self.residency.frame_of(e).is_none() {
                streamed += 1;
                if from == 0 {
                    moves.push((e, to));
                    continue;
                }
                copies.copy(to, from, bank.shape.record).map_err(fault)?;
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
