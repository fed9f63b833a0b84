//! What a streamed answer says, and whether its chunks form an answer at all.

use serde_json::Value;

/// A call of a tool, its pieces joined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// As the server names the call.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Arguments, JSON as text.
    pub arguments: String,
}

/// Token counts as the server states them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt: u64,
    /// Tokens answered, reasoning included.
    pub completion: u64,
    /// Prompt tokens that came from a cache, where the server says so. vLLM leaves a count of none out, most leave out what
    /// they do not count: absent means none if another answer of the same server has it.
    pub cached: Option<u64>,
    /// Tokens of reasoning, in the same way.
    pub reasoning: Option<u64>,
}

/// A streamed answer, put together.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The text.
    pub content: String,
    /// Reasoning before it.
    pub reasoning: String,
    /// Tool calls in their order.
    pub tool_calls: Vec<ToolCall>,
    /// `stop`, `length`, `tool_calls`, ...
    pub finish: Option<String>,
    /// Token counts.
    pub usage: Option<Usage>,
    /// The object `timings` of llama.cpp's servers and those that follow it.
    pub timings: Option<Value>,
}

impl Answer {
    /// A count of `timings`.
    pub fn timing(&self, key: &str) -> Option<f64> {
        self.timings.as_ref()?.get(key)?.as_f64()
    }

    /// Tokens accepted from drafts, where the server says so. Servers that count drafts leave this out of an answer without
    /// one: absent means none if another answer of the same server has it.
    pub fn accepted(&self) -> Option<u64> {
        self.timing("draft_n_accepted").map(|n| n as u64)
    }

    /// Tokens drafted, where the server says so.
    pub fn drafted(&self) -> Option<u64> {
        self.timing("draft_n").map(|n| n as u64)
    }

    fn shows_something(&self) -> bool {
        !(self.tool_calls.is_empty() && self.reasoning.trim().is_empty() && self.content.trim().is_empty())
    }

    /// The message that goes back into the conversation. Reasoning is returned under the name that it came with.
    pub fn message(&self) -> Value {
        let mut message = serde_json::json!({ "role": "assistant", "content": self.content });
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.clone().into();
        }
        if !self.tool_calls.is_empty() {
            let call = |c: &ToolCall| {
                let function = serde_json::json!({ "name": c.name, "arguments": c.arguments });
                serde_json::json!({ "id": c.id, "type": "function", "function": function })
            };
            message["tool_calls"] = self.tool_calls.iter().map(call).collect();
        }
        message
    }
}

/// What one chunk brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Text, reasoning or part of a tool call.
    Text,
    /// A role, an end, counts, white space before anything else.
    Nothing,
    /// `[DONE]`.
    End,
}

/// The order of chunks: deltas, one finish reason, counts, `[DONE]`. A stream in another order is a fault of the server
/// that a measurement must not smooth over.
#[derive(Debug, Default)]
pub struct Grammar {
    done: bool,
    id: Option<String>,
}

impl Grammar {
    /// Takes the data of an event into the answer.
    pub(super) fn take(&mut self, data: &str, answer: &mut Answer) -> Result<Piece, String> {
        if data.trim() == "[DONE]" {
            self.done = true;
            return Ok(Piece::End);
        }
        let chunk: Value = serde_json::from_str(data).map_err(|e| format!("a chunk is no JSON: {e}"))?;
        if let Some(error) = chunk.get("error").filter(|e| !e.is_null()) {
            let message =
                error.get("message").and_then(Value::as_str).map_or_else(|| error.to_string(), str::to_owned);
            return Err(format!("the server reports: {message}"));
        }
        if let Some(id) = chunk.get("id").and_then(Value::as_str) {
            match &self.id {
                Some(first) if first != id => {
                    return Err(format!("a chunk of {id} in the stream of {first}"));
                }
                Some(_) => {}
                None => self.id = Some(id.to_owned()),
            }
        }
        if let Some(usage) = chunk.get("usage").filter(|u| u.is_object()) {
            answer.usage = Some(counts(usage)?);
        }
        if let Some(timings) = chunk.get("timings").filter(|t| t.is_object()) {
            answer.timings = Some(timings.clone());
        }
        let Some(choice) = chunk.pointer("/choices/0") else { return Ok(Piece::Nothing) };
        let finished = answer.finish.is_some();
        let mut piece = self.delta(choice, answer)?;
        // Completions carry the text in the choice itself.
        if let Some(text) = choice.get("text").and_then(Value::as_str).filter(|t| !t.is_empty()) {
            answer.content.push_str(text);
            piece = Piece::Text;
        }
        if piece == Piece::Text && finished {
            return Err("text after the finish reason".into());
        }
        if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
            if answer.finish.as_deref().is_some_and(|f| f != reason) {
                return Err("two finish reasons".into());
            }
            answer.finish = Some(reason.to_owned());
        }
        // Some servers send the white space of their template at once, before they have read the prompt.
        Ok(if answer.shows_something() { piece } else { Piece::Nothing })
    }

    fn delta(&self, choice: &Value, answer: &mut Answer) -> Result<Piece, String> {
        let Some(delta) = choice.get("delta") else { return Ok(Piece::Nothing) };
        let text = |key: &str| delta.get(key).and_then(Value::as_str).filter(|t| !t.is_empty());
        let mut piece = Piece::Nothing;
        if let Some(t) = text("content") {
            answer.content.push_str(t);
            piece = Piece::Text;
        }
        if let Some(t) = text("reasoning_content").or_else(|| text("reasoning")) {
            answer.reasoning.push_str(t);
            piece = Piece::Text;
        }
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let index = call.get("index").and_then(Value::as_u64).unwrap_or(0) as usize;
            if index > answer.tool_calls.len() {
                return Err(format!("tool call {index} begins before call {}", answer.tool_calls.len()));
            }
            if index == answer.tool_calls.len() {
                answer.tool_calls.push(ToolCall::default());
            } else if index + 1 < answer.tool_calls.len() {
                return Err(format!("tool call {index} goes on after a later one began"));
            }
            let target = &mut answer.tool_calls[index];
            if let Some(id) = call.get("id").and_then(Value::as_str) {
                id.clone_into(&mut target.id);
            }
            let part = |key: &str| {
                call.pointer(&format!("/function/{key}")).and_then(Value::as_str).unwrap_or_default()
            };
            target.name.push_str(part("name"));
            target.arguments.push_str(part("arguments"));
            piece = Piece::Text;
        }
        Ok(piece)
    }

    /// Whether the stream ended as one must.
    pub(super) fn finish(&self, answer: &Answer) -> Result<(), String> {
        if answer.finish.is_none() {
            return Err("the stream ends without a finish reason".into());
        }
        // Some servers close the stream instead. What comes last otherwise, the counts, shows that nothing is missing.
        if !self.done && answer.usage.is_none() {
            return Err("the stream ends without [DONE]".into());
        }
        if let Some(call) = answer.tool_calls.iter().find(|c| c.name.is_empty()) {
            return Err(format!("tool call {:?} names no tool", call.id));
        }
        Ok(())
    }
}

/// Reads a usage object and refuses counts that contradict each other.
fn counts(usage: &Value) -> Result<Usage, String> {
    let n = |p: &str| usage.pointer(p).and_then(Value::as_u64);
    let u = Usage {
        prompt: n("/prompt_tokens").ok_or("usage without prompt_tokens")?,
        completion: n("/completion_tokens").unwrap_or(0),
        cached: n("/prompt_tokens_details/cached_tokens"),
        reasoning: n("/completion_tokens_details/reasoning_tokens"),
    };
    if let Some(cached) = u.cached.filter(|n| *n > u.prompt) {
        return Err(format!("usage: {cached} cached of {} prompt tokens", u.prompt));
    }
    if let Some(reasoning) = u.reasoning.filter(|n| *n > u.completion) {
        return Err(format!("usage: {reasoning} reasoning of {} completion tokens", u.completion));
    }
    if let Some(total) = n("/total_tokens")
        && total != u.prompt + u.completion
    {
        return Err(format!("usage: total {total} is not {} + {}", u.prompt, u.completion));
    }
    Ok(u)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(chunks: &[&str]) -> Result<Answer, String> {
        let mut grammar = Grammar::default();
        let mut answer = Answer::default();
        for c in chunks {
            if grammar.take(c, &mut answer)? == Piece::End {
                break;
            }
        }
        grammar.finish(&answer)?;
        Ok(answer)
    }

    #[test]
    fn white_space_sent_before_the_prompt_is_read_is_no_first_token() {
        let (mut grammar, mut answer) = (Grammar::default(), Answer::default());
        let mut take = |text: &str| {
            let delta = serde_json::json!({ "choices": [{ "delta": { "reasoning_content": text } }] });
            grammar.take(&delta.to_string(), &mut answer).unwrap()
        };
        assert_eq!([take("\n"), take("I"), take(" ")], [Piece::Nothing, Piece::Text, Piece::Text]);
        assert_eq!(answer.reasoning, "\nI ");
    }

    const STOP: &str = r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#;

    #[test]
    fn deltas_are_joined_into_an_answer() {
        let answer = read(&[
            r#"{"id":"a","choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"id":"a","choices":[{"delta":{"reasoning_content":"hm"}}]}"#,
            r#"{"id":"a","choices":[{"delta":{"content":"He"}}]}"#,
            r#"{"id":"a","choices":[{"delta":{"content":"llo"}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c1","function":{"name":"read","arguments":"{\"a\""}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":8}},"timings":{"draft_n":6,"draft_n_accepted":3}}"#,
            "[DONE]",
        ])
        .unwrap();
        assert_eq!((answer.content.as_str(), answer.reasoning.as_str()), ("Hello", "hm"));
        assert_eq!(answer.tool_calls[0].arguments, "{\"a\":1}");
        assert_eq!(
            answer.usage.unwrap(),
            Usage { prompt: 9, completion: 4, cached: Some(8), reasoning: None }
        );
        assert_eq!((answer.accepted(), answer.drafted()), (Some(3), Some(6)));
        assert_eq!(answer.message()["tool_calls"][0]["function"]["name"], "read");
    }

    #[test]
    fn a_stream_that_closes_after_its_counts_is_whole() {
        let counts = r#"{"choices":[{"delta":{},"finish_reason":"length"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}"#;
        assert_eq!(read(&[counts]).unwrap().usage.unwrap().completion, 1);
    }

    #[test]
    fn streams_that_are_no_answer_are_faults() {
        let text = r#"{"choices":[{"delta":{"content":"x"}}]}"#;
        let cases: [(&str, &[&str]); 8] = [
            ("finish reason", &[text]),
            ("[DONE]", &[text, STOP]),
            ("after the finish", &[STOP, text, "[DONE]"]),
            ("no JSON", &["{", "[DONE]"]),
            ("reports", &[r#"{"error":{"message":"out of pages"}}"#]),
            (
                "cached",
                &[
                    r#"{"choices":[],"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":2}}}"#,
                ],
            ),
            (
                "total",
                &[r#"{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":7}}"#],
            ),
            ("in the stream of", &[r#"{"id":"a","choices":[]}"#, r#"{"id":"b","choices":[]}"#]),
        ];
        for (message, chunks) in cases {
            let error = read(chunks).unwrap_err();
            assert!(error.contains(message), "{message:?} is not in {error:?}");
        }
    }
}
