//! OpenAI Responses: from its JSON to a [`Turn`].

mod input;
mod reply;
mod store;

pub(crate) use input::{INCLUDE_REASONING, with_ids};
pub(crate) use reply::{ResponsesReply, Template};
pub(crate) use store::{Store, Stored};

use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::search;
use crate::tools::{Function, Identity, ToolChoice, Tools};
use crate::turn::{ContentFormat, MAX_STOPS, MAX_TOP_LOGPROBS, Turn};
use infernix_text::{Message, Role};
use serde_json::{Map, Value, json};

/// Fields that the published types or captured bodies have and that change nothing here.
const NEUTRAL: &[&str] = &[
    "client_metadata",
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_retention",
    "prompt_cache_options",
    "max_tool_calls",
    "stream_options",
    "context_management",
    "moderation",
];

/// A parsed request.
#[derive(Debug)]
pub(crate) struct ResponsesRequest {
    /// What is asked.
    pub(crate) turn: Turn,
    /// The model's name as the client gave it.
    pub(crate) model: Option<String>,
    /// As server-sent events.
    pub(crate) stream: bool,
    /// Keep the response.
    pub(crate) store: bool,
    /// Items of this request and of everything before it.
    pub(crate) input: Vec<Value>,
    /// Reasoning items carry their text a second time, for clients that keep no state here.
    pub(crate) encrypted: bool,
    /// What the response repeats of the request.
    pub(crate) template: Template,
}

/// Reads a request body. `previous` gives the items of a stored response, input and output.
pub(crate) fn parse(
    body: Value,
    vocabulary: u32,
    previous: impl FnOnce(&str) -> Result<Vec<Value>, ApiError>,
) -> Result<ResponsesRequest, ApiError> {
    let mut fields = Fields::new("", body)?;
    let mut turn = Turn::new();
    let mut template = Template::default();
    let model = fields.string("model")?;
    turn.read_sampling(&mut fields, 2.0)?;
    turn.read_logit_bias(&mut fields, vocabulary)?;
    turn.read_stops(&mut fields, "stop", MAX_STOPS)?;
    turn.max_tokens = fields.count("max_output_tokens")?;
    if turn.max_tokens == Some(0) {
        return Err(ApiError::invalid("max_output_tokens", "must be at least 1"));
    }
    if let Some(mut reasoning) = fields.fields("reasoning")? {
        template.summary = reasoning.string("summary")?.or(reasoning.string("generate_summary")?);
        if let Some(effort) = reasoning.string("effort")? {
            turn.set_effort(&effort, "reasoning.effort")?;
            template.effort = Some(effort).filter(|e| e == "none");
        }
    }
    turn.read_extensions(&mut fields)?;
    if let Some(top) = fields.count("top_logprobs")? {
        if top > MAX_TOP_LOGPROBS {
            return Err(ApiError::invalid(
                "top_logprobs",
                format!("must be at most {MAX_TOP_LOGPROBS}, not {top}"),
            ));
        }
        turn.logprobs = Some(top as u8);
    }
    refuse_unavailable(&mut fields)?;
    let include = read_include(&mut fields)?;
    if include.logprobs && turn.logprobs.is_none() {
        turn.logprobs = Some(0);
    }
    template.text = shown_text(fields.peek("text"));
    if let Some(mut text) = fields.fields("text")? {
        if let Some(format) = text.fields("format")? {
            let format = text_format(format)?;
            turn.set_format("text.format", format)?;
        }
        text.skip(&["verbosity"]);
        turn.ignored.extend(text.rest().iter().map(|n| format!("text.{n}")));
    }
    template.metadata = metadata(&mut fields)?;
    template.tools = fields.peek("tools").cloned().unwrap_or_else(|| json!([]));
    template.tool_choice = fields.peek("tool_choice").cloned().unwrap_or_else(|| "auto".into());
    read_tools(&mut fields, &mut turn)?;
    template.parallel = turn.tools.parallel;
    template.instructions = fields.string("instructions")?;
    if let Some(text) = template.instructions.as_ref().filter(|t| !t.is_empty()) {
        turn.messages.push(Message::text(Role::System, text));
    }
    template.previous = fields.string("previous_response_id")?;
    let mut items = match &template.previous {
        Some(id) => previous(id)?,
        None => Vec::new(),
    };
    let earlier = items.len();
    match fields.take("input") {
        None if earlier > 0 => {}
        None => return Err(ApiError::at(400, "missing_required_parameter", "input", "is required")),
        Some(Value::String(text)) => {
            items.push(
                json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}),
            );
        }
        Some(Value::Array(list)) if !list.is_empty() => items.extend(list),
        Some(other) => return Err(wrong("input", "a string or a list of items that is not empty", &other)),
    }
    let messages = input::messages(&items, earlier, &mut turn)?;
    turn.messages.extend(messages);
    turn.cache.session = fields.string("prompt_cache_key")?;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let store = fields.bool("store")?.unwrap_or(true);
    fields.skip(NEUTRAL);
    if let Some(name) = fields.rest().first() {
        return Err(ApiError::at(400, "unknown_parameter", name, "is no parameter of this endpoint"));
    }
    turn.ignored.append(&mut turn.tools.ignored);
    template.store = store;
    template.max_tokens = turn.max_tokens;
    template.temperature = turn.sampling.temperature;
    template.top_p = turn.sampling.top_p;
    template.effort = turn.effort.clone().or(template.effort);
    Ok(ResponsesRequest { turn, model, stream, store, input: items, encrypted: include.reasoning, template })
}

/// Fields that ask for what this server cannot do.
fn refuse_unavailable(fields: &mut Fields) -> Result<(), ApiError> {
    if fields.bool("background")? == Some(true) {
        return Err(ApiError::invalid("background", "responses are made in the foreground only"));
    }
    if let Some(truncation) = fields.string("truncation")?
        && truncation != "disabled"
    {
        return Err(ApiError::invalid(
            "truncation",
            "must be disabled: nothing is left out of a conversation",
        ));
    }
    for name in ["conversation", "prompt"] {
        if fields.take(name).is_some() {
            return Err(ApiError::invalid(name, "is not available on this server"));
        }
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, Default)]
struct Include {
    reasoning: bool,
    logprobs: bool,
}

fn read_include(fields: &mut Fields) -> Result<Include, ApiError> {
    let mut include = Include::default();
    for (i, value) in fields.list("include")?.unwrap_or_default().iter().enumerate() {
        match value.as_str() {
            Some(INCLUDE_REASONING) => include.reasoning = true,
            Some("message.output_text.logprobs") => include.logprobs = true,
            // Of hosted tools that cannot run here, so there is nothing to include.
            Some(
                "web_search_call.results"
                | "web_search_call.action.sources"
                | "file_search_call.results"
                | "message.input_image.image_url"
                | "computer_call_output.output.image_url"
                | "code_interpreter_call.outputs",
            ) => {}
            _ => return Err(wrong(&format!("include[{i}]"), "a known name", value)),
        }
    }
    Ok(include)
}

/// `text` as the response repeats it; its type has a name for every schema.
fn shown_text(text: Option<&Value>) -> Value {
    let mut shown = json!({"format": {"type": "text"}});
    if let (Value::Object(shown), Some(Value::Object(text))) = (&mut shown, text) {
        shown.extend(text.clone().into_iter().filter(|(_, v)| !v.is_null()));
        if let Some(Value::Object(format)) = shown.get_mut("format")
            && format.get("type") == Some(&"json_schema".into())
        {
            format.entry("name").or_insert_with(|| "response".into());
        }
    }
    shown
}

fn text_format(mut format: Fields) -> Result<Option<ContentFormat>, ApiError> {
    let path = format.path("schema");
    match format.word("type", &["text", "json_object", "json_schema"])? {
        Some("json_object") => Ok(Some(ContentFormat::JsonObject)),
        Some("json_schema") => Ok(Some(ContentFormat::JsonSchema { schema: format.need("schema")?, path })),
        _ => Ok(None),
    }
}

fn metadata(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let map = fields.object("metadata")?.unwrap_or_default();
    if map.len() > 16 {
        return Err(ApiError::invalid("metadata", "has more than 16 entries"));
    }
    for (key, value) in &map {
        let fits = value.as_str().is_some_and(|v| v.chars().count() <= 512) && key.chars().count() <= 64;
        if !fits {
            return Err(wrong(&format!("metadata.{key}"), "a string of at most 512 characters", value));
        }
    }
    Ok(map)
}

fn read_tools(fields: &mut Fields, turn: &mut Turn) -> Result<(), ApiError> {
    turn.tools.parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    for (i, value) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        let path = format!("tools[{i}]");
        let mut tool = Fields::new(&path, value)?;
        match tool.need_string("type")?.as_str() {
            "tool_search" => {
                if tool.string("execution")?.as_deref() == Some("client") {
                    let function = Function {
                        path,
                        name: "tool_search".to_owned(),
                        description: tool.string("description")?,
                        parameters: tool.take("parameters"),
                        strict: false,
                        deferred: false,
                        form: None,
                    };
                    turn.tools.function(function, Identity::ClientSearch)?;
                } else {
                    search::declare(&mut turn.tools, path, "tool_search".to_owned(), false)?;
                }
            }
            kind => declared(&mut turn.tools, &path, kind, &mut tool, None, false)?,
        }
    }
    if let Some(choice) = fields.take("tool_choice") {
        turn.tools.choice = tool_choice(turn, choice)?;
    }
    turn.tools.check_choice("tool_choice")
}

/// A function, a free-form tool or a group of them; of other kinds only the name is kept. `found` are tools that an
/// earlier search gave.
pub(super) fn declared(
    tools: &mut Tools,
    path: &str,
    kind: &str,
    tool: &mut Fields,
    namespace: Option<&str>,
    found: bool,
) -> Result<(), ApiError> {
    let (function, identity) = match kind {
        "function" => {
            let mut function = Function::read(path, tool, "parameters")?;
            let name = std::mem::take(&mut function.name);
            function.name = Tools::shown_name(namespace, &name);
            (function, Identity::Function { name, namespace: namespace.map(str::to_owned) })
        }
        "custom" => {
            let function = Function::free_form(path, tool)?;
            let name = function.name.clone();
            (function, Identity::Custom { name })
        }
        "namespace" if namespace.is_none() => {
            let name = tool.need_string("name")?;
            for (i, value) in tool.list("tools")?.unwrap_or_default().into_iter().enumerate() {
                let path = format!("{path}.tools[{i}]");
                let mut inner = Fields::new(&path, value)?;
                let kind = inner.need_string("type")?;
                declared(tools, &path, &kind, &mut inner, Some(&name), found)?;
            }
            return Ok(());
        }
        other => {
            tools.ignore(other);
            return Ok(());
        }
    };
    if found {
        tools.found(function, identity);
        Ok(())
    } else {
        tools.function(function, identity)
    }
}

fn tool_choice(turn: &Turn, choice: Value) -> Result<ToolChoice, ApiError> {
    match choice.as_str() {
        Some("auto") => return Ok(ToolChoice::Auto),
        Some("none") => return Ok(ToolChoice::None),
        Some("required") => return Ok(ToolChoice::Required),
        _ if choice.is_object() => {}
        _ => return Err(wrong("tool_choice", "auto, none, required or an object", &choice)),
    }
    let mut fields = Fields::new("tool_choice", choice)?;
    match fields.need_string("type")?.as_str() {
        "function" | "custom" => {
            let name = fields.need_string("name")?;
            Ok(ToolChoice::Named { names: vec![turn.tools.chosen("tool_choice.name", &name)?], once: true })
        }
        "allowed_tools" => {
            let required = fields.word("mode", &["auto", "required"])? == Some("required");
            let mut names = Vec::new();
            for (i, tool) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
                let path = format!("tool_choice.tools[{i}]");
                let mut tool = Fields::new(&path, tool)?;
                let name = tool.need_string("name")?;
                names.push(turn.tools.chosen(&format!("{path}.name"), &name)?);
            }
            Ok(if required { ToolChoice::Named { names, once: false } } else { ToolChoice::allowed(names) })
        }
        other => Err(ApiError::invalid(
            "tool_choice.type",
            format!("{} cannot run here", crate::error::quoted(&Value::from(other))),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(body: Value) -> Result<ResponsesRequest, ApiError> {
        parse(body, 1000, |id| Err(ApiError::not_found(id)))
    }

    #[test]
    fn unknown_parameters_are_refused_by_name() {
        let error = parsed(json!({"input": "x", "colour": "blue"})).expect_err("unknown");
        assert_eq!((error.code, error.param.as_deref()), ("unknown_parameter", Some("colour")));
    }

    #[test]
    fn a_namespace_becomes_functions_and_hosted_tools_are_named() {
        let request = parsed(json!({"input": "x", "tools": [
            {"type": "namespace", "name": "crew", "tools": [{"type": "function", "name": "spawn"}]},
            {"type": "web_search", "external_web_access": true},
        ]}))
        .expect("valid");
        assert_eq!(request.turn.tools.prompt[0].name(), "crew__spawn");
        assert_eq!(request.turn.ignored, ["tools.web_search"]);
    }

    #[test]
    fn an_effort_of_none_is_repeated_as_it_was_sent() {
        for (sent, told) in [("none", Some("none")), ("low", Some("low")), ("auto", None)] {
            let request = parsed(json!({"input": "x", "reasoning": {"effort": sent}})).expect("valid");
            assert_eq!(request.template.effort.as_deref(), told);
        }
    }

    #[test]
    fn instructions_and_developer_items_lead_the_conversation() {
        let request = parsed(json!({"instructions": "Be brief.", "input": [
            {"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"},
        ]}))
        .expect("valid");
        let roles: Vec<_> = request.turn.messages.iter().map(|m| m.role).collect();
        assert_eq!(roles, [Role::System, Role::Developer, Role::User]);
    }
}
