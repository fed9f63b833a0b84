//! When requests are sent: at once, at a rate, or at a rate that grows.

use super::rng::Rng;

/// Requests a second over the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// All at once.
    Unlimited,
    /// This many a second on average.
    Constant(f64),
    /// From the first to the second rate, request by request, linearly.
    Linear(f64, f64),
    /// The same, geometrically.
    Exponential(f64, f64),
}

impl Rate {
    fn at(self, i: usize, n: usize) -> f64 {
        let share = i as f64 / (n.saturating_sub(1)).max(1) as f64;
        match self {
            Rate::Unlimited => f64::INFINITY,
            Rate::Constant(r) => r,
            Rate::Linear(a, b) => a + (b - a) * share,
            Rate::Exponential(a, b) => a * (b / a).powf(share),
        }
    }
}

/// Seconds from the start at which each of `n` requests is sent. Gaps are gamma with shape `burstiness` (1 = Poisson,
/// below it burstier), drawn from the seed. At a constant rate they are scaled so that the last request is sent at
/// n / rate, as vLLM's benchmark does: equal rates then take equal time.
pub fn arrivals(n: usize, rate: Rate, burstiness: f64, seed: u64) -> Vec<f64> {
    let mut rng = Rng::named(seed, "arrivals");
    let mut at = 0.0;
    let mut times: Vec<f64> = (0..n)
        .map(|i| {
            let r = rate.at(i, n);
            if r.is_finite() {
                at += rng.gamma(burstiness) / r;
            }
            at
        })
        .collect();
    if let Rate::Constant(r) = rate
        && let Some(last) = times.last().copied().filter(|t| *t > 0.0)
    {
        let factor = n as f64 / r / last;
        times.iter_mut().for_each(|t| *t *= factor);
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_request_of_a_constant_rate_is_sent_at_n_over_rate() {
        let t = arrivals(100, Rate::Constant(5.0), 1.0, 3);
        assert!((t[99] - 20.0).abs() < 1e-9);
        assert!(t.windows(2).all(|w| w[0] <= w[1]));
        assert_eq!(t, arrivals(100, Rate::Constant(5.0), 1.0, 3));
        assert_ne!(t, arrivals(100, Rate::Constant(5.0), 1.0, 4));
    }

    #[test]
    fn ramps_grow_from_one_rate_to_the_other() {
        for rate in [Rate::Linear(1.0, 9.0), Rate::Exponential(1.0, 9.0)] {
            // A very regular arrival process shows the rate in its gaps.
            let t = arrivals(400, rate, 1e6, 1);
            let gap = |i: usize| t[i + 1] - t[i];
            assert!((gap(0) - 1.0).abs() < 0.05 && (gap(398) - 1.0 / 9.0).abs() < 0.01, "{rate:?}");
        }
        assert!(arrivals(5, Rate::Unlimited, 1.0, 1).iter().all(|t| *t == 0.0));
    }
}
