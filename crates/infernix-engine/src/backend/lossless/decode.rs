//! Stored words to exact reals.
//!
//! A value is `code x scale`, exact in f64 (at most 4 + 4 + 24 significant bits; of GGML blocks with an offset the sum of
//! two products of FP16 words with small integers, which f64 holds too), except where the format divides: there
//! the quotient is kept apart as an exact numerator and a divisor of the row.

use crate::backend::{ExpertSpec, WeightData, WeightPart};
use crate::error::EngineError;
use infernix_formats::expert_bank::{BankShape, ExpertMatrix, ExpertRecord};
use infernix_formats::{Encoded, Format, FormatError, Layout, PlaneRole, Rows, row_planes};

/// Rows of exact numerators `[rows, k]` and one divisor a row.
#[derive(Clone, Debug, Default)]
pub(super) struct Exact {
    pub k: usize,
    pub values: Vec<f64>,
    pub divisor: Vec<f64>,
}

pub(super) fn format_error(name: &str) -> impl Fn(FormatError) -> EngineError {
    let name = name.to_owned();
    move |e| EngineError::Source { name: name.clone(), source: Box::new(e) }
}

/// All rows of a weight.
pub(super) fn weight(name: &str, data: &WeightData) -> Result<Exact, EngineError> {
    let mut out = Exact::default();
    for part in &data.parts {
        append(part, &mut out).map_err(format_error(name))?;
    }
    Ok(out)
}

/// Appends the rows of a part.
pub(super) fn append(part: &WeightPart, out: &mut Exact) -> Result<(), FormatError> {
    let bytes = (*part.bytes).as_ref();
    let e = Encoded::new(part.layout, part.format, &part.shape, bytes)?;
    let shape = e.row_shape()?;
    let (step, k) = (part.layout.row_step(), shape.k as usize);
    // Some layouts are read in groups of rows: widen, then cut.
    let wide = part.rows.start / step * step..part.rows.end.next_multiple_of(step).min(shape.rows);
    let (rows, divisor) = if part.format == Format::Nvfp4 {
        numerators(&e, wide.clone())?
    } else {
        (e.rows(wide.clone())?, 1.0)
    };
    let mut values = vec![0f64; (wide.end - wide.start) as usize * k];
    rows.decode_f64(&mut values)?;
    let begin = (part.rows.start - wide.start) as usize * k;
    let n = (part.rows.end - part.rows.start) as usize;
    out.k = k;
    out.values.extend_from_slice(&values[begin..begin + n * k]);
    out.divisor.extend(std::iter::repeat_n(divisor, n));
    Ok(())
}

const ONE: [u8; 4] = 1f32.to_le_bytes();

/// NVFP4 rows as if their divisor were 1, and the divisor.
fn numerators<'a>(e: &Encoded<'a>, rows: std::ops::Range<u64>) -> Result<(Rows<'a>, f64), FormatError> {
    let (mut codes, mut scales, mut divisor): (&[u8], &[u8], f32) = (&[], &[], 1.0);
    for p in row_planes(e.layout, e.format, e.shape, rows.clone())? {
        let bytes = &e.bytes[p.offset as usize..(p.offset + p.bytes) as usize];
        match p.role {
            PlaneRole::Codes => codes = bytes,
            PlaneRole::Scales => scales = bytes,
            PlaneRole::GlobalScale => divisor = bytes.try_into().map_or(f32::NAN, f32::from_le_bytes),
            _ => {}
        }
    }
    let rows = Rows::new(e.layout, e.format, e.shape, rows, codes, &[], scales, &ONE)?;
    Ok((rows, f64::from(divisor)))
}

/// NVFP4 rows as integers `2 code x 512 scale` (below 2^22), with the scale of each row's part.
pub(super) struct Integers {
    pub values: Vec<i32>,
    pub global: Vec<f32>,
    pub divides: bool,
}

/// An NVFP4 weight for the canonical 4-bit product; `None` for another format.
pub(super) fn integers(data: &WeightData) -> Option<Integers> {
    let mut out = Integers { values: Vec::new(), global: Vec::new(), divides: false };
    for part in &data.parts {
        let e = Encoded::new(part.layout, part.format, &part.shape, (*part.bytes).as_ref()).ok()?;
        let (step, k) = (part.layout.row_step(), e.row_shape().ok()?.k);
        let wide =
            part.rows.start / step * step..part.rows.end.next_multiple_of(step).min(e.row_shape().ok()?.rows);
        out.divides = match part.format {
            Format::Nvfp4 => true,
            Format::Nvfp4Mul => false,
            _ => return None,
        };
        let (rows, global) = numerators(&e, wide.clone()).ok()?;
        let mut values = vec![0f64; ((wide.end - wide.start) * k) as usize];
        rows.decode_f64(&mut values).ok()?;
        let cut = ((part.rows.start - wide.start) * k) as usize..((part.rows.end - wide.start) * k) as usize;
        out.values.extend(values[cut].iter().map(|v| (v * 1024.0) as i32));
        out.global.extend((part.rows.start..part.rows.end).map(|_| global as f32));
    }
    Some(out)
}

/// Global scales of a bank's expert: gate, up, down (1 where the format has none).
pub(super) fn bank_globals(shape: &BankShape, format: Format, bytes: &[u8], expert: usize) -> [f32; 3] {
    if !matches!(format, Format::Nvfp4 | Format::Nvfp4Mul) {
        return [1.0; 3];
    }
    let at = (shape.stride * shape.experts) as usize + 12 * expert;
    [0, 1, 2].map(|m| {
        let w = bytes.get(at + 4 * m..at + 4 * m + 4).and_then(|b| b.try_into().ok());
        w.map_or(f32::NAN, f32::from_le_bytes)
    })
}

/// One matrix of an expert out of a bank.
pub(super) fn bank_matrix(
    part: &WeightPart,
    expert: usize,
    matrix: ExpertMatrix,
) -> Result<Exact, FormatError> {
    let bytes = (*part.bytes).as_ref();
    Encoded::new(part.layout, part.format, &part.shape, bytes)?;
    let shape = BankShape::of(part.layout, part.format, &part.shape)?;
    let record = shape.record(expert as u64);
    let record = &bytes[record.start as usize..record.end as usize];
    let global = bank_globals(&shape, part.format, bytes, expert)[matrix.index()];
    let (n, k) = shape.matrix(matrix);
    let divides = part.format == Format::Nvfp4;
    let used = if divides { [1.0; 3] } else { bank_globals(&shape, part.format, bytes, expert) };
    let mut values = vec![0f64; (n * k) as usize];
    ExpertRecord::new(shape, part.format, used, record)?.decode_f64(matrix, 0..n, &mut values)?;
    let divisor = if divides { f64::from(global) } else { 1.0 };
    Ok(Exact { k: k as usize, values, divisor: vec![divisor; n as usize] })
}

/// Rows of one expert out of rank-2 parents.
pub(super) fn parent_rows(data: &WeightData, rows: std::ops::Range<u64>) -> Result<Exact, FormatError> {
    let mut out = Exact::default();
    let mut first = 0;
    for part in &data.parts {
        let n = part.rows.end - part.rows.start;
        let (a, b) = (rows.start.max(first), rows.end.min(first + n));
        if a < b {
            let mut cut = part.clone();
            cut.rows = part.rows.start + (a - first)..part.rows.start + (b - first);
            append(&cut, &mut out)?;
        }
        first += n;
    }
    Ok(out)
}

/// Checks that a data's parts add up to the shape it announces.
pub(super) fn check_shape(name: &str, data: &WeightData) -> Result<(), EngineError> {
    let want: u64 = data.shape.iter().product();
    let mut have = 0;
    for p in &data.parts {
        let k = p.shape.last().copied().unwrap_or(1);
        have += k * (p.rows.end - p.rows.start);
    }
    if want == have {
        return Ok(());
    }
    let what = format!("shape {:?} has {want} values, its parts hold {have}", data.shape);
    Err(EngineError::Weight { name: name.to_owned(), what })
}

/// Checks experts against their specification; gives E.
pub(super) fn check_bank(spec: &ExpertSpec, part: &WeightPart) -> Result<(), EngineError> {
    let want = [spec.experts as u64, spec.hidden as u64, spec.intermediate as u64];
    if part.shape == want && part.layout != Layout::ContiguousLeV1 {
        return Ok(());
    }
    let what = format!("bank of shape {:?}, expected {want:?}", part.shape);
    Err(EngineError::Weight { name: spec.name.clone(), what })
}
