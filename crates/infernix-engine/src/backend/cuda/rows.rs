//! Experts that are no bank but two weights of plain rows: kept as stored, resident. The decode kernel and the tile products of
//! prompts read the same rows.

use super::context::Cuda;
use super::experts::CudaExperts;
use super::vram::{CudaBuf, Vram, fault};
use super::weights::{CudaWeight, put, row_format};
use crate::backend::{Activation, ExpertData, ExpertSpec, WeightData, WeightSpec};
use crate::error::EngineError;
use infernix_cuda::DeviceBuffer;
use infernix_cuda::kernels::linear::Linear;
use infernix_cuda::kernels::stored::{RowProduct, StoredExperts};
use infernix_cuda::kernels::tile::{ExpertPlanes, TileFormat};

/// Gate with up, or down: the rows of every expert, one expert below the other.
pub(super) struct RowBank {
    w: Linear,
    experts: usize,
    down: bool,
    /// U64 `[3][E]`: where the planes of each expert begin. None where what multiplies whole rows is more than the tile products of
    /// experts apply.
    table: Option<DeviceBuffer>,
}

impl RowBank {
    /// Gate with up, and down; `None` if they are not plain rows of a format with a kernel.
    pub(super) fn of_experts(
        vram: &Vram,
        spec: &ExpertSpec,
        data: &ExpertData,
    ) -> Result<Option<[Self; 2]>, EngineError> {
        let (ExpertData::Parents { gate_up, down }, Activation::A16) = (data, spec.activation) else {
            return Ok(None);
        };
        let known = |d: &WeightData| row_format(d).is_some_and(|f| StoredExperts::ROWS.contains(&f));
        let fits = spec.experts > 0 && (spec.hidden | spec.intermediate).is_multiple_of(8);
        if !fits || !known(gate_up) || !known(down) {
            return Ok(None);
        }
        let of = |what: &str, data: &WeightData, down: bool| -> Result<Option<Self>, EngineError> {
            let name = format!("{}/{what}", spec.name);
            let own = WeightSpec { name, activation: Activation::A16, input_scale: None };
            let mut parts = CudaWeight::new(vram, &own, data)?.parts;
            let (Some(w), true) = (parts.pop(), parts.is_empty()) else { return Ok(None) };
            let plain = w.row_scale.is_none() && w.tensor_scale == 1.0;
            let table = if plain { Some(put(vram, &addresses(&w, spec.experts))?) } else { None };
            Ok(Some(RowBank { w, experts: spec.experts, down, table }))
        };
        let Some(gate_up) = of("gate_up", gate_up, false)? else { return Ok(None) };
        Ok(of("down", down, true)?.map(|down| [gate_up, down]))
    }

    /// Rows of an expert.
    fn rows(&self) -> usize {
        self.w.n / self.experts
    }

    /// As the decode kernel takes them.
    fn product(&self, ids: u64) -> RowProduct<'_> {
        RowProduct { w: &self.w, ids, n: self.rows(), pairs: !self.down }
    }

    /// As the tile products take them.
    fn planes(&self) -> Option<ExpertPlanes> {
        let (tab, n) = (self.table.as_ref()?.ptr(), self.rows());
        let half = if self.down { 0 } else { n / 2 };
        let (k, k_pad, down) = (self.w.k, self.w.k_pad, self.down);
        Some(ExpertPlanes { tab, experts: self.experts, n, k, k_pad, half, alpha: 0, divisor: false, down })
    }

    /// The tile products of both in prompts: formats and planes.
    pub(super) fn tiles([gate_up, down]: &[Self; 2]) -> Option<([TileFormat; 2], [ExpertPlanes; 2])> {
        let formats = [gate_up, down].map(|b| TileFormat::Rows(b.w.format));
        Some((formats, [gate_up.planes()?, down.planes()?]))
    }
}

/// Where codes, high bits and scales of each expert begin; 0 where a format has none.
fn addresses(w: &Linear, experts: usize) -> Vec<u64> {
    let (codes, high, scales) = w.format.row_bytes(w.k_pad);
    let planes = [(Some(&w.codes), codes), (w.high.as_ref(), high), (w.scales.as_ref(), scales)];
    let rows = w.n / experts;
    let mut all = Vec::with_capacity(3 * experts);
    for (plane, row) in planes {
        all.extend((0..experts).map(|e| plane.map_or(0, |p| p.at(e * rows * row))));
    }
    all
}

impl Cuda {
    /// Outputs of the picks of some rows in pick order: `ids` I32 `[n][top]`, `from` BF16 `[n][hidden]`.
    pub(super) fn row_experts(
        &mut self,
        store: &CudaExperts,
        [gate_up, down]: &[RowBank; 2],
        ids: u64,
        from: u64,
        n: usize,
        top: usize,
    ) -> Result<CudaBuf, EngineError> {
        let picks = n * top;
        let (mid, out) =
            (self.fresh(picks, store.intermediate, false)?, self.fresh(picks, store.hidden, false)?);
        let pdl = self.pdl();
        let (s, op) = (&self.stream, &self.plans.stored);
        op.rows(s, &gate_up.product(ids), picks, from, top, mid.ptr, pdl).map_err(fault)?;
        op.rows(s, &down.product(ids), picks, mid.ptr, 1, out.ptr, true).map_err(fault)?;
        Ok(out)
    }
}
