//! Opening a set and reading its objects.
//!
//! **Mapped files.** [`Artifact::bytes`] maps files. If a mapped file is cut short by another process, touching the
//! missing pages would raise SIGBUS and end the process. Instead: lengths are checked at open and again at each call of
//! `bytes`; a page that vanishes later reads as zeros and raises a flag (see `guard.rs`), which [`ObjectBytes::check`]
//! and [`Artifact::check_unchanged`] turn into [`ArtifactError::Shrunk`], so a reader that checks once per round never
//! lets a wrong result out; bulk readers use [`Artifact::read_at`], which never maps; and [`Mapping::Copied`] makes
//! `bytes` read into memory, for files on media that other machines may change.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::framing::{EntryHeader, FRAME_ALIGNMENT, HEADER_BYTES, check_part};
use crate::guard::GuardedMap;
use crate::io::{CHUNK, drop_cache, folder_of, read_at};
use crate::{ArtifactError, ArtifactId, Directory, Object, Result, parse_directory};

/// How [`Artifact::bytes`] gets at its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mapping {
    /// Pages of the file, shared and evictable.
    #[default]
    Mapped,
    /// A private copy: costs memory, but nothing done to the file later can hurt the reader.
    Copied,
}

/// How to open a set.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Policy of [`Artifact::bytes`].
    pub mapping: Mapping,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    /// Expected, and at open actual, length.
    bytes: u64,
    /// Where its payload starts in the file.
    payload_start: u64,
    /// Where its payload starts in the logical payload.
    logical_start: u64,
    payload_bytes: u64,
    map: OnceLock<Arc<GuardedMap>>,
}

/// An open, structurally checked set of files.
#[derive(Debug)]
pub struct Artifact {
    files: Vec<OpenFile>,
    directory: Directory,
    id: ArtifactId,
    json_bytes: u64,
    options: OpenOptions,
}

/// A run of payload in one file, for readers with their own I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the file in the set.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// Bytes of an object: shared, immutable, independent of the [`Artifact`]'s lifetime.
#[derive(Clone, Debug)]
pub struct ObjectBytes {
    source: Source,
    range: Range<usize>,
}

#[derive(Clone, Debug)]
enum Source {
    Mapped(Arc<GuardedMap>),
    Owned(Arc<Vec<u8>>),
}

impl AsRef<[u8]> for ObjectBytes {
    fn as_ref(&self) -> &[u8] {
        match &self.source {
            Source::Mapped(map) => &map.bytes()[self.range.clone()],
            Source::Owned(bytes) => &bytes[self.range.clone()],
        }
    }
}

impl std::ops::Deref for ObjectBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.as_ref()
    }
}

impl ObjectBytes {
    /// A sub-range that shares the same memory; `None` when out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let range = self.range.start + range.start..self.range.start + range.end;
        Some(Self { source: self.source.clone(), range })
    }

    /// Looks whether the file lost pages that were read through these bytes (or through any other of the same file):
    /// they read as zeros.
    ///
    /// # Errors
    /// [`ArtifactError::Shrunk`].
    pub fn check(&self) -> Result<()> {
        match &self.source {
            Source::Mapped(map) => map.check(),
            Source::Owned(_) => Ok(()),
        }
    }

    /// True when the bytes are pages of the file.
    pub fn is_mapped(&self) -> bool {
        matches!(self.source, Source::Mapped(_))
    }
}

impl Artifact {
    /// Opens the set whose entry is `path`, with default options.
    ///
    /// # Errors
    /// See [`Self::open_with`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, OpenOptions::default())
    }

    /// Opens the set whose entry is `path`; siblings are looked up beside it.
    ///
    /// # Errors
    /// Anything that is no complete version-3 set: wrong magic, malformed directory, a missing, foreign, swapped,
    /// truncated or padded file.
    pub fn open_with(path: &Path, options: OpenOptions) -> Result<Self> {
        let (file, bytes) = open_file(path)?;
        let mut head = vec![0; bytes.min(64) as usize];
        read_at(&file, path, &mut head, 0)?;
        let header = EntryHeader::parse(path, &head, bytes)?;
        let mut text = vec![0; header.json_bytes as usize];
        read_at(&file, path, &mut text, HEADER_BYTES)?;
        let directory = parse_directory(path, &text)?;
        drop(text);
        let mut files = Vec::with_capacity(directory.files.len());
        let (mut entry, mut logical_start) = (Some((file, bytes)), 0);
        for (index, planned) in directory.files.iter().enumerate() {
            let (path, file, bytes, payload_start) = match (&planned.path, entry.take()) {
                (None, Some((file, bytes))) => (path.to_owned(), file, bytes, header.payload_start()),
                (Some(name), _) => {
                    let path = folder_of(path).join(name);
                    let (file, bytes) = open_sibling(&path)?;
                    let mut head = vec![0; bytes.min(HEADER_BYTES) as usize];
                    read_at(&file, &path, &mut head, 0)?;
                    check_part(&path, &head, index as u64, header.artifact_id)?;
                    (path, file, bytes, FRAME_ALIGNMENT)
                }
                (None, None) => continue, // refused by validation
            };
            let expected = payload_start.saturating_add(planned.payload_bytes);
            if bytes != expected {
                let hint = if bytes < expected {
                    "it is truncated: the download or copy did not finish"
                } else {
                    "something was appended to it"
                };
                return Err(ArtifactError::Length { path, expected, found: bytes, hint });
            }
            let payload_bytes = planned.payload_bytes;
            files.push(OpenFile {
                path,
                file,
                bytes,
                payload_start,
                logical_start,
                payload_bytes,
                map: OnceLock::new(),
            });
            logical_start += payload_bytes;
        }
        Ok(Self { files, directory, id: header.artifact_id, json_bytes: header.json_bytes, options })
    }

    /// The directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Identity of the set.
    pub fn artifact_id(&self) -> ArtifactId {
        self.id
    }

    /// Path of the entry.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    /// Paths of all files, entry first.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The open file with this index, for readers with their own I/O.
    pub fn file(&self, index: usize) -> Option<&File> {
        self.files.get(index).map(|file| &file.file)
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Length of the directory JSON with its reserve.
    pub fn json_bytes(&self) -> u64 {
        self.json_bytes
    }

    /// The object named `id`.
    ///
    /// # Errors
    /// [`ArtifactError::Missing`].
    pub fn object(&self, id: &str) -> Result<&Object> {
        self.directory.objects.iter().find(|object| object.id == id).ok_or_else(|| self.missing("object", id))
    }

    pub(crate) fn missing(&self, what: &'static str, name: &str) -> ArtifactError {
        ArtifactError::Missing { path: self.path().to_owned(), what, name: name.to_owned() }
    }

    /// Where the payload range lies in the files, in order.
    ///
    /// # Errors
    /// A range beyond the payload.
    pub fn segments(&self, offset: u64, bytes: u64) -> Result<Vec<Segment>> {
        let end = offset.checked_add(bytes).filter(|&end| end <= self.directory.payload_bytes()).ok_or_else(
            || {
                let (path, total) = (self.path().display(), self.directory.payload_bytes());
                ArtifactError::Invalid(format!(
                    "{path}: {bytes} bytes at {offset} are outside the payload of {total} bytes"
                ))
            },
        )?;
        let mut segments = Vec::new();
        for (index, file) in self.files.iter().enumerate() {
            let start = offset.max(file.logical_start);
            let stop = end.min(file.logical_start + file.payload_bytes);
            if start < stop {
                let offset = file.payload_start + (start - file.logical_start);
                segments.push(Segment { file: index, offset, bytes: stop - start });
            }
        }
        Ok(segments)
    }

    /// Fills `out` from payload `offset` without mapping, and tells the kernel not to keep the pages.
    ///
    /// # Errors
    /// A range beyond the payload, a file that shrank, or an I/O error.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(offset, out, true)
    }

    /// Like [`Self::read_at`], leaving the pages in the cache for the next reader.
    ///
    /// # Errors
    /// As [`Self::read_at`].
    pub fn read_at_cached(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(offset, out, false)
    }

    fn read(&self, offset: u64, out: &mut [u8], drop: bool) -> Result<()> {
        let mut rest = out;
        for segment in self.segments(offset, rest.len() as u64)? {
            let (now, later) = rest.split_at_mut(segment.bytes as usize);
            let file = &self.files[segment.file];
            for (i, chunk) in now.chunks_mut(CHUNK).enumerate() {
                let at = segment.offset + (i * CHUNK) as u64;
                read_at(&file.file, &file.path, chunk, at)?;
                if drop {
                    drop_cache(&file.file, at, chunk.len() as u64);
                }
            }
            rest = later;
        }
        Ok(())
    }

    /// The bytes of `object`: mapped, or copied where it straddles files or the options say so. Addresses of mapped
    /// and copied bytes are aligned like the object's offset, up to 4096.
    ///
    /// # Errors
    /// A file that changed its length, or an I/O error.
    pub fn bytes(&self, object: &Object) -> Result<ObjectBytes> {
        let segments = self.segments(object.offset, object.bytes)?;
        if let ([segment], Mapping::Mapped) = (segments.as_slice(), self.options.mapping) {
            // A set whose segments are no multiples of a page would misalign what follows.
            if segment.offset % FRAME_ALIGNMENT == object.offset % FRAME_ALIGNMENT
                && let Some(map) = self.map(segment.file)?
            {
                let start = segment.offset as usize;
                return Ok(ObjectBytes {
                    source: Source::Mapped(map),
                    range: start..start + segment.bytes as usize,
                });
            }
        }
        let align = FRAME_ALIGNMENT as usize;
        let bytes = usize::try_from(object.bytes).unwrap_or(usize::MAX);
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(bytes.saturating_add(2 * align)).map_err(|_| {
            ArtifactError::Invalid(format!("object {:?}: no memory for a copy of {bytes} bytes", object.id))
        })?;
        buffer.resize(bytes + 2 * align, 0);
        let start = buffer.as_ptr().align_offset(align) + object.offset as usize % align;
        self.read(object.offset, &mut buffer[start..start + bytes], false)?;
        Ok(ObjectBytes { source: Source::Owned(Arc::new(buffer)), range: start..start + bytes })
    }

    /// # Errors
    /// [`ArtifactError::Shrunk`] or [`ArtifactError::Length`] when a file's length is no longer what it was at open.
    pub fn check_unchanged(&self) -> Result<()> {
        self.files.iter().try_for_each(OpenFile::check)
    }

    fn map(&self, index: usize) -> Result<Option<Arc<GuardedMap>>> {
        let file = &self.files[index];
        file.check()?;
        if let Some(map) = file.map.get() {
            return Ok(Some(map.clone()));
        }
        let map =
            GuardedMap::new(&file.file, &file.path).map_err(|e| ArtifactError::io(&file.path, "map", e))?;
        let Some(map) = map else { return Ok(None) };
        if map.bytes().len() as u64 != file.bytes {
            return Err(ArtifactError::Shrunk { path: file.path.clone() });
        }
        Ok(Some(file.map.get_or_init(|| Arc::new(map)).clone()))
    }

    /// The resource that fills `role` of `component`, byte for byte.
    ///
    /// # Errors
    /// [`ArtifactError::Missing`], or what reading it ends in.
    pub fn resource(&self, component: &str, role: &str) -> Result<Vec<u8>> {
        let component =
            self.directory.components.get(component).ok_or_else(|| self.missing("component", component))?;
        let id = component.resources.get(role).ok_or_else(|| self.missing("resource", role))?;
        let object = self.object(id)?;
        let mut out = vec![0; object.bytes as usize];
        self.read(object.offset, &mut out, false)?;
        Ok(out)
    }

    /// (payload start in the file, logical start, payload bytes) of file `index`.
    pub(crate) fn placement(&self, index: usize) -> (u64, u64, u64) {
        let file = &self.files[index];
        (file.payload_start, file.logical_start, file.payload_bytes)
    }

    pub(crate) fn file_and_path(&self, index: usize) -> (&File, &Path) {
        (&self.files[index].file, &self.files[index].path)
    }
}

impl OpenFile {
    fn check(&self) -> Result<()> {
        self.map.get().map_or(Ok(()), |map| map.check())?;
        let found = self.file.metadata().map_err(|e| ArtifactError::io(&self.path, "look at", e))?.len();
        if found == self.bytes {
            return Ok(());
        }
        if found < self.bytes {
            return Err(ArtifactError::Shrunk { path: self.path.clone() });
        }
        let hint = "it grew while it was in use";
        Err(ArtifactError::Length { path: self.path.clone(), expected: self.bytes, found, hint })
    }
}

fn open_file(path: &Path) -> Result<(File, u64)> {
    let file = File::open(path).map_err(|e| ArtifactError::io(path, "open", e))?;
    let meta = file.metadata().map_err(|e| ArtifactError::io(path, "look at", e))?;
    if !meta.is_file() {
        return Err(ArtifactError::NotAnArtifact {
            path: path.to_owned(),
            reason: "is no regular file".into(),
        });
    }
    Ok((file, meta.len()))
}

fn open_sibling(path: &Path) -> Result<(File, u64)> {
    open_file(path).map_err(|error| match error {
        ArtifactError::Io { path, source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            ArtifactError::Io {
                path,
                action: "open a file that the entry lists (download it, or run an interrupted rename again)",
                source,
            }
        }
        other => other,
    })
}
