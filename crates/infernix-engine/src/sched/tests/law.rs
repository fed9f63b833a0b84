//! Whoever drafts, answers follow the model's own distribution: counts of many seeds against exact probabilities.

use super::*;
use crate::sample::{Purpose, Sampler, uniform};
use crate::spec::{Draft, Drafter, Guess, Law};
use std::collections::BTreeMap;

/// Small enough that all answers can be enumerated.
const VOCAB: usize = 8;
/// Tokens of an answer.
const LENGTH: usize = 4;
/// Answers that are drawn.
const DRAWS: u64 = 6000;

/// Allows five of eight ids, others at every place.
#[derive(Clone, Default)]
struct Rotating(Vec<u32>);

fn allowed(place: usize, id: u32) -> bool {
    (id as usize + place) % 8 < 5
}

impl Constraint for Rotating {
    fn mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        words[0] &= (0..8).filter(|id| allowed(self.0.len(), *id)).map(|id| 1 << id).sum::<u32>();
        Ok(())
    }
    fn accept(&mut self, id: u32) -> Result<(), String> {
        if !allowed(self.0.len(), id) {
            return Err(format!("{id} is not allowed at {}", self.0.len()));
        }
        self.0.push(id);
        Ok(())
    }
    fn rollback(&mut self, n: usize) -> Result<(), String> {
        self.0.truncate(self.0.len() - n);
        Ok(())
    }
    fn accepts(&mut self, ids: &[u32]) -> usize {
        ids.iter().enumerate().take_while(|(k, id)| allowed(self.0.len() + k, **id)).count()
    }
    fn finished(&self) -> bool {
        false
    }
}

/// Draws its guesses from a law of its own: near the model's, or turned upside down.
struct Lawful {
    biased: bool,
}

impl Drafter<SimModel> for Lawful {
    fn propose(&mut self, runner: &mut SimModel, lanes: &mut [Guess<'_>]) -> Result<(), crate::EngineError> {
        for l in lanes {
            let mut text = l.sequence.ids().to_vec();
            text.push(l.next);
            l.draft = Draft::default();
            for _ in 0..l.n {
                let sign = if self.biased { -1.0 } else { 1.0 };
                let row = runner.logits(&text);
                let weights: Vec<f64> = row.iter().map(|v| (sign * f64::from(*v)).exp()).collect();
                let mass: f64 = weights.iter().sum();
                let mut law: Law = weights.iter().enumerate().map(|(id, w)| (id as u32, w / mass)).collect();
                law.sort_by(|a, b| b.1.total_cmp(&a.1));
                let (mut sum, dice) = (0.0, uniform(l.request.0, text.len() as u64, Purpose::Draft));
                let pick = law.iter().find(|c| {
                    sum += c.1;
                    sum > dice
                });
                let id = pick.unwrap_or(&law[0]).0;
                text.push(id);
                l.draft.ids.push(id);
                l.draft.laws.push(law);
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    Nobody,
    Chain(f64),
    Copies,
    Law { biased: bool },
}

fn prompt() -> Vec<u32> {
    vec![1, 2, 3, 1, 4, 2, 5, 6, 7, 0, 1, 3, 2]
}

fn sampling(penalties: bool) -> SamplerOptions {
    let plain = SamplerOptions { temperature: 1.5, ..SamplerOptions::default() };
    if penalties {
        SamplerOptions {
            presence_penalty: 0.8,
            frequency_penalty: 0.9,
            repetition_penalty: 1.3,
            top_k: 6,
            top_p: 0.97,
            logit_bias: vec![(3, 0.7)],
            ..plain
        }
    } else {
        plain
    }
}

/// Probability of every answer, its first token left out (the prompt's own pass draws it).
fn exact(penalties: bool, masked: bool) -> BTreeMap<Vec<u32>, f64> {
    let model = SimModel::new(SimOptions { vocab: VOCAB, ..SimOptions::default() });
    let mut answers = vec![(Vec::new(), Sampler::new(sampling(penalties), &prompt(), VOCAB), 1.0)];
    for place in 0..LENGTH {
        let mask = (0..8).filter(|id| allowed(place, *id)).map(|id| 1 << id).sum::<u32>();
        let mut next = Vec::new();
        for (text, sampler, chance) in answers {
            let row = model.logits(&[prompt(), text.clone()].concat());
            for (id, p) in sampler.distribution(&row, masked.then_some(&[mask][..])).unwrap() {
                let mut sampler = sampler.clone();
                sampler.accept(id);
                next.push(([&text[..], &[id]].concat(), sampler, chance * p));
            }
        }
        answers = next;
    }
    let mut law = BTreeMap::new();
    for (text, _, p) in answers {
        *law.entry(text[1..].to_vec()).or_insert(0.0) += p;
    }
    law
}

/// Counts of answers, and the share of right drafts.
fn drawn(who: Who, penalties: bool, masked: bool) -> (BTreeMap<Vec<u32>, f64>, f64) {
    let accuracy = match who {
        Who::Nobody | Who::Copies => None,
        Who::Chain(accuracy) => Some(accuracy),
        Who::Law { .. } => Some(0.0),
    };
    let sim = SimOptions { vocab: VOCAB, draft_accuracy: accuracy, sequences: 4, ..SimOptions::default() };
    let mut o = options(64);
    o.max_concurrency = 4;
    o.cache.enabled = false;
    let copies = if who == Who::Copies { Some(3) } else { Some(0) };
    o.spec = SpecOptions {
        draft_tokens: Some(if who == Who::Nobody { 0 } else { 3 }),
        ngram_tokens: copies,
        ngram_min_match: 1,
        ..SpecOptions::default()
    };
    let mut s = Scheduler::new(SimModel::new(sim), o).unwrap();
    if let Who::Law { biased } = who {
        s.drafter = Box::new(Lawful { biased });
    }
    let mut all = Vec::new();
    for seed in 0..DRAWS {
        let (sink, seen) = sink();
        let constraint =
            if masked { Some(Box::new(Rotating::default()) as Box<dyn Constraint>) } else { None };
        let sampling = SamplerOptions { seed, ..sampling(penalties) };
        s.submit(Request { sampling, constraint, ..request(prompt(), LENGTH) }, sink);
        all.push(seen);
        if seed % 64 == 63 {
            run(&mut s);
        }
    }
    run(&mut s);
    let mut counts = BTreeMap::new();
    for seen in all {
        let text = text(&seen);
        assert_eq!(text.len(), LENGTH, "{:?}", end(&seen));
        *counts.entry(text[1..].to_vec()).or_insert(0.0) += 1.0;
    }
    (counts, s.counters.accepted as f64 / s.counters.drafted.max(1) as f64)
}

/// Pearson's statistic over cells of at least eight expected answers (rarer ones together), as standard deviations above its
/// mean: about normal for many degrees of freedom.
fn deviation(law: &BTreeMap<Vec<u32>, f64>, counts: &BTreeMap<Vec<u32>, f64>) -> f64 {
    assert!(counts.keys().all(|k| law.contains_key(k)), "an answer that cannot be");
    let (mut rare, mut chi, mut cells) = ((0.0, 0.0), 0.0, 0.0);
    for (answer, p) in law {
        let (want, got) = (p * DRAWS as f64, counts.get(answer).copied().unwrap_or(0.0));
        if want < 8.0 {
            rare = (rare.0 + want, rare.1 + got);
        } else {
            chi += (got - want).powi(2) / want;
            cells += 1.0;
        }
    }
    if rare.0 >= 8.0 {
        chi += (rare.1 - rare.0).powi(2) / rare.0;
        cells += 1.0;
    }
    let freedom: f64 = cells - 1.0;
    (chi - freedom) / (2.0 * freedom).sqrt()
}

#[test]
fn answers_follow_the_models_law_whoever_drafts_with_penalties_and_masks() {
    for (penalties, masked) in [(false, false), (true, false), (false, true), (true, true)] {
        let law = exact(penalties, masked);
        for who in
            [Who::Nobody, Who::Chain(0.6), Who::Copies, Who::Law { biased: false }, Who::Law { biased: true }]
        {
            let (counts, accepted) = drawn(who, penalties, masked);
            let off = deviation(&law, &counts);
            assert!(off < 4.0, "{who:?}, penalties {penalties}, mask {masked}: {off} standard deviations");
            assert!(accepted > 0.0 || who == Who::Nobody, "{who:?} drafts nothing that is right");
        }
    }
}

#[test]
fn a_biased_drafter_changes_the_speed_and_not_the_law() {
    let law = exact(true, true);
    let (fair, near) = drawn(Who::Law { biased: false }, true, true);
    let (biased, far) = drawn(Who::Law { biased: true }, true, true);
    assert!(far < 0.5 * near, "{far} of the biased drafts are right, {near} of the others");
    assert!(deviation(&law, &fair) < 4.0 && deviation(&law, &biased) < 4.0);
    // Certain guesses do not even change the text of a seed.
    assert_eq!(drawn(Who::Chain(0.02), true, true).0, drawn(Who::Chain(0.98), true, true).0);
    assert_eq!(drawn(Who::Copies, true, true).0, drawn(Who::Nobody, true, true).0);
}

/// The statistic sees what it must: a law that is slightly off.
#[test]
fn the_statistic_notices_a_law_that_is_off() {
    let law = exact(false, false);
    let (counts, _) = drawn(Who::Nobody, false, false);
    let mut off = law.clone();
    let (mut up, mut down) = (0.0, 0.0);
    for (answer, p) in off.iter_mut() {
        *p *= if answer[0] < 4 { 1.25 } else { 0.75 };
        if answer[0] < 4 { up += *p } else { down += *p }
    }
    off.values_mut().for_each(|p| *p /= up + down);
    assert!(deviation(&off, &counts) > 4.0);
}
