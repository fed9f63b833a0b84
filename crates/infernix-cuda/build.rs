//! Compiles `kernels/*.cu` to one fatbin per file and target, SASS only, and embeds them.
//!
//! nvcc is looked for in `INFERNIX_NVCC`, `CUDA_HOME/bin`, `PATH` and `.venv-cuda` of the workspace. Without it the
//! crate builds with an empty list of targets. `INFERNIX_CUDA_ARCHS` is a comma-separated list such as
//! `sm_90a,sm_120f`; `fp4*.cu` exist for `sm_120a` only, `*_sm90a.cu` for `sm_90a` only.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    for key in ["INFERNIX_NVCC", "CUDA_HOME", "INFERNIX_CUDA_ARCHS"] {
        println!("cargo:rerun-if-env-changed={key}");
    }
    println!("cargo:rerun-if-changed=kernels");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let Some(nvcc) = find_nvcc() else {
        fs::write(
            out.join("fatbins.rs"),
            "pub(crate) static TARGETS: &[&str] = &[];\npub(crate) static FATBINS: &[(&str, &[u8])] = &[];\n#[cfg(test)]\npub(crate) static PTXAS: &[(&str, &str)] = &[];\n",
        )
        .expect("write the list of kernels");
        return;
    };
    let archs = env::var("INFERNIX_CUDA_ARCHS").unwrap_or_else(|_| "sm_90a,sm_120f".into());
    let archs: Vec<String> =
        archs.split(',').map(|a| a.trim().to_string()).filter(|a| !a.is_empty()).collect();

    let mut sources: Vec<PathBuf> = fs::read_dir("kernels")
        .expect("the kernels folder is part of the crate")
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|x| x == "cu"))
        .collect();
    sources.sort();
    let headers: Vec<u8> = {
        let mut paths: Vec<PathBuf> = fs::read_dir("kernels")
            .expect("the kernels folder is part of the crate")
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| p.extension().is_some_and(|x| x == "cuh"))
            .collect();
        paths.sort();
        paths.iter().flat_map(|p| fs::read(p).expect("read a kernel header")).collect()
    };

    // One nvcc process a file, at most as many at a time as cargo allows. A file whose sources, headers, compiler
    // and targets are unchanged keeps its fatbin: cargo reruns this program when any kernel changed.
    let jobs: usize = env::var("NUM_JOBS").ok().and_then(|v| v.parse().ok()).unwrap_or(2);
    let work: Vec<(PathBuf, PathBuf, Vec<String>)> = sources
        .iter()
        .map(|src| {
            let stem = src.file_stem().expect("a file name").to_string_lossy().into_owned();
            let targets = if stem.starts_with("fp4") {
                if archs.iter().any(|a| a.starts_with("sm_120")) {
                    vec!["sm_120a".to_string()]
                } else {
                    vec![]
                }
            } else if stem.ends_with("_sm90a") {
                archs.iter().filter(|a| *a == "sm_90a").cloned().collect()
            } else {
                archs.clone()
            };
            (src.clone(), out.join(format!("{stem}.fatbin")), targets)
        })
        .filter(|w| !w.2.is_empty())
        .collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let failures = std::sync::Mutex::new(Vec::<String>::new());
    std::thread::scope(|s| {
        for _ in 0..jobs.clamp(1, 8) {
            s.spawn(|| {
                loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some((src, dst, targets)) = work.get(i) else { break };
                    if let Err(e) = compile(&nvcc, src, dst, targets, &headers) {
                        failures.lock().expect("no thread panics with the lock").push(e);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics with the lock");
    assert!(failures.is_empty(), "nvcc ({}) failed:\n{}", nvcc.display(), failures.join("\n"));

    let mut text = format!(
        "pub(crate) static TARGETS: &[&str] = &{archs:?};\npub(crate) static FATBINS: &[(&str, &[u8])] = &[\n"
    );
    for (src, dst, _) in &work {
        let stem = src.file_stem().expect("a file name").to_string_lossy().into_owned();
        text += &format!("    ({stem:?}, include_bytes!({:?})),\n", dst.display().to_string());
    }
    text += "];\n";
    // What ptxas said, for the test that looks for spills.
    text += "#[cfg(test)]\npub(crate) static PTXAS: &[(&str, &str)] = &[\n";
    for (_, dst, _) in &work {
        let log = dst.with_extension("ptxas.txt");
        text += &format!("    ({:?}, include_str!({:?})),\n", stem_of(dst), log.display().to_string());
    }
    text += "];\n";
    fs::write(out.join("fatbins.rs"), text).expect("write the list of kernels");
}

fn compile(nvcc: &Path, src: &Path, dst: &Path, targets: &[String], headers: &[u8]) -> Result<(), String> {
    let source = fs::read(src).map_err(|e| format!("{}: {e}", src.display()))?;
    let key = format!(
        "{} {targets:?} {:016x} {}",
        nvcc.display(),
        fnv(&[headers, &source].concat()),
        FLAGS.join(" ")
    );
    let stamp = dst.with_extension("key");
    if dst.exists() && fs::read_to_string(&stamp).is_ok_and(|k| k == key) {
        return Ok(());
    }
    let mut cmd = Command::new(nvcc);
    cmd.arg("-fatbin").args(FLAGS);
    for t in targets {
        let n = t.trim_start_matches("sm_");
        cmd.arg("-gencode").arg(format!("arch=compute_{n},code=sm_{n}"));
    }
    cmd.arg("-o").arg(dst).arg(src);
    let run = cmd.output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let log = String::from_utf8_lossy(&run.stderr).into_owned() + &String::from_utf8_lossy(&run.stdout);
    if !run.status.success() {
        return Err(format!("{}: {}\n{log}", src.display(), run.status));
    }
    fs::write(dst.with_extension("ptxas.txt"), &log).map_err(|e| e.to_string())?;
    fs::write(stamp, key).map_err(|e| e.to_string())
}

/// `-Xptxas -v` is kept beside each fatbin: registers, spills and shared memory of every kernel.
const FLAGS: &[&str] =
    &["-O3", "-std=c++17", "--fmad=true", "-lineinfo", "-compress-mode=size", "-Xptxas", "-v"];

fn stem_of(p: &Path) -> String {
    p.file_stem().expect("a file name").to_string_lossy().into_owned()
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(p) = env::var_os("INFERNIX_NVCC") {
        let p = PathBuf::from(p);
        assert!(p.is_file(), "INFERNIX_NVCC is set to {}, which is not a file", p.display());
        return Some(p);
    }
    let mut candidates = Vec::new();
    if let Some(home) = env::var_os("CUDA_HOME") {
        candidates.push(PathBuf::from(home).join("bin/nvcc"));
    }
    if let Some(path) = env::var_os("PATH") {
        candidates.extend(env::split_paths(&path).map(|d| d.join("nvcc")));
    }
    let root =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../.venv-cuda/lib");
    if let Ok(dirs) = fs::read_dir(root) {
        candidates
            .extend(dirs.filter_map(|d| Some(d.ok()?.path().join("site-packages/nvidia/cu13/bin/nvcc"))));
    }
    candidates.into_iter().find(|p| p.is_file())
}
