//! Opening a checkpoint: which files, which tensors, and whether they agree.

use std::borrow::Cow;
use std::cmp;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use crate::digests::Digests;
use crate::gguf::view::View;
use crate::index::{INDEX_FILE, Index, parse_index, plain_file_name};
use crate::limits::{MAX_CONFIG_BYTES, MAX_INDEX_BYTES, MAX_RESOURCE_BYTES};
use crate::pool::{Pool, Stamp};
use crate::sniff::{SNIFF_BYTES, refuse_impostor};
use crate::{CheckpointError, Dtype, Gguf, header, hf_cache, natural_cmp};

/// The single file of a checkpoint without an index.
const SINGLE_FILE: &str = "model.safetensors";

/// How strict to be.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    /// Where two shards hold the same tensor, take the copy that the index names and list the other in
    /// [`Checkpoint::ignored`]; without it that is an error.
    pub trust_index: bool,
    /// Open shards that hold their header and no data (`ShardInfo::data_present` is false); for plans.
    pub headers_only_ok: bool,
    /// Open a folder or file without `config.json` beside it (tensor collections that are no model).
    pub allow_missing_config: bool,
}

/// One tensor as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Full name, suffix included.
    pub name: Box<str>,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions as stored, outermost first; empty for a scalar.
    pub shape: Box<[u64]>,
    /// Its file: an index into [`Checkpoint::shards`].
    pub shard: u32,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        // The header was checked: the product is below 2^64.
        self.shape.iter().product()
    }

    /// Whether it is a single value, stored with shape `[]` or `[1]`.
    pub fn is_scalar(&self) -> bool {
        matches!(&*self.shape, [] | [1])
    }
}

/// One safetensors file.
#[derive(Debug, Clone)]
pub struct ShardInfo {
    /// File name within the folder.
    pub name: String,
    /// Length of the file in bytes.
    pub len: u64,
    /// Time of last modification, where the system tells.
    pub modified: Option<SystemTime>,
    /// BLAKE3 of the header: the 8 length bytes and the JSON.
    pub header_blake3: [u8; 32],
    /// SHA-256 of the file, where a Hugging Face cache names its blob by it.
    pub sha256: Option<[u8; 32]>,
    /// Whether the file holds its tensors' data, or only the header.
    pub data_present: bool,
    /// Whether the index names the file; true for a checkpoint without an index.
    pub indexed: bool,
    pub(crate) path: PathBuf,
    pub(crate) stamp: Stamp,
}

/// Bytes of a file that a tensor comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin<'c> {
    /// The file: an index into [`Checkpoint::shards`].
    pub shard: u32,
    /// Name of the tensor in the file.
    pub tensor: &'c str,
    /// Bytes of the file.
    pub bytes: Range<u64>,
}

/// A stored tensor that is deliberately not used.
#[derive(Debug, Clone)]
pub struct IgnoredTensor {
    /// The tensor.
    pub tensor: TensorInfo,
    /// Why.
    pub reason: String,
}

/// A source checkpoint, opened for reading: a folder with `config.json` and `model.safetensors` or its
/// index, one `.safetensors` file with `config.json` beside it, or a GGUF model (`docs/gguf.md`), which is seen under the
/// names and in the order of the checkpoint that it was made from. `Send` and `Sync`; at most four of its
/// files are open at any time.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    folder: PathBuf,
    shards: Vec<ShardInfo>,
    /// In order of shard and offset.
    tensors: Vec<TensorInfo>,
    /// Numbers into `tensors`, sorted by name.
    by_name: Vec<u32>,
    /// Tensors of the shards that the index does not name, sorted by name.
    unindexed: Vec<TensorInfo>,
    ignored: Vec<IgnoredTensor>,
    warnings: Vec<String>,
    pool: Pool,
    digests: Digests,
    recording: AtomicBool,
    /// A GGUF model in place of safetensors files.
    view: Option<Box<View>>,
}

/// What was found at a path.
struct Located {
    folder: PathBuf,
    /// The one file, or with an index whatever safetensors files the folder holds.
    files: Vec<String>,
    index_text: Option<Vec<u8>>,
}

impl Checkpoint {
    /// Opens a checkpoint folder, or one `.safetensors` file. Reads the index and every header; no weight.
    ///
    /// # Errors
    /// Anything of the list in `docs/checkpoints.md`: not a checkpoint, shards missing, an index that
    /// disagrees with the shards, the same tensor in two shards, damaged headers, truncated files.
    pub fn open(path: &Path, opts: &OpenOptions) -> Result<Self, CheckpointError> {
        if is_gguf(path) {
            return Self::open_gguf(path, opts);
        }
        let located = locate(path, opts)?;
        let index_path = located.folder.join(INDEX_FILE);
        let mut files = located.files;
        let mut indexed_files = files.len();
        let index = match &located.index_text {
            Some(text) => {
                let index = parse_index(&index_path, text)?;
                (files, indexed_files) = files_to_read(&located.folder, &index, files)?;
                Some(index)
            }
            None => None,
        };
        let mut warnings = Vec::new();
        let mut shards = Vec::new();
        let mut all = Vec::new();
        for (i, name) in files.iter().enumerate() {
            let indexed = i < indexed_files;
            match read_shard(&located.folder, name, opts, shards.len() as u32, &mut all) {
                Ok(shard) => shards.push(ShardInfo { indexed, ..shard }),
                // The index does not name the file, so the model does not need it.
                Err(e) if !indexed => {
                    warnings.push(format!("{name}, which the index does not name, is not read: {e}"))
                }
                Err(e) => return Err(e),
            }
        }
        let mut checkpoint = Self {
            path: path.to_path_buf(),
            folder: located.folder,
            shards,
            tensors: Vec::new(),
            by_name: Vec::new(),
            unindexed: Vec::new(),
            ignored: Vec::new(),
            warnings,
            pool: Pool::default(),
            digests: Digests::default(),
            recording: AtomicBool::new(false),
            view: None,
        };
        match index {
            Some(index) => checkpoint.place(all, &index, &index_path, opts)?,
            None => checkpoint.tensors = all,
        }
        let without_data = checkpoint.shards.iter().filter(|s| s.indexed && !s.data_present).count();
        if without_data > 0 {
            let total = checkpoint.shards.iter().filter(|s| s.indexed).count();
            checkpoint.warnings.push(format!("{without_data} of {total} shards hold only their headers"));
        }
        checkpoint.sort_names();
        Ok(checkpoint)
    }

    fn sort_names(&mut self) {
        let tensors = &self.tensors;
        self.by_name = (0..tensors.len() as u32).collect();
        self.by_name.sort_unstable_by(|&a, &b| tensors[a as usize].name.cmp(&tensors[b as usize].name));
    }

    fn open_gguf(path: &Path, opts: &OpenOptions) -> Result<Self, CheckpointError> {
        let gguf = Gguf::open_with(path, opts)?;
        let folder = if path.is_dir() { Some(path) } else { path.parent() };
        let folder = folder.filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf();
        let mut warnings = gguf.warnings().to_vec();
        warnings.extend(gguf.companions().iter().map(|p| format!("{} is no part of the model", p.display())));
        let shards = gguf.shards().to_vec();
        let (view, tensors) = View::new(gguf)?;
        let mut checkpoint = Self {
            path: path.to_path_buf(),
            folder,
            shards,
            tensors,
            by_name: Vec::new(),
            unindexed: Vec::new(),
            ignored: Vec::new(),
            warnings,
            pool: Pool::default(),
            digests: Digests::default(),
            recording: AtomicBool::new(false),
            view: Some(Box::new(view)),
        };
        checkpoint.sort_names();
        Ok(checkpoint)
    }

    /// The GGUF model, if it is one.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.view.as_ref().map(|v| &v.gguf)
    }

    /// The view and the number of a tensor in it.
    pub(crate) fn view_of(&self, t: &TensorInfo) -> Option<(&View, usize)> {
        let view = self.view.as_ref()?;
        Some((view, self.number(t)? as usize))
    }

    /// Splits the tensors of the headers into those that the index places and the rest.
    fn place(
        &mut self,
        mut all: Vec<TensorInfo>,
        index: &Index<'_>,
        index_path: &Path,
        opts: &OpenOptions,
    ) -> Result<(), CheckpointError> {
        // Shards that could not be read are not in `self.shards`; those the index names always are.
        let number: Vec<Option<u32>> = index
            .shards
            .iter()
            .map(|name| self.shards.iter().position(|s| s.name == *name).map(|n| n as u32))
            .collect();
        let shard_name = |n: u32| self.shards[n as usize].name.clone();
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name).then(a.shard.cmp(&b.shard)));
        let mut entries = index.entries.iter().peekable();
        let absent = |entry: &(Cow<'_, str>, u32), elsewhere| CheckpointError::IndexedTensorAbsent {
            path: index_path.to_path_buf(),
            tensor: entry.0.to_string(),
            shard: index.shards[entry.1 as usize].clone(),
            elsewhere,
        };
        let mut all = all.into_iter().peekable();
        while let Some(first) = all.next() {
            // Everything that the index names before this tensor is in no shard.
            if let Some(e) = entries.next_if(|e| *e.0 < *first.name) {
                return Err(absent(e, None));
            }
            let entry = entries.next_if(|e| *e.0 == *first.name);
            let wanted = entry.and_then(|e| number[e.1 as usize]);
            let mut copies = vec![first];
            while let Some(copy) = all.next_if(|t| t.name == copies[0].name) {
                copies.push(copy);
            }
            let at = copies.iter().position(|t| Some(t.shard) == wanted);
            match (entry, at) {
                (Some(e), None) => return Err(absent(e, Some(shard_name(copies[0].shard)))),
                _ if copies.len() > 1 && !opts.trust_index => {
                    return Err(CheckpointError::DuplicateTensor {
                        path: self.folder.clone(),
                        tensor: copies[0].name.to_string(),
                        first: shard_name(copies[0].shard),
                        second: shard_name(copies[1].shard),
                        indexed: entry.is_some(),
                    });
                }
                (Some(_), Some(at)) => {
                    let kept = copies.swap_remove(at);
                    let reason = format!("the index takes it from {}", shard_name(kept.shard));
                    self.tensors.push(kept);
                    self.ignored.extend(
                        copies.into_iter().map(|tensor| IgnoredTensor { tensor, reason: reason.clone() }),
                    );
                }
                (None, _) => self.unindexed.append(&mut copies),
            }
        }
        if let Some(e) = entries.next() {
            return Err(absent(e, None));
        }
        self.tensors.sort_unstable_by_key(|t| (t.shard, t.offset, t.bytes));
        if let Some(expected) = index.total_size {
            let found: u64 = self.tensors.iter().map(|t| t.bytes).sum();
            if found != expected {
                self.warnings.push(format!(
                    "{INDEX_FILE}: metadata.total_size is {expected}, the tensors it names have {found} bytes"
                ));
            }
        }
        if !self.unindexed.is_empty() {
            self.warnings.push(format!(
                "{} tensors are in no index, the first is {} in {}",
                self.unindexed.len(),
                self.unindexed[0].name,
                self.shards[self.unindexed[0].shard as usize].name
            ));
        }
        Ok(())
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of its files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// `config.json`, parsed; generated from a GGUF model's keys. Each call reads it anew.
    pub fn config(&self) -> Result<serde_json::Value, CheckpointError> {
        let path = self.folder.join("config.json");
        self.json("config.json")?
            .ok_or_else(|| CheckpointError::Config { path, reason: "config.json is missing".to_owned() })
    }

    /// A JSON object of the folder, `None` where the file is absent.
    pub(crate) fn json(&self, name: &str) -> Result<Option<serde_json::Value>, CheckpointError> {
        if let Some(view) = &self.view {
            return if name == "config.json" { view.gguf.config().map(Some) } else { Ok(None) };
        }
        let path = self.folder.join(name);
        let Some(bytes) = read_small(&path, "a JSON file", MAX_CONFIG_BYTES)? else { return Ok(None) };
        let fail = |reason: String| CheckpointError::Config { path: path.clone(), reason };
        let value: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|e| fail(format!("not valid JSON: {e}")))?;
        if value.is_object() { Ok(Some(value)) } else { Err(fail("expected a JSON object".to_owned())) }
    }

    /// The bytes of a resource (`tokenizer.json`, `chat_template.jinja`, ...), `None` where the file is
    /// absent. Those of a GGUF model are generated from its keys. A git-lfs pointer or a web page in its place is an error.
    pub fn file_bytes(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        plain_file_name(name)
            .map_err(|reason| CheckpointError::FileName { name: name.to_owned(), reason })?;
        if let Some(view) = &self.view {
            return view.gguf.generated_file(name);
        }
        read_small(&self.folder.join(name), "a resource file", MAX_RESOURCE_BYTES)
    }

    /// Every tensor of the model as stored, in the order of shards and offsets: the order to stream them in.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// Every tensor in the order of names.
    pub fn tensors_by_name(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.by_name.iter().map(|&i| &self.tensors[i as usize])
    }

    /// The tensor of that full name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.get_concat(name, "")
    }

    /// The tensor named `base` + `suffix`, without building the name.
    pub(crate) fn get_concat(&self, base: &str, suffix: &str) -> Option<&TensorInfo> {
        let at = self
            .by_name
            .binary_search_by(|&i| cmp_concat(&self.tensors[i as usize].name, base, suffix))
            .ok()?;
        Some(&self.tensors[self.by_name[at] as usize])
    }

    /// An error if `name` lies in a shard that the index does not name it in. For a tensor the model needs.
    pub(crate) fn refuse_unindexed(&self, base: &str, suffix: &str) -> Result<(), CheckpointError> {
        match self.unindexed.binary_search_by(|t| cmp_concat(&t.name, base, suffix)) {
            Ok(at) => Err(CheckpointError::Unindexed {
                path: self.folder.join(INDEX_FILE),
                tensor: self.unindexed[at].name.to_string(),
                shard: self.shard_of(&self.unindexed[at]).name.clone(),
            }),
            Err(_) => Ok(()),
        }
    }

    /// The files, in numeric order; those that the index does not name last.
    pub fn shards(&self) -> &[ShardInfo] {
        &self.shards
    }

    /// The file of a tensor of this checkpoint.
    pub fn shard_of(&self, t: &TensorInfo) -> &ShardInfo {
        &self.shards[t.shard as usize]
    }

    /// Where bytes `range` of a tensor lie in the files, in order. Of a tensor that is put together from a GGUF file's rows
    /// in another order, or computed back, the whole of each stored tensor.
    pub fn origins<'c>(&'c self, t: &'c TensorInfo, range: Range<u64>) -> Vec<Origin<'c>> {
        match self.view_of(t) {
            Some((view, at)) => view.origins(at, range),
            None => vec![Origin {
                shard: t.shard,
                tensor: &t.name,
                bytes: t.offset + range.start..t.offset + range.end,
            }],
        }
    }

    /// Whether every shard holds its data.
    pub fn data_present(&self) -> bool {
        self.shards.iter().all(|s| s.data_present || !s.indexed)
    }

    /// Tensors that lie in a shard but not in the index, by name. The model must not need them.
    pub fn unindexed(&self) -> &[TensorInfo] {
        &self.unindexed
    }

    /// Copies that `trust_index` set aside, each with the reason.
    pub fn ignored(&self) -> &[IgnoredTensor] {
        &self.ignored
    }

    /// What is odd about the files but does no harm. What the quantization config claims is compared in
    /// [`Checkpoint::cross_check`].
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Reads bytes `range` of a tensor (0 = its first byte) into `out`, which must have that length. Bulk:
    /// pages are handed back to the system.
    pub fn read(&self, t: &TensorInfo, range: Range<u64>, out: &mut [u8]) -> Result<(), CheckpointError> {
        let misfit = |reason: String| CheckpointError::Range {
            tensor: t.name.to_string(),
            start: range.start,
            end: range.end,
            reason,
        };
        if range.start > range.end || range.end > t.bytes {
            return Err(misfit(format!("the tensor has {} bytes", t.bytes)));
        }
        if out.len() as u64 != range.end - range.start {
            return Err(misfit(format!("the buffer has {} bytes", out.len())));
        }
        let shard = self
            .shards
            .get(t.shard as usize)
            .ok_or_else(|| misfit("the tensor is of another checkpoint".to_owned()))?;
        if out.is_empty() {
            return Ok(());
        }
        self.refuse_absent(t)?;
        match self.view_of(t) {
            Some((view, at)) => view.read(at, range.clone(), out)?,
            None => {
                let at = t.offset + range.start;
                self.pool.read(t.shard, &shard.path, &shard.stamp, &t.name, at, out)?;
            }
        }
        if self.recording.load(Ordering::Relaxed)
            && let Some(number) = self.number(t)
        {
            self.digests.note(number, t.bytes, &range, out);
        }
        Ok(())
    }

    /// From now on hashes what is read, see [`Checkpoint::digest`].
    pub fn record_digests(&self) {
        self.recording.store(true, Ordering::Relaxed);
    }

    /// BLAKE3 of a tensor's bytes, if it was read whole since [`Checkpoint::record_digests`]. Of a GGUF model those of the
    /// view: in the source's order, with what the converter computed computed back.
    pub fn digest(&self, t: &TensorInfo) -> Option<[u8; 32]> {
        self.number(t).and_then(|n| self.digests.get(n))
    }

    /// Hashes bytes `range` of a tensor that an earlier run read and that are known without reading the file again, see
    /// [`Checkpoint::digest`].
    pub fn note_bytes(&self, t: &TensorInfo, range: Range<u64>, bytes: &[u8]) {
        if self.recording.load(Ordering::Relaxed)
            && let Some(number) = self.number(t)
        {
            self.digests.note(number, t.bytes, &range, bytes);
        }
    }

    /// Takes a digest from an earlier run over the same files.
    pub fn restore_digest(&self, name: &str, digest: [u8; 32]) {
        if let Some(number) = self.get(name).and_then(|t| self.number(t)) {
            self.digests.set(number, digest);
        }
    }

    /// The number of a tensor among all.
    fn number(&self, t: &TensorInfo) -> Option<u32> {
        let at = self.by_name.binary_search_by(|&i| self.tensors[i as usize].name.cmp(&t.name)).ok()?;
        Some(self.by_name[at])
    }

    /// An error if the tensor's file holds only its header.
    fn refuse_absent(&self, t: &TensorInfo) -> Result<(), CheckpointError> {
        match self.shards.get(t.shard as usize) {
            Some(shard) if !shard.data_present && t.bytes > 0 => {
                let missing = self.tensors.iter().filter(|x| x.shard == t.shard).map(|x| x.bytes).sum();
                Err(CheckpointError::HeadersOnly { path: shard.path.clone(), missing })
            }
            _ => Ok(()),
        }
    }

    /// Reads a whole tensor. For small ones: the vector has its full size.
    pub fn read_all(&self, t: &TensorInfo) -> Result<Vec<u8>, CheckpointError> {
        // Data that is there bounds the allocation by the length of the file.
        self.refuse_absent(t)?;
        let mut out = vec![0; t.bytes as usize];
        self.read(t, 0..t.bytes, &mut out)?;
        Ok(out)
    }
}

/// Compares `name` with `base` + `suffix`.
fn cmp_concat(name: &str, base: &str, suffix: &str) -> cmp::Ordering {
    let (name, base) = (name.as_bytes(), base.as_bytes());
    match name.split_at_checked(base.len()) {
        Some((head, tail)) => head.cmp(base).then_with(|| tail.cmp(suffix.as_bytes())),
        // Shorter than `base`: a proper prefix of it sorts first.
        None => name.cmp(base),
    }
}

/// Finds the files of the checkpoint at `path` and reads its index.
fn locate(path: &Path, opts: &OpenOptions) -> Result<Located, CheckpointError> {
    let refuse = |reason: String, advice: &str| CheckpointError::NotACheckpoint {
        path: path.to_path_buf(),
        reason,
        advice: advice.to_owned(),
    };
    let meta = std::fs::metadata(path).map_err(CheckpointError::io(path, "open"))?;
    if !meta.is_dir() {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
        let folder = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p.to_path_buf(),
            _ => PathBuf::from("."),
        };
        if name == INDEX_FILE {
            return locate(&folder, opts);
        }
        if !name.ends_with(".safetensors") {
            return Err(refuse(
                "the file's name ends neither in .safetensors nor in .gguf".to_owned(),
                "pass a checkpoint folder, a .safetensors or a .gguf file",
            ));
        }
        if !opts.allow_missing_config {
            require_config(&folder, &refuse)?;
        }
        // One shard of several is not a model.
        let index_path = folder.join(INDEX_FILE);
        if let Some(text) = read_small(&index_path, "an index", MAX_INDEX_BYTES)? {
            let index = parse_index(&index_path, &text)?;
            if index.shards.len() > 1 && index.shards.contains(&name) {
                return Err(refuse(
                    format!("it is one of the {} shards of {}", index.shards.len(), index_path.display()),
                    "pass the folder",
                ));
            }
        }
        return Ok(Located { folder, files: vec![name], index_text: None });
    }

    let folder = path.to_path_buf();
    let present = safetensors_files(&folder)?;
    let index_text = read_small(&folder.join(INDEX_FILE), "an index", MAX_INDEX_BYTES)?;
    if index_text.is_none() && !present.iter().any(|n| n == SINGLE_FILE) {
        return Err(match present.as_slice() {
            [] if folder.join("snapshots").is_dir() => refuse(
                "it is a repository of the Hugging Face cache".to_owned(),
                "pass one of the folders in its snapshots folder",
            ),
            [] => refuse(
                format!("the folder holds neither {SINGLE_FILE} nor {INDEX_FILE}"),
                "pass a folder that holds one",
            ),
            [one] => refuse(
                format!("the folder holds {one}, but neither {SINGLE_FILE} nor {INDEX_FILE}"),
                "pass that file by its own name if it is the whole model",
            ),
            many => refuse(
                format!(
                    "the folder holds {} safetensors files ({} ...) and no {INDEX_FILE}",
                    many.len(),
                    many[0]
                ),
                "fetch the index",
            ),
        });
    }
    if !opts.allow_missing_config {
        require_config(&folder, &refuse)?;
    }
    // Without an index, other files beside model.safetensors (adapters, drafters) are not part of it.
    let files = if index_text.is_some() { present } else { vec![SINGLE_FILE.to_owned()] };
    Ok(Located { folder, files, index_text })
}

/// The files to read the headers of: those that the index names, in numeric order, then the others of
/// `present`; and how many the index names.
fn files_to_read(
    folder: &Path,
    index: &Index<'_>,
    mut present: Vec<String>,
) -> Result<(Vec<String>, usize), CheckpointError> {
    let mut files = index.shards.clone();
    files.sort_by(|a, b| natural_cmp(a, b));
    // A name in the index may be a link whose target is gone: that is a missing file, too.
    let gone = |name: &&String| !folder.join(name).exists();
    let missing: Vec<String> = files.iter().filter(gone).map(|n| described(folder, n)).collect();
    if !missing.is_empty() {
        return Err(CheckpointError::MissingShards {
            path: folder.to_path_buf(),
            missing,
            total: files.len(),
        });
    }
    let indexed = files.len();
    present.retain(|n| !files.contains(n));
    files.append(&mut present);
    Ok((files, indexed))
}

/// A file that cannot be opened, with where it leads if it is a link.
fn described(folder: &Path, name: &str) -> String {
    match std::fs::read_link(folder.join(name)) {
        Ok(target) if target == Path::new(name) => format!("{name} (a link to itself)"),
        Ok(target) => format!("{name} (a link to {}, which leads nowhere)", target.display()),
        Err(_) => name.to_owned(),
    }
}

fn require_config(
    folder: &Path,
    refuse: &dyn Fn(String, &str) -> CheckpointError,
) -> Result<(), CheckpointError> {
    if folder.join("config.json").exists() {
        Ok(())
    } else {
        Err(refuse("config.json is missing".to_owned(), "fetch it from the model's repository"))
    }
}

/// Whether `path` is a GGUF file, or a folder of such that is no safetensors checkpoint.
fn is_gguf(path: &Path) -> bool {
    if !path.is_dir() {
        return path.extension().is_some_and(|x| x == "gguf");
    }
    let has = |name: &str| path.join(name).exists();
    !(has("config.json") && (has(SINGLE_FILE) || has(INDEX_FILE))) && holds_gguf(path)
}

fn holds_gguf(folder: &Path) -> bool {
    let is_gguf = |e: std::io::Result<std::fs::DirEntry>| {
        e.is_ok_and(|e| Path::new(&e.file_name()).extension().is_some_and(|x| x == "gguf"))
    };
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.any(is_gguf))
}

/// The names of the safetensors files in a folder, in numeric order.
fn safetensors_files(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(CheckpointError::io(folder, "list"))? {
        let entry = entry.map_err(CheckpointError::io(folder, "list"))?;
        // Hidden files are another program's (editors, `._` files of archives).
        if let Some(name) = entry.file_name().to_str()
            && name.ends_with(".safetensors")
            && !name.starts_with('.')
        {
            names.push(name.to_owned());
        }
    }
    names.sort_by(|a, b| natural_cmp(a, b));
    Ok(names)
}

/// Reads the header of one shard and appends its tensors.
fn read_shard(
    folder: &Path,
    name: &str,
    opts: &OpenOptions,
    number: u32,
    out: &mut Vec<TensorInfo>,
) -> Result<ShardInfo, CheckpointError> {
    let path = folder.join(name);
    refuse_special(&path, "a safetensors file")?;
    let mut file = File::open(&path).map_err(CheckpointError::io(&path, "open"))?;
    let stamp = Stamp::of(&file).map_err(CheckpointError::io(&path, "look at"))?;
    let header = header::read_header(&mut file, &path, stamp.len)?;
    let expected = header.data_start + header.data_len;
    let data_present = stamp.len >= expected;
    if stamp.len > expected {
        return Err(CheckpointError::TrailingBytes { path, expected, found: stamp.len });
    }
    if !data_present {
        if stamp.len != header.data_start {
            let tensor = header.entries.iter().find(|e| header.data_start + e.end > stamp.len);
            return Err(CheckpointError::Truncated {
                path,
                expected,
                found: stamp.len,
                tensor: tensor.map(|e| e.name.to_string()),
            });
        }
        if !opts.headers_only_ok {
            return Err(CheckpointError::HeadersOnly { path, missing: header.data_len });
        }
    }
    crate::pool::drop_pages(&file, 0, header.data_start);
    out.extend(header.entries.into_iter().map(|e| TensorInfo {
        name: e.name,
        dtype: e.dtype,
        shape: e.shape,
        shard: number,
        offset: header.data_start + e.begin,
        bytes: e.end - e.begin,
    }));
    Ok(ShardInfo {
        name: name.to_owned(),
        len: stamp.len,
        modified: stamp.modified,
        header_blake3: header.digest,
        sha256: hf_cache::blob_sha256(&path),
        data_present,
        indexed: true,
        path,
        stamp,
    })
}

/// Refuses folders, and pipes and devices, which could be read for ever.
fn refuse_special(path: &Path, expected: &'static str) -> Result<(), CheckpointError> {
    let found = match path.metadata() {
        // Opening it will say why not.
        Err(_) => return Ok(()),
        Ok(meta) if meta.is_file() => return Ok(()),
        Ok(meta) if meta.is_dir() => "a folder",
        Ok(_) => "a pipe or device",
    };
    Err(CheckpointError::Impostor {
        path: path.to_path_buf(),
        expected,
        found: found.to_owned(),
        advice: "put the file itself there",
    })
}

/// Reads an index file that is known to be there.
pub(crate) fn read_index(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    read_small(path, "an index", MAX_INDEX_BYTES)?
        .ok_or_else(|| CheckpointError::io(path, "open")(std::io::Error::from(std::io::ErrorKind::NotFound)))
}

/// Reads a small file whole, `None` where it is absent. Its length bounds the allocation.
fn read_small(path: &Path, expected: &'static str, limit: u64) -> Result<Option<Vec<u8>>, CheckpointError> {
    refuse_special(path, expected)?;
    let file = match File::open(path) {
        Ok(f) => f,
        // A link whose target is gone was meant to be there.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && path.symlink_metadata().is_err() => {
            return Ok(None);
        }
        Err(e) => return Err(CheckpointError::io(path, "open")(e)),
    };
    let len = file.metadata().map_err(CheckpointError::io(path, "look at"))?.len();
    let too_large =
        |found| CheckpointError::TooLarge { path: path.to_path_buf(), what: expected, limit, found };
    if len > limit {
        return Err(too_large(len));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    file.take(limit + 1).read_to_end(&mut bytes).map_err(CheckpointError::io(path, "read"))?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    refuse_impostor(path, expected, &bytes[..bytes.len().min(SNIFF_BYTES)])?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concatenated_names_compare_like_built_ones() {
        let names = ["", "a", "a.w", "a.weight", "a.weight_scale", "ab", "b.weight", "a.", "é"];
        for name in names {
            for base in names {
                for suffix in ["", ".weight", ".weight_scale", "b"] {
                    assert_eq!(
                        cmp_concat(name, base, suffix),
                        (*name).cmp(&format!("{base}{suffix}")),
                        "{name} {base} {suffix}"
                    );
                }
            }
        }
    }
}
