//! Reads of single 4 KiB blocks scattered over a large file, past the page cache: a 52 GB table would push everything
//! else out of it for rows that are rarely wanted twice.
//!
//! io_uring keeps many reads in flight from one thread; where the kernel or a container forbids it, each block is one
//! `pread`. Both give the same bytes.

use io_uring::{IoUring, opcode, types};
use rustix::fs::{Mode, OFlags};
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Bytes of a block, and the alignment that direct reads need.
pub(crate) const BLOCK: usize = 4096;
/// Reads in flight on one ring.
const DEPTH: usize = 64;

thread_local! {
    /// This thread's ring: not tried yet, refused, or ready.
    static RING: RefCell<Option<Option<IoUring>>> = const { RefCell::new(None) };
}

/// A file of whole blocks.
pub(crate) struct BlockFile {
    file: File,
}

/// A buffer of blocks, aligned for direct reads.
#[derive(Default)]
pub(crate) struct Blocks {
    bytes: Vec<u8>,
    start: usize,
    count: usize,
}

impl Blocks {
    fn resize(&mut self, count: usize) {
        self.count = count;
        let needed = (count + 1) * BLOCK;
        if self.bytes.len() < needed {
            self.bytes = vec![0; needed];
            self.start = self.bytes.as_ptr().align_offset(BLOCK);
        }
    }

    /// Block `index` of the last read.
    pub(crate) fn block(&self, index: usize) -> &[u8] {
        &self.bytes[self.start + index * BLOCK..][..BLOCK]
    }

    fn block_mut(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes[self.start + index * BLOCK..][..BLOCK]
    }
}

impl BlockFile {
    /// Opens for direct reads; through the page cache where the file system has none.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let direct = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty());
        Ok(Self { file: direct.map_or_else(|_| File::open(path), |fd| Ok(File::from(fd)))? })
    }

    /// Reads the blocks at these byte offsets (multiples of [`BLOCK`]).
    ///
    /// # Errors
    /// The first failing offset with its reason.
    pub(crate) fn read(&self, offsets: &[u64], out: &mut Blocks) -> Result<(), (u64, io::Error)> {
        out.resize(offsets.len());
        let mut done = vec![false; offsets.len()];
        RING.with_borrow_mut(|ring| {
            let ring = ring.get_or_insert_with(|| IoUring::new(DEPTH as u32).ok());
            // One block is read faster without a ring.
            if let Some(live) = ring.as_mut().filter(|_| offsets.len() > 1)
                && !self.read_ring(live, offsets, out, &mut done)
            {
                *ring = None;
            }
        });
        for (index, &offset) in offsets.iter().enumerate() {
            if !done[index] {
                self.file.read_exact_at(out.block_mut(index), offset).map_err(|e| (offset, e))?;
            }
        }
        Ok(())
    }

    /// Marks in `done` what the ring read whole; the rest is left to `pread`, which also words the error. False when
    /// the ring must not be used again.
    #[expect(unsafe_code, reason = "submission entries hold raw pointers")]
    fn read_ring(&self, ring: &mut IoUring, offsets: &[u64], out: &mut Blocks, done: &mut [bool]) -> bool {
        let fd = types::Fd(self.file.as_raw_fd());
        for begin in (0..offsets.len()).step_by(DEPTH) {
            let end = (begin + DEPTH).min(offsets.len());
            let mut flying = 0;
            for index in begin..end {
                let pointer = out.block_mut(index).as_mut_ptr();
                let entry = opcode::Read::new(fd, pointer, BLOCK as u32).offset(offsets[index]).build();
                // SAFETY: the buffer and the file outlive the read: this function returns only after every submitted
                // entry has completed, or leaks the buffer. Blocks of different entries do not overlap.
                if unsafe { ring.submission().push(&entry.user_data(index as u64)) }.is_err() {
                    break;
                }
                flying += 1;
            }
            while flying > 0 {
                match ring.submit_and_wait(1) {
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Err(_) => {
                        // Reads may still be under way: their target must stay.
                        std::mem::forget(std::mem::take(&mut out.bytes));
                        out.resize(out.count);
                        done.fill(false);
                        return false;
                    }
                }
                for completion in ring.completion() {
                    flying -= 1;
                    done[completion.user_data() as usize] = completion.result() == BLOCK as i32;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn file(blocks: usize) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks");
        let mut file = File::create(&path).unwrap();
        for i in 0..blocks {
            file.write_all(&[i as u8; BLOCK]).unwrap();
        }
        (folder, path)
    }

    #[test]
    fn scattered_blocks_come_back_in_the_order_asked_for() {
        let (_folder, path) = file(200);
        let reader = BlockFile::open(&path).unwrap();
        let offsets: Vec<u64> = (0..200u64).map(|i| i * 37 % 200 * BLOCK as u64).collect();
        let mut blocks = Blocks::default();
        for round in 0..3 {
            reader.read(&offsets, &mut blocks).unwrap();
            for (i, offset) in offsets.iter().enumerate() {
                let want = (offset / BLOCK as u64) as u8;
                assert!(blocks.block(i).iter().all(|b| *b == want), "round {round}, block {i}");
            }
        }
    }

    #[test]
    fn ring_and_pread_read_the_same() {
        let (_folder, path) = file(70);
        let reader = BlockFile::open(&path).unwrap();
        let offsets: Vec<u64> = (0..70u64).rev().map(|i| i * BLOCK as u64).collect();
        let mut ringed = Blocks::default();
        reader.read(&offsets, &mut ringed).unwrap();
        for (i, &offset) in offsets.iter().enumerate() {
            let mut single = Blocks::default();
            reader.read(&[offset], &mut single).unwrap();
            assert_eq!(single.block(0), ringed.block(i));
        }
    }

    #[test]
    fn a_block_past_the_end_names_its_offset() {
        let (_folder, path) = file(3);
        let reader = BlockFile::open(&path).unwrap();
        let wrong = 5 * BLOCK as u64;
        let (offset, _) = reader.read(&[0, wrong, BLOCK as u64], &mut Blocks::default()).unwrap_err();
        assert_eq!(offset, wrong);
    }
}
