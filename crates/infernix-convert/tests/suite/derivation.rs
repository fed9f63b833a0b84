//! Links from output bytes to source bytes, and what one file is of another.

use crate::common::{converted, demo, fixture, options};
use infernix_artifact::{Artifact, Interrupt};
use infernix_convert::{Relation, Silent, derivation, proofs};
use std::collections::BTreeMap;
use std::path::Path;

fn report(path: &Path) -> serde_json::Value {
    let mut name = path.as_os_str().to_owned();
    name.push(".conversion.json");
    serde_json::from_slice(&std::fs::read(name).unwrap()).unwrap()
}

/// Every byte of every object but padding is linked once, and every linked source byte has a digest of its tensor.
#[test]
fn every_output_byte_is_linked_to_source_bytes() {
    for (source, recipe) in [
        (Some(demo()), "qwen3_8_flash_next_nvfp4_dense8"),
        (fixture("flash-wide-gguf"), "auto"),
        (fixture("flash-tiny-orcarouter"), "qwen3_8_flash_next_nvfp4_orcarouter"),
        (fixture("dense-demo-quasar"), "auto"),
    ] {
        let Some(source) = source else { continue };
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("x.infernix");
        let (plan, _) = converted(&options(&source, recipe, &out)).unwrap();
        let report = report(&out);
        let proof = &report["proof"];
        assert_eq!(
            proof["objects"].as_array().unwrap().len(),
            plan.objects.len() + usize::from(plan.ngram.is_some())
        );
        let artifact = Artifact::open(&out).unwrap();
        let made = proofs(&plan).unwrap();
        for (object, proof) in plan.objects.iter().zip(&made.objects) {
            assert_eq!(object.id, proof.object);
            let mut ranges: Vec<_> =
                proof.links.iter().flat_map(|l| l.bytes.iter().copied()).filter(|r| r.0 < r.1).collect();
            ranges.sort_unstable();
            let stored = artifact.bytes(artifact.object(&object.id).unwrap()).unwrap();
            let mut at = 0;
            for (a, b) in &ranges {
                assert!(*a >= at && *b <= object.bytes, "{recipe} {}: {ranges:?}", object.id);
                assert!(
                    stored.as_ref()[at as usize..*a as usize].iter().all(|b| *b == 0),
                    "{}: a gap holds data",
                    object.id
                );
                at = *b;
            }
            assert!(
                stored.as_ref()[at as usize..].iter().all(|b| *b == 0),
                "{recipe} {}: unlinked bytes",
                object.id
            );
            if object.format.is_some() && proof.class != "synthesised" {
                assert!(proof.links.iter().all(|l| !l.from.is_empty()), "{recipe} {}", object.id);
            }
        }
        // Digests are those of the source's bytes, whatever order they were read in.
        let checkpoint =
            infernix_checkpoint::Checkpoint::open(&source, &infernix_checkpoint::OpenOptions::default())
                .unwrap();
        let tensors = proof["tensors"].as_array().unwrap();
        assert!(!tensors.is_empty());
        for t in tensors {
            let info = checkpoint.get(t["tensor"].as_str().unwrap()).unwrap();
            let expected = blake3::hash(&checkpoint.read_all(info).unwrap()).to_hex().to_string();
            assert_eq!(t["blake3"].as_str(), Some(expected.as_str()), "{recipe} {}", info.name);
            let (a, b) = (t["at"][0][2].as_u64().unwrap(), t["at"][0][3].as_u64().unwrap());
            assert!(b > a, "{}", info.name);
        }
    }
}

fn relations(
    first: &Path,
    second: &Path,
) -> (infernix_convert::DerivationReport, BTreeMap<String, Relation>) {
    let report = derivation(first, second, &Silent, &Interrupt::default()).unwrap();
    let map = report.parameters.iter().map(|p| (p.name.clone(), p.relation)).collect();
    (report, map)
}

#[test]
fn a_gguf_is_told_apart_from_its_bf16_source() {
    let (Some(gguf), Some(bf16)) = (fixture("flash-demo-gguf"), fixture("flash-demo-bf16")) else { return };
    let (report, of) = relations(&gguf, &bf16);
    // Q8_0 is the stated rounding; BF16 matrices are equal; norms and A_log are the same values, wider.
    assert_eq!(of["text/embed"], Relation::Rounded, "{report:#?}");
    assert_eq!(of["text/layers/0/gdn/o"], Relation::Rounded);
    assert_eq!(of["text/layers/0/attn_hc/down"], Relation::Identical);
    assert_eq!(of["text/layers/0/gdn/a_log"], Relation::SameValues);
    assert_eq!(of["text/layers/0/moe/router"], Relation::SameValues);
    assert_eq!(of["text/layers/0/moe/experts"], Relation::Different);
    let embed = report.parameters.iter().find(|p| p.name == "text/embed").unwrap();
    assert_eq!((embed.rounding.as_deref(), embed.format.as_str()), (Some("ggml reference"), "ggml_q8_0"));
    assert!(embed.rel_error > 0.0 && embed.rel_error < 0.01);
    assert!(!report.derived && report.only_first.is_empty());
    assert!(report.only_second.iter().all(|n| n.starts_with("mtp/") || n.starts_with("vision/")));
}

#[test]
fn two_artifacts_of_one_checkpoint_hold_the_same_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a.infernix"), dir.path().join("b.infernix"));
    converted(&options(&demo(), "auto", &a)).unwrap();
    converted(&options(&demo(), "qwen3_8_flash_next_nvfp4_dense8", &b)).unwrap();
    let (same, of) = relations(&a, &demo());
    assert!(same.derived && of.values().all(|r| *r <= Relation::SameValues), "{same:#?}");
    let (rounded, of) = relations(&b, &a);
    assert!(rounded.derived, "{rounded:#?}");
    assert_eq!(of["text/layers/0/gdn/q"], Relation::Rounded);
    assert_eq!(of["mtp/layer/moe/experts"], Relation::Rounded);
    assert_eq!(of["text/layers/0/moe/experts"], Relation::Identical);
    // One changed word is seen, and the digest with it.
    let again = derivation(&b, &a, &Silent, &Interrupt::default()).unwrap();
    assert_eq!(again.digest, rounded.digest);
    let (back, _) = relations(&a, &b);
    assert!(!back.derived && back.digest != rounded.digest);
}
