//! Carrying a plan out.

/// Buffer bytes of one worker: a few big ones, smaller where there are many workers, so that all stay far below 1 GiB.
pub(crate) fn worker_bytes(threads: usize) -> u64 {
    (512 << 20) / (threads as u64).clamp(4, 64)
}
