//! From what a request asks for to a grammar, with the latest ones kept.

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use super::call::{self, CallRules, Choice};
use super::error::GrammarError;
use super::guide::{Guide, GuideOptions};
use super::regex::Scope;
use super::rx::Rx;
use super::vocab::Vocabulary;
use super::{cfg, gbnf, regex, schema};
use crate::tokenizer::Tokenizer;

/// Most grammars kept, and most bytes of their sources.
const KEPT: (usize, usize) = (64, 8 << 20);
/// Most matchers that wait for the next output of a grammar, and most tokens that one reads before it is dropped: a
/// token makes some ten states of the lexer, of 1 to 2 KiB each.
const RESTED: (usize, usize) = (4, 8192);
/// Most choices and most bytes of them.
const CHOICES: (usize, usize) = (4096, 65_536);
/// Longest schema, in bytes of its JSON.
const SCHEMA: usize = 1 << 20;
/// Stack of a compilation, reserved and not used until it is needed: its depth grows with chains of rules and of
/// references, which the limits on the length of sources bound.
const STACK: usize = 256 << 20;
/// Subschemas compiled alone to find the one at fault.
const SEARCHED: usize = 256;

/// What the answer has to be.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// A JSON object.
    JsonObject,
    /// JSON that fits a schema, without white space, members in declared order.
    Schema(Value),
    /// A text of a GBNF grammar.
    Gbnf(String),
    /// A text that an expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl Answer {
    fn is_json(&self) -> bool {
        matches!(self, Self::JsonObject | Self::Schema(_))
    }
}

/// How the phases around the parser's grammar run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Plan {
    /// The grammar begins right after the reasoning; else text is free until a call opens.
    pub(super) immediate: bool,
    /// A call's opener in free text enters the grammar.
    pub(super) calls: bool,
    /// No call may open.
    pub(super) no_calls: bool,
    /// Calls in markup that the grammar does not know may not open.
    pub(super) no_bare_calls: bool,
    /// The answer is JSON.
    pub(super) json: bool,
}

/// A compiled constraint; cheap to make guides from.
pub struct Grammar {
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) plan: Plan,
    /// At its beginning, and never moved. Behind a lock, because a matcher cannot be shared.
    matcher: Option<Mutex<Matcher>>,
    /// Matchers of outputs that have ended, with what their lexers have learned, and the tokens they have read.
    rested: Mutex<Vec<(Matcher, usize)>>,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl Grammar {
    /// Follows one output.
    #[must_use]
    pub fn guide(self: &Arc<Self>, options: GuideOptions) -> Guide {
        Guide::new(Arc::clone(self), options)
    }

    /// A matcher at the grammar's beginning, and how many tokens it has read for others. Each belongs to one output:
    /// clones that are not deep share a lexer, and one that has run out of fuel fails for all of them and for good.
    pub(super) fn matcher(&self) -> Option<(Matcher, usize)> {
        let rested = self.rested.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let fresh =
            || self.matcher.as_ref().map(|m| m.lock().unwrap_or_else(PoisonError::into_inner).deep_clone());
        rested.or_else(|| fresh().map(|matcher| (matcher, 0)))
    }

    /// Takes a matcher back, unless it has failed or its lexer may have grown large.
    pub(super) fn rest(&self, mut matcher: Matcher, read: usize) {
        if read < RESTED.1 && !matcher.is_error() && matcher.reset().is_ok() {
            let mut rested = self.rested.lock().unwrap_or_else(PoisonError::into_inner);
            if rested.len() < RESTED.0 {
                rested.push((matcher, read));
            }
        }
    }
}

/// Compiles constraints for one tokenizer. Shared by all requests.
#[derive(Debug)]
pub struct GrammarCompiler {
    vocabulary: Arc<Vocabulary>,
    kept: Mutex<Vec<(String, Arc<Grammar>)>>,
}

impl GrammarCompiler {
    /// Prepares a vocabulary; `stop_ids` end a turn.
    ///
    /// # Errors
    /// No stop id, or a vocabulary that the parser refuses.
    pub fn new(tokenizer: Arc<Tokenizer>, stop_ids: &[u32]) -> Result<Self, GrammarError> {
        let vocabulary = Arc::new(Vocabulary::new(tokenizer, stop_ids)?);
        Ok(Self { vocabulary, kept: Mutex::default() })
    }

    /// The grammar for a request: an answer's form, rules for calls, both or neither (a guide then only ends
    /// reasoning). JSON beside free calls is either of the two; beside forced calls it is for a later turn.
    ///
    /// # Errors
    /// What cannot be enforced, with its place.
    pub fn compile(
        &self,
        answer: Option<&Answer>,
        calls: Option<&CallRules>,
    ) -> Result<Arc<Grammar>, GrammarError> {
        let calls = calls.filter(|c| c.restricts());
        let key = format!("{answer:?} {calls:?}");
        {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(at) = kept.iter().position(|(k, _)| *k == key) {
                let found = kept.remove(at);
                let grammar = Arc::clone(&found.1);
                kept.push(found);
                return Ok(grammar);
            }
        }
        let grammar = Arc::new(self.build_deep(answer, calls)?);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push((key, Arc::clone(&grammar)));
        while kept.len() > KEPT.0
            || (kept.len() > 1 && kept.iter().map(|(k, _)| k.len()).sum::<usize>() > KEPT.1)
        {
            kept.remove(0);
        }
        Ok(grammar)
    }

    /// [`Self::build`] with room for sources that are all depth. A thread that dies costs this grammar alone.
    fn build_deep(
        &self,
        answer: Option<&Answer>,
        calls: Option<&CallRules>,
    ) -> Result<Grammar, GrammarError> {
        let built = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, || self.build(answer, calls)).ok()?;
            thread.join().ok()
        });
        built.unwrap_or_else(|| {
            Err(GrammarError::new("constraint_too_complex", "the constraint could not be compiled"))
        })
    }

    fn build(&self, answer: Option<&Answer>, calls: Option<&CallRules>) -> Result<Grammar, GrammarError> {
        let choice = calls.map(|c| c.choice);
        let enters = calls.filter(|c| c.choice != Choice::None);
        if let (Some(answer), Some(calls)) = (answer, enters)
            && !answer.is_json()
            && !calls.tools.is_empty()
        {
            return Err(GrammarError::new(
                "invalid_grammar",
                "a grammar, expression or choice cannot be combined with tools; set tool_choice to none",
            ));
        }
        if let Some(calls) = calls
            && calls.choice == Choice::Required
            && calls.tools.is_empty()
        {
            return Err(GrammarError::new(
                "invalid_grammar",
                "a call is required, but no tool may be called",
            ));
        }
        let grammar = match (answer, enters) {
            (None, None) => None,
            (answer, Some(calls)) => {
                let mut text = String::from("start: calls\n");
                if let (Some(answer), Choice::Auto) = (answer, calls.choice) {
                    // Only JSON comes here.
                    text = format!("start: answer | calls\nanswer: %json {}\n", self.json(answer)?);
                }
                text += &call::lark(calls)?;
                Some(self.lark(text, "constraint_too_complex")?)
            }
            (Some(answer), None) => Some(match answer {
                Answer::JsonObject | Answer::Schema(_) => {
                    let schema = self.json(answer)?;
                    self.top(TopLevelGrammar::from_json_schema(schema))
                        .map_err(|e| GrammarError::new("unsupported_json_schema", e).at(""))?
                }
                Answer::Gbnf(source) => self.lark(cfg::lark(&gbnf::parse(source)?)?, "invalid_grammar")?,
                Answer::Regex(source) => {
                    let rx = regex::parse(source, Scope::Whole)?;
                    self.lark(format!("start: {}\n", rx.lark()), "invalid_regex")?
                }
                Answer::Choice(list) => {
                    self.lark(format!("start: {}\n", choices(list)?.lark()), "invalid_choice")?
                }
            }),
        };
        // What the parser cannot even begin is refused here, and not in the middle of everybody's answers.
        let grammar = grammar.map(|matcher| self.begun(matcher, answer)).transpose()?;
        Ok(Grammar {
            vocabulary: Arc::clone(&self.vocabulary),
            plan: Plan {
                immediate: answer.is_some() || choice == Some(Choice::Required),
                calls: choice == Some(Choice::Auto),
                no_calls: choice == Some(Choice::None),
                no_bare_calls: calls.is_some_and(CallRules::exact),
                json: answer.is_some_and(Answer::is_json) && choice != Some(Choice::Required),
            },
            matcher: grammar.map(Mutex::new),
            rested: Mutex::default(),
        })
    }

    /// The matcher, once it is known that an answer can begin, with something that is not its end.
    fn begun(&self, mut matcher: Matcher, answer: Option<&Answer>) -> Result<Matcher, GrammarError> {
        let mut begins = false;
        if !matcher.is_stopped() {
            let mask = matcher.compute_mask().map_err(|e| {
                let message = e.to_string().lines().next().unwrap_or_default().to_owned();
                GrammarError::new("constraint_too_complex", message)
            })?;
            mask.iter_set_entries(|id| begins |= !self.vocabulary.is_stop(id as u32));
        }
        if !begins && !matcher.is_error() {
            let code = match answer {
                Some(Answer::Regex(_)) => "invalid_regex",
                Some(Answer::Choice(_)) => "invalid_choice",
                _ => "invalid_grammar",
            };
            return Err(GrammarError::new(code, "only the empty text fits, and an answer is never empty"));
        }
        Ok(matcher)
    }

    fn lark(&self, text: String, code: &'static str) -> Result<Matcher, GrammarError> {
        self.top(TopLevelGrammar::from_lark(text)).map_err(|e| GrammarError::new(code, e))
    }

    fn top(&self, grammar: TopLevelGrammar) -> Result<Matcher, String> {
        compile_with(&self.vocabulary.factory, grammar)
    }

    /// The schema as the parser takes it, once it is known to compile.
    fn json(&self, answer: &Answer) -> Result<Value, GrammarError> {
        let object = json!({"type": "object"});
        let source = match answer {
            Answer::Schema(source) => source,
            _ => &object,
        };
        if source.to_string().len() > SCHEMA {
            let message = format!("the schema is longer than {SCHEMA} bytes");
            return Err(GrammarError::new("unsupported_json_schema", message).at(""));
        }
        let prepared = schema::prepare(source)?;
        let schema = with_options(prepared.schema.clone());
        if let Err(message) = self.top(TopLevelGrammar::from_json_schema(schema.clone())) {
            return Err(self.locate(&prepared, &message));
        }
        Ok(schema)
    }

    /// Which subschema the parser's compiler refuses: inner ones come first.
    fn locate(&self, prepared: &schema::Prepared, message: &str) -> GrammarError {
        let unsatisfiable = |m: &str| m.contains("Unsatisfiable");
        if unsatisfiable(message) {
            return GrammarError::new("unsatisfiable_json_schema", "no value fits the schema").at("");
        }
        for (pointer, part) in prepared.parts.iter().take(SEARCHED) {
            let mut part = part.clone();
            if let (Value::Object(map), false) = (&mut part, prepared.defs.is_empty()) {
                map.insert("$defs".to_owned(), Value::Object(prepared.defs.clone()));
            }
            let Err(inner) = self.top(TopLevelGrammar::from_json_schema(with_options(part.clone()))) else {
                continue;
            };
            if unsatisfiable(&inner) {
                continue;
            }
            let (keyword, said) = if part.get("oneOf").is_some() && inner.contains("oneOf") {
                ("/oneOf", "the alternatives cannot be proved to exclude each other; use anyOf".to_owned())
            } else if inner.contains("min/maxProperties") {
                let keyword =
                    if part.get("minProperties").is_some() { "/minProperties" } else { "/maxProperties" };
                (keyword, "counts are supported only where every declared member is required".to_owned())
            } else {
                ("", inner.lines().next().unwrap_or_default().to_owned())
            };
            return GrammarError::new("unsupported_json_schema", said).at(format!("{pointer}{keyword}"));
        }
        let message = message.lines().next().unwrap_or_default();
        GrammarError::new("unsupported_json_schema", message).at("")
    }
}

fn compile_with(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<Matcher, String> {
    let matcher = Matcher::new(factory.create_parser(grammar));
    match matcher.get_error() {
        None => Ok(matcher),
        Some(error) => Err(error),
    }
}

/// Compact JSON: no white space that the model could fill a budget with.
pub(super) fn json_options() -> Value {
    json!({"item_separator": ",", "key_separator": ":", "whitespace_flexible": false})
}

fn with_options(mut schema: Value) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Value::Object(map) = &mut schema {
        map.insert("x-guidance".to_owned(), json_options());
    }
    schema
}

fn choices(list: &[String]) -> Result<Rx, GrammarError> {
    let bytes: usize = list.iter().map(String::len).sum();
    if list.is_empty() || list.iter().any(String::is_empty) {
        return Err(GrammarError::new("invalid_choice", "choice is a list of texts that are not empty"));
    }
    if list.len() > CHOICES.0 || bytes > CHOICES.1 {
        let message = format!("at most {} choices of {} bytes in all are supported", CHOICES.0, CHOICES.1);
        return Err(GrammarError::new("invalid_choice", message));
    }
    let mut unique: Vec<Rx> = Vec::with_capacity(list.len());
    let mut seen = std::collections::HashSet::new();
    unique.extend(list.iter().filter(|t| seen.insert(t.as_str())).map(|t| Rx::Literal(t.clone())));
    Ok(Rx::alt(unique))
}
