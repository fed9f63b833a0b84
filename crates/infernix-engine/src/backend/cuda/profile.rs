//! Where a round's time goes: an event where each part begins.

use super::vram::fault;
use crate::backend::{Op, Site};
use crate::error::EngineError;
use infernix_cuda::Device;
use infernix_cuda::driver::{Event, Stream};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One part of a round.
#[derive(Clone, Debug)]
pub struct Span {
    /// Layer and operation.
    pub site: Site,
    /// Microseconds after the round's first launch.
    pub start: f64,
    /// Microseconds.
    pub time: f64,
}

/// Parts of the last prompt round and of the last decode round. Parts run one after another here; in a graph they overlap.
#[derive(Default)]
pub struct Profile {
    events: Vec<Event>,
    sites: Vec<Site>,
    decode: bool,
    rounds: [Vec<Span>; 2],
}

impl Profile {
    /// Parts of the last prompt (`false`) or decode round.
    pub fn spans(&self, decode: bool) -> &[Span] {
        &self.rounds[usize::from(decode)]
    }

    /// Microseconds by operation, most first.
    pub fn totals(&self, decode: bool) -> Vec<(String, f64)> {
        let mut all = BTreeMap::<String, f64>::new();
        for s in self.spans(decode) {
            *all.entry(format!("{:?}", s.site.op)).or_default() += s.time;
        }
        let mut all: Vec<_> = all.into_iter().collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }

    /// Chrome trace events of both rounds.
    pub fn trace(&self) -> serde_json::Value {
        let event = |pid: usize, s: &Span| {
            let layer = match s.site.layer {
                Site::GLOBAL => "-".to_owned(),
                l => l.to_string(),
            };
            serde_json::json!({
                "name": format!("{:?}", s.site.op), "ph": "X", "ts": s.start, "dur": s.time, "pid": pid, "tid": 0,
                "args": {"layer": layer},
            })
        };
        let rounds = self.rounds.iter().enumerate();
        let names = ["prompt round", "decode round"].into_iter().enumerate().map(|(pid, n)| {
            serde_json::json!({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": n}})
        });
        let events = rounds.flat_map(|(pid, r)| r.iter().map(move |s| event(pid, s)));
        serde_json::json!({"traceEvents": names.chain(events).collect::<Vec<_>>()})
    }

    fn record(&mut self, device: &Arc<Device>, stream: &Stream) -> Result<(), EngineError> {
        let n = self.sites.len();
        if n == self.events.len() {
            self.events.push(device.event().map_err(fault)?);
        }
        stream.record(&self.events[n]).map_err(fault)
    }

    pub(super) fn begin(
        &mut self,
        device: &Arc<Device>,
        stream: &Stream,
        decode: bool,
    ) -> Result<(), EngineError> {
        self.sites.clear();
        self.decode = decode;
        self.mark(device, stream, Site { layer: Site::GLOBAL, op: Op::Embed })
    }

    pub(super) fn mark(
        &mut self,
        device: &Arc<Device>,
        stream: &Stream,
        site: Site,
    ) -> Result<(), EngineError> {
        self.record(device, stream)?;
        self.sites.push(site);
        Ok(())
    }

    pub(super) fn end(&mut self, device: &Arc<Device>, stream: &Stream) -> Result<(), EngineError> {
        self.record(device, stream)?;
        let mut spans = Vec::with_capacity(self.sites.len());
        let mut start = 0.0;
        for (i, site) in self.sites.iter().enumerate() {
            let time = self.events[i + 1].micros_since(&self.events[i]).map_err(fault)?;
            spans.push(Span { site: *site, start, time });
            start += time;
        }
        self.rounds[usize::from(self.decode)] = spans;
        Ok(())
    }
}
