//! Recipes of one's own: every method and layout, over every kind of source.

use std::path::Path;

use crate::common::{converted, demo, fixture, options};
use infernix_artifact::{Artifact, Binding, Interrupt, Proposal};
use infernix_convert::{
    Plan, ProposalOptions, Ranking, Recipe, Silent, VerifyOptions, VerifyReport, Vocabulary, verify,
};

fn made(
    checkpoint: &Path,
    recipe: &str,
    proposal: Option<ProposalOptions>,
) -> (Plan, VerifyReport, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    let mut o = options(checkpoint, "auto", &out);
    o.recipe = Recipe::from_text("own", recipe).unwrap();
    o.proposal = proposal;
    let (plan, _) = converted(&o).unwrap_or_else(|e| panic!("{checkpoint:?}: {e}"));
    let report =
        verify(&VerifyOptions::new(&out, Some(checkpoint.to_owned())), &Silent, &Interrupt::default())
            .unwrap();
    assert!(report.ok, "{checkpoint:?}: {report:#?}");
    (plan, report, dir)
}

/// Formats that split what the source holds together, and all encoders.
const MIXED: &str = r#"
include = ["auto"]
[[rule]]
class = ["attn.q", "gdn.q", "gdn.k", "mlp.gate"]
format = "q4_g64_fp16"
[[rule]]
class = ["attn.gate", "gdn.v", "gdn.z", "attn.k"]
format = "q5_g64_fp16"
method = "mse"
[[rule]]
class = ["embed", "mlp.up", "moe.shared.*"]
format = "q6_g64_fp16"
[[rule]]
class = ["head", "gdn.o", "attn.o"]
format = "fp8_e4m3fn_row_bf16"
method = "row_maxabs"
[[rule]]
class = ["mtp.fc", "vision.fc1"]
format = "q8_g32_fp16"
[[rule]]
class = ["moe.experts"]
format = "q4_g64_fp16"
method = "mse"
layers = [0, "2-99"]
[[rule]]
class = ["gdn.conv", "vision.positions", "gdn.a"]
format = "fp16"
method = "cast"
"#;

#[test]
fn any_source_can_be_requantized_class_by_class() {
    for name in [
        "dense-demo-bf16",
        "dense-demo-quasar",
        "dense-demo-nvidia",
        "flash-demo-bf16",
        "flash-tiny-fp8",
        "flash-tiny-fp4local",
    ] {
        let Some(checkpoint) = fixture(name) else { continue };
        let (plan, report, _dir) = made(&checkpoint, MIXED, None);
        assert!(report.requantized_parameters.len() > 20, "{name}");
        for p in &report.requantized_parameters {
            let bound = match p.format.as_str() {
                "q4_g64_fp16" => 0.2,
                "q5_g64_fp16" => 0.1,
                "q6_g64_fp16" | "fp8_e4m3fn_row_bf16" => 0.05,
                _ => 0.02,
            };
            assert!(p.rel_error < bound, "{name}: {p:?}");
        }
        // Head-interleaved rows are gathered where query and gate part ways.
        let q = plan.objects.iter().find(|o| o.parameters == ["text/layers/3/attn/q"]);
        assert!(q.is_some_and(|o| o.method.name() == "absmax"), "{name}");
    }
}

#[test]
fn tiled_scales_are_permuted_and_nothing_else() {
    let Some(checkpoint) = fixture("dense-demo-quasar") else { return };
    let recipe = r#"
include = ["auto"]
[[rule]]
class = ["mlp.*", "gdn.q", "gdn.k", "gdn.v"]
component = ["text"]
format = "nvfp4"
layout = "block_scale_k16_m128x4_v1"
"#;
    let (plan, report, _dir) = made(&checkpoint, recipe, None);
    assert!(report.requantized_parameters.is_empty());
    let tiled = plan.objects.iter().filter(|o| o.layout.name() == "block_scale_k16_m128x4_v1");
    assert_eq!(tiled.map(|o| o.proof.name()).collect::<std::collections::BTreeSet<_>>(), ["permuted"].into());
}

#[test]
fn query_and_gate_share_a_parent_in_the_sources_order() {
    let (_, _, dir) =
        made(&demo(), "include = [\"auto\"]\n[[rule]]\nclass=[\"embed\"]\nformat=\"stored\"", None);
    let artifact = Artifact::open(&dir.path().join("x.infernix")).unwrap();
    let bindings = &artifact.directory().bindings;
    let parts = |name: &str| match &bindings[name] {
        Binding::Parts(parts) => parts.clone(),
        Binding::Whole { object } => panic!("{name} is the whole of {object}"),
    };
    // Two heads of 256 query and 256 gate rows, 256 columns.
    let ranges =
        |name: &str| parts(name).iter().map(|p| (p.begin / 65536, p.end / 65536)).collect::<Vec<_>>();
    assert_eq!(ranges("text/layers/3/attn/q"), [(0, 1), (2, 3)]);
    assert_eq!(ranges("text/layers/3/attn/gate"), [(1, 2), (3, 4)]);
    let object = &parts("text/layers/3/attn/q")[0].object;
    assert_eq!(&parts("text/layers/3/attn/indexer/k")[0].object, object);
    assert_ne!(&parts("text/layers/7/attn/q")[0].object, object);
}

#[test]
fn a_proposal_head_holds_the_rows_of_frequent_and_special_tokens() {
    let counts = (0..4096u64).map(|id| (id * 37) % 1000).collect();
    let wanted = ProposalOptions { rows: Some(192), ranking: Ranking::Counts(counts) };
    let (plan, report, dir) = made(
        &demo(),
        "include = [\"qwen3_8_flash_next_nvfp4\"]\n[[rule]]\nclass=[\"embed\"]\nformat=\"bf16\"",
        Some(wanted.clone()),
    );
    assert_eq!(report.proposal_bindings, 2);
    assert!(report.requantized_parameters.iter().all(|p| p.name.starts_with("mtp/")));
    let artifact = Artifact::open(&dir.path().join("x.infernix")).unwrap();
    assert_eq!(artifact.directory().components["text"].proposal, Some(Proposal::Indexed { rows: 192 }));
    let ids = plan.objects.iter().find(|o| o.parameters == ["proposal/token_ids"]).unwrap();
    let bytes = artifact.bytes(artifact.object(&ids.id).unwrap()).unwrap();
    let bytes: &[u8] = bytes.as_ref();
    let ids: Vec<u32> = bytes.chunks(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect();
    let source = infernix_checkpoint::Checkpoint::open(&demo(), &Default::default()).unwrap();
    let vocabulary = Vocabulary::read(&source).unwrap().unwrap();
    let Ranking::Counts(counts) = wanted.ranking else { unreachable!() };
    assert_eq!(ids, vocabulary.select(192, &counts).unwrap());
    assert!(vocabulary.special.iter().all(|id| ids.contains(id)));
    assert_eq!(Vocabulary::usual_rows(4096), 2048);

    // Without a ranking there is a plan, but no conversion.
    let mut o = options(&demo(), "qwen3_8_flash_next_nvfp4", &dir.path().join("y.infernix"));
    o.proposal = Some(ProposalOptions { rows: None, ranking: Ranking::Absent });
    let e = converted(&o).unwrap_err().to_string();
    assert!(e.contains("--ranking"), "{e}");
    o.proposal = Some(ProposalOptions { rows: Some(5000), ranking: Ranking::Absent });
    let e = converted(&o).unwrap_err().to_string();
    assert!(e.contains("5000 rows"), "{e}");
}
