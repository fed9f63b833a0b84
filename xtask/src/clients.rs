//! `cargo xtask clients`: real clients against the server.
//!
//! Nothing of the clients is part of the repository: they are installed into a scratch folder by their own package
//! managers. Each turn gets an empty work folder, its own home and a time limit.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::synth::Failure;

const USAGE: &str = "\
usage: cargo xtask clients [OPTIONS] [CLIENT...]

Drives real clients against a server: a text turn and a tool turn each. Without CLIENTs all that apply.
Clients: py-openai py-anthropic js-openai js-anthropic types openapi page evaluation lm-eval codex claude qwen constraints
A client whose tools (python3, node and npm, chromium, a package registry) are not there is skipped, with the reason.

  --short           neither agents nor lm-eval: what CI runs
  --base URL        a running server; without it the scripted one is started (cargo run --example scripted)
  --model NAME      the server's model (default probe-model)
  --demo            the server runs the demo model: only shapes are checked, and agents, whose prompts are longer
                    than its context, must say so in their own words
  --scratch DIR     where clients are installed (default target/clients)
  --count N         answers of `constraints` (default 500, 20 with --short)
  --keep DIR        keep the outputs of every turn";

/// What the server is asked with; the scripted server answers to these words.
const TEXT: &str = "Say that the probe is done.";
const TOOL: &str = "PROBE-TOOL: run the command echo probe-ok, then say that the probe is done.";
/// Longest turn.
const LIMIT: Duration = Duration::from_secs(120);

const NPM: &[&str] = &["openai@7.59.0", "@anthropic-ai/sdk@1.14.0", "puppeteer-core@24"];
/// Programs of other makers, run as they are and only where asked for.
const AGENTS: &[&str] =
    &["@openai/codex@0.171.0", "@qwen-code/qwen-code@0.15.10", "@anthropic-ai/claude-code@2.1.197"];
const PIP: &[&str] = &["openai==3.57.0", "anthropic==2.14.0", "jsonschema==4.26.0", "schemathesis==4.32.5"];
/// What lm-eval needs for models behind an address: neither torch nor transformers, which its own list would bring.
const LM_EVAL: &[&str] = &[
    "aiohttp",
    "datasets",
    "dill",
    "evaluate",
    "jinja2",
    "jsonlines",
    "more_itertools",
    "numpy",
    "pytablewriter",
    "requests",
    "rouge-score",
    "sacrebleu",
    "scikit-learn",
    "sqlitedict",
    "tenacity",
    "tqdm",
    "typing_extensions",
    "word2number",
    "zstandard",
];
const LM_EVAL_ITSELF: &[&str] = &["--no-deps", "lm_eval==0.4.13"];
const AGENT_NAMES: [&str; 3] = ["codex", "claude", "qwen"];
/// Clients with one turn of their own.
const SINGLE: [&str; 6] = ["page", "evaluation", "constraints", "types", "openapi", "lm-eval"];
/// How they say that a prompt is longer than the context.
const TOO_LONG: [&str; 3] = ["prompt is too long", "context window", "context holds"];

#[derive(Debug, Default)]
struct Options {
    short: bool,
    demo: bool,
    base: Option<String>,
    model: Option<String>,
    scratch: Option<PathBuf>,
    count: Option<u32>,
    keep: Option<PathBuf>,
    only: Vec<String>,
}

fn failed(message: impl Into<String>) -> Failure {
    Failure::Failed(message.into())
}

pub(crate) fn run(args: &[String]) -> Result<(), Failure> {
    let options = parse(args)?;
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or_else(|| failed("no workspace"))?.to_path_buf();
    let scratch = options.scratch.clone().unwrap_or_else(|| root.join("target/clients"));
    std::fs::create_dir_all(&scratch).map_err(|e| failed(format!("{}: {e}", scratch.display())))?;
    let scratch = scratch.canonicalize().map_err(|e| failed(e.to_string()))?;
    let mut clients: Vec<&str> = vec![
        "py-openai",
        "py-anthropic",
        "js-openai",
        "js-anthropic",
        "types",
        "openapi",
        "page",
        "evaluation",
    ];
    if !options.short {
        clients.push("lm-eval");
        clients.extend(AGENT_NAMES);
    }
    if options.demo {
        clients.push("constraints");
    }
    if !options.only.is_empty() {
        clients = options.only.iter().map(String::as_str).collect();
    }
    let started = Instant::now();
    let (base, _server) = match &options.base {
        Some(base) => (base.trim_end_matches('/').to_owned(), None),
        None => {
            let (base, server) = scripted(&root)?;
            (base, Some(server))
        }
    };
    let driver = Driver { options: &options, root, scratch, base };
    let mut missing = Missing::default();
    let (mut bad, mut skipped) = (0, 0);
    for client in clients {
        match driver.missing(client, &mut missing) {
            None => bad += driver.client(client)?,
            Some(reason) => {
                skipped += 1;
                println!("SKIP {client}: {reason}");
            }
        }
    }
    println!("{bad} turns failed, {skipped} clients skipped, {:.0} s", started.elapsed().as_secs_f64());
    if bad == 0 { Ok(()) } else { Err(failed(format!("{bad} turns failed"))) }
}

fn parse(args: &[String]) -> Result<Options, Failure> {
    let mut options = Options::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value =
            || args.next().cloned().ok_or_else(|| Failure::Usage(format!("{arg} needs a value\n\n{USAGE}")));
        match arg.as_str() {
            "--short" => options.short = true,
            "--demo" => options.demo = true,
            "--base" => options.base = Some(value()?),
            "--model" => options.model = Some(value()?),
            "--scratch" => options.scratch = Some(value()?.into()),
            "--keep" => options.keep = Some(value()?.into()),
            "--count" => {
                let text = value()?;
                options.count =
                    Some(text.parse().map_err(|_| Failure::Usage(format!("--count {text}: not a number")))?);
            }
            name if !name.starts_with('-') => options.only.push(name.to_owned()),
            _ => return Err(Failure::Usage(USAGE.to_owned())),
        }
    }
    Ok(options)
}

/// Why tools are not there, each asked for once.
#[derive(Default)]
struct Missing(std::collections::BTreeMap<&'static str, Option<String>>);

impl Missing {
    fn of(&mut self, tool: &'static str, find: impl FnOnce() -> Result<(), Failure>) -> Option<String> {
        self.0
            .entry(tool)
            .or_insert_with(|| match find() {
                Ok(()) => None,
                Err(Failure::Failed(why) | Failure::Usage(why)) => {
                    Some(format!("no {tool}: {}", first_lines(&why)))
                }
            })
            .clone()
    }
}

/// Enough of a message to know what happened.
fn first_lines(text: &str) -> String {
    text.lines().filter(|l| !l.trim().is_empty()).take(3).collect::<Vec<_>>().join(" | ")
}

/// A virtual environment of this name with these packages; a second call finds everything there.
fn python(scratch: &Path, name: &str, lists: &[&[&str]]) -> Result<(), Failure> {
    let stamp = scratch.join(format!("{name}.installed"));
    let wanted = format!("{lists:?}");
    if std::fs::read_to_string(&stamp).is_ok_and(|there| there == wanted) {
        return Ok(());
    }
    let program = scratch.join(name).join("bin/python");
    if !program.exists() {
        quiet(Command::new("python3").args(["-m", "venv", name]).current_dir(scratch))?;
    }
    for list in lists {
        let flags = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        quiet(Command::new(&program).args(flags).args(*list))?;
    }
    std::fs::write(stamp, wanted).map_err(|e| failed(e.to_string()))
}

/// The same for Node's packages.
fn node(scratch: &Path, packages: &[&str]) -> Result<(), Failure> {
    quiet(Command::new("node").arg("--version"))?;
    let stamp = scratch.join("installed");
    let there = std::fs::read_to_string(&stamp).unwrap_or_default();
    if packages.iter().all(|p| there.lines().any(|line| line == *p)) {
        return Ok(());
    }
    if !scratch.join("package.json").exists() {
        std::fs::write(scratch.join("package.json"), "{\"private\": true}\n")
            .map_err(|e| failed(e.to_string()))?;
    }
    quiet(
        Command::new("npm")
            .args(["install", "--no-audit", "--no-fund", "--loglevel=error"])
            .args(packages)
            .current_dir(scratch),
    )?;
    std::fs::write(stamp, there + &packages.join("\n") + "\n").map_err(|e| failed(e.to_string()))
}

/// Runs a command whose output matters only if it fails.
fn quiet(command: &mut Command) -> Result<(), Failure> {
    let output = command.output().map_err(|e| failed(format!("{command:?}: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(format!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr))))
}

/// A child that ends with its owner.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn scripted(root: &Path) -> Result<(String, Server), Failure> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    quiet(
        Command::new(&cargo)
            .args(["build", "--quiet", "-p", "infernix-serve", "--example", "scripted"])
            .current_dir(root),
    )?;
    let child = Command::new(&cargo)
        .args(["run", "--quiet", "-p", "infernix-serve", "--example", "scripted"])
        .current_dir(root)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| failed(format!("the scripted server: {e}")))?;
    let mut server = Server(child);
    let mut line = String::new();
    let out = server.0.stdout.take().ok_or_else(|| failed("the scripted server has no output"))?;
    BufReader::new(out).read_line(&mut line).map_err(|e| failed(e.to_string()))?;
    if !line.starts_with("http://") {
        return Err(failed("the scripted server did not start"));
    }
    Ok((line.trim().to_owned(), server))
}

struct Driver<'o> {
    options: &'o Options,
    root: PathBuf,
    scratch: PathBuf,
    base: String,
}

impl Driver<'_> {
    /// Why a client cannot be run here.
    fn missing(&self, client: &str, missing: &mut Missing) -> Option<String> {
        let scratch = &self.scratch;
        match client {
            "lm-eval" => {
                missing.of("lm-eval", || python(scratch, "venv-lm-eval", &[LM_EVAL, LM_EVAL_ITSELF]))
            }
            "page" => missing.of("npm packages", || node(scratch, NPM)).or_else(|| {
                let browser = std::env::var("CHROMIUM").unwrap_or_else(|_| "/usr/bin/chromium".to_owned());
                missing.of("chromium", || quiet(Command::new(browser).arg("--version")))
            }),
            _ if client.starts_with("js-") => missing.of("npm packages", || node(scratch, NPM)),
            _ if AGENT_NAMES.contains(&client) => missing.of("agents", || node(scratch, AGENTS)),
            _ => missing.of("python packages", || python(scratch, "venv", &[PIP])),
        }
    }

    /// Runs a client's turns; gives the number of those that failed.
    fn client(&self, client: &str) -> Result<u32, Failure> {
        let script = |name: &str| self.root.join("tests/clients").join(name);
        let python = self.scratch.join("venv/bin/python");
        let bin = |name: &str| self.scratch.join("node_modules/.bin").join(name);
        let mut bad = 0;
        let turns: &[&str] = if SINGLE.contains(&client) { &["turn"] } else { &["text", "tool"] };
        for &turn in turns {
            let words = if turn == "tool" { TOOL } else { TEXT };
            let mut command = match client {
                "py-openai" => with(&python, &[&script("openai_sdk.py"), Path::new(turn)]),
                "py-anthropic" => with(&python, &[&script("anthropic_sdk.py"), Path::new(turn)]),
                "js-openai" => with(Path::new("node"), &[&script("openai_sdk.mjs"), Path::new(turn)]),
                "js-anthropic" => with(Path::new("node"), &[&script("anthropic_sdk.mjs"), Path::new(turn)]),
                "page" => with(Path::new("node"), &[&script("page.mjs")]),
                "types" => with(&python, &[&script("sdk_types.py")]),
                "openapi" => {
                    let file = self.root.join("docs/openapi.json");
                    let mut command = with(&self.scratch.join("venv/bin/st"), &[Path::new("run"), &file]);
                    let checks = "not_a_server_error,status_code_conformance,content_type_conformance,\
                                  response_schema_conformance";
                    let examples = if self.options.short { "10" } else { "50" };
                    command.args(["--url", &self.base, "--checks", checks, "--max-examples", examples]);
                    command.args(["--phases", "coverage,fuzzing", "--no-color"]);
                    command
                }
                "lm-eval" => {
                    with(&self.scratch.join("venv-lm-eval/bin/python"), &[&script("lm_eval_task.py")])
                }
                "evaluation" => with(&python, &[&script("evaluation.py")]),
                "constraints" => {
                    let count = self.options.count.unwrap_or(if self.options.short { 20 } else { 500 });
                    with(&python, &[&script("constraints.py"), Path::new(&count.to_string())])
                }
                "codex" => with(&bin("codex"), &["exec", "--skip-git-repo-check", words].map(Path::new)),
                "claude" => {
                    with(&bin("claude"), &["-p", "--dangerously-skip-permissions", words].map(Path::new))
                }
                "qwen" => {
                    with(&bin("qwen"), &["--auth-type", "openai", "--yolo", "-p", words].map(Path::new))
                }
                other => return Err(Failure::Usage(format!("there is no client {other:?}\n\n{USAGE}"))),
            };
            bad += u32::from(!self.turn(client, turn, &mut command)?);
        }
        Ok(bad)
    }

    fn turn(&self, client: &str, turn: &str, command: &mut Command) -> Result<bool, Failure> {
        let io = |e: std::io::Error| failed(format!("{client} {turn}: {e}"));
        let folder = self.scratch.join(format!("turn-{}-{client}-{turn}", std::process::id()));
        let work = folder.join("work");
        std::fs::create_dir_all(&work).map_err(io)?;
        let model = self.options.model.as_deref().unwrap_or("probe-model");
        if client == "codex" {
            let config = format!(
                "model = \"{model}\"\nmodel_provider = \"local\"\nmodel_context_window = 262144\n\
                 approval_policy = \"never\"\nsandbox_mode = \"danger-full-access\"\ncheck_for_update_on_startup = false\n\
                 [analytics]\nenabled = false\n[model_providers.local]\nname = \"local\"\nbase_url = \"{}/v1\"\n\
                 wire_api = \"responses\"\nenv_key = \"LOCAL_KEY\"\nrequest_max_retries = 0\nstream_max_retries = 0\n",
                self.base
            );
            std::fs::create_dir_all(folder.join(".codex")).map_err(io)?;
            std::fs::write(folder.join(".codex/config.toml"), config).map_err(io)?;
        }
        let (out, err) = (folder.join("out"), folder.join("err"));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut child = command
            .current_dir(&work)
            .env_clear()
            .env("PATH", path)
            .env("HOME", &folder)
            .envs([("LANG", "C.UTF-8"), ("TERM", "dumb"), ("NO_PROXY", "127.0.0.1,localhost")])
            .env("BASE", &self.base)
            .env("MODEL", model)
            .env("SCRIPTED", if self.options.demo { "0" } else { "1" })
            .env("NODE_MODULES", self.scratch.join("node_modules"))
            .env("LOCAL_KEY", "none")
            .env("ANTHROPIC_BASE_URL", &self.base)
            .envs([
                ("ANTHROPIC_AUTH_TOKEN", "none"),
                ("ANTHROPIC_MODEL", model),
                ("ANTHROPIC_SMALL_FAST_MODEL", model),
            ])
            .envs([("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"), ("DISABLE_AUTOUPDATER", "1")])
            .envs([("DISABLE_TELEMETRY", "1"), ("IS_SANDBOX", "1"), ("QWEN_TELEMETRY_ENABLED", "false")])
            .env("OPENAI_BASE_URL", format!("{}/v1", self.base))
            .envs([("OPENAI_API_KEY", "none"), ("OPENAI_MODEL", model)])
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&out).map_err(io)?)
            .stderr(std::fs::File::create(&err).map_err(io)?)
            .spawn()
            .map_err(|e| failed(format!("{command:?}: {e}")))?;
        // The random constraints take as many turns as they are asked for.
        let limit = match client {
            "constraints" => LIMIT * 60,
            "openapi" | "lm-eval" => LIMIT * 5,
            _ => LIMIT,
        };
        let started = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().map_err(io)? {
                break status.code();
            }
            if started.elapsed() > limit {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let said = std::fs::read_to_string(&out).unwrap_or_default();
        let complaint = std::fs::read_to_string(&err).unwrap_or_default();
        let passed = if self.options.demo && AGENT_NAMES.contains(&client) {
            let all = format!("{said}{complaint}").to_lowercase();
            TOO_LONG.iter().any(|words| all.contains(words))
        } else {
            let expected = !self.options.demo && !matches!(client, "evaluation" | "constraints" | "openapi");
            status == Some(0) && (!expected || said.to_lowercase().contains("probe"))
        };
        let mut report = format!(
            "{} {client} {turn} ({:.1} s)",
            if passed { "PASS" } else { "FAIL" },
            started.elapsed().as_secs_f64()
        );
        if !passed {
            let how = status.map_or("ran out of time".to_owned(), |code| format!("exit {code}"));
            let _ = write!(report, ": {how}\n{}\n{}", tail(&said), tail(&complaint));
        } else if client == "openapi" {
            let cases = said.lines().find(|l| l.contains(" generated, ")).unwrap_or_default();
            let _ = write!(report, ": {}", cases.trim());
        } else if SINGLE.contains(&client) {
            let _ = write!(report, ": {}", said.trim().lines().last().unwrap_or_default());
        }
        println!("{report}");
        if let Some(keep) = &self.options.keep {
            std::fs::create_dir_all(keep).map_err(io)?;
            for (from, kind) in [(&out, "out"), (&err, "err")] {
                std::fs::copy(from, keep.join(format!("{client}-{turn}.{kind}"))).map_err(io)?;
            }
        }
        let _ = std::fs::remove_dir_all(&folder);
        Ok(passed)
    }
}

fn with(program: &Path, args: &[impl AsRef<Path>]) -> Command {
    let mut command = Command::new(program);
    command.args(args.iter().map(AsRef::as_ref));
    command
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].iter().map(|l| format!("     {l}\n")).collect()
}
