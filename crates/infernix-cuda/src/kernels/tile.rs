//! Prefill products on tensor cores: dense linears and experts grouped over their rows.
//!
//! Exact codes in BF16, FP32 sums, group scales in FP32 on the sums of a group, row and tensor scales at the end: every output is
//! within half an ulp of BF16 + K 2^-24 sum |w x| of the exact sum. A row's bits do not depend on the other rows.

use super::linear::{Linear, Out, WeightFormat};
use crate::driver::{Args, Device, DeviceBuffer, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Stored words the tile products read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileFormat {
    /// Planes of whole rows.
    Rows(WeightFormat),
    /// Rows of two BF16 parts of each value, 64 k of the first and the same 64 of the second: what
    /// [`super::ggml::GgmlGemv::expand`] makes. Experts only.
    Parts,
    /// NVFP4 expert records: units of 16 rows x 16 k, gate and up rows alternating.
    Rg16,
    /// The same records by block-scaled FP4 products, W4A4 only: sm_120a. Its arithmetic is checked by a model on the CPU
    /// (`oracle::fp4`); it has not run on hardware.
    Rg16Fp4,
}

impl TileFormat {
    /// Name as in kernel entries.
    pub fn tag(self) -> &'static str {
        match self {
            Self::Rows(f) => f.tag(),
            Self::Parts => "parts",
            Self::Rg16 | Self::Rg16Fp4 => "rg16",
        }
    }

    /// Bytes of 256 rows of 64 k.
    fn tile_bytes(self) -> usize {
        match self {
            Self::Rows(f) => 256 * f.row_bytes(64).0,
            Self::Parts => 256 * 128,
            Self::Rg16 | Self::Rg16Fp4 => 16 * 4 * 144,
        }
    }

    /// Bytes of a row of `k` values in each plane.
    fn planes(self, k: usize) -> [usize; 3] {
        match self {
            Self::Rows(f) => {
                let (codes, high, _) = f.row_bytes(k);
                [codes, high, f.scale_pitch(k)]
            }
            Self::Parts => [4 * k, 0, 0],
            Self::Rg16 | Self::Rg16Fp4 => [0; 3],
        }
    }

    /// The packing of activations it reads. Formats with equal packing share packed activations.
    pub fn packing(self) -> Packing {
        match self {
            Self::Rows(WeightFormat::Bf16 | WeightFormat::Q8G32 | WeightFormat::Mxfp8) | Self::Parts => {
                Packing::K32
            }
            Self::Rows(WeightFormat::Fp8Row | WeightFormat::Fp8Block) => Packing::K64,
            Self::Rows(_) => Packing::K64Pairs,
            Self::Rg16 => Packing::K16,
            Self::Rg16Fp4 => Packing::Fp4,
        }
    }
}

/// Order of k in packed activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Lanes take 8 of 32.
    K32,
    /// Lanes take 16 of 64.
    K64,
    /// Lanes take 16 of 64, in pairs four apart.
    K64Pairs,
    /// Lanes take 4 of 16, in pairs two apart.
    K16,
    /// E2M1 codes and E4M3 scales.
    Fp4,
}

/// Rows of a call sorted by expert, device addresses. Made by [`Sort::launch`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Sorted {
    /// I32 `[Sort::max_jobs][4]`: expert, first place, picks, first padded place.
    pub jobs: u64,
    /// I32 `[2]`: jobs, picks.
    pub count: u64,
    /// I32 `[E + 1]`: first place of each expert.
    pub base: u64,
    /// I32 `[picks]`: pick at each place; pick p is rank `p % top` of row `p / top`.
    pub list: u64,
    /// I32 `[picks]`: place of each pick, as `RowOps::combine` takes it.
    pub slot: u64,
}

/// Lists of jobs for experts that are at hand some at a time, device addresses. Made by [`Sort::lists`].
#[derive(Clone, Copy, Debug)]
pub struct JobLists {
    /// Experts of a list; list i has those from `i * per` on.
    pub per: usize,
    /// I32 `[lists][most][4]`.
    pub jobs: u64,
    /// Jobs that a list has room for: [`Sort::max_jobs`].
    pub most: usize,
    /// I32 `[lists][2]`: jobs, 0.
    pub counts: u64,
    /// U64 `[E]`, for [`ExpertPlanes`]: the experts of a list lie one behind the other, of every list from the same place on.
    pub tab: u64,
}

impl JobLists {
    /// Bytes of `jobs`, `counts` and `tab` (all three planes of it).
    pub fn bytes(experts: usize, per: usize, most: usize) -> [usize; 3] {
        let lists = experts.div_ceil(per);
        [16 * lists * most, 8 * lists, 24 * experts]
    }

    /// `all`, of it the jobs of list `i`.
    pub fn list(&self, all: Sorted, i: usize) -> Sorted {
        Sorted { jobs: self.jobs + (16 * i * self.most) as u64, count: self.counts + 8 * i as u64, ..all }
    }
}

/// Sorts the picks of a prefill call by expert: stable, so that equal calls give equal places.
pub struct Sort {
    count: Kernel,
    place: Kernel,
    lists: Kernel,
    experts: usize,
    top: usize,
    width: usize,
}

impl Sort {
    /// Up to 1024 experts, `top` picks a row; jobs of the width that [`tile_width`] gives for the device.
    pub fn new(dev: &Arc<Device>, experts: usize, top: usize) -> Result<Self> {
        Self::with_width(dev, experts, top, tile_width(dev))
    }

    /// As [`Sort::new`] with explicit job width (a multiple of 8).
    pub fn with_width(dev: &Arc<Device>, experts: usize, top: usize, width: usize) -> Result<Self> {
        if experts == 0 || experts > 1024 || top == 0 || !width.is_multiple_of(8) || width == 0 {
            return Err(CudaError::Shape { kernel: "sort", what: format!("top {top} of {experts}") });
        }
        Ok(Sort {
            count: dev.kernel("sort_count", 0)?,
            place: dev.kernel("sort_place", 0)?,
            lists: dev.kernel("sort_lists", 0)?,
            experts,
            top,
            width,
        })
    }

    /// Jobs that `rows` rows can make at most.
    pub fn max_jobs(&self, rows: usize) -> usize {
        let picks = rows * self.top;
        picks / self.width + self.experts.min(picks)
    }

    /// Places that packed activations of `rows` rows need at most (each expert's picks padded to 8).
    pub fn max_places(&self, rows: usize) -> usize {
        let picks = rows * self.top;
        picks + 7 * self.experts.min(picks)
    }

    /// `ids` I32 `[rows][top]`.
    pub fn launch(&self, s: &Stream, ids: u64, rows: usize, o: Sorted, pdl: bool) -> Result<()> {
        let picks = rows * self.top;
        let args = Args::new().ptr(ids).ints(&[picks, self.experts, self.width]);
        let args = args.ptr(o.jobs).ptr(o.count).ptr(o.base);
        s.launch(&self.count, [1, 1, 1], 1024, pdl, &args)?;
        let args = Args::new().ptr(ids).int(picks).ptr(o.base).ptr(o.list).ptr(o.slot);
        s.launch(&self.place, [self.experts as u32, 1, 1], 256, true, &args)
    }

    /// Cuts the jobs of `o` into `l`: the experts of a list will lie `stride` bytes apart from `at` on.
    pub fn lists(
        &self,
        s: &Stream,
        o: Sorted,
        l: &JobLists,
        at: u64,
        stride: usize,
        pdl: bool,
    ) -> Result<()> {
        if l.per == 0 {
            return Err(CudaError::Shape { kernel: "sort_lists", what: "lists of no expert".into() });
        }
        let args = Args::new().ptr(o.jobs).ptr(o.count).ints(&[self.experts, l.per, l.most]);
        let args = args.ptr(l.jobs).ptr(l.counts).ptr(at).ptr(stride as u64).ptr(l.tab);
        s.launch(&self.lists, [self.experts.div_ceil(l.per) as u32, 1, 1], 256, pdl, &args)
    }
}

/// Tokens of a tile on this device: 128 with wgmma, else 64.
pub fn tile_width(dev: &Device) -> usize {
    if has_wgmma(dev) { 128 } else { 64 }
}

fn has_wgmma(dev: &Device) -> bool {
    dev.info().capability == 90
}

/// Input scales that quantise activations to the canonical 4-bit blocks while they are packed.
#[derive(Clone, Copy, Debug)]
pub struct Quantise {
    /// FP32 `[E][3]` (gate, up, down).
    pub input: u64,
    /// The scales are divisors.
    pub divisor: bool,
    /// Inputs of down; else of gate and up.
    pub down: bool,
}

/// Experts of one layer for [`Tile::grouped`], one of the two products. Device addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertPlanes {
    /// U64 `[3][E]`: addresses of each expert's codes, high bits and scales (16-byte aligned; 0 where a format has none). `Rg16`: the
    /// codes' address is that of the record's gate/up or down part.
    pub tab: u64,
    /// Experts.
    pub experts: usize,
    /// Rows: 2I (gate and up) or H.
    pub n: usize,
    /// Columns: H or I.
    pub k: usize,
    /// Stored columns.
    pub k_pad: usize,
    /// Rows before the up rows where gate rows come first (I); 0 where rows are in order.
    pub half: usize,
    /// FP32 `[E][3]` (gate, up, down): factor of each matrix (W4A4: fl32(weight scale * input scale)); 0: none.
    pub alpha: u64,
    /// `alpha` divides.
    pub divisor: bool,
    /// The down product.
    pub down: bool,
}

/// What a grouped product stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// The rows, rounded to BF16.
    Rows,
    /// Rows 2j and 2j + 1 are gate and up of unit j: bf16(silu(bf16 gate) bf16 up) by the shared exponential.
    SwiGlu,
}

/// A tile product of one format.
pub struct Tile {
    kernel: Kernel,
    pack: Kernel,
    format: TileFormat,
    width: usize,
    stages: usize,
    grid: usize,
}

impl Tile {
    /// The fastest instance for the device.
    pub fn new(dev: &Arc<Device>, f: TileFormat) -> Result<Self> {
        Self::with(dev, f, has_wgmma(dev) && f != TileFormat::Rg16Fp4)
    }

    /// With wgmma (sm_90a) or with mma.sync (all). A [`Sort`] for it needs the same width.
    pub fn with(dev: &Arc<Device>, f: TileFormat, wgmma: bool) -> Result<Self> {
        let width = if wgmma { 128 } else { 64 };
        let fp4 = f == TileFormat::Rg16Fp4;
        let stage = f.tile_bytes() + width * if fp4 { 36 } else { 128 };
        // Barriers, then stages from a multiple of 1,024 bytes on.
        let stages = ((dev.info().shared_per_block - 1152) / stage).min(8);
        let variant = if fp4 {
            "4"
        } else if wgmma {
            "w"
        } else {
            ""
        };
        let name = format!("tile{variant}_{}", f.tag());
        let pack = match f.packing() {
            Packing::K32 => "pack_32",
            Packing::K64 => "pack_64",
            Packing::K64Pairs => "pack_64p",
            Packing::K16 => "pack_16",
            Packing::Fp4 => "pack_fp4",
        };
        Ok(Tile {
            kernel: dev.kernel(&name, 1152 + stages * stage)?,
            pack: dev.kernel(pack, 0)?,
            format: f,
            width,
            stages,
            grid: dev.info().multiprocessors as usize,
        })
    }

    /// Tokens of a tile.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes of packed activations of `places` rows of `k`.
    pub fn packed_bytes(places: usize, k: usize) -> usize {
        places.div_ceil(8) * 8 * k.div_ceil(64) * 128
    }

    /// Packs `x` BF16 `[rows][x_pitch]`, `k` columns (multiples of 8), for [`Tile::dense`].
    #[expect(clippy::too_many_arguments, reason = "one matrix and its pitch to another")]
    pub fn pack(
        &self,
        s: &Stream,
        x: u64,
        x_pitch: usize,
        rows: usize,
        k: usize,
        packed: u64,
        pdl: bool,
    ) -> Result<()> {
        self.fits("pack", k.is_multiple_of(8) && x_pitch.is_multiple_of(8), k, x_pitch)?;
        let args =
            Args::new().ptr(x).ptr(0).ptr(0).ptr(0).ptr(0).ptr(packed).ints(&[x_pitch, k, rows, 1, 0, 0]);
        let grid = [k.div_ceil(64) as u32, rows.div_ceil(self.width) as u32, 1];
        s.launch(&self.pack, grid, self.width as u32, pdl, &args)
    }

    /// Packs the inputs of every pick for [`Tile::grouped`], in sorted order: rows `list[place] / top` of `x` (`top` > 0), or row
    /// `place` itself (`top` 0: the output of an earlier grouped product). `max_jobs` bounds the jobs.
    #[expect(clippy::too_many_arguments, reason = "one matrix and its order to another")]
    pub fn pack_sorted(
        &self,
        s: &Stream,
        x: u64,
        x_pitch: usize,
        k: usize,
        o: Sorted,
        top: usize,
        max_jobs: usize,
        quantise: Option<Quantise>,
        packed: u64,
        pdl: bool,
    ) -> Result<()> {
        self.fits("pack", k.is_multiple_of(8) && x_pitch.is_multiple_of(8), k, x_pitch)?;
        let (input, which, divisor) =
            quantise.map_or((0, 0, 0), |q| (q.input, if q.down { 2 } else { 0 }, usize::from(q.divisor)));
        let fp4 = self.format == TileFormat::Rg16Fp4;
        let whole = if quantise.is_some() { k.is_multiple_of(16) } else { !fp4 };
        self.fits("pack: quantised", whole, k, x_pitch)?;
        let args = Args::new().ptr(x).ptr(o.jobs).ptr(o.count).ptr(if top == 0 { 0 } else { o.list });
        let args = args.ptr(input).ptr(packed).ints(&[x_pitch, k, 0, top.max(1), which, divisor]);
        s.launch(&self.pack, [k.div_ceil(64) as u32, max_jobs as u32, 1], self.width as u32, pdl, &args)
    }

    /// `y[t][n] = sum_k w[n][k] x[t][k]` of packed rows; `y` `[rows][y_pitch]` of `out` words.
    #[expect(clippy::too_many_arguments, reason = "two matrices and their pitches")]
    pub fn dense(
        &self,
        s: &Stream,
        w: &Linear,
        packed: u64,
        rows: usize,
        y: u64,
        y_pitch: usize,
        out: Out,
        pdl: bool,
    ) -> Result<()> {
        self.fits("tile", self.format == TileFormat::Rows(w.format) && w.k.is_multiple_of(8), w.k, y_pitch)?;
        let (cp, hp, _) = w.format.row_bytes(w.k_pad);
        let ptr = |b: &Option<DeviceBuffer>| b.as_ref().map_or(0, DeviceBuffer::ptr);
        let mode = usize::from(out == Out::F32) | usize::from(w.divide) << 1;
        let args =
            Args::new().ptr(w.codes.ptr()).ptr(ptr(&w.high)).ptr(ptr(&w.scales)).ptr(ptr(&w.row_scale));
        let args = args.f32(w.tensor_scale).ptr(0).ptr(0).ptr(0).ptr(0).ptr(packed).ptr(y);
        let sp = w.format.scale_pitch(w.k_pad);
        let args = args.ints(&[w.n, w.k_pad, w.k, rows, 0, y_pitch, cp, hp, sp, 0, mode, self.stages]);
        let items = w.n.div_ceil(256) * rows.div_ceil(self.width);
        s.launch(&self.kernel, [items.min(self.grid) as u32, 1, 1], 384, pdl, &args)
    }

    /// One product of every expert with its picks. `y` BF16 `[picks][y_pitch]` in sorted order: `n` rows wide, or `n / 2` with
    /// [`Epilogue::SwiGlu`].
    #[expect(clippy::too_many_arguments, reason = "the operands of one layer's experts")]
    pub fn grouped(
        &self,
        s: &Stream,
        w: &ExpertPlanes,
        o: Sorted,
        packed: u64,
        y: u64,
        y_pitch: usize,
        e: Epilogue,
        pdl: bool,
    ) -> Result<()> {
        let [cp, hp, sp] = self.format.planes(w.k_pad);
        let parts = self.format == TileFormat::Parts;
        let rg = matches!(self.format, TileFormat::Rg16 | TileFormat::Rg16Fp4);
        // NVFP4 experts are records.
        let ok = self.format != TileFormat::Rows(WeightFormat::Nvfp4)
            && w.k.is_multiple_of(8)
            && if rg {
                w.n.is_multiple_of(16) && w.k.is_multiple_of(16) && w.half == 0
            } else {
                cp.is_multiple_of(16) && (!parts || w.k.is_multiple_of(64))
            };
        self.fits("tile: experts", ok && (e == Epilogue::Rows || w.n.is_multiple_of(2)), w.k, y_pitch)?;
        let mode =
            usize::from(w.divisor) << 1 | usize::from(e == Epilogue::SwiGlu) << 2 | usize::from(w.down) << 3;
        let args = Args::new().ptr(0).ptr(0).ptr(0).ptr(0).f32(1.0).ptr(w.tab).ptr(w.alpha);
        let args = args.ptr(o.jobs).ptr(o.count).ptr(packed).ptr(y);
        let k_stored = if rg { w.k } else { w.k_pad };
        let k = if parts { 2 * w.k } else { w.k };
        let args =
            args.ints(&[w.n, k_stored, k, 0, w.experts, y_pitch, cp, hp, sp, w.half, mode, self.stages]);
        s.launch(&self.kernel, [self.grid as u32, 1, 1], 384, pdl, &args)
    }

    fn fits(&self, kernel: &'static str, ok: bool, k: usize, pitch: usize) -> Result<()> {
        if ok {
            return Ok(());
        }
        Err(CudaError::Shape {
            kernel,
            what: format!("{:?}: K = {k}, pitch {pitch} do not fit it", self.format),
        })
    }
}
