//! Routes of Anthropic's protocol.

use super::Client;
use super::answer::{Answer, json_ignoring, prepared};
use crate::app::App;
use crate::error::ApiError;
use crate::ids;
use crate::messages::{self, MessagesReply};
use crate::prepare::Caller;
use crate::search::Searching;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// `POST /v1/messages`. Any model name is taken and echoed.
pub(super) async fn messages(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let who = client.clone();
    let work = move |app: &App, value: Value| {
        let mut request = messages::parse(value, false)?;
        let ignored = request.turn.ignored.clone();
        let caller = Caller { key: who.key, session: who.session.as_deref(), call_prefix: "toolu_" };
        let searching = Searching::new(&request.turn, caller);
        let plan = app.prepare(std::mem::take(&mut request.turn), caller).map_err(in_own_words)?;
        Ok((plan, request, ignored, searching))
    };
    match prepared(&app, &headers, body, work).await {
        Err(error) => {
            app.reject(&client, "messages", &error);
            error.response(client.wire, &client.request_id)
        }
        Ok((plan, request, ignored, searching)) => {
            let model = request.model.unwrap_or_else(|| app.model.id.clone());
            let reply = Box::new(MessagesReply::new(
                ids::fresh("msg_"),
                model,
                request.stream,
                request.omit_thinking,
                client.request_id.clone(),
            ));
            let (plans, stream) = (vec![plan], request.stream);
            Answer { app, client, route: "messages", plans, reply, stream, ignored, store: None, searching }
                .respond()
                .await
        }
    }
}

fn in_own_words(error: ApiError) -> ApiError {
    error.said_as("messages", "thinking.type: disabled")
}

/// `POST /v1/messages/count_tokens`: the same prompt as `/v1/messages` makes.
pub(super) async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let work = |app: &App, value: Value| {
        let request = messages::parse(value, true)?;
        let tokens = app.render(&request.turn).map_err(in_own_words)?.ids.len();
        Ok((tokens, request.turn.ignored))
    };
    match prepared(&app, &headers, body, work).await {
        Ok((tokens, ignored)) => json_ignoring(&json!({"input_tokens": tokens}), &ignored),
        Err(error) => {
            app.reject(&client, "count_tokens", &error);
            error.response(client.wire, &client.request_id)
        }
    }
}
