//! Traces and the prefix-cache file as a user meets them: recorded by `run` and `serve`, read by `plan`, damaged, on a full disk,
//! and with flags that contradict each other.

mod common;

use common::{Run, Served, demo, finish, program, scratch};
use serde_json::{Value, json};
use std::path::Path;

/// `infernix` over the demo, whose conversion is kept in `cache`.
fn infernix(cache: &Path, args: &[&str]) -> Run {
    let (command, rest) = args.split_first().expect("a command");
    finish(program().env("INFERNIX_CACHE", cache).arg(command).arg(demo()).args(rest))
}

fn plan(cache: &Path, trace: &Path) -> Run {
    let trace = trace.to_str().expect("text");
    infernix(cache, &["plan", "--trace", trace, "--json", "--vram-mib", "2048", "--kv-capacity", "4096"])
}

fn lines(trace: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(trace).expect("a trace");
    text.lines().map(|l| serde_json::from_str(l).expect("a document a line")).collect()
}

/// Longer than a page of the cache, or there is nothing to keep of it.
const PROMPT: &str = "The colours are red, green and blue. The shapes are round, square and long. Of every colour and shape \
    there is one thing: a red ball, a green box, a blue rope, a red plate, a green book and a blue line. Which thing is";
const RUN: [&str; 7] = ["run", "--greedy", "--raw", "-m", "24", "-p", PROMPT];

#[test]
fn plan_reads_what_run_and_serve_recorded() {
    let cache = scratch();
    let trace = cache.path().join("run.trace");
    let flag = format!("--record-trace={}", trace.display());
    infernix(cache.path(), &[&RUN[..], &[&flag]].concat()).ok();
    let all = lines(&trace);
    assert_eq!((&all[0]["infernix_trace"], &all[0]["prefix_cache"]), (&json!(1), &json!(true)));
    for key in ["request", "end", "routing", "cache"] {
        assert!(all.iter().any(|l| !l[key].is_null()), "no {key} in the trace");
    }
    let text = std::fs::read_to_string(&trace).expect("a trace");
    assert!(!text.contains("colour"), "ids only");
    let planned = plan(cache.path(), &trace).ok().json();
    assert_eq!((&planned["traffic"], &planned["routing"]), (&"recorded".into(), &"recorded".into()));
    assert_eq!(planned["plans"][0]["requests"], 1);

    let trace = cache.path().join("serve.trace");
    let served = Served::new(cache.path(), &[&format!("--record-trace={}", trace.display())]);
    let body = json!({ "prompt": PROMPT, "max_tokens": 8, "temperature": 0 });
    for _ in 0..2 {
        served.post("/v1/completions", &body);
    }
    assert_eq!(served.terminate(), 0);
    assert_eq!(lines(&trace).iter().filter(|l| !l["end"].is_null()).count(), 2);
    let planned = plan(cache.path(), &trace).ok().json();
    assert_eq!(planned["plans"][0]["requests"], 2);
    assert!(
        planned["recorded_cached_tokens"].as_u64() > Some(0),
        "the second time from the cache: {planned}"
    );
}

/// `bench` measures without a prefix cache: its trace holds every request and all routing, and says that cache events are not to be
/// expected.
#[test]
fn plan_reads_what_bench_recorded_and_knows_that_there_was_no_cache() {
    let cache = scratch();
    let trace = cache.path().join("bench.trace");
    let flag = format!("--record-trace={}", trace.display());
    let tests = ["--no-limit", "-r", "2", "-p", "70", "-n", "5", "--concurrency", "2", "--json"];
    let measured = infernix(cache.path(), &[&["bench"][..], &tests, &[&flag]].concat()).ok().json();
    assert_eq!(measured["tests"].as_array().map(Vec::len), Some(2), "{measured}");
    let all = lines(&trace);
    assert_eq!((&all[0]["infernix_trace"], &all[0]["prefix_cache"]), (&json!(1), &json!(false)));
    let count = |key: &str| all.iter().filter(|l| !l[key].is_null()).count();
    // Two tests of two streams, each once to warm up and twice to count.
    assert_eq!((count("request"), count("end"), count("cache")), (12, 12, 0));
    assert!(count("routing") > 0);
    let planned = plan(cache.path(), &trace).ok().json();
    assert_eq!((&planned["traffic"], &planned["routing"]), (&"recorded".into(), &"recorded".into()));
    assert_eq!(
        (&planned["plans"][0]["requests"], &planned["recorded_cached_tokens"]),
        (&json!(12), &json!(null))
    );
    let said = ["plan", "--trace", trace.to_str().expect("text"), "--kv-capacity", "4096"];
    assert!(infernix(cache.path(), &said).ok().stdout.contains("recorded without a prefix cache"));

    let model = std::fs::read_dir(cache.path()).expect("a folder").map(|e| e.expect("an entry").path());
    let model = model.filter(|p| p.extension().is_some_and(|e| e == "infernix")).collect::<Vec<_>>();
    let whole = model[0].metadata().expect("a file").len();
    let over = format!("--record-trace={}", model[0].display());
    infernix(cache.path(), &[&["bench"][..], &tests, &[&over]].concat()).fails(2, &["the model's own files"]);
    assert_eq!(model[0].metadata().expect("a file").len(), whole);
}

#[test]
fn a_damaged_trace_is_an_error_with_its_line_and_a_torn_end_is_none() {
    let cache = scratch();
    let trace = cache.path().join("trace");
    infernix(cache.path(), &[&RUN[..], &[&format!("--record-trace={}", trace.display())]].concat()).ok();
    let good = std::fs::read_to_string(&trace).expect("a trace");
    std::fs::write(&trace, &good[..good.len() - 7]).expect("written");
    plan(cache.path(), &trace).ok();
    for (bad, words) in [
        (good.replacen("\"infernix_trace\":1", "\"infernix_trace\":9", 1), "version 9"),
        (good.replacen("\"prompt\":[", "\"prompt\":[-1,", 1), "line 2"),
        (format!("{}\n{{]\n{good}", good.lines().next().expect("a head")), "line 2"),
        (good.replacen("\"prompt\":[", "\"prompt\":[4294967295,", 1), "line 2"),
        (good.replacen("\"prompt\":[", &format!("\"prompt\":[{}", "7,".repeat(5000)), 1), "more KV pages"),
        ("no trace at all".to_owned(), "line 1"),
        (String::new(), "no requests"),
    ] {
        std::fs::write(&trace, &bad).expect("written");
        let run = plan(cache.path(), &trace);
        let code = run.code;
        assert!(code == 1 || code == 2, "{}", run.stderr);
        run.fails(code, &[words]);
    }
    plan(cache.path(), &cache.path().join("missing")).fails(1, &["missing", "cannot be opened"]);
}

#[test]
fn a_full_disk_and_a_damaged_cache_file_cost_the_file_and_not_the_answer() {
    let cache = scratch();
    let plain = infernix(cache.path(), &RUN).ok();
    if Path::new("/dev/full").exists() {
        let run = infernix(cache.path(), &[&RUN[..], &["--record-trace", "/dev/full"]].concat()).ok();
        assert_eq!(run.stdout, plain.stdout);
        assert!(run.stderr.contains("/dev/full is incomplete"), "{}", run.stderr);
    }
    let folder = cache.path().join("no/such/folder/file");
    let run = infernix(
        cache.path(),
        &[&RUN[..], &["--prefix-cache-file", folder.to_str().expect("text")]].concat(),
    )
    .ok();
    assert_eq!(run.stdout, plain.stdout);
    assert!(run.stderr.contains("no/such/folder"), "{}", run.stderr);

    // Long enough to leave a snapshot behind.
    let long = "The colours are red, green and blue. ".repeat(12);
    let file = cache.path().join("prefixes");
    let flags = ["run", "--raw", "--greedy", "-m", "8", "--json", "-p", &long, "--prefix-cache-file"];
    let ask = || infernix(cache.path(), &[&flags[..], &[file.to_str().expect("text")]].concat()).ok();
    let cold = ask();
    assert_eq!(cold.json()["cached_tokens"], 0);
    let good = std::fs::read(&file).expect("a cache file");
    let warm = ask();
    assert!(warm.json()["cached_tokens"].as_u64() > Some(64), "{}", warm.stdout);
    assert_eq!(warm.json()["ids"], cold.json()["ids"]);
    for damaged in [good[..good.len() / 2].to_vec(), vec![0; 100], Vec::new(), {
        let mut d = good.clone();
        d[good.len() / 3] ^= 4;
        d
    }] {
        std::fs::write(&file, damaged).expect("written");
        let run = ask();
        assert_eq!(run.json()["ids"], cold.json()["ids"]);
        assert_eq!(run.json()["cached_tokens"], 0);
        assert!(run.stderr.contains("ignored"), "{}", run.stderr);
        // It has been replaced by a good one.
        assert!(ask().json()["cached_tokens"].as_u64() > Some(64));
    }
}

#[test]
fn flags_that_cannot_hold_together_are_refused() {
    let cache = scratch();
    let same = cache.path().join("same").to_str().expect("text").to_owned();
    for (flags, words) in [
        (vec!["--spec", "off", "--draft-tokens", "3"], "--draft-tokens has no effect"),
        (vec!["--spec", "off", "--lm-head-draft"], "--lm-head-draft has no effect"),
        (vec!["--spec", "mtp", "--ngram-draft-tokens", "4"], "--ngram-draft-tokens has no effect"),
        (vec!["--lm-head-draft"], "--proposal"),
        (vec!["--draft-tokens", "8"], "0..=7"),
        (vec!["--ngram-draft-tokens", "32"], "0..=31"),
        (vec!["--no-prefix-cache", "--prefix-cache-file", &same], "cannot be used with"),
        (vec!["--record-trace", &same, "--prefix-cache-file", &same], "the same file"),
        (vec!["--max-concurrency", "9"], "1..=8"),
        (vec!["--prefill-chunk", "0"], "prefill-chunk"),
    ] {
        infernix(cache.path(), &[&RUN[..], &flags].concat()).fails(2, &[words]);
    }
    // What switches something off twice is no contradiction.
    infernix(cache.path(), &[&RUN[..], &["--spec", "off", "--draft-tokens", "0"]].concat()).ok();
}

#[test]
fn plan_works_without_a_trace_and_says_what_is_too_small() {
    let cache = scratch();
    let made_up = ["plan", "--json", "--sessions", "3", "--turns", "4", "--context", "20000", "--vram-mib"];
    let planned = infernix(cache.path(), &[&made_up[..], &["2048,4096"]].concat()).ok().json();
    let plans = planned["plans"].as_array().expect("plans");
    assert_eq!((plans.len(), &planned["traffic"]), (2, &"synthetic".into()));
    for p in plans {
        let tokens = |key: &str| p[key].as_u64().expect("a count");
        assert!(tokens("cached_tokens") <= tokens("cached_tokens_bound"), "{p}");
        assert!(tokens("cached_tokens_clairvoyant") <= tokens("cached_tokens_bound"), "{p}");
    }
    let needed = planned["needed"].as_array().expect("budgets");
    assert_eq!((needed.len(), &needed[0]["target_percent"]), (2, &serde_json::Value::Null));
    assert_eq!(needed[1]["target_percent"], 90);
    assert!(needed[1]["expert_hit_rate"].as_f64() >= Some(0.9), "{planned}");
    // What is named runs, and a MiB less of device memory than runs at all does not.
    let least = needed[0]["vram_mib"].as_u64().expect("MiB");
    let on = |vram: u64| infernix(cache.path(), &[&made_up[..], &[&vram.to_string()]].concat());
    on(least).ok();
    on(least - 1).fails(1, &["device memory"]);
    infernix(cache.path(), &["plan", "--target", "100"]).fails(2, &["--target"]);
    for (flag, values) in [
        ("--link", &["0", "1e-300", "1e300", "NaN"][..]),
        ("--bandwidth", &["1e-300", "1e-15"]),
        ("--handoff", &["1e308", "1e20", "-1"]),
        ("--prefill-rate", &["1e-18"]),
        ("--prefill-chunk", &["0"]),
        ("--kv-capacity", &["18446744073709551615"]),
        ("--prefix-cache-device-mib", &["18446744073709551615"]),
        ("--vram-mib", &["18446744073709551615"]),
        ("--ram-mib", &["17592186044416"]),
        ("--sessions", &["1000000000"]),
    ] {
        for value in values {
            let given = format!("{flag}={value}");
            infernix(cache.path(), &["plan", &given]).fails(2, &[flag]);
        }
    }
}

#[test]
fn a_trace_of_another_model_is_refused_or_said() {
    let cache = scratch();
    let trace = cache.path().join("trace");
    infernix(cache.path(), &[&RUN[..], &[&format!("--record-trace={}", trace.display())]].concat()).ok();
    let good = std::fs::read_to_string(&trace).expect("a trace");
    let head: Value = serde_json::from_str(good.lines().next().expect("a head")).expect("JSON");
    let changed = |key: &str, value: Value| {
        let mut head = head.clone();
        head[key] = value;
        std::fs::write(&trace, format!("{head}\n{}", good.split_once('\n').expect("more").1))
            .expect("written");
        plan(cache.path(), &trace)
    };
    changed("vocab", json!(1_000_000)).fails(1, &["a vocabulary of 1000000"]);
    changed("vocab", json!(2)).fails(1, &["line 2: prompt: token", "vocabulary of 2"]);
    let other = changed("model", json!("feedbeef")).ok();
    assert_eq!(other.json()["routing"], "synthetic");
    assert!(other.stderr.contains("another model (feedbeef)"), "{}", other.stderr);
    // Not said, as by older versions.
    let old = changed("model", Value::Null).ok();
    assert!(old.json()["routing"] == "recorded" && !old.stderr.contains("warning"), "{}", old.stderr);
}

/// The limit of a file's size ends a process by a signal, unless it is caught.
#[test]
fn a_limit_of_file_sizes_costs_the_file_and_not_the_answer() {
    let cache = scratch();
    let long = "The colours are red, green and blue. ".repeat(12);
    let flags = ["run", "--raw", "--greedy", "-m", "8", "-p", &long];
    let plain = infernix(cache.path(), &flags).ok();
    for (flag, words) in [("--record-trace", "incomplete"), ("--prefix-cache-file", "File too large")] {
        let file = cache.path().join(flag);
        let mut shell = std::process::Command::new("sh");
        let run = finish(
            shell
                .env("INFERNIX_CACHE", cache.path())
                .args(["-c", "ulimit -f 1; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_infernix")])
                .args([&flags[..1], &[demo().to_str().expect("text")], &flags[1..]].concat())
                .arg(flag)
                .arg(&file),
        )
        .ok();
        assert_eq!(run.stdout, plain.stdout);
        assert!(run.stderr.contains("warning") && run.stderr.contains(words), "{flag}: {}", run.stderr);
        assert!(!common::names(cache.path()).iter().any(|n| n.starts_with(".--")), "nothing half-written");
    }
}

#[test]
fn a_reports_device_stays_one_and_its_link_stays_a_link() {
    let cache = scratch();
    let at = |name: &str| cache.path().join(name);
    std::fs::create_dir(at("disk")).expect("a folder");
    std::fs::write(at("ids"), "[1, 2, 3]").expect("written");
    std::os::unix::fs::symlink("disk/new", at("link")).expect("a link");
    let tokens = at("ids").display().to_string();
    let logits = |to: &Path| {
        infernix(cache.path(), &["logits", "--tokens", &tokens, "-o", to.to_str().expect("text")])
    };
    logits(&at("link")).ok();
    assert!(at("link").symlink_metadata().expect("there").is_symlink() && at("disk/new").is_file());
    assert_eq!(common::names(&at("disk")), ["new"]);
}
