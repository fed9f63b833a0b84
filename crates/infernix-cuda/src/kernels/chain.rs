//! Experts of any format but exact W4A4, in the canonical order of sums.

use crate::driver::{Args, Device, Kernel, Stream};
use crate::error::Result;
use std::sync::Arc;

/// The kernels.
pub struct ExpertChain {
    chain: Kernel,
    swiglu: Kernel,
}

/// Matrices `[experts][rows][k]`: exact codes BF16, group scales and a last factor of each row FP32.
#[derive(Clone, Copy, Debug)]
pub struct ChainMatrix {
    /// BF16 codes.
    pub codes: u64,
    /// FP32 `[experts][rows][ceil(k / group)]`.
    pub scales: u64,
    /// FP32 `[experts][rows]`.
    pub last: u64,
    /// Rows of an expert.
    pub rows: usize,
    /// Values a row.
    pub k: usize,
    /// Values a scale.
    pub group: usize,
    /// `last` divides.
    pub divide: bool,
}

impl ExpertChain {
    /// Looks the kernels up.
    pub fn new(dev: &Arc<Device>) -> Result<Self> {
        Ok(ExpertChain { chain: dev.kernel("expert_chain", 0)?, swiglu: dev.kernel("swiglu_table", 0)? })
    }

    /// Rows `first .. first + n` of each pick's expert (`ids` I32 `[picks]`) times row `pick / share` of `x` BF16 `[..][k]`,
    /// to `y` BF16 `[picks][n]`.
    #[expect(clippy::too_many_arguments, reason = "matrices, picks and a range of rows")]
    pub fn product(
        &self,
        s: &Stream,
        m: &ChainMatrix,
        first: usize,
        n: usize,
        ids: u64,
        picks: usize,
        x: u64,
        share: usize,
        y: u64,
        pdl: bool,
    ) -> Result<()> {
        for p in (0..picks).step_by(65_535) {
            let count = (picks - p).min(65_535);
            // Pieces start at a row of x: `share` divides the step where it is not 1.
            let a = Args::new().ptr(m.codes).ptr(m.scales).ptr(m.last).ptr(ids + 4 * p as u64);
            let a = a.ptr(x + (2 * m.k * (p / share)) as u64).ptr(y + (2 * n * p) as u64);
            let a = a.ints(&[n, m.k, m.group, share, n, first, m.rows, usize::from(m.divide)]);
            s.launch(&self.chain, [n.div_ceil(32) as u32, count as u32, 1], 256, pdl, &a)?;
        }
        Ok(())
    }

    /// The canonical `silu(g) u` of `n` BF16 values.
    pub fn swiglu(&self, s: &Stream, g: u64, u: u64, h: u64, n: usize, pdl: bool) -> Result<()> {
        let a = Args::new().ptr(g).ptr(u).ptr(h).int(n);
        s.launch(&self.swiglu, [n.div_ceil(256) as u32, 1, 1], 256, pdl, &a)
    }
}
