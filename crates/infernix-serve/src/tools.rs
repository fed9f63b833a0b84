//! The tools a request declares: what the prompt shows of them, and what a call of each looks like on the wire.
//!
//! The prompt knows plain functions only. A free-form tool is shown as a function with one string, `input`; a
//! function of a namespace under `NAMESPACE__NAME`; the identity table leads back. Hosted tools (web search and the
//! like) cannot run here: they are left out and named in a response header.

use crate::error::{ApiError, quoted};
use crate::fields::{Fields, wrong};
use infernix_text::grammar::{INPUT, InputForm};
use infernix_text::{ParsedCall, Tool, ToolSet};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// Most tools of a request, deferred ones included.
const MAX_TOOLS: usize = 10_000;

/// What a call of a tool is on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Identity {
    /// A function, of a namespace if it came in one.
    Function {
        /// Its own name.
        name: String,
        /// The group it came in.
        namespace: Option<String>,
    },
    /// Takes free text.
    Custom {
        /// Its name.
        name: String,
    },
    /// A search for deferred tools that the client runs (Responses).
    ClientSearch,
    /// A search for deferred tools that runs here (Messages, Responses).
    ServerSearch {
        /// Its name on the wire.
        name: String,
        /// Whether the model gives a regular expression instead of words.
        regex: bool,
    },
}

/// Which calls a turn may, must or must not make.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No call may start.
    None,
    /// At least one call.
    Required,
    /// At least one call, and only of these; exactly one call if `once`.
    Named {
        /// Names as the prompt shows them.
        names: Vec<String>,
        /// One call and no more.
        once: bool,
    },
    /// Text, or calls of these only.
    Allowed(Vec<String>),
}

impl ToolChoice {
    /// Text, or calls of these only; of none, text.
    pub(crate) fn allowed(names: Vec<String>) -> Self {
        if names.is_empty() { Self::None } else { Self::Allowed(names) }
    }

    /// The only tools that may be called, where they are named.
    pub(crate) fn names(&self) -> Option<&[String]> {
        match self {
            Self::Named { names, .. } | Self::Allowed(names) => Some(names),
            Self::Auto | Self::None | Self::Required => None,
        }
    }
}

/// The tools of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tools {
    /// As the prompt shows them.
    pub(crate) prompt: Vec<Tool>,
    /// Declared, but not shown until a search finds them.
    pub(crate) deferred: Vec<Tool>,
    /// Known from the history only: found by an earlier search.
    pub(crate) found: Vec<Tool>,
    /// By the name that the prompt shows.
    identities: HashMap<String, Identity>,
    /// Names of tools whose arguments must follow their schema.
    pub(crate) strict: Vec<String>,
    /// What the texts of free-form tools must be, by the name that the prompt shows.
    pub(crate) forms: HashMap<String, InputForm>,
    /// Which calls may be made.
    pub(crate) choice: ToolChoice,
    /// More than one call a turn.
    pub(crate) parallel: bool,
    /// Free calls are held to their frame and to declared names.
    pub(crate) frame: bool,
    /// Kinds that cannot run here.
    pub(crate) ignored: Vec<String>,
}

impl Tools {
    pub(crate) fn new() -> Self {
        Self { parallel: true, frame: true, ..Self::default() }
    }

    /// Whether any tool is declared.
    pub(crate) fn any(&self) -> bool {
        !self.identities.is_empty()
    }

    /// Whether calls can be made at all.
    pub(crate) fn callable(&self) -> bool {
        self.choice != ToolChoice::None && !self.identities.is_empty()
    }

    /// Every function that may be called, for reading calls; empty where no call may be made.
    pub(crate) fn set(&self) -> ToolSet {
        if !self.callable() {
            return ToolSet::default();
        }
        let names = self.choice.names();
        let may = |tool: &&Tool| names.is_none_or(|names| names.iter().any(|n| n == tool.name()));
        ToolSet::new(self.prompt.iter().chain(&self.deferred).chain(&self.found).filter(may))
            .strict(&self.strict)
    }

    /// What a called name is on the wire. An undeclared one (tolerated for the client to judge) is a function.
    pub(crate) fn identity(&self, name: &str) -> Identity {
        self.identities
            .get(name)
            .cloned()
            .unwrap_or_else(|| Identity::Function { name: name.to_owned(), namespace: None })
    }

    /// The name the prompt shows for a call in the history.
    pub(crate) fn shown_name(namespace: Option<&str>, name: &str) -> String {
        namespace.map_or_else(|| name.to_owned(), |ns| format!("{ns}__{name}"))
    }

    /// The shown name of a declared tool.
    pub(crate) fn find(&self, namespace: Option<&str>, name: &str) -> Option<String> {
        let shown = Self::shown_name(namespace, name);
        if self.identities.contains_key(&shown) {
            return Some(shown);
        }
        self.identities
            .iter()
            .find(|(_, id)| matches!(id, Identity::Function { name: n, .. } | Identity::Custom { name: n } | Identity::ServerSearch { name: n, .. } if n == name))
            .map(|(shown, _)| shown.clone())
    }

    /// Adds a function.
    pub(crate) fn function(&mut self, function: Function, identity: Identity) -> Result<(), ApiError> {
        if self.prompt.len() + self.deferred.len() >= MAX_TOOLS {
            return Err(ApiError::invalid(function.path, format!("more than {MAX_TOOLS} tools")));
        }
        if !valid_name(&function.name) {
            return Err(ApiError::invalid(
                format!("{}.name", function.path),
                format!(
                    "must be 1 to 128 letters, digits, - or _, not {}",
                    quoted(&Value::from(function.name.as_str()))
                ),
            ));
        }
        if function.strict {
            self.strict.push(function.name.clone());
        }
        self.identities.insert(function.name.clone(), identity);
        let tool = function.tool();
        if let Some(form) = function.form {
            self.forms.insert(function.name, form);
        }
        if function.deferred {
            self.deferred.push(tool)
        } else {
            self.prompt.push(tool)
        }
        Ok(())
    }

    /// Makes a function callable that an earlier search found; the prompt shows it where it was found.
    pub(crate) fn found(&mut self, function: Function, identity: Identity) {
        if !self.identities.contains_key(&function.name) && valid_name(&function.name) {
            self.identities.insert(function.name.clone(), identity);
            self.found.push(function.tool());
            if let Some(form) = function.form {
                self.forms.insert(function.name, form);
            }
        }
    }

    /// Shows a deferred tool from here on: a search found it. `None` where nothing of the name is declared.
    pub(crate) fn reference(&mut self, name: &str) -> Option<&Tool> {
        if let Some(tool) = self.deferred.iter().find(|t| t.name() == name)
            && !self.found.iter().any(|t| t.name() == name)
        {
            self.found.push(tool.clone());
        }
        self.found.iter().chain(&self.prompt).find(|t| t.name() == name)
    }

    /// Names a kind of tool that cannot run here.
    pub(crate) fn ignore(&mut self, kind: &str) {
        let name = format!("tools.{kind}");
        if !self.ignored.contains(&name) {
            self.ignored.push(name);
        }
    }

    /// A choice must name what is declared, and forcing a call needs a tool.
    pub(crate) fn check_choice(&self, path: &str) -> Result<(), ApiError> {
        if matches!(self.choice, ToolChoice::Required | ToolChoice::Named { .. })
            && self.identities.is_empty()
        {
            return Err(ApiError::invalid(
                path,
                "asks for a call, but the request declares no tool that can be called",
            ));
        }
        if !self.deferred.is_empty() && self.prompt.is_empty() {
            return Err(ApiError::invalid(
                "tools",
                "every tool has defer_loading; at least one must be loaded",
            ));
        }
        Ok(())
    }

    /// The shown name of a tool that a choice names.
    pub(crate) fn chosen(&self, path: &str, name: &str) -> Result<String, ApiError> {
        self.find(None, name).ok_or_else(|| {
            ApiError::invalid(path, format!("names {}, which is not declared", quoted(&Value::from(name))))
        })
    }
}

/// Whether a name can stand in a call.
fn valid_name(name: &str) -> bool {
    (1..=128).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// A function as declared.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) path: String,
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    pub(crate) parameters: Option<Value>,
    pub(crate) strict: bool,
    pub(crate) deferred: bool,
    pub(crate) form: Option<InputForm>,
}

impl Function {
    /// Reads `name`, `description`, `parameters` (under its name in the protocol), `strict` and `defer_loading`.
    pub(crate) fn read(path: &str, fields: &mut Fields, schema: &str) -> Result<Self, ApiError> {
        let parameters = match fields.take(schema) {
            Some(value @ Value::Object(_)) => Some(value),
            None => None,
            Some(other) => return Err(wrong(&fields.path(schema), "a JSON Schema object", &other)),
        };
        Ok(Self {
            path: path.to_owned(),
            name: fields.need_string("name")?,
            description: fields.string("description")?,
            parameters,
            strict: fields.bool("strict")?.unwrap_or(false),
            deferred: fields.bool("defer_loading")?.unwrap_or(false),
            form: None,
        })
    }

    /// Reads a tool that takes free text, `name`, `description`, `format` and `defer_loading`: a function with one
    /// string. A grammar is shown to the model and enforced.
    pub(crate) fn free_form(path: &str, fields: &mut Fields) -> Result<Self, ApiError> {
        let form = input_form(fields)?;
        let input = match &form {
            InputForm::Lark(grammar) => {
                format!("The whole input as free text, in the form of this grammar:\n{grammar}")
            }
            InputForm::Regex(expression) => {
                format!("The whole input as free text, which matches this expression:\n{expression}")
            }
            InputForm::Any => "The whole input as free text.".to_owned(),
        };
        let parameters = json!({
            "type": "object",
            "properties": {INPUT: {"type": "string", "description": input}},
            "required": [INPUT],
        });
        Ok(Self {
            path: path.to_owned(),
            name: fields.need_string("name")?,
            description: fields.string("description")?,
            parameters: Some(parameters),
            strict: false,
            deferred: fields.bool("defer_loading")?.unwrap_or(false),
            form: Some(form),
        })
    }

    /// The declaration in the prompt: nothing but what describes the function, so that hints which move between
    /// requests do not change it.
    pub(crate) fn tool(&self) -> Tool {
        let mut function = Map::from_iter([("name".to_owned(), self.name.as_str().into())]);
        if let Some(text) = self.description.as_ref().filter(|t| !t.is_empty()) {
            function.insert("description".to_owned(), text.as_str().into());
        }
        if let Some(parameters) = &self.parameters {
            function.insert("parameters".to_owned(), parameters.clone());
        }
        Tool::from_map(Map::from_iter([
            ("type".to_owned(), "function".into()),
            ("function".to_owned(), Value::Object(function)),
        ]))
    }
}

/// `format` of a free-form tool: Responses has `syntax` and `definition` in it, Chat one level deeper.
fn input_form(fields: &mut Fields) -> Result<InputForm, ApiError> {
    let Some(mut format) = fields.fields("format")? else { return Ok(InputForm::Any) };
    if format.word("type", &["text", "grammar"])? != Some("grammar") {
        return Ok(InputForm::Any);
    }
    let mut grammar = match format.fields("grammar")? {
        Some(inner) => inner,
        None => format,
    };
    let definition = grammar.need_string("definition")?;
    Ok(match grammar.word("syntax", &["lark", "regex"])? {
        Some("regex") => InputForm::Regex(definition),
        _ => InputForm::Lark(definition),
    })
}

/// A call as the wire shows it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    /// Unique in the process.
    pub(crate) id: String,
    /// What is called.
    pub(crate) identity: Identity,
    /// Arguments in the model's order.
    pub(crate) arguments: Map<String, Value>,
    /// The same as JSON text, spaced as the model writes it.
    pub(crate) json: String,
}

impl Call {
    pub(crate) fn new(id: String, tools: &Arc<Tools>, call: &ParsedCall) -> Self {
        Self {
            id,
            identity: tools.identity(&call.name),
            arguments: call.arguments.clone(),
            json: call.arguments_json(),
        }
    }

    /// Free text of a custom call. Without constraints the model may give its only argument another name, or several:
    /// nothing of them is lost.
    pub(crate) fn input(&self) -> String {
        let only = self.arguments.values().next().filter(|_| self.arguments.len() == 1);
        match self.arguments.get(INPUT).or(only) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None if self.arguments.is_empty() => String::new(),
            None => self.json.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(name: &str) -> Function {
        Function {
            path: "tools[0]".into(),
            name: name.into(),
            description: None,
            parameters: None,
            strict: false,
            deferred: false,
            form: None,
        }
    }

    #[test]
    fn a_namespaced_function_comes_back_with_its_bare_name() {
        let mut tools = Tools::new();
        let identity = Identity::Function { name: "spawn".into(), namespace: Some("crew".into()) };
        tools.function(function("crew__spawn"), identity.clone()).expect("valid");
        assert_eq!(tools.identity("crew__spawn"), identity);
        assert_eq!(tools.find(Some("crew"), "spawn").as_deref(), Some("crew__spawn"));
        assert_eq!(
            tools.identity("other"),
            Identity::Function { name: "other".into(), namespace: None },
            "an undeclared call stays one of a function"
        );
    }

    #[test]
    fn formats_of_free_form_tools_are_read_where_either_protocol_has_them() {
        let read = |format: Value| {
            let mut fields = Fields::new("tools[0]", json!({"name": "t", "format": format}))?;
            Function::free_form("tools[0]", &mut fields).map(|f| f.form)
        };
        let lark = Some(InputForm::Lark("start: \"a\"".into()));
        let grammar = json!({"syntax": "lark", "definition": "start: \"a\""});
        assert_eq!(read(json!({"type": "grammar", "grammar": grammar})), Ok(lark.clone()));
        let flat = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"a\""});
        assert_eq!(read(flat), Ok(lark));
        let regex = json!({"type": "grammar", "syntax": "regex", "definition": "a+"});
        assert_eq!(read(regex), Ok(Some(InputForm::Regex("a+".into()))));
        assert_eq!(read(json!({"type": "text"})), Ok(Some(InputForm::Any)));
        for bad in [json!({"type": "picture"}), json!({"type": "grammar"}), json!("lark")] {
            assert!(read(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn no_text_of_a_custom_call_is_lost() {
        let input = |arguments: Value| {
            let arguments = arguments.as_object().cloned().expect("an object");
            let call = ParsedCall { name: "t".into(), arguments };
            Call::new("c".into(), &Arc::new(Tools::new()), &call).input()
        };
        assert_eq!(input(json!({"input": "x", "path": "y"})), "x");
        assert_eq!(input(json!({"path": "y"})), "y");
        assert_eq!(input(json!({"a": "x", "b": 1})), r#"{"a": "x", "b": 1}"#);
        assert_eq!(input(json!({})), "");
    }

    #[test]
    fn tools_that_a_choice_leaves_out_cannot_be_called() {
        let mut tools = Tools::new();
        for name in ["f", "g"] {
            tools.function(function(name), Identity::Custom { name: name.into() }).expect("valid");
        }
        tools.choice = ToolChoice::allowed(vec!["g".into()]);
        assert!(tools.set().declares("g") && !tools.set().declares("f"));
        assert_eq!(ToolChoice::allowed(Vec::new()), ToolChoice::None);
    }

    #[test]
    fn names_that_cannot_be_called_are_refused() {
        let mut tools = Tools::new();
        for bad in ["", "a b", "a>b", "é"] {
            let identity = Identity::Custom { name: bad.into() };
            assert!(tools.function(function(bad), identity).is_err(), "{bad:?}");
        }
        tools.choice = ToolChoice::Required;
        assert!(tools.check_choice("tool_choice").is_err(), "nothing to call");
    }
}
