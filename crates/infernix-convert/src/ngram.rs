//! The n-gram table: found among its parts in the checkpoint, checked against the derivation, streamed row by row.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use infernix_artifact::Interrupt;
use infernix_checkpoint::{Dtype, Scheme, SourceTensor};
use infernix_formats::ggml;
use infernix_formats::scalar::{bf16_to_f32, e4m3_is_finite, e4m3_is_scale, e4m3_to_f32};
use infernix_formats::{amax, fp8};
use infernix_model::{ModelConfig, Parameter, Source};
use serde_json::{Value, json};

use crate::ConvertError;
use crate::sources::{Sources, WeightRef};

/// Bytes of a block of the volume, and of its header.
pub(crate) const BLOCK_BYTES: u64 = 4096;

pub use infernix_artifact::ngram::RowFormat;

fn row_format(scheme: Scheme) -> Option<RowFormat> {
    match scheme {
        Scheme::Fp8Tensor { .. } => Some(RowFormat::Fp8E4m3fn),
        Scheme::Plain(Dtype::Bf16) => Some(RowFormat::Bf16),
        Scheme::Nvfp4Multiplier { .. } => Some(RowFormat::Nvfp4Mul),
        Scheme::Nvfp4Divisor { .. } => Some(RowFormat::Nvfp4),
        Scheme::Ggml(t) => Some(RowFormat::Ggml(t)),
        _ => None,
    }
}

/// Bytes of a row of `width` values; 0 where the format cannot hold that width.
fn row_bytes(format: RowFormat, width: u64) -> u64 {
    u32::try_from(width).ok().and_then(|w| format.row_bytes(w)).map_or(0, u64::from)
}

/// One layer's table.
#[derive(Debug, Clone)]
pub struct TablePlan {
    /// Layer that reads it.
    pub layer: u64,
    /// Its number among the tables.
    pub table: usize,
    /// Rows.
    pub rows: u64,
    /// Values of a row.
    pub width: u64,
    pub(crate) format: RowFormat,
    pub(crate) parts: Vec<(WeightRef, u64)>,
    pub(crate) buffers: Option<(usize, String)>,
    /// BF16 rows that become FP8 by [`Method::TableMaxabs`](crate::Method), and the scale once it is known.
    pub(crate) encoded: Option<Arc<Mutex<Option<u16>>>>,
}

impl TablePlan {
    /// Makes FP8 rows of the source's BF16 ones.
    pub(crate) fn encode(&mut self) {
        self.format = RowFormat::Fp8E4m3fn;
        self.encoded = Some(Arc::default());
    }

    /// Source weights.
    pub(crate) fn names(&self) -> Vec<String> {
        self.parts.iter().map(|(w, _)| w.name.clone()).collect()
    }

    /// The BF16 scale of an encoded table: read through once for its largest magnitude, before any row can be encoded.
    pub(crate) fn scale(&self, sources: &Sources, interrupt: &Interrupt) -> Result<u16, ConvertError> {
        let Some(slot) = &self.encoded else { return Ok(0) };
        let mut slot = slot.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(scale) = *slot {
            return Ok(scale);
        }
        let (mut largest, mut values) = (0f32, Vec::new());
        let step = (SCAN_VALUES / self.width.max(1)).max(1);
        for (part, rows) in &self.parts {
            let weight = sources.weight(part)?;
            let mut at = 0;
            while at < *rows {
                interrupt.check()?;
                let end = (at + step).min(*rows);
                values.resize(((end - at) * self.width) as usize, 0.0);
                weight.decode_rows_f32(at..end, &mut values)?;
                largest = largest.max(amax(&values));
                at = end;
            }
        }
        let scale = fp8::table_scale(largest);
        *slot = Some(scale);
        Ok(scale)
    }
}

/// Values read per step of a scan.
const SCAN_VALUES: u64 = 1 << 20;

/// The volume of a conversion.
#[derive(Debug, Clone)]
pub struct NgramPlan {
    /// The volume's file.
    pub path: PathBuf,
    /// Row format.
    pub format: RowFormat,
    /// Rows of all tables.
    pub rows: u64,
    /// Values of a row.
    pub width: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Length of the file.
    pub bytes: u64,
    /// The existing volume that is used instead of writing one.
    pub reuse: Option<PathBuf>,
    /// Tables in ascending layer order.
    pub tables: Vec<TablePlan>,
}

impl NgramPlan {
    pub(crate) fn new(path: PathBuf, reuse: bool) -> Self {
        let reuse = reuse.then(|| path.clone());
        Self {
            path,
            format: RowFormat::Bf16,
            rows: 0,
            width: 0,
            row_bytes: 0,
            bytes: 0,
            reuse,
            tables: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, table: TablePlan, checkpoint: &Path) -> Result<(), ConvertError> {
        let fail = |reason: String| ConvertError::Ngram { path: checkpoint.to_owned(), reason };
        if let Some(first) = self.tables.first()
            && (first.width != table.width || first.format != table.format)
        {
            return Err(fail(format!(
                "layer {} has rows of {} {} values, layer {} of {} {}; one volume holds one kind of row",
                first.layer,
                first.width,
                first.format.name(),
                table.layer,
                table.width,
                table.format.name()
            )));
        }
        (self.format, self.width) = (table.format, table.width);
        self.row_bytes = row_bytes(table.format, table.width);
        self.rows += table.rows;
        if self.row_bytes == 0 || self.row_bytes > BLOCK_BYTES {
            return Err(fail(format!(
                "a row of {} bytes does not fit a block of {BLOCK_BYTES}",
                self.row_bytes
            )));
        }
        self.tables.push(table);
        self.bytes = BLOCK_BYTES * (1 + self.blocks());
        Ok(())
    }

    /// Rows in a block.
    #[must_use]
    pub fn rows_per_block(&self) -> u64 {
        BLOCK_BYTES / self.row_bytes.max(1)
    }

    /// Blocks of the volume.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.rows.div_ceil(self.rows_per_block())
    }

    /// The `ngram` member of a plan's document.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "path": self.path.display().to_string(), "format": self.format.name(), "rows": self.rows,
            "row_bytes": self.row_bytes, "bytes": self.bytes, "reused": self.reuse.is_some(),
        })
    }

    /// `ngram_table` of the text configuration, with a placeholder for the volume's id.
    pub(crate) fn config(&self) -> Value {
        let mut value = json!({
            "format": self.format.name(), "rows": self.rows, "row_bytes": self.row_bytes,
            "rows_per_block": self.rows_per_block(), "block_bytes": BLOCK_BYTES, "header_bytes": BLOCK_BYTES,
            "blocks": self.blocks(), "file_bytes": self.bytes, "volume_id": "0".repeat(32),
        });
        if self.tables.len() > 1 {
            let mut first = 0;
            let tables: Vec<_> = self
                .tables
                .iter()
                .map(|t| {
                    let record = json!({"layer": t.layer, "first_row": first, "rows": t.rows});
                    first += t.rows;
                    record
                })
                .collect();
            value["tables"] = json!(tables);
        }
        value
    }

    /// Scale words of the volume's extension, one a table.
    ///
    /// # Errors
    /// A scale that is not positive and finite.
    pub(crate) fn scale_words(&self, sources: &Sources) -> Result<Vec<f32>, ConvertError> {
        let mut out = Vec::new();
        for t in &self.tables {
            if t.encoded.is_some() {
                out.push(bf16_to_f32(t.scale(sources, &Interrupt::default())?));
                continue;
            }
            let Some((first, _)) = t.parts.first() else { continue };
            let weight = sources.weight(first)?;
            let scale = match self.format {
                RowFormat::Bf16 => None,
                RowFormat::Fp8E4m3fn => weight.tensor_scale()?,
                RowFormat::Nvfp4Mul | RowFormat::Nvfp4 => weight.global_scale()?,
                RowFormat::Ggml(_) => None,
            };
            out.extend(scale);
        }
        Ok(out)
    }

    /// Compares the checkpoint's hash buffers with the derivation.
    ///
    /// # Errors
    /// A buffer of other values.
    pub(crate) fn check_buffers(&self, sources: &Sources, config: &ModelConfig) -> Result<(), ConvertError> {
        let Some(ple) = &config.ple else { return Ok(()) };
        let path = sources.main_path().to_owned();
        let fail = |reason: String| ConvertError::Ngram { path: path.clone(), reason };
        let derived = infernix_model::ngram::constants(ple, config.vocab).map_err(|e| fail(e.to_string()))?;
        for t in &self.tables {
            let Some((source, prefix)) = &t.buffers else { continue };
            let Some(c) = derived.get(t.table) else { continue };
            for (name, expected) in BUFFERS.iter().zip([&c.multipliers, &c.head_sizes, &c.head_offsets]) {
                let checkpoint = sources.checkpoint(*source);
                let name = format!("{prefix}.{name}");
                let Some(info) = checkpoint.get(&name) else { continue };
                let bytes = checkpoint.read_all(info)?;
                for (i, (word, expected)) in bytes.as_chunks::<8>().0.iter().zip(expected.iter()).enumerate()
                {
                    let found = i64::from_le_bytes(*word);
                    if u64::try_from(found) != Ok(*expected) {
                        return Err(fail(format!(
                            "{}: tensor {name}[{i}] is {found}, but config.json (base, seed, vocabulary, divisor) gives {expected}; \
                             the checkpoint and its config are of different models",
                            sources.file_of(*source, info)
                        )));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Names of the int64 hash buffers.
const BUFFERS: [&str; 3] = ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"];

/// Finds the table of a parameter; checks dtypes, shapes, row count and the buffers' shapes.
pub(crate) fn plan_table(
    sources: &Sources,
    config: &ModelConfig,
    p: &Parameter,
    role: Option<&str>,
    missing: &mut Vec<String>,
) -> Result<Option<TablePlan>, ConvertError> {
    let Source::NgramTable { prefix, buffers, parts: announced } = &p.source else { return Ok(None) };
    let fail = |reason: String| ConvertError::Ngram { path: sources.main_path().to_owned(), reason };
    let (rows, width) = (p.shape[0], p.shape[1]);
    let part_name = |k: u64| format!("{prefix}.shard_{k}.weight");
    let mut found: Vec<(usize, SourceTensor<'_>)> = Vec::new();
    if let Some(whole) = sources.locate(&format!("{prefix}.weight"), p.component, role, true)? {
        found.push(whole);
    } else if let Some(first) = sources.locate(&part_name(0), p.component, role, true)? {
        let source = first.0;
        found.push(first);
        while let Some(next) = sources.checkpoint(source).resolve(&part_name(found.len() as u64))? {
            found.push((source, next));
        }
    } else {
        missing.push(part_name(0));
        return Ok(None);
    }
    let total: u64 = found.iter().map(|(_, w)| w.rows()).sum();
    if total < rows && (found.len() as u64) < *announced && found.len() > 1 {
        missing.extend((found.len() as u64..*announced).map(part_name));
        return Ok(None);
    }
    let scheme = found[0].1.scheme();
    let format = row_format(scheme).ok_or_else(|| {
        fail(format!(
            "{} is stored as {scheme}; a volume holds rows in FP8 per tensor, BF16, NVFP4 or GGML blocks; name another table with --source table=PATH",
            found[0].1.name()
        ))
    })?;
    let mut parts = Vec::new();
    for (source, weight) in &found {
        if weight.scheme() != scheme {
            return Err(fail(format!(
                "{} is {}, but {} is {scheme}",
                weight.name(),
                weight.scheme(),
                found[0].1.name()
            )));
        }
        if weight.shape().len() != 2 || weight.row_len() != width {
            let (file, tensor) = (sources.file_of(*source, weight.planes().weight), weight.name().to_owned());
            let expected = vec![rows / found.len() as u64, width];
            return Err(ConvertError::Shape { file, tensor, expected, found: weight.shape().to_vec() });
        }
        sources.consume_weight(*source, weight);
        parts.push((WeightRef { source: *source, name: weight.name().to_owned() }, weight.rows()));
    }
    if total != rows {
        return Err(fail(format!("its {} parts have {total} rows, config.json gives {rows}", found.len())));
    }
    // The hash buffers repeat what the configuration derives; they are compared, not stored.
    let mut buffer_source = None;
    for (index, source) in sources.list().iter().enumerate() {
        for name in BUFFERS {
            let name = format!("{buffers}.{name}");
            let Some(info) = source.checkpoint.get(&name) else { continue };
            if info.dtype != Dtype::I64 {
                return Err(ConvertError::Scheme {
                    file: sources.file_of(index, info),
                    tensor: name,
                    expected: "I64".into(),
                    found: info.dtype.to_string(),
                    advice: "fetch the file again",
                });
            }
            sources.consume(index, &name);
            buffer_source.get_or_insert((index, buffers.clone()));
        }
    }
    if let (Some((index, prefix)), Some(ple)) = (&buffer_source, &config.ple) {
        let heads = (ple.ngram_size - 1) * ple.heads_per_ngram;
        for (name, length) in BUFFERS.iter().zip([ple.ngram_size, heads, heads]) {
            let name = format!("{prefix}.{name}");
            if let Some(info) = sources.checkpoint(*index).get(&name)
                && *info.shape != [length]
            {
                let file = sources.file_of(*index, info);
                let (expected, found) = (vec![length], info.shape.to_vec());
                return Err(ConvertError::Shape { file, tensor: name, expected, found });
            }
        }
    }
    let layer = p.layer.unwrap_or(0);
    Ok(Some(TablePlan {
        layer: layer as u64,
        table: config.ple_table(layer).unwrap_or(0),
        rows,
        width,
        format,
        parts,
        buffers: buffer_source,
        encoded: None,
    }))
}

/// Reads rows of the tables as the volume stores them.
pub(crate) struct TableReader<'s> {
    /// First row, part, its source tensor, and the scale where rows are encoded.
    parts: Vec<(u64, SourceTensor<'s>, Option<u16>)>,
    format: RowFormat,
    width: u64,
    rows: u64,
}

impl<'s> TableReader<'s> {
    pub(crate) fn new(plan: &NgramPlan, sources: &'s Sources) -> Result<Self, ConvertError> {
        let mut parts = Vec::new();
        let mut first = 0;
        for table in &plan.tables {
            let encoded = table.encoded.as_ref();
            let scale = encoded.map(|_| table.scale(sources, &Interrupt::default())).transpose()?;
            for (weight, rows) in &table.parts {
                parts.push((first, sources.weight(weight)?, scale));
                first += rows;
            }
        }
        Ok(Self { parts, format: plan.format, width: plan.width, rows: first })
    }

    /// Reads `rows` into `out`, one after the other without padding, and checks their words.
    ///
    /// # Errors
    /// I/O; a code or scale without a value.
    pub(crate) fn read(
        &self,
        rows: Range<u64>,
        out: &mut Vec<u8>,
        scratch: &mut Vec<u8>,
    ) -> Result<(), ConvertError> {
        let row_bytes = row_bytes(self.format, self.width) as usize;
        out.clear();
        out.resize((rows.end.min(self.rows) - rows.start) as usize * row_bytes, 0);
        let mut at = rows.start;
        let mut index = self.parts.partition_point(|(first, ..)| *first <= at).saturating_sub(1);
        while at < rows.end {
            let (first, weight, scale) = &self.parts[index];
            index += 1;
            let take = (rows.end.min(first + weight.rows())) - at;
            if take == 0 {
                continue;
            }
            let begin = (at - rows.start) as usize * row_bytes;
            let target = &mut out[begin..begin + take as usize * row_bytes];
            let rows = at - first..at - first + take;
            match scale {
                Some(scale) => self.encode_part(weight, rows, *scale, target)?,
                None => self.read_part(weight, rows, target, scratch)?,
            }
            at += take;
        }
        Ok(())
    }

    /// Hands the source digests what an interrupted run has written: rows on disk from `first` on are the source's words,
    /// so that the parts they come from count as read whole without reading them again.
    pub(crate) fn note(&self, first: u64, stored: &[u8]) {
        let row = row_bytes(self.format, self.width).max(1) as usize;
        let rows = first..first + (stored.len() / row) as u64;
        let part = self.parts.partition_point(|(first, ..)| *first <= rows.start).saturating_sub(1);
        for (begin, weight, scale) in &self.parts[part.min(self.parts.len())..] {
            if *begin >= rows.end {
                break;
            }
            let (a, b) = (rows.start.max(*begin), rows.end.min(begin + weight.rows()));
            // Encoded rows are other words; their source was read through for its scale.
            if a >= b || scale.is_some() {
                continue;
            }
            let bytes = &stored[(a - rows.start) as usize * row..(b - rows.start) as usize * row];
            let (a, b) = (a - begin, b - begin);
            let planes = weight.planes();
            let half = match (self.format, planes.scale) {
                (RowFormat::Nvfp4 | RowFormat::Nvfp4Mul, Some(_)) => (self.width / 2) as usize,
                _ => row,
            };
            let plane = |t, from: usize, to: usize| {
                let width = (to - from) as u64;
                let words: Vec<u8> = bytes.chunks_exact(row).flat_map(|r| &r[from..to]).copied().collect();
                weight.checkpoint().note_bytes(t, a * width..b * width, &words);
            };
            plane(planes.weight, 0, half);
            if let (true, Some(scales)) = (half < row, planes.scale) {
                plane(scales, half, row);
            }
        }
    }

    /// Adds the differences between stored FP8 rows and the exact values that they were made from.
    pub(crate) fn errors(
        &self,
        rows: Range<u64>,
        stored: &[u8],
        errors: &mut crate::verify::Errors,
    ) -> Result<(), ConvertError> {
        for (first, weight, scale) in &self.parts {
            let (a, b) = (rows.start.max(*first), rows.end.min(first + weight.rows()));
            let Some(scale) = scale.filter(|_| a < b) else { continue };
            let mut exact = vec![0f32; ((b - a) * self.width) as usize];
            weight.decode_rows_f32(a - first..b - first, &mut exact)?;
            let at = ((a - rows.start) * self.width) as usize;
            let s = bf16_to_f32(scale);
            let decoded: Vec<f32> =
                stored[at..at + exact.len()].iter().map(|c| e4m3_to_f32(*c) * s).collect();
            errors.add(&exact, &decoded, self.width, a);
        }
        Ok(())
    }

    fn encode_part(
        &self,
        weight: &SourceTensor<'_>,
        rows: Range<u64>,
        scale: u16,
        out: &mut [u8],
    ) -> Result<(), ConvertError> {
        let mut values = vec![0f32; out.len()];
        weight.decode_rows_f32(rows, &mut values)?;
        fp8::encode_table(self.width as usize, &values, scale, out).map_err(|source| ConvertError::Word {
            file: weight.checkpoint().shard_of(weight.planes().weight).name.clone(),
            tensor: weight.name().to_owned(),
            source: Box::new(source),
        })
    }

    fn read_part(
        &self,
        weight: &SourceTensor<'_>,
        rows: Range<u64>,
        out: &mut [u8],
        scratch: &mut Vec<u8>,
    ) -> Result<(), ConvertError> {
        let checkpoint = weight.checkpoint();
        let codes = weight.planes().weight;
        let illegal = |row: u64, column: u64, what: &str, word: u32| ConvertError::Ngram {
            path: checkpoint.path().to_owned(),
            reason: format!(
                "{}: tensor {}: {what} {word:#x} at row {row}, column {column} has no value; the checkpoint is damaged",
                checkpoint.shard_of(codes).name,
                codes.name
            ),
        };
        match self.format {
            RowFormat::Fp8E4m3fn | RowFormat::Bf16 | RowFormat::Ggml(_) => {
                let per = row_bytes(self.format, self.width);
                checkpoint.read(codes, rows.start * per..rows.end * per, out)?;
                if self.format == RowFormat::Fp8E4m3fn
                    && let Some(at) = out.iter().position(|c| !e4m3_is_finite(*c))
                {
                    let at_row = rows.start + at as u64 / self.width;
                    return Err(illegal(at_row, at as u64 % self.width, "code", u32::from(out[at])));
                }
                if let RowFormat::Ggml(t) = self.format {
                    ggml::validate(t, out, self.width, rows.start).map_err(|source| ConvertError::Word {
                        file: checkpoint.shard_of(codes).name.clone(),
                        tensor: codes.name.to_string(),
                        source: Box::new(source),
                    })?;
                }
            }
            _ => {
                let (half, groups) = ((self.width / 2) as usize, (self.width / 16) as usize);
                let count = (rows.end - rows.start) as usize;
                scratch.resize(count * (half + groups), 0);
                let (code_bytes, scale_bytes) = scratch.split_at_mut(count * half);
                checkpoint.read(codes, rows.start * half as u64..rows.end * half as u64, code_bytes)?;
                let scale = weight.planes().scale.ok_or_else(|| illegal(0, 0, "missing block scale", 0))?;
                checkpoint.read(scale, rows.start * groups as u64..rows.end * groups as u64, scale_bytes)?;
                if let Some(at) = scale_bytes.iter().position(|s| !e4m3_is_scale(*s)) {
                    let row = rows.start + (at / groups) as u64;
                    return Err(illegal(
                        row,
                        16 * (at % groups) as u64,
                        "block scale",
                        u32::from(scale_bytes[at]),
                    ));
                }
                let rows = code_bytes.chunks_exact(half).zip(scale_bytes.chunks_exact(groups));
                for (out, (c, s)) in out.chunks_exact_mut(half + groups).zip(rows) {
                    out[..half].copy_from_slice(c);
                    out[half..].copy_from_slice(s);
                }
            }
        }
        Ok(())
    }
}
