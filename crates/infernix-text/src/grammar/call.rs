//! Which calls an output may make, as a grammar over Qwen's markup.

use llguidance::derivre::{Regex, RegexAst, RegexBuilder};
use serde_json::{Map, Value, json};

use super::cfg::{self, Reduced};
use super::error::GrammarError;
use super::gbnf::Expr;
use super::regex::{self, Scope};
use super::rx::Rx;
use super::{lark as notation, schema};
use crate::output::{PLAIN_NAME, plain_name, writable};

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

impl ToolRule {
    /// Whether more than the call's frame is demanded.
    fn demands(&self) -> bool {
        self.strict || matches!(self.input, Some(InputForm::Lark(_) | InputForm::Regex(_)))
    }
}

/// The argument that holds the text of a free-form tool.
pub const INPUT: &str = "input";

/// The form of a free-form tool's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InputForm {
    /// Any text.
    Any,
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

    /// Whether every call in `<tool_call>` has the form of these rules.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.choice != Choice::None && self.restricts()
    }

    /// Whether more is demanded of calls than their frame and a declared name.
    #[must_use]
    pub fn demands(&self) -> bool {
        self.choice == Choice::Required || self.tools.iter().any(ToolRule::demands)
    }

    /// Whether a call outside of the markup that the grammar knows would break a promise.
    pub(crate) fn exact(&self) -> bool {
        !self.parallel || self.choice != Choice::Auto || self.tools.iter().any(ToolRule::demands)
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
             free_parameter: PARAMETER \">\" free_value \"eter=\" free_parameter | PARAMETER \">\" free_last\n\
             PARAMETER: {}\n\
             free_value[suffix=/{CLOSE}{SPACE}<param/]: /(?s:.*)/\n\
             free_last[suffix=/{CLOSE}{SPACE}<\\/function>/]: /(?s:.*)/\n",
            Rx::alt(free).lark(),
            parameter_names(rules),
        );
    }
    out += &format!("call: \"<tool_call>\\n\" ({}) \"\\n</tool_call>\"\n", names.join(" | "));
    Ok(out)
}

/// A parameter's closing tag, in the syntax of the lexer.
const CLOSE: &str = "<\\/parameter>";
/// What the parser of outputs steps over between tags: white space of Unicode.
const SPACE: &str = r"[\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]*";
/// Whatever follows, as a terminal. Other than any text, it is known to go on from every byte: where it is excluded, the
/// lexer sees at once that nothing is left, and does not search the rest of a long text for it.
const BYTES: &str = r"~/[^\s\S]/";
/// A closing tag as a text of a recursive grammar ends, up to the next tag's first character.
const CLOSED: &str = "\n</parameter>\n<";
/// Most characters that a text may have to have, where they may be the closing tag's: the lexer looks from every new
/// place for an end that the text can have (20 ms on a desktop core for this many).
const LEAST: u64 = 1000;
/// Greatest length beside such an expression.
const MOST: u64 = 400;
/// Largest expression that may hold the closing tag's characters, for the same reason.
const WEIGHT: usize = 4096;
/// Fuel of a proof that no text fits; without one the text is let in.
const PROOF: u64 = 1_000_000;

/// The names that parameters of free calls may have: plain ones, and others where a tool declares them.
fn parameter_names(rules: &CallRules) -> String {
    let declared = rules.tools.iter().filter_map(|t| t.parameters.get("properties")?.as_object());
    let mut odd: Vec<Rx> = Vec::new();
    for name in declared.flat_map(Map::keys).filter(|n| !plain_name(n) && writable(n)) {
        let name = Rx::Literal(name.clone());
        if !odd.contains(&name) {
            odd.push(name);
        }
    }
    let plain = format!("/[A-Za-z0-9_\\-]{{1,{PLAIN_NAME}}}/");
    if odd.is_empty() { plain } else { format!("{plain} | {}", Rx::alt(odd).lark()) }
}

/// Rules for one free-form tool.
fn free_form(index: usize, name: &str, form: &InputForm) -> Result<String, GrammarError> {
    let open = quoted(&format!("<function={name}>\n<parameter={INPUT}>\n"));
    let rule = format!("t{index}v");
    let head = format!("t{index}: {open} {rule} \"/function>\"\n{rule}: ");
    let held = |rx: Option<&Rx>| {
        text(&rule, rx, 0, None).map(|rules| head.clone() + &rules).map_err(|message| {
            GrammarError::new("invalid_grammar", format!("{message} in the input of a free-form tool"))
        })
    };
    let rules = match form {
        InputForm::Any => return held(None),
        InputForm::Regex(source) => return held(Some(&regex::parse(source, Scope::Whole)?)),
        InputForm::Lark(source) => notation::parse(source)?,
    };
    match cfg::reduced(&rules)? {
        Reduced::Regular(rx) => held(Some(&rx)),
        // The closing tag is part of the grammar, so that no lexeme can swallow it.
        Reduced::Recursive(_) => {
            let mut rules = rules;
            let whole = vec![Expr::Rule(rules.root), Expr::Literal(CLOSED.to_owned())];
            rules.root = rules.bodies.len();
            rules.names.push(String::new());
            rules.bodies.push(Expr::Seq(whole));
            let inner = format!("{rule}g");
            let body = match cfg::reduced(&rules)? {
                Reduced::Recursive(cfg) => cfg.text(rules.root, &inner, &inner),
                Reduced::Regular(rx) => format!("{inner}: {}\n", rx.lark()),
            };
            Ok(format!("{head}{inner}\n{body}"))
        }
    }
}

/// A text and its closing tag, up to the first character of the next tag, with the rules they need. The text is one
/// that the parser of outputs gives back: it ends at the first closing tag that another tag follows. The lexeme is
/// lazy, since a greedy one reads a second closing tag as a part of the text.
///
/// # Errors
/// Why no such text can be held.
fn text(rule: &str, rx: Option<&Rx>, min: u64, max: Option<u64>) -> Result<String, String> {
    let end = format!("{CLOSE}{SPACE}<");
    let length = |min: u64| match max {
        None => format!("(?s:.{{{min},}})"),
        // The least length apart: a search for the text's end then goes no further than it has to.
        Some(max) => format!("(?s:.{{{min}}}.{{0,{}}})", max.saturating_sub(min)),
    };
    if rx.is_none() && min == 0 {
        // Where every beginning of a text is a text, the first closing tag always ends one.
        let any = if max.is_some() { format!("{}\\n?", length(0)) } else { "(?s:.*)".to_owned() };
        return Ok(format!("{rule}v\n{rule}v[suffix=/{end}/]: /{any}/\n"));
    }
    let name = rule.to_uppercase();
    if rx.is_none() {
        if min > LEAST {
            return Err(format!("a text that may have < is held to a least length of at most {LEAST}"));
        }
        let Some(more) = max.map_or(Some(None), |max| max.checked_sub(min).map(Some)) else {
            return Err("no text fits that can stand in a call".to_owned());
        };
        // From the least length on the first closing tag always ends the text; before, none may come.
        let some = |least: u64| match more {
            None => format!("(?s:.{{{least},}})"),
            Some(more) => format!("(?s:.{{{least}}}.{{0,{more}}})"),
        };
        let any = format!("(?:{}\\n|{}[^\\n])", some(min), some(min - 1));
        let early = format!("(?s:.{{0,{min}}}){end}");
        return Ok(format!(
            "{rule}v\n{rule}v[suffix=/{end}/]: {name}\n{name}: /{any}/ & ~(/{early}/ {BYTES})\n"
        ));
    }
    let mut parts: Vec<String> = rx.iter().map(|rx| rx.pattern()).collect();
    if min > 0 || max.is_some() {
        parts.push(length(min));
    }
    let closes = format!("(?s:.*){end}");
    let may_close = rx.is_none_or(|rx| rx.mentions('<'));
    if may_close && rx.map_or(0, Rx::shortest).max(min) > LEAST {
        return Err(format!("a text that may have < is held to a least length of at most {LEAST}"));
    }
    let large = |rx: &Rx| rx.weight() > WEIGHT || max.is_some_and(|max| max > MOST);
    if may_close && rx.is_some_and(large) {
        return Err("an expression that may match < is too large".to_owned());
    }
    if max.is_some_and(|max| max < min) || is_void(&parts, may_close.then_some(&closes)) {
        return Err("no text fits that can stand in a call".to_owned());
    }
    let mut terminal: Vec<String> = parts.iter().map(|p| format!("/{p}/")).collect();
    if may_close {
        terminal.push(format!("~(/{closes}/ {BYTES})"));
    }
    Ok(format!("{rule}v\n{rule}v[suffix=/\\n{end}/]: {name}\n{name}: {}\n", terminal.join(" & ")))
}

/// Whether it is certain that no text matches all of these expressions, and none of the other one begins it.
fn is_void(parts: &[String], but: Option<&String>) -> bool {
    let mut all: Vec<RegexAst> = parts.iter().map(|p| RegexAst::Regex(p.clone())).collect();
    let bytes = RegexAst::Not(Box::new(RegexAst::NoMatch));
    all.extend(
        but.map(|p| RegexAst::Not(Box::new(RegexAst::Concat(vec![RegexAst::Regex(p.clone()), bytes])))),
    );
    let mut builder = RegexBuilder::new();
    let Ok(both) = builder.mk(&RegexAst::And(all)) else { return false };
    builder.to_regex_limited(both, PROOF).is_ok_and(|mut rx| rx.always_empty())
}

/// Whether a text would end before its end, where the parser of outputs reads it.
fn closes_early(text: &str) -> bool {
    text.match_indices("</parameter>").any(|(at, tag)| text[at + tag.len()..].trim_start().starts_with('<'))
}

/// Rules for one strict tool: its parameters in declared order, optional ones may be missing. Each rule begins behind
/// the first character of a tag, for that is where a text ends.
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
    let mut out = format!("t{index}: {} t{index}s0\n", quoted(&format!("<function={}>\n<", tool.name)));
    for (i, (name, member)) in properties.iter().enumerate() {
        if !writable(name) {
            return Err(refuse("this name cannot be written as a parameter", "/properties".to_owned()));
        }
        let rule = format!("t{index}p{i}");
        let (here, next) = (format!("t{index}s{i}"), format!("t{index}s{}", i + 1));
        let pointer = format!("/properties/{}", name.replace('~', "~0").replace('/', "~1"));
        if member == &Value::Bool(false) {
            out += &format!("{here}: {next}\n");
            continue;
        }
        let without = if required.contains(&name.as_str()) { String::new() } else { format!(" | {next}") };
        out += &format!("{here}: {rule} {next}{without}\n");
        out += &format!("{rule}: {} ", quoted(&format!("parameter={name}>\n")));
        out += &value(&rule, member, &prepared.defs, &pointer)?;
    }
    out += &format!("t{index}s{}: \"/function>\"\n", properties.len());
    Ok(out)
}

/// A parameter's value and closing tag, up to the first character of the next tag, with the rules they need.
fn value(
    rule: &str,
    member: &Value,
    defs: &Map<String, Value>,
    pointer: &str,
) -> Result<String, GrammarError> {
    let resolved = resolved(member, defs);
    let refuse = |message: &str| GrammarError::new("unsupported_json_schema", message).at(pointer.to_owned());
    let nullable = nullable_text(&resolved).map(|text| self::resolved(&text, defs));
    let union = resolved.get("anyOf").is_some() || resolved.get("oneOf").is_some();
    let (resolved, nullable) = match nullable {
        Some(text) if text_like(&text, defs, 0) == Some(true) => (text, true),
        _ => (resolved, false),
    };
    match text_like(&resolved, defs, 0) {
        Some(true) => {
            if resolved.get("format").is_some() {
                return Err(refuse("format is not supported for a parameter that is text; use pattern"));
            }
            let pattern = resolved.get("pattern").and_then(Value::as_str);
            let pattern = pattern.map(|source| regex::parse(source, Scope::Search)).transpose();
            let pattern = pattern.map_err(|e| refuse(&e.message))?;
            let count = |key: &str| resolved.get(key).and_then(Value::as_u64);
            let (min, max) = (count("minLength").unwrap_or(0), count("maxLength"));
            let Some(list) = literals(&resolved) else {
                let rules = text(rule, pattern.as_ref(), min, max).map_err(|message| refuse(&message))?;
                let null = format!("{rule}n[suffix=/\\n{CLOSE}{SPACE}</]: /null/\n");
                return Ok(match rules.strip_prefix(&format!("{rule}v\n")) {
                    Some(rules) if nullable => format!("({rule}v | {rule}n)\n{null}{rules}"),
                    _ => rules,
                });
            };
            let fits = |text: &&str| {
                let length = text.chars().count() as u64;
                min <= length
                    && max.is_none_or(|max| length <= max)
                    && !closes_early(text)
                    && pattern
                        .as_ref()
                        .is_none_or(|rx| Regex::new(&rx.pattern()).is_ok_and(|mut rx| rx.is_match(text)))
            };
            let null = Rx::Literal("null".to_owned());
            let admits_null = nullable && (union || list.iter().any(|v| v.is_null()));
            let mut texts: Vec<Rx> = list
                .into_iter()
                .filter_map(Value::as_str)
                .filter(fits)
                .map(|t| Rx::Literal(t.to_owned()))
                .collect();
            // The reader takes the word for null.
            if nullable && texts.contains(&null) {
                return Err(refuse("the text null cannot be told from null beside it"));
            }
            if admits_null {
                texts.push(null);
            }
            if texts.is_empty() {
                return Err(refuse("no text fits that can stand in a call"));
            }
            // With its closing tag one lexeme: a text may be the beginning of another.
            let whole = Rx::seq(vec![Rx::alt(texts), Rx::Literal(CLOSED.to_owned())]);
            let terminal = rule.to_uppercase();
            Ok(format!("{terminal}\n{terminal}: {}\n", whole.lark()))
        }
        Some(false) => {
            let mut schema = member.clone();
            if let Value::Object(map) = &mut schema {
                if !defs.is_empty() {
                    map.insert("$defs".to_owned(), Value::Object(defs.clone()));
                }
                map.insert("x-guidance".to_owned(), super::compiler::json_options());
            }
            Ok(format!("{rule}j {}\n{rule}j: %json {schema}\n", quoted(CLOSED)))
        }
        None => Err(refuse("a parameter of a strict tool is either text or not: split unions with string")),
    }
}

/// The text of a schema that admits null beside it, which the reader of a strict tool's output takes the word for.
fn nullable_text(schema: &Value) -> Option<Value> {
    let map = schema.as_object()?;
    let both = match map.get("type") {
        Some(kinds) => {
            let kinds = kinds.as_array()?;
            kinds.len() == 2 && kinds.contains(&json!("string")) && kinds.contains(&json!("null"))
        }
        None => literals(schema).is_some_and(|l| l.iter().all(|v| v.is_string() || v.is_null())),
    };
    if both {
        let mut text = map.clone();
        text.insert("type".to_owned(), json!("string"));
        return Some(Value::Object(text));
    }
    // Of a union that says nothing else.
    let list = map.get("anyOf").or_else(|| map.get("oneOf")).filter(|_| map.len() == 1)?.as_array()?;
    let null = list.iter().position(|s| s == &json!({"type": "null"}))?;
    (list.len() == 2).then(|| list[1 - null].clone())
}

/// The values that a schema lists.
fn literals(schema: &Value) -> Option<Vec<&Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(one), _) => Some(vec![one]),
        (None, Some(list)) => list.as_array().map(|l| l.iter().collect()),
        (None, None) => None,
    }
}

/// Whether values are text, as the parser of outputs will read them; `None` where it depends.
fn text_like(schema: &Value, defs: &Map<String, Value>, depth: usize) -> Option<bool> {
    let schema = &resolved(schema, defs);
    let map = schema.as_object().filter(|_| depth < 32)?;
    let kinds: Vec<&str> = match map.get("type") {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => {
            if let Some(list) = literals(schema) {
                let texts = list.iter().filter(|v| v.is_string()).count();
                return (texts == 0 || texts == list.len()).then_some(texts > 0);
            }
            // The reader takes these for JSON, and a text among them would come out changed.
            let list = map.get("anyOf").or_else(|| map.get("oneOf")).and_then(Value::as_array)?;
            let sides: Vec<Option<bool>> = list.iter().map(|s| text_like(s, defs, depth + 1)).collect();
            return sides.iter().all(|s| *s == Some(false)).then_some(false);
        }
    };
    match kinds.iter().filter(|k| **k == "string").count() {
        0 => Some(false),
        1 if kinds.len() == 1 => Some(true),
        _ => None,
    }
}

/// The schema behind plain references, and behind an intersection of one.
fn resolved(schema: &Value, defs: &Map<String, Value>) -> Value {
    let mut current = schema;
    for _ in 0..32 {
        let one =
            current.as_object().filter(|map| map.len() == 1).and_then(|map| map.get("allOf")?.as_array());
        if let Some([only]) = one.map(Vec::as_slice) {
            current = only;
            continue;
        }
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
                json!({"type": "object", "additionalProperties": false, "properties": {"a": {"type": ["string", "integer"]}}}),
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
    fn unions_that_refer_and_lists_with_null_are_held_where_they_can_be_told_apart() {
        let of = |a: Value| {
            rule(json!({"type": "object", "additionalProperties": false, "properties": {"a": a}, "$defs": {
                "p": {"type": "object", "properties": {"n": {"type": "integer"}}}, "i": {"type": "integer"}, "s": {"type": "string"}}}))
        };
        let (object, integer, text) =
            (json!({"$ref": "#/$defs/p"}), json!({"$ref": "#/$defs/i"}), json!({"$ref": "#/$defs/s"}));
        for held in [
            json!({"anyOf": [object, {"type": "null"}]}),
            json!({"anyOf": [integer, {"type": "null"}]}),
            json!({"anyOf": [object, integer]}),
            json!({"allOf": [object]}),
            json!({"anyOf": [text, {"type": "null"}]}),
            json!({"enum": ["x", null]}),
            json!({"type": ["string", "null"], "enum": ["x", null]}),
            json!({"type": ["string", "null"], "const": "x"}),
        ] {
            assert!(of(held.clone()).is_ok(), "{held}: {:?}", of(held.clone()));
        }
        for refused in [
            json!({"anyOf": [object, text]}),
            json!({"type": ["string", "null"], "const": "null"}),
            json!({"type": ["string", "null"], "enum": ["null", "x"]}),
        ] {
            assert_eq!(
                of(refused.clone()).expect_err("refused").pointer.as_deref(),
                Some("/properties/a"),
                "{refused}"
            );
        }
        // The list does not have null, so the word is no value.
        let listed = of(json!({"type": ["string", "null"], "enum": ["x", "y"]})).expect("held");
        assert!(!listed.contains("null"), "{listed}");
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
