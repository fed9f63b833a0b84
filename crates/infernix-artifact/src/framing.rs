//! Fixed headers of the entry and of the continuation files (little-endian).

use std::path::Path;

use crate::{ArtifactError, ArtifactId, Result};

/// Bytes before the JSON of the entry.
pub const HEADER_BYTES: u64 = 32;
/// Payload starts and non-final segments end on multiples of this.
pub const FRAME_ALIGNMENT: u64 = 4096;
/// Largest directory that is read; the largest real one is under 1 MiB.
pub(crate) const MAX_JSON_BYTES: u64 = 256 << 20;

const ENTRY_MAGIC: [u8; 8] = *b"NINFER\0\x03";
const PART_MAGIC: [u8; 8] = *b"NINPRT\0\x03";

/// `value` rounded up to a multiple of `to`; `None` beyond 64 bits.
pub(crate) fn align_up(value: u64, to: u64) -> Option<u64> {
    value.checked_next_multiple_of(to)
}

/// Header of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryHeader {
    pub(crate) json_bytes: u64,
    pub(crate) artifact_id: ArtifactId,
}

impl EntryHeader {
    pub(crate) fn encode(&self) -> [u8; 32] {
        encode(ENTRY_MAGIC, self.json_bytes, self.artifact_id)
    }

    /// Where the payload of the entry starts.
    pub(crate) fn payload_start(&self) -> u64 {
        // json_bytes is bounded by MAX_JSON_BYTES on reading and by the layout on writing.
        align_up(HEADER_BYTES.saturating_add(self.json_bytes), FRAME_ALIGNMENT).unwrap_or(u64::MAX)
    }

    /// Checks magic and size of the directory against the file's length.
    pub(crate) fn parse(path: &Path, head: &[u8], file_bytes: u64) -> Result<Self> {
        let not = |reason: String| ArtifactError::NotAnArtifact { path: path.to_owned(), reason };
        if head.len() < 32 {
            return Err(not(format!(
                "is only {file_bytes} bytes long, too short for an artifact; download it again"
            )));
        }
        if head.starts_with(b"version https://git-lfs") {
            return Err(not("is a git-lfs pointer, not the file itself; fetch it with git lfs pull".into()));
        }
        if head[..8] != ENTRY_MAGIC {
            return Err(not(foreign(head)));
        }
        let json_bytes = u64_at(head, 8);
        if json_bytes == 0 || json_bytes > MAX_JSON_BYTES || HEADER_BYTES + json_bytes > file_bytes {
            return Err(not(format!(
                "header: directory of {json_bytes} bytes does not fit a file of {file_bytes} bytes (limit {MAX_JSON_BYTES}); the file is truncated or damaged"
            )));
        }
        Ok(Self { json_bytes, artifact_id: id_at(head) })
    }
}

/// Header page of continuation file `index`: 32 bytes, then zeros to 4096.
pub(crate) fn part_header(index: u64, artifact_id: ArtifactId) -> [u8; 32] {
    encode(PART_MAGIC, index, artifact_id)
}

/// Checks the header of continuation file `index`.
pub(crate) fn check_part(path: &Path, head: &[u8], index: u64, artifact_id: ArtifactId) -> Result<()> {
    let wrong = |field, expected: String, found: String| {
        Err(ArtifactError::Part { path: path.to_owned(), field, expected, found })
    };
    if head.len() < 32 || head[..8] != PART_MAGIC {
        let found = if head.len() < 32 { "too short".to_owned() } else { hex(&head[..8]) };
        return wrong("magic", hex(&PART_MAGIC), found);
    }
    if u64_at(head, 8) != index {
        return wrong("index", index.to_string(), u64_at(head, 8).to_string());
    }
    if id_at(head) != artifact_id {
        return wrong("artifact id", artifact_id.to_string(), id_at(head).to_string());
    }
    Ok(())
}

fn encode(magic: [u8; 8], word: u64, id: ArtifactId) -> [u8; 32] {
    let mut out = [0; 32];
    out[..8].copy_from_slice(&magic);
    out[8..16].copy_from_slice(&word.to_le_bytes());
    out[16..].copy_from_slice(&id.0);
    out
}

fn u64_at(head: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&head[at..at + 8]);
    u64::from_le_bytes(word)
}

fn id_at(head: &[u8]) -> ArtifactId {
    let mut id = [0; 16];
    id.copy_from_slice(&head[16..32]);
    ArtifactId(id)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// What a file with another magic is, in words.
fn foreign(head: &[u8]) -> String {
    if head.starts_with(b"NINFER\0\x02") {
        "is a version-2 container; this program reads version 3. Download the version-3 file of the model, or convert its checkpoint again".into()
    } else if head.starts_with(b"NINFER\0") {
        format!(
            "is a container of version {}; this program reads version 3 and may be older than the file",
            head[7]
        )
    } else if head.starts_with(b"NINPRT\0") {
        format!("is continuation file {} of a set; open the set's entry file instead", u64_at(head, 8))
    } else if head.starts_with(b"NINFERNG") {
        "is an n-gram volume, not an artifact; give it as --ngram beside the artifact".into()
    } else if head.starts_with(b"GGUF") {
        "is a GGUF file, not an artifact; convert it first".into()
    } else if head.starts_with(b"<") {
        "looks like an HTML page, not an artifact; the download went wrong".into()
    } else {
        format!("is no artifact: it starts with {} instead of {}", hex(&head[..8]), hex(&ENTRY_MAGIC))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(head: &[u8]) -> String {
        let mut page = head.to_vec();
        page.resize(64, 0);
        EntryHeader::parse(Path::new("x"), &page, 64).unwrap_err().to_string()
    }

    #[test]
    fn foreign_magics_get_a_clear_message() {
        assert!(reason(b"NINFER\0\x02").contains("version-2"));
        assert!(reason(b"NINFER\0\x09").contains("version 9"));
        assert!(reason(b"NINPRT\0\x03\x02").contains("continuation file 2"));
        assert!(reason(b"NINFERNG").contains("n-gram volume"));
        assert!(reason(b"GGUF").contains("GGUF"));
        assert!(reason(b"<!DOCTYPE html>").contains("HTML"));
        assert!(reason(b"version https://git-lfs.github.com/spec/v1").contains("git-lfs"));
    }

    #[test]
    fn absurd_directory_sizes_are_refused() {
        for json_bytes in [0, 33, u64::MAX, 1 << 40] {
            let head = EntryHeader { json_bytes, artifact_id: ArtifactId([1; 16]) }.encode();
            assert!(EntryHeader::parse(Path::new("x"), &head, 64).is_err(), "{json_bytes}");
        }
    }
}
