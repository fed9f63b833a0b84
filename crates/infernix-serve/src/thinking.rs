//! Limits on reasoning: a budget of tokens, and a guard against going round in circles. Both are constraints: at the
//! limit the only token that may come next is the next one of a closing message, which ends with `</think>`.

use crate::options::ReasoningLoop;
use infernix_engine::sched::Constraint;
use infernix_text::Tokenizer;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tokens between two looks at the reasoning.
const GUARD_STEP: usize = 512;
/// Words of a passage that is compared.
const PASSAGE: usize = 12;
/// Words looked back over.
const WINDOW: usize = 30_000;
/// The last words that must be repetitions for the guard to fire.
const RECENT: usize = 2_000;
/// Times that a passage must come to count as repeated.
const REPEATS: u32 = 3;

/// Limits on the reasoning of one answer, around whatever else constrains it.
pub(crate) struct ThinkingLimits {
    inner: Option<Box<dyn Constraint>>,
    tokenizer: Arc<Tokenizer>,
    /// Id of `</think>`.
    close: u32,
    budget: Option<usize>,
    guard: ReasoningLoop,
    /// The closing message with `</think>` and what follows it.
    span: Arc<[u32]>,
    ids: Vec<u32>,
    /// Number of tokens up to and with `</think>`.
    closed: Option<usize>,
    /// Number of tokens at which the closing message began.
    forced: Option<usize>,
    /// The guard ended the answer; told to the decoder, which calls it a matter of length.
    stopped: Arc<AtomicBool>,
}

/// What the limits of an answer are made of.
#[derive(Clone)]
pub(crate) struct ThinkingPlan {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) close: u32,
    pub(crate) budget: Option<usize>,
    pub(crate) guard: ReasoningLoop,
    pub(crate) span: Arc<[u32]>,
}

impl ThinkingPlan {
    /// Limits for one answer, and where it is told that the guard ended it.
    pub(crate) fn constraint(&self, inner: Option<Box<dyn Constraint>>) -> (ThinkingLimits, Arc<AtomicBool>) {
        let stopped = Arc::new(AtomicBool::new(false));
        let limits = ThinkingLimits {
            inner,
            tokenizer: Arc::clone(&self.tokenizer),
            close: self.close,
            budget: self.budget,
            guard: self.guard,
            span: Arc::clone(&self.span),
            ids: Vec::new(),
            closed: None,
            forced: None,
            stopped: Arc::clone(&stopped),
        };
        (limits, stopped)
    }
}

impl ThinkingLimits {
    /// The token that must come next, if one must.
    fn forced_next(&self) -> Option<u32> {
        self.span.get(self.ids.len() - self.forced?).copied()
    }

    /// Begins the closing message where a limit is reached.
    fn look(&mut self) {
        if self.forced.is_some() || self.closed.is_some() {
            return;
        }
        let n = self.ids.len();
        if self.budget.is_some_and(|budget| n >= budget) {
            self.forced = Some(n);
        } else if self.guard != ReasoningLoop::Off && n > 0 && n.is_multiple_of(GUARD_STEP) {
            let text = self.tokenizer.decode(&self.ids, true);
            if !goes_in_circles(&text) {
                return;
            }
            match self.guard {
                ReasoningLoop::Conclude => self.forced = Some(n),
                _ => self.stopped.store(true, Ordering::Relaxed),
            }
        }
    }
}

impl Constraint for ThinkingLimits {
    fn mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        self.look();
        if let Some(id) = self.forced_next() {
            for (i, word) in words.iter_mut().enumerate() {
                *word &= if i == id as usize / 32 { 1 << (id % 32) } else { 0 };
            }
            return Ok(());
        }
        match &mut self.inner {
            Some(inner) => inner.mask(words),
            None => Ok(()),
        }
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.look();
        self.ids.push(id);
        if id == self.close && self.closed.is_none() {
            self.closed = Some(self.ids.len());
        }
        match &mut self.inner {
            Some(inner) => inner.accept(id),
            None => Ok(()),
        }
    }

    fn rollback(&mut self, n: usize) -> Result<(), String> {
        let left = self.ids.len().checked_sub(n).ok_or("more tokens taken back than given")?;
        self.ids.truncate(left);
        self.closed = self.closed.filter(|at| *at <= left);
        self.forced = self.forced.filter(|at| *at <= left);
        self.stopped.store(false, Ordering::Relaxed);
        match &mut self.inner {
            Some(inner) => inner.rollback(n),
            None => Ok(()),
        }
    }

    fn accepts(&mut self, ids: &[u32]) -> usize {
        let mut own = 0;
        for &id in ids {
            self.look();
            let stopped = self.stopped.load(Ordering::Relaxed);
            if stopped || self.forced_next().is_some_and(|forced| forced != id) {
                break;
            }
            self.ids.push(id);
            if id == self.close && self.closed.is_none() {
                self.closed = Some(self.ids.len());
            }
            own += 1;
        }
        let left = self.ids.len() - own;
        self.ids.truncate(left);
        self.closed = self.closed.filter(|at| *at <= left);
        self.forced = self.forced.filter(|at| *at <= left);
        self.stopped.store(false, Ordering::Relaxed);
        match &mut self.inner {
            Some(inner) => inner.accepts(&ids[..own]),
            None => own,
        }
    }

    fn finished(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || self.inner.as_ref().is_some_and(|i| i.finished())
    }
}

/// Whether at least a quarter of the last words stand in passages that came several times before.
fn goes_in_circles(text: &str) -> bool {
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    let mut words: Vec<u64> = Vec::new();
    let mut word = String::new();
    for c in text.chars() {
        if c.is_alphanumeric() || c == '_' {
            word.extend(c.to_lowercase());
            continue;
        }
        if !word.is_empty() {
            words.push(hasher.hash_one(&word));
            word.clear();
        }
        if !c.is_whitespace() {
            words.push(hasher.hash_one(c));
        }
    }
    let words = &words[words.len().saturating_sub(WINDOW)..];
    if words.len() < RECENT {
        return false;
    }
    let mut counts: HashMap<&[u64], u32> = HashMap::new();
    for passage in words.windows(PASSAGE) {
        *counts.entry(passage).or_default() += 1;
    }
    let from = words.len() - RECENT;
    let mut covered = vec![false; RECENT];
    for (start, passage) in words.windows(PASSAGE).enumerate().skip(from) {
        if counts[passage] >= REPEATS {
            covered[start - from..(start - from + PASSAGE).min(RECENT)].fill(true);
        }
    }
    covered.iter().filter(|c| **c).count() * 4 >= RECENT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Arc<Tokenizer> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
        let resources = infernix_text::Resources::from_folder(&folder).expect("the bundled model");
        Arc::new(Tokenizer::from_json(&resources.tokenizer, None).expect("its tokenizer"))
    }

    fn limits(budget: usize) -> ThinkingLimits {
        let plan = ThinkingPlan {
            tokenizer: tokenizer(),
            close: 90,
            budget: Some(budget),
            guard: ReasoningLoop::Off,
            span: [70, 90, 71].into(),
        };
        plan.constraint(None).0
    }

    fn allowed(limits: &mut ThinkingLimits) -> Vec<u32> {
        let mut words = [u32::MAX; 4];
        limits.mask(&mut words).expect("a mask");
        (0..128).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
    }

    #[test]
    fn at_the_budget_only_the_closing_message_may_follow() {
        let mut limits = limits(2);
        for id in [1, 2] {
            assert_eq!(allowed(&mut limits).len(), 128);
            limits.accept(id).expect("free");
        }
        for id in [70, 90, 71] {
            assert_eq!(allowed(&mut limits), [id]);
            limits.accept(id).expect("the message");
        }
        assert_eq!(allowed(&mut limits).len(), 128, "the answer is free");
    }

    #[test]
    fn reasoning_that_ends_by_itself_is_left_alone() {
        let mut limits = limits(2);
        for id in [1, 90, 3, 4] {
            assert_eq!(allowed(&mut limits).len(), 128);
            limits.accept(id).expect("free");
        }
    }

    #[test]
    fn drafts_over_the_limit_are_cut_and_taken_back() {
        let mut limits = limits(2);
        assert_eq!(limits.accepts(&[1, 2, 3]), 2, "the third must begin the message");
        assert_eq!(limits.accepts(&[1, 2, 70, 90, 71, 5]), 6);
        for id in [1, 2, 70] {
            limits.accept(id).expect("allowed");
        }
        limits.rollback(2).expect("taken back");
        assert_eq!(allowed(&mut limits).len(), 128);
        limits.accept(90).expect("closes by itself now");
        limits.accept(5).expect("free");
        assert_eq!(allowed(&mut limits).len(), 128);
    }

    #[test]
    fn circles_are_seen_and_long_prose_is_not() {
        let prose: String = (0..4000).map(|i| format!("word{} is {} here. ", i * 7919 % 4001, i)).collect();
        assert!(!goes_in_circles(&prose));
        let circle = "Wait, let me think about this once more and then decide what to do next. ".repeat(200);
        assert!(goes_in_circles(&format!("{prose}{circle}")));
        assert!(!goes_in_circles(&circle[..2000]), "too short to judge");
    }
}
