//! Making a [`Plan`]: every parameter finds its source and its rule, neighbours of one storage share an object, and
//! every source tensor is used, ignored for a reason, or an error.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use infernix_artifact::{Binding, Draft, DraftObject, LayoutOptions, ObjectKind};
use infernix_checkpoint::gguf::names::TiledHeads;
use infernix_checkpoint::{OpenOptions, Scheme, SourceTensor};
use infernix_formats::{Format, Layout, encoded_size};
use infernix_model::{Class, Component, NameStyle, Parameter, Source, source_prefix};
use serde_json::{Map, Value, json};

use crate::ConvertError;
use crate::described::{Described, components_present};
use crate::error::list;
use crate::experts::ExpertSource;
use crate::group::Grouper;
use crate::ngram::NgramPlan;
use crate::plan::{
    ClassSummary, Content, ConvertOptions, Ignored, Plan, PlannedObject, Proof, flat_rows, view_rows,
};
use crate::recipe::{Activation, ExpertActivation, Method, Rule, Target};
use crate::sources::{Sources, WeightRef, scheme_name};
use crate::storage::{Storage, decide, decide_as};
use crate::uses::UseList;

/// A parameter that found its place, before offsets are known.
pub(crate) struct Placed {
    pub(crate) name: String,
    pub(crate) class: Class,
    pub(crate) component: Component,
    pub(crate) shape: Vec<u64>,
    /// Object number and element range there, in the parameter's order.
    pub(crate) parts: Vec<(usize, u64, u64)>,
}

/// Opens the sources and plans the conversion.
///
/// # Errors
/// Sources that do not open or are of the wrong model; tensors of a wrong shape, dtype or scheme; tensors that belong
/// to nothing; recipes that do not fit. Missing tensors are listed in [`Plan::missing`] instead, for a report of all.
pub fn plan(options: &ConvertOptions) -> Result<Plan, ConvertError> {
    let open = OpenOptions {
        trust_index: options.trust_index,
        headers_only_ok: options.dry_run,
        allow_missing_config: false,
    };
    for source in options.recipe.sources.iter().filter(|s| s.required) {
        let main = source.role == "base" || source.role == "quantized";
        // One checkpoint that holds everything is always enough, so only a missing main source is an error here.
        if main && !options.sources.iter().any(|s| s.role == "base" || s.role == "quantized") {
            return Err(ConvertError::Source {
                role: source.role.clone(),
                reason: format!(
                    "recipe {} needs it; it is known as {}",
                    options.recipe.name,
                    source.repositories.join(", ")
                ),
            });
        }
    }
    let sources = Arc::new(Sources::open(&options.sources, &open)?);
    plan_with(options, sources)
}

/// Plans over sources that are open already.
pub(crate) fn plan_with(options: &ConvertOptions, sources: Arc<Sources>) -> Result<Plan, ConvertError> {
    let described = Described::of(&sources)?;
    let mut b = Builder::new(options, &sources, &described)?;
    b.recipe_fits()?;
    let list = described.parameters(&b.style, &b.components);
    for p in &list {
        b.place(p)?;
    }
    b.flush_groups()?;
    b.proposal()?;
    b.resources()?;
    b.leftovers()?;
    b.finish()
}

/// How the main source spells names.
pub(crate) fn name_style(sources: &Sources) -> NameStyle {
    source_prefix(|name| matches!(sources.main().checkpoint.resolve(name), Ok(Some(_))))
}

/// What weights that share an order of columns agree in: component, heads, width.
type ColumnOrder = (Component, Option<TiledHeads>, u64);

pub(crate) struct Builder<'a> {
    pub(crate) options: &'a ConvertOptions,
    pub(crate) sources: &'a Arc<Sources>,
    pub(crate) described: &'a Described,
    pub(crate) style: NameStyle,
    pub(crate) components: Vec<Component>,
    pub(crate) objects: Vec<PlannedObject>,
    pub(crate) placed: Vec<Placed>,
    pub(crate) groups: Grouper,
    pub(crate) uses: UseList,
    pub(crate) ngram: Option<NgramPlan>,
    pub(crate) ignored: Vec<Ignored>,
    pub(crate) missing: Vec<String>,
    pub(crate) warnings: Vec<String>,
    /// Whether all text experts are NVFP4 with input scales, once seen.
    expert_scales: Option<bool>,
    mxfp8: bool,
    /// Orders of columns that are stored already.
    columns: Vec<(ColumnOrder, usize)>,
}

impl<'a> Builder<'a> {
    fn new(
        options: &'a ConvertOptions,
        sources: &'a Arc<Sources>,
        described: &'a Described,
    ) -> Result<Self, ConvertError> {
        let present = components_present(sources, described);
        let mut warnings = Vec::new();
        let components = match &options.components {
            Some(list) => {
                if described.model.is_some() && !list.contains(&Component::Text) {
                    return Err(ConvertError::Option(
                        "--components: text is always part of an artifact; add it".into(),
                    ));
                }
                if let Some(c) = list.iter().find(|c| !described.describes(**c)) {
                    let advice =
                        if c.is_block_drafter() { "name its checkpoint as --source" } else { "leave it out" };
                    return Err(ConvertError::Option(format!(
                        "--components: no configuration describes {c}; {advice}"
                    )));
                }
                Component::ALL.into_iter().filter(|c| list.contains(c)).collect()
            }
            None => {
                for c in [Component::Vision, Component::Mtp] {
                    if described.describes(c) && !present.contains(&c) {
                        warnings.push(format!("component {c} is omitted: config.json describes it, but no source has its tensors"));
                    }
                }
                present
            }
        };
        for source in sources.list() {
            warnings.extend(source.checkpoint.warnings().iter().cloned());
            warnings.extend(source.checkpoint.cross_check()?.iter().map(ToString::to_string));
        }
        if !sources.data_present() {
            warnings.push(
                "some shards hold only their header: this is a plan, a conversion needs the data".into(),
            );
        }
        Ok(Self {
            options,
            sources,
            described,
            style: name_style(sources),
            components,
            objects: Vec::new(),
            placed: Vec::new(),
            groups: Grouper::default(),
            uses: UseList::default(),
            ngram: None,
            ignored: Vec::new(),
            missing: Vec::new(),
            warnings,
            expert_scales: None,
            mxfp8: false,
            columns: Vec::new(),
        })
    }

    fn recipe_fits(&self) -> Result<(), ConvertError> {
        if let Some(wanted) = self.options.recipe.drafter {
            let found = match &self.described.model {
                Some(model) => format!("a {} model", model.architecture.model_type()),
                None => self
                    .described
                    .drafters
                    .first()
                    .map_or_else(String::new, |d| format!("a {} drafter", d.component)),
            };
            let expected = format!("a {wanted} drafter");
            return match found == expected {
                true => Ok(()),
                false => Err(ConvertError::WrongArchitecture {
                    recipe: self.options.recipe.name.clone(),
                    expected: format!("{expected} alone"),
                    found,
                }),
            };
        }
        match &self.described.model {
            Some(model) => self
                .options
                .recipe
                .check_architecture(model.architecture, &crate::classes::of(model.architecture)),
            // A drafter belongs to no architecture: a recipe for one has no rules for it alone.
            None if self.options.recipe.architectures.is_empty() => Ok(()),
            None => Err(ConvertError::WrongArchitecture {
                recipe: self.options.recipe.name.clone(),
                expected: self
                    .options
                    .recipe
                    .architectures
                    .iter()
                    .map(|a| a.model_type())
                    .collect::<Vec<_>>()
                    .join(", "),
                found: "a block drafter alone".into(),
            }),
        }
    }

    /// The rule for a parameter with that source.
    pub(crate) fn rule(&self, p: &Parameter, scheme: &str) -> Result<&'a Rule, ConvertError> {
        self.options.recipe.rule(p.class, p.component, p.layer, scheme).ok_or_else(|| {
            ConvertError::UncoveredParameter {
                recipe: self.options.recipe.name.clone(),
                parameter: p.name.clone(),
                class: p.class.name(),
                component: p.component.name(),
                scheme: scheme.to_owned(),
            }
        })
    }

    /// The source role that the recipe names for a parameter.
    fn role(&self, p: &Parameter) -> Option<&'a str> {
        self.options.recipe.role(p.class, p.component, p.layer)
    }

    fn place(&mut self, p: &Parameter) -> Result<(), ConvertError> {
        match &p.source {
            Source::Tensor { name, shape, rows } => {
                let Some((source, weight)) = self.sources.locate(name, p.component, self.role(p), false)?
                else {
                    if !p.optional {
                        self.missing.push(name.clone());
                    }
                    return Ok(());
                };
                let file = self.sources.file_of(source, weight.planes().weight);
                if weight.shape() != &shape[..] {
                    return Err(ConvertError::Shape {
                        file,
                        tensor: weight.planes().weight.name.to_string(),
                        expected: shape.clone(),
                        found: weight.shape().to_vec(),
                    });
                }
                let scheme = weight.scheme();
                let rule = self.rule(p, scheme_name(scheme).unwrap_or("other"))?;
                let storage = decide(&p.name, &file, &weight.planes().weight.name, scheme, rule)?.of(&weight);
                check_columns(&p.name, &storage, weight.shape())?;
                self.mxfp8 |= scheme == Scheme::Mxfp8 && p.component == Component::Text;
                self.sources.consume_weight(source, &weight);
                let reference = WeightRef { source, name: weight.name().to_owned() };
                self.groups.add(p, reference, &weight, rows, storage, rule.activation)?;
                Ok(())
            }
            Source::Experts { prefix } => self.place_experts(p, prefix),
            Source::ExpertInputScales { prefix } => self.place_input_scales(p, prefix),
            Source::NgramScale { name } => self.place_ngram_scale(p, name),
            Source::NgramTable { .. } => self.place_table(p),
        }
    }

    fn place_experts(&mut self, p: &Parameter, prefix: &str) -> Result<(), ConvertError> {
        self.flush_groups()?;
        let Some(experts) = ExpertSource::find(self.sources, p, prefix, self.role(p), &mut self.missing)?
        else {
            return Ok(());
        };
        let scheme = experts.scheme;
        let rule = self.rule(p, scheme_name(scheme).unwrap_or("other"))?;
        let own = experts.format();
        let (file, example) = (&experts.file, &experts.example);
        let storage = decide_as(&p.name, file, example, scheme, own, rule, !experts.fused)?;
        let (e, h, i) = (p.shape[0], p.shape[1], p.shape[2]);
        let quantized = matches!(scheme, Scheme::Nvfp4Multiplier { .. } | Scheme::Nvfp4Divisor { .. });
        if rule.activation == Some(Activation::A4) && !(quantized && scheme.has_input_scale()) {
            return Err(ConvertError::Scheme {
                file: experts.file.clone(),
                tensor: experts.example.clone(),
                expected: format!("an input scale for 4-bit activations ({} asks for them)", rule.origin()),
                found: scheme.to_string(),
                advice: "use a recipe for weight-only experts, or `auto`",
            });
        }
        if p.component == Component::Text {
            let scaled = quantized && scheme.has_input_scale();
            self.expert_scales = Some(self.expert_scales.unwrap_or(true) && scaled);
        }
        let activation = rule.activation;
        if storage.layout.is_bank() {
            let object = self.push_object(
                p.component,
                p.shape.clone(),
                storage,
                vec![p.name.clone()],
                Content::Bank { source: experts.source, prefix: prefix.to_owned() },
            )?;
            self.uses.add(p, &p.name, &storage, scheme, activation, None);
            self.bind(p, p.name.clone(), p.shape.clone(), vec![(object, 0, e * h * i)]);
            return Ok(());
        }
        if !storage.fuses() {
            return Err(ConvertError::NoLayout {
                parameter: p.name.clone(),
                reason: format!("no layout holds routed experts of {scheme} as {}", storage.format),
            });
        }
        let names = infernix_model::expert_parent_names(&p.name);
        let mut lower = rule.clone();
        lower.target = rule.down.map_or(rule.target, Target::Format);
        let lower = decide_as(&p.name, file, example, scheme, own, &lower, false)?;
        for (name, down) in names.into_iter().zip([false, true]) {
            let storage = if down { lower } else { storage };
            let (rows, k) = if down { (e * h, i) } else { (e * 2 * i, h) };
            let content = experts.parent(prefix, down, e, h, i);
            let shape = vec![rows, k];
            check_columns(&name, &storage, &shape)?;
            let object =
                self.push_object(p.component, shape.clone(), storage, vec![name.clone()], content)?;
            self.uses.add(p, &name, &storage, scheme, activation, None);
            self.bind(p, name, shape, vec![(object, 0, rows * k)]);
        }
        Ok(())
    }

    fn place_input_scales(&mut self, p: &Parameter, prefix: &str) -> Result<(), ConvertError> {
        let Some(experts) = ExpertSource::find(self.sources, p, prefix, self.role(p), &mut self.missing)?
        else {
            return Ok(());
        };
        if !experts.scheme.has_input_scale() {
            return Ok(());
        }
        let rule = self.rule(p, "fp32")?;
        let storage = decide(
            &p.name,
            &experts.file,
            &experts.example,
            Scheme::Plain(infernix_checkpoint::Dtype::F32),
            rule,
        )?;
        let content = Content::ExpertInputScales { source: experts.source, prefix: prefix.to_owned() };
        let object =
            self.push_object(p.component, p.shape.clone(), storage, vec![p.name.clone()], content)?;
        self.bind(p, p.name.clone(), p.shape.clone(), vec![(object, 0, p.shape.iter().product())]);
        Ok(())
    }

    fn place_ngram_scale(&mut self, p: &Parameter, name: &str) -> Result<(), ConvertError> {
        for index in self.sources.order(self.role(p), p.component, true) {
            let checkpoint = self.sources.checkpoint(index);
            // Only an FP8 table has this scale; an NVFP4 table's parts have planes of that name of their own.
            let Some(t) = checkpoint.get(name) else { continue };
            if !t.is_scalar() {
                continue;
            }
            let file = self.sources.file_of(index, t);
            let rule = self.rule(p, scheme_name(Scheme::Plain(t.dtype)).unwrap_or("other"))?;
            let storage = decide(&p.name, &file, name, Scheme::Plain(t.dtype), rule)?;
            self.sources.consume(index, name);
            let content = Content::Tensor { source: index, name: name.to_owned() };
            let object = self.push_object(p.component, vec![1], storage, vec![p.name.clone()], content)?;
            self.bind(p, p.name.clone(), vec![1], vec![(object, 0, 1)]);
            return Ok(());
        }
        Ok(())
    }

    fn place_table(&mut self, p: &Parameter) -> Result<(), ConvertError> {
        let Some(config) = &self.described.model else { return Ok(()) };
        let role = self.role(p);
        let mut missing = Vec::new();
        let found = crate::ngram::plan_table(self.sources, config, p, role, &mut missing)?;
        self.missing.append(&mut missing);
        if let Some(mut table) = found {
            let rule = self.rule(p, table.format.name())?;
            let method = rule.method.unwrap_or(Method::Stored);
            match (rule.target, method) {
                (crate::recipe::Target::Stored, _) => {}
                (_, Method::TableMaxabs) if table.format == crate::ngram::RowFormat::Bf16 => {
                    table.encode();
                    self.push_table_scale(p, &table)?;
                }
                _ => {
                    return Err(ConvertError::Recipe {
                        recipe: rule.origin().to_owned(),
                        reason: "an n-gram table is stored as the source has it (format = \"stored\"), or made FP8 of BF16 \
                                 by method \"table_maxabs\""
                            .into(),
                    });
                }
            }
            let path = match &self.options.ngram {
                crate::plan::NgramTarget::Beside => with_suffix(&self.options.output, ".ngram"),
                crate::plan::NgramTarget::Write(path) | crate::plan::NgramTarget::Reuse(path) => path.clone(),
            };
            let reuse = matches!(self.options.ngram, crate::plan::NgramTarget::Reuse(_));
            self.ngram
                .get_or_insert_with(|| NgramPlan::new(path, reuse))
                .push(table, self.sources.main_path())?;
        }
        Ok(())
    }

    /// The scale of a table that is encoded here, under the name that an FP8 source's scale would have.
    fn push_table_scale(
        &mut self,
        p: &Parameter,
        table: &crate::ngram::TablePlan,
    ) -> Result<(), ConvertError> {
        let name = p.name.replace("/ngram_table", "/ngram_scale");
        let storage = Storage {
            format: Format::Bf16,
            layout: Layout::ContiguousLeV1,
            method: Method::TableMaxabs,
            proof: Proof::Requantized,
        };
        let content = Content::TableScale { table: Arc::new(table.clone()) };
        let object = self.push_object(p.component, vec![1], storage, vec![name.clone()], content)?;
        let scale = Parameter { class: Class::NgramScale, ..p.clone() };
        self.bind(&scale, name, vec![1], vec![(object, 0, 1)]);
        Ok(())
    }

    /// Turns collected weights into objects.
    pub(crate) fn flush_groups(&mut self) -> Result<(), ConvertError> {
        let (sources, groups) = (self.sources.clone(), std::mem::take(&mut self.groups));
        for parent in groups.finish() {
            let names: Vec<_> = parent.members.iter().map(|m| m.parameter.name.clone()).collect();
            let (component, shape, storage) = (parent.component, parent.shape.clone(), parent.storage);
            let weights = parent.weights.clone();
            let content = Content::Rows { weights: parent.weights, segments: parent.segments, k: parent.k };
            let object = self.push_object(component, shape, storage, names, content)?;
            let mut auxiliaries: BTreeMap<usize, usize> = BTreeMap::new();
            for m in parent.members {
                let weight = sources.weight(&weights[m.weight])?;
                let mut auxiliary = match weight.planes().input_scale {
                    None => None,
                    Some(_) => Some(match auxiliaries.get(&m.weight) {
                        Some(&known) => known,
                        None => {
                            let known = self.push_scalar(component, &weights[m.weight])?;
                            auxiliaries.insert(m.weight, known);
                            known
                        }
                    }),
                };
                // Stored blocks that keep the file's order of columns say which; decoded values are in the source's.
                if let (Some(_), Format::Ggml(_)) = (weight.stored_columns(), storage.format) {
                    auxiliary = Some(self.push_columns(component, &weight, &weights[m.weight])?);
                }
                self.uses.add(
                    &m.parameter,
                    &m.parameter.name,
                    &storage,
                    weight.scheme(),
                    m.activation,
                    auxiliary,
                );
                let parts = m.parts.iter().map(|(a, b)| (object, *a, *b)).collect();
                self.bind(&m.parameter, m.parameter.name.clone(), m.parameter.shape.clone(), parts);
            }
        }
        Ok(())
    }

    /// The order of a weight's columns, one object for all weights of a component that share it.
    fn push_columns(
        &mut self,
        component: Component,
        weight: &SourceTensor<'_>,
        reference: &WeightRef,
    ) -> Result<usize, ConvertError> {
        let key = (component, weight.stored_columns(), weight.row_len());
        if let Some((_, known)) = self.columns.iter().find(|(k, _)| *k == key) {
            return Ok(*known);
        }
        let storage = Storage {
            format: Format::Int32,
            layout: Layout::ContiguousLeV1,
            method: Method::Stored,
            proof: Proof::Synthesised,
        };
        let content = Content::InputColumns { weight: reference.clone() };
        let object = self.push_object(component, vec![weight.row_len()], storage, Vec::new(), content)?;
        self.columns.push((key, object));
        Ok(object)
    }

    /// An activation scale of a weight as an object of its own.
    fn push_scalar(&mut self, component: Component, weight: &WeightRef) -> Result<usize, ConvertError> {
        let storage = Storage {
            format: Format::Fp32,
            layout: Layout::ContiguousLeV1,
            method: Method::Stored,
            proof: Proof::Identical,
        };
        let content = Content::InputScale { weight: weight.clone() };
        self.push_object(component, Vec::new(), storage, Vec::new(), content)
    }

    pub(crate) fn push_object(
        &mut self,
        component: Component,
        shape: Vec<u64>,
        storage: Storage,
        parameters: Vec<String>,
        content: Content,
    ) -> Result<usize, ConvertError> {
        let bytes =
            encoded_size(storage.layout, storage.format, &shape).map_err(|source| ConvertError::Format {
                what: parameters.first().cloned().unwrap_or_default(),
                source: Box::new(source),
            })?;
        self.objects.push(PlannedObject {
            id: String::new(),
            parameters,
            component,
            shape,
            format: Some(storage.format),
            layout: storage.layout,
            method: storage.method,
            proof: storage.proof,
            bytes,
            offset: 0,
            content,
        });
        Ok(self.objects.len() - 1)
    }

    pub(crate) fn bind(
        &mut self,
        p: &Parameter,
        name: String,
        shape: Vec<u64>,
        parts: Vec<(usize, u64, u64)>,
    ) {
        self.placed.push(Placed { name, class: p.class, component: p.component, shape, parts });
    }

    /// Every tensor that no parameter used: deliberately left out, or an error.
    fn leftovers(&mut self) -> Result<(), ConvertError> {
        for (index, source) in self.sources.list().iter().enumerate() {
            let role = &source.spec.role;
            let mut extra = Vec::new();
            for t in self.sources.unused(index) {
                let name: &str = &t.name;
                let reason = if index != 0 {
                    format!("not needed from source {role}")
                } else if name.starts_with("model.visual.") && !self.components.contains(&Component::Vision) {
                    "component vision is not converted".to_owned()
                } else if name.starts_with("mtp.") && !self.components.contains(&Component::Mtp) {
                    "component mtp is not converted".to_owned()
                } else if name.ends_with(".rotary_emb.inv_freq") {
                    "derived from the configuration".to_owned()
                } else if name.ends_with(".k_scale") || name.ends_with(".v_scale") {
                    "scale of a KV cache, which is chosen when serving".to_owned()
                } else if let Some(other) = self.supplied_elsewhere(index, name)? {
                    format!("taken from source {other}")
                } else {
                    extra.push(name.to_owned());
                    continue;
                };
                self.ignored.push(Ignored { tensor: name.to_owned(), reason });
            }
            for t in source.checkpoint.unindexed() {
                self.ignored.push(Ignored {
                    tensor: t.name.to_string(),
                    reason: "the index does not name it".into(),
                });
            }
            for t in source.checkpoint.ignored() {
                self.ignored.push(Ignored { tensor: t.tensor.name.to_string(), reason: t.reason.clone() });
            }
            // What is missing explains what is left over better than the other way round.
            if !extra.is_empty() && self.missing.is_empty() {
                return Err(ConvertError::ExtraTensors {
                    path: source.checkpoint.path().to_owned(),
                    count: extra.len(),
                    names: list(extra.iter().map(String::as_str)),
                });
            }
            self.warnings.extend(extra.iter().take(8).map(|t| format!("{t} belongs to no parameter")));
        }
        Ok(())
    }

    /// The role of another source whose copy of a weight was used.
    fn supplied_elsewhere(&self, main: usize, name: &str) -> Result<Option<&'a str>, ConvertError> {
        let sources: &'a Sources = self.sources;
        if sources.list().len() == 1 {
            return Ok(None);
        }
        let base = name.rsplit_once(".weight").map_or(name, |(base, _)| base);
        for (index, source) in sources.list().iter().enumerate() {
            if index != main
                && (source.checkpoint.get(name).is_some() || source.checkpoint.resolve(base)?.is_some())
            {
                return Ok(Some(&source.spec.role));
            }
        }
        // A table whose parts are cut differently.
        let table = name.contains(".ple_embedding.") && sources.list().iter().any(|s| s.spec.role == "table");
        Ok(table.then_some("table"))
    }

    fn expert_activation(&self) -> u64 {
        match self.options.recipe.expert_activation {
            ExpertActivation::Bits(bits) => bits,
            ExpertActivation::FromSource if self.expert_scales == Some(true) && !self.mxfp8 => 4,
            ExpertActivation::FromSource => 16,
        }
    }

    fn finish(mut self) -> Result<Plan, ConvertError> {
        let default_expert_activation = self.expert_activation();
        self.number_objects();
        let classes = self.summarise();
        let (components, late) = self.component_records(default_expert_activation)?;
        let bindings = self
            .placed
            .iter()
            .map(|p| {
                let id = |o: usize| self.objects[o].id.clone();
                let binding = match &p.parts[..] {
                    [(o, 0, end)]
                        if self.objects[*o].shape == p.shape
                            && *end == self.objects[*o].shape.iter().product::<u64>() =>
                    {
                        Binding::Whole { object: id(*o) }
                    }
                    parts => Binding::Parts(
                        parts
                            .iter()
                            .map(|(o, a, b)| infernix_artifact::BindingPart {
                                object: id(*o),
                                begin: *a,
                                end: *b,
                            })
                            .collect(),
                    ),
                };
                (p.name.clone(), binding)
            })
            .collect();
        let objects = self
            .objects
            .iter()
            .map(|o| DraftObject {
                id: o.id.clone(),
                kind: match o.format {
                    None => ObjectKind::Resource,
                    Some(format) => ObjectKind::Tensor {
                        shape: o.shape.clone(),
                        format: format.name().to_owned(),
                        layout: o.layout.name().to_owned(),
                    },
                },
                alignment: o.layout.alignment(),
                bytes: o.bytes,
            })
            .collect();
        let uses = self.uses.records(&self.objects);
        let mut metadata = Map::new();
        if let Some(name) = &self.options.name {
            metadata.insert("name".into(), json!(name));
        }
        let use_count = uses.len();
        let draft =
            Draft { components, objects, bindings, uses, metadata, provenance: self.provenance(), late };
        let entry_name = self.options.output.file_name().and_then(|n| n.to_str()).ok_or_else(|| {
            ConvertError::Option(format!("output {}: not a file name", self.options.output.display()))
        })?;
        let layouted = draft.layout(&LayoutOptions {
            entry_name: entry_name.to_owned(),
            max_file_bytes: self.options.max_file_bytes,
        });
        // The default holds every directory.
        let limit = self.options.max_file_bytes;
        let layouted = match layouted {
            Err(e) if limit < infernix_artifact::DEFAULT_MAX_FILE_BYTES => {
                return Err(ConvertError::Option(format!("--max-file-bytes {limit}: {e}")));
            }
            other => other?,
        };
        for (planned, object) in self.objects.iter_mut().zip(layouted.objects()) {
            planned.offset = object.offset;
        }
        Ok(Plan {
            options: self.options.clone(),
            config: self.described.model.clone(),
            components: self.components,
            objects: self.objects,
            ngram: self.ngram,
            classes,
            ignored: self.ignored,
            missing: self.missing,
            warnings: self.warnings,
            default_expert_activation,
            uses: use_count,
            sources: self.sources.clone(),
            layouted,
        })
    }

    fn number_objects(&mut self) {
        let mut weights = 0;
        for o in &mut self.objects {
            if o.format.is_some() {
                o.id = format!("weight/{weights:06}");
                weights += 1;
            }
        }
    }

    fn summarise(&self) -> BTreeMap<String, ClassSummary> {
        type Sets = (BTreeSet<&'static str>, BTreeSet<&'static str>, BTreeSet<&'static str>);
        let mut sets: BTreeMap<String, (ClassSummary, Sets)> = BTreeMap::new();
        let key_of = |component: Component, class: &str| match component {
            Component::Text | Component::Vision => class.to_owned(),
            Component::Mtp if class.starts_with("mtp.") => class.to_owned(),
            c => format!("{c}/{class}"),
        };
        for p in &self.placed {
            let (summary, set) = sets.entry(key_of(p.component, p.class.name())).or_default();
            summary.count += 1;
            for (o, a, b) in &p.parts {
                let object = &self.objects[*o];
                let all: u64 = object.shape.iter().product();
                summary.elements += b - a;
                let share = u128::from(object.bytes) * u128::from(b - a) / u128::from(all.max(1));
                summary.bytes += u64::try_from(share).unwrap_or(u64::MAX);
                set.0.insert(object.format.map_or("raw", Format::name));
                set.1.insert(object.layout.name());
                set.2.insert(object.proof.name());
            }
        }
        if let Some(n) = &self.ngram {
            let (summary, set) = sets.entry(Class::NgramTable.name().to_owned()).or_default();
            summary.count = n.tables.len() as u64;
            summary.elements = n.rows * n.width;
            summary.bytes = n.bytes;
            set.0.insert(n.format.name());
            set.1.insert("volume");
            let encoded = n.tables.iter().any(|t| t.encoded.is_some());
            set.2.insert(if encoded { Proof::Requantized } else { Proof::Identical }.name());
        }
        let join = |set: BTreeSet<&str>| set.into_iter().collect::<Vec<_>>().join(", ");
        sets.into_iter()
            .map(|(class, (mut summary, set))| {
                (summary.format, summary.layout, summary.proof) = (join(set.0), join(set.1), join(set.2));
                (class, summary)
            })
            .collect()
    }

    /// Provenance: what was converted and by which encoders; no path, no time.
    fn provenance(&self) -> Map<String, Value> {
        let mut source = Map::new();
        for s in self.sources.list() {
            let files: Vec<_> = s
                .checkpoint
                .shards()
                .iter()
                .filter(|f| f.indexed)
                .map(|f| {
                    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
                    let mut file =
                        json!({"name": f.name, "bytes": f.len, "header_blake3": hex(&f.header_blake3)});
                    if let Some(sha) = f.sha256 {
                        file["sha256"] = json!(hex(&sha));
                    }
                    file
                })
                .collect();
            let mut record = json!({ "files": files });
            if let Some(repository) = &s.spec.repository {
                record["repository"] = json!(repository);
            }
            if let Some(revision) = &s.spec.revision {
                record["revision"] = json!(revision);
            }
            source.insert(s.spec.role.clone(), record);
        }
        let methods: Map<String, Value> = self
            .objects
            .iter()
            .filter(|o| o.method.is_lossy())
            .map(|o| (o.id.clone(), json!(o.method.name())))
            .collect();
        let mut out = Map::new();
        out.insert("converter".into(), json!(concat!("infernix ", env!("CARGO_PKG_VERSION"))));
        out.insert("encoder_version".into(), json!(infernix_formats::ENCODER_VERSION));
        out.insert("recipe".into(), json!(self.options.recipe.name));
        let digest: String = self.options.recipe.digest.iter().map(|b| format!("{b:02x}")).collect();
        out.insert("recipe_blake3".into(), json!(digest));
        out.insert("methods".into(), Value::Object(methods));
        out.insert("source".into(), Value::Object(source));
        out
    }
}

/// Refuses shapes that a layout cannot hold, naming the parameter.
fn check_columns(parameter: &str, storage: &Storage, shape: &[u64]) -> Result<(), ConvertError> {
    let (rows, k) = if storage.format.direct_bytes().is_none() { flat_rows(shape) } else { view_rows(shape) };
    let shape: Vec<u64> =
        if storage.format.direct_bytes().is_some() { shape.to_vec() } else { vec![rows, k] };
    encoded_size(storage.layout, storage.format, &shape)
        .map(|_| ())
        .map_err(|e| ConvertError::NoLayout { parameter: parameter.to_owned(), reason: e.to_string() })
}

/// `path` with `suffix` appended to its name.
pub(crate) fn with_suffix(path: &std::path::Path, suffix: &str) -> std::path::PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
