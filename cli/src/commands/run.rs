//! `infernix run`: answers a prompt, or holds a conversation on a terminal.

use super::convert::with_version;
use super::engine::{engine_options, start_engine};
use super::model::OpenModel;
use crate::args::{ProgressMode, RunArgs, SamplingArgs};
use crate::output::{self, usage};
use crate::signals::terminated;
use crate::{INTERRUPTED, Outcome};
use anyhow::{Context as _, bail};
use infernix_engine::sample::SamplerOptions;
use infernix_engine::sched::{
    CacheHints, Drain, Engine, EngineApi as _, Event as EngineEvent, Finish, Request, Usage,
};
use infernix_text::{
    ChatFormat, ChatOptions, Content, Detokenizer, Event, Message, OutputOptions, OutputParser, ParsedCall,
    Prompt, Role, Sampling, Start, Tool, ToolSet,
};
use serde_json::{Value, json};
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

pub(crate) fn run(args: &RunArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    let open = OpenModel::new(&args.model, progress)?;
    let format = open.chat_format()?;
    let limit = context_limit(&open)?;
    let options = engine_options(&args.sched, &args.spec, &open, limit)?;
    let mut chat = Chat::new(args, &format, limit)?;
    let first = first_turn(args)?;
    let engine = start_engine(&open, limit, options)?;
    chat.engine = Some(engine.clone());
    let outcome = chat.hold(first);
    // Also after a failure: the cache is saved, a trace is complete.
    engine.shutdown(Drain::Now);
    if let Some(problem) = engine.stop_problem() {
        output::warn(&problem);
    }
    outcome
}

/// Tokens that prompt and answer may have together: the model's own limit.
pub(super) fn context_limit(open: &OpenModel) -> anyhow::Result<usize> {
    let text = open.artifact.directory().components.get("text");
    let positions = text.and_then(|t| t.config.get("max_position_embeddings")).and_then(Value::as_u64);
    Ok(positions.context("the artifact states no max_position_embeddings")? as usize)
}

enum Turn {
    Raw(String),
    Messages(Vec<Message>, Vec<Tool>),
}

/// What the command line asks, `None` for a conversation on the terminal.
fn first_turn(args: &RunArgs) -> anyhow::Result<Option<Turn>> {
    if let Some(path) = &args.messages {
        let document = super::files::read_json(path)?;
        let (messages, tools) = match &document {
            Value::Array(_) => (&document, &Value::Null),
            Value::Object(o) => {
                (o.get("messages").unwrap_or(&Value::Null), o.get("tools").unwrap_or(&Value::Null))
            }
            _ => bail!("{}: expected a list of messages, or an object with `messages`", path.display()),
        };
        let parse = |what: &str| format!("{}: {what}", path.display());
        let messages: Vec<Message> =
            serde_json::from_value(messages.clone()).with_context(|| parse("messages"))?;
        if messages.is_empty() {
            bail!("{}: there is no message", path.display());
        }
        if let Some(i) = messages.iter().position(|m| m.content.as_ref().is_some_and(Content::has_media)) {
            bail!("{}: messages[{i}] holds an image or a video; only text is read here", path.display());
        }
        let tools: Vec<Tool> = match tools {
            Value::Null => Vec::new(),
            list => serde_json::from_value(list.clone()).with_context(|| parse("tools"))?,
        };
        return Ok(Some(Turn::Messages(messages, tools)));
    }
    let text = match &args.prompt {
        Some(text) => text.clone(),
        None if args.raw && io::stdin().is_terminal() => {
            return Err(usage("--raw continues a text: give it by -p TEXT or on standard input"));
        }
        None if io::stdin().is_terminal() && !args.json.json => return Ok(None),
        None => {
            let mut text = String::new();
            io::stdin().read_to_string(&mut text).context("standard input is not UTF-8 text")?;
            // The end of the line that `echo` writes is not part of the prompt.
            text.truncate(text.strip_suffix('\n').map_or(text.len(), str::len));
            text
        }
    };
    if args.raw {
        return Ok(Some(Turn::Raw(text)));
    }
    let system = args.system.iter().map(|s| Message::text(Role::System, s));
    Ok(Some(Turn::Messages(system.chain([Message::text(Role::User, text)]).collect(), Vec::new())))
}

/// One conversation with its settings.
struct Chat<'a> {
    engine: Option<Engine>,
    args: &'a RunArgs,
    format: &'a ChatFormat,
    limit: usize,
    options: ChatOptions,
    sampling: SamplerOptions,
    stop_ids: Vec<u32>,
    messages: Vec<Message>,
    tools: Vec<Tool>,
    /// Whether somebody types turns: Ctrl-C then ends an answer and not the command.
    talking: bool,
}

/// What a turn produced.
#[derive(Default)]
struct Answer {
    ids: Vec<u32>,
    reasoning: String,
    content: String,
    calls: Vec<ParsedCall>,
    finish: &'static str,
    prompt_tokens: usize,
    usage: Usage,
    prefill_seconds: f64,
    decode_seconds: f64,
}

impl Answer {
    fn to_json(&self, prompt: &Prompt, seed: u64) -> Value {
        let calls = self.calls.iter().map(|c| json!({ "name": c.name, "arguments": c.arguments_json() }));
        json!({
            "content": self.content, "reasoning": self.reasoning, "tool_calls": calls.collect::<Value>(),
            "finish_reason": self.finish, "seed": seed, "prompt_ids": prompt.ids, "ids": self.ids,
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.ids.len(),
            "cached_tokens": self.usage.cached,
            "prompt_tokens_per_second": self.prefill_rate(),
            "decode_tokens_per_second": self.decode_rate(),
            "decode_rounds": self.usage.rounds, "tokens_per_round": self.tokens_per_round(),
            "drafted_tokens": self.usage.drafted, "accepted_tokens": self.usage.accepted,
        })
    }

    fn prefill_rate(&self) -> f64 {
        (self.prompt_tokens - self.usage.cached) as f64 / self.prefill_seconds.max(1e-9)
    }

    /// Accepted drafts and the token of every round itself.
    fn tokens_per_round(&self) -> f64 {
        (self.usage.accepted + self.usage.rounds) as f64 / self.usage.rounds.max(1) as f64
    }

    fn cached_note(&self) -> String {
        if self.usage.cached == 0 { String::new() } else { format!(" ({} cached)", self.usage.cached) }
    }

    fn draft_note(&self) -> String {
        if self.usage.drafted == 0 {
            return String::new();
        }
        let share = 100.0 * self.usage.accepted as f64 / self.usage.drafted as f64;
        format!(
            ", {:.2} tokens a round, {share:.0} % of {} drafts right",
            self.tokens_per_round(),
            self.usage.drafted
        )
    }

    /// The first token comes out of the prompt's own pass and does not count as decoded.
    fn decode_rate(&self) -> f64 {
        self.ids.len().saturating_sub(1) as f64 / self.decode_seconds.max(1e-9)
    }
}

impl<'a> Chat<'a> {
    fn new(args: &'a RunArgs, format: &'a ChatFormat, limit: usize) -> anyhow::Result<Self> {
        let mut options = ChatOptions::default();
        if args.no_thinking {
            options.enable_thinking = Some(false);
        }
        let defaults = format.defaults().sampling;
        let sampling = sampler_options(&args.sampling, defaults)?;
        let messages = args.system.iter().map(|s| Message::text(Role::System, s)).collect();
        let stop_ids = format.stop_ids();
        Ok(Self {
            engine: None,
            args,
            format,
            limit,
            options,
            sampling,
            stop_ids,
            messages,
            tools: Vec::new(),
            talking: false,
        })
    }

    /// Answers what the command line asks, or talks.
    fn hold(&mut self, first: Option<Turn>) -> anyhow::Result<Outcome> {
        let Some(first) = first else { return self.talk() };
        let prompt = match first {
            Turn::Raw(text) => {
                let ids = self.format.tokenizer().encode(&text)?;
                Prompt { text, ids, start: Start::Content, opener: String::new() }
            }
            Turn::Messages(messages, tools) => {
                self.tools = tools;
                self.messages = messages;
                self.format.prompt(&self.messages, &self.tools, &self.options)?
            }
        };
        let answer = self.answer(&prompt)?;
        if self.args.json.json {
            output::print_json(&with_version(answer.to_json(&prompt, self.sampling.seed)))?;
        }
        Ok(Outcome::Done)
    }

    /// Reads turns from the terminal until end of input.
    fn talk(&mut self) -> anyhow::Result<Outcome> {
        output::note("Type a message; Ctrl-C stops an answer, Ctrl-D ends.");
        self.talking = true;
        let lines = typed_lines();
        loop {
            let mut err = io::stderr().lock();
            write!(err, "> ")?;
            err.flush()?;
            drop(err);
            let Some(line) = next_line(&lines)? else {
                output::note("");
                return Ok(Outcome::Done);
            };
            if line.trim().is_empty() {
                continue;
            }
            self.messages.push(Message::text(Role::User, line));
            let prompt = self.format.prompt(&self.messages, &self.tools, &self.options)?;
            let answer = self.answer(&prompt)?;
            let mut message = Message::text(Role::Assistant, answer.content);
            message.reasoning_content = Some(answer.reasoning).filter(|r| !r.is_empty());
            self.messages.push(message);
            self.sampling.seed = self.sampling.seed.wrapping_add(1);
        }
    }

    /// Runs one prompt and prints the answer as it comes.
    fn answer(&self, prompt: &Prompt) -> anyhow::Result<Answer> {
        if prompt.ids.is_empty() {
            return Err(usage("the prompt is empty"));
        }
        if prompt.ids.len() >= self.limit {
            bail!("the prompt has {} tokens, the model's context holds {}", prompt.ids.len(), self.limit);
        }
        let answer = self.generate(prompt)?;
        if !self.args.json.json {
            if !answer.content.is_empty() {
                output::print("\n")?;
            } else if answer.calls.is_empty() && !answer.reasoning.is_empty() && !self.args.print_token_ids {
                output::note("");
            }
            let rate = answer.prefill_rate();
            output::note(&output::styled(
                &format!(
                    "prompt {} tokens{}, {rate:.1} tok/s; answer {} tokens, {:.1} tok/s{}; {}; seed {}",
                    answer.prompt_tokens,
                    answer.cached_note(),
                    answer.ids.len(),
                    answer.decode_rate(),
                    answer.draft_note(),
                    answer.finish,
                    self.sampling.seed
                ),
                "2",
            ));
        }
        Ok(answer)
    }

    fn generate(&self, prompt: &Prompt) -> anyhow::Result<Answer> {
        let engine = self.engine.as_ref().context("the engine is not running")?;
        let mut answer = Answer { prompt_tokens: prompt.ids.len(), finish: "length", ..Answer::default() };
        // The next turn's prompt is this one without its opener, then the answer as history writes it.
        let opener = self.format.tokenizer().encode(&prompt.opener)?.len();
        let request = Request {
            prompt: prompt.ids.clone(),
            sampling: self.sampling.clone(),
            max_tokens: self.args.max_tokens.min(self.limit - prompt.ids.len()),
            stop_tokens: self.stop_ids.clone(),
            cache: CacheHints {
                markers: vec![prompt.ids.len().saturating_sub(opener)],
                ..CacheHints::default()
            },
            ..Request::default()
        };
        let (sender, events) = channel();
        let id = engine.submit(request, Box::new(move |event| drop(sender.send(event))))?;
        let mut text = Detokenizer::new(Arc::clone(self.format.tokenizer()));
        let mut parser = OutputParser::new(OutputOptions {
            start: prompt.start,
            tools: Arc::new(ToolSet::new(&self.tools)),
            stops: self.args.stop.clone(),
            ..OutputOptions::default()
        });
        loop {
            let event = match events.recv_timeout(Duration::from_millis(50)) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    if self.interrupted(&mut answer)? {
                        break;
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the engine ended without an answer"),
            };
            match event {
                EngineEvent::Tokens(tokens) => {
                    for token in tokens {
                        // What a round gave past a stop string belongs to no answer.
                        if parser.is_done() {
                            break;
                        }
                        answer.ids.push(token.id);
                        if self.args.print_token_ids {
                            output::print(&format!("{}\n", token.id))?;
                        }
                        self.show(&mut answer, parser.push(&text.push(token.id)))?;
                        if parser.is_done() {
                            answer.finish = "stop";
                            engine.cancel(id);
                        }
                    }
                    if self.interrupted(&mut answer)? {
                        break;
                    }
                }
                EngineEvent::Finished { reason, usage, timings } => {
                    if matches!(reason, Finish::Stop(_)) {
                        answer.finish = "stop";
                    }
                    answer.usage = usage;
                    answer.prefill_seconds = timings.prompt.as_secs_f64();
                    answer.decode_seconds = timings.decode.as_secs_f64();
                    break;
                }
                EngineEvent::Failed(e) => return Err(e.into()),
                EngineEvent::Admitted { .. }
                | EngineEvent::PromptProgress { .. }
                | EngineEvent::PromptLogprobs(_) => {}
            }
        }
        engine.cancel(id);
        let rest = text.finish();
        self.show(&mut answer, parser.push(&rest))?;
        self.show(&mut answer, parser.finish())?;
        if !answer.calls.is_empty() && answer.finish == "stop" {
            answer.finish = "tool_calls";
        }
        Ok(answer)
    }

    /// Whether Ctrl-C ends this answer; an error where it ends the command.
    fn interrupted(&self, answer: &mut Answer) -> anyhow::Result<bool> {
        if !self.talking || terminated() {
            check_interrupt()?;
            return Ok(false);
        }
        let stopped = INTERRUPTED.swap(false, Ordering::SeqCst);
        if stopped {
            answer.finish = "interrupted";
        }
        Ok(stopped)
    }

    /// Collects events and prints them: the answer to stdout, reasoning dimmed to stderr.
    fn show(&self, answer: &mut Answer, events: Vec<Event>) -> anyhow::Result<()> {
        let quiet = self.args.json.json || self.args.print_token_ids;
        for event in events {
            match event {
                Event::Reasoning(text) => {
                    if !quiet {
                        write!(io::stderr().lock(), "{}", output::styled(&text, "2"))?;
                    }
                    answer.reasoning.push_str(&text);
                }
                Event::Content(text) => {
                    if !quiet {
                        if answer.content.is_empty() && !answer.reasoning.is_empty() {
                            output::note("");
                        }
                        output::print(&text)?;
                    }
                    answer.content.push_str(&text);
                }
                // Nothing holds calls to a grammar here, so they come whole.
                Event::CallBegin(_) | Event::CallPart(_) => {}
                Event::Call(call) | Event::CallEnd { call, .. } => {
                    if !quiet {
                        if answer.content.is_empty()
                            && answer.calls.is_empty()
                            && !answer.reasoning.is_empty()
                        {
                            output::note("");
                        }
                        output::print(&format!("calls {}({})\n", call.name, call.arguments_json()))?;
                    }
                    answer.calls.push(call);
                }
            }
        }
        Ok(())
    }
}

/// Lines of the terminal, read beside the conversation so that Ctrl-C is seen while nobody types.
fn typed_lines() -> Receiver<io::Result<String>> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in io::stdin().lines() {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// The next line, `None` at the end of input.
fn next_line(lines: &Receiver<io::Result<String>>) -> anyhow::Result<Option<String>> {
    loop {
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => return Ok(Some(line?)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => check_interrupt()?,
        }
    }
}

fn check_interrupt() -> anyhow::Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// Flags over the model's own defaults; a fresh seed where none is given.
fn sampler_options(args: &SamplingArgs, defaults: Sampling) -> anyhow::Result<SamplerOptions> {
    let set = Sampling {
        temperature: if args.greedy { Some(0.0) } else { args.temperature.map(f64::from) },
        top_p: args.top_p.map(f64::from),
        top_k: args.top_k,
        min_p: args.min_p.map(f64::from),
        presence_penalty: args.presence_penalty.map(f64::from),
        frequency_penalty: args.frequency_penalty.map(f64::from),
        repetition_penalty: args.repetition_penalty.map(f64::from),
    };
    let within = |name: &str, given: Option<f64>, default: Option<f64>, neutral: f64, low: f64, high: f64| {
        let value = given.or(default).unwrap_or(neutral);
        if value >= low && value <= high {
            return Ok(value);
        }
        let flag = name.replace('_', "-");
        Err(if given.is_some() {
            usage(format!("--{flag} must lie in {low}..={high}"))
        } else {
            anyhow::anyhow!(
                "the model's generation defaults state {name} {value}, outside {low}..={high}; give --{flag}"
            )
        })
    };
    let (s, d) = (set, defaults);
    Ok(SamplerOptions {
        temperature: within("temperature", s.temperature, d.temperature, 1.0, 0.0, 100.0)?,
        top_k: s.top_k.or(d.top_k).unwrap_or(0) as usize,
        top_p: within("top_p", s.top_p, d.top_p, 1.0, 0.0, 1.0)?,
        min_p: within("min_p", s.min_p, d.min_p, 0.0, 0.0, 1.0)?,
        presence_penalty: within("presence_penalty", s.presence_penalty, d.presence_penalty, 0.0, -2.0, 2.0)?,
        frequency_penalty: within(
            "frequency_penalty",
            s.frequency_penalty,
            d.frequency_penalty,
            0.0,
            -2.0,
            2.0,
        )?,
        repetition_penalty: within(
            "repetition_penalty",
            s.repetition_penalty,
            d.repetition_penalty,
            1.0,
            1e-3,
            100.0,
        )?,
        logit_bias: Vec::new(),
        seed: args.seed.unwrap_or_else(fresh_seed),
    })
}

/// A seed nobody chose: time and process, which is enough for variety.
fn fresh_seed() -> u64 {
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    (now ^ u64::from(std::process::id()).rotate_left(32)) % 1_000_000_007
}
