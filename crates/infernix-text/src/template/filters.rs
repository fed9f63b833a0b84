//! Filters, tests and functions that the engine lacks or that differ from what transformers gives
//! chat templates.

use std::sync::Arc;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

use super::clock::Clock;
use super::rewrite::MODULO;
use super::values::{as_float, display, dump, from_json};
use crate::pyjson::Style;

/// The error a template raises itself; found again by its type.
#[derive(Debug, Clone)]
pub(crate) struct Raised(pub(crate) String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

pub(crate) fn install(env: &mut Environment<'_>) {
    env.set_formatter(|out, _state, value| {
        match value.as_str() {
            Some(text) => out.write_str(text),
            None => out.write_str(&display(value)),
        }
        .map_err(Error::from)
    });
    env.add_filter("tojson", tojson);
    env.add_filter("items", items);
    env.add_filter("fromjson", fromjson);
    env.add_filter("from_json", fromjson);
    env.add_function("fromjson", fromjson);
    env.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => value.clone(),
        None => Value::from(display(value)),
    });
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("join", join);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("indent", indent);
    env.add_filter("dictsort", dictsort);
    env.add_filter("escape", escape);
    env.add_filter("e", escape);
    env.add_filter("center", |text: &str, width: Option<usize>| -> Result<Value, Error> {
        super::methods::string(text, "center", &[Value::from(width.unwrap_or(80))])
    });
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    env.add_filter("wordcount", |text: &str| {
        text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|w| !w.is_empty()).count()
    });
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = display(message);
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    env.add_function(MODULO, modulo);
    // Strings and mappings have a length and items, which is all that the original asks.
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
    });
    env.set_unknown_method_callback(super::methods::call);
}

/// The clock is part of a rendering, not of the template.
pub(crate) fn install_clock(env: &mut Environment<'_>, clock: Arc<dyn Fn() -> Clock + Send + Sync>) {
    env.add_function("strftime_now", move |format: &str| clock().format(format));
}

fn tojson(value: &Value, args: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let mut style = Style::default();
    if let Some(value) = option(&args, &options, 0, "ensure_ascii")? {
        style.ensure_ascii = value.is_true();
    }
    if let Some(value) = option(&args, &options, 1, "indent")?.filter(|v| !v.is_none()) {
        style.indent = Some(match value.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(value.as_i64().unwrap_or(0)).unwrap_or(0).min(64)),
        });
        // Python drops the space after the comma when it breaks lines.
        style.item_separator = ",".to_owned();
    }
    if let Some(value) = option(&args, &options, 2, "separators")?.filter(|v| !v.is_none()) {
        let mut parts = value.try_iter()?.map(|part| part.as_str().map(str::to_owned));
        match (parts.next().flatten(), parts.next().flatten(), parts.next()) {
            (Some(item), Some(key), None) => {
                style.item_separator = item;
                style.key_separator = key;
            }
            _ => {
                return Err(Error::new(ErrorKind::InvalidOperation, "separators must be two strings"));
            }
        }
    }
    if let Some(value) = option(&args, &options, 3, "sort_keys")? {
        style.sort_keys = value.is_true();
    }
    options.assert_all_used()?;
    dump(value, &style)
}

/// `items`, which also takes an object written as JSON text: clients send arguments that way.
fn items(value: &Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Ok(parsed @ serde_json::Value::Object(_)) = serde_json::from_str(text)
    {
        return filters::items(&from_json(&parsed));
    }
    filters::items(value)
}

/// The filter's option, by position or by name.
fn option(args: &[Value], kwargs: &Kwargs, index: usize, name: &str) -> Result<Option<Value>, Error> {
    match args.get(index) {
        Some(value) => Ok(Some(value.clone())),
        None => kwargs.get::<Option<Value>>(name),
    }
}

fn truthy(option: Option<Value>) -> bool {
    option.is_some_and(|v| v.is_true())
}

fn default(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let fallback = option(&args, &kwargs, 0, "default_value")?;
    let falsy_too = truthy(option(&args, &kwargs, 1, "boolean")?);
    kwargs.assert_all_used()?;
    Ok(if value.is_undefined() || (falsy_too && !value.is_true()) {
        fallback.unwrap_or_else(|| Value::from(""))
    } else {
        value.clone()
    })
}

fn join(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let separator = option(&args, &kwargs, 0, "d")?.map(|v| display(&v)).unwrap_or_default();
    let attribute = option(&args, &kwargs, 1, "attribute")?.filter(|v| !v.is_none());
    kwargs.assert_all_used()?;
    let mut out = String::new();
    for (index, item) in value.try_iter()?.enumerate() {
        if index > 0 {
            out.push_str(&separator);
        }
        let item = match &attribute {
            // A path such as `a.b` or an index.
            Some(path) => {
                display(path).split('.').try_fold(item, |item, part| match part.parse::<usize>() {
                    Ok(at) => item.get_item_by_index(at),
                    Err(_) => item.get_attr(part),
                })?
            }
            None => item,
        };
        out.push_str(&display(&item));
    }
    Ok(out)
}

fn int(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let fallback = option(&args, &kwargs, 0, "default")?.unwrap_or_else(|| Value::from(0));
    let base = option(&args, &kwargs, 1, "base")?.and_then(|v| v.as_i64()).unwrap_or(10);
    kwargs.assert_all_used()?;
    if let Some(text) = value.as_str() {
        let text = text.trim().replace('_', "");
        let (negative, digits) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(&text)),
        };
        let digits = match base {
            16 => digits.trim_start_matches("0x").trim_start_matches("0X"),
            8 => digits.trim_start_matches("0o").trim_start_matches("0O"),
            2 => digits.trim_start_matches("0b").trim_start_matches("0B"),
            _ => digits,
        };
        let radix = u32::try_from(base).ok().filter(|b| (2..=36).contains(b));
        if let Some(n) = radix.and_then(|radix| i128::from_str_radix(digits, radix).ok()) {
            return Ok(Value::from(if negative { -n } else { n }));
        }
        return Ok(match text.parse::<f64>() {
            Ok(x) if x.is_finite() => Value::from(x.trunc() as i128),
            _ => fallback,
        });
    }
    Ok(match value.kind() {
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        ValueKind::Number => match as_float(value) {
            Some(x) if x.is_finite() => Value::from(x.trunc() as i128),
            Some(_) => fallback,
            None => value.clone(),
        },
        _ => fallback,
    })
}

fn float(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let fallback = option(&args, &kwargs, 0, "default")?.unwrap_or_else(|| Value::from(0.0));
    kwargs.assert_all_used()?;
    if let Some(text) = value.as_str() {
        return Ok(text.trim().replace('_', "").parse::<f64>().map_or(fallback, Value::from));
    }
    Ok(match value.kind() {
        ValueKind::Bool => Value::from(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).map_or(fallback, Value::from),
        _ => fallback,
    })
}

fn indent(text: &str, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let by = match option(&args, &kwargs, 0, "width")? {
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(width.as_usize().unwrap_or(0).min(1 << 16)),
        },
        None => "    ".to_owned(),
    };
    let first = truthy(option(&args, &kwargs, 1, "first")?);
    let blank = truthy(option(&args, &kwargs, 2, "blank")?);
    kwargs.assert_all_used()?;
    let mut out = String::with_capacity(text.len() + by.len());
    if first {
        out.push_str(&by);
    }
    // The added line end makes a final one survive the split.
    let text = format!("{text}\n");
    for (index, line) in super::methods::split_lines(&text, false).into_iter().enumerate() {
        if index > 0 {
            out.push('\n');
            if blank || !line.is_empty() {
                out.push_str(&by);
            }
        }
        out.push_str(line);
    }
    Ok(out)
}

fn dictsort(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let case_sensitive = truthy(option(&args, &kwargs, 0, "case_sensitive")?);
    let by_value = match option(&args, &kwargs, 1, "by")? {
        None => false,
        Some(by) => match by.as_str() {
            Some("key") => false,
            Some("value") => true,
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "dictsort sorts by 'key' or 'value'")),
        },
    };
    let reverse = truthy(option(&args, &kwargs, 2, "reverse")?);
    kwargs.assert_all_used()?;
    let mut pairs = Vec::new();
    for key in value.try_iter()? {
        let item = value.get_item(&key)?;
        let sort = if by_value { &item } else { &key };
        let sort = match sort.as_str() {
            Some(text) if !case_sensitive => Value::from(text.to_lowercase()),
            _ => sort.clone(),
        };
        pairs.push((sort, Value::from((key.clone(), item))));
    }
    pairs.sort_by(|a, b| if reverse { b.0.cmp(&a.0) } else { a.0.cmp(&b.0) });
    Ok(Value::from(pairs.into_iter().map(|(_, pair)| pair).collect::<Vec<_>>()))
}

fn escape(value: &Value) -> Value {
    if value.is_safe() {
        return value.clone();
    }
    let mut out = String::new();
    for c in display(value).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    Value::from_safe_string(out)
}

fn fromjson(text: &str) -> Result<Value, Error> {
    serde_json::from_str(text)
        .map(|json| from_json(&json))
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("fromjson: {e}")))
}

/// `left % right`: formatting for strings, the floored remainder for numbers.
fn modulo(_state: &State, left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(template) = left.as_str() {
        return super::printf::format(template, right).map(Value::from);
    }
    let zero = || Error::new(ErrorKind::InvalidOperation, "modulo by zero");
    let numeric = |v: &Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool);
    if !numeric(left) || !numeric(right) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("% cannot combine {} and {}", left.kind(), right.kind()),
        ));
    }
    let integer = |v: &Value| match v.kind() {
        ValueKind::Bool => Some(i128::from(v.is_true())),
        _ if v.is_integer() => i128::try_from(v.clone()).ok(),
        _ => None,
    };
    if let (Some(a), Some(b)) = (integer(left), integer(right)) {
        let remainder = a.checked_rem(b).ok_or_else(zero)?;
        let moved = remainder != 0 && (remainder < 0) != (b < 0);
        return Ok(Value::from(if moved { remainder + b } else { remainder }));
    }
    let float = |v: &Value| match v.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(v.is_true()))),
        _ => f64::try_from(v.clone()),
    };
    let (a, b) = (float(left)?, float(right)?);
    if b == 0.0 {
        return Err(zero());
    }
    let remainder = a % b;
    Ok(Value::from(if remainder != 0.0 && (remainder < 0.0) != (b < 0.0) {
        remainder + b
    } else if remainder == 0.0 {
        0.0f64.copysign(b)
    } else {
        remainder
    }))
}
