//! Input items as a conversation.
//!
//! Items of the model that stand together are one turn: reasoning, message, calls. Results are matched by `call_id`,
//! in whatever order they come.

use super::declared;
use crate::content;
use crate::error::{ApiError, quoted};
use crate::fields::{Fields, wrong};
use crate::ids;
use crate::tools::Tools;
use crate::turn::Turn;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use infernix_text::tools::found_text;
use infernix_text::{Content, Message, Role, ToolCall};
use serde_json::{Map, Value};

/// Names reasoning that a client keeps for us.
pub(crate) const INCLUDE_REASONING: &str = "reasoning.encrypted_content";
/// Marks reasoning text of ours in `encrypted_content`.
const MIRROR: &str = "ix1.";

/// Reasoning text as a client keeps it. Not secret: the client sees the text anyway.
pub(super) fn mirror(reasoning: &str) -> String {
    format!("{MIRROR}{}", STANDARD.encode(reasoning))
}

fn mirrored(text: &str) -> Option<String> {
    String::from_utf8(STANDARD.decode(text.strip_prefix(MIRROR)?).ok()?).ok()
}

/// Gives every item an id.
pub(crate) fn with_ids(items: &mut [Value]) {
    for item in items {
        if let Value::Object(map) = item {
            map.entry("type").or_insert_with(|| "message".into());
            if !map.get("id").is_some_and(Value::is_string) {
                map.insert("id".to_owned(), ids::fresh("item_").into());
            }
        }
    }
}

/// The conversation that the items hold. `earlier` items come from stored responses; places in errors count from the
/// request's own.
pub(super) fn messages(items: &[Value], earlier: usize, turn: &mut Turn) -> Result<Vec<Message>, ApiError> {
    let mut reader = Reader { out: Vec::new(), open: None, results: Vec::new(), turn };
    for (i, item) in items.iter().enumerate() {
        let path = match i.checked_sub(earlier) {
            Some(own) => format!("input[{own}]"),
            None => format!("previous_response.input[{i}]"),
        };
        reader.item(&path, item.clone())?;
    }
    reader.flush();
    Ok(reader.out)
}

struct Reader<'a> {
    out: Vec<Message>,
    /// The model's turn being collected.
    open: Option<Message>,
    /// Where the results of the turn before begin and which calls it made.
    results: Vec<String>,
    turn: &'a mut Turn,
}

impl Reader<'_> {
    fn item(&mut self, path: &str, item: Value) -> Result<(), ApiError> {
        let mut fields = Fields::new(path, item)?;
        let kind = fields.string("type")?.unwrap_or_else(|| "message".to_owned());
        match kind.as_str() {
            "message" => self.message(&mut fields),
            "reasoning" => {
                let text = reasoning(&mut fields)?;
                match text {
                    Some(text) => {
                        let fresh = self
                            .open
                            .as_ref()
                            .is_none_or(|m| m.content.is_some() || !m.tool_calls.is_empty());
                        if fresh {
                            self.flush();
                        }
                        let message = self.assistant();
                        let before = message.reasoning_content.take();
                        message.reasoning_content =
                            Some(before.map_or_else(|| text.clone(), |b| format!("{b}\n{text}")));
                    }
                    None => self.turn.ignored.push("reasoning.encrypted_content".to_owned()),
                }
                Ok(())
            }
            "function_call" => {
                let namespace = fields.string("namespace")?;
                let name = Tools::shown_name(namespace.as_deref(), &fields.need_string("name")?);
                let arguments = fields.take("arguments").unwrap_or_default();
                self.call(&mut fields, name, arguments)
            }
            "custom_tool_call" => {
                let name = fields.need_string("name")?;
                let input = fields.string("input")?.unwrap_or_default();
                let arguments = Map::from_iter([("input".to_owned(), input.into())]);
                self.call(&mut fields, name, Value::Object(arguments))
            }
            "tool_search_call" => {
                let arguments = fields.take("arguments").unwrap_or_default();
                self.call(&mut fields, "tool_search".to_owned(), arguments)
            }
            "function_call_output" | "custom_tool_call_output" => {
                let output = fields.path("output");
                let text = content::text(&output, fields.take("output"))?.unwrap_or_default();
                self.result(&mut fields, text)
            }
            "tool_search_output" => {
                let text = self.found_tools(path, &mut fields)?;
                self.result(&mut fields, text)
            }
            "item_reference" => {
                Err(ApiError::invalid(path, "references to items cannot be followed; send the item"))
            }
            other => Err(ApiError::at(
                400,
                "unsupported_content",
                format!("{path}.type"),
                format!("{} is not supported", quoted(&Value::from(other))),
            )),
        }
    }

    fn message(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        let role = fields.word("role", &["user", "assistant", "system", "developer"])?;
        let path = fields.path("content");
        let text = content::text(&path, Some(fields.need("content")?))?.unwrap_or_default();
        let role = match role {
            Some("assistant") => {
                if self.open.as_ref().is_some_and(|m| m.content.is_some() || !m.tool_calls.is_empty()) {
                    self.flush();
                }
                self.assistant().content = Some(Content::Text(text));
                return Ok(());
            }
            Some("system") => Role::System,
            Some("developer") => Role::Developer,
            Some(_) => Role::User,
            None => {
                return Err(ApiError::at(
                    400,
                    "missing_required_parameter",
                    fields.path("role"),
                    "is required",
                ));
            }
        };
        self.flush();
        self.out.push(Message::text(role, text));
        Ok(())
    }

    /// The model's turn that is being collected, a new one if there is none.
    fn assistant(&mut self) -> &mut Message {
        self.open.get_or_insert_with(|| Message { content: None, ..Message::text(Role::Assistant, "") })
    }

    fn call(&mut self, fields: &mut Fields, name: String, arguments: Value) -> Result<(), ApiError> {
        let id = fields.string("call_id")?.or(fields.string("id")?);
        if !matches!(arguments, Value::String(_) | Value::Object(_) | Value::Null) {
            return Err(wrong(&fields.path("arguments"), "JSON text or an object", &arguments));
        }
        self.assistant().tool_calls.push(ToolCall { id, ..ToolCall::new(name, arguments) });
        Ok(())
    }

    fn result(&mut self, fields: &mut Fields, text: String) -> Result<(), ApiError> {
        let id = match fields.string("call_id")? {
            Some(id) => id,
            None => self.last_call().unwrap_or_default(),
        };
        self.flush();
        let Some(order) = self.results.iter().position(|c| *c == id) else {
            return Err(ApiError::at(
                400,
                "invalid_tool_history",
                fields.path("call_id"),
                "answers no call of the turn before",
            ));
        };
        // Results stand in the order of the calls.
        let order_of = |m: &Message| self.results.iter().position(|c| Some(c) == m.tool_call_id.as_ref());
        let mut at = self.out.len();
        while at > 0 && self.out[at - 1].role == Role::Tool && order_of(&self.out[at - 1]) > Some(order) {
            at -= 1;
        }
        self.out.insert(at, Message { tool_call_id: Some(id), ..Message::text(Role::Tool, text) });
        Ok(())
    }

    fn last_call(&self) -> Option<String> {
        self.open.as_ref()?.tool_calls.last()?.id.clone()
    }

    /// Ends the model's turn.
    fn flush(&mut self) {
        if let Some(mut message) = self.open.take() {
            message.content.get_or_insert_with(|| Content::Text(String::new()));
            self.results = message.tool_calls.iter().filter_map(|c| c.id.clone()).collect();
            self.out.push(message);
        }
    }

    /// Tools that a search gave become callable; the prompt shows them here, never in its tools block.
    fn found_tools(&mut self, path: &str, fields: &mut Fields) -> Result<String, ApiError> {
        let before = self.turn.tools.found.len();
        for (i, value) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
            let path = format!("{path}.tools[{i}]");
            let mut tool = Fields::new(&path, value)?;
            let kind = tool.need_string("type")?;
            declared(&mut self.turn.tools, &path, &kind, &mut tool, None, true)?;
        }
        Ok(found_text(&self.turn.tools.found[before..]))
    }
}

/// The text of a reasoning item: its content, or what it carries for us.
fn reasoning(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let path = fields.path("content");
    if let Some(text) = content::text(&path, fields.take("content"))?.filter(|t| !t.is_empty()) {
        return Ok(Some(text));
    }
    match fields.string("encrypted_content")? {
        Some(text) => Ok(mirrored(&text)),
        None => Ok(Some(String::new())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(items: Value) -> Result<(Vec<Message>, Turn), ApiError> {
        let mut turn = Turn::new();
        let messages = messages(items.as_array().expect("a list"), 0, &mut turn)?;
        Ok((messages, turn))
    }

    #[test]
    fn items_of_one_turn_become_one_message_and_results_follow_the_calls() {
        let (messages, _) = read(json!([
            {"role": "user", "content": "x"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{\"cut"},
            {"type": "function_call_output", "call_id": "b", "output": "2"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
        ]))
        .expect("valid");
        assert_eq!(messages.len(), 4);
        assert_eq!(messages[1].reasoning(), Some("r"));
        assert_eq!(messages[1].tool_calls.len(), 2);
        let results: Vec<_> = messages[2..].iter().map(Message::plain_text).collect();
        assert_eq!(results, ["1", "2"]);
    }

    #[test]
    fn kept_reasoning_is_read_and_another_servers_is_named() {
        let (messages, _) =
            read(json!([{"type": "reasoning", "summary": [], "encrypted_content": mirror("thought")},
                        {"role": "assistant", "content": "y"}]))
            .expect("valid");
        assert_eq!(messages[0].reasoning(), Some("thought"));
        let (_, turn) =
            read(json!([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}])).expect("valid");
        assert_eq!(turn.ignored, ["reasoning.encrypted_content"]);
    }

    #[test]
    fn a_search_result_makes_tools_callable_without_changing_the_tools_block() {
        let (messages, turn) = read(json!([
            {"role": "user", "content": "x"},
            {"type": "tool_search_call", "call_id": "t", "execution": "client", "arguments": {"query": "plans"}},
            {"type": "tool_search_output", "call_id": "t", "tools": [{"type": "function", "name": "plan_read"}]},
        ]))
        .expect("valid");
        assert!(turn.tools.prompt.is_empty());
        assert_eq!(turn.tools.find(None, "plan_read").as_deref(), Some("plan_read"));
        assert!(messages[2].plain_text().contains("plan_read"));
    }
}
