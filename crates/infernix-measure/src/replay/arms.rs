//! The servers that a replay compares: given by address, or started by a command and watched.

use crate::bench::gpu::Gpu;
use crate::client::{Endpoint, Pending};
use crate::error::{MeasureError, Result};
use crate::redact;
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, test_kill_process_group, waitpid};
use std::fs::File;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// An engine under comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arm {
    /// As in the report.
    pub name: String,
    /// Where it is, or how it is started.
    pub target: Target,
}

/// A server's address or command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// It runs already, on its own account.
    Url(String),
    /// A shell command that starts it; `{port}` stands for the port it must listen on.
    Command(String),
}

impl Arm {
    /// `NAME=URL` or `NAME=COMMAND`.
    ///
    /// # Errors
    /// No name, no target, or a command without `{port}`.
    pub fn parse(text: &str) -> Result<Self> {
        let fail = |what: &str| MeasureError::Options(format!("arm {:?}: {what}", redact::command(text)));
        let (name, target) = text.split_once('=').ok_or_else(|| fail("NAME=URL or NAME=COMMAND expected"))?;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.+ ".contains(c);
        if name.trim().is_empty() || !name.chars().all(plain) {
            return Err(fail("the name may have letters, digits, spaces and -_.+"));
        }
        let target = if target.starts_with("http://") || target.starts_with("https://") {
            Target::Url(target.to_owned())
        } else if target.contains("{port}") {
            Target::Command(target.to_owned())
        } else {
            return Err(fail("neither an http address nor a command with {port} in it"));
        };
        Ok(Self { name: name.trim().to_owned(), target })
    }
}

/// Memory that an engine may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Resident memory of the server's processes, MiB.
    pub ram_mib: Option<u64>,
    /// Memory in use on the GPU, MiB.
    pub vram_mib: Option<u64>,
}

/// What the watcher saw.
#[derive(Debug, Default)]
struct Watched {
    ram: AtomicU64,
    vram: AtomicU64,
    sm_mhz: AtomicU64,
    exceeded: OnceLock<String>,
    stop: AtomicBool,
}

/// A server ready to be measured. Dropping it ends one that was started here.
pub struct Server {
    /// Where it listens.
    pub endpoint: Endpoint,
    /// Before the server, so that nothing is watched that is being ended.
    watcher: Option<Watcher>,
    _started: Option<Started>,
}

impl Server {
    /// Connects to an arm's server, or starts it and waits until it lists its model.
    ///
    /// # Errors
    /// A server that does not answer within `patience`, or whose command ends before.
    pub fn start(
        arm: &Arm,
        key: Option<String>,
        log: Option<&Path>,
        budget: Budget,
        patience: Duration,
        interrupted: &AtomicBool,
    ) -> Result<Self> {
        let connect = |url: &str| {
            let (url, key) = (url.to_owned(), key.clone());
            Pending::start(move |_| Endpoint::connect(&url, key, None))?.wait(interrupted)?
        };
        let command = match &arm.target {
            Target::Url(url) => {
                let endpoint = connect(url)?;
                return Ok(Self { endpoint, watcher: None, _started: None });
            }
            Target::Command(command) => command,
        };
        let port = free_port()?;
        let fail =
            |e: std::io::Error| MeasureError::Server(format!("{}: the server does not start: {e}", arm.name));
        let output = || -> std::io::Result<Stdio> {
            log.map_or(Ok(Stdio::null()), |p| Ok(File::options().create(true).append(true).open(p)?.into()))
        };
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(command.replace("{port}", &port.to_string())).stdin(Stdio::null());
        shell.stdout(output().map_err(fail)?).stderr(output().map_err(fail)?);
        let mut started = Started::new(shell).map_err(fail)?;
        // From the beginning: what it takes to load, it takes.
        let watcher = Watcher::new(started.group, budget);
        let url = format!("http://127.0.0.1:{port}");
        let end = Instant::now() + patience;
        let endpoint = loop {
            if interrupted.load(Ordering::Relaxed) {
                return Err(MeasureError::Stopped);
            }
            let ended = started.child.try_wait();
            if let Some(what) = watcher.seen.exceeded.get() {
                return Err(MeasureError::Server(format!("{}: ended for taking {what}", arm.name)));
            }
            if let Ok(Some(status)) = ended {
                return Err(MeasureError::Server(format!(
                    "{}: the server's command ended with {status} before it answered; {}",
                    arm.name,
                    log.map_or("give --out DIR to keep what it says".into(), |p| format!(
                        "see {}",
                        p.display()
                    ))
                )));
            }
            match connect(&url) {
                Ok(endpoint) => break endpoint,
                Err(MeasureError::Denied(e)) => {
                    return Err(MeasureError::Denied(format!("{}: {e}; give its key", arm.name)));
                }
                Err(e) if Instant::now() > end => return Err(e),
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        };
        Ok(Self { endpoint, watcher: Some(watcher), _started: Some(started) })
    }

    fn seen(&self, what: impl Fn(&Watched) -> &AtomicU64) -> Option<u64> {
        self.watcher.as_ref().map(|w| what(&w.seen).load(Ordering::Relaxed))
    }

    /// Most resident memory of a server started here, MiB.
    pub fn peak_ram_mib(&self) -> Option<u64> {
        self.seen(|w| &w.ram)
    }

    /// Most GPU memory in use while it ran, MiB, where a driver tells.
    pub fn peak_vram_mib(&self) -> Option<u64> {
        self.seen(|w| &w.vram).filter(|v| *v > 0)
    }

    /// Highest clock of the GPU's multiprocessors while it ran, MHz, where a driver tells.
    pub fn peak_sm_mhz(&self) -> Option<u64> {
        self.seen(|w| &w.sm_mhz).filter(|v| *v > 0)
    }

    /// What it took beyond its budget; it was ended then.
    pub fn exceeded(&self) -> Option<&str> {
        self.watcher.as_ref()?.seen.exceeded.get().map(String::as_str)
    }
}

/// The thread that watches a group, until it is dropped.
struct Watcher {
    seen: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    fn new(group: Pid, budget: Budget) -> Self {
        let seen = Arc::new(Watched::default());
        let watched = Arc::clone(&seen);
        Self { seen, thread: Some(std::thread::spawn(move || watch(group, budget, &watched))) }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.seen.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Groups that were started here and have not been ended.
static RUNNING: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

fn running() -> MutexGuard<'static, Vec<Pid>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills every server that was started here and waits until it is gone, for a process that is about to end without dropping
/// its [`Server`]s.
pub fn kill_servers() {
    running().iter().for_each(|group| kill(*group));
}

/// Kills a group and waits until nothing of it is left. What does not go within five seconds hangs in the kernel.
fn kill(group: Pid) {
    let _ = kill_process_group(group, Signal::KILL);
    // Its leader is a child of this process, the others are the system's to reap.
    let _ = waitpid(Some(group), WaitOptions::empty());
    let end = Instant::now() + Duration::from_secs(5);
    while test_kill_process_group(group).is_ok() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Kills the group `$0` when its input ends without a line: the kernel closes it when this process ends, however it does.
const GUARD: &str = r#"read -r line || kill -s KILL -- "-$0""#;

/// A child's process group, ended when dropped: asked first, after ten seconds forced.
struct Started {
    child: Child,
    group: Pid,
    /// Ends the group when this process cannot.
    guard: Child,
    word: Option<ChildStdin>,
}

impl Started {
    /// Starts a command in a group of its own.
    fn new(mut command: Command) -> std::io::Result<Self> {
        let child = command.process_group(0).spawn()?;
        let group = Pid::from_child(&child);
        running().push(group);
        let guard = Command::new("sh")
            .args(["-c", GUARD, &group.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        match guard {
            Ok(mut guard) => Ok(Self { child, group, word: guard.stdin.take(), guard }),
            Err(e) => {
                kill(group);
                running().retain(|g| *g != group);
                Err(e)
            }
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = kill_process_group(self.group, Signal::TERM);
        let end = Instant::now() + Duration::from_secs(10);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
        }
        // Whatever else it started goes too.
        kill(self.group);
        running().retain(|g| *g != self.group);
        if let Some(mut word) = self.word.take() {
            let _ = word.write_all(b"done\n");
        }
        let _ = self.guard.wait();
    }
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0");
    let port = listener.and_then(|l| l.local_addr()).map(|a| a.port());
    port.map_err(|e| MeasureError::Server(format!("no free port: {e}")))
}

fn watch(group: Pid, budget: Budget, watched: &Watched) {
    // Asked once: where there is no driver, no process is started every second.
    let gpus = !Gpu::all().is_empty();
    while !watched.stop.load(Ordering::Relaxed) {
        let ram = group_rss_mib(group);
        watched.ram.fetch_max(ram, Ordering::Relaxed);
        let cards = if gpus { Gpu::all() } else { Vec::new() };
        let vram = (!cards.is_empty()).then(|| cards.iter().filter_map(|g| g.memory_used_mib).sum());
        watched.vram.fetch_max(vram.unwrap_or(0), Ordering::Relaxed);
        let clock = cards.iter().filter_map(|g| g.sm_mhz).max();
        watched.sm_mhz.fetch_max(clock.unwrap_or(0), Ordering::Relaxed);
        let over = [("RAM", Some(ram), budget.ram_mib), ("GPU memory", vram, budget.vram_mib)];
        for (name, used, limit) in over {
            if let (Some(used), Some(limit)) = (used, limit)
                && used > limit
            {
                let _ = watched.exceeded.set(format!("{used} MiB of {name}, {limit} allowed"));
                let _ = kill_process_group(group, Signal::KILL);
                return;
            }
        }
        for _ in 0..10 {
            if watched.stop.load(Ordering::Relaxed) {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Resident memory of all processes of a group.
fn group_rss_mib(group: Pid) -> u64 {
    let Ok(entries) = std::fs::read_dir("/proc") else { return 0 };
    let mut kib = 0;
    for entry in entries.flatten() {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // After the command in brackets: state, parent, process group.
        let Some(own) =
            stat.rsplit_once(')').and_then(|s| s.1.split_whitespace().nth(2)?.parse::<i32>().ok())
        else {
            continue;
        };
        if own != group.as_raw_nonzero().get() {
            continue;
        }
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        kib += line.and_then(|l| l.trim().split(' ').next()?.parse::<u64>().ok()).unwrap_or(0);
    }
    kib / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arms_are_addresses_or_commands_with_a_port() {
        let url = Arm::parse("other=http://127.0.0.1:8080").unwrap();
        assert_eq!(url.target, Target::Url("http://127.0.0.1:8080".into()));
        assert!(matches!(Arm::parse("a=serve --port {port}").unwrap().target, Target::Command(_)));
        for wrong in ["x", "=http://a", "a=serve", "a/b=http://c"] {
            assert!(Arm::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_command_that_ends_at_once_is_an_error_and_one_that_hangs_is_ended() {
        let go_on = AtomicBool::new(false);
        let start = |command: &str| {
            let arm = Arm { name: "x".into(), target: Target::Command(command.into()) };
            let result =
                Server::start(&arm, None, None, Budget::default(), Duration::from_millis(300), &go_on);
            result.err().map(|e| e.to_string()).unwrap_or_default()
        };
        assert!(start("exit 3 # {port}").contains("ended"));
        assert!(!start("sleep 60 # {port}").is_empty());
    }
}
