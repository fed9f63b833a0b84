//! Opens a checkpoint and prints what it holds: `cargo run --example open -- FOLDER [--read]`.
//! With `--read` it reads every byte as well and prints the rate.
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
    if std::env::args().nth(2).as_deref() == Some("--read") {
        let started = std::time::Instant::now();
        let mut buffer = vec![0u8; 8 << 20];
        let mut total = 0;
        for t in c.tensors() {
            for at in (0..t.bytes).step_by(buffer.len()) {
                let end = t.bytes.min(at + buffer.len() as u64);
                c.read(t, at..end, &mut buffer[..(end - at) as usize])?;
                total += end - at;
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        println!("read {total} bytes in {seconds:.2} s, {:.0} MB/s", total as f64 / seconds / 1e6);
    }
    Ok(())
}
