//! Requests at the edges of what a field may say: none is taken for something that it does not ask.

use super::checker;
use super::client::{FORMAT, Server, says};
use crate::options::ServeOptions;
use crate::prepare::Caller;
use infernix_engine::sched::{Finish, Request};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// A server that says nothing, and the prompts that it was asked.
fn silent() -> (Server, Arc<Mutex<Vec<Vec<u32>>>>) {
    let prompts: Arc<Mutex<Vec<Vec<u32>>>> = Arc::default();
    let seen = Arc::clone(&prompts);
    let server = Server::new(ServeOptions::default(), move |r: &Request| {
        seen.lock().expect("lock").push(r.prompt.clone());
        Ok(says(r, "", 1, Finish::Stop(0)))
    });
    (server, prompts)
}

#[test]
fn a_form_that_only_the_empty_text_fits_is_refused() {
    let (server, _) = silent();
    for (form, code) in [
        (json!({"regex": "^$"}), "invalid_regex"),
        (json!({"regex": ""}), "invalid_regex"),
        (json!({"grammar": "root ::= \"\""}), "invalid_grammar"),
    ] {
        let answer =
            server.post("/v1/chat/completions", &json!({"messages": user("x"), "structured_outputs": form}));
        assert_eq!((answer.status, answer.code().as_str()), (400, code), "{form}");
    }
}

#[test]
fn a_schema_is_held_wherever_a_protocol_has_a_place_for_it() {
    let server = Server::new(ServeOptions::default(), |r| {
        let text = if r.constraint.is_some() { "null" } else { "free" };
        Ok(says(r, text, 2, Finish::Constraint))
    });
    let format = json!({"type": "json_object", "schema": {"type": "null"}});
    let body = json!({"messages": user("x"), "response_format": format, "enable_thinking": false});
    let answer = server.post("/v1/chat/completions", &body).json();
    assert_eq!(answer["choices"][0]["message"]["content"], "null");
    let answer = server.post("/v1/completions", &json!({"prompt": "x", "response_format": format})).json();
    assert_eq!(answer["choices"][0]["text"], "null");
    let format = json!({"type": "json_object", "schema": {"uniqueItems": true}});
    let answer = server.post("/v1/completions", &json!({"prompt": "x", "response_format": format}));
    assert_eq!(
        (answer.status, answer.json()["error"]["param"].clone()),
        (400, json!("response_format.schema"))
    );
}

#[test]
fn no_tools_allowed_means_no_call() {
    let call = "<tool_call>\n<function=f>\n</function>\n</tool_call>";
    let server = Server::new(ServeOptions::default(), move |r| Ok(says(r, call, 2, Finish::Stop(0))));
    let tools = json!([{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]);
    let g = json!([{"type": "function", "function": {"name": "g"}}]);
    for allowed in [json!([]), g] {
        for constraints in ["basic", "auto"] {
            let choice =
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}});
            let body = json!({"messages": user("x"), "tools": tools, "tool_choice": choice,
                              "tool_constraints": constraints, "enable_thinking": false});
            let answer = server.post("/v1/chat/completions", &body).json();
            let message = &answer["choices"][0]["message"];
            assert!(message.get("tool_calls").is_none(), "{allowed} {constraints}: {message}");
        }
    }
}

#[test]
fn the_closing_message_and_a_token_of_the_answer_fit_whatever_the_budget_is() {
    let (server, _) = silent();
    let caller = || Caller { key: None, session: None, call_prefix: "call_" };
    let plan = |budget: usize, most: usize| {
        let body = json!({"messages": user("x"), "thinking_budget": budget, "max_tokens": most});
        let request = crate::chat::parse(body, FORMAT.tokenizer().addressable()).expect("valid");
        let plan = server.app.prepare(request.turn, caller());
        plan.map(|p| p.constraint.expect("a constraint").guide.budget).map_err(|e| e.code)
    };
    let closing = format!("{}</think>\n\n", server.app.options.thinking_budget_message);
    let needed = FORMAT.tokenizer().encode(&closing).expect("ids").len() + 1;
    assert_eq!(plan(40, needed + 100), Ok(Some(40)));
    assert_eq!(plan(40, needed + 27), Ok(Some(27)));
    assert_eq!(plan(10, needed), Ok(Some(0)));
    assert_eq!(plan(10, needed - 1), Err("thinking_budget_capacity_insufficient"));
}

#[test]
fn a_user_turn_of_no_blocks_is_a_turn() {
    let (server, prompts) = silent();
    for content in [json!(""), json!([])] {
        let body = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]});
        assert_eq!(server.post("/v1/messages", &body).status, 200);
    }
    let prompts = prompts.lock().expect("lock");
    assert_eq!(prompts[0], prompts[1]);
}

#[test]
fn the_token_that_was_chosen_is_among_its_alternatives() {
    // The script's own token is the most likely one; with no alternatives asked for it stands alone.
    let server = Server::saying("Blue.");
    let answer = server.post("/v1/completions", &json!({"prompt": "x", "logprobs": 0})).json();
    let lists = &answer["choices"][0]["logprobs"];
    let top = lists["top_logprobs"].as_array().expect("a list");
    assert!(!top.is_empty());
    for (token, top) in lists["tokens"].as_array().expect("tokens").iter().zip(top) {
        assert_eq!(top, &json!({token.as_str().expect("a text"): -0.5}));
    }
}

#[test]
fn tokens_that_were_forgotten_are_not_an_empty_text() {
    let (server, _) = silent();
    assert_eq!(server.post("/detokenize", &json!({})).code(), "missing_required_parameter");
    assert_eq!(server.post("/detokenize", &json!({"tokens": []})).json()["prompt"], "");
}

#[test]
fn arguments_of_held_calls_come_in_pieces_in_every_protocol() {
    let call = "<tool_call>\n<function=f>\n<parameter=a>\none two three four five\n</parameter>\n</function>\n</tool_call>";
    let server = Server::new(ServeOptions::default(), move |r| Ok(says(r, call, 1, Finish::Stop(0))));
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let expected = vec![("f".to_owned(), json!({"a": "one two three four five"}))];
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": schema}}]);
    let body = json!({"messages": user("x"), "tools": tools, "stream": true, "enable_thinking": false});
    let answer = server.post("/v1/chat/completions", &body);
    let said = checker::chat(&answer.body, 1, false).expect("well-formed").remove(0);
    assert_eq!((said.calls, said.finish.as_str()), (expected.clone(), "tool_calls"));
    assert!(answer.body.matches("\"arguments\"").count() > 4, "{}", answer.body);

    let tools = json!([{"name": "f", "input_schema": schema}]);
    let body = json!({"model": "m", "max_tokens": 99, "messages": user("x"), "tools": tools, "stream": true});
    let answer = server.post("/v1/messages", &body);
    let said = checker::messages(&answer.body).expect("well-formed");
    assert_eq!((said.calls, said.finish.as_str()), (expected.clone(), "tool_use"));
    assert!(answer.body.matches("input_json_delta").count() > 4, "{}", answer.body);

    let tools = json!([{"type": "function", "name": "f", "parameters": schema}]);
    let body = json!({"input": "x", "tools": tools, "stream": true, "reasoning": {"effort": "none"}});
    let answer = server.post("/v1/responses", &body);
    let (said, _) = checker::responses(&answer.body).expect("well-formed");
    assert_eq!((said.calls, said.finish.as_str()), (expected, "completed"));
    assert!(answer.body.matches("event: response.function_call_arguments.delta").count() > 4);

    // Free text, too; without constraints nothing is sure before the end.
    let input = call.replace("=a>", "=input>");
    let server = Server::new(ServeOptions::default(), move |r| Ok(says(r, &input, 1, Finish::Stop(0))));
    for (constraints, pieces) in [("basic", true), ("auto", false)] {
        let body = json!({"input": "x", "tools": [{"type": "custom", "name": "f"}], "stream": true,
                          "reasoning": {"effort": "none"}, "tool_constraints": constraints});
        let answer = server.post("/v1/responses", &body);
        let (said, _) = checker::responses(&answer.body).expect("well-formed");
        assert_eq!(said.calls, [("f".to_owned(), json!("one two three four five"))]);
        let deltas = answer.body.matches("event: response.custom_tool_call_input.delta").count();
        assert_eq!(deltas > 1, pieces, "{constraints}: {}", answer.body);
    }
}
