//! Between JSON and the template engine's values, and from those to JSON text as Python writes it.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

use crate::pyjson::{self, Style};

/// Deeper structures are refused: a template can nest lists without end.
const MAX_DEPTH: usize = 200;

/// The template's view of a JSON value; key order is kept.
pub(crate) fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => {
            if let Some(i) = n.as_i64() {
                Value::from(i)
            } else if let Some(u) = n.as_u64() {
                Value::from(u)
            } else {
                Value::from(n.as_f64().unwrap_or(f64::NAN))
            }
        }
        Json::String(s) => Value::from(s.as_str()),
        Json::Array(items) => Value::from(items.iter().map(from_json).collect::<Vec<_>>()),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), from_json(v)))),
    }
}

/// `json.dumps` of a template value.
pub(crate) fn dump(value: &Value, style: &Style) -> Result<String, Error> {
    let mut out = String::new();
    write(&mut out, value, style, 0)?;
    Ok(out)
}

fn write(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::BadSerialization, "the value is nested too deeply for tojson"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => match as_float(value) {
            Some(x) if x.is_nan() => out.push_str("NaN"),
            Some(x) if x.is_infinite() => {
                out.push_str(if x > 0.0 { "Infinity" } else { "-Infinity" });
            }
            Some(x) => out.push_str(&pyjson::float_repr(x)),
            None => out.push_str(&value.to_string()),
        },
        ValueKind::String => {
            pyjson::write_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii);
        }
        ValueKind::Seq => {
            let mut any = false;
            for item in value.try_iter()? {
                if !any {
                    out.push('[');
                }
                pyjson::separate(out, style, usize::from(any), depth + 1);
                write(out, &item, style, depth + 1)?;
                any = true;
            }
            if any {
                pyjson::close(out, style, depth, ']');
            } else {
                out.push_str("[]");
            }
        }
        ValueKind::Map => {
            let mut entries = Vec::new();
            for key in value.try_iter()? {
                let name = key_name(&key)?;
                entries.push((name, value.get_item(&key)?));
            }
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.cmp(&b.0));
            }
            if entries.is_empty() {
                out.push_str("{}");
                return Ok(());
            }
            out.push('{');
            for (index, (name, item)) in entries.iter().enumerate() {
                pyjson::separate(out, style, index, depth + 1);
                pyjson::write_string(out, name, style.ensure_ascii);
                out.push_str(&style.key_separator);
                write(out, item, style, depth + 1)?;
            }
            pyjson::close(out, style, depth, '}');
        }
        kind => {
            return Err(Error::new(
                ErrorKind::BadSerialization,
                format!("tojson cannot write a value of type {kind}"),
            ));
        }
    }
    Ok(())
}

/// How Python's JSON spells a key that is not a string.
fn key_name(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        ValueKind::Number => display(key),
        kind => {
            return Err(Error::new(
                ErrorKind::BadSerialization,
                format!("tojson cannot write a key of type {kind}"),
            ));
        }
    })
}

/// The number if it is a float.
pub(crate) fn as_float(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        f64::try_from(value.clone()).ok()
    } else {
        None
    }
}

/// `str(value)`.
pub(crate) fn display(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        ValueKind::Undefined => String::new(),
        _ => repr(value),
    }
}

/// `repr(value)`.
pub(crate) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(&mut out, value, 0);
    out
}

fn write_repr(out: &mut String, value: &Value, depth: usize) {
    if depth > MAX_DEPTH {
        out.push_str("...");
        return;
    }
    match value.kind() {
        ValueKind::String => write_string_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Number => match as_float(value) {
            Some(x) => out.push_str(&pyjson::float_repr(x)),
            None => out.push_str(&value.to_string()),
        },
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                if count > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &item, depth + 1);
                count += 1;
            }
            if tuple && count == 1 {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        // Objects of the engine that look like mappings (namespaces, loops) print themselves.
        ValueKind::Map if value.as_object().is_some() => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &key, depth + 1);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// A string literal of Python: single quotes unless only double ones avoid an escape.
fn write_string_repr(out: &mut String, text: &str) {
    use std::fmt::Write as _;
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if printable(c) => out.push(c),
            // Writing to a string cannot fail.
            c => {
                let code = u32::from(c);
                let _ = match code {
                    0..=0xFF => write!(out, "\\x{code:02x}"),
                    0x100..=0xFFFF => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// `str.isprintable` for what occurs in text: no controls, formats, separators but the space, private use.
fn printable(c: char) -> bool {
    !(c.is_control()
        || (c.is_whitespace() && c != ' ')
        || matches!(c, '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
            | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{e000}'..='\u{f8ff}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e0001}'..='\u{e007f}' | '\u{f0000}'..))
}
