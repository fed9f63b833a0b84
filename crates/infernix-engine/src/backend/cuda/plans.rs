//! Kernels and launch plans, looked up once for each shape.

use infernix_cuda::driver::Device;
use infernix_cuda::error::Result;
use infernix_cuda::kernels::attention::Attention;
use infernix_cuda::kernels::attention8::Attention8;
use infernix_cuda::kernels::chain::ExpertChain;
use infernix_cuda::kernels::experts::{Router, W4a4, W4a4Tuning};
use infernix_cuda::kernels::gdn::{GdnChunk, GdnStep};
use infernix_cuda::kernels::ggml::GgmlGemv;
use infernix_cuda::kernels::group::{GemvGroup, GroupShape, Part};
use infernix_cuda::kernels::hyper::HyperMix;
use infernix_cuda::kernels::index::IndexAppend;
use infernix_cuda::kernels::linear::{Gemv, WeightFormat};
use infernix_cuda::kernels::mix::MixOps;
use infernix_cuda::kernels::moves::Moves;
use infernix_cuda::kernels::ple::PleOps;
use infernix_cuda::kernels::prep::AttentionPrep;
use infernix_cuda::kernels::rows::RowOps;
use infernix_cuda::kernels::select::IndexSelect;
use infernix_cuda::kernels::skinny::Skinny;
use infernix_cuda::kernels::stored::StoredExperts;
use infernix_cuda::kernels::tile::{Sort, Tile, TileFormat};
use infernix_formats::ggml::GgmlType;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::Arc;

type Key2 = (usize, usize);
type Key3 = (usize, usize, usize);

/// Everything that launches.
pub(super) struct Plans {
    device: Arc<Device>,
    pub(super) rows: RowOps,
    pub(super) moves: Moves,
    pub(super) mix: MixOps,
    pub(super) ple: PleOps,
    pub(super) chain: ExpertChain,
    pub(super) prep: AttentionPrep,
    pub(super) skinny: Skinny,
    pub(super) stored: StoredExperts,
    group: HashMap<GroupShape, Option<GemvGroup>>,
    gemv: HashMap<(&'static str, usize, usize, usize), Gemv>,
    tile: HashMap<&'static str, Tile>,
    sort: HashMap<Key2, Sort>,
    chunk: HashMap<Key2, GdnChunk>,
    hyper: HashMap<(&'static str, usize, usize), HyperMix>,
    gdn: HashMap<Key2, GdnStep>,
    attention: HashMap<(usize, usize, usize, bool), Attention>,
    attention8: HashMap<(usize, usize, usize, bool), Attention8>,
    ggml: HashMap<GgmlType, GgmlGemv>,
    append: HashMap<usize, IndexAppend>,
    select: HashMap<Key3, IndexSelect>,
    router: HashMap<Key2, Router>,
    w4a4: HashMap<Key3, W4a4>,
}

fn once<K: Eq + Hash, V>(map: &mut HashMap<K, V>, key: K, make: impl FnOnce() -> Result<V>) -> Result<&V> {
    Ok(match map.entry(key) {
        Entry::Occupied(o) => o.into_mut(),
        Entry::Vacant(v) => v.insert(make()?),
    })
}

impl Plans {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        Ok(Plans {
            device: device.clone(),
            rows: RowOps::new(device)?,
            moves: Moves::new(device)?,
            mix: MixOps::new(device)?,
            ple: PleOps::new(device)?,
            chain: ExpertChain::new(device)?,
            prep: AttentionPrep::new(device)?,
            skinny: Skinny::new(device)?,
            stored: StoredExperts::new(device)?,
            group: HashMap::new(),
            gemv: HashMap::new(),
            tile: HashMap::new(),
            sort: HashMap::new(),
            chunk: HashMap::new(),
            hyper: HashMap::new(),
            gdn: HashMap::new(),
            attention: HashMap::new(),
            attention8: HashMap::new(),
            ggml: HashMap::new(),
            append: HashMap::new(),
            select: HashMap::new(),
            router: HashMap::new(),
            w4a4: HashMap::new(),
        })
    }

    pub(super) fn gemv(&mut self, f: WeightFormat, n: usize, k_pad: usize, cols: usize) -> Result<&Gemv> {
        let d = &self.device;
        once(&mut self.gemv, (f.tag(), n, k_pad, cols), || Gemv::new(d, f, n, k_pad, cols, Gemv::RING))
    }

    /// `None`: the matrices do not fit one launch.
    pub(super) fn group(&mut self, parts: &[Part<'_>], shape: GroupShape) -> Result<Option<&GemvGroup>> {
        let d = &self.device;
        let format = parts.iter().map(|p| p.w.format).find(|f| *f != WeightFormat::Bf16);
        let format = format.unwrap_or(WeightFormat::Q8G32);
        Ok(once(&mut self.group, shape, || GemvGroup::new(d, format, shape))?.as_ref())
    }

    pub(super) fn tile(&mut self, f: TileFormat) -> Result<&Tile> {
        let d = &self.device;
        once(&mut self.tile, f.tag(), || Tile::new(d, f))
    }

    pub(super) fn sort(&mut self, experts: usize, top: usize) -> Result<&Sort> {
        let d = &self.device;
        once(&mut self.sort, (experts, top), || Sort::new(d, experts, top))
    }

    pub(super) fn chunk(&mut self, nk: usize, nv: usize) -> Result<&GdnChunk> {
        let d = &self.device;
        once(&mut self.chunk, (nk, nv), || GdnChunk::new(d, nk, nv))
    }

    pub(super) fn hyper(&mut self, f: WeightFormat, h: usize, rank: usize) -> Result<&HyperMix> {
        let d = &self.device;
        once(&mut self.hyper, (f.tag(), h, rank), || HyperMix::new(d, f, h, rank))
    }

    pub(super) fn gdn(&mut self, nk: usize, nv: usize) -> Result<&GdnStep> {
        let d = &self.device;
        once(&mut self.gdn, (nk, nv), || GdnStep::new(d, nk, nv))
    }

    pub(super) fn attention(&mut self, heads: usize, kv: usize, d: usize, many: bool) -> Result<&Attention> {
        let dev = &self.device;
        once(&mut self.attention, (heads, kv, d, many), || {
            let a = Attention::new(dev, heads, kv, d)?;
            Ok(if many { a.for_many_rows() } else { a })
        })
    }

    pub(super) fn attention8(
        &mut self,
        heads: usize,
        kv: usize,
        d: usize,
        many: bool,
    ) -> Result<&Attention8> {
        let dev = &self.device;
        once(&mut self.attention8, (heads, kv, d, many), || {
            let a = Attention8::new(dev, heads, kv, d)?;
            Ok(if many { a.for_many_rows() } else { a })
        })
    }

    pub(super) fn ggml(&mut self, ty: GgmlType) -> Result<&GgmlGemv> {
        let d = &self.device;
        once(&mut self.ggml, ty, || GgmlGemv::new(d, ty))
    }

    pub(super) fn append(&mut self, ratio: usize) -> Result<&IndexAppend> {
        let d = &self.device;
        once(&mut self.append, ratio, || IndexAppend::new(d, ratio))
    }

    pub(super) fn select(&mut self, heads: usize, ratio: usize, want: usize) -> Result<&IndexSelect> {
        let d = &self.device;
        once(&mut self.select, (heads, ratio, want), || IndexSelect::new(d, heads, ratio, want))
    }

    pub(super) fn router(&mut self, experts: usize, top: usize) -> Result<&Router> {
        let d = &self.device;
        once(&mut self.router, (experts, top), || Router::new(d, experts, top))
    }

    /// `width`: most picks of an expert in a call.
    pub(super) fn w4a4(&mut self, h: usize, i: usize, width: usize) -> Result<&W4a4> {
        let d = &self.device;
        let width = match width {
            0 | 1 => 1,
            2..=4 => 4,
            _ => 8,
        };
        once(&mut self.w4a4, (h, i, width), || W4a4::new(d, h, i, width, W4a4Tuning::for_width(width)))
    }
}
