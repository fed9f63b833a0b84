//! NVFP4 blocks whose second scale lies in a tensor of its own, as the planes that a checkpoint keeps apart: codes with the
//! even column in the low nibble, E4M3 block scales, one FP32 multiplier. The same words in another order.
//!
//! A block is 64 values in 36 bytes: four scales of 16 values each, then 8 bytes for each 16 values, the first eight in the
//! low nibbles.

/// Values of a block.
pub(super) const VALUES: u64 = 64;
/// Bytes of a block.
pub(super) const BYTES: u64 = 36;
/// In place of a scale tensor's number: the scale is 1 (llama.cpp's converter leaves those out).
pub(super) const NONE: u32 = u32::MAX;

/// A plane of the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plane {
    /// Two codes a byte.
    Codes,
    /// One E4M3 word per 16 values.
    Scales,
}

impl Plane {
    /// Bytes of a row of `k` values.
    pub(super) fn row_bytes(self, k: u64) -> u64 {
        match self {
            Plane::Codes => k / 2,
            Plane::Scales => k / 16,
        }
    }

    /// Appends the plane's bytes of a block.
    pub(super) fn take(self, block: &[u8], out: &mut Vec<u8>) {
        let (scales, codes) = block.split_at(4);
        if self == Plane::Scales {
            out.extend_from_slice(scales);
            return;
        }
        for sub in codes.chunks_exact(8) {
            let code = |i: usize| if i < 8 { sub[i] & 15 } else { sub[i - 8] >> 4 };
            out.extend((0..8).map(|j| code(2 * j) | code(2 * j + 1) << 4));
        }
    }
}

/// A tensor's name without `.weight`.
pub(super) fn base(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// Names of the activation scales of a layer's stacks of experts.
pub(super) fn siblings(tensor: &str) -> impl Iterator<Item = String> {
    let block = tensor.rsplit_once(".ffn_").map_or("", |(block, _)| block).to_owned();
    ["gate", "up", "down", "gate_up"].into_iter().map(move |m| format!("{block}.ffn_{m}_exps.input_scale"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_of_a_block_are_its_words_in_order() {
        // Value i of sub-block s has code (i + s) % 16.
        let mut block = vec![10, 11, 12, 13];
        for s in 0..4u8 {
            block.extend((0..8u8).map(|j| ((j + s) % 16) | (((j + 8 + s) % 16) << 4)));
        }
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        Plane::Codes.take(&block, &mut codes);
        Plane::Scales.take(&block, &mut scales);
        assert_eq!(scales, [10, 11, 12, 13]);
        for (i, byte) in codes.iter().enumerate() {
            let (s, v) = (i / 8, 2 * (i % 8));
            assert_eq!(usize::from(byte & 15), (v + s) % 16);
            assert_eq!(usize::from(byte >> 4), (v + 1 + s) % 16);
        }
    }
}
