//! From an engine's events to the pieces of an answer.

use crate::error::ApiError;
use crate::ids;
use crate::piece::{End, Finish, Observed, Piece, Progress, Times, TokenLogprob, TokenUsage};
use crate::reply::Running;
use crate::tools::{Call, Identity, Tools};
use infernix_engine::cache::Miss;
use infernix_engine::sched::{Event, Finish as EngineFinish, RequestError, Sampled};
use infernix_text::grammar::INPUT;
use infernix_text::{
    CallPart, Channel, Detokenizer, Event as TextEvent, OutputOptions, OutputParser, ParsedCall, Start,
    StopMatcher, Tokenizer, ToolSet,
};
use serde_json::Map;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How one answer is read.
#[derive(Clone)]
pub(crate) struct DecodeOptions {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) start: Start,
    pub(crate) tools: Arc<Tools>,
    pub(crate) set: Arc<ToolSet>,
    pub(crate) stops: Vec<String>,
    /// The content is constrained: stop strings match reasoning only.
    pub(crate) constrained: bool,
    /// Content or calls are held to a form, and the answer says what became of it.
    pub(crate) observed: bool,
    pub(crate) tolerant: bool,
    pub(crate) logprobs: bool,
    pub(crate) prompt_tokens: usize,
    /// The answer is as long as the context allows, not as the request asks.
    pub(crate) fills_context: bool,
    /// The prompt was read before, for its log-probabilities: that reading is what it cost.
    pub(crate) scored: Option<Arc<Scored>>,
    /// Stop tokens that the engine gives like others, because their log-probability is asked for: programs that score
    /// texts count on one entry for every token that was chosen. Their text is no part of the answer.
    pub(crate) scored_stops: Vec<u32>,
    /// Prefix of the ids of calls.
    pub(crate) call_prefix: &'static str,
    /// An answer of nothing gets a newline, because clients take an empty turn for a fault.
    pub(crate) never_empty: bool,
    /// Calls are held to their grammar, so they are given while they are made.
    pub(crate) held: bool,
    /// Calls only: what is no call is the beginning of one.
    pub(crate) calls_only: bool,
}

/// The reading of a prompt for its log-probabilities.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scored {
    pub(crate) cached: usize,
    pub(crate) miss: Option<Box<Miss>>,
    pub(crate) times: Times,
}

/// A call that is being made.
struct Making {
    call: Call,
    /// What runs here is given in one piece.
    whole: bool,
    /// How much of a free text has been given.
    given: String,
}

/// Reads one answer.
pub(crate) struct Decoder {
    options: DecodeOptions,
    text: Detokenizer,
    parser: OutputParser,
    reasoning_stops: StopMatcher,
    pending: Vec<TokenLogprob>,
    usage: TokenUsage,
    calls: usize,
    making: Option<Making>,
    said: bool,
    /// Content, apart from reasoning.
    wrote: bool,
    read: usize,
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    miss: Option<Box<Miss>>,
    prompt_logprobs: Vec<Sampled>,
    /// Set by a constraint that ended the answer as a matter of length.
    cut: Option<Arc<AtomicBool>>,
    ended: bool,
    /// The answer ended before the engine's request did.
    early: bool,
}

impl Decoder {
    pub(crate) fn new(options: DecodeOptions, cut: Option<Arc<AtomicBool>>) -> Self {
        let (content_stops, reasoning_stops) = if options.constrained {
            (Vec::new(), options.stops.clone())
        } else {
            (options.stops.clone(), Vec::new())
        };
        let parser = OutputParser::new(OutputOptions {
            start: options.start,
            tools: Arc::clone(&options.set),
            tolerant: options.tolerant,
            calls_in_reasoning: options.tolerant,
            held: options.held,
            stops: content_stops,
        });
        Self {
            text: Detokenizer::new(Arc::clone(&options.tokenizer)),
            parser,
            reasoning_stops: StopMatcher::new(&reasoning_stops),
            pending: Vec::new(),
            usage: TokenUsage { prompt: options.prompt_tokens, ..TokenUsage::default() },
            calls: 0,
            making: None,
            said: false,
            wrote: false,
            read: 0,
            submitted: Instant::now(),
            admitted: None,
            first_token: None,
            miss: None,
            prompt_logprobs: Vec::new(),
            cut,
            ended: false,
            early: false,
            options,
        }
    }

    /// Whether the answer is complete.
    pub(crate) fn ended(&self) -> bool {
        self.ended
    }

    /// Whether the engine still works on it and should stop.
    pub(crate) fn ended_early(&self) -> bool {
        self.early
    }

    /// Whether it has left the queue.
    pub(crate) fn admitted(&self) -> bool {
        self.admitted.is_some()
    }

    /// Why not more of the prompt came from the cache.
    pub(crate) fn miss(&self) -> Option<&Miss> {
        self.miss.as_deref()
    }

    /// Log-probabilities of the prompt, if they were asked for.
    pub(crate) fn take_prompt_logprobs(&mut self) -> Vec<Sampled> {
        std::mem::take(&mut self.prompt_logprobs)
    }

    /// Counts and times so far.
    pub(crate) fn running(&self) -> Running {
        Running { usage: self.usage, times: self.times() }
    }

    fn times(&self) -> Times {
        let admitted = self.admitted.unwrap_or(self.submitted);
        self.with_scoring(Times {
            queued: (admitted - self.submitted).as_secs_f64(),
            prompt: (self.first_token.unwrap_or_else(Instant::now) - admitted).as_secs_f64(),
            decode: self.first_token.map_or(0.0, |t| t.elapsed().as_secs_f64()),
        })
    }

    fn with_scoring(&self, times: Times) -> Times {
        let before = self.options.scored.as_ref().map_or_else(Times::default, |s| s.times);
        Times { queued: times.queued + before.queued, prompt: times.prompt + before.prompt, ..times }
    }

    /// Takes an event of the engine.
    pub(crate) fn event(&mut self, event: Event) -> Vec<Piece> {
        let mut out = Vec::new();
        if self.ended {
            return out;
        }
        match event {
            Event::Admitted { cached_tokens, miss, .. } => {
                self.admitted = Some(Instant::now());
                let (cached, miss) = match &self.options.scored {
                    Some(scored) => (scored.cached, scored.miss.clone()),
                    None => (cached_tokens, miss),
                };
                self.usage.cached = cached.min(self.usage.prompt);
                self.miss = miss;
                self.progress(self.usage.cached, true, &mut out);
            }
            Event::PromptProgress { done, .. } => self.progress(done, false, &mut out),
            Event::PromptLogprobs(tokens) => self.prompt_logprobs.extend(tokens),
            Event::Tokens(tokens) => {
                for token in tokens {
                    if self.ended {
                        break;
                    }
                    self.token(token, &mut out);
                }
            }
            Event::Finished { reason, usage, timings } => {
                self.usage.drafted = usage.drafted;
                self.usage.accepted = usage.accepted;
                let finish = match reason {
                    EngineFinish::Stop(_) => Finish::Stop,
                    EngineFinish::Constraint if self.was_cut() => Finish::Length,
                    EngineFinish::Constraint => Finish::Stop,
                    EngineFinish::Length if self.options.fills_context => Finish::Context,
                    EngineFinish::Length | EngineFinish::Deadline => Finish::Length,
                    EngineFinish::Cancelled => {
                        self.ended = true;
                        out.push(Piece::Failed(ApiError::unavailable("the request was cancelled")));
                        return out;
                    }
                };
                self.end(finish, Some(self.with_scoring(timings.into())), &mut out);
            }
            Event::Failed(error) => {
                self.ended = true;
                out.push(Piece::Failed(failure(&error)));
            }
        }
        out
    }

    /// The engine went away without a word.
    pub(crate) fn lost(&mut self) -> Vec<Piece> {
        self.refused(ApiError::internal("the engine gave up this request; see the server's log"))
    }

    /// The engine did not take it.
    pub(crate) fn refused(&mut self, error: ApiError) -> Vec<Piece> {
        if std::mem::replace(&mut self.ended, true) { Vec::new() } else { vec![Piece::Failed(error)] }
    }

    fn was_cut(&self) -> bool {
        self.cut.as_ref().is_some_and(|c| c.load(Ordering::Relaxed))
    }

    fn progress(&mut self, done: usize, first: bool, out: &mut Vec<Piece>) {
        let done = done.clamp(self.usage.cached, self.usage.prompt);
        if !first && done <= self.read || self.first_token.is_some() {
            return;
        }
        self.read = done;
        out.push(Piece::Progress(Progress {
            total: self.usage.prompt,
            cached: self.usage.cached,
            processed: done,
            seconds: self.admitted.map_or(0.0, |t| t.elapsed().as_secs_f64()),
        }));
    }

    fn token(&mut self, token: Sampled, out: &mut Vec<Piece>) {
        if self.first_token.is_none() {
            self.progress(self.usage.prompt, false, out);
            self.first_token = Some(Instant::now());
        }
        if self.options.scored_stops.contains(&token.id) {
            self.pending.push(logprob(&self.options.tokenizer, &token));
            self.early = true;
            return self.end(Finish::Stop, None, out);
        }
        self.usage.output += 1;
        let text = self.text.push(token.id);
        let events = self.parser.push(&text);
        let channel = self.parser.channel();
        if channel == Channel::Reasoning {
            self.usage.reasoning += 1;
        } else if self.options.logprobs && channel == Channel::Content {
            self.pending.push(logprob(&self.options.tokenizer, &token));
        }
        self.events(events, out);
        if !self.ended && self.parser.is_done() {
            self.early = true;
            self.end(Finish::Stop, None, out);
        }
    }

    fn events(&mut self, events: Vec<TextEvent>, out: &mut Vec<Piece>) {
        for event in events {
            if self.ended {
                return;
            }
            match event {
                TextEvent::Reasoning(text) => self.reasoning(&text, out),
                TextEvent::Content(text) => {
                    self.flush_reasoning(out);
                    if !text.is_empty() {
                        self.said = true;
                        self.wrote = true;
                        out.push(Piece::Content(text, std::mem::take(&mut self.pending)));
                    }
                }
                TextEvent::Call(call) => {
                    self.flush_reasoning(out);
                    self.said = true;
                    self.calls += 1;
                    out.push(Piece::Call(Call::new(
                        ids::fresh(self.options.call_prefix),
                        &self.options.tools,
                        &call,
                    )));
                }
                TextEvent::CallBegin(name) => {
                    self.flush_reasoning(out);
                    let call = ParsedCall { name, arguments: Map::new() };
                    let id = ids::fresh(self.options.call_prefix);
                    let mut call = Call::new(id, &self.options.tools, &call);
                    call.json.clear();
                    let whole =
                        matches!(call.identity, Identity::ServerSearch { .. } | Identity::ClientSearch);
                    if !whole {
                        self.said = true;
                        self.calls += 1;
                        out.push(Piece::CallBegin(call.clone()));
                    }
                    self.making = Some(Making { call, whole, given: String::new() });
                }
                TextEvent::CallPart(part) => {
                    if let Some(making) = &mut self.making {
                        making.part(part, out);
                    }
                }
                TextEvent::CallEnd { call, whole } => {
                    if let Some(making) = self.making.take() {
                        self.call_end(making, call, whole, out);
                    }
                }
            }
        }
    }

    /// The end of a call that was given in pieces, or of one that is given now.
    fn call_end(&mut self, making: Making, parsed: ParsedCall, ended: bool, out: &mut Vec<Piece>) {
        let Making { mut call, whole, given } = making;
        call.arguments = parsed.arguments;
        if !whole {
            if let Identity::Custom { .. } = call.identity
                && let Some(rest) = call.input().strip_prefix(&given).filter(|rest| !rest.is_empty())
            {
                out.push(Piece::CallPart(rest.to_owned()));
            }
            out.push(Piece::CallEnd(call, ended));
        } else if ended {
            self.said = true;
            self.calls += 1;
            out.push(Piece::Call(call));
        }
    }

    fn reasoning(&mut self, text: &str, out: &mut Vec<Piece>) {
        let text = if self.options.constrained { self.reasoning_stops.push(text) } else { text.to_owned() };
        if !text.is_empty() {
            self.said = true;
            out.push(Piece::Reasoning(text));
        }
        if let Some(stop) = self.reasoning_stops.matched().filter(|_| self.options.constrained) {
            self.early = true;
            self.finish(Finish::StopString(self.options.stops[stop].clone()), None, out);
        }
    }

    /// What the matcher of stop strings in reasoning held back.
    fn flush_reasoning(&mut self, out: &mut Vec<Piece>) {
        if self.options.constrained {
            let rest = self.reasoning_stops.finish();
            if !rest.is_empty() {
                self.said = true;
                out.push(Piece::Reasoning(rest));
            }
        }
    }

    fn end(&mut self, finish: Finish, times: Option<Times>, out: &mut Vec<Piece>) {
        let rest = self.text.finish();
        let events = self.parser.push(&rest);
        self.events(events, out);
        let events = self.parser.finish();
        self.events(events, out);
        if self.ended {
            return;
        }
        self.flush_reasoning(out);
        let diagnostics = self.parser.diagnostics();
        let finish = match self.parser.stopped() {
            Some(stop) => Finish::StopString(self.options.stops[stop].clone()),
            // Half a call must not be run.
            None if diagnostics.truncated_call && finish == Finish::Stop => Finish::Length,
            None if finish == Finish::Stop && self.calls > 0 => Finish::Calls,
            None => finish,
        };
        self.finish(finish, times, out);
    }

    fn finish(&mut self, finish: Finish, times: Option<Times>, out: &mut Vec<Piece>) {
        let ended = matches!(finish, Finish::Stop | Finish::StopString(_));
        let mut rest = std::mem::take(&mut self.pending);
        if matches!(finish, Finish::StopString(_)) {
            // Tokens of the stop string are no part of the answer.
            rest.clear();
        }
        if !self.said && ended && self.options.never_empty {
            out.push(Piece::Content("\n".to_owned(), rest));
        } else if !rest.is_empty() && self.calls == 0 {
            out.push(Piece::Content(String::new(), rest));
        }
        self.ended = true;
        let diagnostics = self.parser.diagnostics();
        // The markup of a call that was cut is given as text where nothing of the call could be.
        let cut = matches!(finish, Finish::Length | Finish::Context);
        let called =
            self.calls > 0 || diagnostics.marker_seen && cut || self.options.calls_only && self.wrote;
        let branch = match (called, self.wrote) {
            (true, _) => "tools",
            (false, true) => "content",
            (false, false) => "undecided",
        };
        let whole = branch == "content" || self.calls > 0;
        let complete = matches!(finish, Finish::Stop | Finish::Calls) && whole;
        out.push(Piece::End(Box::new(End {
            finish,
            constraint: self.options.observed.then_some(Observed { branch, complete }),
            usage: self.usage,
            timings: times.unwrap_or_else(|| self.times()),
            diagnostics,
        })));
    }
}

impl Making {
    fn part(&mut self, part: CallPart, out: &mut Vec<Piece>) {
        self.call.json += &part.json;
        let text = match (&self.call.identity, part.text) {
            (Identity::Custom { .. }, Some((name, text))) if name == INPUT => {
                self.given += &text;
                text
            }
            (Identity::Custom { .. }, _) => String::new(),
            _ => part.json,
        };
        if !self.whole && !text.is_empty() {
            out.push(Piece::CallPart(text));
        }
    }
}

/// A token of the engine for the wire.
pub(crate) fn logprob(tokenizer: &Tokenizer, token: &Sampled) -> TokenLogprob {
    let bytes = |id: u32| tokenizer.token_bytes(id).unwrap_or_default().to_vec();
    TokenLogprob {
        bytes: bytes(token.id),
        logprob: token.logprob.unwrap_or(0.0),
        top: token.top.iter().map(|(id, logprob)| (bytes(*id), *logprob)).collect(),
    }
}

/// A failure of the engine for the wire.
pub(crate) fn failure(error: &RequestError) -> ApiError {
    match error {
        RequestError::QueueTimeout(_) => ApiError::queue_timeout(),
        RequestError::OutOfMemory(_) => ApiError::new(503, "out_of_memory", error.to_string()),
        // Of the request's own making, not the server's.
        RequestError::Constraint(_) => ApiError::new(400, "constraint_dead_end", error.to_string()),
        RequestError::Engine(_) => ApiError::internal(error.to_string()),
        RequestError::Stopped(_) => ApiError::unavailable(error.to_string()),
    }
}
