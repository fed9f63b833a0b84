//! From a rule and a source scheme to format, layout, method and proof.

use infernix_checkpoint::{Scheme, SourceTensor};
use infernix_formats::{Format, Layout};

use crate::ConvertError;
use crate::plan::Proof;
use crate::recipe::{Method, Rule, Target};
use crate::sources::{scheme_matches, scheme_name};

/// How a weight is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Storage {
    pub(crate) format: Format,
    pub(crate) layout: Layout,
    pub(crate) method: Method,
    pub(crate) proof: Proof,
}

impl Storage {
    /// The same for a weight that is read in another order, or computed back from what the file holds.
    pub(crate) fn of(mut self, weight: &SourceTensor<'_>) -> Self {
        self.proof = match self.proof {
            Proof::Identical | Proof::Widened | Proof::Permuted if weight.is_derived() => Proof::Reencoded,
            Proof::Identical if weight.is_permuted() => Proof::Permuted,
            proof => proof,
        };
        self
    }

    /// Whether rows of different weights may share an object.
    pub(crate) fn fuses(&self) -> bool {
        self.format.direct_bytes().is_some()
            || self.format.group_spec().is_some()
            || matches!(self.format, Format::Fp8Row | Format::Mxfp8 | Format::Ggml(_))
    }
}

/// The layout that a format has unless a recipe says otherwise.
pub(crate) fn usual_layout(format: Format, bank: bool) -> Layout {
    match format {
        Format::Nvfp4 | Format::Nvfp4Mul if bank => Layout::Nvfp4ExpertRg16V1,
        Format::GgmlExperts(..) => Layout::GgmlExpertV1,
        Format::Ggml(_) if bank => Layout::GgmlExpertV1,
        Format::Ggml(_) => Layout::GgmlRowsV1,
        Format::Fp8Block128 if bank => Layout::Fp8ExpertBlock128V1,
        Format::Nvfp4 | Format::Nvfp4Mul => Layout::BlockScaleK16V1,
        Format::Fp8Row => Layout::RowScaleV1,
        Format::Fp8Tensor => Layout::TensorScaleV1,
        Format::Fp8Block128 => Layout::Block128ScaleV1,
        Format::Mxfp8 => Layout::RowScaleK32V1,
        f if f.group_spec().is_some() => Layout::RowSplitK128V1,
        _ => Layout::ContiguousLeV1,
    }
}

/// Decides how `parameter` with source `scheme` is stored under `rule`.
pub(crate) fn decide(
    parameter: &str,
    file: &str,
    tensor: &str,
    scheme: Scheme,
    rule: &Rule,
) -> Result<Storage, ConvertError> {
    decide_as(parameter, file, tensor, scheme, scheme.format(), rule, false)
}

/// As [`decide`] where the words together have another format than one of them. `bank`: routed experts with one source
/// tensor per matrix, which may become records.
pub(crate) fn decide_as(
    parameter: &str,
    file: &str,
    tensor: &str,
    scheme: Scheme,
    own: Option<Format>,
    rule: &Rule,
    bank: bool,
) -> Result<Storage, ConvertError> {
    let mismatch = |expected: String, advice: &'static str| ConvertError::Scheme {
        file: file.to_owned(),
        tensor: tensor.to_owned(),
        expected,
        found: scheme.to_string(),
        advice,
    };
    let own = own.ok_or_else(|| {
        mismatch("a floating-point or quantized weight".into(), "this is no weight of this model")
    })?;
    let name = scheme_name(scheme).unwrap_or_default();
    if !rule.require.is_empty() && !rule.require.iter().any(|r| scheme_matches(r, name)) {
        return Err(mismatch(
            format!("{} ({} asks for it)", rule.require.join(" or "), rule.origin()),
            "use a recipe for this checkpoint, or `auto`",
        ));
    }
    let format = match rule.target {
        Target::Stored => own,
        Target::Format(f) => f,
    };
    let layout = rule.layout.unwrap_or_else(|| usual_layout(format, bank));
    if !layout.stores(format) {
        let reason = format!("layout {layout} does not store format {format}, which the source has");
        return Err(ConvertError::NoLayout { parameter: parameter.to_owned(), reason });
    }
    let default = if format == own {
        Method::Stored
    } else if format == Format::Fp32 && matches!(own, Format::Bf16 | Format::Fp16) {
        Method::Widen
    } else if format.group_spec().is_some() {
        Method::Absmax
    } else if format == Format::Nvfp4 && !matches!(own, Format::Nvfp4Mul) && rule.method.is_some() {
        Method::Nvfp4Mse
    } else if format == Format::Fp8Row {
        Method::RowMaxabs
    } else {
        // A direct format that would lose bits, or another coded format: only by name.
        Method::Stored
    };
    let mut method = rule.method.unwrap_or(default);
    // Equal formats need no rounding, and widening what is already wide is storing.
    if format == own && matches!(method, Method::Widen | Method::Cast) {
        method = Method::Stored;
    }
    if method == Method::Widen && !(format == Format::Fp32 && matches!(own, Format::Bf16 | Format::Fp16)) {
        return Err(mismatch(format!("a format that widens to {format}"), "use method \"cast\" to round"));
    }
    if method == Method::Stored && format != own {
        return Err(mismatch(
            format!("{format} ({} stores it word for word)", rule.origin()),
            "use a recipe for this checkpoint, or name a method that re-quantizes",
        ));
    }
    let proof = match method {
        Method::Widen => Proof::Widened,
        m if m.is_lossy() => Proof::Requantized,
        _ if layout.is_bank() || layout == Layout::BlockScaleK16M128x4V1 => Proof::Permuted,
        _ => Proof::Identical,
    };
    Ok(Storage { format, layout, method, proof })
}
