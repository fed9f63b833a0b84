//! Chunks and documents of Chat Completions.
//!
//! Per choice: role, then reasoning, content, calls, finish, in this order and never back. After the last finish an
//! optional usage chunk, then `[DONE]`. A failure is one error event and nothing after it.

use super::ChatSend;
use crate::error::{ApiError, Wire};
use crate::piece::{End, Finish, Observed, Piece, Times, TokenLogprob, TokenUsage};
use crate::reply::{Frames, Reply, Running};
use crate::tools::{Call, Identity, Tools};
use serde_json::{Map, Value, json};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Phase {
    #[default]
    Start,
    Reasoning,
    Content,
    Calls,
    Finished,
}

#[derive(Debug, Default)]
struct Choice {
    phase: Phase,
    reasoning: String,
    content: String,
    logprobs: Vec<Value>,
    calls: Vec<Value>,
    /// The last call is being made: the kind of its body, and the name of its text there.
    making: Option<(&'static str, &'static str)>,
    finish: Option<&'static str>,
    constraint: Option<Observed>,
}

/// The state machine.
#[derive(Debug)]
pub(crate) struct ChatReply {
    id: String,
    created: u64,
    model: String,
    send: ChatSend,
    /// Puts a choice without text into the usage chunk, for clients that cannot read an empty list.
    usage_choice: bool,
    logprobs: bool,
    choices: Vec<Choice>,
    frames: Frames,
    usage: TokenUsage,
    times: Times,
    failed: Option<ApiError>,
    ended: bool,
}

impl ChatReply {
    pub(crate) fn new(id: String, created: u64, model: String, send: ChatSend, n: usize) -> Self {
        Self {
            id,
            created,
            model,
            send,
            usage_choice: false,
            logprobs: false,
            choices: (0..n).map(|_| Choice::default()).collect(),
            frames: Frames::default(),
            usage: TokenUsage::default(),
            times: Times::default(),
            failed: None,
            ended: false,
        }
    }

    pub(crate) fn with_usage_choice(mut self, on: bool) -> Self {
        self.usage_choice = on;
        self
    }

    pub(crate) fn with_logprobs(mut self, on: bool) -> Self {
        self.logprobs = on;
        self
    }

    fn chunk(&self, choices: Value) -> Map<String, Value> {
        let mut chunk = Map::from_iter([
            ("id".to_owned(), self.id.as_str().into()),
            ("object".to_owned(), "chat.completion.chunk".into()),
            ("created".to_owned(), self.created.into()),
            ("model".to_owned(), self.model.as_str().into()),
            ("choices".to_owned(), choices),
        ]);
        if self.send.usage {
            chunk.insert("usage".to_owned(), Value::Null);
        }
        chunk
    }

    fn delta(
        &mut self,
        index: usize,
        delta: Value,
        logprobs: Vec<Value>,
        finish: Option<&str>,
        timings: Option<Value>,
    ) {
        if !self.send.stream {
            return;
        }
        let logprobs =
            if logprobs.is_empty() { Value::Null } else { json!({"content": logprobs, "refusal": null}) };
        let mut choice = json!({
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish,
        });
        if let Some(observed) = self.choices[index].constraint {
            choice["constraint"] = observed.to_json();
        }
        let mut chunk = self.chunk(json!([choice]));
        if let Some(timings) = timings {
            chunk.insert("timings".to_owned(), timings);
        }
        self.frames.data(&Value::Object(chunk));
    }

    /// Enters a phase; false where that is not possible any more.
    fn enter(&mut self, index: usize, phase: Phase) -> bool {
        let Some(choice) = self.choices.get_mut(index) else { return false };
        if phase < choice.phase || choice.phase == Phase::Finished {
            return false;
        }
        let first = choice.phase == Phase::Start;
        choice.phase = phase;
        if first {
            self.delta(index, json!({"role": "assistant", "content": ""}), Vec::new(), None, None);
        }
        true
    }

    fn call(&mut self, index: usize, call: &Call, timings: Option<Value>) {
        let at = self.choices[index].calls.len();
        let mut value = call_value(call);
        self.choices[index].calls.push(value.clone());
        if let Value::Object(map) = &mut value {
            map.shift_insert(0, "index".to_owned(), at.into());
        }
        self.delta(index, json!({"tool_calls": [value]}), Vec::new(), None, timings);
    }

    fn call_begin(&mut self, index: usize, call: &Call, timings: Option<Value>) {
        let (kind, field) = match call.identity {
            Identity::Custom { .. } => ("custom", "input"),
            _ => ("function", "arguments"),
        };
        let bare = Call { arguments: Map::new(), json: String::new(), ..call.clone() };
        self.call(index, &bare, timings);
        self.choices[index].making = Some((kind, field));
    }

    fn call_part(&mut self, index: usize, text: &str, timings: Option<Value>) {
        let choice = &mut self.choices[index];
        let (Some((kind, field)), Some(at)) = (choice.making, choice.calls.len().checked_sub(1)) else {
            return;
        };
        if let Some(Value::String(whole)) =
            choice.calls[at].get_mut(kind).and_then(|body| body.get_mut(field))
        {
            whole.push_str(text);
        }
        let part = json!({"index": at, kind: {field: text}});
        self.delta(index, json!({"tool_calls": [part]}), Vec::new(), None, timings);
    }

    fn end(&mut self, index: usize, end: &End) {
        if !self.enter(index, Phase::Finished) {
            return;
        }
        self.usage.add_choice(end.usage);
        self.times = longest(self.times, end.timings);
        let choice = &mut self.choices[index];
        let finish = match end.finish {
            Finish::Length | Finish::Context => "length",
            _ if choice.calls.is_empty() => "stop",
            _ => "tool_calls",
        };
        choice.finish = Some(finish);
        choice.constraint = end.constraint;
        let last = self.choices.iter().all(|c| c.finish.is_some());
        let timings = (self.send.timings || last && !self.send.usage).then(|| self.times.to_json(self.usage));
        self.delta(index, json!({}), Vec::new(), Some(finish), timings);
        if last {
            self.finish();
        }
    }

    fn finish(&mut self) {
        self.ended = true;
        if !self.send.stream {
            return;
        }
        if self.send.usage {
            let choices = if self.usage_choice {
                json!([{"index": 0, "delta": {"content": ""}, "logprobs": null, "finish_reason": null}])
            } else {
                json!([])
            };
            let mut chunk = self.chunk(choices);
            chunk.insert("usage".to_owned(), self.usage.to_openai());
            chunk.insert("timings".to_owned(), self.times.to_json(self.usage));
            self.frames.data(&Value::Object(chunk));
        }
        self.frames.done();
    }
}

/// A call in a message.
fn call_value(call: &Call) -> Value {
    match &call.identity {
        Identity::Custom { name } => json!({
            "id": call.id, "type": "custom", "custom": {"name": name, "input": call.input()},
        }),
        Identity::Function { name, namespace } => json!({
            "id": call.id, "type": "function",
            "function": {"name": Tools::shown_name(namespace.as_deref(), name), "arguments": call.json},
        }),
        Identity::ServerSearch { name, .. } => json!({
            "id": call.id, "type": "function", "function": {"name": name, "arguments": call.json},
        }),
        Identity::ClientSearch => json!({
            "id": call.id, "type": "function", "function": {"name": "tool_search", "arguments": call.json},
        }),
    }
}

fn longest(a: Times, b: Times) -> Times {
    Times { queued: a.queued.max(b.queued), prompt: a.prompt.max(b.prompt), decode: a.decode.max(b.decode) }
}

impl Reply for ChatReply {
    fn push(&mut self, index: usize, piece: Piece, running: &Running) {
        if self.ended || index >= self.choices.len() {
            return;
        }
        let timings = self.send.timings.then(|| running.times.to_json(running.usage));
        match piece {
            Piece::Progress(progress) => {
                let started = self.choices.iter().any(|c| c.phase != Phase::Start);
                if self.send.stream && self.send.progress && index == 0 && !started {
                    let mut chunk = self.chunk(json!([]));
                    chunk.insert("prompt_progress".to_owned(), progress.to_json());
                    self.frames.data(&Value::Object(chunk));
                }
            }
            Piece::Reasoning(text) => {
                if self.enter(index, Phase::Reasoning) {
                    self.choices[index].reasoning.push_str(&text);
                    self.delta(index, json!({"reasoning_content": text}), Vec::new(), None, timings);
                }
            }
            Piece::Content(text, tokens) => {
                if self.enter(index, Phase::Content) {
                    let tokens: Vec<Value> = tokens.iter().map(TokenLogprob::to_json).collect();
                    self.choices[index].content.push_str(&text);
                    self.choices[index].logprobs.extend(tokens.iter().cloned());
                    let delta = if text.is_empty() { json!({}) } else { json!({"content": text}) };
                    self.delta(index, delta, tokens, None, timings);
                }
            }
            Piece::Call(call) => {
                if self.enter(index, Phase::Calls) {
                    self.choices[index].making = None;
                    self.call(index, &call, timings);
                }
            }
            Piece::CallBegin(call) => {
                if self.enter(index, Phase::Calls) {
                    self.call_begin(index, &call, timings);
                }
            }
            Piece::CallPart(text) => {
                if self.choices[index].phase == Phase::Calls {
                    self.call_part(index, &text, timings);
                }
            }
            Piece::CallEnd(..) => self.choices[index].making = None,
            // Chat knows no searches of the server's.
            Piece::Found(_) => {}
            Piece::End(end) => self.end(index, &end),
            Piece::Failed(error) => {
                if self.send.stream {
                    self.frames.error(&error, Wire::OpenAi, "");
                }
                self.failed = Some(error);
                self.ended = true;
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
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let mut choices = Vec::with_capacity(self.choices.len());
        for (index, choice) in self.choices.drain(..).enumerate() {
            let content = if choice.content.is_empty() && !choice.calls.is_empty() {
                Value::Null
            } else {
                choice.content.into()
            };
            let mut message = Map::from_iter([
                ("role".to_owned(), Value::from("assistant")),
                ("content".to_owned(), content),
                ("refusal".to_owned(), Value::Null),
            ]);
            if !choice.reasoning.is_empty() {
                message.insert("reasoning_content".to_owned(), choice.reasoning.into());
            }
            if !choice.calls.is_empty() {
                message.insert("tool_calls".to_owned(), Value::Array(choice.calls));
            }
            let logprobs = if self.logprobs {
                json!({"content": choice.logprobs, "refusal": null})
            } else {
                Value::Null
            };
            let mut value = json!({
                "index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish,
            });
            if let Some(observed) = choice.constraint {
                value["constraint"] = observed.to_json();
            }
            choices.push(value);
        }
        Ok(json!({
            "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": self.usage.to_openai(), "timings": self.times.to_json(self.usage),
        }))
    }
}
