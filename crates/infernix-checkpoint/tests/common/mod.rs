//! Small checkpoints built on the fly, whole and broken.
#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses its own part")]

use std::fs;
use std::path::{Path, PathBuf};

use infernix_checkpoint::{Checkpoint, CheckpointError, OpenOptions};

/// A tensor of a file to be written.
#[derive(Clone)]
pub(crate) struct T {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Vec<u8>,
}

/// A tensor whose data counts up.
pub(crate) fn t(name: &str, dtype: &'static str, shape: &[u64]) -> T {
    let width = match dtype {
        "I64" | "F64" => 8,
        "F32" | "I32" => 4,
        "BF16" | "F16" => 2,
        _ => 1,
    };
    let bytes = shape.iter().product::<u64>() * width;
    // Below 0x78: finite as E4M3, positive as a scale, and a small number as F32 or BF16.
    let data = (0..bytes).map(|i| 0x20 + (i % 0x40) as u8).collect();
    T { name: name.to_owned(), dtype, shape: shape.to_vec(), data }
}

/// A tensor with given bytes.
pub(crate) fn with(name: &str, dtype: &'static str, shape: &[u64], data: &[u8]) -> T {
    T { name: name.to_owned(), dtype, shape: shape.to_vec(), data: data.to_vec() }
}

pub(crate) fn f32s(name: &str, shape: &[u64], values: &[f32]) -> T {
    with(name, "F32", shape, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

/// The four tensors of a ModelOpt NVFP4 matrix.
pub(crate) fn nvfp4(base: &str, n: u64, k: u64) -> Vec<T> {
    vec![
        t(&format!("{base}.weight"), "U8", &[n, k / 2]),
        t(&format!("{base}.weight_scale"), "F8_E4M3", &[n, k / 16]),
        f32s(&format!("{base}.weight_scale_2"), &[], &[0.5]),
        f32s(&format!("{base}.input_scale"), &[], &[0.25]),
    ]
}

/// Header JSON of consecutive tensors.
pub(crate) fn header(tensors: &[T]) -> String {
    let mut at = 0;
    let members: Vec<String> = tensors
        .iter()
        .map(|t| {
            let end = at + t.data.len();
            let s = format!(
                "\"{}\":{{\"dtype\":\"{}\",\"shape\":{:?},\"data_offsets\":[{at},{end}]}}",
                t.name, t.dtype, t.shape
            );
            at = end;
            s
        })
        .collect();
    format!("{{{}}}", members.join(","))
}

/// A safetensors file from header text and data.
pub(crate) fn file(header: &[u8], data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header);
    out.extend_from_slice(data);
    out
}

/// A well-formed safetensors file.
pub(crate) fn shard(tensors: &[T]) -> Vec<u8> {
    let data: Vec<u8> = tensors.iter().flat_map(|t| t.data.clone()).collect();
    file(header(tensors).as_bytes(), &data)
}

/// A folder that is deleted at the end of the test.
pub(crate) struct Folder(pub(crate) tempfile::TempDir);

impl Folder {
    /// With an empty config.
    pub(crate) fn new() -> Self {
        let f = Self(tempfile::tempdir().expect("temporary folder"));
        f.put("config.json", b"{}");
        f
    }
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) -> &Self {
        fs::write(self.join(name), bytes).expect("written");
        self
    }
    /// An index of (tensor, shard).
    pub(crate) fn index(&self, entries: &[(&str, &str)]) -> &Self {
        let members: Vec<String> = entries.iter().map(|(t, s)| format!("\"{t}\":\"{s}\"")).collect();
        let text = format!("{{\"metadata\":{{}},\"weight_map\":{{{}}}}}", members.join(","));
        self.put("model.safetensors.index.json", text.as_bytes())
    }
    /// A single-file checkpoint.
    pub(crate) fn single(tensors: &[T]) -> Self {
        let f = Self::new();
        f.put("model.safetensors", &shard(tensors));
        f
    }
    pub(crate) fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(self.path(), &OpenOptions::default())
    }
    pub(crate) fn open_with(&self, opts: &OpenOptions) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(self.path(), opts)
    }
}

/// A folder of the bundled or the shared test models, `None` (with a printed reason) where it is absent.
#[allow(clippy::print_stderr, reason = "a skipped test says so")]
pub(crate) fn model(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for place in ["models", "../shared/models"] {
        let path = root.join(place).join(name);
        if path.exists() {
            return Some(path);
        }
    }
    eprintln!("skipped: no test model {name}");
    None
}

/// Everything that must be in a message.
pub(crate) fn assert_message(e: &CheckpointError, parts: &[&str]) {
    let text = e.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}
