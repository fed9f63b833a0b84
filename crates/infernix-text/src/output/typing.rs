//! From a parameter's text to a JSON value, as the tool's schema says.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::Diagnostics;
use super::region::needs_its_spelling;
use crate::message::Tool;

/// A call as published.
#[derive(Debug, Clone, PartialEq)]
pub struct ParsedCall {
    /// Function name.
    pub name: String,
    /// Arguments in the order the model gave them.
    pub arguments: Map<String, Value>,
}

impl ParsedCall {
    /// The arguments as JSON text in Python's default spacing, which is how the model writes objects:
    /// clients that replay this text give back the prompt the model has seen.
    #[must_use]
    pub fn arguments_json(&self) -> String {
        crate::pyjson::dumps(&Value::Object(self.arguments.clone()))
    }
}

/// A call as found in the text: values are still text.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct RawCall {
    pub(crate) name: String,
    pub(crate) parameters: Vec<(String, String)>,
}

/// The declared tools, ready for look-ups.
#[derive(Debug, Clone, Default)]
pub struct ToolSet {
    /// Parameter schemas by function; `None` where two tools of one name disagree.
    tools: HashMap<String, Option<Map<String, Value>>>,
    /// Parameters that can be read only as they are declared, of the functions that have any.
    odd: HashMap<String, Arc<[String]>>,
    /// Functions whose arguments are held to their schema.
    strict: HashSet<String>,
}

impl ToolSet {
    /// Collects the tools. Two declarations of one name with different parameters leave its arguments
    /// untyped.
    #[must_use]
    pub fn new<'t>(tools: impl IntoIterator<Item = &'t Tool>) -> Self {
        let mut seen: HashMap<String, Option<Map<String, Value>>> = HashMap::new();
        for tool in tools {
            let properties = tool
                .parameters()
                .and_then(|p| p.get("properties"))
                .and_then(Value::as_object)
                .map(|members| members.iter().map(|(name, s)| (name.clone(), resolved(tool, s))).collect())
                .unwrap_or_default();
            seen.entry(tool.name().to_owned())
                .and_modify(|known| {
                    if known.as_ref() != Some(&properties) {
                        *known = None;
                    }
                })
                .or_insert(Some(properties));
        }
        let odd = seen.iter().filter_map(|(name, properties)| {
            let odd: Vec<String> =
                properties.iter().flat_map(Map::keys).filter(|n| needs_its_spelling(n)).cloned().collect();
            (!odd.is_empty()).then(|| (name.clone(), odd.into()))
        });
        Self { odd: odd.collect(), tools: seen, strict: HashSet::new() }
    }

    /// The same, where the arguments of these functions are held to their schema: the word `null` of a parameter that
    /// is text or null is null there, as the template writes it.
    #[must_use]
    pub fn strict<'n>(mut self, names: impl IntoIterator<Item = &'n String>) -> Self {
        self.strict.extend(names.into_iter().cloned());
        self
    }

    /// Parameters of a function that can be read only as they are declared.
    pub(crate) fn odd_parameters(&self, function: &str) -> Arc<[String]> {
        self.odd.get(function).cloned().unwrap_or_default()
    }

    /// Whether no tool is declared; markup is text then.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    /// Whether a function of this name is declared.
    #[must_use]
    pub fn declares(&self, name: &str) -> bool {
        self.tools.contains_key(name)
    }

    /// Whether the function declares the parameter.
    pub(crate) fn declares_parameter(&self, function: &str, parameter: &str) -> bool {
        matches!(self.tools.get(function), Some(Some(p)) if p.contains_key(parameter))
    }

    /// Whether a parameter's value is its text, whatever that is.
    pub(crate) fn is_text(&self, function: &str, parameter: &str) -> bool {
        self.expected(function, parameter) == Expected::Text && !self.may_be_null(function, parameter)
    }

    /// A parameter's value; `None` where it is left out.
    pub(crate) fn value(
        &self,
        function: &str,
        parameter: &str,
        text: &str,
        diagnostics: &mut Diagnostics,
    ) -> Option<Value> {
        if text == "null" && self.may_be_null(function, parameter) {
            return Some(Value::Null);
        }
        self.expected(function, parameter).read(text, diagnostics)
    }

    fn schema(&self, function: &str, parameter: &str) -> Option<&Value> {
        self.tools.get(function)?.as_ref()?.get(parameter)
    }

    fn expected(&self, function: &str, parameter: &str) -> Expected {
        self.schema(function, parameter).map_or(Expected::Any, Expected::of)
    }

    /// Whether the word null is null.
    fn may_be_null(&self, function: &str, parameter: &str) -> bool {
        self.strict.contains(function) && self.schema(function, parameter).is_some_and(admits_null)
    }

    /// Types the values of a call.
    pub(crate) fn resolve(&self, raw: RawCall, diagnostics: &mut Diagnostics) -> ParsedCall {
        let mut arguments = Map::new();
        for (name, text) in raw.parameters {
            let value = self.value(&raw.name, &name, &text, diagnostics);
            if arguments.contains_key(&name) {
                diagnostics.duplicate_parameters_repaired += 1;
            }
            match value {
                // Inserting keeps the first position and takes the last value.
                Some(value) => {
                    arguments.insert(name, value);
                }
                None => {
                    arguments.shift_remove(&name);
                }
            }
        }
        ParsedCall { name: raw.name, arguments }
    }
}

/// A parameter's schema, behind references into the tool's own.
fn resolved(tool: &Tool, schema: &Value) -> Value {
    let mut current = schema;
    for _ in 0..32 {
        let target = current.get("$ref").and_then(Value::as_str).and_then(|r| r.strip_prefix('#'));
        match target.and_then(|pointer| tool.parameters()?.pointer(pointer)) {
            Some(next) => current = next,
            None => break,
        }
    }
    current.clone()
}

const NULL: u8 = 1;
const BOOLEAN: u8 = 2;
const INTEGER: u8 = 4;
const NUMBER: u8 = 8;
const OBJECT: u8 = 16;
const ARRAY: u8 = 32;
const STRING: u8 = 64;
const PRIMITIVE: u8 = NULL | BOOLEAN | INTEGER | NUMBER | STRING;

fn type_bit(name: &str) -> Option<u8> {
    Some(match name {
        "null" => NULL,
        "boolean" => BOOLEAN,
        "integer" => INTEGER,
        "number" => NUMBER,
        "object" => OBJECT,
        "array" => ARRAY,
        "string" => STRING,
        _ => return None,
    })
}

/// Whether null is one of a schema's values.
fn admits_null(schema: &Value) -> bool {
    let null = Value::from("null");
    match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.contains(&null),
        Some(kind) => *kind == null,
        None if schema.get("enum").and_then(Value::as_array).is_some_and(|l| l.contains(&Value::Null)) => {
            true
        }
        None => ["anyOf", "oneOf"]
            .iter()
            .filter_map(|key| schema.get(*key)?.as_array())
            .flatten()
            .any(admits_null),
    }
}

/// The types of listed values; nothing usable where texts stand among others.
fn listed(schema: &Value) -> Option<u8> {
    let one = schema.get("const").map(std::slice::from_ref);
    let list = one.or_else(|| schema.get("enum")?.as_array().map(Vec::as_slice))?;
    let mask = list.iter().fold(0, |mask, value| mask | bits(value));
    (mask & STRING == 0 || mask == STRING).then_some(mask)
}

/// What a schema admits.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Expected {
    /// Strings among others: the text as it is.
    Text,
    /// These types, none of them string.
    Types(u8),
    /// Nothing usable is said.
    Any,
}

impl Expected {
    fn of(schema: &Value) -> Self {
        let mask = match schema.get("type") {
            Some(Value::String(name)) => type_bit(name),
            Some(Value::Array(names)) => {
                names.iter().map(|n| n.as_str().and_then(type_bit)).try_fold(0, |mask, bit| Some(mask | bit?))
            }
            Some(_) => None,
            None => ["anyOf", "oneOf"]
                .iter()
                .find_map(|key| schema.get(*key)?.as_array())
                .and_then(|variants| {
                    variants
                        .iter()
                        .map(|v| v.get("type")?.as_str().and_then(type_bit))
                        .try_fold(0, |mask, bit| Some(mask | bit?))
                })
                .filter(|mask| mask & !PRIMITIVE == 0)
                .or_else(|| listed(schema)),
        };
        match mask {
            None | Some(0) => Self::Any,
            Some(mask) if mask & STRING != 0 => Self::Text,
            Some(mask) => Self::Types(mask),
        }
    }

    /// The value, `None` where it is to be left out.
    fn read(self, text: &str, diagnostics: &mut Diagnostics) -> Option<Value> {
        let trimmed = text.trim();
        match self {
            Self::Text => Some(Value::String(text.to_owned())),
            Self::Any => Some(exact_json(trimmed).unwrap_or_else(|| text.into())),
            Self::Types(_) if trimmed.is_empty() => {
                diagnostics.empty_arguments_omitted += 1;
                None
            }
            Self::Types(mask) => {
                let value = if trimmed.eq_ignore_ascii_case("true") {
                    Value::Bool(true)
                } else if trimmed.eq_ignore_ascii_case("false") {
                    Value::Bool(false)
                } else {
                    exact_json(trimmed).unwrap_or_else(|| text.into())
                };
                if bits(&value) & mask == 0 {
                    diagnostics.schema_mismatch_arguments += 1;
                }
                Some(value)
            }
        }
    }
}

/// JSON, unless reading it would change a number: an integer beyond 64 bits stays text.
fn exact_json(text: &str) -> Option<Value> {
    let value: Value = serde_json::from_str(text).ok()?;
    let integral = text.bytes().all(|b| b.is_ascii_digit() || b == b'-');
    (!(integral && value.is_f64())).then_some(value)
}

/// Types a value has; an integral number counts as an integer, every integer as a number.
fn bits(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(n) if n.is_f64() => match n.as_f64() {
            Some(x) if x.fract() == 0.0 => INTEGER | NUMBER,
            _ => NUMBER,
        },
        Value::Number(_) => INTEGER | NUMBER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(schema: Value, text: &str) -> (Option<Value>, Diagnostics) {
        let mut d = Diagnostics::default();
        let value = Expected::of(&schema).read(text, &mut d);
        (value, d)
    }

    #[test]
    fn schemas_say_what_a_value_may_be() {
        assert_eq!(Expected::of(&json!({"type": ["string", "null"]})), Expected::Text);
        assert_eq!(
            Expected::of(&json!({"anyOf": [{"type": "string"}, {"type": "integer"}]})),
            Expected::Text
        );
        assert_eq!(
            Expected::of(&json!({"oneOf": [{"type": "null"}, {"type": "integer"}]})),
            Expected::Types(NULL | INTEGER)
        );
        // An object among the variants: text would hide it, so nothing usable is said.
        assert_eq!(Expected::of(&json!({"anyOf": [{"type": "string"}, {"type": "object"}]})), Expected::Any);
        assert_eq!(Expected::of(&json!({"$ref": "#/x"})), Expected::Any);
        assert_eq!(Expected::of(&json!({"enum": ["a", "1"]})), Expected::Text);
        assert_eq!(Expected::of(&json!({"const": null})), Expected::Types(NULL));
        assert_eq!(Expected::of(&json!({"enum": ["a", 1]})), Expected::Any);
        assert_eq!(Expected::of(&json!(true)), Expected::Any);
    }

    #[test]
    fn values_keep_their_type_and_mismatches_are_counted() {
        assert_eq!(read(json!({"type": "integer"}), "3.0").0, Some(json!(3.0)));
        assert_eq!(read(json!({"type": "integer"}), "3.0").1.schema_mismatch_arguments, 0);
        assert_eq!(read(json!({"type": "integer"}), "TRUE").1.schema_mismatch_arguments, 1);
        assert_eq!(read(json!({"type": "boolean"}), " False ").0, Some(json!(false)));
        assert_eq!(read(json!({}), "True").0, Some(json!("True")));
        assert_eq!(read(json!({}), "").0, Some(json!("")));
        assert_eq!(read(json!({"type": "array"}), " ").0, None);
    }

    #[test]
    fn an_integer_beyond_64_bits_is_not_rounded() {
        let big = "123456789012345678901234567890";
        assert_eq!(read(json!({"type": "integer"}), big).0, Some(json!(big)));
    }

    #[test]
    fn a_parameter_is_typed_behind_its_reference() {
        let schema = json!({"properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "string"}}});
        let set = ToolSet::new(&[Tool::function("f", "", schema)]);
        let raw = RawCall { name: "f".into(), parameters: vec![("a".into(), "7".into())] };
        assert_eq!(set.resolve(raw, &mut Diagnostics::default()).arguments["a"], "7");
    }

    #[test]
    fn two_tools_of_one_name_are_untyped() {
        let tool = |t: &str| Tool::function("f", "", json!({"properties": {"a": {"type": t}}}));
        let set = ToolSet::new(&[tool("string"), tool("integer")]);
        let raw = RawCall { name: "f".into(), parameters: vec![("a".into(), "7".into())] };
        let call = set.resolve(raw, &mut Diagnostics::default());
        assert_eq!(call.arguments["a"], 7);
    }
}
