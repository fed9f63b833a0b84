//! NVFP4 linears: how their words lie on the device, and the launch plans of their decode products.

use super::linear::{GemvPlan, GemvTuning};
use crate::driver::{Args, Device, DeviceBuffer, DeviceInfo, Kernel, Stream};
use crate::error::{CudaError, Result};
use std::sync::Arc;

/// k of a unit's place in a row; K is padded to a multiple of it.
pub const K: usize = 1024;
/// Bytes of a unit: 8 rows x 128 k.
const UNIT: usize = 576;
/// Warps of a CTA, and how many of them share a tile.
const WARPS: usize = 16;
const GROUP: usize = 8;

/// Bytes of a matrix on the device.
pub fn bytes(n: usize, k_pad: usize) -> usize {
    n.next_multiple_of(16) / 8 * GROUP * (k_pad / K) * UNIT
}

/// Puts stored rows in the order of the kernels.
pub struct Nvfp4Order {
    kernel: Kernel,
}

impl Nvfp4Order {
    /// Bytes of stored rows that are on the device at a time.
    const PIECE: usize = 32 << 20;

    /// Looks the kernel up.
    pub fn new(dev: &Arc<Device>) -> Result<Self> {
        Ok(Nvfp4Order { kernel: dev.kernel("nvfp4_order", 0)? })
    }

    /// `codes` `[n][k_pad / 2]` and `scales` `[n][k_pad / 16]`, device addresses, to [`bytes`] of units at `to`.
    #[expect(clippy::too_many_arguments, reason = "two planes and where they go")]
    pub fn launch(
        &self,
        s: &Stream,
        codes: u64,
        scales: u64,
        n: usize,
        k_pad: usize,
        to: u64,
        pdl: bool,
    ) -> Result<()> {
        let tiles = n.next_multiple_of(16) / 8;
        if !k_pad.is_multiple_of(K) || k_pad == 0 || tiles > 65_535 {
            return Err(CudaError::Shape { kernel: "nvfp4_order", what: format!("{n} rows of {k_pad}") });
        }
        let args = Args::new().ptr(codes).ptr(scales).ptr(to).ints(&[n, k_pad / K]);
        s.launch(&self.kernel, [(GROUP * (k_pad / K)) as u32, tiles as u32, 1], 64, pdl, &args)
    }

    /// The same from host memory, some rows at a time; `to` holds [`bytes`].
    pub fn upload(
        &self,
        codes: &[u8],
        scales: &[u8],
        n: usize,
        k_pad: usize,
        to: &DeviceBuffer,
    ) -> Result<()> {
        let (c, s) = (k_pad / 2, k_pad / 16);
        if codes.len() != n * c || scales.len() != n * s || to.len() < bytes(n, k_pad) {
            let what = format!("{n} rows of {k_pad}: {} and {} bytes", codes.len(), scales.len());
            return Err(CudaError::Shape { kernel: "nvfp4_order", what });
        }
        let dev = to.device();
        let stream = dev.stream()?;
        let rows = (Self::PIECE / (c + s)).clamp(16, 65_536) / 16 * 16;
        let (dc, ds) = (dev.alloc(rows.min(n) * c)?, dev.alloc(rows.min(n) * s)?);
        for first in (0..n).step_by(rows) {
            let some = rows.min(n - first);
            dc.write(0, &codes[first * c..(first + some) * c])?;
            ds.write(0, &scales[first * s..(first + some) * s])?;
            let at = to.at(bytes(first, k_pad));
            self.launch(&stream, dc.ptr(), ds.ptr(), some, k_pad, at, false)?;
            stream.synchronize()?;
        }
        Ok(())
    }
}

/// A plan and the tiles of 16 rows it has room for in each of `ctas` CTAs.
pub(super) fn plan(
    rows: usize,
    tiles: usize,
    ctas: usize,
    k_pad: usize,
    cols: usize,
    info: &DeviceInfo,
    t: &GemvTuning,
) -> Option<GemvPlan> {
    let room = info.shared_per_block.min(t.shared);
    let per = k_pad / K;
    let unit = UNIT * rows / 8;
    // Rings of two stages of as many units as fill them; a short row leaves room for more stages.
    let most = t.ring.div_ceil(WARPS * unit * 2);
    // Where the sums of 16 columns do not fit, those of 8 at a time do.
    let instances: &[usize] = match cols {
        1..=8 => &[1],
        9..=16 => &[2, 4],
        17..=32 => &[4],
        _ => &[8],
    };
    let mine = (tiles * 16 / rows).div_ceil(ctas.max(1)).div_ceil(WARPS / GROUP);
    for (x_smem, &n_tiles) in [true, false].iter().flat_map(|x| instances.iter().map(move |n| (*x, n))) {
        // Only tiles of 16 rows are multiplied by activations in device memory.
        if !x_smem && rows == 8 {
            continue;
        }
        let x = if x_smem { (cols * (2 * k_pad + 16)).next_multiple_of(128) } else { 0 };
        // Sums of a tile: sixteen partial ones of every column, or of 8 columns at a time. A group has two buffers of some tiles,
        // or one of all it has.
        let wide = n_tiles > 2;
        let slot = 4 * WARPS * rows * if wide { 8 } else { cols };
        let sums = |batch: usize| {
            let buffers = if !wide && batch == mine { 1 } else { 2 };
            WARPS / GROUP * buffers * batch * slot
        };
        let rings = (1..=most.min(per)).rev().flat_map(|c| [(c, (2 * most / c).clamp(2, 8)), (c, 2)]);
        for (chunk, stages) in rings {
            let pitch = (chunk * stages * unit).next_multiple_of(128);
            let fixed = 8 * 8 * WARPS + WARPS * pitch + x;
            let batches = 1..=if wide { 1 } else { mine };
            let Some(side_slots) = batches.rev().find(|b| fixed + sums(*b) <= room) else { continue };
            return Some(GemvPlan {
                tiles: n_tiles,
                rows,
                stages,
                chunk_steps: chunk,
                pitch,
                side_slots,
                high_direct: false,
                x_smem,
                shared: fixed + sums(side_slots),
                grid: ctas,
                per_sm: 1,
            });
        }
    }
    None
}

/// Rows of a tile that `cols` columns may have, and what a row costs in tenths: tiles of 8 rows need a tenth more instructions.
pub(super) fn tile_rows(cols: usize) -> &'static [(usize, usize)] {
    if cols <= 4 { &[(16, 10), (8, 11)] } else { &[(16, 10)] }
}

/// The same for one matrix of `tiles` tiles of 16 rows.
pub(super) fn alone(
    tiles: usize,
    k_pad: usize,
    cols: usize,
    info: &DeviceInfo,
    t: &GemvTuning,
) -> Option<GemvPlan> {
    let sms = info.multiprocessors as usize;
    let of = |&(rows, cost): &(usize, usize)| {
        let count = tiles * 16 / rows;
        let p = plan(rows, tiles, count.min(sms), k_pad, cols, info, t)?;
        Some((count.div_ceil(sms) * rows * cost, p))
    };
    tile_rows(cols).iter().filter_map(of).min_by_key(|p| p.0).map(|p| p.1)
}
