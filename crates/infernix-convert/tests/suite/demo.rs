//! The bundled checkpoint through its recipes: nothing differs, and exactly the drafter is re-quantized.

use crate::common::{converted, demo, options};
use infernix_artifact::Interrupt;
use infernix_convert::{Silent, VerifyOptions, VerifyReport, verify};
use std::path::Path;

fn verified(artifact: &Path, checkpoint: &Path) -> VerifyReport {
    let mut o = VerifyOptions::new(artifact, Some(checkpoint.to_owned()));
    o.threads = 2;
    verify(&o, &Silent, &Interrupt::default()).unwrap()
}

#[test]
fn exact_recipe_keeps_every_word_but_the_drafters() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("demo.infernix");
    let (plan, outcome) = converted(&options(&demo(), "qwen3_8_flash_next_nvfp4", &out)).unwrap();
    assert!(plan.warnings.is_empty() && plan.ignored.is_empty(), "{:?} {:?}", plan.warnings, plan.ignored);
    assert_eq!(plan.default_expert_activation, 4);
    let report = verified(&out, &demo());
    assert!(report.ok, "{report:#?}");
    assert_eq!((report.experts, report.expert_mismatches), (8 * 32, 0));
    assert_eq!(report.ngram_rows_checked, 129_280);
    assert_eq!(report.digests, "ok");
    assert_eq!(report.digest, Some(outcome.digest));
    // Three matrices of each of 32 experts and 20 dense matrices.
    assert_eq!(
        report.requantized.iter().map(|(k, v)| (k.as_str(), *v)).collect::<Vec<_>>(),
        [("mtp", 3 * 32 + 20)]
    );
    assert_eq!(report.requantized_parameters.len(), 22);
    for p in &report.requantized_parameters {
        assert!(p.name.starts_with("mtp/"), "{p:?}");
        let (bound, method) = if p.format == "q4_g64_fp16" { (0.12, "mse") } else { (0.01, "absmax") };
        assert!(p.rel_error > 0.0 && p.rel_error < bound && p.method == method, "{p:?}");
    }
}
