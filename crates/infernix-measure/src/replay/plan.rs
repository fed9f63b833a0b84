//! The scenario: three coding sessions with their subagents, everything the client sends written down beforehand.
//!
//! All texts are made here from a seed, the same for every engine; only the assistant's turns come from the engine
//! under test. The plan's hash covers every text and delay, so equal hashes mean equal work.

use super::corpus::{Area, Corpus};
use super::observe::{ENGINE, Kind, Observation, Observer, Share, TESTS, TOOLS, estimate};
use super::persona::{Persona, Role};
use crate::load::rng::Rng;
use serde::{Deserialize, Serialize};

/// The context that token counts are stated for.
pub const FULL_CONTEXT: usize = 262_144;
/// Least context that the scenario's floors fit into.
pub const MIN_CONTEXT: usize = 2048;
/// Most: texts are cut from the corpus over and over beyond it.
pub const MAX_CONTEXT: usize = 16 * FULL_CONTEXT;
/// Longest pause or wait of a plan, seconds: a week.
const LONGEST: f64 = 604_800.0;
/// Version of the plan's format and of the scenario's rules; the hash covers it.
pub const PLAN_VERSION: u32 = 1;

/// What kind of turn a request is, for the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// A session taken up again: a long prompt that no cache knows.
    ColdResume,
    /// The next turn.
    Loop,
    /// The first turn of a subagent.
    SubagentFirst,
    /// A later one.
    SubagentLoop,
    /// A request for a summary.
    Compaction,
    /// The first turn after it.
    Restart,
    /// A side question about the whole conversation.
    Check,
    /// A turn after a pause.
    AfterIdle,
    /// A turn after old tool results were cleared.
    HistoryEdit,
    /// The last turn once more.
    Retry,
    /// The turn after an abort.
    AbortRetry,
    /// A request that the client broke off.
    Aborted,
}

impl Class {
    /// Turns that go on with a conversation the engine has seen.
    pub fn continuing(self) -> bool {
        use Class::{AbortRetry, AfterIdle, HistoryEdit, Loop, Retry, SubagentLoop};
        matches!(self, Loop | AfterIdle | HistoryEdit | Retry | AbortRetry | SubagentLoop)
    }

    /// Long prompts that are new to it.
    pub fn new_long(self) -> bool {
        matches!(self, Class::ColdResume | Class::Compaction | Class::Check)
    }

    /// As in reports.
    pub fn name(self) -> &'static str {
        match self {
            Class::ColdResume => "cold_resume",
            Class::Loop => "loop",
            Class::SubagentFirst => "subagent_first",
            Class::SubagentLoop => "subagent_loop",
            Class::Compaction => "compaction",
            Class::Restart => "restart",
            Class::Check => "check",
            Class::AfterIdle => "after_idle",
            Class::HistoryEdit => "history_edit",
            Class::Retry => "retry",
            Class::AbortRetry => "abort_retry",
            Class::Aborted => "aborted",
        }
    }
}

/// One request of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Its class.
    pub class: Class,
    /// Seconds between the previous answer and this request, tool and user together.
    pub delay: f64,
    /// Result of the assistant's tool call.
    pub observation: Option<Observation>,
    /// What the user says.
    pub user: Option<String>,
    /// Longest answer, tokens.
    pub max_tokens: usize,
    /// Whether the answer repeats a long text of the prompt.
    pub copy: bool,
    /// Break off after this many seconds.
    pub abort_after: Option<f64>,
    /// Whether tools are offered.
    pub tools: bool,
}

/// What a session does next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Op {
    /// Sends a turn.
    Request(Turn),
    /// Drops the last answer and sends the same messages again.
    Retry {
        /// Seconds before.
        delay: f64,
        /// Longest answer, tokens.
        max_tokens: usize,
    },
    /// Asks another persona about the whole conversation, flattened to text.
    SideCall {
        /// The other persona's name.
        persona: String,
        /// What is asked after the conversation.
        instruction: String,
        /// Longest answer, tokens.
        max_tokens: usize,
    },
    /// Asks for a summary, then begins a new conversation with a scripted one.
    Compact {
        /// What is asked.
        instruction: String,
        /// The summary that the new conversation begins with, the same for all engines.
        summary: String,
        /// Longest answer, tokens.
        max_tokens: usize,
    },
    /// Runs subagents side by side and waits for all.
    Spawn {
        /// Their names.
        actors: Vec<String>,
    },
    /// Says that a named point is reached.
    Signal {
        /// The point.
        name: String,
    },
    /// Waits for one.
    Wait {
        /// The point.
        name: String,
    },
    /// From here on, sends in rounds with the other sessions in lock-step.
    Lockstep,
    /// Replaces all but the last tool results by a stub.
    ClearToolResults {
        /// Results kept.
        keep: usize,
    },
}

/// A session or a subagent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Actor {
    /// `A`, `explore-1`, ...
    pub name: String,
    /// Its persona's name.
    pub persona: String,
    /// Whether it starts with the run, or is spawned.
    pub top: bool,
    /// Messages before its first turn.
    pub history: Vec<serde_json::Value>,
    /// What it does.
    pub ops: Vec<Op>,
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`PLAN_VERSION`].
    pub version: u32,
    /// `agentic_ab`, or the name of a recorded scenario.
    pub scenario: String,
    /// Where texts come from, with its digest.
    pub corpus: String,
    /// Of all random choices.
    pub seed: u64,
    /// Share of the turns, in thousandths.
    pub scale_milli: u32,
    /// Context that token counts are scaled to.
    pub context: usize,
    /// Personas by name.
    pub personas: std::collections::BTreeMap<String, Persona>,
    /// Sessions and subagents.
    pub actors: Vec<Actor>,
}

/// Size of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Requests that are not aborted.
    pub requests: usize,
    /// Of those, turns of the main sessions that go on with a conversation.
    pub main_continuing: usize,
    /// Requests broken off.
    pub aborted: usize,
}

impl Plan {
    /// BLAKE3 of the plan as JSON.
    pub fn hash(&self) -> String {
        let text = serde_json::to_string(self).unwrap_or_default();
        blake3::hash(text.as_bytes()).to_hex().to_string()
    }

    /// Whether a plan from a file can be played: its version, that every name it uses is there and means one thing, and that
    /// no number is one that no plan made here has.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn check(&self) -> Result<(), String> {
        if self.version != PLAN_VERSION {
            return Err(format!("plan version {}, this program plays {PLAN_VERSION}", self.version));
        }
        if !(MIN_CONTEXT..=MAX_CONTEXT).contains(&self.context) {
            return Err(format!("context {}, not {MIN_CONTEXT} to {MAX_CONTEXT}", self.context));
        }
        for (i, actor) in self.actors.iter().enumerate() {
            let name = &actor.name;
            if self.actors[..i].iter().any(|a| a.name == *name) {
                return Err(format!("two actors are named {name}"));
            }
            if !self.personas.contains_key(&actor.persona) {
                return Err(format!("{name} is a {}, which the plan does not have", actor.persona));
            }
            let spawns = self.ops().filter(|(a, op)| {
                a.name != *name && matches!(op, Op::Spawn { actors } if actors.contains(name))
            });
            let (spawns, wanted) = (spawns.count(), usize::from(!actor.top));
            if spawns != wanted {
                return Err(format!("{name} is spawned {spawns} times, not {wanted}"));
            }
            for (n, op) in actor.ops.iter().enumerate() {
                self.check_op(actor, op).map_err(|e| format!("{name}, op {n}: {e}"))?;
            }
        }
        if !self.actors.iter().any(|a| a.top) {
            return Err("no session".into());
        }
        Ok(())
    }

    fn check_op(&self, actor: &Actor, op: &Op) -> Result<(), String> {
        let time = |what: &str, v: f64, least: f64| {
            let fits = (least..=LONGEST).contains(&v);
            if fits { Ok(()) } else { Err(format!("{what} {v:?}, not {least} to {LONGEST} seconds")) }
        };
        let room = |n: usize| if n > 0 { Ok(()) } else { Err("max_tokens 0".to_owned()) };
        match op {
            Op::Request(t) => {
                time("delay", t.delay, 0.0)?;
                t.abort_after.map_or(Ok(()), |s| time("abort_after", s, 0.001))?;
                room(t.max_tokens)
            }
            Op::Retry { delay, max_tokens } => {
                time("delay", *delay, 0.0)?;
                room(*max_tokens)
            }
            Op::SideCall { persona, .. } if !self.personas.contains_key(persona) => {
                Err(format!("asks {persona}, which the plan does not have"))
            }
            Op::SideCall { max_tokens, .. } | Op::Compact { max_tokens, .. } => room(*max_tokens),
            Op::Wait { name } => {
                let signals = |o: &Op| matches!(o, Op::Signal { name: n } if n == name);
                match self.ops().any(|(_, o)| signals(o)) {
                    true => Ok(()),
                    false => Err(format!("waits for {name}, which nobody signals")),
                }
            }
            Op::Spawn { actors } => {
                let subagent =
                    |n: &String| self.actors.iter().any(|a| a.name == *n && !a.top && a.name != actor.name);
                match actors.iter().find(|n| !subagent(n)) {
                    Some(n) => Err(format!("spawns {n}, which is no subagent of the plan")),
                    None => Ok(()),
                }
            }
            Op::Signal { .. } | Op::Lockstep | Op::ClearToolResults { .. } => Ok(()),
        }
    }

    fn ops(&self) -> impl Iterator<Item = (&Actor, &Op)> {
        self.actors.iter().flat_map(|a| a.ops.iter().map(move |o| (a, o)))
    }

    /// How many requests it sends.
    pub fn counts(&self) -> Counts {
        let mut c = Counts { requests: 0, main_continuing: 0, aborted: 0 };
        for (actor, op) in self.ops() {
            let class = match op {
                Op::Request(t) if t.abort_after.is_some() => {
                    c.aborted += 1;
                    continue;
                }
                Op::Request(t) => t.class,
                Op::Retry { .. } => Class::Retry,
                Op::SideCall { .. } => Class::Check,
                Op::Compact { .. } => Class::Compaction,
                _ => continue,
            };
            c.requests += 1;
            c.main_continuing += usize::from(actor.top && class.continuing());
        }
        c
    }

    /// The seed that a request's sampler gets: 31 bits, equal for every engine.
    pub fn request_seed(&self, actor: &str, index: usize) -> u32 {
        (Rng::named(self.seed, &format!("request {actor} {index}")).bits() >> 33) as u32
    }
}

/// What a plan is made of.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions {
    /// Of all random choices.
    pub seed: u64,
    /// Share of the turns: n turns become max(2, n x scale rounded half to even).
    pub scale: f64,
    /// Context limit; every token quantity is multiplied by its share of [`FULL_CONTEXT`].
    pub context: usize,
}

struct Builder<'a> {
    corpus: &'a Corpus,
    options: PlanOptions,
    factor: f64,
    actors: Vec<Actor>,
}

/// A session being written.
struct Session<'a> {
    name: &'static str,
    observer: Observer<'a>,
    rng: Rng,
    ops: Vec<Op>,
}

const ASKS: [&str; 8] = [
    "Look into why this path is slower than the other one and fix it.",
    "The last change broke a case that no test covers. Find it.",
    "Make this configurable, with the present value as the default.",
    "Simplify this without changing what callers see.",
    "Write the missing tests for this file first, then continue.",
    "Check that errors here name the file and the offset.",
    "Continue with the next item of the list.",
    "Explain what you found before changing anything.",
];

/// The agent scenario on a corpus.
pub fn agentic(corpus: &Corpus, options: PlanOptions) -> Plan {
    let factor = options.context as f64 / FULL_CONTEXT as f64;
    let mut b = Builder { corpus, options, factor, actors: Vec::new() };
    b.session_a();
    b.session_b();
    b.session_c();
    let roles = [
        ("coder", Role::Coder),
        ("pair", Role::Pair),
        ("explorer", Role::Explorer),
        ("reviewer", Role::Reviewer),
        ("compactor", Role::Compactor),
        ("checker", Role::Checker),
    ];
    let persona = |(name, role): (&str, Role)| {
        let mut rng = Rng::named(options.seed, &format!("persona {name}"));
        (name.to_owned(), role.persona(corpus, factor, &mut rng))
    };
    Plan {
        version: PLAN_VERSION,
        scenario: "agentic_ab".into(),
        corpus: format!("{} {}", corpus.name, corpus.digest()),
        seed: options.seed,
        scale_milli: (options.scale * 1000.0).round() as u32,
        context: options.context,
        personas: roles.into_iter().map(persona).collect(),
        actors: b.actors,
    }
}

impl<'a> Builder<'a> {
    /// Turns at this scale, at least two; halves go to the even neighbour.
    fn n(&self, turns: usize) -> usize {
        (turns as f64 * self.options.scale).round_ties_even().max(2.0) as usize
    }

    fn tokens(&self, full: f64, floor: usize) -> usize {
        ((full * self.factor).round() as usize).max(floor)
    }

    fn session(&self, name: &'static str, area: Area, mix: &'a [Share]) -> Session<'a> {
        Session {
            name,
            observer: Observer::new(self.corpus, self.corpus.area(area), mix, self.factor),
            rng: Rng::named(self.options.seed, name),
            ops: Vec::new(),
        }
    }

    fn turn(&self, class: Class) -> Turn {
        Turn {
            class,
            delay: 0.0,
            observation: None,
            user: None,
            max_tokens: self.tokens(64_000.0, 64),
            copy: false,
            abort_after: None,
            tools: true,
        }
    }

    /// Old tool calls and results until about `full` tokens at full context, with a note of progress now and then.
    fn history(&self, s: &mut Session<'_>, full: f64) -> Vec<serde_json::Value> {
        let target = self.tokens(full, 256);
        let mut out = vec![message("user", ASKS[s.rng.below(ASKS.len())])];
        let mut size = 0;
        let mut i = 0;
        while size < target {
            i += 1;
            if i % 9 == 0 {
                out.push(message(
                    "assistant",
                    "The next part is done and its tests pass. I continue with the rest.",
                ));
                out.push(message("user", "Keep going."));
                size += 40;
                continue;
            }
            let o = s.observer.any(&mut s.rng);
            size += estimate(&o.text) + 20;
            let id = format!("call_{}_{i}", s.name);
            let function = serde_json::json!({ "name": o.tool, "arguments": o.arguments.to_string() });
            let call = serde_json::json!({ "id": id, "type": "function", "function": function });
            out.push(serde_json::json!({ "role": "assistant", "content": "", "tool_calls": [call] }));
            out.push(serde_json::json!({ "role": "tool", "tool_call_id": id, "content": o.text }));
        }
        out
    }

    fn loops(&self, s: &mut Session<'_>, turns: usize, class: Class) -> Vec<Turn> {
        (0..turns)
            .map(|_| {
                let o = s.observer.any(&mut s.rng);
                Turn { delay: o.seconds, observation: Some(o), ..self.turn(class) }
            })
            .collect()
    }

    /// The user wants a whole file written again.
    fn copy(&self, s: &mut Session<'_>, turn: &mut Turn) {
        let (path, text) = s.observer.whole_file(&mut s.rng);
        turn.user = Some(format!(
            "Write {path} anew with write_file, complete and unchanged but for one comment at its top that says what \
             the file does:\n\n{text}"
        ));
        turn.copy = true;
        turn.delay += round(s.rng.range(6.0, 14.0));
    }

    fn report_turn(&self, s: &mut Session<'_>, names: &[&str]) -> Turn {
        let reports = names.iter().map(|n| {
            let finding = s.observer.of(Kind::Grep, 600.0, &mut s.rng);
            format!("Report of {n}:\n{}\n", finding.text)
        });
        let user = reports.collect::<Vec<_>>().join("\n");
        Turn { delay: 0.2, user: Some(user), ..self.turn(Class::Loop) }
    }

    fn subagents(&mut self, s: &mut Session<'a>, persona: &str, names: &[&'static str], turns: usize) {
        for name in names {
            let mut rng = Rng::named(self.options.seed, name);
            let task = format!("{} Start in the part that {} works on.", ASKS[rng.below(ASKS.len())], s.name);
            let mut ops = Vec::new();
            for i in 0..turns {
                let class = if i == 0 { Class::SubagentFirst } else { Class::SubagentLoop };
                let mut turn = self.turn(class);
                if i == 0 {
                    turn.user = Some(task.clone());
                } else {
                    let o = s.observer.any(&mut rng);
                    turn.delay = o.seconds;
                    turn.observation = Some(o);
                }
                if i + 1 == turns && i > 0 {
                    turn.user = Some("Stop here and write the final report.".into());
                }
                ops.push(Op::Request(turn));
            }
            self.actors.push(Actor {
                name: (*name).into(),
                persona: persona.into(),
                top: false,
                history: Vec::new(),
                ops,
            });
        }
        s.ops.push(Op::Spawn { actors: names.iter().map(|n| (*n).into()).collect() });
        let turn = self.report_turn(s, names);
        s.ops.push(Op::Request(turn));
    }

    fn cold(&self, s: &mut Session<'_>) {
        let user = Some("Continue where we stopped: first say in two sentences where that is.".into());
        s.ops.push(Op::Request(Turn { user, ..self.turn(Class::ColdResume) }));
    }

    fn finish(&mut self, s: Session<'a>, persona: &str, history: Vec<serde_json::Value>) {
        self.actors.push(Actor {
            name: s.name.into(),
            persona: persona.into(),
            top: true,
            history,
            ops: s.ops,
        });
    }

    fn check(&self, s: &mut Session<'_>) {
        s.ops.push(Op::SideCall {
            persona: "checker".into(),
            instruction: "Is this session on course? Answer with the JSON object only.".into(),
            max_tokens: self.tokens(256.0, 32),
        });
    }

    fn session_a(&mut self) {
        let mut s = self.session("A", Area::Engine, &ENGINE);
        let history = self.history(&mut s, 85_000.0);
        self.cold(&mut s);
        s.ops.extend([signal("A_resumed"), wait("C_resumed"), Op::Lockstep]);
        let mut turns = self.loops(&mut s, self.n(7), Class::Loop);
        if let Some(t) = turns.get_mut(4) {
            // An edit of many lines.
            let o = s.observer.of(Kind::Read, 2600.0, &mut s.rng);
            t.observation = Some(o);
            t.user = Some("Apply this with edit_file, in as few edits as possible.".into());
            t.delay = round(s.rng.range(5.0, 12.0));
        }
        s.ops.extend(turns.into_iter().map(Op::Request));
        let n = self.n(5);
        self.subagents(&mut s, "explorer", &["explore-1", "explore-2", "explore-3", "explore-4"], n);
        let mut turns = self.loops(&mut s, self.n(9), Class::Loop);
        if let Some(t) = turns.get_mut(5) {
            self.copy(&mut s, t);
        }
        s.ops.extend(turns.into_iter().map(Op::Request));
        let notes: Vec<String> = (0..6).map(|_| s.observer.of(Kind::Grep, 500.0, &mut s.rng).text).collect();
        s.ops.push(Op::Compact {
            instruction: "Summarise this session so that it can go on in a new context.".into(),
            summary: format!("Summary of the session so far:\n{}", notes.join("\n")),
            max_tokens: self.tokens(8192.0, 64),
        });
        s.ops.push(Op::Request(Turn {
            user: Some("Go on from the summary.".into()),
            ..self.turn(Class::Restart)
        }));
        s.ops.push(signal("A_restarted"));
        let turns = self.loops(&mut s, self.n(7), Class::Loop);
        s.ops.extend(turns.into_iter().map(Op::Request));
        let n = self.n(4);
        self.subagents(&mut s, "explorer", &["explore-5", "explore-6", "explore-7"], n);
        s.ops.extend([wait("B_done"), wait("C_done")]);
        let mut turns = self.loops(&mut s, self.n(6), Class::Loop);
        if let Some(t) = turns.get_mut(3) {
            self.copy(&mut s, t);
        }
        s.ops.extend(turns.into_iter().map(Op::Request));
        self.subagents(&mut s, "reviewer", &["review-2"], n);
        s.ops.push(Op::Request(Turn {
            user: Some("Write the text of the pull request: about 1,500 words, no tools.".into()),
            delay: round(s.rng.range(8.0, 15.0)),
            tools: false,
            ..self.turn(Class::Loop)
        }));
        self.finish(s, "coder", history);
    }

    fn session_b(&mut self) {
        let mut s = self.session("B", Area::Tools, &TOOLS);
        let history = self.history(&mut s, 60_000.0);
        s.ops.push(wait("A_resumed"));
        self.cold(&mut s);
        s.ops.extend([signal("B_resumed"), Op::Lockstep]);
        let mut turns = self.loops(&mut s, self.n(11), Class::Loop);
        if let Some(t) = turns.get_mut(8) {
            self.copy(&mut s, t);
        }
        for (i, turn) in turns.into_iter().enumerate() {
            let max_tokens = turn.max_tokens;
            s.ops.push(Op::Request(turn));
            if i == 3 {
                s.ops.push(Op::Retry { delay: 4.0, max_tokens });
            }
            if i == 5 {
                self.check(&mut s);
            }
        }
        let n = self.n(4);
        self.subagents(&mut s, "explorer", &["survey-1", "survey-2"], n);
        s.ops.push(wait("A_restarted"));
        let user = Some(ASKS[s.rng.below(ASKS.len())].into());
        s.ops.push(Op::Request(Turn { user, delay: 8.0, ..self.turn(Class::AfterIdle) }));
        let turns = self.loops(&mut s, self.n(4), Class::Loop);
        s.ops.extend(turns.into_iter().map(Op::Request));
        self.check(&mut s);
        s.ops.push(Op::ClearToolResults { keep: 20 });
        let turns = self.loops(&mut s, 1, Class::HistoryEdit);
        s.ops.extend(turns.into_iter().map(Op::Request));
        let turns = self.loops(&mut s, self.n(5), Class::Loop);
        s.ops.extend(turns.into_iter().map(Op::Request));
        s.ops.push(signal("B_done"));
        self.finish(s, "pair", history);
    }

    fn session_c(&mut self) {
        let mut s = self.session("C", Area::Tests, &TESTS);
        let history = self.history(&mut s, 25_000.0);
        s.ops.push(wait("B_resumed"));
        self.cold(&mut s);
        s.ops.extend([signal("C_resumed"), Op::Lockstep]);
        let mut turns = self.loops(&mut s, self.n(16), Class::Loop);
        for i in [4, 13] {
            if let Some(t) = turns.get_mut(i) {
                self.copy(&mut s, t);
            }
        }
        let n = self.n(4);
        for (i, turn) in turns.into_iter().enumerate() {
            s.ops.push(Op::Request(turn));
            if i == 8 {
                let log = s.observer.log(16_000.0, &mut s.rng);
                let aborted = Turn {
                    user: Some(format!("The build machine says this. What is wrong?\n\n{log}")),
                    delay: 12.0,
                    abort_after: Some(1.5),
                    ..self.turn(Class::Aborted)
                };
                s.ops.push(Op::Request(aborted));
                s.ops.push(Op::Request(Turn { delay: 4.0, ..self.turn(Class::AbortRetry) }));
            }
            if i == 11 {
                self.subagents(&mut s, "reviewer", &["review-1"], n);
            }
        }
        s.ops.push(signal("C_done"));
        self.finish(s, "coder", history);
    }
}

fn message(role: &str, text: &str) -> serde_json::Value {
    serde_json::json!({ "role": role, "content": text })
}

fn signal(name: &str) -> Op {
    Op::Signal { name: name.into() }
}

fn wait(name: &str) -> Op {
    Op::Wait { name: name.into() }
}

/// Delays have two decimals, so that a plan reads the same everywhere.
fn round(seconds: f64) -> f64 {
    (seconds * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(scale: f64, context: usize) -> Plan {
        agentic(&Corpus::embedded().unwrap(), PlanOptions { seed: 42, scale, context })
    }

    /// Request counts of the original's scenario at these scales.
    #[test]
    fn scales_send_the_published_number_of_requests() {
        for (scale, requests) in [(0.3, 54), (0.5, 68), (0.6, 79), (0.75, 102), (1.0, 130)] {
            assert_eq!(plan(scale, 4096).counts().requests, requests, "scale {scale}");
        }
        assert_eq!(plan(0.5, 4096).counts().main_continuing, 41);
        assert_eq!(plan(1.0, 4096).counts().aborted, 1);
    }

    #[test]
    fn equal_options_give_equal_plans_and_others_do_not() {
        let a = plan(0.5, 8192);
        assert_eq!(a.hash(), plan(0.5, 8192).hash());
        assert_ne!(a.hash(), plan(0.5, 16384).hash());
        assert_ne!(a.hash(), plan(0.6, 8192).hash());
        let other =
            agentic(&Corpus::embedded().unwrap(), PlanOptions { seed: 43, scale: 0.5, context: 8192 });
        assert_ne!(a.hash(), other.hash());
        let back: Plan = serde_json::from_str(&serde_json::to_string(&a).unwrap()).unwrap();
        assert_eq!(back.hash(), a.hash());
    }

    #[test]
    fn damaged_plans_are_refused_with_the_place() {
        let good = plan(0.5, 4096);
        good.check().unwrap();
        plan(1.0, MIN_CONTEXT).check().unwrap();
        let refused = |words: &str, damage: &dyn Fn(&mut Plan)| {
            let mut p = good.clone();
            damage(&mut p);
            let e = p.check().unwrap_err();
            assert!(e.contains(words), "{words:?} in {e:?}");
        };
        // The first op of A is a request.
        let first = |p: &mut Plan, damage: &dyn Fn(&mut Turn)| {
            let a = p.actors.iter_mut().find(|a| a.name == "A").unwrap();
            let Op::Request(turn) = &mut a.ops[0] else { panic!("a request") };
            damage(turn);
        };
        for bad in [-1.0, -0.001, 0.0, 1e300, f64::NAN, f64::INFINITY] {
            refused("A, op 0: abort_after", &|p| first(p, &|t| t.abort_after = Some(bad)));
        }
        for bad in [-5.0, 1e300, f64::NAN] {
            refused("A, op 0: delay", &|p| first(p, &|t| t.delay = bad));
        }
        refused("A, op 0: max_tokens 0", &|p| first(p, &|t| t.max_tokens = 0));
        refused("context 5,", &|p| p.context = 5);
        refused("context", &|p| p.context = usize::MAX);
        refused("two actors are named", &|p| p.actors.extend_from_within(..1));
        refused("no session", &|p| p.actors.clear());
        refused("is spawned 1 times, not 0", &|p| p.actors.iter_mut().for_each(|a| a.top = true));
        for (op, words) in [
            (Op::Wait { name: "x".into() }, "waits for x"),
            (Op::Spawn { actors: vec!["x".into()] }, "spawns x"),
            (Op::Retry { delay: -1.0, max_tokens: 1 }, "delay -1"),
            (Op::Retry { delay: 0.0, max_tokens: 0 }, "max_tokens 0"),
            (Op::Compact { instruction: "".into(), summary: "".into(), max_tokens: 0 }, "max_tokens 0"),
            (
                Op::SideCall { persona: "x".into(), instruction: "".into(), max_tokens: 1 },
                "asks x, which the plan does not have",
            ),
        ] {
            refused(words, &|p| p.actors.iter_mut().filter(|a| a.top).for_each(|a| a.ops.push(op.clone())));
        }
        // Two subagents that spawn each other would never end.
        refused("is spawned 2 times, not 1", &|p| {
            for (name, other) in [("explore-1", "explore-2"), ("explore-2", "explore-1")] {
                let sub = p.actors.iter_mut().find(|a| a.name == name).unwrap();
                sub.ops.push(Op::Spawn { actors: vec![other.into()] });
            }
        });
    }

    #[test]
    fn request_seeds_differ_within_a_plan() {
        let p = plan(1.0, 4096);
        let mut seeds: Vec<u32> =
            p.actors.iter().flat_map(|a| (0..40).map(|i| p.request_seed(&a.name, i))).collect();
        let n = seeds.len();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), n);
    }

    #[test]
    fn histories_reach_their_size_at_full_context() {
        let p = plan(0.3, FULL_CONTEXT);
        for (name, tokens) in [("A", 85_000), ("B", 60_000), ("C", 25_000)] {
            let a = p.actors.iter().find(|a| a.name == name).unwrap();
            let size: usize = a.history.iter().map(|m| estimate(m["content"].as_str().unwrap_or(""))).sum();
            assert!(size > tokens * 9 / 10 && size < tokens * 12 / 10, "{name}: {size}");
        }
    }
}
