//! The crate's error type.

/// What can go wrong between the host and the device.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The driver library is not installed, or no device answers.
    #[error("no CUDA driver: {0}; install the NVIDIA driver or use --backend cpu")]
    NoDriver(&'static str),
    /// The binary was built without nvcc.
    #[error("this build has no CUDA kernels (nvcc was not found when it was compiled); see docs/cuda.md")]
    NoKernels,
    /// The embedded kernels were not compiled for this device.
    #[error(
        "device {device} is sm_{have}, but the embedded kernels are for {built}; rebuild with INFERNIX_CUDA_ARCHS"
    )]
    WrongTarget {
        /// Name of the device.
        device: String,
        /// Compute capability, such as 90.
        have: i32,
        /// Targets in the binary.
        built: String,
    },
    /// A driver call failed. After a fault of a kernel every later call fails too: the context is lost.
    #[error("{call}: {name} ({code})")]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's name of the error.
        name: String,
        /// Its number.
        code: u32,
    },
    /// A kernel of that name is not embedded.
    #[error("kernel {0} is not in the embedded modules")]
    NoKernel(String),
    /// Arguments that the kernel does not take.
    #[error("{kernel}: {what}")]
    Shape {
        /// The kernel.
        kernel: &'static str,
        /// What was expected and found.
        what: String,
    },
}

/// Result with [`CudaError`].
pub type Result<T> = std::result::Result<T, CudaError>;
