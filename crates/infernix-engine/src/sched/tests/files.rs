//! The cache's file: where it is written, and what it is not written over.

use super::*;
use std::path::{Path, PathBuf};

fn model() -> SimModel {
    SimModel::new(SimOptions { pages: 200, sequences: 4, ..SimOptions::default() })
}

fn kept_in(file: PathBuf) -> EngineOptions {
    let mut o = options(512);
    (o.cache.device_bytes, o.cache.host_bytes) = (10_000_000, 10_000_000);
    o.cache.file = Some(file);
    o
}

/// A scheduler that has answered a prompt.
fn used(o: &EngineOptions) -> Scheduler<SimModel> {
    let mut s = Scheduler::new(model(), o.clone()).unwrap();
    s.submit(request(ids(1, 700), 5), sink().0);
    run(&mut s);
    s
}

fn loaded(o: &EngineOptions) -> Result<usize, String> {
    Scheduler::new(model(), o.clone()).unwrap().load_cache()
}

fn names(folder: &Path) -> Vec<String> {
    let name = |e: std::io::Result<std::fs::DirEntry>| e.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = folder.read_dir().unwrap().map(name).collect();
    names.sort();
    names
}

#[cfg(unix)]
#[test]
fn a_link_keeps_its_place_and_what_is_no_regular_file_is_neither_read_nor_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("disk")).unwrap();
    // Dangling first, then to a file.
    std::os::unix::fs::symlink("disk/real", at("link")).unwrap();
    for _ in 0..2 {
        assert!(used(&kept_in(at("link"))).save_cache().unwrap() > 0);
        assert!(at("link").symlink_metadata().unwrap().is_symlink());
        assert!(loaded(&kept_in(at("disk/real"))).unwrap() > 0);
        assert_eq!(names(&at("disk")), ["real"]);
    }
    crate::files::tests::pipe(&at("pipe"));
    std::os::unix::fs::symlink("/dev/null", at("null")).unwrap();
    for name in ["pipe", "null", "disk"] {
        let o = kept_in(at(name));
        assert!(loaded(&o).is_err(), "{name}");
        assert!(used(&o).save_cache().is_err(), "{name}");
        assert!(!at(name).metadata().unwrap().is_file());
    }
    assert_eq!(names(folder.path()), ["disk", "link", "null", "pipe"]);
}

#[test]
fn what_dead_processes_left_of_a_cache_file_goes_at_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let o = kept_in(at("pc"));
    for (name, text) in [
        (".pc.4711", &b"INFXPFXC half"[..]),
        (".pc.4712", b""),
        (".pc.4713", b"somebody's notes"),
        (".pc.4714", b"INFXPFXC being written"),
        (".pc.old", b"INFXPFXC"),
        (".pcs.4711", b"INFXPFXC"),
    ] {
        std::fs::write(at(name), text).unwrap();
    }
    let writer = std::fs::File::open(at(".pc.4714")).unwrap();
    writer.lock().unwrap();
    assert_eq!(loaded(&o), Ok(0));
    assert_eq!(names(folder.path()), [".pc.4713", ".pc.4714", ".pc.old", ".pcs.4711"]);
    drop(writer);
    assert_eq!(loaded(&o), Ok(0));
    assert_eq!(names(folder.path()), [".pc.4713", ".pc.old", ".pcs.4711"]);
}

#[test]
fn a_cache_file_of_other_settings_says_at_the_start_which_and_that_it_will_be_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut o = kept_in(folder.path().join("pc"));
    o.cache.identity = "model: a\ndrafter (--spec): off\nkeys and values (--kv-dtype): Bf16".into();
    used(&o).save_cache().unwrap();
    o.cache.identity = o.cache.identity.replace("off", "on");
    let why = loaded(&o).unwrap_err();
    assert!(why.contains("drafter (--spec) was off and is on") && why.contains("replaced"), "{why}");
    assert!(!why.contains("kv-dtype"), "{why}");
}

/// Seen: a budget in which nothing fits left 153 bytes of a file of 6.7 MB.
#[test]
fn a_good_cache_file_is_not_written_over_by_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pc");
    let o = kept_in(file.clone());
    used(&o).save_cache().unwrap();
    let good = std::fs::read(&file).unwrap();
    let mut small = o.clone();
    small.cache.file_bytes = 100;
    let why = used(&small).save_cache().unwrap_err();
    assert!(why.contains("--prefix-cache-file-mib"), "{why}");
    assert_eq!(std::fs::read(&file).unwrap(), good);
    // Nothing was asked.
    assert_eq!(Scheduler::new(model(), o.clone()).unwrap().save_cache(), Ok(0));
    assert_eq!(std::fs::read(&file).unwrap(), good);
    // Emptied by an order, it is to stay empty.
    let mut s = used(&o);
    s.clear_cache();
    assert_eq!(s.save_cache(), Ok(0));
    assert_eq!(loaded(&o), Ok(0));
    assert!(std::fs::read(&file).unwrap().len() < good.len());
}
