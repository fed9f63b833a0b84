//! Recorded and made-up traffic.

use super::model::STOP;
use crate::numerics::round::mix;
use serde_json::Value;
use std::io::BufRead;

/// Experts of a layer that a trace may name: many more than any model has.
const MAX_EXPERTS: u32 = 1 << 16;

/// One request of a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceRequest {
    /// Seconds since the start.
    pub at: f64,
    /// Prompt.
    pub prompt: Vec<u32>,
    /// Where its sender said that a snapshot pays.
    pub markers: Vec<usize>,
    /// Its answer.
    pub output: Vec<u32>,
    /// Its conversation.
    pub session: Option<String>,
    /// Requests share cached prefixes within a salt only.
    pub salt: String,
    /// It neither used nor filled the cache.
    pub bypass: bool,
    /// It read its prompt past the cache and filled the cache.
    pub reread: bool,
}

/// Traffic, and the experts that were chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Requests in order of arrival.
    pub requests: Vec<TraceRequest>,
    /// By decode round: by layer: by row: experts.
    pub routing: Vec<Vec<Vec<Vec<u32>>>>,
    /// Digest of the model that was recorded; empty = unknown.
    pub model: String,
    /// Rows of its vocabulary; 0 = unknown.
    pub vocab: u64,
    /// Bytes of a KV page of it; 0 = unknown.
    pub page_bytes: u64,
    /// Bytes of a recurrent state of it; 0 = unknown.
    pub state_bytes: u64,
    /// Prompt tokens that came from the cache as it was recorded; `None` = there was no cache.
    pub cached: Option<u64>,
    /// Accepted drafts per round, and rounds, as recorded.
    pub accepted: u64,
    /// Decode rounds recorded.
    pub rounds: u64,
}

/// A value as an error shows it.
fn quoted(value: &Value) -> String {
    let mut text: String = value.to_string().chars().take(41).collect();
    if text.chars().count() > 40 {
        text.replace_range(text.char_indices().nth(40).map_or(text.len(), |c| c.0).., "...");
    }
    text
}

impl Trace {
    /// Reads a recorded trace.
    ///
    /// # Errors
    /// The line that makes no sense.
    pub fn read(input: impl BufRead) -> Result<Trace, String> {
        let mut trace = Trace::default();
        // By number: where its request is, and whether it has ended.
        let mut order = std::collections::HashMap::new();
        let mut lines = input.lines().enumerate().peekable();
        while let Some((n, line)) = lines.next() {
            let bad = |what: &str| format!("line {}: {what}", n + 1);
            let line = line.map_err(|e| bad(&e.to_string()))?;
            let v: Value = match serde_json::from_str(&line) {
                Ok(v) => v,
                // The process may have ended in the middle of its last line.
                Err(e) if e.is_eof() && n > 0 && lines.peek().is_none() => break,
                // The parser counts lines of its own.
                Err(e) if e.is_eof() => return Err(bad(&format!("cut off after {} bytes", line.len()))),
                Err(e) => return Err(bad(&e.to_string())),
            };
            if n == 0 {
                let version = v["infernix_trace"].as_u64().ok_or_else(|| bad("this is no trace"))?;
                if version != crate::sched::trace::VERSION {
                    return Err(bad(&format!("version {version} of the trace is not known")));
                }
                trace.model = v["model"].as_str().unwrap_or("").to_owned();
                trace.vocab = v["vocab"].as_u64().unwrap_or(0);
                trace.page_bytes = v["page_bytes"].as_u64().unwrap_or(0);
                trace.cached = v["prefix_cache"].as_bool().unwrap_or(true).then_some(0);
                continue;
            }
            let numbers = |v: &Value, field: &str| -> Result<Vec<u32>, String> {
                let list = v.as_array().ok_or_else(|| bad(&format!("{field}: expected a list of ids")))?;
                list.iter()
                    .map(|i| {
                        // The last one ends the simulator's answers.
                        let id = i.as_u64().and_then(|i| u32::try_from(i).ok()).filter(|i| *i < STOP);
                        id.ok_or_else(|| bad(&format!("{field}: {} is no id", quoted(i))))
                    })
                    .collect()
            };
            let vocab = trace.vocab;
            let ids = |field: &str| -> Result<Vec<u32>, String> {
                let ids = numbers(&v[field], field)?;
                let beyond = ids.iter().find(|id| vocab > 0 && u64::from(**id) >= vocab);
                beyond.map_or(Ok(()), |id| {
                    Err(bad(&format!("{field}: token {id} is beyond the vocabulary of {vocab}")))
                })?;
                Ok(ids)
            };
            if let Some(id) = v["request"].as_u64() {
                if order.insert(id, (trace.requests.len(), false)).is_some() {
                    return Err(bad(&format!("request: number {id} was there before")));
                }
                // Longer than any recording, and far from what a clock of nanoseconds can hold.
                let at = v["at"].as_f64().filter(|t| (0.0..1e9).contains(t));
                trace.requests.push(TraceRequest {
                    at: at.ok_or_else(|| bad("at: expected the seconds of the request's arrival"))?,
                    prompt: ids("prompt")?,
                    markers: numbers(&v["markers"], "markers")?.into_iter().map(|m| m as usize).collect(),
                    output: Vec::new(),
                    session: v["session"].as_str().map(str::to_owned),
                    salt: v["salt"].as_u64().filter(|n| *n > 0).map_or_else(String::new, |n| n.to_string()),
                    bypass: v["bypass"].as_bool().unwrap_or(false),
                    reread: v["reread"].as_bool().unwrap_or(false),
                });
            } else if let Some(id) = v["end"].as_u64() {
                let what = || bad(&format!("end: request {id} is not there"));
                let (at, ended) = order.get_mut(&id).ok_or_else(what)?;
                if std::mem::replace(ended, true) {
                    return Err(bad(&format!("end: request {id} has ended before")));
                }
                trace.requests[*at].output = ids("output")?;
                trace.cached = trace.cached.map(|n| n.saturating_add(v["cached"].as_u64().unwrap_or(0)));
                let count = |key: &str| v[key].as_u64().unwrap_or(0);
                trace.rounds = trace.rounds.saturating_add(count("rounds"));
                trace.accepted = trace.accepted.saturating_add(count("accepted"));
            } else if v["cache"] == "snapshot" {
                trace.state_bytes = trace.state_bytes.max(v["bytes"].as_u64().unwrap_or(0));
            } else if let Some(layers) = v["routing"].as_array() {
                let row = |v: &Value| -> Result<Vec<u32>, String> {
                    let row = numbers(v, "routing")?;
                    let beyond = row.iter().find(|e| **e >= MAX_EXPERTS);
                    beyond.map_or(Ok(()), |e| {
                        Err(bad(&format!("routing: expert {e} of at most {MAX_EXPERTS}")))
                    })?;
                    Ok(row)
                };
                let rows = |l: &Value| -> Result<Vec<Vec<u32>>, String> {
                    l.as_array().ok_or_else(|| bad("routing: expected rows"))?.iter().map(row).collect()
                };
                let layers = layers.iter().map(rows).collect::<Result<_, _>>()?;
                // Prompts use nearly every expert and stream them; what is resident matters to decode rounds.
                if v["call"] != "prompt" {
                    trace.routing.push(layers);
                }
            }
        }
        trace.requests.retain(|r| !r.prompt.is_empty());
        trace.requests.sort_by(|a, b| a.at.total_cmp(&b.at));
        Ok(trace)
    }

    /// Conversations of agents as replays show them: heads of tools and system prompt that sessions share, turns of a
    /// tool result and an answer that pile up, a context that is compacted when it grows too long, side requests.
    pub fn synthetic(s: &Synthetic) -> Trace {
        let mut trace = Trace::default();
        let text = |seed: u64, n: usize| -> Vec<u32> {
            (0..n as u64).map(|i| (mix(mix(seed) ^ i) % 200_000) as u32).collect()
        };
        let dice = |key: u64, n: u64| mix(s.seed ^ mix(key)) % n.max(1);
        for session in 0..s.sessions as u64 {
            let head = text(1000 + dice(session, s.heads as u64), s.head_tokens);
            let mut history: Vec<u32> = Vec::new();
            let mut at = session as f64 * s.session_gap;
            for turn in 0..s.turns as u64 {
                let key = session << 20 | turn;
                let user = text(key << 1, 50 + dice(key, 2 * s.turn_tokens as u64) as usize);
                let answer = text(key << 1 | 1, 20 + dice(!key, 2 * s.answer_tokens as u64) as usize);
                if head.len() + history.len() + user.len() > s.context {
                    // Compaction: a summary replaces the history.
                    history = text(!key, s.turn_tokens);
                }
                let mut prompt = [&head[..], &history, &user].concat();
                let opener = prompt.len();
                prompt.extend([1, 2, 3]);
                history = [&history[..], &user, &[1, 2, 3], &answer].concat();
                trace.requests.push(TraceRequest {
                    at,
                    prompt,
                    markers: vec![head.len(), opener],
                    output: answer,
                    session: Some(session.to_string()),
                    ..TraceRequest::default()
                });
                at += s.think_seconds * (0.25 + dice(key ^ 77, 1000) as f64 / 666.0);
            }
        }
        trace.requests.sort_by(|a, b| a.at.total_cmp(&b.at));
        trace
    }
}

/// Shape of made-up traffic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// Seed of everything.
    pub seed: u64,
    /// Conversations.
    pub sessions: usize,
    /// Turns of each.
    pub turns: usize,
    /// Different heads among them.
    pub heads: usize,
    /// Tokens of a head.
    pub head_tokens: usize,
    /// Mean tokens that a turn adds.
    pub turn_tokens: usize,
    /// Mean tokens of an answer.
    pub answer_tokens: usize,
    /// Tokens at which a conversation is compacted.
    pub context: usize,
    /// Seconds from one session's start to the next one's.
    pub session_gap: f64,
    /// Mean seconds between a session's turns.
    pub think_seconds: f64,
}

impl Default for Synthetic {
    fn default() -> Self {
        Synthetic {
            seed: 42,
            sessions: 40,
            turns: 30,
            heads: 3,
            head_tokens: 12_000,
            turn_tokens: 1200,
            answer_tokens: 300,
            context: 60_000,
            session_gap: 300.0,
            think_seconds: 45.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = r#"{"infernix_trace": 1, "page_bytes": 100, "vocab": 1000, "model": "m"}"#;

    fn read(lines: &[&str]) -> Result<Trace, String> {
        Trace::read([&[HEAD], lines].concat().join("\n").as_bytes())
    }

    #[test]
    fn what_was_recorded_is_read_and_a_torn_last_line_is_no_loss() {
        let trace = read(&[
            r#"{"at": 2.5, "request": 2, "prompt": [5], "markers": [], "max_tokens": 1, "session": null}"#,
            r#"{"at": 1.5, "request": 1, "prompt": [1, 2, 3], "markers": [2], "max_tokens": 4, "session": "a"}"#,
            r#"{"call": "prompt", "routing": [[[1, 2]], [[3, 4]]]}"#,
            r#"{"call": "decode", "routing": [[[5, 6]], [[7, 8]]]}"#,
            r#"{"cache": "snapshot", "tokens": 3, "bytes": 77}"#,
            r#"{"at": 3.0, "end": 1, "output": [9], "cached": 2, "rounds": 1, "drafted": 3, "accepted": 2}"#,
            r#"{"at": 3.5, "end": 2, "outp"#,
        ])
        .unwrap();
        let prompts: Vec<&[u32]> = trace.requests.iter().map(|r| &r.prompt[..]).collect();
        assert_eq!(prompts, [&[1, 2, 3][..], &[5]], "in the order of arrival");
        assert_eq!(trace.requests[0].output, [9]);
        assert_eq!(trace.routing, [[[[5, 6]], [[7, 8]]]], "decode rounds only");
        assert_eq!((&trace.model[..], trace.vocab), ("m", 1000));
        assert_eq!((trace.page_bytes, trace.state_bytes, trace.rounds, trace.accepted), (100, 77, 1, 2));
        assert_eq!(trace.cached, Some(2));
        let uncached = Trace::read(&br#"{"infernix_trace": 1, "prefix_cache": false}"#[..]).unwrap();
        assert_eq!(uncached.cached, None);
    }

    #[test]
    fn damaged_traces_are_refused_by_line() {
        let first = r#"{"at": 1.0, "request": 1, "prompt": [1], "markers": []}"#;
        for (line, what) in [
            (r#"{"at": 1.0, "request": 2, "prompt": [-1], "markers": []}"#, "prompt: -1 is no id"),
            (r#"{"at": 1.0, "request": 2, "prompt": 7, "markers": []}"#, "prompt: expected a list of ids"),
            (r#"{"at": 1.0, "request": 2, "prompt": [9999], "markers": []}"#, "token 9999 is beyond"),
            (r#"{"at": -1, "request": 2, "prompt": [1], "markers": []}"#, "at: expected"),
            (r#"{"at": 1e300, "request": 2, "prompt": [1], "markers": []}"#, "arrival"),
            (r#"{"at": 1.0, "request": 2, "prompt": [4294967295], "markers": []}"#, "no id"),
            (r#"{"at": 1.0, "request": 2, "prompt": [1], "markers": [1e99]}"#, "markers: 1e+99 is no id"),
            (r#"{"at": 1.0, "request": 2, "prompt": [1]}"#, "markers: expected"),
            (r#"{"at": 1.0, "request": 1, "prompt": [2], "markers": []}"#, "number 1 was there before"),
            (r#"{"end": 5, "output": []}"#, "request 5 is not there"),
            (r#"{"end": 1, "output": "x"}"#, "output: expected"),
            (r#"{"routing": [[[4000000000]]]}"#, "expert 4000000000"),
            (r#"{"routing": [3]}"#, "rows"),
            ("{]", "line 3"),
            // Only the last line may be torn.
            ("{", "line 3: cut off"),
            (r#"{"at": 1.0, "request": 2, "prom"#, "cut off"),
            ("", "cut off"),
        ] {
            let request = first.replace("\"request\": 1", "\"request\": 3");
            let error = read(&[first, line, &request]).unwrap_err();
            assert!(error.contains("line 3") && error.contains(what), "{line}: {error}");
        }
        let many =
            format!(r#"{{"end": 1, "output": [], "rounds": {0}, "accepted": {0}, "cached": {0}}}"#, u64::MAX);
        let (second, more) = (first.replace("\"request\": 1", "\"request\": 2"), many.replace("1,", "2,"));
        let trace = read(&[first, &second, &many, &more]).unwrap();
        assert_eq!((trace.rounds, trace.cached), (u64::MAX, Some(u64::MAX)));
        assert!(read(&[first, &many, &many]).unwrap_err().contains("ended before"));
        assert!(read(&[&"[".repeat(1 << 20), first]).is_err());
        assert!(Trace::read(&b"\xff\xfe"[..]).is_err());
        assert!(Trace::read(&b"{}"[..]).unwrap_err().contains("no trace"));
        assert!(Trace::read(&br#"{"infernix_trace": 2}"#[..]).unwrap_err().contains("version 2"));
    }
}
