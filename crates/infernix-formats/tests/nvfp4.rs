//! NVFP4 matrices and expert records: positions by the documented formulas, encoders against exhaustive search.

use infernix_formats::expert_bank::{
    BankShape, BlockFp8Planes, ExpertMatrix, ExpertRecord, Nvfp4Planes, fp8_planes, pack_fp8, pack_nvfp4,
    unpack_nvfp4,
};
use infernix_formats::nvfp4::{Method, divisor, encode, pack_rows, unpack_scales};
use infernix_formats::scalar::{E2M1, E4M3, e2m1_from_f32, e4m3_from_f32, e4m3_to_f32};
use infernix_formats::{Encoded, Format, FormatError, Layout, RowPlanes, amax, encoded_size, row_planes};
use proptest::prelude::*;

struct Lcg(u64);
impl Lcg {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 56) as u8
    }
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.byte()).collect()
    }
    fn scales(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.byte() % 0x7F).collect()
    }
}

fn object(layout: Layout, format: Format, shape: &[u64], planes: &RowPlanes) -> Vec<u8> {
    let mut out = vec![0; encoded_size(layout, format, shape).unwrap() as usize];
    for p in row_planes(layout, format, shape, 0..shape[0]).unwrap() {
        out[p.offset as usize..(p.offset + p.bytes) as usize].copy_from_slice(planes.plane(p.role));
    }
    out
}

fn nibble(codes: &[u8], at: usize) -> u8 {
    (codes[at / 2] >> (4 * (at % 2))) & 15
}

#[test]
fn tiled_scales_lie_where_the_formula_says() {
    let (n, k) = (256usize, 192usize);
    let mut rng = Lcg(1);
    let (codes, scales) = (rng.bytes(n * k / 2), rng.scales(n * k / 16));
    let mut out = RowPlanes::default();
    let layout = Layout::BlockScaleK16M128x4V1;
    pack_rows(layout, k, &codes, &scales, 3.0, &mut out).unwrap();
    for row in 0..n {
        for g in 0..k / 16 {
            let tile = row / 128 * (k / 64) + g / 4;
            let at = tile * 512 + row % 32 * 16 + (row % 128) / 32 * 4 + g % 4;
            assert_eq!(out.scales[at], scales[row * k / 16 + g]);
        }
    }
    let mut back = vec![0; scales.len()];
    unpack_scales(layout, k, &out.scales, &mut back).unwrap();
    assert!(back == scales && out.codes == codes && out.global == 3f32.to_le_bytes());
    // Both layouts decode alike; a divisor divides, a multiplier multiplies, one rounding each.
    let shape = [n as u64, k as u64];
    let tiled = object(layout, Format::Nvfp4, &shape, &out);
    pack_rows(Layout::BlockScaleK16V1, k, &codes, &scales, 3.0, &mut out).unwrap();
    let plain = object(Layout::BlockScaleK16V1, Format::Nvfp4, &shape, &out);
    let mut values = vec![vec![0f32; 3 * k]; 3];
    let decode = |layout, format, bytes: &[u8], out: &mut [f32]| {
        let view = Encoded::new(layout, format, &shape, bytes).unwrap();
        view.validate_words().unwrap();
        view.decode_rows_f32(130..133, out).unwrap();
    };
    decode(layout, Format::Nvfp4, &tiled, &mut values[0]);
    decode(Layout::BlockScaleK16V1, Format::Nvfp4, &plain, &mut values[1]);
    decode(Layout::BlockScaleK16V1, Format::Nvfp4Mul, &plain, &mut values[2]);
    for i in 0..3 * k {
        let at = 130 * k + i;
        let exact = E2M1[usize::from(nibble(&codes, at))] * e4m3_to_f32(scales[at / 16]);
        assert_eq!(values[0][i].to_bits(), (exact / 3.0).to_bits());
        assert_eq!(values[1][i].to_bits(), (exact / 3.0).to_bits());
        assert_eq!(values[2][i].to_bits(), (exact * 3.0).to_bits());
    }
}

#[test]
fn illegal_nvfp4_words_are_named() {
    let mut out = RowPlanes::default();
    let mut scales = vec![0x38u8; 6];
    for bad in [0x7F, 0x80, 0xB8, 0xFF] {
        scales[4] = bad;
        let err = pack_rows(Layout::BlockScaleK16V1, 48, &[0; 48], &scales, 1.0, &mut out).unwrap_err();
        assert!(err.to_string().contains("row 1, column 16"), "{err}");
    }
    scales[4] = 0x7E;
    for bad in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        pack_rows(Layout::BlockScaleK16V1, 48, &[0; 48], &scales, bad, &mut out).unwrap();
        for format in [Format::Nvfp4, Format::Nvfp4Mul] {
            let bytes = object(Layout::BlockScaleK16V1, format, &[2, 48], &out);
            let view = Encoded::new(Layout::BlockScaleK16V1, format, &[2, 48], &bytes).unwrap();
            assert!(matches!(view.validate_words().unwrap_err(), FormatError::IllegalWord { .. }));
        }
    }
    assert!(encode(Layout::BlockScaleK16V1, Method::Mse, 24, &[0.0; 24], 1.0, 0, &mut out).is_err());
    let mut x = [1f32; 32];
    x[20] = f32::NAN;
    let err = encode(Layout::BlockScaleK16V1, Method::Mse, 16, &x, 1.0, 5, &mut out).unwrap_err();
    assert!(err.to_string().contains("row 6, column 4"), "{err}");
    assert!(divisor(Method::Absmax, 1e-37).is_err());
    assert_eq!(divisor(Method::Absmax, 0.0).unwrap(), 1.0);
}

/// All 126 scales, nothing left out.
fn exhaustive(t: &[f32]) -> u8 {
    let mut best = (f64::INFINITY, 0);
    for word in 1..=126u8 {
        let s = E4M3[usize::from(word)];
        let mut l = [0f64; 8];
        for (i, &t) in t.iter().enumerate() {
            let v = E2M1[usize::from(e2m1_from_f32(t / s))] * s;
            l[i % 8] += (f64::from(t) - f64::from(v)).powi(2);
        }
        let e = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
        if e < best.0 {
            best = (e, word);
        }
    }
    best.1
}

fn blocks() -> impl Strategy<Value = Vec<f32>> {
    let one = prop_oneof![
        4 => -1f32..1.0,
        2 => Just(0.0f32),
        1 => (-24i32..24).prop_map(|n| n as f32 / 4.0),
        1 => -6f32..6.0,
    ];
    let block = (proptest::collection::vec(one, 16), prop_oneof![3 => -3i32..3, 2 => -18i32..0])
        .prop_map(|(v, e)| v.into_iter().map(|x| x * 2f32.powi(e)).collect::<Vec<_>>());
    proptest::collection::vec(block, 1..6).prop_map(|b| b.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn pruned_search_equals_the_exhaustive_one(x in blocks(), own_divisor: bool) {
        let d = if own_divisor { divisor(Method::Mse, amax(&x)).unwrap() } else { 1.0 };
        let k = x.len();
        let mut out = RowPlanes::default();
        encode(Layout::BlockScaleK16V1, Method::Mse, k, &x, d, 0, &mut out).unwrap();
        for (n, block) in x.chunks(16).enumerate() {
            let t: Vec<f32> = block.iter().map(|x| x * d).collect();
            let word = exhaustive(&t);
            prop_assert_eq!(out.scales[n], word, "block {:?}", t);
            for i in 0..16 {
                prop_assert_eq!(nibble(&out.codes, 16 * n + i), e2m1_from_f32(t[i] / e4m3_to_f32(word)));
            }
        }
    }

    #[test]
    fn absmax_equals_the_plain_rule(x in blocks()) {
        let d = divisor(Method::Absmax, amax(&x)).unwrap();
        let mut out = RowPlanes::default();
        encode(Layout::BlockScaleK16V1, Method::Absmax, x.len(), &x, d, 0, &mut out).unwrap();
        for (n, block) in x.chunks(16).enumerate() {
            let bmax = amax(block);
            let word = if bmax == 0.0 { 0 } else { e4m3_from_f32((bmax * d / 6.0).min(448.0)).max(1) };
            prop_assert_eq!(out.scales[n], word);
            for i in 0..16 {
                let want = if word == 0 { e2m1_from_f32(block[i]) } else { e2m1_from_f32(block[i] * d / e4m3_to_f32(word)) };
                prop_assert_eq!(nibble(&out.codes, 16 * n + i), want);
            }
        }
    }

    #[test]
    fn expert_records_round_trip(h in 1u64..5, i in 1u64..5, seed: u64, divide: bool) {
        let (h, i) = (16 * h, 16 * i);
        let shape = BankShape::new(Layout::Nvfp4ExpertRg16V1, &[2, h, i]).unwrap();
        let mut rng = Lcg(seed);
        let n = (h * i) as usize;
        let src: Vec<(Vec<u8>, Vec<u8>)> = (0..3).map(|_| (rng.bytes(n / 2), rng.scales(n / 16))).collect();
        let p = |m: usize| Nvfp4Planes { codes: &src[m].0, scales: &src[m].1 };
        let mut record = vec![0xAA; shape.stride as usize];
        pack_nvfp4(&shape, p(0), p(1), p(2), &mut record).unwrap();
        let format = if divide { Format::Nvfp4 } else { Format::Nvfp4Mul };
        let globals = [0.5, 3.0, 7.0];
        let view = ExpertRecord::new(shape, format, globals, &record).unwrap();
        view.validate_words().unwrap();
        for m in ExpertMatrix::ALL {
            let (mut codes, mut scales) = (vec![0; n / 2], vec![0; n / 16]);
            unpack_nvfp4(&shape, &record, m, &mut codes, &mut scales).unwrap();
            prop_assert!(codes == src[m.index()].0 && scales == src[m.index()].1);
            let (rows, k) = shape.matrix(m);
            let mut out = vec![0f32; n];
            view.decode_f32(m, 0..rows, &mut out).unwrap();
            let g = globals[m.index()];
            for at in 0..n {
                let v = E2M1[usize::from(nibble(&codes, at))] * e4m3_to_f32(scales[at / 16]);
                prop_assert_eq!(out[at], if divide { v / g } else { v * g });
                // Position of the code and the scale by the documented formulas.
                let (r, c) = (at / k as usize, at % k as usize);
                let (start, r) = match m {
                    ExpertMatrix::Gate => (0, 2 * r),
                    ExpertMatrix::Up => (0, 2 * r + 1),
                    ExpertMatrix::Down => ((2 * i / 16 * (h / 16) * 144) as usize, r),
                };
                let unit = start + (r / 16 * (k as usize / 16) + c / 16) * 144;
                let (q, t) = (c % 16 / 4, c % 4);
                let byte = record[unit + 32 * q + 4 * (r % 8) + t];
                prop_assert_eq!((byte >> (4 * (r % 16 / 8))) & 15, nibble(&codes, at));
                prop_assert_eq!(record[unit + 128 + r % 16], scales[at / 16]);
            }
        }
    }
}

#[test]
fn an_illegal_word_of_an_expert_is_named() {
    let shape = [2, 32, 16];
    let bank = BankShape::new(Layout::Nvfp4ExpertRg16V1, &shape).unwrap();
    let (codes, scales) = (vec![0x21u8; 256], vec![0x38u8; 32]);
    let good = Nvfp4Planes { codes: &codes, scales: &scales };
    let mut bad_scales = scales.clone();
    bad_scales[5] = 0x7F;
    let bad = Nvfp4Planes { codes: &codes, scales: &bad_scales };
    let mut record = vec![0; bank.record_bytes as usize];
    let err = pack_nvfp4(&bank, good, bad, good, &mut record).unwrap_err();
    assert!(err.to_string().contains("up row 2, column 16"), "{err}");
    let err = pack_nvfp4(&bank, good, good, bad, &mut record).unwrap_err();
    assert!(err.to_string().contains("down row 5, column 0"), "{err}");

    pack_nvfp4(&bank, good, good, good, &mut record).unwrap();
    let size = encoded_size(Layout::Nvfp4ExpertRg16V1, Format::Nvfp4Mul, &shape).unwrap() as usize;
    let mut bytes = vec![0u8; size];
    for e in 0..2 {
        bytes[bank.record(e).start as usize..][..record.len()].copy_from_slice(&record);
    }
    for g in bytes[size - 24..].chunks_exact_mut(4) {
        g.copy_from_slice(&0.25f32.to_le_bytes());
    }
    let check = |bytes: &[u8]| {
        Encoded::new(Layout::Nvfp4ExpertRg16V1, Format::Nvfp4Mul, &shape, bytes).unwrap().validate_words()
    };
    check(&bytes).unwrap();
    let mut b = bytes.clone();
    b[bank.stride as usize + 144 + 128 + 3] = 0xFF; // Row 3 of the first group is up 1; the second unit starts at column 16.
    assert!(check(&b).unwrap_err().to_string().contains("expert 1 up row 1, column 16"));
    let mut b = bytes.clone();
    b[size - 1] = 0xFF;
    assert!(check(&b).unwrap_err().to_string().contains("expert 1 down row 0, column 0"));
    let mut b = bytes.clone();
    b[bank.stride as usize * 2 - 1] = 1;
    let err = check(&b).unwrap_err();
    assert_eq!(err, FormatError::Padding { offset: bank.stride * 2 - 1, byte: 1 });
}

#[test]
fn fp8_expert_records_round_trip_with_truncated_tiles() {
    let shape = BankShape::new(Layout::Fp8ExpertBlock128V1, &[1, 200, 130]).unwrap();
    let (n, tiles) = (200 * 130usize, 4usize);
    let mut rng = Lcg(7);
    let src: Vec<(Vec<u8>, Vec<f32>)> = (0..3)
        .map(|m| {
            (
                rng.bytes(n).iter().map(|b| b & 0xBF).collect(),
                (0..tiles).map(|t| 0.5 + (m * 4 + t) as f32).collect(),
            )
        })
        .collect();
    let p = |m: usize| BlockFp8Planes { codes: &src[m].0, scales: &src[m].1 };
    let mut bytes = vec![0xAA; shape.stride as usize];
    pack_fp8(&shape, p(0), p(1), p(2), &mut bytes).unwrap();
    let tensor = [1, 200, 130];
    let view = Encoded::new(Layout::Fp8ExpertBlock128V1, Format::Fp8Block128, &tensor, &bytes).unwrap();
    view.validate_words().unwrap();
    for m in ExpertMatrix::ALL {
        let (codes, scales) = fp8_planes(&shape, &bytes, m).unwrap();
        assert_eq!(codes, src[m.index()].0);
        let widths: Vec<u8> = src[m.index()].1.iter().flat_map(|s| s.to_le_bytes()).collect();
        assert_eq!(scales, widths);
        let (rows, k) = shape.matrix(m);
        let mut out = vec![0f64; (rows * k) as usize];
        view.expert(0).unwrap().decode_f64(m, 0..rows, &mut out).unwrap();
        for (at, v) in out.iter().enumerate() {
            let (r, c) = (at / k as usize, at % k as usize);
            let s = src[m.index()].1[r / 128 * 2 + c / 128];
            assert_eq!(*v, f64::from(e4m3_to_f32(codes[at])) * f64::from(s));
        }
    }
    assert!(view.expert(1).is_err());
    let mut bad = src[1].0.clone();
    bad[131] = 0x7F;
    let err = pack_fp8(&shape, p(0), BlockFp8Planes { codes: &bad, scales: &src[1].1 }, p(2), &mut bytes)
        .unwrap_err();
    assert!(err.to_string().contains("up row 0, column 131"), "{err}");
}
