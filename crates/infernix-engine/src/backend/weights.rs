//! How weights reach a backend: stored words plus what they are for.

use infernix_formats::{Format, Layout};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Bytes of one stored object; shared with the map they come from.
pub type Bytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Width of activations entering a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// 16 bits: as they are.
    A16,
    /// int8 per 32 values, `s = fl32(amax / 127)`, nearest even.
    A8,
    /// E2M1 per 16 values with the calibrated input scale (canonical W4A4).
    A4,
}

/// The options of decisions.md A: what the artifact says, or one override.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationPolicy {
    /// 4 bits for routed NVFP4 experts with input scales where the artifact's `default_expert_activation` says so, else 16.
    #[default]
    Artifact,
    /// `--a16-activations`.
    A16,
    /// `--a8-activations`.
    A8,
    /// `--a4-activations`.
    A4,
}

/// Where an object's bytes lie in a file, for readers with their own I/O.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRange {
    /// The file.
    pub path: Arc<Path>,
    /// First byte.
    pub offset: u64,
}

/// A contiguous run of rows of one stored object.
#[derive(Clone)]
pub struct WeightPart {
    /// Numeric format.
    pub format: Format,
    /// Byte layout.
    pub layout: Layout,
    /// Shape of the whole object: `[rows, K]`, `[rows]`, or as stored.
    pub shape: Vec<u64>,
    /// The whole object.
    pub bytes: Bytes,
    /// The same bytes in one file, where they are.
    pub file: Option<FileRange>,
    /// Rows of the object that belong to the weight, counted over all axes but the last (a vector is one row).
    pub rows: Range<u64>,
}

/// A weight: the concatenation of parts by rows.
#[derive(Clone)]
pub struct WeightData {
    /// Logical shape.
    pub shape: Vec<u64>,
    /// Parts in order; their rows add up to `shape[0]`.
    pub parts: Vec<WeightPart>,
}

/// What a weight is for.
#[derive(Clone, Debug)]
pub struct WeightSpec {
    /// Logical name, for messages.
    pub name: String,
    /// Activation width of products with it.
    pub activation: Activation,
    /// Calibrated input scale of an NVFP4 linear for `A4`: a multiplier or a divisor, as the weight's format.
    pub input_scale: Option<f32>,
}

/// Stored experts of one layer.
#[derive(Clone)]
pub enum ExpertData {
    /// One bank of per-expert records.
    Bank(WeightPart),
    /// Rank-2 parents: `[E * 2I, H]` expert-major, gate rows then up rows; and `[E * H, I]`.
    Parents {
        /// Gate and up.
        gate_up: WeightData,
        /// Down.
        down: WeightData,
    },
}

/// What a bank of experts is.
#[derive(Clone, Debug)]
pub struct ExpertSpec {
    /// Logical name, for messages.
    pub name: String,
    /// Number of experts E.
    pub experts: usize,
    /// H.
    pub hidden: usize,
    /// I.
    pub intermediate: usize,
    /// Arithmetic.
    pub activation: Activation,
    /// `[E]` of calibrated input scales of gate, up, down.
    pub input_scales: Option<Vec<[f32; 3]>>,
}
