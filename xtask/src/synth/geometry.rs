//! The tensors of the release, and its configs. Dimensions are those of nvidia/Qwen3.8-Flash-Next-NVFP4.

use serde_json::{Value, json};

use super::Tokens;
use super::fill::Fill;
use super::ngram;

/// Width of the residual; there are 4 streams of it.
const H: u64 = 2560;
/// Intermediate width of routed and shared experts.
const I: u64 = 640;
/// Parts of the n-gram table.
const PARTS: u64 = 128;
/// Width of a table row.
const ROW: u64 = 160;
/// Width and intermediate width of the image tower.
const D: u64 = 1152;
const F: u64 = 4304;

/// Root mean square of a uniform E2M1 code times a scale of `Fill::Scales8`.
pub(super) const RMS_NVFP4: f32 = 3.39;
/// Root mean square of a uniform finite E4M3 code.
pub(super) const RMS_E4M3: f32 = 107.2;

/// A tensor to be written.
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) fill: Fill,
    /// Whether it belongs into the file of the drafter and the table.
    pub(crate) side: bool,
}

impl Tensor {
    pub(crate) fn bytes(&self) -> u64 {
        let width = match self.dtype {
            "BF16" => 2,
            "F32" => 4,
            "I64" => 8,
            _ => 1,
        };
        self.shape.iter().product::<u64>() * width
    }
}

/// Which release is imitated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// nvidia/Qwen3.8-Flash-Next-NVFP4.
    Flash,
    /// Qwen3.5-122B-A10B in NVFP4, or a toy of it.
    Moe { small: bool },
}

/// What varies.
pub(crate) struct Geometry {
    pub(crate) family: Family,
    pub(crate) layers: u64,
    pub(crate) experts: u64,
    pub(crate) vocab: u64,
    pub(crate) base: u64,
    pub(crate) mtp: bool,
    pub(crate) vision: bool,
    pub(crate) tokens: Tokens,
}

#[derive(Default)]
pub(super) struct List {
    pub(super) tensors: Vec<Tensor>,
    side: bool,
}

impl List {
    pub(super) fn add(&mut self, name: String, dtype: &'static str, shape: &[u64], fill: Fill) {
        self.tensors.push(Tensor { name, dtype, shape: shape.to_vec(), fill, side: self.side });
    }

    /// A BF16 tensor. Linear weights keep the root mean square of their input; vectors are small, which is a
    /// factor near 1 for a zero-centred norm.
    pub(super) fn bf16(&mut self, name: String, shape: &[u64]) {
        let bound = match *shape {
            [_] => 0.1,
            [.., k] => (3.0 / k as f32).sqrt(),
            [] => 1.0,
        };
        self.add(name, "BF16", shape, Fill::Bf16 { low: -bound, high: bound });
    }

    fn mixer(&mut self, p: &str, inject: bool) {
        self.bf16(format!("{p}hc_norm.weight"), &[4 * H]);
        self.bf16(format!("{p}input_mix_weight_down.weight"), &[320, 4 * H]);
        self.bf16(format!("{p}input_mix_weight_up.weight"), &[4 * H, 320]);
        if inject {
            self.bf16(format!("{p}block_inject_weight.weight"), &[4, 4 * H]);
        }
    }

    fn attention(&mut self, p: &str) {
        let shapes: [(&str, &[u64]); 9] = [
            ("q_proj", &[12288, H]),
            ("k_proj", &[512, H]),
            ("v_proj", &[512, H]),
            ("o_proj", &[H, 6144]),
            ("q_norm", &[256]),
            ("k_norm", &[256]),
            ("indexer.index_qk_proj", &[640, H]),
            ("indexer.q_layernorm", &[128]),
            ("indexer.k_layernorm", &[128]),
        ];
        for (name, shape) in shapes {
            self.bf16(format!("{p}self_attn.{name}.weight"), shape);
        }
    }

    fn delta_net(&mut self, p: &str) {
        let p = format!("{p}linear_attn.");
        // Decay rates exp(A_log) of 1 to 16 and time steps that let the state live for some tokens.
        self.add(format!("{p}A_log"), "BF16", &[48], Fill::Bf16 { low: 0.0, high: 2.77 });
        self.add(format!("{p}dt_bias"), "BF16", &[48], Fill::Bf16 { low: -6.0, high: -2.0 });
        self.bf16(format!("{p}conv1d.weight"), &[10240, 1, 4]);
        self.bf16(format!("{p}in_proj_qkv.weight"), &[10240, H]);
        self.bf16(format!("{p}in_proj_z.weight"), &[6144, H]);
        self.bf16(format!("{p}in_proj_a.weight"), &[48, H]);
        self.bf16(format!("{p}in_proj_b.weight"), &[48, H]);
        // The one norm that is not zero-centred.
        self.add(format!("{p}norm.weight"), "BF16", &[128], Fill::Bf16 { low: 0.9, high: 1.1 });
        self.bf16(format!("{p}out_proj.weight"), &[H, 6144]);
    }

    fn shared_expert(&mut self, p: &str, experts: u64) {
        self.bf16(format!("{p}mlp.gate.weight"), &[experts, H]);
        self.bf16(format!("{p}mlp.shared_expert_gate.weight"), &[1, H]);
        for (name, n, k) in [("gate_proj", I, H), ("up_proj", I, H), ("down_proj", H, I)] {
            self.bf16(format!("{p}mlp.shared_expert.{name}.weight"), &[n, k]);
        }
    }

    fn nvfp4_experts(&mut self, p: &str, experts: u64) {
        for e in 0..experts {
            for (name, n, k) in [("gate", I, H), ("up", I, H), ("down", H, I)] {
                let q = format!("{p}mlp.experts.{e}.{name}_proj");
                // Gate and up of an expert share both scalars, as in the release.
                let shared = if name == "down" { "down" } else { "gate_up" };
                let key = |what: &str| format!("{p}mlp.experts.{e}.{shared}.{what}");
                self.add(format!("{q}.weight"), "U8", &[n, k / 2], Fill::Codes4);
                self.add(format!("{q}.weight_scale"), "F8_E4M3", &[n, k / 16], Fill::Scales8);
                let value = 1.0 / (RMS_NVFP4 * (k as f32).sqrt());
                self.add(format!("{q}.weight_scale_2"), "F32", &[], Fill::F32 { value, key: key("weight") });
                // Largest activation about 4, over the largest value of 4-bit codes times scales.
                let value = 4.0 / (6.0 * 448.0);
                self.add(format!("{q}.input_scale"), "F32", &[], Fill::F32 { value, key: key("input") });
            }
        }
    }

    fn fp8_experts(&mut self, p: &str, experts: u64) {
        for e in 0..experts {
            for (name, n, k) in [("gate", I, H), ("up", I, H), ("down", H, I)] {
                let q = format!("{p}mlp.experts.{e}.{name}_proj");
                self.add(format!("{q}.weight"), "F8_E4M3", &[n, k], Fill::Codes8);
                let scale = 1.0 / (RMS_E4M3 * (k as f32).sqrt());
                let fill = Fill::Bf16 { low: scale * 0.8, high: scale * 1.2 };
                self.add(format!("{q}.weight_scale_inv"), "BF16", &[n.div_ceil(128), k.div_ceil(128)], fill);
            }
        }
    }

    fn vision(&mut self) {
        let v = "model.visual.";
        let mut both = |name: String, n: u64, k: u64| {
            let shape = [n, k];
            self.bf16(format!("{name}.weight"), if k == 0 { &shape[..1] } else { &shape });
            self.bf16(format!("{name}.bias"), &[n]);
        };
        for b in 0..27 {
            let q = format!("{v}blocks.{b}.");
            both(format!("{q}norm1"), D, 0);
            both(format!("{q}norm2"), D, 0);
            both(format!("{q}attn.qkv"), 3 * D, D);
            both(format!("{q}attn.proj"), D, D);
            both(format!("{q}mlp.linear_fc1"), F, D);
            both(format!("{q}mlp.linear_fc2"), D, F);
        }
        both(format!("{v}merger.norm"), D, 0);
        both(format!("{v}merger.linear_fc1"), 4 * D, 4 * D);
        both(format!("{v}merger.linear_fc2"), H, 4 * D);
        self.bf16(format!("{v}patch_embed.proj.weight"), &[D, 3, 2, 16, 16]);
        self.bf16(format!("{v}patch_embed.proj.bias"), &[D]);
        self.bf16(format!("{v}pos_embed.weight"), &[2304, D]);
    }
}

impl Geometry {
    fn layer_types(&self) -> Vec<&'static str> {
        (0..self.layers).map(|i| if i % 4 == 3 { "full_attention" } else { "linear_attention" }).collect()
    }

    /// Every tensor, in the order of the files.
    pub(crate) fn tensors(&self) -> Vec<Tensor> {
        const T: &str = "model.language_model.";
        if let Family::Moe { small } = self.family {
            return super::moe::tensors(self, small);
        }
        let mut list = List::default();
        list.bf16(format!("{T}embed_tokens.weight"), &[self.vocab, H]);
        list.bf16("lm_head.weight".to_owned(), &[self.vocab, H]);
        list.mixer(&format!("{T}hyper_connection_mixer."), false);
        for i in 0..self.layers {
            let p = format!("{T}layers.{i}.");
            list.mixer(&format!("{p}attn_hyper_connection."), true);
            list.mixer(&format!("{p}mlp_hyper_connection."), true);
            if i % 4 == 3 {
                list.attention(&p);
            } else {
                list.delta_net(&p);
            }
            list.shared_expert(&p, self.experts);
            list.nvfp4_experts(&p, self.experts);
        }
        let p = format!("{T}layers.1.ple.");
        list.bf16(format!("{p}key_proj.weight"), &[4 * H, H]);
        list.bf16(format!("{p}value_proj.weight"), &[H, H]);
        for name in ["norm_key", "norm_query", "norm_conv"] {
            list.bf16(format!("{p}{name}.weight"), &[4 * H]);
        }
        list.bf16(format!("{p}conv1d.weight"), &[4 * H, 1, 4]);
        let c = ngram::constants(self.base, self.vocab);
        let e = format!("{p}ple_embedding.");
        for (name, words) in [
            ("layer_multipliers", c.multipliers),
            ("ngram_heads_vocab_sizes", c.sizes),
            ("ngram_heads_offsets", c.offsets),
        ] {
            list.add(format!("{e}{name}"), "I64", &[words.len() as u64], Fill::I64(words));
        }
        if self.vision {
            list.vision();
        }
        list.side = true;
        for part in 0..PARTS {
            let name = format!("{e}ngram_embedding.shard_{part}.weight");
            list.add(name, "F8_E4M3", &[c.rows / PARTS, ROW], Fill::Codes8);
        }
        let fill = Fill::Bf16 { low: 0.5 / RMS_E4M3, high: 1.0 / RMS_E4M3 };
        list.add(format!("{e}ngram_embedding.weight_scale"), "BF16", &[1], fill);
        if self.mtp {
            list.bf16("mtp.pre_fc_norm_embedding.weight".to_owned(), &[H]);
            list.bf16("mtp.pre_fc_norm_hidden.weight".to_owned(), &[4 * H]);
            list.bf16("mtp.fc_embedding.weight".to_owned(), &[H, H]);
            list.bf16("mtp.fc_hidden.weight".to_owned(), &[H, H]);
            list.mixer("mtp.hyper_connection_mixer.", false);
            let m = "mtp.layers.0.";
            list.mixer(&format!("{m}attn_hyper_connection."), true);
            list.mixer(&format!("{m}mlp_hyper_connection."), true);
            list.attention(m);
            list.shared_expert(m, self.experts);
            list.fp8_experts(m, self.experts);
        }
        list.tensors
    }

    fn quantized_layers(&self) -> Value {
        let mut layers = serde_json::Map::new();
        for i in 0..self.layers {
            let nvfp4 = json!({"quant_algo": "NVFP4", "group_size": 16});
            layers.insert(format!("model.language_model.layers.{i}.mlp.experts"), nvfp4);
        }
        if self.mtp {
            let fp8 = json!({"quant_algo": "FP8_PB_WO", "group_size": 128});
            layers.insert("mtp.layers.0.mlp.experts".to_owned(), fp8);
        }
        let table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";
        layers.insert(table.to_owned(), json!({"quant_algo": "FP8"}));
        layers.into()
    }

    /// `config.json`.
    pub(crate) fn config(&self) -> Value {
        if let Family::Moe { small } = self.family {
            return super::moe::config(self, small);
        }
        let t = &self.tokens;
        let mut text = json!({
            "model_type": "qwen4_exp_text", "vocab_size": self.vocab, "hidden_size": H, "num_hidden_layers": self.layers,
            "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu",
            "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "attention_bias": false,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10], "mrope_interleaved": true},
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 48,
            "moe_intermediate_size": I, "shared_expert_intermediate_size": I, "num_experts": self.experts,
            "num_experts_per_tok": 10, "norm_topk_prob": true, "mamba_ssm_dtype": "float32",
            "layer_types": self.layer_types(), "hc_count": 4, "hc_lowrank": 320,
            "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ngram_size": 3,
            "heads_per_ngram": 8, "ngram_vocab_size_base": self.base, "make_ngram_vocab_size_divisible_by": 128,
            "split_ngram_parts": PARTS,
        });
        let more = json!({
            "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
            "indexer_compress_ratio": 4, "output_gate_type": "sigmoid", "eos_token_id": t.eos, "bos_token_id": t.eos,
            "mtp_num_hidden_layers": u64::from(self.mtp), "mtp_use_dedicated_embeddings": false,
            "ple_embedding_dtype": "float8_e4m3fn",
        });
        let mut config = json!({
            "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
            "image_token_id": t.image, "video_token_id": t.video,
            "vision_start_token_id": t.vision_start, "vision_end_token_id": t.vision_end,
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                "producer": {"name": "xtask synth"}, "ignore": ["lm_head", "model.language_model.embed_tokens", "model.visual*"],
                "quantized_layers": self.quantized_layers()},
            "tie_word_embeddings": false,
        });
        if let (Some(text), Value::Object(more)) = (text.as_object_mut(), more) {
            text.extend(more);
            if self.mtp {
                let drafter = json!({"layer_types": ["full_attention"], "num_hidden_layers": 1, "rope_theta": 10_000_000});
                text.insert("mtp".to_owned(), drafter);
            }
        }
        config["text_config"] = text;
        if self.vision {
            config["vision_config"] = json!({
                "model_type": "qwen4_exp_vision", "depth": 27, "hidden_size": D, "intermediate_size": F, "num_heads": 16,
                "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
                "num_position_embeddings": 2304, "out_hidden_size": H, "hidden_act": "gelu_pytorch_tanh",
                "deepstack_visual_indexes": [],
            });
        }
        config
    }

    /// `hf_quant_config.json`.
    pub(crate) fn quant_config(&self) -> Value {
        if self.family != Family::Flash {
            return json!({"producer": {"name": "xtask synth"}, "quantization": super::moe::quantization(self)});
        }
        json!({"producer": {"name": "xtask synth"}, "quantization": {"quant_algo": "MIXED_PRECISION", "group_size": 16,
            "kv_cache_quant_algo": null, "exclude_modules": ["lm_head", "model.language_model.embed_tokens", "model.visual*"],
            "quantized_layers": self.quantized_layers()}})
    }
}
