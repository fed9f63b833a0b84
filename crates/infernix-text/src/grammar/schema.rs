//! JSON Schema, checked and rewritten before the grammar's compiler sees it.
//!
//! The result has only keywords that the compiler enforces, references to local definitions alone, and no
//! branch without a finite value. Whatever cannot be enforced is refused with a JSON Pointer, never weakened;
//! annotations and unknown keywords say nothing about values and are left out.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::error::GrammarError;
use super::overlap;
use super::regex::{self, Scope};

/// Deepest nesting of a schema.
const DEPTH: usize = 128;
/// Most subschemas, definitions included.
const NODES: usize = 16_384;
/// Bounds beyond this are not exact in binary64, in which the compiler keeps them.
const EXACT: f64 = 9_007_199_254_740_992.0;
/// Longest length or count in a keyword.
const COUNT: u64 = 1 << 20;
/// The largest number of binary64 with at most 18 digits, which is what answers may write before the point.
const WIDEST: i64 = 999_999_999_999_999_872;
/// Largest `multipleOf`, counted in its last decimal place: the lexer follows one remainder a state, and a search
/// through more of them takes longer than a token.
const STEPS: u64 = 20_000;
/// Most decimals of a bound; answers may write 24.
const DECIMALS: usize = 22;
/// Work of a schema whose patterns, lengths and multiples are intersected: what the lexer's first look at an
/// intersection costs is not bounded by its fuel. A character of a pattern or of a least length is one, some 0.2 ms.
const WORK: u64 = 32_768;
/// Steps of a `multipleOf` that cost as much as one character.
const STEPS_A_CHARACTER: u64 = 10;
/// Most members of an object that may be missing: any of them may come next.
const OPTIONAL: usize = 1024;
/// Most names of a pattern that become members: an answer that has begun with a pattern's last name could only repeat one.
const NAMES: usize = 64;

/// Formats that the compiler knows.
const FORMATS: [&str; 10] =
    ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"];

/// Keywords that restrict values and are not enforced, with what is said about them.
const REFUSED: [(&str, &str); 14] = [
    ("not", "negation is not supported"),
    ("if", "conditions are not supported"),
    ("contains", "contains is not supported"),
    ("uniqueItems", "uniqueItems is not supported"),
    ("propertyNames", "propertyNames is not supported"),
    ("dependentRequired", "dependencies are not supported"),
    ("dependentSchemas", "dependencies are not supported"),
    ("dependencies", "dependencies are not supported"),
    ("unevaluatedProperties", "use additionalProperties instead"),
    ("unevaluatedItems", "use items instead"),
    ("$dynamicRef", "dynamic references are not supported"),
    ("$recursiveRef", "dynamic references are not supported"),
    ("divisibleBy", "use multipleOf"),
    ("disallow", "negation is not supported"),
];

/// A schema ready for the compiler.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    /// The schema, with `$defs`.
    pub(crate) schema: Value,
    /// Every subschema with its place in the source, inner ones first: to find the one that does not compile.
    pub(crate) parts: Vec<(String, Value)>,
    /// The definitions alone.
    pub(crate) defs: Map<String, Value>,
}

/// Checks and rewrites.
///
/// # Errors
/// `invalid_json_schema`, `unsupported_json_schema`, `unsatisfiable_json_schema`.
pub(crate) fn prepare(source: &Value) -> Result<Prepared, GrammarError> {
    let mut walk = Walk {
        root: source,
        names: HashMap::new(),
        defs: Vec::new(),
        parts: Vec::new(),
        nodes: 0,
        work: 0,
        merges: false,
        multiples: Vec::new(),
        patterns: 0,
    };
    let schema = walk.schema(source, "", 0)?;
    // Definitions found on the way are read in turn; each may find more.
    let mut next = 0;
    while next < walk.defs.len() {
        let (pointer, value) = (walk.defs[next].0.clone(), walk.defs[next].1);
        let schema = walk.schema(value, &pointer, 0)?;
        walk.defs[next].2 = schema;
        next += 1;
    }
    walk.check_work()?;
    let defs: Vec<Value> = walk.defs.iter().map(|d| d.2.clone()).collect();
    overlap::check(&schema, &defs)?;
    let finite = Finite::of(&defs);
    if !finite.schema(&schema) {
        return Err(GrammarError::new("unsatisfiable_json_schema", "no finite value fits the schema").at(""));
    }
    let defs: Map<String, Value> =
        defs.iter().enumerate().map(|(i, d)| (def_name(i), finite.prune(d))).collect();
    let parts = walk.parts.into_iter().map(|(p, v)| (p, finite.prune(&v))).collect();
    let mut schema = finite.prune(&schema);
    if let (Value::Object(map), false) = (&mut schema, defs.is_empty()) {
        map.insert("$defs".to_owned(), Value::Object(defs.clone()));
    }
    Ok(Prepared { schema, parts, defs })
}

fn def_name(index: usize) -> String {
    format!("d{index}")
}

fn unsupported(message: impl Into<String>, pointer: String) -> GrammarError {
    GrammarError::new("unsupported_json_schema", message).at(pointer)
}

fn invalid(message: impl Into<String>, pointer: String) -> GrammarError {
    GrammarError::new("invalid_json_schema", message).at(pointer)
}

/// A pointer with one more step.
fn under(pointer: &str, step: &str) -> String {
    format!("{pointer}/{}", step.replace('~', "~0").replace('/', "~1"))
}

struct Walk<'s> {
    root: &'s Value,
    /// Definition by its pointer.
    names: HashMap<String, usize>,
    defs: Vec<(String, &'s Value, Value)>,
    parts: Vec<(String, Value)>,
    nodes: usize,
    /// Of intersections within one subschema.
    work: u64,
    /// Subschemas are intersected with each other.
    merges: bool,
    /// Every `multipleOf`, as digits and the number of its decimals.
    multiples: Vec<(u64, u32)>,
    /// Weight of all patterns.
    patterns: u64,
}

impl<'s> Walk<'s> {
    /// What a subschema adds to the work.
    fn count_work(&mut self, map: &Map<String, Value>) {
        let number = |key: &str| map.get(key).and_then(Value::as_u64);
        let pattern = map.get("pattern").and_then(Value::as_str);
        let weight =
            pattern.and_then(|p| regex::parse(p, Scope::Search).ok()).map_or(0, |rx| rx.weight() as u64);
        self.patterns = self.patterns.saturating_add(weight);
        if weight > 0 && (number("minLength").is_some() || number("maxLength").is_some()) {
            let least = number("minLength").unwrap_or(0);
            self.work = self.work.saturating_add(weight).saturating_add(least);
        }
        if let Some(step) = map.get("multipleOf").and_then(Value::as_f64) {
            let (digits, decimals) = digits(step);
            self.work = self.work.saturating_add(digits.unwrap_or(u64::MAX) / STEPS_A_CHARACTER);
            self.multiples.push((digits.unwrap_or(u64::MAX), decimals));
        }
        let several =
            ["allOf", "anyOf", "oneOf", "$ref"].into_iter().filter(|k| map.contains_key(*k)).count();
        let own =
            ["pattern", "multipleOf", "minLength", "maxLength"].into_iter().any(|k| map.contains_key(k));
        self.merges |= map.contains_key("allOf") || several > 1 || several == 1 && own;
    }

    /// Whether the lexer can be asked to intersect what the schema intersects.
    fn check_work(&mut self) -> Result<(), GrammarError> {
        if self.merges {
            self.work = self.work.saturating_add(self.patterns);
            let most = self.multiples.iter().map(|m| m.1).max().unwrap_or(0);
            let all = self.multiples.iter().try_fold(1_u64, |all, &(digits, decimals)| {
                let digits = digits.checked_mul(10_u64.checked_pow(most - decimals)?)?;
                (all / gcd(all, digits)).checked_mul(digits).filter(|all| *all <= STEPS)
            });
            if self.multiples.len() > 1 && all.is_none() {
                let message = format!(
                    "what multipleOf is intersected to is at most {STEPS} times its last decimal place"
                );
                return Err(unsupported(message, String::new()));
            }
        }
        if self.work > WORK {
            let message = format!(
                "patterns, lengths and multiples that are intersected have a size of {}, at most {WORK} is supported",
                self.work
            );
            return Err(unsupported(message, String::new()));
        }
        Ok(())
    }

    fn schema(&mut self, source: &'s Value, at: &str, depth: usize) -> Result<Value, GrammarError> {
        self.nodes += 1;
        if self.nodes > NODES || depth > DEPTH {
            return Err(unsupported(
                format!("the schema is larger than {NODES} subschemas or deeper than {DEPTH}"),
                at.to_owned(),
            ));
        }
        let map = match source {
            Value::Bool(_) => return Ok(source.clone()),
            Value::Object(map) => map,
            other => {
                return Err(invalid(
                    format!("a schema is an object or a boolean, found {}", kind(other)),
                    at.to_owned(),
                ));
            }
        };
        for (keyword, message) in REFUSED {
            if let Some(value) = map.get(keyword)
                && !says_nothing(keyword, value, map)
            {
                return Err(unsupported(message, under(at, keyword)));
            }
        }
        let mut out = Map::new();
        for (keyword, value) in map {
            let here = under(at, keyword);
            match keyword.as_str() {
                "$ref" => {
                    let name = self.reference(value, &here)?;
                    out.insert(keyword.clone(), json!(format!("#/$defs/{name}")));
                }
                "type" => {
                    check_type(value, &here)?;
                    out.insert(keyword.clone(), value.clone());
                }
                "const" => {
                    check_literal(value, &here)?;
                    out.insert(keyword.clone(), value.clone());
                }
                "enum" => {
                    let list = value.as_array().ok_or_else(|| invalid("enum is a list", here.clone()))?;
                    list.iter().try_for_each(|v| check_literal(v, &here))?;
                    out.insert(keyword.clone(), value.clone());
                }
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                    if let Some(bound) = bound(keyword, value, map, &here)? {
                        out.insert(keyword.clone(), bound);
                    }
                }
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                    // An integer written as 3.0 counts as one.
                    let count = value.as_u64().or_else(|| {
                        value
                            .as_f64()
                            .filter(|x| x.fract() == 0.0 && *x >= 0.0 && *x < EXACT)
                            .map(|x| x as u64)
                    });
                    match count {
                        Some(n) if n <= COUNT => out.insert(keyword.clone(), n.into()),
                        Some(_) => return Err(unsupported(format!("at most {COUNT} is supported"), here)),
                        None => return Err(invalid("expected an integer from 0 up", here)),
                    };
                }
                "pattern" => {
                    let text = value.as_str().ok_or_else(|| invalid("pattern is a string", here.clone()))?;
                    regex::parse(text, Scope::Search).map_err(|e| unsupported(e.message, here))?;
                    out.insert(keyword.clone(), value.clone());
                }
                "format" => {
                    let name = value.as_str().ok_or_else(|| invalid("format is a string", here.clone()))?;
                    if !FORMATS.contains(&name) {
                        let known = FORMATS.join(", ");
                        return Err(unsupported(
                            format!("the format {name:?} is not known; known: {known}"),
                            here,
                        ));
                    }
                    out.insert(keyword.clone(), value.clone());
                }
                "required" => {
                    let names = value.as_array().filter(|list| list.iter().all(Value::is_string));
                    // The form of an early draft: a boolean on the member itself.
                    match (names, value) {
                        (Some(_), _) => out.insert(keyword.clone(), value.clone()),
                        (None, Value::Bool(_)) => None,
                        _ => return Err(invalid("required is a list of names", here)),
                    };
                }
                "properties" | "patternProperties" => {
                    let members = value
                        .as_object()
                        .ok_or_else(|| invalid("expected an object of schemas", here.clone()))?;
                    let mut list = Map::new();
                    for (name, member) in members {
                        if keyword == "patternProperties" {
                            regex::parse(name, Scope::Search)
                                .map_err(|e| unsupported(e.message, under(&here, name)))?;
                        }
                        list.insert(name.clone(), self.schema(member, &under(&here, name), depth + 1)?);
                    }
                    out.insert(keyword.clone(), Value::Object(list));
                }
                "additionalProperties" => {
                    out.insert(keyword.clone(), self.schema(value, &here, depth + 1)?);
                }
                "items" if value.is_array() => {
                    out.insert("prefixItems".to_owned(), self.list(value, &here, depth)?);
                    if let Some(rest) = map.get("additionalItems") {
                        out.insert(
                            "items".to_owned(),
                            self.schema(rest, &under(at, "additionalItems"), depth + 1)?,
                        );
                    }
                }
                "items" => {
                    out.insert(keyword.clone(), self.schema(value, &here, depth + 1)?);
                }
                "prefixItems" | "anyOf" | "oneOf" | "allOf" => {
                    out.insert(keyword.clone(), self.list(value, &here, depth)?);
                }
                _ => {}
            }
        }
        list_names(&mut out, at)?;
        let properties = out.get("properties").and_then(Value::as_object).map_or(0, Map::len);
        let required = out.get("required").and_then(Value::as_array).map_or(0, Vec::len);
        if properties.saturating_sub(required) > OPTIONAL {
            return Err(unsupported(
                format!("more than {OPTIONAL} members may be missing"),
                under(at, "properties"),
            ));
        }
        self.count_work(&out);
        if out.contains_key("multipleOf") {
            // Digits have to end somewhere, and the lexer has to know where, or it runs up to the last one and finds that
            // the number is no multiple.
            for (bound, other, widest) in
                [("minimum", "exclusiveMinimum", -WIDEST), ("maximum", "exclusiveMaximum", WIDEST)]
            {
                if !out.contains_key(other) {
                    out.entry(bound).or_insert_with(|| widest.into());
                }
            }
        }
        let out = Value::Object(out);
        self.parts.push((at.to_owned(), out.clone()));
        Ok(out)
    }

    fn list(&mut self, value: &'s Value, at: &str, depth: usize) -> Result<Value, GrammarError> {
        let list = value.as_array().ok_or_else(|| invalid("expected a list of schemas", at.to_owned()))?;
        let mut out = Vec::with_capacity(list.len());
        for (i, item) in list.iter().enumerate() {
            out.push(self.schema(item, &under(at, &i.to_string()), depth + 1)?);
        }
        Ok(out.into())
    }

    /// The definition that a local reference names.
    fn reference(&mut self, value: &'s Value, at: &str) -> Result<String, GrammarError> {
        let text = value.as_str().ok_or_else(|| invalid("$ref is a string", at.to_owned()))?;
        let Some(pointer) = text.strip_prefix('#').filter(|p| p.is_empty() || p.starts_with('/')) else {
            return Err(unsupported(
                "only references into the schema itself (#/...) are followed",
                at.to_owned(),
            ));
        };
        let pointer = percent_decoded(pointer);
        let target = self
            .root
            .pointer(&pointer)
            .ok_or_else(|| invalid(format!("there is nothing at {text:?}"), at.to_owned()))?;
        let next = self.defs.len();
        let index = *self.names.entry(pointer.clone()).or_insert(next);
        if index == next {
            self.defs.push((pointer, target, Value::Bool(true)));
        }
        Ok(def_name(index))
    }
}

fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8(out).unwrap_or_else(|_| text.to_owned())
}

/// Whether a keyword that is not enforced happens to restrict nothing.
fn says_nothing(keyword: &str, value: &Value, map: &Map<String, Value>) -> bool {
    let empty = value.as_object().is_some_and(Map::is_empty);
    match keyword {
        "uniqueItems" => {
            value == &Value::Bool(false)
                || map.get("maxItems").and_then(Value::as_u64).is_some_and(|n| n <= 1)
        }
        "propertyNames" | "unevaluatedProperties" | "unevaluatedItems" => {
            value == &Value::Bool(true) || empty
        }
        "dependentRequired" | "dependentSchemas" | "dependencies" => empty,
        "if" => !map.contains_key("then") && !map.contains_key("else"),
        "not" => value == &Value::Bool(false),
        "contains" => map.get("minContains") == Some(&json!(0)) && !map.contains_key("maxContains"),
        _ => false,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

fn check_type(value: &Value, at: &str) -> Result<(), GrammarError> {
    let known = |v: &Value| v.as_str().is_some_and(|t| TYPES.contains(&t));
    let fine = match value {
        Value::Array(list) => !list.is_empty() && list.iter().all(known),
        one => known(one),
    };
    if fine {
        Ok(())
    } else {
        Err(invalid(format!("type is one or several of {}", TYPES.join(", ")), at.to_owned()))
    }
}

/// Whether a number is the same in binary64, and its neighbours are others.
fn exact(number: &serde_json::Number) -> bool {
    match (number.as_i64(), number.as_f64()) {
        (Some(n), _) => n.unsigned_abs() <= EXACT as u64,
        (None, Some(x)) => x.abs() <= EXACT,
        (None, None) => false,
    }
}

/// Numbers of constants must be exact in binary64 and short.
fn check_literal(value: &Value, at: &str) -> Result<(), GrammarError> {
    match value {
        Value::Number(n) if !exact(n) => {
            Err(unsupported(format!("the number {n} is not exact in 64-bit floating point"), at.to_owned()))
        }
        Value::Array(list) => list.iter().try_for_each(|v| check_literal(v, at)),
        Value::Object(map) => map.values().try_for_each(|v| check_literal(v, at)),
        _ => Ok(()),
    }
}

/// A number's digits without the point, where they are few, and how many of them stand behind it.
fn digits(x: f64) -> (Option<u64>, u32) {
    // Rust writes the shortest digits that read back as the number, without an exponent.
    let written = format!("{}", x.abs());
    let decimals = written.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    (written.replace('.', "").parse().ok(), decimals as u32)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}

/// A bound in its newer form; the older one has booleans beside `minimum` and `maximum`.
fn bound(
    keyword: &str,
    value: &Value,
    map: &Map<String, Value>,
    at: &str,
) -> Result<Option<Value>, GrammarError> {
    let value = match (keyword, value) {
        ("exclusiveMinimum" | "exclusiveMaximum", Value::Bool(false)) => return Ok(None),
        ("exclusiveMinimum", Value::Bool(true)) => map.get("minimum").unwrap_or(&Value::Null),
        ("exclusiveMaximum", Value::Bool(true)) => map.get("maximum").unwrap_or(&Value::Null),
        (_, value) => value,
    };
    let Value::Number(number) = value else {
        return Err(invalid("expected a number", at.to_owned()));
    };
    if !exact(number) {
        return Err(unsupported("a bound beyond 2^53 is not exact in 64-bit floating point", at.to_owned()));
    }
    let x = number.as_f64().unwrap_or_default();
    let (digits, decimals) = digits(x);
    if keyword == "multipleOf" {
        if x <= 0.0 {
            return Err(invalid("multipleOf is greater than 0", at.to_owned()));
        }
        if digits.is_none_or(|steps| steps > STEPS) {
            return Err(unsupported(
                format!("multipleOf is at most {STEPS} times its last decimal place"),
                at.to_owned(),
            ));
        }
    } else if decimals as usize > DECIMALS {
        return Err(unsupported(format!("a bound has at most {DECIMALS} decimals"), at.to_owned()));
    }
    Ok(Some(value.clone()))
}

/// Which definitions have a finite value: the least solution, so that a cycle of required members has none.
struct Finite {
    defs: Vec<bool>,
}

impl Finite {
    fn of(defs: &[Value]) -> Self {
        let mut finite = Self { defs: vec![false; defs.len()] };
        loop {
            let next: Vec<bool> = defs.iter().map(|d| finite.schema(d)).collect();
            if next == finite.defs {
                return finite;
            }
            finite.defs = next;
        }
    }

    fn schema(&self, schema: &Value) -> bool {
        let Some(map) = schema.as_object() else {
            return schema != &Value::Bool(false);
        };
        if let Some(index) = map.get("$ref").and_then(Value::as_str).and_then(def_index)
            && !self.defs.get(index).copied().unwrap_or(false)
        {
            return false;
        }
        let any = |key: &str| {
            map.get(key).and_then(Value::as_array).is_none_or(|list| list.iter().any(|s| self.schema(s)))
        };
        let all = map.get("allOf").and_then(Value::as_array).is_none_or(|l| l.iter().all(|s| self.schema(s)));
        if !all || !any("anyOf") || !any("oneOf") {
            return false;
        }
        if map.get("enum").and_then(Value::as_array).is_some_and(Vec::is_empty) {
            return false;
        }
        let fits = |kind: &str| match kind {
            "object" => self.object(map),
            "array" => self.array(map),
            _ => true,
        };
        match map.get("type") {
            Some(Value::String(kind)) => fits(kind),
            Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).any(fits),
            _ => true,
        }
    }

    fn object(&self, map: &Map<String, Value>) -> bool {
        let properties = map.get("properties").and_then(Value::as_object);
        let names = map.get("required").and_then(Value::as_array);
        names.into_iter().flatten().filter_map(Value::as_str).all(|name| {
            match properties.and_then(|p| p.get(name)) {
                Some(member) => self.schema(member),
                // Patterns may admit the name, too; the compiler decides about those.
                None if map.contains_key("patternProperties") => true,
                None => map.get("additionalProperties").is_none_or(|s| self.schema(s)),
            }
        })
    }

    fn array(&self, map: &Map<String, Value>) -> bool {
        let least = map.get("minItems").and_then(Value::as_u64).unwrap_or(0) as usize;
        let prefix = map.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        prefix.iter().take(least).all(|s| self.schema(s))
            && (least <= prefix.len() || map.get("items").is_none_or(|s| self.schema(s)))
    }

    /// The schema with every part that has no finite value written as `false`, so that no output can enter it.
    fn prune(&self, schema: &Value) -> Value {
        if !self.schema(schema) {
            return Value::Bool(false);
        }
        let Some(map) = schema.as_object() else {
            return schema.clone();
        };
        let prune_all = |value: &Value| match value {
            Value::Array(list) => Value::Array(list.iter().map(|s| self.prune(s)).collect()),
            Value::Object(members) => {
                Value::Object(members.iter().map(|(k, s)| (k.clone(), self.prune(s))).collect())
            }
            other => other.clone(),
        };
        Value::Object(
            map.iter()
                .map(|(key, value)| {
                    let value = match key.as_str() {
                        "anyOf" | "oneOf" | "allOf" | "prefixItems" | "properties" | "patternProperties" => {
                            prune_all(value)
                        }
                        "items" | "additionalProperties" => self.prune(value),
                        _ => value.clone(),
                    };
                    (key.clone(), value)
                })
                .collect(),
        )
    }
}

/// Makes members of the names of patterns that have few.
fn list_names(map: &mut Map<String, Value>, at: &str) -> Result<(), GrammarError> {
    let patterns = map.get("patternProperties").and_then(Value::as_object);
    let few = |pattern: &String| regex::parse(pattern, Scope::Search).ok()?.texts(NAMES);
    let listed: Vec<(String, Vec<String>)> =
        patterns.into_iter().flat_map(Map::keys).filter_map(|p| Some((p.clone(), few(p)?))).collect();
    let count = |key: &str| map.get(key).and_then(Value::as_u64);
    if listed.is_empty() || count("maxProperties").is_some_and(|most| most <= 1) {
        return Ok(());
    }
    if let Some(key) = ["minProperties", "maxProperties"].into_iter().find(|key| map.contains_key(*key)) {
        return Err(unsupported("counts are not supported beside a pattern of few names", under(at, key)));
    }
    for (pattern, names) in listed {
        let schemas = map.get_mut("patternProperties").and_then(Value::as_object_mut);
        let Some(schema) = schemas.and_then(|p| p.shift_remove(&pattern)) else { continue };
        let members = map.entry("properties").or_insert_with(|| json!({}));
        let Some(members) = members.as_object_mut() else { continue };
        let mut new: Vec<String> = Vec::new();
        for name in names {
            match members.get_mut(&name) {
                None => {
                    members.insert(name.clone(), schema.clone());
                    new.push(name);
                }
                // One that the pattern lists twice is complete.
                Some(_) if new.contains(&name) => {}
                Some(own) => *own = json!({"allOf": [own.take(), schema]}),
            }
        }
    }
    if map.get("patternProperties").and_then(Value::as_object).is_some_and(Map::is_empty) {
        map.shift_remove("patternProperties");
    }
    Ok(())
}

pub(super) fn def_index(reference: &str) -> Option<usize> {
    reference.strip_prefix("#/$defs/d")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(schema: Value) -> (String, &'static str) {
        let error = prepare(&schema).expect_err("is refused");
        (error.pointer.expect("has a pointer"), error.code)
    }

    #[test]
    fn refusals_point_at_the_keyword() {
        for (schema, pointer) in [
            (json!({"properties": {"a/b": {"items": {"not": {}}}}}), "/properties/a~1b/items/not"),
            (json!({"anyOf": [{}, {"format": "mars"}]}), "/anyOf/1/format"),
            (json!({"$ref": "#/$defs/x"}), "/$ref"),
            (json!({"$defs": {"x": {"uniqueItems": true}}, "$ref": "#/$defs/x"}), "/$defs/x/uniqueItems"),
            (json!({"minimum": 9_007_199_254_740_993_u64}), "/minimum"),
            (json!({"enum": [1e300]}), "/enum"),
            (json!({"pattern": "(?!a)"}), "/pattern"),
            (json!({"type": "text"}), "/type"),
            (json!({"items": 3}), "/items"),
        ] {
            assert_eq!(refused(schema.clone()).0, pointer, "{schema}");
        }
        // What is not reached restricts nothing.
        assert!(prepare(&json!({"$defs": {"x": {"not": {}}}, "type": "integer"})).is_ok());
    }

    #[test]
    fn multiples_have_bounds_that_the_lexer_can_see() {
        let schema = json!({"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0});
        let expected = json!({"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0, "maximum": 999_999_999_999_999_872_i64});
        assert_eq!(prepare(&schema).expect("reads").schema, expected);
        assert!(
            prepare(&json!({"multipleOf": 0.01})).is_ok() && prepare(&json!({"multipleOf": 20_000})).is_ok()
        );
        for steps in [json!(20_001), json!(999_983), json!(1234.567)] {
            assert_eq!(refused(json!({"multipleOf": steps})).0, "/multipleOf");
        }
        assert_eq!(refused(json!({"exclusiveMaximum": 1e-30})).0, "/exclusiveMaximum");
    }

    #[test]
    fn what_takes_the_lexer_long_to_intersect_is_refused() {
        let both = |a: Value, b: Value| json!({"allOf": [a, b]});
        let steps = |n: u32| json!({"multipleOf": n});
        assert!(
            prepare(&both(steps(6), steps(4))).is_ok()
                && prepare(&both(json!({"multipleOf": 0.5}), steps(3))).is_ok()
        );
        assert_eq!(refused(both(steps(19_997), steps(19_991))).1, "unsupported_json_schema");
        let referred = json!({"$ref": "#/$defs/a", "multipleOf": 19_997, "$defs": {"a": steps(19_991)}});
        assert_eq!(refused(referred).1, "unsupported_json_schema");
        let long = json!({"pattern": "^(a|b[a-z]{40000})$"});
        assert!(prepare(&long).is_ok(), "nothing is intersected");
        assert_eq!(refused(both(long.clone(), json!({"pattern": "^[a-z]*$"}))).1, "unsupported_json_schema");
        assert_eq!(
            refused(json!({"pattern": "^[a-z]*$", "minLength": 1_000_000})).1,
            "unsupported_json_schema"
        );
        assert!(prepare(&json!({"pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5000})).is_ok());
    }

    #[test]
    fn patterns_of_few_names_become_members() {
        let of = |pattern: &str, more: Value| {
            let mut schema = json!({"type": "object", "patternProperties": {pattern: {"type": "boolean"}}});
            schema.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
            schema
        };
        let got = prepare(&of("^(foo|bar|foo)$", json!({"properties": {"bar": {"const": true}}})))
            .expect("reads")
            .schema;
        assert_eq!(got["properties"]["foo"], json!({"type": "boolean"}));
        assert_eq!(got["properties"]["bar"], json!({"allOf": [{"const": true}, {"type": "boolean"}]}));
        assert!(got.get("patternProperties").is_none());
        let many = prepare(&of("^x_[a-z]{1,3}$", json!({}))).expect("reads").schema;
        assert!(many.get("properties").is_none() && many.get("patternProperties").is_some());
        assert_eq!(refused(of("^[a-c]$", json!({"minProperties": 2}))).0, "/minProperties");
        assert!(prepare(&of("^[a-c]$", json!({"maxProperties": 1}))).is_ok());
    }

    #[test]
    fn objects_of_more_optional_members_than_the_parser_follows_are_refused() {
        let of = |n: usize| json!({"type": "object", "properties": (0..n).map(|i| (i.to_string(), json!(true))).collect::<Map<_, _>>()});
        assert!(prepare(&of(1024)).is_ok());
        assert_eq!(refused(of(1025)).0, "/properties");
    }

    #[test]
    fn cycles_of_required_members_have_no_value() {
        let endless = json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]});
        assert_eq!(refused(endless.clone()), (String::new(), "unsatisfiable_json_schema"));
        // As an optional member such a branch is closed instead.
        let open = json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/e"}}, "$defs": {"e": {
            "type": "array", "minItems": 1, "items": {"$ref": "#/$defs/e"}}}});
        assert_eq!(prepare(&open).expect("fits").schema["properties"]["x"], false);
        let list = json!({"anyOf": [{"type": "null"}, endless]});
        assert_eq!(prepare(&list).expect("fits").schema["anyOf"][1]["properties"]["a"]["$ref"], "#/$defs/d0");
    }

    #[test]
    fn older_drafts_are_rewritten_and_the_rest_is_dropped() {
        let schema = json!({"$schema": "http://json-schema.org/draft-04/schema#", "x-guidance": {"lenient": true},
            "items": [{"type": "integer", "minimum": 1, "exclusiveMinimum": true}], "additionalItems": false,
            "title": "t", "definitions": {"u": {"not": 1}}});
        assert_eq!(
            prepare(&schema).expect("reads").schema,
            json!({"prefixItems": [{"type": "integer", "minimum": 1, "exclusiveMinimum": 1}], "items": false})
        );
        let escaped = json!({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"const": 1}}});
        assert_eq!(prepare(&escaped).expect("reads").schema["$defs"]["d0"], json!({"const": 1}));
    }
}
