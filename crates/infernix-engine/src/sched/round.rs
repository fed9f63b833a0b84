//! Decode rounds: draft, read, choose, commit, over all lanes that decode.

use super::api::{Event, Finish, RequestError};
use super::job::{Stage, Step};
use super::{Runner, Scheduler};
use crate::driver::{LaneInput, LaneOutput, Want};
use crate::spec::{Ask, Choice, Draft, Guess, Source};

/// Drafts of the chain that are ever tried.
const MAX_CHAIN: usize = 7;
/// Tokens that are ever copied in one round.
const MAX_COPY: usize = 31;

/// One lane's part of a round.
struct Part {
    /// Index of its job.
    job: usize,
    choice: Choice,
    draft: Draft,
}

impl<R: Runner> Scheduler<R> {
    /// Runs one round over every lane that decodes.
    pub(super) fn decode(&mut self) -> bool {
        let mut parts = self.plan();
        // Older requests reserve first: a shortage pauses the youngest, which may be a later part of this round.
        let mut k = 0;
        while k < parts.len() {
            let i = parts[k].job;
            let decoding = self.jobs[i].stage == Stage::Decoding && !self.jobs[i].ended;
            if !decoding || !self.reserve(i, &mut parts[k].choice) {
                parts.remove(k);
                continue;
            }
            k += 1;
        }
        parts.retain(|p| self.jobs[p.job].stage == Stage::Decoding && !self.jobs[p.job].ended);
        if parts.is_empty() {
            return false;
        }
        #[cfg(test)]
        self.calls.push("decode");
        let start = self.runner.now();
        let result = self.call(|s| {
            s.draft(&mut parts)?;
            s.run(&parts)
        });
        let outputs = match result {
            Ok(outputs) => outputs,
            Err(e) => {
                parts.iter().for_each(|p| self.fail(p.job, e.clone()));
                return true;
            }
        };
        let failures = self.failures;
        let (mut columns, mut steps, mut tokens) = (0, 0, 0);
        let lanes = parts.len() as u64;
        for (part, output) in parts.iter().zip(outputs) {
            columns += 1 + part.draft.ids.len();
            if part.choice.source == Source::Chain {
                steps = steps.max(part.draft.ids.len());
            }
            match output {
                Ok(output) => tokens += self.take(part, output),
                Err(cause) => self.fail(part.job, RequestError::Engine(cause)),
            }
        }
        if self.failures == failures {
            self.failures = 0;
        }
        self.counters.decode_rounds += 1;
        self.counters.decode_lanes += lanes;
        self.counters.output_tokens += tokens as u64;
        let took = self.runner.now().saturating_sub(start);
        self.policy.observe(parts.len(), columns, steps, took);
        self.measured(0, tokens);
        self.record_routing("decode");
        true
    }

    /// Which lanes run and how much each drafts.
    fn plan(&mut self) -> Vec<Part> {
        let context = self.options.max_context;
        let drafts = self.limits.drafts && self.options.spec.mode != super::SpecMode::Off;
        let ready = |j: &super::job::Job| j.stage == Stage::Decoding && !j.ended;
        let jobs: Vec<usize> = (0..self.jobs.len()).filter(|i| ready(&self.jobs[*i])).collect();
        let asks: Vec<Ask<'_>> = jobs
            .iter()
            .map(|i| {
                let j = &self.jobs[*i];
                // The round itself gives one token, so more than the room but one is never needed.
                let most = (j.room(context) - 1).min(j.request.draft_tokens.unwrap_or(usize::MAX));
                let longest = self.options.spec.ngram_tokens.unwrap_or(MAX_COPY).min(most);
                let copy = j.copies.as_ref().map_or(0, |c| c.propose(longest).len());
                Ask { standing: &j.standing, chain: if drafts { most.min(MAX_CHAIN) } else { 0 }, copy }
            })
            .collect();
        let choices = self.policy.choose(&asks);
        jobs.into_iter()
            .zip(choices)
            .map(|(job, choice)| Part { job, choice, draft: Draft::default() })
            .collect()
    }

    /// Pages for a lane's columns; without drafts before anyone is paused for them.
    fn reserve(&mut self, i: usize, choice: &mut Choice) -> bool {
        let Some(lane) = &self.jobs[i].lane else { return false };
        let len = lane.sequence.len();
        let missing = lane.sequence.pages_missing(self.runner.pool(), len + 1 + choice.n);
        if choice.n > 0 && self.cache.free_pages(&mut self.runner, missing).is_err() {
            choice.n = 0;
        }
        self.ensure(i, len + 1 + choice.n)
    }

    fn draft(&mut self, parts: &mut [Part]) -> Result<(), crate::EngineError> {
        let mut chains = Vec::new();
        for p in parts.iter_mut() {
            let job = &self.jobs[p.job];
            match (p.choice.source, &job.copies) {
                (Source::Copy, Some(copies)) => p.draft.ids = copies.propose(p.choice.n).to_vec(),
                _ if p.choice.n > 0 => chains.push((p.job, &mut p.draft, p.choice.n)),
                _ => {}
            }
        }
        if !chains.is_empty() {
            let mut guesses = Vec::with_capacity(chains.len());
            let mut jobs = self.jobs.iter_mut().enumerate();
            for (i, _, n) in &chains {
                // Parts are in the order of jobs.
                let Some((_, job)) = jobs.find(|(at, _)| at == i) else { continue };
                let next = job.text[job.text.len() - 1];
                if let Some(lane) = &mut job.lane {
                    let draft = Draft::default();
                    guesses.push(Guess { request: job.id, sequence: &mut lane.sequence, next, n: *n, draft });
                }
            }
            self.drafter.propose(&mut self.runner, &mut guesses)?;
            let drafts: Vec<Draft> = guesses.into_iter().map(|g| g.draft).collect();
            for ((_, slot, _), draft) in chains.into_iter().zip(drafts) {
                *slot = draft;
            }
        }
        for p in parts.iter_mut() {
            // Guesses the constraint forbids are certain to be wrong. One that was drawn from a law must still be rejected as
            // such: what follows its rejection is drawn from the residual, not from the model's own distribution.
            let legal = self.jobs[p.job].legal(&p.draft.ids);
            let keep = if p.draft.laws.is_empty() { legal } else { legal + 1 };
            p.draft.ids.truncate(keep);
            p.draft.laws.truncate(keep);
        }
        Ok(())
    }

    fn run(&mut self, parts: &[Part]) -> Result<Vec<Result<LaneOutput, String>>, crate::EngineError> {
        let columns: Vec<Vec<u32>> = parts
            .iter()
            .map(|p| {
                let text = &self.jobs[p.job].text;
                std::iter::once(text[text.len() - 1]).chain(p.draft.ids.iter().copied()).collect()
            })
            .collect();
        let mut lanes = Vec::with_capacity(parts.len());
        let mut jobs = self.jobs.iter_mut().enumerate();
        for (p, ids) in parts.iter().zip(&columns) {
            let Some((_, job)) = jobs.find(|(at, _)| *at == p.job) else { continue };
            if let Some(lane) = &mut job.lane {
                lanes.push(LaneInput { sequence: &mut lane.sequence, ids, want: Want::All });
            }
        }
        self.runner.decode(&mut lanes)
    }

    /// Chooses tokens from a lane's rows as long as its drafts are right, and commits. Gives the number of tokens.
    fn take(&mut self, part: &Part, output: LaneOutput) -> usize {
        let context = self.options.max_context;
        let i = part.job;
        let job = &mut self.jobs[i];
        let drafts = &part.draft.ids;
        job.usage.rounds += 1;
        let mut tokens = Vec::new();
        let (mut read, mut right) = (0, 0);
        let mut end: Option<Result<Finish, RequestError>> = None;
        for (k, row) in output.logits.iter().enumerate() {
            read = k + 1;
            let guess = drafts.get(k).copied();
            let law = guess.zip(part.draft.laws.get(k));
            let before = job.text.len();
            match job.choose(&self.runner, row, law, context) {
                Step::Token(t) => tokens.push(t),
                Step::Last(t, reason) => {
                    tokens.push(t);
                    end = Some(Ok(reason));
                }
                Step::End(reason) => end = Some(Ok(reason)),
                Step::Fail(e) => end = Some(Err(e)),
            }
            let good = job.text.len() > before && guess == job.text.last().copied();
            right += usize::from(good);
            if end.is_some() || !good {
                break;
            }
        }
        job.usage.drafted += drafts.len();
        job.usage.accepted += right;
        self.counters.drafted += drafts.len() as u64;
        self.counters.accepted += right as u64;
        // A round cut short by the answer's end says nothing about the drafts after it.
        let judged = if end.is_some() { right } else { drafts.len() };
        job.standing.observe(part.choice.source, judged, right);
        let count = tokens.len();
        if count > 0 {
            job.send(Event::Tokens(tokens));
        }
        let committed = self.call(|s| {
            let job = &mut s.jobs[i];
            let Some(lane) = &mut job.lane else { return Ok(()) };
            s.runner.commit(&mut lane.sequence, read)?;
            if !job.salt.starts_with('\0') {
                let settled = s.runner.settled(&lane.sequence);
                s.cache.publish(&mut s.runner, &lane.sequence, &mut lane.cursor, settled);
            }
            Ok(())
        });
        match (committed, end) {
            (Err(e), _) => self.fail(i, e),
            (Ok(()), Some(Ok(reason))) => self.finish(i, reason),
            (Ok(()), Some(Err(e))) => self.fail(i, e),
            (Ok(()), None) => {}
        }
        count
    }
}
