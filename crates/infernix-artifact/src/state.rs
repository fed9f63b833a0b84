//! State of an unfinished conversion: the folder `OUT.partial/`, its lock and its journal.
//!
//! The journal is JSON lines, appended and synced. A line counts once its newline is there; a torn last line is
//! dropped. Lines never precede what they claim: object data is synced before the line that names the object.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use crate::io::{Io, folder_of, with_suffix};
use crate::json::{self, canonical};
use crate::lock::{FileLock, LockError};
use crate::{ArtifactError, Result, Resume};

/// What a resumed run must have in common with the first one: recipe digest, encoder versions, options, and size, time
/// and header digest of every source. Opaque here; the first difference is named by its key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalKey(BTreeMap<String, String>);

impl JournalKey {
    /// An empty key.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an entry; `name` is what the user is told when `value` differs.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.insert(name, value);
        self
    }

    /// Adds an entry in place.
    pub fn insert(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.insert(name.into(), value.into());
    }

    /// First difference as (name, recorded, now).
    pub fn difference(&self, now: &Self) -> Option<(String, String, String)> {
        let absent = || "absent".to_owned();
        let names: std::collections::BTreeSet<&String> = self.0.keys().chain(now.0.keys()).collect();
        names.into_iter().find(|name| self.0.get(*name) != now.0.get(*name)).map(|name| {
            let value = |key: &Self| key.0.get(name).cloned().unwrap_or_else(absent);
            (name.clone(), value(self), value(now))
        })
    }

    fn to_value(&self) -> Value {
        Value::Object(self.0.iter().map(|(k, v)| (k.clone(), Value::from(v.as_str()))).collect())
    }

    fn from_value(value: &Value) -> Option<Self> {
        let map = value.as_object()?;
        map.iter().map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned()))).collect::<Option<_>>().map(Self)
    }
}

/// The state folder of the output `out`.
pub fn state_folder(out: &Path) -> PathBuf {
    with_suffix(out, ".partial")
}

/// File of the state folder in which a converter may keep what it found out about its sources.
pub const SOURCE_DIGESTS: &str = "tensors.log";

/// Removes the state of an unfinished conversion of `out`. False when there was none.
///
/// # Errors
/// [`ArtifactError::Locked`] while a conversion runs; I/O errors.
pub fn clean(out: &Path) -> Result<bool> {
    let folder = state_folder(out);
    if folder.symlink_metadata().is_err() {
        return Ok(false);
    }
    refuse_foreign(&folder)?;
    let _lock = lock(&folder)?;
    fs::remove_dir_all(&folder).map_err(|e| ArtifactError::io(&folder, "remove", e))?;
    Ok(true)
}

/// Removes the state of a conversion of `out` that finished no object and no row, as one that found too little space
/// does: nothing is lost by it, and the next try needs no `--resume`. False when there was none or it holds work.
///
/// # Errors
/// As [`clean`].
pub fn discard_unused(out: &Path) -> Result<bool> {
    let folder = state_folder(out);
    let lines = |name: &str| match fs::read_to_string(folder.join(name)) {
        Ok(text) => Ok(text),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(e) => Err(ArtifactError::io(&folder.join(name), "read", e)),
    };
    let work = |line: &str| line.contains("\"object\":") || line.contains("\"publish\":");
    // The first line of the volume's journal says what is to be written, each further one what was.
    if lines("journal.jsonl")?.lines().any(work) || lines("volume.jsonl")?.lines().count() > 1 {
        return Ok(false);
    }
    clean(out)
}

/// An error if `folder` holds anything that no conversion put there: it would be lost with the state.
fn refuse_foreign(folder: &Path) -> Result<()> {
    const OWN: [&str; 7] =
        ["lock", "journal.jsonl", "volume.jsonl", "entry", "volume", "report.json", SOURCE_DIGESTS];
    let entries = fs::read_dir(folder).map_err(|e| ArtifactError::io(folder, "list", e))?;
    for entry in entries {
        let name = entry.map_err(|e| ArtifactError::io(folder, "list", e))?.file_name();
        let own = name.to_str().is_some_and(|n| OWN.contains(&n) || n.starts_with("part-"));
        if !own {
            return Err(ArtifactError::Invalid(format!(
                "{}: is not part of a conversion's state; move it away first",
                folder.join(name).display()
            )));
        }
    }
    Ok(())
}

/// The lock of a conversion's state folder.
fn lock(folder: &Path) -> Result<FileLock> {
    let path = folder.join("lock");
    FileLock::acquire(&path).map_err(|e| match e {
        LockError::Held(holder) => ArtifactError::Locked { path: folder.to_owned(), holder },
        LockError::Io(what, e) => ArtifactError::io(&path, what, e),
    })
}

/// A journal file: complete lines read at open, new ones appended.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    io: Io,
}

impl Journal {
    /// Opens or creates the journal; returns it with its complete lines.
    pub(crate) fn open(path: PathBuf, io: &Io) -> Result<(Self, Vec<Value>)> {
        let mut file = io.open_rw(&path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|e| ArtifactError::io(&path, "read", e))?;
        let complete = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        let mut lines = Vec::new();
        for (number, line) in bytes[..complete].split_terminator_newline().enumerate() {
            let value = json::parse(line).map_err(|(_, reason)| ArtifactError::StateDamaged {
                path: path.clone(),
                reason: format!("line {}: {reason}", number + 1),
            })?;
            lines.push(value);
        }
        if complete < bytes.len() {
            io.set_len(&file, &path, complete as u64)?;
        }
        file.seek(SeekFrom::Start(complete as u64)).map_err(|e| ArtifactError::io(&path, "seek in", e))?;
        Ok((Self { path, file, io: io.clone() }, lines))
    }

    /// Appends lines in one write and syncs.
    pub(crate) fn append(&mut self, lines: &[Value]) -> Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        let mut text = String::new();
        for line in lines {
            text.push_str(&canonical(line));
            text.push('\n');
        }
        self.io.append(&mut self.file, &self.path, text.as_bytes())?;
        self.io.sync(&self.file, &self.path)
    }

    pub(crate) fn damaged(&self, reason: impl Into<String>) -> ArtifactError {
        ArtifactError::StateDamaged { path: self.path.clone(), reason: reason.into() }
    }
}

trait SplitLines {
    fn split_terminator_newline(&self) -> impl Iterator<Item = &[u8]>;
}

impl SplitLines for [u8] {
    fn split_terminator_newline(&self) -> impl Iterator<Item = &[u8]> {
        self.split_inclusive(|&b| b == b'\n').map(|line| &line[..line.len() - 1])
    }
}

/// The locked state folder; shared by the artifact's and the volume's writer.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) folder: PathBuf,
    pub(crate) io: Io,
    journal: Mutex<Journal>,
    _lock: FileLock,
}

impl State {
    /// Opens or creates the state of `out`. Returns the journal's lines after the key's.
    pub(crate) fn open(
        out: &Path,
        key: &JournalKey,
        resume: Resume,
        io: Io,
    ) -> Result<(Arc<Self>, Vec<Value>)> {
        let folder = state_folder(out);
        if folder.exists() {
            refuse_foreign(&folder)?;
        } else {
            if !folder_of(out).is_dir() {
                return Err(ArtifactError::Invalid(format!(
                    "{}: there is no such folder; create it first",
                    folder_of(out).display()
                )));
            }
            match io.create_dir(&folder) {
                Err(ArtifactError::Io { source, .. })
                    if source.kind() == std::io::ErrorKind::AlreadyExists => {}
                result => result?,
            }
            io.sync_folder(folder_of(out))?;
        }
        // Whoever locks a folder without a journal starts the conversion, whoever made the folder: of two runs that begin
        // together one goes on. With a journal it tells a running conversion from an abandoned one.
        let lock = lock(&folder)?;
        if resume == Resume::No && folder.join("journal.jsonl").exists() {
            return Err(ArtifactError::StateExists { path: folder });
        }
        let (mut journal, mut lines) = Journal::open(folder.join("journal.jsonl"), &io)?;
        if lines.is_empty() {
            journal.append(&[json!({"journal": 1, "key": key.to_value()})])?;
            io.sync_folder(&folder)?;
        } else {
            let head = lines.remove(0);
            let recorded = head.get("key").and_then(JournalKey::from_value);
            let recorded = recorded.ok_or_else(|| journal.damaged("the first line holds no key"))?;
            if head.get("journal").and_then(Value::as_u64) != Some(1) {
                return Err(journal.damaged("it was written by another version"));
            }
            if let Some((name, recorded, now)) = recorded.difference(key) {
                let shown = |value: String| if value.is_empty() { "none".to_owned() } else { value };
                let (recorded, now) = (shown(recorded), shown(now));
                return Err(ArtifactError::StateDiffers { path: folder, name, recorded, now });
            }
        }
        Ok((Arc::new(Self { folder, io, journal: Mutex::new(journal), _lock: lock }), lines))
    }

    pub(crate) fn append(&self, lines: &[Value]) -> Result<()> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner).append(lines)
    }

    /// Removes the folder after publication. The lock goes last, still held.
    pub(crate) fn remove(&self, names: &[String]) -> Result<()> {
        for name in names.iter().map(String::as_str).chain([SOURCE_DIGESTS, "journal.jsonl", "lock"]) {
            self.io.remove_file(&self.folder.join(name))?;
        }
        self.io.remove_dir(&self.folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let a = JournalKey::new().with("recipe", "1").with("source x", "size 3");
        let b = JournalKey::new().with("recipe", "1").with("source x", "size 4").with("z", "");
        assert_eq!(a.difference(&b), Some(("source x".into(), "size 3".into(), "size 4".into())));
        assert_eq!(a.difference(&a), None);
    }

    #[test]
    fn a_torn_last_line_is_ignored_and_a_damaged_middle_line_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("o");
        let key = JournalKey::new().with("k", "v");
        let (state, _) = State::open(&out, &key, Resume::No, Io::default()).unwrap();
        state.append(&[json!({"a": 1})]).unwrap();
        drop(state);
        let path = state_folder(&out).join("journal.jsonl");
        let mut bytes = fs::read(&path).unwrap();
        bytes.extend(b"{\"a\":2,\"b");
        fs::write(&path, &bytes).unwrap();
        let (state, lines) = State::open(&out, &key, Resume::Yes, Io::default()).unwrap();
        assert_eq!(lines, [json!({"a": 1})]);
        state.append(&[json!({"a": 3})]).unwrap();
        drop(state);
        let (state, lines) = State::open(&out, &key, Resume::Yes, Io::default()).unwrap();
        assert_eq!(lines, [json!({"a": 1}), json!({"a": 3})]);
        drop(state);
        let text = fs::read_to_string(&path).unwrap().replace("{\"a\":1}", "{\"a\":1");
        fs::write(&path, text).unwrap();
        let damaged = State::open(&out, &key, Resume::Yes, Io::default());
        assert!(matches!(damaged, Err(ArtifactError::StateDamaged { .. })));
        assert!(clean(&out).unwrap());
        assert!(!clean(&out).unwrap());
    }

    #[test]
    fn files_of_others_in_the_state_folder_are_never_removed() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("o");
        drop(State::open(&out, &JournalKey::new(), Resume::No, Io::default()).unwrap());
        let mine = state_folder(&out).join("mine.txt");
        fs::write(&mine, "x").unwrap();
        assert!(clean(&out).unwrap_err().to_string().contains("mine.txt"));
        assert!(State::open(&out, &JournalKey::new(), Resume::Yes, Io::default()).is_err());
        assert!(mine.exists());
        fs::remove_file(&mine).unwrap();
        assert!(clean(&out).unwrap());
        fs::write(state_folder(&out), "a file").unwrap();
        assert!(clean(&out).is_err(), "a file in place of the folder is not ours");
    }

    #[test]
    fn only_state_without_finished_work_is_discarded() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("o");
        let (state, _) = State::open(&out, &JournalKey::new(), Resume::No, Io::default()).unwrap();
        state.append(&[json!({"plan": "00"})]).unwrap();
        assert!(discard_unused(&out).is_err(), "locked");
        state.append(&[json!({"object": "a", "digest": "00"})]).unwrap();
        drop(state);
        assert!(!discard_unused(&out).unwrap());
        assert!(clean(&out).unwrap());
        let (state, _) = State::open(&out, &JournalKey::new(), Resume::No, Io::default()).unwrap();
        drop(state);
        assert!(discard_unused(&out).unwrap());
        assert!(!discard_unused(&out).unwrap());
    }

    #[test]
    fn a_second_writer_is_refused_by_the_lock_and_told_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("o");
        let (state, _) = State::open(&out, &JournalKey::new(), Resume::No, Io::default()).unwrap();
        for resume in [Resume::No, Resume::Yes] {
            let second =
                State::open(&out, &JournalKey::new(), resume, Io::default()).unwrap_err().to_string();
            assert!(second.contains(&format!("process {}", std::process::id())), "{second}");
        }
        assert!(clean(&out).is_err());
        drop(state);
        assert!(clean(&out).unwrap());
    }
}
