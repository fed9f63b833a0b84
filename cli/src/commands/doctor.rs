//! `infernix doctor`: what this machine has, measured where a number is claimed, and what will run on it.

use crate::Outcome;
use crate::args::DoctorArgs;
use crate::output::{self, Table};
use anyhow::Context as _;
use infernix_measure::bench::machine::group_memory;
use rustix::fs::{Advice, Mode, OFlags};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::Instant;

const GIB: f64 = (1u64 << 30) as f64;
/// Size of the file that the disk test writes and reads back.
const PROBE_BYTES: usize = 256 << 20;
const BLOCK: usize = 1 << 20;

pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<Outcome> {
    if args.selftest {
        let report = infernix_cuda::selftest(&infernix_cuda::selftest::Options::default())?;
        output::print_json(&report)?;
        return Ok(if report["ok"] == true { Outcome::Done } else { Outcome::Mismatch });
    }
    let cpu = cpu();
    let memory = memory();
    let disk = disk(&args.dir)?;
    let gpu = gpu();
    let verdicts = verdicts(&memory, &disk);
    let report = json!({
        "schema_version": 1, "version": env!("CARGO_PKG_VERSION"), "cpu": cpu, "memory": memory, "disk": disk,
        "gpu": gpu, "runs": verdicts,
    });
    if args.json.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    Ok(Outcome::Done)
}

fn cpu() -> Value {
    let name = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    json!({ "name": name, "usable_cores": cores, "features": features(), "path": simd_path() })
}

fn features() -> Vec<&'static str> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! probe {
            ($($name:tt),*) => { $(if std::arch::is_x86_feature_detected!($name) { found.push($name); })* };
        }
        probe!(
            "avx2",
            "fma",
            "f16c",
            "avx512f",
            "avx512bw",
            "avx512vl",
            "avx512vbmi",
            "avx512vnni",
            "avx512bf16"
        );
    }
    found
}

fn simd_path() -> &'static str {
    let features = features();
    let has = |f: &str| features.contains(&f);
    if has("avx512bw") && has("avx512vnni") && has("avx512bf16") {
        "avx512 with vnni and bf16"
    } else if has("avx512bw") {
        "avx512"
    } else if has("avx2") && has("fma") {
        "avx2"
    } else {
        "scalar"
    }
}

fn memory() -> Value {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find(|l| l.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    let limit = group_memory().map(|g| g.0);
    json!({ "total_bytes": field("MemTotal:"), "available_bytes": field("MemAvailable:"), "cgroup_limit_bytes": limit })
}

/// Writes a scratch file in `dir` and reads it back without the page cache.
fn disk(dir: &Path) -> anyhow::Result<Value> {
    let space = rustix::fs::statvfs(dir).with_context(|| format!("{} cannot be examined", dir.display()))?;
    let free = space.f_bavail * space.f_frsize;
    let mut report = json!({ "folder_free_bytes": free });
    if free < 2 * PROBE_BYTES as u64 {
        report["note"] = json!("not measured: less than 512 MiB free");
        return Ok(report);
    }
    let path = dir.join(format!(".infernix-doctor-{}", std::process::id()));
    let measured = measure_disk(&path);
    let _ = fs::remove_file(&path);
    match measured {
        Ok((write, read, random, direct)) => {
            report["write_bytes_per_second"] = json!(write as u64);
            report["read_bytes_per_second"] = json!(read as u64);
            report["random_4k_reads_per_second"] = json!(random as u64);
            report["direct_io"] = json!(direct);
        }
        Err(error) => report["note"] = json!(format!("not measured: {error:#}")),
    }
    Ok(report)
}

fn measure_disk(path: &Path) -> anyhow::Result<(f64, f64, f64, bool)> {
    let mut file = File::create_new(path).context("the folder cannot be written to")?;
    let mut block = vec![0u8; BLOCK];
    let mut state = 1u64;
    for word in block.chunks_exact_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        word.copy_from_slice(&state.to_le_bytes());
    }
    let start = Instant::now();
    for _ in 0..PROBE_BYTES / BLOCK {
        file.write_all(&block)?;
    }
    file.sync_data()?;
    let write = PROBE_BYTES as f64 / start.elapsed().as_secs_f64();
    drop(file);
    let (mut file, direct) = match rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty()) {
        Ok(fd) => (File::from(fd), true),
        Err(_) => {
            let file = File::open(path)?;
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
            (file, false)
        }
    };
    // Direct reads need buffers aligned to the block size of the device.
    let mut buffer = vec![0u8; BLOCK + 4096];
    let offset = buffer.as_ptr().align_offset(4096);
    let buffer = &mut buffer[offset..offset + BLOCK];
    let start = Instant::now();
    for _ in 0..PROBE_BYTES / BLOCK {
        file.read_exact(buffer)?;
    }
    let read = PROBE_BYTES as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mut reads = 0u32;
    while start.elapsed().as_millis() < 500 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let page = (state >> 33) as usize % (PROBE_BYTES / 4096);
        file.seek(SeekFrom::Start(page as u64 * 4096))?;
        file.read_exact(&mut buffer[..4096])?;
        reads += 1;
    }
    Ok((write, read, f64::from(reads) / start.elapsed().as_secs_f64(), direct))
}

/// Driver, card and the kernels in this program. The card is asked only where the driver's library can be loaded.
fn gpu() -> Value {
    let driver = fs::read_to_string("/proc/driver/nvidia/version").ok();
    let driver = driver.as_deref().and_then(|t| t.lines().next()).map(str::to_owned);
    let mut report = json!({ "driver": driver, "kernel_targets": infernix_cuda::embedded_targets() });
    if infernix_cuda::driver_present() {
        match infernix_cuda::Device::open(0) {
            Ok(device) => {
                let info = device.info();
                report["name"] = json!(info.name);
                report["multiprocessors"] = json!(info.multiprocessors);
                if let Ok((free, total)) = device.memory() {
                    report["memory_free_bytes"] = json!(free);
                    report["memory_bytes"] = json!(total);
                }
            }
            Err(error) => report["note"] = json!(error.to_string()),
        }
    }
    report
}

/// What each published model needs on top of its files, and whether this machine has it.
fn verdicts(memory: &Value, disk: &Value) -> Vec<Value> {
    let total = memory["total_bytes"].as_u64().unwrap_or(0);
    let ram = memory["cgroup_limit_bytes"].as_u64().map_or(total, |l| l.min(total)) as f64 / GIB;
    let free = disk["folder_free_bytes"].as_u64().unwrap_or(0) as f64 / GIB;
    // Artifact and volume sizes from the published sets; conversion reads the source from disk as well.
    let models = [
        ("bundled demo", 0.1, 0.25),
        ("Qwen3.6/3.8-27B, 4 bits", 19.0, 20.0),
        ("Qwen3.6-35B-A3B", 24.0, 25.0),
        ("Qwen3.8-Flash-Next NVFP4, 8-bit dense", 71.6 + 48.9, 73.3),
    ];
    models
        .iter()
        .map(|(name, artifact, resident)| {
            let mut lacks = Vec::new();
            if ram < *resident {
                lacks.push(format!("{resident:.1} GiB of memory (has {ram:.1})"));
            }
            if free < *artifact {
                lacks.push(format!("{artifact:.1} GiB of disk in this folder (has {free:.1})"));
            }
            json!({ "model": name, "runs": lacks.is_empty(), "lacks": lacks, "backend": "cpu" })
        })
        .collect()
}

fn text(report: &Value) -> String {
    let mut t = Table::new(&["", "<"]);
    let size = |v: &Value| v.as_u64().map_or("unknown".to_owned(), output::bytes);
    let cpu = &report["cpu"];
    t.row(["processor".into(), cpu["name"].as_str().unwrap_or("unknown").to_owned()]);
    t.row(["cores this process may use".into(), cpu["usable_cores"].to_string()]);
    t.row(["vector path".into(), cpu["path"].as_str().unwrap_or_default().to_owned()]);
    let memory = &report["memory"];
    let available = size(&memory["available_bytes"]);
    t.row(["memory".into(), format!("{} total, {available} available", size(&memory["total_bytes"]))]);
    if !memory["cgroup_limit_bytes"].is_null() {
        t.row(["memory limit of this group".into(), size(&memory["cgroup_limit_bytes"])]);
    }
    let disk = &report["disk"];
    t.row(["disk free".into(), size(&disk["folder_free_bytes"])]);
    if disk["note"].is_null() {
        let rate = |key: &str| format!("{}/s", size(&disk[key]));
        let how = if disk["direct_io"] == true { "direct" } else { "through the page cache, dropped first" };
        t.row(["disk write".into(), rate("write_bytes_per_second")]);
        t.row(["disk read".into(), format!("{} ({how})", rate("read_bytes_per_second"))]);
        let random = output::grouped(disk["random_4k_reads_per_second"].as_u64().unwrap_or(0));
        t.row(["4 KiB random reads".into(), format!("{random}/s, one at a time")]);
    } else {
        t.row(["disk speed".into(), disk["note"].as_str().unwrap_or_default().to_owned()]);
    }
    let gpu = &report["gpu"];
    t.row(["GPU driver".into(), gpu["driver"].as_str().unwrap_or("no NVIDIA driver loaded").to_owned()]);
    if let Some(name) = gpu["name"].as_str() {
        t.row(["GPU".into(), format!("{name}, {} of memory", size(&gpu["memory_bytes"]))]);
    }
    if let Some(note) = gpu["note"].as_str() {
        t.row(["GPU".into(), note.to_owned()]);
    }
    let targets: Vec<_> =
        gpu["kernel_targets"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let kernels = if targets.is_empty() { "none: built without nvcc".to_owned() } else { targets.join(", ") };
    t.row(["CUDA kernels in this program".into(), kernels]);
    let mut out = format!("{t}\n");
    let mut t = Table::new(&["model", "<here"]);
    for run in report["runs"].as_array().into_iter().flatten() {
        let lacks: Vec<_> = run["lacks"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let verdict = if lacks.is_empty() {
            format!("runs on the {}", run["backend"].as_str().unwrap_or_default())
        } else {
            format!("lacks {}", lacks.join(" and "))
        };
        t.row([run["model"].as_str().unwrap_or_default().to_owned(), verdict]);
    }
    out.push_str(&t.to_string());
    out
}
