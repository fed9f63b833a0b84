//! Fused parents: neighbouring matrices of one storage share an object, and bindings address their rows in it.
//!
//! Rows keep the source's order inside each weight, so that a query projection with interleaved heads is one run of
//! the source, and its query and gate parameters are ranges of it. Formats with one scale a matrix cannot be fused
//! without changing words; they stay one object a source tensor.

use std::ops::Range;

use infernix_checkpoint::SourceTensor;
use infernix_formats::Format;
use infernix_model::{Class, Component, Parameter, Rows};

use crate::ConvertError;
use crate::plan::{Segment, flat_rows, view_rows};
use crate::recipe::Activation;
use crate::sources::WeightRef;
use crate::storage::Storage;

/// A parameter inside a parent.
pub(crate) struct Member {
    pub(crate) parameter: Parameter,
    /// Index into the parent's weights.
    pub(crate) weight: usize,
    /// Element ranges in the parent, in the parameter's order.
    pub(crate) parts: Vec<(u64, u64)>,
    pub(crate) activation: Option<Activation>,
    rows: Vec<Range<u64>>,
}

/// An object to be.
pub(crate) struct Parent {
    pub(crate) component: Component,
    pub(crate) storage: Storage,
    pub(crate) shape: Vec<u64>,
    pub(crate) k: u64,
    pub(crate) weights: Vec<WeightRef>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) members: Vec<Member>,
}

struct Bucket {
    key: String,
    component: Component,
    storage: Storage,
    k: u64,
    weights: Vec<(WeightRef, Vec<u64>)>,
    members: Vec<Member>,
}

/// Collects parameters until their objects are laid out.
#[derive(Default)]
pub(crate) struct Grouper {
    buckets: Vec<Bucket>,
}

/// The fused group of a class inside its module; `None` for matrices that stay alone.
fn group_of(class: Class) -> Option<&'static str> {
    Some(match class {
        Class::AttnQ | Class::AttnGate | Class::AttnK | Class::AttnV | Class::IndexerQ | Class::IndexerK => {
            "attn"
        }
        Class::GdnQ | Class::GdnK | Class::GdnV | Class::GdnZ => "gdn",
        Class::GdnA | Class::GdnB => "gdn.ab",
        Class::MlpGate | Class::MlpUp => "mlp",
        Class::SharedExpertGate | Class::SharedExpertUp => "shared",
        Class::Router | Class::SharedGate => "router",
        _ => return None,
    })
}

/// The block a parameter belongs to: its name up to the layer's number (or the drafter's layer).
fn block_of(name: &str) -> &str {
    let mut end = 0;
    for (n, part) in name.split('/').enumerate() {
        end += part.len() + usize::from(n > 0);
        if part.bytes().all(|b| b.is_ascii_digit()) || part == "layer" {
            return &name[..end];
        }
    }
    name
}

/// Rows of the source that a parameter takes, in the parameter's order.
pub(crate) fn rows_of(rows: &Rows, all: u64) -> Vec<Range<u64>> {
    match *rows {
        Rows::All => Vec::from_iter([Range { start: 0, end: all }]),
        Rows::Range { begin, count } => Vec::from_iter([Range { start: begin, end: begin + count }]),
        Rows::PerHead { heads, stride, begin, take } => {
            (0..heads).map(|h| h * stride + begin..h * stride + begin + take).collect()
        }
    }
}

impl Grouper {
    /// Adds a parameter whose source is `rows` of `weight`.
    pub(crate) fn add(
        &mut self,
        p: &Parameter,
        reference: WeightRef,
        weight: &SourceTensor<'_>,
        rows: &Rows,
        storage: Storage,
        activation: Option<Activation>,
    ) -> Result<(), ConvertError> {
        let coded = storage.format.direct_bytes().is_none();
        let (all, k) = if coded { flat_rows(weight.shape()) } else { view_rows(weight.shape()) };
        let rows = rows_of(rows, all);
        if storage.format == Format::Fp8Block128 && !whole_tiles(&rows, all) {
            return Err(ConvertError::NoLayout {
                parameter: p.name.clone(),
                reason:
                    "its rows are not whole 128-row tiles of the source, so its tile scales cannot be kept"
                        .into(),
            });
        }
        let key = match group_of(p.class) {
            Some(group) if storage.fuses() => format!("{}#{group}", block_of(&p.name)),
            _ => format!("{}#{}", reference.source, reference.name),
        };
        let found = self
            .buckets
            .iter()
            .position(|b| b.key == key && b.storage == storage && b.k == k && b.component == p.component);
        let at = found.unwrap_or_else(|| {
            self.buckets.push(Bucket {
                key,
                component: p.component,
                storage,
                k,
                weights: Vec::new(),
                members: Vec::new(),
            });
            self.buckets.len() - 1
        });
        let bucket = &mut self.buckets[at];
        let known = bucket.weights.iter().position(|w| w.0 == reference);
        let index = known.unwrap_or_else(|| {
            bucket.weights.push((reference, weight.shape().to_vec()));
            bucket.weights.len() - 1
        });
        bucket.members.push(Member {
            parameter: p.clone(),
            weight: index,
            parts: Vec::new(),
            activation,
            rows,
        });
        Ok(())
    }

    /// The parents, in the order of their first member.
    pub(crate) fn finish(self) -> Vec<Parent> {
        self.buckets.into_iter().map(Bucket::finish).collect()
    }
}

fn whole_tiles(rows: &[Range<u64>], all: u64) -> bool {
    rows.iter().all(|r| r.start % 128 == 0 && (r.end % 128 == 0 || r.end == all))
}

impl Bucket {
    fn finish(self) -> Parent {
        let Bucket { component, storage, k, weights, mut members, .. } = self;
        let mut segments: Vec<Segment> = Vec::new();
        for index in 0..weights.len() {
            let mut rows: Vec<_> =
                members.iter().filter(|m| m.weight == index).flat_map(|m| m.rows.iter().cloned()).collect();
            rows.sort_by_key(|r| r.start);
            for r in rows {
                match segments.last_mut() {
                    Some(last) if last.weight == index && last.rows.end == r.start => last.rows.end = r.end,
                    _ => segments.push(Segment { weight: index, rows: r }),
                }
            }
        }
        let place = |weight: usize, row: u64| {
            let mut at = 0;
            for s in &segments {
                if s.weight == weight && s.rows.contains(&row) {
                    return at + row - s.rows.start;
                }
                at += s.rows.end - s.rows.start;
            }
            at
        };
        for m in &mut members {
            for r in &m.rows {
                let begin = place(m.weight, r.start) * k;
                let end = begin + (r.end - r.start) * k;
                match m.parts.last_mut() {
                    Some(last) if last.1 == begin => last.1 = end,
                    _ => m.parts.push((begin, end)),
                }
            }
        }
        let rows: u64 = segments.iter().map(|s| s.rows.end - s.rows.start).sum();
        let coded = storage.format.direct_bytes().is_none();
        let shape = match (&weights[..], &members[..]) {
            (_, [only]) if coded && only.parameter.shape.len() > 2 => vec![rows, k],
            (_, [only]) => only.parameter.shape.clone(),
            ([(_, shape)], _) if view_rows(shape).0 == rows => shape.clone(),
            ([(_, shape), ..], _) if shape.len() == 1 => vec![rows],
            _ => vec![rows, k],
        };
        let weights = weights.into_iter().map(|w| w.0).collect();
        Parent { component, storage, shape, k, weights, segments, members }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_end_at_the_layer() {
        assert_eq!(block_of("text/layers/12/attn/indexer/q"), "text/layers/12");
        assert_eq!(block_of("mtp/layer/moe/router"), "mtp/layer");
        assert_eq!(block_of("text/head"), "text/head");
    }

    #[test]
    fn interleaved_heads_are_ranges_of_one_run() {
        let head = |begin| rows_of(&Rows::PerHead { heads: 3, stride: 4, begin, take: 2 }, 12);
        assert_eq!(head(0), [0..2, 4..6, 8..10]);
        assert_eq!(head(2), [2..4, 6..8, 10..12]);
    }
}
