//! Whether a greedy lexer reads a grammar as the grammar means it.
//!
//! The lexer goes on as long as any lexeme can, so it errs where a lexeme ends in front of a byte with which
//! some lexeme could have gone on. Both sides are computed: the bytes that may follow each lexeme in the
//! grammar, and, on automata, the bytes that lengthen a finished lexeme within itself or another. Where the
//! two never meet, longest match is the only possible reading.

use std::collections::{HashSet, VecDeque};

use regex_automata::dfa::{Automaton, StartKind, dense};
use regex_automata::nfa::thompson;
use regex_automata::util::primitives::StateID;
use regex_automata::{Anchored, Input};

use super::cfg::{Cfg, Symbol};
use super::error::GrammarError;
use super::rx::Rx;

/// Largest automaton, in bytes.
const AUTOMATON: usize = 8 << 20;
/// Most pairs of states looked at for two lexemes.
const PAIRS: usize = 5_000;

/// Work that a grammar may cost, in pairs of states, some microseconds each. Grammars that people write need thousands.
pub(crate) struct Work(usize);

impl Work {
    pub(crate) fn new() -> Self {
        Self(1_000_000)
    }

    fn spend(&mut self, n: usize) -> Result<(), GrammarError> {
        self.0 = self.0.checked_sub(n).ok_or_else(|| {
            GrammarError::new(
                "constraint_too_complex",
                "too many parts of the grammar could be taken for each other",
            )
        })?;
        Ok(())
    }
}

type Bytes = [u64; 4];

fn has(set: &Bytes, byte: u8) -> bool {
    set[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1
}

fn add(set: &mut Bytes, byte: u8) {
    set[usize::from(byte >> 6)] |= 1 << (byte & 63);
}

fn join(set: &mut Bytes, other: &Bytes) -> bool {
    let before = *set;
    set.iter_mut().zip(other).for_each(|(a, b)| *a |= b);
    *set != before
}

/// A lexeme that ends where another could go on.
pub(crate) struct Conflict {
    pub(crate) ending: usize,
    pub(crate) longer: usize,
}

/// Automata of lexemes.
pub(crate) struct Lexemes {
    automata: Vec<(dense::DFA<Vec<u32>>, StateID)>,
    firsts: Vec<Bytes>,
}

impl Lexemes {
    pub(crate) fn new(lexemes: &[Rx], work: &mut Work) -> Result<Self, GrammarError> {
        // An automaton costs about as much as this many pairs.
        work.spend(lexemes.iter().map(|rx| 8 + rx.weight() / 64).sum())?;
        let complex =
            || GrammarError::new("constraint_too_complex", "a part of the grammar needs too many states");
        let automata = lexemes
            .iter()
            .map(|rx| {
                let dfa = dense::Builder::new()
                    .configure(
                        dense::Config::new()
                            .start_kind(StartKind::Anchored)
                            .dfa_size_limit(Some(AUTOMATON))
                            .determinize_size_limit(Some(AUTOMATON)),
                    )
                    .thompson(thompson::Config::new().nfa_size_limit(Some(4 * AUTOMATON)))
                    .build(&rx.pattern())
                    .map_err(|_| complex())?;
                let start = dfa
                    .start_state_forward(&Input::new("").anchored(Anchored::Yes))
                    .map_err(|_| complex())?;
                Ok((dfa, start))
            })
            .collect::<Result<_, GrammarError>>()?;
        let mut built = Self { automata, firsts: Vec::new() };
        built.firsts = (0..lexemes.len()).map(|l| built.first(l)).collect();
        Ok(built)
    }

    fn next(&self, lexeme: usize, state: StateID, byte: u8) -> Option<StateID> {
        let dfa = &self.automata[lexeme].0;
        let next = dfa.next_state(state, byte);
        // A match is reported one byte late, by a state that does nothing else.
        (!dfa.is_dead_state(next) && !only_match(dfa, next)).then_some(next)
    }

    fn accepts(&self, lexeme: usize, state: StateID) -> bool {
        let dfa = &self.automata[lexeme].0;
        dfa.is_match_state(dfa.next_eoi_state(state))
    }

    fn first(&self, lexeme: usize) -> Bytes {
        let mut set = Bytes::default();
        let start = self.automata[lexeme].1;
        (0..=255u8).filter(|&b| self.next(lexeme, start, b).is_some()).for_each(|b| add(&mut set, b));
        set
    }

    /// A lexeme that the grammar lets end in front of a byte with which a lexeme could go on.
    pub(crate) fn conflict(&self, cfg: &Cfg, work: &mut Work) -> Result<Option<Conflict>, GrammarError> {
        let used = cfg.used();
        let follow = self.follow(cfg);
        for ending in (0..used.len()).filter(|&l| used[l]) {
            for longer in (0..used.len()).filter(|&l| used[l]) {
                if self.meets(ending, longer, &follow[ending], work)? {
                    return Ok(Some(Conflict { ending, longer }));
                }
            }
        }
        Ok(None)
    }

    /// Whether a word of `ending` is the beginning of a word of `longer` that goes on with one of `bytes`.
    fn meets(
        &self,
        ending: usize,
        longer: usize,
        bytes: &Bytes,
        work: &mut Work,
    ) -> Result<bool, GrammarError> {
        let apart = self.firsts[ending].iter().zip(&self.firsts[longer]).all(|(a, b)| a & b == 0);
        if *bytes == Bytes::default() || apart {
            return Ok(false);
        }
        let start = (self.automata[ending].1, self.automata[longer].1);
        let mut seen = HashSet::from([start]);
        let mut queue = VecDeque::from([(start, true)]);
        while let Some(((a, b), first)) = queue.pop_front() {
            work.spend(1)?;
            // The empty word is no lexeme.
            let ends = !first && self.accepts(ending, a);
            for byte in 0..=255u8 {
                let Some(next_b) = self.next(longer, b, byte) else { continue };
                if ends && has(bytes, byte) {
                    return Ok(true);
                }
                if let Some(next_a) = self.next(ending, a, byte)
                    && seen.insert((next_a, next_b))
                {
                    queue.push_back(((next_a, next_b), false));
                }
            }
            if seen.len() > PAIRS {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Bytes that may follow each lexeme in the grammar.
    fn follow(&self, cfg: &Cfg) -> Vec<Bytes> {
        let lexeme_first = &self.firsts;
        let mut nullable = vec![false; cfg.rules.len()];
        let mut first = vec![Bytes::default(); cfg.rules.len()];
        let mut changed = true;
        while changed {
            changed = false;
            for (rule, alternatives) in cfg.rules.iter().enumerate() {
                for symbols in alternatives {
                    let mut open = true;
                    for symbol in symbols {
                        let (set, empty) = match symbol {
                            Symbol::Lexeme(l) => (lexeme_first[*l], false),
                            Symbol::Rule(r) => (first[*r], nullable[*r]),
                        };
                        changed |= join(&mut first[rule], &set);
                        open = empty;
                        if !open {
                            break;
                        }
                    }
                    if open && !nullable[rule] {
                        nullable[rule] = true;
                        changed = true;
                    }
                }
            }
        }
        let mut after_rule = vec![Bytes::default(); cfg.rules.len()];
        let mut after_lexeme = vec![Bytes::default(); self.automata.len()];
        changed = true;
        while changed {
            changed = false;
            for (rule, alternatives) in cfg.rules.iter().enumerate() {
                for symbols in alternatives {
                    let mut after = after_rule[rule];
                    for symbol in symbols.iter().rev() {
                        match symbol {
                            Symbol::Lexeme(l) => {
                                changed |= join(&mut after_lexeme[*l], &after);
                                after = lexeme_first[*l];
                            }
                            Symbol::Rule(r) => {
                                changed |= join(&mut after_rule[*r], &after);
                                if !nullable[*r] {
                                    after = Bytes::default();
                                }
                                join(&mut after, &first[*r]);
                            }
                        }
                    }
                }
            }
        }
        after_lexeme
    }
}

/// Whether a state reports a match and leads nowhere.
fn only_match(dfa: &dense::DFA<Vec<u32>>, state: StateID) -> bool {
    dfa.is_match_state(state)
        && !dfa.is_match_state(dfa.next_eoi_state(state))
        && (0..=255u8).all(|b| dfa.is_dead_state(dfa.next_state(state, b)))
}
