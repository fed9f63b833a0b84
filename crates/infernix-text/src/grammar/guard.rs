//! What a context-free grammar cannot say about JSON: names of one object differ, numbers stay in range.

use std::collections::HashSet;
use std::sync::Arc;

/// Digits before the point. 18 fit 64 bits and are exact in what most clients read them into.
const WHOLE_DIGITS: u8 = 18;
/// Digits behind the point; binary64 needs 17.
const FRACTION_DIGITS: u8 = 24;
/// Digits of the exponent: with 18 digits before the point the value stays below 1e118.
const EXPONENT_DIGITS: u8 = 2;

/// Reads JSON byte by byte. The grammar beside it proves the form; this only counts and compares.
#[derive(Debug, Clone, Default)]
pub(super) struct Guard {
    stack: Vec<Frame>,
    mode: Mode,
    /// The bytes of the name being read.
    name: Vec<u8>,
}

#[derive(Debug, Clone)]
enum Frame {
    Object(Arc<HashSet<Box<[u8]>>>),
    Array,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Mode {
    #[default]
    Between,
    /// Between, and the next string is a name.
    BeforeName,
    Name {
        escaped: bool,
    },
    Text {
        escaped: bool,
    },
    Whole(u8),
    Fraction(u8),
    Exponent(u8),
}

impl Guard {
    /// Whether a token with a quotation mark could be wrong here.
    pub(super) fn watches_names(&self) -> bool {
        self.stack.iter().any(|frame| matches!(frame, Frame::Object(names) if !names.is_empty()))
    }

    /// Whether a token that begins like a number could be wrong here.
    pub(super) fn in_number(&self) -> bool {
        matches!(self.mode, Mode::Whole(_) | Mode::Fraction(_) | Mode::Exponent(_))
    }

    /// Whether the bytes may follow.
    pub(super) fn allows(&self, bytes: &[u8]) -> bool {
        self.clone().advance(bytes)
    }

    /// Moves on; false when a name repeats or a number grows too long.
    pub(super) fn advance(&mut self, bytes: &[u8]) -> bool {
        bytes.iter().all(|&b| self.step(b))
    }

    fn step(&mut self, byte: u8) -> bool {
        match self.mode {
            Mode::Name { escaped } => match byte {
                b'"' if !escaped => return self.end_name(),
                _ => {
                    self.name.push(byte);
                    self.mode = Mode::Name { escaped: !escaped && byte == b'\\' };
                }
            },
            Mode::Text { escaped } => {
                self.mode = match byte {
                    b'"' if !escaped => Mode::Between,
                    _ => Mode::Text { escaped: !escaped && byte == b'\\' },
                };
            }
            Mode::Whole(n) => match byte {
                b'0'..=b'9' => {
                    self.mode = Mode::Whole(n + 1);
                    return n < WHOLE_DIGITS;
                }
                b'.' => self.mode = Mode::Fraction(0),
                b'e' | b'E' => self.mode = Mode::Exponent(0),
                b'-' => {}
                _ => self.between(byte),
            },
            Mode::Fraction(n) => match byte {
                b'0'..=b'9' => {
                    self.mode = Mode::Fraction(n + 1);
                    // Beside an exclusive bound a number ends with another digit than 0, or it would have to go on.
                    return n + 1 < FRACTION_DIGITS || n < FRACTION_DIGITS && byte != b'0';
                }
                b'e' | b'E' => self.mode = Mode::Exponent(0),
                _ => self.between(byte),
            },
            Mode::Exponent(n) => match byte {
                b'0'..=b'9' => {
                    self.mode = Mode::Exponent(n + 1);
                    return n < EXPONENT_DIGITS;
                }
                b'+' | b'-' => {}
                _ => self.between(byte),
            },
            Mode::Between | Mode::BeforeName => self.between(byte),
        }
        true
    }

    fn between(&mut self, byte: u8) {
        let name_next = self.mode == Mode::BeforeName;
        self.mode = Mode::Between;
        match byte {
            b'{' => {
                self.stack.push(Frame::Object(Arc::default()));
                self.mode = Mode::BeforeName;
            }
            b'[' => self.stack.push(Frame::Array),
            b'}' | b']' => {
                self.stack.pop();
            }
            b',' if matches!(self.stack.last(), Some(Frame::Object(_))) => self.mode = Mode::BeforeName,
            b'"' if name_next => {
                self.name.clear();
                self.mode = Mode::Name { escaped: false };
            }
            b'"' => self.mode = Mode::Text { escaped: false },
            b'0'..=b'9' => self.mode = Mode::Whole(1),
            b'-' => self.mode = Mode::Whole(0),
            _ => {}
        }
    }

    fn end_name(&mut self) -> bool {
        self.mode = Mode::Between;
        let raw = std::mem::take(&mut self.name);
        // One name may be spelled in several ways; compare what it means.
        let name = if raw.contains(&b'\\') {
            let quoted = [b"\"".as_slice(), &raw, b"\""].concat();
            serde_json::from_slice::<String>(&quoted).map_or(raw, String::into_bytes)
        } else {
            raw
        };
        match self.stack.last_mut() {
            Some(Frame::Object(names)) => Arc::make_mut(names).insert(name.into()),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_repeat_in_other_objects_only() {
        let fits = |text: &str| Guard::default().advance(text.as_bytes());
        assert!(fits(r#"{"a":{"a":[{"a":"a\"b","b":1}]},"b":"a"}"#));
        assert!(!fits(r#"{"a":1,"a":2}"#));
        assert!(!fits(r#"{"a":1,"\u0061":2}"#));
        assert!(!fits(r#"{"a":[{"x":{}}],"b":2,"a""#));
        assert!(!fits(r#"{"\n":1,"\u000a":"#));
        assert!(fits(r#"{"a\"":1,"a\\":2}"#));
    }

    #[test]
    fn numbers_stay_within_what_clients_can_read() {
        let fits = |text: &str| Guard::default().advance(text.as_bytes());
        assert!(fits("123456789012345678") && !fits("1234567890123456789"));
        assert!(fits("[-1.5e-99,2]") && !fits("[1e100"));
        assert!(!fits(&format!("0.{}", "1".repeat(25))) && fits(&format!("0.{}", "1".repeat(24))));
        assert!(!fits(&format!("0.{}", "0".repeat(24))) && fits(&format!("0.{}1", "0".repeat(23))));
        assert!(fits(r#"{"a":"12345678901234567890","12345678901234567890":1}"#));
        let mut guard = Guard::default();
        assert!(guard.advance(b"[12345678901") && guard.in_number());
        assert!(guard.advance(b",\"x") && !guard.in_number());
    }
}
