//! Comparing matrices and vectors: stored words with the source's, or decoded values with exact ones.

use std::ops::Range;

use infernix_artifact::Object;
use infernix_checkpoint::{Dtype, PlaneKind, Scheme, SourceTensor};
use infernix_formats::{Format, Layout, PlaneRole, RowPlanes, Rows, nvfp4, row_planes};
use rayon::prelude::*;

use super::Context;
use super::map::{Map, Run};
use super::tally::{Errors, Mismatch};
use crate::ConvertError;
use crate::fill::{encode_rows, floats, rounded, widened};
use crate::plan::{decode_flat, view_rows};
use crate::recipe::Method;
use crate::sources::WeightRef;

/// Format and layout of an object; a problem where they are unknown.
fn known(context: &Context<'_>, object: &Object) -> Option<(Format, Layout)> {
    let found = object.format().and_then(|f| f.parse().ok()).zip(object.layout().parse().ok());
    if found.is_none() {
        let text =
            format!("object {}: {:?} in {} is unknown here", object.id, object.format(), object.layout());
        context.tally.problem(text);
    }
    found
}

/// The re-quantizing method that the converter recorded for an object.
fn recorded_method(context: &Context<'_>, object: &Object) -> Option<Method> {
    let provenance = context.artifact.directory().provenance.as_ref()?;
    Method::from_name(provenance.get("methods")?.get(&object.id)?.as_str()?)
}

/// Compares `found` with `expected` in units of `unit` bytes; `columns` values a unit, `per_row` units a row.
pub(super) struct Words<'a> {
    pub(super) tensor: &'a str,
    pub(super) unit: usize,
    pub(super) columns: u64,
    pub(super) per_row: u64,
    pub(super) first_row: u64,
}

impl Words<'_> {
    pub(super) fn compare(&self, context: &Context<'_>, expected: &[u8], found: &[u8]) -> u64 {
        if expected == found {
            return 0;
        }
        if expected.len() != found.len() {
            let text = format!(
                "{}: {} bytes are stored, the source has {}",
                self.tensor,
                found.len(),
                expected.len()
            );
            context.tally.problem(text);
            return 1;
        }
        let hex = |bytes: &[u8]| {
            let digits: String = bytes.iter().rev().map(|b| format!("{b:02x}")).collect();
            format!("0x{digits}")
        };
        let (mut wrong, mut listed) = (0, 0);
        for (at, (a, b)) in expected.chunks(self.unit).zip(found.chunks(self.unit)).enumerate() {
            if a == b {
                continue;
            }
            wrong += 1;
            // A thoroughly different tensor is told by its first words and a count.
            if listed < 20 {
                listed += 1;
                let at = at as u64;
                context.tally.mismatch(Mismatch {
                    tensor: self.tensor.to_owned(),
                    row: self.first_row + at / self.per_row.max(1),
                    column: at % self.per_row.max(1) * self.columns,
                    expected: hex(a),
                    found: hex(b),
                });
            }
        }
        context.tally.more_mismatches(wrong - listed);
        wrong
    }
}

/// Compares all elements of an object that bindings name.
pub(super) fn compare(
    context: &Context<'_>,
    map: &Map,
    object: usize,
    runs: &[Run],
) -> Result<(), ConvertError> {
    let object = &context.artifact.directory().objects[object];
    let Some((format, layout)) = known(context, object) else { return Ok(()) };
    let mut next = 0;
    for run in runs {
        // Elements that no parameter names would be dead weight, or a slip in the bindings.
        if run.object_begin > next {
            context.tally.problem(format!(
                "object {}: elements {next}..{} belong to no parameter",
                object.id, run.object_begin
            ));
        }
        next = next.max(run.object_begin + run.len);
        let weight = context.sources.weight(&run.weight)?;
        let own = weight.scheme().format();
        if format.direct_bytes().is_some() {
            direct(context, object, format, own, &weight, run)?;
        } else {
            coded(context, map, object, (format, layout), own, &weight, run)?;
        }
    }
    if next < object.elements() {
        context.tally.problem(format!(
            "object {}: elements {next}..{} belong to no parameter",
            object.id,
            object.elements()
        ));
    }
    Ok(())
}

fn direct(
    context: &Context<'_>,
    object: &Object,
    format: Format,
    own: Option<Format>,
    weight: &SourceTensor<'_>,
    run: &Run,
) -> Result<(), ConvertError> {
    let width = format.direct_bytes().unwrap_or(2);
    let info = weight.planes().weight;
    let same = own == Some(format);
    let widens = format == Format::Fp32 && matches!(own, Some(Format::Bf16 | Format::Fp16));
    let mut stored = Vec::new();
    let mut source = Vec::new();
    let mut errors =
        Errors { method: Method::Cast.name().into(), format: format.name().into(), ..Errors::default() };
    let mut done = 0;
    // Values of coded sources are decoded row by row.
    let step = ((context.step / width).max(1) / run.k.max(1)).max(1) * run.k.max(1);
    while done < run.len {
        context.interrupt.check()?;
        let take = step.min(run.len - done);
        stored.resize((take * width) as usize, 0);
        context.artifact.read_at(object.offset + (run.object_begin + done) * width, &mut stored)?;
        let at = run.source_begin + done;
        let words = Words {
            tensor: &info.name,
            unit: width as usize,
            columns: 1,
            per_row: run.k,
            first_row: at / run.k.max(1),
        };
        if same || widens {
            let from = info.dtype.bits() / 8;
            source.resize((take * from) as usize, 0);
            weight.checkpoint().read(info, at * from..(at + take) * from, &mut source)?;
            if same {
                words.compare(context, &source, &stored);
            } else {
                words.compare(context, &widened(info.dtype, &source), &stored);
            }
        } else {
            let exact = values(weight, at, take, run.k)?;
            let decoded = match format {
                Format::Bf16 => floats(Dtype::Bf16, &stored),
                Format::Fp16 => floats(Dtype::F16, &stored),
                Format::Fp32 => floats(Dtype::F32, &stored),
                _ => {
                    context.tally.problem(format!(
                        "object {}: {format} words for {}",
                        object.id,
                        weight.name()
                    ));
                    return Ok(());
                }
            };
            errors.add(&exact, &decoded, run.k, at / run.k.max(1));
            let again = rounded(format, &exact);
            let row = (run.k * width).max(1) as usize;
            let wrong = again.chunks(row).zip(stored.chunks(row)).filter(|(a, b)| a != b).count();
            context.tally.requantized_rows(wrong as u64);
        }
        context.progress.advance(take * width);
        done += take;
    }
    if !same && !widens {
        context.tally.errors(run.target, &errors);
    }
    Ok(())
}

/// Exact values of elements; vectors are one row for the decoder.
fn values(weight: &SourceTensor<'_>, begin: u64, len: u64, k: u64) -> Result<Vec<f32>, ConvertError> {
    if weight.shape().len() < 2 {
        let mut all = vec![0f32; weight.row_len() as usize];
        weight.decode_rows_f32(0..1, &mut all)?;
        return Ok(all[begin as usize..(begin + len) as usize].to_vec());
    }
    let mut out = vec![0f32; len as usize];
    weight.decode_rows_f32(begin / k..(begin + len) / k, &mut out)?;
    Ok(out)
}

/// Rows of a coded object as a checkpoint orders them.
struct Stored {
    planes: RowPlanes,
    layout: Layout,
    format: Format,
    shape: [u64; 2],
    rows: Range<u64>,
}

impl Stored {
    fn read(
        context: &Context<'_>,
        object: &Object,
        (format, layout): (Format, Layout),
        shape: [u64; 2],
        rows: Range<u64>,
    ) -> Result<Self, ConvertError> {
        let failed = |source| ConvertError::Format { what: object.id.clone(), source: Box::new(source) };
        let step = layout.row_step();
        let aligned = rows.start / step * step..rows.end.next_multiple_of(step).min(shape[0]);
        let mut planes = RowPlanes::default();
        for plane in row_planes(layout, format, &shape, aligned.clone()).map_err(failed)? {
            let target = match plane.role {
                PlaneRole::Codes => &mut planes.codes,
                PlaneRole::HighBits => &mut planes.high,
                PlaneRole::GlobalScale => &mut planes.global,
                PlaneRole::Scales | PlaneRole::Records => &mut planes.scales,
            };
            target.resize(plane.bytes as usize, 0);
            context.artifact.read_at(object.offset + plane.offset, target)?;
        }
        context.progress.advance((planes.codes.len() + planes.high.len() + planes.scales.len()) as u64);
        let mut layout = layout;
        if layout == Layout::BlockScaleK16M128x4V1 {
            let tiles = std::mem::take(&mut planes.scales);
            planes.scales.resize(tiles.len(), 0);
            nvfp4::unpack_scales(layout, shape[1] as usize, &tiles, &mut planes.scales).map_err(failed)?;
            let count = aligned.end - aligned.start;
            for plane in [&mut planes.codes, &mut planes.scales] {
                let per = plane.len() as u64 / count.max(1);
                let keep = (rows.start - aligned.start) * per..(rows.end - aligned.start) * per;
                *plane = plane[keep.start as usize..keep.end as usize].to_vec();
            }
            layout = Layout::BlockScaleK16V1;
        }
        Ok(Self { planes, layout, format, shape, rows })
    }

    /// The planes of some of the rows.
    fn part(&self, rows: &Range<u64>) -> Option<Rows<'_>> {
        let count = (self.rows.end - self.rows.start).max(1) as usize;
        let slice = |plane: &'_ Vec<u8>| {
            let per = plane.len() / count;
            (rows.start - self.rows.start) as usize * per..(rows.end - self.rows.start) as usize * per
        };
        let p = &self.planes;
        let (codes, high) = (&p.codes[slice(&p.codes)], &p.high[slice(&p.high)]);
        let scales = &p.scales[slice(&p.scales)];
        Rows::new(self.layout, self.format, &self.shape, rows.clone(), codes, high, scales, &p.global).ok()
    }
}

fn coded(
    context: &Context<'_>,
    map: &Map,
    object: &Object,
    (format, layout): (Format, Layout),
    own: Option<Format>,
    weight: &SourceTensor<'_>,
    run: &Run,
) -> Result<(), ConvertError> {
    let k = object.shape().and_then(|s| s.last().copied()).unwrap_or(run.k);
    if layout.is_bank()
        || k == 0
        || run.object_begin % k != 0
        || run.len % k != 0
        || run.source_begin % k != 0
    {
        context.tally.problem(format!(
            "object {}: {} is not bound by whole rows",
            object.id, map.targets[run.target].parameter
        ));
        return Ok(());
    }
    let shape = [object.elements() / k, k];
    let exact = own == Some(format);
    let bytes_per_row = if exact { k } else { 4 * k };
    let mut step = (context.step / bytes_per_row.max(1)).max(1);
    if format == Format::Fp8Block128 {
        step = step.next_multiple_of(128);
    }
    let (mut row, end) = (run.object_begin / k, (run.object_begin + run.len) / k);
    let shift = |row: u64| row + run.source_begin / k - run.object_begin / k;
    if format == Format::Fp8Block128 && exact && row % 128 != (run.source_begin / k) % 128 {
        context.tally.problem(format!(
            "object {}: tiles of {} do not fall on the source's",
            object.id,
            weight.name()
        ));
        return Ok(());
    }
    let method = recorded_method(context, object);
    let mut errors = Errors {
        method: method.map_or("", Method::name).into(),
        format: format.name().into(),
        ..Errors::default()
    };
    while row < end {
        context.interrupt.check()?;
        let rows = row..end.min(row + step);
        let stored = Stored::read(context, object, (format, layout), shape, rows.clone())?;
        let source = shift(rows.start)..shift(rows.end);
        if exact {
            words(context, &stored, weight, source, k)?;
        } else {
            requantized(context, &stored, weight, source.start, method, &mut errors)?;
        }
        row = rows.end;
    }
    if !exact {
        // NVFP4's divisor follows from the largest magnitude of the whole matrix.
        if let Some(search) = method.and_then(Method::nvfp4)
            && run.len == object.elements()
        {
            let stored = Stored::read(context, object, (format, layout), shape, 0..1)?.planes.global;
            let expected =
                nvfp4::divisor(search, errors.largest_exact).map(f32::to_le_bytes).unwrap_or_default();
            Words { tensor: weight.name(), unit: 4, columns: 1, per_row: 1, first_row: 0 }
                .compare(context, &expected, &stored);
        }
        context.tally.errors(run.target, &errors);
        if method.is_none() {
            let name = &map.targets[run.target].parameter;
            context.tally.warning(format!(
                "{name}: the artifact does not say how {format} was made; only the error is known"
            ));
        }
    }
    Ok(())
}

/// Compares every plane's words.
fn words(
    context: &Context<'_>,
    stored: &Stored,
    weight: &SourceTensor<'_>,
    rows: Range<u64>,
    k: u64,
) -> Result<(), ConvertError> {
    let checkpoint = weight.checkpoint();
    let all = view_rows(weight.shape()).0.max(1);
    let read = |kind: PlaneKind, range: Range<u64>| -> Result<(Dtype, String, Vec<u8>), ConvertError> {
        let Some(t) = weight.planes().get(kind) else { return Ok((Dtype::U8, String::new(), Vec::new())) };
        let mut out = vec![0; (range.end - range.start) as usize];
        checkpoint.read(t, range, &mut out)?;
        Ok((t.dtype, t.name.to_string(), out))
    };
    let size = |kind: PlaneKind| weight.planes().get(kind).map_or(0, |t| t.bytes);
    let by_row = |kind: PlaneKind| rows.start * (size(kind) / all)..rows.end * (size(kind) / all);

    let (_, name, codes) = read(PlaneKind::Weight, by_row(PlaneKind::Weight))?;
    let per_row = size(PlaneKind::Weight) / all;
    Words { tensor: &name, unit: 1, columns: k / per_row.max(1), per_row, first_row: rows.start }.compare(
        context,
        &codes,
        &stored.planes.codes,
    );

    let mut global = size(PlaneKind::GlobalScale) > 0;
    match weight.scheme() {
        Scheme::Nvfp4Multiplier { .. } | Scheme::Nvfp4Divisor { .. } | Scheme::Mxfp8 => {
            let (_, name, scales) = read(PlaneKind::Scale, by_row(PlaneKind::Scale))?;
            let per_row = size(PlaneKind::Scale) / all;
            Words { tensor: &name, unit: 1, columns: k / per_row.max(1), per_row, first_row: rows.start }
                .compare(context, &scales, &stored.planes.scales);
        }
        Scheme::Fp8Row { .. } => {
            let (dtype, name, scales) = read(PlaneKind::Scale, by_row(PlaneKind::Scale))?;
            // Stored BF16 scales widen to what the source has.
            let found = if dtype == Dtype::F32 {
                widened(Dtype::Bf16, &stored.planes.scales)
            } else {
                stored.planes.scales.clone()
            };
            Words {
                tensor: &name,
                unit: (dtype.bits() / 8) as usize,
                columns: 1,
                per_row: 1,
                first_row: rows.start,
            }
            .compare(context, &scales, &found);
        }
        Scheme::Fp8Block128 { scale } => {
            let tiles = k.div_ceil(128);
            let width = tiles * scale.bits() / 8;
            let (dtype, name, scales) =
                read(PlaneKind::Scale, rows.start / 128 * width..rows.end.div_ceil(128) * width)?;
            Words { tensor: &name, unit: 4, columns: 128, per_row: tiles, first_row: rows.start / 128 }
                .compare(context, &widened(dtype, &scales), &stored.planes.scales);
        }
        Scheme::Fp8Tensor { .. } => global = true,
        Scheme::Plain(_) | Scheme::Ggml(_) => {}
        _ => context.tally.problem(format!("{}: {} is unknown here", weight.name(), weight.scheme())),
    }
    if global {
        let kind = if matches!(weight.scheme(), Scheme::Fp8Tensor { .. }) {
            PlaneKind::Scale
        } else {
            PlaneKind::GlobalScale
        };
        let (dtype, name, word) = read(kind, 0..size(kind))?;
        Words { tensor: &name, unit: 4, columns: 1, per_row: 1, first_row: 0 }.compare(
            context,
            &widened(dtype, &word),
            &stored.planes.global,
        );
    }
    Ok(())
}

/// Decodes, measures the error, and runs our own encoder again.
fn requantized(
    context: &Context<'_>,
    stored: &Stored,
    weight: &SourceTensor<'_>,
    first_source: u64,
    method: Option<Method>,
    errors: &mut Errors,
) -> Result<(), ConvertError> {
    let k = stored.shape[1];
    let block = ((1 << 16) / k.max(1)).max(1);
    let blocks: Vec<Range<u64>> = (stored.rows.start..stored.rows.end)
        .step_by(block as usize)
        .map(|a| a..stored.rows.end.min(a + block))
        .collect();
    let one = |rows: Range<u64>| -> Result<(Errors, u64), ConvertError> {
        let source = rows.start - stored.rows.start + first_source;
        let count = rows.end - rows.start;
        let mut exact = vec![0f32; (count * k) as usize];
        decode_flat(weight, source..source + count, k, &mut exact)?;
        let mut errors = Errors { largest_exact: infernix_formats::amax(&exact), ..Errors::default() };
        let Some(part) = stored.part(&rows) else {
            context
                .tally
                .problem(format!("{}: stored rows {rows:?} do not have their planes", weight.name()));
            return Ok((errors, count));
        };
        if let Err(e) = part.validate_words() {
            context.tally.problem(format!("{}: stored as {}: {e}", weight.name(), stored.format));
            return Ok((errors, count));
        }
        let mut decoded = vec![0f32; exact.len()];
        part.decode_f32(&mut decoded).map_err(|source| ConvertError::Format {
            what: weight.name().into(),
            source: Box::new(source),
        })?;
        errors.add(&exact, &decoded, k, source);
        let Some(method) = method else { return Ok((errors, 0)) };
        let all = (stored.rows.end - stored.rows.start) as usize;
        let (at, p) = ((rows.start - stored.rows.start) as usize, &stored.planes);
        // Whether rows from `first` on of freshly encoded planes differ from the stored ones.
        let wrong = |again: &RowPlanes, first: usize, count: usize| {
            (0..count)
                .filter(|row| {
                    let planes =
                        [(&again.codes, &p.codes), (&again.high, &p.high), (&again.scales, &p.scales)];
                    planes.iter().any(|(new, old)| {
                        let per = old.len() / all.max(1);
                        let old = old.get((at + first + row) * per..(at + first + row + 1) * per);
                        new.get(row * per..(row + 1) * per) != old
                    })
                })
                .count()
        };
        let divisor = floats(Dtype::F32, &stored.planes.global).first().copied().unwrap_or(1.0);
        let wrong = match encode_rows(method, stored.format, k, &exact, source, divisor) {
            Ok(again) => wrong(&again, 0, count as usize),
            // Values that cannot be encoded are another checkpoint's: row by row, to count only theirs.
            Err(_) => exact
                .chunks(k as usize)
                .enumerate()
                .map(|(row, values)| match encode_rows(method, stored.format, k, values, 0, divisor) {
                    Ok(again) => wrong(&again, row, 1),
                    Err(_) => 1,
                })
                .sum(),
        };
        Ok((errors, wrong as u64))
    };
    let results: Vec<(Errors, u64)> =
        context.pool.install(|| blocks.into_par_iter().map(one).collect::<Result<_, _>>())?;
    // In the order of rows, so that the sums do not depend on the number of threads.
    for (part, wrong) in results {
        errors.squares += part.squares;
        errors.total += part.total;
        errors.largest_exact = errors.largest_exact.max(part.largest_exact);
        if part.largest > errors.largest {
            errors.largest = part.largest;
            errors.worst = part.worst;
        }
        context.tally.requantized_rows(wrong);
    }
    Ok(())
}

/// A small tensor stored whole.
pub(super) fn compare_tensor(
    context: &Context<'_>,
    object: usize,
    source: usize,
    name: &str,
) -> Result<(), ConvertError> {
    let object = &context.artifact.directory().objects[object];
    let checkpoint = context.sources.checkpoint(source);
    let Some(info) = checkpoint.get(name) else { return Ok(()) };
    let bytes = checkpoint.read_all(info)?;
    let mut stored = vec![0; object.bytes as usize];
    context.artifact.read_at(object.offset, &mut stored)?;
    context.progress.advance(object.bytes);
    let expected = if object.format() == Some("fp32") { widened(info.dtype, &bytes) } else { bytes };
    let unit = if object.format() == Some("fp32") { 4 } else { 2 };
    Words { tensor: name, unit, columns: 1, per_row: info.elements(), first_row: 0 }
        .compare(context, &expected, &stored);
    Ok(())
}

/// The scale of a table that was encoded here.
pub(super) fn compare_table_scale(
    context: &Context<'_>,
    object: usize,
    table: &crate::ngram::TablePlan,
) -> Result<(), ConvertError> {
    let object = &context.artifact.directory().objects[object];
    let mut stored = vec![0; object.bytes as usize];
    context.artifact.read_at(object.offset, &mut stored)?;
    let expected = table.scale(context.sources, context.interrupt)?.to_le_bytes();
    Words { tensor: &object.id, unit: 2, columns: 1, per_row: 1, first_row: 0 }
        .compare(context, &expected, &stored);
    Ok(())
}

/// The proposal head: ids are distinct tokens, rows are those of the output head.
pub(super) fn compare_proposal(
    context: &Context<'_>,
    map: &Map,
    head: usize,
    ids: usize,
    weight: &WeightRef,
    target: usize,
) -> Result<(), ConvertError> {
    let objects = &context.artifact.directory().objects;
    let (head, ids) = (&objects[head], &objects[ids]);
    let Some((format, layout)) = known(context, head) else { return Ok(()) };
    let source = context.sources.weight(weight)?;
    let (vocab, k) = view_rows(source.shape());
    let mut bytes = vec![0; ids.bytes as usize];
    context.artifact.read_at(ids.offset, &mut bytes)?;
    let list: Vec<u64> = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|w| u64::try_from(i32::from_le_bytes(*w)).unwrap_or(u64::MAX))
        .collect();
    let distinct: std::collections::BTreeSet<u64> = list.iter().copied().collect();
    if distinct.len() != list.len()
        || list.iter().any(|id| *id >= vocab)
        || head.shape() != Some(&[list.len() as u64, k])
    {
        context
            .tally
            .problem("proposal/token_ids: ids are not distinct tokens, one a row of proposal/head".into());
        return Ok(());
    }
    let own = source.scheme().format();
    for (row, id) in (0u64..).zip(&list) {
        context.interrupt.check()?;
        let run =
            Run { target, weight: weight.clone(), k, object_begin: row * k, source_begin: id * k, len: k };
        if format.direct_bytes().is_some() {
            direct(context, head, format, own, &source, &run)?;
        } else {
            coded(context, map, head, (format, layout), own, &source, &run)?;
        }
    }
    Ok(())
}
