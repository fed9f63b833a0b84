//! Which options a command line names itself: one that would have no effect beside the others is refused, not ignored.

use crate::output::usage;
use clap::ArgMatches;
use clap::parser::ValueSource;

/// Options of every model, but for those that find and open it.
pub(crate) const ENGINE_OPTIONS: [&str; 11] = [
    "--backend",
    "--lossless",
    "--a16-activations",
    "--a8-activations",
    "--a4-activations",
    "--kv-dtype",
    "--vram-budget-mib",
    "--expert-ram-mib",
    "--threads",
    "--threads-batch",
    "--ngram",
];

/// Options that were typed, as `--name`.
#[derive(Debug, Default)]
pub(crate) struct Given(Vec<String>);

impl Given {
    /// Those of a command whose arguments were found to be `matches`.
    pub(crate) fn new(command: &clap::Command, matches: &ArgMatches) -> Self {
        let typed =
            |a: &&clap::Arg| matches.value_source(a.get_id().as_str()) == Some(ValueSource::CommandLine);
        let typed = command.get_arguments().filter(typed);
        Self(typed.filter_map(|a| a.get_long()).map(|long| format!("--{long}")).collect())
    }

    /// Refuses those of `names` that were typed: they have no effect, and `why`.
    pub(crate) fn idle(&self, names: &[&str], why: &str) -> anyhow::Result<()> {
        let typed: Vec<&str> = self.0.iter().map(String::as_str).filter(|n| names.contains(n)).collect();
        if typed.is_empty() {
            return Ok(());
        }
        let have = if typed.len() == 1 { "has" } else { "have" };
        Err(usage(format!("{} {have} no effect: {why}", typed.join(", "))))
    }
}
