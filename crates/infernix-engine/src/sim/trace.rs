//! Recorded and made-up traffic.

use crate::numerics::round::mix;
use serde_json::Value;
use std::io::BufRead;

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
}

/// Traffic, and the experts that were chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Requests in order of arrival.
    pub requests: Vec<TraceRequest>,
    /// By model call: by layer: by row: experts.
    pub routing: Vec<Vec<Vec<Vec<u32>>>>,
    /// Bytes of a KV page of the model that was recorded; 0 = unknown.
    pub page_bytes: u64,
    /// Bytes of a recurrent state of it; 0 = unknown.
    pub state_bytes: u64,
    /// Accepted drafts per round, and rounds, as recorded.
    pub accepted: u64,
    /// Decode rounds recorded.
    pub rounds: u64,
}

impl Trace {
    /// Reads a recorded trace.
    ///
    /// # Errors
    /// The line that makes no sense.
    pub fn read(input: impl BufRead) -> Result<Trace, String> {
        let mut trace = Trace::default();
        let mut order = std::collections::HashMap::new();
        for (n, line) in input.lines().enumerate() {
            let bad = |what: &str| format!("line {}: {what}", n + 1);
            let line = line.map_err(|e| bad(&e.to_string()))?;
            let v: Value = match serde_json::from_str(&line) {
                Ok(v) => v,
                // The process may have ended in the middle of its last line.
                Err(e) if e.is_eof() && n > 0 => break,
                Err(e) => return Err(bad(&e.to_string())),
            };
            if n == 0 {
                let version = v["infernix_trace"].as_u64().ok_or_else(|| bad("this is no trace"))?;
                if version != crate::sched::trace::VERSION {
                    return Err(bad(&format!("version {version} of the trace is not known")));
                }
                trace.page_bytes = v["page_bytes"].as_u64().unwrap_or(0);
                continue;
            }
            let ids = |v: &Value| -> Result<Vec<u32>, String> {
                let list = v.as_array().ok_or_else(|| bad("expected a list of ids"))?;
                list.iter()
                    .map(|i| {
                        i.as_u64().and_then(|i| u32::try_from(i).ok()).ok_or_else(|| bad("an id is no id"))
                    })
                    .collect()
            };
            if let Some(id) = v["request"].as_u64() {
                order.insert(id, trace.requests.len());
                trace.requests.push(TraceRequest {
                    at: v["at"].as_f64().unwrap_or(0.0),
                    prompt: ids(&v["prompt"])?,
                    markers: ids(&v["markers"])?.into_iter().map(|m| m as usize).collect(),
                    output: Vec::new(),
                    session: v["session"].as_str().map(str::to_owned),
                });
            } else if let Some(id) = v["end"].as_u64() {
                let at = order.get(&id).ok_or_else(|| bad("an end without its request"))?;
                trace.requests[*at].output = ids(&v["output"])?;
                trace.rounds += v["rounds"].as_u64().unwrap_or(0);
                trace.accepted += v["accepted"].as_u64().unwrap_or(0);
            } else if v["cache"] == "snapshot" {
                trace.state_bytes = trace.state_bytes.max(v["bytes"].as_u64().unwrap_or(0));
            } else if let Some(layers) = v["routing"].as_array() {
                let rows = |l: &Value| -> Result<Vec<Vec<u32>>, String> {
                    l.as_array().ok_or_else(|| bad("expected rows"))?.iter().map(ids).collect()
                };
                trace.routing.push(layers.iter().map(rows).collect::<Result<_, _>>()?);
            }
        }
        trace.requests.retain(|r| !r.prompt.is_empty());
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
