//! Random and mutated GGUF files: no panic, no hang, no large allocation.

mod common;
#[path = "common/gguf.rs"]
mod make;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use infernix_checkpoint::gguf::{Gguf, names};
use infernix_checkpoint::{Checkpoint, OpenOptions};
use make::{File, kv_array, kv_text, kv_u32, split, tensor, text};
use proptest::prelude::*;

/// Records the largest single allocation.
struct Largest;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

#[expect(unsafe_code, reason = "a counting allocator has to implement an unsafe trait")]
// SAFETY: every call is passed to the system allocator unchanged.
unsafe impl GlobalAlloc for Largest {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: `p` came from `alloc` above with this layout.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Largest = Largest;

/// Opens a file and uses everything that opens.
fn exercise(bytes: &[u8]) -> bool {
    let f = common::Folder::new();
    f.put("m.gguf", bytes);
    f.put("m-00001-of-00002.gguf", bytes);
    let start = Instant::now();
    let mut opened = false;
    for name in ["m.gguf", "m-00001-of-00002.gguf"] {
        let Ok(g) = Gguf::open(&f.join(name)) else { continue };
        opened = true;
        let keys: Vec<String> =
            g.metadata().iter().map(|(k, v)| format!("{k}{v}")[..k.len()].to_owned()).collect();
        for key in &keys {
            let _ = (g.text(key), g.unsigned_list(key), g.text_list(key), g.float(key));
        }
        let _ = names::map(&g, "model.");
        for t in g.tensors() {
            assert!(t.offset + t.bytes <= bytes.len() as u64, "{} lies beyond the file", t.name);
            let mut out = vec![0.0; t.elements() as usize];
            let _ = g.read_rows_f32(t, 0..t.rows(), &mut out);
        }
    }
    // As a checkpoint: the view, what is generated from the keys, every tensor in uneven pieces.
    if let Ok(c) = Checkpoint::open(&f.join("m.gguf"), &OpenOptions::default()) {
        let _ = c.config();
        for name in
            ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
        {
            let _ = c.file_bytes(name);
        }
        for t in c.tensors() {
            let mut out = vec![0; t.bytes as usize];
            if c.read(t, 0..t.bytes, &mut out).is_ok() {
                let (a, b) = (t.bytes / 3, t.bytes - t.bytes / 5);
                let mut piece = vec![0; (b - a) as usize];
                c.read(t, a..b, &mut piece).expect("a part of what was read");
                assert_eq!(piece, out[a as usize..b as usize], "{}", t.name);
            }
            let origins = c.origins(t, 0..t.bytes);
            assert!(origins.iter().all(|o| o.bytes.end <= bytes.len() as u64), "{}", t.name);
        }
        for weight in c.resolve_each().flatten() {
            let mut out = vec![0.0; (weight.rows() * weight.row_len()) as usize];
            let _ = weight.decode_rows_f32(0..weight.rows(), &mut out);
        }
    }
    assert!(start.elapsed() < Duration::from_secs(5), "opening took {:?}", start.elapsed());
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < 4 << 20, "{largest} bytes were allocated at once for a file of {}", bytes.len());
    opened
}

/// A file whose names and keys mean something to every part of the reader.
fn model() -> File {
    let mut f = File::new();
    let number = |key: &str, v| kv_u32(&format!("qwen4exp.{key}"), v);
    f.pairs = vec![
        kv_text("general.architecture", "qwen4exp"),
        kv_u32("general.alignment", 32),
        number("block_count", 2),
        number("nextn_predict_layers", 1),
        number("ssm.group_count", 1),
        number("ssm.time_step_rank", 2),
        number("ssm.inner_size", 8),
        number("ssm.state_size", 4),
        kv_array("qwen4exp.ple.layers", 5, 1, &[0; 4]),
        kv_array("qwen4exp.attention.compress_ratios", 5, 2, &[0; 8]),
        kv_array("qwen4exp.attention.recurrent_layers", 7, 2, &[1, 0]),
        kv_array("tokenizer.ggml.tokens", 8, 2, &[text("<|fim_prefix|>"), text("x")].concat()),
        kv_array("tokenizer.ggml.token_type", 5, 2, &[3, 0, 0, 0, 1, 0, 0, 0]),
    ];
    f.tensors = vec![
        tensor("blk.0.ssm_a", &[2], 0, 8),
        tensor("blk.0.attn_qkv.weight", &[32, 16], 8, 16 * 34),
        tensor("blk.0.ssm_out.weight", &[8, 3], 30, 48),
        tensor("blk.0.indexer.q_proj.weight", &[4, 2], 0, 32),
        tensor("blk.0.indexer.k_proj.weight", &[4, 1], 0, 16),
        tensor("blk.0.ffn_gate_exps.weight", &[32, 1, 2], 20, 36),
        tensor("blk.0.ffn_up_exps.weight", &[32, 1, 2], 20, 36),
        tensor("per_layer_token_embd.weight", &[32, 2], 20, 36),
        tensor("blk.1.nextn.eh_proj.weight", &[64], 40, 36),
        tensor("blk.1.attn_q_norm.weight", &[4], 1, 8),
    ];
    f
}

#[test]
fn whole_files_open() {
    for f in [File::new(), model()] {
        assert!(exercise(&f.bytes()));
    }
}

proptest! {
    /// Bytes changed, words replaced by telling values, pieces cut out or doubled.
    #[test]
    fn mutated_files_neither_panic_nor_hang_nor_allocate(
        which in 0..3usize,
        edits in prop::collection::vec((0..6u8, any::<prop::sample::Index>(), any::<u64>()), 1..5),
    ) {
        let mut bytes = match which {
            0 => File::new().bytes(),
            1 => model().bytes(),
            _ => split()[0].bytes(),
        };
        let header = if which == 1 { model().header().len() } else { File::new().header().len() };
        for (kind, index, value) in edits {
            let at = index.index(header.min(bytes.len()).max(1));
            let telling = [0, 1, 2, 31, 33, u64::from(u32::MAX), 1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX, u64::MAX - 31];
            let word = telling[(value % telling.len() as u64) as usize];
            match kind {
                0 => if let Some(b) = bytes.get_mut(at) { *b = value as u8 },
                1 => if let Some(b) = bytes.get_mut(at) { *b ^= 1 << (value % 8) },
                2 => if let Some(w) = bytes.get_mut(at..at + 8) { w.copy_from_slice(&word.to_le_bytes()) },
                3 => if let Some(w) = bytes.get_mut(at..at + 4) { w.copy_from_slice(&(word as u32).to_le_bytes()) },
                4 => { bytes.drain(at..(at + (value % 40) as usize).min(bytes.len())); }
                _ => {
                    let piece = bytes[at.min(bytes.len())..(at + (value % 40) as usize).min(bytes.len())].to_vec();
                    bytes.splice(at.min(bytes.len())..at.min(bytes.len()), piece);
                }
            }
        }
        exercise(&bytes);
    }

    /// Structures that are nearly right: dimensions, types and pairs at random, sizes made to fit or not.
    #[test]
    fn random_structures_neither_panic_nor_hang_nor_allocate(
        tensors in prop::collection::vec(
            (0..8u8, prop::collection::vec(0..70u64, 0..6), 0..45u32, 0..400usize), 0..6),
        pairs in prop::collection::vec((0..6u8, 0..14u32, prop::collection::vec(any::<u8>(), 0..24)), 0..6),
        alignment in prop::sample::select(vec![1usize, 8, 32, 64]),
    ) {
        let mut f = File::new();
        f.alignment = alignment;
        f.tensors = tensors.iter().map(|(n, ne, ty, len)| tensor(&format!("blk.{n}.attn_q.weight"), ne, *ty, *len)).collect();
        f.pairs.extend(pairs.into_iter().map(|(k, ty, v)| (format!("k{k}"), ty, v)));
        f.pairs.push(kv_u32("general.alignment", alignment as u32));
        exercise(&f.bytes());
    }

    /// Any bytes behind the magic.
    #[test]
    fn random_bytes_neither_panic_nor_hang_nor_allocate(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        exercise(&[b"GGUF\x03\0\0\0", &bytes[..]].concat());
    }
}
