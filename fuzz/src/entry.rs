//! What the three parsers are asked to do with hostile bytes, and the allocator that watches them.
//!
//! The first byte of an input says which of a reader's files the others are, so that one target covers all of them.
//! Nothing here may panic, hang, or allocate more than [`MOST`] for inputs of at most [`LONGEST`].

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Largest input.
pub const LONGEST: usize = 1 << 20;
/// Most memory that an input may take: what is asked for before the bounds of a file are known would show here.
pub const MOST: usize = 64 << 20;

/// Counts what is allocated.
pub struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    let now = NOW.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches atomics only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's layout, as it came.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // Counted although the system hands out zero pages lazily: it is what was asked for.
        grow(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Runs `f` on an input and holds it to the bound. Panics where it is exceeded.
pub fn bounded(data: &[u8], f: impl FnOnce(&[u8])) {
    let data = &data[..data.len().min(LONGEST)];
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    f(data);
    let most = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    assert!(most <= MOST, "{most} bytes were allocated for an input of {} bytes", data.len());
}

fn put(folder: &Path, name: &str, bytes: &[u8]) {
    let _ = std::fs::write(folder.join(name), bytes);
}

/// A small legal shard: one FP8 matrix with its scale, one BF16 vector.
fn shard() -> Vec<u8> {
    let header = br#"{"a.weight":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[0,4]},"a.weight_scale":{"dtype":"F32","shape":[],"data_offsets":[4,8]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]}}"#;
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header);
    out.extend_from_slice(&[1, 2, 3, 4, 0, 0, 128, 63, 0, 63, 0, 191]);
    out
}

/// Safetensors checkpoints: a shard, an index, a configuration with its quantization, resources.
pub fn checkpoint(folder: &Path, data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    let _ = infernix_checkpoint::parse_header(Path::new("x"), data, data.len() as u64);
    for name in ["model.safetensors", "model.safetensors.index.json", "config.json"] {
        let _ = std::fs::remove_file(folder.join(name));
    }
    put(folder, "config.json", b"{\"architectures\":[\"x\"],\"model_type\":\"qwen3_5\"}");
    put(folder, "model.safetensors", &shard());
    let name = match kind % 3 {
        0 => "model.safetensors",
        1 => "config.json",
        _ => "model.safetensors.index.json",
    };
    put(folder, name, data);
    let Ok(checkpoint) = infernix_checkpoint::Checkpoint::open(folder, &Default::default()) else { return };
    let _ = checkpoint.config();
    let _ = checkpoint.cross_check();
    for weight in checkpoint.resolve_each() {
        let Ok(weight) = weight else { continue };
        let _ = (weight.global_scale(), weight.tensor_scale(), weight.input_scale());
        let (rows, k) = (weight.rows().min(4), weight.row_len());
        if rows.saturating_mul(k) <= 1 << 16 {
            let mut out = vec![0.0; (rows * k) as usize];
            let _ = weight.decode_rows_f32(0..rows, &mut out);
        }
    }
    plan(folder, folder);
}

/// GGUF models: keys, tensors, names and conventions, generated files, decoding.
pub fn gguf(folder: &Path, data: &[u8]) {
    let path = folder.join("x.gguf");
    if std::fs::write(&path, data).is_err() {
        return;
    }
    if let Ok(gguf) = infernix_checkpoint::Gguf::open(&path) {
        let _ = gguf.config();
        for name in
            ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "preprocessor_config.json"]
        {
            let _ = gguf.generated_file(name);
        }
        for t in gguf.tensors() {
            let rows = t.rows().min(4);
            if rows.saturating_mul(t.row_len()) <= 1 << 16 {
                let mut out = vec![0.0; (rows * t.row_len()) as usize];
                let _ = gguf.read_rows_f32(t, 0..rows, &mut out);
            }
        }
    }
    plan(&path, folder);
}

fn plan(source: &Path, folder: &Path) {
    let Ok(recipe) = infernix_convert::Recipe::load("auto") else { return };
    let mut options = infernix_convert::ConvertOptions::new(source, recipe, folder.join("x.infernix"));
    options.dry_run = true;
    options.threads = 1;
    let _ = infernix_convert::plan(&options).map(|p| p.to_json());
}

/// Artifacts: a set of one file, a part of another, a volume; inspected, verified, planned as an export.
pub fn artifact(folder: &Path, data: &[u8]) {
    use infernix_artifact::{Artifact, ngram};
    let Some((kind, data)) = data.split_first() else { return };
    let _ = infernix_artifact::parse_directory(Path::new("x"), data);
    let entry = folder.join("x.infernix");
    if kind % 2 == 1 {
        let path = folder.join("x.ngram");
        if std::fs::write(&path, data).is_ok()
            && let Ok(volume) = ngram::Volume::open(&path)
        {
            let _ = volume.row(0);
            let _ = volume.verify(&Default::default(), |_| {});
        }
        return;
    }
    if std::fs::write(&entry, data).is_err() {
        return;
    }
    let Ok(artifact) = Artifact::open(&entry) else { return };
    let _ = ngram::NgramTable::of(artifact.directory());
    for object in artifact.directory().objects.iter().take(64) {
        let _ = artifact.bytes(object);
    }
    let mut options = infernix_convert::VerifyOptions::new(&entry, None);
    options.threads = 1;
    let _ = infernix_convert::verify(&options, &infernix_convert::Silent, &Default::default());
    for (target, name) in [
        (infernix_convert::ExportTarget::Safetensors, "out"),
        (infernix_convert::ExportTarget::Gguf, "out.gguf"),
    ] {
        let _ = infernix_convert::plan_export(&infernix_convert::ExportOptions {
            artifact: entry.clone(),
            target,
            output: folder.join(name),
            ngram: None,
            components: None,
            shard_bytes: 1 << 20,
            bit_exact: false,
            resume: false,
        });
    }
}
