//! What gives logits: the seam between the measurements and an engine.

use crate::error::{MeasureError, Result};
use infernix_engine::backend::{Backend, CallKind};
use infernix_engine::driver::{Driver, LaneInput, Sequence, Want, argmax};
use serde_json::Value;
use std::ops::Range;

/// How an engine reads a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// As a prompt: everything in prefill calls.
    Prompt,
    /// As an answer: the part before the wanted rows as a prompt, the rest forced through decode rounds, so that the
    /// wanted rows come from the kernels that generate text.
    Decode,
}

impl Path {
    /// `prompt` or `decode`, as on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Path::Prompt => "prompt",
            Path::Decode => "decode",
        }
    }
}

/// One text to read from an empty state.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// Keys stochastic rounding: the chunk's index.
    pub stream: u64,
    /// The text.
    pub tokens: &'a [u32],
    /// Positions whose logits are wanted; row `j` predicts token `j + 1`.
    pub rows: Range<usize>,
    /// How the text is read.
    pub path: Path,
}

/// Takes the logits of one wanted row (counted from 0, in order), `[V]`.
pub type Sink<'a> = dyn FnMut(usize, &[f32]) -> Result<()> + 'a;
/// The same for several texts: the text's index, the row's, its logits.
pub type GroupSink<'a> = dyn FnMut(usize, usize, &[f32]) -> Result<()> + 'a;

/// What drafting did on decode paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafting {
    /// Decode rounds.
    pub rounds: u64,
    /// Tokens drafted.
    pub drafted: u64,
    /// Drafts that were the text's token.
    pub accepted: u64,
}

/// Something that gives logits for a text.
pub trait LogitsSource {
    /// Logits per row.
    fn vocab(&self) -> usize;

    /// What this is, for reports: engine, backend, artifact, options. Recorded in saved references and compared when
    /// a run is resumed, so it must not hold times or paths.
    fn describe(&self) -> Value;

    /// Reads `call.tokens` and hands every wanted row to `sink`, in order.
    fn rows(&mut self, call: &Call<'_>, sink: &mut Sink<'_>) -> Result<()>;

    /// Reads several texts, as many as it can in one pass over the weights; rows of each text in order.
    fn rows_of(&mut self, calls: &[Call<'_>], sink: &mut GroupSink<'_>) -> Result<()> {
        calls.iter().enumerate().try_for_each(|(c, call)| self.rows(call, &mut |i, l| sink(c, i, l)))
    }

    /// What drafting has done so far; none where nothing drafts.
    fn drafting(&self) -> Option<Drafting> {
        None
    }

    /// Makes every later rounding random under a seed, or nearest again.
    fn set_rounding(&mut self, seed: Option<u64>) -> Result<()> {
        match seed {
            None => Ok(()),
            Some(_) => Err(MeasureError::Options("honest rounding needs the lossless backend".into())),
        }
    }
}

/// Switches a backend between nearest (`None`) and stochastic rounding.
pub type SetRounding<B> = fn(&mut B, Option<u64>);

/// A [`Driver`] as a source of logits.
pub struct DriverSource<'d, B: Backend> {
    driver: &'d mut Driver<B>,
    description: Value,
    call_tokens: usize,
    drafts: usize,
    together: usize,
    drafting: Drafting,
    rounding: Option<SetRounding<B>>,
}

impl<'d, B: Backend> DriverSource<'d, B> {
    /// Reads with calls of up to 1,024 tokens, without drafts. The driver must have room for the longest text.
    pub fn new(driver: &'d mut Driver<B>, description: Value) -> Self {
        Self {
            driver,
            description,
            call_tokens: 1024,
            drafts: 0,
            together: 1,
            drafting: Drafting::default(),
            rounding: None,
        }
    }

    /// Tokens per prefill call, at least 1; bounds how many rows of logits exist at a time.
    #[must_use]
    pub fn call_tokens(mut self, tokens: usize) -> Self {
        self.call_tokens = tokens.max(1);
        self
    }

    /// Tokens to draft per decode round. Needs a model loaded with its drafter.
    #[must_use]
    pub fn drafts(mut self, drafts: usize) -> Self {
        self.drafts = drafts;
        self
    }

    /// Texts whose prompts share calls: every layer reads all of them before the next one, so that weights are read
    /// once a group. The driver needs as many sequences, and room for all of them.
    #[must_use]
    pub fn together(mut self, texts: usize) -> Self {
        self.together = texts.max(1);
        self
    }

    /// How the backend is given a rounding seed.
    #[must_use]
    pub fn rounding(mut self, set: SetRounding<B>) -> Self {
        self.rounding = Some(set);
        self
    }

    fn prompt(&mut self, s: &mut Sequence, call: &Call<'_>, end: usize, sink: &mut Sink<'_>) -> Result<()> {
        let mut row = 0;
        let mut done = 0;
        for part in call.tokens[..end].chunks(self.call_tokens) {
            let local = |p: usize| p.clamp(done, done + part.len()) - done;
            let wanted = local(call.rows.start)..local(call.rows.end);
            let want = if wanted.is_empty() { Want::None } else { Want::Columns(wanted.start, wanted.end) };
            for logits in self.driver.prefill(s, part, want)?.logits {
                sink(row, &logits)?;
                row += 1;
            }
            done += part.len();
        }
        Ok(())
    }

    fn decode(&mut self, s: &mut Sequence, call: &Call<'_>, sink: &mut Sink<'_>) -> Result<()> {
        let Range { start, end } = call.rows;
        if start > 0 {
            self.prompt(s, call, start, sink)?;
        }
        let mut at = start;
        while at < end {
            let room = self.drafts.min(end - at - 1);
            let mut columns = vec![call.tokens[at]];
            if room > 0 && !s.is_empty() {
                columns.extend(self.driver.draft(s, call.tokens[at], room, argmax)?.iter().map(|d| d.0));
            }
            let logits = self.driver.verify(s, &columns)?;
            self.drafting.rounds += 1;
            self.drafting.drafted += columns.len() as u64 - 1;
            // A draft stands only if it is the text's token; every column before the first that is not has true history.
            let kept = columns.iter().zip(&call.tokens[at..]).take_while(|(a, b)| a == b).count();
            for (i, row) in logits.iter().take(kept).enumerate() {
                sink(at - start + i, row)?;
            }
            self.driver.commit(s, kept)?;
            self.drafting.accepted += kept as u64 - 1;
            at += kept;
        }
        Ok(())
    }

    /// Prompts of one call each, as lanes of one round.
    fn prompts(
        &mut self,
        sequences: &mut [Sequence],
        calls: &[Call<'_>],
        first: usize,
        sink: &mut GroupSink<'_>,
    ) -> Result<()> {
        let mut lanes: Vec<LaneInput<'_>> = sequences
            .iter_mut()
            .zip(calls)
            .map(|(sequence, call)| LaneInput {
                sequence,
                ids: call.tokens,
                want: Want::Columns(call.rows.start, call.rows.end),
            })
            .collect();
        for (lane, out) in self.driver.run(CallKind::Prefill, &mut lanes)?.iter().enumerate() {
            out.logits.iter().enumerate().try_for_each(|(i, row)| sink(first + lane, i, row))?;
        }
        Ok(())
    }
}

fn check(call: &Call<'_>) -> Result<()> {
    if call.rows.start > call.rows.end || call.rows.end > call.tokens.len() {
        return Err(MeasureError::Options(format!(
            "rows {}..{} of a text of {} tokens",
            call.rows.start,
            call.rows.end,
            call.tokens.len()
        )));
    }
    Ok(())
}

impl<B: Backend> LogitsSource for DriverSource<'_, B> {
    fn vocab(&self) -> usize {
        self.driver.model.config.vocab as usize
    }

    fn describe(&self) -> Value {
        let mut value = self.description.clone();
        if let Some(map) = value.as_object_mut() {
            map.insert("drafts".into(), self.drafts.into());
        }
        value
    }

    fn rows(&mut self, call: &Call<'_>, sink: &mut Sink<'_>) -> Result<()> {
        check(call)?;
        let mut sequence = self.driver.open(call.stream)?;
        let result = match call.path {
            Path::Prompt => self.prompt(&mut sequence, call, call.tokens.len(), sink),
            Path::Decode => self.decode(&mut sequence, call, sink),
        };
        self.driver.close(sequence);
        result
    }

    fn rows_of(&mut self, calls: &[Call<'_>], sink: &mut GroupSink<'_>) -> Result<()> {
        let short = |c: &Call<'_>| {
            c.path == Path::Prompt && !c.tokens.is_empty() && c.tokens.len() <= self.call_tokens
        };
        if self.together < 2 || !calls.iter().all(short) {
            return calls
                .iter()
                .enumerate()
                .try_for_each(|(c, call)| self.rows(call, &mut |i, l| sink(c, i, l)));
        }
        for (group, part) in calls.chunks(self.together).enumerate() {
            part.iter().try_for_each(check)?;
            let mut sequences = Vec::with_capacity(part.len());
            for call in part {
                match self.driver.open(call.stream) {
                    Ok(s) => sequences.push(s),
                    Err(e) => {
                        sequences.into_iter().for_each(|s| self.driver.close(s));
                        return Err(e.into());
                    }
                }
            }
            let result = self.prompts(&mut sequences, part, group * self.together, sink);
            sequences.into_iter().for_each(|s| self.driver.close(s));
            result?;
        }
        Ok(())
    }

    fn drafting(&self) -> Option<Drafting> {
        (self.drafting.rounds > 0).then_some(self.drafting)
    }

    fn set_rounding(&mut self, seed: Option<u64>) -> Result<()> {
        match (self.rounding, seed) {
            (Some(set), seed) => {
                set(&mut self.driver.model.backend, seed);
                Ok(())
            }
            (None, None) => Ok(()),
            (None, Some(_)) => {
                Err(MeasureError::Options("honest rounding needs the lossless backend".into()))
            }
        }
    }
}
