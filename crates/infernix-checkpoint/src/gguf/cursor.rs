//! Reads a header front to back through one buffer, never beyond the end of the file or the limit of a header.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::CheckpointError;
use crate::limits::MAX_GGUF_HEADER_BYTES;
use crate::sniff::SNIFF_BYTES;

/// Bytes read at a time.
const BUFFER_BYTES: usize = 256 << 10;

/// A position in a file's header. Everything consumed goes into a digest.
pub(super) struct Cursor<'a> {
    path: &'a Path,
    file: &'a File,
    /// Length of the file.
    len: u64,
    /// Offset of the next byte to consume.
    at: u64,
    buffer: Vec<u8>,
    /// Consumed bytes of `buffer`.
    used: usize,
    hasher: blake3::Hasher,
}

impl<'a> Cursor<'a> {
    /// At the start of `file`, whose cursor must be there too.
    pub(super) fn new(path: &'a Path, file: &'a File, len: u64) -> Self {
        Self { path, file, len, at: 0, buffer: Vec::new(), used: 0, hasher: blake3::Hasher::new() }
    }

    /// Offset of the next byte.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Bytes behind the next one to the end of the file.
    pub(super) fn remaining(&self) -> u64 {
        self.len - self.at
    }

    /// BLAKE3 of everything consumed.
    pub(super) fn digest(&self) -> [u8; 32] {
        *self.hasher.finalize().as_bytes()
    }

    /// An error at the current offset.
    pub(super) fn error(&self, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::GgufHeader { path: self.path.to_path_buf(), offset: self.at, reason: reason.into() }
    }

    /// Checks that `n` more bytes may be consumed.
    fn admit(&self, n: u64, what: &str) -> Result<(), CheckpointError> {
        if n > self.remaining() {
            return Err(self.error(format!(
                "{what} needs {n} bytes, the file ends {} bytes on; it is truncated or damaged",
                self.remaining()
            )));
        }
        if self.at + n > MAX_GGUF_HEADER_BYTES {
            return Err(self.error(format!(
                "{what} of {n} bytes would make the header longer than the limit of {MAX_GGUF_HEADER_BYTES} bytes"
            )));
        }
        Ok(())
    }

    /// The unconsumed part of the buffer, refilled when empty.
    fn fill(&mut self) -> Result<&[u8], CheckpointError> {
        if self.used == self.buffer.len() {
            self.used = 0;
            let want = self.remaining().min(BUFFER_BYTES as u64);
            self.buffer.clear();
            (&mut self.file)
                .take(want)
                .read_to_end(&mut self.buffer)
                .map_err(CheckpointError::io(self.path, "read"))?;
            if self.buffer.is_empty() {
                return Err(self.error("the file shrank while it was read"));
            }
        }
        Ok(&self.buffer[self.used..])
    }

    /// The first bytes of the file, as many as tell what it is; before anything is consumed.
    pub(super) fn start(&mut self) -> Result<Vec<u8>, CheckpointError> {
        if self.remaining() == 0 {
            return Ok(Vec::new());
        }
        let start = self.fill()?;
        Ok(start[..start.len().min(SNIFF_BYTES)].to_vec())
    }

    /// Consumes `n` bytes, handing them to `sink` in pieces.
    fn consume(&mut self, n: u64, what: &str, mut sink: impl FnMut(&[u8])) -> Result<(), CheckpointError> {
        self.admit(n, what)?;
        let mut rest = n;
        while rest > 0 {
            let piece = self.fill()?;
            let take = piece.len().min(usize::try_from(rest).unwrap_or(usize::MAX));
            let range = self.used..self.used + take;
            sink(&self.buffer[range.clone()]);
            self.hasher.update(&self.buffer[range]);
            self.used += take;
            self.at += take as u64;
            rest -= take as u64;
        }
        Ok(())
    }

    /// Consumes `n` bytes unseen.
    pub(super) fn skip(&mut self, n: u64, what: &str) -> Result<(), CheckpointError> {
        self.consume(n, what, |_| {})
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], CheckpointError> {
        let (mut out, mut done) = ([0; N], 0);
        self.consume(N as u64, what, |piece| {
            out[done..done + piece.len()].copy_from_slice(piece);
            done += piece.len();
        })?;
        Ok(out)
    }

    /// A little-endian u32.
    pub(super) fn u32(&mut self, what: &str) -> Result<u32, CheckpointError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    /// A little-endian u64.
    pub(super) fn u64(&mut self, what: &str) -> Result<u64, CheckpointError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length word and that many bytes of UTF-8, at most `limit`; nothing is allocated before both are checked.
    pub(super) fn text(&mut self, what: &str, limit: u64) -> Result<Box<str>, CheckpointError> {
        let len = self.u64(what)?;
        if len > limit {
            return Err(self.error(format!("{what} has {len} bytes, more than the limit of {limit}")));
        }
        self.admit(len, what)?;
        let mut bytes = Vec::with_capacity(len as usize);
        self.consume(len, what, |piece| bytes.extend_from_slice(piece))?;
        let text = String::from_utf8(bytes).map_err(|e| self.error(format!("{what} is not UTF-8: {e}")))?;
        Ok(text.into_boxed_str())
    }
}
