//! Writing the folder: one header and one stream of words per file, in bounded memory.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use super::fill::Stream;
use super::{Failure, Options, Tensor};

/// Bytes made and written at a time; a multiple of 8, as streams want.
const STEP: usize = 4 << 20;
/// The drafter and the n-gram table, as in the release.
const SIDE_FILE: &str = "model-fp8-mtp-ple.safetensors";
/// Files that come from the tokenizer's folder.
const RESOURCES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
];

/// Writes the folder of `options`. An existing checkpoint is never touched; `config.json` comes last, so that
/// an interrupted folder does not pass for a whole one.
pub(crate) fn write(options: &Options) -> Result<(), Failure> {
    let out = &options.out;
    if fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Failure::Failed(format!(
            "{} exists and is not empty; remove it or name another folder",
            out.display()
        )));
    }
    fs::create_dir_all(out).map_err(|e| format!("{}: {e}", out.display()))?;
    let tensors = options.geometry.tensors();
    let files = split(&tensors, options.shard_bytes);
    let total: u64 = tensors.iter().map(Tensor::bytes).sum();
    report(&format!("{} tensors, {total} bytes in {} files", tensors.len(), files.len()));
    let started = Instant::now();
    let mut index = String::new();
    for (name, tensors) in &files {
        write_shard(&out.join(name), tensors, options)?;
        for t in tensors {
            let comma = if index.is_empty() { "" } else { "," };
            let _ = write!(index, "{comma}\n    \"{}\": \"{name}\"", t.name);
        }
        report(&format!("{name}: {} tensors, {:.1} s", tensors.len(), started.elapsed().as_secs_f64()));
    }
    let index =
        format!("{{\n  \"metadata\": {{\"total_size\": {total}}},\n  \"weight_map\": {{{index}\n  }}\n}}\n");
    put(&out.join("model.safetensors.index.json"), index.as_bytes())?;
    for name in RESOURCES {
        let from = options.tokenizer.join(name);
        let image_file = name.ends_with("preprocessor_config.json");
        if from.exists() && (options.geometry.vision || !image_file) {
            let bytes = fs::read(&from).map_err(|e| format!("{}: {e}", from.display()))?;
            put(&out.join(name), &bytes)?;
        }
    }
    put(&out.join("hf_quant_config.json"), pretty(&options.geometry.quant_config()).as_bytes())?;
    put(&out.join("config.json"), pretty(&options.geometry.config()).as_bytes())?;
    Ok(())
}

/// Progress goes to stderr; nobody listening is no reason to stop.
fn report(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

fn put(path: &Path, bytes: &[u8]) -> Result<(), String> {
    fs::write(path, bytes).map_err(|e| format!("{}: {e}", path.display()))
}

/// Assigns tensors to files: shards of about `limit` bytes, and the side file.
fn split(tensors: &[Tensor], limit: u64) -> Vec<(String, Vec<&Tensor>)> {
    let mut shards: Vec<Vec<&Tensor>> = Vec::new();
    let mut size = u64::MAX;
    for t in tensors.iter().filter(|t| !t.side) {
        if size.saturating_add(t.bytes()) > limit {
            shards.push(Vec::new());
            size = 0;
        }
        size += t.bytes();
        if let Some(last) = shards.last_mut() {
            last.push(t);
        }
    }
    let count = shards.len();
    let name = |i: usize| format!("model-{:05}-of-{count:05}.safetensors", i + 1);
    let mut files: Vec<_> = shards.into_iter().enumerate().map(|(i, t)| (name(i), t)).collect();
    let side: Vec<&Tensor> = tensors.iter().filter(|t| t.side).collect();
    if !side.is_empty() {
        files.push((SIDE_FILE.to_owned(), side));
    }
    files
}

fn write_shard(path: &Path, tensors: &[&Tensor], options: &Options) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("{}: {e}", path.display());
    let mut header = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes();
        let shape: Vec<String> = t.shape.iter().map(u64::to_string).collect();
        let _ = write!(
            header,
            ",\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{at},{end}]}}",
            t.name,
            t.dtype,
            shape.join(",")
        );
        at = end;
    }
    header.push('}');
    while header.len() % 8 != 0 {
        header.push(' ');
    }
    let mut file = File::create_new(path).map_err(fail)?;
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(fail)?;
    file.write_all(header.as_bytes()).map_err(fail)?;
    if options.headers_only {
        return Ok(());
    }
    let mut buffer = Vec::with_capacity(STEP);
    for t in tensors {
        let mut stream = Stream::new(&t.fill, options.seed, &t.name);
        let mut left = t.bytes();
        while left > 0 {
            let step = left.min(STEP as u64) as usize;
            let start = buffer.len();
            // Small tensors share a buffer; large ones go through it in steps.
            buffer.resize(start + step, 0);
            stream.fill(&mut buffer[start..]);
            left -= step as u64;
            if buffer.len() >= STEP {
                file.write_all(&buffer).map_err(fail)?;
                buffer.clear();
            }
        }
    }
    file.write_all(&buffer).map_err(fail)
}
