//! One output under a grammar: which ids may come next.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use llguidance::Matcher;

use super::compiler::Grammar;
use super::guard::Guard;
use super::vocab::{CALL_OPEN, THINK_CLOSE, Tails, WATCHED};
use crate::output::Start;

/// Steps that can be taken back; drafts are much shorter.
const HISTORY: usize = 512;

/// How an output begins, and when its reasoning ends at the latest.
#[derive(Debug, Clone, Default)]
pub struct GuideOptions {
    /// Where the prompt leaves the model. [`Start::Detect`] counts as content: under a constraint nothing is
    /// left to guess.
    pub start: Start,
    /// Most tokens of reasoning before the closing text is forced.
    pub budget: Option<usize>,
    /// What closes a reasoning that may not go on: a message and the closing tag. Only text, forced token by
    /// token. Empty is the tag alone.
    pub closing: String,
    /// Set from outside to close the reasoning before the next token.
    pub conclude: Option<Arc<AtomicBool>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Reasoning,
    /// The closing text, from this token on.
    Closing(usize),
    /// The lines after a closing tag that the model wrote itself.
    Border(usize),
    /// Anything, until a call opens.
    Free,
    /// The grammar.
    Matching,
    /// A stop token came.
    Ended,
}

#[derive(Debug, Clone)]
struct State {
    phase: Phase,
    tails: Tails,
    /// Tokens of reasoning so far.
    thought: usize,
    /// Tokens that the matcher has taken.
    matched: usize,
    /// What the matcher's JSON is compared with, while it is JSON.
    guard: Option<Guard>,
}

/// The position of one output in its grammar.
pub struct Guide {
    grammar: Arc<Grammar>,
    matcher: Option<Matcher>,
    /// Tokens that the matcher has read for outputs before this one.
    read: usize,
    state: State,
    history: VecDeque<State>,
    budget: Option<usize>,
    closing: Vec<u32>,
    border: Vec<u32>,
    call_open: Vec<u32>,
    conclude: Option<Arc<AtomicBool>>,
}

impl std::fmt::Debug for Guide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guide").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Drop for Guide {
    fn drop(&mut self) {
        if let Some(matcher) = self.matcher.take() {
            self.grammar.rest(matcher, self.read + self.state.matched);
        }
    }
}

impl Guide {
    pub(super) fn new(grammar: Arc<Grammar>, options: GuideOptions) -> Self {
        let vocabulary = Arc::clone(&grammar.vocabulary);
        let closing = if options.closing.is_empty() { "\n</think>\n\n" } else { &options.closing };
        let (matcher, read) = grammar.matcher().unzip();
        let mut guide = Self {
            matcher,
            read: read.unwrap_or_default(),
            state: State {
                phase: Phase::Reasoning,
                tails: Tails::default(),
                thought: 0,
                matched: 0,
                guard: None,
            },
            history: VecDeque::new(),
            budget: options.budget,
            closing: vocabulary.encode(closing),
            border: vocabulary.encode("\n\n"),
            call_open: vocabulary.encode(WATCHED[CALL_OPEN]),
            conclude: options.conclude,
            grammar,
        };
        if options.start == Start::Reasoning {
            guide.settle();
        } else {
            guide.answer();
        }
        guide
    }

    /// Closes the reasoning where it has to.
    fn settle(&mut self) {
        let told = || self.conclude.as_ref().is_some_and(|c| c.load(Ordering::Relaxed));
        if self.state.phase == Phase::Reasoning
            && (self.budget.is_some_and(|b| self.state.thought >= b) || told())
        {
            self.state.phase = Phase::Closing(0);
        }
    }

    /// The reasoning is over.
    fn answer(&mut self) {
        let plan = self.grammar.plan;
        self.state.tails = Tails::default();
        self.state.phase =
            if plan.immediate && self.matcher.is_some() { Phase::Matching } else { Phase::Free };
        self.state.guard = (plan.json && self.state.phase == Phase::Matching).then(Guard::default);
    }

    /// Clears the bits of ids that may not come next.
    ///
    /// # Errors
    /// The grammar's parser gave up, or nothing may follow (`constraint_dead_end`).
    pub fn mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        self.settle();
        let grammar = Arc::clone(&self.grammar);
        let vocabulary = &grammar.vocabulary;
        match self.state.phase {
            Phase::Closing(at) => keep(words, &self.closing[at..=at]),
            Phase::Border(at) => keep(words, &self.border[at..=at]),
            Phase::Ended => keep(words, &vocabulary.stop_ids),
            Phase::Reasoning => {
                if grammar.plan.immediate {
                    clear(words, &vocabulary.stop_ids);
                    clear(words, vocabulary.watch(THINK_CLOSE).completing(self.state.tails[THINK_CLOSE]).1);
                }
            }
            Phase::Free => {
                for index in 0..WATCHED.len() {
                    let (exact, over) = vocabulary.watch(index).completing(self.state.tails[index]);
                    let (no_exact, no_over) = self.forbidden(index);
                    if no_exact {
                        clear(words, exact);
                    }
                    if no_over {
                        clear(words, over);
                    }
                }
            }
            Phase::Matching => return self.match_mask(words),
        }
        Ok(())
    }

    /// Whether a watched text may be completed in free text: exactly, with more behind it.
    fn forbidden(&self, index: usize) -> (bool, bool) {
        let plan = self.grammar.plan;
        match index {
            THINK_CLOSE => (false, false),
            CALL_OPEN => (plan.no_calls, plan.no_calls || plan.calls),
            _ => (plan.no_bare_calls, plan.no_bare_calls),
        }
    }

    fn match_mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        let vocabulary = &self.grammar.vocabulary;
        let Some(matcher) = &mut self.matcher else { return Ok(()) };
        if matcher.is_stopped() && !matcher.is_error() {
            keep(words, &vocabulary.stop_ids);
            return Ok(());
        }
        if self.state.matched == 0 {
            // A form that the empty text fits is answered with another one: clients take an empty turn for a fault.
            clear(words, &vocabulary.stop_ids);
        }
        let allowed = matcher.compute_mask().map_err(|e| dead_end(&e))?;
        let bits = allowed.as_slice();
        for (i, word) in words.iter_mut().enumerate() {
            *word &= bits.get(i).copied().unwrap_or(0);
        }
        if let Some(guard) = &self.state.guard {
            let mut wrong = Vec::new();
            if guard.watches_names() {
                wrong.extend(vocabulary.quotes.iter().copied().filter(|&id| is_set(words, id)));
            }
            if guard.in_number() {
                allowed.iter_set_entries(|id| {
                    let first = vocabulary.text(id as u32).first();
                    if first.is_some_and(|b| b.is_ascii_digit() || b"eE.+-".contains(b)) {
                        wrong.push(id as u32);
                    }
                });
            }
            wrong.retain(|&id| !guard.allows(vocabulary.text(id)));
            clear(words, &wrong);
        }
        if words.iter().all(|w| *w == 0) { Err(dead_end(&"no token fits")) } else { Ok(()) }
    }

    /// Whether the id may come next.
    fn allows(&mut self, id: u32) -> bool {
        let vocabulary = &self.grammar.vocabulary;
        let stop = vocabulary.is_stop(id);
        match self.state.phase {
            Phase::Closing(at) => self.closing[at] == id,
            Phase::Border(at) => self.border[at] == id,
            Phase::Ended => false,
            Phase::Reasoning => {
                !self.grammar.plan.immediate
                    || !(stop
                        || vocabulary
                            .watch(THINK_CLOSE)
                            .completing(self.state.tails[THINK_CLOSE])
                            .1
                            .contains(&id))
            }
            Phase::Free => (0..WATCHED.len()).all(|index| {
                let (exact, over) = vocabulary.watch(index).completing(self.state.tails[index]);
                let (no_exact, no_over) = self.forbidden(index);
                !(no_exact && exact.contains(&id) || no_over && over.contains(&id))
            }),
            Phase::Matching => {
                let Some(matcher) = &mut self.matcher else { return true };
                if stop {
                    return self.state.matched > 0
                        && (matcher.is_stopped() || matcher.is_accepting().unwrap_or(false));
                }
                !matcher.is_stopped()
                    && matcher.validate_tokens(&[id]).is_ok_and(|n| n == 1)
                    && self.state.guard.as_ref().is_none_or(|g| g.allows(vocabulary.text(id)))
            }
        }
    }

    /// Moves past a token.
    ///
    /// # Errors
    /// The token may not come next; the position is unchanged.
    pub fn accept(&mut self, id: u32) -> Result<(), String> {
        self.settle();
        if !self.allows(id) {
            return Err(format!("token {id} does not fit the constraint"));
        }
        let before = self.state.clone();
        self.step(id)?;
        self.settle();
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(before);
        Ok(())
    }

    fn step(&mut self, id: u32) -> Result<(), String> {
        let grammar = Arc::clone(&self.grammar);
        let vocabulary = &grammar.vocabulary;
        let bytes = vocabulary.text(id);
        if vocabulary.is_stop(id) && !matches!(self.state.phase, Phase::Closing(_) | Phase::Border(_)) {
            self.state.phase = Phase::Ended;
            return Ok(());
        }
        match self.state.phase {
            Phase::Closing(at) if at + 1 == self.closing.len() => self.answer(),
            Phase::Border(at) if at + 1 == self.border.len() => self.answer(),
            Phase::Closing(at) => self.state.phase = Phase::Closing(at + 1),
            Phase::Border(at) => self.state.phase = Phase::Border(at + 1),
            Phase::Reasoning => {
                self.state.thought += 1;
                let (tail, closed) =
                    vocabulary.watch(THINK_CLOSE).advance(self.state.tails[THINK_CLOSE], bytes);
                self.state.tails[THINK_CLOSE] = tail;
                match (closed, grammar.plan.immediate) {
                    (true, true) if !self.border.is_empty() => self.state.phase = Phase::Border(0),
                    (true, _) => self.answer(),
                    (false, _) => {}
                }
            }
            Phase::Free => {
                let mut opened = false;
                for index in 0..WATCHED.len() {
                    let (tail, hit) = vocabulary.watch(index).advance(self.state.tails[index], bytes);
                    self.state.tails[index] = tail;
                    opened |= hit && index == CALL_OPEN;
                }
                if let (true, true, Some(matcher)) = (opened, grammar.plan.calls, &mut self.matcher) {
                    matcher.consume_tokens(&self.call_open).map_err(|e| dead_end(&e))?;
                    self.state.matched = self.call_open.len();
                    self.state.phase = Phase::Matching;
                }
            }
            Phase::Matching => {
                if let Some(matcher) = &mut self.matcher {
                    matcher.consume_token(id).map_err(|e| dead_end(&e))?;
                }
                // JSON or calls: the first byte tells.
                if self.state.matched == 0 && bytes.first() == Some(&b'<') {
                    self.state.guard = None;
                }
                if let Some(guard) = &mut self.state.guard {
                    guard.advance(bytes);
                }
                self.state.matched += 1;
            }
            Phase::Ended => {}
        }
        Ok(())
    }

    /// Takes back the last `n` accepted tokens.
    ///
    /// # Errors
    /// More than were accepted, or more than are remembered.
    pub fn rollback(&mut self, n: usize) -> Result<(), String> {
        if n == 0 {
            return Ok(());
        }
        let Some(at) = self.history.len().checked_sub(n) else {
            return Err(format!("{n} tokens cannot be taken back, only {}", self.history.len()));
        };
        let state = self.history[at].clone();
        self.history.truncate(at);
        let back = self.state.matched - state.matched;
        if let Some(matcher) = &mut self.matcher {
            matcher.rollback(back).map_err(|e| dead_end(&e))?;
        }
        self.state = state;
        Ok(())
    }

    /// How many of `ids` could be accepted one after the other.
    pub fn accepts(&mut self, ids: &[u32]) -> usize {
        let n = ids.iter().take(HISTORY - 1).take_while(|&&id| self.accept(id).is_ok()).count();
        // What was just accepted is remembered.
        let _ = self.rollback(n);
        n
    }

    /// Whether nothing more can follow.
    #[must_use]
    pub fn finished(&self) -> bool {
        match self.state.phase {
            Phase::Ended => true,
            Phase::Matching => self.matcher.as_ref().is_some_and(|m| m.is_stopped() && !m.is_error()),
            _ => false,
        }
    }

    /// Whether the output is inside reasoning.
    #[must_use]
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state.phase, Phase::Reasoning | Phase::Closing(_) | Phase::Border(_))
    }

    /// Whether the output could end here.
    pub fn complete(&mut self) -> bool {
        match self.state.phase {
            Phase::Ended | Phase::Free => true,
            Phase::Reasoning => !self.grammar.plan.immediate,
            Phase::Closing(_) | Phase::Border(_) => false,
            Phase::Matching => {
                self.matcher.as_mut().is_none_or(|m| m.is_stopped() || m.is_accepting().unwrap_or(false))
            }
        }
    }
}

fn dead_end(error: &dyn std::fmt::Display) -> String {
    format!("constraint_dead_end: {}", error.to_string().lines().next().unwrap_or_default())
}

fn is_set(words: &[u32], id: u32) -> bool {
    words.get(id as usize / 32).is_some_and(|w| w >> (id % 32) & 1 == 1)
}

fn clear(words: &mut [u32], ids: &[u32]) {
    for &id in ids {
        if let Some(word) = words.get_mut(id as usize / 32) {
            *word &= !(1 << (id % 32));
        }
    }
}

/// Leaves only these bits, where they were set.
fn keep(words: &mut [u32], ids: &[u32]) {
    let kept: Vec<u32> = ids.iter().copied().filter(|&id| is_set(words, id)).collect();
    words.fill(0);
    for id in kept {
        words[id as usize / 32] |= 1 << (id % 32);
    }
}
