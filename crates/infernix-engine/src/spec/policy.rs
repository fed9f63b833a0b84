//! How much to draft: the most accepted tokens for the time of a round.
//!
//! A round of n columns after a chain of d drafter steps takes about `base + column n + step d` seconds; the three are
//! fitted to measured rounds, old ones fading. A draft of k tokens is expected to give `1 + sum of products of the
//! acceptance rates` tokens, the rates by place in the draft being averages of the lane's own past. Tokens per second
//! is maximised over all lanes together (Dinkelbach 1967); where that is plain decoding nothing is drafted, except
//! for a probe now and then, rarer the longer it changes nothing.
//!
//! An engine's first rounds are plain and drafted in turn, so that the fit rests on both from the start; the first of each
//! kind warms caches and is not counted. A round that took far longer or shorter than the fit says was disturbed (another
//! process, a page from the disk, the drafter catching up) and counts only as far as is plausible, unless it goes on.

use std::time::Duration;

/// Longest draft that rates are kept for; later places share the last rate.
const PLACES: usize = 8;
/// Least weight of a new observation in an acceptance rate; the first of a lane weigh more.
const WEIGHT: f64 = 0.05;
/// Observations that a lane's first rates are worth.
const BELIEF: f64 = 4.0;
/// Weight that observed round times keep from round to round.
const FADE: f64 = 0.98;
/// A round counts with at most this many times the time that the fit says, and at least its inverse.
const OUTLIER: f64 = 2.0;
/// So many disturbed rounds in a row are no disturbance.
const CHANGED: u32 = 4;
/// Rounds that the fit must rest on before it is trusted to tell a disturbance.
const TRUSTED: u64 = 4;
/// First rounds of an engine: plain and drafted in turn.
const FIRST: u64 = 4;
/// What a draft must promise beyond plain decoding: the fit is no better than this.
const MARGIN: f64 = 0.03;

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
    /// Observations behind each rate.
    seen: [[f64; PLACES]; 2],
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
        let (rates, seen) = match source {
            Source::Chain => (&mut self.chain, &mut self.seen[0]),
            Source::Copy => (&mut self.copy, &mut self.seen[1]),
        };
        for place in 0..drafted.min(accepted + 1) {
            let hit = if place < accepted { 1.0 } else { 0.0 };
            let at = place.min(PLACES - 1);
            seen[at] += 1.0;
            rates[at] += (1.0 / (BELIEF + seen[at])).max(WEIGHT) * (hit - rates[at]);
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
    /// Shape of the costs as the last drafted round showed it: what the fit falls back to where plain rounds alone say nothing.
    shape: [f64; 3],
    /// What a new lane starts from.
    start: Standing,
    rounds: u64,
    /// Rounds measured without drafts and with, and disturbed ones in a row.
    plain: u64,
    drafted: u64,
    disturbed: u32,
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
            shape: PRIOR,
            start: Standing { chain: [0.75; PLACES], copy: [0.8; PLACES], seen: [[0.0; PLACES]; 2] },
            rounds: 0,
            plain: 0,
            drafted: 0,
            disturbed: 0,
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
    pub fn observe(&mut self, lanes: usize, columns: usize, steps: usize, took: Duration) {
        let kind = if columns > lanes { &mut self.drafted } else { &mut self.plain };
        *kind += 1;
        if *kind == 1 {
            return;
        }
        let x = [1.0, columns as f64, steps as f64];
        let took = self.plausible(x, took.as_secs_f64());
        for i in 0..3 {
            for j in 0..3 {
                self.normal[i][j] = FADE * self.normal[i][j] + x[i] * x[j];
            }
            self.right[i] = FADE * self.right[i] + x[i] * took;
        }
        if columns > lanes {
            self.shape = self.costs();
        }
    }

    /// A round's time without what a disturbance added to it.
    fn plausible(&mut self, x: [f64; 3], took: f64) -> f64 {
        if self.plain + self.drafted < TRUSTED {
            return took;
        }
        let expected: f64 = self.costs().iter().zip(x).map(|(c, x)| c * x).sum();
        let bounded = took.clamp(expected / OUTLIER, expected * OUTLIER);
        self.disturbed = if bounded == took { 0 } else { self.disturbed + 1 };
        if self.disturbed >= CHANGED { took } else { bounded }
    }

    /// Seconds of a round without columns, of a column, and of a drafter step.
    pub fn costs(&self) -> [f64; 3] {
        let rounds = self.normal[0][0];
        if rounds < 1.0 {
            return PRIOR;
        }
        // What the last known shape says of the mean round, held with the weight of two rounds, keeps the fit determined
        // while all rounds look alike.
        let [_, columns, steps] = self.normal[0];
        let mean = self.right[0] / rounds;
        let [base, column, step] = self.shape;
        let scale = mean / (base + (column * columns + step * steps) / rounds);
        let prior = self.shape.map(|p| p * scale);
        let (mut a, mut b) = (self.normal, self.right);
        for i in 0..3 {
            let weight = 2.0 * [1.0, 2.0, 1.0][i];
            a[i][i] += weight;
            b[i] += weight * prior[i];
        }
        not_below(mean * 1e-3, a, b).unwrap_or(prior)
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
        if self.rounds <= FIRST {
            return lanes.iter().map(|l| self.first(l)).collect();
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

    /// One of the engine's first rounds: nothing, or one guess.
    fn first(&self, lane: &Ask<'_>) -> Choice {
        let n = usize::from(self.rounds % 2 == 0);
        let source = if lane.copy > 0 { Source::Copy } else { Source::Chain };
        Choice { source, n: n.min(lane.copy.max(lane.chain)) }
    }

    fn optimum(&self, lanes: &[Ask<'_>]) -> Vec<Choice> {
        let [base, column, step] = self.costs();
        let plain = Choice { source: Source::Chain, n: 0 };
        let mut best = vec![plain; lanes.len()];
        let mut rate = (1.0 + MARGIN) * lanes.len() as f64 / (base + column * lanes.len() as f64);
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
            if tokens / seconds <= rate * (1.0 + 1e-9) {
                break;
            }
            best = choices;
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

/// Solves normal equations with no unknown below `least`: those that would be are held there, worst first, and the others are
/// fitted again. (Cutting them off afterwards would leave the others with what they took over.)
fn not_below(least: f64, a: [[f64; 3]; 3], b: [f64; 3]) -> Option<[f64; 3]> {
    let mut held = [false; 3];
    loop {
        let (mut a, mut b) = (a, b);
        for h in (0..3).filter(|i| held[*i]) {
            for j in 0..3 {
                b[j] -= a[j][h] * least;
                (a[j][h], a[h][j]) = (0.0, 0.0);
            }
            (a[h][h], b[h]) = (1.0, least);
        }
        let x = solve(a, b)?;
        let worst = (0..3).filter(|i| !held[*i] && x[*i] < least).min_by(|i, j| x[*i].total_cmp(&x[*j]));
        match worst {
            Some(i) => held[i] = true,
            None => return Some(x),
        }
    }
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

    /// Answers of `tokens` tokens each, one after the other, on a machine of known costs, where each guess is right with
    /// chance `accept`. Gives the seconds of all rounds, by what they cost and not by what was measured of them: one
    /// measurement in 50 is 20 times too long, the others are off by up to a tenth.
    struct Machine {
        cost: [f64; 3],
        accept: f64,
        dice: u64,
        disturbed: bool,
    }

    impl Machine {
        fn new(cost: [f64; 3], accept: f64) -> Self {
            Machine { cost, accept, dice: 1, disturbed: true }
        }

        fn dice(&mut self) -> f64 {
            self.dice = self.dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.dice >> 11) as f64 / (1u64 << 53) as f64
        }

        fn answers(&mut self, policy: &mut Policy, answers: usize, tokens: usize) -> (f64, f64) {
            let (mut seconds, mut drafts, mut rounds) = (0.0, 0, 0);
            for _ in 0..answers {
                let mut standing = policy.standing();
                let mut left = tokens;
                while left > 0 {
                    let chain = (left - 1).min(7);
                    let n = policy.choose(&[Ask { standing: &standing, chain, copy: 0 }])[0].n;
                    let right = (0..n).take_while(|_| self.dice() < self.accept).count();
                    standing.observe(Source::Chain, n, right);
                    left -= 1 + right;
                    let took = self.cost[0] + self.cost[1] * (1 + n) as f64 + self.cost[2] * n as f64;
                    seconds += took;
                    let noise = if !self.disturbed {
                        1.0
                    } else if self.dice() < 0.02 {
                        20.0
                    } else {
                        0.9 + 0.2 * self.dice()
                    };
                    policy.observe(1, 1 + n, n, Duration::from_secs_f64(took * noise));
                    (drafts, rounds) = (drafts + n, rounds + 1);
                }
                policy.ended(&standing);
            }
            (seconds, drafts as f64 / rounds as f64)
        }

        /// Seconds of the same with a fixed length.
        fn fixed(&self, n: usize, answers: usize, tokens: usize) -> f64 {
            Machine::new(self.cost, self.accept).answers(&mut Policy::new(Some(n), None), answers, tokens).0
        }
    }

    const COSTS: [[f64; 3]; 6] = [
        [10e-3, 0.1e-3, 0.2e-3],
        [10e-3, 3e-3, 1.5e-3],
        [5e-3, 5e-3, 1e-3],
        [0.2e-3, 2e-3, 1e-3],
        [0.1e-3, 5e-3, 2e-3],
        [8e-3, 1e-3, 9e-3],
    ];

    #[test]
    fn short_answers_take_little_longer_than_with_the_best_fixed_length() {
        for cost in COSTS {
            for accept in [0.05, 0.3, 0.5, 0.7, 0.9, 0.98] {
                let fixed = |n| Machine::new(cost, accept).fixed(n, 60, 24);
                let (best, n) = (0..=7).map(|n| (fixed(n), n)).min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
                let mut policy = Policy::new(None, None);
                let (auto, mean) = Machine::new(cost, accept).answers(&mut policy, 60, 24);
                assert!(
                    auto <= 1.10 * best,
                    "{cost:?}, {accept}: {auto} s with {mean:.2} drafts, {best} s with {n}"
                );
                assert!(auto <= 1.05 * fixed(0), "{cost:?}, {accept}: {auto} s, plain {} s", fixed(0));
            }
        }
    }

    #[test]
    fn an_engines_first_answer_costs_a_few_rounds_more_than_plain_at_most() {
        // A column costs more than a whole round: nothing pays.
        let cost = [0.1e-3, 5e-3, 2e-3];
        let plain = Machine::new(cost, 0.5).fixed(0, 1, 40);
        let (auto, _) = Machine::new(cost, 0.5).answers(&mut Policy::new(None, None), 1, 40);
        assert!(auto <= plain + 6.0 * (cost[1] + cost[2]), "{auto} s, plain {plain} s");
    }

    #[test]
    fn plain_rounds_do_not_make_forget_what_a_draft_costs() {
        let mut p = Policy::new(None, None);
        let mut m = Machine::new([0.1e-3, 5e-3, 2e-3], 0.6);
        m.answers(&mut p, 20, 50);
        let (_, drafts) = m.answers(&mut p, 1, 5000);
        assert!(drafts < 0.02, "{drafts}");
    }

    #[test]
    fn cheap_columns_and_good_guesses_make_long_drafts() {
        let mut p = Policy::new(None, None);
        let (_, drafts) = Machine::new([10e-3, 0.2e-3, 0.3e-3], 0.95).answers(&mut p, 4, 400);
        assert!(drafts > 4.5, "{drafts}");
    }

    #[test]
    fn drafting_that_does_not_pay_ends_and_returns_when_it_pays() {
        let mut p = Policy::new(None, None);
        // Each column costs a whole round: no acceptance below 1 pays.
        Machine::new([0.1e-3, 5e-3, 2e-3], 0.6).answers(&mut p, 1, 300);
        let (_, n) = Machine::new([0.1e-3, 5e-3, 2e-3], 0.6).answers(&mut p, 1, 300);
        assert!(n < 0.1, "{n}");
        let mut cheap = Machine::new([10e-3, 0.1e-3, 0.1e-3], 0.95);
        cheap.answers(&mut p, 1, 1500);
        let (_, n) = cheap.answers(&mut p, 1, 1500);
        assert!(n > 3.0, "{n}");
    }

    #[test]
    fn a_disturbed_round_changes_nothing_and_a_lasting_change_does() {
        let mut p = Policy::new(None, None);
        let rounds = |p: &mut Policy, n: usize, factor: f64| {
            for r in 0..n {
                let d = r % 3;
                let took = factor * (8e-3 + 1e-3 * (1 + d) as f64 + 0.5e-3 * d as f64);
                p.observe(1, 1 + d, d, Duration::from_secs_f64(took));
            }
            p.costs().iter().sum::<f64>()
        };
        let calm = rounds(&mut p, 60, 1.0);
        let after = rounds(&mut p, 1, 1000.0);
        assert!(after < 1.1 * calm, "{after} after {calm}");
        let slower = rounds(&mut p, 200, 5.0);
        assert!((slower / calm - 5.0).abs() < 0.5, "{slower} after {calm}");
    }

    #[test]
    fn costs_are_found_from_rounds() {
        let mut p = Policy::new(None, None);
        for r in 0..300 {
            let (c, d) = (1 + r % 5, r % 4);
            p.observe(1, c, d, Duration::from_secs_f64(8e-3 + 1e-3 * c as f64 + 0.5e-3 * d as f64));
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
        let last = |p: &mut Policy| p.choose(&[Ask { standing: &s, chain: 3, copy: 16 }])[0];
        let c = (0..=FIRST).map(|_| last(&mut p)).last().unwrap();
        assert_eq!(c.source, Source::Copy);
        assert!(c.n >= 8, "{c:?}");
    }
}
