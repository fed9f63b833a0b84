//! Strict JSON for untrusted directories and the canonical form that digests are taken of.
//!
//! The parser refuses duplicate keys (a last-one-wins reader would see another directory than a first-one-wins
//! reader), numbers that are not finite and nesting beyond [`MAX_DEPTH`]. A number without fraction and exponent is an
//! integer and stays one; any other is the nearest `f64`.
//!
//! The canonical form has sorted keys and no white space. Integers are printed in decimal. Only what a source's
//! config.json brings along holds other numbers (`rms_norm_eps`); they are printed as the shortest digits that read
//! back to the same `f64`, in scientific notation (`2.5e-1`), so that the form does not depend on the writer.

use serde_json::{Map, Number, Value};

/// Deepest nesting the parser follows; real directories use about eight levels.
pub const MAX_DEPTH: usize = 64;

/// Parses one JSON document; white space may surround it. The error is (byte position, reason).
pub fn parse(bytes: &[u8]) -> Result<Value, (usize, String)> {
    let text = std::str::from_utf8(bytes).map_err(|e| (e.valid_up_to(), "not UTF-8".to_owned()))?;
    let mut parser = Parser { text, bytes, at: 0 };
    parser.space();
    let value = parser.value(0)?;
    parser.space();
    if parser.at != bytes.len() {
        return parser.fail("unexpected text after the document");
    }
    Ok(value)
}

struct Parser<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn fail<T>(&self, reason: impl Into<String>) -> Result<T, (usize, String)> {
        Err((self.at, reason.into()))
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), (usize, String)> {
        if self.peek() != Some(byte) {
            return self.fail(format!("expected {:?}", char::from(byte)));
        }
        self.at += 1;
        Ok(())
    }

    fn value(&mut self, depth: usize) -> Result<Value, (usize, String)> {
        if depth > MAX_DEPTH {
            return self.fail(format!("nested deeper than {MAX_DEPTH} levels"));
        }
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => Ok(Value::String(self.string()?)),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.word("true", Value::Bool(true)),
            Some(b'f') => self.word("false", Value::Bool(false)),
            Some(b'n') => self.word("null", Value::Null),
            Some(_) => self.fail("expected a value"),
            None => self.fail("the text ends too early"),
        }
    }

    fn word(&mut self, word: &str, value: Value) -> Result<Value, (usize, String)> {
        if !self.bytes[self.at..].starts_with(word.as_bytes()) {
            return self.fail("expected a value");
        }
        self.at += word.len();
        Ok(value)
    }

    fn object(&mut self, depth: usize) -> Result<Value, (usize, String)> {
        self.expect(b'{')?;
        let mut map = Map::new();
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Value::Object(map));
        }
        loop {
            self.space();
            let start = self.at;
            let key = self.string()?;
            if map.contains_key(&key) {
                return Err((start, format!("duplicate key {key:?}")));
            }
            self.space();
            self.expect(b':')?;
            self.space();
            let value = self.value(depth + 1)?;
            map.insert(key, value);
            self.space();
            if self.peek() == Some(b',') {
                self.at += 1;
                continue;
            }
            self.expect(b'}')?;
            return Ok(Value::Object(map));
        }
    }

    fn array(&mut self, depth: usize) -> Result<Value, (usize, String)> {
        self.expect(b'[')?;
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Value::Array(items));
        }
        loop {
            self.space();
            items.push(self.value(depth + 1)?);
            self.space();
            if self.peek() == Some(b',') {
                self.at += 1;
                continue;
            }
            self.expect(b']')?;
            return Ok(Value::Array(items));
        }
    }

    fn digits(&mut self) -> Result<(), (usize, String)> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { self.fail("expected a digit") } else { Ok(()) }
    }

    fn number(&mut self) -> Result<Value, (usize, String)> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        let first = self.at;
        self.digits()?;
        if self.bytes[first] == b'0' && self.at - first > 1 {
            return Err((start, "a number starts with a zero".to_owned()));
        }
        let mut integer = true;
        if self.peek() == Some(b'.') {
            integer = false;
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            integer = false;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        let text = &self.text[start..self.at];
        let number = if integer {
            text.parse::<u64>().map(Number::from).or_else(|_| text.parse::<i64>().map(Number::from)).ok()
        } else {
            text.parse::<f64>().ok().and_then(Number::from_f64)
        };
        number.map(Value::Number).ok_or_else(|| (start, format!("number {text:.40} is out of range")))
    }

    fn string(&mut self) -> Result<String, (usize, String)> {
        self.expect(b'"')?;
        let mut out = String::new();
        loop {
            let start = self.at;
            while !matches!(self.peek(), None | Some(b'"' | b'\\' | 0..=0x1f)) {
                self.at += 1;
            }
            out.push_str(&self.text[start..self.at]);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(out);
                }
                Some(b'\\') => {
                    self.at += 1;
                    let escaped = self.peek();
                    self.at += 1;
                    match escaped {
                        Some(c @ (b'"' | b'\\' | b'/')) => out.push(char::from(c)),
                        Some(b'b') => out.push('\u{8}'),
                        Some(b'f') => out.push('\u{c}'),
                        Some(b'n') => out.push('\n'),
                        Some(b'r') => out.push('\r'),
                        Some(b't') => out.push('\t'),
                        Some(b'u') => out.push(self.unicode()?),
                        _ => return self.fail("unknown escape in a string"),
                    }
                }
                Some(_) => return self.fail("control character in a string"),
                None => return self.fail("the text ends inside a string"),
            }
        }
    }

    fn unicode(&mut self) -> Result<char, (usize, String)> {
        let high = self.hex4()?;
        let code = if (0xd800..0xdc00).contains(&high) && self.bytes[self.at..].starts_with(b"\\u") {
            self.at += 2;
            let low = self.hex4()?;
            if !(0xdc00..0xe000).contains(&low) {
                return self.fail("lone surrogate in a string");
            }
            0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00)
        } else {
            high
        };
        char::from_u32(code).ok_or_else(|| (self.at, "lone surrogate in a string".to_owned()))
    }

    fn hex4(&mut self) -> Result<u32, (usize, String)> {
        let text = self.text.get(self.at..self.at + 4).filter(|t| t.bytes().all(|b| b.is_ascii_hexdigit()));
        let Some(code) = text.and_then(|t| u32::from_str_radix(t, 16).ok()) else {
            return self.fail("expected four hex digits after \\u");
        };
        self.at += 4;
        Ok(code)
    }
}

/// The canonical form of `value`.
pub fn canonical(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value);
    out
}

/// Appends the canonical form of `value`.
pub(crate) fn write_value(out: &mut String, value: &Value) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write_number(out, number),
        Value::String(text) => write_string(out, text),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write_value(out, item);
            }
            out.push(']');
        }
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort_unstable();
            write_members(out, keys.into_iter().map(|key| (key.as_str(), &map[key])));
        }
    }
}

/// Appends an object whose members keep the given order.
pub(crate) fn write_members<'a>(out: &mut String, members: impl Iterator<Item = (&'a str, &'a Value)>) {
    out.push('{');
    for (i, (key, value)) in members.enumerate() {
        if i > 0 {
            out.push(',');
        }
        write_string(out, key);
        out.push(':');
        write_value(out, value);
    }
    out.push('}');
}

fn write_number(out: &mut String, number: &Number) {
    use std::fmt::Write as _;
    let result = if let Some(n) = number.as_u64() {
        write!(out, "{n}")
    } else if let Some(n) = number.as_i64() {
        write!(out, "{n}")
    } else {
        write!(out, "{:e}", number.as_f64().unwrap_or(0.0))
    };
    debug_assert!(result.is_ok(), "writing to a string cannot fail");
}

/// Appends a JSON string: `"`, `\` and control characters escaped, everything else as it is.
pub(crate) fn write_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn duplicate_keys_are_refused_at_any_depth() {
        let (at, reason) = parse(br#"{"a":{"b":1,"b":2}}"#).unwrap_err();
        assert_eq!((at, reason.as_str()), (12, "duplicate key \"b\""));
        assert!(parse(br#"{"a":1,"\u0061":2}"#).is_err(), "an escape must not hide a duplicate");
    }

    #[test]
    fn non_finite_and_malformed_numbers_are_refused() {
        for bad in
            ["NaN", "Infinity", "1e999", "-1e999", "01", "1.", ".5", "+1", "1e", "-", "18446744073709551616"]
        {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn deep_nesting_is_refused_not_followed() {
        let deep = "[".repeat(1 << 20);
        assert!(parse(deep.as_bytes()).unwrap_err().1.contains("deeper"));
    }

    #[test]
    fn canonical_sorts_and_keeps_integers_apart_from_floats() {
        let value =
            parse(br#" {"b": 10000000.0, "a": [1e-06, -7, 0.25, "\u00e9\n"], "c": 10000000} "#).unwrap();
        assert_eq!(canonical(&value), "{\"a\":[1e-6,-7,2.5e-1,\"\u{e9}\\n\"],\"b\":1e7,\"c\":10000000}");
    }

    #[test]
    fn truncated_texts_never_panic() {
        let text = br#"{"a":[1,-2.5e3,"x\u00e9\ud83d\ude00",true,null,false]}"#;
        assert!(parse(text).is_ok());
        for n in 0..text.len() {
            assert!(parse(&text[..n]).is_err());
        }
    }

    proptest! {
        #[test]
        fn canonical_reads_back_to_itself(bits: u64, text: String, n: i64) {
            let float = f64::from_bits(bits);
            let mut map = Map::new();
            map.insert(text.clone(), Value::from(n));
            map.insert(format!("{text}x"), Number::from_f64(float).map_or(Value::Null, Value::Number));
            let once = canonical(&Value::Object(map));
            prop_assert_eq!(canonical(&parse(once.as_bytes()).unwrap()), once);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = parse(&bytes);
        }
    }
}
