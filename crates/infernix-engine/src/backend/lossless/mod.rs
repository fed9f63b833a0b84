//! The oracle: every operation correctly rounded.
