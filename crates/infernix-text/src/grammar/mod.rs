//! Constrained decoding: what an answer may look like, and which token may come next.
//!
//! A [`GrammarCompiler`] belongs to one tokenizer. It turns an [`Answer`] (JSON, a schema, a GBNF grammar, a
//! regular expression, a list of choices) and [`CallRules`] (which tools may be called, and how exactly) into
//! an immutable [`Grammar`], and keeps the latest of them. A [`Guide`] walks one output along a grammar: through
//! free reasoning, then the answer, then calls. It knows the id masks, follows accepted tokens and takes them
//! back, so that drafted tokens can be tried.
//!
//! The parser below is `llguidance`. What its grammars would let through wrongly is closed here: bounds beyond
//! binary64, schemas without a finite value, repeated names, endless digits, Unicode classes in expressions,
//! greedy lexemes in GBNF grammars.

mod call;
mod cfg;
mod compiler;
mod error;
mod gbnf;
mod guard;
mod guide;
mod lark;
mod lexable;
mod overlap;
mod regex;
mod rx;
mod schema;
mod vocab;

pub use call::{CallRules, Choice, INPUT, InputForm, ToolRule};
pub use compiler::{Answer, Grammar, GrammarCompiler};
pub use error::GrammarError;
pub use guide::{Guide, GuideOptions};
