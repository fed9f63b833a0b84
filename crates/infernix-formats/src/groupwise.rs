//! Groupwise integers `q4/q5/q6_g64_fp16` and `q8_g32_fp16` in `row_split_k128_v1`: value = code x FP16 scale.
//!
//! Rules of the encoders, word for word reproducible:
//!
//! *absmax*: `s = fp16(fl32(amax / qmax))`, 2^-24 where that rounds a non-zero group to 0; `inv = fl32(1 / s)`;
//! `q = clamp(rint_even(fl32(x * inv)), qmin, qmax)`. A group of zeros has scale +0 and codes 0.
//!
//! *mse*: 14 candidate scales per group, codes by the same rule, least squared error; the first wins ties. In order:
//! `s0` (absmax), `s0 * {1/4, 1/2, 2, 4}`, `s1 = fp16(fl32(<x,q0> / <q0,q0>))` (sums in FP64), `s1 * {1/2, 2}`,
//! `s0` one word up, one down, two up, two down, `s1` two words up, two down. Products are rounded to FP16; words above
//! 0x7BFF, negative ones and, where `q0` is all zero, those of `s1` are left out. The error is
//! `sum (x - s q)^2` in FP64: eight partial sums over `i mod 8` in rising `i`, added as
//! `((0+1)+(2+3))+((4+5)+(6+7))`.

use crate::encoded::illegal;
use crate::error::{FormatError, Place, expect_len};
use crate::format::{Format, GroupSpec};
use crate::layout::{Layout, row_bytes};
use crate::row_planes::{RowPlanes, check_finite, row_count};
use crate::scalar::{f16_from_f32, f16_is_scale, f16_to_f32};

/// How scales are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// The largest magnitude maps to the largest code.
    Absmax,
    /// Least squared error over 14 candidate scales.
    Mse,
}

fn spec_of(format: Format) -> Result<GroupSpec, FormatError> {
    format.group_spec().ok_or(FormatError::Unsupported { layout: Layout::RowSplitK128V1, format })
}

/// Encodes rows of `k` values by the absmax rule into `out` (codes, high bits, scales). `first_row` only numbers
/// rows in errors.
///
/// # Errors
/// Not a groupwise format; `values` is no whole number of rows; NaN or infinity; a scale beyond FP16.
pub fn encode_absmax(
    format: Format,
    k: usize,
    values: &[f32],
    first_row: u64,
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    encode(format, Method::Absmax, k, values, first_row, out)
}

/// Encodes rows of `k` values by the 14-candidate search.
///
/// # Errors
/// As [`encode_absmax`].
pub fn encode_mse(
    format: Format,
    k: usize,
    values: &[f32],
    first_row: u64,
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    encode(format, Method::Mse, k, values, first_row, out)
}

/// Encodes rows by `method`; see [`encode_absmax`].
///
/// # Errors
/// As [`encode_absmax`].
pub fn encode(
    format: Format,
    method: Method,
    k: usize,
    values: &[f32],
    first_row: u64,
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    let spec = spec_of(format)?;
    let rows = row_count("values to encode", values.len(), k)?;
    check_finite(values, k, first_row)?;
    let per = row_bytes(format, k as u64);
    out.reset(rows * per.codes as usize, rows * per.high as usize, rows * per.scales as usize);
    if rows == 0 {
        return Ok(());
    }
    match spec.group {
        32 => encode_rows::<32>(format, spec, method, k, values, first_row, out),
        _ => encode_rows::<64>(format, spec, method, k, values, first_row, out),
    }
}

fn encode_rows<const G: usize>(
    format: Format,
    spec: GroupSpec,
    method: Method,
    k: usize,
    values: &[f32],
    first_row: u64,
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    let per = row_bytes(format, k as u64);
    let (wide, tall, deep) = (per.codes as usize, per.high as usize, per.scales as usize);
    for (r, x) in values.chunks_exact(k).enumerate() {
        let codes = &mut out.codes[r * wide..(r + 1) * wide];
        let high = &mut out.high[r * tall..(r + 1) * tall];
        let scales = &mut out.scales[r * deep..(r + 1) * deep];
        for (g, x) in x.chunks(G).enumerate() {
            let mut group = [0f32; G];
            group[..x.len()].copy_from_slice(x);
            let mut q = [0i8; 64];
            let scale =
                encode_group(spec, method, &group, &mut q).map_err(|value| FormatError::ScaleRange {
                    kind: "FP16 (largest 65504)",
                    value,
                    place: Place::at(first_row + r as u64, (g * G) as u64),
                })?;
            scales[2 * g..2 * g + 2].copy_from_slice(&scale.to_le_bytes());
            pack_group(format, codes, high, g, &q);
        }
    }
    Ok(())
}

/// Scale word and codes of one group; `Err(scale)` when FP16 cannot hold it.
fn encode_group<const G: usize>(
    spec: GroupSpec,
    method: Method,
    x: &[f32; G],
    q: &mut [i8; 64],
) -> Result<u16, f64> {
    let amax = crate::row_planes::amax(x);
    if amax == 0.0 {
        return Ok(0);
    }
    // FP64 division rounded to FP32 equals FP32 division (53 >= 2 * 24 + 2).
    let raw = amax / spec.qmax as f32;
    let mut s0 = f16_from_f32(raw);
    if s0 == 0 {
        s0 = 1;
    }
    if !f16_is_scale(s0) {
        return Err(f64::from(raw));
    }
    let word = match method {
        Method::Absmax => s0,
        Method::Mse => search(spec, x, s0),
    };
    for (q, v) in q.iter_mut().zip(quantize(spec, x, word)) {
        *q = v as i8;
    }
    Ok(word)
}

/// Codes (as FP32 integers) for a scale word; all zero for scale +0.
#[inline]
fn quantize<const G: usize>(spec: GroupSpec, x: &[f32; G], word: u16) -> [f32; G] {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even, for magnitudes below 2^22.
    const MAGIC: f32 = 12_582_912.0;
    let mut out = [0.0; G];
    if word == 0 {
        return out;
    }
    let inv = 1.0 / f16_to_f32(word);
    let (lo, hi) = (spec.qmin as f32, spec.qmax as f32);
    for (o, &x) in out.iter_mut().zip(x) {
        let y = x * inv;
        // The bounds are integers, so clamping before rounding gives the same code.
        let y = if y > hi { hi } else { y };
        let y = if y < lo { lo } else { y };
        *o = (y + MAGIC) - MAGIC;
    }
    out
}

/// Squared error in FP32: within a factor 1 +- 2^-20 and 2^-140 of the exact one (s q is exact in FP32; three
/// roundings for a square, eleven for the sum; squares may be subnormal).
fn rough_error<const G: usize>(x: &[f32; G], q: &[f32; G], s: f32) -> f32 {
    let mut lanes = [0f32; 8];
    for (x, q) in x.as_chunks::<8>().0.iter().zip(q.as_chunks::<8>().0) {
        for i in 0..8 {
            let d = x[i] - s * q[i];
            lanes[i] += d * d;
        }
    }
    lanes.iter().sum()
}

/// Squared error in FP64, in the documented order.
fn exact_error<const G: usize>(x: &[f32; G], q: &[f32; G], s: f32) -> f64 {
    let mut l = [0f64; 8];
    for (x, q) in x.as_chunks::<8>().0.iter().zip(q.as_chunks::<8>().0) {
        for i in 0..8 {
            let d = f64::from(x[i]) - f64::from(s * q[i]);
            l[i] += d * d;
        }
    }
    ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]))
}

/// The 14 candidate words in order; `None` where one is left out.
fn candidates<const G: usize>(spec: GroupSpec, x: &[f32; G], s0: u16) -> [Option<u16>; 14] {
    let q0 = quantize(spec, x, s0);
    let (mut xq, mut qq) = ([0f64; 8], [0f64; 8]);
    for (x, q) in x.as_chunks::<8>().0.iter().zip(q0.as_chunks::<8>().0) {
        for i in 0..8 {
            xq[i] += f64::from(x[i]) * f64::from(q[i]);
            qq[i] += f64::from(q[i]) * f64::from(q[i]);
        }
    }
    let sum = |l: [f64; 8]| ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
    let (xq, qq) = (sum(xq), sum(qq));
    let s1 = if qq > 0.0 { legal(i32::from(f16_from_f32((xq / qq) as f32))) } else { None };
    let times =
        |word: Option<u16>, f: f32| word.and_then(|w| legal(i32::from(f16_from_f32(f16_to_f32(w) * f))));
    let step = |word: Option<u16>, by: i32| word.and_then(|w| legal(i32::from(w) + by));
    let s0 = Some(s0);
    [
        s0,
        times(s0, 0.25),
        times(s0, 0.5),
        times(s0, 2.0),
        times(s0, 4.0),
        s1,
        times(s1, 0.5),
        times(s1, 2.0),
        step(s0, 1),
        step(s0, -1),
        step(s0, 2),
        step(s0, -2),
        step(s1, 2),
        step(s1, -2),
    ]
}

fn legal(word: i32) -> Option<u16> {
    u16::try_from(word).ok().filter(|&w| f16_is_scale(w))
}

/// The first of the candidates with the least exact error. FP32 errors with a safe margin rule most of them out.
fn search<const G: usize>(spec: GroupSpec, x: &[f32; G], s0: u16) -> u16 {
    // Twice the relative bound of `rough_error` for the two sides of a comparison, and its absolute part.
    let margin = |e: f32| e * (1.0 + 1.0 / 262_144.0) + 1e-40;
    let list = candidates(spec, x, s0);
    let (top, bottom) =
        x.iter().fold((0f32, 0f32), |(a, b), &v| (if v > a { v } else { a }, if v < b { v } else { b }));
    let mut rough = [f32::INFINITY; 14];
    let mut best = f32::INFINITY;
    for (n, word) in list.iter().enumerate() {
        let Some(word) = *word else { continue };
        // A word seen before gives the same error, and the first wins.
        if list[..n].contains(&Some(word)) {
            continue;
        }
        let s = f16_to_f32(word);
        // What the extreme values lose by clipping alone.
        let clip = (top - s * spec.qmax as f32).max(s * spec.qmin as f32 - bottom);
        if clip > 0.0 && clip * clip > margin(best) {
            continue;
        }
        rough[n] = rough_error(x, &quantize(spec, x, word), s);
        best = best.min(rough[n]);
    }
    let limit = margin(best);
    let mut near = (0..14).filter(|&n| rough[n] <= limit);
    let mut winner = near.next().unwrap_or(0);
    let word_at = |n: usize| list[n].unwrap_or(s0);
    let mut others = near.peekable();
    if others.peek().is_some() {
        let exact = |n: usize| exact_error(x, &quantize(spec, x, word_at(n)), f16_to_f32(word_at(n)));
        let mut least = exact(winner);
        for n in others {
            let e = exact(n);
            if e < least {
                (least, winner) = (e, n);
            }
        }
    }
    word_at(winner)
}

/// Writes group `g` of a row into its plane rows. `q8` uses the first 32 lanes.
pub(crate) fn pack_group(format: Format, codes: &mut [u8], high: &mut [u8], g: usize, q: &[i8; 64]) {
    let base = &mut codes[32 * g..32 * (g + 1)];
    if format == Format::Q8G32 {
        for (b, &q) in base.iter_mut().zip(q) {
            *b = q as u8;
        }
        return;
    }
    for (b, pair) in base.iter_mut().zip(q.as_chunks::<2>().0) {
        *b = (pair[0] as u8 & 15) | ((pair[1] as u8 & 15) << 4);
    }
    match format {
        Format::Q5G64 => {
            for (b, lanes) in high[8 * g..8 * (g + 1)].iter_mut().zip(q.as_chunks::<8>().0) {
                *b = (0..8).fold(0, |acc, i| acc | (((lanes[i] as u8 >> 4) & 1) << i));
            }
        }
        Format::Q6G64 => {
            for (b, lanes) in high[16 * g..16 * (g + 1)].iter_mut().zip(q.as_chunks::<4>().0) {
                *b = (0..4).fold(0, |acc, i| acc | (((lanes[i] as u8 >> 4) & 3) << (2 * i)));
            }
        }
        _ => {}
    }
}

/// Reads group `g` of a row: 64 codes, or 32 for `q8`.
pub(crate) fn unpack_group(format: Format, codes: &[u8], high: &[u8], g: usize, q: &mut [i8; 64]) {
    let base = &codes[32 * g..32 * (g + 1)];
    if format == Format::Q8G32 {
        for (q, &b) in q.iter_mut().zip(base) {
            *q = b as i8;
        }
        return;
    }
    let (pairs, _) = q.as_chunks_mut::<2>();
    for (pair, &b) in pairs.iter_mut().zip(base) {
        *pair = [(b & 15) as i8, (b >> 4) as i8];
    }
    let bits = match format {
        Format::Q5G64 => {
            for (i, q) in q.iter_mut().enumerate() {
                *q |= (((high[8 * g + i / 8] >> (i % 8)) & 1) << 4) as i8;
            }
            5
        }
        Format::Q6G64 => {
            for (i, q) in q.iter_mut().enumerate() {
                *q |= (((high[16 * g + i / 4] >> (2 * (i % 4))) & 3) << 4) as i8;
            }
            6
        }
        _ => 4,
    };
    // Extend the sign from the top bit of the code.
    for q in q {
        *q = (*q << (8 - bits)) >> (8 - bits);
    }
}

/// Packs given codes (`rows * k`, row-major) and FP16 scale words (`rows * ceil(k / group)`) into planes.
///
/// # Errors
/// Not a groupwise format, a wrong length, a code out of range, an illegal scale, or a zero scale with other codes.
pub fn pack_rows(
    format: Format,
    k: usize,
    codes: &[i8],
    scales: &[u16],
    first_row: u64,
    out: &mut RowPlanes,
) -> Result<(), FormatError> {
    let spec = spec_of(format)?;
    let rows = row_count("codes to pack", codes.len(), k)?;
    let groups = k.div_ceil(spec.group);
    expect_len("group scales", (rows * groups) as u64, scales.len())?;
    let per = row_bytes(format, k as u64);
    let (wide, tall, deep) = (per.codes as usize, per.high as usize, per.scales as usize);
    out.reset(rows * wide, rows * tall, rows * deep);
    if rows == 0 {
        return Ok(());
    }
    for (r, (q, s)) in codes.chunks_exact(k).zip(scales.chunks_exact(groups)).enumerate() {
        let row = first_row + r as u64;
        for (g, (q, s)) in q.chunks(spec.group).zip(s).enumerate() {
            let column = (g * spec.group) as u64;
            check_group(spec, row, column, q, *s)?;
            let mut lanes = [0i8; 64];
            lanes[..q.len()].copy_from_slice(q);
            pack_group(
                format,
                &mut out.codes[r * wide..][..wide],
                &mut out.high[r * tall..][..tall],
                g,
                &lanes,
            );
            out.scales[r * deep + 2 * g..][..2].copy_from_slice(&s.to_le_bytes());
        }
    }
    Ok(())
}

/// Reads codes (`rows * k`) and scale words (`rows * ceil(k / group)`) back from planes.
///
/// # Errors
/// Not a groupwise format, or a plane or buffer of the wrong length.
pub fn unpack_rows(
    format: Format,
    k: usize,
    planes: &RowPlanes,
    codes: &mut [i8],
    scales: &mut [u16],
) -> Result<(), FormatError> {
    let spec = spec_of(format)?;
    let rows = row_count("codes to unpack", codes.len(), k)?;
    let groups = k.div_ceil(spec.group);
    let per = row_bytes(format, k as u64);
    let (wide, tall, deep) = (per.codes as usize, per.high as usize, per.scales as usize);
    expect_len("group scales", (rows * groups) as u64, scales.len())?;
    expect_len("code plane", (rows * wide) as u64, planes.codes.len())?;
    expect_len("high-bit plane", (rows * tall) as u64, planes.high.len())?;
    expect_len("scale plane", (rows * deep) as u64, planes.scales.len())?;
    if rows == 0 {
        return Ok(());
    }
    let mut lanes = [0i8; 64];
    for (r, (q, s)) in codes.chunks_exact_mut(k).zip(scales.chunks_exact_mut(groups)).enumerate() {
        for (g, (q, s)) in q.chunks_mut(spec.group).zip(s).enumerate() {
            unpack_group(
                format,
                &planes.codes[r * wide..][..wide],
                &planes.high[r * tall..][..tall],
                g,
                &mut lanes,
            );
            q.copy_from_slice(&lanes[..q.len()]);
            let at = r * deep + 2 * g;
            *s = u16::from_le_bytes([planes.scales[at], planes.scales[at + 1]]);
        }
    }
    Ok(())
}

fn check_group(spec: GroupSpec, row: u64, column: u64, q: &[i8], s: u16) -> Result<(), FormatError> {
    if !f16_is_scale(s) {
        return Err(illegal(
            "group scale",
            u32::from(s),
            row,
            column,
            "an FP16 group scale must be +0 or positive and finite",
        ));
    }
    for (i, &q) in q.iter().enumerate() {
        let at = column + i as u64;
        let v = i32::from(q);
        if v < spec.qmin || v > spec.qmax {
            return Err(illegal(
                "code",
                u32::from(q as u8),
                row,
                at,
                "the code lies outside the format's range",
            ));
        }
        if s == 0 && q != 0 {
            return Err(illegal("code", u32::from(q as u8), row, at, "a zero scale needs zero codes"));
        }
    }
    Ok(())
}

/// Refuses illegal words of one stored row, padding lanes and groups included.
pub(crate) fn validate_row(
    format: Format,
    k: u64,
    row: u64,
    codes: &[u8],
    high: &[u8],
    scales: &[u8],
) -> Result<(), FormatError> {
    let spec = spec_of(format)?;
    let mut q = [0i8; 64];
    for (g, s) in scales.as_chunks::<2>().0.iter().enumerate() {
        let s = u16::from_le_bytes(*s);
        let column = (g * spec.group) as u64;
        unpack_group(format, codes, high, g, &mut q);
        let q = &q[..spec.group];
        let real = (k.saturating_sub(column) as usize).min(spec.group);
        if let Some(i) = q[real..].iter().position(|&q| q != 0) {
            let at = real + i;
            return Err(illegal(
                "code",
                u32::from(q[at] as u8),
                row,
                column + at as u64,
                "padding codes must be 0",
            ));
        }
        if real == 0 && s != 0 {
            return Err(illegal(
                "group scale",
                u32::from(s),
                row,
                column,
                "a group of padding must have scale 0",
            ));
        }
        check_group(spec, row, column, &q[..real], s)?;
    }
    Ok(())
}
