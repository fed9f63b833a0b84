//! Events and documents of Responses.
//!
//! One item is open at a time: reasoning, message, calls. Every `.done` repeats what was sent, the terminal event
//! repeats the items. A failure is `response.failed`: clients overlook a bare `error`.

use super::input::mirror;
use crate::error::ApiError;
use crate::ids;
use crate::piece::{End, Finish, Found, Observed, Piece, TokenLogprob, TokenUsage};
use crate::reply::{Frames, Reply, Running};
use crate::tools::{Call, Identity};
use infernix_text::Tool;
use serde_json::{Map, Value, json};

/// What a response repeats of its request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Template {
    pub(crate) instructions: Option<String>,
    pub(crate) previous: Option<String>,
    pub(crate) metadata: Map<String, Value>,
    pub(crate) tools: Value,
    pub(crate) tool_choice: Value,
    /// `text` of the request: its format, above all.
    pub(crate) text: Value,
    pub(crate) parallel: bool,
    pub(crate) store: bool,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) temperature: Option<f64>,
    pub(crate) top_p: Option<f64>,
    pub(crate) effort: Option<String>,
    pub(crate) summary: Option<String>,
}

#[derive(Debug)]
enum Open {
    Reasoning {
        id: String,
        text: String,
    },
    Message {
        id: String,
        text: String,
        logprobs: Vec<Value>,
    },
    /// A call of a function, or one that takes free text (`custom`), as it was added.
    Call {
        id: String,
        item: Value,
        text: String,
        custom: bool,
    },
}

/// The state machine.
#[derive(Debug)]
pub(crate) struct ResponsesReply {
    id: String,
    created: u64,
    model: String,
    stream: bool,
    encrypted: bool,
    template: Template,
    sequence: u64,
    started: bool,
    open: Option<Open>,
    output: Vec<Value>,
    past_reasoning: bool,
    past_message: bool,
    client_calls: bool,
    status: &'static str,
    constraint: Option<Observed>,
    usage: Option<TokenUsage>,
    frames: Frames,
    failed: Option<ApiError>,
    ended: bool,
}

impl ResponsesReply {
    pub(crate) fn new(
        (id, created, model): (String, u64, String),
        stream: bool,
        encrypted: bool,
        template: Template,
    ) -> Self {
        Self {
            id,
            created,
            model,
            stream,
            encrypted,
            template,
            sequence: 0,
            started: false,
            open: None,
            output: Vec::new(),
            past_reasoning: false,
            past_message: false,
            client_calls: false,
            status: "in_progress",
            constraint: None,
            usage: None,
            frames: Frames::default(),
            failed: None,
            ended: false,
        }
    }

    /// The response as it stands.
    fn response(&self) -> Value {
        let t = &self.template;
        let incomplete = match self.status {
            "incomplete" => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        let error = match &self.failed {
            Some(error) => json!({"code": error_code(error), "message": error.message}),
            None => Value::Null,
        };
        let mut response = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": self.status,
            "background": false, "error": error, "incomplete_details": incomplete,
            "instructions": t.instructions, "max_output_tokens": t.max_tokens, "model": self.model,
            "output": self.output, "parallel_tool_calls": t.parallel, "previous_response_id": t.previous,
            "reasoning": {"effort": t.effort, "summary": t.summary}, "store": t.store,
            "temperature": t.temperature.unwrap_or(1.0), "text": t.text,
            "tool_choice": t.tool_choice, "tools": t.tools, "top_p": t.top_p.unwrap_or(1.0),
            "truncation": "disabled", "metadata": t.metadata,
            "usage": self.usage.map(TokenUsage::to_responses),
        });
        if let Some(observed) = self.constraint {
            response["constraint"] = observed.to_json();
        }
        response
    }

    fn event(&mut self, name: &str, fields: Value) {
        if !self.stream {
            return;
        }
        let mut event = Map::from_iter([
            ("type".to_owned(), Value::from(name)),
            ("sequence_number".to_owned(), self.sequence.into()),
        ]);
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        self.sequence += 1;
        self.frames.event(name, &Value::Object(event));
    }

    /// An event about the open item.
    fn item_event(&mut self, name: &str, id: &str, mut fields: Value) {
        fields["item_id"] = id.into();
        fields["output_index"] = self.output.len().into();
        self.event(name, fields);
    }

    fn start(&mut self) {
        if self.started {
            return;
        }
        self.started = true;
        if self.stream {
            let response = self.response();
            self.event("response.created", json!({"response": response}));
            self.event("response.in_progress", json!({"response": response}));
        }
    }

    fn added(&mut self, item: Value) {
        let index = self.output.len();
        self.event("response.output_item.added", json!({"output_index": index, "item": item}));
    }

    fn done(&mut self, item: Value) {
        let index = self.output.len();
        self.event("response.output_item.done", json!({"output_index": index, "item": item}));
        self.output.push(item);
    }

    fn reasoning(&mut self, delta: &str) {
        if self.past_reasoning {
            return;
        }
        if matches!(self.open, Some(Open::Call { .. })) {
            return;
        }
        if self.open.is_none() {
            let id = ids::fresh("rs_");
            let mut item = json!({
                "id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": [],
            });
            if self.encrypted {
                item["encrypted_content"] = Value::Null;
            }
            self.added(item);
            let part = json!({"type": "reasoning_text", "text": ""});
            self.item_event("response.content_part.added", &id, json!({"content_index": 0, "part": part}));
            self.open = Some(Open::Reasoning { id, text: String::new() });
        }
        if let Some(Open::Reasoning { id, text }) = &mut self.open {
            text.push_str(delta);
            let id = id.clone();
            self.item_event(
                "response.reasoning_text.delta",
                &id,
                json!({"content_index": 0, "delta": delta}),
            );
        }
    }

    fn content(&mut self, delta: &str, tokens: &[TokenLogprob]) {
        if self.past_message || delta.is_empty() && tokens.is_empty() {
            return;
        }
        if matches!(self.open, Some(Open::Reasoning { .. })) {
            self.close("completed");
        }
        self.past_reasoning = true;
        if self.open.is_none() {
            let id = ids::fresh("msg_");
            self.added(json!({
                "id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": [],
            }));
            let part = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
            self.item_event("response.content_part.added", &id, json!({"content_index": 0, "part": part}));
            self.open = Some(Open::Message { id, text: String::new(), logprobs: Vec::new() });
        }
        if let Some(Open::Message { id, text, logprobs }) = &mut self.open {
            text.push_str(delta);
            let tokens: Vec<Value> = tokens.iter().map(TokenLogprob::to_json).collect();
            logprobs.extend(tokens.iter().cloned());
            let id = id.clone();
            self.item_event(
                "response.output_text.delta",
                &id,
                json!({"content_index": 0, "delta": delta, "logprobs": tokens}),
            );
        }
    }

    /// Ends the open item.
    fn close(&mut self, status: &str) {
        match self.open.take() {
            None => {}
            Some(Open::Reasoning { id, text }) => {
                let part = json!({"type": "reasoning_text", "text": text});
                self.item_event(
                    "response.reasoning_text.done",
                    &id,
                    json!({"content_index": 0, "text": text}),
                );
                self.item_event("response.content_part.done", &id, json!({"content_index": 0, "part": part}));
                let mut item = json!({
                    "id": id, "type": "reasoning", "status": status, "summary": [], "content": [part],
                });
                if self.encrypted {
                    item["encrypted_content"] = mirror(&text).into();
                }
                self.done(item);
            }
            Some(Open::Message { id, text, logprobs }) => {
                let part =
                    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs});
                self.item_event(
                    "response.output_text.done",
                    &id,
                    json!({"content_index": 0, "text": text, "logprobs": logprobs}),
                );
                self.item_event("response.content_part.done", &id, json!({"content_index": 0, "part": part}));
                self.done(json!({
                    "id": id, "type": "message", "status": status, "role": "assistant", "content": [part],
                }));
            }
            Some(Open::Call { id, mut item, text, custom: true }) => {
                self.item_event("response.custom_tool_call_input.done", &id, json!({"input": text}));
                item["input"] = text.into();
                self.done(item);
            }
            Some(Open::Call { id, mut item, text, custom: false }) => {
                self.item_event(
                    "response.function_call_arguments.done",
                    &id,
                    json!({"arguments": text, "name": item["name"]}),
                );
                item["arguments"] = text.into();
                item["status"] = status.into();
                self.done(item);
            }
        }
    }

    fn call_begin(&mut self, call: &Call) {
        self.close("completed");
        self.past_reasoning = true;
        self.past_message = true;
        self.client_calls |= !matches!(call.identity, Identity::ServerSearch { .. });
        match &call.identity {
            Identity::Custom { name } => {
                let id = ids::fresh("ctc_");
                let item = json!({
                    "id": id, "type": "custom_tool_call", "call_id": call.id, "name": name, "input": "",
                });
                self.added(item.clone());
                self.open = Some(Open::Call { id, item, text: String::new(), custom: true });
            }
            Identity::ClientSearch | Identity::ServerSearch { .. } => {
                let execution = if call.identity == Identity::ClientSearch { "client" } else { "server" };
                let item = |status: &str| {
                    json!({
                        "id": format!("tsc_{}", call.id), "type": "tool_search_call", "call_id": call.id,
                        "status": status, "execution": execution, "arguments": call.arguments,
                    })
                };
                self.added(item("in_progress"));
                self.done(item("completed"));
            }
            Identity::Function { name, namespace } => {
                let id = ids::fresh("fc_");
                let mut item = json!({
                    "id": id, "type": "function_call", "status": "in_progress", "arguments": "",
                    "call_id": call.id, "name": name,
                });
                if let Some(namespace) = namespace {
                    item["namespace"] = namespace.as_str().into();
                }
                self.added(item.clone());
                self.open = Some(Open::Call { id, item, text: String::new(), custom: false });
            }
        }
    }

    fn call_part(&mut self, delta: &str) {
        if let Some(Open::Call { id, text, custom, .. }) = &mut self.open {
            text.push_str(delta);
            let (id, custom) = (id.clone(), *custom);
            let name = if custom {
                "response.custom_tool_call_input.delta"
            } else {
                "response.function_call_arguments.delta"
            };
            self.item_event(name, &id, json!({"delta": delta}));
        }
    }

    fn call_end(&mut self, status: &str) {
        if matches!(self.open, Some(Open::Call { .. })) {
            self.close(status);
        }
    }

    fn found(&mut self, found: &Found) {
        self.close("completed");
        let tools: Vec<Value> = found.tools.iter().flatten().map(found_tool).collect();
        let id = ids::fresh("tso_");
        let item = |status: &str, tools: Value| {
            json!({
                "id": id, "type": "tool_search_output", "call_id": found.call, "status": status,
                "execution": "server", "tools": tools,
            })
        };
        self.added(item("in_progress", json!([])));
        self.done(item("completed", tools.into()));
        self.past_reasoning = self.client_calls;
        self.past_message = self.client_calls;
    }

    fn end(&mut self, end: &End) {
        self.usage = Some(end.usage);
        self.constraint = end.constraint;
        let cut = matches!(end.finish, Finish::Length | Finish::Context);
        self.status = if cut { "incomplete" } else { "completed" };
        self.close(self.status);
        self.terminal();
    }

    fn terminal(&mut self) {
        self.ended = true;
        if self.stream {
            let response = self.response();
            self.event(&format!("response.{}", self.status), json!({"response": response}));
        }
    }
}

/// The published type knows a list of codes; what agents read beside it stays.
fn error_code(error: &ApiError) -> &'static str {
    match (error.code, error.status) {
        ("context_length_exceeded", _) => "context_length_exceeded",
        (_, 429) => "rate_limit_exceeded",
        (_, ..500) => "invalid_prompt",
        _ => "server_error",
    }
}

/// A found tool as Responses declares tools.
fn found_tool(tool: &Tool) -> Value {
    let mut map = Map::from_iter([("type".to_owned(), Value::from("function"))]);
    if let Some(Value::Object(function)) = tool.as_map().get("function") {
        map.extend(function.clone());
    }
    map.insert("strict".to_owned(), false.into());
    map.insert("defer_loading".to_owned(), true.into());
    Value::Object(map)
}

impl Reply for ResponsesReply {
    fn push(&mut self, _: usize, piece: Piece, _: &Running) {
        if self.ended {
            return;
        }
        self.start();
        match piece {
            Piece::Progress(_) => {}
            Piece::Reasoning(text) => self.reasoning(&text),
            Piece::Content(text, tokens) => self.content(&text, &tokens),
            Piece::Call(call) => {
                self.call_begin(&call);
                let text = if let Identity::Custom { .. } = call.identity { call.input() } else { call.json };
                self.call_part(&text);
                self.call_end("completed");
            }
            Piece::CallBegin(call) => self.call_begin(&call),
            Piece::CallPart(text) => self.call_part(&text),
            Piece::CallEnd(_, whole) => self.call_end(if whole { "completed" } else { "incomplete" }),
            Piece::Found(found) => self.found(&found),
            Piece::End(end) => self.end(&end),
            Piece::Failed(error) => {
                self.open = None;
                self.failed = Some(error);
                self.status = "failed";
                self.terminal();
            }
        }
    }

    fn take(&mut self) -> String {
        self.frames.take()
    }

    fn ended(&self) -> bool {
        self.ended
    }

    fn document(&mut self) -> Result<Value, ApiError> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => Ok(self.response()),
        }
    }
}
