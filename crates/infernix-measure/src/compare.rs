//! Two stored files against each other, without a model.

use crate::corpus::Chunks;
use crate::error::{MeasureError, Result};
use crate::kld::{KldOptions, Reference, Rows, Running, Test, kld};
use crate::llama::BaseFile;
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
            _ => Err(MeasureError::format(
                path,
                0,
                "neither a `_logits_` file of llama-perplexity nor a file of kld --save-reference",
            )),
        }
    }

    /// The text it was made from, as chunks; `limit` is a cap on their number (llama.cpp files only).
    pub fn chunks(&self, limit: Option<usize>) -> Result<Chunks> {
        match self {
            Self::Llama(f) => {
                let name = f.path().file_name().unwrap_or_default().to_string_lossy();
                Chunks::new(&name, b"", f.tokens(), f.header().ctx as usize, limit)
            }
            Self::Reference(f) => Ok(Chunks::of_header(f.header())),
        }
    }

    /// Ids the file holds rows of, valid ones where it says so.
    pub fn valid_vocab(&self) -> usize {
        match self {
            Self::Llama(f) => f.header().vocab as usize,
            Self::Reference(f) => f.header().valid_vocab as usize,
        }
    }

    /// As the reference of a comparison.
    pub fn reference(self) -> Reference {
        match self {
            Self::Llama(f) => Reference::Llama(f),
            Self::Reference(f) => Reference::Stored(f),
        }
    }

    /// As rows under test.
    pub fn rows(self) -> Rows {
        match self {
            Self::Llama(f) => Rows::Llama(f),
            Self::Reference(f) => Rows::Stored(f),
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
    let mut options = KldOptions::new(base.chunks(None)?, base.valid_vocab());
    options.llama_compat = llama_compat;
    let engine = test.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let tests = vec![Test { engine, rows: StoredFile::open(test)?.rows() }];
    kld(&options, &mut [], base.reference(), tests, progress, interrupt)
}
