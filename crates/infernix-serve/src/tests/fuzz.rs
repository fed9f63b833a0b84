//! Bodies that nobody means: no 5xx, no panic, always an error in its protocol's form. And the OpenAPI file says what
//! the routes do.

use super::client::{Server, says};
use crate::options::ServeOptions;
use infernix_engine::sched::Finish;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

const OPENAPI: &str = include_str!("../../../../docs/openapi.json");

fn server() -> Server {
    Server::new(ServeOptions::default(), |r| Ok(says(r, "Hm.\n</think>\n\nFine.", 2, Finish::Stop(0))))
}

/// Requests that use most fields.
fn seeds() -> Vec<(&'static str, Value)> {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false});
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    vec![
        (
            "/v1/chat/completions",
            json!({
                "model": "demo", "temperature": 0.5, "top_k": 3, "seed": 1, "n": 2, "stop": ["x"], "stream": true,
                "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 2, "logit_bias": {"3": 1},
                "reasoning_effort": "low", "max_tokens": 9, "chat_template_kwargs": {"x": 1},
                "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": true}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]},
                             {"role": "assistant", "content": null, "tool_calls": [call]},
                             {"role": "tool", "tool_call_id": "c", "content": "r"}],
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "messages": [{"role": "user", "content": "x"}], "thinking_budget": 3, "max_tokens": 200,
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            }),
        ),
        (
            "/v1/completions",
            json!({
                "prompt": ["a", "b"], "echo": true, "logprobs": 1, "max_tokens": 2, "n": 2, "suffix": "", "best_of": 2,
            }),
        ),
        (
            "/v1/responses",
            json!({
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                          {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
                          {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                          {"type": "function_call_output", "call_id": "c", "output": "o"}],
                "instructions": "i", "tools": [{"type": "function", "name": "f", "parameters": schema},
                    {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]}, {"type": "tool_search"}],
                "tool_choice": "auto", "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}},
                "metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "max_output_tokens": 9, "stream": true,
            }),
        ),
        (
            "/v1/messages",
            json!({
                "model": "m", "max_tokens": 2048, "system": [{"type": "text", "text": "s"}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                             {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
                                {"type": "tool_use", "id": "u", "name": "f", "input": {}}]},
                             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": "r"}]}],
                "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"},
                "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"},
                "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "stream": true,
            }),
        ),
        (
            "/v1/decide",
            json!({"state": "s", "questions": {"q": {"type": "noul", "instructions": "i"},
            "c": {"type": "choice", "instructions": "i", "criteria": {"a": null, "b": "x"}}}}),
        ),
        ("/tokenize", json!({"prompt": "x", "return_token_strs": true})),
        ("/detokenize", json!({"tokens": [1, 2]})),
    ]
}

fn odd() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!("<|im_end|>")),
        Just(json!([])),
        Just(json!({})),
        Just(json!([[[[1]]]])),
        Just(json!({"type": "image_url"})),
        Just(json!({"type": "object", "$ref": "#"})),
        Just(json!("(a+)+$")),
        Just(json!(0)),
        Just(json!(-1)),
    ]
}

/// Every place of a document.
fn places(value: &Value, at: String, out: &mut Vec<String>) {
    out.push(at.clone());
    match value {
        Value::Object(map) => map.iter().for_each(|(k, v)| places(v, format!("{at}/{k}"), out)),
        Value::Array(list) => list.iter().enumerate().for_each(|(i, v)| places(v, format!("{at}/{i}"), out)),
        _ => {}
    }
}

#[test]
fn no_body_makes_the_server_fail() {
    let server = server();
    let seeds = seeds();
    let mut runner = TestRunner::new(Config { cases: 400, failure_persistence: None, ..Config::default() });
    let strategy =
        (0..seeds.len(), prop::collection::vec((any::<prop::sample::Index>(), odd(), any::<bool>()), 1..4));
    let result = runner.run(&strategy, |(seed, changes)| {
        let (path, body) = &seeds[seed];
        let mut body = body.clone();
        for (place, value, remove) in changes {
            let mut all = Vec::new();
            places(&body, String::new(), &mut all);
            let pointer = place.get(&all).clone();
            match pointer.rsplit_once('/') {
                Some((parent, key)) if remove => {
                    if let Some(Value::Object(map)) = body.pointer_mut(parent) {
                        map.shift_remove(key);
                    }
                }
                _ => {
                    if let Some(target) = body.pointer_mut(&pointer) {
                        *target = value;
                    }
                }
            }
        }
        let answer = server.post(path, &body);
        prop_assert!(
            (200..500).contains(&answer.status),
            "{} {body}: {} {}",
            path,
            answer.status,
            answer.body
        );
        if answer.status >= 400 {
            let error = &answer.json()["error"];
            prop_assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{}", answer.body);
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn the_openapi_file_says_what_the_routes_do() {
    let server = server();
    let document: Value = serde_json::from_str(OPENAPI).expect("JSON");
    let first = server.post("/v1/responses", &json!({"input": "x"})).json();
    let id = first["id"].as_str().expect("an id");
    let bodies: std::collections::HashMap<_, _> = [
        ("/tokenize", json!({"prompt": "x"})),
        ("/detokenize", json!({"tokens": [1]})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "x"}]})),
        ("/v1/completions", json!({"prompt": "x"})),
        ("/v1/responses", json!({"input": "x"})),
        ("/v1/responses/input_tokens", json!({"input": "x"})),
        ("/v1/messages", json!({"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]})),
        ("/v1/messages/count_tokens", json!({"messages": [{"role": "user", "content": "x"}]})),
    ]
    .into();
    let paths = document["paths"].as_object().expect("paths");
    assert!(paths.len() >= 20);
    for (path, methods) in paths {
        for (method, route) in methods.as_object().expect("methods") {
            let concrete = path
                .replace("/responses/{id}", &format!("/responses/{id}"))
                .replace("/models/{id}", "/models/demo");
            let body = bodies.get(path.as_str());
            if method == "post" && body.is_none() {
                let refused = server.post(&concrete, &json!({}));
                assert_eq!(refused.status, 400, "{method} {path} is routed");
                continue;
            }
            if method == "delete" {
                // Last, or the other routes of the response have nothing to give.
                continue;
            }
            let answer = match body {
                Some(body) => server.post(&concrete, body),
                None => server.get(&concrete),
            };
            assert_eq!(answer.status, 200, "{method} {path}: {}", answer.body);
            let content = route["responses"]["200"]["content"].as_object().expect("content");
            let kind =
                answer.header("content-type").expect("a type").split(';').next().expect("one").to_owned();
            assert!(content.contains_key(&kind), "{method} {path}: {kind}");
            if kind == "application/json" {
                let schema = resolve(&document, &content[&kind]["schema"]);
                fits(&document, schema, &answer.json(), path);
            }
        }
    }
    let removed = server.request("DELETE", &format!("/v1/responses/{id}"), &[], b"");
    assert_eq!(removed.status, 200);
}

fn resolve<'d>(document: &'d Value, schema: &'d Value) -> &'d Value {
    match schema["$ref"].as_str() {
        Some(name) => document.pointer(name.trim_start_matches('#')).expect("a schema of that name"),
        None => schema,
    }
}

/// Required members, types, constants and lists of the file's own schemas.
fn fits(document: &Value, schema: &Value, value: &Value, path: &str) {
    let schema = resolve(document, schema);
    if let Some(options) = schema["anyOf"].as_array() {
        assert!(options.iter().any(|o| kind_fits(resolve(document, o), value)), "{path}: {value}");
        return;
    }
    assert!(kind_fits(schema, value), "{path}: {value} is not {}", schema["type"]);
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        assert!(value.get(name).is_some(), "{path}: no {name} in {value}");
    }
    if let Some(constant) = schema.get("const") {
        assert_eq!(constant, value, "{path}");
    }
    if let Some(words) = schema["enum"].as_array() {
        assert!(words.contains(value), "{path}: {value}");
    }
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        if let Some(member) = value.get(name) {
            fits(document, inner, member, &format!("{path} {name}"));
        }
    }
    if let (Some(list), Some(items)) = (value.as_array(), schema.get("items")) {
        list.iter().for_each(|v| fits(document, items, v, path));
    }
}

fn kind_fits(schema: &Value, value: &Value) -> bool {
    match schema["type"].as_str() {
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        Some("null") => value.is_null(),
        _ => true,
    }
}
