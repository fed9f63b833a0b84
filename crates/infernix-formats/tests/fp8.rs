//! FP8 and MXFP8 layouts: encoders, tiles, refusals.

use half::bf16;
use infernix_formats::scalar::{e4m3_from_f32, e4m3_to_f32};
use infernix_formats::{Encoded, Format, Layout, RowPlanes, encoded_size, fp8, mxfp8, row_planes};
use proptest::prelude::*;

fn object(layout: Layout, format: Format, shape: &[u64], rows: u64, planes: &RowPlanes) -> Vec<u8> {
    let mut out = vec![0; encoded_size(layout, format, shape).unwrap() as usize];
    for p in row_planes(layout, format, shape, 0..rows).unwrap() {
        out[p.offset as usize..(p.offset + p.bytes) as usize].copy_from_slice(planes.plane(p.role));
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn row_encoder_equals_the_plain_rule(k in 1usize..70, seed in proptest::collection::vec(-4f32..4.0, 140), e in -20i32..20) {
        let x: Vec<f32> = seed[..2 * k].iter().map(|v| v * 2f32.powi(e)).collect();
        let mut out = RowPlanes::default();
        fp8::encode_row_maxabs(k, &x, 0, &mut out).unwrap();
        let shape = [2, k as u64];
        let bytes = object(Layout::RowScaleV1, Format::Fp8Row, &shape, 2, &out);
        let view = Encoded::new(Layout::RowScaleV1, Format::Fp8Row, &shape, &bytes).unwrap();
        view.validate_words().unwrap();
        let mut decoded = vec![0f32; 2 * k];
        view.decode_rows_f32(0..2, &mut decoded).unwrap();
        for r in 0..2 {
            let v: Vec<f32> = x[r * k..(r + 1) * k].iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            let amax = v.iter().fold(0f32, |m, v| m.max(v.abs()));
            let s = bf16::from_f32(amax / 448.0);
            prop_assert_eq!(&out.scales[2 * r..2 * r + 2], &s.to_bits().to_le_bytes());
            for c in 0..k {
                let code = if amax == 0.0 { 0 } else { e4m3_from_f32(v[c] / s.to_f32()) };
                prop_assert_eq!(out.codes[r * k + c], code);
                prop_assert_eq!(decoded[r * k + c], e4m3_to_f32(code) * s.to_f32());
            }
        }
    }
}

#[test]
fn row_encoder_edges() {
    let mut out = RowPlanes::default();
    // A row of zeros, and one so small that its scale underflows to the least subnormal.
    fp8::encode_row_maxabs(2, &[0.0, -0.0, 1e-40, 0.0], 0, &mut out).unwrap();
    assert_eq!((&out.codes[..2], &out.scales[..]), (&[0, 0][..], &[0, 0, 1, 0][..]));
    assert!(out.codes[2] > 0);
    let err = fp8::encode_row_maxabs(2, &[0.0, 0.0, 0.0, f32::MAX], 8, &mut out).unwrap_err();
    assert!(err.to_string().contains("row 9, column 1"), "FP32's largest value is infinite in BF16: {err}");
    fp8::encode_row_maxabs(5, &[], 0, &mut out).unwrap();
    assert!(out.codes.is_empty() && out.scales.is_empty());
    assert!(fp8::encode_row_maxabs(5, &[1.0; 6], 0, &mut out).is_err());
}

#[test]
fn table_rule_rounds_the_quotient_to_bf16_first() {
    let values = [448.0, 1.0, -3.3, 0.0078125, 27.031_25];
    let s = fp8::table_scale(448.0);
    assert_eq!(s, 0x3F80);
    let mut codes = [0; 5];
    fp8::encode_table(5, &values, s, &mut codes).unwrap();
    for (v, c) in values.iter().zip(codes) {
        assert_eq!(c, e4m3_from_f32(bf16::from_f32(*v).to_f32()));
    }
    // 17.03 / 1 rounds to 17.0 in BF16, a tie that goes to 16; rounded directly it would be 18.
    fp8::encode_table(1, &[17.03], s, &mut codes[..1]).unwrap();
    assert_eq!((e4m3_to_f32(codes[0]), e4m3_to_f32(e4m3_from_f32(17.03))), (16.0, 18.0));
    assert!(fp8::encode_table(1, &[1.0], 0, &mut codes[..1]).is_err());
    assert!(fp8::encode_table(1, &[f32::NAN], s, &mut codes[..1]).is_err());
}

#[test]
fn scales_convert_exactly_or_not_at_all() {
    let mut out = [0; 4];
    fp8::row_scales_exact(&[1.0, 0.007_812_5], &mut out).unwrap();
    assert_eq!(out, [0x80, 0x3F, 0x00, 0x3C]);
    let err = fp8::row_scales_exact(&[1.0, 0.1], &mut out).unwrap_err();
    assert!(err.to_string().contains("row 1"), "{err}");
    let mut wide = [0f32; 2];
    fp8::widen_scales(&out, &mut wide).unwrap();
    assert_eq!(wide[0], 1.0);
}

#[test]
fn tiles_of_stacked_matrices_start_anew() {
    let shape = [2, 130, 200];
    let layout = Layout::Block128ScaleV1;
    let codes: Vec<u8> = (0..2 * 130 * 200u32).map(|i| (i % 0x7F) as u8).collect();
    let scales: Vec<u8> = (0..8).flat_map(|t| (1.0 + t as f32).to_le_bytes()).collect();
    let mut out = RowPlanes::default();
    fp8::pack_rows(layout, Format::Fp8Block128, &shape, 0..260, &codes, &scales, &mut out).unwrap();
    let bytes = object(layout, Format::Fp8Block128, &shape, 260, &out);
    let view = Encoded::new(layout, Format::Fp8Block128, &shape, &bytes).unwrap();
    view.validate_words().unwrap();
    let mut values = vec![0f32; 200];
    for row in [0u64, 127, 128, 129, 130, 257, 258, 259] {
        view.decode_rows_f32(row..row + 1, &mut values).unwrap();
        let line = row / 130 * 2 + row % 130 / 128;
        for c in 0..200 {
            let s = 1.0 + (line * 2) as f32 + (c / 128) as f32;
            assert_eq!(values[c], e4m3_to_f32(codes[row as usize * 200 + c]) * s, "row {row} column {c}");
        }
    }
    // The plane ranges of a middle range of rows name just the tile lines touched.
    let list = row_planes(layout, Format::Fp8Block128, &shape, 129..131).unwrap();
    assert_eq!((list[1].offset - 52_224, list[1].bytes), (8, 16));
}

#[test]
fn illegal_fp8_words_are_named() {
    let mut out = RowPlanes::default();
    let expect = |r: Result<(), infernix_formats::FormatError>, what: &str| {
        let err = r.unwrap_err().to_string();
        assert!(err.contains(what), "{err}");
    };
    let (row, tensor, block) = (Layout::RowScaleV1, Layout::TensorScaleV1, Layout::Block128ScaleV1);
    let one = 1f32.to_le_bytes();
    let mut pack =
        |l, f, codes: &[u8], scales: &[u8]| fp8::pack_rows(l, f, &[2, 2], 0..2, codes, scales, &mut out);
    expect(pack(row, Format::Fp8Row, &[0, 0, 0, 0xFF], &[0x80, 0x3F, 0x80, 0x3F]), "row 1, column 1");
    expect(pack(row, Format::Fp8Row, &[0, 0, 1, 0], &[0x80, 0x3F, 0, 0]), "zero scale needs zero codes");
    expect(pack(row, Format::Fp8Row, &[0; 4], &[0x80, 0x3F, 0x80, 0xBF]), "row 1, column 0");
    expect(pack(row, Format::Fp8Row, &[0; 4], &[0x80, 0x7F, 0x80, 0x3F]), "row 0, column 0");
    expect(pack(tensor, Format::Fp8Tensor, &[0, 0, 0x7F, 0], &one), "row 1, column 0");
    expect(pack(tensor, Format::Fp8Tensor, &[0, 0, 0, 3], &[0; 4]), "row 1, column 1");
    expect(pack(tensor, Format::Fp8Tensor, &[0; 4], &f32::NAN.to_le_bytes()), "tensor scale");
    expect(pack(block, Format::Fp8Block128, &[0; 4], &(-1f32).to_le_bytes()), "tile scale");
    expect(pack(block, Format::Fp8Block128, &[0, 1, 0, 0], &[0; 4]), "row 0, column 1");
    pack(row, Format::Fp8Row, &[0, 0x80, 1, 0], &[0, 0, 0x80, 0x3F]).unwrap();
    let mut codes = vec![0x38; 128];
    expect(mxfp8::pack_rows(64, &codes, &[127, 127, 127, 255], 4, &mut out), "row 5, column 32");
    codes[70] = 0x7F;
    expect(mxfp8::pack_rows(64, &codes, &[127; 4], 4, &mut out), "row 5, column 6");
    assert!(mxfp8::pack_rows(48, &[0; 48], &[127], 0, &mut out).is_err());
}

#[test]
fn mxfp8_decodes_code_times_power_of_two() {
    let codes: Vec<u8> = (0..64).collect();
    let mut out = RowPlanes::default();
    mxfp8::pack_rows(64, &codes, &[120, 0], 0, &mut out).unwrap();
    let bytes = object(Layout::RowScaleK32V1, Format::Mxfp8, &[1, 64], 1, &out);
    let view = Encoded::new(Layout::RowScaleK32V1, Format::Mxfp8, &[1, 64], &bytes).unwrap();
    let mut d = vec![0f64; 64];
    view.decode_rows_f64(0..1, &mut d).unwrap();
    for i in 0..64 {
        let e = if i < 32 { -7 } else { -127 };
        assert_eq!(d[i], f64::from(e4m3_to_f32(codes[i])) * 2f64.powi(e));
    }
}
