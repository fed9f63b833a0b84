//! How long operations tell what they are doing.

/// Receives progress. All methods may be called from several threads.
pub trait Progress: Sync {
    /// A phase begins; `bytes` is how much it will go through.
    fn begin(&self, phase: &str, bytes: u64) {
        let _ = (phase, bytes);
    }

    /// So many bytes more are done.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Something worth telling.
    fn note(&self, text: &str) {
        let _ = text;
    }

    /// The phase is over.
    fn end(&self) {}
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}
