//! GBNF, the grammar notation of llama.cpp: rules `name ::= alternatives` over literals, classes, groups and
//! repetitions, `root` first.

use std::collections::HashMap;

use super::error::GrammarError;
use super::rx::{negate, normalize};

/// Longest source, in bytes.
const LIMIT: usize = 65_536;
/// Deepest nesting of groups.
const DEPTH: usize = 64;
/// Highest count of a repetition.
const REPEAT: u32 = 4096;
/// Repetitions of repetitions.
const MARKS: usize = 8;

/// The right side of a rule.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Expr {
    Literal(String),
    Class(Vec<(char, char)>),
    Rule(usize),
    Seq(Vec<Expr>),
    Alt(Vec<Expr>),
    Repeat(Box<Expr>, u32, Option<u32>),
}

/// Rules by number.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rules {
    pub(crate) names: Vec<String>,
    pub(crate) bodies: Vec<Expr>,
    pub(crate) root: usize,
}

/// Reads a grammar.
///
/// # Errors
/// `invalid_grammar` with line and column.
pub(crate) fn parse(source: &str) -> Result<Rules, GrammarError> {
    if source.len() > LIMIT {
        let message = format!("the grammar has {} bytes, at most {LIMIT} are read", source.len());
        return Err(GrammarError::new("invalid_grammar", message));
    }
    let mut parser = Parser {
        source,
        at: 0,
        names: HashMap::new(),
        order: Vec::new(),
        bodies: Vec::new(),
        uses: Vec::new(),
    };
    parser.rules()?;
    if let Some(&(rule, at)) = parser.uses.iter().find(|(rule, _)| parser.bodies[*rule].is_none()) {
        return Err(parser.error_at(at, format!("the rule {:?} is not defined", parser.order[rule])));
    }
    let Some(&root) = parser.names.get("root") else {
        return Err(parser.error_at(0, "there is no rule \"root\""));
    };
    let bodies = parser.bodies.into_iter().flatten().collect();
    Ok(Rules { names: parser.order, bodies, root })
}

struct Parser<'s> {
    source: &'s str,
    at: usize,
    names: HashMap<&'s str, usize>,
    order: Vec<String>,
    bodies: Vec<Option<Expr>>,
    uses: Vec<(usize, usize)>,
}

impl<'s> Parser<'s> {
    fn error_at(&self, at: usize, message: impl Into<String>) -> GrammarError {
        let before = &self.source[..at];
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        GrammarError::new("invalid_grammar", message).on(line, column)
    }

    fn error(&self, message: impl Into<String>) -> GrammarError {
        self.error_at(self.at, message)
    }

    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    /// White space and comments, over line ends only where a rule cannot end.
    fn space(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => self.at += 1,
                '\r' | '\n' if lines => self.at += 1,
                '#' => self.at += self.rest().find(['\r', '\n']).unwrap_or(self.rest().len()),
                _ => break,
            }
        }
    }

    fn name(&mut self) -> Option<&'s str> {
        let rest = self.rest();
        let len =
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_')).unwrap_or(rest.len());
        self.at += len;
        (len > 0).then(|| &rest[..len])
    }

    fn rule_number(&mut self, name: &'s str) -> usize {
        let next = self.order.len();
        let number = *self.names.entry(name).or_insert(next);
        if number == next {
            self.order.push(name.to_owned());
            self.bodies.push(None);
        }
        number
    }

    fn rules(&mut self) -> Result<(), GrammarError> {
        self.space(true);
        while !self.rest().is_empty() {
            let start = self.at;
            let name = self.name().ok_or_else(|| self.error("expected the name of a rule"))?;
            let number = self.rule_number(name);
            if self.bodies[number].is_some() {
                return Err(self.error_at(start, format!("the rule {name:?} is defined twice")));
            }
            self.space(true);
            if !self.take("::=") {
                return Err(self.error("expected ::="));
            }
            self.space(true);
            let body = self.alternatives(0)?;
            self.bodies[number] = Some(body);
            if !self.rest().is_empty() && !self.rest().starts_with(['\r', '\n']) {
                return Err(self.error("expected the end of the line"));
            }
            self.space(true);
        }
        Ok(())
    }

    fn alternatives(&mut self, depth: usize) -> Result<Expr, GrammarError> {
        let mut list = vec![self.sequence(depth)?];
        while self.take("|") {
            self.space(true);
            list.push(self.sequence(depth)?);
        }
        Ok(if list.len() == 1 { list.remove(0) } else { Expr::Alt(list) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Expr, GrammarError> {
        let mut list = Vec::new();
        while let Some(c) = self.peek() {
            let item = match c {
                '"' => self.literal()?,
                '[' => self.class()?,
                '.' => {
                    self.at += 1;
                    Expr::Class(vec![('\0', char::MAX)])
                }
                '(' => {
                    if depth >= DEPTH {
                        return Err(self.error(format!("groups are nested deeper than {DEPTH}")));
                    }
                    self.at += 1;
                    self.space(true);
                    let inner = self.alternatives(depth + 1)?;
                    if !self.take(")") {
                        return Err(self.error("expected )"));
                    }
                    inner
                }
                '<' | '!' => return Err(self.error("token terminals are not supported; write the text")),
                c if c.is_ascii_alphanumeric() || c == '_' => {
                    let start = self.at;
                    let name = self.name().unwrap_or_default();
                    let number = self.rule_number(name);
                    self.uses.push((number, start));
                    Expr::Rule(number)
                }
                '*' | '+' | '?' | '{' => return Err(self.error("there is nothing to repeat")),
                '|' | ')' | '\r' | '\n' => break,
                c => return Err(self.error(format!("unexpected {c:?}"))),
            };
            self.space(depth > 0);
            list.push(self.repeated(item, depth)?);
        }
        Ok(match list.len() {
            0 => Expr::Literal(String::new()),
            1 => list.remove(0),
            _ => Expr::Seq(list),
        })
    }

    fn repeated(&mut self, mut item: Expr, depth: usize) -> Result<Expr, GrammarError> {
        for _ in 0..MARKS {
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    let (min, max) = self.counts()?;
                    self.space(depth > 0);
                    item = Expr::Repeat(Box::new(item), min, max);
                    continue;
                }
                _ => return Ok(item),
            };
            self.at += 1;
            self.space(depth > 0);
            item = Expr::Repeat(Box::new(item), min, max);
        }
        match self.peek() {
            Some('*' | '+' | '?' | '{') => {
                Err(self.error(format!("more than {MARKS} repetitions of each other")))
            }
            _ => Ok(item),
        }
    }

    fn counts(&mut self) -> Result<(u32, Option<u32>), GrammarError> {
        let start = self.at;
        self.at += 1;
        let min = self.number()?;
        let max = if self.take(",") {
            self.space(false);
            if self.peek() == Some('}') { None } else { Some(self.number()?) }
        } else {
            Some(min)
        };
        if !self.take("}") {
            return Err(self.error("expected }"));
        }
        if max.unwrap_or(min) > REPEAT || max.is_some_and(|max| max < min) {
            return Err(self.error_at(start, format!("a repetition counts up, to at most {REPEAT}")));
        }
        Ok((min, max))
    }

    fn number(&mut self) -> Result<u32, GrammarError> {
        self.space(false);
        let rest = self.rest();
        let len = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        // A missing lower count is 0.
        let value = if len == 0 && rest.starts_with(',') {
            0
        } else {
            rest[..len].parse().map_err(|_| self.error("expected a number"))?
        };
        self.at += len;
        self.space(false);
        Ok(value)
    }

    fn literal(&mut self) -> Result<Expr, GrammarError> {
        let start = self.at;
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                None | Some('\r' | '\n') => return Err(self.error_at(start, "the literal does not end")),
                Some('"') => {
                    self.at += 1;
                    return Ok(Expr::Literal(text));
                }
                Some(_) => text.push(self.character()?),
            }
        }
    }

    fn class(&mut self) -> Result<Expr, GrammarError> {
        let start = self.at;
        self.at += 1;
        let negated = self.take("^");
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                None | Some('\r' | '\n') => return Err(self.error_at(start, "the class does not end")),
                Some(']') => {
                    self.at += 1;
                    break;
                }
                Some(_) => {}
            }
            let low = self.character()?;
            let ranged = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let high = if ranged {
                self.at += 1;
                self.character()?
            } else {
                low
            };
            if high < low {
                return Err(self.error("a range counts up"));
            }
            ranges.push((low, high));
        }
        let ranges = normalize(ranges);
        let ranges = if negated { negate(&ranges) } else { ranges };
        if ranges.is_empty() {
            return Err(self.error_at(start, "nothing matches the class"));
        }
        Ok(Expr::Class(ranges))
    }

    /// One character of a literal or class, escapes resolved.
    fn character(&mut self) -> Result<char, GrammarError> {
        let start = self.at;
        let c = self.peek().ok_or_else(|| self.error("unexpected end"))?;
        self.at += c.len_utf8();
        if c != '\\' {
            return Ok(c);
        }
        let escape = self.peek().ok_or_else(|| self.error("unexpected end"))?;
        self.at += escape.len_utf8();
        let digits = match escape {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            '\\' | '"' | '[' | ']' | '-' | '^' | '/' | '.' | '|' | '*' | '+' | '?' | '(' | ')' | '{'
            | '}' | '\'' => {
                return Ok(escape);
            }
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => return Err(self.error_at(start, format!("unknown escape \\{other}"))),
        };
        let value = self
            .rest()
            .get(..digits)
            .filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()))
            .and_then(|hex| u32::from_str_radix(hex, 16).ok())
            .and_then(char::from_u32)
            .ok_or_else(|| {
                self.error_at(start, format!("expected a code point in {digits} hexadecimal digits"))
            })?;
        self.at += digits;
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_end_where_their_line_does() {
        let rules = parse("# c\nroot ::= (\n \"a\" | # x\n [b-d]\n)+ tail |\n \"z\"\n\ntail ::= \"\\x41\\u00e9\\\"\"? {0,2}\n")
            .expect("reads");
        assert_eq!(rules.names, ["root", "tail"]);
        let a = Expr::Alt(vec![Expr::Literal("a".into()), Expr::Class(vec![('b', 'd')])]);
        assert_eq!(
            rules.bodies[0],
            Expr::Alt(vec![
                Expr::Seq(vec![Expr::Repeat(Box::new(a), 1, None), Expr::Rule(1)]),
                Expr::Literal("z".into())
            ])
        );
        let tail = Expr::Repeat(Box::new(Expr::Literal("Aé\"".into())), 0, Some(1));
        assert_eq!(rules.bodies[1], Expr::Repeat(Box::new(tail), 0, Some(2)));
    }

    #[test]
    fn mistakes_have_a_line_and_a_column() {
        for (source, position) in [
            ("root ::= x", (1, 10)),
            ("a ::= \"x\"", (1, 1)),
            ("root ::= \"x\"\nroot ::= \"y\"", (2, 1)),
            ("root ::= \"x", (1, 10)),
            ("root ::= [z-a]", (1, 14)),
            ("root ::= (\"x\"", (1, 14)),
            ("root ::= \"é\" \\", (1, 14)),
            ("root ::= *", (1, 10)),
            ("root ::= \"a\"{9999}", (1, 13)),
            ("root ::= <think>", (1, 10)),
            ("root = \"a\"", (1, 6)),
        ] {
            let error = parse(source).expect_err(source);
            assert_eq!(
                (error.code, error.position),
                ("invalid_grammar", Some(position)),
                "{source}: {error}"
            );
        }
        assert!(parse(&format!("root ::= {}", "(".repeat(5000))).is_err());
    }
}
