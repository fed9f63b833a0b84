//! Every operation of the lossless backend against its formula, evaluated plainly in double-double and rounded once.
//!
//! The backend decides most roundings from f64 values and error bounds; a bound that is too small shows here.

use infernix_engine::backend::lossless::{Lossless, LosslessOptions, Mat, Weight};
use infernix_engine::backend::{
    Activation, At, Backend, Boundary, CallKind, GateKind, GdnDims, IndexDims, LaneMeta, NormSpec, Op, Part,
    RopeTable, RowKey, Site, StepMeta, WeightData, WeightPart, WeightSpec,
};
use infernix_engine::ngram::NgramTicket;
use infernix_engine::numerics::dd::{Dd, Real};
use infernix_engine::numerics::round::{Rounding, RowRounder, Target, mix};
use infernix_engine::state::{AttentionLayout, KvFormat, PleLayout, StateLayout, hadamard};
use infernix_formats::{Format, Layout};
use std::sync::Arc;

const D: usize = 64;
const T: usize = 70;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> f64 {
        self.0 = mix(self.0.wrapping_add(0x9E37_79B9_7F4A_7C15));
        self.0 as f64 / u64::MAX as f64
    }

    /// Values of many magnitudes, some zero.
    fn values(&mut self, n: usize, bf16: bool) -> Vec<f32> {
        (0..n)
            .map(|_| {
                let size = (self.next() * 8.0 - 5.0).exp2();
                let v = if self.next() < 0.02 { 0.0 } else { (self.next() * 2.0 - 1.0) * size };
                if bf16 { half::bf16::from_f64(v).to_f32() } else { v as f32 }
            })
            .collect()
    }
}

struct Bench {
    b: Lossless,
    act: Target,
    rounding: Rounding,
    rng: Rng,
    keys: Vec<RowKey>,
}

fn dims() -> GdnDims {
    GdnDims { key_heads: 1, value_heads: 2, key_dim: 16, value_dim: 8, conv_kernel: 4 }
}

impl Bench {
    fn new(fp32: bool, rounding: Rounding, kv: KvFormat) -> Self {
        let mut b = Lossless::new(LosslessOptions { fp32, rounding, ..LosslessOptions::default() });
        let index = IndexDims { heads: 2, dim: D, ratio: 4, budget: 16 };
        b.allocate(&StateLayout {
            attention: vec![AttentionLayout {
                part: Part::Target,
                kv_heads: 1,
                head_dim: D,
                index: Some(index),
            }],
            gdn: vec![dims()],
            ple: vec![PleLayout { width: 32, columns: 9 }],
            pages: 2,
            slots: 1,
            kv,
        })
        .unwrap();
        let meta = StepMeta {
            kind: CallKind::Prefill,
            part: Part::Target,
            lanes: vec![LaneMeta {
                slot: 0,
                stream: 5,
                start: 0,
                ids: vec![0; T],
                next_ids: vec![],
                positions: (0..T as u32).map(|i| [i, i / 2, i * 3]).collect(),
                pages: vec![1, 0],
            }],
        };
        let keys = meta.keys();
        b.begin_round(meta).unwrap();
        let act = if fp32 { Target::F32 } else { Target::Bf16 };
        Bench { b, act, rounding, rng: Rng(3), keys }
    }

    fn all(f: impl Fn(&mut Bench)) {
        for fp32 in [false, true] {
            for rounding in [Rounding::Nearest, Rounding::Stochastic(9)] {
                f(&mut Bench::new(fp32, rounding, KvFormat::Bf16));
            }
        }
    }

    fn mat(&mut self, width: usize) -> Mat {
        let data = self.rng.values(T * width, self.act == Target::Bf16);
        self.b.write(T, width, &data)
    }

    fn weight(&mut self, n: usize, k: usize) -> (Weight, Vec<f32>) {
        let v = self.rng.values(n * k, true);
        let bytes: Vec<u8> = v.iter().flat_map(|v| v.to_le_bytes()).collect();
        let shape = if n == 0 { vec![k as u64] } else { vec![n as u64, k as u64] };
        self.stored(shape, bytes, v)
    }

    fn vector(&mut self, k: usize) -> (Weight, Vec<f32>) {
        let v = self.rng.values(k, true);
        let bytes = v.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.stored(vec![k as u64], bytes, v)
    }

    fn stored(&mut self, shape: Vec<u64>, bytes: Vec<u8>, v: Vec<f32>) -> (Weight, Vec<f32>) {
        let rows = if shape.len() == 1 { 1 } else { shape[0] };
        let part = WeightPart {
            format: Format::Fp32,
            layout: Layout::ContiguousLeV1,
            shape: shape.clone(),
            bytes: Arc::new(bytes),
            file: None,
            rows: 0..rows,
        };
        let spec = WeightSpec { name: "w".into(), activation: Activation::A16, input_scale: None };
        (self.b.weight(&spec, WeightData { shape, parts: vec![part] }).unwrap(), v)
    }

    fn at<'a>(&self, keys: &'a [RowKey], op: Op) -> At<'a> {
        At { site: Site { layer: 4, op }, rows: keys }
    }

    /// Rounds a double-double, never trusting its leading part alone.
    fn round(&self, target: Target, op: Op, t: usize, element: usize, v: Dd) -> f32 {
        let r = RowRounder::new(self.rounding, target, Site { layer: 4, op }, self.keys[t]);
        r.round(element, v.hi, v.hi.abs() * 1e-10, || v)
    }

    fn check(&self, got: &Mat, target: Target, op: Op, f: impl Fn(usize, usize) -> Dd) {
        for t in 0..got.rows {
            for e in 0..got.width {
                let want = self.round(target, op, t, e, f(t, e));
                let got = got.values()[t * got.width + e];
                assert!(got == want, "{op:?} row {t} element {e}: {got:e}, expected {want:e}");
            }
        }
    }
}

fn dd(x: f32) -> Dd {
    Dd::of(f64::from(x))
}

fn row(m: &Mat, t: usize) -> &[f32] {
    &m.values()[t * m.width..(t + 1) * m.width]
}

fn dot(a: &[f32], b: &[f32]) -> Dd {
    a.iter().zip(b).fold(Dd::ZERO, |s, (a, b)| s + dd(*a) * dd(*b))
}

fn inverse_rms(x: &[f32]) -> Dd {
    Dd::of(1.0) / (dot(x, x) / Dd::of(x.len() as f64) + Dd::of(1e-6)).sqrt()
}

#[test]
fn linears_round_once() {
    Bench::all(|b| {
        let keys = b.keys.clone();
        let (w, wv) = b.weight(37, 48);
        let x = b.mat(96);
        for (out, target) in [(Boundary::Act, b.act), (Boundary::F32, Target::F32)] {
            let y = b.b.linear(&x, &w, out, b.at(&keys, Op::MlpUp));
            assert_eq!(y.width, 74);
            b.check(&y, target, Op::MlpUp, |t, e| {
                dot(&wv[e % 37 * 48..(e % 37 + 1) * 48], &row(&x, t)[e / 37 * 48..(e / 37 + 1) * 48])
            });
        }
    });
}

#[test]
fn sums_on_midpoints_go_to_the_even_neighbour() {
    // x = 1, w = (1, 2^-8) gives 1 + 2^-8, the midpoint of two BF16 neighbours; one part in 2^60 more or less decides.
    let mut b = Bench::new(true, Rounding::Nearest, KvFormat::Bf16);
    b.act = Target::Bf16;
    let keys = b.keys.clone();
    let mut b16 = Bench::new(false, Rounding::Nearest, KvFormat::Bf16);
    let tiny = (-60f32).exp2();
    let rows = [
        [1.0, 0.00390625, 0.0],
        [1.0, 0.00390625, tiny],
        [1.0, 0.00390625, -tiny],
        [-1.0, -0.00390625, -tiny],
    ];
    let v: Vec<f32> = rows.into_iter().flatten().collect();
    let (w, _) = b16.stored(vec![4, 3], v.iter().flat_map(|v| v.to_le_bytes()).collect(), v.clone());
    let x = b16.b.write(1, 3, &[1.0; 3]);
    let y = b16.b.linear(&x, &w, Boundary::Act, b.at(&keys[..1], Op::MlpUp));
    assert_eq!(y.values(), [1.0, 1.0078125, 1.0, -1.0078125]);
}

#[test]
fn norms_gates_and_sums_round_once() {
    Bench::all(|b| {
        let keys = b.keys.clone();
        let x = b.mat(96);
        let (w, wv) = b.vector(96);
        let spec = NormSpec { groups: 3, zero_centred: true, eps: 1e-6 };
        let y = b.b.norm(&x, &w, spec, b.at(&keys, Op::InputNorm));
        b.check(&y, b.act, Op::InputNorm, |t, e| {
            let g = &row(&x, t)[e / 32 * 32..(e / 32 + 1) * 32];
            dd(row(&x, t)[e]) * (Dd::of(1.0) + dd(wv[e])) * inverse_rms(g)
        });
        let (g, u) = (b.mat(40), b.mat(40));
        let y = b.b.swiglu(&g, &u, b.at(&keys, Op::MlpHidden));
        b.check(&y, b.act, Op::MlpHidden, |t, e| dd(row(&g, t)[e]).silu() * dd(row(&u, t)[e]));
        let y = b.b.gate(&g, &u, b.at(&keys, Op::AttnGated));
        b.check(&y, b.act, Op::AttnGated, |t, e| dd(row(&g, t)[e]) * dd(row(&u, t)[e]).sigmoid());
        let mut r = b.b.copy(&x);
        let y = b.mat(32);
        b.b.add(&mut r, &y, b.at(&keys, Op::FfnAdd));
        b.check(&r, b.act, Op::FfnAdd, |t, e| dd(row(&x, t)[e]) + dd(row(&y, t)[e % 32]));
        let (o, z) = (b.mat(16), b.mat(16));
        let (w, wv) = b.vector(8);
        for (kind, silu) in [(GateKind::Silu, true), (GateKind::Sigmoid, false)] {
            let y = b.b.gdn_gate(&o, &z, &w, kind, 1e-6, b.at(&keys, Op::GdnGate));
            b.check(&y, b.act, Op::GdnGate, |t, e| {
                let z = dd(row(&z, t)[e]);
                let x = &row(&o, t)[e / 8 * 8..(e / 8 + 1) * 8];
                dd(row(&o, t)[e]) * inverse_rms(x) * dd(wv[e % 8]) * if silu { z.silu() } else { z.sigmoid() }
            });
        }
    });
}

#[test]
fn hyper_connections_round_once() {
    Bench::all(|b| {
        let keys = b.keys.clone();
        let (n, h, rank) = (4, 24, 6);
        let x = b.mat(n * h);
        let (down, dv) = b.weight(rank, n * h);
        let (up, uv) = b.weight(n * h, rank);
        let (inject, iv) = b.weight(n, n * h);
        let nn = Dd::of(n as f64);
        let m = b.b.hyper_down(&x, &down, n, b.at(&keys, Op::MixerHyperDown));
        b.check(&m, b.act, Op::MixerHyperDown, |t, e| {
            (dot(&dv[e * n * h..(e + 1) * n * h], row(&x, t)) / nn).silu()
        });
        let y = b.b.hyper_up(&x, &m, &up, n, b.at(&keys, Op::MixerHyperUp));
        b.check(&y, b.act, Op::MixerHyperUp, |t, e| {
            let term = |s: usize| {
                let g = dot(&uv[(s * h + e) * rank..(s * h + e + 1) * rank], row(&m, t)).sigmoid();
                g * dd(row(&x, t)[s * h + e])
            };
            (0..n).fold(Dd::ZERO, |a, s| a + term(s)) / nn
        });
        let f = b.b.hyper_factor(&x, &inject, n, b.at(&keys, Op::MixerHyperFactor));
        b.check(&f, Target::F32, Op::MixerHyperFactor, |t, e| {
            Dd::of(2.0) * (dot(&iv[e * n * h..(e + 1) * n * h], row(&x, t)) / nn).sigmoid()
        });
        let mut r = b.b.copy(&x);
        b.b.hyper_inject(&mut r, &y, &f, b.at(&keys, Op::MixerInject));
        b.check(&r, b.act, Op::MixerInject, |t, e| {
            dd(row(&x, t)[e]) + dd(row(&f, t)[e / h]) * dd(row(&y, t)[e % h])
        });
    });
}

#[test]
fn ngram_embedding_rounds_once() {
    Bench::all(|b| {
        let keys = b.keys.clone();
        let (n, h) = (2, 16);
        let table = b.rng.values(T * 8, false);
        let e = b.b.ngram(&[NgramTicket::ready(table.clone())], b.at(&keys, Op::NgramRow));
        b.check(&e, b.act, Op::NgramRow, |t, i| dd(table[t * 8 + i]));
        let (key, query, value) = (b.mat(n * h), b.mat(n * h), b.mat(h));
        let v = b.b.ple_gate(&key, &query, &value, n, b.at(&keys, Op::PleGate));
        b.check(&v, b.act, Op::PleGate, |t, e| {
            let s = e / h * h..(e / h + 1) * h;
            let a = dot(&row(&key, t)[s.clone()], &row(&query, t)[s]) / Dd::of(h as f64).sqrt();
            let m = if a.hi.abs() < 1e-6 {
                Dd::of(1e-6)
            } else if a.hi < 0.0 {
                -a
            } else {
                a
            };
            let a = if a.hi == 0.0 {
                Dd::ZERO
            } else if a.hi < 0.0 {
                -m.sqrt()
            } else {
                m.sqrt()
            };
            let score = b.round(Target::F32, Op::PleScore, t, e / h, a);
            dd(score).sigmoid() * dd(row(&value, t)[e % h])
        });
        let (w, wv) = b.weight(n * h, 4);
        let (r0, c) = (b.mat(n * h), b.mat(n * h));
        let mut r = b.b.copy(&r0);
        b.b.ple_conv(0, &mut r, &v, &c, &w, 3, b.at(&keys, Op::PleConv));
        b.check(&r, b.act, Op::PleConv, |t, e| {
            let tap = |i: usize| {
                let at = (t + 3 * i) as isize - 9;
                if at < 0 { Dd::ZERO } else { dd(wv[e * 4 + i]) * dd(row(&c, at as usize)[e]) }
            };
            dd(row(&r0, t)[e]) + dd(row(&v, t)[e]) + (0..4).fold(Dd::ZERO, |s, i| s + tap(i)).silu()
        });
    });
}

#[test]
fn the_delta_rule_rounds_its_state_after_every_token() {
    Bench::all(|b| {
        let keys = b.keys.clone();
        let GdnDims { key_heads, value_heads: nv, key_dim: dk, value_dim: dv, conv_kernel } = dims();
        let channels = dims().channels();
        let x = b.mat(channels);
        let (w, wv) = b.weight(channels, conv_kernel);
        let u = b.b.gdn_conv(0, &x, &w, b.at(&keys, Op::GdnConv));
        b.check(&u, b.act, Op::GdnConv, |t, c| {
            let tap = |j: usize| {
                let at = (t + j) as isize - 3;
                if at < 0 { Dd::ZERO } else { dd(wv[c * 4 + j]) * dd(row(&x, at as usize)[c]) }
            };
            (0..4).fold(Dd::ZERO, |s, j| s + tap(j)).silu()
        });
        let (ga, gb) = (b.mat(nv), b.mat(nv));
        let ((al, alv), (dt, dtv)) = (b.vector(nv), b.vector(nv));
        let o = b.b.gdn(0, &u, &ga, &gb, &al, &dt, b.at(&keys, Op::GdnOut));
        let mut want = vec![Dd::ZERO; T * nv * dv];
        for h in 0..nv {
            let kh = h / (nv / key_heads);
            let mut s = vec![0f32; dk * dv];
            for t in 0..T {
                let u = row(&u, t);
                let (q, k) =
                    (&u[kh * dk..(kh + 1) * dk], &u[(key_heads + kh) * dk..(key_heads + kh + 1) * dk]);
                let v = &u[2 * key_heads * dk + h * dv..][..dv];
                let unit = |x: &[f32]| Dd::of(1.0) / (dot(x, x) + Dd::of(1e-6)).sqrt();
                let (qn, kn) = (unit(q) / Dd::of(dk as f64).sqrt(), unit(k));
                let g = -dd(alv[h]).exp() * (dd(row(&ga, t)[h]) + dd(dtv[h])).softplus();
                let g = b.round(Target::F32, Op::GdnDecay, t, h, g);
                let beta = b.round(Target::F32, Op::GdnBeta, t, h, dd(row(&gb, t)[h]).sigmoid());
                let alpha = dd(g).exp();
                let old = s.clone();
                for j in 0..dv {
                    let kv = (0..dk).fold(Dd::ZERO, |a, i| a + dd(old[i * dv + j]) * dd(k[i]));
                    let delta = dd(beta) * (dd(v[j]) - alpha * kn * kv);
                    for i in 0..dk {
                        let new = alpha * dd(old[i * dv + j]) + dd(k[i]) * kn * delta;
                        s[i * dv + j] = b.round(Target::F32, Op::GdnState, t, (h * dk + i) * dv + j, new);
                    }
                    let out = (0..dk).fold(Dd::ZERO, |a, i| a + dd(s[i * dv + j]) * dd(q[i]));
                    want[(t * nv + h) * dv + j] = out * qn;
                }
            }
        }
        b.check(&o, b.act, Op::GdnOut, |t, e| want[t * nv * dv + e]);
    });
}

fn rope() -> RopeTable {
    let freq: Vec<f64> = (0..16).map(|i| 1e4f64.powf(-f64::from(i) / 16.0)).collect();
    RopeTable { axis: (0..16).map(|i| (i % 3) as u8).collect(), freq, scale: 1.1 }
}

/// Normed and rotated element of a head.
fn rotated(x: &[Dd], w: &[f32], position: [u32; 3], i: usize) -> Dd {
    let square = x.iter().fold(Dd::ZERO, |s, v| s + *v * *v) / Dd::of(x.len() as f64);
    let n = Dd::of(1.0) / (square + Dd::of(1e-6)).sqrt();
    let y = |i: usize| x[i] * (Dd::of(1.0) + dd(w[i])) * n;
    let r = rope();
    let half = r.freq.len();
    let angle = |p: usize| f64::from(position[usize::from(r.axis[p])]) * r.freq[p];
    let (c, s) = (|p: usize| Dd::of(angle(p).cos() * r.scale), |p: usize| Dd::of(angle(p).sin() * r.scale));
    match i {
        _ if i < half => y(i) * c(i) - y(i + half) * s(i),
        _ if i < 2 * half => y(i) * c(i - half) + y(i - half) * s(i - half),
        _ => y(i),
    }
}

fn position(t: usize) -> [u32; 3] {
    let i = t as u32;
    [i, i / 2, i * 3]
}

#[test]
fn head_norms_rotate_and_round_once() {
    Bench::all(|b| {
        let keys = b.keys.clone();
        let x = b.mat(2 * D);
        let (w, wv) = b.vector(D);
        let y = b.b.norm_rope(&x, &w, &rope(), 1e-6, b.at(&keys, Op::AttnNormQ));
        b.check(&y, b.act, Op::AttnNormQ, |t, e| {
            let x: Vec<Dd> = row(&x, t)[e / D * D..(e / D + 1) * D].iter().map(|v| dd(*v)).collect();
            rotated(&x, &wv, position(t), e % D)
        });
    });
}

#[test]
fn attention_and_selection_follow_their_formulas() {
    Bench::all(|b| {
        let keys = b.keys.clone();
        let (raw, q) = (b.mat(D), b.mat(2 * D));
        let (w, wv) = b.vector(D);
        b.b.index_append(0, &raw, &w, &rope(), 1e-6, b.at(&keys, Op::IndexPooled));
        let pooled: Vec<Vec<f32>> = (0..T / 4)
            .map(|n| {
                let mean =
                    |i: usize| (0..4).fold(Dd::ZERO, |s, j| s + dd(row(&raw, 4 * n + j)[i])) / Dd::of(4.0);
                let x: Vec<Dd> = (0..D).map(mean).collect();
                let at = |i| b.round(b.act, Op::IndexPooled, 4 * n, i, rotated(&x, &wv, position(4 * n), i));
                (0..D).map(at).collect()
            })
            .collect();
        let chosen = b.b.index_select(0, &q, b.at(&keys, Op::IndexScore));
        let want: Vec<Option<Vec<u32>>> = (0..T)
            .map(|t| {
                let n = (t + 1) / 4;
                if n <= 4 {
                    return None;
                }
                let score = |k: &Vec<f32>, block: usize| {
                    let sum = row(&q, t).chunks(D).fold(Dd::ZERO, |s, q| {
                        let d = dot(q, k);
                        if d.hi > 0.0 { s + d } else { s }
                    });
                    b.round(Target::F32, Op::IndexScore, t, block, sum / Dd::of(D as f64).sqrt())
                };
                let mut all: Vec<(f32, u32)> =
                    pooled[..n].iter().enumerate().map(|(i, k)| (score(k, i), i as u32)).collect();
                all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                let mut best: Vec<u32> = all[..4].iter().map(|s| s.1).collect();
                best.sort_unstable();
                Some(best)
            })
            .collect();
        assert_eq!(chosen, want);
        let (k, v) = (b.mat(D), b.mat(D));
        b.b.kv_append(0, &k, &v);
        for selection in [None, Some(&chosen)] {
            let o = b.b.attention(0, &q, selection, b.at(&keys, Op::AttnOut));
            b.check(&o, b.act, Op::AttnOut, |t, e| {
                let query = &row(&q, t)[e / D * D..(e / D + 1) * D];
                let seen = |i: &usize| match selection.and_then(|s| s[t].as_ref()) {
                    Some(blocks) => *i >= (t + 1) / 4 * 4 || blocks.contains(&(*i as u32 / 4)),
                    None => true,
                };
                let list: Vec<usize> = (0..=t).filter(seen).collect();
                let score = |i: &usize| dot(query, row(&k, *i)) / Dd::of(D as f64).sqrt();
                let top = list.iter().map(|i| score(i).hi).fold(f64::MIN, f64::max);
                let (mut sum, mut acc) = (Dd::ZERO, Dd::ZERO);
                for i in &list {
                    let p = (score(i) - Dd::of(top)).exp();
                    sum = sum + p;
                    acc = acc + p * dd(row(&v, *i)[e % D]);
                }
                acc / sum
            });
        }
    });
}

#[test]
fn int8_attention_rotates_the_query_exactly() {
    let mut b = Bench::new(false, Rounding::Nearest, KvFormat::Int8);
    let keys = b.keys.clone();
    let (q, k, v) = (b.mat(D), b.mat(D), b.mat(D));
    b.b.kv_append(0, &k, &v);
    let o = b.b.attention(0, &q, None, b.at(&keys, Op::AttnOut));
    // Quantised keys and values differ from the exact ones by at most half a step of 1/127 of the largest of 64.
    let plain = {
        let mut p = Bench::new(false, Rounding::Nearest, KvFormat::Bf16);
        p.b.kv_append(0, &k, &v);
        p.b.attention(0, &q, None, b.at(&keys, Op::AttnOut))
    };
    let (mut d, mut m) = (0f32, 0f32);
    for (a, b) in o.values().iter().zip(plain.values()) {
        d = d.max((a - b).abs());
        m = m.max(b.abs());
    }
    assert!(d > 0.0 && d < 0.05 * m, "{d} of {m}");
    let mut r = vec![1f32; D];
    hadamard(&mut r);
    assert_eq!(r[0], (D as f32).sqrt());
}

#[test]
fn routing_prefers_the_lower_id_and_weights_sum_to_one() {
    let mut b = Bench::new(false, Rounding::Nearest, KvFormat::Bf16);
    let keys = b.keys.clone();
    let x = b.b.write(2, 4, &[1.0, 3.0, 3.0, 3.0, 0.5, 0.5, 0.5, 0.5]);
    let r = b.b.route(&x, 2, b.at(&keys[..2], Op::RouteWeight));
    let ids: Vec<Vec<u32>> = r.iter().map(|r| r.iter().map(|e| e.0).collect()).collect();
    assert_eq!(ids, [[1, 2], [0, 1]]);
    assert!(r.iter().flatten().all(|e| e.1 == 0.5));
}
