//! Rewriting damaged bytes in place. The one operation that changes a published file, and only towards what its
//! digests say it was.

use std::fs::OpenOptions;

use crate::digest::Integrity;
use crate::io::{CHUNK, Io};
use crate::{Artifact, ArtifactError, Digest, Object, Result};

/// Rewrites `object` in its file(s) with bytes that hash to the recorded digest.
///
/// `fill(offset, out)` produces the object's bytes from `offset` on; it is called twice over the whole object, first
/// to hash, then to write, so that nothing is written unless all of it is right. Memory is one chunk.
///
/// # Errors
/// A set without digests; bytes that do not hash to the record ([`ArtifactError::DigestMismatch`], nothing changed);
/// what `fill` returns; I/O errors. An interrupted repair leaves the object corrupt and can be repeated.
pub fn repair_object(
    artifact: &Artifact,
    object: &Object,
    mut fill: impl FnMut(u64, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let path = artifact.path();
    let invalid = |reason: String| ArtifactError::Invalid(format!("{}: repair: {reason}", path.display()));
    let integrity = Integrity::of(artifact.directory()).map_err(invalid)?;
    let integrity =
        integrity.ok_or_else(|| invalid("the set records no digests to repair towards".into()))?;
    let expected = integrity.objects.get(&object.id).ok_or_else(|| artifact.missing("object", &object.id))?;

    let mut buffer = vec![0; object.bytes.min(CHUNK as u64) as usize];
    let mut each = |f: &mut dyn FnMut(u64, &[u8]) -> Result<()>| {
        let mut at = 0;
        while at < object.bytes {
            let take = (object.bytes - at).min(CHUNK as u64) as usize;
            fill(at, &mut buffer[..take])?;
            f(at, &buffer[..take])?;
            at += take as u64;
        }
        Ok(())
    };
    let mut hasher = blake3::Hasher::new();
    each(&mut |_, bytes| {
        hasher.update(bytes);
        Ok(())
    })?;
    let found = Digest::from(hasher.finalize());
    if found != *expected {
        return Err(ArtifactError::DigestMismatch {
            path: path.to_owned(),
            what: format!("replacement of object {:?}", object.id),
            expected: expected.to_string(),
            found: found.to_string(),
        });
    }
    each(&mut |at, bytes| write(artifact, object.offset + at, bytes))?;
    let now = artifact.object_digest(object, &crate::Interrupt::default())?;
    if now != *expected {
        return Err(ArtifactError::DigestMismatch {
            path: path.to_owned(),
            what: format!("object {:?} after its repair (a failing disk?)", object.id),
            expected: expected.to_string(),
            found: now.to_string(),
        });
    }
    Ok(())
}

/// Writes zeros over every gap that holds anything else. Returns the number of gaps rewritten.
///
/// # Errors
/// I/O errors.
pub fn repair_gaps(artifact: &Artifact) -> Result<u64> {
    let mut repaired = 0;
    for (_, range) in artifact.gaps() {
        let mut at = range.start;
        let mut dirty = false;
        while at < range.end {
            let mut buffer = vec![0; (range.end - at).min(CHUNK as u64) as usize];
            artifact.read_at(at, &mut buffer)?;
            if buffer.iter().any(|&b| b != 0) {
                buffer.fill(0);
                write(artifact, at, &buffer)?;
                dirty = true;
            }
            at += buffer.len() as u64;
        }
        repaired += u64::from(dirty);
    }
    Ok(repaired)
}

fn write(artifact: &Artifact, offset: u64, bytes: &[u8]) -> Result<()> {
    let io = Io::default();
    let mut rest = bytes;
    for segment in artifact.segments(offset, bytes.len() as u64)? {
        let (now, later) = rest.split_at(segment.bytes as usize);
        let (_, path) = artifact.file_and_path(segment.file);
        let file = OpenOptions::new()
            .write(true)
            .open(path)
            .map_err(|e| ArtifactError::io(path, "open for repair", e))?;
        io.write_at(&file, path, now, segment.offset)?;
        io.sync(&file, path)?;
        rest = later;
    }
    Ok(())
}
