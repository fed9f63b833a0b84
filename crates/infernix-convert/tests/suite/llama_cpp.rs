//! What llama.cpp's loader (0c1e570) asks of a model, held against what an export writes: it refuses a file with a tensor
//! less or more, another shape, or a key of another type.

use crate::common::{converted, fixture, options};
use infernix_checkpoint::Gguf;
use infernix_checkpoint::gguf::Value as Key;
use infernix_convert::{ExportOptions, ExportTarget, Silent, export, plan_export};
use infernix_model::Component;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors that `load_arch_tensors` of `llama_model_qwen35` and `llama_model_qwen4exp` create, with their shapes, outermost
/// dimension first. Where it allows other dimensions of the same size, those of its converter.
fn tensors(c: &Value, table_rows: u64) -> BTreeMap<String, Vec<u64>> {
    let n = |key: &str| c[key].as_u64().unwrap_or_else(|| panic!("{key}"));
    let flash = c["model_type"] == "qwen4_exp_text";
    let (h, vocab, layers) = (n("hidden_size"), n("vocab_size"), n("num_hidden_layers"));
    let (heads, kv, d) = (n("num_attention_heads"), n("num_key_value_heads"), n("head_dim"));
    let (value_heads, state) = (n("linear_num_value_heads"), n("linear_key_head_dim"));
    let (keys, values) = (n("linear_num_key_heads") * state, value_heads * state);
    let mut out = BTreeMap::new();
    let mut put = |name: String, shape: &[u64]| assert!(out.insert(name, shape.to_vec()).is_none());
    put("token_embd.weight".into(), &[vocab, h]);
    put("output.weight".into(), &[vocab, h]);
    for il in 0..layers + u64::from(!flash) {
        let mut put = |name: &str, shape: &[u64]| put(format!("blk.{il}.{name}"), shape);
        // The drafter's block attends.
        if il == layers || (il + 1) % n("full_attention_interval") == 0 {
            put("attn_q.weight", &[2 * heads * d, h]);
            put("attn_k.weight", &[kv * d, h]);
            put("attn_v.weight", &[kv * d, h]);
            put("attn_output.weight", &[h, heads * d]);
            put("attn_q_norm.weight", &[d]);
            put("attn_k_norm.weight", &[d]);
            if flash {
                let width = n("indexer_head_dim");
                put("indexer.q_proj.weight", &[n("indexer_n_heads") * width, h]);
                put("indexer.k_proj.weight", &[width, h]);
                put("indexer.q_norm.weight", &[width]);
                put("indexer.k_norm.weight", &[width]);
            }
        } else {
            put("attn_qkv.weight", &[2 * keys + values, h]);
            put("attn_gate.weight", &[values, h]);
            put("ssm_conv1d.weight", &[2 * keys + values, n("linear_conv_kernel_dim")]);
            put("ssm_dt.bias", &[value_heads]);
            put("ssm_a", &[value_heads]);
            put("ssm_beta.weight", &[value_heads, h]);
            put("ssm_alpha.weight", &[value_heads, h]);
            put("ssm_norm.weight", &[state]);
            put("ssm_out.weight", &[h, values]);
        }
        if !flash {
            let wide = n("intermediate_size");
            put("attn_norm.weight", &[h]);
            put("post_attention_norm.weight", &[h]);
            put("ffn_gate.weight", &[wide, h]);
            put("ffn_up.weight", &[wide, h]);
            put("ffn_down.weight", &[h, wide]);
            continue;
        }
        let (experts, i, shared) =
            (n("num_experts"), n("moe_intermediate_size"), n("shared_expert_intermediate_size"));
        let (streams, rank) = (n("hc_count"), n("hc_lowrank"));
        for place in ["attn", "ffn"] {
            put(&format!("hc_{place}_norm.weight"), &[streams * h]);
            put(&format!("hc_{place}_down.weight"), &[rank, streams * h]);
            put(&format!("hc_{place}_up.weight"), &[streams * h, rank]);
            put(&format!("hc_{place}_inject.weight"), &[streams, streams * h]);
        }
        put("ffn_gate_inp.weight", &[experts, h]);
        put("ffn_gate_exps.weight", &[experts, i, h]);
        put("ffn_up_exps.weight", &[experts, i, h]);
        put("ffn_down_exps.weight", &[experts, h, i]);
        put("ffn_gate_inp_shexp.weight", &[h]);
        put("ffn_gate_shexp.weight", &[shared, h]);
        put("ffn_up_shexp.weight", &[shared, h]);
        put("ffn_down_shexp.weight", &[h, shared]);
        // Numbers of layers with an n-gram table count from 1 in the configuration.
        if c["ple_layer_ids"][0] == il + 1 {
            put("ple_key.weight", &[streams * h, h]);
            put("ple_value.weight", &[h, h]);
            put("ple_conv1d.weight", &[streams * h, n("ple_conv_kernel_size")]);
            for norm in ["key", "query", "conv"] {
                put(&format!("ple_norm_{norm}.weight"), &[streams * h]);
            }
        }
    }
    if flash {
        let (streams, rank) = (n("hc_count"), n("hc_lowrank"));
        let width = n("ple_embed_dim") / ((n("ngram_size") - 1) * n("heads_per_ngram"));
        put("output_hc_norm.weight".into(), &[streams * h]);
        put("output_hc_down.weight".into(), &[rank, streams * h]);
        put("output_hc_up.weight".into(), &[streams * h, rank]);
        put("per_layer_token_embd.weight".into(), &[table_rows, width]);
    } else {
        put("output_norm.weight".into(), &[h]);
        put(format!("blk.{layers}.nextn.eh_proj.weight"), &[h, 2 * h]);
        for norm in ["enorm", "hnorm", "shared_head_norm"] {
            put(format!("blk.{layers}.nextn.{norm}.weight"), &[h]);
        }
    }
    out
}

/// Keys that it cannot do without, and those whose defaults are of other models. (key, type, how many of an array)
fn keys(flash: bool, layers: u64, streams: u64) -> Vec<(&'static str, &'static str, u64)> {
    let mut out = vec![
        ("block_count", "u32", 0),
        ("context_length", "u32", 0),
        ("embedding_length", "u32", 0),
        ("attention.head_count", "u32", 0),
        ("attention.head_count_kv", "u32", 0),
        ("attention.key_length", "u32", 0),
        ("attention.value_length", "u32", 0),
        ("attention.layer_norm_rms_epsilon", "f32", 0),
        ("attention.recurrent_layers", "bool", layers),
        ("rope.dimension_count", "u32", 0),
        ("rope.dimension_sections", "i32", 4),
        ("rope.freq_base", "f32", 0),
        ("ssm.conv_kernel", "u32", 0),
        ("ssm.inner_size", "u32", 0),
        ("ssm.state_size", "u32", 0),
        ("ssm.time_step_rank", "u32", 0),
        ("ssm.group_count", "u32", 0),
        ("full_attention_interval", "u32", 0),
    ];
    if !flash {
        out.extend([("feed_forward_length", "u32", 0), ("nextn_predict_layers", "u32", 0)]);
        return out;
    }
    out.extend([
        ("expert_count", "u32", 0),
        ("expert_used_count", "u32", 0),
        ("expert_feed_forward_length", "u32", 0),
        ("expert_shared_feed_forward_length", "u32", 0),
        ("hyper_connection.count", "u32", 0),
        ("hyper_connection.low_rank", "u32", 0),
        ("attention.indexer.head_count", "u32", 0),
        ("attention.indexer.key_length", "u32", 0),
        ("attention.indexer.top_k", "u32", 0),
        ("attention.compress_ratios", "i32", layers),
        ("embedding_length_per_layer_input", "u32", 0),
        ("ple.layers", "i32", 1),
        ("ple.ngram_size", "u32", 0),
        ("ple.heads_per_ngram", "u32", 0),
        ("ple.conv_kernel", "u32", 0),
        ("ple.eos_token_id", "u32", 0),
        ("ple.image_token_id", "u32", 0),
        ("ple.layer_multipliers", "u64", 3),
        ("ple.head_offsets", "u64", streams),
        ("ple.head_vocab_sizes", "u64", streams),
    ]);
    out
}

/// A model's artifact written as GGUF, with what the export left out.
fn exported(checkpoint: &Path, folder: &Path, components: Option<Vec<Component>>) -> (Gguf, Vec<String>) {
    let artifact = folder.join("a.infernix");
    if !artifact.exists() {
        converted(&options(checkpoint, "auto", &artifact)).unwrap();
    }
    let output = folder.join(format!("{}.gguf", components.as_ref().map_or(0, Vec::len)));
    let o = ExportOptions {
        artifact,
        target: ExportTarget::Gguf,
        output: output.clone(),
        ngram: None,
        components,
        shard_bytes: u64::MAX,
        bit_exact: false,
        resume: false,
    };
    let plan = plan_export(&o).unwrap();
    let left_out = plan.left_out().iter().map(|(name, _)| name.clone()).collect();
    export(&plan, &Silent, &crate::common::run()).unwrap();
    (Gguf::open(&output).unwrap(), left_out)
}

#[test]
fn an_export_holds_exactly_what_llama_cpp_loads() {
    for name in ["dense-demo-bf16", "flash-demo-bf16"] {
        let Some(checkpoint) = fixture(name) else { continue };
        let config: Value =
            serde_json::from_slice(&std::fs::read(checkpoint.join("config.json")).unwrap()).unwrap();
        let config = &config["text_config"];
        let flash = name.starts_with("flash");
        let dir = tempfile::tempdir().unwrap();
        let (gguf, left_out) = exported(&checkpoint, dir.path(), None);
        let rows = gguf.get("per_layer_token_embd.weight").map_or(0, |t| t.shape[0]);
        let found: BTreeMap<_, _> = gguf.tensors().map(|t| (t.name.to_string(), t.shape.to_vec())).collect();
        assert_eq!(found, tensors(config, rows), "{name}");
        // The drafter of one architecture is loaded, that of the other makes loading fail.
        assert_eq!(left_out, if flash { vec!["mtp"] } else { vec![] }, "{name}");

        let architecture = if flash { "qwen4exp" } else { "qwen35" };
        let heads = config["heads_per_ngram"].as_u64().unwrap_or(0) * 2;
        let layers = config["num_hidden_layers"].as_u64().unwrap() + u64::from(!flash);
        let own =
            keys(flash, layers, heads).into_iter().map(|(k, t, n)| (format!("{architecture}.{k}"), t, n));
        let vocab = config["vocab_size"].as_u64().unwrap();
        let common = [
            ("general.architecture", "text", 0),
            ("tokenizer.ggml.model", "text", 0),
            ("tokenizer.ggml.pre", "text", 0),
            ("tokenizer.ggml.tokens", "text", vocab),
            ("tokenizer.ggml.token_type", "i32", vocab),
            ("tokenizer.ggml.merges", "text", u64::MAX),
            ("tokenizer.ggml.eos_token_id", "u32", 0),
            ("tokenizer.ggml.add_bos_token", "bool", 0),
            ("tokenizer.chat_template", "text", 0),
        ];
        for (key, ty, count) in own.chain(common.map(|(k, t, n)| (k.to_owned(), t, n))) {
            let value = gguf.metadata().get(&key).unwrap_or_else(|| panic!("{name}: {key} is missing"));
            match value {
                Key::Array(a) => {
                    assert_eq!(a.element.name(), ty, "{name}: {key}");
                    assert!(a.count == count || count == u64::MAX, "{name}: {key} has {} values", a.count);
                }
                value => assert_eq!((value.value_type().name(), 0), (ty, count), "{name}: {key}"),
            }
        }
        // Asked for by name, a drafter that llama.cpp does not know is written all the same.
        let all = vec![Component::Text, Component::Vision, Component::Mtp];
        let (whole, left_out) = exported(&checkpoint, dir.path(), Some(all));
        assert!(left_out.is_empty() && whole.get("blk.8.nextn.enorm.weight").is_some(), "{name}");
    }
}

/// What `clip.cpp` loads of a tower with the projector `qwen3vl_merger`: tensors that it does not know are ignored there, one
/// that is missing is an error.
#[test]
fn an_exported_tower_holds_what_llama_cpp_loads() {
    let Some(checkpoint) = fixture("dense-demo-bf16") else { return };
    let dir = tempfile::tempdir().unwrap();
    exported(&checkpoint, dir.path(), None);
    let gguf = Gguf::open(&dir.path().join("mmproj-0.gguf")).unwrap();
    let depth = gguf.metadata().get("clip.vision.block_count").and_then(Key::unsigned).unwrap();
    let mut names = vec![
        "v.patch_embd.weight".to_owned(),
        "v.patch_embd.weight.1".into(),
        "v.position_embd.weight".into(),
    ];
    let mut both = |module: &str| names.extend(["weight", "bias"].map(|s| format!("{module}.{s}")));
    ["v.post_ln", "mm.0", "mm.2"].into_iter().for_each(&mut both);
    for n in 0..depth {
        for module in ["ln1", "ln2", "attn_qkv", "attn_out", "ffn_up", "ffn_down"] {
            both(&format!("v.blk.{n}.{module}"));
        }
    }
    names.push("v.patch_embd.bias".into());
    names.sort();
    let mut found: Vec<_> = gguf.tensors().map(|t| t.name.to_string()).collect();
    found.sort();
    assert_eq!(found, names);
    for (key, ty) in [
        ("general.architecture", "text"),
        ("clip.has_vision_encoder", "bool"),
        ("clip.projector_type", "text"),
        ("clip.use_gelu", "bool"),
        ("clip.vision.image_size", "u32"),
        ("clip.vision.patch_size", "u32"),
        ("clip.vision.embedding_length", "u32"),
        ("clip.vision.feed_forward_length", "u32"),
        ("clip.vision.projection_dim", "u32"),
        ("clip.vision.attention.head_count", "u32"),
        ("clip.vision.attention.layer_norm_epsilon", "f32"),
        ("clip.vision.spatial_merge_size", "u32"),
    ] {
        let value = gguf.metadata().get(key).unwrap_or_else(|| panic!("{key} is missing"));
        assert_eq!(value.value_type().name(), ty, "{key}");
    }
    for key in ["clip.vision.image_mean", "clip.vision.image_std"] {
        let Some(Key::Array(a)) = gguf.metadata().get(key) else { panic!("{key} is missing") };
        assert_eq!((a.element.name(), a.count), ("f32", 3), "{key}");
    }
}
