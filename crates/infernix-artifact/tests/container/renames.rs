//! Renaming sets, and finding the volume of a renamed set.

use std::fs;
use std::path::Path;

use infernix_artifact::ngram::{NgramTable, Volume, locate};
use infernix_artifact::rename::{NewName, RenameOptions, plan, rename};
use infernix_artifact::sums::{self, SumState};
use infernix_artifact::verify::VerifyOptions;
use infernix_artifact::{Artifact, ArtifactError, ArtifactId, Faults, Interrupt, Resume};

use crate::common::{convert, options, snapshot};

fn set() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    convert(&dir.path().join("m.infernix"), 8192, true, Resume::No, &options()).unwrap();
    dir
}

fn check(entry: &Path) {
    let artifact = Artifact::open(entry).unwrap();
    let report = artifact.verify_integrity(&VerifyOptions::default()).unwrap();
    assert!(report.is_ok(), "{report:?}");
    let mut paths: Vec<_> = artifact.paths().map(Path::to_owned).collect();
    let table = NgramTable::of(artifact.directory()).unwrap().unwrap();
    let volume = locate(entry, None, table.volume_id).unwrap().path;
    assert_eq!(Volume::open(&volume).unwrap().header().id, table.volume_id);
    paths.push(volume);
    let states = sums::check(&paths, &Interrupt::default()).unwrap();
    assert!(states.iter().all(|(_, state)| *state == SumState::Ok), "{states:?}");
}

#[test]
fn to_the_numbered_form_and_back_changes_nothing_but_names() {
    let dir = set();
    let entry = dir.path().join("m.infernix");
    let before = snapshot(dir.path());
    let id = Artifact::open(&entry).unwrap().artifact_id();
    let planned = plan(&entry, &NewName::Numbered).unwrap();
    assert!(snapshot(dir.path()) == before, "planning touches nothing");
    let done = rename(&entry, &NewName::Numbered, &RenameOptions::default()).unwrap();
    assert_eq!(done, planned);
    let numbered = dir.path().join("m-00001-of-00004.infernix");
    assert_eq!(done.entry, numbered);
    assert!(dir.path().join("m-00001-of-00004.infernix.conversion.json").exists());
    assert!(dir.path().join("m.infernix.ngram").exists(), "the lookup finds it under the plain name");
    let report = fs::read_to_string(dir.path().join("m-00001-of-00004.infernix.conversion.json")).unwrap();
    assert!(report.contains("m-00002-of-00004.infernix") && !report.contains("part-0001"));
    check(&numbered);
    assert_eq!(Artifact::open(&numbered).unwrap().artifact_id(), id);
    rename(&numbered, &NewName::Plain, &RenameOptions::default()).unwrap();
    check(&entry);
    let mut after = snapshot(dir.path());
    let mut before = before;
    let sorted = |text: Option<Vec<u8>>| {
        let mut lines: Vec<String> =
            String::from_utf8(text.unwrap()).unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    // Line order in SHA256SUMS may differ, and the report's last newline.
    assert_eq!(
        sorted(after.remove("m.infernix.conversion.json")),
        sorted(before.remove("m.infernix.conversion.json"))
    );
    let names = |lines: Vec<String>| lines.into_iter().filter(|l| !l.ends_with(".json")).collect::<Vec<_>>();
    assert_eq!(names(sorted(after.remove("SHA256SUMS"))), names(sorted(before.remove("SHA256SUMS"))));
    assert!(after == before);
}

#[test]
fn to_another_name_takes_the_volume_along() {
    let dir = set();
    let to = NewName::To { name: "other.infernix".into(), numbered: true };
    let done = rename(&dir.path().join("m.infernix"), &to, &RenameOptions::default()).unwrap();
    check(&done.entry);
    assert!(dir.path().join("other.infernix.ngram").exists());
    assert!(snapshot(dir.path()).keys().all(|name| !name.starts_with('m')));
}

#[test]
fn occupied_names_and_links_are_refused() {
    let dir = set();
    let entry = dir.path().join("m.infernix");
    fs::write(dir.path().join("m-00003-of-00004.infernix"), b"mine").unwrap();
    let error = rename(&entry, &NewName::Numbered, &RenameOptions::default()).unwrap_err();
    assert!(matches!(error, ArtifactError::OutputExists { .. }), "{error}");
    check(&entry);
    let other = tempfile::tempdir().unwrap();
    for name in snapshot(dir.path()).keys() {
        std::os::unix::fs::symlink(dir.path().join(name), other.path().join(name)).unwrap();
    }
    let error =
        rename(&other.path().join("m.infernix"), &NewName::Plain, &RenameOptions::default()).unwrap_err();
    assert!(error.to_string().contains("is a link"), "{error}");
}

#[test]
fn a_rename_killed_at_every_disk_operation_is_finished_by_the_next_and_loses_nothing() {
    let template = set();
    let copy = || {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in snapshot(template.path()) {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        dir
    };
    let reference = copy();
    rename(&reference.path().join("m.infernix"), &NewName::Numbered, &RenameOptions::default()).unwrap();
    let expected = snapshot(reference.path());
    for n in 0.. {
        let dir = copy();
        let old = dir.path().join("m.infernix");
        let faulty = RenameOptions { faults: Some(Faults::after(n)), ..RenameOptions::default() };
        if rename(&old, &NewName::Numbered, &faulty).is_ok() {
            assert!(n > 10);
            break;
        }
        let new = dir.path().join("m-00001-of-00004.infernix");
        let again = rename(&old, &NewName::Numbered, &RenameOptions::default());
        assert!(again.is_ok() || new.exists(), "{n}: {again:?}");
        check(&new);
        let now = snapshot(dir.path());
        let leftovers: Vec<_> = now.keys().filter(|name| !expected.contains_key(*name)).collect();
        assert!(leftovers.is_empty(), "{n}: {leftovers:?}");
        for (name, bytes) in &expected {
            assert!(now[name] == *bytes || name == "SHA256SUMS", "{n}: {name}");
        }
    }
}

#[test]
fn the_volume_is_looked_up_in_the_decided_order() {
    let dir = set();
    let entry = dir.path().join("m.infernix");
    let own = dir.path().join("m.infernix.ngram");
    let id = Volume::open(&own).unwrap().header().id;
    let numbered = dir.path().join("m-00001-of-00004.infernix");
    let find = |entry: &Path| locate(entry, None, id).map(|l| l.path);
    assert_eq!(find(&entry).unwrap(), own);
    assert_eq!(find(&numbered).unwrap(), own);
    let given = dir.path().join("given");
    assert_eq!(locate(&entry, Some(&given), id).unwrap().path, given);
    let moved = dir.path().join("z.ngram");
    fs::rename(&own, &moved).unwrap();
    assert_eq!(find(&entry).unwrap(), moved);
    assert!(locate(&entry, None, ArtifactId([1; 16])).unwrap_err().to_string().contains("--ngram"));
    fs::copy(&moved, dir.path().join("y.ngram")).unwrap();
    assert!(find(&entry).unwrap_err().to_string().contains("2 volumes"));
}

#[test]
fn untagged_volumes_need_the_artifacts_own_id_and_tagged_ones_equal_rows() {
    let dir = set();
    let path = dir.path().join("m.infernix.ngram");
    let artifact = Artifact::open(&dir.path().join("m.infernix")).unwrap();
    let table = NgramTable::of(artifact.directory()).unwrap().unwrap();
    let other = NgramTable { volume_id: ArtifactId([9; 16]), ..table.clone() };
    assert_eq!(Volume::open(&path).unwrap().accept(&other).unwrap().len(), 1, "another id is reported");
    let mut fewer = table.clone();
    fewer.geometry.rows = 4;
    assert!(Volume::open(&path).unwrap().accept(&fewer).is_err());
    let mut bf16 = table.clone();
    bf16.format = "bf16".into();
    assert!(Volume::open(&path).unwrap().accept(&bf16).is_err(), "half as many values a row");
    let mut bytes = fs::read(&path).unwrap();
    bytes[64..4096].fill(0);
    fs::write(&path, bytes).unwrap();
    let untagged = Volume::open(&path).unwrap();
    assert!(untagged.accept(&table).unwrap().is_empty());
    assert!(untagged.accept(&other).is_err());
}
