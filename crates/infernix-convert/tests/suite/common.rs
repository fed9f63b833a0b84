//! Paths and short-cuts that the tests share.

use std::path::{Path, PathBuf};

use infernix_artifact::Interrupt;
use infernix_convert::{
    ConvertError, ConvertOptions, Outcome, Plan, Recipe, RunOptions, Silent, convert, plan,
};

pub(crate) fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4")
}

/// Shared test material beside the repository, if it is there.
pub(crate) fn shared() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    path.join("models").is_dir().then_some(path)
}

/// A checkpoint of the shared material; says so and gives `None` where it is absent.
pub(crate) fn fixture(name: &str) -> Option<PathBuf> {
    let path = shared().map(|s| s.join("models").join(name)).filter(|p| p.is_dir());
    if path.is_none() {
        eprintln!("skipped: shared/models/{name} is not here");
    }
    path
}

pub(crate) fn run() -> RunOptions {
    RunOptions { interrupt: Interrupt::default(), faults: None, durable: false }
}

pub(crate) fn options(checkpoint: &Path, recipe: &str, out: &Path) -> ConvertOptions {
    let mut o = ConvertOptions::new(checkpoint, Recipe::load(recipe).unwrap(), out);
    o.threads = 2;
    o
}

pub(crate) fn converted(o: &ConvertOptions) -> Result<(Plan, Outcome), ConvertError> {
    let plan = plan(o)?;
    let outcome = convert(&plan, &Silent, &run())?;
    Ok((plan, outcome))
}

/// A copy of a checkpoint folder that a test may damage.
pub(crate) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}
