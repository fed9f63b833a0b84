//! `infernix logits`: a model's logits over given token ids, and what its layers did, as a safetensors file.

use super::engine::{Needs, Task, with_needs};
use super::model::{BackendKind, OpenModel};
use crate::Outcome;
use crate::args::{Boundaries, LogitsArgs, ProgressMode};
use crate::output::{self, usage};
use anyhow::{Context as _, bail};
use infernix_engine::backend::Backend;
use infernix_engine::driver::{Driver, LayerRecord, Want};
use infernix_model::{Ffn, LayerKind, ModelConfig};
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::Range;

pub(crate) fn run(args: &LogitsArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    if args.output.exists() {
        bail!("{} exists; nothing is overwritten", args.output.display());
    }
    if args.output.as_os_str() == "-" {
        return Err(usage("logits are written to a file, not to standard output"));
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
    let limit = super::run::context_limit(&open)?;
    if ids.len() > limit {
        bail!("{} holds {} tokens, the model's context {limit}", args.tokens.display(), ids.len());
    }
    let needs = Needs { fp32, ..Needs::tokens(ids.len()) };
    with_needs(&open, needs, LogitsTask { args, ids, positions })
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

/// One tensor of the file.
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    /// Bytes, for tensors that are written after the logits.
    data: Vec<u8>,
}

impl Tensor {
    fn new(name: impl Into<String>, dtype: &'static str, shape: &[usize]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec(), data: Vec::new() }
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * if self.dtype == "I64" { 8 } else { 4 }
    }

    fn i32s(&mut self, values: impl IntoIterator<Item = i32>) {
        self.data.extend(values.into_iter().flat_map(i32::to_le_bytes));
    }

    fn f32s(&mut self, values: impl IntoIterator<Item = f32>) {
        self.data.extend(values.into_iter().flat_map(f32::to_le_bytes));
    }
}

/// The tensors of one layer.
struct LayerTensors {
    out: Tensor,
    experts: Option<(Tensor, Tensor)>,
    blocks: Option<Tensor>,
    rows: Option<Tensor>,
}

impl LayerTensors {
    fn new(config: &ModelConfig, layer: usize, positions: usize) -> Self {
        let name = |what: &str| format!("layer.{layer}.{what}");
        let experts = match &config.ffn {
            Ffn::Moe(moe) => {
                let shape = [positions, moe.top_k as usize];
                Some((
                    Tensor::new(name("experts"), "I32", &shape),
                    Tensor::new(name("expert_weights"), "F32", &shape),
                ))
            }
            Ffn::Dense { .. } => None,
        };
        let sparse = config.qsa.as_ref().filter(|_| config.layers[layer] == LayerKind::Attention);
        let ple = config.ple.as_ref().filter(|_| config.ple_table(layer).is_some());
        Self {
            out: Tensor::new(name("out"), "F32", &[positions, config.residual_width() as usize]),
            experts,
            blocks: sparse.map(|q| Tensor::new(name("qsa_blocks"), "I32", &[positions, q.blocks() as usize])),
            rows: ple.map(|p| Tensor::new(name("ple_rows"), "I64", &[positions, p.heads() as usize])),
        }
    }

    /// Takes rows `rows` of a call's record.
    fn add(&mut self, record: &LayerRecord, rows: Range<usize>) {
        let width = self.out.shape[1];
        self.out.f32s(record.residual[rows.start * width..rows.end * width].iter().copied());
        if let (Some((ids, weights)), Some(chosen)) = (&mut self.experts, &record.trace.experts) {
            for row in &chosen[rows.clone()] {
                ids.i32s(row.iter().map(|e| e.0 as i32));
                weights.f32s(row.iter().map(|e| e.1));
            }
        }
        if let Some(tensor) = &mut self.blocks {
            let most = tensor.shape[1];
            for row in rows.clone() {
                // A row that attends to everything selects no block.
                let chosen = record.trace.blocks.as_ref().and_then(|b| b[row].as_deref()).unwrap_or_default();
                let padding = most.saturating_sub(chosen.len());
                tensor.i32s(chosen.iter().map(|&b| b as i32).chain(std::iter::repeat_n(-1, padding)));
            }
        }
        if let (Some(tensor), Some(ids)) = (&mut self.rows, &record.ngram_rows) {
            let heads = tensor.shape[1];
            let taken = &ids[rows.start * heads..rows.end * heads];
            tensor.data.extend(taken.iter().flat_map(|&id| (id as i64).to_le_bytes()));
        }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let experts = self.experts.iter().flat_map(|(a, b)| [a, b]);
        std::iter::once(&self.out).chain(experts).chain(&self.blocks).chain(&self.rows)
    }
}

impl Task for LogitsTask<'_> {
    fn run<B: Backend>(self, driver: &mut Driver<B>) -> anyhow::Result<Outcome> {
        let config = &driver.model.config;
        let (vocab, rows) = (config.vocab as usize, self.positions.len());
        if let Some(i) = self.ids.iter().position(|&id| id as usize >= vocab) {
            bail!("{}: token {i} is {}, the vocabulary has {vocab}", self.args.tokens.display(), self.ids[i]);
        }
        let logits = Tensor::new("logits", "F32", &[rows, vocab]);
        let mut positions = Tensor::new("positions", "I32", &[rows]);
        for position in self.positions.clone() {
            positions.i32s([i32::try_from(position)?]);
        }
        let mut input_ids = Tensor::new("input_ids", "I32", &[self.ids.len()]);
        input_ids.i32s(self.ids.iter().map(|&id| id as i32));
        let count = if self.args.layers { config.layers.len() } else { 0 };
        let mut layers: Vec<_> = (0..count).map(|i| LayerTensors::new(config, i, rows)).collect();
        let path = &self.args.output;
        // Under another name until it is whole, so that a killed run leaves nothing that looks like a result.
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let file = File::create(&partial).with_context(|| format!("{} cannot be created", path.display()))?;
        let written = self.write(driver, file, &logits, &[positions, input_ids], &mut layers);
        let written = written.and_then(|()| Ok(std::fs::rename(&partial, path)?));
        if written.is_err() {
            let _ = std::fs::remove_file(&partial);
        }
        written.with_context(|| format!("{} is incomplete and was removed", path.display()))?;
        output::note(&format!("wrote {rows} rows of {vocab} to {}", path.display()));
        Ok(Outcome::Done)
    }
}

impl LogitsTask<'_> {
    /// Header, then the logits as they are made, then everything else.
    fn write<B: Backend>(
        &self,
        driver: &mut Driver<B>,
        file: File,
        logits: &Tensor,
        small: &[Tensor],
        layers: &mut [LayerTensors],
    ) -> anyhow::Result<()> {
        let mut out = BufWriter::new(file);
        let header =
            header(std::iter::once(logits).chain(small).chain(layers.iter().flat_map(LayerTensors::tensors)));
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        let mut sequence = driver.open(0)?;
        let mut done = 0;
        for chunk in self.ids.chunks(self.args.prefill_chunk) {
            if crate::INTERRUPTED.load(std::sync::atomic::Ordering::Relaxed) {
                bail!("interrupted");
            }
            let first = self.positions.start.clamp(done, done + chunk.len()) - done;
            let last = self.positions.end.clamp(done, done + chunk.len()) - done;
            driver.record = (!layers.is_empty()).then(Vec::new);
            let want = if first < last { Want::All } else { Want::None };
            let result = driver.prefill(&mut sequence, chunk, want)?;
            if first < last {
                for row in &result.logits[first..last] {
                    row.iter().try_for_each(|l| out.write_all(&l.to_le_bytes()))?;
                }
                let records = driver.record.take().unwrap_or_default();
                layers.iter_mut().zip(&records).for_each(|(layer, record)| layer.add(record, first..last));
            }
            done += chunk.len();
        }
        driver.close(sequence);
        for tensor in small.iter().chain(layers.iter().flat_map(LayerTensors::tensors)) {
            out.write_all(&tensor.data)?;
        }
        out.into_inner()?.sync_all()?;
        Ok(())
    }
}

/// The safetensors header of tensors in this order, padded to 8 bytes.
fn header<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> String {
    let mut entries = serde_json::Map::new();
    let mut begin = 0;
    for t in tensors {
        let end = begin + t.bytes();
        let entry = json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, end] });
        entries.insert(t.name.clone(), entry);
        begin = end;
    }
    let mut header = serde_json::Value::Object(entries).to_string();
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    header
}
