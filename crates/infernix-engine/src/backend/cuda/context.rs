//! The backend's state, and how its rounds begin, launch and end.

use super::blocks::FEW_ROWS;
use super::fused::Pending;
use super::plan::{DECODE_ROWS, STAGE, activation_bytes, board_rows};
use super::plans::Plans;
use super::profile::Profile;
use super::round::{Board, Round};
use super::state::DeviceState;
use super::tiers::{Placement, TierCounts, Tiers};
use super::vram::{Arena, CudaBuf, Lease, Ledger, Vram, fault};
use super::weights::CudaWeight;
use super::workers::{WorkerRates, Workers, automatic_threads};
use crate::backend::*;
use crate::error::EngineError;
use crate::ngram::NgramTicket;
use infernix_cuda::driver::{Graph, PinnedBuffer, Stream, Tape};
use infernix_cuda::kernels::index::Rotary;
use infernix_cuda::kernels::linear::Out;
use infernix_cuda::kernels::moves::RowCopy;
use infernix_cuda::kernels::skinny::Skinny;
use infernix_cuda::kernels::tile::{Packing, Tile, TileFormat};
use infernix_cuda::kernels::zipf::ZipfRoute;
use infernix_cuda::{Device, DeviceBuffer};
use rayon::prelude::*;
use std::cell::RefCell;
use std::sync::Arc;

/// Tapes and graphs kept; the oldest go.
const GRAPHS: usize = 48;

/// Windows of this many rows keep the tile products busy and their activations within 1.5 GiB.
const WINDOW: usize = 8192;

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
    /// Route by this law instead of the router (synthetic models).
    pub routing: Option<Routing>,
    /// Host memory for routed experts, in bytes; 0: for all that device memory leaves. What it does not hold is read from the
    /// artifact's file when it is picked.
    pub expert_ram: usize,
    /// Rows of the longest prompt call to keep memory for, where experts take the rest.
    pub prompt_rows: usize,
    /// Bytes of snapshots that are kept in device memory at a time, besides one: memory that experts do not take.
    pub snapshots: usize,
    /// Rows of a prompt call that are in work at a time: a longer one is walked layer by layer.
    pub window: usize,
    /// Threads that compute a share of the experts that decode rounds miss; none: as many as the processor can spare.
    pub workers: Option<usize>,
    /// Keep more experts in the memory of prompts while none runs; none: where no threads compute experts, for filling that memory
    /// after a prompt costs the link more than it then saves.
    pub lend: Option<bool>,
    /// Note how long each part of a round takes; rounds then run launch by launch.
    pub profile: bool,
}

/// Synthetic routing: rank i of a seeded order of each layer's experts has weight `(i + 1)^-s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Exponent.
    pub s: f64,
    /// Probability that a pick is the one of the position before.
    pub repeat: f32,
    /// Seed of orders and picks.
    pub seed: u64,
}

impl Routing {
    pub(super) fn layer_seed(&self, layer: u16) -> u64 {
        crate::numerics::round::mix(self.seed ^ (u64::from(layer) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions {
            device: 0,
            budget: 0,
            placement: Placement::Auto,
            graphs: true,
            routing: None,
            expert_ram: 0,
            prompt_rows: WINDOW,
            snapshots: 0,
            window: WINDOW,
            workers: None,
            lend: None,
            profile: false,
        }
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

/// Packing, address, pitch, rows and columns of a packed input.
type PackKey = (Packing, u64, usize, usize, usize);

/// n-gram rows on their way to the device.
struct Stage {
    host: PinnedBuffer,
    /// Where decode rounds find them.
    device: Option<DeviceBuffer>,
}

/// What decode rounds that may share a graph have in common: part, columns of each lane, rounded length.
type Kind = (Part, Vec<usize>, usize);

/// A round's launches, where n-gram rows must have arrived in them, and from the third time on graphs of the parts between.
struct Recorded {
    number: u64,
    tape: Tape,
    cuts: Vec<usize>,
    graphs: Vec<Graph>,
    /// Operations, and the launch that each begins with.
    marks: Vec<(usize, Op)>,
}

/// The CUDA backend.
pub struct Cuda {
    pub(super) vram: Arc<Vram>,
    pub(super) arena: Arc<Arena>,
    pub(super) stream: Stream,
    pub(super) plans: Plans,
    pub(super) state: Option<DeviceState>,
    pub(super) tiers: Tiers,
    pub(super) workers: Option<Workers>,
    pub(super) round: Option<Round>,
    /// The identity permutation, for combines of outputs in pick order.
    pub(super) identity: Option<DeviceBuffer>,
    /// Routings of this decode round by bank, to be counted.
    pub(super) routed: Vec<(usize, CudaBuf)>,
    /// Bank, byte in `log` and experts of each sort of this prompt round.
    sorted: Vec<(usize, usize, usize)>,
    /// Picks of all layers of this decode round, together.
    pub(super) picks: Option<CudaBuf>,
    /// Whether this prompt round streams its experts.
    pub(super) streaming: bool,
    /// Convolution, `A_log` and time-step bias of each delta rule layer, for refolds.
    pub(super) gdn_weights: Vec<(u64, u64, u64)>,
    pub(super) chained: bool,
    /// A sum into the residual that the next launch that reads it makes.
    pub(super) pending: Option<Pending>,
    /// Experts that a synthetic law gives this round.
    pub(super) laws: Vec<CudaBuf>,
    pub(super) options: CudaOptions,
    /// Hidden width of layers with experts.
    pub(super) hidden: usize,
    /// Bytes of the slab through which prompts multiply experts in blocks.
    pub(super) slab: usize,
    boards: [Option<Board>; 2],
    /// Of prompt and of decode rounds.
    stages: [Vec<Stage>; 2],
    /// Stage and byte to go on from.
    staged: (usize, usize),
    io: Option<PinnedBuffer>,
    /// Address and bytes of the head's output of this round, and of what `io` holds of the last one.
    pub(super) head: Option<(u64, usize)>,
    out: Option<(u64, usize)>,
    log: Option<PinnedBuffer>,
    angles: Vec<((usize, usize), CudaBuf)>,
    rotary: Vec<(RopeTable, DeviceBuffer, DeviceBuffer)>,
    pub(super) holding: bool,
    pub(super) failed: Option<EngineError>,
    pub(super) failed_lanes: Vec<(usize, String)>,
    graphs: Vec<Recorded>,
    /// What the last decode round of a kind ran, to launch the next one's graph before its operations are known.
    expected: Vec<(Kind, u64)>,
    /// Kind of this decode round, the places of n-gram copies in it, and the tape whose graphs already run, with their number.
    kind: Option<Kind>,
    cuts: Vec<usize>,
    marks: Vec<(usize, Op)>,
    early: Option<(u64, usize)>,
    tapes: u64,
    /// Number of the last round's tape.
    last: u64,
    /// The last packed input, and what it was packed from.
    pub(super) pack: RefCell<Option<(PackKey, Arc<Lease>)>>,
    pub(super) profile: Option<Profile>,
    pub(super) zipf: Option<ZipfRoute>,
    /// Rows of a weight in blocks as two BF16 parts, for prompts.
    pub(super) parts: Option<Arc<DeviceBuffer>>,
}

impl Cuda {
    /// Opens a device; [`Backend::allocate`] adds state.
    pub fn new(options: CudaOptions) -> Result<Self, EngineError> {
        let device = Device::open(options.device).map_err(fault)?;
        let threads = options.workers.unwrap_or_else(automatic_threads);
        let lend = options.lend.unwrap_or(threads == 0);
        let options = CudaOptions { workers: Some(threads), ..options };
        let vram = Arc::new(Vram::new(device.clone(), options.budget));
        Ok(Cuda {
            arena: Arc::new(Arena::new(vram.clone())),
            stream: device.stream().map_err(fault)?,
            plans: Plans::new(&device).map_err(fault)?,
            vram,
            state: None,
            tiers: Tiers::new(options.placement, options.routing, options.expert_ram, lend),
            workers: None,
            round: None,
            identity: None,
            routed: Vec::new(),
            sorted: Vec::new(),
            picks: None,
            streaming: false,
            gdn_weights: Vec::new(),
            hidden: 0,
            slab: 0,
            options,
            boards: [None, None],
            stages: [Vec::new(), Vec::new()],
            staged: (0, 0),
            io: None,
            head: None,
            out: None,
            log: None,
            angles: Vec::new(),
            rotary: Vec::new(),
            chained: false,
            pending: None,
            laws: Vec::new(),
            holding: false,
            failed: None,
            failed_lanes: Vec::new(),
            graphs: Vec::new(),
            expected: Vec::new(),
            kind: None,
            cuts: Vec::new(),
            marks: Vec::new(),
            early: None,
            tapes: 0,
            last: 0,
            pack: RefCell::new(None),
            profile: options.profile.then(Profile::default),
            zipf: None,
            parts: None,
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

    /// The same, counted from zero from now on.
    pub fn take_tier_counts(&mut self) -> TierCounts {
        std::mem::take(&mut self.tiers.counts)
    }

    /// From now on reads of an expert of the `bank`th layer with experts fail, or of none (tests).
    pub fn break_expert(&mut self, bank: usize, expert: Option<usize>) {
        self.tiers.break_expert(bank, expert);
    }

    /// Bytes a second that a copy within device memory reads and writes.
    pub fn copy_rate(&self) -> Result<f64, EngineError> {
        const BYTES: usize = 512 << 20;
        let device = &self.vram.device;
        let (a, b) = (device.alloc(BYTES).map_err(fault)?, device.alloc(BYTES).map_err(fault)?);
        let (start, end) = (device.event().map_err(fault)?, device.event().map_err(fault)?);
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            self.stream.record(&start).map_err(fault)?;
            self.stream.copy(b.ptr(), a.ptr(), BYTES).map_err(fault)?;
            self.stream.record(&end).map_err(fault)?;
            best = best.min(end.micros_since(&start).map_err(fault)?);
        }
        Ok(2.0 * BYTES as f64 / best * 1e6)
    }

    /// Frames for experts, and bytes of a record.
    pub fn expert_frames(&self) -> (usize, usize) {
        (self.tiers.frames().0, self.tiers.record_bytes())
    }

    /// Frames in memory of prompts, while none runs.
    pub fn lent_frames(&self) -> usize {
        self.tiers.frames().1
    }

    /// How the CPU's experts compare with the link, if it computes any.
    pub fn worker_rates(&self) -> Option<WorkerRates> {
        self.workers.as_ref().map(|w| w.rates)
    }

    /// From now on the CPU computes as many as this of 0, 1, 2, ... 15 experts that a layer misses, whatever was measured (tests).
    pub fn split_misses(&mut self, split: [u8; 16]) {
        if let Some(w) = &mut self.workers {
            w.set_split(split);
        }
    }

    /// The threads that compute experts stop answering (tests).
    pub fn halt_workers(&self) {
        self.workers.iter().for_each(Workers::halt);
    }

    /// Starts the threads that compute missing experts, where there are any.
    pub(super) fn start_workers(&mut self) -> Result<(), EngineError> {
        let threads = self.options.workers.unwrap_or(0);
        if threads > 0 && self.tiers.is_partial() && !self.tiers.on_disk() {
            // What a fifth generation link of 16 lanes brings, where it was not measured.
            let link = self.tiers.link_seconds().unwrap_or(self.tiers.record_bytes() as f64 / 51e9);
            let Some(banks) = self.tiers.in_memory() else { return Ok(()) };
            self.workers = Workers::new(&self.vram.device, banks, threads, link)?;
        }
        Ok(())
    }

    /// What rounds need beside weights, state and activations, so that nothing has to be found for it later.
    pub(super) fn prepare_rounds(&mut self) -> Result<(), EngineError> {
        let (slots, pages, ngrams) = {
            let l = &self.state()?.layout;
            (l.slots, l.pages, !l.ple.is_empty())
        };
        let rows = [DECODE_ROWS, board_rows(self.options.prompt_rows)];
        for (board, rows) in self.boards.iter_mut().zip(rows) {
            *board = Some(Board::new(&self.vram, rows, slots, pages)?);
        }
        if ngrams {
            let device = Some(self.vram.alloc("rounds", STAGE)?);
            let host = self.vram.device.pinned(STAGE).map_err(fault)?;
            self.stages[1].push(Stage { host, device });
        }
        let identity: Vec<i32> = (0..1 << 16).collect();
        let b = self.vram.take("rounds", 4 * identity.len())?;
        b.write(0, &identity).map_err(fault)?;
        self.identity = Some(b);
        // Rotary tables come with the first round.
        self.vram.ready("weights", 1 << 20)
    }

    /// Bytes of activations of a prompt call of `rows` rows.
    pub(super) fn activations(&self, rows: usize) -> usize {
        let slab = if rows > FEW_ROWS { self.slab } else { 0 };
        activation_bytes(rows, self.options.window, self.hidden) + slab
    }

    /// The same of any round, as memory is taken back for it: a function of the rows, so that graphs keep to it. Tiles that each
    /// expert begins anew, and scores of blocks over a long context, do not shrink with the rows.
    pub(super) fn round_activations(&self, rows: usize) -> usize {
        self.activations(rows.max(FEW_ROWS)) + if rows > FEW_ROWS { 512 << 20 } else { 0 }
    }

    /// What the last round of each kind spent its time on, with [`CudaOptions::profile`].
    pub fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    /// From here on the round's time belongs to `op`.
    pub(super) fn mark(&mut self, at: At<'_>) {
        if self.holding {
            self.marks.push((self.stream.held(), at.site.op));
        }
        if self.profile.is_none() {
            return;
        }
        self.chained = false;
        self.guard(|c| match &mut c.profile {
            Some(p) => p.mark(&c.vram.device, &c.stream, at.site),
            None => Ok(()),
        });
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
        if self.pending.is_some()
            && let Err(e) = self.settle()
        {
            self.failed = Some(e);
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
        self.changed(lease.ptr());
        Ok(CudaBuf { ptr: lease.ptr(), lease: Some(lease), rows, width, f32, convolution: 0 })
    }

    /// The matrix at `ptr` is another one from now on.
    pub(super) fn changed(&self, ptr: u64) {
        let mut pack = self.pack.borrow_mut();
        if pack.as_ref().is_some_and(|((_, x, ..), _)| *x == ptr) {
            *pack = None;
        }
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

    pub(super) fn state_mut(&mut self) -> Result<&mut DeviceState, EngineError> {
        self.state.as_mut().ok_or_else(|| EngineError::Round("a round before allocate".into()))
    }

    /// Makes the launches noted so far, in the middle of a round.
    pub(super) fn flush(&mut self) -> Result<(), EngineError> {
        // What follows is no longer the round that a graph stands for.
        (self.early, self.kind) = (None, None);
        if self.holding {
            let tape = self.stream.release();
            self.holding = false;
            self.stream.play(&tape).map_err(fault)?;
        }
        self.chained = false;
        Ok(())
    }

    /// Launches what the last round of this kind ran, as far as the n-gram rows it reads are on their way. If the operations turn out
    /// to be others, their own launches follow: everything that a round writes is written again by them.
    fn launch_early(&mut self) -> Result<(), EngineError> {
        if !self.holding {
            return Ok(());
        }
        let (number, done) = match (self.early, &self.kind) {
            (Some(early), _) => early,
            (None, Some(kind)) => match self.expected.iter().find(|(k, _)| k == kind) {
                Some((_, number)) => (*number, 0),
                None => return Ok(()),
            },
            (None, None) => return Ok(()),
        };
        let Some(known) = self.graphs.iter().find(|r| r.number == number) else { return Ok(()) };
        let ready = known.graphs.len().min(self.cuts.len() + 1);
        for g in known.graphs.get(done..ready).unwrap_or_default() {
            self.stream.replay(g).map_err(fault)?;
        }
        if ready > 0 {
            self.early = Some((number, ready.max(done)));
        }
        Ok(())
    }

    /// Makes a round's launches: by its graphs from its third time on.
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
        let (early, stream) = (self.early.take(), &self.stream);
        let known = self.graphs.iter().rposition(|r| r.tape == tape && r.cuts == self.cuts);
        let number = match known {
            Some(i) => {
                let r = &mut self.graphs[i];
                if r.graphs.is_empty() {
                    let mut from = 0;
                    for to in r.cuts.iter().copied().chain([tape.len()]) {
                        if to > from {
                            let part = stream.capture(|| stream.play_part(&tape, from..to));
                            r.graphs.push(part.map_err(fault)?);
                        }
                        from = to;
                    }
                }
                if early != Some((r.number, r.graphs.len())) {
                    for g in &r.graphs {
                        stream.replay(g).map_err(fault)?;
                    }
                }
                r.number
            }
            None => {
                stream.play(&tape).map_err(fault)?;
                self.tapes += 1;
                if self.options.graphs {
                    if self.graphs.len() >= GRAPHS {
                        // A graph that was launched early may still run.
                        stream.synchronize().map_err(fault)?;
                        self.graphs.remove(0);
                    }
                    let (number, cuts, marks) = (self.tapes, self.cuts.clone(), self.marks.clone());
                    self.graphs.push(Recorded { number, tape, cuts, graphs: Vec::new(), marks });
                }
                self.tapes
            }
        };
        self.last = number;
        if let Some(kind) = self.kind.take() {
            match self.expected.iter_mut().find(|(k, _)| *k == kind) {
                Some((_, e)) => *e = number,
                None => {
                    if self.expected.len() >= GRAPHS {
                        self.expected.remove(0);
                    }
                    self.expected.push((kind, number));
                }
            }
        }
        Ok(())
    }

    /// Launches of the last decode round, and where its operations begin in them.
    pub(super) fn last_decode(&self) -> Option<(Tape, Vec<(usize, Op)>)> {
        let r = self.graphs.iter().find(|r| r.number == self.last)?;
        Some((r.tape.clone(), r.marks.clone()))
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
        let mut gathered = None;
        let (x, x_pitch) = match &w.columns {
            None => (x, x_pitch),
            Some(columns) => {
                let own = self.fresh(cols, w.k, false)?;
                let pdl = self.pdl();
                let (s, moves) = (&self.stream, &self.plans.moves);
                moves.gather(s, x, x_pitch, columns.ptr(), w.k, cols, own.ptr, pdl).map_err(fault)?;
                (gathered.insert(own).ptr, w.k)
            }
        };
        if !w.blocks.is_empty() {
            return self.block_product(w, x, x_pitch, cols, y, y_pitch, out);
        }
        let size = if out == Out::F32 { 4 } else { 2 };
        let mut row = 0;
        if w.parts.is_empty() {
            return Err(EngineError::Weight { name: w.name.clone(), what: "is no matrix".into() });
        }
        for part in &w.parts {
            let to = y + (row * size) as u64;
            row += part.n;
            if cols > 64 && !self.is_decode() && Skinny::takes(part, x_pitch) {
                let pdl = self.pdl();
                let skinny = &self.plans.skinny;
                skinny.launch(&self.stream, part, x, x_pitch, cols, to, y_pitch, out, pdl).map_err(fault)?;
                continue;
            }
            // A few rows of a prompt are cheaper through the decode kernel too.
            if cols > 64 && !self.is_decode() && x_pitch.is_multiple_of(8) && part.k.is_multiple_of(8) {
                let packed = self.packed(TileFormat::Rows(part.format), x, x_pitch, cols, part.k)?;
                let pdl = self.pdl();
                let t = self.plans.tile(TileFormat::Rows(part.format)).map_err(fault)?;
                t.dense(&self.stream, part, packed, cols, to, y_pitch, out, pdl).map_err(fault)?;
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

    /// `x` in the order the tile products read. Several matrices read the same input one after another: it is packed once.
    fn packed(
        &mut self,
        format: TileFormat,
        x: u64,
        x_pitch: usize,
        rows: usize,
        k: usize,
    ) -> Result<u64, EngineError> {
        let key = (format.packing(), x, x_pitch, rows, k);
        let known = self.pack.borrow().as_ref().filter(|(have, _)| *have == key).map(|(_, l)| l.ptr());
        if let Some(ptr) = known {
            return Ok(ptr);
        }
        self.pack.replace(None);
        let lease = self.arena.lease(Tile::packed_bytes(rows, k))?;
        let pdl = self.pdl();
        let t = self.plans.tile(format).map_err(fault)?;
        t.pack(&self.stream, x, x_pitch, rows, k, lease.ptr(), pdl).map_err(fault)?;
        let ptr = lease.ptr();
        self.pack.replace(Some((key, lease)));
        Ok(ptr)
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
        let key = (std::ptr::from_ref(rope) as usize, self.round()?.window.start);
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

    /// Enqueues a copy to the host's side.
    fn copy_out(&mut self, ptr: u64, bytes: usize) -> Result<(), EngineError> {
        if self.io.as_ref().is_none_or(|io| io.as_slice().len() < bytes) {
            self.io = None;
            self.io = Some(self.vram.device.pinned(bytes.next_power_of_two()).map_err(fault)?);
        }
        match &self.io {
            Some(io) => self.stream.copy(io.device_ptr(), ptr, bytes).map_err(fault),
            None => Ok(()),
        }
    }

    pub(super) fn fetch(&mut self, x: &CudaBuf) -> Result<Vec<f32>, EngineError> {
        self.flush()?;
        let bytes = x.bytes();
        if x.ptr == 0 || bytes == 0 {
            return Ok(Vec::new());
        }
        // The head's output came with the round's end.
        if self.out.take() != Some((x.ptr, bytes)) {
            self.copy_out(x.ptr, bytes)?;
            self.stream.synchronize().map_err(fault)?;
        }
        let Some(io) = &self.io else { return Ok(Vec::new()) };
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

    pub(super) fn begin(&mut self, meta: StepMeta) -> Result<(), EngineError> {
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
        self.laws.clear();
        (self.head, self.out) = (None, None);
        self.picks = None;
        self.sorted.clear();
        self.pending = None;
        self.angles.clear();
        self.pack.replace(None);
        let rows = meta.rows();
        let most = if self.tiers.frames().1 > 0 { self.round_activations(rows) } else { usize::MAX };
        let activations = self.arena.begin(most);
        self.staged = (0, 0);
        self.chained = false;
        // Few rows touch few experts: those come over the link as they are used.
        self.streaming = !decode && rows >= FEW_ROWS && self.tiers.is_partial();
        self.tiers.before_round(&self.stream, activations, self.streaming)?;
        let board = &mut self.boards[usize::from(!(decode && meta.rows() <= DECODE_ROWS))];
        if board.as_ref().is_none_or(|b| !b.holds(&meta)) {
            let rows = if decode { DECODE_ROWS } else { 1024 }.max(meta.rows().next_power_of_two());
            *board = None;
            *board = Some(Board::new(&self.vram, rows, slots, pages)?);
        }
        let Some(board) = board else { return Ok(()) };
        let half = self.state.as_ref().map_or(&[][..], |s| &s.half);
        let windows = match meta.lanes.len() {
            1 if !decode => crate::driver::windows(meta.rows(), self.options.window),
            _ => Vec::new(),
        };
        let round = board.send(&self.stream, meta, half, &windows)?;
        if self.streaming {
            self.tiers.begin_stream(&self.stream, round.meta.part)?;
        }
        self.early = None;
        self.cuts.clear();
        self.marks.clear();
        self.kind = decode.then(|| {
            let columns = round.meta.lanes.iter().map(|l| l.ids.len()).collect();
            (round.meta.part, columns, round.longest)
        });
        self.round = Some(round);
        if let (Some(w), true) = (&self.workers, decode) {
            w.awake();
        }
        if let Some(p) = &mut self.profile {
            p.begin(&self.vram.device, &self.stream, decode)?;
        } else if decode {
            self.stream.hold();
            self.holding = true;
            self.launch_early()?;
        }
        Ok(())
    }

    pub(super) fn complete(&mut self) -> Result<(), EngineError> {
        self.finish()?;
        if let Some(p) = &mut self.profile {
            p.end(&self.vram.device, &self.stream)?;
        }
        let mut sizes = Vec::new();
        if self.is_decode() && self.tiers.is_partial() {
            let bytes: usize = self.routed.iter().map(|(_, b)| b.bytes()).sum();
            if self.log.as_ref().is_none_or(|l| l.as_slice().len() < bytes) {
                self.log = Some(self.vram.device.pinned(bytes.next_power_of_two()).map_err(fault)?);
            }
            // What lies together is copied together.
            let mut runs: Vec<(u64, usize)> = Vec::new();
            let mut at = 0;
            for (bank, ids) in &self.routed {
                match runs.last_mut() {
                    Some((ptr, n)) if *ptr + *n as u64 == ids.ptr => *n += ids.bytes(),
                    _ => runs.push((ids.ptr, ids.bytes())),
                }
                sizes.push((*bank, at, ids.bytes()));
                at += ids.bytes();
            }
            if let Some(log) = &self.log {
                let mut to = log.device_ptr();
                for (ptr, n) in runs {
                    self.stream.copy(to, ptr, n).map_err(fault)?;
                    to += n as u64;
                }
            }
        }
        if let Some((ptr, bytes)) = self.head {
            self.copy_out(ptr, bytes)?;
        }
        self.stream.synchronize().map_err(fault)?;
        if let Some(w) = &mut self.workers {
            w.rest();
            self.tiers.counts.cpu_records += w.check()?;
        }
        self.out = self.head.take();
        for (bank, at, bytes) in sizes {
            let Some(log) = &self.log else { break };
            let words = &log.as_slice()[at..at + bytes];
            let ids: Vec<i32> = words.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
            self.tiers.note(bank, &ids);
        }
        let rows = self.round.as_ref().map_or(0, |r| r.meta.rows());
        self.tiers.advance(rows);
        let experts = std::mem::take(&mut self.sorted);
        for (bank, at, n) in experts {
            let Some(log) = &self.log else { break };
            let words = log.as_slice()[at..at + 4 * (n + 1)].as_chunks::<4>().0;
            let firsts: Vec<i32> = words.iter().map(|b| i32::from_le_bytes(*b)).collect();
            self.tiers.note_prompt(bank, &firsts, rows);
        }
        Ok(())
    }

    /// Notes how often each expert is picked in a part of a prompt: `base`, I32 `[experts + 1]`.
    pub(super) fn log_sorted(&mut self, bank: usize, base: u64, experts: usize) -> Result<(), EngineError> {
        const SORTS: usize = 4096;
        let at = self.sorted.len() * 4 * (experts + 1);
        if !self.tiers.is_partial() || self.sorted.len() >= SORTS {
            return Ok(());
        }
        let room = self.log.as_ref().map_or(0, |l| l.as_slice().len());
        let most = 4 * (experts + 1) * (self.tiers.layers() + 1) * 8;
        if self.sorted.is_empty() && room < most {
            self.log = Some(self.vram.device.pinned(most).map_err(fault)?);
        } else if at + 4 * (experts + 1) > room {
            return Ok(());
        }
        if let Some(log) = &self.log {
            self.stream.copy(log.device_ptr() + at as u64, base, 4 * (experts + 1)).map_err(fault)?;
            self.sorted.push((bank, at, experts));
        }
        Ok(())
    }

    /// Refolds `n` of the recorded columns of a slot.
    pub(super) fn refold(&mut self, slot: usize, n: usize) -> Result<(), EngineError> {
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

    /// Waits for n-gram rows and sends them, rounded to BF16: to a fixed address in decode rounds, else to memory of the round.
    pub(super) fn stage(
        &mut self,
        tickets: &[NgramTicket],
        rows: usize,
        width: usize,
    ) -> Result<CudaBuf, EngineError> {
        let bytes = (2 * rows * width).next_multiple_of(256);
        let decode = self.is_decode();
        let stages = &mut self.stages[usize::from(decode)];
        let (mut i, mut at) = self.staged;
        while stages.get(i).is_some_and(|s| at + bytes > s.host.as_slice().len()) {
            (i, at) = (i + 1, 0);
        }
        if i == stages.len() {
            let size = bytes.next_power_of_two().max(STAGE);
            let host = self.vram.device.pinned(size).map_err(fault)?;
            let device = if decode { Some(self.vram.alloc("rounds", size)?) } else { None };
            stages.push(Stage { host, device });
        }
        self.staged = (i, at + bytes);
        let mut buf = CudaBuf::failed(rows, width, false);
        if !decode {
            buf = self.fresh(rows, width, false)?;
        }
        let mut failed = Vec::new();
        let lane_rows = self.round()?.lane_rows.clone();
        let stage = &mut self.stages[usize::from(decode)][i];
        let words = &mut stage.host.as_mut_slice()[at..at + 2 * rows * width];
        for (l, (ticket, r)) in tickets.iter().zip(&lane_rows).enumerate() {
            let own = &mut words[2 * r.start * width..2 * r.end * width];
            let clock = std::time::Instant::now();
            let waited = ticket.wait_pieces();
            self.tiers.counts.ngram_waited += clock.elapsed().as_micros() as u64;
            let values = waited.and_then(|v| {
                let n: usize = v.iter().map(|p| p.len()).sum();
                let what = || EngineError::Ngram(format!("{n} table values, {} needed", own.len() / 2));
                if 2 * n == own.len() { Ok(v) } else { Err(what()) }
            });
            match values {
                Ok(pieces) => {
                    let mut rest = own.as_chunks_mut::<2>().0;
                    let mut work = Vec::new();
                    for p in pieces.iter() {
                        let (own, after) = rest.split_at_mut(p.len());
                        rest = after;
                        work.extend(own.chunks_mut(1 << 16).zip(p.chunks(1 << 16)));
                    }
                    let narrow = |(own, v): (&mut [[u8; 2]], &[f32])| {
                        for (o, v) in own.iter_mut().zip(v) {
                            *o = half::bf16::from_f32(*v).to_bits().to_le_bytes();
                        }
                    };
                    // A token's rows are not worth waking other threads.
                    match work.len() {
                        0..4 => work.into_iter().for_each(narrow),
                        _ => work.into_par_iter().for_each(narrow),
                    }
                }
                // Zeros keep the shapes; the lane's results are dropped.
                Err(e) => {
                    own.fill(0);
                    failed.push((l, e.to_string()));
                }
            }
        }
        let from = stage.host.device_ptr() + at as u64;
        if let (true, Some(device)) = (decode, &stage.device) {
            buf.ptr = device.at(at);
        }
        self.failed_lanes.extend(failed);
        self.stream.copy(buf.ptr, from, 2 * rows * width).map_err(fault)?;
        if self.holding {
            self.cuts.push(self.stream.held());
            self.launch_early()?;
        } else {
            self.chained = false;
        }
        Ok(buf)
    }
}
