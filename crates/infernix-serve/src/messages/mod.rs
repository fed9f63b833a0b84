//! Anthropic Messages: from its JSON to a [`Turn`].

mod reply;
mod signature;

pub(crate) use reply::MessagesReply;

use crate::content;
use crate::error::{ApiError, THREADS_UNSUPPORTED, quoted};
use crate::fields::{Fields, wrong};
use crate::search;
use crate::tools::{Function, Identity, ToolChoice, Tools};
use crate::turn::{ContentFormat, Thinking, Turn};
use infernix_text::tools::found_text;
use infernix_text::{Content, Message, Role, Tool, ToolCall};
use serde_json::{Map, Value};

/// Most stop sequences.
const MAX_STOP_SEQUENCES: usize = 64;
/// Least thinking budget.
const MIN_BUDGET: usize = 1024;
/// Most cache breakpoints of blocks.
const MAX_BREAKPOINTS: usize = 4;
/// Claude Code's first system block; it differs between sessions and would break every shared prefix at its start.
const BILLING: &str = "x-anthropic-billing-header:";

/// A parsed request.
#[derive(Debug)]
pub(crate) struct MessagesRequest {
    /// What is asked.
    pub(crate) turn: Turn,
    /// The model's name as the client gave it; echoed.
    pub(crate) model: Option<String>,
    /// As server-sent events.
    pub(crate) stream: bool,
    /// Reasoning goes into the signature instead of the text.
    pub(crate) omit_thinking: bool,
}

/// Reads a request body; counting tokens needs no `max_tokens`.
pub(crate) fn parse(body: Value, count_only: bool) -> Result<MessagesRequest, ApiError> {
    let mut fields = Fields::new("", body)?;
    let mut turn = Turn::new();
    if fields.take("thread").is_some() {
        return Err(ApiError::at(
            400,
            THREADS_UNSUPPORTED,
            "thread",
            "conversations are not kept here; send the whole conversation without it",
        ));
    }
    let model = fields.string("model")?;
    if model.as_deref() == Some("") {
        return Err(ApiError::invalid("model", "must not be empty"));
    }
    turn.read_sampling(&mut fields, 2.0)?;
    turn.read_stops(&mut fields, "stop_sequences", MAX_STOP_SEQUENCES)?;
    turn.max_tokens = match fields.count("max_tokens")? {
        Some(0) => return Err(ApiError::invalid("max_tokens", "must be at least 1")),
        None if !count_only => {
            return Err(ApiError::at(400, "missing_required_parameter", "max_tokens", "is required"));
        }
        tokens => tokens,
    };
    turn.read_extensions(&mut fields)?;
    let omit_thinking = read_thinking(&mut fields, &mut turn)?;
    // At the top it asks for one at the last block, which is none of the four.
    has_breakpoint("", fields.peek("cache_control"))?;
    let mut breakpoints = 0;
    read_tools(&mut fields, &mut turn, &mut breakpoints)?;
    read_output(&mut fields, &mut turn)?;
    let system = system(fields.take("system"), &mut breakpoints)?;
    turn.messages.extend(system);
    let Value::Array(list) = fields.need("messages")? else {
        return Err(ApiError::invalid("messages", "must be a list"));
    };
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "must not be empty"));
    }
    let mut reader = Reader { messages: Vec::new(), tools: &mut turn.tools, open: Vec::new(), breakpoints };
    for (i, value) in list.into_iter().enumerate() {
        reader.message(&format!("messages[{i}]"), value)?;
    }
    reader.check_open("messages")?;
    if reader.breakpoints > MAX_BREAKPOINTS {
        let found = reader.breakpoints;
        return Err(ApiError::invalid(
            "cache_control",
            format!("stands at {found} blocks, at most {MAX_BREAKPOINTS} are possible"),
        ));
    }
    turn.messages.append(&mut reader.messages);
    if let Some(mut metadata) = fields.fields("metadata")? {
        turn.cache.session = metadata.string("user_id")?;
    }
    let stream = fields.bool("stream")?.unwrap_or(false);
    fields.skip(&["context_management", "service_tier", "cache_control", "betas"]);
    turn.ignored.extend(fields.rest());
    turn.ignored.append(&mut turn.tools.ignored);
    Ok(MessagesRequest { turn, model, stream, omit_thinking })
}

/// `thinking`. Without it the model answers at once, as the protocol has it; returns whether its text is left out.
fn read_thinking(fields: &mut Fields, turn: &mut Turn) -> Result<bool, ApiError> {
    let Some(mut thinking) = fields.fields("thinking")? else {
        if turn.thinking == Thinking::Default {
            turn.thinking = Thinking::Off;
        }
        return Ok(false);
    };
    let kind = thinking.word("type", &["enabled", "disabled", "adaptive"])?;
    let on = if kind == Some("disabled") { Thinking::Off } else { Thinking::On };
    turn.set_thinking(on, "thinking.type")?;
    if kind == Some("enabled") {
        let budget = thinking.count("budget_tokens")?.ok_or_else(|| {
            ApiError::at(400, "missing_required_parameter", "thinking.budget_tokens", "is required")
        })?;
        if budget < MIN_BUDGET {
            return Err(ApiError::invalid(
                "thinking.budget_tokens",
                format!("must be at least {MIN_BUDGET}, not {budget}"),
            ));
        }
        turn.set_budget(budget, "thinking.budget_tokens")?;
    }
    Ok(thinking.string("display")?.as_deref() == Some("omitted"))
}

/// `output_config` and the older `output_format`.
fn read_output(fields: &mut Fields, turn: &mut Turn) -> Result<(), ApiError> {
    if let Some(mut config) = fields.fields("output_config")? {
        if let Some(effort) = config.string("effort")? {
            Turn::check_effort(&effort, "output_config.effort")?;
            // Effort does not turn thinking on here: `thinking` does.
            if turn.thinking == Thinking::On {
                turn.set_effort(&effort, "output_config.effort")?;
            }
        }
        if let Some(format) = config.fields("format")? {
            read_format(format, turn)?;
        }
    }
    if let Some(format) = fields.fields("output_format")? {
        read_format(format, turn)?;
    }
    Ok(())
}

fn read_format(mut format: Fields, turn: &mut Turn) -> Result<(), ApiError> {
    let path = format.path("schema");
    if format.word("type", &["json_schema"])?.is_some() {
        let schema = format.need("schema")?;
        turn.set_format(&path.clone(), Some(ContentFormat::JsonSchema { schema, path }))?;
    }
    Ok(())
}

/// The system prompt: a text, or text blocks.
fn system(value: Option<Value>, breakpoints: &mut usize) -> Result<Option<Message>, ApiError> {
    let text = match value {
        Some(Value::Array(mut blocks)) => {
            *breakpoints += count_breakpoints("system", &blocks)?;
            let billing =
                blocks.first().and_then(|b| b.get("text")?.as_str()).is_some_and(|t| t.starts_with(BILLING));
            if billing {
                blocks.remove(0);
            }
            content::text_joined("system", Some(Value::Array(blocks)), "\n\n")?
        }
        other => content::text("system", other)?,
    };
    Ok(text.filter(|t| !t.is_empty()).map(|t| Message::text(Role::System, t)))
}

/// Whether a cache breakpoint stands at a place.
fn has_breakpoint(path: &str, control: Option<&Value>) -> Result<bool, ApiError> {
    let Some(control) = control.filter(|c| !c.is_null()) else { return Ok(false) };
    let path = if path.is_empty() { "cache_control".to_owned() } else { format!("{path}.cache_control") };
    let mut control = Fields::new(path, control.clone())?;
    if control.word("type", &["ephemeral"])?.is_none() {
        return Err(ApiError::at(400, "missing_required_parameter", control.path("type"), "is required"));
    }
    control.word("ttl", &["5m", "1h"])?;
    Ok(true)
}

/// Cache breakpoints of blocks.
fn count_breakpoints(path: &str, blocks: &[Value]) -> Result<usize, ApiError> {
    let mut count = 0;
    for (i, block) in blocks.iter().enumerate() {
        count += usize::from(has_breakpoint(&format!("{path}[{i}]"), block.get("cache_control"))?);
    }
    Ok(count)
}

fn read_tools(fields: &mut Fields, turn: &mut Turn, breakpoints: &mut usize) -> Result<(), ApiError> {
    for (i, value) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        let path = format!("tools[{i}]");
        *breakpoints += usize::from(has_breakpoint(&path, value.get("cache_control"))?);
        let mut tool = Fields::new(&path, value)?;
        let kind = tool.string("type")?.unwrap_or_else(|| "custom".to_owned());
        if kind == "custom" {
            let function = Function::read(&path, &mut tool, "input_schema")?;
            let identity = Identity::Function { name: function.name.clone(), namespace: None };
            turn.tools.function(function, identity)?;
        } else if let Some(rest) = kind.strip_prefix("tool_search_tool_") {
            let name = tool.need_string("name")?;
            search::declare(&mut turn.tools, path, name, rest.starts_with("regex"))?;
        } else {
            turn.tools.ignore(&kind);
        }
    }
    if let Some(mut choice) = fields.fields("tool_choice")? {
        turn.tools.choice = match choice.word("type", &["auto", "any", "tool", "none"])? {
            Some("any") => ToolChoice::Required,
            Some("none") => ToolChoice::None,
            Some("tool") => {
                let name = choice.need_string("name")?;
                ToolChoice::Named { names: vec![turn.tools.chosen("tool_choice.name", &name)?], once: false }
            }
            _ => ToolChoice::Auto,
        };
        turn.tools.parallel = !choice.bool("disable_parallel_tool_use")?.unwrap_or(false);
    }
    turn.tools.check_choice("tool_choice")
}

/// Turns messages into the template's conversation.
struct Reader<'a> {
    messages: Vec<Message>,
    tools: &'a mut Tools,
    /// Calls that have no result yet.
    open: Vec<String>,
    breakpoints: usize,
}

impl Reader<'_> {
    fn message(&mut self, path: &str, value: Value) -> Result<(), ApiError> {
        let mut fields = Fields::new(path, value)?;
        let role = fields.word("role", &["user", "assistant", "system"])?;
        let content_path = fields.path("content");
        let content = fields.need("content")?;
        match role {
            Some("assistant") => {
                self.check_open(path)?;
                self.assistant(&content_path, content)
            }
            Some("system") => {
                self.count_breakpoints(&content_path, &content)?;
                let text = content::text(&content_path, Some(content))?.unwrap_or_default();
                self.messages.push(Message::text(Role::System, text));
                Ok(())
            }
            Some(_) => self.user(&content_path, content),
            None => Err(ApiError::at(400, "missing_required_parameter", fields.path("role"), "is required")),
        }
    }

    fn count_breakpoints(&mut self, path: &str, content: &Value) -> Result<(), ApiError> {
        if let Value::Array(blocks) = content {
            self.breakpoints += count_breakpoints(path, blocks)?;
        }
        Ok(())
    }

    fn check_open(&self, path: &str) -> Result<(), ApiError> {
        match self.open.first() {
            None => Ok(()),
            Some(id) => Err(ApiError::at(
                400,
                "invalid_tool_history",
                path,
                format!(
                    "the call {} has no tool_result in the next user turn",
                    quoted(&Value::from(id.as_str()))
                ),
            )),
        }
    }

    fn user(&mut self, path: &str, content: Value) -> Result<(), ApiError> {
        self.count_breakpoints(path, &content)?;
        let blocks = match content {
            Value::Array(blocks) => blocks,
            other => {
                self.check_open(path)?;
                let text = content::text(path, Some(other))?.unwrap_or_default();
                self.messages.push(Message::text(Role::User, text));
                return Ok(());
            }
        };
        if blocks.is_empty() {
            // A turn of nothing is a turn.
            self.check_open(path)?;
            self.messages.push(Message::text(Role::User, ""));
        }
        let mut texts = Vec::new();
        for (i, block) in blocks.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            if block.get("type").and_then(Value::as_str) == Some("tool_result") {
                if !texts.is_empty() {
                    return Err(ApiError::at(
                        400,
                        "invalid_tool_history",
                        path,
                        "tool_result blocks come before text",
                    ));
                }
                self.result(&path, block)?;
            } else {
                texts.push(content::part_text(&path, block)?);
            }
        }
        self.check_open(path)?;
        if !texts.is_empty() {
            self.messages.push(Message::text(Role::User, texts.join("\n")));
        }
        Ok(())
    }

    fn result(&mut self, path: &str, block: Value) -> Result<(), ApiError> {
        let mut fields = Fields::new(path, block)?;
        let id = fields.need_string("tool_use_id")?;
        let Some(at) = self.open.iter().position(|o| *o == id) else {
            return Err(ApiError::at(
                400,
                "invalid_tool_history",
                format!("{path}.tool_use_id"),
                "answers no call of the turn before",
            ));
        };
        self.open.remove(at);
        let failed = fields.bool("is_error")?.unwrap_or(false);
        let text = self.result_text(&fields.path("content"), fields.take("content"))?;
        let text = if failed { format!("Error: {text}") } else { text };
        let message = Message { tool_call_id: Some(id), ..Message::text(Role::Tool, text) };
        self.messages.push(message);
        Ok(())
    }

    /// The text of a result; references to tools become their declarations.
    fn result_text(&mut self, path: &str, content: Option<Value>) -> Result<String, ApiError> {
        let Some(Value::Array(blocks)) = content else {
            return Ok(content::text(path, content)?.unwrap_or_default());
        };
        let (mut texts, mut found) = (Vec::new(), Vec::new());
        for (i, block) in blocks.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            if block.get("type").and_then(Value::as_str) == Some("tool_reference") {
                found.push(self.reference(&path, &block)?);
            } else {
                texts.push(content::part_text(&path, block)?);
            }
        }
        if !found.is_empty() {
            texts.push(found_text(&found));
        }
        Ok(texts.join("\n"))
    }

    /// The declaration of a tool that was found.
    fn reference(&mut self, path: &str, block: &Value) -> Result<Tool, ApiError> {
        let name = block.get("tool_name").and_then(Value::as_str).unwrap_or_default();
        self.tools.reference(name).cloned().ok_or_else(|| {
            ApiError::invalid(
                format!("{path}.tool_name"),
                format!("names {}, which is not declared", quoted(&Value::from(name))),
            )
        })
    }

    fn assistant(&mut self, path: &str, content: Value) -> Result<(), ApiError> {
        self.count_breakpoints(path, &content)?;
        let Value::Array(blocks) = content else {
            let text = content::text(path, Some(content))?.unwrap_or_default();
            self.messages.push(Message::text(Role::Assistant, text));
            return Ok(());
        };
        let mut turn = Assistant::default();
        for (i, block) in blocks.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            let kind = block.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
            match kind.as_str() {
                "thinking" => turn.thinking(&block),
                // Another server's secret: nothing of it can be read.
                "redacted_thinking" => {}
                "tool_use" | "server_tool_use" => {
                    let call = self.tool_use(&path, block)?;
                    if kind == "tool_use" {
                        self.open.extend(call.id.clone());
                    }
                    turn.calls.push(call);
                }
                kind if kind.ends_with("_tool_result") => {
                    let id = block.get("tool_use_id").and_then(Value::as_str).map(str::to_owned);
                    let text = self.search_result(&path, &block)?;
                    self.messages.push(std::mem::take(&mut turn).message());
                    self.messages.push(Message { tool_call_id: id, ..Message::text(Role::Tool, text) });
                }
                _ => turn.texts.push(content::part_text(&path, block)?),
            }
        }
        if !turn.is_empty() {
            self.messages.push(turn.message());
        }
        Ok(())
    }

    fn tool_use(&self, path: &str, block: Value) -> Result<ToolCall, ApiError> {
        let mut fields = Fields::new(path, block)?;
        let id = fields.need_string("id")?;
        let name = fields.need_string("name")?;
        let input = match fields.take("input") {
            Some(value @ Value::Object(_)) => value,
            None => Value::Object(Map::new()),
            Some(other) => return Err(wrong(&fields.path("input"), "an object", &other)),
        };
        Ok(ToolCall { id: Some(id), ..ToolCall::new(name, input) })
    }

    /// What a search of ours found, as the model saw it.
    fn search_result(&mut self, path: &str, block: &Value) -> Result<String, ApiError> {
        let content = block.get("content").cloned().unwrap_or_default();
        if let Some(references) = content.get("tool_references").and_then(Value::as_array) {
            let tools: Result<Vec<Tool>, _> = references.iter().map(|r| self.reference(path, r)).collect();
            return Ok(found_text(&tools?));
        }
        let code = content.get("error_code").and_then(Value::as_str).unwrap_or("unavailable");
        Ok(search::failed_text(code))
    }
}

/// An assistant turn being collected.
#[derive(Default)]
struct Assistant {
    reasoning: Vec<String>,
    texts: Vec<String>,
    calls: Vec<ToolCall>,
}

impl Assistant {
    fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.texts.is_empty() && self.calls.is_empty()
    }

    /// The text of a thinking block, or what its signature carries.
    fn thinking(&mut self, block: &Value) {
        let text = block.get("thinking").and_then(Value::as_str).unwrap_or_default();
        if !text.is_empty() {
            self.reasoning.push(text.to_owned());
        } else if let Some(text) =
            block.get("signature").and_then(Value::as_str).and_then(signature::reasoning)
        {
            self.reasoning.push(text);
        }
    }

    fn message(self) -> Message {
        Message {
            reasoning_content: (!self.reasoning.is_empty()).then(|| self.reasoning.join("\n")),
            content: Some(Content::Text(self.texts.join("\n"))),
            tool_calls: self.calls,
            ..Message::text(Role::Assistant, "")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(messages: Value) -> Value {
        json!({"model": "demo", "max_tokens": 16, "messages": messages})
    }

    #[test]
    fn the_billing_block_is_no_part_of_the_prompt() {
        let mut with = body(json!([{"role": "user", "content": "x"}]));
        with["system"] = json!([
            {"type": "text", "text": "x-anthropic-billing-header: a=1;"}, {"type": "text", "text": "Be brief."},
        ]);
        let request = parse(with, false).expect("valid");
        assert_eq!(request.turn.messages[0].plain_text(), "Be brief.");
    }

    #[test]
    fn what_is_not_done_here_is_refused_or_named() {
        let ask = |name: &str, value: Value| {
            let mut body = body(json!([{"role": "user", "content": "x"}]));
            body[name] = value;
            parse(body, false)
        };
        let named = ask("mcp_servers", json!([{"type": "url"}])).expect("valid").turn.ignored;
        assert_eq!(
            (named, ask("container", json!("c")).expect("valid").turn.ignored),
            (vec!["mcp_servers".to_owned()], vec!["container".to_owned()],)
        );
        for (name, value, param) in [
            ("output_config", json!({"effort": "zzz"}), "output_config.effort"),
            ("cache_control", json!({"type": "x"}), "cache_control.type"),
            ("cache_control", json!({"type": "ephemeral", "ttl": "9d"}), "cache_control.ttl"),
            (
                "system",
                json!([{"type": "text", "text": "y", "cache_control": {}}]),
                "system[0].cache_control.type",
            ),
            ("thread", json!({"type": "create"}), "thread"),
        ] {
            assert_eq!(ask(name, value).expect_err("refused").param.as_deref(), Some(param));
        }
        assert!(ask("cache_control", json!({"type": "ephemeral", "ttl": "1h"})).is_ok());
        // What makes Anthropic's clients go on with whole histories.
        let thread =
            ask("thread", json!({"type": "continue", "previous_message_id": "m"})).expect_err("refused");
        let told = thread.body(crate::error::Wire::Anthropic, "r");
        assert_eq!(
            (thread.status, &told["error"]["details"]["error_code"]),
            (400, &json!("thread_unsupported_request"))
        );
    }

    #[test]
    fn every_call_has_one_result_in_the_next_turn() {
        let call = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]});
        let result = json!({"type": "tool_result", "tool_use_id": "t", "content": "r"});
        let user = json!({"role": "user", "content": "x"});
        let refused = |messages: Value| parse(body(messages), false).expect_err("refused").code;
        assert_eq!(refused(json!([user, call, user])), "invalid_tool_history");
        assert_eq!(refused(json!([user, {"role": "user", "content": [result]}])), "invalid_tool_history");
        assert_eq!(
            refused(json!([user, call, {"role": "user", "content": [result, result]}])),
            "invalid_tool_history"
        );
        let ok =
            json!([user, call, {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}]);
        let request = parse(body(ok), false).expect("valid");
        let roles: Vec<_> = request.turn.messages.iter().map(|m| m.role).collect();
        assert_eq!(roles, [Role::User, Role::Assistant, Role::Tool, Role::User]);
    }

    #[test]
    fn omitted_thinking_comes_back_through_its_signature() {
        let sign = signature::omitted("step by step");
        let request = parse(
            body(json!([
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "", "signature": sign}, {"type": "text", "text": "y"}]},
                {"role": "user", "content": "z"},
            ])),
            false,
        )
        .expect("valid");
        assert_eq!(request.turn.messages[1].reasoning(), Some("step by step"));
    }
}
