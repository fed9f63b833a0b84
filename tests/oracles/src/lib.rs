//! Tests alone: see `tests/`.
