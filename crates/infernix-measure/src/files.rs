//! Files written under a partial name, continued after an interruption, and named when whole.

use crate::error::{MeasureError, Result};
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

/// `NAME.partial` beside `NAME`.
pub(crate) fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Refuses a name that is taken, and for a new file the partial name of an unfinished one: hours may lie in it.
pub(crate) fn check_free(path: &Path, resume: bool) -> Result<()> {
    // Of a link that leads nowhere the name is taken too.
    if path.symlink_metadata().is_ok() {
        return Err(MeasureError::Options(format!("{} exists; nothing is overwritten", path.display())));
    }
    let partial = partial(path);
    if !resume && partial.symlink_metadata().is_ok() {
        return Err(MeasureError::Options(format!(
            "{} is there from an unfinished run; nothing is overwritten: resume that run with its options, remove the file to \
             give it up, or save under another name",
            partial.display()
        )));
    }
    Ok(())
}

/// Opens `NAME.partial`: new with `head`, or an existing one that starts with `head`, cut to `keep` bytes.
pub(crate) fn start(path: &Path, head: &[u8], keep: u64, resume: bool) -> Result<(File, PathBuf)> {
    check_free(path, resume)?;
    let partial = partial(path);
    let io = |what| MeasureError::io(&partial, what);
    if !resume {
        let mut file = File::create_new(&partial).map_err(io("creating"))?;
        file.write_all(head).map_err(io("writing"))?;
        return Ok((file, partial));
    }
    let mut file = OpenOptions::new().read(true).write(true).open(&partial).map_err(io("resuming"))?;
    let length = file.metadata().map_err(io("resuming"))?.len();
    let mut found = vec![0; head.len()];
    if length < keep || file.read_exact(&mut found).is_err() || found != head {
        return Err(MeasureError::Mismatch {
            what: format!("{}", partial.display()),
            expected: format!("{keep} bytes that continue this run"),
            found: format!("{length} bytes"),
            advice: "remove it and the run's state to start afresh",
        });
    }
    file.set_len(keep).map_err(io("resuming"))?;
    Ok((file, partial))
}

/// Gives a whole file its name, never replacing one.
pub(crate) fn publish(partial: &Path, path: &Path) -> Result<()> {
    // A hard link fails where the name exists; a rename would replace it.
    match std::fs::hard_link(partial, path) {
        Ok(()) => std::fs::remove_file(partial).map_err(MeasureError::io(partial, "removing")),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
            Err(MeasureError::Options(format!("{} exists; nothing is overwritten", path.display())))
        }
        // File systems without links.
        Err(_) => std::fs::rename(partial, path).map_err(MeasureError::io(path, "naming")),
    }
}

/// Refuses what the disk cannot hold. What a partial file already takes is given back or used.
pub(crate) fn check_space(path: &Path, size: u64) -> Result<()> {
    let needed = size.saturating_sub(partial(path).metadata().map_or(0, |m| m.len()));
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let stat = rustix::fs::statvfs(folder)
        .map_err(|e| MeasureError::io(folder, "asking for free space")(e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if needed > free {
        return Err(MeasureError::Disk { path: path.to_owned(), needed, free });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_disk_cannot_hold_is_refused_with_both_sizes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.kld");
        let e = check_space(&path, u64::MAX).unwrap_err().to_string();
        assert!(e.contains("a.kld") && e.contains(&u64::MAX.to_string()) && e.contains("free"), "{e}");
        check_space(&path, 1).unwrap();
        assert!(!path.exists());
    }
}
