//! A checkpoint of the largest release's size: 299,000 tensors in 11 shards, headers only.
//!
//! The one test of this file has the process to itself, so that time and memory can be measured.

mod common;

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};

use infernix_checkpoint::{Checkpoint, Dtype, OpenOptions, Scheme};

const LAYERS: usize = 48;
const EXPERTS: usize = 512;

/// Writes a headers-only folder, a shard at a time.
fn write(folder: &common::Folder) -> usize {
    let mut index =
        BufWriter::new(File::create(folder.join("model.safetensors.index.json")).expect("created"));
    write!(index, "{{\"metadata\":{{\"format\":\"pt\"}},\"weight_map\":{{").expect("written");
    let mut count = 0;
    for shard in 1..=12usize {
        let file = format!("model-{shard:05}-of-00012.safetensors");
        let mut header = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
        let mut at = 0u64;
        let mut add = |name: &str, dtype: &str, shape: &str, bytes: u64| {
            let _ = write!(
                header,
                ",\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{at},{}]}}",
                at + bytes
            );
            at += bytes;
            write!(index, "{}\"{name}\":\"{file}\"", if count == 0 { "" } else { "," }).expect("written");
            count += 1;
        };
        for layer in (shard - 1) * LAYERS / 12..shard * LAYERS / 12 {
            for e in 0..EXPERTS {
                for (part, n, k) in [("gate", 640, 2560), ("up", 640, 2560), ("down", 2560, 640)] {
                    let p = format!("model.language_model.layers.{layer}.mlp.experts.{e}.{part}_proj");
                    add(&format!("{p}.weight"), "U8", &format!("[{n},{}]", k / 2), n * k / 2);
                    add(&format!("{p}.weight_scale"), "F8_E4M3", &format!("[{n},{}]", k / 16), n * k / 16);
                    add(&format!("{p}.weight_scale_2"), "F32", "[]", 4);
                    add(&format!("{p}.input_scale"), "F32", "[]", 4);
                }
            }
            for i in 0..84 {
                let name = format!("model.language_model.layers.{layer}.self_attn.dense_{i}.weight");
                add(&name, "BF16", "[2560,2560]", 2560 * 2560 * 2);
            }
        }
        header.push('}');
        folder.put(&file, &common::file(header.as_bytes(), b""));
    }
    write!(index, "}}}}").expect("written");
    index.flush().expect("written");
    count
}

/// CPU time of this process in seconds: unlike wall time it does not depend on what else runs.
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    Some(ticks / 100.0)
}

fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? / 1024)
}

#[test]
#[expect(clippy::print_stderr, reason = "the measured figures are worth reading")]
fn three_hundred_thousand_tensors_open_in_two_seconds_and_300_mb() {
    let folder = common::Folder::new();
    let count = write(&folder);
    assert!(count > 298_000);
    // Forget the peak of the writing above.
    let measurable = std::fs::write("/proc/self/clear_refs", "5").is_ok();
    let before = cpu_seconds();
    let c =
        folder.open_with(&OpenOptions { headers_only_ok: true, ..OpenOptions::default() }).expect("opens");
    let spent = before.and_then(|b| Some(cpu_seconds()? - b));
    let peak = peak_mib().filter(|_| measurable);
    eprintln!("opened {count} tensors in {spent:?} s of CPU time, peak {peak:?} MiB");
    assert_eq!(c.tensors().len(), count);
    assert!(!c.data_present());
    assert!(peak.is_none_or(|p| p < 300), "{peak:?} MiB");
    assert!(spent.is_none_or(|s| s < 2.0), "{spent:?} s");

    let before = cpu_seconds();
    let all = c.resolve_all().expect("resolves");
    assert_eq!(all.len(), LAYERS * (EXPERTS * 3 + 84));
    let experts = all.iter().filter(|t| t.scheme() == Scheme::Nvfp4Multiplier { input_scale: true }).count();
    assert_eq!(experts, LAYERS * EXPERTS * 3);
    assert!(all.iter().any(|t| t.scheme() == Scheme::Plain(Dtype::Bf16)));
    eprintln!(
        "resolved {} weights in {:?} s, peak {:?} MiB",
        all.len(),
        before.and_then(|b| Some(cpu_seconds()? - b)),
        peak_mib()
    );
    drop(all);

    let names: Vec<_> = c.shards().iter().map(|s| s.name.clone()).collect();
    let mut sorted = names.clone();
    sorted.sort_by(|a, b| infernix_checkpoint::natural_cmp(a, b));
    assert_eq!(names, sorted);
    let strict = Checkpoint::open(folder.path(), &OpenOptions::default()).expect_err("no data");
    common::assert_message(&strict, &["model-00001-of-00012.safetensors", "only its header"]);
}
