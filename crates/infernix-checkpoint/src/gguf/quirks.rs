//! What converters are known to get wrong and a file shows (llama.cpp's `convert_hf_to_gguf.py` and `llama-quantize`).

use std::collections::BTreeSet;

use infernix_formats::ggml::GgmlType;

use super::Gguf;
use super::names::Architecture;
use crate::CheckpointError;

/// Type number of a control token in `tokenizer.ggml.token_type`.
const CONTROL: u64 = 3;

/// Added tokens that the source's tokenizer shows as text and llama.cpp's converter marks as control tokens.
const TEXT_TOKENS: [&str; 6] =
    ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"];

/// Everything odd about a model, each in a sentence or two that say what it does and what to do.
pub(super) fn find(gguf: &Gguf) -> Result<Vec<String>, CheckpointError> {
    let mut out = Vec::new();
    scales(gguf, &mut out);
    let known = gguf.text("general.architecture")?.and_then(Architecture::from_name);
    let Some(architecture) = known else { return Ok(out) };
    if architecture == Architecture::Qwen4Exp {
        selection(gguf, &mut out)?;
        table(gguf, &mut out);
    }
    blocks(gguf, architecture, &mut out)?;
    tokenizer(gguf, &mut out)?;
    Ok(out)
}

/// At most eight numbers, then a count.
fn some(numbers: &[u64]) -> String {
    match numbers.len() {
        0..=8 => format!("{numbers:?}"),
        n => format!("{:?} and {} more", &numbers[..8], n - 8),
    }
}

/// Numbers of the blocks that have a tensor `blk.N.` + `suffix`.
fn blocks_with(gguf: &Gguf, suffix: &str) -> BTreeSet<u64> {
    let number =
        |name: &str| name.strip_prefix("blk.")?.strip_suffix(suffix)?.strip_suffix('.')?.parse().ok();
    gguf.tensors().filter_map(|t| number(&t.name)).collect()
}

/// The sparse attention that is switched off without a word: with transformers 5.23 the converter no longer recognises
/// the layers, and writes a compress ratio of 0 for all of them.
fn selection(gguf: &Gguf, out: &mut Vec<String>) -> Result<(), CheckpointError> {
    let key = "qwen4exp.attention.compress_ratios";
    let ratios = gguf.unsigned_list(key)?.unwrap_or_default();
    let ratio = |layer: u64| ratios.get(layer as usize).copied().unwrap_or(0);
    let drafter = gguf.unsigned("qwen4exp.nextn_predict_layers")?.unwrap_or(0);
    let layers = gguf.unsigned("qwen4exp.block_count")?.unwrap_or(0).saturating_sub(drafter);
    // The drafter's own layer need not be listed.
    let indexed: Vec<u64> =
        blocks_with(gguf, "indexer.q_proj.weight").into_iter().filter(|n| *n < layers).collect();
    let off: Vec<u64> = indexed.iter().copied().filter(|n| ratio(*n) == 0).collect();
    if !off.is_empty() {
        let which = if off.len() == indexed.len() { "all".to_owned() } else { some(&off) };
        out.push(format!(
            "sparse attention is switched off: {key} is 0 for {which} of the {} layers that have an indexer. This is a fault of \
             the converter (it loses the layer types with transformers 5.23), the model was trained with selection; take the \
             ratio from indexer_compress_ratio of the source's config.json (4 for Flash-Next)",
            indexed.len()
        ));
    }
    let without: Vec<u64> =
        (0..layers.min(ratios.len() as u64)).filter(|n| ratio(*n) != 0 && !indexed.contains(n)).collect();
    if !without.is_empty() {
        out.push(format!(
            "{key} asks for selection in layers {}, which have no indexer tensors",
            some(&without)
        ));
    }
    Ok(())
}

/// An n-gram table whose rows are no whole blocks: llama-quantize falls back to F16, and BF16 values outside its range
/// are lost.
fn table(gguf: &Gguf, out: &mut Vec<String>) {
    let Some(t) = gguf.get("per_layer_token_embd.weight").filter(|t| t.ty == GgmlType::F16) else { return };
    out.push(format!(
        "the n-gram table is F16 (llama-quantize falls back to it for rows of {} values): its values were rounded from the \
         source's BF16 and are no longer word for word; name another table with --source table=",
        t.row_len()
    ));
}

/// A drafter that was left out, or announced and not there.
fn blocks(gguf: &Gguf, architecture: Architecture, out: &mut Vec<String>) -> Result<(), CheckpointError> {
    let name = architecture.name();
    let drafter = gguf.unsigned(&format!("{name}.nextn_predict_layers"))?.unwrap_or(0);
    let present = blocks_with(gguf, "nextn.eh_proj.weight");
    if drafter == 0 && present.is_empty() {
        out.push(format!(
            "the file holds no drafter (MTP){}; drafts need one from a second source",
            if architecture == Architecture::Qwen4Exp { ": llama.cpp's converter drops it" } else { "" }
        ));
    } else if drafter != present.len() as u64 {
        out.push(format!(
            "{name}.nextn_predict_layers is {drafter}, the file has the tensors of {} drafter layers",
            present.len()
        ));
    }
    let Some(count) = gguf.unsigned(&format!("{name}.block_count"))? else { return Ok(()) };
    let number = |name: &str| name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok();
    let found: BTreeSet<u64> = gguf.tensors().filter_map(|t| number(&t.name)).collect();
    if found.len() as u64 != count || found.last().is_some_and(|n| *n + 1 != count) {
        out.push(format!("{name}.block_count is {count}, the file has tensors of {} blocks", found.len()));
    }
    let key = format!("{name}.attention.recurrent_layers");
    let Some(recurrent) = gguf.list(&key, "truth values", super::Value::boolean)? else { return Ok(()) };
    let gdn = blocks_with(gguf, "ssm_conv1d.weight");
    let wrong: Vec<u64> =
        (0..).zip(&recurrent).filter(|(n, r)| **r != gdn.contains(n)).map(|(n, _)| n).collect();
    if !wrong.is_empty() {
        out.push(format!("{key} disagrees with the tensors of blocks {}; the tensors decide", some(&wrong)));
    }
    Ok(())
}

/// Flags and keys of the tokenizer that a converter loses.
fn tokenizer(gguf: &Gguf, out: &mut Vec<String>) -> Result<(), CheckpointError> {
    if gguf.metadata().get("tokenizer.ggml.tokens").is_none() {
        out.push("the file holds no tokenizer; name a source of resources".to_owned());
        return Ok(());
    }
    if gguf.text("tokenizer.ggml.pre")?.is_none() {
        out.push(
            "tokenizer.ggml.pre is missing: text would be split by a default rule that is not the model's"
                .to_owned(),
        );
    }
    let Some(types) = gguf.unsigned_list("tokenizer.ggml.token_type")? else { return Ok(()) };
    let tokens = gguf.text_list("tokenizer.ggml.tokens")?.unwrap_or_default();
    if types.len() != tokens.len() {
        out.push(format!(
            "tokenizer.ggml.token_type has {} entries for {} tokens",
            types.len(),
            tokens.len()
        ));
    }
    let lost: Vec<&str> = tokens
        .iter()
        .zip(&types)
        .filter(|(t, ty)| **ty == CONTROL && TEXT_TOKENS.contains(&t.as_str()))
        .map(|(t, _)| t.as_str())
        .collect();
    if !lost.is_empty() {
        out.push(format!(
            "{} are marked as control tokens, which the source's tokenizer shows as text; prefer its tokenizer.json",
            lost.join(", ")
        ));
    }
    Ok(())
}

/// NVFP4 tensors without their second scale.
fn scales(gguf: &Gguf, out: &mut Vec<String>) {
    let lacks = |name: &str| {
        let base = name.strip_suffix(".weight").unwrap_or(name);
        gguf.get(&format!("{base}.scale")).is_none()
    };
    let bare: Vec<&str> =
        gguf.tensors().filter(|t| t.ty == GgmlType::Nvfp4 && lacks(&t.name)).map(|t| &*t.name).collect();
    if let Some(first) = bare.first() {
        out.push(format!(
            "{} NVFP4 tensors have no second scale, the first is {first}; 1 is taken",
            bare.len()
        ));
    }
}
