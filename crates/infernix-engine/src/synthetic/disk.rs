//! Synthetic words in files, for measuring what reads them from disk. A file of the right name and length is taken as it is: its
//! words follow from its name.

use super::{mix, next};
use crate::backend::FileRange;
use crate::backend::weights::Bytes;
use crate::error::EngineError;
use crate::ngram::{RowSource, VolumeRows};
use infernix_artifact::Digest;
use infernix_artifact::ngram::{Extension, Geometry, Volume, VolumeHeader, volume_id};
use memmap2::Mmap;
use rayon::prelude::*;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

/// Bytes written at a time.
const CHUNK: usize = 4 << 20;

fn error(path: &Path) -> impl Fn(io::Error) -> EngineError {
    let name = path.display().to_string();
    move |e| EngineError::Source { name: name.clone(), source: Box::new(e) }
}

/// Writes `bytes` bytes by `fill(chunk, out)`, unless the file has them.
fn write(path: &Path, bytes: u64, fill: impl Fn(u64, &mut [u8]) + Sync) -> Result<(), EngineError> {
    if std::fs::metadata(path).is_ok_and(|m| m.len() == bytes) {
        return Ok(());
    }
    // Its length comes last in name: one that was cut off is written again.
    let part = path.with_extension("part");
    let file = File::create(&part).map_err(error(&part))?;
    let chunks = bytes.div_ceil(CHUNK as u64);
    let written: io::Result<()> = (0..chunks).into_par_iter().try_for_each(|c| {
        let at = c * CHUNK as u64;
        let mut out = vec![0u8; CHUNK.min((bytes - at) as usize)];
        fill(c, &mut out);
        file.write_all_at(&out, at)
    });
    written.and_then(|()| file.sync_all()).map_err(error(&part))?;
    std::fs::rename(&part, path).map_err(error(path))
}

/// An object's words in a file of `folder`, and where they are.
#[expect(unsafe_code, reason = "a mapped file")]
pub(super) fn object(folder: &Path, key: u64, words: &[u8]) -> Result<(Bytes, FileRange), EngineError> {
    let path = folder.join(format!("experts-{key:016x}.bin"));
    write(&path, words.len() as u64, |c, out| {
        let at = c as usize * CHUNK;
        out.copy_from_slice(&words[at..at + out.len()]);
    })?;
    let file = File::open(&path).map_err(error(&path))?;
    // SAFETY: the file is ours and keeps its length and words.
    let memory = unsafe { Mmap::map(&file) }.map_err(error(&path))?;
    Ok((Arc::new(memory), FileRange { path: path.as_path().into(), offset: 0 }))
}

/// A volume of `rows` rows of `width` random E4M3 values in `folder`.
pub(super) fn volume(folder: &Path, rows: u64, width: usize) -> Result<Box<dyn RowSource>, EngineError> {
    let path = folder.join(format!("rows-{rows}x{width}.ngram"));
    let volume = |e: String| EngineError::Ngram(format!("{}: {e}", path.display()));
    let geometry = Geometry::new(rows, width as u32).map_err(volume)?;
    // The digest is that of no rows: nothing verifies random ones.
    let extension =
        Extension { format: "fp8_e4m3fn".into(), scales: vec![1.0], row_digest: Digest::of(b"synthetic") };
    let id = volume_id(&geometry, &extension);
    let page = VolumeHeader { geometry, id, extension: Some(extension) }.encode().map_err(volume)?;
    write(&path, geometry.file_bytes(), |c, out| {
        let mut state = mix(c);
        for word in out.chunks_mut(8) {
            // Below 2 in magnitude, no NaN.
            let value = (next(&mut state) & 0xBFBF_BFBF_BFBF_BFBF).to_le_bytes();
            word.copy_from_slice(&value[..word.len()]);
        }
        if c == 0 {
            out[..page.len()].copy_from_slice(&page);
        }
    })?;
    let open = Volume::open(&path).map_err(|e| volume(e.to_string()))?;
    Ok(Box::new(VolumeRows::new(open, "fp8_e4m3fn", width, vec![(0, 1.0)])?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_in_files_are_the_words() {
        let folder = tempfile::tempdir().unwrap();
        let words: Vec<u8> = (0..CHUNK + 77).map(|i| (i % 253) as u8).collect();
        for _ in 0..2 {
            let (bytes, at) = object(folder.path(), 5, &words).unwrap();
            assert!((*bytes).as_ref() == words && at.offset == 0);
            assert!(std::fs::read(&at.path).unwrap() == words);
        }
    }

    #[test]
    fn a_volume_gives_finite_rows_that_are_the_same_again() {
        let folder = tempfile::tempdir().unwrap();
        let rows = volume(folder.path(), 30_000, 160).unwrap();
        let (mut a, mut b) = (vec![0f32; 160], vec![0f32; 160]);
        for row in [0, 24, 25, 26_214, 29_999] {
            rows.read(row, &mut a).unwrap();
            volume(folder.path(), 30_000, 160).unwrap().read(row, &mut b).unwrap();
            assert!(a.iter().all(|v| v.abs() < 2.0) && a.iter().any(|v| *v != 0.0));
            assert_eq!(a, b);
        }
        assert!(rows.read(30_000, &mut a).is_err());
    }
}
