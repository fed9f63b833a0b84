//! What the person who runs the server may tell it, at an address of its own.

use super::Client;
use super::answer::json_response;
use super::body;
use crate::app::App;
use crate::error::ApiError;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use infernix_engine::sched::CacheOrder;
use serde_json::{Value, json};
use std::sync::Arc;

type Shared = State<Arc<App>>;

/// `POST /admin/drain`: takes no new requests, so that a router sends them elsewhere; what runs goes on.
pub(super) async fn drain(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    obeyed(&app, &client, &headers, body, async {
        app.set_draining(true);
        tracing::info!("draining: new requests are refused");
        json_response(&json!({"draining": true, "active_requests": app.active_requests()}))
    })
    .await
}

/// `POST /admin/resume`: takes requests again, unless the server is being stopped.
pub(super) async fn resume(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    obeyed(&app, &client, &headers, body, async {
        app.set_draining(false);
        tracing::info!("taking requests");
        json_response(&json!({"draining": app.draining(), "active_requests": app.active_requests()}))
    })
    .await
}

/// `POST /admin/cache/save`.
pub(super) async fn save_cache(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    obeyed(&app, &client, &headers, body, cache(&app, &client, CacheOrder::Save, "saved")).await
}

/// `POST /admin/cache/clear`.
pub(super) async fn clear_cache(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    obeyed(&app, &client, &headers, body, cache(&app, &client, CacheOrder::Clear, "dropped")).await
}

/// Does what was ordered. Nothing can be said beside the order itself: a body that says more, or is broken, was meant for
/// something else.
async fn obeyed(
    app: &App,
    client: &Client,
    headers: &HeaderMap,
    body: Body,
    act: impl Future<Output = Response>,
) -> Response {
    let empty = |v: &Value| v.as_object().is_some_and(serde_json::Map::is_empty);
    let error = match body::json(app, headers, body).await {
        Ok(value) if empty(&value) => return act.await,
        Ok(_) => ApiError::new(400, "invalid_value", "the body must be {}"),
        Err(error) => error,
    };
    error.response(client.wire, &client.request_id)
}

async fn cache(app: &App, client: &Client, order: CacheOrder, word: &str) -> Response {
    let engine = Arc::clone(&app.engine);
    // Waits for the end of a round, and for the disk.
    let done = tokio::task::spawn_blocking(move || engine.cache(order)).await;
    match done.unwrap_or_else(|_| Err("the engine panicked".to_owned())) {
        Ok(snapshots) => {
            tracing::info!(snapshots, "prefix cache {word}");
            json_response(&json!({word: snapshots}))
        }
        Err(why) => {
            tracing::warn!("the prefix cache could not be {word}: {why}");
            ApiError::new(409, "cache_unavailable", why).response(client.wire, &client.request_id)
        }
    }
}
