//! Lark, the notation in which free-form tools describe their input: rules and terminals over strings, expressions,
//! groups and repetitions, `start` first.
//!
//! Read is what describes texts: `name: ...`, `NAME: ...`, `|`, `( )`, `[ ]`, `? * +`, `~n`, `~n..m`, `"a".."z"`,
//! `"text"i`, `/expression/`, `-> alias`, `%import common.NAME`, `%ignore`, `//` comments, priorities (which choose
//! between trees of the same text and so change nothing here). A text belongs to the grammar if any derivation gives
//! it; what `%ignore` names may stand after every terminal and at the beginning.

use std::collections::HashMap;

use super::error::GrammarError;
use super::gbnf::{Expr, Rules};
use super::regex::{self, Scope};
use super::rx::{Rx, normalize};

/// Longest source, in bytes.
const LIMIT: usize = 65_536;
/// Deepest nesting of groups.
const DEPTH: usize = 64;
/// Highest count of a repetition.
const REPEAT: u32 = 4096;
/// Repetitions of repetitions.
const MARKS: usize = 8;

/// Lark's library of terminals (`lark/grammars/common.lark`), as expressions.
const COMMON: &[(&str, &str)] = &[
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[a-fA-F0-9]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", r"(\+|-)?[0-9]+"),
    ("DECIMAL", r"[0-9]+\.[0-9]*|\.[0-9]+"),
    ("FLOAT", r"([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+"),
    ("SIGNED_FLOAT", r"(\+|-)?(([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+)"),
    ("NUMBER", r"[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+"),
    (
        "SIGNED_NUMBER",
        r"(\+|-)?([0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+)",
    ),
    ("ESCAPED_STRING", r#""([^"\\\n]|\\[^\n])*""#),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[_A-Za-z][_A-Za-z0-9]*"),
    ("WS_INLINE", r"[ \t]+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("CR", r"\r"),
    ("LF", r"\n"),
    ("NEWLINE", r"(\r?\n)+"),
    ("SH_COMMENT", r"#[^\n]*"),
    ("CPP_COMMENT", r"//[^\n]*"),
    ("SQL_COMMENT", r"--[^\n]*"),
];

/// Reads a grammar.
///
/// # Errors
/// `invalid_grammar` with line and column.
pub(crate) fn parse(source: &str) -> Result<Rules, GrammarError> {
    if source.len() > LIMIT {
        let message = format!("the grammar has {} bytes, at most {LIMIT} are read", source.len());
        return Err(GrammarError::new("invalid_grammar", message));
    }
    let tokens = Lexer { source, at: 0, line_start: true }.tokens()?;
    let mut parser =
        Parser { source, tokens, at: 0, numbers: HashMap::new(), list: Vec::new(), ignored: Vec::new() };
    parser.definitions()?;
    parser.rules()
}

fn error_at(source: &str, at: usize, message: impl Into<String>) -> GrammarError {
    let before = &source[..at];
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    GrammarError::new("invalid_grammar", message).on(line, column)
}

#[derive(Debug, Clone, PartialEq)]
enum Kind<'s> {
    Name(&'s str),
    Number(u32),
    /// A string, and whether its case matters.
    Text(String, bool),
    Expression(Rx),
    Directive(&'s str),
    /// Punctuation.
    Sign(&'static str),
}

#[derive(Debug, Clone)]
struct Token<'s> {
    kind: Kind<'s>,
    at: usize,
    /// The first of its line.
    first: bool,
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line_start: bool,
}

impl<'s> Lexer<'s> {
    fn error(&self, at: usize, message: impl Into<String>) -> GrammarError {
        error_at(self.source, at, message)
    }

    fn tokens(mut self) -> Result<Vec<Token<'s>>, GrammarError> {
        let mut out = Vec::new();
        loop {
            let rest = &self.source[self.at..];
            let Some(c) = rest.chars().next() else { return Ok(out) };
            let word = |first: char, rest: &'s str| {
                let len = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
                (first.is_ascii_alphabetic() || first == '_').then(|| &rest[..len])
            };
            let start = self.at;
            let kind = if c == '\n' {
                self.at += 1;
                self.line_start = true;
                continue;
            } else if c.is_ascii_whitespace() {
                self.at += 1;
                continue;
            } else if rest.starts_with("//") {
                self.at += rest.find('\n').unwrap_or(rest.len());
                continue;
            } else if let Some(name) = word(c, rest) {
                self.at += name.len();
                Kind::Name(name)
            } else if c.is_ascii_digit() {
                let len = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
                self.at += len;
                Kind::Number(rest[..len].parse().map_err(|_| self.error(start, "this number is too large"))?)
            } else if c == '"' {
                self.text()?
            } else if c == '/' {
                self.expression()?
            } else if c == '%' {
                let name = rest[1..].chars().next().and_then(|c| word(c, &rest[1..]));
                let name = name.ok_or_else(|| self.error(start, "expected the name of a directive"))?;
                self.at += 1 + name.len();
                Kind::Directive(name)
            } else {
                const SIGNS: [&str; 18] = [
                    "->", "..", ":", "|", "(", ")", "[", "]", "?", "*", "+", "~", ",", ".", "!", "-", "{",
                    "}",
                ];
                let sign = SIGNS.iter().find(|s| rest.starts_with(**s));
                let sign = sign.ok_or_else(|| self.error(start, format!("unexpected {c:?}")))?;
                self.at += sign.len();
                Kind::Sign(sign)
            };
            out.push(Token { kind, at: start, first: std::mem::take(&mut self.line_start) });
        }
    }

    /// A string between quotes, escapes resolved.
    fn text(&mut self) -> Result<Kind<'s>, GrammarError> {
        let start = self.at;
        self.at += 1;
        let mut text = String::new();
        loop {
            let mut chars = self.source[self.at..].chars();
            match chars.next() {
                None | Some('\n') => return Err(self.error(start, "the string does not end")),
                Some('"') => {
                    self.at += 1;
                    let folded = self.source[self.at..].starts_with('i');
                    self.at += usize::from(folded);
                    return Ok(Kind::Text(text, !folded));
                }
                Some('\\') => {
                    let at = self.at;
                    let escape = chars.next().ok_or_else(|| self.error(start, "the string does not end"))?;
                    self.at += 1 + escape.len_utf8();
                    let digits = match escape {
                        'n' => "\n",
                        'r' => "\r",
                        't' => "\t",
                        'f' => "\u{c}",
                        '\\' | '"' | '/' | '\'' => {
                            text.push(escape);
                            continue;
                        }
                        'x' | 'u' | 'U' => "",
                        other => return Err(self.error(at, format!("unknown escape \\{other}"))),
                    };
                    if !digits.is_empty() {
                        text.push_str(digits);
                        continue;
                    }
                    let count = match escape {
                        'x' => 2,
                        'u' => 4,
                        _ => 8,
                    };
                    let c = self.source[self.at..]
                        .get(..count)
                        .filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()))
                        .and_then(|hex| u32::from_str_radix(hex, 16).ok())
                        .and_then(char::from_u32);
                    let c = c.ok_or_else(|| {
                        self.error(at, format!("expected a code point in {count} hexadecimal digits"))
                    })?;
                    self.at += count;
                    text.push(c);
                }
                Some(c) => {
                    self.at += c.len_utf8();
                    text.push(c);
                }
            }
        }
    }

    /// An expression between slashes.
    fn expression(&mut self) -> Result<Kind<'s>, GrammarError> {
        let start = self.at;
        let body = &self.source[start + 1..];
        let mut escaped = false;
        let end = body.char_indices().find(|&(_, c)| {
            let ends = c == '\n' || c == '/' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some((len, '/')) = end else { return Err(self.error(start, "the expression does not end")) };
        self.at = start + 1 + len + 1;
        let flags = self.source[self.at..].find(|c: char| !"imslux".contains(c));
        let flags = flags.unwrap_or(self.source.len() - self.at);
        if flags > 0 {
            return Err(self.error(self.at, "flags of expressions are not supported"));
        }
        let rx = regex::parse(&body[..len], Scope::Whole).map_err(|e| self.error(start, e.message))?;
        Ok(Kind::Expression(rx))
    }
}

struct Definition {
    name: String,
    /// Where it is first used or defined.
    at: usize,
    body: Option<Expr>,
}

struct Parser<'s> {
    source: &'s str,
    tokens: Vec<Token<'s>>,
    at: usize,
    numbers: HashMap<&'s str, usize>,
    list: Vec<Definition>,
    /// What may stand between terminals.
    ignored: Vec<Expr>,
}

/// Whether a name is one of a terminal.
fn is_terminal(name: &str) -> bool {
    name.chars().find(|c| *c != '_').is_none_or(|c| c.is_ascii_uppercase())
}

impl<'s> Parser<'s> {
    fn error(&self, message: impl Into<String>) -> GrammarError {
        error_at(self.source, self.tokens.get(self.at).map_or(self.source.len(), |t| t.at), message)
    }

    fn peek(&self) -> Option<&Token<'s>> {
        self.tokens.get(self.at)
    }

    fn is(&self, sign: &str) -> bool {
        matches!(self.peek(), Some(Token { kind: Kind::Sign(s), .. }) if *s == sign)
    }

    fn take(&mut self, sign: &str) -> bool {
        let found = self.is(sign);
        self.at += usize::from(found);
        found
    }

    fn name(&mut self) -> Result<&'s str, GrammarError> {
        match self.peek() {
            Some(&Token { kind: Kind::Name(name), .. }) => {
                self.at += 1;
                Ok(name)
            }
            _ => Err(self.error("expected a name")),
        }
    }

    fn number_of(&mut self, name: &'s str, at: usize) -> usize {
        let next = self.list.len();
        let number = *self.numbers.entry(name).or_insert(next);
        if number == next {
            self.list.push(Definition { name: name.to_owned(), at, body: None });
        }
        number
    }

    fn define(&mut self, name: &'s str, at: usize, body: Expr) -> Result<(), GrammarError> {
        let number = self.number_of(name, at);
        if self.list[number].body.replace(body).is_some() {
            return Err(error_at(self.source, at, format!("{name:?} is defined twice")));
        }
        Ok(())
    }

    fn definitions(&mut self) -> Result<(), GrammarError> {
        while let Some(token) = self.peek() {
            let at = token.at;
            if let Kind::Directive(directive) = token.kind {
                self.at += 1;
                match directive {
                    "import" => self.import()?,
                    "ignore" => {
                        let expr = self.alternatives(0, true)?;
                        self.ignored.push(expr);
                    }
                    other => return Err(error_at(self.source, at, format!("%{other} is not supported"))),
                }
                continue;
            }
            // `?` and `!` shape trees, not texts.
            while self.take("?") || self.take("!") {}
            let at = self.peek().map_or(at, |t| t.at);
            let name = self.name()?;
            if self.take(".") {
                let sign = self.take("-");
                match self.peek() {
                    Some(Token { kind: Kind::Number(_), .. }) => self.at += 1,
                    _ => {
                        return Err(self.error(if sign {
                            "expected a number"
                        } else {
                            "expected a priority"
                        }));
                    }
                }
            }
            if self.is("{") {
                return Err(self.error("templates are not supported"));
            }
            if !self.take(":") {
                return Err(self.error("expected :"));
            }
            let body = self.alternatives(0, is_terminal(name))?;
            self.define(name, at, body)?;
        }
        Ok(())
    }

    /// `%import common.NAME`, `%import common (A, B)`, `-> ALIAS`.
    fn import(&mut self) -> Result<(), GrammarError> {
        self.take(".");
        let module = self.name()?;
        if module != "common" {
            return Err(self.error("only the module \"common\" can be imported"));
        }
        if self.take(".") {
            let at = self.peek().map_or(self.source.len(), |t| t.at);
            let name = self.name()?;
            let alias = if self.take("->") { self.name()? } else { name };
            return self.imported(name, alias, at);
        }
        if !self.take("(") {
            return Err(self.error("expected . or ("));
        }
        loop {
            let at = self.peek().map_or(self.source.len(), |t| t.at);
            let name = self.name()?;
            self.imported(name, name, at)?;
            if !self.take(",") {
                break;
            }
        }
        if self.take(")") { Ok(()) } else { Err(self.error("expected )")) }
    }

    fn imported(&mut self, name: &str, alias: &'s str, at: usize) -> Result<(), GrammarError> {
        let Some((_, source)) = COMMON.iter().find(|(n, _)| *n == name) else {
            return Err(error_at(self.source, at, format!("the module \"common\" has no {name:?} here")));
        };
        let rx = regex::parse(source, Scope::Whole)?;
        self.define(alias, at, expr(rx))
    }

    fn alternatives(&mut self, depth: usize, terminal: bool) -> Result<Expr, GrammarError> {
        let mut list = vec![self.sequence(depth, terminal)?];
        while self.take("|") {
            list.push(self.sequence(depth, terminal)?);
        }
        Ok(if list.len() == 1 { list.remove(0) } else { Expr::Alt(list) })
    }

    fn sequence(&mut self, depth: usize, terminal: bool) -> Result<Expr, GrammarError> {
        let mut list = Vec::new();
        while let Some(token) = self.peek() {
            // Outside of groups a line begins something new.
            if token.first && depth == 0 && self.at > 0 && !self.is("->") {
                break;
            }
            let at = token.at;
            let item = match token.kind.clone() {
                Kind::Name(name) => {
                    self.at += 1;
                    if self.is("{") {
                        return Err(self.error("templates are not supported"));
                    }
                    let rule = Expr::Rule(self.number_of(name, at));
                    if is_terminal(name) { self.spaced(rule, terminal) } else { rule }
                }
                Kind::Text(text, exact) => {
                    self.at += 1;
                    let item = if self.take("..") { self.range(&text, at)? } else { literal(&text, exact) };
                    self.spaced(item, terminal)
                }
                Kind::Expression(rx) => {
                    self.at += 1;
                    self.spaced(expr(rx), terminal)
                }
                Kind::Sign(open @ ("(" | "[")) => {
                    if depth >= DEPTH {
                        return Err(self.error(format!("groups are nested deeper than {DEPTH}")));
                    }
                    self.at += 1;
                    let inner = self.alternatives(depth + 1, terminal)?;
                    let close = if open == "(" { ")" } else { "]" };
                    if !self.take(close) {
                        return Err(self.error(format!("expected {close}")));
                    }
                    if open == "[" { Expr::Repeat(Box::new(inner), 0, Some(1)) } else { inner }
                }
                Kind::Sign("->") => {
                    self.at += 1;
                    self.name()?;
                    break;
                }
                Kind::Sign("|" | ")" | "]") => break,
                Kind::Sign("!") => {
                    self.at += 1;
                    continue;
                }
                Kind::Sign("?" | "*" | "+" | "~") => return Err(self.error("there is nothing to repeat")),
                Kind::Directive(name) => {
                    return Err(self.error(format!("%{name} cannot stand inside a rule")));
                }
                Kind::Sign(_) | Kind::Number(_) => return Err(self.error("unexpected here")),
            };
            list.push(self.repeated(item)?);
        }
        Ok(match list.len() {
            0 => Expr::Literal(String::new()),
            1 => list.remove(0),
            _ => Expr::Seq(list),
        })
    }

    /// A terminal inside a rule, and what is ignored behind it: the place of a rule that the end of reading fills.
    fn spaced(&mut self, item: Expr, terminal: bool) -> Expr {
        if terminal {
            return item;
        }
        let gap = Expr::Rule(self.number_of(GAP, 0));
        Expr::Seq(vec![item, gap])
    }

    fn range(&mut self, low: &str, at: usize) -> Result<Expr, GrammarError> {
        let high = match self.peek() {
            Some(Token { kind: Kind::Text(text, true), .. }) => text.clone(),
            _ => return Err(self.error("expected the last character of the range")),
        };
        self.at += 1;
        let one = |text: &str| {
            let mut chars = text.chars();
            chars.next().filter(|_| chars.next().is_none())
        };
        match (one(low), one(&high)) {
            (Some(low), Some(high)) if low <= high => Ok(Expr::Class(vec![(low, high)])),
            _ => Err(error_at(self.source, at, "a range counts up between two characters")),
        }
    }

    fn repeated(&mut self, mut item: Expr) -> Result<Expr, GrammarError> {
        for _ in 0..MARKS {
            let start = self.at;
            let (min, max) = if self.peek().is_some_and(|t| t.first) {
                return Ok(item);
            } else if self.take("?") {
                (0, Some(1))
            } else if self.take("*") {
                (0, None)
            } else if self.take("+") {
                (1, None)
            } else if self.take("~") {
                let min = self.count()?;
                let max = if self.take("..") { self.count()? } else { min };
                (min, Some(max))
            } else if self.take("{") {
                let min = if self.is(",") { 0 } else { self.count()? };
                let max = match self.take(",") {
                    true if self.is("}") => None,
                    true => Some(self.count()?),
                    false => Some(min),
                };
                if !self.take("}") {
                    return Err(self.error("expected }"));
                }
                (min, max)
            } else {
                return Ok(item);
            };
            if max.unwrap_or(min) > REPEAT || max.is_some_and(|max| max < min) {
                self.at = start;
                return Err(self.error(format!("a repetition counts up, to at most {REPEAT}")));
            }
            item = Expr::Repeat(Box::new(item), min, max);
        }
        match self.peek() {
            Some(Token { kind: Kind::Sign("?" | "*" | "+" | "~" | "{"), first: false, .. }) => {
                Err(self.error(format!("more than {MARKS} repetitions of each other")))
            }
            _ => Ok(item),
        }
    }

    fn count(&mut self) -> Result<u32, GrammarError> {
        match self.peek() {
            Some(&Token { kind: Kind::Number(n), .. }) => {
                self.at += 1;
                Ok(n)
            }
            _ => Err(self.error("expected a number")),
        }
    }

    /// Everything that was read, with `start` as the root.
    fn rules(mut self) -> Result<Rules, GrammarError> {
        let ignored = std::mem::take(&mut self.ignored);
        let gap = match ignored.len() {
            0 => Expr::Literal(String::new()),
            _ => Expr::Repeat(Box::new(Expr::Alt(ignored)), 0, None),
        };
        let number = self.number_of(GAP, 0);
        self.list[number].body = Some(gap);
        if let Some(missing) = self.list.iter().find(|d| d.body.is_none()) {
            let message = format!("{:?} is not defined", missing.name);
            return Err(error_at(self.source, missing.at, message));
        }
        let Some(&start) = self.numbers.get("start") else {
            return Err(error_at(self.source, 0, "there is no rule \"start\""));
        };
        let root = self.list.len();
        let first = Expr::Seq(vec![Expr::Rule(number), Expr::Rule(start)]);
        self.list.push(Definition { name: "%start".to_owned(), at: 0, body: Some(first) });
        let names = self.list.iter().map(|d| d.name.clone()).collect();
        let bodies = self.list.into_iter().filter_map(|d| d.body).collect();
        Ok(Rules { names, bodies, root })
    }
}

/// The rule for what `%ignore` names; no name in a grammar can be this.
const GAP: &str = "%ignore";

fn literal(text: &str, exact: bool) -> Expr {
    if exact || text.is_empty() {
        return Expr::Literal(text.to_owned());
    }
    let one = |c: char| {
        let cases = c.to_lowercase().chain(c.to_uppercase()).map(|c| (c, c)).collect();
        Expr::Class(normalize(cases))
    };
    Expr::Seq(text.chars().map(one).collect())
}

fn expr(rx: Rx) -> Expr {
    match rx {
        Rx::Literal(text) => Expr::Literal(text),
        Rx::Class(ranges) => Expr::Class(ranges),
        Rx::Seq(list) => Expr::Seq(list.into_iter().map(expr).collect()),
        Rx::Alt(list) => Expr::Alt(list.into_iter().map(expr).collect()),
        Rx::Repeat(inner, min, max) => Expr::Repeat(Box::new(expr(*inner)), min, max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_have_a_line_and_a_column() {
        for (source, position) in [
            ("start: x", (1, 8)),
            ("a: \"x\"", (1, 1)),
            ("start: \"x\"\nstart: \"y\"", (2, 1)),
            ("start: \"x", (1, 8)),
            ("start: /x", (1, 8)),
            ("start: /x/i", (1, 11)),
            ("start: (\"x\"", (1, 12)),
            ("start: *", (1, 8)),
            ("start: \"a\"~9999", (1, 11)),
            ("start: \"b\"..\"a\"", (1, 8)),
            ("start: A\n%declare A", (2, 1)),
            ("%import python.NAME\nstart: \"a\"", (1, 15)),
            ("%import common.NOTHING\nstart: \"a\"", (1, 16)),
            ("start = \"a\"", (1, 7)),
            ("start: a{\"x\"}", (1, 9)),
        ] {
            let error = parse(source).expect_err(source);
            assert_eq!(
                (error.code, error.position),
                ("invalid_grammar", Some(position)),
                "{source}: {error}"
            );
        }
        assert!(parse(&format!("start: {}", "(".repeat(5000))).is_err());
    }

    #[test]
    fn a_rule_ends_where_its_line_does_and_goes_on_behind_a_bar() {
        let rules = parse("start: \"a\" // one\n  | \"b\" -> named\n\n!?x.2: (\n\"c\"\n)\n").expect("reads");
        assert_eq!(rules.names, [GAP, "start", "x", "%start"]);
        let spaced = |text: &str| Expr::Seq(vec![Expr::Literal(text.into()), Expr::Rule(0)]);
        assert_eq!(rules.bodies[1], Expr::Alt(vec![spaced("a"), spaced("b")]));
    }
}
