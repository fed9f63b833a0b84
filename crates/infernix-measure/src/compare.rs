//! Two stored files against each other, without a model.

use crate::corpus::Chunks;
use crate::error::{MeasureError, Result};
use crate::kld::{KldOptions, Reference, Rows, Running, Test, kld};
use crate::llama::BaseFile;
use crate::logits::LogitsFile;
use crate::reference::ReferenceFile;
use crate::report::KldReport;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A stored file of either kind, told apart by its mark.
#[derive(Debug)]
pub enum StoredFile {
    /// llama.cpp's `_logits_` base file.
    Llama(BaseFile),
    /// Our own reference file.
    Reference(ReferenceFile),
    /// Another engine's logits as safetensors.
    Logits(LogitsFile),
}

impl StoredFile {
    /// Opens a file of either kind.
    pub fn open(path: &Path) -> Result<Self> {
        let mut mark = [0; 8];
        let mut file = File::open(path).map_err(MeasureError::io(path, "opening"))?;
        let read = file.read(&mut mark).map_err(MeasureError::io(path, "reading"))?;
        match &mark[..read] {
            b"_logits_" => Ok(Self::Llama(BaseFile::open(path)?)),
            b"INFXKREF" => Ok(Self::Reference(ReferenceFile::open(path)?)),
            // The length of a safetensors header, below 2^32, and its first byte.
            [_, _, _, _, 0, 0, 0, 0] => Ok(Self::Logits(LogitsFile::open(path)?)),
            _ => Err(MeasureError::format(
                path,
                0,
                "neither a `_logits_` file of llama-perplexity, nor a file of kld --save-reference, nor logits as \
                 safetensors",
            )),
        }
    }

    /// Tokens per chunk, where the file says so.
    pub fn ctx(&self) -> Option<usize> {
        match self {
            Self::Llama(f) => Some(f.header().ctx as usize),
            Self::Reference(f) => Some(f.header().ctx as usize),
            Self::Logits(_) => None,
        }
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        match self {
            Self::Llama(f) => f.path(),
            Self::Reference(f) => f.path(),
            Self::Logits(f) => f.path(),
        }
    }

    /// The text it was made from, as chunks of `ctx` tokens, at most `limit` of them.
    ///
    /// # Errors
    /// A file of chunks of another length; a text shorter than one chunk.
    pub fn chunks(&self, ctx: usize, limit: Option<usize>) -> Result<Chunks> {
        if let Some(own) = self.ctx().filter(|own| *own != ctx) {
            return Err(MeasureError::Mismatch {
                what: format!("{}: context", self.path().display()),
                expected: ctx.to_string(),
                found: own.to_string(),
                advice: "leave --ctx out to take the file's",
            });
        }
        let name = self.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        match self {
            Self::Llama(f) => Chunks::new(&name, b"", f.tokens(), ctx, limit),
            Self::Logits(f) => Chunks::new(&name, b"", f.tokens(), ctx, limit),
            Self::Reference(f) => {
                let all = Chunks::of_header(f.header());
                limit.map_or(Ok(all.clone()), |n| all.first(n))
            }
        }
    }

    /// What a reference file says its model was.
    pub fn model(&self) -> Option<&serde_json::Value> {
        if let Self::Reference(f) = self { Some(&f.header().model) } else { None }
    }

    /// Ids the file holds rows of, valid ones where it says so.
    pub fn valid_vocab(&self) -> usize {
        match self {
            Self::Llama(f) => f.header().vocab as usize,
            Self::Reference(f) => f.header().valid_vocab as usize,
            Self::Logits(f) => f.vocab(),
        }
    }

    /// As the reference of a comparison.
    pub fn reference(self) -> Reference {
        match self {
            Self::Llama(f) => Reference::Llama(f),
            Self::Reference(f) => Reference::Stored(f),
            Self::Logits(f) => Reference::Logits(f),
        }
    }

    /// As rows under test.
    pub fn rows(self) -> Rows {
        match self {
            Self::Llama(f) => Rows::Llama(f),
            Self::Reference(f) => Rows::Stored(f),
            Self::Logits(f) => Rows::Logits(f),
        }
    }
}

/// Compares two stored files: `kld --reference A --test B`.
pub fn compare(
    reference: &Path,
    test: &Path,
    llama_compat: bool,
    progress: &mut dyn FnMut(&Running),
    interrupt: &AtomicBool,
) -> Result<KldReport> {
    let base = StoredFile::open(reference)?;
    let mut options = KldOptions::new(base.chunks(base.ctx().unwrap_or(512), None)?, base.valid_vocab());
    options.llama_compat = llama_compat;
    let engine = test.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let tests = vec![Test { engine, rows: StoredFile::open(test)?.rows() }];
    kld(&options, &mut [], base.reference(), tests, progress, interrupt)
}
