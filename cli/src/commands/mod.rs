//! One file per verb.

use crate::Outcome;
use crate::args::{BenchMode, Cli, Command, Given};

mod bench;
mod convert;
pub(crate) mod demo;
mod doctor;
mod engine;
mod export;
mod fetch;
mod files;
mod generate;
mod inspect;
mod kld;
mod load;
mod logits;
mod model;
mod plan;
mod ppl;
mod recipes;
mod replay;
mod report;
mod reports;
mod run;
mod serve;
mod verify;

pub(crate) fn run(cli: Cli, given: &Given) -> anyhow::Result<Outcome> {
    let progress = cli.progress;
    match cli.command {
        Command::Fetch(args) => fetch::run(&args, progress),
        Command::Convert(args) => convert::run(&args, progress),
        Command::Verify(args) => verify::run(&args, progress),
        Command::Export(args) => export::run(&args, progress),
        Command::Inspect(args) => inspect::run(&args),
        Command::Repair(args) => verify::repair(&args, progress),
        Command::Rename(args) => files::rename(&args),
        Command::Clean(args) => files::clean(&args),
        Command::Card(args) => files::write_card(&args),
        Command::Run(args) => run::run(&args, progress),
        Command::Serve(args) => serve::run(&args, progress),
        Command::Kld(args) => kld::run(&args, given, progress),
        Command::Ppl(args) => ppl::run(&args, given, progress),
        Command::Report(args) => report::run(&args),
        Command::Bench(args) => match &args.mode {
            None => bench::run(&args, given, progress),
            Some(BenchMode::Serve(args)) => load::serve(args, progress),
            Some(BenchMode::Context(args)) => load::context(args),
        },
        Command::Replay(args) => replay::run(&args),
        Command::Logits(args) => logits::run(&args, given, progress),
        Command::Plan(args) => plan::run(&args, progress),
        Command::Demo(args) => demo::run(&args, progress),
        Command::Doctor(args) => doctor::run(&args),
        Command::Gen(args) => generate::run(&args),
    }
}
