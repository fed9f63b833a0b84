//! Sets: round trips over many splits, damage detection, hostile input, repair.

use std::fs;
use std::path::Path;

use crate::common::{content, convert, draft, layout, options, snapshot};
use infernix_artifact::ngram::{NgramTable, Volume};
use infernix_artifact::repair::{repair_gaps, repair_object};
use infernix_artifact::sums::{self, SumState};
use infernix_artifact::verify::{DigestState, VerifyOptions};
use infernix_artifact::{
    Artifact, ArtifactError, Interrupt, LayoutOptions, Mapping, OpenOptions, Resume, Start, Writer,
    parse_directory,
};
use proptest::prelude::*;

fn one_thread() -> VerifyOptions<'static> {
    VerifyOptions { threads: 1, ..VerifyOptions::default() }
}

fn written(max_file_bytes: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    convert(&dir.path().join("m.infernix"), max_file_bytes, true, Resume::No, &options()).unwrap();
    dir
}

#[test]
fn every_split_round_trips_and_keeps_the_quotable_digest() {
    let mut digests = std::collections::BTreeSet::new();
    let mut ids = std::collections::BTreeSet::new();
    for max in [8192, 12_288, 12_289, 16_384, 20_000, 32_000_000_000] {
        let dir = written(max);
        let entry = dir.path().join("m.infernix");
        let planned = layout("m.infernix", max, true);
        for mapping in [Mapping::Mapped, Mapping::Copied] {
            let artifact = Artifact::open_with(&entry, OpenOptions { mapping }).unwrap();
            assert_eq!(artifact.file_bytes(), planned.artifact_bytes(), "sizes are exact before writing");
            for (file, path) in planned.files().iter().zip(artifact.paths()) {
                assert_eq!(file.file_bytes, fs::metadata(path).unwrap().len());
                assert!(file.file_bytes <= max);
            }
            for (i, object) in artifact.directory().objects.iter().enumerate() {
                let bytes = artifact.bytes(object).unwrap();
                assert_eq!(bytes.as_ref(), content(i, object.bytes), "{} at {max}", object.id);
                if object.bytes > 0 {
                    assert_eq!(
                        bytes.as_ptr() as usize % 256,
                        object.offset as usize % 256,
                        "alignment survives"
                    );
                }
                assert_eq!(bytes.slice(1..3).map(|b| b.to_vec()), bytes.get(1..3).map(<[u8]>::to_vec));
            }
            assert_eq!(artifact.resource("text", "tokenizer.json").unwrap(), content(2, 37));
            assert!(artifact.resource("text", "nope").is_err());
            artifact.check_unchanged().unwrap();
        }
        let artifact = Artifact::open(&entry).unwrap();
        let report = artifact.verify_integrity(&VerifyOptions::default()).unwrap();
        assert_eq!((report.state, &report.problems), (DigestState::Ok, &vec![]), "{max}");
        let volume = Volume::open(&dir.path().join("m.infernix.ngram")).unwrap();
        let table = NgramTable::of(artifact.directory()).unwrap().unwrap();
        assert_eq!(volume.accept(&table).unwrap(), Vec::<String>::new());
        let rows = volume.verify(&Interrupt::default(), |_| ()).unwrap();
        assert!(rows.is_ok());
        digests.insert(infernix_artifact::digest::quotable_digest(
            artifact.directory(),
            &report.digests,
            rows.row_digest,
        ));
        ids.insert(artifact.artifact_id());
        let paths: Vec<_> = artifact.paths().map(Path::to_owned).collect();
        let states = sums::check(&paths, &Interrupt::default()).unwrap();
        assert!(states.iter().all(|(_, state)| *state == SumState::Ok), "{states:?}");
        assert!(!dir.path().join("m.infernix.partial").exists());
    }
    assert_eq!(digests.len(), 1, "the quotable digest does not depend on the split");
    assert!(ids.len() > 1, "the artifact id does");
}

#[test]
fn two_runs_give_the_same_bytes_and_sizes_do_not_depend_on_the_name() {
    assert_eq!(snapshot(written(12_288).path()), snapshot(written(12_288).path()));
    let sizes =
        |name: &str| layout(name, 12_288, true).files().iter().map(|f| f.file_bytes).collect::<Vec<_>>();
    assert_eq!(sizes("m.infernix"), sizes(&"long".repeat(50)));
}

#[test]
fn every_changed_byte_of_a_set_is_detected_and_named() {
    let dir = written(8192);
    let entry = dir.path().join("m.infernix");
    let good = Artifact::open(&entry).unwrap();
    let owners: Vec<_> = good
        .directory()
        .objects
        .iter()
        .map(|o| (o.id.clone(), good.segments(o.offset, o.bytes).unwrap()))
        .collect();
    let paths: Vec<_> = good.paths().map(Path::to_owned).collect();
    assert!(paths.len() >= 3);
    for (index, path) in paths.iter().enumerate() {
        let bytes = fs::read(path).unwrap();
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        use std::os::unix::fs::FileExt as _;
        for at in 0..bytes.len() {
            let owner = owners.iter().find(|(_, segments)| {
                let hit = |s: &infernix_artifact::Segment| {
                    s.file == index && (s.offset..s.offset + s.bytes).contains(&(at as u64))
                };
                segments.iter().any(hit)
            });
            // 0x20 turns a letter's case, a space into NUL, and `e` of a number into `E`.
            for flip in if index == 0 && at < 4096 { &[0x20u8, 0x01, 0x29][..] } else { &[0x20] } {
                file.write_all_at(&[bytes[at] ^ flip], at as u64).unwrap();
                let outcome = Artifact::open(&entry).and_then(|a| a.verify_integrity(&one_thread()));
                match (outcome, owner) {
                    (Ok(report), Some((id, _))) => {
                        assert_eq!(report.corrupt_objects, [id.as_str()], "byte {at} of file {index}");
                    }
                    (Ok(report), None) => {
                        // A changed offset or length in the directory makes an object's bytes others, too.
                        assert!(report.corrupt_objects.is_empty() || (index == 0 && at < 4096));
                        assert!(
                            !report.problems.is_empty(),
                            "byte {at} of file {index} xor {flip:#x} went unseen: {:?}",
                            String::from_utf8_lossy(
                                &bytes[at.saturating_sub(60)..(at + 40).min(bytes.len())]
                            )
                        );
                        let name = path.file_name().unwrap().to_str().unwrap();
                        assert!(report.problems.iter().any(|p| p.file == name), "{:?}", report.problems);
                    }
                    (Err(error), None) => {
                        // A changed part name is looked up in the set's folder, and named.
                        assert!(error.to_string().contains(dir.path().to_str().unwrap()), "{error}");
                    }
                    (Err(error), Some((id, _))) => panic!("{id}: {error}"),
                }
            }
            file.write_all_at(&bytes[at..=at], at as u64).unwrap();
        }
    }
    assert!(Artifact::open(&entry).unwrap().verify_integrity(&one_thread()).unwrap().is_ok());
}

#[test]
fn every_changed_byte_of_a_volume_is_detected() {
    use std::os::unix::fs::FileExt as _;
    let dir = written(12_288);
    let path = dir.path().join("m.infernix.ngram");
    let bytes = fs::read(&path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    for (at, byte) in bytes.iter().enumerate() {
        file.write_all_at(&[byte ^ 0x10], at as u64).unwrap();
        let outcome = Volume::open(&path).and_then(|v| v.verify(&Interrupt::default(), |_| ()));
        assert!(!outcome.is_ok_and(|report| report.is_ok()), "byte {at}");
        file.write_all_at(&[*byte], at as u64).unwrap();
    }
}

#[test]
fn parts_of_another_set_swapped_truncated_padded_or_missing_are_refused() {
    let dir = written(8192);
    let entry = dir.path().join("m.infernix");
    let part = |n: usize| dir.path().join(format!("m.infernix.part-{n:04}"));
    let (one, two) = (fs::read(part(1)).unwrap(), fs::read(part(2)).unwrap());
    let error = || Artifact::open(&entry).unwrap_err().to_string();
    fs::write(part(1), &two).unwrap();
    assert!(error().contains("index is 2, expected 1"), "{}", error());
    let other = tempfile::tempdir().unwrap();
    convert(&other.path().join("m.infernix"), 8192, false, Resume::No, &options()).unwrap();
    let foreign = fs::read(other.path().join("m.infernix.part-0001")).unwrap();
    fs::write(part(1), &foreign).unwrap();
    // Without a volume the directory differs but objects, split and metadata do not: the same id is the same payload.
    let same = one[16..32] == foreign[16..32];
    assert_eq!(Artifact::open(&entry).is_ok(), same);
    let mut stranger = one.clone();
    stranger[20] ^= 1;
    fs::write(part(1), &stranger).unwrap();
    assert!(error().contains("artifact id"), "{}", error());
    fs::write(part(1), &one[..one.len() - 1]).unwrap();
    assert!(error().contains("truncated"), "{}", error());
    fs::write(part(1), [&one[..], b"x"].concat()).unwrap();
    assert!(error().contains("appended"), "{}", error());
    fs::write(part(1), b"").unwrap();
    assert!(error().contains("too short"), "{}", error());
    fs::remove_file(part(1)).unwrap();
    assert!(error().contains("m.infernix.part-0001"), "{}", error());
    fs::write(part(1), &one).unwrap();
    assert!(Artifact::open(&part(1)).unwrap_err().to_string().contains("continuation file 1"));
    Artifact::open(&entry).unwrap();
}

#[test]
fn a_mapped_file_that_shrank_is_an_error() {
    let dir = written(32_000_000_000);
    let entry = dir.path().join("m.infernix");
    let artifact = Artifact::open(&entry).unwrap();
    let object = artifact.object("weight/000003").unwrap();
    let held = artifact.bytes(object).unwrap();
    assert!(held.is_mapped() && held.check().is_ok());
    fs::OpenOptions::new().write(true).open(&entry).unwrap().set_len(4096).unwrap();
    assert!(matches!(artifact.bytes(object), Err(ArtifactError::Shrunk { .. })));
    assert!(matches!(artifact.check_unchanged(), Err(ArtifactError::Shrunk { .. })));
    assert_eq!(held.last(), Some(&0), "a page that is gone must not end the process");
    assert!(matches!(held.check(), Err(ArtifactError::Shrunk { .. })));
    let mut out = vec![0; object.bytes as usize];
    assert!(matches!(artifact.read_at(object.offset, &mut out), Err(ArtifactError::Shrunk { .. })));
}

#[test]
fn a_foreign_set_without_digests_is_absent_not_wrong() {
    let dir = written(32_000_000_000);
    let entry = dir.path().join("m.infernix");
    let mut bytes = fs::read(&entry).unwrap();
    let json_bytes = u64::from_le_bytes(bytes[8..16].try_into().unwrap()) as usize;
    let mut directory = parse_directory(&entry, &bytes[32..32 + json_bytes]).unwrap();
    directory.provenance = None;
    let mut text = directory.to_stored_json().replace(":1e-6", ": 0.000001").into_bytes();
    text.resize(json_bytes, b'\n');
    bytes[32..32 + json_bytes].copy_from_slice(&text);
    bytes[22] = 0x48; // other writers' ids are random: UUID version 4
    fs::write(&entry, &bytes).unwrap();
    let artifact = Artifact::open(&entry).unwrap();
    let report = artifact.verify_integrity(&one_thread()).unwrap();
    assert_eq!((report.state, report.problems.len()), (DigestState::Absent, 0));
    assert!(repair_object(&artifact, &artifact.directory().objects[0], |_, _| Ok(())).is_err());
}

#[test]
fn repair_restores_the_recorded_bytes_and_refuses_any_other() {
    let dir = written(8192);
    let entry = dir.path().join("m.infernix");
    let before = snapshot(dir.path());
    let artifact = Artifact::open(&entry).unwrap();
    let object = artifact.object("weight/000003").unwrap().clone();
    let gap = artifact.object("weight/000000").unwrap().end();
    for offset in [object.offset + 5000, object.offset, gap] {
        let segment = artifact.segments(offset, 1).unwrap()[0];
        let path = artifact.paths().nth(segment.file).unwrap();
        let mut bytes = fs::read(path).unwrap();
        bytes[segment.offset as usize] ^= 1;
        fs::write(path, bytes).unwrap();
    }
    let artifact = Artifact::open(&entry).unwrap();
    assert_eq!(artifact.verify_integrity(&one_thread()).unwrap().corrupt_objects, [object.id.as_str()]);
    let wrong = repair_object(&artifact, &object, |_, out| {
        out.fill(7);
        Ok(())
    });
    assert!(matches!(wrong, Err(ArtifactError::DigestMismatch { .. })));
    let bytes = content(4, object.bytes);
    repair_object(&artifact, &object, |at, out| {
        out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
        Ok(())
    })
    .unwrap();
    assert_eq!(repair_gaps(&artifact).unwrap(), 1);
    assert_eq!(snapshot(dir.path()), before);
}

#[test]
fn overlaps_gaps_and_excess_are_refused_and_parallel_writes_hash_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m.infernix");
    let plan = layout("m.infernix", 12_288, false);
    let Start::Writer(writer) =
        Writer::open(&out, plan, &crate::common::key(), Resume::No, &options()).unwrap()
    else {
        panic!("nothing is there yet")
    };
    let i = writer.object_index("weight/000003").unwrap();
    let bytes = content(4, 6000);
    writer.write(i, 10, &bytes[10..20]).unwrap();
    assert!(matches!(writer.write(i, 19, &bytes[19..30]), Err(ArtifactError::Coverage { .. })));
    assert!(matches!(writer.write(i, 5999, &[0, 0]), Err(ArtifactError::Coverage { .. })));
    assert!(matches!(writer.finish(i), Err(ArtifactError::Coverage { .. })));
    std::thread::scope(|scope| {
        for (a, b) in [(20, 2000), (2000, 6000), (0, 10)] {
            let (writer, bytes) = (&writer, &bytes);
            scope.spawn(move || writer.write(i, a as u64, &bytes[a..b]).unwrap());
        }
    });
    assert_eq!(writer.finish(i).unwrap(), infernix_artifact::Digest::of(&bytes));
    assert!(writer.write(i, 0, &[1]).is_err());
    assert!(writer.publish(Default::default()).unwrap_err().to_string().contains("weight/000000"));
}

#[test]
fn drafts_that_cannot_be_are_refused() {
    let options = |max| LayoutOptions { entry_name: "m".into(), max_file_bytes: max };
    let fails = |change: &dyn Fn(&mut infernix_artifact::Draft)| {
        let mut draft = draft(false);
        change(&mut draft);
        draft.layout(&options(1 << 30)).unwrap_err().to_string()
    };
    assert!(draft(false).layout(&options(4096)).unwrap_err().to_string().contains("leaves no room"));
    assert!(fails(&|d| d.objects[1].id = "weight/000000".into()).contains("used twice"));
    assert!(fails(&|d| d.objects[1].bytes = u64::MAX).contains("2^63"));
    assert!(fails(&|d| d.objects[1].alignment = 3).contains("power of two"));
    assert!(fails(&|d| d.late = vec!["/nope".into()]).contains("names no string"));
    assert!(fails(&|d| drop(d.provenance.insert("integrity".into(), 1.into()))).contains("integrity"));
    assert!(fails(&|d| d.objects.clear()).contains("/objects"));
    let name = LayoutOptions { entry_name: "a/b".into(), max_file_bytes: 1 << 30 };
    assert!(draft(false).layout(&name).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn hostile_directories_never_panic(
        patches in proptest::collection::vec((0usize..6000, any::<u8>()), 1..6),
        words in proptest::collection::vec((0usize..60, prop_oneof![
            Just("18446744073709551615"), Just("-1"), Just("1e400"), Just("null"), Just("[]"), Just("{}"),
            Just("9223372036854775807"), Just("\"\""), Just("0.5"), Just("[[[[")]), 0..3),
        json_bytes in prop_oneof![Just(None), any::<u64>().prop_map(Some)],
    ) {
        let dir = tempfile::tempdir().unwrap();
        let plan = layout("m.infernix", 1 << 30, true);
        let mut text = plan.directory().to_stored_json();
        for (nth, word) in words {
            // Replaces the nth number of the text.
            let starts: Vec<usize> = text.match_indices(':').map(|(i, _)| i + 1)
                .filter(|&i| text.as_bytes().get(i).is_some_and(u8::is_ascii_digit)).collect();
            if let Some(&start) = starts.get(nth) {
                let len = text[start..].find(|c: char| !c.is_ascii_digit()).unwrap_or(0);
                text.replace_range(start..start + len, word);
            }
        }
        let _ = parse_directory(Path::new("m.infernix"), text.as_bytes());
        let mut bytes = b"NINFER\0\x03".to_vec();
        bytes.extend(json_bytes.unwrap_or(text.len() as u64).to_le_bytes());
        bytes.extend([0; 16]);
        bytes.extend(text.as_bytes());
        bytes.resize(24_576, 0);
        for (at, byte) in patches {
            bytes[at] = byte;
        }
        let path = dir.path().join("m.infernix");
        fs::write(&path, &bytes).unwrap();
        if let Ok(artifact) = Artifact::open(&path) {
            let _ = artifact.verify_integrity(&one_thread());
            for object in &artifact.directory().objects {
                let _ = artifact.bytes(object);
            }
        }
    }
}
