//! `infernix ppl`: perplexity of one engine over windows of texts.

use super::engine::{Needs, Task, with_needs};
use super::kld::describe;
use super::model::{OpenModel, refuse_idle};
use super::reports::{self, Form};
use crate::args::{Given, PplArgs, ProgressMode};
use crate::output::{self, usage};
use crate::progress::Steps;
use crate::{INTERRUPTED, Outcome};
use infernix_engine::backend::Backend;
use infernix_engine::driver::Driver;
use infernix_engine::model::{ArtifactSource, WeightSource as _};
use infernix_measure::corpus::{Corpus, TextStream};
use infernix_measure::{DriverSource, PplOptions, PplReport, TokenStream, ppl};
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) fn run(args: &PplArgs, given: &Given, progress: ProgressMode) -> anyhow::Result<Outcome> {
    // `report` makes a page of them.
    reports::check(&args.output, &[Form::Json, Form::Markdown], &[])?;
    if args.context < 2 {
        return Err(usage("--context must be at least 2: a window's first token is not scored"));
    }
    let stride = args.stride.unwrap_or(args.context / 2);
    if stride == 0 || stride >= args.context {
        return Err(usage(format!(
            "--stride {stride} must lie between 1 and --context - 1: windows of {} overlap by at least one token",
            args.context
        )));
    }
    if args.prefill_chunk == 0 {
        return Err(usage("--prefill-chunk must be at least 1"));
    }
    let corpus = match (&args.corpus, &args.text) {
        (Some(manifest), _) => Corpus::load(manifest, if args.quick { "quick" } else { "full" })?,
        (None, Some(file)) => Corpus::custom(file)?,
        (None, None) => {
            output::note(
                "text: this project's documentation; published figures use other texts (docs/ppl.md)",
            );
            Corpus::documentation()
        }
    };
    let open = OpenModel::new(&args.model, progress)?;
    refuse_idle(given, open.backend)?;
    let format = open.chat_format()?;
    let tokenizer = format.tokenizer();
    let source = ArtifactSource::new(Arc::clone(&open.artifact))?;
    let (vocab, limit) = (source.config().vocab as usize, source.config().max_positions as usize);
    if args.context > limit {
        return Err(usage(format!("--context {}, the model reads up to {limit} tokens", args.context)));
    }
    let stream = |s: TextStream| -> anyhow::Result<TokenStream> {
        Ok(TokenStream { tokens: tokenizer.encode(&s.text)?, id: s.id, domain: s.domain, path: s.path })
    };
    let options = PplOptions {
        corpus: corpus.id,
        mode: corpus.mode,
        context: args.context,
        stride,
        valid_vocab: (tokenizer.addressable() as usize).min(vocab),
    };
    let streams = corpus.streams.into_iter().map(stream).collect::<anyhow::Result<Vec<_>>>()?;
    let (_, description) = describe(&open, &source, false);
    let job = Job { args, progress, options, streams, description };
    with_needs(&open, Needs::tokens(args.context), job)
}

struct Job<'a> {
    args: &'a PplArgs,
    progress: ProgressMode,
    options: PplOptions,
    streams: Vec<TokenStream>,
    description: Value,
}

impl Task for Job<'_> {
    fn run<B: Backend>(self, driver: &mut Driver<B>) -> anyhow::Result<Outcome> {
        let total: usize = self.streams.iter().map(|s| s.tokens.len().saturating_sub(1)).sum();
        let mut steps = Steps::new(self.progress, total as u64);
        let mut show = |p: &infernix_measure::PplProgress| {
            let rate = p.done as f64 / p.seconds.max(1e-9);
            let text = format!("PPL {:.4}, {rate:.0} tok/s", p.ppl);
            steps.at(p.done as u64, p.total as u64, &text, || {
                json!({ "phase": "ppl", "tokens": p.done, "total_tokens": p.total, "ppl": p.ppl, "seconds": p.seconds })
            });
        };
        let mut source = DriverSource::new(driver, self.description).call_tokens(self.args.prefill_chunk);
        let report = ppl(&self.options, &mut source, &self.streams, &mut show, &INTERRUPTED)?;
        drop(steps);
        print(self.args, &report)
    }
}

fn print(args: &PplArgs, report: &PplReport) -> anyhow::Result<Outcome> {
    if args.json.json {
        output::print_json(&report.to_json())?;
    } else {
        output::print(&report.to_text())?;
    }
    reports::write(&args.output, |_, form| {
        Ok(match form {
            Form::Json => format!("{:#}\n", report.to_json()),
            _ => report.to_markdown(),
        })
    })?;
    Ok(Outcome::Done)
}
