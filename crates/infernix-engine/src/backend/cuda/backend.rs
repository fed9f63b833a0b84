//! [`Backend`] on a CUDA device.

use super::experts::CudaExperts;
use super::plans::Plans;
use super::round::{Board, Round};
use super::state::{CudaSnapshot, DeviceState};
use super::tiers::{Placement, TierCounts, Tiers};
use super::vram::{Arena, CudaBuf, Ledger, Vram, fault};
use super::weights::CudaWeight;
use crate::backend::*;
use crate::error::EngineError;
use crate::ngram::NgramTicket;
use crate::state::StateLayout;
use infernix_cuda::driver::{Graph, PinnedBuffer, Stream, Tape};
use infernix_cuda::kernels::index::Rotary;
use infernix_cuda::kernels::linear::Out;
use infernix_cuda::kernels::moves::RowCopy;
use infernix_cuda::{Device, DeviceBuffer};
use std::sync::Arc;

/// Rows of decode rounds that share one set of addresses, and with them graphs.
const DECODE_ROWS: usize = 512;
/// Device memory kept free for activations when experts get what is left.
const RESERVE: usize = 1 << 30;
/// Tapes and graphs kept; the oldest go.
const GRAPHS: usize = 48;

/// How the backend runs.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Device ordinal.
    pub device: i32,
    /// Device memory to use at most, in bytes; 0 = all that is free.
    pub budget: usize,
    /// Where routed experts go.
    pub placement: Placement,
    /// Replay decode rounds as graphs.
    pub graphs: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions { device: 0, budget: 0, placement: Placement::Auto, graphs: true }
    }
}

/// Experts and weights of each row on the device.
pub struct CudaRouting {
    pub(super) ids: CudaBuf,
    pub(super) weights: CudaBuf,
    pub(super) top: usize,
}

/// Selected blocks of each row.
pub struct CudaSelection {
    pub(super) ids: CudaBuf,
    pub(super) counts: CudaBuf,
    /// Blocks kept, at most.
    pub(super) keep: usize,
    pub(super) ratio: usize,
    /// Every row has no more blocks than are kept.
    pub(super) dense: bool,
}

/// n-gram rows on their way to the device.
struct Stage {
    host: PinnedBuffer,
    device: DeviceBuffer,
}

/// The CUDA backend.
pub struct Cuda {
    pub(super) vram: Arc<Vram>,
    pub(super) arena: Arc<Arena>,
    pub(super) stream: Stream,
    pub(super) plans: Plans,
    pub(super) state: Option<DeviceState>,
    pub(super) tiers: Tiers,
    pub(super) round: Option<Round>,
    /// The identity permutation, for combines of outputs in pick order.
    pub(super) identity: Option<DeviceBuffer>,
    /// Routings of this decode round by bank, to be counted.
    pub(super) routed: Vec<(usize, CudaBuf)>,
    /// Whether this prompt round streams its experts.
    pub(super) streaming: bool,
    /// Convolution, `A_log` and time-step bias of each delta rule layer, for refolds.
    pub(super) gdn_weights: Vec<(u64, u64, u64)>,
    pub(super) chained: bool,
    options: CudaOptions,
    boards: [Option<Board>; 2],
    stages: Vec<Stage>,
    staged: usize,
    io: Option<PinnedBuffer>,
    log: Option<PinnedBuffer>,
    angles: Vec<(usize, CudaBuf)>,
    rotary: Vec<(RopeTable, DeviceBuffer, DeviceBuffer)>,
    holding: bool,
    failed: Option<EngineError>,
    failed_lanes: Vec<(usize, String)>,
    graphs: Vec<(Tape, Option<Graph>)>,
}

impl Cuda {
    /// Opens a device; [`Backend::allocate`] adds state.
    pub fn new(options: CudaOptions) -> Result<Self, EngineError> {
        let device = Device::open(options.device).map_err(fault)?;
        let vram = Arc::new(Vram::new(device.clone(), options.budget));
        Ok(Cuda {
            arena: Arc::new(Arena::new(vram.clone())),
            stream: device.stream().map_err(fault)?,
            plans: Plans::new(&device).map_err(fault)?,
            vram,
            state: None,
            tiers: Tiers::new(options.placement),
            round: None,
            identity: None,
            routed: Vec::new(),
            streaming: false,
            gdn_weights: Vec::new(),
            options,
            boards: [None, None],
            stages: Vec::new(),
            staged: 0,
            io: None,
            log: None,
            angles: Vec::new(),
            rotary: Vec::new(),
            chained: false,
            holding: false,
            failed: None,
            failed_lanes: Vec::new(),
            graphs: Vec::new(),
        })
    }

    /// Name of the device.
    pub fn device_name(&self) -> &str {
        &self.vram.device.info().name
    }

    /// What device memory is used for.
    pub fn ledger(&self) -> Ledger {
        self.vram.ledger()
    }

    /// What the expert tiers did.
    pub fn tier_counts(&self) -> TierCounts {
        self.tiers.counts
    }

    /// Frames for experts, and bytes of a record.
    pub fn expert_frames(&self) -> (usize, usize) {
        (self.tiers.frames(), self.tiers.record_bytes())
    }

    // ---- plumbing ------------------------------------------------------------------------------------------

    /// Whether the next launch may overlap its predecessor: true if that is a launch.
    pub(super) fn pdl(&mut self) -> bool {
        std::mem::replace(&mut self.chained, true)
    }

    /// Runs `f` unless something failed before; its failure ends the round.
    pub(super) fn guard<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, EngineError>) -> Option<T> {
        if self.failed.is_some() {
            return None;
        }
        match f(self) {
            Ok(v) => Some(v),
            Err(e) => {
                self.failed = Some(e);
                None
            }
        }
    }

    pub(super) fn fresh(&self, rows: usize, width: usize, f32: bool) -> Result<CudaBuf, EngineError> {
        let lease = self.arena.lease(rows * width * if f32 { 4 } else { 2 })?;
        Ok(CudaBuf { ptr: lease.ptr(), lease: Some(lease), rows, width, f32, convolution: 0 })
    }

    /// A new matrix that `f` fills.
    pub(super) fn make(
        &mut self,
        rows: usize,
        width: usize,
        f32: bool,
        f: impl FnOnce(&mut Self, &CudaBuf) -> Result<(), EngineError>,
    ) -> CudaBuf {
        let made = self.guard(|c| {
            let y = c.fresh(rows, width, f32)?;
            f(c, &y)?;
            Ok(y)
        });
        made.unwrap_or(CudaBuf { lease: None, ptr: 0, rows, width, f32, convolution: 0 })
    }

    pub(super) fn round(&self) -> Result<&Round, EngineError> {
        self.round.as_ref().ok_or_else(|| EngineError::Round("an operation outside a round".into()))
    }

    pub(super) fn is_decode(&self) -> bool {
        self.round.as_ref().is_some_and(Round::is_decode)
    }

    pub(super) fn state(&self) -> Result<&DeviceState, EngineError> {
        self.state.as_ref().ok_or_else(|| EngineError::Round("a round before allocate".into()))
    }

    fn state_mut(&mut self) -> Result<&mut DeviceState, EngineError> {
        self.state.as_mut().ok_or_else(|| EngineError::Round("a round before allocate".into()))
    }

    /// Makes the launches noted so far, in the middle of a round.
    fn flush(&mut self) -> Result<(), EngineError> {
        if self.holding {
            let tape = self.stream.release();
            self.holding = false;
            self.stream.play(&tape).map_err(fault)?;
        }
        self.chained = false;
        Ok(())
    }

    /// Makes a round's launches: by its graph from its third time on.
    fn finish(&mut self) -> Result<(), EngineError> {
        if !self.holding {
            return Ok(());
        }
        let tape = self.stream.release();
        self.holding = false;
        self.chained = false;
        if tape.is_empty() {
            return Ok(());
        }
        let known = self.graphs.iter().rposition(|(t, _)| *t == tape);
        let Some(i) = known else {
            self.stream.play(&tape).map_err(fault)?;
            if self.options.graphs {
                if self.graphs.len() >= GRAPHS {
                    // Nothing of an earlier round is still running: rounds end with a wait.
                    self.graphs.remove(0);
                }
                self.graphs.push((tape, None));
            }
            return Ok(());
        };
        if self.graphs[i].1.is_none() {
            let stream = &self.stream;
            self.graphs[i].1 = Some(stream.capture(|| stream.play(&tape)).map_err(fault)?);
        }
        match &self.graphs[i].1 {
            Some(g) => self.stream.replay(g).map_err(fault),
            None => Ok(()),
        }
    }

    pub(super) fn act(x: &CudaBuf) -> Result<u64, EngineError> {
        if x.f32 {
            return Err(EngineError::Round("FP32 values where activations are expected".into()));
        }
        Ok(x.ptr)
    }

    /// `y[c] = W x[c]` for `cols` columns, pitches in elements.
    #[expect(clippy::too_many_arguments, reason = "two matrices and their pitches")]
    pub(super) fn product(
        &mut self,
        w: &CudaWeight,
        x: u64,
        x_pitch: usize,
        cols: usize,
        y: u64,
        y_pitch: usize,
        out: Out,
    ) -> Result<(), EngineError> {
        let size = if out == Out::F32 { 4 } else { 2 };
        let mut row = 0;
        if w.parts.is_empty() {
            return Err(EngineError::Weight { name: w.name.clone(), what: "is no matrix".into() });
        }
        for part in &w.parts {
            let to = y + (row * size) as u64;
            row += part.n;
            // A few rows of a prompt are cheaper through the decode kernel too.
            if cols > 64 && !self.is_decode() && x_pitch.is_multiple_of(8) && part.k.is_multiple_of(8) {
                let pdl = self.pdl();
                let g = self.plans.gemm(part.format).map_err(fault)?;
                g.launch(&self.stream, part, x, x_pitch, cols, to, y_pitch, out, pdl).map_err(fault)?;
                continue;
            }
            for c in (0..cols).step_by(64) {
                let n = (cols - c).min(64);
                let pdl = self.pdl();
                let g = self.plans.gemv(part.format, part.n, part.k_pad, n).map_err(fault)?;
                let (x, to) = (x + (2 * c * x_pitch) as u64, to + (c * y_pitch * size) as u64);
                g.launch(&self.stream, part, x, x_pitch, to, y_pitch, out, pdl).map_err(fault)?;
            }
        }
        Ok(())
    }

    pub(super) fn copy_rows(&mut self, c: RowCopy) -> Result<(), EngineError> {
        let pdl = self.pdl();
        self.plans.moves.copy(&self.stream, &c, pdl).map_err(fault)
    }

    /// Frequencies and axes of a rotary table on the device.
    pub(super) fn rotary(&mut self, rope: &RopeTable) -> Result<Rotary, EngineError> {
        let same = |r: &RopeTable| r.freq == rope.freq && r.axis == rope.axis && r.scale == rope.scale;
        let found = self.rotary.iter().position(|(r, ..)| same(r));
        let i = match found {
            Some(i) => i,
            None => {
                let freq = self.vram.take("weights", 8 * rope.freq.len())?;
                freq.write(0, &rope.freq).map_err(fault)?;
                let axis = self.vram.take("weights", rope.axis.len())?;
                axis.write(0, &rope.axis).map_err(fault)?;
                self.rotary.push((rope.clone(), freq, axis));
                self.rotary.len() - 1
            }
        };
        let (_, freq, axis) = &self.rotary[i];
        Ok(Rotary { freq: freq.ptr(), axis: axis.ptr(), scale: rope.scale as f32, half: rope.freq.len() })
    }

    /// cos and sin of the round's rows, `[rows][2][half]` FP32.
    pub(super) fn angles(&mut self, rope: &RopeTable) -> Result<u64, EngineError> {
        let key = std::ptr::from_ref(rope) as usize;
        if let Some((_, b)) = self.angles.iter().find(|(k, _)| *k == key) {
            return Ok(b.ptr);
        }
        let r = self.rotary(rope)?;
        let lanes = self.round()?.lanes;
        let b = self.fresh(lanes.rows, 2 * r.half, true)?;
        let pdl = self.pdl();
        self.plans
            .rows
            .rope_table(
                &self.stream,
                lanes.positions,
                r.freq,
                r.axis,
                r.scale,
                r.half,
                lanes.rows,
                b.ptr,
                pdl,
            )
            .map_err(fault)?;
        let ptr = b.ptr;
        self.angles.push((key, b));
        Ok(ptr)
    }

    fn fetch(&mut self, x: &CudaBuf) -> Result<Vec<f32>, EngineError> {
        self.flush()?;
        let bytes = x.bytes();
        if x.ptr == 0 || bytes == 0 {
            return Ok(Vec::new());
        }
        if self.io.as_ref().is_none_or(|io| io.as_slice().len() < bytes) {
            self.io = None;
            self.io = Some(self.vram.device.pinned(bytes.next_power_of_two()).map_err(fault)?);
        }
        let Some(io) = &self.io else { return Ok(Vec::new()) };
        self.stream.copy(io.device_ptr(), x.ptr, bytes).map_err(fault)?;
        self.stream.synchronize().map_err(fault)?;
        let words = &io.as_slice()[..bytes];
        Ok(if x.f32 {
            words.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        } else {
            words
                .as_chunks::<2>()
                .0
                .iter()
                .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))
                .collect()
        })
    }

    fn begin(&mut self, meta: StepMeta) -> Result<(), EngineError> {
        let decode = meta.kind == CallKind::Decode;
        let target = meta.part == Part::Target;
        let (slots, pages) = {
            let layout = &self.state()?.layout;
            (layout.slots, layout.pages)
        };
        meta.validate(slots, pages)?;
        for l in &meta.lanes {
            if target && self.state()?.recorded[l.slot] > 0 {
                return Err(EngineError::Round(format!(
                    "slot {} has columns that are not committed",
                    l.slot
                )));
            }
        }
        self.failed_lanes.clear();
        self.routed.clear();
        self.angles.clear();
        self.arena.begin();
        self.staged = 0;
        self.chained = false;
        self.tiers.before_round(&self.stream)?;
        let board = &mut self.boards[usize::from(!(decode && meta.rows() <= DECODE_ROWS))];
        if board.as_ref().is_none_or(|b| !b.holds(&meta)) {
            let rows = if decode { DECODE_ROWS } else { 1024 }.max(meta.rows().next_power_of_two());
            *board = None;
            *board = Some(Board::new(&self.vram, rows, slots, pages)?);
        }
        let Some(board) = board else { return Ok(()) };
        let half = self.state.as_ref().map_or(&[][..], |s| &s.half);
        let round = board.send(&self.stream, meta, half)?;
        // Few rows touch few experts: those come over the link as they are used.
        self.streaming = !decode && round.lanes.rows >= 64 && self.tiers.is_partial();
        if self.streaming {
            self.tiers.begin_stream(&self.stream, round.meta.part)?;
        }
        self.round = Some(round);
        if decode {
            self.stream.hold();
            self.holding = true;
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<(), EngineError> {
        self.finish()?;
        let mut sizes = Vec::new();
        if self.is_decode() && self.tiers.is_partial() {
            let bytes: usize = self.routed.iter().map(|(_, b)| b.bytes()).sum();
            if self.log.as_ref().is_none_or(|l| l.as_slice().len() < bytes) {
                self.log = Some(self.vram.device.pinned(bytes.next_power_of_two()).map_err(fault)?);
            }
            let mut at = 0;
            for (bank, ids) in &self.routed {
                if let Some(log) = &self.log {
                    self.stream.copy(log.device_ptr() + at as u64, ids.ptr, ids.bytes()).map_err(fault)?;
                }
                sizes.push((*bank, at, ids.bytes()));
                at += ids.bytes();
            }
        }
        self.stream.synchronize().map_err(fault)?;
        for (bank, at, bytes) in sizes {
            let Some(log) = &self.log else { break };
            let words = &log.as_slice()[at..at + bytes];
            let ids: Vec<i32> = words.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
            self.tiers.note(bank, &ids);
        }
        if let Some(r) = &self.round {
            self.tiers.advance(r.lanes.rows);
        }
        Ok(())
    }

    /// Refolds `n` of the recorded columns of a slot.
    fn refold(&mut self, slot: usize, n: usize) -> Result<(), EngineError> {
        let Some(state) = &self.state else { return Ok(()) };
        let (from, to) = (2 * slot + state.half[slot], 2 * slot + 1 - state.half[slot]);
        let words = [0, n as i32, n as i32, from as i32, to as i32];
        let memory = self.arena.lease(64)?;
        self.stream.write(memory.ptr(), &words).map_err(fault)?;
        let at = |i: u64| memory.ptr() + 4 * i;
        self.chained = false;
        let (gdn, ple) = (state.layout.gdn.clone(), state.layout.ple.clone());
        for (id, d) in gdn.iter().enumerate() {
            self.replay_gdn(id, *d, slot, [at(0), at(2), at(3), at(4)])?;
        }
        for (id, p) in ple.iter().enumerate() {
            // Only the number of kept columns counts here, not how taps and dilation make it up.
            let (ple, record) = self.state()?.ple(id, p.columns + 1, 1);
            let lanes = infernix_cuda::kernels::rows::Lanes {
                first: at(0),
                count: at(2),
                slots: at(3),
                out_slots: at(4),
                rows: n,
                lanes: 1,
                ..Default::default()
            };
            let pdl = self.pdl();
            let c = record.0 + (2 * slot * record.1) as u64;
            self.plans.ple.fold(&self.stream, c, &ple, &lanes, (0, 0), pdl).map_err(fault)?;
        }
        // `memory` is reused by the next round at the earliest, behind these launches.
        Ok(())
    }
}

impl Backend for Cuda {
    type Buf = CudaBuf;
    type Weight = CudaWeight;
    type Experts = CudaExperts;
    type Routing = CudaRouting;
    type Selection = CudaSelection;
    type Snapshot = CudaSnapshot;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn weight(&mut self, spec: &WeightSpec, data: WeightData) -> Result<CudaWeight, EngineError> {
        CudaWeight::new(&self.vram, spec, &data)
    }

    fn experts_weight(&mut self, spec: &ExpertSpec, data: ExpertData) -> Result<CudaExperts, EngineError> {
        CudaExperts::new(&self.vram, &mut self.tiers, spec, data)
    }

    fn allocate(&mut self, layout: &StateLayout) -> Result<(), EngineError> {
        let mut state = DeviceState::new(&self.vram, layout)?;
        for slot in 0..layout.slots {
            state.reset(&self.stream, slot)?;
        }
        self.state = Some(state);
        let identity: Vec<i32> = (0..1 << 16).collect();
        let b = self.vram.take("rounds", 4 * identity.len())?;
        b.write(0, &identity).map_err(fault)?;
        self.identity = Some(b);
        self.tiers.place(&self.vram, &self.stream, RESERVE)?;
        self.stream.synchronize().map_err(fault)
    }

    fn reset(&mut self, slot: SlotId) {
        self.guard(|c| {
            let Some(s) = &mut c.state else { return Ok(()) };
            s.reset(&c.stream, slot)
        });
    }

    fn snapshot(&mut self, slot: SlotId) -> Result<CudaSnapshot, EngineError> {
        let slots = self.state()?.layout.slots;
        if slot >= slots {
            return Err(EngineError::OutOfSlots { slots });
        }
        let (vram, stream) = (&self.vram, &self.stream);
        match &mut self.state {
            Some(s) => s.save(vram, stream, slot),
            None => Err(EngineError::OutOfSlots { slots: 0 }),
        }
    }

    fn restore(&mut self, slot: SlotId, snapshot: &CudaSnapshot) -> Result<(), EngineError> {
        let slots = self.state()?.layout.slots;
        if slot >= slots {
            return Err(EngineError::OutOfSlots { slots });
        }
        let stream = &self.stream;
        match &mut self.state {
            Some(s) => s.load(stream, slot, snapshot),
            None => Ok(()),
        }
    }

    fn copy_page(&mut self, from: u32, to: u32) {
        self.guard(|c| c.state()?.copy_page(&c.stream, from, to));
    }

    fn begin_round(&mut self, meta: StepMeta) -> Result<(), EngineError> {
        if let Some(e) = self.failed.take() {
            // Between rounds only a lost device fails; say what it was.
            return Err(e);
        }
        self.begin(meta)
    }

    fn end_round(&mut self) -> Outcome {
        self.guard(Self::complete);
        if let Some(e) = self.failed.take() {
            self.stream.release();
            self.holding = false;
            let lanes = self.round.as_ref().map_or(0, |r| r.meta.lanes.len());
            self.failed_lanes.clear();
            self.failed_lanes.extend((0..lanes).map(|l| (l, e.to_string())));
        }
        if let (Some(r), Some(s)) = (&self.round, &mut self.state)
            && r.meta.part == Part::Target
        {
            for (l, lane) in r.meta.lanes.iter().enumerate() {
                if self.failed_lanes.iter().any(|(f, _)| *f == l) {
                    continue;
                }
                match r.meta.kind {
                    CallKind::Prefill => s.half[lane.slot] ^= 1,
                    CallKind::Decode => s.recorded[lane.slot] = lane.ids.len(),
                }
            }
        }
        self.round = None;
        Outcome { failed_lanes: std::mem::take(&mut self.failed_lanes) }
    }

    fn commit(&mut self, slot: SlotId, part: Part, n: usize) -> Result<(), EngineError> {
        if part == Part::Drafter {
            // Its keys lie in pages and rings by sequence index: later columns write over what is not kept.
            return Ok(());
        }
        let have = self.state()?.recorded.get(slot).copied();
        let Some(have) = have else {
            return Err(EngineError::OutOfSlots { slots: self.state()?.layout.slots });
        };
        if n > have {
            return Err(EngineError::Round(format!("commit of {n} columns, {have} recorded")));
        }
        if n > 0 && n < have {
            self.refold(slot, n)?;
        }
        let s = self.state_mut()?;
        if n > 0 {
            s.half[slot] ^= 1;
        }
        s.recorded[slot] = 0;
        Ok(())
    }

    fn read(&mut self, x: &CudaBuf) -> Vec<f32> {
        self.guard(|c| c.fetch(x)).unwrap_or_else(|| vec![f32::NAN; x.rows * x.width])
    }

    fn write(&mut self, rows: usize, width: usize, values: &[f32]) -> CudaBuf {
        let narrow: Vec<u16> = values.iter().map(|v| half::bf16::from_f32(*v).to_bits()).collect();
        let exact = narrow.iter().zip(values).all(|(n, v)| f32::from_bits(u32::from(*n) << 16) == *v);
        self.make(rows, width, !exact, |c, y| {
            let held = c.holding;
            c.flush()?;
            if exact {
                c.stream.write(y.ptr, &narrow).map_err(fault)?;
            } else {
                c.stream.write(y.ptr, values).map_err(fault)?;
            }
            if held {
                c.stream.hold();
                c.holding = true;
            }
            Ok(())
        })
    }

    fn read_routing(&mut self, routing: &CudaRouting) -> Vec<Vec<(u32, f32)>> {
        let read = self.guard(|c| {
            c.flush()?;
            let n = routing.ids.rows * routing.top;
            let ids: Vec<i32> = c.stream.read(routing.ids.ptr, n).map_err(fault)?;
            let weights: Vec<f32> = c.stream.read(routing.weights.ptr, n).map_err(fault)?;
            let pairs: Vec<_> = ids.into_iter().map(|i| i as u32).zip(weights).collect();
            Ok(pairs.chunks(routing.top).map(<[_]>::to_vec).collect())
        });
        read.unwrap_or_default()
    }

    fn read_selection(&mut self, selection: &CudaSelection) -> Vec<Option<Vec<u32>>> {
        let rows = self.round.as_ref().map_or(0, |r| r.lanes.rows);
        if selection.dense {
            return vec![None; rows];
        }
        let read = self.guard(|c| {
            c.flush()?;
            let s = selection;
            let ids: Vec<i32> = c.stream.read(s.ids.ptr, rows * s.keep).map_err(fault)?;
            let round = c.round()?;
            let of = |(t, (l, col)): (usize, (usize, usize))| {
                let blocks = (round.start(l) + col + 1) / s.ratio;
                (blocks > s.keep)
                    .then(|| ids[t * s.keep..(t + 1) * s.keep].iter().map(|i| *i as u32).collect())
            };
            Ok(round.meta.each_row().enumerate().map(of).collect())
        });
        read.unwrap_or_default()
    }

    fn take_rows(&mut self, x: &CudaBuf, rows: &[usize]) -> CudaBuf {
        let runs = rows.windows(2).all(|w| w[1] == w[0] + 1);
        if let (true, Some(first)) = (runs, rows.first()) {
            return x.rows_from(*first, rows.len());
        }
        self.make(rows.len(), x.width, x.f32, |c, y| {
            let mut done = 0;
            while done < rows.len() {
                let n = (1..rows.len() - done)
                    .find(|i| rows[done + i] != rows[done] + i)
                    .unwrap_or(rows.len() - done);
                let (p, bytes) = (x.pitch(), x.pitch());
                c.copy_rows(RowCopy {
                    from: x.ptr + (rows[done] * p) as u64,
                    from_pitch: p,
                    to: y.ptr + (done * p) as u64,
                    to_pitch: p,
                    bytes,
                    rows: n,
                    copies: 1,
                })?;
                done += n;
            }
            Ok(())
        })
    }

    fn repeat(&mut self, x: &CudaBuf, n: usize) -> CudaBuf {
        self.make(x.rows, n * x.width, x.f32, |c, y| {
            c.copy_rows(RowCopy {
                from: x.ptr,
                from_pitch: x.pitch(),
                to: y.ptr,
                to_pitch: y.pitch(),
                bytes: x.pitch(),
                rows: x.rows,
                copies: n,
            })
        })
    }

    fn concat(&mut self, x: &CudaBuf, y: &CudaBuf) -> CudaBuf {
        self.make(x.rows, x.width + y.width, x.f32, |c, out| {
            for (part, at) in [(x, 0), (y, x.pitch())] {
                c.copy_rows(RowCopy {
                    from: part.ptr,
                    from_pitch: part.pitch(),
                    to: out.ptr + at as u64,
                    to_pitch: out.pitch(),
                    bytes: part.pitch(),
                    rows: part.rows,
                    copies: 1,
                })?;
            }
            Ok(())
        })
    }

    fn copy(&mut self, x: &CudaBuf) -> CudaBuf {
        self.repeat(x, 1)
    }

    fn embed(&mut self, table: &CudaWeight, tokens: Tokens, _: At<'_>) -> CudaBuf {
        let rows = self.round.as_ref().map_or(0, |r| r.lanes.rows);
        self.make(rows, table.k, false, |c, y| {
            let ids = c.round()?.ids[usize::from(tokens == Tokens::Next)];
            let [part] = &table.parts[..] else {
                let what = "an embedding must be of one format".to_owned();
                return Err(EngineError::Weight { name: table.name.clone(), what });
            };
            let pdl = c.pdl();
            c.plans.moves.embed(&c.stream, part, ids, rows, y.ptr, pdl).map_err(fault)
        })
    }

    fn norm(&mut self, x: &CudaBuf, w: &CudaWeight, spec: NormSpec, _: At<'_>) -> CudaBuf {
        self.make(x.rows, x.width, false, |c, y| {
            let (from, words) = (Cuda::act(x)?, w.plain()?);
            let n = x.width / spec.groups;
            // A weight of one group's width serves every group.
            let (groups, calls) = if w.n * w.k == x.width { (spec.groups, 1) } else { (1, spec.groups) };
            for g in 0..calls {
                let at = (2 * g * n) as u64;
                let pdl = c.pdl();
                c.plans
                    .rows
                    .rms_norm(
                        &c.stream,
                        from + at,
                        words,
                        y.ptr + at,
                        n,
                        groups,
                        x.rows,
                        x.width,
                        x.width,
                        spec.eps as f32,
                        spec.zero_centred,
                        pdl,
                    )
                    .map_err(fault)?;
            }
            Ok(())
        })
    }

    fn linear(&mut self, x: &CudaBuf, w: &CudaWeight, out: Boundary, _: At<'_>) -> CudaBuf {
        let groups = x.width / w.k.max(1);
        self.make(x.rows, groups * w.n, out == Boundary::F32, |c, y| {
            let out = if out == Boundary::F32 { Out::F32 } else { Out::Bf16 };
            c.product(w, Cuda::act(x)?, w.k, x.rows * groups, y.ptr, w.n, out)
        })
    }

    fn add(&mut self, x: &mut CudaBuf, y: &CudaBuf, _: At<'_>) {
        self.guard(|c| {
            let (to, from) = (Cuda::act(x)?, Cuda::act(y)?);
            for g in 0..x.width / y.width.max(1) {
                let pdl = c.pdl();
                let at = to + (2 * g * y.width) as u64;
                c.plans.rows.add_to(&c.stream, at, x.width, from, y.width, x.rows, pdl).map_err(fault)?;
            }
            Ok(())
        });
    }

    fn gate(&mut self, o: &CudaBuf, gate: &CudaBuf, _: At<'_>) -> CudaBuf {
        self.make(o.rows, o.width, false, |c, y| {
            let (x, g, w) = (Cuda::act(o)?, Cuda::act(gate)?, o.width);
            let pdl = c.pdl();
            c.plans.rows.mul_sigmoid(&c.stream, x, g, y.ptr, w, w, o.rows, w, w, w, w, pdl).map_err(fault)
        })
    }

    fn swiglu(&mut self, gate: &CudaBuf, up: &CudaBuf, _: At<'_>) -> CudaBuf {
        self.make(gate.rows, gate.width, false, |c, y| {
            let (g, u, w) = (Cuda::act(gate)?, Cuda::act(up)?, gate.width);
            let pdl = c.pdl();
            c.plans.rows.swiglu(&c.stream, g, u, y.ptr, w, gate.rows, w, w, w, pdl).map_err(fault)
        })
    }

    fn hyper_down(&mut self, normed: &CudaBuf, w: &CudaWeight, streams: usize, _: At<'_>) -> CudaBuf {
        self.make(normed.rows, w.n, false, |c, y| c.run_hyper_down(normed, w, streams, y))
    }

    fn hyper_up(
        &mut self,
        normed: &CudaBuf,
        m: &CudaBuf,
        w: &CudaWeight,
        streams: usize,
        _: At<'_>,
    ) -> CudaBuf {
        self.make(normed.rows, normed.width / streams, false, |c, y| c.run_hyper_up(normed, m, w, streams, y))
    }

    fn hyper_factor(&mut self, normed: &CudaBuf, w: &CudaWeight, streams: usize, _: At<'_>) -> CudaBuf {
        self.make(normed.rows, w.n, true, |c, y| c.run_hyper_factor(normed, w, streams, y))
    }

    fn hyper_inject(&mut self, r: &mut CudaBuf, y: &CudaBuf, factor: &CudaBuf, _: At<'_>) {
        self.guard(|c| {
            if factor.width != 4 || !factor.f32 {
                return Err(EngineError::Unsupported(format!(
                    "{} streams, the kernels take 4",
                    factor.width
                )));
            }
            let pdl = c.pdl();
            let (to, from) = (Cuda::act(r)?, Cuda::act(y)?);
            c.plans.rows.inject(&c.stream, from, factor.ptr, to, y.width, y.rows, pdl).map_err(fault)
        });
    }

    fn ngram(&mut self, tickets: &[NgramTicket], at: At<'_>) -> CudaBuf {
        let rows = at.rows.len();
        let width = tickets.iter().map(NgramTicket::values).sum::<usize>() / rows.max(1);
        let staged = self.guard(|c| c.stage(tickets, rows, width));
        let ptr = staged.unwrap_or(0);
        CudaBuf { lease: None, ptr, rows, width, f32: false, convolution: 0 }
    }

    fn ple_gate(
        &mut self,
        key: &CudaBuf,
        query: &CudaBuf,
        value: &CudaBuf,
        streams: usize,
        _: At<'_>,
    ) -> CudaBuf {
        self.make(key.rows, key.width, false, |c, y| {
            let (k, q, v) = (Cuda::act(key)?, Cuda::act(query)?, Cuda::act(value)?);
            let pdl = c.pdl();
            c.plans.ple.gate(&c.stream, k, q, v, y.ptr, value.width, streams, key.rows, pdl).map_err(fault)
        })
    }

    fn ple_conv(
        &mut self,
        id: StateId,
        r: &mut CudaBuf,
        v: &CudaBuf,
        x: &CudaBuf,
        w: &CudaWeight,
        dilation: usize,
        _: At<'_>,
    ) {
        self.guard(|c| {
            let (to, v, x, words) = (Cuda::act(r)?, Cuda::act(v)?, Cuda::act(x)?, w.plain()?);
            let lanes = c.round()?.lanes;
            let (state, record) = c.state()?.ple(id, w.k, dilation);
            let record = if c.is_decode() { record } else { (0, 0) };
            let pdl = c.pdl();
            c.plans.ple.conv(&c.stream, to, v, x, words, &state, &lanes, pdl).map_err(fault)?;
            c.plans.ple.fold(&c.stream, x, &state, &lanes, record, true).map_err(fault)
        });
    }

    fn gdn_conv(&mut self, _: StateId, x: &CudaBuf, w: &CudaWeight, _: At<'_>) -> CudaBuf {
        // The recurrence applies it: one kernel reads a column's channels once.
        let words = self.guard(|_| w.plain());
        CudaBuf { convolution: words.unwrap_or(0), ..x.rows_from(0, x.rows) }
    }

    fn gdn(
        &mut self,
        id: StateId,
        u: &CudaBuf,
        a: &CudaBuf,
        b: &CudaBuf,
        a_log: &CudaWeight,
        dt_bias: &CudaWeight,
        _: At<'_>,
    ) -> CudaBuf {
        let width =
            self.state.as_ref().map_or(0, |s| s.layout.gdn[id].value_heads * s.layout.gdn[id].value_dim);
        self.make(u.rows, width, false, |c, y| c.run_gdn(id, u, a, b, a_log, dt_bias, y))
    }

    fn gdn_gate(
        &mut self,
        o: &CudaBuf,
        z: &CudaBuf,
        w: &CudaWeight,
        kind: GateKind,
        eps: f64,
        _: At<'_>,
    ) -> CudaBuf {
        self.make(o.rows, o.width, false, |c, y| {
            let (x, z, words, d, width) = (Cuda::act(o)?, Cuda::act(z)?, w.plain()?, w.n * w.k, o.width);
            let (heads, sigmoid, pdl) = (width / d.max(1), kind == GateKind::Sigmoid, c.pdl());
            c.plans
                .rows
                .gated_norm(
                    &c.stream, x, z, words, y.ptr, d, heads, o.rows, width, width, width, eps as f32,
                    sigmoid, pdl,
                )
                .map_err(fault)
        })
    }

    fn norm_rope(&mut self, x: &CudaBuf, w: &CudaWeight, rope: &RopeTable, eps: f64, _: At<'_>) -> CudaBuf {
        self.make(x.rows, x.width, false, |c, y| {
            let (from, words, d) = (Cuda::act(x)?, w.plain()?, w.n * w.k);
            let table = c.angles(rope)?;
            let (half, heads, pdl) = (rope.freq.len(), x.width / d.max(1), c.pdl());
            c.plans
                .rows
                .head_norm_rope(
                    &c.stream, from, words, table, y.ptr, d, half, heads, x.rows, x.width, d, x.width, d,
                    eps as f32, pdl,
                )
                .map_err(fault)
        })
    }

    fn kv_append(&mut self, id: StateId, k: &CudaBuf, v: &CudaBuf) {
        self.guard(|c| c.run_kv_append(id, k, v));
    }

    fn attention(
        &mut self,
        id: StateId,
        q: &CudaBuf,
        selection: Option<&CudaSelection>,
        _: At<'_>,
    ) -> CudaBuf {
        self.make(q.rows, q.width, false, |c, y| c.run_attention(id, q, selection, None, y))
    }

    fn index_append(
        &mut self,
        id: StateId,
        raw: &CudaBuf,
        w: &CudaWeight,
        rope: &RopeTable,
        eps: f64,
        _: At<'_>,
    ) {
        self.guard(|c| c.run_index_append(id, raw, w, rope, eps));
    }

    fn index_select(&mut self, id: StateId, q: &CudaBuf, _: At<'_>) -> CudaSelection {
        let made = self.guard(|c| c.run_index_select(id, q));
        made.unwrap_or_else(|| {
            let none =
                |width| CudaBuf { lease: None, ptr: 0, rows: q.rows, width, f32: true, convolution: 0 };
            CudaSelection { ids: none(0), counts: none(0), keep: 0, ratio: 1, dense: true }
        })
    }

    fn route(&mut self, logits: &CudaBuf, top_k: usize, at: At<'_>) -> CudaRouting {
        let made = self.guard(|c| c.run_route(logits, top_k, at));
        made.unwrap_or_else(|| {
            let none =
                |f32| CudaBuf { lease: None, ptr: 0, rows: logits.rows, width: top_k, f32, convolution: 0 };
            CudaRouting { ids: none(true), weights: none(true), top: top_k }
        })
    }

    fn experts(
        &mut self,
        x: &CudaBuf,
        routing: &CudaRouting,
        store: &CudaExperts,
        shared: &CudaBuf,
        shared_logit: &CudaBuf,
        _: At<'_>,
    ) -> CudaBuf {
        self.make(x.rows, x.width, false, |c, y| c.run_experts(x, routing, store, shared, shared_logit, y))
    }

    fn hyper_mix(
        &mut self,
        r: &CudaBuf,
        w: &HyperWeights<Self>,
        base: Op,
        at: At<'_>,
    ) -> (CudaBuf, Option<CudaBuf>) {
        match self.fused_hyper(r, w) {
            Some(done) => done,
            None => blocks::hyper_mix(self, r, w, base, at),
        }
    }

    fn attention_block(
        &mut self,
        x: &CudaBuf,
        w: &AttentionWeights<Self>,
        at: At<'_>,
        trace: Option<&mut Trace>,
    ) -> CudaBuf {
        self.gated_attention(x, w, at, trace)
    }
}

impl Cuda {
    /// Waits for n-gram rows and sends them, rounded to BF16.
    fn stage(&mut self, tickets: &[NgramTicket], rows: usize, width: usize) -> Result<u64, EngineError> {
        let bytes = (2 * rows * width).next_multiple_of(256);
        if self.stages.last().is_none_or(|s| self.staged + bytes > s.host.as_slice().len()) {
            if self.staged == 0 {
                self.stages.clear();
            }
            let size = bytes.next_power_of_two().max(1 << 20);
            self.stages.push(Stage {
                host: self.vram.device.pinned(size).map_err(fault)?,
                device: self.vram.alloc("rounds", size)?,
            });
            self.staged = 0;
        }
        let mut failed = Vec::new();
        let lane_rows = self.round()?.lane_rows.clone();
        let at = self.staged;
        let Some(stage) = self.stages.last_mut() else { return Ok(0) };
        let words = &mut stage.host.as_mut_slice()[at..at + 2 * rows * width];
        for (l, (ticket, r)) in tickets.iter().zip(&lane_rows).enumerate() {
            let own = &mut words[2 * r.start * width..2 * r.end * width];
            let values = ticket.wait().and_then(|v| {
                let what =
                    || EngineError::Ngram(format!("{} table values, {} needed", v.len(), own.len() / 2));
                if 2 * v.len() == own.len() { Ok(v) } else { Err(what()) }
            });
            match values {
                Ok(v) => {
                    for (o, v) in own.as_chunks_mut::<2>().0.iter_mut().zip(v.iter()) {
                        *o = half::bf16::from_f32(*v).to_bits().to_le_bytes();
                    }
                }
                // Zeros keep the shapes; the lane's results are dropped.
                Err(e) => {
                    own.fill(0);
                    failed.push((l, e.to_string()));
                }
            }
        }
        let (to, from) = (stage.device.at(at), stage.host.device_ptr() + at as u64);
        self.staged += bytes;
        self.failed_lanes.extend(failed);
        self.stream.copy(to, from, 2 * rows * width).map_err(fault)?;
        if !self.holding {
            self.chained = false;
        }
        Ok(to)
    }
}
