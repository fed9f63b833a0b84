//! Load on a server: `infernix bench serve` and `bench context`.

pub mod arrivals;
pub mod context;
pub mod data;
pub mod rng;
pub mod summary;

pub use arrivals::Rate;
pub use data::{Calibration, Dataset, Item};
pub use summary::{Goal, Summary};

use crate::client::{Endpoint, Exchange, LOOK, STACK};
use crate::error::{MeasureError, Result};
use rng::Rng;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How a server is loaded.
#[derive(Clone, Debug)]
pub struct Load {
    /// `/v1/chat/completions` or `/v1/completions`.
    pub path: String,
    /// Requests.
    pub requests: usize,
    /// Arrivals.
    pub rate: Rate,
    /// Shape of the gaps between arrivals; 1 is Poisson.
    pub burstiness: f64,
    /// Most requests in flight; more wait here. Waiting is not counted as latency.
    pub concurrency: Option<usize>,
    /// Uncounted requests before, one at a time.
    pub warm_up: usize,
    /// Of prompts and arrivals.
    pub seed: u64,
    /// Merged into each body.
    pub extra: Value,
    /// Limit of one request.
    pub timeout: Duration,
}

/// Requests on their way, each in a thread of its own.
struct Flights<'a> {
    endpoint: &'a Endpoint,
    load: &'a Load,
    /// What has ended, by the number of its item.
    ended: Vec<Option<Exchange>>,
    in_flight: usize,
    send: Sender<(usize, Exchange)>,
    receive: Receiver<(usize, Exchange)>,
    /// Set when nobody waits any more; streams then break off.
    gone: Arc<AtomicBool>,
    progress: &'a dyn Fn(&Exchange),
}

impl Flights<'_> {
    fn start(&mut self, number: usize, item: &Item) -> Result<()> {
        let (endpoint, path, limit) = (self.endpoint.clone(), self.load.path.clone(), self.load.timeout);
        let body = data::body(&path, &item.prompt, item.output, &self.load.extra);
        let (send, gone) = (self.send.clone(), Arc::clone(&self.gone));
        let fly = move || {
            let exchange = endpoint.stream_unless(&path, &body, limit, &gone).with_a_first_token();
            // Nobody listens after an interruption.
            let _ = send.send((number, exchange));
        };
        let thread = std::thread::Builder::new().stack_size(STACK).spawn(fly);
        thread.map_err(|e| MeasureError::Server(format!("request {number}: no thread: {e}")))?;
        self.in_flight += 1;
        Ok(())
    }

    /// Takes the next end, waiting at most so long for one.
    fn land(&mut self, longest: Duration) {
        if let Ok((number, exchange)) = self.receive.recv_timeout(longest) {
            self.in_flight -= 1;
            (self.progress)(&exchange);
            self.ended[number] = Some(exchange);
        }
    }
}

impl Drop for Flights<'_> {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}

/// Sends every item and waits for the answers, in the order of the items. `progress` hears of each end. An interruption
/// breaks off what is in flight: what had ended by then is given, and nothing of the others.
///
/// # Errors
/// A warm-up request that fails, a thread that cannot be started.
pub fn run(
    endpoint: &Endpoint,
    load: &Load,
    items: &[Item],
    interrupted: &AtomicBool,
    progress: &dyn Fn(&Exchange),
) -> Result<Vec<Exchange>> {
    let (send, receive) = channel();
    let mut flights = Flights {
        endpoint,
        load,
        ended: items.iter().map(|_| None).collect(),
        in_flight: 0,
        send,
        receive,
        gone: Arc::default(),
        progress,
    };
    for i in 0..load.warm_up.min(items.len()) {
        // A prompt of its own: the counted ones must not find it in a cache.
        let prompt = format!("warm-up {} {}", load.seed, i);
        let body = data::body(&load.path, &prompt, items[i].output, &load.extra);
        match endpoint.begin(&load.path, body, load.timeout)?.wait(interrupted) {
            Ok(Exchange { failure: Some(f), .. }) => {
                return Err(MeasureError::Server(format!("the warm-up request failed: {f}")));
            }
            Ok(_) => {}
            Err(_) => return Ok(Vec::new()),
        }
    }
    let own_times = items.iter().any(|i| i.at.is_some());
    let times = arrivals::arrivals(items.len(), load.rate, load.burstiness, load.seed);
    let most = load.concurrency.unwrap_or(usize::MAX).max(1);
    let stopped = || interrupted.load(Ordering::Relaxed);
    let start = Instant::now();
    for (i, item) in items.iter().enumerate() {
        let at = if own_times { item.at.unwrap_or(0.0) } else { times[i] };
        let at = start + Duration::from_secs_f64(at.clamp(0.0, 1e7));
        while let Some(left) = at.checked_duration_since(Instant::now()).filter(|d| !d.is_zero())
            && !stopped()
        {
            flights.land(left.min(LOOK));
        }
        while flights.in_flight >= most && !stopped() {
            flights.land(LOOK);
        }
        if stopped() {
            break;
        }
        flights.start(i, item)?;
    }
    while flights.in_flight > 0 && !stopped() {
        flights.land(LOOK);
    }
    Ok(std::mem::take(&mut flights.ended).into_iter().flatten().collect())
}

/// Counters of speculation as vLLM or this project's server names them, from a server's `/metrics`; `None` where it has none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SpecCounters {
    /// Rounds with a draft, which only vLLM counts.
    drafts: Option<f64>,
    drafted: f64,
    accepted: f64,
}

impl SpecCounters {
    /// As they stand now.
    pub fn read(endpoint: &Endpoint) -> Option<Self> {
        Self::parse(&endpoint.get_text("/metrics").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let sum = |name: &str| {
            let mut found = None;
            for line in text.lines().filter(|l| !l.starts_with('#')) {
                let Some(rest) = line.strip_prefix(name) else { continue };
                if !rest.starts_with(['{', ' ']) {
                    continue;
                }
                let value: f64 = rest.rsplit(' ').next()?.parse().ok()?;
                *found.get_or_insert(0.0) += value;
            }
            found
        };
        Some(Self {
            drafts: sum("vllm:spec_decode_num_drafts_total"),
            drafted: sum("vllm:spec_decode_num_draft_tokens_total")
                .or_else(|| sum("infernix_spec_draft_tokens_total"))?,
            accepted: sum("vllm:spec_decode_num_accepted_tokens_total")
                .or_else(|| sum("infernix_spec_accepted_tokens_total"))?,
        })
    }

    /// What a run added, under vLLM's result keys.
    pub fn since(self, before: Self) -> Map<String, Value> {
        let (drafted, accepted) = (self.drafted - before.drafted, self.accepted - before.accepted);
        let drafts = self.drafts.map(|n| n - before.drafts.unwrap_or(0.0)).filter(|n| *n > 0.0);
        let mut out = Map::new();
        if drafted > 0.0 {
            out.insert("spec_decode_draft_tokens".into(), json!(drafted));
            out.insert("spec_decode_accepted_tokens".into(), json!(accepted));
            out.insert("spec_decode_acceptance_rate".into(), json!(100.0 * accepted / drafted));
            if let Some(drafts) = drafts {
                out.insert("spec_decode_num_drafts".into(), json!(drafts));
                out.insert("spec_decode_acceptance_length".into(), json!(1.0 + accepted / drafts));
            }
        }
        out
    }

    /// What [`SpecCounters::since`] gave, as vLLM prints it; nothing where nothing was drafted.
    pub fn to_text(added: &Map<String, Value>) -> String {
        if added.is_empty() {
            return String::new();
        }
        let mut out = format!("{:-^50}\n", "Speculative Decoding");
        for (label, key, digits) in [
            ("Acceptance rate (%):", "spec_decode_acceptance_rate", 2),
            ("Acceptance length:", "spec_decode_acceptance_length", 2),
            ("Drafts:", "spec_decode_num_drafts", 0),
            ("Draft tokens:", "spec_decode_draft_tokens", 0),
            ("Accepted tokens:", "spec_decode_accepted_tokens", 0),
        ] {
            if let Some(v) = added.get(key).and_then(Value::as_f64) {
                let value = format!("{v:.digits$}");
                out.push_str(&format!("{label:<40} {value:<10}\n"));
            }
        }
        out
    }
}

/// A string that no earlier run sent, so that no cache knows a prompt that begins with it.
pub(crate) fn nonce(seed: u64, name: &str) -> String {
    format!("{:016x}", Rng::named(seed, name).bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_over_their_labels() {
        let text = "# HELP x\nvllm:spec_decode_num_drafts_total{a=\"1\"} 2\nvllm:spec_decode_num_drafts_total{a=\"2\"} 3\n\
            vllm:spec_decode_num_draft_tokens_total 20\nvllm:spec_decode_num_accepted_tokens_total 15\n\
            vllm:spec_decode_num_accepted_tokens_per_pos_total 99\n";
        let now = SpecCounters::parse(text).unwrap();
        assert_eq!(now, SpecCounters { drafts: Some(5.0), drafted: 20.0, accepted: 15.0 });
        let out = now.since(SpecCounters::default());
        assert_eq!(out["spec_decode_acceptance_length"], json!(4.0));
        assert_eq!(SpecCounters::parse("vllm:other 1\n"), None);
        assert!(SpecCounters::to_text(&out).contains("Acceptance length:"));
    }

    #[test]
    fn drafting_of_this_server_is_seen() {
        let counted = |drafted: u32, accepted: u32| {
            let text = format!(
                "infernix_spec_draft_tokens_total {drafted}\ninfernix_spec_accepted_tokens_total {accepted}\n\
                 vllm:generation_tokens_total{{model_name=\"m\"}} 9\n"
            );
            SpecCounters::parse(&text).unwrap()
        };
        let out = counted(30, 12).since(counted(10, 2));
        assert_eq!(out["spec_decode_draft_tokens"], json!(20.0));
        assert_eq!(out["spec_decode_acceptance_rate"], json!(50.0));
        assert!(!out.contains_key("spec_decode_acceptance_length"), "rounds with a draft are not counted");
        assert!(SpecCounters::to_text(&out).contains("Draft tokens:                            20"));
        assert_eq!(SpecCounters::to_text(&counted(3, 1).since(counted(3, 1))), "");
    }
}
