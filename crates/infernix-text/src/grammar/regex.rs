//! Regular expressions of requests: the common part of what ECMAScript and Python write.
//!
//! An expression describes the whole answer. `\d`, `\w` are ASCII and `\s` is what ECMAScript says; the lexer
//! below would read the first two as Unicode. Look-around, back-references, word boundaries and anchors
//! inside an alternative have no meaning for a grammar and are refused.

use regex_syntax::ast::{self, AssertionKind, Ast, ClassPerlKind, ClassSet, ClassSetItem, GroupKind};
use regex_syntax::hir::{Class, Hir, HirKind};

use super::error::GrammarError;
use super::rx::{Rx, normalize};

/// Longest expression, in bytes.
const LIMIT: usize = 8192;
/// What ECMAScript's `\s` matches (ECMA-262, `CharacterClassEscape :: s`).
const SPACES: &str =
    r"\t\n\x0B\f\r\x20\u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}";

/// Where an expression ends at its own anchors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// It describes the whole text; anchors at its ends change nothing.
    Whole,
    /// It is searched for, as the `pattern` of a schema is.
    Search,
}

/// Reads an expression.
///
/// # Errors
/// `invalid_regex`, with what is not supported.
pub(crate) fn parse(source: &str, scope: Scope) -> Result<Rx, GrammarError> {
    if source.len() > LIMIT {
        return Err(refuse(format!("the expression has {} bytes, at most {LIMIT} are read", source.len())));
    }
    let ast = ast::parse::ParserBuilder::new()
        .nest_limit(64)
        .build()
        .parse(source)
        .map_err(|e| refuse(format!("{} at {:?}", e.kind(), e.span().start.column)))?;
    let alternatives = match &ast {
        Ast::Alternation(alternation) => alternation.asts.iter().collect(),
        other => vec![other],
    };
    let mut parts = Vec::with_capacity(alternatives.len());
    for alternative in alternatives {
        let mut edits = Edits::default();
        edits.alternative(alternative)?;
        let span = alternative.span();
        let text = edits.apply(source, span.start.offset, span.end.offset);
        let hir = regex_syntax::ParserBuilder::new()
            .nest_limit(64)
            .build()
            .parse(&text)
            .map_err(|e| refuse(e.to_string().lines().last().unwrap_or_default().to_owned()))?;
        let body = convert(&hir)?;
        parts.push(match scope {
            Scope::Whole => body,
            Scope::Search => Rx::seq(vec![
                if edits.start { Rx::empty() } else { Rx::anything() },
                body,
                if edits.end { Rx::empty() } else { Rx::anything() },
            ]),
        });
    }
    let rx = Rx::alt(parts);
    if rx.is_void() {
        return Err(refuse("nothing matches the expression"));
    }
    if rx.is_too_heavy() {
        return Err(refuse("repetitions inside repetitions make the expression too large"));
    }
    Ok(rx)
}

fn refuse(message: impl Into<String>) -> GrammarError {
    GrammarError::new("invalid_regex", message)
}

/// Replacements in the source: classes by their ASCII meaning, anchors by nothing.
#[derive(Default)]
struct Edits {
    list: Vec<(usize, usize, String)>,
    start: bool,
    end: bool,
}

impl Edits {
    /// One top-level alternative: anchors may stand at its ends.
    fn alternative(&mut self, ast: &Ast) -> Result<(), GrammarError> {
        let parts: Vec<&Ast> = match ast {
            Ast::Concat(concat) => concat.asts.iter().collect(),
            other => vec![other],
        };
        let last = parts.len() - 1;
        for (i, part) in parts.into_iter().enumerate() {
            if let Ast::Assertion(assertion) = part {
                let (start, end) = match assertion.kind {
                    AssertionKind::StartLine | AssertionKind::StartText => (true, false),
                    AssertionKind::EndLine | AssertionKind::EndText => (false, true),
                    _ => (false, false),
                };
                if (start && i == 0) || (end && i == last) {
                    self.start |= start;
                    self.end |= end;
                    let span = part.span();
                    self.list.push((span.start.offset, span.end.offset, "(?:)".to_owned()));
                    continue;
                }
            }
            self.visit(part)?;
        }
        Ok(())
    }

    fn visit(&mut self, ast: &Ast) -> Result<(), GrammarError> {
        match ast {
            Ast::Empty(_) | Ast::Literal(_) | Ast::Dot(_) | Ast::ClassUnicode(_) => {}
            Ast::Flags(_) => return Err(refuse("flags in the expression are not supported")),
            Ast::Assertion(assertion) => {
                return Err(refuse(match assertion.kind {
                    AssertionKind::StartLine
                    | AssertionKind::EndLine
                    | AssertionKind::StartText
                    | AssertionKind::EndText => {
                        "an anchor may stand only at an end of a top-level alternative"
                    }
                    _ => "word boundaries are not supported",
                }));
            }
            Ast::ClassPerl(class) => self.perl(class),
            Ast::ClassBracketed(class) => self.class_set(&class.kind)?,
            Ast::Repetition(repetition) => self.visit(&repetition.ast)?,
            Ast::Group(group) => {
                if let GroupKind::NonCapturing(flags) = &group.kind
                    && !flags.items.is_empty()
                {
                    return Err(refuse("flags in the expression are not supported"));
                }
                self.visit(&group.ast)?;
            }
            Ast::Alternation(alternation) => {
                for part in &alternation.asts {
                    self.visit(part)?;
                }
            }
            Ast::Concat(concat) => {
                for part in &concat.asts {
                    self.visit(part)?;
                }
            }
        }
        Ok(())
    }

    fn class_set(&mut self, set: &ClassSet) -> Result<(), GrammarError> {
        match set {
            ClassSet::Item(item) => self.class_item(item),
            ClassSet::BinaryOp(_) => Err(refuse("set operations inside [...] are not supported")),
        }
    }

    fn class_item(&mut self, item: &ClassSetItem) -> Result<(), GrammarError> {
        match item {
            ClassSetItem::Perl(class) => self.perl(class),
            // Elsewhere `[` inside a class is the character.
            ClassSetItem::Bracketed(_) => return Err(refuse("write \\[ for a bracket inside [...]")),
            ClassSetItem::Union(union) => {
                for item in &union.items {
                    self.class_item(item)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn perl(&mut self, class: &ast::ClassPerl) {
        let set = match class.kind {
            ClassPerlKind::Digit => "0-9",
            ClassPerlKind::Word => "0-9A-Z_a-z",
            ClassPerlKind::Space => SPACES,
        };
        let not = if class.negated { "^" } else { "" };
        self.list.push((class.span.start.offset, class.span.end.offset, format!("[{not}{set}]")));
    }

    fn apply(&self, source: &str, from: usize, to: usize) -> String {
        let mut out = String::with_capacity(to - from);
        let mut at = from;
        for (start, end, text) in &self.list {
            out.push_str(&source[at..*start]);
            out.push_str(text);
            at = *end;
        }
        out.push_str(&source[at..to]);
        out
    }
}

fn convert(hir: &Hir) -> Result<Rx, GrammarError> {
    Ok(match hir.kind() {
        HirKind::Empty => Rx::empty(),
        HirKind::Literal(literal) => Rx::Literal(
            std::str::from_utf8(&literal.0)
                .map_err(|_| refuse("the expression matches broken UTF-8"))?
                .to_owned(),
        ),
        HirKind::Class(Class::Unicode(class)) => {
            Rx::Class(normalize(class.ranges().iter().map(|r| (r.start(), r.end())).collect()))
        }
        HirKind::Class(Class::Bytes(class)) => Rx::Class(normalize(
            class.ranges().iter().map(|r| (char::from(r.start()), char::from(r.end()))).collect(),
        )),
        HirKind::Look(_) => return Err(refuse("look-around is not supported")),
        HirKind::Repetition(r) => Rx::Repeat(Box::new(convert(&r.sub)?), r.min, r.max),
        HirKind::Capture(capture) => convert(&capture.sub)?,
        HirKind::Concat(parts) => Rx::seq(parts.iter().map(convert).collect::<Result<_, _>>()?),
        HirKind::Alternation(parts) => Rx::alt(parts.iter().map(convert).collect::<Result<_, _>>()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(source: &str) -> Result<String, String> {
        parse(source, Scope::Whole).map(|rx| rx.pattern()).map_err(|e| e.message)
    }

    #[test]
    fn classes_are_ascii_and_anchors_at_the_ends_go() {
        assert_eq!(whole(r"^\d$").expect("reads"), "[0-9]");
        assert_eq!(whole(r"^a|b$").expect("reads"), "(?:a|b)");
        assert_eq!(whole(r"[^\W\d]").expect("reads"), "[A-Z\\x{5F}a-z]");
        let search = |s: &str| parse(s, Scope::Search).expect("reads").pattern();
        assert_eq!(search("^a"), "a[\\x{0}-\\x{10FFFF}]*");
        assert_eq!(search("a$"), "[\\x{0}-\\x{10FFFF}]*a");
    }

    #[test]
    fn what_a_grammar_cannot_say_is_refused() {
        for bad in [
            "(?=a)a", r"(a)\1", "a^b", "(^a)", r"\bx", "(?i)a", "(?i:a)", "[a&&b]", "[[a]b]", "(", r"[^\d\D]",
        ] {
            assert!(whole(bad).is_err(), "{bad}");
        }
        assert!(whole(&"a".repeat(LIMIT + 1)).is_err());
    }
}
