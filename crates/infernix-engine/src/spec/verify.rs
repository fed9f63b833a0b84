//! Verification of proposals that were drawn from a law of their own.

/// Probabilities by id, in falling order of probability.
pub type Law = Vec<(u32, f64)>;

/// One step of rejection sampling (Leviathan, Kalman and Matias 2023): keeps `draft`, drawn from `q`, with probability
/// `min(1, p / q)`, else draws from what p has more than q. The result follows `p` exactly. `u` and `v` are independent
/// uniform numbers in [0, 1). Gives the token; it equals `draft` exactly when the draft was kept.
pub fn accept_or_residual(p: &[(u32, f64)], draft: u32, q: &[(u32, f64)], u: f64, v: f64) -> u32 {
    let of = |law: &[(u32, f64)], id: u32| law.iter().find(|c| c.0 == id).map_or(0.0, |c| c.1);
    let (pd, qd) = (of(p, draft), of(q, draft));
    if qd > 0.0 && u * qd < pd {
        return draft;
    }
    let rest: Vec<(u32, f64)> = p.iter().map(|(id, p)| (*id, (p - of(q, *id)).max(0.0))).collect();
    let mass: f64 = rest.iter().map(|c| c.1).sum();
    // p <= q everywhere means p = q up to rounding: then any draw from p will do.
    let from = if mass > 0.0 { &rest } else { p };
    let total: f64 = from.iter().map(|c| c.1).sum();
    let mut sum = 0.0;
    for (id, weight) in from {
        sum += weight;
        if sum > v * total {
            return *id;
        }
    }
    from.iter().rev().find(|c| c.1 > 0.0).map_or(draft, |c| c.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Purpose, uniform};

    #[test]
    fn rejection_sampling_follows_the_target_whatever_the_proposal() {
        let p: Law = vec![(3, 0.5), (1, 0.3), (7, 0.15), (2, 0.05)];
        // Near, far, and certain proposals; one proposes an id the target excludes.
        let proposals: [Law; 4] = [
            vec![(3, 0.45), (1, 0.35), (7, 0.2)],
            vec![(2, 0.9), (3, 0.1)],
            vec![(9, 0.7), (3, 0.3)],
            vec![(1, 1.0)],
        ];
        for (k, q) in proposals.iter().enumerate() {
            let mut counts = [0f64; 10];
            for t in 0..20_000 {
                let w = uniform(k as u64, t, Purpose::Draft);
                let mut sum = 0.0;
                let pick = q.iter().find(|c| {
                    sum += c.1;
                    sum > w
                });
                let draft = pick.unwrap_or(&q[0]).0;
                let (u, v) = (uniform(9, t, Purpose::Accept), uniform(9, t, Purpose::Residual));
                counts[accept_or_residual(&p, draft, q, u, v) as usize] += 1.0;
            }
            let chi: f64 = p.iter().map(|(id, p)| (counts[*id as usize] - p * 2e4).powi(2) / (p * 2e4)).sum();
            // The 0.001 point of chi-square with 3 degrees of freedom.
            assert!(chi < 16.3, "proposal {k}: {chi}");
            assert_eq!(counts[9], 0.0, "an excluded token was chosen");
        }
    }
}
