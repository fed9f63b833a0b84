//! Reading a JSON object field by field: every error says where and what, and what was not read is known.

use crate::error::{ApiError, quoted};
use serde_json::{Map, Value};

/// An object of the request that is being taken apart.
#[derive(Debug)]
pub(crate) struct Fields {
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// The object at `path`, which is empty for the whole body.
    pub(crate) fn new(path: impl Into<String>, value: Value) -> Result<Self, ApiError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other if path.is_empty() => Err(ApiError::new(
                400,
                "invalid_value",
                format!("the body must be an object, not {}", kind(&other)),
            )),
            other => Err(wrong(&path, "an object", &other)),
        }
    }

    /// The path of a member.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// Takes a member out; null counts as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.shift_remove(name).filter(|v| !v.is_null())
    }

    /// Takes a member that must be there.
    pub(crate) fn need(&mut self, name: &str) -> Result<Value, ApiError> {
        self.take(name)
            .ok_or_else(|| ApiError::at(400, "missing_required_parameter", self.path(name), "is required"))
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.path(name), "a string", &other)),
        }
    }

    pub(crate) fn need_string(&mut self, name: &str) -> Result<String, ApiError> {
        match self.need(name)? {
            Value::String(text) => Ok(text),
            other => Err(wrong(&self.path(name), "a string", &other)),
        }
    }

    pub(crate) fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(b)),
            Some(other) => Err(wrong(&self.path(name), "true or false", &other)),
        }
    }

    /// A whole number of at least 0; `2.0` counts as one.
    pub(crate) fn count(&mut self, name: &str) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let whole = value.as_u64().or_else(|| {
            value.as_f64().filter(|f| f.fract() == 0.0 && (0.0..9e15).contains(f)).map(|f| f as u64)
        });
        match whole.and_then(|n| usize::try_from(n).ok()) {
            Some(n) => Ok(Some(n)),
            None => Err(wrong(&self.path(name), "a whole number of at least 0", &value)),
        }
    }

    pub(crate) fn number(&mut self, name: &str, low: f64, high: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().filter(|f| (low..=high).contains(f)) {
            Some(n) => Ok(Some(n)),
            None => Err(wrong(&self.path(name), &format!("a number from {low} to {high}"), &value)),
        }
    }

    pub(crate) fn integer(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_i64() {
            Some(n) => Ok(Some(n)),
            None => Err(wrong(&self.path(name), "a whole number of 64 bits", &value)),
        }
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong(&self.path(name), "an object", &other)),
        }
    }

    /// A nested object.
    pub(crate) fn fields(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        let path = self.path(name);
        self.take(name).map(|value| Fields::new(path, value)).transpose()
    }

    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(wrong(&self.path(name), "a list", &other)),
        }
    }

    /// A member that is one of several words.
    pub(crate) fn word(
        &mut self,
        name: &str,
        words: &[&'static str],
    ) -> Result<Option<&'static str>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match words.iter().find(|w| value.as_str() == Some(**w)) {
            Some(word) => Ok(Some(word)),
            None => Err(wrong(&self.path(name), &format!("one of {}", words.join(", ")), &value)),
        }
    }

    /// Looks at a member without taking it.
    pub(crate) fn peek(&self, name: &str) -> Option<&Value> {
        self.map.get(name)
    }

    /// Takes members that change nothing.
    pub(crate) fn skip(&mut self, names: &[&str]) {
        for name in names {
            self.map.shift_remove(*name);
        }
    }

    /// Names of what nobody took; null members are as good as absent.
    pub(crate) fn rest(&self) -> Vec<String> {
        self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k.clone()).collect()
    }
}

/// The error for a value of another kind than expected.
pub(crate) fn wrong(path: &str, expected: &str, found: &Value) -> ApiError {
    ApiError::invalid(path, format!("must be {expected}, not {}", quoted(found)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_name_place_and_value() {
        let mut fields =
            Fields::new("a[0]", json!({"n": 2.5, "s": 1, "x": 3, "null": null})).expect("an object");
        assert_eq!(fields.count("n").expect_err("not whole").param.as_deref(), Some("a[0].n"));
        assert!(fields.string("s").expect_err("a number").message.contains("must be a string, not 1"));
        assert_eq!(fields.need("y").expect_err("absent").code, "missing_required_parameter");
        assert_eq!(fields.rest(), ["x"]);
        assert!(Fields::new("", json!([])).is_err());
    }
}
