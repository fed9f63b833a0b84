//! Which files make up a GGUF model: one file, or the parts `NAME-00001-of-0000N.gguf` of one.

use std::path::{Path, PathBuf};

use super::header::{Header, read_header};
use super::value::Value;
use crate::limits::MAX_SHARDS;
use crate::{CheckpointError, OpenOptions, natural_cmp};

/// The files of one model, in order, with what was odd.
pub(super) struct Parts {
    pub(super) headers: Vec<Header>,
    /// Files of the folder that accompany the model: image towers, importance matrices.
    pub(super) companions: Vec<PathBuf>,
    pub(super) warnings: Vec<String>,
}

/// Prefix, 1-based number and count of a part's file name.
pub(super) fn part_name(name: &str) -> Option<(&str, u32, u32)> {
    let stem = name.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let digits =
        |s: &str| (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit())).then(|| s.parse().ok()).flatten();
    Some((prefix, digits(number)?, digits(count)?))
}

/// File name of a part.
fn name_of(prefix: &str, number: u32, count: u32) -> String {
    format!("{prefix}-{number:05}-of-{count:05}.gguf")
}

/// Opens the model at `path`: a file, any part of a split file, or a folder that holds one model.
pub(super) fn open_parts(path: &Path, opts: &OpenOptions) -> Result<Parts, CheckpointError> {
    let meta = std::fs::metadata(path).map_err(CheckpointError::io(path, "open"))?;
    if !meta.is_dir() {
        return open_file(path, opts);
    }
    let refuse = |reason: String, advice: &str| CheckpointError::NotAGguf {
        path: path.to_path_buf(),
        reason,
        advice: advice.to_owned(),
    };
    // One entry for each model: the file, or the name of its first part.
    let mut models: Vec<(String, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(path).map_err(CheckpointError::io(path, "list"))? {
        let entry = entry.map_err(CheckpointError::io(path, "list"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".gguf") || name.starts_with('.') {
            continue;
        }
        let model = part_name(&name).map_or_else(|| name.clone(), |(p, _, n)| name_of(p, 1, n));
        match models.iter_mut().find(|(m, _)| *m == model) {
            // Any part that is there leads to the others; the first one is the best to name.
            Some((m, p)) => {
                if *m == name {
                    *p = entry.path();
                }
            }
            None => models.push((model, entry.path())),
        }
    }
    models.sort_by(|a, b| natural_cmp(&a.0, &b.0));
    if models.is_empty() {
        return Err(refuse(
            "the folder holds no .gguf file".to_owned(),
            "pass the folder of one model or its file",
        ));
    }
    let mut companions = Vec::new();
    if models.len() > 1 {
        let mut kept = Vec::new();
        for (name, file) in models {
            // A file that cannot be read is judged later, when it is the model.
            let companion = read_header(&file, 0, opts).is_ok_and(|h| is_companion(&h));
            if companion {
                companions.push(file);
            } else {
                kept.push((name, file));
            }
        }
        models = kept;
    }
    match models.as_slice() {
        [(_, file)] => {
            let mut parts = open_file(file, opts)?;
            for c in &companions {
                let name = c.file_name().unwrap_or_default().to_string_lossy().into_owned();
                parts.warnings.push(format!(
                    "{name} accompanies the model and is not part of it; name it as a source of its own"
                ));
            }
            parts.companions = companions;
            Ok(parts)
        }
        [] => Err(refuse(
            "the folder holds no model, only files that accompany one".to_owned(),
            "pass the model's file",
        )),
        several => Err(refuse(
            format!(
                "the folder holds {} models: {}",
                several.len(),
                several.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>().join(", ")
            ),
            "pass the file of one of them",
        )),
    }
}

/// Whether a file holds no language model: an image tower, an adapter or an importance matrix.
fn is_companion(h: &Header) -> bool {
    let text = |key| h.metadata.get(key).and_then(Value::text);
    matches!(text("general.type"), Some("mmproj" | "adapter" | "imatrix"))
        || text("general.architecture") == Some("clip")
}

/// Opens one file and, if it is a part, all others.
fn open_file(path: &Path, opts: &OpenOptions) -> Result<Parts, CheckpointError> {
    let first = read_header(path, 0, opts)?;
    let mut warnings = Vec::new();
    let name = first.shard.name.clone();
    let named = part_name(&name);
    let count = split_key(path, &first, "split.count")?.unwrap_or(1);
    let broken = |reason: String| CheckpointError::GgufSplit { path: path.to_path_buf(), reason };
    if count <= 1 {
        if let Some((_, number, of)) = named.filter(|n| n.2 > 1) {
            warnings.push(format!(
                "{name} is named part {number} of {of}, but its metadata says that it is a whole model; it is read alone"
            ));
        }
        return Ok(Parts { headers: vec![first], companions: Vec::new(), warnings });
    }
    if count > MAX_SHARDS as u64 {
        return Err(broken(format!("split.count is {count}, the limit is {MAX_SHARDS}")));
    }
    let Some((prefix, number, _)) = named.filter(|n| u64::from(n.2) == count) else {
        return Err(broken(format!(
            "split.count is {count}, so its name must be NAME-00001-of-{count:05}.gguf (or another number); restore the name"
        )));
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    let count = count as u32;
    let names: Vec<String> = (1..=count).map(|i| name_of(prefix, i, count)).collect();
    let missing: Vec<String> = names.iter().filter(|n| !folder.join(n).exists()).cloned().collect();
    if !missing.is_empty() {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        return Err(CheckpointError::MissingShards {
            path: folder.to_path_buf(),
            missing,
            total: count as usize,
        });
    }
    let mut headers = Vec::new();
    let mut first = Some(first);
    for (i, name) in names.iter().enumerate() {
        let part = folder.join(name);
        let mut header = match first.take_if(|_| i + 1 == number as usize) {
            Some(h) => h,
            None => read_header(&part, i as u32, opts)?,
        };
        header.tensors.iter_mut().for_each(|t| t.shard = i as u32);
        check_part(&part, &header, i as u64, u64::from(count), headers.first())?;
        headers.push(header);
    }
    let total: u64 = headers.iter().map(|h| h.tensors.len() as u64).sum();
    if let Some(expected) = split_key(path, &headers[0], "split.tensors.count")?.filter(|n| *n != total) {
        return Err(broken(format!(
            "split.tensors.count is {expected}, the {count} parts have {total} tensors"
        )));
    }
    Ok(Parts { headers, companions: Vec::new(), warnings })
}

/// Checks that a part says what its place in the set asks for.
fn check_part(
    path: &Path,
    header: &Header,
    number: u64,
    count: u64,
    first: Option<&Header>,
) -> Result<(), CheckpointError> {
    let broken = |reason: String| CheckpointError::GgufSplit { path: path.to_path_buf(), reason };
    for (key, expected) in [("split.no", number), ("split.count", count)] {
        let found = split_key(path, header, key)?;
        if found != Some(expected) {
            let found = found.map_or("missing".to_owned(), |n| n.to_string());
            return Err(broken(format!("{key} is {found}, expected {expected}")));
        }
    }
    let Some(first) = first else { return Ok(()) };
    for key in ["general.architecture", "split.tensors.count"] {
        if let Some(found) = header.metadata.get(key)
            && first.metadata.get(key) != Some(found)
        {
            return Err(broken(format!("{key} is {found}, unlike that of the first part")));
        }
    }
    Ok(())
}

/// A number among the `split.*` keys, written with various widths.
fn split_key(path: &Path, header: &Header, key: &str) -> Result<Option<u64>, CheckpointError> {
    let Some(value) = header.metadata.get(key) else { return Ok(None) };
    value.unsigned().map(Some).ok_or_else(|| CheckpointError::GgufKey {
        path: path.to_path_buf(),
        key: key.to_owned(),
        expected: "an integer that is not negative".to_owned(),
        found: format!("{} {value}", value.value_type()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_names_have_five_digits() {
        assert_eq!(part_name("a-b-00002-of-00010.gguf"), Some(("a-b", 2, 10)));
        assert_eq!(name_of("a-b", 2, 10), "a-b-00002-of-00010.gguf");
        for name in ["a.gguf", "a-2-of-10.gguf", "a-00001-of-00002.bin", "a-0000x-of-00002.gguf", "-of-.gguf"]
        {
            assert_eq!(part_name(name), None, "{name}");
        }
    }
}
