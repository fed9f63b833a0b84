//! The request log: one JSON object a line, never a prompt, an answer or a key, nor any other words of a client's but plain
//! names of fields.
//!
//! Kinds: `server_start`, `request_start`, then exactly one of `request_done` and `request_error` for each started
//! request, `request_rejected` for what never started, `server_stop`. The file is readable by its owner only. When it
//! grows beyond its limit it becomes FILE.1, FILE.1 becomes FILE.2 and so on; each new file begins with `server_start`.

use serde_json::{Map, Value};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Settings of the request log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// File to append to (`--request-log-jsonl`); none where absent.
    pub file: Option<PathBuf>,
    /// Bytes after which it is rotated (`--request-log-max-mib`).
    pub max_bytes: Option<u64>,
    /// Rotated files kept (`--request-log-keep`).
    pub keep: usize,
}

/// An open log.
#[derive(Debug)]
pub(crate) struct RequestLog {
    options: LogOptions,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    file: Option<File>,
    bytes: u64,
    start: Vec<u8>,
    failed: bool,
}

impl RequestLog {
    /// Opens the file. `start` describes the server.
    pub(crate) fn open(mut options: LogOptions, start: Map<String, Value>) -> io::Result<Self> {
        let start = line("server_start", start);
        let mut inner = Inner { start, ..Inner::default() };
        if let Some(path) = &options.file {
            let (file, bytes) = append(path)?;
            if file.metadata()?.is_file() {
                // Behind a link, the file is what is renamed.
                options.file = Some(infernix_engine::files::place(path)?);
            } else {
                // A terminal, a pipe or a device has no older files.
                options.max_bytes = None;
            }
            inner.file = Some(file);
            inner.bytes = bytes;
        }
        let log = Self { options, inner: Mutex::new(inner) };
        let mut inner = log.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let start = inner.start.clone();
        log.append(&mut inner, &start);
        drop(inner);
        Ok(log)
    }

    /// Writes one line. A full disk costs log lines, never requests.
    pub(crate) fn write(&self, kind: &str, fields: Map<String, Value>) {
        if self.options.file.is_none() {
            return;
        }
        let line = line(kind, fields);
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if self.options.max_bytes.is_some_and(|max| inner.bytes + line.len() as u64 > max) {
            self.rotate(&mut inner);
        }
        self.append(&mut inner, &line);
    }

    /// Whether a line could not be written.
    pub(crate) fn failed(&self) -> bool {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).failed
    }

    fn append(&self, inner: &mut Inner, line: &[u8]) {
        let Some(file) = &mut inner.file else { return };
        match file.write_all(line) {
            Ok(()) => inner.bytes += line.len() as u64,
            Err(_) => inner.failed = true,
        }
    }

    fn rotate(&self, inner: &mut Inner) {
        let Some(path) = &self.options.file else { return };
        inner.file = None;
        let name = |i: usize| {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{i}"));
            PathBuf::from(name)
        };
        let moved = if self.options.keep == 0 {
            std::fs::remove_file(path)
        } else {
            for i in (1..self.options.keep).rev() {
                // Fails where there is no such file yet, which is fine.
                let _ = std::fs::rename(name(i), name(i + 1));
            }
            std::fs::rename(path, name(1))
        };
        match moved.and_then(|()| append(path)) {
            Ok((file, bytes)) => {
                inner.file = Some(file);
                inner.bytes = bytes;
                let start = inner.start.clone();
                self.append(inner, &start);
            }
            Err(_) => inner.failed = true,
        }
    }
}

/// Names that a place of a request is told by: those of the protocols' own fields.
const FIELDS: &[&str] = &[
    "allowed_tools",
    "arguments",
    "background",
    "best_of",
    "budget_tokens",
    "cache_control",
    "cache_prompt",
    "cache_salt",
    "call_id",
    "chat_template_kwargs",
    "choice",
    "content",
    "custom",
    "defer_loading",
    "definition",
    "description",
    "detail",
    "disable_parallel_tool_use",
    "display",
    "digits",
    "echo",
    "effort",
    "enable_thinking",
    "encrypted_content",
    "execution",
    "format",
    "frequency_penalty",
    "function",
    "function_call",
    "functions",
    "generate_summary",
    "grammar",
    "id",
    "ignore_eos",
    "include",
    "include_usage",
    "input",
    "input_schema",
    "instructions",
    "is_error",
    "json",
    "json_schema",
    "levels",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "min_p",
    "modalities",
    "mode",
    "model",
    "n",
    "name",
    "namespace",
    "options",
    "output",
    "output_config",
    "output_format",
    "parallel_tool_calls",
    "parameters",
    "presence_penalty",
    "preserve_thinking",
    "previous_response",
    "previous_response_id",
    "prompt",
    "prompt_cache_key",
    "question",
    "questions",
    "reasoning",
    "reasoning_content",
    "reasoning_effort",
    "refusal",
    "regex",
    "repetition_penalty",
    "response_format",
    "return_progress",
    "return_token_strs",
    "role",
    "schema",
    "seed",
    "state",
    "stop",
    "stop_sequences",
    "store",
    "stream",
    "stream_options",
    "strict",
    "structured_outputs",
    "suffix",
    "summary",
    "syntax",
    "system",
    "temperature",
    "text",
    "thinking",
    "thinking_budget",
    "thread",
    "timings_per_token",
    "tokens",
    "tool_call_id",
    "tool_calls",
    "tool_choice",
    "tool_constraints",
    "tool_name",
    "tool_use_id",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
    "truncation",
    "ttl",
    "type",
    "user_id",
];
/// Steps of a place, and names of ignored fields, that a line may have.
const MAX_NAMES: usize = 16;
/// Bytes of such a name.
const MAX_NAME: usize = 48;

/// A place of a request, `messages[2].content`, with `*` for what only the client has a name for: a question's id, a token
/// of `logit_bias`, an unknown field.
pub(crate) fn place(param: &str) -> String {
    let mut steps: Vec<&str> = Vec::new();
    for step in param.split(['.', '/']) {
        let (name, index) = step.split_at(step.find('[').unwrap_or(step.len()));
        let known = FIELDS.contains(&name) && index.bytes().all(|b| b.is_ascii_digit() || b"[]".contains(&b));
        if known && step.len() <= MAX_NAME {
            steps.push(step);
        } else if steps.last() != Some(&"*") {
            steps.push("*");
        }
        if steps.len() == MAX_NAMES {
            break;
        }
    }
    steps.join(".")
}

/// Names of ignored fields: those that are plain words, and how many others there are.
pub(crate) fn ignored(names: &[String]) -> Vec<(String, Value)> {
    let plain = |name: &&String| {
        let letters = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.');
        (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(letters)
    };
    let shown: Vec<&String> = names.iter().filter(plain).take(MAX_NAMES).collect();
    let others = names.len() - shown.len();
    let mut fields = vec![("ignored".to_owned(), serde_json::json!(shown))];
    if others > 0 {
        fields.push(("ignored_others".to_owned(), others.into()));
    }
    fields
}

fn append(path: &Path) -> io::Result<(File, u64)> {
    let mut options = OpenOptions::new();
    options.append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = infernix_engine::files::open_to_write(&mut options, path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

fn line(kind: &str, fields: Map<String, Value>) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut map = Map::from_iter([
        ("time".to_owned(), Value::from((now.as_secs_f64() * 1e3).round() / 1e3)),
        ("event".to_owned(), kind.into()),
    ]);
    map.extend(fields);
    let mut line = Value::Object(map).to_string().into_bytes();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(n: usize) -> Map<String, Value> {
        Map::from_iter([("n".to_owned(), json!(n))])
    }

    #[test]
    fn places_and_names_tell_no_words_of_a_client() {
        for (param, told) in [
            ("messages[12].content[0].type", "messages[12].content[0].type"),
            ("logit_bias.Patient John Doe", "logit_bias.*"),
            ("questions.Does Mr. Smith have HIV?.type", "questions.*.type"),
            ("My PIN is 4711", "*"),
            ("tools[0]/parameters/properties/SECRET", "tools[0].parameters.*"),
            ("metadata.[x]", "metadata.*"),
        ] {
            assert_eq!(place(param), told);
        }
        assert!(place(&"type.".repeat(1 << 20)).len() < 100);
        let long = "x".repeat(3 << 20);
        let names = ["colour", "tools.web_search", "PIN 4711", long.as_str()].map(str::to_owned);
        assert_eq!(
            Value::Object(ignored(&names).into_iter().collect()),
            json!({"ignored": ["colour", "tools.web_search"], "ignored_others": 2})
        );
        let many: Vec<String> = (0..100_000).map(|i| format!("f{i}")).collect();
        assert!(Value::Object(ignored(&many).into_iter().collect()).to_string().len() < 300);
    }

    #[test]
    fn rotation_keeps_the_newest_and_each_file_begins_with_the_server() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.jsonl");
        let options = LogOptions { file: Some(path.clone()), max_bytes: Some(200), keep: 2 };
        let log = RequestLog::open(options, fields(0)).expect("opens");
        for n in 1..20 {
            log.write("request_done", fields(n));
        }
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a file");
        for name in ["log.jsonl", "log.jsonl.1", "log.jsonl.2"] {
            let text = read(name);
            assert!(
                text.len() <= 200 && text.lines().next().expect("a line").contains("server_start"),
                "{name}"
            );
            assert!(text.lines().all(|l| serde_json::from_str::<Value>(l).is_ok()));
        }
        assert!(read("log.jsonl").contains("\"n\":19"));
        assert!(!folder.path().join("log.jsonl.3").exists());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            assert_eq!(std::fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        }
    }

    #[cfg(unix)]
    #[test]
    fn rotation_leaves_links_and_devices_in_their_places() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("disk")).expect("a folder");
        for (link, target) in [("log", "disk/real"), ("null", "/dev/null")] {
            std::os::unix::fs::symlink(target, at(link)).expect("a link");
            for keep in [2, 0] {
                let log = LogOptions { file: Some(at(link)), max_bytes: Some(200), keep };
                let log = RequestLog::open(log, fields(0)).expect("opens");
                (1..20).for_each(|n| log.write("request_done", fields(n)));
                assert!(!log.failed());
            }
            assert_eq!(std::fs::read_link(at(link)).expect("still a link"), Path::new(target));
        }
        assert!(at("disk/real").is_file() && at("disk/real.1").is_file());
        assert!(!at("null.1").exists() && !Path::new("/dev/null").metadata().expect("there").is_file());
        assert!(!at("log.1").exists());
    }
}
