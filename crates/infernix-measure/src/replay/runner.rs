//! Plays a plan against one server: a thread a session, one connection a request, every time from this clock.

use super::observe::{CHARS_PER_TOKEN, estimate};
use super::persona::{Persona, tools_estimate};
use super::plan::{Actor, Class, FULL_CONTEXT, Op, Plan, Turn};
use crate::client::{Endpoint, Exchange, Failure};
use crate::error::{MeasureError, Result};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const PATH: &str = "/v1/chat/completions";
/// What replaces a cleared tool result.
const CLEARED: &str = "[old tool result cleared]";
/// What tool calls beyond the first one get.
const STUB: &str = "[done]";

/// One request of a run.
#[derive(Clone, Debug)]
pub struct Row {
    /// Session or subagent.
    pub actor: String,
    /// Request of that session, counting from 0.
    pub index: usize,
    /// Its class.
    pub class: Class,
    /// Whether the answer repeats a long text.
    pub copy: bool,
    /// Seed of its sampler, the same for every engine.
    pub seed: u32,
    /// Messages sent.
    pub messages: usize,
    /// Seconds from the start of the run to the request.
    pub sent: f64,
    /// To the first piece of the answer.
    pub first: Option<f64>,
    /// To its end.
    pub done: f64,
    /// What was answered.
    pub exchange: Exchange,
    /// Whether the end was planned.
    pub aborted: bool,
}

impl Row {
    /// Why it failed, unless that was planned.
    pub fn failure(&self) -> Option<&Failure> {
        self.exchange.failure.as_ref().filter(|_| !self.aborted)
    }

    /// What a request is called in reports.
    pub(crate) fn tag(&self) -> String {
        format!("{}#{}", self.actor, self.index)
    }

    /// For `client.jsonl`.
    pub fn to_json(&self, arm: &str) -> Value {
        let a = &self.exchange.answer;
        let status = if self.aborted {
            "aborted"
        } else if self.exchange.failure.is_some() {
            "error"
        } else {
            "ok"
        };
        json!({
            "arm": arm,
            "actor": self.actor,
            "tag": self.tag(),
            "cls": self.class.name(),
            "copy": self.copy,
            "seed": self.seed,
            "status": status,
            "error": self.failure().map(ToString::to_string),
            "finish": a.finish,
            "usage": a.usage.map(|u| json!({
                "prompt_tokens": u.prompt, "cached_tokens": u.cached,
                "completion_tokens": u.completion, "reasoning_tokens": u.reasoning,
            })),
            "timings": a.timings,
            "t_send": self.sent,
            "t_first": self.first,
            "t_done": self.done,
            "messages": self.messages,
            "tool_calls": a.tool_calls.len(),
            "content_chars": a.content.chars().count(),
            "reasoning_chars": a.reasoning.chars().count(),
            "tool_argument_chars": a.tool_calls.iter().map(|c| c.arguments.chars().count()).sum::<usize>(),
        })
    }
}

/// Something that happened to a conversation besides a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Session.
    pub actor: String,
    /// `context_guard`, `history_edit`.
    pub event: &'static str,
    /// Messages cleared or dropped.
    pub messages: usize,
}

/// A run of one plan on one server.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Requests in the order of their ends.
    pub rows: Vec<Row>,
    /// Guards and edits.
    pub notes: Vec<Note>,
    /// First thread's start to last session's end, seconds.
    pub wall: f64,
    /// Why it ended before the plan did, if it did for another reason than a failed request.
    pub ended: Option<String>,
}

/// How a plan is played.
#[derive(Clone, Copy)]
pub struct RunOptions<'a> {
    /// Limit of one request.
    pub timeout: Duration,
    /// Set from outside to stop.
    pub interrupted: &'a AtomicBool,
    /// Fields of the body that are left out, for servers that refuse what OpenAI does not have.
    pub omit: &'a [String],
    /// Hears of each end.
    pub progress: &'a (dyn Fn(&Row) + Sync),
}

/// Named points that sessions wait for, and rounds in lock-step.
#[derive(Default)]
struct Meeting {
    reached: HashSet<String>,
    members: usize,
    waiting: usize,
    round: u64,
    stopped: bool,
}

struct Shared<'a> {
    plan: &'a Plan,
    endpoint: &'a Endpoint,
    options: RunOptions<'a>,
    start: Instant,
    sync: Mutex<Meeting>,
    changed: Condvar,
    rows: Mutex<Vec<Row>>,
    notes: Mutex<Vec<Note>>,
    /// Why this machine could not go on.
    fault: Mutex<Option<String>>,
    /// Tokens by the server's count over tokens by estimate.
    ratio: f64,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared<'_> {
    /// Starts a session in a thread of its own.
    fn begin<'scope>(&'scope self, scope: &'scope std::thread::Scope<'scope, '_>, actor: &'scope Actor) {
        let thread = std::thread::Builder::new().spawn_scoped(scope, move || session(self, actor));
        if let Err(e) = thread {
            self.fail(format!("no thread for {}: {e}", actor.name));
        }
    }

    fn fail(&self, why: String) {
        lock(&self.fault).get_or_insert(why);
        self.stop();
    }

    fn stop(&self) {
        lock(&self.sync).stopped = true;
        self.changed.notify_all();
    }

    fn stopped(&self) -> bool {
        self.options.interrupted.load(Ordering::Relaxed) || lock(&self.sync).stopped
    }

    fn signal(&self, name: &str) {
        lock(&self.sync).reached.insert(name.to_owned());
        self.changed.notify_all();
    }

    /// Waits until `done` holds; `false` when the run was stopped instead.
    fn wait_until(&self, mut done: impl FnMut(&mut Meeting) -> bool) -> bool {
        let mut sync = lock(&self.sync);
        loop {
            if sync.stopped || self.options.interrupted.load(Ordering::Relaxed) {
                return false;
            }
            if done(&mut sync) {
                return true;
            }
            let waited = self.changed.wait_timeout(sync, Duration::from_millis(200));
            sync = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn join(&self) {
        lock(&self.sync).members += 1;
    }

    fn leave(&self) {
        let mut sync = lock(&self.sync);
        sync.members -= 1;
        turn(&mut sync);
        self.changed.notify_all();
    }

    /// Waits for all members of the rounds to be ready.
    fn barrier(&self) -> bool {
        let round = {
            let mut sync = lock(&self.sync);
            sync.waiting += 1;
            let round = sync.round;
            turn(&mut sync);
            round
        };
        self.changed.notify_all();
        self.wait_until(|s| s.round != round)
    }

    fn sleep(&self, seconds: f64) -> bool {
        let end = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 3600.0));
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) {
            if self.stopped() {
                return false;
            }
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
        !self.stopped()
    }
}

/// Begins the next round once every member waits.
fn turn(sync: &mut Meeting) {
    if sync.members > 0 && sync.waiting >= sync.members {
        sync.waiting = 0;
        sync.round += 1;
    }
}

/// Plays the plan. One uncounted request comes first; it also tells how this server's tokens compare with the
/// estimate, which only the context guard uses. What was played before an interruption is in the run.
pub fn play(plan: &Plan, endpoint: &Endpoint, options: RunOptions<'_>) -> Run {
    let ratio = match prime(plan, endpoint, options) {
        Ok(ratio) => ratio,
        Err(e) => return Run { ended: Some(e.to_string()), ..Run::default() },
    };
    let shared = Shared {
        plan,
        endpoint,
        options,
        start: Instant::now(),
        sync: Mutex::default(),
        changed: Condvar::new(),
        rows: Mutex::default(),
        notes: Mutex::default(),
        fault: Mutex::default(),
        ratio,
    };
    std::thread::scope(|scope| {
        plan.actors.iter().filter(|a| a.top).for_each(|actor| shared.begin(scope, actor));
    });
    let wall = shared.start.elapsed().as_secs_f64();
    let fault = shared.fault.into_inner().unwrap_or_else(PoisonError::into_inner);
    let stopped = || options.interrupted.load(Ordering::Relaxed).then(|| MeasureError::Stopped.to_string());
    let ended = fault.or_else(stopped);
    let rows = shared.rows.into_inner().unwrap_or_else(PoisonError::into_inner);
    let notes = shared.notes.into_inner().unwrap_or_else(PoisonError::into_inner);
    Run { rows, notes, wall, ended }
}

fn prime(plan: &Plan, endpoint: &Endpoint, options: RunOptions<'_>) -> Result<f64> {
    // A text like the run's, but none of it, so that nothing of the run is in a cache.
    let text = plan.personas.get("checker").map_or("", |p| p.system.as_str());
    let text = format!("Calibration. {text} Answer ok.");
    let body =
        json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 8, "temperature": 0 });
    let x = endpoint.begin(PATH, body, options.timeout)?.wait(options.interrupted)?;
    if let Some(f) = x.failure {
        return Err(MeasureError::Server(format!("the priming request failed: {f}")));
    }
    let counted = x.answer.usage.map_or(0, |u| u.prompt) as f64;
    Ok(if counted > 0.0 { (counted / (estimate(&text) as f64 + 6.0)).clamp(0.5, 2.0) } else { 1.0 })
}

/// A conversation being led.
struct Conversation<'a> {
    shared: &'a Shared<'a>,
    actor: &'a Actor,
    persona: Persona,
    messages: Vec<Value>,
    index: usize,
    lockstep: bool,
    /// Tokens by the server's count over tokens by estimate, of the last prompt.
    ratio: f64,
}

fn session(shared: &Shared<'_>, actor: &Actor) {
    let persona = shared.plan.personas.get(&actor.persona).cloned();
    let persona = persona.unwrap_or(Persona { system: String::new(), tools: Vec::new() });
    let messages = actor.history.clone();
    let mut c =
        Conversation { shared, actor, persona, messages, index: 0, lockstep: false, ratio: shared.ratio };
    for op in &actor.ops {
        if !c.step(op) {
            break;
        }
    }
    if c.lockstep {
        shared.leave();
    }
}

impl Conversation<'_> {
    /// One op; `false` to end the session.
    fn step(&mut self, op: &Op) -> bool {
        match op {
            Op::Request(turn) => self.request(turn),
            Op::Retry { delay, max_tokens } => {
                if self.messages.last().is_some_and(|m| m["role"] == "assistant") {
                    self.messages.pop();
                }
                self.send(Class::Retry, *delay, *max_tokens, false, None, true).is_some()
            }
            Op::SideCall { persona, instruction, max_tokens } => {
                self.side_call(persona, instruction, *max_tokens)
            }
            Op::Compact { instruction, summary, max_tokens } => {
                self.messages.push(json!({ "role": "user", "content": instruction }));
                let sent = self.send(Class::Compaction, 0.0, *max_tokens, false, None, false).is_some();
                self.messages = vec![json!({ "role": "user", "content": summary })];
                sent
            }
            Op::Spawn { actors } => self.apart(|c| {
                std::thread::scope(|scope| {
                    let named = c.shared.plan.actors.iter().filter(|a| actors.contains(&a.name));
                    named.for_each(|actor| c.shared.begin(scope, actor));
                });
                !c.shared.stopped()
            }),
            Op::Signal { name } => {
                self.shared.signal(name);
                true
            }
            Op::Wait { name } => self.apart(|c| c.shared.wait_until(|s| s.reached.contains(name))),
            Op::Lockstep => {
                self.shared.join();
                self.lockstep = true;
                true
            }
            Op::ClearToolResults { keep } => {
                let cleared = self.clear_tool_results(*keep);
                self.note("history_edit", cleared);
                true
            }
        }
    }

    /// Waits outside the rounds, so that they go on.
    fn apart(&mut self, wait: impl FnOnce(&mut Self) -> bool) -> bool {
        if self.lockstep {
            self.shared.leave();
        }
        let go_on = wait(self);
        if self.lockstep {
            self.shared.join();
        }
        go_on
    }

    fn note(&self, event: &'static str, messages: usize) {
        lock(&self.shared.notes).push(Note { actor: self.actor.name.clone(), event, messages });
    }

    fn request(&mut self, turn: &Turn) -> bool {
        self.deliver(turn);
        self.send(turn.class, turn.delay, turn.max_tokens, turn.copy, turn.abort_after, turn.tools).is_some()
    }

    /// Puts what the tools and the user say into the conversation.
    fn deliver(&mut self, turn: &Turn) {
        let observed = turn.observation.as_ref().map(|o| o.text.as_str());
        let calls: Vec<String> = match self.messages.last() {
            Some(m) if m["role"] == "assistant" => {
                let ids = m["tool_calls"].as_array().into_iter().flatten();
                ids.map(|c| c["id"].as_str().unwrap_or_default().to_owned()).collect()
            }
            _ => Vec::new(),
        };
        if !calls.is_empty() {
            for (i, id) in calls.iter().enumerate() {
                let text = if i == 0 { observed.unwrap_or(STUB) } else { STUB };
                self.messages.push(json!({ "role": "tool", "tool_call_id": id, "content": text }));
            }
            if let Some(user) = &turn.user {
                self.messages.push(json!({ "role": "user", "content": user }));
            }
            return;
        }
        let parts: Vec<&str> = observed.into_iter().chain(turn.user.as_deref()).collect();
        if !parts.is_empty() {
            self.messages.push(json!({ "role": "user", "content": parts.join("\n\n") }));
        } else if self.messages.last().is_some_and(|m| m["role"] == "assistant") {
            self.messages.push(json!({ "role": "user", "content": "Continue." }));
        }
    }

    fn side_call(&mut self, persona: &str, instruction: &str, max_tokens: usize) -> bool {
        let Some(other) = self.shared.plan.personas.get(persona).cloned() else { return true };
        let mut flat = String::new();
        for m in &self.messages {
            let role = m["role"].as_str().unwrap_or_default();
            flat.push_str(&format!("[{role}]\n{}\n", m["content"].as_str().unwrap_or_default()));
        }
        // The checker sees the end of a conversation that its context does not hold.
        let room = self.room(max_tokens).saturating_sub(estimate(&other.system) + estimate(instruction) + 24);
        let chars = (room as f64 / self.ratio * CHARS_PER_TOKEN) as usize;
        let skip = flat.chars().count().saturating_sub(chars);
        let flat: String = flat.chars().skip(skip).collect();
        let own = (std::mem::take(&mut self.messages), std::mem::replace(&mut self.persona, other));
        self.messages = vec![json!({ "role": "user", "content": format!("{flat}\n\n{instruction}") })];
        let sent = self.send(Class::Check, 0.0, max_tokens, false, None, false).is_some();
        (self.messages, self.persona) = own;
        sent
    }

    /// Tokens that a prompt may take.
    fn room(&self, max_tokens: usize) -> usize {
        let context = self.shared.plan.context;
        let margin = (24_000.0 * context as f64 / FULL_CONTEXT as f64).round().max(96.0) as usize;
        context.saturating_sub(margin.max(max_tokens.min(margin)))
    }

    /// Tokens of the next prompt, by the last one's count.
    fn size(&self) -> usize {
        (self.estimated() as f64 * self.ratio).ceil() as usize
    }

    fn estimated(&self) -> usize {
        let mut tokens = estimate(&self.persona.system) + tools_estimate(&self.persona.tools);
        for m in &self.messages {
            let calls = m["tool_calls"].as_array().map_or(0, Vec::len);
            let text = |v: &Value| v.as_str().map_or(0, estimate);
            let arguments = m["tool_calls"].as_array().into_iter().flatten();
            let arguments: usize = arguments.map(|c| text(&c["function"]["arguments"])).sum();
            tokens += text(&m["content"]) + text(&m["reasoning_content"]) + arguments + 6 + 8 * calls;
        }
        tokens
    }

    fn clear_tool_results(&mut self, keep: usize) -> usize {
        let results: Vec<usize> =
            (0..self.messages.len()).filter(|i| self.messages[*i]["role"] == "tool").collect();
        let mut cleared = 0;
        for i in &results[..results.len().saturating_sub(keep)] {
            if self.messages[*i]["content"] != CLEARED {
                self.messages[*i]["content"] = json!(CLEARED);
                cleared += 1;
            }
        }
        cleared
    }

    /// Keeps the prompt below the context: first old tool results go, then the oldest turns.
    fn guard(&mut self, max_tokens: usize) {
        let room = self.room(max_tokens);
        if self.size() <= room {
            return;
        }
        let mut touched = self.clear_tool_results(6);
        while self.size() > room && self.messages.len() > 2 {
            // The first message says what the task is; a turn goes with its tool results.
            self.messages.remove(1);
            touched += 1;
            while self.messages.len() > 2 && self.messages[1]["role"] == "tool" {
                self.messages.remove(1);
                touched += 1;
            }
        }
        self.note("context_guard", touched);
    }

    /// Sends the conversation; the answer joins it. `None` when the run was stopped.
    fn send(
        &mut self,
        class: Class,
        delay: f64,
        max_tokens: usize,
        copy: bool,
        abort_after: Option<f64>,
        tools: bool,
    ) -> Option<()> {
        let shared = self.shared;
        if self.lockstep && !shared.barrier() {
            return None;
        }
        if !shared.sleep(delay) {
            return None;
        }
        self.guard(max_tokens);
        let seed = shared.plan.request_seed(&self.actor.name, self.index);
        let mut messages = Vec::with_capacity(self.messages.len() + 1);
        if !self.persona.system.is_empty() {
            messages.push(json!({ "role": "system", "content": self.persona.system }));
        }
        messages.extend(self.messages.iter().cloned());
        let left = shared.plan.context.saturating_sub(self.size() + 32).max(16);
        let mut body = json!({
            "messages": messages,
            "max_tokens": max_tokens.min(left),
            "temperature": 1.0, "top_p": 0.95, "top_k": 20,
            "seed": seed,
        });
        if tools && !self.persona.tools.is_empty() {
            body["tools"] = self.persona.tools.clone().into();
            body["tool_choice"] = json!("auto");
        }
        if let Some(fields) = body.as_object_mut() {
            fields.retain(|name, _| !shared.options.omit.contains(name));
        }
        let estimated = self.estimated() as f64;
        let limit = abort_after.map_or(shared.options.timeout, Duration::from_secs_f64);
        let exchange = match shared.endpoint.begin(PATH, body, limit) {
            // What an interruption breaks off is no request of the run.
            Ok(pending) => pending.wait(shared.options.interrupted).ok()?,
            Err(e) => {
                shared.fail(e.to_string());
                return None;
            }
        };
        let since = |t: Instant| t.duration_since(shared.start).as_secs_f64();
        // An answer that is complete before the abort stays one.
        let aborted = abort_after.is_some() && exchange.failure == Some(Failure::Timeout);
        let row = Row {
            actor: self.actor.name.clone(),
            index: self.index,
            class,
            copy,
            seed,
            messages: messages.len(),
            sent: since(exchange.sent),
            first: exchange.pieces.first().copied().map(since),
            done: since(exchange.done),
            exchange,
            aborted,
        };
        self.index += 1;
        (shared.options.progress)(&row);
        // What an aborted request had answered is lost, as for a client that breaks off; a failed one ends the session,
        // since what follows would not be the planned work.
        let failed = row.failure().is_some();
        if let Some(usage) = row.exchange.answer.usage.filter(|_| estimated > 0.0) {
            self.ratio = (usage.prompt as f64 / estimated).clamp(0.5, 4.0);
        }
        if row.exchange.failure.is_none() {
            self.messages.push(row.exchange.answer.message());
        }
        lock(&shared.rows).push(row);
        if failed {
            shared.stop();
            return None;
        }
        Some(())
    }
}
