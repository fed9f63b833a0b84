//! Names of the numeric formats: what a stored word means.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use crate::error::FormatError;
use crate::ggml::GgmlType;

/// A numeric format. Names are those of the container (`Display`, `FromStr`); their meaning never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Format {
    /// `bf16`: BF16 words.
    Bf16,
    /// `fp16`: IEEE half words.
    Fp16,
    /// `fp32`: IEEE single words.
    Fp32,
    /// `int32`: two's-complement 32-bit words.
    Int32,
    /// `int64`: two's-complement 64-bit words.
    Int64,
    /// `q4_g64_fp16`: signed 4-bit codes, one FP16 scale per 64 along K.
    Q4G64,
    /// `q5_g64_fp16`: signed 5-bit codes, one FP16 scale per 64 along K.
    Q5G64,
    /// `q6_g64_fp16`: signed 6-bit codes, one FP16 scale per 64 along K.
    Q6G64,
    /// `q8_g32_fp16`: signed 8-bit codes (-128 excluded), one FP16 scale per 32 along K.
    Q8G32,
    /// `nvfp4`: E2M1 codes, E4M3 scale per 16 along K, FP32 divisor per matrix.
    Nvfp4,
    /// `nvfp4_mul`: E2M1 codes, E4M3 scale per 16 along K, FP32 multiplier per matrix.
    Nvfp4Mul,
    /// `fp8_e4m3fn_row_bf16`: E4M3 codes, BF16 scale per row.
    Fp8Row,
    /// `fp8_e4m3fn_tensor_f32`: E4M3 codes, one FP32 scale.
    Fp8Tensor,
    /// `fp8_e4m3fn_block128_f32`: E4M3 codes, FP32 scale per 128 x 128 tile (edge tiles truncated).
    Fp8Block128,
    /// `mxfp8_e4m3fn_e8m0`: E4M3 codes, E8M0 scale per 32 along K.
    Mxfp8,
    /// `ggml_<type>`: blocks of a GGUF file, word for word; a block type.
    Ggml(GgmlType),
    /// `ggml_<gate>+<up>+<down>`: an expert bank whose three matrices are of different types. Made by
    /// [`Format::ggml_experts`], so that equal types have one name only.
    GgmlExperts(GgmlType, GgmlType, GgmlType),
}

/// Parameters of a groupwise integer format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupSpec {
    /// Values per scale along K.
    pub group: usize,
    /// Smallest code.
    pub qmin: i32,
    /// Largest code; the absmax scale maps the largest magnitude here.
    pub qmax: i32,
    /// Bytes of the high-bit plane per group.
    pub high_bytes: usize,
}

impl Format {
    /// Every format with a fixed name, in the order of the documentation; the `ggml_` formats are beside them.
    pub const ALL: [Format; 15] = [
        Format::Bf16,
        Format::Fp16,
        Format::Fp32,
        Format::Int32,
        Format::Int64,
        Format::Q4G64,
        Format::Q5G64,
        Format::Q6G64,
        Format::Q8G32,
        Format::Nvfp4,
        Format::Nvfp4Mul,
        Format::Fp8Row,
        Format::Fp8Tensor,
        Format::Fp8Block128,
        Format::Mxfp8,
    ];

    /// The container's name of this format.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Format::Bf16 => "bf16",
            Format::Fp16 => "fp16",
            Format::Fp32 => "fp32",
            Format::Int32 => "int32",
            Format::Int64 => "int64",
            Format::Q4G64 => "q4_g64_fp16",
            Format::Q5G64 => "q5_g64_fp16",
            Format::Q6G64 => "q6_g64_fp16",
            Format::Q8G32 => "q8_g32_fp16",
            Format::Nvfp4 => "nvfp4",
            Format::Nvfp4Mul => "nvfp4_mul",
            Format::Fp8Row => "fp8_e4m3fn_row_bf16",
            Format::Fp8Tensor => "fp8_e4m3fn_tensor_f32",
            Format::Fp8Block128 => "fp8_e4m3fn_block128_f32",
            Format::Mxfp8 => "mxfp8_e4m3fn_e8m0",
            Format::Ggml(..) | Format::GgmlExperts(..) => self.interned(),
        }
    }

    /// Names of ggml formats are put together once and kept: there are 25 types, and 25^3 expert banks at most.
    fn interned(self) -> &'static str {
        static NAMES: OnceLock<Mutex<HashMap<Format, &'static str>>> = OnceLock::new();
        let lower = |t: GgmlType| t.name().to_ascii_lowercase();
        let mut names = NAMES.get_or_init(Mutex::default).lock().unwrap_or_else(|e| e.into_inner());
        names.entry(self).or_insert_with(|| {
            let name = match self {
                Format::Ggml(t) => format!("ggml_{}", lower(t)),
                Format::GgmlExperts(a, b, c) => format!("ggml_{}+{}+{}", lower(a), lower(b), lower(c)),
                other => other.name().to_owned(),
            };
            Box::leak(name.into_boxed_str())
        })
    }

    /// The format of an expert bank with these types of gate, up and down.
    #[must_use]
    pub fn ggml_experts([gate, up, down]: [GgmlType; 3]) -> Self {
        if gate == up && up == down { Format::Ggml(gate) } else { Format::GgmlExperts(gate, up, down) }
    }

    /// Types of gate, up and down of an expert bank in a ggml format; `None` for other formats.
    #[must_use]
    pub fn expert_types(self) -> Option<[GgmlType; 3]> {
        match self {
            Format::Ggml(t) => Some([t; 3]),
            Format::GgmlExperts(a, b, c) => Some([a, b, c]),
            _ => None,
        }
    }

    /// Bytes of one word of a direct format (`bf16`, `fp16`, `fp32`, `int32`, `int64`); `None` for coded formats.
    #[must_use]
    pub fn direct_bytes(self) -> Option<u64> {
        match self {
            Format::Bf16 | Format::Fp16 => Some(2),
            Format::Fp32 | Format::Int32 => Some(4),
            Format::Int64 => Some(8),
            _ => None,
        }
    }

    /// Group size, code range and high-bit bytes of a groupwise integer format; `None` for the others.
    #[must_use]
    pub fn group_spec(self) -> Option<GroupSpec> {
        match self {
            Format::Q4G64 => Some(GroupSpec { group: 64, qmin: -8, qmax: 7, high_bytes: 0 }),
            Format::Q5G64 => Some(GroupSpec { group: 64, qmin: -16, qmax: 15, high_bytes: 8 }),
            Format::Q6G64 => Some(GroupSpec { group: 64, qmin: -32, qmax: 31, high_bytes: 16 }),
            Format::Q8G32 => Some(GroupSpec { group: 32, qmin: -127, qmax: 127, high_bytes: 0 }),
            _ => None,
        }
    }

    /// Bits per weight of a large matrix without padding: codes plus scales that grow with the matrix.
    #[must_use]
    pub fn ideal_bits(self) -> f64 {
        match self {
            Format::Bf16 | Format::Fp16 => 16.0,
            Format::Fp32 | Format::Int32 => 32.0,
            Format::Int64 => 64.0,
            Format::Q4G64 => 4.25,
            Format::Q5G64 => 5.25,
            Format::Q6G64 => 6.25,
            Format::Q8G32 => 8.5,
            Format::Nvfp4 | Format::Nvfp4Mul => 4.5,
            Format::Fp8Row | Format::Fp8Tensor => 8.0,
            Format::Fp8Block128 => 8.0 + 32.0 / 16384.0,
            Format::Mxfp8 => 8.25,
            Format::Ggml(t) => t.bits(),
            Format::GgmlExperts(a, b, c) => (a.bits() + b.bits() + c.bits()) / 3.0,
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Format {
    type Err = FormatError;

    fn from_str(name: &str) -> Result<Self, FormatError> {
        let fixed = Format::ALL.into_iter().find(|f| f.name() == name);
        fixed.or_else(|| ggml_from_name(name)).ok_or_else(|| FormatError::UnknownName {
            kind: "format",
            name: name.to_owned(),
            known: format!("{}, ggml_<type of blocks>", Format::ALL.map(Format::name).join(", ")),
        })
    }
}

fn ggml_from_name(name: &str) -> Option<Format> {
    let types = name.strip_prefix("ggml_")?.split('+').map(|t| t.parse::<GgmlType>().ok());
    let types: Vec<GgmlType> = types.collect::<Option<_>>()?;
    let format = match types[..] {
        [t] => Format::Ggml(t),
        [a, b, c] => Format::ggml_experts([a, b, c]),
        _ => return None,
    };
    // One spelling each: lower case, and equal types written once.
    (types.iter().all(|t| t.is_block()) && format.name() == name).then_some(format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for format in Format::ALL {
            assert_eq!(format.name().parse::<Format>().unwrap(), format);
        }
        for format in [
            Format::Ggml(GgmlType::Iq3S),
            Format::ggml_experts([GgmlType::Iq3S, GgmlType::Iq3S, GgmlType::Iq4Nl]),
            Format::ggml_experts([GgmlType::Q8_0; 3]),
        ] {
            assert_eq!(format.name().parse::<Format>().unwrap(), format);
        }
        assert_eq!(Format::Ggml(GgmlType::Q4K).name(), "ggml_q4_k");
        assert_eq!(
            Format::ggml_experts([GgmlType::Iq3S, GgmlType::Iq3S, GgmlType::Iq4Nl]).name(),
            "ggml_iq3_s+iq3_s+iq4_nl"
        );
        for bad in [
            "ggml_",
            "ggml_f32",
            "ggml_Q8_0",
            "ggml_q8_0+q8_0+q8_0",
            "ggml_q8_0+q4_0",
            "ggml_q8_k",
            "ggml_q4_2",
        ] {
            assert!(bad.parse::<Format>().is_err(), "{bad}");
        }
        let err = "q3_g64".parse::<Format>().unwrap_err().to_string();
        assert!(err.contains("q3_g64") && err.contains("q4_g64_fp16"), "{err}");
    }
}
