//! From GBNF rules to a grammar of the parser below, which has a lexer: greedy, longest match first.
//!
//! A grammar without recursion is one regular expression, and one lexeme is exact. With recursion the
//! regular parts become lexemes, as long as possible, because lexemes are what makes masks cheap. A greedy
//! lexer misreads some grammars (`[a-z]* "x"` would never end), so each set of lexemes is checked
//! ([`super::lexable`]) and a lexeme that could be read too far is split, down to single characters, with
//! which nothing can go wrong.

use std::collections::HashMap;
use std::fmt::Write;

use super::error::GrammarError;
use super::gbnf::{Expr, Rules};
use super::lexable::{Conflict, Lexemes, Work};
use super::rx::Rx;

/// Most nodes of a regular expression made of rules.
const SIZE: usize = 200_000;
/// Most productions.
const PRODUCTIONS: usize = 20_000;
/// Most splits.
const SPLITS: usize = 400;

/// A symbol of a production.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Symbol {
    Lexeme(usize),
    Rule(usize),
}

/// Productions over lexemes.
#[derive(Debug, Default)]
pub(crate) struct Cfg {
    pub(crate) rules: Vec<Vec<Vec<Symbol>>>,
    pub(crate) lexemes: Vec<Rx>,
    numbers: HashMap<Rx, usize>,
}

fn too_complex() -> GrammarError {
    GrammarError::new("constraint_too_complex", "the grammar is too large once its rules are expanded")
}

/// The grammar as Lark text.
///
/// # Errors
/// `invalid_grammar` if nothing matches, `constraint_too_complex`.
pub(crate) fn lark(rules: &Rules) -> Result<String, GrammarError> {
    Ok(match reduced(rules)? {
        Reduced::Regular(rx) => format!("start: {}\n", rx.lark()),
        Reduced::Recursive(cfg) => cfg.text(rules.root, "start", ""),
    })
}

/// A grammar as the lexer below can read it.
pub(crate) enum Reduced {
    /// One expression.
    Regular(Rx),
    /// Productions over lexemes; the root is the one of the rules.
    Recursive(Cfg),
}

/// Rules as an expression, or as productions that a greedy lexer reads rightly.
///
/// # Errors
/// `invalid_grammar` if nothing matches, `constraint_too_complex`.
pub(crate) fn reduced(rules: &Rules) -> Result<Reduced, GrammarError> {
    let cyclic = cyclic_rules(rules);
    let mut build = Build { rules, cyclic, regular: vec![None; rules.bodies.len()], cfg: Cfg::default() };
    if !build.cyclic[rules.root] {
        let rx = build.regular_rule(rules.root)?;
        if rx.is_void() {
            return Err(GrammarError::new("invalid_grammar", "nothing matches the grammar"));
        }
        return Ok(Reduced::Regular(rx));
    }
    let mut cfg = build.cfg()?;
    cfg.drop_unproductive(rules.root)?;
    let mut work = Work::new();
    for _ in 0..SPLITS {
        match Lexemes::new(&cfg.lexemes, &mut work)?.conflict(&cfg, &mut work)? {
            None => return Ok(Reduced::Recursive(cfg)),
            Some(Conflict { ending, longer }) => {
                let lexeme = if cfg.splittable(ending) { ending } else { longer };
                cfg.split(lexeme)?;
            }
        }
    }
    Err(too_complex())
}

/// Rules from which a cycle can be reached.
fn cyclic_rules(rules: &Rules) -> Vec<bool> {
    fn uses(expr: &Expr, out: &mut Vec<usize>) {
        match expr {
            Expr::Rule(rule) => out.push(*rule),
            Expr::Seq(list) | Expr::Alt(list) => list.iter().for_each(|e| uses(e, out)),
            Expr::Repeat(inner, _, _) => uses(inner, out),
            Expr::Literal(_) | Expr::Class(_) => {}
        }
    }
    let edges: Vec<Vec<usize>> = rules
        .bodies
        .iter()
        .map(|body| {
            let mut out = Vec::new();
            uses(body, &mut out);
            out
        })
        .collect();
    // A rule is free of cycles once all that it uses is.
    let mut free = vec![false; edges.len()];
    loop {
        let mut changed = false;
        for rule in 0..edges.len() {
            if !free[rule] && edges[rule].iter().all(|&used| free[used]) {
                free[rule] = true;
                changed = true;
            }
        }
        if !changed {
            return free.into_iter().map(|f| !f).collect();
        }
    }
}

struct Build<'r> {
    rules: &'r Rules,
    cyclic: Vec<bool>,
    regular: Vec<Option<Rx>>,
    cfg: Cfg,
}

impl Build<'_> {
    fn regular_rule(&mut self, rule: usize) -> Result<Rx, GrammarError> {
        if self.regular[rule].is_none() {
            let rx = self.regular_expr(&self.rules.bodies[rule])?.ok_or_else(too_complex)?;
            if rx.size() > SIZE || rx.is_too_heavy() {
                return Err(too_complex());
            }
            self.regular[rule] = Some(rx);
        }
        self.regular[rule].clone().ok_or_else(too_complex)
    }

    /// The expression as a regular one, `None` if it uses recursion.
    fn regular_expr(&mut self, expr: &Expr) -> Result<Option<Rx>, GrammarError> {
        Ok(Some(match expr {
            Expr::Literal(text) => Rx::Literal(text.clone()),
            Expr::Class(ranges) => Rx::Class(ranges.clone()),
            Expr::Rule(rule) if self.cyclic[*rule] => return Ok(None),
            Expr::Rule(rule) => self.regular_rule(*rule)?,
            Expr::Seq(list) | Expr::Alt(list) => {
                let mut parts = Vec::with_capacity(list.len());
                let mut size = 0;
                for item in list {
                    let Some(part) = self.regular_expr(item)? else { return Ok(None) };
                    size += part.size();
                    if size > SIZE {
                        return Err(too_complex());
                    }
                    parts.push(part);
                }
                if matches!(expr, Expr::Seq(_)) { Rx::seq(parts) } else { Rx::alt(parts) }
            }
            Expr::Repeat(inner, min, max) => match self.regular_expr(inner)? {
                Some(part) => Rx::Repeat(Box::new(part), *min, *max),
                None => return Ok(None),
            },
        }))
    }

    fn cfg(mut self) -> Result<Cfg, GrammarError> {
        self.cfg.rules = vec![Vec::new(); self.rules.bodies.len()];
        for rule in 0..self.rules.bodies.len() {
            if self.cyclic[rule] {
                let alternatives = match &self.rules.bodies[rule] {
                    Expr::Alt(list) => list.iter().map(|e| self.symbols(e)).collect::<Result<_, _>>()?,
                    body => vec![self.symbols(body)?],
                };
                self.cfg.rules[rule] = alternatives;
            }
        }
        Ok(self.cfg)
    }

    fn symbols(&mut self, expr: &Expr) -> Result<Vec<Symbol>, GrammarError> {
        if let Some(rx) = self.regular_expr(expr)? {
            return self.cfg.lexeme(rx);
        }
        match expr {
            Expr::Rule(rule) => Ok(vec![Symbol::Rule(*rule)]),
            Expr::Seq(list) => {
                let mut out = Vec::new();
                let mut run = Vec::new();
                for item in list {
                    match self.regular_expr(item)? {
                        Some(rx) => run.push(rx),
                        None => {
                            out.extend(self.cfg.lexeme(Rx::seq(std::mem::take(&mut run)))?);
                            out.extend(self.symbols(item)?);
                        }
                    }
                }
                out.extend(self.cfg.lexeme(Rx::seq(run))?);
                Ok(out)
            }
            Expr::Alt(list) => {
                let alternatives = list.iter().map(|e| self.symbols(e)).collect::<Result<_, _>>()?;
                Ok(vec![self.cfg.rule(alternatives)?])
            }
            Expr::Repeat(inner, min, max) => {
                let body = self.symbols(inner)?;
                self.cfg.repeat(body, *min, *max)
            }
            // Both are regular.
            Expr::Literal(_) | Expr::Class(_) => Ok(Vec::new()),
        }
    }
}

impl Cfg {
    fn rule(&mut self, alternatives: Vec<Vec<Symbol>>) -> Result<Symbol, GrammarError> {
        let size: usize = self.rules.iter().flatten().map(|a| a.len() + 1).sum();
        if size > PRODUCTIONS {
            return Err(too_complex());
        }
        self.rules.push(alternatives);
        Ok(Symbol::Rule(self.rules.len() - 1))
    }

    /// A lexeme never matches the empty text; a nullable expression becomes an optional one.
    fn lexeme(&mut self, rx: Rx) -> Result<Vec<Symbol>, GrammarError> {
        if rx == Rx::empty() {
            return Ok(Vec::new());
        }
        if rx.is_too_heavy() {
            return Err(too_complex());
        }
        let nullable = rx.nullable();
        let next = self.lexemes.len();
        let number = *self.numbers.entry(rx.clone()).or_insert(next);
        if number == next {
            self.lexemes.push(rx);
        }
        let symbol = Symbol::Lexeme(number);
        Ok(vec![if nullable { self.rule(vec![Vec::new(), vec![symbol]])? } else { symbol }])
    }

    fn repeat(&mut self, body: Vec<Symbol>, min: u32, max: Option<u32>) -> Result<Vec<Symbol>, GrammarError> {
        let copies = body.len() * (min.max(max.unwrap_or(0)) as usize + 1);
        if copies > PRODUCTIONS {
            return Err(too_complex());
        }
        let mut out: Vec<Symbol> = Vec::new();
        for _ in 0..min {
            out.extend_from_slice(&body);
        }
        match max {
            None => {
                // Left recursion keeps the parser's rows short.
                let star = Symbol::Rule(self.rules.len());
                let mut again = vec![star];
                again.extend_from_slice(&body);
                out.push(self.rule(vec![Vec::new(), again])?);
            }
            Some(max) => {
                let mut rest: Option<Symbol> = None;
                for _ in min..max {
                    let mut once = body.clone();
                    once.extend(rest);
                    rest = Some(self.rule(vec![Vec::new(), once])?);
                }
                out.extend(rest);
            }
        }
        Ok(out)
    }

    fn splittable(&self, lexeme: usize) -> bool {
        match &self.lexemes[lexeme] {
            Rx::Literal(text) => text.chars().nth(1).is_some(),
            Rx::Class(_) => false,
            _ => true,
        }
    }

    /// Takes a lexeme apart by one level, everywhere.
    fn split(&mut self, lexeme: usize) -> Result<(), GrammarError> {
        let parts = match self.lexemes[lexeme].clone() {
            Rx::Literal(text) => {
                let mut out = Vec::new();
                for c in text.chars() {
                    out.extend(self.lexeme(Rx::Literal(c.to_string()))?);
                }
                out
            }
            // The end is what is read too far, mostly; the beginning stays whole.
            Rx::Seq(mut list) => {
                let last = list.pop().ok_or_else(too_complex)?;
                let mut out = self.lexeme(Rx::seq(list))?;
                out.extend(self.lexeme(last)?);
                out
            }
            Rx::Alt(list) => {
                let alternatives = list.into_iter().map(|rx| self.lexeme(rx)).collect::<Result<_, _>>()?;
                vec![self.rule(alternatives)?]
            }
            Rx::Repeat(inner, min, max) => {
                let body = self.lexeme(*inner)?;
                self.repeat(body, min, max)?
            }
            Rx::Class(_) => return Err(too_complex()),
        };
        for alternative in self.rules.iter_mut().flatten() {
            if alternative.contains(&Symbol::Lexeme(lexeme)) {
                *alternative = alternative
                    .iter()
                    .flat_map(|&s| if s == Symbol::Lexeme(lexeme) { parts.clone() } else { vec![s] })
                    .collect();
            }
        }
        Ok(())
    }

    /// Lexemes that some production still has.
    pub(crate) fn used(&self) -> Vec<bool> {
        let mut used = vec![false; self.lexemes.len()];
        for symbol in self.rules.iter().flatten().flatten() {
            if let Symbol::Lexeme(lexeme) = symbol {
                used[*lexeme] = true;
            }
        }
        used
    }

    /// Removes what can never end, so that no output can enter it.
    fn drop_unproductive(&mut self, root: usize) -> Result<(), GrammarError> {
        let mut productive = vec![false; self.rules.len()];
        loop {
            let ends = |symbols: &Vec<Symbol>, productive: &[bool]| {
                symbols.iter().all(|s| match s {
                    Symbol::Lexeme(l) => !self.lexemes[*l].is_void(),
                    Symbol::Rule(r) => productive[*r],
                })
            };
            let next: Vec<bool> = self
                .rules
                .iter()
                .map(|alternatives| alternatives.iter().any(|a| ends(a, &productive)))
                .collect();
            if next == productive {
                break;
            }
            productive = next;
        }
        if !productive[root] {
            return Err(GrammarError::new("invalid_grammar", "nothing finite matches the grammar"));
        }
        let lexemes = &self.lexemes;
        for alternatives in &mut self.rules {
            alternatives.retain(|symbols| {
                symbols.iter().all(|s| match s {
                    Symbol::Lexeme(l) => !lexemes[*l].is_void(),
                    Symbol::Rule(r) => productive[*r],
                })
            });
        }
        Ok(())
    }

    /// Lark rules, the first of them `start`; names of the others begin with `prefix`, which is in small letters.
    pub(crate) fn text(&self, root: usize, start: &str, prefix: &str) -> String {
        let capital = prefix.to_uppercase();
        let mut out = format!("{start}: {prefix}r{root}\n");
        let mut reachable = vec![false; self.rules.len()];
        let mut queue = vec![root];
        while let Some(rule) = queue.pop() {
            if !std::mem::replace(&mut reachable[rule], true) {
                queue.extend(self.rules[rule].iter().flatten().filter_map(|s| match s {
                    Symbol::Rule(r) => Some(*r),
                    Symbol::Lexeme(_) => None,
                }));
            }
        }
        // Writing to a string does not fail.
        for (rule, alternatives) in self.rules.iter().enumerate().filter(|(r, _)| reachable[*r]) {
            let _ = write!(out, "{prefix}r{rule}:");
            for (i, symbols) in alternatives.iter().enumerate() {
                if i > 0 {
                    out.push_str(" |");
                }
                if symbols.is_empty() {
                    out.push_str(" \"\"");
                }
                for symbol in symbols {
                    let _ = match symbol {
                        Symbol::Lexeme(lexeme) => write!(out, " {capital}L{lexeme}"),
                        Symbol::Rule(rule) => write!(out, " {prefix}r{rule}"),
                    };
                }
            }
            out.push('\n');
        }
        for (lexeme, rx) in self.lexemes.iter().enumerate() {
            let some = if rx.nullable() { " & /(?s:.)+/" } else { "" };
            let _ = writeln!(out, "{capital}L{lexeme}: {}{some}", rx.lark());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::gbnf::parse;
    use super::*;

    fn text(source: &str) -> String {
        lark(&parse(source).expect("reads")).expect("compiles")
    }

    #[test]
    fn without_recursion_there_is_one_lexeme() {
        assert_eq!(text("root ::= [a-z]* x\nx ::= \"x\""), "start: /[a-z]*x/\n");
    }

    #[test]
    fn lexemes_are_split_where_greed_would_misread() {
        let good = text("root ::= \"(\" root \")\" | [0-9]+");
        assert!(good.contains("[0-9]+"), "{good}");
        // Greedy, `[a-z]+` would swallow the x that has to follow.
        let split = text("root ::= \"(\" root \")x\" | [a-z]+ | root \"x\"");
        assert!(split.contains("L") && !split.contains("r0: L0 r0 L1 | L2 |"), "{split}");
    }

    #[test]
    fn what_cannot_end_is_refused_or_closed() {
        let error = |s: &str| lark(&parse(s).expect("reads")).expect_err("refused").code;
        assert_eq!(error("root ::= \"a\" root"), "invalid_grammar");
        assert_eq!(error("root ::= x\nx ::= x"), "invalid_grammar");
        assert!(!text("root ::= \"a\" | \"b\" x | \"c\" root\nx ::= \"q\" x").contains("q r1"));
        let deep: String = (0..40).map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1)).collect();
        assert_eq!(error(&format!("root ::= r0\n{deep}r40 ::= \"a\"")), "constraint_too_complex");
    }
}
