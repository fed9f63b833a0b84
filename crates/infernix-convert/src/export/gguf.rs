//! An artifact as a GGUF model: the reader's table of names and conventions, applied the other way round.

use std::collections::BTreeMap;
use std::sync::Arc;

use infernix_artifact::ngram::RowFormat;
use infernix_checkpoint::gguf::names::{
    Architecture, Form, Geometry, Mapped, RULES, Rule, Scope, TiledHeads, Values, map_tensor,
};
use infernix_formats::Format;
use infernix_formats::expert_bank::ExpertMatrix;
use infernix_formats::ggml::GgmlType;
use infernix_model::{Component, ModelConfig};

use super::blocks::{Encode, encoder};
use super::read::Reader;
use super::weights::{Described, Experts, Item, Weight, Weights};
use super::{Content, OutFile, OutTensor, OutType, Rounded, Setting, keys};
use crate::ConvertError;

/// Source prefix that the weights have been named with.
const PREFIX: &str = "model.language_model.";
/// Alignment of tensor data.
pub(super) const ALIGNMENT: u64 = 32;

/// Words of a tensor as GGUF stores them.
#[derive(Debug, Clone)]
pub(crate) enum Stored {
    /// Rows of a weight from `first` on, heads tiled, values as the conventions have them.
    Rows {
        weight: Arc<Weight>,
        first: u64,
        rows: u64,
        heads: Option<TiledHeads>,
        values: Values,
        encode: Encode,
    },
    /// Columns of two weights side by side.
    Joined { weights: [Arc<Weight>; 2], encode: Encode },
    /// A matrix of every expert.
    Experts { experts: Arc<Experts>, matrix: ExpertMatrix, encode: Encode },
    /// FP32 `[E]`: second scales, or activation scales.
    ExpertScales { experts: Arc<Experts>, matrix: ExpertMatrix, input: bool },
}

struct Builder<'a> {
    setting: &'a Setting<'a>,
    config: &'a ModelConfig,
    geometry: Geometry,
    weights: BTreeMap<&'a str, &'a Arc<Weight>>,
    experts: BTreeMap<&'a str, &'a Arc<Experts>>,
    used: std::collections::BTreeSet<String>,
    tensors: Vec<OutTensor>,
    refused: Vec<String>,
    rounded: Vec<Rounded>,
}

/// What the conventions depend on.
fn geometry(config: &ModelConfig, drafter: bool) -> Geometry {
    use infernix_model::Architecture as Model;
    Geometry {
        architecture: match config.architecture {
            Model::Qwen35 => Architecture::Qwen35,
            Model::Qwen35Moe => Architecture::Qwen35Moe,
            Model::Qwen4Exp => Architecture::Qwen4Exp,
        },
        layers: config.layers.len() as u64,
        drafter_layers: u64::from(drafter),
        key_heads: config.gdn.key_heads,
        value_heads: config.gdn.value_heads,
        key_dim: config.gdn.key_dim,
        value_dim: config.gdn.value_dim,
        ple_layer: config.ple.as_ref().and_then(|p| p.layers.first().copied()),
    }
}

/// All files of the model: its parts, and the image tower in a file of its own; and what its conventions round.
///
/// # Errors
/// What GGUF cannot hold, with the reasons.
pub(super) fn files(
    setting: &Setting<'_>,
    weights: &Weights,
) -> Result<(Vec<OutFile>, Vec<Rounded>), ConvertError> {
    let Described::Model(config) = setting.described else {
        return Err(setting.fail("a block drafter has no GGUF architecture; use --to safetensors"));
    };
    let drafter = setting.components.contains(&Component::Mtp);
    let mut b = Builder {
        setting,
        config,
        geometry: geometry(config, drafter),
        weights: BTreeMap::new(),
        experts: BTreeMap::new(),
        used: Default::default(),
        tensors: Vec::new(),
        refused: Vec::new(),
        rounded: Vec::new(),
    };
    for item in &weights.list {
        match item {
            Item::Weight(w) => _ = b.weights.insert(&w.name, w),
            Item::Experts(e) => _ = b.experts.insert(&e.prefix, e),
        }
    }
    if config.ple.as_ref().is_some_and(|p| p.layers.len() > 1) {
        b.refused.push("GGUF keeps one n-gram table; the model has several".into());
    }
    b.model()?;
    b.table(weights)?;
    let text = std::mem::take(&mut b.tensors);
    b.tower();
    let tower = std::mem::take(&mut b.tensors);
    let lost: Vec<_> = weights
        .list
        .iter()
        .map(|i| match i {
            Item::Weight(w) => &w.name,
            Item::Experts(e) => &e.prefix,
        })
        .filter(|n| !b.used.contains(*n))
        .cloned()
        .collect();
    if let Some(first) = lost.first() {
        b.refused.push(format!("{first} has no name in GGUF ({} such tensors)", lost.len()));
    }
    setting.refuse(&b.refused)?;
    let mut out = Vec::new();
    if !tower.is_empty() {
        let name = format!("mmproj-{}", setting.file_name()?);
        let pairs = keys::tower(setting, config)?;
        out.push(file(name, &pairs, tower));
    }
    out.extend(parts(setting, keys::model(setting, config, &b.geometry)?, text)?);
    Ok((out, b.rounded))
}

impl Builder<'_> {
    /// Names of a rule's tensors, with the names of their sources.
    fn places(&self, rule: &Rule) -> Vec<(String, String)> {
        let g = &self.geometry;
        match rule.scope {
            Scope::Model => vec![(rule.gguf.to_owned(), format!("{PREFIX}{}", rule.source))],
            Scope::Root => vec![(rule.gguf.to_owned(), rule.source.to_owned())],
            Scope::Block => (0..g.layers + g.drafter_layers)
                .map(|n| {
                    let source =
                        if n < g.layers { format!("{PREFIX}layers.{n}") } else { "mtp.layers.0".into() };
                    (format!("blk.{n}.{}", rule.gguf), format!("{source}.{}", rule.source))
                })
                .collect(),
            Scope::Drafter if g.drafter_layers > 0 => {
                vec![(format!("blk.{}.{}", g.layers, rule.gguf), format!("mtp.{}", rule.source))]
            }
            Scope::Drafter | Scope::Table => Vec::new(),
        }
    }

    fn model(&mut self) -> Result<(), ConvertError> {
        let mut found = Vec::new();
        for rule in RULES.iter().filter(|r| r.only.contains(&self.geometry.architecture)) {
            found.extend(self.places(rule).into_iter().map(|(name, source)| (rule, name, source)));
        }
        // Blocks in order: the table has them by kind.
        let block = |name: &str| {
            let number = name.strip_prefix("blk.").and_then(|r| r.split('.').next()?.parse::<u64>().ok());
            number.map_or(0, |n| n + 1)
        };
        found.sort_by_key(|(_, name, _)| block(name));
        for (rule, name, source) in found {
            self.tensor(rule, name, &source)?;
        }
        Ok(())
    }

    fn push(&mut self, name: String, ty: GgmlType, shape: Vec<u64>, stored: Stored) {
        match ty.tensor_bytes(&shape) {
            Ok(bytes) => self.tensors.push(OutTensor {
                name,
                ty: OutType::Ggml(ty),
                shape,
                bytes,
                content: Content::Gguf(Box::new(stored)),
            }),
            Err(e) => self.refused.push(format!("{name}: {e}")),
        }
    }

    /// How words of `format` become blocks; a refusal is noted.
    fn encode(&mut self, name: &str, format: Format, k: u64, wide: bool) -> Option<Encode> {
        match encoder(format, k, wide) {
            Ok(encode) => Some(encode),
            Err(reason) => {
                self.refused.push(format!("{name}: {reason}"));
                None
            }
        }
    }

    fn tensor(&mut self, rule: &Rule, name: String, source: &str) -> Result<(), ConvertError> {
        if let Some(prefix) = source.strip_suffix(".gate_up_proj").or(source.strip_suffix(".down_proj"))
            && let Some(&experts) = self.experts.get(prefix)
        {
            let matrix = match rule.form {
                Form::ExpertGate => ExpertMatrix::Gate,
                Form::ExpertUp => ExpertMatrix::Up,
                _ if source.ends_with(".down_proj") => ExpertMatrix::Down,
                // Both in one tensor: read, not written.
                _ => return Ok(()),
            };
            self.used.insert(prefix.to_owned());
            let [n, k] = experts.matrix(matrix);
            let experts = experts.clone();
            let format = experts.format(matrix);
            let Some(encode) = self.encode(&name, format, k, false) else { return Ok(()) };
            let shape = vec![experts.experts, n, k];
            let base = name.strip_suffix(".weight").unwrap_or(&name).to_owned();
            self.push(name, encode.ty(), shape, Stored::Experts { experts: experts.clone(), matrix, encode });
            if encode == Encode::Nvfp4 {
                let shape = vec![experts.experts];
                for (suffix, input) in [("scale", false), ("input_scale", true)] {
                    if input && experts.input_scales.is_none() {
                        continue;
                    }
                    let stored = Stored::ExpertScales { experts: experts.clone(), matrix, input };
                    self.push(format!("{base}.{suffix}"), GgmlType::F32, shape.clone(), stored);
                }
            }
            return Ok(());
        }
        let Some(&weight) = self.weights.get(source) else { return Ok(()) };
        let weight = weight.clone();
        self.used.insert(source.to_owned());
        let wide = rule.values != Values::Same
            || weight.shape.len() == 1
            || matches!(rule.gguf, "ssm_conv1d.weight" | "ffn_gate_inp.weight" | "ffn_gate_inp_shexp.weight");
        if rule.form == Form::LeftColumns {
            return self.joined(name, source, weight);
        }
        let (mut shape, mut first) = (weight.shape.clone(), 0);
        match rule.form {
            Form::RightColumns => return Ok(()),
            Form::Convolution if shape.len() == 3 => _ = shape.remove(1),
            Form::OneRow if shape.len() == 2 => _ = shape.remove(0),
            Form::IndexerQuery | Form::IndexerKey => {
                let queries = self.config.qsa.as_ref().map_or(0, |q| q.heads * q.head_dim);
                if rule.form == Form::IndexerQuery {
                    shape[0] = queries;
                } else {
                    (first, shape[0]) = (queries, shape[0].saturating_sub(queries));
                }
            }
            _ => {}
        }
        let k = shape.last().copied().unwrap_or(1);
        let Some(encode) = self.encode(&name, weight.format, k, wide) else { return Ok(()) };
        // By the reader's own rule, so that it undoes what is done here.
        let heads = match map_tensor(&self.geometry, PREFIX, &name, &shape)? {
            Mapped::Pieces(pieces) => pieces.first().and_then(|p| p.heads),
            Mapped::ScaleOf(_) => None,
        };
        // Positions of a vector are rows here.
        let heads = heads.map(|h| TiledHeads { columns: h.columns && shape.len() > 1, ..h });
        if let Some(h) = heads.filter(|h| h.columns)
            && weight.columns.is_none()
            && (h.width % encode.unit() != 0 || h.first % encode.unit() != 0)
        {
            let (format, unit) = (weight.format, encode.unit());
            self.refused.push(format!(
                "{name}: {format} keeps {unit} columns together, heads of {} cannot be put in GGUF's order",
                h.width
            ));
            return Ok(());
        }
        let rows = crate::plan::view_rows(&shape).0;
        if rule.values != Values::Same {
            let interrupt = infernix_artifact::Interrupt::default();
            let reader = Reader::new(self.setting.artifact, None, &interrupt);
            let words = super::blocks::rounded(&reader, &weight, rule.values)?;
            if words > 0 {
                let (name, of) = (name.clone(), weight.elements());
                self.rounded.push(Rounded { name, words, of, rounding: rule.values.rounding() });
            }
        }
        let base = name.strip_suffix(".weight").unwrap_or(&name).to_owned();
        let stored = Stored::Rows { weight: weight.clone(), first, rows, heads, values: rule.values, encode };
        self.push(name, encode.ty(), shape, stored);
        if encode == Encode::Nvfp4 {
            self.scales(&base, &weight);
        }
        Ok(())
    }

    /// The second scale of an NVFP4 matrix and its activation scale, as tensors of one element.
    fn scales(&mut self, base: &str, weight: &Arc<Weight>) {
        let mut one = |suffix: &str, content| {
            self.tensors.push(OutTensor {
                name: format!("{base}.{suffix}"),
                ty: OutType::Ggml(GgmlType::F32),
                shape: vec![1],
                bytes: 4,
                content,
            });
        };
        let role = infernix_formats::PlaneRole::GlobalScale;
        one("scale", Content::Plane { weight: weight.clone(), role });
        if let Some(object) = weight.input_scale {
            one("input_scale", Content::Object(object));
        }
    }

    /// The drafter's two projections as columns of one matrix.
    fn joined(&mut self, name: String, source: &str, left: Arc<Weight>) -> Result<(), ConvertError> {
        let other = source.replace("fc_embedding", "fc_hidden");
        let Some(right) = self.weights.get(other.as_str()).map(|w| (*w).clone()) else {
            return Err(self.setting.fail(format!("{other} is missing")));
        };
        self.used.insert(other);
        if left.format != right.format || left.shape != right.shape || left.shape.len() != 2 {
            self.refused.push(format!("{name}: its two halves are {} and {}", left.format, right.format));
            return Ok(());
        }
        let (n, k) = (left.shape[0], left.shape[1]);
        let Some(encode) = self.encode(&name, left.format, k, false) else { return Ok(()) };
        if encode == Encode::Nvfp4 {
            self.refused
                .push(format!("{name}: its two halves have second scales of their own, GGUF keeps one"));
            return Ok(());
        }
        self.push(name, encode.ty(), vec![n, 2 * k], Stored::Joined { weights: [left, right], encode });
        Ok(())
    }

    fn table(&mut self, weights: &Weights) -> Result<(), ConvertError> {
        let [t] = &weights.tables[..] else { return Ok(()) };
        let Some(volume) = self.setting.volume else {
            self.refused.push(format!("{}: no n-gram volume is at hand", t.prefix));
            return Ok(());
        };
        let ty = match self.setting.row_format()? {
            Some(RowFormat::Bf16) => GgmlType::Bf16,
            Some(RowFormat::Ggml(t)) => t,
            other => {
                let name = other.map_or("unknown", RowFormat::name);
                self.refused.push(format!(
                    "the n-gram table is {name}, which no GGUF type of rows of {} values holds; name a volume in BF16 or \
                     GGML blocks with --ngram",
                    t.width
                ));
                return Ok(());
            }
        };
        let row = u64::from(volume.geometry().row_bytes);
        self.tensors.push(OutTensor {
            name: "per_layer_token_embd.weight".into(),
            ty: OutType::Ggml(ty),
            shape: vec![t.rows, t.width],
            bytes: t.rows * row,
            content: Content::Table { rows: t.first_row..t.first_row + t.rows, row, cut: 0..row },
        });
        Ok(())
    }

    /// The image tower under llama.cpp's names; frames of the patch embedding apart.
    fn tower(&mut self) {
        const MODULES: [(&str, &str); 11] = [
            (".norm1.", ".ln1."),
            (".norm2.", ".ln2."),
            (".attn.qkv.", ".attn_qkv."),
            (".attn.proj.", ".attn_out."),
            (".mlp.linear_fc1.", ".ffn_up."),
            (".mlp.linear_fc2.", ".ffn_down."),
            ("merger.norm.", "v.post_ln."),
            ("merger.linear_fc1.", "mm.0."),
            ("merger.linear_fc2.", "mm.2."),
            ("pos_embed.", "v.position_embd."),
            ("patch_embed.proj.", "v.patch_embd."),
        ];
        let list: Vec<Arc<Weight>> = self
            .weights
            .values()
            .filter(|w| w.component == Component::Vision)
            .map(|w| (*w).clone())
            .collect();
        for weight in list {
            self.used.insert(weight.name.clone());
            let source = weight.name.strip_prefix("model.visual.").unwrap_or(&weight.name);
            let mut name = source.replace("blocks.", "v.blk.");
            for (from, to) in MODULES {
                name = name.replace(from, to);
            }
            let patch = weight.shape.len() == 5;
            let wide = weight.shape.len() == 1 || patch || name.starts_with("v.position_embd");
            let k = weight.shape.last().copied().unwrap_or(1);
            let Some(encode) = self.encode(&name, weight.format, k, wide) else { continue };
            if patch {
                let &[d, c, frames, p, q] = &weight.shape[..] else { continue };
                for frame in 0..frames {
                    let name = if frame == 0 { name.clone() } else { format!("{name}.{frame}") };
                    // Rows of one frame: p of every frames x p, told as tiled heads one after the other would be.
                    let heads =
                        TiledHeads { columns: false, first: 0, key_heads: d * c, per_key: frames, width: p };
                    let stored = Stored::Rows {
                        weight: weight.clone(),
                        first: frame * d * c * p,
                        rows: d * c * p,
                        heads: Some(heads),
                        values: Values::Same,
                        encode,
                    };
                    self.push(name, encode.ty(), vec![d, c, p, q], stored);
                }
                continue;
            }
            let rows = crate::plan::view_rows(&weight.shape).0;
            let shape = weight.shape.clone();
            let stored = Stored::Rows { weight, first: 0, rows, heads: None, values: Values::Same, encode };
            self.push(name, encode.ty(), shape, stored);
        }
    }
}

/// One file: header, then tensors.
fn file(name: String, pairs: &[keys::Pair], tensors: Vec<OutTensor>) -> OutFile {
    let mut head = b"GGUF\x03\0\0\0".to_vec();
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((pairs.len() as u64).to_le_bytes());
    pairs.iter().for_each(|p| p.write(&mut head));
    let mut offset = 0u64;
    for t in &tensors {
        keys::text(&mut head, &t.name);
        head.extend((t.shape.len() as u32).to_le_bytes());
        t.shape.iter().rev().for_each(|d| head.extend(d.to_le_bytes()));
        let OutType::Ggml(ty) = t.ty else { continue };
        head.extend(ty.id().to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += t.bytes.next_multiple_of(ALIGNMENT);
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT as usize), 0);
    OutFile { name, head, tensors, align: ALIGNMENT }
}

/// The model in one file, or in parts of at most `shard_bytes` of data.
fn parts(
    setting: &Setting<'_>,
    pairs: Vec<keys::Pair>,
    tensors: Vec<OutTensor>,
) -> Result<Vec<OutFile>, ConvertError> {
    let total = tensors.len();
    let mut groups: Vec<Vec<OutTensor>> = vec![Vec::new()];
    let mut size = 0u64;
    for t in tensors {
        if size > 0 && size + t.bytes > setting.shard_bytes {
            groups.push(Vec::new());
            size = 0;
        }
        size += t.bytes.next_multiple_of(ALIGNMENT);
        if let Some(group) = groups.last_mut() {
            group.push(t);
        }
    }
    let name = setting.file_name()?;
    let count = groups.len();
    if count == 1 {
        return Ok(groups.into_iter().map(|t| file(name.clone(), &pairs, t)).collect());
    }
    let stem = name.strip_suffix(".gguf").unwrap_or(&name);
    let mut out = Vec::new();
    for (n, group) in groups.into_iter().enumerate() {
        let mut own = if n == 0 { pairs.clone() } else { Vec::new() };
        let number = |v: usize| u16::try_from(v).map_err(|_| setting.fail("more than 65,535 parts"));
        own.push(keys::Pair::new("split.no", keys::Value::U16(number(n)?)));
        own.push(keys::Pair::new("split.count", keys::Value::U16(number(count)?)));
        own.push(keys::Pair::new("split.tensors.count", keys::Value::I32(total as i32)));
        out.push(file(format!("{stem}-{:05}-of-{count:05}.gguf", n + 1), &own, group));
    }
    Ok(out)
}
