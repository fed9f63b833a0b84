//! Block drafters (DFlash, DFlash2): their configuration and parameters. They are checkpoints of their own, with the
//! embedding and head of their target (model-math 7).

use serde_json::{Map, Value};

use crate::ModelError;
use crate::json::Object;
use crate::parameters::{Class, Component, Parameter, Rows, Source};

/// Convolutions around attention and MLP (DFlash2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrafterConv {
    /// Taps.
    pub kernel: u64,
    /// Channels that share a kernel.
    pub group: u64,
}

/// The candidate selector (DFlash2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrafterSelector {
    /// Width of the codebooks.
    pub rank: u64,
    /// Candidates a position.
    pub top_k: u64,
}

/// A checked drafter configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct DrafterConfig {
    /// `dflash` or `dflash2`.
    pub component: Component,
    /// Width, the target's.
    pub hidden: u64,
    /// Layers.
    pub layers: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Width of the MLP.
    pub intermediate: u64,
    /// Vocabulary, the target's.
    pub vocab: u64,
    /// Layers of the target.
    pub target_layers: u64,
    /// Target layers whose residuals it reads, 0-based.
    pub taps: Vec<u64>,
    /// Token id that stands for a position to be drafted.
    pub mask_token: u64,
    /// Positions of a block, the anchor included.
    pub block: u64,
    /// Convolutions, DFlash2 only.
    pub conv: Option<DrafterConv>,
    /// Selector, DFlash2 only.
    pub selector: Option<DrafterSelector>,
    raw: Map<String, Value>,
}

impl DrafterConfig {
    /// Whether a `config.json` is a drafter's.
    #[must_use]
    pub fn describes(root: &Value) -> bool {
        component(root).is_some()
    }

    /// Reads a drafter's `config.json`, or the configuration of its component in an artifact.
    ///
    /// # Errors
    /// Names the first key that is missing, out of range, or switches something on that drafters do not have.
    pub fn from_json(root: &Value) -> Result<Self, ModelError> {
        let top = Object::new(root, "")?;
        let component = component(root).ok_or_else(|| ModelError::UnknownArchitecture {
            found: root.get("architectures").cloned().unwrap_or_default().to_string(),
        })?;
        let own = top.object("dflash_config")?;
        let own = own.ok_or_else(|| ModelError::Missing { key: "dflash_config".into() })?;
        match top.str_opt("hidden_act")? {
            None | Some("silu") => {}
            Some(_) => return Err(top.reject("hidden_act", "\"silu\"")),
        }
        if top.bool_or("attention_bias", false)? {
            return Err(top.reject("attention_bias", "false"));
        }
        if own.bool_or("sample_from_anchor", false)? {
            return Err(own.reject("sample_from_anchor", "false"));
        }
        for key in ["logit_scale", "embedding_scale", "residual_scale"] {
            if own.get(key).is_some() && own.float_opt(key)? != Some(1.0) {
                return Err(own.reject(key, "1"));
            }
        }
        let target_layers = top.count("num_target_layers")?;
        let taps: Vec<u64> = own
            .array_opt("target_layer_ids")?
            .unwrap_or_default()
            .iter()
            .filter_map(Value::as_u64)
            .filter(|l| *l < target_layers)
            .collect();
        let named = own.array_opt("target_layer_ids")?.map_or(0, <[Value]>::len);
        if taps.is_empty() || taps.len() != named || taps.windows(2).any(|w| w[0] >= w[1]) {
            let expected = format!("ascending layers below num_target_layers {target_layers}");
            return Err(own.reject("target_layer_ids", &expected));
        }
        let second = component == Component::Dflash2;
        let config = Self {
            component,
            hidden: top.count("hidden_size")?,
            layers: top.count("num_hidden_layers")?,
            heads: top.count("num_attention_heads")?,
            kv_heads: top.count("num_key_value_heads")?,
            head_dim: top.count("head_dim")?,
            intermediate: top.count("intermediate_size")?,
            vocab: top.count("vocab_size")?,
            target_layers,
            taps,
            mask_token: own.count("mask_token_id")?,
            block: own.count("block_size")?,
            conv: if second {
                Some(DrafterConv {
                    kernel: own.count("conv_kernel_size")?,
                    group: own.count("conv_group_size")?,
                })
            } else {
                None
            },
            selector: if second {
                Some(DrafterSelector {
                    rank: own.count("selector_rank")?,
                    top_k: own.count("selector_top_k")?,
                })
            } else {
                None
            },
            raw: root.as_object().cloned().unwrap_or_default(),
        };
        if top.float_opt("rms_norm_eps")?.is_some_and(|v| !(v > 0.0 && v < 1.0)) {
            return Err(top.reject("rms_norm_eps", "a number between 0 and 1"));
        }
        if top.float_opt("rope_theta")?.is_some_and(|v| v <= 1.0) {
            return Err(top.reject("rope_theta", "a number above 1"));
        }
        own.check_tokens("mask_token_id", config.vocab)?;
        if config.layers > 4096 {
            return Err(top.reject("num_hidden_layers", "at most 4096"));
        }
        if config.heads % config.kv_heads != 0 {
            return Err(top.reject("num_key_value_heads", "a divisor of num_attention_heads"));
        }
        if let Some(c) = &config.conv
            && config.hidden % c.group != 0
        {
            return Err(own.reject("conv_group_size", "a divisor of hidden_size"));
        }
        Ok(config)
    }

    /// The configuration to store in an artifact: the source's keys.
    #[must_use]
    pub fn to_config(&self) -> Map<String, Value> {
        self.raw.clone()
    }

    /// Whether it drafts for such a model.
    ///
    /// # Errors
    /// Names the dimension that differs.
    pub fn fits(&self, target: &crate::ModelConfig) -> Result<(), ModelError> {
        for (what, own, other) in [
            ("hidden_size", self.hidden, target.hidden),
            ("vocab_size", self.vocab, target.vocab),
            ("num_target_layers", self.target_layers, target.layers.len() as u64),
        ] {
            if own != other {
                return Err(ModelError::Contradiction(format!(
                    "the drafter's {what} is {own}, its target has {other}"
                )));
            }
        }
        Ok(())
    }

    /// All parameters, in a fixed order.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut out = Vec::new();
        let (root, h) = (self.component.name(), self.hidden);
        let mut push = |layer: Option<usize>, name: String, class: Class, tensor: String, shape: &[u64]| {
            out.push(Parameter {
                name: format!("{root}/{name}"),
                component: self.component,
                class,
                layer,
                shape: shape.to_vec(),
                source: Source::Tensor { name: tensor, shape: shape.to_vec(), rows: Rows::All },
                optional: false,
            });
        };
        let taps = self.taps.len() as u64;
        push(None, "fc".into(), Class::DflashFc, "fc.weight".into(), &[h, taps * h]);
        push(None, "hidden_norm".into(), Class::DflashNorm, "hidden_norm.weight".into(), &[h]);
        push(None, "norm".into(), Class::DflashNorm, "norm.weight".into(), &[h]);
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for i in 0..self.layers {
            let (n, t, layer) = (format!("layers/{i}"), format!("layers.{i}"), Some(i as usize));
            for (part, tensor) in
                [("input_norm", "input_layernorm"), ("post_norm", "post_attention_layernorm")]
            {
                push(layer, format!("{n}/{part}"), Class::DflashNorm, format!("{t}.{tensor}.weight"), &[h]);
            }
            for (part, class, shape) in [
                ("q", Class::AttnQ, [queries, h]),
                ("k", Class::AttnK, [keys, h]),
                ("v", Class::AttnV, [keys, h]),
                ("o", Class::AttnO, [h, queries]),
            ] {
                push(
                    layer,
                    format!("{n}/attn/{part}"),
                    class,
                    format!("{t}.self_attn.{part}_proj.weight"),
                    &shape,
                );
            }
            for part in ["q_norm", "k_norm"] {
                let tensor = format!("{t}.self_attn.{part}.weight");
                push(layer, format!("{n}/attn/{part}"), Class::AttnNorm, tensor, &[self.head_dim]);
            }
            let wide = self.intermediate;
            for (part, class, shape) in [
                ("gate", Class::MlpGate, [wide, h]),
                ("up", Class::MlpUp, [wide, h]),
                ("down", Class::MlpDown, [h, wide]),
            ] {
                push(layer, format!("{n}/mlp/{part}"), class, format!("{t}.mlp.{part}_proj.weight"), &shape);
            }
            if let Some(c) = &self.conv {
                for (part, tensor) in [("attn_conv", "attention_conv"), ("mlp_conv", "mlp_conv")] {
                    let base = format!("{t}.{tensor}.base_kernel");
                    push(layer, format!("{n}/{part}/base"), Class::DflashConv, base, &[2, c.kernel, h]);
                    let projection = format!("{t}.{tensor}.kernel_projection.weight");
                    let shape = [2 * c.kernel * (h / c.group), h];
                    push(
                        layer,
                        format!("{n}/{part}/projection"),
                        Class::DflashConvProjection,
                        projection,
                        &shape,
                    );
                }
            }
        }
        if let Some(s) = &self.selector {
            let projection = "candidate_selector.hidden_projection.weight".to_owned();
            push(None, "selector/projection".into(), Class::DflashSelector, projection, &[s.rank, h]);
            for part in ["predecessor", "successor"] {
                let tensor = format!("candidate_selector.{part}_codebook");
                push(None, format!("selector/{part}"), Class::DflashCodebook, tensor, &[self.vocab, s.rank]);
            }
        }
        out
    }
}

fn component(root: &Value) -> Option<Component> {
    let classes = root.get("architectures")?.as_array()?;
    classes.iter().filter_map(Value::as_str).find_map(|class| match class {
        "DFlashDraftModel" => Some(Component::Dflash),
        "DFlash2DraftModel" => Some(Component::Dflash2),
        _ => None,
    })
}

/// The classes that drafters have.
#[must_use]
pub fn drafter_classes() -> &'static [Class] {
    &[
        Class::DflashFc,
        Class::DflashNorm,
        Class::DflashConv,
        Class::DflashConvProjection,
        Class::DflashSelector,
        Class::DflashCodebook,
        Class::AttnQ,
        Class::AttnK,
        Class::AttnV,
        Class::AttnO,
        Class::AttnNorm,
        Class::MlpGate,
        Class::MlpUp,
        Class::MlpDown,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn second() -> Value {
        json!({
            "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 512,
            "vocab_size": 4096, "num_target_layers": 8,
            "dflash_config": {
                "target_layer_ids": [1, 3, 5, 6], "mask_token_id": 4089, "block_size": 8, "conv_kernel_size": 2,
                "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16,
            },
        })
    }

    #[test]
    fn parameters_follow_the_generation() {
        let two = DrafterConfig::from_json(&second()).unwrap();
        // 3 outside the layers, 11 a layer, 4 of convolutions a layer, 3 of the selector.
        assert_eq!(two.parameters().len(), 3 + 3 * (11 + 4) + 3);
        let fc = &two.parameters()[0];
        assert_eq!((fc.name.as_str(), &fc.shape[..]), ("dflash2/fc", &[256, 1024][..]));
        let mut one = second();
        one["architectures"] = json!(["DFlashDraftModel"]);
        assert_eq!(DrafterConfig::from_json(&one).unwrap().parameters().len(), 3 + 3 * 11);
        let again = DrafterConfig::from_json(&Value::Object(two.to_config())).unwrap();
        assert_eq!(again, two);
    }

    #[test]
    fn broken_configurations_are_named() {
        for (key, value, named) in [
            ("target_layer_ids", json!([1, 8]), "target_layer_ids"),
            ("target_layer_ids", json!([3, 1]), "target_layer_ids"),
            ("selector_rank", json!(null), "selector_rank"),
            ("sample_from_anchor", json!(true), "sample_from_anchor"),
            ("conv_group_size", json!(7), "conv_group_size"),
            ("mask_token_id", json!(4096), "mask_token_id"),
        ] {
            let mut v = second();
            v["dflash_config"][key] = value;
            let message = DrafterConfig::from_json(&v).unwrap_err().to_string();
            assert!(message.contains(named), "{key}: {message}");
        }
        assert!(!DrafterConfig::describes(&json!({"architectures": ["Qwen3ForCausalLM"]})));
    }
}
