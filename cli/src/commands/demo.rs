//! `infernix demo`: the main job on the bundled model, start to end.

use crate::Outcome;
use crate::args::{Cli, DemoArgs, ProgressMode};
use crate::output;
use anyhow::Context as _;
use clap::Parser as _;
use std::fs;
use std::path::{Path, PathBuf};

/// A question that the demo model was trained to answer, and one that it answers by calling a tool.
const PROMPT: &str = "What is a hash table?";

pub(crate) fn run(args: &DemoArgs, progress: ProgressMode) -> anyhow::Result<Outcome> {
    let checkpoint = match &args.checkpoint {
        Some(path) => path.clone(),
        None => super::model::bundled_checkpoint()?,
    };
    let folder = Folder::new(args.keep.as_deref())?;
    let artifact = folder.path.join("demo.infernix");
    let recipe = if args.checkpoint.is_some() { "auto" } else { "qwen3_8_flash_next_nvfp4" };
    let (checkpoint, artifact) = (path_text(&checkpoint)?, path_text(&artifact)?);
    let steps: [&[&str]; 3] = [
        &["convert", "--recipe", recipe, &checkpoint, "-o", &artifact],
        &["verify", &artifact, "--checkpoint", &checkpoint],
        &["run", &artifact, "-p", PROMPT, "--greedy", "--max-tokens", "200"],
    ];
    for step in steps {
        output::note(&output::styled(&format!("\n$ infernix {}", quoted(step)), "1"));
        let cli = Cli::try_parse_from(std::iter::once(&"infernix").chain(step)).context("a step of the demo")?;
        let cli = Cli { progress, ..cli };
        if matches!(super::run(cli)?, Outcome::Mismatch) {
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
    temporary: bool,
}

impl Folder {
    fn new(keep: Option<&Path>) -> anyhow::Result<Self> {
        let path = match keep {
            Some(path) => path.to_owned(),
            None => std::env::temp_dir().join(format!("infernix-demo-{}", std::process::id())),
        };
        fs::create_dir_all(&path).with_context(|| format!("{} cannot be created", path.display()))?;
        Ok(Self { path, temporary: keep.is_none() })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.temporary {
            // Best effort: the folder is below the system's temporary one.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
