//! What the program prints and how it ends: JSON documents, exit codes, closed pipes, odd paths.

mod common;

use common::{RECIPE, convert, demo, finish, infernix, program, scratch, verify};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn the_plan_has_its_documented_keys() {
    let plan =
        finish(program().args(["convert", "-n", "--json", "--recipe", RECIPE]).arg(demo())).ok().json();
    assert_eq!(
        (&plan["schema_version"], &plan["dry_run"], &plan["recipe"]),
        (&1.into(), &true.into(), &RECIPE.into())
    );
    let sum: u64 = plan["files"].as_array().expect("files").iter().filter_map(|f| f["bytes"].as_u64()).sum();
    assert_eq!(plan["artifact_bytes"].as_u64(), Some(sum));
    for key in ["path", "format", "rows", "row_bytes", "bytes"] {
        assert!(!plan["ngram"][key].is_null(), "ngram.{key}");
    }
    assert!(plan["disk_needed_bytes"].as_u64() > Some(sum));
    assert!(plan["memory_needed_bytes"].as_u64() < Some(1 << 30));
    let classes = plan["parameters"].as_object().expect("classes");
    for (class, c) in classes {
        for key in ["count", "format", "layout", "bytes", "proof"] {
            assert!(!c[key].is_null(), "parameters.{class}.{key}");
        }
    }
    for object in plan["objects"].as_array().expect("objects") {
        for key in ["id", "parameters", "shape", "format", "layout", "offset", "bytes"] {
            assert!(object.get(key).is_some(), "objects[].{key}");
        }
    }
    assert_eq!((&plan["missing"], plan["ignored"].is_array()), (&serde_json::json!([]), true));
}

#[test]
fn every_json_is_one_document_with_its_version() {
    let dir = scratch();
    let artifact = dir.path().join("m.infernix");
    let made = convert(&demo(), &artifact, &["--json"]).ok().json();
    for key in ["artifact_id", "digest", "seconds", "resumed_bytes"] {
        assert!(!made[key].is_null(), "{key}");
    }
    let artifact = artifact.display().to_string();
    let (volume, folder) = (format!("{artifact}.ngram"), demo().display().to_string());
    for args in [
        vec!["verify", &artifact, "--json"],
        vec!["inspect", &artifact, "--json", "--objects", "--bindings"],
        vec!["inspect", &volume, "--json"],
        vec!["inspect", &folder, "--json"],
        vec!["repair", &artifact, "--checkpoint", &folder, "--json"],
        vec!["card", &artifact, "--json"],
    ] {
        assert_eq!(infernix(&args).ok().json()["schema_version"], 1, "{args:?}");
    }
    let checkpoint = infernix(["inspect", &folder]).ok().stdout;
    assert!(checkpoint.contains("recipes that convert it") && checkpoint.contains(RECIPE), "{checkpoint}");
}

#[test]
fn wrong_usage_ends_with_2() {
    let folder = demo().display().to_string();
    for (args, word) in [
        (vec!["convert", "--recipe", "nope", &folder, "-n"], "no recipe named"),
        (vec!["convert", "--recipe", RECIPE, &folder, "-n", "-j", "0"], "--threads"),
        (vec!["convert", "--recipe", RECIPE, &folder, "-n", "--source", "base"], "ROLE=PATH"),
        (vec!["convert", "--recipe", RECIPE, &folder, "-n", "--source", "nose=x"], "unknown role"),
        (
            vec!["convert", "--recipe", RECIPE, &folder, "-n", "--source", &format!("base={folder}")],
            "given twice",
        ),
        (vec!["convert", "--recipe", RECIPE, &folder, "-n", "--proposal-rows", "64"], "--proposal"),
        (vec!["convert", "--recipe", RECIPE, &folder, "-n", "--max-file-bytes", "1e9"], "--max-file-bytes"),
        (vec!["convert", "--recipe", "auto", "-n"], "names no repository"),
    ] {
        infernix(&args).fails(2, &[word]);
    }
    infernix(["convert", "--recipe", "auto", "/nope", "-n"]).fails(1, &["/nope"]);
    infernix(["convert", "--recipe", "nope.toml", &folder, "-n"]).fails(1, &["nope.toml"]);
}

#[test]
fn recipes_reach_only_their_own_folder() {
    let dir = scratch();
    let recipe = dir.path().join("r.toml").display().to_string();
    for (text, word) in [
        ("title = 3", "title"),
        ("title = \"x\"\ninclude = [\"../secret.toml\"]", "own folder"),
        ("title = \"x\"\ninclude = [\"r.toml\"]", "circle"),
    ] {
        fs::write(&recipe, text).expect("written");
        infernix(["convert", "--recipe", &recipe, &demo().display().to_string(), "-n"])
            .fails(1, &["recipe", word]);
    }
}

#[test]
fn messages_say_each_cause_once() {
    let dir = scratch();
    let run = verify(&dir.path().join("none.infernix"), &[]).fails(1, &["none.infernix", "No such file"]);
    assert_eq!(run.stderr.matches("No such file").count(), 1, "{}", run.stderr);
}

/// A reader that closes early changes neither the exit code nor prints an error.
#[test]
fn a_closed_pipe_hides_no_mismatch() {
    let dir = scratch();
    let artifact = dir.path().join("m.infernix");
    convert(&demo(), &artifact, &[]).ok();
    let piped = |command: &mut Command| {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("a child");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let mut inspect = program();
    inspect.args(["inspect", "--objects", "--bindings"]).arg(&artifact);
    assert_eq!(piped(&mut inspect), (Some(0), String::new()));
    let at = artifact.metadata().expect("a file").len() as usize / 2;
    common::damage(&artifact, at, 1);
    assert_eq!(piped(program().arg("verify").arg(&artifact)).0, Some(1));
}

#[test]
fn a_full_stdout_is_an_error() {
    let Ok(full) = fs::OpenOptions::new().write(true).open("/dev/full") else { return };
    let folder = demo();
    let output =
        program().arg("inspect").arg(folder).stdout(full).stderr(Stdio::piped()).output().expect("starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("No space left"));
}

#[test]
fn odd_paths() {
    let dir = scratch();
    let folder = dir.path().join(OsStr::from_bytes(b"not \xff utf-8"));
    fs::create_dir(&folder).expect("a folder");
    let artifact = folder.join("m\n ü.infernix");
    convert(&demo(), &artifact, &[]).ok();
    verify(&artifact, &[]).ok();
    assert!(common::sums_hold(&folder));
    convert(&demo(), &folder.join(OsStr::from_bytes(b"\xfe.infernix")), &[]).fails(2, &["UTF-8"]);
    let link = dir.path().join("linked");
    std::os::unix::fs::symlink(&folder, &link).expect("a link");
    verify(&link.join("m\n ü.infernix"), &["--json"]).ok();
    let pipe = dir.path().join("pipe");
    if Command::new("mkfifo").arg(&pipe).status().is_ok_and(|s| s.success()) {
        finish(program().arg("inspect").arg(&pipe)).fails(1, &["no regular file"]);
    }
}

#[test]
fn progress_is_json_lines_when_asked_for() {
    let dir = scratch();
    let run = convert(&demo(), &dir.path().join("m.infernix"), &["--json", "--progress", "json"]).ok();
    run.json();
    assert!(run.stderr.lines().count() > 1);
    for line in run.stderr.lines() {
        let value: serde_json::Value = serde_json::from_str(line).expect("JSON on every line");
        assert!(value["phase"].is_string() && value["total_bytes"].is_u64(), "{line}");
    }
}

/// Nobody asked for the folder that a demo writes into, so it goes however the demo ends.
#[test]
fn a_demo_that_a_signal_ends_leaves_nothing() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        for times in [1, 2] {
            let dir = scratch();
            let mut demo = program()
                .arg("demo")
                .env("TMPDIR", dir.path())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("starts");
            let left = || fs::read_dir(dir.path()).expect("a folder").count();
            while left() == 0 {
                assert!(demo.try_wait().expect("a status").is_none(), "ended before it wrote anything");
                std::thread::sleep(Duration::from_millis(1));
            }
            for _ in 0..times {
                Command::new("kill").args(["-s", signal, &demo.id().to_string()]).status().expect("kill");
            }
            let ended = demo.wait().expect("a status").code();
            assert_eq!((ended, left()), (Some(code), 0), "{signal}, {times} times");
        }
    }
}
