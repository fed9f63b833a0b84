//! Files that are written: where they are, and how they are opened.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Where a file is that a whole new one may replace by its name: links are followed, also to a file that is not there yet.
///
/// # Errors
/// What is there is no regular file, or cannot be looked at.
pub fn place(path: &Path) -> io::Result<PathBuf> {
    match path.metadata() {
        Ok(m) if m.is_file() => path.canonicalize(),
        Ok(m) => Err(io::Error::other(if m.is_dir() { "it is a folder" } else { "it is no regular file" })),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let mut at = path.to_owned();
            // Links that go round in a circle are another error than these, so this is bounded by their number.
            while let Ok(target) = at.read_link() {
                at = at.parent().unwrap_or(Path::new("")).join(target);
            }
            let folder = at.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if folder.is_dir() { Ok(at) } else { Err(e) }
        }
        Err(e) => Err(e),
    }
}

/// Opens a file to write to it, without waiting for a reader where it is a pipe.
///
/// # Errors
/// It cannot be opened; it is a pipe that nobody reads.
pub fn open_to_write(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    {
        use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
        std::os::unix::fs::OpenOptionsExt::custom_flags(options, OFlags::NONBLOCK.bits() as i32);
        let file = options.open(path).map_err(|e| {
            let unread = e.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error());
            if unread { io::Error::other("it is a pipe that nobody reads") } else { e }
        })?;
        fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        Ok(file)
    }
    #[cfg(not(unix))]
    options.open(path)
}

#[cfg(all(test, unix))]
pub(crate) mod tests {
    use super::*;
    use std::io::Write as _;

    pub(crate) fn pipe(path: &Path) {
        let made = std::process::Command::new("mkfifo").arg(path).status();
        assert!(made.is_ok_and(|s| s.success()), "mkfifo");
    }

    #[test]
    fn links_are_followed_and_only_regular_files_may_be_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().canonicalize().unwrap().join(name);
        std::fs::write(at("real"), "x").unwrap();
        for (name, target) in
            [("to", "real"), ("toto", "to"), ("dangling", "new"), ("far", "no/new"), ("a", "b"), ("b", "a")]
        {
            std::os::unix::fs::symlink(target, at(name)).unwrap();
        }
        assert_eq!(place(&at("real")).unwrap(), at("real"));
        assert_eq!(place(&at("toto")).unwrap(), at("real"));
        assert_eq!(place(&at("dangling")).unwrap(), at("new"));
        assert_eq!(place(&at("new")).unwrap(), at("new"));
        pipe(&at("pipe"));
        std::os::unix::fs::symlink("pipe", at("topipe")).unwrap();
        for bad in ["far", "a", "pipe", "topipe", "", "no/file"] {
            assert!(place(&at(bad)).is_err(), "{bad}");
        }
        assert!(place(Path::new("/dev/null")).unwrap_err().to_string().contains("no regular file"));
    }

    #[test]
    fn a_pipe_that_nobody_reads_is_an_error_and_not_a_wait() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        pipe(&path);
        let error = open_to_write(File::options().write(true), &path).unwrap_err();
        assert!(error.to_string().contains("nobody reads"), "{error}");
        let reader = {
            let path = path.clone();
            std::thread::spawn(move || std::fs::read_to_string(path).unwrap())
        };
        let mut file = loop {
            if let Ok(file) = open_to_write(File::options().write(true), &path) {
                break file;
            }
            std::thread::yield_now();
        };
        // More than a pipe holds: it waits for the reader as before.
        file.write_all(&vec![b'x'; 1 << 20]).unwrap();
        drop(file);
        assert_eq!(reader.join().unwrap().len(), 1 << 20);
    }
}
