//! Groupwise integers: bit positions by hand, encoders against straightforward references, refusals.

use half::f16;
use infernix_formats::groupwise::{Method, encode, encode_absmax, pack_rows, unpack_rows};
use infernix_formats::{Encoded, Format, FormatError, Layout, RowPlanes, encoded_size, row_planes};
use proptest::prelude::*;

const FORMATS: [Format; 4] = [Format::Q4G64, Format::Q5G64, Format::Q6G64, Format::Q8G32];

fn object(format: Format, shape: &[u64; 2], planes: &RowPlanes) -> Vec<u8> {
    let mut out = vec![0; encoded_size(Layout::RowSplitK128V1, format, shape).unwrap() as usize];
    for p in row_planes(Layout::RowSplitK128V1, format, shape, 0..shape[0]).unwrap() {
        out[p.offset as usize..(p.offset + p.bytes) as usize].copy_from_slice(planes.plane(p.role));
    }
    out
}

#[test]
fn bit_positions_computed_by_hand() {
    let mut out = RowPlanes::default();
    let mut q = [0i8; 64];
    (q[0], q[1], q[9], q[63]) = (-8, 7, 3, -1);
    pack_rows(Format::Q4G64, 64, &q, &[0x3C00], 0, &mut out).unwrap();
    assert_eq!(out.codes.len(), 64, "K padded to 128: two groups");
    assert_eq!((out.codes[0], out.codes[4], out.codes[31]), (0x78, 0x30, 0xF0));
    assert_eq!(out.scales, [0x00, 0x3C, 0, 0]);
    (q[0], q[1], q[9], q[63]) = (-16, 15, -1, 3);
    pack_rows(Format::Q5G64, 64, &q, &[0x3C00], 0, &mut out).unwrap();
    // -16 = 0b10000, 15 = 0b01111, -1 = 0b11111, 3 = 0b00011.
    assert_eq!((out.codes[0], out.codes[4], out.codes[31]), (0xF0, 0xF0, 0x30));
    assert_eq!((out.high[0], out.high[1], out.high[7], out.high.len()), (0b1, 0b10, 0, 16));
    (q[0], q[1], q[9], q[63]) = (-32, 31, -1, 16);
    pack_rows(Format::Q6G64, 64, &q, &[0x3C00], 0, &mut out).unwrap();
    // High pairs: -32 -> 10, 31 -> 01, -1 -> 11, 16 -> 01.
    assert_eq!((out.codes[0], out.codes[4], out.codes[31]), (0xF0, 0xF0, 0x00));
    assert_eq!((out.high[0], out.high[2], out.high[15], out.high.len()), (0b0110, 0b1100, 0b0100_0000, 32));
    pack_rows(Format::Q8G32, 3, &[-127, 0, 127], &[1], 0, &mut out).unwrap();
    assert_eq!((&out.codes[..4], out.codes.len(), out.scales.len()), (&[0x81, 0, 0x7F, 0][..], 128, 8));
}

#[test]
fn absmax_computed_by_hand() {
    let mut out = RowPlanes::default();
    // amax 7 -> scale 1; 0.5 and 1.5 and 2.5 are ties to even; -7 maps to -7.
    let mut x = vec![0f32; 64];
    x[..6].copy_from_slice(&[7.0, 0.5, 1.5, 2.5, -7.0, -0.5]);
    encode_absmax(Format::Q4G64, 64, &x, 0, &mut out).unwrap();
    let (mut q, mut s) = ([0i8; 64], [0u16; 1]);
    unpack_rows(Format::Q4G64, 64, &out, &mut q, &mut s).unwrap();
    assert_eq!((&q[..6], s[0]), (&[7, 0, 2, 2, -7, 0][..], 0x3C00));
    // A scale that underflows becomes 2^-24; zeros have scale 0.
    encode_absmax(Format::Q8G32, 2, &[1e-9, 0.0, 0.0, -0.0], 0, &mut out).unwrap();
    assert_eq!((out.scales[0], out.scales[8]), (1, 0));
    let err = encode_absmax(Format::Q4G64, 2, &[0.0, 0.0, 0.0, 1e6], 10, &mut out).unwrap_err();
    assert!(matches!(&err, FormatError::ScaleRange { place, .. } if place.row == 11), "{err}");
    for bad in [f32::NAN, f32::INFINITY] {
        let err = encode_absmax(Format::Q4G64, 2, &[0.0, 0.0, 0.0, bad], 10, &mut out).unwrap_err();
        assert!(err.to_string().contains("row 11, column 1"), "{err}");
    }
}

/// The documented rules written down plainly: every candidate, every exact error.
fn reference(format: Format, method: Method, x: &[f32]) -> (u16, Vec<i8>) {
    let spec = format.group_spec().unwrap();
    let mut g = x.to_vec();
    g.resize(spec.group, 0.0);
    let amax = g.iter().fold(0f32, |m, v| m.max(v.abs()));
    if amax == 0.0 {
        return (0, vec![0; spec.group]);
    }
    let codes = |w: u16| -> Vec<i8> {
        if w == 0 {
            return vec![0; spec.group];
        }
        let inv = 1f32 / f16::from_bits(w).to_f32();
        let q = |x: &f32| (x * inv).round_ties_even().clamp(spec.qmin as f32, spec.qmax as f32) as i8;
        g.iter().map(q).collect()
    };
    let tree = |l: &[f64]| ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
    let sum = |f: &dyn Fn(usize) -> f64| {
        let mut l = [0f64; 8];
        (0..spec.group).for_each(|i| l[i % 8] += f(i));
        tree(&l)
    };
    let raw = (f64::from(amax) / f64::from(spec.qmax)) as f32;
    let s0 = f16::from_f32(raw).to_bits().max(1);
    if method == Method::Absmax {
        return (s0, codes(s0));
    }
    let q0 = codes(s0);
    let qq = sum(&|i| f64::from(q0[i]) * f64::from(q0[i]));
    let xq = sum(&|i| f64::from(g[i]) * f64::from(q0[i]));
    let s1 = (qq > 0.0).then(|| i32::from(f16::from_f32((xq / qq) as f32).to_bits()));
    let times = |w: i32, f: f32| i32::from(f16::from_f32(f16::from_bits(w as u16).to_f32() * f).to_bits());
    let z = i32::from(s0);
    let mut list = vec![Some(z)];
    list.extend([0.25, 0.5, 2.0, 4.0].map(|f| Some(times(z, f))));
    let s1 = s1.filter(|w| (0..=0x7BFF).contains(w));
    list.push(s1);
    list.extend([0.5, 2.0].map(|f| s1.map(|w| times(w, f))));
    list.extend([1, -1, 2, -2].map(|d| Some(z + d)));
    list.extend([2, -2].map(|d| s1.map(|w| w + d)));
    assert_eq!(list.len(), 14);
    let mut best: Option<(f64, u16)> = None;
    for w in list.into_iter().flatten().filter(|w| (0..=0x7BFF).contains(w)) {
        let w = w as u16;
        let (q, s) = (codes(w), f64::from(f16::from_bits(w).to_f32()));
        let e = sum(&|i| (f64::from(g[i]) - s * f64::from(q[i])).powi(2));
        if best.is_none_or(|(b, _)| e < b) {
            best = Some((e, w));
        }
    }
    let w = best.unwrap().1;
    (w, codes(w))
}

/// Values of many shapes: bells, flat, sparse, outliers, tiny ones in the subnormal range, exact grids with ties.
fn values(max: usize) -> impl Strategy<Value = Vec<f32>> {
    let one = prop_oneof![
        4 => -1f32..1.0,
        1 => Just(0.0f32),
        1 => (-16i32..16).prop_map(|n| n as f32 / 8.0),
        1 => -8f32..8.0,
    ];
    (
        proptest::collection::vec(one, 1..max),
        prop_oneof![3 => -6i32..6, 1 => -30i32..-16, 1 => -140i32..-100, 1 => 10i32..15],
    )
        .prop_map(|(v, e)| v.into_iter().map(|x| x * 2f32.powi(e)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn encoders_equal_the_plain_rules(x in values(200), which in 0usize..4, mse: bool) {
        let format = FORMATS[which];
        let method = if mse { Method::Mse } else { Method::Absmax };
        let (k, group) = (x.len(), format.group_spec().unwrap().group);
        let mut out = RowPlanes::default();
        encode(format, method, k, &x, 0, &mut out).unwrap();
        let (mut q, mut s) = (vec![0; k], vec![0; k.div_ceil(group)]);
        unpack_rows(format, k, &out, &mut q, &mut s).unwrap();
        for (g, x) in x.chunks(group).enumerate() {
            let (word, codes) = reference(format, method, x);
            prop_assert_eq!(s[g], word, "group {}", g);
            prop_assert_eq!(&q[g * group..g * group + x.len()], &codes[..x.len()]);
        }
        // The stored object is legal and decodes to code x scale.
        let shape = [1, k as u64];
        let bytes = object(format, &shape, &out);
        let view = Encoded::new(Layout::RowSplitK128V1, format, &shape, &bytes).unwrap();
        view.validate_words().unwrap();
        let (mut f, mut d) = (vec![0f32; k], vec![0f64; k]);
        view.decode_rows_f32(0..1, &mut f).unwrap();
        view.decode_rows_f64(0..1, &mut d).unwrap();
        for i in 0..k {
            let v = f64::from(q[i]) * f64::from(f16::from_bits(s[i / group]).to_f32());
            prop_assert!(v == d[i] && v == f64::from(f[i]));
        }
    }

    #[test]
    fn planes_round_trip(rows in 0usize..4, k in 1usize..300, seed: u64, which in 0usize..4) {
        let format = FORMATS[which];
        let spec = format.group_spec().unwrap();
        let mut state = seed;
        let mut next = || { state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1); (state >> 33) as i32 };
        let q: Vec<i8> = (0..rows * k).map(|_| (next().rem_euclid(spec.qmax - spec.qmin + 1) + spec.qmin) as i8).collect();
        let s: Vec<u16> = (0..rows * k.div_ceil(spec.group)).map(|_| (next() % 0x7BFF) as u16 + 1).collect();
        let mut out = RowPlanes::default();
        pack_rows(format, k, &q, &s, 0, &mut out).unwrap();
        let (mut q2, mut s2) = (vec![0; q.len()], vec![0; s.len()]);
        unpack_rows(format, k, &out, &mut q2, &mut s2).unwrap();
        prop_assert!(q == q2 && s == s2);
    }
}

#[test]
fn illegal_words_are_named() {
    let mut out = RowPlanes::default();
    let shape = [2, 70];
    for format in FORMATS {
        let x: Vec<f32> = (0..140).map(|i| (i as f32 * 0.7).sin()).collect();
        encode_absmax(format, 70, &x, 0, &mut out).unwrap();
        let good = object(format, &shape, &out);
        let list = row_planes(Layout::RowSplitK128V1, format, &shape, 1..2).unwrap();
        let (codes, scales) = (list[0].offset as usize, list.last().unwrap().offset as usize);
        let group = format.group_spec().unwrap().group;
        let expect = |at: usize, patch: &[u8], what: &str| {
            let mut bytes = good.clone();
            bytes[at..at + patch.len()].copy_from_slice(patch);
            let err = Encoded::new(Layout::RowSplitK128V1, format, &shape, &bytes)
                .unwrap()
                .validate_words()
                .unwrap_err();
            assert!(err.to_string().contains(what), "{format}: {err}");
        };
        expect(scales, &[0x00, 0x7C], "row 1, column 0");
        expect(scales + 2, &[0x01, 0x80], &format!("row 1, column {group}"));
        expect(scales, &[0, 0], "zero scale needs zero codes");
        expect(codes + 127.min(list[0].bytes as usize - 1), &[0x70], "padding");
        if format == Format::Q8G32 {
            expect(codes + 5, &[0x80], "row 1, column 5");
            expect(scales + 6, &[1, 0], "group of padding");
        }
        // Padding between planes.
        if list.len() > 1 && good.len() > 300 {
            let first = row_planes(Layout::RowSplitK128V1, format, &shape, 0..2).unwrap()[0];
            if first.bytes % 256 != 0 {
                expect(first.bytes as usize, &[1], "padding byte");
            }
        }
    }
    let err = pack_rows(Format::Q4G64, 1, &[8], &[1], 3, &mut out).unwrap_err();
    assert!(err.to_string().contains("row 3, column 0"), "{err}");
}
