//! `infernix plan`: what a machine would do with a traffic.

use super::convert::with_version;
use super::model::OpenModel;
use crate::Outcome;
use crate::args::{PlanArgs, ProgressMode};
use crate::output::{self, Table, bytes, grouped, mib, usage};
use anyhow::{Context as _, bail};
use infernix_artifact::Directory;
use infernix_engine::model::{ArtifactSource, WeightSource as _, page_bytes};
use infernix_engine::sim::{
    HANDOFF, MOST_KV, Machine, ModelSizes, Needed, PREFILL, Plan, RATES, Synthetic, Trace, needed, plan,
};
use infernix_engine::state::KvFormat;
use infernix_model::{Ffn, LayerKind, ModelConfig};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::sync::Arc;

/// Tokens of all made-up prompts together: 8 GiB of them.
const MOST_TOKENS: usize = 1 << 31;
/// Made-up prompts begin with heads of 12,000 tokens, whatever the context.
const LEAST_PROMPT: usize = 20_000;

pub(crate) fn run(args: &PlanArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    for (flag, value, unit, range) in [
        ("link", args.link, 1e9, RATES),
        ("bandwidth", args.bandwidth, 1e9, RATES),
        ("handoff", args.handoff, 1e-6, HANDOFF),
        ("prefill-rate", args.prefill_rate, 1.0, PREFILL),
    ] {
        if !range.contains(&(value * unit)) {
            let (low, high) = (range.start() / unit, range.end() / unit);
            return Err(usage(format!("--{flag} must lie in {low}..={high}")));
        }
    }
    if args.kv_capacity > MOST_KV {
        return Err(usage(format!("--kv-capacity must lie in 0..={MOST_KV}")));
    }
    let snapshots = mib("--prefix-cache-device-mib", args.prefix_cache_device_mib)?;
    let vram = args.vram_mib.iter().map(|n| mib("--vram-mib", *n)).collect::<anyhow::Result<Vec<_>>>()?;
    let ram = args.ram_mib.iter().map(|n| mib("--ram-mib", *n)).collect::<anyhow::Result<Vec<_>>>()?;
    let made = args.sessions.saturating_mul(args.turns).saturating_mul(args.context.max(LEAST_PROMPT));
    if args.trace.is_none() && made > MOST_TOKENS {
        return Err(usage(format!(
            "--sessions, --turns and --context make {made} tokens: at most {MOST_TOKENS} are possible"
        )));
    }
    let open = OpenModel::new(&args.model, progress)?;
    let source = ArtifactSource::new(Arc::clone(&open.artifact))?;
    let model = sizes(open.artifact.directory(), source.config(), open.kv);
    let trace = match &args.trace {
        Some(path) => {
            let shown = path.display();
            let file = File::open(path).with_context(|| format!("{shown} cannot be opened"))?;
            let mut trace = Trace::read(BufReader::new(file)).map_err(|e| anyhow::anyhow!("{shown}: {e}"))?;
            check(&mut trace, &open.artifact.artifact_id().to_string(), source.config())
                .map_err(|e| e.context(format!("{shown} is no trace of this model")))?;
            trace
        }
        None => Trace::synthetic(&Synthetic {
            seed: args.seed,
            sessions: args.sessions,
            turns: args.turns,
            context: args.context,
            ..Synthetic::default()
        }),
    };
    if trace.requests.is_empty() {
        return Err(usage("the trace holds no requests"));
    }
    let machine = Machine {
        vram: 0,
        ram: 0,
        link: args.link * 1e9,
        hbm: args.bandwidth * 1e9,
        handoff: args.handoff * 1e-6,
        prefill: args.prefill_rate,
        prefill_chunk: args.prefill_chunk as usize,
        lanes: args.max_concurrency as usize,
        kv_tokens: args.kv_capacity,
        snapshots,
    };
    let mut plans = Vec::new();
    for vram in vram {
        for ram in &ram {
            let machine = Machine { vram, ram: *ram, ..machine };
            plans.push((vram >> 20, ram >> 20, plan(&model, &machine, &trace)?));
        }
    }
    let mut budgets = Vec::new();
    for target in std::iter::once(None).chain(args.target.iter().copied().map(Some)) {
        let share = f64::from(target.unwrap_or(0)) / 100.0;
        budgets.push((target, needed(&model, &machine, &trace, share)?));
    }
    let recorded = trace.rounds > 0;
    let per_round = 1.0 + trace.accepted as f64 / trace.rounds.max(1) as f64;
    if args.json.json {
        let list: Vec<Value> = plans.iter().map(|(v, r, p)| to_json(*v, *r, p)).collect();
        output::print_json(&with_version(json!({
            "traffic": if args.trace.is_some() { "recorded" } else { "synthetic" },
            "recorded_cached_tokens": trace.cached,
            "routing": if trace.routing.is_empty() { "synthetic" } else { "recorded" },
            "tokens_per_round": if recorded { Some(per_round) } else { None },
            "plans": list,
            "needed": budgets.iter().map(|(target, n)| budget_json(*target, n)).collect::<Vec<_>>(),
        })))?;
        return Ok(Outcome::Done);
    }
    let traffic = &plans[0].2.traffic;
    output::print(&format!(
        "{} traffic: {} requests, {} prompt and {} answer tokens; {} % of the prompts repeat earlier text\n\n",
        if args.trace.is_some() { "recorded" } else { "made-up" },
        grouped(traffic.requests as u64),
        grouped(traffic.prompt_tokens),
        grouped(traffic.output_tokens),
        percent(traffic.shared_tokens, traffic.prompt_tokens),
    ))?;
    let mut table = Table::new(&[
        "VRAM",
        "RAM",
        "experts resident",
        "hit",
        "optimum",
        "decode tok/s",
        "cache in RAM",
        "prompt from cache",
        "foresight",
        "at most",
        "unlimited",
        "first token p50",
        "p95",
        "queue p95",
    ]);
    for (vram, ram, p) in &plans {
        let dense = p.frames.1 == 0;
        table.row([
            bytes(vram << 20),
            bytes(ram << 20),
            if dense {
                "-".into()
            } else {
                format!("{} of {}", grouped(p.frames.0 as u64), grouped(p.frames.1 as u64))
            },
            if dense { "-".into() } else { format!("{:.1} %", 100.0 * p.expert_hits[1]) },
            if dense { "-".into() } else { format!("{:.1} %", 100.0 * p.expert_hits[2]) },
            format!("{:.1}", p.decode),
            bytes(p.host_cache),
            format!("{} %", percent(p.traffic.cached_tokens, p.traffic.prompt_tokens)),
            format!("{} %", percent(p.clairvoyant.cached_tokens, p.traffic.prompt_tokens)),
            format!("{} %", percent(p.most_cached.min(p.traffic.shared_tokens), p.traffic.prompt_tokens)),
            format!("{} %", percent(p.unlimited.cached_tokens, p.unlimited.prompt_tokens)),
            format!("{:.2} s", p.traffic.first_token.0),
            format!("{:.2} s", p.traffic.first_token.1),
            format!("{:.2} s", p.traffic.queued.1),
        ]);
    }
    output::print(&table.to_string())?;
    output::print("\nsmallest budgets:\n")?;
    let mut table = Table::new(&[
        "target",
        "VRAM",
        "RAM",
        "experts resident",
        "hit",
        "decode tok/s",
        "cache in RAM",
        "prompt from cache",
        "of unlimited",
    ]);
    let (dense, unlimited) = (plans[0].2.frames.1 == 0, plans[0].2.unlimited.cached_tokens);
    for (target, n) in &budgets {
        table.row([
            target.map_or("it runs".into(), |t| format!("{t} %")),
            bytes(n.vram),
            bytes(n.ram),
            if dense { "-".into() } else { grouped(n.frames as u64) },
            if dense { "-".into() } else { format!("{:.1} %", 100.0 * n.expert_hit) },
            format!("{:.1}", n.decode),
            bytes(n.host_cache),
            format!("{} %", percent(n.cached, traffic.prompt_tokens)),
            format!("{} %", percent(n.cached, unlimited)),
        ]);
    }
    output::print(&table.to_string())?;
    if args.trace.is_some() {
        output::print(&match trace.cached {
            Some(n) => format!(
                "\n{} % of the prompts came from the cache as it was recorded\n",
                percent(n, traffic.prompt_tokens)
            ),
            None => "\nrecorded without a prefix cache\n".to_owned(),
        })?;
    }
    if recorded {
        output::print(&format!(
            "\n{per_round:.2} tokens a round were recorded; decode is stated without drafts\n"
        ))?;
    }
    Ok(Outcome::Done)
}

/// What a trace says of its model must hold for this one. Traffic of another model with as many tokens is as good as its own,
/// its routing is not.
fn check(trace: &mut Trace, id: &str, config: &ModelConfig) -> anyhow::Result<()> {
    let vocab = config.vocab;
    if trace.vocab != 0 && trace.vocab != vocab {
        bail!("it was recorded with a vocabulary of {} tokens, the model has {vocab}", trace.vocab);
    }
    for (n, r) in trace.requests.iter().enumerate() {
        if let Some(token) = r.prompt.iter().chain(&r.output).find(|id| u64::from(**id) >= vocab) {
            bail!("token {token} of request {} is beyond the vocabulary of {vocab}", n + 1);
        }
    }
    let (layers, experts) = match &config.ffn {
        Ffn::Moe(m) => (config.layers.len(), m.experts),
        Ffn::Dense { .. } => (0, 0),
    };
    let known = |e: &u32| u64::from(*e) < experts;
    let routing = &trace.routing;
    // A call that failed leaves its layers to the next one.
    let long = routing.is_empty() || routing.iter().any(|r| r.len() == layers);
    let fits = long && routing.iter().flatten().flatten().flatten().all(known);
    let own = trace.model == id;
    if own && !fits {
        bail!("its routing names experts that the model does not have");
    }
    if !own && !trace.model.is_empty() || !fits {
        output::warn(&format!(
            "the trace was recorded with another model{}: its requests are used, its routing is not",
            if trace.model.is_empty() { String::new() } else { format!(" ({})", trace.model) }
        ));
        trace.routing.clear();
    }
    Ok(())
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1}", 100.0 * part as f64 / whole.max(1) as f64)
}

fn to_json(vram: u64, ram: u64, p: &Plan) -> Value {
    let t = &p.traffic;
    json!({
        "vram_mib": vram, "ram_mib": ram, "kv_bytes": p.kv, "expert_frames": p.frames.0, "experts": p.frames.1,
        "expert_hit_rate": { "lru": p.expert_hits[0], "engine": p.expert_hits[1], "optimum": p.expert_hits[2] },
        "decode_tokens_per_second": p.decode, "host_cache_bytes": p.host_cache, "requests": t.requests,
        "prompt_tokens": t.prompt_tokens, "cached_tokens": t.cached_tokens, "shared_tokens": t.shared_tokens,
        "cached_tokens_clairvoyant": p.clairvoyant.cached_tokens,
        "cached_tokens_bound": p.most_cached.min(t.shared_tokens),
        "cached_tokens_unlimited": p.unlimited.cached_tokens,
        "first_token_seconds": { "p50": t.first_token.0, "p95": t.first_token.1 },
        "queue_seconds": { "p50": t.queued.0, "p95": t.queued.1 }, "busy_seconds": t.busy, "span_seconds": t.span,
        "snapshots": t.snapshots.0, "snapshots_dropped": t.snapshots.1, "preemptions": t.preemptions,
    })
}

fn budget_json(target: Option<u8>, n: &Needed) -> Value {
    json!({
        "target_percent": target, "vram_mib": n.vram.div_ceil(1 << 20), "ram_mib": n.ram.div_ceil(1 << 20),
        "expert_frames": n.frames, "expert_hit_rate": n.expert_hit, "decode_tokens_per_second": n.decode,
        "host_cache_bytes": n.host_cache, "cached_tokens": n.cached,
    })
}

/// Sizes of a model from its directory alone.
fn sizes(directory: &Directory, config: &ModelConfig, kv: KvFormat) -> ModelSizes {
    let objects: HashMap<&str, u64> = directory.objects.iter().map(|o| (o.id.as_str(), o.bytes)).collect();
    let (mut dense, mut resident, mut bank, mut banks) = (0, 0, 0, 0);
    let mut seen = std::collections::HashSet::new();
    for (name, binding) in &directory.bindings {
        // Elements do not matter: each object counts once.
        for part in binding.parts(|_| 0) {
            let Some((id, n)) = objects.get_key_value(part.object.as_str()) else { continue };
            if !seen.insert(*id) {
                continue;
            }
            if name.starts_with("text/layers/") && name.contains("/moe/experts") {
                (bank, banks) = (bank + n, banks + 1);
            } else if name.starts_with("text/") {
                resident += n;
                dense += if name == "text/embed" { 0 } else { *n };
            } else if name.starts_with("mtp/") || name.starts_with("proposal/") {
                resident += n;
            }
        }
    }
    let experts = match &config.ffn {
        Ffn::Moe(m) if banks > 0 => (config.layers.len(), m.experts as usize, m.top_k as usize),
        _ => (0, 0, 0),
    };
    let g = &config.gdn;
    let channels = 2 * g.key_heads * g.key_dim + g.value_heads * g.value_dim;
    let gdn = config.layers.iter().filter(|k| **k == LayerKind::Gdn).count() as u64;
    let drafter = directory.components.contains_key("mtp");
    ModelSizes {
        dense,
        resident,
        layers: config.layers.len(),
        experts,
        expert: bank / ((experts.0 * experts.1) as u64).max(1),
        // The drafter runs unless a server is told otherwise.
        page: page_bytes(config, drafter, kv),
        state: gdn * 4 * (g.value_heads * g.key_dim * g.value_dim + channels * (g.conv_kernel - 1)),
    }
}
