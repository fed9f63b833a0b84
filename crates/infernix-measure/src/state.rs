//! Scores of finished chunks on disk, so that an interrupted run goes on where it stopped.
//!
//! A line of JSON says what the run is; then one record a chunk, closed by its digest. A torn last record is dropped.
//! A lock beside the file keeps a second run away; a file that does not begin as a state is nobody's but the user's.

use crate::error::{MeasureError, Result};
use crate::row::RowScore;
use infernix_artifact::{FileLock, LockError};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

const ROW: usize = 33;
/// Key of the first line whose value is the layout's version.
const MARK: &str = "infernix_kld_state";
const VERSION: u64 = 2;
/// Longer first lines than any run has.
const MAX_HEAD: u64 = 1 << 20;
/// Characters of a value that a message shows.
const SHOWN: usize = 60;

/// Where the scores of an unfinished run are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatePlace {
    /// In this file.
    File(PathBuf),
    /// In a file of this folder that is named by what the run is.
    Folder(PathBuf),
}

/// The journal of a run, locked against a second one.
#[derive(Debug)]
pub(crate) struct State {
    path: PathBuf,
    head: String,
    /// Open once the run has begun.
    file: Option<File>,
    lock: Option<FileLock>,
}

/// A state that was opened. Nothing of it is on disk before [`State::begin`], where there was nothing before.
#[derive(Debug)]
pub(crate) struct Opened {
    pub state: State,
    /// Scores of finished chunks.
    pub done: Vec<Vec<RowScore>>,
    /// Whether this very run had begun: unfinished files under its outputs' partial names are its own.
    pub ours: bool,
}

/// What an existing file says.
struct Found {
    key: Value,
    /// Bytes of the first line.
    head: u64,
    /// Whether a chunk follows.
    work: bool,
}

impl State {
    /// Opens the state of a run described by `key` (`options` by the names a user knows, and what they led to), with
    /// `rows` rows a chunk over all tests.
    pub(crate) fn open(place: &StatePlace, key: &Value, rows: usize, resume: bool) -> Result<Opened> {
        let head = format!("{}\n", json!({ MARK: VERSION, "key": key }));
        let path = match place {
            StatePlace::File(path) => path.clone(),
            StatePlace::Folder(folder) => {
                std::fs::create_dir_all(folder).map_err(MeasureError::io(folder, "creating"))?;
                folder.join(format!("{}.state", &blake3::hash(head.as_bytes()).to_hex()[..16]))
            }
        };
        // Before the lock, which makes a file: beside a file of somebody else nothing is left.
        read_head(&path)?;
        let lock = lock(&path)?;
        let found = read_head(&path)?;
        let mut opened = Opened {
            ours: found.as_ref().is_some_and(|f| f.key == *key),
            state: State { path, head, file: None, lock: Some(lock) },
            done: Vec::new(),
        };
        let path = &opened.state.path;
        let Some(found) = found.filter(|f| f.work) else {
            if let StatePlace::Folder(folder) = place
                && resume
                && !opened.ours
            {
                refuse_other_run(folder, path, key)?;
            }
            return Ok(opened);
        };
        if !opened.ours {
            return Err(MeasureError::Options(format!(
                "{} keeps an interrupted run with other options: {}; resume it with its own options, name another file \
                 with --state, or remove it to give that run up",
                path.display(),
                differences(&found.key, key)
            )));
        }
        if !resume {
            return Err(MeasureError::Options(format!(
                "{} keeps an interrupted run with these options: resume it with --resume, or remove it to start afresh",
                path.display()
            )));
        }
        let io = |what| MeasureError::io(path, what);
        let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(io("resuming"))?;
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(found.head)).map_err(io("resuming"))?;
        file.read_to_end(&mut bytes).map_err(io("resuming"))?;
        let mut at = 0;
        let size = rows * ROW + 32;
        while let Some(record) = bytes.get(at..at + size) {
            let (body, digest) = record.split_at(rows * ROW);
            if blake3::hash(&[&(opened.done.len() as u64).to_le_bytes(), body].concat()).as_bytes() != digest
            {
                break;
            }
            opened.done.push(body.chunks_exact(ROW).map(decode).collect());
            at += size;
        }
        let end = found.head + at as u64;
        file.set_len(end).map_err(io("resuming"))?;
        file.seek(SeekFrom::Start(end)).map_err(io("resuming"))?;
        opened.state.file = Some(file);
        Ok(opened)
    }

    /// Puts the state on disk, unless it is resumed: from here on the run can be.
    pub(crate) fn begin(&mut self) -> Result<()> {
        if self.file.is_some() {
            return Ok(());
        }
        // A state without a finished chunk is all that can be here; the lock keeps others out.
        let mut file = File::create(&self.path).map_err(MeasureError::io(&self.path, "creating"))?;
        if let Err(e) = file.write_all(self.head.as_bytes()) {
            let _ = std::fs::remove_file(&self.path);
            return Err(MeasureError::io(&self.path, "writing")(e));
        }
        self.file = Some(file);
        Ok(())
    }

    /// Records a finished chunk of a run that has begun.
    pub(crate) fn append(&mut self, chunk: usize, rows: &[RowScore]) -> Result<()> {
        let mut bytes: Vec<u8> = rows.iter().flat_map(encode).collect();
        let digest = blake3::hash(&[&(chunk as u64).to_le_bytes()[..], &bytes].concat());
        bytes.extend(digest.as_bytes());
        self.begin()?;
        let Some(file) = &mut self.file else { return Ok(()) };
        file.write_all(&bytes)
            .and_then(|()| file.sync_data())
            .map_err(MeasureError::io(&self.path, "writing"))
    }

    /// Removes what [`State::begin`] put on disk: the run is complete, or finished nothing.
    pub(crate) fn remove(&mut self) -> Result<()> {
        match self.file.take() {
            Some(_) => std::fs::remove_file(&self.path).map_err(MeasureError::io(&self.path, "removing")),
            None => Ok(()),
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // A file that stays behind locks nobody out: the lock itself ends with the handle.
        let _ = self.lock.take().map(FileLock::remove);
    }
}

fn lock(path: &Path) -> Result<FileLock> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = PathBuf::from(name);
    FileLock::acquire(&file).map_err(|e| match e {
        LockError::Held(holder) => MeasureError::Options(format!(
            "{} is in use by {holder}: wait for it, or name another file with --state",
            path.display()
        )),
        LockError::Io(what, e) => MeasureError::io(&file, what)(e),
    })
}

/// Reads the first line; none where there is no file. What is no state is refused and stays as it is.
fn read_head(path: &Path) -> Result<Option<Found>> {
    let io = |what| MeasureError::io(path, what);
    let foreign = |what: &str| {
        MeasureError::Options(format!(
            "{} {what}, not the state of an unfinished kld: it stays as it is; name another file with --state",
            path.display()
        ))
    };
    let length = match std::fs::metadata(path) {
        Ok(m) if m.is_file() => m.len(),
        Ok(m) => return Err(foreign(if m.is_dir() { "is a folder" } else { "is no plain file" })),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io("opening")(e)),
    };
    let mut line = Vec::new();
    let file = BufReader::new(File::open(path).map_err(io("opening"))?);
    file.take(MAX_HEAD).read_until(b'\n', &mut line).map_err(io("reading"))?;
    let head: Option<Value> = line.strip_suffix(b"\n").and_then(|l| serde_json::from_slice(l).ok());
    match head.as_ref().and_then(|h| h[MARK].as_u64()) {
        Some(VERSION) => {}
        Some(other) => return Err(foreign(&format!("has a state's layout {other}"))),
        None => return Err(foreign("is another file")),
    }
    let key = head.map(|mut h| h["key"].take()).unwrap_or_default();
    let head = line.len() as u64;
    Ok(Some(Found { key, head, work: length > head }))
}

/// Where a run is to be resumed of which nothing is here: names the unfinished run of the same reference that differs
/// least, if there is one.
fn refuse_other_run(folder: &Path, own: &Path, key: &Value) -> Result<()> {
    let model = |k: &Value| k["of"]["reference"]["model"].clone();
    let entries = std::fs::read_dir(folder).map_err(MeasureError::io(folder, "listing"))?;
    let others = entries.filter_map(|e| {
        let path = e.ok()?.path();
        let found = (path != own && path.extension()? == "state").then(|| read_head(&path).ok()?)??;
        (found.work && model(&found.key) == model(key)).then(|| (differences(&found.key, key), path))
    });
    match others.min_by_key(|(text, path)| (text.len(), path.clone())) {
        None => Ok(()),
        Some((text, path)) => Err(MeasureError::Options(format!(
            "no interrupted run has these options; {} keeps one with others: {text}; resume it with its own options, or leave \
             --resume out to start this one",
            path.display()
        ))),
    }
}

/// `--chunks 12 -> 5, --ctx 64 -> 128`: options alone where they differ, since all else follows from them.
fn differences(old: &Value, new: &Value) -> String {
    let mut out = Vec::new();
    differ("", &old["options"], &new["options"], &mut out);
    if out.is_empty() {
        differ("", &old["of"], &new["of"], &mut out);
    }
    out.join(", ")
}

fn differ(name: &str, old: &Value, new: &Value, out: &mut Vec<String>) {
    let join = |part: &str| if name.is_empty() { part.to_owned() } else { format!("{name}.{part}") };
    match (old, new) {
        (Value::Object(a), Value::Object(b)) => {
            for part in a.keys().chain(b.keys().filter(|k| !a.contains_key(*k))) {
                differ(&join(part), &old[part], &new[part], out);
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            for i in 0..a.len().max(b.len()) {
                let at = |list: &[Value]| list.get(i).cloned().unwrap_or_default();
                differ(&join(&i.to_string()), &at(a), &at(b), out);
            }
        }
        _ if old != new => out.push(format!("{name} {} -> {}", shown(old), shown(new))),
        _ => {}
    }
}

fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    if text.chars().count() <= SHOWN {
        return text;
    }
    text.chars().take(SHOWN).chain("...".chars()).collect()
}

fn encode(r: &RowScore) -> [u8; ROW] {
    let mut out = [0; ROW];
    for (i, v) in [r.kld, r.nll_reference, r.nll_test, r.p_diff].iter().enumerate() {
        out[8 * i..8 * i + 8].copy_from_slice(&v.to_le_bytes());
    }
    out[32] = u8::from(r.same_top);
    out
}

fn decode(b: &[u8]) -> RowScore {
    let f = |i: usize| f64::from_le_bytes(std::array::from_fn(|k| b[8 * i + k]));
    RowScore { kld: f(0), nll_reference: f(1), nll_test: f(2), p_diff: f(3), same_top: b[32] != 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_options_that_differ_are_named_old_before_new() {
        let key = |chunks: &str, model: &str| json!({ "options": { "--chunks": chunks, "--ctx": "64" }, "of": { "model": [model] } });
        assert_eq!(differences(&key("12", "a"), &key("5", "b")), "--chunks 12 -> 5");
        assert_eq!(differences(&key("5", "a"), &key("5", "b")), "model.0 a -> b");
        let long = "x".repeat(500);
        assert!(differences(&key("5", &long), &key("5", "b")).len() < 100);
    }

    #[test]
    fn a_second_run_of_the_same_state_is_refused_while_the_first_one_lives() {
        let dir = tempfile::tempdir().unwrap();
        let place = StatePlace::File(dir.path().join("a.state"));
        let key = json!({ "options": {}, "of": {} });
        let mut one = State::open(&place, &key, 1, false).unwrap();
        for begun in [false, true] {
            for resume in [false, true] {
                let e = State::open(&place, &key, 1, resume).unwrap_err().to_string();
                assert!(e.contains("a.state is in use by process"), "{begun}: {e}");
            }
            one.state.begin().unwrap();
        }
        drop(one);
        assert!(!dir.path().join("a.state.lock").exists());
        // Nothing was finished: nothing stands in the way of a new run.
        let again = State::open(&place, &key, 1, false).unwrap();
        assert!(again.ours && again.done.is_empty());
    }

    #[test]
    fn a_file_that_is_no_state_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let key = json!({ "options": {}, "of": {} });
        for bytes in ["", "precious", "{\"a\":1}\nmore", "{\"infernix_kld_state\":1}\n"] {
            let path = dir.path().join("mine.ref");
            std::fs::write(&path, bytes).unwrap();
            for resume in [false, true] {
                let e =
                    State::open(&StatePlace::File(path.clone()), &key, 1, resume).unwrap_err().to_string();
                assert!(
                    e.contains("mine.ref") && e.contains("stays as it is") && !e.contains("remove"),
                    "{e}"
                );
            }
            assert_eq!(std::fs::read(&path).unwrap(), bytes.as_bytes());
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no lock is left beside it");
        }
        let e = State::open(&StatePlace::File(dir.path().to_owned()), &key, 1, true).unwrap_err().to_string();
        assert!(e.contains("is a folder"), "{e}");
    }
}
