//! CUDA kernels for the model's operations, a thin driver layer, and a self-test against scalar oracles.
//!
//! The crate knows formats and shapes, not models: the engine's CUDA backend is built over it. Kernels are compiled
//! by `build.rs` when nvcc is found and embedded as SASS; without nvcc the crate still builds and
//! [`embedded_targets`] is empty. What each kernel promises is in docs/cuda.md.

pub mod driver;
pub mod error;
pub mod kernels;
pub mod oracle;
#[cfg(test)]
mod ptxas;
pub mod selftest;
mod tape;

pub use driver::{Device, DeviceBuffer, DeviceInfo, driver_present};
pub use error::{CudaError, Result};
pub use selftest::selftest;

include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Architectures for which kernels are embedded, such as `sm_90a`; empty in a build without nvcc.
pub fn embedded_targets() -> &'static [&'static str] {
    TARGETS
}
