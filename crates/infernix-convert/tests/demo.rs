//! The bundled checkpoint through the exact recipe.

mod common;

use common::{converted, demo, options};
use infernix_artifact::Artifact;

#[test]
fn demo_converts() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("demo.infernix");
    let (plan, outcome) = converted(&options(&demo(), "qwen3_8_flash_next_nvfp4", &out)).unwrap();
    eprintln!("{:#?}", plan.classes);
    eprintln!("{:?} {:?} {:?}", plan.warnings, plan.ignored, outcome);
    let artifact = Artifact::open(&out).unwrap();
    let report = artifact.verify_integrity(&Default::default()).unwrap();
    assert!(report.is_ok(), "{report:?}");
}
