//! A piece of a source tensor: which GGUF tensor holds it, and how its rows come back.

use std::ops::Range;

use infernix_formats::scalar;

use super::table::{RULES, Scope, Values};

/// A permutation of the value heads along one axis. Heads are moved whole, so rows of any type can be carried without
/// decoding; columns only where a head is whole blocks ([`TiledHeads::moves_blocks_of`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiledHeads {
    /// Whether the heads lie along the columns (the innermost axis); else along the rows.
    pub columns: bool,
    /// Positions before the first head, which stay where they are.
    pub first: u64,
    /// Key heads.
    pub key_heads: u64,
    /// Value heads per key head.
    pub per_key: u64,
    /// Positions of a head.
    pub width: u64,
}

impl TiledHeads {
    /// Where the source's position `i` along the axis is stored: source head k r + j is stored head j n + k, for n key
    /// heads with r value heads each.
    pub fn stored(&self, i: u64) -> u64 {
        let Some(i) = i.checked_sub(self.first) else { return i };
        let (head, within) = (i / self.width, i % self.width);
        let (k, j) = (head / self.per_key, head % self.per_key);
        self.first + (j * self.key_heads + k) * self.width + within
    }

    /// Where stored position `i` belongs in the source.
    pub fn source(&self, i: u64) -> u64 {
        let Some(i) = i.checked_sub(self.first) else { return i };
        let (head, within) = (i / self.width, i % self.width);
        let (j, k) = (head / self.key_heads, head % self.key_heads);
        self.first + (k * self.per_key + j) * self.width + within
    }

    /// Whether both orders are the same.
    pub fn is_identity(&self) -> bool {
        self.key_heads <= 1 || self.per_key <= 1
    }

    /// Whether stored blocks of `values` values can be moved whole: always along rows, along columns where blocks do not
    /// cross heads. Where not, the consumer keeps the stored order and gathers its activations instead.
    pub fn moves_blocks_of(&self, values: u64) -> bool {
        !self.columns || (self.width % values == 0 && self.first % values == 0)
    }
}

/// A range along one axis of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// The axis, outermost 0.
    pub axis: usize,
    /// Positions along it.
    pub range: Range<u64>,
}

/// One GGUF tensor, or some columns of it, as one source tensor or some rows of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Name of the GGUF tensor.
    pub tensor: String,
    /// Its shape, outermost dimension first.
    pub stored_shape: Vec<u64>,
    /// The columns that belong to the piece; `None` for all.
    pub take: Option<Range<u64>>,
    /// Full name of the source tensor.
    pub source: String,
    /// Shape of the whole source tensor.
    pub source_shape: Vec<u64>,
    /// The part of the source tensor that the piece is; `None` for the whole.
    pub fill: Option<Slice>,
    /// What was done to the values.
    pub values: Values,
    /// Where value heads are tiled; `None` where their order is the source's.
    pub heads: Option<TiledHeads>,
}

impl Piece {
    /// Rows of the GGUF tensor: the product of all dimensions but the innermost.
    pub fn rows(&self) -> u64 {
        self.stored_shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Columns of the piece.
    pub fn columns(&self) -> u64 {
        let all = self.stored_shape.last().copied().unwrap_or(1);
        self.take.as_ref().map_or(all, |r| r.end - r.start)
    }

    /// The stored row that holds row `row` of the piece.
    pub fn stored_row(&self, row: u64) -> u64 {
        match &self.heads {
            Some(h) if !h.columns => h.stored(row),
            _ => row,
        }
    }

    /// The row of the whole source tensor (counted over all dimensions but the innermost) that row `row` of the piece is.
    pub fn source_row(&self, row: u64) -> u64 {
        let Some(slice) = &self.fill else { return row };
        let rank = self.source_shape.len();
        let inner: u64 = self.source_shape.get(slice.axis + 1..rank - 1).map_or(1, |s| s.iter().product());
        let rows = (slice.range.end - slice.range.start) * inner;
        let whole = self.source_shape[slice.axis] * inner;
        row / rows * whole + slice.range.start * inner + row % rows
    }

    /// Whether stored words are the source's words in another order, if at all: nothing was done to the values.
    pub fn keeps_words(&self) -> bool {
        self.values == Values::Same
    }

    /// The values of a piece's row from the decoded stored row (`stored_row`, all its columns): takes the columns, puts
    /// the heads in order, undoes what was done to the values, each rounded once to F32. `out` has
    /// [`Piece::columns`] values; extra elements on either side are left alone.
    pub fn undo_row(&self, stored: &[f32], out: &mut [f32]) {
        let first = self.take.as_ref().map_or(0, |r| r.start);
        for (i, o) in out.iter_mut().enumerate().take(self.columns() as usize) {
            let at = match &self.heads {
                Some(h) if h.columns => h.stored(i as u64),
                _ => i as u64,
            };
            let Some(&v) = stored.get((first + at) as usize) else { break };
            *o = self.values.undo(v);
        }
    }
}

impl Values {
    /// What is stored for a source's value, in F32 as llama.cpp's converter computes it.
    pub fn apply(self, v: f32) -> f32 {
        match self {
            Values::Same => v,
            Values::OnePlus => 1.0 + v,
            Values::NegativeExp => -f64::from(v).exp() as f32,
        }
    }

    /// The source's value of what is stored, rounded once to F32.
    pub fn undo(self, v: f32) -> f32 {
        match self {
            Values::Same => v,
            Values::OnePlus => v - 1.0,
            Values::NegativeExp => log_decay(v),
        }
    }

    /// Whether a value comes back from what is stored for it. The sign of a zero does not count.
    pub fn keeps(self, v: f32) -> bool {
        self.undo(self.apply(v)) == v
    }

    /// What is done to the values of the tensor of this full source name, by [`RULES`].
    pub fn of_source(name: &str) -> Self {
        let inner = ["model.language_model.", "model."].iter().find_map(|p| name.strip_prefix(p));
        let drafter = name.strip_prefix("mtp.");
        // Behind `layers.N.` of either.
        let block = inner.or(drafter).and_then(|n| n.strip_prefix("layers.")?.split_once('.')).map(|n| n.1);
        let rule = RULES.iter().find(|r| {
            let own = match r.scope {
                Scope::Root => Some(name),
                Scope::Model => inner,
                Scope::Block | Scope::Table => block,
                Scope::Drafter => drafter,
            };
            own == Some(r.source)
        });
        rule.map_or(Values::Same, |r| r.values)
    }

    /// The rounding in words; empty where nothing is done.
    pub fn rounding(self) -> &'static str {
        match self {
            Values::Same => "",
            Values::OnePlus => "1 + w in FP32",
            Values::NegativeExp => "-exp(a) in FP32",
        }
    }
}

/// a of a stored -exp(a): the BF16 number whose exponential it is where there is one (A_log is BF16 in the sources, and
/// exp in F32 is good to two units in the last place), else ln(-v) rounded to F32.
fn log_decay(v: f32) -> f32 {
    let exact = f64::from(-v).ln();
    let word = scalar::bf16_to_f32(scalar::bf16_from_f32(exact as f32));
    let again = (-f64::from(word).exp()) as f32;
    if again.to_bits().abs_diff(v.to_bits()) <= 2 { word } else { exact as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiled_heads_come_back_in_order() {
        // Two key heads with three value heads each, two positions a head, behind five.
        let h = TiledHeads { columns: false, first: 5, key_heads: 2, per_key: 3, width: 2 };
        // Source heads 0 to 5 are stored at 0, 2, 4, 1, 3, 5.
        let stored: Vec<u64> = (0..6).map(|head| (h.stored(5 + 2 * head) - 5) / 2).collect();
        assert_eq!(stored, [0, 2, 4, 1, 3, 5]);
        for i in 0..17 {
            assert_eq!(h.source(h.stored(i)), i);
        }
        assert_eq!(h.stored(3), 3);
        assert!(!h.is_identity() && TiledHeads { key_heads: 1, ..h }.is_identity());
    }

    #[test]
    fn columns_move_only_whole_blocks() {
        let h = TiledHeads { columns: true, first: 0, key_heads: 2, per_key: 2, width: 128 };
        assert!(h.moves_blocks_of(32) && h.moves_blocks_of(128) && !h.moves_blocks_of(256));
        assert!(TiledHeads { columns: false, ..h }.moves_blocks_of(256));
    }

    #[test]
    fn rows_of_a_part_lie_behind_each_other_in_each_expert() {
        let piece = Piece {
            tensor: "blk.0.ffn_up_exps.weight".into(),
            stored_shape: vec![3, 2, 8],
            take: None,
            source: "gate_up_proj".into(),
            source_shape: vec![3, 4, 8],
            fill: Some(Slice { axis: 1, range: 2..4 }),
            values: Values::Same,
            heads: None,
        };
        assert_eq!(piece.rows(), 6);
        assert_eq!((0..6).map(|r| piece.source_row(r)).collect::<Vec<_>>(), [2, 3, 6, 7, 10, 11]);
        let key = Piece {
            stored_shape: vec![2, 8],
            source_shape: vec![6, 8],
            fill: Some(Slice { axis: 0, range: 4..6 }),
            ..piece
        };
        assert_eq!((key.source_row(0), key.source_row(1)), (4, 5));
    }

    #[test]
    fn conventions_follow_from_the_source_name_and_say_what_they_keep() {
        let of = Values::of_source;
        assert_eq!(of("model.language_model.layers.3.input_layernorm.weight"), Values::OnePlus);
        assert_eq!(of("model.language_model.norm.weight"), Values::OnePlus);
        assert_eq!(of("mtp.pre_fc_norm_hidden.weight"), Values::OnePlus);
        assert_eq!(of("model.language_model.layers.0.linear_attn.norm.weight"), Values::Same);
        assert_eq!(of("model.language_model.layers.0.linear_attn.A_log"), Values::NegativeExp);
        assert_eq!(of("model.visual.merger.norm.weight"), Values::Same);
        assert!(Values::OnePlus.keeps(-0.25) && Values::OnePlus.keeps(-0.0) && !Values::OnePlus.keeps(1e-9));
        assert!(Values::NegativeExp.keeps(1.5) && !Values::NegativeExp.keeps(1e-9));
    }

    #[test]
    fn rows_are_undone_column_by_column() {
        let h = TiledHeads { columns: true, first: 0, key_heads: 2, per_key: 2, width: 1 };
        let mut piece = Piece {
            tensor: "blk.0.ssm_a".into(),
            stored_shape: vec![4],
            take: None,
            source: "A_log".into(),
            source_shape: vec![4],
            fill: None,
            values: Values::NegativeExp,
            heads: Some(h),
        };
        let mut out = [0.0; 4];
        piece.undo_row(&[-1.0, -std::f32::consts::E, -2.0, -4.0], &mut out);
        assert_eq!((out[0], out[1], out[3]), (0.0, 2f32.ln(), 4f32.ln()));
        assert!((out[2] - 1.0).abs() < 1e-6);
        piece.values = Values::OnePlus;
        piece.heads = None;
        piece.take = Some(2..4);
        piece.undo_row(&[0.0, 0.0, 1.5, 0.75], &mut out);
        assert_eq!(out[..2], [0.5, -0.25]);
    }
}
