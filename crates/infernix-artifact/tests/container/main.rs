//! Tests of whole sets and volumes on disk.

mod common;
mod interrupted;
mod renames;
mod sets;
