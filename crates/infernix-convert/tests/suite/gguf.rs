//! GGUF sources: blocks word for word, rows in the source's order, config and tokenizer from the file's keys.

use crate::common::{converted, fixture, options};
use infernix_artifact::{Artifact, Interrupt};
use infernix_convert::{Proof, Silent, SourceSpec, VerifyOptions, plan, verify};
use std::path::Path;

#[test]
fn every_gguf_demo_converts_and_verifies() {
    for (name, formats, rows) in [
        (
            "flash-demo-gguf",
            &["ggml_iq3_s+iq3_s+iq4_nl", "ggml_q8_0", "ggml_q6_k", "ggml_q5_k", "bf16", "fp32"][..],
            Some("bf16"),
        ),
        (
            "flash-wide-gguf",
            &["ggml_iq3_s+iq3_s+iq4_nl", "ggml_iq3_xxs+iq3_xxs+iq4_nl", "ggml_q2_0+q2_0+iq4_nl", "ggml_q4_k"],
            Some("ggml_iq4_nl"),
        ),
        ("dense-demo-gguf", &["ggml_q4_k", "ggml_q5_k", "ggml_q6_k", "ggml_q8_0"], None),
    ] {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("x.infernix");
        let (plan, outcome) =
            converted(&options(&checkpoint, "auto", &out)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut o = VerifyOptions::new(&out, Some(checkpoint.clone()));
        o.threads = 2;
        let report = verify(&o, &Silent, &Interrupt::default()).unwrap();
        assert!(report.ok, "{name}: {report:#?}");
        assert_eq!(report.digest, Some(outcome.digest), "{name}");
        assert!(
            report.requantized_parameters.is_empty() && plan.ignored.is_empty(),
            "{name}: {:?}",
            plan.ignored
        );
        for format in formats {
            let has = |o: &infernix_convert::PlannedObject| o.format.is_some_and(|f| f.name() == *format);
            assert!(plan.objects.iter().any(has), "{name}: {format}");
        }
        assert_eq!(plan.ngram.as_ref().map(|n| n.format.name()), rows, "{name}");
        // Norms and A_log are functions of the file's words; tiled heads are another order of them.
        let proof = |parameter: &str| {
            let found = plan.objects.iter().find(|o| o.parameters.iter().any(|p| p == parameter));
            found.unwrap_or_else(|| panic!("{name}: {parameter}")).proof
        };
        assert_eq!(proof("text/layers/0/gdn/a_log"), Proof::Reencoded, "{name}");
        assert_eq!(proof("text/layers/0/gdn/norm"), Proof::Identical, "{name}");
        assert_eq!(proof("text/layers/0/gdn/z"), Proof::Permuted, "{name}");
        assert_eq!(proof("text/head"), Proof::Identical, "{name}");
    }
}

#[test]
fn columns_that_cannot_move_are_told_to_the_engine() {
    let Some(checkpoint) = fixture("dense-demo-gguf") else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    converted(&options(&checkpoint, "auto", &out)).unwrap();
    let artifact = Artifact::open(&out).unwrap();
    let uses = &artifact.directory().uses;
    let of = |name: &str| uses.iter().find(|u| u.parameter == name).unwrap().auxiliaries.get("input_columns");
    let order = of("text/layers/0/gdn/o").expect("Q5_K blocks cross heads of 128");
    assert_eq!(of("text/layers/6/gdn/o"), Some(order), "one object for all layers");
    assert_eq!(of("text/layers/0/gdn/z"), None);
    let object = artifact.object(order).unwrap();
    let bytes = artifact.bytes(object).unwrap();
    let columns: Vec<u32> =
        bytes.as_ref().as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect();
    // Two key heads with two value heads each: stored heads 0, 1, 2, 3 are the source's 0, 2, 1, 3.
    assert_eq!([columns[0], columns[128], columns[256], columns[511]], [0, 256, 128, 511]);
}

/// The same order on both sides: a re-quantized matrix has the source's, whatever its blocks had.
#[test]
fn requantizing_a_gguf_puts_columns_in_order() {
    let (Some(gguf), Some(bf16)) = (fixture("dense-demo-gguf"), fixture("dense-demo-bf16")) else { return };
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("eight.toml");
    std::fs::write(
        &recipe,
        "title = \"all linears at 8 bits\"\ninclude = [\"auto\"]\n[[rule]]\nclass = [\"gdn.o\", \"mlp.*\"]\n\
         component = [\"text\"]\nformat = \"q8_g32_fp16\"\nmethod = \"absmax\"\n",
    )
    .unwrap();
    let decode = |checkpoint: &Path, file: &str| {
        let out = dir.path().join(file);
        converted(&options(checkpoint, recipe.to_str().unwrap(), &out)).unwrap();
        let mut o = VerifyOptions::new(&out, Some(checkpoint.to_owned()));
        o.threads = 2;
        let report = verify(&o, &Silent, &Interrupt::default()).unwrap();
        assert!(report.ok, "{report:#?}");
        let artifact = Artifact::open(&out).unwrap();
        let uses = &artifact.directory().uses;
        assert!(uses.iter().all(|u| u.parameter != "text/layers/0/gdn/o" || u.auxiliaries.is_empty()));
        let infernix_artifact::Binding::Whole { object } =
            &artifact.directory().bindings["text/layers/0/gdn/o"]
        else {
            panic!("a whole object")
        };
        let object = artifact.object(object).unwrap();
        let bytes = artifact.bytes(object).unwrap();
        let shape = object.shape().unwrap().to_vec();
        let layout = object.layout().parse().unwrap();
        let format = object.format().unwrap().parse().unwrap();
        let encoded = infernix_formats::Encoded::new(layout, format, &shape, bytes.as_ref()).unwrap();
        let mut values = vec![0f32; (shape[0] * shape[1]) as usize];
        encoded.decode_rows_f32(0..shape[0], &mut values).unwrap();
        values
    };
    let (a, b) = (decode(&gguf, "g.infernix"), decode(&bf16, "b.infernix"));
    let error: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(x - y).powi(2)).sum();
    let total: f64 = b.iter().map(|y| f64::from(*y).powi(2)).sum();
    assert!((error / total).sqrt() < 0.1, "relative error {}", (error / total).sqrt());
}

#[test]
fn a_second_source_brings_the_drafter_and_the_image_tower() {
    let (Some(gguf), Some(nvfp4)) = (fixture("flash-demo-gguf"), fixture("flash-demo-nvfp4")) else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    let mut o = options(&gguf, "auto", &out);
    o.sources.push(SourceSpec::new("mtp", &nvfp4));
    o.sources.push(SourceSpec::new("vision", &nvfp4));
    let (plan, outcome) = converted(&o).unwrap();
    let names: Vec<_> = plan.components.iter().map(|c| c.name()).collect();
    assert_eq!(names, ["text", "mtp", "vision"]);
    let mut v = VerifyOptions::new(&out, None);
    (v.sources, v.threads) = (o.sources.clone(), 2);
    let report = verify(&v, &Silent, &Interrupt::default()).unwrap();
    assert!(report.ok && report.digest == Some(outcome.digest), "{report:#?}");
    let artifact = Artifact::open(&out).unwrap();
    assert_eq!(artifact.directory().components["vision"].config["image_token_id"], 4088);
    assert!(artifact.resource("vision", "preprocessor_config.json").is_ok());
}

#[test]
fn a_gguf_without_its_compress_ratio_asks_for_the_source() {
    let Some(gguf) = fixture("flash-demo-gguf") else { return };
    let dir = tempfile::tempdir().unwrap();
    for name in ["flash-demo-IQ3_S-00001-of-00002.gguf", "flash-demo-IQ3_S-00002-of-00002.gguf"] {
        let mut bytes = std::fs::read(gguf.join(name)).unwrap();
        let key = b"qwen4exp.attention.compress_ratios";
        if let Some(at) = bytes.windows(key.len()).position(|w| w == key) {
            // Key, value type, element type, count; then the ratios.
            let first = at + key.len() + 4 + 4 + 8;
            bytes[first..first + 8 * 4].fill(0);
        }
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    let mut o = options(dir.path(), "auto", &dir.path().join("x.infernix"));
    o.dry_run = true;
    let error = plan(&o).unwrap_err().to_string();
    assert!(error.contains("compress ratio") && error.contains("--source resources="), "{error}");
    let Some(bf16) = fixture("flash-demo-bf16") else { return };
    o.sources.push(SourceSpec::new("resources", bf16));
    let plan = plan(&o).unwrap();
    assert_eq!(plan.config.as_ref().unwrap().qsa.as_ref().unwrap().ratio, 16);
    assert!(
        plan.warnings.iter().any(|w| w.contains("sparse attention is switched off")),
        "{:?}",
        plan.warnings
    );
}

/// Writes the image tower of a checkpoint as llama.cpp's converter does: frames of the patch embedding apart.
fn tower(from: &Path, to: &Path) {
    let checkpoint =
        infernix_checkpoint::Checkpoint::open(from, &infernix_checkpoint::OpenOptions::default()).unwrap();
    let config = checkpoint.config().unwrap();
    let v = &config["vision_config"];
    let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let mut pairs: Vec<Vec<u8>> = Vec::new();
    let mut string =
        |key: &str, value: &str| pairs.push([text(key), 8u32.to_le_bytes().to_vec(), text(value)].concat());
    string("general.architecture", "clip");
    string("general.type", "mmproj");
    for (key, name) in [
        ("block_count", "depth"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_heads"),
        ("patch_size", "patch_size"),
        ("spatial_merge_size", "spatial_merge_size"),
        ("projection_dim", "out_hidden_size"),
    ] {
        let value = (v[name].as_u64().unwrap() as u32).to_le_bytes();
        pairs.push(
            [text(&format!("clip.vision.{key}")), 4u32.to_le_bytes().to_vec(), value.to_vec()].concat(),
        );
    }
    let mut tensors: Vec<(String, Vec<u64>, Vec<u8>)> = Vec::new();
    for t in checkpoint.tensors().filter(|t| t.name.starts_with("model.visual.")) {
        let name = t.name.strip_prefix("model.visual.").unwrap();
        let bytes = checkpoint.read_all(t).unwrap();
        if name == "patch_embed.proj.weight" {
            let &[d, c, frames, p, q] = &*t.shape else { panic!("five dimensions") };
            let plane = (2 * p * q) as usize;
            for frame in 0..frames as usize {
                let rows =
                    bytes.chunks_exact(plane).enumerate().filter(|(i, _)| i % frames as usize == frame);
                let name = ["v.patch_embd.weight", "v.patch_embd.weight.1"][frame];
                tensors.push((name.into(), vec![d, c, p, q], rows.flat_map(|r| r.1.to_vec()).collect()));
            }
            continue;
        }
        let name = name
            .replace("blocks.", "v.blk.")
            .replace(".norm1.", ".ln1.")
            .replace(".norm2.", ".ln2.")
            .replace("attn.qkv", "attn_qkv")
            .replace("attn.proj", "attn_out")
            .replace("mlp.linear_fc1", "ffn_up")
            .replace("mlp.linear_fc2", "ffn_down")
            .replace("merger.norm", "v.post_ln")
            .replace("merger.linear_fc1", "mm.0")
            .replace("merger.linear_fc2", "mm.2")
            .replace("pos_embed", "v.position_embd")
            .replace("patch_embed.proj", "v.patch_embd");
        tensors.push((name, t.shape.to_vec(), bytes));
    }
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((pairs.len() as u64).to_le_bytes());
    pairs.iter().for_each(|p| out.extend(p));
    let mut offset = 0u64;
    for (name, shape, bytes) in &tensors {
        out.extend(text(name));
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(30u32.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += bytes.len().next_multiple_of(32) as u64;
    }
    for (.., bytes) in &tensors {
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(bytes);
    }
    out.resize(out.len().next_multiple_of(32), 0);
    std::fs::write(to, out).unwrap();
}

#[test]
fn an_image_tower_of_its_own_comes_back_word_for_word() {
    let (Some(gguf), Some(bf16)) = (fixture("flash-demo-gguf"), fixture("flash-demo-bf16")) else { return };
    let dir = tempfile::tempdir().unwrap();
    let mmproj = dir.path().join("mmproj.gguf");
    tower(&bf16, &mmproj);
    let made = |vision: &Path, name: &str| {
        let mut o = options(&gguf, "auto", &dir.path().join(name));
        o.sources.push(SourceSpec::new("vision", vision));
        let (plan, _) = converted(&o).unwrap();
        let mut v = VerifyOptions::new(&o.output, None);
        (v.sources, v.threads) = (o.sources.clone(), 2);
        let report = verify(&v, &Silent, &Interrupt::default()).unwrap();
        assert!(report.ok, "{report:#?}");
        assert!(plan.components.contains(&infernix_model::Component::Vision));
        let artifact = Artifact::open(&o.output).unwrap();
        let directory = artifact.directory();
        let words: Vec<_> = directory
            .bindings
            .iter()
            .filter(|(name, _)| name.starts_with("vision/"))
            .flat_map(|(name, b)| {
                let size = |id: &str| artifact.object(id).map_or(0, |o| o.elements());
                b.parts(size).into_iter().map(|p| (name.clone(), p)).collect::<Vec<_>>()
            })
            .map(|(name, p)| {
                let object = artifact.object(&p.object).unwrap();
                let bytes = artifact.bytes(object).unwrap();
                (name, bytes.as_ref()[2 * p.begin as usize..2 * p.end as usize].to_vec())
            })
            .collect();
        (words, directory.components["vision"].config["num_position_embeddings"].clone())
    };
    assert_eq!(made(&mmproj, "a.infernix"), made(&bf16, "b.infernix"));
}
