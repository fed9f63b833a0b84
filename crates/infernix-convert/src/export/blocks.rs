//! Words of an artifact's formats as GGML blocks, without changing a value.

use infernix_checkpoint::Dtype;
use infernix_checkpoint::gguf::names::{TiledHeads, Values};
use infernix_formats::ggml::GgmlType;
use infernix_formats::scalar::{bf16_to_f32, f16_to_f32};
use infernix_formats::{Format, PlaneRole};

use super::gguf::Stored;
use super::read::Reader;
use super::weights::Weight;
use crate::ConvertError;
use crate::fill::floats;

/// How words become those of a GGUF type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encode {
    /// They are.
    Copy(GgmlType),
    /// Direct words as FP32.
    Wide(Format),
    /// Codes and block scales of `nvfp4_mul` as blocks of 64.
    Nvfp4,
    /// Groups of signed integers with FP16 scales: the same integers, moved and biased.
    Group(Format),
}

/// How words of `format` in rows of `k` become blocks; `wide` asks for FP32 where words are direct.
pub(crate) fn encoder(format: Format, k: u64, wide: bool) -> Result<Encode, String> {
    let encode = match format {
        Format::Fp32 => Encode::Copy(GgmlType::F32),
        Format::Bf16 | Format::Fp16 if wide => Encode::Wide(format),
        Format::Bf16 => Encode::Copy(GgmlType::Bf16),
        Format::Fp16 => Encode::Copy(GgmlType::F16),
        Format::Ggml(t) => Encode::Copy(t),
        Format::Nvfp4Mul => Encode::Nvfp4,
        Format::Q4G64 | Format::Q5G64 | Format::Q8G32 => Encode::Group(format),
        Format::Nvfp4 => {
            return Err(
                "NVFP4 with a divisor: GGUF keeps a multiplier, and 1 / divisor would be rounded".into()
            );
        }
        Format::Fp8Row | Format::Fp8Tensor | Format::Fp8Block128 | Format::Mxfp8 => {
            return Err(format!("{format}: GGUF has no FP8 type"));
        }
        Format::Q6G64 => {
            return Err(format!(
                "{format}: GGUF's 6-bit blocks share one FP16 scale among 256 values, these have four"
            ));
        }
        other => return Err(format!("{other}: GGUF has no such type of weights")),
    };
    let block = encode.ty().block_len();
    if k % block != 0 {
        return Err(format!(
            "rows of {k} values of {format} are no whole blocks of {block} ({})",
            encode.ty()
        ));
    }
    Ok(encode)
}

impl Encode {
    /// The GGUF type.
    pub(crate) fn ty(self) -> GgmlType {
        match self {
            Encode::Copy(t) => t,
            Encode::Wide(_) => GgmlType::F32,
            Encode::Nvfp4 => GgmlType::Nvfp4,
            Encode::Group(Format::Q8G32) => GgmlType::Q8_0,
            Encode::Group(Format::Q5G64) => GgmlType::Q5_0,
            Encode::Group(_) => GgmlType::Q4_0,
        }
    }

    /// Columns that stay together when columns are moved.
    pub(crate) fn unit(self) -> u64 {
        match self {
            Encode::Copy(t) => t.block_len(),
            Encode::Wide(_) => 1,
            Encode::Nvfp4 => 16,
            Encode::Group(f) => f.group_spec().map_or(1, |s| s.group as u64),
        }
    }
}

/// The planes of some rows of `k` values.
#[derive(Default)]
struct Planes {
    codes: Vec<u8>,
    high: Vec<u8>,
    scales: Vec<u8>,
}

impl Planes {
    fn clear(&mut self) {
        self.codes.clear();
        self.high.clear();
        self.scales.clear();
    }

    /// Moves whole units of columns: stored unit u holds the source's unit `source(u)`.
    fn move_columns(&mut self, rows: u64, k: u64, encode: Encode, h: &TiledHeads) {
        let unit = encode.unit();
        // Rows of groups are padded to 128 values.
        let stored = if matches!(encode, Encode::Group(_)) { k.next_multiple_of(128) } else { k };
        let units = k / unit;
        for plane in [&mut self.codes, &mut self.high, &mut self.scales] {
            let row = plane.len() / rows.max(1) as usize;
            let per = row / (stored / unit).max(1) as usize;
            if per == 0 {
                continue;
            }
            for row in plane.chunks_exact_mut(row) {
                let source = row.to_vec();
                for u in 0..units {
                    let from = (h.source(u * unit) / unit) as usize * per;
                    row[u as usize * per..][..per].copy_from_slice(&source[from..from + per]);
                }
            }
        }
    }

    fn encode(&self, encode: Encode, rows: u64, k: u64, values: Values, out: &mut Vec<u8>) {
        let (rows, k) = (rows as usize, k as usize);
        match encode {
            Encode::Copy(GgmlType::F32) if values != Values::Same => {
                for w in self.codes.as_chunks::<4>().0 {
                    out.extend(values.apply(f32::from_le_bytes(*w)).to_le_bytes());
                }
            }
            Encode::Copy(_) => out.extend_from_slice(&self.codes),
            Encode::Wide(format) => {
                for w in self.codes.as_chunks::<2>().0 {
                    let word = u16::from_le_bytes(*w);
                    let v = if format == Format::Bf16 { bf16_to_f32(word) } else { f16_to_f32(word) };
                    out.extend(values.apply(v).to_le_bytes());
                }
            }
            Encode::Nvfp4 => {
                let blocks = self.codes.chunks_exact(32).zip(self.scales.chunks_exact(4));
                for (codes, scales) in blocks.take(rows * k / 64) {
                    out.extend_from_slice(scales);
                    for sub in codes.chunks_exact(8) {
                        let code = |i: usize| if i % 2 == 0 { sub[i / 2] & 15 } else { sub[i / 2] >> 4 };
                        out.extend((0..8).map(|j| code(j) | code(j + 8) << 4));
                    }
                }
            }
            Encode::Group(format) => {
                let per = |plane: &[u8]| plane.len() / rows.max(1);
                let (c, h, s) = (per(&self.codes), per(&self.high), per(&self.scales));
                for row in 0..rows {
                    let codes = &self.codes[row * c..(row + 1) * c];
                    let high = &self.high[row * h..(row + 1) * h];
                    let scales = &self.scales[row * s..(row + 1) * s];
                    (0..k / 32).for_each(|block| group(format, codes, high, scales, block, out));
                }
            }
        }
    }
}

/// One block of 32 from a row of groups.
fn group(format: Format, codes: &[u8], high: &[u8], scales: &[u8], block: usize, out: &mut Vec<u8>) {
    if format == Format::Q8G32 {
        out.extend_from_slice(&scales[2 * block..2 * block + 2]);
        out.extend_from_slice(&codes[32 * block..32 * block + 32]);
        return;
    }
    // Two blocks share a group of 64 and its scale; even lanes are low nibbles.
    let at = block / 2;
    out.extend_from_slice(&scales[2 * at..2 * at + 2]);
    let first = 32 * block;
    let nibble = |i: usize| codes[(first + i) / 2] >> (4 * ((first + i) % 2)) & 15;
    let bit = |i: usize| high[(first + i) / 8] >> ((first + i) % 8) & 1;
    if format == Format::Q5G64 {
        // Two's complement to a bias of 16: the top bit is turned round.
        let bits = (0..32).fold(0u32, |all, i| all | u32::from(bit(i) ^ 1) << i);
        out.extend(bits.to_le_bytes());
        out.extend((0..16).map(|i| nibble(i) | nibble(i + 16) << 4));
    } else {
        out.extend((0..16).map(|i| (nibble(i) ^ 8) | (nibble(i + 16) ^ 8) << 4));
    }
}

fn read(
    reader: &Reader<'_>,
    weight: &Weight,
    rows: std::ops::Range<u64>,
    planes: &mut Planes,
) -> Result<(), ConvertError> {
    reader.rows(weight, PlaneRole::Codes, rows.clone(), &mut planes.codes)?;
    reader.rows(weight, PlaneRole::HighBits, rows.clone(), &mut planes.high)?;
    if weight.format.direct_bytes().is_none() {
        reader.rows(weight, PlaneRole::Scales, rows, &mut planes.scales)?;
    }
    Ok(())
}

/// Bytes of words handled per step.
const STEP: u64 = 4 << 20;

impl Stored {
    /// Hands the tensor's bytes to `sink`, in order.
    pub(super) fn produce(
        &self,
        reader: &mut Reader<'_>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), ConvertError>,
    ) -> Result<(), ConvertError> {
        let (mut planes, mut out) = (Planes::default(), Vec::new());
        match self {
            Stored::Rows { weight, first, rows, heads, values, encode } => {
                let k = reader.row_len(weight)?;
                if let Some(object) = weight.columns {
                    check_columns(reader, weight, object, heads.as_ref())?;
                }
                // Rows of a patch embedding's frame are runs of the whole.
                let tiled = heads.as_ref().filter(|h| !h.columns);
                let moved = heads.as_ref().filter(|h| h.columns && weight.columns.is_none());
                let step = (STEP / (4 * k).max(1)).max(1);
                let mut row = 0;
                while row < *rows {
                    let end = (*rows).min(row + step);
                    planes.clear();
                    let mut at = row;
                    while at < end {
                        let source = tiled.map_or(first + at, |h| h.source(first + at));
                        let mut run = 1;
                        while at + run < end
                            && tiled.map_or(first + at + run, |h| h.source(first + at + run)) == source + run
                        {
                            run += 1;
                        }
                        read(reader, weight, source..source + run, &mut planes)?;
                        at += run;
                    }
                    if let Some(h) = moved {
                        planes.move_columns(end - row, k, *encode, h);
                    }
                    out.clear();
                    planes.encode(*encode, end - row, k, *values, &mut out);
                    sink(&out)?;
                    row = end;
                }
            }
            Stored::Joined { weights, encode } => {
                let k = reader.row_len(&weights[0])?;
                for row in 0..weights[0].shape[0] {
                    out.clear();
                    for weight in weights {
                        planes.clear();
                        read(reader, weight, row..row + 1, &mut planes)?;
                        planes.encode(*encode, 1, k, Values::Same, &mut out);
                    }
                    sink(&out)?;
                }
            }
            Stored::Experts { experts, matrix, encode } => {
                let [rows, k] = experts.matrix(*matrix);
                let format = experts.format(*matrix);
                for expert in 0..experts.experts {
                    planes.clear();
                    reader.expert(experts, expert, *matrix, PlaneRole::Codes, &mut planes.codes)?;
                    if format.group_spec().is_some() {
                        reader.expert(experts, expert, *matrix, PlaneRole::HighBits, &mut planes.high)?;
                    }
                    if matches!(encode, Encode::Nvfp4 | Encode::Group(_)) {
                        reader.expert(experts, expert, *matrix, PlaneRole::Scales, &mut planes.scales)?;
                    }
                    out.clear();
                    planes.encode(*encode, rows, k, Values::Same, &mut out);
                    sink(&out)?;
                }
            }
            Stored::ExpertScales { experts, matrix, input } => {
                if let (true, Some(object)) = (*input, experts.input_scales) {
                    let all = reader.object(object)?;
                    out.extend(all.chunks_exact(12).flat_map(|e| e[4 * matrix.index()..][..4].to_vec()));
                } else {
                    for expert in 0..experts.experts {
                        reader.expert(experts, expert, *matrix, PlaneRole::GlobalScale, &mut out)?;
                    }
                }
                sink(&out)?;
            }
        }
        Ok(())
    }
}

/// Words of a weight that its convention rounds: they do not come back.
pub(super) fn rounded(reader: &Reader<'_>, weight: &Weight, values: Values) -> Result<u64, ConvertError> {
    let k = reader.row_len(weight)?;
    let dtype = match weight.format {
        Format::Bf16 => Dtype::Bf16,
        Format::Fp16 => Dtype::F16,
        _ => Dtype::F32,
    };
    let mut words = Vec::new();
    reader.rows(weight, PlaneRole::Codes, 0..weight.elements() / k.max(1), &mut words)?;
    Ok(floats(dtype, &words).into_iter().filter(|v| !values.keeps(*v)).count() as u64)
}

/// Blocks that kept their file's order of columns are in GGUF's order already, if it is the same one.
fn check_columns(
    reader: &Reader<'_>,
    weight: &Weight,
    object: usize,
    heads: Option<&TiledHeads>,
) -> Result<(), ConvertError> {
    let bytes = reader.object(object)?;
    let same = bytes.as_chunks::<4>().0.iter().enumerate().all(|(i, w)| {
        let expected = heads.map_or(i as u64, |h| h.source(i as u64));
        u64::from(u32::from_le_bytes(*w)) == expected
    });
    match same {
        true => Ok(()),
        false => Err(ConvertError::Export {
            path: reader.artifact.path().to_owned(),
            reason: format!("{}: its columns are in an order that is not GGUF's", weight.name),
        }),
    }
}
