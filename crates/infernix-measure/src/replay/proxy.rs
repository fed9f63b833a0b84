//! A proxy on loopback that passes an agent's requests on to one upstream and notes what it asks.

use super::record::Recorded;
use crate::error::{MeasureError, Result};
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

/// Serves until `interrupted` is set; then gives what passed, in the order of sending.
///
/// # Errors
/// An upstream that is no address; a port that is taken.
pub fn record(
    upstream: &str,
    listen: SocketAddr,
    interrupted: &AtomicBool,
    noted: impl Fn(&str) + Send + Sync + 'static,
) -> Result<Vec<Recorded>> {
    if !listen.ip().is_loopback() {
        return Err(MeasureError::Options(format!(
            "{listen} is not a loopback address; recordings stay on this machine"
        )));
    }
    if !upstream.starts_with("http://") && !upstream.starts_with("https://") {
        return Err(MeasureError::Options(format!("{upstream:?} is no http:// or https:// address")));
    }
    let base = upstream.trim_end_matches('/');
    let proxy = Arc::new(Proxy {
        upstream: base.strip_suffix("/v1").unwrap_or(base).to_owned(),
        agent: ureq::Agent::config_builder().http_status_as_error(false).max_redirects(0).build().into(),
        start: Instant::now(),
        recorded: Mutex::default(),
        noted: Box::new(noted),
    });
    let fail = |e: std::io::Error| MeasureError::Server(format!("{listen}: {e}"));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(fail)?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(listen).await.map_err(fail)?;
        let app = axum::Router::new().fallback(pass).with_state(Arc::clone(&proxy));
        let app = app.layer(axum::extract::DefaultBodyLimit::max(MAX_REQUEST));
        tokio::select! {
            served = async { axum::serve(listener, app).await } => served.map_err(fail),
            () = stopped(interrupted) => Ok(()),
        }
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    let mut recorded = std::mem::take(&mut *proxy.recorded.lock().unwrap_or_else(PoisonError::into_inner));
    recorded.sort_by(|a, b| a.sent.total_cmp(&b.sent));
    Ok(recorded)
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
        let complete = match answer {
            Err(e) => {
                let _ = head.send(Err(e));
                return;
            }
            Ok(mut response) => {
                let kind = response.headers().get(header::CONTENT_TYPE).cloned();
                let gone = head.send(Ok((response.status(), kind))).is_err();
                !gone && copy(response.body_mut().as_reader(), &send)
            }
        };
        let Some(body) = asked else {
            (proxy.noted)(&format!("{path}: passed, not recorded"));
            return;
        };
        let done = proxy.start.elapsed().as_secs_f64();
        (proxy.noted)(&format!(
            "{path}: recorded{}",
            if complete { "" } else { ", broken off by the client" }
        ));
        let recorded = Recorded { sent, done, body, aborted: !complete };
        proxy.recorded.lock().unwrap_or_else(PoisonError::into_inner).push(recorded);
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

/// Passes pieces on as they come; `false` when the client has gone.
fn copy(mut reader: impl std::io::Read, send: &Sender<Bytes>) -> bool {
    let mut buffer = vec![0; 16 << 10];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) | Err(_) => return true,
            Ok(n) => {
                if send.blocking_send(Bytes::copy_from_slice(&buffer[..n])).is_err() {
                    return false;
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
