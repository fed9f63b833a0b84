//! Errors of the engine.

/// What can go wrong between an artifact and a logit.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The configuration describes no model this engine runs.
    #[error(transparent)]
    Model(#[from] infernix_model::ModelError),
    /// A logical parameter is missing, unused, or not what its name says.
    #[error("weight {name}: {what}")]
    Weight {
        /// Logical name.
        name: String,
        /// Expected and found.
        what: String,
    },
    /// Bindings that nothing uses, or that are used twice.
    #[error("bindings not used exactly once: {}", .0.join(", "))]
    Usage(Vec<String>),
    /// A stored tensor could not be read or decoded.
    #[error("{name}: {source}")]
    Source {
        /// Object, tensor or file.
        name: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The n-gram volume failed.
    #[error("n-gram volume: {0}")]
    Ngram(String),
    /// A round was described inconsistently.
    #[error("round: {0}")]
    Round(String),
    /// A lane failed in a round; its state is that of the last snapshot.
    #[error("lane failed: {0}")]
    Lane(String),
    /// The backend can compute nothing any more; the process should be restarted.
    #[error("the backend is unusable: {0}")]
    Poisoned(String),
    /// No KV page is free.
    #[error("no free KV page of {pages}; release a sequence or allow more context")]
    OutOfPages {
        /// Pages in the pool.
        pages: usize,
    },
    /// All recurrent slots are in use.
    #[error("all {slots} sequence slots are in use")]
    OutOfSlots {
        /// Slots in the backend.
        slots: usize,
    },
    /// An option or request that this backend or model does not support.
    #[error("{0}")]
    Unsupported(String),
    /// A request outside the model's limits.
    #[error("{0}")]
    Request(String),
}
