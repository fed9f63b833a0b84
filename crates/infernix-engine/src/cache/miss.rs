//! Why a prompt did not come from the cache, in words a user can act on.

/// What kept (more of) a prompt from being reused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Prompt tokens that a cached text has in common with the prompt.
    pub shared: usize,
    /// Prompt tokens reused. Less than `shared` where no snapshot of the state lies at the point of divergence.
    pub reused: usize,
    /// The cause.
    pub cause: MissCause,
    /// Ids of the nearest cached text around the divergence, and how many of them lie before it.
    pub cached: Excerpt,
    /// Ids of the prompt around the divergence.
    pub prompt: Excerpt,
}

/// Cause of a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissCause {
    /// Nothing cached begins like the prompt.
    Cold,
    /// A cached text begins like the prompt and then differs.
    Diverged,
    /// The text is known, or was, but no state was ever kept as deep as the text agrees.
    NoSnapshot,
    /// A state deeper in this text was kept once and dropped to make room.
    Evicted,
    /// The request asked for it (cache bypass, prompt log-probabilities).
    Bypassed,
}

/// Ids around a divergence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Excerpt {
    /// Ids.
    pub ids: Vec<u32>,
    /// How many of them come before the divergence.
    pub before: usize,
}
