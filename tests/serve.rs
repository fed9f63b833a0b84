//! `infernix serve` with the bundled model, as a user starts it.

mod common;

use common::{Served, demo, finish, infernix, program, scratch};
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

#[test]
fn the_server_answers_as_the_command_does_and_stops_when_told() {
    let cache = scratch();
    let log = cache.path().join("log.jsonl");
    let log_flag = format!("--request-log-jsonl={}", log.display());
    let served = Served::new(cache.path(), &["--max-concurrency", "2", &log_flag]);
    for words in ["weights", "--prefix-cache-mib", "together, at most", "coding agents want"] {
        assert!(served.said.contains(words), "{words} in {}", served.said);
    }
    // Long enough for the prefix cache, which keeps blocks of 64 tokens.
    let question = format!("{}Name one colour.", "The colours are red, green and blue. ".repeat(14));
    let question = question.as_str();
    let run = finish(
        program()
            .env("INFERNIX_CACHE", cache.path())
            .args(["run", "--json", "--greedy", "--no-thinking", "-m", "24", "-p", question])
            .arg(demo()),
    )
    .ok()
    .json();
    let asked = json!({
        "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24,
        "presence_penalty": 0, "enable_thinking": false,
    });
    // The second time the prompt comes out of the cache: the same is said.
    for round in 0..2 {
        let answer = served.post("/v1/chat/completions", &asked);
        assert_eq!(answer["choices"][0]["message"]["content"], run["content"]);
        assert_eq!(
            answer["usage"]["completion_tokens"].as_u64(),
            run["ids"].as_array().map(|i| i.len() as u64)
        );
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(cached > Some(0), round > 0, "{answer}");
    }
    let scored = served.post(
        "/v1/completions",
        &json!({"prompt": "The sky is blue.", "echo": true, "logprobs": 1, "max_tokens": 0}),
    );
    let scores = scored["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("scores").clone();
    assert!(scores.len() > 2 && scores[0].is_null() && scores[1..].iter().all(|s| s.as_f64() <= Some(0.0)));
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let held = served.post(
        "/v1/chat/completions",
        &json!({
            "messages": [{"role": "user", "content": "JSON"}], "enable_thinking": false, "max_tokens": 64, "seed": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        }),
    );
    let content = held["choices"][0]["message"]["content"].as_str().expect("content");
    let value: Value = serde_json::from_str(content).expect("JSON by force");
    assert!(value["a"].is_i64() || value["a"].is_u64());
    let (status, long) = served.send(
        "POST",
        "/v1/messages",
        "",
        &json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "word ".repeat(9000)}]}).to_string(),
    );
    assert!(status == 400 && long.contains("prompt is too long: "), "{long}");
    let (status, metrics) = served.send("GET", "/metrics", "", "");
    assert!(status == 200 && metrics.contains("infernix_requests_total{route=\"chat\",outcome=\"done\"} 3"));
    assert_eq!(served.terminate(), 0);
    let log = std::fs::read_to_string(log).expect("a log");
    assert!(log.lines().last().is_some_and(|l| l.contains("server_stop")), "{log}");
    assert!(!log.contains("colour"));
}

#[test]
fn keys_come_from_a_file_and_are_needed_beyond_this_machine() {
    let folder = scratch();
    infernix(["serve", "--host", "0.0.0.0", "--port", "0"]).fails(2, &["--allow-no-auth", "--api-key-file"]);
    infernix(["serve", "--max-context", "999999999", "--port", "0"]).fails(2, &["--max-context"]);
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "# keys\nann k-1\nk-2\n").expect("written");
    let config = folder.path().join("serve.toml");
    std::fs::write(
        &config,
        format!("api-key-file = {:?}\nmodel-id = \"house\"\n", keys.display().to_string()),
    )
    .expect("written");
    let served = Served::new(folder.path(), &["--config", config.to_str().expect("UTF-8")]);
    assert!(served.said.contains("can be read by other users"), "{}", served.said);
    assert_eq!(served.send("GET", "/v1/models", "", "").0, 401);
    let (status, models) = served.send("GET", "/v1/models", "authorization: Bearer k-2\r\n", "");
    assert!(status == 200 && models.contains("\"id\":\"house\""), "{models}");
    std::fs::write(&config, "colour = 1\n").expect("written");
    infernix(["serve", "--config", config.to_str().expect("UTF-8")]).fails(2, &["colour", "serve.toml"]);
}

#[test]
fn a_server_stopped_in_a_stream_says_so_saves_its_cache_and_the_next_one_finds_it() {
    let cache = scratch();
    let file = format!("--prefix-cache-file={}", cache.path().join("prefixes").display());
    let args = [file.as_str(), "--drain-timeout-ms=100", "--admin=127.0.0.1:0"];
    let served = Served::new(cache.path(), &args);
    let prompt = "The colours are red, green and blue. ".repeat(30);
    let asked = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0});
    let cached = |served: &Served| {
        served.post("/v1/completions", &asked)["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .expect("a count")
    };
    assert_eq!(cached(&served), 0);
    let admin =
        served.said.split("admin: http://").nth(1).expect("its address").lines().next().expect("a line");
    let mut stream = TcpStream::connect(admin).expect("connects");
    stream
        .write_all(format!("GET /metrics HTTP/1.1\r\nhost: {admin}\r\nconnection: close\r\n\r\n").as_bytes())
        .expect("sent");
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).expect("an answer");
    assert!(metrics.contains("infernix_engine_ready 1"), "{metrics}");

    let long =
        json!({"prompt": "On and on.", "max_tokens": 30_000, "ignore_eos": true, "stream": true}).to_string();
    let mut stream = TcpStream::connect(&served.address).expect("connects");
    stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        served.address,
        long.len()
    );
    stream.write_all(format!("{head}{long}").as_bytes()).expect("sent");
    let mut first = [0; 1024];
    assert!(stream.read(&mut first).expect("an answer") > 0);
    assert!(first.starts_with(b"HTTP/1.1 200"));
    assert_eq!(served.terminate(), 0);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("its end");
    assert!(rest.contains("\"service_unavailable\"") && !rest.contains("[DONE]"), "{rest}");

    let served = Served::new(cache.path(), &args);
    assert!(cached(&served) > 0, "what the first one had read");
    assert_eq!(served.terminate(), 0);
}

#[test]
fn what_is_wrong_is_said_before_a_model_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    infernix(["serve", "--port", &port]).fails(1, &[&port, "--port 0"]);
    infernix(["serve", "--port", "0", "--admin", &format!("127.0.0.1:{port}")]).fails(1, &["--admin", &port]);
    infernix(["serve", "--port", "0", "--admin", "9090"]).fails(2, &["--admin", "127.0.0.1:9090"]);
    infernix(["serve", "--port", "0", "--admin", "0.0.0.0:0"]).fails(2, &["--allow-no-auth"]);
    infernix(["serve", "--port", "0", "--log-level", "loud"])
        .fails(2, &["--log-level", "\"loud\"", "NAME=LEVEL"]);
    infernix(["serve", "--port", "0", "--prefix-cache-file", "/no/such/folder/x"])
        .fails(2, &["--prefix-cache-file"]);
    infernix(["serve", "--port", "0", "--request-log-jsonl", "/no/such/folder/x"])
        .fails(2, &["--request-log-jsonl"]);
    for device in ["/dev/null", "/dev/zero"] {
        infernix(["serve", "--port", "0", "--prefix-cache-file", device])
            .fails(2, &["--prefix-cache-file", "no regular file"]);
        assert!(!std::path::Path::new(device).metadata().expect("there").is_file());
    }
    infernix(["serve", "--port", "0", "--no-prefix-cache", "--prefix-cache-file", "x"])
        .fails(2, &["--no-prefix-cache"]);
    infernix(["serve", "--port", "0", "--max-concurrency", "1000000"]).fails(2, &["1..=8"]);
    infernix(["serve", "--port", "0", "/no/such/model"]).fails(1, &["/no/such/model"]);
    let folder = scratch();
    let config = folder.path().join("serve.toml");
    for (text, words) in [
        ("lossless = true\nbackend = \"cuda\"\n", "--lossless"),
        ("[http]\nport = 1\n", "http"),
        ("port = 1\nport = 2\n", "port"),
        ("max-request-mib = 100\nmax-requests-mib = 1\n", "--max-requests-mib"),
        ("request-log-keep = 2\nrequest-log-max-mib = 3\n", "--request-log-jsonl"),
        ("port = \"eighty\"\n", "eighty"),
    ] {
        std::fs::write(&config, text).expect("written");
        infernix(["serve", "--config", config.to_str().expect("UTF-8"), "--port", "0"]).fails(2, &[words]);
    }
}

#[test]
fn the_ledger_counts_the_drafters_keys_and_values_and_what_cannot_be_is_refused_by_name() {
    let cache = scratch();
    for spec in ["--spec=off", "--spec=auto", "--draft-tokens=0"] {
        let trace = cache.path().join("trace");
        let served = Served::new(
            cache.path(),
            &[spec, "--kv-capacity=200000", &format!("--record-trace={}", trace.display())],
        );
        let row = served.said.lines().find(|l| l.contains("keys and values")).expect("a row").to_owned();
        assert_eq!(served.terminate(), 0);
        let text = std::fs::read_to_string(&trace).expect("a trace");
        let head: serde_json::Value =
            serde_json::from_str(text.lines().next().expect("a head")).expect("JSON");
        let bytes = |key: &str| head[key].as_f64().expect("a number");
        let mib = format!("{:.2} MiB", bytes("pages") * bytes("page_bytes") / f64::from(1 << 20));
        assert!(row.contains(&mib), "{spec}: {mib} in {row}");
    }
    let refused = |flags: &[&str], code, words: &[&str]| {
        let mut command = common::program();
        command.env("INFERNIX_CACHE", cache.path()).args(["serve", "--port", "0"]).args(flags);
        common::finish(command.arg(common::demo())).fails(code, words);
    };
    let most = u64::MAX.to_string();
    for flag in [
        "--kv-capacity",
        "--prefix-cache-mib",
        "--prefix-cache-device-mib",
        "--prefix-cache-file-mib",
        "--response-store-mib",
        "--vram-budget-mib",
    ] {
        refused(&[flag, &most], 2, &[flag]);
    }
    refused(&["--kv-capacity=4000000000"], 1, &["--kv-capacity", "cannot hold them"]);
}
