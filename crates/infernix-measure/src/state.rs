//! Scores of finished chunks on disk, so that an interrupted run goes on where it stopped.
//!
//! A line of JSON says what the run is; then one record a chunk, closed by its digest. A torn last record is dropped.

use crate::error::{MeasureError, Result};
use crate::row::RowScore;
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

const ROW: usize = 33;

/// The journal of a run.
#[derive(Debug)]
pub(crate) struct State {
    path: PathBuf,
    file: File,
}

impl State {
    /// Starts or continues the state of a run described by `key`, with `rows` rows a chunk over all tests. Gives the
    /// scores of finished chunks.
    pub(crate) fn open(
        path: &Path,
        key: &Value,
        rows: usize,
        resume: bool,
    ) -> Result<(Self, Vec<Vec<RowScore>>)> {
        let io = |what| MeasureError::io(path, what);
        if !(resume && path.exists()) {
            if path.exists() {
                return Err(MeasureError::Options(format!(
                    "{} is the state of an interrupted run: resume it, or remove it to start afresh",
                    path.display()
                )));
            }
            let mut file = File::create_new(path).map_err(io("creating"))?;
            file.write_all(format!("{key}\n").as_bytes()).map_err(io("writing"))?;
            return Ok((Self { path: path.to_owned(), file }, Vec::new()));
        }
        let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(io("resuming"))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io("resuming"))?;
        let end = bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len());
        let found: Value = serde_json::from_slice(&bytes[..end])
            .map_err(|e| MeasureError::format(path, 0, format!("no state of a run: {e}")))?;
        compare(path, key, &found)?;
        let mut at = (end + 1).min(bytes.len());
        let mut done = Vec::new();
        let size = rows * ROW + 32;
        while let Some(record) = bytes.get(at..at + size) {
            let (body, digest) = record.split_at(rows * ROW);
            if blake3::hash(&[&(done.len() as u64).to_le_bytes(), body].concat()).as_bytes() != digest {
                break;
            }
            done.push(body.chunks_exact(ROW).map(decode).collect());
            at += size;
        }
        file.set_len(at as u64).map_err(io("resuming"))?;
        file.seek(SeekFrom::Start(at as u64)).map_err(io("resuming"))?;
        Ok((Self { path: path.to_owned(), file }, done))
    }

    /// Records a finished chunk.
    pub(crate) fn append(&mut self, chunk: usize, rows: &[RowScore]) -> Result<()> {
        let mut bytes: Vec<u8> = rows.iter().flat_map(encode).collect();
        let digest = blake3::hash(&[&(chunk as u64).to_le_bytes()[..], &bytes].concat());
        bytes.extend(digest.as_bytes());
        self.file
            .write_all(&bytes)
            .and_then(|()| self.file.sync_data())
            .map_err(MeasureError::io(&self.path, "writing"))
    }

    /// Removes it: the run is complete.
    pub(crate) fn remove(self) -> Result<()> {
        std::fs::remove_file(&self.path).map_err(MeasureError::io(&self.path, "removing"))
    }
}

fn compare(path: &Path, key: &Value, found: &Value) -> Result<()> {
    let empty = serde_json::Map::new();
    let (a, b) = (key.as_object().unwrap_or(&empty), found.as_object().unwrap_or(&empty));
    let names = a.keys().chain(b.keys().filter(|k| !a.contains_key(*k)));
    for name in names {
        let (expected, found) = (a.get(name), b.get(name));
        if expected != found {
            let text = |v: Option<&Value>| v.map_or("nothing".into(), Value::to_string);
            return Err(MeasureError::Mismatch {
                what: format!("{}: {name}", path.display()),
                expected: text(expected),
                found: text(found),
                advice: "resume with the same options, or remove the state to start afresh",
            });
        }
    }
    Ok(())
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
