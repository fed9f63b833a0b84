//! Test models: plain BF16 checkpoints of `shared/`, loaded without a conversion, and reference tensors.
#![allow(dead_code, unused_imports, reason = "each test file uses a part")]
#![allow(clippy::allow_attributes, reason = "an unused expectation would itself be a warning in some files")]

mod cases;

pub(crate) use cases::*;

use infernix_artifact::Artifact;
use infernix_checkpoint::{Checkpoint, OpenOptions};
use infernix_engine::backend::lossless::{Lossless, LosslessOptions};
use infernix_engine::backend::{ActivationPolicy, Backend, WeightData, WeightPart};
use infernix_engine::driver::{Driver, DriverOptions, Sequence, Want, argmax};
use infernix_engine::model::{ArtifactSource, LoadOptions, MemorySource, WeightSource, load};
use infernix_engine::ngram::{MemoryRows, Ngram, NgramOptions, RowSource, open_ngram};
use infernix_engine::numerics::round::mix;
use infernix_formats::scalar::bf16_to_f32;
use infernix_formats::{Format, Layout};
use infernix_model::{Component, ModelConfig, Rows, Source, expert_parent_names, parameters, source_prefix};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `shared/` beside the repository, or `None` with a reason printed.
#[allow(clippy::print_stderr, reason = "says why a test is skipped")]
pub(crate) fn shared(rest: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(rest);
    if !path.exists() {
        eprintln!("skipped: {} is not here", path.display());
        return None;
    }
    Some(path)
}

/// A checkpoint of plain BF16 tensors as a weight source, and its n-gram table.
pub(crate) fn plain_checkpoint(path: &Path) -> (MemorySource, Option<MemoryRows>) {
    let ck = Checkpoint::open(path, &OpenOptions::default()).unwrap();
    let config = ModelConfig::from_json(&ck.config().unwrap()).unwrap();
    let style = source_prefix(|n| ck.get(n).is_some());
    let mut weights = BTreeMap::new();
    let mut table = None;
    let read = |name: &str| {
        let t = ck.get(name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!(t.dtype.name(), "BF16", "{name}");
        (t.shape.to_vec(), ck.read_all(t).unwrap())
    };
    let whole = |shape: Vec<u64>, bytes: Vec<u8>| {
        let rows = if shape.len() < 2 { 1 } else { shape[..shape.len() - 1].iter().product() };
        WeightPart {
            format: Format::Bf16,
            layout: Layout::ContiguousLeV1,
            shape,
            bytes: Arc::new(bytes),
            file: None,
            rows: 0..rows,
        }
    };
    for p in parameters(&config, &style, &[Component::Text, Component::Mtp]) {
        match &p.source {
            Source::Tensor { name, rows, .. } => {
                let (shape, bytes) = read(name);
                let part = whole(shape, bytes);
                let cut = |begin: u64, n: u64| WeightPart { rows: begin..begin + n, ..part.clone() };
                let parts = match rows {
                    Rows::All => vec![part.clone()],
                    Rows::Range { begin, count } => vec![cut(*begin, *count)],
                    Rows::PerHead { heads, stride, begin, take } => {
                        (0..*heads).map(|h| cut(h * stride + begin, *take)).collect()
                    }
                };
                weights.insert(p.name.clone(), WeightData { shape: p.shape.clone(), parts });
            }
            Source::Experts { prefix } => {
                let [gate_up, down] = expert_parent_names(&p.name);
                for (name, source) in [(gate_up, "gate_up_proj"), (down, "down_proj")] {
                    let (shape, bytes) = match ck.get(&format!("{prefix}.{source}")) {
                        Some(_) => read(&format!("{prefix}.{source}")),
                        None => per_expert(p.shape[0], prefix, source, &read),
                    };
                    let flat = vec![shape[0] * shape[1], shape[2]];
                    let part = whole(flat.clone(), bytes);
                    weights.insert(name, WeightData { shape: flat, parts: vec![part] });
                }
            }
            Source::NgramTable { prefix, parts, .. } => {
                let mut values = Vec::new();
                for k in 0..*parts {
                    let (_, bytes) = read(&format!("{prefix}.shard_{k}.weight"));
                    values
                        .extend(bytes.chunks_exact(2).map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]]))));
                }
                table.get_or_insert_with(Vec::new).extend(values);
            }
            Source::ExpertInputScales { .. } | Source::NgramScale { .. } => {}
        }
    }
    let width = config.ple.as_ref().map_or(1, |p| p.row_width() as usize);
    (MemorySource { config, weights, expert_activation: 16 }, table.map(|v| MemoryRows::new(width, v)))
}

/// Shape and bytes of a stored tensor.
type Stored = (Vec<u64>, Vec<u8>);

fn per_expert(experts: u64, prefix: &str, source: &str, read: &dyn Fn(&str) -> Stored) -> Stored {
    let names: &[&str] = if source == "down_proj" { &["down_proj"] } else { &["gate_proj", "up_proj"] };
    let (mut all, mut shape) = (Vec::new(), vec![experts, 0, 0]);
    for e in 0..experts {
        for n in names {
            let (s, b) = read(&format!("{prefix}.{e}.{n}.weight"));
            shape[1] = s[0] * names.len() as u64;
            shape[2] = s[1];
            all.extend(b);
        }
    }
    (shape, all)
}

/// A checkpoint in memory or an artifact.
pub(crate) enum Model {
    Plain(Box<MemorySource>, Option<MemoryRows>),
    Artifact(Arc<Artifact>),
}

impl Model {
    pub(crate) fn plain(name: &str) -> Option<Self> {
        let (source, table) = plain_checkpoint(&shared(name)?);
        Some(Model::Plain(Box::new(source), table))
    }

    /// A driver over a backend; the drafter is loaded if there is one.
    pub(crate) fn driver<B: Backend>(
        &self,
        backend: B,
        activations: ActivationPolicy,
        options: DriverOptions,
    ) -> Driver<B> {
        match self {
            Model::Plain(source, table) => {
                let drafter = source.has_component(Component::Mtp);
                let model =
                    load(backend, &**source, LoadOptions { drafter, activations, ..LoadOptions::default() })
                        .unwrap();
                Driver::new(model, self.ngram(table), options).unwrap()
            }
            Model::Artifact(a) => {
                let source = ArtifactSource::new(a.clone()).unwrap();
                let drafter = source.has_component(Component::Mtp);
                let model =
                    load(backend, &source, LoadOptions { drafter, activations, ..LoadOptions::default() })
                        .unwrap();
                let ngram = open_ngram(a, None, NgramOptions { threads: 2, cache_bytes: 1 << 20 }).unwrap();
                Driver::new(model, ngram.map(|n| n.0), options).unwrap()
            }
        }
    }

    /// A reader of the table of a checkpoint in memory.
    fn ngram(&self, table: &Option<MemoryRows>) -> Option<Ngram> {
        let Model::Plain(source, _) = self else { return None };
        let ple = source.config.ple.as_ref()?;
        let rows = MemoryRows::new(ple.row_width() as usize, all_rows(table.as_ref()?));
        let options = NgramOptions { threads: 0, cache_bytes: 0 };
        Some(Ngram::new(ple, source.config.vocab, Box::new(rows), options).unwrap())
    }

    /// The same, for tests that run rounds themselves.
    pub(crate) fn own_ngram(&self) -> Option<Ngram> {
        let Model::Plain(_, table) = self else { return None };
        self.ngram(table)
    }
}

fn all_rows(t: &MemoryRows) -> Vec<f32> {
    let mut v = vec![0f32; t.rows() as usize * t.width()];
    for (r, out) in v.chunks_exact_mut(t.width()).enumerate() {
        t.read(r as u64, out).unwrap();
    }
    v
}

/// Random token ids below the vocabulary, and below 4,000.
pub(crate) fn ids(vocab: u64, n: usize, seed: u64) -> Vec<u32> {
    (0..n as u64)
        .map(|i| (mix(seed.wrapping_mul(1_000_003).wrapping_add(i)) % vocab.min(4000)) as u32)
        .collect()
}

/// Logits of a text read in one call.
pub(crate) fn whole<B: Backend>(d: &mut Driver<B>, ids: &[u32], stream: u64) -> Vec<Vec<f32>> {
    let mut s = d.open(stream).unwrap();
    let out = d.prefill(&mut s, ids, Want::All).unwrap().logits;
    d.close(s);
    out
}

/// Bit for bit.
pub(crate) fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Reads `ids` in pieces of random kind and size; decode rounds verify drafts of which a random part is kept.
pub(crate) fn pieces<B: Backend>(
    d: &mut Driver<B>,
    s: &mut Sequence,
    ids: &[u32],
    seed: u64,
) -> Vec<Vec<f32>> {
    let mut out = Vec::new();
    let mut r = seed;
    let mut dice = |n: u64| {
        r = mix(r.wrapping_add(0x9E37_79B9_7F4A_7C15));
        r % n
    };
    while out.len() < ids.len() {
        let left = ids.len() - out.len();
        if dice(3) == 0 {
            let n = (1 + dice(60) as usize).min(left);
            out.extend(d.prefill(s, &ids[s.len()..s.len() + n], Want::All).unwrap().logits);
            continue;
        }
        // Columns: the first `good` are the text's, the others are drafts that will be rejected.
        let (good, bad) = ((1 + dice(3) as usize).min(left), dice(3) as usize);
        let mut columns = ids[s.len()..s.len() + good].to_vec();
        let vocab = d.model.config.vocab;
        columns.extend((0..bad).map(|_| dice(vocab.min(1000)) as u32));
        if dice(2) == 0 && d.model.draft.is_some() && !s.is_empty() {
            d.draft(s, columns[0], 2, argmax).unwrap();
        }
        let logits = d.verify(s, &columns).unwrap();
        d.commit(s, good).unwrap();
        out.extend(logits.into_iter().take(good));
    }
    out
}

type Tensor<T> = (Vec<usize>, Vec<T>);

/// A driver over the lossless backend.
pub(crate) fn lossless(
    source: &MemorySource,
    table: Option<MemoryRows>,
    options: LosslessOptions,
    driver: DriverOptions,
) -> Driver<Lossless> {
    let load_options =
        LoadOptions { drafter: source.has_component(Component::Mtp), ..LoadOptions::default() };
    let model = load(Lossless::new(options), source, load_options).unwrap();
    let ngram = table.map(|t| {
        let ple = model.config.ple.clone().unwrap();
        let o = NgramOptions { threads: 0, cache_bytes: 0 };
        Ngram::new(&ple, model.config.vocab, Box::new(t), o).unwrap()
    });
    Driver::new(model, ngram, driver).unwrap()
}

/// Converts a checkpoint with recipe `auto` into `folder` and opens it.
pub(crate) fn converted(checkpoint: &Path, folder: &Path) -> Arc<Artifact> {
    use infernix_convert::{ConvertOptions, Recipe, RunOptions, Silent, convert, plan};
    let out = folder.join("model.infernix");
    let mut o = ConvertOptions::new(checkpoint, Recipe::load("auto").unwrap(), &out);
    o.threads = 2;
    let plan = plan(&o).unwrap();
    let run = RunOptions { interrupt: infernix_artifact::Interrupt::default(), faults: None, durable: false };
    convert(&plan, &Silent, &run).unwrap();
    let entry = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "infernix"))
        .min()
        .unwrap();
    Arc::new(Artifact::open(&entry).unwrap())
}

/// A lossless driver over an artifact.
pub(crate) fn artifact_driver(
    artifact: &Arc<Artifact>,
    options: LosslessOptions,
    activations: ActivationPolicy,
    driver: DriverOptions,
) -> Driver<Lossless> {
    let source = ArtifactSource::new(artifact.clone()).unwrap();
    let load_options =
        LoadOptions { drafter: source.has_component(Component::Mtp), activations, ..LoadOptions::default() };
    let model = load(Lossless::new(options), &source, load_options).unwrap();
    let ngram = open_ngram(artifact, None, NgramOptions { threads: 2, cache_bytes: 1 << 20 }).unwrap();
    Driver::new(model, ngram.map(|n| n.0), driver).unwrap()
}

/// Reference tensors of one file.
pub(crate) struct Reference(Vec<u8>);

impl Reference {
    pub(crate) fn open(path: &Path) -> Self {
        Reference(std::fs::read(path).unwrap())
    }

    fn tensor<T>(
        &self,
        name: &str,
        dtype: safetensors::Dtype,
        f: impl Fn(&[u8]) -> T,
        n: usize,
    ) -> Option<Tensor<T>> {
        let st = safetensors::SafeTensors::deserialize(&self.0).unwrap();
        let t = st.tensor(name).ok()?;
        assert_eq!(t.dtype(), dtype, "{name}");
        Some((t.shape().to_vec(), t.data().chunks_exact(n).map(f).collect()))
    }

    pub(crate) fn f32(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        self.tensor(name, safetensors::Dtype::F32, |b| f32::from_le_bytes(b.try_into().unwrap()), 4)
            .unwrap_or_else(|| panic!("{name} is not in the reference"))
    }

    pub(crate) fn i32(&self, name: &str) -> Option<(Vec<usize>, Vec<i32>)> {
        self.tensor(name, safetensors::Dtype::I32, |b| i32::from_le_bytes(b.try_into().unwrap()), 4)
    }

    pub(crate) fn i64(&self, name: &str) -> Option<(Vec<usize>, Vec<i64>)> {
        self.tensor(name, safetensors::Dtype::I64, |b| i64::from_le_bytes(b.try_into().unwrap()), 8)
    }

    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        match self.i32(name) {
            Some((_, v)) => v.iter().map(|i| *i as u32).collect(),
            None => self.i64(name).unwrap().1.iter().map(|i| *i as u32).collect(),
        }
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let st = safetensors::SafeTensors::deserialize(&self.0).unwrap();
        st.names()
            .into_iter()
            .map(|n| format!("{n} {:?} {:?}", st.tensor(n).unwrap().dtype(), st.tensor(n).unwrap().shape()))
            .collect()
    }
}

/// max |a - b| / max |b|.
pub(crate) fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut d, mut m) = (0f64, 0f64);
    for (a, b) in a.iter().zip(b) {
        d = d.max(f64::from((a - b).abs()));
        m = m.max(f64::from(b.abs()));
    }
    d / m
}
