//! Sizes, offsets and refusals, against hand-computed and published numbers.

use infernix_formats::expert_bank::BankShape;
use infernix_formats::{Encoded, Format, FormatError, Layout, PlaneRole, encoded_size, planes, row_planes};
use proptest::prelude::*;

fn size(layout: Layout, format: Format, shape: &[u64]) -> u64 {
    encoded_size(layout, format, shape).unwrap()
}

#[test]
fn sizes_computed_by_hand() {
    use {Format as F, Layout as L};
    // q5 [2,130]: K padded to 256, 4 groups a row: 256 + 64 (at 256) + 16 (at 512).
    assert_eq!(size(L::RowSplitK128V1, F::Q5G64, &[2, 130]), 528);
    // Hyper-connection up [10240,320]: stored with K = 384, 12 groups of 32.
    assert_eq!(size(L::RowSplitK128V1, F::Q8G32, &[10240, 320]), 10240 * 12 * 34);
    // Proposal head of the real model.
    assert_eq!(size(L::RowSplitK128V1, F::Q4G64, &[131_072, 2560]), 178_257_920);
    assert_eq!(size(L::RowSplitK128V1, F::Q6G64, &[1, 1]), 256 + 256 + 4);
    assert_eq!(size(L::ContiguousLeV1, F::Bf16, &[3, 5]), 30);
    assert_eq!(size(L::ContiguousLeV1, F::Fp32, &[]), 4);
    assert_eq!(size(L::ContiguousLeV1, F::Int64, &[16]), 128);
    assert_eq!(size(L::BlockScaleK16M128x4V1, F::Nvfp4, &[128, 64]), 4096 + 512 + 4);
    assert_eq!(size(L::BlockScaleK16V1, F::Nvfp4Mul, &[3, 48]), 256 + 9 + 4);
    assert_eq!(size(L::RowScaleV1, F::Fp8Row, &[3, 100]), 512 + 6);
    assert_eq!(size(L::TensorScaleV1, F::Fp8Tensor, &[3, 100]), 512 + 4);
    assert_eq!(
        size(L::Block128ScaleV1, F::Fp8Block128, &[2, 129, 130]),
        33_540_u64.next_multiple_of(256) + 2 * 2 * 2 * 4
    );
    assert_eq!(size(L::RowScaleK32V1, F::Mxfp8, &[3, 96]), 512 + 9);
}

#[test]
fn expert_records_have_the_published_sizes() {
    let rg16 = |shape: &[u64]| BankShape::new(Layout::Nvfp4ExpertRg16V1, shape).unwrap();
    for (shape, record) in
        [([512, 2560, 640], 2_764_800), ([256, 3072, 1024], 5_308_416), ([256, 2048, 512], 1_769_472)]
    {
        assert_eq!((rg16(&shape).record_bytes, rg16(&shape).stride), (record, record));
    }
    for format in [Format::Nvfp4Mul, Format::Nvfp4] {
        assert_eq!(size(Layout::Nvfp4ExpertRg16V1, format, &[512, 2560, 640]), 1_415_583_744);
    }
    let fp8 = BankShape::new(Layout::Fp8ExpertBlock128V1, &[512, 2560, 640]).unwrap();
    assert_eq!((fp8.record_bytes, fp8.stride), (4_916_400, 4_919_296));
    assert_eq!(size(Layout::Fp8ExpertBlock128V1, Format::Fp8Block128, &[512, 2560, 640]), 512 * 4_919_296);
}

#[test]
fn alignments() {
    for layout in Layout::ALL {
        let want = match layout {
            Layout::RawBytesV1 => 1,
            Layout::Nvfp4ExpertRg16V1 | Layout::Fp8ExpertBlock128V1 | Layout::GgmlExpertV1 => 4096,
            _ => 256,
        };
        assert_eq!(layout.alignment(), want);
        assert_eq!(layout.name().parse::<Layout>().unwrap(), layout);
    }
    assert!("row_scale_v2".parse::<Layout>().is_err());
}

#[test]
fn wrong_shapes_are_refused() {
    use {Format as F, Layout as L};
    let bad: [(L, F, &[u64]); 14] = [
        (L::RowSplitK128V1, F::Bf16, &[2, 2]),
        (L::ContiguousLeV1, F::Q4G64, &[2, 2]),
        (L::BlockScaleK16M128x4V1, F::Nvfp4Mul, &[128, 64]),
        (L::RawBytesV1, F::Bf16, &[2]),
        (L::RowSplitK128V1, F::Q4G64, &[2]),
        (L::RowSplitK128V1, F::Q4G64, &[2, 2, 2]),
        (L::BlockScaleK16M128x4V1, F::Nvfp4, &[64, 64]),
        (L::BlockScaleK16M128x4V1, F::Nvfp4, &[128, 48]),
        (L::BlockScaleK16V1, F::Nvfp4, &[2, 24]),
        (L::RowScaleK32V1, F::Mxfp8, &[2, 48]),
        (L::TensorScaleV1, F::Fp8Tensor, &[2]),
        (L::Nvfp4ExpertRg16V1, F::Nvfp4Mul, &[16, 16]),
        (L::Nvfp4ExpertRg16V1, F::Nvfp4Mul, &[2, 16, 24]),
        (L::ContiguousLeV1, F::Bf16, &[1; 17]),
    ];
    for (layout, format, shape) in bad {
        let err = planes(layout, format, shape).unwrap_err();
        assert!(
            matches!(err, FormatError::Shape { .. } | FormatError::Unsupported { .. }),
            "{layout} {format} {shape:?}: {err}"
        );
    }
}

#[test]
fn sizes_beyond_64_bits_are_errors() {
    let huge: [&[u64]; 5] = [
        &[1 << 32, 1 << 32],
        &[1 << 40, 1 << 40],
        &[u64::MAX - 127, 64],
        &[128, u64::MAX - 63],
        &[1 << 59, 16],
    ];
    for layout in Layout::ALL {
        for format in Format::ALL {
            for shape in huge {
                let _ = encoded_size(layout, format, shape).unwrap_err();
            }
            for shape in [[1 << 40, 1 << 40, 16], [0, 1 << 40, 1 << 40], [1 << 56, 16, 16], [u64::MAX, 0, 0]]
            {
                // Never a panic; a size or an error.
                let _ = encoded_size(layout, format, &shape);
            }
        }
    }
}

#[test]
fn empty_and_one_row_shapes() {
    for layout in Layout::ALL {
        for format in Format::ALL.into_iter().filter(|&f| layout.stores(f)) {
            let shapes: [&[u64]; 4] = if layout.is_bank() {
                [&[0, 16, 16], &[2, 0, 16], &[2, 16, 0], &[1, 16, 16]]
            } else {
                [&[0, 64], &[128, 0], &[0, 0], &[128, 64]]
            };
            for shape in shapes {
                let bytes = vec![0u8; size(layout, format, shape) as usize];
                let view = Encoded::new(layout, format, shape, &bytes).unwrap();
                if !layout.is_bank() {
                    let rows = shape[0];
                    let mut out = vec![1f32; (rows * shape[1]) as usize];
                    view.decode_rows_f32(0..rows, &mut out).unwrap();
                    assert!(
                        matches!(format, Format::Nvfp4) || out.iter().all(|&v| v == 0.0),
                        "{layout} {format}"
                    );
                    view.decode_rows_f32(0..0, &mut []).unwrap();
                    assert!(view.decode_rows_f32(0..rows + 1, &mut out).is_err());
                }
                assert!(Encoded::new(layout, format, shape, &[bytes.as_slice(), &[0]].concat()).is_err());
            }
        }
    }
}

proptest! {
    /// Row spans tile each plane, whatever the cuts.
    #[test]
    fn row_planes_tile_the_object(n in 0u64..6, k in 0u64..5, cut in 0u64..6, which in 0usize..12) {
        use {Format as F, Layout as L};
        let (layout, format) = [
            (L::ContiguousLeV1, F::Bf16), (L::ContiguousLeV1, F::Int64), (L::RowSplitK128V1, F::Q4G64),
            (L::RowSplitK128V1, F::Q5G64), (L::RowSplitK128V1, F::Q6G64), (L::RowSplitK128V1, F::Q8G32),
            (L::BlockScaleK16M128x4V1, F::Nvfp4), (L::BlockScaleK16V1, F::Nvfp4Mul), (L::RowScaleV1, F::Fp8Row),
            (L::TensorScaleV1, F::Fp8Tensor), (L::RowScaleK32V1, F::Mxfp8), (L::Block128ScaleV1, F::Fp8Block128),
        ][which];
        // Block tiles need cuts on multiples of 128 to be disjoint.
        let unit = if matches!(layout, L::BlockScaleK16M128x4V1 | L::Block128ScaleV1) { 128 } else { 1 };
        let shape = [n * unit, k * 64];
        let cut = cut.min(n) * unit;
        let whole = planes(layout, format, &shape).unwrap();
        let a = row_planes(layout, format, &shape, 0..cut).unwrap();
        let b = row_planes(layout, format, &shape, cut..shape[0]).unwrap();
        for ((p, a), b) in whole.iter().zip(&a).zip(&b) {
            prop_assert!(p.role == a.role && p.role == b.role);
            if p.role == PlaneRole::GlobalScale {
                prop_assert!(p == a && p == b);
            } else {
                prop_assert_eq!(a.bytes + b.bytes, p.bytes);
                prop_assert!(a.bytes == 0 || a.offset == p.offset);
                prop_assert!(b.bytes == 0 || b.offset + b.bytes == p.offset + p.bytes);
            }
        }
        for pair in whole.windows(2) {
            prop_assert!(pair[0].offset + pair[0].bytes <= pair[1].offset);
            prop_assert!(pair[1].offset % 256 == 0 || pair[1].role == PlaneRole::GlobalScale);
        }
    }
}

#[test]
fn ggml_rows_and_records_are_the_blocks_of_the_file() {
    use infernix_formats::expert_bank::{ExpertMatrix, ggml_blocks, pack_ggml};
    use infernix_formats::ggml::GgmlType as G;
    let q8 = Format::Ggml(G::Q8_0);
    assert_eq!(size(Layout::GgmlRowsV1, q8, &[3, 64]), 3 * 68);
    assert_eq!(size(Layout::GgmlRowsV1, q8, &[64]), 68);
    assert!(encoded_size(Layout::GgmlRowsV1, q8, &[3, 48]).is_err());
    assert!(encoded_size(Layout::GgmlRowsV1, Format::Bf16, &[3, 64]).is_err());
    // Flash-Next: gate and up IQ3_S, down IQ4_NL.
    let mixed = Format::ggml_experts([G::Iq3S, G::Iq3S, G::Iq4Nl]);
    let real = BankShape::of(Layout::GgmlExpertV1, mixed, &[512, 2560, 640]).unwrap();
    assert_eq!(real.record_bytes, 1_408_000 + 921_600);
    assert_eq!(real.stride, 2_330_624);
    assert!(BankShape::of(Layout::GgmlExpertV1, Format::Ggml(G::Iq3S), &[2, 256, 64]).is_err());

    let format = Format::ggml_experts([G::Q8_0, G::Q4_0, G::Q8_0]);
    let shape = BankShape::of(Layout::GgmlExpertV1, format, &[2, 64, 32]).unwrap();
    let words = |n: u64, s: u8| (0..n).map(|i| (i as u8).wrapping_mul(s) & 0x3F).collect::<Vec<u8>>();
    let (gate, up, down) = (words(32 * 68, 3), words(32 * 36, 5), words(64 * 34, 7));
    let mut bytes = Vec::new();
    for e in 0..2 {
        let mut record = vec![0xFF; shape.stride as usize];
        pack_ggml(&shape, [&gate, &up, &down], &mut record).unwrap();
        let (ty, blocks) = ggml_blocks(&shape, &record, ExpertMatrix::Up).unwrap();
        assert_eq!((ty, blocks), (G::Q4_0, &up[..]), "expert {e}");
        bytes.extend(record);
    }
    let encoded = Encoded::new(Layout::GgmlExpertV1, format, &[2, 64, 32], &bytes).unwrap();
    encoded.validate_words().unwrap();
    let (mut found, mut expected) = (vec![0f32; 2 * 32], vec![0f32; 64 * 32]);
    encoded.expert(1).unwrap().decode_f32(ExpertMatrix::Down, 5..7, &mut found).unwrap();
    infernix_formats::ggml::decode_f32(G::Q8_0, &down, &mut expected).unwrap();
    assert_eq!(found, expected[5 * 32..7 * 32]);
    let last = bytes.len() - 1;
    bytes[last] = 1;
    assert!(
        Encoded::new(Layout::GgmlExpertV1, format, &[2, 64, 32], &bytes).unwrap().validate_words().is_err()
    );
}
