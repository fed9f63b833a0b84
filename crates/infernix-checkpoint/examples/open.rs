//! Opens a checkpoint and prints what it holds: `cargo run --example open -- FOLDER`.
#![expect(clippy::print_stdout, reason = "that is its purpose")]

use std::collections::BTreeMap;

use infernix_checkpoint::{Checkpoint, CheckpointError, OpenOptions};

fn main() -> Result<(), CheckpointError> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "models/flash-demo-nvfp4".to_owned());
    let opts = OpenOptions { headers_only_ok: true, ..OpenOptions::default() };
    let started = std::time::Instant::now();
    let c = Checkpoint::open(folder.as_ref(), &opts)?;
    println!(
        "{} tensors in {} files, opened in {:?}",
        c.tensors().len(),
        c.shards().len(),
        started.elapsed()
    );
    let mut counts = BTreeMap::new();
    for t in c.resolve_all()? {
        let bytes: u64 = t.planes().iter().map(|(_, p)| p.bytes).sum();
        let entry = counts.entry(t.scheme().to_string()).or_insert((0, 0));
        *entry = (entry.0 + 1, entry.1 + bytes);
    }
    for (scheme, (count, bytes)) in counts {
        println!("{count:8} {bytes:15} bytes  {scheme}");
    }
    println!("data present: {}", c.data_present());
    for w in c.warnings() {
        println!("warning: {w}");
    }
    for w in c.cross_check()? {
        println!("warning: {w}");
    }
    println!("all done in {:?}", started.elapsed());
    Ok(())
}
