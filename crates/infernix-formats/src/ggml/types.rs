//! Every ggml type id: name, values per block, bytes per block.

use crate::error::FormatError;

/// A tensor type of a GGUF file. Ids that ggml gave up are listed too, so that a file that uses one is refused by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(
    missing_docs,
    reason = "names, ids and sizes are in the table below; docs/gguf.md describes the blocks"
)]
#[non_exhaustive]
pub enum GgmlType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q4_2,
    Q4_3,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
    Iq2Xxs,
    Iq2Xs,
    Iq3Xxs,
    Iq1S,
    Iq4Nl,
    Iq3S,
    Iq2S,
    Iq4Xs,
    I8,
    I16,
    I32,
    I64,
    F64,
    Iq1M,
    Bf16,
    Q4_0_4_4,
    Q4_0_4_8,
    Q4_0_8_8,
    Tq1_0,
    Tq2_0,
    Iq4Nl4_4,
    Iq4Nl4_8,
    Iq4Nl8_8,
    Mxfp4,
    Nvfp4,
    Q1_0,
    Q2_0,
}

/// What a type is good for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// One value a word.
    Plain,
    /// Blocks of weights.
    Block,
    /// Integers, or ggml's own 8-bit activations.
    NoWeight,
    /// Given up by ggml: no file may use it.
    Removed,
}

/// Type, name, values per block, bytes per block, use; in the order of the ids (`enum ggml_type` and `type_traits` of
/// ggml 0.25; sizes of removed types as they last were).
const TABLE: [(GgmlType, &str, u64, u64, Use); 43] = [
    (GgmlType::F32, "F32", 1, 4, Use::Plain),
    (GgmlType::F16, "F16", 1, 2, Use::Plain),
    (GgmlType::Q4_0, "Q4_0", 32, 18, Use::Block),
    (GgmlType::Q4_1, "Q4_1", 32, 20, Use::Block),
    (GgmlType::Q4_2, "Q4_2", 16, 10, Use::Removed),
    (GgmlType::Q4_3, "Q4_3", 16, 12, Use::Removed),
    (GgmlType::Q5_0, "Q5_0", 32, 22, Use::Block),
    (GgmlType::Q5_1, "Q5_1", 32, 24, Use::Block),
    (GgmlType::Q8_0, "Q8_0", 32, 34, Use::Block),
    (GgmlType::Q8_1, "Q8_1", 32, 36, Use::NoWeight),
    (GgmlType::Q2K, "Q2_K", 256, 84, Use::Block),
    (GgmlType::Q3K, "Q3_K", 256, 110, Use::Block),
    (GgmlType::Q4K, "Q4_K", 256, 144, Use::Block),
    (GgmlType::Q5K, "Q5_K", 256, 176, Use::Block),
    (GgmlType::Q6K, "Q6_K", 256, 210, Use::Block),
    (GgmlType::Q8K, "Q8_K", 256, 292, Use::NoWeight),
    (GgmlType::Iq2Xxs, "IQ2_XXS", 256, 66, Use::Block),
    (GgmlType::Iq2Xs, "IQ2_XS", 256, 74, Use::Block),
    (GgmlType::Iq3Xxs, "IQ3_XXS", 256, 98, Use::Block),
    (GgmlType::Iq1S, "IQ1_S", 256, 50, Use::Block),
    (GgmlType::Iq4Nl, "IQ4_NL", 32, 18, Use::Block),
    (GgmlType::Iq3S, "IQ3_S", 256, 110, Use::Block),
    (GgmlType::Iq2S, "IQ2_S", 256, 82, Use::Block),
    (GgmlType::Iq4Xs, "IQ4_XS", 256, 136, Use::Block),
    (GgmlType::I8, "I8", 1, 1, Use::NoWeight),
    (GgmlType::I16, "I16", 1, 2, Use::NoWeight),
    (GgmlType::I32, "I32", 1, 4, Use::NoWeight),
    (GgmlType::I64, "I64", 1, 8, Use::NoWeight),
    (GgmlType::F64, "F64", 1, 8, Use::Plain),
    (GgmlType::Iq1M, "IQ1_M", 256, 56, Use::Block),
    (GgmlType::Bf16, "BF16", 1, 2, Use::Plain),
    (GgmlType::Q4_0_4_4, "Q4_0_4_4", 32, 18, Use::Removed),
    (GgmlType::Q4_0_4_8, "Q4_0_4_8", 32, 18, Use::Removed),
    (GgmlType::Q4_0_8_8, "Q4_0_8_8", 32, 18, Use::Removed),
    (GgmlType::Tq1_0, "TQ1_0", 256, 54, Use::Block),
    (GgmlType::Tq2_0, "TQ2_0", 256, 66, Use::Block),
    (GgmlType::Iq4Nl4_4, "IQ4_NL_4_4", 32, 18, Use::Removed),
    (GgmlType::Iq4Nl4_8, "IQ4_NL_4_8", 32, 18, Use::Removed),
    (GgmlType::Iq4Nl8_8, "IQ4_NL_8_8", 32, 18, Use::Removed),
    (GgmlType::Mxfp4, "MXFP4", 32, 17, Use::Block),
    (GgmlType::Nvfp4, "NVFP4", 64, 36, Use::Block),
    (GgmlType::Q1_0, "Q1_0", 128, 18, Use::Block),
    (GgmlType::Q2_0, "Q2_0", 64, 18, Use::Block),
];

impl GgmlType {
    /// Every type, in the order of the ids.
    pub fn all() -> impl ExactSizeIterator<Item = GgmlType> {
        TABLE.iter().map(|row| row.0)
    }

    /// The type of an id in a GGUF file.
    ///
    /// # Errors
    /// [`FormatError::GgmlId`] for an id that this build does not know.
    pub fn from_id(id: u32) -> Result<Self, FormatError> {
        let row = usize::try_from(id).ok().and_then(|i| TABLE.get(i));
        row.map(|row| row.0).ok_or(FormatError::GgmlId { id, largest: TABLE.len() as u32 - 1 })
    }

    /// Its id in a GGUF file.
    #[must_use]
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Its name, as llama.cpp's documentation spells it (`Q4_K`, `IQ3_S`).
    #[must_use]
    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// Values per block; 1 for plain types.
    #[must_use]
    pub fn block_len(self) -> u64 {
        TABLE[self as usize].2
    }

    /// Bytes per block.
    #[must_use]
    pub fn block_bytes(self) -> u64 {
        TABLE[self as usize].3
    }

    /// Whether it holds weights that can be decoded: F32, F16, BF16, F64 and the 25 block types.
    #[must_use]
    pub fn is_decodable(self) -> bool {
        matches!(TABLE[self as usize].4, Use::Plain | Use::Block)
    }

    /// Whether it holds one floating-point value a word.
    #[must_use]
    pub fn is_plain(self) -> bool {
        TABLE[self as usize].4 == Use::Plain
    }

    /// Whether it holds blocks of weights, which a container stores as `ggml_<type>`.
    #[must_use]
    pub fn is_block(self) -> bool {
        TABLE[self as usize].4 == Use::Block
    }

    /// Whether ggml gave the type up, so that files with it are refused.
    #[must_use]
    pub fn is_removed(self) -> bool {
        TABLE[self as usize].4 == Use::Removed
    }

    /// Bits per value.
    #[must_use]
    pub fn bits(self) -> f64 {
        self.block_bytes() as f64 * 8.0 / self.block_len() as f64
    }

    /// Bytes of a row of `values` values.
    ///
    /// # Errors
    /// [`FormatError::GgmlRow`] if the row is not whole blocks; [`FormatError::Overflow`].
    pub fn row_bytes(self, values: u64) -> Result<u64, FormatError> {
        if values % self.block_len() != 0 {
            return Err(FormatError::GgmlRow { ty: self, values, block: self.block_len() });
        }
        let bytes = (values / self.block_len()).checked_mul(self.block_bytes());
        bytes.ok_or_else(|| FormatError::Overflow { shape: vec![values] })
    }

    /// Bytes of a tensor of `shape` (outermost dimension first, rows last); a scalar `[]` is one value.
    ///
    /// # Errors
    /// As [`GgmlType::row_bytes`].
    pub fn tensor_bytes(self, shape: &[u64]) -> Result<u64, FormatError> {
        let (row, outer) = shape.split_last().map_or((1, shape), |(r, o)| (*r, o));
        let bytes = outer.iter().try_fold(self.row_bytes(row)?, |n, &d| n.checked_mul(d));
        bytes.ok_or_else(|| FormatError::Overflow { shape: shape.to_vec() })
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for GgmlType {
    type Err = FormatError;

    /// Parses a name, in either case.
    fn from_str(name: &str) -> Result<Self, FormatError> {
        TABLE.iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0).ok_or_else(|| {
            FormatError::UnknownName {
                kind: "ggml type",
                name: name.to_owned(),
                known: TABLE.map(|row| row.1).join(", "),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_round_trip() {
        for (id, (ty, name, ..)) in TABLE.iter().enumerate() {
            assert_eq!(ty.id() as usize, id);
            assert_eq!(GgmlType::from_id(id as u32).unwrap(), *ty);
            assert_eq!(name.to_lowercase().parse::<GgmlType>().unwrap(), *ty);
        }
        assert_eq!(GgmlType::from_id(30).unwrap().name(), "BF16");
        assert_eq!(GgmlType::from_id(42).unwrap().name(), "Q2_0");
        let err = GgmlType::from_id(43).unwrap_err().to_string();
        assert!(err.contains("43") && err.contains("42"), "{err}");
        assert!("Q9_K".parse::<GgmlType>().unwrap_err().to_string().contains("Q6_K"));
    }

    #[test]
    fn sizes_are_whole_blocks_without_overflow() {
        assert_eq!(GgmlType::Iq3S.tensor_bytes(&[512, 640, 2560]).unwrap(), 512 * 640 * 10 * 110);
        assert_eq!(GgmlType::Iq4Nl.row_bytes(160).unwrap(), 90);
        assert!(GgmlType::Iq3S.row_bytes(640).is_err());
        assert!(GgmlType::Q8_0.tensor_bytes(&[u64::MAX / 2, 32]).is_err());
        assert!(GgmlType::F64.row_bytes(u64::MAX).is_err());
        assert_eq!(GgmlType::F32.tensor_bytes(&[]).unwrap(), 4);
    }

    #[test]
    fn twenty_nine_types_hold_weights() {
        assert_eq!(GgmlType::all().filter(|t| t.is_decodable()).count(), 29);
        assert_eq!(GgmlType::all().filter(|t| t.is_plain()).count(), 4);
    }
}
