//! Synthetic models: random legal words in a given geometry, made in memory, for measuring speed without a download.
//!
//! Codes are uniform over their legal values; scales are set so that every linear preserves the RMS of its input, which
//! keeps activations finite and routing spread out. Nothing such a model says has a meaning.

use crate::backend::weights::Bytes;
use crate::backend::{WeightData, WeightPart};
use crate::error::EngineError;
use crate::memory::HugeMemory;
use crate::model::MemorySource;
use crate::ngram::{Ngram, NgramOptions, RowSource};
use infernix_formats::expert_bank::{BankShape, ExpertMatrix};
use infernix_formats::ggml::{self, GgmlType};
use infernix_formats::scalar::{bf16_from_f32, e4m3_from_f32, e4m3_to_f32, f16_from_f32};
use infernix_formats::{Format, FormatError, Layout, PlaneRole, encoded_size, planes};
use infernix_model::{
    Class, Component, ModelConfig, Parameter, expert_parent_names, parameters, source_prefix,
};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

mod disk;

/// A geometry that can be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Name on the command line.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// Format of its large matrices unless another is asked for.
    pub format: Format,
    numbers: Numbers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Numbers {
    hidden: u64,
    layers: u64,
    vocab: u64,
    heads: u64,
    kv_heads: u64,
    key_heads: u64,
    value_heads: u64,
    /// Width of the dense MLP, or of the shared expert.
    intermediate: u64,
    /// Experts, experts a token, width of one; `None` is dense.
    experts: Option<(u64, u64, u64)>,
    /// A published model: its experts are a bank whatever the format of the rest.
    published: bool,
    /// Format of the bank; NVFP4 has 4-bit activations.
    bank: Format,
    /// Hyper-connections, sparse attention and n-gram embedding of Flash-Next.
    next: bool,
    /// Rows of one head's n-gram table, at least.
    ngram_base: u64,
}

const TEST: Numbers = Numbers {
    hidden: 128,
    layers: 4,
    vocab: 256,
    heads: 1,
    kv_heads: 1,
    key_heads: 1,
    value_heads: 2,
    intermediate: 256,
    experts: None,
    published: false,
    bank: Format::Nvfp4Mul,
    next: false,
    ngram_base: 0,
};

/// The published models, dimensions as in their configurations.
const PUBLISHED: Numbers = Numbers {
    hidden: 2560,
    layers: 48,
    vocab: 248_320,
    heads: 24,
    kv_heads: 2,
    key_heads: 16,
    value_heads: 48,
    intermediate: 640,
    experts: Some((512, 10, 640)),
    published: true,
    bank: Format::Nvfp4Mul,
    next: true,
    ngram_base: 20_000_000,
};

/// Every geometry, smallest first. Head widths are the family's: 256 in attention, 128 in the delta net.
pub const GEOMETRIES: [Geometry; 7] = [
    Geometry {
        name: "qwen3_5_test",
        about: "1.0 M parameters, dense, for tests: 4 layers of width 128",
        format: Format::Q4G64,
        numbers: TEST,
    },
    Geometry {
        name: "qwen3_5_moe_test",
        about: "1.8 M parameters with 4 experts, 2 a token, for tests",
        format: Format::Q4G64,
        numbers: Numbers { experts: Some((4, 2, 128)), ..TEST },
    },
    Geometry {
        name: "qwen3_5_0_6b",
        about: "0.6 B parameters, dense: 24 layers of width 1024",
        format: Format::Q4G64,
        numbers: Numbers {
            hidden: 1024,
            layers: 24,
            vocab: 49_152,
            heads: 8,
            kv_heads: 2,
            key_heads: 16,
            value_heads: 16,
            intermediate: 3584,
            ..TEST
        },
    },
    Geometry {
        name: "qwen3_5_moe_2b",
        about: "2.2 B parameters, 0.6 B a token: 24 layers of width 1024 with 64 experts, 8 a token",
        format: Format::Q4G64,
        numbers: Numbers {
            hidden: 1024,
            layers: 24,
            vocab: 49_152,
            heads: 8,
            kv_heads: 2,
            key_heads: 16,
            value_heads: 16,
            intermediate: 512,
            experts: Some((64, 8, 384)),
            ..TEST
        },
    },
    Geometry {
        name: "qwen3_8_27b",
        about: "27 B parameters, dense: the geometry of Qwen3.8-27B",
        format: Format::Nvfp4Mul,
        numbers: Numbers {
            hidden: 5120,
            layers: 64,
            kv_heads: 4,
            intermediate: 17_408,
            experts: None,
            next: false,
            ..PUBLISHED
        },
    },
    Geometry {
        name: "qwen3_5_122b_a10b",
        about: "122 B parameters, 10 B a token: the geometry of Qwen3.5-122B-A10B",
        format: Format::Q8G32,
        numbers: Numbers {
            hidden: 3072,
            heads: 32,
            value_heads: 64,
            intermediate: 1024,
            experts: Some((256, 8, 1024)),
            next: false,
            ..PUBLISHED
        },
    },
    Geometry {
        name: "qwen3_8_flash_next",
        about: "125 B parameters, 512 experts: the geometry of Qwen3.8-Flash-Next, its n-gram rows made as they are read",
        format: Format::Q8G32,
        numbers: PUBLISHED,
    },
];

/// Formats that a synthetic model's large matrices may have.
pub const FORMATS: [Format; 6] =
    [Format::Q4G64, Format::Q5G64, Format::Q6G64, Format::Q8G32, Format::Nvfp4Mul, Format::Bf16];

/// Formats that the experts of a published model may have.
pub const EXPERT_FORMATS: [Format; 3] = [
    Format::Nvfp4Mul,
    Format::Fp8Block128,
    // Rows of 640 are no whole blocks of IQ3_S.
    Format::GgmlExperts(GgmlType::Iq3S, GgmlType::Iq3S, GgmlType::Iq4Nl),
];

impl Geometry {
    /// The geometry of a name.
    pub fn find(name: &str) -> Option<Geometry> {
        GEOMETRIES.into_iter().find(|g| g.name == name)
    }

    /// The same with fewer layers.
    pub fn with_layers(self, layers: u64) -> Geometry {
        Geometry { numbers: Numbers { layers: layers.max(1), ..self.numbers }, ..self }
    }

    /// The same with experts in one of [`EXPERT_FORMATS`], where they are a bank.
    pub fn with_experts(self, bank: Format) -> Geometry {
        Geometry { numbers: Numbers { bank, ..self.numbers }, ..self }
    }

    /// The same with about `rows` n-gram rows.
    pub fn with_ngram_rows(self, rows: u64) -> Geometry {
        // Two orders of eight heads, as the configuration says.
        Geometry { numbers: Numbers { ngram_base: (rows / 16).max(1), ..self.numbers }, ..self }
    }

    /// Its n-gram rows in a volume in `folder`, written if it is not there.
    pub fn ngram_in(&self, folder: &Path) -> Result<Option<Ngram>, EngineError> {
        let config = self.config()?;
        let Some(ple) = &config.ple else { return Ok(None) };
        let tables = infernix_model::ngram::constants(ple, config.vocab)?;
        let rows = disk::volume(folder, tables.iter().map(|t| t.rows).sum(), ple.row_width() as usize)?;
        Ngram::new(ple, config.vocab, rows, NgramOptions::default()).map(Some)
    }

    /// Its n-gram rows, where it has an n-gram embedding: random values of RMS 1, a function of the row alone.
    pub fn ngram(&self) -> Result<Option<Ngram>, EngineError> {
        let config = self.config()?;
        let Some(ple) = &config.ple else { return Ok(None) };
        let tables = infernix_model::ngram::constants(ple, config.vocab)?;
        let rows = tables.iter().map(|t| t.rows).sum();
        let rows = Rows { width: ple.row_width() as usize, rows };
        let options = NgramOptions { threads: 8, cache_bytes: 0 };
        Ngram::new(ple, config.vocab, Box::new(rows), options).map(Some)
    }

    /// Its configuration, as a checkpoint would state it.
    pub fn config(&self) -> Result<ModelConfig, EngineError> {
        let n = &self.numbers;
        let mut c = json!({
            "model_type": "qwen3_5_text",
            "hidden_size": n.hidden,
            "num_hidden_layers": n.layers,
            "vocab_size": n.vocab,
            "full_attention_interval": 4,
            "num_attention_heads": n.heads,
            "num_key_value_heads": n.kv_heads,
            "head_dim": 256,
            "intermediate_size": n.intermediate,
            "linear_num_key_heads": n.key_heads,
            "linear_num_value_heads": n.value_heads,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": false,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": true,
            },
        });
        if let (Some((experts, top_k, width)), Value::Object(map)) = (n.experts, &mut c) {
            map.insert("model_type".into(), json!("qwen3_5_moe_text"));
            map.insert("num_experts".into(), json!(experts));
            map.insert("num_experts_per_tok".into(), json!(top_k));
            map.insert("moe_intermediate_size".into(), json!(width));
            map.insert("shared_expert_intermediate_size".into(), json!(n.intermediate));
        }
        if let (true, Value::Object(map)) = (n.next, &mut c) {
            let kinds: Vec<_> = (0..n.layers)
                .map(|i| if i % 4 == 3 { "full_attention" } else { "linear_attention" })
                .collect();
            let next = json!({
                "model_type": "qwen4_exp_text",
                "layer_types": kinds,
                "norm_topk_prob": true,
                "mamba_ssm_dtype": "float32",
                "output_gate_type": "sigmoid",
                "hc_count": 4,
                "hc_lowrank": 320,
                "ple_layer_ids": [2],
                "ple_embed_dim": 2560,
                "ple_conv_kernel_size": 4,
                "ngram_size": 3,
                "heads_per_ngram": 8,
                "ngram_vocab_size_base": n.ngram_base,
                "make_ngram_vocab_size_divisible_by": 128,
                "split_ngram_parts": 128,
                "indexer_n_heads": 4,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 128,
                "indexer_budget": 2048,
                "indexer_compress_ratio": 4,
                "eos_token_id": 248_044,
                "bos_token_id": 248_044,
            });
            if let Value::Object(next) = next {
                map.extend(next);
            }
        }
        ModelConfig::from_json(&c).map_err(|e| EngineError::Unsupported(format!("{}: {e}", self.name)))
    }
}

/// What a synthetic model consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Values of all matrices and vectors.
    pub parameters: u64,
    /// Bytes of all words.
    pub bytes: u64,
    /// Bytes that one decoded token reads: everything but the embedding table and the experts it does not choose.
    pub bytes_per_token: u64,
}

/// Sizes of a model without building it.
pub fn sizes(geometry: &Geometry, format: Format) -> Result<Sizes, EngineError> {
    let config = geometry.config()?;
    let mut s = Sizes { parameters: 0, bytes: 0, bytes_per_token: 0 };
    for p in text_parameters(&config, false) {
        let values: u64 = p.shape.iter().product::<u64>() * if p.class == Class::Experts { 3 } else { 1 };
        let mut bytes = 0;
        for (_, format, layout, shape) in objects(&p, format, &geometry.numbers) {
            bytes += encoded_size(layout, format, &shape).map_err(|e| source(&p.name, e))?;
        }
        s.parameters += values;
        s.bytes += bytes;
        s.bytes_per_token += match (p.class, geometry.numbers.experts) {
            (Class::Embed, _) => 0,
            (Class::Experts, Some((experts, top_k, _))) => bytes / experts * top_k,
            _ => bytes,
        };
    }
    Ok(s)
}

/// Builds a model with its large matrices in `format`; the same seed gives the same words.
pub fn build(geometry: &Geometry, format: Format, seed: u64) -> Result<MemorySource, EngineError> {
    build_in(geometry, format, seed, None)
}

/// As [`build`]; banks of experts go to files of `folder` where one is given.
pub fn build_in(
    geometry: &Geometry,
    format: Format,
    seed: u64,
    folder: Option<&Path>,
) -> Result<MemorySource, EngineError> {
    if !FORMATS.contains(&format) {
        return Err(EngineError::Unsupported(format!("synthetic weights in {format}")));
    }
    let config = geometry.config()?;
    let mut weights = BTreeMap::new();
    let mut key = seed;
    // Calibrated scales come with experts that have 4-bit activations.
    let four_bits = geometry.numbers.published && geometry.numbers.bank == Format::Nvfp4Mul;
    for p in text_parameters(&config, four_bits) {
        if p.class == Class::ExpertInputScales {
            let data = input_scales(&p.shape);
            weights.insert(p.name.clone(), data);
            continue;
        }
        for (name, format, layout, shape) in objects(&p, format, &geometry.numbers) {
            key = mix(key);
            let words = words(p.class, format, layout, &shape, key)?;
            let rows = match shape.len() {
                0 | 1 => 1,
                n => shape[..n - 1].iter().product(),
            };
            let (bytes, file): (Bytes, _) = match folder {
                Some(folder) if layout.is_bank() => {
                    let words = words.as_ref();
                    let (bytes, file) = disk::object(folder, key ^ words.len() as u64, words)?;
                    (bytes, Some(file))
                }
                _ => (Arc::new(words), None),
            };
            let part = WeightPart { format, layout, shape: shape.clone(), bytes, file, rows: 0..rows };
            weights.insert(name, WeightData { shape, parts: vec![part] });
        }
    }
    let expert_activation = if four_bits { 4 } else { 16 };
    Ok(MemorySource { config, weights, expert_activation })
}

/// Scales that let activations up to 4 use all of a 4-bit code times an E4M3 scale.
fn input_scales(shape: &[u64]) -> WeightData {
    let n = shape.iter().product::<u64>() as usize;
    let words: Vec<u8> = (0..n).flat_map(|_| (4f32 / (6.0 * 448.0)).to_le_bytes()).collect();
    let rows = shape[..shape.len() - 1].iter().product();
    let part = WeightPart {
        format: Format::Fp32,
        layout: Layout::ContiguousLeV1,
        shape: shape.to_vec(),
        bytes: Arc::new(words),
        file: None,
        rows: 0..rows,
    };
    WeightData { shape: shape.to_vec(), parts: vec![part] }
}

/// Rows of a table that is never stored.
struct Rows {
    width: usize,
    rows: u64,
}

impl RowSource for Rows {
    fn width(&self) -> usize {
        self.width
    }

    fn rows(&self) -> u64 {
        self.rows
    }

    fn read(&self, row: u64, out: &mut [f32]) -> Result<(), String> {
        let mut state = mix(row);
        for part in out.chunks_mut(4) {
            let word = next(&mut state);
            // Four values of 16 bits, uniform with RMS 1.
            for (i, v) in part.iter_mut().enumerate() {
                *v = ((word >> (16 * i)) as u16 as i16) as f32 * (3f32.sqrt() / 32_768.0);
            }
        }
        Ok(())
    }
}

fn source(name: &str, e: FormatError) -> EngineError {
    EngineError::Source { name: name.to_owned(), source: e.into() }
}

fn text_parameters(config: &ModelConfig, input_scales: bool) -> Vec<Parameter> {
    let all = parameters(config, &source_prefix(|_| false), &[Component::Text]);
    // A table is read row by row from elsewhere.
    let wanted = |p: &Parameter| match p.class {
        Class::NgramTable | Class::NgramScale => false,
        Class::ExpertInputScales => input_scales,
        _ => true,
    };
    all.into_iter().filter(wanted).collect()
}

/// The stored objects of a parameter: name, format, layout and shape.
fn objects(p: &Parameter, format: Format, n: &Numbers) -> Vec<(String, Format, Layout, Vec<u64>)> {
    let layout = match format {
        Format::Bf16 => Layout::ContiguousLeV1,
        Format::Nvfp4Mul => Layout::BlockScaleK16V1,
        _ => Layout::RowSplitK128V1,
    };
    match p.class {
        Class::Experts if n.published || format == Format::Nvfp4Mul => {
            let layout = match n.bank {
                Format::Nvfp4Mul => Layout::Nvfp4ExpertRg16V1,
                Format::Fp8Block128 => Layout::Fp8ExpertBlock128V1,
                _ => Layout::GgmlExpertV1,
            };
            vec![(p.name.clone(), n.bank, layout, p.shape.clone())]
        }
        Class::Experts => {
            let (e, h, i) = (p.shape[0], p.shape[1], p.shape[2]);
            let [gate_up, down] = expert_parent_names(&p.name);
            vec![(gate_up, format, layout, vec![2 * e * i, h]), (down, format, layout, vec![e * h, i])]
        }
        class if is_large(class) => vec![(p.name.clone(), format, layout, p.shape.clone())],
        _ => vec![(p.name.clone(), Format::Bf16, Layout::ContiguousLeV1, p.shape.clone())],
    }
}

/// Matrices that recipes quantize; everything else stays BF16.
fn is_large(class: Class) -> bool {
    use Class::*;
    matches!(
        class,
        Embed
            | Head
            | GdnQ
            | GdnK
            | GdnV
            | GdnZ
            | GdnO
            | AttnQ
            | AttnGate
            | AttnK
            | AttnV
            | AttnO
            | MlpGate
            | MlpUp
            | MlpDown
            | SharedExpertGate
            | SharedExpertUp
            | SharedExpertDown
    )
}

fn words(
    class: Class,
    format: Format,
    layout: Layout,
    shape: &[u64],
    key: u64,
) -> Result<HugeMemory, EngineError> {
    let bad = |e| source(class.name(), e);
    let k = shape.last().copied().unwrap_or(1).max(1);
    // The RMS of a row's values that makes the RMS of its product with unit-RMS input 1; 1 for a table of rows.
    let rms = if class == Class::Embed { 1.0 } else { 1.0 / (k as f64).sqrt() };
    let mut memory = HugeMemory::new(encoded_size(layout, format, shape).map_err(bad)? as usize)?;
    let out = memory.as_mut();
    if layout.is_bank() {
        bank(format, layout, shape, key, out).map_err(bad)?;
        return Ok(memory);
    }
    if format == Format::Bf16 {
        let value = |u: f64| match class {
            // Zero-centred norms multiply by 1 + w, the delta net's own by w.
            Class::Norm | Class::AttnNorm => 0.02 * u,
            Class::GdnNorm => 1.0 + 0.02 * u,
            // exp(A_log) in 1..16, as the family is initialised.
            Class::GdnALog => (8.5 + 7.5 * u).ln(),
            Class::GdnDtBias => u - 3.0,
            Class::GdnConv => 0.5 * 3f64.sqrt() * u,
            _ => rms * 3f64.sqrt() * u,
        };
        out.par_chunks_mut(CHUNK).enumerate().for_each(|(n, chunk)| {
            let mut state = mix(key ^ n as u64);
            for word in chunk.chunks_exact_mut(2) {
                let u = (next(&mut state) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
                word.copy_from_slice(&bf16_from_f32(value(u) as f32).to_le_bytes());
            }
        });
        return Ok(memory);
    }
    let spec = format.group_spec();
    for plane in planes(layout, format, shape).map_err(bad)? {
        let bytes = &mut out[plane.offset as usize..][..plane.bytes as usize];
        match (plane.role, spec) {
            (PlaneRole::Scales, Some(spec)) => {
                let scale = f16_from_f32((rms / code_rms(format, spec.qmin, spec.qmax)) as f32);
                bytes.chunks_exact_mut(2).for_each(|w| w.copy_from_slice(&scale.to_le_bytes()));
            }
            (PlaneRole::Scales, None) => bytes.fill(e4m3_from_f32(1.0)),
            (PlaneRole::GlobalScale, _) => {
                bytes.copy_from_slice(&((rms / E2M1_RMS) as f32).to_le_bytes());
            }
            _ => fill(bytes, format, key ^ u64::from(plane.role == PlaneRole::HighBits)),
        }
    }
    Ok(memory)
}

/// Root mean square of E2M1 values under uniform codes: mean of 0, 1/4, 1, 9/4, 4, 9, 16, 36.
const E2M1_RMS: f64 = 2.926_174_978_5;

fn code_rms(format: Format, qmin: i32, qmax: i32) -> f64 {
    // In 8 bits the one illegal byte, -128, becomes -127.
    let codes: Vec<i32> =
        if format == Format::Q8G32 { (-128..=127).collect() } else { (qmin..=qmax).collect() };
    let sum: f64 = codes.iter().map(|c| f64::from((*c).max(qmin)).powi(2)).sum();
    (sum / codes.len() as f64).sqrt()
}

/// Bytes that one task fills, with a generator of its own.
const CHUNK: usize = 1 << 18;

fn fill(bytes: &mut [u8], format: Format, key: u64) {
    bytes.par_chunks_mut(CHUNK).enumerate().for_each(|(n, chunk)| {
        let mut state = mix(key.wrapping_add(n as u64));
        for part in chunk.chunks_mut(8) {
            part.copy_from_slice(&next(&mut state).to_le_bytes()[..part.len()]);
        }
        if format == Format::Q8G32 {
            chunk.iter_mut().filter(|b| **b == 0x80).for_each(|b| *b = 0x81);
        }
    });
}

/// Random codes in every record of a bank, with scales that preserve the RMS of each product.
fn bank(format: Format, layout: Layout, shape: &[u64], key: u64, out: &mut [u8]) -> Result<(), FormatError> {
    /// 16 x 16 codes of 4 bits, then the scale of each row.
    const UNIT: usize = 144;
    let bank = BankShape::of(layout, format, shape)?;
    let (records, scales) = out.split_at_mut((bank.stride * bank.experts) as usize);
    let one = e4m3_from_f32(1.0);
    let rms = |m: ExpertMatrix| 1.0 / (bank.matrix(m).1 as f64).sqrt();
    let types = match bank.types {
        Some(types) => Some([block_of(types[0], key)?, block_of(types[1], key)?, block_of(types[2], key)?]),
        None => None,
    };
    records.par_chunks_mut(bank.stride as usize).enumerate().for_each(|(e, record)| {
        let mut state = mix(key ^ (e as u64) << 32);
        let record = &mut record[..bank.record_bytes as usize];
        match layout {
            Layout::Nvfp4ExpertRg16V1 => {
                for unit in record.chunks_exact_mut(UNIT) {
                    let (codes, row_scales) = unit.split_at_mut(UNIT - 16);
                    random(codes, &mut state);
                    row_scales.fill(one);
                }
            }
            Layout::Fp8ExpertBlock128V1 => {
                let codes = (3 * bank.hidden * bank.intermediate) as usize;
                let tiles = (bank.hidden.div_ceil(128) * bank.intermediate.div_ceil(128)) as usize;
                let (codes, scales) = (codes, codes.next_multiple_of(256));
                random(&mut record[..codes], &mut state);
                // NaN becomes the largest number.
                record[..codes].iter_mut().filter(|b| **b & 0x7F == 0x7F).for_each(|b| *b -= 1);
                for (m, own) in ExpertMatrix::ALL.iter().zip(record[scales..].chunks_exact_mut(4 * tiles)) {
                    let scale = ((rms(*m) / e4m3_rms()) as f32).to_le_bytes();
                    own.as_chunks_mut::<4>().0.fill(scale);
                }
            }
            _ => {
                for (m, (bytes, block)) in std::iter::zip(ExpertMatrix::ALL, types.into_iter().flatten()) {
                    let range = bank.blocks(m);
                    let scale = f16_from_f32((rms(m) / block) as f32).to_le_bytes();
                    for b in record[range.start as usize..range.end as usize].chunks_exact_mut(bytes) {
                        random(b, &mut state);
                        b[..2].copy_from_slice(&scale);
                    }
                }
            }
        }
    });
    for expert in scales.chunks_exact_mut(12) {
        for (word, m) in expert.chunks_exact_mut(4).zip(ExpertMatrix::ALL) {
            word.copy_from_slice(&((rms(m) / E2M1_RMS) as f32).to_le_bytes());
        }
    }
    Ok(())
}

fn random(bytes: &mut [u8], state: &mut u64) {
    for part in bytes.chunks_mut(8) {
        part.copy_from_slice(&next(state).to_le_bytes()[..part.len()]);
    }
}

/// Root mean square of E4M3 values under uniform codes, NaN as the largest number.
fn e4m3_rms() -> f64 {
    let value = |b: u8| f64::from(e4m3_to_f32(if b == 0x7F { 0x7E } else { b }));
    ((0..=0x7F).map(|b| value(b).powi(2)).sum::<f64>() / 128.0).sqrt()
}

/// Bytes of a block of a type that begins with its scale, and the root mean square of the values of random ones whose scale is 1.
fn block_of(ty: GgmlType, key: u64) -> Result<(usize, f64), FormatError> {
    const BLOCKS: usize = 1024;
    let (mut state, mut sum) = (mix(key), 0.0);
    let mut b = vec![0; ty.row_bytes(ty.block_len())? as usize];
    let mut values = vec![0f32; ty.block_len() as usize];
    for _ in 0..BLOCKS {
        random(&mut b, &mut state);
        b[..2].copy_from_slice(&f16_from_f32(1.0).to_le_bytes());
        ggml::decode_f32(ty, &b, &mut values)?;
        sum += values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
    }
    Ok((b.len(), (sum / (values.len() * BLOCKS) as f64).sqrt()))
}

/// SplitMix64's finaliser (Steele, Lea and Flood 2014) over the next multiple of the golden ratio.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mix(*state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::WeightSource as _;
    use infernix_formats::Encoded;
    use infernix_formats::expert_bank::ExpertRecord;

    fn tiny() -> [Geometry; 2] {
        [GEOMETRIES[0], GEOMETRIES[1]]
    }

    #[test]
    fn every_word_is_legal_and_linears_preserve_the_rms() {
        for format in FORMATS {
            let source = build(&tiny()[1], format, 7).unwrap();
            for name in source.names() {
                let data = source.weight(&name).unwrap();
                let part = &data.parts[0];
                let e = Encoded::new(part.layout, part.format, &part.shape, (*part.bytes).as_ref()).unwrap();
                e.validate_words().unwrap_or_else(|e| panic!("{name} in {format}: {e}"));
                if !name.ends_with("/shared/down") && !name.ends_with("/attn/q") {
                    continue;
                }
                let k = part.shape[1] as usize;
                let mut values = vec![0f32; part.shape[0] as usize * k];
                e.decode_rows_f32(0..part.shape[0], &mut values).unwrap();
                let square: f64 = values.iter().map(|v| f64::from(v * v)).sum();
                let gain = (square / part.shape[0] as f64).sqrt();
                assert!((gain - 1.0).abs() < 0.02, "{name} in {format}: {gain}");
            }
        }
    }

    #[test]
    fn banks_are_legal_and_preserve_the_rms() {
        for format in EXPERT_FORMATS {
            let numbers = Numbers { published: true, hidden: 256, experts: Some((2, 1, 256)), ..TEST };
            let source =
                build(&Geometry { numbers, ..tiny()[1] }.with_experts(format), Format::Q8G32, 7).unwrap();
            let name = source.names().into_iter().find(|n| n.ends_with("/experts")).unwrap();
            let data = source.weight(&name).unwrap();
            let part = &data.parts[0];
            let words = (*part.bytes).as_ref();
            let e = Encoded::new(part.layout, part.format, &part.shape, words).unwrap();
            e.validate_words().unwrap_or_else(|e| panic!("{name} in {format}: {e}"));
            let shape = BankShape::of(part.layout, part.format, &part.shape).unwrap();
            let record = &words[shape.record(1).start as usize..shape.record(1).end as usize];
            for m in ExpertMatrix::ALL {
                let (n, k) = shape.matrix(m);
                let mut values = vec![0f32; (n * k) as usize];
                // NVFP4: the multiplier of every matrix of unit-RMS input.
                let global = (1.0 / (k as f64).sqrt() / E2M1_RMS) as f32;
                let expert = ExpertRecord::new(shape, part.format, [global; 3], record).unwrap();
                expert.decode_f32(m, 0..n, &mut values).unwrap();
                let gain = (values.iter().map(|v| f64::from(v * v)).sum::<f64>() / n as f64).sqrt();
                assert!((gain - 1.0).abs() < 0.03, "{name} in {format}, {}: {gain}", m.name());
            }
        }
    }

    #[test]
    fn sizes_are_those_of_the_built_words() {
        for geometry in tiny() {
            for format in FORMATS {
                let source = build(&geometry, format, 1).unwrap();
                let bytes: usize = source.weights.values().map(|w| (*w.parts[0].bytes).as_ref().len()).sum();
                let s = sizes(&geometry, format).unwrap();
                assert_eq!(s.bytes, bytes as u64);
                assert!(s.bytes_per_token < s.bytes);
            }
        }
    }

    #[test]
    fn the_small_model_has_0_6_billion_parameters() {
        let g = Geometry::find("qwen3_5_0_6b").unwrap();
        let n = sizes(&g, Format::Q4G64).unwrap().parameters;
        assert!((590_000_000..610_000_000).contains(&n), "{n}");
    }
}
