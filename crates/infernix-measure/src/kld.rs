//! The comparison: reference and models under test, chunk by chunk. Of a row only its score is kept; of a chunk's
//! vocabulary rows, one chunk's worth of the reference at 2 bytes a logit.

use crate::bootstrap::{RESAMPLES, SEED};
use crate::corpus::Chunks;
use crate::error::{MeasureError, Result};
use crate::llama::{BaseFile, BaseHeader, BaseWriter, CodedRow, check};
use crate::logits::LogitsFile;
use crate::reference::{ReferenceFile, ReferenceHeader, ReferenceWriter, StoredRow, TOP_K};
use crate::report::{KldReport, Measured};
use crate::row::{Logits, RowScore, score_against_log_probs, score_log_probs};
use crate::source::{Call, LogitsSource, Path as Reading};
use crate::state::{Opened, State, StatePlace};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How to compare.
#[derive(Clone, Debug)]
pub struct KldOptions {
    /// The text.
    pub chunks: Chunks,
    /// Ids a tokenizer can produce; the others are masked.
    pub valid_vocab: usize,
    /// llama.cpp's definitions: no rounding of logits, no mask, the reference through 16-bit codes, its cut and precisions.
    pub llama_compat: bool,
    /// Resamples of the bootstrap.
    pub resamples: usize,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Where scores are kept until the run is complete.
    pub state: Option<StatePlace>,
    /// Go on from what is kept there.
    pub resume: bool,
    /// What was asked for, by the names a user knows: told apart where a run is resumed with other values.
    pub asked: BTreeMap<String, String>,
    /// Save the reference as our own compressed file.
    pub save_reference: Option<PathBuf>,
    /// Ids a saved row keeps.
    pub top_k: u32,
    /// Save the reference as llama.cpp's base file.
    pub save_base: Option<PathBuf>,
    /// Chunks measured between two looks at the interrupt, at least 1; a source may read their prompts together. One
    /// group's reference rows exist at a time, 2 bytes a logit.
    pub group: usize,
}

impl KldOptions {
    /// The defaults over a text.
    pub fn new(chunks: Chunks, valid_vocab: usize) -> Self {
        Self {
            chunks,
            valid_vocab,
            llama_compat: false,
            resamples: RESAMPLES,
            seed: SEED,
            state: None,
            resume: false,
            asked: BTreeMap::new(),
            save_reference: None,
            top_k: TOP_K,
            save_base: None,
            group: 1,
        }
    }
}

/// What is measured against.
#[derive(Debug)]
pub enum Reference {
    /// One of the sources, by index, reading each chunk as a prompt.
    Source(usize),
    /// Our own reference file.
    Stored(ReferenceFile),
    /// A llama.cpp base file.
    Llama(BaseFile),
    /// Another engine's logits.
    Logits(LogitsFile),
}

/// Rows under test.
#[derive(Debug)]
pub enum Rows {
    /// One of the sources, by index, on a path; with every rounding random under a seed if there is one.
    Source {
        /// Index into the sources.
        index: usize,
        /// How it reads.
        path: Reading,
        /// Seed of honest rounding.
        rounding: Option<u64>,
    },
    /// Another reference file.
    Stored(ReferenceFile),
    /// A llama.cpp base file.
    Llama(BaseFile),
    /// Another engine's logits.
    Logits(LogitsFile),
}

/// One model under test. A [`Rows::Source`] with a rounding seed is a run of the yardstick, not an engine.
#[derive(Debug)]
pub struct Test {
    /// Name in the report.
    pub engine: String,
    /// Its rows.
    pub rows: Rows,
}

impl Test {
    pub(crate) fn rounding(&self) -> Option<u64> {
        match self.rows {
            Rows::Source { rounding, .. } => rounding,
            _ => None,
        }
    }

    pub(crate) fn path(&self) -> &'static str {
        match &self.rows {
            Rows::Source { path, .. } => path.name(),
            _ => "file",
        }
    }
}

/// Values so far, after each chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct Running {
    /// Chunks done.
    pub done: usize,
    /// Chunks in all.
    pub total: usize,
    /// Seconds since the start.
    pub seconds: f64,
    /// Each test so far.
    pub tests: Vec<RunningTest>,
}

/// One test so far.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningTest {
    /// Its name.
    pub engine: String,
    /// `prompt`, `decode` or `file`.
    pub path: &'static str,
    /// Seed of honest rounding, where it is a run of the yardstick.
    pub rounding: Option<u64>,
    /// Mean KLD.
    pub mean_kld: f64,
    /// Share of equal top tokens.
    pub top1: f64,
}

/// What a run has begun on disk. Dropped before a chunk was finished, nothing of it stays.
struct Begun {
    state: Option<State>,
    /// Partial names of the outputs.
    partials: Vec<PathBuf>,
    /// Whether the state holds work that the partial files belong to.
    keep: bool,
}

impl Begun {
    /// Opens the state and sees that all outputs can be written, before anything is put on disk.
    fn new(options: &KldOptions, opened: Option<Opened>) -> Result<(Self, Vec<Vec<RowScore>>)> {
        let (mut state, done, ours) =
            opened.map_or((None, Vec::new(), false), |o| (Some(o.state), o.done, o.ours));
        let outputs = || options.save_reference.iter().chain(&options.save_base);
        let partials: Vec<PathBuf> = outputs().map(|p| crate::files::partial(p)).collect();
        let keep = !done.is_empty();
        if ours && !keep {
            // This run's own, of which no chunk was finished.
            partials.iter().for_each(|p| drop(std::fs::remove_file(p)));
        }
        outputs().try_for_each(|p| crate::files::check_free(p, keep))?;
        if let Some(state) = &mut state {
            state.begin()?;
        }
        Ok((Self { state, partials, keep }, done))
    }

    fn record(&mut self, chunks: Range<usize>, rows: &[Vec<RowScore>]) -> Result<()> {
        let Some(state) = &mut self.state else { return Ok(()) };
        self.keep = true;
        chunks.zip(rows).try_for_each(|(chunk, rows)| state.append(chunk, rows))
    }

    /// The run is complete and its outputs have their names.
    fn finish(mut self) -> Result<()> {
        self.partials.clear();
        self.keep = false;
        self.state.as_mut().map_or(Ok(()), State::remove)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if !self.keep {
            self.partials.iter().for_each(|p| drop(std::fs::remove_file(p)));
            if let Some(state) = &mut self.state {
                let _ = state.remove();
            }
        }
    }
}

enum ReferenceRow {
    Full(Logits),
    Coded(CodedRow, Vec<f32>),
    Stored(StoredRow),
}

/// Runs the comparison. `progress` sees every finished chunk; when `interrupt` becomes true the run stops between
/// calls, its state on disk if the options name a file for it.
pub fn kld(
    options: &KldOptions,
    sources: &mut [&mut dyn LogitsSource],
    mut reference: Reference,
    mut tests: Vec<Test>,
    progress: &mut dyn FnMut(&Running),
    interrupt: &AtomicBool,
) -> Result<KldReport> {
    let started = Instant::now();
    let vocab = check_inputs(options, sources, &reference, &tests)?;
    let chunks = &options.chunks;
    let per_chunk = chunks.rows().len();
    let description = describe_reference(sources, &reference);
    let header = ReferenceHeader {
        corpus: chunks.corpus.clone(),
        corpus_blake3: chunks.corpus_blake3.clone(),
        tokens_blake3: chunks.tokens_blake3(),
        model: description.clone(),
        ctx: chunks.ctx as u32,
        chunks: chunks.count as u32,
        first_row: chunks.rows().start as u32,
        rows: per_chunk as u32,
        vocab: vocab as u32,
        valid_vocab: options.valid_vocab as u32,
        top_k: options.top_k.min(options.valid_vocab as u32),
    };
    check_files(&header, chunks, &mut reference, &mut tests)?;

    let engines: Vec<Value> = tests.iter().map(|t| describe_test(sources, t)).collect();
    let base_header = BaseHeader { ctx: header.ctx, vocab: header.vocab, chunks: header.chunks };
    if let Some(path) = &options.save_reference {
        crate::files::check_space(path, ReferenceWriter::size(&header)?)?;
    }
    if let Some(path) = &options.save_base {
        crate::files::check_space(path, base_header.bytes())?;
    }
    let opened = match &options.state {
        Some(place) => {
            let of = json!({ "reference": header, "tests": engines, "llama_compat": options.llama_compat,
                "save_reference": options.save_reference.is_some(), "save_base": options.save_base.is_some() });
            let key = json!({ "options": options.asked, "of": of });
            Some(State::open(place, &key, per_chunk * tests.len(), options.resume)?)
        }
        None if options.resume => {
            return Err(MeasureError::Options("resuming needs the file that holds the state".into()));
        }
        None => None,
    };
    let (mut begun, mut done) = Begun::new(options, opened)?;
    done.truncate(chunks.count);
    let finished = done.len();
    let saved = options.save_reference.as_ref();
    let mut saved = saved.map(|path| ReferenceWriter::create(path, header.clone(), finished)).transpose()?;
    let base = options.save_base.as_ref();
    let mut base =
        base.map(|path| BaseWriter::create(path, base_header, chunks.tokens(), finished)).transpose()?;

    let mut scores: Vec<Vec<RowScore>> = vec![Vec::new(); tests.len()];
    for chunk in done {
        for (own, rows) in scores.iter_mut().zip(chunk.chunks(per_chunk)) {
            own.extend_from_slice(rows);
        }
    }
    let running = |done: usize, tests: &[Test], scores: &[Vec<RowScore>]| Running {
        done,
        total: chunks.count,
        seconds: started.elapsed().as_secs_f64(),
        tests: tests
            .iter()
            .zip(scores)
            .map(|(t, s)| RunningTest {
                engine: t.engine.clone(),
                path: t.path(),
                rounding: t.rounding(),
                mean_kld: mean(s, |r| r.kld),
                top1: mean(s, same),
            })
            .collect(),
    };
    let mut next = finished;
    while next < chunks.count {
        let group = next..(next + options.group.max(1)).min(chunks.count);
        let stop = || -> Result<()> {
            if interrupt.load(Ordering::Relaxed) {
                // What was not finished is not kept either.
                let kept = options.state.is_some() && group.start > 0;
                let advice = if kept { "run again with --resume" } else { "nothing was kept" };
                return Err(MeasureError::Interrupted { done: group.start, total: chunks.count, advice });
            }
            Ok(())
        };
        stop()?;
        let rows = reference_rows(options, sources, &mut reference, &group, base.as_mut())?;
        if let Some(writer) = &mut saved {
            let k = header.top_k as usize;
            for (chunk, rows) in group.clone().zip(&rows) {
                let kept = rows.iter().enumerate().filter_map(|(i, r)| match r {
                    ReferenceRow::Full(l) => Some(StoredRow::new(l, target(chunks, chunk, i) as u32, k)),
                    _ => None,
                });
                writer.chunk(&kept.collect::<Vec<_>>())?;
            }
        }
        if let Some(writer) = &mut base {
            writer.sync()?;
        }
        let mut of_group = vec![Vec::with_capacity(per_chunk * tests.len()); group.len()];
        for (test, own) in tests.iter_mut().zip(&mut scores) {
            stop()?;
            let new = test_rows(options, sources, &rows, test, &group)?;
            for (all, new) in of_group.iter_mut().zip(new) {
                all.extend_from_slice(&new);
                own.extend(new);
            }
        }
        begun.record(group.clone(), &of_group)?;
        next = group.end;
        progress(&running(next, &tests, &scores));
    }
    if let Some(writer) = saved {
        writer.finish()?;
    }
    if let Some(writer) = base {
        writer.finish()?;
    }
    let drafting = |t: &Test| match t.rows {
        Rows::Source { index, path: Reading::Decode, .. } => sources[index].drafting(),
        _ => None,
    };
    let drafting = tests.iter().map(drafting).collect();
    let measured = Measured { tests: &tests, engines, drafting, scores, elapsed: started.elapsed() };
    let report = KldReport::new(options, &reference, description, measured)?;
    begun.finish()?;
    Ok(report)
}

fn same(r: &RowScore) -> f64 {
    f64::from(u8::from(r.same_top))
}

pub(crate) fn mean(rows: &[RowScore], f: impl Fn(&RowScore) -> f64) -> f64 {
    rows.iter().map(f).sum::<f64>() / rows.len().max(1) as f64
}

fn target(chunks: &Chunks, chunk: usize, row: usize) -> usize {
    chunks.chunk(chunk)[chunks.rows().start + row + 1] as usize
}

/// Refuses combinations that cannot be measured; gives the number of logits per row.
fn check_inputs(
    options: &KldOptions,
    sources: &[&mut dyn LogitsSource],
    reference: &Reference,
    tests: &[Test],
) -> Result<usize> {
    let refuse = |what: String| Err(MeasureError::Options(what));
    let source = |i: usize| {
        sources
            .get(i)
            .map(|s| s.vocab())
            .ok_or_else(|| MeasureError::Options(format!("there is no source {i}")))
    };
    let vocab = match reference {
        Reference::Source(i) => source(*i)?,
        Reference::Stored(f) => f.header().vocab as usize,
        Reference::Llama(f) => f.header().vocab as usize,
        Reference::Logits(f) => f.vocab(),
    };
    let valid = options.valid_vocab;
    if valid == 0 || valid > vocab {
        return refuse(format!("{valid} valid ids of a vocabulary of {vocab}"));
    }
    if let Some(id) = options.chunks.tokens().iter().find(|id| **id as usize >= valid) {
        return refuse(format!("the text holds token {id}, the model has {valid} ids: not its tokenizer"));
    }
    for test in tests {
        let own = match &test.rows {
            Rows::Source { index, .. } => source(*index)?,
            Rows::Stored(f) => f.header().vocab as usize,
            Rows::Llama(f) => f.header().vocab as usize,
            Rows::Logits(f) => f.vocab(),
        };
        if own != vocab {
            return refuse(format!("{}: {own} logits a row, the reference has {vocab}", test.engine));
        }
        match (reference, &test.rows) {
            (Reference::Stored(f), Rows::Logits(_)) if options.chunks.tokens().is_empty() => {
                return refuse(format!(
                    "{} holds no tokens to score {} with: give the model, or that file as the reference",
                    f.path().display(),
                    test.engine
                ));
            }
            (Reference::Stored(_), Rows::Llama(_)) => {
                return refuse("a llama.cpp file holds no tail to compare with a top-k reference".into());
            }
            (Reference::Source(_) | Reference::Llama(_) | Reference::Logits(_), Rows::Stored(_)) => {
                return refuse("a top-k file under test needs a top-k file as the reference".into());
            }
            _ => {}
        }
    }
    let stored = matches!(reference, Reference::Stored(_));
    if options.llama_compat && (stored || options.save_reference.is_some()) {
        return refuse("llama.cpp's definitions need its 16-bit codes, not a top-k file".into());
    }
    let live = matches!(reference, Reference::Source(_));
    if !live && (options.save_reference.is_some() || options.save_base.is_some()) {
        return refuse("only a reference that runs can be saved".into());
    }
    if options.save_reference.is_some() && options.top_k == 0 {
        return refuse("a saved reference keeps at least 1 id a row".into());
    }
    Ok(vocab)
}

/// Refuses files made from another text, or with other sizes.
fn check_files(
    header: &ReferenceHeader,
    chunks: &Chunks,
    reference: &mut Reference,
    tests: &mut [Test],
) -> Result<()> {
    // Of a file's text the first chunks may be measured alone.
    let stored = |f: &ReferenceFile| {
        let mut own = header.clone();
        if let Some((count, tokens)) = chunks.whole().filter(|w| w.0 == f.header().chunks as usize) {
            (own.chunks, own.tokens_blake3) = (count as u32, tokens.to_owned());
        }
        own.must_equal(f.header(), f.path())
    };
    let llama = |f: &BaseFile| {
        let h = f.header();
        let expected = format!("{} of {}", chunks.count, chunks.ctx);
        let found = format!("{} of {}", h.chunks, h.ctx);
        let wrong = |what: &str, expected: String, found: String| MeasureError::Mismatch {
            what: format!("{}: {what}", f.path().display()),
            expected,
            found,
            advice: "measure on the text the file was made from",
        };
        if h.ctx as usize != chunks.ctx || (h.chunks as usize) < chunks.count {
            return Err(wrong("chunks of tokens", expected, found));
        }
        match chunks.tokens().iter().zip(f.tokens()).position(|(a, b)| a != b) {
            Some(i) => {
                let at = format!("token {} of chunk {}", i % chunks.ctx, i / chunks.ctx);
                Err(wrong(&at, chunks.tokens()[i].to_string(), f.tokens()[i].to_string()))
            }
            None => Ok(()),
        }
    };
    match reference {
        Reference::Source(_) => {}
        Reference::Stored(f) => stored(f)?,
        Reference::Llama(f) => llama(f)?,
        Reference::Logits(f) => f.check(chunks)?,
    }
    for test in tests {
        match &mut test.rows {
            Rows::Source { .. } => {}
            Rows::Stored(f) => stored(f)?,
            Rows::Llama(f) => llama(f)?,
            Rows::Logits(f) => f.check(chunks)?,
        }
    }
    Ok(())
}

fn describe_reference(sources: &[&mut dyn LogitsSource], reference: &Reference) -> Value {
    match reference {
        Reference::Source(i) => sources[*i].describe(),
        Reference::Stored(f) => {
            json!({ "kind": "reference file", "top_k": f.header().top_k, "model": f.header().model })
        }
        Reference::Llama(_) => json!({ "kind": "llama.cpp base file" }),
        Reference::Logits(f) => json!({ "kind": "logits file", "model": f.metadata() }),
    }
}

fn describe_test(sources: &[&mut dyn LogitsSource], test: &Test) -> Value {
    let rows = match &test.rows {
        Rows::Source { index, .. } => sources[*index].describe(),
        Rows::Stored(f) => json!({ "kind": "reference file", "model": f.header().model }),
        Rows::Llama(_) => json!({ "kind": "llama.cpp base file" }),
        Rows::Logits(f) => json!({ "kind": "logits file", "model": f.metadata() }),
    };
    json!({ "engine": test.engine, "path": test.path(), "rounding": test.rounding(), "of": rows })
}

/// Each chunk's call.
fn calls<'a>(chunks: &'a Chunks, group: &Range<usize>, path: Reading) -> Vec<Call<'a>> {
    let call = |chunk| Call { stream: chunk as u64, tokens: chunks.chunk(chunk), rows: chunks.rows(), path };
    group.clone().map(call).collect()
}

/// The reference's rows of a group of chunks.
fn reference_rows(
    options: &KldOptions,
    sources: &mut [&mut dyn LogitsSource],
    reference: &mut Reference,
    group: &Range<usize>,
    mut base: Option<&mut BaseWriter>,
) -> Result<Vec<Vec<ReferenceRow>>> {
    let chunks = &options.chunks;
    let n = chunks.rows().len();
    let coded = |row: CodedRow| {
        let log_probs = row.log_probs();
        ReferenceRow::Coded(row, log_probs)
    };
    let ready = |chunk: usize, i: usize, logits: &[f32]| -> Result<ReferenceRow> {
        if options.llama_compat {
            check(chunk * n + i, logits)?;
            return Ok(coded(CodedRow::encode(logits)));
        }
        Ok(ReferenceRow::Full(Logits::new(chunk * n + i, logits, options.valid_vocab)?))
    };
    match reference {
        Reference::Stored(f) => group
            .clone()
            .map(|chunk| Ok(f.chunk(chunk)?.into_iter().map(ReferenceRow::Stored).collect()))
            .collect(),
        Reference::Llama(f) => {
            group.clone().map(|chunk| (0..n).map(|i| f.row(chunk, i).map(coded)).collect()).collect()
        }
        Reference::Logits(f) => {
            let row = |chunk, i| placed(ready(chunk, i, &f.row(chunk, i)?), || f.place(chunk, i));
            group.clone().map(|chunk| (0..n).map(|i| row(chunk, i)).collect()).collect()
        }
        Reference::Source(index) => {
            let mut rows: Vec<Vec<ReferenceRow>> = group.clone().map(|_| Vec::with_capacity(n)).collect();
            let calls = calls(chunks, group, Reading::Prompt);
            sources[*index].set_rounding(None)?;
            sources[*index].rows_of(&calls, &mut |c, i, logits| {
                if let Some(writer) = base.as_deref_mut() {
                    writer.row(logits)?;
                }
                let chunk = group.start + c;
                let place = || format!("the reference: row {i} of chunk {chunk}");
                rows[c].push(placed(ready(chunk, i, logits), place)?);
                Ok(())
            })?;
            rows.iter().try_for_each(|r| expect(r.len(), n, "the reference"))?;
            Ok(rows)
        }
    }
}

/// Says where a row comes from in which a logit is not finite.
fn placed<T>(row: Result<T>, place: impl FnOnce() -> String) -> Result<T> {
    row.map_err(|e| match e {
        MeasureError::NotFinite { id, value, .. } => MeasureError::NotFinite { place: place(), id, value },
        other => other,
    })
}

fn expect(found: usize, rows: usize, whose: &str) -> Result<()> {
    if found == rows {
        return Ok(());
    }
    Err(MeasureError::Options(format!("{whose} gave {found} rows of a chunk, {rows} were asked for")))
}

/// Scores of a group of chunks.
fn test_rows(
    options: &KldOptions,
    sources: &mut [&mut dyn LogitsSource],
    reference: &[Vec<ReferenceRow>],
    test: &mut Test,
    group: &Range<usize>,
) -> Result<Vec<Vec<RowScore>>> {
    let chunks = &options.chunks;
    let n = chunks.rows().len();
    let valid = options.valid_vocab;
    // Row `i` of chunk `chunk` given as logits.
    let score = |chunk: usize, i: usize, row: &ReferenceRow, logits: &[f32]| -> Result<RowScore> {
        let t = target(chunks, chunk, i);
        let own = || Logits::new(chunk * n + i, logits, valid);
        Ok(match row {
            ReferenceRow::Coded(row, _) if options.llama_compat => {
                check(chunk * n + i, logits)?;
                row.score(logits, t)
            }
            ReferenceRow::Full(row) => row.score(&own()?, t),
            ReferenceRow::Coded(_, log_probs) => score_against_log_probs(log_probs, &own()?, t),
            ReferenceRow::Stored(row) => row.score(&own()?),
        })
    };
    let each = |one: &mut dyn FnMut(usize, usize, &ReferenceRow) -> Result<RowScore>| {
        let of_chunk = |(chunk, rows): (usize, &Vec<ReferenceRow>)| {
            rows.iter().enumerate().map(|(i, row)| one(chunk, i, row)).collect()
        };
        group.clone().zip(reference).map(of_chunk).collect()
    };
    match &mut test.rows {
        Rows::Source { index, path, rounding } => {
            let mut scores: Vec<Vec<RowScore>> = group.clone().map(|_| Vec::with_capacity(n)).collect();
            let source = &mut sources[*index];
            source.set_rounding(*rounding)?;
            let result = source.rows_of(&calls(chunks, group, *path), &mut |c, i, logits| {
                let Some(row) = reference[c].get(i) else { return expect(i + 1, n, &test.engine) };
                let chunk = group.start + c;
                let place = || format!("{} ({}): row {i} of chunk {chunk}", test.engine, path.name());
                scores[c].push(placed(score(chunk, i, row, logits), place)?);
                Ok(())
            });
            source.set_rounding(None)?;
            result?;
            scores.iter().try_for_each(|s| expect(s.len(), n, &test.engine))?;
            Ok(scores)
        }
        Rows::Logits(file) => each(&mut |chunk, i, row| {
            placed(score(chunk, i, row, &file.row(chunk, i)?), || file.place(chunk, i))
        }),
        Rows::Stored(file) => {
            let mut of_chunk = (usize::MAX, Vec::new());
            each(&mut |chunk, i, row| {
                if of_chunk.0 != chunk {
                    of_chunk = (chunk, file.chunk(chunk)?);
                }
                match (row, of_chunk.1.get(i)) {
                    (ReferenceRow::Stored(r), Some(t)) => Ok(r.score_stored(t)),
                    _ => expect(i, n, &test.engine).and(Err(MeasureError::Options(
                        "a top-k file under test needs a top-k file as the reference".into(),
                    ))),
                }
            })
        }
        Rows::Llama(file) => each(&mut |chunk, i, row| {
            let own = file.row(chunk, i)?.log_probs();
            let t = target(chunks, chunk, i);
            match row {
                ReferenceRow::Coded(row, _) if options.llama_compat => Ok(row.score_log_probs(&own, t)),
                ReferenceRow::Coded(_, log_probs) => Ok(score_log_probs(log_probs, &own, valid, t)),
                ReferenceRow::Full(row) => Ok(row.score_log_probs(&own, t)),
                ReferenceRow::Stored(_) => {
                    Err(MeasureError::Options("a top-k reference holds no tail".into()))
                }
            }
        }),
    }
}
