//! Which tokens a number may be made of, step by step.

use crate::error::ApiError;
use infernix_engine::sched::Constraint;
use infernix_text::Tokenizer;
use std::sync::Arc;

/// The shape of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Exactly this many digits.
    Number { digits: usize },
    /// A sign, at most this many digits and a point.
    Scalar { digits: usize },
}

impl Form {
    /// Most tokens: of a scalar the sign, a point, one digit too many and the closing brace.
    pub(super) fn steps(self) -> usize {
        match self {
            Self::Number { digits } => digits,
            Self::Scalar { digits } => digits + 4,
        }
    }
}

/// The tokens of numbers in a vocabulary.
#[derive(Debug)]
pub(super) struct Symbols {
    /// Digits, point, brace, then the signs: all that can be free.
    watched: Vec<u32>,
    /// Whether the vocabulary joins the sign to the colon, so that `":` and `":-` are the choice.
    joined: bool,
    number_lead: Vec<u32>,
    scalar_lead: Vec<u32>,
}

/// Places in [`Symbols::watched`].
pub(super) const POINT: usize = 10;
pub(super) const END: usize = 11;
pub(super) const PLUS: usize = 12;
pub(super) const MINUS: usize = 13;

impl Symbols {
    pub(super) fn of(tokenizer: &Tokenizer) -> Result<Arc<Self>, ApiError> {
        let missing = |text: &str| ApiError::internal(format!("this vocabulary has no token {text:?}"));
        let one = |text: &str| tokenizer.token_id(text).ok_or_else(|| missing(text));
        let mut watched = Vec::with_capacity(14);
        for digit in 0..10u8 {
            watched.push(one(&char::from(b'0' + digit).to_string())?);
        }
        watched.push(one(".")?);
        watched.push(one("}")?);
        let pair = tokenizer.token_id("\":").zip(tokenizer.token_id("\":-"));
        let (joined, signs, before) = match pair {
            Some((plus, minus)) => (true, vec![plus, minus], "{\"value"),
            None => (false, vec![one("-")?, one("-")?], "{\"value\":"),
        };
        watched.extend(signs);
        Ok(Arc::new(Self {
            watched,
            joined,
            number_lead: tokenizer.encode_text("{\"number\":")?,
            scalar_lead: tokenizer.encode_text(before)?,
        }))
    }

    /// What the answer begins with, before anything is free.
    pub(super) fn lead(&self, form: Form) -> &[u32] {
        match form {
            Form::Number { .. } => &self.number_lead,
            Form::Scalar { .. } => &self.scalar_lead,
        }
    }

    /// Ids whose probabilities are wanted.
    pub(super) fn watched(&self) -> &[u32] {
        &self.watched
    }

    /// What an id is, as a place in [`Symbols::watched`]; the sign where there are two readings.
    pub(super) fn symbol(&self, id: u32) -> Option<usize> {
        self.watched.iter().rposition(|w| *w == id)
    }

    /// Places that may come next after these.
    pub(super) fn allowed(&self, form: Form, so_far: &[usize]) -> Vec<usize> {
        let digit = 0..10usize;
        match form {
            Form::Number { digits } if so_far.len() < digits => digit.collect(),
            Form::Number { .. } => Vec::new(),
            Form::Scalar { digits } => {
                if so_far.last() == Some(&END) || too_many(so_far, digits) {
                    return Vec::new();
                }
                let body = so_far.iter().filter(|s| **s < PLUS).count();
                match (so_far.is_empty(), self.joined) {
                    (true, true) => return vec![PLUS, MINUS],
                    (true, false) => return digit.chain([END, MINUS]).collect(),
                    _ => {}
                }
                // At once the end: the model says that there is no number.
                let mut allowed: Vec<usize> = digit.collect();
                let after_point = so_far.last() == Some(&POINT);
                if !after_point {
                    allowed.push(END);
                }
                if body > 0 && !after_point && !so_far.contains(&POINT) {
                    allowed.push(POINT);
                }
                allowed
            }
        }
    }
}

/// Whether more digits were written than asked for.
pub(super) fn too_many(so_far: &[usize], digits: usize) -> bool {
    so_far.iter().filter(|s| **s < 10).count() > digits
}

/// A schedule as the engine follows it.
#[derive(Debug)]
pub(super) struct Schedule {
    symbols: Arc<Symbols>,
    form: Form,
    so_far: Vec<usize>,
}

impl Schedule {
    pub(super) fn new(symbols: Arc<Symbols>, form: Form) -> Self {
        Self { symbols, form, so_far: Vec::new() }
    }

    fn allows(&self, id: u32) -> Option<usize> {
        let symbol = self.symbols.symbol(id)?;
        self.symbols.allowed(self.form, &self.so_far).contains(&symbol).then_some(symbol)
    }
}

impl Constraint for Schedule {
    fn mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        let mut keep = vec![0u32; words.len()];
        for symbol in self.symbols.allowed(self.form, &self.so_far) {
            let id = self.symbols.watched[symbol] as usize;
            if let Some(word) = keep.get_mut(id / 32) {
                *word |= 1 << (id % 32);
            }
        }
        words.iter_mut().zip(keep).for_each(|(word, keep)| *word &= keep);
        Ok(())
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        let symbol = self.allows(id).ok_or_else(|| format!("token {id} is not in the schedule"))?;
        self.so_far.push(symbol);
        Ok(())
    }

    fn rollback(&mut self, n: usize) -> Result<(), String> {
        let left = self.so_far.len().checked_sub(n).ok_or("more tokens taken back than accepted")?;
        self.so_far.truncate(left);
        Ok(())
    }

    fn accepts(&mut self, ids: &[u32]) -> usize {
        let n = ids.iter().take_while(|id| self.accept(**id).is_ok()).count();
        self.so_far.truncate(self.so_far.len() - n);
        n
    }

    fn finished(&self) -> bool {
        self.symbols.allowed(self.form, &self.so_far).is_empty()
    }
}
