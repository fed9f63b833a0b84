//! Sends an answer: as one document, or as a stream.

use super::sse::{Gone, Writer, stream};
use super::track::{Track, cause};
use super::{Client, body};
use crate::app::App;
use crate::error::ApiError;
use crate::generate::Generation;
use crate::piece::Piece;
use crate::prepare::Plan;
use crate::reply::Reply;
use crate::responses::Stored;
use crate::search::{Searching, Session};
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Longest list of ignored fields in a header.
const MAX_IGNORED: usize = 1024;

/// An answer that is about to be made.
pub(super) struct Answer {
    pub(super) app: Arc<App>,
    pub(super) client: Client,
    pub(super) route: &'static str,
    pub(super) plans: Vec<Plan>,
    pub(super) reply: Box<dyn Reply>,
    pub(super) stream: bool,
    /// Fields that change nothing, named to the client.
    pub(super) ignored: Vec<String>,
    /// Keep the response under this id.
    pub(super) store: Option<(String, Stored)>,
    /// Searches for tools that run here.
    pub(super) searching: Option<Searching>,
}

impl Answer {
    /// Makes the answer. Nothing is sent before the engine has taken the request, so that refusals are statuses.
    pub(super) async fn respond(self) -> Response {
        let Self { app, client, route, plans, mut reply, stream: streams, ignored, store, searching } = self;
        let detail = Map::from_iter([
            ("stream".to_owned(), Value::from(streams)),
            ("choices".to_owned(), plans.iter().map(|p| p.n).sum::<usize>().into()),
            ("prompt".to_owned(), plans.iter().map(|p| p.prompt.len()).sum::<usize>().into()),
            ("max_tokens".to_owned(), plans.first().map_or(0, |p| p.max_tokens).into()),
            ("seed".to_owned(), plans.first().map_or(0, |p| p.sampling.seed).into()),
        ]);
        let detail = detail.into_iter().chain(crate::log::ignored(&ignored)).collect();
        let mut track = Track::new(&app, &client, route, detail);
        track.asks(&plans);
        let refuse = |track: &mut Track, error: &ApiError| {
            track.failed(error);
            error.response(client.wire, &client.request_id)
        };
        let mut generation = match Generation::start(&app.engine, &plans) {
            Ok(generation) => generation,
            Err(error) => return refuse(&mut track, &error),
        };
        if let Some(Piece::Failed(error)) = generation.peek().await {
            let error = error.clone();
            return refuse(&mut track, &error);
        }
        let mut cache = CacheNotes::new(&plans);
        cache.look(&app, &client, &mut generation, &mut track);
        let mut session = Session::new(Arc::clone(&app), generation, searching);
        let mut response = if streams {
            let (writer, mut response) = stream(app.options.write_timeout);
            cache.tell(response.headers_mut());
            tokio::spawn(async move {
                let written = write(&app, &writer, &mut session, reply.as_mut(), &mut track).await;
                cache.look(&app, &client, &mut session.generation, &mut track);
                if written.is_ok() {
                    keep(&app, reply.as_mut(), store);
                    track.done();
                }
            });
            response
        } else {
            while !reply.ended()
                && let Some((choice, piece, running)) = session.next().await
            {
                track.piece(choice, &piece, &running);
                reply.push(choice, piece, &running);
            }
            cache.look(&app, &client, &mut session.generation, &mut track);
            match reply.document() {
                Ok(document) => {
                    if let Some((id, mut stored)) = store {
                        stored.response = document.clone();
                        app.store.insert(&id, stored);
                    }
                    track.done();
                    let mut response = json_response(&document);
                    cache.tell(response.headers_mut());
                    response
                }
                Err(error) => return refuse(&mut track, &error),
            }
        };
        add_ignored(response.headers_mut(), &ignored);
        response
    }
}

/// Writes a stream to its end.
async fn write(
    app: &App,
    writer: &Writer,
    session: &mut Session,
    reply: &mut dyn Reply,
    track: &mut Track,
) -> Result<(), Gone> {
    while !reply.ended() {
        let next = tokio::select! {
            next = session.next() => next,
            () = tokio::time::sleep(app.options.keep_alive) => {
                let ping = reply.ping();
                writer.send(if ping.is_empty() { ": keep-alive\n\n".to_owned() } else { ping.to_owned() }).await?;
                continue;
            }
            () = writer.closed() => return Err(Gone),
        };
        match next {
            Some((choice, piece, running)) => {
                track.piece(choice, &piece, &running);
                reply.push(choice, piece, &running);
            }
            None => {
                let error = ApiError::internal("the answer ended without an end");
                track.failed(&error);
                reply.push(0, Piece::Failed(error), &crate::reply::Running::default());
            }
        }
        writer.send(reply.take()).await?;
    }
    Ok(())
}

/// Keeps a response that was streamed.
fn keep(app: &App, reply: &mut dyn Reply, store: Option<(String, Stored)>) {
    if let Some((id, mut stored)) = store
        && let Ok(document) = reply.document()
    {
        stored.response = document;
        app.store.insert(&id, stored);
    }
}

/// What the prefix cache gave the prompts of an answer.
struct CacheNotes {
    /// First choice of each prompt.
    firsts: Vec<usize>,
    /// Prompts looked at.
    noted: usize,
    hit: usize,
    prompt: usize,
    miss: String,
}

impl CacheNotes {
    fn new(plans: &[Plan]) -> Self {
        let firsts =
            plans.iter().scan(0, |next, plan| Some(std::mem::replace(next, *next + plan.n))).collect();
        Self { firsts, noted: 0, hit: 0, prompt: 0, miss: String::new() }
    }

    /// Looks at the prompts that have left the queue since the last time; they do so in order.
    fn look(&mut self, app: &App, client: &Client, generation: &mut Generation, track: &mut Track) {
        while let Some(first) = self.firsts.get(self.noted)
            && let Some(decoder) = generation.decoder(*first).filter(|d| d.admitted())
        {
            self.noted += 1;
            let usage = decoder.running().usage;
            self.hit += usage.cached;
            self.prompt += usage.prompt;
            if let Some(miss) = decoder.miss() {
                let habit = app.remember_miss(client.key, &client.request_id, usage, miss);
                track.missed(miss, habit);
                self.miss = format!("; reason={}; shared={}", cause(miss.cause), miss.shared);
                if let Some(habit) = habit {
                    self.miss += &format!("; habit={}", habit.name());
                }
            }
        }
    }

    /// Writes the header. That of a batch has the sums of the prompts that are known, and how many those are.
    fn tell(&self, headers: &mut HeaderMap) {
        let more = match self.firsts.len() {
            1 => self.miss.clone(),
            all => format!("; prompts={}/{all}", self.noted),
        };
        if let Ok(value) = HeaderValue::from_str(&format!("hit={}/{}{more}", self.hit, self.prompt)) {
            headers.insert("x-infernix-cache", value);
        }
    }
}

/// Names ignored fields to the client.
fn add_ignored(headers: &mut HeaderMap, ignored: &[String]) {
    if ignored.is_empty() {
        return;
    }
    let mut names: Vec<&str> = ignored.iter().map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    let text: String = names
        .join(", ")
        .chars()
        .map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' })
        .take(MAX_IGNORED)
        .collect();
    if let Ok(value) = HeaderValue::from_str(&text) {
        headers.insert("x-infernix-ignored", value);
    }
}

/// A JSON response.
pub(super) fn json_response(value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A JSON response that names ignored fields.
pub(super) fn json_ignoring(value: &Value, ignored: &[String]) -> Response {
    let mut response = json_response(value);
    add_ignored(response.headers_mut(), ignored);
    response
}

/// Reads a body, checks that requests are taken, and prepares it away from the connections.
pub(super) async fn prepared<T: Send + 'static>(
    app: &Arc<App>,
    headers: &HeaderMap,
    body: Body,
    work: impl FnOnce(&App, Value) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let value = body::json(app, headers, body).await?;
    if let Some(why) = app.unready() {
        return Err(ApiError::unavailable(why));
    }
    let app = Arc::clone(app);
    body::off_thread(move || work(&app, value)).await
}
