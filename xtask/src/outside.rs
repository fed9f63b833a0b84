//! What runs in workspaces of its own, so that the program depends on none of it: fuzzers, and other readers as oracles.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::synth::Failure;

const FUZZ: &str = "\
usage: cargo xtask fuzz [--short] [--seconds N] [TARGET...]

Runs libFuzzer on the targets checkpoint, gguf and artifact, 600 s each unless told otherwise. Needs cargo-fuzz and a nightly
toolchain. --short needs neither: it changes the seeds at random, the same way every time, through the same entry points.";

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
        std::fs::create_dir_all(&found).map_err(|e| Failure::Failed(format!("{}: {e}", found.display())))?;
        run(Command::new("cargo")
            .current_dir(root().join("fuzz"))
            .args(["+nightly", "fuzz", "run", target])
            .arg(&found)
            .arg(Path::new("corpus").join(target))
            .args(["--", "-timeout=30", "-max_len=131072", &format!("-max_total_time={seconds}")]))?;
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
