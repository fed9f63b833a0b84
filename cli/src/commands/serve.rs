//! `infernix serve`: the model over HTTP.

use super::engine::{check_cache_file, drafter_runs, engine_options, start_engine};
use super::model::OpenModel;
use crate::args::{LoopGuard, ProgressMode, ServeArgs};
use crate::output::{self, Table, usage};
use crate::signals::Signals;
use crate::{INTERRUPTED, Outcome, SERVING};
use anyhow::Context as _;
use infernix_engine::model::page_bytes;
use infernix_engine::sched::{EngineApi, EngineOptions};
use infernix_engine::sim::MOST_KV;
use infernix_engine::state::PAGE_TOKENS;
use infernix_model::{Architecture, ModelConfig};
use infernix_serve::{ApiKey, App, BUDGET_MESSAGE, LogOptions, ModelInfo, ReasoningLoop, ServeOptions};
use infernix_text::{ChatFormat, EFFORTS, Family, Sampling};
use serde_json::Value;
use std::io::IsTerminal as _;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::net::TcpSocket;

/// Context where neither the command line nor the model says less.
const DEFAULT_CONTEXT: usize = 32_768;
/// Agents send prompts of 20,000 tokens and more, and read files after that.
const AGENT_CONTEXT: usize = 65_536;
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// Within this time a second Ctrl-C means it.
const TWICE: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &ServeArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    serve(args, progress).map_err(|error| {
        let complaint = error.downcast_ref::<output::Usage>().map(ToString::to_string);
        let told =
            complaint.zip(args.config.as_ref()).and_then(|(text, file)| crate::config::blame(file, &text));
        told.map_or(error, usage)
    })
}

fn serve(args: &ServeArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    // Everything that can be wrong on the command line is found before a model is opened.
    let (addresses, loopback) = addresses(&args.http.host, args.http.port)?;
    let keys = keys(args)?;
    if !loopback && keys.is_empty() && !args.access.allow_no_auth {
        return Err(usage(format!(
            "{} is reachable from other machines: give keys (--api-key-file or INFERNIX_API_KEY), or say --allow-no-auth",
            args.http.host
        )));
    }
    let sampling = sampling(args)?;
    logging(args.log.log_level.as_deref())?;
    files(args)?;
    if args.http.max_requests_mib < args.http.max_request_mib {
        return Err(usage("--max-requests-mib must be at least --max-request-mib"));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("http")
        .enable_all()
        .build()
        .context("the HTTP threads cannot be started")?;
    // A port that is taken is found before a model is loaded; nobody can connect before it is.
    let (socket, admin) = {
        let _runtime = runtime.enter();
        let admin = admin_socket(args, !keys.is_empty())?;
        (bound(&addresses).with_context(|| cannot_listen(&args.http.host, args.http.port))?, admin)
    };
    let mut model_args = args.model.clone();
    if model_args.model.is_none() {
        model_args.model.clone_from(&args.config_model);
    }
    let open = OpenModel::new(&model_args, progress)?;
    let format = open.chat_format()?;
    let options = serve_options(args, keys, loopback, sampling, &format)?;
    let text =
        open.artifact.directory().components.get("text").context("the artifact has no text component")?;
    let config = ModelConfig::from_json(&Value::Object(text.config.clone()))?;
    let own = config.max_positions as usize;
    let context = args.max_context.unwrap_or(DEFAULT_CONTEXT.min(own));
    if context == 0 || context > own {
        return Err(usage(format!("--max-context must lie in 1..={own}, the model's own limit")));
    }
    let lanes = args.sched.max_concurrency as usize;
    let capacity = args.kv_capacity.unwrap_or(context * lanes);
    if capacity < context {
        return Err(usage(format!("--kv-capacity must be at least --max-context, {context}")));
    }
    if capacity > MOST_KV {
        return Err(usage(format!("--kv-capacity {capacity}: at most {MOST_KV} tokens are possible")));
    }
    if let Some(log) = &args.log.request_log_jsonl
        && model_args.model.as_ref().is_some_and(|model| model == log)
    {
        return Err(usage("--request-log-jsonl names the model's own file"));
    }
    let engine_options = engine_options(&args.sched, &args.spec, &open, context)?;
    let info = model_info(args, &open, &config);
    let page = page_bytes(&config, drafter_runs(&args.spec, &open), open.kv);
    let kv = (capacity.div_ceil(PAGE_TOKENS) + lanes) as u64 * page;
    output::note(&ledger(&open, kv, &engine_options, &options).to_string());
    for warning in format.tokenizer().warnings() {
        output::warn(warning);
    }
    if context < AGENT_CONTEXT {
        output::note(&format!(
            "context {context} tokens; coding agents want at least {AGENT_CONTEXT} (--max-context)"
        ));
    }
    // Caught from here on, so that none is lost between who heeds it now and who does when the server is ready.
    let signals = {
        let _inside = runtime.enter();
        Signals::new()
    };
    let engine = start_engine(&open, capacity, engine_options)?;
    if INTERRUPTED.load(Ordering::SeqCst) {
        anyhow::bail!("interrupted");
    }
    let id = info.id.clone();
    let handle = engine.clone();
    let app = App::new(Arc::new(engine) as Arc<dyn EngineApi>, Arc::new(format), info, options)
        .with_context(|| "the server cannot start (request log or grammars)")?;
    runtime.block_on(async {
        let listener =
            socket.listen(BACKLOG).with_context(|| cannot_listen(&args.http.host, args.http.port))?;
        let address = listener.local_addr().context("the address is not known")?;
        let admin = match admin {
            None => None,
            Some((socket, loopback)) => {
                let listener =
                    socket.listen(BACKLOG).context("the address of --admin cannot be listened on")?;
                let address = listener.local_addr().context("the address is not known")?;
                output::note(&format!("admin: http://{address}"));
                Some((listener, infernix_serve::admin_router(&app, loopback)))
            }
        };
        SERVING.store(true, Ordering::SeqCst);
        if INTERRUPTED.load(Ordering::SeqCst) {
            anyhow::bail!("interrupted");
        }
        output::note(&format!("{id} at http://{address}"));
        infernix_serve::serve(Arc::clone(&app), listener, admin, stop(&app, signals))
            .await
            .context("serving failed")
    })?;
    if let Some(problem) = handle.stop_problem() {
        output::warn(&problem);
    }
    output::note("stopped");
    // What still runs on its threads, such as a grammar that nobody waits for, keeps no server from its end.
    runtime.shutdown_background();
    Ok(Outcome::Done)
}

/// What `--host` and `--port` mean, and whether only this machine can reach it.
fn addresses(host: &str, port: u16) -> anyhow::Result<(Vec<SocketAddr>, bool)> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let found: Vec<SocketAddr> = match bare.parse::<IpAddr>() {
        Ok(ip) => vec![SocketAddr::new(ip, port)],
        Err(_) => (bare, port).to_socket_addrs().map_err(|e| usage(format!("--host {host}: {e}")))?.collect(),
    };
    if found.is_empty() {
        return Err(usage(format!("--host {host} names no address")));
    }
    let loopback = found.iter().all(|a| a.ip().is_loopback());
    Ok((found, loopback))
}

/// Files that are written much later: their folders must be there now, and nothing must contradict them.
fn files(args: &ServeArgs) -> anyhow::Result<()> {
    let cache = &args.sched.prefix_cache_file;
    for (flag, file) in [
        ("--prefix-cache-file", cache),
        ("--record-trace", &args.sched.record_trace),
        ("--request-log-jsonl", &args.log.request_log_jsonl),
    ] {
        let Some(file) = file else { continue };
        let folder = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if !folder.is_dir() || file.is_dir() || file.file_name().is_none() {
            return Err(usage(format!("{flag} {}: not a file in a folder that is there", file.display())));
        }
    }
    check_cache_file(cache.as_deref())?;
    if args.sched.no_prefix_cache && cache.is_some() {
        return Err(usage("--prefix-cache-file keeps what --no-prefix-cache forbids"));
    }
    Ok(())
}

fn cannot_listen(host: &str, port: u16) -> String {
    format!("{host}:{port} cannot be listened on; --port 0 takes a free one")
}

/// A socket at the first address that can be had.
fn bound(addresses: &[SocketAddr]) -> std::io::Result<TcpSocket> {
    let mut last = std::io::ErrorKind::AddrNotAvailable.into();
    for address in addresses {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let tried = socket.and_then(|socket| {
            // Connections of a server that has just stopped are no reason to wait; on Windows this would mean more.
            #[cfg(unix)]
            socket.set_reuseaddr(true)?;
            socket.bind(*address)?;
            Ok(socket)
        });
        match tried {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The socket of `--admin`, and whether only this machine reaches it.
fn admin_socket(args: &ServeArgs, keyed: bool) -> anyhow::Result<Option<(TcpSocket, bool)>> {
    let Some(text) = &args.http.admin else { return Ok(None) };
    let parts = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    let Some((host, port)) = parts.filter(|(host, _)| !host.is_empty()) else {
        return Err(usage(format!("--admin {text}: expected an address and a port, like 127.0.0.1:9090")));
    };
    let (addresses, loopback) = addresses(host, port)?;
    if !loopback && !keyed && !args.access.allow_no_auth {
        return Err(usage(format!(
            "--admin {text} is reachable from other machines: give keys, or say --allow-no-auth"
        )));
    }
    let socket = bound(&addresses).with_context(|| format!("--admin {text} cannot be listened on"))?;
    Ok(Some((socket, loopback)))
}

/// Sets up what the console says.
fn logging(level: Option<&str>) -> anyhow::Result<()> {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::prelude::*;
    let targets = match level {
        Some(level) => {
            // A word alone would be read as the name of a part of the program.
            let word = |part: &&str| !part.contains('=') && part.parse::<LevelFilter>().is_err();
            if let Some(word) = level.split(',').find(word) {
                return Err(usage(format!(
                    "--log-level {level}: {word:?} is neither a level (off, error, warn, info, debug, trace) nor NAME=LEVEL"
                )));
            }
            level.parse::<Targets>().map_err(|e| usage(format!("--log-level {level}: {e}")))?
        }
        // The variable belongs to every program, so what it says may be for others.
        None => std::env::var("RUST_LOG")
            .ok()
            .and_then(|level| level.parse().ok())
            .unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO)),
    };
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(colours)
        .with_target(false)
        .with_filter(targets);
    // Only a test could have set one before.
    let _ = tracing_subscriber::registry().with(layer).try_init();
    Ok(())
}

/// Keys of the file, the environment and the command line.
fn keys(args: &ServeArgs) -> anyhow::Result<Vec<ApiKey>> {
    let mut keys = Vec::new();
    if let Some(path) = &args.access.api_key_file {
        keys.extend(key_file(path)?);
    }
    if let Ok(key) = std::env::var("INFERNIX_API_KEY")
        && !key.trim().is_empty()
    {
        keys.push(ApiKey { name: "environment".to_owned(), key: key.trim().to_owned() });
    }
    for (i, key) in args.access.api_key.iter().enumerate() {
        if i == 0 {
            output::warn(
                "--api-key shows the key in process listings; --api-key-file or INFERNIX_API_KEY do not",
            );
        }
        keys.push(ApiKey { name: format!("argument-{}", i + 1), key: key.clone() });
    }
    if keys.iter().any(|k| k.key.is_empty()) {
        return Err(usage("a key must not be empty"));
    }
    Ok(keys)
}

fn key_file(path: &Path) -> anyhow::Result<Vec<ApiKey>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("{shown} cannot be read"))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode =
            std::fs::metadata(path).with_context(|| format!("{shown} cannot be read"))?.permissions().mode();
        if mode & 0o077 != 0 {
            output::warn(&format!("{shown} can be read by other users; `chmod 600` keeps its keys secret"));
        }
    }
    let mut keys = Vec::new();
    for (i, line) in text.lines().enumerate() {
        if line.trim_start().starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace();
        match (words.next(), words.next(), words.next()) {
            (None, ..) => {}
            (Some(key), None, _) => keys.push(ApiKey { name: format!("key-{}", i + 1), key: key.to_owned() }),
            (Some(name), Some(key), None) => keys.push(ApiKey { name: name.to_owned(), key: key.to_owned() }),
            _ => return Err(usage(format!("{shown}, line {}: expected KEY or NAME KEY", i + 1))),
        }
    }
    if keys.is_empty() {
        return Err(usage(format!("{shown} has no keys")));
    }
    Ok(keys)
}

/// Sampling flags, in their ranges.
fn sampling(args: &ServeArgs) -> anyhow::Result<Sampling> {
    let s = &args.sampling;
    let within = |name: &str, value: Option<f32>, low: f64, high: f64| match value.map(f64::from) {
        Some(v) if !(low..=high).contains(&v) => Err(usage(format!("--{name} must lie in {low}..={high}"))),
        value => Ok(value),
    };
    Ok(Sampling {
        temperature: within("temperature", s.temperature, 0.0, 100.0)?,
        top_p: within("top-p", s.top_p, 0.0, 1.0)?,
        top_k: s.top_k,
        min_p: within("min-p", s.min_p, 0.0, 1.0)?,
        presence_penalty: within("presence-penalty", s.presence_penalty, -2.0, 2.0)?,
        frequency_penalty: within("frequency-penalty", s.frequency_penalty, -2.0, 2.0)?,
        repetition_penalty: within("repetition-penalty", s.repetition_penalty, 1e-3, 100.0)?,
    })
}

fn serve_options(
    args: &ServeArgs,
    keys: Vec<ApiKey>,
    loopback: bool,
    sampling: Sampling,
    format: &ChatFormat,
) -> anyhow::Result<ServeOptions> {
    let ms = Duration::from_millis;
    let (h, a, n) = (&args.http, &args.access, &args.answers);
    if let Some(effort) = &n.reasoning_effort {
        if !EFFORTS.contains(&effort.as_str()) {
            return Err(usage(format!("--reasoning-effort must be one of {}", EFFORTS.join(", "))));
        }
        if format.accepted_effort(effort).is_none() {
            output::warn("the model's template has no efforts: --reasoning-effort changes nothing");
        }
    }
    Ok(ServeOptions {
        keys,
        share_prefix_across_keys: a.share_prefix_across_keys,
        cors: a.cors,
        allowed_hosts: a.allow_host.clone(),
        loopback,
        max_request_bytes: (h.max_request_mib as usize) << 20,
        max_bodies_bytes: (h.max_requests_mib as usize) << 20,
        max_connections: h.max_connections as usize,
        header_timeout: ms(h.header_timeout_ms),
        body_timeout: ms(h.body_timeout_ms),
        write_timeout: ms(h.write_timeout_ms),
        request_timeout: (h.request_timeout_ms > 0).then(|| ms(h.request_timeout_ms)),
        keep_alive: ms(h.keep_alive_ms),
        drain_timeout: ms(h.drain_timeout_ms),
        response_store_records: h.response_store_max_records,
        response_store_bytes: output::mib("--response-store-mib", h.response_store_mib as u64)? as usize,
        usage_chunk_choice: h.usage_chunk_choice,
        default_max_tokens: n.default_max_tokens,
        sampling,
        seed: args.sampling.seed,
        greedy: args.sampling.greedy,
        no_thinking: n.no_thinking,
        preserve_thinking: n.preserve_thinking,
        reasoning_effort: n.reasoning_effort.clone(),
        default_thinking_budget: n.default_thinking_budget,
        thinking_budget_message: n
            .thinking_budget_message
            .clone()
            .unwrap_or_else(|| BUDGET_MESSAGE.to_owned()),
        reasoning_loop: match n.reasoning_loop {
            LoopGuard::Off => ReasoningLoop::Off,
            LoopGuard::Stop => ReasoningLoop::Stop,
            LoopGuard::Conclude => ReasoningLoop::Conclude,
        },
        tolerant_tool_calls: n.tolerant_tool_calls,
        metrics_vllm: h.metrics_compat.is_some(),
        stats_interval: (args.log.log_stats_interval_ms > 0).then(|| ms(args.log.log_stats_interval_ms)),
        log: LogOptions {
            file: args.log.request_log_jsonl.clone(),
            max_bytes: args.log.request_log_max_mib.map(|n| n.saturating_mul(1 << 20)),
            keep: args.log.request_log_keep as usize,
        },
    })
}

fn model_info(args: &ServeArgs, open: &OpenModel, config: &ModelConfig) -> ModelInfo {
    let directory = open.artifact.directory();
    let name = directory.metadata.as_ref().and_then(|m| m.get("name")?.as_str()).map(str::to_owned);
    let mut by_format = std::collections::BTreeMap::<&str, u64>::new();
    let (mut bytes, mut parameters) = (0, 0);
    for object in &directory.objects {
        bytes += object.bytes;
        if let infernix_artifact::ObjectKind::Tensor { format, .. } = &object.kind {
            *by_format.entry(format).or_default() += object.elements();
            parameters += object.elements();
        }
    }
    let format = main_format(&by_format);
    ModelInfo {
        id: args
            .model_id
            .clone()
            .or(name)
            .or_else(|| Some(file_id(open.artifact.path().file_name()?.to_str()?)))
            .unwrap_or_else(|| config.architecture.model_type().to_owned()),
        vocabulary: config.vocab,
        trained_context: config.max_positions,
        embedding: config.hidden,
        parameters,
        bytes,
        format,
        // 35B-A3B is the mixture of this architecture with 2,048 columns.
        family: if config.architecture == Architecture::Qwen35Moe && config.hidden == 2048 {
            Family::Moe35b
        } else {
            Family::Standard
        },
    }
}

/// What a model is called by: the format of most of its quantized weights, as embeddings and what is small are never
/// quantized; of all where none are. `weights` counts them by format.
fn main_format(weights: &std::collections::BTreeMap<&str, u64>) -> String {
    let most = weights.iter().max_by_key(|(name, n)| (!matches!(**name, "bf16" | "fp16" | "fp32"), **n));
    most.map_or_else(String::new, |(name, _)| (*name).to_owned())
}

/// An artifact's name without what splitting, the file's kind and the cache of conversions add to it.
fn file_id(name: &str) -> String {
    let base = infernix_artifact::names::plain_name(name);
    let stem = base.strip_suffix(".infernix").or_else(|| base.strip_suffix(".ninfer")).unwrap_or(&base);
    let digest = |tail: &str| tail.len() == 12 && tail.bytes().all(|b| b.is_ascii_hexdigit());
    match stem.rsplit_once('-') {
        Some((front, tail)) if !front.is_empty() && digest(tail) => front.to_owned(),
        _ => stem.to_owned(),
    }
}

/// RAM that the server will use at most, each term with the flag that changes it.
fn ledger(open: &OpenModel, kv: u64, engine: &EngineOptions, options: &ServeOptions) -> Table {
    let weights: u64 = open.artifact.directory().objects.iter().map(|o| o.bytes).sum();
    let cached = |bytes: u64| if engine.cache.enabled { bytes } else { 0 };
    let terms = [
        ("weights, mapped from the artifact", weights, "another recipe"),
        ("keys and values", kv, "--max-context, --max-concurrency, --kv-capacity, --kv-dtype, --spec"),
        ("cached state snapshots, at most", cached(engine.cache.device_bytes), "--prefix-cache-device-mib"),
        ("cached prefixes, at most", cached(engine.cache.host_bytes), "--prefix-cache-mib"),
        ("stored responses, at most", options.response_store_bytes as u64, "--response-store-mib"),
        ("request bodies, at most", options.max_bodies_bytes as u64, "--max-requests-mib"),
    ];
    let mut table = Table::new(&["RAM for", "bytes", "<changed by"]);
    for (what, bytes, flag) in terms {
        table.row([what.to_owned(), output::bytes(bytes), flag.to_owned()]);
    }
    let sum = terms.iter().map(|t| t.1).sum();
    table.row(["together, at most".to_owned(), output::bytes(sum), String::new()]);
    table
}

/// Ends when the server is to stop: SIGTERM, or two Ctrl-C within five seconds. A third ends the process at once.
async fn stop(app: &App, signals: std::io::Result<Signals>) {
    let Ok(mut signals) = signals else {
        output::warn("signals cannot be caught here: the process can only be killed");
        return std::future::pending().await;
    };
    let mut first: Option<Instant> = None;
    while !signals.next().await {
        if first.is_some_and(|at| at.elapsed() < TWICE) {
            break;
        }
        first = Some(Instant::now());
        output::note(&format!(
            "{} running; Ctrl-C again within 5 s to finish them, save the cache and stop",
            output::counted(app.active_requests() as u64, "request")
        ));
    }
    output::note("stopping; Ctrl-C once more ends at once without saving");
    tokio::spawn(async move {
        while signals.next().await {}
        std::process::exit(130);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantized_model_is_called_by_its_quantized_weights() {
        // The bundled demo's counts.
        let demo = [
            ("bf16", 9_856_017),
            ("nvfp4_mul", 4_194_304),
            ("fp8_e4m3fn_block128_f32", 524_288),
            ("fp32", 816),
        ];
        assert_eq!(main_format(&demo.into()), "nvfp4_mul");
        assert_eq!(main_format(&[("bf16", 10), ("fp32", 1)].into()), "bf16");
        assert_eq!(main_format(&[].into()), "");
    }

    #[test]
    fn a_model_without_a_name_is_called_as_its_file() {
        for (file, id) in [
            ("qwen.infernix", "qwen"),
            ("qwen-3.8.ninfer", "qwen-3.8"),
            ("big-00001-of-00004.infernix", "big"),
            ("flash-demo-nvfp4-29f53759e154.infernix", "flash-demo-nvfp4"),
            ("29f53759e154.infernix", "29f53759e154"),
        ] {
            assert_eq!(file_id(file), id);
        }
    }
}
