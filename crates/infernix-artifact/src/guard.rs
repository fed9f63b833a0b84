//! Mapped files that may shrink. Touching a page beyond the end of a file raises SIGBUS, which would end the process.
//! A handler looks whether the address lies in one of our maps; if so it puts zero pages over the rest of that map and
//! raises the map's flag, so that the reader goes on with zeros and then finds [`ArtifactError::Shrunk`] at its next
//! check. Any other SIGBUS goes to the handler that was there before.

#![expect(unsafe_code, reason = "mapping files and handling the signal that a shrunk one raises")]

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memmap2::Mmap;

use crate::{ArtifactError, Result};

/// A guarded range of addresses; free while `start` is 0.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    shrunk: AtomicBool,
}

/// Files mapped at a time; beyond that readers copy.
const SLOTS: usize = 1024;
/// Marks a slot that is being filled; no address.
const CLAIMED: usize = 1;

static MAPS: [Slot; SLOTS] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), shrunk: AtomicBool::new(false) } };
        SLOTS];

/// The handler that was installed before ours, or the error of installing ours.
static PREVIOUS: OnceLock<std::result::Result<libc::sigaction, i32>> = OnceLock::new();

/// A guarded read-only map of a whole file.
#[derive(Debug)]
pub(crate) struct GuardedMap {
    map: Mmap,
    slot: usize,
    path: PathBuf,
}

impl GuardedMap {
    /// Maps `file`; `Ok(None)` where it cannot be guarded and the caller had better copy.
    pub(crate) fn new(file: &File, path: &Path) -> io::Result<Option<Self>> {
        if install().is_err() {
            return Ok(None);
        }
        // SAFETY: the map is read-only and never written through. Another process may change the file: stored words
        // are plain integers for which any value is valid, and a shrunk file is what this module handles.
        let map = unsafe { Mmap::map(file)? };
        let claim =
            |slot: &Slot| slot.start.compare_exchange(0, CLAIMED, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        let Some(slot) = MAPS.iter().position(claim) else { return Ok(None) };
        let start = map.as_ptr() as usize;
        MAPS[slot].shrunk.store(false, Ordering::SeqCst);
        MAPS[slot].end.store(start + map.len(), Ordering::SeqCst);
        MAPS[slot].start.store(start, Ordering::SeqCst);
        Ok(Some(Self { map, slot, path: path.to_owned() }))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Whether a missing page was ever touched.
    pub(crate) fn check(&self) -> Result<()> {
        if MAPS[self.slot].shrunk.load(Ordering::SeqCst) {
            return Err(ArtifactError::Shrunk { path: self.path.clone() });
        }
        Ok(())
    }
}

impl Drop for GuardedMap {
    fn drop(&mut self) {
        MAPS[self.slot].end.store(0, Ordering::SeqCst);
        MAPS[self.slot].start.store(0, Ordering::SeqCst);
    }
}

fn install() -> std::result::Result<(), i32> {
    let installed = PREVIOUS.get_or_init(|| {
        // SAFETY: sigaction is plain data for which zero is valid; both pointers are to live values; the handler only
        // reads atomics and calls mmap, which is a bare system call.
        unsafe {
            let mut previous: libc::sigaction = std::mem::zeroed();
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            match libc::sigaction(libc::SIGBUS, &action, &mut previous) {
                0 => Ok(previous),
                _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
            }
        }
    });
    installed.as_ref().map(|_| ()).map_err(|code| *code)
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo for SA_SIGINFO handlers.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in &MAPS {
        let (start, end) = (slot.start.load(Ordering::SeqCst), slot.end.load(Ordering::SeqCst));
        if start > CLAIMED && (start..end).contains(&address) {
            // 4096 divides every page size; maps start on a page, so this is the first byte of a 4 KiB page.
            let page = address & !4095;
            // SAFETY: page..end lies within a map of ours that is alive while its slot is filled; replacing it by zero
            // pages keeps every reference into it readable.
            let fixed = unsafe {
                libc::mmap(
                    page as *mut libc::c_void,
                    end - page,
                    libc::PROT_READ,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                    -1,
                    0,
                )
            };
            if fixed != libc::MAP_FAILED {
                slot.shrunk.store(true, Ordering::SeqCst);
                return;
            }
        }
    }
    forward(signal, info, context);
}

/// Hands the signal to whoever had it before.
fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.get().and_then(|p| p.as_ref().ok());
    // SAFETY: a handler installed with SA_SIGINFO has this signature, one without takes the number alone. Without a
    // handler the default action is restored; returning then repeats the fault, which ends the process as it should.
    unsafe {
        match previous {
            Some(p) if p.sa_sigaction > libc::SIG_IGN && p.sa_flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(p.sa_sigaction);
                handler(signal, info, context);
            }
            Some(p) if p.sa_sigaction > libc::SIG_IGN => {
                let handler: extern "C" fn(libc::c_int) = std::mem::transmute(p.sa_sigaction);
                handler(signal);
            }
            _ => {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, std::ptr::null_mut());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_a_page_that_is_gone_reads_zeros_and_raises_the_flag() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![7; 5 * 4096]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let map = GuardedMap::new(&file, &path).unwrap().unwrap();
        file.set_len(4096).unwrap();
        map.check().unwrap();
        assert_eq!(map.bytes()[0], 7);
        assert_eq!(map.bytes()[4 * 4096 + 5], 0);
        assert!(matches!(map.check(), Err(ArtifactError::Shrunk { .. })));
        assert_eq!(map.bytes()[2 * 4096], 0);
    }
}
