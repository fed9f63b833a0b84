//! Progress on stderr: a bar on a terminal, plain lines or JSON elsewhere.

use crate::args::ProgressMode;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A running count of bytes with the phase it belongs to.
pub(crate) struct Reporter {
    mode: Mode,
}

enum Mode {
    Bar(ProgressBar),
    Lines { json: bool, state: Mutex<Lines> },
    Silent,
}

struct Lines {
    phase: String,
    total: u64,
    done: u64,
    started: Instant,
    printed: Instant,
}

/// How often plain and JSON progress prints at most.
const INTERVAL: Duration = Duration::from_secs(2);

impl Reporter {
    pub(crate) fn new(mode: ProgressMode) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let lines = |json| {
            let now = Instant::now();
            let state = Lines { phase: String::new(), total: 0, done: 0, started: now, printed: now };
            Mode::Lines { json, state: Mutex::new(state) }
        };
        let mode = match mode {
            ProgressMode::Auto if terminal => {
                let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(8));
                let template =
                    "{msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta} left";
                if let Ok(style) = ProgressStyle::with_template(template) {
                    bar.set_style(style.progress_chars("=> "));
                }
                Mode::Bar(bar)
            }
            ProgressMode::Plain => lines(false),
            ProgressMode::Json => lines(true),
            ProgressMode::Auto | ProgressMode::None => Mode::Silent,
        };
        Self { mode }
    }
}

impl infernix_convert::Progress for Reporter {
    fn begin(&self, phase: &str, total: u64) {
        match &self.mode {
            Mode::Bar(bar) => {
                bar.set_message(phase.to_owned());
                bar.set_length(total);
                bar.reset();
            }
            Mode::Lines { json, state } => {
                let Ok(mut s) = state.lock() else { return };
                let now = Instant::now();
                *s = Lines { phase: phase.to_owned(), total, done: 0, started: now, printed: now };
                print(*json, &s);
            }
            Mode::Silent => {}
        }
    }

    fn advance(&self, bytes: u64) {
        match &self.mode {
            Mode::Bar(bar) => bar.inc(bytes),
            Mode::Lines { json, state } => {
                let Ok(mut s) = state.lock() else { return };
                s.done += bytes;
                if s.printed.elapsed() >= INTERVAL || s.done == s.total {
                    s.printed = Instant::now();
                    print(*json, &s);
                }
            }
            Mode::Silent => {}
        }
    }

    fn note(&self, text: &str) {
        match &self.mode {
            Mode::Bar(bar) => bar.suspend(|| crate::output::note(text)),
            _ => crate::output::note(text),
        }
    }

    fn end(&self) {
        if let Mode::Bar(bar) = &self.mode {
            bar.finish_and_clear();
        }
    }
}

/// Progress in steps with running values: a bar on a terminal, lines or JSON elsewhere.
pub(crate) struct Steps {
    mode: Mode,
    printed: Option<Instant>,
}

impl Steps {
    pub(crate) fn new(mode: ProgressMode, total: u64) -> Self {
        let reporter = Reporter::new(mode);
        if let Mode::Bar(bar) = &reporter.mode {
            if let Ok(style) = ProgressStyle::with_template("[{bar:20}] {pos}/{len} {eta} left  {msg}") {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_length(total);
        }
        Self { mode: reporter.mode, printed: None }
    }

    /// `done` of `total` steps, with what to show of them.
    pub(crate) fn at(
        &mut self,
        done: u64,
        total: u64,
        text: &str,
        value: impl FnOnce() -> serde_json::Value,
    ) {
        match &self.mode {
            Mode::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done);
                bar.set_message(text.to_owned());
            }
            Mode::Lines { json, .. } => {
                if done < total && self.printed.is_some_and(|t| t.elapsed() < INTERVAL) {
                    return;
                }
                self.printed = Some(Instant::now());
                let line = if *json { value().to_string() } else { format!("{done} of {total}: {text}") };
                crate::output::note(&line);
            }
            Mode::Silent => {}
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        if let Mode::Bar(bar) = &self.mode {
            bar.finish_and_clear();
        }
    }
}

fn print(json: bool, s: &Lines) {
    let seconds = s.started.elapsed().as_secs_f64();
    if json {
        let line = serde_json::json!({ "phase": s.phase, "bytes": s.done, "total_bytes": s.total, "seconds": seconds });
        crate::output::note(&line.to_string());
    } else {
        let rate = crate::output::bytes((s.done as f64 / seconds.max(1e-9)) as u64);
        let (done, total) = (crate::output::bytes(s.done), crate::output::bytes(s.total));
        crate::output::note(&format!("{}: {done} of {total}, {rate}/s", s.phase));
    }
}
