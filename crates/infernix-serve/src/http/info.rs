//! Routes about the server itself, and the tokenizer's.

use super::Client;
use super::answer::{json_ignoring, json_response, prepared};
use crate::app::App;
use crate::chat;
use crate::completions::ids;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::page;
use crate::turn::Turn;
use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use infernix_engine::sched::TierStatus;
use serde_json::{Value, json};
use std::sync::Arc;

type Shared = State<Arc<App>>;

/// `GET /` and `HEAD /`: the chat page.
pub(super) async fn index() -> Response {
    page::file("")
}

/// `GET /page.css`.
pub(super) async fn page_style() -> Response {
    page::file("page.css")
}

/// `GET /page.js`.
pub(super) async fn page_script() -> Response {
    page::file("page.js")
}

/// `GET /livez`: the process answers.
pub(super) async fn live() -> Response {
    json_response(&json!({"status": "ok"}))
}

/// `GET /readyz` and `/health`: requests are taken. A full queue is no fault.
pub(super) async fn ready(State(app): Shared, Extension(client): Extension<Client>) -> Response {
    match app.unready() {
        None => json_response(&json!({"status": "ok"})),
        Some(why) => ApiError::unavailable(why).response(client.wire, &client.request_id),
    }
}

/// `GET /version`.
pub(super) async fn version() -> Response {
    json_response(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /v1/models`.
pub(super) async fn models(State(app): Shared) -> Response {
    let entry = app.model_entry();
    // Anthropic's list needs the cursor fields, Codex reads `models`.
    json_response(&json!({
        "object": "list", "data": [entry], "has_more": false, "first_id": app.model.id, "last_id": app.model.id,
        "models": [{"slug": app.model.id, "display_name": app.model.id, "context_window": entry["max_model_len"]}],
    }))
}

/// `GET /v1/models/{id}`.
pub(super) async fn model(
    State(app): Shared,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Response {
    match app.check_model(Some(&id)) {
        Ok(()) => json_response(&app.model_entry()),
        Err(error) => error.response(client.wire, &client.request_id),
    }
}

/// `GET /metrics`. Answers after the engine has failed, too.
pub(super) async fn metrics(State(app): Shared) -> Response {
    let page = app.metrics.render(&app.engine.status(), &app.model.id, app.options.metrics_vllm);
    text("text/plain; version=0.0.4; charset=utf-8", page)
}

/// `GET /v1/status`.
pub(super) async fn status(State(app): Shared, Extension(client): Extension<Client>) -> Response {
    let s = app.engine.status();
    let tier = |t: TierStatus| json!({"blocks": t.blocks, "snapshots": t.snapshots, "bytes": t.bytes, "budget": t.budget});
    // Sessions of running requests may belong to other keys: only numbers are shown.
    let lanes: Vec<Value> = s
        .lanes
        .iter()
        .map(|l| {
            json!({
                "prompt_tokens": l.prompt.1, "prompt_read": l.prompt.0, "output_tokens": l.output.0,
                "max_tokens": l.output.1, "age_seconds": l.age.as_secs_f64(),
            })
        })
        .collect();
    let (records, bytes) = app.store.size();
    json_response(&json!({
        "model": app.model.id, "version": env!("CARGO_PKG_VERSION"), "started": app.started,
        "ready": app.unready().is_none(), "stopped": s.stopped, "draining": app.draining(),
        "context": s.context, "lanes": lanes, "max_lanes": s.max_lanes, "queued": s.queued,
        "max_queued": s.max_queued, "paused": s.paused,
        "kv_pages": {"total": s.pages.0, "free": s.pages.1},
        "cache": {"device": tier(s.cache.device), "host": tier(s.cache.host), "file": tier(s.cache.file)},
        "rates": {"prefill_tokens_per_second": s.rates.prefill, "decode_tokens_per_second": s.rates.decode},
        "tokens": {
            "prompt": s.counters.prompt_tokens, "cached": s.counters.cached_tokens, "output": s.counters.output_tokens,
            "drafted": s.counters.drafted, "accepted": s.counters.accepted,
        },
        "speculation": s.speculation,
        "response_store": {"records": records, "bytes": bytes},
        "request_log_failed": app.log.failed(),
        "misses": app.misses(client.key),
    }))
}

fn text(kind: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// `POST /tokenize`: a text (`prompt` or `content`), or `messages` with the template.
pub(super) async fn tokenize(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let work = |app: &App, value: Value| {
        let mut fields = Fields::new("", value)?;
        app.check_model(fields.string("model")?.as_deref())?;
        let tokenizer = app.format.tokenizer();
        let tokens = if let Some(messages) = fields.take("messages") {
            let mut turn = Turn::new();
            turn.read_extensions(&mut fields)?;
            turn.messages = chat::messages(messages)?;
            app.render(&turn)?.ids
        } else {
            let text = match fields.string("prompt")? {
                Some(text) => text,
                None => fields.need_string("content").map_err(|_| {
                    ApiError::at(
                        400,
                        "missing_required_parameter",
                        "prompt",
                        "or messages or content is required",
                    )
                })?,
            };
            tokenizer.encode(&text)?
        };
        // Nothing is added to a text here, and an answer's opener always to a conversation.
        fields.skip(&["add_special_tokens"]);
        if fields.peek("add_generation_prompt") == Some(&Value::Bool(true)) {
            fields.skip(&["add_generation_prompt"]);
        }
        let strings = fields.bool("return_token_strs")?.unwrap_or(false).then(|| {
            let text = |id: &u32| {
                String::from_utf8_lossy(tokenizer.token_bytes(*id).unwrap_or_default()).into_owned()
            };
            tokens.iter().map(text).collect::<Vec<_>>()
        });
        let answer = json!({
            "count": tokens.len(), "max_model_len": app.engine.status().context, "tokens": tokens,
            "token_strs": strings,
        });
        Ok((answer, fields.rest()))
    };
    finish(&app, &client, "tokenize", prepared(&app, &headers, body, work).await)
}

/// `GET /tokenizer_info`: what lm-eval's remote tokenizer asks for, under vLLM's names.
pub(super) async fn tokenizer_info(State(app): Shared) -> Response {
    let tokenizer = app.format.tokenizer();
    let stop = app.format.stop_ids().first().map(|id| tokenizer.decode(&[*id], false));
    json_response(&json!({
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": stop, "bos_token": null, "pad_token": null,
        "model_max_length": app.engine.status().context,
        "chat_template": app.format.template().map(infernix_text::Template::source),
    }))
}

/// `POST /detokenize`.
pub(super) async fn detokenize(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let work = |app: &App, value: Value| {
        let mut fields = Fields::new("", value)?;
        app.check_model(fields.string("model")?.as_deref())?;
        let list = fields
            .list("tokens")?
            .ok_or_else(|| ApiError::at(400, "missing_required_parameter", "tokens", "is required"))?;
        let tokenizer = app.format.tokenizer();
        let text = if list.is_empty() {
            String::new()
        } else {
            tokenizer.decode(&ids("tokens", &list, tokenizer)?, false)
        };
        Ok((json!({"prompt": text, "content": text}), fields.rest()))
    };
    finish(&app, &client, "detokenize", prepared(&app, &headers, body, work).await)
}

fn finish(
    app: &App,
    client: &Client,
    route: &'static str,
    result: Result<(Value, Vec<String>), ApiError>,
) -> Response {
    match result {
        Ok((value, ignored)) => json_ignoring(&value, &ignored),
        Err(error) => {
            app.reject(client, route, &error);
            error.response(client.wire, &client.request_id)
        }
    }
}
