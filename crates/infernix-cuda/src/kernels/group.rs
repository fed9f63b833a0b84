//! Several decode linears of one input as one launch, with what comes before and after them.

use super::linear::{Gemv, GemvPlan, GemvTuning, Linear, Out, WeightFormat};
use super::nvfp4;
use crate::driver::{Args, Device, DeviceBuffer, DeviceInfo, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// Matrices of a launch, at most.
pub const MOST_PARTS: usize = 8;
/// Columns of a launch, at most.
pub const MOST_COLUMNS: usize = 16;

/// One matrix and where its product goes.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// The matrix; all have the same columns.
    pub w: &'a Linear,
    /// `[cols][y_pitch]` of `out` words.
    pub y: u64,
    /// Elements between columns of `y`.
    pub y_pitch: usize,
    /// Its words.
    pub out: Out,
}

/// How the input of a column is made. Pitches are in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Input {
    /// BF16 as it is.
    Plain {
        /// `[cols][pitch]`.
        x: u64,
        /// Elements between columns.
        pitch: usize,
    },
    /// `bf16(silu(gate) * up)`, as `RowOps::swiglu` gives it.
    SwiGlu {
        /// `[cols][pitch]`.
        gate: u64,
        /// `[cols][pitch]`.
        up: u64,
        /// Elements between columns of both.
        pitch: usize,
    },
    /// `bf16(norm(o) * w * act(z))` by heads, as `RowOps::gated_norm` gives it.
    Gated {
        /// `[cols][pitch]`.
        o: u64,
        /// `[cols][z_pitch]`.
        z: u64,
        /// BF16 `[head]`.
        w: u64,
        /// Elements between columns of `o`.
        pitch: usize,
        /// Elements between columns of `z`.
        z_pitch: usize,
        /// Width of a head, a multiple of 32 up to 256.
        head: usize,
        /// Norm epsilon.
        eps: f32,
        /// Sigmoid, else silu.
        sigmoid: bool,
    },
}

/// The sum of a token's experts with this product (the shared expert, BF16) as its last term, as `RowOps::combine` gives it. The
/// launch has one part.
#[derive(Clone, Copy, Debug, Default)]
pub struct Experts {
    /// BF16 `[cols * top][n]`, picks in order.
    pub outputs: u64,
    /// FP32 `[cols][top]`.
    pub weights: u64,
    /// FP32, a column's logit of the shared expert.
    pub logit: u64,
    /// Elements between columns of `logit`.
    pub logit_pitch: usize,
    /// Picks a column.
    pub top: usize,
}

/// A planned launch for matrices of given shapes.
pub struct GemvGroup {
    kernel: Kernel,
    threads: u32,
    sides: [Option<GemvPlan>; 2],
    tiles: [usize; 2],
    k_pads: [usize; 2],
    split: usize,
    grid: usize,
    cols: usize,
}

/// What a plan depends on: the format beside BF16, its tiles and stored columns, the tiles and stored columns in BF16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupShape {
    tag: &'static str,
    tiles: [usize; 2],
    k_pads: [usize; 2],
    cols: usize,
}

/// The format beside BF16.
fn other(parts: &[Part<'_>]) -> Option<WeightFormat> {
    parts.iter().map(|p| p.w.format).find(|f| *f != WeightFormat::Bf16)
}

impl GroupShape {
    /// The shape of a launch, if the kernels take it: one format of q8, q4, NVFP4 and FP8 rows beside BF16, equal `k`.
    pub fn of(parts: &[Part<'_>], cols: usize) -> Option<GroupShape> {
        use WeightFormat::*;
        let first = parts.first()?;
        let f = other(parts);
        let known = matches!(f, None | Some(Q8G32 | Q4G64 | Nvfp4 | Fp8Row));
        let same = parts.iter().all(|p| p.w.k == first.w.k && (p.w.format == Bf16 || Some(p.w.format) == f));
        if !known || !same || parts.len() > MOST_PARTS || cols == 0 || cols > MOST_COLUMNS {
            return None;
        }
        let side = |bf16: bool| parts.iter().filter(move |p| (p.w.format == Bf16) == bf16);
        let tiles = |bf16| side(bf16).map(|p| p.w.n.div_ceil(16)).sum();
        let k_pad = |bf16| side(bf16).next().map_or(0, |p| p.w.k_pad);
        Some(GroupShape {
            tag: f.unwrap_or(Q8G32).tag(),
            tiles: [tiles(false), tiles(true)],
            k_pads: [k_pad(false), k_pad(true)],
            cols,
        })
    }
}

/// Threads of a CTA.
const THREADS: u32 = 544;

/// Bytes of the sums of experts, which lie before the ring.
fn sums(cols: usize) -> usize {
    512 * cols.div_ceil(8)
}

/// Plans of NVFP4 beside BF16 and the CTAs of the former: those that are done first.
fn units(info: &DeviceInfo, shape: GroupShape) -> Option<([Option<GemvPlan>; 2], usize)> {
    let (sms, cols) = (info.multiprocessors as usize, shape.cols);
    let room = info.shared_per_block;
    let t = GemvTuning { shared: room, ring: Gemv::RING, chunk: None, per_sm: 1 };
    let [tiles, others] = shape.tiles;
    let of = |&(rows, cost): &(usize, usize)| {
        let count = tiles * 16 / rows;
        let time = |a: usize, b: usize| {
            let bf16 = 10 * 16 * 2 * shape.k_pads[1] * others.div_ceil(b.max(1));
            (count.div_ceil(a) * cost * nvfp4::bytes(16, shape.k_pads[0]) * rows / 16).max(bf16)
        };
        let grid = (count + others).min(sms);
        let split = if others == 0 { grid } else { (1..grid).min_by_key(|a| time(*a, grid - a))? };
        let own = nvfp4::plan(rows, tiles, split, shape.k_pads[0], cols, info, &t)?;
        // The entries with a BF16 side have one or two n-tiles.
        if !own.x_smem || (others > 0 && own.tiles > 2) {
            return None;
        }
        let mut beside = None;
        if others > 0 {
            let t = GemvTuning { shared: room - sums(cols), ring: t.ring.min(room - sums(cols)), ..t };
            let p = GemvPlan::tuned(WeightFormat::Bf16, 16 * others, shape.k_pads[1], cols, info, &t).ok()?;
            beside = Some(GemvPlan { grid: grid - split, ..p }).filter(|p| p.x_smem);
            beside?;
        }
        Some((time(split, grid - split), [Some(own), beside], split))
    };
    nvfp4::tile_rows(cols).iter().filter_map(of).min_by_key(|p| p.0).map(|p| (p.1, p.2))
}

impl GemvGroup {
    /// Plans a launch; `None` if the activations do not fit shared memory beside a ring.
    pub fn new(dev: &Arc<Device>, f: WeightFormat, shape: GroupShape) -> Result<Option<Self>> {
        let info = dev.info();
        if f == WeightFormat::Nvfp4 && shape.tiles[0] > 0 {
            let Some(p) = units(info, shape) else { return Ok(None) };
            return Self::of_units(dev, p.0, shape, p.1).map(Some);
        }
        let sms = info.multiprocessors as usize;
        let total = shape.tiles[0] + shape.tiles[1];
        let extra = sums(shape.cols);
        let format = |i: usize| if i == 0 { f } else { WeightFormat::Bf16 };
        let plan = |per_sm: usize| -> Option<[Option<GemvPlan>; 2]> {
            let room = (info.shared_per_block + 1024) / per_sm - 1024 - extra;
            let mut out = [None, None];
            for i in 0..2 {
                if shape.tiles[i] == 0 {
                    continue;
                }
                let t = GemvTuning { shared: room, ring: Gemv::RING.min(room), chunk: None, per_sm: 1 };
                let p =
                    GemvPlan::tuned(format(i), 16 * shape.tiles[i], shape.k_pads[i], shape.cols, info, &t)
                        .ok()?;
                if !p.x_smem || p.high_direct {
                    return None;
                }
                out[i] = Some(p);
            }
            Some(out)
        };
        let whole = |p: &[Option<GemvPlan>; 2]| {
            (0..2).all(|i| p[i].as_ref().is_none_or(|p| p.chunk_steps == shape.k_pads[i] / format(i).step()))
        };
        // Two a multiprocessor where each holds whole rows and either has several tiles or one would leave a second wave.
        let pays = total >= 7 * sms || (total > sms && total <= 2 * sms);
        let two = if pays && shape.cols <= 8 { plan(2).filter(whole) } else { None };
        let (per_sm, sides) = match two {
            Some(s) => (2, s),
            None => match plan(1) {
                Some(s) => (1, s),
                None => return Ok(None),
            },
        };
        let grid = total.min(per_sm * sms);
        let cost = |i: usize| {
            let (c, h, s) = format(i).row_bytes(shape.k_pads[i]);
            16 * (c + h + s)
        };
        let time = |a: usize| {
            let side = |i: usize, n: usize| shape.tiles[i].div_ceil(n.max(1)) * cost(i);
            side(0, a).max(side(1, grid - a))
        };
        let split = match shape.tiles {
            [0, _] => 0,
            [_, 0] => grid,
            _ => (1..grid).min_by_key(|a| time(*a)).unwrap_or(1),
        };
        let tiles = usize::from(shape.cols > 8) + 1;
        let shared = sides.iter().flatten().map(|p| p.shared).max().unwrap_or(0) + extra;
        Ok(Some(GemvGroup {
            kernel: dev.kernel(&format!("group_{}_n{tiles}", shape.tag), shared)?,
            threads: THREADS,
            sides,
            tiles: shape.tiles,
            k_pads: shape.k_pads,
            split,
            grid,
            cols: shape.cols,
        }))
    }

    /// One NVFP4 matrix, up to 64 columns, plain input.
    pub(super) fn alone(
        dev: &Arc<Device>,
        p: GemvPlan,
        tiles: usize,
        k_pad: usize,
        cols: usize,
    ) -> Result<Self> {
        let shape =
            GroupShape { tag: WeightFormat::Nvfp4.tag(), tiles: [tiles, 0], k_pads: [k_pad, 0], cols };
        Self::of_units(dev, [Some(p), None], shape, p.grid)
    }

    fn of_units(
        dev: &Arc<Device>,
        sides: [Option<GemvPlan>; 2],
        shape: GroupShape,
        split: usize,
    ) -> Result<Self> {
        let (Some(p), beside) = (&sides[0], &sides[1]) else {
            return Err(CudaError::Shape { kernel: "group", what: "no NVFP4 matrix".into() });
        };
        let kind = match (beside.is_some(), p.x_smem) {
            (true, _) => "_bf16",
            (false, true) => "",
            (false, false) => "_global",
        };
        let name = format!("nvfp4_r{}{kind}_n{}", p.rows, p.tiles);
        let shared = p.shared.max(beside.as_ref().map_or(0, |b| b.shared + sums(shape.cols)));
        // The warp that copies BF16 matrices.
        let threads = if beside.is_some() { THREADS } else { THREADS - 32 };
        Ok(GemvGroup {
            kernel: dev.kernel(&name, shared)?,
            threads,
            tiles: shape.tiles,
            k_pads: shape.k_pads,
            split,
            grid: split + beside.as_ref().map_or(0, |b| b.grid),
            cols: shape.cols,
            sides,
        })
    }

    /// `y[c][n] = sum_k w[n][k] x[c][k]` of every part, each with the bits of a launch of its own.
    pub fn launch(
        &self,
        s: &Stream,
        parts: &[Part<'_>],
        x: Input,
        experts: Option<Experts>,
        pdl: bool,
    ) -> Result<()> {
        let pair = |a: usize, b: usize| a as u64 | (b as u64) << 32;
        let Some(k) = parts.first().map(|p| p.w.k).filter(|_| parts.len() <= MOST_PARTS) else {
            return Err(CudaError::Shape { kernel: "group", what: format!("{} parts", parts.len()) });
        };
        let mut ordered: Vec<&Part<'_>> = parts.iter().collect();
        ordered.sort_by_key(|p| p.w.format == WeightFormat::Bf16);
        let count = ordered.iter().filter(|p| p.w.format != WeightFormat::Bf16).count();
        let mut words = Vec::with_capacity(80);
        let mut first = [0usize; MOST_PARTS];
        let mut at = 0;
        for i in 0..MOST_PARTS {
            let Some(p) = ordered.get(i) else {
                words.extend([0; 6]);
                continue;
            };
            if i == count {
                at = 0;
            }
            first[i] = at;
            at += p.w.n.div_ceil(16);
            let ptr = |b: &Option<DeviceBuffer>| b.as_ref().map_or(0, DeviceBuffer::ptr);
            let mode = usize::from(p.out == Out::F32)
                | usize::from(p.w.divide) << 1
                | usize::from(experts.is_some()) << 3;
            words.extend([p.w.codes.ptr(), ptr(&p.w.scales), ptr(&p.w.row_scale), p.y]);
            words.extend([pair(p.w.tensor_scale.to_bits() as usize, p.w.n), pair(p.y_pitch, mode)]);
        }
        words.extend(first.chunks(2).map(|p| pair(p[0], p[1])));
        for i in 0..2 {
            let (from, to) = if i == 0 { (0, count) } else { (count, ordered.len()) };
            let Some(p) = &self.sides[i] else {
                words.extend([pair(from, to), 0, 0, 0, 0]);
                continue;
            };
            let f = if i == 0 { other(parts).unwrap_or(WeightFormat::Bf16) } else { WeightFormat::Bf16 };
            let (codes, scales) = (f.row_bytes(self.k_pads[i]).0, f.scale_pitch(self.k_pads[i]));
            words.extend([pair(from, to), pair(self.tiles[i], self.k_pads[i]), pair(codes, scales)]);
            words.extend([pair(p.stages, p.chunk_steps), pair(p.pitch, p.side_slots)]);
        }
        let (x, x1, xw, pitch, pitch1, form, head, eps, sigmoid) = match x {
            Input::Plain { x, pitch } => (x, 0, 0, pitch, 0, 0, 0, 0.0, false),
            Input::SwiGlu { gate, up, pitch } => (gate, up, 0, pitch, pitch, 1, 0, 0.0, false),
            Input::Gated { o, z, w, pitch, z_pitch, head, eps, sigmoid } => {
                (o, z, w, pitch, z_pitch, 2, head, eps, sigmoid)
            }
        };
        let e = experts.unwrap_or_default();
        words.extend([x, x1, xw, e.outputs, e.weights, e.logit]);
        words.extend([pair(pitch, pitch1), pair(k, self.cols), pair(self.split, form)]);
        words.extend([pair(e.top, e.logit_pitch), pair(head, usize::from(sigmoid))]);
        words.push(u64::from(eps.to_bits()));
        s.launch(&self.kernel, [self.grid as u32, 1, 1], self.threads, pdl, &Args::new().block(&words))
    }
}
