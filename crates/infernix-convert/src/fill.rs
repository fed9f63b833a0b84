//! Producing the bytes of one object from its sources, in order and within a few buffers.

use std::ops::Range;
use std::sync::Mutex;

use infernix_artifact::Interrupt;
use infernix_checkpoint::{Checkpoint, CheckpointError, Dtype, Scheme, SourceTensor, TensorInfo};
use infernix_formats::expert_bank::{self, BankShape, BlockFp8Planes, ExpertMatrix, Nvfp4Planes};
use infernix_formats::scalar::{bf16_from_f32, bf16_to_f32, f16_from_f32, f16_to_f32};
use infernix_formats::{
    Format, FormatError, Layout, PlaneRole, RowPlanes, Rows, fp8, groupwise, nvfp4, planes, row_planes,
};
use rayon::prelude::*;

use crate::ConvertError;
use crate::experts::matrix_name;
use crate::plan::{Content, PlannedObject, Segment, decode_flat, view_rows};
use crate::recipe::Method;
use crate::sources::{Sources, WeightRef};

/// Scale planes of one object that are held back so that its bytes leave in order.
const HELD_BACK: usize = 24 << 20;
/// NaN words of direct formats that are named; the rest is counted.
const NAMED: usize = 20;

/// Takes the bytes of an object.
pub(crate) trait Sink {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ConvertError>;
}

/// What filling needs to know.
pub(crate) struct Fill<'a> {
    pub(crate) sources: &'a Sources,
    /// Token ids of the proposal head.
    pub(crate) proposal: &'a [u32],
    pub(crate) interrupt: &'a Interrupt,
    /// Threads that re-encode.
    pub(crate) pool: &'a rayon::ThreadPool,
    /// Bytes of source or object data per step.
    pub(crate) step: u64,
    /// Words without a value that are stored as they are.
    pub(crate) notes: &'a Notes,
}

/// NaN words met in direct formats.
#[derive(Debug, Default)]
pub(crate) struct Notes(Mutex<(Vec<String>, u64)>);

impl Notes {
    fn add(&self, text: impl FnOnce() -> String, count: u64) {
        if let Ok(mut notes) = self.0.lock() {
            if notes.0.len() < NAMED {
                notes.0.push(text());
            }
            notes.1 += count;
        }
    }

    /// What was met, in words.
    pub(crate) fn take(&self) -> Vec<String> {
        let Ok(mut notes) = self.0.lock() else { return Vec::new() };
        let (mut out, total) = std::mem::take(&mut *notes);
        out.sort();
        if total > 0 {
            out.push(format!("{total} NaN words are stored as they are; the model may be damaged"));
        }
        out
    }
}

/// Part of a step: object rows and where they come from.
struct Piece {
    weight: usize,
    rows: Range<u64>,
}

impl Fill<'_> {
    /// Writes all bytes of `object`.
    pub(crate) fn object(&self, object: &PlannedObject, sink: &dyn Sink) -> Result<(), ConvertError> {
        match &object.content {
            Content::Bytes(bytes) => self.stream(bytes, sink),
            Content::Tensor { source, name } => {
                let checkpoint = self.sources.checkpoint(*source);
                let info = self.tensor(checkpoint, name)?;
                let bytes = checkpoint.read_all(info)?;
                self.check_direct(checkpoint, info, 1, 0, &bytes)?;
                let out = if object.method == Method::Widen { widened(info.dtype, &bytes) } else { bytes };
                sink.write(0, &out)
            }
            Content::TableScale { table } => {
                sink.write(0, &table.scale(self.sources, self.interrupt)?.to_le_bytes())
            }
            Content::InputColumns { weight } => {
                let weight = self.sources.weight(weight)?;
                sink.write(0, &input_columns(&weight))
            }
            Content::InputScale { weight } => {
                let weight = self.sources.weight(weight)?;
                let scale = weight.input_scale()?.unwrap_or(0.0);
                sink.write(0, &scale.to_le_bytes())
            }
            Content::ExpertInputScales { source, prefix } => {
                let mut out = Vec::with_capacity(object.bytes as usize);
                for expert in 0..object.shape[0] {
                    for matrix in ExpertMatrix::ALL {
                        let weight = self.expert(*source, prefix, expert, matrix)?;
                        out.extend(weight.input_scale()?.unwrap_or(0.0).to_le_bytes());
                    }
                }
                sink.write(0, &out)
            }
            Content::ProposalIds => {
                let bytes: Vec<u8> = self.proposal.iter().flat_map(|id| id.to_le_bytes()).collect();
                self.stream(&bytes, sink)
            }
            Content::ProposalHead { weight } => {
                let segments: Vec<Segment> = self
                    .proposal
                    .iter()
                    .map(|&id| Segment { weight: 0, rows: u64::from(id)..u64::from(id) + 1 })
                    .collect();
                self.rows(object, std::slice::from_ref(weight), &segments, object.shape[1], sink)
            }
            Content::Bank { source, prefix } => self.bank(object, *source, prefix, sink),
            Content::Rows { weights, segments, k } => self.rows(object, weights, segments, *k, sink),
        }
    }

    fn stream(&self, bytes: &[u8], sink: &dyn Sink) -> Result<(), ConvertError> {
        let mut offset = 0;
        for chunk in bytes.chunks(self.step as usize) {
            self.interrupt.check()?;
            sink.write(offset, chunk)?;
            offset += chunk.len() as u64;
        }
        Ok(())
    }

    fn tensor<'c>(&self, checkpoint: &'c Checkpoint, name: &str) -> Result<&'c TensorInfo, ConvertError> {
        checkpoint.get(name).ok_or_else(|| ConvertError::MissingTensors { count: 1, names: name.to_owned() })
    }

    fn expert(
        &self,
        source: usize,
        prefix: &str,
        expert: u64,
        matrix: ExpertMatrix,
    ) -> Result<SourceTensor<'_>, ConvertError> {
        self.sources.weight(&WeightRef { source, name: matrix_name(prefix, expert, matrix) })
    }

    /// Reports NaN words of a direct format, with tensor, row and column. A vector (norm, decay, bias) must be finite: one
    /// word without a value spoils every token.
    fn check_direct(
        &self,
        checkpoint: &Checkpoint,
        info: &TensorInfo,
        k: u64,
        first_element: u64,
        bytes: &[u8],
    ) -> Result<(), ConvertError> {
        if info.shape.len() < 2 {
            check_vector(checkpoint, info, first_element, bytes)?;
        }
        let nan = |at: usize| {
            let element = first_element + at as u64;
            format!(
                "{}: tensor {}: NaN at row {}, column {}",
                checkpoint.shard_of(info).name,
                info.name,
                element / k.max(1),
                element % k.max(1)
            )
        };
        let (count, first) = match info.dtype {
            Dtype::Bf16 => nan_words::<2>(bytes, |w| u16::from_le_bytes(w) & 0x7FFF > 0x7F80),
            Dtype::F16 => nan_words::<2>(bytes, |w| u16::from_le_bytes(w) & 0x7FFF > 0x7C00),
            Dtype::F32 => nan_words::<4>(bytes, |w| f32::from_le_bytes(w).is_nan()),
            _ => (0, 0),
        };
        if count > 0 {
            self.notes.add(|| nan(first), count);
        }
        Ok(())
    }

    fn bank(
        &self,
        object: &PlannedObject,
        source: usize,
        prefix: &str,
        sink: &dyn Sink,
    ) -> Result<(), ConvertError> {
        let format_error =
            |source| ConvertError::Format { what: object.id.clone(), source: Box::new(source) };
        let format = object.format.unwrap_or(Format::Bf16);
        let shape = BankShape::of(object.layout, format, &object.shape).map_err(format_error)?;
        let checkpoint = self.sources.checkpoint(source);
        let per_write = (self.step / shape.stride.max(1)).max(1);
        let mut record = vec![0u8; (per_write.min(shape.experts) * shape.stride) as usize];
        let mut codes: [Vec<u8>; 3] = Default::default();
        let mut scales: [Vec<u8>; 3] = Default::default();
        let mut tiles: [Vec<f32>; 3] = Default::default();
        let mut globals = Vec::new();
        let mut expert = 0;
        while expert < shape.experts {
            self.interrupt.check()?;
            let count = per_write.min(shape.experts - expert);
            let batch = &mut record[..(count * shape.stride) as usize];
            for (e, out) in (expert..).zip(batch.chunks_exact_mut(shape.stride as usize)) {
                let mut example = None;
                for matrix in ExpertMatrix::ALL {
                    let weight = self.expert(source, prefix, e, matrix)?;
                    let m = matrix.index();
                    let p = weight.planes();
                    read_whole(checkpoint, p.weight, &mut codes[m])?;
                    if let Some(scale) = p.scale {
                        read_whole(checkpoint, scale, &mut scales[m])?;
                        if shape.layout == Layout::Fp8ExpertBlock128V1 {
                            tiles[m] = floats(scale.dtype, &scales[m]);
                        }
                    }
                    if let Some(global) = weight.global_scale()? {
                        globals.extend(global.to_le_bytes());
                    }
                    example.get_or_insert(p.weight);
                }
                let packed = if shape.layout == Layout::GgmlExpertV1 {
                    expert_bank::pack_ggml(&shape, [&codes[0], &codes[1], &codes[2]], out)
                } else if shape.layout == Layout::Nvfp4ExpertRg16V1 {
                    let plane = |m: usize| Nvfp4Planes { codes: &codes[m], scales: &scales[m] };
                    expert_bank::pack_nvfp4(&shape, plane(0), plane(1), plane(2), out)
                } else {
                    let plane = |m: usize| BlockFp8Planes { codes: &codes[m], scales: &tiles[m] };
                    expert_bank::pack_fp8(&shape, plane(0), plane(1), plane(2), out)
                };
                packed.map_err(|source| ConvertError::Word {
                    file: example.map(|t| checkpoint.shard_of(t).name.clone()).unwrap_or_default(),
                    tensor: format!("{prefix}.{e}"),
                    source: Box::new(source),
                })?;
            }
            sink.write(expert * shape.stride, batch)?;
            expert += count;
        }
        if shape.layout == Layout::Nvfp4ExpertRg16V1 {
            sink.write(shape.experts * shape.stride, &globals)?;
        }
        Ok(())
    }

    fn rows(
        &self,
        object: &PlannedObject,
        weights: &[WeightRef],
        segments: &[Segment],
        k: u64,
        sink: &dyn Sink,
    ) -> Result<(), ConvertError> {
        let format = object.format.unwrap_or(Format::Bf16);
        let weights = weights.iter().map(|w| self.sources.weight(w)).collect::<Result<Vec<_>, _>>()?;
        if format.direct_bytes().is_some() {
            return self.direct(object, format, &weights, segments, k, sink);
        }
        let shape = [object.shape.iter().product::<u64>() / k.max(1), k];
        let format_error =
            |source| ConvertError::Format { what: object.id.clone(), source: Box::new(source) };
        let all = planes(object.layout, format, &shape).map_err(format_error)?;
        // Steps by source bytes: 4 bytes a value while re-encoding.
        let per_row = if object.method.is_lossy() { 4 * k } else { 2 * k };
        let mut step = (self.step / per_row.max(1)).max(1);
        // Tile and swizzle formats are cut at 128 rows.
        if matches!(format, Format::Fp8Block128) || object.layout.row_step() > 1 {
            step = step.next_multiple_of(128);
        }
        let divisor = match object.method.nvfp4() {
            Some(method) => {
                nvfp4::divisor(method, self.largest(&weights, segments, k, step)?).map_err(format_error)?
            }
            None => 1.0,
        };
        let mut held: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut held_bytes = 0;
        let mut row = 0;
        let mut cursor = Cursor::new(segments);
        let mut out = RowPlanes::default();
        while row < shape[0] {
            self.interrupt.check()?;
            let rows = row..shape[0].min(row + step);
            let pieces = cursor.take(rows.end - rows.start);
            if object.method.is_lossy() {
                self.encode(object.method, format, k, &weights, &pieces, divisor, &mut out)?;
            } else {
                self.stored(object, format, &shape, rows.clone(), &weights, &pieces, &mut out)?;
            }
            for plane in row_planes(object.layout, format, &shape, rows.clone()).map_err(format_error)? {
                let bytes = out.plane(plane.role);
                if plane.role == PlaneRole::GlobalScale && rows.start > 0 {
                    continue;
                }
                if plane.role == PlaneRole::Codes || held_bytes + bytes.len() > HELD_BACK {
                    sink.write(plane.offset, bytes)?;
                } else {
                    held_bytes += bytes.len();
                    held.push((plane.offset, bytes.to_vec()));
                }
            }
            row = rows.end;
        }
        // Zeros between the planes, then what was held back, in order.
        let mut end = 0;
        for plane in &all {
            if plane.offset > end {
                held.push((end, vec![0; (plane.offset - end) as usize]));
            }
            end = plane.offset + plane.bytes;
        }
        held.sort_by_key(|(offset, _)| *offset);
        held.iter().try_for_each(|(offset, bytes)| sink.write(*offset, bytes))
    }

    /// Direct words: copied, widened or rounded.
    fn direct(
        &self,
        object: &PlannedObject,
        format: Format,
        weights: &[SourceTensor<'_>],
        segments: &[Segment],
        k: u64,
        sink: &dyn Sink,
    ) -> Result<(), ConvertError> {
        let width = format.direct_bytes().unwrap_or(2);
        let mut buffer = Vec::new();
        let mut offset = 0;
        for s in segments {
            let weight = &weights[s.weight];
            let info = weight.planes().weight;
            let elements = s.rows.start * k..s.rows.end * k;
            if object.method == Method::Cast {
                offset = self.cast(format, weight, s.rows.clone(), k, offset, sink)?;
                continue;
            }
            let from = info.dtype.bits() / 8;
            let step = (self.step / width).max(1);
            let mut at = elements.start;
            while at < elements.end {
                self.interrupt.check()?;
                let end = elements.end.min(at + step);
                buffer.resize(((end - at) * from) as usize, 0);
                weight.checkpoint().read(info, at * from..end * from, &mut buffer)?;
                self.check_direct(weight.checkpoint(), info, k, at, &buffer)?;
                if object.method == Method::Widen {
                    sink.write(offset, &widened(info.dtype, &buffer))?;
                } else {
                    sink.write(offset, &buffer)?;
                }
                offset += (end - at) * width;
                at = end;
            }
        }
        Ok(())
    }

    /// Values rounded to a direct format; vectors are one row for the decoder.
    fn cast(
        &self,
        format: Format,
        weight: &SourceTensor<'_>,
        rows: Range<u64>,
        k: u64,
        mut offset: u64,
        sink: &dyn Sink,
    ) -> Result<u64, ConvertError> {
        let vector = weight.shape().len() < 2;
        let step = if vector { u64::MAX } else { (self.step / (4 * k).max(1)).max(1) };
        let mut at = rows.start;
        while at < rows.end {
            self.interrupt.check()?;
            let end = rows.end.min(at.saturating_add(step));
            let mut values = Vec::new();
            if vector {
                let info = weight.planes().weight;
                check_vector(weight.checkpoint(), info, 0, &weight.checkpoint().read_all(info)?)?;
                values.resize(weight.row_len() as usize, 0.0);
                weight.decode_rows_f32(0..1, &mut values)?;
                values = values[at as usize..end as usize].to_vec();
            } else {
                values.resize(((end - at) * k) as usize, 0.0);
                weight.decode_rows_f32(at..end, &mut values)?;
            }
            let bytes = rounded(format, &values);
            sink.write(offset, &bytes)?;
            offset += bytes.len() as u64;
            at = end;
        }
        Ok(offset)
    }

    /// Planes of a coded format, word for word.
    #[expect(clippy::too_many_arguments, reason = "one step of `rows`, which has them at hand")]
    fn stored(
        &self,
        object: &PlannedObject,
        format: Format,
        shape: &[u64; 2],
        rows: Range<u64>,
        weights: &[SourceTensor<'_>],
        pieces: &[Piece],
        out: &mut RowPlanes,
    ) -> Result<(), ConvertError> {
        let k = shape[1];
        out.codes.clear();
        out.scales.clear();
        out.high.clear();
        out.global.clear();
        let mut raw = Vec::new();
        for piece in pieces {
            let weight = &weights[piece.weight];
            let p = weight.planes();
            let checkpoint = weight.checkpoint();
            let all = view_rows(weight.shape()).0.max(1);
            let per_row = p.weight.bytes / all;
            read_more(
                checkpoint,
                p.weight,
                piece.rows.start * per_row..piece.rows.end * per_row,
                &mut out.codes,
            )?;
            let (Some(scale), scheme) = (p.scale, weight.scheme()) else { continue };
            match scheme {
                Scheme::Nvfp4Multiplier { .. } | Scheme::Nvfp4Divisor { .. } | Scheme::Mxfp8 => {
                    let per_row = scale.bytes / all;
                    let range = piece.rows.start * per_row..piece.rows.end * per_row;
                    read_more(checkpoint, scale, range, &mut out.scales)?;
                }
                Scheme::Fp8Row { scale: dtype, .. } => {
                    let per_row = scale.bytes / all;
                    raw.clear();
                    read_more(
                        checkpoint,
                        scale,
                        piece.rows.start * per_row..piece.rows.end * per_row,
                        &mut raw,
                    )?;
                    if dtype == Dtype::Bf16 {
                        out.scales.extend_from_slice(&raw);
                    } else {
                        let start = out.scales.len();
                        out.scales.resize(start + 2 * (piece.rows.end - piece.rows.start) as usize, 0);
                        fp8::row_scales_exact(&floats(dtype, &raw), &mut out.scales[start..])
                            .map_err(|e| word_error(weight, scale, e))?;
                    }
                }
                Scheme::Fp8Block128 { scale: dtype } => {
                    let width = k.div_ceil(128) * dtype.bits() / 8;
                    let tiles = piece.rows.start / 128..piece.rows.end.div_ceil(128);
                    raw.clear();
                    read_more(checkpoint, scale, tiles.start * width..tiles.end * width, &mut raw)?;
                    out.scales.extend(floats(dtype, &raw).iter().flat_map(|s| s.to_le_bytes()));
                }
                _ => {}
            }
            let global = match weight.scheme() {
                Scheme::Fp8Tensor { .. } => weight.tensor_scale()?,
                _ => weight.global_scale()?,
            };
            if let (Some(global), true) = (global, out.global.is_empty()) {
                out.global.extend_from_slice(&global.to_le_bytes());
            }
        }
        // Where a row of the object came from, for messages.
        let origin = |e: FormatError, first: u64| {
            let FormatError::IllegalWord { what, word, mut place, why } = e else {
                return ConvertError::Format { what: object.id.clone(), source: Box::new(e) };
            };
            let mut left = place.row.saturating_sub(first);
            let mut weight = &weights[0];
            for piece in pieces {
                weight = &weights[piece.weight];
                place.row = piece.rows.start + left;
                if place.row < piece.rows.end {
                    break;
                }
                left -= piece.rows.end - piece.rows.start;
            }
            word_error(weight, weight.planes().weight, FormatError::IllegalWord { what, word, place, why })
        };
        if object.layout == Layout::BlockScaleK16M128x4V1 {
            let (codes, scales) = (std::mem::take(&mut out.codes), std::mem::take(&mut out.scales));
            let global = floats(Dtype::F32, &std::mem::take(&mut out.global)).first().copied().unwrap_or(1.0);
            nvfp4::pack_rows(object.layout, k as usize, &codes, &scales, global, out)
                .map_err(|e| origin(e, 0))?;
        }
        Rows::new(object.layout, format, shape, rows.clone(), &out.codes, &out.high, &out.scales, &out.global)
            .and_then(|r| r.validate_words())
            .map_err(|e| origin(e, rows.start))
    }

    /// The largest magnitude of an object's values: NVFP4's divisor follows from it before the first row is encoded.
    fn largest(
        &self,
        weights: &[SourceTensor<'_>],
        segments: &[Segment],
        k: u64,
        step: u64,
    ) -> Result<f32, ConvertError> {
        let (mut largest, mut values) = (0f32, Vec::new());
        for s in segments {
            let mut at = s.rows.start;
            while at < s.rows.end {
                self.interrupt.check()?;
                let end = s.rows.end.min(at + step);
                values.resize(((end - at) * k) as usize, 0.0);
                decode_flat(&weights[s.weight], at..end, k, &mut values)?;
                largest = largest.max(infernix_formats::amax(&values));
                at = end;
            }
        }
        Ok(largest)
    }

    /// Re-encodes the values of some pieces; rows are spread over the pool's threads.
    #[expect(clippy::too_many_arguments, reason = "one step of `rows`, which has them at hand")]
    fn encode(
        &self,
        method: Method,
        format: Format,
        k: u64,
        weights: &[SourceTensor<'_>],
        pieces: &[Piece],
        divisor: f32,
        out: &mut RowPlanes,
    ) -> Result<(), ConvertError> {
        // About a quarter MiB of values each: enough work to be worth a task, little enough to fill all threads.
        let block = ((1 << 16) / k.max(1)).max(1);
        let mut blocks = Vec::new();
        for piece in pieces {
            let mut at = piece.rows.start;
            while at < piece.rows.end {
                let end = piece.rows.end.min(at + block);
                blocks.push((piece.weight, at..end));
                at = end;
            }
        }
        let encode = |(w, rows): (usize, Range<u64>)| {
            let weight = &weights[w];
            let mut values = vec![0f32; ((rows.end - rows.start) * k) as usize];
            decode_flat(weight, rows.clone(), k, &mut values)?;
            encode_rows(method, format, k, &values, rows.start, divisor)
                .map_err(|e| word_error(weight, weight.planes().weight, e))
        };
        let encoded: Vec<RowPlanes> =
            self.pool.install(|| blocks.into_par_iter().map(encode).collect::<Result<_, ConvertError>>())?;
        out.codes.clear();
        out.high.clear();
        out.scales.clear();
        out.global.clear();
        if format == Format::Nvfp4 {
            out.global.extend(divisor.to_le_bytes());
        }
        for part in encoded {
            out.codes.extend_from_slice(&part.codes);
            out.high.extend_from_slice(&part.high);
            out.scales.extend_from_slice(&part.scales);
        }
        Ok(())
    }
}

/// Encodes rows of values by a method; `divisor` is NVFP4's.
pub(crate) fn encode_rows(
    method: Method,
    format: Format,
    k: u64,
    values: &[f32],
    first_row: u64,
    divisor: f32,
) -> Result<RowPlanes, FormatError> {
    let mut out = RowPlanes::default();
    if let Some(search) = method.nvfp4() {
        nvfp4::encode(Layout::BlockScaleK16V1, search, k as usize, values, divisor, first_row, &mut out)?;
        return Ok(out);
    }
    match method {
        Method::RowMaxabs => fp8::encode_row_maxabs(k as usize, values, first_row, &mut out)?,
        Method::Mse => groupwise::encode_mse(format, k as usize, values, first_row, &mut out)?,
        _ => groupwise::encode_absmax(format, k as usize, values, first_row, &mut out)?,
    }
    Ok(out)
}

/// Walks segments, cutting them into steps of rows.
struct Cursor<'a> {
    segments: &'a [Segment],
    index: usize,
    done: u64,
}

impl<'a> Cursor<'a> {
    fn new(segments: &'a [Segment]) -> Self {
        Self { segments, index: 0, done: 0 }
    }

    /// The pieces of the next `rows` rows.
    fn take(&mut self, mut rows: u64) -> Vec<Piece> {
        let mut out: Vec<Piece> = Vec::new();
        while rows > 0 {
            let Some(s) = self.segments.get(self.index) else { break };
            let start = s.rows.start + self.done;
            let take = rows.min(s.rows.end - start);
            match out.last_mut() {
                Some(last) if last.weight == s.weight && last.rows.end == start => last.rows.end += take,
                _ => out.push(Piece { weight: s.weight, rows: start..start + take }),
            }
            self.done += take;
            rows -= take;
            if start + take == s.rows.end {
                self.index += 1;
                self.done = 0;
            }
        }
        out
    }
}

/// INT32 words: the source's column of each stored column.
pub(crate) fn input_columns(weight: &SourceTensor<'_>) -> Vec<u8> {
    let heads = weight.stored_columns();
    let column = |i: u64| heads.as_ref().map_or(i, |h| h.source(i)) as u32;
    (0..weight.row_len()).flat_map(|i| column(i).to_le_bytes()).collect()
}

/// Refuses words of a vector that are not finite.
fn check_vector(
    checkpoint: &Checkpoint,
    info: &TensorInfo,
    first_element: u64,
    bytes: &[u8],
) -> Result<(), ConvertError> {
    if !matches!(info.dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32) {
        return Ok(());
    }
    let values = floats(info.dtype, bytes);
    let Some(at) = values.iter().position(|v| !v.is_finite()) else { return Ok(()) };
    let column = first_element + at as u64;
    Err(CheckpointError::IllegalWord {
        shard: checkpoint.shard_of(info).name.clone(),
        tensor: info.name.to_string(),
        row: 0,
        column,
        offset: info.offset + column * info.dtype.bits() / 8,
        expected: "a finite number",
        found: values[at].to_string(),
    }
    .into())
}

/// Count and first position of words that satisfy `is_nan`.
fn nan_words<const B: usize>(bytes: &[u8], is_nan: impl Fn([u8; B]) -> bool) -> (u64, usize) {
    let words = bytes.as_chunks::<B>().0;
    // A branch-free count first: it runs over every byte of a model.
    let count = words.iter().map(|w| u64::from(is_nan(*w))).sum();
    let first = if count > 0 { words.iter().position(|w| is_nan(*w)).unwrap_or(0) } else { 0 };
    (count, first)
}

fn read_whole(checkpoint: &Checkpoint, t: &TensorInfo, out: &mut Vec<u8>) -> Result<(), ConvertError> {
    out.clear();
    read_more(checkpoint, t, 0..t.bytes, out)
}

fn read_more(
    checkpoint: &Checkpoint,
    t: &TensorInfo,
    range: Range<u64>,
    out: &mut Vec<u8>,
) -> Result<(), ConvertError> {
    let start = out.len();
    out.resize(start + (range.end - range.start) as usize, 0);
    Ok(checkpoint.read(t, range, &mut out[start..])?)
}

/// Floating-point words as FP32, exactly.
pub(crate) fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::Bf16 => bytes.as_chunks::<2>().0.iter().map(|w| bf16_to_f32(u16::from_le_bytes(*w))).collect(),
        Dtype::F16 => bytes.as_chunks::<2>().0.iter().map(|w| f16_to_f32(u16::from_le_bytes(*w))).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|w| f32::from_le_bytes(*w)).collect(),
    }
}

/// FP32 words of narrower ones, exactly.
pub(crate) fn widened(dtype: Dtype, bytes: &[u8]) -> Vec<u8> {
    floats(dtype, bytes).iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Words of a direct format nearest to the values.
pub(crate) fn rounded(format: Format, values: &[f32]) -> Vec<u8> {
    match format {
        Format::Bf16 => values.iter().flat_map(|v| bf16_from_f32(*v).to_le_bytes()).collect(),
        Format::Fp16 => values.iter().flat_map(|v| f16_from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

fn word_error(weight: &SourceTensor<'_>, tensor: &TensorInfo, source: FormatError) -> ConvertError {
    let file = weight.checkpoint().shard_of(tensor).name.clone();
    ConvertError::Word { file, tensor: weight.name().to_owned(), source: Box::new(source) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_cross_segments_and_merge_runs() {
        let s = |weight, rows| Segment { weight, rows };
        let segments = [s(0, 0..4), s(0, 6..8), s(1, 0..3)];
        let mut c = Cursor::new(&segments);
        let mut next = |n| c.take(n).into_iter().map(|p| (p.weight, p.rows)).collect::<Vec<_>>();
        assert_eq!(next(3), [(0, 0..3)]);
        assert_eq!(next(4), [(0, 3..4), (0, 6..8), (1, 0..1)]);
        assert_eq!(next(9), [(1, 1..3)]);
        assert!(next(1).is_empty());
    }

    #[test]
    fn nan_is_found_and_infinity_is_not() {
        let bytes: Vec<u8> =
            [0x3F80u16, 0x7F80, 0xFFC0, 0x7F81].iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(nan_words::<2>(&bytes, |w| u16::from_le_bytes(w) & 0x7FFF > 0x7F80), (2, 2));
    }
}
