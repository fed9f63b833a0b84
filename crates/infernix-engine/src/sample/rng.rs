//! A counter-based generator: every draw is a pure function of (seed, position, purpose), so that a seed's text does not
//! depend on how many tokens were drafted, on the batch or on what was drawn before.
//!
//! Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).

/// What a draw decides. Draws of different purposes at one position are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// The token at the position.
    Token = 0,
    /// Whether a draft with a proposal distribution is accepted.
    Accept = 1,
    /// The token drawn from what remains after a rejected draft.
    Residual = 2,
    /// A drafter's own choice.
    Draft = 3,
}

const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let (a, b) = (MULTIPLIERS[0] * u64::from(counter[0]), MULTIPLIERS[1] * u64::from(counter[2]));
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
    }
    counter
}

/// A uniform number in [0, 1) with 53 random bits.
pub fn uniform(seed: u64, position: u64, purpose: Purpose) -> f64 {
    let counter = [position as u32, (position >> 32) as u32, purpose as u32, 0];
    let word = philox(counter, [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(word[0]) << 32 | u64::from(word[1])) >> 11;
    bits as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' own test vectors.
    #[test]
    fn philox_equals_the_published_vectors() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = u32::MAX;
        assert_eq!(philox([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn draws_depend_on_each_of_seed_position_and_purpose() {
        let base = uniform(1, 2, Purpose::Token);
        assert_eq!(base, uniform(1, 2, Purpose::Token));
        assert_ne!(base, uniform(2, 2, Purpose::Token));
        assert_ne!(base, uniform(1, 3, Purpose::Token));
        assert_ne!(base, uniform(1, 2, Purpose::Accept));
        let mean = (0..10_000).map(|p| uniform(7, p, Purpose::Token)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.015, "{mean}");
    }
}
