//! `infernix bench` through the engine's scheduler: `--concurrency`, `--spec` and constraints.

use super::{Found, Weights, finish, report, settings, synthetic_geometry};
use crate::args::{BenchArgs, ConstraintArgs, Spec};
use crate::commands::engine::{draft_tokens, spare_foreign_trace, spare_the_model, start_engine};
use crate::commands::files::read_json;
use crate::commands::model::BackendKind;
use crate::output::usage;
use crate::{INTERRUPTED, Outcome};
use anyhow::{Context as _, bail};
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::driver::{Driver, DriverOptions};
use infernix_engine::model::{LoadOptions, MemorySource, WeightSource as _, load};
use infernix_engine::sched::{
    CacheOptions, Constraint, Drain, Engine, EngineApi as _, EngineOptions, SpecOptions,
};
use infernix_measure::bench::render::{Scheduled, Subject};
use infernix_measure::bench::streams::{Streams, measure_streams};
use infernix_measure::bench::{Ids, Test};
use infernix_measure::corpus::default_text;
use infernix_text::grammar::{Answer, Grammar, GrammarCompiler, Guide, GuideOptions};
use infernix_text::{ChatFormat, Start};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Whether a flag needs the scheduler.
pub(super) fn asked(args: &BenchArgs) -> bool {
    args.concurrency.is_some()
        || args.spec.is_some()
        || args.record_trace.is_some()
        || answer(&args.constraint).is_some()
}

/// Runs all tests and prints the report.
pub(super) fn run(
    args: &BenchArgs,
    tests: Vec<Test>,
    found: Found,
    subject: &mut Subject,
    clock: Instant,
) -> anyhow::Result<Outcome> {
    if let Some(t) = tests.iter().find(|t| t.depth > 0 && t.prompt > 0) {
        return Err(usage(format!(
            "{}: through the scheduler only generation is measured at a depth; leave out -p and -pg, or --concurrency, \
             --spec and constraints",
            t.label()
        )));
    }
    if let Some(open) = &found.open {
        spare_the_model("--record-trace", args.record_trace.as_deref(), open)?;
    }
    spare_foreign_trace(args.record_trace.as_deref())?;
    let count = args.concurrency.unwrap_or(1) as usize;
    let spec = args.spec.unwrap_or(Spec::Off);
    let format = found.open.as_ref().map(|o| o.chat_format()).transpose()?;
    let held = held(&args.constraint, format.as_ref())?;
    subject.scheduled = Some(Scheduled {
        concurrency: count,
        spec: match spec {
            Spec::Auto => "auto",
            Spec::Off => "off",
            Spec::Mtp => "mtp",
        }
        .into(),
        constraint: held.as_ref().map(|h| h.what.clone()),
    });
    // Text of the documentation, since what drafts gain depends on the text; synthetic weights know none.
    let vocabulary = found.source.as_source().config().vocab;
    let mut random = Ids::new(args.seed, vocabulary);
    let text = match &format {
        Some(f) => f.tokenizer().encode(&default_text())?,
        None => Vec::new(),
    };
    let mut at = args.seed as usize;
    let mut prompt = |n: usize| -> Vec<u32> {
        if text.is_empty() {
            return random.take(n);
        }
        let piece: Vec<u32> = text.iter().cycle().skip(at % text.len()).take(n).copied().collect();
        // A step that shares no factor with most lengths: every prompt begins elsewhere.
        at = (at + 7919) % text.len();
        piece
    };
    let engine = start(args, found, &tests, count, spec, format.as_ref())?;
    subject.load_seconds = clock.elapsed().as_secs_f64();
    let go_on = || !INTERRUPTED.load(Ordering::Relaxed);
    let make = |h: &Held| -> Box<dyn Constraint> { Box::new(Follow(h.grammar.guide(h.guide.clone()))) };
    let made = held.as_ref().map(|h| move || make(h));
    let streams = Streams { count, constraint: made.as_ref().map(|m| m as _) };
    let settings = settings(args);
    let mut measured = Vec::new();
    let mut failure = None;
    for test in &tests {
        match measure_streams(&engine, *test, settings, &streams, &mut prompt, &go_on) {
            Ok(Some(m)) => measured.push(m),
            Ok(None) => failure = Some(anyhow::anyhow!("interrupted")),
            Err(e) => failure = Some(e.into()),
        }
        if failure.is_some() {
            break;
        }
    }
    engine.shutdown(Drain::Now);
    if let Some(problem) = engine.stop_problem() {
        crate::output::warn(&problem);
    }
    finish(failure, &measured, || report(args, subject, settings, &measured, &[], None))
}

fn start(
    args: &BenchArgs,
    found: Found,
    tests: &[Test],
    count: usize,
    spec: Spec,
    format: Option<&ChatFormat>,
) -> anyhow::Result<Engine> {
    // Room for a draft past the end, in whole pages of 64.
    let room = tests.iter().map(|t| t.room() + 2).max().unwrap_or(0);
    let context = (room + 64).next_multiple_of(64);
    let options = EngineOptions {
        max_concurrency: count,
        max_pending_requests: count,
        prefill_chunk: args.prefill_chunk,
        max_context: context,
        addressable: format.map_or(usize::MAX, |f| f.tokenizer().addressable() as usize),
        // Every repetition is to be computed.
        cache: CacheOptions { enabled: false, ..CacheOptions::default() },
        spec: SpecOptions {
            mode: spec.into(),
            draft_tokens: draft_tokens(args.draft_tokens)?,
            ..SpecOptions::default()
        },
        record_trace: args.record_trace.clone(),
        ..EngineOptions::default()
    };
    let tokens = context * count;
    let Found { source, open, backend, activations, kv, threads, threads_batch, .. } = found;
    match (source, open) {
        (Weights::Stored(_), Some(open)) => start_engine(&open, tokens, options),
        (Weights::Synthetic(source), _) => {
            if backend != BackendKind::Cpu {
                return Err(usage("synthetic models run through the scheduler on the CPU only"));
            }
            if spec == Spec::Mtp && !has_drafter(&source) {
                return Err(usage("--spec mtp: the synthetic model has no drafter"));
            }
            let cpu = CpuOptions { threads, threads_batch, isa: None };
            let (geometry, folder) = (synthetic_geometry(args), args.synthetic_dir.clone());
            let drafter = spec != Spec::Off && has_drafter(&source);
            let options_load = LoadOptions { activations, drafter, ..LoadOptions::default() };
            Ok(Engine::start(options, move || {
                let model = load(CpuBackend::new(cpu), &source, options_load)?;
                let ngram = geometry
                    .map_or(Ok(None), |g| folder.as_deref().map_or_else(|| g.ngram(), |d| g.ngram_in(d)))?;
                Driver::new(model, ngram, DriverOptions { tokens, sequences: count, kv })
            })?)
        }
        (Weights::Stored(_), None) => bail!("the model is not open"),
    }
}

fn has_drafter(source: &MemorySource) -> bool {
    source.names().iter().any(|n| n.starts_with("mtp/"))
}

/// A compiled constraint.
struct Held {
    what: String,
    grammar: Arc<Grammar>,
    guide: GuideOptions,
}

/// What the flags ask answers to be, and its name in reports.
fn answer(args: &ConstraintArgs) -> Option<&'static str> {
    let given = [
        (args.json_object, "any JSON object"),
        (args.json_schema_file.is_some(), "a JSON schema"),
        (args.grammar_file.is_some(), "a GBNF grammar"),
        (args.regex.is_some(), "a regular expression"),
        (!args.choice.is_empty(), "one of several texts"),
    ];
    given.into_iter().find(|g| g.0).map(|g| g.1)
}

fn held(args: &ConstraintArgs, format: Option<&ChatFormat>) -> anyhow::Result<Option<Held>> {
    let Some(what) = answer(args) else { return Ok(None) };
    let Some(format) = format else {
        return Err(usage("a synthetic model has no tokenizer that answers could be held to"));
    };
    let answer = if args.json_object {
        Answer::JsonObject
    } else if let Some(file) = &args.json_schema_file {
        Answer::Schema(read_json(file)?)
    } else if let Some(file) = &args.grammar_file {
        let text = std::fs::read_to_string(file);
        Answer::Gbnf(text.with_context(|| format!("{}: reading the grammar", file.display()))?)
    } else if let Some(text) = &args.regex {
        Answer::Regex(text.clone())
    } else {
        Answer::Choice(args.choice.clone())
    };
    let compiler = GrammarCompiler::new(Arc::clone(format.tokenizer()), &format.stop_ids());
    let compiled = compiler.and_then(|c| c.compile(Some(&answer), None));
    let grammar = compiled.map_err(|e| usage(format!("the constraint cannot be enforced: {e}")))?;
    // Prompts are plain text, so the answer begins at once.
    let guide = GuideOptions { start: Start::Content, ..GuideOptions::default() };
    Ok(Some(Held { what: what.into(), grammar, guide }))
}

/// A guide as the engine asks for it.
struct Follow(Guide);

impl Constraint for Follow {
    fn mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        self.0.mask(words)
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.0.accept(id)
    }

    fn rollback(&mut self, n: usize) -> Result<(), String> {
        self.0.rollback(n)
    }

    fn accepts(&mut self, ids: &[u32]) -> usize {
        self.0.accepts(ids)
    }

    fn finished(&self) -> bool {
        self.0.finished()
    }
}
