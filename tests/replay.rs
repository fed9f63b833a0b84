//! `infernix replay` as a user runs it: what it starts ends with it; and its plan on a server of the demo.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use common::{Served, program, scratch};
use infernix_measure::client::Endpoint;
use infernix_measure::replay::plan::{Class, Op};
use infernix_measure::replay::{Corpus, Plan, PlanOptions, Row, Run, RunOptions, agentic, play};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
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

/// Plays a plan without the seconds that tools and users take.
fn played(served: &Served, plan: &Plan) -> Run {
    let endpoint = Endpoint::connect(&served.url(), None, None).expect("a server");
    let interrupted = AtomicBool::new(false);
    let options = RunOptions {
        timeout: Duration::from_secs(300),
        interrupted: &interrupted,
        omit: &[],
        progress: &|_| {},
    };
    let run = play(plan, &endpoint, options);
    assert!(run.rows.iter().all(|r| r.failure().is_none()), "{:?}", run.rows.iter().find_map(Row::failure));
    run
}

fn agents() -> Plan {
    let corpus = Corpus::embedded().expect("the corpus");
    let mut plan = agentic(&corpus, PlanOptions { seed: 42, scale: 0.1, context: 4096 });
    for op in plan.actors.iter_mut().flat_map(|a| &mut a.ops) {
        match op {
            Op::Request(turn) => turn.delay = 0.0,
            Op::Retry { delay, .. } => *delay = 0.0,
            _ => {}
        }
    }
    plan
}

/// Prompt tokens, and those from the cache.
fn counts<'a>(rows: impl IntoIterator<Item = &'a Row>) -> (u64, u64) {
    let usage = rows.into_iter().filter_map(|r| r.exchange.answer.usage);
    usage.fold((0, 0), |(prompt, cached), u| (prompt + u.prompt, cached + u.cached))
}

/// The shapes of messages that agents send, on a real engine, template and tokenizer. A turn here adds a tenth to its prompt where
/// one of full size adds a hundredth, so nine tenths are harder to reach.
#[test]
fn nine_tenths_of_an_agents_later_turns_come_from_the_cache_and_so_does_the_first_after_a_restart() {
    let folder = scratch();
    let file = format!("--prefix-cache-file={}", folder.path().join("prefixes").display());
    let served = Served::new(folder.path(), &[&file]);
    let mut plan = agents();
    let run = played(&served, &plan);
    assert_eq!(served.terminate(), 0);
    // What was edited cannot come from a cache.
    let later = |r: &&Row| r.class.continuing() && r.class != Class::HistoryEdit;
    let (prompt, cached) = counts(run.rows.iter().filter(later));
    eprintln!("later turns: {cached} of {prompt} prompt tokens from the cache");
    assert!(cached * 10 >= prompt * 9, "{cached} of {prompt}");
    for row in run.rows.iter().filter(later) {
        assert!(counts([row]).1 > 0, "{}#{} was read from its start", row.actor, row.index);
    }

    // The first session alone, up to its first request, whose prompt the file has to know.
    plan.actors.retain(|a| a.name == "A");
    for actor in &mut plan.actors {
        let first = actor.ops.iter().position(|op| matches!(op, Op::Request(_))).expect("a request");
        actor.ops.truncate(first + 1);
    }
    let served = Served::new(folder.path(), &[&file]);
    let again = played(&served, &plan);
    assert_eq!((served.terminate(), again.rows.len()), (0, 1));
    let (prompt, cached) = counts(&again.rows);
    assert_eq!(counts(run.rows.iter().filter(|r| r.class == Class::ColdResume && r.actor == "A")).0, prompt);
    eprintln!("first turn after a restart: {cached} of {prompt}");
    assert!(cached * 10 >= prompt * 9, "{cached} of {prompt}");
}
