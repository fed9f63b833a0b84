//! One file per verb.

use crate::Outcome;
use crate::args::{Cli, Command};

mod doctor;

pub(crate) fn run(cli: Cli) -> anyhow::Result<Outcome> {
    match cli.command {
        Command::Doctor(args) => doctor::run(&args),
        _ => anyhow::bail!("not here yet"),
    }
}
