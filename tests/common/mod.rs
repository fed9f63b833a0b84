//! What the end-to-end suites share: the program under test, the bundled checkpoint, and broken copies of it.
#![allow(dead_code, reason = "each suite uses a part")]

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(crate) const RECIPE: &str = "qwen3_8_flash_next_nvfp4";
/// Splits the demo into four files.
pub(crate) const SPLIT: [&str; 2] = ["--max-file-bytes", "9000000"];
pub(crate) const SHARD: &str = "model-00001-of-00002.safetensors";
pub(crate) const SECOND: &str = "model-00002-of-00002.safetensors";
pub(crate) const TABLE: &str = "model-fp8-mtp-ple.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The bundled checkpoint.
pub(crate) fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/flash-demo-nvfp4")
}

pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// How a run of the program ended.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        self.ends(0)
    }

    #[track_caller]
    pub(crate) fn ends(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{}\n{}", self.stdout, self.stderr);
        self
    }

    /// One error that holds every word of `words`, said once, with the given exit code.
    #[track_caller]
    pub(crate) fn fails(self, code: i32, words: &[&str]) -> Self {
        let run = self.ends(code);
        let errors: Vec<&str> = run.stderr.lines().filter(|l| l.starts_with("error:")).collect();
        assert_eq!(errors.len(), 1, "one error: {}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{word:?} is missing in: {}", run.stderr);
        }
        assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
        run
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|e| panic!("one JSON document: {e}\n{}", self.stdout))
    }
}

pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_infernix"));
    for name in ["HF_HUB_CACHE", "HF_HOME", "INFERNIX_MODEL"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

pub(crate) fn finish(command: &mut Command) -> Run {
    let output = command.output().expect("the program starts");
    Run {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

pub(crate) fn infernix<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Run {
    finish(program().args(args))
}

/// A server of the demo on a port of its own, ended when dropped.
pub(crate) struct Served {
    child: Child,
    pub(crate) address: String,
    /// What it said before it was ready.
    pub(crate) said: String,
}

impl Served {
    pub(crate) fn new(cache: &Path, args: &[&str]) -> Self {
        let mut child = program()
            .env("INFERNIX_CACHE", cache)
            .env_remove("INFERNIX_API_KEY")
            .args(["--progress", "none", "serve", "--port", "0"])
            .args(args)
            .arg(demo())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped"));
        let mut said = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(lines.read_line(&mut line).expect("readable") > 0, "it ended: {said}");
            if let Some((_, address)) = line.trim().rsplit_once(" at http://") {
                break address.to_owned();
            }
            said += &line;
        };
        // Nobody waits for the rest, but a full pipe would stop the server.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        Self { child, address, said }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("connects");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let status = answer.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status");
        (status, answer.split_once("\r\n\r\n").expect("a body").1.to_owned())
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.send("POST", path, "", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).expect("JSON")
    }

    /// SIGTERM, and how it ends.
    pub(crate) fn terminate(mut self) -> i32 {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").arg(id).status().expect("kill is there").success());
        self.child.wait().expect("ends").code().unwrap_or(-1)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `convert` of `checkpoint` to `output` with the bit-exact recipe.
pub(crate) fn convert(checkpoint: &Path, output: &Path, more: &[&str]) -> Run {
    finish(converter(checkpoint, output, more))
}

pub(crate) fn converter(checkpoint: &Path, output: &Path, more: &[&str]) -> &'static mut Command {
    let mut command = program();
    command.args(["convert", "--recipe", RECIPE]).arg(checkpoint).arg("-o").arg(output).args(more);
    Box::leak(Box::new(command))
}

pub(crate) fn verify(artifact: &Path, more: &[&str]) -> Run {
    finish(program().arg("verify").arg(artifact).args(more))
}

pub(crate) fn verify_words(artifact: &Path) -> Run {
    finish(program().arg("verify").arg(artifact).arg("--checkpoint").arg(demo()).arg("--json"))
}

/// Bytes of every file of a folder, without the report, which holds times.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    names(folder)
        .into_iter()
        .filter(|n| !n.ends_with(".conversion.json") && n != "SHA256SUMS" && folder.join(n).is_file())
        .map(|n| (n.clone(), fs::read(folder.join(n)).expect("readable")))
        .collect()
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The sums of a folder hold by the tool that others use for it.
pub(crate) fn sums_hold(folder: &Path) -> bool {
    let run = Command::new("sha256sum")
        .args(["--check", "--strict", "--quiet", "SHA256SUMS"])
        .current_dir(folder)
        .output();
    run.is_ok_and(|o| o.status.success())
}

/// Inverts the bytes of a range of a file.
pub(crate) fn damage(path: &Path, offset: usize, len: usize) {
    let mut bytes = fs::read(path).expect("readable");
    bytes[offset..offset + len].iter_mut().for_each(|b| *b = !*b);
    fs::write(path, bytes).expect("writable");
}

/// A copy of the bundled checkpoint that can be broken.
pub(crate) struct Copy {
    pub(crate) folder: PathBuf,
}

impl Copy {
    pub(crate) fn new(parent: &Path, name: &str) -> Self {
        let folder = parent.join(name);
        fs::create_dir(&folder).expect("a folder");
        for name in names(&demo()) {
            let (from, to) = (demo().join(&name), folder.join(&name));
            if fs::hard_link(&from, &to).is_err() {
                fs::copy(&from, &to).expect("copied");
            }
        }
        Self { folder }
    }

    /// Replaces a file; never writes through a link into the bundled checkpoint.
    pub(crate) fn put(&self, name: &str, bytes: impl AsRef<[u8]>) {
        self.remove(name);
        fs::write(self.folder.join(name), bytes).expect("written");
    }

    pub(crate) fn remove(&self, name: &str) {
        fs::remove_file(self.folder.join(name)).expect("removed");
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.folder.join(name)).expect("readable")
    }

    /// Changes a JSON file.
    pub(crate) fn json(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&self.bytes(name)).expect("JSON");
        change(&mut value);
        self.put(name, value.to_string());
    }

    pub(crate) fn index(&self, change: impl FnOnce(&mut Map<String, Value>)) {
        self.json(INDEX, |v| change(v["weight_map"].as_object_mut().expect("weight_map")));
    }

    /// Changes a shard's tensors and packs them again without gaps.
    pub(crate) fn shard(&self, name: &str, change: impl FnOnce(&mut Shard)) {
        let mut shard = Shard::read(&self.folder.join(name));
        change(&mut shard);
        self.put(name, shard.write());
    }
}

/// A safetensors file in memory.
pub(crate) struct Shard {
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

impl Shard {
    pub(crate) fn read(path: &Path) -> Self {
        let all = fs::read(path).expect("readable");
        let header = u64::from_le_bytes(all[..8].try_into().expect("eight bytes")) as usize;
        let value: Map<String, Value> = serde_json::from_slice(&all[8..8 + header]).expect("a header");
        let data = &all[8 + header..];
        let tensors = value.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, v)| {
            let at = |i: usize| v["data_offsets"][i].as_u64().expect("an offset") as usize;
            let shape = v["shape"].as_array().expect("a shape").iter().filter_map(Value::as_u64).collect();
            let dtype = v["dtype"].as_str().expect("a dtype").to_owned();
            (name, Tensor { dtype, shape, bytes: data[at(0)..at(1)].to_vec() })
        });
        Self { tensors: tensors.collect() }
    }

    pub(crate) fn write(&self) -> Vec<u8> {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, t) in &self.tensors {
            let offsets = [data.len(), data.len() + t.bytes.len()];
            header
                .insert(name.clone(), json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": offsets }));
            data.extend(&t.bytes);
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat()
    }

    #[track_caller]
    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("{name} is in the shard"))
    }
}

/// Says why a test does nothing.
#[allow(clippy::print_stderr, reason = "says why a test is skipped")]
#[allow(clippy::allow_attributes, reason = "an unused expectation would itself be a warning in some suites")]
pub(crate) fn skipped(missing: &Path) {
    eprintln!("skipped: {} is not here", missing.display());
}

/// A whole streamed answer of three tokens.
pub(crate) const STREAM: &str = concat!(
    "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{\"content\":\" there\"}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":1}}\n\n",
    "data: [DONE]\n\n",
);

/// The same without text.
pub(crate) const EMPTY: &str = concat!(
    "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":0}}\n\n",
    "data: [DONE]\n\n",
);

/// A server of one model that plays a script, on loopback for as long as this process lives.
pub(crate) struct Scripted {
    pub(crate) url: String,
    posts: Arc<AtomicUsize>,
}

impl Scripted {
    /// Answers the n-th POST, counting from 0, with the stream that `answer` gives, or never.
    pub(crate) fn new(answer: impl Fn(usize) -> Option<&'static str> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let posts: Arc<AtomicUsize> = Arc::default();
        let (answer, counted) = (Arc::new(answer), Arc::clone(&posts));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, counted) = (Arc::clone(&answer), Arc::clone(&counted));
                std::thread::spawn(move || drop(play(stream, &*answer, &counted)));
            }
        });
        Self { url, posts }
    }

    /// How many POSTs came.
    pub(crate) fn posts(&self) -> usize {
        self.posts.load(Ordering::SeqCst)
    }
}

fn play(
    mut stream: TcpStream,
    answer: &dyn Fn(usize) -> Option<&'static str>,
    posts: &AtomicUsize,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut head = String::new();
    let mut length = 0;
    while !head.ends_with("\r\n\r\n") {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        if let Some(n) = line.to_lowercase().strip_prefix("content-length:") {
            length = n.trim().parse().unwrap_or(0);
        }
        head += &line;
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let close = "connection: close\r\ncontent-type:";
    if head.starts_with("GET /v1/models") {
        let models = json!({ "data": [{ "id": "scripted", "max_model_len": 4096 }] });
        return write!(stream, "HTTP/1.1 200 OK\r\n{close} application/json\r\n\r\n{models}");
    }
    if !head.starts_with("POST") {
        return write!(stream, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
    }
    match answer(posts.fetch_add(1, Ordering::SeqCst)) {
        Some(text) => write!(stream, "HTTP/1.1 200 OK\r\n{close} text/event-stream\r\n\r\n{text}"),
        None => {
            std::thread::sleep(Duration::from_secs(600));
            Ok(())
        }
    }
}

/// Sends a signal; whether there was anybody to get it.
pub(crate) fn signal(name: &str, to: &str) -> bool {
    let sent = Command::new("kill").args(["-s", name, "--", to]).stderr(Stdio::null()).status();
    sent.expect("kill is there").success()
}
