//! Criterion benches; see `benches/`.
