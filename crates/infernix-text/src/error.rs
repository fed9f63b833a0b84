//! The crate's one error type.

/// What can go wrong while reading text resources, rendering a prompt or encoding it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A resource file could not be read.
    #[error("{file}: {source}")]
    Io {
        /// File that was being read.
        file: String,
        /// Cause.
        source: std::io::Error,
    },
    /// A resource is not valid JSON of the expected shape.
    #[error("{file}: {message}")]
    Parse {
        /// Resource name, such as `tokenizer.json`.
        file: String,
        /// Position and cause.
        message: String,
    },
    /// The tokenizer needs something that is not implemented; guessing would give wrong ids.
    #[error("tokenizer.json: {what} is not supported; only byte-level BPE with isolating splits is")]
    UnsupportedTokenizer {
        /// The field and its value.
        what: String,
    },
    /// The tokenizer contradicts itself or its companion file.
    #[error("{file}: {message}")]
    Tokenizer {
        /// Resource name.
        file: String,
        /// What disagrees.
        message: String,
    },
    /// The split pattern could not be compiled or gave up on an input.
    #[error("split pattern of tokenizer.json: {message}")]
    Pattern {
        /// Cause.
        message: String,
    },
    /// The chat template does not compile.
    #[error("chat template: {message}")]
    TemplateSyntax {
        /// Cause with its line.
        message: String,
    },
    /// The template itself refused the conversation through `raise_exception`.
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRefused {
        /// The template's own words.
        message: String,
    },
    /// The template failed while it ran.
    #[error("chat template: {message}")]
    TemplateRuntime {
        /// Cause with its line.
        message: String,
    },
    /// A limit on fuel, output or nesting ended the rendering.
    #[error("chat template: more than {limit} {what}; raise the template limits if this is intended")]
    TemplateLimit {
        /// What ran out.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// A conversation or its options cannot be rendered.
    #[error("{location}: {message}")]
    Conversation {
        /// Where, in the form `messages[2].tool_calls[0]`.
        location: String,
        /// What is wrong and what would be accepted.
        message: String,
    },
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, TextError>;

pub(crate) fn parse_error(file: &str, error: &serde_json::Error) -> TextError {
    TextError::Parse { file: file.to_owned(), message: error.to_string() }
}
