//! An artifact as the weights of a checkpoint: which elements of which objects are which rows of which source tensor.
//! The inverse of what a conversion's bindings say.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use infernix_artifact::{Artifact, Object};
use infernix_formats::expert_bank::ExpertMatrix;
use infernix_formats::{Format, Layout, encoded_size};
use infernix_model::{
    Component, DrafterConfig, ModelConfig, NameStyle, Parameter, Source, expert_parent_names, parameters,
};

use crate::ConvertError;
use crate::group::rows_of;
use crate::plan::view_rows;

/// Most experts of a layer, and parts of a table: beyond are no models, and each becomes tensors of its own.
const MAX_PARTS: u64 = 1 << 16;

/// Elements of an object that are elements of a source tensor.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Index into the directory's objects.
    pub(crate) object: usize,
    pub(crate) source_begin: u64,
    pub(crate) object_begin: u64,
    pub(crate) len: u64,
}

/// One source tensor of the artifact.
#[derive(Debug, Clone)]
pub(crate) struct Weight {
    /// Full name of the plain tensor (`...q_proj.weight`, `...A_log`).
    pub(crate) name: String,
    pub(crate) component: Component,
    /// Shape of the values.
    pub(crate) shape: Vec<u64>,
    pub(crate) format: Format,
    pub(crate) layout: Layout,
    /// In the order of the source's elements, without gaps.
    pub(crate) parts: Vec<Part>,
    /// Object of its activation scale.
    pub(crate) input_scale: Option<usize>,
    /// Object of the order of its stored columns.
    pub(crate) columns: Option<usize>,
}

impl Weight {
    /// Its name without `.weight`.
    pub(crate) fn base(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }

    pub(crate) fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Routed experts of a layer.
#[derive(Debug, Clone)]
pub(crate) struct Experts {
    /// Name prefix of the source, `...mlp.experts`.
    pub(crate) prefix: String,
    pub(crate) experts: u64,
    pub(crate) hidden: u64,
    pub(crate) intermediate: u64,
    pub(crate) words: ExpertWords,
    /// FP32 `[E,3]` object of activation scales.
    pub(crate) input_scales: Option<usize>,
}

/// Where experts lie.
#[derive(Debug, Clone)]
pub(crate) enum ExpertWords {
    /// Records of a bank.
    Bank { object: usize, format: Format, layout: Layout },
    /// Rank-2 parents: gate and up rows of each expert, down rows.
    Parents { gate_up: Arc<Weight>, down: Arc<Weight> },
}

impl Experts {
    /// Rows and columns of a matrix.
    pub(crate) fn matrix(&self, m: ExpertMatrix) -> [u64; 2] {
        match m {
            ExpertMatrix::Down => [self.hidden, self.intermediate],
            _ => [self.intermediate, self.hidden],
        }
    }

    /// Format of a matrix's words.
    pub(crate) fn format(&self, m: ExpertMatrix) -> Format {
        match &self.words {
            ExpertWords::Bank { format, .. } => match format.expert_types() {
                Some(types) => Format::Ggml(types[m.index()]),
                None => *format,
            },
            ExpertWords::Parents { gate_up, down } => {
                if m == ExpertMatrix::Down {
                    down.format
                } else {
                    gate_up.format
                }
            }
        }
    }

    /// The parent and its first row of a matrix that is no record.
    pub(crate) fn parent(&self, expert: u64, m: ExpertMatrix) -> Option<(&Arc<Weight>, u64)> {
        let ExpertWords::Parents { gate_up, down } = &self.words else { return None };
        let i = self.intermediate;
        Some(match m {
            ExpertMatrix::Down => (down, expert * self.hidden),
            ExpertMatrix::Gate => (gate_up, expert * 2 * i),
            ExpertMatrix::Up => (gate_up, expert * 2 * i + i),
        })
    }
}

/// One layer's n-gram table.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    /// Name prefix of its tensors.
    pub(crate) prefix: String,
    /// Name prefix of the hash buffers.
    pub(crate) buffers: String,
    /// Its number among the tables.
    pub(crate) table: usize,
    pub(crate) first_row: u64,
    pub(crate) rows: u64,
    pub(crate) width: u64,
    /// Parts the configuration announces.
    pub(crate) parts: u64,
    /// Object of the scale of an FP8 table.
    pub(crate) scale: Option<usize>,
}

/// Everything that an export can write.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) list: Vec<Item>,
    pub(crate) tables: Vec<Table>,
    pub(crate) left_out: Vec<(String, String)>,
}

/// In the order of the model.
#[derive(Debug, Clone)]
pub(crate) enum Item {
    Weight(Arc<Weight>),
    Experts(Arc<Experts>),
}

/// What an artifact describes.
#[derive(Debug)]
pub(crate) enum Described {
    Model(Box<ModelConfig>),
    Drafter(Box<DrafterConfig>),
}

fn fail(artifact: &Artifact, reason: String) -> ConvertError {
    ConvertError::Export { path: artifact.path().to_owned(), reason }
}

/// Format and layout of an object.
pub(crate) fn storage(artifact: &Artifact, object: &Object) -> Result<(Format, Layout), ConvertError> {
    let bad = |source| ConvertError::Format { what: object.id.clone(), source: Box::new(source) };
    let format =
        object.format().ok_or_else(|| fail(artifact, format!("object {} is no tensor", object.id)))?;
    let (format, layout): (Format, Layout) =
        (format.parse().map_err(bad)?, object.layout().parse().map_err(bad)?);
    let expected = encoded_size(layout, format, object.shape().unwrap_or_default()).map_err(bad)?;
    if expected != object.bytes {
        let found = object.bytes;
        return Err(fail(
            artifact,
            format!("object {} has {found} bytes, its shape needs {expected}", object.id),
        ));
    }
    Ok((format, layout))
}

/// Checks an auxiliary object: so many words of a direct format.
fn words(artifact: &Artifact, object: usize, expected: Format, count: u64) -> Result<(), ConvertError> {
    let object = &artifact.directory().objects[object];
    let (format, _) = storage(artifact, object)?;
    if format != expected || object.elements() != count {
        let (id, n) = (&object.id, object.elements());
        return Err(fail(
            artifact,
            format!("object {id}: expected {count} words of {expected}, found {n} of {format}"),
        ));
    }
    Ok(())
}

struct Builder<'a> {
    artifact: &'a Artifact,
    ids: BTreeMap<&'a str, usize>,
    /// Source tensors being put together, with the order in which they were met.
    open: Vec<Weight>,
    by_name: BTreeMap<String, usize>,
    order: Vec<Slot>,
}

enum Slot {
    Weight(usize),
    Experts(Arc<Experts>),
}

/// The weights of some components.
///
/// # Errors
/// Bindings that do not cover the model's tensors; objects of formats that are not known.
pub(crate) fn weights(
    artifact: &Artifact,
    described: &Described,
    components: &[Component],
) -> Result<Weights, ConvertError> {
    let style = NameStyle { text_prefix: "model.language_model.".into() };
    let list = match described {
        Described::Model(config) => parameters(config, &style, components),
        Described::Drafter(config) => config.parameters(),
    };
    let directory = artifact.directory();
    let mut b = Builder {
        artifact,
        ids: directory.objects.iter().enumerate().map(|(i, o)| (o.id.as_str(), i)).collect(),
        open: Vec::new(),
        by_name: BTreeMap::new(),
        order: Vec::new(),
    };
    let mut tables = Vec::new();
    let mut first_row = 0;
    let mut wanted = std::collections::BTreeSet::new();
    for p in &list {
        wanted.insert(p.name.clone());
        match &p.source {
            Source::Tensor { name, shape, rows } => {
                b.tensor(p, name, shape, &rows_of(rows, view_rows(shape).0))?
            }
            Source::Experts { prefix } => {
                wanted.extend(expert_parent_names(&p.name));
                b.experts(p, prefix)?;
            }
            // Found with the experts and the table.
            Source::ExpertInputScales { .. } | Source::NgramScale { .. } => {}
            Source::NgramTable { prefix, buffers, parts } => {
                let Described::Model(config) = described else { continue };
                let layer = p.layer.unwrap_or(0);
                let scale = b.whole(&p.name.replace("/ngram_table", "/ngram_scale"));
                if let Some(object) = scale {
                    let (format, _) = storage(artifact, &directory.objects[object])?;
                    words(artifact, object, format, 1)?;
                }
                if *parts > MAX_PARTS {
                    return Err(fail(
                        artifact,
                        format!("the n-gram table is in {parts} parts, at most {MAX_PARTS} are written"),
                    ));
                }
                tables.push(Table {
                    prefix: prefix.clone(),
                    buffers: buffers.clone(),
                    table: config.ple_table(layer).unwrap_or(0),
                    first_row,
                    rows: p.shape[0],
                    width: p.shape[1],
                    parts: *parts,
                    scale,
                });
                first_row += p.shape[0];
            }
        }
    }
    let mut left_out = Vec::new();
    for name in directory.bindings.keys().filter(|n| !wanted.contains(*n)) {
        let reason = if name.starts_with("proposal/") {
            "a proposal head has no place in a checkpoint; it is made anew from the head".to_owned()
        } else {
            let component = name.split('/').next().unwrap_or_default();
            if Component::from_name(component).is_some_and(|c| !components.contains(&c)) {
                continue;
            }
            return Err(fail(artifact, format!("binding {name} is no parameter that this version knows")));
        };
        left_out.push((name.clone(), reason));
    }
    let weights: Vec<_> = b.open.into_iter().map(Arc::new).collect();
    for w in &weights {
        let covered = w.parts.iter().try_fold(0, |at, p| (p.source_begin == at).then_some(at + p.len));
        if covered != Some(w.elements()) {
            return Err(fail(artifact, format!("the bindings do not cover all of {}", w.name)));
        }
    }
    let list = b
        .order
        .into_iter()
        .map(|slot| match slot {
            Slot::Weight(i) => Item::Weight(weights[i].clone()),
            Slot::Experts(e) => Item::Experts(e),
        })
        .collect();
    Ok(Weights { list, tables, left_out })
}

impl Builder<'_> {
    /// The object that a parameter is the whole of.
    fn whole(&self, name: &str) -> Option<usize> {
        let binding = self.artifact.directory().bindings.get(name)?;
        let parts = binding
            .parts(|id| self.ids.get(id).map_or(0, |&i| self.artifact.directory().objects[i].elements()));
        match &parts[..] {
            [part] => self.ids.get(part.object.as_str()).copied(),
            _ => None,
        }
    }

    /// (object, begin, end) of a binding, which has `elements`.
    fn parts(&self, name: &str, elements: u64) -> Result<Vec<(usize, u64, u64)>, ConvertError> {
        let directory = self.artifact.directory();
        let binding = directory
            .bindings
            .get(name)
            .ok_or_else(|| fail(self.artifact, format!("the artifact has no parameter {name}")))?;
        let size = |id: &str| self.ids.get(id).map_or(0, |&i| directory.objects[i].elements());
        let parts: Vec<_> = binding
            .parts(size)
            .into_iter()
            .filter_map(|p| Some((*self.ids.get(p.object.as_str())?, p.begin, p.end)))
            .collect();
        let found: u64 = parts.iter().map(|(_, a, b)| b - a).sum();
        if found != elements {
            return Err(fail(self.artifact, format!("{name} has {found} elements, the model {elements}")));
        }
        Ok(parts)
    }

    fn auxiliary(&self, parameter: &str, roles: &[&str]) -> Option<usize> {
        let uses = self.artifact.directory().uses.iter().filter(|u| u.parameter == parameter);
        uses.flat_map(|u| roles.iter().filter_map(|r| u.auxiliaries.get(*r)))
            .find_map(|id| self.ids.get(id.as_str()).copied())
    }

    fn tensor(
        &mut self,
        p: &Parameter,
        name: &str,
        shape: &[u64],
        rows: &[Range<u64>],
    ) -> Result<(), ConvertError> {
        if p.optional && !self.artifact.directory().bindings.contains_key(&p.name) {
            return Ok(());
        }
        let parts = self.parts(&p.name, p.shape.iter().product())?;
        let Some((first, ..)) = parts.first() else { return Ok(()) };
        let directory = self.artifact.directory();
        let (format, layout) = storage(self.artifact, &directory.objects[*first])?;
        let index = match self.by_name.get(name) {
            Some(i) => *i,
            None => {
                self.open.push(Weight {
                    name: name.to_owned(),
                    component: p.component,
                    shape: shape.to_vec(),
                    format,
                    layout,
                    parts: Vec::new(),
                    input_scale: self
                        .auxiliary(&p.name, &["activation_input_scale", "activation_input_divisor"]),
                    columns: self.auxiliary(&p.name, &["input_columns"]),
                });
                let weight = &self.open[self.open.len() - 1];
                if let Some(object) = weight.input_scale {
                    words(self.artifact, object, Format::Fp32, 1)?;
                }
                if let Some(object) = weight.columns {
                    words(self.artifact, object, Format::Int32, view_rows(shape).1)?;
                }
                self.by_name.insert(name.to_owned(), self.open.len() - 1);
                self.order.push(Slot::Weight(self.open.len() - 1));
                self.open.len() - 1
            }
        };
        for (object, ..) in &parts {
            let found = storage(self.artifact, &directory.objects[*object])?;
            let w = &self.open[index];
            if found != (w.format, w.layout) {
                return Err(fail(
                    self.artifact,
                    format!(
                        "parts of {name} are stored as {} and as {}: one tensor of a file has one type; convert \
                         with one format for all of it",
                        w.format, found.0
                    ),
                ));
            }
        }
        let k = view_rows(shape).1;
        let mut parts = parts.into_iter();
        let mut part = parts.next();
        for r in rows {
            let mut at = r.start * k;
            while at < r.end * k {
                let Some((object, begin, end)) = part else { break };
                let len = (r.end * k - at).min(end - begin);
                self.open[index].parts.push(Part { object, source_begin: at, object_begin: begin, len });
                at += len;
                part = if begin + len == end { parts.next() } else { Some((object, begin + len, end)) };
            }
        }
        let list = &mut self.open[index].parts;
        list.sort_by_key(|p| p.source_begin);
        let mut merged: Vec<Part> = Vec::with_capacity(list.len());
        for p in list.drain(..) {
            match merged.last_mut() {
                Some(last)
                    if last.object == p.object
                        && last.source_begin + last.len == p.source_begin
                        && last.object_begin + last.len == p.object_begin =>
                {
                    last.len += p.len;
                }
                _ => merged.push(p),
            }
        }
        *list = merged;
        Ok(())
    }

    /// A parent of experts as a weight of its own.
    fn parent(&self, name: &str, p: &Parameter, rows: u64, k: u64) -> Result<Arc<Weight>, ConvertError> {
        let parts = self.parts(name, rows * k)?;
        let Some((first, ..)) = parts.first() else {
            return Err(fail(self.artifact, format!("{name} is bound to nothing")));
        };
        let (format, layout) = storage(self.artifact, &self.artifact.directory().objects[*first])?;
        let mut at = 0;
        let parts = parts
            .into_iter()
            .map(|(object, begin, end)| {
                at += end - begin;
                Part { object, source_begin: at - (end - begin), object_begin: begin, len: end - begin }
            })
            .collect();
        Ok(Arc::new(Weight {
            name: name.to_owned(),
            component: p.component,
            shape: vec![rows, k],
            format,
            layout,
            parts,
            input_scale: None,
            columns: None,
        }))
    }

    fn experts(&mut self, p: &Parameter, prefix: &str) -> Result<(), ConvertError> {
        let &[experts, hidden, intermediate] = &p.shape[..] else {
            return Err(fail(self.artifact, format!("{} is of shape {:?}", p.name, p.shape)));
        };
        if experts > MAX_PARTS {
            return Err(fail(
                self.artifact,
                format!("{} has {experts} experts, at most {MAX_PARTS} are written", p.name),
            ));
        }
        let stored = if self.artifact.directory().bindings.contains_key(&p.name) {
            let parts = self.parts(&p.name, p.shape.iter().product())?;
            let [(object, 0, _)] = parts[..] else {
                return Err(fail(self.artifact, format!("{} is not one object", p.name)));
            };
            let (format, layout) = storage(self.artifact, &self.artifact.directory().objects[object])?;
            let shape = self.artifact.directory().objects[object].shape();
            if !layout.is_bank() || shape != Some(&p.shape[..]) {
                let reason = format!("{} is stored as {layout} of shape {shape:?}, no bank of it", p.name);
                return Err(fail(self.artifact, reason));
            }
            ExpertWords::Bank { object, format, layout }
        } else {
            let [gate_up, down] = expert_parent_names(&p.name);
            ExpertWords::Parents {
                gate_up: self.parent(&gate_up, p, experts * 2 * intermediate, hidden)?,
                down: self.parent(&down, p, experts * hidden, intermediate)?,
            }
        };
        let scales = format!("{}/expert_input_scales", p.name.strip_suffix("/experts").unwrap_or(&p.name));
        let input_scales = self.whole(&scales);
        if let Some(object) = input_scales {
            words(self.artifact, object, Format::Fp32, 3 * experts)?;
        }
        self.order.push(Slot::Experts(Arc::new(Experts {
            prefix: prefix.to_owned(),
            experts,
            hidden,
            intermediate,
            words: stored,
            input_scales,
        })));
        Ok(())
    }
}
