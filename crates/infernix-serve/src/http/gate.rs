//! What is checked before any route, and what every response carries.

use super::body::linger;
use super::error;
use crate::access::{check_browser, check_content_type};
use crate::app::App;
use crate::error::{ApiError, Wire};
use crate::ids;
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
        trace: short_text(headers, "traceparent"),
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
    check_browser(&app.options, gate.loopback, request.headers())?;
    let key = if is_open(request.method(), request.uri().path()) {
        None
    } else {
        app.keys.check(request.headers())?
    };
    check_content_type(request.method(), request.headers())?;
    Ok(key)
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

fn short_text(headers: &HeaderMap, name: &str) -> Option<String> {
    let text = headers.get(name)?.to_str().ok()?;
    (1..=256).contains(&text.len()).then(|| text.to_owned())
}
