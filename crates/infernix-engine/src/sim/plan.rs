//! What a machine would do with a traffic: memory divided, hit rates replayed, speeds estimated.

use super::bound::most_cached;
use super::experts::{ExpertPolicy, simulate, synthetic_routing};
use super::replay::{ReplayOptions, Replayed, replay, replay_clairvoyant};
use super::{Costs, SimOptions, Trace};
use crate::error::EngineError;
use crate::state::PAGE_TOKENS;

/// Sizes of a model, in bytes where nothing else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelSizes {
    /// Everything a decoded token reads besides routed experts.
    pub dense: u64,
    /// Everything that must be resident besides routed experts.
    pub resident: u64,
    /// Layers.
    pub layers: usize,
    /// Layers with routed experts, experts of each, and experts per token; 0 = dense.
    pub experts: (usize, usize, usize),
    /// One expert.
    pub expert: u64,
    /// A KV page over all layers.
    pub page: u64,
    /// A recurrent state.
    pub state: u64,
}

/// A machine and how it is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Device memory for weights, KV, states and experts.
    pub vram: u64,
    /// Host memory for experts and cached prefixes.
    pub ram: u64,
    /// Bytes a second over the link.
    pub link: f64,
    /// Bytes a second of device memory.
    pub hbm: f64,
    /// Seconds a layer's hand-off takes.
    pub handoff: f64,
    /// Prompt tokens a second.
    pub prefill: f64,
    /// Prompt tokens of a call.
    pub prefill_chunk: usize,
    /// Requests at once.
    pub lanes: usize,
    /// Tokens of KV on the device.
    pub kv_tokens: usize,
    /// Bytes of snapshots on the device.
    pub snapshots: u64,
}

/// The prediction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Plan {
    /// Bytes of KV on the device.
    pub kv: u64,
    /// Expert frames on the device, of how many experts.
    pub frames: (usize, usize),
    /// Bytes left in RAM for cached prefixes.
    pub host_cache: u64,
    /// Share of expert uses that are resident: least recently used, the engine's policy, the optimum.
    pub expert_hits: [f64; 3],
    /// Tokens a second of one decoding request without drafts.
    pub decode: f64,
    /// What the traffic met.
    pub traffic: Replayed,
    /// The same with an evictor that knows what comes.
    pub clairvoyant: Replayed,
    /// The same with a prefix cache of unlimited size.
    pub unlimited: Replayed,
    /// Prompt tokens that no cache of this size could exceed.
    pub most_cached: u64,
}

/// Predicts.
///
/// # Errors
/// The machine is too small, and by how much.
pub fn plan(model: &ModelSizes, machine: &Machine, trace: &Trace) -> Result<Plan, EngineError> {
    let pages = machine.kv_tokens.div_ceil(PAGE_TOKENS) + machine.lanes;
    let kv = pages as u64 * model.page;
    let fixed = model.resident + kv + machine.snapshots + machine.lanes as u64 * model.state;
    let (layers, per_layer, top_k) = model.experts;
    let all = layers * per_layer;
    // A layer's chosen experts must be resident at once.
    let least = top_k.max(1) as u64 * model.expert;
    if fixed + least > machine.vram {
        return Err(EngineError::Request(format!(
            "{} MiB of device memory are needed at least, {} MiB are given",
            (fixed + least).div_ceil(1 << 20),
            machine.vram >> 20
        )));
    }
    let frames = ((machine.vram - fixed) / model.expert.max(1)).min(all as u64) as usize;
    // RAM keeps the experts that the device does not hold.
    let elsewhere = (all - frames) as u64 * model.expert;
    if elsewhere > machine.ram {
        return Err(EngineError::Request(format!(
            "{} MiB of RAM are needed for experts, {} MiB are given",
            elsewhere.div_ceil(1 << 20),
            machine.ram >> 20
        )));
    }
    let host_cache = machine.ram - elsewhere;
    let mut expert_hits = [1.0; 3];
    if frames < all {
        // Of this model: as many layers, and no expert that it does not have.
        let known = |r: &Vec<Vec<Vec<u32>>>| r.iter().flatten().flatten().all(|e| (*e as usize) < per_layer);
        let fits = |r: &Vec<Vec<Vec<u32>>>| r.len() == layers && known(r);
        let recorded: Vec<_> = trace.routing.iter().filter(|r| fits(r)).cloned().collect();
        let routing = if recorded.is_empty() {
            synthetic_routing(42, 2000, layers, per_layer, top_k, 1.2, 0.3)
        } else {
            recorded
        };
        let policies = [ExpertPolicy::Lru, ExpertPolicy::Engine, ExpertPolicy::Optimum];
        expert_hits = policies.map(|p| simulate(&routing, frames, p).rate());
    }
    let picked = (layers * top_k) as f64 * model.expert as f64;
    let resident = expert_hits[1];
    let round = (model.dense as f64 + picked * resident) / machine.hbm
        + picked * (1.0 - resident) / machine.link
        + model.layers as f64 * machine.handoff;
    let costs = Costs {
        prefill_call: round,
        prefill_token: 1.0 / machine.prefill,
        prefill_pair: 0.0,
        // What a further lane adds: its own experts; the dense weights are read once.
        round: (model.dense as f64) / machine.hbm + model.layers as f64 * machine.handoff,
        column: picked * resident / machine.hbm + picked * (1.0 - resident) / machine.link,
        step: 0.0,
        restored_byte: 1.0 / machine.link,
    };
    let options = |host_bytes, device_bytes| ReplayOptions {
        model: SimOptions {
            pages,
            sequences: machine.lanes,
            vocab: u32::MAX as usize,
            page_bytes: model.page,
            state_bytes: model.state,
            max_positions: usize::MAX >> 1,
            draft_accuracy: None,
            checked: false,
            costs,
        },
        prefill_chunk: machine.prefill_chunk,
        device_bytes,
        host_bytes,
    };
    Ok(Plan {
        kv,
        frames: (frames, all),
        host_cache,
        expert_hits,
        decode: 1.0 / round,
        traffic: replay(trace, &options(host_cache, machine.snapshots))?,
        clairvoyant: replay_clairvoyant(trace, &options(host_cache, machine.snapshots))?,
        most_cached: most_cached(trace, &options(host_cache, machine.snapshots)),
        unlimited: replay(trace, &options(u64::MAX >> 2, u64::MAX >> 2))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Synthetic;

    fn model() -> ModelSizes {
        ModelSizes {
            dense: 8 << 30,
            resident: 9 << 30,
            layers: 48,
            experts: (48, 512, 10),
            expert: 2_764_800,
            page: 2 << 20,
            state: 113 << 20,
        }
    }

    fn machine() -> Machine {
        Machine {
            vram: 32 << 30,
            ram: 80 << 30,
            link: 50e9,
            hbm: 1.6e12,
            handoff: 20e-6,
            prefill: 4000.0,
            prefill_chunk: 1024,
            lanes: 1,
            kv_tokens: 65_536,
            snapshots: 1 << 30,
        }
    }

    #[test]
    fn more_memory_is_never_slower_and_too_little_is_an_error() {
        let shape = Synthetic { sessions: 3, turns: 6, head_tokens: 3000, ..Synthetic::default() };
        let trace = Trace::synthetic(&shape);
        let mut last = 0.0;
        for vram in [20u64, 32, 48, 96] {
            let p = plan(&model(), &Machine { vram: vram << 30, ..machine() }, &trace).unwrap();
            assert!(p.decode >= last, "{vram} GiB: {} after {last}", p.decode);
            assert!(p.expert_hits[2] >= p.expert_hits[1]);
            last = p.decode;
        }
        let small = Machine { vram: 8 << 30, ..machine() };
        assert!(plan(&model(), &small, &trace).unwrap_err().to_string().contains("device memory"));
        let small = Machine { ram: 8 << 30, ..machine() };
        assert!(plan(&model(), &small, &trace).unwrap_err().to_string().contains("RAM"));
    }
}
