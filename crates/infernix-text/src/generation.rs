//! Generation defaults: `generation_config.json`, the ids that end a turn, and the published sampling
//! presets of the model families.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Result, TextError, parse_error};
use crate::tokenizer::Tokenizer;

/// Sampling parameters, each absent where nothing sets it. Later layers (preset, command line,
/// request) override earlier ones through [`Sampling::or`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// 0 is greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// Nucleus mass in (0, 1].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// 0 is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Least probability relative to the most likely token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// Subtracted once from tokens that the output has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub presence_penalty: Option<f64>,
    /// Subtracted per occurrence in the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequency_penalty: Option<f64>,
    /// Factor for tokens of prompt and output; 1 is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f64>,
}

impl Sampling {
    /// Fields of `self`, and of `other` where `self` has none.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            temperature: self.temperature.or(other.temperature),
            top_p: self.top_p.or(other.top_p),
            top_k: self.top_k.or(other.top_k),
            min_p: self.min_p.or(other.min_p),
            presence_penalty: self.presence_penalty.or(other.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(other.frequency_penalty),
            repetition_penalty: self.repetition_penalty.or(other.repetition_penalty),
        }
    }

    /// The same without penalties. Constrained content must not inherit a preset's: a presence
    /// penalty pushes structured answers away from their own punctuation.
    #[must_use]
    pub fn without_penalties(self) -> Self {
        Self { presence_penalty: None, frequency_penalty: None, repetition_penalty: None, ..self }
    }

    /// The published preset of a family (spec of the models, sampling presets).
    #[must_use]
    pub fn preset(family: Family, thinking: bool) -> Self {
        let (temperature, top_p, presence) = match (thinking, family) {
            (true, Family::Moe35b) => (1.0, 0.95, 1.5),
            (true, Family::Standard) => (1.0, 0.95, 0.0),
            (false, _) => (0.7, 0.8, 1.5),
        };
        Self {
            temperature: Some(temperature),
            top_p: Some(top_p),
            top_k: Some(20),
            min_p: Some(0.0),
            presence_penalty: Some(presence),
            frequency_penalty: Some(0.0),
            repetition_penalty: None,
        }
    }
}

/// Families whose presets differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Family {
    /// Flash-Next, 27B and everything without a preset of its own.
    #[default]
    Standard,
    /// 35B-A3B: thinks with a presence penalty.
    Moe35b,
}

/// `generation_config.json`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Sampling parameters the file sets; `do_sample: false` is temperature 0.
    pub sampling: Sampling,
    /// Ids that end a turn, in file order.
    pub eos: Vec<u32>,
    /// Begin of sequence, never prepended by a chat prompt.
    pub bos: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Fields that are present and not understood.
    pub unknown: Vec<String>,
}

impl GenerationDefaults {
    /// Reads the file's bytes.
    ///
    /// # Errors
    /// Invalid JSON, or a known field of the wrong type or out of its range.
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        const FILE: &str = "generation_config.json";
        let map: serde_json::Map<String, Value> =
            serde_json::from_slice(bytes).map_err(|e| parse_error(FILE, &e))?;
        let mut out = Self::default();
        let mut greedy = false;
        for (name, value) in &map {
            let wrong = |expected: &str| TextError::Parse {
                file: FILE.to_owned(),
                message: format!("{name} is {value}, expected {expected}"),
            };
            let number = |low: f64, high: f64| -> Result<Option<f64>> {
                match value {
                    Value::Null => Ok(None),
                    v => v
                        .as_f64()
                        .filter(|x| (low..=high).contains(x))
                        .map(Some)
                        .ok_or_else(|| wrong(&format!("a number in {low}..={high}"))),
                }
            };
            match name.as_str() {
                "temperature" => out.sampling.temperature = number(0.0, 100.0)?,
                "top_p" => out.sampling.top_p = number(0.0, 1.0)?,
                "min_p" => out.sampling.min_p = number(0.0, 1.0)?,
                "presence_penalty" => out.sampling.presence_penalty = number(-10.0, 10.0)?,
                "frequency_penalty" => out.sampling.frequency_penalty = number(-10.0, 10.0)?,
                "repetition_penalty" => out.sampling.repetition_penalty = number(0.0, 100.0)?,
                "top_k" => out.sampling.top_k = optional_id(value, &wrong)?,
                "do_sample" => greedy = value == &Value::Bool(false),
                "eos_token_id" => out.eos = ids(value, &wrong)?,
                "bos_token_id" => out.bos = ids(value, &wrong)?.first().copied(),
                "pad_token_id" => out.pad = ids(value, &wrong)?.first().copied(),
                "transformers_version" | "_from_model_config" => {}
                _ => out.unknown.push(name.clone()),
            }
        }
        if greedy {
            out.sampling.temperature = Some(0.0);
        }
        Ok(out)
    }

    /// All ids that end a turn: those of the file and the tokenizer's own end token. Ascending.
    #[must_use]
    pub fn stop_ids(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let named = tokenizer.named_tokens().eos.as_deref();
        let ids: BTreeSet<u32> = self
            .eos
            .iter()
            .copied()
            .chain(named.and_then(|name| tokenizer.token_id(name)))
            .filter(|&id| tokenizer.is_token(id))
            .collect();
        ids.into_iter().collect()
    }
}

fn optional_id(value: &Value, wrong: &dyn Fn(&str) -> TextError) -> Result<Option<u32>> {
    match value {
        Value::Null => Ok(None),
        v => v
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .map(Some)
            .ok_or_else(|| wrong("a non-negative integer")),
    }
}

fn ids(value: &Value, wrong: &dyn Fn(&str) -> TextError) -> Result<Vec<u32>> {
    match value {
        Value::Array(list) => {
            list.iter().map(|v| optional_id(v, wrong)?.ok_or_else(|| wrong("a list of ids"))).collect()
        }
        v => Ok(optional_id(v, wrong)?.into_iter().collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_one_or_many_ends_and_greedy() {
        let d = GenerationDefaults::from_json(
            br#"{"eos_token_id": [4085, 4083], "temperature": 0.7, "top_k": 20, "transformers_version": "5", "x": 1}"#,
        )
        .expect("valid");
        assert_eq!(d.eos, [4085, 4083]);
        assert_eq!(d.sampling.top_k, Some(20));
        assert_eq!(d.unknown, ["x"]);
        let d = GenerationDefaults::from_json(
            br#"{"eos_token_id": 7, "do_sample": false, "temperature": 0.9, "pad_token_id": null}"#,
        )
        .expect("valid");
        assert_eq!((d.eos, d.pad), (vec![7], None));
        assert_eq!(d.sampling.temperature, Some(0.0));
        for bad in [r#"{"eos_token_id": "x"}"#, r#"{"top_p": 2}"#, r#"{"top_k": -1}"#, "[]"] {
            assert!(GenerationDefaults::from_json(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn layers_override_field_by_field() {
        let request = Sampling { top_p: Some(0.5), ..Sampling::default() };
        let merged = request.or(Sampling::preset(Family::Moe35b, true));
        assert_eq!((merged.top_p, merged.presence_penalty), (Some(0.5), Some(1.5)));
        assert_eq!(merged.without_penalties().presence_penalty, None);
        assert_eq!(Sampling::preset(Family::Standard, false).temperature, Some(0.7));
    }
}
