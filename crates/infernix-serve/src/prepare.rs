//! From a turn to what the engine is asked: the prompt's ids, sampling, limits, constraints, and how the answer is read.

use crate::app::App;
use crate::constrain::{ConstraintPlan, call_rules, compile};
use crate::decode::DecodeOptions;
use crate::error::ApiError;
use crate::ids;
use crate::options::ReasoningLoop;
use crate::tools::ToolChoice;
use crate::turn::{Thinking, Turn};
use infernix_engine::sample::SamplerOptions;
use infernix_engine::sched::{CacheHints, Request};
use infernix_text::grammar::GuideOptions;
use infernix_text::{ChatOptions, Prompt, Sampling, Start};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Markers of one prompt: ends of its last turns.
const MAX_MARKERS: usize = 8;

/// Who asks and how the answer is named.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller<'a> {
    /// Number of the key.
    pub(crate) key: Option<usize>,
    /// Session that a header names.
    pub(crate) session: Option<&'a str>,
    /// Prefix of the ids of calls.
    pub(crate) call_prefix: &'static str,
}

/// What the engine is asked, `n` times.
pub(crate) struct Plan {
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: SamplerOptions,
    pub(crate) max_tokens: usize,
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) n: usize,
    pub(crate) logprobs: Option<u8>,
    pub(crate) prompt_logprobs: Option<u8>,
    pub(crate) cache: CacheHints,
    pub(crate) constraint: Option<ConstraintPlan>,
    pub(crate) decode: DecodeOptions,
    pub(crate) deadline: Option<std::time::Duration>,
    /// Goes on with work that the engine has taken already.
    pub(crate) joins: bool,
}

impl Plan {
    /// The request of a choice, and where its constraint says that it cut the answer.
    pub(crate) fn request(&self, choice: usize) -> (Request, Option<Arc<AtomicBool>>) {
        let seed = ids::derived_seed(self.sampling.seed, choice);
        let (constraint, cut) = self.constraint.as_ref().map(ConstraintPlan::constraint).unzip();
        let request = Request {
            prompt: self.prompt.clone(),
            sampling: SamplerOptions { seed, ..self.sampling.clone() },
            max_tokens: self.max_tokens,
            stop_tokens: self.stop_tokens.clone(),
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            constraint,
            cache: self.cache.clone(),
            deadline: self.deadline,
            joins: self.joins,
            ..Request::default()
        };
        (request, cut)
    }
}

impl App {
    /// The template options of a turn, with the server's defaults.
    fn chat_options(&self, turn: &Turn) -> ChatOptions {
        let mut options = turn.chat_options(|effort| self.format.accepted_effort(effort));
        let kwargs = &turn.kwargs;
        if options.enable_thinking.is_none()
            && self.options.no_thinking
            && !kwargs.contains_key("enable_thinking")
        {
            options.enable_thinking = Some(false);
        }
        if options.preserve_thinking.is_none()
            && self.options.preserve_thinking
            && !kwargs.contains_key("preserve_thinking")
        {
            options.preserve_thinking = Some(true);
        }
        let default = self.options.reasoning_effort.as_deref();
        if options.reasoning_effort.is_none()
            && turn.thinking != Thinking::Off
            && !kwargs.contains_key("reasoning_effort")
        {
            options.reasoning_effort =
                default.and_then(|e| self.format.accepted_effort(e)).map(str::to_owned);
        }
        options
    }

    /// Renders and encodes a conversation.
    pub(crate) fn render(&self, turn: &Turn) -> Result<Prompt, ApiError> {
        Ok(self.format.prompt(&turn.messages, &turn.tools.prompt, &self.chat_options(turn))?)
    }

    /// What the engine is asked for a conversation.
    pub(crate) fn prepare(&self, turn: Turn, caller: Caller<'_>) -> Result<Plan, ApiError> {
        let prompt = self.render(&turn)?;
        self.check_context(prompt.ids.len())?;
        let thinking_on = prompt.start != Start::Content;
        let preset = Sampling::preset(self.model.family, thinking_on);
        let model = self.format.defaults().sampling;
        // The model's own file holds its thinking defaults.
        let mut base = if thinking_on { model.or(preset) } else { preset };
        if turn.format.is_some() {
            base = base.without_penalties();
        }
        let markers = self.markers(&prompt.ids);
        let mut plan = self.plan(turn, prompt.ids, prompt.start, base, caller)?;
        plan.cache.markers = markers;
        Ok(plan)
    }

    /// What the engine is asked for a raw prompt.
    pub(crate) fn prepare_raw(
        &self,
        turn: Turn,
        prompt: Vec<u32>,
        caller: Caller<'_>,
    ) -> Result<Plan, ApiError> {
        self.check_context(prompt.len())?;
        let base = self.format.defaults().sampling;
        let mut plan = self.plan(turn, prompt, Start::Content, base, caller)?;
        plan.decode.never_empty = false;
        if plan.logprobs.is_some() {
            plan.decode.scored_stops = std::mem::take(&mut plan.stop_tokens);
        }
        Ok(plan)
    }

    /// A prompt and one token must fit.
    pub(crate) fn check_context(&self, tokens: usize) -> Result<(), ApiError> {
        let limit = self.engine.status().context;
        if tokens >= limit { Err(ApiError::context_length(tokens, limit)) } else { Ok(()) }
    }

    fn plan(
        &self,
        turn: Turn,
        prompt: Vec<u32>,
        start: Start,
        base: Sampling,
        caller: Caller<'_>,
    ) -> Result<Plan, ApiError> {
        let room = self.engine.status().context.saturating_sub(prompt.len());
        let wanted = turn.max_tokens.unwrap_or(self.options.default_max_tokens);
        let max_tokens = wanted.min(room);
        let mut sampling = sampler(turn.sampling.or(self.options.sampling).or(base));
        sampling.seed = turn.seed.or(self.options.seed).unwrap_or_else(ids::seed);
        sampling.logit_bias.clone_from(&turn.logit_bias);
        if self.options.greedy {
            sampling.temperature = 0.0;
        }
        let constraint = self.constraint(&turn, start, max_tokens)?;
        let tools = Arc::new(turn.tools.clone());
        let decode = DecodeOptions {
            tokenizer: Arc::clone(self.format.tokenizer()),
            start,
            set: Arc::new(tools.set()),
            tools,
            stops: turn.stops.clone(),
            constrained: turn.format.is_some(),
            observed: turn.format.is_some() || call_rules(&turn.tools).is_some_and(|r| r.demands()),
            // A text of JSON may look like a call.
            held: turn.format.is_none() && call_rules(&turn.tools).is_some_and(|r| r.holds()),
            tolerant: self.options.tolerant_tool_calls,
            logprobs: turn.logprobs.is_some(),
            prompt_tokens: prompt.len(),
            fills_context: room < wanted,
            scored: None,
            scored_stops: Vec::new(),
            call_prefix: caller.call_prefix,
            never_empty: max_tokens > 0,
            calls_only: matches!(turn.tools.choice, ToolChoice::Required | ToolChoice::Named { .. }),
        };
        Ok(Plan {
            sampling,
            max_tokens,
            stop_tokens: if turn.ignore_eos { Vec::new() } else { self.format.stop_ids() },
            n: turn.n,
            logprobs: turn.logprobs,
            prompt_logprobs: None,
            cache: CacheHints {
                salt: self.salt(&turn, caller),
                markers: Vec::new(),
                session: caller.session.map(str::to_owned).or(turn.cache.session),
                bypass: turn.cache.bypass,
                reread: false,
            },
            constraint,
            decode,
            deadline: self.options.request_timeout,
            joins: false,
            prompt,
        })
    }

    /// Requests of different keys share nothing, unless the server says so; a single key may be another one's successor.
    pub(crate) fn salt(&self, turn: &Turn, caller: Caller<'_>) -> String {
        let key = caller.key.filter(|_| !self.options.share_prefix_across_keys);
        // A key's salt has a fixed length, so no salt of a request can be read as part of it.
        let mut salt = key.map_or_else(String::new, |key| format!("key {}", self.keys.salt(key)));
        if let Some(own) = &turn.cache.salt {
            salt += " salt ";
            salt += own;
        }
        salt
    }

    /// Token counts at which turns begin: where the next request of the conversation will still agree.
    fn markers(&self, ids: &[u32]) -> Vec<usize> {
        let Some(open) = self.format.tokenizer().token_id("<|im_start|>") else { return Vec::new() };
        let mut at: Vec<usize> =
            ids.iter().enumerate().filter(|(i, id)| **id == open && *i > 0).map(|(i, _)| i).collect();
        if at.len() > MAX_MARKERS {
            // The end of the system prompt, and the latest turns.
            at.drain(1..=at.len() - MAX_MARKERS);
        }
        at
    }

    fn constraint(
        &self,
        turn: &Turn,
        start: Start,
        max_tokens: usize,
    ) -> Result<Option<ConstraintPlan>, ApiError> {
        let rules = call_rules(&turn.tools).filter(infernix_text::grammar::CallRules::restricts);
        let reasons = start == Start::Reasoning;
        let closing = format!("{}</think>\n\n", self.options.thinking_budget_message);
        let mut budget = None;
        if let Some(tokens) =
            turn.thinking_budget.or(self.options.default_thinking_budget).filter(|_| reasons)
        {
            // The message and a token of the answer always fit: the reasoning ends earlier where it has to.
            let needed = self.format.tokenizer().encode(&closing)?.len() + 1;
            if needed <= max_tokens {
                budget = Some(tokens.min(max_tokens - needed));
            } else if turn.thinking_budget.is_some() {
                return Err(ApiError::new(
                    400,
                    "thinking_budget_capacity_insufficient",
                    format!(
                        "the answer may have {max_tokens} tokens; closing the reasoning at its budget and answering \
                         needs at least {needed}"
                    ),
                ));
            }
        }
        // The guard compares words that a grammar may have to repeat.
        let guard =
            if turn.format.is_some() || !reasons { ReasoningLoop::Off } else { self.options.reasoning_loop };
        if turn.format.is_none() && rules.is_none() && budget.is_none() && guard == ReasoningLoop::Off {
            return Ok(None);
        }
        Ok(Some(ConstraintPlan {
            grammar: compile(&self.grammars, turn.format.as_ref(), &turn.tools)?,
            guide: GuideOptions { start, budget, closing, conclude: None },
            guard,
            tokenizer: Arc::clone(self.format.tokenizer()),
        }))
    }
}

/// Finished sampling parameters.
fn sampler(s: Sampling) -> SamplerOptions {
    SamplerOptions {
        temperature: s.temperature.unwrap_or(1.0),
        top_k: s.top_k.unwrap_or(0) as usize,
        top_p: s.top_p.unwrap_or(1.0),
        min_p: s.min_p.unwrap_or(0.0),
        presence_penalty: s.presence_penalty.unwrap_or(0.0),
        frequency_penalty: s.frequency_penalty.unwrap_or(0.0),
        repetition_penalty: s.repetition_penalty.unwrap_or(1.0),
        logit_bias: Vec::new(),
        seed: 0,
    }
}
