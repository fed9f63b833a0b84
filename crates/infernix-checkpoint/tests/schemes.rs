//! Schemes from suffixes, dtypes and shapes; what fits none is refused; illegal words are found.

mod common;

use common::*;
use infernix_checkpoint::{Checkpoint, CheckpointError, Dtype, PlaneKind, Scheme};

fn scheme_of(tensors: &[T], name: &str) -> Result<Scheme, CheckpointError> {
    let f = Folder::single(tensors);
    let c = f.open().expect("opens");
    c.resolve(name).map(|t| t.expect("there").scheme())
}

/// The scheme of `a`, whose tensors are all there is; the grouped view must agree.
fn scheme(tensors: &[T]) -> Result<Scheme, CheckpointError> {
    let found = scheme_of(tensors, "a");
    let f = Folder::single(tensors);
    let c = f.open().expect("opens");
    match (&found, c.resolve_all()) {
        (Ok(s), Ok(all)) => assert!(all.iter().any(|t| t.name() == "a" && t.scheme() == *s)),
        (Err(_), Err(_)) => {}
        (a, b) => panic!("{a:?} but {b:?}"),
    }
    found
}

fn fp8(scale: T) -> Vec<T> {
    vec![t("a.weight", "F8_E4M3", &[130, 256]), scale]
}

#[test]
fn every_scheme_is_recognised() {
    use Dtype::{Bf16, F32};
    let ct = |name: &str, shape: &[u64]| f32s(name, shape, &[2.0]);
    let cases: Vec<(Vec<T>, Scheme)> = vec![
        (vec![t("a.weight", "BF16", &[2, 4])], Scheme::Plain(Bf16)),
        (vec![t("a", "F32", &[2])], Scheme::Plain(F32)),
        (nvfp4("a", 2, 32), Scheme::Nvfp4Multiplier { input_scale: true }),
        (nvfp4("a", 2, 32)[..3].to_vec(), Scheme::Nvfp4Multiplier { input_scale: false }),
        (
            vec![
                t("a.weight_packed", "U8", &[2, 16]),
                t("a.weight_scale", "F8_E4M3", &[2, 2]),
                ct("a.weight_global_scale", &[1]),
                ct("a.input_global_scale", &[]),
            ],
            Scheme::Nvfp4Divisor { input_scale: true },
        ),
        (fp8(f32s("a.weight_scale", &[], &[0.5])), Scheme::Fp8Tensor { scale: F32, input_scale: false }),
        (fp8(f32s("a.weight_scale", &[1], &[0.5])), Scheme::Fp8Tensor { scale: F32, input_scale: false }),
        (fp8(t("a.weight_scale", "BF16", &[1])), Scheme::Fp8Tensor { scale: Bf16, input_scale: false }),
        (fp8(t("a.weight_scale", "BF16", &[130, 1])), Scheme::Fp8Row { scale: Bf16, input_scale: false }),
        (fp8(t("a.weight_scale", "F32", &[130])), Scheme::Fp8Row { scale: F32, input_scale: false }),
        (fp8(t("a.weight_scale_inv", "F32", &[2, 2])), Scheme::Fp8Block128 { scale: F32 }),
        (fp8(t("a.weight_scale_inv", "BF16", &[2, 2])), Scheme::Fp8Block128 { scale: Bf16 }),
        (fp8(t("a.weight_scale", "BF16", &[2, 2])), Scheme::Fp8Block128 { scale: Bf16 }),
        (fp8(t("a.weight_scale", "U8", &[130, 8])), Scheme::Mxfp8),
        (fp8(t("a.weight_scale", "F8_E8M0", &[130, 8])), Scheme::Mxfp8),
    ];
    for (tensors, expected) in cases {
        assert_eq!(scheme(&tensors).unwrap_or_else(|e| panic!("{expected}: {e}")), expected);
    }
}

#[test]
fn logical_shape_counts_values_not_bytes() {
    let f = Folder::single(&nvfp4("a", 2, 32));
    let c = f.open().expect("opens");
    let a = c.resolve("a.weight").expect("resolves").expect("there");
    assert_eq!((a.shape(), a.rows(), a.row_len()), (&[2, 32][..], 2, 32));
    assert_eq!(a.planes().iter().count(), 4);
    assert_eq!(&*a.planes().get(PlaneKind::GlobalScale).expect("there").name, "a.weight_scale_2");
    assert_eq!(a.global_scale().expect("legal"), Some(0.5));
    assert_eq!(a.input_scale().expect("legal"), Some(0.25));
}

#[test]
fn missing_plane_is_named() {
    for (left_out, name) in [(1, "a.weight_scale "), (2, "a.weight_scale_2 ")] {
        let mut tensors = nvfp4("a", 2, 32);
        tensors.remove(left_out);
        let e = scheme(&tensors).expect_err("incomplete");
        assert!(matches!(e, CheckpointError::MissingPlane { .. }), "{e}");
        assert_message(&e, &["model.safetensors", "a.weight", name, "missing"]);
    }
    // Codes without any scale have no value.
    for codes in [t("a.weight", "U8", &[2, 16]), t("a.weight", "F8_E4M3", &[2, 16])] {
        assert_message(&scheme(&[codes]).expect_err("incomplete"), &["a.weight_scale"]);
    }
    let e = scheme(&[t("a.weight_packed", "U8", &[2, 16]), t("a.weight_scale", "F8_E4M3", &[2, 2])]);
    assert_message(&e.expect_err("incomplete"), &["a.weight_global_scale"]);
}

#[test]
fn plane_without_its_weight_is_an_orphan() {
    let mut tensors = nvfp4("b", 2, 32);
    tensors.remove(0);
    let f = Folder::single(&tensors);
    let c = f.open().expect("opens");
    let e = c.resolve_all().expect_err("orphans");
    assert!(matches!(e, CheckpointError::Orphan { .. }), "{e}");
    assert_message(&e, &["b.input_scale", "b has none"]);
    assert_eq!(c.resolve_each().filter(Result::is_err).count(), 3);
    assert!(c.resolve("b").expect("nothing").is_none());
}

#[test]
fn wrong_dtypes_and_shapes_are_refused_with_expected_and_found() {
    let swap = |i: usize, with: T| {
        let mut tensors = nvfp4("a", 2, 32);
        tensors[i] = with;
        tensors
    };
    let cases: Vec<(Vec<T>, [&str; 2])> = vec![
        (swap(1, t("a.weight_scale", "BF16", &[2, 2])), ["F8_E4M3", "BF16"]),
        (swap(1, t("a.weight_scale", "F8_E4M3", &[2, 3])), ["[2, 2]", "[2, 3]"]),
        (swap(1, t("a.weight_scale", "F8_E4M3", &[4])), ["[2, 2]", "[4]"]),
        (swap(2, f32s("a.weight_scale_2", &[2], &[1.0, 1.0])), ["one value", "[2]"]),
        (swap(2, t("a.weight_scale_2", "BF16", &[])), ["F32", "BF16"]),
        (swap(3, t("a.input_scale", "F64", &[1])), ["F32", "F64"]),
        (swap(0, t("a.weight", "U8", &[2, 12])), ["blocks of 16", "[2, 12]"]),
        (swap(0, t("a.weight", "U8", &[1, 2, 16])), ["[rows, columns]", "[1, 2, 16]"]),
        (swap(0, t("a.weight", "BF16", &[2, 32])), ["no such tensor beside a.weight", "F8_E4M3"]),
        (fp8(t("a.weight_scale", "F32", &[129, 1])), ["[130, 1]", "[129, 1]"]),
        (fp8(t("a.weight_scale", "F16", &[1])), ["F32 or BF16", "F16"]),
        (fp8(t("a.weight_scale", "U8", &[130, 7])), ["[130, 8]", "[130, 7]"]),
        (fp8(t("a.weight_scale_inv", "F32", &[2, 1])), ["[2, 2]", "[2, 1]"]),
        (fp8(t("a.weight_scale_inv", "F32", &[])), ["[2, 2]", "[]"]),
        (fp8(t("a.weight_scale_inv", "F64", &[2, 2])), ["F32 or BF16", "F64"]),
        (vec![t("a.weight_packed", "I32", &[2, 4]), t("a.weight_scale", "BF16", &[2, 1])], ["U8", "I32"]),
    ];
    for (tensors, parts) in cases {
        let e = scheme(&tensors).expect_err("misfit");
        assert!(matches!(e, CheckpointError::Scheme { .. }), "{e}");
        assert_message(&e, &parts);
    }
}

#[test]
fn mixed_conventions_are_refused_not_guessed() {
    let add = |mut tensors: Vec<T>, extra: T| {
        tensors.push(extra);
        tensors
    };
    for tensors in [
        add(nvfp4("a", 2, 32), f32s("a.weight_global_scale", &[1], &[2.0])),
        add(nvfp4("a", 2, 32), t("a.weight_packed", "U8", &[2, 16])),
        add(nvfp4("a", 2, 32), t("a", "BF16", &[2])),
        add(nvfp4("a", 2, 32), t("a.weight_zero_point", "U8", &[2, 2])),
        add(fp8(t("a.weight_scale", "F32", &[1])), t("a.weight_scale_inv", "F32", &[2, 2])),
        add(fp8(t("a.weight_scale", "F32", &[1])), f32s("a.weight_scale_2", &[], &[1.0])),
        add(vec![t("a.weight", "BF16", &[2, 4])], f32s("a.input_scale", &[], &[1.0])),
    ] {
        let e = scheme(&tensors).expect_err("ambiguous");
        assert!(matches!(e, CheckpointError::Scheme { .. }), "{e}");
    }
}

#[test]
fn parts_of_a_split_table_share_their_parents_scale() {
    let f = Folder::single(&[
        t("p.ngram.shard_0.weight", "F8_E4M3", &[4, 16]),
        t("p.ngram.shard_1.weight", "F8_E4M3", &[4, 16]),
        with("p.ngram.weight_scale", "BF16", &[1], &0x3f00u16.to_le_bytes()),
    ]);
    let c = f.open().expect("opens");
    let all = c.resolve_all().expect("resolves");
    assert_eq!(all.len(), 2);
    assert!(all.iter().all(|t| t.scheme() == Scheme::Fp8Tensor { scale: Dtype::Bf16, input_scale: false }));
    assert_eq!(all[1].tensor_scale().expect("legal"), Some(0.5));
    // The scale itself can be asked for by its name.
    let s = c.resolve("p.ngram.weight_scale").expect("resolves").expect("there");
    assert_eq!(s.scheme(), Scheme::Plain(Dtype::Bf16));
}

fn decode_all(c: &Checkpoint, name: &str) -> Result<Vec<f32>, CheckpointError> {
    let t = c.resolve(name)?.expect("there");
    let mut out = vec![0.0; (t.rows() * t.row_len()) as usize];
    t.decode_rows_f32(0..t.rows(), &mut out).map(|()| out)
}

#[test]
fn decoding_rounds_the_exact_product_once() {
    // 0x21 = codes 1 (0.5) and 2 (1.0); block scale 0x38 = 1.0.
    let f = Folder::single(&[
        with("m.weight", "U8", &[1, 8], &[0x21; 8]),
        with("m.weight_scale", "F8_E4M3", &[1, 1], &[0x3a]),
        f32s("m.weight_scale_2", &[], &[0.1]),
        with("d.weight_packed", "U8", &[1, 8], &[0xf1; 8]),
        with("d.weight_scale", "F8_E4M3", &[1, 1], &[0x3a]),
        f32s("d.weight_global_scale", &[1], &[3.0]),
        with("x.weight", "F8_E4M3", &[1, 32], &[0x39; 32]),
        with("x.weight_scale", "U8", &[1, 1], &[120]),
    ]);
    let c = f.open().expect("opens");
    let s = 1.25f32;
    let m = decode_all(&c, "m").expect("decodes");
    assert_eq!(m[..2], [(0.5 * s) * 0.1, s * 0.1]);
    let d = decode_all(&c, "d").expect("decodes");
    assert_eq!(d[..2], [(0.5 * s) / 3.0, (-6.0 * s) / 3.0]);
    assert_eq!(decode_all(&c, "x").expect("decodes")[0], 1.125 / 128.0);
}

#[test]
fn block_scales_follow_rows_and_columns_over_edge_tiles() {
    let (n, k) = (130u64, 200u64);
    let f = Folder::single(&[
        with("a.weight", "F8_E4M3", &[n, k], &vec![0x38; (n * k) as usize]),
        f32s("a.weight_scale_inv", &[2, 2], &[1.0, 2.0, 3.0, 4.0]),
    ]);
    let c = f.open().expect("opens");
    let out = decode_all(&c, "a").expect("decodes");
    let at = |r: u64, col: u64| out[(r * k + col) as usize];
    assert_eq!([at(0, 0), at(127, 127), at(0, 128), at(128, 0), at(129, 199)], [1.0, 1.0, 2.0, 3.0, 4.0]);
    // A range that starts inside the second row of tiles.
    let t = c.resolve("a").expect("resolves").expect("there");
    let mut row = vec![0.0; k as usize];
    t.decode_rows_f32(129..130, &mut row).expect("row");
    assert_eq!((row[0], row[199]), (3.0, 4.0));
}

#[test]
fn illegal_words_are_named_with_their_place() {
    let base = || nvfp4("a", 2, 32);
    let with_scale = |scales: &[u8]| {
        let mut tensors = base();
        tensors[1] = with("a.weight_scale", "F8_E4M3", &[2, 2], scales);
        tensors
    };
    for (scales, found) in [
        ([0x38, 0x38, 0x38, 0x7f], "0x7f"),
        ([0x38, 0x38, 0x38, 0xb8], "0xb8"),
        ([0x38, 0x38, 0x38, 0xff], "0xff"),
    ] {
        let f = Folder::single(&with_scale(&scales));
        let c = f.open().expect("opens");
        let e = decode_all(&c, "a").expect_err("illegal");
        assert!(matches!(e, CheckpointError::IllegalWord { row: 1, column: 1, .. }), "{e}");
        let offset = c.get("a.weight_scale").expect("there").offset + 3;
        assert_message(&e, &["a.weight_scale", found, &offset.to_string()]);
    }
    for bad in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        for (i, name) in [(2, "a.weight_scale_2"), (3, "a.input_scale")] {
            let mut tensors = base();
            tensors[i] = f32s(name, &[], &[bad]);
            let f = Folder::single(&tensors);
            let c = f.open().expect("opens");
            let t = c.resolve("a").expect("resolves").expect("there");
            let e = if i == 2 { t.global_scale() } else { t.input_scale() }.expect_err("illegal");
            assert_message(&e, &[name, "positive finite"]);
            if i == 2 {
                assert!(decode_all(&c, "a").is_err());
            }
        }
    }
    for (tensors, place) in [
        (
            vec![with("a.weight", "F8_E4M3", &[1, 2], &[0, 0x7f]), t("a.weight_scale", "F32", &[1])],
            "a.weight, row 0, column 1",
        ),
        (
            vec![
                with("a.weight", "F8_E4M3", &[1, 32], &[0; 32]),
                with("a.weight_scale", "U8", &[1, 1], &[255]),
            ],
            "a.weight_scale, row 0",
        ),
        (
            vec![
                with("a.weight", "F8_E4M3", &[2, 2], &[0; 4]),
                f32s("a.weight_scale", &[2, 1], &[1.0, f32::NAN]),
            ],
            "a.weight_scale, row 1",
        ),
        (
            vec![with("a.weight", "F8_E4M3", &[2, 2], &[0; 4]), f32s("a.weight_scale_inv", &[1, 1], &[-1.0])],
            "a.weight_scale_inv, row 0",
        ),
    ] {
        let f = Folder::single(&tensors);
        let e = decode_all(&f.open().expect("opens"), "a").expect_err("illegal");
        assert!(matches!(e, CheckpointError::IllegalWord { .. }), "{e}");
        assert_message(&e, &[place]);
    }
}

#[test]
fn integers_and_misfit_buffers_are_refused() {
    let f = Folder::single(&[t("i", "I64", &[3]), t("a.weight", "BF16", &[2, 4]), t("e", "F32", &[0, 4])]);
    let c = f.open().expect("opens");
    assert!(matches!(decode_all(&c, "i"), Err(CheckpointError::NotDecodable { .. })));
    assert_eq!(decode_all(&c, "e").expect("nothing to do").len(), 0);
    let a = c.resolve("a").expect("resolves").expect("there");
    for (start, end, len) in [(0, 3, 12), (0, 1, 5), (2, 1, 0), (0, u64::MAX, 8)] {
        assert!(matches!(
            a.decode_rows_f32(start..end, &mut vec![0.0; len]),
            Err(CheckpointError::Range { .. })
        ));
    }
}

#[test]
fn plain_words_widen_exactly() {
    let f = Folder::single(&[
        with("b", "BF16", &[2], &[0x80, 0x3f, 0x01, 0x00]),
        with("h", "F16", &[3], &[0x00, 0x3c, 0x01, 0x00, 0x01, 0x84]),
        with("d", "F64", &[1], &0.1f64.to_le_bytes()),
    ]);
    let c = f.open().expect("opens");
    assert_eq!(decode_all(&c, "b").expect("decodes"), [1.0, f32::from_bits(0x0001_0000)]);
    assert_eq!(decode_all(&c, "h").expect("decodes"), [1.0, 2f32.powi(-24), -(1025.0 * 2f32.powi(-24))]);
    assert_eq!(decode_all(&c, "d").expect("decodes"), [0.1f32]);
}

#[test]
fn config_that_disagrees_is_a_warning_and_the_tensors_are_believed() {
    let f = Folder::single(
        &[nvfp4("l.0.a", 2, 32), nvfp4("l.1.a", 2, 32), vec![t("l.2.a.weight", "BF16", &[2, 4])]].concat(),
    );
    f.put("config.json", br#"{"quantization_config":{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION","ignore":["l.2*"],
        "quantized_layers":{"l.0.a":{"quant_algo":"NVFP4"},"l.1.*":{"quant_algo":"FP8"}}}}"#);
    f.put(
        "hf_quant_config.json",
        br#"{"quantization":{"quant_algo":"NVFP4","exclude_modules":["l.0*","l.2.b"]}}"#,
    );
    let c = f.open().expect("opens");
    let w = c.cross_check().expect("checks");
    let text: Vec<String> = w.iter().map(|w| w.to_string()).collect();
    assert_eq!(w.len(), 2, "{text:?}");
    assert_eq!((w[0].file, &*w[0].pattern, &*w[0].example), ("config.json", "l.1.*", "l.1.a"));
    assert_eq!(
        (w[1].file, &*w[1].pattern, &*w[1].expected),
        ("hf_quant_config.json", "l.0*", "not quantized")
    );
    assert!(text[0].contains("FP8 per tensor") && text[0].contains("NVFP4 with a multiplier"), "{text:?}");
    // A config that promises what is not there.
    f.put("config.json", br#"{"quantization_config":{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION","quantized_layers":{"l.*":{"quant_algo":"NVFP4"}}}}"#);
    let w = c.cross_check().expect("checks");
    assert!(w.iter().any(|w| w.example == "l.2.a" && w.found == "BF16"), "{w:?}");
}
