//! Canonical 4-bit experts: the lossless backend and the CPU backend on every instruction set give the same bits, on random
//! words and on the ends of every range.

use infernix_engine::backend::cpu::isa::Isa;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::backend::{
    Activation, At, Backend, ExpertData, ExpertSpec, Op, RowKey, Site, WeightPart,
};
use infernix_engine::numerics::round::mix;
use infernix_formats::expert_bank::BankShape;
use infernix_formats::{Format, Layout, encoded_size};
use std::sync::Arc;

/// Odd numbers of 16-wide blocks and of 16-row groups.
const HIDDEN: usize = 112;
const INTERMEDIATE: usize = 48;
/// Kinds of words, an expert each.
const EXPERTS: usize = 6;
/// Kinds of activations, a row each.
const COLUMNS: usize = 7;
/// Bytes of the codes and of the scales of 16 rows of 16 values.
const UNIT: (usize, usize) = (128, 16);

fn uniform(state: &mut u64) -> f32 {
    *state = mix(state.wrapping_add(0x9E37_79B9_7F4A_7C15));
    (*state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// A bank whose experts have random words and one kind of scales or codes each.
fn bank(format: Format) -> WeightPart {
    let layout = Layout::Nvfp4ExpertRg16V1;
    let shape = vec![EXPERTS as u64, HIDDEN as u64, INTERMEDIATE as u64];
    let bank = BankShape::of(layout, format, &shape).unwrap();
    let mut bytes = vec![0u8; encoded_size(layout, format, &shape).unwrap() as usize];
    let mut state = 5;
    for e in 0..EXPERTS {
        let start = bank.record(e as u64).start as usize;
        for unit in bytes[start..start + bank.record_bytes as usize].chunks_exact_mut(UNIT.0 + UNIT.1) {
            unit.iter_mut().for_each(|b| *b = (uniform(&mut state) * 128.0) as i8 as u8);
            let (codes, scales) = unit.split_at_mut(UNIT.0);
            match e {
                0 | 1 => scales.iter_mut().for_each(|s| *s %= 0x7f),
                // The largest scale; subnormal and other extreme ones; none at all.
                2 => scales.fill(0x7e),
                3 => scales.iter_mut().for_each(|s| *s = [0, 1, 7, 8, 0x7e][usize::from(*s) % 5]),
                4 => scales.fill(0),
                // The largest magnitudes everywhere: every sum is as large as it can be.
                _ => {
                    codes.fill(0x77);
                    scales.fill(0x7e);
                }
            }
        }
        let global = if format == Format::Nvfp4 { 700.0f32 } else { 0.0015 };
        let at = (bank.stride * bank.experts) as usize + 12 * e;
        bytes[at..at + 12].as_chunks_mut::<4>().0.iter_mut().for_each(|w| *w = global.to_le_bytes());
    }
    WeightPart { format, layout, shape, bytes: Arc::new(bytes), file: None, rows: 0..EXPERTS as u64 }
}

/// Zeros, saturating values of one and of both signs, blocks of zeros between tiny values, plain values.
fn activations() -> Vec<f32> {
    let mut state = 9;
    (0..COLUMNS * HIDDEN)
        .map(|i| {
            let v = match i / HIDDEN {
                0 => 0.0,
                1 => 3.3e38,
                2 if i % 2 == 0 => -1e30,
                2 => 1e30,
                3 if i / 16 % 2 == 0 => 0.0,
                3 => uniform(&mut state) * 1e-30,
                _ => uniform(&mut state) * 5.0,
            };
            half::bf16::from_f32(v).to_f32()
        })
        .collect()
}

/// Every row through every expert alone with weight 1 and without a shared expert, so that the layer's sum rounds nothing;
/// in one call, or a row a call.
fn outputs<B: Backend<Routing = Vec<Vec<(u32, f32)>>>>(b: &mut B, bank: &WeightPart, one: bool) -> Vec<f32> {
    let input = if bank.format == Format::Nvfp4 { 57.0 } else { 0.011 };
    let spec = ExpertSpec {
        name: "bank".into(),
        experts: EXPERTS,
        hidden: HIDDEN,
        intermediate: INTERMEDIATE,
        activation: Activation::A4,
        input_scales: Some(vec![[input; 3]; EXPERTS]),
    };
    let store = b.experts_weight(&spec, ExpertData::Bank(bank.clone())).unwrap();
    let x = activations();
    let all: Vec<(usize, u32)> =
        (0..EXPERTS as u32).flat_map(|e| (0..COLUMNS).map(move |c| (c, e))).collect();
    let mut out = Vec::new();
    for rows in all.chunks(if one { 1 } else { all.len() }) {
        let n = rows.len();
        let x: Vec<f32> = rows.iter().flat_map(|(c, _)| &x[c * HIDDEN..][..HIDDEN]).copied().collect();
        let (x, shared) = (b.write(n, HIDDEN, &x), b.write(n, HIDDEN, &vec![0.0; n * HIDDEN]));
        let logit = b.write(n, 1, &vec![0.0; n]);
        let routing = rows.iter().map(|(_, e)| vec![(*e, 1.0)]).collect();
        let keys: Vec<RowKey> = (0..n as u64).map(|position| RowKey { stream: 0, position }).collect();
        let at = At { site: Site { layer: 0, op: Op::ExpertOut }, rows: &keys };
        let y = b.experts(&x, &routing, &store, &shared, &logit, at);
        out.extend(b.read(&y));
    }
    out
}

#[test]
fn four_bit_experts_give_the_same_bits_on_every_backend_and_instruction_set() {
    for format in [Format::Nvfp4Mul, Format::Nvfp4] {
        let bank = bank(format);
        let want = outputs(&mut Lossless::new(LosslessOptions::default()), &bank, false);
        let last = &want[(EXPERTS - 1) * COLUMNS * HIDDEN..];
        assert!(want.iter().all(|v| v.is_finite()) && last.iter().any(|v| v.abs() > 1e3), "{format}");
        for isa in Isa::ALL.into_iter().filter(|i| i.available()) {
            for one in [false, true] {
                let options = CpuOptions { threads: 2, threads_batch: 0, isa: Some(isa) };
                let got = outputs(&mut CpuBackend::new(options), &bank, one);
                let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
                assert!(got.len() == want.len() && differ == 0, "{format} on {isa}: {differ} values differ");
            }
        }
    }
}
