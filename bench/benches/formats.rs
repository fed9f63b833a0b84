//! Packing an NVFP4 expert bank and the MSE searches, in bytes per second, with 1 and 2 threads, beside a plain copy
//! of the same bytes by the same threads.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use infernix_formats::expert_bank::{BankShape, ExpertMatrix, Nvfp4Planes, pack_nvfp4, unpack_nvfp4};
use infernix_formats::{Format, Layout, RowPlanes, amax, groupwise, nvfp4};

/// Experts of the real geometry; 32 of them (88 MB) do not fit the caches.
const EXPERTS: usize = 32;
const HIDDEN: usize = 2560;
const INTERMEDIATE: usize = 640;

struct Expert {
    codes: [Vec<u8>; 3],
    scales: [Vec<u8>; 3],
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

fn experts() -> Vec<Expert> {
    let mut seed = 1;
    let n = HIDDEN * INTERMEDIATE;
    let mut plane =
        |len: usize, modulus: u64| (0..len).map(|_| (random(&mut seed) % modulus) as u8).collect::<Vec<u8>>();
    (0..EXPERTS)
        .map(|_| Expert {
            codes: std::array::from_fn(|_| plane(n / 2, 256)),
            scales: std::array::from_fn(|_| plane(n / 16, 127)),
        })
        .collect()
}

/// Bell-shaped values, as weights are: the sum of eight uniform ones.
fn weights(n: usize) -> Vec<f32> {
    let mut seed = 2;
    let mut one = || (0..8).map(|_| (random(&mut seed) & 0xFFFF) as f32 / 65536.0 - 0.5).sum::<f32>() * 0.02;
    (0..n).map(|_| one()).collect()
}

/// Runs `work` over pairs, split evenly over threads.
fn spread<A: Sync, B: Send>(threads: usize, a: &[A], b: &mut [B], work: impl Fn(&A, &mut B) + Sync) {
    let each = a.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (a, b) in a.chunks(each).zip(b.chunks_mut(each)) {
            let work = &work;
            scope.spawn(move || a.iter().zip(b).for_each(|(a, b)| work(a, b)));
        }
    });
}

fn bank(c: &mut Criterion) {
    let (h, i) = (HIDDEN as u64, INTERMEDIATE as u64);
    let shape = BankShape::new(Layout::Nvfp4ExpertRg16V1, &[EXPERTS as u64, h, i]).expect("a legal shape");
    let source = experts();
    let mut records = vec![vec![0u8; shape.stride as usize]; EXPERTS];
    let mut group = c.benchmark_group("expert bank");
    group.throughput(Throughput::Bytes(EXPERTS as u64 * shape.record_bytes));
    for threads in [1, 2] {
        group.bench_function(BenchmarkId::new("copy", threads), |b| {
            b.iter(|| {
                spread(threads, &source, &mut records, |e, out| {
                    let mut at = 0;
                    for plane in e.codes.iter().chain(&e.scales) {
                        out[at..at + plane.len()].copy_from_slice(plane);
                        at += plane.len();
                    }
                    black_box(out);
                });
            });
        });
        group.bench_function(BenchmarkId::new("pack", threads), |b| {
            b.iter(|| {
                spread(threads, &source, &mut records, |e, out| {
                    let p = |m: usize| Nvfp4Planes { codes: &e.codes[m], scales: &e.scales[m] };
                    pack_nvfp4(&shape, p(0), p(1), p(2), out).expect("legal words");
                });
            });
        });
        let n = HIDDEN * INTERMEDIATE;
        let mut planes: Vec<(Vec<u8>, Vec<u8>)> =
            (0..EXPERTS).map(|_| (vec![0; n / 2], vec![0; n / 16])).collect();
        group.bench_function(BenchmarkId::new("unpack", threads), |b| {
            b.iter(|| {
                spread(threads, &records, &mut planes, |record, (codes, scales)| {
                    for m in ExpertMatrix::ALL {
                        unpack_nvfp4(&shape, record, m, codes, scales).expect("a whole record");
                    }
                });
            });
        });
    }
    group.finish();
}

/// One encoder as the bench calls it: values of some rows in, planes out.
type Encoder = fn(&[f32], f32, &mut RowPlanes);

fn search(c: &mut Criterion) {
    const K: usize = 2560;
    let values = weights(64 * K);
    let d = nvfp4::divisor(nvfp4::Method::Mse, amax(&values)).expect("ordinary values");
    let rows: Vec<&[f32]> = values.chunks(8 * K).collect();
    let mut planes = vec![RowPlanes::default(); rows.len()];
    let mut group = c.benchmark_group("encode FP32 values");
    group.throughput(Throughput::Bytes(4 * values.len() as u64));
    let encoders: [(&str, Encoder); 5] = [
        ("copy", |x, _, out| {
            out.codes.resize(4 * x.len(), 0);
            for (o, x) in out.codes.chunks_exact_mut(4).zip(x) {
                o.copy_from_slice(&x.to_le_bytes());
            }
        }),
        ("q4 absmax", |x, _, out| groupwise::encode_absmax(Format::Q4G64, K, x, 0, out).expect("finite")),
        ("q4 mse", |x, _, out| groupwise::encode_mse(Format::Q4G64, K, x, 0, out).expect("finite")),
        ("q8 absmax", |x, _, out| groupwise::encode_absmax(Format::Q8G32, K, x, 0, out).expect("finite")),
        ("nvfp4 mse", |x, d, out| {
            nvfp4::encode(Layout::BlockScaleK16V1, nvfp4::Method::Mse, K, x, d, 0, out).expect("finite");
        }),
    ];
    for threads in [1, 2] {
        for (name, encoder) in encoders {
            group.bench_function(BenchmarkId::new(name, threads), |b| {
                b.iter(|| spread(threads, &rows, &mut planes, |x, out| encoder(x, d, out)));
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800));
    targets = bank, search
}
criterion_main!(benches);
