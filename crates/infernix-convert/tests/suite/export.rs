//! Artifacts written back as checkpoints and GGUF models: the same words, or a refusal that says why.

use crate::common::{converted, demo, fixture, options, run};
use infernix_artifact::{ArtifactError, Faults, Interrupt};
use infernix_checkpoint::Gguf;
use infernix_convert::{
    ConvertError, ExportOptions, ExportTarget, Relation::SameValues, RunOptions, Silent, VerifyOptions,
    derivation, export, plan_export, verify,
};
use infernix_model::Component;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn to(artifact: &Path, target: ExportTarget, output: &Path) -> ExportOptions {
    ExportOptions {
        artifact: artifact.to_owned(),
        target,
        output: output.to_owned(),
        ngram: None,
        components: None,
        shard_bytes: u64::MAX,
        bit_exact: false,
        resume: false,
    }
}

fn exported(o: &ExportOptions) -> Result<infernix_convert::ExportOutcome, ConvertError> {
    export(&plan_export(o)?, &Silent, &run())
}

/// An artifact of a checkpoint in `dir`, by `recipe`.
fn artifact(dir: &Path, checkpoint: &Path, recipe: &str) -> (PathBuf, String) {
    let out = dir.join("a.infernix");
    let (_, outcome) =
        converted(&options(checkpoint, recipe, &out)).unwrap_or_else(|e| panic!("{checkpoint:?}: {e}"));
    (out, outcome.digest.to_string())
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(p).unwrap()))
        .collect()
}

#[test]
fn every_scheme_comes_back_as_safetensors_with_the_same_digest() {
    for name in [
        "flash-demo-nvfp4",
        "flash-demo-bf16",
        "dense-demo-bf16",
        "dense-demo-quasar",
        "dense-demo-nvidia",
        "flash-tiny-fp8",
        "flash-tiny-fp4local",
        "flash-tiny-orcarouter",
    ] {
        let checkpoint = if name == "flash-demo-nvfp4" { Some(demo()) } else { fixture(name) };
        let Some(checkpoint) = checkpoint else { continue };
        let dir = tempfile::tempdir().unwrap();
        let (first, digest) = artifact(dir.path(), &checkpoint, "auto");
        let folder = dir.path().join("back");
        let mut o = to(&first, ExportTarget::Safetensors, &folder);
        // Several shards, so that the index is used too.
        o.shard_bytes = 4_000_000;
        let outcome = exported(&o).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(outcome.files.iter().all(|(p, n)| p.metadata().unwrap().len() == *n), "{name}");
        let (plan, again) = converted(&options(&folder, "auto", &dir.path().join("b.infernix"))).unwrap();
        assert_eq!(again.digest.to_string(), digest, "{name}");
        assert!(plan.ignored.is_empty(), "{name}: {:?}", plan.ignored);
        let odd: Vec<_> = plan.warnings.iter().filter(|w| w.contains("are believed")).collect();
        assert!(odd.is_empty(), "{name}: the configuration describes the tensors: {odd:?}");
        for resource in
            ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
        {
            let read = |folder: &Path| std::fs::read(folder.join(resource)).ok();
            assert_eq!(read(&folder), read(&checkpoint), "{name}: {resource}");
        }
        // Every plain or packed tensor of the source is there under its name, with its bytes.
        let open = |path: &Path| {
            infernix_checkpoint::Checkpoint::open(path, &infernix_checkpoint::OpenOptions::default()).unwrap()
        };
        let (a, b) = (open(&checkpoint), open(&folder));
        let mut same = 0;
        for t in a.tensors() {
            if let Some(u) = b.get(&t.name).filter(|u| u.dtype == t.dtype) {
                assert_eq!(a.read_all(t).unwrap(), b.read_all(u).unwrap(), "{name}: {}", t.name);
                same += 1;
            }
        }
        assert!(same * 10 >= a.tensors().len() * 9, "{name}: {same} of {}", a.tensors().len());
    }
}

#[test]
fn gguf_models_come_back_block_for_block() {
    for name in ["flash-demo-gguf", "flash-wide-gguf", "dense-demo-gguf"] {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let (first, digest) = artifact(dir.path(), &checkpoint, "auto");
        for (file, shard) in [("back.gguf", u64::MAX), ("split.gguf", 2_000_000)] {
            let mut o = to(&first, ExportTarget::Gguf, &dir.path().join(file));
            o.shard_bytes = shard;
            let outcome = exported(&o).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(outcome.files.len() > 1, shard < u64::MAX, "{name}");
            let entry = &outcome.files[0].0;
            let (a, b) = (Gguf::open(&checkpoint).unwrap(), Gguf::open(entry).unwrap());
            for t in a.tensors() {
                let u = b.get(&t.name).unwrap_or_else(|| panic!("{name}: {} is gone", t.name));
                assert_eq!((t.ty, &t.shape), (u.ty, &u.shape), "{name}: {}", t.name);
                let read = |g: &Gguf, t| {
                    let t: &infernix_checkpoint::GgufTensor = t;
                    let mut bytes = vec![0; (t.rows() * t.row_bytes()) as usize];
                    g.read(t, 0..bytes.len() as u64, &mut bytes).unwrap();
                    bytes
                };
                let (x, y) = (read(&a, t), read(&b, u));
                // exp in F32 is not the same in every library: the words may be a unit apart, the weight is not.
                if t.name.ends_with("ssm_a") {
                    let near = |a: &[u8], b: &[u8]| {
                        let word = |b: &[u8]| u32::from_le_bytes(b.try_into().unwrap());
                        word(a).abs_diff(word(b)) <= 2
                    };
                    assert!(x.chunks(4).zip(y.chunks(4)).all(|(a, b)| near(a, b)), "{name}: {}", t.name);
                } else {
                    assert_eq!(x, y, "{name}: {}", t.name);
                }
            }
            assert_eq!(a.tensors().len(), b.tensors().len(), "{name}");
            for (key, value) in a.metadata().iter() {
                let skip = ["general.", "quantize.", "split."].iter().any(|p| key.starts_with(p));
                if skip || matches!(value, infernix_checkpoint::gguf::Value::Array(_)) {
                    continue;
                }
                assert_eq!(b.metadata().get(key), Some(value), "{name}: {key}");
            }
            for key in ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"] {
                assert_eq!(a.text_list(key).unwrap(), b.text_list(key).unwrap(), "{name}: {key}");
            }
            assert_eq!(
                a.unsigned_list("tokenizer.ggml.token_type").unwrap(),
                b.unsigned_list("tokenizer.ggml.token_type").unwrap()
            );
            let out = dir.path().join(format!("{file}.infernix"));
            let (_, again) = converted(&options(entry, "auto", &out)).unwrap();
            assert_eq!(again.digest.to_string(), digest, "{name}: {file}");
        }
    }
}

/// A checkpoint, its artifact, and the GGUF model made of it have the same values in every parameter.
#[test]
fn checkpoints_keep_every_value_as_gguf() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("groups.toml");
    std::fs::write(
        &recipe,
        "title = \"groups\"\ninclude = [\"auto\"]\n[[rule]]\nclass = [\"gdn.*\", \"mlp.*\"]\nscheme = [\"bf16\"]\n\
         component = [\"text\"]\nformat = \"stored\"\n\
         [[rule]]\nclass = [\"mlp.gate\", \"mlp.up\"]\ncomponent = [\"text\"]\nformat = \"q4_g64_fp16\"\nmethod = \"absmax\"\n\
         [[rule]]\nclass = [\"mlp.down\", \"gdn.q\", \"gdn.k\", \"gdn.v\", \"gdn.z\"]\ncomponent = [\"text\"]\n\
         format = \"q5_g64_fp16\"\nmethod = \"absmax\"\n\
         [[rule]]\nclass = [\"gdn.o\", \"attn.o\", \"head\"]\ncomponent = [\"text\"]\nformat = \"q8_g32_fp16\"\nmethod = \"absmax\"\n",
    )
    .unwrap();
    for (name, recipe) in [
        ("dense-demo-bf16", "auto"),
        ("dense-demo-bf16", recipe.to_str().unwrap()),
        ("flash-demo-bf16", "auto"),
    ] {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let (first, _) = artifact(dir.path(), &checkpoint, recipe);
        let file = dir.path().join("back.gguf");
        let mut o = to(&first, ExportTarget::Gguf, &file);
        o.components = Some(vec![Component::Text, Component::Vision, Component::Mtp]);
        let plan = plan_export(&o).unwrap_or_else(|e| panic!("{name}: {e}"));
        let outcome = export(&plan, &Silent, &run()).unwrap_or_else(|e| panic!("{name}: {e}"));
        // The image tower lies in a file of its own.
        assert_eq!(outcome.files.len(), 2);
        // The GGUF model itself, its tower beside it, and what it is converted to again.
        let direct = derivation(&file, &first, &Silent, &Interrupt::default()).unwrap();
        assert!(direct.derived && direct.only_second.is_empty(), "{name}: {direct:#?}");
        let mut o = options(&file, "auto", &dir.path().join("b.infernix"));
        o.sources.push(infernix_convert::SourceSpec::new("vision", dir.path().join("mmproj-back.gguf")));
        converted(&o).unwrap_or_else(|e| panic!("{name}: {e}"));
        let report = derivation(&o.output, &first, &Silent, &Interrupt::default())
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        // What the plan says is rounded, and nothing else, is told apart.
        for report in [&direct, &report] {
            let rounded: Vec<_> = report.parameters.iter().filter(|p| p.relation > SameValues).collect();
            assert!(!rounded.is_empty() && rounded.len() == plan.rounded().len(), "{name}: {rounded:#?}");
            assert!(rounded.iter().all(|p| p.rounding.as_deref() == Some("1 + w in FP32")), "{rounded:#?}");
        }
        assert!(
            report.derived && report.only_first.is_empty() && report.only_second.is_empty(),
            "{name}: {report:?}"
        );
    }
}

/// FP32 does not hold 1 + w of every norm weight w: which tensors lose words is said, and refused if asked.
#[test]
fn what_a_convention_rounds_is_named_or_refused() {
    let Some(checkpoint) = fixture("dense-demo-bf16") else { return };
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = artifact(dir.path(), &checkpoint, "auto");
    let mut o = to(&first, ExportTarget::Gguf, &dir.path().join("back.gguf"));
    let plan = plan_export(&o).unwrap();
    let said = plan.rounding().expect("a warning");
    let one = &plan.rounded()[0];
    assert!(one.words > 0 && one.words < one.of && one.rounding == "1 + w in FP32", "{one:?}");
    for word in [&one.name, one.rounding, &one.words.to_string(), &plan.rounded().len().to_string()] {
        assert!(said.contains(word), "{word} in {said}");
    }
    assert_eq!(plan.to_json()["rounded"][0]["name"], one.name.as_str());
    o.bit_exact = true;
    assert!(plan_export(&o).unwrap_err().to_string().contains(&said));
    // Weights that came from GGUF go back word for word, and safetensors has no such convention.
    o.target = ExportTarget::Safetensors;
    assert!(plan_export(&o).unwrap().rounded().is_empty());
    let Some(checkpoint) = fixture("dense-demo-gguf") else { return };
    let again = dir.path().join("gguf");
    std::fs::create_dir(&again).unwrap();
    let (first, _) = artifact(&again, &checkpoint, "auto");
    let mut o = to(&first, ExportTarget::Gguf, &again.join("back.gguf"));
    o.bit_exact = true;
    plan_export(&o).unwrap();
}

/// NVFP4 with its second scale goes to GGUF blocks and comes back as the same planes, multipliers and activation scales.
#[test]
fn nvfp4_with_second_scales_survives_gguf() {
    let Some(bf16) = fixture("flash-demo-bf16") else { return };
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = artifact(dir.path(), &demo(), "auto");
    let other = dir.path().join("bf16");
    std::fs::create_dir(&other).unwrap();
    artifact(&other, &bf16, "auto");
    let file = dir.path().join("back.gguf");
    let mut o = to(&first, ExportTarget::Gguf, &file);
    o.components = Some(vec![Component::Text]);
    let refused = exported(&o).unwrap_err().to_string();
    assert!(refused.contains("n-gram table") && refused.contains("fp8_e4m3fn"), "{refused}");
    // Any volume of the same table serves: one whose rows GGUF can hold.
    o.ngram = Some(other.join("a.infernix.ngram"));
    exported(&o).unwrap();
    let out = dir.path().join("b.infernix");
    let (plan, _) = converted(&options(&file, "auto", &out)).unwrap();
    assert_eq!(plan.default_expert_activation, 4);
    let mut v = VerifyOptions::new(&out, Some(file.clone()));
    v.threads = 2;
    assert!(verify(&v, &Silent, &Interrupt::default()).unwrap().ok);
    let open = |path: &Path| infernix_artifact::Artifact::open(path).unwrap();
    let (a, b) = (open(&first), open(&out));
    let bytes = |a: &infernix_artifact::Artifact, name: &str| {
        let infernix_artifact::Binding::Whole { object } = &a.directory().bindings[name] else {
            panic!("{name}")
        };
        let object = a.object(object).unwrap();
        (object.format().map(str::to_owned), a.bytes(object).unwrap().as_ref().to_vec())
    };
    for layer in 0..8 {
        for what in ["experts", "expert_input_scales"] {
            let name = format!("text/layers/{layer}/moe/{what}");
            assert_eq!(bytes(&a, &name), bytes(&b, &name), "{name}");
        }
    }
}

#[test]
fn what_a_target_cannot_hold_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let six = dir.path().join("six.toml");
    let text = "title = \"six\"\ninclude = [\"auto\"]\n[[rule]]\nclass = [\"mlp.up\"]\ncomponent = [\"text\"]\nformat = \"q6_g64_fp16\"\n";
    std::fs::write(&six, text).unwrap();
    let cases: [(&str, &str, ExportTarget, &[&str]); 7] = [
        (
            "flash-demo-nvfp4",
            "qwen3_8_flash_next_nvfp4_dense8",
            ExportTarget::Safetensors,
            &["q8_g32_fp16", "gguf"],
        ),
        ("dense-demo-gguf", "auto", ExportTarget::Safetensors, &["ggml_q4_k", "gguf"]),
        ("dense-demo-nvidia", "auto", ExportTarget::Gguf, &["fp8_e4m3fn_tensor_f32", "no FP8 type"]),
        ("dense-demo-quasar", "auto", ExportTarget::Gguf, &["divisor", "rounded"]),
        ("flash-tiny-fp4local", "auto", ExportTarget::Gguf, &["mxfp8", "no FP8 type"]),
        (
            "dense-demo-bf16",
            "qwen3_8_27b_q6",
            ExportTarget::Gguf,
            &["q4_g64_fp16 and as q5_g64_fp16", "one type"],
        ),
        ("dense-demo-bf16", six.to_str().unwrap(), ExportTarget::Gguf, &["ffn_up", "q6_g64_fp16", "four"]),
    ];
    for (n, (name, recipe, target, words)) in cases.into_iter().enumerate() {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = dir.path().join(n.to_string());
        std::fs::create_dir(&dir).unwrap();
        let (first, _) = artifact(&dir, &checkpoint, recipe);
        let out = dir.join("back.gguf");
        let error = exported(&to(&first, target, &out)).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{name}: {word} in {error}");
        }
        assert!(!out.exists() && !dir.join("back.gguf.partial").exists(), "{name}: nothing is left behind");
    }
}

#[test]
fn a_block_drafter_is_exported_as_the_checkpoint_it_was() {
    for name in ["dense-demo-dflash", "dense-demo-dflash2"] {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let (first, digest) = artifact(dir.path(), &checkpoint, "auto");
        let folder = dir.path().join("back");
        exported(&to(&first, ExportTarget::Safetensors, &folder)).unwrap();
        let (_, again) = converted(&options(&folder, "auto", &dir.path().join("b.infernix"))).unwrap();
        assert_eq!(again.digest.to_string(), digest, "{name}");
        let error =
            exported(&to(&first, ExportTarget::Gguf, &dir.path().join("x.gguf"))).unwrap_err().to_string();
        assert!(error.contains("no GGUF architecture"), "{error}");
    }
}

#[test]
fn killed_at_any_disk_operation_an_export_resumes_to_the_identical_files() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = artifact(dir.path(), &demo(), "auto");
    let folder = dir.path().join("whole");
    let mut o = to(&first, ExportTarget::Safetensors, &folder);
    o.shard_bytes = 8_000_000;
    let counter = Faults::after(u64::MAX);
    let counted = RunOptions { faults: Some(counter.clone()), ..run() };
    export(&plan_export(&o).unwrap(), &Silent, &counted).unwrap();
    let expected = files(&folder);
    let operations = counter.operations();
    for point in 0..operations {
        o.output = dir.path().join(format!("killed-{point}"));
        o.resume = false;
        let killed = RunOptions { faults: Some(Faults::after(point)), ..run() };
        let error = export(&plan_export(&o).unwrap(), &Silent, &killed).unwrap_err();
        assert!(matches!(&error, ConvertError::Artifact(ArtifactError::Killed)), "{point}: {error}");
        o.resume = true;
        let outcome = exported(&o).unwrap_or_else(|e| panic!("killed at {point} of {operations}: {e}"));
        assert_eq!(files(&o.output), expected, "killed at {point}");
        assert!(!dir.path().join(format!("killed-{point}.partial")).exists());
        if point + 12 == operations {
            assert!(outcome.resumed_bytes * 2 > expected.values().map(|f| f.len() as u64).sum::<u64>());
        }
        std::fs::remove_dir_all(&o.output).unwrap();
    }
}

#[test]
fn existing_output_foreign_state_and_interruptions_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = artifact(dir.path(), &demo(), "auto");
    let mut o = to(&first, ExportTarget::Safetensors, &dir.path().join("out"));
    let flag = Arc::new(AtomicBool::new(true));
    let stopped = RunOptions { interrupt: Interrupt::new(flag), ..run() };
    let error = export(&plan_export(&o).unwrap(), &Silent, &stopped).unwrap_err();
    assert!(error.is_interrupted(), "{error}");
    let error = exported(&o).unwrap_err().to_string();
    assert!(error.contains("--resume") && error.contains("infernix clean"), "{error}");
    o.resume = true;
    o.shard_bytes = 9_000_000;
    let error = exported(&o).unwrap_err().to_string();
    assert!(error.contains("cannot resume") && error.contains("--shard-size"), "{error}");
    o.shard_bytes = u64::MAX;
    exported(&o).unwrap();
    assert!(exported(&o).unwrap().complete);
    o.resume = false;
    let error = exported(&o).unwrap_err().to_string();
    assert!(error.contains("already exists"), "{error}");
    // A damaged artifact: a part is missing, a file is cut, the volume is another's.
    let broken = dir.path().join("broken.infernix");
    let bytes = std::fs::read(&first).unwrap();
    std::fs::write(&broken, &bytes[..bytes.len() - 5000]).unwrap();
    let error =
        plan_export(&to(&broken, ExportTarget::Safetensors, &dir.path().join("x"))).unwrap_err().to_string();
    assert!(error.contains("truncated"), "{error}");
    std::fs::write(&broken, &bytes).unwrap();
    let error = plan_export(&to(&broken, ExportTarget::Safetensors, &dir.path().join("x")))
        .map(|_| String::new())
        .unwrap_or_else(|e| e.to_string());
    // The volume is found by its id.
    assert!(error.is_empty(), "{error}");
    std::fs::remove_file(dir.path().join("a.infernix.ngram")).unwrap();
    let error =
        plan_export(&to(&first, ExportTarget::Safetensors, &dir.path().join("x"))).unwrap_err().to_string();
    assert!(error.contains("--ngram"), "{error}");
}
