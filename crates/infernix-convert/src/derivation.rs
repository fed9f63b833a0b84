//! What one file is of another: parameter by parameter, whether the words are the same, the values are the same, one is
//! the stated rounding of the other, or how far they differ. Either side may be an artifact, a checkpoint or a GGUF model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use infernix_artifact::{Artifact, Interrupt};
use infernix_checkpoint::OpenOptions;
use infernix_checkpoint::gguf::names::Values;
use infernix_formats::expert_bank::ExpertMatrix;
use infernix_formats::ggml::{GgmlType, quantize};
use infernix_formats::{Encoded, Format};
use infernix_model::{Parameter, Source};
use serde::Serialize;

use crate::ConvertError;
use crate::build::name_style;
use crate::described::{Described, components_present};
use crate::experts::{ExpertSource, matrix_name};
use crate::fill::{encode_rows, rounded};
use crate::group::rows_of;
use crate::plan::view_rows;
use crate::progress::Progress;
use crate::recipe::Method;
use crate::sources::{SourceSpec, Sources, WeightRef};

/// How one parameter of the first file relates to that of the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Relation {
    /// The same format and every value equal, bit for bit.
    Identical,
    /// Other formats, every value equal.
    SameValues,
    /// The first is the stated rounding of the second's values: every word follows from them.
    Rounded,
    /// Values differ.
    Different,
}

/// One parameter compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Derived {
    /// Logical name, or `NAME[e] gate` of a routed expert's matrix where experts differ.
    pub name: String,
    /// How they relate.
    pub relation: Relation,
    /// Format of the first file's words.
    pub format: String,
    /// Format of the second's.
    pub other_format: String,
    /// The rounding, where it is one.
    pub rounding: Option<String>,
    /// Square root of the sum of squared differences over that of the second's squared values.
    pub rel_error: f64,
}

/// What a comparison of two files found.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DerivationReport {
    /// Every parameter of the first is identical to, has the values of, or is a stated rounding of the second's.
    pub derived: bool,
    /// Parameters by relation.
    pub counts: BTreeMap<String, u64>,
    /// Every parameter.
    pub parameters: Vec<Derived>,
    /// Parameters that one side alone has.
    pub only_first: Vec<String>,
    /// As above, of the second.
    pub only_second: Vec<String>,
    /// BLAKE3 over the sorted parameters with their relations and errors: a digest to quote.
    pub digest: String,
    /// Time taken.
    pub seconds: f64,
}

/// A matrix that can be decoded row by row; logical rows, in order.
trait Matrix {
    fn format(&self) -> Format;
    fn rows(&self) -> u64;
    fn k(&self) -> u64;
    fn decode(&self, rows: std::ops::Range<u64>, out: &mut [f32]) -> Result<(), ConvertError>;
}

/// One side of the comparison.
enum Side {
    Artifact(Box<Artifact>, Described),
    Sources(Box<Sources>, Described),
}

impl Side {
    fn open(path: &Path) -> Result<Self, ConvertError> {
        let is_artifact = path.is_file()
            && path.extension().is_some_and(|e| {
                e == "infernix" || e == "ninfer" || e.to_string_lossy().starts_with("part-")
            });
        if is_artifact {
            let artifact = Artifact::open(path)?;
            let described = describe(&artifact)?;
            return Ok(Self::Artifact(Box::new(artifact), described));
        }
        let mut specs = vec![SourceSpec::new("base", path)];
        specs.extend(tower(path).map(|p| SourceSpec::new("vision", p)));
        let sources = Sources::open(&specs, &OpenOptions::default())?;
        let described = Described::of(&sources)?;
        Ok(Self::Sources(Box::new(sources), described))
    }

    /// Parameters by logical name; routed experts stay one entry, tables and scales of activations are left out.
    fn parameters(&self) -> BTreeMap<String, Parameter> {
        let list = match self {
            Self::Artifact(artifact, described) => {
                let style = infernix_model::source_prefix(|_| false);
                let components: Vec<_> = infernix_model::Component::ALL
                    .into_iter()
                    .filter(|c| artifact.directory().components.contains_key(c.name()))
                    .collect();
                described.parameters(&style, &components)
            }
            Self::Sources(sources, described) => {
                described.parameters(&name_style(sources), &components_present(sources, described))
            }
        };
        list.into_iter()
            .filter(|p| matches!(p.source, Source::Tensor { .. } | Source::Experts { .. }))
            .map(|p| (p.name.clone(), p))
            .collect()
    }

    /// A parameter's matrix; vectors are one column.
    fn matrix<'s>(&'s self, p: &Parameter) -> Result<Option<Box<dyn Matrix + 's>>, ConvertError> {
        match (self, &p.source) {
            (Self::Artifact(artifact, _), Source::Tensor { .. }) => Bound::open(artifact, &p.name, &p.shape),
            (Self::Sources(sources, _), Source::Tensor { name, rows, .. }) => {
                let Some((source, weight)) = sources.locate(name, p.component, None, false)? else {
                    return Ok(None);
                };
                let (all, k) = view_rows(weight.shape());
                let vector = weight.shape().len() < 2;
                let weight = WeightRef { source, name: weight.name().to_owned() };
                Ok(Some(Box::new(Stored { sources, weight, rows: rows_of(rows, all), k, vector })))
            }
            _ => Ok(None),
        }
    }

    /// One matrix of a routed expert.
    fn expert<'s>(
        &'s self,
        p: &Parameter,
        expert: u64,
        matrix: ExpertMatrix,
    ) -> Result<Option<Box<dyn Matrix + 's>>, ConvertError> {
        let (h, i) = (p.shape[1], p.shape[2]);
        let (rows, k) = if matrix == ExpertMatrix::Down { (h, i) } else { (i, h) };
        match (self, &p.source) {
            (Self::Artifact(artifact, _), _) => BankMatrix::open(artifact, &p.name, expert, matrix, rows, k),
            (Self::Sources(sources, _), Source::Experts { prefix }) => {
                let found = ExpertSource::find(sources, p, prefix, None, &mut Vec::new())?;
                let Some(found) = found else { return Ok(None) };
                let (name, first) = match (found.fused, matrix) {
                    (false, _) => (matrix_name(prefix, expert, matrix), 0),
                    (true, ExpertMatrix::Gate) => (format!("{prefix}.gate_up_proj"), expert * 2 * i),
                    (true, ExpertMatrix::Up) => (format!("{prefix}.gate_up_proj"), expert * 2 * i + i),
                    (true, ExpertMatrix::Down) => (format!("{prefix}.down_proj"), expert * h),
                };
                let weight = WeightRef { source: found.source, name };
                let rows = Vec::from_iter([std::ops::Range { start: first, end: first + rows }]);
                Ok(Some(Box::new(Stored { sources, weight, rows, k, vector: false })))
            }
            _ => Ok(None),
        }
    }
}

/// The image tower of a GGUF model: `mmproj-NAME` beside the file, as an export writes it, or the only one of the folder.
fn tower(path: &Path) -> Option<PathBuf> {
    if !path.is_dir() {
        let name = path.file_name()?.to_str().filter(|n| n.ends_with(".gguf"))?;
        return Some(path.with_file_name(format!("mmproj-{name}"))).filter(|p| p.is_file());
    }
    let is_tower = |p: &PathBuf| {
        let name = p.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        name.starts_with("mmproj") && name.ends_with(".gguf")
    };
    let mut found = std::fs::read_dir(path).ok()?.filter_map(|e| Some(e.ok()?.path())).filter(is_tower);
    found.next().filter(|_| found.next().is_none())
}

fn describe(artifact: &Artifact) -> Result<Described, ConvertError> {
    let directory = artifact.directory();
    let fail = |source| ConvertError::Model { path: artifact.path().to_owned(), source };
    let mut described = Described { model: None, drafters: Vec::new() };
    for (id, component) in &directory.components {
        let mut value = serde_json::Value::Object(component.config.clone());
        if id == "text" {
            if let Some(vision) = directory.components.get("vision") {
                value["vision_config"] = serde_json::Value::Object(vision.config.clone());
            }
            let mut model = infernix_model::ModelConfig::from_json(&value).map_err(fail)?;
            model.mtp |= directory.components.contains_key("mtp");
            described.model = Some(model);
        } else if infernix_model::DrafterConfig::describes(&value) {
            described.drafters.push(infernix_model::DrafterConfig::from_json(&value).map_err(fail)?);
        }
    }
    Ok(described)
}

/// Rows of a checkpoint's weight.
struct Stored<'s> {
    sources: &'s Sources,
    weight: WeightRef,
    rows: Vec<std::ops::Range<u64>>,
    k: u64,
    vector: bool,
}

impl Matrix for Stored<'_> {
    fn format(&self) -> Format {
        let weight = self.sources.weight(&self.weight).ok();
        weight.and_then(|w| w.scheme().format()).unwrap_or(Format::Fp32)
    }
    fn rows(&self) -> u64 {
        self.rows.iter().map(|r| r.end - r.start).sum()
    }
    fn k(&self) -> u64 {
        self.k
    }
    fn decode(&self, rows: std::ops::Range<u64>, out: &mut [f32]) -> Result<(), ConvertError> {
        let weight = self.sources.weight(&self.weight)?;
        let mut all = Vec::new();
        if self.vector {
            all.resize(weight.row_len() as usize, 0.0);
            weight.decode_rows_f32(0..1, &mut all)?;
        }
        let (mut first, mut done) = (0, 0usize);
        for r in &self.rows {
            let n = r.end - r.start;
            let (a, b) = (rows.start.max(first), rows.end.min(first + n));
            if a < b {
                let count = ((b - a) * self.k) as usize;
                let from = r.start + a - first..r.start + b - first;
                let out = &mut out[done..done + count];
                if self.vector {
                    out.copy_from_slice(&all[from.start as usize..from.end as usize]);
                } else {
                    weight.decode_rows_f32(from, out)?;
                }
                done += count;
            }
            first += n;
        }
        Ok(())
    }
}

/// Element ranges of an artifact's objects.
struct Bound<'s> {
    artifact: &'s Artifact,
    /// Object number, format, first and last row of its view.
    parts: Vec<(usize, Format, std::ops::Range<u64>)>,
    k: u64,
    columns: Option<Vec<u32>>,
}

impl<'s> Bound<'s> {
    fn open(
        artifact: &'s Artifact,
        name: &str,
        shape: &[u64],
    ) -> Result<Option<Box<dyn Matrix + 's>>, ConvertError> {
        let directory = artifact.directory();
        let Some(binding) = directory.bindings.get(name) else { return Ok(None) };
        let number = |id: &str| directory.objects.iter().position(|o| o.id == id);
        let size = |id: &str| number(id).map_or(0, |i| directory.objects[i].elements());
        let k = if shape.len() < 2 { 1 } else { shape.last().copied().unwrap_or(1) };
        let mut parts = Vec::new();
        for part in binding.parts(size) {
            let Some(i) = number(&part.object) else { return Ok(None) };
            let object = &directory.objects[i];
            let Some(format) = object.format().and_then(|f| f.parse().ok()) else { return Ok(None) };
            if part.begin % k != 0 || part.end % k != 0 {
                return Ok(None);
            }
            parts.push((i, format, part.begin / k..part.end / k));
        }
        let order = directory.uses.iter().find(|u| u.parameter == name);
        let columns = order
            .and_then(|u| u.auxiliaries.get("input_columns"))
            .and_then(|id| number(id))
            .map(|i| artifact.bytes(&directory.objects[i]))
            .transpose()?
            .map(|b| b.as_ref().as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect());
        Ok(Some(Box::new(Bound { artifact, parts, k, columns })))
    }
}

impl Matrix for Bound<'_> {
    fn format(&self) -> Format {
        self.parts.first().map_or(Format::Fp32, |p| p.1)
    }
    fn rows(&self) -> u64 {
        self.parts.iter().map(|p| p.2.end - p.2.start).sum()
    }
    fn k(&self) -> u64 {
        self.k
    }
    fn decode(&self, rows: std::ops::Range<u64>, out: &mut [f32]) -> Result<(), ConvertError> {
        let (mut first, mut done) = (0, 0usize);
        for (object, format, range) in &self.parts {
            let n = range.end - range.start;
            let (a, b) = (rows.start.max(first), rows.end.min(first + n));
            if a < b {
                let object = &self.artifact.directory().objects[*object];
                let failed =
                    |source| ConvertError::Format { what: object.id.clone(), source: Box::new(source) };
                let bytes = self.artifact.bytes(object)?;
                let shape = object.shape().unwrap_or_default();
                let layout = object.layout().parse().map_err(failed)?;
                let encoded = Encoded::new(layout, *format, shape, bytes.as_ref()).map_err(failed)?;
                // Rows as the object cuts them; a parameter's row may be a part of one, or several.
                let own = encoded.row_shape().map_err(failed)?.k.max(1);
                let (begin, end) = ((range.start + a - first) * self.k, (range.start + b - first) * self.k);
                let wide = begin / own..end.div_ceil(own);
                let mut values = vec![0f32; ((wide.end - wide.start) * own) as usize];
                encoded.decode_rows_f32(wide.clone(), &mut values).map_err(failed)?;
                let skip = (begin - wide.start * own) as usize;
                let count = (end - begin) as usize;
                out[done..done + count].copy_from_slice(&values[skip..skip + count]);
                done += count;
            }
            first += n;
        }
        if let Some(columns) = &self.columns {
            for row in out.chunks_exact_mut(columns.len()) {
                let stored = row.to_vec();
                columns.iter().zip(stored).for_each(|(c, v)| row[*c as usize] = v);
            }
        }
        Ok(())
    }
}

/// A matrix inside an expert's record.
struct BankMatrix<'s> {
    artifact: &'s Artifact,
    object: usize,
    format: Format,
    expert: u64,
    matrix: ExpertMatrix,
    shape: [u64; 2],
}

impl<'s> BankMatrix<'s> {
    fn open(
        artifact: &'s Artifact,
        name: &str,
        expert: u64,
        matrix: ExpertMatrix,
        rows: u64,
        k: u64,
    ) -> Result<Option<Box<dyn Matrix + 's>>, ConvertError> {
        let directory = artifact.directory();
        if let Some(infernix_artifact::Binding::Whole { object }) = directory.bindings.get(name) {
            let Some(object) = directory.objects.iter().position(|o| o.id == *object) else {
                return Ok(None);
            };
            let Some(format) = directory.objects[object].format().and_then(|f| f.parse().ok()) else {
                return Ok(None);
            };
            return Ok(Some(Box::new(BankMatrix {
                artifact,
                object,
                format,
                expert,
                matrix,
                shape: [rows, k],
            })));
        }
        // Rank-2 parents: gate rows then up rows of each expert, and down rows.
        let [gate_up, down] = infernix_model::expert_parent_names(name);
        let (parent, first) = match matrix {
            ExpertMatrix::Down => (down, expert * rows),
            ExpertMatrix::Gate => (gate_up, expert * 2 * rows),
            ExpertMatrix::Up => (gate_up, expert * 2 * rows + rows),
        };
        let Some(all) = Bound::open(artifact, &parent, &[rows, k])? else { return Ok(None) };
        Ok(Some(Box::new(Slice { of: all, first, rows })))
    }
}

impl Matrix for BankMatrix<'_> {
    fn format(&self) -> Format {
        match self.format.expert_types() {
            Some(types) => Format::Ggml(types[self.matrix.index()]),
            None => self.format,
        }
    }
    fn rows(&self) -> u64 {
        self.shape[0]
    }
    fn k(&self) -> u64 {
        self.shape[1]
    }
    fn decode(&self, rows: std::ops::Range<u64>, out: &mut [f32]) -> Result<(), ConvertError> {
        let object = &self.artifact.directory().objects[self.object];
        let failed = |source| ConvertError::Format { what: object.id.clone(), source: Box::new(source) };
        let bytes = self.artifact.bytes(object)?;
        let layout = object.layout().parse().map_err(failed)?;
        let encoded = Encoded::new(layout, self.format, object.shape().unwrap_or_default(), bytes.as_ref())
            .map_err(failed)?;
        encoded.expert(self.expert).and_then(|e| e.decode_f32(self.matrix, rows, out)).map_err(failed)
    }
}

/// Some rows of a matrix.
struct Slice<'s> {
    of: Box<dyn Matrix + 's>,
    first: u64,
    rows: u64,
}

impl Matrix for Slice<'_> {
    fn format(&self) -> Format {
        self.of.format()
    }
    fn rows(&self) -> u64 {
        self.rows
    }
    fn k(&self) -> u64 {
        self.of.k()
    }
    fn decode(&self, rows: std::ops::Range<u64>, out: &mut [f32]) -> Result<(), ConvertError> {
        self.of.decode(self.first + rows.start..self.first + rows.end, out)
    }
}

/// Values compared per step.
const STEP: u64 = 1 << 20;

/// A rounding that is known.
#[derive(Clone, Copy)]
enum Rounding {
    /// Of a format.
    Method(Method),
    /// What GGUF stores in FP32 instead of the values, and back.
    Convention(Values),
}

/// The roundings that a format has, by name; `values`: what GGUF does to the parameter.
fn roundings(format: Format, values: Values) -> Vec<(&'static str, Rounding)> {
    let list: &[(&str, Method)] = match format {
        f if f.group_spec().is_some() => &[("absmax", Method::Absmax), ("mse", Method::Mse)],
        Format::Fp8Row => &[("row_maxabs", Method::RowMaxabs)],
        Format::Bf16 | Format::Fp16 => &[("nearest", Method::Cast)],
        Format::Ggml(t) if quantize::is_stated(t) => &[("ggml reference", Method::Cast)],
        Format::Fp32 if values != Values::Same => {
            return vec![(values.rounding(), Rounding::Convention(values))];
        }
        _ => &[],
    };
    list.iter().map(|(name, method)| (*name, Rounding::Method(*method))).collect()
}

/// What values a format's rounding makes of others.
fn round(format: Format, rounding: Rounding, k: u64, values: &[f32]) -> Option<Vec<f32>> {
    let method = match rounding {
        Rounding::Method(method) => method,
        Rounding::Convention(c) => return Some(values.iter().map(|v| c.undo(c.apply(*v))).collect()),
    };
    let mut out = vec![0f32; values.len()];
    match format {
        Format::Bf16 | Format::Fp16 => {
            let dtype = if format == Format::Bf16 {
                infernix_checkpoint::Dtype::Bf16
            } else {
                infernix_checkpoint::Dtype::F16
            };
            return Some(crate::fill::floats(dtype, &rounded(format, values)));
        }
        Format::Ggml(t) => {
            let mut bytes = vec![0; GgmlType::row_bytes(t, values.len() as u64).ok()? as usize];
            quantize::row(t, values, &mut bytes).ok()?;
            infernix_formats::ggml::decode_f32(t, &bytes, &mut out).ok()?;
        }
        _ => {
            let planes = encode_rows(method, format, k, values, 0, 1.0).ok()?;
            let layout = crate::storage::usual_layout(format, false);
            let shape = [values.len() as u64 / k.max(1), k];
            planes.rows(layout, format, &shape, 0..shape[0]).ok()?.decode_f32(&mut out).ok()?;
        }
    }
    Some(out)
}

fn compare(
    name: String,
    values: Values,
    a: &dyn Matrix,
    b: &dyn Matrix,
    interrupt: &Interrupt,
) -> Result<Derived, ConvertError> {
    let (format, other, k) = (a.format(), b.format(), a.k());
    let mut out = Derived {
        name,
        relation: Relation::Different,
        format: format.name().to_owned(),
        other_format: other.name().to_owned(),
        rounding: None,
        rel_error: 1.0,
    };
    if (a.rows(), k) != (b.rows(), b.k()) {
        return Ok(out);
    }
    let step = (STEP / k.max(1)).max(1);
    let (mut equal, mut squares, mut total) = (true, 0f64, 0f64);
    let mut possible = roundings(format, values);
    let (mut x, mut y) = (Vec::new(), Vec::new());
    let mut row = 0;
    while row < a.rows() {
        interrupt.check()?;
        let end = a.rows().min(row + step);
        x.resize(((end - row) * k) as usize, 0.0);
        y.resize(x.len(), 0.0);
        a.decode(row..end, &mut x)?;
        b.decode(row..end, &mut y)?;
        // Numbers, not bits: a zero's sign has no meaning across formats.
        if x != y {
            equal = false;
            possible.retain(|(_, rounding)| round(format, *rounding, k, &y).is_some_and(|r| r == x));
        }
        for (x, y) in x.iter().zip(&y) {
            squares += f64::from(x - y).powi(2);
            total += f64::from(*y).powi(2);
        }
        row = end;
    }
    out.rel_error = if squares == 0.0 { 0.0 } else { (squares / total.max(f64::MIN_POSITIVE)).sqrt() };
    out.relation = match (equal, format == other, possible.first()) {
        (true, true, _) => Relation::Identical,
        (true, false, _) => Relation::SameValues,
        (false, _, Some((rounding, _))) => {
            out.rounding = Some((*rounding).to_owned());
            Relation::Rounded
        }
        _ => Relation::Different,
    };
    Ok(out)
}

/// Compares every parameter of two files; `first` is the one that should derive from `second`.
///
/// # Errors
/// What cannot be opened or decoded; an interruption. What differs is in the report.
pub fn derivation(
    first: &Path,
    second: &Path,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<DerivationReport, ConvertError> {
    let started = Instant::now();
    let (a, b): (PathBuf, PathBuf) = (first.to_owned(), second.to_owned());
    let (a, b) = (Side::open(&a)?, Side::open(&b)?);
    let (of_a, of_b) = (a.parameters(), b.parameters());
    let only_second = of_b.keys().filter(|n| !of_a.contains_key(*n)).cloned().collect();
    let mut report = DerivationReport { only_second, ..DerivationReport::default() };
    progress.begin("compare", of_a.len() as u64);
    for (name, p) in &of_a {
        progress.advance(1);
        let Some(q) = of_b.get(name) else {
            report.only_first.push(name.clone());
            continue;
        };
        if p.shape != q.shape {
            report.parameters.push(Derived {
                name: name.clone(),
                relation: Relation::Different,
                format: format!("{:?}", p.shape),
                other_format: format!("{:?}", q.shape),
                rounding: None,
                rel_error: 1.0,
            });
            continue;
        }
        if let Source::Tensor { name: source, .. } = &p.source {
            let values = Values::of_source(source);
            match (a.matrix(p)?, b.matrix(q)?) {
                (Some(x), Some(y)) => {
                    report.parameters.push(compare(name.clone(), values, &*x, &*y, interrupt)?);
                }
                (None, _) => report.only_second.push(name.clone()),
                (_, None) => report.only_first.push(name.clone()),
            }
            continue;
        }
        report.parameters.extend(experts(&a, &b, p, q, interrupt)?);
    }
    progress.end();
    for p in &report.parameters {
        let relation = serde_json::to_value(p.relation).ok().and_then(|v| v.as_str().map(str::to_owned));
        *report.counts.entry(relation.unwrap_or_default()).or_default() += 1;
    }
    report.derived = report.only_first.is_empty()
        && !report.parameters.is_empty()
        && report.parameters.iter().all(|p| p.relation != Relation::Different);
    let text = serde_json::to_vec(&(&report.parameters, &report.only_first, &report.only_second));
    report.digest = format!("blake3:{}", blake3::hash(&text.unwrap_or_default()).to_hex());
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

/// All matrices of a layer's experts: one line where they relate alike, else one for each that does not.
fn experts(
    a: &Side,
    b: &Side,
    p: &Parameter,
    q: &Parameter,
    interrupt: &Interrupt,
) -> Result<Vec<Derived>, ConvertError> {
    let mut merged: Option<Derived> = None;
    let mut out = Vec::new();
    for e in 0..p.shape[0] {
        for m in ExpertMatrix::ALL {
            let (Some(x), Some(y)) = (a.expert(p, e, m)?, b.expert(q, e, m)?) else { continue };
            let one = compare(format!("{}[{e}] {}", p.name, m.name()), Values::Same, &*x, &*y, interrupt)?;
            match &mut merged {
                None => merged = Some(Derived { name: p.name.clone(), ..one }),
                Some(all) if all.relation == one.relation => {
                    all.rel_error = all.rel_error.max(one.rel_error);
                    if all.format != one.format {
                        all.format = format!("{}, {}", all.format, one.format);
                    }
                }
                Some(_) => out.push(one),
            }
        }
    }
    out.extend(merged);
    Ok(out)
}
