//! Finding the volume of an artifact.

use std::path::{Path, PathBuf};

use super::volume::Volume;
use crate::io::{file_name, folder_of, with_suffix};
use crate::names::plain_name;
use crate::{ArtifactError, ArtifactId, Result};

/// A found volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Its path.
    pub path: PathBuf,
    /// Which rule found it, in words.
    pub how: &'static str,
}

/// Looks in this order: the caller's own choice, `ENTRY.ngram`, the unnumbered `ENTRY.ngram`, the only volume in the
/// entry's folder that has the artifact's volume id.
///
/// # Errors
/// None of them exists (the message lists what was tried), or several volumes have the id.
pub fn locate(entry: &Path, given: Option<&Path>, id: ArtifactId) -> Result<Located> {
    if let Some(path) = given {
        // Opening it says what is wrong with it.
        return Ok(Located { path: path.to_owned(), how: "given" });
    }
    let own = with_suffix(entry, ".ngram");
    let plain = folder_of(entry).join(format!("{}.ngram", plain_name(file_name(entry)?)));
    for (path, how) in [(&own, "beside the entry"), (&plain, "beside the entry, without numbers")] {
        if path.is_file() {
            return Ok(Located { path: path.clone(), how });
        }
    }
    let folder = folder_of(entry);
    let listing = std::fs::read_dir(folder).map_err(|e| ArtifactError::io(folder, "list", e))?;
    let mut found: Vec<PathBuf> = listing
        .filter_map(|item| Some(item.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "ngram"))
        .filter(|path| Volume::open(path).is_ok_and(|volume| volume.header().id == id))
        .collect();
    found.sort();
    match found.as_slice() {
        [path] => Ok(Located { path: path.clone(), how: "by its id" }),
        [] => Err(ArtifactError::Volume {
            path: own.clone(),
            reason: format!(
                "not found, nor {}, nor a volume with id {id} in the folder; name one with --ngram",
                plain.display()
            ),
        }),
        several => Err(ArtifactError::Volume {
            path: folder.to_owned(),
            reason: format!(
                "{} volumes here have id {id}: {several:?}; name one with --ngram",
                several.len()
            ),
        }),
    }
}
