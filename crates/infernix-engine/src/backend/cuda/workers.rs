//! Threads of the host that compute a share of the experts that a decode round misses, from the records in host memory, while
//! the device computes what it has and reads the others over the link.
//!
//! The router's kernel writes who is wanted and the quantised inputs to page-locked memory and numbers the post; all threads watch
//! that number, take pieces of the post's rows one by one, and whoever completes the last one numbers the reply, which the kernel of
//! the down products waits for. Sums are exact integers: the bits are the device's. Only one post is in flight at a time. The host's
//! own thread has no part in it, so that a round stays one graph.

use super::vram::fault;
use crate::backend::cpu::experts::UNIT;
use crate::backend::cpu::experts::a4::{self, A4};
use crate::backend::cpu::isa::Isa;
use crate::backend::cpu::num::bf16_of;
use crate::backend::cpu::pool::default_threads;
use crate::backend::weights::Bytes;
use crate::error::EngineError;
use crate::numerics::w4a4::{Scale, finish};
use infernix_cuda::kernels::experts::{Help, act_bytes, mail};
use infernix_cuda::{Device, DeviceBuffer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of weights of a piece of work: some 2 us.
const PIECE: usize = 24 << 10;
/// A thread that sees no post for this long between rounds sleeps.
const PATIENCE: Duration = Duration::from_millis(2);
/// As long as the device waits.
const BOUND: Duration = Duration::from_secs(2);
/// Threads, at most: more gain little and take the link's share of host memory (spec/cuda.md 3: 93 against 75 GB/s for 12 against 8).
const MOST: usize = 12;
/// Seconds between a post and its first work and from a reply to its use, and before a record comes over the link: what round trips
/// of 5 KB and single copies take (spec/cuda.md 3).
const HAND_OFF: f64 = 8e-6;
const LINK_START: f64 = 5e-6;

/// The experts of a layer in host memory: records in row groups of 16, FP32 `[E][3]` combined and input scales.
pub(super) struct Matrices {
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) experts: usize,
    pub(super) stride: usize,
    pub(super) record: usize,
    pub(super) alpha: Vec<f32>,
    pub(super) input: Vec<f32>,
    pub(super) divisor: bool,
}

impl Matrices {
    fn scale(&self, of: &[f32], expert: usize, matrix: usize) -> Scale {
        let v = of[3 * expert + matrix];
        if self.divisor { Scale::Divisor(v) } else { Scale::Multiplier(v) }
    }
}

/// Entries of a post that are of one expert.
#[derive(Clone, Copy, Default)]
struct Job {
    expert: usize,
    first: usize,
    n: usize,
}

/// A counter that threads write, in cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Counter(AtomicU64);

struct Shared {
    mail: Arc<dyn AsRef<[AtomicU32]> + Send + Sync>,
    banks: Vec<(Bytes, Arc<Matrices>)>,
    hidden: usize,
    intermediate: usize,
    isa: Isa,
    /// Post, pieces in all and the next piece, in one word: whoever changes it knows all three.
    claim: Counter,
    /// Post and pieces done, of gate and up of each expert, and of down of all.
    up_done: [Counter; mail::EXPERTS],
    down_done: Counter,
    /// Hidden values, BF16 pairs `[entries][intermediate / 2]`.
    mid: Vec<AtomicU32>,
    records: AtomicU64,
    /// A round is in work.
    awake: AtomicBool,
    stop: AtomicBool,
    /// Posts are left alone (tests).
    halted: AtomicBool,
    failed: Mutex<Option<String>>,
    lock: Mutex<()>,
    wake: Condvar,
}

/// The threads, and what kernels need to ask them.
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    help: Help,
    _state: Option<DeviceBuffer>,
    /// A post failed: no thread may still work on it when another comes, so that none does.
    broken: bool,
    pub(super) rates: WorkerRates,
}

/// How the host's experts compare with the link, measured when the model was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerRates {
    /// Threads.
    pub threads: usize,
    /// Seconds that a post takes beside its experts, and that each expert takes.
    pub post_seconds: f64,
    /// Seconds of an expert.
    pub expert_seconds: f64,
    /// Seconds of a record over the link.
    pub link_seconds: f64,
    /// Experts that the host computes of 0, 1, 2, ... 15 that a layer misses.
    pub split: [u8; 16],
}

impl WorkerRates {
    /// The split under which the slower side is done first.
    fn split(&self) -> [u8; 16] {
        let host = |n: usize| match n {
            0 => 0.0,
            n => self.post_seconds + n as f64 * self.expert_seconds + HAND_OFF,
        };
        let link = |n: usize| if n == 0 { 0.0 } else { LINK_START + n as f64 * self.link_seconds };
        std::array::from_fn(|misses| {
            let time = |own: usize| host(own).max(link(misses - own));
            let own = (0..=misses.min(mail::EXPERTS)).min_by(|a, b| time(*a).total_cmp(&time(*b)));
            own.unwrap_or(0) as u8
        })
    }
}

/// Threads where none are asked for: all cores but those that the process needs besides.
pub(super) fn automatic_threads() -> usize {
    match default_threads() {
        n @ 8.. => (n - 4).min(MOST),
        n @ 5..8 => n - 3,
        _ => 0,
    }
}

impl Workers {
    /// Starts `threads` threads over the banks and measures them; none for layers of different shapes. `link`: seconds of a record over
    /// the link.
    pub(super) fn new(
        device: &Arc<Device>,
        banks: Vec<(Bytes, Arc<Matrices>)>,
        threads: usize,
        link: f64,
    ) -> Result<Option<Self>, EngineError> {
        let Some((hidden, intermediate)) = banks.first().map(|b| (b.1.hidden, b.1.intermediate)) else {
            return Ok(None);
        };
        if banks.iter().any(|b| (b.1.hidden, b.1.intermediate) != (hidden, intermediate)) {
            return Ok(None);
        }
        let memory = Arc::new(device.pinned(4 * mail::words(hidden)).map_err(fault)?);
        (*memory).as_ref().iter().for_each(|w: &AtomicU32| w.store(0, Ordering::Relaxed));
        let address = memory.device_ptr();
        let mut w = Workers::over(memory, banks, threads)?;
        w.measure(link)?;
        let state = device.alloc(4 * Help::STATE).map_err(fault)?;
        let mut words = vec![0u32; Help::STATE];
        words[0] = w.word(mail::POST).load(Ordering::Relaxed);
        state.write(0, &words).map_err(fault)?;
        w.help = Help { mail: address, state: state.ptr(), ..Help::default() };
        w.set_split(w.rates.split);
        w._state = Some(state);
        Ok(Some(w))
    }

    fn over(
        memory: Arc<dyn AsRef<[AtomicU32]> + Send + Sync>,
        banks: Vec<(Bytes, Arc<Matrices>)>,
        threads: usize,
    ) -> Result<Self, EngineError> {
        let (hidden, intermediate) = banks.first().map_or((0, 0), |b| (b.1.hidden, b.1.intermediate));
        let shared = Arc::new(Shared {
            mail: memory,
            banks,
            hidden,
            intermediate,
            isa: Isa::detect(),
            claim: Counter::default(),
            up_done: Default::default(),
            down_done: Counter::default(),
            mid: (0..mail::MOST * intermediate / 2).map(|_| AtomicU32::new(0)).collect(),
            records: AtomicU64::new(0),
            awake: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            halted: AtomicBool::new(false),
            failed: Mutex::new(None),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut running = Vec::with_capacity(threads);
        for i in 0..threads {
            let own = shared.clone();
            let name = format!("expert-{i}");
            let thread = std::thread::Builder::new().name(name).spawn(move || own.watch());
            running.push(
                thread.map_err(|e| EngineError::Source { name: "a thread".into(), source: Box::new(e) })?,
            );
        }
        let rates = WorkerRates { threads, ..WorkerRates::default() };
        Ok(Workers { shared, threads: running, help: Help::default(), _state: None, broken: false, rates })
    }

    fn word(&self, i: usize) -> &AtomicU32 {
        &self.shared.words()[i]
    }

    /// What a layer's kernels need to ask; none after a failure.
    pub(super) fn help(&self, bank: usize, away: u64) -> Option<Help> {
        (!self.broken).then_some(Help { away, bank, ..self.help })
    }

    /// Of 0, 1, 2, ... experts that a layer misses so many are asked for from now on.
    pub(super) fn set_split(&mut self, split: [u8; 16]) {
        self.rates.split = split;
        self.help.split = split.iter().rev().fold(0, |s, n| s << 4 | u64::from(*n & 15));
    }

    /// The threads leave posts alone from now on (tests).
    pub(super) fn halt(&self) {
        self.shared.halted.store(true, Ordering::SeqCst);
    }

    /// A round begins: the threads watch for posts.
    pub(super) fn awake(&self) {
        self.shared.awake.store(true, Ordering::SeqCst);
        drop(self.shared.lock.lock().unwrap_or_else(|e| e.into_inner()));
        self.shared.wake.notify_all();
    }

    /// No post comes until the next round.
    pub(super) fn rest(&self) {
        self.shared.awake.store(false, Ordering::SeqCst);
    }

    /// Experts computed since the last call, or why a post of this round was not answered. After that no layer asks again.
    pub(super) fn check(&mut self) -> Result<u64, EngineError> {
        let checked = self.answered();
        self.broken |= checked.is_err();
        checked
    }

    fn answered(&self) -> Result<u64, EngineError> {
        let failed = self.shared.failed.lock().unwrap_or_else(|e| e.into_inner()).take();
        let late = self.word(mail::LATE).swap(0, Ordering::Relaxed);
        if let Some(what) = failed {
            return Err(EngineError::Round(format!(
                "experts on the CPU failed, the link alone serves misses now: {what}"
            )));
        }
        if late != 0 {
            let what = format!(
                "experts on the CPU took more than {} s, the link alone serves misses now",
                BOUND.as_secs()
            );
            return Err(EngineError::Round(what));
        }
        Ok(self.shared.records.swap(0, Ordering::Relaxed))
    }

    /// Posts some experts with the inputs that are there, as the device does, and waits.
    fn post(&self, bank: usize, entries: &[(usize, usize)]) -> Result<(), EngineError> {
        let put = |i: usize, v: usize| self.word(i).store(v as u32, Ordering::Relaxed);
        put(mail::BANK, bank);
        put(mail::ENTRIES, entries.len());
        for (i, (expert, pick)) in entries.iter().enumerate() {
            put(mail::LIST + 2 * i, *expert);
            put(mail::LIST + 2 * i + 1, *pick);
        }
        let post = self.word(mail::POST).load(Ordering::Relaxed).wrapping_add(1);
        self.word(mail::POST).store(post, Ordering::Release);
        let clock = Instant::now();
        while self.word(mail::REPLY).load(Ordering::Acquire) != post {
            if clock.elapsed() > BOUND {
                self.word(mail::LATE).store(post, Ordering::Relaxed);
                break;
            }
            std::hint::spin_loop();
        }
        self.answered().map(drop)
    }

    /// Times posts of one and of four experts, each of another place of memory.
    fn measure(&mut self, link: f64) -> Result<(), EngineError> {
        const POSTS: usize = 25;
        let banks = &self.shared.banks;
        let mut seed = 1u64;
        let mut next = |n: usize| {
            seed = crate::numerics::round::mix(seed);
            (seed % n as u64) as usize
        };
        let mut typical = |experts: usize| -> Result<f64, EngineError> {
            let mut times = Vec::with_capacity(POSTS);
            for _ in 0..POSTS {
                let bank = next(banks.len());
                let n = banks[bank].1.experts;
                let first = next(n);
                let mut list: Vec<usize> = (0..experts).map(|i| (first + i * n / experts) % n).collect();
                list.dedup();
                let entries: Vec<_> = list.into_iter().enumerate().map(|(i, e)| (e, i)).collect();
                let clock = Instant::now();
                self.post(bank, &entries)?;
                times.push(clock.elapsed().as_secs_f64());
            }
            times.sort_by(f64::total_cmp);
            // Whoever takes a core for a moment makes some of them slow: with twice the true time of a post the link got too much.
            Ok(times[POSTS / 4])
        };
        self.awake();
        let (_, one, four) = (typical(4)?, typical(1)?, typical(4)?);
        self.rest();
        let expert_seconds = ((four - one) / 3.0).max(1e-9);
        let post_seconds = (one - expert_seconds).max(0.0);
        let rates = WorkerRates { post_seconds, expert_seconds, link_seconds: link, ..self.rates };
        self.rates = WorkerRates { split: rates.split(), ..rates };
        Ok(())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.awake();
        for t in self.threads.drain(..) {
            let _ = t.join();
        }
    }
}

/// Whether post `a` is of before post `b`.
fn before(a: u32, b: u32) -> bool {
    (b.wrapping_sub(a) as i32) > 0
}

/// Counts one more of `post`; gives how many that makes.
fn count(Counter(word): &Counter, post: u32) -> u32 {
    let mut v = word.load(Ordering::Relaxed);
    loop {
        let n = if (v >> 32) as u32 == post { v as u32 + 1 } else { 1 };
        let to = u64::from(post) << 32 | u64::from(n);
        match word.compare_exchange_weak(v, to, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return n,
            Err(now) => v = now,
        }
    }
}

/// Quantised columns of one job, as long as the thread stays with it.
#[derive(Default)]
struct Columns {
    of: Option<usize>,
    x: Vec<A4>,
}

impl Columns {
    fn get(&mut self, job: usize, make: impl FnOnce() -> Vec<A4>) -> Vec<&A4> {
        if self.of != Some(job) {
            (self.of, self.x) = (Some(job), make());
        }
        self.x.iter().collect()
    }
}

impl Shared {
    fn words(&self) -> &[AtomicU32] {
        (*self.mail).as_ref()
    }

    fn fail(&self, what: String) {
        self.failed.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(what);
    }

    /// The device may go on behind a post.
    fn reply(&self, post: u32) {
        let newer = |now: u32| before(now, post).then_some(post);
        let _ = self.words()[mail::REPLY].fetch_update(Ordering::AcqRel, Ordering::Acquire, newer);
    }

    /// What a thread does.
    fn watch(&self) {
        let mut seen = 0;
        let (mut turns, mut idle) = (0u32, Instant::now());
        while !self.stop.load(Ordering::Relaxed) {
            let post = self.words()[mail::POST].load(Ordering::Acquire);
            if post != seen && !self.halted.load(Ordering::Relaxed) {
                seen = post;
                let done = catch_unwind(AssertUnwindSafe(|| self.work(post)));
                if let Err(what) = done.unwrap_or_else(|_| Err("a thread panicked".into())) {
                    // The device goes on at once; the round fails.
                    self.fail(what);
                    self.reply(post);
                }
                idle = Instant::now();
                continue;
            }
            turns = turns.wrapping_add(1);
            if !turns.is_multiple_of(64) {
                std::hint::spin_loop();
            } else if self.awake.load(Ordering::Relaxed) {
                // Whoever else wants this processor has it now.
                std::thread::yield_now();
                idle = Instant::now();
            } else if idle.elapsed() > PATIENCE {
                let mut guard = self.lock.lock().unwrap_or_else(|e| e.into_inner());
                while !self.awake.load(Ordering::SeqCst) && !self.stop.load(Ordering::SeqCst) {
                    guard = self.wake.wait(guard).unwrap_or_else(|e| e.into_inner());
                }
                idle = Instant::now();
            }
        }
    }

    /// The next piece of a post that has `total`; none if others have taken all, or the post is over.
    fn take(&self, post: u32, total: u32) -> Option<usize> {
        let claim = &self.claim.0;
        let mut v = claim.load(Ordering::Relaxed);
        loop {
            let (of, all, next) = ((v >> 32) as u32, (v >> 16) as u32 & 0xffff, v as u32 & 0xffff);
            let (to, piece) = if of == post {
                if next >= all {
                    return None;
                }
                (v + 1, next)
            } else if before(of, post) {
                (u64::from(post) << 32 | u64::from(total) << 16 | 1, 0)
            } else {
                return None;
            };
            match claim.compare_exchange_weak(v, to, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(piece as usize),
                Err(now) => v = now,
            }
        }
    }

    /// Takes part in a post until all its pieces are taken.
    fn work(&self, post: u32) -> Result<(), String> {
        let words = self.words();
        let load = |i: usize| words[i].load(Ordering::Relaxed) as usize;
        let (bank, entries) = (load(mail::BANK), load(mail::ENTRIES));
        let mut list = [(0, 0); mail::MOST];
        for (i, e) in list.iter_mut().enumerate().take(entries) {
            *e = (load(mail::LIST + 2 * i), load(mail::LIST + 2 * i + 1));
        }
        // The device writes the next post only after this one's reply: what was read is whole if that was not yet there.
        if !before(words[mail::REPLY].load(Ordering::Acquire), post) {
            return Ok(());
        }
        let mut jobs = [Job::default(); mail::EXPERTS];
        let mut n = 0;
        for (i, (expert, _)) in list.iter().enumerate().take(entries) {
            match &mut jobs[..n] {
                [.., last] if last.expert == *expert => last.n += 1,
                _ if n < mail::EXPERTS => {
                    jobs[n] = Job { expert: *expert, first: i, n: 1 };
                    n += 1;
                }
                _ => return Err(format!("a post of {entries} entries has too many experts")),
            }
        }
        let jobs = &jobs[..n];
        let bad = || format!("a post of {entries} entries in bank {bank}");
        let Some((bytes, m)) = self.banks.get(bank).filter(|_| (1..=mail::MOST).contains(&entries)) else {
            return Err(bad());
        };
        if jobs.iter().any(|j| j.expert >= m.experts || j.n > Help::ROWS) {
            return Err(bad());
        }
        let bytes = (**bytes).as_ref();
        let (h, i) = (self.hidden, self.intermediate);
        let (up_group, down_group) = (h / 16 * UNIT, i / 16 * UNIT);
        let (up_groups, down_groups) = (2 * i / 16, h / 16);
        let (up_step, down_step) = ((PIECE / up_group).max(1), (PIECE / down_group).max(1));
        let (ups, downs) = (up_groups.div_ceil(up_step), down_groups.div_ceil(down_step));
        let total = jobs.len() * (ups + downs);
        if total > 0xffff {
            return Err(bad());
        }
        let (act, answers) = (act_bytes(h) / 4, mail::answers(h));
        let (mut inputs, mut hidden) = (Columns::default(), Columns::default());
        while let Some(piece) = self.take(post, total as u32) {
            let up = piece < jobs.len() * ups;
            let place = if up { piece } else { piece - jobs.len() * ups };
            let per = if up { ups } else { downs };
            let (number, at) = (place / per, place % per);
            let job = jobs[number];
            let record = &bytes[job.expert * m.stride..][..m.record];
            let factor = |matrix| m.scale(&m.alpha, job.expert, matrix);
            if up {
                let x = inputs.get(number, || {
                    let column = |e: usize| A4::from_words(&words[mail::ACT + e * act..][..act], h);
                    (job.first..job.first + job.n).map(column).collect()
                });
                let mut sums = [[0i64; 16]; Help::ROWS];
                for g in at * up_step..((at + 1) * up_step).min(up_groups) {
                    let sums = &mut sums[..x.len()];
                    a4::sums(self.isa, &record[g * up_group..][..up_group], &x, sums);
                    for (c, s) in sums.iter().enumerate() {
                        // Even lanes are gate rows, odd lanes up rows.
                        let half = |odd: usize| -> [u16; 8] {
                            std::array::from_fn(|r| bf16_of(finish(s[2 * r + odd], factor(odd))))
                        };
                        let mut out = [0u16; 8];
                        a4::swiglu(self.isa, &half(0), &half(1), &mut out);
                        store(&self.mid[((job.first + c) * i + 8 * g) / 2..], &out);
                    }
                }
                count(&self.up_done[number], post);
                continue;
            }
            self.wait_for(&self.up_done[number], post, ups as u32)?;
            let x = hidden.get(number, || {
                let column = |e: usize| {
                    let words = &self.mid[e * i / 2..(e + 1) * i / 2];
                    let halves = |w: &AtomicU32| {
                        let v = w.load(Ordering::Relaxed);
                        [v as u16, (v >> 16) as u16]
                    };
                    let values: Vec<u16> = words.iter().flat_map(halves).collect();
                    A4::new(self.isa, &values, m.scale(&m.input, job.expert, 2))
                };
                (job.first..job.first + job.n).map(column).collect()
            });
            let mut sums = [[0i64; 16]; Help::ROWS];
            for g in at * down_step..((at + 1) * down_step).min(down_groups) {
                let sums = &mut sums[..x.len()];
                let units = &record[up_groups * up_group + g * down_group..][..down_group];
                a4::sums(self.isa, units, &x, sums);
                for (c, s) in sums.iter().enumerate() {
                    let out = s.map(|s| bf16_of(finish(s, factor(2))));
                    store(&words[answers + ((job.first + c) * h + 16 * g) / 2..], &out);
                }
            }
            if count(&self.down_done, post) as usize == jobs.len() * downs {
                self.records.fetch_add(jobs.len() as u64, Ordering::Relaxed);
                self.reply(post);
            }
        }
        Ok(())
    }

    /// Waits until all pieces that `word` counts are done.
    fn wait_for(&self, Counter(word): &Counter, post: u32, pieces: u32) -> Result<(), String> {
        let all = u64::from(post) << 32 | u64::from(pieces);
        let mut clock = None;
        for turn in 1u64.. {
            if word.load(Ordering::Acquire) == all {
                break;
            }
            if turn.is_multiple_of(1024) {
                if clock.get_or_insert_with(Instant::now).elapsed() > BOUND {
                    return Err("a thread did not complete its rows".into());
                }
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

/// BF16 values as words.
fn store(to: &[AtomicU32], values: &[u16]) {
    for (w, v) in to.iter().zip(values.as_chunks::<2>().0) {
        w.store(u32::from(v[0]) | u32::from(v[1]) << 16, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::round::mix;
    use crate::numerics::w4a4::{self, A4Row};

    fn memory(h: usize) -> Arc<Vec<AtomicU32>> {
        Arc::new((0..mail::words(h)).map(|_| AtomicU32::new(0)).collect())
    }

    fn bank(seed: u64, experts: usize, h: usize, i: usize, divisor: bool) -> (Bytes, Arc<Matrices>) {
        let record = 3 * h / 16 * (i / 16) * UNIT;
        let stride = record.next_multiple_of(256);
        let mut bytes: Vec<u8> = (0..experts * stride).map(|k| mix(seed << 32 | k as u64) as u8).collect();
        for r in bytes.chunks_mut(stride) {
            for unit in r[..record].chunks_exact_mut(UNIT) {
                unit[128..].iter_mut().for_each(|s| *s = 40 + *s % 24);
            }
        }
        let one = |k: u64| 0.01 * (1.0 + (mix(seed + k) % 100) as f32 / 100.0);
        let of = |from: u64| -> Vec<f32> {
            let v = (0..3 * experts as u64).map(|k| one(from + k));
            v.map(|v| if divisor { 1.0 / v } else { v }).collect()
        };
        let (alpha, input) = (of(7), of(9_000));
        let m = Matrices { hidden: h, intermediate: i, experts, stride, record, alpha, input, divisor };
        (Arc::new(bytes), Arc::new(m))
    }

    /// The published arithmetic, a row at a time.
    fn oracle(bytes: &[u8], m: &Matrices, expert: usize, x: &[u16]) -> Vec<u16> {
        let wide =
            |x: &[u16]| -> Vec<f32> { x.iter().map(|v| f32::from_bits(u32::from(*v) << 16)).collect() };
        let rows = |units: &[u8], k: usize, x: &A4Row| -> Vec<i64> {
            units.chunks_exact(k / 16 * UNIT).flat_map(|group| a4::oracle(group, x)).collect()
        };
        let (h, i) = (m.hidden, m.intermediate);
        let record = &bytes[expert * m.stride..][..m.record];
        let (up, down) = record.split_at(m.record / 3 * 2);
        let sums = rows(up, h, &w4a4::quantise(&wide(x), m.scale(&m.input, expert, 0)));
        let value = |s: i64, matrix: usize| bf16_of(finish(s, m.scale(&m.alpha, expert, matrix)));
        let mid: Vec<u16> = (0..i)
            .map(|r| {
                let (g, u) = (value(sums[2 * r], 0), value(sums[2 * r + 1], 1));
                let [g, u] = [g, u].map(|v| f32::from_bits(u32::from(v) << 16));
                bf16_of(w4a4::swiglu(g, u))
            })
            .collect();
        let sums = rows(down, i, &w4a4::quantise(&wide(&mid), m.scale(&m.input, expert, 2)));
        sums.into_iter().map(|s| value(s, 2)).collect()
    }

    #[test]
    fn posts_of_any_experts_are_answered_with_the_published_bits_by_any_number_of_threads() {
        for (threads, divisor, h, i) in [(1, false, 64, 32), (3, true, 80, 48), (4, false, 512, 128)] {
            let mail = memory(h);
            let banks: Vec<_> = (0..2).map(|b| bank(11 + b, 9, h, i, divisor)).collect();
            let w = Workers::over(mail.clone(), banks.clone(), threads).unwrap();
            w.awake();
            for round in 0..40u64 {
                if round == 20 {
                    // Asleep in between.
                    w.rest();
                    std::thread::sleep(4 * PATIENCE);
                    w.awake();
                }
                let number = (round % 2) as usize;
                let (bytes, m) = &banks[number];
                // Up to four picks of an expert, up to three experts.
                let mut entries = Vec::new();
                for j in 0..1 + round as usize % 3 {
                    let e = (round as usize + 3 * j) % 9;
                    (0..1 + (mix(round + j as u64) % 4) as usize)
                        .for_each(|_| entries.push((e, entries.len())));
                }
                let act = act_bytes(h) / 4;
                let columns: Vec<Vec<u16>> = (0..entries.len() as u64)
                    .map(|c| {
                        let v = |k: u64| (mix(round << 40 ^ c << 20 ^ k) % 2001) as f32 / 1000.0 - 1.0;
                        (0..h as u64).map(|k| bf16_of(v(k))).collect()
                    })
                    .collect();
                for (k, (x, (e, _))) in columns.iter().zip(&entries).enumerate() {
                    let x = A4::new(Isa::Scalar, x, m.scale(&m.input, *e, 0)).words();
                    for (to, v) in mail[mail::ACT + k * act..].iter().zip(x) {
                        to.store(v, Ordering::Relaxed);
                    }
                }
                w.post(number, &entries).unwrap();
                for (k, (x, (e, _))) in columns.iter().zip(&entries).enumerate() {
                    let words = &mail[mail::answers(h) + k * h / 2..][..h / 2];
                    let got = words.iter().flat_map(|w| {
                        let v = w.load(Ordering::Relaxed);
                        [v as u16, (v >> 16) as u16]
                    });
                    let want = oracle((**bytes).as_ref(), m, *e, x);
                    assert!(got.eq(want), "{threads} threads, round {round}, entry {k}");
                }
            }
            w.rest();
        }
    }

    #[test]
    fn a_post_that_cannot_be_is_answered_at_once_and_fails_its_round_only() {
        let mail = memory(64);
        let w = Workers::over(mail, vec![bank(3, 4, 64, 32, false)], 2).unwrap();
        w.awake();
        let clock = Instant::now();
        for (bank, expert) in [(1, 0), (0, 4)] {
            let e = w.post(bank, &[(expert, 0)]).unwrap_err().to_string();
            assert!(e.contains("in bank"), "{e}");
        }
        assert!(clock.elapsed() < BOUND);
        std::thread::sleep(Duration::from_millis(20));
        let _ = w.answered();
        w.post(0, &[(3, 0)]).unwrap();
    }

    #[test]
    fn the_slower_side_decides_how_misses_are_split() {
        let rates = WorkerRates {
            threads: 12,
            post_seconds: 9e-6,
            expert_seconds: 41e-6,
            link_seconds: 53e-6,
            split: [0; 16],
        };
        let split = rates.split();
        assert_eq!(split[..5], [0, 0, 1, 2, 2]);
        assert!(split.windows(2).all(|w| w[1] - w[0] <= 1));
        // A host that is slow leaves all to the link; a slow link leaves what may be asked to the host.
        assert_eq!(WorkerRates { expert_seconds: 1.0, ..rates }.split(), [0; 16]);
        assert_eq!(usize::from(WorkerRates { link_seconds: 1.0, ..rates }.split()[8]), mail::EXPERTS);
    }
}
