//! What varies from round to round, on the device: one upload a round, at fixed addresses.

use super::state::COLUMNS;
use super::vram::{Vram, fault};
use crate::backend::{CallKind, StepMeta};
use crate::error::EngineError;
use infernix_cuda::DeviceBuffer;
use infernix_cuda::driver::{PinnedBuffer, Stream};
use infernix_cuda::kernels::rows::Lanes;
use std::ops::Range;

/// Windows of a round, at most.
const WINDOWS: usize = 64;

/// Memory for the description of rounds of one size.
pub(super) struct Board {
    host: PinnedBuffer,
    device: DeviceBuffer,
    rows: usize,
    lanes: usize,
    pitch: usize,
}

/// A round in progress.
pub(super) struct Round {
    pub(super) meta: StepMeta,
    pub(super) lanes: Lanes,
    /// I32 `[rows]` tokens, and tokens after them.
    pub(super) ids: [u64; 2],
    /// I32 `[lanes][pitch]` pages.
    pub(super) tables: u64,
    pub(super) pitch: usize,
    pub(super) lane_rows: Vec<Range<usize>>,
    /// Tokens that no row's prefix exceeds. In decode rounds a power of two, so that rounds share graphs.
    pub(super) longest: usize,
    /// Rows that operations concern: all, or a window of a long prompt.
    pub(super) window: Range<usize>,
    /// Lanes and ids of all rows, and I32 `[2]` and `[1]` for bounds and counts of a window.
    whole: (Lanes, [u64; 2]),
    bounds: Vec<(u64, Range<usize>)>,
}

impl Round {
    pub(super) fn is_decode(&self) -> bool {
        self.meta.kind == CallKind::Decode
    }

    /// Sequence index of the first column of a lane.
    pub(super) fn start(&self, lane: usize) -> usize {
        self.meta.lanes[lane].start + self.window.start
    }

    /// Whether the window continues one of the same layer.
    pub(super) fn continues(&self) -> bool {
        self.window.start > 0
    }

    /// Whether the window is a layer's last.
    pub(super) fn is_last(&self) -> bool {
        self.window.end == self.whole.0.rows
    }

    /// Operations concern `rows` from here on, one of the windows that the round was sent with.
    pub(super) fn look_at(&mut self, rows: Range<usize>) -> bool {
        let (all, ids) = self.whole;
        let Some((at, _)) = self.bounds.iter().find(|(_, r)| *r == rows) else { return false };
        let by = |p: u64, n: usize| p + (4 * n * rows.start) as u64;
        self.lanes = Lanes {
            row_lane: by(all.row_lane, 1),
            row_pos: by(all.row_pos, 1),
            positions: by(all.positions, 3),
            first: *at,
            count: at + 8,
            // Later windows of a layer go on from where the one before left the state.
            slots: if rows.start > 0 { all.out_slots } else { all.slots },
            rows: rows.len(),
            ..all
        };
        self.ids = ids.map(|p| by(p, 1));
        self.lane_rows = std::iter::once(0..rows.len()).collect();
        self.longest = self.meta.lanes[0].start + rows.end;
        self.window = rows;
        true
    }
}

impl Board {
    /// Bytes of a board.
    pub(super) fn bytes(rows: usize, lanes: usize, pitch: usize) -> usize {
        4 * (7 * rows + 4 * lanes + 1 + lanes * pitch + 3 * WINDOWS + 64)
    }

    /// Rounds of at most `rows` rows in `lanes` lanes of at most `pitch` pages.
    pub(super) fn new(vram: &Vram, rows: usize, lanes: usize, pitch: usize) -> Result<Self, EngineError> {
        let bytes = Board::bytes(rows, lanes, pitch);
        Ok(Board {
            host: vram.device.pinned(bytes).map_err(fault)?,
            device: vram.alloc("rounds", bytes)?,
            rows,
            lanes,
            pitch,
        })
    }

    pub(super) fn holds(&self, meta: &StepMeta) -> bool {
        meta.rows() <= self.rows && meta.lanes.len() <= self.lanes
    }

    /// Writes a round and sends it. `half`: current half of every slot.
    pub(super) fn send(
        &mut self,
        stream: &Stream,
        meta: StepMeta,
        half: &[usize],
        windows: &[Range<usize>],
    ) -> Result<Round, EngineError> {
        let (rows, lanes, pitch) = (self.rows, self.lanes, self.pitch);
        let mut at = 0;
        let mut next = |n: usize| {
            let r = at..at + n;
            at += n;
            r
        };
        let (ids, after, row_lane, row_pos, positions) =
            (next(rows), next(rows), next(rows), next(rows), next(3 * rows));
        let (first, count, slots, out_slots) = (next(lanes + 1), next(lanes), next(lanes), next(lanes));
        let bounds = next(3 * WINDOWS);
        let tables = next(lanes * pitch);
        let words = tables.start + meta.lanes.len() * pitch;
        if windows.len() > WINDOWS {
            let what = format!("{} windows in a round, at most {WINDOWS}", windows.len());
            return Err(EngineError::Round(what));
        }
        let mut put = |i: usize, v: usize| {
            self.host.as_mut_slice()[4 * i..4 * i + 4].copy_from_slice(&(v as u32).to_le_bytes());
        };
        let mut lane_rows = Vec::with_capacity(meta.lanes.len());
        let (mut r, mut longest) = (0, 0);
        for (l, lane) in meta.lanes.iter().enumerate() {
            let n = lane.ids.len();
            if meta.kind == CallKind::Decode && n > COLUMNS {
                return Err(EngineError::Round(format!(
                    "lane {l} has {n} columns, at most {COLUMNS} in decode"
                )));
            }
            put(first.start + l, r);
            put(count.start + l, n);
            put(slots.start + l, 2 * lane.slot + half[lane.slot]);
            put(out_slots.start + l, 2 * lane.slot + 1 - half[lane.slot]);
            lane.pages
                .iter()
                .take(pitch)
                .enumerate()
                .for_each(|(i, p)| put(tables.start + l * pitch + i, *p as usize));
            for (c, id) in lane.ids.iter().enumerate() {
                put(ids.start + r + c, *id as usize);
                put(after.start + r + c, lane.next_ids.get(c).map_or(0, |v| *v as usize));
                put(row_lane.start + r + c, l);
                put(row_pos.start + r + c, lane.start + c);
                for a in 0..3 {
                    put(positions.start + 3 * (r + c) + a, lane.positions[c][a] as usize);
                }
            }
            lane_rows.push(r..r + n);
            r += n;
            longest = longest.max(lane.start + n);
        }
        put(first.start + meta.lanes.len(), r);
        for (i, w) in windows.iter().enumerate() {
            put(bounds.start + 3 * i, 0);
            put(bounds.start + 3 * i + 1, w.len());
            put(bounds.start + 3 * i + 2, w.len());
        }
        stream.copy(self.device.ptr(), self.host.device_ptr(), 4 * words).map_err(fault)?;
        let address = |r: &Range<usize>| self.device.at(4 * r.start);
        if meta.kind == CallKind::Decode {
            longest = longest.next_power_of_two().max(1024);
        }
        let bounds = windows
            .iter()
            .enumerate()
            .map(|(i, w)| (self.device.at(4 * (bounds.start + 3 * i)), w.clone()))
            .collect();
        let all = Lanes {
            row_lane: address(&row_lane),
            row_pos: address(&row_pos),
            positions: address(&positions),
            first: address(&first),
            count: address(&count),
            slots: address(&slots),
            out_slots: address(&out_slots),
            rows: r,
            lanes: meta.lanes.len(),
        };
        let ids = [address(&ids), address(&after)];
        Ok(Round {
            lanes: all,
            ids,
            window: 0..r,
            whole: (all, ids),
            bounds,
            tables: address(&tables),
            pitch,
            lane_rows,
            longest,
            meta,
        })
    }
}
