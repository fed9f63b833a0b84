//! Conversions through the program: what comes out, twice the same, killed and resumed, and what is never overwritten.

mod common;

use common::{
    Copy, RECIPE, SECOND, SHARD, SPLIT, convert, converter, demo, files, finish, names, program, scratch,
    sums_hold, verify_words,
};
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn two_runs_give_the_same_bytes_whatever_the_threads_and_the_folder() {
    let dir = scratch();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    for (folder, threads) in [(&a, "1"), (&b, "3")] {
        fs::create_dir(folder).expect("a folder");
        convert(&demo(), &folder.join("m.infernix"), &["--threads", threads]).ok();
        assert!(sums_hold(folder));
    }
    assert_eq!(files(&a), files(&b));
    assert_eq!(names(&a), ["SHA256SUMS", "m.infernix", "m.infernix.conversion.json", "m.infernix.ngram"]);
}

#[test]
fn parts_stay_below_the_limit_and_prove_like_one_file() {
    let dir = scratch();
    let plan =
        finish(converter(&demo(), &dir.path().join("m.infernix"), &[&SPLIT[..], &["-n", "--json"]].concat()))
            .ok();
    assert!(names(dir.path()).is_empty(), "a dry run writes nothing");
    let made =
        convert(&demo(), &dir.path().join("m.infernix"), &[&SPLIT[..], &["--json"]].concat()).ok().json();
    assert_eq!(plan.json()["files"], made["files"], "the plan is exact");
    for file in made["files"].as_array().expect("files") {
        let path = Path::new(file["path"].as_str().expect("a path"));
        assert_eq!(path.metadata().expect("a file").len(), file["bytes"].as_u64().expect("bytes"));
        assert!(path.metadata().expect("a file").len() <= 9_000_000);
    }
    assert_eq!(made["files"].as_array().map(Vec::len), Some(4));
    let proof = verify_words(&dir.path().join("m.infernix")).ok().json();
    assert_eq!(proof["digest"], made["digest"]);
    for limit in ["0", "1", "4096", "100000"] {
        convert(&demo(), &dir.path().join("x.infernix"), &["--max-file-bytes", limit])
            .fails(2, &["leaves no room"]);
    }
}

/// Starts a conversion and ends it by `signal` once its journal has `lines` lines, or at once when it is too late.
fn interrupt(output: &Path, lines: usize, signal: &str) -> Option<i32> {
    let mut child = converter(&demo(), output, &[&SPLIT[..], &["--threads", "1"]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let journal = output.with_extension("infernix.partial").join("journal.jsonl");
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let written = fs::read_to_string(&journal).map_or(0, |text| text.lines().count());
        let over = child.try_wait().expect("a child").is_some();
        if written >= lines || over || Instant::now() > deadline {
            break;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    let pid = child.id().to_string();
    let _ = std::process::Command::new("kill").args([signal, &pid]).stderr(Stdio::null()).status();
    child.wait().expect("a child").code()
}

#[test]
fn killed_anywhere_and_resumed_gives_the_identical_files() {
    let dir = scratch();
    let whole = dir.path().join("whole");
    fs::create_dir(&whole).expect("a folder");
    convert(&demo(), &whole.join("m.infernix"), &SPLIT).ok();
    let expected = files(&whole);
    for point in 0..20 {
        let folder = dir.path().join(format!("killed-{point}"));
        fs::create_dir(&folder).expect("a folder");
        let output = folder.join("m.infernix");
        interrupt(&output, point, "-KILL");
        convert(&demo(), &output, &[&SPLIT[..], &["--resume"]].concat()).ok();
        assert_eq!(files(&folder), expected, "killed at journal line {point}");
        assert!(sums_hold(&folder));
        assert!(!folder.join("m.infernix.partial").exists());
    }
}

#[test]
fn ctrl_c_ends_with_130_and_leaves_resumable_state() {
    let dir = scratch();
    let output = dir.path().join("m.infernix");
    if interrupt(&output, 2, "-INT") != Some(130) {
        // The conversion was faster than the signal; there is nothing to see then.
        assert!(output.exists());
        return;
    }
    convert(&demo(), &output, &SPLIT).fails(1, &["--resume", "infernix clean"]);
    for (more, changed) in [
        (vec!["--max-file-bytes", "8000000"], "--max-file-bytes"),
        ([&SPLIT[..], &["--name", "other"]].concat(), "was none, is other"),
        ([&SPLIT[..], &["--components", "text"]].concat(), "--components"),
    ] {
        convert(&demo(), &output, &[&more[..], &["--resume"]].concat()).fails(1, &["cannot resume", changed]);
    }
    convert(&demo(), &output, &[&SPLIT[..], &["--resume"]].concat()).ok();
    verify_words(&output).ok();
}

#[test]
fn resume_refuses_a_source_that_changed() {
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    // A source without a value stops the conversion after some objects are done.
    let spoiled = "model.language_model.layers.2.mlp.experts.0.gate_proj.weight_scale_2";
    copy.shard(SHARD, |s| s.tensor(spoiled).bytes = vec![0; 4]);
    let output = dir.path().join("m.infernix");
    let run = convert(&copy.folder, &output, &["--threads", "1"]).fails(1, &[spoiled]);
    if !output.with_extension("infernix.partial").exists() {
        return;
    }
    assert!(run.stderr.contains("infernix clean"), "says what is left and how to go on: {}", run.stderr);
    copy.put(SHARD, copy.bytes(SHARD));
    convert(&copy.folder, &output, &["--resume"]).fails(1, &["cannot resume", SHARD]);
    finish(program().arg("clean").arg(&output)).ok();
    assert_eq!(names(dir.path()), ["checkpoint"]);
}

#[test]
fn resume_of_a_finished_set_says_so_and_changes_nothing() {
    let dir = scratch();
    let output = dir.path().join("m.infernix");
    convert(&demo(), &output, &[]).ok();
    let before = files(dir.path());
    let again = convert(&demo(), &output, &["--resume", "--json"]).ok().json();
    assert_eq!(again["complete"], true);
    convert(&demo(), &output, &[]).fails(1, &["already exists"]);
    convert(&demo(), &output, &["--resume", "--name", "other"]).fails(1, &["already exists"]);
    assert_eq!(files(dir.path()), before);
}

#[test]
fn nothing_that_stands_in_the_way_is_overwritten() {
    for name in ["m.infernix", "m.infernix.ngram", "m.infernix.part-0001", "m.infernix.conversion.json"] {
        let dir = scratch();
        fs::write(dir.path().join(name), "mine").expect("written");
        convert(&demo(), &dir.path().join("m.infernix"), &SPLIT).fails(1, &[name, "already exists"]);
        assert_eq!(fs::read_to_string(dir.path().join(name)).expect("still there"), "mine");
        assert_eq!(names(dir.path()), [name], "no state stays when nothing was done");
    }
    let dir = scratch();
    std::os::unix::fs::symlink("/nowhere", dir.path().join("m.infernix")).expect("a link");
    convert(&demo(), &dir.path().join("m.infernix"), &[]).fails(1, &["already exists"]);
}

#[test]
fn the_volume_cannot_take_the_name_of_another_file_of_the_set() {
    let dir = scratch();
    let output = dir.path().join("m.infernix");
    for name in
        ["m.infernix", "m.infernix.part-0002", "m.infernix.conversion.json", "SHA256SUMS", "./m.infernix"]
    {
        let volume = dir.path().join(name).display().to_string();
        convert(&demo(), &output, &[&SPLIT[..], &["--ngram-out", &volume]].concat())
            .fails(2, &["n-gram volume"]);
        assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    }
}

#[test]
fn foreign_files_in_the_state_folder_survive() {
    let dir = scratch();
    let output = dir.path().join("m.infernix");
    let state = dir.path().join("m.infernix.partial");
    fs::create_dir(&state).expect("a folder");
    fs::write(state.join("precious.txt"), "mine").expect("written");
    convert(&demo(), &output, &["--resume"]).fails(1, &["precious.txt"]);
    finish(program().arg("clean").arg(&output)).fails(1, &["precious.txt"]);
    assert!(state.join("precious.txt").exists() && !output.exists());
}

#[test]
fn two_conversions_to_one_output_do_not_mix() {
    let dir = scratch();
    let output = dir.path().join("m.infernix");
    let start = || converter(&demo(), &output, &SPLIT).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let (a, b) = (start().expect("a child"), start().expect("a child"));
    let codes: Vec<_> = [a, b].into_iter().map(|mut c| c.wait().expect("a child").code()).collect();
    assert!(codes.contains(&Some(0)), "{codes:?}");
    verify_words(&output).ok();
    assert!(sums_hold(dir.path()));
}

#[test]
fn outputs_that_cannot_be() {
    let dir = scratch();
    convert(&demo(), &dir.path().join("no/folder/m.infernix"), &[]).fails(1, &["no such folder"]);
    convert(&demo(), Path::new("."), &[]).fails(2, &["-o ."]);
    let long = format!("{}.infernix", "x".repeat(250));
    convert(&demo(), &dir.path().join(long), &[]).fails(1, &["longer than 255 bytes"]);
    finish(program().args(["convert", "--recipe", RECIPE]).arg(demo())).fails(2, &["-o OUT.infernix"]);
}

#[test]
fn components_proposal_and_reuse() {
    let dir = scratch();
    let at = |name: &str| dir.path().join(name);
    let text = at("text.txt");
    fs::write(&text, include_str!("../README.md")).expect("written");
    let text = text.display().to_string();
    convert(&demo(), &at("a.infernix"), &[]).ok();
    let volume = at("a.infernix.ngram").display().to_string();

    let small =
        convert(&demo(), &at("t.infernix"), &["--components", "text", "--ngram-reuse", &volume, "--json"])
            .ok()
            .json();
    assert_eq!(small["components"], serde_json::json!(["text"]));
    assert!(!at("t.infernix.ngram").exists());
    convert(&demo(), &at("x.infernix"), &["--components", "mtp"]).fails(2, &["text"]);
    convert(&demo(), &at("x.infernix"), &["--components", "nose"]).fails(2, &["text, vision, mtp"]);

    let made = convert(
        &demo(),
        &at("p.infernix"),
        &["--proposal", "--ranking-text", &text, "--proposal-rows", "128", "--verify", "--json"],
    );
    let made = made.ok().json();
    assert_eq!(made["verification"]["ok"], true);
    assert!(made["verification"]["proposal_bindings"].as_u64() > Some(0));
    convert(&demo(), &at("x.infernix"), &["--proposal"]).fails(2, &["--ranking-text"]);
    convert(&demo(), &at("x.infernix"), &["--proposal", "--ranking", &text]).fails(1, &["int64"]);

    let mut other = fs::read(&volume).expect("readable");
    other[4096..].iter_mut().for_each(|b| *b ^= 1);
    let other_path = at("other.ngram").display().to_string();
    fs::write(&other_path, other).expect("written");
    convert(&demo(), &at("x.infernix"), &["--ngram-reuse", &other_path]).fails(1, &["not the checkpoint's"]);
    convert(&demo(), &at("x.infernix"), &["--ngram-reuse", &text]).fails(1, &["n-gram volume"]);
    assert!(!at("x.infernix").exists());
}

#[test]
fn checkpoints_are_found_in_the_hugging_face_cache() {
    let dir = scratch();
    let run = |home: &Path| {
        finish(program().args(["convert", "-n", "--json", "--recipe", RECIPE]).env("HF_HUB_CACHE", home))
    };
    run(&dir.path().join("none")).fails(1, &["nvidia/Qwen3.8-Flash-Next-NVFP4", "no Hugging Face cache"]);
    let repo = dir.path().join("models--nvidia--Qwen3.8-Flash-Next-NVFP4");
    for folder in ["refs", "blobs", "snapshots/abc123"] {
        fs::create_dir_all(repo.join(folder)).expect("a folder");
    }
    fs::write(repo.join("refs/main"), "abc123").expect("written");
    let snapshot = repo.join("snapshots/abc123");
    for (i, name) in names(&demo()).iter().enumerate() {
        fs::copy(demo().join(name), repo.join(format!("blobs/{i}"))).expect("copied");
        std::os::unix::fs::symlink(format!("../../blobs/{i}"), snapshot.join(name)).expect("a link");
    }
    assert_eq!(run(dir.path()).ok().json()["recipe"], RECIPE);
    fs::remove_file(snapshot.join(SHARD)).expect("removed");
    run(dir.path()).fails(1, &[SHARD, "fetch"]);
}

/// Needs the right to mount; elsewhere it says so and passes.
#[test]
#[expect(clippy::print_stderr, reason = "says why a test is skipped")]
fn a_full_disk_is_seen_before_anything_is_written() {
    let dir = scratch();
    let small = dir.path().join("small");
    fs::create_dir(&small).expect("a folder");
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"])
        .arg(&small)
        .output();
    if !mounted.is_ok_and(|o| o.status.success()) {
        eprintln!("skipped: no right to mount a small file system");
        return;
    }
    let run = convert(&demo(), &small.join("m.infernix"), &[]);
    let left = names(&small);
    let _ = std::process::Command::new("umount").arg(&small).status();
    let run = run.fails(1, &["disk full", "bytes are needed"]);
    // Nothing is there to be resumed.
    assert!(!run.stderr.contains("--resume") && !run.stderr.contains("writing"), "{}", run.stderr);
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn what_is_wrong_with_the_command_is_said_before_the_work_is_announced() {
    let dir = scratch();
    let output = dir.path().join("m.infernix");
    for limit in ["0", "100", "5000", "x", "-1"] {
        let run = convert(&demo(), &output, &["--max-file-bytes", limit]);
        let run = if limit == "-1" { run.ends(2) } else { run.fails(2, &["--max-file-bytes"]) };
        assert!(!run.stderr.contains("writing"), "{}", run.stderr);
    }
    let run = convert(&demo(), &output, &["-n", "--threads", "100000"]).ok();
    assert!(run.stderr.contains("warning:") && run.stderr.contains("--threads 100000"), "{}", run.stderr);
    convert(&demo(), &output, &["-n", "--threads", "0"]).fails(2, &["--threads"]);
    fs::write(&output, "mine").expect("written");
    let run = convert(&demo(), &output, &[]).fails(1, &["already exists"]);
    assert!(!run.stderr.contains("writing"), "{}", run.stderr);
}

#[test]
fn work_that_an_error_leaves_behind_is_named_with_both_ways_on() {
    let dir = scratch();
    let copy = Copy::new(dir.path(), "checkpoint");
    let scale = "model.language_model.layers.7.mlp.experts.31.down_proj.weight_scale";
    let spoil = |c: &Copy, name: &str| {
        let mut found = false;
        c.shard(name, |s| {
            if let Some(t) = s.tensors.get_mut(scale) {
                t.bytes[0] = 0x7f;
                found = true;
            }
        });
        found
    };
    assert!(spoil(&copy, SHARD) || spoil(&copy, SECOND), "{scale}");
    let output = dir.path().join("m.infernix");
    let run = convert(&copy.folder, &output, &["--threads", "1"]).fails(1, &["block scale"]);
    let state = dir.path().join("m.infernix.partial");
    let named = run.stderr.contains("--resume") && run.stderr.contains("infernix clean");
    assert_eq!(named, state.is_dir(), "{}", run.stderr);
    // Where it fails again, the same is said again.
    if state.is_dir() {
        let run = convert(&copy.folder, &output, &["--threads", "1", "--resume"]).fails(1, &["block scale"]);
        assert!(run.stderr.contains("infernix clean"), "{}", run.stderr);
    }
}
