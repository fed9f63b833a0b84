//! HTTP: routes, what is checked before any of them, and how answers are sent.

mod admin;
mod answer;
mod anthropic;
mod body;
mod decide;
mod gate;
mod info;
mod openai;
mod sse;
mod track;

use crate::app::App;
use crate::error::{ApiError, Wire};
use axum::Router;
use axum::extract::Request;
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{get, post};
use std::sync::Arc;

pub(crate) use body::off_thread;
pub(crate) use gate::Client;
pub(crate) use track::cause as miss_cause;

/// All routes. The API also answers under a doubled `/v1/v1`, for clients that append it to a base URL which has it.
pub fn router(app: &Arc<App>) -> Router {
    let api = Router::new()
        .route("/chat/completions", post(openai::chat))
        .route("/completions", post(openai::completions))
        .route("/responses", post(openai::responses))
        .route("/responses/input_tokens", post(openai::input_tokens))
        .route("/responses/compact", post(openai::no_compact))
        .route("/responses/{id}", get(openai::response).delete(openai::delete_response))
        .route("/responses/{id}/input_items", get(openai::input_items))
        .route("/responses/{id}/cancel", post(openai::no_cancel))
        .route("/messages", post(anthropic::messages))
        .route("/messages/count_tokens", post(anthropic::count_tokens))
        .route("/models", get(info::models))
        .route("/models/{*id}", get(info::model))
        .route("/decide", post(decide::decide))
        .route("/systemone", post(decide::decide))
        .route("/status", get(info::status));
    Router::new()
        .route("/", get(info::index))
        .route("/page.css", get(info::page_style))
        .route("/page.js", get(info::page_script))
        .route("/health", get(info::ready))
        .route("/livez", get(info::live))
        .route("/readyz", get(info::ready))
        .route("/version", get(info::version))
        .route("/metrics", get(info::metrics))
        .route("/tokenize", post(info::tokenize))
        .route("/detokenize", post(info::detokenize))
        .route("/tokenizer_info", get(info::tokenizer_info))
        .nest("/v1", api.clone())
        .nest("/v1/v1", api)
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(gated(app, app.options.loopback), gate::gate))
        .with_state(Arc::clone(app))
}

/// Routes of the address for those who run the server (`--admin`); `loopback` is whether only this machine reaches it.
pub fn admin_router(app: &Arc<App>, loopback: bool) -> Router {
    Router::new()
        .route("/livez", get(info::live))
        .route("/readyz", get(info::ready))
        .route("/health", get(info::ready))
        .route("/metrics", get(info::metrics))
        .route("/v1/status", get(info::status))
        .route("/admin/drain", post(admin::drain))
        .route("/admin/resume", post(admin::resume))
        .route("/admin/cache/save", post(admin::save_cache))
        .route("/admin/cache/clear", post(admin::clear_cache))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(gated(app, loopback), gate::gate))
        .with_state(Arc::clone(app))
}

fn gated(app: &Arc<App>, loopback: bool) -> gate::Gate {
    gate::Gate { app: Arc::clone(app), loopback }
}

async fn no_route(request: Request) -> Response {
    let path = crate::error::quoted(&request.uri().path().into());
    error(&request, &ApiError::not_found(format!("there is nothing at {path}")))
}

async fn no_method(request: Request) -> Response {
    let message = format!("{} is not possible here", request.method());
    error(&request, &ApiError::new(405, "method_not_allowed", message))
}

fn error(request: &Request, error: &ApiError) -> Response {
    let id = request.extensions().get::<Client>().map_or("", |c| c.request_id.as_str());
    error.response(Wire::of_path(request.uri().path()), id)
}
