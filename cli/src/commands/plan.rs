//! `infernix plan`: what a machine would do with a traffic.

use super::convert::with_version;
use super::model::OpenModel;
use crate::Outcome;
use crate::args::{PlanArgs, ProgressMode};
use crate::output::{self, Table, bytes, grouped, usage};
use anyhow::Context as _;
use infernix_artifact::Directory;
use infernix_engine::model::{ArtifactSource, WeightSource as _};
use infernix_engine::sim::{Machine, ModelSizes, Needed, Plan, Synthetic, Trace, needed, plan};
use infernix_engine::state::{KvFormat, PAGE_TOKENS};
use infernix_model::{Ffn, LayerKind, ModelConfig};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::sync::Arc;

pub(crate) fn run(args: &PlanArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    for (flag, value) in
        [("link", args.link), ("bandwidth", args.bandwidth), ("prefill-rate", args.prefill_rate)]
    {
        if !value.is_finite() || value <= 0.0 {
            return Err(usage(format!("--{flag} must be above 0")));
        }
    }
    let open = OpenModel::new(&args.model, progress)?;
    let source = ArtifactSource::new(Arc::clone(&open.artifact))?;
    let model = sizes(open.artifact.directory(), source.config(), open.kv);
    let trace = match &args.trace {
        Some(path) => {
            let file = File::open(path).with_context(|| format!("{} cannot be opened", path.display()))?;
            Trace::read(BufReader::new(file)).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))?
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
        prefill_chunk: args.prefill_chunk.max(1),
        lanes: args.max_concurrency as usize,
        kv_tokens: args.kv_capacity,
        snapshots: args.prefix_cache_device_mib.saturating_mul(1 << 20),
    };
    let mut plans = Vec::new();
    for vram in &args.vram_mib {
        for ram in &args.ram_mib {
            let (own, host) = (vram.saturating_mul(1 << 20), ram.saturating_mul(1 << 20));
            let machine = Machine { vram: own, ram: host, ..machine };
            plans.push((*vram, *ram, plan(&model, &machine, &trace)?));
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
    let attention = config.layers.iter().filter(|k| **k == LayerKind::Attention).count() as u64;
    let a = &config.attention;
    // Codes, and for int8 an FP16 scale for each 64 of them.
    let row = match kv {
        KvFormat::Int8 => a.head_dim + a.head_dim / 32,
        KvFormat::F32 => 4 * a.head_dim,
        KvFormat::Bf16 => 2 * a.head_dim,
    };
    let g = &config.gdn;
    let channels = 2 * g.key_heads * g.key_dim + g.value_heads * g.value_dim;
    let gdn = config.layers.len() as u64 - attention;
    ModelSizes {
        dense,
        resident,
        layers: config.layers.len(),
        experts,
        expert: bank / ((experts.0 * experts.1) as u64).max(1),
        page: attention * 2 * a.kv_heads * row * PAGE_TOKENS as u64,
        state: gdn * 4 * (g.value_heads * g.key_dim * g.value_dim + channels * (g.conv_kernel - 1)),
    }
}
