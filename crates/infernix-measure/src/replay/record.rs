//! From an agent's real traffic to a plan that can be played: conversations are found by what their requests share,
//! and only what the client said is kept.

use super::observe::Observation;
use super::persona::Persona;
use super::plan::{Actor, Class, FULL_CONTEXT, Op, PLAN_VERSION, Plan, Turn};
use crate::error::{MeasureError, Result};
use crate::load::rng::Rng;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// One request as it passed.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Seconds from the start to the request.
    pub sent: f64,
    /// To the end of its answer.
    pub done: f64,
    /// Its body, of the chat protocol.
    pub body: Value,
    /// Whether the client broke it off.
    pub aborted: bool,
}

/// Refuses a name under which a scenario could not be saved in the end: one that is taken, or where nothing can be written.
///
/// # Errors
/// Why not.
pub fn check_place(path: &Path) -> Result<()> {
    crate::files::check_free(path, false)?;
    let partial = crate::files::partial(path);
    File::create_new(&partial).map_err(MeasureError::io(path, "creating the scenario"))?;
    std::fs::remove_file(&partial).map_err(MeasureError::io(&partial, "removing"))
}

/// Saves a scenario under a name that is free. Prompts are private: the file is its owner's alone.
///
/// # Errors
/// A name that is taken by now, a disk that is full; nothing is left then.
pub fn save(path: &Path, plan: &Plan) -> Result<()> {
    crate::files::check_free(path, false)?;
    let partial = crate::files::partial(path);
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&partial).map_err(MeasureError::io(path, "creating the scenario"))?;
    let text = serde_json::to_string(plan).unwrap_or_default();
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    let saved = written
        .map_err(MeasureError::io(path, "writing the scenario"))
        .and_then(|()| crate::files::publish(&partial, path));
    if saved.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    saved
}

/// What becomes of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Texts {
    /// Word for word.
    Keep,
    /// Each line becomes hexadecimal digits of its hash under a key that is thrown away: equal lines stay equal.
    Hash,
    /// The same, in words of a small list.
    Synthesise,
}

/// Replaces texts line by line, so that prompts share what they shared before.
struct Disguise {
    texts: Texts,
    key: [u8; 32],
}

impl Disguise {
    fn text(&self, text: &str) -> String {
        if self.texts == Texts::Keep {
            return text.to_owned();
        }
        text.split('\n').map(|line| self.line(line)).collect::<Vec<_>>().join("\n")
    }

    fn line(&self, line: &str) -> String {
        let length = line.chars().count();
        let mut reader = blake3::Hasher::new_keyed(&self.key).update(line.as_bytes()).finalize_xof();
        let mut seed = [0; 8];
        reader.fill(&mut seed);
        let mut rng = Rng::new(u64::from_le_bytes(seed));
        let mut out = String::with_capacity(length);
        while out.len() < length {
            match self.texts {
                Texts::Hash => out.push_str(&format!("{:016x} ", rng.bits())),
                _ => {
                    out.push_str(crate::load::data::word(&mut rng));
                    out.push(' ');
                }
            }
        }
        out.truncate(length);
        out
    }

    /// A message with its texts replaced; roles, ids and tool names stay.
    fn message(&self, message: &Value) -> Value {
        let mut out = json!({ "role": message["role"], "content": self.text(&content(message)) });
        for key in ["tool_call_id", "name"] {
            if let Some(v) = message.get(key).filter(|v| v.is_string()) {
                out[key] = v.clone();
            }
        }
        if let Some(calls) = message.get("tool_calls").and_then(Value::as_array) {
            let call = |c: &Value| {
                let arguments = c.pointer("/function/arguments").and_then(Value::as_str).unwrap_or("{}");
                let arguments = match self.texts {
                    Texts::Keep => arguments.to_owned(),
                    _ => json!({ "text": self.text(arguments).replace(['"', '\\'], " ") }).to_string(),
                };
                let name = c.pointer("/function/name").cloned().unwrap_or_default();
                json!({ "id": c["id"], "type": "function", "function": { "name": name, "arguments": arguments } })
            };
            out["tool_calls"] = calls.iter().map(call).collect();
        }
        out
    }
}

/// The text of a message, its parts joined. Media are not replayed: the name of their kind stands for each.
fn content(message: &Value) -> String {
    let part = |p: &Value| match p.get("text").and_then(Value::as_str) {
        Some(text) => text.to_owned(),
        None => format!("[{}]", p["type"].as_str().unwrap_or("part")),
    };
    match message.get("content") {
        Some(Value::String(s)) => s.clone(),
        Some(Value::Array(parts)) => parts.iter().map(part).collect::<Vec<_>>().join("\n"),
        _ => String::new(),
    }
}

fn is_assistant(m: &Value) -> bool {
    m["role"] == "assistant"
}

/// Whether a message is the one sent before. What an assistant said is the engine's, not the client's.
fn same(a: &Value, b: &Value) -> bool {
    a["role"] == b["role"] && (is_assistant(a) || content(a) == content(b))
}

/// A conversation as far as it has been recorded.
struct Thread {
    actor: usize,
    system: String,
    messages: Vec<Value>,
    done: f64,
}

/// The plan of a recording. Requests of one conversation become turns of one session, with the pauses between
/// them; a request that continues none begins a session.
pub fn plan(name: &str, requests: &[Recorded], texts: Texts, key: [u8; 32]) -> Plan {
    let disguise = Disguise { texts, key };
    let mut personas: BTreeMap<String, Persona> = BTreeMap::new();
    let mut actors: Vec<Actor> = Vec::new();
    let mut threads: Vec<Thread> = Vec::new();
    let mut longest = 0;
    let mut first = None;
    for r in requests {
        let all = r.body["messages"].as_array().cloned().unwrap_or_default();
        let system: Vec<String> = all.iter().filter(|m| is_system(m)).map(content).collect();
        let system = system.join("\n\n");
        let messages: Vec<Value> = all.into_iter().filter(|m| !is_system(m)).collect();
        if messages.is_empty() {
            continue;
        }
        // How long the agent took to be started is no part of its work.
        let start = *first.get_or_insert(r.sent);
        let tools = r.body["tools"].as_array().cloned().unwrap_or_default();
        let max_tokens = ["max_completion_tokens", "max_tokens"]
            .iter()
            .find_map(|k| r.body[*k].as_u64().filter(|n| *n > 0));
        let max_tokens = max_tokens.map_or(64_000, |n| usize::try_from(n).unwrap_or(64_000));
        longest = longest.max(r.body.to_string().len());
        let known = threads.iter_mut().filter(|t| t.system == system && goes_on(&t.messages, &messages));
        let known = known.max_by_key(|t| t.messages.len());
        let turn = |class, delay, new: &[Value]| {
            turn(&disguise, class, delay, new, max_tokens, r, !tools.is_empty())
        };
        match known {
            Some(t) => {
                let delay = (r.sent - t.done).max(0.0);
                let new = &messages[t.messages.len()..];
                let op = if new.is_empty() {
                    Op::Retry { delay: round(delay), max_tokens }
                } else {
                    Op::Request(turn(Class::Loop, delay, new))
                };
                actors[t.actor].ops.push(op);
                t.messages = messages;
                t.done = r.done;
            }
            None => {
                let id = blake3::hash(format!("{system}\u{1}{}", Value::from(tools.clone())).as_bytes());
                let persona = format!("p-{}", &id.to_hex()[..8]);
                personas
                    .entry(persona.clone())
                    .or_insert_with(|| Persona { system: disguise.text(&system), tools: tools.clone() });
                // What follows the last answer is the first turn, all before it the history.
                let split = messages.iter().rposition(is_assistant).map_or(0, |i| i + 1);
                let class = if split == 0 { Class::SubagentFirst } else { Class::ColdResume };
                actors.push(Actor {
                    name: format!("s{}", actors.len() + 1),
                    persona,
                    top: true,
                    history: messages[..split].iter().map(|m| disguise.message(m)).collect(),
                    ops: vec![Op::Request(turn(class, r.sent - start, &messages[split..]))],
                });
                threads.push(Thread { actor: actors.len() - 1, system, messages, done: r.done });
            }
        }
    }
    // Bytes over 3 are more tokens than any text has; the context is at least the longest request's.
    let context = (longest / 3 + 8192).next_multiple_of(1024).min(FULL_CONTEXT);
    Plan {
        version: PLAN_VERSION,
        scenario: name.to_owned(),
        corpus: "recorded".into(),
        seed: 42,
        scale_milli: 1000,
        context,
        personas,
        actors,
    }
}

fn is_system(m: &Value) -> bool {
    m["role"] == "system" || m["role"] == "developer"
}

fn goes_on(before: &[Value], now: &[Value]) -> bool {
    now.len() >= before.len() && before.iter().zip(now).all(|(a, b)| same(a, b))
}

fn turn(
    disguise: &Disguise,
    class: Class,
    delay: f64,
    new: &[Value],
    max_tokens: usize,
    r: &Recorded,
    tools: bool,
) -> Turn {
    let texts = |tool: bool| {
        let of = new.iter().filter(|m| !is_assistant(m) && (m["role"] == "tool") == tool).map(content);
        let joined = of.collect::<Vec<_>>().join("\n\n");
        (!joined.is_empty()).then(|| disguise.text(&joined))
    };
    let observation =
        texts(true).map(|text| Observation { tool: String::new(), arguments: json!({}), text, seconds: 0.0 });
    let user = texts(false);
    // A turn without a word would leave a request without a message.
    let nothing = user.is_none() && observation.is_none() && new.iter().any(|m| !is_assistant(m));
    let user = user.or_else(|| nothing.then(|| "[empty]".to_owned()));
    Turn {
        class: if r.aborted { Class::Aborted } else { class },
        delay: round(delay),
        observation,
        user,
        max_tokens,
        copy: false,
        abort_after: r.aborted.then(|| round((r.done - r.sent).max(0.05))),
        tools,
    }
}

fn round(seconds: f64) -> f64 {
    (seconds * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(sent: f64, messages: Value) -> Recorded {
        Recorded {
            sent,
            done: sent + 1.0,
            body: json!({ "messages": messages, "max_tokens": 100 }),
            aborted: false,
        }
    }

    fn recording() -> Vec<Recorded> {
        let system = json!({ "role": "system", "content": "You help.\nSecret rule." });
        let user = json!({ "role": "user", "content": "Read it" });
        let call = json!({ "role": "assistant", "content": "ok", "tool_calls":
            [{ "id": "1", "function": { "name": "read", "arguments": "{\"path\":\"secret\"}" } }] });
        let result = json!({ "role": "tool", "tool_call_id": "1", "content": "line one\nline two" });
        vec![
            request(0.0, json!([system, user])),
            // Another conversation in between.
            request(0.5, json!([{ "role": "user", "content": "Title?" }])),
            request(3.0, json!([system, user, call, result])),
            request(6.0, json!([system, user, call, result])),
        ]
    }

    #[test]
    fn conversations_are_told_apart_and_keep_their_pauses() {
        let p = plan("mine", &recording(), Texts::Keep, [0; 32]);
        p.check().unwrap();
        assert_eq!(p.actors.len(), 2);
        assert_eq!(p.counts().requests, 4);
        let Op::Request(second) = &p.actors[0].ops[1] else { panic!("a turn") };
        assert_eq!(second.observation.as_ref().unwrap().text, "line one\nline two");
        assert_eq!((second.delay, second.user.clone()), (2.0, None));
        assert_eq!(p.actors[0].ops[2], Op::Retry { delay: 2.0, max_tokens: 100 });
        let Op::Request(other) = &p.actors[1].ops[0] else { panic!("a turn") };
        assert_eq!((other.delay, other.user.as_deref()), (0.5, Some("Title?")));
    }

    #[test]
    fn a_message_of_an_image_alone_leaves_a_text_to_play() {
        let image = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AA" } });
        let said = |content: Value| {
            let p = plan(
                "mine",
                &[request(0.0, json!([{ "role": "user", "content": content }]))],
                Texts::Keep,
                [0; 32],
            );
            p.check().unwrap();
            let Op::Request(turn) = &p.actors[0].ops[0] else { panic!("a turn") };
            turn.user.clone().unwrap_or_default()
        };
        assert_eq!(said(json!([image])), "[image_url]");
        assert_eq!(said(json!([{ "type": "text", "text": "see" }, image])), "see\n[image_url]");
        assert_eq!([said(json!("")), said(json!([])), said(Value::Null)], ["[empty]"; 3]);
    }

    #[test]
    fn the_time_before_the_first_request_is_no_delay() {
        let late: Vec<Recorded> = recording()
            .into_iter()
            .map(|r| Recorded { sent: r.sent + 40.0, done: r.done + 40.0, ..r })
            .collect();
        assert_eq!(
            plan("mine", &late, Texts::Keep, [0; 32]),
            plan("mine", &recording(), Texts::Keep, [0; 32])
        );
    }

    #[test]
    fn hidden_texts_keep_lengths_and_what_lines_share_and_nothing_else() {
        for texts in [Texts::Hash, Texts::Synthesise] {
            let p = plan("mine", &recording(), texts, [7; 32]);
            let text = serde_json::to_string(&p).unwrap();
            for secret in ["secret", "Secret", "line one", "Title"] {
                assert!(!text.contains(secret), "{texts:?}: {secret}");
            }
            let Op::Request(t) = &p.actors[0].ops[1] else { panic!("a turn") };
            let lines: Vec<usize> =
                t.observation.as_ref().unwrap().text.split('\n').map(|l| l.chars().count()).collect();
            assert_eq!(lines, [8, 8]);
            let d = Disguise { texts, key: [7; 32] };
            assert_eq!(d.text("a line of text\nx"), format!("{}\n{}", d.line("a line of text"), d.line("x")));
            assert_ne!(d.line("line one"), Disguise { texts, key: [8; 32] }.line("line one"));
        }
    }
}
