//! Element types of stored tensors.

use std::fmt;

use infernix_formats::ggml::GgmlType;

/// Element type of a stored tensor, or the type of its blocks. Every type that safetensors knows is listed, so that a file which holds
/// one that no scheme uses still opens and can be inspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names say it; widths are in `bits`")]
#[non_exhaustive]
pub enum Dtype {
    Bool,
    F4,
    F6E2m3,
    F6E3m2,
    U8,
    I8,
    F8E5m2,
    F8E4m3,
    F8E8m0,
    F8E4m3Fnuz,
    F8E5m2Fnuz,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
    /// Blocks of a GGUF file.
    Ggml(GgmlType),
}

/// Every dtype with its name in a safetensors header and its width in bits.
const TABLE: [(Dtype, &str, u64); 22] = [
    (Dtype::Bool, "BOOL", 8),
    (Dtype::F4, "F4", 4),
    (Dtype::F6E2m3, "F6_E2M3", 6),
    (Dtype::F6E3m2, "F6_E3M2", 6),
    (Dtype::U8, "U8", 8),
    (Dtype::I8, "I8", 8),
    (Dtype::F8E5m2, "F8_E5M2", 8),
    (Dtype::F8E4m3, "F8_E4M3", 8),
    (Dtype::F8E8m0, "F8_E8M0", 8),
    (Dtype::F8E4m3Fnuz, "F8_E4M3FNUZ", 8),
    (Dtype::F8E5m2Fnuz, "F8_E5M2FNUZ", 8),
    (Dtype::I16, "I16", 16),
    (Dtype::U16, "U16", 16),
    (Dtype::F16, "F16", 16),
    (Dtype::Bf16, "BF16", 16),
    (Dtype::I32, "I32", 32),
    (Dtype::U32, "U32", 32),
    (Dtype::F32, "F32", 32),
    (Dtype::C64, "C64", 64),
    (Dtype::F64, "F64", 64),
    (Dtype::I64, "I64", 64),
    (Dtype::U64, "U64", 64),
];

impl Dtype {
    /// The dtype of a safetensors header's name, `None` if the name is unknown.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|(_, n, _)| *n == name).map(|(d, _, _)| *d)
    }

    /// Its name in a safetensors header.
    pub fn name(self) -> &'static str {
        if let Self::Ggml(t) = self {
            return t.name();
        }
        self.row().1
    }

    /// Width of one element in bits; 4 and 6 for the packed types. Blocks have no width of an element: 8, a byte of them.
    pub fn bits(self) -> u64 {
        self.row().2
    }

    fn row(self) -> &'static (Self, &'static str, u64) {
        TABLE.iter().find(|r| r.0 == self).unwrap_or(&TABLE[4])
    }

    /// Bytes of a tensor of `shape`, `None` on overflow or where the elements do not fill whole bytes.
    pub fn byte_len(self, shape: &[u64]) -> Option<u64> {
        if let Self::Ggml(t) = self {
            return t.tensor_bytes(shape).ok();
        }
        let count = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
        let bits = count.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for (d, name, _) in &TABLE {
            assert_eq!(d.name(), *name);
            assert_eq!(Dtype::from_name(name), Some(*d));
        }
        assert_eq!(Dtype::from_name("bf16"), None);
    }

    #[test]
    fn names_and_widths_agree_with_the_safetensors_crate() {
        for (d, name, bits) in TABLE {
            let theirs: safetensors::Dtype = serde_json::from_value(serde_json::Value::String(name.into()))
                .expect("a name the crate knows");
            assert_eq!(theirs.bitsize() as u64, bits, "{d}");
            assert_eq!(theirs.to_string(), name);
        }
    }

    #[test]
    fn byte_len_refuses_overflow_and_half_bytes() {
        assert_eq!(Dtype::Bf16.byte_len(&[3, 4]), Some(24));
        assert_eq!(Dtype::F32.byte_len(&[]), Some(4));
        assert_eq!(Dtype::F32.byte_len(&[0, u64::MAX]), Some(0));
        assert_eq!(Dtype::F4.byte_len(&[3]), None);
        assert_eq!(Dtype::I64.byte_len(&[u64::MAX, 2]), None);
        assert_eq!(Dtype::I64.byte_len(&[1 << 62]), None);
    }
}
