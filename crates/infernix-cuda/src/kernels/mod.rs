//! Launch wrappers: one type or function a kernel, with shapes in its documentation.
//!
//! Addresses are device addresses of buffers the caller keeps alive until the stream has run the launch; pitches are
//! in elements unless said otherwise. `pdl` marks a launch whose predecessor in the stream is a kernel of this crate.

pub mod attention;
pub mod attention8;
pub mod chain;
pub mod experts;
pub mod gdn;
pub mod ggml;
pub mod group;
pub mod hyper;
pub mod index;
pub mod linear;
pub mod mix;
pub mod moves;
pub mod nvfp4;
pub mod ple;
pub mod prep;
pub mod rows;
pub mod select;
pub mod skinny;
pub mod stored;
pub mod tile;
pub mod zipf;

pub use attention::{Paging, Selection};
pub use linear::{Linear, WeightFormat};
