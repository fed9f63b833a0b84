//! Ctrl-C, SIGTERM and SIGHUP: all ask a command to end in order, and all end it at once when they come again.

use crate::{INTERRUPTED, SERVING, output};
#[cfg(unix)]
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
#[cfg(unix)]
use tokio::signal::unix::Signal;
use tokio::time::{Instant, sleep_until};

/// Set by SIGTERM and SIGHUP: whoever sends them wants the process to end, not an answer to be cut short.
static TERMINATED: AtomicBool = AtomicBool::new(false);

/// Set by SIGHUP: the terminal is gone.
static HUNG_UP: AtomicBool = AtomicBool::new(false);

/// How long a command may take to end after these, which many send only once. Longer than the servers of a replay get.
const PATIENCE: Duration = Duration::from_secs(15);

/// Whether SIGTERM or SIGHUP came.
pub(crate) fn terminated() -> bool {
    TERMINATED.load(Ordering::SeqCst)
}

/// The exit code of a command that a signal ended: 128 and the signal's number.
pub(crate) fn exit_code() -> u8 {
    match (HUNG_UP.load(Ordering::SeqCst), terminated()) {
        (true, _) => 129,
        (false, true) => 143,
        (false, false) => 130,
    }
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

/// Ctrl-C, SIGTERM and SIGHUP.
#[cfg(unix)]
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// None where it was to be ignored from the start, as `nohup` has it.
    hangup: Option<Signal>,
}

#[cfg(unix)]
impl Signals {
    /// Begins to catch them; in a runtime.
    pub(crate) fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let hangup = match *HANGUP_IGNORED {
            true => None,
            false => Some(signal(SignalKind::hangup())?),
        };
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup,
        })
    }

    /// Waits for one; false for Ctrl-C.
    pub(crate) async fn next(&mut self) -> bool {
        let hangup = async {
            match &mut self.hangup {
                Some(signal) => signal.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => false,
            _ = self.terminate.recv() => true,
            _ = hangup => {
                HUNG_UP.store(true, Ordering::SeqCst);
                true
            }
        }
    }
}

/// Whether this process was started with SIGHUP ignored, asked before anything catches it. Where the kernel does not say, it was not.
#[cfg(unix)]
static HANGUP_IGNORED: LazyLock<bool> = LazyLock::new(|| {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    // Bit n - 1 is signal n; SIGHUP is 1.
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
});

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
