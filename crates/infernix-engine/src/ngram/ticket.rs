//! Rows on their way to the model.

use crate::error::EngineError;
use std::sync::{Arc, Condvar, Mutex};

/// Table rows of one lane's columns `[columns, P]`, exact FP32 values; possibly still being read.
#[derive(Clone, Default)]
pub struct NgramTicket(Arc<(Mutex<Slot>, Condvar)>);

type Slot = Option<Result<Arc<Vec<f32>>, String>>;

impl NgramTicket {
    /// A ticket that is already served.
    pub fn ready(rows: Vec<f32>) -> Self {
        let t = Self::default();
        t.fulfil(Ok(rows));
        t
    }

    /// Serves the ticket; the first result stays.
    pub fn fulfil(&self, result: Result<Vec<f32>, String>) {
        let mut slot = self.0.0.lock().unwrap_or_else(|e| e.into_inner());
        slot.get_or_insert(result.map(Arc::new));
        self.0.1.notify_all();
    }

    /// Waits for the rows.
    pub fn wait(&self) -> Result<Arc<Vec<f32>>, EngineError> {
        let mut slot = self.0.0.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            match &*slot {
                Some(Ok(rows)) => return Ok(rows.clone()),
                Some(Err(e)) => return Err(EngineError::Ngram(e.clone())),
                None => slot = self.0.1.wait(slot).unwrap_or_else(|e| e.into_inner()),
            }
        }
    }
}
