//! The `.ngram` volume: rows of a hash table in 4096-byte blocks, for random reads of one row at a time.

mod header;
mod locate;
mod table;
mod volume;
mod writer;

pub use header::{BLOCK_BYTES, Extension, Geometry, VolumeHeader, volume_id};
pub use locate::{Located, locate};
pub use table::{NgramTable, RowFormat, TableRange};
pub use volume::{Volume, VolumeIntegrity};
pub use writer::{VolumeSpec, VolumeWriter};
