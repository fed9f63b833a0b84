//! A model's output, split as it streams into reasoning, content and tool calls.

mod live;
mod parser;
mod region;
mod typing;

pub use parser::{CallPart, Channel, Event, OutputOptions, OutputParser, Start};
pub(crate) use region::{PLAIN_NAME, plain_name, writable};
pub use typing::{ParsedCall, ToolSet};

use serde::Serialize;

/// Why markup that looked like calls stayed text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// It did not: there was none, or it became calls.
    #[default]
    None,
    /// The markup does not have the form of a call.
    MalformedStructure,
    /// A function name has characters that names may not have.
    InvalidToolName,
    /// A function that the request does not declare.
    UndeclaredTool,
    /// A complete call with text after it.
    TrailingContent,
    /// The output ended inside a call.
    TruncatedTail,
}

/// What the parser saw, for logs and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Diagnostics {
    /// An opener of a call was seen outside reasoning.
    pub marker_seen: bool,
    /// One was seen inside reasoning, where it only counts if recovery there is on.
    pub marker_in_reasoning: bool,
    /// Calls published.
    pub structured_call_count: u32,
    /// Empty values of parameters that are not strings, left out.
    pub empty_arguments_omitted: u32,
    /// Values that are not of their declared type, kept.
    pub schema_mismatch_arguments: u32,
    /// Repeated parameters: the last value in the first place.
    pub duplicate_parameters_repaired: u32,
    /// Why call markup stayed text, [`Fallback::None`] when calls were published.
    pub fallback: Fallback,
    /// Tolerance was needed for what was published.
    pub tolerant_recovered: bool,
    /// The last published call was cut by the end of the output: the turn must end with a length
    /// reason, or clients run half a call.
    pub truncated_call: bool,
}
