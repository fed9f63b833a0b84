//! Chunks and documents of Completions. Choice number = prompt number x n + sample.

use crate::chat::ChatSend;
use crate::error::{ApiError, Wire};
use crate::piece::{Finish, Observed, Piece, Times, TokenLogprob, TokenUsage, finite};
use crate::reply::{Frames, Reply, Running};
use serde_json::{Map, Value, json};

#[derive(Debug, Default)]
struct Choice {
    text: String,
    logprobs: Logprobs,
    finish: Option<&'static str>,
    constraint: Option<Observed>,
}

/// Log-probabilities in the old form: parallel lists.
#[derive(Debug, Default)]
struct Logprobs {
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<Value>,
    /// Characters before the next token.
    offset: usize,
}

impl Logprobs {
    fn push(&mut self, token: &TokenLogprob, known: bool) {
        let text = shown(&token.bytes);
        self.offsets.push(self.offset.into());
        self.offset += text.chars().count();
        self.tokens.push(text.into());
        if !known {
            self.logprobs.push(Value::Null);
            self.top.push(Value::Null);
            return;
        }
        self.logprobs.push(finite(token.logprob).into());
        let mut top: Map<String, Value> =
            token.top.iter().map(|(bytes, logprob)| (shown(bytes), finite(*logprob).into())).collect();
        // The token itself is always among them, so that programs can look up whether it is the most likely one.
        top.entry(shown(&token.bytes)).or_insert_with(|| finite(token.logprob).into());
        self.top.push(Value::Object(top));
    }

    fn take(&mut self) -> Value {
        json!({
            "tokens": std::mem::take(&mut self.tokens), "token_logprobs": std::mem::take(&mut self.logprobs),
            "top_logprobs": std::mem::take(&mut self.top), "text_offset": std::mem::take(&mut self.offsets),
        })
    }
}

/// A token as text; one that is no whole character is spelled by its bytes, as OpenAI does.
fn shown(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let hex: String = bytes.iter().map(|b| format!("\\x{b:02x}")).collect();
            format!("bytes:{hex}")
        }
    }
}

/// The state machine.
#[derive(Debug)]
pub(crate) struct CompletionsReply {
    id: String,
    created: u64,
    model: String,
    send: ChatSend,
    n: usize,
    with_logprobs: bool,
    choices: Vec<Choice>,
    frames: Frames,
    prompts: Vec<TokenUsage>,
    times: Times,
    failed: Option<ApiError>,
    ended: bool,
}

impl CompletionsReply {
    pub(crate) fn new(
        (id, created, model): (String, u64, String),
        send: ChatSend,
        prompts: usize,
        n: usize,
        with_logprobs: bool,
    ) -> Self {
        Self {
            id,
            created,
            model,
            send,
            n,
            with_logprobs,
            choices: (0..prompts * n).map(|_| Choice::default()).collect(),
            frames: Frames::default(),
            prompts: vec![TokenUsage::default(); prompts],
            times: Times::default(),
            failed: None,
            ended: false,
        }
    }

    /// Begins a choice with its prompt: text, and log-probabilities where they are known.
    pub(crate) fn echo(&mut self, index: usize, text: &str, tokens: &[TokenLogprob]) {
        let Some(choice) = self.choices.get_mut(index) else { return };
        for (i, token) in tokens.iter().enumerate() {
            choice.logprobs.push(token, i > 0);
        }
        self.text(index, text.to_owned());
    }

    fn text(&mut self, index: usize, text: String) {
        if self.send.stream {
            if !text.is_empty() {
                let logprobs =
                    if self.with_logprobs { self.choices[index].logprobs.take() } else { Value::Null };
                self.chunk(
                    json!([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": null}]),
                    Value::Null,
                    None,
                );
            }
        } else {
            self.choices[index].text.push_str(&text);
        }
    }

    fn chunk(&mut self, choices: Value, usage: Value, timings: Option<Value>) {
        let mut chunk = Map::from_iter([
            ("id".to_owned(), self.id.as_str().into()),
            ("object".to_owned(), "text_completion".into()),
            ("created".to_owned(), self.created.into()),
            ("model".to_owned(), self.model.as_str().into()),
            ("choices".to_owned(), choices),
        ]);
        if self.send.usage {
            chunk.insert("usage".to_owned(), usage);
        }
        if let Some(timings) = timings {
            chunk.insert("timings".to_owned(), timings);
        }
        self.frames.data(&Value::Object(chunk));
    }

    fn usage(&self) -> TokenUsage {
        let mut sum = TokenUsage::default();
        self.prompts.iter().for_each(|one| sum.add_prompt(*one));
        sum
    }
}

impl Reply for CompletionsReply {
    fn push(&mut self, index: usize, piece: Piece, _: &Running) {
        if self.ended || self.choices.get(index).is_none_or(|c| c.finish.is_some()) {
            return;
        }
        match piece {
            Piece::Progress(progress) => {
                if self.send.stream && self.send.progress && index == 0 {
                    let mut chunk = json!({
                        "id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
                        "choices": [], "prompt_progress": progress.to_json(),
                    });
                    if self.send.usage {
                        chunk["usage"] = Value::Null;
                    }
                    self.frames.data(&chunk);
                }
            }
            Piece::Content(text, tokens) => {
                for token in &tokens {
                    self.choices[index].logprobs.push(token, true);
                }
                self.text(index, text);
            }
            // A raw prompt has no reasoning and no calls.
            Piece::Reasoning(_)
            | Piece::Call(_)
            | Piece::CallBegin(_)
            | Piece::CallPart(_)
            | Piece::CallEnd(..)
            | Piece::Found(_) => {}
            Piece::End(end) => {
                let finish = match end.finish {
                    Finish::Length | Finish::Context => "length",
                    _ => "stop",
                };
                self.choices[index].finish = Some(finish);
                self.choices[index].constraint = end.constraint;
                self.prompts[index / self.n].add_choice(end.usage);
                self.times.prompt = self.times.prompt.max(end.timings.prompt);
                self.times.decode = self.times.decode.max(end.timings.decode);
                self.times.queued = self.times.queued.max(end.timings.queued);
                let last = self.choices.iter().all(|c| c.finish.is_some());
                self.ended = last;
                if self.send.stream {
                    let timings = (last && !self.send.usage).then(|| self.times.to_json(self.usage()));
                    let logprobs =
                        if self.with_logprobs { self.choices[index].logprobs.take() } else { Value::Null };
                    let mut choice =
                        json!({"index": index, "text": "", "logprobs": logprobs, "finish_reason": finish});
                    if let Some(observed) = end.constraint {
                        choice["constraint"] = observed.to_json();
                    }
                    self.chunk(json!([choice]), Value::Null, timings);
                    if last {
                        if self.send.usage {
                            let usage = self.usage();
                            self.chunk(json!([]), usage.to_openai(), Some(self.times.to_json(usage)));
                        }
                        self.frames.done();
                    }
                }
            }
            Piece::Failed(error) => {
                if self.send.stream {
                    self.frames.error(&error, Wire::OpenAi, "");
                }
                self.failed = Some(error);
                self.ended = true;
            }
        }
    }

    fn take(&mut self) -> String {
        self.frames.take()
    }

    fn ended(&self) -> bool {
        self.ended
    }

    fn document(&mut self) -> Result<Value, ApiError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let usage = self.usage();
        let mut choices = Vec::with_capacity(self.choices.len());
        for (index, mut choice) in self.choices.drain(..).enumerate() {
            let logprobs = if self.with_logprobs { choice.logprobs.take() } else { Value::Null };
            let mut value = json!({
                "index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish,
            });
            if let Some(observed) = choice.constraint {
                value["constraint"] = observed.to_json();
            }
            choices.push(value);
        }
        Ok(json!({
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": usage.to_openai(), "timings": self.times.to_json(usage),
        }))
    }
}
