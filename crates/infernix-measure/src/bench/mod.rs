//! Prompt and generation throughput of a model in process, measured as llama-bench measures it: random tokens, no
//! sampling, an uncounted warm-up of every test, mean and sample standard deviation over repetitions.

pub mod bytes;
pub mod gpu;
pub mod limit;
pub mod machine;
pub mod render;
pub mod streams;
pub mod timed;

use infernix_engine::EngineError;
use infernix_engine::backend::Backend;
use infernix_engine::driver::{Driver, Sequence, Want};
use std::time::Instant;

/// One measurement: prompt tokens, then generated tokens, on top of tokens already there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Test {
    /// Tokens read as a prompt.
    pub prompt: usize,
    /// Tokens read one a call.
    pub generate: usize,
    /// Tokens in the sequence before the clock starts.
    pub depth: usize,
}

impl Test {
    /// llama-bench's name: `pp512`, `tg128`, `pp512+tg128`, with ` @ d4096` for depth.
    pub fn label(&self) -> String {
        let name = match (self.prompt, self.generate) {
            (p, 0) => format!("pp{p}"),
            (0, g) => format!("tg{g}"),
            (p, g) => format!("pp{p}+tg{g}"),
        };
        if self.depth == 0 { name } else { format!("{name} @ d{}", self.depth) }
    }

    /// Tokens that the rate counts.
    pub fn tokens(&self) -> usize {
        self.prompt + self.generate
    }

    /// Tokens that a sequence must have room for.
    pub fn room(&self) -> usize {
        self.depth + self.tokens()
    }
}

/// Every prompt length, every generation length and every pair, each at every depth. Zero lengths are left out.
pub fn grid(
    prompts: &[usize],
    generations: &[usize],
    pairs: &[(usize, usize)],
    depths: &[usize],
) -> Vec<Test> {
    let at = |prompt, generate, depth| Test { prompt, generate, depth };
    let mut tests = Vec::new();
    for &d in depths {
        tests.extend(prompts.iter().map(|&p| at(p, 0, d)));
        tests.extend(generations.iter().map(|&g| at(0, g, d)));
        tests.extend(pairs.iter().map(|&(p, g)| at(p, g, d)));
    }
    tests.retain(|t| t.tokens() > 0);
    tests
}

/// How tests are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Counted repetitions.
    pub repetitions: usize,
    /// Tokens of one prompt call.
    pub prefill_chunk: usize,
    /// Whether each test runs once uncounted before.
    pub warm_up: bool,
    /// Seed of the tokens.
    pub seed: u64,
}

/// What a test took.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The test.
    pub test: Test,
    /// Nanoseconds of each repetition.
    pub nanoseconds: Vec<u64>,
    /// Tokens of each repetition.
    pub tokens: Vec<u64>,
    /// Decode rounds of all repetitions, where they were generation.
    pub rounds: Option<Rounds>,
    /// Start of the first counted repetition, seconds since 1970.
    pub started: u64,
    /// Rates.
    pub rate: Sample,
}

/// Decode rounds of a test. Counts are sums over whole answers, of all streams and repetitions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rounds {
    /// Rounds.
    pub rounds: u64,
    /// Tokens they gave; the first token of an answer comes with its prompt.
    pub tokens: u64,
    /// Tokens drafted.
    pub drafted: u64,
    /// Of these, accepted.
    pub accepted: u64,
    /// Rounds a second of one stream in each repetition, over the time in which a generation test counts tokens:
    /// streams x this x tokens of a round is then the rate in tokens. A repetition without such a time has none.
    pub rates: Vec<f64>,
}

impl Rounds {
    /// Tokens of one round.
    pub fn tokens_per_round(&self) -> f64 {
        self.tokens as f64 / self.rounds.max(1) as f64
    }

    /// Rounds a second of one stream: the mean over repetitions, as the rate in tokens is one.
    pub fn per_second(&self) -> Option<f64> {
        (!self.rates.is_empty()).then(|| Sample::of(&self.rates).mean)
    }
}

/// Mean, spread and best of a list of rates.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Arithmetic mean.
    pub mean: f64,
    /// Sample standard deviation (n - 1 below the line), of two values or more.
    pub sd: Option<f64>,
    /// Largest value.
    pub best: f64,
}

impl Sample {
    /// Of these values; zero for none.
    pub fn of(values: &[f64]) -> Sample {
        let n = values.len() as f64;
        if values.is_empty() {
            return Sample::default();
        }
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
        let sd = (values.len() > 1).then(|| (squares / (n - 1.0)).sqrt());
        Sample { mean, sd, best: values.iter().copied().fold(f64::MIN, f64::max) }
    }
}

impl Measured {
    /// Of a test's repetitions of one stream, a round a token.
    pub fn new(test: Test, started: u64, nanoseconds: Vec<u64>) -> Measured {
        let tokens = vec![test.tokens() as u64; nanoseconds.len()];
        let mut m = Measured { test, nanoseconds, tokens, rounds: None, started, rate: Sample::default() };
        if test.prompt == 0 {
            let n = m.tokens.iter().sum();
            m.rounds = Some(Rounds { rounds: n, tokens: n, rates: m.rates(), ..Rounds::default() });
        }
        m.rated()
    }

    /// With the rates of its repetitions.
    fn rated(mut self) -> Measured {
        self.rate = Sample::of(&self.rates());
        self
    }

    /// Tokens per second of each repetition.
    pub fn rates(&self) -> Vec<f64> {
        let pairs = self.tokens.iter().zip(&self.nanoseconds);
        pairs.map(|(n, ns)| *n as f64 * 1e9 / (*ns).max(1) as f64).collect()
    }

    /// Mean and spread of the nanoseconds.
    pub fn time(&self) -> Sample {
        Sample::of(&self.nanoseconds.iter().map(|ns| *ns as f64).collect::<Vec<_>>())
    }
}

/// Token ids below a vocabulary size, SplitMix64 of a seed.
#[derive(Clone, Copy, Debug)]
pub struct Ids {
    state: u64,
    vocab: u64,
}

impl Ids {
    /// Ids below `vocab`.
    pub fn new(seed: u64, vocab: u64) -> Self {
        Ids { state: seed, vocab }
    }

    /// The next ids.
    pub fn take(&mut self, n: usize) -> Vec<u32> {
        let mut draw = || {
            self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let x = (self.state ^ self.state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((u128::from(x ^ x >> 31) * u128::from(self.vocab)) >> 64) as u32
        };
        (0..n).map(|_| draw()).collect()
    }
}

/// Runs one test; `None` when `go_on` said to stop.
///
/// # Errors
/// What the engine reports, such as too little room for the sequence.
pub fn measure<B: Backend>(
    driver: &mut Driver<B>,
    test: Test,
    settings: Settings,
    go_on: &dyn Fn() -> bool,
) -> Result<Option<Measured>, EngineError> {
    let mut ids = Ids::new(settings.seed, driver.model.config.vocab);
    let mut sequence = driver.open(0)?;
    let result = repeat(driver, &mut sequence, test, settings, &mut ids, go_on);
    driver.close(sequence);
    result
}

fn repeat<B: Backend>(
    driver: &mut Driver<B>,
    sequence: &mut Sequence,
    test: Test,
    settings: Settings,
    ids: &mut Ids,
    go_on: &dyn Fn() -> bool,
) -> Result<Option<Measured>, EngineError> {
    let chunk = settings.prefill_chunk.max(1);
    for piece in ids.take(test.depth).chunks(chunk) {
        if !go_on() {
            return Ok(None);
        }
        driver.prefill(sequence, piece, Want::None)?;
    }
    let start = driver.snapshot(sequence)?;
    let mut started = 0;
    let mut nanoseconds = Vec::with_capacity(settings.repetitions);
    for n in 0..settings.repetitions + usize::from(settings.warm_up) {
        if !go_on() {
            return Ok(None);
        }
        driver.restore(sequence, &start)?;
        let (prompt, generated) = (ids.take(test.prompt), ids.take(test.generate));
        if n == usize::from(settings.warm_up) {
            started = machine::now();
        }
        let clock = Instant::now();
        let mut left = prompt.len();
        for piece in prompt.chunks(chunk) {
            left -= piece.len();
            // Like llama-bench: logits of the last prompt token only.
            driver.prefill(sequence, piece, if left == 0 { Want::Last } else { Want::None })?;
        }
        for id in generated {
            driver.decode(sequence, id)?;
        }
        if n >= usize::from(settings.warm_up) {
            nanoseconds.push(u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
    }
    Ok(Some(Measured::new(test, started, nanoseconds)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use infernix_engine::backend::ActivationPolicy;
    use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
    use infernix_engine::driver::DriverOptions;
    use infernix_engine::model::{LoadOptions, load};
    use infernix_engine::synthetic::{Geometry, build};
    use infernix_formats::Format;

    #[test]
    fn labels_are_those_of_llama_bench() {
        let label = |prompt, generate, depth| Test { prompt, generate, depth }.label();
        assert_eq!(label(512, 0, 0), "pp512");
        assert_eq!(label(0, 64, 0), "tg64");
        assert_eq!(label(512, 64, 4096), "pp512+tg64 @ d4096");
    }

    #[test]
    fn a_grid_has_every_length_at_every_depth_and_no_empty_test() {
        let labels: Vec<_> = grid(&[512, 0], &[32], &[(16, 8)], &[0, 64]).iter().map(Test::label).collect();
        assert_eq!(labels, ["pp512", "tg32", "pp16+tg8", "pp512 @ d64", "tg32 @ d64", "pp16+tg8 @ d64"]);
    }

    #[test]
    fn a_sample_has_the_mean_and_sample_deviation_of_numpy() {
        // numpy.mean, numpy.std(ddof=1) of [1, 2, 4, 8].
        let s = Sample::of(&[1.0, 2.0, 4.0, 8.0]);
        assert!((s.mean - 3.75).abs() < 1e-12);
        assert!((s.sd.unwrap() - 3.095_695_936_834_452).abs() < 1e-12);
        assert_eq!(s.best, 8.0);
        assert_eq!(Sample::of(&[3.0]).sd, None, "one value does not tell how far values lie apart");
        assert_eq!(Sample::of(&[]), Sample::default());
    }

    #[test]
    fn plain_rounds_and_tokens_have_one_rate_however_uneven_the_repetitions_are() {
        let test = Test { prompt: 0, generate: 50, depth: 0 };
        let m = Measured::new(test, 0, vec![1_000_000_000, 2_000_000_000, 10_000_000_000]);
        let r = m.rounds.as_ref().unwrap();
        // The mean of 50, 25 and 5, not 150 rounds over 13 s.
        assert!((m.rate.mean - 80.0 / 3.0).abs() < 1e-9);
        assert_eq!(r.per_second(), Some(m.rate.mean));
        assert_eq!((r.rounds, r.tokens_per_round()), (150, 1.0));
        let prompt = Test { prompt: 50, generate: 0, depth: 0 };
        assert_eq!(Measured::new(prompt, 0, vec![1]).rounds, None);
    }

    #[test]
    fn repetitions_start_from_the_same_depth_and_interruption_stops_them() {
        let geometry = Geometry::find("qwen3_5_test").unwrap();
        let source = build(&geometry, Format::Q4G64, 3).unwrap();
        let options = LoadOptions { activations: ActivationPolicy::A16, ..LoadOptions::default() };
        let model = load(CpuBackend::new(CpuOptions::default()), &source, options).unwrap();
        let options = DriverOptions { tokens: 64, ..DriverOptions::default() };
        let mut driver = Driver::new(model, None, options).unwrap();
        let test = Test { prompt: 10, generate: 3, depth: 7 };
        let settings = Settings { repetitions: 2, prefill_chunk: 4, warm_up: true, seed: 1 };
        for _ in 0..3 {
            let m = measure(&mut driver, test, settings, &|| true).unwrap().unwrap();
            assert_eq!(m.nanoseconds.len(), 2);
            assert!(m.rate.mean > 0.0 && m.rate.best >= m.rate.mean);
        }
        assert_eq!(measure(&mut driver, test, settings, &|| false).unwrap(), None);
        let too_long = Test { depth: 1000, ..test };
        assert!(measure(&mut driver, too_long, settings, &|| true).is_err());
        assert!(measure(&mut driver, test, settings, &|| true).unwrap().is_some());
    }
}
