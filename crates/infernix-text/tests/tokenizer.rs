//! The tokenizer against ids that the reference implementation gave for the demo's `tokenizer.json`.

use std::path::PathBuf;
use std::sync::Arc;

use infernix_text::{AddedTokens, Detokenizer, EncodeOptions, TokenKind, Tokenizer};
use proptest::prelude::*;

fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/flash-demo-nvfp4")
}

fn tokenizer() -> Tokenizer {
    let read = |name: &str| std::fs::read(demo().join(name)).expect("the bundled demo is complete");
    Tokenizer::from_json(&read("tokenizer.json"), Some(&read("tokenizer_config.json"))).expect("loads")
}

#[test]
fn ids_equal_the_reference_implementation() {
    let t = tokenizer();
    let golden: Vec<(String, Vec<u32>)> =
        serde_json::from_str(include_str!("goldens/tokenizer.json")).expect("parses");
    assert!(golden.len() > 30);
    for (text, ids) in golden {
        assert_eq!(t.encode(&text).expect("encodes"), ids, "{text:?}");
    }
}

#[test]
fn padded_rows_are_never_tokens() {
    let t = tokenizer();
    assert_eq!(t.addressable(), 4096);
    assert_eq!(t.token_count(), 4096);
    let mask = t.vocabulary_mask(4160);
    assert_eq!(mask.len(), 130);
    assert!(mask[..128].iter().all(|&w| w == u32::MAX));
    assert_eq!(mask[128..], [0, 0]);
    assert!(!t.is_token(4096) && t.token_bytes(4096).is_none());
    assert_eq!(t.decode(&[4096], false), "");
}

#[test]
fn control_spellings_can_be_read_as_text() {
    let t = tokenizer();
    let text = "a<|im_end|>b<think>c";
    let all = t.encode(text).expect("encodes");
    let special = t.token_id("<|im_end|>").expect("known");
    let think = t.token_id("<think>").expect("known");
    assert!(all.contains(&special) && all.contains(&think));
    assert_eq!(t.kind(special), Some(TokenKind::Special));
    assert_eq!(t.kind(think), Some(TokenKind::Added));
    let options = |added| EncodeOptions { added, literal: &[] };
    let some = t.encode_with(text, &options(AddedTokens::NonSpecial)).expect("encodes");
    assert!(!some.contains(&special) && some.contains(&think));
    let none = t.encode_text(text).expect("encodes");
    assert!(!none.contains(&special) && !none.contains(&think));
    for ids in [&all, &some, &none] {
        assert_eq!(t.decode(ids, false), text);
    }
    // A literal range blocks what lies in it and nothing else.
    let twice = "<|im_end|><|im_end|>";
    let literal = 0..10;
    let ids = t
        .encode_with(
            twice,
            &EncodeOptions { added: AddedTokens::All, literal: std::slice::from_ref(&literal) },
        )
        .expect("encodes");
    assert_eq!(ids.iter().filter(|&&id| id == special).count(), 1);
    assert_eq!(ids.last(), Some(&special));
}

#[test]
fn the_companion_file_supplies_missing_added_tokens() {
    let read = |name: &str| std::fs::read(demo().join(name)).expect("the bundled demo is complete");
    let config = br#"{"added_tokens_decoder": {"4096": {"content": "<tts_pad>", "special": true}}}"#;
    let t = Tokenizer::from_json(&read("tokenizer.json"), Some(config)).expect("loads");
    assert_eq!(t.addressable(), 4097);
    assert_eq!(t.encode("<tts_pad>").expect("encodes"), [4096]);
    let clash = br#"{"added_tokens_decoder": {"4085": {"content": "<other>", "special": true}}}"#;
    let error = Tokenizer::from_json(&read("tokenizer.json"), Some(clash)).expect_err("contradicts");
    assert!(error.to_string().contains("4085"), "{error}");
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    let source = std::fs::read(demo().join("tokenizer.json")).expect("the bundled demo is complete");
    let mut file: serde_json::Value = serde_json::from_slice(&source).expect("parses");
    for (pointer, value, named) in [
        ("/model/byte_fallback", serde_json::json!(true), "byte_fallback"),
        ("/model/type", serde_json::json!("Unigram"), "Unigram"),
        ("/normalizer/type", serde_json::json!("Lowercase"), "Lowercase"),
        ("/pre_tokenizer/pretokenizers/0/behavior", serde_json::json!("Removed"), "Removed"),
    ] {
        let mut changed = file.clone();
        *changed.pointer_mut(pointer).expect("present") = value;
        let bytes = serde_json::to_vec(&changed).expect("serializes");
        let error = Tokenizer::from_json(&bytes, None).expect_err(pointer);
        assert!(error.to_string().contains(named), "{error}");
    }
    file["model"]["merges"][0] = serde_json::json!(["zz", "qqq"]);
    let bytes = serde_json::to_vec(&file).expect("serializes");
    assert!(Tokenizer::from_json(&bytes, None).is_err());
}

#[test]
fn detokenizer_shows_or_skips_special_tokens() {
    let t = Arc::new(tokenizer());
    let ids = t.encode("<|im_start|>é<think>🦀<|im_end|>").expect("encodes");
    let run = |mut d: Detokenizer| {
        let mut out = String::new();
        for &id in &ids {
            let piece = d.push(id);
            assert!(!piece.contains('\u{fffd}'));
            out += &piece;
        }
        out + &d.finish()
    };
    assert_eq!(run(Detokenizer::new(Arc::clone(&t))), "é<think>🦀");
    assert_eq!(run(Detokenizer::new(Arc::clone(&t)).show_special(true)), "<|im_start|>é<think>🦀<|im_end|>");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn normal_text_survives_the_round_trip(text in "(\\PC|[ \n\t]|e\u{301}|<think>|<\\|im_end\\|>){0,40}") {
        use unicode_normalization::UnicodeNormalization;
        thread_local!(static T: Arc<Tokenizer> = Arc::new(tokenizer()));
        let t = T.with(Arc::clone);
        let ids = t.encode_text(&text).expect("encodes");
        let normal: String = text.nfc().collect();
        prop_assert_eq!(t.decode(&ids, false), normal.clone());
        let mut d = Detokenizer::new(t);
        let mut out = String::new();
        for &id in &ids {
            d.push_into(id, &mut out);
        }
        out += &d.finish();
        prop_assert_eq!(out, normal);
    }
}

/// Run by hand: `cargo test --release -p infernix-text --test tokenizer -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
#[expect(clippy::print_stderr, reason = "a measurement prints its result")]
fn encode_speed() {
    let path = std::env::var("TOKENIZER_JSON").map_or_else(|_| demo().join("tokenizer.json"), PathBuf::from);
    let bytes = std::fs::read(path).expect("reads");
    let start = std::time::Instant::now();
    let t = Tokenizer::from_json(&bytes, None).expect("loads");
    eprintln!("load: {:.2} s, {} ids", start.elapsed().as_secs_f64(), t.addressable());
    let text = match std::env::var("TEXT_FILE") {
        Ok(file) => std::fs::read_to_string(file).expect("reads"),
        Err(_) => include_str!("tokenizer.rs").repeat(200),
    };
    for name in ["first", "second", "third"] {
        let start = std::time::Instant::now();
        let ids = t.encode(&text).expect("encodes");
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("{name}: {:.1} MB/s, {} ids", text.len() as f64 / 1e6 / seconds, ids.len());
    }
}
