//! What those who run a server rely on: what the log tells, what is named, what is bounded.

use super::client::{Answer, Server, read, says};
use crate::options::{ApiKey, ServeOptions};
use infernix_engine::sched::{Finish, Request};
use serde_json::{Value, json};
use std::io::Write as _;
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// The lines of a request log.
fn lines(file: &std::path::Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).expect("a log");
    text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
}

fn logging(folder: &tempfile::TempDir) -> (ServeOptions, std::path::PathBuf) {
    let file = folder.path().join("log.jsonl");
    let log = crate::LogOptions { file: Some(file.clone()), max_bytes: None, keep: 4 };
    (ServeOptions { log, drain_timeout: Duration::from_millis(50), ..ServeOptions::default() }, file)
}

fn ok(r: &Request) -> Result<Vec<infernix_engine::sched::Event>, infernix_engine::sched::SubmitError> {
    Ok(says(r, "ok", 1, Finish::Stop(0)))
}

#[test]
fn an_answer_that_failed_is_logged_with_what_it_cost() {
    let folder = tempfile::tempdir().expect("a folder");
    let (options, file) = logging(&folder);
    // The answer never ends.
    let mut server = Server::new(options, |r| {
        let mut events = says(r, "some text to begin with", 1, Finish::Stop(0));
        events.pop();
        Ok(events)
    });
    let body = json!({"messages": user("x"), "stream": true}).to_string();
    let mut connection = server.connect();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        server.address,
        body.len()
    );
    connection.write_all(format!("{head}{body}").as_bytes()).expect("sent");
    let deadline = Instant::now() + Duration::from_secs(60);
    while server.engine.open_requests().is_empty() {
        assert!(Instant::now() < deadline, "never asked");
        std::thread::sleep(Duration::from_millis(5));
    }
    server.stop();
    let answer = read(&mut connection);
    assert!(answer.body.contains("service_unavailable"), "{}", answer.body);
    server.join();
    let lines = lines(&file);
    let failed = lines.iter().find(|l| l["event"] == "request_error").expect("a line");
    assert_eq!(failed["outcome"], "failed");
    let count = |name: &str| failed[name].as_u64().expect("a count");
    let asked = count("prompt");
    assert!(asked > 4 && count("output_tokens") > 4, "{failed}");
    assert_eq!((count("prompt_tokens"), count("cached_tokens")), (asked, asked / 2));
}

#[test]
fn a_batch_and_a_decision_are_logged_with_the_sums_of_their_prompts() {
    let folder = tempfile::tempdir().expect("a folder");
    let (options, file) = logging(&folder);
    let mut server = Server::new(options, ok);
    let body = json!({"prompt": [[1, 2, 3, 4], [5, 6]], "n": 2, "max_tokens": 5});
    let batch = server.post("/v1/completions", &body);
    assert_eq!(batch.header("x-infernix-cache"), Some("hit=3/6; prompts=2/2"));
    let questions =
        json!({"a": {"type": "noul", "instructions": "x"}, "b": {"type": "noul", "instructions": "y"}});
    let decided = server.post("/v1/decide", &json!({"state": "s", "questions": questions})).json();
    server.join();
    let lines = lines(&file);
    let done: Vec<&Value> = lines.iter().filter(|l| l["event"] == "request_done").collect();
    let usage = &batch.json()["usage"];
    assert_eq!((&done[0]["prompt_tokens"], &done[0]["cached_tokens"]), (&json!(6), &json!(3)));
    assert_eq!(done[0]["output_tokens"], usage["completion_tokens"]);
    assert_eq!(done[1]["prompt_tokens"], decided["usage"]["input_tokens"]);
}

#[test]
fn no_words_of_a_client_get_into_the_log_through_names_and_places() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut options, file) = logging(&folder);
    options.keys = vec![ApiKey { name: "ann".into(), key: "secret-ann".into() }];
    let mut server = Server::new(options, ok);
    let trace = "SECRET words where a trace belongs, as long as one would be";
    let headers = [
        ("content-type", "application/json"),
        ("authorization", "Bearer secret-ann"),
        ("traceparent", trace),
    ];
    let post = |path: &str, body: &Value| -> Answer {
        server.request("POST", path, &headers, body.to_string().as_bytes())
    };
    let chat = |name: &str, value: Value| {
        let mut body = json!({"messages": user("x")});
        body[name] = value;
        post(CHAT, &body)
    };
    let many: serde_json::Map<String, Value> = (0..20_000)
        .map(|i| (format!("field{i}"), json!(1)))
        .chain([("messages".into(), user("x"))])
        .collect();
    for (answer, status) in [
        (chat("SECRET field 4711", json!(1)), 200),
        (chat("tools", json!([{"type": "SECRET tool"}])), 200),
        (chat("logit_bias", json!({"SECRET John Doe": 1})), 400),
        (chat("model", json!("SECRET model")), 404),
        (post("/v1/responses", &json!({"input": "x", "SECRET parameter": 1})), 400),
        (
            post("/v1/decide", &json!({"state": "s", "questions": {"SECRET. Is he ill?": {"type": "zz"}}})),
            400,
        ),
        (post(CHAT, &Value::Object(many)), 200),
    ] {
        assert_eq!(answer.status, status, "{}", answer.body);
    }
    // A name of 3 MB is quoted in part only.
    let long = "SECRET ".repeat(400_000);
    let answer = post("/v1/decide", &json!({"state": "s", "questions": {long: {"type": "zz"}}}));
    assert!(answer.status == 400 && answer.body.len() < 2000, "{}", answer.body.len());
    server.join();
    let text = std::fs::read_to_string(&file).expect("a log");
    assert!(!text.contains("SECRET") && text.len() < 20_000, "{text}");
    let params: Vec<Value> = lines(&file)
        .iter()
        .filter(|l| l["event"] == "request_rejected")
        .map(|l| l["param"].clone())
        .collect();
    assert_eq!(
        params,
        ["logit_bias.*", "model", "*", "questions.*.instructions", "questions.*.instructions"]
    );
    assert!(text.contains("\"ignored_others\":19984"));
}

#[test]
fn a_head_beyond_64_kib_is_refused() {
    let server = Server::saying("ok");
    let with = |bytes: usize| {
        let value = "y".repeat(bytes);
        server.request("GET", "/v1/models", &[("x-long", value.as_str())], b"").status
    };
    assert_eq!((with(60_000), with(70_000), with(100_000)), (200, 431, 431));
    let path = format!("/v1/models?{}", "y".repeat(70_000));
    assert!(matches!(server.get(&path).status, 414 | 431));
}

#[test]
fn a_host_that_is_named_twice_or_in_the_target_cannot_lead_around_the_check() {
    let server = Server::saying("ok");
    let own = server.address.to_string();
    let get = |target: &str, hosts: &[&str]| {
        let hosts: String = hosts.iter().map(|h| format!("host: {h}\r\n")).collect();
        server.raw(format!("GET {target} HTTP/1.1\r\n{hosts}connection: close\r\n\r\n").as_bytes()).status
    };
    assert_eq!(get("/v1/models", &[&own]), 200);
    assert_eq!(get(&format!("http://{own}/v1/models"), &[&own]), 200);
    assert_eq!(get("http://evil.example/v1/models", &[&own]), 403);
    assert_eq!(get("/v1/models", &[&own, "evil.example"]), 400);
}

#[test]
fn what_is_ignored_is_named_wherever_it_is_ignored() {
    let server = Server::saying("ok");
    let messages = user("x");
    for (path, body, named) in [
        (
            CHAT,
            json!({"messages": messages, "stream": true, "stream_options": {"continuous_usage_stats": true}}),
            Some("stream_options.continuous_usage_stats"),
        ),
        (
            CHAT,
            json!({"messages": messages, "stream": true,
            "stream_options": {"continuous_usage_stats": false, "include_obfuscation": false}}),
            None,
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": messages, "mcp_servers": [], "container": "c"}),
            Some("container, mcp_servers"),
        ),
        ("/v1/messages/count_tokens", json!({"messages": messages, "colour": 1}), Some("colour")),
        (
            "/v1/decide",
            json!({"state": "s", "stream": true, "temperature": 1, "cache_salt": "a",
            "questions": {"a": {"type": "noul", "instructions": "x"}}}),
            Some("stream, temperature"),
        ),
        (
            "/tokenize",
            json!({"messages": messages, "add_generation_prompt": false}),
            Some("add_generation_prompt"),
        ),
        ("/tokenize", json!({"prompt": "x", "add_special_tokens": false}), None),
        ("/detokenize", json!({"tokens": [1], "colour": 1}), Some("colour")),
    ] {
        let answer = server.post(path, &body);
        assert_eq!((answer.status, answer.header("x-infernix-ignored")), (200, named), "{path}");
    }
}

#[test]
fn a_refusal_of_a_prefill_speaks_the_words_of_its_protocol() {
    let server = Server::saying("ok");
    let turns = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once"}]);
    for (path, body, param, words) in [
        (CHAT, json!({"messages": turns}), "messages[1]", "enable_thinking: false"),
        ("/v1/responses", json!({"instructions": "y", "input": turns}), "input", "reasoning.effort: none"),
        (
            "/v1/responses/input_tokens",
            json!({"instructions": "y", "input": turns}),
            "input",
            "reasoning.effort: none",
        ),
    ] {
        let error = server.post(path, &body).json()["error"].clone();
        assert_eq!(error["param"], param, "{error}");
        let message = error["message"].as_str().expect("words");
        assert!(message.starts_with(&format!("{param}: ")) && message.contains(words), "{message}");
    }
    let thinking = json!({"type": "enabled", "budget_tokens": 1024});
    let body = json!({"max_tokens": 2000, "system": "y", "messages": turns, "thinking": thinking});
    let told = server.post("/v1/messages", &body).json()["error"]["message"].to_string();
    assert!(told.contains("messages: the last") && told.contains("thinking.type: disabled"), "{told}");
}

#[test]
fn an_answer_to_a_prefill_is_one_turn_with_it_in_what_follows() {
    let server = Server::saying(" upon a time");
    let off = json!({"effort": "none"});
    let turns = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once"}]);
    let first = server.post("/v1/responses", &json!({"input": turns, "reasoning": off})).json();
    let count = |body: &Value| server.post("/v1/responses/input_tokens", body).json()["input_tokens"].clone();
    let whole = json!([
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "Once upon a time"},
        {"role": "user", "content": "more"},
    ]);
    let next = json!({"input": "more", "previous_response_id": first["id"], "reasoning": off});
    assert_eq!(count(&next), count(&json!({"input": whole, "reasoning": off})));
}

#[test]
fn a_demanded_call_that_was_cut_is_no_content() {
    let server = Server::new(ServeOptions::default(), |r| {
        Ok(says(r, "<tool_call>\n<function=f>\n<parameter=a>\nsome value that goes on", 1, Finish::Length))
    });
    let tool = json!({"type": "function", "function": {"name": "f", "parameters":
        {"type": "object", "properties": {"a": {"type": "string"}}}}});
    let body =
        json!({"messages": user("x"), "tools": [tool], "tool_choice": "required", "enable_thinking": false});
    let choice = server.post(CHAT, &body).json()["choices"][0].clone();
    assert_eq!(choice["constraint"], json!({"branch": "tools", "complete": false}), "{choice}");
}
