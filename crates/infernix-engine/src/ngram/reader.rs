//! Requests for rows: dedupe, host cache, a pool of reading threads.

use super::{NgramTicket, RowSource};
use crate::error::EngineError;
use infernix_model::PleConfig;
use infernix_model::ngram::{Constants, constants};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// How rows are read.
#[derive(Clone, Copy, Debug)]
pub struct NgramOptions {
    /// Reads in flight; 0 reads in the caller's thread (rows in memory).
    pub threads: usize,
    /// Bytes of decoded rows kept.
    pub cache_bytes: usize,
}

impl Default for NgramOptions {
    fn default() -> Self {
        NgramOptions { threads: 8, cache_bytes: 64 << 20 }
    }
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NgramStats {
    /// Rows asked for.
    pub requested: u64,
    /// Rows left after removing repeats within a request.
    pub distinct: u64,
    /// Of those, found in the cache.
    pub hits: u64,
}

/// The table of every PLE layer, and its readers.
pub struct Ngram {
    tables: Vec<(Constants, u64)>,
    inner: Arc<Inner>,
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    width: usize,
    eos: u32,
}

struct Inner {
    source: Box<dyn RowSource>,
    cache: Mutex<Cache>,
    /// Whether the cache holds anything.
    cached: bool,
    requested: AtomicU64,
    distinct: AtomicU64,
    hits: AtomicU64,
}

/// Clock-swept rows.
#[derive(Default)]
struct Cache {
    slots: Vec<(u64, bool, Vec<f32>)>,
    index: HashMap<u64, usize>,
    hand: usize,
    capacity: usize,
}

impl Cache {
    fn get(&mut self, row: u64) -> Option<&[f32]> {
        let slot = &mut self.slots[*self.index.get(&row)?];
        slot.1 = true;
        Some(&slot.2)
    }

    fn put(&mut self, row: u64, values: &[f32]) {
        if self.capacity == 0 || self.index.contains_key(&row) {
            return;
        }
        if self.slots.len() < self.capacity {
            self.index.insert(row, self.slots.len());
            self.slots.push((row, false, values.to_vec()));
            return;
        }
        while std::mem::take(&mut self.slots[self.hand].1) {
            self.hand = (self.hand + 1) % self.slots.len();
        }
        let slot = &mut self.slots[self.hand];
        self.index.remove(&slot.0);
        self.index.insert(row, self.hand);
        slot.0 = row;
        slot.2.copy_from_slice(values);
        self.hand = (self.hand + 1) % self.slots.len();
    }
}

/// A range of a request's rows.
struct Job {
    /// Number of the range.
    part: usize,
    range: std::ops::Range<usize>,
    request: Arc<Request>,
}

/// Parts read so far, and where they go.
struct Request {
    /// Row of each (column, head).
    wanted: Vec<u64>,
    parts: Mutex<Vec<Vec<f32>>>,
    open: AtomicUsize,
    ticket: NgramTicket,
}

impl Inner {
    fn run(&self, job: &Job) {
        match self.read(&job.request.wanted[job.range.clone()]) {
            Ok(values) => {
                job.request.parts.lock().unwrap_or_else(|e| e.into_inner())[job.part] = values;
            }
            Err(e) => job.request.ticket.fulfil(Err(e)),
        }
        if job.request.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            let parts = std::mem::take(&mut *job.request.parts.lock().unwrap_or_else(|e| e.into_inner()));
            job.request.ticket.fulfil_pieces(Ok(parts));
        }
    }

    /// Values of the wanted rows, in order; a row that is wanted several times is read once.
    fn read(&self, wanted: &[u64]) -> Result<Vec<f32>, String> {
        let width = self.source.width();
        let mut out = vec![0f32; wanted.len() * width];
        // Neighbours together: rows of one block are read one after another.
        let mut order: Vec<(u64, usize)> = wanted.iter().copied().zip(0..).collect();
        order.sort_unstable();
        let mut places = |row: u64, values: &[f32]| {
            let first = order.partition_point(|(r, _)| *r < row);
            for (_, at) in order[first..].iter().take_while(|(r, _)| *r == row) {
                out[at * width..(at + 1) * width].copy_from_slice(values);
            }
        };
        let mut rows: Vec<u64> = order.iter().map(|(r, _)| *r).collect();
        rows.dedup();
        self.distinct.fetch_add(rows.len() as u64, Ordering::Relaxed);
        if self.cached {
            let mut cache = self.cache.lock().unwrap_or_else(|e| e.into_inner());
            let before = rows.len();
            rows.retain(|row| match cache.get(*row) {
                Some(v) => {
                    places(*row, v);
                    false
                }
                None => true,
            });
            self.hits.fetch_add((before - rows.len()) as u64, Ordering::Relaxed);
        }
        self.source.read_many(&rows, &mut |row, values| {
            if self.cached {
                self.cache.lock().unwrap_or_else(|e| e.into_inner()).put(row, values);
            }
            places(row, values);
        })?;
        Ok(out)
    }
}

fn serve(inner: &Inner, jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().unwrap_or_else(|e| e.into_inner()).recv();
        match job {
            Ok(job) => inner.run(&job),
            Err(_) => return,
        }
    }
}

impl Ngram {
    /// Readers over a source whose rows are those of the configuration's tables, in ascending layer order.
    pub fn new(
        ple: &PleConfig,
        vocab: u64,
        source: Box<dyn RowSource>,
        options: NgramOptions,
    ) -> Result<Self, EngineError> {
        let mut first = 0;
        let tables: Vec<_> = constants(ple, vocab)?
            .into_iter()
            .map(|c| {
                let at = first;
                first += c.rows;
                (c, at)
            })
            .collect();
        if source.rows() != first || source.width() != ple.row_width() as usize {
            return Err(EngineError::Ngram(format!(
                "{} rows of {} values, the model needs {first} of {}",
                source.rows(),
                source.width(),
                ple.row_width()
            )));
        }
        let width = source.width();
        let capacity = options.cache_bytes / (4 * width + 64);
        let cache = Mutex::new(Cache { capacity, ..Cache::default() });
        let zero = AtomicU64::default;
        let cached = capacity > 0;
        let inner =
            Arc::new(Inner { source, cache, cached, requested: zero(), distinct: zero(), hits: zero() });
        let (sender, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let mut threads = Vec::new();
        for i in 0..options.threads {
            let (inner, receiver) = (inner.clone(), receiver.clone());
            let builder = std::thread::Builder::new().name(format!("ngram-{i}"));
            let thread = builder
                .spawn(move || serve(&inner, &receiver))
                .map_err(|e| EngineError::Ngram(format!("starting a reader: {e}")))?;
            threads.push(thread);
        }
        let jobs = (options.threads > 0).then_some(sender);
        Ok(Ngram { tables, inner, jobs, threads, width, eos: ple.eos })
    }

    /// Tokens before a sequence's end that the next row ids depend on.
    pub fn history(&self) -> usize {
        self.tables.iter().map(|t| t.0.history()).max().unwrap_or(0)
    }

    /// Row ids `[columns, heads]` of table `table` for new columns `ids` after `before` (the sequence so far, or its tail).
    pub fn row_ids(&self, table: usize, before: &[u32], ids: &[u32]) -> Vec<u64> {
        let (c, first) = &self.tables[table];
        let heads = c.heads();
        let mut out = vec![0u64; ids.len() * heads];
        // Positions before the start read as end of text, which `row_ids` treats as closed.
        let recent = |t: usize, s: usize| match (t + before.len()).checked_sub(s) {
            Some(i) if i >= before.len() => Some(ids[i - before.len()]),
            Some(i) => Some(before[i]),
            None => None,
        };
        let mut window = vec![0u32; c.history() + 1];
        for (t, out) in out.chunks_exact_mut(heads).enumerate() {
            for (s, w) in window.iter_mut().enumerate() {
                *w = recent(t, s).unwrap_or(self.eos);
            }
            c.row_ids(&window, out);
            out.iter_mut().for_each(|r| *r += first);
        }
        out
    }

    /// Starts reading the rows of new columns.
    pub fn request(&self, table: usize, before: &[u32], ids: &[u32]) -> NgramTicket {
        let wanted = self.row_ids(table, before, ids);
        self.inner.requested.fetch_add(wanted.len() as u64, Ordering::Relaxed);
        let ticket = NgramTicket::expecting(wanted.len() * self.width);
        // A part a reader; more of them for long prompts, which level out what readers wait for.
        let total = wanted.len();
        let most = self.threads.len().max(1) * if total >= 1 << 14 { 4 } else { 1 };
        let size = total.div_ceil(most).max(1);
        let parts = total.div_ceil(size).max(1);
        let request = Arc::new(Request {
            wanted,
            parts: Mutex::new(vec![Vec::new(); parts]),
            open: AtomicUsize::new(parts),
            ticket: ticket.clone(),
        });
        for part in 0..parts {
            let range = part * size..((part + 1) * size).min(total);
            let job = Job { part, range, request: request.clone() };
            match &self.jobs {
                None => self.inner.run(&job),
                Some(sender) => {
                    if let Err(e) = sender.send(job) {
                        self.inner.run(&e.0);
                    }
                }
            }
        }
        ticket
    }

    /// Counters.
    pub fn stats(&self) -> NgramStats {
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        NgramStats {
            requested: get(&self.inner.requested),
            distinct: get(&self.inner.distinct),
            hits: get(&self.inner.hits),
        }
    }
}

impl Drop for Ngram {
    fn drop(&mut self) {
        self.jobs = None;
        for t in self.threads.drain(..) {
            // A reader that panicked has failed its ticket's request already.
            let _ = t.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ngram::MemoryRows;

    fn config() -> PleConfig {
        PleConfig {
            layers: vec![1],
            embed_dim: 8,
            conv_kernel: 4,
            ngram_size: 3,
            heads_per_ngram: 2,
            base: 50,
            divisor: 8,
            seed: 1234,
            eos: 9,
            parts: 1,
        }
    }

    fn rows() -> usize {
        constants(&config(), 100).unwrap()[0].rows as usize
    }

    struct Broken(MemoryRows);
    impl RowSource for Broken {
        fn width(&self) -> usize {
            self.0.width()
        }
        fn rows(&self) -> u64 {
            self.0.rows()
        }
        fn read(&self, _: u64, _: &mut [f32]) -> Result<(), String> {
            Err("injected".into())
        }
    }

    fn memory() -> MemoryRows {
        MemoryRows::new(2, (0..rows() * 2).map(|i| i as f32).collect())
    }

    #[test]
    fn any_chunking_asks_for_the_same_rows() {
        let n = Ngram::new(&config(), 100, Box::new(memory()), NgramOptions { threads: 3, cache_bytes: 400 })
            .unwrap();
        let ids: Vec<u32> = (0..40).map(|i| (i * 7) % 11).collect();
        let whole = n.request(0, &[], &ids).wait().unwrap();
        let mut parts = Vec::new();
        for (a, b) in [(0, 1), (1, 2), (2, 17), (17, 40)] {
            let from = a.max(2) - 2;
            let before = if a <= 2 { &ids[..a] } else { &ids[from..a] };
            parts.extend_from_slice(&n.request(0, before, &ids[a..b]).wait().unwrap());
        }
        assert_eq!(*whole, parts);
        let ids = n.row_ids(0, &[], &ids);
        assert!(whole.chunks_exact(2).zip(&ids).all(|(v, r)| v[0] == (2 * r) as f32));
        assert!(n.stats().distinct < n.stats().requested);
    }

    #[test]
    fn a_read_error_fails_the_ticket_and_nothing_else() {
        let o = NgramOptions { threads: 2, cache_bytes: 0 };
        let n = Ngram::new(&config(), 100, Box::new(Broken(memory())), o).unwrap();
        assert!(n.request(0, &[], &[1, 2, 3]).wait().unwrap_err().to_string().contains("injected"));
        assert!(n.request(0, &[], &[1]).wait().is_err());
    }

    #[test]
    fn a_table_of_another_size_is_refused() {
        let m = MemoryRows::new(2, vec![0.0; 8]);
        assert!(Ngram::new(&config(), 100, Box::new(m), NgramOptions::default()).is_err());
    }
}
