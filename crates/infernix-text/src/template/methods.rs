//! Methods of Python's strings, mappings and lists. Chat templates call them; the engine leaves them
//! to its host.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::values::display;

pub(crate) fn call(
    _state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => string(value.as_str().unwrap_or_default(), method, args),
        ValueKind::Map => mapping(value, method, args),
        ValueKind::Seq => sequence(value, method, args),
        _ => Err(unknown()),
    }
}

fn unknown() -> Error {
    Error::from(ErrorKind::UnknownMethod)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

fn none_args(args: &[Value]) -> Result<(), Error> {
    from_args::<()>(args)
}

/// Python's white space: Unicode's and the four separators of ASCII.
fn white(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Optional set of characters to strip.
fn strip_set(args: &[Value]) -> Result<Option<String>, Error> {
    let (chars,): (Option<Value>,) = from_args(args)?;
    match chars {
        Some(v) if !v.is_none() => {
            v.as_str().map(|s| Some(s.to_owned())).ok_or_else(|| invalid("strip takes a string"))
        }
        _ => Ok(None),
    }
}

fn in_set(set: &Option<String>) -> impl Fn(char) -> bool + '_ {
    move |c| match set {
        Some(set) => set.contains(c),
        None => white(c),
    }
}

fn list<S: Into<Value>>(items: impl IntoIterator<Item = S>) -> Value {
    Value::from(items.into_iter().map(Into::into).collect::<Vec<Value>>())
}

pub(crate) fn string(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    Ok(match method {
        "strip" => Value::from(text.trim_matches(in_set(&strip_set(args)?))),
        "lstrip" => Value::from(text.trim_start_matches(in_set(&strip_set(args)?))),
        "rstrip" => Value::from(text.trim_end_matches(in_set(&strip_set(args)?))),
        "split" => split(text, args, false)?,
        "rsplit" => split(text, args, true)?,
        "splitlines" => {
            let (keep, options): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = keep.or(options.get("keepends")?).unwrap_or(false);
            options.assert_all_used()?;
            list(split_lines(text, keep))
        }
        "startswith" => affix(text, args, |t, a| t.starts_with(a))?,
        "endswith" => affix(text, args, |t, a| t.ends_with(a))?,
        "upper" => {
            none_args(args)?;
            Value::from(text.to_uppercase())
        }
        "lower" => {
            none_args(args)?;
            Value::from(text.to_lowercase())
        }
        "casefold" => {
            none_args(args)?;
            Value::from(text.replace(['ß', 'ẞ'], "ss").to_lowercase())
        }
        "title" => {
            none_args(args)?;
            Value::from(title(text))
        }
        "capitalize" => {
            none_args(args)?;
            let mut chars = text.chars();
            let first: String = chars.next().into_iter().flat_map(char::to_uppercase).collect();
            Value::from(first + &chars.as_str().to_lowercase())
        }
        "swapcase" => {
            none_args(args)?;
            Value::from(
                text.chars()
                    .flat_map(|c| -> Vec<char> {
                        if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
                    })
                    .collect::<String>(),
            )
        }
        "replace" => {
            let (old, new, count, options): (&str, &str, Option<i64>, Kwargs) = from_args(args)?;
            let count = count.or(options.get("count")?).unwrap_or(-1);
            options.assert_all_used()?;
            Value::from(match usize::try_from(count) {
                Ok(n) => text.replacen(old, new, n),
                Err(_) => text.replace(old, new),
            })
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            let mut out = String::new();
            for (index, item) in items.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(text);
                }
                out.push_str(item.as_str().ok_or_else(|| {
                    invalid(format!("join: item {index} is a {}, not a string", item.kind()))
                })?);
            }
            Value::from(out)
        }
        "find" => Value::from(position(text, args, false)?),
        "rfind" => Value::from(position(text, args, true)?),
        "index" | "rindex" => match position(text, args, method == "rindex")? {
            -1 => return Err(invalid("substring not found")),
            at => Value::from(at),
        },
        "count" => {
            let (needle,): (&str,) = from_args(args)?;
            Value::from(text.matches(needle).count())
        }
        "isdigit" => all(text, args, |c| c.is_numeric() && digit(c))?,
        "isdecimal" => all(text, args, |c| c.is_numeric() && decimal(c))?,
        "isnumeric" => all(text, args, char::is_numeric)?,
        "isalpha" => all(text, args, char::is_alphabetic)?,
        "isalnum" => all(text, args, char::is_alphanumeric)?,
        "isspace" => all(text, args, white)?,
        "isascii" => {
            none_args(args)?;
            Value::from(text.is_ascii())
        }
        "isupper" => {
            none_args(args)?;
            Value::from(text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase))
        }
        "islower" => {
            none_args(args)?;
            Value::from(text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase))
        }
        "removeprefix" => {
            let (affix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(affix).unwrap_or(text))
        }
        "removesuffix" => {
            let (affix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(affix).unwrap_or(text))
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let missing = width_left(text, width)?;
            let (sign, digits) = match text.strip_prefix(['-', '+']) {
                Some(digits) => (&text[..1], digits),
                None => ("", text),
            };
            Value::from(format!("{sign}{}{digits}", "0".repeat(missing)))
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let fill = fill.unwrap_or(" ");
            if fill.chars().count() != 1 {
                return Err(invalid(format!("{method}: the fill must be one character")));
            }
            let missing = width_left(text, width)?;
            let left = match method {
                "ljust" => 0,
                "rjust" => missing,
                // Python puts the odd one left only if the width is odd, too.
                _ => missing / 2 + (missing & width & 1),
            };
            Value::from(format!("{}{text}{}", fill.repeat(left), fill.repeat(missing - left)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let right = method == "rpartition";
            let parts = if right { text.rsplit_once(separator) } else { text.split_once(separator) };
            let (a, b, c) = match parts {
                Some((before, after)) => (before, separator, after),
                None if right => ("", "", text),
                None => (text, "", ""),
            };
            Value::from((a, b, c))
        }
        "format" => format(FormatStyle::StrFormat, text, args).map(Value::from)?,
        _ => return Err(unknown()),
    })
}

/// How many characters a padding adds; widths beyond reason are refused.
fn width_left(text: &str, width: usize) -> Result<usize, Error> {
    if width > 1 << 20 {
        return Err(invalid("the width is too large"));
    }
    Ok(width.saturating_sub(text.chars().count()))
}

fn all(text: &str, args: &[Value], test: impl Fn(char) -> bool) -> Result<Value, Error> {
    none_args(args)?;
    Ok(Value::from(!text.is_empty() && text.chars().all(test)))
}

/// Decimal digits: the tens of the scripts that have them start at multiples the standard fixes; a
/// character with a numeric value that is none of these is no decimal.
fn decimal(c: char) -> bool {
    c.is_ascii_digit()
        || (!c.is_ascii()
            && !superscript(c)
            && matches!(u32::from(c),
                0x660..=0x669 | 0x6F0..=0x6F9 | 0x7C0..=0x7C9 | 0x966..=0x96F | 0x9E6..=0x9EF
                | 0xA66..=0xA6F | 0xAE6..=0xAEF | 0xB66..=0xB6F | 0xBE6..=0xBEF | 0xC66..=0xC6F
                | 0xCE6..=0xCEF | 0xD66..=0xD6F | 0xE50..=0xE59 | 0xED0..=0xED9 | 0xF20..=0xF29
                | 0x1040..=0x1049 | 0x17E0..=0x17E9 | 0x1810..=0x1819 | 0xFF10..=0xFF19))
}

fn superscript(c: char) -> bool {
    matches!(c, '²' | '³' | '¹' | '\u{2070}' | '\u{2074}'..='\u{2079}' | '\u{2080}'..='\u{2089}')
}

fn digit(c: char) -> bool {
    decimal(c) || superscript(c) || matches!(c, '\u{2460}'..='\u{2468}')
}

fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (separator, limit, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = match separator {
        Some(value) => Some(value),
        None => options.get::<Option<Value>>("sep")?,
    }
    .filter(|v| !v.is_none());
    let limit = limit.or(options.get("maxsplit")?).unwrap_or(-1);
    options.assert_all_used()?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX - 1);
    let Some(separator) = separator else {
        return Ok(list(split_white(text, limit, from_right)));
    };
    let separator = separator.as_str().ok_or_else(|| invalid("split takes a string"))?;
    if separator.is_empty() {
        return Err(invalid("empty separator"));
    }
    Ok(if from_right {
        let mut parts: Vec<&str> = text.rsplitn(limit + 1, separator).collect();
        parts.reverse();
        list(parts)
    } else {
        list(text.splitn(limit + 1, separator))
    })
}

/// Splitting at runs of white space: no empty parts, what is left at the limit keeps its far side.
fn split_white(text: &str, limit: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    loop {
        rest = if from_right { rest.trim_end_matches(white) } else { rest.trim_start_matches(white) };
        if rest.is_empty() {
            break;
        }
        if parts.len() == limit {
            parts.push(rest);
            break;
        }
        if from_right {
            let at = rest.rfind(white).map_or(0, |n| n + rest[n..].chars().next().map_or(1, char::len_utf8));
            parts.push(&rest[at..]);
            rest = &rest[..at];
        } else {
            let at = rest.find(white).unwrap_or(rest.len());
            parts.push(&rest[..at]);
            rest = &rest[at..];
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

pub(crate) fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut start = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        let breaks =
            matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
        if !breaks {
            continue;
        }
        let mut end = at + c.len_utf8();
        if c == '\r' && matches!(chars.peek(), Some((_, '\n'))) {
            chars.next();
            end += 1;
        }
        lines.push(&text[start..if keep { end } else { at }]);
        start = end;
    }
    if start < text.len() {
        lines.push(&text[start..]);
    }
    lines
}

/// Byte offset of a Python index (in characters, negative from the end).
fn offset(text: &str, index: i64) -> usize {
    let index = if index < 0 {
        let len = text.chars().count() as i64;
        (len + index).max(0)
    } else {
        index
    };
    text.char_indices().nth(usize::try_from(index).unwrap_or(usize::MAX)).map_or(text.len(), |(at, _)| at)
}

/// The part of the text between optional bounds, and where it starts.
fn window(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    let from = offset(text, start.unwrap_or(0));
    let to = end.map_or(text.len(), |end| offset(text, end));
    text.get(from..to).map(|part| (from, part))
}

fn affix(text: &str, args: &[Value], test: impl Fn(&str, &str) -> bool) -> Result<Value, Error> {
    let (affix, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let Some((_, part)) = window(text, start, end) else {
        return Ok(Value::from(false));
    };
    if let Some(affix) = affix.as_str() {
        return Ok(Value::from(test(part, affix)));
    }
    if affix.downcast_object_ref::<Tuple>().is_none() {
        return Err(invalid("startswith and endswith take a string or a tuple of strings"));
    }
    for candidate in affix.try_iter()? {
        let candidate = candidate
            .as_str()
            .ok_or_else(|| invalid("startswith and endswith take a string or a tuple of strings"))?;
        if test(part, candidate) {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

fn position(text: &str, args: &[Value], from_right: bool) -> Result<i64, Error> {
    let (needle, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let found = window(text, start, end).and_then(|(from, part)| {
        let at = if from_right { part.rfind(needle) } else { part.find(needle) }?;
        Some(text[..from + at].chars().count() as i64)
    });
    Ok(found.unwrap_or(-1))
}

/// A letter after anything but a letter is upper case, other letters are lower case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        let cased = c.is_lowercase() || c.is_uppercase();
        if cased && !inside {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        inside = cased;
    }
    out
}

fn mapping(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    Ok(match method {
        "keys" => {
            none_args(args)?;
            list(value.try_iter()?)
        }
        "values" => {
            none_args(args)?;
            let values: Result<Vec<Value>, Error> =
                value.try_iter()?.map(|key| value.get_item(&key)).collect();
            Value::from(values?)
        }
        "items" => {
            none_args(args)?;
            let pairs: Result<Vec<Value>, Error> =
                value.try_iter()?.map(|key| Ok(Value::from((key.clone(), value.get_item(&key)?)))).collect();
            Value::from(pairs?)
        }
        "get" => {
            let (key, default): (&Value, Option<Value>) = from_args(args)?;
            let found = value.get_item(key)?;
            if found.is_undefined() { default.unwrap_or_else(|| Value::from(())) } else { found }
        }
        "copy" => {
            none_args(args)?;
            value.clone()
        }
        _ => return Err(unknown()),
    })
}

fn sequence(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    Ok(match method {
        "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| &item == wanted);
            Value::from(at.ok_or_else(|| invalid(format!("{} is not in the list", display(wanted))))?)
        }
        "count" => {
            let (wanted,): (&Value,) = from_args(args)?;
            Value::from(value.try_iter()?.filter(|item| item == wanted).count())
        }
        "copy" => {
            none_args(args)?;
            value.clone()
        }
        "append" | "extend" | "insert" | "pop" | "remove" | "clear" | "sort" | "reverse" => {
            return Err(invalid(format!(
                "{method} would change a list; templates run in an immutable sandbox, as they do in Python"
            )));
        }
        _ => return Err(unknown()),
    })
}
