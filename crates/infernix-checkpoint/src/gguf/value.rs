//! Metadata of a GGUF file: typed values; arrays stay in the file until they are asked for.

use std::fmt;

/// Type of a metadata value, or of the elements of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

/// Type, name, bytes of one value (0 where the length varies), in the order of the ids of the format.
const TYPES: [(ValueType, &str, u64); 13] = [
    (ValueType::U8, "u8", 1),
    (ValueType::I8, "i8", 1),
    (ValueType::U16, "u16", 2),
    (ValueType::I16, "i16", 2),
    (ValueType::U32, "u32", 4),
    (ValueType::I32, "i32", 4),
    (ValueType::F32, "f32", 4),
    (ValueType::Bool, "bool", 1),
    (ValueType::Text, "text", 0),
    (ValueType::Array, "array", 0),
    (ValueType::U64, "u64", 8),
    (ValueType::I64, "i64", 8),
    (ValueType::F64, "f64", 8),
];

impl ValueType {
    /// The type of an id in a file, `None` if unknown.
    pub fn from_id(id: u32) -> Option<Self> {
        TYPES.get(usize::try_from(id).ok()?).map(|t| t.0)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        TYPES[self as usize].1
    }

    /// Bytes of one value; `None` for text and arrays.
    pub fn bytes(self) -> Option<u64> {
        Some(TYPES[self as usize].2).filter(|n| *n > 0)
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An array in the header: where it lies. [`crate::gguf::Gguf`] reads its elements on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Array {
    /// Type of its elements; never [`ValueType::Array`].
    pub element: ValueType,
    /// Number of elements.
    pub count: u64,
    /// First byte of the first element, from the start of the first file.
    pub offset: u64,
    /// Length in bytes; within the file.
    pub bytes: u64,
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(Box<str>),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// Its type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::Text(_) => ValueType::Text,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// An integer of any width that is not negative.
    pub fn unsigned(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// A floating-point number of either width.
    pub fn float(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// A truth value.
    pub fn boolean(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// A text.
    pub fn text(&self) -> Option<&str> {
        match self {
            Value::Text(v) => Some(v),
            _ => None,
        }
    }

    /// A value of a fixed-width type from its bytes; `None` for a wrong length, a truth value that is neither 0 nor 1,
    /// and types of varying length.
    pub(super) fn scalar(ty: ValueType, b: &[u8]) -> Option<Self> {
        Some(match ty {
            ValueType::U8 => Value::U8(u8::from_le_bytes(b.try_into().ok()?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(b.try_into().ok()?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(b.try_into().ok()?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(b.try_into().ok()?)),
            ValueType::U32 => Value::U32(u32::from_le_bytes(b.try_into().ok()?)),
            ValueType::I32 => Value::I32(i32::from_le_bytes(b.try_into().ok()?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(b.try_into().ok()?)),
            ValueType::U64 => Value::U64(u64::from_le_bytes(b.try_into().ok()?)),
            ValueType::I64 => Value::I64(i64::from_le_bytes(b.try_into().ok()?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(b.try_into().ok()?)),
            ValueType::Bool => match b {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                _ => return None,
            },
            ValueType::Text | ValueType::Array => return None,
        })
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
            Value::Text(v) => write!(f, "{:?}", v.chars().take(80).collect::<String>()),
            Value::Array(a) => write!(f, "{} x {}", a.count, a.element),
        }
    }
}

/// Key-value pairs of a file, in its order; keys are distinct.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    entries: Vec<(Box<str>, Value)>,
    /// Numbers into `entries`, sorted by key.
    by_key: Vec<u32>,
}

impl Metadata {
    /// From pairs in file order; the first key that occurs twice is the error.
    pub(super) fn new(entries: Vec<(Box<str>, Value)>) -> Result<Self, Box<str>> {
        let mut by_key: Vec<u32> = (0..entries.len() as u32).collect();
        by_key.sort_unstable_by(|&a, &b| entries[a as usize].0.cmp(&entries[b as usize].0));
        if let Some(pair) = by_key.windows(2).find(|p| entries[p[0] as usize].0 == entries[p[1] as usize].0) {
            return Err(entries[pair[0] as usize].0.clone());
        }
        Ok(Self { entries, by_key })
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let at = self.by_key.binary_search_by(|&i| (*self.entries[i as usize].0).cmp(key)).ok()?;
        Some(&self.entries[self.by_key[at] as usize].1)
    }

    /// Every pair, in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (&**k, v))
    }
}
