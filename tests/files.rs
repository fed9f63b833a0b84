//! Verbs on the files of a set: rename and back, clean, card.

mod common;

use common::{SPLIT, convert, demo, files, finish, names, program, scratch, sums_hold, verify_words};
use std::fs;
use std::path::Path;

fn rename(folder: &Path, entry: &str, more: &[&str]) -> common::Run {
    finish(program().arg("rename").arg(folder.join(entry)).args(more))
}

#[test]
fn numbered_and_back_with_sidecars_and_sums() {
    let dir = scratch();
    convert(&demo(), &dir.path().join("m.infernix"), &SPLIT).ok();
    let before = files(dir.path());
    for (from, more, to, sidecars) in [
        ("m.infernix", &["--numbered"][..], "m-00001-of-00004.infernix", "m.infernix.ngram"),
        ("m-00001-of-00004.infernix", &[], "m.infernix", "m.infernix.ngram"),
        ("m.infernix", &["--to", "z.infernix"], "z.infernix", "z.infernix.ngram"),
        (
            "z.infernix",
            &["--to", "q.infernix", "--numbered"],
            "q-00001-of-00004.infernix",
            "q.infernix.ngram",
        ),
        ("q-00001-of-00004.infernix", &["--to", "m.infernix"], "m.infernix", "m.infernix.ngram"),
    ] {
        let run = rename(dir.path(), from, more).ok();
        assert_eq!(run.stdout.trim(), dir.path().join(to).display().to_string());
        assert!(dir.path().join(sidecars).exists(), "{:?}", names(dir.path()));
        assert!(sums_hold(dir.path()), "sums after renaming to {to}");
        assert_eq!(names(dir.path()).len(), 7);
        verify_words(&dir.path().join(to)).ok();
    }
    assert_eq!(files(dir.path()), before, "there and back again");
}

#[test]
fn names_that_cannot_be_change_nothing() {
    let dir = scratch();
    convert(&demo(), &dir.path().join("m.infernix"), &SPLIT).ok();
    fs::write(dir.path().join("z.infernix.part-0002"), "mine").expect("written");
    let before = files(dir.path());
    for to in ["x/y.infernix", "..", "", "/abs.infernix", "SHA256SUMS", "z.infernix"] {
        rename(dir.path(), "m.infernix", &["--to", to]).fails(1, &[]);
        assert_eq!(files(dir.path()), before, "{to:?}");
    }
    rename(dir.path(), "m.infernix.part-0001", &["--numbered"]).fails(1, &["entry"]);
    std::os::unix::fs::symlink(dir.path().join("m.infernix"), dir.path().join("l.infernix")).expect("a link");
    rename(dir.path(), "l.infernix", &["--to", "k.infernix"]).fails(1, &["is a link"]);
    assert!(sums_hold(dir.path()));
}

#[test]
fn clean_touches_state_alone() {
    let dir = scratch();
    convert(&demo(), &dir.path().join("m.infernix"), &[]).ok();
    let before = files(dir.path());
    for path in [dir.path().join("m.infernix"), dir.path().join("none"), dir.path().to_owned()] {
        let run = finish(program().arg("clean").arg(path)).ok();
        assert_eq!(run.stdout, "nothing to remove\n");
    }
    assert_eq!(files(dir.path()), before);
    let state = dir.path().join("file.infernix.partial");
    fs::write(&state, "not a folder").expect("written");
    finish(program().arg("clean").arg(dir.path().join("file.infernix"))).fails(1, &["file.infernix.partial"]);
    assert!(state.exists());
}

#[test]
fn a_card_claims_only_what_its_report_shows() {
    let dir = scratch();
    let at = |name: &str| dir.path().join(name);
    convert(&demo(), &at("m.infernix"), &[]).ok();
    let proof = verify_words(&at("m.infernix")).ok().stdout;
    fs::write(at("proof.json"), &proof).expect("written");
    let card = |more: &[&str]| {
        let report = |name: &&str| {
            if name.ends_with(".json") { at(name).display().to_string() } else { (*name).to_owned() }
        };
        finish(program().arg("card").arg(at("m.infernix")).args(more.iter().map(report)))
    };
    let digest = serde_json::from_str::<serde_json::Value>(&proof).expect("JSON")["digest"].clone();
    let text = card(&["--verify-report", "proof.json"]).ok().stdout;
    assert!(text.contains(digest.as_str().expect("a digest")), "the card quotes the digest");
    fs::write(at("list.json"), "[1]").expect("written");
    card(&["--verify-report", "list.json"]).fails(1, &["list.json", "is no report"]);
    fs::write(at("foreign.json"), proof.replacen("\"artifact_id\": \"", "\"artifact_id\": \"0", 1))
        .expect("written");
    card(&["--verify-report", "foreign.json"]).fails(1, &["about artifact"]);
    fs::write(at("failed.json"), proof.replacen("\"ok\": true", "\"ok\": false", 1)).expect("written");
    card(&["--verify-report", "failed.json"]).fails(1, &["mismatches"]);
    finish(program().arg("card").arg(at("m.infernix")).arg("-o").arg(at("m.infernix")))
        .fails(1, &["overwritten"]);
}
