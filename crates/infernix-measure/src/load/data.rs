//! What is asked of a server: prompts of stated lengths, conversations from a file, or a recorded trace.

use super::rng::Rng;
use crate::client::Endpoint;
use crate::error::{MeasureError, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Words that the tokenizers of the field hold as single tokens after a space.
const WORDS: [&str; 64] = [
    "the", "time", "people", "water", "line", "place", "number", "work", "part", "year", "house", "world",
    "school", "system", "group", "case", "point", "week", "company", "question", "fact", "month", "lot",
    "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "hour",
    "game", "end", "member", "law", "car", "city", "name", "team", "minute", "idea", "body", "back",
    "parent", "face", "others", "level", "office", "door", "health", "person", "art", "war", "history",
    "party", "result", "change", "morning", "reason", "research",
];

/// Where prompts come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Dataset {
    /// Independent prompts of random words.
    Random {
        /// Prompt tokens.
        input: usize,
        /// Tokens to answer.
        output: usize,
        /// Lengths are uniform within this share around both.
        spread: f64,
    },
    /// Prompts that share their beginning within a group.
    SharedPrefix {
        /// Groups.
        groups: usize,
        /// Tokens that a group shares.
        prefix: usize,
        /// Tokens of its own that follow.
        suffix: usize,
        /// Tokens to answer.
        output: usize,
    },
    /// ShareGPT's format: a JSON list of `{conversations: [{from, value}, ...]}`. The first message is the prompt, the
    /// length of the answer to it the length asked for.
    ShareGpt {
        /// The file.
        file: PathBuf,
        /// Tokens to answer instead of the recorded answer's length.
        output: Option<usize>,
    },
    /// One JSON object a line: `timestamp` (milliseconds), `input_length`, `output_length`, and `hash_ids` of its
    /// blocks of 512 tokens where prompts share them (Mooncake's format); or `prompt` and `output_tokens`.
    Trace {
        /// The file.
        file: PathBuf,
    },
}

/// One request to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// The prompt.
    pub prompt: String,
    /// Tokens to answer.
    pub output: usize,
    /// Seconds from the start at which a trace sent it.
    pub at: Option<f64>,
}

/// How many words make a prompt of a stated token count on one server: tokens = overhead + words x per_word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibration {
    /// Tokens of the template around the text.
    pub overhead: f64,
    /// Tokens a word.
    pub per_word: f64,
}

impl Calibration {
    /// From two probe requests of one token each, counted by the server; neither may take longer than `limit`.
    ///
    /// # Errors
    /// A probe that fails, or a server that counts no prompt tokens; an interruption.
    pub fn measure(
        endpoint: &Endpoint,
        path: &str,
        seed: u64,
        limit: Duration,
        interrupted: &AtomicBool,
    ) -> Result<Self> {
        let mut rng = Rng::named(seed, "calibration");
        let mut count = |n: usize| -> Result<f64> {
            let body = body(path, &words(&mut rng, n), 1, &json!({}));
            let x = endpoint.begin(path, body, limit)?.wait(interrupted)?;
            if let Some(f) = x.failure {
                return Err(MeasureError::Server(format!("the probe request failed: {f}")));
            }
            let usage = x.answer.usage.filter(|u| u.prompt > 0);
            let usage =
                usage.ok_or_else(|| MeasureError::Server("the server counts no prompt tokens".into()))?;
            Ok(usage.prompt as f64)
        };
        let (few, many) = (32, 160);
        let (a, b) = (count(few)?, count(many)?);
        let per_word = ((b - a) / (many - few) as f64).max(0.1);
        Ok(Self { overhead: (a - few as f64 * per_word).max(0.0), per_word })
    }

    fn words(self, tokens: usize) -> usize {
        (((tokens as f64 - self.overhead) / self.per_word).round() as usize).max(1)
    }
}

/// A request's body for a chat or a completion route.
pub fn body(path: &str, prompt: &str, output: usize, extra: &Value) -> Value {
    let mut body = if path.ends_with("/chat/completions") {
        json!({ "messages": [{ "role": "user", "content": prompt }], "max_tokens": output })
    } else {
        json!({ "prompt": prompt, "max_tokens": output })
    };
    for (key, value) in extra.as_object().into_iter().flatten() {
        body[key] = value.clone();
    }
    body
}

/// One of the words.
pub(crate) fn word(rng: &mut Rng) -> &'static str {
    WORDS[rng.below(WORDS.len())]
}

fn words(rng: &mut Rng, n: usize) -> String {
    let mut out = String::with_capacity(n * 6);
    for i in 0..n {
        if i > 0 {
            out.push(' ');
        }
        out.push_str(word(rng));
    }
    out
}

impl Dataset {
    /// Whether prompts are made of words, whose number must be fitted to the server's tokenizer.
    pub fn needs_calibration(&self) -> bool {
        !matches!(self, Dataset::ShareGpt { .. })
    }

    /// `n` requests. A trace that has fewer gives those; conversations are taken again from the start, as vLLM does.
    ///
    /// # Errors
    /// A file that cannot be read or is not in its format.
    pub fn items(&self, n: usize, calibration: Calibration, seed: u64) -> Result<Vec<Item>> {
        let mut rng = Rng::named(seed, "dataset");
        match self {
            Dataset::Random { input, output, spread } => Ok((0..n)
                .map(|_| {
                    let mut around = |x: usize| {
                        let x = x as f64;
                        (rng.range(x * (1.0 - spread), x * (1.0 + spread)).round() as usize).max(1)
                    };
                    let (input, output) = (around(*input), around(*output));
                    let prompt = words(&mut rng, calibration.words(input));
                    Item { prompt, output, at: None }
                })
                .collect()),
            Dataset::SharedPrefix { groups, prefix, suffix, output } => {
                let heads: Vec<String> =
                    (0..*groups).map(|_| words(&mut rng, calibration.words(*prefix))).collect();
                let own = (*suffix as f64 / calibration.per_word).round() as usize;
                let item = |i: usize, rng: &mut Rng| Item {
                    prompt: format!("{} {}", heads[i % groups.max(&1)], words(rng, own.max(1))),
                    output: *output,
                    at: None,
                };
                Ok((0..n).map(|i| item(i, &mut rng)).collect())
            }
            Dataset::ShareGpt { file, output } => share_gpt(file, *output, n, &mut rng),
            Dataset::Trace { file } => trace(file, n, calibration, seed),
        }
    }
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).map_err(|source| MeasureError::Io {
        path: file.to_owned(),
        what: "reading the dataset",
        source,
    })
}

fn bad(file: &Path, what: impl Into<String>) -> MeasureError {
    MeasureError::Dataset { path: file.to_owned(), what: what.into() }
}

/// Tokens of a text without a tokenizer: about four bytes each.
fn estimate(text: &str) -> usize {
    text.len().div_ceil(4).max(1)
}

fn share_gpt(file: &Path, output: Option<usize>, n: usize, rng: &mut Rng) -> Result<Vec<Item>> {
    let list: Value = serde_json::from_str(&read(file)?).map_err(|e| bad(file, e.to_string()))?;
    let list = list.as_array().ok_or_else(|| bad(file, "no JSON list of conversations"))?;
    let mut items: Vec<Item> = list
        .iter()
        .filter_map(|c| {
            let turns = c.get("conversations").or_else(|| c.get("conversation"))?.as_array()?;
            let text = |i: usize| turns.get(i)?.get("value")?.as_str().filter(|t| !t.is_empty());
            let (prompt, answer) = (text(0)?, text(1)?);
            let output = output.unwrap_or_else(|| estimate(answer));
            Some(Item { prompt: prompt.to_owned(), output, at: None })
        })
        .collect();
    if items.is_empty() {
        return Err(bad(file, "no conversation of two messages"));
    }
    // Fisher-Yates, so that --num-prompts takes a sample and not the first ones.
    for i in (1..items.len()).rev() {
        items.swap(i, rng.below(i + 1));
    }
    Ok(items.iter().cycle().take(n).cloned().collect())
}

fn trace(file: &Path, n: usize, calibration: Calibration, seed: u64) -> Result<Vec<Item>> {
    let text = read(file)?;
    let mut items = Vec::new();
    let mut start = None;
    let mut last = 0.0;
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()).take(n) {
        let row: Value = serde_json::from_str(line).map_err(|e| bad(file, format!("line {}: {e}", i + 1)))?;
        let number = |k: &str| row.get(k).and_then(Value::as_f64).filter(|v| *v >= 0.0);
        let at = match row.get("timestamp") {
            None => None,
            Some(_) => {
                let wrong = |what: &str| bad(file, format!("line {}: {what}", i + 1));
                let t = number("timestamp").ok_or_else(|| wrong("timestamp is no number of milliseconds"))?;
                let at = (t - *start.get_or_insert(t)) / 1e3;
                if at < last {
                    return Err(wrong("timestamp lies before that of an earlier line"));
                }
                last = at;
                Some(at)
            }
        };
        let missing = |k: &str| bad(file, format!("line {}: no {k}", i + 1));
        let output = number("output_length").or_else(|| number("output_tokens"));
        let output = output.ok_or_else(|| missing("output_length"))? as usize;
        let prompt = match row.get("prompt").and_then(Value::as_str) {
            Some(p) => p.to_owned(),
            None => {
                let input = number("input_length").ok_or_else(|| missing("input_length or prompt"))? as usize;
                if input > 10_000_000 {
                    return Err(bad(file, format!("line {}: a prompt of {input} tokens", i + 1)));
                }
                block_prompt(&row, input, calibration, seed, i)
            }
        };
        items.push(Item { prompt, output: output.max(1), at });
    }
    if items.is_empty() {
        return Err(bad(file, "an empty trace"));
    }
    Ok(items)
}

/// Words in blocks of 512 tokens, each block a function of its hash id, so that equal ids give equal text.
fn block_prompt(row: &Value, input: usize, calibration: Calibration, seed: u64, line: usize) -> String {
    let mut left = calibration.words(input);
    let block = ((512.0 / calibration.per_word).round() as usize).max(1);
    let ids: Vec<u64> = row
        .get("hash_ids")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
        .collect();
    let mut out = String::new();
    let mut k = 0;
    while left > 0 {
        let now = left.min(block);
        let name = ids.get(k).map_or_else(|| format!("line {line} block {k}"), |id| format!("block {id}"));
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(&words(&mut Rng::named(seed, &name), now));
        left -= now;
        k += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Calibration = Calibration { overhead: 10.0, per_word: 1.0 };

    #[test]
    fn random_prompts_have_the_length_asked_for() {
        let d = Dataset::Random { input: 100, output: 20, spread: 0.0 };
        let items = d.items(3, PLAIN, 1).unwrap();
        assert!(items.iter().all(|i| i.prompt.split(' ').count() == 90 && i.output == 20));
        assert_ne!(items[0].prompt, items[1].prompt);
        assert_eq!(items, d.items(3, PLAIN, 1).unwrap());
        let d = Dataset::Random { input: 100, output: 20, spread: 0.5 };
        assert!(d.items(50, PLAIN, 1).unwrap().iter().all(|i| (10..=30).contains(&i.output)));
    }

    #[test]
    fn groups_share_exactly_their_prefix() {
        let d = Dataset::SharedPrefix { groups: 2, prefix: 50, suffix: 10, output: 5 };
        let items = d.items(4, PLAIN, 1).unwrap();
        let head = |i: usize| items[i].prompt.split(' ').take(40).collect::<Vec<_>>();
        assert_eq!(head(0), head(2));
        assert_ne!(head(0), head(1));
        assert_ne!(items[0].prompt, items[2].prompt);
    }

    #[test]
    fn traces_repeat_blocks_of_equal_hash_and_keep_their_times() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("t.jsonl");
        std::fs::write(
            &file,
            "{\"timestamp\":1000,\"input_length\":1034,\"output_length\":7,\"hash_ids\":[4,5,6]}\n\n\
             {\"timestamp\":1500,\"input_length\":1034,\"output_length\":9,\"hash_ids\":[4,5,7]}\n",
        )
        .unwrap();
        let items = Dataset::Trace { file: file.clone() }.items(9, PLAIN, 1).unwrap();
        assert_eq!((items[0].at, items[1].at), (Some(0.0), Some(0.5)));
        let head = |i: usize| items[i].prompt.split(' ').take(1024).collect::<Vec<_>>();
        assert_eq!(head(0), head(1));
        let times = |a: &str, b: &str| {
            format!(
                "{{\"timestamp\":{a},\"prompt\":\"p\",\"output_length\":1}}\n{{\"timestamp\":{b},\"prompt\":\"p\",\"output_length\":1}}"
            )
        };
        let (back, text) = (times("5", "4"), times("\"5\"", "6"));
        for wrong in ["", "{\"timestamp\":1}", "not json", &back, &text] {
            std::fs::write(&file, wrong).unwrap();
            let e = Dataset::Trace { file: file.clone() }.items(9, PLAIN, 1).unwrap_err().to_string();
            assert!(e.contains("t.jsonl: ") && !e.contains("byte"), "{wrong:?}: {e}");
        }
    }

    #[test]
    fn share_gpt_takes_first_messages_and_answer_lengths() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("s.json");
        let text = r#"[{"conversations":[{"from":"human","value":"hi"},{"from":"gpt","value":"12345678"}]},{"x":1}]"#;
        std::fs::write(&file, text).unwrap();
        let items = Dataset::ShareGpt { file: file.clone(), output: None }.items(9, PLAIN, 1).unwrap();
        assert_eq!(
            items,
            vec![Item { prompt: "hi".into(), output: 2, at: None }; 9],
            "asked for nine of one"
        );
        std::fs::write(&file, "{}").unwrap();
        assert!(Dataset::ShareGpt { file, output: None }.items(9, PLAIN, 1).is_err());
    }
}
