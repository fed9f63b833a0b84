//! `infernix logits`: a model's logits over given token ids, as a safetensors file.

use super::engine::{Task, with_driver_fp32};
use super::model::{BackendKind, OpenModel};
use crate::Outcome;
use crate::args::{Boundaries, LogitsArgs, ProgressMode};
use crate::output::{self, usage};
use anyhow::{Context as _, bail};
use infernix_engine::backend::Backend;
use infernix_engine::driver::{Driver, Want};
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::Range;

pub(crate) fn run(args: &LogitsArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    if args.output.exists() {
        bail!("{} exists; nothing is overwritten", args.output.display());
    }
    let document = super::files::read_json(&args.tokens)?;
    let ids: Vec<u32> = serde_json::from_value(document)
        .with_context(|| format!("{}: expected a JSON list of token ids", args.tokens.display()))?;
    if ids.is_empty() {
        bail!("{} holds no token", args.tokens.display());
    }
    let positions = positions(args.positions.as_deref(), ids.len())?;
    if args.prefill_chunk == 0 {
        return Err(usage("--prefill-chunk must be at least 1"));
    }
    let open = OpenModel::new(&args.model, progress)?;
    let fp32 = args.boundaries == Boundaries::Fp32;
    if fp32 && open.backend != BackendKind::Lossless {
        return Err(usage("--boundaries fp32 needs --backend lossless"));
    }
    let tokens = ids.len();
    with_driver_fp32(&open, tokens, fp32, LogitsTask { args, ids, positions })
}

fn positions(text: Option<&str>, tokens: usize) -> anyhow::Result<Range<usize>> {
    let Some(text) = text else { return Ok(0..tokens) };
    let wrong = || usage(format!("--positions takes A..B within 0..{tokens}, not {text:?}"));
    let (a, b) = text.split_once("..").ok_or_else(wrong)?;
    let begin = if a.is_empty() { 0 } else { a.parse().map_err(|_| wrong())? };
    let end = if b.is_empty() { tokens } else { b.parse().map_err(|_| wrong())? };
    if begin >= end || end > tokens {
        return Err(wrong());
    }
    Ok(begin..end)
}

struct LogitsTask<'a> {
    args: &'a LogitsArgs,
    ids: Vec<u32>,
    positions: Range<usize>,
}

impl Task for LogitsTask<'_> {
    fn run<B: Backend>(self, driver: &mut Driver<B>) -> anyhow::Result<Outcome> {
        let vocab = driver.model.config.vocab as usize;
        let rows = self.positions.len();
        // The header comes first, so that rows stream out as they are made.
        let sizes = [rows * vocab * 4, rows * 4, self.ids.len() * 4];
        let ends = [sizes[0], sizes[0] + sizes[1], sizes[0] + sizes[1] + sizes[2]];
        let mut header = json!({
            "logits": { "dtype": "F32", "shape": [rows, vocab], "data_offsets": [0, ends[0]] },
            "positions": { "dtype": "I32", "shape": [rows], "data_offsets": [ends[0], ends[1]] },
            "input_ids": { "dtype": "I32", "shape": [self.ids.len()], "data_offsets": [ends[1], ends[2]] },
        })
        .to_string();
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let path = &self.args.output;
        let file = File::create_new(path).with_context(|| format!("{} cannot be created", path.display()))?;
        let written = self.write(driver, file, &header);
        if written.is_err() {
            let _ = std::fs::remove_file(path);
        }
        written.with_context(|| format!("{} is incomplete and was removed", path.display()))?;
        output::note(&format!("wrote {} rows of {vocab} to {}", rows, path.display()));
        Ok(Outcome::Done)
    }
}

impl LogitsTask<'_> {
    fn write<B: Backend>(&self, driver: &mut Driver<B>, file: File, header: &str) -> anyhow::Result<()> {
        let mut out = BufWriter::new(file);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        let mut sequence = driver.open(0)?;
        let mut done = 0;
        for chunk in self.ids.chunks(self.args.prefill_chunk) {
            if crate::INTERRUPTED.load(std::sync::atomic::Ordering::Relaxed) {
                bail!("interrupted");
            }
            let here = done..done + chunk.len();
            let wanted = here.start < self.positions.end && self.positions.start < here.end;
            let result = driver.prefill(&mut sequence, chunk, if wanted { Want::All } else { Want::None })?;
            for (row, position) in result.logits.iter().zip(here.clone()) {
                if self.positions.contains(&position) {
                    row.iter().try_for_each(|l| out.write_all(&l.to_le_bytes()))?;
                }
            }
            done = here.end;
        }
        driver.close(sequence);
        for position in self.positions.clone() {
            out.write_all(&i32::try_from(position)?.to_le_bytes())?;
        }
        for &id in &self.ids {
            out.write_all(&i32::try_from(id)?.to_le_bytes())?;
        }
        out.into_inner()?.sync_all()?;
        Ok(())
    }
}
