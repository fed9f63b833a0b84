//! The content of messages: text, or parts of which only text can be read until vision exists.

use crate::error::{ApiError, quoted};
use crate::fields::wrong;
use serde_json::Value;

/// The text of a content field: a string, or parts joined by newlines (clients split one text into several parts
/// and send the same turn now as a string, now as a list). `None` where it is null or absent.
pub(crate) fn text(path: &str, value: Option<Value>) -> Result<Option<String>, ApiError> {
    text_joined(path, value, "\n")
}

/// The same with another separator.
pub(crate) fn text_joined(
    path: &str,
    value: Option<Value>,
    separator: &str,
) -> Result<Option<String>, ApiError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (i, part) in parts.into_iter().enumerate() {
                texts.push(part_text(&format!("{path}[{i}]"), part)?);
            }
            Ok(Some(texts.join(separator)))
        }
        Some(other) => Err(wrong(path, "a string or a list of parts", &other)),
    }
}

/// The text of one part.
pub(crate) fn part_text(path: &str, part: Value) -> Result<String, ApiError> {
    let map = match part {
        Value::String(text) => return Ok(text),
        Value::Object(map) => map,
        other => return Err(wrong(path, "a part", &other)),
    };
    let kind = map.get("type").and_then(Value::as_str).unwrap_or("text");
    let field = match kind {
        "text" | "input_text" | "output_text" | "reasoning_text" | "summary_text" => "text",
        "refusal" => "refusal",
        "image_url" | "input_image" | "image" | "video_url" | "input_video" | "video" => {
            return Err(ApiError::at(
                400,
                "vision_disabled",
                path,
                format!("is of type {kind}; this server reads text only"),
            ));
        }
        other => {
            return Err(ApiError::at(
                400,
                "unsupported_content",
                format!("{path}.type"),
                format!("{} is not supported; text is", quoted(&Value::from(other))),
            ));
        }
    };
    match map.get(field) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(wrong(&format!("{path}.{field}"), "a string", other)),
        None => {
            Err(ApiError::at(400, "missing_required_parameter", format!("{path}.{field}"), "is required"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_string_and_a_list_of_one_text_are_the_same_turn() {
        let list = json!([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]);
        assert_eq!(text("c", Some(list)).expect("text"), text("c", Some("x".into())).expect("text"));
    }

    #[test]
    fn what_cannot_be_read_is_refused_by_place_and_kind() {
        let image = text("m[0].content", Some(json!([{"type": "image_url", "image_url": {"url": "data:"}}])));
        let image = image.expect_err("no vision");
        assert_eq!((image.code, image.param.as_deref()), ("vision_disabled", Some("m[0].content[0]")));
        let audio =
            text("m[0].content", Some(json!([{"type": "text", "text": "a"}, {"type": "input_audio"}])));
        assert_eq!(audio.expect_err("no audio").param.as_deref(), Some("m[0].content[1].type"));
    }
}
