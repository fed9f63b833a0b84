//! Binding weights to a graph.

use super::source::{Binder, WeightSource};
use super::{Draft, DraftInput, End, FeedForward, Layer, Mixer, Model, Proposal, Skeleton};
use crate::backend::{
    Activation, ActivationPolicy, AttentionWeights, Backend, ExpertData, ExpertSpec, GateKind, GdnDims,
    GdnWeights, HyperWeights, IndexDims, IndexerWeights, MlpWeights, MoeWeights, Part, PleWeights, RopeTable,
    Site, WeightData, WeightSpec,
};
use crate::error::EngineError;
use crate::state::{AttentionLayout, KvFormat, PAGE_TOKENS, PleLayout, StateLayout};
use infernix_formats::Format;
use infernix_model::{
    Component, Ffn, GateActivation, LayerKind, ModelConfig, MoeConfig, expert_parent_names,
};
use std::sync::Arc;

/// What to load, and how wide activations are.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    /// Load the drafter too, if the source has one.
    pub drafter: bool,
    /// Load the proposal head with the drafter; the source must have one.
    pub proposal_head: bool,
    /// Activation widths.
    pub activations: ActivationPolicy,
}

/// Loads a model: every binding of the loaded components is used exactly once, other components are not read.
pub fn load<B: Backend>(
    backend: B,
    source: &dyn WeightSource,
    options: LoadOptions,
) -> Result<Model<B>, EngineError> {
    let config = source.config().clone();
    let rope = Arc::new(super::rope::table(&config.rope));
    let drafter = options.drafter && source.has_component(Component::Mtp);
    let layout = layout(&config, drafter);
    let mut l = Loader {
        backend,
        bind: Binder::new(source),
        c: &config,
        rope,
        options,
        nvfp4_experts: has_nvfp4_experts(source),
        gdn: 0,
        attention: 0,
        ple: 0,
    };
    let (v, h) = (config.vocab as usize, l.hidden());
    let embed = l.matrix("text/embed", &[v, h], Use::Exact)?;
    let mut layers = Vec::with_capacity(config.layers.len());
    for (i, kind) in config.layers.iter().enumerate() {
        layers.push(l.layer(&format!("text/layers/{i}"), i as u16, *kind, config.ple_table(i).is_some())?);
    }
    let end = l.end("text")?;
    let head = l.matrix("text/head", &[v, h], Use::Linear)?;
    let draft = if drafter { Some(l.draft()?) } else { None };
    let proposal = if drafter && options.proposal_head { Some(l.proposal()?) } else { None };
    let components: &[Component] =
        if drafter { &[Component::Text, Component::Mtp] } else { &[Component::Text] };
    l.bind.check(components)?;
    let backend = l.backend;
    Ok(Model { backend, config, embed, head, layers, end, draft, proposal, layout })
}

fn has_nvfp4_experts(source: &dyn WeightSource) -> bool {
    let name = "text/layers/0/moe/experts";
    source.contains(name)
        && source
            .weight(name)
            .is_ok_and(|w| w.parts.iter().any(|p| matches!(p.format, Format::Nvfp4 | Format::Nvfp4Mul)))
}

/// Bytes of a KV page of host memory over all attention layers, the drafter's included where it runs.
pub fn page_bytes(c: &ModelConfig, drafter: bool, kv: KvFormat) -> u64 {
    let codec = kv.codec();
    let tokens = |a: &AttentionLayout| (PAGE_TOKENS * a.kv_heads * 2 * codec.row_bytes(a.head_dim)) as u64;
    layout(c, drafter).attention.iter().map(tokens).sum()
}

/// State of a model's layers; pages, slots and KV format are the driver's.
pub(crate) fn layout(c: &ModelConfig, drafter: bool) -> StateLayout {
    let index = c.qsa.as_ref().map(|q| IndexDims {
        heads: q.heads as usize,
        dim: q.head_dim as usize,
        ratio: q.ratio as usize,
        budget: q.budget as usize,
    });
    let one = |part| AttentionLayout {
        part,
        kv_heads: c.attention.kv_heads as usize,
        head_dim: c.attention.head_dim as usize,
        index,
    };
    let target = c.layers.iter().filter(|k| **k == LayerKind::Attention).map(|_| one(Part::Target));
    let gdn = GdnDims {
        key_heads: c.gdn.key_heads as usize,
        value_heads: c.gdn.value_heads as usize,
        key_dim: c.gdn.key_dim as usize,
        value_dim: c.gdn.value_dim as usize,
        conv_kernel: c.gdn.conv_kernel as usize,
    };
    StateLayout {
        attention: target.chain(drafter.then(|| one(Part::Drafter))).collect(),
        gdn: c.layers.iter().filter(|k| **k == LayerKind::Gdn).map(|_| gdn).collect(),
        ple: c
            .ple
            .iter()
            .flat_map(|p| {
                let one = PleLayout {
                    width: c.residual_width() as usize,
                    columns: (p.conv_kernel as usize - 1) * p.ngram_size as usize,
                };
                p.layers.iter().map(move |_| one)
            })
            .collect(),
        pages: 0,
        slots: 0,
        kv: KvFormat::Bf16,
    }
}

/// How wide activations may be made before a product.
#[derive(Clone, Copy, PartialEq)]
enum Use {
    /// Always 16 bits: router, hyper-connections, indexer, GDN a and b, PLE; also vectors and tables.
    Exact,
    /// As the policy says.
    Linear,
}

struct Loader<'s, B: Backend> {
    backend: B,
    bind: Binder<'s>,
    c: &'s ModelConfig,
    rope: Arc<RopeTable>,
    options: LoadOptions,
    nvfp4_experts: bool,
    gdn: usize,
    attention: usize,
    ple: usize,
}

impl<B: Backend> Loader<'_, B> {
    fn hidden(&self) -> usize {
        self.c.hidden as usize
    }

    fn streams(&self) -> usize {
        self.c.hyper.as_ref().map_or(1, |h| h.streams as usize)
    }

    /// `names`: the parameters that make up `data`; 4-bit products need NVFP4 words and one input scale for all of them.
    fn spec(&self, name: &str, names: &[&str], data: &WeightData, usage: Use) -> WeightSpec {
        let mut scales = names.iter().map(|n| self.bind.source().input_scale(n));
        let first = scales.next().flatten();
        let nvfp4 = data.parts.iter().all(|p| matches!(p.format, Format::Nvfp4 | Format::Nvfp4Mul));
        let input_scale = first.filter(|_| nvfp4 && scales.all(|s| s == first));
        let activation = match self.options.activations {
            _ if usage == Use::Exact => Activation::A16,
            // With routed NVFP4 experts only the experts change width.
            ActivationPolicy::A8 if !self.nvfp4_experts => Activation::A8,
            ActivationPolicy::A4 if input_scale.is_some() => Activation::A4,
            _ => Activation::A16,
        };
        WeightSpec { name: name.to_owned(), activation, input_scale }
    }

    fn matrix(&mut self, name: &str, shape: &[usize], usage: Use) -> Result<B::Weight, EngineError> {
        let data = self.bind.take(name, shape)?;
        let spec = self.spec(name, &[name], &data, usage);
        match self.bind.source().input_columns(name)? {
            None => self.backend.weight(&spec, data),
            Some(columns) if Some(&columns.len()) == shape.last() => {
                self.backend.gathered(&spec, data, columns)
            }
            Some(columns) => Err(EngineError::Weight {
                name: name.to_owned(),
                what: format!("an order of {} columns for shape {shape:?}", columns.len()),
            }),
        }
    }

    fn vector(&mut self, name: String, n: usize) -> Result<B::Weight, EngineError> {
        self.matrix(&name, &[n], Use::Exact)
    }

    fn layer(&mut self, name: &str, site: u16, kind: LayerKind, ple: bool) -> Result<Layer<B>, EngineError> {
        let h = self.hidden();
        let ple = if ple { Some(self.ple(&format!("{name}/ple"))?) } else { None };
        let skeleton = if self.c.hyper.is_some() {
            Skeleton::Hyper {
                mixer: self.hyper(&format!("{name}/attn_hc"), true)?,
                ffn: self.hyper(&format!("{name}/mlp_hc"), true)?,
            }
        } else {
            Skeleton::PreNorm {
                input: self.vector(format!("{name}/input_norm"), h)?,
                post: self.vector(format!("{name}/post_norm"), h)?,
            }
        };
        let mixer = match kind {
            LayerKind::Gdn => Mixer::Gdn(self.gdn(&format!("{name}/gdn"))?),
            LayerKind::Attention => Mixer::Attention(self.attention(&format!("{name}/attn"))?),
        };
        let ffn = match &self.c.ffn {
            Ffn::Dense { intermediate } => {
                FeedForward::Mlp(self.mlp(&format!("{name}/mlp"), *intermediate as usize)?)
            }
            Ffn::Moe(m) => FeedForward::Moe(self.moe(&format!("{name}/moe"), m)?),
        };
        Ok(Layer { site, ple, skeleton, mixer, ffn })
    }

    fn hyper(&mut self, name: &str, inject: bool) -> Result<HyperWeights<B>, EngineError> {
        let (n, wide) = (self.streams(), self.c.residual_width() as usize);
        let rank = self.c.hyper.as_ref().map_or(0, |h| h.rank as usize);
        Ok(HyperWeights {
            norm: self.vector(format!("{name}/norm"), wide)?,
            down: self.matrix(&format!("{name}/down"), &[rank, wide], Use::Exact)?,
            up: self.matrix(&format!("{name}/up"), &[wide, rank], Use::Exact)?,
            inject: if inject {
                Some(self.matrix(&format!("{name}/inject"), &[n, wide], Use::Exact)?)
            } else {
                None
            },
            streams: n,
            eps: self.c.eps,
        })
    }

    fn gdn(&mut self, name: &str) -> Result<GdnWeights<B>, EngineError> {
        let (g, h) = (self.c.gdn.clone(), self.hidden());
        let nv = g.value_heads as usize;
        let (keys, values) = ((g.key_heads * g.key_dim) as usize, nv * g.value_dim as usize);
        let names = [("q", keys), ("k", keys), ("v", values)].map(|(p, n)| (format!("{name}/{p}"), n));
        let qkv = self.bind.take_stacked(&names, h)?;
        let parameters: Vec<&str> = names.iter().map(|n| n.0.as_str()).collect();
        let spec = self.spec(&format!("{name}/qkv"), &parameters, &qkv, Use::Linear);
        let qkv = self.backend.weight(&spec, qkv)?;
        let state = self.gdn;
        self.gdn += 1;
        Ok(GdnWeights {
            qkv,
            z: self.matrix(&format!("{name}/z"), &[values, h], Use::Linear)?,
            a: self.matrix(&format!("{name}/a"), &[nv, h], Use::Exact)?,
            b: self.matrix(&format!("{name}/b"), &[nv, h], Use::Exact)?,
            o: self.matrix(&format!("{name}/o"), &[h, values], Use::Linear)?,
            conv: self.matrix(
                &format!("{name}/conv"),
                &[g.channels() as usize, g.conv_kernel as usize],
                Use::Exact,
            )?,
            a_log: self.vector(format!("{name}/a_log"), nv)?,
            dt_bias: self.vector(format!("{name}/dt_bias"), nv)?,
            norm: self.vector(format!("{name}/norm"), g.value_dim as usize)?,
            state,
            gate: match g.gate {
                GateActivation::Silu => GateKind::Silu,
                GateActivation::Sigmoid => GateKind::Sigmoid,
            },
            eps: self.c.eps,
        })
    }

    fn attention(&mut self, name: &str) -> Result<AttentionWeights<B>, EngineError> {
        let (a, h) = (self.c.attention.clone(), self.hidden());
        let d = a.head_dim as usize;
        let (queries, keys) = (a.heads as usize * d, a.kv_heads as usize * d);
        let indexer = match self.c.qsa.clone() {
            None => None,
            Some(q) => {
                let (n, di) = (q.heads as usize, q.head_dim as usize);
                let name = format!("{name}/indexer");
                Some(IndexerWeights {
                    q: self.matrix(&format!("{name}/q"), &[n * di, h], Use::Exact)?,
                    k: self.matrix(&format!("{name}/k"), &[di, h], Use::Exact)?,
                    q_norm: self.vector(format!("{name}/q_norm"), di)?,
                    k_norm: self.vector(format!("{name}/k_norm"), di)?,
                })
            }
        };
        let state = self.attention;
        self.attention += 1;
        Ok(AttentionWeights {
            q: self.matrix(&format!("{name}/q"), &[queries, h], Use::Linear)?,
            gate: self.matrix(&format!("{name}/gate"), &[queries, h], Use::Linear)?,
            k: self.matrix(&format!("{name}/k"), &[keys, h], Use::Linear)?,
            v: self.matrix(&format!("{name}/v"), &[keys, h], Use::Linear)?,
            o: self.matrix(&format!("{name}/o"), &[h, queries], Use::Linear)?,
            q_norm: self.vector(format!("{name}/q_norm"), d)?,
            k_norm: self.vector(format!("{name}/k_norm"), d)?,
            indexer,
            state,
            rope: self.rope.clone(),
            eps: self.c.eps,
        })
    }

    fn mlp(&mut self, name: &str, width: usize) -> Result<MlpWeights<B>, EngineError> {
        let h = self.hidden();
        Ok(MlpWeights {
            gate: self.matrix(&format!("{name}/gate"), &[width, h], Use::Linear)?,
            up: self.matrix(&format!("{name}/up"), &[width, h], Use::Linear)?,
            down: self.matrix(&format!("{name}/down"), &[h, width], Use::Linear)?,
        })
    }

    fn moe(&mut self, name: &str, m: &MoeConfig) -> Result<MoeWeights<B>, EngineError> {
        let (h, e, i) = (self.hidden(), m.experts as usize, m.intermediate as usize);
        let bank = format!("{name}/experts");
        let data = if self.bind.source().contains(&bank) {
            let w = self.bind.take(&bank, &[e, h, i])?;
            match <[_; 1]>::try_from(w.parts) {
                Ok([part]) => ExpertData::Bank(part),
                Err(_) => {
                    let what = "an expert bank must be one object".to_owned();
                    return Err(EngineError::Weight { name: bank, what });
                }
            }
        } else {
            let [gate_up, down] = expert_parent_names(&bank);
            ExpertData::Parents {
                gate_up: self.bind.take(&gate_up, &[e * 2 * i, h])?,
                down: self.bind.take(&down, &[e * h, i])?,
            }
        };
        let scales = format!("{name}/expert_input_scales");
        let input_scales = if self.bind.source().contains(&scales) {
            let v = self.bind.take_values(&scales, &[e, 3])?;
            Some(v.chunks_exact(3).map(|c| [c[0], c[1], c[2]]).collect::<Vec<_>>())
        } else {
            None
        };
        let nvfp4 =
            matches!(&data, ExpertData::Bank(p) if matches!(p.format, Format::Nvfp4 | Format::Nvfp4Mul));
        let four = nvfp4 && input_scales.is_some();
        let activation = match self.options.activations {
            ActivationPolicy::A8 => Activation::A8,
            ActivationPolicy::A4 if four => Activation::A4,
            ActivationPolicy::Artifact => match self.bind.source().default_expert_activation() {
                4 if four => Activation::A4,
                8 => Activation::A8,
                _ => Activation::A16,
            },
            _ => Activation::A16,
        };
        let spec =
            ExpertSpec { name: bank, experts: e, hidden: h, intermediate: i, activation, input_scales };
        Ok(MoeWeights {
            router: self.matrix(&format!("{name}/router"), &[e, h], Use::Exact)?,
            shared_gate: self.matrix(&format!("{name}/shared_gate"), &[1, h], Use::Exact)?,
            shared: self.mlp(&format!("{name}/shared"), m.shared_intermediate as usize)?,
            experts: self.backend.experts_weight(&spec, data)?,
            top_k: m.top_k as usize,
        })
    }

    fn ple(&mut self, name: &str) -> Result<PleWeights<B>, EngineError> {
        let p = self.c.ple.clone().ok_or_else(|| EngineError::Weight {
            name: name.to_owned(),
            what: "no n-gram configuration".into(),
        })?;
        let (h, wide, e) = (self.hidden(), self.c.residual_width() as usize, p.embed_dim as usize);
        // The table and its scale belong to the n-gram reader.
        for part in ["ngram_scale", "ngram_table"] {
            let name = format!("{name}/{part}");
            if self.bind.source().contains(&name) {
                self.bind.note(&name);
            }
        }
        let state = self.ple;
        self.ple += 1;
        Ok(PleWeights {
            key: self.matrix(&format!("{name}/key"), &[wide, e], Use::Exact)?,
            value: self.matrix(&format!("{name}/value"), &[h, e], Use::Exact)?,
            norm_key: self.vector(format!("{name}/norm_key"), wide)?,
            norm_query: self.vector(format!("{name}/norm_query"), wide)?,
            norm_conv: self.vector(format!("{name}/norm_conv"), wide)?,
            conv: self.matrix(&format!("{name}/conv"), &[wide, p.conv_kernel as usize], Use::Exact)?,
            streams: self.streams(),
            dilation: p.ngram_size as usize,
            state,
            eps: self.c.eps,
        })
    }

    fn end(&mut self, component: &str) -> Result<End<B>, EngineError> {
        if self.c.hyper.is_some() {
            Ok(End::Mixer(self.hyper(&format!("{component}/final_mixer"), false)?))
        } else {
            Ok(End::Norm(self.vector(format!("{component}/norm"), self.hidden())?))
        }
    }

    fn proposal(&mut self) -> Result<Proposal<B>, EngineError> {
        let ids = "proposal/token_ids";
        if !self.bind.source().contains(ids) {
            return Err(EngineError::Unsupported(
                "the artifact has no proposal head; convert with --proposal, or leave out --lm-head-draft"
                    .into(),
            ));
        }
        let data = self.bind.source().weight(ids)?;
        self.bind.note(ids);
        let bad = |what: String| EngineError::Weight { name: ids.to_owned(), what };
        let part = match &data.parts[..] {
            [part] if part.format == Format::Int32 => part,
            _ => return Err(bad("must be one int32 object".into())),
        };
        let ids: Vec<u32> = (*part.bytes)
            .as_ref()
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        if let Some(id) = ids.iter().find(|id| u64::from(**id) >= self.c.vocab) {
            return Err(bad(format!("token {id} is beyond the vocabulary of {}", self.c.vocab)));
        }
        let head = self.matrix("proposal/head", &[ids.len(), self.hidden()], Use::Linear)?;
        Ok(Proposal { head, ids: Arc::new(ids) })
    }

    fn draft(&mut self) -> Result<Draft<B>, EngineError> {
        let (h, wide) = (self.hidden(), self.c.residual_width() as usize);
        let input = if self.c.hyper.is_some() {
            DraftInput::Streams {
                embedding: self.matrix("mtp/fc_embedding", &[h, h], Use::Linear)?,
                hidden: self.matrix("mtp/fc_hidden", &[h, h], Use::Linear)?,
            }
        } else {
            DraftInput::Concat(self.matrix("mtp/fc", &[h, 2 * h], Use::Linear)?)
        };
        Ok(Draft {
            norm_embedding: self.vector("mtp/norm_embedding".into(), h)?,
            norm_hidden: self.vector("mtp/norm_hidden".into(), wide)?,
            input,
            layer: self.layer("mtp/layer", Site::DRAFTER, LayerKind::Attention, false)?,
            end: self.end("mtp")?,
        })
    }
}
