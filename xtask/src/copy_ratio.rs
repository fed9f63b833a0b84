//! `copy-ratio`: how much longer a conversion takes than copying the same bytes. A copy reads and writes with as many
//! threads and as large blocks as the conversion, from a cold source, without reflinks, and ends with fdatasync.

use crate::synth::Failure;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const HELP: &str = "\
usage: cargo xtask copy-ratio INFERNIX CHECKPOINT SCRATCH [--recipe NAME] [--threads N] [--block-bytes N] [--runs N]

Converts CHECKPOINT with the program INFERNIX into the folder SCRATCH, copies the checkpoint's shards there, in turns and
each from a cold page cache, and prints one JSON document with the times and their ratio. What it wrote is removed.
Defaults: recipe qwen3_8_flash_next_nvfp4, all cores, blocks of 4194304 bytes, 3 runs (the median counts).";

struct Options {
    program: PathBuf,
    checkpoint: PathBuf,
    scratch: PathBuf,
    recipe: String,
    threads: usize,
    block: usize,
    runs: usize,
}

/// Parses the arguments, measures and prints.
pub(crate) fn run(args: &[String]) -> Result<(), Failure> {
    if args.iter().any(|a| a == "--help" || a == "-h") {
        println!("{HELP}");
        return Ok(());
    }
    let o = parse(args)?;
    let mut shards = Vec::new();
    let entries = std::fs::read_dir(&o.checkpoint).map_err(|e| format!("{}: {e}", o.checkpoint.display()))?;
    for entry in entries {
        let path = entry.map_err(|e| e.to_string())?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            shards.push(path);
        }
    }
    shards.sort();
    let (mut copies, mut conversions, mut checksums) = (Vec::new(), Vec::new(), Vec::new());
    let (mut copied, mut written, mut peak) = (0, 0, 0);
    for _ in 0..o.runs {
        drop_cache(&shards)?;
        let started = Instant::now();
        copied = copy(&shards, &o)?;
        copies.push(started.elapsed().as_secs_f64());
        drop_cache(&shards)?;
        let made = convert(&o)?;
        let number = |key: &str| made[key].as_f64().ok_or_else(|| format!("convert printed no {key}"));
        conversions.push(number("seconds")?);
        checksums.push(number("checksum_seconds")?);
        written = made["artifact_bytes"].as_u64().unwrap_or(0) + made["ngram"]["bytes"].as_u64().unwrap_or(0);
        peak = peak.max(made["peak_rss_kib"].as_u64().unwrap_or(0));
    }
    let (copy_s, convert_s) = (median(&copies), median(&conversions));
    // The conversion does not write what it ignores or packs tighter: the rates, not the times, are comparable.
    let ratio = (convert_s / written as f64) / (copy_s / copied as f64);
    let document = serde_json::json!({
        "recipe": o.recipe, "threads": o.threads, "block_bytes": o.block, "copied_bytes": copied, "written_bytes": written,
        "copy_seconds": copies, "convert_seconds": conversions, "checksum_seconds": checksums,
        "copy_bytes_per_second": copied as f64 / copy_s, "convert_bytes_per_second": written as f64 / convert_s,
        "ratio": ratio, "convert_peak_rss_kib": peak,
    });
    println!("{document:#}");
    Ok(())
}

fn parse(args: &[String]) -> Result<Options, Failure> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut paths, mut recipe) = (Vec::new(), "qwen3_8_flash_next_nvfp4".to_owned());
    let (mut numbers, mut rest) = ([threads, 4 << 20, 3], args.iter());
    while let Some(arg) = rest.next() {
        let mut value = || rest.next().cloned().ok_or_else(|| Failure::Usage(format!("{arg} takes a value")));
        let slot = match arg.as_str() {
            "--recipe" => {
                recipe = value()?;
                continue;
            }
            "--threads" => 0,
            "--block-bytes" => 1,
            "--runs" => 2,
            flag if flag.starts_with('-') => return Err(Failure::Usage(HELP.into())),
            path => {
                paths.push(PathBuf::from(path));
                continue;
            }
        };
        let parsed = value()?.parse().ok().filter(|&n: &usize| n > 0);
        numbers[slot] = parsed.ok_or_else(|| Failure::Usage(format!("{arg} takes a number above 0")))?;
    }
    let Ok([program, checkpoint, scratch]) = <[PathBuf; 3]>::try_from(paths) else {
        return Err(Failure::Usage(HELP.into()));
    };
    let [threads, block, runs] = numbers;
    Ok(Options { program, checkpoint, scratch, recipe, threads, block, runs })
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Reads through `dd`, whose `nocache` flag advises the kernel to forget a whole file; this crate has no unsafe code.
fn drop_cache(files: &[PathBuf]) -> Result<(), Failure> {
    for file in files {
        File::open(file).and_then(|f| f.sync_all()).map_err(|e| format!("{}: {e}", file.display()))?;
        let mut input = std::ffi::OsString::from("if=");
        input.push(file);
        let status = Command::new("dd").arg(input).args(["iflag=nocache", "count=0", "status=none"]).status();
        if !status.map_err(|e| format!("dd: {e}"))?.success() {
            return Err(Failure::Failed(format!("{}: the page cache could not be dropped", file.display())));
        }
    }
    Ok(())
}

/// Copies all shards in blocks, the blocks of all files shared out among the threads; synced at the end.
fn copy(shards: &[PathBuf], o: &Options) -> Result<u64, Failure> {
    let at = |path: &Path| {
        let text = path.display().to_string();
        move |e: io::Error| Failure::Failed(format!("{text}: {e}"))
    };
    let (mut files, mut blocks, mut total) = (Vec::new(), Vec::new(), 0);
    for (i, path) in shards.iter().enumerate() {
        let target = o.scratch.join(format!("copy-{i}"));
        let from = File::open(path).map_err(at(path))?;
        let to = OpenOptions::new().write(true).create_new(true).open(&target).map_err(at(&target))?;
        let len = from.metadata().map_err(at(path))?.len();
        to.set_len(len).map_err(at(&target))?;
        blocks.extend((0..len).step_by(o.block).map(|offset| (i, offset, len)));
        total += len;
        files.push((from, to, target));
    }
    let next = AtomicUsize::new(0);
    let work = || -> io::Result<()> {
        let mut buffer = vec![0; o.block];
        while let Some(&(i, offset, len)) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let n = (len - offset).min(o.block as u64) as usize;
            files[i].0.read_exact_at(&mut buffer[..n], offset)?;
            files[i].1.write_all_at(&buffer[..n], offset)?;
        }
        Ok(())
    };
    let copied = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..o.threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|w| w.join().unwrap_or_else(|_| Err(io::Error::other("a worker failed"))))
    });
    let synced = copied.and_then(|()| files.iter().try_for_each(|(_, to, _)| to.sync_data()));
    for (_, _, target) in &files {
        // Left over, it would make the next run fail; said below if copying failed too.
        let _ = std::fs::remove_file(target);
    }
    synced.map(|()| total).map_err(|e| Failure::Failed(format!("copying: {e}")))
}

/// Runs the conversion under GNU time, where there is one, for its peak memory.
fn convert(o: &Options) -> Result<serde_json::Value, Failure> {
    let folder = o.scratch.join("convert");
    std::fs::create_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let timed = Path::new("/usr/bin/time").exists();
    let mut command = if timed { Command::new("/usr/bin/time") } else { Command::new(&o.program) };
    if timed {
        command.args(["-f", "peak %M"]).arg(&o.program);
    }
    command.args(["convert", "--json", "--recipe", &o.recipe, "--threads", &o.threads.to_string()]);
    let output = command.arg(&o.checkpoint).arg("-o").arg(folder.join("out.infernix")).output();
    let removed = std::fs::remove_dir_all(&folder);
    let output = output.map_err(|e| format!("{}: {e}", o.program.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(Failure::Failed(format!("convert ended with {}: {said}", output.status)));
    }
    removed.map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut made: serde_json::Value = serde_json::from_slice(&output.stdout).map_err(|e| e.to_string())?;
    made["peak_rss_kib"] = said.lines().find_map(|l| l.strip_prefix("peak ")?.parse::<u64>().ok()).into();
    Ok(made)
}
