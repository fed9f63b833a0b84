//! Responses that can be asked for again and continued. Bounded by number and bytes, the oldest goes first; each is
//! visible to the key that made it only.

use crate::content;
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

/// A kept response.
#[derive(Debug)]
pub(crate) struct Stored {
    /// Whose it is.
    pub(crate) owner: Option<usize>,
    /// The response.
    pub(crate) response: Value,
    /// All items that led to it, those of earlier responses included, so that deleting those harms nothing.
    pub(crate) input: Vec<Value>,
}

impl Stored {
    /// Input and output, the conversation so far. An answer that continued a message is one turn with it.
    pub(crate) fn items(&self) -> Vec<Value> {
        let output = self.response.get("output").and_then(Value::as_array).cloned().unwrap_or_default();
        let mut items = self.input.clone();
        let mut output = output.into_iter().peekable();
        if let (Some(begun), Some(rest)) = (items.last().and_then(answer), output.peek().and_then(answer)) {
            let joined = begun + &rest;
            let at = items.len() - 1;
            items[at]["content"] = json!([{"type": "output_text", "text": joined, "annotations": []}]);
            output.next();
        }
        items.extend(output);
        items
    }
}

/// The text of an item that is a message of the assistant.
fn answer(item: &Value) -> Option<String> {
    let kind = item.get("type").and_then(Value::as_str).unwrap_or("message");
    if kind != "message" || item.get("role")? != "assistant" {
        return None;
    }
    content::text("content", item.get("content").cloned()).ok()?
}

#[derive(Debug, Default)]
struct Inner {
    records: HashMap<String, (Arc<Stored>, usize)>,
    order: VecDeque<String>,
    bytes: usize,
}

/// Kept responses.
#[derive(Debug)]
pub(crate) struct Store {
    inner: Mutex<Inner>,
    max_records: usize,
    max_bytes: usize,
}

impl Store {
    pub(crate) fn new(max_records: usize, max_bytes: usize) -> Self {
        Self { inner: Mutex::default(), max_records, max_bytes }
    }

    /// Whether a response of this size can be kept at all.
    pub(crate) fn insert(&self, id: &str, stored: Stored) -> bool {
        let bytes = stored.response.to_string().len()
            + stored.input.iter().map(|v| v.to_string().len()).sum::<usize>();
        if bytes > self.max_bytes || self.max_records == 0 {
            return false;
        }
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.bytes += bytes;
        inner.records.insert(id.to_owned(), (Arc::new(stored), bytes));
        inner.order.push_back(id.to_owned());
        while inner.records.len() > self.max_records || inner.bytes > self.max_bytes {
            let Some(oldest) = inner.order.pop_front() else { break };
            inner.drop_record(&oldest);
        }
        true
    }

    /// A response of this owner. Reading keeps it longer.
    pub(crate) fn get(&self, id: &str, owner: Option<usize>) -> Option<Arc<Stored>> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let stored = inner.records.get(id).map(|(s, _)| Arc::clone(s)).filter(|s| s.owner == owner)?;
        if let Some(at) = inner.order.iter().position(|o| o == id) {
            inner.order.remove(at);
            inner.order.push_back(id.to_owned());
        }
        Some(stored)
    }

    /// Removes a response of this owner; false if there is none.
    pub(crate) fn remove(&self, id: &str, owner: Option<usize>) -> bool {
        if self.get(id, owner).is_none() {
            return false;
        }
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.order.retain(|o| o != id);
        inner.drop_record(id);
        true
    }

    /// Records and bytes held.
    pub(crate) fn size(&self) -> (usize, usize) {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        (inner.records.len(), inner.bytes)
    }
}

impl Inner {
    fn drop_record(&mut self, id: &str) {
        if let Some((_, bytes)) = self.records.remove(id) {
            self.bytes -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(owner: Option<usize>) -> Stored {
        Stored { owner, response: json!({"output": [1]}), input: vec![json!(0)] }
    }

    #[test]
    fn only_its_own_key_sees_a_response() {
        let store = Store::new(8, 1000);
        assert!(store.insert("a", stored(Some(0))));
        assert!(store.get("a", Some(1)).is_none() && store.get("a", None).is_none());
        assert!(!store.remove("a", Some(1)));
        assert_eq!(store.get("a", Some(0)).expect("own").items(), [json!(0), json!(1)]);
        assert!(store.remove("a", Some(0)) && !store.remove("a", Some(0)));
        assert_eq!(store.size(), (0, 0));
    }

    #[test]
    fn an_answer_that_continued_a_message_is_one_turn_with_it() {
        let part = |text: &str| json!([{"type": "output_text", "text": text, "annotations": []}]);
        let output = json!([
            {"type": "message", "role": "assistant", "content": part(" upon a time")},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ]);
        let items = |begun: Value| {
            let input = vec![json!({"role": "user", "content": "x"}), begun];
            Stored { owner: None, response: json!({"output": output}), input }.items()
        };
        for content in [json!("Once"), part("Once")] {
            let items = items(json!({"role": "assistant", "content": content}));
            assert_eq!((items.len(), &items[1]["content"]), (3, &part("Once upon a time")));
        }
        assert_eq!(items(json!({"role": "user", "content": "y"})).len(), 4);
    }

    #[test]
    fn the_least_recently_used_goes_first_and_the_bounds_hold() {
        let store = Store::new(2, 1000);
        for id in ["a", "b"] {
            assert!(store.insert(id, stored(None)));
        }
        assert!(store.get("a", None).is_some());
        assert!(store.insert("c", stored(None)));
        assert!(store.get("b", None).is_none() && store.get("a", None).is_some());
        assert_eq!(store.size().0, 2);
        assert!(!Store::new(8, 4).insert("x", stored(None)), "too large to keep");
    }
}
