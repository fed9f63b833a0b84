//! A server on a free port over a scripted engine, and a client that speaks plain HTTP.

use crate::options::ServeOptions;
use crate::{App, ModelInfo, admin_router, serve};
use infernix_engine::sched::{
    EngineApi, Event, Finish, Request, Sampled, ScriptedEngine, Status, SubmitError, Timings, Usage,
};
use infernix_text::{ChatFormat, Resources};
use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, LazyLock, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// The bundled model's format, read once.
pub(super) static FORMAT: LazyLock<Arc<ChatFormat>> = LazyLock::new(|| {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
    let resources = Resources::from_folder(&folder).expect("the bundled model");
    Arc::new(ChatFormat::new(&resources).expect("its format"))
});

/// Tokens that prompt and answer may have together.
pub(super) const CONTEXT: usize = 32_768;

/// The events of an answer that says `text`, `chunk` tokens at a time, and ends as given.
pub(super) fn says(request: &Request, text: &str, chunk: usize, reason: Finish) -> Vec<Event> {
    let ids = FORMAT.tokenizer().encode(text).expect("ids");
    answer(request, &ids, chunk, reason)
}

/// The same with ids.
pub(super) fn answer(request: &Request, ids: &[u32], chunk: usize, reason: Finish) -> Vec<Event> {
    let prompt = request.prompt.len();
    let ids = &ids[..ids.len().min(request.max_tokens)];
    let reason = if ids.len() == request.max_tokens { Finish::Length } else { reason };
    let mut events = vec![
        Event::Admitted { queued: Duration::ZERO, cached_tokens: prompt / 2, miss: None },
        Event::PromptProgress { done: prompt, total: prompt },
    ];
    if request.prompt_logprobs.is_some() {
        let one = |(i, id): (usize, &u32)| Sampled {
            id: *id,
            logprob: (i > 0).then_some(-1.0),
            top: vec![(*id, -1.0)],
            watched: Vec::new(),
        };
        events.push(Event::PromptLogprobs(request.prompt.iter().enumerate().map(one).collect()));
    }
    let token = |id: &u32| Sampled {
        id: *id,
        logprob: request.logprobs.map(|_| -0.5),
        top: (0..request.logprobs.unwrap_or(0)).map(|k| (*id + u32::from(k), -0.5 - f32::from(k))).collect(),
        watched: vec![-1.0; request.watch.len()],
    };
    events.extend(ids.chunks(chunk.max(1)).map(|ids| Event::Tokens(ids.iter().map(token).collect())));
    let usage = Usage { prompt, cached: prompt / 2, output: ids.len(), ..Usage::default() };
    events.push(Event::Finished { reason, usage, timings: Timings::default() });
    events
}

/// A running server.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    /// Where it answers to those who run it.
    pub(super) admin: SocketAddr,
    pub(super) app: Arc<App>,
    pub(super) engine: Arc<ScriptedEngine>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    pub(super) fn new(
        options: ServeOptions,
        script: impl Fn(&Request) -> Result<Vec<Event>, SubmitError> + Send + Sync + 'static,
    ) -> Self {
        let engine = ScriptedEngine::new(script);
        let api = Arc::clone(&engine) as Arc<dyn EngineApi>;
        Self::over(options, engine, api)
    }

    /// A server over an engine that may do something else than the scripted one inside it.
    pub(super) fn over(options: ServeOptions, engine: Arc<ScriptedEngine>, api: Arc<dyn EngineApi>) -> Self {
        *engine.status.lock().unwrap_or_else(PoisonError::into_inner) =
            Status { context: CONTEXT, max_lanes: 2, ..Status::default() };
        let info = ModelInfo { id: "demo".into(), ..ModelInfo::default() };
        let app = App::new(api, Arc::clone(&FORMAT), info, options).expect("a server");
        let (stop, stopped) = oneshot::channel::<()>();
        let (bound, address) = std::sync::mpsc::channel();
        let served = Arc::clone(&app);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
                let admin = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
                let address = |l: &tokio::net::TcpListener| l.local_addr().expect("an address");
                bound.send((address(&listener), address(&admin))).expect("a receiver");
                let admin = Some((admin, admin_router(&served, true)));
                let until = async {
                    let _ = stopped.await;
                };
                serve(served, listener, admin, until).await.expect("serves");
            });
        });
        let (address, admin) = address.recv().expect("bound");
        Self { address, admin, app, engine, stop: Some(stop), thread: Some(thread) }
    }

    /// A server that answers everything with one text.
    pub(super) fn saying(text: &'static str) -> Self {
        Self::new(ServeOptions::default(), move |r| Ok(says(r, text, 3, Finish::Stop(0))))
    }

    /// Begins to stop.
    pub(super) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    /// Waits until it has stopped.
    pub(super) fn join(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic");
        }
    }

    pub(super) fn connect(&self) -> TcpStream {
        connect(self.address)
    }

    /// Sends bytes as they are and reads one response.
    pub(super) fn raw(&self, bytes: &[u8]) -> Answer {
        let mut stream = self.connect();
        // A server that refuses may close before everything is sent.
        let _ = stream.write_all(bytes);
        read(&mut stream)
    }

    /// A request with headers of its own.
    pub(super) fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.request_at(self.address, method, path, headers, body)
    }

    /// The same at an address.
    pub(super) fn request_at(
        &self,
        address: SocketAddr,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(n, _)| n.eq_ignore_ascii_case("host")) {
            head += &format!("host: {address}\r\n");
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if method == "POST" || !body.is_empty() {
            head += &format!("content-length: {}\r\n", body.len());
        }
        let mut bytes = format!("{head}\r\n").into_bytes();
        bytes.extend_from_slice(body);
        let mut stream = connect(address);
        // A server that refuses may close before everything is sent.
        let _ = stream.write_all(&bytes);
        read(&mut stream)
    }

    /// POST where those who run the server ask.
    pub(super) fn tell(&self, path: &str) -> Answer {
        self.request_at(self.admin, "POST", path, &[("content-type", "application/json")], b"{}")
    }

    /// POST of a JSON document.
    pub(super) fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes())
    }

    pub(super) fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], b"")
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("connects");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    stream
}

impl Drop for Server {
    fn drop(&mut self) {
        self.join();
    }
}

/// A response.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: String,
}

impl Answer {
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {} {}", self.status, self.body))
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// `code` of an OpenAI error.
    pub(super) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// Reads a response to the end of its connection.
pub(super) fn read(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // A reset after the answer is as good as an end.
    let _ = stream.read_to_end(&mut bytes);
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Answer {
    let split = bytes.windows(4).position(|w| w == b"\r\n\r\n");
    let Some(at) = split else { return Answer { status: 0, headers: Vec::new(), body: String::new() } };
    let head = String::from_utf8_lossy(&bytes[..at]).into_owned();
    let mut lines = head.lines();
    let status = lines.next().and_then(|l| l.split(' ').nth(1)?.parse().ok()).unwrap_or(0);
    let headers: Vec<(String, String)> = lines
        .filter_map(|l| l.split_once(": ").map(|(n, v)| (n.to_ascii_lowercase(), v.to_owned())))
        .collect();
    let chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
    let rest = &bytes[at + 4..];
    let body = if chunked { dechunk(rest) } else { rest.to_vec() };
    Answer { status, headers, body: String::from_utf8(body).expect("UTF-8") }
}

fn dechunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(at) = bytes.windows(2).position(|w| w == b"\r\n") {
        let size = usize::from_str_radix(&String::from_utf8_lossy(&bytes[..at]), 16).unwrap_or(0);
        let start = at + 2;
        if size == 0 || start + size > bytes.len() {
            break;
        }
        out.extend_from_slice(&bytes[start..start + size]);
        bytes = &bytes[(start + size + 2).min(bytes.len())..];
    }
    out
}
