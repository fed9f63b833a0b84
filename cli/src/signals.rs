//! Ctrl-C and SIGTERM: both ask a command to end in order, and both end it at once when they come again.

use crate::{INTERRUPTED, SERVING, output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Set by SIGTERM: whoever sends it wants the process to end, not an answer to be cut short.
static TERMINATED: AtomicBool = AtomicBool::new(false);

/// How long a command may take to end after SIGTERM, which many send only once. Longer than the servers of a replay get.
const PATIENCE: Duration = Duration::from_secs(15);

/// Whether SIGTERM came.
pub(crate) fn terminated() -> bool {
    TERMINATED.load(Ordering::SeqCst)
}

/// The exit code of a command that a signal ended: 128 and the signal's number.
pub(crate) fn exit_code() -> u8 {
    if terminated() { 143 } else { 130 }
}

/// Watches for signals in a thread of its own, for as long as the process lives.
pub(crate) fn watch() {
    let watching = tokio::runtime::Builder::new_current_thread().enable_all().build().and_then(|runtime| {
        let signals = {
            let _inside = runtime.enter();
            Signals::new()?
        };
        std::thread::Builder::new().name("signals".into()).spawn(move || runtime.block_on(heed(signals)))
    });
    if let Err(error) = watching {
        output::warn(&format!("Ctrl-C and SIGTERM cannot be caught here: {error}"));
    }
}

async fn heed(mut signals: Signals) {
    let mut last: Option<Instant> = None;
    loop {
        let late = async {
            match last {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let term = tokio::select! {
            term = signals.next() => term,
            () = late => end(),
        };
        // A server has its own answer.
        if SERVING.load(Ordering::SeqCst) {
            continue;
        }
        TERMINATED.fetch_or(term, Ordering::SeqCst);
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            end();
        }
        if term {
            last = Some(Instant::now() + PATIENCE);
        }
    }
}

/// Ends the process at once: the state on disk is always resumable, and what is not meant to stay goes.
fn end() -> ! {
    infernix_measure::replay::kill_servers();
    crate::commands::demo::discard();
    std::process::exit(exit_code().into());
}

/// Ctrl-C and SIGTERM.
#[cfg(unix)]
pub(crate) struct Signals(tokio::signal::unix::Signal, tokio::signal::unix::Signal);

#[cfg(unix)]
impl Signals {
    /// Begins to catch both; in a runtime.
    pub(crate) fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self(signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?))
    }

    /// Waits for one; true for SIGTERM.
    pub(crate) async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.0.recv() => false,
            _ = self.1.recv() => true,
        }
    }
}

/// Ctrl-C.
#[cfg(not(unix))]
pub(crate) struct Signals;

#[cfg(not(unix))]
impl Signals {
    /// Begins to catch it.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    /// Waits for one; true for SIGTERM, which is not known here.
    pub(crate) async fn next(&mut self) -> bool {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        false
    }
}
