//! Bit-level model of the FP4 tile product (kernels/tile.cuh with TILE_FP4), for hardware that is not at hand.
//!
//! The model takes the same bytes (a record, packed activations), makes the same registers lane by lane, and multiplies them as
//! `mma.m16n8k64` of kind mxf4nvf4 is documented to: registers, scale bytes and which lane gives them. Products and sums are exact
//! here; the hardware's sum rounds, within K 2^-24 sum |w x| if it keeps FP32.

use super::num::{e2m1, e4m3};

/// Packed activations of one row, as `pack_fp4` lays out a tile of `tokens` rows: per chunk of 64 k two planes of 16 bytes a token,
/// then four scale bytes a token.
pub struct Packed {
    bytes: Vec<u8>,
    tokens: usize,
}

/// E2M1 code of a doubled value.
fn code(doubled: i32) -> u8 {
    let m = match doubled.abs() {
        m @ 0..=4 => m as u8,
        6 => 5,
        8 => 6,
        _ => 7,
    };
    m | if doubled < 0 { 8 } else { 0 }
}

impl Packed {
    /// Rows of (doubled codes, scale words) of `k` values; the tile is padded to 8 rows and 64 k with zeros.
    pub fn new(rows: &[(Vec<i32>, Vec<u8>)], k: usize) -> Self {
        let (tokens, chunks) = (rows.len().div_ceil(8) * 8, k.div_ceil(64));
        let mut bytes = vec![0u8; tokens * chunks * 36];
        for (t, (codes, scales)) in rows.iter().enumerate() {
            for (i, c) in codes.iter().enumerate() {
                let base = i / 64 * tokens * 36;
                let (half, word, within) = (i % 64 / 32, i % 32 / 8, i % 8);
                let nibble = if within < 4 { 2 * within } else { 2 * (within - 4) + 1 };
                let at = base + (half * tokens + t) * 16 + word * 4 + nibble / 2;
                bytes[at] |= code(*c) << (4 * (nibble % 2));
            }
            for (b, s) in scales.iter().enumerate() {
                bytes[b / 4 * tokens * 36 + tokens * 32 + t * 4 + b % 4] = *s;
            }
        }
        Packed { bytes, tokens }
    }

    /// As bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn word(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Registers of a warp for one product: A of 16 rows, B of 8 columns, their scales.
struct Warp {
    a: [[u32; 4]; 32],
    b: [[u32; 2]; 32],
    sfa: [u32; 32],
    sfb: [u32; 32],
}

/// The instruction: d[row][column] += sum over k.
fn mma(w: &Warp, d: &mut [[f64; 8]; 16]) {
    let nibble = |r: u32, i: usize| f64::from(e2m1((r >> (4 * i)) as u8 & 15));
    let scale = |r: u32, block: usize| f64::from(e4m3((r >> (8 * block)) as u8));
    for (row, out) in d.iter_mut().enumerate() {
        for (col, o) in out.iter_mut().enumerate() {
            // Of a row's four lanes the first gives the scales of row g, the second those of g + 8; of a column's, the first.
            let sa = w.sfa[4 * (row % 8) + row / 8];
            let sb = w.sfb[4 * col];
            for q in 0..4 {
                for half in 0..2 {
                    let a = w.a[4 * (row % 8) + q][2 * half + row / 8];
                    let b = w.b[4 * col + q][half];
                    let block = 2 * half + q / 2;
                    let s: f64 = (0..8).map(|i| nibble(a, i) * nibble(b, i)).sum();
                    *o += s * scale(sa, block) * scale(sb, block);
                }
            }
        }
    }
}

/// Sums of 16 rows (row group `group` of the matrix of `k` columns at `base` of the record) with columns `8 j ..` of a tile.
pub fn tile(rec: &[u8], base: usize, group: usize, k: usize, x: &Packed, j: usize) -> [[f64; 8]; 16] {
    let mut d = [[0f64; 8]; 16];
    let units = k / 16;
    for c in 0..k.div_ceil(64) {
        let mut w = Warp { a: [[0; 4]; 32], b: [[0; 2]; 32], sfa: [0; 32], sfb: [0; 32] };
        let chunk = &x.bytes[c * x.tokens * 36..];
        for lane in 0..32 {
            let (g, q) = (lane / 4, lane % 4);
            for h in 0..2 {
                // Units past K hold anything: here ones, which their zero scale must hide.
                let unit = 4 * c + 2 * h + q / 2;
                let at = base + (group * units + unit) * 144 + (q & 1) * 64 + 4 * g;
                let (lo, hi) =
                    if unit < units { (word(rec, at), word(rec, at + 32)) } else { (u32::MAX, u32::MAX) };
                w.a[lane][2 * h] = (lo & 0x0f0f_0f0f) | (hi & 0x0f0f_0f0f) << 4;
                w.a[lane][2 * h + 1] = (lo >> 4 & 0x0f0f_0f0f) | (hi & 0xf0f0_f0f0);
                w.b[lane][h] = word(chunk, (h * x.tokens + 8 * j + g) * 16 + 4 * q);
            }
            for b in (0..4).filter(|b| 4 * c + b < units) {
                let s = rec[base + (group * units + 4 * c + b) * 144 + 128 + g + 8 * (q & 1)];
                w.sfa[lane] |= u32::from(s) << (8 * b);
            }
            w.sfb[lane] = word(chunk, x.tokens * 32 + (8 * j + g) * 4);
        }
        mma(&w, &mut d);
    }
    d
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{Rng, w4a4};

    #[test]
    fn the_fp4_data_path_gives_the_exact_sums() {
        let mut rng = Rng::new(7);
        for (h, i, tokens) in [(64usize, 32usize, 5usize), (80, 48, 17), (256, 128, 8), (16, 16, 1)] {
            let rec = w4a4::random_record(&mut rng, h, i);
            let x: Vec<Vec<u16>> = (0..tokens).map(|_| rng.bf16(h, 1.0)).collect();
            let rows: Vec<w4a4::A4> = x.iter().map(|r| w4a4::quantise(r, 0.02, false)).collect();
            let packed = Packed::new(&rows.iter().map(w4a4::A4::words).collect::<Vec<_>>(), h);
            for group in 0..2 * i / 16 {
                for j in 0..tokens.div_ceil(8) {
                    let d = tile(&rec, 0, group, h, &packed, j);
                    for (r, out) in d.iter().enumerate() {
                        let w = w4a4::row(&rec, 0, group * 16 + r, h);
                        for (col, got) in out.iter().enumerate().filter(|(c, _)| 8 * j + c < tokens) {
                            let want: f64 =
                                w.iter().zip(rows[8 * j + col].values()).map(|(a, b)| a * b).sum();
                            assert_eq!(
                                *got,
                                want,
                                "{h}/{i}: row {r} of group {group}, token {}",
                                8 * j + col
                            );
                        }
                    }
                }
            }
        }
    }
}
