//! `infernix bench`, `bench serve`, `replay` and `report` as a user runs them: on the bundled model, against its server, and
//! against servers that are none.

mod common;

use common::{Served, demo, finish, infernix, program, scratch};
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Answers every connection with the same bytes, after a pause.
fn fixed(answer: &'static str, pause: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut head = [0; 4096];
                let _ = stream.read(&mut head);
                std::thread::sleep(pause);
                let _ = stream.write_all(answer.as_bytes());
            });
        }
    });
    url
}

fn bench(cache: &Path, args: &[&str]) -> common::Run {
    finish(
        program()
            .env("INFERNIX_CACHE", cache)
            .args(["bench", "--threads", "1", "--no-limit"])
            .args(args)
            .arg(demo()),
    )
}

#[test]
fn bench_through_the_scheduler_reports_streams_rounds_and_constraints() {
    let cache = scratch();
    let drafted = bench(
        cache.path(),
        &[
            "--concurrency",
            "2",
            "--spec",
            "mtp",
            "--draft-tokens",
            "3",
            "-p",
            "32",
            "-n",
            "16",
            "-r",
            "2",
            "--json",
        ],
    )
    .ok()
    .json();
    assert_eq!((&drafted["config"]["concurrency"], &drafted["config"]["spec"]), (&json!(2), &json!("mtp")));
    let tests = drafted["tests"].as_array().expect("tests");
    assert_eq!(tests.len(), 2);
    assert_eq!(tests[0]["tokens"], json!([64, 64]), "two prompts of 32");
    let tg = &tests[1];
    let (rounds, drafts) = (tg["rounds"].as_u64().expect("rounds"), tg["drafted"].as_u64().expect("drafts"));
    // Two streams of 16 tokens, twice; a draft that is accepted saves a round.
    assert!(rounds <= 64 && rounds + tg["accepted"].as_u64().expect("accepted") >= 64, "{tg}");
    assert!(drafts > 0 && tg["tokens_per_round"].as_f64() >= Some(1.0), "{tg}");
    let plain = bench(cache.path(), &["--spec", "off", "-n", "8", "-r", "1", "-o", "jsonl"]).ok();
    let object: Value = serde_json::from_str(plain.stdout.trim()).expect("one object a line");
    for key in
        ["model_filename", "n_prompt", "n_gen", "avg_ts", "stddev_ts", "samples_ns", "type_k", "n_threads"]
    {
        assert!(!object[key].is_null(), "llama-bench's {key}");
    }
    assert_eq!((&object["n_streams"], &object["tokens_per_round"]), (&json!(1), &json!(1.0)));
    let held = bench(
        cache.path(),
        &[
            "--regex",
            "[a-z ]{90}[a-z ]*",
            "-n",
            "12",
            "-r",
            "1",
            "--kv-dtype",
            "int8",
            "--prefill-chunk",
            "16",
        ],
    )
    .ok()
    .stdout;
    assert!(held.contains("held to a regular expression") && held.contains("tok/round"), "{held}");
    let csv = bench(cache.path(), &["--spec", "auto", "-n", "8", "-r", "1", "-o", "csv"]).ok().stdout;
    assert_eq!(csv.lines().count(), 2);
    assert!(csv.lines().next().is_some_and(|head| head.contains("tokens_per_round")), "{csv}");
}

#[test]
fn flags_of_bench_that_contradict_each_other_are_wrong_usage() {
    let cases: [(&[&str], &str); 8] = [
        (&["--concurrency", "2", "--breakdown"], "--breakdown"),
        (&["--regex", "a", "--choice", "b"], "--choice"),
        (&["--concurrency", "9"], "8"),
        (&["--draft-tokens", "3"], "--spec"),
        (&["--spec", "off", "-p", "8", "-d", "8"], "only generation is measured at a depth"),
        (&["--spec", "mtp", "--draft-tokens", "8"], "0..=7"),
        (&["--regex", "(", "-n", "4"], "cannot be enforced"),
        (&["-p", "0", "-n", "0"], "every length is 0"),
    ];
    let cache = scratch();
    for (args, words) in cases {
        let run = bench(cache.path(), args).ends(2);
        assert!(run.stderr.contains(words), "{words} in {}", run.stderr);
    }
    let synthetic = ["bench", "--synthetic", "qwen3_5_test", "--spec", "mtp", "-n", "4"];
    infernix(synthetic).fails(2, &["no drafter"]);
    infernix(["bench", "--synthetic", "qwen3_5_test", "--json-object"]).fails(2, &["no tokenizer"]);
}

#[test]
fn first_tokens_and_rates_agree_with_the_servers_own_log() {
    const REQUESTS: usize = 7;
    let cache = scratch();
    let log = cache.path().join("log.jsonl");
    let log_flag = format!("--request-log-jsonl={}", log.display());
    let served = Served::new(cache.path(), &["--threads", "1", &log_flag]);
    // Two clocks of one run: the client's and the server's. On a machine that does other work a thread may wait for a
    // processor between them, so the median of some requests is compared, and another run may show what one did not.
    let mut found = Vec::new();
    for attempt in 0..5 {
        let seed = attempt.to_string();
        let run = infernix([
            "bench",
            "serve",
            "--url",
            &served.url(),
            "--num-prompts",
            "7",
            "--max-concurrency",
            "1",
            "--input-len",
            "200",
            "--output-len",
            "64",
            "--ignore-eos",
            "--temperature",
            "0",
            "--seed",
            &seed,
            "--save-detailed",
            "--json",
        ])
        .ok()
        .json();
        assert_eq!((&run["completed"], &run["failed"]), (&json!(REQUESTS), &json!(0)));
        let text = std::fs::read_to_string(&log).expect("the log");
        let done: Vec<Value> = text
            .lines()
            .map(|l| serde_json::from_str::<Value>(l).expect("JSON"))
            .filter(|l| l["event"] == "request_done")
            .collect();
        // One request at a time, so the last ones of the log are those of this run, in order.
        let own = &done[done.len() - REQUESTS..];
        let mut apart: [Vec<f64>; 2] = Default::default();
        for (i, server) in own.iter().enumerate() {
            let number = |v: &Value| v.as_f64().expect("a number");
            let tokens = number(&run["output_lens"][i]);
            assert_eq!(tokens, number(&server["output_tokens"]), "counts are the server's");
            assert_eq!(run["input_lens"][i], server["prompt_tokens"]);
            let (ttft, latency) = (number(&run["ttfts"][i]), number(&run["latencies"][i]));
            let (first, all) = (number(&server["first_token_seconds"]), number(&server["seconds"]));
            apart[0].push((ttft - first).abs() / (0.02 * first).max(0.005));
            apart[1].push(((latency - ttft) - (all - first)).abs() / (0.02 * (all - first)).max(0.005));
        }
        let median = apart.map(|mut v| {
            v.sort_by(f64::total_cmp);
            v[v.len() / 2]
        });
        if median.iter().all(|m| *m <= 1.0) {
            return;
        }
        found.push(median);
    }
    panic!("first tokens and streams of client and server, in multiples of max(2 %, 5 ms): {found:?}");
}

#[test]
fn servers_that_are_none_are_said_to_be_so() {
    let serve = |url: &str, more: &[&str]| {
        infernix(["bench", "serve", "--url", url, "--num-prompts", "2", "--timeout", "5"].iter().chain(more))
    };
    // Nothing listens on the port of a listener that is gone.
    let dead = {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        format!("http://{}", listener.local_addr().expect("an address"))
    };
    serve(&dead, &[]).fails(1, &[&dead]);
    serve("127.0.0.1:8080", &[]).fails(1, &["http://"]);
    let html = fixed("HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n<html>no</html>", Duration::ZERO);
    serve(&html, &[]).fails(1, &["/v1/models", "no JSON"]);
    let noise = fixed("\u{1}\u{2}\u{3} what?\r\n\r\n", Duration::ZERO);
    serve(&noise, &[]).fails(1, &["/v1/models"]);
    let silent = fixed("", Duration::ZERO);
    serve(&silent, &["--model", "m"]).fails(1, &["probe"]);
    let arm = format!("x={html}");
    infernix(["replay", "--scale", "0.1", "--context", "4096", "--arms", &arm]).fails(1, &["no JSON"]);
    infernix(["replay", "--scale", "0.1", "--context", "4096", "--arms", "x=exit 3; : {port}"])
        .fails(1, &["exit status: 3", "--out"]);
}

#[test]
fn a_result_that_cannot_be_written_is_printed_all_the_same() {
    let cache = scratch();
    let served = Served::new(cache.path(), &["--threads", "1"]);
    let missing = cache.path().join("none/result.json");
    let run = infernix([
        "bench",
        "serve",
        "--url",
        &served.url(),
        "--num-prompts",
        "2",
        "--max-concurrency",
        "2",
        "--input-len",
        "16",
        "--output-len",
        "4",
        "--label",
        "ours",
        "--json",
        "--output",
        missing.to_str().expect("UTF-8"),
    ])
    .fails(1, &["result.json"]);
    let doc = run.json();
    assert_eq!((&doc["completed"], &doc["label"]), (&json!(2), &json!("ours")));
    assert_eq!(doc["dataset"]["input_len"], 16);
    assert!(
        doc["command_line"].as_str().is_some_and(|c| !c.contains("none/") && c.contains("--label ours")),
        "{doc}"
    );
    // And the page that joins such results.
    let (file, page) = (cache.path().join("a.json"), cache.path().join("page.html"));
    std::fs::write(&file, doc.to_string()).expect("written");
    infernix(["report".as_ref(), file.as_os_str(), "-o".as_ref(), page.as_os_str()]).ok();
    let html = std::fs::read_to_string(page).expect("the page");
    assert!(html.contains("Load on servers") && html.contains("ours"), "{html}");
}

#[test]
fn ctrl_c_ends_a_run_against_a_server_that_hangs() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let mut child = program()
        .args(["bench", "serve", "--url", &url, "--model", "m", "--num-prompts", "3", "--input-len", "8"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    // It waits for an answer now, and for nothing else.
    let waiting = listener.accept().expect("a connection");
    // The first says to stop, the second ends what waits for a server.
    let code = loop {
        assert!(
            Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill").success()
        );
        std::thread::sleep(Duration::from_millis(300));
        if let Some(status) = child.try_wait().expect("its state") {
            break status.code();
        }
    };
    drop(waiting);
    assert_eq!(code, Some(130));
}

#[test]
fn plans_are_the_same_on_every_run_and_machine() {
    let plan = |more: &[&str]| {
        let args = ["replay", "--dry-run", "--json", "--scale", "0.1", "--context", "4096"];
        infernix(args.iter().chain(more)).ok().json()
    };
    let two = plan(&["--seeds", "2"]);
    let plans = two["plans"].as_array().expect("a list");
    assert_eq!((plans.len(), &two["dry_run"]), (2, &json!(true)));
    assert_eq!((&plans[0]["seed"], &plans[0]["requests"]), (&json!(42), &json!(49)));
    // Of version 1 of the scenario and corpus-1; a change of either is a change of every published figure.
    assert_eq!(plans[0]["plan_hash"], PLAN_42);
    assert_ne!(plans[0]["plan_hash"], plans[1]["plan_hash"]);
    assert_eq!(plan(&["--seed-list", "42"])["plans"][0]["plan_hash"], PLAN_42);
    let full =
        infernix(["replay", "--dry-run", "--json", "--profile", "full", "--context", "4096"]).ok().json();
    assert_eq!((&full["plans"][0]["requests"], &full["plans"][0]["aborted"]), (&json!(130), &json!(1)));
    infernix(["replay", "--dry-run", "--profile", "full", "--scale", "0.5"]).ends(2);
    infernix(["replay", "--dry-run", "--omit", "messages"]).fails(2, &["--omit messages"]);
    infernix(["replay", "--scale", "0"]).fails(2, &["--scale"]);
    infernix(["replay", "--dry-run", "--context", "100"]).fails(2, &["--context"]);
    infernix(["replay", "--dry-run", "--seeds", "2", "--seed-list", "1"]).ends(2);
}

/// A plan has its own seed, scale and context: what is asked beside it must not be dropped without a word.
#[test]
fn a_stored_plan_refuses_what_contradicts_it_and_keeps_its_own_context() {
    let folder = scratch();
    let out = folder.path().display().to_string();
    infernix(["replay", "--dry-run", "--scale", "0.1", "--context", "4096", "--out", &out]).ok();
    let file = folder.path().join("seed-42/plan.json").display().to_string();
    let stored = |more: &[&str]| infernix(["replay", &file, "--dry-run", "--json"].iter().chain(more));
    for agreeing in
        [&[][..], &["--scale", "0.1"], &["--profile", "quick", "--seed-list", "42", "--context", "4096"]]
    {
        let plan = stored(agreeing).ok().json();
        assert_eq!(plan["plans"][0]["plan_hash"], PLAN_42, "{agreeing:?}");
        assert_eq!(plan["plans"][0]["context"], 4096, "{agreeing:?}");
    }
    for (other, words) in [
        (&["--scale", "0.5"][..], &["--scale", "scale 0.1"][..]),
        (&["--profile", "full"], &["--profile"]),
        (&["--seeds", "3", "--corpus", "."], &["seed 42", "--seeds, --corpus"]),
        (&["--seed-list", "43"], &["--seed-list"]),
        (&["--context", "8192"], &["context 4096", "--context"]),
    ] {
        stored(other).fails(2, words);
    }
    // Before any server is started.
    infernix(["replay", "/nope.json", "--arms", "x=exit 1 # {port}"]).fails(1, &["/nope.json", "no file"]);
}

const PLAN_42: &str = "fa03cfa01f381120aaad4834dd0259b2ef4442f5d7d96cebff0e45fb0cbcc433";
