//! ggml blocks decode bit for bit as llama.cpp decodes them.

use std::path::Path;

use infernix_formats::FormatError;
use infernix_formats::ggml::{GgmlType, decode_f32, decode_f64, validate};
use proptest::prelude::*;
use safetensors::SafeTensors;

/// One row of 512 values of each of the 27 types, stored and decoded by llama.cpp 0c1e570 (`TYPE.raw`, `TYPE.f32`): row 6
/// of the larger file below, the one with an outlier.
const GOLDEN: &[u8] = include_bytes!("golden/ggml.safetensors");

fn bits(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Compares every `TYPE.raw` with its `TYPE.f32`; the number of types.
fn compare(file: &[u8]) -> usize {
    let file = SafeTensors::deserialize(file).unwrap();
    let mut types = 0;
    for (name, raw) in file.tensors() {
        let Some(name) = name.strip_suffix(".raw") else { continue };
        let ty: GgmlType = name.parse().unwrap();
        let want = bits(file.tensor(&format!("{name}.f32")).unwrap().data());
        let mut got = vec![f32::NAN; want.len()];
        decode_f32(ty, raw.data(), &mut got).unwrap();
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            assert_eq!(g.to_bits(), *w, "{ty}: value {i} is {g}, expected {}", f32::from_bits(*w));
        }
        validate(ty, raw.data(), 512, 0).unwrap();
        types += 1;
    }
    types
}

#[test]
fn golden_rows_of_27_types_decode_bit_for_bit() {
    assert_eq!(compare(GOLDEN), 27);
}

#[test]
#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn stored_oracle_of_27_types_decodes_bit_for_bit() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/models/flash-demo-gguf/ggml-types.safetensors");
    match std::fs::read(path) {
        Ok(file) => assert_eq!(compare(&file), 27),
        Err(_) => eprintln!("skipped: the shared oracle is absent"),
    }
}

/// SplitMix64.
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Bytes whose bit 6 is cleared so that the scales of a block are finite: the high bytes of FP16 words; for MXFP4 and
/// NVFP4 the scale bytes themselves, whose bit 7 is cleared.
fn scale_bytes(ty: GgmlType) -> (&'static [usize], u8) {
    match ty {
        GgmlType::Mxfp4 => (&[0], 0x7F),
        GgmlType::Nvfp4 => (&[0, 1, 2, 3], 0x7F),
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => (&[1, 3], 0xBF),
        GgmlType::Q2K => (&[81, 83], 0xBF),
        GgmlType::Q3K => (&[109], 0xBF),
        GgmlType::Q6K => (&[209], 0xBF),
        GgmlType::Tq1_0 => (&[53], 0xBF),
        GgmlType::Tq2_0 => (&[65], 0xBF),
        GgmlType::Iq1M => (&[55], 0xBF),
        _ => (&[1], 0xBF),
    }
}

/// Random blocks that hold 16,384 values, the type's id as seed.
fn random_blocks(ty: GgmlType) -> Vec<u8> {
    let blocks = (64 * 256 / ty.block_len()) as usize;
    let len = blocks * ty.block_bytes() as usize;
    let mut state = u64::from(ty.id());
    let mut raw: Vec<u8> = std::iter::repeat_with(|| splitmix(&mut state).to_le_bytes())
        .take(len.div_ceil(8))
        .flatten()
        .collect();
    raw.truncate(len);
    let (at, mask) = scale_bytes(ty);
    for block in raw.chunks_exact_mut(ty.block_bytes() as usize) {
        at.iter().for_each(|&i| block[i] &= mask);
    }
    raw
}

/// Digests (FNV-1a over the 32-bit words, -0 taken as 0) of [`random_blocks`] as gguf-py 0.19.0 decodes them; it cannot
/// read Q1_0 and Q2_0. They reach every bit of every field, which quantized rows do not.
const DIGESTS: [(&str, u64); 23] = [
    ("Q4_0", 0x6e399d78e02edb25),
    ("Q4_1", 0x8150edb781d02008),
    ("Q5_0", 0x61590b80e0e0bb25),
    ("Q5_1", 0xcd2d11f07273ca65),
    ("Q8_0", 0x518333de2575fa25),
    ("Q2_K", 0xdd640bd1c106c990),
    ("Q3_K", 0xb3446aa083c4f265),
    ("Q4_K", 0x4d838d6ad83bc7df),
    ("Q5_K", 0xd74895e54b810bf4),
    ("Q6_K", 0xf0a3867d66956119),
    ("TQ1_0", 0x4503b6cce0e52325),
    ("TQ2_0", 0x9188c138890ce325),
    ("IQ2_XXS", 0x9fc336a0ac3501a1),
    ("IQ2_XS", 0xb1d096fa2fe42e09),
    ("IQ2_S", 0xa473a5fdf33da8a1),
    ("IQ3_XXS", 0xf76d4058473d434d),
    ("IQ3_S", 0xe7921e42c93b20f5),
    ("IQ1_S", 0x0f8c49b7e4f4a7e5),
    ("IQ1_M", 0x908139ebe21891e5),
    ("IQ4_NL", 0x80078f143343cf25),
    ("IQ4_XS", 0x79873b26585721f5),
    ("MXFP4", 0xae00daae04a72325),
    ("NVFP4", 0x2c93292152832325),
];

#[test]
fn random_blocks_decode_as_another_implementation_decodes_them() {
    for (name, want) in DIGESTS {
        let ty: GgmlType = name.parse().unwrap();
        let mut out = vec![0f32; 64 * 256];
        decode_f32(ty, &random_blocks(ty), &mut out).unwrap();
        let got = out.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, v| {
            let word = if *v == 0.0 { 0 } else { v.to_bits() };
            (h ^ u64::from(word)).wrapping_mul(0x100_0000_01b3)
        });
        assert_eq!(got, want, "{ty}");
    }
}

fn block_types() -> Vec<GgmlType> {
    GgmlType::all().filter(|t| t.is_decodable() && !t.is_plain()).collect()
}

#[test]
fn f64_and_f32_agree_where_the_value_is_exact() {
    for ty in block_types() {
        let raw = random_blocks(ty);
        let (mut a, mut b) = (vec![0f32; 64 * 256], vec![0f64; 64 * 256]);
        decode_f32(ty, &raw, &mut a).unwrap();
        decode_f64(ty, &raw, &mut b).unwrap();
        let minimum =
            matches!(ty, GgmlType::Q2K | GgmlType::Q4_1 | GgmlType::Q4K | GgmlType::Q5_1 | GgmlType::Q5K);
        for (a, b) in a.iter().zip(&b) {
            assert_eq!(a.to_bits(), (*b as f32).to_bits(), "{ty}");
            assert!(minimum || f64::from(*a) == *b, "{ty}: {a} is not exact");
        }
    }
}

#[test]
fn zero_blocks_are_zeros() {
    for ty in block_types().into_iter().filter(|t| *t != GgmlType::Mxfp4) {
        let mut out = vec![1f32; ty.block_len() as usize];
        decode_f32(ty, &vec![0; ty.block_bytes() as usize], &mut out).unwrap();
        assert!(out.iter().all(|v| *v == 0.0), "{ty}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any bytes decode without a panic, block by block as at once; what `validate` accepts is finite.
    #[test]
    fn any_bytes_decode_and_valid_ones_are_finite(
        which in 0..25usize,
        blocks in 1..4usize,
        bytes in prop::collection::vec(any::<u8>(), 3 * 256),
    ) {
        let ty = block_types()[which];
        let (len, size) = (ty.block_len() as usize, ty.block_bytes() as usize);
        let bytes = &bytes[..blocks * size];
        let mut out = vec![0f32; blocks * len];
        decode_f32(ty, bytes, &mut out).unwrap();
        let mut one = vec![0f32; len];
        for (b, want) in bytes.chunks_exact(size).zip(out.chunks_exact(len)) {
            decode_f32(ty, b, &mut one).unwrap();
            prop_assert!(one.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
        match validate(ty, bytes, (blocks * len) as u64, 7) {
            Ok(()) => prop_assert!(out.iter().all(|v| v.is_finite()), "{ty} decodes to a non-finite value"),
            Err(FormatError::IllegalWord { place, .. }) => {
                prop_assert_eq!(place.row, 7);
                prop_assert!(place.column < (blocks * len) as u64);
            }
            Err(e) => prop_assert!(false, "{e}"),
        }
    }

    /// A sign of the scale is a sign of every value.
    #[test]
    fn negated_scale_negates_the_values(which in 0..25usize, bytes in prop::collection::vec(any::<u8>(), 256)) {
        let ty = block_types()[which];
        let at = match ty {
            GgmlType::Mxfp4 | GgmlType::Nvfp4 => return Ok(()),
            ty => scale_bytes(ty).0,
        };
        let mut block = bytes[..ty.block_bytes() as usize].to_vec();
        at.iter().for_each(|&i| block[i] &= 0xBF);
        let (mut a, mut b) = (vec![0f32; ty.block_len() as usize], vec![0f32; ty.block_len() as usize]);
        decode_f32(ty, &block, &mut a).unwrap();
        at.iter().for_each(|&i| block[i] ^= 0x80);
        decode_f32(ty, &block, &mut b).unwrap();
        prop_assert!(a.iter().zip(&b).all(|(a, b)| *a == -*b), "{}", ty);
    }
}
