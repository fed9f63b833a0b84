//! JSON and numbers spelled as Python spells them, which is what the models were trained on.

use serde_json::{Map, Value};

/// The options of Python's `json.dumps` that templates use.
#[derive(Debug, Clone)]
pub(crate) struct Style {
    pub(crate) ensure_ascii: bool,
    /// Text of one indentation step; none writes everything on one line.
    pub(crate) indent: Option<String>,
    pub(crate) item_separator: String,
    pub(crate) key_separator: String,
    pub(crate) sort_keys: bool,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            ensure_ascii: false,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            sort_keys: false,
        }
    }
}

/// `json.dumps(value, ensure_ascii=False)`.
pub(crate) fn dumps(value: &Value) -> String {
    let mut out = String::new();
    write(&mut out, value, &Style::default(), 0);
    out
}

/// Appends `value` at the given nesting depth.
pub(crate) fn write(out: &mut String, value: &Value, style: &Style, depth: usize) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(n) => match n.as_f64() {
            Some(x) if n.is_f64() => out.push_str(&float_repr(x)),
            _ => out.push_str(&n.to_string()),
        },
        Value::String(s) => write_string(out, s, style.ensure_ascii),
        Value::Array(items) => {
            if items.is_empty() {
                out.push_str("[]");
                return;
            }
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                separate(out, style, i, depth + 1);
                write(out, item, style, depth + 1);
            }
            close(out, style, depth, ']');
        }
        Value::Object(map) => write_object(out, map, style, depth),
    }
}

fn write_object(out: &mut String, map: &Map<String, Value>, style: &Style, depth: usize) {
    if map.is_empty() {
        out.push_str("{}");
        return;
    }
    let mut entries: Vec<_> = map.iter().collect();
    if style.sort_keys {
        entries.sort_by(|a, b| a.0.cmp(b.0));
    }
    out.push('{');
    for (i, (key, value)) in entries.into_iter().enumerate() {
        separate(out, style, i, depth + 1);
        write_string(out, key, style.ensure_ascii);
        out.push_str(&style.key_separator);
        write(out, value, style, depth + 1);
    }
    close(out, style, depth, '}');
}

pub(crate) fn separate(out: &mut String, style: &Style, index: usize, depth: usize) {
    if index > 0 {
        out.push_str(&style.item_separator);
    }
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

pub(crate) fn close(out: &mut String, style: &Style, depth: usize, bracket: char) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
    out.push(bracket);
}

pub(crate) fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    use std::fmt::Write as _;
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !(' '..='~').contains(&c)) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// `repr(x)` of a Python float: shortest digits, an exponent from 1e16 up and below 1e-4.
pub(crate) fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let fixed = format!("{x}");
        if fixed.contains('.') { fixed } else { fixed + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{mantissa}e{sign}{:02}", exponent.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelled_like_python() {
        for (x, s) in [
            (0.1, "0.1"),
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (123456789.123, "123456789.123"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(float_repr(x), s);
        }
    }

    #[test]
    fn strings_escape_what_python_escapes_and_no_more() {
        let style = Style { ensure_ascii: true, ..Style::default() };
        let value = Value::from("<>&'\"\\/\u{7f}é🦀\n\u{1}");
        assert_eq!(dumps(&value), "\"<>&'\\\"\\\\/\u{7f}é🦀\\n\\u0001\"");
        let mut out = String::new();
        write(&mut out, &value, &style, 0);
        assert_eq!(out, "\"<>&'\\\"\\\\/\\u007f\\u00e9\\ud83e\\udd80\\n\\u0001\"");
    }
}
