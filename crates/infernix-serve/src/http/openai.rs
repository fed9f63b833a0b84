//! Routes of OpenAI's protocols.

use super::Client;
use super::answer::{Answer, json_response, prepared};
use crate::app::App;
use crate::chat::{self, ChatReply};
use crate::completions::{self, CompletionsReply};
use crate::decode::{Scored, logprob};
use crate::error::ApiError;
use crate::generate::Generation;
use crate::ids;
use crate::piece::{Piece, TokenLogprob};
use crate::prepare::{Caller, Plan};
use crate::responses::{self, ResponsesReply, Stored, with_ids};
use crate::search::Searching;
use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

type Shared = State<Arc<App>>;

fn caller(client: &Client) -> Caller<'_> {
    Caller { key: client.key, session: client.session.as_deref(), call_prefix: "call_" }
}

fn refused(app: &App, client: &Client, route: &'static str, error: &ApiError) -> Response {
    app.reject(client, route, error);
    error.response(client.wire, &client.request_id)
}

/// `POST /v1/chat/completions`.
pub(super) async fn chat(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let who = client.clone();
    let work = move |app: &App, value: Value| {
        let request = chat::parse(value, app.format.tokenizer().addressable())?;
        app.check_model(request.model.as_deref())?;
        let ignored = request.turn.ignored.clone();
        let plan = app.prepare(request.turn, caller(&who))?;
        Ok((plan, request.send, ignored))
    };
    match prepared(&app, &headers, body, work).await {
        Err(error) => refused(&app, &client, "chat", &error),
        Ok((plan, send, ignored)) => {
            let reply =
                ChatReply::new(ids::fresh("chatcmpl-"), ids::now(), app.model.id.clone(), send, plan.n)
                    .with_usage_choice(app.options.usage_chunk_choice)
                    .with_logprobs(plan.logprobs.is_some());
            let reply = Box::new(reply);
            Answer {
                app,
                client,
                route: "chat",
                plans: vec![plan],
                reply,
                stream: send.stream,
                ignored,
                store: None,
                searching: None,
            }
            .respond()
            .await
        }
    }
}

/// `POST /v1/completions`.
pub(super) async fn completions(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let who = client.clone();
    let work = move |app: &App, value: Value| {
        let request = completions::parse(value, app.format.tokenizer())?;
        app.check_model(request.model.as_deref())?;
        let score = request.echo && request.turn.logprobs.is_some();
        let mut plans = Vec::with_capacity(request.prompts.len());
        for prompt in &request.prompts {
            let mut plan = app.prepare_raw(request.turn.clone(), prompt.clone(), caller(&who))?;
            // Scores are read in a request of their own, so that each choice begins with them.
            plan.prompt_logprobs = if score { request.turn.logprobs } else { None };
            plans.push(plan);
        }
        Ok((plans, request))
    };
    let (plans, request) = match prepared(&app, &headers, body, work).await {
        Ok(prepared) => prepared,
        Err(error) => return refused(&app, &client, "completions", &error),
    };
    let head = (ids::fresh("cmpl-"), ids::now(), app.model.id.clone());
    let n = request.turn.n;
    let mut reply =
        CompletionsReply::new(head, request.send, plans.len(), n, request.turn.logprobs.is_some());
    let mut plans = plans;
    if request.echo {
        for (i, plan) in plans.iter_mut().enumerate() {
            let tokens = match plan.prompt_logprobs {
                Some(_) => match scores(&app, plan, i > 0).await {
                    Ok(tokens) => tokens,
                    Err(error) => return refused(&app, &client, "completions", &error),
                },
                None => Vec::new(),
            };
            plan.prompt_logprobs = None;
            let text = app.format.tokenizer().decode(&plan.prompt, false);
            for sample in 0..n {
                reply.echo(i * n + sample, &text, &tokens);
            }
        }
    }
    let (stream, ignored) = (request.send.stream, request.turn.ignored);
    let reply = Box::new(reply);
    Answer { app, client, route: "completions", plans, reply, stream, ignored, store: None, searching: None }
        .respond()
        .await
}

/// Log-probabilities of a prompt's tokens; the answer to it goes on from there, and so does the scoring of the next prompt.
async fn scores(app: &Arc<App>, plan: &mut Plan, joins: bool) -> Result<Vec<TokenLogprob>, ApiError> {
    let (n, max_tokens) = (plan.n, plan.max_tokens);
    (plan.n, plan.max_tokens, plan.joins) = (1, 0, joins);
    let started = Generation::start(&app.engine, std::slice::from_ref(plan));
    (plan.n, plan.max_tokens, plan.joins) = (n, max_tokens, true);
    let mut generation = started?;
    let mut scored = Scored::default();
    while let Some((_, piece, _)) = generation.next().await {
        match piece {
            Piece::Failed(error) => return Err(error),
            Piece::End(end) => (scored.cached, scored.times) = (end.usage.cached, end.timings),
            _ => {}
        }
    }
    let Some(decoder) = generation.decoder(0) else { return Ok(Vec::new()) };
    scored.miss = decoder.miss().cloned().map(Box::new);
    plan.decode.scored = Some(Arc::new(scored));
    let tokens = decoder.take_prompt_logprobs();
    Ok(tokens.iter().map(|t| logprob(app.format.tokenizer(), t)).collect())
}

/// `POST /v1/responses`.
pub(super) async fn responses(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let who = client.clone();
    let work = move |app: &App, value: Value| {
        let mut request = parse_responses(app, &who, value)?;
        app.check_model(request.model.as_deref())?;
        let ignored = request.turn.ignored.clone();
        let searching = Searching::new(&request.turn, caller(&who));
        let plan =
            app.prepare(std::mem::take(&mut request.turn), caller(&who)).map_err(in_responses_words)?;
        Ok((plan, request, ignored, searching))
    };
    match prepared(&app, &headers, body, work).await {
        Err(error) => refused(&app, &client, "responses", &error),
        Ok((plan, mut request, ignored, searching)) => {
            let id = ids::fresh("resp_");
            let store = request.store.then(|| {
                with_ids(&mut request.input);
                let stored = Stored {
                    owner: client.key,
                    response: Value::Null,
                    input: std::mem::take(&mut request.input),
                };
                (id.clone(), stored)
            });
            let head = (id, ids::now(), app.model.id.clone());
            let reply =
                Box::new(ResponsesReply::new(head, request.stream, request.encrypted, request.template));
            let stream = request.stream;
            Answer {
                app,
                client,
                route: "responses",
                plans: vec![plan],
                reply,
                stream,
                ignored,
                store,
                searching,
            }
            .respond()
            .await
        }
    }
}

fn in_responses_words(error: ApiError) -> ApiError {
    error.said_as("input", "reasoning.effort: none")
}

fn parse_responses(
    app: &App,
    client: &Client,
    value: Value,
) -> Result<responses::ResponsesRequest, ApiError> {
    responses::parse(value, app.format.tokenizer().addressable(), |id| {
        app.store.get(id, client.key).map(|stored| stored.items()).ok_or_else(|| {
            ApiError::at(
                404,
                "previous_response_not_found",
                "previous_response_id",
                format!("there is no response {}", crate::error::quoted(&id.into())),
            )
        })
    })
}

/// `POST /v1/responses/input_tokens`.
pub(super) async fn input_tokens(
    State(app): Shared,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let who = client.clone();
    let work = move |app: &App, value: Value| {
        let request = parse_responses(app, &who, value)?;
        app.check_model(request.model.as_deref())?;
        Ok(app.render(&request.turn).map_err(in_responses_words)?.ids.len())
    };
    match prepared(&app, &headers, body, work).await {
        Err(error) => refused(&app, &client, "input_tokens", &error),
        Ok(tokens) => json_response(&json!({"object": "response.input_tokens", "input_tokens": tokens})),
    }
}

fn stored(app: &App, client: &Client, id: &str) -> Result<Arc<Stored>, ApiError> {
    app.store.get(id, client.key).ok_or_else(|| {
        ApiError::not_found(format!("there is no response {}", crate::error::quoted(&id.into())))
    })
}

/// `GET /v1/responses/{id}`.
pub(super) async fn response(
    State(app): Shared,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    if query_value(query.as_deref(), "stream") == Some("true") {
        let error = ApiError::invalid("stream", "a stored response is given in one piece only");
        return error.response(client.wire, &client.request_id);
    }
    match stored(&app, &client, &id) {
        Ok(stored) => json_response(&stored.response),
        Err(error) => error.response(client.wire, &client.request_id),
    }
}

/// `DELETE /v1/responses/{id}`.
pub(super) async fn delete_response(
    State(app): Shared,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Response {
    if app.store.remove(&id, client.key) {
        json_response(&json!({"id": id, "object": "response", "deleted": true}))
    } else {
        ApiError::not_found(format!("there is no response {}", crate::error::quoted(&id.into())))
            .response(client.wire, &client.request_id)
    }
}

/// `GET /v1/responses/{id}/input_items`, in pages.
pub(super) async fn input_items(
    State(app): Shared,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    match stored(&app, &client, &id).and_then(|stored| page(&stored.input, query.as_deref())) {
        Ok(page) => json_response(&page),
        Err(error) => error.response(client.wire, &client.request_id),
    }
}

fn page(items: &[Value], query: Option<&str>) -> Result<Value, ApiError> {
    let limit = match query_value(query, "limit") {
        None => 20,
        Some(text) => text
            .parse::<usize>()
            .ok()
            .filter(|n| (1..=100).contains(n))
            .ok_or_else(|| ApiError::invalid("limit", "must be 1 to 100"))?,
    };
    let mut items: Vec<&Value> = items.iter().collect();
    match query_value(query, "order") {
        Some("asc") => {}
        None | Some("desc") => items.reverse(),
        Some(_) => return Err(ApiError::invalid("order", "must be asc or desc")),
    }
    let id = |item: &Value| item.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
    if let Some(after) = query_value(query, "after") {
        let at = items.iter().position(|i| id(i) == after);
        let at = at.ok_or_else(|| ApiError::invalid("after", "names no item of this response"))?;
        items.drain(..=at);
    }
    let more = items.len() > limit;
    items.truncate(limit);
    Ok(json!({
        "object": "list", "data": items, "has_more": more,
        "first_id": items.first().map(|i| id(i)), "last_id": items.last().map(|i| id(i)),
    }))
}

/// A value of a query; ids and numbers need no decoding.
fn query_value<'q>(query: Option<&'q str>, name: &str) -> Option<&'q str> {
    query?.split('&').find_map(|pair| pair.split_once('=').filter(|(n, _)| *n == name).map(|(_, v)| v))
}

/// `POST /v1/responses/{id}/cancel`: only background responses can be cancelled so.
pub(super) async fn no_cancel(Extension(client): Extension<Client>) -> Response {
    let message =
        "only background responses can be cancelled, and there are none; close the connection instead";
    ApiError::new(400, "invalid_request", message).response(client.wire, &client.request_id)
}

/// `POST /v1/responses/compact`.
pub(super) async fn no_compact(Extension(client): Extension<Client>) -> Response {
    let message = "this server does not compact conversations; send a shorter one";
    ApiError::new(400, "invalid_request", message).response(client.wire, &client.request_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_items_follow_each_other() {
        let items: Vec<Value> = (0..5).map(|i| json!({"id": format!("i{i}")})).collect();
        let ids = |page: &Value| -> Vec<String> {
            page["data"]
                .as_array()
                .expect("a list")
                .iter()
                .map(|v| v["id"].as_str().expect("an id").into())
                .collect()
        };
        let first = page(&items, Some("limit=2")).expect("a page");
        assert_eq!((ids(&first), &first["has_more"]), (vec!["i4".into(), "i3".into()], &json!(true)));
        let last = page(&items, Some("order=asc&after=i3&limit=2")).expect("a page");
        assert_eq!((ids(&last), &last["has_more"]), (vec!["i4".into()], &json!(false)));
        for bad in ["limit=0", "limit=x", "order=up", "after=zz"] {
            assert!(page(&items, Some(bad)).is_err(), "{bad}");
        }
    }
}
