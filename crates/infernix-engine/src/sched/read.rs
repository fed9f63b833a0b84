//! Reading prompts, a chunk a step.

use super::api::{Event, Finish, RequestError, Sampled};
use super::job::{Stage, Step};
use super::{Runner, Scheduler};
use crate::cache::Kind;
use crate::driver::Want;

impl<R: Runner> Scheduler<R> {
    /// Reads one chunk of the oldest text that is not read to its end.
    pub(super) fn read(&mut self) -> bool {
        let Some(i) = self.jobs.iter().position(|j| j.stage == Stage::Reading && !j.ended) else {
            return false;
        };
        if self.jobs[i].lane.as_ref().is_some_and(|l| !l.looked_up) {
            if let Err(e) = self.call(|s| s.look_up(i)) {
                self.fail(i, e);
                return true;
            }
            // Bringing cached pages may have cost the request its lane.
            if self.jobs[i].lane.is_none() {
                return true;
            }
        }
        let (begin, end) = self.chunk(i);
        if begin < end {
            if !self.ensure(i, end) {
                return true;
            }
            if let Err(e) = self.read_chunk(i, begin, end) {
                self.fail(i, e);
                return true;
            }
        }
        if end == self.jobs[i].goal() {
            self.jobs[i].stage = Stage::Decoding;
            self.jobs[i].last_row = Vec::new();
        }
        true
    }

    /// The next piece: a chunk, cut where a snapshot is wanted.
    fn chunk(&mut self, i: usize) -> (usize, usize) {
        let job = &mut self.jobs[i];
        let goal = job.goal();
        let Some(lane) = &mut job.lane else { return (0, 0) };
        let begin = lane.sequence.len();
        lane.points.retain(|p| *p > begin);
        let point = lane.points.first().copied().unwrap_or(usize::MAX);
        (begin, goal.min(begin + self.options.prefill_chunk).min(point))
    }

    fn read_chunk(&mut self, i: usize, begin: usize, end: usize) -> Result<(), RequestError> {
        #[cfg(test)]
        self.calls.push("read");
        let job = &mut self.jobs[i];
        let (prompt, first) = (job.request.prompt.len(), job.output() == 0);
        let scored = first && job.request.prompt_logprobs.is_some();
        let last = first && end == prompt && job.request.max_tokens > 0;
        let want = match (scored, last) {
            (true, _) => Want::All,
            (false, true) => Want::Last,
            _ => Want::None,
        };
        let mut rows = self.call(|s| {
            let job = &mut s.jobs[i];
            let Some(lane) = &mut job.lane else { return Ok(Vec::new()) };
            Ok(s.runner.prefill(&mut lane.sequence, &job.text[begin..end], want)?.logits)
        })?;
        self.counters.prefill_calls += 1;
        self.counters.prefill_tokens += (end - begin) as u64;
        self.measured(end - begin, 0);
        self.record_routing("prompt");
        self.keep(i, end)?;
        self.failures = 0;
        let job = &mut self.jobs[i];
        if first {
            job.send(Event::PromptProgress { done: end, total: prompt });
        }
        if scored {
            self.send_scores(i, begin, end, &mut rows);
        }
        if first && end == prompt {
            self.jobs[i].prompt_done = Some(self.runner.now());
            self.start_answer(i, rows.pop());
        }
        Ok(())
    }

    /// Publishes what will not change any more, and takes a snapshot if one is due here.
    fn keep(&mut self, i: usize, end: usize) -> Result<(), RequestError> {
        let prompt = self.jobs[i].request.prompt.len();
        if self.jobs[i].private() {
            return Ok(());
        }
        self.call(|s| {
            let job = &mut s.jobs[i];
            let Some(lane) = &mut job.lane else { return Ok(()) };
            if lane.points.first() != Some(&end) {
                let settled = s.runner.settled(&lane.sequence);
                s.cache.publish(&mut s.runner, &lane.sequence, &mut lane.cursor, settled);
                return Ok(());
            }
            lane.points.remove(0);
            let kind = if job.request.cache.markers.contains(&end) {
                Kind::Marker
            } else if end + 1 >= prompt {
                Kind::Prompt
            } else if end % s.options.prefill_chunk == 0 {
                Kind::Ladder
            } else {
                Kind::Marker
            };
            s.cache.snapshot(&mut s.runner, &mut lane.sequence, &mut lane.cursor, kind)?;
            lane.deepest = end;
            Ok(())
        })
    }

    fn send_scores(&mut self, i: usize, begin: usize, end: usize, rows: &mut [Vec<f32>]) {
        let job = &mut self.jobs[i];
        let wanted = job.request.prompt_logprobs;
        let mut out = Vec::with_capacity(end - begin);
        for (at, id) in job.text[begin..end].iter().enumerate() {
            let row = if at == 0 { &job.last_row } else { &rows[at - 1] };
            out.push(match begin + at {
                0 => Sampled { id: *id, ..Sampled::default() },
                _ => job.describe(row, *id, wanted),
            });
        }
        job.last_row = rows.last().cloned().unwrap_or_default();
        job.send(Event::PromptLogprobs(out));
    }

    /// The first token comes out of the prompt's own pass.
    fn start_answer(&mut self, i: usize, row: Option<Vec<f32>>) {
        let context = self.options.max_context;
        let spec = self.options.spec;
        let job = &mut self.jobs[i];
        if job.room(context) == 0 {
            return self.finish(i, Finish::Length);
        }
        let Some(row) = row else {
            return self.fail(i, RequestError::Engine("the model gave no logits".into()));
        };
        if spec.mode == super::SpecMode::Auto
            && spec.ngram_tokens != Some(0)
            && job.request.draft_tokens != Some(0)
        {
            job.index_copies(spec.ngram_min_match);
        }
        match job.choose(&self.runner, &row, None, context) {
            Step::Token(t) => {
                job.send(Event::Tokens(vec![t]));
                self.counters.output_tokens += 1;
            }
            Step::Last(t, reason) => {
                job.send(Event::Tokens(vec![t]));
                self.counters.output_tokens += 1;
                self.finish(i, reason);
            }
            Step::End(reason) => self.finish(i, reason),
            Step::Fail(e) => self.fail(i, e),
        }
    }
}
