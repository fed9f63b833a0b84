//! Any tokens in any chunks, ended in any way: well-formed streams in all protocols, and the same said in all of them.

use super::checker::{self, Said};
use super::client::FORMAT;
use crate::chat::{ChatReply, ChatSend};
use crate::decode::{DecodeOptions, Decoder};
use crate::messages::MessagesReply;
use crate::piece::Piece;
use crate::reply::{Reply, Running};
use crate::responses::{ResponsesReply, Template};
use crate::tools::{Function, Identity, Tools};
use infernix_engine::sched::{Event, Finish, RequestError, Sampled, Timings, Usage};
use infernix_text::Start;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

fn tools() -> Arc<Tools> {
    let mut tools = Tools::new();
    let function = |name: &str| Function {
        path: String::new(),
        name: name.into(),
        description: None,
        parameters: Some(
            json!({"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}),
        ),
        strict: false,
        deferred: false,
        form: None,
    };
    let plain = |name: &str| Identity::Function { name: name.into(), namespace: None };
    tools.function(function("f"), plain("f")).expect("valid");
    tools.function(function("g"), plain("g")).expect("valid");
    Arc::new(tools)
}

fn options(start: Start, stops: Vec<String>, constrained: bool) -> DecodeOptions {
    let tools = tools();
    DecodeOptions {
        tokenizer: Arc::clone(FORMAT.tokenizer()),
        start,
        set: Arc::new(tools.set()),
        tools,
        stops,
        constrained,
        observed: constrained,
        tolerant: false,
        logprobs: true,
        prompt_tokens: 10,
        fills_context: false,
        scored: None,
        scored_stops: Vec::new(),
        call_prefix: "call_",
        never_empty: true,
        held: false,
        calls_only: false,
    }
}

/// The pieces of an answer.
fn pieces(options: DecodeOptions, events: Vec<Event>) -> Vec<(Piece, Running)> {
    let mut decoder = Decoder::new(options, None);
    let mut out = Vec::new();
    let lost = !matches!(events.last(), Some(Event::Finished { .. } | Event::Failed(_)));
    for event in events {
        for piece in decoder.event(event) {
            out.push((piece, decoder.running()));
        }
    }
    if lost {
        for piece in decoder.lost() {
            out.push((piece, decoder.running()));
        }
    }
    out
}

fn run(reply: &mut dyn Reply, pieces: &[(Piece, Running)]) -> String {
    let mut stream = String::new();
    for (piece, running) in pieces {
        reply.push(0, piece.clone(), running);
        stream += &reply.take();
    }
    assert!(reply.ended());
    stream
}

fn chat(stream: bool) -> ChatReply {
    let send = ChatSend { stream, usage: stream, timings: true, progress: true };
    ChatReply::new("chatcmpl-1".into(), 1, "demo".into(), send, 1).with_logprobs(true)
}

fn messages(stream: bool) -> MessagesReply {
    MessagesReply::new("msg_1".into(), "demo".into(), stream, false, "req_1".into())
}

fn responses(stream: bool) -> ResponsesReply {
    ResponsesReply::new(("resp_1".into(), 1, "demo".into()), stream, true, Template::default())
}

/// What a Chat document says.
fn chat_document(value: &Value) -> Said {
    let message = &value["choices"][0]["message"];
    let call = |c: &Value| {
        let arguments = c["function"]["arguments"].as_str().filter(|a| !a.is_empty()).unwrap_or("{}");
        (
            c["function"]["name"].as_str().unwrap_or_default().to_owned(),
            serde_json::from_str(arguments).unwrap_or_else(|_| arguments.into()),
        )
    };
    Said {
        reasoning: message["reasoning_content"].as_str().unwrap_or_default().to_owned(),
        content: message["content"].as_str().unwrap_or_default().to_owned(),
        calls: message["tool_calls"].as_array().map(|l| l.iter().map(call).collect()).unwrap_or_default(),
        ..Said::default()
    }
}

fn fragment() -> impl Strategy<Value = String> {
    prop_oneof![
        "[ a-zé绿😀\n<>/]{0,6}",
        Just("</think>\n\n".to_owned()),
        Just("</think>".to_owned()),
        Just("<think>\n".to_owned()),
        Just(
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>".to_owned()
        ),
        Just(
            "<tool_call>\n<function=g>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>\n"
                .to_owned()
        ),
        Just("<tool_call>\n<function=f>\n<parameter=a>\ncut".to_owned()),
        Just("<tool_call>".to_owned()),
        Just("STOP".to_owned()),
        Just("\n".to_owned()),
    ]
}

/// A value of a text parameter that ends where the reader ends it.
fn value() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[ a-z\"\\\\é绿😀\n\t]{0,6}",
        1 => Just("<".to_owned()),
        1 => Just("</param".to_owned()),
        1 => Just("</parameter> y".to_owned()),
        1 => Just("</function>".to_owned()),
        1 => Just("<parameter=a>\n".to_owned()),
        1 => Just("<tool_call>".to_owned()),
    ];
    prop::collection::vec(piece, 0..5).prop_map(|pieces| pieces.concat())
}

/// A call of the form that the grammar holds calls to, with what it says.
fn held_call() -> impl Strategy<Value = (String, (String, Value))> {
    let parameter = prop_oneof![
        2 => value().prop_map(|text| ("a", text.clone(), json!(text))),
        1 => any::<i32>().prop_map(|n| ("n", n.to_string(), json!(n))),
        1 => Just(("n", String::new(), Value::Null)),
        1 => Just(("other", "[1, \"x\"]".to_owned(), json!([1, "x"]))),
    ];
    let name = prop_oneof![Just("f"), Just("g")];
    (name, prop::collection::vec(parameter, 0..4)).prop_map(|(name, parameters)| {
        let mut said = serde_json::Map::new();
        let mut text = format!("<tool_call>\n<function={name}>\n");
        for (name, value, json) in parameters {
            text += &format!("<parameter={name}>\n{value}\n</parameter>\n");
            // An empty value that is no text is left out; of a repeated one the first has been told.
            if !json.is_null() {
                said.entry(name).or_insert(json);
            }
        }
        (text + "</function>\n</tool_call>", (name.to_owned(), Value::Object(said)))
    })
}

#[derive(Debug, Clone)]
enum Ending {
    Stop,
    Length,
    Constraint,
    Failed,
    Lost,
}

fn events(ids: &[u32], cuts: &[usize], ending: &Ending, admitted: bool) -> Vec<Event> {
    let mut events = Vec::new();
    if admitted {
        events.push(Event::Admitted { queued: Duration::ZERO, cached_tokens: 4, miss: None });
        events.push(Event::PromptProgress { done: 7, total: 10 });
    }
    let mut at = 0;
    for cut in cuts.iter().copied().chain(std::iter::repeat(1)) {
        if at >= ids.len() {
            break;
        }
        let end = (at + cut.max(1)).min(ids.len());
        let token = |id: &u32| Sampled { id: *id, logprob: Some(-0.1), ..Sampled::default() };
        events.push(Event::Tokens(ids[at..end].iter().map(token).collect()));
        at = end;
    }
    let (usage, timings) = (Usage::default(), Timings::default());
    let finished = |reason| Event::Finished { reason, usage, timings };
    match ending {
        Ending::Stop => events.push(finished(Finish::Stop(1))),
        Ending::Length => events.push(finished(Finish::Length)),
        Ending::Constraint => events.push(finished(Finish::Constraint)),
        Ending::Failed => events.push(Event::Failed(RequestError::Engine("a kernel failed".into()))),
        Ending::Lost => {}
    }
    events
}

fn ending() -> impl Strategy<Value = Ending> {
    prop_oneof![
        4 => Just(Ending::Stop),
        2 => Just(Ending::Length),
        1 => Just(Ending::Constraint),
        1 => Just(Ending::Failed),
        1 => Just(Ending::Lost),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn every_stream_is_well_formed_and_all_protocols_say_the_same(
        texts in prop::collection::vec(fragment(), 0..8),
        odd in prop::collection::vec((0usize..40, 0u32..4096), 0..4),
        cuts in prop::collection::vec(1usize..6, 0..30),
        ending in ending(),
        reasoning in any::<bool>(),
        admitted in any::<bool>(),
        stops in any::<bool>(),
        constrained in any::<bool>(),
        held in any::<bool>(),
    ) {
        let mut ids = FORMAT.tokenizer().encode(&texts.concat()).expect("ids");
        // Tokens from anywhere: halves of characters, specials, rows without a token.
        for (at, id) in odd {
            ids.insert(at.min(ids.len()), id);
        }
        let start = if reasoning { Start::Reasoning } else { Start::Content };
        let stops = if stops { vec!["STOP".to_owned()] } else { Vec::new() };
        let decode = DecodeOptions { held, ..options(start, stops, constrained) };
        let one = pieces(decode.clone(), events(&ids, &[], &ending, admitted));
        let pieces = pieces(decode, events(&ids, &cuts, &ending, admitted));

        let chat_stream = run(&mut chat(true), &pieces);
        let said = checker::chat(&chat_stream, 1, true).map_err(|e| TestCaseError::fail(format!("{e}\n{chat_stream}")))?.remove(0);
        let stream = run(&mut messages(true), &pieces);
        let from_messages = checker::messages(&stream).map_err(|e| TestCaseError::fail(format!("{e}\n{stream}")))?;
        let stream = run(&mut responses(true), &pieces);
        let (from_responses, last) =
            checker::responses(&stream).map_err(|e| TestCaseError::fail(format!("{e}\n{stream}")))?;

        // A failed Responses stream abandons the item that is open.
        if !said.failed {
            for other in [&from_messages, &from_responses] {
                prop_assert_eq!(&said.reasoning, &other.reasoning);
                prop_assert_eq!(&said.content, &other.content);
                prop_assert_eq!(&said.calls, &other.calls);
            }
            let finishes = match said.finish.as_str() {
                "tool_calls" => ("tool_use", "completed"),
                "length" => ("max_tokens", "incomplete"),
                _ if from_messages.finish == "stop_sequence" => ("stop_sequence", "completed"),
                _ => ("end_turn", "completed"),
            };
            prop_assert_eq!((from_messages.finish.as_str(), from_responses.finish.as_str()), finishes);
        }
        prop_assert_eq!(said.failed, from_messages.failed);
        prop_assert_eq!(said.failed, from_responses.failed);

        // One document says what the stream said.
        let mut plain = chat(false);
        prop_assert_eq!(run(&mut plain, &pieces), "");
        match plain.document() {
            Ok(document) => {
                let document = chat_document(&document);
                prop_assert_eq!((&document.reasoning, &document.content, &document.calls), (&said.reasoning, &said.content, &said.calls));
            }
            Err(_) => prop_assert!(said.failed),
        }
        let mut plain = messages(false);
        run(&mut plain, &pieces);
        prop_assert_eq!(plain.document().is_err(), said.failed);
        let mut plain = responses(false);
        run(&mut plain, &pieces);
        if let Ok(document) = plain.document() {
            prop_assert_eq!(document["output"].as_array().map(Vec::len), last["output"].as_array().map(Vec::len));
        }

        // However the engine cuts its rounds, the same is said.
        let other = run(&mut chat(true), &one);
        let other = checker::chat(&other, 1, true).map_err(TestCaseError::fail)?.remove(0);
        prop_assert_eq!((&other.reasoning, &other.content, &other.calls, &other.finish), (&said.reasoning, &said.content, &said.calls, &said.finish));
    }

    #[test]
    fn held_calls_are_told_as_they_are_made_and_say_the_same_in_all_protocols(
        calls in prop::collection::vec(held_call(), 1..4),
        content in "[a-z]{0,5}",
        keep in prop_oneof![1 => Just(1.0), 1 => 0.0..1.0f64],
        cuts in prop::collection::vec(1usize..9, 0..40),
    ) {
        let whole = keep == 1.0;
        let texts: Vec<&str> = calls.iter().map(|(text, _)| text.as_str()).collect();
        let ids = FORMAT.tokenizer().encode(&(content.clone() + &texts.join("\n"))).expect("ids");
        let ids = &ids[..(ids.len() as f64 * keep).ceil() as usize];
        let ending = if whole { Ending::Stop } else { Ending::Length };
        let decode = DecodeOptions { held: true, ..options(Start::Content, Vec::new(), false) };
        let pieces = pieces(decode, events(ids, &cuts, &ending, true));

        let stream = run(&mut chat(true), &pieces);
        let said = checker::chat(&stream, 1, true).map_err(|e| TestCaseError::fail(format!("{e}\n{stream}")))?.remove(0);
        let stream = run(&mut messages(true), &pieces);
        let from_messages = checker::messages(&stream).map_err(|e| TestCaseError::fail(format!("{e}\n{stream}")))?;
        let stream = run(&mut responses(true), &pieces);
        let (from_responses, last) =
            checker::responses(&stream).map_err(|e| TestCaseError::fail(format!("{e}\n{stream}")))?;
        for other in [&from_messages, &from_responses] {
            prop_assert_eq!((&said.content, &said.calls), (&other.content, &other.calls));
        }

        // Documents say what the streams said; of a call that was cut, an object has what is whole.
        let mut plain = chat(false);
        run(&mut plain, &pieces);
        let document = chat_document(&plain.document().expect("no failure"));
        prop_assert_eq!((&document.content, &document.calls), (&said.content, &said.calls));
        let mut plain = responses(false);
        run(&mut plain, &pieces);
        let document = plain.document().expect("no failure");
        let shown = |output: &Value| -> Vec<(Value, Value)> {
            let items = output["output"].as_array().cloned().unwrap_or_default();
            items.iter().map(|i| (i["arguments"].clone(), i["status"].clone())).collect()
        };
        prop_assert_eq!(shown(&document), shown(&last));
        let mut plain = messages(false);
        run(&mut plain, &pieces);
        let document = plain.document().expect("no failure");
        let inputs: Vec<&Value> = document["content"].as_array().into_iter().flatten()
            .filter(|b| b["type"] == "tool_use").map(|b| &b["input"]).collect();
        prop_assert_eq!(inputs.len(), said.calls.len());

        let expected: Vec<(String, Value)> = calls.into_iter().map(|(_, said)| said).collect();
        if whole {
            prop_assert_eq!(&said.calls, &expected);
            prop_assert_eq!((said.content.as_str(), said.finish.as_str()), (content.as_str(), "tool_calls"));
        } else {
            prop_assert_eq!(said.finish.as_str(), "length");
            prop_assert!(said.calls.len() <= expected.len());
        }
        for (i, (name, arguments)) in said.calls.iter().enumerate() {
            prop_assert_eq!(name, &expected[i].0);
            match arguments {
                // The last one was cut: its text begins as that of the whole one does.
                Value::String(text) => {
                    prop_assert!(!whole && i + 1 == said.calls.len());
                    let all = infernix_text::ParsedCall { name: String::new(), arguments: expected[i].1.as_object().cloned().expect("an object") };
                    // Half a character is shown as such.
                    let text = text.trim_end_matches('\u{fffd}');
                    prop_assert!(all.arguments_json().starts_with(text), "{text} of {}", all.arguments_json());
                    let whole = expected[i].1.as_object().expect("an object");
                    let input = inputs[i].as_object().expect("an object");
                    prop_assert!(input.iter().all(|(k, v)| whole.get(k) == Some(v)), "{input:?}");
                }
                // Or it was cut before anything was known of it.
                arguments if !whole && i + 1 == said.calls.len() && arguments == &json!({}) => {}
                arguments => prop_assert_eq!((arguments, inputs[i]), (&expected[i].1, arguments)),
            }
        }
    }

    #[test]
    fn no_order_of_pieces_makes_an_ill_formed_stream(
        order in prop::collection::vec(0u8..9, 0..20),
    ) {
        let tools = tools();
        let call = infernix_text::ParsedCall { name: "f".into(), arguments: serde_json::Map::new() };
        let mut pieces: Vec<(Piece, Running)> = Vec::new();
        for (i, kind) in order.iter().enumerate() {
            let piece = match kind {
                0 => Piece::Progress(crate::piece::Progress::default()),
                1 => Piece::Reasoning(format!("r{i}")),
                2 | 3 => Piece::Content(format!("c{i}"), Vec::new()),
                // Without a call that has begun these say nothing.
                6 => Piece::CallPart("{}".into()),
                7 => Piece::CallEnd(crate::tools::Call::new(format!("call_{i}"), &tools, &call), true),
                8 => {
                    let call = crate::tools::Call::new(format!("call_{i}"), &tools, &call);
                    pieces.push((Piece::CallBegin(call.clone()), Running::default()));
                    pieces.push((Piece::CallPart("{".into()), Running::default()));
                    pieces.push((Piece::CallPart("}".into()), Running::default()));
                    Piece::CallEnd(call, true)
                }
                _ => Piece::Call(crate::tools::Call::new(format!("call_{i}"), &tools, &call)),
            };
            pieces.push((piece, Running::default()));
        }
        pieces.push((Piece::Content("end".into(), Vec::new()), Running::default()));
        let end = crate::piece::End {
            finish: crate::piece::Finish::Stop,
            usage: crate::piece::TokenUsage::default(),
            timings: crate::piece::Times::default(),
            diagnostics: infernix_text::Diagnostics::default(),
            constraint: None,
        };
        pieces.push((Piece::End(Box::new(end)), Running::default()));
        // Nothing after an end is written.
        pieces.push((Piece::Content("late".into(), Vec::new()), Running::default()));
        let stream = run(&mut chat(true), &pieces);
        checker::chat(&stream, 1, true).map_err(|e| TestCaseError::fail(format!("{e}\n{stream}")))?;
        let stream = run(&mut messages(true), &pieces);
        checker::messages(&stream).map_err(|e| TestCaseError::fail(format!("{e}\n{stream}")))?;
        let stream = run(&mut responses(true), &pieces);
        checker::responses(&stream).map_err(|e| TestCaseError::fail(format!("{e}\n{stream}")))?;
    }
}
