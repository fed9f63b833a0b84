//! The bad-input list for every kind of source: truncated, missing, mislabelled, contradictory and hostile files, a full
//! disk, an interrupted run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{converted, copy, fixture, options, run};
use crate::tensors::{Tensors, load, rebuilt, save};
use infernix_artifact::{ArtifactError, Faults};
use infernix_convert::{ConvertError, RunOptions, Silent, convert, plan};

/// Kinds of sources that the bundled demo is not: fixture, a quantized matrix, suffixes of its codes and scales.
const FOLDERS: [(&str, &str, &str, &str); 5] = [
    ("dense-demo-quasar", "model.language_model.layers.0.mlp.gate_proj", "weight_packed", "weight_scale"),
    (
        "flash-tiny-orcarouter",
        "model.language_model.layers.0.mlp.shared_expert.gate_proj",
        "weight",
        "weight_scale",
    ),
    ("flash-tiny-fp8", "model.language_model.layers.0.mlp.experts.1.up_proj", "weight", "weight_scale_inv"),
    ("flash-tiny-fp4local", "model.language_model.layers.0.linear_attn.in_proj_z", "weight", "weight_scale"),
    ("dense-demo-nvidia", "model.language_model.layers.0.linear_attn.in_proj_z", "weight", "weight_scale"),
];
const GGUFS: [&str; 3] = ["flash-demo-gguf", "flash-wide-gguf", "dense-demo-gguf"];

#[track_caller]
pub(crate) fn fails(source: &Path, words: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.infernix");
    let error = match converted(&options(source, "auto", &out)) {
        Ok(_) => panic!("{source:?} was converted"),
        Err(e) => e.to_string(),
    };
    assert!(!out.exists(), "nothing is published after {error}");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

/// Changes one file of a copy.
pub(crate) fn spoil(folder: &Path, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(folder.join(name)).unwrap();
    change(&mut bytes);
    std::fs::write(folder.join(name), bytes).unwrap();
}

pub(crate) fn files(folder: &Path, extension: &str) -> Vec<String> {
    let mut out: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.ends_with(extension))
        .collect();
    out.sort();
    out
}

/// Makes changed copies of a checkpoint in numbered folders.
pub(crate) fn copies<'a>(
    checkpoint: &'a Path,
    dir: &'a Path,
) -> impl FnMut(&dyn Fn(&mut Tensors)) -> PathBuf + 'a {
    let mut number = 0;
    move |change| {
        number += 1;
        let to = dir.join(number.to_string());
        rebuilt(checkpoint, &to, change);
        to
    }
}

#[test]
fn damaged_folders_of_every_scheme_are_told() {
    for (name, matrix, codes, scale) in FOLDERS {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let mut with = copies(&checkpoint, dir.path());
        let (words, scales) = (format!("{matrix}.{codes}"), format!("{matrix}.{scale}"));
        // Missing: a scale, codes.
        fails(&with(&|t| drop(t.remove(&scales))), &[matrix]);
        fails(&with(&|t| drop(t.remove(&words))), &[matrix]);
        // Mislabelled: a dtype that is no scheme, a scale of another shape.
        fails(&with(&|t| t.get_mut(&words).unwrap().0 = "I8".into()), &[matrix, "I8"]);
        let halved = with(&|t| {
            let s = t.get_mut(&scales).unwrap();
            match s.1.first_mut() {
                Some(n) if *n > 1 => {
                    *n /= 2;
                    s.2.truncate(s.2.len() / 2);
                }
                _ => (s.1, s.2) = (vec![3], [s.2.clone(), s.2.clone(), s.2.clone()].concat()),
            }
        });
        fails(&halved, &[matrix]);
        // Contradictory: the configuration is of another model.
        let other = with(&|_| {});
        spoil(&other, "config.json", |b| {
            let mut config: serde_json::Value = serde_json::from_slice(b).unwrap();
            let text = &mut config["text_config"];
            text["hidden_size"] = serde_json::json!(text["hidden_size"].as_u64().unwrap() * 2);
            *b = serde_json::to_vec(&config).unwrap();
        });
        fails(&other, &[]);
        // Truncated, grown, hostile.
        let short = with(&|_| {});
        spoil(&short, "model.safetensors", |b| b.truncate(b.len() - 1000));
        fails(&short, &["model.safetensors", "bytes"]);
        let long = with(&|_| {});
        spoil(&long, "model.safetensors", |b| b.extend([0; 64]));
        fails(&long, &["model.safetensors", "64"]);
        let hostile = with(&|_| {});
        spoil(&hostile, "model.safetensors", |b| b[..8].copy_from_slice(&(u64::MAX - 7).to_le_bytes()));
        fails(&hostile, &["model.safetensors"]);
        let lfs = with(&|_| {});
        std::fs::write(
            lfs.join("model.safetensors"),
            "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        )
        .unwrap();
        fails(&lfs, &["git-lfs"]);
        // A missing shard, where there are several.
        let shards = files(&checkpoint, ".safetensors");
        if shards.len() > 1 {
            let gone = dir.path().join("gone");
            copy(&checkpoint, &gone);
            std::fs::remove_file(gone.join(&shards[0])).unwrap();
            fails(&gone, &[&shards[0]]);
        }
    }
}

#[test]
fn damaged_gguf_models_are_told() {
    for name in GGUFS {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let parts = files(&checkpoint, ".gguf");
        let mut number = 0;
        let mut with = |part: &str, change: &dyn Fn(&mut Vec<u8>)| -> PathBuf {
            number += 1;
            let to = dir.path().join(number.to_string());
            std::fs::create_dir(&to).unwrap();
            for p in &parts {
                std::fs::copy(checkpoint.join(p), to.join(p)).unwrap();
            }
            spoil(&to, part, change);
            to
        };
        let find = |b: &[u8], what: &str| b.windows(what.len()).position(|w| w == what.as_bytes()).unwrap();
        let first = &parts[0];
        fails(&with(first, &|b| b.truncate(b.len() - 5000)), &[first, "bytes"]);
        fails(&with(first, &|b| b.extend([0; 4096])), &[first]);
        // Mislabelled: an unknown type, a type whose rows do not fit, another name.
        let ty = |b: &[u8]| find(b, "token_embd.weight") + "token_embd.weight".len() + 4 + 2 * 8;
        fails(
            &with(first, &|b| {
                let at = ty(b);
                b[at] = 99;
            }),
            &["token_embd.weight", "99"],
        );
        fails(
            &with(first, &|b| {
                let at = ty(b);
                b[at] = 0;
            }),
            &[first],
        );
        let renamed = with(first, &|b| {
            let at = find(b, "blk.0.ssm_out.weight");
            b[at + 6..at + 13].copy_from_slice(b"ssm_oof");
        });
        fails(&renamed, &["blk.0.ssm_oof"]);
        // Contradictory: another number of layers, of heads.
        for (key, value) in [("block_count", 3u32), ("ssm.time_step_rank", 3), ("embedding_length", 64)] {
            let changed = with(first, &|b| {
                let at = find(b, key) + key.len() + 4;
                b[at..at + 4].copy_from_slice(&value.to_le_bytes());
            });
            fails(&changed, &[]);
        }
        // Hostile: counts beyond the file, an offset that wraps.
        for at in [8usize, 16] {
            fails(&with(first, &|b| b[at..at + 8].copy_from_slice(&(u64::MAX / 2).to_le_bytes())), &[first]);
        }
        fails(
            &with(first, &|b| {
                let at = ty(b) + 4;
                b[at..at + 8].copy_from_slice(&(u64::MAX - 31).to_le_bytes());
            }),
            &[first, "offset"],
        );
        fails(&with(first, &|b| b[..4].copy_from_slice(b"GGML")), &[first]);
        if let [_, second] = &parts[..] {
            let gone = with(first, &|_| {});
            std::fs::remove_file(gone.join(second)).unwrap();
            fails(&gone, &[second]);
        }
    }
}

/// A word without a value of a tensor's dtype; none of packed codes.
fn no_value(dtype: &str) -> Option<&'static [u8]> {
    match dtype {
        "F8_E4M3" => Some(&[0x7F]),
        "BF16" => Some(&[0xC0, 0x7F]),
        "F32" => Some(&[0, 0, 0xC0, 0x7F]),
        _ => None,
    }
}

#[test]
fn words_and_names_that_cannot_be_are_told_for_every_scheme() {
    for (name, matrix, codes, scale) in FOLDERS {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let mut with = copies(&checkpoint, dir.path());
        let tensors = load(&checkpoint);
        // Words without a value: in the codes, in the scales, in a scale of a whole matrix.
        for (suffix, illegal) in [
            (codes, no_value(&tensors[&format!("{matrix}.{codes}")].0)),
            // E8M0 has one, too; U8 is nothing else among scales.
            (scale, no_value(&tensors[&format!("{matrix}.{scale}")].0).or(Some(&[0xFF]))),
        ] {
            let Some(word) = illegal else { continue };
            let spoilt = with(&|t| {
                t.get_mut(&format!("{matrix}.{suffix}")).unwrap().2[..word.len()].copy_from_slice(word)
            });
            fails(&spoilt, &[matrix.rsplit('.').next().unwrap().trim_end_matches("_proj")]);
        }
        let second = |t: &Tensors| {
            let whole = |n: &&String| n.ends_with(".weight_scale_2") || n.ends_with(".weight_global_scale");
            t.keys().find(whole).cloned()
        };
        if let Some(second) = second(&tensors) {
            for word in [0f32, f32::INFINITY, f32::NAN, -1.0] {
                let spoilt = with(&|t| t.get_mut(&second).unwrap().2 = word.to_le_bytes().to_vec());
                fails(&spoilt, &[&second, "positive finite"]);
            }
        }
        // One too few, one too many, one twice.
        let plain = tensors.iter().find(|(_, t)| t.0 == "BF16").map(|(n, _)| n.clone()).unwrap();
        fails(&with(&|t| drop(t.remove(&plain))), &[&plain]);
        let surprise = "model.language_model.layers.0.surprise.weight";
        let extra = with(&|t| {
            let copied = t[&plain].clone();
            t.insert(surprise.into(), copied);
        });
        fails(&extra, &[surprise]);
        let twice = with(&|_| {});
        let one = Tensors::from([(plain.clone(), tensors[&plain].clone())]);
        save(&twice.join("second.safetensors"), &one);
        let place =
            |n: &String| (n.clone(), if *n == plain { "second.safetensors" } else { "model.safetensors" });
        let index = serde_json::json!({"weight_map": tensors.keys().map(place).collect::<BTreeMap<_, _>>()});
        std::fs::write(twice.join("model.safetensors.index.json"), index.to_string()).unwrap();
        fails(&twice, &[&plain, "both"]);
        // An index that leads out of the folder, a page in place of the weights, hash buffers of another model.
        let outside = with(&|_| {});
        let index = serde_json::json!({"weight_map": {plain.as_str(): "../model.safetensors"}});
        std::fs::write(outside.join("model.safetensors.index.json"), index.to_string()).unwrap();
        fails(&outside, &["../model.safetensors"]);
        let page = with(&|_| {});
        std::fs::write(page.join("model.safetensors"), "<!DOCTYPE html><html></html>").unwrap();
        fails(&page, &["HTML"]);
        if let Some(buffer) = tensors.keys().find(|n| n.ends_with("layer_multipliers")) {
            fails(&with(&|t| t.get_mut(buffer).unwrap().2[0] ^= 2), &["layer_multipliers"]);
        }
    }
}

#[test]
fn words_and_names_that_cannot_be_are_told_for_gguf_models() {
    for name in GGUFS {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let parts = files(&checkpoint, ".gguf");
        let mut number = 0;
        let mut with = |change: &dyn Fn(&mut Vec<u8>)| -> PathBuf {
            number += 1;
            let to = dir.path().join(number.to_string());
            copy(&checkpoint, &to);
            spoil(&to, &parts[0], change);
            to
        };
        // An FP16 scale that is infinite, in a tensor of the first part.
        let gguf = infernix_checkpoint::Gguf::open(&checkpoint.join(&parts[0])).unwrap();
        let embedding = gguf.get("token_embd.weight").unwrap();
        let scale = match embedding.ty.name() {
            "Q6_K" => 208,
            "Q8_0" | "Q4_K" => 0,
            other => panic!("where is the scale of {other}?"),
        };
        let at = (embedding.offset + scale) as usize;
        fails(&with(&|b| b[at..at + 2].copy_from_slice(&[0, 0x7C])), &["embed_tokens", "row 0"]);
        fails(&with(&|b| *b = b"<!DOCTYPE html><html></html>".to_vec()), &["HTML"]);
        let key = "ple.layer_multipliers";
        if gguf.metadata().iter().any(|(k, _)| k.ends_with(key)) {
            let changed = with(&|b| {
                let at = b.windows(key.len()).position(|w| w == key.as_bytes()).unwrap();
                // Behind the key: two types and a count.
                b[at + key.len() + 16] ^= 2;
            });
            fails(&changed, &["layer_multipliers"]);
        }
    }
}

#[test]
fn outputs_in_the_way_are_left_alone_for_every_kind() {
    for name in FOLDERS.map(|f| f.0).into_iter().chain(GGUFS) {
        let Some(checkpoint) = fixture(name) else { continue };
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("x.infernix");
        std::fs::write(&out, "mine").unwrap();
        let error = converted(&options(&checkpoint, "auto", &out)).unwrap_err().to_string();
        assert!(error.contains("already exists"), "{name}: {error}");
        assert_eq!(std::fs::read(&out).unwrap(), b"mine");
    }
}

fn outputs(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    files(folder, "")
        .into_iter()
        .filter(|n| !n.ends_with(".conversion.json") && n != "SHA256SUMS")
        .map(|n| (n.clone(), std::fs::read(folder.join(&n)).unwrap()))
        .collect()
}

/// Digests of source tensors in a report.
fn digests(folder: &Path) -> Vec<(String, serde_json::Value)> {
    let report = std::fs::read(folder.join("x.infernix.conversion.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let tensors = report["proof"]["tensors"].as_array().unwrap().clone();
    tensors.into_iter().map(|t| (t["tensor"].as_str().unwrap().to_owned(), t["blake3"].clone())).collect()
}

#[test]
fn interrupted_conversions_of_every_kind_resume_to_the_same_files_and_digests() {
    for name in FOLDERS.map(|f| f.0).into_iter().chain(GGUFS) {
        let Some(checkpoint) = fixture(name) else { continue };
        let whole = tempfile::tempdir().unwrap();
        let o = options(&checkpoint, "auto", &whole.path().join("x.infernix"));
        let counter = Faults::after(u64::MAX);
        let counted = RunOptions { faults: Some(counter.clone()), ..run() };
        convert(&plan(&o).unwrap(), &Silent, &counted).unwrap();
        let (expected, known) = (outputs(whole.path()), digests(whole.path()));
        assert!(known.iter().all(|(_, d)| d.is_string()), "{name}: every tensor was read whole: {known:?}");
        let operations = counter.operations();
        for point in [operations / 4, operations / 2, operations * 3 / 4, operations - 9] {
            let dir = tempfile::tempdir().unwrap();
            let mut o = options(&checkpoint, "auto", &dir.path().join("x.infernix"));
            let killed = RunOptions { faults: Some(Faults::after(point)), ..run() };
            if convert(&plan(&o).unwrap(), &Silent, &killed).is_ok() {
                continue;
            }
            o.resume = true;
            let outcome = convert(&plan(&o).unwrap(), &Silent, &run())
                .unwrap_or_else(|e| panic!("{name}: killed at {point} of {operations}: {e}"));
            assert_eq!(outputs(dir.path()), expected, "{name}: killed at {point}");
            if dir.path().join("x.infernix.conversion.json").exists() && !outcome.complete {
                assert_eq!(digests(dir.path()), known, "{name}: killed at {point} of {operations}");
            }
        }
    }
}

/// A small file system that ends with the test.
struct Small(tempfile::TempDir);

impl Small {
    fn mount(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(dir.path())
            .output();
        done.is_ok_and(|o| o.status.success()).then(|| Self(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_seen_for_every_kind_and_for_exports() {
    use infernix_convert::{ExportOptions, ExportTarget, export, plan_export};
    let Some(disk) = Small::mount("3m") else {
        eprintln!("skipped: mounting a tmpfs is not permitted here");
        return;
    };
    let full = |e: &ConvertError| matches!(e, ConvertError::Artifact(ArtifactError::DiskFull { .. }));
    for name in FOLDERS.map(|f| f.0).into_iter().chain(GGUFS) {
        let Some(checkpoint) = fixture(name) else { continue };
        let o = options(&checkpoint, "auto", &disk.0.path().join(format!("{name}.infernix")));
        let error = converted(&o).unwrap_err();
        assert!(full(&error), "{name}: {error}");
    }
    let Some(checkpoint) = fixture("dense-demo-gguf") else { return };
    let dir = tempfile::tempdir().unwrap();
    let artifact = dir.path().join("x.infernix");
    converted(&options(&checkpoint, "auto", &artifact)).unwrap();
    let output = disk.0.path().join("x.gguf");
    let o = ExportOptions {
        artifact,
        target: ExportTarget::Gguf,
        output: output.clone(),
        ngram: None,
        components: None,
        shard_bytes: u64::MAX,
        bit_exact: false,
        resume: false,
    };
    let error = export(&plan_export(&o).unwrap(), &Silent, &run()).unwrap_err();
    assert!(full(&error) && !output.exists(), "{error}");
}
