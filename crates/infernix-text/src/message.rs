//! Conversations as plain data. Field order of tool schemas and arguments is kept as given: the prompt,
//! and so every cached prefix of it, depends on it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions under their newer name; rendered as `system`.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// A tool's result.
    Tool,
    /// A tool's result under its older name; rendered as `tool`.
    Function,
}

impl Role {
    /// The name a template is shown.
    #[must_use]
    pub fn template_name(self) -> &'static str {
        match self {
            Self::System | Self::Developer => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool | Self::Function => "tool",
        }
    }
}

/// One message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; may be absent beside tool calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Content>,
    /// The model's reasoning of that turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls the model made in that turn.
    #[serde(default, deserialize_with = "null_as_empty", skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool's result answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the speaker or the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Everything else, shown to the template as it is.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message of plain text.
    #[must_use]
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Self {
            role,
            content: Some(Content::Text(text.into())),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
            extra: Map::new(),
        }
    }

    /// The text of the content, parts joined; media contribute nothing.
    #[must_use]
    pub fn plain_text(&self) -> String {
        match &self.content {
            None => String::new(),
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => parts.iter().filter_map(part_text).collect(),
        }
    }

    /// The reasoning under whichever name the client sent it: `reasoning_content`, `thinking` or
    /// `reasoning` (clients exist that send two of them).
    #[must_use]
    pub fn reasoning(&self) -> Option<&str> {
        self.reasoning_content
            .as_deref()
            .or_else(|| ["thinking", "reasoning"].iter().find_map(|name| self.extra.get(*name)?.as_str()))
    }

    /// Whether a part of the content is not text.
    #[must_use]
    pub fn has_media(&self) -> bool {
        matches!(&self.content, Some(Content::Parts(parts)) if parts.iter().any(|p| part_text(p).is_none()))
    }
}

/// Text or a list of parts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Parts as the template expects them: `{"type": "text", "text": ...}`, `{"type": "image", ...}`,
    /// `{"type": "video", ...}`.
    Parts(Vec<Value>),
}

impl Content {
    /// Whether a part is something else than text.
    #[must_use]
    pub fn has_media(&self) -> bool {
        matches!(self, Content::Parts(parts) if parts.iter().any(|p| part_text(p).is_none()))
    }
}

/// The text of a part, `None` for media.
pub(crate) fn part_text(part: &Value) -> Option<&str> {
    match part {
        Value::String(text) => Some(text),
        Value::Object(map) => map.get("text").and_then(Value::as_str),
        _ => None,
    }
}

/// A call in the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Id given when the call was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`, the only kind templates know.
    #[serde(rename = "type", default = "function_kind")]
    pub kind: String,
    /// What is called.
    pub function: FunctionCall,
}

impl ToolCall {
    /// A call of a function.
    #[must_use]
    pub fn new(name: impl Into<String>, arguments: Value) -> Self {
        Self { id: None, kind: function_kind(), function: FunctionCall { name: name.into(), arguments } }
    }
}

/// Name and arguments of a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Function name.
    pub name: String,
    /// An object, or its JSON text as clients send it, or the text of a call that was cut.
    #[serde(default)]
    pub arguments: Value,
}

impl FunctionCall {
    /// The arguments as the object a template iterates over. JSON text is parsed; whatever is not an
    /// object becomes the only member, `arguments`, of one, so that no history is refused.
    #[must_use]
    pub fn arguments_object(&self) -> Map<String, Value> {
        let value = match &self.arguments {
            Value::String(text) if text.trim().is_empty() => return Map::new(),
            Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| self.arguments.clone()),
            other => other.clone(),
        };
        match value {
            Value::Object(map) => map,
            Value::Null => Map::new(),
            other => Map::from_iter([("arguments".to_owned(), other)]),
        }
    }
}

fn function_kind() -> String {
    "function".to_owned()
}

fn null_as_empty<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Vec<ToolCall>, D::Error> {
    Ok(Option::<Vec<ToolCall>>::deserialize(d)?.unwrap_or_default())
}

/// A declared tool: `{"type": "function", "function": {...}}`, shown to templates member by member as the
/// request has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Map<String, Value>", into = "Map<String, Value>")]
pub struct Tool(Map<String, Value>);

impl Tool {
    /// A function tool.
    #[must_use]
    pub fn function(name: &str, description: &str, parameters: Value) -> Self {
        let function =
            serde_json::json!({"name": name, "description": description, "parameters": parameters});
        Self::from_map(Map::from_iter([
            ("type".to_owned(), function_kind().into()),
            ("function".to_owned(), function),
        ]))
    }

    /// A tool from its members, unchecked: without a `function` its name is empty.
    #[must_use]
    pub fn from_map(map: Map<String, Value>) -> Self {
        Self(map)
    }

    /// All members in order.
    #[must_use]
    pub fn as_map(&self) -> &Map<String, Value> {
        &self.0
    }

    /// The function's name, empty where it is missing.
    #[must_use]
    pub fn name(&self) -> &str {
        self.member("name").and_then(Value::as_str).unwrap_or_default()
    }

    /// The JSON Schema of the arguments.
    #[must_use]
    pub fn parameters(&self) -> Option<&Value> {
        self.member("parameters")
    }

    fn member(&self, name: &str) -> Option<&Value> {
        self.0.get("function")?.get(name)
    }
}

impl TryFrom<Map<String, Value>> for Tool {
    type Error = String;

    fn try_from(map: Map<String, Value>) -> Result<Self, String> {
        let tool = Self(map);
        if tool.name().is_empty() {
            return Err("a tool needs function.name".to_owned());
        }
        Ok(tool)
    }
}

impl From<Tool> for Map<String, Value> {
    fn from(tool: Tool) -> Self {
        tool.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_clients_send() {
        let message: Message = serde_json::from_str(
            r#"{"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"z\": 1, \"a\": 2.50}"}}], "x": 1}"#,
        )
        .expect("parses");
        assert_eq!(message.reasoning(), Some("r"));
        let arguments = message.tool_calls[0].function.arguments_object();
        assert_eq!(arguments.keys().collect::<Vec<_>>(), ["z", "a"]);
        assert_eq!(message.extra["x"], 1);
        let message: Message =
            serde_json::from_str(r#"{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "image"}], "tool_calls": null}"#)
                .expect("parses");
        assert!(message.has_media());
        assert_eq!((message.plain_text().as_str(), message.role.template_name()), ("a", "system"));
    }

    #[test]
    fn tools_keep_their_members_in_order() {
        let text =
            r#"{"function":{"strict":true,"name":"f","parameters":{"z":1,"a":2}},"type":"function","x":1}"#;
        let tool: Tool = serde_json::from_str(text).expect("parses");
        assert_eq!(serde_json::to_string(&tool).expect("writes"), text);
        assert_eq!(tool.name(), "f");
        assert!(serde_json::from_str::<Tool>(r#"{"type": "function"}"#).is_err());
    }

    #[test]
    fn broken_argument_text_is_kept() {
        let call = |v: Value| ToolCall::new("f", v).function.arguments_object();
        assert_eq!(
            Value::from(call("{\"a\": \"cut".into())),
            serde_json::json!({"arguments": "{\"a\": \"cut"})
        );
        assert_eq!(Value::from(call("[1]".into())), serde_json::json!({"arguments": [1]}));
        assert!(call("".into()).is_empty() && call(Value::Null).is_empty());
    }
}
