//! Text in and out of the models: tokenizer, chat template, generation defaults, the parsers that split a
//! model's output into reasoning, content and tool calls, and the grammars that hold it to a form.
//!
//! Nothing here knows of HTTP or of the engine. Resources come in as bytes, so that a checkpoint
//! folder and an artifact serve alike.

mod error;
mod generation;
pub mod grammar;
mod message;
mod output;
mod prompt;
mod pyjson;
mod stop;
mod template;
mod tokenizer;
pub mod tools;

pub use error::{Result, TextError};
pub use generation::{Family, GenerationDefaults, Sampling};
pub use message::{Content, FunctionCall, Message, Role, Tool, ToolCall};
pub use output::{
    CallPart, Channel, Diagnostics, Event, Fallback, OutputOptions, OutputParser, ParsedCall, Start, ToolSet,
};
pub use prompt::{ChatFormat, ChatOptions, EFFORTS, Prompt, Resources};
pub use stop::StopMatcher;
pub use template::{Clock, Template, TemplateLimits};
pub use tokenizer::{AddedToken, AddedTokens, Detokenizer, EncodeOptions, NamedTokens, TokenKind, Tokenizer};
