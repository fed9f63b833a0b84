//! A client of OpenAI-compatible servers that notes when each piece of an answer arrives. One connection a request,
//! blocking: the threads of a load generator are few, and its clock must not wait for a runtime.

mod answer;
pub mod sse;

pub use answer::{Answer, Grammar, ToolCall, Usage};

use crate::error::{MeasureError, Result};
use crate::redact;
use serde_json::{Value, json};
use std::io::{BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Largest body taken of an answer that is no stream, and of an error.
const MAX_BODY: u64 = 64 << 20;
/// Longest wait for a document by GET.
const GET_LIMIT: Duration = Duration::from_secs(10);
/// How often a wait looks whether it was interrupted.
pub(crate) const LOOK: Duration = Duration::from_millis(100);
/// Stack of a thread that waits for a server: it formats and parses, no more.
pub(crate) const STACK: usize = 512 << 10;

/// A server: where it is, what it calls its model.
#[derive(Clone, Debug)]
pub struct Endpoint {
    base: String,
    key: Option<String>,
    model: String,
    agent: ureq::Agent,
    get_limit: Duration,
}

/// How a request failed. Counted, never hidden: one failure makes a replay invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No answer, or a connection that broke.
    Network(String),
    /// A status other than 200, with the start of the body.
    Status(u16, String),
    /// A stream that is no sequence of chunks of the protocol.
    Protocol(String),
    /// Nothing more within the time limit.
    Timeout,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Network(e) => write!(f, "network: {e}"),
            Failure::Status(code, body) => write!(f, "status {code}: {body}"),
            Failure::Protocol(e) => write!(f, "protocol: {e}"),
            Failure::Timeout => f.write_str("timed out"),
        }
    }
}

/// One request as the client saw it. Counts come from the server, times from this clock alone.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Just before the request was sent.
    pub sent: Instant,
    /// Arrival of each chunk with text, reasoning or part of a tool call.
    pub pieces: Vec<Instant>,
    /// End of the answer, or when it failed.
    pub done: Instant,
    /// What was answered so far, also of a request that failed on the way.
    pub answer: Answer,
    /// Why there is no more.
    pub failure: Option<Failure>,
}

impl Exchange {
    /// Send to first piece of the answer.
    pub fn ttft(&self) -> Option<Duration> {
        self.pieces.first().map(|t| t.duration_since(self.sent))
    }

    /// The same, failed if nothing was answered: such a request has no first token whose time could count, as for vLLM's
    /// benchmark.
    #[must_use]
    pub fn with_a_first_token(mut self) -> Self {
        if self.failure.is_none() && self.pieces.is_empty() {
            self.failure = Some(Failure::Protocol("an answer without text".into()));
        }
        self
    }

    /// Send to end.
    pub fn latency(&self) -> Duration {
        self.done.duration_since(self.sent)
    }

    /// First piece to end.
    pub fn streaming(&self) -> Option<Duration> {
        self.pieces.first().map(|t| self.done.duration_since(*t))
    }

    /// Tokens answered: as the server counts them, else the pieces.
    pub fn output_tokens(&self) -> u64 {
        self.answer.usage.map_or(self.pieces.len() as u64, |u| u.completion)
    }
}

impl Endpoint {
    /// The server at `url` (with or without a trailing `/v1`); its model is asked for unless given.
    ///
    /// # Errors
    /// An URL without http or https; a server that does not answer `/v1/models`.
    pub fn connect(url: &str, key: Option<String>, model: Option<String>) -> Result<Self> {
        Self::connect_within(url, key, model, GET_LIMIT)
    }

    /// The same; no GET, here and later, takes longer than `limit`.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub fn connect_within(
        url: &str,
        key: Option<String>,
        model: Option<String>,
        limit: Duration,
    ) -> Result<Self> {
        let base = url.trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base).to_owned();
        if !base.starts_with("http://") && !base.starts_with("https://") {
            let shown = redact::address(url);
            return Err(MeasureError::Server(format!("{shown:?} is no http:// or https:// address")));
        }
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_idle_connections(0)
            .max_redirects(0)
            .build()
            .into();
        let get_limit = limit.min(GET_LIMIT);
        let mut endpoint = Self { base, key, model: model.clone().unwrap_or_default(), agent, get_limit };
        if model.is_none() {
            endpoint.model = endpoint.first_model()?;
        }
        Ok(endpoint)
    }

    /// What the server calls its model.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The same for reports: a path, as some servers name a file, is cut to its last part.
    pub fn shown_model(&self) -> &str {
        let path = self.model.starts_with(['/', '.', '~']);
        if path { self.model.rsplit('/').next().unwrap_or(&self.model) } else { &self.model }
    }

    /// Scheme, host and port, for reports: without a user's name and password.
    pub fn base(&self) -> String {
        redact::address(&self.base)
    }

    fn first_model(&self) -> Result<String> {
        let models = self.get_json("/v1/models")?;
        let id = models.pointer("/data/0/id").and_then(Value::as_str);
        id.map(str::to_owned).ok_or_else(|| MeasureError::Server(format!("{} lists no model", self.base())))
    }

    /// Largest context that the server's model list states, under the names that servers use.
    pub fn context_limit(&self) -> Option<u64> {
        let models = self.get_json("/v1/models").ok()?;
        let entry = models.pointer("/data/0")?;
        ["/max_model_len", "/context_length", "/context_window", "/meta/n_ctx", "/meta/n_ctx_train"]
            .iter()
            .find_map(|p| entry.pointer(p).and_then(Value::as_u64))
    }

    /// A JSON document by GET.
    ///
    /// # Errors
    /// No connection, a status other than 200, no JSON.
    pub fn get_json(&self, path: &str) -> Result<Value> {
        let text = self.get_text(path)?;
        serde_json::from_str(&text)
            .map_err(|e| MeasureError::Server(format!("{}{path} answers no JSON: {e}", self.base())))
    }

    /// A text by GET.
    ///
    /// # Errors
    /// No connection, a status other than 200.
    pub fn get_text(&self, path: &str) -> Result<String> {
        let url = format!("{}{path}", self.base);
        let fail =
            |e: String| MeasureError::Server(format!("{}{path}: {}", self.base(), redact::address(&e)));
        let mut request = self.agent.get(&url).config().timeout_global(Some(self.get_limit)).build();
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.call().map_err(|e| fail(e.to_string()))?;
        let mut text = String::new();
        let status = response.status().as_u16();
        response
            .body_mut()
            .as_reader()
            .take(MAX_BODY)
            .read_to_string(&mut text)
            .map_err(|e| fail(e.to_string()))?;
        match status {
            200 => Ok(text),
            401 | 403 => {
                Err(MeasureError::Denied(format!("{}{path}: status {status}: {}", self.base(), start(&text))))
            }
            _ => Err(fail(format!("status {status}: {}", start(&text)))),
        }
    }

    /// Sends a chat or completion request that streams, and reads the answer to its end, or until `limit` has passed
    /// since the start. `model`, `stream` and `stream_options.include_usage` are set here.
    pub fn stream(&self, path: &str, body: &Value, limit: Duration) -> Exchange {
        self.stream_unless(path, body, limit, &AtomicBool::new(false))
    }

    /// The same, broken off between pieces once `gone` is set.
    pub(crate) fn stream_unless(
        &self,
        path: &str,
        body: &Value,
        limit: Duration,
        gone: &AtomicBool,
    ) -> Exchange {
        let mut body = body.clone();
        body["model"] = json!(self.model);
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let bytes = body.to_string();
        let sent = Instant::now();
        let mut exchange =
            Exchange { sent, pieces: Vec::new(), done: sent, answer: Answer::default(), failure: None };
        let most = body["max_tokens"].as_u64();
        let received = self.receive(path, &bytes, limit, gone, &mut exchange);
        exchange.failure =
            received.and_then(|()| plausible(&exchange, most).map_err(Failure::Protocol)).err();
        exchange.done = Instant::now();
        exchange
    }

    /// [`Endpoint::stream`] in a thread of its own; what becomes of it is heard from the wait.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub(crate) fn begin(&self, path: &str, body: Value, limit: Duration) -> Result<Pending<Exchange>> {
        let (endpoint, path) = (self.clone(), path.to_owned());
        Pending::start(move |gone| endpoint.stream_unless(&path, &body, limit, gone))
    }

    fn receive(
        &self,
        path: &str,
        body: &str,
        limit: Duration,
        gone: &AtomicBool,
        exchange: &mut Exchange,
    ) -> std::result::Result<(), Failure> {
        let url = format!("{}{path}", self.base);
        let mut request = self
            .agent
            .post(&url)
            .config()
            .timeout_global(Some(limit))
            .build()
            .header("content-type", "application/json")
            .header("accept", "text/event-stream");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.send(body).map_err(network)?;
        let status = response.status().as_u16();
        let reader = response.body_mut().as_reader();
        if status != 200 {
            let mut text = Vec::new();
            reader.take(4096).read_to_end(&mut text).map_err(io)?;
            return Err(Failure::Status(status, start(&String::from_utf8_lossy(&text))));
        }
        let mut events = sse::Events::new(BufReader::new(reader));
        let mut grammar = Grammar::default();
        while let Some(data) = events.next_data().map_err(io)? {
            let now = Instant::now();
            if gone.load(Ordering::Relaxed) {
                return Err(Failure::Network("broken off here".into()));
            }
            match grammar.take(&data, &mut exchange.answer).map_err(Failure::Protocol)? {
                answer::Piece::Text => exchange.pieces.push(now),
                answer::Piece::Nothing => {}
                answer::Piece::End => break,
            }
        }
        grammar.finish(&exchange.answer).map_err(Failure::Protocol)
    }
}

/// Something that waits for a server, in a thread of its own, so that nobody else has to. Dropped, it is broken off: a
/// stream at its next piece, all else with its time limit.
pub(crate) struct Pending<T> {
    result: std::sync::mpsc::Receiver<T>,
    gone: Arc<AtomicBool>,
}

impl<T: Send + 'static> Pending<T> {
    /// Starts `work`, which may look at the flag that says that nobody waits any more.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub(crate) fn start(work: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> Result<Self> {
        let (send, result) = channel();
        let gone = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&gone);
        let run = move || drop(send.send(work(&seen)));
        std::thread::Builder::new()
            .stack_size(STACK)
            .spawn(run)
            .map_err(|e| MeasureError::Server(format!("no thread for a request: {e}")))?;
        Ok(Self { result, gone })
    }

    /// The result, unless `interrupted` is set first.
    ///
    /// # Errors
    /// The interruption.
    pub(crate) fn wait(self, interrupted: &AtomicBool) -> Result<T> {
        loop {
            match self.result.recv_timeout(LOOK) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) if !interrupted.load(Ordering::Relaxed) => {}
                Err(_) => return Err(MeasureError::Stopped),
            }
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}

/// Refuses token counts that the request and the stream contradict: rates made from them would be wrong.
fn plausible(x: &Exchange, most: Option<u64>) -> std::result::Result<(), String> {
    let Some(usage) = x.answer.usage else { return Ok(()) };
    let pieces = x.pieces.len() as u64;
    if usage.prompt == 0 {
        return Err("usage: a prompt of 0 tokens".into());
    }
    if let Some(most) = most.filter(|most| usage.completion > *most) {
        return Err(format!("usage: {} completion tokens, {most} were asked for", usage.completion));
    }
    // A token may show in several pieces (the name of a call and its brackets), but not in very many.
    if pieces > 4 * usage.completion + 16 || (usage.completion == 0 && pieces > 0) {
        return Err(format!("usage: {} completion tokens in {pieces} pieces", usage.completion));
    }
    Ok(())
}

fn network(e: ureq::Error) -> Failure {
    match e {
        ureq::Error::Timeout(_) => Failure::Timeout,
        ureq::Error::Io(e) => io(e),
        e => Failure::Network(redact::address(&e.to_string())),
    }
}

fn io(e: std::io::Error) -> Failure {
    use std::io::ErrorKind;
    match e.kind() {
        ErrorKind::TimedOut => Failure::Timeout,
        ErrorKind::InvalidData | ErrorKind::UnexpectedEof => Failure::Protocol(e.to_string()),
        // A time limit that passes inside a read comes wrapped.
        _ => match e.get_ref().and_then(|inner| inner.downcast_ref::<ureq::Error>()) {
            Some(ureq::Error::Timeout(_)) => Failure::Timeout,
            _ => Failure::Network(e.to_string()),
        },
    }
}

/// The first 300 characters, on one line.
fn start(text: &str) -> String {
    text.chars().take(300).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
