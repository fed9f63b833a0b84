//! `infernix fetch`: a repository into the Hugging Face cache.

use crate::args::{FetchArgs, ProgressMode};
use crate::output::{self, counted, usage};
use crate::progress::Reporter;
use crate::{INTERRUPTED, Outcome};
use infernix_checkpoint::hf_cache;
use infernix_convert::Progress as _;
use infernix_fetch::{DEFAULT_ENDPOINT, FetchOptions, Progress, fetch};
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest silence of a connection, and attempts without a new byte.
const STALL: Duration = Duration::from_secs(30);
const ATTEMPTS: u32 = 8;

pub(crate) fn run(args: &FetchArgs, mode: ProgressMode) -> anyhow::Result<Outcome> {
    let (repo, revision) = args.repo.split_once('@').unwrap_or((&args.repo, "main"));
    if !hf_cache::valid_repo(repo) {
        return Err(usage(format!("{repo:?} is not a repository name; expected ORG/NAME")));
    }
    let variable =
        |name: &str| std::env::var(name).ok().map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
    let hub = args.cache_dir.clone().or_else(hf_cache::hub);
    let options = FetchOptions {
        repo: repo.into(),
        revision: revision.into(),
        include: args.include.clone(),
        exclude: args.exclude.clone(),
        endpoint: variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.into()),
        token: variable("HF_TOKEN"),
        hub: hub.ok_or_else(|| usage("no cache folder is known; set HF_HUB_CACHE or give --cache-dir"))?,
        parallel: args.parallel,
        allow_http: args.allow_http,
        stall: STALL,
        attempts: ATTEMPTS,
    };
    let counts = Progress::default();
    let done = AtomicBool::new(false);
    let clock = Instant::now();
    let result = std::thread::scope(|scope| {
        scope.spawn(|| show(&counts, &done, mode));
        let result = fetch(&options, &counts, &INTERRUPTED);
        done.store(true, Ordering::Relaxed);
        result
    });
    let f = result?;
    if args.json.json {
        output::print_json(&json!({
            "schema_version": 1, "repo": repo, "revision": revision, "commit": f.commit, "folder": f.folder,
            "files": f.files, "bytes": f.bytes, "kept_bytes": f.kept, "received_bytes": f.received,
            "resumed_connections": f.resumed, "seconds": clock.elapsed().as_secs_f64(),
        }))?;
        return Ok(Outcome::Done);
    }
    output::note(&format!(
        "{} of {}: {} received, {} were here already",
        counted(f.files as u64, "file"),
        f.commit,
        counted(f.received, "byte"),
        counted(f.kept, "byte")
    ));
    output::print(&format!("{}\n", f.folder.display()))?;
    Ok(Outcome::Done)
}

fn show(counts: &Progress, done: &AtomicBool, mode: ProgressMode) {
    let reporter = Reporter::new(mode);
    let (mut total, mut shown) = (0, 0);
    while !done.load(Ordering::Relaxed) {
        let now = counts.total.load(Ordering::Relaxed);
        if now != total {
            total = now;
            shown = 0;
            reporter.begin("fetching", total);
        }
        let have = counts.kept.load(Ordering::Relaxed) + counts.received.load(Ordering::Relaxed);
        if have > shown {
            reporter.advance(have - shown);
            shown = have;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
