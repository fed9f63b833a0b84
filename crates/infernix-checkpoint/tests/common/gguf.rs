//! Small GGUF files built on the fly.
#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses its own part")]

/// A metadata pair: key, type id, bytes of the value.
pub(crate) type Pair = (String, u32, Vec<u8>);

pub(crate) fn text(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
}

pub(crate) fn kv_text(key: &str, value: &str) -> Pair {
    (key.to_owned(), 8, text(value))
}

pub(crate) fn kv_u32(key: &str, value: u32) -> Pair {
    (key.to_owned(), 4, value.to_le_bytes().to_vec())
}

pub(crate) fn kv_u16(key: &str, value: u16) -> Pair {
    (key.to_owned(), 2, value.to_le_bytes().to_vec())
}

/// An array of element type `ty`, `count` elements in `bytes`.
pub(crate) fn kv_array(key: &str, ty: u32, count: u64, bytes: &[u8]) -> Pair {
    (key.to_owned(), 9, [&ty.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat())
}

/// A tensor: name, dimensions in the file's order, type id, data.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) ne: Vec<u64>,
    pub(crate) ty: u32,
    pub(crate) data: Vec<u8>,
}

pub(crate) fn tensor(name: &str, ne: &[u64], ty: u32, bytes: usize) -> Tensor {
    // Small FP16 and F32 words.
    Tensor {
        name: name.to_owned(),
        ne: ne.to_vec(),
        ty,
        data: (0..bytes).map(|i| 0x20 + (i % 16) as u8).collect(),
    }
}

/// A file to be written.
#[derive(Clone)]
pub(crate) struct File {
    pub(crate) version: u32,
    pub(crate) pairs: Vec<Pair>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) alignment: usize,
}

impl File {
    /// A small whole model of an unknown architecture.
    pub(crate) fn new() -> Self {
        Self {
            version: 3,
            pairs: vec![
                kv_text("general.architecture", "toy"),
                kv_u32("toy.block_count", 1),
                kv_array("toy.list", 5, 3, &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]),
                kv_array("toy.names", 8, 2, &[text("a"), text("bc")].concat()),
                ("toy.flag".to_owned(), 7, vec![1]),
            ],
            tensors: vec![
                tensor("a.weight", &[32, 3], 8, 3 * 34),
                tensor("b.weight", &[5], 0, 20),
                tensor("c.weight", &[64, 2], 20, 72),
            ],
            alignment: 32,
        }
    }

    /// Header bytes, up to the data without padding, with given counts and offsets.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, ty, value) in &self.pairs {
            out.extend(text(key));
            out.extend(ty.to_le_bytes());
            out.extend(value);
        }
        let mut offset = 0u64;
        for t in &self.tensors {
            out.extend(text(&t.name));
            out.extend((t.ne.len() as u32).to_le_bytes());
            t.ne.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.ty.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += t.data.len().next_multiple_of(self.alignment) as u64;
        }
        out
    }

    /// The whole file, padded at its end too.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&t.data);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out
    }
}

/// A two-part model.
pub(crate) fn split() -> [File; 2] {
    let mut parts = [File::new(), File::new()];
    parts[1].tensors = vec![tensor("d.weight", &[4], 0, 16)];
    parts[1].pairs.clear();
    for (i, p) in parts.iter_mut().enumerate() {
        p.pairs.push(kv_u16("split.no", i as u16));
        p.pairs.push(kv_u16("split.count", 2));
        p.pairs.push(("split.tensors.count".to_owned(), 5, 4i32.to_le_bytes().to_vec()));
    }
    parts
}
