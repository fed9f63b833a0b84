//! Which calls an output may make, as a grammar over Qwen's markup.

use serde_json::{Map, Value, json};

use super::cfg::{self, Reduced};
use super::error::GrammarError;
use super::gbnf::Expr;
use super::regex::{self, Scope};
use super::rx::Rx;
use super::{lark as notation, schema};

/// A tool as calls are held to it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolRule {
    /// The function's name.
    pub name: String,
    /// JSON Schema of its arguments.
    pub parameters: Value,
    /// Whether the arguments must fit the schema, or only the call's frame is enforced.
    pub strict: bool,
    /// What the text of a free-form tool must be. Such a tool takes one argument, [`INPUT`].
    pub input: Option<InputForm>,
}

/// The argument that holds the text of a free-form tool.
pub const INPUT: &str = "input";

/// The form of a free-form tool's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InputForm {
    /// A text of a Lark grammar.
    Lark(String),
    /// A text that an expression matches as a whole.
    Regex(String),
}

/// Whether to call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// Text, calls, or text and then calls.
    #[default]
    Auto,
    /// No calls.
    None,
    /// At least one call and no text.
    Required,
}

/// What is enforced about calls. A named tool is `Required` with one tool.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CallRules {
    /// Tools that may be called.
    pub tools: Vec<ToolRule>,
    /// Whether to call.
    pub choice: Choice,
    /// Whether several calls may follow each other.
    pub parallel: bool,
    /// Whether free calls are held to the frame and to declared names, too (`tool_constraints: "basic"`).
    /// Without it only strict tools and the members above are enforced.
    pub frame: bool,
}

impl CallRules {
    /// Whether anything has to be enforced.
    #[must_use]
    pub fn restricts(&self) -> bool {
        match self.choice {
            Choice::Auto => !self.tools.is_empty() && (self.frame || !self.parallel || self.exact()),
            Choice::None | Choice::Required => true,
        }
    }

    /// Whether more is demanded of calls than their frame and a declared name.
    #[must_use]
    pub fn demands(&self) -> bool {
        self.choice == Choice::Required || self.tools.iter().any(|t| t.strict || t.input.is_some())
    }

    /// Whether a call outside of the markup that the grammar knows would break a promise.
    pub(crate) fn exact(&self) -> bool {
        !self.parallel
            || self.choice != Choice::Auto
            || self.tools.iter().any(|t| t.strict || t.input.is_some())
    }
}

/// The calls as Lark rules; the first is `calls`.
///
/// # Errors
/// A strict tool whose schema cannot be enforced.
pub(crate) fn lark(rules: &CallRules) -> Result<String, GrammarError> {
    let mut out = String::new();
    let again = if rules.parallel { " (WHITE? call)*" } else { "" };
    out += &format!("calls: call{again} WHITE?\nWHITE: /[\\n ]+/\n");
    let mut names = Vec::new();
    let mut free = Vec::new();
    for (i, tool) in rules.tools.iter().enumerate() {
        if let Some(form) = &tool.input {
            names.push(format!("t{i}"));
            out += &free_form(i, &tool.name, form).map_err(|e| e.in_tool(&tool.name))?;
        } else if tool.strict {
            names.push(format!("t{i}"));
            out += &strict(i, tool).map_err(|e| e.in_tool(&tool.name))?;
        } else {
            free.push(Rx::Literal(tool.name.clone()));
        }
    }
    if !free.is_empty() {
        names.push("free".to_owned());
        // A closing tag ends a value only where a parameter or the function's end follows, as the parser of
        // outputs reads it; so the rest of a value is read up to one of the two, lazily.
        out += &format!(
            "free: \"<function=\" FREE \">\\n\" free_body\n\
             FREE: {}\n\
             free_body: \"</function>\" | \"<parameter=\" free_parameter\n\
             free_parameter: PARAMETER \">\" free_value free_parameter | PARAMETER \">\" free_last\n\
             PARAMETER: /[^<>\\n]{{1,256}}/\n\
             free_value[suffix=/<\\/parameter>[\\n ]*<parameter=/]: /(?s:.*)/\n\
             free_last[suffix=/<\\/parameter>[\\n ]*<\\/function>/]: /(?s:.*)/\n",
            Rx::alt(free).lark()
        );
    }
    out += &format!("call: \"<tool_call>\\n\" ({}) \"\\n</tool_call>\"\n", names.join(" | "));
    Ok(out)
}

/// What ends a parameter's value.
const CLOSE: &str = "\n</parameter>\n";
/// Texts in which a value would end too early, in the syntax of the lexer.
const CLOSED_INSIDE: &str = "/(?s:.*\\n<\\/parameter>\\n.*)/";

/// Rules for one free-form tool.
fn free_form(index: usize, name: &str, form: &InputForm) -> Result<String, GrammarError> {
    let open = quoted(&format!("<function={name}>\n<parameter={INPUT}>\n"));
    let rule = format!("t{index}v");
    let head = format!("t{index}: {open} {rule} \"</function>\"\n");
    let rules = match form {
        InputForm::Regex(source) => {
            return Ok(head + &until_closed(&rule, &regex::parse(source, Scope::Whole)?));
        }
        InputForm::Lark(source) => notation::parse(source)?,
    };
    match cfg::reduced(&rules)? {
        Reduced::Regular(rx) => Ok(head + &until_closed(&rule, &rx)),
        // The closing tag is part of the grammar, so that no lexeme can swallow it.
        Reduced::Recursive(_) => {
            let mut rules = rules;
            let whole = vec![Expr::Rule(rules.root), Expr::Literal(CLOSE.to_owned())];
            rules.root = rules.bodies.len();
            rules.names.push(String::new());
            rules.bodies.push(Expr::Seq(whole));
            match cfg::reduced(&rules)? {
                Reduced::Recursive(cfg) => Ok(head + &cfg.text(rules.root, &rule, &rule)),
                Reduced::Regular(rx) => Ok(head + &format!("{rule}: {}\n", rx.lark())),
            }
        }
    }
}

/// A text of the expression and its closing tag: one lexeme, for the text alone does not say where it ends.
fn until_closed(rule: &str, rx: &Rx) -> String {
    let terminal = rule.to_uppercase();
    let close = quoted(CLOSE);
    format!(
        "{rule}: {terminal}\n{terminal}: {terminal}T {close}\n{terminal}T: {} & ~{CLOSED_INSIDE}\n",
        rx.lark()
    )
}

/// Rules for one strict tool: its parameters in declared order, optional ones may be missing.
fn strict(index: usize, tool: &ToolRule) -> Result<String, GrammarError> {
    let prepared = schema::prepare(&tool.parameters)?;
    let root = resolved(&prepared.schema, &prepared.defs);
    let refuse = |message: &str, pointer: String| {
        GrammarError::new("unsupported_json_schema", message.to_owned()).at(pointer)
    };
    let Some(root) = root.as_object() else {
        return Err(refuse("the arguments of a strict tool are an object", String::new()));
    };
    if root.get("type") != Some(&json!("object")) {
        return Err(refuse("the arguments of a strict tool have \"type\": \"object\"", "/type".to_owned()));
    }
    let empty = Map::new();
    let properties = root.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    // Without members there is nothing that additional ones could be told from.
    if root.get("additionalProperties") != Some(&Value::Bool(false))
        && !tool.parameters.as_object().is_some_and(Map::is_empty)
    {
        return Err(refuse(
            "a strict tool declares \"additionalProperties\": false",
            "/additionalProperties".to_owned(),
        ));
    }
    for keyword in
        ["anyOf", "oneOf", "allOf", "minProperties", "maxProperties", "patternProperties", "enum", "const"]
    {
        if root.contains_key(keyword) {
            return Err(refuse(
                "the arguments of a strict tool are described by properties alone",
                format!("/{keyword}"),
            ));
        }
    }
    let required: Vec<&str> = root
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let mut out = String::new();
    let mut body = String::new();
    for (i, (name, member)) in properties.iter().enumerate() {
        if name.is_empty() || name.contains(['<', '>', '\n']) {
            return Err(refuse("this name cannot be written as a parameter", "/properties".to_owned()));
        }
        let rule = format!("t{index}p{i}");
        let pointer = format!("/properties/{}", name.replace('~', "~0").replace('/', "~1"));
        if member == &Value::Bool(false) {
            continue;
        }
        let optional = if required.contains(&name.as_str()) { "" } else { "?" };
        body += &format!(" {rule}{optional}");
        out += &format!("{rule}: {} ", quoted(&format!("<parameter={name}>\n")));
        out += &value(&rule, member, &prepared.defs, &pointer)?;
    }
    Ok(format!("t{index}: {}{body} \"</function>\"\n{out}", quoted(&format!("<function={}>\n", tool.name))))
}

/// A parameter's value and closing tag, with the rules they need.
fn value(
    rule: &str,
    member: &Value,
    defs: &Map<String, Value>,
    pointer: &str,
) -> Result<String, GrammarError> {
    let close = "\\n</parameter>\\n";
    let resolved = resolved(member, defs);
    let refuse = |message: &str| GrammarError::new("unsupported_json_schema", message).at(pointer.to_owned());
    match text_like(&resolved) {
        Some(true) => {
            let terminal = rule.to_uppercase();
            let mut parts = Vec::new();
            let list: Option<Vec<&Value>> = match (resolved.get("const"), resolved.get("enum")) {
                (Some(one), _) => Some(vec![one]),
                (None, Some(list)) => list.as_array().map(|l| l.iter().collect()),
                (None, None) => None,
            };
            if let Some(list) = list {
                let texts: Vec<Rx> =
                    list.into_iter().filter_map(Value::as_str).map(|t| Rx::Literal(t.to_owned())).collect();
                if texts.is_empty() {
                    return Err(refuse("no text fits"));
                }
                let texts = Rx::alt(texts).lark();
                return Ok(format!("{terminal} \"{close}\"\n{terminal}: {texts}\n"));
            }
            if resolved.get("format").is_some() {
                return Err(refuse("format is not supported for a parameter that is text; use pattern"));
            }
            if let Some(pattern) = resolved.get("pattern").and_then(Value::as_str) {
                parts.push(regex::parse(pattern, Scope::Search).map_err(|e| refuse(&e.message))?.lark());
            }
            let count = |key: &str| resolved.get(key).and_then(Value::as_u64);
            if count("minLength").is_some() || count("maxLength").is_some() {
                let max = count("maxLength").map(|n| n.to_string()).unwrap_or_default();
                parts.push(format!("/(?s:.{{{},{max}}})/", count("minLength").unwrap_or(0)));
            }
            if parts.is_empty() {
                return Ok(format!("{rule}v\n{rule}v[suffix=\"{close}\"]: /(?s:.*)/\n"));
            }
            // The text and its closing tag are one lexeme, for the text alone does not say where it ends.
            Ok(format!(
                "{terminal}\n{terminal}: {terminal}V \"{close}\"\n{terminal}V: {} & ~{CLOSED_INSIDE}\n",
                parts.join(" & ")
            ))
        }
        Some(false) => {
            let mut schema = member.clone();
            if let Value::Object(map) = &mut schema {
                if !defs.is_empty() {
                    map.insert("$defs".to_owned(), Value::Object(defs.clone()));
                }
                map.insert("x-guidance".to_owned(), super::compiler::json_options());
            }
            Ok(format!("{rule}j \"{close}\"\n{rule}j: %json {schema}\n"))
        }
        None => Err(refuse("a parameter of a strict tool is either text or not: split unions with string")),
    }
}

/// Whether values are text, as the parser of outputs will read them; `None` where it depends.
fn text_like(schema: &Value) -> Option<bool> {
    let map = schema.as_object()?;
    let kinds: Vec<&str> = match map.get("type") {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => {
            // The reader takes these for JSON, and a text among them would come out changed.
            let list = map.get("anyOf").or_else(|| map.get("oneOf")).and_then(Value::as_array)?;
            let sides: Vec<Option<bool>> = list.iter().map(text_like).collect();
            return sides.iter().all(|s| *s == Some(false)).then_some(false);
        }
    };
    match kinds.iter().filter(|k| **k == "string").count() {
        0 => Some(false),
        1 if kinds.len() == 1 => Some(true),
        _ => None,
    }
}

/// The schema behind plain references.
fn resolved(schema: &Value, defs: &Map<String, Value>) -> Value {
    let mut current = schema;
    for _ in 0..32 {
        let Some(name) = current.get("$ref").and_then(Value::as_str).and_then(|r| r.strip_prefix("#/$defs/"))
        else {
            break;
        };
        match defs.get(name) {
            Some(next) => current = next,
            None => break,
        }
    }
    current.clone()
}

/// A Lark string.
fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(parameters: Value) -> Result<String, GrammarError> {
        let tools = vec![ToolRule { name: "f".into(), parameters, strict: true, input: None }];
        lark(&CallRules { tools, choice: Choice::Auto, parallel: true, frame: true })
    }

    #[test]
    fn strict_schemas_that_cannot_be_held_name_tool_and_place() {
        for (schema, pointer) in [
            (json!({"type": "object", "properties": {"a": {"type": "integer"}}}), "/additionalProperties"),
            (json!({"type": "array", "additionalProperties": false}), "/type"),
            (
                json!({"type": "object", "additionalProperties": false, "properties": {"a": {"type": ["string", "null"]}}}),
                "/properties/a",
            ),
            (json!({"type": "object", "additionalProperties": false, "required": ["z"]}), ""),
            (
                json!({"type": "object", "additionalProperties": false, "properties": {"a": {"type": "string", "format": "date"}}}),
                "/properties/a",
            ),
        ] {
            let error = rule(schema.clone()).expect_err("refused");
            assert_eq!(
                (error.pointer.as_deref(), error.tool.as_deref()),
                (Some(pointer), Some("f")),
                "{schema}"
            );
        }
        assert!(rule(json!({"type": "object", "additionalProperties": false, "properties": {"a": {"type": "integer"}}})).is_ok());
    }

    #[test]
    fn what_restricts() {
        let free = CallRules { parallel: true, ..CallRules::default() };
        assert!(!free.restricts());
        assert!(CallRules { choice: Choice::None, ..free.clone() }.restricts());
        let tools = vec![ToolRule { name: "f".into(), parameters: json!({}), strict: false, input: None }];
        let with = CallRules { tools, ..free };
        assert!(!with.restricts() && CallRules { frame: true, ..with.clone() }.restricts());
        assert!(CallRules { parallel: false, ..with }.restricts());
    }
}
