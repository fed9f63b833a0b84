//! `/v1/decide`: questions about a piece of evidence, answered with probabilities instead of text.
//!
//! Yes or no, a choice and a score are read from the log-probabilities of one-token labels at the end of the
//! prompt; nothing is generated. Numbers are generated along a fixed schedule of allowed tokens, and each free
//! step's probabilities give the uncertainty. The evidence leads every prompt, so that the first question pays
//! for it and the others find it in the prefix cache.

mod prompt;
mod question;
mod read;
mod schedule;

use crate::app::App;
use crate::decode::failure;
use crate::error::{ApiError, QUEUE_TIMEOUT};
use crate::generate::refusal;
use crate::ids;
use crate::piece::TokenUsage;
use infernix_engine::sample::SamplerOptions;
use infernix_engine::sched::{
    CacheHints, Constraint, EngineApi, Event, Finish, Request, RequestError, RequestId, Sampled,
};
use infernix_text::ChatFormat;
use question::{Decide, Kind, Question, State};
use schedule::{Form, Schedule, Symbols};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Who asks, for what prompts may share.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asker {
    /// Prompts share cached prefixes only under the same salt.
    pub(crate) salt: String,
    /// The conversation, if a header names one.
    pub(crate) session: Option<String>,
}

/// A request that is ready to run.
pub(crate) struct Prepared {
    /// Questions in order, each with what is asked of the engine or why it cannot be asked.
    questions: Vec<(Question, Result<Task, ApiError>)>,
}

/// Checks a request body and renders its prompts; with them its cache salt and the fields that were ignored.
///
/// # Errors
/// Whatever is wrong with any question: nothing runs then.
pub(crate) fn prepare(app: &App, body: Value) -> Result<(Prepared, Option<String>, Vec<String>), ApiError> {
    let mut request = question::parse(body)?;
    app.check_model(request.model.as_deref())?;
    let (salt, ignored) = (request.salt.take(), std::mem::take(&mut request.ignored));
    Ok((plan(&app.format, request)?, salt, ignored))
}

/// Answers a prepared request and counts what that took.
///
/// # Errors
/// The first question's error, where no question could be answered.
pub(crate) async fn run(
    app: &App,
    prepared: Prepared,
    asker: &Asker,
    usage: &mut TokenUsage,
) -> Result<Value, ApiError> {
    let (answers, usage) = answer(&app.engine, &app.format, prepared, asker, usage).await?;
    Ok(json!({"model": app.model.id, "answers": answers, "usage": usage}))
}

/// What is asked of the engine for one question.
struct Task {
    ids: Vec<u32>,
    read: Read,
}

/// How an answer is read.
enum Read {
    /// Log-probabilities of these labels.
    Labels(Vec<u32>),
    /// A number along a schedule.
    Number(Arc<Symbols>, Form),
}

fn plan(format: &ChatFormat, request: Decide) -> Result<Prepared, ApiError> {
    let Decide { state, images, questions, .. } = request;
    let questions = questions
        .into_iter()
        .map(|question| Ok((task(format, &state, images, &question)?, question)))
        .map(|result| result.map(|(task, question)| (question, task)))
        .collect::<Result<_, ApiError>>()?;
    Ok(Prepared { questions })
}

/// Answers and usage.
async fn answer(
    engine: &Arc<dyn EngineApi>,
    format: &ChatFormat,
    prepared: Prepared,
    asker: &Asker,
    usage: &mut TokenUsage,
) -> Result<(Value, Value), ApiError> {
    let marker =
        shared_prefix(prepared.questions.iter().filter_map(|(_, t)| Some(t.as_ref().ok()?.ids.as_slice())));
    let lanes = engine.status().max_lanes.max(1);
    let mut outcomes: Vec<Option<Result<Value, ApiError>>> = Vec::new();
    let mut waiting = Vec::new();
    let mut ids = Vec::with_capacity(prepared.questions.len());
    for (question, task) in prepared.questions {
        ids.push(question.id.clone());
        match task {
            Ok(task) => {
                waiting.push((outcomes.len(), task, question));
                outcomes.push(None);
            }
            Err(error) => outcomes.push(Some(Err(error))),
        }
    }
    // The first question brings the evidence into the cache, the others follow as the lanes allow.
    let mut waiting = waiting.into_iter().peekable();
    let (mut wave, mut joins) = (1, false);
    while waiting.peek().is_some() {
        let mut running = Vec::new();
        for (at, task, question) in waiting.by_ref().take(wave) {
            let run = Run::start(engine, &task, marker, asker, joins);
            // Once the engine has taken a question, the others belong to it.
            joins |= run.is_ok();
            running.push((at, question, run, task.read));
        }
        let mut late = None;
        for (at, question, run, read) in running {
            let outcome = match run {
                Ok(run) => run.finish(format, &question, &read, usage).await,
                Err(error) => Err(error),
            };
            late = late.or(outcome.as_ref().err().filter(|e| e.code == QUEUE_TIMEOUT).cloned());
            outcomes[at] = Some(outcome);
        }
        if let Some(error) = late {
            // The others have waited as long.
            for (at, ..) in waiting.by_ref() {
                outcomes[at] = Some(Err(error.clone()));
            }
        }
        wave = lanes;
    }
    let mut answers = Map::new();
    let mut first_error = None;
    let mut answered = false;
    for (id, outcome) in ids.into_iter().zip(outcomes) {
        let value = match outcome {
            Some(Ok(value)) => {
                answered = true;
                value
            }
            Some(Err(error)) => {
                let value = json!({"type": "error", "code": error.code, "message": error.message});
                first_error.get_or_insert(error);
                value
            }
            None => continue,
        };
        answers.insert(id, value);
    }
    if let (false, Some(error)) = (answered, first_error) {
        return Err(error);
    }
    let usage = json!({
        "input_tokens": usage.prompt, "output_tokens": usage.output, "cached_input_tokens": usage.cached,
        "computed_prefill_tokens": usage.prompt.saturating_sub(usage.cached),
    });
    Ok((Value::Object(answers), usage))
}

/// What the question needs of the engine; the inner error is the question's own.
fn task(
    format: &ChatFormat,
    state: &State,
    images: usize,
    question: &Question,
) -> Result<Result<Task, ApiError>, ApiError> {
    let tokenizer = format.tokenizer();
    let (read, letters) = match &question.kind {
        Kind::Point { .. } | Kind::Box { .. } => {
            return Ok(Err(question.error(
                "spatial_needs_one_image",
                format!("exactly one image is needed in state, found {images}"),
            )));
        }
        Kind::Number { digits } => {
            (Read::Number(Symbols::of(tokenizer)?, Form::Number { digits: *digits }), vec![])
        }
        Kind::Scalar { digits } => {
            (Read::Number(Symbols::of(tokenizer)?, Form::Scalar { digits: *digits }), vec![])
        }
        Kind::Noul { .. } | Kind::Choice { .. } | Kind::Score { .. } => {
            let count = question.kind.options().len();
            match prompt::labels(tokenizer, count) {
                Some(labels) => {
                    let (letters, ids) = labels.into_iter().unzip();
                    (Read::Labels(ids), letters)
                }
                None => {
                    return Ok(Err(question.error(
                        "too_many_options",
                        format!("the vocabulary has fewer than {count} labels of one token"),
                    )));
                }
            }
        }
    };
    let mut ids = prompt::render(format, state, question, &letters)?;
    if let Read::Number(symbols, form) = &read {
        ids.extend_from_slice(symbols.lead(*form));
    }
    Ok(Ok(Task { ids, read }))
}

/// Tokens that all prompts begin with.
fn shared_prefix<'t>(mut prompts: impl Iterator<Item = &'t [u32]>) -> usize {
    let Some(first) = prompts.next() else { return 0 };
    let mut shared = first.len();
    let mut others = 0;
    for prompt in prompts {
        shared = first[..shared].iter().zip(prompt).take_while(|(a, b)| a == b).count();
        others += 1;
    }
    if others == 0 { 0 } else { shared }
}

/// One question at the engine. Dropping it cancels the request.
struct Run {
    engine: Arc<dyn EngineApi>,
    id: RequestId,
    events: UnboundedReceiver<Event>,
    ended: bool,
}

impl Run {
    fn start(
        engine: &Arc<dyn EngineApi>,
        task: &Task,
        marker: usize,
        asker: &Asker,
        joins: bool,
    ) -> Result<Self, ApiError> {
        let (to, events) = unbounded_channel();
        let (max_tokens, watch, constraint): (usize, Vec<u32>, Option<Box<dyn Constraint>>) = match &task.read
        {
            Read::Labels(ids) => (1, ids.clone(), None),
            Read::Number(symbols, form) => (
                form.steps(),
                symbols.watched().to_vec(),
                Some(Box::new(Schedule::new(Arc::clone(symbols), *form))),
            ),
        };
        let request = Request {
            prompt: task.ids.clone(),
            sampling: SamplerOptions { temperature: 0.0, seed: ids::seed(), ..SamplerOptions::default() },
            max_tokens,
            watch,
            logprobs: Some(0),
            constraint,
            cache: CacheHints {
                salt: asker.salt.clone(),
                markers: (marker > 0).then_some(marker).into_iter().collect(),
                session: asker.session.clone(),
                ..CacheHints::default()
            },
            joins,
            ..Request::default()
        };
        let sink = Box::new(move |event| {
            let _ = to.send(event);
        });
        let id = engine.submit(request, sink).map_err(refusal)?;
        Ok(Self { engine: Arc::clone(engine), id, events, ended: false })
    }

    async fn finish(
        mut self,
        format: &ChatFormat,
        question: &Question,
        read: &Read,
        total: &mut TokenUsage,
    ) -> Result<Value, ApiError> {
        let mut tokens: Vec<Sampled> = Vec::new();
        let reason = loop {
            match self.events.recv().await {
                Some(Event::Tokens(more)) => tokens.extend(more),
                Some(Event::Finished { reason, usage, .. }) => {
                    total.prompt += usage.prompt;
                    total.cached += usage.cached;
                    if matches!(read, Read::Number(..)) {
                        total.output += tokens.len();
                    }
                    break reason;
                }
                Some(Event::Failed(error)) => {
                    self.ended = true;
                    return Err(match error {
                        RequestError::Engine(_) | RequestError::Constraint(_) => {
                            ApiError { status: 500, ..question.error("engine_error", error.to_string()) }
                        }
                        // Of the server's state, whatever the question is.
                        RequestError::QueueTimeout(_)
                        | RequestError::OutOfMemory(_)
                        | RequestError::Stopped(_) => failure(&error),
                    });
                }
                Some(_) => {}
                None => {
                    self.ended = true;
                    return Err(ApiError::internal("the engine dropped the request"));
                }
            }
        };
        self.ended = true;
        match read {
            Read::Labels(_) => match tokens.first() {
                Some(token) => read::labels(question, &token.watched),
                None => {
                    Err(question.error("run_cut_short", "the request ended before it was answered".into()))
                }
            },
            Read::Number(symbols, form) => {
                let whole = !matches!(reason, Finish::Cancelled | Finish::Deadline);
                read::number(question, symbols, *form, format.tokenizer(), &tokens, whole)
            }
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if !self.ended {
            self.engine.cancel(self.id);
        }
    }
}

#[cfg(test)]
mod tests;
