//! A persistent pool of threads for operations of a few microseconds.
//!
//! Decode runs hundreds of small operations a token, so workers stay awake for a short while after a job and join the
//! next one without a system call; then they sleep. The caller works too and waits only for workers that have joined:
//! where the machine is busy and a worker does not get a processor, the caller does its share.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// `state`: bit 0 = job open, bits 1..32 = workers inside, bits 32.. = number of the job.
const OPEN: u64 = 1;
const WORKER: u64 = 2;
const EPOCH: u64 = 1 << 32;

/// Turns of the waiting loop before a worker sleeps; a turn is some tens of pauses and a yield, together a few
/// microseconds.
const PATIENCE: u32 = 60;

struct Shared {
    state: AtomicU64,
    next: AtomicUsize,
    job: UnsafeCell<(*const Task<'static>, usize)>,
    panicked: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
}

// SAFETY: `job` is written only by the caller that holds the pool's run lock while no worker is inside and the job is
// closed, and read only by workers inside an open job; `state` orders the two.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is dereferenced only while the caller's borrow is alive (see `Pool::run`).
unsafe impl Send for Shared {}

/// Threads for parallel loops.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    run: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({})", self.threads())
    }
}

impl Pool {
    /// A pool of `threads`, the caller included.
    pub fn new(threads: usize) -> Self {
        fn nothing(_: usize) {}
        let none: &'static Task<'static> = &nothing;
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new((none, 0)),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let workers = (1..threads.max(1))
            .filter_map(|i| {
                let shared = shared.clone();
                // A thread the system refuses is one less: the caller does its share.
                std::thread::Builder::new().name(format!("cpu-{i}")).spawn(move || worker(&shared)).ok()
            })
            .collect();
        Pool { shared, workers, run: Mutex::new(()) }
    }

    /// Threads that may work at once, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(0) .. f(n - 1)`, in any order and on any thread. A call from inside a task, or while another thread
    /// runs a job, does all of it on the calling thread.
    pub fn run(&self, n: usize, f: impl Fn(usize) + Sync) {
        let guard = if self.workers.is_empty() || n < 2 { None } else { self.run.try_lock().ok() };
        let Some(_guard) = guard else {
            (0..n).for_each(f);
            return;
        };
        let task: &Task<'_> = &f;
        let s = &*self.shared;
        // SAFETY: no worker is inside (the previous run waited for all, and a closed job admits none), and the run lock
        // excludes other callers. The lifetime is erased: this function returns only after the job is closed and empty.
        unsafe { *s.job.get() = (std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task), n) };
        s.next.store(0, Ordering::Relaxed);
        let epoch = s.state.load(Ordering::Relaxed) / EPOCH + 1;
        s.state.store(epoch.wrapping_mul(EPOCH) | OPEN, Ordering::SeqCst);
        if s.sleepers.load(Ordering::SeqCst) > 0 {
            drop(s.lock.lock().unwrap_or_else(|e| e.into_inner()));
            s.wake.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| drain(s, task, n)));
        s.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut turns = 0u32;
        while s.state.load(Ordering::Acquire) % EPOCH >= WORKER {
            turns += 1;
            if turns.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let theirs = s.panicked.swap(false, Ordering::Relaxed);
        if let Err(cause) = mine {
            resume_unwind(cause);
        }
        assert!(!theirs, "a worker thread panicked");
    }

    /// [`Pool::run`] over `len` items in runs of `chunk`: `f(first..end)`.
    pub fn chunks(&self, len: usize, chunk: usize, f: impl Fn(std::ops::Range<usize>) + Sync) {
        let chunk = chunk.max(1);
        self.run(len.div_ceil(chunk), |i| f(i * chunk..((i + 1) * chunk).min(len)));
    }

    /// Runs of items so that every thread gets a few of them, each worth at least `least` items.
    pub fn share(&self, len: usize, least: usize) -> usize {
        if self.workers.is_empty() { len.max(1) } else { len.div_ceil(4 * self.threads()).max(least).max(1) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock.lock().unwrap_or_else(|e| e.into_inner()));
        self.shared.wake.notify_all();
        for w in self.workers.drain(..) {
            let _ = w.join();
        }
    }
}

fn drain(s: &Shared, task: &Task<'_>, n: usize) {
    loop {
        let i = s.next.fetch_add(1, Ordering::Relaxed);
        if i >= n {
            break;
        }
        task(i);
    }
}

fn worker(s: &Shared) {
    let mut seen = 0;
    while !s.stop.load(Ordering::Relaxed) {
        let state = s.state.load(Ordering::Acquire);
        if state & OPEN != 0 && state / EPOCH != seen {
            if s.state.compare_exchange(state, state + WORKER, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            seen = state / EPOCH;
            // SAFETY: this worker is counted inside the open job, so the caller waits for it before `f` dies.
            let (task, n) = unsafe { *s.job.get() };
            // SAFETY: as above.
            let task = unsafe { &*task };
            if catch_unwind(AssertUnwindSafe(|| drain(s, task, n))).is_err() {
                s.panicked.store(true, Ordering::Relaxed);
            }
            s.state.fetch_sub(WORKER, Ordering::AcqRel);
            continue;
        }
        wait(s, seen);
    }
}

/// Returns when there may be a job other than `seen`.
fn wait(s: &Shared, seen: u64) {
    let fresh = || {
        let state = s.state.load(Ordering::SeqCst);
        (state & OPEN != 0 && state / EPOCH != seen) || s.stop.load(Ordering::Relaxed)
    };
    for _ in 0..PATIENCE {
        for _ in 0..32 {
            if fresh() {
                return;
            }
            std::hint::spin_loop();
        }
        // Whoever else wants this processor has it now.
        std::thread::yield_now();
    }
    let mut guard = s.lock.lock().unwrap_or_else(|e| e.into_inner());
    s.sleepers.fetch_add(1, Ordering::SeqCst);
    while !fresh() {
        guard = s.wake.wait(guard).unwrap_or_else(|e| e.into_inner());
    }
    s.sleepers.fetch_sub(1, Ordering::SeqCst);
}

/// Threads to use by default: physical cores allowed by affinity and cgroup quota (decisions.md C).
pub fn default_threads() -> usize {
    // The standard library's figure honours both, but counts hardware threads.
    let allowed = std::thread::available_parallelism().map_or(1, |n| n.get());
    physical_cores().map_or(allowed, |cores| cores.min(allowed)).max(1)
}

/// Distinct cores among the processors this process may run on.
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = std::collections::BTreeSet::new();
    for part in list.trim().split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        for cpu in a.parse::<u32>().ok()?..=b.parse::<u32>().ok()? {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            cores.insert(std::fs::read_to_string(path).ok()?);
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_runs_exactly_once() {
        let pool = Pool::new(4);
        for n in [0, 1, 2, 3, 7, 64, 1000] {
            for _ in 0..200 {
                let seen: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n, |i| {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(seen.iter().all(|s| s.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn nested_and_concurrent_runs_do_not_wait_for_each_other() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..50 {
                        pool.run(8, |_| {
                            pool.run(8, |j| {
                                sum.fetch_add(j, Ordering::Relaxed);
                            })
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 3 * 50 * 8 * 28);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        let r = catch_unwind(AssertUnwindSafe(|| pool.run(16, |i| assert!(i != 7, "seven"))));
        assert!(r.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(16, |i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 120);
    }

    #[test]
    fn workers_wake_from_sleep() {
        let pool = Pool::new(2);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(30));
            // A busy machine may give the worker no processor during a job: it has to come in time for one of many.
            let ids = Mutex::new(std::collections::HashSet::new());
            let both = (0..2000).any(|_| {
                pool.run(8, |_| {
                    ids.lock().unwrap().insert(std::thread::current().id());
                    std::thread::sleep(std::time::Duration::from_millis(2));
                });
                ids.lock().unwrap().len() == 2
            });
            assert!(both, "the worker slept through 2000 jobs");
        }
    }
}
