//! How much to draft: the most accepted tokens for the time of a round.
//!
//! A round of n columns after a chain of d drafter steps takes about `base + column n + step d` seconds; the three are
//! fitted to measured rounds, old ones fading. A draft of k tokens is expected to give `1 + sum of products of the
//! acceptance rates` tokens, the rates by place in the draft being averages of the lane's own past. Tokens per second
//! is maximised over all lanes together (Dinkelbach 1967); where that is plain decoding nothing is drafted, except
//! for a probe now and then, rarer the longer it changes nothing.

use std::time::Duration;

/// Longest draft that rates are kept for; later places share the last rate.
const PLACES: usize = 8;
/// Weight of a new observation in an acceptance rate.
const WEIGHT: f64 = 0.1;
/// Weight that observed round times keep from round to round.
const FADE: f64 = 0.98;

/// Where guesses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The model's drafter.
    Chain,
    /// Earlier text.
    Copy,
}

/// Acceptance rates of one lane: chance that a draft's place is right if all before it were.
#[derive(Clone, Debug)]
pub struct Standing {
    chain: [f64; PLACES],
    copy: [f64; PLACES],
}

impl Standing {
    fn of(&self, source: Source) -> &[f64; PLACES] {
        match source {
            Source::Chain => &self.chain,
            Source::Copy => &self.copy,
        }
    }

    /// Learns from a round: `accepted` of `drafted` guesses were right.
    pub fn observe(&mut self, source: Source, drafted: usize, accepted: usize) {
        let rates = match source {
            Source::Chain => &mut self.chain,
            Source::Copy => &mut self.copy,
        };
        for place in 0..drafted.min(accepted + 1) {
            let hit = if place < accepted { 1.0 } else { 0.0 };
            let r = &mut rates[place.min(PLACES - 1)];
            *r += WEIGHT * (hit - *r);
        }
    }
}

/// What a lane could draft.
pub struct Ask<'a> {
    /// Its rates.
    pub standing: &'a Standing,
    /// Most tokens the model's drafter may propose; 0 = none.
    pub chain: usize,
    /// Tokens a copy offers; 0 = none.
    pub copy: usize,
}

/// What a lane shall draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// From where.
    pub source: Source,
    /// How much.
    pub n: usize,
}

/// Chooses draft lengths for rounds.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Fixed lengths instead of chosen ones.
    fixed: Option<usize>,
    fixed_copy: Option<usize>,
    /// Normal equations of round times over (1, columns, steps), and their right side.
    normal: [[f64; 3]; 3],
    right: [f64; 3],
    /// What a new lane starts from.
    start: Standing,
    rounds: u64,
    /// Rounds between probes, and when the next one is due.
    interval: u64,
    next_probe: u64,
}

impl Policy {
    /// A policy with fixed lengths where given.
    pub fn new(chain: Option<usize>, copy: Option<usize>) -> Self {
        Policy {
            fixed: chain,
            fixed_copy: copy,
            normal: [[0.0; 3]; 3],
            right: [0.0; 3],
            start: Standing { chain: [0.75; PLACES], copy: [0.8; PLACES] },
            rounds: 0,
            interval: 8,
            next_probe: 8,
        }
    }

    /// Rates of a new lane: the average of lanes before it.
    pub fn standing(&self) -> Standing {
        self.start.clone()
    }

    /// Learns from an ended lane.
    pub fn ended(&mut self, standing: &Standing) {
        for source in [Source::Chain, Source::Copy] {
            let theirs = *standing.of(source);
            let ours = if source == Source::Chain { &mut self.start.chain } else { &mut self.start.copy };
            // Never so low that a new lane is not worth a try.
            ours.iter_mut().zip(theirs).for_each(|(o, t)| *o = (*o + 0.2 * (t - *o)).max(0.3));
        }
    }

    /// Learns what a round took.
    pub fn observe(&mut self, columns: usize, steps: usize, took: Duration) {
        let x = [1.0, columns as f64, steps as f64];
        for i in 0..3 {
            for j in 0..3 {
                self.normal[i][j] = FADE * self.normal[i][j] + x[i] * x[j];
            }
            self.right[i] = FADE * self.right[i] + x[i] * took.as_secs_f64();
        }
    }

    /// Seconds of a round without columns, of a column, and of a drafter step.
    pub fn costs(&self) -> [f64; 3] {
        let rounds = self.normal[0][0];
        if rounds < 1.0 {
            return PRIOR;
        }
        // What the prior's shape says of the mean round, held with the weight of two rounds, keeps the fit determined
        // while all rounds look alike.
        let [_, columns, steps] = self.normal[0];
        let mean = self.right[0] / rounds;
        let shape = PRIOR[0] + PRIOR[1] * columns / rounds + PRIOR[2] * steps / rounds;
        let prior = PRIOR.map(|p| p * mean / shape);
        let (mut a, mut b) = (self.normal, self.right);
        for i in 0..3 {
            let weight = 2.0 * [1.0, 2.0, 1.0][i];
            a[i][i] += weight;
            b[i] += weight * prior[i];
        }
        solve(a, b).map_or(prior, |x| x.map(|c| c.max(mean * 1e-3)))
    }

    /// Lengths of all lanes for the next round.
    pub fn choose(&mut self, lanes: &[Ask<'_>]) -> Vec<Choice> {
        self.rounds += 1;
        if let Some(n) = self.fixed {
            return lanes
                .iter()
                .map(|l| {
                    let copy = self.fixed_copy.unwrap_or(n).min(l.copy);
                    if copy > n.min(l.chain) || (copy > 0 && l.chain == 0) {
                        Choice { source: Source::Copy, n: copy }
                    } else {
                        Choice { source: Source::Chain, n: n.min(l.chain) }
                    }
                })
                .collect();
        }
        let mut best = self.optimum(lanes);
        let probed = lanes.iter().zip(&best).any(|(l, c)| c.n == 0 && l.chain + l.copy > 0);
        if self.rounds >= self.next_probe {
            for (l, c) in lanes.iter().zip(&mut best) {
                let most = if c.source == Source::Copy { l.copy } else { l.chain };
                if c.n == 0 && l.copy > 0 {
                    *c = Choice { source: Source::Copy, n: 1 };
                } else if c.n < most {
                    c.n += 1;
                }
            }
            // A probe of plain decoding that changed nothing makes the next one rarer.
            self.interval = if probed { (self.interval * 2).min(128) } else { 8 };
            self.next_probe = self.rounds + self.interval;
        }
        best
    }

    fn optimum(&self, lanes: &[Ask<'_>]) -> Vec<Choice> {
        let [base, column, step] = self.costs();
        let plain = Choice { source: Source::Chain, n: 0 };
        let mut best = vec![plain; lanes.len()];
        let mut rate = lanes.len() as f64 / (base + column * lanes.len() as f64);
        let deepest = lanes.iter().map(|l| l.chain).max().unwrap_or(0);
        // Each pass finds what beats the rate of the last; it converges in a few.
        for _ in 0..6 {
            let mut found: Option<(f64, f64, Vec<Choice>)> = None;
            for depth in 0..=deepest {
                let (mut tokens, mut columns, mut steps) = (0.0, 0.0, 0);
                let mut choices = Vec::with_capacity(lanes.len());
                for l in lanes {
                    let price = rate * column;
                    let chain = worth(l.standing.of(Source::Chain), l.chain.min(depth), price);
                    let copy = worth(l.standing.of(Source::Copy), l.copy, price);
                    let (source, (n, gain)) = if copy.2 > chain.2 {
                        (Source::Copy, (copy.0, copy.1))
                    } else {
                        (Source::Chain, (chain.0, chain.1))
                    };
                    if source == Source::Chain {
                        steps = steps.max(n);
                    }
                    tokens += 1.0 + gain;
                    columns += 1.0 + n as f64;
                    choices.push(Choice { source, n });
                }
                let seconds = base + column * columns + step * steps as f64;
                if found.as_ref().is_none_or(|f| tokens / seconds > f.0 / f.1) {
                    found = Some((tokens, seconds, choices));
                }
            }
            let Some((tokens, seconds, choices)) = found else { break };
            best = choices;
            if tokens / seconds <= rate * (1.0 + 1e-9) {
                break;
            }
            rate = tokens / seconds;
        }
        best
    }
}

/// Relative times before anything was measured: a column costs 0.38 of a plain round where experts are read for it
/// (engine.md 4.6), a drafter step about a layer of many.
const PRIOR: [f64; 3] = [0.7, 0.3, 0.15];

/// Best length up to `most` at a price per column: (length, expected tokens, gain above the price).
fn worth(rates: &[f64; PLACES], most: usize, price: f64) -> (usize, f64, f64) {
    let (mut chance, mut tokens) = (1.0, 0.0);
    let mut best = (0, 0.0, 0.0);
    for n in 1..=most {
        chance *= rates[(n - 1).min(PLACES - 1)];
        tokens += chance;
        let gain = tokens - price * n as f64;
        if gain > best.2 {
            best = (n, tokens, gain);
        }
        // Chances only fall: a column that does not pay its price ends the search.
        if chance < price {
            break;
        }
    }
    best
}

fn solve(mut a: [[f64; 3]; 3], mut b: [f64; 3]) -> Option<[f64; 3]> {
    for i in 0..3 {
        let pivot = (i..3).max_by(|x, y| a[*x][i].abs().total_cmp(&a[*y][i].abs()))?;
        a.swap(i, pivot);
        b.swap(i, pivot);
        if a[i][i].abs() < 1e-30 {
            return None;
        }
        for r in i + 1..3 {
            let f = a[r][i] / a[i][i];
            for c in i..3 {
                a[r][c] -= f * a[i][c];
            }
            b[r] -= f * b[i];
        }
    }
    let mut x = [0.0; 3];
    for i in (0..3).rev() {
        x[i] = (b[i] - (i + 1..3).map(|j| a[i][j] * x[j]).sum::<f64>()) / a[i][i];
    }
    Some(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a policy against rounds of known cost and acceptance; gives the mean length of its last drafts.
    fn play(policy: &mut Policy, standing: &mut Standing, cost: [f64; 3], accept: f64, rounds: usize) -> f64 {
        let mut seed = 1u64;
        let mut dice = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut sum = 0;
        for r in 0..rounds {
            let c = policy.choose(&[Ask { standing, chain: 6, copy: 0 }])[0];
            let right = (0..c.n).take_while(|_| dice() < accept).count();
            standing.observe(Source::Chain, c.n, right);
            let seconds = cost[0] + cost[1] * (1 + c.n) as f64 + cost[2] * c.n as f64;
            policy.observe(1 + c.n, c.n, Duration::from_secs_f64(seconds));
            if r >= rounds / 2 {
                sum += c.n;
            }
        }
        sum as f64 / (rounds - rounds / 2) as f64
    }

    #[test]
    fn cheap_columns_and_good_guesses_make_long_drafts() {
        let mut p = Policy::new(None, None);
        let mut s = p.standing();
        assert!(play(&mut p, &mut s, [10e-3, 0.2e-3, 0.3e-3], 0.95, 400) > 4.5);
    }

    #[test]
    fn drafting_that_does_not_pay_ends_and_returns_when_it_pays() {
        let mut p = Policy::new(None, None);
        let mut s = p.standing();
        // Each column costs a whole round: no acceptance below 1 pays.
        let n = play(&mut p, &mut s, [0.1e-3, 5e-3, 2e-3], 0.6, 600);
        assert!(n < 0.1, "{n}");
        let n = play(&mut p, &mut s, [10e-3, 0.1e-3, 0.1e-3], 0.95, 3000);
        assert!(n > 3.0, "{n}");
    }

    #[test]
    fn costs_are_found_from_rounds() {
        let mut p = Policy::new(None, None);
        for r in 0..300 {
            let (c, d) = (1 + r % 5, r % 4);
            p.observe(c, d, Duration::from_secs_f64(8e-3 + 1e-3 * c as f64 + 0.5e-3 * d as f64));
        }
        let [base, column, step] = p.costs();
        assert!((base - 8e-3).abs() < 1e-3 && (column - 1e-3).abs() < 3e-4 && (step - 0.5e-3).abs() < 3e-4);
    }

    #[test]
    fn a_copy_is_taken_where_it_promises_more() {
        let mut p = Policy::new(None, None);
        let mut s = p.standing();
        for _ in 0..50 {
            s.observe(Source::Copy, 16, 16);
            s.observe(Source::Chain, 3, 1);
        }
        let c = p.choose(&[Ask { standing: &s, chain: 3, copy: 16 }])[0];
        assert_eq!(c.source, Source::Copy);
        assert!(c.n >= 8, "{c:?}");
    }
}
