//! Calls written while they are made.

use serde_json::{Map, Value};

use super::Diagnostics;
use super::parser::{CallPart, Event};
use super::region::Live;
use super::typing::{ParsedCall, ToolSet};
use crate::pyjson;

/// Turns what a reading finds out into events.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// A call has begun, now or before.
    begun: bool,
    /// The open call.
    open: Option<Open>,
}

#[derive(Debug, Default)]
struct Open {
    function: String,
    parameter: String,
    value: Writing,
    /// What is whole.
    arguments: Map<String, Value>,
}

/// How the open parameter is written.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Writing {
    /// As a value, at its end.
    #[default]
    Whole,
    /// As it comes: its value is its text.
    Text,
    /// Not at all: it has a value, which has been told.
    Repeated,
}

impl Writer {
    pub(crate) fn has_begun(&self) -> bool {
        self.begun
    }

    pub(crate) fn write(
        &mut self,
        live: Vec<Live>,
        tools: &ToolSet,
        diagnostics: &mut Diagnostics,
        out: &mut Vec<Event>,
    ) {
        for what in live {
            match what {
                Live::Begin(name) => {
                    self.begun = true;
                    self.open = Some(Open { function: name.clone(), ..Open::default() });
                    out.push(Event::CallBegin(name));
                }
                Live::End => {
                    if let Some(Open { function, arguments, .. }) = self.open.take() {
                        let json = if arguments.is_empty() { "{}" } else { "}" }.to_owned();
                        out.push(Event::CallPart(CallPart { json, text: None }));
                        diagnostics.structured_call_count += 1;
                        let call = ParsedCall { name: function, arguments };
                        out.push(Event::CallEnd { call, whole: true });
                    }
                }
                Live::Parameter(_) | Live::Text(_) | Live::Value(_) => {
                    if let Some(open) = &mut self.open {
                        let part = open.write(what, tools, diagnostics);
                        out.extend(part.map(Event::CallPart));
                    }
                }
            }
        }
    }

    /// Ends a call that is open, with what is whole of it; whether there was one.
    pub(crate) fn cut(&mut self, out: &mut Vec<Event>) -> bool {
        let Some(Open { function, arguments, .. }) = self.open.take() else { return false };
        out.push(Event::CallEnd { call: ParsedCall { name: function, arguments }, whole: false });
        true
    }
}

impl Open {
    fn write(&mut self, what: Live, tools: &ToolSet, diagnostics: &mut Diagnostics) -> Option<CallPart> {
        match what {
            Live::Parameter(name) => {
                self.value = if self.arguments.contains_key(&name) {
                    diagnostics.duplicate_parameters_repaired += 1;
                    Writing::Repeated
                } else if tools.is_text(&self.function, &name) {
                    Writing::Text
                } else {
                    Writing::Whole
                };
                self.parameter = name;
                (self.value == Writing::Text).then(|| CallPart {
                    json: self.name() + "\"",
                    text: Some((self.parameter.clone(), String::new())),
                })
            }
            Live::Text(text) if self.value == Writing::Text => {
                let quoted = pyjson::dumps(&Value::String(text.clone()));
                let json = quoted[1..quoted.len() - 1].to_owned();
                Some(CallPart { json, text: Some((self.parameter.clone(), text)) })
            }
            Live::Value(text) if self.value != Writing::Repeated => {
                let value = tools.value(&self.function, &self.parameter, &text, diagnostics)?;
                let json = match self.value {
                    Writing::Text => "\"".to_owned(),
                    _ => self.name() + &pyjson::dumps(&value),
                };
                self.arguments.insert(std::mem::take(&mut self.parameter), value);
                Some(CallPart { json, text: None })
            }
            _ => None,
        }
    }

    /// The parameter's name and what stands around it.
    fn name(&self) -> String {
        let before = if self.arguments.is_empty() { "{" } else { ", " };
        format!("{before}{}: ", pyjson::dumps(&Value::String(self.parameter.clone())))
    }
}
