//! Matrix products `y = x W^T` straight from stored words.
//!
//! # Order of additions
//! An output is a function of its weight row and its activation column alone. K is cut into blocks of 64, each two steps
//! of 32 pairs; a step adds two products to each of 16 lanes, `acc = fma(w1, x1, acc)` then `fma(w0, x0, acc)`. Codes
//! enter exactly, as BF16. Formats with scales along K sum a group's products first and add them as
//! `acc = fma(scale, t, acc)`. At the end the lanes fold in halves (`num::tree`), then row and tensor scales multiply.
//! This does not depend on the number of columns, on threads or on the instruction set, so prefill, decode and any
//! batch agree bit for bit.
//!
//! Int8 activations (`Packed::pack_int8`) meet integer codes in exact sums (see `int8`). Other codes take theirs as BF16:
//! sums of 32 products meet `fl(weight scale x activation scale)`. FP32 and FP16 matrices take BF16 activations as they
//! are, and scale sums over 32 int8 ones.
//!
//! # Error
//! A lane adds K/16 products and the tree has 4 levels: `|y - exact| <= (K/16 + 8) 2^-24 sum |w x|`, plus the output's
//! rounding. BF16 *weights* below 2^-126, and their products below 2^-126, count as zero where the processor's BF16 dot
//! product is used; activations are checked and never flushed.

#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod ggml;
mod ggml_unpack;
mod int8;
#[cfg(target_arch = "x86_64")]
pub(crate) mod lanes;
mod out;
mod pack;
mod portable;
mod rows;
#[cfg(target_arch = "x86_64")]
mod stored;
#[cfg(target_arch = "x86_64")]
pub(crate) mod vnni;

pub use out::Out;
pub use pack::Packed;
pub use rows::{Kind, Rows};

use super::isa::Isa;
use super::pool::Pool;
use std::ops::Range;

/// Bytes of weights a task of a matrix-vector product reads at least.
const TASK_BYTES: usize = 16 << 10;

/// `y = x W^T` for a weight stacked from parts by rows; parts fill consecutive rows of the output.
pub fn product(pool: &Pool, isa: Isa, parts: &[Rows<'_>], x: &mut Packed, out: Out<'_>) {
    for p in parts {
        prepare(isa, p.kind(), x);
    }
    let x = &*x;
    // All parts share one parallel loop: stacked projections of a few rows would not fill the threads one by one.
    let mut tasks: Vec<(usize, Range<usize>)> = Vec::new();
    let mut offsets = Vec::with_capacity(parts.len());
    let mut offset = 0;
    for (i, p) in parts.iter().enumerate() {
        assert_eq!(p.k(), x.k(), "weight and activations differ in K");
        let chunk = chunk_rows(pool, p, x.columns());
        tasks.extend((0..p.n()).step_by(chunk).map(|r| (i, r..(r + chunk).min(p.n()))));
        offsets.push(offset);
        offset += p.n();
    }
    pool.run(tasks.len(), |t| {
        let (part, range) = tasks[t].clone();
        product_rows(isa, &parts[part], range, x, &out.shifted(offsets[part]));
    });
}

/// Makes the forms of x that products with `kind` read.
fn prepare(isa: Isa, kind: Kind, x: &mut Packed) {
    match x.int8_mut() {
        #[cfg(target_arch = "x86_64")]
        Some(int8) if kind.integers() && isa == Isa::Avx512Bf16 => return vnni::prepare(isa, kind, int8),
        Some(_) if kind.integers() => return,
        Some(_) => x.widen(),
        None => {}
    }
    if kind.even_odd() {
        x.split();
    }
}

/// Rows a task takes.
fn chunk_rows(pool: &Pool, w: &Rows<'_>, columns: usize) -> usize {
    let row = (w.bytes() / w.n().max(1)).max(1);
    #[cfg(target_arch = "x86_64")]
    if columns > avx512::DIRECT {
        return avx512::panel_rows(w.blocks());
    }
    // One run of rows a thread, for a stream that is broken off starts slowly: with two threads, a token of the 0.6 B model
    // took 9.3 ms so, 9.6 ms with 2 runs a thread, 9.8 ms with 4 and 10.5 ms with 8 (4-bit, turn about in one process).
    let work = TASK_BYTES / (row * columns.max(1));
    w.n().div_ceil(pool.threads()).max(work.max(1)).next_multiple_of(4)
}

/// Rows `range` on the calling thread.
pub(crate) fn product_rows(isa: Isa, w: &Rows<'_>, range: Range<usize>, x: &Packed, out: &Out<'_>) {
    if let Kind::Ggml(ty) = w.kind() {
        return ggml::product(isa, ty, w, range, x, out);
    }
    if let Some(int8) = x.int8().filter(|_| w.kind().integers()) {
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Avx512Bf16 {
            return vnni::product(w, range, int8, out);
        }
        return int8::portable(isa, w, range, int8, out);
    }
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512
        && !matches!(w.kind(), Kind::F32 | Kind::F16)
        && (isa == Isa::Avx512Bf16 || x.scales().is_empty())
    {
        let columns =
            avx512::Columns { x: x.order(w.kind().even_odd()), width: x.width(), scales: x.scales() };
        return avx512::product(isa == Isa::Avx512Bf16 && !x.tiny(), w, range, columns, out);
    }
    portable::product(isa, w, range, x, out);
}

#[cfg(test)]
pub(crate) mod tests;
