//! Layer by layer against the full references of `reference/make_tiny.py`: residuals, experts, blocks, table rows, decode
//! steps, drafter. They are too large to keep: make them in a scratch folder and name it in `INFERNIX_TINY_REFERENCES`.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "figures and reasons of skipping for whoever runs it"
)]

mod common;

use common::*;
use infernix_engine::backend::lossless::LosslessOptions;
use infernix_engine::driver::{DriverOptions, LayerRecord, Want, argmax};
use std::path::PathBuf;

fn architecture(name: &str, tied_drafts: &[usize]) {
    let Some(root) = std::env::var_os("INFERNIX_TINY_REFERENCES").map(PathBuf::from) else {
        eprintln!("skipped: INFERNIX_TINY_REFERENCES names no folder");
        return;
    };
    let r = Reference::open(&root.join(format!("{name}-ref/ref_fp32.safetensors")));
    let (source, table) = plain_checkpoint(&root.join(name));
    let options = LosslessOptions { fp32: true, ..LosslessOptions::default() };
    let mut d = lossless(&source, table, options, DriverOptions::default());
    let ids = r.ids("input_ids");
    let (shape, want) = r.f32("prefill_logits");
    let (t, vocab) = (shape[0], shape[1]);
    let mut s = d.open(0).unwrap();
    d.record = Some(Vec::new());
    let logits = d.prefill(&mut s, &ids[..t], Want::All).unwrap().logits;
    let record = d.record.replace(Vec::new()).unwrap();
    layers(&r, &record, "", t);
    let e = relative(&logits.concat(), &want);
    println!("{name} prefill logits {e:.2e}");
    assert!(e <= 1e-5, "prefill logits {e:e}");
    let (_, want) = r.f32("decode_logits");
    let mut steps: Vec<LayerRecord> = record.iter().map(|_| LayerRecord::default()).collect();
    for (i, want) in want.chunks_exact(vocab).enumerate() {
        let got = d.decode(&mut s, ids[t + i]).unwrap();
        let e = relative(&got, want);
        assert!(e <= 1e-5, "decode step {i}: {e:e}");
        for (all, one) in steps.iter_mut().zip(d.record.replace(Vec::new()).unwrap()) {
            append(all, one);
        }
    }
    layers(&r, &steps, "decode.", ids.len() - t);
    d.close(s);
    d.record = None;
    let (_, want) = r.f32("mtp.prefill_logits");
    let mut s = d.open(0).unwrap();
    let mut worst = 0f64;
    for (i, want) in want.chunks_exact(vocab).enumerate() {
        d.prefill(&mut s, &ids[i..i + 1], Want::None).unwrap();
        if i + 1 == t {
            let chain = d.draft(&mut s, ids[t], 3, argmax).unwrap();
            let tokens: Vec<u32> = chain.iter().map(|c| c.0).collect();
            assert_eq!(tokens, r.ids("mtp.draft_tokens"), "chain of drafts");
            worst = worst.max(relative(&chain[0].1, want));
        } else if !tied_drafts.contains(&i) {
            worst = worst.max(relative(&d.draft(&mut s, ids[i + 1], 1, argmax).unwrap()[0].1, want));
        }
    }
    println!("{name} drafter logits {worst:.2e}");
    assert!(worst <= 1e-5, "drafter logits {worst:e}");
}

fn append(all: &mut LayerRecord, one: LayerRecord) {
    all.residual.extend(one.residual);
    let join = |a: &mut Option<Vec<_>>, b: Option<Vec<_>>| {
        if let Some(b) = b {
            a.get_or_insert_default().extend(b);
        }
    };
    join(&mut all.trace.experts, one.trace.experts);
    if let Some(b) = one.trace.blocks {
        all.trace.blocks.get_or_insert_default().extend(b);
    }
    if let Some(b) = one.ngram_rows {
        all.ngram_rows.get_or_insert_default().extend(b);
    }
}

fn layers(r: &Reference, record: &[LayerRecord], prefix: &str, rows: usize) {
    let mut worst = 0f64;
    for (i, layer) in record.iter().enumerate() {
        let name = |what: &str| format!("{prefix}layer.{i}.{what}");
        let (_, want) = r.f32(&name("out"));
        let e = relative(&layer.residual, &want);
        worst = worst.max(e);
        assert!(e <= 1e-5, "{prefix}layer {i}: {e:e}");
        if let Some(got) = &layer.trace.experts {
            let (shape, want) = r.i32(&name("experts")).unwrap_or_else(|| {
                let (shape, ids) = r.i64(&name("experts")).unwrap();
                (shape, ids.iter().map(|x| *x as i32).collect())
            });
            let (_, weights) = r.f32(&name("expert_weights"));
            let mut differ = 0;
            for (t, got) in got.iter().enumerate() {
                let span = t * shape[1]..(t + 1) * shape[1];
                let mut a: Vec<i32> = got.iter().map(|e| e.0 as i32).collect();
                let mut b = want[span.clone()].to_vec();
                if a == b {
                    assert!(
                        got.iter().zip(&weights[span]).all(|(g, w)| (g.1 - w).abs() < 1e-5),
                        "weights of row {t}"
                    );
                }
                a.sort_unstable();
                b.sort_unstable();
                differ += usize::from(a != b);
            }
            assert!(differ == 0, "{prefix}layer {i}: experts differ at {differ} rows");
        }
        if let (Some(got), Some((shape, want))) = (&layer.trace.blocks, r.i32(&name("qsa_blocks"))) {
            for (t, got) in got.iter().enumerate() {
                let mut want: Vec<i32> = want[t * shape[1]..(t + 1) * shape[1]].to_vec();
                want.retain(|b| *b >= 0);
                if let Some(got) = got {
                    let got: Vec<i32> = got.iter().map(|b| *b as i32).collect();
                    assert_eq!(got, want, "{prefix}layer {i} row {t}: blocks");
                }
            }
        }
        if let (Some(got), Some((shape, want))) = (&layer.ngram_rows, r.i64(&name("ple_rows"))) {
            assert_eq!(shape[0], rows);
            // The reference counts rows within each layer's own table.
            let base = got[0] as i64 - want[0];
            assert!(
                got.iter().zip(&want).all(|(g, w)| *g as i64 == w + base),
                "{prefix}layer {i}: table rows"
            );
        }
    }
    println!("{prefix}layers {worst:.2e}");
}

#[test]
fn flash_next() {
    architecture("flash_next", &[69, 89]);
}

#[test]
fn dense() {
    architecture("dense", &[]);
}

#[test]
fn moe() {
    architecture("moe", &[]);
}
