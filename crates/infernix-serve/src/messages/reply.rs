//! Events and documents of Messages.
//!
//! One block is open at a time: thinking, text, calls, in this order; a search that runs here may stand between. Then
//! one `message_delta` and `message_stop`, or one `error`.

use super::signature;
use crate::error::{ApiError, Wire};
use crate::piece::{End, Finish, Found, Observed, Piece, TokenUsage};
use crate::reply::{Frames, Reply, Running};
use crate::tools::{Call, Identity, Tools};
use serde_json::{Value, json};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Thinking,
    Text,
    Call,
}

/// The state machine.
#[derive(Debug)]
pub(crate) struct MessagesReply {
    id: String,
    model: String,
    stream: bool,
    omit_thinking: bool,
    request_id: String,
    started: bool,
    open: Option<Open>,
    /// Text of the open block.
    text: String,
    /// The open block of a call, with what is known of its input.
    call: Value,
    /// Blocks that are complete.
    blocks: Vec<Value>,
    /// No reasoning may follow: text or calls were sent since the last search.
    past_thinking: bool,
    /// No text may follow.
    past_text: bool,
    client_calls: bool,
    usage: TokenUsage,
    stop: Option<(&'static str, Option<String>)>,
    constraint: Option<Observed>,
    frames: Frames,
    failed: Option<ApiError>,
    ended: bool,
}

impl MessagesReply {
    pub(crate) fn new(
        id: String,
        model: String,
        stream: bool,
        omit_thinking: bool,
        request_id: String,
    ) -> Self {
        Self {
            id,
            model,
            stream,
            omit_thinking,
            request_id,
            started: false,
            open: None,
            text: String::new(),
            call: Value::Null,
            blocks: Vec::new(),
            past_thinking: false,
            past_text: false,
            client_calls: false,
            usage: TokenUsage::default(),
            stop: None,
            constraint: None,
            frames: Frames::default(),
            failed: None,
            ended: false,
        }
    }

    fn event(&mut self, name: &str, value: &Value) {
        if self.stream {
            self.frames.event(name, value);
        }
    }

    fn message(&self, content: &[Value], usage: Value) -> Value {
        let (reason, sequence) = match &self.stop {
            Some((reason, sequence)) => {
                (Value::from(*reason), sequence.clone().map_or(Value::Null, Value::from))
            }
            None => (Value::Null, Value::Null),
        };
        let mut message = json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": sequence, "usage": usage,
        });
        if let Some(observed) = self.constraint {
            message["constraint"] = observed.to_json();
        }
        message
    }

    fn start(&mut self, usage: TokenUsage) {
        if self.started {
            return;
        }
        self.started = true;
        let usage = TokenUsage { output: 0, ..usage };
        let message = self.message(&[], usage.to_messages());
        self.event("message_start", &json!({"type": "message_start", "message": message}));
    }

    fn block_start(&mut self, block: &Value) {
        let index = self.blocks.len();
        self.event(
            "content_block_start",
            &json!({"type": "content_block_start", "index": index, "content_block": block}),
        );
    }

    fn block_delta(&mut self, delta: &Value) {
        let index = self.blocks.len();
        self.event(
            "content_block_delta",
            &json!({"type": "content_block_delta", "index": index, "delta": delta}),
        );
    }

    /// Ends the block whose whole value is given.
    fn block_stop(&mut self, block: Value) {
        let index = self.blocks.len();
        self.event("content_block_stop", &json!({"type": "content_block_stop", "index": index}));
        self.blocks.push(block);
    }

    fn close(&mut self) {
        let text = std::mem::take(&mut self.text);
        match self.open.take() {
            None => {}
            Some(Open::Text) => self.block_stop(json!({"type": "text", "text": text})),
            Some(Open::Call) => {
                let block = self.call.take();
                self.block_stop(block);
            }
            Some(Open::Thinking) => {
                let sign =
                    if self.omit_thinking { signature::omitted(&text) } else { signature::visible(&text) };
                self.block_delta(&json!({"type": "signature_delta", "signature": sign}));
                let shown = if self.omit_thinking { String::new() } else { text };
                self.block_stop(json!({"type": "thinking", "thinking": shown, "signature": sign}));
            }
        }
    }

    fn thinking(&mut self, text: &str) {
        if self.past_thinking {
            return;
        }
        if self.open != Some(Open::Thinking) {
            self.close();
            self.block_start(&json!({"type": "thinking", "thinking": "", "signature": ""}));
            self.open = Some(Open::Thinking);
        }
        self.text.push_str(text);
        if !self.omit_thinking {
            self.block_delta(&json!({"type": "thinking_delta", "thinking": text}));
        }
    }

    fn content(&mut self, text: &str) {
        if text.is_empty() || self.past_text {
            return;
        }
        if self.open != Some(Open::Text) {
            self.close();
            self.block_start(&json!({"type": "text", "text": ""}));
            self.open = Some(Open::Text);
        }
        self.past_thinking = true;
        self.text.push_str(text);
        self.block_delta(&json!({"type": "text_delta", "text": text}));
    }

    fn call_begin(&mut self, call: &Call) {
        self.close();
        self.past_thinking = true;
        self.past_text = true;
        let (kind, name, id) = match &call.identity {
            Identity::ServerSearch { name, .. } => {
                ("server_tool_use", name.clone(), call.id.replace("toolu_", "srvtoolu_"))
            }
            Identity::Function { name, namespace } => {
                ("tool_use", Tools::shown_name(namespace.as_deref(), name), call.id.clone())
            }
            Identity::Custom { name } => ("tool_use", name.clone(), call.id.clone()),
            Identity::ClientSearch => ("tool_use", "tool_search".to_owned(), call.id.clone()),
        };
        self.client_calls |= kind == "tool_use";
        let block = json!({"type": kind, "id": id, "name": name, "input": {}});
        self.block_start(&block);
        self.call = block;
        self.open = Some(Open::Call);
    }

    fn call_part(&mut self, json: &str) {
        if self.open == Some(Open::Call) {
            self.block_delta(&json!({"type": "input_json_delta", "partial_json": json}));
        }
    }

    fn call_end(&mut self, call: &Call) {
        if self.open == Some(Open::Call) {
            self.call["input"] = Value::Object(call.arguments.clone());
            self.close();
        }
    }

    fn found(&mut self, found: &Found) {
        self.close();
        let content = match &found.tools {
            Ok(tools) => {
                let references: Vec<Value> =
                    tools.iter().map(|t| json!({"type": "tool_reference", "tool_name": t.name()})).collect();
                json!({"type": "tool_search_tool_search_result", "tool_references": references})
            }
            Err(code) => json!({"type": "tool_search_tool_result_error", "error_code": code}),
        };
        let id = found.call.replace("toolu_", "srvtoolu_");
        let block = json!({"type": "tool_search_tool_result", "tool_use_id": id, "content": content});
        self.block_start(&block);
        self.block_stop(block);
        self.past_thinking = self.client_calls;
        self.past_text = self.client_calls;
    }

    fn end(&mut self, end: &End) {
        self.close();
        self.usage = end.usage;
        self.constraint = end.constraint;
        self.stop = Some(match &end.finish {
            Finish::Stop | Finish::Calls if self.client_calls => ("tool_use", None),
            Finish::Stop | Finish::Calls => ("end_turn", None),
            Finish::StopString(text) => ("stop_sequence", Some(text.clone())),
            Finish::Length => ("max_tokens", None),
            Finish::Context => ("model_context_window_exceeded", None),
        });
        let message = self.message(&[], Value::Null);
        let delta = json!({"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]});
        let usage = self.usage.to_messages();
        let mut event = json!({"type": "message_delta", "delta": delta, "usage": usage});
        if let Some(observed) = self.constraint {
            event["constraint"] = observed.to_json();
        }
        self.event("message_delta", &event);
        self.event("message_stop", &json!({"type": "message_stop"}));
        self.ended = true;
    }
}

impl Reply for MessagesReply {
    fn push(&mut self, _: usize, piece: Piece, running: &Running) {
        if self.ended {
            return;
        }
        if let Piece::Failed(error) = piece {
            if self.stream {
                let request_id = std::mem::take(&mut self.request_id);
                self.frames.error(&error, Wire::Anthropic, &request_id);
            }
            self.failed = Some(error);
            self.ended = true;
            return;
        }
        self.start(running.usage);
        match piece {
            Piece::Progress(_) | Piece::Failed(_) => {}
            Piece::Reasoning(text) => self.thinking(&text),
            Piece::Content(text, _) => self.content(&text),
            Piece::Call(call) => {
                self.call_begin(&call);
                if !call.arguments.is_empty() {
                    self.call_part(&call.json);
                }
                self.call_end(&call);
            }
            Piece::CallBegin(call) => self.call_begin(&call),
            Piece::CallPart(json) => self.call_part(&json),
            Piece::CallEnd(call, _) => self.call_end(&call),
            Piece::Found(found) => self.found(&found),
            Piece::End(end) => self.end(&end),
        }
    }

    fn take(&mut self) -> String {
        self.frames.take()
    }

    fn ended(&self) -> bool {
        self.ended
    }

    fn document(&mut self) -> Result<Value, ApiError> {
        match self.failed.take() {
            Some(error) => Err(error),
            None => Ok(self.message(&self.blocks, self.usage.to_messages())),
        }
    }

    fn ping(&self) -> &'static str {
        if self.started && !self.ended { "event: ping\ndata: {\"type\": \"ping\"}\n\n" } else { "" }
    }
}
