//! Experts whose activations stay at 16 bits, as stored: in records, or in plain rows.

use super::linear::{Linear, WeightFormat};
use crate::driver::{Args, Device, DeviceBuffer, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Forms of records with a product of their own ([`super::ggml::GgmlGemv::experts`] has those of GGML blocks).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredForm {
    /// NVFP4 in units of 16 rows x 16 k, gate and up rows alternating.
    Rg16,
    /// E4M3 rows, an FP32 scale per 128 x 128.
    Fp8Block,
}

/// One matrix of the experts that some picks chose, or gate and up together. Device addresses.
#[derive(Clone, Copy, Debug)]
pub struct StoredProduct {
    /// U64 `[picks]`: the record of each pick's expert; with `away` U64 `[E]`: that of each expert.
    pub at: u64,
    /// U32 `[E]`: whether a record is the host's, of a product that reads it there; 0: none is. Needs [`StoredExperts::reads`].
    pub away: u64,
    /// I32 `[picks]`.
    pub ids: u64,
    /// FP32 `[E][3]` (gate, up, down), what sums are multiplied by at the end; 0: by nothing.
    pub last: u64,
    /// `last` divides.
    pub divide: bool,
    /// Bytes of a record before the codes and before the scales (of `Fp8Block`).
    pub codes: usize,
    /// See `codes`.
    pub scales: usize,
    /// Rows: those of gate and up together, or of down.
    pub n: usize,
    /// Columns, a multiple of 16.
    pub k: usize,
    /// Gate and up: their SwiGLU is the result.
    pub pairs: bool,
}

/// One matrix of all experts, or gate and up together, in plain rows.
#[derive(Clone, Copy)]
pub struct RowProduct<'a> {
    /// `n` rows of each expert, one expert below the other: of gate and up first gate's. A format of [`StoredExperts::ROWS`], K a
    /// multiple of 8.
    pub w: &'a Linear,
    /// I32 `[picks]`.
    pub ids: u64,
    /// Rows of an expert.
    pub n: usize,
    /// Gate and up: their SwiGLU is the result.
    pub pairs: bool,
}

/// The kernels.
pub struct StoredExperts {
    device: Arc<Device>,
    fetch: Kernel,
    planes: Kernel,
    rows: Vec<Kernel>,
}

impl StoredExperts {
    /// Picks whose records are brought to the device at a time.
    pub const PICKS: usize = 32;

    /// Formats of plain rows.
    pub const ROWS: [WeightFormat; 6] = [
        WeightFormat::Bf16,
        WeightFormat::Q8G32,
        WeightFormat::Q4G64,
        WeightFormat::Q5G64,
        WeightFormat::Q6G64,
        WeightFormat::Fp8Row,
    ];

    /// Looks the kernels up.
    pub fn new(dev: &Arc<Device>) -> Result<Self> {
        Ok(StoredExperts {
            device: dev.clone(),
            fetch: dev.kernel("expert_fetch", 0)?,
            planes: dev.kernel("expert_planes", 0)?,
            rows: Self::ROWS
                .iter()
                .map(|f| dev.kernel(&format!("stored_rows_{}", f.tag()), 0))
                .collect::<Result<_>>()?,
        })
    }

    /// Whether products of `k` columns can read records of the host themselves: 32 rows go to shared memory.
    pub fn reads(&self, form: StoredForm, k: usize) -> bool {
        Self::slice(form, k) <= self.device.info().shared_per_block - 2048
    }

    /// Bytes of 32 rows.
    fn slice(form: StoredForm, k: usize) -> usize {
        match form {
            StoredForm::Rg16 => 2 * (k / 16) * 144,
            StoredForm::Fp8Block => 32 * k,
        }
    }

    /// Where the record of each of up to [`StoredExperts::PICKS`] picks is, to `at` U64 `[picks]`. `whole` U64 `[E]` addresses of
    /// records, `away` U32 `[E]`: whether it is the host's; such a record of `record` bytes, rounded up to 16 (they must be readable), is
    /// copied to `stage`, which has a place of `stride` bytes a pick. Records and places are 16-byte aligned, ids below `[E]`.
    #[expect(clippy::too_many_arguments, reason = "two tables, picks and where records go")]
    pub fn fetch(
        &self,
        s: &Stream,
        whole: u64,
        away: u64,
        ids: u64,
        picks: usize,
        record: usize,
        stage: u64,
        stride: usize,
        at: u64,
        pdl: bool,
    ) -> Result<()> {
        let record = record.next_multiple_of(16);
        if picks > Self::PICKS
            || record > stride
            || !stride.is_multiple_of(16)
            || i32::try_from(stride).is_err()
        {
            let what = format!("{picks} picks, records of {record} bytes, {stride} apart");
            return Err(CudaError::Shape { kernel: "expert_fetch", what });
        }
        // 16 KiB a block: enough of them for the link.
        let blocks = record.div_ceil(16 << 10).max(1);
        let a = Args::new().ptr(whole).ptr(away).ptr(ids).ptr(stage).ptr(at).ints(&[record, stride]);
        s.launch(&self.fetch, [blocks as u32, picks as u32, 1], 256, pdl, &a)
    }

    /// Addresses of three planes of every expert, U64 `[3][E]`, for [`super::tile::ExpertPlanes`]: plane j begins `offsets[j]` bytes into
    /// a record.
    pub fn planes(
        &self,
        s: &Stream,
        whole: u64,
        experts: usize,
        offsets: [usize; 3],
        out: u64,
        pdl: bool,
    ) -> Result<()> {
        let a = Args::new().ptr(whole).ptr(out);
        let a = offsets.iter().fold(a, |a, o| a.ptr(*o as u64)).int(experts);
        s.launch(&self.planes, [experts.div_ceil(256) as u32, 1, 1], 256, pdl, &a)
    }

    /// Row `pick / share` of `x` BF16 `[..][k]` through each pick's expert: `y` BF16 `[picks][n]`, or `[picks][n / 2]` of
    /// `silu(gate) up`. The canonical order of sums: the bits of [`super::chain::ExpertChain`].
    #[expect(clippy::too_many_arguments, reason = "a product, its input and output")]
    pub fn product(
        &self,
        s: &Stream,
        form: StoredForm,
        p: &StoredProduct,
        picks: usize,
        x: u64,
        share: usize,
        y: u64,
        pdl: bool,
    ) -> Result<()> {
        let rows = form == StoredForm::Fp8Block || p.n.is_multiple_of(16);
        let fits = p.away == 0 || self.reads(form, p.k);
        let aligned = fits
            && (p.codes | p.scales).is_multiple_of(4)
            && (form == StoredForm::Rg16 || p.codes.is_multiple_of(16));
        let rows = rows && (!p.pairs || p.n.is_multiple_of(2));
        let sizes = [p.n, p.k, picks, share].iter().all(|v| i32::try_from(*v).is_ok());
        if !p.k.is_multiple_of(16) || !rows || !aligned || !sizes || picks > 65_535 || share == 0 {
            let what = format!("{form:?}: {} x {}, {picks} picks, codes at {}", p.n, p.k, p.codes);
            return Err(CudaError::Shape { kernel: "stored", what });
        }
        let direct = p.away != 0;
        let name = match (form, direct) {
            (StoredForm::Rg16, false) => "stored_rg16",
            (StoredForm::Rg16, true) => "stored_rg16_direct",
            (StoredForm::Fp8Block, false) => "stored_fp8",
            (StoredForm::Fp8Block, true) => "stored_fp8_direct",
        };
        let kernel = self.device.kernel(name, if direct { Self::slice(form, p.k) } else { 0 })?;
        let mode = usize::from(p.pairs) | usize::from(p.divide) << 1;
        let pair = |a: usize, b: usize| a as u64 | (b as u64) << 32;
        let (codes, scales) = (p.codes as u64, p.scales as u64);
        let words = [p.at, p.away, p.ids, p.last, x, y, codes, scales, pair(p.n, p.k), pair(share, mode)];
        s.launch(&kernel, [p.n.div_ceil(32) as u32, picks as u32, 1], 256, pdl, &Args::new().block(&words))
    }

    /// As [`StoredExperts::product`] of experts in plain rows.
    #[expect(clippy::too_many_arguments, reason = "a product, its input and output")]
    pub fn rows(
        &self,
        s: &Stream,
        p: &RowProduct<'_>,
        picks: usize,
        x: u64,
        share: usize,
        y: u64,
        pdl: bool,
    ) -> Result<()> {
        let w = p.w;
        let kernel = Self::ROWS.iter().zip(&self.rows).find(|(f, _)| **f == w.format).map(|(_, k)| k);
        let fits = w.k.is_multiple_of(8) && w.k <= w.k_pad && w.k_pad.is_multiple_of(w.format.step());
        let whole = p.n > 0 && w.n.is_multiple_of(p.n) && (!p.pairs || p.n.is_multiple_of(2)) && !w.divide;
        let sizes = [w.n, 2 * w.k_pad, picks, share].iter().all(|v| i32::try_from(*v).is_ok());
        let (Some(kernel), true) = (kernel, fits && whole && sizes && picks <= 65_535 && share > 0) else {
            let what = format!("{:?}: {} of {} rows x {}, {picks} picks", w.format, p.n, w.n, w.k);
            return Err(CudaError::Shape { kernel: "stored_rows", what });
        };
        let (codes, high, scales) = w.format.row_bytes(w.k_pad);
        let pair = |a: usize, b: usize| a as u64 | (b as u64) << 32;
        let ptr = |b: &Option<DeviceBuffer>| b.as_ref().map_or(0, DeviceBuffer::ptr);
        let words = [
            w.codes.ptr(),
            ptr(&w.high),
            ptr(&w.scales),
            ptr(&w.row_scale),
            p.ids,
            x,
            y,
            pair(codes, high),
            pair(scales, p.n),
            pair(w.k, share),
            pair(usize::from(p.pairs), w.tensor_scale.to_bits() as usize),
        ];
        s.launch(kernel, [p.n.div_ceil(32) as u32, picks as u32, 1], 256, pdl, &Args::new().block(&words))
    }
}
