//! Development chores: `cargo xtask COMMAND`.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a development tool reports to its terminal")]

mod clients;
mod copy_ratio;
mod corpus;
mod generate;
mod ops;
mod outside;
mod perf;
mod results;
mod synth;

const USAGE: &str = "\
usage: cargo xtask synth OUT [OPTIONS]        writes a synthetic checkpoint (`synth --help`)
       cargo xtask gen [--check]              writes reference pages and the README's figures, or says if they differ
       cargo xtask perf A B                   compares the speed of two commits or programs (`perf --help`)
       cargo xtask ops                        keeps the figures of `cargo bench` as a result (`ops --help`)
       cargo xtask copy-ratio PROGRAM CHECKPOINT SCRATCH   compares a conversion with a copy (`copy-ratio --help`)
       cargo xtask clients [--short]          drives real clients against the server (`clients --help`)
       cargo xtask fuzz [--short] [TARGET...] drives the parsers with hostile bytes (`fuzz --help`)
       cargo xtask oracles [--short]          compares with other readers of GGUF (`oracles --help`)
       cargo xtask corpus NAME                freezes a snapshot of the repository for replays";

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = match args.first().map(String::as_str) {
        Some("synth") => synth::run(&args[1..]),
        Some("gen") => generate::run(&args[1..]),
        Some("perf") => perf::run(&args[1..]),
        Some("ops") => ops::run(&args[1..]),
        Some("copy-ratio") => copy_ratio::run(&args[1..]),
        Some("clients") => clients::run(&args[1..]),
        Some("fuzz") => outside::fuzz(&args[1..]),
        Some("oracles") => outside::oracles(&args[1..]),
        Some("corpus") => corpus::run(&args[1..]),
        Some("--help" | "-h") => {
            println!("{USAGE}");
            return std::process::ExitCode::SUCCESS;
        }
        _ => Err(synth::Failure::Usage(USAGE.to_owned())),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(synth::Failure::Usage(text)) => {
            eprintln!("{text}");
            std::process::ExitCode::from(2)
        }
        Err(synth::Failure::Failed(text)) => {
            eprintln!("error: {text}");
            std::process::ExitCode::FAILURE
        }
    }
}
