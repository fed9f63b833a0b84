//! The proof part of a report: every range of output bytes with the source bytes that it comes from and how.
//!
//! A pure function of the plan. Digests of source tensors are filled in by the run that read them.

use std::collections::HashMap;

use infernix_checkpoint::{Checkpoint, PlaneKind, SourceTensor};
use infernix_formats::expert_bank::{BankShape, ExpertMatrix};
use infernix_formats::{Format, Layout, PlaneRole, row_planes};
use serde::Serialize;

use crate::ConvertError;
use crate::experts::matrix_name;
use crate::plan::{Content, Plan, PlannedObject, flat_rows, view_rows};
use crate::sources::{Sources, WeightRef};

/// A source tensor that the output was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProofTensor {
    /// Role of its source.
    pub role: String,
    /// Name in the checkpoint.
    pub tensor: String,
    /// Files, names there and byte ranges that it lies in; several where it is put together.
    pub at: Vec<(String, String, u64, u64)>,
    /// BLAKE3 of its bytes in the checkpoint's order; absent where they were not read whole in this run.
    pub blake3: Option<String>,
}

/// Bytes of an object and what they come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProofLink {
    /// Ranges of the object's bytes: begin, end.
    pub bytes: Vec<(u64, u64)>,
    /// Ranges of source tensors: index into [`Proofs::tensors`], first byte, last byte + 1.
    pub from: Vec<(usize, u64, u64)>,
}

/// Links of one object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProofObject {
    /// Its id, or `ngram` for the volume's rows.
    pub object: String,
    /// `identical`, `permuted`, `widened`, `reencoded`, `requantized` or `synthesised`.
    pub class: &'static str,
    /// The method behind it.
    pub method: &'static str,
    /// In the order of its bytes. Padding belongs to no link and is zero.
    pub links: Vec<ProofLink>,
}

/// Everything that links an output to its sources.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Proofs {
    /// Source tensors.
    pub tensors: Vec<ProofTensor>,
    /// Objects in payload order, then the volume.
    pub objects: Vec<ProofObject>,
}

struct Builder<'s> {
    sources: &'s Sources,
    tensors: Vec<ProofTensor>,
    known: HashMap<(usize, Box<str>), usize>,
}

impl Builder<'_> {
    /// The number of a tensor, with its places and its digest.
    fn tensor(&mut self, source: usize, name: &str) -> Option<usize> {
        if let Some(&at) = self.known.get(&(source, Box::from(name))) {
            return Some(at);
        }
        let opened = &self.sources.list()[source];
        let checkpoint: &Checkpoint = &opened.checkpoint;
        let info = checkpoint.get(name)?;
        let at = checkpoint
            .origins(info, 0..info.bytes)
            .into_iter()
            .map(|o| {
                let file = checkpoint.shards()[o.shard as usize].name.clone();
                (file, o.tensor.to_owned(), o.bytes.start, o.bytes.end)
            })
            .collect();
        let blake3 = checkpoint.digest(info).map(|d| d.iter().map(|b| format!("{b:02x}")).collect());
        self.tensors.push(ProofTensor {
            role: opened.spec.role.clone(),
            tensor: name.to_owned(),
            at,
            blake3,
        });
        self.known.insert((source, name.into()), self.tensors.len() - 1);
        Some(self.tensors.len() - 1)
    }

    /// All planes of a weight's rows: `per` rows of `all` make up a plane.
    fn rows(
        &mut self,
        source: usize,
        weight: &SourceTensor<'_>,
        rows: &std::ops::Range<u64>,
        all: u64,
        out: &mut Vec<(usize, u64, u64)>,
    ) {
        for (kind, plane) in weight.planes().iter() {
            if kind == PlaneKind::InputScale {
                continue;
            }
            let Some(tensor) = self.tensor(source, &plane.name) else { continue };
            // Planes that are not cut by rows (one scale a matrix, tiles) are named whole.
            let by_rows = all > 0 && plane.bytes % all == 0 && plane.shape.first() == weight.shape().first();
            let (a, b) = if by_rows {
                (rows.start * (plane.bytes / all), rows.end * (plane.bytes / all))
            } else {
                (0, plane.bytes)
            };
            out.push((tensor, a, b));
        }
    }

    fn object(&mut self, o: &PlannedObject) -> Result<Vec<ProofLink>, ConvertError> {
        let whole = vec![(0, o.bytes)];
        let one = |from: Vec<(usize, u64, u64)>| vec![ProofLink { bytes: whole.clone(), from }];
        Ok(match &o.content {
            Content::Bytes(_) | Content::ProposalIds => one(Vec::new()),
            Content::Tensor { source, name } => {
                let bytes = self.sources.checkpoint(*source).get(name).map_or(0, |t| t.bytes);
                one(self.tensor(*source, name).map(|t| (t, 0, bytes)).into_iter().collect())
            }
            Content::InputScale { weight } | Content::InputColumns { weight } => {
                let resolved = self.sources.weight(weight)?;
                let plane = resolved.planes().input_scale.map(|t| (t.name.clone(), t.bytes));
                let from =
                    plane.and_then(|(name, bytes)| Some((self.tensor(weight.source, &name)?, 0, bytes)));
                one(from.into_iter().collect())
            }
            Content::TableScale { table } => {
                let mut from = Vec::new();
                for (weight, rows) in &table.parts {
                    let resolved = self.sources.weight(weight)?;
                    self.rows(weight.source, &resolved, &(0..*rows), *rows, &mut from);
                }
                one(from)
            }
            Content::ExpertInputScales { source, prefix } => {
                let mut out = Vec::new();
                for e in 0..o.shape[0] {
                    for m in ExpertMatrix::ALL {
                        let weight = WeightRef { source: *source, name: matrix_name(prefix, e, m) };
                        let resolved = self.sources.weight(&weight)?;
                        let plane = resolved.planes().input_scale.map(|t| (t.name.clone(), t.bytes));
                        let Some((name, bytes)) = plane else { continue };
                        let at = 12 * e + 4 * m.index() as u64;
                        let from = self.tensor(*source, &name).map(|t| (t, 0, bytes)).into_iter().collect();
                        out.push(ProofLink { bytes: vec![(at, at + 4)], from });
                    }
                }
                out
            }
            Content::ProposalHead { weight } => {
                // Its rows are those that the ids name, in that order.
                let resolved = self.sources.weight(weight)?;
                let all = view_rows(resolved.shape()).0;
                let mut from = Vec::new();
                self.rows(weight.source, &resolved, &(0..all), all, &mut from);
                one(from)
            }
            Content::Bank { source, prefix } => self.bank(o, *source, prefix)?,
            Content::Rows { weights, segments, k } => {
                let coded = o.format.is_some_and(|f| f.direct_bytes().is_none());
                let format = o.format.unwrap_or(Format::Bf16);
                let shape = [o.shape.iter().product::<u64>() / (*k).max(1), *k];
                let mut out = Vec::new();
                let mut row = 0;
                for s in segments {
                    let reference = &weights[s.weight];
                    let resolved = self.sources.weight(reference)?;
                    let all =
                        if coded { flat_rows(resolved.shape()).0 } else { view_rows(resolved.shape()).0 };
                    let next = row + s.rows.end - s.rows.start;
                    let bytes = if let Some(width) = format.direct_bytes() {
                        vec![(row * k * width, next * k * width)]
                    } else if o.layout == Layout::BlockScaleK16M128x4V1 {
                        whole.clone()
                    } else {
                        let planes = row_planes(o.layout, format, &shape, row..next);
                        let planes = planes.map_err(|source| ConvertError::Format {
                            what: o.id.clone(),
                            source: Box::new(source),
                        })?;
                        planes
                            .iter()
                            .filter(|p| p.role != PlaneRole::GlobalScale || row == 0)
                            .map(|p| (p.offset, p.offset + p.bytes))
                            .collect()
                    };
                    let mut from = Vec::new();
                    self.rows(reference.source, &resolved, &s.rows, all, &mut from);
                    out.push(ProofLink { bytes, from });
                    row = next;
                }
                out
            }
        })
    }

    fn bank(
        &mut self,
        o: &PlannedObject,
        source: usize,
        prefix: &str,
    ) -> Result<Vec<ProofLink>, ConvertError> {
        let failed = |source| ConvertError::Format { what: o.id.clone(), source: Box::new(source) };
        let format = o.format.unwrap_or(Format::Bf16);
        let shape = BankShape::of(o.layout, format, &o.shape).map_err(failed)?;
        let mut out = Vec::new();
        for e in 0..shape.experts {
            let start = e * shape.stride;
            let mut bytes = vec![(start, start + shape.record_bytes)];
            if shape.layout == Layout::Nvfp4ExpertRg16V1 {
                let at = shape.experts * shape.stride + 12 * e;
                bytes.push((at, at + 12));
            }
            let mut from = Vec::new();
            for m in ExpertMatrix::ALL {
                let weight = WeightRef { source, name: matrix_name(prefix, e, m) };
                let resolved = self.sources.weight(&weight)?;
                let all = resolved.rows();
                self.rows(source, &resolved, &(0..all), all, &mut from);
            }
            out.push(ProofLink { bytes, from });
        }
        Ok(out)
    }
}

/// Source tensors that an object is made from, in no order.
pub(crate) fn tensors_of(plan: &Plan, object: &PlannedObject) -> Result<Vec<(usize, String)>, ConvertError> {
    let mut b = Builder { sources: plan.sources(), tensors: Vec::new(), known: HashMap::new() };
    b.object(object)?;
    Ok(b.known.into_keys().map(|(source, name)| (source, name.into_string())).collect())
}

/// Links every object of a plan, and the volume's rows, to its sources.
///
/// # Errors
/// What resolving a weight again meets; a plan over the same sources excludes it.
pub fn proofs(plan: &Plan) -> Result<Proofs, ConvertError> {
    let mut b = Builder { sources: plan.sources(), tensors: Vec::new(), known: HashMap::new() };
    let mut objects = Vec::new();
    for o in &plan.objects {
        let links = b.object(o)?;
        objects.push(ProofObject {
            object: o.id.clone(),
            class: o.proof.name(),
            method: o.method.name(),
            links,
        });
    }
    if let Some(ngram) = &plan.ngram {
        let mut links = Vec::new();
        let mut row = 0;
        for table in &ngram.tables {
            for (weight, rows) in &table.parts {
                let resolved = plan.sources().weight(weight)?;
                let mut from = Vec::new();
                b.rows(weight.source, &resolved, &(0..*rows), *rows, &mut from);
                // Rows of the table, not bytes of the file: blocks pad them.
                let bytes = vec![(row * ngram.row_bytes, (row + rows) * ngram.row_bytes)];
                links.push(ProofLink { bytes, from });
                row += rows;
            }
        }
        let encoded = ngram.tables.iter().any(|t| t.encoded.is_some());
        let (class, method) = if encoded { ("requantized", "table_maxabs") } else { ("identical", "stored") };
        objects.push(ProofObject { object: "ngram".into(), class, method, links });
    }
    Ok(Proofs { tensors: b.tensors, objects })
}
