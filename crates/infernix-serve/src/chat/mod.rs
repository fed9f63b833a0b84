//! Chat Completions: from its JSON to a [`Turn`], and from pieces of an answer to its chunks.

mod reply;

pub(crate) use reply::ChatReply;

use crate::content;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::tools::{Function, Identity, ToolChoice};
use crate::turn::{ContentFormat, MAX_CHOICES, MAX_STOPS, MAX_TOP_LOGPROBS, Thinking, Turn};
use infernix_text::{Content, FunctionCall, Message, Role, ToolCall};
use serde_json::{Map, Value};

/// How the answer is to be sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ChatSend {
    /// As server-sent events.
    pub(crate) stream: bool,
    /// A usage chunk at the end of the stream.
    pub(crate) usage: bool,
    /// `timings` on every chunk.
    pub(crate) timings: bool,
    /// `prompt_progress` chunks.
    pub(crate) progress: bool,
}

/// A parsed request.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    /// What is asked.
    pub(crate) turn: Turn,
    /// The model's name as the client gave it.
    pub(crate) model: Option<String>,
    /// How to send the answer.
    pub(crate) send: ChatSend,
}

/// Reads a request body.
pub(crate) fn parse(body: Value, vocabulary: u32) -> Result<ChatRequest, ApiError> {
    let mut fields = Fields::new("", body)?;
    let mut turn = Turn::new();
    let model = fields.string("model")?;
    turn.read_sampling(&mut fields, 2.0)?;
    turn.read_logit_bias(&mut fields, vocabulary)?;
    turn.read_stops(&mut fields, "stop", MAX_STOPS)?;
    if let Some(effort) = fields.string("reasoning_effort")? {
        turn.set_effort(&effort, "reasoning_effort")?;
    }
    turn.read_extensions(&mut fields)?;
    read_thinking(&mut fields, &mut turn)?;
    let (new, old) = (fields.count("max_completion_tokens")?, fields.count("max_tokens")?);
    turn.max_tokens = match (new, old) {
        (Some(a), Some(b)) if a != b => {
            return Err(ApiError::invalid("max_tokens", format!("is {b}, but max_completion_tokens is {a}")));
        }
        (a, b) => a.or(b),
    };
    turn.n = read_n(&mut fields)?;
    turn.logprobs = read_logprobs(&mut fields)?;
    let send = read_send(&mut fields, &mut turn.ignored)?;
    read_tools(&mut fields, &mut turn)?;
    if let Some(format) = fields.fields("response_format")? {
        let format = response_format(format)?;
        turn.set_format("response_format", format)?;
    }
    refuse_unavailable(&mut fields)?;
    turn.messages = messages(fields.need("messages")?)?;
    check_history(&turn.messages)?;
    turn.cache.session = fields.string("prompt_cache_key")?;
    fields.skip(&[
        "metadata",
        "user",
        "service_tier",
        "store",
        "verbosity",
        "prediction",
        "safety_identifier",
        "prompt_cache_retention",
        "prompt_cache_options",
        "id_slot",
        "stream",
        "extra_headers",
    ]);
    turn.ignored.extend(fields.rest());
    turn.ignored.append(&mut turn.tools.ignored);
    Ok(ChatRequest { turn, model, send })
}

/// `thinking` as proxies of Messages send it along.
fn read_thinking(fields: &mut Fields, turn: &mut Turn) -> Result<(), ApiError> {
    let Some(mut thinking) = fields.fields("thinking")? else { return Ok(()) };
    match thinking.word("type", &["enabled", "disabled", "adaptive"])? {
        Some("disabled") => turn.set_thinking(Thinking::Off, "thinking.type"),
        Some(_) => {
            if let Some(budget) = thinking.count("budget_tokens")? {
                turn.set_budget(budget, "thinking.budget_tokens")?;
            }
            turn.set_thinking(Thinking::On, "thinking.type")
        }
        None => Ok(()),
    }
}

/// `n`, the number of answers.
pub(crate) fn read_n(fields: &mut Fields) -> Result<usize, ApiError> {
    let n = fields.count("n")?.unwrap_or(1);
    if !(1..=MAX_CHOICES).contains(&n) {
        return Err(ApiError::invalid("n", format!("must be 1 to {MAX_CHOICES}, not {n}")));
    }
    Ok(n)
}

fn read_logprobs(fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.count("top_logprobs")?.unwrap_or(0);
    if top > MAX_TOP_LOGPROBS {
        return Err(ApiError::invalid(
            "top_logprobs",
            format!("must be at most {MAX_TOP_LOGPROBS}, not {top}"),
        ));
    }
    if top > 0 && !wanted {
        return Err(ApiError::invalid("top_logprobs", "needs logprobs to be true"));
    }
    Ok(wanted.then_some(top as u8))
}

/// `stream` and what belongs to it.
pub(crate) fn read_send(fields: &mut Fields, ignored: &mut Vec<String>) -> Result<ChatSend, ApiError> {
    let stream = fields.bool("stream")?.unwrap_or(false);
    let mut usage = false;
    if let Some(mut options) = fields.fields("stream_options")? {
        usage = options.bool("include_usage")?.unwrap_or(false);
        // Asks for padding against those who watch lengths; OpenAI's clients turn it off.
        options.skip(&["include_obfuscation"]);
        if options.peek("continuous_usage_stats") == Some(&Value::Bool(false)) {
            options.skip(&["continuous_usage_stats"]);
        }
        ignored.extend(options.rest().iter().map(|n| format!("stream_options.{n}")));
    }
    Ok(ChatSend {
        stream,
        usage: stream && usage,
        timings: fields.bool("timings_per_token")?.unwrap_or(false),
        progress: fields.bool("return_progress")?.unwrap_or(false),
    })
}

/// Fields that ask for what this server cannot do.
fn refuse_unavailable(fields: &mut Fields) -> Result<(), ApiError> {
    if let Some(modalities) = fields.list("modalities")?
        && modalities.iter().any(|m| m.as_str() != Some("text"))
    {
        return Err(ApiError::invalid("modalities", "only text can be given"));
    }
    for name in ["audio", "web_search_options"] {
        if fields.take(name).is_some() {
            return Err(ApiError::invalid(name, "is not available on this server"));
        }
    }
    Ok(())
}

/// `response_format`; a `json_object` with a `schema` is llama.cpp's form of a schema.
pub(crate) fn response_format(mut format: Fields) -> Result<Option<ContentFormat>, ApiError> {
    match format.word("type", &["text", "json_object", "json_schema"])? {
        Some("json_object") => {
            let path = format.path("schema");
            let schema = format.take("schema");
            Ok(Some(
                schema.map_or(ContentFormat::JsonObject, |schema| ContentFormat::JsonSchema { schema, path }),
            ))
        }
        Some("json_schema") => {
            let path = format.path("json_schema");
            let mut named = Fields::new(&path, format.need("json_schema")?)?;
            let path = named.path("schema");
            Ok(Some(ContentFormat::JsonSchema { schema: named.need("schema")?, path }))
        }
        _ => Ok(None),
    }
}

/// `tools`, `functions`, `tool_choice`, `function_call`, `parallel_tool_calls`.
fn read_tools(fields: &mut Fields, turn: &mut Turn) -> Result<(), ApiError> {
    turn.tools.parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    for (i, value) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        let path = format!("tools[{i}]");
        let mut tool = Fields::new(&path, value)?;
        match tool.need_string("type")?.as_str() {
            "function" => {
                let mut deferred = tool.bool("defer_loading")?.unwrap_or(false);
                let inner = tool.need("function")?;
                let path = format!("{path}.function");
                let mut function = Function::read(&path, &mut Fields::new(&path, inner)?, "parameters")?;
                // Chat has no search that could find it.
                deferred |= std::mem::take(&mut function.deferred);
                if deferred {
                    turn.ignored.push("tools.defer_loading".to_owned());
                }
                let identity = Identity::Function { name: function.name.clone(), namespace: None };
                turn.tools.function(function, identity)?;
            }
            "custom" => {
                let mut custom = Fields::new(format!("{path}.custom"), tool.need("custom")?)?;
                let function = Function::free_form(&path, &mut custom)?;
                let name = function.name.clone();
                turn.tools.function(function, Identity::Custom { name })?;
            }
            other => turn.tools.ignore(other),
        }
    }
    for (i, value) in fields.list("functions")?.unwrap_or_default().into_iter().enumerate() {
        let path = format!("functions[{i}]");
        let function = Function::read(&path, &mut Fields::new(&path, value)?, "parameters")?;
        let identity = Identity::Function { name: function.name.clone(), namespace: None };
        turn.tools.function(function, identity)?;
    }
    if let Some(choice) = fields.take("tool_choice") {
        turn.tools.choice = tool_choice(turn, choice)?;
    } else if let Some(choice) = fields.take("function_call") {
        turn.tools.choice = match choice {
            Value::Object(_) => {
                let mut named = Fields::new("function_call", choice)?;
                let name = named.need_string("name")?;
                ToolChoice::Named { names: vec![turn.tools.chosen("function_call.name", &name)?], once: true }
            }
            word => tool_choice(turn, word)?,
        };
    }
    fields.skip(&["function_call"]);
    turn.tools.check_choice("tool_choice")
}

fn tool_choice(turn: &Turn, choice: Value) -> Result<ToolChoice, ApiError> {
    let path = "tool_choice";
    match choice.as_str() {
        Some("auto") => return Ok(ToolChoice::Auto),
        Some("none") => return Ok(ToolChoice::None),
        Some("required" | "any") => return Ok(ToolChoice::Required),
        _ => {}
    }
    if !choice.is_object() {
        return Err(wrong(path, "auto, none, required or an object", &choice));
    }
    let mut fields = Fields::new(path, choice)?;
    match fields.word("type", &["function", "custom", "allowed_tools"])? {
        Some("allowed_tools") => {
            let mut allowed = Fields::new("tool_choice.allowed_tools", fields.need("allowed_tools")?)?;
            let mode = allowed.word("mode", &["auto", "required"])?;
            let mut names = Vec::new();
            for (i, tool) in allowed.list("tools")?.unwrap_or_default().into_iter().enumerate() {
                let path = format!("tool_choice.allowed_tools.tools[{i}]");
                names.push(turn.tools.chosen(&path, &tool_name(&path, tool)?)?);
            }
            Ok(match mode {
                Some("required") => ToolChoice::Named { names, once: false },
                _ => ToolChoice::allowed(names),
            })
        }
        Some(kind) => {
            let path = format!("{path}.{kind}");
            let mut named = Fields::new(&path, fields.need(kind)?)?;
            let name = named.need_string("name")?;
            Ok(ToolChoice::Named {
                names: vec![turn.tools.chosen(&format!("{path}.name"), &name)?],
                once: true,
            })
        }
        None => Err(ApiError::at(400, "missing_required_parameter", "tool_choice.type", "is required")),
    }
}

fn tool_name(path: &str, tool: Value) -> Result<String, ApiError> {
    let mut fields = Fields::new(path, tool)?;
    for kind in ["function", "custom"] {
        if let Some(mut inner) = fields.fields(kind)? {
            return inner.need_string("name");
        }
    }
    fields.need_string("name")
}

/// The conversation.
pub(crate) fn messages(value: Value) -> Result<Vec<Message>, ApiError> {
    let Value::Array(list) = value else { return Err(wrong("messages", "a list", &value)) };
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "must not be empty"));
    }
    list.into_iter().enumerate().map(|(i, value)| message(&format!("messages[{i}]"), value)).collect()
}

fn message(path: &str, value: Value) -> Result<Message, ApiError> {
    let mut fields = Fields::new(path, value)?;
    let roles = ["system", "developer", "user", "assistant", "tool", "function"];
    let role = match fields.word("role", &roles)? {
        Some("system") => Role::System,
        Some("developer") => Role::Developer,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        Some(_) => Role::Function,
        None => {
            return Err(ApiError::at(400, "missing_required_parameter", fields.path("role"), "is required"));
        }
    };
    let content_path = fields.path("content");
    let content = content::text(&content_path, fields.take("content"))?;
    let mut message = Message {
        role,
        content: None,
        reasoning_content: None,
        tool_calls: Vec::new(),
        tool_call_id: fields.string("tool_call_id")?,
        name: fields.string("name")?,
        extra: Map::new(),
    };
    if role == Role::Assistant {
        for name in ["reasoning_content", "reasoning"] {
            if let Some(Value::String(text)) = fields.take(name) {
                message.reasoning_content.get_or_insert(text);
            }
        }
        message.tool_calls = calls(&mut fields)?;
        let refusal = fields.string("refusal")?;
        message.content = content.or(refusal).map(Content::Text);
    } else {
        if content.is_none() {
            return Err(ApiError::at(400, "missing_required_parameter", content_path, "is required"));
        }
        message.content = content.map(Content::Text);
    }
    Ok(message)
}

/// Calls of an assistant message, in either form.
fn calls(fields: &mut Fields) -> Result<Vec<ToolCall>, ApiError> {
    let mut calls = Vec::new();
    for (i, value) in fields.list("tool_calls")?.unwrap_or_default().into_iter().enumerate() {
        let path = format!("{}[{i}]", fields.path("tool_calls"));
        let mut call = Fields::new(&path, value)?;
        let id = call.string("id")?;
        let kind = call.word("type", &["function", "custom"])?.unwrap_or("function");
        let mut body = Fields::new(format!("{path}.{kind}"), call.need(kind)?)?;
        let name = body.need_string("name")?;
        let arguments = if kind == "custom" {
            Value::Object(Map::from_iter([(
                "input".to_owned(),
                body.string("input")?.unwrap_or_default().into(),
            )]))
        } else {
            body.take("arguments").unwrap_or_default()
        };
        calls.push(ToolCall { id, ..ToolCall::new(name, arguments) });
    }
    if let Some(mut call) = fields.fields("function_call")? {
        let function = FunctionCall {
            name: call.need_string("name")?,
            arguments: call.take("arguments").unwrap_or_default(),
        };
        calls.push(ToolCall { id: None, kind: "function".to_owned(), function });
    }
    Ok(calls)
}

/// Every tool result answers a call that was made before it.
fn check_history(messages: &[Message]) -> Result<(), ApiError> {
    let mut ids: Vec<&str> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for (i, message) in messages.iter().enumerate() {
        for call in &message.tool_calls {
            ids.extend(call.id.as_deref());
            names.push(&call.function.name);
        }
        let known = match (message.role, &message.tool_call_id) {
            (Role::Tool, Some(id)) => ids.contains(&id.as_str()),
            (Role::Tool, None) => !names.is_empty(),
            (Role::Function, _) => message.name.as_ref().is_some_and(|n| names.contains(&n.as_str())),
            _ => true,
        };
        if !known {
            return Err(ApiError::at(
                400,
                "invalid_tool_history",
                format!("messages[{i}].tool_call_id"),
                "answers no call of an earlier assistant message",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parsed(body: Value) -> Result<ChatRequest, ApiError> {
        parse(body, 1000)
    }

    #[test]
    fn unknown_fields_are_named_and_neutral_ones_pass() {
        let request = parsed(json!({
            "messages": [{"role": "user", "content": "x"}], "unknown_field": 1, "user": "u", "top_logprobs": 0,
            "logprobs": false, "logit_bias": {}, "n": 1, "metadata": {"a": "b"}, "prediction": null,
        }))
        .expect("valid");
        assert_eq!(request.turn.ignored, ["unknown_field"]);
        assert_eq!(request.turn.logprobs, None);
    }

    #[test]
    fn a_result_without_its_call_is_refused_by_place() {
        let error = parsed(json!({"messages": [
            {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "call_zz", "content": "y"},
        ]}))
        .expect_err("orphan");
        assert_eq!(
            (error.code, error.param.as_deref()),
            ("invalid_tool_history", Some("messages[1].tool_call_id"))
        );
    }

    #[test]
    fn history_with_broken_or_empty_arguments_is_taken() {
        for arguments in ["", "{\"cut", "{\"a\":1}"] {
            let request = parsed(json!({"messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "gone", "arguments": arguments}}]},
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "z"}]},
            ]}))
            .expect("valid");
            assert_eq!(request.turn.messages[2].plain_text(), "z");
        }
    }

    #[test]
    fn hosted_tools_are_left_out_and_named() {
        let request = parsed(json!({
            "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web_search"}],
        }))
        .expect("valid");
        assert_eq!(request.turn.ignored, ["tools.web_search"]);
        assert!(!request.turn.tools.callable());
    }
}
