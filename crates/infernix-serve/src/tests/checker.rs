//! Reads streams as a strict client would, and says what they said. The rules are those of the protocols' documents and
//! of what agents accept: order of phases, indexes, repeated text, terminal events.

use serde_json::{Value, json};
use std::collections::HashSet;

/// What an answer said.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Said {
    pub(super) reasoning: String,
    pub(super) content: String,
    /// Name and arguments of each call.
    pub(super) calls: Vec<(String, Value)>,
    pub(super) finish: String,
    pub(super) usage: Option<Value>,
    pub(super) failed: bool,
}

type Checked<T> = Result<T, String>;

fn need(ok: bool, what: impl Into<String>) -> Checked<()> {
    if ok { Ok(()) } else { Err(what.into()) }
}

/// Events of a stream: name and data.
pub(super) fn frames(stream: &str) -> Checked<Vec<(Option<String>, String)>> {
    need(stream.is_empty() || stream.ends_with("\n\n"), "torn frame")?;
    need(!stream.contains('\r'), "carriage return")?;
    let mut events = Vec::new();
    for block in stream.split("\n\n") {
        let (mut name, mut data) = (None, None);
        for line in block.lines().filter(|l| !l.starts_with(':')) {
            let (field, value) = line.split_once(": ").ok_or_else(|| format!("line {line:?}"))?;
            match field {
                "event" => need(name.replace(value.to_owned()).is_none(), "two names")?,
                "data" => need(data.replace(value.to_owned()).is_none(), "two data lines")?,
                other => return Err(format!("field {other}")),
            }
        }
        match (name, data) {
            (name, Some(data)) => events.push((name, data)),
            (Some(name), None) => return Err(format!("event {name} without data")),
            (None, None) => {}
        }
    }
    Ok(events)
}

fn parse(data: &str) -> Checked<Value> {
    serde_json::from_str(data).map_err(|e| format!("{e}: {data}"))
}

/// Arguments of a call: an object, or a text where it may have been cut; nothing is an object without members.
fn arguments_of(text: &str, cut: bool) -> Checked<Value> {
    match parse(text) {
        _ if cut && text.is_empty() => Ok(json!({})),
        Ok(value) if value.is_object() => Ok(value),
        Ok(value) if !cut => Err(format!("arguments are no object: {value}")),
        Err(error) if !cut => Err(error),
        _ => Ok(json!(text)),
    }
}

fn text<'v>(value: &'v Value, name: &str) -> Checked<&'v str> {
    value[name].as_str().ok_or_else(|| format!("{name} of {value}"))
}

#[derive(Default)]
struct Choice {
    phase: u8,
    said: Said,
    arguments: Vec<String>,
    custom: Vec<bool>,
}

/// A Chat Completions stream of `n` choices.
pub(super) fn chat(stream: &str, n: usize, usage: bool) -> Checked<Vec<Said>> {
    let mut choices: Vec<Choice> = (0..n).map(|_| Choice::default()).collect();
    let mut head: Option<Value> = None;
    let (mut done, mut failed, mut used) = (false, false, None);
    let mut processed = 0;
    let mut call_ids = HashSet::new();
    for (name, data) in frames(stream)? {
        need(name.is_none(), "a named event")?;
        need(!done && !failed, "something after the end")?;
        if data == "[DONE]" {
            need(choices.iter().all(|c| c.phase == 5), "done before every finish")?;
            need(used.is_some() == usage, "usage")?;
            done = true;
            continue;
        }
        let event = parse(&data)?;
        if let Some(error) = event.get("error") {
            text(error, "message")?;
            text(error, "type")?;
            failed = true;
            continue;
        }
        need(event["object"] == "chat.completion.chunk", "object")?;
        let this = json!([event["id"], event["created"], event["model"]]);
        need(head.get_or_insert_with(|| this.clone()) == &this, "changing head")?;
        need(used.is_none(), "something after usage")?;
        if let Some(progress) = event.get("prompt_progress") {
            let now = progress["processed"].as_u64().ok_or("processed")?;
            need(now >= processed && choices.iter().all(|c| c.phase == 0), "progress order")?;
            processed = now;
        }
        if usage {
            need(event.get("usage").is_some(), "a chunk without usage")?;
        } else {
            need(event.get("usage").is_none(), "unasked usage")?;
        }
        if !event["usage"].is_null() {
            need(choices.iter().all(|c| c.phase == 5), "usage before finish")?;
            let sum = event["usage"]["prompt_tokens"].as_u64().unwrap_or(0)
                + event["usage"]["completion_tokens"].as_u64().unwrap_or(0);
            need(event["usage"]["total_tokens"] == sum, "usage sum")?;
            used = Some(event["usage"].clone());
            continue;
        }
        for value in event["choices"].as_array().ok_or("choices")? {
            let index = value["index"].as_u64().ok_or("index")? as usize;
            let choice = choices.get_mut(index).ok_or("choice index")?;
            chat_choice(choice, value, &mut call_ids)?;
        }
    }
    need(done || failed, "no end")?;
    let mut out = Vec::new();
    for choice in choices {
        let mut said = choice.said;
        for (i, arguments) in choice.arguments.iter().enumerate() {
            // Only the last call of an answer that was cut may be half of one.
            let cut = (failed || said.finish == "length") && i + 1 == choice.arguments.len();
            let value = if choice.custom[i] { json!(arguments) } else { arguments_of(arguments, cut)? };
            said.calls[i].1 = value;
        }
        said.usage.clone_from(&used);
        said.failed = failed;
        if !failed {
            need(said.finish != "stop" || said.calls.is_empty(), "stop after calls")?;
            need(said.finish != "tool_calls" || !said.calls.is_empty(), "tool_calls without calls")?;
            let empty = said.reasoning.is_empty() && said.content.is_empty() && said.calls.is_empty();
            need(said.finish == "length" || !empty, "empty turn")?;
        }
        out.push(said);
    }
    Ok(out)
}

fn chat_choice(choice: &mut Choice, value: &Value, ids: &mut HashSet<String>) -> Checked<()> {
    need(choice.phase < 5, "something after finish")?;
    let delta = value["delta"].as_object().ok_or("delta")?;
    if delta.contains_key("role") {
        need(choice.phase == 0 && delta["content"] == "", "role")?;
        choice.phase = 1;
    }
    need(choice.phase > 0, "no role first")?;
    let mut enter = |phase: u8| {
        let ok = phase >= choice.phase;
        choice.phase = phase;
        need(ok, "phase goes back")
    };
    if let Some(text) = delta.get("reasoning_content") {
        enter(2)?;
        let text = text.as_str().filter(|t| !t.is_empty()).ok_or("empty reasoning")?;
        choice.said.reasoning.push_str(text);
    }
    if let Some(text) = delta.get("content").filter(|_| !delta.contains_key("role")) {
        enter(3)?;
        choice.said.content.push_str(text.as_str().filter(|t| !t.is_empty()).ok_or("empty content")?);
    }
    if let Some(calls) = delta.get("tool_calls") {
        enter(4)?;
        for call in calls.as_array().ok_or("tool_calls")? {
            let index = call["index"].as_u64().ok_or("call index")? as usize;
            let known = choice.custom.get(index).map(|custom| if *custom { "custom" } else { "function" });
            let kind = call["type"].as_str().or(known).unwrap_or("function");
            let body = &call[kind];
            let arguments = body["arguments"].as_str().or(body["input"].as_str()).unwrap_or_default();
            if index == choice.arguments.len() {
                need(ids.insert(text(call, "id")?.to_owned()), "call id twice")?;
                choice.said.calls.push((text(body, "name")?.to_owned(), Value::Null));
                choice.arguments.push(arguments.to_owned());
                choice.custom.push(kind == "custom");
            } else {
                need(index + 1 == choice.arguments.len() && call.get("id").is_none(), "call index")?;
                choice.arguments[index].push_str(arguments);
            }
        }
    }
    match &value["finish_reason"] {
        Value::Null => {}
        Value::String(finish) => {
            need(delta.is_empty() && ["stop", "length", "tool_calls"].contains(&finish.as_str()), "finish")?;
            choice.said.finish.clone_from(finish);
            choice.phase = 5;
        }
        other => return Err(format!("finish_reason {other}")),
    }
    Ok(())
}

/// A Messages stream.
pub(super) fn messages(stream: &str) -> Checked<Said> {
    let mut said = Said::default();
    let mut started = false;
    let mut open: Option<(String, String)> = None;
    let mut signed = false;
    let (mut blocks, mut delta, mut ended) = (0, false, false);
    let mut called = false;
    let mut cut = false;
    for (name, data) in frames(stream)? {
        let event = parse(&data)?;
        let name = name.ok_or("no name")?;
        need(event["type"] == name.as_str() && !ended, "name or something after the end")?;
        match name.as_str() {
            "ping" => need(started, "early ping")?,
            "error" => {
                text(&event["error"], "message")?;
                (said.failed, ended) = (true, true);
            }
            "message_start" => {
                let m = &event["message"];
                need(!started && m["content"] == json!([]) && m["stop_reason"].is_null(), "message_start")?;
                need(m["usage"]["input_tokens"].is_u64(), "usage at the start")?;
                started = true;
            }
            "content_block_start" => {
                need(started && open.is_none() && !delta && event["index"] == blocks, "block start")?;
                let block = &event["content_block"];
                let kind = text(block, "type")?;
                match kind {
                    "text" => need(block["text"] == "" && !called, "text start")?,
                    "thinking" => {
                        need(
                            block["thinking"] == "" && block["signature"] == "" && !called,
                            "thinking start",
                        )?;
                    }
                    "tool_use" | "server_tool_use" => {
                        need(block["input"] == json!({}), "input start")?;
                        called |= kind == "tool_use";
                        said.calls.push((text(block, "name")?.to_owned(), Value::Null));
                    }
                    _ => need(kind.ends_with("_tool_result"), "block kind")?,
                }
                open = Some((kind.to_owned(), String::new()));
                signed = false;
            }
            "content_block_delta" => {
                need(event["index"] == blocks && !signed, "delta place")?;
                let (kind, joined) = open.as_mut().ok_or("no block")?;
                let d = &event["delta"];
                match (kind.as_str(), text(d, "type")?) {
                    ("text", "text_delta") => joined.push_str(text(d, "text")?),
                    ("thinking", "thinking_delta") => joined.push_str(text(d, "thinking")?),
                    ("thinking", "signature_delta") => signed = !text(d, "signature")?.is_empty(),
                    ("tool_use" | "server_tool_use", "input_json_delta") => {
                        joined.push_str(text(d, "partial_json")?);
                    }
                    (kind, d) => return Err(format!("{d} in {kind}")),
                }
            }
            "content_block_stop" => {
                need(event["index"] == blocks, "stop place")?;
                let (kind, joined) = open.take().ok_or("no block")?;
                match kind.as_str() {
                    "text" => {
                        need(!joined.is_empty(), "empty text")?;
                        said.content.push_str(&joined);
                    }
                    "thinking" => {
                        need(signed, "no signature")?;
                        said.reasoning.push_str(&joined);
                    }
                    "tool_use" | "server_tool_use" => {
                        need(!cut, "a cut call and another one")?;
                        let value = if joined.is_empty() { json!({}) } else { arguments_of(&joined, true)? };
                        cut = !value.is_object();
                        said.calls.last_mut().ok_or("no call")?.1 = value;
                    }
                    _ => {}
                }
                blocks += 1;
            }
            "message_delta" => {
                need(started && open.is_none() && !delta, "message_delta")?;
                said.finish = text(&event["delta"], "stop_reason")?.to_owned();
                need(
                    (said.finish == "stop_sequence") == event["delta"]["stop_sequence"].is_string(),
                    "sequence",
                )?;
                need(said.finish != "tool_use" || called, "tool_use without a call")?;
                need(
                    !cut || said.finish.starts_with("max_tokens") || said.finish.starts_with("model_"),
                    "cut",
                )?;
                need(said.finish != "end_turn" || !called && blocks > 0, "end_turn")?;
                said.usage = Some(event["usage"].clone());
                delta = true;
            }
            "message_stop" => {
                need(delta, "message_stop")?;
                ended = true;
            }
            other => return Err(format!("event {other}")),
        }
    }
    need(ended, "no end")?;
    Ok(said)
}

/// A Responses stream; also gives the final response.
pub(super) fn responses(stream: &str) -> Checked<(Said, Value)> {
    let mut said = Said::default();
    let mut state = 0;
    let mut items: Vec<Value> = Vec::new();
    let mut open: Option<(Value, String, bool)> = None;
    let mut last = Value::Null;
    for (sequence, (name, data)) in frames(stream)?.into_iter().enumerate() {
        let event = parse(&data)?;
        let name = name.ok_or("no name")?;
        need(
            event["type"] == name.as_str() && event["sequence_number"] == sequence && state < 3,
            "name or sequence",
        )?;
        match name.strip_prefix("response.").ok_or("prefix")? {
            "created" => {
                need(state == 0 && event["response"]["output"] == json!([]), "created")?;
                state = 1;
            }
            "in_progress" => {
                need(state == 1, "in_progress")?;
                state = 2;
            }
            end @ ("completed" | "incomplete" | "failed") => {
                let response = &event["response"];
                need(response["status"] == end && (end == "failed" || open.is_none()), "terminal")?;
                need(end == "failed" || response["output"] == json!(items), "output differs")?;
                need((end == "failed") == response["error"].is_object(), "error")?;
                need(end == "failed" || response["usage"].is_object(), "usage")?;
                said.finish = end.to_owned();
                said.failed = end == "failed";
                said.usage = Some(response["usage"].clone());
                last = response.clone();
                state = 3;
            }
            "output_item.added" => {
                need(state == 2 && open.is_none() && event["output_index"] == items.len(), "added")?;
                let item = event["item"].clone();
                need(items.iter().all(|i| i["id"] != item["id"]), "item id twice")?;
                open = Some((item, String::new(), false));
            }
            "output_item.done" => {
                let (item, joined, _) = open.take().ok_or("nothing open")?;
                let done = event["item"].clone();
                need(done["id"] == item["id"] && event["output_index"] == items.len(), "done")?;
                match text(&done, "type")? {
                    "message" => {
                        need(done["content"][0]["text"] == joined.as_str(), "message text")?;
                        said.content.push_str(&joined);
                    }
                    "reasoning" => {
                        need(done["content"][0]["text"] == joined.as_str(), "reasoning text")?;
                        said.reasoning.push_str(&joined);
                    }
                    "function_call" => {
                        need(
                            done["arguments"] == joined.as_str() && done["call_id"] == item["call_id"],
                            "call",
                        )?;
                        let arguments = arguments_of(&joined, done["status"] == "incomplete")?;
                        said.calls.push((text(&done, "name")?.to_owned(), arguments));
                    }
                    "custom_tool_call" => {
                        need(done["input"] == joined.as_str(), "input")?;
                        said.calls.push((text(&done, "name")?.to_owned(), json!(joined)));
                    }
                    _ => {}
                }
                items.push(done);
            }
            inner => {
                let (item, joined, done) = open.as_mut().ok_or("nothing open")?;
                need(event["item_id"] == item["id"] && event["output_index"] == items.len(), "item id")?;
                if inner.ends_with(".delta") {
                    need(!*done, "delta after done")?;
                    joined.push_str(text(&event, "delta")?);
                } else if inner.ends_with(".done") && !inner.starts_with("content_part") {
                    let field = ["text", "arguments", "input"].iter().find_map(|f| event.get(*f));
                    need(field == Some(&json!(joined)), "repeated text")?;
                    *done = true;
                }
                if inner.starts_with("output_text") {
                    need(event["logprobs"].is_array(), "logprobs")?;
                }
            }
        }
    }
    need(state == 3, "no end")?;
    Ok((said, last))
}
