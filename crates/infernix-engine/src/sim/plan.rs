//! What a machine would do with a traffic: memory divided, hit rates replayed, speeds estimated.

use super::bound::most_cached;
use super::experts::{ExpertPolicy, simulate, synthetic_routing};
use super::replay::{ReplayOptions, Replayed, replay, replay_clairvoyant};
use super::{Costs, SimOptions, Trace};
use crate::error::EngineError;
use crate::state::PAGE_TOKENS;
use std::cell::OnceCell;
use std::ops::RangeInclusive;

/// Tokens of KV that a plan may have: a page of bookkeeping each 64 of them.
pub const MOST_KV: usize = 1 << 32;
/// Bytes a second that a memory or a link may have.
pub const RATES: RangeInclusive<f64> = 1e6..=1e15;
/// Prompt tokens a second.
pub const PREFILL: RangeInclusive<f64> = 1e-3..=1e9;
/// Seconds of a hand-off.
pub const HANDOFF: RangeInclusive<f64> = 0.0..=1.0;
/// Parts of the experts to which [`needed`] finds device memory.
const STEPS: usize = 64;
/// The least RAM for cached prefixes that [`needed`] tries after none.
const LEAST_CACHE: u64 = 16 << 20;
/// Sizes of it: up to 16 TiB.
const CACHE_STEPS: usize = 41;

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

/// The smallest budgets that reach a target.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Needed {
    /// Device memory, bytes.
    pub vram: u64,
    /// Expert frames there.
    pub frames: usize,
    /// Share of expert uses that are resident, under the engine's policy.
    pub expert_hit: f64,
    /// Tokens a second of one decoding request without drafts.
    pub decode: f64,
    /// Host memory beside that much device memory, bytes.
    pub ram: u64,
    /// Of it, for cached prefixes.
    pub host_cache: u64,
    /// Prompt tokens from the cache.
    pub cached: u64,
}

/// A model on a machine, and the experts that the traffic uses.
struct Setting<'a> {
    model: &'a ModelSizes,
    machine: &'a Machine,
    trace: &'a Trace,
    pages: usize,
    /// Bytes of device memory for everything but experts.
    fixed: u64,
    /// Routed experts of the model.
    all: usize,
    /// Experts by decode round, layer and row; made up only where it is needed.
    routing: OnceCell<Vec<Vec<Vec<Vec<u32>>>>>,
}

impl<'a> Setting<'a> {
    fn new(model: &'a ModelSizes, machine: &'a Machine, trace: &'a Trace) -> Result<Self, EngineError> {
        // Rates and times beyond any machine's would overflow the clock, or stop it.
        for (what, value, range) in [
            ("bytes a second over the link", machine.link, RATES),
            ("bytes a second of device memory", machine.hbm, RATES),
            ("prompt tokens a second", machine.prefill, PREFILL),
            ("seconds of a hand-off", machine.handoff, HANDOFF),
        ] {
            if !range.contains(&value) {
                let (low, high) = (range.start(), range.end());
                return Err(EngineError::Request(format!("{value} {what}: {low} to {high} are possible")));
            }
        }
        if machine.prefill_chunk == 0 || machine.lanes == 0 {
            return Err(EngineError::Request("a machine that reads nothing".into()));
        }
        if machine.kv_tokens > MOST_KV {
            let (given, most) = (machine.kv_tokens, MOST_KV);
            return Err(EngineError::Request(format!("{given} tokens of KV are given, {most} are possible")));
        }
        let pages = machine.kv_tokens.div_ceil(PAGE_TOKENS) + machine.lanes;
        let state = machine.lanes as u64 * model.state;
        let fixed = (model.resident + pages as u64 * model.page + state).saturating_add(machine.snapshots);
        let all = model.experts.0 * model.experts.1;
        Ok(Setting { model, machine, trace, pages, fixed, all, routing: OnceCell::new() })
    }

    fn routing(&self) -> &[Vec<Vec<Vec<u32>>>] {
        self.routing.get_or_init(|| {
            let (layers, per_layer, top_k) = self.model.experts;
            // Of this model: as many layers, and no expert that it does not have.
            let known =
                |r: &Vec<Vec<Vec<u32>>>| r.iter().flatten().flatten().all(|e| (*e as usize) < per_layer);
            let fits = |r: &&Vec<Vec<Vec<u32>>>| r.len() == layers && known(r);
            let recorded: Vec<_> = self.trace.routing.iter().filter(fits).cloned().collect();
            if recorded.is_empty() {
                synthetic_routing(42, 2000, layers, per_layer, top_k, 1.2, 0.3)
            } else {
                recorded
            }
        })
    }

    /// Device memory that the model runs in: a layer's chosen experts must be resident at once.
    fn least(&self) -> u64 {
        self.fixed.saturating_add(self.model.experts.2.max(1) as u64 * self.model.expert)
    }

    /// Experts that fit into device memory.
    fn frames(&self, vram: u64) -> usize {
        (vram.saturating_sub(self.fixed) / self.model.expert.max(1)).min(self.all as u64) as usize
    }

    /// RAM keeps the experts that the device does not hold.
    fn elsewhere(&self, frames: usize) -> u64 {
        (self.all - frames) as u64 * self.model.expert
    }

    fn hit(&self, frames: usize, policy: ExpertPolicy) -> f64 {
        if frames < self.all { simulate(self.routing(), frames, policy).rate() } else { 1.0 }
    }

    /// Bytes of experts that a token reads.
    fn picked(&self) -> f64 {
        (self.model.experts.0 * self.model.experts.2) as f64 * self.model.expert as f64
    }

    /// Seconds of a round where a share of the experts is resident.
    fn round(&self, resident: f64) -> f64 {
        let (model, machine) = (self.model, self.machine);
        (model.dense as f64 + self.picked() * resident) / machine.hbm
            + self.picked() * (1.0 - resident) / machine.link
            + model.layers as f64 * machine.handoff
    }

    /// How the traffic is replayed where a share of the experts is resident.
    fn options(&self, resident: f64, host_bytes: u64, device_bytes: u64) -> ReplayOptions {
        let (model, machine) = (self.model, self.machine);
        let costs = Costs {
            prefill_call: self.round(resident),
            prefill_token: 1.0 / machine.prefill,
            prefill_pair: 0.0,
            // What a further lane adds: its own experts; the dense weights are read once.
            round: (model.dense as f64) / machine.hbm + model.layers as f64 * machine.handoff,
            column: self.picked() * resident / machine.hbm + self.picked() * (1.0 - resident) / machine.link,
            step: 0.0,
            restored_byte: 1.0 / machine.link,
        };
        ReplayOptions {
            model: SimOptions {
                pages: self.pages,
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
        }
    }
}

/// Predicts.
///
/// # Errors
/// The machine is too small, and by how much; a request that does not fit into the KV pages.
pub fn plan(model: &ModelSizes, machine: &Machine, trace: &Trace) -> Result<Plan, EngineError> {
    let s = Setting::new(model, machine, trace)?;
    if s.least() > machine.vram {
        return Err(EngineError::Request(format!(
            "{} MiB of device memory are needed at least, {} MiB are given",
            s.least().div_ceil(1 << 20),
            machine.vram >> 20
        )));
    }
    let frames = s.frames(machine.vram);
    let elsewhere = s.elsewhere(frames);
    if elsewhere > machine.ram {
        return Err(EngineError::Request(format!(
            "{} MiB of RAM are needed for experts, {} MiB are given",
            elsewhere.div_ceil(1 << 20),
            machine.ram >> 20
        )));
    }
    let host_cache = machine.ram - elsewhere;
    let policies = [ExpertPolicy::Lru, ExpertPolicy::Engine, ExpertPolicy::Optimum];
    let expert_hits = policies.map(|p| s.hit(frames, p));
    let resident = expert_hits[1];
    let options = s.options(resident, host_cache, machine.snapshots);
    Ok(Plan {
        kv: s.pages as u64 * model.page,
        frames: (frames, s.all),
        host_cache,
        expert_hits,
        decode: 1.0 / s.round(resident),
        traffic: replay(trace, &options)?,
        clairvoyant: replay_clairvoyant(trace, &options)?,
        most_cached: most_cached(trace, &options),
        unlimited: replay(trace, &s.options(resident, u64::MAX >> 2, u64::MAX >> 2))?,
    })
}

/// The smallest budgets for which `share` of the expert uses is resident and of the prompt tokens that an unlimited cache would
/// give comes from the cache; 0: for which the model runs. KV and snapshots on the device are as the machine says, its
/// memory is not looked at. Device memory is found to [`STEPS`] parts of the experts, RAM for prefixes to a half of the
/// power of two below it, from [`LEAST_CACHE`] on.
///
/// # Errors
/// A request that does not fit into the KV pages.
pub fn needed(
    model: &ModelSizes,
    machine: &Machine,
    trace: &Trace,
    share: f64,
) -> Result<Needed, EngineError> {
    let s = Setting::new(model, machine, trace)?;
    let least = s.frames(s.least());
    let frames = |step: usize| least + ((s.all - least) * step).div_ceil(STEPS);
    // All experts are all uses, so the last step always does.
    let step = first(0..STEPS, |step| Ok(s.hit(frames(step), ExpertPolicy::Engine) >= share))?;
    let frames = frames(step);
    let resident = s.hit(frames, ExpertPolicy::Engine);
    let cached = |host: u64, device: u64| -> Result<u64, EngineError> {
        Ok(replay(trace, &s.options(resident, host, device))?.cached_tokens)
    };
    let goal = (share * cached(u64::MAX >> 2, u64::MAX >> 2)? as f64).ceil() as u64;
    // 0, then 2, 3, 4, 6, 8 ... halves of the least.
    let size = |step: usize| match step {
        0 => 0,
        n => (LEAST_CACHE << ((n - 1) / 2)) + if n % 2 == 0 { LEAST_CACHE << ((n - 1) / 2) >> 1 } else { 0 },
    };
    let step = first(0..CACHE_STEPS, |step| Ok(cached(size(step), machine.snapshots)? >= goal))?;
    let host_cache = size(step);
    Ok(Needed {
        vram: s.fixed.saturating_add(frames.max(1) as u64 * model.expert),
        frames,
        expert_hit: resident,
        decode: 1.0 / s.round(resident),
        ram: s.elsewhere(frames) + host_cache,
        host_cache,
        cached: cached(host_cache, machine.snapshots)?,
    })
}

/// The first of a range that fulfils what all later ones fulfil; its end if none does.
fn first(
    range: std::ops::Range<usize>,
    mut test: impl FnMut(usize) -> Result<bool, EngineError>,
) -> Result<usize, EngineError> {
    let (mut low, mut high) = (range.start, range.end);
    while low < high {
        let middle = low + (high - low) / 2;
        if test(middle)? {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Ok(low)
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
        for odd in [
            Machine { link: 1e-300, ..machine() },
            Machine { hbm: 1e-6, ..machine() },
            Machine { hbm: f64::NAN, ..machine() },
            Machine { handoff: 1e308, ..machine() },
            Machine { handoff: -1.0, ..machine() },
            Machine { prefill: 1e-18, ..machine() },
            Machine { prefill_chunk: 0, ..machine() },
            Machine { lanes: 0, ..machine() },
        ] {
            assert!(plan(&model(), &odd, &trace).is_err(), "{odd:?}");
        }
        // The slowest machine there can be.
        let (link, hbm, prefill, handoff) =
            (*RATES.start(), *RATES.start(), *PREFILL.start(), *HANDOFF.end());
        let slow = plan(&model(), &Machine { link, hbm, prefill, handoff, ..machine() }, &trace).unwrap();
        assert!(slow.decode > 0.0 && slow.traffic.shared_tokens <= slow.traffic.prompt_tokens);
        assert_eq!(
            slow.traffic.output_tokens,
            trace.requests.iter().map(|r| r.output.len() as u64).sum::<u64>()
        );
        let endless = Machine { kv_tokens: usize::MAX, ..machine() };
        assert!(plan(&model(), &endless, &trace).unwrap_err().to_string().contains("KV"));
    }

    #[test]
    fn the_budgets_named_for_a_target_reach_it_and_smaller_ones_do_not() {
        let shape = Synthetic {
            sessions: 10,
            turns: 8,
            head_tokens: 3000,
            context: 30_000,
            session_gap: 60.0,
            ..Synthetic::default()
        };
        let trace = Trace::synthetic(&shape);
        let mut last = Needed::default();
        for share in [0.0, 0.8, 0.95] {
            let n = needed(&model(), &machine(), &trace, share).unwrap();
            let on = |vram: u64, ram: u64| plan(&model(), &Machine { vram, ram, ..machine() }, &trace);
            let p = on(n.vram, n.ram).unwrap();
            assert_eq!((p.frames.0, p.host_cache, p.decode), (n.frames, n.host_cache, n.decode), "{share}");
            assert_eq!((p.expert_hits[1], p.traffic.cached_tokens), (n.expert_hit, n.cached));
            assert!(n.expert_hit >= share && n.cached as f64 >= share * p.unlimited.cached_tokens as f64);
            assert!(n.vram >= last.vram && n.host_cache >= last.host_cache, "{share}: {n:?}");
            if share == 0.0 {
                assert_eq!(n.host_cache, 0);
                assert!(on(n.vram - 1, n.ram + (1 << 30)).is_err());
            } else {
                let part = (model().experts.0 * model().experts.1 / STEPS) as u64 + 1;
                let less = on(n.vram - part * model().expert, 90 << 30).unwrap();
                assert!(less.expert_hits[1] < share, "{share}: {less:?}");
                let host = n.host_cache;
                let before = if host.is_power_of_two() { host / 4 * 3 } else { host / 3 * 2 };
                assert!(host > LEAST_CACHE, "{n:?}");
                let less = on(n.vram, n.ram - host + before).unwrap();
                assert!((less.traffic.cached_tokens as f64) < share * p.unlimited.cached_tokens as f64);
            }
            last = n;
        }
        // Nothing but the budget of a dense model is to be found.
        let dense = ModelSizes { experts: (0, 0, 0), expert: 0, ..model() };
        let n = needed(&dense, &machine(), &trace, 0.9).unwrap();
        assert_eq!((n.expert_hit, n.ram), (1.0, n.host_cache));
        plan(&dense, &Machine { vram: n.vram, ram: n.ram, ..machine() }, &trace).unwrap();
    }
}
