//! Reading a volume.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::header::{BLOCK_BYTES, Geometry, VolumeHeader};
use super::table::NgramTable;
use crate::io::{CHUNK, Interrupt, drop_cache, read_at};
use crate::{ArtifactError, Digest, Result};

/// An open volume. Never mapped: rows are read where they lie.
#[derive(Debug)]
pub struct Volume {
    path: PathBuf,
    file: File,
    header: VolumeHeader,
}

/// What [`Volume::verify`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeIntegrity {
    /// Digest of the rows as they are.
    pub row_digest: Option<Digest>,
    /// Digest the header promises; `None` for untagged volumes.
    pub recorded: Option<Digest>,
    /// What is wrong, in words.
    pub problems: Vec<String>,
}

impl VolumeIntegrity {
    /// True when nothing is wrong. Says nothing about rows where no digest is recorded.
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }
}

impl Volume {
    /// Opens a volume and checks header, geometry and length.
    ///
    /// # Errors
    /// See [`VolumeHeader::parse`].
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| ArtifactError::io(path, "open", e))?;
        let meta = file.metadata().map_err(|e| ArtifactError::io(path, "look at", e))?;
        if !meta.is_file() {
            return Err(ArtifactError::Volume { path: path.to_owned(), reason: "is no regular file".into() });
        }
        let mut page = vec![0; meta.len().min(BLOCK_BYTES) as usize];
        read_at(&file, path, &mut page, 0)?;
        let header = VolumeHeader::parse(path, &page, meta.len())?;
        Ok(Self { path: path.to_owned(), file, header })
    }

    /// The header.
    pub fn header(&self) -> &VolumeHeader {
        &self.header
    }

    /// Where rows lie.
    pub fn geometry(&self) -> &Geometry {
        &self.header.geometry
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file, for readers with their own I/O (see [`Geometry::row_offset`]).
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The bytes of row `row`.
    ///
    /// # Errors
    /// A row beyond the table; I/O errors.
    pub fn row(&self, row: u64) -> Result<Vec<u8>> {
        let mut out = vec![0; self.header.geometry.row_bytes as usize];
        let offset = self.header.geometry.row_offset(row).ok_or_else(|| self.beyond(row))?;
        read_at(&self.file, &self.path, &mut out, offset)?;
        Ok(out)
    }

    fn beyond(&self, row: u64) -> ArtifactError {
        let reason = format!("row {row} is beyond its {} rows", self.header.geometry.rows);
        ArtifactError::Volume { path: self.path.clone(), reason }
    }

    /// Fills `out` with whole rows from `first` on, without block padding, reading whole blocks at a time.
    ///
    /// # Errors
    /// Rows beyond the table, an `out` that is no multiple of a row; I/O errors.
    pub fn read_rows(&self, first: u64, out: &mut [u8]) -> Result<()> {
        let g = self.header.geometry;
        let (width, rpb) = (g.row_bytes as usize, u64::from(g.rows_per_block));
        if !out.len().is_multiple_of(width) {
            return Err(ArtifactError::Invalid(format!("{} bytes are no whole rows of {width}", out.len())));
        }
        let count = (out.len() / width) as u64;
        if first.checked_add(count).is_none_or(|end| end > g.rows) {
            return Err(self.beyond(first.saturating_add(count.saturating_sub(1))));
        }
        let (mut row, mut rest) = (first, out);
        let mut buffer = Vec::new();
        while !rest.is_empty() {
            let block = row / rpb;
            let last = (row + (rest.len() / width) as u64 - 1) / rpb;
            let blocks = (last - block + 1).min(CHUNK as u64 / BLOCK_BYTES);
            buffer.resize((blocks * BLOCK_BYTES) as usize, 0);
            let at = BLOCK_BYTES * (1 + block);
            read_at(&self.file, &self.path, &mut buffer, at)?;
            drop_cache(&self.file, at, buffer.len() as u64);
            for block in buffer.chunks_exact(BLOCK_BYTES as usize) {
                let skip = (row % rpb) as usize;
                let take = (rpb as usize - skip).min(rest.len() / width);
                let (now, later) = std::mem::take(&mut rest).split_at_mut(take * width);
                now.copy_from_slice(&block[skip * width..(skip + take) * width]);
                rest = later;
                row += take as u64;
            }
        }
        Ok(())
    }

    /// Reads the whole volume once: row digest and zero padding.
    ///
    /// # Errors
    /// I/O errors, an interruption; what is found wrong is in the result.
    pub fn verify(&self, interrupt: &Interrupt, mut progress: impl FnMut(u64)) -> Result<VolumeIntegrity> {
        let g = self.header.geometry;
        let used = (g.row_bytes * g.rows_per_block) as usize;
        let mut result = VolumeIntegrity {
            recorded: self.header.extension.as_ref().map(|e| e.row_digest),
            ..VolumeIntegrity::default()
        };
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; CHUNK.min(g.file_bytes() as usize)];
        let (mut at, mut left) = (BLOCK_BYTES, g.rows);
        while at < g.file_bytes() {
            interrupt.check()?;
            let take = (g.file_bytes() - at).min(buffer.len() as u64 / BLOCK_BYTES * BLOCK_BYTES) as usize;
            read_at(&self.file, &self.path, &mut buffer[..take], at)?;
            drop_cache(&self.file, at, take as u64);
            for (i, block) in buffer[..take].chunks_exact(BLOCK_BYTES as usize).enumerate() {
                let rows = left.min(u64::from(g.rows_per_block));
                let full = (rows as usize * g.row_bytes as usize).min(used);
                hasher.update(&block[..full]);
                left -= rows;
                if let Some(bad) = block[full..].iter().position(|&b| b != 0)
                    && result.problems.len() < 20
                {
                    let place = at + i as u64 * BLOCK_BYTES + (full + bad) as u64;
                    result.problems.push(format!("padding at byte {place} is not zero"));
                }
            }
            at += take as u64;
            progress(take as u64);
        }
        let found = Digest::from(hasher.finalize());
        result.row_digest = Some(found);
        if let Some(expected) = result.recorded.filter(|expected| *expected != found) {
            result.problems.push(format!("rows: digest is {found}, expected {expected}"));
        }
        if let Some(extension) = &self.header.extension {
            let id = super::volume_id(&g, extension);
            if id != self.header.id {
                result.problems.push(format!("header: id is {}, its contents make {id}", self.header.id));
            }
        }
        Ok(result)
    }

    /// Whether this volume may serve `table`. An untagged volume needs the artifact's own id and geometry (its format
    /// is then the artifact's). A tagged one needs equal rows and the row width of its own format; another id or
    /// format is returned as a notice, not refused.
    ///
    /// # Errors
    /// [`ArtifactError::Volume`] with what differs.
    pub fn accept(&self, table: &NgramTable) -> Result<Vec<String>> {
        let fail = |reason: String| Err(ArtifactError::Volume { path: self.path.clone(), reason });
        let (own, wanted) = (self.header.geometry, table.geometry);
        let Some(extension) = &self.header.extension else {
            if self.header.id != table.volume_id {
                let (found, expected) = (self.header.id, table.volume_id);
                return fail(format!(
                    "carries no format and its id is {found}, but the artifact names {expected}; use the artifact's own volume"
                ));
            }
            if own != wanted {
                return fail(format!("geometry {own:?} is not the artifact's {wanted:?}"));
            }
            return Ok(Vec::new());
        };
        if own.rows != wanted.rows {
            return fail(format!("has {} rows, the artifact's table has {}", own.rows, wanted.rows));
        }
        let width = |format: &str, row_bytes: u32| {
            let format = super::RowFormat::from_name(format)?;
            (1..=BLOCK_BYTES as u32 * 2).find(|&w| format.row_bytes(w) == Some(row_bytes))
        };
        let same_width = if extension.format == table.format {
            own.row_bytes == wanted.row_bytes
        } else {
            let (a, b) = (width(&extension.format, own.row_bytes), width(&table.format, wanted.row_bytes));
            a.is_some() && a == b
        };
        if !same_width {
            return fail(format!(
                "rows of {} bytes as {} are not as wide as the artifact's {} bytes as {}",
                own.row_bytes, extension.format, wanted.row_bytes, table.format
            ));
        }
        let tables = table.tables.len().max(1);
        if !extension.scales.is_empty() && extension.scales.len() != tables {
            return fail(format!("has {} scale words for {tables} tables", extension.scales.len()));
        }
        let mut notices = Vec::new();
        if self.header.id != table.volume_id {
            notices.push(format!(
                "{}: id {} is not the {} that the artifact was made with",
                self.path.display(),
                self.header.id,
                table.volume_id
            ));
        }
        if extension.format != table.format {
            let path = self.path.display();
            notices.push(format!(
                "{path}: format {} instead of the artifact's {}",
                extension.format, table.format
            ));
        }
        Ok(notices)
    }
}
