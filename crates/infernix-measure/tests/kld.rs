//! Comparisons of synthetic models: exact zeros, numpy's figures, saved references, interruption and resumption.

use infernix_measure::llama::BaseFile;
use infernix_measure::reference::ReferenceFile;
use infernix_measure::*;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

const VOCAB: usize = 48;
const VALID: usize = 45;
const CTX: usize = 16;

/// A model whose logits depend on the tokens so far, the seed of its noise and the stream.
struct Toy {
    noise: f32,
    seed: Option<u64>,
    /// Calls after which an interrupt is raised.
    stop: Option<(usize, std::sync::Arc<AtomicBool>)>,
    calls: usize,
}

fn toy(noise: f32) -> Toy {
    Toy { noise, seed: None, stop: None, calls: 0 }
}

fn mix(x: u64) -> f32 {
    let z = (x ^ (x >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z >> 40) as f32 / (1u64 << 24) as f32 - 0.5
}

impl LogitsSource for Toy {
    fn vocab(&self) -> usize {
        VOCAB
    }

    fn describe(&self) -> Value {
        json!({ "toy": self.noise })
    }

    fn set_rounding(&mut self, seed: Option<u64>) -> Result<()> {
        self.seed = seed;
        Ok(())
    }

    fn rows(&mut self, call: &Call<'_>, sink: &mut Sink<'_>) -> Result<()> {
        self.calls += 1;
        if let Some((after, flag)) = &self.stop {
            flag.store(self.calls >= *after, Ordering::Relaxed);
        }
        for (i, j) in call.rows.clone().enumerate() {
            let history = call.tokens[..=j].iter().fold(7u64, |h, t| h.wrapping_mul(31) + u64::from(*t));
            let seed = self.seed.unwrap_or(0).wrapping_mul(0x1234_5678_9abc_def1);
            let noise = if self.seed.is_some() { 0.02 } else { self.noise };
            let logits: Vec<f32> = (0..VOCAB as u64)
                .map(|v| {
                    12.0 * mix(history.wrapping_mul(1000) + v)
                        + noise * mix((history ^ seed).wrapping_mul(1000) + v + 77)
                })
                .collect();
            sink(i, &logits)?;
        }
        Ok(())
    }
}

fn text(chunks: usize) -> Chunks {
    let tokens: Vec<u32> =
        (0..chunks as u32 * CTX as u32 + 5).map(|i| (i * i + i / 3) % VALID as u32).collect();
    Chunks::new("toy text", b"toy", &tokens, CTX, None).unwrap()
}

fn test(engine: &str, index: usize, path: Path, rounding: Option<u64>) -> Test {
    Test { engine: engine.into(), rows: Rows::Source { index, path, rounding } }
}

fn run(options: &KldOptions, sources: &mut [&mut dyn LogitsSource], tests: Vec<Test>) -> Result<KldReport> {
    kld(options, sources, Reference::Source(0), tests, &mut |_| {}, &AtomicBool::new(false))
}

#[test]
fn a_model_against_itself_is_exactly_zero() {
    let (mut a, mut b) = (toy(0.0), toy(0.0));
    let report = run(
        &KldOptions::new(text(9), VALID),
        &mut [&mut a, &mut b],
        vec![test("same", 1, Path::Prompt, None), test("same", 1, Path::Decode, None)],
    )
    .unwrap();
    for p in &report.paths {
        assert_eq!(
            (p.kl, p.stats.kld.value, p.ppl_ratio_pct, p.stats.same_top.value),
            ("full", 0.0, 0.0, 1.0)
        );
        assert_eq!((p.kld_ci, p.ppl_ratio_ci, p.top1_ci), (Some([0.0; 2]), Some([0.0; 2]), Some([1.0; 2])));
        assert!(p.stats.kld_percentiles.iter().all(|(_, v)| *v == 0.0));
    }
    let json = report.to_json();
    assert_eq!(json["chunks"], 9);
    assert_eq!(json["rows"], 9 * 7);
    assert_eq!(json["rounding"], Value::Null);
    assert_eq!(json["paths"][1]["path"], "decode");
}

#[test]
fn times_rounding_divides_by_the_mean_over_seeds() {
    let (mut a, mut b) = (toy(0.0), toy(0.4));
    let tests = vec![
        test("noisy", 1, Path::Prompt, None),
        test("honest", 0, Path::Prompt, Some(1)),
        test("honest", 0, Path::Prompt, Some(2)),
    ];
    let report = run(&KldOptions::new(text(40), VALID), &mut [&mut a, &mut b], tests).unwrap();
    let json = report.to_json();
    let r = report.rounding.as_ref().unwrap();
    assert_eq!(json["rounding"]["seeds"], json!([1, 2]));
    assert!((r.mean_kld - (r.seeds[0].1 + r.seeds[1].1) / 2.0).abs() < 1e-15);
    assert_ne!(r.seeds[0].1, r.seeds[1].1);
    assert_eq!(report.paths.len(), 1);
    let p = &report.paths[0];
    let times = p.times_rounding.unwrap();
    assert!(times > 3.0 && (times - p.stats.kld.value / r.mean_kld).abs() < 1e-12);
    let [low, high] = p.times_rounding_ci.unwrap();
    assert!(low < times && times < high);
    let text = report.to_text();
    assert!(text.contains("honest rounding, 2 seeds") && text.contains("noisy"), "{text}");
    assert!(report.to_markdown().starts_with("| path | engine |"));
}

#[test]
fn figures_do_not_change_from_run_to_run() {
    let once = || {
        let (mut a, mut b) = (toy(0.0), toy(0.3));
        let report = run(
            &KldOptions::new(text(12), VALID),
            &mut [&mut a, &mut b],
            vec![test("n", 1, Path::Prompt, None)],
        );
        report.unwrap().to_json()["paths"].to_string()
    };
    assert_eq!(once(), once());
}

/// Replays stored rows.
struct Played(Vec<Vec<f32>>, usize);

impl LogitsSource for Played {
    fn vocab(&self) -> usize {
        VOCAB
    }

    fn describe(&self) -> Value {
        Value::Null
    }

    fn rows(&mut self, call: &Call<'_>, sink: &mut Sink<'_>) -> Result<()> {
        let n = call.rows.len();
        let first = call.stream as usize * n;
        (0..n).try_for_each(|i| sink(i, &self.0[first + i]))?;
        self.1 += 1;
        Ok(())
    }
}

fn golden() -> (Value, Chunks, Played, Played) {
    let g: Value = serde_json::from_str(include_str!("golden.json")).unwrap();
    let rows = |key: &str| {
        let hex = g[key].as_str().unwrap();
        let bytes: Vec<u8> =
            (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
        let floats: Vec<f32> =
            bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Played(floats.chunks(VOCAB).map(<[f32]>::to_vec).collect(), 0)
    };
    let tokens: Vec<u32> =
        g["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
    let (a, b) = (rows("reference"), rows("test"));
    (g, Chunks::new("golden", b"", &tokens, CTX, None).unwrap(), a, b)
}

#[test]
fn statistics_are_those_of_numpy() {
    let (g, chunks, mut a, mut b) = golden();
    let report =
        run(&KldOptions::new(chunks, VALID), &mut [&mut a, &mut b], vec![test("t", 1, Path::Prompt, None)])
            .unwrap();
    let s = &report.paths[0].stats;
    let line = |p: &stats::Percentiles, n: &str| p.iter().find(|x| x.0 == n).unwrap().1;
    let got = [
        ("mean_kld", s.kld.value),
        ("kld_pm", s.kld.pm.unwrap()),
        ("p999", line(&s.kld_percentiles, "99.9")),
        ("p90", line(&s.kld_percentiles, "90")),
        ("median", line(&s.kld_percentiles, "50")),
        ("p1", line(&s.kld_percentiles, "1")),
        ("ppl_test", s.ppl_test.value),
        ("ppl_test_pm", s.ppl_test.pm.unwrap()),
        ("ppl_reference", s.ppl_reference.value),
        ("ln_ratio", s.ln_ratio.value),
        ("ln_ratio_pm", s.ln_ratio.pm.unwrap()),
        ("correlation", s.correlation.unwrap()),
        ("dp_mean", s.p_diff.value),
        ("dp_pm", s.p_diff.pm.unwrap()),
        ("dp_rms", s.p_diff_rms.value),
        ("dp_q75", line(&s.p_diff_percentiles, "75")),
        ("top1", s.same_top.value),
    ];
    for (name, value) in got {
        let want = g["stats"][name].as_f64().unwrap();
        assert!((value - want).abs() <= 1e-11 * (1.0 + want.abs()), "{name}: {value}, numpy {want}");
    }
}

#[test]
fn a_saved_reference_gives_a_lower_bound_and_all_else_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let (_, chunks, mut a, mut b) = golden();
    let mut options = KldOptions::new(chunks.clone(), VALID);
    options.save_reference = Some(dir.path().join("a.ref"));
    options.save_base = Some(dir.path().join("a.kld"));
    options.top_k = 12;
    let full = run(&options, &mut [&mut a, &mut b], vec![test("t", 1, Path::Prompt, None)]).unwrap();
    let e = run(&options, &mut [&mut a, &mut b], Vec::new()).unwrap_err().to_string();
    assert!(e.contains("exists"), "{e}");

    options.save_reference = None;
    options.save_base = None;
    let stored = |name: &str| StoredFile::open(&dir.path().join(name)).unwrap().reference();
    let off = AtomicBool::new(false);
    let with = |reference, options: &KldOptions, b: &mut Played| {
        kld(options, &mut [b], reference, vec![test("t", 0, Path::Prompt, None)], &mut |_| {}, &off)
    };
    let again = with(stored("a.ref"), &options, &mut b).unwrap();
    let (f, s) = (&full.paths[0], &again.paths[0]);
    assert_eq!((f.kl, s.kl), ("full", "top_k"));
    assert!(s.stats.kld.value <= f.stats.kld.value && s.stats.kld.value > 0.8 * f.stats.kld.value);
    assert_eq!((s.ppl_ratio_pct, s.stats.same_top), (f.ppl_ratio_pct, f.stats.same_top));
    assert_eq!(s.stats.ppl_reference, f.stats.ppl_reference);

    // A file against itself needs no model; all ids kept means no bound.
    let own =
        compare(&dir.path().join("a.ref"), &dir.path().join("a.ref"), false, &mut |_| {}, &off).unwrap();
    assert_eq!(own.paths[0].stats.kld.value, 0.0);
    options.top_k = VALID as u32;
    options.save_reference = Some(dir.path().join("all.ref"));
    run(&options, &mut [&mut a], Vec::new()).unwrap();
    options.save_reference = None;
    let all = with(stored("all.ref"), &options, &mut b).unwrap();
    assert!((all.paths[0].stats.kld.value - f.stats.kld.value).abs() < 1e-13);

    // llama.cpp's file of the same reference holds all ids and unrounded logits: nothing masked, nearly the same mean.
    let unmasked = KldOptions::new(chunks.clone(), VOCAB);
    let base = with(stored("a.kld"), &unmasked, &mut b).unwrap();
    let live = run(&unmasked, &mut [&mut a, &mut b], vec![test("t", 1, Path::Prompt, None)]).unwrap();
    let (base, live) = (&base.paths[0], &live.paths[0]);
    assert_eq!((base.kl, live.kl), ("cut_16", "full"));
    assert!((base.stats.kld.value / live.stats.kld.value - 1.0).abs() < 0.02);
    let file = BaseFile::open(&dir.path().join("a.kld")).unwrap();
    assert_eq!(file.tokens(), chunks.tokens());

    // Another text, another number of chunks, another mask.
    let mut tokens = chunks.tokens().to_vec();
    tokens[3] = (tokens[3] + 1) % VALID as u32;
    let other = Chunks::new("golden", b"", &tokens, CTX, None).unwrap();
    let fewer = Chunks::new("golden", b"", chunks.tokens(), CTX, Some(3)).unwrap();
    for (chunks, valid, what) in [
        (other, VALID, "digest of the tokens"),
        (fewer.clone(), VALID, "chunks"),
        (chunks.clone(), VALID + 1, "valid ids"),
    ] {
        let e = with(stored("a.ref"), &KldOptions::new(chunks, valid), &mut b).unwrap_err().to_string();
        assert!(e.contains(what) && e.contains("a.ref"), "{e}");
    }
    // The first chunks of the file's own text are measured alone, with and without its tokens.
    let first = KldOptions::new(chunks.first(3).unwrap(), VALID);
    let part = with(stored("a.ref"), &first, &mut b).unwrap();
    assert_eq!((part.run["chunks"].as_u64(), part.paths[0].stats.rows), (Some(3), 3 * 7));
    assert_eq!(part.run["corpus"]["tokens_blake3"], fewer.tokens_blake3());
    let file = StoredFile::open(&dir.path().join("a.ref")).unwrap();
    let first = KldOptions::new(file.chunks(CTX, Some(3)).unwrap(), VALID);
    let tests =
        vec![Test { engine: "f".into(), rows: StoredFile::open(&dir.path().join("a.ref")).unwrap().rows() }];
    let own = kld(&first, &mut [], file.reference(), tests, &mut |_| {}, &off).unwrap();
    assert_eq!((own.paths[0].stats.rows, own.paths[0].stats.kld.value), (3 * 7, 0.0));
    assert!(StoredFile::open(&dir.path().join("a.ref")).unwrap().chunks(CTX + 1, None).is_err());
}

#[test]
fn a_damaged_reference_is_refused_wherever_it_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ref");
    let mut a = toy(0.0);
    let mut options = KldOptions::new(text(3), VALID);
    options.save_reference = Some(path.clone());
    options.top_k = 8;
    run(&options, &mut [&mut a], Vec::new()).unwrap();
    let good = std::fs::read(&path).unwrap();
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let mut f = ReferenceFile::open(&path)?;
        (0..f.header().chunks as usize).try_for_each(|c| f.chunk(c).map(|_| ()))?;
        f.chunk(0)
    };
    assert_eq!(read(&good).unwrap().len(), 7);
    for at in (0..good.len()).step_by(13) {
        let mut bad = good.clone();
        bad[at] ^= 0x41;
        assert!(read(&bad).is_err(), "byte {at}");
    }
    for cut in [0, 7, 15, 40, good.len() / 2, good.len() - 1] {
        assert!(read(&good[..cut]).is_err(), "cut at {cut}");
    }
    assert!(read(&[&good[..], b"x"].concat()).is_err());
}

#[test]
fn an_interrupted_run_goes_on_and_gives_the_same_report() {
    let dir = tempfile::tempdir().unwrap();
    let options = |name: &str| {
        let mut o = KldOptions::new(text(10), VALID);
        o.state = Some(StatePlace::File(dir.path().join(format!("{name}.state"))));
        o.save_reference = Some(dir.path().join(format!("{name}.ref")));
        o.save_base = Some(dir.path().join(format!("{name}.kld")));
        o.top_k = 9;
        o
    };
    let tests = || vec![test("n", 1, Path::Prompt, None), test("honest", 0, Path::Prompt, Some(4))];
    let whole = run(&options("whole"), &mut [&mut toy(0.0), &mut toy(0.3)], tests()).unwrap();
    assert!(!dir.path().join("whole.state").exists());

    let mut o = options("cut");
    let flag = std::sync::Arc::new(AtomicBool::new(false));
    let mut a = toy(0.0);
    a.stop = Some((7, flag.clone()));
    let e =
        kld(&o, &mut [&mut a, &mut toy(0.3)], Reference::Source(0), tests(), &mut |_| {}, &flag).unwrap_err();
    assert!(matches!(e, MeasureError::Interrupted { done: 3, total: 10, .. }), "{e}");
    assert!(!dir.path().join("cut.ref").exists() && dir.path().join("cut.ref.partial").exists());

    // Not without being asked to, and not as another run.
    let again = |o: &KldOptions, noise: f32| run(o, &mut [&mut toy(0.0), &mut toy(noise)], tests());
    assert!(again(&o, 0.3).unwrap_err().to_string().contains("resume it"));
    o.resume = true;
    let e = again(&o, 0.2).unwrap_err().to_string();
    assert!(e.contains("tests.0.of.toy 0.3") && e.contains(" -> 0.2") && e.contains("cut.state"), "{e}");
    assert!(dir.path().join("cut.ref.partial").exists());
    // A record torn in the middle is done again.
    let state = dir.path().join("cut.state");
    let bytes = std::fs::read(&state).unwrap();
    std::fs::write(&state, &bytes[..bytes.len() - 5]).unwrap();
    let resumed = again(&o, 0.3).unwrap();
    let figures = |r: &KldReport| [r.to_json()["paths"].to_string(), r.to_json()["rounding"].to_string()];
    assert_eq!(figures(&whole), figures(&resumed));
    for kind in ["ref", "kld"] {
        let read = |n: &str| std::fs::read(dir.path().join(format!("{n}.{kind}"))).unwrap();
        assert_eq!(read("whole"), read("cut"), "{kind}");
    }
    assert!(!state.exists());
}

/// An unfinished file may hold hours: no other run takes it over, and nothing of a refused run stays.
#[test]
fn an_unfinished_reference_is_never_taken_over_by_another_run() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("states");
    let options = |chunks: usize| {
        let mut o = KldOptions::new(text(chunks), VALID);
        o.state = Some(StatePlace::Folder(folder.clone()));
        o.asked = [("--chunks".to_owned(), chunks.to_string())].into();
        o.save_reference = Some(dir.path().join("cut.ref"));
        o.top_k = 9;
        o
    };
    let tests = || vec![test("n", 1, Path::Prompt, None)];
    let flag = std::sync::Arc::new(AtomicBool::new(false));
    let mut a = toy(0.0);
    a.stop = Some((4, flag.clone()));
    let o = options(10);
    kld(&o, &mut [&mut a, &mut toy(0.3)], Reference::Source(0), tests(), &mut |_| {}, &flag).unwrap_err();
    let partial = dir.path().join("cut.ref.partial");
    let before = std::fs::read(&partial).unwrap();
    let again = |o: &KldOptions| run(o, &mut [&mut toy(0.0), &mut toy(0.3)], tests());
    let mut other = options(6);
    let e = again(&other).unwrap_err().to_string();
    assert!(e.contains("cut.ref.partial is there from an unfinished run"), "{e}");
    other.resume = true;
    let e = again(&other).unwrap_err().to_string();
    assert!(e.contains("--chunks 10 -> 6") && e.contains(".state") && e.lines().count() == 1, "{e}");
    let StatePlace::Folder(folder) = o.state.clone().unwrap() else { panic!("a folder") };
    let states: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(states.len(), 1, "neither refused run left a state or a lock: {states:?}");
    other.state = Some(StatePlace::File(states[0].clone()));
    let e = again(&other).unwrap_err().to_string();
    assert!(e.contains("--chunks 10 -> 6") && e.len() < 400, "{e}");
    assert_eq!(std::fs::read(&partial).unwrap(), before);
    let mut o = o;
    o.resume = true;
    again(&o).unwrap();
    assert!(!partial.exists() && std::fs::read_dir(&folder).unwrap().count() == 0);
}

/// What fails before its first chunk is finished leaves nothing that would block the next run.
#[test]
fn a_run_that_finishes_nothing_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut o = KldOptions::new(text(5), VALID);
    o.state = Some(StatePlace::File(dir.path().join("a.state")));
    o.save_reference = Some(dir.path().join("a.ref"));
    o.save_base = Some(dir.path().join("a.kld"));
    o.top_k = 9;
    let mut broken = Played(vec![vec![f32::NAN; VOCAB]], 0);
    let tests = || vec![test("broken", 1, Path::Decode, None)];
    let names = || std::fs::read_dir(dir.path()).unwrap().count();
    let e = run(&o, &mut [&mut toy(0.0), &mut broken], tests()).unwrap_err().to_string();
    assert!(e.contains("broken (decode): row 0 of chunk 0") && e.contains("id 0 is NaN"), "{e}");
    assert_eq!(names(), 0);
    // A name that is taken is seen before the state is made.
    std::fs::write(dir.path().join("a.kld"), "mine").unwrap();
    let e = run(&o, &mut [&mut toy(0.0), &mut toy(0.1)], vec![]).unwrap_err().to_string();
    assert!(e.contains("a.kld exists"), "{e}");
    assert_eq!(names(), 1);
}

/// A file of whole logits is no cut file; what it is compared with must be like it.
#[test]
fn a_file_of_whole_logits_is_scored_in_full_and_a_cut_one_has_no_yardstick() {
    let dir = tempfile::tempdir().unwrap();
    let (_, chunks, mut a, b) = golden();
    let n = chunks.rows().len();
    let logits = dir.path().join("b.safetensors");
    let positions: Vec<u32> =
        (0..chunks.count).flat_map(|c| chunks.rows().map(move |j| (c * CTX + j) as u32)).collect();
    let write = |bad: Option<(usize, usize)>| {
        let data: Vec<f32> =
            b.0.iter()
                .enumerate()
                .flat_map(|(r, row)| {
                    let mut row = row.clone();
                    if let Some((_, id)) = bad.filter(|bad| bad.0 == r) {
                        row[id] = f32::NAN;
                    }
                    row
                })
                .collect();
        let (l, p, t) = (data.len() * 4, positions.len() * 4, chunks.tokens().len() * 4);
        let header = json!({
            "logits": { "dtype": "F32", "shape": [positions.len(), VOCAB], "data_offsets": [0, l] },
            "positions": { "dtype": "I32", "shape": [positions.len()], "data_offsets": [l, l + p] },
            "input_ids": { "dtype": "I32", "shape": [chunks.tokens().len()], "data_offsets": [l + p, l + p + t] },
        })
        .to_string();
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        out.extend(data.iter().flat_map(|v| v.to_le_bytes()));
        out.extend(positions.iter().chain(chunks.tokens()).flat_map(|v| v.to_le_bytes()));
        std::fs::write(&logits, out).unwrap();
    };
    write(None);
    let mut options = KldOptions::new(chunks.clone(), VALID);
    options.save_base = Some(dir.path().join("a.kld"));
    run(&options, &mut [&mut a], Vec::new()).unwrap();
    options.save_base = None;
    let file = |name: &str| StoredFile::open(&dir.path().join(name)).unwrap();
    let all = || {
        let of = |name: &str| Test { engine: name.into(), rows: file(name).rows() };
        vec![test("honest", 0, Path::Prompt, Some(1)), of("b.safetensors"), of("a.kld"), of("b.safetensors")]
    };
    struct Noisy(Played, bool);
    impl LogitsSource for Noisy {
        fn vocab(&self) -> usize {
            VOCAB
        }
        fn describe(&self) -> Value {
            Value::Null
        }
        fn set_rounding(&mut self, seed: Option<u64>) -> Result<()> {
            self.1 = seed.is_some();
            Ok(())
        }
        fn rows(&mut self, call: &Call<'_>, sink: &mut Sink<'_>) -> Result<()> {
            let noise = if self.1 { 0.2 } else { 0.0 };
            self.0.rows(call, &mut |i, l| {
                let own: Vec<f32> = l.iter().enumerate().map(|(v, x)| x + noise * (v % 3) as f32).collect();
                sink(i, &own)
            })
        }
    }
    let mut noisy = Noisy(golden().2, false);
    let report = run(&options, &mut [&mut noisy], all()).unwrap();
    let kinds: Vec<&str> = report.paths.iter().map(|p| p.kl).collect();
    assert_eq!(kinds, ["full", "cut_16", "full"]);
    let times: Vec<bool> = report.paths.iter().map(|p| p.times_rounding.is_some()).collect();
    assert_eq!(times, [true, false, true]);
    assert!(report.notes.iter().any(|n| n.contains("no × rounding for a.kld")), "{:?}", report.notes);
    let rises: Vec<bool> = report.paths.iter().map(|p| p.rise.is_some()).collect();
    assert_eq!(rises, [false, false, true], "a cut KLD is not less or more than a full one");
    // In this direction too: a file of logits is the reference.
    let reverse = kld(
        &options,
        &mut [&mut noisy],
        file("b.safetensors").reference(),
        vec![test("live", 0, Path::Prompt, None)],
        &mut |_| {},
        &AtomicBool::new(false),
    )
    .unwrap();
    assert_eq!(reverse.paths[0].kl, "full");
    // A fault in it is told with file, chunk and row.
    write(Some((n + 2, 5)));
    let e = run(&options, &mut [&mut noisy], all()).unwrap_err().to_string();
    let position = CTX + chunks.rows().start + 2;
    for words in ["b.safetensors", "row 2 of chunk 1", &format!("position {position}"), "id 5 is NaN"] {
        assert!(e.contains(words), "{words}: {e}");
    }
    let e = kld(
        &options,
        &mut [&mut noisy],
        file("b.safetensors").reference(),
        vec![test("live", 0, Path::Prompt, None)],
        &mut |_| {},
        &AtomicBool::new(false),
    )
    .unwrap_err()
    .to_string();
    assert!(e.contains("b.safetensors") && e.contains("row 2 of chunk 1"), "{e}");
}

#[test]
fn few_rows_have_no_error_and_few_chunks_no_interval() {
    let (mut a, mut b) = (toy(0.0), toy(0.3));
    let one =
        run(&KldOptions::new(text(1), VALID), &mut [&mut a, &mut b], vec![test("n", 1, Path::Prompt, None)])
            .unwrap();
    let d = one.to_json();
    for key in ["mean_kld_pm", "mean_kld_ci", "top1_pm", "top1_ci", "correlation", "ppl_ratio_ci"] {
        assert!(d["paths"][0][key].is_null(), "{key}: {d:#}");
    }
    assert!(d["paths"][0]["ppl"]["pm"].is_null());
    let keys: Vec<&String> = d["paths"][0]["kld_percentiles"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["max", "50", "min"]);
    let text = one.to_text();
    assert!(
        text.contains("n/a (7 rows)")
            && text.contains("[n/a: 1 chunk]")
            && text.contains("7 rows give no standard"),
        "{text}"
    );
}

#[test]
fn in_llama_cpp_s_definitions_a_live_run_is_the_run_over_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let (_, chunks, mut a, mut b) = golden();
    let mut options = KldOptions::new(chunks, VOCAB);
    options.llama_compat = true;
    options.save_base = Some(dir.path().join("a.kld"));
    let tests = || vec![test("t", 1, Path::Prompt, None)];
    let live = run(&options, &mut [&mut a, &mut b], tests()).unwrap();
    options.save_base = None;
    let file = Reference::Llama(BaseFile::open(&dir.path().join("a.kld")).unwrap());
    let stored =
        kld(&options, &mut [&mut a, &mut b], file, tests(), &mut |_| {}, &AtomicBool::new(false)).unwrap();
    assert_eq!(live.paths[0].stats, stored.paths[0].stats);
    assert_eq!(live.to_llama_text(), stored.to_llama_text());
}

#[test]
fn what_cannot_be_measured_is_refused_before_anything_runs() {
    let mut a = toy(0.0);
    let mut refuse = |options: KldOptions, tests: Vec<Test>, what: &str| {
        let e = run(&options, &mut [&mut a], tests).unwrap_err().to_string();
        assert!(e.contains(what), "{e}");
    };
    refuse(KldOptions::new(text(2), VALID), vec![test("x", 3, Path::Prompt, None)], "no source 3");
    refuse(KldOptions::new(text(2), VOCAB + 1), Vec::new(), "valid ids");
    refuse(KldOptions::new(text(2), 5), Vec::new(), "not its tokenizer");
    let mut o = KldOptions::new(text(2), VALID);
    o.resume = true;
    refuse(o, Vec::new(), "state");
    let mut o = KldOptions::new(text(2), VALID);
    o.llama_compat = true;
    o.save_reference = Some("x.ref".into());
    refuse(o, Vec::new(), "16-bit codes");
}

#[test]
fn perplexity_of_windows_is_that_of_the_tokens() {
    let options =
        PplOptions { corpus: "c".into(), mode: "full".into(), context: 12, stride: 5, valid_vocab: VALID };
    let stream = |id: &str, domain: &str, n: u32| TokenStream {
        id: id.into(),
        domain: domain.into(),
        path: format!("{id}.txt"),
        tokens: (0..n).map(|i| (i * 7 + i / 2) % VALID as u32).collect(),
    };
    let streams = [stream("a", "x", 40), stream("b", "y", 9), stream("c", "x", 2)];
    let off = AtomicBool::new(false);
    let report = ppl(&options, &mut toy(0.0), &streams, &mut |_| {}, &off).unwrap();
    assert_eq!((report.overall.tokens, report.domains()["x"].tokens), (39 + 8 + 1, 40));
    let again = ppl(&options, &mut toy(0.0), &streams, &mut |_| {}, &off).unwrap();
    let figures = |r: &PplReport| {
        let mut v = r.to_json();
        v.as_object_mut().unwrap().remove("timing");
        v.to_string()
    };
    assert_eq!(figures(&report), figures(&again));
    // The first window of a stream is one forward: its rows by hand.
    let mut want = 0.0;
    let call = Call { stream: 0, tokens: &streams[1].tokens, rows: 0..8, path: Path::Prompt };
    toy(0.0)
        .rows(&call, &mut |i, l| {
            let z: f64 = l[..VALID].iter().map(|v| f64::from(*v).exp()).sum::<f64>();
            want += z.ln() - f64::from(l[streams[1].tokens[i + 1] as usize]);
            Ok(())
        })
        .unwrap();
    assert!((report.streams[1].total.nll - want).abs() < 1e-10);
    assert!(report.to_text().contains("overall"));
    let e = ppl(&options, &mut toy(0.0), &[stream("s", "x", 1)], &mut |_| {}, &off).unwrap_err().to_string();
    assert!(e.contains("c/s"), "{e}");
}
