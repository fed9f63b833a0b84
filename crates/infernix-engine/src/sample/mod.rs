//! From logits to a token.
//!
//! Order: logit bias, repetition penalty (prompt and output), presence and frequency penalty (output), mask,
//! temperature, top-k, top-p, min-p. All arithmetic is f64 over the FP32 logits; candidates are ordered by falling
//! probability and, where equal, rising id, and a draw walks that order. So a token is a function of the logits,
//! the options and (seed, position) alone.

mod rng;

pub use rng::{Purpose, uniform};

use std::cmp::Ordering;
use std::collections::HashMap;

/// How to choose. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits; 0 is greedy.
    pub temperature: f64,
    /// Most likely tokens kept; 0 keeps all.
    pub top_k: usize,
    /// The smallest set of most likely tokens with at least this mass is kept; 1 keeps all.
    pub top_p: f64,
    /// Tokens below this multiple of the largest probability are dropped; 0 keeps all.
    pub min_p: f64,
    /// Subtracted from the logit of every token of the output.
    pub presence_penalty: f64,
    /// Subtracted per occurrence in the output.
    pub frequency_penalty: f64,
    /// Divides positive and multiplies negative logits of tokens of prompt and output; 1 is off.
    pub repetition_penalty: f64,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f64)>,
    /// Key of all draws.
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// No token may follow: every one is masked, or the logits are not numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no token may follow: the logits are not numbers, or every token is excluded")]
pub struct NoToken;

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Its id.
    pub id: u32,
    /// Natural logarithm of its probability under the model's own logits, without options or mask.
    pub logprob: f64,
}

/// Options and counts of one request.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    /// Ids below this have a token; rows above pad the vocabulary.
    addressable: usize,
    /// Occurrences in the output, and whether the prompt has the token.
    seen: HashMap<u32, (u32, bool)>,
}

impl Sampler {
    /// A sampler after `prompt`. Ids from `addressable` on pad the vocabulary and are never chosen.
    pub fn new(options: SamplerOptions, prompt: &[u32], addressable: usize) -> Self {
        let mut seen = HashMap::new();
        if options.repetition_penalty != 1.0 {
            seen.extend(prompt.iter().map(|&id| (id, (0, true))));
        }
        Self { options, addressable, seen }
    }

    /// The options.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Ids below this have a token.
    pub fn addressable(&self) -> usize {
        self.addressable
    }

    /// Counts a token of the output.
    pub fn accept(&mut self, id: u32) {
        self.seen.entry(id).or_default().0 += 1;
    }

    /// Chooses the token at `position`. `mask` has one bit per id, set where the token is allowed.
    ///
    /// # Errors
    /// [`NoToken`] where nothing can be chosen.
    pub fn sample(&self, logits: &[f32], mask: Option<&[u32]>, position: u64) -> Result<Choice, NoToken> {
        let id = self.choose(logits, mask, position)?;
        Ok(Choice { id, logprob: logprob(&logits[..self.addressable.min(logits.len())], id) })
    }

    /// The id that [`Sampler::sample`] chooses, without its probability.
    ///
    /// # Errors
    /// [`NoToken`] where nothing can be chosen.
    pub fn choose(&self, logits: &[f32], mask: Option<&[u32]>, position: u64) -> Result<u32, NoToken> {
        let adjusted = self.adjusted(logits, mask);
        if self.options.temperature > 0.0 {
            self.draw(&adjusted, uniform(self.options.seed, position, Purpose::Token))
        } else {
            greedy(&adjusted)
        }
    }

    /// The distribution that [`Sampler::sample`] draws from: (id, probability) by falling probability. Greedy gives one
    /// entry.
    ///
    /// # Errors
    /// [`NoToken`] where nothing can be chosen.
    pub fn distribution(&self, logits: &[f32], mask: Option<&[u32]>) -> Result<Vec<(u32, f64)>, NoToken> {
        let adjusted = self.adjusted(logits, mask);
        if self.options.temperature <= 0.0 {
            return Ok(vec![(greedy(&adjusted)?, 1.0)]);
        }
        let kept = self.kept(&adjusted, f64::INFINITY)?;
        let mass: f64 = kept.list.iter().map(|c| c.1).sum();
        Ok(kept.list.into_iter().map(|(id, weight)| (id, weight / mass)).collect())
    }

    /// Logits after bias, penalties and mask; excluded tokens are minus infinity.
    fn adjusted(&self, logits: &[f32], mask: Option<&[u32]>) -> Vec<f64> {
        let o = &self.options;
        let n = self.addressable.min(logits.len());
        let mut out: Vec<f64> =
            logits[..n].iter().map(|&l| if l.is_nan() { f64::NEG_INFINITY } else { f64::from(l) }).collect();
        for &(id, bias) in &o.logit_bias {
            if let Some(l) = out.get_mut(id as usize) {
                *l += bias;
            }
        }
        for (&id, &(count, _)) in &self.seen {
            let Some(l) = out.get_mut(id as usize) else { continue };
            if o.repetition_penalty != 1.0 {
                *l = if *l > 0.0 { *l / o.repetition_penalty } else { *l * o.repetition_penalty };
            }
            if count > 0 {
                *l -= o.presence_penalty + o.frequency_penalty * f64::from(count);
            }
        }
        if let Some(mask) = mask {
            for (id, l) in out.iter_mut().enumerate() {
                let allowed = mask.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
                if !allowed {
                    *l = f64::NEG_INFINITY;
                }
            }
        }
        out
    }

    fn draw(&self, adjusted: &[f64], u: f64) -> Result<u32, NoToken> {
        let truncates = self.options.top_p < 1.0 || self.options.min_p > 0.0 || self.options.top_k > 0;
        let kept = self.kept(adjusted, if truncates { f64::INFINITY } else { u })?;
        let mass = if truncates { kept.list.iter().map(|c| c.1).sum() } else { kept.total };
        let target = u * mass;
        let mut sum = 0.0;
        for &(id, weight) in &kept.list {
            sum += weight;
            if sum > target {
                return Ok(id);
            }
        }
        // Rounding can leave the sum a hair below the target.
        kept.list.last().map(|c| c.0).ok_or(NoToken)
    }

    /// Candidates in order with unnormalised weights. Without truncation only as many as hold the mass `until`.
    fn kept(&self, adjusted: &[f64], until: f64) -> Result<Kept, NoToken> {
        let o = &self.options;
        let max = adjusted.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            return Err(NoToken);
        }
        let weight = |l: f64| if l == max { 1.0 } else { ((l - max) / o.temperature).exp() };
        let mut candidates: Vec<(u32, f64)> = adjusted
            .iter()
            .enumerate()
            .map(|(id, &l)| (id as u32, weight(l)))
            .filter(|c| c.1 > 0.0)
            .collect();
        let total: f64 = candidates.iter().map(|c| c.1).sum();
        let order = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let limit = if o.top_k > 0 { o.top_k.min(candidates.len()) } else { candidates.len() };
        // Sorting a quarter million candidates for the first few is waste: sort a growing head only.
        let mut sorted = 0;
        let mut step = 256.max(if o.top_k > 0 { limit } else { 0 });
        let mut list: Vec<(u32, f64)> = Vec::new();
        let mut head_mass = 0.0;
        let nucleus_base = if o.top_k > 0 { None } else { Some(total) };
        loop {
            let end = (sorted + step).min(limit);
            let rest = &mut candidates[sorted..];
            if end - sorted < rest.len() && end > sorted {
                rest.select_nth_unstable_by(end - sorted - 1, order);
            }
            candidates[sorted..end].sort_unstable_by(order);
            for c in &candidates[sorted..end] {
                list.push(*c);
                head_mass += c.1;
            }
            sorted = end;
            step *= 4;
            let enough = match nucleus_base {
                // The last kept token must be seen to cross the mass, with room for rounding.
                Some(base) => head_mass >= o.top_p.min(until) * base * (1.0 + 1e-9),
                None => true,
            };
            let floor_reached = o.min_p > 0.0 && list.last().is_some_and(|c| c.1 < o.min_p);
            if sorted == limit || enough || floor_reached {
                break;
            }
        }
        let base: f64 = nucleus_base.unwrap_or(head_mass);
        if o.top_p < 1.0 {
            let mut sum = 0.0;
            let needed = o.top_p * base;
            let keep = list.iter().position(|c| {
                sum += c.1;
                sum >= needed
            });
            list.truncate(keep.map_or(list.len(), |i| i + 1));
        }
        if o.min_p > 0.0 {
            let first = list.first().map_or(0.0, |c| c.1);
            let keep = list.partition_point(|c| c.1 >= o.min_p * first);
            list.truncate(keep.max(1));
        }
        Ok(Kept { list, total })
    }
}

struct Kept {
    list: Vec<(u32, f64)>,
    total: f64,
}

/// The largest, lowest id on equality.
fn greedy(adjusted: &[f64]) -> Result<u32, NoToken> {
    let mut best: Option<(usize, f64)> = None;
    for (id, &l) in adjusted.iter().enumerate() {
        if l > f64::NEG_INFINITY && best.is_none_or(|(_, b)| l > b) {
            best = Some((id, l));
        }
    }
    best.map(|(id, _)| id as u32).ok_or(NoToken)
}

/// `ln softmax(logits)[id]`.
pub fn logprob(logits: &[f32], id: u32) -> f64 {
    logits.get(id as usize).map_or(f64::NEG_INFINITY, |&l| f64::from(l) - log_sum_exp(logits))
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let max = f64::from(max);
    max + logits.iter().map(|&l| (f64::from(l) - max).exp()).sum::<f64>().ln()
}

/// The `n` most likely ids of a row with their log-probabilities, lower id first on equality.
pub fn top_logprobs(logits: &[f32], n: usize) -> Vec<(u32, f64)> {
    let order =
        |a: &u32, b: &u32| -> Ordering { logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)) };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let n = n.min(ids.len());
    if n == 0 {
        return Vec::new();
    }
    if n < ids.len() {
        ids.select_nth_unstable_by(n - 1, order);
        ids.truncate(n);
    }
    ids.sort_unstable_by(order);
    let lse = log_sum_exp(logits);
    ids.into_iter().map(|id| (id, f64::from(logits[id as usize]) - lse)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(options: SamplerOptions, n: usize) -> Sampler {
        Sampler::new(options, &[], n)
    }

    #[test]
    fn greedy_takes_the_lower_id_on_equality_and_never_padding() {
        let s = sampler(SamplerOptions::default(), 3);
        assert_eq!(s.sample(&[1.0, 2.0, 2.0, 9.0], None, 0).unwrap().id, 1);
    }

    #[test]
    fn masked_tokens_and_nan_are_never_chosen() {
        let s = sampler(SamplerOptions { temperature: 1.0, ..Default::default() }, 4);
        for position in 0..200 {
            let id = s.sample(&[f32::NAN, 5.0, 1.0, 1.0], Some(&[0b1101]), position).unwrap().id;
            assert!(id == 2 || id == 3);
        }
        assert_eq!(s.sample(&[1.0; 4], Some(&[0]), 0), Err(NoToken));
        assert_eq!(s.sample(&[f32::NAN; 4], None, 0), Err(NoToken));
    }

    #[test]
    fn an_infinite_logit_is_certain() {
        let s = sampler(SamplerOptions { temperature: 1.0, ..Default::default() }, 3);
        assert_eq!(s.sample(&[0.0, f32::INFINITY, 0.0], None, 3).unwrap().id, 1);
    }

    #[test]
    fn top_p_keeps_the_token_that_crosses_the_mass() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let ids = |top_p| {
            let s = sampler(SamplerOptions { temperature: 1.0, top_p, ..Default::default() }, 3);
            s.distribution(&logits, None).unwrap().iter().map(|c| c.0).collect::<Vec<_>>()
        };
        assert_eq!(ids(0.4), [0]);
        assert_eq!(ids(0.6), [0, 1]);
        assert_eq!(ids(0.9), [0, 1, 2]);
        assert_eq!(ids(0.0), [0], "the most likely token is always kept");
    }

    #[test]
    fn penalties_follow_their_definitions() {
        let options = SamplerOptions {
            presence_penalty: 1.0,
            frequency_penalty: 0.5,
            repetition_penalty: 2.0,
            logit_bias: vec![(3, 4.0)],
            ..Default::default()
        };
        let mut s = Sampler::new(options, &[0], 4);
        s.accept(1);
        s.accept(1);
        // 0: prompt only, halved; 1: negative, doubled, then 1 + 2 * 0.5 less; 3: bias.
        assert_eq!(s.adjusted(&[4.0, -1.0, 3.0, 0.0], None), [2.0, -4.0, 3.0, 4.0]);
    }

    #[test]
    fn draws_follow_the_distribution() {
        // Chi-square over 8 outcomes and 20,000 draws; 24.3 is the 0.001 point of 7 degrees of freedom.
        let logits: Vec<f32> = (0..8).map(|i| (i as f32 * 0.37).sin() * 2.0).collect();
        let s = sampler(SamplerOptions { temperature: 0.8, seed: 11, ..Default::default() }, 8);
        let p = s.distribution(&logits, None).unwrap();
        let mut counts = [0.0; 8];
        for position in 0..20_000 {
            counts[s.sample(&logits, None, position).unwrap().id as usize] += 1.0;
        }
        let chi: f64 = p.iter().map(|(id, p)| (counts[*id as usize] - p * 2e4).powi(2) / (p * 2e4)).sum();
        assert!(chi < 24.3, "{chi}");
    }

    #[test]
    fn top_logprobs_are_normalised_and_ordered() {
        let top = top_logprobs(&[1.0, 3.0, 3.0, 0.0], 3);
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2, 0]);
        let all: f64 = top_logprobs(&[1.0, 3.0, 3.0, 0.0], 4).iter().map(|t| t.1.exp()).sum();
        assert!((all - 1.0).abs() < 1e-12);
    }

    /// Truncation by its definition: sort everything, then cut.
    fn reference(logits: &[f32], o: &SamplerOptions) -> Vec<u32> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut all: Vec<(u32, f64)> = logits
            .iter()
            .enumerate()
            .map(|(i, &l)| (i as u32, ((f64::from(l) - f64::from(max)) / o.temperature).exp()))
            .filter(|c| c.1 > 0.0)
            .collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if o.top_k > 0 {
            all.truncate(o.top_k);
        }
        let total: f64 = all.iter().map(|c| c.1).sum();
        if o.top_p < 1.0 {
            let mut sum = 0.0;
            let keep = all.iter().take_while(|c| {
                let before = sum;
                sum += c.1;
                before < o.top_p * total || before == 0.0
            });
            let keep = keep.count();
            all.truncate(keep);
        }
        let first = all[0].1;
        all.retain(|c| c.1 >= o.min_p * first);
        all.iter().map(|c| c.0).collect()
    }

    proptest! {
        #[test]
        fn lazy_sorting_equals_sorting_everything(
            logits in prop::collection::vec(-8f32..8.0, 1..3000),
            top_k in prop::sample::select(vec![0usize, 1, 5, 40, 1000]),
            top_p in prop::sample::select(vec![1.0, 0.95, 0.5]),
            min_p in prop::sample::select(vec![0.0, 0.05]),
            temperature in 0.3f64..2.0,
        ) {
            let options = SamplerOptions { temperature, top_k, top_p, min_p, ..Default::default() };
            let s = sampler(options.clone(), logits.len());
            let kept: Vec<u32> = s.distribution(&logits, None).unwrap().iter().map(|c| c.0).collect();
            let expected = reference(&logits, &options);
            // The mass where a nucleus is cut may round differently by one candidate.
            prop_assert!(kept.len().abs_diff(expected.len()) <= usize::from(top_p < 1.0));
            let n = kept.len().min(expected.len());
            prop_assert_eq!(&kept[..n], &expected[..n]);
        }
    }
}
