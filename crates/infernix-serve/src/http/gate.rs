//! What is checked before any route, and what every response carries.

use super::body::linger;
use super::error;
use crate::access::{check_browser, check_content_type};
use crate::app::App;
use crate::error::{ApiError, Wire};
use crate::ids;
use crate::server::MAX_HEAD_BYTES;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;

/// Who sent a request.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    /// Number of its key, where keys are needed.
    pub(crate) key: Option<usize>,
    /// The client's own id for the request, or a new one.
    pub(crate) request_id: String,
    /// Whose errors it reads.
    pub(crate) wire: Wire,
    /// Session that a header names.
    pub(crate) session: Option<String>,
    /// Trace that the request belongs to (`traceparent`).
    pub(crate) trace: Option<String>,
}

/// Headers that name a session, in the order of preference.
const SESSIONS: [&str; 5] =
    ["x-session-id", "x-claude-code-session-id", "session-id", "session_id", "x-session-affinity"];

/// Paths that need no key: they say nothing about anybody.
fn is_open(method: &Method, path: &str) -> bool {
    matches!(path, "/health" | "/livez" | "/readyz" | "/page.css" | "/page.js")
        || path == "/" && matches!(*method, Method::GET | Method::HEAD)
}

/// What a gate stands in front of.
#[derive(Clone)]
pub(super) struct Gate {
    pub(super) app: Arc<App>,
    /// Whether only this machine reaches the address.
    pub(super) loopback: bool,
}

/// Checks a request, lets it through, and marks the response.
pub(super) async fn gate(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let app = &gate.app;
    let wire = Wire::of_path(request.uri().path());
    let headers = request.headers();
    let mut client = Client {
        key: None,
        request_id: request_id(headers),
        wire,
        session: SESSIONS.iter().find_map(|name| short_text(headers, name)),
        trace: short_text(headers, "traceparent").filter(|t| is_trace(t)),
    };
    let request_id = client.request_id.clone();
    let origin = headers.get(header::ORIGIN).cloned();
    let mut response = if app.options.cors && *request.method() == Method::OPTIONS && origin.is_some() {
        preflight()
    } else {
        match check(&gate, &request) {
            Ok(key) => {
                client.key = key;
                request.extensions_mut().insert(client);
                next.run(request).await
            }
            Err(refused) => {
                request.extensions_mut().insert(client);
                let response = error(&request, &refused);
                linger(request.into_body());
                response
            }
        }
    };
    let headers = response.headers_mut();
    let name = match wire {
        Wire::OpenAi => HeaderName::from_static("x-request-id"),
        Wire::Anthropic => HeaderName::from_static("request-id"),
    };
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        headers.insert(name, value);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if app.options.cors && origin.is_some() {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static(
                "x-request-id, request-id, retry-after, x-infernix-ignored, x-infernix-cache",
            ),
        );
    }
    response
}

fn check(gate: &Gate, request: &Request) -> Result<Option<usize>, ApiError> {
    let app = &gate.app;
    if head_bytes(request) > MAX_HEAD_BYTES {
        let message = format!("the request's line and headers have more than {MAX_HEAD_BYTES} bytes");
        return Err(ApiError::new(431, "request_header_fields_too_large", message));
    }
    check_browser(&app.options, gate.loopback, request.uri(), request.headers())?;
    let key = if is_open(request.method(), request.uri().path()) {
        None
    } else {
        app.keys.check(request.headers())?
    };
    check_content_type(request.method(), request.headers())?;
    Ok(key)
}

/// Bytes of the head as it was sent, spaces around values left out. The connection's buffer bounds it, too, but only to
/// about twice its size: it grows by what a read brings.
fn head_bytes(request: &Request) -> usize {
    let uri = request.uri();
    let target = uri.path_and_query().map_or(0, |p| p.as_str().len())
        + uri.authority().map_or(0, |a| "http://".len() + a.as_str().len());
    let line = request.method().as_str().len() + target + "  HTTP/1.1\r\n\r\n".len();
    line + request.headers().iter().map(|(n, v)| n.as_str().len() + v.len() + ": \r\n".len()).sum::<usize>()
}

fn preflight() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers
        .insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE, OPTIONS"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*, authorization"));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    response
}

/// The client's id for the request where it is a plain word, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    ["x-request-id", "request-id"]
        .iter()
        .find_map(|name| headers.get(*name)?.to_str().ok())
        .filter(|id| {
            (1..=128).contains(&id.len())
                && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':'))
        })
        .map_or_else(|| ids::fresh("req_"), str::to_owned)
}

/// The form of W3C Trace Context: words of a client would get into the log otherwise.
fn is_trace(text: &str) -> bool {
    (55..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
}

fn short_text(headers: &HeaderMap, name: &str) -> Option<String> {
    let text = headers.get(name)?.to_str().ok()?;
    (1..=256).contains(&text.len()).then(|| text.to_owned())
}
