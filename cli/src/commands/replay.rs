//! `infernix replay`: the agent workload against one or several servers.

use super::load::api_key;
use crate::args::{Profile, RecordArgs, ReplayArgs, ReplayMode, TextsArg};
use crate::output::{self, usage};
use crate::{INTERRUPTED, Outcome};
use anyhow::{Context as _, bail};
use infernix_measure::bench::machine::Machine;
use infernix_measure::replay::record::{self, Texts};
use infernix_measure::replay::{
    Arm, Budget, Corpus, FULL_CONTEXT, MAX_CONTEXT, MIN_CONTEXT, Plan, PlanOptions, Played, Report, Row, Run,
    RunOptions, Server, Target, agentic, page, play, proxy,
};
use serde_json::json;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Files of a run's folder, beside the folders of its arms.
const REPORTS: [&str; 3] = ["summary.json", "report.md", "report.html"];

pub(crate) fn run(args: &ReplayArgs) -> anyhow::Result<Outcome> {
    if let Some(ReplayMode::Record(args)) = &args.mode {
        return record(args);
    }
    const SENT: [&str; 6] = ["temperature", "top_p", "top_k", "seed", "tool_choice", "max_tokens"];
    if let Some(field) = args.omit.iter().find(|f| !SENT.contains(&f.as_str())) {
        return Err(usage(format!("--omit {field}: these can be left out: {}", SENT.join(", "))));
    }
    if !(scale(args) > 0.0 && scale(args) <= 4.0) {
        return Err(usage("--scale must lie above 0 and at most at 4"));
    }
    let arms = arms(args)?;
    let key = api_key(args.api_key_file.as_deref())?;
    let stored = stored(args)?;
    let seeds: Vec<u64> = match &stored {
        Some(plan) => vec![plan.seed],
        None if args.seed_list.is_empty() => (42..42 + args.seeds).collect(),
        None => args.seed_list.clone(),
    };
    if let Some(twice) = seeds.iter().enumerate().find(|(i, s)| seeds[..*i].contains(s)) {
        return Err(usage(format!("--seed-list names {} twice", twice.1)));
    }
    if let Some(out) = &args.out {
        if !args.dry_run {
            spare_another_run(out)?;
        }
        std::fs::create_dir_all(out).with_context(|| format!("{}: creating the folder", out.display()))?;
    }
    let budget = Budget { ram_mib: args.ram_budget_mib, vram_mib: args.vram_budget_mib };
    let mut context = stored.as_ref().map(|plan| plan.context).or(args.context);
    let is_stored = stored.is_some();
    let mut plans: Option<Vec<Plan>> = stored.map(|plan| vec![plan]);
    if args.dry_run {
        let plans = plans.map_or_else(|| make_plans(args, &seeds, context.unwrap_or(FULL_CONTEXT)), Ok)?;
        return dry_run(args, &plans);
    }
    if let (None, Some(wanted)) = (&plans, context) {
        // A context that no plan has is refused before a server is started.
        plans = Some(make_plans(args, &seeds, wanted)?);
    }
    // All seeds of an arm in one life of its server, arm by arm; the first arm once more for --aba.
    let mut order: Vec<&Arm> = arms.iter().collect();
    if args.aba {
        order.push(&arms[0]);
    }
    let mut played = Vec::new();
    // What was played is reported, whatever ends the rest: an arm that does not start, Ctrl-C, a disk that fills up. Why an
    // arm did not play to its end is in the report, what this machine could not do is not.
    let mut failure = None;
    for (i, arm) in order.iter().enumerate() {
        if INTERRUPTED.load(std::sync::atomic::Ordering::Relaxed) {
            break;
        }
        output::note(&format!("{}: starting", arm.name));
        let folder = args.out.as_ref().map(|o| o.join(format!("{}-{}", i + 1, file_name(&arm.name))));
        if let Some(f) = &folder {
            std::fs::create_dir_all(f).with_context(|| format!("{}: creating the folder", f.display()))?;
        }
        let log = folder.as_ref().map(|f| f.join("serve.log"));
        let patience = Duration::from_secs(args.load_timeout);
        let server = match Server::start(arm, key.clone(), log.as_deref(), budget, patience, &INTERRUPTED) {
            Ok(server) => server,
            Err(e) => {
                output::warn(&e.to_string());
                played.extend(seeds.iter().map(|&seed| not_played(arm, seed, e.to_string())));
                continue;
            }
        };
        let limit = server.endpoint.context_limit().map(|l| usize::try_from(l).unwrap_or(FULL_CONTEXT));
        if let Some(what) = server.exceeded() {
            // What it says of its context, if it still said anything, is no limit of a plan.
            played.extend(seeds.iter().map(|&seed| {
                let none = not_played(arm, seed, String::new());
                Played { exceeded: Some(what.to_owned()), peak_ram_mib: server.peak_ram_mib(), ..none }
            }));
            continue;
        }
        // The first server's limit holds for all: every arm gets the same plan.
        let wanted = *context.get_or_insert(limit.unwrap_or(FULL_CONTEXT).min(FULL_CONTEXT));
        if let Some(limit) = limit.filter(|l| *l < wanted) {
            if is_stored {
                // A recorded plan counts on more than its texts may need.
                output::warn(&format!("{} holds {limit} tokens, the plan counts on {wanted}", arm.name));
            } else {
                let why = format!("{} holds {limit} tokens; give --context {limit} or less", arm.name);
                if played.is_empty() {
                    return Err(usage(why));
                }
                // What other arms played took hours.
                output::warn(&why);
                played.extend(seeds.iter().map(|&seed| not_played(arm, seed, why.clone())));
                continue;
            }
        }
        if plans.is_none() {
            plans = Some(make_plans(args, &seeds, wanted)?);
        }
        for plan in plans.iter().flatten() {
            let one = play_one(args, arm, &server, plan);
            if let Some(folder) = &folder
                && let Err(e) = write_rows(&folder.join(format!("seed-{}", plan.seed)), arm, plan, &one.run)
            {
                output::warn(&output::error_text(&e));
                failure.get_or_insert(e);
            }
            let stopped = one.run.ended.is_some() || one.exceeded.is_some();
            played.push(one);
            if stopped {
                // Its server is gone, or nobody waits for it.
                break;
            }
        }
    }
    if played.is_empty() {
        bail!("interrupted before anything was played");
    }
    let report = Report {
        command: output::command_line(),
        plans: plans.unwrap_or_default(),
        played,
        omitted: args.omit.clone(),
        machine: Machine::this(),
    };
    let outcome = finish(args, &report)?;
    failure.map_or(Ok(outcome), Err)
}

/// Refuses a folder that holds another run, whose files would stand beside those of this one.
fn spare_another_run(out: &Path) -> anyhow::Result<()> {
    let Ok(entries) = std::fs::read_dir(out) else { return Ok(()) };
    for name in entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()) {
        // `1-NAME` is the folder of an arm; a server that was started and asked nothing left its output there alone.
        let arm = name.split_once('-').is_some_and(|(n, _)| n.parse::<usize>().is_ok());
        let mut seeds = std::fs::read_dir(out.join(&name)).into_iter().flatten().flatten();
        let played = arm && seeds.any(|e| e.file_name().to_string_lossy().starts_with("seed-"));
        if played || REPORTS.contains(&name.as_str()) {
            return Err(usage(format!(
                "--out {}: another run is there ({name}); name another folder",
                out.display()
            )));
        }
    }
    Ok(())
}

/// An arm that did not start.
fn not_played(arm: &Arm, seed: u64, why: String) -> Played {
    Played {
        arm: arm.name.clone(),
        model: String::new(),
        seed,
        run: Run { ended: Some(why), ..Run::default() },
        peak_ram_mib: None,
        peak_vram_mib: None,
        peak_sm_mhz: None,
        exceeded: None,
    }
}

fn record(args: &RecordArgs) -> anyhow::Result<Outcome> {
    let path = &args.output;
    // Before anything is recorded.
    record::check_place(path)?;
    let recorder = proxy::Recorder::bind(&args.upstream, args.listen)?;
    output::note(&format!(
        "set the agent's base URL to http://{}/v1; Ctrl-C ends the recording",
        recorder.address()
    ));
    let recorded = recorder.run(&INTERRUPTED, output::note)?;
    if recorded.is_empty() {
        bail!("no chat completion passed; nothing is written");
    }
    let texts = match args.texts {
        TextsArg::Keep => Texts::Keep,
        TextsArg::Hash => Texts::Hash,
        TextsArg::Synthesise => Texts::Synthesise,
    };
    let mut key = [0; 32];
    std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut key)).context("drawing a key")?;
    let name = file_part(&path.display().to_string());
    let plan = record::plan(name.trim_end_matches(".json"), &recorded, texts, key);
    if let Err(e) = record::save(path, &plan) {
        // What an agent did cannot be recorded once more.
        output::print(&format!("{}\n", serde_json::to_string(&plan)?))?;
        return Err(anyhow::Error::from(e).context("the scenario is printed instead"));
    }
    output::note(&format!("wrote {}", path.display()));
    let c = plan.counts();
    output::note(&format!(
        "{} sessions, {} requests; plan {}",
        plan.actors.len(),
        c.requests + c.aborted,
        plan.hash()
    ));
    Ok(Outcome::Done)
}

fn arms(args: &ReplayArgs) -> anyhow::Result<Vec<Arm>> {
    if args.arms.is_empty() {
        let program = std::env::current_exe().context("finding this program")?;
        let quote = |p: &Path| format!("'{}'", p.display().to_string().replace('\'', "'\\''"));
        let model = args.model.as_deref().map(quote).unwrap_or_default();
        let command = format!("exec {} serve {model} --port {{port}}", quote(&program));
        return Ok(vec![Arm { name: "infernix".into(), target: Target::Command(command) }]);
    }
    if args.model.is_some() {
        return Err(usage("--model is for a replay without --arms; put the model into the arm's command"));
    }
    let arms = args.arms.iter().map(|a| Arm::parse(a).map_err(|e| usage(e.to_string())));
    let arms = arms.collect::<anyhow::Result<Vec<_>>>()?;
    if let Some(twice) = arms.iter().enumerate().find(|(i, a)| arms[..*i].iter().any(|b| b.name == a.name)) {
        return Err(usage(format!("two arms are named {}", twice.1.name)));
    }
    Ok(arms)
}

fn scale(args: &ReplayArgs) -> f64 {
    match args.profile {
        Some(Profile::Quick) => 0.1,
        Some(Profile::Published) => 0.5,
        Some(Profile::Full) => 1.0,
        None => args.scale.unwrap_or(0.5),
    }
}

/// The plan of a scenario that is a file; `None` of the built-in one. What the plan fixes cannot be asked for otherwise.
fn stored(args: &ReplayArgs) -> anyhow::Result<Option<Plan>> {
    if args.scenario == "agentic_ab" {
        return Ok(None);
    }
    let path = PathBuf::from(&args.scenario);
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("{}: no scenario of this name, and no file", path.display()))?;
    let plan: Plan = serde_json::from_str(&text).with_context(|| format!("{}: no plan", path.display()))?;
    plan.check().map_err(|e| anyhow::anyhow!("{}: no plan: {e}", path.display()))?;
    let own_scale = f64::from(plan.scale_milli) / 1000.0;
    let scaled = args.profile.is_some() || args.scale.is_some();
    let other = [
        ("--profile or --scale", scaled && (scale(args) * 1000.0).round() != f64::from(plan.scale_milli)),
        ("--seeds", args.seeds != 1),
        ("--seed-list", !args.seed_list.is_empty() && args.seed_list != [plan.seed]),
        ("--context", args.context.is_some_and(|c| c != plan.context)),
        ("--corpus", args.corpus.is_some()),
    ];
    let other: Vec<&str> = other.iter().filter(|o| o.1).map(|o| o.0).collect();
    if other.is_empty() {
        return Ok(Some(plan));
    }
    Err(usage(format!(
        "{}: a stored plan has its own texts, seed {}, scale {own_scale} and context {}; leave out {}",
        path.display(),
        plan.seed,
        plan.context,
        other.join(", ")
    )))
}

fn make_plans(args: &ReplayArgs, seeds: &[u64], context: usize) -> anyhow::Result<Vec<Plan>> {
    if !(MIN_CONTEXT..=MAX_CONTEXT).contains(&context) {
        return Err(usage(format!("--context {context}: the scenario takes {MIN_CONTEXT} to {MAX_CONTEXT}")));
    }
    let corpus = match &args.corpus {
        Some(dir) => Corpus::folder(dir)?,
        None => Corpus::embedded()?,
    };
    Ok(seeds
        .iter()
        .map(|&seed| agentic(&corpus, PlanOptions { seed, scale: scale(args), context }))
        .collect())
}

fn dry_run(args: &ReplayArgs, plans: &[Plan]) -> anyhow::Result<Outcome> {
    let mut list = Vec::new();
    for plan in plans {
        if let Some(out) = &args.out {
            write_plan(&out.join(format!("seed-{}", plan.seed)), plan)?;
        }
        let c = plan.counts();
        let hash = plan.hash();
        if args.json.json {
            list.push(json!({
                "seed": plan.seed, "plan_hash": hash, "context": plan.context, "requests": c.requests,
                "main_continuing": c.main_continuing, "aborted": c.aborted,
            }));
            continue;
        }
        output::print(&format!(
            "seed {}: {} requests ({} aborted besides), {} of them continuing turns of the sessions; context {}; plan {hash}\n",
            plan.seed, c.requests, c.aborted, c.main_continuing, plan.context,
        ))?;
    }
    if args.json.json {
        output::print_json(&json!({ "schema_version": 1, "dry_run": true, "plans": list }))?;
    }
    Ok(Outcome::Done)
}

fn write_plan(folder: &Path, plan: &Plan) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("{}: creating the folder", folder.display()))?;
    let path = folder.join("plan.json");
    crate::target::write(&path, &serde_json::to_string(plan)?)
        .with_context(|| format!("{}: writing", path.display()))
}

fn play_one(args: &ReplayArgs, arm: &Arm, server: &Server, plan: &Plan) -> Played {
    let total = plan.counts().requests + plan.counts().aborted;
    let done = std::sync::atomic::AtomicUsize::new(0);
    let progress = |r: &Row| {
        let n = done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
        let what = match (r.failure(), r.first) {
            (Some(f), _) => f.to_string(),
            (None, _) if r.aborted => "broken off, as planned".into(),
            (None, Some(first)) => format!("{:.2} s to the first token", first - r.sent),
            (None, None) => "an answer without text".into(),
        };
        output::note(&format!("{} {n}/{total} {}#{} {}: {what}", arm.name, r.actor, r.index, r.class.name()));
    };
    let timeout = Duration::from_secs(args.timeout);
    let options = RunOptions { timeout, interrupted: &INTERRUPTED, omit: &args.omit, progress: &progress };
    let run = play(plan, &server.endpoint, options);
    Played {
        arm: arm.name.clone(),
        model: server.endpoint.shown_model().to_owned(),
        seed: plan.seed,
        run,
        peak_ram_mib: server.peak_ram_mib(),
        peak_vram_mib: server.peak_vram_mib(),
        peak_sm_mhz: server.peak_sm_mhz(),
        exceeded: server.exceeded().map(str::to_owned),
    }
}

/// The plan and the rows of one run.
fn write_rows(folder: &Path, arm: &Arm, plan: &Plan, run: &Run) -> anyhow::Result<()> {
    write_plan(folder, plan)?;
    let mut lines: Vec<String> = run.rows.iter().map(|r| r.to_json(&arm.name).to_string()).collect();
    lines.extend(run.notes.iter().map(|n| {
        json!({ "arm": arm.name, "actor": n.actor, "event": n.event, "messages": n.messages }).to_string()
    }));
    let text: String = lines.into_iter().map(|line| line + "\n").collect();
    output::write_report(&folder.join("client.jsonl"), &text)
}

fn finish(args: &ReplayArgs, report: &Report) -> anyhow::Result<Outcome> {
    let document = report.to_json();
    if args.json.json {
        output::print_json(&document)?;
    } else {
        output::print(&report.to_markdown())?;
    }
    if let Some(out) = &args.out {
        let texts = [format!("{document:#}\n"), report.to_markdown(), page::html(report)];
        for (name, text) in REPORTS.iter().zip(texts) {
            output::write_report(&out.join(name), &text)?;
        }
    }
    for reason in report.invalid() {
        output::error(&format!("the run does not count: {reason}"));
    }
    Ok(if report.invalid().is_empty() { Outcome::Done } else { Outcome::Mismatch })
}

fn file_part(path: &str) -> String {
    Path::new(path).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

fn file_name(arm: &str) -> String {
    arm.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' }).collect()
}
