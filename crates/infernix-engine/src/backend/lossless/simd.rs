//! Run-time choice of instruction set for the loops that cost time. Every variant is the same Rust; results differ only
//! below the error bounds the callers use, so rounded results do not depend on the choice.
#![expect(unsafe_code, reason = "calls of functions compiled for instruction sets checked at run time")]

use super::gemm;
use super::recurrent::{self, Scratch, Token};
use std::sync::LazyLock;

#[derive(Clone, Copy, PartialEq)]
enum Isa {
    Avx512,
    Avx2,
    Plain,
}

static ISA: LazyLock<Isa> = LazyLock::new(|| {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            return Isa::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Isa::Avx2;
        }
    }
    Isa::Plain
});

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,fma")]
fn products_avx512<W: Copy + Into<f64>>(w: &[W], x: &[f64], k: usize, out: &mut [f64]) {
    gemm::kernel::<W, true>(w, x, k, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn products_avx2<W: Copy + Into<f64>>(w: &[W], x: &[f64], k: usize, out: &mut [f64]) {
    gemm::kernel::<W, true>(w, x, k, out);
}

/// [`gemm::kernel`] for this machine.
pub(super) fn products<W: Copy + Into<f64>>(w: &[W], x: &[f64], k: usize, out: &mut [f64]) {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the features were detected.
        Isa::Avx512 => unsafe { products_avx512(w, x, k, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the features were detected.
        Isa::Avx2 => unsafe { products_avx2(w, x, k, out) },
        _ => gemm::kernel::<W, false>(w, x, k, out),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,fma")]
fn step_avx512(s: &mut [f32], token: &Token<'_>, scratch: &mut Scratch) {
    recurrent::step::<true>(s, token, scratch);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn step_avx2(s: &mut [f32], token: &Token<'_>, scratch: &mut Scratch) {
    recurrent::step::<true>(s, token, scratch);
}

/// [`recurrent::step`] for this machine.
pub(super) fn step(s: &mut [f32], token: &Token<'_>, scratch: &mut Scratch) {
    match *ISA {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the features were detected.
        Isa::Avx512 => unsafe { step_avx512(s, token, scratch) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the features were detected.
        Isa::Avx2 => unsafe { step_avx2(s, token, scratch) },
        _ => recurrent::step::<false>(s, token, scratch),
    }
}
