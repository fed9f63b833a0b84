//! Recipes: TOML tables that say, by parameter class, what becomes of a checkpoint's tensors.
//!
//! A recipe is strict: unknown keys, selectors that match no class of the architecture and parameters that no rule
//! covers are errors. Rules are written over classes, never over sizes, so that one file serves every model of a family.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use infernix_formats::{Format, Layout};
use infernix_model::{Architecture, Class, Component};
use serde::Deserialize;

use crate::ConvertError;
use crate::sources::scheme_matches;

/// Recipes built into the program: name and TOML text.
const BUILT_IN: &[(&str, &str)] = &[
    ("auto", include_str!("../../../recipes/auto.toml")),
    ("qwen3_5_122b_a10b_nvfp4", include_str!("../../../recipes/qwen3_5_122b_a10b_nvfp4.toml")),
    ("qwen3_5_122b_a10b_nvfp4_ornith", include_str!("../../../recipes/qwen3_5_122b_a10b_nvfp4_ornith.toml")),
    ("qwen3_5_common", include_str!("../../../recipes/qwen3_5_common.toml")),
    ("qwen3_5_dense_common", include_str!("../../../recipes/qwen3_5_dense_common.toml")),
    ("qwen3_5_groupwise_common", include_str!("../../../recipes/qwen3_5_groupwise_common.toml")),
    ("qwen3_6_27b", include_str!("../../../recipes/qwen3_6_27b.toml")),
    ("qwen3_6_27b_nvfp4", include_str!("../../../recipes/qwen3_6_27b_nvfp4.toml")),
    ("qwen3_6_35b_a3b", include_str!("../../../recipes/qwen3_6_35b_a3b.toml")),
    ("qwen3_8_27b", include_str!("../../../recipes/qwen3_8_27b.toml")),
    ("qwen3_8_27b_nvfp4", include_str!("../../../recipes/qwen3_8_27b_nvfp4.toml")),
    ("qwen3_8_27b_nvfp4_nvidia", include_str!("../../../recipes/qwen3_8_27b_nvfp4_nvidia.toml")),
    ("qwen3_8_27b_nvfp4_nvidia_swift", include_str!("../../../recipes/qwen3_8_27b_nvfp4_nvidia_swift.toml")),
    ("qwen3_8_27b_nvfp4_orcarouter", include_str!("../../../recipes/qwen3_8_27b_nvfp4_orcarouter.toml")),
    ("qwen3_8_27b_nvfp4_quasar", include_str!("../../../recipes/qwen3_8_27b_nvfp4_quasar.toml")),
    ("qwen3_8_27b_q6", include_str!("../../../recipes/qwen3_8_27b_q6.toml")),
    ("qwen3_8_flash_next_common", include_str!("../../../recipes/qwen3_8_flash_next_common.toml")),
    ("qwen3_8_flash_next_dflash2", include_str!("../../../recipes/qwen3_8_flash_next_dflash2.toml")),
    ("qwen3_8_flash_next_fp4_local", include_str!("../../../recipes/qwen3_8_flash_next_fp4_local.toml")),
    (
        "qwen3_8_flash_next_fp4_local_huihui",
        include_str!("../../../recipes/qwen3_8_flash_next_fp4_local_huihui.toml"),
    ),
    ("qwen3_8_flash_next_fp8", include_str!("../../../recipes/qwen3_8_flash_next_fp8.toml")),
    ("qwen3_8_flash_next_iq3_s", include_str!("../../../recipes/qwen3_8_flash_next_iq3_s.toml")),
    ("qwen3_8_flash_next_nvfp4", include_str!("../../../recipes/qwen3_8_flash_next_nvfp4.toml")),
    (
        "qwen3_8_flash_next_nvfp4_dense8",
        include_str!("../../../recipes/qwen3_8_flash_next_nvfp4_dense8.toml"),
    ),
    (
        "qwen3_8_flash_next_nvfp4_dense8_swift",
        include_str!("../../../recipes/qwen3_8_flash_next_nvfp4_dense8_swift.toml"),
    ),
    (
        "qwen3_8_flash_next_nvfp4_orcarouter",
        include_str!("../../../recipes/qwen3_8_flash_next_nvfp4_orcarouter.toml"),
    ),
];
/// Deepest chain of includes.
const MAX_INCLUDES: usize = 8;
/// Largest recipe file.
const MAX_RECIPE_BYTES: u64 = 1 << 20;
/// Roles a source may play.
pub const ROLES: [&str; 8] =
    ["base", "quantized", "table", "mtp", "vision", "dflash", "dflash2", "resources"];

/// How the words of a parameter come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// The source's words, unchanged (their order may follow the layout).
    Stored,
    /// Words widened without loss (BF16 to FP32).
    Widen,
    /// Values rounded to a direct format.
    Cast,
    /// Groupwise integers by the absmax rule.
    Absmax,
    /// Groupwise integers by the 14-candidate search for the least squared error.
    Mse,
    /// FP8 with one BF16 scale per row from the row's largest magnitude.
    RowMaxabs,
    /// NVFP4 with the divisor and block scales of the largest magnitudes.
    Nvfp4Absmax,
    /// NVFP4 with the block scale of the least squared error among all 126.
    Nvfp4Mse,
    /// An n-gram table in FP8 with one BF16 scale from its largest magnitude, as NVIDIA's release.
    TableMaxabs,
}

impl Method {
    const ALL: [Method; 9] = [
        Method::Stored,
        Method::Widen,
        Method::Cast,
        Method::Absmax,
        Method::Mse,
        Method::RowMaxabs,
        Method::Nvfp4Absmax,
        Method::Nvfp4Mse,
        Method::TableMaxabs,
    ];

    /// Name in recipes and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Method::Stored => "stored",
            Method::Widen => "widen",
            Method::Cast => "cast",
            Method::Absmax => "absmax",
            Method::Mse => "mse",
            Method::RowMaxabs => "row_maxabs",
            Method::Nvfp4Absmax => "nvfp4_absmax",
            Method::Nvfp4Mse => "nvfp4_mse",
            Method::TableMaxabs => "table_maxabs",
        }
    }

    /// The method of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|m| m.name() == name)
    }

    /// The search that an NVFP4 method makes.
    pub(crate) fn nvfp4(self) -> Option<infernix_formats::nvfp4::Method> {
        match self {
            Method::Nvfp4Absmax => Some(infernix_formats::nvfp4::Method::Absmax),
            Method::Nvfp4Mse => Some(infernix_formats::nvfp4::Method::Mse),
            _ => None,
        }
    }

    /// Whether values may change.
    #[must_use]
    pub fn is_lossy(self) -> bool {
        !matches!(self, Method::Stored | Method::Widen)
    }
}

/// Permitted activation widths that a rule sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// 16 bits only.
    A16,
    /// 8 bits allowed.
    A8,
    /// 4 bits allowed.
    A4,
}

/// What a rule stores a parameter as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The source's own format.
    Stored,
    /// This format.
    Format(Format),
}

/// Width of the routed experts' activations that the artifact recommends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertActivation {
    /// 4 where the experts are NVFP4 with input scales and no linear is MXFP8, else 16.
    FromSource,
    /// This many bits.
    Bits(u64),
}

/// One rule. Later rules win over earlier ones.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Class selectors as written (`gdn.*`).
    pub classes: Vec<String>,
    /// Components it applies to; empty for all.
    pub components: Vec<Component>,
    /// Layers it applies to (inclusive ranges); empty for all. Layers beyond the model are no error.
    pub layers: Vec<(usize, usize)>,
    /// Source schemes it applies to (names of [`crate::scheme_name`]); empty for all.
    pub schemes: Vec<String>,
    /// Source schemes it demands; another one is an error. Empty for any.
    pub require: Vec<String>,
    /// What to store.
    pub target: Target,
    /// What to store down projections of routed experts as, where that differs and they are no bank.
    pub down: Option<Format>,
    /// Layout, where not the format's usual one.
    pub layout: Option<Layout>,
    /// Method, where not the format's usual one.
    pub method: Option<Method>,
    /// Activation permission, where not the usual one.
    pub activation: Option<Activation>,
    /// Role of the source to take the tensor from first.
    pub role: Option<String>,
    matched: Vec<Class>,
    origin: String,
}

/// Repositories that play a role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceRole {
    /// `base`, `quantized`, `table`, `mtp`, `vision` or `resources`.
    pub role: String,
    /// Hugging Face repositories that are known to fit, best first.
    pub repositories: Vec<String>,
    /// Whether the recipe cannot do without.
    pub required: bool,
}

/// A parsed recipe, includes resolved.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// Its name: the file's stem.
    pub name: String,
    /// One line about it.
    pub title: String,
    /// Architectures it is for; empty for all.
    pub architectures: Vec<Architecture>,
    /// The block drafter that the main source must be, alone; `None` for recipes of models, and of anything.
    pub drafter: Option<Component>,
    /// Sources by role.
    pub sources: Vec<SourceRole>,
    /// Rules, includes first.
    pub rules: Vec<Rule>,
    /// Recommended expert activations.
    pub expert_activation: ExpertActivation,
    /// BLAKE3 over the text of the recipe and its includes.
    pub digest: [u8; 32],
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    title: Option<String>,
    #[serde(default)]
    architectures: Vec<String>,
    drafter: Option<String>,
    #[serde(default)]
    include: Vec<String>,
    default_expert_activation: Option<toml::Value>,
    #[serde(default)]
    source: Vec<SourceTable>,
    #[serde(default)]
    rule: Vec<RuleTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SourceTable {
    role: String,
    #[serde(default)]
    repositories: Vec<String>,
    #[serde(default)]
    required: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleTable {
    class: Vec<String>,
    #[serde(default)]
    component: Vec<String>,
    #[serde(default)]
    layers: Vec<toml::Value>,
    #[serde(default)]
    scheme: Vec<String>,
    #[serde(default)]
    require: Vec<String>,
    format: String,
    down: Option<String>,
    layout: Option<String>,
    method: Option<String>,
    activation: Option<String>,
    role: Option<String>,
}

/// Where a recipe's includes may come from.
enum Origin {
    BuiltIn,
    Folder(PathBuf),
}

impl Recipe {
    /// Names and titles of the built-in recipes that can be used by themselves.
    #[must_use]
    pub fn built_in() -> Vec<(&'static str, String)> {
        BUILT_IN
            .iter()
            .filter(|(name, _)| !name.ends_with("_common"))
            .map(|(name, _)| (*name, Self::load(name).map_or_else(|e| e.to_string(), |r| r.title)))
            .collect()
    }

    /// A built-in recipe by name, or a recipe file by path (anything that ends in `.toml`).
    ///
    /// # Errors
    /// No such recipe; TOML that is malformed; a key, class, format, layout or method that does not exist; includes
    /// that leave the recipe's folder or go round in circles.
    pub fn load(name_or_path: &str) -> Result<Self, ConvertError> {
        if !name_or_path.ends_with(".toml") {
            return Self::load_built_in(name_or_path);
        }
        let path = Path::new(name_or_path);
        let text = read_recipe(path)?;
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or("recipe").to_owned();
        let folder = path.parent().map(Path::to_owned).unwrap_or_default();
        Self::parse(&stem, &text, &Origin::Folder(folder))
    }

    /// A built-in recipe by name; never looks at the disk, so the name may come from an untrusted file.
    ///
    /// # Errors
    /// No such recipe.
    pub fn load_built_in(name: &str) -> Result<Self, ConvertError> {
        let text = built_in_text(name).ok_or_else(|| ConvertError::UnknownRecipe {
            name: name.to_owned(),
            known: Self::built_in().iter().map(|r| r.0).collect::<Vec<_>>().join(", "),
        })?;
        Self::parse(name, text, &Origin::BuiltIn)
    }

    /// Parses recipe text whose includes may only be built-in recipes.
    ///
    /// # Errors
    /// As [`Recipe::load`].
    pub fn from_text(name: &str, text: &str) -> Result<Self, ConvertError> {
        Self::parse(name, text, &Origin::BuiltIn)
    }

    fn parse(name: &str, text: &str, origin: &Origin) -> Result<Self, ConvertError> {
        let mut recipe = Self {
            name: name.to_owned(),
            title: String::new(),
            architectures: Vec::new(),
            drafter: None,
            sources: Vec::new(),
            rules: Vec::new(),
            expert_activation: ExpertActivation::FromSource,
            digest: [0; 32],
        };
        let mut hasher = blake3::Hasher::new();
        recipe.add(name, text, origin, &mut Vec::new(), &mut hasher)?;
        if recipe.rules.is_empty() {
            return Err(invalid(name, "it has no [[rule]]"));
        }
        recipe.digest = *hasher.finalize().as_bytes();
        Ok(recipe)
    }

    fn add(
        &mut self,
        name: &str,
        text: &str,
        origin: &Origin,
        chain: &mut Vec<String>,
        hasher: &mut blake3::Hasher,
    ) -> Result<(), ConvertError> {
        if chain.iter().any(|c| c == name) || chain.len() >= MAX_INCLUDES {
            return Err(invalid(
                name,
                &format!("includes go round in a circle or too deep: {}", chain.join(" -> ")),
            ));
        }
        chain.push(name.to_owned());
        let file: File = toml::from_str(text).map_err(|e| invalid(name, &e.to_string()))?;
        for include in &file.include {
            let (text, origin) = include_text(name, include, origin)?;
            self.add(include, &text, &origin, chain, hasher)?;
        }
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
        if let Some(title) = file.title {
            self.title = title;
        }
        if !file.architectures.is_empty() {
            self.architectures = file
                .architectures
                .iter()
                .map(|a| {
                    [Architecture::Qwen4Exp, Architecture::Qwen35, Architecture::Qwen35Moe]
                        .into_iter()
                        .find(|x| x.model_type().strip_suffix("_text") == Some(a))
                        .ok_or_else(|| {
                            invalid(
                                name,
                                &format!(
                                    "unknown architecture {a:?}; known: qwen4_exp, qwen3_5, qwen3_5_moe"
                                ),
                            )
                        })
                })
                .collect::<Result<_, _>>()?;
        }
        if let Some(drafter) = file.drafter {
            let component = Component::from_name(&drafter).filter(|c| c.is_block_drafter());
            let unknown = || invalid(name, &format!("unknown drafter {drafter:?}; known: dflash, dflash2"));
            self.drafter = Some(component.ok_or_else(unknown)?);
        }
        match file.default_expert_activation {
            None => {}
            Some(toml::Value::Integer(bits)) if [4, 8, 16].contains(&bits) => {
                self.expert_activation = ExpertActivation::Bits(bits.unsigned_abs());
            }
            Some(toml::Value::String(s)) if s == "source" => {
                self.expert_activation = ExpertActivation::FromSource
            }
            Some(other) => {
                return Err(invalid(
                    name,
                    &format!("default_expert_activation is {other}, expected 4, 8, 16 or \"source\""),
                ));
            }
        }
        for source in file.source {
            if !ROLES.contains(&source.role.as_str()) {
                return Err(invalid(
                    name,
                    &format!("unknown role {:?}; known: {}", source.role, ROLES.join(", ")),
                ));
            }
            self.sources.retain(|s| s.role != source.role);
            self.sources.push(SourceRole {
                role: source.role,
                repositories: source.repositories,
                required: source.required,
            });
        }
        for (i, rule) in file.rule.into_iter().enumerate() {
            self.rules.push(rule.compile(name, i)?);
        }
        chain.pop();
        Ok(())
    }

    /// The last rule that covers a parameter.
    #[must_use]
    pub fn rule(
        &self,
        class: Class,
        component: Component,
        layer: Option<usize>,
        scheme: &str,
    ) -> Option<&Rule> {
        self.rules.iter().rev().find(|r| r.covers(class, component, layer, scheme))
    }

    /// The source role that the rules for a parameter name, which is needed before its scheme is known.
    #[must_use]
    pub fn role(&self, class: Class, component: Component, layer: Option<usize>) -> Option<&str> {
        let mut rules = self.rules.iter().rev();
        rules
            .find(|r| r.schemes.is_empty() && r.covers(class, component, layer, ""))
            .and_then(|r| r.role.as_deref())
    }

    /// Checks every selector against the classes that an architecture has.
    ///
    /// # Errors
    /// The recipe is for other architectures, or a selector matches none of `classes`.
    pub fn check_architecture(
        &self,
        arch: Architecture,
        classes: &BTreeSet<Class>,
    ) -> Result<(), ConvertError> {
        if !self.architectures.is_empty() && !self.architectures.contains(&arch) {
            let list: Vec<_> = self.architectures.iter().map(|a| a.model_type()).collect();
            return Err(ConvertError::WrongArchitecture {
                recipe: self.name.clone(),
                expected: list.join(", "),
                found: arch.model_type().to_owned(),
            });
        }
        // A recipe for every architecture names classes that some lack.
        if self.architectures.is_empty() {
            return Ok(());
        }
        for rule in &self.rules {
            // Block drafters have classes of their own, whatever their target.
            let drafters =
                !rule.components.is_empty() && rule.components.iter().all(|c| c.is_block_drafter());
            let own: BTreeSet<Class> = infernix_model::drafter_classes().iter().copied().collect();
            let classes = if drafters { &own } else { classes };
            for selector in &rule.classes {
                let hit = compile_glob(&rule.origin, selector)?;
                if !classes.iter().any(|c| hit.is_match(c.name())) {
                    return Err(ConvertError::UnmatchedSelector {
                        recipe: rule.origin.clone(),
                        selector: selector.clone(),
                        classes: classes.iter().map(|c| c.name()).collect::<Vec<_>>().join(", "),
                    });
                }
            }
        }
        Ok(())
    }
}

impl Rule {
    /// Whether it applies to such a parameter.
    #[must_use]
    pub fn covers(&self, class: Class, component: Component, layer: Option<usize>, scheme: &str) -> bool {
        self.matched.contains(&class)
            && (self.components.is_empty() || self.components.contains(&component))
            && (self.schemes.is_empty() || self.schemes.iter().any(|s| scheme_matches(s, scheme)))
            && (self.layers.is_empty()
                || layer.is_some_and(|l| self.layers.iter().any(|(a, b)| (*a..=*b).contains(&l))))
    }

    /// File and position, for messages.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }
}

impl RuleTable {
    fn compile(self, name: &str, index: usize) -> Result<Rule, ConvertError> {
        let origin = format!("{name}, rule {}", index + 1);
        let fail = |why: String| invalid(&origin, &why);
        if self.class.is_empty() {
            return Err(fail("`class` is empty".into()));
        }
        let mut matched = Vec::new();
        for selector in &self.class {
            let glob = compile_glob(&origin, selector)?;
            let before = matched.len();
            matched.extend(Class::ALL.iter().copied().filter(|c| glob.is_match(c.name())));
            if matched.len() == before {
                let known: Vec<_> = Class::ALL.iter().map(|c| c.name()).collect();
                return Err(ConvertError::UnmatchedSelector {
                    recipe: origin.clone(),
                    selector: selector.clone(),
                    classes: known.join(", "),
                });
            }
        }
        let components = self
            .component
            .iter()
            .map(|c| {
                Component::from_name(c).ok_or_else(|| {
                    fail(format!("unknown component {c:?}; known: text, mtp, vision, dflash, dflash2"))
                })
            })
            .collect::<Result<_, _>>()?;
        for scheme in self.scheme.iter().chain(&self.require) {
            if !crate::sources::is_scheme(scheme) {
                let known = crate::sources::SCHEME_NAMES.join(", ");
                return Err(fail(format!("unknown scheme {scheme:?}; known: {known}")));
            }
        }
        let target = match self.format.as_str() {
            "stored" => Target::Stored,
            other => Target::Format(other.parse::<Format>().map_err(|e| fail(e.to_string()))?),
        };
        let layout = self.layout.map(|l| l.parse::<Layout>().map_err(|e| fail(e.to_string()))).transpose()?;
        if let (Some(layout), Target::Format(format)) = (layout, target)
            && !layout.stores(format)
        {
            return Err(fail(format!("layout {layout} does not store format {format}")));
        }
        let method = self
            .method
            .map(|m| {
                Method::from_name(&m).ok_or_else(|| {
                    let known: Vec<_> = Method::ALL.iter().map(|m| m.name()).collect();
                    fail(format!("unknown method {m:?}; known: {}", known.join(", ")))
                })
            })
            .transpose()?;
        if let Some(method) = method {
            let fits = match (method, target) {
                (Method::Stored, _) => true,
                (_, Target::Stored) => false,
                (Method::Widen | Method::Cast, Target::Format(f)) => f.direct_bytes().is_some(),
                (Method::Absmax | Method::Mse, Target::Format(f)) => f.group_spec().is_some(),
                (Method::RowMaxabs, Target::Format(f)) => f == Format::Fp8Row,
                (Method::Nvfp4Absmax | Method::Nvfp4Mse, Target::Format(f)) => f == Format::Nvfp4,
                (Method::TableMaxabs, Target::Format(f)) => f == Format::Fp8Tensor,
            };
            if !fits {
                return Err(fail(format!("method {} does not make format {}", method.name(), self.format)));
            }
        }
        let down = self.down.map(|f| f.parse::<Format>().map_err(|e| fail(e.to_string()))).transpose()?;
        if down.is_some() && matched != [Class::Experts] {
            return Err(fail("`down` is for class moe.experts alone".into()));
        }
        let activation = match self.activation.as_deref() {
            None => None,
            Some("a16") => Some(Activation::A16),
            Some("a8") => Some(Activation::A8),
            Some("a4") => Some(Activation::A4),
            Some(other) => return Err(fail(format!("unknown activation {other:?}; known: a16, a8, a4"))),
        };
        if let Some(role) = &self.role
            && !ROLES.contains(&role.as_str())
        {
            return Err(fail(format!("unknown role {role:?}; known: {}", ROLES.join(", "))));
        }
        let layers = self
            .layers
            .iter()
            .map(|v| {
                layer_range(v)
                    .ok_or_else(|| fail(format!("layer {v} is neither a number nor a range \"A-B\"")))
            })
            .collect::<Result<_, _>>()?;
        Ok(Rule {
            classes: self.class,
            components,
            layers,
            schemes: self.scheme,
            require: self.require,
            target,
            down,
            layout,
            method,
            activation,
            role: self.role,
            matched,
            origin,
        })
    }
}

fn layer_range(v: &toml::Value) -> Option<(usize, usize)> {
    match v {
        toml::Value::Integer(n) => usize::try_from(*n).ok().map(|n| (n, n)),
        toml::Value::String(s) => {
            let (a, b) = s.split_once('-')?;
            let (a, b) = (a.trim().parse().ok()?, b.trim().parse().ok()?);
            (a <= b).then_some((a, b))
        }
        _ => None,
    }
}

fn compile_glob(origin: &str, selector: &str) -> Result<globset::GlobMatcher, ConvertError> {
    globset::Glob::new(selector)
        .map(|g| g.compile_matcher())
        .map_err(|e| invalid(origin, &format!("selector {selector:?}: {e}")))
}

fn invalid(recipe: &str, reason: &str) -> ConvertError {
    ConvertError::Recipe { recipe: recipe.to_owned(), reason: reason.to_owned() }
}

fn built_in_text(name: &str) -> Option<&'static str> {
    BUILT_IN.iter().find(|(n, _)| *n == name).map(|(_, text)| *text)
}

fn read_recipe(path: &Path) -> Result<String, ConvertError> {
    let fail = |reason: String| ConvertError::Recipe { recipe: path.display().to_string(), reason };
    let meta = std::fs::metadata(path).map_err(|e| fail(format!("cannot open it: {e}")))?;
    if !meta.is_file() {
        return Err(fail("it is no regular file".to_owned()));
    }
    if meta.len() > MAX_RECIPE_BYTES {
        return Err(fail(format!("{} bytes are more than a recipe has ({MAX_RECIPE_BYTES})", meta.len())));
    }
    std::fs::read_to_string(path).map_err(|e| fail(format!("cannot read it: {e}")))
}

/// An include is a built-in name, or (from a file) a plain file name in the same folder.
fn include_text(name: &str, include: &str, origin: &Origin) -> Result<(String, Origin), ConvertError> {
    if let (Origin::Folder(folder), true) = (origin, include.ends_with(".toml")) {
        if include.contains(['/', '\\', ':', '\0']) || include.starts_with('.') {
            return Err(invalid(
                name,
                &format!("include {include:?} must be a file name in the recipe's own folder"),
            ));
        }
        let path = folder.join(include);
        // A link out of the folder would show another file's text in an error.
        let own = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let inside = match (path.canonicalize(), own.canonicalize()) {
            (Ok(path), Ok(own)) => path.parent() == Some(&own),
            // Reading it says why not.
            _ => true,
        };
        if !inside {
            let reason = format!("include {include:?} is a link that leads out of the recipe's own folder");
            return Err(invalid(name, &reason));
        }
        return Ok((read_recipe(&path)?, Origin::Folder(folder.clone())));
    }
    match built_in_text(include) {
        Some(text) => Ok((text.to_owned(), Origin::BuiltIn)),
        None => Err(invalid(
            name,
            &format!(
                "include {include:?} is neither a built-in recipe nor a .toml file in the recipe's own folder"
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Recipe, ConvertError> {
        Recipe::from_text("test", text)
    }

    #[test]
    fn every_built_in_recipe_parses() {
        for (name, _) in BUILT_IN {
            Recipe::load(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        assert!(Recipe::built_in().iter().all(|(_, title)| !title.is_empty()));
    }

    #[test]
    fn the_last_matching_rule_wins() {
        let r = parse("[[rule]]\nclass=[\"*\"]\nformat=\"stored\"\n[[rule]]\nclass=[\"gdn.*\"]\nlayers=[0,\"2-3\"]\nformat=\"q8_g32_fp16\"").unwrap();
        let target = |class, layer| r.rule(class, Component::Text, layer, "bf16").unwrap().target;
        assert_eq!(target(Class::Embed, None), Target::Stored);
        assert_eq!(target(Class::GdnQ, Some(0)), Target::Format(Format::Q8G32));
        assert_eq!(target(Class::GdnQ, Some(1)), Target::Stored);
        assert_eq!(target(Class::GdnQ, Some(3)), Target::Format(Format::Q8G32));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, needle) in [
            ("[[rule]]\nclass=[\"gdm.*\"]\nformat=\"stored\"", "gdm.*"),
            ("[[rule]]\nclass=[\"*\"]\nformat=\"q9\"", "q9"),
            ("[[rule]]\nclass=[\"*\"]\nformat=\"q8_g32_fp16\"\nmethod=\"magic\"", "magic"),
            ("[[rule]]\nclass=[\"*\"]\nformat=\"q8_g32_fp16\"\nmethod=\"row_maxabs\"", "row_maxabs"),
            ("[[rule]]\nclass=[\"*\"]\nformat=\"q8_g32_fp16\"\nlayout=\"row_scale_v1\"", "row_scale_v1"),
            ("[[rule]]\nclass=[\"*\"]\nformat=\"stored\"\ncolour=\"red\"", "colour"),
            ("[[rule]]\nclass=[\"*\"]\nformat=\"stored\"\nscheme=[\"fp7\"]", "fp7"),
            ("include=[\"../secret.toml\"]\n[[rule]]\nclass=[\"*\"]\nformat=\"stored\"", "../secret.toml"),
            ("drafter=\"text\"\n[[rule]]\nclass=[\"*\"]\nformat=\"stored\"", "unknown drafter"),
            ("architectures=[\"gpt2\"]\n[[rule]]\nclass=[\"*\"]\nformat=\"stored\"", "gpt2"),
            ("title=\"x\"", "no [[rule]]"),
        ] {
            let e = parse(text).expect_err(needle).to_string();
            assert!(e.contains(needle), "{needle}: {e}");
        }
    }

    #[test]
    fn includes_stay_in_the_recipes_folder() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("a.toml", "include=[\"b.toml\"]\n[[rule]]\nclass=[\"embed\"]\nformat=\"stored\"");
        write("b.toml", "[[rule]]\nclass=[\"head\"]\nformat=\"stored\"");
        write("c.toml", "include=[\"c.toml\"]\n[[rule]]\nclass=[\"head\"]\nformat=\"stored\"");
        write("d.toml", "include=[\"sub/b.toml\"]\n[[rule]]\nclass=[\"head\"]\nformat=\"stored\"");
        let load = |name: &str| Recipe::load(dir.path().join(name).to_str().unwrap());
        assert_eq!(load("a.toml").unwrap().rules.len(), 2);
        assert!(load("c.toml").unwrap_err().to_string().contains("circle"));
        assert!(load("d.toml").unwrap_err().to_string().contains("own folder"));
        #[cfg(unix)]
        {
            let outside = tempfile::tempdir().unwrap();
            std::fs::write(outside.path().join("secret.toml"), "a secret").unwrap();
            std::os::unix::fs::symlink(outside.path().join("secret.toml"), dir.path().join("e.toml"))
                .unwrap();
            write("f.toml", "include=[\"e.toml\"]\n[[rule]]\nclass=[\"head\"]\nformat=\"stored\"");
            let error = load("f.toml").unwrap_err().to_string();
            assert!(error.contains("leads out") && !error.contains("a secret"), "{error}");
            // A name without the ending is no file's.
            let error = Recipe::load("/etc/passwd").unwrap_err().to_string();
            assert!(error.contains("must end in .toml") && !error.contains("root:"), "{error}");
        }
    }
}
