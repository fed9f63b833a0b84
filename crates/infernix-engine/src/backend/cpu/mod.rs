//! The CPU backend: kernels on stored words, dispatched at run time on AVX-512, AVX2 or plain Rust.
//!
//! Results do not depend on the number of rows in a call, on threads, or on the instruction set (see `linear` for the
//! one exception), so prefill, decode, any chunking and any batch agree bit for bit.
#![expect(
    unsafe_code,
    reason = "vector intrinsics, a thread pool, disjoint writes; each block says why it is sound"
)]

mod attention;
mod backend;
mod buf;
mod cells;
mod delta;
mod elementwise;
pub(crate) mod experts;
pub mod isa;
pub mod linear;
mod narrow;
pub mod num;
pub mod pool;
mod weights;

pub use backend::{Blocks, CpuBackend, CpuOptions, Routes};
pub use buf::CpuBuf;
pub use weights::{CpuExperts, CpuWeight};
