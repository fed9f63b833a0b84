//! The stream parser: text in, events out.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::live::Writer;
use super::region::{Nesting, Opener, Progress, Region, opener};
use super::typing::{ParsedCall, ToolSet};
use super::{Diagnostics, Fallback};
use crate::stop::StopMatcher;

const THINK_OPEN: &str = "<think>";
const THINK_CLOSE: &str = "</think>";
const TOOL_CALL: &str = "<tool_call>";

/// Where the prompt left the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// Inside a reasoning block that the prompt opened.
    Reasoning,
    /// Past reasoning, or no reasoning is expected.
    #[default]
    Content,
    /// Unknown: reasoning if the output begins with `<think>`.
    Detect,
}

/// How an output is read.
#[derive(Debug, Clone, Default)]
pub struct OutputOptions {
    /// Where the output begins.
    pub start: Start,
    /// Declared tools; without any, call markup is text.
    pub tools: Arc<ToolSet>,
    /// Repairs calls that are almost right; see the crate's documentation of tolerance.
    pub tolerant: bool,
    /// Also takes calls that the model wrote before closing its reasoning. Without it everything up
    /// to the closing tag is reasoning.
    pub calls_in_reasoning: bool,
    /// Stop strings; they match reasoning and content, never call markup.
    pub stops: Vec<String>,
    /// Calls in `<tool_call>` outside reasoning are held to the grammar of [`crate::grammar::CallRules`]: they are told
    /// while they are made ([`Event::CallBegin`]), since what begins as a call stays one. Of a repeated parameter the
    /// first value counts then, for it has been told.
    pub held: bool,
}

/// What the output says. Consecutive texts of one kind belong together.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Reasoning text.
    Reasoning(String),
    /// Answer text.
    Content(String),
    /// A whole call.
    Call(ParsedCall),
    /// A call of this function begins; nothing but its own events follow up to its end.
    CallBegin(String),
    /// More of the open call.
    CallPart(CallPart),
    /// The open call's end.
    CallEnd {
        /// With what is whole of it.
        call: ParsedCall,
        /// It came to its end; the output was cut in it otherwise ([`Diagnostics::truncated_call`]).
        whole: bool,
    },
}

/// A piece of a call that is being made.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CallPart {
    /// Of the arguments' JSON text, spaced as in [`ParsedCall::arguments_json`]: joined, they are that of a whole call.
    pub json: String,
    /// The parameter that it is of, and the piece of its text, where it is one whose value is its text.
    pub text: Option<(String, String)>,
}

/// What the latest text belongs to, for counting tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    /// Reasoning or the border around it.
    Reasoning,
    /// Answer text.
    Content,
    /// Markup that may become calls.
    Calls,
}

#[derive(Debug)]
enum Mode {
    /// Before anything but white space, looking for `<think>`.
    Detecting,
    /// After an opening or closing think tag: newlines belong to neither side.
    Border(Side),
    Text(Side),
    Region {
        /// Side the text falls back to.
        side: Side,
        /// White space in the buffer before the opener.
        lead: usize,
        /// Boxed: a region is much larger than the other modes.
        region: Box<Region>,
        /// The counted reading, once it has failed and `region` reads flat.
        first: Option<FirstReading>,
        /// Writes calls while they are made.
        writer: Option<Writer>,
    },
    /// Nothing further counts.
    Done,
}

/// What a failed counted reading leaves behind.
#[derive(Debug)]
struct FirstReading {
    starts: BTreeSet<usize>,
    reached: usize,
    reason: Fallback,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Reasoning,
    Content,
}

/// Splits an output as it streams. Feed every piece to [`push`](Self::push), then call
/// [`finish`](Self::finish) once; joined by kind, the events are the same however the text was cut.
#[derive(Debug)]
pub struct OutputParser {
    options: OutputOptions,
    mode: Mode,
    /// Text whose meaning is open.
    buffer: String,
    /// Bytes of the buffer that a search need not look at again.
    searched: usize,
    /// Bytes of the output before the buffer.
    consumed: usize,
    /// Positions of openers that are known to fail.
    hopeless: BTreeSet<usize>,
    /// A wrapper just failed; a bare opener directly after it is part of that failure.
    after_failed_wrapper: bool,
    /// Length of the longest failed region, whose reason is reported.
    furthest: usize,
    diagnostics: Diagnostics,
    reasoning_stops: StopMatcher,
    content_stops: StopMatcher,
    reasoning_open: bool,
    stopped: Option<usize>,
}

impl OutputParser {
    /// A parser for one output.
    #[must_use]
    pub fn new(options: OutputOptions) -> Self {
        let matcher = StopMatcher::new(&options.stops);
        Self {
            mode: match options.start {
                Start::Reasoning => Mode::Text(Side::Reasoning),
                Start::Content => Mode::Text(Side::Content),
                Start::Detect => Mode::Detecting,
            },
            options,
            buffer: String::new(),
            searched: 0,
            consumed: 0,
            hopeless: BTreeSet::new(),
            after_failed_wrapper: false,
            furthest: 0,
            diagnostics: Diagnostics::default(),
            reasoning_stops: matcher.clone(),
            content_stops: matcher,
            reasoning_open: false,
            stopped: None,
        }
    }

    /// Takes text in, returns what is certain.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        let mut out = Vec::new();
        if !matches!(self.mode, Mode::Done) {
            self.buffer.push_str(text);
            self.run(false, &mut out);
        }
        out
    }

    /// Ends the output.
    pub fn finish(&mut self) -> Vec<Event> {
        let mut out = Vec::new();
        self.run(true, &mut out);
        self.flush_stops(&mut out);
        self.mode = Mode::Done;
        out
    }

    /// Index of the stop string that ended the output; the caller stops generating when it is set.
    #[must_use]
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Nothing further can change the events: a stop string matched, or tolerated calls ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.mode, Mode::Done)
    }

    /// What the text pushed last belongs to.
    #[must_use]
    pub fn channel(&self) -> Channel {
        match &self.mode {
            Mode::Region { .. } => Channel::Calls,
            Mode::Done if self.diagnostics.structured_call_count > 0 || self.diagnostics.truncated_call => {
                Channel::Calls
            }
            Mode::Border(_) | Mode::Text(Side::Reasoning) => Channel::Reasoning,
            _ => Channel::Content,
        }
    }

    /// Counts and reasons so far; final after [`finish`](Self::finish).
    #[must_use]
    pub fn diagnostics(&self) -> Diagnostics {
        self.diagnostics
    }

    fn run(&mut self, last: bool, out: &mut Vec<Event>) {
        loop {
            let go_on = match self.mode {
                Mode::Done => false,
                Mode::Detecting => self.detect(last),
                Mode::Border(side) => {
                    let rest = self.buffer.trim_start_matches('\n').len();
                    self.drop_front(self.buffer.len() - rest);
                    if rest > 0 || last {
                        self.mode = Mode::Text(side);
                    }
                    rest > 0
                }
                Mode::Text(side) => self.text(side, last, out),
                Mode::Region { .. } => self.region(last, out),
            };
            if !go_on {
                return;
            }
        }
    }

    fn detect(&mut self, last: bool) -> bool {
        let rest = self.buffer.trim_start();
        let lead = self.buffer.len() - rest.len();
        if rest.starts_with(THINK_OPEN) {
            self.drop_front(lead + THINK_OPEN.len());
            self.mode = Mode::Border(Side::Reasoning);
            true
        } else if THINK_OPEN.starts_with(rest) && !last {
            false
        } else {
            self.mode = Mode::Text(Side::Content);
            true
        }
    }

    /// Looks for the end of reasoning and for openers; sends on what is neither.
    fn text(&mut self, side: Side, last: bool, out: &mut Vec<Event>) -> bool {
        let seek_calls =
            !self.options.tools.is_empty() && (side == Side::Content || self.options.calls_in_reasoning);
        let seek_close = side == Side::Reasoning;
        let mut at = self.searched;
        // Where text of open meaning begins.
        let hold = loop {
            let Some(found) = self.buffer[at..].find('<') else {
                break self.buffer.len();
            };
            at += found;
            let rest = &self.buffer[at..];
            if seek_close {
                if let Some(after) = rest.strip_prefix(THINK_CLOSE) {
                    if after.starts_with('\n') || (last && after.is_empty()) {
                        let text = self.buffer[..at].trim_end_matches('\n').to_owned();
                        self.send(side, &text, out);
                        self.drop_front(at + THINK_CLOSE.len());
                        if self.is_done() {
                            return false;
                        }
                        self.end_reasoning(out);
                        self.mode = Mode::Border(Side::Content);
                        return true;
                    }
                    if after.is_empty() {
                        break at;
                    }
                } else if !last && THINK_CLOSE.starts_with(rest) {
                    break at;
                }
            }
            let note = seek_close && !self.options.tools.is_empty() && !self.diagnostics.marker_in_reasoning;
            if seek_calls || note {
                match opener(rest, last) {
                    Opener::No => {}
                    Opener::Partial => break at,
                    found if seek_calls && self.may_start(at, found) => {
                        let lead = self.begin_region(side, at, out);
                        if self.is_done() {
                            return false;
                        }
                        let held = self.options.held
                            && side == Side::Content
                            && self.buffer[lead..].starts_with(TOOL_CALL);
                        let region = if held {
                            Region::live()
                        } else {
                            Region::new(Nesting::Counted, self.options.tolerant)
                        };
                        self.mode = Mode::Region {
                            side,
                            lead,
                            region: Box::new(region),
                            first: None,
                            writer: held.then(Writer::default),
                        };
                        return true;
                    }
                    Opener::Wrapper(_) if note => {
                        // Send what is before it first: a stop string there ends the output.
                        let text = self.buffer[..at].to_owned();
                        self.send(side, &text, out);
                        if self.is_done() {
                            return false;
                        }
                        self.drop_front(at);
                        self.diagnostics.marker_in_reasoning = true;
                        at = 0;
                    }
                    _ => {}
                }
            }
            at += 1;
        };
        // White space before a region or newlines before the closing tag will not be text.
        let certain = if last {
            self.buffer.len()
        } else {
            // Before `searched` there is only held white space.
            let text = &self.buffer[self.searched..hold];
            let kept = if seek_calls {
                text.trim_end().len()
            } else if seek_close {
                text.trim_end_matches('\n').len()
            } else {
                text.len()
            };
            if kept == 0 { 0 } else { self.searched + kept }
        };
        let text = self.buffer[..certain].to_owned();
        self.send(side, &text, out);
        self.drop_front(certain);
        self.searched = hold - certain.min(hold);
        false
    }

    /// Whether a region may begin at this opener.
    fn may_start(&self, at: usize, found: Opener) -> bool {
        if self.hopeless.contains(&(self.consumed + at)) {
            return false;
        }
        !(matches!(found, Opener::Bare(_))
            && self.after_failed_wrapper
            && self.buffer[..at].trim_start().is_empty())
    }

    /// Sends the text before an opener; returns the white space that stays in front of it.
    fn begin_region(&mut self, side: Side, at: usize, out: &mut Vec<Event>) -> usize {
        let keep = self.buffer[..at].trim_end().len();
        let text = self.buffer[..keep].to_owned();
        self.send(side, &text, out);
        if !self.is_done() {
            match side {
                Side::Content => self.diagnostics.marker_seen = true,
                Side::Reasoning => self.diagnostics.marker_in_reasoning = true,
            }
            self.drop_front(keep);
        }
        at - keep
    }

    fn region(&mut self, last: bool, out: &mut Vec<Event>) -> bool {
        let Mode::Region { side, lead, region, first, writer } = &mut self.mode else {
            return false;
        };
        let (side, lead) = (*side, *lead);
        let text = &self.buffer[lead..];
        let tools = &self.options.tools;
        if let Some(mut writing) = writer.take() {
            // To the end, too, what is open stays open: half a tag is no part of a value.
            let progress = region.advance(text, tools, false);
            let live = region.take_live();
            if !live.is_empty() && !writing.has_begun() {
                emit(Side::Content, self.content_stops.finish(), out);
            }
            writing.write(live, tools, &mut self.diagnostics, out);
            let failed = matches!(progress, Progress::Failed(_));
            if writing.has_begun() && (last || failed) {
                // What has been told cannot become text any more.
                self.diagnostics.truncated_call |= writing.cut(out);
                self.diagnostics.fallback = Fallback::None;
                self.buffer.clear();
                self.mode = Mode::Done;
                return false;
            }
            if !(last || failed) {
                *writer = Some(writing);
                return false;
            }
            // Nothing was told: it may be read in any way.
            **region = Region::new(Nesting::Counted, self.options.tolerant);
        }
        let mut progress = region.advance(text, tools, last);
        if let (Progress::Failed(reason), None) = (progress, &first) {
            *first = Some(FirstReading {
                starts: region.later_starts().iter().copied().collect(),
                reached: region.reached(),
                reason,
            });
            **region = Region::new(Nesting::Flat, self.options.tolerant);
            progress = region.advance(text, tools, last);
        } else if progress == Progress::Complete && region.cut() && first.is_none() {
            // A tolerated cut may only be a tag that the text named: then it reads whole when flat.
            let mut flat = Region::new(Nesting::Flat, self.options.tolerant);
            if flat.advance(text, tools, last) == Progress::Complete && !flat.recovered() {
                **region = flat;
            }
        }
        match progress {
            Progress::NeedMore => false,
            Progress::Complete => {
                let (recovered, cut) = (region.recovered(), region.cut());
                let calls = region.take_calls();
                self.publish(calls, recovered, cut, out);
                false
            }
            Progress::Failed(reason) => {
                let (reached, reason) = match first {
                    Some(first) => {
                        // An opener that both readings passed would be read the same way again.
                        let base = self.consumed + lead;
                        let both = region.later_starts().iter().filter(|s| first.starts.contains(s));
                        self.hopeless.extend(both.map(|s| base + s));
                        (first.reached, first.reason)
                    }
                    None => (region.reached(), reason),
                };
                if reached >= self.furthest {
                    self.furthest = reached;
                    self.diagnostics.fallback = reason;
                }
                self.abandon_region(side, lead, out);
                true
            }
        }
    }

    /// The opener is text after all; the search goes on behind it.
    fn abandon_region(&mut self, side: Side, lead: usize, out: &mut Vec<Event>) {
        let (len, wrapper) = match opener(&self.buffer[lead..], true) {
            Opener::Wrapper(len) => (len, true),
            Opener::Bare(len) => (len, false),
            Opener::Partial | Opener::No => (1, false),
        };
        let text = self.buffer[..lead + len].to_owned();
        self.mode = Mode::Text(side);
        self.send(side, &text, out);
        if !self.is_done() {
            self.drop_front(lead + len);
            self.after_failed_wrapper = wrapper;
        }
    }

    fn publish(
        &mut self,
        calls: Vec<super::typing::RawCall>,
        recovered: bool,
        cut: bool,
        out: &mut Vec<Event>,
    ) {
        self.flush_stops(out);
        if matches!(self.mode, Mode::Done) {
            return;
        }
        self.diagnostics.structured_call_count += calls.len() as u32;
        self.diagnostics.tolerant_recovered |= recovered;
        self.diagnostics.truncated_call |= cut;
        self.diagnostics.fallback = Fallback::None;
        for raw in calls {
            out.push(Event::Call(self.options.tools.resolve(raw, &mut self.diagnostics)));
        }
        self.buffer.clear();
        self.mode = Mode::Done;
    }

    fn drop_front(&mut self, len: usize) {
        // A stop string may have cleared the buffer meanwhile.
        let len = len.min(self.buffer.len());
        self.buffer.drain(..len);
        self.consumed += len;
        self.searched = 0;
    }

    /// Passes text through its channel's stop matcher to the events.
    fn send(&mut self, side: Side, text: &str, out: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        self.after_failed_wrapper = false;
        let matcher = match side {
            Side::Reasoning => {
                self.reasoning_open = true;
                &mut self.reasoning_stops
            }
            Side::Content => &mut self.content_stops,
        };
        let passed = matcher.push(text);
        let matched = matcher.matched();
        emit(side, passed, out);
        if matched.is_some() {
            self.stopped = matched;
            self.buffer.clear();
            self.mode = Mode::Done;
        }
    }

    /// Reasoning is over: what its matcher held cannot become a stop string any more.
    fn end_reasoning(&mut self, out: &mut Vec<Event>) {
        if std::mem::take(&mut self.reasoning_open) {
            emit(Side::Reasoning, self.reasoning_stops.finish(), out);
        }
    }

    fn flush_stops(&mut self, out: &mut Vec<Event>) {
        if self.stopped.is_some() {
            return;
        }
        self.end_reasoning(out);
        emit(Side::Content, self.content_stops.finish(), out);
    }
}

fn emit(side: Side, text: String, out: &mut Vec<Event>) {
    if text.is_empty() {
        return;
    }
    match (side, out.last_mut()) {
        (Side::Reasoning, Some(Event::Reasoning(t))) | (Side::Content, Some(Event::Content(t))) => {
            t.push_str(&text);
        }
        (Side::Reasoning, _) => out.push(Event::Reasoning(text)),
        (Side::Content, _) => out.push(Event::Content(text)),
    }
}
