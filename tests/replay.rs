//! `infernix replay` as a user runs it: what it starts ends with it; and its plan on a server of the demo.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

mod common;

use common::{STREAM, Scripted, Served, demo, finish, infernix, program, scratch, signal};
use infernix_measure::client::Endpoint;
use infernix_measure::replay::plan::{Class, Op};
use infernix_measure::replay::{Corpus, Plan, PlanOptions, Row, Run, RunOptions, agentic, play};
use serde_json::Value;
use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
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

const SMALL: [&str; 5] = ["replay", "--context", "4096", "--scale", "0.1"];

/// Whether these tests run under `nohup`, which holds for all that they start.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap_or_default();
    mask.trim().ends_with(['1', '3', '5', '7', '9', 'b', 'd', 'f'])
}

fn summary(out: &Path) -> Value {
    let text = std::fs::read_to_string(out.join("summary.json")).expect("a summary");
    serde_json::from_str(&text).expect("JSON")
}

/// Names and bytes of all that lies in a folder.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path()) {
        if entry.is_dir() {
            all.extend(contents(&entry));
        } else {
            all.push((entry.display().to_string(), std::fs::read(&entry).expect("readable")));
        }
    }
    all.sort();
    all
}

#[test]
fn a_run_that_fails_at_once_writes_why_and_its_folder_is_not_taken_for_another() {
    let folder = scratch();
    let out = folder.path().join("run");
    let server = Scripted::new(|_| Some("data: {\"error\":{\"message\":\"out of pages\"}}\n\n"));
    let play = || {
        let arm = format!("x={}", server.url);
        finish(program().args(SMALL).args(["--arms", &arm, "--out"]).arg(&out))
    };
    let run = play().fails(1, &["the priming request failed", "out of pages"]);
    assert!(
        run.stdout.contains("**Invalid**") && run.stdout.contains("| Metric | x (invalid) |"),
        "{}",
        run.stdout
    );
    let doc = summary(&out);
    assert_eq!(doc["valid"], false);
    assert!(doc["invalid_reasons"][0].as_str().is_some_and(|r| r.contains("priming")), "{doc}");
    let rows = out.join("1-x/seed-42/client.jsonl");
    assert_eq!(std::fs::read_to_string(rows).expect("rows"), "", "no row, and no line");
    let (before, posts) = (contents(&out), server.posts());
    play().fails(2, &["another run", "name another folder"]);
    assert!(contents(&out) == before && server.posts() == posts, "nothing is written and nothing sent");
}

#[test]
fn a_replay_that_a_signal_ends_reports_what_was_played_and_waits_for_no_answer() {
    for (name, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        if name == "HUP" && hangup_is_ignored() {
            continue;
        }
        let folder = scratch();
        let out = folder.path().join("run");
        // The priming request and the first turn are answered, the next one never is.
        let server = Scripted::new(|n| (n < 2).then_some(STREAM));
        let mut replay = program()
            .args(SMALL)
            .args(["--arms", &format!("x={}", server.url), "--out"])
            .arg(&out)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("starts");
        wait_for("the third request", || server.posts() > 2);
        assert!(signal(name, &replay.id().to_string()));
        let mut printed = String::new();
        replay.stdout.take().expect("piped").read_to_string(&mut printed).expect("text");
        assert_eq!(replay.wait().expect("a status").code(), Some(code), "{name}");
        assert!(printed.contains("**Invalid**: x (seed 42): interrupted"), "{name}: {printed}");
        let doc = summary(&out);
        assert_eq!((&doc["valid"], &doc["arms"][0]["requests"]), (&false.into(), &1.into()), "{name}");
    }
}

#[test]
fn a_server_over_its_budget_is_said_to_be_so() {
    let folder = scratch();
    let out = folder.path().join("run");
    let arm = "x=big=$(head -c 60000000 /dev/zero | tr '\\0' x); sleep 600 # {port}";
    let run =
        finish(program().args(SMALL).args(["--ram-budget-mib", "10", "--arms", arm, "--out"]).arg(&out));
    run.fails(1, &["MiB of RAM, 10 allowed"]);
    let reason = summary(&out)["invalid_reasons"][0].as_str().unwrap_or_default().to_owned();
    assert!(reason.contains("MiB of RAM, 10 allowed") && !reason.contains("refused"), "{reason}");
}

#[test]
fn a_server_that_wants_another_key_is_not_waited_for_and_no_key_is_told() {
    let folder = scratch();
    let out = folder.path().join("run");
    let cache = folder.path().join("cache");
    let arm = format!(
        "x=INFERNIX_CACHE='{}' INFERNIX_API_KEY=hush-hush exec '{}' serve '{}' --port {{port}} # --api-key hush-hush",
        cache.display(),
        env!("CARGO_BIN_EXE_infernix"),
        demo().display()
    );
    let mut replay = program();
    replay.env_remove("INFERNIX_API_KEY").args(SMALL).args([
        "--arms",
        &arm,
        "--load-timeout",
        "100000",
        "--out",
    ]);
    let run = finish(replay.arg(&out)).fails(1, &["status 401", "give its key"]);
    assert!(!run.stdout.contains("hush-hush") && !run.stderr.contains("hush-hush"), "{run:?}");
    for (name, bytes) in contents(&out) {
        assert!(!String::from_utf8_lossy(&bytes).contains("hush-hush"), "{name}");
    }
    let command = summary(&out)["command_line"].as_str().unwrap_or_default().to_owned();
    assert!(command.contains("INFERNIX_API_KEY=***") && command.contains("--api-key ***"), "{command}");
}

#[test]
fn a_damaged_plan_is_no_plan() {
    let folder = scratch();
    let (out, file) = (folder.path().display().to_string(), folder.path().join("seed-42/plan.json"));
    infernix(SMALL.iter().chain(&["--dry-run", "--out", &out])).ok();
    let good = std::fs::read_to_string(&file).expect("the plan");
    for (from, to, words) in [
        ("\"delay\":0.0", "\"delay\":-5.0", "delay -5"),
        ("\"abort_after\":null", "\"abort_after\":-0.001", "abort_after -0.001"),
        ("\"abort_after\":null", "\"abort_after\":1e300", "abort_after 1"),
        ("\"context\":4096", "\"context\":5", "context 5"),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from}");
        std::fs::write(&file, bad).expect("written");
        infernix(["replay".as_ref(), file.as_os_str(), "--dry-run".as_ref()]).fails(1, &["no plan: ", words]);
    }
}

/// A recorder, and where it listens.
fn recorder(output: &Path, upstream: &str, shell: &str) -> (Child, String) {
    let mut child = Command::new("sh")
        .args(["-c", &format!("{shell} exec \"$@\""), "sh", env!("CARGO_BIN_EXE_infernix")])
        .args(["replay", "record", "--listen", "127.0.0.1:0", "--upstream", upstream, "--output"])
        .arg(output)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut lines = std::io::BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut lines, &mut line).expect("a line");
    let address = line.split("http://").nth(1).and_then(|l| l.split('/').next());
    let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
    std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
    (child, address)
}

fn ask(address: &str) {
    let endpoint = Endpoint::connect(&format!("http://{address}"), None, Some("m".into())).expect("a server");
    let body =
        serde_json::json!({ "messages": [{ "role": "user", "content": "one\ntwo" }], "max_tokens": 9 });
    let answer = endpoint.stream("/v1/chat/completions", &body, PATIENCE);
    assert_eq!(answer.failure, None);
}

#[test]
fn a_recording_is_saved_whatever_signal_ends_it() {
    for name in ["INT", "TERM", "HUP"] {
        if name == "HUP" && hangup_is_ignored() {
            continue;
        }
        let folder = scratch();
        let file = folder.path().join("mine.json");
        let server = Scripted::new(|_| Some(STREAM));
        let (mut child, address) = recorder(&file, &server.url, "");
        assert!(contents(folder.path()).is_empty(), "nothing is there before it is whole");
        ask(&address);
        assert!(signal(name, &child.id().to_string()));
        assert_eq!(child.wait().expect("a status").code(), Some(0), "{name}");
        let plan: Plan = serde_json::from_slice(&std::fs::read(&file).expect("saved")).expect("a plan");
        assert_eq!((plan.check(), plan.counts().requests), (Ok(()), 1));
        let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().expect("there").permissions());
        assert_eq!(mode & 0o777, 0o600);
    }
}

#[test]
fn a_recording_that_no_disk_takes_is_printed_and_leaves_the_name_free() {
    let folder = scratch();
    let file = folder.path().join("mine.json");
    let server = Scripted::new(|_| Some(STREAM));
    // No file may have a byte.
    let (mut child, address) = recorder(&file, &server.url, "trap '' XFSZ; ulimit -f 0;");
    ask(&address);
    assert!(signal("TERM", &child.id().to_string()));
    let mut printed = String::new();
    child.stdout.take().expect("piped").read_to_string(&mut printed).expect("text");
    assert!(!child.wait().expect("a status").success());
    let plan: Plan = serde_json::from_str(&printed).expect("a plan");
    assert_eq!((plan.check(), plan.counts().requests), (Ok(()), 1));
    assert!(contents(folder.path()).is_empty(), "the next try finds the name free");
}

#[test]
fn a_recorder_without_its_port_tells_no_agent_to_come() {
    let folder = scratch();
    let file = folder.path().join("mine.json");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    assert!(TcpStream::connect(&address).is_ok());
    let record = |listen: &str| {
        let line = ["replay", "record", "--upstream", "http://127.0.0.1:1", "--listen", listen, "--output"];
        finish(program().args(line).arg(&file))
    };
    for (listen, words) in [(address.as_str(), "in use"), ("0.0.0.0:0", "not a loopback address")] {
        let run = record(listen).fails(1, &[words]);
        assert!(!run.stderr.contains("base URL"), "{}", run.stderr);
        assert!(contents(folder.path()).is_empty());
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
    usage.fold((0, 0), |(prompt, cached), u| (prompt + u.prompt, cached + u.cached.unwrap_or(0)))
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
