//! What a quantization config claims, compared with what the tensors are.
//!
//! The tensors decide (`scheme`); exporters' configs are incomplete and at times wrong. Where they disagree
//! the user is told. Three dialects: ModelOpt (`quantized_layers`, `ignore` or `exclude_modules`, shell
//! patterns), compressed-tensors (`config_groups` with `targets`, `ignore`; `re:` patterns, class names) and
//! the block-FP8 one (`modules_to_not_convert`).

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

use fancy_regex::{Regex, RegexBuilder};
use serde_json::Value;

use crate::scheme::table_of_part;
use crate::{Checkpoint, CheckpointError, Dtype, Scheme};

/// Patterns looked at per config; releases have about 600.
const MAX_PATTERNS: usize = 20_000;
/// Longest pattern.
const MAX_PATTERN_BYTES: usize = 512;
/// Most regular expressions; releases have about 10. Compiled ones take memory.
const MAX_REGEXES: usize = 64;

/// A disagreement between a quantization config and the tensors, over all weights it concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The configuration file.
    pub file: &'static str,
    /// The pattern that decided, empty where none matches.
    pub pattern: String,
    /// What the config claims.
    pub expected: String,
    /// What the tensors are.
    pub found: String,
    /// How many weights differ in this way.
    pub count: usize,
    /// The first of them.
    pub example: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file)?;
        if self.pattern.is_empty() {
            write!(f, "no pattern mentions {}", self.example)?;
        } else {
            write!(f, "pattern {:?} says {} for {}", self.pattern, self.expected, self.example)?;
        }
        write!(f, ", the tensors are {}", self.found)?;
        if self.count > 1 {
            write!(f, " (and {} more)", self.count - 1)?;
        }
        f.write_str("; the tensors are believed")
    }
}

/// What a config can claim of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    Unquantized,
    Nvfp4,
    /// NVFP4 as compressed-tensors packs it.
    Nvfp4Divisor,
    Fp8Tensor,
    Fp8Row,
    Fp8Block,
    /// FP8 without saying how it is scaled.
    Fp8,
    Mxfp8,
    /// Something this crate does not know: never contradicted.
    Unknown,
}

impl Claim {
    fn name(self) -> &'static str {
        match self {
            Self::Unquantized => "not quantized",
            Self::Nvfp4 => "NVFP4",
            Self::Nvfp4Divisor => "nvfp4-pack-quantized",
            Self::Fp8Tensor => "FP8 per tensor",
            Self::Fp8Row => "FP8 per row",
            Self::Fp8Block => "FP8 per block",
            Self::Fp8 => "FP8",
            Self::Mxfp8 => "MXFP8",
            Self::Unknown => "an unknown scheme",
        }
    }

    fn agrees(self, scheme: Scheme) -> bool {
        match (self, scheme) {
            (Self::Unknown, _)
            | (Self::Nvfp4, Scheme::Nvfp4Multiplier { .. })
            | (Self::Nvfp4Divisor, Scheme::Nvfp4Divisor { .. })
            | (Self::Fp8Tensor | Self::Fp8, Scheme::Fp8Tensor { .. })
            | (Self::Fp8Row | Self::Fp8, Scheme::Fp8Row { .. })
            | (Self::Fp8Block | Self::Fp8, Scheme::Fp8Block128 { .. })
            | (Self::Mxfp8, Scheme::Mxfp8) => true,
            (Self::Unquantized, s) => !s.is_quantized(),
            _ => false,
        }
    }

    fn of_modelopt(algo: &str) -> Self {
        match algo {
            "NVFP4" | "W4A4_NVFP4" | "NVFP4_W4A4" | "W4A16_NVFP4" | "NVFP4_W4A16" => Self::Nvfp4,
            "FP8" => Self::Fp8Tensor,
            "FP8_PB_WO" | "FP8_BLOCK_SCALES" | "FP8_PB_REAL" => Self::Fp8Block,
            "FP8_PER_CHANNEL_PER_TOKEN" => Self::Fp8Row,
            "MXFP8" | "W8A8_MXFP8" => Self::Mxfp8,
            _ => Self::Unknown,
        }
    }
}

/// How a pattern is compared with a module's name.
enum Matcher {
    /// Shell pattern of the whole name, or of a parent module.
    Glob(String),
    /// With whether it still runs: one that exceeds its limits once is not tried again.
    Regex(Box<Regex>, Cell<bool>),
    /// Every linear layer, as far as a name can tell.
    Everything,
}

struct Pattern {
    text: String,
    matcher: Matcher,
    claim: Claim,
    /// More specific patterns win: exact names, then by the number of literal characters.
    rank: (u8, usize),
}

impl Pattern {
    fn glob(text: &str, claim: Claim, tier: u8) -> Self {
        let literal = text.chars().filter(|c| !matches!(c, '*' | '?')).count();
        let exact = u8::from(literal == text.chars().count());
        Self {
            text: text.to_owned(),
            matcher: Matcher::Glob(text.to_owned()),
            claim,
            rank: (tier + exact, literal),
        }
    }

    /// A compressed-tensors target or ignore entry.
    fn target(text: &str, claim: Claim, tier: u8) -> Option<Self> {
        if let Some(expression) = text.strip_prefix("re:") {
            // As Python's re.match: anchored at the start. The size limits bound hostile patterns.
            let regex = RegexBuilder::new(&format!("^(?:{expression})"))
                .backtrack_limit(10_000)
                .delegate_size_limit(1 << 20)
                .delegate_dfa_size_limit(1 << 20)
                .build()
                .ok()?;
            let literal = expression.chars().filter(|c| c.is_alphanumeric() || *c == '_').count();
            return Some(Self {
                text: text.to_owned(),
                matcher: Matcher::Regex(Box::new(regex), Cell::new(true)),
                claim,
                rank: (tier, literal),
            });
        }
        // Class names (Linear) have no dot and a capital.
        if text.starts_with(|c: char| c.is_ascii_uppercase()) && !text.contains('.') {
            return Some(Self { text: text.to_owned(), matcher: Matcher::Everything, claim, rank: (0, 0) });
        }
        Some(Self::glob(text, claim, tier))
    }

    fn matches(&self, module: &str) -> bool {
        match &self.matcher {
            Matcher::Everything => true,
            Matcher::Regex(r, alive) => {
                alive.get()
                    && r.is_match(module).unwrap_or_else(|_| {
                        alive.set(false);
                        false
                    })
            }
            Matcher::Glob(g) => {
                // What precedes the first wildcard decides most of the 75,000 x 600 comparisons.
                let prefix = g.find(['*', '?']).unwrap_or(g.len());
                if !module.as_bytes().starts_with(&g.as_bytes()[..prefix]) {
                    return false;
                }
                // A pattern also covers what is below the module it names.
                glob_match(g, module) || module.match_indices('.').any(|(i, _)| glob_match(g, &module[..i]))
            }
        }
    }
}

/// Shell pattern with `*` and `?`, `*` also across dots. Linear in practice: one backtrack point.
fn glob_match(pattern: &str, text: &str) -> bool {
    let (p, t) = (pattern.as_bytes(), text.as_bytes());
    let (mut i, mut j) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while j < t.len() {
        match p.get(i) {
            Some(b'*') => {
                star = Some((i, j));
                i += 1;
            }
            Some(&c) if c == b'?' || c == t[j] => (i, j) = (i + 1, j + 1),
            _ => match star {
                Some((si, sj)) => {
                    star = Some((si, sj + 1));
                    (i, j) = (si + 1, sj + 1);
                }
                None => return false,
            },
        }
    }
    p[i..].iter().all(|&c| c == b'*')
}

/// A parsed config.
struct QuantConfig {
    file: &'static str,
    patterns: Vec<Pattern>,
    /// What holds for linear layers that no pattern names.
    default: Option<Claim>,
    /// Whether the config says which layers are quantized, so that one it does not mention is odd.
    complete: bool,
}

fn strings(value: Option<&Value>) -> impl Iterator<Item = &str> {
    value
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .filter(|s| s.len() <= MAX_PATTERN_BYTES)
        .take(MAX_PATTERNS)
}

impl QuantConfig {
    fn parse(file: &'static str, q: &Value) -> Option<Self> {
        let method = q.get("quant_method").and_then(Value::as_str).unwrap_or("modelopt");
        match method {
            "modelopt" => Some(Self::modelopt(file, q)),
            "compressed-tensors" => Some(Self::compressed_tensors(file, q)),
            "fp8" => Some(Self::fp8(file, q)),
            _ => None,
        }
    }

    fn modelopt(file: &'static str, q: &Value) -> Self {
        let algo = q.get("quant_algo").and_then(Value::as_str).unwrap_or_default();
        let mut patterns: Vec<Pattern> = ["ignore", "exclude_modules"]
            .iter()
            .flat_map(|key| strings(q.get(*key)))
            .map(|text| Pattern::glob(text, Claim::Unquantized, 0))
            .collect();
        let layers = q.get("quantized_layers").and_then(Value::as_object);
        for (text, layer) in layers.into_iter().flatten().take(MAX_PATTERNS) {
            let algo = layer.get("quant_algo").and_then(Value::as_str).unwrap_or_default();
            if text.len() <= MAX_PATTERN_BYTES {
                patterns.push(Pattern::glob(text, Claim::of_modelopt(algo), 0));
            }
        }
        let mixed = algo == "MIXED_PRECISION";
        let default = (!mixed && !algo.is_empty()).then(|| Claim::of_modelopt(algo));
        Self { file, patterns, default, complete: true }
    }

    fn compressed_tensors(file: &'static str, q: &Value) -> Self {
        let mut patterns = Vec::new();
        let mut regexes = 0;
        let mut add = |text: &str, claim, tier| {
            regexes += usize::from(text.starts_with("re:"));
            if regexes <= MAX_REGEXES {
                patterns.extend(Pattern::target(text, claim, tier));
            }
        };
        // Their library looks at `ignore` first, whatever a target says.
        for text in strings(q.get("ignore")) {
            add(text, Claim::Unquantized, 4);
        }
        let groups = q.get("config_groups").and_then(Value::as_object);
        for group in groups.into_iter().flat_map(|g| g.values()).take(64) {
            let claim = Self::group_claim(group.get("weights"));
            for text in strings(group.get("targets")) {
                add(text, claim, 1);
            }
        }
        Self { file, patterns, default: None, complete: true }
    }

    fn group_claim(weights: Option<&Value>) -> Claim {
        let Some(w) = weights.filter(|w| w.is_object()) else { return Claim::Unknown };
        let text = |key| w.get(key).and_then(Value::as_str).unwrap_or_default();
        let bits = w.get("num_bits").and_then(Value::as_u64);
        match (bits, text("type"), text("strategy")) {
            (Some(4), "float", "tensor_group") => Claim::Nvfp4Divisor,
            (Some(8), "float", "tensor") => Claim::Fp8Tensor,
            (Some(8), "float", "channel") => Claim::Fp8Row,
            (Some(8), "float", "block") => Claim::Fp8Block,
            (Some(8), "float", "group") if w.get("group_size").and_then(Value::as_u64) == Some(32) => {
                Claim::Mxfp8
            }
            _ => Claim::Unknown,
        }
    }

    fn fp8(file: &'static str, q: &Value) -> Self {
        let patterns = ["modules_to_not_convert", "ignored_layers"]
            .iter()
            .flat_map(|key| strings(q.get(*key)))
            .map(|text| Pattern::glob(text, Claim::Unquantized, 0))
            .collect();
        let blocks = q.get("weight_block_size").is_some_and(Value::is_array);
        Self {
            file,
            patterns,
            default: Some(if blocks { Claim::Fp8Block } else { Claim::Fp8 }),
            complete: false,
        }
    }

    /// The pattern that decides for a module: the most specific one.
    fn decide(&self, module: &str) -> Option<&Pattern> {
        self.patterns.iter().filter(|p| p.matches(module)).max_by_key(|p| p.rank)
    }
}

impl Checkpoint {
    /// Compares `quantization_config` of `config.json` and `hf_quant_config.json` with the schemes of all
    /// weights. Disagreements are warnings: the tensors decide.
    ///
    /// # Errors
    /// Those of [`Checkpoint::resolve_all`], and a config that is not JSON.
    pub fn cross_check(&self) -> Result<Vec<Warning>, CheckpointError> {
        let mut configs = Vec::new();
        if let Some(config) = self.json("config.json")?
            && let Some(q) = config
                .get("quantization_config")
                .or_else(|| config.get("compression_config"))
                .filter(|q| q.is_object())
        {
            configs.extend(QuantConfig::parse("config.json", q));
        }
        if let Some(config) = self.json("hf_quant_config.json")?
            && let Some(q) = config.get("quantization").filter(|q| q.is_object())
        {
            configs.push(QuantConfig::modelopt("hf_quant_config.json", q));
        }
        let mut warnings: BTreeMap<(usize, String, &'static str, String), Warning> = BTreeMap::new();
        if configs.is_empty() {
            return Ok(Vec::new());
        }
        for tensor in self.resolve_each() {
            let tensor = tensor?;
            let (module, scheme) = (tensor.name(), tensor.scheme());
            if matches!(scheme, Scheme::Plain(d) if d != Dtype::Bf16 && d != Dtype::F16 && d != Dtype::F32) {
                continue;
            }
            for (c, config) in configs.iter().enumerate() {
                let pattern = config.decide(module);
                let claim = match (pattern, config.default) {
                    (Some(p), _) => p.claim,
                    // Not every plain tensor is a linear layer: only a quantized one can contradict.
                    (None, _) if !scheme.is_quantized() => continue,
                    // Nor is a part of an embedding table one.
                    (None, Some(_)) if table_of_part(module).is_some() => continue,
                    (None, Some(default)) => default,
                    (None, None) if config.complete => Claim::Unquantized,
                    (None, None) => continue,
                };
                // "Every linear layer" says nothing of norms and embeddings.
                let broad = pattern.is_some_and(|p| matches!(p.matcher, Matcher::Everything));
                let plain_vector = !scheme.is_quantized() && (broad || tensor.shape().len() != 2);
                if plain_vector || claim.agrees(scheme) {
                    continue;
                }
                let text = pattern.map(|p| p.text.clone()).unwrap_or_default();
                warnings
                    .entry((c, text.clone(), claim.name(), scheme.to_string()))
                    .and_modify(|w| w.count += 1)
                    .or_insert_with(|| Warning {
                        file: config.file,
                        pattern: text,
                        expected: claim.name().to_owned(),
                        found: scheme.to_string(),
                        count: 1,
                        example: module.to_owned(),
                    });
            }
        }
        Ok(warnings.into_values().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_patterns() {
        for (pattern, text, matches) in [
            ("a.b", "a.b", true),
            ("a.b", "a.c", false),
            ("a*", "abc", true),
            ("*.mlp.experts.*", "m.layers.0.mlp.experts.3.up", true),
            ("*.mlp.experts.*", "m.layers.0.mlp.shared", false),
            ("a?c", "abc", true),
            ("", "", true),
            ("*", "", true),
            ("**a*", "bab", true),
            ("a*b*c", "aXbYbZ", false),
        ] {
            assert_eq!(glob_match(pattern, text), matches, "{pattern} {text}");
        }
        // Backtracking stays polynomial.
        assert!(!glob_match(&"*a".repeat(100), &"a".repeat(99)));
    }

    fn config(text: &str) -> QuantConfig {
        QuantConfig::parse("config.json", &serde_json::from_str(text).expect("JSON"))
            .expect("a known dialect")
    }

    fn claim(c: &QuantConfig, module: &str) -> Option<Claim> {
        c.decide(module).map(|p| p.claim)
    }

    #[test]
    fn most_specific_modelopt_pattern_wins() {
        let c = config(
            r#"{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION","ignore":["lm_head","mtp.fc*","*.mlp.experts.7.up_proj"],
            "quantized_layers":{"*.mlp.experts.*":{"quant_algo":"NVFP4"},"mtp.layers.0.mlp.experts.*":{"quant_algo":"FP8_PB_WO"},
            "x.table":{"quant_algo":"FP8"}}}"#,
        );
        assert_eq!(claim(&c, "m.layers.0.mlp.experts.3.up_proj"), Some(Claim::Nvfp4));
        assert_eq!(claim(&c, "mtp.layers.0.mlp.experts.3.up_proj"), Some(Claim::Fp8Block));
        assert_eq!(claim(&c, "m.layers.0.mlp.experts.7.up_proj"), Some(Claim::Unquantized));
        assert_eq!(claim(&c, "lm_head"), Some(Claim::Unquantized));
        assert_eq!(claim(&c, "lm_head2"), None);
        // A module's pattern covers what is below it.
        assert_eq!(claim(&c, "x.table.shard_3"), Some(Claim::Fp8Tensor));
        assert_eq!(claim(&c, "x.tables"), None);
    }

    #[test]
    fn compressed_tensors_ignores_first_then_takes_the_more_literal_target() {
        let c = config(
            r#"{"quant_method":"compressed-tensors","ignore":["re:mtp\\..*","head"],"config_groups":{
            "a":{"targets":["Linear"],"weights":{"num_bits":8,"type":"float","strategy":"channel"}},
            "b":{"targets":["re:.*experts\\..*_proj$"],"weights":{"num_bits":4,"type":"float","strategy":"tensor_group"}},
            "c":{"targets":["x.experts.0.up_proj"],"weights":{"num_bits":8,"type":"float","strategy":"tensor"}}}}"#,
        );
        assert_eq!(claim(&c, "x.experts.1.up_proj"), Some(Claim::Nvfp4Divisor));
        assert_eq!(claim(&c, "x.experts.0.up_proj"), Some(Claim::Fp8Tensor));
        assert_eq!(claim(&c, "mtp.experts.1.up_proj"), Some(Claim::Unquantized));
        assert_eq!(claim(&c, "attn.q_proj"), Some(Claim::Fp8Row));
        assert_eq!(claim(&c, "head"), Some(Claim::Unquantized));
    }

    #[test]
    fn hostile_patterns_cost_little() {
        let c = config(
            r#"{"quant_method":"compressed-tensors","ignore":["re:(a+)+$","re:(?=(a*)*)(a*)*\\1b","re:(","re:a{1000}{1000}{1000}"],
            "config_groups":{"a":7,"b":{"targets":7,"weights":7},"c":{"targets":[7]}}}"#,
        );
        assert!(c.patterns.len() <= 3, "an invalid one is left out");
        let started = std::time::Instant::now();
        claim(&c, &("a".repeat(400) + "!"));
        assert!(started.elapsed().as_secs() < 2);
    }
}
