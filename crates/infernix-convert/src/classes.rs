//! Which parameter classes each architecture has, whatever a particular checkpoint leaves out.

use std::collections::BTreeSet;

use infernix_model::{Architecture, Class};

/// The classes that a model of this architecture may have.
pub(crate) fn of(architecture: Architecture) -> BTreeSet<Class> {
    let flash = architecture == Architecture::Qwen4Exp;
    let dense = architecture == Architecture::Qwen35;
    Class::ALL
        .iter()
        .copied()
        .filter(|class| {
            let name = class.name();
            let group = name.split_once('.').map_or(name, |(group, _)| group);
            match group {
                "hc" | "final_mixer" | "indexer" | "ple" => flash,
                "norm" => !flash,
                "mlp" => dense,
                "moe" => !dense,
                _ => true,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_differ_in_classes() {
        assert!(of(Architecture::Qwen4Exp).contains(&Class::PleKey));
        assert!(!of(Architecture::Qwen4Exp).contains(&Class::Norm));
        assert!(!of(Architecture::Qwen35).contains(&Class::Router));
        assert!(of(Architecture::Qwen35Moe).contains(&Class::Router));
        assert!(!of(Architecture::Qwen35Moe).contains(&Class::MlpGate));
        assert!(of(Architecture::Qwen35).contains(&Class::VisionPatch));
    }
}
