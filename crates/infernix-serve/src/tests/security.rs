//! Who may not: each refusal is a test.

use super::client::{Server, says};
use crate::options::{ApiKey, ServeOptions};
use infernix_engine::sched::{CacheHints, Finish, Request};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

fn keyed(share: bool) -> (Server, Arc<Mutex<Vec<CacheHints>>>) {
    let key = |name: &str| ApiKey { name: name.into(), key: format!("secret-{name}") };
    let options = ServeOptions {
        keys: vec![key("ann"), key("ben")],
        share_prefix_across_keys: share,
        ..ServeOptions::default()
    };
    let hints: Arc<Mutex<Vec<CacheHints>>> = Arc::default();
    let seen = Arc::clone(&hints);
    let server = Server::new(options, move |r: &Request| {
        seen.lock().expect("lock").push(r.cache.clone());
        Ok(says(r, "ok", 1, Finish::Stop(0)))
    });
    (server, hints)
}

fn post(server: &Server, path: &str, key: &str, body: &Value) -> super::client::Answer {
    let authorization = format!("Bearer {key}");
    let headers = [("content-type", "application/json"), ("authorization", authorization.as_str())];
    server.request("POST", path, &headers, body.to_string().as_bytes())
}

#[test]
fn without_a_known_key_nothing_but_health_answers() {
    let (server, _) = keyed(false);
    for path in ["/v1/models", "/metrics", "/v1/status", "/v1/responses/resp_1", "/version"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    assert_eq!(server.post("/v1/chat/completions", &body).status, 401);
    assert_eq!(post(&server, "/v1/chat/completions", "secret-eve", &body).status, 401);
    assert_eq!(post(&server, "/v1/chat/completions", "secret-ann", &body).status, 200);
    for path in ["/livez", "/readyz", "/health", "/"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    let answer = server.request("POST", "/v1/messages", &[("content-type", "application/json")], b"{}");
    assert_eq!(answer.json()["error"]["type"], "authentication_error");
}

#[test]
fn one_key_cannot_reach_anothers_responses_or_time_its_prefixes() {
    let (server, hints) = keyed(false);
    let first = post(&server, "/v1/responses", "secret-ann", &json!({"input": "private"})).json();
    let id = first["id"].as_str().expect("an id");
    for (key, status) in [("secret-ben", 404), ("secret-ann", 200)] {
        let authorization = format!("Bearer {key}");
        let headers = [("authorization", authorization.as_str())];
        assert_eq!(server.request("GET", &format!("/v1/responses/{id}"), &headers, b"").status, status);
        let items = server.request("GET", &format!("/v1/responses/{id}/input_items"), &headers, b"");
        assert_eq!(items.status, status);
        let next = json!({"input": "more", "previous_response_id": id});
        assert_eq!(post(&server, "/v1/responses", key, &next).status, status);
    }
    let headers = [("authorization", "Bearer secret-ben")];
    assert_eq!(server.request("DELETE", &format!("/v1/responses/{id}"), &headers, b"").status, 404);
    hints.lock().expect("lock").clear();
    for key in ["secret-ann", "secret-ben"] {
        post(&server, "/v1/responses", key, &json!({"input": "same"}));
    }
    post(
        &server,
        "/v1/chat/completions",
        "secret-ann",
        &json!({
            "messages": [{"role": "user", "content": "same"}], "cache_salt": "key ben",
        }),
    );
    let hints = hints.lock().expect("lock");
    let salts: std::collections::HashSet<_> = hints.iter().map(|h| h.salt.clone()).collect();
    assert_eq!(salts.len(), 3, "keys and salts of requests never meet");
    drop(hints);
    let (server, hints) = keyed(true);
    for key in ["secret-ann", "secret-ben"] {
        post(&server, "/v1/responses", key, &json!({"input": "same"}));
    }
    let hints = hints.lock().expect("lock");
    assert_eq!(hints[0].salt, hints[1].salt, "unless the server says so");
}

#[test]
fn pages_of_other_sites_and_rebound_names_are_refused() {
    let server = Server::saying("ok");
    let body = json!({"messages": [{"role": "user", "content": "x"}]}).to_string();
    let own = server.address.to_string();
    let send =
        |headers: &[(&str, &str)]| server.request("POST", "/v1/chat/completions", headers, body.as_bytes());
    let json_type = ("content-type", "application/json");
    assert_eq!(send(&[json_type, ("host", "evil.example")]).code(), "host_not_allowed");
    assert_eq!(send(&[json_type, ("origin", "http://evil.example")]).code(), "origin_not_allowed");
    assert_eq!(send(&[json_type, ("origin", "null")]).code(), "origin_not_allowed");
    assert_eq!(send(&[json_type, ("origin", &format!("http://{own}"))]).status, 200);
    for kind in ["text/plain", "application/x-www-form-urlencoded"] {
        assert_eq!(send(&[("content-type", kind)]).status, 415);
    }
    assert_eq!(send(&[]).status, 415);
    // A page of another site may not even ask what is allowed.
    let ask = [("origin", "http://evil.example"), ("access-control-request-method", "POST")];
    let answer = server.request("OPTIONS", "/v1/chat/completions", &ask, b"");
    assert!(answer.status == 403 && answer.header("access-control-allow-origin").is_none());
    let open = Server::new(ServeOptions { cors: true, ..ServeOptions::default() }, |r| {
        Ok(says(r, "ok", 1, Finish::Stop(0)))
    });
    let answer = open.request("OPTIONS", "/v1/chat/completions", &ask, b"");
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, Some("*")));
}

#[test]
fn the_log_has_no_text_and_no_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("log.jsonl");
    let log = crate::LogOptions { file: Some(file.clone()), max_bytes: None, keep: 4 };
    let keys = vec![ApiKey { name: "ann".into(), key: "secret-ann".into() }];
    let mut server = Server::new(ServeOptions { log, keys, ..ServeOptions::default() }, |r| {
        Ok(says(r, "an answer to keep quiet", 1, Finish::Stop(0)))
    });
    let body = json!({"messages": [{"role": "user", "content": "a question to keep quiet"}], "colour": 1});
    assert_eq!(
        post(&server, "/v1/chat/completions", "secret-ann", &body).header("x-infernix-ignored"),
        Some("colour")
    );
    assert_eq!(post(&server, "/v1/chat/completions", "secret-ann", &json!({"messages": []})).status, 400);
    server.join();
    let log = std::fs::read_to_string(file).expect("a log");
    let kinds: Vec<String> = log
        .lines()
        .map(|l| {
            serde_json::from_str::<Value>(l).expect("JSON")["event"].as_str().expect("a kind").to_owned()
        })
        .collect();
    assert_eq!(kinds, ["server_start", "request_start", "request_done", "request_rejected", "server_stop"]);
    assert!(!log.contains("quiet") && !log.contains("secret"), "{log}");
    assert!(log.contains("\"key\":\"ann\"") && log.contains("\"ignored\":[\"colour\"]"));
}

#[test]
fn ids_of_clients_are_taken_only_where_they_are_plain() {
    let server = Server::saying("ok");
    let id = |value: &str| {
        server
            .request("GET", "/v1/models", &[("x-request-id", value)], b"")
            .header("x-request-id")
            .map(str::to_owned)
    };
    assert_eq!(id("abc-1.2:3_x").as_deref(), Some("abc-1.2:3_x"));
    assert!(id("a b\"<").expect("an id").starts_with("req_"));
}
