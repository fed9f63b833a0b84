//! A proxy on loopback that passes an agent's requests on to one upstream and notes what it asks.

use super::record::Recorded;
use crate::error::{MeasureError, Result};
use crate::redact;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use http_body::Frame;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Largest request passed on.
const MAX_REQUEST: usize = 256 << 20;
/// Headers of a request that go to the upstream. Credentials go there and nowhere else; none is recorded.
const FORWARDED: [header::HeaderName; 4] =
    [header::ACCEPT, header::AUTHORIZATION, header::CONTENT_TYPE, header::USER_AGENT];

struct Proxy {
    upstream: String,
    agent: ureq::Agent,
    start: Instant,
    recorded: Mutex<Vec<Recorded>>,
    noted: Box<dyn Fn(&str) + Send + Sync>,
}

/// A recorder that has its port.
pub struct Recorder {
    listener: std::net::TcpListener,
    address: SocketAddr,
    upstream: String,
}

impl Recorder {
    /// Takes a port of this machine for one upstream.
    ///
    /// # Errors
    /// An address that is not of loopback; an upstream that is no address; a port that is taken.
    pub fn bind(upstream: &str, listen: SocketAddr) -> Result<Self> {
        if !listen.ip().is_loopback() {
            return Err(MeasureError::Options(format!(
                "{listen} is not a loopback address; recordings stay on this machine"
            )));
        }
        if !upstream.starts_with("http://") && !upstream.starts_with("https://") {
            let shown = redact::address(upstream);
            return Err(MeasureError::Options(format!("{shown:?} is no http:// or https:// address")));
        }
        let base = upstream.trim_end_matches('/');
        let fail = |e: std::io::Error| MeasureError::Server(format!("{listen}: {e}"));
        let listener = std::net::TcpListener::bind(listen).map_err(fail)?;
        listener.set_nonblocking(true).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        Ok(Self { listener, address, upstream: base.strip_suffix("/v1").unwrap_or(base).to_owned() })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `interrupted` is set; then gives what passed, in the order of sending. `noted` hears of each request.
    ///
    /// # Errors
    /// A runtime that does not start, a port that breaks.
    pub fn run(
        self,
        interrupted: &AtomicBool,
        noted: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Vec<Recorded>> {
        let proxy = Arc::new(Proxy {
            upstream: self.upstream,
            agent: ureq::Agent::config_builder().http_status_as_error(false).max_redirects(0).build().into(),
            start: Instant::now(),
            recorded: Mutex::default(),
            noted: Box::new(noted),
        });
        let fail = |e: std::io::Error| MeasureError::Server(format!("{}: {e}", self.address));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(fail)?;
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(self.listener).map_err(fail)?;
            let app = axum::Router::new().fallback(pass).with_state(Arc::clone(&proxy));
            let app = app.layer(axum::extract::DefaultBodyLimit::max(MAX_REQUEST));
            tokio::select! {
                served = async { axum::serve(listener, app).await } => served.map_err(fail),
                () = stopped(interrupted) => Ok(()),
            }
        })?;
        runtime.shutdown_timeout(Duration::from_secs(1));
        let mut recorded =
            std::mem::take(&mut *proxy.recorded.lock().unwrap_or_else(PoisonError::into_inner));
        recorded.sort_by(|a, b| a.sent.total_cmp(&b.sent));
        Ok(recorded)
    }
}

async fn stopped(interrupted: &AtomicBool) {
    while !interrupted.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn pass(
    State(proxy): State<Arc<Proxy>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let sent = proxy.start.elapsed().as_secs_f64();
    let chat = method == Method::POST && uri.path().ends_with("/chat/completions");
    let asked = chat.then(|| serde_json::from_slice(&body).ok()).flatten();
    let (head, first) = tokio::sync::oneshot::channel();
    let (send, receive) = channel(64);
    let path = uri.path_and_query().map_or_else(|| uri.path().to_owned(), ToString::to_string);
    tokio::task::spawn_blocking(move || {
        let mut request =
            axum::http::Request::builder().method(method).uri(format!("{}{path}", proxy.upstream));
        for name in FORWARDED {
            if let Some(value) = headers.get(&name) {
                request = request.header(name, value);
            }
        }
        let answer = request.body(body.to_vec()).map_err(|e| e.to_string());
        let answer = answer.and_then(|r| proxy.agent.run(r).map_err(|e| e.to_string()));
        let (status, end) = match answer {
            Err(e) => {
                let e = redact::address(&e);
                (proxy.noted)(&format!("{path}: not recorded, the upstream does not answer: {e}"));
                let _ = head.send(Err(e));
                return;
            }
            Ok(mut response) => {
                let kind = response.headers().get(header::CONTENT_TYPE).cloned();
                let status = response.status();
                let gone = head.send(Ok((status, kind))).is_err();
                let body = response.body_mut().as_reader();
                (status, if gone { End::Client } else { copy(body, &send) })
            }
        };
        // A plan is what a server has to answer: what this one refused or broke off is asked again by the client.
        let what = match (&asked, end) {
            (None, _) => "passed, not recorded".to_owned(),
            (Some(_), _) if !status.is_success() => format!("not recorded, the upstream answers {status}"),
            (Some(_), End::Upstream) => "not recorded, broken off by the upstream".to_owned(),
            (Some(_), End::Client) => "recorded, broken off by the client".to_owned(),
            (Some(_), End::Whole) => "recorded".to_owned(),
        };
        if let Some(body) = asked.filter(|_| what.starts_with("recorded")) {
            let done = proxy.start.elapsed().as_secs_f64();
            let recorded = Recorded { sent, done, body, aborted: matches!(end, End::Client) };
            proxy.recorded.lock().unwrap_or_else(PoisonError::into_inner).push(recorded);
        }
        (proxy.noted)(&format!("{path}: {what}"));
    });
    match first.await {
        Ok(Ok((status, kind))) => {
            let mut response = Response::new(Body::new(Stream(receive)));
            *response.status_mut() = status;
            if let Some(kind) = kind {
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
            }
            response
        }
        Ok(Err(e)) => (StatusCode::BAD_GATEWAY, format!("the upstream does not answer: {e}")).into_response(),
        Err(_) => StatusCode::BAD_GATEWAY.into_response(),
    }
}

/// How an answer ended.
#[derive(Clone, Copy)]
enum End {
    Whole,
    Client,
    Upstream,
}

/// Passes pieces on as they come.
fn copy(mut reader: impl std::io::Read, send: &Sender<Bytes>) -> End {
    let mut buffer = vec![0; 16 << 10];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return End::Whole,
            Err(_) => return End::Upstream,
            Ok(n) => {
                if send.blocking_send(Bytes::copy_from_slice(&buffer[..n])).is_err() {
                    return End::Client;
                }
            }
        }
    }
}

struct Stream(Receiver<Bytes>);

impl http_body::Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|bytes| Ok(Frame::data(bytes))))
    }
}
