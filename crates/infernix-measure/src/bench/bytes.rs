//! How many bytes of weights a model has and one decoded token reads.

use infernix_engine::EngineError;
use infernix_engine::backend::WeightPart;
use infernix_engine::model::WeightSource;
use infernix_formats::RowShape;
use infernix_model::Ffn;
use std::collections::BTreeMap;

/// Sizes of a model's text weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelBytes {
    /// Values.
    pub parameters: u64,
    /// Bytes of their words.
    pub bytes: u64,
    /// Bytes a decoded token reads: all but the embedding table (one row of it is neglected) and the experts that are
    /// not chosen. State and KV pages are not weights and not counted.
    pub bytes_per_token: u64,
}

/// Sizes of the text component of a source; an n-gram table, read row by row from its volume, is not counted.
///
/// # Errors
/// A weight that the source cannot give.
pub fn model_bytes(source: &dyn WeightSource) -> Result<ModelBytes, EngineError> {
    let mut all = ModelBytes::default();
    for name in counted(source) {
        let data = source.weight(&name)?;
        let bytes: u64 = data.parts.iter().map(part_bytes).sum();
        let bank = data.parts.iter().any(|p| p.layout.is_bank());
        let values: u64 = data.shape.iter().product();
        all.parameters += if bank { 3 * values } else { values };
        all.bytes += bytes;
        all.bytes_per_token += match &source.config().ffn {
            _ if name == "text/embed" => 0,
            Ffn::Moe(m) if name.contains("/moe/experts") => bytes / m.experts.max(1) * m.top_k,
            _ => bytes,
        };
    }
    Ok(all)
}

/// Names of the weights that count.
fn counted(source: &dyn WeightSource) -> impl Iterator<Item = String> {
    let left_out = ["ngram_table", "ngram_scale", "expert_input_scales"];
    let kept = move |n: &String| n.starts_with("text/") && !left_out.iter().any(|s| n.ends_with(s));
    source.names().into_iter().filter(kept)
}

/// The format that most parameters of the text component have, by its container name; empty without any.
///
/// # Errors
/// A weight that the source cannot give.
pub fn dominant_format(source: &dyn WeightSource) -> Result<String, EngineError> {
    let all = values_by_format(source)?;
    Ok(all.into_iter().max_by_key(|v| v.1).map_or_else(String::new, |v| v.0))
}

fn values_by_format(source: &dyn WeightSource) -> Result<BTreeMap<String, u64>, EngineError> {
    let mut all = BTreeMap::new();
    for name in counted(source) {
        for part in source.weight(&name)?.parts {
            let own = part.rows.end - part.rows.start;
            // A bank of shape [experts, hidden, intermediate] holds gate, up and down.
            let values = match part.layout.is_bank() {
                true => 3 * part.shape.iter().product::<u64>(),
                false => own * part.shape.last().copied().unwrap_or(1),
            };
            *all.entry(part.format.to_string()).or_default() += values;
        }
    }
    Ok(all)
}

/// Bytes of the rows of an object that belong to a weight.
pub(crate) fn part_bytes(part: &WeightPart) -> u64 {
    let all = (*part.bytes).as_ref().len() as u64;
    if part.layout.is_bank() {
        return all;
    }
    let rows = RowShape::of(&part.shape).map_or(1, |s| s.rows).max(1);
    let own = part.rows.end - part.rows.start;
    if own == rows { all } else { (u128::from(all) * u128::from(own) / u128::from(rows)) as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use infernix_engine::synthetic::{FORMATS, GEOMETRIES, Geometry, build, sizes};
    use infernix_formats::Format;

    #[test]
    fn a_built_model_has_the_sizes_it_was_planned_with() {
        let smallest = GEOMETRIES.iter().filter(|g| g.name.contains("test"));
        for geometry in smallest {
            for format in FORMATS {
                let planned = sizes(geometry, format).unwrap();
                let source = build(geometry, format, 1).unwrap();
                let found = model_bytes(&source).unwrap();
                assert_eq!(found.bytes, planned.bytes, "{} {format}", geometry.name);
                assert_eq!(found.parameters, planned.parameters, "{} {format}", geometry.name);
                assert_eq!(found.bytes_per_token, planned.bytes_per_token, "{} {format}", geometry.name);
                let by_format = values_by_format(&source).unwrap();
                assert_eq!(by_format.values().sum::<u64>(), planned.parameters, "{by_format:?}");
            }
        }
    }

    #[test]
    fn an_expert_bank_counts_with_all_three_matrices() {
        let geometry = Geometry::find("qwen3_5_moe_test").unwrap();
        let source = build(&geometry, Format::Nvfp4Mul, 1).unwrap();
        let banks = source.names().into_iter().filter(|n| n.ends_with("/moe/experts"));
        let values: u64 = banks.map(|n| 3 * source.weight(&n).unwrap().shape.iter().product::<u64>()).sum();
        let by_format = values_by_format(&source).unwrap();
        assert!(values > 0 && by_format.values().any(|v| *v >= values), "{values} in {by_format:?}");
    }
}
