//! What clients and engines do wrong: the request concerned gets a clear error, and the next one is answered.

use super::checker;
use super::client::{Server, read, says};
use crate::options::ServeOptions;
use infernix_engine::sched::{
    CacheOrder, Drain, EngineApi, Event, Finish, Request, RequestId, ScriptedEngine, Sink, Status,
    SubmitError,
};
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";

fn body(stream: bool) -> serde_json::Value {
    json!({"messages": [{"role": "user", "content": "x"}], "stream": stream})
}

/// The server still answers, and nothing of earlier requests is left.
fn well(server: &Server) {
    assert_eq!(server.post(CHAT, &body(false)).status, 200);
    wait(|| server.app.active_requests() == 0);
}

fn wait(until: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !until() {
        assert!(Instant::now() < deadline, "never happened");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A server whose first answers stay open and whose later ones end.
fn opening(options: ServeOptions, open: usize) -> Server {
    let count = AtomicUsize::new(0);
    Server::new(options, move |r| {
        let mut events = says(r, "some text to begin with", 1, Finish::Stop(0));
        if count.fetch_add(1, Ordering::SeqCst) < open {
            events.pop();
        }
        Ok(events)
    })
}

fn send(server: &Server, stream: bool) -> std::net::TcpStream {
    let mut connection = server.connect();
    let body = body(stream).to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        server.address,
        body.len()
    );
    connection.write_all(format!("{head}{body}").as_bytes()).expect("sent");
    connection
}

#[test]
fn a_client_that_vanishes_cancels_its_request() {
    for stream in [false, true] {
        let server = opening(ServeOptions::default(), 1);
        let connection = send(&server, stream);
        wait(|| server.engine.open_requests().len() == 1);
        drop(connection);
        wait(|| server.engine.open_requests().is_empty());
        well(&server);
    }
}

#[test]
fn a_client_that_does_not_read_is_dropped_and_holds_up_nobody() {
    let options = ServeOptions { write_timeout: Duration::from_millis(200), ..ServeOptions::default() };
    let server = opening(options, 1);
    let connection = send(&server, true);
    wait(|| server.engine.open_requests().len() == 1);
    let id = server.engine.open_requests()[0];
    // More than the buffers of both ends hold.
    let ids = super::client::FORMAT.tokenizer().encode("some more text ").expect("ids");
    let tokens: Vec<_> = ids
        .iter()
        .cycle()
        .take(4000)
        .map(|id| infernix_engine::sched::Sampled { id: *id, ..Default::default() })
        .collect();
    wait(|| {
        server.engine.send(id, Event::Tokens(tokens.clone()));
        server.engine.open_requests().is_empty()
    });
    drop(connection);
    well(&server);
}

#[test]
fn silence_of_the_engine_is_filled_with_signs_of_life() {
    let options = ServeOptions { keep_alive: Duration::from_millis(30), ..ServeOptions::default() };
    let server = opening(options, 2);
    let mut connection = send(&server, true);
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(": keep-alive") {
        let mut buffer = [0; 1024];
        let n = connection.read(&mut buffer).expect("alive");
        assert!(n > 0);
        seen.extend_from_slice(&buffer[..n]);
    }
    drop(connection);
    let mut connection = server.connect();
    let body = json!({"model": "m", "max_tokens": 99, "stream": true, "messages": [{"role": "user", "content": "x"}]});
    let body = body.to_string();
    let head = format!(
        "POST /v1/messages HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        server.address,
        body.len()
    );
    connection.write_all(format!("{head}{body}").as_bytes()).expect("sent");
    wait(|| server.engine.open_requests().len() == 1);
    std::thread::sleep(Duration::from_millis(100));
    let id = server.engine.open_requests()[0];
    let (usage, timings) = Default::default();
    server.engine.send(id, Event::Finished { reason: Finish::Stop(0), usage, timings });
    let answer = read(&mut connection);
    assert!(answer.body.contains("event: ping"));
    checker::messages(&answer.body).expect("well-formed");
    well(&server);
}

#[test]
fn bodies_that_are_too_large_are_refused_before_they_are_read() {
    let server = Server::saying("ok");
    let head = |length: &str| {
        format!(
            "POST {CHAT} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\n{length}\r\n\r\n",
            server.address
        )
    };
    let answer = server.raw(head("content-length: 419430400").as_bytes());
    assert_eq!((answer.status, answer.code().as_str()), (413, "request_too_large"));
    let small = ServeOptions { max_request_bytes: 10_000, ..ServeOptions::default() };
    let server = Server::new(small, |r| Ok(says(r, "ok", 1, Finish::Stop(0))));
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n",
        server.address
    );
    let chunk = format!("1000\r\n{}\r\n", " ".repeat(0x1000));
    let answer = server.raw(format!("{head}{}", chunk.repeat(4)).as_bytes());
    assert_eq!((answer.status, answer.code().as_str()), (413, "request_too_large"));
    well(&server);
}

#[test]
fn a_client_that_sends_a_refused_body_to_its_end_still_reads_the_refusal() {
    let small = ServeOptions { max_request_bytes: 10_000, ..ServeOptions::default() };
    let few = ServeOptions { max_bodies_bytes: 10_240, ..ServeOptions::default() };
    let key = crate::options::ApiKey { name: "k".into(), key: "secret".into() };
    let keyed = ServeOptions { keys: vec![key], ..ServeOptions::default() };
    for (options, status) in [(small, 413), (few, 429), (keyed, 401)] {
        let server = Server::new(options, |r| Ok(says(r, "ok", 1, Finish::Stop(0))));
        // More than the buffers of both ends hold.
        let size = 32 << 20;
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n",
            server.address
        );
        let mut connection = server.connect();
        connection.write_all(head.as_bytes()).expect("sent");
        connection.write_all(&vec![b' '; size]).expect("read to the end");
        assert_eq!(read(&mut connection).status, status);
        wait(|| server.app.active_requests() == 0);
    }
}

#[test]
fn bodies_that_stall_time_out() {
    let options = ServeOptions { body_timeout: Duration::from_millis(100), ..ServeOptions::default() };
    let server = Server::new(options, |r| Ok(says(r, "ok", 1, Finish::Stop(0))));
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 100\r\n\r\n{{",
        server.address
    );
    assert_eq!(server.raw(head.as_bytes()).status, 408);
    well(&server);
}

#[test]
fn broken_bodies_are_errors_with_words() {
    let server = Server::saying("ok");
    let headers = [("content-type", "application/json")];
    let deep = "[".repeat(200_000);
    let deep_inside = format!("{{\"messages\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let cases: [&[u8]; 9] = [
        b"",
        b"{",
        b"[]",
        b"\"x\"",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\\ud800\"}]}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"temperature\": 1e999}",
        deep.as_bytes(),
        deep_inside.as_bytes(),
    ];
    for path in
        [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/messages/count_tokens"]
    {
        for case in cases {
            let answer = server.request("POST", path, &headers, case);
            let shown = String::from_utf8_lossy(&case[..case.len().min(40)]).into_owned();
            assert!((400..500).contains(&answer.status), "{path} {shown}: {}", answer.status);
            assert!(answer.json()["error"]["message"].as_str().is_some_and(|m| !m.is_empty()));
        }
    }
    well(&server);
}

#[test]
fn heads_that_are_too_long_or_make_no_sense_are_refused() {
    let server = Server::saying("ok");
    let flood: String = (0..5000).map(|i| format!("x-{i}: {i}\r\n")).collect();
    let answer =
        server.raw(format!("GET /v1/models HTTP/1.1\r\nhost: {}\r\n{flood}\r\n", server.address).as_bytes());
    assert_eq!(answer.status, 431);
    let long =
        format!("GET /v1/models HTTP/1.1\r\nhost: {}\r\nx: {}\r\n\r\n", server.address, "y".repeat(1 << 20));
    assert!(matches!(server.raw(long.as_bytes()).status, 431 | 0));
    assert_eq!(server.raw(b"\x16\x03\x01 hello\r\n\r\n").status, 400);
    assert_eq!(server.get("/nothing").status, 404);
    assert_eq!(server.request("PUT", CHAT, &[], b"").status, 405);
    well(&server);
}

#[test]
fn an_engine_that_panics_in_a_stream_costs_that_stream() {
    let count = AtomicUsize::new(0);
    let server = Server::new(ServeOptions::default(), move |r| {
        assert!(count.fetch_add(1, Ordering::SeqCst) != 0, "injected");
        Ok(says(r, "ok", 1, Finish::Stop(0)))
    });
    // The panic reaches the task of this request only.
    let answer = server.post(CHAT, &body(true));
    assert!(answer.status == 500 || answer.status == 0, "{}", answer.status);
    well(&server);
}

/// Drops the first request after its first event, as an engine does whose thread has died.
struct Forgetful(Arc<ScriptedEngine>, AtomicBool);

impl EngineApi for Forgetful {
    fn submit(&self, request: Request, mut sink: Sink) -> Result<RequestId, SubmitError> {
        if self.1.swap(true, Ordering::SeqCst) {
            return self.0.submit(request, sink);
        }
        sink(Event::Admitted { queued: Duration::ZERO, cached_tokens: 0, miss: None });
        Ok(RequestId(99))
    }

    fn cancel(&self, id: RequestId) {
        self.0.cancel(id);
    }

    fn status(&self) -> Status {
        self.0.status()
    }

    fn shutdown(&self, drain: Drain) {
        self.0.shutdown(drain);
    }

    fn cache(&self, order: CacheOrder) -> Result<usize, String> {
        self.0.cache(order)
    }
}

#[test]
fn an_engine_that_drops_a_request_ends_its_stream_with_an_error() {
    let engine = ScriptedEngine::new(|r| Ok(says(r, "ok", 1, Finish::Stop(0))));
    let api = Arc::new(Forgetful(Arc::clone(&engine), AtomicBool::new(false)));
    let server = Server::over(ServeOptions::default(), engine, api);
    let answer = server.post(CHAT, &body(true));
    assert!(checker::chat(&answer.body, 1, false).expect("well-formed")[0].failed);
    well(&server);
}

#[test]
fn a_stopping_server_finishes_what_runs_and_takes_nothing_new() {
    let mut server = opening(ServeOptions::default(), 1);
    let mut connection = send(&server, true);
    wait(|| server.engine.open_requests().len() == 1);
    let id = server.engine.open_requests()[0];
    server.stop();
    wait(|| server.app.draining());
    let (usage, timings) = Default::default();
    server.engine.send(id, Event::Finished { reason: Finish::Stop(0), usage, timings });
    let answer = read(&mut connection);
    assert!(!checker::chat(&answer.body, 1, false).expect("well-formed")[0].failed);
    server.join();
}

#[test]
fn a_stopping_server_ends_what_takes_too_long_with_an_error() {
    let options = ServeOptions { drain_timeout: Duration::from_millis(50), ..ServeOptions::default() };
    let mut server = opening(options, 1);
    let mut connection = send(&server, true);
    wait(|| server.engine.open_requests() == [RequestId(1)]);
    server.stop();
    let answer = read(&mut connection);
    assert!(checker::chat(&answer.body, 1, false).expect("well-formed")[0].failed);
    server.join();
}

#[test]
fn a_thousand_connections_at_once_are_all_answered() {
    let server = Server::saying("ok");
    let open: Vec<_> = (0..1000).map(|i| send(&server, i % 2 == 0)).collect();
    for mut connection in open {
        assert_eq!(read(&mut connection).status, 200);
    }
    well(&server);
}

#[test]
fn connections_beyond_the_bound_wait_for_their_turn() {
    let options = ServeOptions { max_connections: 2, ..ServeOptions::default() };
    let server = Server::new(options, |r| Ok(says(r, "ok", 1, Finish::Stop(0))));
    let open: Vec<_> = (0..20).map(|_| send(&server, false)).collect();
    for mut connection in open {
        assert_eq!(read(&mut connection).status, 200);
    }
}
