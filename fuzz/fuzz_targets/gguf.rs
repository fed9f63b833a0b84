#![no_main]

use infernix_fuzz::entry;
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: entry::Counting = entry::Counting;

thread_local!(static FOLDER: tempfile::TempDir = tempfile::tempdir().expect("a temporary folder"));

fuzz_target!(|data: &[u8]| {
    FOLDER.with(|folder| entry::bounded(data, |data| entry::gguf(folder.path(), data)));
});
