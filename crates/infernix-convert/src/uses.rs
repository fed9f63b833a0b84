//! `uses`: which activation meets which matrix, and how narrow it may become.

use std::collections::BTreeMap;

use infernix_artifact::{ActivationPolicy, Use};
use infernix_checkpoint::Scheme;
use infernix_formats::Format;
use infernix_model::{Class, Component, Parameter};

use crate::plan::PlannedObject;
use crate::recipe::Activation;
use crate::storage::Storage;

struct Entry {
    parameter: String,
    input: String,
    policy: ActivationPolicy,
    auxiliary: Option<(&'static str, usize)>,
}

/// Collects the records.
#[derive(Default)]
pub(crate) struct UseList(Vec<Entry>);

/// Module of a parameter's name up to and including `part`.
fn module<'n>(name: &'n str, part: &str) -> &'n str {
    let needle = format!("/{part}/");
    name.find(&needle).map_or(name, |at| &name[..at + needle.len() - 1])
}

/// Logical names of the activations that a matrix multiplies; empty for parameters that are no matrices.
fn inputs(class: Class, name: &str) -> Vec<String> {
    let parent = name.rsplit_once('/').map_or(name, |(parent, _)| parent);
    let one = |module: &str, what: &str| vec![format!("{module}/{what}")];
    match class {
        Class::Head => vec!["text/output".into()],
        Class::AttnQ | Class::AttnGate | Class::AttnK | Class::AttnV | Class::IndexerQ | Class::IndexerK => {
            one(module(name, "attn"), "input")
        }
        Class::AttnO => one(module(name, "attn"), "output"),
        Class::GdnQ | Class::GdnK | Class::GdnV | Class::GdnZ | Class::GdnA | Class::GdnB => {
            one(module(name, "gdn"), "input")
        }
        Class::GdnO => one(module(name, "gdn"), "output"),
        Class::MlpGate | Class::MlpUp => one(module(name, "mlp"), "input"),
        Class::MlpDown => one(module(name, "mlp"), "hidden"),
        Class::Router | Class::SharedGate | Class::SharedExpertGate | Class::SharedExpertUp => {
            one(module(name, "moe"), "input")
        }
        Class::SharedExpertDown => one(module(name, "moe"), "shared/hidden"),
        Class::Experts if name.ends_with("/gate_up") => one(module(name, "moe"), "input"),
        Class::Experts if name.ends_with("/down") => one(module(name, "moe"), "experts/hidden"),
        Class::Experts => {
            let moe = module(name, "moe");
            vec![format!("{moe}/input"), format!("{moe}/experts/hidden")]
        }
        Class::HcDown | Class::HcInject | Class::FinalMixerDown => one(parent, "input"),
        Class::HcUp | Class::FinalMixerUp => one(parent, "hidden"),
        Class::PleKey | Class::PleValue => one(parent, "input"),
        Class::MtpFc
        | Class::VisionPatch
        | Class::VisionAttn
        | Class::VisionProj
        | Class::VisionFc1
        | Class::VisionFc2
        | Class::VisionMerger => one(name.trim_end_matches("/weight"), "input"),
        _ => Vec::new(),
    }
}

/// The permission that a use has unless the recipe says otherwise.
fn usual_policy(p: &Parameter, storage: &Storage, scheme: Scheme) -> ActivationPolicy {
    // Small or sensitive matrices stay at 16 bits on every route.
    let guarded = matches!(
        p.class,
        Class::Router
            | Class::SharedGate
            | Class::HcDown
            | Class::HcUp
            | Class::HcInject
            | Class::FinalMixerDown
            | Class::FinalMixerUp
            | Class::IndexerQ
            | Class::IndexerK
            | Class::GdnA
            | Class::GdnB
            | Class::PleKey
            | Class::PleValue
    ) || p.component == Component::Vision;
    match storage.format {
        _ if guarded => ActivationPolicy::A16Only,
        Format::Nvfp4 | Format::Nvfp4Mul if scheme.has_input_scale() => ActivationPolicy::AllowA4,
        Format::Nvfp4 | Format::Nvfp4Mul => ActivationPolicy::A16Only,
        f if f.direct_bytes().is_some() => ActivationPolicy::A16Only,
        _ => ActivationPolicy::AllowA8,
    }
}

impl UseList {
    /// Records how `name` (the parameter, or one of its parents) is used. `auxiliary`: object of its activation scale or, in blocks of a GGUF file, of its order of columns.
    pub(crate) fn add(
        &mut self,
        p: &Parameter,
        name: &str,
        storage: &Storage,
        scheme: Scheme,
        activation: Option<Activation>,
        auxiliary: Option<usize>,
    ) {
        let policy = match activation {
            Some(Activation::A16) => ActivationPolicy::A16Only,
            Some(Activation::A8) => ActivationPolicy::AllowA8,
            Some(Activation::A4) => ActivationPolicy::AllowA4,
            None => usual_policy(p, storage, scheme),
        };
        let role = match scheme {
            Scheme::Ggml(_) => "input_columns",
            Scheme::Nvfp4Divisor { .. } => "activation_input_divisor",
            _ => "activation_input_scale",
        };
        for input in inputs(p.class, name) {
            let auxiliary = auxiliary.map(|o| (role, o));
            self.0.push(Entry { parameter: name.to_owned(), input, policy, auxiliary });
        }
    }

    /// The records with object ids.
    pub(crate) fn records(&self, objects: &[PlannedObject]) -> Vec<Use> {
        self.0
            .iter()
            .map(|e| Use {
                parameter: e.parameter.clone(),
                input: e.input.clone(),
                activation_policy: Some(e.policy),
                auxiliaries: e
                    .auxiliary
                    .iter()
                    .map(|(role, o)| ((*role).to_owned(), objects[*o].id.clone()))
                    .collect::<BTreeMap<_, _>>(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_one_activation_share_its_name() {
        let a = inputs(Class::AttnQ, "text/layers/3/attn/q");
        assert_eq!(a, inputs(Class::IndexerK, "text/layers/3/attn/indexer/k"));
        assert_eq!(a, ["text/layers/3/attn/input"]);
        assert_eq!(inputs(Class::Experts, "mtp/layer/moe/experts/down"), ["mtp/layer/moe/experts/hidden"]);
        assert_eq!(inputs(Class::HcUp, "text/layers/0/mlp_hc/up"), ["text/layers/0/mlp_hc/hidden"]);
        assert!(inputs(Class::GdnConv, "text/layers/0/gdn/conv").is_empty());
    }
}
