//! The header page: version-1 fields, then our tagged extension at byte 64.

use std::path::Path;

use serde_json::json;

use crate::json::canonical;
use crate::{ArtifactError, ArtifactId, Digest, Result};

/// Bytes of the header page and of every block.
pub const BLOCK_BYTES: u64 = 4096;

const MAGIC: &[u8; 8] = b"NINFERNG";
const TAG: &[u8; 8] = b"INFXNGRM";
const EXTENSION_AT: usize = 64;
/// Extension bytes without scale words: tag, length, version, name, count, row digest, page digest.
const EXTENSION_FIXED: usize = 8 + 4 + 4 + 32 + 4 + 32 + 32;

/// Where rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Rows.
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// Rows of a block; a row never straddles two.
    pub rows_per_block: u32,
}

impl Geometry {
    /// The geometry of `rows` rows of `row_bytes` bytes, as many per block as fit.
    ///
    /// # Errors
    /// No rows, rows of no bytes or beyond a block, or a file beyond 2^63 bytes.
    pub fn new(rows: u64, row_bytes: u32) -> Result<Self, String> {
        if row_bytes == 0 || u64::from(row_bytes) > BLOCK_BYTES {
            return Err(format!("rows of {row_bytes} bytes do not fit blocks of {BLOCK_BYTES}"));
        }
        Self { rows, row_bytes, rows_per_block: BLOCK_BYTES as u32 / row_bytes }.check()
    }

    fn check(self) -> Result<Self, String> {
        if self.rows == 0 || self.rows > (i64::MAX as u64) / BLOCK_BYTES - 1 {
            return Err(format!("{} rows are not possible", self.rows));
        }
        let used = u64::from(self.row_bytes) * u64::from(self.rows_per_block);
        if used == 0 || used > BLOCK_BYTES {
            return Err(format!(
                "{} rows of {} bytes do not fit blocks of {BLOCK_BYTES}",
                self.rows_per_block, self.row_bytes
            ));
        }
        Ok(self)
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.rows.div_ceil(u64::from(self.rows_per_block))
    }

    /// Exact length of the volume.
    pub fn file_bytes(&self) -> u64 {
        BLOCK_BYTES * (1 + self.blocks())
    }

    /// Where row `row` starts in the file; `None` beyond the table.
    pub fn row_offset(&self, row: u64) -> Option<u64> {
        let rpb = u64::from(self.rows_per_block);
        (row < self.rows).then(|| BLOCK_BYTES * (1 + row / rpb) + row % rpb * u64::from(self.row_bytes))
    }
}

/// What our extension adds to version 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Extension {
    /// Format name of a row (`fp8_e4m3fn`, `bf16`, `nvfp4_mul`, `ggml_iq4_nl`).
    pub format: String,
    /// FP32 scale words, one per table, bit for bit.
    pub scales: Vec<f32>,
    /// BLAKE3-256 of all rows in order, without padding.
    pub row_digest: Digest,
}

/// The header of a volume.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeHeader {
    /// Where rows lie.
    pub geometry: Geometry,
    /// Identity, matched against the artifact's `ngram_table.volume_id`.
    pub id: ArtifactId,
    /// Absent in volumes of other writers.
    pub extension: Option<Extension>,
}

/// The id of a volume we write: its rows, geometry, format and scales.
pub fn volume_id(geometry: &Geometry, extension: &Extension) -> ArtifactId {
    let scales: Vec<u32> = extension.scales.iter().map(|s| s.to_bits()).collect();
    let value = json!({
        "domain": "infernix volume id 1", "rows": geometry.rows, "row_bytes": geometry.row_bytes,
        "rows_per_block": geometry.rows_per_block, "format": extension.format, "scales": scales,
        "row_digest": extension.row_digest.to_string(),
    });
    ArtifactId::from_digest(&Digest::of(canonical(&value).as_bytes()))
}

impl VolumeHeader {
    /// The 4096-byte page.
    ///
    /// # Errors
    /// A format name beyond 32 bytes, or more scales than fit.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let mut page = vec![0; BLOCK_BYTES as usize];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            page[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(MAGIC);
        put(&1u32.to_le_bytes());
        put(&(BLOCK_BYTES as u32).to_le_bytes());
        put(&self.geometry.rows.to_le_bytes());
        put(&self.geometry.row_bytes.to_le_bytes());
        put(&self.geometry.rows_per_block.to_le_bytes());
        put(&(BLOCK_BYTES as u32).to_le_bytes());
        put(&self.geometry.blocks().to_le_bytes());
        put(&self.id.0);
        let Some(extension) = &self.extension else { return Ok(page) };
        check_format(&extension.format)?;
        let total = EXTENSION_FIXED + 4 * extension.scales.len();
        if EXTENSION_AT + total > BLOCK_BYTES as usize {
            return Err(format!("{} scale words do not fit the header page", extension.scales.len()));
        }
        put(&[0; EXTENSION_AT - 60]);
        put(TAG);
        put(&(total as u32).to_le_bytes());
        put(&1u32.to_le_bytes());
        put(extension.format.as_bytes());
        put(&vec![0; 32 - extension.format.len()]);
        put(&(extension.scales.len() as u32).to_le_bytes());
        extension.scales.iter().for_each(|scale| put(&scale.to_bits().to_le_bytes()));
        put(&extension.row_digest.0);
        let digest = Digest::of(&page);
        page[EXTENSION_AT + total - 32..EXTENSION_AT + total].copy_from_slice(&digest.0);
        Ok(page)
    }

    /// Reads a header page of a file of `file_bytes` bytes.
    ///
    /// # Errors
    /// Everything that is no version-1 volume of exactly that length, with or without our extension.
    pub fn parse(path: &Path, page: &[u8], file_bytes: u64) -> Result<Self> {
        let fail = |reason: String| ArtifactError::Volume { path: path.to_owned(), reason };
        if page.len() != BLOCK_BYTES as usize {
            return Err(fail(format!("is only {file_bytes} bytes long; download it again")));
        }
        if &page[..8] != MAGIC {
            return Err(fail("has no volume magic; it is another kind of file".into()));
        }
        if word(page, 8) != 1 {
            let version = word(page, 8);
            return Err(fail(format!(
                "version {version} is not supported; version 1 is (with our extension or without)"
            )));
        }
        for (name, at) in [("header", 12), ("block", 32)] {
            if word(page, at) as u64 != BLOCK_BYTES {
                return Err(fail(format!("{name} size is {}, expected {BLOCK_BYTES}", word(page, at))));
            }
        }
        let geometry =
            Geometry { rows: long(page, 16), row_bytes: word(page, 24), rows_per_block: word(page, 28) };
        let geometry = geometry.check().map_err(&fail)?;
        if long(page, 36) != geometry.blocks() {
            let (found, expected) = (long(page, 36), geometry.blocks());
            return Err(fail(format!("header says {found} blocks, its rows need {expected}")));
        }
        if file_bytes != geometry.file_bytes() {
            let hint = "the volume is truncated, or something was appended";
            let (path, expected) = (path.to_owned(), geometry.file_bytes());
            return Err(ArtifactError::Length { path, expected, found: file_bytes, hint });
        }
        let mut id = [0; 16];
        id.copy_from_slice(&page[44..60]);
        let extension = if page[60..].iter().all(|&b| b == 0) {
            None
        } else if &page[EXTENSION_AT..EXTENSION_AT + 8] == TAG {
            Some(parse_extension(page).map_err(&fail)?)
        } else {
            return Err(fail(
                "header: unknown bytes after the version-1 fields; damaged, or of another writer".into(),
            ));
        };
        Ok(Self { geometry, id: ArtifactId(id), extension })
    }
}

fn check_format(name: &str) -> Result<(), String> {
    let legal = !name.is_empty() && name.len() <= 32 && name.bytes().all(|b| b.is_ascii_graphic());
    if legal {
        Ok(())
    } else {
        Err(format!("format name {name:.40?} is not 1 to 32 printable ASCII characters"))
    }
}

fn parse_extension(page: &[u8]) -> Result<Extension, String> {
    let total = word(page, EXTENSION_AT + 8) as usize;
    let count = word(page, EXTENSION_AT + 48) as usize;
    let expected = count.checked_mul(4).and_then(|n| n.checked_add(EXTENSION_FIXED));
    if word(page, EXTENSION_AT + 12) != 1 {
        return Err(format!("header: extension version {} is unknown", word(page, EXTENSION_AT + 12)));
    }
    if expected != Some(total) || EXTENSION_AT + total > page.len() {
        return Err(format!("header: extension of {total} bytes does not fit its {count} scale words"));
    }
    let end = EXTENSION_AT + total;
    let mut stored = Digest([0; 32]);
    stored.0.copy_from_slice(&page[end - 32..end]);
    let mut bare = page.to_vec();
    bare[end - 32..end].fill(0);
    let found = Digest::of(&bare);
    if found != stored {
        return Err(format!("header: digest is {found}, expected {stored}; the header page is damaged"));
    }
    let name = &page[EXTENSION_AT + 16..EXTENSION_AT + 48];
    let used = name.iter().rposition(|&b| b != 0).map_or(0, |last| last + 1);
    let format =
        std::str::from_utf8(&name[..used]).map_err(|_| "header: format name is not ASCII".to_owned())?;
    check_format(format)?;
    let scales = (0..count).map(|i| f32::from_bits(word(page, EXTENSION_AT + 52 + 4 * i))).collect();
    let mut row_digest = Digest([0; 32]);
    row_digest.0.copy_from_slice(&page[end - 64..end - 32]);
    Ok(Extension { format: format.to_owned(), scales, row_digest })
}

fn word(page: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&page[at..at + 4]);
    u32::from_le_bytes(bytes)
}

fn long(page: &[u8], at: usize) -> u64 {
    u64::from(word(page, at)) | u64::from(word(page, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn published_sizes_follow_from_the_geometry() {
        // Rows of the published table; file sizes of the published volumes.
        let rows = 320_001_536;
        for (row_bytes, bytes) in [(160, 52_429_058_048), (320, 109_227_196_416), (90, 29_127_258_112)] {
            assert_eq!(Geometry::new(rows, row_bytes).unwrap().file_bytes(), bytes);
        }
    }

    fn header() -> VolumeHeader {
        let geometry = Geometry::new(100, 160).unwrap();
        let extension = Extension {
            format: "fp8_e4m3fn".into(),
            scales: vec![0.5, f32::MIN_POSITIVE],
            row_digest: Digest([7; 32]),
        };
        VolumeHeader { geometry, id: volume_id(&geometry, &extension), extension: Some(extension) }
    }

    #[test]
    fn the_extension_lies_where_the_decision_puts_it() {
        let page = header().encode().unwrap();
        assert_eq!(&page[..8], b"NINFERNG");
        assert_eq!(&page[60..72], b"\0\0\0\0INFXNGRM");
        assert_eq!(word(&page, 72), 124);
        assert_eq!(&page[80..91], b"fp8_e4m3fn\0");
        assert_eq!(word(&page, 112), 2);
        assert_eq!(word(&page, 116), 0.5f32.to_bits());
        assert_eq!(&page[124..156], &[7; 32]);
        assert_eq!(VolumeHeader::parse(Path::new("v"), &page, 4096 * 5).unwrap(), header());
    }

    #[test]
    fn every_changed_byte_of_a_tagged_header_is_refused_or_changes_the_id() {
        let page = header().encode().unwrap();
        for at in 0..page.len() {
            let mut bad = page.clone();
            bad[at] ^= 0x41;
            assert!(VolumeHeader::parse(Path::new("v"), &bad, 4096 * 5).is_err(), "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn hostile_headers_never_panic(patches in proptest::collection::vec((0usize..200, any::<u8>()), 0..12), len: u64) {
            let mut page = header().encode().unwrap();
            for (at, byte) in patches {
                page[at] = byte;
            }
            let _ = VolumeHeader::parse(Path::new("v"), &page, len);
            let _ = VolumeHeader::parse(Path::new("v"), &page, 4096 * 5);
        }
    }
}
