//! Plans from headers alone: the published sizes and counts of the real geometry.

use std::process::Command;

use crate::common::{demo, options, shared};
use infernix_convert::{Method, Plan, Proof, ProposalOptions, Ranking, plan};

fn headers(dir: &std::path::Path) -> bool {
    let Some(shared) = shared() else {
        eprintln!("skipped: shared/tools/real_headers.py is not here");
        return false;
    };
    let run = Command::new("python3").arg(shared.join("tools/real_headers.py")).arg(dir).arg(demo()).output();
    match run {
        Ok(out) if out.status.success() => true,
        other => {
            eprintln!("skipped: python3 cannot write the headers: {other:?}");
            false
        }
    }
}

fn parameters(plan: &Plan, proof: impl Fn(Proof) -> bool) -> usize {
    let special = |name: &&String| !name.ends_with("/experts") && !name.ends_with("expert_input_scales");
    plan.objects
        .iter()
        .filter(|o| proof(o.proof))
        .flat_map(|o| &o.parameters)
        .filter(special)
        .filter(|n| !n.contains("/experts/"))
        .collect::<std::collections::BTreeSet<_>>()
        .len()
}

fn within(found: u64, expected: u64) -> bool {
    found.abs_diff(expected) * 1000 <= expected
}

#[test]
fn plans_from_real_headers_have_the_published_sizes() {
    let dir = tempfile::tempdir().unwrap();
    if !headers(dir.path()) {
        return;
    }
    let make = |recipe: &str, proposal: Option<u64>| {
        let mut o = options(dir.path(), recipe, &dir.path().join("x.infernix"));
        o.dry_run = true;
        o.proposal = proposal.map(|rows| ProposalOptions { rows: Some(rows), ranking: Ranking::Absent });
        let started = std::time::Instant::now();
        let plan = plan(&o).unwrap();
        eprintln!("{recipe}: {} bytes, planned in {:?}", plan.artifact_bytes(), started.elapsed());
        plan
    };
    let with = make("qwen3_8_flash_next_nvfp4_dense8", Some(131_072));
    assert!(within(with.artifact_bytes(), 76_867_265_280), "{}", with.artifact_bytes());
    assert_eq!(with.files().len(), 3);
    assert_eq!(with.files()[0].bytes, 32_000_000_000);
    let volume = with.ngram.as_ref().unwrap();
    assert_eq!((volume.rows, volume.bytes), (320_001_536, 52_429_058_048));
    assert!(with.missing.is_empty());
    assert!(with.warnings.iter().any(|w| w.contains("tokens")), "{:?}", with.warnings);
    assert!(with.memory_needed_bytes() < 1 << 30, "{}", with.memory_needed_bytes());

    let dense8 = make("qwen3_8_flash_next_nvfp4_dense8", None);
    assert!(within(dense8.artifact_bytes(), 76_674_756_000), "{}", dense8.artifact_bytes());
    assert_eq!(parameters(&dense8, |p| p == Proof::Requantized), 629 + 20);
    assert_eq!(parameters(&dense8, |p| p != Proof::Requantized), 987);
    let q4: Vec<_> = dense8.objects.iter().filter(|o| o.method == Method::Mse).collect();
    assert_eq!(
        q4.iter().map(|o| o.shape.clone()).collect::<Vec<_>>(),
        [vec![512 * 1280, 2560], vec![512 * 2560, 640]]
    );

    let exact = make("qwen3_8_flash_next_nvfp4", None);
    assert_eq!(parameters(&exact, |p| p == Proof::Requantized), 20);
    assert_eq!(parameters(&exact, |p| p != Proof::Requantized), 1616);
    let banks: u64 = exact.objects.iter().filter(|o| o.shape == [512, 2560, 640]).map(|o| o.shape[0]).sum();
    assert_eq!(banks, 24_576);
    // The reconstruction of the published payload, without its resources.
    assert!(within(exact.artifact_bytes(), 80_356_996_608 - 178_782_208), "{}", exact.artifact_bytes());
}
