//! How large the intersections in a schema are: the compiler multiplies alternatives out, and a lexer that follows several patterns
//! at once has up to as many states as the product of theirs.

use serde_json::{Map, Value};

use super::error::GrammarError;
use super::regex::{self, Scope};

/// Most alternatives of an intersection (some 3 ms each on a desktop core).
const WAYS: f64 = 1024.0;
/// Most states of patterns that are intersected, as a power of two.
const BITS: f64 = 14.0;

/// Of the values themselves, or of what lies inside of them.
#[derive(Clone, Copy)]
struct Size {
    patterns: u32,
    bits: f64,
    ways: f64,
}

const ONE: Size = Size { patterns: 0, bits: 0.0, ways: 1.0 };

impl Size {
    fn and(self, other: Self) -> Self {
        Self {
            patterns: self.patterns.saturating_add(other.patterns),
            bits: self.bits + other.bits,
            ways: self.ways * other.ways,
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            patterns: self.patterns.max(other.patterns),
            bits: self.bits.max(other.bits),
            ways: self.ways.max(other.ways),
        }
    }

    fn or(self, other: Self) -> Self {
        Self { ways: self.ways + other.ways, ..self.max(other) }
    }
}

/// Refuses a prepared schema whose intersections are too large to compile in seconds.
///
/// # Errors
/// `unsupported_json_schema`, of the whole schema: an intersection has no place of its own.
pub(super) fn check(schema: &Value, defs: &[Value]) -> Result<(), GrammarError> {
    Sizes { defs, known: vec![None; defs.len()] }.of(schema).map(drop)
}

struct Sizes<'s> {
    defs: &'s [Value],
    /// A definition inside of itself counts as one value: the compiler does not follow it again.
    known: Vec<Option<(Size, Size)>>,
}

impl Sizes<'_> {
    /// Of the values, and of what lies inside of them.
    fn of(&mut self, schema: &Value) -> Result<(Size, Size), GrammarError> {
        let Some(map) = schema.as_object() else { return Ok((ONE, ONE)) };
        let members =
            ["properties", "patternProperties"].into_iter().filter_map(|key| map.get(key)?.as_object());
        let items = map.get("prefixItems").and_then(Value::as_array).into_iter().flatten();
        let others = ["items", "additionalProperties"].into_iter().filter_map(|key| map.get(key));
        let mut inside = ONE;
        for part in members.flat_map(Map::values).chain(items).chain(others) {
            let (own, inner) = self.of(part)?;
            inside = inside.max(own).max(inner);
        }
        // What is intersected with what.
        let mut parts = vec![(pattern(map), inside)];
        for branch in map.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            parts.push(self.of(branch)?);
        }
        for key in ["anyOf", "oneOf"] {
            let mut either: Option<(Size, Size)> = None;
            for branch in map.get(key).and_then(Value::as_array).into_iter().flatten() {
                let (own, inner) = self.of(branch)?;
                either = Some(either.map_or((own, inner), |(a, b)| (a.or(own), b.max(inner))));
            }
            parts.extend(either);
        }
        if let Some(index) = map.get("$ref").and_then(Value::as_str).and_then(super::schema::def_index) {
            parts.push(self.definition(index)?);
        }
        let whole = parts.iter().fold((ONE, ONE), |sum, part| (sum.0.and(part.0), sum.1.and(part.1)));
        if parts.len() > 2 || parts[0].0.patterns > 0 {
            for size in [whole.0, whole.1] {
                if size.ways > WAYS {
                    return Err(refuse(format!(
                        "schemas that are intersected have {} alternatives together, at most {WAYS} are supported",
                        size.ways
                    )));
                }
                if size.patterns > 1 && size.bits > BITS {
                    return Err(refuse(format!(
                        "the {} patterns that are intersected are too large together",
                        size.patterns
                    )));
                }
            }
        }
        Ok(whole)
    }

    fn definition(&mut self, index: usize) -> Result<(Size, Size), GrammarError> {
        let Some(schema) = self.defs.get(index) else { return Ok((ONE, ONE)) };
        if let Some(size) = self.known[index] {
            return Ok(size);
        }
        self.known[index] = Some((ONE, ONE));
        let size = self.of(schema)?;
        self.known[index] = Some(size);
        Ok(size)
    }
}

fn pattern(map: &Map<String, Value>) -> Size {
    let rx = map.get("pattern").and_then(Value::as_str).and_then(|p| regex::parse(p, Scope::Search).ok());
    rx.map_or(ONE, |rx| Size { patterns: 1, bits: ((rx.weight() + 1) as f64).log2(), ways: 1.0 })
}

fn refuse(message: String) -> GrammarError {
    GrammarError::new("unsupported_json_schema", message).at("")
}

#[cfg(test)]
mod tests {
    use super::super::schema::prepare;
    use serde_json::{Value, json};

    fn fits(schema: &Value) -> bool {
        prepare(schema).is_ok()
    }

    #[test]
    fn patterns_and_alternatives_that_multiply_are_refused_before_they_are_compiled() {
        let contains = |n: u8| -> Vec<Value> {
            (0..n)
                .map(|i| json!({"type": "string", "pattern": format!(".*{}.*", (b'a' + i) as char)}))
                .collect()
        };
        assert!(fits(&json!({"allOf": contains(3)})));
        for n in [14, 26] {
            assert!(!fits(&json!({"allOf": contains(n)})));
            assert!(!fits(&json!({"type": "array", "items": {"allOf": contains(n)}})));
        }
        // One of the members each, or one of the alternatives, is no intersection.
        let members: serde_json::Map<_, _> =
            contains(26).into_iter().enumerate().map(|(i, s)| (i.to_string(), s)).collect();
        assert!(fits(&json!({"allOf": [{"properties": members}, {"required": ["1"]}]})));
        assert!(fits(&json!({"anyOf": contains(26)})));
        let either = |k: usize| json!({"anyOf": (0..4).map(|i| json!({"properties": {format!("{k}{i}"): {}}})).collect::<Vec<_>>()});
        assert!(fits(&json!({"allOf": (0..4).map(either).collect::<Vec<_>>()})));
        assert!(!fits(&json!({"allOf": (0..6).map(either).collect::<Vec<_>>()})));
        // References are followed, and once.
        let defs = json!({"p": {"allOf": contains(3)}, "l": {"properties": {"next": {"$ref": "#/$defs/l"}}}});
        assert!(fits(&json!({"$ref": "#/$defs/l", "$defs": defs})));
        assert!(!fits(&json!({"allOf": [{"$ref": "#/$defs/p"}, {"pattern": "^[x-z]{99}$"}], "$defs": defs})));
    }
}
