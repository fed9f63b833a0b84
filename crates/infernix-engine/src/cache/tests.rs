//! The index itself.

use super::tree::{DeviceSnap, Kind, Snap, Tree};
use crate::driver::Image;
use crate::state::PAGE_TOKENS;

fn snap(node: usize, tail: Vec<u32>, tokens: usize) -> Snap<u64> {
    Snap {
        node,
        tail,
        kind: Kind::Marker,
        device: Some(DeviceSnap {
            image: Image { state: 0, tokens, rope_delta: 0, drafted: 0, frontier: Vec::new() },
            page: None,
        }),
        host: None,
        bytes: 1,
        gap: 0,
        above: None,
        hits: 0,
        floor: 0.0,
        superseded: false,
        used: 0,
        pins: 0,
    }
}

fn put(t: &mut Tree<u64>, ids: &[u32]) -> usize {
    let mut at = t.root("");
    for (page, block) in ids.chunks_exact(PAGE_TOKENS).enumerate() {
        at = t.child_or_new(at, block);
        t.node_mut(at).page = Some(page as u32);
    }
    let tail = ids[ids.len() / PAGE_TOKENS * PAGE_TOKENS..].to_vec();
    t.add_snap(snap(at, tail, ids.len()))
}

#[test]
fn equal_hashes_make_no_hit() {
    let mut t = Tree::new().with_hash(|_, _| 7);
    let a: Vec<u32> = (0..150).collect();
    let mut b = a.clone();
    b[10] = 99;
    put(&mut t, &a);
    put(&mut t, &b);
    for text in [&a, &b] {
        assert_eq!(t.find("", text, 1000).tokens, 150);
    }
    b[10] = 100;
    assert_eq!(t.find("", &b, 1000).tokens, 0);
    b = a.clone();
    b[149] = 0;
    assert_eq!(t.find("", &b, 1000).tokens, 0, "the tail is compared too");
}

#[test]
fn the_deepest_snapshot_within_the_limit_wins() {
    let mut t = Tree::new();
    let a: Vec<u32> = (0..300).collect();
    for n in [64, 100, 128, 190, 300] {
        put(&mut t, &a[..n]);
    }
    for (limit, want) in [(300, 300), (299, 190), (190, 190), (189, 128), (127, 100), (64, 64), (63, 0)] {
        assert_eq!(t.find("", &a, limit).tokens, want, "limit {limit}");
    }
    assert_eq!(t.find("", &a[..150], 149).tokens, 128);
}

#[test]
fn a_hole_in_the_path_hides_what_lies_below() {
    let mut t = Tree::new();
    let a: Vec<u32> = (0..300).collect();
    put(&mut t, &a[..64]);
    put(&mut t, &a);
    let root = t.root("");
    let first = t.child(root, &a[..64]).unwrap();
    let second = t.child(first, &a[64..128]).unwrap();
    t.node_mut(second).page = None;
    assert_eq!(t.find("", &a, 299).tokens, 64);
}

#[test]
fn removing_snapshots_leaves_no_node_behind() {
    let mut t = Tree::new();
    let a: Vec<u32> = (0..300).collect();
    let ids: Vec<usize> = [100, 200, 300].iter().map(|n| put(&mut t, &a[..*n])).collect();
    for id in ids {
        let s = t.remove_snap(id);
        let mut at = Some(s.node);
        while let Some(n) = at {
            if t.nodes[n].is_none() {
                break;
            }
            at = t.node(n).parent;
            if t.node(n).live == 0 {
                t.node_mut(n).page = None;
                t.prune(n);
            }
        }
    }
    assert_eq!(t.node_ids().count(), 0);
}
