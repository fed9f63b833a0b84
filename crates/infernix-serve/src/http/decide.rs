//! `POST /v1/decide`, also as `/v1/systemone`.

use super::Client;
use super::answer::{json_ignoring, prepared};
use super::track::Track;
use crate::app::App;
use crate::decide;
use crate::piece::TokenUsage;
use crate::prepare::Caller;
use crate::turn::Turn;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Answers every question of a request.
pub(super) async fn decide(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let who = client.clone();
    let work = move |app: &App, value: Value| {
        let mut turn = Turn::new();
        let (prepared, salt, ignored) = decide::prepare(app, value)?;
        turn.cache.salt = salt;
        let caller = Caller { key: who.key, session: who.session.as_deref(), call_prefix: "" };
        let asker = decide::Asker { salt: app.salt(&turn, caller), session: who.session.clone() };
        Ok((prepared, asker, ignored))
    };
    match prepared(&app, &headers, body, work).await {
        Err(error) => {
            app.reject(&client, "decide", &error);
            error.response(client.wire, &client.request_id)
        }
        Ok((prepared, asker, ignored)) => {
            let detail = Map::from_iter(crate::log::ignored(&ignored));
            let mut track = Track::new(&app, &client, "decide", detail);
            let mut usage = TokenUsage::default();
            let answered = decide::run(&app, prepared, &asker, &mut usage).await;
            track.counted(usage);
            match answered {
                Ok(value) => {
                    track.done();
                    json_ignoring(&value, &ignored)
                }
                Err(error) => {
                    track.failed(&error);
                    error.response(client.wire, &client.request_id)
                }
            }
        }
    }
}
