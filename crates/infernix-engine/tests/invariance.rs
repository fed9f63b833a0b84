//! What must not change a bit: call width, chunking, batching, snapshots, drafts that are thrown away.

mod common;

use common::*;
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::backend::{ActivationPolicy, CallKind};
use infernix_engine::driver::{Driver, DriverOptions, LaneInput, Sequence, Want};
use infernix_engine::numerics::round::Rounding;
use infernix_engine::state::KvFormat;

struct Case(Model);

/// Models small enough to run often; QSA, n-gram tables, experts and drafters are among them.
fn cases() -> Vec<(&'static str, Case)> {
    ["models/flash-demo-bf16", "models/dense-demo-bf16", "reference/tiny_models/moe4"]
        .into_iter()
        .filter_map(|name| Some((name, Case(Model::plain(name)?))))
        .collect()
}

impl Case {
    fn driver(&self, rounding: Rounding, kv: KvFormat) -> Driver<Lossless> {
        let backend = Lossless::new(LosslessOptions { rounding, ..LosslessOptions::default() });
        self.0.driver(backend, ActivationPolicy::Artifact, DriverOptions { tokens: 4096, sequences: 4, kv })
    }

    fn ids(&self, n: usize, seed: u64) -> Vec<u32> {
        let Model::Plain(source, _) = &self.0 else { return Vec::new() };
        ids(source.config.vocab, n, seed)
    }
}

fn chunking(rounding: Rounding, kv: KvFormat) {
    for (name, case) in cases() {
        let mut d = case.driver(rounding, kv);
        let ids = case.ids(180, 5);
        let want = whole(&mut d, &ids, 7);
        let free = d.free_pages();
        for seed in 0..3 {
            let mut s = d.open(7).unwrap();
            let got = pieces(&mut d, &mut s, &ids, seed);
            for (t, (a, b)) in got.iter().zip(&want).enumerate() {
                assert!(same(a, b), "{name}: row {t} of run {seed} differs");
            }
            d.close(s);
            assert_eq!(d.free_pages(), free, "pages leak");
        }
    }
}

#[test]
fn prefill_decode_any_chunking_and_rejected_drafts_agree() {
    chunking(Rounding::Nearest, KvFormat::Bf16);
}

#[test]
fn stochastic_rounding_depends_on_position_not_on_calls() {
    chunking(Rounding::Stochastic(3), KvFormat::Bf16);
}

#[test]
fn int8_kv_is_the_same_through_any_call_width() {
    chunking(Rounding::Nearest, KvFormat::Int8);
}

#[test]
fn stochastic_seeds_and_streams_differ_and_repeat() {
    for (name, case) in cases() {
        let ids = case.ids(40, 9);
        let run =
            |seed, stream| whole(&mut case.driver(Rounding::Stochastic(seed), KvFormat::Bf16), &ids, stream);
        let (a, b) = (run(1, 1), run(1, 1));
        assert!(a.iter().zip(&b).all(|(a, b)| same(a, b)), "{name}: a seed does not repeat");
        assert!(!same(&a[39], &run(2, 1)[39]), "{name}: seeds do not differ");
        assert!(!same(&a[39], &run(1, 2)[39]), "{name}: streams do not differ");
    }
}

#[test]
fn batched_rows_do_not_see_each_other() {
    for (name, case) in cases() {
        let mut d = case.driver(Rounding::Nearest, KvFormat::Bf16);
        let texts: Vec<Vec<u32>> = [70usize, 33, 150].iter().zip(1..).map(|(n, i)| case.ids(*n, i)).collect();
        let want: Vec<_> = texts.iter().map(|t| whole(&mut d, t, 0)).collect();
        let mut open: Vec<Sequence> = texts.iter().map(|_| d.open(0).unwrap()).collect();
        for (kind, from, to) in
            [(CallKind::Prefill, 0, 30), (CallKind::Decode, 30, 32), (CallKind::Decode, 32, 33)]
        {
            let mut lanes: Vec<LaneInput<'_>> = open
                .iter_mut()
                .zip(&texts)
                .map(|(sequence, t)| LaneInput { sequence, ids: &t[from..to], want: Want::All })
                .collect();
            let out = d.run(kind, &mut lanes).unwrap();
            for (i, o) in out.iter().enumerate() {
                for (j, l) in o.logits.iter().enumerate() {
                    assert!(same(l, &want[i][from + j]), "{name}: text {i} row {}", from + j);
                }
            }
            if kind == CallKind::Decode {
                open.iter_mut().for_each(|s| d.commit(s, to - from).unwrap());
            }
        }
        open.into_iter().for_each(|s| d.close(s));
    }
}

#[test]
fn a_restored_snapshot_continues_as_if_nothing_had_happened() {
    for (name, case) in cases() {
        let mut d = case.driver(Rounding::Nearest, KvFormat::Bf16);
        let ids = case.ids(170, 11);
        let want = whole(&mut d, &ids, 0);
        for (seed, cut) in [(1u64, 1usize), (2, 63), (3, 64), (4, 101), (5, 169)] {
            let mut s = d.open(0).unwrap();
            pieces(&mut d, &mut s, &ids[..cut], seed);
            let snapshot = d.snapshot(&mut s).unwrap();
            // Another future, over page and block borders, also through drafts.
            let other = case.ids(90, seed + 100);
            let continued = d.prefill(&mut s, &other, Want::None);
            continued.unwrap();
            if d.model.draft.is_some() {
                d.draft(&mut s, 1, 3, infernix_engine::driver::argmax).unwrap();
            }
            d.verify(&mut s, &other[..3]).unwrap();
            d.commit(&mut s, 2).unwrap();
            d.restore(&mut s, &snapshot).unwrap();
            assert_eq!(s.len(), cut);
            let got = d.prefill(&mut s, &ids[cut..], Want::All).unwrap().logits;
            assert!(got.iter().zip(&want[cut..]).all(|(a, b)| same(a, b)), "{name}: cut at {cut}");
            d.close(s);
        }
    }
}

#[test]
fn drafts_do_not_depend_on_how_the_prompt_was_read() {
    for (name, case) in cases() {
        let mut d = case.driver(Rounding::Nearest, KvFormat::Bf16);
        if d.model.draft.is_none() {
            continue;
        }
        let ids = case.ids(160, 21);
        let draft = |d: &mut Driver<Lossless>, s: &mut Sequence| -> Vec<Vec<f32>> {
            let out = d.draft(s, 3, 3, infernix_engine::driver::argmax).unwrap();
            out.into_iter().map(|o| o.1).collect()
        };
        let mut s = d.open(0).unwrap();
        d.prefill(&mut s, &ids, Want::None).unwrap();
        let want = draft(&mut d, &mut s);
        assert_eq!(draft(&mut d, &mut s), want, "{name}: drafting twice");
        d.close(s);
        for seed in 0..2 {
            let mut s = d.open(0).unwrap();
            pieces(&mut d, &mut s, &ids, seed);
            let got = draft(&mut d, &mut s);
            assert!(got.iter().zip(&want).all(|(a, b)| same(a, b)), "{name}: run {seed}");
            d.close(s);
        }
    }
}

/// One layer over all chunks, then the next layer: what a driver does when weights are the scarce thing.
#[test]
fn layer_major_order_agrees_with_token_major() {
    use infernix_engine::backend::{Backend, LaneMeta, Part, StepMeta};
    for (name, case) in cases() {
        let ids = case.ids(100, 31);
        let mut d = case.driver(Rounding::Nearest, KvFormat::Bf16);
        let want = whole(&mut d, &ids, 0);
        let ngram = case.0.own_ngram();
        let m = &mut d.model;
        let meta = |from: usize, to: usize| StepMeta {
            kind: CallKind::Prefill,
            part: Part::Target,
            lanes: vec![LaneMeta {
                slot: 3,
                stream: 0,
                start: from,
                ids: ids[from..to].to_vec(),
                next_ids: Vec::new(),
                positions: (from as u32..to as u32).map(|i| [i; 3]).collect(),
                pages: vec![40, 41],
            }],
        };
        let chunks: Vec<StepMeta> = [(0, 30), (30, 65), (65, 66), (66, 100)].map(|(a, b)| meta(a, b)).into();
        let mut residuals = Vec::new();
        for c in &chunks {
            m.backend.begin_round(c.clone()).unwrap();
            residuals.push(m.begin(&c.keys()));
            assert!(m.backend.end_round().failed_lanes.is_empty());
        }
        for i in 0..m.layers.len() {
            for (c, r) in chunks.iter().zip(&mut residuals) {
                let from = c.lanes[0].start;
                let tickets = match (&ngram, m.config.ple_table(i)) {
                    (Some(n), Some(t)) => vec![n.request(t, &ids[..from], &c.lanes[0].ids)],
                    _ => Vec::new(),
                };
                m.backend.begin_round(c.clone()).unwrap();
                m.layer(i, &c.keys(), r, &tickets, None);
                assert!(m.backend.end_round().failed_lanes.is_empty());
            }
        }
        for (c, r) in chunks.iter().zip(&residuals) {
            m.backend.begin_round(c.clone()).unwrap();
            let rows: Vec<usize> = (0..c.rows()).collect();
            let (_, logits) = m.finish(&c.keys(), r, &rows);
            let logits = m.backend.read(&logits);
            m.backend.end_round();
            let vocab = m.config.vocab as usize;
            for (t, l) in logits.chunks_exact(vocab).enumerate() {
                assert!(same(l, &want[c.lanes[0].start + t]), "{name}: row {}", c.lanes[0].start + t);
            }
        }
    }
}
