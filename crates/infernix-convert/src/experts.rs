//! Where a layer's routed experts lie: fused 3-D tensors or one set of tensors per expert.

use infernix_checkpoint::Scheme;
use infernix_formats::Format;
use infernix_formats::expert_bank::ExpertMatrix;
use infernix_model::Parameter;

use crate::ConvertError;
use crate::plan::{Content, Segment};
use crate::sources::{Sources, WeightRef};

/// Routed experts of one layer.
pub(crate) struct ExpertSource {
    pub(crate) source: usize,
    /// Scheme of every gate matrix; of the others too but in blocks of a GGUF file.
    pub(crate) scheme: Scheme,
    /// Schemes of gate, up and down.
    schemes: [Scheme; 3],
    /// `gate_up_proj` [E,2I,H] and `down_proj` [E,H,I].
    pub(crate) fused: bool,
    /// File and tensor of the first matrix, for messages.
    pub(crate) file: String,
    pub(crate) example: String,
}

/// Base name of an expert's matrix.
pub(crate) fn matrix_name(prefix: &str, expert: u64, matrix: ExpertMatrix) -> String {
    format!("{prefix}.{expert}.{}_proj", matrix.name())
}

impl ExpertSource {
    /// Finds the experts of a parameter (shape [E,H,I], or [E,3] for its scales), checks every matrix and marks it
    /// used. Missing ones go to `missing`; `None` if there are none at all.
    pub(crate) fn find(
        sources: &Sources,
        p: &Parameter,
        prefix: &str,
        role: Option<&str>,
        missing: &mut Vec<String>,
    ) -> Result<Option<Self>, ConvertError> {
        // The scales follow the experts, which have been checked and reported already.
        let checked = p.shape.len() != 3;
        if let Some((source, gate_up)) =
            sources.locate(&format!("{prefix}.gate_up_proj"), p.component, role, false)?
        {
            let example = gate_up.planes().weight.name.to_string();
            let file = sources.file_of(source, gate_up.planes().weight);
            let scheme = gate_up.scheme();
            let found = Self { source, scheme, schemes: [scheme; 3], fused: true, file, example };
            if !checked {
                let (e, h, i) = (p.shape[0], p.shape[1], p.shape[2]);
                found.check(sources, gate_up.name(), &[e, 2 * i, h], scheme, missing)?;
                found.check(sources, &format!("{prefix}.down_proj"), &[e, h, i], scheme, missing)?;
            }
            return Ok(Some(found));
        }
        let first = matrix_name(prefix, 0, ExpertMatrix::Gate);
        let Some((source, gate)) = sources.locate(&first, p.component, role, false)? else {
            if !checked {
                missing.push(format!("{prefix}.gate_up_proj (or {first}.weight and its kind)"));
            }
            return Ok(None);
        };
        let example = gate.planes().weight.name.to_string();
        let file = sources.file_of(source, gate.planes().weight);
        let mut schemes = [gate.scheme(); 3];
        for (scheme, matrix) in schemes.iter_mut().zip(ExpertMatrix::ALL) {
            // Only blocks of a GGUF file may differ from matrix to matrix.
            let other = sources.checkpoint(source).resolve(&matrix_name(prefix, 0, matrix))?;
            if let Some(other) = other
                .map(|w| w.scheme())
                .filter(|s| matches!((*s, &gate.scheme()), (Scheme::Ggml(_), Scheme::Ggml(_))))
            {
                *scheme = other;
            }
        }
        let found = Self { source, scheme: gate.scheme(), schemes, fused: false, file, example };
        if !checked {
            let (e, h, i) = (p.shape[0], p.shape[1], p.shape[2]);
            for expert in 0..e {
                for matrix in ExpertMatrix::ALL {
                    let shape = if matrix == ExpertMatrix::Down { [h, i] } else { [i, h] };
                    let scheme = found.schemes[matrix.index()];
                    found.check(sources, &matrix_name(prefix, expert, matrix), &shape, scheme, missing)?;
                }
            }
        }
        Ok(Some(found))
    }

    fn check(
        &self,
        sources: &Sources,
        name: &str,
        shape: &[u64],
        scheme: Scheme,
        missing: &mut Vec<String>,
    ) -> Result<(), ConvertError> {
        let Some(weight) = sources.checkpoint(self.source).resolve(name)? else {
            missing.push(format!("{name}.weight"));
            return Ok(());
        };
        let tensor = weight.planes().weight;
        if weight.shape() != shape {
            return Err(ConvertError::Shape {
                file: sources.file_of(self.source, tensor),
                tensor: tensor.name.to_string(),
                expected: shape.to_vec(),
                found: weight.shape().to_vec(),
            });
        }
        if weight.scheme() != scheme {
            return Err(ConvertError::Scheme {
                file: sources.file_of(self.source, tensor),
                tensor: tensor.name.to_string(),
                expected: format!("{scheme}, as in the first expert ({})", self.example),
                found: weight.scheme().to_string(),
                advice: "the experts of a layer must share one scheme",
            });
        }
        sources.consume_weight(self.source, &weight);
        Ok(())
    }

    /// The format of a bank of these words.
    pub(crate) fn format(&self) -> Option<Format> {
        match self.schemes.map(|s| if let Scheme::Ggml(t) = s { Some(t) } else { None }) {
            [Some(gate), Some(up), Some(down)] => Some(Format::ggml_experts([gate, up, down])),
            _ => self.scheme.format(),
        }
    }

    /// Content of a rank-2 parent: gate and up rows of every expert, or down rows.
    pub(crate) fn parent(&self, prefix: &str, down: bool, e: u64, h: u64, i: u64) -> Content {
        let source = self.source;
        let k = if down { i } else { h };
        if self.fused {
            let name = format!("{prefix}.{}", if down { "down_proj" } else { "gate_up_proj" });
            let rows = if down { e * h } else { e * 2 * i };
            return Content::Rows {
                weights: vec![WeightRef { source, name }],
                segments: vec![Segment { weight: 0, rows: 0..rows }],
                k,
            };
        }
        let matrices: &[ExpertMatrix] =
            if down { &[ExpertMatrix::Down] } else { &[ExpertMatrix::Gate, ExpertMatrix::Up] };
        let mut weights = Vec::new();
        for expert in 0..e {
            weights
                .extend(matrices.iter().map(|m| WeightRef { source, name: matrix_name(prefix, expert, *m) }));
        }
        let rows = if down { h } else { i };
        let segments = (0..weights.len()).map(|weight| Segment { weight, rows: 0..rows }).collect();
        Content::Rows { weights, segments, k }
    }
}
