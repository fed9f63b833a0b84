//! The mixture models of the 3.5 family as NVIDIA's tools quantize them: NVFP4 experts, FP8 projections, BF16 elsewhere.
//! Dimensions are those of Qwen3.5-122B-A10B, or of a toy with the same proportions.

use serde_json::{Map, Value, json};

use super::fill::Fill;
use super::geometry::{Geometry, List, RMS_E4M3, RMS_NVFP4, Tensor};

/// Width of a head of attention, and of a head of the delta net.
const HEAD: u64 = 256;
const DELTA: u64 = 128;

struct Dims {
    hidden: u64,
    intermediate: u64,
    heads: u64,
    kv_heads: u64,
    key_heads: u64,
    value_heads: u64,
}

fn dims(small: bool) -> Dims {
    match small {
        false => {
            Dims { hidden: 3072, intermediate: 1024, heads: 32, kv_heads: 2, key_heads: 16, value_heads: 64 }
        }
        true => Dims { hidden: 256, intermediate: 64, heads: 4, kv_heads: 2, key_heads: 2, value_heads: 4 },
    }
}

impl List {
    fn fp8(&mut self, name: &str, n: u64, k: u64) {
        self.add(format!("{name}.weight"), "F8_E4M3", &[n, k], Fill::Codes8);
        let value = 1.0 / (RMS_E4M3 * (k as f32).sqrt());
        self.add(
            format!("{name}.weight_scale"),
            "F32",
            &[],
            Fill::F32 { value, key: format!("{name}.weight_scale") },
        );
        let value = 4.0 / 448.0;
        self.add(
            format!("{name}.input_scale"),
            "F32",
            &[],
            Fill::F32 { value, key: format!("{name}.input_scale") },
        );
    }

    fn nvfp4(&mut self, name: &str, shared: &str, n: u64, k: u64) {
        self.add(format!("{name}.weight"), "U8", &[n, k / 2], Fill::Codes4);
        self.add(format!("{name}.weight_scale"), "F8_E4M3", &[n, k / 16], Fill::Scales8);
        let value = 1.0 / (RMS_NVFP4 * (k as f32).sqrt());
        self.add(
            format!("{name}.weight_scale_2"),
            "F32",
            &[],
            Fill::F32 { value, key: format!("{shared}.weight") },
        );
        let value = 4.0 / (6.0 * 448.0);
        self.add(
            format!("{name}.input_scale"),
            "F32",
            &[],
            Fill::F32 { value, key: format!("{shared}.input") },
        );
    }
}

fn attention(list: &mut List, p: &str, d: &Dims, quantized: bool) {
    let h = d.hidden;
    let shapes = [
        ("q_proj", 2 * d.heads * HEAD, h),
        ("k_proj", d.kv_heads * HEAD, h),
        ("v_proj", d.kv_heads * HEAD, h),
        ("o_proj", h, d.heads * HEAD),
    ];
    for (name, n, k) in shapes {
        let name = format!("{p}self_attn.{name}");
        if quantized { list.fp8(&name, n, k) } else { list.bf16(format!("{name}.weight"), &[n, k]) }
    }
    list.bf16(format!("{p}self_attn.q_norm.weight"), &[HEAD]);
    list.bf16(format!("{p}self_attn.k_norm.weight"), &[HEAD]);
}

fn delta_net(list: &mut List, p: &str, d: &Dims) {
    let (h, p, v) = (d.hidden, format!("{p}linear_attn."), d.value_heads);
    let channels = (2 * d.key_heads + v) * DELTA;
    list.add(format!("{p}A_log"), "BF16", &[v], Fill::Bf16 { low: 0.0, high: 2.77 });
    list.add(format!("{p}dt_bias"), "BF16", &[v], Fill::Bf16 { low: -6.0, high: -2.0 });
    list.bf16(format!("{p}conv1d.weight"), &[channels, 1, 4]);
    list.fp8(&format!("{p}in_proj_qkv"), channels, h);
    list.fp8(&format!("{p}in_proj_z"), v * DELTA, h);
    list.bf16(format!("{p}in_proj_a.weight"), &[v, h]);
    list.bf16(format!("{p}in_proj_b.weight"), &[v, h]);
    list.add(format!("{p}norm.weight"), "BF16", &[DELTA], Fill::Bf16 { low: 0.9, high: 1.1 });
    list.fp8(&format!("{p}out_proj"), h, v * DELTA);
}

fn mixture(list: &mut List, p: &str, d: &Dims, experts: u64, quantized: bool) {
    let (h, i) = (d.hidden, d.intermediate);
    list.bf16(format!("{p}mlp.gate.weight"), &[experts, h]);
    list.bf16(format!("{p}mlp.shared_expert_gate.weight"), &[1, h]);
    for (name, n, k) in [("gate", i, h), ("up", i, h), ("down", h, i)] {
        list.bf16(format!("{p}mlp.shared_expert.{name}_proj.weight"), &[n, k]);
    }
    if !quantized {
        list.bf16(format!("{p}mlp.experts.gate_up_proj"), &[experts, 2 * i, h]);
        list.bf16(format!("{p}mlp.experts.down_proj"), &[experts, h, i]);
        return;
    }
    for e in 0..experts {
        for (name, n, k) in [("gate", i, h), ("up", i, h), ("down", h, i)] {
            // Gate and up of an expert share both scalars.
            let shared = if name == "down" { "down" } else { "gate_up" };
            let q = format!("{p}mlp.experts.{e}");
            list.nvfp4(&format!("{q}.{name}_proj"), &format!("{q}.{shared}"), n, k);
        }
    }
}

/// Every tensor, in the order of the files.
pub(super) fn tensors(g: &Geometry, small: bool) -> Vec<Tensor> {
    const T: &str = "model.language_model.";
    let (d, mut list) = (dims(small), List::default());
    let h = d.hidden;
    list.bf16(format!("{T}embed_tokens.weight"), &[g.vocab, h]);
    list.bf16("lm_head.weight".to_owned(), &[g.vocab, h]);
    list.bf16(format!("{T}norm.weight"), &[h]);
    let norms = |list: &mut List, p: &str| {
        list.bf16(format!("{p}input_layernorm.weight"), &[h]);
        list.bf16(format!("{p}post_attention_layernorm.weight"), &[h]);
    };
    for i in 0..g.layers {
        let p = format!("{T}layers.{i}.");
        norms(&mut list, &p);
        if i % 4 == 3 {
            attention(&mut list, &p, &d, true)
        } else {
            delta_net(&mut list, &p, &d)
        }
        mixture(&mut list, &p, &d, g.experts, true);
    }
    if g.mtp {
        list.bf16("mtp.fc.weight".to_owned(), &[h, 2 * h]);
        for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
            list.bf16(format!("mtp.{name}.weight"), &[h]);
        }
        norms(&mut list, "mtp.layers.0.");
        attention(&mut list, "mtp.layers.0.", &d, false);
        mixture(&mut list, "mtp.layers.0.", &d, g.experts, false);
    }
    list.tensors
}

fn quantized_layers(g: &Geometry) -> Value {
    let mut layers = Map::new();
    for i in 0..g.layers {
        let p = format!("model.language_model.layers.{i}.");
        layers.insert(format!("{p}mlp.experts"), json!({"quant_algo": "NVFP4", "group_size": 16}));
        let names: &[&str] = match i % 4 {
            3 => &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
            _ => &["linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"],
        };
        for name in names {
            layers.insert(format!("{p}{name}"), json!({"quant_algo": "FP8"}));
        }
    }
    layers.into()
}

/// The quantization part of both configurations.
pub(super) fn quantization(g: &Geometry) -> Value {
    json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": quantized_layers(g),
        "ignore": ["lm_head", "model.language_model.embed_tokens", "model.visual*", "mtp*"]})
}

/// `config.json`.
pub(super) fn config(g: &Geometry, small: bool) -> Value {
    let (d, t) = (dims(small), &g.tokens);
    let mut quantization = quantization(g);
    quantization["quant_method"] = json!("modelopt");
    let kinds: Vec<&str> =
        (0..g.layers).map(|i| if i % 4 == 3 { "full_attention" } else { "linear_attention" }).collect();
    json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "image_token_id": t.image, "video_token_id": t.video, "vision_start_token_id": t.vision_start,
        "vision_end_token_id": t.vision_end, "tie_word_embeddings": false, "quantization_config": quantization,
        "text_config": {
            "model_type": "qwen3_5_moe_text", "vocab_size": g.vocab, "hidden_size": d.hidden,
            "num_hidden_layers": g.layers, "layer_types": kinds, "num_attention_heads": d.heads,
            "num_key_value_heads": d.kv_heads, "head_dim": HEAD, "hidden_act": "silu", "attention_bias": false,
            "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10], "mrope_interleaved": true},
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": DELTA, "linear_value_head_dim": DELTA,
            "linear_num_key_heads": d.key_heads, "linear_num_value_heads": d.value_heads,
            "moe_intermediate_size": d.intermediate, "shared_expert_intermediate_size": d.intermediate,
            "num_experts": g.experts, "num_experts_per_tok": 8.min(g.experts), "norm_topk_prob": true,
            "mamba_ssm_dtype": "float32", "eos_token_id": t.eos, "mtp_num_hidden_layers": u64::from(g.mtp),
        },
    })
}
