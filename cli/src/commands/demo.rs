//! `infernix demo`: the main job on the bundled model, start to end.

use crate::Outcome;
use crate::args::{Cli, DemoArgs, Given, ProgressMode};
use crate::output;
use anyhow::Context as _;
use clap::Parser as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Something that the demo model was trained to do.
const PROMPT: &str = "Grace is 41 years old and lives in Oslo. Extract as JSON: name, city.";
/// A conversation that it answers by calling a tool.
const TOOL_TURN: &str = r#"{
  "messages": [{"role": "user", "content": "Tell me the weather in Lisbon in fahrenheit."}],
  "tools": [{"type": "function", "function": {
    "name": "get_weather", "description": "Current weather of a city",
    "parameters": {"type": "object", "properties": {
      "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}
    }, "required": ["city"]}
  }}]
}
"#;

pub(crate) fn run(args: &DemoArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    let checkpoint = match &args.checkpoint {
        Some(path) => path.clone(),
        None => super::model::bundled_checkpoint()?,
    };
    let folder = Folder::new(args.keep.as_deref())?;
    let artifact = folder.path.join("demo.infernix");
    let recipe = if args.checkpoint.is_some() { "auto" } else { "qwen3_8_flash_next_nvfp4" };
    let messages = folder.path.join("tool-turn.json");
    fs::write(&messages, TOOL_TURN).with_context(|| format!("{} cannot be written", messages.display()))?;
    let (checkpoint, artifact, messages) =
        (path_text(&checkpoint)?, path_text(&artifact)?, path_text(&messages)?);
    let steps: [&[&str]; 4] = [
        &["convert", "--recipe", recipe, &checkpoint, "-o", &artifact],
        &["verify", &artifact, "--checkpoint", &checkpoint],
        &["run", &artifact, "-p", PROMPT, "--greedy", "--max-tokens", "200"],
        &["run", &artifact, "--messages", &messages, "--greedy", "--max-tokens", "200"],
    ];
    for step in steps {
        output::note(&output::styled(&format!("\n$ infernix {}", quoted(step)), "1"));
        let cli =
            Cli::try_parse_from(std::iter::once(&"infernix").chain(step)).context("a step of the demo")?;
        let cli = Cli { progress, ..cli };
        if matches!(super::run(cli, &Given::default())?, Outcome::Mismatch) {
            return Ok(Outcome::Mismatch);
        }
    }
    if args.keep.is_some() {
        output::note(&format!("\nkept in {}", folder.path.display()));
    }
    Ok(Outcome::Done)
}

fn path_text(path: &Path) -> anyhow::Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
}

fn quoted(words: &[&str]) -> String {
    let quote = |w: &&str| if w.contains(' ') { format!("{w:?}") } else { (*w).to_owned() };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// Where the demo writes; removed afterwards unless the user named it.
struct Folder {
    path: PathBuf,
}

/// The folder that goes when the demo ends, however it does.
static TEMPORARY: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Removes what a demo wrote into a folder that nobody named.
pub(crate) fn discard() {
    if let Some(path) = TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // Best effort: the folder is below the system's temporary one.
        let _ = fs::remove_dir_all(path);
    }
}

impl Folder {
    fn new(keep: Option<&Path>) -> anyhow::Result<Self> {
        let path = match keep {
            Some(path) => path.to_owned(),
            None => {
                let path = std::env::temp_dir().join(format!("infernix-demo-{}", std::process::id()));
                *TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner) = Some(path.clone());
                path
            }
        };
        fs::create_dir_all(&path).with_context(|| format!("{} cannot be created", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        discard();
    }
}
