//! Which stored tensors make up a weight, and how they encode it.
//!
//! Decided per weight from suffixes, dtypes and shapes alone; every combination that fits no scheme is an
//! error, because a guess would decode to plausible garbage.

use std::fmt;

use infernix_formats::Format;
use infernix_formats::ggml::GgmlType;

use crate::gguf::names::TiledHeads;
use crate::{Checkpoint, CheckpointError, Dtype, TensorInfo};

/// How a weight is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scheme {
    /// Words of that dtype, without scales.
    Plain(Dtype),
    /// ModelOpt NVFP4: `weight` U8 `[N, K/2]` (low nibble = even column), `weight_scale` F8_E4M3
    /// `[N, K/16]`, `weight_scale_2` F32, a multiplier.
    Nvfp4Multiplier {
        /// Whether there is an `input_scale`; without one the weight is used with 16-bit activations only.
        input_scale: bool,
    },
    /// compressed-tensors NVFP4: `weight_packed` U8 `[N, K/2]`, `weight_scale` F8_E4M3 `[N, K/16]`,
    /// `weight_global_scale` F32, a divisor.
    Nvfp4Divisor {
        /// Whether there is an `input_global_scale`.
        input_scale: bool,
    },
    /// `weight` F8_E4M3 `[N, K]`, one `weight_scale`.
    Fp8Tensor {
        /// Dtype of the scale, F32 or BF16.
        scale: Dtype,
        /// Whether there is an `input_scale`.
        input_scale: bool,
    },
    /// `weight` F8_E4M3 `[N, K]`, `weight_scale` `[N, 1]`.
    Fp8Row {
        /// Dtype of the scales, BF16 or F32.
        scale: Dtype,
        /// Whether there is an `input_scale`.
        input_scale: bool,
    },
    /// `weight` F8_E4M3 `[N, K]`, `weight_scale_inv` `[ceil(N/128), ceil(K/128)]`, multiplied despite its
    /// name.
    Fp8Block128 {
        /// Dtype of the scales, F32 or BF16; BF16 widens to F32 exactly.
        scale: Dtype,
    },
    /// `weight` F8_E4M3 `[N, K]`, `weight_scale` E8M0 (stored as U8) `[N, K/32]`.
    Mxfp8,
    /// Blocks of a GGUF file.
    Ggml(GgmlType),
}

impl Scheme {
    /// The numeric format that holds these words without changing one, `None` for plain dtypes that are no weights. FP8
    /// rows with F32 scales are kept where each scale is a BF16 number, which is seen when they are read.
    pub fn format(self) -> Option<Format> {
        Some(match self {
            Self::Plain(Dtype::Bf16) => Format::Bf16,
            Self::Plain(Dtype::F16) => Format::Fp16,
            Self::Plain(Dtype::F32) => Format::Fp32,
            Self::Nvfp4Multiplier { .. } => Format::Nvfp4Mul,
            Self::Nvfp4Divisor { .. } => Format::Nvfp4,
            Self::Fp8Tensor { .. } => Format::Fp8Tensor,
            Self::Fp8Row { .. } => Format::Fp8Row,
            Self::Fp8Block128 { .. } => Format::Fp8Block128,
            Self::Mxfp8 => Format::Mxfp8,
            Self::Ggml(t) => Format::Ggml(t),
            Self::Plain(_) => return None,
        })
    }

    /// Whether the words need scales to become values.
    pub fn is_quantized(self) -> bool {
        !matches!(self, Self::Plain(_))
    }

    /// Whether the checkpoint gives an activation scale for this weight.
    pub fn has_input_scale(self) -> bool {
        matches!(
            self,
            Self::Nvfp4Multiplier { input_scale: true }
                | Self::Nvfp4Divisor { input_scale: true }
                | Self::Fp8Tensor { input_scale: true, .. }
                | Self::Fp8Row { input_scale: true, .. }
        )
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => write!(f, "{dtype}")?,
            Self::Nvfp4Multiplier { .. } => f.write_str("NVFP4 with a multiplier")?,
            Self::Nvfp4Divisor { .. } => f.write_str("NVFP4 with a divisor")?,
            Self::Fp8Tensor { scale, .. } => write!(f, "FP8 per tensor ({scale} scale)")?,
            Self::Fp8Row { scale, .. } => write!(f, "FP8 per row ({scale} scales)")?,
            Self::Fp8Block128 { scale } => write!(f, "FP8 per 128x128 block ({scale} scales)")?,
            Self::Mxfp8 => f.write_str("MXFP8")?,
            Self::Ggml(t) => write!(f, "GGML {t}")?,
        }
        if self.has_input_scale() { f.write_str(", input scale") } else { Ok(()) }
    }
}

/// Which of a weight's stored tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlaneKind {
    /// The codes, or the plain words.
    Weight,
    /// Block, row or tensor scales beside them.
    Scale,
    /// NVFP4's multiplier or divisor.
    GlobalScale,
    /// The activation's scale.
    InputScale,
}

/// The stored tensors of one weight.
#[derive(Debug, Clone, Copy)]
pub struct Planes<'c> {
    /// Codes, or plain words.
    pub weight: &'c TensorInfo,
    /// `weight_scale` or `weight_scale_inv`.
    pub scale: Option<&'c TensorInfo>,
    /// `weight_scale_2` or `weight_global_scale`.
    pub global_scale: Option<&'c TensorInfo>,
    /// `input_scale` or `input_global_scale`.
    pub input_scale: Option<&'c TensorInfo>,
}

impl<'c> Planes<'c> {
    /// The plane of that kind, if the scheme has it.
    pub fn get(&self, kind: PlaneKind) -> Option<&'c TensorInfo> {
        match kind {
            PlaneKind::Weight => Some(self.weight),
            PlaneKind::Scale => self.scale,
            PlaneKind::GlobalScale => self.global_scale,
            PlaneKind::InputScale => self.input_scale,
        }
    }

    /// All planes there are, codes first.
    pub fn iter(&self) -> impl Iterator<Item = (PlaneKind, &'c TensorInfo)> {
        use PlaneKind::{GlobalScale, InputScale, Scale, Weight};
        let planes = *self;
        [Weight, Scale, GlobalScale, InputScale]
            .into_iter()
            .filter_map(move |k| planes.get(k).map(|t| (k, t)))
    }
}

/// One weight of a checkpoint with the tensors that encode it. Nothing is read until asked for.
#[derive(Debug, Clone)]
pub struct SourceTensor<'c> {
    pub(crate) checkpoint: &'c Checkpoint,
    name: &'c str,
    scheme: Scheme,
    shape: Box<[u64]>,
    planes: Planes<'c>,
}

impl<'c> SourceTensor<'c> {
    /// Its name without `.weight` or `.weight_packed`; parameters stored without a suffix (`A_log`, fused
    /// experts) have their full name.
    pub fn name(&self) -> &'c str {
        self.name
    }

    /// How it is stored.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Logical dimensions: those of the values, not of packed codes.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Rows of the logical matrix: the product of all dimensions but the last; 1 for vectors and scalars.
    pub fn rows(&self) -> u64 {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Values per row: the last dimension; 1 for a scalar.
    pub fn row_len(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The stored tensors.
    pub fn planes(&self) -> &Planes<'c> {
        &self.planes
    }

    /// Where stored words keep an order of columns that the source does not have: blocks of a GGUF file that cross value
    /// heads. Stored column `i` is the source's column `source(i)`; decoding puts values in the source's order.
    pub fn stored_columns(&self) -> Option<TiledHeads> {
        self.checkpoint.view_of(self.planes.weight).and_then(|(v, i)| v.kept_columns(i))
    }

    /// Whether rows or columns are in another order than in the file.
    pub fn is_permuted(&self) -> bool {
        self.checkpoint.view_of(self.planes.weight).is_some_and(|(v, i)| v.is_permuted(i))
    }

    /// Whether the file holds a function of the words (1 + w, -exp(a)), undone when they are read.
    pub fn is_derived(&self) -> bool {
        self.checkpoint.view_of(self.planes.weight).is_some_and(|(v, i)| v.is_derived(i))
    }

    /// Its checkpoint.
    pub fn checkpoint(&self) -> &'c Checkpoint {
        self.checkpoint
    }

    /// The file of one of its tensors, for messages.
    pub(crate) fn file_of(&self, t: &TensorInfo) -> String {
        self.checkpoint.shard_of(t).name.clone()
    }
}

const WEIGHT: &str = ".weight";
const PACKED: &str = ".weight_packed";
/// Suffixes of tensors that belong to a weight.
const PLANES: [&str; 6] = [
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_global_scale",
    ".input_scale",
    ".input_global_scale",
];
/// Tensors of schemes that are not read: beside a weight they change its meaning.
const UNREAD: [&str; 4] = [".weight_zero_point", ".weight_g_idx", ".weight_shape", ".pre_quant_scale"];

/// The planes found beside one weight.
struct Found<'c> {
    scale: Option<&'c TensorInfo>,
    scale_2: Option<&'c TensorInfo>,
    scale_inv: Option<&'c TensorInfo>,
    global: Option<&'c TensorInfo>,
    input: Option<&'c TensorInfo>,
    input_global: Option<&'c TensorInfo>,
    unread: Option<&'c TensorInfo>,
}

impl<'c> Found<'c> {
    /// The first of `planes` that is present, for an error.
    fn refuse(
        &self,
        checkpoint: &Checkpoint,
        weight: &TensorInfo,
        planes: &[Option<&'c TensorInfo>],
    ) -> Result<(), CheckpointError> {
        match planes.iter().chain([&self.unread]).find_map(|p| *p) {
            Some(t) => Err(scheme_error(
                checkpoint,
                t,
                format!("no such tensor beside {} ({} {:?})", weight.name, weight.dtype, weight.shape),
                format!("{} {:?}", t.dtype, t.shape),
            )),
            None => Ok(()),
        }
    }
}

fn scheme_error(checkpoint: &Checkpoint, t: &TensorInfo, expected: String, found: String) -> CheckpointError {
    CheckpointError::Scheme {
        shard: checkpoint.shard_of(t).name.clone(),
        tensor: t.name.to_string(),
        expected,
        found,
    }
}

/// The scheme of a tensor without scales beside it.
fn plain(dtype: Dtype) -> Scheme {
    match dtype {
        Dtype::Ggml(t) => Scheme::Ggml(t),
        dtype => Scheme::Plain(dtype),
    }
}

/// The parent module of a part of a split table, whose scales the parts share: `x` for `x.shard_12`.
pub(crate) fn table_of_part(base: &str) -> Option<&str> {
    let (parent, last) = base.rsplit_once('.')?;
    let number = last.strip_prefix("shard_")?;
    (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then_some(parent)
}

impl Checkpoint {
    /// The weight of that name, with its scheme; `None` where the checkpoint has none. `name` is with or
    /// without `.weight`.
    ///
    /// # Errors
    /// A tensor of the weight is missing or of a wrong dtype or shape, the combination fits no scheme, or the
    /// weight lies in a shard without being in the index.
    pub fn resolve(&self, name: &str) -> Result<Option<SourceTensor<'_>>, CheckpointError> {
        let base = name.strip_suffix(WEIGHT).or_else(|| name.strip_suffix(PACKED)).unwrap_or(name);
        let weight = self.get_concat(base, WEIGHT);
        let packed = self.get_concat(base, PACKED);
        let exact = if base.len() == name.len() { self.get(name) } else { None };
        let mut found = [weight, packed, exact].into_iter().flatten();
        let Some(first) = found.next() else {
            for suffix in [WEIGHT, PACKED, ""] {
                self.refuse_unindexed(base, suffix)?;
            }
            return Ok(None);
        };
        if let Some(second) = found.next() {
            return Err(scheme_error(
                self,
                second,
                format!("one weight named {base}"),
                format!("{} as well", first.name),
            ));
        }
        if exact.is_some() {
            return Ok(Some(SourceTensor {
                checkpoint: self,
                name: &first.name,
                scheme: plain(first.dtype),
                shape: first.shape.clone(),
                planes: Planes { weight: first, scale: None, global_scale: None, input_scale: None },
            }));
        }
        self.resolve_weight(first, packed.is_some()).map(Some)
    }

    /// Every weight of the checkpoint, in the order of names. Tensors that are no weight's scales are
    /// weights themselves, with [`Scheme::Plain`].
    ///
    /// # Errors
    /// The first of [`Checkpoint::resolve_each`].
    pub fn resolve_all(&self) -> Result<Vec<SourceTensor<'_>>, CheckpointError> {
        self.resolve_each().collect()
    }

    /// Like [`Checkpoint::resolve_all`], one by one: for a report that goes on after an error. Scales that
    /// belong to no weight are errors, too.
    pub fn resolve_each(&self) -> impl Iterator<Item = Result<SourceTensor<'_>, CheckpointError>> {
        self.tensors_by_name().filter_map(|t| {
            let name = &*t.name;
            let plane =
                PLANES.iter().chain(&UNREAD).find_map(|s| name.strip_suffix(s).map(|base| (base, *s)));
            let Some((base, suffix)) = plane else {
                // Through `resolve`, so that two weights of one name are seen.
                return self.resolve(name).transpose();
            };
            if self.get_concat(base, WEIGHT).is_some() || self.get_concat(base, PACKED).is_some() {
                return None;
            }
            if suffix != ".input_scale" && self.get_concat(base, ".shard_0.weight").is_some() {
                return None;
            }
            Some(Err(CheckpointError::Orphan {
                shard: self.shard_of(t).name.clone(),
                tensor: name.to_owned(),
                base: base.to_owned(),
            }))
        })
    }

    fn find_planes(&self, base: &str) -> Found<'_> {
        let table = table_of_part(base);
        let own = |suffix| self.get_concat(base, suffix);
        // Parts of a split table share the scales that their parent has.
        let shared = |suffix| own(suffix).or_else(|| self.get_concat(table?, suffix));
        Found {
            scale: shared(".weight_scale"),
            scale_2: shared(".weight_scale_2"),
            scale_inv: own(".weight_scale_inv"),
            global: shared(".weight_global_scale"),
            input: own(".input_scale"),
            input_global: own(".input_global_scale"),
            unread: UNREAD.iter().find_map(|s| own(s)),
        }
    }

    fn resolve_weight<'c>(
        &'c self,
        weight: &'c TensorInfo,
        packed: bool,
    ) -> Result<SourceTensor<'c>, CheckpointError> {
        let suffix = if packed { PACKED } else { WEIGHT };
        let base: &'c str = &weight.name[..weight.name.len() - suffix.len()];
        let f = self.find_planes(base);
        let missing = |what: &str| -> CheckpointError {
            match self.refuse_unindexed(base, what) {
                Err(e) => e,
                Ok(()) => CheckpointError::MissingPlane {
                    shard: self.shard_of(weight).name.clone(),
                    weight: weight.name.to_string(),
                    dtype: weight.dtype,
                    shape: weight.shape.to_vec(),
                    missing: format!("{base}{what}"),
                },
            }
        };
        let build = |scheme, shape: Box<[u64]>, scale, global_scale, input_scale| SourceTensor {
            checkpoint: self,
            name: base,
            scheme,
            shape,
            planes: Planes { weight, scale, global_scale, input_scale },
        };
        if packed || weight.dtype == Dtype::U8 {
            if weight.dtype != Dtype::U8 {
                let expected = "U8, two E2M1 codes a byte".to_owned();
                return Err(scheme_error(self, weight, expected, weight.dtype.to_string()));
            }
            let (global, input, suffix) = if packed {
                f.refuse(self, weight, &[f.scale_2, f.scale_inv, f.input])?;
                (f.global, f.input_global, ".weight_global_scale")
            } else {
                f.refuse(self, weight, &[f.global, f.scale_inv, f.input_global])?;
                (f.scale_2, f.input, ".weight_scale_2")
            };
            let scale = f.scale.ok_or_else(|| missing(".weight_scale"))?;
            let global = global.ok_or_else(|| missing(suffix))?;
            let shape = self.check_nvfp4(weight, scale)?;
            self.check_scalar(global, &[Dtype::F32])?;
            if let Some(input) = input {
                self.check_scalar(input, &[Dtype::F32])?;
            }
            let input_scale = input.is_some();
            let scheme = if packed {
                Scheme::Nvfp4Divisor { input_scale }
            } else {
                Scheme::Nvfp4Multiplier { input_scale }
            };
            return Ok(build(scheme, shape, Some(scale), Some(global), input));
        }
        if weight.dtype != Dtype::F8E4m3 {
            f.refuse(self, weight, &[f.scale, f.scale_2, f.scale_inv, f.global, f.input, f.input_global])?;
            return Ok(build(plain(weight.dtype), weight.shape.clone(), None, None, None));
        }

        let (n, k) = self.matrix(weight)?;
        let blocks = [n.div_ceil(128), k.div_ceil(128)];
        if let Some(input) = f.input {
            self.check_scalar(input, &[Dtype::F32, Dtype::Bf16])?;
        }
        let input_scale = f.input.is_some();
        if let Some(scale) = f.scale_inv {
            f.refuse(self, weight, &[f.scale, f.scale_2, f.global, f.input, f.input_global])?;
            self.check_dtype(scale, &[Dtype::F32, Dtype::Bf16])?;
            if *scale.shape != blocks {
                let expected = format!("{blocks:?}, one scale per 128x128 block of {:?}", weight.shape);
                return Err(scheme_error(self, scale, expected, format!("{:?}", scale.shape)));
            }
            let scheme = Scheme::Fp8Block128 { scale: scale.dtype };
            return Ok(build(scheme, weight.shape.clone(), Some(scale), None, None));
        }
        f.refuse(self, weight, &[f.scale_2, f.global, f.input_global])?;
        let scale = f.scale.ok_or_else(|| match self.refuse_unindexed(base, ".weight_scale_inv") {
            Err(e) => e,
            Ok(()) => missing(".weight_scale"),
        })?;
        let scheme = match scale.dtype {
            Dtype::U8 | Dtype::F8E8m0 => {
                let expected = [n, k / 32];
                if !k.is_multiple_of(32) || *scale.shape != expected {
                    let expected = format!("{expected:?}, one scale per 32 columns of {:?}", weight.shape);
                    return Err(scheme_error(self, scale, expected, format!("{:?}", scale.shape)));
                }
                f.refuse(self, weight, &[f.input])?;
                Scheme::Mxfp8
            }
            _ => {
                self.check_dtype(scale, &[Dtype::F32, Dtype::Bf16, Dtype::U8])?;
                let dtype = scale.dtype;
                match &*scale.shape {
                    [] | [1] => Scheme::Fp8Tensor { scale: dtype, input_scale },
                    &[rows, 1] | &[rows] if rows == n => Scheme::Fp8Row { scale: dtype, input_scale },
                    // compressed-tensors calls block scales weight_scale as well.
                    shape if *shape == blocks => {
                        f.refuse(self, weight, &[f.input])?;
                        Scheme::Fp8Block128 { scale: dtype }
                    }
                    other => {
                        let expected =
                            format!("[] or [1] (per tensor), [{n}, 1] (per row) or {blocks:?} (per block)");
                        return Err(scheme_error(self, scale, expected, format!("{other:?}")));
                    }
                }
            }
        };
        Ok(build(scheme, weight.shape.clone(), Some(scale), None, f.input))
    }

    fn matrix(&self, t: &TensorInfo) -> Result<(u64, u64), CheckpointError> {
        match *t.shape {
            [n, k] => Ok((n, k)),
            _ => Err(scheme_error(self, t, "[rows, columns]".to_owned(), format!("{:?}", t.shape))),
        }
    }

    fn check_dtype(&self, t: &TensorInfo, allowed: &[Dtype]) -> Result<(), CheckpointError> {
        if allowed.contains(&t.dtype) {
            return Ok(());
        }
        let expected = allowed.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or ");
        Err(scheme_error(self, t, expected, t.dtype.to_string()))
    }

    fn check_scalar(&self, t: &TensorInfo, allowed: &[Dtype]) -> Result<(), CheckpointError> {
        self.check_dtype(t, allowed)?;
        if t.is_scalar() {
            return Ok(());
        }
        Err(scheme_error(self, t, "one value, [] or [1]".to_owned(), format!("{:?}", t.shape)))
    }

    /// Checks the codes and block scales of an NVFP4 matrix; its logical shape.
    fn check_nvfp4(&self, weight: &TensorInfo, scale: &TensorInfo) -> Result<Box<[u64]>, CheckpointError> {
        let (n, half) = self.matrix(weight)?;
        if half % 8 != 0 {
            let expected = "columns in whole blocks of 16 (8 bytes)".to_owned();
            return Err(scheme_error(self, weight, expected, format!("{:?}", weight.shape)));
        }
        self.check_dtype(scale, &[Dtype::F8E4m3])?;
        if *scale.shape != [n, half / 8] {
            let expected = format!("[{n}, {}], one scale per 16 columns", half / 8);
            return Err(scheme_error(self, scale, expected, format!("{:?}", scale.shape)));
        }
        // The file holds `half` bytes a row, so that twice as many columns do not overflow in practice.
        let k = half.checked_mul(2).ok_or_else(|| {
            scheme_error(self, weight, "fewer columns".to_owned(), format!("{:?}", weight.shape))
        })?;
        Ok([n, k].into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbered_parts_share_their_parents_scales() {
        assert_eq!(table_of_part("a.ngram_embedding.shard_12"), Some("a.ngram_embedding"));
        assert_eq!(table_of_part("a.ngram_embedding.shard_"), None);
        assert_eq!(table_of_part("a.ngram_embedding.shard_x"), None);
        assert_eq!(table_of_part("shard_1"), None);
        assert_eq!(table_of_part("a.experts.1"), None);
    }

    #[test]
    fn only_exact_formats_are_named() {
        assert_eq!(Scheme::Plain(Dtype::I64).format(), None);
        assert_eq!(Scheme::Ggml(GgmlType::Q4K).format(), Some(Format::Ggml(GgmlType::Q4K)));
        assert_eq!(Scheme::Fp8Row { scale: Dtype::Bf16, input_scale: false }.format(), Some(Format::Fp8Row));
        assert_eq!(Scheme::Fp8Block128 { scale: Dtype::Bf16 }.format(), Some(Format::Fp8Block128));
        assert_eq!(Scheme::Nvfp4Divisor { input_scale: true }.format(), Some(Format::Nvfp4));
        assert_eq!(Scheme::Plain(Dtype::U8).format(), None);
    }

    #[test]
    fn schemes_print_what_differs() {
        assert_eq!(
            Scheme::Nvfp4Multiplier { input_scale: true }.to_string(),
            "NVFP4 with a multiplier, input scale"
        );
        assert_eq!(Scheme::Plain(Dtype::Bf16).to_string(), "BF16");
    }
}
