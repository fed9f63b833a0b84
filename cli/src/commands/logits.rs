//! `infernix logits`: a model's logits over given token ids, and what its layers did, as a safetensors file.

use super::engine::{Needs, Task, with_needs};
use super::model::{BackendKind, OpenModel, refuse_idle};
use crate::Outcome;
use crate::args::{Boundaries, Given, LogitsArgs, ProgressMode};
use crate::output::{self, usage};
use crate::target::{Output, Target};
use anyhow::{Context as _, bail};
use infernix_engine::backend::Backend;
use infernix_engine::driver::{Driver, LayerRecord, Want};
use infernix_model::{Ffn, LayerKind, ModelConfig};
use serde_json::json;
use std::io::{BufWriter, Write};
use std::ops::Range;

pub(crate) fn run(args: &LogitsArgs, given: &Given, progress: ProgressMode) -> anyhow::Result<Outcome> {
    output::check_places(&[&args.output])?;
    if let Ok(Target::File(file)) = Target::of(&args.output)
        && file.symlink_metadata().is_ok()
    {
        bail!("{} exists; nothing is overwritten", args.output.display());
    }
    if args.output.as_os_str() == "-" {
        return Err(usage("logits are written to a file, not to standard output"));
    }
    let texts = texts(args)?;
    if args.prefill_chunk == 0 {
        return Err(usage("--prefill-chunk must be at least 1"));
    }
    let open = OpenModel::new(&args.model, progress)?;
    refuse_idle(given, open.backend)?;
    let fp32 = args.boundaries == Boundaries::Fp32;
    if fp32 && open.backend != BackendKind::Lossless {
        return Err(usage("--boundaries fp32 needs --backend lossless"));
    }
    let longest = texts.iter().map(|t| t.ids.len()).max().unwrap_or(0);
    let limit = super::run::context_limit(&open)?;
    if longest > limit {
        bail!("{} holds {longest} tokens, the model's context {limit}", args.tokens.display());
    }
    let needs = Needs { fp32, ..Needs::tokens(longest) };
    with_needs(&open, needs, LogitsTask { args, texts })
}

/// One list of tokens, read from an empty state.
struct Text {
    ids: Vec<u32>,
    /// Positions to write.
    rows: Range<usize>,
}

fn texts(args: &LogitsArgs) -> anyhow::Result<Vec<Text>> {
    let shown = args.tokens.display();
    let document = super::files::read_json(&args.tokens)?;
    let nested = document.as_array().is_some_and(|a| a.iter().any(serde_json::Value::is_array));
    let lists: Vec<Vec<u32>> = if nested {
        serde_json::from_value(document)
    } else {
        serde_json::from_value(document).map(|ids| vec![ids])
    }
    .with_context(|| format!("{shown}: expected a JSON list of token ids, or a list of such lists"))?;
    let text = |(i, ids): (usize, Vec<u32>)| {
        let which = if nested { format!("{shown}: list {i}") } else { shown.to_string() };
        if ids.is_empty() {
            bail!("{which} holds no token");
        }
        let rows = positions(args.positions.as_deref(), ids.len(), &which)?;
        Ok(Text { ids, rows })
    };
    lists.into_iter().enumerate().map(text).collect()
}

fn positions(text: Option<&str>, tokens: usize, which: &str) -> anyhow::Result<Range<usize>> {
    let Some(text) = text else { return Ok(0..tokens) };
    let wrong = || usage(format!("--positions takes A..B within 0..{tokens} ({which}), not {text:?}"));
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
    texts: Vec<Text>,
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
        let (vocab, rows) = (config.vocab as usize, self.texts.iter().map(|t| t.rows.len()).sum());
        for (i, text) in self.texts.iter().enumerate() {
            if let Some(at) = text.ids.iter().position(|&id| id as usize >= vocab) {
                let (shown, id) = (self.args.tokens.display(), text.ids[at]);
                bail!("{shown}: token {at} of list {i} is {id}, the vocabulary has {vocab}");
            }
        }
        let logits = Tensor::new("logits", "F32", &[rows, vocab]);
        let mut positions = Tensor::new("positions", "I32", &[rows]);
        let mut input_ids = Tensor::new("input_ids", "I32", &[self.texts.iter().map(|t| t.ids.len()).sum()]);
        // Positions count through all lists, as `input_ids` holds them.
        let mut first = 0;
        for text in &self.texts {
            for row in text.rows.clone() {
                positions.i32s([i32::try_from(first + row)?]);
            }
            input_ids.i32s(text.ids.iter().map(|&id| id as i32));
            first += text.ids.len();
        }
        let count = if self.args.layers { config.layers.len() } else { 0 };
        let mut layers: Vec<_> = (0..count).map(|i| LayerTensors::new(config, i, rows)).collect();
        let path = &self.args.output;
        // Under another name until it is whole, so that a killed run leaves nothing that looks like a result.
        let file = Output::create(path).with_context(|| format!("{} cannot be created", path.display()))?;
        let written = self.write(driver, file, &logits, &[positions, input_ids], &mut layers);
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
        file: Output,
        logits: &Tensor,
        small: &[Tensor],
        layers: &mut [LayerTensors],
    ) -> anyhow::Result<()> {
        let mut out = BufWriter::new(file);
        let header =
            header(std::iter::once(logits).chain(small).chain(layers.iter().flat_map(LayerTensors::tensors)));
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        for (stream, text) in self.texts.iter().enumerate() {
            self.rows(driver, stream as u64, text, layers, &mut out)?;
        }
        for tensor in small.iter().chain(layers.iter().flat_map(LayerTensors::tensors)) {
            out.write_all(&tensor.data)?;
        }
        out.into_inner().map_err(std::io::IntoInnerError::into_error)?.finish()?;
        Ok(())
    }

    /// Writes the logits of one list, and adds what its layers did.
    fn rows<B: Backend>(
        &self,
        driver: &mut Driver<B>,
        stream: u64,
        text: &Text,
        layers: &mut [LayerTensors],
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let mut sequence = driver.open(stream)?;
        let mut done = 0;
        for chunk in text.ids.chunks(self.args.prefill_chunk) {
            if crate::INTERRUPTED.load(std::sync::atomic::Ordering::Relaxed) {
                bail!("interrupted");
            }
            let first = text.rows.start.clamp(done, done + chunk.len()) - done;
            let last = text.rows.end.clamp(done, done + chunk.len()) - done;
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
