//! Comparing expert records and activation scales.

use infernix_artifact::Object;
use infernix_checkpoint::SourceTensor;
use infernix_formats::expert_bank::{BankShape, ExpertMatrix, fp8_planes, ggml_blocks, unpack_nvfp4};
use infernix_formats::{Format, Layout};

use super::Context;
use super::map::expert_tensor;
use super::rows::Words;
use super::tally::Mismatch;
use crate::ConvertError;
use crate::fill::{floats, widened};
use crate::sources::WeightRef;

fn expert<'c>(
    context: &Context<'c>,
    source: usize,
    prefix: &str,
    expert: u64,
    matrix: ExpertMatrix,
) -> Result<SourceTensor<'c>, ConvertError> {
    context.sources.weight(&WeightRef { source, name: expert_tensor(prefix, expert, matrix) })
}

/// Unpacks every record and compares codes, block scales and multipliers with the source's words.
pub(super) fn compare(
    context: &Context<'_>,
    object: usize,
    source: usize,
    prefix: &str,
) -> Result<(), ConvertError> {
    let object = &context.artifact.directory().objects[object];
    let failed = |source| ConvertError::Format { what: object.id.clone(), source: Box::new(source) };
    let Ok(layout) = object.layout().parse::<Layout>() else { return Ok(()) };
    let Some(format) = object.format().and_then(|f| f.parse::<Format>().ok()) else { return Ok(()) };
    let shape = BankShape::of(layout, format, object.shape().unwrap_or_default()).map_err(failed)?;
    let nvfp4 = layout == Layout::Nvfp4ExpertRg16V1;
    let first = expert(context, source, prefix, 0, ExpertMatrix::Gate)?;
    let mut own = first.scheme().format();
    if let (Some(Format::Ggml(gate)), Some(Format::Ggml(up)), Some(Format::Ggml(down))) = (
        own,
        expert(context, source, prefix, 0, ExpertMatrix::Up)?.scheme().format(),
        expert(context, source, prefix, 0, ExpertMatrix::Down)?.scheme().format(),
    ) {
        own = Some(Format::ggml_experts([gate, up, down]));
    }
    if own != Some(format) {
        context.tally.problem(format!(
            "object {}: {} records, the source's experts are {}",
            object.id,
            object.format().unwrap_or_default(),
            first.scheme()
        ));
        return Ok(());
    }
    let mut globals = vec![0; if nvfp4 { 12 * shape.experts as usize } else { 0 }];
    context.artifact.read_at(object.offset + shape.stride * shape.experts, &mut globals)?;
    let mut record = vec![0; shape.stride as usize];
    let (mut codes, mut scales, mut source_codes, mut source_scales) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for e in 0..shape.experts {
        context.interrupt.check()?;
        context.artifact.read_at(object.offset + e * shape.stride, &mut record)?;
        let mut wrong = 0;
        for matrix in ExpertMatrix::ALL {
            let weight = expert(context, source, prefix, e, matrix)?;
            let p = weight.planes();
            let (rows, k) = shape.matrix(matrix);
            read(&weight, Some(p.weight), &mut source_codes)?;
            read(&weight, p.scale, &mut source_scales)?;
            let scale_name = p.scale.map_or("", |t| &t.name);
            if layout == Layout::GgmlExpertV1 {
                let (ty, blocks) = ggml_blocks(&shape, &record, matrix).map_err(failed)?;
                let (size, values) = (ty.block_bytes(), ty.block_len());
                let (unit, per_row) = (size as usize, k / values);
                let word = Words { tensor: &p.weight.name, unit, columns: values, per_row, first_row: 0 };
                wrong += word.compare(context, &source_codes, blocks);
            } else if nvfp4 {
                codes.resize((rows * k / 2) as usize, 0);
                scales.resize((rows * k / 16) as usize, 0);
                unpack_nvfp4(&shape, &record, matrix, &mut codes, &mut scales).map_err(failed)?;
                let word =
                    |tensor, columns| Words { tensor, unit: 1, columns, per_row: k / columns, first_row: 0 };
                wrong += word(&p.weight.name, 2).compare(context, &source_codes, &codes);
                wrong += word(scale_name, 16).compare(context, &source_scales, &scales);
                if let Some(global) = p.global_scale {
                    let bytes = weight.checkpoint().read_all(global)?;
                    let at = 12 * e as usize + 4 * matrix.index();
                    let word = Words { tensor: &global.name, unit: 4, columns: 1, per_row: 1, first_row: 0 };
                    wrong += word.compare(context, &widened(global.dtype, &bytes), &globals[at..at + 4]);
                }
            } else {
                let (codes, scales) = fp8_planes(&shape, &record, matrix).map_err(failed)?;
                let word = Words { tensor: &p.weight.name, unit: 1, columns: 1, per_row: k, first_row: 0 };
                wrong += word.compare(context, &source_codes, codes);
                if let Some(scale) = p.scale {
                    let tiles = k.div_ceil(128);
                    let word =
                        Words { tensor: scale_name, unit: 4, columns: 128, per_row: tiles, first_row: 0 };
                    wrong += word.compare(context, &widened(scale.dtype, &source_scales), scales);
                }
            }
        }
        if let Some(at) = record[shape.record_bytes as usize..].iter().position(|b| *b != 0) {
            let at = shape.record_bytes + at as u64;
            context
                .tally
                .problem(format!("object {}: padding byte {at} of expert {e} is not zero", object.id));
            wrong += 1;
        }
        context.tally.experts(1, u64::from(wrong > 0));
        context.progress.advance(shape.stride);
    }
    Ok(())
}

fn read(
    weight: &SourceTensor<'_>,
    plane: Option<&infernix_checkpoint::TensorInfo>,
    out: &mut Vec<u8>,
) -> Result<(), ConvertError> {
    out.clear();
    let Some(plane) = plane else { return Ok(()) };
    out.resize(plane.bytes as usize, 0);
    Ok(weight.checkpoint().read(plane, 0..plane.bytes, out)?)
}

/// Activation scales `[E,3]`, word for word.
pub(super) fn compare_input_scales(
    context: &Context<'_>,
    object: usize,
    source: usize,
    prefix: &str,
) -> Result<(), ConvertError> {
    let object = &context.artifact.directory().objects[object];
    let stored = read_object(context, object)?;
    for (at, found) in stored.as_chunks::<4>().0.iter().enumerate() {
        let (e, matrix) = (at as u64 / 3, ExpertMatrix::ALL[at % 3]);
        compare_scale(context, &expert(context, source, prefix, e, matrix)?, *found)?;
    }
    Ok(())
}

/// The order of a weight's columns.
pub(super) fn compare_columns(
    context: &Context<'_>,
    object: usize,
    weight: &WeightRef,
) -> Result<(), ConvertError> {
    let object = &context.artifact.directory().objects[object];
    let stored = read_object(context, object)?;
    let weight = context.sources.weight(weight)?;
    let expected = crate::fill::input_columns(&weight);
    Words { tensor: &object.id, unit: 4, columns: 1, per_row: weight.row_len(), first_row: 0 }
        .compare(context, &expected, &stored);
    Ok(())
}

/// The activation scale of a dense weight.
pub(super) fn compare_input_scale(
    context: &Context<'_>,
    object: usize,
    weight: &WeightRef,
) -> Result<(), ConvertError> {
    let object = &context.artifact.directory().objects[object];
    let stored = read_object(context, object)?;
    match stored.as_chunks::<4>().0 {
        [word] => compare_scale(context, &context.sources.weight(weight)?, *word),
        _ => {
            context.tally.problem(format!("object {} is no FP32 scalar", object.id));
            Ok(())
        }
    }
}

fn compare_scale(
    context: &Context<'_>,
    weight: &SourceTensor<'_>,
    found: [u8; 4],
) -> Result<(), ConvertError> {
    let Some(plane) = weight.planes().input_scale else {
        context.tally.problem(format!("{}: the checkpoint has no activation scale", weight.name()));
        return Ok(());
    };
    let bytes = weight.checkpoint().read_all(plane)?;
    let expected = floats(plane.dtype, &bytes).first().copied().unwrap_or(0.0).to_bits();
    let found = u32::from_le_bytes(found);
    if expected != found {
        context.tally.input_scales(1);
        context.tally.mismatch(Mismatch {
            tensor: plane.name.to_string(),
            row: 0,
            column: 0,
            expected: format!("{expected:#010x}"),
            found: format!("{found:#010x}"),
        });
    }
    Ok(())
}

fn read_object(context: &Context<'_>, object: &Object) -> Result<Vec<u8>, ConvertError> {
    let mut stored = vec![0; object.bytes as usize];
    context.artifact.read_at(object.offset, &mut stored)?;
    context.progress.advance(object.bytes);
    Ok(stored)
}
