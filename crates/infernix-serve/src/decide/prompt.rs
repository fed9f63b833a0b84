//! The prompts: evidence first, so that all questions share it.

use super::question::{Kind, Question, State};
use crate::error::ApiError;
use infernix_text::{ChatFormat, ChatOptions, Content, Message, Role, Start, Tokenizer};
use serde_json::{Map, Value, json};

/// What every question is told, so that the evidence behind it is shared by all of them.
const TASK: &str = "Apply the criterion to the evidence. Where options are given, answer with the letter of the one that fits \
                    best and nothing else. Where a form is given, answer with JSON of that form and nothing else.";

/// The first `count` labels that are one token each, with their ids: letters, digits, then pairs of letters.
pub(super) fn labels(tokenizer: &Tokenizer, count: usize) -> Option<Vec<(String, u32)>> {
    let letters = || b'A'..=b'Z';
    let single = letters().chain(b'a'..=b'z').chain(b'0'..=b'9').map(|b| char::from(b).to_string());
    let pairs =
        letters().flat_map(|a| letters().map(move |b| [char::from(a), char::from(b)].iter().collect()));
    let mut out: Vec<(String, u32)> = Vec::with_capacity(count);
    for label in single.chain(pairs) {
        if out.len() == count {
            break;
        }
        let ids = tokenizer.encode_text(&label).ok()?;
        if let [id] = ids[..]
            && out.iter().all(|(_, other)| *other != id)
        {
            out.push((label, id));
        }
    }
    (out.len() == count).then_some(out)
}

/// The prompt of a question, up to where the answer begins.
pub(super) fn render(
    format: &ChatFormat,
    state: &State,
    question: &Question,
    letters: &[String],
) -> Result<Vec<u32>, ApiError> {
    let form = match question.kind {
        Kind::Number { digits } => Some(format!(
            "{{\"number\":{:0digits$}}}, a whole number of {digits} digits",
            42 % 10u32.pow(digits as u32)
        )),
        Kind::Scalar { digits } => Some(format!("{{\"value\":-12.5}}, a number of at most {digits} digits")),
        _ => None,
    };
    let mut asked = Map::from_iter([("criterion".to_owned(), question.criterion.clone())]);
    let options = question.kind.options();
    if !options.is_empty() {
        let options: Vec<Value> = options
            .into_iter()
            .zip(letters)
            .map(|(description, letter)| json!({"description": description, "letter": letter}))
            .collect();
        asked.insert("options".to_owned(), options.into());
    }
    if let Some(form) = form {
        asked.insert("form".to_owned(), form.into());
    }
    let asked = Value::Object(asked).to_string();
    let (system, user) = match state {
        State::Value(value) => {
            (format!("{TASK}\n\n{}", json!({"evidence": value})), Message::text(Role::User, asked))
        }
        State::Parts(parts) => {
            let mut parts = parts.clone();
            parts.push(json!({"type": "text", "text": asked}));
            let mut message = Message::text(Role::User, "");
            message.content = Some(Content::Parts(parts));
            (TASK.to_owned(), message)
        }
    };
    let options = ChatOptions { enable_thinking: Some(false), ..ChatOptions::default() };
    let prompt = format.prompt(&[Message::text(Role::System, system), user], &[], &options)?;
    let mut ids = prompt.ids;
    if prompt.start == Start::Reasoning {
        // A template that always opens a reasoning: close it.
        ids.extend(format.tokenizer().encode("\n</think>\n\n")?);
    }
    Ok(ids)
}
