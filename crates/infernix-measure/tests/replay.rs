//! Replays and load against a server that plays a script, and one that misbehaves.

use infernix_measure::bench::machine::Machine;
use infernix_measure::client::{Endpoint, Failure};
use infernix_measure::load::{self, Calibration, Dataset, Load, Rate, Summary};
use infernix_measure::replay::{
    Corpus, PlanOptions, Played, Report, Run, RunOptions, agentic, page, plan::Class, play,
};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What goes wrong, from the n-th request on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    Status,
    Stall,
    Drop,
    Usage,
    Order,
    /// A whole answer with nothing in it.
    Empty,
    /// A first piece, and then one after the other without an end.
    Endless,
}

struct Fake {
    url: String,
    bodies: Arc<Mutex<Vec<Value>>>,
    stop: Arc<AtomicBool>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.url.trim_start_matches("http://"));
    }
}

/// Answers with two pieces and a tool call; its cache knows every message list that a request begins with.
fn fake(fault: Fault, from: usize) -> Fake {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let bodies: Arc<Mutex<Vec<Value>>> = Arc::default();
    let stop = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let (kept, stopped) = (Arc::clone(&bodies), Arc::clone(&stop));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if stopped.load(Ordering::Relaxed) {
                return;
            }
            let (kept, served) = (Arc::clone(&kept), Arc::clone(&served));
            std::thread::spawn(move || drop(answer(stream, &kept, &served, fault, from)));
        }
    });
    Fake { url, bodies, stop }
}

fn answer(
    mut stream: TcpStream,
    bodies: &Mutex<Vec<Value>>,
    served: &AtomicUsize,
    fault: Fault,
    from: usize,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut head = String::new();
    reader.read_line(&mut head)?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        if let Some(n) = line.to_lowercase().strip_prefix("content-length:") {
            length = n.trim().parse().unwrap();
        }
    }
    if head.starts_with("GET /v1/models") {
        let body = json!({ "data": [{ "id": "fake", "max_model_len": 4096 }] }).to_string();
        return write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    }
    if !head.starts_with("POST") {
        return write!(stream, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let body: Value = serde_json::from_slice(&body).unwrap();
    let n = served.fetch_add(1, Ordering::Relaxed);
    let text = |b: &Value| {
        b["messages"]
            .as_array()
            .map_or_else(String::new, |m| m.iter().map(ToString::to_string).collect::<Vec<_>>().join("\u{1}"))
    };
    let own = text(&body);
    let completion = body["max_tokens"].as_u64().map_or(9, |most| most.min(9));
    let cached = {
        let mut bodies = bodies.lock().unwrap();
        let common = |other: &Value| text(other).bytes().zip(own.bytes()).take_while(|(a, b)| a == b).count();
        let cached = bodies.iter().map(common).max().unwrap_or(0);
        bodies.push(body);
        cached
    };
    let fault = if n >= from { fault } else { Fault::None };
    if fault == Fault::Status || head.contains("/elsewhere/") {
        return write!(stream, "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\noops");
    }
    write!(stream, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")?;
    let prompt = (own.len() / 4).max(1);
    let mut send = |v: Value| write!(stream, "data: {v}\n\n").and_then(|()| stream.flush());
    let delta = |d: Value| json!({ "id": n.to_string(), "choices": [{ "index": 0, "delta": d }] });
    if fault == Fault::Empty {
        send(json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] }))?;
        send(json!({ "choices": [], "usage": { "prompt_tokens": prompt, "completion_tokens": 0 } }))?;
        return write!(stream, "data: [DONE]\n\n");
    }
    send(delta(json!({ "content": "Looking" })))?;
    if fault == Fault::Endless {
        loop {
            send(delta(json!({ "content": " on" })))?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    match fault {
        Fault::Stall => std::thread::sleep(Duration::from_secs(3)),
        Fault::Drop => return Ok(()),
        Fault::Order => send(json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] }))?,
        _ => {}
    }
    send(delta(json!({ "content": " now." })))?;
    let call =
        json!({ "index": 0, "id": format!("c{n}"), "function": { "name": "read_file", "arguments": "{}" } });
    send(delta(json!({ "tool_calls": [call] })))?;
    send(json!({ "choices": [{ "delta": {}, "finish_reason": "tool_calls" }] }))?;
    let cached = if fault == Fault::Usage { prompt + 1 } else { cached / 4 };
    send(json!({
        "choices": [],
        "usage": { "prompt_tokens": prompt, "completion_tokens": completion,
                   "prompt_tokens_details": { "cached_tokens": cached } },
        "timings": { "draft_n": 8, "draft_n_accepted": 4 },
    }))?;
    write!(stream, "data: [DONE]\n\n")
}

fn run(server: &Fake, scale: f64, seed: u64) -> (Run, Endpoint, infernix_measure::replay::Plan) {
    let mut plan = agentic(&Corpus::embedded().unwrap(), PlanOptions { seed, scale, context: 4096 });
    // The scripted seconds of tools and users are no part of these tests.
    for op in plan.actors.iter_mut().flat_map(|a| &mut a.ops) {
        use infernix_measure::replay::plan::Op;
        match op {
            Op::Request(t) => t.delay = 0.0,
            Op::Retry { delay, .. } => *delay = 0.0,
            _ => {}
        }
    }
    let endpoint = Endpoint::connect(&server.url, None, None).unwrap();
    let interrupted = AtomicBool::new(false);
    let options = RunOptions {
        timeout: Duration::from_secs(1),
        interrupted: &interrupted,
        omit: &[],
        progress: &|_| {},
    };
    let run = play(&plan, &endpoint, options);
    (run, endpoint, plan)
}

fn played(run: Run, arm: &str) -> Played {
    Played {
        arm: arm.into(),
        model: "fake".into(),
        seed: 42,
        run,
        peak_ram_mib: None,
        peak_vram_mib: None,
        peak_sm_mhz: None,
        exceeded: None,
    }
}

#[test]
fn a_replay_sends_every_planned_request_and_is_valid() {
    let server = fake(Fault::None, 0);
    let (run, endpoint, plan) = run(&server, 0.5, 42);
    assert_eq!(endpoint.context_limit(), Some(4096));
    assert_eq!(run.rows.len(), 68);
    let continuing = run.rows.iter().filter(|r| r.class.continuing()).count();
    assert_eq!(continuing, 41 + 10);
    let report = Report {
        command: "replay".into(),
        plans: vec![plan],
        played: vec![played(run, "a")],
        omitted: Vec::new(),
        machine: Machine::default(),
    };
    let doc = report.to_json();
    assert_eq!(doc["valid"], json!(true), "{}", doc["invalid_reasons"]);
    assert_eq!(doc["arms"][0]["requests"], json!(68));
    assert!(doc["arms"][0]["metrics"]["cache_share_pct"]["mean"].as_f64().unwrap() > 50.0);
    assert_eq!(doc["arms"][0]["metrics"]["tokens_per_round"]["mean"], json!(8.0 / 4.0));
    let table = report.to_markdown();
    for part in ["| Mean TTFT |", "| Engine | Model |", "\nSingle runs, 95 % intervals", "\n| a, seed 42 | "]
    {
        assert!(table.contains(part), "{part} is not in\n{table}");
    }
    let html = page::html(&report);
    assert!(
        html.contains("<td>a, seed 42</td>")
            && html.contains("<svg")
            && html.contains("Timeline: a, seed 42")
            && !html.contains("<script")
    );
}

/// Everything the client decides is in the plan: two servers that answer alike get the same requests, session by
/// session, byte by byte.
#[test]
fn equal_answers_get_equal_requests() {
    let of = |server: &Fake| {
        let _ = run(server, 0.3, 42);
        let mut bodies: Vec<String> = server
            .bodies
            .lock()
            .unwrap()
            .iter()
            .map(|b| {
                // Call ids are the server's own.
                let mut text = b.to_string();
                for i in (0..99).rev() {
                    text = text.replace(&format!("\"c{i}\""), "\"c\"");
                }
                text
            })
            .collect();
        bodies.sort();
        bodies
    };
    assert_eq!(of(&fake(Fault::None, 0)), of(&fake(Fault::None, 0)));
}

#[test]
fn sessions_in_lock_step_send_once_a_round() {
    let server = fake(Fault::None, 0);
    let (run, ..) = run(&server, 0.5, 42);
    let mut rows: Vec<_> = run.rows.iter().collect();
    rows.sort_by(|a, b| a.sent.total_cmp(&b.sent));
    let first: Vec<&str> =
        rows.iter().filter(|r| r.class == Class::ColdResume).map(|r| r.actor.as_str()).collect();
    assert_eq!(first, ["A", "B", "C"], "sessions resume one after another");
}

#[test]
fn a_run_with_any_fault_is_invalid_and_says_which() {
    for (fault, message) in [
        (Fault::Status, "status 500"),
        (Fault::Stall, "timed out"),
        (Fault::Drop, "without a finish reason"),
        (Fault::Usage, "cached of"),
        (Fault::Order, "after the finish reason"),
    ] {
        let server = fake(fault, 7);
        let (run, _, plan) = run(&server, 0.3, 42);
        let report = Report {
            command: String::new(),
            plans: vec![plan],
            played: vec![played(run, "a")],
            omitted: Vec::new(),
            machine: Machine::default(),
        };
        let invalid = report.invalid().join(" ");
        assert!(invalid.contains(message), "{fault:?}: {invalid:?} does not say {message:?}");
        assert_eq!(report.to_json()["valid"], json!(false));
    }
}

#[test]
fn load_reports_what_was_sent_and_answered() {
    let server = fake(Fault::None, 0);
    let endpoint = Endpoint::connect(&format!("{}/v1/", server.url), Some("k".into()), None).unwrap();
    let path = "/v1/chat/completions";
    let calibration =
        Calibration::measure(&endpoint, path, 1, Duration::from_secs(5), &AtomicBool::new(false)).unwrap();
    let dataset = Dataset::Random { input: 200, output: 9, spread: 0.0 };
    let items = dataset.items(12, calibration, 1).unwrap();
    let load = Load {
        path: path.into(),
        requests: 12,
        rate: Rate::Constant(200.0),
        burstiness: 1.0,
        concurrency: Some(3),
        warm_up: 1,
        seed: 1,
        extra: json!({ "ignore_eos": true }),
        timeout: Duration::from_secs(5),
    };
    let go_on = AtomicBool::new(false);
    let done = load::run(&endpoint, &load, &items, &go_on, &|_| {}).unwrap();
    let s = Summary::of(&done, &[], &[99.0]);
    assert_eq!((s.completed, s.failed(), s.output_tokens), (12, 0, 108));
    assert!(s.peak_requests <= 3);
    // Calibrated prompts have about the length asked for by the server's count, which here goes by characters.
    assert!(done.iter().all(|x| x.answer.usage.unwrap().prompt.abs_diff(200) <= 30));
    assert!(server.bodies.lock().unwrap().iter().skip(2).all(|b| b["ignore_eos"] == json!(true)));
}

#[test]
fn load_counts_failures_by_their_cause() {
    let server = fake(Fault::Status, 4);
    let endpoint = Endpoint::connect(&server.url, None, Some("m".into())).unwrap();
    let (load, items) = load_of(6);
    let load = Load { path: "/v1/completions".into(), timeout: Duration::from_secs(5), ..load };
    let done = load::run(&endpoint, &load, &items, &AtomicBool::new(false), &|_| {}).unwrap();
    let s = Summary::of(&done, &[], &[99.0]);
    assert_eq!((s.completed, s.failed(), s.failures.len()), (4, 2, 1));
    assert!(matches!(done[5].failure, Some(Failure::Status(500, _))));
}

fn load_of(requests: usize) -> (Load, Vec<load::Item>) {
    let calibration = Calibration { overhead: 0.0, per_word: 1.0 };
    let load = Load {
        path: "/v1/chat/completions".into(),
        requests,
        rate: Rate::Unlimited,
        burstiness: 1.0,
        concurrency: Some(1),
        warm_up: 0,
        seed: 1,
        extra: json!({}),
        timeout: Duration::from_secs(60),
    };
    (load, Dataset::Random { input: 20, output: 4, spread: 0.0 }.items(requests, calibration, 1).unwrap())
}

#[test]
fn an_answer_without_text_is_a_failed_request_of_a_load() {
    let server = fake(Fault::Empty, 2);
    let endpoint = Endpoint::connect(&server.url, None, None).unwrap();
    let (load, items) = load_of(4);
    let done = load::run(&endpoint, &load, &items, &AtomicBool::new(false), &|_| {}).unwrap();
    let s = Summary::of(&done, &[], &[99.0]);
    assert_eq!((s.completed, s.failed()), (2, 2));
    assert!(s.failures[0].0.contains("without text"), "{:?}", s.failures);
}

/// Runs something that is interrupted when the server has got so many requests.
fn interrupted_at<T>(server: &Fake, requests: usize, run: impl FnOnce(&AtomicBool) -> T) -> T {
    let (interrupted, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while server.bodies.lock().unwrap().len() < requests && !ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
            interrupted.store(true, Ordering::Relaxed);
        });
        let result = run(&interrupted);
        ended.store(true, Ordering::Relaxed);
        result
    })
}

#[test]
fn an_interrupted_load_keeps_what_was_done_and_waits_for_nothing() {
    for fault in [Fault::Stall, Fault::Endless] {
        // The third request never ends.
        let server = fake(fault, 2);
        let endpoint = Endpoint::connect(&server.url, None, None).unwrap();
        let (load, items) = load_of(5);
        let done = interrupted_at(&server, 3, |stop| load::run(&endpoint, &load, &items, stop, &|_| {}));
        let done = done.unwrap();
        assert_eq!(done.len(), 2, "{fault:?}");
        assert!(done.iter().all(|x| x.failure.is_none()));
    }
}

#[test]
fn probes_keep_the_time_limit_and_heed_an_interruption() {
    let server = fake(Fault::Endless, 0);
    let endpoint = Endpoint::connect(&server.url, None, None).unwrap();
    // It accepts, since the system does, and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    let silent = Endpoint::connect(&silent, None, Some("m".into())).unwrap();
    for endpoint in [&endpoint, &silent] {
        let measure = |limit: Duration, stop: bool| {
            let path = "/v1/chat/completions";
            let e = Calibration::measure(endpoint, path, 1, limit, &AtomicBool::new(stop)).unwrap_err();
            e.to_string()
        };
        let limited = measure(Duration::from_millis(300), false);
        assert!(limited.contains("the probe request failed"), "{limited}");
        let stopped = measure(Duration::from_secs(600), true);
        assert!(stopped == "interrupted" || stopped.contains("refused"), "{stopped}");
    }
}

#[test]
fn an_interrupted_replay_does_not_wait_for_an_answer() {
    // The priming request is answered, the first turn never ends.
    let server = fake(Fault::Endless, 1);
    let plan = agentic(&Corpus::embedded().unwrap(), PlanOptions { seed: 42, scale: 0.3, context: 4096 });
    let endpoint = Endpoint::connect(&server.url, None, None).unwrap();
    let run = interrupted_at(&server, 2, |interrupted| {
        let timeout = Duration::from_secs(600);
        play(&plan, &endpoint, RunOptions { timeout, interrupted, omit: &[], progress: &|_| {} })
    });
    assert_eq!((run.ended.as_deref(), run.rows.len()), (Some("interrupted"), 0));
}

/// What passes the recorder is recorded and can be played again against the same server.
#[test]
fn recorded_traffic_plays_again() {
    use infernix_measure::replay::{proxy, record};
    let server = fake(Fault::None, 0);
    let recorder = proxy::Recorder::bind(&server.url, "127.0.0.1:0".parse().unwrap()).unwrap();
    let address = recorder.address();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let notes: Arc<Mutex<Vec<String>>> = Arc::default();
    let heard = Arc::clone(&notes);
    let noted = move |note: &str| heard.lock().unwrap().push(note.to_owned());
    let recorder = std::thread::spawn(move || recorder.run(&stopped, noted).unwrap());
    let client = Endpoint::connect(&format!("http://{address}"), Some("secret".into()), None);
    let client = client.expect("the recorder passes the model list on");
    assert_eq!(client.model(), "fake");
    let mut messages = vec![json!({ "role": "user", "content": "one" })];
    for text in ["two", "three"] {
        let body = json!({ "messages": messages, "max_tokens": 20 });
        let x = client.stream("/v1/chat/completions", &body, Duration::from_secs(5));
        assert_eq!(x.failure, None);
        messages.push(x.answer.message());
        messages.push(json!({ "role": "tool", "tool_call_id": "c", "content": text }));
    }
    // Only what was answered is a request to play again.
    let refused =
        client.stream("/v1/elsewhere/chat/completions", &json!({ "messages": [] }), Duration::from_secs(5));
    assert!(matches!(refused.failure, Some(Failure::Status(500, _))), "{:?}", refused.failure);
    stop.store(true, Ordering::Relaxed);
    let recorded = recorder.join().unwrap();
    assert_eq!(recorded.len(), 2);
    let notes = notes.lock().unwrap().join("\n");
    assert_eq!(notes.matches("completions: recorded").count(), 2, "{notes}");
    assert!(notes.contains("not recorded, the upstream answers 500"), "{notes}");
    let plan = record::plan("mine", &recorded, record::Texts::Hash, [1; 32]);
    assert_eq!((plan.actors.len(), plan.counts().requests), (1, 2));
    assert!(!serde_json::to_string(&plan).unwrap().contains("secret"));
    let endpoint = Endpoint::connect(&server.url, None, None).unwrap();
    let go_on = AtomicBool::new(false);
    let options =
        RunOptions { timeout: Duration::from_secs(5), interrupted: &go_on, omit: &[], progress: &|_| {} };
    assert_eq!(play(&plan, &endpoint, options).rows.len(), 2);
    let away = "0.0.0.0:1".parse().unwrap();
    assert!(proxy::Recorder::bind(&server.url, away).is_err(), "a recorder never listens elsewhere");
}
