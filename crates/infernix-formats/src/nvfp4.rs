//! NVFP4: E2M1 codes, an E4M3 scale per 16 values along K, and one FP32 word per matrix that divides (`nvfp4`) or
//! multiplies (`nvfp4_mul`). The two are never turned into each other.
//!
//! A checkpoint's planes are row-major: codes `N*K/2` bytes with the even k in the low nibble, scales `N*K/16` bytes.
//! `block_scale_k16_v1` stores them as they are; `block_scale_k16_m128x4_v1` permutes the scales.
//!
//! Encoders (both for the divisor form; `t = fl32(x * d)` throughout):
//!
//! *absmax*: `d = fl32(2688 / amax)` of the whole parent (1 for zeros); `scale = e4m3(min(fl32(fl32(bmax * d) / 6), 448))`,
//! 0x01 where a non-zero block would get 0; code = E2M1 nearest to `t / scale`, ties to even; a block of zeros has
//! scale 0.
//!
//! *mse*: `d = fl32(1792 / amax)`, so that the largest magnitude is code 4 on the largest scale; of the 126 positive
//! scales the one with the least `sum (t - scale * code)^2`, the smaller one on ties (so 0x01 for a block of zeros).
//! The sum is FP64: eight partial sums over `k mod 8` in rising k, added as `((0+1)+(2+3))+((4+5)+(6+7))`.

use crate::error::{FormatError, Place, expect_len};
use crate::expert_bank::check_block_scales;
use crate::layout::Layout;
use crate::row_planes::{RowPlanes, check_finite, row_count};
use crate::scalar::{E4M3, E4M3_MAX, e2m1_magnitude, e4m3_from_f32};

/// How block scales are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// The block's largest magnitude maps to 6.
    Absmax,
    /// Least squared error over all 126 positive scales.
    Mse,
}

/// Offset of the scale of (row, group of 16) in the 128 x 4 tiled plane; `groups` = K/16, a multiple of 4.
#[inline]
#[must_use]
pub fn m128x4_offset(groups: usize, row: usize, group: usize) -> usize {
    let tile = row / 128 * (groups / 4) + group / 4;
    tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4
}

/// Divisor of a parent whose largest magnitude is `amax`.
///
/// # Errors
/// `amax` so small (below about 8e-36) that the divisor is not finite, or not finite itself.
pub fn divisor(method: Method, amax: f32) -> Result<f32, FormatError> {
    if amax == 0.0 {
        return Ok(1.0);
    }
    let d = match method {
        Method::Absmax => 2688.0,
        Method::Mse => 1792.0,
    } / amax;
    if d.is_finite() && d > 0.0 {
        Ok(d)
    } else {
        Err(FormatError::ScaleRange { kind: "an FP32 divisor", value: f64::from(d), place: Place::at(0, 0) })
    }
}

/// Encodes rows of `k` values (a multiple of 16) with a given divisor; scales come out in the order of `layout`, so
/// `block_scale_k16_m128x4_v1` needs whole groups of 128 rows and K a multiple of 64.
///
/// # Errors
/// A wrong layout or length; NaN or infinity.
pub fn encode(
    layout: Layout,
    method: Method,
    k: usize,
    values: &[f32],
    divisor: f32,
    first_row: u64,
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    let rows = row_count("values to encode", values.len(), k)?;
    check_rows(layout, rows, k)?;
    check_finite(values, k, first_row)?;
    out.reset(values.len() / 2, 0, values.len() / 16);
    let groups = k / 16;
    for (n, (block, codes)) in
        values.as_chunks::<16>().0.iter().zip(out.codes.chunks_exact_mut(8)).enumerate()
    {
        let t = block.map(|x| x * divisor);
        let word = match method {
            Method::Absmax => absmax_scale(&t, block, divisor),
            Method::Mse => mse_scale(&t),
        };
        let s = E4M3[usize::from(word)];
        for (byte, pair) in codes.iter_mut().zip(t.as_chunks::<2>().0) {
            *byte = code(pair[0], s) | (code(pair[1], s) << 4);
        }
        let at = match layout {
            Layout::BlockScaleK16M128x4V1 => m128x4_offset(groups, n / groups, n % groups),
            _ => n,
        };
        out.scales[at] = word;
    }
    out.global.extend_from_slice(&divisor.to_le_bytes());
    Ok(())
}

/// Sign and magnitude of the code nearest to `t / s`. A zero scale belongs to a block of zeros.
#[inline]
fn code(t: f32, s: f32) -> u8 {
    let sign = ((t.to_bits() >> 28) & 8) as u8;
    if s == 0.0 { sign } else { sign | e2m1_magnitude(t.abs(), s) }
}

fn absmax_scale(_t: &[f32; 16], block: &[f32; 16], divisor: f32) -> u8 {
    let bmax = crate::row_planes::amax(block);
    if bmax == 0.0 {
        return 0;
    }
    e4m3_from_f32((bmax * divisor / 6.0).min(E4M3_MAX)).max(1)
}

/// Squared error of a block on scale `s`: nearest E2M1 value for each magnitude, FP64 sum in the documented order.
#[inline]
fn block_error(m: &[f32; 16], s: f32) -> f64 {
    let mut d = [0f32; 16];
    for (d, &m) in d.iter_mut().zip(m) {
        // Steps between the E2M1 magnitudes at the midpoints; which side a tie falls does not change the error.
        let step = |at: f32, by: f32| if m > at * s { by * s } else { 0.0 };
        let v = step(0.25, 0.5)
            + step(0.75, 0.5)
            + step(1.25, 0.5)
            + step(1.75, 0.5)
            + step(2.5, 1.0)
            + step(3.5, 1.0)
            + step(5.0, 2.0);
        *d = v;
    }
    let mut l = [0f64; 8];
    for i in 0..8 {
        let (a, b) = (f64::from(m[i]) - f64::from(d[i]), f64::from(m[i + 8]) - f64::from(d[i + 8]));
        l[i] = a * a + b * b;
    }
    ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]))
}

/// The word among 1..=126 with the least error, the smaller on ties.
///
/// Scales are left out by two bounds that hold for the computed sums too, because subtraction, squaring and adding
/// non-negative terms are monotone under rounding:
/// - `s` loses at least `(a - 6 s)^2` on the largest magnitude `a`;
/// - where `h = s / 2` is a scale and `a <= 7 h`, every value of the grid of `s` up to `6 h` is on the grid of `h`, and
///   values between `6 h` and `7 h` are nearest to `6 h` on both: `h` is never worse, and smaller.
fn mse_scale(t: &[f32; 16]) -> u8 {
    let m = t.map(f32::abs);
    let a = crate::row_planes::amax(t);
    if a == 0.0 {
        return 1;
    }
    let start = e4m3_from_f32((a / 6.0).min(E4M3_MAX)).clamp(1, 126);
    let mut best = start;
    let mut least = block_error(&m, E4M3[usize::from(start)]);
    for word in (1..start).rev() {
        let s = E4M3[usize::from(word)];
        let clip = f64::from(a) - f64::from(6.0 * s);
        if clip > 0.0 && clip * clip > least {
            break;
        }
        let e = block_error(&m, s);
        if e <= least {
            (least, best) = (e, word);
        }
    }
    for word in start + 1..=126 {
        let half = if word >= 16 {
            word - 8
        } else if word % 2 == 0 {
            word / 2
        } else {
            0
        };
        if half > 0 && a <= 7.0 * E4M3[usize::from(half)] {
            if word >= 16 {
                // From here on every scale has its half among the scales.
                break;
            }
            continue;
        }
        let e = block_error(&m, E4M3[usize::from(word)]);
        if e < least {
            (least, best) = (e, word);
        }
    }
    best
}

fn check_rows(layout: Layout, rows: usize, k: usize) -> Result<(), FormatError> {
    let why = match layout {
        Layout::BlockScaleK16V1 if k % 16 == 0 => return Ok(()),
        Layout::BlockScaleK16M128x4V1 if k % 64 == 0 && rows % 128 == 0 => return Ok(()),
        Layout::BlockScaleK16V1 => "K must be a multiple of 16",
        Layout::BlockScaleK16M128x4V1 => "rows must be a multiple of 128 and K of 64",
        _ => "not a layout of NVFP4 matrices",
    };
    Err(FormatError::Shape { layout, format: crate::Format::Nvfp4, shape: vec![rows as u64, k as u64], why })
}

/// Packs source planes of some rows for `layout`: codes as they are, scales checked and put in order.
///
/// # Errors
/// A wrong layout or length; a negative or NaN block scale, named by row and column.
pub fn pack_rows(
    layout: Layout,
    k: usize,
    codes: &[u8],
    scales: &[u8],
    global: f32,
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    let rows = row_count("NVFP4 codes", codes.len() * 2, k)?;
    check_rows(layout, rows, k)?;
    expect_len("block scales", (rows * k / 16) as u64, scales.len())?;
    check_block_scales(scales, k as u64)?;
    out.reset(codes.len(), 0, scales.len());
    out.codes.copy_from_slice(codes);
    match layout {
        Layout::BlockScaleK16M128x4V1 => permute(k / 16, scales, &mut out.scales, Direction::ToTiles),
        _ => out.scales.copy_from_slice(scales),
    }
    out.global.extend_from_slice(&global.to_le_bytes());
    Ok(())
}

/// Row-major scales of some rows from the order of `layout` (codes are row-major in both layouts).
///
/// # Errors
/// A wrong layout or length.
pub fn unpack_scales(layout: Layout, k: usize, stored: &[u8], out: &mut [u8]) -> Result<(), FormatError> {
    let rows = row_count("block scales", stored.len(), k / 16)?;
    check_rows(layout, rows, k)?;
    expect_len("block scales", stored.len() as u64, out.len())?;
    match layout {
        Layout::BlockScaleK16M128x4V1 => permute(k / 16, stored, out, Direction::FromTiles),
        _ => out.copy_from_slice(stored),
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToTiles,
    FromTiles,
}

fn permute(groups: usize, from: &[u8], to: &mut [u8], direction: Direction) {
    if groups == 0 {
        return;
    }
    // Four neighbouring groups of a row are four neighbouring bytes of a tile.
    for row in 0..from.len() / groups {
        for quad in 0..groups / 4 {
            let tiled = m128x4_offset(groups, row, 4 * quad);
            let plain = row * groups + 4 * quad;
            let (a, b) = if direction == Direction::ToTiles { (plain, tiled) } else { (tiled, plain) };
            to[b..b + 4].copy_from_slice(&from[a..a + 4]);
        }
    }
}
