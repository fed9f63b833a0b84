//! What runs in workspaces of its own, so that the program depends on none of it: fuzzers, and other readers as oracles.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::synth::Failure;

const FUZZ: &str = "\
usage: cargo xtask fuzz [--short] [--seconds N] [TARGET...]

Runs libFuzzer on the targets checkpoint, gguf and artifact, 600 s each unless told otherwise, with the address sanitizer. Seeds
are those of fuzz/corpus, and configurations, indices and headers of the test models at hand. Needs cargo-fuzz
(cargo install cargo-fuzz --locked) and a C++ compiler; the ordinary Rust toolchain will do. --short needs neither: it changes
the seeds at random, the same way every time, through the same entry points.";

const ORACLES: &str = "\
usage: cargo xtask oracles [--short]

Compares our reading of GGUF files with gguf-rs's, and our decoding of blocks with candle's. --short does without the latter,
which takes half of the time to build.";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn run(command: &mut Command) -> Result<(), Failure> {
    let text = format!("{command:?}");
    let status = command.status().map_err(|e| Failure::Failed(format!("{text}: {e}")))?;
    if status.success() { Ok(()) } else { Err(Failure::Failed(format!("{text}: {status}"))) }
}

/// `fuzz`.
pub(crate) fn fuzz(args: &[String]) -> Result<(), Failure> {
    let usage = || Failure::Usage(FUZZ.to_owned());
    let (mut short, mut seconds, mut targets) = (false, 600u64, Vec::new());
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match arg.as_str() {
            "--help" | "-h" => {
                println!("{FUZZ}");
                return Ok(());
            }
            "--short" => short = true,
            "--seconds" => seconds = rest.next().and_then(|n| n.parse().ok()).ok_or_else(usage)?,
            name @ ("checkpoint" | "gguf" | "artifact") => targets.push(name),
            _ => return Err(usage()),
        }
    }
    if short {
        return run(Command::new("cargo").current_dir(root()).args([
            "test",
            "-p",
            "infernix-convert",
            "--test",
            "fuzz",
        ]));
    }
    if targets.is_empty() {
        targets = vec!["checkpoint", "gguf", "artifact"];
    }
    for target in targets {
        // New inputs go to a folder that git ignores; the seeds stay as they are.
        let found = root().join("fuzz/target/found").join(target);
        std::fs::create_dir_all(&found).map_err(|e| format!("{}: {e}", found.display()))?;
        if target == "checkpoint" {
            seeds(&found)?;
        }
        run(Command::new("cargo")
            .current_dir(root().join("fuzz"))
            // Sanitizers are switched on by compiler flags that are unstable; nothing else here needs a nightly compiler.
            .env("RUSTC_BOOTSTRAP", "1")
            .args(["fuzz", "run", target])
            .arg(&found)
            .arg(Path::new("corpus").join(target))
            // Threads of a pool end after it is dropped, and what they hold until then would count as a leak.
            .args(["--", "-timeout=30", "-rss_limit_mb=2048", "-malloc_limit_mb=64", "-detect_leaks=0"])
            .args([
                &format!("-max_len={LONGEST}"),
                &format!("-max_total_time={seconds}"),
                "-print_final_stats=1",
            ]))?;
    }
    Ok(())
}

/// Longest input given to a target.
const LONGEST: usize = 1 << 17;

/// Puts configurations, indices and headers of the test models among the inputs. (What GGUF models begin with is mostly their
/// vocabulary, and makes inputs so long that little is tried; the kept seeds have both architectures with short ones.)
fn seeds(found: &Path) -> Result<(), Failure> {
    let folders = [root().join("models"), root().join("../shared/models")];
    let models = folders.iter().filter_map(|f| std::fs::read_dir(f).ok()).flatten().flatten();
    for file in models.filter_map(|m| std::fs::read_dir(m.path()).ok()).flatten().flatten() {
        let path = file.path();
        let name = file.file_name().to_string_lossy().into_owned();
        // The first byte says which file the others are (`fuzz/src/entry.rs`).
        let kind = match name.as_str() {
            "config.json" => 1,
            n if n.ends_with(".safetensors") => 0,
            n if n.ends_with(".index.json") => 2,
            _ => continue,
        };
        let mut seed = vec![kind];
        let bytes =
            std::fs::File::open(&path).and_then(|f| f.take(LONGEST as u64 - 1).read_to_end(&mut seed));
        bytes.map_err(|e| format!("{}: {e}", path.display()))?;
        let model = path.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        let seed_path = found.join(format!("seed-{model}-{name}"));
        std::fs::write(&seed_path, seed).map_err(|e| format!("{}: {e}", seed_path.display()))?;
    }
    Ok(())
}

/// `oracles`.
pub(crate) fn oracles(args: &[String]) -> Result<(), Failure> {
    let mut command = Command::new("cargo");
    command.current_dir(root().join("tests/oracles")).args(["test", "--locked"]);
    match args.first().map(String::as_str) {
        None => {}
        Some("--help" | "-h") => {
            println!("{ORACLES}");
            return Ok(());
        }
        Some("--short") => _ = command.arg("--no-default-features"),
        Some(_) => return Err(Failure::Usage(ORACLES.to_owned())),
    }
    run(&mut command)
}
