//! The `infernix` command. This file maps outcomes to exit codes; everything else is in the commands.

mod args;
mod commands;
mod config;
mod output;
mod progress;
mod signals;
mod target;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

/// Set by Ctrl-C and SIGTERM. Long work checks it between steps and stops in a state that can be resumed.
static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Set while a server runs, which has its own answer to them.
static SERVING: AtomicBool = AtomicBool::new(false);

/// How a command ended when it did not fail.
enum Outcome {
    /// Everything asked for was done and is in order.
    Done,
    /// The command did its work and found a mismatch.
    Mismatch,
}

fn main() -> ExitCode {
    #[cfg(unix)]
    if let Err(error) = outlive_file_limits() {
        output::warn(&format!("a limit of file sizes would end the process: {error}"));
    }
    let (cli, given) = match config::expand(args::arguments()) {
        Ok(arguments) => args::parse(arguments),
        Err(error) => return failed(&error),
    };
    signals::watch();
    match commands::run(cli, &given) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Mismatch) if INTERRUPTED.load(Ordering::SeqCst) => ExitCode::from(signals::exit_code()),
        Ok(Outcome::Mismatch) => ExitCode::from(1),
        // A reader that closes early, like `head`, is no failure of ours.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

/// Has a write beyond the limit of a file's size (`ulimit -f`) fail like one on a full disk, where the signal for it would end
/// the process. It is caught and not ignored, since what is ignored stays so in every program that this one starts.
#[cfg(unix)]
fn outlive_file_limits() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _inside = runtime.enter();
    // Once caught, it stays so when the runtime is gone.
    signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw())).map(drop)
}

/// Says an error and gives its exit code.
fn failed(error: &anyhow::Error) -> ExitCode {
    let interrupted = INTERRUPTED.load(Ordering::SeqCst);
    output::error(&output::error_text(error));
    ExitCode::from(if interrupted {
        signals::exit_code()
    } else if is_usage(error) {
        2
    } else {
        1
    })
}

/// Whether what was typed is wrong, and not what was found.
fn is_usage(error: &anyhow::Error) -> bool {
    use infernix_convert::ConvertError as E;
    error.is::<output::Usage>()
        || matches!(
            error.downcast_ref::<E>(),
            Some(E::UnknownRecipe { .. } | E::Source { .. } | E::Option(_))
        )
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}
