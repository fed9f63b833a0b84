//! How many bytes of weights a model has and one decoded token reads.

use infernix_engine::EngineError;
use infernix_engine::backend::WeightPart;
use infernix_engine::model::WeightSource;
use infernix_formats::RowShape;
use infernix_model::Ffn;

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
    for name in source.names() {
        let kept = name.starts_with("text/")
            && !["ngram_table", "ngram_scale", "expert_input_scales"].iter().any(|s| name.ends_with(s));
        if !kept {
            continue;
        }
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
    use infernix_engine::synthetic::{FORMATS, GEOMETRIES, build, sizes};

    #[test]
    fn a_built_model_has_the_sizes_it_was_planned_with() {
        let smallest = GEOMETRIES.iter().filter(|g| g.name.contains("test"));
        for geometry in smallest {
            for format in FORMATS {
                let planned = sizes(geometry, format).unwrap();
                let found = model_bytes(&build(geometry, format, 1).unwrap()).unwrap();
                assert_eq!(found.bytes, planned.bytes, "{} {format}", geometry.name);
                assert_eq!(found.parameters, planned.parameters, "{} {format}", geometry.name);
                assert_eq!(found.bytes_per_token, planned.bytes_per_token, "{} {format}", geometry.name);
            }
        }
    }
}
