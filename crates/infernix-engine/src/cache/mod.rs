//! The prefix cache.

mod miss;

pub use miss::{Excerpt, Miss, MissCause};
