//! The block types that models are mostly made of, taken apart in loops that the compiler vectorises. Codes, scales and
//! offsets are those of `formats::ggml::split`, bit for bit, which stays the oracle and serves all other types.

use super::super::isa::per_isa;
use infernix_formats::ggml::{GgmlType, IQ4_LEVELS};
use infernix_formats::scalar::f16_to_f32;

/// Points of IQ3_S, four codes each, in the bytes of a word; filled from the oracle.
static IQ3_S: std::sync::LazyLock<Box<[u32; 512]>> = std::sync::LazyLock::new(|| {
    let mut points = Box::new([0u32; 512]);
    // A block whose numbers are 64 points in a row, without signs, scale 1.
    for first in (0..512usize).step_by(64) {
        let mut block = [0u8; 110];
        block[1] = 0x3C;
        for i in 0..64 {
            block[2 + i] = (first + i) as u8;
            block[66 + i / 8] |= (((first + i) >> 8) as u8) << (i % 8);
        }
        let (mut codes, mut scales) = ([0f32; 256], [0f32; 8]);
        let split = infernix_formats::ggml::split(GgmlType::Iq3S, &block, &mut codes, &mut scales, &mut []);
        debug_assert!(split.is_ok());
        for (point, codes) in points[first..first + 64].iter_mut().zip(codes.chunks_exact(4)) {
            *point = u32::from_le_bytes([codes[0] as u8, codes[1] as u8, codes[2] as u8, codes[3] as u8]);
        }
    }
    points
});

/// For each byte of eight signs, bytes of ones where the sign is minus.
static MINUS: [u64; 256] = {
    let mut out = [0u64; 256];
    let mut i = 0;
    while i < 256 {
        let mut bit = 0;
        while bit < 8 {
            if (i >> bit) & 1 == 1 {
                out[i] |= 0xFF << (8 * bit);
            }
            bit += 1;
        }
        i += 1;
    }
    out
};

fn half(b: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([b[at], b[at + 1]]))
}

#[inline(always)]
fn widen(codes: &[i8], out: &mut [f32]) {
    for (o, c) in out.iter_mut().zip(codes) {
        *o = f32::from(*c);
    }
}

/// Whether [`unpack`] knows a type.
pub(super) fn knows(ty: GgmlType) -> bool {
    use GgmlType::{Iq3S, Iq4Nl, Q4K, Q5K, Q6K, Q8_0};
    matches!(ty, Q8_0 | Q4K | Q5K | Q6K | Iq4Nl | Iq3S)
}

per_isa! {
    /// Takes the whole blocks of a row apart; the slices have the lengths that `split` asks for.
    pub(super) fn unpack(ty: GgmlType, row: &[u8], codes: &mut [f32], scales: &mut [f32], offsets: &mut [f32]) {
        match ty {
            GgmlType::Q8_0 => {
                for ((b, codes), scale) in row.chunks_exact(34).zip(codes.chunks_exact_mut(32)).zip(scales) {
                    *scale = half(b, 0);
                    for (o, q) in codes.iter_mut().zip(&b[2..34]) {
                        *o = f32::from(*q as i8);
                    }
                }
            }
            GgmlType::Iq4Nl => {
                for ((b, codes), scale) in row.chunks_exact(18).zip(codes.chunks_exact_mut(32)).zip(scales) {
                    *scale = half(b, 0);
                    let mut q = [0i8; 32];
                    for (i, byte) in b[2..18].iter().enumerate() {
                        q[i] = IQ4_LEVELS[usize::from(byte & 15)];
                        q[i + 16] = IQ4_LEVELS[usize::from(byte >> 4)];
                    }
                    widen(&q, codes);
                }
            }
            GgmlType::Q4K | GgmlType::Q5K => {
                let (size, nibbles) = if ty == GgmlType::Q4K { (144, 16) } else { (176, 48) };
                let blocks = row.chunks_exact(size).zip(codes.chunks_exact_mut(256));
                let parts = scales.chunks_exact_mut(8).zip(offsets.chunks_exact_mut(8));
                for ((b, codes), (scales, offsets)) in blocks.zip(parts) {
                    let (d, dmin) = (half(b, 0), half(b, 2));
                    let p = &b[4..16];
                    for j in 0..8 {
                        let (scale, minimum) = if j < 4 {
                            (p[j] & 63, p[j + 4] & 63)
                        } else {
                            ((p[j + 4] & 15) | (p[j - 4] >> 6) << 4, (p[j + 4] >> 4) | (p[j] >> 6) << 4)
                        };
                        scales[j] = d * f32::from(scale);
                        offsets[j] = -(dmin * f32::from(minimum));
                    }
                    let mut q = [0i8; 256];
                    for (pair, bytes) in b[nibbles..nibbles + 128].chunks_exact(32).enumerate() {
                        for (m, byte) in bytes.iter().enumerate() {
                            q[64 * pair + m] = (byte & 15) as i8;
                            q[64 * pair + 32 + m] = (byte >> 4) as i8;
                        }
                    }
                    if ty == GgmlType::Q5K {
                        for (sub, q) in q.chunks_exact_mut(32).enumerate() {
                            for (q, high) in q.iter_mut().zip(&b[16..48]) {
                                *q |= (((high >> sub) & 1) << 4) as i8;
                            }
                        }
                    }
                    widen(&q, codes);
                }
            }
            GgmlType::Q6K => {
                let blocks = row.chunks_exact(210).zip(codes.chunks_exact_mut(256));
                for ((b, codes), scales) in blocks.zip(scales.chunks_exact_mut(16)) {
                    let d = half(b, 208);
                    for (scale, s) in scales.iter_mut().zip(&b[192..208]) {
                        *scale = d * f32::from(*s as i8);
                    }
                    let mut q = [0i8; 256];
                    for (h, q) in q.chunks_exact_mut(128).enumerate() {
                        let (low, high) = (&b[64 * h..64 * h + 64], &b[128 + 32 * h..160 + 32 * h]);
                        for m in 0..32 {
                            let (a, c, top) = (low[m], low[m + 32], high[m]);
                            q[m] = ((a & 15) | (top & 3) << 4) as i8 - 32;
                            q[m + 32] = ((c & 15) | ((top >> 2) & 3) << 4) as i8 - 32;
                            q[m + 64] = ((a >> 4) | ((top >> 4) & 3) << 4) as i8 - 32;
                            q[m + 96] = ((c >> 4) | (top >> 6) << 4) as i8 - 32;
                        }
                    }
                    widen(&q, codes);
                }
            }
            _ => {
                let points = &**IQ3_S;
                let blocks = row.chunks_exact(110).zip(codes.chunks_exact_mut(256));
                for ((b, codes), scales) in blocks.zip(scales.chunks_exact_mut(8)) {
                    let d = half(b, 0);
                    for (j, scale) in scales.iter_mut().enumerate() {
                        let s = (b[106 + j / 2] >> (4 * (j % 2))) & 15;
                        *scale = d * (1.0 + 2.0 * f32::from(s));
                    }
                    let mut q = [0u8; 256];
                    for (i, q) in q.chunks_exact_mut(8).enumerate() {
                        let high = usize::from(b[66 + i / 4] >> (2 * (i % 4)));
                        let first = points[usize::from(b[2 + 2 * i]) | (high & 1) << 8];
                        let second = points[usize::from(b[3 + 2 * i]) | (high & 2) << 7];
                        let word = u64::from(first) | u64::from(second) << 32;
                        // -p is !p + 1 in each byte; points are above 0, so no byte carries into the next.
                        let minus = MINUS[usize::from(b[74 + i])];
                        let word = (word ^ minus) + (minus & 0x0101_0101_0101_0101);
                        q.copy_from_slice(&word.to_le_bytes());
                    }
                    for (o, q) in codes.iter_mut().zip(&q) {
                        *o = f32::from(*q as i8);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::isa::Isa;
    use super::*;
    use infernix_formats::ggml;

    #[test]
    fn parts_are_the_oracles_on_every_tier() {
        let mut state = 3u64;
        for ty in GgmlType::all().filter(|t| knows(*t)) {
            let blocks = 9;
            let bytes: Vec<u8> = (0..blocks * ty.block_bytes())
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    // Exponent fields of scales stay small, so that none is NaN.
                    (state >> 33) as u8 & 0xFB
                })
                .collect();
            let (n, g) = ((blocks * ty.block_len()) as usize, ggml::group(ty));
            let offsets = if ggml::has_offset(ty) { n / g } else { 0 };
            let empty = || (vec![0f32; n], vec![0f32; n / g], vec![0f32; offsets]);
            let mut want = empty();
            if ggml::split(ty, &bytes, &mut want.0, &mut want.1, &mut want.2).is_err() {
                panic!("{ty}: the oracle refuses the bytes");
            }
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            for isa in Isa::testable() {
                let mut got = empty();
                unpack(isa, ty, &bytes, &mut got.0, &mut got.1, &mut got.2);
                assert_eq!(bits(&got.0), bits(&want.0), "{ty} codes, {isa}");
                assert_eq!(bits(&got.1), bits(&want.1), "{ty} scales, {isa}");
                assert_eq!(bits(&got.2), bits(&want.2), "{ty} offsets, {isa}");
            }
        }
    }

    /// How much faster rows are taken apart than by the oracle, in one run. Figures alone: `--ignored --nocapture`.
    #[test]
    #[ignore = "prints figures"]
    #[expect(clippy::print_stderr, reason = "figures go to the terminal")]
    fn ratio_to_the_oracle() {
        let isa = Isa::detect();
        for ty in GgmlType::all().filter(|t| knows(*t)) {
            let (k, g) = (4096usize, ggml::group(ty));
            let row = vec![0x21u8; ty.row_bytes(k as u64).map_or(0, |n| n as usize)];
            let offsets = if ggml::has_offset(ty) { k / g } else { 0 };
            let (mut c, mut s, mut o) = (vec![0f32; k], vec![0f32; k / g], vec![0f32; offsets]);
            // The best of several: other work on the machine only ever adds.
            let mut best = [f64::MAX; 2];
            for _ in 0..30 {
                let start = std::time::Instant::now();
                for _ in 0..50 {
                    let _ = ggml::split(ty, std::hint::black_box(&row), &mut c, &mut s, &mut o);
                }
                best[0] = best[0].min(start.elapsed().as_secs_f64());
                let start = std::time::Instant::now();
                for _ in 0..50 {
                    unpack(isa, ty, std::hint::black_box(&row), &mut c, &mut s, &mut o);
                }
                best[1] = best[1].min(start.elapsed().as_secs_f64());
            }
            let rate = |seconds: f64| (50 * k) as f64 / seconds / 1e9;
            eprintln!(
                "{ty} on {isa}: {:.2} and {:.2} values a nanosecond, ratio {:.1}",
                rate(best[0]),
                rate(best[1]),
                best[0] / best[1]
            );
        }
    }
}
