//! Typed access to a JSON object that remembers the path for error messages.

use crate::ModelError;
use serde_json::{Map, Value};

/// Upper bound of every count in a configuration: larger values cannot be a real model, and products of two of them times a
/// small factor still fit 64 bits.
const MAX_COUNT: u64 = 1 << 28;

pub(crate) struct Object<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Object<'a> {
    pub(crate) fn new(value: &'a Value, path: &str) -> Result<Self, ModelError> {
        match value {
            Value::Object(map) => Ok(Self { map, path: path.to_owned() }),
            other => Err(invalid(path, other, "an object")),
        }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Object<'a>>, ModelError> {
        self.get(key).map(|v| Object::new(v, &self.path(key))).transpose()
    }

    pub(crate) fn count_opt(&self, key: &str) -> Result<Option<u64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if n < MAX_COUNT => Ok(Some(n)),
            _ => Err(invalid(&self.path(key), value, "a non-negative integer below 2^28")),
        }
    }

    /// A count that must be present and positive.
    pub(crate) fn count(&self, key: &str) -> Result<u64, ModelError> {
        match self.count_opt(key)? {
            Some(0) => Err(invalid(&self.path(key), &Value::from(0), "a positive integer")),
            Some(n) => Ok(n),
            None => Err(ModelError::Missing { key: self.path(key) }),
        }
    }

    pub(crate) fn count_or(&self, key: &str, default: u64) -> Result<u64, ModelError> {
        Ok(self.count_opt(key)?.unwrap_or(default))
    }

    /// A finite number. What stands there must be one: null is what NaN becomes in other writers' hands.
    pub(crate) fn float_opt(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.map.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() => Ok(Some(x)),
            _ => Err(invalid(&self.path(key), value, "a finite number")),
        }
    }

    /// Token ids under a key: one, a list, or none; each below `vocab`.
    pub(crate) fn check_tokens(&self, key: &str, vocab: u64) -> Result<(), ModelError> {
        let Some(value) = self.get(key) else { return Ok(()) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        match list.iter().all(|id| id.as_u64().is_some_and(|id| id < vocab)) {
            true => Ok(()),
            false => Err(self.reject(key, &format!("token ids below {vocab}, the size of the vocabulary"))),
        }
    }

    pub(crate) fn bool_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(invalid(&self.path(key), other, "true or false")),
        }
    }

    pub(crate) fn str_opt(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(invalid(&self.path(key), other, "a string")),
        }
    }

    pub(crate) fn array_opt(&self, key: &str) -> Result<Option<&'a [Value]>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(a)) => Ok(Some(a)),
            Some(other) => Err(invalid(&self.path(key), other, "an array")),
        }
    }

    pub(crate) fn reject(&self, key: &str, expected: &str) -> ModelError {
        invalid(&self.path(key), self.get(key).unwrap_or(&Value::Null), expected)
    }
}

pub(crate) fn invalid(key: &str, found: &Value, expected: &str) -> ModelError {
    let mut found = found.to_string();
    if found.len() > 80 {
        let cut = (0..=80).rev().find(|&i| found.is_char_boundary(i)).unwrap_or(0);
        found.truncate(cut);
        found.push_str("...");
    }
    ModelError::Invalid { key: key.to_owned(), found, expected: expected.to_owned() }
}
