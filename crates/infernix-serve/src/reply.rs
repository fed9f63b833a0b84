//! What every protocol's state machine has in common.
//!
//! A machine takes pieces in any order and writes frames that its protocol's grammar allows: what cannot stand where it
//! comes is not written. The same machine serves streams (frames) and plain answers (one document).

use crate::error::{ApiError, Wire};
use crate::piece::{Piece, Times, TokenUsage};
use serde_json::Value;

/// Counts so far, beside a piece.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Running {
    pub(crate) usage: TokenUsage,
    pub(crate) times: Times,
}

/// A protocol's state machine for one response.
pub(crate) trait Reply: Send {
    /// Takes the next piece of a choice.
    fn push(&mut self, choice: usize, piece: Piece, running: &Running);

    /// Frames written since the last call.
    fn take(&mut self) -> String;

    /// Whether nothing more can be written.
    fn ended(&self) -> bool;

    /// The whole answer as one document, or why there is none. Called once, after the end.
    fn document(&mut self) -> Result<Value, ApiError>;

    /// A stand-in event where nothing else is to be said, besides the comment; empty for most protocols.
    fn ping(&self) -> &'static str {
        ""
    }
}

/// Server-sent events being written.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    out: String,
}

impl Frames {
    /// An event without a name.
    pub(crate) fn data(&mut self, value: &Value) {
        self.out.push_str("data: ");
        self.out.push_str(&value.to_string());
        self.out.push_str("\n\n");
    }

    /// A named event.
    pub(crate) fn event(&mut self, name: &str, value: &Value) {
        self.out.push_str("event: ");
        self.out.push_str(name);
        self.out.push('\n');
        self.data(value);
    }

    /// OpenAI's end of stream.
    pub(crate) fn done(&mut self) {
        self.out.push_str("data: [DONE]\n\n");
    }

    /// The error form of a protocol, as the last event.
    pub(crate) fn error(&mut self, error: &ApiError, wire: Wire, request_id: &str) {
        let body = error.body(wire, request_id);
        match wire {
            Wire::OpenAi => self.data(&body),
            Wire::Anthropic => self.event("error", &body),
        }
    }

    pub(crate) fn take(&mut self) -> String {
        std::mem::take(&mut self.out)
    }
}
