//! The bundled model under measurement: exact zeros, the yardstick, and defects that the figures must show.

use infernix_artifact::{Artifact, Interrupt};
use infernix_convert::{ConvertOptions, Recipe, RunOptions, Silent, convert, plan};
use infernix_engine::EngineError;
use infernix_engine::backend::cpu::{CpuBackend, CpuOptions};
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::backend::{ActivationPolicy, Backend, WeightData};
use infernix_engine::driver::{Driver, DriverOptions};
use infernix_engine::model::{ArtifactSource, LoadOptions, WeightSource, load};
use infernix_engine::ngram::{NgramOptions, open_ngram};
use infernix_engine::numerics::round::Rounding;
use infernix_formats::expert_bank::{BankShape, ExpertMatrix, Nvfp4Planes, pack_nvfp4, unpack_nvfp4};
use infernix_measure::corpus::default_text;
use infernix_measure::*;
use infernix_model::{Component, ModelConfig};
use infernix_text::Tokenizer;
use serde_json::json;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

const CTX: usize = 512;

/// The bundled model, converted once for all tests.
fn artifact() -> Arc<Artifact> {
    static FOLDER: OnceLock<(tempfile::TempDir, Arc<Artifact>)> = OnceLock::new();
    let (_, artifact) = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4");
        let out = folder.path().join("demo.infernix");
        let plan = plan(&ConvertOptions::new(&checkpoint, Recipe::load("auto").unwrap(), &out)).unwrap();
        let run = RunOptions { interrupt: Interrupt::default(), faults: None, durable: false };
        convert(&plan, &Silent, &run).unwrap();
        let artifact = Arc::new(Artifact::open(&out).unwrap());
        (folder, artifact)
    });
    Arc::clone(artifact)
}

/// The documentation in chunks, as many as a test can afford.
fn chunks(count: usize) -> Chunks {
    let tokenizer = artifact().resource("text", "tokenizer.json").unwrap();
    let config = artifact().resource("text", "tokenizer_config.json").unwrap();
    let tokenizer = Tokenizer::from_json(&tokenizer, Some(&config)).unwrap();
    let text = default_text();
    Chunks::new("docs", text.as_bytes(), &tokenizer.encode(&text).unwrap(), CTX, Some(count)).unwrap()
}

fn driver<B: Backend>(backend: B, source: &dyn WeightSource, activations: ActivationPolicy) -> Driver<B> {
    let drafter = source.has_component(Component::Mtp);
    let options = LoadOptions { drafter, activations, ..LoadOptions::default() };
    let model = load(backend, source, options).unwrap();
    let ngram = open_ngram(&artifact(), None, NgramOptions::default()).unwrap().map(|n| n.0);
    let options = DriverOptions { tokens: 2 * CTX + 16, sequences: 2, ..DriverOptions::default() };
    Driver::new(model, ngram, options).unwrap()
}

fn lossless(source: &dyn WeightSource) -> Driver<Lossless> {
    driver(Lossless::new(LosslessOptions::default()), source, ActivationPolicy::A16)
}

fn cpu(source: &dyn WeightSource, activations: ActivationPolicy) -> Driver<CpuBackend> {
    driver(
        CpuBackend::new(CpuOptions { threads: 2, threads_batch: 2, ..CpuOptions::default() }),
        source,
        activations,
    )
}

fn exact<'d>(driver: &'d mut Driver<Lossless>) -> DriverSource<'d, Lossless> {
    DriverSource::new(driver, json!({ "backend": "lossless" }))
        .together(2)
        .rounding(|b, seed| b.set_rounding(seed.map_or(Rounding::Nearest, Rounding::Stochastic)))
}

fn test(engine: &str, index: usize, path: Path, rounding: Option<u64>) -> Test {
    Test { engine: engine.into(), rows: Rows::Source { index, path, rounding } }
}

fn run(count: usize, sources: &mut [&mut dyn LogitsSource], tests: Vec<Test>) -> KldReport {
    let mut options = KldOptions::new(chunks(count), 4096);
    options.group = 2;
    kld(&options, sources, Reference::Source(0), tests, &mut |_| {}, &AtomicBool::new(false)).unwrap()
}

/// An otherwise sound model with one weight's bytes changed.
struct Planted {
    sound: ArtifactSource,
    name: &'static str,
    edit: fn(&WeightData) -> Vec<u8>,
}

impl WeightSource for Planted {
    fn config(&self) -> &ModelConfig {
        self.sound.config()
    }
    fn has_component(&self, component: Component) -> bool {
        self.sound.has_component(component)
    }
    fn names(&self) -> Vec<String> {
        self.sound.names()
    }
    fn contains(&self, name: &str) -> bool {
        self.sound.contains(name)
    }
    fn weight(&self, name: &str) -> std::result::Result<WeightData, EngineError> {
        let mut weight = self.sound.weight(name)?;
        if name == self.name {
            let bytes = (self.edit)(&weight);
            weight.parts[0].bytes = Arc::new(bytes);
        }
        Ok(weight)
    }
    fn input_scale(&self, name: &str) -> Option<f32> {
        self.sound.input_scale(name)
    }
    fn default_expert_activation(&self) -> u32 {
        self.sound.default_expert_activation()
    }
}

fn sound() -> ArtifactSource {
    ArtifactSource::new(artifact()).unwrap()
}

/// The first value of a BF16 norm, one unit in the last place up.
fn one_ulp(weight: &WeightData) -> Vec<u8> {
    let mut bytes = (*weight.parts[0].bytes).as_ref().to_vec();
    assert_eq!(weight.parts[0].format, infernix_formats::Format::Bf16);
    let word = u16::from_le_bytes([bytes[0], bytes[1]]);
    bytes[..2].copy_from_slice(&(word + 1).to_le_bytes());
    bytes
}

/// One expert's up matrix where its gate belongs, and the other way round.
fn swapped_expert<const E: u64>(weight: &WeightData) -> Vec<u8> {
    let part = &weight.parts[0];
    let mut bytes = (*part.bytes).as_ref().to_vec();
    let shape = BankShape::new(part.layout, &part.shape).unwrap();
    let record = shape.record(E);
    let record = record.start as usize..record.end as usize;
    let planes = ExpertMatrix::ALL.map(|m| {
        let (n, k) = shape.matrix(m);
        let (mut codes, mut scales) = (vec![0; (n * k / 2) as usize], vec![0; (n * k / 16) as usize]);
        unpack_nvfp4(&shape, &bytes[record.clone()], m, &mut codes, &mut scales).unwrap();
        (codes, scales)
    });
    let plane = |i: usize| Nvfp4Planes { codes: &planes[i].0, scales: &planes[i].1 };
    pack_nvfp4(&shape, plane(1), plane(0), plane(2), &mut bytes[record]).unwrap();
    let globals = shape.record(shape.experts).start as usize + 12 * E as usize;
    let (gate, up) = bytes[globals..globals + 8].split_at_mut(4);
    gate.swap_with_slice(up);
    bytes
}

#[test]
fn the_reference_against_itself_is_exactly_zero_on_both_paths() {
    let (mut a, mut b) = (lossless(&sound()), lossless(&sound()));
    let mut b = exact(&mut b).drafts(3);
    let tests = vec![test("same", 1, Path::Prompt, None), test("same", 1, Path::Decode, None)];
    let report = run(2, &mut [&mut exact(&mut a), &mut b], tests);
    for p in &report.paths {
        assert_eq!(
            (p.stats.kld.value, p.ppl_ratio_pct, p.stats.same_top.value),
            (0.0, 0.0, 1.0),
            "{}",
            p.path
        );
    }
    // The decode rows came from rounds with drafts, some of them right.
    let d = report.paths[1].drafting.unwrap();
    assert_eq!(d.rounds + d.accepted, 2 * 255);
    assert!(d.drafted > d.rounds && d.accepted > 0, "{d:?}");
}

#[test]
fn a_rounding_seed_is_one_model_and_seeds_are_one_distribution() {
    let (mut a, mut b) = (lossless(&sound()), lossless(&sound()));
    let seeds = |index, path, seed| test("honest", index, path, Some(seed));
    let tests = vec![
        seeds(0, Path::Prompt, 7),
        seeds(1, Path::Prompt, 7),
        // Rounding is keyed by position, not by call: rows read as decode rounds are the same model.
        seeds(1, Path::Decode, 7),
        seeds(0, Path::Prompt, 8),
    ];
    let report = run(4, &mut [&mut exact(&mut a), &mut exact(&mut b)], tests);
    let r = report.rounding.unwrap();
    assert_eq!((r.seeds[0], r.seeds[0]), (r.seeds[1], r.seeds[2]), "bit-equal");
    let (one, other) = (r.seeds[0].1, r.seeds[3].1);
    assert!(one > 0.0 && one != other);
    let [low, high] = r.kld_ci.unwrap();
    assert!(low < one && one < high && low < other && other < high, "{one} {other} in {low}..{high}");
}

#[test]
fn the_cpu_backend_is_as_close_as_honest_rounding_on_both_paths_and_a8_costs() {
    let source = sound();
    let mut a = lossless(&source);
    let mut b = cpu(&source, ActivationPolicy::A16);
    let mut c = cpu(&source, ActivationPolicy::A8);
    let mut b = DriverSource::new(&mut b, json!({})).drafts(3);
    let mut c = DriverSource::new(&mut c, json!({}));
    let tests = vec![
        test("honest", 0, Path::Prompt, Some(1)),
        test("honest", 0, Path::Prompt, Some(2)),
        test("a16", 1, Path::Prompt, None),
        test("a16", 1, Path::Decode, None),
        test("a8", 2, Path::Prompt, None),
    ];
    let report = run(4, &mut [&mut exact(&mut a), &mut b, &mut c], tests);
    let times = |i: usize| report.paths[i].times_rounding.unwrap();
    assert!(times(0) <= 1.1 && times(1) <= 1.1, "{} {}", times(0), times(1));
    // On the CPU every result is independent of the rows of a call.
    assert_eq!(report.paths[0].stats, report.paths[1].stats);
    assert!(report.paths[2].stats.kld.value > report.paths[0].stats.kld.value);
}

#[test]
fn one_unit_in_the_last_place_of_one_norm_weight_is_seen() {
    let source = sound();
    let planted = Planted { sound: sound(), name: "text/layers/3/attn_hc/norm", edit: one_ulp };
    // An expert that a fifteenth of the rows chooses: lossless against lossless nothing is too small.
    let swapped = Planted { sound: sound(), name: "text/layers/2/moe/experts", edit: swapped_expert::<0> };
    let (mut a, mut b, mut c) = (lossless(&source), lossless(&planted), lossless(&swapped));
    let tests = vec![
        test("one ulp", 1, Path::Prompt, None),
        test("swapped", 2, Path::Prompt, None),
        test("sound", 0, Path::Prompt, None),
    ];
    let report = run(4, &mut [&mut exact(&mut a), &mut exact(&mut b), &mut exact(&mut c)], tests);
    for p in &report.paths[..2] {
        let [low, _] = p.kld_ci.unwrap();
        assert!(low > 0.0, "{}: {:?}", p.engine, p.kld_ci);
    }
    assert_eq!(report.paths[2].kld_ci, Some([0.0; 2]));
}

#[test]
fn one_expert_with_gate_and_up_exchanged_is_seen_on_the_cpu_backend() {
    let source = sound();
    // The expert that this text's rows choose most, 932 of 1,536: one chosen rarely costs less than what separates the
    // backend from the reference.
    let planted = Planted { sound: sound(), name: "text/layers/7/moe/experts", edit: swapped_expert::<21> };
    let mut a = lossless(&source);
    let (mut b, mut c) = (cpu(&source, ActivationPolicy::A16), cpu(&planted, ActivationPolicy::A16));
    let mut b = DriverSource::new(&mut b, json!({}));
    let mut c = DriverSource::new(&mut c, json!({}));
    let tests = vec![test("sound", 1, Path::Prompt, None), test("planted", 2, Path::Prompt, None)];
    let report = run(6, &mut [&mut exact(&mut a), &mut b, &mut c], tests);
    let (over, more, interval) = report.paths[1].rise.clone().unwrap();
    assert!(over == "sound" && more > 0.0 && interval.unwrap()[0] > 0.0, "{more} in {interval:?}");
}
