//! Why a constraint was refused.

/// A refusal, with the place it is about. `code` is what protocols put into their error bodies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.sentence())]
pub struct GrammarError {
    /// `invalid_json_schema`, `unsupported_json_schema`, `unsatisfiable_json_schema`, `invalid_grammar`,
    /// `invalid_regex`, `invalid_choice` or `constraint_too_complex`.
    pub code: &'static str,
    /// What is wrong and what would be accepted.
    pub message: String,
    /// JSON Pointer to the keyword, for schemas. Empty where no value fits the schema as a whole.
    pub pointer: Option<String>,
    /// Line and column, from 1, for grammars.
    pub position: Option<(usize, usize)>,
    /// The tool whose parameters are meant.
    pub tool: Option<String>,
}

impl GrammarError {
    pub(crate) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), pointer: None, position: None, tool: None }
    }

    pub(crate) fn at(mut self, pointer: impl Into<String>) -> Self {
        self.pointer = Some(pointer.into());
        self
    }

    pub(crate) fn on(mut self, line: usize, column: usize) -> Self {
        self.position = Some((line, column));
        self
    }

    pub(crate) fn in_tool(mut self, name: &str) -> Self {
        self.tool = Some(name.to_owned());
        self
    }

    fn sentence(&self) -> String {
        let mut out = String::new();
        if let Some(tool) = &self.tool {
            out += &format!("tool {tool:?}: ");
        }
        if let Some(pointer) = &self.pointer {
            out += &format!("schema at {pointer:?}: ");
        }
        if let Some((line, column)) = self.position {
            out += &format!("line {line}, column {column}: ");
        }
        out + &self.message
    }
}
