//! What the launches of a decode round cost where they stand: the round's graph is timed with and without the launches of a kind.
//!
//! Events between launches would keep each from starting before its predecessor has ended, which graphs of programmatic launches live
//! on. Leaving a kind out keeps all of that for the others: the difference is what a round would gain if these launches were gone.

use super::context::Cuda;
use super::vram::fault;
use crate::backend::Op;
use crate::error::EngineError;
use infernix_cuda::driver::{Graph, Tape};
use std::collections::BTreeMap;

/// Replays that one figure is taken over, and figures whose median counts.
const REPLAYS: usize = 4;
const FIGURES: usize = 5;

/// Launches of one kernel with one grid that belong to one operation.
#[derive(Clone, Debug)]
pub struct LaunchCost {
    /// Operation that began before them.
    pub op: Op,
    /// Kernel.
    pub kernel: String,
    /// Blocks.
    pub blocks: u64,
    /// How many of them a round has.
    pub count: usize,
    /// Microseconds that a round loses for each when they are left out.
    pub gain: f64,
    /// Microseconds of each in a graph of them alone.
    pub alone: f64,
}

/// A decode round's launches and their costs.
#[derive(Clone, Debug, Default)]
pub struct RoundCosts {
    /// Launches of the round.
    pub launches: usize,
    /// Microseconds of its graph.
    pub round: f64,
    /// By kind, those first that cost most.
    pub kinds: Vec<LaunchCost>,
}

impl Cuda {
    /// Times the launches of the last decode round. The state of its sequences is lost: a round without some of its launches writes
    /// what it must not. Refused for models whose launches read addresses that others compute (experts, selected blocks).
    pub fn round_costs(&mut self) -> Result<RoundCosts, EngineError> {
        let indexed = self.state()?.layout.attention.iter().any(|a| a.index.is_some());
        if self.tiers.layers() > 0 || indexed {
            let what =
                "the launches of a model with experts or selected blocks cannot be left out one by one";
            return Err(EngineError::Unsupported(what.into()));
        }
        let Some((tape, marks)) = self.last_decode() else {
            return Err(EngineError::Round("no decode round whose launches were kept".into()));
        };
        let device = self.vram.device.clone();
        let mut kinds = BTreeMap::<(usize, String, u64), Vec<bool>>::new();
        for i in 0..tape.len() {
            let Some((name, grid)) = tape.kernel(&device, i) else { continue };
            let mark = marks.partition_point(|(at, _)| *at <= i).saturating_sub(1);
            let op = marks.get(mark).map_or(Op::Embed, |(_, op)| *op);
            let first = marks.iter().position(|(_, o)| *o == op).unwrap_or(0);
            let blocks = grid.iter().map(|g| u64::from(*g)).product();
            let key = (first, name.to_owned(), blocks);
            kinds.entry(key).or_insert_with(|| vec![false; tape.len()])[i] = true;
        }
        let whole = self.graph_of(&tape)?;
        let mut costs = RoundCosts { launches: tape.len(), round: self.micros(&whole)?, kinds: Vec::new() };
        for ((first, kernel, blocks), own) in kinds {
            let count = own.iter().filter(|o| **o).count();
            let without = self.graph_of(&tape.filtered(|i| !own[i]))?;
            let alone = self.graph_of(&tape.filtered(|i| own[i]))?;
            // Clocks drift: each pair of figures is taken side by side.
            let mut gains = Vec::with_capacity(FIGURES);
            for _ in 0..FIGURES {
                gains.push(self.replays(&whole)? - self.replays(&without)?);
            }
            costs.kinds.push(LaunchCost {
                op: marks.get(first).map_or(Op::Embed, |(_, op)| *op),
                kernel,
                blocks,
                count,
                gain: median(gains) / count as f64,
                alone: self.micros(&alone)? / count as f64,
            });
        }
        costs.kinds.sort_by(|a, b| (b.gain * b.count as f64).total_cmp(&(a.gain * a.count as f64)));
        Ok(costs)
    }

    fn graph_of(&self, tape: &Tape) -> Result<Graph, EngineError> {
        self.stream.capture(|| self.stream.play(tape)).map_err(fault)
    }

    /// Microseconds of a replay, one after another.
    fn replays(&self, graph: &Graph) -> Result<f64, EngineError> {
        let (a, b) = (self.vram.device.event().map_err(fault)?, self.vram.device.event().map_err(fault)?);
        // The first keeps the device busy until the others are enqueued.
        self.stream.replay(graph).map_err(fault)?;
        self.stream.record(&a).map_err(fault)?;
        for _ in 0..REPLAYS {
            self.stream.replay(graph).map_err(fault)?;
        }
        self.stream.record(&b).map_err(fault)?;
        Ok(b.micros_since(&a).map_err(fault)? / REPLAYS as f64)
    }

    fn micros(&self, graph: &Graph) -> Result<f64, EngineError> {
        let all: Result<Vec<f64>, _> = (0..FIGURES).map(|_| self.replays(graph)).collect();
        all.map(median)
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}
