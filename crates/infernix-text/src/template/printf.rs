//! Python's `%` on strings.

use minijinja::formatting::{FormatStyle, format as engine_format};
use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::values::{as_float, display, repr};

/// Wider fields are refused.
const MAX_WIDTH: usize = 1 << 16;

/// `template % right`: a tuple gives the arguments, a mapping the named ones, anything else is the one.
pub(crate) fn format(template: &str, right: &Value) -> Result<String, Error> {
    let mut arguments = Arguments {
        values: match right.downcast_object_ref::<Tuple>() {
            Some(tuple) => tuple.iter().cloned().collect(),
            None => vec![right.clone()],
        },
        next: 0,
        // A mapping need not be used up.
        named: right.kind() == ValueKind::Map,
    };
    let mut out = String::with_capacity(template.len());
    let mut chars = template.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut value = None;
        if chars.peek() == Some(&'(') {
            chars.next();
            let name: String = chars.by_ref().take_while(|&c| c != ')').collect();
            if !arguments.named {
                return Err(invalid("format requires a mapping"));
            }
            let found = right.get_item(&Value::from(name.as_str()))?;
            if found.is_undefined() {
                return Err(invalid(format!("format: no key {name:?}")));
            }
            value = Some(found);
        }
        let mut flags = String::new();
        while let Some(&flag) = chars.peek() {
            if !"#0- +".contains(flag) {
                break;
            }
            flags.push(flag);
            chars.next();
        }
        let mut number = |arguments: &mut Arguments| -> Result<Option<i64>, Error> {
            if chars.peek() == Some(&'*') {
                chars.next();
                let given = arguments.take()?.as_i64();
                return given.map(Some).ok_or_else(|| invalid("* wants int"));
            }
            let mut digits = None;
            while let Some(digit) = chars.peek().and_then(|c| c.to_digit(10)) {
                digits = Some((digits.unwrap_or(0i64) * 10 + i64::from(digit)).min(1 << 40));
                chars.next();
            }
            Ok(digits)
        };
        let mut width = number(&mut arguments)?;
        if width.is_some_and(|w| w < 0) {
            flags.push('-');
            width = width.map(i64::abs);
        }
        let mut precision = None;
        if chars.peek() == Some(&'.') {
            chars.next();
            let mut number = |arguments: &mut Arguments| -> Result<i64, Error> {
                if chars.peek() == Some(&'*') {
                    chars.next();
                    return arguments.take()?.as_i64().ok_or_else(|| invalid("* wants int"));
                }
                let mut digits = 0i64;
                while let Some(digit) = chars.peek().and_then(|c| c.to_digit(10)) {
                    digits = (digits * 10 + i64::from(digit)).min(1 << 40);
                    chars.next();
                }
                Ok(digits)
            };
            precision = Some(number(&mut arguments)?.max(0));
        }
        while matches!(chars.peek(), Some('h' | 'l' | 'L')) {
            chars.next();
        }
        let conversion = chars.next().ok_or_else(|| invalid("incomplete format"))?;
        if conversion == '%' {
            out.push('%');
            continue;
        }
        let size = |n: Option<i64>| match n.map(usize::try_from) {
            Some(Ok(n)) if n <= MAX_WIDTH => Ok(Some(n)),
            None => Ok(None),
            _ => Err(invalid("format: the width is too large")),
        };
        let (width, precision) = (size(width)?, size(precision)?);
        let value = match value {
            Some(value) => value,
            None => arguments.take()?,
        };
        out.push_str(&one(conversion, &flags, width, precision, &value)?);
    }
    if !arguments.named && arguments.next < arguments.values.len() {
        return Err(invalid("not all arguments converted during string formatting"));
    }
    Ok(out)
}

struct Arguments {
    values: Vec<Value>,
    next: usize,
    named: bool,
}

impl Arguments {
    fn take(&mut self) -> Result<Value, Error> {
        let value = self
            .values
            .get(self.next)
            .cloned()
            .ok_or_else(|| invalid("not enough arguments for format string"))?;
        self.next += 1;
        Ok(value)
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

fn one(
    conversion: char,
    flags: &str,
    width: Option<usize>,
    precision: Option<usize>,
    value: &Value,
) -> Result<String, Error> {
    let text = match conversion {
        's' => display(value),
        'r' => repr(value),
        'a' => ascii(&repr(value)),
        'c' => match value.as_str() {
            Some(text) if text.chars().count() == 1 => text.to_owned(),
            Some(_) => return Err(invalid("%c requires int or char")),
            None => value
                .as_i64()
                .and_then(|n| char::from_u32(u32::try_from(n).ok()?))
                .ok_or_else(|| invalid("%c requires int or char"))?
                .to_string(),
        },
        // Numbers are the engine's business; it has the rules of flags and signs.
        _ => {
            let mut spec = format!("%{flags}");
            if let Some(width) = width {
                spec += &width.to_string();
            }
            if let Some(precision) = precision {
                spec += &format!(".{precision}");
            }
            spec.push(conversion);
            let whole;
            let value = match as_float(value) {
                Some(x) if matches!(conversion, 'd' | 'i' | 'u') && x.is_finite() => {
                    whole = Value::from(x.trunc() as i128);
                    &whole
                }
                _ => value,
            };
            return engine_format(FormatStyle::Printf, &spec, std::slice::from_ref(value));
        }
    };
    let text: String = match precision {
        Some(limit) if conversion != 'c' => text.chars().take(limit).collect(),
        _ => text,
    };
    let missing = width.unwrap_or(0).saturating_sub(text.chars().count());
    let pad = " ".repeat(missing);
    Ok(if flags.contains('-') { text + &pad } else { pad + &text })
}

/// Escapes what is not ASCII, as `ascii()` does.
fn ascii(text: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let code = u32::from(c);
        // Writing to a string cannot fail.
        let _ = match code {
            0..=0x7F => write!(out, "{c}"),
            0x80..=0xFF => write!(out, "\\x{code:02x}"),
            0x100..=0xFFFF => write!(out, "\\u{code:04x}"),
            _ => write!(out, "\\U{code:08x}"),
        };
    }
    out
}
