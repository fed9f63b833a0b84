//! How device memory is divided. What rounds need is taken when state is allocated; expert frames get the rest, less [`HEADROOM`].

use super::round::Board;
use super::state::Places;
use super::tiers::Placement;
use crate::error::EngineError;
use crate::state::StateLayout;

/// Left free beside everything that is known: graphs, the padding of allocations, and activations beyond those of the longest prompt
/// that memory is kept for.
pub(super) const HEADROOM: usize = 128 << 20;

/// Rows of decode rounds that share one set of addresses, and with them graphs.
pub(super) const DECODE_ROWS: usize = 512;

/// n-gram rows of a decode round: those of 512 tokens with 4,096 values each.
pub(super) const STAGE: usize = 4 << 20;

/// A ring half holds this much more than the evenly spread absent records of a layer.
const RING_SLACK: f64 = 1.15;

/// Widths of the hidden state that a prompt row's activations take while its experts run, in BF16.
const ROW_WIDTHS: usize = 26;

/// Bytes of activations of a prompt call of `rows` rows, `window` at a time. Most of a row's are its picks: packed inputs, hidden values
/// and outputs.
pub(super) fn activation_bytes(rows: usize, window: usize, hidden: usize) -> usize {
    rows.min(window) * ROW_WIDTHS * hidden * 2 + rows * 4 * hidden * 2 + (128 << 20)
}

/// Rows that the longest prompt call's board holds.
pub(super) fn board_rows(prompt_rows: usize) -> usize {
    prompt_rows.next_power_of_two().max(1024)
}

/// How many snapshots are kept memory for: `bytes` of them, and the one that is taken before another makes way.
pub(super) fn snapshots(bytes: usize, places: &Places) -> usize {
    bytes.div_ceil(places.snapshot().max(1)) + 1
}

/// Bytes of the tables that say where `n` experts are: of all rounds, and of prompts that stream them.
pub(super) fn tables(n: usize, partial: bool) -> usize {
    n * if partial { 36 } else { 20 }
}

/// Bytes of keys, values and index keys, of recurrent state, of `kept` snapshots, and of what describes rounds.
pub(super) fn state_bytes(layout: &StateLayout, places: &Places, prompt_rows: usize, kept: usize) -> usize {
    let boards = [DECODE_ROWS, board_rows(prompt_rows)].map(|r| Board::bytes(r, layout.slots, layout.pages));
    let stage = if layout.ple.is_empty() { 0 } else { STAGE };
    super::state::paged_bytes(layout)
        + layout.slots * places.slot()
        + kept * places.snapshot()
        + boards.iter().sum::<usize>()
        + stage
}

/// Refuses what needs `need` bytes beside weights where `left` are left.
pub(super) fn enough(need: usize, left: usize) -> Result<(), EngineError> {
    if need <= left {
        return Ok(());
    }
    Err(EngineError::Unsupported(format!(
        "keys, values, state, snapshots and activations need {} MiB of device memory, weights leave {}; raise --vram-budget-mib by {}, \
         shorten the context or keep fewer snapshots there",
        need.div_ceil(1 << 20),
        left >> 20,
        (need - left).div_ceil(1 << 20)
    )))
}

/// How records share the memory that is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frames {
    /// Records that always have a place.
    pub(super) own: usize,
    /// Records of half the ring that prompts stream through; 0 where every record has a frame.
    pub(super) ring: usize,
    /// Host memory does not hold what has no frame: the rest is read from disk.
    pub(super) from_disk: bool,
}

impl Frames {
    /// `room` bytes for records of `record` bytes in frames of `frame`, `banks`: experts of each layer. `ram`: host memory for
    /// experts, 0 for as much as they need.
    pub(super) fn plan(
        placement: Placement,
        room: usize,
        banks: &[usize],
        (record, frame): (usize, usize),
        ram: usize,
    ) -> Result<Frames, EngineError> {
        let n: usize = banks.iter().sum();
        let (layers, most) = (banks.len(), banks.iter().copied().max().unwrap_or(0));
        let room = |partial| room.saturating_sub(tables(n, partial)) / frame;
        let on_disk = |own: usize| ram > 0 && (n - own) * record > ram;
        let refuse = |halves: usize| {
            Err(EngineError::Unsupported(format!(
                "room for {} expert records of {} KiB, but streaming a layer needs {}; raise --vram-budget-mib by {}",
                room(true),
                frame >> 10,
                2 * halves,
                ((2 * halves - room(true)) * frame).div_ceil(1 << 20)
            )))
        };
        let ring = |own: usize| {
            let absent = most as f64 - own as f64 / layers as f64;
            ((RING_SLACK * absent).ceil() as usize).min(most)
        };
        let (own, ring) = match placement {
            Placement::Auto if room(false) >= n => (n, 0),
            Placement::Frames(f) if f >= n => (n, 0),
            Placement::Auto => {
                let fits = |own: &usize| own + 2 * ring(*own) <= room(true);
                match (0..n.min(room(true) + 1)).rev().find(fits) {
                    Some(own) => (own, ring(own)),
                    None => return refuse(most),
                }
            }
            Placement::Frames(f) => (f, most),
            Placement::RandomHalf(_) => (n / 2, most),
            Placement::Host => (0, most),
        };
        // A layer of a prompt that is read from disk goes through the ring whole.
        match placement {
            Placement::Auto if on_disk(own) => match room(true).checked_sub(2 * most) {
                Some(left) => Ok(Frames { own: left.min(own), ring: most, from_disk: true }),
                None => refuse(most),
            },
            _ => Ok(Frames { own, ring: if on_disk(own) { most } else { ring }, from_disk: on_disk(own) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::layout;
    use crate::synthetic::{GEOMETRIES, Geometry, sizes};
    use infernix_model::Ffn;

    /// One synthetic geometry in one budget: the frames it gets and the bytes of everything, or why it is refused.
    fn place(g: &Geometry, budget: usize, kept: usize) -> Result<(Frames, usize), String> {
        let config = g.config().unwrap();
        let mut layout = layout(&config, false);
        // As bench does: one sequence, a prompt of 8,192 and 128 tokens after it.
        (layout.pages, layout.slots) = (132, 1);
        let (hidden, prompt_rows) = (config.hidden as usize, 8192);
        let all = sizes(g, g.format).unwrap().bytes as usize;
        let (mut banks, mut record) = (Vec::new(), 0);
        // The small ones with experts keep them resident: they are not in exact 4-bit words.
        if let (Ffn::Moe(m), false) = (&config.ffn, g.name.contains("_moe_")) {
            banks = vec![m.experts as usize; config.layers.len()];
            // E2M1 codes and a scale per 16 of gate, up and down.
            record = 3 * hidden * m.intermediate as usize * 9 / 16;
        }
        let n: usize = banks.iter().sum();
        let weights = all - n * record;
        let places = Places::of(&layout);
        let kept = if n > 0 { snapshots(kept, &places) } else { 0 };
        let mut used = weights + state_bytes(&layout, &places, prompt_rows, kept);
        if n > 0 {
            used += activation_bytes(prompt_rows, 8192, hidden);
        }
        enough((used + HEADROOM).saturating_sub(weights), budget.saturating_sub(weights))
            .map_err(|e| e.to_string())?;
        let room = budget - used - HEADROOM;
        if n == 0 {
            return Ok((Frames { own: 0, ring: 0, from_disk: false }, used));
        }
        let frame = record.next_multiple_of(256);
        let f = Frames::plan(Placement::Auto, room, &banks, (record, frame), 0).map_err(|e| e.to_string())?;
        let bytes = used + (f.own + 2 * f.ring) * frame + tables(n, f.ring > 0) + HEADROOM;
        // One more frame would not have fitted.
        assert!(f.own == n || bytes + 4 * frame > budget, "{}: {f:?} of {budget}", g.name);
        // A layer of which its even share is resident passes through the ring.
        assert!(f.own == n || f.own / banks.len() + f.ring >= banks[0], "{}: {f:?}", g.name);
        Ok((f, bytes))
    }

    #[test]
    fn every_geometry_is_within_its_budget_or_refused_and_snapshots_are_in_the_plan() {
        for g in &GEOMETRIES {
            for kept in [0, 1 << 30] {
                let mut before: Option<usize> = None;
                for mib in (8_000..=48_000).step_by(500) {
                    match place(g, mib << 20, kept) {
                        Ok((f, bytes)) => {
                            assert!(bytes <= mib << 20, "{} in {mib} MiB: {} needed", g.name, bytes >> 20);
                            assert!(before.is_none_or(|b| b <= f.own), "{} in {mib} MiB: {f:?}", g.name);
                            before = Some(f.own);
                        }
                        Err(e) => assert!(before.is_none(), "{} in {mib} MiB but not less: {e}", g.name),
                    }
                }
            }
        }
    }

    #[test]
    fn the_122b_fits_32_000_mib_with_its_snapshot() {
        let g = Geometry::find("qwen3_5_122b_a10b").unwrap();
        let (f, bytes) = place(&g, 32_000 << 20, 0).unwrap();
        assert!(f.own > 1000 && bytes <= 32_000 << 20, "{f:?}, {bytes} bytes");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_it_lacks() {
        let place = |room| Frames::plan(Placement::Auto, room, &[512; 48], (1000, 1024), 0);
        let short = place(1000 * 1024).unwrap_err().to_string();
        assert!(short.contains("needs 1024") && short.contains("by 1"), "{short}");
        assert!(place(2000 * 1024).is_ok());
        // A model of one layer: its ring takes as much as its frames, or more.
        for room in 0..600 {
            match Frames::plan(Placement::Auto, room * 1024, &[256], (1000, 1024), 0) {
                Ok(f) => assert!(f.own + 2 * f.ring <= room, "{f:?} of {room}"),
                Err(_) => assert!(room < 512 + 9),
            }
        }
        // Host memory for some of the rest: a layer passes through the ring whole, or nothing is promised.
        let disk = Frames::plan(Placement::Auto, 3000 * 1024, &[512; 48], (1000, 1024), 1 << 20).unwrap();
        assert_eq!((disk.ring, disk.from_disk), (512, true));
        assert!(disk.own + 2 * disk.ring <= 3000);
    }
}
