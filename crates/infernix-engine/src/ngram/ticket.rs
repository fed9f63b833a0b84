//! Rows on their way to the model.

use crate::error::EngineError;
use std::sync::{Arc, Condvar, Mutex};

/// Table rows of one lane's columns `[columns, P]`, exact FP32 values; possibly still being read.
#[derive(Clone)]
pub struct NgramTicket {
    values: usize,
    shared: Arc<(Mutex<Slot>, Condvar)>,
}

/// Rows of consecutive columns, one piece a reader.
type Pieces = Arc<Vec<Arc<Vec<f32>>>>;
type Slot = Option<Result<Pieces, String>>;

impl NgramTicket {
    /// A ticket that is already served.
    pub fn ready(rows: Vec<f32>) -> Self {
        let t = Self::expecting(rows.len());
        t.fulfil(Ok(rows));
        t
    }

    /// An open ticket for `values` values in all.
    pub fn expecting(values: usize) -> Self {
        NgramTicket { values, shared: Arc::default() }
    }

    /// Values this ticket stands for, known before they are read, and also when reading them failed.
    pub fn values(&self) -> usize {
        self.values
    }

    /// Serves the ticket; the first result stays. Another number of values than expected is a failure.
    pub fn fulfil(&self, result: Result<Vec<f32>, String>) {
        self.fulfil_pieces(result.map(|rows| vec![rows]));
    }

    /// The same with values that lie in pieces, in order.
    pub fn fulfil_pieces(&self, result: Result<Vec<Vec<f32>>, String>) {
        let result = result.and_then(|rows| match rows.iter().map(Vec::len).sum::<usize>() {
            n if n == self.values => Ok(rows.into_iter().map(Arc::new).collect()),
            n => Err(format!("{n} table values, expected {}", self.values)),
        });
        let mut slot = self.shared.0.lock().unwrap_or_else(|e| e.into_inner());
        slot.get_or_insert(result.map(Arc::new));
        self.shared.1.notify_all();
    }

    /// Waits for the rows.
    pub fn wait(&self) -> Result<Arc<Vec<f32>>, EngineError> {
        let pieces = self.wait_pieces()?;
        Ok(match &pieces[..] {
            [one] => one.clone(),
            several => Arc::new(several.iter().flat_map(|p| p.iter().copied()).collect()),
        })
    }

    /// Waits for the rows, as they were read: large calls spare a copy.
    pub fn wait_pieces(&self) -> Result<Pieces, EngineError> {
        let mut slot = self.shared.0.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            match &*slot {
                Some(Ok(rows)) => return Ok(rows.clone()),
                Some(Err(e)) => return Err(EngineError::Ngram(e.clone())),
                None => slot = self.shared.1.wait(slot).unwrap_or_else(|e| e.into_inner()),
            }
        }
    }
}
