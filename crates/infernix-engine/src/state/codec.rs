//! KV formats: how a head row of keys or values is stored.
//!
//! Every codec is a pure function of the row, so appends are the same bytes through any kernel and call width.

use half::{bf16, f16};

/// A KV format by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvFormat {
    /// BF16 bits of K and V.
    #[default]
    Bf16,
    /// 8-bit codes with an FP16 scale per 64 values, keys rotated.
    Int8,
    /// FP32, for `--boundaries fp32`.
    F32,
}

impl KvFormat {
    /// The codec.
    pub fn codec(self) -> Box<dyn KvCodec> {
        match self {
            KvFormat::Bf16 => Box::new(Bf16Codec),
            KvFormat::Int8 => Box::new(Int8Codec),
            KvFormat::F32 => Box::new(F32Codec),
        }
    }

    /// The format of that name on the command line.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "bf16" => Some(KvFormat::Bf16),
            "int8" => Some(KvFormat::Int8),
            "f32" => Some(KvFormat::F32),
            _ => None,
        }
    }
}

/// Encoder and decoder of head rows.
pub trait KvCodec: Send + Sync {
    /// The format.
    fn format(&self) -> KvFormat;
    /// Bytes of one head row of `d` values, K and V alike.
    fn row_bytes(&self, d: usize) -> usize;
    /// Keys are stored as `R k` with the fixed rotation [`hadamard`]; a query must be rotated before it meets them.
    fn rotates_keys(&self) -> bool {
        false
    }
    /// Encodes a key row.
    fn encode_k(&self, x: &[f32], out: &mut [u8]);
    /// Encodes a value row.
    fn encode_v(&self, x: &[f32], out: &mut [u8]);
    /// The exact stored key row (rotated if [`KvCodec::rotates_keys`]).
    fn decode_k(&self, bytes: &[u8], out: &mut [f32]);
    /// The exact stored value row.
    fn decode_v(&self, bytes: &[u8], out: &mut [f32]);
}

/// The bits of K and V. The original stores V as FP16; ours keeps BF16 (decisions.md A).
#[derive(Debug)]
pub struct Bf16Codec;

impl KvCodec for Bf16Codec {
    fn format(&self) -> KvFormat {
        KvFormat::Bf16
    }
    fn row_bytes(&self, d: usize) -> usize {
        2 * d
    }
    fn encode_k(&self, x: &[f32], out: &mut [u8]) {
        for (o, v) in out.chunks_exact_mut(2).zip(x) {
            o.copy_from_slice(&bf16::from_f32(*v).to_bits().to_le_bytes());
        }
    }
    fn encode_v(&self, x: &[f32], out: &mut [u8]) {
        self.encode_k(x, out);
    }
    fn decode_k(&self, bytes: &[u8], out: &mut [f32]) {
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
        }
    }
    fn decode_v(&self, bytes: &[u8], out: &mut [f32]) {
        self.decode_k(bytes, out);
    }
}

/// FP32 rows.
#[derive(Debug)]
pub struct F32Codec;

impl KvCodec for F32Codec {
    fn format(&self) -> KvFormat {
        KvFormat::F32
    }
    fn row_bytes(&self, d: usize) -> usize {
        4 * d
    }
    fn encode_k(&self, x: &[f32], out: &mut [u8]) {
        for (o, v) in out.chunks_exact_mut(4).zip(x) {
            o.copy_from_slice(&v.to_le_bytes());
        }
    }
    fn encode_v(&self, x: &[f32], out: &mut [u8]) {
        self.encode_k(x, out);
    }
    fn decode_k(&self, bytes: &[u8], out: &mut [f32]) {
        for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        }
    }
    fn decode_v(&self, bytes: &[u8], out: &mut [f32]) {
        self.decode_k(bytes, out);
    }
}

/// Normalised Sylvester-Hadamard rotation in place, FP32, strides 1, 2, 4, ... (the order of spec/engine.md 5: five
/// lane strides, then register strides of dims l + 32 r). The length is a power of two.
pub fn hadamard(x: &mut [f32]) {
    let n = x.len();
    debug_assert!(n.is_power_of_two());
    let mut stride = 1;
    while stride < n {
        for block in x.chunks_exact_mut(2 * stride) {
            let (lo, hi) = block.split_at_mut(stride);
            for (a, b) in lo.iter_mut().zip(hi) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
    let scale = (1.0 / (n as f64).sqrt()) as f32;
    for v in x {
        *v *= scale;
    }
}

/// `int8` G64 (spec/engine.md 5): per 64 values `scale = fp16(amax / 127)`, `code = clamp(rne(x * (1 / f32(scale))), +-127)`;
/// a row is its codes, then its FP16 scales. Keys are rotated first.
#[derive(Debug)]
pub struct Int8Codec;

impl Int8Codec {
    const GROUP: usize = 64;

    fn encode(x: &[f32], out: &mut [u8]) {
        let (codes, scales) = out.split_at_mut(x.len());
        for (g, group) in x.chunks(Self::GROUP).enumerate() {
            let amax = group.iter().fold(0f32, |m, v| m.max(v.abs()));
            let scale = f16::from_f32(amax / 127.0);
            scales[2 * g..2 * g + 2].copy_from_slice(&scale.to_bits().to_le_bytes());
            let s = scale.to_f32();
            let inv = if s > 0.0 { 1.0 / s } else { 0.0 };
            for (c, v) in codes[g * Self::GROUP..].iter_mut().zip(group) {
                *c = ((v * inv).round_ties_even().clamp(-127.0, 127.0) as i8) as u8;
            }
        }
    }
}

impl KvCodec for Int8Codec {
    fn format(&self) -> KvFormat {
        KvFormat::Int8
    }
    fn row_bytes(&self, d: usize) -> usize {
        d + 2 * d.div_ceil(Self::GROUP)
    }
    fn rotates_keys(&self) -> bool {
        true
    }
    fn encode_k(&self, x: &[f32], out: &mut [u8]) {
        let mut rotated = x.to_vec();
        hadamard(&mut rotated);
        Self::encode(&rotated, out);
    }
    fn encode_v(&self, x: &[f32], out: &mut [u8]) {
        Self::encode(x, out);
    }
    fn decode_k(&self, bytes: &[u8], out: &mut [f32]) {
        let (codes, scales) = bytes.split_at(out.len());
        for (i, (o, c)) in out.iter_mut().zip(codes).enumerate() {
            let g = 2 * (i / Self::GROUP);
            let s = f16::from_bits(u16::from_le_bytes([scales[g], scales[g + 1]])).to_f32();
            *o = f32::from(*c as i8) * s;
        }
    }
    fn decode_v(&self, bytes: &[u8], out: &mut [f32]) {
        self.decode_k(bytes, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut s = seed;
        (0..n)
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (s >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect()
    }

    #[test]
    fn hadamard_is_its_own_inverse() {
        let x = noise(256, 1);
        let mut y = x.clone();
        hadamard(&mut y);
        hadamard(&mut y);
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-6));
    }

    #[test]
    fn int8_values_stay_within_half_a_step() {
        let x = noise(256, 2);
        let c = Int8Codec;
        let mut bytes = vec![0; c.row_bytes(256)];
        assert_eq!(bytes.len(), 264);
        c.encode_v(&x, &mut bytes);
        let mut y = vec![0.0; 256];
        c.decode_v(&bytes, &mut y);
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() <= 0.51 / 127.0));
        c.encode_k(&[0.0; 256], &mut bytes);
        c.decode_k(&bytes, &mut y);
        assert!(y.iter().all(|v| *v == 0.0));
    }
}
