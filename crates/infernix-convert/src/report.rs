//! The conversion's report: everything about the run that must not be in the artifact.

use infernix_artifact::Summary;
use infernix_artifact::digest::ObjectDigests;
use serde_json::json;

use crate::plan::{Content, Plan};
use crate::proof::Proofs;

/// Renders `OUT.conversion.json`.
pub(crate) fn render(
    plan: &Plan,
    summary: &Summary,
    digests: &ObjectDigests,
    proofs: &Proofs,
    seconds: f64,
    resumed_bytes: u64,
    warnings: &[String],
) -> Vec<u8> {
    let methods: Vec<_> = plan
        .objects
        .iter()
        .filter(|o| o.format.is_some())
        .map(|o| {
            json!({
                "object": o.id, "parameters": o.parameters, "sources": sources(&o.content),
                "method": o.method.name(), "proof": o.proof.name(), "format": o.format.map(|f| f.name()),
                "layout": o.layout.name(), "shape": o.shape, "blake3": digests.get(&o.id).map(ToString::to_string),
            })
        })
        .collect();
    let sources: Vec<_> = plan
        .sources
        .list()
        .iter()
        .map(|s| {
            json!({
                "role": s.spec.role, "path": s.checkpoint.path().display().to_string(),
                "repository": s.spec.repository, "revision": s.spec.revision,
                "files": s.checkpoint.shards().iter().map(|f| &f.name).collect::<Vec<_>>(),
            })
        })
        .collect();
    let value = json!({
        "schema_version": 1,
        "converter": concat!("infernix ", env!("CARGO_PKG_VERSION")),
        "encoder_version": infernix_formats::ENCODER_VERSION,
        "recipe": plan.options.recipe.name,
        "name": plan.options.name,
        "output": plan.options.output.display().to_string(),
        "artifact_id": summary.artifact_id.to_string(),
        "digest": summary.digest.to_string(),
        "components": plan.components.iter().map(|c| c.name()).collect::<Vec<_>>(),
        "sources": sources,
        "files": summary.files.iter().map(|(path, bytes)| json!({"path": path, "payload_bytes": bytes})).collect::<Vec<_>>(),
        "payload_bytes": plan.layouted.payload_bytes(),
        "ngram": plan.ngram.as_ref().map(crate::ngram::NgramPlan::to_json),
        "counts": {
            "parameters": plan.layouted.directory().bindings.len(), "objects": plan.objects.len(), "uses": plan.uses,
        },
        "classes": plan.classes,
        "methods": methods,
        "ignored": plan.ignored,
        "warnings": plan.warnings.iter().chain(warnings).collect::<Vec<_>>(),
        "threads": plan.options.threads,
        "seconds": seconds,
        "resumed_bytes": resumed_bytes,
        "finished_unix": crate::exec::now(),
    });
    let mut out = serde_json::to_vec_pretty(&value).unwrap_or_default();
    // The proof has a line for every tensor of a model: compact, behind the readable part, and never as one value.
    out.truncate(out.len().saturating_sub(2));
    out.extend_from_slice(b",\n  \"proof\": ");
    let _ = serde_json::to_writer(&mut out, proofs);
    out.extend_from_slice(b"\n}\n");
    out
}

/// Source weights of an object, runs of experts abridged to their prefix.
fn sources(content: &Content) -> Vec<String> {
    match content {
        Content::Rows { weights, .. } if weights.len() > 16 => vec![
            weights.first().map(|w| w.name.clone()).unwrap_or_default(),
            format!("... {} weights ...", weights.len() - 2),
            weights.last().map(|w| w.name.clone()).unwrap_or_default(),
        ],
        Content::Rows { weights, .. } => weights.iter().map(|w| w.name.clone()).collect(),
        Content::Bank { prefix, .. } | Content::ExpertInputScales { prefix, .. } => {
            vec![format!("{prefix}.*")]
        }
        Content::InputScale { weight }
        | Content::InputColumns { weight }
        | Content::ProposalHead { weight } => vec![weight.name.clone()],
        Content::Tensor { name, .. } => vec![name.clone()],
        Content::TableScale { table } => table.names(),
        Content::ProposalIds | Content::Bytes(_) => Vec::new(),
    }
}
