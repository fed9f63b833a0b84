//! Numeric formats of model weights and the layouts that store them: exact sizes, encoding, decoding, word checks.
//!
//! No I/O and no unsafe code. Everything works on caller buffers and on row ranges or single expert records, so a
//! conversion can stream. `docs/formats.md` describes every format and layout byte by byte.
#![forbid(unsafe_code)]

mod encoded;
mod error;
pub mod expert_bank;
mod format;
pub mod fp8;
pub mod ggml;
pub mod groupwise;
mod layout;
pub mod mxfp8;
pub mod nvfp4;
mod row_planes;
pub mod scalar;

pub use encoded::{Encoded, Rows};
pub use error::{FormatError, Place};
pub use format::{Format, GroupSpec};
pub use layout::{Layout, Plane, PlaneRole, RowShape, encoded_size, planes, row_planes};
pub use row_planes::{RowPlanes, amax};

/// Version of the encoders: it changes when any encoder may give other words for the same values.
pub const ENCODER_VERSION: u32 = 1;
