//! The HTTP server: OpenAI Chat Completions, Completions and Responses, and Anthropic Messages, over one engine.
//!
//! A request is read by its protocol's parser into a `turn`, rendered and limited by `prepare`, run by `generate`,
//! read by `decode` into `piece`s, and written by its protocol's `reply` machine, which cannot write an ill-formed
//! stream whatever the engine does. Protocols differ only in their first and last step, so what is said is the same in
//! all of them.

mod access;
mod app;
mod chat;
mod completions;
mod constrain;
mod content;
mod decide;
mod decode;
mod error;
mod fields;
mod generate;
mod http;
mod ids;
mod log;
mod messages;
mod metrics;
mod options;
mod page;
mod piece;
mod prepare;
mod reply;
mod responses;
mod search;
mod server;
#[cfg(test)]
mod tests;
mod tools;
mod turn;

pub use app::App;
pub use http::{admin_router, router};
pub use log::LogOptions;
pub use options::{ApiKey, BUDGET_MESSAGE, ModelInfo, ReasoningLoop, ServeOptions};
pub use server::serve;
