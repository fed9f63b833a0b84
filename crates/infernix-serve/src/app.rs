//! What all requests share.

use crate::access::Keys;
use crate::error::ApiError;
use crate::http::{Client, miss_cause};
use crate::log::RequestLog;
use crate::metrics::Metrics;
use crate::options::{ModelInfo, ServeOptions};
use crate::piece::TokenUsage;
use crate::responses::Store;
use infernix_engine::cache::{Excerpt, Habit, Miss, habit};
use infernix_engine::sched::EngineApi;
use infernix_text::ChatFormat;
use infernix_text::grammar::GrammarCompiler;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Semaphore;

/// The server's state.
pub struct App {
    pub(crate) engine: Arc<dyn EngineApi>,
    pub(crate) format: Arc<ChatFormat>,
    pub(crate) grammars: GrammarCompiler,
    pub(crate) options: ServeOptions,
    pub(crate) model: ModelInfo,
    pub(crate) keys: Keys,
    pub(crate) store: Store,
    pub(crate) metrics: Metrics,
    pub(crate) log: RequestLog,
    pub(crate) started: u64,
    /// KiB of bodies that may still be read.
    pub(crate) bodies: Semaphore,
    /// Requests being answered.
    pub(crate) active: AtomicUsize,
    /// Told to take nothing new for now.
    draining: AtomicBool,
    /// Being stopped, for good.
    stopping: AtomicBool,
    misses: Mutex<VecDeque<(Option<usize>, Value)>>,
}

/// Explained misses kept for `/v1/status`.
const MAX_MISSES: usize = 64;

impl App {
    /// The state of a server over an engine.
    ///
    /// # Errors
    /// The request log cannot be opened, or the vocabulary cannot be prepared for grammars.
    pub fn new(
        engine: Arc<dyn EngineApi>,
        format: Arc<ChatFormat>,
        model: ModelInfo,
        options: ServeOptions,
    ) -> std::io::Result<Arc<Self>> {
        let start = Map::from_iter([
            ("version".to_owned(), Value::from(env!("CARGO_PKG_VERSION"))),
            ("model".to_owned(), model.id.as_str().into()),
            ("context".to_owned(), engine.status().context.into()),
            ("lanes".to_owned(), engine.status().max_lanes.into()),
            ("keys".to_owned(), options.keys.len().into()),
            ("speculation".to_owned(), engine.status().speculation.into()),
        ]);
        Ok(Arc::new(Self {
            keys: Keys::new(&options),
            store: Store::new(options.response_store_records, options.response_store_bytes),
            metrics: Metrics::default(),
            log: RequestLog::open(options.log.clone(), start)?,
            started: crate::ids::now(),
            bodies: Semaphore::new((options.max_bodies_bytes / 1024).max(1)),
            active: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            misses: Mutex::default(),
            grammars: GrammarCompiler::new(Arc::clone(format.tokenizer()), &format.stop_ids())
                .map_err(std::io::Error::other)?,
            engine,
            format,
            options,
            model,
        }))
    }

    /// Whether nothing new is taken: for now, or because the server is being stopped.
    pub(crate) fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed) || self.stopping.load(Ordering::Relaxed)
    }

    /// Takes no new requests while this is set.
    pub(crate) fn set_draining(&self, on: bool) {
        self.draining.store(on, Ordering::Relaxed);
    }

    /// Takes no new requests any more.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Requests being answered.
    #[must_use]
    pub fn active_requests(&self) -> usize {
        self.active.load(Ordering::Relaxed)
    }

    /// Why no request can be taken now.
    pub(crate) fn unready(&self) -> Option<String> {
        if self.stopping.load(Ordering::Relaxed) {
            return Some("the server is stopping".to_owned());
        }
        if self.draining() {
            return Some("the server takes no new requests for now".to_owned());
        }
        self.engine.status().stopped
    }

    /// Counts and logs a request that never started.
    pub(crate) fn reject(&self, client: &Client, route: &'static str, error: &ApiError) {
        self.metrics.rejected(route);
        // Messages may quote the request, so they stay out of logs.
        tracing::info!(
            id = client.request_id,
            route,
            key = client.key.map(|key| self.keys.name(key)),
            status = error.status(client.wire),
            code = error.code,
            "refused"
        );
        let mut fields = Map::from_iter([
            ("id".to_owned(), Value::from(client.request_id.as_str())),
            ("route".to_owned(), route.into()),
            ("status".to_owned(), error.status(client.wire).into()),
            ("code".to_owned(), error.code.into()),
            ("param".to_owned(), json!(error.param.as_deref().map(crate::log::place))),
        ]);
        if let Some(key) = client.key {
            fields.insert("key".to_owned(), self.keys.name(key).into());
        }
        self.log.write("request_rejected", fields);
    }

    /// Keeps the explanation of a miss for the key that caused it, and gives the habit behind it where there is a known one.
    pub(crate) fn remember_miss(
        &self,
        key: Option<usize>,
        request_id: &str,
        usage: TokenUsage,
        miss: &Miss,
    ) -> Option<Habit> {
        let tokenizer = self.format.tokenizer();
        let texts = |e: &Excerpt| e.texts(|id| tokenizer.token_bytes(id).unwrap_or_default());
        let (cached, prompt) = (texts(&miss.cached), texts(&miss.prompt));
        let parted = !cached.1.is_empty() && !prompt.1.is_empty();
        let found = parted.then(|| {
            let (a, b) = (format!("{}{}", cached.0, cached.1), format!("{}{}", prompt.0, prompt.1));
            habit((&a, cached.0.len()), (&b, prompt.0.len()))
        });
        let habit = found.flatten();
        let excerpt = |(same, different): (String, String)| json!({"same": same, "different": different});
        let value = json!({
            "request": request_id, "cause": miss_cause(miss.cause), "prompt_tokens": usage.prompt,
            "shared_tokens": miss.shared, "reused_tokens": miss.reused,
            "habit": habit.map(|h| h.to_string()), "cached": excerpt(cached), "prompt": excerpt(prompt),
        });
        let mut misses = self.misses.lock().unwrap_or_else(PoisonError::into_inner);
        misses.push_back((key, value));
        if misses.len() > MAX_MISSES {
            misses.pop_front();
        }
        habit
    }

    /// The explained misses of a key, the latest first.
    pub(crate) fn misses(&self, key: Option<usize>) -> Vec<Value> {
        let misses = self.misses.lock().unwrap_or_else(PoisonError::into_inner);
        misses.iter().rev().filter(|(owner, _)| *owner == key).map(|(_, v)| v.clone()).collect()
    }

    /// OpenAI routes need the model's own name, or none.
    pub(crate) fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(name) if name != self.model.id => Err(ApiError::at(
                404,
                "model_not_found",
                "model",
                format!(
                    "this server has {}, not {}",
                    self.model.id,
                    crate::error::quoted(&Value::from(name))
                ),
            )),
            _ => Ok(()),
        }
    }

    /// The entry of `/v1/models`.
    pub(crate) fn model_entry(&self) -> Value {
        let context = self.engine.status().context;
        json!({
            "id": self.model.id, "object": "model", "created": self.started, "owned_by": "infernix",
            "max_model_len": context,
            "meta": {
                "n_vocab": self.model.vocabulary, "n_ctx": context, "n_ctx_train": self.model.trained_context,
                "n_embd": self.model.embedding, "n_params": self.model.parameters, "size": self.model.bytes,
                "ftype": self.model.format,
            },
        })
    }
}

/// Counts a request as active while it lives.
pub(crate) struct Active(Arc<App>);

impl Active {
    pub(crate) fn new(app: &Arc<App>) -> Self {
        app.active.fetch_add(1, Ordering::Relaxed);
        app.metrics.started();
        Self(Arc::clone(app))
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::Relaxed);
    }
}
