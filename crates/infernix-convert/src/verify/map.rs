//! From bindings to comparisons: which elements of which object must equal which rows of which source tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use infernix_artifact::{Binding, Directory};
use infernix_formats::Layout;
use infernix_model::{Component, ModelConfig, Parameter, Source};

use super::Context;
use super::tally::Mismatch;
use crate::ConvertError;
use crate::build::name_style;
use crate::described::Described;
use crate::experts::{ExpertSource, matrix_name};
use crate::group::rows_of;
use crate::ngram::{NgramPlan, RowFormat, TablePlan};
use crate::plan::{Content, view_rows};
use crate::recipe::Recipe;
use crate::resources::RESOURCES;
use crate::sources::WeightRef;

/// A logical parameter, or a parent of experts.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) parameter: String,
    pub(crate) component: Component,
    /// Matrices it stands for where it is re-quantized (an expert has three).
    pub(crate) matrices: u64,
    /// 1 if it counts as a tensor where it is not re-quantized.
    pub(crate) counted: u64,
    pub(crate) proposal: bool,
}

/// Elements of an object that come from rows of a weight.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) target: usize,
    pub(crate) weight: WeightRef,
    /// Values per row.
    pub(crate) k: u64,
    /// First element in the object.
    pub(crate) object_begin: u64,
    /// First element in the weight.
    pub(crate) source_begin: u64,
    pub(crate) len: u64,
}

/// One comparison; `object` is an index into the directory.
#[derive(Debug)]
pub(crate) enum Task {
    Rows { object: usize, runs: Vec<Run> },
    Bank { object: usize, source: usize, prefix: String },
    InputScales { object: usize, source: usize, prefix: String },
    InputScale { object: usize, weight: WeightRef },
    InputColumns { object: usize, weight: WeightRef },
    TableScale { object: usize, table: Box<TablePlan> },
    Tensor { object: usize, source: usize, name: String },
    Resource { object: usize, component: Component, role: String },
    Proposal { head: usize, ids: usize, weight: WeightRef, target: usize },
}

/// Everything to compare.
#[derive(Debug, Default)]
pub(crate) struct Map {
    pub(crate) tasks: Vec<Task>,
    pub(crate) targets: Vec<Target>,
    pub(crate) missing: Vec<String>,
    pub(crate) extra: Vec<String>,
    pub(crate) problems: Vec<String>,
    pub(crate) proposal_bindings: u64,
    /// Tensors compared by tasks without a target (the table's scale).
    pub(crate) plain_tensors: u64,
    pub(crate) ngram: Option<NgramPlan>,
    /// The table, where its rows were encoded.
    pub(crate) table_target: Option<usize>,
    pub(crate) config: Option<ModelConfig>,
}

impl Task {
    fn object(&self) -> usize {
        match self {
            Task::Rows { object, .. }
            | Task::Bank { object, .. }
            | Task::InputScales { object, .. }
            | Task::InputScale { object, .. }
            | Task::InputColumns { object, .. }
            | Task::TableScale { object, .. }
            | Task::Tensor { object, .. }
            | Task::Resource { object, .. }
            | Task::Proposal { head: object, .. } => *object,
        }
    }

    /// Bytes that it goes through, for progress.
    pub(crate) fn bytes(&self, directory: &Directory) -> u64 {
        directory.objects[self.object()].bytes
    }

    /// Carries it out.
    pub(crate) fn run(&self, context: &Context<'_>, map: &Map) -> Result<(), ConvertError> {
        context.interrupt.check()?;
        match self {
            Task::Rows { object, runs } => super::rows::compare(context, map, *object, runs),
            Task::Bank { object, source, prefix } => super::bank::compare(context, *object, *source, prefix),
            Task::InputScales { object, source, prefix } => {
                super::bank::compare_input_scales(context, *object, *source, prefix)
            }
            Task::InputScale { object, weight } => super::bank::compare_input_scale(context, *object, weight),
            Task::TableScale { object, table } => super::rows::compare_table_scale(context, *object, table),
            Task::InputColumns { object, weight } => super::bank::compare_columns(context, *object, weight),
            Task::Tensor { object, source, name } => {
                super::rows::compare_tensor(context, *object, *source, name)
            }
            Task::Resource { object, component, role } => resource(context, *object, *component, role),
            Task::Proposal { head, ids, weight, target } => {
                super::rows::compare_proposal(context, map, *head, *ids, weight, *target)
            }
        }
    }
}

fn resource(
    context: &Context<'_>,
    object: usize,
    component: Component,
    role: &str,
) -> Result<(), ConvertError> {
    let source = context.sources.resources(component);
    let stored = context.artifact.resource(component.name(), role)?;
    let name = context.artifact.directory().objects[object].id.clone();
    let Some(bytes) = source.file_bytes(role)? else {
        context.tally.problem(format!("{name}: the checkpoint has no {role}"));
        return Ok(());
    };
    context.progress.advance(stored.len() as u64);
    if bytes == stored {
        return Ok(());
    }
    let at = bytes.iter().zip(&stored).take_while(|(a, b)| a == b).count();
    let word = |bytes: &[u8]| bytes.get(at).map_or("end".to_owned(), |b| format!("{b:#04x}"));
    let (expected, found) = (word(&bytes), word(&stored));
    context.tally.mismatch(Mismatch { tensor: name, row: 0, column: at as u64, expected, found });
    Ok(())
}

/// Builds the comparisons for an artifact against sources.
pub(crate) fn build(context: &Context<'_>) -> Result<Map, ConvertError> {
    let described = Described::of(context.sources)?;
    let directory = context.artifact.directory();
    let mut b = Builder {
        context,
        directory,
        ids: directory.objects.iter().enumerate().map(|(i, o)| (o.id.as_str(), i)).collect(),
        runs: BTreeMap::new(),
        expected: BTreeSet::new(),
        map: Map::default(),
        recipe: recorded_recipe(directory),
    };
    if let Some(config) = &described.model {
        b.config(config);
    }
    let components: Vec<Component> =
        Component::ALL.into_iter().filter(|c| directory.components.contains_key(c.name())).collect();
    for id in directory.components.keys().filter(|id| Component::from_name(id).is_none()) {
        b.map.problems.push(format!("component {id} cannot be compared with a checkpoint"));
    }
    let list = described.parameters(&name_style(context.sources), &components);
    for p in &list {
        b.parameter(p, described.model.as_ref())?;
    }
    b.auxiliaries(&list)?;
    b.resources();
    b.proposal()?;
    let Builder { runs, expected, mut map, .. } = b;
    for name in directory.bindings.keys() {
        if name.starts_with("proposal/") {
            map.proposal_bindings += 1;
        } else if !expected.contains(name.as_str()) {
            map.extra.push(name.clone());
        }
    }
    for (object, mut runs) in runs {
        runs.sort_by_key(|r| r.object_begin);
        map.tasks.push(Task::Rows { object, runs });
    }
    map.tasks.sort_by_key(Task::object);
    map.config = described.model;
    Ok(map)
}

struct Builder<'a> {
    context: &'a Context<'a>,
    directory: &'a Directory,
    ids: BTreeMap<&'a str, usize>,
    runs: BTreeMap<usize, Vec<Run>>,
    expected: BTreeSet<String>,
    map: Map,
    /// The recipe that the artifact names, for the roles of its sources alone.
    recipe: Option<Recipe>,
}

/// The built-in recipe that made an artifact; `None` for any other.
fn recorded_recipe(directory: &Directory) -> Option<Recipe> {
    let provenance = directory.provenance.as_ref()?;
    let recipe = Recipe::load_built_in(provenance.get("recipe")?.as_str()?).ok()?;
    let digest: String = recipe.digest.iter().map(|b| format!("{b:02x}")).collect();
    (provenance.get("recipe_blake3")?.as_str()? == digest).then_some(recipe)
}

impl Builder<'_> {
    /// The model that the artifact says it is must be the checkpoint's.
    fn config(&mut self, config: &ModelConfig) {
        let Some(text) = self.directory.components.get("text") else { return };
        let mut stored = text.config.clone();
        match ModelConfig::from_json(&serde_json::Value::Object(stored.clone())) {
            Err(e) => self.map.problems.push(format!("the text component's {e}")),
            Ok(own) => {
                let same = own.architecture == config.architecture
                    && (own.hidden, own.vocab, own.max_positions)
                        == (config.hidden, config.vocab, config.max_positions)
                    && own.layers == config.layers
                    && own.eps.to_bits() == config.eps.to_bits()
                    && own.attention == config.attention
                    && own.rope == config.rope
                    && own.gdn == config.gdn
                    && own.ffn == config.ffn
                    && own.hyper == config.hyper
                    && own.qsa == config.qsa
                    && own.ple == config.ple;
                if !same {
                    self.map.problems.push(
                        "the text component's configuration is of another model than the checkpoint's".into(),
                    );
                }
            }
        }
        // Ours repeats every key of the source; a foreign artifact may normalise them.
        let ours = self.directory.provenance.as_ref().and_then(|p| p.get("converter"));
        if ours.and_then(|c| c.as_str()).is_some_and(|c| c.starts_with("infernix ")) {
            stored.remove("ngram_table");
            stored.remove("default_expert_activation");
            if let serde_json::Value::Object(expected) = config.to_text_config() {
                for key in expected.keys().chain(stored.keys()).collect::<BTreeSet<_>>() {
                    if expected.get(key) != stored.get(key) {
                        self.map
                            .problems
                            .push(format!("the text component's `{key}` is not that of config.json"));
                    }
                }
            }
        }
    }

    /// The binding's element ranges as (object, begin, end), checked against the parameter's size.
    fn parts(&mut self, name: &str, elements: u64) -> Option<Vec<(usize, u64, u64)>> {
        self.expected.insert(name.to_owned());
        let Some(binding) = self.directory.bindings.get(name) else {
            self.map.missing.push(name.to_owned());
            return None;
        };
        let size = |id: &str| self.ids.get(id).map_or(0, |&i| self.directory.objects[i].elements());
        let parts: Vec<_> = binding
            .parts(size)
            .into_iter()
            .filter_map(|p| Some((*self.ids.get(p.object.as_str())?, p.begin, p.end)))
            .collect();
        let bound: u64 = parts.iter().map(|(_, a, b)| b - a).sum();
        if bound != elements {
            self.map.problems.push(format!("binding {name} has {bound} elements, the parameter {elements}"));
            return None;
        }
        Some(parts)
    }

    fn role(&self, p: &Parameter) -> Option<String> {
        self.recipe.as_ref().and_then(|r| r.role(p.class, p.component, p.layer)).map(str::to_owned)
    }

    fn target(&mut self, p: &Parameter, name: &str, matrices: u64) -> usize {
        self.map.targets.push(Target {
            parameter: name.to_owned(),
            component: p.component,
            matrices,
            counted: 1,
            proposal: false,
        });
        self.map.targets.len() - 1
    }

    /// Pairs binding parts with source rows.
    fn pair(
        &mut self,
        target: usize,
        parts: &[(usize, u64, u64)],
        sources: &[(WeightRef, Range<u64>)],
        k: u64,
    ) {
        let mut parts = parts.iter().copied();
        let mut part = parts.next();
        for (weight, rows) in sources {
            let mut at = rows.start * k;
            while at < rows.end * k {
                let Some((object, begin, end)) = part else { return };
                let len = (rows.end * k - at).min(end - begin);
                let runs = self.runs.entry(object).or_default();
                runs.push(Run {
                    target,
                    weight: weight.clone(),
                    k,
                    object_begin: begin,
                    source_begin: at,
                    len,
                });
                at += len;
                part = if begin + len == end { parts.next() } else { Some((object, begin + len, end)) };
            }
        }
    }

    fn parameter(&mut self, p: &Parameter, config: Option<&ModelConfig>) -> Result<(), ConvertError> {
        let sources = self.context.sources;
        let role = self.role(p);
        let role = role.as_deref();
        let gone = |name: &str| ConvertError::MissingTensors { count: 1, names: name.to_owned() };
        match &p.source {
            Source::Tensor { name, shape, rows } => {
                let (source, weight) =
                    sources.locate(name, p.component, role, false)?.ok_or_else(|| gone(name))?;
                if weight.shape() != &shape[..] {
                    let info = weight.planes().weight;
                    let (file, tensor) = (sources.file_of(source, info), info.name.to_string());
                    return Err(ConvertError::Shape {
                        file,
                        tensor,
                        expected: shape.clone(),
                        found: weight.shape().to_vec(),
                    });
                }
                let Some(parts) = self.parts(&p.name, p.shape.iter().product()) else { return Ok(()) };
                let (all, k) = view_rows(weight.shape());
                let reference = WeightRef { source, name: weight.name().to_owned() };
                let target = self.target(p, &p.name, 1);
                let list: Vec<_> = rows_of(rows, all).into_iter().map(|r| (reference.clone(), r)).collect();
                self.pair(target, &parts, &list, k);
            }
            Source::Experts { prefix } => {
                let mut missing = Vec::new();
                let found = ExpertSource::find(sources, p, prefix, role, &mut missing)?;
                let Some(experts) = found.filter(|_| missing.is_empty()) else {
                    return Err(gone(missing.first().map_or(prefix.as_str(), String::as_str)));
                };
                self.experts(p, prefix, &experts);
            }
            Source::ExpertInputScales { prefix } => {
                let found = ExpertSource::find(sources, p, prefix, role, &mut Vec::new())?;
                let Some(experts) = found.filter(|e| e.scheme.has_input_scale()) else { return Ok(()) };
                let Some(parts) = self.parts(&p.name, p.shape.iter().product()) else { return Ok(()) };
                match parts[..] {
                    [(object, 0, _)] => {
                        let task =
                            Task::InputScales { object, source: experts.source, prefix: prefix.clone() };
                        self.map.tasks.push(task);
                    }
                    _ => self.map.problems.push(format!("binding {} is cut into parts", p.name)),
                }
            }
            Source::NgramScale { name } => {
                for source in sources.order(role, p.component, true) {
                    let Some(t) = sources.checkpoint(source).get(name).filter(|t| t.is_scalar()) else {
                        continue;
                    };
                    if let Some(parts) = self.parts(&p.name, 1)
                        && let [(object, 0, _)] = parts[..]
                    {
                        self.map.plain_tensors += 1;
                        self.map.tasks.push(Task::Tensor { object, source, name: t.name.to_string() });
                    }
                    break;
                }
            }
            Source::NgramTable { .. } => {
                let Some(config) = config else { return Ok(()) };
                let mut missing = Vec::new();
                let table = crate::ngram::plan_table(sources, config, p, role, &mut missing)?;
                if let Some(name) = missing.first() {
                    return Err(gone(name));
                }
                if let Some(mut table) = table {
                    self.encoded_table(p, &mut table);
                    let plan = self.map.ngram.get_or_insert_with(|| NgramPlan::new("volume".into(), false));
                    plan.push(table, sources.main_path())?;
                }
            }
        }
        Ok(())
    }

    /// A BF16 table that the artifact has in FP8: by the stated rule, with a scale of its own.
    fn encoded_table(&mut self, p: &Parameter, table: &mut TablePlan) {
        let text = self.directory.components.get("text");
        let format = text.and_then(|t| t.config.get("ngram_table")?.get("format")?.as_str());
        if table.format != RowFormat::Bf16 || format != Some(RowFormat::Fp8E4m3fn.name()) {
            return;
        }
        table.encode();
        self.map.table_target = Some(self.target(p, &p.name, 1));
        if let Some(parts) = self.parts(&p.name.replace("/ngram_table", "/ngram_scale"), 1)
            && let [(object, 0, _)] = parts[..]
        {
            self.map.tasks.push(Task::TableScale { object, table: Box::new(table.clone()) });
        }
    }

    fn experts(&mut self, p: &Parameter, prefix: &str, experts: &ExpertSource) {
        let (e, h, i) = (p.shape[0], p.shape[1], p.shape[2]);
        if self.directory.bindings.contains_key(&p.name) {
            let Some(parts) = self.parts(&p.name, e * h * i) else { return };
            let bank =
                |o: usize| self.directory.objects[o].layout().parse::<Layout>().is_ok_and(Layout::is_bank);
            match parts[..] {
                [(object, 0, _)]
                    if bank(object) && self.directory.objects[object].shape() == Some(&p.shape[..]) =>
                {
                    if experts.fused {
                        let id = &self.directory.objects[object].id;
                        let text = format!(
                            "object {id}: {} is a bank, the checkpoint has fused experts without block scales",
                            p.name
                        );
                        self.map.problems.push(text);
                        return;
                    }
                    let task = Task::Bank { object, source: experts.source, prefix: prefix.to_owned() };
                    self.map.tasks.push(task);
                }
                _ => self.map.problems.push(format!("binding {} is no whole expert bank", p.name)),
            }
            return;
        }
        let names = infernix_model::expert_parent_names(&p.name);
        for (name, down) in names.iter().zip([false, true]) {
            let (rows, k) = if down { (e * h, i) } else { (e * 2 * i, h) };
            let Some(parts) = self.parts(name, rows * k) else { continue };
            let target = self.target(p, name, if down { e } else { 2 * e });
            if let Content::Rows { weights, segments, .. } = experts.parent(prefix, down, e, h, i) {
                let list: Vec<_> =
                    segments.into_iter().map(|s| (weights[s.weight].clone(), s.rows)).collect();
                self.pair(target, &parts, &list, k);
            }
        }
    }

    /// Activation scales of dense weights, found through the uses.
    fn auxiliaries(&mut self, list: &[Parameter]) -> Result<(), ConvertError> {
        let by_name: BTreeMap<&str, &Parameter> = list.iter().map(|p| (p.name.as_str(), p)).collect();
        let mut seen = BTreeSet::new();
        let (mut scaled, mut ordered) = (BTreeSet::new(), BTreeSet::new());
        for one in &self.directory.uses {
            for (auxiliary, object) in &one.auxiliaries {
                let Some(&index) = self.ids.get(object.as_str()) else { continue };
                let columns = auxiliary == "input_columns";
                if columns { &mut ordered } else { &mut scaled }.insert(one.parameter.as_str());
                let Some(Source::Tensor { name, .. }) =
                    by_name.get(one.parameter.as_str()).map(|p| &p.source)
                else {
                    self.map
                        .problems
                        .push(format!("use of {}: unexpected auxiliary {object}", one.parameter));
                    continue;
                };
                let p = by_name[one.parameter.as_str()];
                let role = self.role(p);
                let Some((source, weight)) =
                    self.context.sources.locate(name, p.component, role.as_deref(), false)?
                else {
                    continue;
                };
                if seen.insert((index, weight.name().to_owned())) {
                    let weight = WeightRef { source, name: weight.name().to_owned() };
                    self.map.tasks.push(if columns {
                        Task::InputColumns { object: index, weight }
                    } else {
                        Task::InputScale { object: index, weight }
                    });
                }
            }
        }
        // Every scale of the checkpoint must have been kept, and every order of columns that blocks keep.
        for p in list {
            if let Source::Tensor { name, .. } = &p.source
                && let Some((_, weight)) =
                    self.context.sources.locate(name, p.component, self.role(p).as_deref(), false)?
                && weight.stored_columns().is_some()
                && self.is_stored_as_blocks(&p.name)
                && !ordered.contains(p.name.as_str())
            {
                self.map
                    .problems
                    .push(format!("{}: the order of its columns is not in the artifact", p.name));
            }
            if let Source::Tensor { name, .. } = &p.source
                && let Some((_, weight)) =
                    self.context.sources.locate(name, p.component, self.role(p).as_deref(), false)?
                && weight.planes().input_scale.is_some()
                && !scaled.contains(p.name.as_str())
            {
                self.map
                    .problems
                    .push(format!("{}: the checkpoint's activation scale is not in the artifact", p.name));
            }
        }
        Ok(())
    }

    /// Whether a parameter lies in blocks of a GGUF file.
    fn is_stored_as_blocks(&self, name: &str) -> bool {
        let Some(binding) = self.directory.bindings.get(name) else { return false };
        let size = |id: &str| self.ids.get(id).map_or(0, |&i| self.directory.objects[i].elements());
        let parts = binding.parts(size);
        let object = |id: &str| self.ids.get(id).map(|&i| &self.directory.objects[i]);
        parts.iter().any(|p| {
            object(p.object.as_str()).and_then(|o| o.format()).is_some_and(|f| f.starts_with("ggml_"))
        })
    }

    fn resources(&mut self) {
        for (component, names) in RESOURCES {
            let Some(record) = self.directory.components.get(component.name()) else { continue };
            for (role, object) in &record.resources {
                if let Some(&object) = self.ids.get(object.as_str()) {
                    self.map.tasks.push(Task::Resource { object, component, role: role.clone() });
                }
            }
            let source = self.context.sources.resources(component);
            for name in names {
                let there = source.file_bytes(name).is_ok_and(|b| b.is_some());
                if !record.resources.contains_key(*name) && there {
                    self.map
                        .problems
                        .push(format!("resource {name} of the checkpoint is not in the artifact"));
                }
            }
        }
    }

    fn proposal(&mut self) -> Result<(), ConvertError> {
        let whole = |name: &str| match self.directory.bindings.get(name) {
            Some(Binding::Whole { object }) => self.ids.get(object.as_str()).copied(),
            _ => None,
        };
        let (head, ids) = (whole("proposal/head"), whole("proposal/token_ids"));
        let any = self.directory.bindings.keys().any(|n| n.starts_with("proposal/"));
        match (head, ids) {
            (Some(head), Some(ids)) => {
                let Some((source, weight)) =
                    self.context.sources.locate("lm_head.weight", Component::Text, Some("base"), false)?
                else {
                    return Ok(());
                };
                let weight = WeightRef { source, name: weight.name().to_owned() };
                self.map.targets.push(Target {
                    parameter: "proposal/head".into(),
                    component: Component::Text,
                    matrices: 1,
                    counted: 0,
                    proposal: true,
                });
                let target = self.map.targets.len() - 1;
                self.map.tasks.push(Task::Proposal { head, ids, weight, target });
            }
            _ if any => self.map.problems.push("the proposal head is incomplete".into()),
            _ => {}
        }
        Ok(())
    }
}

/// Base name of an expert's matrix, for messages.
pub(crate) fn expert_tensor(
    prefix: &str,
    expert: u64,
    matrix: infernix_formats::expert_bank::ExpertMatrix,
) -> String {
    matrix_name(prefix, expert, matrix)
}
