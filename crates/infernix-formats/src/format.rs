//! Names of the numeric formats: what a stored word means.

use crate::error::FormatError;

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
    /// Every format, in the order of the documentation.
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
        Format::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| FormatError::UnknownName {
            kind: "format",
            name: name.to_owned(),
            known: Format::ALL.map(Format::name).join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for format in Format::ALL {
            assert_eq!(format.name().parse::<Format>().unwrap(), format);
        }
        let err = "q3_g64".parse::<Format>().unwrap_err().to_string();
        assert!(err.contains("q3_g64") && err.contains("q4_g64_fp16"), "{err}");
    }
}
