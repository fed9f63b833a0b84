//! The call region: a run of calls up to the end of the output, read as it arrives.
//!
//! The reader only ever moves forward over text that can no longer change its meaning, so each byte is
//! looked at a bounded number of times and the outcome depends on the text alone, not on how it was cut.
//!
//! A closing tag inside a value is the hard part. It ends the value only if another parameter, the
//! function's closing tag or the end of the output follows, and balanced nested parameters are text.
//! Text that merely names an opening tag breaks the balance; such a region is read a second time
//! without counting nested tags ([`Nesting::Flat`]).

use std::sync::Arc;

use super::Fallback;
use super::typing::{RawCall, ToolSet};

/// Longest name that is looked for before a tag is given up, in bytes.
const NAME_LIMIT: usize = 256;

/// How opening tags inside values are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nesting {
    /// They must balance.
    Counted,
    /// They are text.
    Flat,
}

/// Where a region stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// More text may go either way.
    NeedMore,
    /// It is not a region.
    Failed(Fallback),
    /// The output ended and the region is whole, or it is tolerated (see [`Region::recovered`]).
    Complete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrapper {
    ToolCall,
    FunctionCalls,
}

impl Wrapper {
    const ALL: [(&'static str, Self); 2] =
        [("<tool_call>", Self::ToolCall), ("<function_calls>", Self::FunctionCalls)];

    fn closer(self) -> &'static str {
        match self {
            Self::ToolCall => "</tool_call>",
            Self::FunctionCalls => "</function_calls>",
        }
    }
}

const FUNCTION_OPENERS: [(&str, &str); 2] = [("<function", "</function>"), ("<invoke", "</invoke>")];
const PARAMETER_OPENERS: [(&str, &str); 2] = [("<parameter", "</parameter>"), ("<param", "</param>")];

/// Whether a region may begin at the start of `text`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opener {
    /// A wrapper of this many bytes.
    Wrapper(usize),
    /// A function without a wrapper; the length of its keyword.
    Bare(usize),
    /// It may become one.
    Partial,
    /// It does not.
    No,
}

pub(crate) fn opener(text: &str, last: bool) -> Opener {
    let mut partial = false;
    for (literal, _) in Wrapper::ALL {
        match literally(text, literal, last) {
            Lit::Yes => return Opener::Wrapper(literal.len()),
            Lit::Partial => partial = true,
            Lit::No => {}
        }
    }
    for (literal, _) in FUNCTION_OPENERS {
        match literally(text, literal, last) {
            // Longer than a wrapper's beginning by now, or at the end of the text so far.
            Lit::Yes if partial => return Opener::Partial,
            Lit::Yes => return Opener::Bare(literal.len()),
            Lit::Partial => partial = true,
            Lit::No => {}
        }
    }
    if partial { Opener::Partial } else { Opener::No }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lit {
    Yes,
    Partial,
    No,
}

fn literally(text: &str, literal: &str, last: bool) -> Lit {
    if text.starts_with(literal) {
        Lit::Yes
    } else if !last && literal.starts_with(text) {
        Lit::Partial
    } else {
        Lit::No
    }
}

/// What follows a keyword: the name in one of its spellings and the end of the tag.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Spec {
    Name { name: String, len: usize, repaired: bool },
    Partial,
    Bad,
}

/// Reads `=NAME>`, `="NAME">`, ` name="NAME">`. With `repair`, a missing `>` before a newline or the next
/// tag is accepted.
fn name_spec(text: &str, last: bool, repair: bool) -> Spec {
    let more = if last { Spec::Bad } else { Spec::Partial };
    let skip = |at: usize| at + text[at..].len() - text[at..].trim_start().len();
    let mut at = skip(0);
    if at > NAME_LIMIT {
        return Spec::Bad;
    }
    let spaced = at > 0;
    match literally(&text[at..], "name", last) {
        Lit::Yes if spaced => at = skip(at + 4),
        Lit::Partial if spaced || text.is_empty() => return more,
        _ => {}
    }
    match text[at..].chars().next() {
        Some('=') => at = skip(at + 1),
        Some(_) => return Spec::Bad,
        None => return more,
    }
    let Some(first) = text[at..].chars().next() else {
        return more;
    };
    let (name, end) = if first == '"' || first == '\'' {
        let from = at + 1;
        match text[from..].find(first) {
            Some(len) if len <= NAME_LIMIT => (&text[from..from + len], from + len + 1),
            None if text.len() - from <= NAME_LIMIT => return more,
            _ => return Spec::Bad,
        }
    } else {
        match text[at..].find(|c: char| c == '>' || c == '<' || c.is_whitespace()) {
            Some(len) if len <= NAME_LIMIT => (&text[at..at + len], at + len),
            None if text.len() - at <= NAME_LIMIT => return more,
            _ => return Spec::Bad,
        }
    };
    if name.is_empty() || name.contains(['\n', '<', '>']) {
        return Spec::Bad;
    }
    let close = skip(end);
    match text[close..].chars().next() {
        Some('>') => Spec::Name { name: name.to_owned(), len: close + 1, repaired: false },
        None if close - end <= NAME_LIMIT => more,
        Some('<') if repair => Spec::Name { name: name.to_owned(), len: end, repaired: true },
        Some(_) if repair && text[end..close].contains('\n') => {
            Spec::Name { name: name.to_owned(), len: end, repaired: true }
        }
        _ => Spec::Bad,
    }
}

/// Longest name that any parameter or function may have without being declared, in bytes.
pub(crate) const PLAIN_NAME: usize = 128;

/// Whether a name can be read in every spelling of a tag.
pub(crate) fn plain_name(name: &str) -> bool {
    (1..=PLAIN_NAME).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

/// Whether a declared name can stand in a parameter's tag.
pub(crate) fn writable(name: &str) -> bool {
    (1..=NAME_LIMIT).contains(&name.len()) && !name.contains(['<', '>', '\n'])
}

/// Whether a declared name can be read only as it is declared: it has white space, or quotes of its own.
pub(crate) fn needs_its_spelling(name: &str) -> bool {
    let spec = name_spec(&format!("={name}>"), true, false);
    writable(name) && !matches!(spec, Spec::Name { name: read, .. } if read == name)
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    /// Before a wrapper, a bare function or the end.
    Top,
    /// Inside a wrapper, between its calls.
    Inside,
    /// Inside a function, between its parameters.
    Function,
    /// Inside a value that began at `start`; everything before `scan` is text of it.
    /// White space after the closing tag at `scan` is known up to `white`.
    Value { start: usize, scan: usize, depth: usize, white: usize },
}

/// What a reading has just found out, for those who want calls while they are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Live {
    /// A call of this function begins.
    Begin(String),
    /// A parameter begins.
    Parameter(String),
    /// More of the parameter's text, which is its value in the end.
    Text(String),
    /// The parameter is whole.
    Value(String),
    /// The call is whole.
    End,
}

/// A region being read; all offsets are from its opener.
#[derive(Debug, Clone)]
pub(crate) struct Region {
    nesting: Nesting,
    tolerant: bool,
    stage: Stage,
    at: usize,
    wrapper: Option<Wrapper>,
    /// Calls finished inside the current wrapper.
    inside: usize,
    closers: Vec<String>,
    current: RawCall,
    /// Parameters of the current function that are read only as they are declared.
    odd: Arc<[String]>,
    parameter: String,
    parameter_closer: &'static str,
    calls: Vec<RawCall>,
    starts: Vec<usize>,
    recovered: bool,
    cut: bool,
    /// Filled where calls are wanted while they are made.
    live: Option<Vec<Live>>,
    /// Up to where the open value has been told.
    told: usize,
}

impl Region {
    pub(crate) fn new(nesting: Nesting, tolerant: bool) -> Self {
        Self {
            nesting,
            tolerant,
            stage: Stage::Top,
            at: 0,
            wrapper: None,
            inside: 0,
            closers: Vec::new(),
            current: RawCall::default(),
            odd: Arc::default(),
            parameter: String::new(),
            parameter_closer: "",
            calls: Vec::new(),
            starts: Vec::new(),
            recovered: false,
            cut: false,
            live: None,
            told: 0,
        }
    }

    /// A reading that tells calls while they are made, of an output that is held to well-formed ones.
    pub(crate) fn live() -> Self {
        Self { live: Some(Vec::new()), ..Self::new(Nesting::Flat, false) }
    }

    /// What was found out since the last call of this.
    pub(crate) fn take_live(&mut self) -> Vec<Live> {
        self.live.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn tell(&mut self, what: impl FnOnce() -> Live) {
        if let Some(live) = &mut self.live {
            live.push(what());
        }
    }

    /// Tells the open value up to `end`. Its first newline belongs to the tag; the last one may.
    fn tell_value(&mut self, text: &str, start: usize, end: usize) {
        if self.live.is_none() {
            return;
        }
        if self.told == start && text[start..end].starts_with('\n') {
            self.told = start + 1;
        }
        let rest = &text[self.told..end];
        let rest = rest.strip_suffix('\n').unwrap_or(rest);
        if !rest.is_empty() {
            self.told += rest.len();
            self.tell(|| Live::Text(rest.to_owned()));
        }
    }

    /// The calls read so far.
    pub(crate) fn take_calls(&mut self) -> Vec<RawCall> {
        std::mem::take(&mut self.calls)
    }

    /// How far the reading came.
    pub(crate) fn reached(&self) -> usize {
        self.at
    }

    /// Offsets of openers at which another region would be read exactly like this one.
    pub(crate) fn later_starts(&self) -> &[usize] {
        &self.starts
    }

    /// Whether tolerance was needed.
    pub(crate) fn recovered(&self) -> bool {
        self.recovered
    }

    /// Whether the last call was cut by the end.
    pub(crate) fn cut(&self) -> bool {
        self.cut
    }

    /// Reads on; `text` is the region so far, `last` says that the output has ended.
    pub(crate) fn advance(&mut self, text: &str, tools: &ToolSet, last: bool) -> Progress {
        loop {
            let step = match self.stage {
                Stage::Top => self.top(text, tools, last),
                Stage::Inside => self.inside(text, tools, last),
                Stage::Function => self.function(text, tools, last),
                Stage::Value { start, scan, depth, white } => {
                    self.value(text, last, start, (scan, depth, white))
                }
            };
            match step {
                None => {}
                Some(Progress::Failed(reason)) => return self.fail(reason),
                Some(progress) => return progress,
            }
        }
    }

    /// In tolerant mode calls that are complete survive what comes after them.
    fn fail(&mut self, reason: Fallback) -> Progress {
        if self.tolerant && !self.calls.is_empty() {
            self.recovered = true;
            return Progress::Complete;
        }
        Progress::Failed(reason)
    }

    /// Steps over white space between tags, for good.
    fn skip_white(&mut self, text: &str) -> usize {
        self.at = text.len() - text[self.at..].trim_start().len();
        self.at
    }

    fn top(&mut self, text: &str, tools: &ToolSet, last: bool) -> Option<Progress> {
        let at = self.skip_white(text);
        let rest = &text[at..];
        if rest.is_empty() {
            return Some(if last { Progress::Complete } else { Progress::NeedMore });
        }
        match opener(rest, last) {
            Opener::Wrapper(len) => {
                if at > 0 {
                    self.starts.push(at);
                }
                self.wrapper = Wrapper::ALL
                    .into_iter()
                    .find(|(literal, _)| rest.starts_with(literal))
                    .map(|(_, wrapper)| wrapper);
                self.inside = 0;
                self.at = at + len;
                self.stage = Stage::Inside;
                None
            }
            Opener::Bare(_) => {
                let start = at;
                let step = self.open_function(text, at, tools, last);
                if start > 0 && step.is_none() {
                    self.starts.push(start);
                }
                step
            }
            Opener::Partial => Some(Progress::NeedMore),
            Opener::No if last && opener(rest, false) == Opener::Partial => {
                Some(Progress::Failed(Fallback::TruncatedTail))
            }
            Opener::No => Some(Progress::Failed(Fallback::TrailingContent)),
        }
    }

    fn inside(&mut self, text: &str, tools: &ToolSet, last: bool) -> Option<Progress> {
        let at = self.skip_white(text);
        let rest = &text[at..];
        let closer = self.wrapper.map_or("", Wrapper::closer);
        if rest.is_empty() {
            return Some(if last {
                // Without its closing tag the wrapper is cut, its calls are not.
                Progress::Failed(Fallback::TruncatedTail)
            } else {
                Progress::NeedMore
            });
        }
        if self.inside > 0 {
            match literally(rest, closer, last) {
                Lit::Yes => {
                    self.at = at + closer.len();
                    self.wrapper = None;
                    self.stage = Stage::Top;
                    return None;
                }
                Lit::Partial => return Some(Progress::NeedMore),
                Lit::No => {}
            }
        }
        self.open_function(text, at, tools, last)
    }

    /// A function's opening tag at `at`.
    fn open_function(&mut self, text: &str, at: usize, tools: &ToolSet, last: bool) -> Option<Progress> {
        let rest = &text[at..];
        for (keyword, closer) in FUNCTION_OPENERS {
            match literally(rest, keyword, last) {
                Lit::Yes => {
                    return match name_spec(&rest[keyword.len()..], last, self.tolerant) {
                        Spec::Partial => Some(Progress::NeedMore),
                        Spec::Bad => self.repair_opener(text, at, tools, last),
                        Spec::Name { name, len, repaired } => {
                            self.recovered |= repaired;
                            self.closers = vec![closer.to_owned()];
                            self.enter(name, at + keyword.len() + len, tools)
                        }
                    };
                }
                Lit::Partial => return Some(Progress::NeedMore),
                Lit::No => {}
            }
        }
        self.repair_opener(text, at, tools, last)
    }

    fn enter(&mut self, name: String, at: usize, tools: &ToolSet) -> Option<Progress> {
        if !tools.declares(&name) {
            if !plain_name(&name) {
                return Some(Progress::Failed(Fallback::InvalidToolName));
            }
            if !self.tolerant {
                return Some(Progress::Failed(Fallback::UndeclaredTool));
            }
            self.recovered = true;
        }
        self.odd = tools.odd_parameters(&name);
        self.tell(|| Live::Begin(name.clone()));
        self.current = RawCall { name, parameters: Vec::new() };
        self.at = at;
        self.stage = Stage::Function;
        None
    }

    /// Tolerance for an opening tag whose `<`, keyword or `>` is lost or wrong, inside a wrapper only.
    fn repair_opener(&mut self, text: &str, at: usize, tools: &ToolSet, last: bool) -> Option<Progress> {
        let bad = Some(Progress::Failed(if last && unfinished_function(&text[at..]) {
            Fallback::TruncatedTail
        } else {
            Fallback::MalformedStructure
        }));
        if !self.tolerant || self.wrapper.is_none() {
            return bad;
        }
        let rest = &text[at..];
        let body = usize::from(rest.starts_with('<'));
        let word = rest[body..]
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'))
            .map_or(rest.len(), |n| body + n);
        if word - body > NAME_LIMIT {
            return bad;
        }
        if word == rest.len() && !last {
            return Some(Progress::NeedMore);
        }
        let keyword = &rest[body..word];
        if tools.declares(keyword) && rest[word..].trim_start().starts_with(['>', '<']) {
            // The keyword is lost and the name stands alone.
            let skipped = rest.len() - rest[word..].trim_start().len();
            let len = skipped + usize::from(rest[skipped..].starts_with('>'));
            let name = keyword.to_owned();
            self.closers = vec!["</function>".to_owned(), format!("</{name}>")];
            self.recovered = true;
            return self.enter(name, at + len, tools);
        }
        if tools.declares(keyword) && rest[word..].trim_start().is_empty() && !last {
            return Some(Progress::NeedMore);
        }
        match name_spec(&rest[word..], last, true) {
            Spec::Partial => Some(Progress::NeedMore),
            Spec::Bad => bad,
            Spec::Name { name, len, .. } => {
                self.closers = vec!["</function>".to_owned()];
                if !keyword.is_empty() && keyword != "function" {
                    self.closers.push(format!("</{keyword}>"));
                }
                self.recovered = true;
                self.enter(name, at + word + len, tools)
            }
        }
    }

    fn function(&mut self, text: &str, tools: &ToolSet, last: bool) -> Option<Progress> {
        let at = self.skip_white(text);
        let rest = &text[at..];
        if rest.is_empty() {
            return Some(if last { self.end_cut() } else { Progress::NeedMore });
        }
        let mut partial = false;
        for index in 0..self.closers.len() {
            let closer = &self.closers[index];
            match literally(rest, closer, last) {
                Lit::Yes => {
                    self.at = at + closer.len();
                    self.finish_call();
                    return None;
                }
                Lit::Partial => partial = true,
                Lit::No => {}
            }
        }
        if self.tolerant
            && let Some(wrapper) = self.wrapper
        {
            match literally(rest, wrapper.closer(), last) {
                Lit::Yes => {
                    // The function's own closing tag is lost.
                    self.at = at;
                    self.recovered = true;
                    self.finish_call();
                    return None;
                }
                Lit::Partial => partial = true,
                Lit::No => {}
            }
        }
        match self.parameter_tag(rest, last, self.tolerant) {
            ParameterTag::Opens { name, len, closer, repaired } => {
                if !plain_name(&name) && !tools.declares_parameter(&self.current.name, &name) {
                    return Some(Progress::Failed(Fallback::MalformedStructure));
                }
                self.recovered |= repaired;
                self.tell(|| Live::Parameter(name.clone()));
                self.parameter = name;
                self.parameter_closer = closer;
                self.at = at + len;
                self.told = self.at;
                self.stage = Stage::Value { start: self.at, scan: self.at, depth: 0, white: 0 };
                None
            }
            ParameterTag::Partial => Some(Progress::NeedMore),
            ParameterTag::No if partial => Some(Progress::NeedMore),
            ParameterTag::No if last && cut_tag(rest) => Some(self.end_cut()),
            ParameterTag::No => Some(Progress::Failed(Fallback::MalformedStructure)),
        }
    }

    fn value(
        &mut self,
        text: &str,
        last: bool,
        start: usize,
        (mut scan, mut depth, mut white): (usize, usize, usize),
    ) -> Option<Progress> {
        let closer = self.parameter_closer;
        loop {
            let Some(found) = text[scan..].find('<') else {
                scan = text.len();
                break;
            };
            scan += found;
            let rest = &text[scan..];
            match literally(rest, closer, last) {
                Lit::Yes if depth > 0 => {
                    depth -= 1;
                    scan += closer.len();
                    continue;
                }
                Lit::Yes => {
                    let after = scan + closer.len();
                    let from = white.max(after);
                    white = text.len() - text[from..].trim_start().len();
                    match self.follows(&text[white..], last) {
                        Lit::Yes => {
                            self.tell_value(text, start, scan);
                            self.finish_value(&text[start..scan]);
                            self.at = after;
                            self.stage = Stage::Function;
                            return None;
                        }
                        Lit::Partial => break,
                        Lit::No => {
                            scan = after;
                            continue;
                        }
                    }
                }
                Lit::Partial => break,
                Lit::No => {}
            }
            if self.nesting == Nesting::Counted {
                match self.parameter_tag(rest, last, false) {
                    ParameterTag::Opens { len, closer: c, .. } if c == closer => {
                        depth += 1;
                        scan += len;
                        continue;
                    }
                    ParameterTag::Partial => break,
                    _ => {}
                }
            }
            scan += 1;
        }
        self.stage = Stage::Value { start, scan, depth, white };
        self.at = scan;
        self.tell_value(text, start, scan);
        if !last {
            return Some(Progress::NeedMore);
        }
        if self.tolerant {
            let value = &text[start..];
            let kept = value.len() - partial_suffix(value, closer);
            self.finish_value(&value[..kept]);
        }
        Some(self.end_cut())
    }

    /// Whether what follows a closing tag and white space confirms that it ended the value.
    fn follows(&self, rest: &str, last: bool) -> Lit {
        if rest.is_empty() {
            return if last { Lit::Yes } else { Lit::Partial };
        }
        let mut outcome = Lit::No;
        let wrapper = self.wrapper.filter(|_| self.tolerant).map(Wrapper::closer);
        for closer in self.closers.iter().map(String::as_str).chain(wrapper) {
            match literally(rest, closer, last) {
                Lit::Yes => return Lit::Yes,
                Lit::Partial => outcome = Lit::Partial,
                Lit::No => {}
            }
        }
        match self.parameter_tag(rest, last, self.tolerant) {
            ParameterTag::Opens { .. } => Lit::Yes,
            ParameterTag::Partial => Lit::Partial,
            // The output ends in the middle of the next tag.
            ParameterTag::No if last && cut_tag(rest) => Lit::Yes,
            ParameterTag::No => outcome,
        }
    }

    /// A parameter's opening tag. A declared name counts as it is declared before it is read in any other way.
    fn parameter_tag(&self, text: &str, last: bool, repair: bool) -> ParameterTag {
        let mut partial = false;
        for (name, (keyword, closer)) in self.odd.iter().flat_map(|n| PARAMETER_OPENERS.map(|o| (n, o))) {
            let tag = format!("{keyword}={name}>");
            match literally(text, &tag, last) {
                Lit::Yes => {
                    return ParameterTag::Opens {
                        name: name.clone(),
                        len: tag.len(),
                        closer,
                        repaired: false,
                    };
                }
                Lit::Partial => partial = true,
                Lit::No => {}
            }
        }
        match parameter_opener(text, last, repair) {
            _ if partial => ParameterTag::Partial,
            tag => tag,
        }
    }

    /// Takes a value: one newline belongs to the tag on each side.
    fn finish_value(&mut self, value: &str) {
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let name = std::mem::take(&mut self.parameter);
        self.tell(|| Live::Value(value.to_owned()));
        self.current.parameters.push((name, value.to_owned()));
    }

    fn finish_call(&mut self) {
        self.tell(|| Live::End);
        self.calls.push(std::mem::take(&mut self.current));
        self.inside += 1;
        self.stage = if self.wrapper.is_some() { Stage::Inside } else { Stage::Top };
    }

    /// The output ended inside a function.
    fn end_cut(&mut self) -> Progress {
        if !self.tolerant {
            return Progress::Failed(Fallback::TruncatedTail);
        }
        self.finish_call();
        self.recovered = true;
        self.cut = true;
        Progress::Complete
    }
}

enum ParameterTag {
    Opens { name: String, len: usize, closer: &'static str, repaired: bool },
    Partial,
    No,
}

fn parameter_opener(text: &str, last: bool, repair: bool) -> ParameterTag {
    for (keyword, closer) in PARAMETER_OPENERS {
        match literally(text, keyword, last) {
            Lit::Yes => {
                return match name_spec(&text[keyword.len()..], last, repair) {
                    Spec::Name { name, len, repaired } => {
                        ParameterTag::Opens { name, len: keyword.len() + len, closer, repaired }
                    }
                    Spec::Partial => ParameterTag::Partial,
                    Spec::Bad => ParameterTag::No,
                };
            }
            Lit::Partial => return ParameterTag::Partial,
            Lit::No => {}
        }
    }
    ParameterTag::No
}

/// Whether more text could have made a function's opening tag of this.
fn unfinished_function(rest: &str) -> bool {
    FUNCTION_OPENERS.iter().any(|(keyword, _)| match literally(rest, keyword, false) {
        Lit::Yes => name_spec(&rest[keyword.len()..], false, false) == Spec::Partial,
        Lit::Partial => true,
        Lit::No => false,
    })
}

/// Whether the output's end looks like the beginning of a tag of a call.
fn cut_tag(rest: &str) -> bool {
    rest.len() <= NAME_LIMIT
        && rest.starts_with('<')
        && !rest.contains('>')
        && ["<parameter", "</parameter>", "</function>", "</invoke>", "</tool_call>"]
            .iter()
            .any(|tag| tag.starts_with(rest) || rest.starts_with("<param"))
}

/// Length of the end of `value` that is a cut closing tag (at least `</`, and the newline before it).
fn partial_suffix(value: &str, closer: &str) -> usize {
    (2..closer.len()).rev().find(|&n| value.ends_with(&closer[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_in_all_spellings() {
        let ok = |text: &str| match name_spec(text, true, false) {
            Spec::Name { name, len, .. } => (name, &text[len..] == "rest"),
            other => panic!("{text:?}: {other:?}"),
        };
        for text in [
            "=look>rest",
            "=\"look\">rest",
            "='look' >rest",
            " name=\"look\">rest",
            "\n name = 'look'\n>rest",
            " = look >rest",
        ] {
            assert_eq!(ok(text), ("look".to_owned(), true), "{text:?}");
        }
        for text in ["", " look>", "=>", "=a b>", "=a\n<", "name=x>", "=\"a>", "s=x>"] {
            assert_eq!(name_spec(text, true, false), Spec::Bad, "{text:?}");
        }
        for text in ["", " ", " na", " name", " name=", "=", "=lo", "=look ", "=\"lo"] {
            assert_eq!(name_spec(text, false, false), Spec::Partial, "{text:?}");
        }
        let long = format!("={}", "x".repeat(NAME_LIMIT + 1));
        assert_eq!(name_spec(&long, false, false), Spec::Bad);
    }

    #[test]
    fn openers_are_told_apart_at_every_length() {
        for (literal, expected) in [
            ("<tool_call>", Opener::Wrapper(11)),
            ("<function_calls>", Opener::Wrapper(16)),
            ("<function=", Opener::Bare(9)),
            ("<invoke ", Opener::Bare(7)),
        ] {
            for cut in 1..literal.len() - 1 {
                assert_eq!(opener(&literal[..cut], false), Opener::Partial, "{literal} {cut}");
            }
            assert_eq!(opener(literal, false), expected);
        }
        assert_eq!(opener("<b", false), Opener::No);
        assert_eq!(opener("<function", true), Opener::Bare(9));
        assert_eq!(opener("<tool", true), Opener::No);
    }
}
