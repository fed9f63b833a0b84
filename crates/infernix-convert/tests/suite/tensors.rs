//! Safetensors files in memory, so that tests can damage or regroup checkpoints.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

pub(crate) type Tensors = BTreeMap<String, (String, Vec<u64>, Vec<u8>)>;

/// All tensors of a folder, whatever its shards.
pub(crate) fn load(folder: &Path) -> Tensors {
    let mut out = Tensors::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        for (name, t) in header.as_object().unwrap() {
            if name == "__metadata__" {
                continue;
            }
            let at = |i: usize| 8 + n + t["data_offsets"][i].as_u64().unwrap() as usize;
            let shape = t["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
            let value = (t["dtype"].as_str().unwrap().to_owned(), shape, bytes[at(0)..at(1)].to_vec());
            out.insert(name.clone(), value);
        }
    }
    out
}

/// Writes tensors as one file.
pub(crate) fn save(path: &Path, tensors: &Tensors) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, (dtype, shape, bytes)) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}),
        );
    }
    let mut text = serde_json::to_vec(&header).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    out.extend(data);
    std::fs::write(path, out).unwrap();
}

/// A copy of a checkpoint with all its tensors in one file, changed by `change`.
pub(crate) fn rebuilt(from: &Path, to: &Path, change: impl FnOnce(&mut Tensors)) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.ends_with(".safetensors") && !name.ends_with(".index.json") {
            std::fs::copy(&path, to.join(name)).unwrap();
        }
    }
    let mut tensors = load(from);
    change(&mut tensors);
    save(&to.join("model.safetensors"), &tensors);
}
