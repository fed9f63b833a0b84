//! `gen`: what is made and not written: the reference pages in `docs/` that the program prints itself, the README's
//! figures and the page of operations from `bench/results`.

use crate::results;
use crate::synth::Failure;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What `infernix gen` is asked for, and the page it makes.
const PAGES: [(&str, &str); 3] =
    [("cli", "docs/cli.md"), ("recipes", "docs/recipe-list.md"), ("config", "infernix.example.toml")];

/// Writes the pages; with `--check` only says which differ.
pub(crate) fn run(args: &[String]) -> Result<(), Failure> {
    let check = match args {
        [] => false,
        [flag] if flag == "--check" => true,
        _ => return Err(Failure::Usage("usage: cargo xtask gen [--check]".into())),
    };
    let root = root()?;
    let mut stale = Vec::new();
    let readme = std::fs::read_to_string(root.join("README.md")).map_err(|e| format!("README.md: {e}"))?;
    let mut pages = vec![("README.md", results::readme(&root, &readme)?.into_bytes())];
    pages.extend(results::operations(&root)?.map(|page| ("docs/operations.md", page.into_bytes())));
    for (what, page) in PAGES {
        pages.push((page, print(&root, what)?));
    }
    for (page, made) in pages {
        let path = root.join(page);
        if std::fs::read(&path).is_ok_and(|old| old == made) {
            continue;
        }
        if check {
            stale.push(page);
        } else {
            std::fs::write(&path, made).map_err(|e| format!("{}: {e}", path.display()))?;
            println!("wrote {page}");
        }
    }
    if stale.is_empty() {
        Ok(())
    } else {
        Err(Failure::Failed(format!("{} not current; run `cargo xtask gen` and commit", stale.join(", "))))
    }
}

/// Runs the program's own generator, built as it stands.
fn print(root: &Path, what: &str) -> Result<Vec<u8>, Failure> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["run", "--quiet", "--package", "infernix", "--", "gen", what])
        .current_dir(root)
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|e| format!("cargo cannot be run: {e}"))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(Failure::Failed(format!("`infernix gen {what}` ended with {}", output.status)))
    }
}

fn root() -> Result<PathBuf, Failure> {
    let parent = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    parent.map(Path::to_owned).ok_or_else(|| Failure::Failed("the repository's root is not known".into()))
}
