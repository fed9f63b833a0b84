//! The one error type of this crate.

use crate::format::Format;
use crate::ggml::GgmlType;
use crate::layout::Layout;

/// Where in a tensor a word lies: row and column of the logical matrix, and which matrix of which expert where the
/// tensor is an expert bank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Prefix such as `"expert 3 gate "`; empty for a plain matrix.
    pub part: String,
    /// Row of the logical matrix.
    pub row: u64,
    /// Column of the logical matrix; for a scale word the first column it covers.
    pub column: u64,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}row {}, column {}", self.part, self.row, self.column)
    }
}

/// What can be wrong with a format name, a shape, a buffer or a stored word.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A format or layout name that this build does not know.
    #[error("unknown {kind} `{name}`; known: {known}")]
    UnknownName {
        /// `"format"` or `"layout"`.
        kind: &'static str,
        /// The name found.
        name: String,
        /// All known names, comma separated.
        known: String,
    },
    /// The layout does not store this format.
    #[error("layout {layout} does not store format {format}")]
    Unsupported {
        /// Layout asked for.
        layout: Layout,
        /// Format asked for.
        format: Format,
    },
    /// The shape does not suit the layout.
    #[error("shape {shape:?} does not suit {format} in {layout}: {why}")]
    Shape {
        /// Layout asked for.
        layout: Layout,
        /// Format asked for.
        format: Format,
        /// Shape found.
        shape: Vec<u64>,
        /// The rule that is broken.
        why: &'static str,
    },
    /// A size computed from the shape does not fit 64 bits (or the address space).
    #[error("shape {shape:?} is too large: its size does not fit 64 bits")]
    Overflow {
        /// Shape found.
        shape: Vec<u64>,
    },
    /// A buffer has the wrong length.
    #[error("{what}: expected {expected} bytes or elements, found {found}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Length that the shape asks for.
        expected: u64,
        /// Length found.
        found: u64,
    },
    /// A row range that does not lie in the tensor, or is not aligned as the layout needs.
    #[error("rows {start}..{end} of {rows}: {why}")]
    Rows {
        /// First row asked for.
        start: u64,
        /// Row behind the last.
        end: u64,
        /// Rows of the tensor.
        rows: u64,
        /// The rule that is broken.
        why: &'static str,
    },
    /// A stored word that the format does not allow.
    #[error("illegal {what} {word:#x} at {place}: {why}")]
    IllegalWord {
        /// Kind of word, such as `"block scale"`.
        what: &'static str,
        /// The word itself.
        word: u32,
        /// Where it lies.
        place: Place,
        /// The rule that is broken.
        why: &'static str,
    },
    /// A ggml type id that this build does not know.
    #[error("unknown ggml type id {id}; known are 0 to {largest}, see docs/gguf.md")]
    GgmlId {
        /// Id found.
        id: u32,
        /// Largest known id.
        largest: u32,
    },
    /// A ggml type that holds no weights.
    #[error(
        "ggml type {ty} cannot be decoded: it {}",
        if ty.is_removed() { "was given up by ggml" } else { "is no type of weights" }
    )]
    GgmlNotDecodable {
        /// Type asked for.
        ty: GgmlType,
    },
    /// A row that is not whole ggml blocks.
    #[error("a row of {values} values is not whole blocks of {ty}, which have {block} values")]
    GgmlRow {
        /// Type asked for.
        ty: GgmlType,
        /// Values of the row.
        values: u64,
        /// Values per block.
        block: u64,
    },
    /// A byte of padding that is not zero.
    #[error("padding byte at offset {offset} is {byte:#04x}, expected 0; the object is damaged")]
    Padding {
        /// Offset inside the object.
        offset: u64,
        /// Byte found.
        byte: u8,
    },
    /// A value that cannot be quantized: NaN or infinity.
    #[error("value {value} at {place} cannot be encoded: only finite values can")]
    NotFinite {
        /// Value found.
        value: f32,
        /// Where it lies.
        place: Place,
    },
    /// The scale that the values need lies outside the scale type.
    #[error("scale {value:e} needed at {place} does not fit {kind}")]
    ScaleRange {
        /// Scale type, such as `"FP16"`.
        kind: &'static str,
        /// Scale that would be needed.
        value: f64,
        /// First value it would cover.
        place: Place,
    },
}

impl Place {
    /// A place in a plain matrix.
    #[must_use]
    pub fn at(row: u64, column: u64) -> Self {
        Place { part: String::new(), row, column }
    }
}

/// Checks a buffer's length.
pub(crate) fn expect_len(what: &'static str, expected: u64, found: usize) -> Result<(), FormatError> {
    if expected == found as u64 {
        Ok(())
    } else {
        Err(FormatError::Length { what, expected, found: found as u64 })
    }
}

impl FormatError {
    /// The same error with `part` put before the place's own part (used by expert banks).
    #[must_use]
    pub fn within(mut self, part: &str) -> Self {
        match &mut self {
            FormatError::IllegalWord { place, .. }
            | FormatError::NotFinite { place, .. }
            | FormatError::ScaleRange { place, .. } => place.part.insert_str(0, part),
            _ => {}
        }
        self
    }
}
