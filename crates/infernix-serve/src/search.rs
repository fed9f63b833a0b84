//! Searches for deferred tools that run here: the model calls a small function, what it finds is put behind everything
//! that it has read, and the same answer goes on.

use crate::app::App;
use crate::error::ApiError;
use crate::generate::Generation;
use crate::piece::{Finish, Found, Piece, TokenUsage};
use crate::prepare::{Caller, Plan};
use crate::reply::Running;
use crate::tools::{Call, Function, Identity, ToolChoice, Tools};
use crate::turn::Turn;
use infernix_text::tools::{FOUND, ToolIndex, found_text, search_function};
use infernix_text::{Content, Message, Role, Tool, ToolCall};
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::Arc;

/// Searches of one answer.
const MAX_ROUNDS: usize = 5;

/// Declares the function that searches.
pub(crate) fn declare(tools: &mut Tools, path: String, name: String, regex: bool) -> Result<(), ApiError> {
    let tool = search_function(&name, regex);
    let description =
        tool.as_map().get("function").and_then(|f| f.get("description")?.as_str()).map(str::to_owned);
    let function = Function {
        path,
        name: name.clone(),
        description,
        parameters: tool.parameters().cloned(),
        strict: false,
        deferred: false,
        form: None,
    };
    tools.function(function, Identity::ServerSearch { name, regex })
}

/// What the model reads of a search that failed.
pub(crate) fn failed_text(code: &str) -> String {
    format!("Error: {code}")
}

/// A conversation whose answer may search.
pub(crate) struct Searching {
    turn: Turn,
    key: Option<usize>,
    session: Option<String>,
    call_prefix: &'static str,
    index: ToolIndex,
    rounds: usize,
    /// Of the rounds before.
    spent: TokenUsage,
    /// The turn being made.
    reasoning: String,
    content: String,
    calls: Vec<Call>,
}

impl Searching {
    /// For a turn that declares a search and something to find.
    pub(crate) fn new(turn: &Turn, caller: Caller<'_>) -> Option<Self> {
        let searches = turn
            .tools
            .prompt
            .iter()
            .any(|t| matches!(turn.tools.identity(t.name()), Identity::ServerSearch { .. }));
        (searches && turn.n == 1).then(|| Self {
            index: ToolIndex::new(&turn.tools.deferred),
            turn: turn.clone(),
            key: caller.key,
            session: caller.session.map(str::to_owned),
            call_prefix: caller.call_prefix,
            rounds: 0,
            spent: TokenUsage::default(),
            reasoning: String::new(),
            content: String::new(),
            calls: Vec::new(),
        })
    }

    fn note(&mut self, piece: &Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning.push_str(text),
            Piece::Content(text, _) => self.content.push_str(text),
            Piece::Call(call) | Piece::CallEnd(call, true) => self.calls.push(call.clone()),
            _ => {}
        }
    }

    /// Runs a search.
    fn find(&self, call: &Call, regex: bool) -> Result<Vec<Tool>, &'static str> {
        let text = |name: &str| call.arguments.get(name).and_then(Value::as_str).unwrap_or_default();
        let names = if regex {
            self.index.regex(text("pattern"), FOUND).map_err(|e| e.code())?
        } else {
            self.index.words(text("query"), FOUND)
        };
        let tool = |name: &&str| self.turn.tools.deferred.iter().find(|t| t.name() == *name).cloned();
        Ok(names.iter().filter_map(tool).collect())
    }

    /// Ends a round: what its searches found, and whether the answer goes on by itself.
    fn close(&mut self) -> (Vec<Found>, bool) {
        let calls = std::mem::take(&mut self.calls);
        let mut message = Message::text(Role::Assistant, "");
        message.content = Some(Content::Text(std::mem::take(&mut self.content)));
        message.reasoning_content = Some(std::mem::take(&mut self.reasoning)).filter(|r| !r.is_empty());
        let mut results = Vec::new();
        let mut found = Vec::new();
        let mut only_searches = true;
        for call in &calls {
            let Identity::ServerSearch { name, regex } = &call.identity else {
                only_searches = false;
                continue;
            };
            message.tool_calls.push(ToolCall {
                id: Some(call.id.clone()),
                ..ToolCall::new(name, Value::Object(call.arguments.clone()))
            });
            let tools = self.find(call, *regex);
            let text = match &tools {
                Ok(tools) => found_text(tools),
                Err(code) => failed_text(code),
            };
            for tool in tools.iter().flatten() {
                let _ = self.turn.tools.reference(tool.name());
            }
            results.push(Message { tool_call_id: Some(call.id.clone()), ..Message::text(Role::Tool, text) });
            found.push(Found { call: call.id.clone(), tools });
        }
        self.rounds += 1;
        self.turn.messages.push(message);
        self.turn.messages.append(&mut results);
        let goes_on = only_searches && self.rounds <= MAX_ROUNDS;
        (found, goes_on)
    }

    /// What the engine is asked next.
    fn plan(&self, app: &App) -> Result<Plan, ApiError> {
        let caller =
            Caller { key: self.key, session: self.session.as_deref(), call_prefix: self.call_prefix };
        let mut turn = self.turn.clone();
        // A call that was demanded has been made.
        if matches!(turn.tools.choice, ToolChoice::Required | ToolChoice::Named { .. }) {
            turn.tools.choice = ToolChoice::Auto;
        }
        let most = turn.max_tokens.unwrap_or(app.options.default_max_tokens);
        turn.max_tokens = Some(most.saturating_sub(self.spent.output));
        let mut plan = app.prepare(turn, caller)?;
        plan.joins = true;
        Ok(plan)
    }
}

/// An answer being made, with the searches in it.
pub(crate) struct Session {
    app: Arc<App>,
    pub(crate) generation: Generation,
    searching: Option<Searching>,
    queue: VecDeque<(usize, Piece, Running)>,
}

impl Session {
    pub(crate) fn new(app: Arc<App>, generation: Generation, searching: Option<Searching>) -> Self {
        Self { app, generation, searching, queue: VecDeque::new() }
    }

    /// The next piece; `None` after the last.
    pub(crate) async fn next(&mut self) -> Option<(usize, Piece, Running)> {
        if let Some(next) = self.queue.pop_front() {
            return Some(next);
        }
        let (choice, mut piece, mut running) = self.generation.next().await?;
        let Some(searching) = &mut self.searching else { return Some((choice, piece, running)) };
        running.usage.output += searching.spent.output;
        running.usage.reasoning += searching.spent.reasoning;
        searching.note(&piece);
        if let Piece::End(end) = &mut piece {
            let own = end.usage;
            end.usage.output += searching.spent.output;
            end.usage.reasoning += searching.spent.reasoning;
            let searches =
                searching.calls.iter().any(|c| matches!(c.identity, Identity::ServerSearch { .. }));
            if end.finish == Finish::Calls && searches {
                searching.spent.output += own.output;
                searching.spent.reasoning += own.reasoning;
                let (found, goes_on) = searching.close();
                self.queue.extend(found.into_iter().map(|f| (choice, Piece::Found(f), running)));
                if goes_on {
                    if let Err(error) = self.go_on().await {
                        self.queue.push_back((choice, Piece::Failed(error), running));
                    }
                } else {
                    self.queue.push_back((choice, piece, running));
                }
                return self.queue.pop_front();
            }
        }
        Some((choice, piece, running))
    }

    /// Starts the next round.
    async fn go_on(&mut self) -> Result<(), ApiError> {
        let (app, searching) = (Arc::clone(&self.app), self.searching.take());
        let (searching, plan) = crate::http::off_thread(move || {
            let plan = searching.as_ref().map(|s| s.plan(&app)).transpose()?;
            Ok((searching, plan))
        })
        .await?;
        self.searching = searching;
        if let Some(plan) = plan {
            self.generation = Generation::start(&self.app.engine, std::slice::from_ref(&plan))?;
        }
        Ok(())
    }
}
