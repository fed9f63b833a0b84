//! From the names and conventions of a GGUF file to those of the checkpoint that it was made from.
//!
//! [`RULES`] says for every tensor of the three architectures what it is called in the source and what the converter did:
//! 1 added to norm weights, A_log replaced by its negative exponential, value heads reordered, tensors split, joined and
//! squeezed. [`map`] applies it to a model: a list of [`Piece`]s, each saying which rows and columns of a GGUF tensor are
//! which part of which source tensor. Nothing is read or decoded here, and nothing is guessed: a tensor in no rule, or of
//! a shape that does not fit, is an error.

mod piece;
mod table;
pub(super) mod vision;

use std::collections::BTreeMap;

pub use piece::{Piece, Slice, TiledHeads};
pub use table::{Form, HASH_CONSTANTS, Heads, RULES, Rule, Scope, Values};

use super::Gguf;
use crate::CheckpointError;

/// Most layers that are believed.
const MAX_LAYERS: u64 = 10_000;

/// An architecture whose conventions are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `qwen35`: the dense models.
    Qwen35,
    /// `qwen35moe`: with experts.
    Qwen35Moe,
    /// `qwen4exp`: Flash-Next.
    Qwen4Exp,
}

impl Architecture {
    /// Its name in `general.architecture`, and the prefix of its keys.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Qwen35 => "qwen35",
            Architecture::Qwen35Moe => "qwen35moe",
            Architecture::Qwen4Exp => "qwen4exp",
        }
    }

    /// The architecture of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Qwen35, Self::Qwen35Moe, Self::Qwen4Exp].into_iter().find(|a| a.name() == name)
    }
}

/// What the conventions depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Architecture.
    pub architecture: Architecture,
    /// Layers of the model, the drafter's not counted.
    pub layers: u64,
    /// Blocks of the drafter behind them, 0 or 1.
    pub drafter_layers: u64,
    /// Key heads of the gated delta net.
    pub key_heads: u64,
    /// Value heads, a multiple of the key heads.
    pub value_heads: u64,
    /// Width of a key head.
    pub key_dim: u64,
    /// Width of a value head.
    pub value_dim: u64,
    /// The layer that n-grams are injected in, 0-based.
    pub ple_layer: Option<u64>,
}

impl Geometry {
    /// Reads it from the metadata.
    ///
    /// # Errors
    /// An architecture that is not one of the three; keys that are missing or contradict each other.
    pub fn read(gguf: &Gguf) -> Result<Self, CheckpointError> {
        let name = gguf.architecture()?;
        let architecture = Architecture::from_name(name).ok_or_else(|| {
            gguf.key_error("general.architecture", "qwen35, qwen35moe or qwen4exp", format!("{name:?}"))
        })?;
        let number = |key: &str, lowest: u64, highest: u64| {
            let key = format!("{name}.{key}");
            let expected = format!("an integer from {lowest} to {highest}");
            match gguf.unsigned(&key)? {
                Some(v) if (lowest..=highest).contains(&v) => Ok(v),
                v => Err(gguf.key_error(&key, &expected, v.map_or("missing".into(), |v| v.to_string()))),
            }
        };
        let blocks = number("block_count", 1, MAX_LAYERS)?;
        let drafter_layers = match gguf.unsigned(&format!("{name}.nextn_predict_layers"))? {
            None => 0,
            Some(_) => number("nextn_predict_layers", 0, 1.min(blocks - 1))?,
        };
        let key_heads = number("ssm.group_count", 1, 1 << 16)?;
        let value_heads = number("ssm.time_step_rank", 1, 1 << 16)?;
        let inner = number("ssm.inner_size", 1, 1 << 32)?;
        for (key, whole, part) in
            [("ssm.time_step_rank", value_heads, key_heads), ("ssm.inner_size", inner, value_heads)]
        {
            if whole % part != 0 {
                return Err(gguf.key_error(
                    &format!("{name}.{key}"),
                    &format!("a multiple of {part}"),
                    whole.to_string(),
                ));
            }
        }
        let layers = blocks - drafter_layers;
        let key = format!("{name}.ple.layers");
        let ple_layer = match gguf.unsigned_list(&key)?.as_deref() {
            None | Some([]) => None,
            Some([layer]) if *layer < layers => Some(*layer),
            Some(other) => {
                let expected = format!("one layer below {layers}");
                return Err(gguf.key_error(&key, &expected, format!("{:?}", &other[..other.len().min(8)])));
            }
        };
        Ok(Self {
            architecture,
            layers,
            drafter_layers,
            key_heads,
            value_heads,
            key_dim: number("ssm.state_size", 1, 1 << 20)?,
            value_dim: inner / value_heads,
            ple_layer,
        })
    }
}

/// What a GGUF tensor is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mapped {
    /// Parts of source tensors; two where the source keeps apart what the file joins.
    Pieces(Vec<Piece>),
    /// The second scale of the NVFP4 tensor of this name.
    ScaleOf(String),
}

/// What the tensor `name` of `shape` (outermost dimension first) is; `prefix` is the source's prefix of the language
/// model, `model.language_model.` or `model.`. A pure function of its arguments.
///
/// # Errors
/// A name that the architecture does not have, or a shape that its conventions do not fit.
pub fn map_tensor(
    geometry: &Geometry,
    prefix: &str,
    name: &str,
    shape: &[u64],
) -> Result<Mapped, CheckpointError> {
    let fail = |reason: String| CheckpointError::GgufName { tensor: name.to_owned(), reason };
    for suffix in [".scale", ".input_scale"] {
        if let Some(base) = name.strip_suffix(suffix) {
            return Ok(Mapped::ScaleOf(format!("{base}.weight")));
        }
    }
    let block = name.strip_prefix("blk.").and_then(|rest| {
        let (number, rest) = rest.split_once('.')?;
        // Plain digits without leading zeros: each layer has one spelling.
        let n: u64 = number.parse().ok().filter(|n: &u64| n.to_string() == number)?;
        Some((n, rest))
    });
    let is_drafter = block.is_some_and(|(n, _)| n >= geometry.layers);
    if let Some((n, _)) = block
        && n >= geometry.layers + geometry.drafter_layers
    {
        return Err(fail(format!(
            "the metadata announces {} layers and {} of a drafter",
            geometry.layers, geometry.drafter_layers
        )));
    }
    let rules = RULES.iter().filter(|r| r.only.contains(&geometry.architecture)).filter(|r| match r.scope {
        Scope::Model | Scope::Root | Scope::Table => r.gguf == name,
        Scope::Block => block.is_some_and(|(_, rest)| r.gguf == rest),
        Scope::Drafter => is_drafter && block.is_some_and(|(_, rest)| r.gguf == rest),
    });
    let mut pieces = Vec::new();
    for rule in rules {
        let source = match (rule.scope, block) {
            (Scope::Root, _) => rule.source.to_owned(),
            (Scope::Drafter, _) => format!("mtp.{}", rule.source),
            (Scope::Block, Some(_)) if is_drafter => format!("mtp.layers.0.{}", rule.source),
            (Scope::Block, Some((n, _))) => format!("{prefix}layers.{n}.{}", rule.source),
            (Scope::Table, _) => {
                let layer =
                    geometry.ple_layer.ok_or_else(|| fail("ple.layers names no layer for it".to_owned()))?;
                format!("{prefix}layers.{layer}.{}", rule.source)
            }
            _ => format!("{prefix}{}", rule.source),
        };
        pieces.push(apply(geometry, rule, name, shape, source).map_err(fail)?);
    }
    if pieces.is_empty() {
        return Err(fail(format!("no {} model has a tensor of that name", geometry.architecture.name())));
    }
    Ok(Mapped::Pieces(pieces))
}

/// One rule applied to one tensor; a text says what does not fit.
fn apply(g: &Geometry, rule: &Rule, name: &str, shape: &[u64], source: String) -> Result<Piece, String> {
    let rank = |n: usize| match shape.len() == n {
        true => Ok(()),
        false => Err(format!("expected {n} dimensions, found shape {shape:?}")),
    };
    let (mut source_shape, mut take, mut fill) = (shape.to_vec(), None, None);
    match rule.form {
        Form::Same => {}
        Form::Convolution => {
            rank(2)?;
            source_shape.insert(1, 1);
        }
        // The converter drops dimensions of 1; other writers keep this one.
        Form::OneRow if matches!(shape, [1, _]) => {}
        Form::OneRow => {
            rank(1)?;
            source_shape.insert(0, 1);
        }
        // The other part's size is not known here; `map` puts both together.
        Form::IndexerQuery | Form::IndexerKey => {
            rank(2)?;
            fill = Some(Slice { axis: 0, range: 0..shape[0] });
        }
        Form::ExpertGate | Form::ExpertUp => {
            rank(3)?;
            let i = shape[1];
            source_shape[1] = i.checked_mul(2).ok_or("too many rows")?;
            let range = if rule.form == Form::ExpertGate { 0..i } else { i..2 * i };
            fill = Some(Slice { axis: 1, range });
        }
        Form::LeftColumns | Form::RightColumns => {
            rank(2)?;
            if shape[1] % 2 != 0 {
                return Err(format!("expected an even number of columns, found shape {shape:?}"));
            }
            let half = shape[1] / 2;
            source_shape[1] = half;
            take = Some(if rule.form == Form::LeftColumns { 0..half } else { half..2 * half });
        }
    }
    let heads = match rule.heads {
        Heads::None => None,
        kind => Some(tiled(g, kind, shape)?),
    };
    Ok(Piece {
        tensor: name.to_owned(),
        stored_shape: shape.to_vec(),
        take,
        source,
        source_shape,
        fill,
        values: rule.values,
        heads: heads.filter(|h| !h.is_identity()),
    })
}

/// The permutation of a tensor whose value heads lie as `kind` says.
fn tiled(g: &Geometry, kind: Heads, shape: &[u64]) -> Result<TiledHeads, String> {
    let keys = 2 * g.key_heads * g.key_dim;
    let (first, width) = match kind {
        Heads::Single | Heads::None => (0, 1),
        Heads::Rows | Heads::Columns => (0, g.value_dim),
        Heads::RowsBehindKeys => (keys, g.value_dim),
    };
    // A vector's only axis is its columns.
    let columns = kind == Heads::Columns || shape.len() == 1;
    let expected = first + g.value_heads * width;
    let rows = shape.len() <= 2;
    let found = if columns { shape.last() } else { shape.first() };
    if !rows || found != Some(&expected) {
        let axis = if columns { "innermost" } else { "outermost" };
        return Err(format!(
            "expected {expected} along the {axis} axis ({} value heads), found shape {shape:?}",
            g.value_heads
        ));
    }
    Ok(TiledHeads { columns, first, key_heads: g.key_heads, per_key: g.value_heads / g.key_heads, width })
}

/// The pieces of a whole model, sorted by source name and place in it. Every source tensor named is complete, and none of
/// its parts is held twice.
///
/// # Errors
/// As [`Geometry::read`] and [`map_tensor`]; a source tensor of which a part is missing or that two tensors hold; a scale
/// without its tensor.
pub fn map(gguf: &Gguf, prefix: &str) -> Result<Vec<Piece>, CheckpointError> {
    let geometry = Geometry::read(gguf)?;
    let mut by_source: BTreeMap<String, Vec<Piece>> = BTreeMap::new();
    for t in gguf.tensors() {
        match map_tensor(&geometry, prefix, &t.name, &t.shape)? {
            Mapped::Pieces(pieces) => {
                for piece in pieces {
                    by_source.entry(piece.source.clone()).or_default().push(piece);
                }
            }
            Mapped::ScaleOf(weight) if gguf.get(&weight).is_some() => {}
            Mapped::ScaleOf(weight) => {
                return Err(CheckpointError::GgufName {
                    tensor: t.name.to_string(),
                    reason: format!("it is the scale of {weight}, which is missing"),
                });
            }
        }
    }
    let mut out = Vec::new();
    for (source, mut pieces) in by_source {
        join(&source, &mut pieces)?;
        out.append(&mut pieces);
    }
    Ok(out)
}

/// Orders the pieces of one source tensor, and checks that they are all of it.
fn join(source: &str, pieces: &mut [Piece]) -> Result<(), CheckpointError> {
    let fail = |piece: &Piece, reason: String| CheckpointError::GgufName {
        tensor: piece.tensor.clone(),
        reason: format!("as a part of {source}, {reason}"),
    };
    // An indexer's two parts: the query's rows, then the key's.
    if let [a, b] = pieces
        && a.tensor.contains(".indexer.")
    {
        if a.tensor.ends_with("k_proj.weight") {
            std::mem::swap(a, b);
        }
        let (q, k) = (a.stored_shape[0], b.stored_shape[0]);
        if a.stored_shape[1] != b.stored_shape[1] {
            return Err(fail(
                b,
                format!("it has {} columns, {} has {}", b.stored_shape[1], a.tensor, a.stored_shape[1]),
            ));
        }
        let rows = q.checked_add(k).ok_or_else(|| fail(b, "it has too many rows".to_owned()))?;
        b.fill = Some(Slice { axis: 0, range: q..rows });
        a.source_shape[0] = rows;
        b.source_shape[0] = rows;
    } else if let [a] = pieces
        && a.tensor.contains(".indexer.")
        && a.fill.is_some()
    {
        return Err(fail(a, "it is alone; the query's or the key's projection is missing".to_owned()));
    }
    pieces.sort_by_key(|p| p.fill.as_ref().map_or(0, |s| s.range.start));
    let mut next = 0;
    let mut previous: Option<&Piece> = None;
    for piece in pieces.iter() {
        if let Some(p) = previous
            && p.source_shape != piece.source_shape
        {
            return Err(fail(
                piece,
                format!("it has shape {:?}, {} has {:?}", piece.source_shape, p.tensor, p.source_shape),
            ));
        }
        let whole = piece.source_shape.first().copied().unwrap_or(1);
        let range = piece.fill.as_ref().map_or(0..whole, |s| s.range.clone());
        if range.start != next || (piece.fill.is_none() && previous.is_some()) {
            let other = previous.map_or("nothing".to_owned(), |p| p.tensor.clone());
            return Err(fail(piece, format!("it starts at {}, {other} ends at {next}", range.start)));
        }
        next = range.end;
        previous = Some(piece);
    }
    if let Some(p) = previous
        && let Some(slice) = &p.fill
        && p.source_shape[slice.axis] != next
    {
        return Err(fail(p, format!("the part from {next} to {} is missing", p.source_shape[slice.axis])));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(architecture: Architecture) -> Geometry {
        Geometry {
            architecture,
            layers: 8,
            drafter_layers: 1,
            key_heads: 16,
            value_heads: 48,
            key_dim: 128,
            value_dim: 128,
            ple_layer: Some(1),
        }
    }

    fn pieces(a: Architecture, name: &str, shape: &[u64]) -> Vec<Piece> {
        match map_tensor(&geometry(a), "model.", name, shape).unwrap() {
            Mapped::Pieces(p) => p,
            Mapped::ScaleOf(w) => panic!("{w}"),
        }
    }

    #[test]
    fn names_follow_scope_and_layer() {
        let source = |a, name: &str, shape: &[u64]| pieces(a, name, shape)[0].source.clone();
        use Architecture::{Qwen4Exp, Qwen35, Qwen35Moe};
        assert_eq!(source(Qwen35, "output.weight", &[9, 8]), "lm_head.weight");
        assert_eq!(source(Qwen35, "blk.7.attn_q.weight", &[9, 8]), "model.layers.7.self_attn.q_proj.weight");
        assert_eq!(source(Qwen35, "blk.8.attn_q.weight", &[9, 8]), "mtp.layers.0.self_attn.q_proj.weight");
        assert_eq!(source(Qwen35Moe, "blk.8.nextn.eh_proj.weight", &[8, 16]), "mtp.fc.weight");
        let table = source(Qwen4Exp, "per_layer_token_embd.weight", &[100, 160]);
        assert_eq!(table, "model.layers.1.ple.ple_embedding.ngram_embedding.weight");
        let fc = pieces(Qwen4Exp, "blk.8.nextn.eh_proj.weight", &[8, 16]);
        assert_eq!((fc[0].source.as_str(), fc[0].take.clone()), ("mtp.fc_embedding.weight", Some(0..8)));
        assert_eq!((fc[1].source.as_str(), fc[1].take.clone()), ("mtp.fc_hidden.weight", Some(8..16)));
        assert_eq!(fc[1].source_shape, [8, 8]);
    }

    #[test]
    fn unknown_names_and_foreign_shapes_are_errors_that_name_them() {
        let g = geometry(Architecture::Qwen35);
        for name in [
            "blk.9.attn_q.weight",
            "blk.07.attn_q.weight",
            "blk.0.nextn.enorm.weight",
            "blk.0.ffn_gate_exps.weight",
            "blk.x.attn_q.weight",
            "blk.0.attn_sinks",
            "rope_freqs.weight",
            "v.patch_embd.weight",
        ] {
            let err = map_tensor(&g, "model.", name, &[8, 8]).unwrap_err().to_string();
            assert!(err.contains(name), "{err}");
        }
        let err = map_tensor(&g, "model.", "blk.0.attn_qkv.weight", &[10241, 8]).unwrap_err().to_string();
        assert!(err.contains("10240") && err.contains("10241"), "{err}");
        assert!(map_tensor(&g, "model.", "blk.0.ssm_conv1d.weight", &[10240]).is_err());
        assert!(map_tensor(&g, "model.", "blk.0.ssm_a", &[]).is_err());
        let g = geometry(Architecture::Qwen4Exp);
        assert!(map_tensor(&g, "model.", "blk.0.ffn_gate_exps.weight", &[8, 8]).is_err());
        assert!(map_tensor(&g, "model.", "blk.8.nextn.eh_proj.weight", &[8, 15]).is_err());
    }

    #[test]
    fn value_heads_are_tiled_where_the_table_says() {
        let a = Architecture::Qwen35;
        let heads = |name: &str, shape: &[u64]| pieces(a, name, shape)[0].heads.unwrap();
        let qkv = heads("blk.0.attn_qkv.weight", &[10240, 8]);
        // Value head 1 of key head 0 is stored as head 16.
        assert_eq!(qkv.stored(4096 + 128), 4096 + 16 * 128);
        assert!(!qkv.columns && qkv.stored(4095) == 4095);
        assert!(heads("blk.0.ssm_out.weight", &[8, 6144]).columns);
        assert!(heads("blk.0.ssm_dt.bias", &[48]).columns);
        assert_eq!(heads("blk.0.ssm_beta.weight", &[48, 8]).stored(1), 16);
        assert!(pieces(a, "blk.0.ssm_norm.weight", &[128])[0].heads.is_none());
    }

    #[test]
    fn dropped_dimensions_come_back() {
        let shape =
            |name: &str, shape: &[u64]| pieces(Architecture::Qwen4Exp, name, shape)[0].source_shape.clone();
        assert_eq!(shape("blk.0.ffn_gate_inp_shexp.weight", &[8]), [1, 8]);
        assert_eq!(shape("blk.0.ffn_gate_inp_shexp.weight", &[1, 8]), [1, 8]);
        assert_eq!(shape("blk.0.ple_conv1d.weight", &[8, 4]), [8, 1, 4]);
        assert_eq!(shape("blk.0.ffn_up_exps.weight", &[2, 3, 8]), [2, 6, 8]);
    }

    #[test]
    fn table_has_no_line_twice() {
        for (i, a) in RULES.iter().enumerate() {
            for b in &RULES[i + 1..] {
                let both = a.only.iter().any(|x| b.only.contains(x));
                let same_source = a.source == b.source && a.scope == b.scope;
                let parts = a.form != Form::Same || b.form != Form::Same;
                assert!(!(both && a.gguf == b.gguf && !parts), "{}", a.gguf);
                assert!(!(both && same_source && !parts), "{}", a.source);
            }
        }
    }
}
