//! Linears over GGML blocks as stored.

use super::linear::Out;
use crate::driver::{Args, Device, DeviceBuffer, Kernel, Stream};
use crate::error::{CudaError, Result};
use infernix_formats::ggml::{self, GgmlType};
use std::sync::Arc;

/// `y[c][n] = sum_k w[n][k] x[c][k]` for 1-64 columns, the same bits for a column at every width. Values exact (types with a
/// minimum round their difference to FP32 once), FP32 sums: the bound of the decode linear + 2^-24 sum |w x|.
pub struct GgmlGemv {
    kernels: [Kernel; 3],
    rows: Kernel,
    device: Arc<Device>,
    direct: String,
    expand: Kernel,
    grid: Option<DeviceBuffer>,
    ty: GgmlType,
}

impl GgmlGemv {
    /// Types with a kernel: those of the recipes and of common files, and plain FP32 for what has none.
    pub const TYPES: [GgmlType; 7] = [
        GgmlType::Q8_0,
        GgmlType::Iq4Nl,
        GgmlType::Q4K,
        GgmlType::Q5K,
        GgmlType::Q6K,
        GgmlType::Iq3S,
        GgmlType::F32,
    ];

    /// Looks up the instances of a type.
    pub fn new(dev: &Arc<Device>, ty: GgmlType) -> Result<Self> {
        if !Self::TYPES.contains(&ty) {
            return Err(CudaError::Shape {
                kernel: "ggml",
                what: format!("{} has no kernel; have {:?}", ty.name(), Self::TYPES.map(GgmlType::name)),
            });
        }
        let name = ty.name().to_lowercase();
        let k = |c: usize| dev.kernel(&format!("ggml_{name}_{c}"), 0);
        let rows = dev.kernel(&format!("ggml_{name}_rows"), 0)?;
        let expand = dev.kernel(&format!("ggml_{name}_expand"), 0)?;
        let grid = if ty == GgmlType::Iq3S { Some(dev.upload(&iq3_s_grid()?)?) } else { None };
        Ok(GgmlGemv {
            device: dev.clone(),
            direct: format!("ggml_{name}_direct"),
            kernels: [k(1)?, k(4)?, k(8)?],
            rows,
            expand,
            grid,
            ty,
        })
    }

    fn shape(&self, k: usize, x_pitch: usize) -> Result<()> {
        if !k.is_multiple_of(self.ty.block_len() as usize) || !(k | x_pitch).is_multiple_of(8) {
            let what =
                format!("{}: K = {k} in blocks of {}, pitch {x_pitch}", self.ty.name(), self.ty.block_len());
            return Err(CudaError::Shape { kernel: "ggml", what });
        }
        Ok(())
    }

    /// `codes`: `n` rows of blocks, 16-byte aligned; `x` BF16 `[cols][x_pitch]`; `y` `[cols][y_pitch]` of `out` words.
    #[expect(clippy::too_many_arguments, reason = "two matrices and their pitches")]
    pub fn launch(
        &self,
        s: &Stream,
        codes: u64,
        n: usize,
        k: usize,
        x: u64,
        x_pitch: usize,
        cols: usize,
        y: u64,
        y_pitch: usize,
        out: Out,
        pdl: bool,
    ) -> Result<()> {
        self.shape(k, x_pitch)?;
        let (kernel, width) = match cols {
            0 | 1 => (&self.kernels[0], 1),
            2..=4 => (&self.kernels[1], 4),
            _ => (&self.kernels[2], 8),
        };
        let grid = self.grid.as_ref().map_or(0, DeviceBuffer::ptr);
        let args = Args::new().ptr(codes).ptr(0).ptr(0).ptr(0).ptr(grid).ptr(x).ptr(y);
        let args = args.ints(&[n, k, cols, x_pitch, y_pitch, 1, usize::from(out == Out::F32)]);
        s.launch(kernel, [n.div_ceil(8) as u32, cols.div_ceil(width) as u32, 1], 256, pdl, &args)
    }

    /// Rows `ids` (I32 `[rows]`, or the first `rows` where 0) of a matrix of `n` rows to BF16 `[rows][pitch]`. With `split` the
    /// rest of each value follows `split` words later, rounded to BF16 too: the two add up to the value within 2^-17 of it. `pitch` and
    /// `split` are multiples of 8, `y` is 16-byte aligned.
    #[expect(clippy::too_many_arguments, reason = "two matrices and which rows")]
    pub fn rows(
        &self,
        s: &Stream,
        codes: u64,
        n: usize,
        k: usize,
        ids: u64,
        rows: usize,
        y: u64,
        pitch: usize,
        split: usize,
        pdl: bool,
    ) -> Result<()> {
        self.shape(k, pitch | split)?;
        let grid = self.grid.as_ref().map_or(0, DeviceBuffer::ptr);
        let args = Args::new().ptr(codes).ptr(grid).ptr(ids).ptr(y).ints(&[n, k, pitch, split]);
        s.launch(&self.rows, [rows as u32, k.div_ceil(2048) as u32, 1], 256, pdl, &args)
    }

    /// One matrix of each of `experts` experts as rows of [`super::tile::TileFormat::Parts`]: BF16 `[n][2 k]` each, `stride` words apart,
    /// `y` 16-byte aligned, `k` a multiple of 64. Their rows begin `offset` bytes behind the addresses in `tab` U64 `[experts]`. With
    /// `base` (I32 `[experts + 1]`, as in [`super::tile::Sorted`]; or 0) those without picks are left out.
    #[expect(clippy::too_many_arguments, reason = "the operands of some experts")]
    pub fn expand(
        &self,
        s: &Stream,
        tab: u64,
        offset: usize,
        base: u64,
        experts: usize,
        n: usize,
        k: usize,
        y: u64,
        stride: usize,
        pdl: bool,
    ) -> Result<()> {
        if !k.is_multiple_of(64) || experts > 65_535 {
            let what = format!("{}: {experts} experts, K = {k} in chunks of 64", self.ty.name());
            return Err(CudaError::Shape { kernel: "ggml", what });
        }
        self.shape(k, stride)?;
        let grid = self.grid.as_ref().map_or(0, DeviceBuffer::ptr);
        let args = Args::new().ptr(tab).ptr(offset as u64).ptr(base).ptr(grid).ptr(y).ints(&[n, k]);
        let blocks = (n * k.div_ceil(256)).div_ceil(8);
        s.launch(&self.expand, [blocks as u32, experts as u32, 1], 256, pdl, &args.ptr(stride as u64))
    }

    /// Whether [`GgmlGemv::experts`] of `k` columns can read records of the host themselves: 8 rows go to shared memory.
    pub fn reads(&self, k: usize) -> bool {
        self.eight_rows(k) <= self.device.info().shared_per_block - 2048
    }

    /// Bytes of 8 rows and of what aligns them.
    fn eight_rows(&self, k: usize) -> usize {
        8 * self.ty.row_bytes(k as u64).map_or(usize::MAX / 16, |b| b as usize) + 32
    }

    /// One matrix of the expert of each pick: its rows begin `offset` bytes behind the address in `tab` U64 `[E]`, `ids` I32 `[picks]`, input row `pick / top` of
    /// `x` (`top` 1: the pick itself), `y` BF16 `[picks][y_pitch]`. `away` U32 `[E]`: whether a record is the host's, of a launch that reads it
    /// there (padded to 16 bytes; [`GgmlGemv::reads`]); 0: none is.
    #[expect(clippy::too_many_arguments, reason = "the operands of one layer's experts")]
    pub fn experts(
        &self,
        s: &Stream,
        tab: u64,
        away: u64,
        offset: usize,
        ids: u64,
        picks: usize,
        top: usize,
        n: usize,
        k: usize,
        x: u64,
        x_pitch: usize,
        y: u64,
        y_pitch: usize,
        pdl: bool,
    ) -> Result<()> {
        self.shape(k, x_pitch)?;
        let grid = self.grid.as_ref().map_or(0, DeviceBuffer::ptr);
        if away != 0 {
            let kernel = self.device.kernel(&self.direct, self.eight_rows(k))?;
            let args = Args::new().ptr(tab).ptr(away).ptr(offset as u64).ptr(ids).ptr(grid).ptr(x).ptr(y);
            let args = args.ints(&[n, k, x_pitch, y_pitch, top.max(1)]);
            return s.launch(&kernel, [n.div_ceil(8) as u32, picks as u32, 1], 256, pdl, &args);
        }
        let args = Args::new().ptr(0).ptr(tab).ptr(offset as u64).ptr(ids).ptr(grid).ptr(x).ptr(y);
        let args = args.ints(&[n, k, picks, x_pitch, y_pitch, top.max(1), 0]);
        s.launch(&self.kernels[0], [n.div_ceil(8) as u32, picks as u32, 1], 256, pdl, &args)
    }
}

/// The 512 points of IQ3_S, four levels a word: read out of blocks that name each point once.
fn iq3_s_grid() -> Result<Vec<u32>> {
    let mut words = Vec::with_capacity(512);
    for first in (0..512usize).step_by(64) {
        // d = 1, scales 0, no signs.
        let mut b = vec![0u8; 110];
        b[1] = 0x3C;
        for i in 0..64 {
            b[2 + i] = (first + i) as u8;
            b[66 + i / 8] |= (((first + i) >> 8) as u8) << (i % 8);
        }
        let mut v = [0f32; 256];
        ggml::decode_f32(GgmlType::Iq3S, &b, &mut v)
            .map_err(|e| CudaError::Shape { kernel: "ggml", what: e.to_string() })?;
        words.extend(
            v.chunks_exact(4).map(|p| u32::from_le_bytes([p[0] as u8, p[1] as u8, p[2] as u8, p[3] as u8])),
        );
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_points_of_iq3_s_are_ascending_odd_levels() {
        let g = iq3_s_grid().unwrap();
        assert_eq!(g.len(), 512);
        assert!(g.windows(2).all(|w| w[0] < w[1]));
        assert!(g.iter().all(|w| w.to_le_bytes().iter().all(|b| b % 2 == 1 && *b < 16)));
    }
}
