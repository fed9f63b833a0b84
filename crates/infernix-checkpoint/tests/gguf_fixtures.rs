//! The GGUF models made by llama.cpp: values against its own decoding, names and conventions against the checkpoints that
//! they were made from.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use infernix_checkpoint::gguf::names::{self, HASH_CONSTANTS, Piece, Values};
use infernix_checkpoint::gguf::{Gguf, Value};
use infernix_checkpoint::{Checkpoint, OpenOptions};
use infernix_formats::scalar::{bf16_from_f32, bf16_to_f32};
use safetensors::SafeTensors;

const PREFIX: &str = "model.language_model.";

fn gguf(name: &str) -> Option<Gguf> {
    Some(Gguf::open(&common::model(name)?).unwrap())
}

/// Compares the rows of every tensor in the oracle beside the model; the types met.
fn compare_with_oracle(model: &Gguf, dir: &Path) -> Vec<String> {
    let file = std::fs::read(dir.join("dequant.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let mut types = Vec::new();
    for name in file.names().into_iter().filter(|n| !n.contains('#')) {
        let t = model.get(name).unwrap_or_else(|| panic!("{name} is missing"));
        let tensor = |suffix: &str| file.tensor(&format!("{name}{suffix}")).unwrap();
        let (values, rows, raw) = (tensor(""), tensor("#rows"), tensor("#raw"));
        let row_len = t.row_len() as usize;
        let mut out = vec![f32::NAN; row_len];
        let mut stored = vec![0; t.row_bytes() as usize];
        for (i, row) in rows.data().chunks_exact(8).enumerate() {
            let row = u64::from_le_bytes(row.try_into().unwrap());
            model.read_rows_f32(t, row..row + 1, &mut out).unwrap();
            model.read(t, row * t.row_bytes()..(row + 1) * t.row_bytes(), &mut stored).unwrap();
            let want = &values.data()[4 * row_len * i..4 * row_len * (i + 1)];
            let same = out.iter().zip(want.chunks_exact(4)).all(|(v, w)| v.to_le_bytes() == *w);
            assert!(same, "{name} ({}), row {row}", t.ty);
            assert_eq!(stored, raw.data()[stored.len() * i..stored.len() * (i + 1)], "{name}, row {row}");
        }
        assert!(!rows.data().is_empty());
        types.push(t.ty.to_string());
    }
    types.sort();
    types.dedup();
    types
}

#[test]
fn every_tensor_of_the_oracles_decodes_bit_for_bit() {
    let expected = [
        ("flash-demo-gguf", "BF16 F32 IQ3_S IQ4_NL Q5_K Q6_K Q8_0", 214),
        ("flash-wide-gguf", "BF16 F32 IQ3_S IQ3_XXS IQ4_NL Q2_0 Q4_K Q5_K Q6_K Q8_0", 113),
        ("dense-demo-gguf", "F32 Q4_K Q5_K Q6_K Q8_0", 124),
    ];
    for (name, types, tensors) in expected {
        let Some(dir) = common::model(name) else { continue };
        let model = Gguf::open(&dir).unwrap();
        assert_eq!(compare_with_oracle(&model, &dir).join(" "), types, "{name}");
        assert_eq!(model.tensors().len(), tensors);
    }
}

#[test]
fn every_value_of_every_tensor_is_legal() {
    for name in ["flash-demo-gguf", "flash-wide-gguf", "dense-demo-gguf"] {
        let Some(model) = gguf(name) else { continue };
        for t in model.tensors() {
            let mut out = vec![0.0; t.elements() as usize];
            model.read_rows_f32(t, 0..t.rows(), &mut out).unwrap();
            assert!(out.iter().all(|v| v.is_finite()), "{name}: {}", t.name);
        }
    }
}

#[test]
fn metadata_is_typed_and_arrays_are_read_on_demand() {
    let Some(model) = gguf("flash-demo-gguf") else { return };
    assert_eq!((model.version(), model.shards().len()), (3, 2));
    assert_eq!(model.architecture().unwrap(), "qwen4exp");
    assert_eq!(model.unsigned("qwen4exp.block_count").unwrap(), Some(8));
    assert_eq!(model.unsigned("split.tensors.count").unwrap(), Some(214));
    assert_eq!(model.float("qwen4exp.rope.freq_base").unwrap(), Some(1e7));
    assert_eq!(model.metadata().get("tokenizer.ggml.add_bos_token"), Some(&Value::Bool(false)));
    let ratios = model.unsigned_list("qwen4exp.attention.compress_ratios").unwrap().unwrap();
    assert_eq!(ratios, [0, 0, 0, 16, 0, 0, 0, 16]);
    let multipliers = model.unsigned_list("qwen4exp.ple.layer_multipliers").unwrap().unwrap();
    assert_eq!(multipliers[0], 2_043_359_076_095_531);
    let tokens = model.text_list("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens[4083].as_str()), (4096, "<|endoftext|>"));
    assert_eq!(model.unsigned("no.such.key").unwrap(), None);
    let e = model.unsigned("general.architecture").unwrap_err().to_string();
    assert!(e.contains("general.architecture") && e.contains("text"), "{e}");
    assert!(model.text_list("qwen4exp.ple.layers").is_err());
    assert!(model.unsigned_list("tokenizer.ggml.tokens").is_err());
    // A single value is a list of one.
    assert_eq!(model.unsigned_list("qwen4exp.block_count").unwrap(), Some(vec![8]));
}

#[test]
fn any_part_of_a_split_model_opens_it_whole() {
    let Some(dir) = common::model("flash-demo-gguf") else { return };
    let by_folder = Gguf::open(&dir).unwrap();
    for part in ["flash-demo-IQ3_S-00001-of-00002.gguf", "flash-demo-IQ3_S-00002-of-00002.gguf"] {
        let by_part = Gguf::open(&dir.join(part)).unwrap();
        assert!(by_part.tensors().eq(by_folder.tensors()));
    }
    let table = by_folder.get("per_layer_token_embd.weight").unwrap();
    assert_eq!((&*table.shape, table.shard), (&[129_280, 16][..], 1));
    assert_eq!(table.offset % 32, 0);
}

#[test]
fn oddities_of_the_converter_are_said() {
    let warnings = |name: &str| gguf(name).map(|g| g.warnings().join("\n"));
    for name in ["flash-demo-gguf", "flash-wide-gguf"] {
        if let Some(w) = warnings(name) {
            assert!(w.contains("no drafter") && !w.contains("switched off"), "{w}");
        }
    }
    if let Some(w) = warnings("dense-demo-gguf") {
        assert_eq!(w, "");
    }
}

/// The values of all pieces of one source tensor, in its order, with the row width.
fn restore(model: &Gguf, pieces: &[&Piece]) -> Vec<f32> {
    let shape = &pieces[0].source_shape;
    let mut out = vec![f32::NAN; shape.iter().product::<u64>() as usize];
    for p in pieces {
        let t = model.get(&p.tensor).unwrap();
        let (stored_len, columns) = (t.row_len() as usize, p.columns() as usize);
        let mut stored = vec![0.0; t.elements() as usize];
        model.read_rows_f32(t, 0..t.rows(), &mut stored).unwrap();
        for row in 0..p.rows() {
            let from = p.stored_row(row) as usize * stored_len;
            let to = p.source_row(row) as usize * columns;
            p.undo_row(&stored[from..from + stored_len], &mut out[to..to + columns]);
        }
    }
    out
}

/// The checkpoint's words of a tensor; the parts of a split n-gram table in order.
fn source_words(checkpoint: &Checkpoint, name: &str) -> Option<Vec<u16>> {
    let words = |t| {
        let bytes = checkpoint.read_all(t).unwrap();
        bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect::<Vec<_>>()
    };
    if let Some(t) = checkpoint.get(name) {
        assert_eq!(t.dtype.name(), "BF16", "{name}");
        return Some(words(t));
    }
    let base = name.strip_suffix(".weight")?;
    let parts = (0..).map_while(|i| checkpoint.get(&format!("{base}.shard_{i}.weight")));
    let all: Vec<u16> = parts.flat_map(words).collect();
    (!all.is_empty()).then_some(all)
}

/// Compares a GGUF with the BF16 checkpoint that it was made from: unquantized tensors word for word, quantized ones by
/// their cosine, which a wrong order of heads or parts would ruin. Returns the number of tensors of either kind.
fn compare_with_source(model: &Gguf, checkpoint: &Checkpoint) -> (usize, usize) {
    let pieces = names::map(model, PREFIX).unwrap();
    let mut by_source: BTreeMap<&str, Vec<&Piece>> = BTreeMap::new();
    for p in &pieces {
        by_source.entry(&p.source).or_default().push(p);
    }
    let (mut exact, mut close) = (0, 0);
    for (source, pieces) in &by_source {
        let words =
            source_words(checkpoint, source).unwrap_or_else(|| panic!("{source} is not in the checkpoint"));
        if let Some(t) = checkpoint.get(source) {
            assert_eq!(*t.shape, *pieces[0].source_shape, "{source}");
        }
        let values = restore(model, pieces);
        assert_eq!(values.len(), words.len(), "{source}");
        if pieces.iter().all(|p| model.get(&p.tensor).unwrap().ty.is_plain()) {
            for (i, (v, w)) in values.iter().zip(&words).enumerate() {
                let source_value = bf16_to_f32(*w);
                let same = match pieces[0].values {
                    Values::Same => v.to_bits() == source_value.to_bits(),
                    Values::NegativeExp => bf16_from_f32(*v) == *w,
                    // 1 + w lost bits of weights below 2^-16, but is the same number.
                    Values::OnePlus if source_value.abs() < 2f32.powi(-16) => 1.0 + v == 1.0 + source_value,
                    Values::OnePlus => *v == source_value,
                };
                assert!(same, "{source}: value {i} is {v}, expected {source_value}");
            }
            exact += 1;
        } else {
            let (mut dot, mut a, mut b) = (0.0, 0.0, 0.0);
            for (v, w) in values.iter().zip(&words) {
                let (v, w) = (f64::from(*v), f64::from(bf16_to_f32(*w)));
                dot += v * w;
                a += v * v;
                b += w * w;
            }
            let cosine = dot / (a * b).sqrt();
            assert!(cosine > 0.95, "{source}: cosine {cosine}");
            close += 1;
        }
    }
    // Nothing of the language model is left out but the hash buffers, which are metadata here.
    for t in checkpoint.tensors() {
        let hash = HASH_CONSTANTS.iter().any(|(_, name)| t.name.ends_with(name));
        let shard = t.name.contains(".ngram_embedding.shard_");
        let elsewhere = t.name.contains("visual.")
            || (t.name.starts_with("mtp.") && by_source.keys().all(|s| !s.starts_with("mtp.")));
        assert!(hash || shard || elsewhere || by_source.contains_key(&*t.name), "{} is in no piece", t.name);
    }
    (exact, close)
}

fn pair(model: &str, checkpoint: &str) -> Option<(Gguf, Checkpoint)> {
    let checkpoint = Checkpoint::open(&common::model(checkpoint)?, &OpenOptions::default()).unwrap();
    Some((gguf(model)?, checkpoint))
}

#[test]
fn flash_demo_comes_back_as_its_checkpoint() {
    let Some((model, checkpoint)) = pair("flash-demo-gguf", "flash-demo-bf16") else { return };
    let (exact, close) = compare_with_source(&model, &checkpoint);
    assert_eq!(exact + close, 204, "{exact} exact, {close} close");
    for (key, source) in HASH_CONSTANTS {
        let want = checkpoint.get(&format!("{PREFIX}layers.1.{source}")).unwrap();
        let want = checkpoint.read_all(want).unwrap();
        let got = model.unsigned_list(&format!("qwen4exp.{key}")).unwrap().unwrap();
        assert_eq!(got.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>(), want, "{key}");
    }
}

#[test]
fn dense_demo_and_its_drafter_come_back_as_their_checkpoint() {
    let Some((model, checkpoint)) = pair("dense-demo-gguf", "dense-demo-bf16") else { return };
    let (exact, close) = compare_with_source(&model, &checkpoint);
    assert_eq!(exact + close, 124, "{exact} exact, {close} close");
}

#[test]
fn wide_model_maps_completely() {
    let Some(model) = gguf("flash-wide-gguf") else { return };
    let pieces = names::map(&model, "model.").unwrap();
    assert_eq!(pieces.len(), 113);
    let out = pieces.iter().find(|p| p.tensor == "blk.0.ssm_out.weight").unwrap();
    assert!(out.heads.unwrap().moves_blocks_of(32) && out.keeps_words());
}

/// The generated files against those of the checkpoint that the file was made from.
#[test]
fn config_and_tokenizer_are_those_of_the_source() {
    for (gguf, source) in [("flash-demo-gguf", "flash-demo-bf16"), ("dense-demo-gguf", "dense-demo-bf16")] {
        let open =
            |name: &str| Some(Checkpoint::open(&common::model(name)?, &OpenOptions::default()).unwrap());
        let (Some(made), Some(original)) = (open(gguf), open(source)) else { continue };
        let (a, b) = (made.config().unwrap(), original.config().unwrap());
        assert_eq!(a["architectures"], b["architectures"]);
        for key in
            ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "model_type"]
        {
            assert_eq!(a[key], b[key], "{gguf}: {key}");
        }
        for (key, value) in a["text_config"].as_object().unwrap() {
            let expected = &b["text_config"][key];
            // A base that gives the same primes; parts in one; a drafter that the converter drops; the end of an answer.
            let other =
                ["ngram_vocab_size_base", "split_ngram_parts", "mtp_num_hidden_layers", "eos_token_id"];
            if other.contains(&key.as_str()) || expected.is_null() {
                continue;
            }
            let equal = match (value.as_f64(), expected.as_f64()) {
                (Some(x), Some(y)) => x == y,
                _ if key == "rope_parameters" => {
                    value["rope_theta"].as_f64() == expected["rope_theta"].as_f64()
                        && value["partial_rotary_factor"] == expected["partial_rotary_factor"]
                        && value["mrope_section"] == expected["mrope_section"]
                }
                _ => value == expected,
            };
            assert!(equal, "{gguf}: {key} is {value}, the source has {expected}");
        }
        let json = |c: &Checkpoint, name: &str| -> serde_json::Value {
            serde_json::from_slice(&c.file_bytes(name).unwrap().unwrap()).unwrap()
        };
        assert_eq!(json(&made, "tokenizer.json"), json(&original, "tokenizer.json"), "{gguf}");
        let (a, b) = (json(&made, "tokenizer_config.json"), json(&original, "tokenizer_config.json"));
        for key in [
            "added_tokens_decoder",
            "eos_token",
            "pad_token",
            "additional_special_tokens",
            "model_max_length",
        ] {
            assert_eq!(a[key], b[key], "{gguf}: {key}");
        }
        let (a, b) = (json(&made, "generation_config.json"), json(&original, "generation_config.json"));
        for key in ["eos_token_id", "bos_token_id", "pad_token_id", "temperature", "top_k", "top_p"] {
            assert_eq!(a[key], b[key], "{gguf}: {key}");
        }
        let template = |c: &Checkpoint| c.file_bytes("chat_template.jinja").unwrap().unwrap();
        assert_eq!(template(&made), template(&original), "{gguf}");
    }
}
