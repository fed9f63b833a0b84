//! Operations of the CPU backend at the demo's and at real shapes, 2 threads (`OPS_THREADS` changes it).
//!
//! Matrix-vector products print their share of the memory bandwidth, measured in the same run as the best of several
//! sums over 512 MiB by the same threads.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use infernix_engine::backend::cpu::isa::Isa;
use infernix_engine::backend::cpu::linear::{Kind, Out, Packed, Rows, product};
use infernix_engine::backend::cpu::pool::Pool;
use infernix_engine::backend::cpu::{CpuBackend, CpuBuf, CpuOptions, CpuWeight};
use infernix_engine::backend::{
    Activation, At, Backend, CallKind, ExpertData, ExpertSpec, GateKind, GdnDims, HyperWeights, LaneMeta,
    NormSpec, Op, Part, RopeTable, RowKey, Site, StepMeta, WeightData, WeightPart, WeightSpec,
};
use infernix_engine::memory::HugeMemory;
use infernix_engine::state::{AttentionLayout, KvFormat, StateLayout};
use infernix_formats::{Format, Layout, encoded_size};

fn threads() -> usize {
    std::env::var("OPS_THREADS").ok().and_then(|v| v.parse().ok()).unwrap_or(2)
}

fn noise(n: usize, seed: u64) -> Vec<u8> {
    let mut s = seed;
    let mut out = vec![0u8; n];
    for b in out.chunks_mut(4) {
        s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        b.copy_from_slice(&((s >> 32) as u32).to_le_bytes()[..b.len()]);
    }
    out
}

/// `n` bytes on huge pages, as weights are: 1 MiB of noise over and over, each byte through `f`.
fn words(n: usize, seed: u64, f: impl Fn(u8) -> u8) -> HugeMemory {
    let some: Vec<u8> = noise(n.min(1 << 20), seed).into_iter().map(f).collect();
    let mut memory = HugeMemory::new(n).expect("memory");
    memory.as_mut().chunks_mut(some.len().max(1)).for_each(|c| c.copy_from_slice(&some[..c.len()]));
    memory
}

/// Best rate of reading 512 MiB on huge pages, bytes a second.
fn bandwidth(pool: &Pool) -> f64 {
    const BYTES: usize = 512 << 20;
    let memory = words(BYTES, 9, |b| b);
    let data = memory.as_ref().as_chunks::<64>().0;
    let mut best = 0f64;
    for _ in 0..8 {
        let sum = AtomicU64::new(0);
        let t = Instant::now();
        pool.chunks(data.len(), 1 << 14, |r| {
            let mut lanes = [0u64; 8];
            for line in &data[r] {
                let words = line.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w));
                lanes.iter_mut().zip(words).for_each(|(l, v)| *l = l.wrapping_add(v));
            }
            sum.fetch_add(lanes.iter().fold(0, |a, b| a.wrapping_add(*b)), Ordering::Relaxed);
        });
        black_box(sum.into_inner());
        best = best.max(BYTES as f64 / t.elapsed().as_secs_f64());
    }
    best
}

struct Matrix {
    kind: Kind,
    n: usize,
    k: usize,
    codes: HugeMemory,
    high: HugeMemory,
    scales: Vec<u8>,
}

impl Matrix {
    fn new(kind: Kind, n: usize, k: usize) -> Self {
        // No storage here has more than two bytes a value. Bits whose reading gives no NaN in any format; magnitudes are of
        // no interest.
        let half_bytes = match kind {
            Kind::Bf16 => 4,
            Kind::Q8 | Kind::Fp8Row | Kind::Mxfp8 => 2,
            _ => 1,
        };
        let codes = words(n * k * half_bytes / 2, 1, |b| b & 0x3b);
        let high = words(n * k / 4, 2, |b| b);
        Matrix { kind, n, k, codes, high, scales: vec![0x10; n * k.div_ceil(16) + 4096] }
    }

    fn rows(&self) -> Rows<'_> {
        let (codes, high) = (self.codes.as_ref(), self.high.as_ref());
        Rows::new(self.kind, self.n, self.k, 0, self.n, codes, high, &self.scales, 1.0)
            .expect("a legal shape")
    }
}

fn linear(c: &mut Criterion) {
    let pool = Pool::new(threads());
    let limit = bandwidth(&pool);
    eprintln!("{} with {} threads reads {:.1} GB/s", Isa::detect(), pool.threads(), limit / 1e9);
    let shapes = [(17408, 5120), (2560, 6144), (512, 256)];
    let kinds =
        [Kind::Q4, Kind::Q5, Kind::Q6, Kind::Q8, Kind::Nvfp4Mul, Kind::Fp8Row, Kind::Mxfp8, Kind::Bf16];
    for columns in [1usize, 64] {
        let mut g = c.benchmark_group(if columns == 1 { "decode" } else { "prefill" });
        g.sample_size(10)
            .measurement_time(Duration::from_millis(if columns == 1 { 300 } else { 800 }))
            .warm_up_time(Duration::from_millis(100));
        // One real shape tells the prefill kernels apart; all of them would take minutes.
        for (n, k) in shapes.into_iter().filter(|s| columns == 1 || *s == (2560, 6144)) {
            // The widest shape takes longest: enough to see what 8-bit activations do on it.
            let eight = [(Kind::Q4, true), (Kind::Q8, true)];
            let all = kinds.into_iter().map(|k| (k, false)).chain(eight);
            for (kind, int8) in all.filter(|(k, int8)| n < 10_000 || *int8 || *k == Kind::Q4) {
                let m = Matrix::new(kind, n, k);
                // Turn about, for what one input was made into serves the next product of the same one.
                let inputs = [0x3f80, 0x3f81]
                    .map(|one| (0..k * columns).map(|i| one + (i % 64) as u16).collect::<Vec<u16>>());
                let mut turns = inputs.iter().cycle();
                let mut packed = Packed::default();
                let mut y = vec![0u16; n * columns];
                let mut best = f64::MAX;
                let bytes = m.rows().bytes() as u64;
                g.throughput(if columns == 1 {
                    Throughput::Bytes(bytes)
                } else {
                    Throughput::Elements((2 * n * k * columns) as u64)
                });
                let name = format!("{kind:?}{}", if int8 { " a8" } else { "" });
                g.bench_function(BenchmarkId::new(&name, format!("{n}x{k}")), |b| {
                    b.iter(|| {
                        let x = turns.next().map_or(&[][..], |x| x);
                        let t = Instant::now();
                        if int8 {
                            packed.pack_int8(Isa::detect(), x, columns, k);
                        } else {
                            packed.pack(x, columns, k, k);
                        }
                        product(
                            &pool,
                            Isa::detect(),
                            &[m.rows()],
                            &mut packed,
                            Out::bf16(&mut y, columns, n),
                        );
                        best = best.min(t.elapsed().as_secs_f64());
                    });
                });
                if columns == 1 && best < f64::MAX {
                    let rate = bytes as f64 / best;
                    eprintln!(
                        "    {name} {n}x{k}: best {:.1} GB/s, {:.0} % of the bandwidth",
                        rate / 1e9,
                        100.0 * rate / limit
                    );
                }
            }
        }
    }
}

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: threads(), ..CpuOptions::default() })
}

fn at(rows: &[RowKey]) -> At<'_> {
    At { site: Site { layer: 0, op: Op::Embed }, rows }
}

fn round(b: &mut CpuBackend, kind: CallKind, rows: usize, start: usize) -> Vec<RowKey> {
    let lane = LaneMeta {
        slot: 0,
        stream: 0,
        start,
        ids: vec![0; rows],
        next_ids: Vec::new(),
        positions: (0..rows).map(|i| [(start + i) as u32; 3]).collect(),
        pages: (0..(start + rows).div_ceil(64) as u32).collect(),
    };
    b.begin_round(StepMeta { kind, part: Part::Target, lanes: vec![lane] }).expect("a legal round");
    (0..rows).map(|i| RowKey { stream: 0, position: (start + i) as u64 }).collect()
}

/// Routed experts of the real geometry: 10 of 64 (177 MB: more than the caches hold).
fn experts(c: &mut Criterion) {
    let (e, h, i, k) = (64usize, 2560usize, 640usize, 10usize);
    let shape = vec![e as u64, h as u64, i as u64];
    let len =
        encoded_size(Layout::Nvfp4ExpertRg16V1, Format::Nvfp4Mul, &shape).expect("a legal shape") as usize;
    let mut bytes = noise(len, 3);
    bytes.iter_mut().for_each(|b| *b &= 0x7b);
    let at_globals = len - 12 * e;
    bytes[at_globals..].chunks_exact_mut(4).for_each(|w| w.copy_from_slice(&1e-4f32.to_le_bytes()));
    let bytes = Arc::new(bytes);
    let mut g = c.benchmark_group("experts");
    g.sample_size(10).measurement_time(Duration::from_millis(300)).warm_up_time(Duration::from_millis(100));
    let bank = [("nvfp4 a4", Activation::A4), ("nvfp4 a8", Activation::A8), ("nvfp4 a16", Activation::A16)];
    for (name, activation) in bank {
        let mut b = backend();
        let part = WeightPart {
            format: Format::Nvfp4Mul,
            layout: Layout::Nvfp4ExpertRg16V1,
            shape: shape.clone(),
            bytes: bytes.clone(),
            file: None,
            rows: 0..e as u64,
        };
        let spec = ExpertSpec {
            name: "bench".into(),
            experts: e,
            hidden: h,
            intermediate: i,
            activation,
            input_scales: (activation == Activation::A4).then(|| vec![[0.01, 0.01, 0.01]; e]),
        };
        let store = b.experts_weight(&spec, ExpertData::Bank(part)).expect("a legal bank");
        for rows in [1usize, 64] {
            let x: Vec<f32> = (0..rows * h).map(|i| (i % 61) as f32 / 32.0 - 1.0).collect();
            let (x, shared, logit) =
                (b.write(rows, h, &x), b.write(rows, h, &x), b.write(rows, 1, &vec![0.5; rows]));
            let mut step = 0usize;
            g.throughput(Throughput::Bytes((rows.min(6) * k * (h * i * 3 * 9 / 16)) as u64));
            g.bench_function(BenchmarkId::new(name, rows), |bench| {
                bench.iter(|| {
                    step += 1;
                    let routing = (0..rows)
                        .map(|t| (0..k).map(|r| (((step * 7 + t * 13 + r * 6) % e) as u32, 0.1)).collect())
                        .collect();
                    black_box(b.experts(&x, &routing, &store, &shared, &logit, at(&[])));
                });
            });
        }
    }
}

/// Routed experts that are stored row by row: 8 of 32, hidden 2048, intermediate 512.
fn row_major_experts(c: &mut Criterion) {
    let (e, h, i, k) = (32usize, 2048usize, 512usize, 8usize);
    let mut g = c.benchmark_group("row-major experts");
    g.sample_size(10).measurement_time(Duration::from_millis(300)).warm_up_time(Duration::from_millis(100));
    for format in [Format::Q4G64, Format::Q8G32, Format::Fp8Row, Format::Bf16] {
        let layout = match format {
            Format::Bf16 => Layout::ContiguousLeV1,
            Format::Fp8Row => Layout::RowScaleV1,
            _ => Layout::RowSplitK128V1,
        };
        let parent = |n: usize, k: usize| {
            let shape = vec![n as u64, k as u64];
            let len = encoded_size(layout, format, &shape).expect("a legal shape") as usize;
            let mut bytes = noise(len, 5);
            bytes.iter_mut().for_each(|b| *b &= 0x3b);
            let part = WeightPart {
                format,
                layout,
                shape: shape.clone(),
                bytes: Arc::new(bytes),
                file: None,
                rows: 0..n as u64,
            };
            WeightData { shape, parts: vec![part] }
        };
        let (gate_up, down) = (parent(2 * e * i, h), parent(e * h, i));
        let bytes: usize =
            [&gate_up, &down].iter().map(|w| (*w.parts[0].bytes).as_ref().len()).sum::<usize>() / e;
        for (width, activation) in [("a8", Activation::A8), ("a16", Activation::A16)] {
            let mut b = backend();
            let spec = ExpertSpec {
                name: "bench".into(),
                experts: e,
                hidden: h,
                intermediate: i,
                activation,
                input_scales: None,
            };
            let data = ExpertData::Parents { gate_up: gate_up.clone(), down: down.clone() };
            let store = b.experts_weight(&spec, data).expect("legal parents");
            for rows in [1usize, 32] {
                let x: Vec<f32> = (0..rows * h).map(|i| (i % 61) as f32 / 32.0 - 1.0).collect();
                let (x, shared, logit) =
                    (b.write(rows, h, &x), b.write(rows, h, &x), b.write(rows, 1, &vec![0.5; rows]));
                let mut step = 0usize;
                g.throughput(Throughput::Bytes((rows.min(4) * k * bytes) as u64));
                g.bench_function(BenchmarkId::new(format!("{format} {width}"), rows), |bench| {
                    bench.iter(|| {
                        step += 1;
                        let routing = (0..rows)
                            .map(|t| {
                                (0..k).map(|r| (((step * 5 + t * 13 + r * 4) % e) as u32, 0.1)).collect()
                            })
                            .collect();
                        black_box(b.experts(&x, &routing, &store, &shared, &logit, at(&[])));
                    });
                });
            }
        }
    }
}

/// A BF16 weight of zeros.
fn zeros(b: &mut CpuBackend, shape: Vec<u64>) -> CpuWeight {
    let bytes = Arc::new(vec![0u8; 2 * shape.iter().product::<u64>() as usize]);
    let rows = if shape.len() < 2 { 1 } else { shape[0] };
    let part = WeightPart {
        format: Format::Bf16,
        layout: Layout::ContiguousLeV1,
        shape: shape.clone(),
        bytes,
        file: None,
        rows: 0..rows,
    };
    let spec = WeightSpec { name: "bench".into(), activation: Activation::A16, input_scale: None };
    b.weight(&spec, WeightData { shape, parts: vec![part] }).expect("legal zeros")
}

/// Small values, some negative.
fn some(b: &mut CpuBackend, rows: usize, width: usize) -> CpuBuf {
    b.write(rows, width, &(0..rows * width).map(|i| (i % 13) as f32 / 8.0 - 0.75).collect::<Vec<_>>())
}

/// Operations that take a row by itself, at the demo's widths and at those of Flash-Next: hidden, intermediate, rank of the
/// hyper-connections, heads, experts.
fn rows(c: &mut Criterion) {
    const STREAMS: usize = 4;
    let mut b = backend();
    let layout = StateLayout {
        attention: Vec::new(),
        gdn: Vec::new(),
        ple: Vec::new(),
        pages: 1,
        slots: 1,
        kv: KvFormat::Bf16,
    };
    b.allocate(&layout).expect("no state");
    let rope = RopeTable { freq: (0..32).map(|i| 0.5f64.powi(i)).collect(), axis: vec![0; 32], scale: 1.0 };
    let mut g = c.benchmark_group("rows");
    g.sample_size(10).measurement_time(Duration::from_millis(100)).warm_up_time(Duration::from_millis(50));
    for (model, h, i, rank, heads, experts) in
        [("demo", 256usize, 64usize, 32usize, 4usize, 32usize), ("Flash-Next", 2560, 640, 320, 24, 512)]
    {
        let wide = STREAMS * h;
        let norm = zeros(&mut b, vec![wide as u64]);
        let head = zeros(&mut b, vec![256]);
        let gate = zeros(&mut b, vec![128]);
        let hyper = HyperWeights::<CpuBackend> {
            norm: zeros(&mut b, vec![wide as u64]),
            down: zeros(&mut b, vec![rank as u64, wide as u64]),
            up: zeros(&mut b, vec![wide as u64, rank as u64]),
            inject: Some(zeros(&mut b, vec![STREAMS as u64, wide as u64])),
            streams: STREAMS,
            eps: 1e-6,
        };
        for n in [1usize, 64] {
            let keys = round(&mut b, CallKind::Prefill, n, 0);
            let at = at(&keys);
            let (r, y, hidden) = (some(&mut b, n, wide), some(&mut b, n, h), some(&mut b, n, i));
            let (q, o) = (some(&mut b, n, heads * 256), some(&mut b, n, heads * 128));
            let (logits, factor) = (some(&mut b, n, experts), some(&mut b, n, STREAMS));
            let mut sum = some(&mut b, n, wide);
            g.throughput(Throughput::Elements(n as u64));
            let mut bench = |name: &str, f: &mut dyn FnMut(&mut CpuBackend)| {
                g.bench_function(BenchmarkId::new(format!("{model} {name}"), n), |x| x.iter(|| f(&mut b)));
            };
            let spec = NormSpec { groups: STREAMS, zero_centred: true, eps: 1e-6 };
            bench("norm", &mut |b| drop(black_box(b.norm(&r, &norm, spec, at))));
            bench("head norm and rotation", &mut |b| {
                drop(black_box(b.norm_rope(&q, &head, &rope, 1e-6, at)));
            });
            bench("gated norm", &mut |b| {
                drop(black_box(b.gdn_gate(&o, &o, &gate, GateKind::Silu, 1e-6, at)));
            });
            bench("swiglu", &mut |b| drop(black_box(b.swiglu(&hidden, &hidden, at))));
            bench("residual", &mut |b| b.add(&mut sum, &y, at));
            bench("hyper-connection", &mut |b| {
                drop(black_box(b.hyper_mix(&r, &hyper, Op::MixerHyper, at)));
                b.hyper_inject(&mut sum, &y, &factor, at);
            });
            bench("routing", &mut |b| drop(black_box(b.route(&logits, 10.min(experts), at))));
        }
    }
}

/// A delta-rule layer and an attention layer of the 27B model.
fn state(c: &mut Criterion) {
    let gdn = GdnDims { key_heads: 16, value_heads: 48, key_dim: 128, value_dim: 128, conv_kernel: 4 };
    let mut b = backend();
    let layout = StateLayout {
        attention: vec![AttentionLayout { part: Part::Target, kv_heads: 4, head_dim: 256, index: None }],
        gdn: vec![gdn],
        ple: Vec::new(),
        pages: 130,
        slots: 1,
        kv: KvFormat::Bf16,
    };
    b.allocate(&layout).expect("a small state");
    let (a_log, dt) = (zeros(&mut b, vec![48]), zeros(&mut b, vec![48]));
    let conv = zeros(&mut b, vec![gdn.channels() as u64, 4]);
    let mut g = c.benchmark_group("state");
    g.sample_size(10).measurement_time(Duration::from_millis(300)).warm_up_time(Duration::from_millis(100));
    for rows in [1usize, 64] {
        let (u, a) = (some(&mut b, rows, gdn.channels()), some(&mut b, rows, 48));
        g.throughput(Throughput::Elements(rows as u64));
        g.bench_function(BenchmarkId::new("convolution and delta rule", rows), |bench| {
            bench.iter(|| {
                // One row as a decode round: recorded, and folded by its commit.
                let kind = if rows == 1 { CallKind::Decode } else { CallKind::Prefill };
                let keys = round(&mut b, kind, rows, 0);
                black_box(b.gdn_conv(0, &u, &conv, at(&keys)));
                black_box(b.gdn(0, &u, &a, &a, &a_log, &dt, at(&keys)));
                if rows == 1 {
                    b.commit(0, Part::Target, 1).expect("one recorded column");
                }
            });
        });
        let (q, kv) = (some(&mut b, rows, 24 * 256), some(&mut b, rows, 4 * 256));
        for context in [512usize, 8192] {
            g.bench_function(BenchmarkId::new(format!("attention over {context}"), rows), |bench| {
                bench.iter(|| {
                    let keys = round(&mut b, CallKind::Prefill, rows, context - rows);
                    b.kv_append(0, &kv, &kv);
                    black_box(b.attention(0, &q, None, at(&keys)));
                });
            });
        }
    }
}

criterion_group!(ops, linear, experts, row_major_experts, rows, state);
criterion_main!(ops);
