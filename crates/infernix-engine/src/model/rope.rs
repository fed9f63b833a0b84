//! Rotary frequencies of a configuration: partial, interleaved over three axes, YaRN (model-math 2.2, 2.3).

use crate::backend::RopeTable;
use infernix_model::RopeConfig;

/// Frequencies, axes and scale.
pub fn table(c: &RopeConfig) -> RopeTable {
    let dim = c.rotary_dim as f64;
    let pairs = c.rotary_dim as usize / 2;
    let mut freq: Vec<f64> = (0..pairs).map(|i| c.theta.powf(-2.0 * i as f64 / dim)).collect();
    let axis = (0..pairs as u64)
        .map(|i| match i % 3 {
            1 if i < 3 * c.sections[1] => 1,
            2 if i < 3 * c.sections[2] => 2,
            _ => 0,
        })
        .collect();
    let mut scale = 1.0;
    if let Some(y) = &c.yarn {
        let turns = |r: f64| {
            dim * (y.original_max_positions as f64 / (2.0 * std::f64::consts::PI * r)).ln()
                / (2.0 * c.theta.ln())
        };
        let lo = turns(32.0).floor().max(0.0);
        let hi = turns(1.0).ceil().min(dim - 1.0);
        // The reference widens an empty ramp by a thousandth.
        let span = if hi > lo { hi - lo } else { 0.001 };
        for (i, f) in freq.iter_mut().enumerate() {
            let ramp = ((i as f64 - lo) / span).clamp(0.0, 1.0);
            *f = *f * (1.0 - ramp) + *f / y.factor * ramp;
        }
        scale = if y.factor > 1.0 { 0.1 * y.factor.ln() + 1.0 } else { 1.0 };
    }
    RopeTable { freq, axis, scale }
}

#[cfg(test)]
mod tests {
    use super::*;
    use infernix_model::Yarn;

    fn config(yarn: Option<Yarn>) -> RopeConfig {
        RopeConfig { theta: 1e7, rotary_dim: 64, sections: [11, 11, 10], yarn }
    }

    #[test]
    fn axes_interleave_as_released() {
        let t = table(&config(None));
        assert_eq!(&t.axis[..7], &[0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(&t.axis[29..], &[2, 0, 1]);
        let count = |a| t.axis.iter().filter(|x| **x == a).count();
        assert_eq!([count(0), count(1), count(2)], [11, 11, 10]);
        assert_eq!(t.freq[0], 1.0);
        assert_eq!(t.scale, 1.0);
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_slows_the_slowest_by_its_factor() {
        let plain = table(&config(None));
        let t = table(&config(Some(Yarn { factor: 4.0, original_max_positions: 262_144 })));
        assert_eq!(t.freq[0], plain.freq[0]);
        assert!((t.freq[31] - plain.freq[31] / 4.0).abs() < 1e-20);
        assert!((t.scale - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-15);
    }
}
