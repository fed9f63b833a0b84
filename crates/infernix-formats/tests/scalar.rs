//! Scalar conversions against independent crates and a brute-force nearest-value search.

use half::{bf16, f16};
use infernix_formats::scalar::*;
use proptest::prelude::*;

/// Words `0..=last` of a positive grid, their values rising; checks every midpoint and both its FP32 neighbours.
fn check_grid(last: u16, value: impl Fn(u16) -> f32, encode: impl Fn(f32) -> u16, sign_bit: u16) {
    for word in 0..last {
        let (a, b) = (value(word), value(word + 1));
        assert_eq!(encode(a), word, "{a}");
        let mid = f64::midpoint(f64::from(a), f64::from(b));
        let even = if word % 2 == 0 { word } else { word + 1 };
        let m = mid as f32;
        if f64::from(m) == mid {
            assert_eq!(encode(m), even, "tie {m:e} between {word:#x} and {:#x}", word + 1);
            assert_eq!(encode(m.next_up()), word + 1, "above {m:e}");
            assert_eq!(encode(m.next_down()), word, "below {m:e}");
            assert_eq!(encode(-m), even | sign_bit);
        }
        assert_eq!(encode(-a), word | sign_bit);
    }
    assert_eq!(encode(value(last)), last);
}

#[test]
fn e4m3_ties_subnormals_and_saturation() {
    check_grid(0x7E, |w| e4m3_to_f32(w as u8), |v| u16::from(e4m3_from_f32(v)), 0x80);
    for (v, w) in
        [(448.0, 0x7E), (464.0, 0x7E), (1e30, 0x7E), (f32::INFINITY, 0x7E), (f32::NEG_INFINITY, 0xFE)]
    {
        assert_eq!(e4m3_from_f32(v), w);
    }
    assert_eq!(e4m3_from_f32(f32::NAN) & 0x7F, 0x7F);
    assert_eq!(e4m3_to_f32(1), 2f32.powi(-9));
    assert_eq!(e4m3_from_f32(2f32.powi(-10)), 0, "the tie between 0 and the least subnormal goes to 0");
    assert_eq!(e4m3_from_f32(2f32.powi(-10).next_up()), 1);
    assert_eq!(e4m3_from_f32(f32::from_bits(1)), 0);
    assert_eq!(e4m3_from_f32(-0.0), 0x80);
}

#[test]
fn e4m3_words_equal_the_float8_crate() {
    for w in 0..=255u8 {
        let (ours, theirs) = (e4m3_to_f32(w), float8::F8E4M3::from_bits(w).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{w:#x}");
        assert_eq!(e4m3_is_finite(w), !theirs.is_nan());
        assert_eq!(e4m3_is_scale(w), theirs >= 0.0 && w < 0x80);
        if !ours.is_nan() {
            assert_eq!(e4m3_from_f32(ours), w);
        }
    }
}

#[test]
fn e2m1_ties_and_saturation() {
    check_grid(7, |w| e2m1_to_f32(w as u8), |v| u16::from(e2m1_from_f32(v)), 8);
    assert_eq!(e2m1_from_f32(5.0), 6, "the tie between 4 and 6 goes to the even code 4.0");
    assert_eq!(
        [e2m1_from_f32(7.0), e2m1_from_f32(f32::NEG_INFINITY), e2m1_from_f32(f32::NAN) & 7],
        [7, 15, 7]
    );
    assert!(e2m1_to_f32(8) == 0.0 && e2m1_to_f32(8).is_sign_negative());
}

#[test]
fn e8m0_powers_ties_and_nan() {
    for w in 0..255u8 {
        let v = e8m0_to_f32(w);
        assert_eq!(f64::from(v), 2f64.powi(i32::from(w) - 127));
        assert_eq!(e8m0_from_f32(v), w);
        let tie = 1.5 * v;
        if tie.is_finite() && w < 254 {
            let even = if w % 2 == 0 { w } else { w + 1 };
            assert_eq!(e8m0_from_f32(tie), even);
            assert_eq!(e8m0_from_f32(tie.next_up()), w + 1);
            assert_eq!(e8m0_from_f32(tie.next_down()), w);
        }
    }
    assert!(e8m0_to_f32(255).is_nan() && !e8m0_is_finite(255));
    assert_eq!(e8m0_from_f32(f32::from_bits(1)), 0, "below the least power it saturates");
    assert_eq!(e8m0_from_f32(f32::MAX), 254);
    for v in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(e8m0_from_f32(v), 255);
    }
}

#[test]
fn half_words_equal_the_half_crate() {
    for w in 0..=u16::MAX {
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(same(bf16_to_f32(w), bf16::from_bits(w).to_f32()), "{w:#x}");
        assert!(same(f16_to_f32(w), f16::from_bits(w).to_f32()), "{w:#x}");
        assert_eq!(f16_is_scale(w), w < 0x7C00);
        assert_eq!(bf16_is_scale(w), w < 0x7F80);
    }
    check_grid(0x7BFF, f16_to_f32, f16_from_f32, 0x8000);
    check_grid(0x7F7F, bf16_to_f32, bf16_from_f32, 0x8000);
    assert_eq!(f16_from_f32(65519.99), 0x7BFF);
    assert_eq!(f16_from_f32(65520.0), 0x7C00);
    assert_eq!(bf16_from_f32(f32::MAX), 0x7F80);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn encoders_equal_the_oracles(bits: u32) {
        let v = f32::from_bits(bits);
        if v.is_nan() {
            prop_assert!(bf16_to_f32(bf16_from_f32(v)).is_nan() && f16_to_f32(f16_from_f32(v)).is_nan());
        } else {
            prop_assert_eq!(bf16_from_f32(v), bf16::from_f32(v).to_bits());
            prop_assert_eq!(f16_from_f32(v), f16::from_f32(v).to_bits());
        }
    }

    /// Values of ordinary size, where E4M3 and E2M1 have something to decide.
    #[test]
    fn narrow_encoders_find_the_nearest(v in -500f32..500.0, e in -12i32..1) {
        let v = v * 2f32.powi(e);
        let d = |x: f32| (f64::from(v) - f64::from(x)).abs();
        let ours = d(e4m3_to_f32(e4m3_from_f32(v)));
        prop_assert!((0..=255u8).filter(|&w| e4m3_is_finite(w)).all(|w| ours <= d(e4m3_to_f32(w))));
        let ours = d(e2m1_to_f32(e2m1_from_f32(v)));
        prop_assert!(E2M1.iter().all(|&x| ours <= d(x)));
    }
}
