//! A request for an answer, as every protocol means it: what the protocols' parsers make and the generator runs.

use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::tools::Tools;
use infernix_text::{ChatOptions, Message, Sampling};
use serde_json::{Map, Value};

/// Most stop strings; more than OpenAI's four are refused.
pub(crate) const MAX_STOPS: usize = 4;
/// Longest stop string in bytes.
const MAX_STOP_BYTES: usize = 512;
/// Most choices of a request.
pub(crate) const MAX_CHOICES: usize = 16;
/// Most alternatives in log-probabilities.
pub(crate) const MAX_TOP_LOGPROBS: usize = 20;

/// Whether the model reasons before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Thinking {
    /// As the server and the template do by default.
    #[default]
    Default,
    /// On.
    On,
    /// Off.
    Off,
}

/// What the answer's content must be.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ContentFormat {
    /// Any JSON object.
    JsonObject,
    /// JSON of this schema, which stands at `path` of the request.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// Where it stands.
        path: String,
    },
    /// A GBNF grammar.
    Grammar(String),
    /// A regular expression that the whole content matches.
    Regex(String),
    /// One of these.
    Choice(Vec<String>),
}

/// A request for an answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turn {
    /// The conversation.
    pub(crate) messages: Vec<Message>,
    /// Declared tools.
    pub(crate) tools: Tools,
    /// Template variables.
    pub(crate) kwargs: Map<String, Value>,
    /// Reasoning on or off.
    pub(crate) thinking: Thinking,
    /// Effort as the request names it.
    pub(crate) effort: Option<String>,
    /// Whether reasoning of earlier turns is shown.
    pub(crate) preserve_thinking: Option<bool>,
    /// Most reasoning tokens.
    pub(crate) thinking_budget: Option<usize>,
    /// Sampling fields that the request sets.
    pub(crate) sampling: Sampling,
    /// Seed; a fresh one where absent.
    pub(crate) seed: Option<u64>,
    /// Added to logits.
    pub(crate) logit_bias: Vec<(u32, f64)>,
    /// Most tokens of the answer.
    pub(crate) max_tokens: Option<usize>,
    /// Stop strings.
    pub(crate) stops: Vec<String>,
    /// Answers to give.
    pub(crate) n: usize,
    /// Log-probabilities, with this many alternatives.
    pub(crate) logprobs: Option<u8>,
    /// Constraint on the content.
    pub(crate) format: Option<ContentFormat>,
    /// Continue after an end token.
    pub(crate) ignore_eos: bool,
    /// Reuse of the prompt.
    pub(crate) cache: CacheRequest,
    /// Fields that change nothing and are named to the client.
    pub(crate) ignored: Vec<String>,
}

/// What a request says about the prefix cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CacheRequest {
    /// Shares prefixes only with requests of the same salt.
    pub(crate) salt: Option<String>,
    /// Names the conversation; never part of an answer.
    pub(crate) session: Option<String>,
    /// Do not use the cache.
    pub(crate) bypass: bool,
}

impl Turn {
    pub(crate) fn new() -> Self {
        Self { n: 1, tools: Tools::new(), ..Self::default() }
    }

    /// Sampling fields, under the same names in every protocol.
    pub(crate) fn read_sampling(
        &mut self,
        fields: &mut Fields,
        max_temperature: f64,
    ) -> Result<(), ApiError> {
        self.sampling.temperature = fields.number("temperature", 0.0, max_temperature)?;
        self.sampling.top_p = fields.number("top_p", 0.0, 1.0)?;
        self.sampling.min_p = fields.number("min_p", 0.0, 1.0)?;
        // -1 means off to some servers and clients.
        self.sampling.top_k = match fields.peek("top_k").and_then(Value::as_i64) {
            Some(-1) => {
                fields.skip(&["top_k"]);
                Some(0)
            }
            _ => fields.count("top_k")?.map(|k| u32::try_from(k).unwrap_or(u32::MAX)),
        };
        self.sampling.presence_penalty = fields.number("presence_penalty", -2.0, 2.0)?;
        self.sampling.frequency_penalty = fields.number("frequency_penalty", -2.0, 2.0)?;
        self.sampling.repetition_penalty = fields.number("repetition_penalty", 0.01, 100.0)?;
        // Seeds are signed in the protocols; all 64 bits count.
        self.seed = fields.integer("seed")?.map(|s| s.cast_unsigned());
        self.ignore_eos = fields.bool("ignore_eos")?.unwrap_or(false);
        Ok(())
    }

    /// `logit_bias`: token ids as keys, -100 to 100.
    pub(crate) fn read_logit_bias(&mut self, fields: &mut Fields, vocabulary: u32) -> Result<(), ApiError> {
        let path = fields.path("logit_bias");
        for (key, value) in fields.object("logit_bias")?.unwrap_or_default() {
            let at = format!("{path}.{key}");
            let id = key
                .parse::<u32>()
                .ok()
                .filter(|id| *id < vocabulary)
                .ok_or_else(|| ApiError::invalid(&at, format!("is not a token id below {vocabulary}")))?;
            let bias = value
                .as_f64()
                .filter(|b| (-100.0..=100.0).contains(b))
                .ok_or_else(|| wrong(&at, "a number from -100 to 100", &value))?;
            self.logit_bias.push((id, bias));
        }
        Ok(())
    }

    /// Stop strings: one, a list, or none.
    pub(crate) fn read_stops(
        &mut self,
        fields: &mut Fields,
        name: &str,
        most: usize,
    ) -> Result<(), ApiError> {
        let path = fields.path(name);
        let list = match fields.take(name) {
            None => return Ok(()),
            Some(Value::Array(list)) => list,
            Some(one) => vec![one],
        };
        if list.len() > most {
            return Err(ApiError::invalid(
                path,
                format!("has {} strings, at most {most} are possible", list.len()),
            ));
        }
        for (i, value) in list.into_iter().enumerate() {
            match value {
                Value::String(text) if !text.is_empty() && text.len() <= MAX_STOP_BYTES => {
                    self.stops.push(text)
                }
                other => {
                    let expected = format!("a string of 1 to {MAX_STOP_BYTES} bytes");
                    return Err(wrong(&format!("{path}[{i}]"), &expected, &other));
                }
            }
        }
        Ok(())
    }

    /// `chat_template_kwargs` and the extensions that every protocol takes.
    pub(crate) fn read_extensions(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        self.kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(on) = fields.bool("enable_thinking")? {
            self.set_thinking(if on { Thinking::On } else { Thinking::Off }, "enable_thinking")?;
        }
        if let Some(value) = self.kwargs.get("enable_thinking") {
            let Some(on) = value.as_bool() else {
                return Err(wrong("chat_template_kwargs.enable_thinking", "true or false", value));
            };
            self.set_thinking(
                if on { Thinking::On } else { Thinking::Off },
                "chat_template_kwargs.enable_thinking",
            )?;
        }
        self.preserve_thinking = fields.bool("preserve_thinking")?;
        for name in ["thinking_budget", "thinking_budget_tokens"] {
            if let Some(budget) = fields.count(name)? {
                self.set_budget(budget, name)?;
            }
        }
        if let Some(mode) = fields.word("tool_constraints", &["basic", "auto"])? {
            self.tools.frame = mode == "basic";
        }
        self.cache.salt = fields.string("cache_salt")?;
        if let Some(use_cache) = fields.bool("cache_prompt")? {
            self.cache.bypass = !use_cache;
        }
        self.read_structured(fields)
    }

    /// `structured_outputs`: exactly one of grammar, regex, choice; the old names are refused.
    fn read_structured(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        for name in
            ["grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema"]
        {
            if fields.take(name).is_some() {
                return Err(ApiError::invalid(
                    fields.path(name),
                    "is not read; use structured_outputs or the protocol's own field",
                ));
            }
        }
        let Some(mut outputs) = fields.fields("structured_outputs")? else { return Ok(()) };
        let mut given = Vec::new();
        if let Some(text) = outputs.string("grammar")? {
            given.push(ContentFormat::Grammar(text));
        }
        if let Some(text) = outputs.string("regex")? {
            given.push(ContentFormat::Regex(text));
        }
        if let Some(schema) = outputs.take("json") {
            given.push(ContentFormat::JsonSchema { schema, path: outputs.path("json") });
        }
        if let Some(list) = outputs.list("choice")? {
            let texts: Option<Vec<String>> = list.iter().map(|v| v.as_str().map(str::to_owned)).collect();
            let texts = texts.filter(|t| !t.is_empty()).ok_or_else(|| {
                ApiError::at(400, "invalid_choice", outputs.path("choice"), "must be a list of strings")
            })?;
            given.push(ContentFormat::Choice(texts));
        }
        if let Some(name) = outputs.rest().first() {
            return Err(ApiError::invalid(
                outputs.path(name),
                "is not known; grammar, regex, json or choice is",
            ));
        }
        if given.len() != 1 {
            return Err(ApiError::invalid(
                "structured_outputs",
                "must have exactly one of grammar, regex, json and choice",
            ));
        }
        self.set_format("structured_outputs", given.pop())
    }

    /// Sets the content's form; two forms contradict each other.
    pub(crate) fn set_format(&mut self, path: &str, format: Option<ContentFormat>) -> Result<(), ApiError> {
        if format.is_some() && self.format.is_some() {
            return Err(ApiError::invalid(path, "the request constrains the content twice"));
        }
        if format.is_some() {
            self.format = format;
        }
        Ok(())
    }

    /// Sets reasoning on or off; fields that contradict each other are an error.
    pub(crate) fn set_thinking(&mut self, thinking: Thinking, path: &str) -> Result<(), ApiError> {
        if thinking == Thinking::Default {
            return Ok(());
        }
        if self.thinking != Thinking::Default && self.thinking != thinking {
            return Err(ApiError::at(
                400,
                "conflicting_template_option",
                path,
                "contradicts another field of the request that turns thinking on or off",
            ));
        }
        self.thinking = thinking;
        Ok(())
    }

    /// A thinking budget; two that differ contradict each other.
    pub(crate) fn set_budget(&mut self, budget: usize, path: &str) -> Result<(), ApiError> {
        match self.thinking_budget.replace(budget) {
            Some(other) if other != budget => Err(ApiError::at(
                400,
                "conflicting_template_option",
                path,
                format!("is {budget}, but another field of the request sets the thinking budget to {other}"),
            )),
            _ => Ok(()),
        }
    }

    /// An effort word: `none` turns reasoning off, any other one turns it on.
    pub(crate) fn set_effort(&mut self, effort: &str, path: &str) -> Result<(), ApiError> {
        match effort {
            "none" => self.set_thinking(Thinking::Off, path),
            "default" | "auto" => Ok(()),
            word if infernix_text::EFFORTS.contains(&word) => {
                self.set_thinking(Thinking::On, path)?;
                self.effort = Some(word.to_owned());
                Ok(())
            }
            other => Err(ApiError::invalid(
                path,
                format!(
                    "must be none, {}, not {}",
                    infernix_text::EFFORTS.join(", "),
                    crate::error::quoted(&Value::from(other))
                ),
            )),
        }
    }

    /// Refuses an effort that no field could have.
    pub(crate) fn check_effort(effort: &str, path: &str) -> Result<(), ApiError> {
        Self::new().set_effort(effort, path)
    }

    /// Whether the last message is the model's own and is to be continued.
    pub(crate) fn continues(&self) -> bool {
        self.messages.last().is_some_and(|m| m.role == infernix_text::Role::Assistant)
    }

    /// The template options, with the server's defaults.
    pub(crate) fn chat_options(&self, accepted: impl Fn(&str) -> Option<&'static str>) -> ChatOptions {
        ChatOptions {
            enable_thinking: match self.thinking {
                Thinking::Default => None,
                Thinking::On => Some(true),
                Thinking::Off => Some(false),
            },
            preserve_thinking: self.preserve_thinking,
            reasoning_effort: self.effort.as_deref().and_then(accepted).map(str::to_owned),
            template_kwargs: self.kwargs.clone(),
            continue_last: self.continues(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Value) -> Result<Turn, ApiError> {
        let mut turn = Turn::new();
        let mut fields = Fields::new("", body)?;
        turn.read_sampling(&mut fields, 2.0)?;
        turn.read_logit_bias(&mut fields, 100)?;
        turn.read_stops(&mut fields, "stop", MAX_STOPS)?;
        turn.read_extensions(&mut fields)?;
        Ok(turn)
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (body, param) in [
            (json!({"temperature": 3}), "temperature"),
            (json!({"logit_bias": {"42": 101}}), "logit_bias.42"),
            (json!({"logit_bias": {"100": 1}}), "logit_bias.100"),
            (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop"),
            (json!({"stop": ["a", ""]}), "stop[1]"),
            (json!({"structured_outputs": {}}), "structured_outputs"),
            (json!({"guided_json": {}}), "guided_json"),
        ] {
            assert_eq!(read(body).expect_err("refused").param.as_deref(), Some(param));
        }
    }

    #[test]
    fn budgets_that_contradict_each_other_are_refused() {
        assert!(read(json!({"thinking_budget": 5, "thinking_budget_tokens": 5})).is_ok());
        let error =
            read(json!({"thinking_budget": 5, "thinking_budget_tokens": 2})).expect_err("contradiction");
        assert_eq!(
            (error.code, error.param.as_deref()),
            ("conflicting_template_option", Some("thinking_budget_tokens"))
        );
    }

    #[test]
    fn thinking_that_contradicts_itself_is_refused() {
        let mut turn = read(json!({"chat_template_kwargs": {"enable_thinking": false}})).expect("valid");
        assert_eq!(turn.thinking, Thinking::Off);
        assert!(turn.set_effort("none", "reasoning_effort").is_ok());
        let error = turn.set_effort("high", "reasoning_effort").expect_err("contradiction");
        assert_eq!(error.code, "conflicting_template_option");
    }
}
