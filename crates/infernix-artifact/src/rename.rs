//! Renaming a set, to the numbered form and back or to another name. No payload moves: files are renamed and the
//! `files` table is rewritten within the directory's reserve; the artifact keeps its id and its digests.
//!
//! Several files cannot change names at once, so the change is journalled first: `.ENTRY.rename.json` holds every move
//! and the new directory text. Whatever happens later, running rename again (or [`recover`]) finishes from it, and no
//! step destroys anything before its successor exists.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::framing::{EntryHeader, HEADER_BYTES};
use crate::io::{Io, file_name, folder_of, with_suffix};
use crate::names::{check_sibling, numbered_name, part_name, plain_name};
use crate::sums;
use crate::writer::report_path;
use crate::{Artifact, ArtifactError, Faults, Interrupt, Result};

/// What to rename a set to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewName {
    /// `NAME-00001-of-0000N.infernix`, keeping NAME.
    Numbered,
    /// `NAME.infernix` and its `.part-0001`, keeping NAME.
    Plain,
    /// Another plain entry name, in the numbered form or not.
    To {
        /// Unnumbered entry name, with extension.
        name: String,
        /// Numbered form.
        numbered: bool,
    },
}

/// A planned or finished rename.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renamed {
    /// Path of the entry afterwards.
    pub entry: PathBuf,
    /// (old, new) file names of set and sidecars; equal names are left out.
    pub moves: Vec<(String, String)>,
}

/// How to rename.
#[derive(Clone, Debug, Default)]
pub struct RenameOptions {
    /// Looked at while the entry is hashed for `SHA256SUMS`.
    pub interrupt: Interrupt,
    /// Test hook.
    pub faults: Option<std::sync::Arc<Faults>>,
}

fn journal_path(entry: &Path) -> Result<PathBuf> {
    Ok(folder_of(entry).join(format!(".{}.rename.json", file_name(entry)?)))
}

/// Plans without touching anything.
///
/// # Errors
/// A set that does not open, illegal or occupied names, names that do not fit the reserve.
pub fn plan(entry: &Path, to: &NewName) -> Result<Renamed> {
    Ok(prepare(entry, to)?.0)
}

fn prepare(entry: &Path, to: &NewName) -> Result<(Renamed, String)> {
    let artifact = Artifact::open(entry)?;
    if let Some(link) = artifact.paths().find(|path| path.is_symlink()) {
        // Rewriting the directory would change a file that belongs to a download cache.
        let link = link.display();
        return Err(ArtifactError::Invalid(format!("{link}: is a link; rename a copy of the set instead")));
    }
    let (folder, old_entry) = (folder_of(entry), file_name(entry)?);
    let plain = plain_name(old_entry);
    let (plain, numbered) = match to {
        NewName::Numbered => (plain, true),
        NewName::Plain => (plain, false),
        NewName::To { name, numbered } => (plain_name(name), *numbered),
    };
    let mut directory = artifact.directory().clone();
    let count = directory.files.len();
    let new_entry = if numbered { numbered_name(&plain, 1, count) } else { plain };
    let mut moves = Vec::new();
    for (index, file) in directory.files.iter_mut().enumerate() {
        let new = match (index, numbered) {
            (0, _) => new_entry.clone(),
            (_, true) => numbered_name(&plain_name(&new_entry), index + 1, count),
            (_, false) => part_name(&new_entry, index),
        };
        check_sibling(&new).map_err(ArtifactError::Invalid)?;
        let old = file.path.clone().unwrap_or_else(|| old_entry.to_owned());
        file.path = file.path.is_some().then(|| new.clone());
        moves.push((old, new));
    }
    let text = directory.to_stored_json();
    if text.len() as u64 > artifact.json_bytes() {
        let (need, room) = (text.len(), artifact.json_bytes());
        return Err(ArtifactError::Invalid(format!(
            "{}: the new names need a directory of {need} bytes and {room} are reserved; choose shorter ones",
            entry.display()
        )));
    }
    // Sidecars named after the entry. A numbered name and its plain form find the same volume, so that one moves only
    // with another name.
    moves.push((format!("{old_entry}.conversion.json"), format!("{new_entry}.conversion.json")));
    let ngram = |entry: &str| format!("{}.ngram", plain_name(entry));
    moves.push((ngram(old_entry), ngram(&new_entry)));
    if plain_name(old_entry) != old_entry {
        moves.push((format!("{old_entry}.ngram"), ngram(&new_entry)));
    }
    moves.retain(|(old, new)| old != new && folder.join(old).exists());
    for (i, (_, new)) in moves.iter().enumerate() {
        let twice = moves[..i].iter().any(|(_, other)| other == new);
        if twice || folder.join(new).symlink_metadata().is_ok() {
            return Err(ArtifactError::OutputExists { path: folder.join(new) });
        }
    }
    Ok((Renamed { entry: folder.join(new_entry), moves }, text))
}

/// Renames the set whose entry is `entry`, first finishing an interrupted rename of it.
///
/// # Errors
/// As [`plan`]; I/O errors, after which the rename can be finished with [`recover`].
pub fn rename(entry: &Path, to: &NewName, options: &RenameOptions) -> Result<Renamed> {
    if let Some(finished) = recover(entry, options)?
        && finished.entry != entry
    {
        return Ok(finished);
    }
    let (renamed, text) = prepare(entry, to)?;
    if renamed.moves.is_empty() {
        return Ok(renamed);
    }
    let io = Io { interrupt: options.interrupt.clone(), faults: options.faults.clone(), durable: true };
    let record = json!({
        "rename": 1, "old": file_name(entry)?, "new": file_name(&renamed.entry)?,
        "moves": renamed.moves.iter().map(|(a, b)| json!([a, b])).collect::<Vec<_>>(), "directory": text,
    });
    let journal = journal_path(entry)?;
    let temporary = with_suffix(&journal, ".tmp");
    io.write_file(&temporary, crate::json::canonical(&record).as_bytes())?;
    io.rename_over(&temporary, &journal)?;
    io.sync_folder(folder_of(entry))?;
    finish(&journal, &record, &io)
}

/// Finishes an interrupted rename that began or would end at `entry`; `None` when there is none.
///
/// # Errors
/// A damaged record; I/O errors.
pub fn recover(entry: &Path, options: &RenameOptions) -> Result<Option<Renamed>> {
    let io = Io { interrupt: options.interrupt.clone(), faults: options.faults.clone(), durable: true };
    let folder = folder_of(entry);
    let name = file_name(entry)?;
    let listing = fs::read_dir(folder).map_err(|e| ArtifactError::io(folder, "list", e))?;
    for path in listing.filter_map(|item| Some(item.ok()?.path())) {
        let journal = path.file_name().and_then(|n| n.to_str());
        if !journal.is_some_and(|n| n.starts_with('.') && n.ends_with(".rename.json")) {
            continue;
        }
        let bytes = fs::read(&path).map_err(|e| ArtifactError::io(&path, "read", e))?;
        let record = crate::json::parse(&bytes).map_err(|(_, reason)| damaged(&path, &reason))?;
        let ours = |key: &str| record.get(key).and_then(Value::as_str) == Some(name);
        if ours("old") || ours("new") {
            return finish(&path, &record, &io).map(Some);
        }
    }
    Ok(None)
}

fn damaged(path: &Path, reason: &str) -> ArtifactError {
    ArtifactError::StateDamaged {
        path: path.to_owned(),
        reason: format!("record of an interrupted rename: {reason}"),
    }
}

/// Carries out the record; every step may have been done before.
fn finish(journal: &Path, record: &Value, io: &Io) -> Result<Renamed> {
    let folder = folder_of(journal);
    let text = |key: &str| record.get(key).and_then(Value::as_str).ok_or_else(|| damaged(journal, key));
    let (old_entry, new_entry, directory) = (text("old")?, text("new")?, text("directory")?);
    let list = record.get("moves").and_then(Value::as_array).ok_or_else(|| damaged(journal, "moves"))?;
    let mut moves = Vec::new();
    for item in list {
        let name = |i: usize| {
            let name = item.get(i).and_then(Value::as_str).filter(|name| check_sibling(name).is_ok());
            name.map(str::to_owned).ok_or_else(|| damaged(journal, "moves"))
        };
        moves.push((name(0)?, name(1)?));
    }
    let entry_move = |(old, _): &&(String, String)| old == old_entry;
    for (old, new) in moves.iter().filter(|pair| !entry_move(pair)) {
        if folder.join(old).exists() {
            io.rename_new(&folder.join(old), &folder.join(new))?;
        }
    }
    let at = [old_entry, new_entry].map(|name| folder.join(name)).into_iter().find(|path| path.exists());
    let at = at.ok_or_else(|| damaged(journal, "the entry is gone"))?;
    write_directory(&at, directory, io)?;
    if at != folder.join(new_entry) {
        io.rename_new(&at, &folder.join(new_entry))?;
    }
    io.sync_folder(folder)?;
    let entry = folder.join(new_entry);
    rewrite_report(&report_path(&entry), &moves, io)?;
    rewrite_sums(folder, &entry, &moves, io)?;
    io.remove_file(journal)?;
    io.sync_folder(folder)?;
    Ok(Renamed { entry, moves })
}

fn write_directory(entry: &Path, text: &str, io: &Io) -> Result<()> {
    use std::io::Read as _;
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(entry)
        .map_err(|e| ArtifactError::io(entry, "open", e))?;
    let bytes = file.metadata().map_err(|e| ArtifactError::io(entry, "look at", e))?.len();
    let mut head = [0; HEADER_BYTES as usize];
    file.read_exact(&mut head).map_err(|e| ArtifactError::io(entry, "read", e))?;
    let header = EntryHeader::parse(entry, &head, bytes)?;
    let mut json = text.as_bytes().to_vec();
    if json.len() as u64 > header.json_bytes {
        return Err(damaged(entry, "the directory does not fit"));
    }
    json.resize(header.json_bytes as usize, b' ');
    io.write_at(&file, entry, &json, HEADER_BYTES)?;
    io.sync(&file, entry)
}

/// Replaces file names inside the conversion report.
fn rewrite_report(path: &Path, moves: &[(String, String)], io: &Io) -> Result<()> {
    let Ok(bytes) = fs::read(path) else { return Ok(()) };
    // A report of another shape is left alone.
    let Ok(mut value) = serde_json::from_slice::<Value>(&bytes) else { return Ok(()) };
    replace_names(&mut value, moves);
    let mut text = serde_json::to_vec_pretty(&value).map_err(|e| ArtifactError::Invalid(e.to_string()))?;
    text.push(b'\n');
    if text != bytes {
        let temporary = with_suffix(path, ".tmp");
        io.write_file(&temporary, &text)?;
        io.rename_over(&temporary, path)?;
    }
    Ok(())
}

fn replace_names(value: &mut Value, moves: &[(String, String)]) {
    match value {
        Value::String(text) => {
            if let Some((_, new)) = moves.iter().find(|(old, _)| old == text) {
                text.clone_from(new);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| replace_names(item, moves)),
        Value::Object(map) => map.values_mut().for_each(|item| replace_names(item, moves)),
        _ => {}
    }
}

/// Moves the lines of `SHA256SUMS` to the new names. Only the entry (and the report) changed and are hashed again.
fn rewrite_sums(folder: &Path, entry: &Path, moves: &[(String, String)], io: &Io) -> Result<()> {
    let (mut gone, mut set) = (Vec::new(), Vec::new());
    for (old, new) in moves {
        let path = folder.join(new);
        // On a second pass the old line may be gone already.
        let hash = sums::recorded(&folder.join(old))?.or(sums::recorded(&path)?);
        let Some(hash) = hash else { continue };
        let changed = path == entry || path == report_path(entry);
        let hash = if changed { sums::hash_file(&path, &io.interrupt)? } else { hash };
        gone.push(old.clone());
        set.push((new.clone(), hash));
    }
    if set.is_empty() { Ok(()) } else { sums::update(folder, &gone, &set, io) }
}
