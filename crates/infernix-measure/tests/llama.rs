//! llama.cpp's own printout of a pair of models, from the log-probabilities stored of both.

#![expect(
    clippy::print_stdout,
    reason = "says why a test is skipped, and shows the printout where one fails"
)]

use infernix_measure::llama::BaseFile;
use infernix_measure::{
    Call, Chunks, KldOptions, KldReport, LogitsSource, Path, Reference, Result, Rows, Sink, StoredFile, Test,
    compare, kld,
};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

fn shared(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models").join(name);
    if !path.exists() {
        println!("skipped: {} is not here", path.display());
        return None;
    }
    Some(path)
}

fn run(a: &str, b: &str, llama: bool) -> Option<KldReport> {
    let (a, b) = (shared(a)?, shared(b)?);
    Some(compare(&a, &b, llama, &mut |_| {}, &AtomicBool::new(false)).unwrap())
}

/// Label and numbers of every line of a printout's statistics.
fn lines(text: &str) -> Vec<(String, Vec<f64>)> {
    let number = |w: &str| w.trim_end_matches('%').parse::<f64>().ok();
    let split = |l: &str| {
        let at = l.rfind(": ")?;
        let values: Vec<f64> = l[at + 1..].split([' ', '±']).filter_map(number).collect();
        Some((l[..at].trim().to_owned(), values))
    };
    text.lines()
        .filter(|l| l.contains("PPL") || l.contains("KLD") || l.contains('p'))
        .filter_map(split)
        .collect()
}

#[test]
fn the_printed_lines_come_back_from_the_stored_codes() {
    let Some(report) = run("llamacpp-kld/flash-bf16.kld", "llamacpp-kld/flash-iq3_s.kld", true) else {
        return;
    };
    let printed = std::fs::read_to_string(shared("llamacpp-kld/printed.txt").unwrap()).unwrap();
    let ours = report.to_llama_text();
    println!("{ours}");
    let (want, got) = (lines(&printed), lines(&ours));
    assert_eq!(want.len(), 34, "{want:?}");
    assert_eq!(want.iter().map(|w| &w.0).collect::<Vec<_>>(), got.iter().map(|g| &g.0).collect::<Vec<_>>());
    for ((label, want), (_, got)) in want.iter().zip(&got) {
        assert_eq!(want.len(), got.len(), "{label}");
        for (w, g) in want.iter().zip(got) {
            // KLD lines 5e-5 and PPL lines 1e-4 (of the perplexity, relative), Δp lines a step of their last digits.
            let bound = match label {
                l if l.contains("KLD") => 5e-5,
                l if l.starts_with("Mean PPL(") && !l.contains('/') && !l.contains('-') => 1e-4 * w.abs(),
                l if l.contains("PPL(Q)-") => 1e-4 * 31.0,
                l if l.contains("Cor") => 0.011,
                l if l.contains("PPL") => 1e-4,
                l if l.contains("Same top") => 1e-9,
                _ => 3e-3,
            };
            assert!((w - g).abs() <= bound, "{label}: printed {w}, ours {g}");
        }
    }
    // The same lines in the same form.
    let from = printed.find("chunk   ").unwrap();
    let form = |t: &str| t.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect::<String>();
    let strip = |t: &str| form(t).replace(['-', ' '], "");
    assert_eq!(strip(printed[from..].trim()), strip(ours.trim()));
}

#[test]
fn a_file_against_itself_differs_only_by_its_clipped_tail() {
    let Some(report) = run("llamacpp-kld/flash-bf16.kld", "llamacpp-kld/flash-bf16.kld", true) else {
        return;
    };
    let s = &report.paths[0].stats;
    assert_eq!((s.kld.value, s.same_top.value, s.ln_ratio.value, s.p_diff_rms.value), (0.0, 1.0, 0.0, 0.0));
    assert_eq!(s.ratio.pm, Some(0.0), "no NaN where models are equal");
}

#[test]
fn in_double_precision_the_same_file_gives_nearly_the_same() {
    let (Some(a), Some(b)) = (
        run("llamacpp-kld/flash-bf16.kld", "llamacpp-kld/flash-iq3_s.kld", true),
        run("llamacpp-kld/flash-bf16.kld", "llamacpp-kld/flash-iq3_s.kld", false),
    ) else {
        return;
    };
    assert_eq!(b.paths[0].kl, "cut_16");
    let (a, b) = (&a.paths[0].stats, &b.paths[0].stats);
    assert!((a.kld.value - b.kld.value).abs() < 1e-6 && (a.ppl_test.value - b.ppl_test.value).abs() < 1e-4);
    assert_eq!(a.same_top.value, b.same_top.value);
}

#[test]
fn files_of_different_texts_are_refused_by_name_and_place() {
    let (Some(a), Some(b)) =
        (shared("flash-demo-gguf/llamacpp-f32-c128.kld"), shared("flash-demo-gguf/llamacpp-native-c64.kld"))
    else {
        return;
    };
    let e = compare(&a, &b, true, &mut |_| {}, &AtomicBool::new(false)).unwrap_err().to_string();
    assert!(e.contains("llamacpp-native-c64.kld") && e.contains("1 of 128") && e.contains("1 of 64"), "{e}");
    let StoredFile::Llama(f) = StoredFile::open(&a).unwrap() else { panic!("a base file") };
    assert_eq!((f.header().ctx, f.header().vocab, f.header().rows_per_chunk()), (128, 4096, 63));
}

/// Logits by a formula that is exact in f32; `.0` tells the two models apart.
struct Formula(usize);

const VOCAB: usize = 50;

impl LogitsSource for Formula {
    fn vocab(&self) -> usize {
        VOCAB
    }

    fn describe(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    fn rows(&mut self, call: &Call<'_>, sink: &mut Sink<'_>) -> Result<()> {
        let c = call.stream as usize;
        (0..call.rows.len()).try_for_each(|i| {
            let logit = |v: usize| {
                let x = (c * 977 + i * 131 + v * v * 7 + v * 31 + i * v * 3) % 1301;
                let d = (v * 17 + i * 5 + c) % 23;
                x as f32 / 64.0 + self.0 as f32 * (d as f32 - 11.0) / 32.0
            };
            sink(i, &(0..VOCAB).map(logit).collect::<Vec<_>>())
        })
    }
}

/// `printed_by_llama.txt` is what llama.cpp's own `llama-perplexity --kl-divergence` prints (0c1e570, one thread, its
/// model's logits replaced by these) over both sets of these logits, the first one through its base file. Of the first
/// three chunks, 93 rows, it prints the same table and no statistics.
#[test]
fn llama_cpp_s_own_functions_print_the_same_to_the_last_digit() {
    let tokens: Vec<u32> = (0..512).map(|i| i * 7 % 50).collect();
    let dir = tempfile::tempdir().unwrap();
    let mut options = KldOptions::new(Chunks::new("formula", b"", &tokens, 64, None).unwrap(), VOCAB);
    options.llama_compat = true;
    options.save_base = Some(dir.path().join("a.kld"));
    options.group = 3;
    let tests = || {
        let rows = Rows::Source { index: 1, path: Path::Prompt, rounding: None };
        vec![Test { engine: "test".into(), rows }]
    };
    let off = AtomicBool::new(false);
    let (mut a, mut b) = (Formula(0), Formula(1));
    let live =
        kld(&options, &mut [&mut a, &mut b], Reference::Source(0), tests(), &mut |_| {}, &off).unwrap();
    assert_eq!(live.to_llama_text(), include_str!("printed_by_llama.txt"));
    let base = Reference::Llama(BaseFile::open(&dir.path().join("a.kld")).unwrap());
    options.save_base = None;
    let stored = kld(&options, &mut [&mut a, &mut b], base, tests(), &mut |_| {}, &off).unwrap();
    let printed = include_str!("printed_by_llama.txt");
    assert_eq!(stored.to_llama_text(), printed);
    options.chunks = options.chunks.first(3).unwrap();
    let base = Reference::Llama(BaseFile::open(&dir.path().join("a.kld")).unwrap());
    let few = kld(&options, &mut [&mut a, &mut b], base, tests(), &mut |_| {}, &off).unwrap();
    let table: Vec<&str> = printed.lines().take(4).collect();
    assert_eq!(few.to_llama_text(), format!("{}\n\n", table.join("\n")));
}
