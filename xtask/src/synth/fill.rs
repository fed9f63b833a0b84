//! Deterministic legal words. Each tensor has its own stream, keyed by seed and name, so that the words do
//! not depend on the order of writing or on the other options.

/// Increment of splitmix64.
pub(crate) const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finalizer of splitmix64.
pub(crate) fn mix(mut v: u64) -> u64 {
    v = (v ^ (v >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    v = (v ^ (v >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    v ^ (v >> 31)
}

/// What a tensor is filled with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fill {
    /// BF16, uniform between two bounds.
    Bf16 { low: f32, high: f32 },
    /// Packed E2M1 codes: every byte is legal.
    Codes4,
    /// E4M3 codes, never NaN.
    Codes8,
    /// E4M3 block scales 0.5 to 1.875, without sign.
    Scales8,
    /// One F32, `value` times 1 to 1.25. `key` names the stream where several tensors share their value.
    F32 { value: f32, key: String },
    /// I64 words.
    I64(Vec<u64>),
}

/// A stream of words of one tensor.
pub(crate) struct Stream<'f> {
    fill: &'f Fill,
    state: u64,
}

impl<'f> Stream<'f> {
    pub(crate) fn new(fill: &'f Fill, seed: u64, name: &str) -> Self {
        let key = if let Fill::F32 { key, .. } = fill { key } else { name };
        // FNV-1a of the name; the mixing makes streams independent.
        let hash = key
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        Self { fill, state: mix(hash ^ mix(seed.wrapping_add(GAMMA))) }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GAMMA);
        mix(self.state)
    }

    /// Fills the next bytes. All calls but the last must be for a multiple of 8 bytes.
    pub(crate) fn fill(&mut self, out: &mut [u8]) {
        match self.fill {
            Fill::Bf16 { low, high } => {
                let (low, step) = (*low, (high - low) / 65_536.0);
                for four in out.chunks_mut(8) {
                    let mut bits = self.next();
                    for word in four.chunks_mut(2) {
                        let value = low + step * (bits & 0xffff) as f32;
                        bits >>= 16;
                        // Truncation keeps the value inside the bounds' magnitudes.
                        word.copy_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
                    }
                }
            }
            Fill::Codes4 => self.bytes(out, |w| w),
            // NaN is 0x7f with either sign: its last bit is cleared. The carry-free test looks at all 8 bytes.
            Fill::Codes8 => self.bytes(out, |w| {
                let low7 = w & 0x7f7f_7f7f_7f7f_7f7f;
                let nan = (low7 + 0x0101_0101_0101_0101) & 0x8080_8080_8080_8080;
                w & !(nan >> 7)
            }),
            Fill::Scales8 => self.bytes(out, |w| (w & 0x0f0f_0f0f_0f0f_0f0f) | 0x3030_3030_3030_3030),
            Fill::F32 { value, .. } => {
                let jitter = 1.0 + (self.next() >> 40) as f32 / (1u64 << 26) as f32;
                out.copy_from_slice(&(value * jitter).to_le_bytes());
            }
            Fill::I64(words) => {
                for (o, w) in out.chunks_exact_mut(8).zip(words) {
                    o.copy_from_slice(&w.to_le_bytes());
                }
            }
        }
    }

    fn bytes(&mut self, out: &mut [u8], legal: impl Fn(u64) -> u64) {
        for eight in out.chunks_mut(8) {
            let word = legal(self.next()).to_le_bytes();
            eight.copy_from_slice(&word[..eight.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(fill: &Fill, n: usize) -> Vec<u8> {
        let mut out = vec![0; n];
        Stream::new(fill, 1, "t").fill(&mut out);
        out
    }

    #[test]
    fn every_word_is_legal() {
        let codes = bytes(&Fill::Codes8, 1 << 16);
        assert!(codes.iter().all(|c| c & 0x7f != 0x7f));
        // All 254 others occur.
        assert_eq!((0..=255u8).filter(|c| codes.contains(c)).count(), 254);
        assert!(bytes(&Fill::Scales8, 4096).iter().all(|s| (0x30..0x40).contains(s)));
        for word in bytes(&Fill::Bf16 { low: -0.5, high: 0.25 }, 4096).chunks_exact(2) {
            let v = f32::from_bits(u32::from(u16::from_le_bytes([word[0], word[1]])) << 16);
            assert!((-0.5..=0.25).contains(&v), "{v}");
        }
    }

    #[test]
    fn words_do_not_depend_on_the_size_of_the_calls() {
        for fill in [Fill::Codes4, Fill::Codes8, Fill::Scales8, Fill::Bf16 { low: 0.0, high: 1.0 }] {
            let whole = bytes(&fill, 1001 * 2);
            let mut parts = vec![0; whole.len()];
            let mut stream = Stream::new(&fill, 1, "t");
            parts.chunks_mut(24).for_each(|c| stream.fill(c));
            assert_eq!(whole, parts);
            let mut other = vec![0; whole.len()];
            Stream::new(&fill, 2, "t").fill(&mut other);
            assert_ne!(whole, other);
        }
    }

    #[test]
    fn shared_keys_share_their_value() {
        let fill = |key: &str| Fill::F32 { value: 0.5, key: key.to_owned() };
        let (mut a, mut b) = ([0; 4], [0; 4]);
        let shared = fill("gate_up");
        Stream::new(&shared, 1, "gate").fill(&mut a);
        Stream::new(&shared, 1, "up").fill(&mut b);
        assert_eq!(a, b);
        let v = f32::from_le_bytes(a);
        assert!((0.5..=0.625).contains(&v));
    }
}
