//! Regular expressions as plain data, and their spelling for the lexer below.

use std::fmt::Write;

/// Most nodes with repetitions written out.
const WEIGHT: usize = 1 << 18;

/// A regular expression over code points.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Rx {
    /// This text; the empty text matches nothing but itself.
    Literal(String),
    /// One code point out of these ranges, which are ascending and apart.
    Class(Vec<(char, char)>),
    Seq(Vec<Rx>),
    Alt(Vec<Rx>),
    Repeat(Box<Rx>, u32, Option<u32>),
}

impl Rx {
    pub(crate) fn empty() -> Self {
        Self::Literal(String::new())
    }

    /// Any text at all.
    pub(crate) fn anything() -> Self {
        Self::Repeat(Box::new(Self::Class(vec![('\0', char::MAX)])), 0, None)
    }

    pub(crate) fn seq(mut parts: Vec<Self>) -> Self {
        parts.retain(|p| *p != Self::empty());
        match parts.len() {
            0 => Self::empty(),
            1 => parts.remove(0),
            _ => Self::Seq(parts),
        }
    }

    pub(crate) fn alt(mut parts: Vec<Self>) -> Self {
        if parts.len() == 1 { parts.remove(0) } else { Self::Alt(parts) }
    }

    /// Whether the empty text matches.
    pub(crate) fn nullable(&self) -> bool {
        match self {
            Self::Literal(text) => text.is_empty(),
            Self::Class(_) => false,
            Self::Seq(parts) => parts.iter().all(Self::nullable),
            Self::Alt(parts) => parts.iter().any(Self::nullable),
            Self::Repeat(inner, min, _) => *min == 0 || inner.nullable(),
        }
    }

    /// Whether a text that matches may contain the character; some that never match may be counted, too.
    pub(crate) fn mentions(&self, c: char) -> bool {
        match self {
            Self::Literal(text) => text.contains(c),
            Self::Class(ranges) => ranges.iter().any(|&(low, high)| (low..=high).contains(&c)),
            Self::Seq(parts) | Self::Alt(parts) => parts.iter().any(|p| p.mentions(c)),
            Self::Repeat(inner, _, max) => *max != Some(0) && inner.mentions(c),
        }
    }

    /// Characters of the shortest text that matches.
    pub(crate) fn shortest(&self) -> u64 {
        match self {
            Self::Literal(text) => text.chars().count() as u64,
            Self::Class(_) => 1,
            Self::Seq(parts) => parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.shortest())),
            Self::Alt(parts) => parts.iter().map(Self::shortest).min().unwrap_or(0),
            Self::Repeat(inner, min, _) => inner.shortest().saturating_mul(u64::from(*min)),
        }
    }

    /// All texts that match, where they are `most` or fewer; some may come twice.
    pub(crate) fn texts(&self, most: usize) -> Option<Vec<String>> {
        let join = |heads: Vec<String>, tails: &[String]| {
            let fits = heads.len().saturating_mul(tails.len()) <= most;
            fits.then(|| heads.iter().flat_map(|h| tails.iter().map(move |t| h.clone() + t)).collect())
        };
        match self {
            Self::Literal(text) => Some(vec![text.clone()]),
            Self::Class(ranges) => {
                let all = ranges.iter().flat_map(|&(low, high)| low..=high);
                let texts: Vec<String> = all.take(most + 1).map(String::from).collect();
                (texts.len() <= most).then_some(texts)
            }
            Self::Seq(parts) => {
                parts.iter().try_fold(vec![String::new()], |heads, part| join(heads, &part.texts(most)?))
            }
            Self::Alt(parts) => {
                let mut texts = Vec::new();
                for part in parts {
                    texts.extend(part.texts(most)?);
                }
                (texts.len() <= most).then_some(texts)
            }
            Self::Repeat(inner, min, max) => {
                let inner = inner.texts(most)?;
                let (mut power, mut texts) = (vec![String::new()], Vec::new());
                for n in 0..=(*max)? {
                    if n >= *min {
                        texts.extend(power.iter().cloned());
                    }
                    if texts.len() > most {
                        return None;
                    }
                    if n < (*max)? {
                        power = join(power, &inner)?;
                    }
                }
                Some(texts)
            }
        }
    }

    /// Whether no text matches.
    pub(crate) fn is_void(&self) -> bool {
        match self {
            Self::Literal(_) => false,
            Self::Class(ranges) => ranges.is_empty(),
            Self::Seq(parts) => parts.iter().any(Self::is_void),
            Self::Alt(parts) => parts.iter().all(Self::is_void),
            Self::Repeat(inner, min, _) => *min > 0 && inner.is_void(),
        }
    }

    /// Number of nodes.
    pub(crate) fn size(&self) -> usize {
        1 + match self {
            Self::Literal(text) => text.len(),
            Self::Class(ranges) => ranges.len(),
            Self::Seq(parts) | Self::Alt(parts) => parts.iter().map(Self::size).sum(),
            Self::Repeat(inner, _, _) => inner.size(),
        }
    }

    /// Number of nodes with every repetition written out, as an automaton would have them.
    pub(crate) fn weight(&self) -> usize {
        match self {
            Self::Literal(text) => text.len().max(1),
            Self::Class(_) => 1,
            Self::Seq(parts) | Self::Alt(parts) => {
                parts.iter().fold(1, |sum: usize, part| sum.saturating_add(part.weight()))
            }
            Self::Repeat(inner, min, max) => {
                inner.weight().saturating_mul(max.unwrap_or(*min).max(1) as usize)
            }
        }
    }

    /// Whether repetitions of repetitions make it larger than the lexer can take.
    pub(crate) fn is_too_heavy(&self) -> bool {
        self.weight() > WEIGHT
    }

    /// The expression in the syntax of the `regex` crates. Everything but letters and digits is escaped by its
    /// number, so that no flag and no surrounding syntax can change its meaning.
    pub(crate) fn pattern(&self) -> String {
        let mut out = String::new();
        self.write(&mut out);
        out
    }

    /// The same between slashes, as a Lark terminal.
    pub(crate) fn lark(&self) -> String {
        format!("/{}/", self.pattern())
    }

    fn write(&self, out: &mut String) {
        match self {
            Self::Literal(text) if text.is_empty() => out.push_str("(?:)"),
            Self::Literal(text) => text.chars().for_each(|c| spell(c, out)),
            Self::Class(ranges) if ranges.is_empty() => out.push_str("[^\\x{0}-\\x{10FFFF}]"),
            Self::Class(ranges) => {
                out.push('[');
                for &(low, high) in ranges {
                    spell(low, out);
                    if low != high {
                        out.push('-');
                        spell(high, out);
                    }
                }
                out.push(']');
            }
            Self::Seq(parts) => parts.iter().for_each(|p| p.write(out)),
            Self::Alt(parts) => {
                out.push_str("(?:");
                for (i, part) in parts.iter().enumerate() {
                    if i > 0 {
                        out.push('|');
                    }
                    part.write(out);
                }
                out.push(')');
            }
            Self::Repeat(inner, min, max) => {
                match **inner {
                    Self::Class(_) | Self::Alt(_) => inner.write(out),
                    _ => {
                        out.push_str("(?:");
                        inner.write(out);
                        out.push(')');
                    }
                }
                // Writing to a string does not fail.
                let _ = match (min, max) {
                    (0, None) => write!(out, "*"),
                    (1, None) => write!(out, "+"),
                    (0, Some(1)) => write!(out, "?"),
                    (min, None) => write!(out, "{{{min},}}"),
                    (min, Some(max)) => write!(out, "{{{min},{max}}}"),
                };
            }
        }
    }
}

fn spell(c: char, out: &mut String) {
    if c.is_ascii_alphanumeric() {
        out.push(c);
    } else {
        let _ = write!(out, "\\x{{{:X}}}", u32::from(c));
    }
}

/// Sorts ranges and joins those that touch.
pub(crate) fn normalize(mut ranges: Vec<(char, char)>) -> Vec<(char, char)> {
    ranges.sort_unstable();
    let mut out: Vec<(char, char)> = Vec::with_capacity(ranges.len());
    for (low, high) in ranges {
        match out.last_mut() {
            Some(last) if low <= last.1 || after(last.1) == Some(low) => last.1 = last.1.max(high),
            _ => out.push((low, high)),
        }
    }
    out
}

/// All code points outside of `ranges`, which are normalized.
pub(crate) fn negate(ranges: &[(char, char)]) -> Vec<(char, char)> {
    let mut out = Vec::new();
    let mut next = Some('\0');
    for &(low, high) in ranges {
        if let (Some(from), Some(to)) = (next, before(low))
            && from <= to
        {
            out.push((from, to));
        }
        next = after(high);
    }
    if let Some(from) = next {
        out.push((from, char::MAX));
    }
    out
}

fn after(c: char) -> Option<char> {
    match c {
        '\u{D7FF}' => Some('\u{E000}'),
        char::MAX => None,
        c => char::from_u32(u32::from(c) + 1),
    }
}

fn before(c: char) -> Option<char> {
    match c {
        '\0' => None,
        '\u{E000}' => Some('\u{D7FF}'),
        c => char::from_u32(u32::from(c) - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negation_covers_everything_else_once() {
        let ranges = normalize(vec![('a', 'c'), ('b', 'd'), ('e', 'e'), ('\0', '\u{1F}')]);
        assert_eq!(ranges, [('\0', '\u{1F}'), ('a', 'e')]);
        assert_eq!(negate(&ranges), [(' ', '`'), ('f', char::MAX)]);
        assert_eq!(negate(&negate(&ranges)), ranges);
        assert_eq!(negate(&[]), [('\0', char::MAX)]);
        assert!(negate(&[('\0', char::MAX)]).is_empty());
        assert_eq!(negate(&[('\u{E000}', char::MAX)]), [('\0', '\u{D7FF}')]);
    }

    #[test]
    fn few_texts_are_listed_and_many_are_not() {
        let class = |low, high| Rx::Class(vec![(low, high)]);
        let repeat = |rx, min, max| Rx::Repeat(Box::new(rx), min, max);
        let rx = Rx::Seq(vec![Rx::Literal("x".into()), repeat(class('a', 'b'), 1, Some(2))]);
        assert_eq!(rx.texts(6).expect("few"), ["xa", "xb", "xaa", "xab", "xba", "xbb"]);
        assert_eq!(rx.texts(5), None);
        assert_eq!(Rx::Alt(vec![Rx::empty(), class('0', '1')]).texts(3).expect("few"), ["", "0", "1"]);
        for many in [Rx::anything(), class('\0', char::MAX), repeat(class('a', 'z'), 0, Some(1 << 20))] {
            assert_eq!(many.texts(64), None);
        }
    }

    #[test]
    fn patterns_cannot_be_misread() {
        let rx = Rx::Seq(vec![
            Rx::Literal("a/]\n".into()),
            Rx::Repeat(Box::new(Rx::Literal("ab".into())), 2, Some(3)),
            Rx::Repeat(Box::new(Rx::Class(vec![('-', '-'), ('0', '9')])), 0, None),
            Rx::Alt(vec![Rx::empty(), Rx::Literal("é".into())]),
        ]);
        assert_eq!(rx.pattern(), "a\\x{2F}\\x{5D}\\x{A}(?:ab){2,3}[\\x{2D}0-9]*(?:(?:)|\\x{E9})");
        assert!(rx.shortest() == 8 && rx.mentions('-') && !rx.mentions('z'));
        assert!(!rx.nullable() && Rx::anything().nullable());
        let power = |rx| Rx::Repeat(Box::new(rx), 0, Some(4096));
        assert!(!power(Rx::Literal("a".into())).is_too_heavy());
        assert!(power(power(power(Rx::Literal("a".into())))).is_too_heavy());
    }
}
