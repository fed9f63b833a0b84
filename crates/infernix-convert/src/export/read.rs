//! Reading the words of exported tensors from an artifact and its volume.

use std::ops::Range;

use infernix_artifact::ngram::Volume;
use infernix_artifact::{Artifact, Interrupt};
use infernix_formats::expert_bank::{self, BankShape, ExpertMatrix};
use infernix_formats::{Format, Layout, PlaneRole, RowShape, nvfp4, row_planes};

use super::weights::{ExpertWords, Experts, Weight};
use crate::ConvertError;

/// Reads words; keeps the record of the expert that was read last, because its planes are asked for one by one.
pub(crate) struct Reader<'a> {
    pub(crate) artifact: &'a Artifact,
    pub(crate) volume: Option<&'a Volume>,
    pub(crate) interrupt: &'a Interrupt,
    record: Option<(usize, u64, Vec<u8>)>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(artifact: &'a Artifact, volume: Option<&'a Volume>, interrupt: &'a Interrupt) -> Self {
        Self { artifact, volume, interrupt, record: None }
    }

    fn fail(&self, what: &str, reason: impl Into<String>) -> ConvertError {
        ConvertError::Export {
            path: self.artifact.path().to_owned(),
            reason: format!("{what}: {}", reason.into()),
        }
    }

    /// Bytes of an object.
    fn bytes(&self, object: usize, range: Range<u64>, out: &mut Vec<u8>) -> Result<(), ConvertError> {
        let object = &self.artifact.directory().objects[object];
        let at = out.len();
        out.resize(at + (range.end - range.start) as usize, 0);
        Ok(self.artifact.read_at(object.offset + range.start, &mut out[at..])?)
    }

    /// The whole of a small object.
    pub(crate) fn object(&self, object: usize) -> Result<Vec<u8>, ConvertError> {
        let bytes = self.artifact.directory().objects[object].bytes;
        let mut out = Vec::new();
        self.bytes(object, 0..bytes, &mut out)?;
        Ok(out)
    }

    /// Rows of an object of a weight (its row numbers are those of the object's own shape).
    fn object_rows(
        &self,
        object: usize,
        format: Format,
        layout: Layout,
        role: PlaneRole,
        rows: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), ConvertError> {
        let o = &self.artifact.directory().objects[object];
        let shape = o.shape().unwrap_or_default();
        let bad = |source| ConvertError::Format { what: o.id.clone(), source: Box::new(source) };
        let wide = match layout {
            // Scales of 128 rows are interleaved.
            Layout::BlockScaleK16M128x4V1 => {
                let all = RowShape::of(shape).map_err(bad)?.rows;
                rows.start / 128 * 128..rows.end.next_multiple_of(128).min(all)
            }
            _ => rows.clone(),
        };
        for plane in row_planes(layout, format, shape, wide.clone()).map_err(bad)? {
            if plane.role != role {
                continue;
            }
            if wide == rows && layout != Layout::BlockScaleK16M128x4V1 {
                return self.bytes(object, plane.range(), out);
            }
            let (mut stored, mut plain) = (Vec::new(), vec![0; plane.bytes as usize]);
            self.bytes(object, plane.range(), &mut stored)?;
            let k = RowShape::of(shape).map_err(bad)?.k;
            if role == PlaneRole::Scales {
                nvfp4::unpack_scales(layout, k as usize, &stored, &mut plain).map_err(bad)?;
            } else {
                plain = stored;
            }
            let per = plane.bytes / (wide.end - wide.start).max(1);
            let first = ((rows.start - wide.start) * per) as usize;
            out.extend_from_slice(&plain[first..first + ((rows.end - rows.start) * per) as usize]);
        }
        Ok(())
    }

    /// Values per row of the objects of a weight.
    pub(crate) fn row_len(&self, w: &Weight) -> Result<u64, ConvertError> {
        let Some(first) = w.parts.first() else { return Ok(1) };
        let o = &self.artifact.directory().objects[first.object];
        if w.format.direct_bytes().is_some() {
            return Ok(crate::plan::view_rows(&w.shape).1);
        }
        let bad = |source| ConvertError::Format { what: o.id.clone(), source: Box::new(source) };
        Ok(RowShape::of(o.shape().unwrap_or_default()).map_err(bad)?.k.max(1))
    }

    /// Appends a plane of rows `rows` of a weight, rows of [`Self::row_len`] values in the source's order. For tile scales
    /// the rows are whole tiles.
    pub(crate) fn rows(
        &self,
        w: &Weight,
        role: PlaneRole,
        rows: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), ConvertError> {
        self.interrupt.check()?;
        let k = self.row_len(w)?;
        let (begin, end) = (rows.start * k, rows.end * k);
        let first = w.parts.partition_point(|p| p.source_begin + p.len <= begin);
        for p in &w.parts[first..] {
            let (a, b) = (begin.max(p.source_begin), end.min(p.source_begin + p.len));
            if a >= b {
                break;
            }
            let (from, to) = (p.object_begin + a - p.source_begin, p.object_begin + b - p.source_begin);
            if let Some(width) = w.format.direct_bytes() {
                if role != PlaneRole::Codes {
                    break;
                }
                self.bytes(p.object, from * width..to * width, out)?;
                continue;
            }
            let aligned =
                if w.format == Format::Fp8Block128 && role == PlaneRole::Scales { 128 * k } else { k };
            let whole = from % aligned == 0 && a % aligned == 0 && (b - a) % k == 0;
            if !whole {
                return Err(self.fail(&w.name, "it is bound in pieces that cut rows or tiles of its object"));
            }
            self.object_rows(p.object, w.format, w.layout, role, from / k..to / k, out)?;
        }
        Ok(())
    }

    /// The four bytes of a weight's global scale.
    pub(crate) fn global(&self, w: &Weight) -> Result<Vec<u8>, ConvertError> {
        let Some(first) = w.parts.first() else { return Ok(Vec::new()) };
        let mut out = Vec::new();
        self.object_rows(first.object, w.format, w.layout, PlaneRole::GlobalScale, 0..0, &mut out)?;
        Ok(out)
    }

    /// A plane of an expert's matrix.
    pub(crate) fn expert(
        &mut self,
        e: &Experts,
        expert: u64,
        m: ExpertMatrix,
        role: PlaneRole,
        out: &mut Vec<u8>,
    ) -> Result<(), ConvertError> {
        self.interrupt.check()?;
        let [rows, k] = e.matrix(m);
        if let Some((parent, first)) = e.parent(expert, m) {
            return self.rows(parent, role, first..first + rows, out);
        }
        let ExpertWords::Bank { object, format, layout } = &e.words else { return Ok(()) };
        let (object, o) = (*object, &self.artifact.directory().objects[*object]);
        let bad = |source| ConvertError::Format { what: o.id.clone(), source: Box::new(source) };
        let shape = BankShape::of(*layout, *format, o.shape().unwrap_or_default()).map_err(bad)?;
        if role == PlaneRole::GlobalScale {
            let at = shape.record(shape.experts).start + 12 * expert + 4 * m.index() as u64;
            return self.bytes(object, at..at + 4, out);
        }
        let record = shape.record(expert);
        if *layout == Layout::GgmlExpertV1 {
            let blocks = shape.blocks(m);
            return self.bytes(object, record.start + blocks.start..record.start + blocks.end, out);
        }
        if self.record.as_ref().is_none_or(|(o, x, _)| (*o, *x) != (object, expert)) {
            let mut buffer = self.record.take().map(|r| r.2).unwrap_or_default();
            buffer.clear();
            self.bytes(object, record, &mut buffer)?;
            self.record = Some((object, expert, buffer));
        }
        let Some((.., record)) = &self.record else { return Ok(()) };
        if *layout == Layout::Fp8ExpertBlock128V1 {
            let (codes, scales) = expert_bank::fp8_planes(&shape, record, m).map_err(bad)?;
            out.extend_from_slice(if role == PlaneRole::Codes { codes } else { scales });
            return Ok(());
        }
        let (mut codes, mut scales) = (vec![0; (rows * k / 2) as usize], vec![0; (rows * k / 16) as usize]);
        expert_bank::unpack_nvfp4(&shape, record, m, &mut codes, &mut scales).map_err(bad)?;
        out.extend_from_slice(if role == PlaneRole::Codes { &codes } else { &scales });
        Ok(())
    }

    /// Rows of the volume, one after the other.
    pub(crate) fn table(&self, rows: Range<u64>, out: &mut Vec<u8>) -> Result<(), ConvertError> {
        self.interrupt.check()?;
        let Some(volume) = self.volume else { return Err(self.fail("n-gram table", "no volume is open")) };
        out.resize(((rows.end - rows.start) * u64::from(volume.geometry().row_bytes)) as usize, 0);
        Ok(volume.read_rows(rows.start, out)?)
    }
}
