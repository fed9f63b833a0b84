//! Two constructs that the template engine's grammar does not have, rewritten before it parses:
//! `a % b`, where Python formats if `a` is a string, and `{% generation %}`, which only marks a span.
//!
//! The rewriting follows the engine's own precedence and leaves every line break where it was, so that
//! errors name the right line.

use std::ops::Range;

/// Function that stands for the operator `%`.
pub(crate) const MODULO: &str = "__modulo";

/// The template with `%` operators as calls of [`MODULO`] and generation blocks as `with` blocks.
pub(crate) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len() + 64);
    let mut rest = source;
    loop {
        let Some(open) = find_open(rest) else {
            out.push_str(rest);
            return out;
        };
        out.push_str(&rest[..open]);
        rest = &rest[open..];
        let kind = rest.as_bytes()[1];
        if kind == b'#' {
            let end = rest.find("#}").map_or(rest.len(), |n| n + 2);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        let Some(end) = find_close(rest, if kind == b'{' { "}}" } else { "%}" }) else {
            // An unclosed tag: the engine reports it.
            out.push_str(rest);
            return out;
        };
        let (open_len, body) = (2, &rest[2..end]);
        out.push_str(&rest[..open_len]);
        if kind == b'%' {
            let word = body
                .trim_start_matches(['-', '+'])
                .trim_start()
                .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .next()
                .unwrap_or_default();
            match word {
                "raw" => {
                    let stop = end_of_raw(&rest[end..]).map_or(rest.len(), |n| end + n);
                    out.push_str(&rest[open_len..stop]);
                    rest = &rest[stop..];
                    continue;
                }
                "generation" => out.push_str(&body.replacen("generation", "with", 1)),
                "endgeneration" => out.push_str(&body.replacen("endgeneration", "endwith", 1)),
                _ => out.push_str(&expression(body)),
            }
        } else {
            out.push_str(&expression(body));
        }
        out.push_str(&rest[end..end + 2]);
        rest = &rest[end + 2..];
    }
}

fn find_open(text: &str) -> Option<usize> {
    text.as_bytes().windows(2).position(|w| w[0] == b'{' && matches!(w[1], b'{' | b'%' | b'#'))
}

/// Where the closing delimiter of the tag at the start of `text` lies. A closing brace pair inside
/// nested braces belongs to them.
fn find_close(text: &str, close: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut depth = 0usize;
    let mut at = 2;
    while at < bytes.len() {
        match bytes[at] {
            quote @ (b'\'' | b'"') => at = end_of_string(bytes, at, quote)?,
            b'{' | b'(' | b'[' => {
                depth += 1;
                at += 1;
            }
            _ if (depth == 0 || close == "%}") && text[at..].starts_with(close) => return Some(at),
            b'}' | b')' | b']' => {
                depth = depth.saturating_sub(1);
                at += 1;
            }
            _ => at += next_char(bytes[at]),
        }
    }
    None
}

/// Bytes of the character that begins with this byte.
fn next_char(first: u8) -> usize {
    match first {
        0xF0.. => 4,
        0xE0.. => 3,
        0xC0.. => 2,
        _ => 1,
    }
}

fn end_of_string(bytes: &[u8], start: usize, quote: u8) -> Option<usize> {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b if b == quote => return Some(at + 1),
            _ => at += 1,
        }
    }
    None
}

/// End of the raw block whose opening tag ends at the start of `text`.
fn end_of_raw(text: &str) -> Option<usize> {
    let mut at = 0;
    while let Some(found) = text[at..].find("{%") {
        at += found + 2;
        let body = text[at..].trim_start_matches(['-', '+']).trim_start();
        if body.starts_with("endraw") {
            return text[at..].find("%}").map(|n| at + n + 2);
        }
    }
    None
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Word,
    Number,
    Text,
    Op,
}

struct Token<'s> {
    kind: Kind,
    text: &'s str,
    at: Range<usize>,
}

/// Rewrites the operators of one tag's body, the leftmost first.
fn expression(body: &str) -> String {
    let mut body = body.to_owned();
    // Each round removes one operator, so this ends.
    while body.contains('%') {
        let tokens = tokens(&body);
        let Some(index) = tokens.iter().position(|t| t.kind == Kind::Op && t.text == "%") else {
            break;
        };
        let (Some(left), Some(right)) = (left_operand(&tokens, index), right_operand(&tokens, index)) else {
            break;
        };
        let op = tokens[index].at.clone();
        body = format!(
            "{}{MODULO}({},{}){}",
            &body[..left],
            &body[left..op.start],
            &body[op.end..right],
            &body[right..]
        );
    }
    body
}

fn tokens(body: &str) -> Vec<Token<'_>> {
    let bytes = body.as_bytes();
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        let byte = bytes[at];
        let kind = if byte.is_ascii_whitespace() {
            at += 1;
            continue;
        } else if byte == b'\'' || byte == b'"' {
            at = end_of_string(bytes, at, byte).unwrap_or(bytes.len());
            Kind::Text
        } else if byte.is_ascii_digit() {
            while at < bytes.len()
                && (bytes[at].is_ascii_alphanumeric()
                    || bytes[at] == b'_'
                    || (bytes[at] == b'.' && bytes.get(at + 1).is_some_and(u8::is_ascii_digit)))
            {
                at += 1;
            }
            Kind::Number
        } else if byte.is_ascii_alphabetic() || byte == b'_' || byte >= 0x80 {
            while at < bytes.len()
                && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_' || bytes[at] >= 0x80)
            {
                at += 1;
            }
            Kind::Word
        } else {
            let pair = body.get(at..at + 2).unwrap_or_default();
            at += if ["**", "//", "==", "!=", "<=", ">="].contains(&pair) { 2 } else { 1 };
            Kind::Op
        };
        let at = start..at.min(bytes.len());
        out.push(Token { kind, text: &body[at.clone()], at });
    }
    out
}

fn keyword(token: &Token<'_>) -> bool {
    token.kind == Kind::Word
        && [
            "and",
            "or",
            "not",
            "in",
            "is",
            "if",
            "else",
            "elif",
            "for",
            "set",
            "recursive",
            "with",
            "call",
            "filter",
            "macro",
            "do",
        ]
        .contains(&token.text)
}

fn ends_operand(token: &Token<'_>) -> bool {
    match token.kind {
        Kind::Op => matches!(token.text, ")" | "]" | "}"),
        _ => !keyword(token),
    }
}

/// Byte where the chain of products left of the operator begins.
fn left_operand(tokens: &[Token<'_>], op: usize) -> Option<usize> {
    let mut at = op;
    while at > 0 {
        let token = &tokens[at - 1];
        let included = match token.kind {
            Kind::Op => match token.text {
                ")" | "]" | "}" => {
                    at = matching_open(tokens, at - 1)?;
                    continue;
                }
                "." | "|" | "*" | "/" | "//" | "**" | "%" => true,
                // A sign, unless something to subtract from comes before it.
                "-" | "+" => at < 2 || !ends_operand(&tokens[at - 2]),
                _ => false,
            },
            _ => !keyword(token),
        };
        if !included {
            break;
        }
        at -= 1;
    }
    (at < op).then(|| tokens[at].at.start)
}

fn matching_open(tokens: &[Token<'_>], close: usize) -> Option<usize> {
    let mut depth = 0usize;
    for index in (0..=close).rev() {
        if tokens[index].kind == Kind::Op {
            match tokens[index].text {
                ")" | "]" | "}" => depth += 1,
                "(" | "[" | "{" => {
                    depth -= 1;
                    if depth == 0 {
                        return Some(index);
                    }
                }
                _ => {}
            }
        }
    }
    None
}

fn matching_close(tokens: &[Token<'_>], open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (index, token) in tokens.iter().enumerate().skip(open) {
        if token.kind == Kind::Op {
            match token.text {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => {
                    depth = depth.checked_sub(1)?;
                    if depth == 0 {
                        return Some(index);
                    }
                }
                _ => {}
            }
        }
    }
    None
}

/// Byte where the operand right of the operator ends.
fn right_operand(tokens: &[Token<'_>], op: usize) -> Option<usize> {
    let mut at = op + 1;
    let is = |at: usize, text: &str| tokens.get(at).is_some_and(|t| t.kind == Kind::Op && t.text == text);
    loop {
        while is(at, "-") || is(at, "+") {
            at += 1;
        }
        let first = tokens.get(at)?;
        at = match first.kind {
            Kind::Op if matches!(first.text, "(" | "[" | "{") => matching_close(tokens, at)? + 1,
            Kind::Op => return None,
            _ if keyword(first) => return None,
            Kind::Text => {
                // Adjacent strings are one.
                let more = tokens[at..].iter().take_while(|t| t.kind == Kind::Text);
                at + more.count()
            }
            _ => at + 1,
        };
        loop {
            if is(at, "(") || is(at, "[") {
                at = matching_close(tokens, at)? + 1;
            } else if (is(at, ".") || is(at, "|")) && tokens.get(at + 1)?.kind != Kind::Op {
                at += 2;
            } else {
                break;
            }
        }
        if !is(at, "**") {
            return Some(tokens[at - 1].at.end);
        }
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_become_calls_by_precedence() {
        for (from, to) in [
            ("{{ a % b }}", "{{ __modulo(a , b) }}"),
            ("{{ 'x %s' % y.z[1](2)|upper ~ q }}", "{{ __modulo('x %s' , y.z[1](2)|upper) ~ q }}"),
            ("{{ 1 + a * b % -c ** 2 + d }}", "{{ 1 + __modulo(a * b , -c ** 2) + d }}"),
            ("{{ a % b % c }}", "{{ __modulo(__modulo(a , b) , c) }}"),
            ("{% if not i % 2 == 0 and '%' in x %}", "{% if not __modulo(i , 2) == 0 and '%' in x %}"),
            ("{{ f(a % 2, -b % 3) }}", "{{ f(__modulo(a , 2), __modulo(-b , 3)) }}"),
            ("{%- if a - b % 2 -%}", "{%- if a - __modulo(b , 2) -%}"),
            ("{{ '%s' % (a % 2,) }}", "{{ __modulo('%s' , (__modulo(a , 2),)) }}"),
            (
                "50% {# a % b #} {% raw %}{{ a % b }}{% endraw %} {{ '%}' }}",
                "50% {# a % b #} {% raw %}{{ a % b }}{% endraw %} {{ '%}' }}",
            ),
            ("{{ {'a': {'b': 1 % 2}} }}", "{{ {'a': {'b': __modulo(1 , 2)}} }}"),
            ("{%- generation -%}x{%- endgeneration +%}", "{%- with -%}x{%- endwith +%}"),
        ] {
            assert_eq!(rewrite(from), to);
        }
    }

    #[test]
    fn broken_templates_come_through_unharmed() {
        for text in [
            "{{ a %",
            "{{ % }}",
            "{{ 'a",
            "{% raw %}{{ %",
            "{{ a % ) }}",
            "{{ (a % b }}",
            "{#",
            "{",
            "{%%}",
            "é{{é % 世}}",
        ] {
            let _ = rewrite(text);
        }
        assert_eq!(rewrite("{{ 'a"), "{{ 'a");
    }
}
