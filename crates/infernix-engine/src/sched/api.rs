//! What a server, the command line or a test sees of the engine: requests in, events out.
//!
//! [`EngineApi`] is the whole surface. The engine implements it over a model, [`super::ScriptedEngine`] plays
//! prepared events for tests of whatever stands in front. The engine knows token ids only: text, stop strings, tool
//! calls and grammars live in front of it and reach it as ids, [`Constraint`]s and [`CacheHints`].
//!
//! # Life of a request
//! [`EngineApi::submit`] either refuses at once ([`SubmitError`]) or queues the request. Its sink then gets, on the engine's
//! thread and in this order: [`Event::Admitted`] once, [`Event::PromptProgress`] and [`Event::PromptLogprobs`] any number of
//! times, [`Event::Tokens`] any number of times, and exactly one of [`Event::Finished`] and [`Event::Failed`], which is the
//! last (it may be the only one). A request that is paused for memory and resumed later shows nothing of it but time.
//! Sinks must be quick and never block: a slow client needs a queue of its own behind the sink.

use crate::cache::Miss;
use crate::sample::SamplerOptions;
use std::time::Duration;

/// Names a request from `submit` on; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Receives the events of one request. Called on the engine's thread; must not block.
pub type Sink = Box<dyn FnMut(Event) + Send>;

/// The engine as others see it. Handles are cheap to share (`Arc<dyn EngineApi>`).
pub trait EngineApi: Send + Sync {
    /// Queues a request.
    ///
    /// # Errors
    /// [`SubmitError`]; the sink is then never called.
    fn submit(&self, request: Request, sink: Sink) -> Result<RequestId, SubmitError>;

    /// Ends a request at the next boundary between calls with [`Finish::Cancelled`]. What it committed stays reusable. No
    /// effect on a request that has ended.
    fn cancel(&self, id: RequestId);

    /// Where the engine stands now.
    fn status(&self) -> Status;

    /// Stops the engine and returns when it has stopped: every request has ended and the prefix cache is saved.
    /// Later submissions get [`SubmitError::Stopped`].
    fn shutdown(&self, drain: Drain);

    /// Saves or empties the prefix cache between two rounds; gives the number of snapshots saved or dropped.
    ///
    /// # Errors
    /// Says why it could not be done: no file to save to, a full disk, no cache, an engine that has stopped.
    fn cache(&self, order: CacheOrder) -> Result<usize, String>;
}

/// What to do with the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheOrder {
    /// Write it to its file (`--prefix-cache-file`).
    Save,
    /// Drop everything that no running request uses. The file stays as it is.
    Clear,
}

/// How to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    /// End every request at once with [`RequestError::Stopped`].
    Now,
    /// Let admitted and queued requests finish, at most this long, then as [`Drain::Now`].
    Within(Duration),
}

/// One prompt to continue.
#[derive(Default)]
pub struct Request {
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen. Equal seeds and prompts give equal text whatever else runs.
    pub sampling: SamplerOptions,
    /// Most tokens to give. 0 reads the prompt only (scores it, warms the cache).
    pub max_tokens: usize,
    /// Any of these ends the answer with [`Finish::Stop`]; it is not among the tokens given.
    pub stop_tokens: Vec<u32>,
    /// Log-probability of each token given, and of this many most likely alternatives (0 = of the token alone).
    pub logprobs: Option<u8>,
    /// The same for the prompt's tokens. The prompt is then read from its start, past the prefix cache.
    pub prompt_logprobs: Option<u8>,
    /// Ids whose log-probabilities to give at every token, likely or not (decisions read from probabilities).
    pub watch: Vec<u32>,
    /// What may come next: grammars, forced tool calls, thinking budgets.
    pub constraint: Option<Box<dyn Constraint>>,
    /// What is known about reuse of the prompt.
    pub cache: CacheHints,
    /// Time from `submit` after which the request ends with [`Finish::Deadline`], wherever it stands.
    pub deadline: Option<Duration>,
    /// Longest draft for this request; `None` leaves it to the engine, 0 decodes plainly. Never changes the text.
    pub draft_tokens: Option<usize>,
    /// Continues work that the engine has taken already (a further answer to a question, a further prompt of a batch): it
    /// is not refused for a full queue, and waits for its lane as long as it takes.
    pub joins: bool,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request")
            .field("prompt_tokens", &self.prompt.len())
            .field("sampling", &self.sampling)
            .field("max_tokens", &self.max_tokens)
            .field("constrained", &self.constraint.is_some())
            .field("cache", &self.cache)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// What the sender knows about how the prompt will be reused. All optional; wrong hints cost speed only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheHints {
    /// Requests share cached prefixes only with requests of the same salt. Isolation between keys is a salt.
    pub salt: String,
    /// Token counts after which a snapshot of the state pays: end of the tools, of the system prompt, of the last user
    /// turn, start of the generation opener, a client's own cache markers.
    pub markers: Vec<usize>,
    /// Names the conversation in the status and in traces. It does not steer eviction: several conversations may share it.
    pub session: Option<String>,
    /// Neither use nor fill the cache.
    pub bypass: bool,
    /// Read the whole prompt past the cache, and fill the cache with it. Prompt log-probabilities imply it.
    pub reread: bool,
}

/// Restricts what may come next. Called on the engine's thread between model calls, so all of it must be quick.
///
/// A mask has one bit per id, bit `id % 32` of word `id / 32`. The engine calls `mask` before a token is chosen and
/// `accept` with every token that was chosen, in order; drafts are tried with `accept` and taken back with `rollback`.
/// An error fails the request. A mask without any bit ends the request with [`Finish::Constraint`].
pub trait Constraint: Send {
    /// Clears the bits of ids that may not come next; leaves the others as they are.
    fn mask(&mut self, words: &mut [u32]) -> Result<(), String>;

    /// Moves past a token, which `mask` allowed. Also called for a stop token, if `mask` allowed it.
    fn accept(&mut self, id: u32) -> Result<(), String>;

    /// Takes back the last `n` accepted tokens.
    fn rollback(&mut self, n: usize) -> Result<(), String>;

    /// How many of `ids`, one after the other, could be accepted from here. Changes nothing.
    fn accepts(&mut self, ids: &[u32]) -> usize;

    /// Whether nothing more can follow: the answer then ends with [`Finish::Constraint`], the last token included.
    /// Asked after every accepted token, so a stop string written as a constraint cuts a round of several tokens exactly.
    fn finished(&self) -> bool;
}

/// What a sink receives.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request left the queue and has a lane.
    Admitted {
        /// Time spent in the queue.
        queued: Duration,
        /// Prompt tokens that came from the prefix cache.
        cached_tokens: usize,
        /// Why not more of the prompt came from the cache; `None` where all that can be did.
        miss: Option<Box<Miss>>,
    },
    /// Prompt tokens read so far, cached ones included.
    PromptProgress {
        /// Read.
        done: usize,
        /// Of this many.
        total: usize,
    },
    /// The next prompt tokens with their log-probabilities; the first token of a prompt has none. Comes in order, in parts.
    PromptLogprobs(Vec<Sampled>),
    /// The next tokens of the answer, one or several a round.
    Tokens(Vec<Sampled>),
    /// The answer is complete.
    Finished {
        /// Why it ended.
        reason: Finish,
        /// Counts.
        usage: Usage,
        /// Times.
        timings: Timings,
    },
    /// The request failed; others go on.
    Failed(RequestError),
}

/// A token of an answer or prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub id: u32,
    /// Natural logarithm of its probability under the model's own logits, where log-probabilities were asked for.
    pub logprob: Option<f32>,
    /// The most likely ids at this place with their log-probabilities, most likely first, as many as were asked for.
    pub top: Vec<(u32, f32)>,
    /// Log-probabilities of [`Request::watch`], in its order.
    pub watched: Vec<f32>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token was chosen.
    Stop(u32),
    /// `max_tokens` or the context's end was reached.
    Length,
    /// The constraint allows nothing more.
    Constraint,
    /// [`EngineApi::cancel`].
    Cancelled,
    /// The request's own deadline passed.
    Deadline,
}

/// Counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Of these, taken from the prefix cache.
    pub cached: usize,
    /// Tokens given, without the stop token.
    pub output: usize,
    /// Decode rounds.
    pub rounds: usize,
    /// Tokens drafted.
    pub drafted: usize,
    /// Of these, accepted.
    pub accepted: usize,
    /// Times the request was paused for memory.
    pub preemptions: usize,
}

/// Times of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From `submit` to admission.
    pub queued: Duration,
    /// From admission to the end of the prompt, whatever else ran in between.
    pub prompt: Duration,
    /// From the end of the prompt to the end of the answer.
    pub decode: Duration,
}

/// Why `submit` refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Lanes and queue are full.
    #[error("the queue is full; try again in {} s", .retry_after.as_secs_f32().ceil())]
    QueueFull {
        /// When a place is likely to be free.
        retry_after: Duration,
    },
    /// Prompt and one token do not fit.
    #[error("the prompt has {tokens} tokens, the context holds {limit} with the answer")]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that prompt and answer may have together.
        limit: usize,
    },
    /// The request makes no sense; says why.
    #[error("{0}")]
    Invalid(String),
    /// The engine stopped; says why.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

/// Why an accepted request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// It waited for a lane longer than `--pending-timeout-ms`.
    #[error("no lane became free within {} ms", .0.as_millis())]
    QueueTimeout(Duration),
    /// It needs more memory than the engine has, even alone.
    #[error("{0}")]
    OutOfMemory(String),
    /// Its constraint failed.
    #[error("constraint: {0}")]
    Constraint(String),
    /// A model call failed. The engine goes on.
    #[error("{0}")]
    Engine(String),
    /// The engine stopped.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

/// Where the engine stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// Why it stopped; `None` while it runs.
    pub stopped: Option<String>,
    /// Requests with a lane.
    pub lanes: Vec<LaneStatus>,
    /// Lanes there are.
    pub max_lanes: usize,
    /// Requests waiting for their first lane.
    pub queued: usize,
    /// Requests paused for memory.
    pub paused: usize,
    /// Places in the queue.
    pub max_queued: usize,
    /// Tokens that prompt and answer may have together.
    pub context: usize,
    /// KV pages in all, and free or held by the cache alone.
    pub pages: (usize, usize),
    /// Prefix cache tiers: device, host, file.
    pub cache: CacheStatus,
    /// Sums since the start.
    pub counters: Counters,
    /// Tokens a second over the last seconds.
    pub rates: Rates,
    /// How tokens are drafted, in words.
    pub speculation: String,
}

/// One running request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneStatus {
    /// Its number.
    pub id: u64,
    /// Its session, if it named one.
    pub session: Option<String>,
    /// Prompt tokens read, of how many.
    pub prompt: (usize, usize),
    /// Tokens given, of at most how many.
    pub output: (usize, usize),
    /// Time since `submit`.
    pub age: Duration,
}

/// One tier of the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStatus {
    /// 64-token blocks held.
    pub blocks: usize,
    /// Snapshots held.
    pub snapshots: usize,
    /// Bytes held.
    pub bytes: u64,
    /// Bytes allowed.
    pub budget: u64,
}

/// The prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// In the backend's memory.
    pub device: TierStatus,
    /// In RAM.
    pub host: TierStatus,
    /// In the cache file, as last read or written.
    pub file: TierStatus,
}

/// Sums since the engine started. Only ever grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests queued.
    pub submitted: u64,
    /// Requests refused because the queue was full.
    pub refused: u64,
    /// Requests finished for any reason but those below.
    pub finished: u64,
    /// Requests cancelled.
    pub cancelled: u64,
    /// Requests past a deadline or the queue's time.
    pub expired: u64,
    /// Requests failed.
    pub failed: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Of these, from the cache.
    pub cached_tokens: u64,
    /// Prompt tokens read by the model, read again after a pause included.
    pub prefill_tokens: u64,
    /// Tokens given.
    pub output_tokens: u64,
    /// Model calls that read prompts.
    pub prefill_calls: u64,
    /// Decode rounds of the batch.
    pub decode_rounds: u64,
    /// Lanes summed over decode rounds.
    pub decode_lanes: u64,
    /// Tokens drafted.
    pub drafted: u64,
    /// Of these, accepted.
    pub accepted: u64,
    /// Requests paused for memory.
    pub preemptions: u64,
    /// Tokens read again after a pause because their state was not kept.
    pub replayed_tokens: u64,
    /// Snapshots taken.
    pub snapshots: u64,
    /// Snapshots dropped to make room.
    pub evicted_snapshots: u64,
    /// Blocks dropped to make room.
    pub evicted_blocks: u64,
    /// Bytes brought from the host tier.
    pub restored_bytes: u64,
}

/// Tokens a second over the last ten seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Prompt tokens read.
    pub prefill: f32,
    /// Tokens given.
    pub decode: f32,
}
