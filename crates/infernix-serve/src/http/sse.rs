//! Server-sent events as a response body.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use http_body::Frame;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Chunks between the writer and the connection.
const DEPTH: usize = 16;

struct Chunks(Receiver<Bytes>);

impl http_body::Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|chunk| chunk.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// The writing end of a stream.
pub(super) struct Writer {
    to: Sender<Bytes>,
    patience: Duration,
}

/// The client does not read, or went away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gone;

impl Writer {
    /// Sends text; waits for a slow client as long as the server allows.
    pub(super) async fn send(&self, text: String) -> Result<(), Gone> {
        if text.is_empty() {
            return Ok(());
        }
        self.to.send_timeout(Bytes::from(text), self.patience).await.map_err(|_| Gone)
    }

    /// Ends when the client has gone away.
    pub(super) async fn closed(&self) {
        self.to.closed().await;
    }
}

/// A response that streams what the writer sends.
pub(super) fn stream(patience: Duration) -> (Writer, Response<Body>) {
    let (to, from) = channel(DEPTH);
    let mut response = Response::new(Body::new(Chunks(from)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies of the nginx kind buffer otherwise.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    (Writer { to, patience }, response)
}
