//! Drafting with the proposal head, the output rows of the most frequent tokens, on an artifact that was converted with one.
#![expect(clippy::print_stderr, reason = "figures go to the terminal")]

use infernix_artifact::{Artifact, Interrupt};
use infernix_convert::{ConvertOptions, ProposalOptions, Ranking, Recipe, RunOptions, Silent, convert, plan};
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::driver::{Driver, DriverOptions};
use infernix_engine::model::{ArtifactSource, LoadOptions, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use infernix_engine::sample::SamplerOptions;
use infernix_engine::sched::{EngineOptions, Event, Request, Scheduler, SpecMode, SpecOptions};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Tokens of an answer.
const LENGTH: usize = 120;

fn driver(artifact: &Arc<Artifact>, proposal_head: bool) -> Driver<CpuBackend> {
    let backend = CpuBackend::new(CpuOptions { threads: 1, threads_batch: 1, ..CpuOptions::default() });
    let source = ArtifactSource::new(Arc::clone(artifact)).unwrap();
    let options = LoadOptions { drafter: true, proposal_head, ..LoadOptions::default() };
    let model = load(backend, &source, options).unwrap();
    let ngram = open_ngram(artifact, None, NgramOptions { threads: 2, cache_bytes: 1 << 20 }).unwrap();
    let sizes = DriverOptions { tokens: 2048, sequences: 1, ..DriverOptions::default() };
    Driver::new(model, ngram.map(|n| n.0), sizes).unwrap()
}

/// The answer, drafts and right drafts.
fn run(
    artifact: &Arc<Artifact>,
    spec: SpecOptions,
    prompt: &[u32],
    sampling: &SamplerOptions,
) -> (Vec<u32>, u64, u64) {
    let options = EngineOptions { spec, ..EngineOptions::default() };
    let mut s = Scheduler::new(driver(artifact, spec.proposal_head), options).unwrap();
    let text = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&text);
    let request = Request {
        prompt: prompt.to_vec(),
        sampling: sampling.clone(),
        max_tokens: LENGTH,
        ..Request::default()
    };
    let sink = move |e| match e {
        Event::Tokens(t) => own.lock().unwrap().extend(t.iter().map(|t| t.id)),
        Event::Failed(e) => panic!("{e}"),
        _ => {}
    };
    s.submit(request, Box::new(sink));
    while s.open() > 0 {
        s.step();
    }
    let c = s.status(false).counters;
    s.into_runner().1.unwrap();
    let text = text.lock().unwrap().clone();
    (text, c.drafted, c.accepted)
}

fn convert_with(demo: &Path, out: &Path, proposal: Option<ProposalOptions>) -> Arc<Artifact> {
    let mut o = ConvertOptions::new(demo, Recipe::load("qwen3_8_flash_next_nvfp4").unwrap(), out);
    o.threads = 2;
    o.proposal = proposal;
    let made = plan(&o).unwrap();
    let run = RunOptions { interrupt: Interrupt::default(), faults: None, durable: false };
    convert(&made, &Silent, &run).unwrap();
    Arc::new(Artifact::open(out).unwrap())
}

#[test]
fn drafts_of_the_proposal_head_are_often_right_and_change_no_text() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
    let folder = tempfile::tempdir().unwrap();
    let without = convert_with(&demo, &folder.path().join("without.infernix"), None);
    let prompt: Vec<u32> = (0..24).map(|i| 20 + i * 7 % 61).collect();
    let spec = |draft, proposal_head| SpecOptions {
        mode: SpecMode::Mtp,
        draft_tokens: Some(draft),
        proposal_head,
        ..SpecOptions::default()
    };
    let greedy = SamplerOptions::default();
    let sampled = SamplerOptions { temperature: 0.7, seed: 5, ..SamplerOptions::default() };
    // The ranking is what such answers are made of, as a corpus would say it.
    let texts = [&greedy, &sampled].map(|sampling| run(&without, spec(0, false), &prompt, sampling).0);
    let ranking = Ranking::from_ids(texts.iter().flatten().copied());
    let proposal = Some(ProposalOptions { rows: Some(1024), ranking });
    let artifact = convert_with(&demo, &folder.path().join("with.infernix"), proposal);
    for (sampling, plain) in [&greedy, &sampled].into_iter().zip(&texts) {
        let (whole, drafted, right) = run(&artifact, spec(3, false), &prompt, sampling);
        let (part, fewer, part_right) = run(&artifact, spec(3, true), &prompt, sampling);
        eprintln!(
            "{right} of {drafted} drafts right with the whole head, {part_right} of {fewer} with 1,024 rows"
        );
        assert_eq!((plain.len(), &whole), (LENGTH, plain));
        assert_eq!(&part, plain, "the proposal head changed the text");
        // All tokens of the text are among the rows; the head differs by its rounding to four bits.
        assert!(right > 0 && part_right * 2 > right, "{part_right} of {fewer}, {right} of {drafted}");
    }
    let options = LoadOptions { drafter: true, proposal_head: true, ..LoadOptions::default() };
    let source = ArtifactSource::new(without).unwrap();
    let refused = load(CpuBackend::new(CpuOptions::default()), &source, options).err().unwrap();
    assert!(refused.to_string().contains("--proposal"), "{refused}");
}
