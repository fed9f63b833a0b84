//! Where an output goes: a file appears whole or not at all, and what is no file is written into and stays what it is.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Links followed before a chain is taken for a loop, as Linux does.
const MOST_LINKS: usize = 40;

/// What a path names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A regular file or a free name, behind all links.
    File(PathBuf),
    /// A device, a pipe, a socket, or an open descriptor (`/dev/stdout`, `/dev/fd/N`): nothing that a rename may replace.
    Stream(PathBuf),
}

impl Target {
    /// Follows links, also one that leads to a free name.
    ///
    /// # Errors
    /// A folder, a loop of links, a link that cannot be read.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let mut at = std::path::absolute(path)?;
        for _ in 0..MOST_LINKS {
            // A descriptor may be a file that somebody else goes on writing to.
            if at.starts_with("/proc") || at.starts_with("/dev/fd") {
                return Ok(Self::Stream(path.to_owned()));
            }
            let Ok(about) = at.symlink_metadata() else { return Ok(Self::File(at)) };
            if about.is_dir() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            if !about.is_symlink() {
                return Ok(if about.is_file() { Self::File(at) } else { Self::Stream(path.to_owned()) });
            }
            let to = fs::read_link(&at)?;
            at = at.parent().unwrap_or(Path::new("/")).join(to);
        }
        Err(io::Error::other("a loop of links"))
    }
}

/// An output being written. Dropped before [`Output::finish`], it leaves a file as it was before.
pub(crate) struct Output {
    file: File,
    /// The file's name until it is whole, and its own.
    names: Option<(PathBuf, PathBuf)>,
}

impl Output {
    /// Opens a stream, or begins a file under a partial name beside its own.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let own = match Target::of(path)? {
            Target::File(own) => own,
            Target::Stream(path) => {
                // Appending matters for descriptors of files alone: what was printed before stays.
                return Ok(Self { file: File::options().append(true).open(path)?, names: None });
            }
        };
        let mut partial = own.clone().into_os_string();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        if partial.symlink_metadata().is_ok_and(|m| !m.is_file()) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{} is in the way", partial.display()),
            ));
        }
        let output = Self { file: File::create(&partial)?, names: Some((partial, own)) };
        if let Some((partial, own)) = &output.names
            && let Ok(about) = own.metadata()
        {
            // Who may read an older one may read the new one, and nobody else.
            fs::set_permissions(partial, about.permissions())?;
        }
        Ok(output)
    }

    /// Gives a whole file its name.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        if let Some((partial, own)) = &self.names {
            // The name must not be on disk before what it names.
            self.file.sync_all()?;
            fs::rename(partial, own)?;
            self.names = None;
        }
        Ok(())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some((partial, _)) = &self.names {
            // Half a file, perhaps on a full disk, helps nobody.
            let _ = fs::remove_file(partial);
        }
    }
}

/// Writes a whole output.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut output = Output::create(path)?;
    output.write_all(text.as_bytes())?;
    output.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};

    fn left(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_when_the_new_one_is_whole_and_keeps_its_readers() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.json");
        write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let mut half = Output::create(&file).unwrap();
        half.write_all(b"ne").unwrap();
        drop(half);
        assert_eq!((fs::read_to_string(&file).unwrap().as_str(), left(dir.path()).len()), ("old", 1));
        write(&file, "new").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(left(dir.path()), ["a.json"]);
    }

    #[test]
    fn links_stay_and_what_they_lead_to_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("kept")).unwrap();
        symlink("kept/real.json", at("one")).unwrap();
        symlink("one", at("two")).unwrap();
        for text in ["to a free name", "over a file"] {
            write(&at("two"), text).unwrap();
            assert_eq!(fs::read_to_string(at("kept/real.json")).unwrap(), text);
        }
        assert!(at("one").is_symlink() && at("two").is_symlink());
        assert_eq!(left(&at("kept")), ["real.json"]);
        symlink("round", at("round")).unwrap();
        assert!(write(&at("round"), "").is_err() && write(dir.path(), "").is_err());
    }

    #[test]
    fn pipes_and_devices_are_written_into_and_stay() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        symlink("pipe", dir.path().join("link")).unwrap();
        for name in ["pipe", "link"] {
            let path = pipe.clone();
            let reader = std::thread::spawn(move || {
                let mut text = String::new();
                File::open(path).unwrap().read_to_string(&mut text).map(|_| text).unwrap()
            });
            write(&dir.path().join(name), "through").unwrap();
            assert_eq!(reader.join().unwrap(), "through");
        }
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(left(dir.path()), ["link", "pipe"]);
        // Only root makes devices: one of its own, that swallows everything.
        let device = dir.path().join("null");
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            &device,
            rustix::fs::FileType::CharacterDevice,
            rustix::fs::Mode::from_raw_mode(0o600),
            rustix::fs::makedev(1, 3),
        );
        if made.is_ok() && File::options().write(true).open(&device).is_ok() {
            write(&device, "gone").unwrap();
            assert!(fs::symlink_metadata(&device).unwrap().file_type().is_char_device());
        }
    }

    #[test]
    fn an_open_descriptor_is_appended_to() {
        use std::os::fd::AsRawFd as _;
        let dir = tempfile::tempdir().unwrap();
        let mut file = File::create(dir.path().join("all")).unwrap();
        file.write_all(b"printed, ").unwrap();
        for folder in ["/dev/fd", "/proc/self/fd"] {
            write(&Path::new(folder).join(file.as_raw_fd().to_string()), "written ").unwrap();
        }
        assert_eq!(fs::read_to_string(dir.path().join("all")).unwrap(), "printed, written written ");
    }
}
