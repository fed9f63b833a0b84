//! Proof: what holds is proven, and one changed byte anywhere fails and is named.

mod common;

use common::{SPLIT, convert, damage, demo, files, finish, names, program, scratch, verify, verify_words};
use std::fs;
use std::path::Path;

fn converted(folder: &Path) -> std::path::PathBuf {
    let output = folder.join("m.infernix");
    convert(&demo(), &output, &SPLIT).ok();
    output
}

#[test]
fn every_word_of_the_demo_is_proven_and_only_the_drafter_is_requantized() {
    let dir = scratch();
    let output = converted(dir.path());
    let proof = verify_words(&output).ok().json();
    for key in [
        "expert_mismatches",
        "tensor_mismatch_count",
        "input_scale_mismatches",
        "requantized_mismatches",
        "ngram_row_mismatches",
    ] {
        assert_eq!(proof[key], 0, "{key}");
    }
    assert_eq!((&proof["ok"], &proof["digests"]), (&true.into(), &"ok".into()));
    assert_eq!((&proof["experts"], &proof["ngram_rows_checked"]), (&256.into(), &129_280.into()));
    let names: Vec<&str> = proof["requantized_parameters"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|p| p["name"].as_str())
        .collect();
    assert!(!names.is_empty() && names.iter().all(|n| n.starts_with("mtp/")), "{names:?}");
    assert_eq!(proof["requantized"].as_object().map(serde_json::Map::len), Some(1));
    let some =
        verify(&output, &["--checkpoint", &demo().display().to_string(), "--ngram-rows", "5", "--json"]).ok();
    assert_eq!(some.json()["ngram_rows_checked"], 5);
    for rows in ["-1", "some"] {
        verify(&output, &[&format!("--ngram-rows={rows}")]).fails(2, &["--ngram-rows"]);
    }
}

#[test]
fn one_changed_byte_anywhere_fails_and_is_named() {
    let dir = scratch();
    let output = converted(dir.path());
    for (name, bytes) in files(dir.path()) {
        let path = dir.path().join(&name);
        // Magic, version or index, id, header, its end, the first and later payload, the last byte.
        let mut points = vec![0, 9, 20, 40, 4095, 4096, bytes.len() - 1];
        points.extend((1..6).map(|i| bytes.len() / 7 * i + i));
        for at in points {
            damage(&path, at, 1);
            let run = verify(&output, &["--json"]).ends(1);
            if run.stdout.is_empty() {
                assert!(run.stderr.contains("m.infernix"), "{name} at {at}: {}", run.stderr);
            } else {
                let report = run.json();
                let named = report["corrupt_objects"].as_array().map_or(0, Vec::len)
                    + report["problems"].as_array().map_or(0, Vec::len);
                assert!(named > 0 && report["ok"] == false, "{name} at {at}");
            }
            fs::write(&path, &bytes).expect("restored");
        }
    }
    verify(&output, &[]).ok();
}

#[test]
fn a_damaged_object_is_named() {
    let dir = scratch();
    let output = converted(dir.path());
    let listed = finish(program().args(["inspect", "--objects", "--json"]).arg(&output)).ok().json();
    let objects = listed["object_list"].as_array().expect("objects").clone();
    let first = &objects[0];
    damage(&dir.path().join("m.infernix"), fs::metadata(&output).expect("a file").len() as usize - 5000, 1);
    let report = verify(&output, &["--json"]).ends(1).json();
    let corrupt = report["corrupt_objects"].as_array().expect("a list");
    assert_eq!(corrupt.len(), 1);
    assert!(objects.iter().any(|o| o["id"] == corrupt[0]), "{corrupt:?} of {first}");
}

#[test]
fn parts_of_other_sets_other_places_and_other_lengths() {
    let (dir, other) = (scratch(), scratch());
    let output = converted(dir.path());
    let foreign = finish(
        program()
            .args(["convert", "--recipe", "qwen3_8_flash_next_nvfp4_dense8"])
            .arg(demo())
            .arg("-o")
            .arg(other.path().join("m.infernix"))
            .args(SPLIT),
    );
    foreign.ok();
    let (one, two) = (dir.path().join("m.infernix.part-0001"), dir.path().join("m.infernix.part-0002"));
    let bytes = fs::read(&one).expect("readable");
    fs::copy(other.path().join("m.infernix.part-0001"), &one).expect("copied");
    verify(&output, &[]).fails(1, &["part-0001", "artifact id"]);
    fs::copy(&two, &one).expect("copied");
    verify(&output, &[]).fails(1, &["part-0001", "index is 2"]);
    fs::write(&one, &bytes[..bytes.len() - 1]).expect("written");
    verify(&output, &[]).fails(1, &["part-0001", "truncated"]);
    fs::write(&one, [&bytes[..], b"x"].concat()).expect("written");
    verify(&output, &[]).fails(1, &["part-0001", "appended"]);
    fs::remove_file(&one).expect("removed");
    verify(&output, &[]).fails(1, &["part-0001"]);
}

#[test]
fn the_volume_is_needed_unless_left_out() {
    let dir = scratch();
    let output = converted(dir.path());
    fs::rename(dir.path().join("m.infernix.ngram"), dir.path().join("away.bin")).expect("renamed");
    verify(&output, &[]).fails(1, &["n-gram volume", "--ngram"]);
    assert!(verify(&output, &["--skip-ngram", "--json"]).ok().json()["digest"].is_null());
    verify(&output, &["--ngram", &dir.path().join("away.bin").display().to_string()]).ok();
    verify(&output, &["--ngram", &demo().join("config.json").display().to_string()])
        .fails(1, &["config.json"]);
}

#[test]
fn sha256sums_are_held_against_the_files_of_the_set() {
    let dir = scratch();
    let output = converted(dir.path());
    let path = dir.path().join("SHA256SUMS");
    let sums = fs::read_to_string(&path).expect("readable");
    let other = format!("{}  m.infernix.part-0002", "0".repeat(64));
    let changed: Vec<&str> =
        sums.lines().map(|l| if l.ends_with("m.infernix.part-0002") { other.as_str() } else { l }).collect();
    fs::write(&path, changed.join("\n") + "\n").expect("written");
    let run = verify(&output, &[]).ends(1);
    assert!(run.stdout.contains("part-0002") && run.stdout.contains("SHA-256"), "{}", run.stdout);
    let fewer: Vec<&str> = sums.lines().filter(|l| !l.ends_with("m.infernix.part-0002")).collect();
    fs::write(&path, fewer.join("\n") + "\n").expect("written");
    assert!(verify(&output, &[]).ok().stderr.contains("has no line"));
    fs::write(&path, format!("{}  someone-elses\n{sums}", "0".repeat(64))).expect("written");
    assert_eq!(verify(&output, &[]).ok().stderr, "");
    fs::remove_file(&path).expect("removed");
    verify(&output, &[]).ok();
}

#[test]
fn repair_restores_objects_and_rows_byte_for_byte() {
    let dir = scratch();
    let output = converted(dir.path());
    let before = files(dir.path());
    for (name, at) in
        [("m.infernix.part-0001", 500_000), ("m.infernix.part-0002", 700_000), ("m.infernix.ngram", 400_000)]
    {
        damage(&dir.path().join(name), at, 3000);
    }
    verify(&output, &[]).ends(1);
    let repair = || finish(program().args(["repair", "--json"]).arg(&output).arg("--checkpoint").arg(demo()));
    let report = repair().ok().json();
    assert_eq!(report["repaired_objects"].as_array().map(Vec::len), Some(2));
    assert!(report["repaired_rows"].as_u64() > Some(0));
    assert_eq!(files(dir.path()), before);
    assert_eq!(repair().ok().json()["repaired_objects"].as_array().map(Vec::len), Some(0));
    damage(&output, 100, 1);
    repair().fails(1, &["directory"]);
}

#[test]
fn what_is_no_artifact_is_told_apart() {
    let dir = scratch();
    let output = converted(dir.path());
    let at = |name: &str| dir.path().join(name);
    fs::write(at("empty"), []).expect("written");
    fs::write(at("v2"), [&b"NINFER\0\x02"[..], &[0; 8000]].concat()).expect("written");
    for verb in [&["verify"][..], &["inspect"], &["rename", "--numbered"], &["card"]] {
        for (name, word) in
            [("empty", "empty"), ("v2", "version-2"), ("none", "none"), ("SHA256SUMS", "SHA256SUMS")]
        {
            finish(program().args(verb).arg(at(name))).fails(1, &[word]);
        }
    }
    verify(&at("m.infernix.ngram"), &[]).fails(1, &["is an n-gram volume"]);
    verify(&at("m.infernix.part-0001"), &[]).fails(1, &["open the set's entry file"]);
    verify(dir.path(), &[]).fails(1, &["no regular file"]);
    finish(program().arg("inspect").arg("/dev/null")).fails(1, &["no regular file"]);
    assert!(names(dir.path()).contains(&"m.infernix".to_owned()) && output.exists());
}

/// Words that come back as a checkpoint are the same weights; a re-quantized artifact is a stated rounding of them, and the
/// source is none of the artifact.
#[test]
fn exports_and_derivations_are_told() {
    let dir = scratch();
    let (exact, dense8) = (dir.path().join("m.infernix"), dir.path().join("d.infernix"));
    for (recipe, output) in [("auto", &exact), ("qwen3_8_flash_next_nvfp4_dense8", &dense8)] {
        finish(program().args(["convert", "--recipe", recipe]).arg(demo()).arg("-o").arg(output)).ok();
    }
    let folder = dir.path().join("back");
    let export = |to: &str, output: &Path| {
        finish(program().args(["export", "--json", "--to", to]).arg(&exact).arg("-o").arg(output))
    };
    let report = export("safetensors", &folder).ok().json();
    for key in ["schema_version", "artifact_id", "files", "bytes", "tensors", "left_out", "complete"] {
        assert!(!report[key].is_null(), "{key}: {report}");
    }
    export("safetensors", &folder).fails(1, &["already exists"]);
    export("gguf", &dir.path().join("m.gguf")).fails(1, &["fp8_e4m3fn", "GGUF"]);

    let derivation = |file: &Path, other: &Path| {
        finish(program().args(["verify", "--json"]).arg(file).arg("--derivation").arg(other))
    };
    let same = derivation(&exact, &folder).ok().json();
    assert_eq!((&same["derived"], &same["schema_version"]), (&true.into(), &1.into()), "{same}");
    assert!(
        same["counts"]["different"].as_u64().unwrap_or(0) == 0
            && same["counts"]["identical"].as_u64() > Some(0)
    );
    let rounded = derivation(&dense8, &exact).ok().json();
    assert!(rounded["counts"]["rounded"].as_u64() > Some(0), "{rounded}");
    let back = derivation(&exact, &dense8).ends(1).json();
    assert_eq!(back["derived"], false);
    let text = finish(program().arg("verify").arg(&exact).arg("--derivation").arg(&dense8)).ends(1).stdout;
    assert!(text.contains("NOT derived") && text.contains("relative error"), "{text}");
}
