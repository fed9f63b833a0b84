//! Reading bodies: bounded in size, in time and over all connections, before anything is parsed.

use crate::app::App;
use crate::error::ApiError;
use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt as _;
use serde_json::Value;
use std::time::Duration;
use tokio::sync::SemaphorePermit;

/// Bodies above this are parsed off the connection's thread.
const PARSE_ELSEWHERE: usize = 256 << 10;

/// How long a refused body is read on and thrown away, so that its sender comes to read the refusal.
const LINGER: Duration = Duration::from_secs(5);

/// The JSON of a body.
pub(super) async fn json(app: &App, headers: &HeaderMap, mut body: Body) -> Result<Value, ApiError> {
    let read = bytes(app, headers, &mut body).await;
    // The permits are given back after the parsing.
    let (bytes, announced, _permits) = match read {
        Ok(read) => read,
        Err(error) => {
            linger(body);
            return Err(error);
        }
    };
    let parse = move || {
        serde_json::from_slice::<Value>(&bytes)
            .map_err(|e| ApiError::new(400, "invalid_json", format!("the body is not valid JSON: {e}")))
    };
    if announced.is_none_or(|n| n > PARSE_ELSEWHERE) { off_thread(parse).await } else { parse() }
}

/// Throws the rest of a body away while its refusal is sent.
pub(super) fn linger(mut body: Body) {
    tokio::spawn(tokio::time::timeout(LINGER, async move { while let Some(Ok(_)) = body.frame().await {} }));
}

/// The bytes of a body, how many were announced, and what they take of the room for bodies.
async fn bytes<'a>(
    app: &'a App,
    headers: &HeaderMap,
    body: &mut Body,
) -> Result<(Vec<u8>, Option<usize>, Vec<SemaphorePermit<'a>>), ApiError> {
    let max = app.options.max_request_bytes;
    let too_large = || {
        let message = format!("the body is larger than {} bytes (--max-request-mib)", max);
        ApiError::new(413, "request_too_large", message)
    };
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok()?.parse::<u64>().ok())
        .and_then(|n| usize::try_from(n).ok());
    if announced.is_some_and(|n| n > max) {
        return Err(too_large());
    }
    let mut permits = Vec::new();
    let read = async {
        let mut bytes = Vec::with_capacity(announced.unwrap_or(0).min(1 << 20));
        while let Some(frame) = body.frame().await {
            let frame = frame
                .map_err(|e| ApiError::new(400, "invalid_body", format!("the body ended early: {e}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > max {
                return Err(too_large());
            }
            let permit = app.bodies.try_acquire_many((data.len() / 1024 + 1) as u32).map_err(|_| {
                let message = "too many large requests are being read at once (--max-requests-mib)";
                ApiError { retry_after: Some(2), ..ApiError::new(429, "server_overloaded", message) }
            })?;
            permits.push(permit);
            bytes.extend_from_slice(&data);
        }
        Ok(bytes)
    };
    let bytes = tokio::time::timeout(app.options.body_timeout, read).await.map_err(|_| {
        ApiError::new(408, "request_timeout", "the body did not arrive in time (--body-timeout-ms)")
    })??;
    Ok((bytes, announced, permits))
}

/// Runs work that may take long, or panic, away from the connections.
pub(crate) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::internal("the request could not be prepared; this is a fault of the server")),
    }
}
