//! From a conversation to prompt text and token ids.
//!
//! What a user, a tool or a schema says is always text: where it spells an added token, the prompt's ids
//! spell it out, too. The template renders marked copies of the conversation, the marks show which parts
//! of the prompt came from it, and the tokenizer reads those parts literally.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::error::{Result, TextError};
use crate::generation::GenerationDefaults;
use crate::message::{Content, Message, Role, Tool, ToolCall};
use crate::output::Start;
use crate::template::Template;
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Put after the first character of a spelling that must stay text. A noncharacter: no text that is
/// meant to be exchanged has it, and messages that do lose it.
const MARK: char = '\u{FDD0}';
/// The mark in JSON that keeps to ASCII.
const ESCAPED_MARK: &str = "\\ufdd0";

/// The resource files of a model, as bytes.
#[derive(Debug, Clone, Default)]
pub struct Resources {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Vec<u8>>,
    /// `chat_template.jinja`; without it the one in `tokenizer_config.json` is used.
    pub chat_template: Option<String>,
    /// `generation_config.json`.
    pub generation_config: Option<Vec<u8>>,
}

impl Resources {
    /// Reads them from a checkpoint folder.
    ///
    /// # Errors
    /// `tokenizer.json` is missing, or a file that is there cannot be read.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let io = |name: &str, source| TextError::Io { file: folder.join(name).display().to_string(), source };
        let optional = |name: &str| match std::fs::read(folder.join(name)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io(name, e)),
        };
        let template = optional("chat_template.jinja")?
            .map(|bytes| {
                String::from_utf8(bytes).map_err(|e| TextError::Parse {
                    file: "chat_template.jinja".to_owned(),
                    message: e.to_string(),
                })
            })
            .transpose()?;
        Ok(Self {
            tokenizer: std::fs::read(folder.join("tokenizer.json")).map_err(|e| io("tokenizer.json", e))?,
            tokenizer_config: optional("tokenizer_config.json")?,
            chat_template: template,
            generation_config: optional("generation_config.json")?,
        })
    }
}

/// How a conversation is rendered.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatOptions {
    /// Passed as `enable_thinking`; absent leaves it to the template (thinking on).
    pub enable_thinking: Option<bool>,
    /// Passed as `preserve_thinking`; absent leaves it to the template.
    pub preserve_thinking: Option<bool>,
    /// Passed as `reasoning_effort`; map it through [`ChatFormat::accepted_effort`] first.
    pub reasoning_effort: Option<String>,
    /// Further template variables. They may not replace what the conversation defines, nor contradict
    /// the fields above.
    pub template_kwargs: Map<String, Value>,
    /// Continues the last message, which must be the model's, instead of beginning a new one.
    pub continue_last: bool,
}

/// A rendered prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// The text, as the template wrote it.
    pub text: String,
    /// Its token ids.
    pub ids: Vec<u32>,
    /// Where the output will begin.
    pub start: Start,
    /// The last characters of the text, which opened the model's turn.
    pub opener: String,
}

/// Template variables that belong to the conversation.
const RESERVED: [&str; 5] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];

/// Efforts that requests name, from least to most.
pub const EFFORTS: [&str; 6] = ["minimal", "low", "medium", "high", "xhigh", "max"];

/// Tokenizer, template and defaults of one model.
#[derive(Debug)]
pub struct ChatFormat {
    tokenizer: Arc<Tokenizer>,
    template: Option<Template>,
    defaults: GenerationDefaults,
    efforts: Vec<&'static str>,
    late_system: bool,
}

impl ChatFormat {
    /// Loads everything and tries the template on small conversations, to learn what it accepts.
    ///
    /// # Errors
    /// A resource that is malformed. A model without a template loads; only chat rendering needs one.
    pub fn new(resources: &Resources) -> Result<Self> {
        let tokenizer = Tokenizer::from_json(&resources.tokenizer, resources.tokenizer_config.as_deref())?;
        let template = resources
            .chat_template
            .as_deref()
            .or_else(|| tokenizer.chat_template("default"))
            .map(Template::new)
            .transpose()?;
        let defaults = match &resources.generation_config {
            Some(bytes) => GenerationDefaults::from_json(bytes)?,
            None => GenerationDefaults::default(),
        };
        let mut format = Self {
            tokenizer: Arc::new(tokenizer),
            template,
            defaults,
            efforts: Vec::new(),
            late_system: true,
        };
        format.probe();
        Ok(format)
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The template, if the model has one.
    #[must_use]
    pub fn template(&self) -> Option<&Template> {
        self.template.as_ref()
    }

    /// Defaults of `generation_config.json`.
    #[must_use]
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    /// Ids that end a turn.
    #[must_use]
    pub fn stop_ids(&self) -> Vec<u32> {
        self.defaults.stop_ids(&self.tokenizer)
    }

    /// Efforts the template tells apart or at least accepts; empty if it does not read the variable.
    #[must_use]
    pub fn efforts(&self) -> &[&'static str] {
        &self.efforts
    }

    /// The accepted effort nearest to `effort`, ties upwards; `None` if the template knows none or the
    /// word is not one of [`EFFORTS`].
    #[must_use]
    pub fn accepted_effort(&self, effort: &str) -> Option<&'static str> {
        let rank = |word: &str| EFFORTS.iter().position(|e| *e == word);
        let wanted = rank(effort)?;
        self.efforts
            .iter()
            .filter_map(|e| Some((rank(e)?, *e)))
            .min_by_key(|(r, _)| (r.abs_diff(wanted), usize::from(*r < wanted)))
            .map(|(_, e)| e)
    }

    fn probe(&mut self) {
        let user = Message::text(Role::User, "x");
        let render = |messages: &[Message], effort: Option<&str>| {
            let options =
                ChatOptions { reasoning_effort: effort.map(str::to_owned), ..ChatOptions::default() };
            self.render_text(messages, &[], &options, true)
        };
        let one = std::slice::from_ref(&user);
        let plain = render(one, None).ok();
        let reads_effort = self.template.as_ref().is_some_and(|t| t.source().contains("reasoning_effort"));
        let efforts = if reads_effort && plain.is_some() {
            EFFORTS.iter().copied().filter(|effort| render(one, Some(effort)).is_ok()).collect()
        } else {
            Vec::new()
        };
        let late = [user.clone(), Message::text(Role::System, "y"), user.clone()];
        let late_system = plain.is_none() || render(&late, None).is_ok();
        self.efforts = efforts;
        self.late_system = late_system;
    }

    /// Renders and encodes a conversation.
    ///
    /// Leading system and developer messages become one system message. Later ones stay where they are
    /// if the template accepts that, else they become user messages.
    ///
    /// # Errors
    /// No template, options that contradict each other, a refusal of the template, a limit.
    pub fn prompt(&self, messages: &[Message], tools: &[Tool], options: &ChatOptions) -> Result<Prompt> {
        let mut messages = self.normalize(messages);
        let prefill = if options.continue_last { Some(take_prefill(&mut messages, options)?) } else { None };
        let clean = self.render_text(&messages, tools, options, true)?;
        let (mut text, mut literal) = if self.spells_added(&messages, tools, options) {
            self.render_marked(&messages, tools, options, &clean)?
        } else {
            (clean, Vec::new())
        };
        let opener = self.opener(&text, &messages, tools, options);
        let mut start = start_after(&opener);
        if let Some(prefill) = prefill {
            if start == Start::Reasoning {
                return Err(conversation(
                    "messages",
                    "the last message cannot be continued while thinking is on (enable_thinking: false)",
                ));
            }
            start = Start::Content;
            let offset = text.len();
            for spelling in self.spellings(Protect::Special) {
                literal.extend(
                    prefill.match_indices(&spelling).map(|(at, s)| offset + at..offset + at + s.len()),
                );
            }
            text.push_str(&prefill);
            literal.sort_by_key(|r| r.start);
        }
        let ids = self
            .tokenizer
            .encode_with(&text, &EncodeOptions { literal: &literal, ..EncodeOptions::default() })?;
        Ok(Prompt { text, ids, start, opener })
    }

    /// The template's output alone.
    fn render_text(
        &self,
        messages: &[Message],
        tools: &[Tool],
        options: &ChatOptions,
        open_turn: bool,
    ) -> Result<String> {
        let template = self.template.as_ref().ok_or_else(|| {
            conversation("messages", "this model has no chat template; send a raw prompt instead")
        })?;
        let mut variables = self.variables(options)?;
        let messages: Vec<Value> = messages.iter().map(message_value).collect();
        variables.insert("messages".to_owned(), Value::Array(messages));
        if !tools.is_empty() {
            let tools: Vec<Value> = tools.iter().map(|t| Value::Object(t.as_map().clone())).collect();
            variables.insert("tools".to_owned(), Value::Array(tools));
        }
        variables.insert("add_generation_prompt".to_owned(), open_turn.into());
        let named = self.tokenizer.named_tokens();
        for (name, token) in [
            ("bos_token", &named.bos),
            ("eos_token", &named.eos),
            ("pad_token", &named.pad),
            ("unk_token", &named.unk),
        ] {
            if let Some(token) = token {
                variables.insert(name.to_owned(), token.as_str().into());
            }
        }
        template.render(&variables)
    }

    /// Options as template variables; doubled ones must agree.
    fn variables(&self, options: &ChatOptions) -> Result<Map<String, Value>> {
        let mut variables = options.template_kwargs.clone();
        for name in RESERVED {
            if variables.contains_key(name) {
                return Err(conversation(
                    &format!("chat_template_kwargs.{name}"),
                    "this variable belongs to the conversation and cannot be set",
                ));
            }
        }
        let fields = [
            ("enable_thinking", options.enable_thinking.map(Value::from)),
            ("preserve_thinking", options.preserve_thinking.map(Value::from)),
            ("reasoning_effort", options.reasoning_effort.clone().map(Value::from)),
        ];
        for (name, value) in fields {
            let Some(value) = value else { continue };
            match variables.get(name) {
                Some(other) if *other != value => {
                    return Err(conversation(
                        &format!("chat_template_kwargs.{name}"),
                        &format!("is {other}, but the request's {name} is {value}; give one of them"),
                    ));
                }
                _ => {
                    variables.insert(name.to_owned(), value);
                }
            }
        }
        Ok(variables)
    }

    fn normalize(&self, messages: &[Message]) -> Vec<Message> {
        let system = |m: &Message| matches!(m.role, Role::System | Role::Developer);
        let lead = messages.iter().take_while(|m| system(m)).count();
        let mut out = Vec::with_capacity(messages.len());
        if lead == 1 {
            out.push(messages[0].clone());
        } else if lead > 1 {
            if messages[..lead].iter().any(Message::has_media) {
                // Joining would lose parts; the template decides about media in system turns.
                let parts = messages[..lead].iter().flat_map(|m| match &m.content {
                    None => Vec::new(),
                    Some(Content::Text(text)) => vec![json!({"type": "text", "text": text})],
                    Some(Content::Parts(parts)) => parts.clone(),
                });
                let mut merged = messages[0].clone();
                merged.content = Some(Content::Parts(parts.collect()));
                out.push(merged);
            } else {
                let texts: Vec<String> =
                    messages[..lead].iter().map(Message::plain_text).filter(|t| !t.is_empty()).collect();
                out.push(Message::text(Role::System, texts.join("\n\n")));
            }
        }
        for message in &messages[lead..] {
            let mut message = message.clone();
            if system(&message) {
                message.role = if self.late_system { Role::System } else { Role::User };
            }
            out.push(message);
        }
        out
    }

    /// What opened the model's turn: the difference that asking for it makes.
    fn opener(&self, text: &str, messages: &[Message], tools: &[Tool], options: &ChatOptions) -> String {
        let without = self.render_text(messages, tools, options, false).unwrap_or_default();
        text.strip_prefix(without.as_str())
            .filter(|rest| !without.is_empty() && !rest.is_empty())
            .map_or_else(
                || {
                    // The turn's beginning is marked by the last control token of the prompt.
                    let turn = self
                        .tokenizer
                        .added_tokens()
                        .iter()
                        .filter(|t| t.special)
                        .filter_map(|t| text.rfind(t.content.as_str()))
                        .max();
                    text[turn.unwrap_or(0)..].to_owned()
                },
                str::to_owned,
            )
    }

    fn spellings(&self, protect: Protect) -> Vec<String> {
        self.tokenizer
            .added_tokens()
            .iter()
            // Runs of white space that some vocabularies add are no one's secret.
            .filter(|t| !t.content.trim().is_empty())
            .filter(|t| t.special || protect == Protect::All)
            .map(|t| t.content.clone())
            .collect()
    }

    /// Whether the request spells an added token, in full or so that its texts joined might.
    fn spells_added(&self, messages: &[Message], tools: &[Tool], options: &ChatOptions) -> bool {
        let spellings = self.spellings(Protect::All);
        let mut found = false;
        let mut look = |text: &str| {
            found |= text.contains(MARK)
                || spellings.iter().any(|s| text.contains(s.as_str()))
                || unfinished(text, &spellings).is_some();
        };
        for message in messages {
            visit_message(message, &mut look);
        }
        for tool in tools {
            visit(&Value::Object(tool.as_map().clone()), &mut look);
        }
        visit(&Value::Object(options.template_kwargs.clone()), &mut look);
        if let Some(effort) = &options.reasoning_effort {
            look(effort);
        }
        found
    }

    /// Renders with marks inside the conversation's own spellings; returns the prompt without marks
    /// and the ranges that are literal.
    ///
    /// If marking non-control spellings such as `<think>` changes what the template does (it may look
    /// for them), only control spellings are marked. Those the templates never look for.
    fn render_marked(
        &self,
        messages: &[Message],
        tools: &[Tool],
        options: &ChatOptions,
        clean: &str,
    ) -> Result<(String, Vec<Range<usize>>)> {
        let mut last = None;
        for protect in [Protect::All, Protect::Special] {
            let marker = Marker::new(self.spellings(protect), self.spellings(Protect::Special));
            let marked: Vec<Message> = messages.iter().map(|m| marker.message(m)).collect();
            let marked_tools: Vec<Tool> =
                tools.iter().map(|t| Tool::from_map(marker.map(t.as_map(), false))).collect();
            let marked_options = ChatOptions {
                reasoning_effort: options.reasoning_effort.as_ref().map(|e| marker.text(e, false)),
                template_kwargs: marker.map(&options.template_kwargs, false),
                ..options.clone()
            };
            let Ok(text) = self.render_text(&marked, &marked_tools, &marked_options, true) else {
                continue;
            };
            let (text, literal) = unmark(&text);
            if text == clean {
                return Ok((text, literal));
            }
            last = Some((text, literal));
        }
        last.ok_or_else(|| {
            conversation(
                "messages",
                "the template does not render control-token spellings as text; remove them from the messages",
            )
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protect {
    /// Every added token.
    All,
    /// Control tokens only.
    Special,
}

/// Where an end of `text` begins that is the beginning of a spelling, the longest such end.
fn unfinished(text: &str, spellings: &[String]) -> Option<usize> {
    let longest = spellings.iter().map(String::len).max().unwrap_or(0);
    let from = text.len().saturating_sub(longest);
    (from..text.len()).filter(|&at| text.is_char_boundary(at)).find(|&at| {
        let end = &text[at..];
        spellings.iter().any(|s| s.len() > end.len() && s.starts_with(end))
    })
}

/// Puts marks into spellings.
struct Marker {
    /// For what users, tools and schemas say.
    foreign: Vec<String>,
    /// For what the model itself said, whose `<think>` and call tags are its own tokens.
    own: Vec<String>,
}

impl Marker {
    fn new(foreign: Vec<String>, own: Vec<String>) -> Self {
        Self { foreign, own }
    }

    fn text(&self, text: &str, own: bool) -> String {
        let mut out = Cow::Borrowed(text);
        if out.contains(MARK) {
            out = Cow::Owned(out.replace(MARK, ""));
        }
        let spellings = if own { &self.own } else { &self.foreign };
        for spelling in spellings {
            if out.contains(spelling.as_str()) {
                let first = spelling.chars().next().map_or(0, char::len_utf8);
                let marked = format!("{}{MARK}{}", &spelling[..first], &spelling[first..]);
                out = Cow::Owned(out.replace(spelling.as_str(), &marked));
            }
        }
        // The next text may go on with the spelling that this one begins.
        if let Some(at) = unfinished(&out, spellings) {
            let first = out[at..].chars().next().map_or(0, char::len_utf8);
            out.to_mut().insert(at + first, MARK);
        }
        out.into_owned()
    }

    fn value(&self, value: &Value, own: bool) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(text, own)),
            Value::Array(items) => items.iter().map(|v| self.value(v, own)).collect(),
            Value::Object(map) => Value::Object(self.map(map, own)),
            other => other.clone(),
        }
    }

    fn map(&self, map: &Map<String, Value>, own: bool) -> Map<String, Value> {
        map.iter().map(|(k, v)| (self.text(k, own), self.value(v, own))).collect()
    }

    fn message(&self, message: &Message) -> Message {
        let own = message.role == Role::Assistant;
        let mut out = message.clone();
        out.content = message.content.as_ref().map(|content| match content {
            Content::Text(text) => Content::Text(self.text(text, own)),
            Content::Parts(parts) => Content::Parts(parts.iter().map(|p| self.value(p, own)).collect()),
        });
        out.reasoning_content = message.reasoning_content.as_ref().map(|t| self.text(t, own));
        out.extra = self.map(&message.extra, own);
        for field in [&mut out.tool_call_id, &mut out.name].into_iter().flatten() {
            *field = self.text(field, false);
        }
        for call in &mut out.tool_calls {
            call.id = call.id.as_ref().map(|id| self.text(id, false));
            call.kind = self.text(&call.kind, false);
            call.function.name = self.text(&call.function.name, own);
            // Values of calls are data, whoever wrote them.
            call.function.arguments = Value::Object(self.map(&call.function.arguments_object(), false));
        }
        out
    }
}

/// Removes marks; each becomes the place it had, which no added token may span. A template that writes
/// JSON in ASCII has escaped them.
fn unmark(text: &str) -> (String, Vec<Range<usize>>) {
    let mut out = String::with_capacity(text.len());
    let mut literal = Vec::new();
    let pieces = text.split(MARK).flat_map(|piece| piece.split(ESCAPED_MARK));
    for (index, piece) in pieces.enumerate() {
        if index > 0 {
            literal.push(out.len()..out.len());
        }
        out.push_str(piece);
    }
    (out, literal)
}

/// A message as the template sees it.
fn message_value(message: &Message) -> Value {
    let content = match &message.content {
        // Templates search in the content; an absent one is an empty text.
        None => Value::from(""),
        Some(Content::Text(text)) => text.as_str().into(),
        Some(Content::Parts(parts)) => Value::Array(parts.clone()),
    };
    let mut map = Map::from_iter([
        ("role".to_owned(), message.role.template_name().into()),
        ("content".to_owned(), content),
    ]);
    if let Some(reasoning) = message.reasoning() {
        map.insert("reasoning_content".to_owned(), reasoning.into());
    }
    if !message.tool_calls.is_empty() {
        let calls: Vec<Value> = message.tool_calls.iter().map(call_value).collect();
        map.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    for (name, value) in &message.extra {
        if !map.contains_key(name) {
            map.insert(name.clone(), value.clone());
        }
    }
    for (name, field) in [("tool_call_id", &message.tool_call_id), ("name", &message.name)] {
        if let Some(field) = field {
            map.insert(name.to_owned(), field.as_str().into());
        }
    }
    Value::Object(map)
}

/// A call as the template sees it.
fn call_value(call: &ToolCall) -> Value {
    let mut map = Map::new();
    if let Some(id) = &call.id {
        map.insert("id".to_owned(), id.as_str().into());
    }
    map.insert("type".to_owned(), call.kind.as_str().into());
    map.insert(
        "function".to_owned(),
        json!({"name": call.function.name, "arguments": call.function.arguments_object()}),
    );
    Value::Object(map)
}

/// Removes the last message and returns its text.
fn take_prefill(messages: &mut Vec<Message>, options: &ChatOptions) -> Result<String> {
    let location = format!("messages[{}]", messages.len().saturating_sub(1));
    let Some(last) = messages.last().filter(|m| m.role == Role::Assistant) else {
        return Err(conversation(&location, "only a message of the assistant can be continued"));
    };
    if last.has_media() || !last.tool_calls.is_empty() || last.reasoning().is_some() {
        return Err(conversation(&location, "a message that is to be continued may hold text only"));
    }
    let thinking = options
        .enable_thinking
        .or_else(|| options.template_kwargs.get("enable_thinking").and_then(Value::as_bool));
    if thinking != Some(false) {
        return Err(conversation(
            &location,
            "the last message can be continued only without thinking (enable_thinking: false)",
        ));
    }
    let text = last.plain_text();
    messages.pop();
    Ok(text)
}

/// Whether the opened turn stands inside a reasoning block.
fn start_after(opener: &str) -> Start {
    match (opener.rfind("<think>"), opener.rfind("</think>")) {
        (Some(open), Some(close)) if open < close => Start::Content,
        (Some(_), _) => Start::Reasoning,
        (None, Some(_)) => Start::Content,
        // The template leaves it to the model.
        (None, None) => Start::Detect,
    }
}

fn visit_message(message: &Message, look: &mut dyn FnMut(&str)) {
    match &message.content {
        None => {}
        Some(Content::Text(text)) => look(text),
        Some(Content::Parts(parts)) => parts.iter().for_each(|p| visit(p, look)),
    }
    if let Some(text) = &message.reasoning_content {
        look(text);
    }
    for field in [&message.tool_call_id, &message.name].into_iter().flatten() {
        look(field);
    }
    for call in &message.tool_calls {
        look(&call.kind);
        if let Some(id) = &call.id {
            look(id);
        }
        look(&call.function.name);
        visit(&call.function.arguments, look);
        if let Value::String(_) = &call.function.arguments {
            // JSON text may spell a token with escapes.
            visit(&Value::Object(call.function.arguments_object()), look);
        }
    }
    visit(&Value::Object(message.extra.clone()), look);
}

fn visit(value: &Value, look: &mut dyn FnMut(&str)) {
    match value {
        Value::String(text) => look(text),
        Value::Array(items) => items.iter().for_each(|v| visit(v, look)),
        Value::Object(map) => map.iter().for_each(|(k, v)| {
            look(k);
            visit(v, look);
        }),
        _ => {}
    }
}

fn conversation(location: &str, message: &str) -> TextError {
    TextError::Conversation { location: location.to_owned(), message: message.to_owned() }
}
