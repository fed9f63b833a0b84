//! `infernix bench`, `bench serve`, `replay` and `report` as a user runs them: on the bundled model, against its server, and
//! against servers that are none.

mod common;

use common::{EMPTY, STREAM, Scripted, Served, demo, finish, infernix, program, scratch, signal};
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
    // One stream and a token a round, so both rates are one.
    let rate = |key: &str| object[key].as_f64().expect("a rate");
    assert!((rate("rounds_per_s_mean") / rate("avg_ts") - 1.0).abs() < 1e-9, "{object}");
    assert_eq!(object["model_type"], "qwen4_exp nvfp4_mul", "what most parameters are stored in");
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
    let cases: [(&[&str], &str); 12] = [
        (&["--json", "-o", "csv"], "--output"),
        (&["--lossless"], "--threads has no effect: the lossless backend takes every core"),
        (&["--vram-budget-mib", "100"], "--vram-budget-mib has no effect"),
        (&["--spec", "off", "--draft-tokens", "3"], "--draft-tokens has no effect"),
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

const LOAD: [&str; 9] =
    ["bench", "serve", "--num-prompts", "4", "--max-concurrency", "1", "--input-len", "8", "--url"];

/// Links lead where they did, pipes and devices are still there, and each has the result.
#[test]
fn outputs_that_are_no_files_stay_what_they_are() {
    let folder = scratch();
    let server = Scripted::new(|_| Some(STREAM));
    let at = |name: &str| folder.path().join(name);
    let kind = |name: &str| at(name).symlink_metadata().expect("there").file_type();
    std::os::unix::fs::symlink("real.json", at("link")).expect("a link");
    let shell = |line: &str| Command::new("sh").args(["-c", line]).current_dir(folder.path()).status();
    assert!(shell("mkfifo pipe").expect("sh").success());
    // A device of its own, which only root can make.
    let device = shell("mknod null c 1 3 2> no && echo > null").expect("sh").success();
    let run = |output: &str| infernix(LOAD.iter().copied().chain([&*server.url, "-o", output])).ok();
    for _ in 0..2 {
        run(at("link").to_str().expect("UTF-8"));
        assert!(kind("link").is_symlink());
        let text = std::fs::read_to_string(at("real.json")).expect("written through the link");
        assert!(text.contains("\"completed\": 4"), "{text}");
    }
    let pipe = at("pipe");
    let reader = std::thread::spawn(move || std::fs::read_to_string(pipe).expect("read"));
    run(at("pipe").to_str().expect("UTF-8"));
    assert!(reader.join().expect("no panic").contains("\"completed\": 4"));
    assert!(std::os::unix::fs::FileTypeExt::is_fifo(&kind("pipe")));
    if device {
        run(at("null").to_str().expect("UTF-8"));
        assert!(std::os::unix::fs::FileTypeExt::is_char_device(&kind("null")));
    }
    assert!(run("/dev/stdout").stdout.contains("\"completed\": 4"));
    assert!(shell("ls | grep -c partial").is_ok_and(|s| !s.success()), "nothing is left beside them");
}

#[test]
fn a_context_length_without_an_answer_counts_for_nothing_and_is_named() {
    // Two probes, an answer without text, a whole one.
    let server = Scripted::new(|n| Some(if n == 2 { EMPTY } else { STREAM }));
    let context = ["bench", "context", "--lengths", "100:2", "--url", &server.url];
    let run = infernix(context).ends(1);
    assert!(run.stdout.contains("| 1 of 2 |") && run.stdout.contains("without text"), "{}", run.stdout);
    let server = Scripted::new(|n| Some(if n == 2 { EMPTY } else { STREAM }));
    let doc =
        infernix(["bench", "context", "--json", "--lengths", "100:2", "--url", &server.url]).ends(1).json();
    assert!(doc["prompts"][0]["ttft_s"].is_null() && doc["prompts"][0]["decode_tok_s"].is_null(), "{doc}");
    assert!(doc["prompts"][0]["error"].is_string() && doc["prompts"][1]["ttft_s"].is_f64(), "{doc}");
    infernix(context.iter().chain(&["--output-len", "0"])).fails(2, &["--output-len"]);
    let all = Scripted::new(|n| Some(if n > 2 { EMPTY } else { STREAM }));
    let load = infernix(LOAD.iter().copied().chain([&*all.url])).ends(1);
    assert!(load.stdout.contains("4 failed: protocol: an answer without text"), "{}", load.stdout);
}

#[test]
fn a_server_that_never_answers_is_left_at_the_time_limit() {
    let server = Scripted::new(|_| None);
    let load = [&LOAD[..], &[&server.url]].concat();
    for command in [&load[..], &["bench", "context", "--lengths", "100:1", "--url", &server.url]] {
        infernix(command.iter().chain(&["--timeout", "1"])).fails(1, &["probe", "timed out"]);
    }
}

#[test]
fn an_interrupted_load_prints_and_writes_what_was_done() {
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let folder = scratch();
        let file = folder.path().join("result.json");
        // Two probes, the warm-up and two requests are answered.
        let server = Scripted::new(|n| (n < 5).then_some(STREAM));
        let child = program()
            .args(LOAD)
            .args([&server.url, "--json", "--output"])
            .arg(&file)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts");
        while server.posts() < 6 {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(signal(name, &child.id().to_string()));
        let ended = child.wait_with_output().expect("ends");
        assert_eq!(ended.status.code(), Some(code), "{name}");
        for text in [ended.stdout, std::fs::read(&file).expect("written")] {
            let doc: Value = serde_json::from_slice(&text).expect("one JSON document");
            let found = [&doc["interrupted"], &doc["completed"], &doc["num_prompts"]];
            assert_eq!(found, [&json!(true), &json!(2), &json!(4)], "{name}");
        }
    }
}

#[test]
fn no_report_tells_what_stands_before_a_host() {
    let server = Scripted::new(|_| Some(STREAM));
    let url = server.url.replace("://", "://somebody:hush-hush@");
    let load = [&LOAD[..], &[&url, "--json"]].concat();
    for command in [&load[..], &["bench", "context", "--json", "--lengths", "100:1", "--url", &url]] {
        let run = infernix(command).ok();
        assert!(!run.stdout.contains("hush-hush") && !run.stderr.contains("hush-hush"), "{run:?}");
        let doc = run.json();
        assert!(doc["url"].as_str().is_some_and(|u| u.starts_with("http://***@127.")), "{doc}");
        assert!(doc["command_line"].as_str().is_some_and(|c| c.contains("http://***@127.")), "{doc}");
    }
    // One that fails at once, since the turns of a replay have pauses.
    let broken = Scripted::new(|_| Some("data: {}\n\n"));
    let arm = format!("x={}", broken.url.replace("://", "://somebody:hush-hush@"));
    let replay = ["replay", "--scale", "0.1", "--context", "4096", "--json", "--arms", &arm];
    let run = infernix(replay).ends(1);
    assert!(!run.stdout.contains("hush-hush") && !run.stderr.contains("hush-hush"), "{run:?}");
    assert!(run.stdout.contains("x=http://***@127."), "{}", run.stdout);
    let gone = "http://somebody:hush-hush@127.0.0.1:1";
    let failed = infernix(["bench", "serve", "--url", gone]).fails(1, &["http://***@127.0.0.1:1/v1/models"]);
    assert!(!failed.stderr.contains("hush-hush"), "{}", failed.stderr);
}

#[test]
fn flags_that_would_be_ignored_are_wrong_usage() {
    let folder = scratch();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("a.json"), "{}").expect("written");
    std::os::unix::fs::symlink("a.json", at("b.json")).expect("a link");
    let synthetic = ["bench", "--synthetic", "qwen3_5_test", "-n", "1"];
    for layers in ["0", "5"] {
        infernix(synthetic.iter().chain(&["--synthetic-layers", layers])).fails(2, &["1 to 4"]);
    }
    infernix(synthetic.iter().copied().chain(["--profile", &at("trace")])).fails(2, &["--profile", "CUDA"]);
    infernix(synthetic.iter().chain(&["--routing-zipf", "1"])).fails(2, &["--routing-zipf has no effect"]);
    infernix(synthetic.iter().chain(&["--ngram", "x"])).fails(2, &["--ngram has no effect"]);
    let random = ["bench", "serve", "--url", "http://127.0.0.1:1", "--dataset-path", &at("a.json")];
    infernix(random).fails(2, &["--dataset-path", "--dataset-name"]);
    let twice = ["report", &at("a.json"), &at("b.json"), "-o", &at("page.html")];
    infernix(twice).fails(2, &["a.json and ", "b.json are one file"]);
    assert!(!folder.path().join("trace").exists() && !folder.path().join("page.html").exists());
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
