//! Catalogues of tools that are too large for a prompt, and searches in them.
//!
//! A deferred tool is declared but not shown. The model sees one small function instead, calls it with words
//! or an expression, and is shown what was found behind everything it has already read, so that the prefix
//! stays as it was.

mod search;

pub use search::{FOUND, PATTERN_LIMIT, SearchError, ToolIndex};

use serde_json::json;

use crate::message::Tool;
use crate::pyjson;

/// The function that a model calls to search: for words, or with a regular expression.
#[must_use]
pub fn search_function(name: &str, regex: bool) -> Tool {
    let (argument, description, about) = if regex {
        (
            "pattern",
            "Searches further tools with a regular expression over their names, descriptions and arguments. What it finds can be called afterwards.",
            "Regular expression, at most 200 characters.",
        )
    } else {
        (
            "query",
            "Searches further tools for words in their names, descriptions and arguments. What it finds can be called afterwards.",
            "Words that say what the tool should do.",
        )
    };
    Tool::function(
        name,
        description,
        json!({"type": "object", "properties": {argument: {"type": "string", "description": about}}, "required": [argument]}),
    )
}

/// What a model is shown of tools that were found: their declarations, as the tools block of a prompt has them.
#[must_use]
pub fn found_text<'t>(tools: impl IntoIterator<Item = &'t Tool>) -> String {
    let lines: Vec<String> = tools
        .into_iter()
        .map(|tool| pyjson::dumps(&serde_json::Value::Object(tool.as_map().clone())))
        .collect();
    if lines.is_empty() {
        return "No tool fits. Try other words.".to_owned();
    }
    format!("These functions can be called, too:\n<tools>\n{}\n</tools>", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_found_reads_like_the_tools_block() {
        let tool = Tool::function("f", "d", json!({"type": "object"}));
        let text = found_text([&tool]);
        assert!(
            text.contains(
                r#"{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}"#
            ),
            "{text}"
        );
        assert!(found_text([]).starts_with("No tool"));
        assert_eq!(
            search_function("s", true).parameters().expect("has some")["required"],
            json!(["pattern"])
        );
    }
}
