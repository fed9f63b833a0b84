//! Every built-in recipe over the checkpoints that imitate its source: what becomes of each class, and nothing differs.

use crate::common::{converted, demo, fixture, options, shared};
use infernix_artifact::ngram::Volume;
use infernix_artifact::{Artifact, Interrupt};
use infernix_checkpoint::{Checkpoint, OpenOptions};
use infernix_convert::census::{Census, checkpoint_classes};
use infernix_convert::{Plan, Recipe, Silent, SourceSpec, VerifyOptions, VerifyReport, plan, verify};
use std::path::Path;

/// Converts and verifies; `others` are sources of other roles.
fn made(
    checkpoint: &Path,
    recipe: &str,
    others: &[(&str, &Path)],
) -> (Plan, VerifyReport, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    let mut o = options(checkpoint, recipe, &out);
    o.sources.extend(others.iter().map(|(role, path)| SourceSpec::new(*role, *path)));
    let (plan, outcome) = converted(&o).unwrap_or_else(|e| panic!("{recipe}: {e}"));
    let mut v = VerifyOptions::new(&out, None);
    (v.sources, v.threads) = (o.sources.clone(), 2);
    let report = verify(&v, &Silent, &Interrupt::default()).unwrap();
    assert!(report.ok, "{recipe}: {report:#?}");
    assert_eq!(report.digest, Some(outcome.digest), "{recipe}");
    (plan, report, dir)
}

/// The format of a class.
fn format<'p>(plan: &'p Plan, class: &str) -> &'p str {
    &plan.classes.get(class).unwrap_or_else(|| panic!("{class} is not in {:?}", plan.classes.keys())).format
}

#[test]
fn flash_next_recipes_keep_what_their_source_quantized() {
    if let Some(source) = fixture("flash-tiny-orcarouter") {
        let (plan, report, dir) = made(&source, "qwen3_8_flash_next_nvfp4_orcarouter", &[]);
        assert_eq!(format(&plan, "moe.experts"), "nvfp4");
        for class in ["gdn.q", "gdn.o", "attn.q", "attn.gate", "attn.o", "moe.shared.down"] {
            assert_eq!(format(&plan, class), "fp8_e4m3fn_row_bf16", "{class}");
        }
        assert_eq!((format(&plan, "hc.down"), format(&plan, "gdn.a")), ("q8_g32_fp16", "bf16"));
        assert_eq!((format(&plan, "mtp/moe.experts"), plan.default_expert_activation), ("q4_g64_fp16", 16));
        // The table that NVIDIA's rule makes is the FP8 release's, row for row, and its error is stated.
        let table = report.requantized_parameters.iter().find(|p| p.name.ends_with("/ngram_table")).unwrap();
        assert_eq!((table.format.as_str(), table.method.as_str()), ("fp8_e4m3fn", "table_maxabs"));
        assert!(table.rel_error > 0.0 && table.rel_error < 0.05, "{table:?}");
        if let Some(fp8) = fixture("flash-tiny-fp8") {
            let (.., other) = made(&fp8, "qwen3_8_flash_next_fp8", &[]);
            let rows = |dir: &tempfile::TempDir| {
                let volume = Volume::open(&dir.path().join("x.infernix.ngram")).unwrap();
                let extension = volume.header().extension.clone().unwrap();
                (extension.row_digest, extension.scales)
            };
            assert_eq!(rows(&dir), rows(&other));
        }
    }
    if let Some(source) = fixture("flash-tiny-fp8") {
        let (plan, ..) = made(&source, "qwen3_8_flash_next_fp8", &[]);
        assert_eq!(format(&plan, "moe.experts"), "fp8_e4m3fn_block128_f32");
        assert_eq!((format(&plan, "gdn.q"), plan.default_expert_activation), ("bf16", 16));
        // Another table instead: the BF16 one, from another release.
        if let Some(bf16) = fixture("flash-tiny-orcarouter") {
            let (plan, ..) = made(&source, "qwen3_8_flash_next_fp8", &[("table", &bf16)]);
            assert_eq!(plan.ngram.as_ref().unwrap().format.name(), "bf16");
        }
    }
    if let Some(source) = fixture("flash-tiny-fp4local") {
        for recipe in ["qwen3_8_flash_next_fp4_local", "qwen3_8_flash_next_fp4_local_huihui"] {
            let (plan, report, _dir) = made(&source, recipe, &[]);
            assert_eq!(format(&plan, "moe.experts"), "nvfp4_mul");
            for class in ["gdn.q", "gdn.a", "gdn.o", "attn.q", "indexer.q", "moe.shared.up"] {
                assert_eq!(format(&plan, class), "mxfp8_e4m3fn_e8m0", "{class}");
            }
            assert_eq!(plan.ngram.as_ref().unwrap().format.name(), "nvfp4_mul");
            assert_eq!(plan.default_expert_activation, 16);
            assert!(report.requantized_parameters.is_empty());
        }
    }
    if let (Some(gguf), Some(nvfp4)) = (fixture("flash-demo-gguf"), fixture("flash-demo-nvfp4")) {
        let (plan, report, _dir) =
            made(&gguf, "qwen3_8_flash_next_iq3_s", &[("mtp", &nvfp4), ("vision", &nvfp4)]);
        assert_eq!(format(&plan, "moe.experts"), "ggml_iq3_s+iq3_s+iq4_nl");
        assert_eq!((format(&plan, "mtp/moe.experts"), format(&plan, "vision.fc1")), ("q4_g64_fp16", "bf16"));
        assert!(report.requantized_parameters.iter().all(|p| p.name.starts_with("mtp/")));
    }
    let (plan, ..) = made(&demo(), "qwen3_8_flash_next_nvfp4_dense8_swift", &[]);
    assert_eq!((format(&plan, "moe.experts"), format(&plan, "gdn.q")), ("nvfp4_mul", "q8_g32_fp16"));
    if let Some(bf16) = fixture("flash-demo-bf16") {
        // The fine-tune's own table is BF16; by the rule it becomes the release's.
        let (plan, ..) = made(&demo(), "qwen3_8_flash_next_nvfp4_dense8_swift", &[("table", &bf16)]);
        assert_eq!(plan.ngram.as_ref().unwrap().format.name(), "fp8_e4m3fn");
    }
}

#[test]
fn recipes_refuse_experts_of_another_kind() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    for recipe in
        ["qwen3_8_flash_next_nvfp4_orcarouter", "qwen3_8_flash_next_fp8", "qwen3_8_flash_next_iq3_s"]
    {
        let error = plan(&options(&demo(), recipe, &out)).unwrap_err().to_string();
        assert!(
            error.contains(recipe) && error.contains("use a recipe for this checkpoint"),
            "{recipe}: {error}"
        );
    }
    let error = plan(&options(&demo(), "qwen3_8_27b", &out)).unwrap_err().to_string();
    assert!(error.contains("qwen3_8_27b"), "{error}");
}

/// A recipe for one kind of checkpoint takes no other kind, which would come out as something that its name does not say.
#[test]
fn recipes_refuse_checkpoints_that_are_not_of_their_kind() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |name: &str, recipe: &str, word: &str| {
        let source = if name == "flash-demo-nvfp4" { Some(demo()) } else { fixture(name) };
        let Some(source) = source else { return };
        let error = match plan(&options(&source, recipe, &dir.path().join("x.infernix"))) {
            Ok(_) => panic!("{recipe} took {name}"),
            Err(e) => e.to_string(),
        };
        assert!(
            error.contains(recipe) || error.contains("use a recipe for this checkpoint"),
            "{recipe} {name}: {error}"
        );
        assert!(error.contains(word), "{recipe} {name}: {word} is not in {error}");
    };
    for recipe in [
        "qwen3_6_27b_nvfp4",
        "qwen3_8_27b_nvfp4",
        "qwen3_8_27b_nvfp4_nvidia",
        "qwen3_8_27b_nvfp4_nvidia_swift",
        "qwen3_8_27b_nvfp4_orcarouter",
        "qwen3_8_27b_nvfp4_quasar",
    ] {
        refused("dense-demo-bf16", recipe, "nvfp4");
        refused("dense-demo-gguf", recipe, "nvfp4");
        refused("flash-demo-nvfp4", recipe, "qwen4_exp");
    }
    for recipe in ["qwen3_6_27b", "qwen3_8_27b", "qwen3_8_27b_q6"] {
        for name in ["dense-demo-quasar", "dense-demo-nvidia", "dense-demo-gguf"] {
            refused(name, recipe, "bf16");
        }
    }
    for (name, recipe, word) in [
        ("flash-tiny-fp4local", "qwen3_8_flash_next_nvfp4_dense8", "bf16"),
        ("flash-tiny-fp4local", "qwen3_8_flash_next_nvfp4", "bf16"),
        ("flash-demo-nvfp4", "qwen3_8_flash_next_fp4_local", "mxfp8"),
        ("flash-demo-bf16", "qwen3_8_flash_next_fp8", "fp8_block128"),
        ("flash-demo-bf16", "qwen3_8_flash_next_iq3_s", "ggml"),
        ("flash-demo-bf16", "qwen3_8_flash_next_nvfp4", "nvfp4_mul"),
        ("flash-tiny-fp8", "qwen3_8_flash_next_nvfp4_orcarouter", "nvfp4"),
        ("dense-demo-dflash", "qwen3_8_flash_next_dflash2", "a dflash2 drafter alone"),
        ("dense-demo-bf16", "qwen3_8_flash_next_dflash2", "a dflash2 drafter alone"),
        ("flash-demo-nvfp4", "qwen3_8_flash_next_dflash2", "a dflash2 drafter alone"),
        ("dense-demo-dflash2", "qwen3_8_27b", "block drafter alone"),
    ] {
        refused(name, recipe, word);
    }
}

#[test]
fn dense_recipes_quantize_as_the_table_says() {
    let two = fixture("dense-demo-dflash2");
    if let (Some(source), Some(two)) = (fixture("dense-demo-bf16"), &two) {
        for (recipe, embed, gate) in [
            ("qwen3_6_27b", "q6_g64_fp16", "q4_g64_fp16"),
            ("qwen3_8_27b", "q8_g32_fp16", "q4_g64_fp16"),
            ("qwen3_8_27b_q6", "q8_g32_fp16", "q6_g64_fp16"),
        ] {
            let (plan, report, _dir) = made(&source, recipe, &[("dflash2", two)]);
            for class in ["embed", "head"] {
                assert_eq!(format(&plan, class), embed, "{recipe} {class}");
            }
            for (class, expected) in [
                ("mlp.gate", gate),
                ("mlp.down", "q5_g64_fp16"),
                ("attn.q", "q4_g64_fp16"),
                ("attn.gate", "q5_g64_fp16"),
                ("attn.o", "q5_g64_fp16"),
                ("gdn.k", "q4_g64_fp16"),
                ("gdn.z", "q5_g64_fp16"),
                ("gdn.a", "bf16"),
                ("gdn.a_log", "fp32"),
                ("vision.patch", "q6_g64_fp16"),
                ("vision.fc1", "q4_g64_fp16"),
                ("vision.proj", "q5_g64_fp16"),
                ("vision.merger", "q8_g32_fp16"),
                ("mtp.fc", "q8_g32_fp16"),
                ("mtp/mlp.up", "q8_g32_fp16"),
                ("dflash2/dflash.fc", "q8_g32_fp16"),
                ("dflash2/dflash.conv_projection", "bf16"),
                ("dflash2/dflash.codebook", "bf16"),
            ] {
                assert_eq!(format(&plan, class), expected, "{recipe} {class}");
            }
            assert!(report.requantized["dflash2"] > 0 && report.requantized["vision"] > 0, "{recipe}");
        }
    }
    if let (Some(source), Some(two)) = (fixture("dense-demo-nvidia"), &two) {
        for recipe in ["qwen3_8_27b_nvfp4_nvidia", "qwen3_8_27b_nvfp4_nvidia_swift"] {
            let (plan, report, _dir) = made(&source, recipe, &[("dflash2", two)]);
            assert_eq!(
                (format(&plan, "mlp.gate"), format(&plan, "attn.q")),
                ("nvfp4_mul", "fp8_e4m3fn_tensor_f32")
            );
            assert_eq!(format(&plan, "head"), "fp8_e4m3fn_row_bf16");
            assert_eq!(
                (format(&plan, "dflash2/mlp.gate"), format(&plan, "dflash2/mlp.down")),
                ("nvfp4", "q8_g32_fp16")
            );
            let gate =
                report.requantized_parameters.iter().find(|p| p.name == "dflash2/layers/0/mlp/gate").unwrap();
            assert!(gate.method == "nvfp4_mse" && gate.rel_error < 0.1, "{gate:?}");
        }
        let (plan, ..) = made(&source, "qwen3_8_27b_nvfp4", &[]);
        assert_eq!((format(&plan, "embed"), format(&plan, "head")), ("fp8_e4m3fn_row_bf16", "nvfp4_mul"));
    }
    if let Some(source) = fixture("dense-demo-quasar") {
        let (plan, ..) = made(&source, "qwen3_8_27b_nvfp4_quasar", &[]);
        for class in ["mlp.gate", "attn.q", "gdn.a", "gdn.b"] {
            assert_eq!(format(&plan, class), "nvfp4", "{class}");
        }
        assert_eq!(format(&plan, "head"), "fp8_e4m3fn_row_bf16");
        made(&source, "qwen3_8_27b_nvfp4_orcarouter", &[]);
        if let Some(bf16) = fixture("dense-demo-bf16") {
            let (plan, ..) = made(&bf16, "qwen3_6_27b_nvfp4", &[("quantized", &source)]);
            assert_eq!((format(&plan, "attn.q"), format(&plan, "embed")), ("nvfp4", "q8_g32_fp16"));
        }
    }
}

#[test]
fn the_mixture_keeps_late_down_projections_wider() {
    let Some(source) = shared().map(|s| s.join("reference/tiny_models/moe4")).filter(|p| p.is_dir()) else {
        eprintln!("skipped: shared/reference/tiny_models/moe4 is not here");
        return;
    };
    // The tiny model has no tokenizer; this one is of a model with as many tokens.
    let Some(tokens) = fixture("flash-tiny-fp8") else { return };
    let (plan, ..) = made(&source, "qwen3_6_35b_a3b", &[("resources", &tokens)]);
    assert_eq!(format(&plan, "moe.experts"), "q4_g64_fp16, q5_g64_fp16");
    assert_eq!((format(&plan, "head"), format(&plan, "moe.router")), ("q6_g64_fp16", "bf16"));
    let late = Recipe::load("qwen3_6_35b_a3b").unwrap();
    let rule = |layer| {
        let (class, component) = (infernix_model::Class::Experts, infernix_model::Component::Text);
        late.rule(class, component, Some(layer), "bf16").unwrap().down
    };
    assert_eq!(rule(33), Some(infernix_formats::Format::Q5G64));
    assert_eq!(rule(38), Some(infernix_formats::Format::Q6G64));
    let dir = tempfile::tempdir().unwrap();
    let error =
        plan_error(&source, "qwen3_5_122b_a10b_nvfp4_ornith", &dir.path().join("x.infernix"), &tokens);
    assert!(error.contains("nvfp4_mul or nvfp4"), "{error}");
}

fn plan_error(source: &Path, recipe: &str, out: &Path, resources: &Path) -> String {
    let mut o = options(source, recipe, out);
    o.sources.push(SourceSpec::new("resources", resources));
    plan(&o).unwrap_err().to_string()
}

#[test]
fn a_drafter_alone_becomes_a_companion() {
    for (name, recipe, component) in [
        ("dense-demo-dflash", "auto", "dflash"),
        ("dense-demo-dflash2", "auto", "dflash2"),
        ("dense-demo-dflash2", "qwen3_8_flash_next_dflash2", "dflash2"),
    ] {
        let Some(source) = fixture(name) else { continue };
        let (plan, _, dir) = made(&source, recipe, &[]);
        assert!(plan.config.is_none() && plan.ngram.is_none());
        let artifact = Artifact::open(&dir.path().join("x.infernix")).unwrap();
        assert!(artifact.directory().is_drafter());
        let record = &artifact.directory().components[component];
        assert_eq!(record.config["dflash_config"]["mask_token_id"], 4089);
        assert_eq!(record.target, None);
        let eight = format(&plan, &format!("{component}/attn.q")) == "q8_g32_fp16";
        assert_eq!(eight, recipe != "auto", "{name} {recipe}");
    }
    let (Some(target), Some(drafter)) = (fixture("flash-demo-bf16"), fixture("dense-demo-dflash2")) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let mut o = options(&target, "auto", &dir.path().join("x.infernix"));
    o.sources.push(SourceSpec::new("dflash", &drafter));
    let error = plan(&o).unwrap_err().to_string();
    assert!(error.contains("dflash2 drafter"), "{error}");
}

#[test]
fn inspection_says_what_a_drafter_alone_is() {
    let dir = tempfile::tempdir().unwrap();
    let config = serde_json::json!({
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "vocab_size": 64,
        "num_target_layers": 6, "dflash_config": { "target_layer_ids": [1, 4], "mask_token_id": 63, "block_size": 8 },
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let header = r#"{"fc.weight":{"dtype":"BF16","shape":[8,16],"data_offsets":[0,256]}}"#;
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 256]].concat();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    let checkpoint = Checkpoint::open(dir.path(), &OpenOptions::default()).unwrap();
    let found = checkpoint_classes(&checkpoint).unwrap();
    let what = "dflash drafter: 1 layer, blocks of 8 positions; for a model of 6 layers, width 8, vocabulary 64, of which it \
                reads layers 1, 4";
    assert_eq!(found.what, what);
    assert!(found.to_text().starts_with(what) && found.to_json()["what"] == what);
    assert_eq!(found.classes[&("dflash".into(), "dflash.fc".into())]["bf16"], 1);
    assert_eq!((found.other, found.recipes.len()), (0, 0), "most tensors are missing");

    let Some(source) = fixture("dense-demo-dflash2") else { return };
    let found = checkpoint_classes(&Checkpoint::open(&source, &OpenOptions::default()).unwrap()).unwrap();
    assert!(found.what.starts_with("dflash2 drafter: ") && found.other == 0, "{found:?}");
    assert!(found.recipes.iter().any(|r| r == "qwen3_8_flash_next_dflash2"), "{:?}", found.recipes);
    // And what it is converted to.
    let (_, _, dir) = made(&source, "auto", &[]);
    let artifact = Artifact::open(&dir.path().join("x.infernix")).unwrap();
    let census = Census::of(artifact.directory(), None).unwrap();
    assert!(!census.classes.contains_key(&("dflash2".into(), "other".into())), "{:?}", census.classes.keys());
    assert!(census.decoder.is_empty() && !census.to_text().contains("text decoder"));
}

/// A toy of the 122B release, and the release's own geometry from headers.
#[test]
fn the_large_mixture_keeps_every_expert_and_projection() {
    let dir = tempfile::tempdir().unwrap();
    let make = |name: &str, args: &[&str]| {
        let out = dir.path().join(name);
        let tokenizer = crate::common::demo();
        let mut all = vec![out.to_str().unwrap(), "--tokenizer", tokenizer.to_str().unwrap(), "--mtp"];
        all.extend(args);
        let all: Vec<String> = all.iter().map(|a| (*a).to_owned()).collect();
        assert!(crate::synth::run(&all).is_ok(), "{all:?}");
        out
    };
    let small = make("small", &["--model", "122b-small", "--layers", "4"]);
    for recipe in ["qwen3_5_122b_a10b_nvfp4", "qwen3_5_122b_a10b_nvfp4_ornith"] {
        let (plan, report, _dir) = made(&small, recipe, &[]);
        assert_eq!(
            (format(&plan, "moe.experts"), format(&plan, "attn.q")),
            ("nvfp4_mul", "fp8_e4m3fn_tensor_f32")
        );
        assert_eq!((format(&plan, "gdn.z"), format(&plan, "gdn.a")), ("fp8_e4m3fn_tensor_f32", "bf16"));
        assert_eq!(format(&plan, "mtp/moe.experts"), "q4_g64_fp16");
        assert_eq!((report.experts, plan.default_expert_activation), (4 * 16, 4));
        assert!(report.requantized_parameters.iter().all(|p| p.name.starts_with("mtp/")), "{report:?}");
    }
    let real = make("real", &["--model", "122b", "--layers", "48", "--vocab", "248320", "--headers-only"]);
    let mut o = options(&real, "qwen3_5_122b_a10b_nvfp4", &dir.path().join("x.infernix"));
    o.dry_run = true;
    let plan = plan(&o).unwrap();
    assert!(plan.missing.is_empty(), "{:?}", plan.missing);
    // Records of 5,308,416 bytes, 256 a layer: 60.75 GiB, and three multipliers an expert.
    assert_eq!(plan.classes["moe.experts"].bytes, 48 * 256 * (5_308_416 + 12));
    assert!(plan.memory_needed_bytes() < 1 << 30);
}
