//! Runs that end early: killed at any disk operation, interrupted, out of space, changed inputs, a second writer.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use infernix_artifact::ngram::VolumeWriter;
use infernix_artifact::verify::VerifyOptions;
use infernix_artifact::{
    Artifact, ArtifactError, Faults, Interrupt, JournalKey, Resume, Start, Writer, WriterOptions, clean,
    state_folder,
};

use crate::common::{content, convert, key, layout, options, rows, snapshot, spec};

const MAX: u64 = 8192;

fn with_faults(faults: &Arc<Faults>) -> WriterOptions {
    WriterOptions { faults: Some(faults.clone()), ..options() }
}

#[test]
fn killed_at_every_disk_operation_then_resumed_gives_the_identical_files() {
    let reference = tempfile::tempdir().unwrap();
    convert(&reference.path().join("m.infernix"), MAX, true, Resume::No, &options()).unwrap();
    let expected = snapshot(reference.path());
    assert!(expected.contains_key("SHA256SUMS") && expected.contains_key("m.infernix.conversion.json"));
    let mut kills = 0;
    for n in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m.infernix");
        let faults = Faults::after(n);
        match convert(&out, MAX, true, Resume::Yes, &with_faults(&faults)) {
            Ok(()) => break,
            Err(ArtifactError::Killed) => kills += 1,
            Err(other) => panic!("{n}: {other}"),
        }
        if out.exists() {
            // An entry that exists is complete.
            let artifact = Artifact::open(&out).unwrap();
            assert!(artifact.verify_integrity(&VerifyOptions::default()).unwrap().is_ok());
        } else if state_folder(&out).join("journal.jsonl").exists() {
            // Without a journal nothing has begun, and any run may.
            let refused = convert(&out, MAX, true, Resume::No, &options());
            assert!(matches!(refused, Err(ArtifactError::StateExists { .. })), "{n}: {refused:?}");
        }
        convert(&out, MAX, true, Resume::Yes, &options()).unwrap_or_else(|e| panic!("resume after {n}: {e}"));
        assert!(snapshot(dir.path()) == expected, "killed after {n} operations");
    }
    assert!(kills > 50, "{kills}");
}

#[test]
fn killed_again_and_again_still_arrives() {
    let reference = tempfile::tempdir().unwrap();
    convert(&reference.path().join("m.infernix"), MAX, true, Resume::No, &options()).unwrap();
    // A run must at least get from opening its state to the last rename.
    for step in [50, 60, 80] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m.infernix");
        let mut runs = 0;
        while convert(&out, MAX, true, Resume::Yes, &with_faults(&Faults::after(step))).is_err() {
            runs += 1;
            assert!(runs < 100, "no progress with {step} operations a run");
        }
        assert!(snapshot(dir.path()) == snapshot(reference.path()), "{step}");
    }
}

#[test]
fn resumed_objects_are_not_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m.infernix");
    let open = |resume| Writer::open(&out, layout("m.infernix", MAX, false), &key(), resume, &options());
    let Ok(Start::Writer(writer)) = open(Resume::No) else { panic!("fresh") };
    writer.write(1, 0, &content(1, 5000)).unwrap();
    let digest = writer.finish(1).unwrap();
    writer.write(4, 0, &[1; 100]).unwrap();
    drop(writer);
    let Ok(Start::Writer(writer)) = open(Resume::Yes) else { panic!("resumed") };
    assert_eq!((writer.digest(1), writer.resumed_bytes()), (Some(digest), 5000));
    assert!(!writer.is_done(4), "a half-written object starts over");
    drop(writer);
    assert!(matches!(open(Resume::No), Err(ArtifactError::StateExists { .. })));
    let other = layout("m.infernix", 12_288, false);
    let differs = Writer::open(&out, other, &key(), Resume::Yes, &options()).unwrap_err().to_string();
    assert!(differs.contains("plan of objects"), "{differs}");
    let changed = JournalKey::new().with("recipe", "r1").with("source a.safetensors", "101 bytes");
    let plan = layout("m.infernix", MAX, false);
    let differs = Writer::open(&out, plan, &changed, Resume::Yes, &options()).unwrap_err().to_string();
    assert!(differs.contains("source a.safetensors changed: was 100 bytes, is 101 bytes"), "{differs}");
    assert!(clean(&out).unwrap());
    assert!(snapshot(dir.path()).is_empty());
}

#[test]
fn a_second_writer_is_refused_while_the_first_runs() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m.infernix");
    let open = |resume| Writer::open(&out, layout("m.infernix", MAX, false), &key(), resume, &options());
    let Ok(Start::Writer(_first)) = open(Resume::No) else { panic!("fresh") };
    for resume in [Resume::No, Resume::Yes] {
        assert!(matches!(open(resume), Err(ArtifactError::Locked { .. })));
    }
}

#[test]
fn nothing_is_ever_overwritten() {
    for occupied in ["m.infernix", "m.infernix.part-0001", "m.infernix.conversion.json", "m.infernix.ngram"] {
        for resume in [Resume::No, Resume::Yes] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(occupied), b"mine").unwrap();
            let error = convert(&dir.path().join("m.infernix"), MAX, true, resume, &options()).unwrap_err();
            assert!(matches!(error, ArtifactError::OutputExists { .. }), "{occupied}: {error}");
            assert_eq!(fs::read(dir.path().join(occupied)).unwrap(), b"mine");
        }
    }
    // Something appears while the conversion runs.
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m.infernix");
    let plan = layout("m.infernix", MAX, false);
    let Ok(Start::Writer(writer)) = Writer::open(&out, plan, &key(), Resume::No, &options()) else {
        panic!("fresh")
    };
    for i in 0..writer.objects().len() {
        writer.write(i, 0, &content(i, writer.objects()[i].bytes)).unwrap();
        writer.finish(i).unwrap();
    }
    fs::write(&out, b"mine").unwrap();
    assert!(matches!(writer.publish(Default::default()), Err(ArtifactError::OutputExists { .. })));
    assert_eq!(fs::read(&out).unwrap(), b"mine");
    fs::remove_file(&out).unwrap();
    convert(&out, MAX, false, Resume::Yes, &options()).unwrap();
    // A finished identical set says so; a different one is in the way.
    convert(&out, MAX, false, Resume::Yes, &options()).unwrap();
    assert!(matches!(
        convert(&out, MAX, false, Resume::No, &options()),
        Err(ArtifactError::OutputExists { .. })
    ));
    assert!(matches!(
        convert(&out, 12_288, false, Resume::Yes, &options()),
        Err(ArtifactError::OutputExists { .. })
    ));
}

#[test]
fn an_interruption_leaves_resumable_state() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m.infernix");
    let flag = Arc::new(AtomicBool::new(true));
    let interrupted = WriterOptions { interrupt: Interrupt::new(flag), ..options() };
    let error = convert(&out, MAX, false, Resume::No, &interrupted).unwrap_err();
    assert!(error.is_interrupted());
    convert(&out, MAX, false, Resume::Yes, &options()).unwrap();
    assert_eq!(snapshot(dir.path()).len(), 6, "entry, three parts, report, SHA256SUMS");
}

/// A small file system that ends with the test.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(options: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("mount");
        let done = command.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir.path()).output();
        done.is_ok_and(|output| output.status.success()).then(|| Self(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
#[expect(clippy::print_stderr, reason = "says why it is skipped")]
fn a_full_disk_is_one_clear_error_and_resumes_after_space_is_freed() {
    let Some(disk) = Tmpfs::mount("size=256k") else {
        eprintln!("skipped: mounting a tmpfs is not permitted here");
        return;
    };
    let out = disk.path().join("m.infernix");
    // Checked before anything is written.
    let filler = disk.path().join("filler");
    fs::write(&filler, vec![1; 240 << 10]).unwrap();
    let error = convert(&out, MAX, false, Resume::Yes, &options()).unwrap_err();
    assert!(matches!(error, ArtifactError::DiskFull { .. }), "{error}");
    // Nothing was written, so there is nothing to resume.
    assert!(!error.to_string().contains("--resume"), "{error}");
    fs::remove_file(&filler).unwrap();
    // Another program takes the space in between: sparse files do not reserve it.
    let plan = layout("m.infernix", MAX, false);
    let start = Writer::open(&out, plan, &key(), Resume::Yes, &options()).unwrap();
    let Start::Writer(writer) = start else { panic!("unfinished") };
    writer.write(1, 0, &content(1, 5000)).unwrap();
    writer.finish(1).unwrap();
    let mut size = 240 << 10;
    while fs::write(&filler, vec![1; size]).is_err() {
        size -= 4096;
    }
    let pad = disk.path().join("pad");
    let mut file = fs::File::create(&pad).unwrap();
    while std::io::Write::write_all(&mut file, &[0; 4096]).is_ok() {}
    let error = writer.write(4, 0, &content(4, 6000)).unwrap_err();
    assert!(matches!(error, ArtifactError::DiskFull { needed, .. } if needed > 0), "{error}");
    drop(writer);
    fs::remove_file(&filler).unwrap();
    let _ = fs::remove_file(&pad);
    convert(&out, MAX, false, Resume::Yes, &options()).unwrap();
    let artifact = Artifact::open(&out).unwrap();
    assert!(artifact.verify_integrity(&VerifyOptions::default()).unwrap().is_ok());
}

#[test]
fn a_volume_on_its_own_resumes_at_its_last_checkpoint_and_notices_damage() {
    let run = |path: &Path, resume, faults: Option<Arc<Faults>>| -> Result<(), ArtifactError> {
        let options = WriterOptions { faults, ..options() };
        let mut volume = VolumeWriter::open(path, spec(), &key(), resume, &options)?;
        let done = volume.rows_done() as usize * 1600;
        volume.write_rows(&rows()[done..])?;
        volume.finish()?;
        volume.publish_alone().map(drop)
    };
    let reference = tempfile::tempdir().unwrap();
    run(&reference.path().join("v.ngram"), Resume::No, None).unwrap();
    for n in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.ngram");
        if run(&path, Resume::Yes, Some(Faults::after(n))).is_ok() {
            break;
        }
        if path.exists() {
            continue; // published; only the state folder was left
        }
        run(&path, Resume::Yes, None).unwrap_or_else(|e| panic!("{n}: {e}"));
        assert!(snapshot(dir.path()) == snapshot(reference.path()), "{n}");
    }
    let volume = infernix_artifact::ngram::Volume::open(&reference.path().join("v.ngram")).unwrap();
    let expected = rows();
    for first in 0..5 {
        for count in 0..=5 - first {
            let mut out = vec![0; count * 1600];
            volume.read_rows(first as u64, &mut out).unwrap();
            assert_eq!(out, expected[first * 1600..(first + count) * 1600]);
        }
        assert_eq!(volume.row(first as u64).unwrap(), expected[first * 1600..(first + 1) * 1600]);
    }
    assert!(volume.row(5).is_err() && volume.read_rows(5, &mut [0; 1600]).is_err());
    assert!(volume.read_rows(0, &mut [0; 3]).is_err());
}
