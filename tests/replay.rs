//! `infernix replay` as a user runs it: what it starts ends with it.

mod common;

use common::{program, scratch};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for what takes a moment.
const PATIENCE: Duration = Duration::from_secs(60);

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn signal(name: &str, to: &str) -> bool {
    let sent = Command::new("kill").args(["-s", name, "--", to]).stderr(Stdio::null()).status();
    sent.expect("kill is there").success()
}

/// A replay whose server never answers and ignores every request to end, and that server's process group.
fn stuck(folder: &Path) -> (Child, String) {
    let file = folder.join("group");
    let server =
        format!("x=trap '' TERM INT; echo $$ > {}; sleep 600 & sleep 600 # {{port}}", file.display());
    let replay = program()
        .args(["replay", "--context", "4096", "--scale", "0.1", "--arms", &server])
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    let group = || std::fs::read_to_string(&file).unwrap_or_default();
    wait_for("the server starts", || group().ends_with('\n'));
    let group = format!("-{}", group().trim());
    assert!(signal("0", &group), "the server runs");
    (replay, group)
}

#[test]
fn a_second_interruption_of_a_replay_ends_its_server_first() {
    let folder = scratch();
    let (mut replay, group) = stuck(folder.path());
    let mut code = None;
    wait_for("the replay ends", || {
        signal("INT", &replay.id().to_string());
        code = replay.try_wait().expect("a status");
        code.is_some()
    });
    assert_eq!(code.and_then(|c| c.code()), Some(130));
    assert!(!signal("0", &group), "the server still runs");
}

#[test]
fn a_replay_that_is_killed_takes_its_server_along() {
    for how in ["TERM", "KILL"] {
        let folder = scratch();
        let (mut replay, group) = stuck(folder.path());
        assert!(signal(how, &replay.id().to_string()));
        assert!(!replay.wait().expect("a status").success());
        wait_for("the server ends", || !signal("0", &group));
    }
}
