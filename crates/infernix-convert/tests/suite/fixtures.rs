//! Every test checkpoint through `auto`: each tensor as stored, nothing differs.

use crate::common::{converted, demo, fixture, options};
use infernix_artifact::Interrupt;
use infernix_convert::{Silent, VerifyOptions, verify};
use std::path::Path;

fn round_trip(checkpoint: &Path, recipe: &str) -> (infernix_convert::Plan, infernix_convert::VerifyReport) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    let (plan, outcome) =
        converted(&options(checkpoint, recipe, &out)).unwrap_or_else(|e| panic!("{checkpoint:?}: {e}"));
    let mut o = VerifyOptions::new(&out, Some(checkpoint.to_owned()));
    o.threads = 2;
    let report = verify(&o, &Silent, &Interrupt::default()).unwrap();
    assert!(report.ok, "{checkpoint:?}: {report:#?}");
    assert_eq!(report.digest, Some(outcome.digest));
    let structure =
        verify(&VerifyOptions { sources: Vec::new(), ..o }, &Silent, &Interrupt::default()).unwrap();
    assert!(structure.ok && structure.digest == report.digest, "{structure:#?}");
    (plan, report)
}

#[test]
fn auto_keeps_every_tensor_of_every_scheme() {
    for (name, activation, formats) in [
        ("flash-demo-bf16", 16, &["bf16"][..]),
        ("flash-demo-nvfp4", 4, &["nvfp4_mul", "fp8_e4m3fn_block128_f32"]),
        ("flash-tiny-fp8", 16, &["fp8_e4m3fn_block128_f32"]),
        ("flash-tiny-fp4local", 16, &["nvfp4_mul", "mxfp8_e4m3fn_e8m0"]),
        ("flash-tiny-orcarouter", 16, &["nvfp4", "fp8_e4m3fn_row_bf16"]),
        ("dense-demo-bf16", 16, &["bf16"]),
        ("dense-demo-quasar", 16, &["nvfp4"]),
        ("dense-demo-nvidia", 16, &["nvfp4_mul", "fp8_e4m3fn_tensor_f32"]),
    ] {
        let Some(checkpoint) = fixture(name) else { continue };
        let (plan, report) = round_trip(&checkpoint, "auto");
        assert!(report.requantized_parameters.is_empty(), "{name}");
        assert!(plan.ignored.is_empty(), "{name}: {:?}", plan.ignored);
        assert_eq!(plan.default_expert_activation, activation, "{name}");
        for format in formats {
            assert!(
                plan.objects.iter().any(|o| o.format.is_some_and(|f| f.name() == *format)),
                "{name}: {format}"
            );
        }
        eprintln!("{name}: {} experts, {} tensors, {:?}", report.experts, report.tensors, plan.warnings);
    }
}

#[test]
fn dense8_requantizes_what_it_names_and_nothing_else() {
    let (plan, report) = round_trip(&demo(), "qwen3_8_flash_next_nvfp4_dense8");
    let text = report.requantized_parameters.iter().filter(|p| p.name.starts_with("text/")).count() as u64;
    // Per layer: 6 hyper-connection and 3 shared-expert matrices; delta-net layers 5, attention layers 1; then the two
    // n-gram projections, two of the final mixer, and the head.
    assert_eq!(text, 8 * 9 + 6 * 5 + 2 + 5);
    assert_eq!(report.requantized["text"], text);
    assert_eq!(report.requantized["mtp"], 3 * 32 + 20);
    assert!(plan.objects.iter().all(|o| o.method != infernix_convert::Method::Cast));
}
