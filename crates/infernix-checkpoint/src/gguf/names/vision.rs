//! Image towers in files of their own (`mmproj`, architecture `clip`): names, and what llama.cpp's converter cut apart.

use serde_json::{Map, Value, json};

use super::super::Gguf;
use super::super::config::shortest;
use super::piece::{Piece, Slice};
use super::table::Values;
use crate::CheckpointError;

/// Prefix of the source's tower.
const TOWER: &str = "model.visual.";
/// Tensors beside the blocks: GGUF name, source name.
const WHOLE: [(&str, &str); 8] = [
    ("v.patch_embd.bias", "patch_embed.proj.bias"),
    ("v.position_embd.weight", "pos_embed.weight"),
    ("v.post_ln.weight", "merger.norm.weight"),
    ("v.post_ln.bias", "merger.norm.bias"),
    ("mm.0.weight", "merger.linear_fc1.weight"),
    ("mm.0.bias", "merger.linear_fc1.bias"),
    ("mm.2.weight", "merger.linear_fc2.weight"),
    ("mm.2.bias", "merger.linear_fc2.bias"),
];
/// Modules of a block.
const BLOCK: [(&str, &str); 6] = [
    ("ln1", "norm1"),
    ("ln2", "norm2"),
    ("attn_qkv", "attn.qkv"),
    ("attn_out", "attn.proj"),
    ("ffn_up", "mlp.linear_fc1"),
    ("ffn_down", "mlp.linear_fc2"),
];
/// Frames of a patch: the converter keeps each in a tensor of its own.
const FRAMES: [&str; 2] = ["v.patch_embd.weight", "v.patch_embd.weight.1"];

/// Whether a model is an image tower.
pub(crate) fn is_tower(gguf: &Gguf) -> bool {
    gguf.architecture().is_ok_and(|a| a == "clip")
}

/// The pieces of a tower, sorted by source name.
///
/// # Errors
/// A tensor of another kind of tower; a patch embedding without one of its frames.
pub(crate) fn map(gguf: &Gguf) -> Result<Vec<Piece>, CheckpointError> {
    let mut out = Vec::new();
    for t in gguf.tensors() {
        let fail = |reason: String| CheckpointError::GgufName { tensor: t.name.to_string(), reason };
        let frame = FRAMES.iter().position(|f| *f == &*t.name);
        let source = match frame {
            Some(_) => "patch_embed.proj.weight".to_owned(),
            None => source(&t.name).ok_or_else(|| {
                fail("no Qwen image tower without deepstack has a tensor of that name".into())
            })?,
        };
        let (mut source_shape, mut fill) = (t.shape.to_vec(), None);
        if let Some(frame) = frame {
            // [D, colours, P, P] here, [D, colours, frames, P, P] there.
            if t.shape.len() != 4 {
                return Err(fail(format!("expected four dimensions, found {:?}", t.shape)));
            }
            if let Some(other) = FRAMES.iter().find(|f| gguf.get(f).is_none_or(|o| o.shape != t.shape)) {
                return Err(fail(format!("{other} is missing, or of another shape")));
            }
            source_shape.insert(2, FRAMES.len() as u64);
            fill = Some(Slice { axis: 2, range: frame as u64..frame as u64 + 1 });
        }
        out.push(Piece {
            tensor: t.name.to_string(),
            stored_shape: t.shape.to_vec(),
            take: None,
            source: format!("{TOWER}{source}"),
            source_shape,
            fill,
            values: Values::Same,
            heads: None,
        });
    }
    out.sort_by(|a, b| a.source.cmp(&b.source).then_with(|| a.tensor.cmp(&b.tensor)));
    Ok(out)
}

fn source(name: &str) -> Option<String> {
    if let Some((_, source)) = WHOLE.iter().find(|(n, _)| *n == name) {
        return Some((*source).to_owned());
    }
    let (number, rest) = name.strip_prefix("v.blk.")?.split_once('.')?;
    let n: u64 = number.parse().ok().filter(|n: &u64| n.to_string() == number)?;
    let (module, suffix) = rest.split_once('.')?;
    let module = BLOCK.iter().find(|(m, _)| *m == module)?.1;
    matches!(suffix, "weight" | "bias").then(|| format!("blocks.{n}.{module}.{suffix}"))
}

/// A configuration that describes the tower alone.
///
/// # Errors
/// Keys that are missing or of another type.
pub(crate) fn config(gguf: &Gguf) -> Result<Value, CheckpointError> {
    let count = |key: &str| {
        let key = format!("clip.vision.{key}");
        let missing = || gguf.key_error(&key, "an integer that is not negative", "missing".into());
        gguf.unsigned(&key)?.ok_or_else(missing)
    };
    let positions = gguf.get("v.position_embd.weight").map_or(0, |t| t.rows());
    let colours = gguf.get(FRAMES[0]).and_then(|t| t.shape.get(1).copied()).unwrap_or(3);
    Ok(json!({"vision_config": {
        "depth": count("block_count")?,
        "hidden_size": count("embedding_length")?,
        "intermediate_size": count("feed_forward_length")?,
        "num_heads": count("attention.head_count")?,
        "num_position_embeddings": positions,
        "in_channels": colours,
        "patch_size": count("patch_size")?,
        "temporal_patch_size": FRAMES.len(),
        "spatial_merge_size": gguf.unsigned("clip.vision.spatial_merge_size")?.unwrap_or(2),
        "out_hidden_size": count("projection_dim")?,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }}))
}

/// `preprocessor_config.json` of the tower.
///
/// # Errors
/// As [`config`].
pub(crate) fn processor(gguf: &Gguf) -> Result<Value, CheckpointError> {
    let tower = config(gguf)?;
    let tower = &tower["vision_config"];
    let mut out = Map::new();
    for (name, key) in [
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "spatial_merge_size"),
    ] {
        out.insert(name.into(), tower[key].clone());
    }
    for name in ["image_mean", "image_std"] {
        // Pixels are divided by the deviation.
        let fits = |x: &f64| x.is_finite() && (name == "image_mean" || *x > 0.0);
        let expected = "finite numbers, of image_std above 0";
        let list = gguf.list(&format!("clip.vision.{name}"), expected, |v| v.float().filter(fits))?;
        if let Some(list) = list {
            out.insert(name.into(), json!(list.into_iter().map(shortest).collect::<Vec<_>>()));
        }
    }
    out.insert("image_processor_type".into(), json!("Qwen2VLImageProcessorFast"));
    Ok(Value::Object(out))
}
