//! Random histories of a sequence: snapshots, restores, drafts of which some are kept. Whatever the history, a row's
//! logits are those of the text read at once. A failing history shrinks to its shortest form.

mod common;

use common::*;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::backend::{ActivationPolicy, Backend};
use infernix_engine::driver::{Driver, DriverOptions, Sequence, Snapshot, Want, argmax};
use infernix_engine::state::KvFormat;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

/// Tokens of the text that histories walk along.
const TEXT: usize = 150;

/// One step of a history.
#[derive(Clone, Debug)]
enum Step {
    /// Reads the next tokens and commits them.
    Prefill(usize),
    /// Reads the next tokens as a decode round with wrong drafts behind them, and keeps some of the good ones.
    Verify { good: usize, bad: usize, keep: usize },
    /// Lets the drafter run, if there is one; its proposals are dropped.
    Draft(usize),
    /// Remembers the sequence here.
    Snapshot,
    /// Goes back to one of the remembered points.
    Restore(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (1..70usize).prop_map(Step::Prefill),
        4 => (1..5usize, 0..4usize, 0..5usize).prop_map(|(good, bad, keep)| Step::Verify { good, bad, keep }),
        1 => (1..4usize).prop_map(Step::Draft),
        2 => Just(Step::Snapshot),
        2 => any::<usize>().prop_map(Step::Restore),
    ]
}

/// A model, its text, and the logits of every row of it.
struct Subject<B: Backend> {
    driver: Driver<B>,
    text: Vec<u32>,
    want: Vec<Vec<f32>>,
}

impl<B: Backend> Subject<B> {
    fn new(model: &Model, backend: B) -> Self {
        let options = DriverOptions { tokens: 1024, sequences: 1, kv: KvFormat::Bf16 };
        let mut driver = model.driver(backend, ActivationPolicy::Artifact, options);
        let text = ids(driver.model.config.vocab, TEXT, 17);
        let want = whole(&mut driver, &text, 0);
        Subject { driver, text, want }
    }

    fn follow(&mut self, history: &[Step]) -> Result<(), TestCaseError> {
        let free = self.driver.free_pages();
        let mut s = self.driver.open(0).unwrap();
        let mut kept: Vec<Snapshot<B>> = Vec::new();
        let done = history.iter().try_for_each(|step| self.step(&mut s, &mut kept, step));
        // The rest of the text, whatever came before.
        let rest = done.and_then(|()| self.step(&mut s, &mut kept, &Step::Prefill(TEXT)));
        self.driver.close(s);
        rest?;
        prop_assert_eq!(self.driver.free_pages(), free, "pages leak");
        Ok(())
    }

    fn step(
        &mut self,
        s: &mut Sequence,
        kept: &mut Vec<Snapshot<B>>,
        step: &Step,
    ) -> Result<(), TestCaseError> {
        let (at, d) = (s.len(), &mut self.driver);
        let left = TEXT - at;
        let got = match *step {
            Step::Prefill(n) if left > 0 => {
                d.prefill(s, &self.text[at..at + n.min(left)], Want::All).unwrap().logits
            }
            Step::Verify { good, bad, keep } if left > 0 => {
                let good = good.min(left);
                let mut columns = self.text[at..at + good].to_vec();
                columns.extend(ids(1000, bad, at as u64));
                let mut logits = d.verify(s, &columns).unwrap();
                d.commit(s, keep.min(good)).unwrap();
                logits.truncate(good);
                logits
            }
            Step::Draft(n) if at > 0 && d.model.draft.is_some() => {
                d.draft(s, self.text[at.min(TEXT - 1)], n, argmax).unwrap();
                Vec::new()
            }
            Step::Snapshot => {
                kept.push(d.snapshot(s).unwrap());
                Vec::new()
            }
            // Of the points that lie in this sequence's past: pages after them may have been given back.
            Step::Restore(which) if !kept.is_empty() => {
                let to = which % kept.len();
                d.restore(s, &kept[to]).unwrap();
                kept.truncate(to + 1);
                Vec::new()
            }
            _ => Vec::new(),
        };
        for (row, (a, b)) in got.iter().zip(&self.want[at..]).enumerate() {
            prop_assert!(same(a, b), "row {} differs", at + row);
        }
        Ok(())
    }
}

/// Runs `cases` histories.
fn histories<B: Backend>(name: &str, cases: u32, backend: impl Fn() -> B) {
    let Some(model) = Model::plain(name) else { return };
    let subject = std::cell::RefCell::new(Subject::new(&model, backend()));
    // Cases are few and their seed is fixed: a failure is one for everybody.
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let rng = proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
    let mut runner = proptest::test_runner::TestRunner::new_with_rng(config, rng);
    let outcome =
        runner.run(&prop::collection::vec(step(), 1..14), |history| subject.borrow_mut().follow(&history));
    if let Err(e) = outcome {
        panic!("{name}: {e}");
    }
}

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() })
}

fn lossless() -> Lossless {
    Lossless::new(LosslessOptions::default())
}

#[test]
fn any_history_of_the_flash_demo_reads_as_if_nothing_had_been_drafted_or_restored() {
    histories("models/flash-demo-bf16", 40, cpu);
}

#[test]
fn any_history_of_the_dense_demo_reads_as_if_nothing_had_been_drafted_or_restored() {
    histories("models/dense-demo-bf16", 40, cpu);
}

#[test]
fn any_history_on_the_lossless_backend_reads_as_if_nothing_had_been_drafted_or_restored() {
    histories("models/flash-demo-bf16", 6, lossless);
}
