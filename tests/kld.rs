//! `kld`, `ppl` and `report` through the program: what they print, what they refuse, how they go on.

mod common;

use common::{convert, demo, finish, names, program, scratch};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

struct Model {
    folder: tempfile::TempDir,
    artifact: PathBuf,
}

impl Model {
    fn new() -> Self {
        let folder = scratch();
        let artifact = folder.path().join("demo.infernix");
        convert(&demo(), &artifact, &[]).ok();
        Self { folder, artifact }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run<S: AsRef<OsStr>>(&self, verb: &str, args: impl IntoIterator<Item = S>) -> common::Run {
        let mut command = program();
        // Unfinished runs stay in this folder.
        command.env("INFERNIX_CACHE", self.at("cache")).current_dir(self.folder.path());
        command.arg(verb).args(args);
        finish(&mut command)
    }

    fn kld(&self, args: &[&str]) -> common::Run {
        self.run("kld", [self.artifact.to_str().expect("UTF-8")].iter().chain(args))
    }
}

fn without_times(mut d: Value) -> Value {
    for key in ["seconds", "timing"] {
        d.as_object_mut().expect("an object").remove(key);
    }
    d
}

#[test]
fn kld_measures_out_of_the_box_and_joins_reports_on_one_page() {
    let m = Model::new();
    let args = [
        "--ctx",
        "128",
        "--chunks",
        "3",
        "--path",
        "prompt,decode",
        "--honest-rounding",
        "--rounding-seeds",
        "1",
    ];
    let all =
        [&args[..], &["--with", "--a8-activations", "-o", "a.json", "-o", "a.md", "-o", "a.html", "--json"]]
            .concat();
    let run = m.kld(&all).ok();
    let d = run.json();
    assert_eq!((d["chunks"].as_u64(), d["rows"].as_u64()), (Some(3), Some(3 * 63)));
    assert_eq!(d["reference"]["backend"], "lossless");
    let engines: Vec<&str> =
        d["paths"].as_array().unwrap().iter().map(|p| p["engine"].as_str().unwrap()).collect();
    assert_eq!(engines, ["cpu, a4", "cpu, a4", "cpu, a8", "cpu, a8"]);
    assert!(d["paths"][1]["drafting"]["rounds"].as_u64() > Some(0), "{d:#}");
    assert!(d["paths"][0]["times_rounding"].as_f64() > Some(1.0));
    assert_eq!(serde_json::from_slice::<Value>(&fs::read(m.at("a.json")).unwrap()).unwrap(), d);
    assert!(fs::read_to_string(m.at("a.md")).unwrap().contains("| decode | cpu, a8 |"));
    assert!(fs::read_to_string(m.at("a.html")).unwrap().contains("</svg>"));
    assert!(names(&m.at("cache/kld")).is_empty(), "a finished run leaves no state");

    m.run("report", ["a.json", "-o", "joined.html", "--plots", "plots"]).ok();
    assert_eq!(
        names(&m.at("plots")),
        ["1-kld-by-percentile.svg", "1-kld-by-position.svg", "1-times-rounding.svg"]
    );
    fs::write(m.at("other.json"), "{}").unwrap();
    m.run("report", ["other.json", "-o", "x.html"]).fails(1, &["other.json"]);
    // The card takes the figures of its own artifact.
    m.run("card", ["demo.infernix", "--measurements", "a.json", "-o", "card.md"]).ok();
    let card = fs::read_to_string(m.at("card.md")).unwrap();
    assert!(card.contains("honest rounding, seeds: 1") && card.contains("| prompt | cpu, a4 |"), "{card}");
}

#[test]
fn saved_references_and_foreign_files_are_measured_and_mismatches_refused() {
    let m = Model::new();
    let args = ["--ctx", "64", "--chunks", "4"];
    let live = m
        .kld(&[&args[..], &["--save-reference", "a.ref", "--save-base", "a.kld", "--json"]].concat())
        .ok()
        .json();
    let stored = m.kld(&["--ctx", "64", "--reference", "a.ref", "--json"]).ok().json();
    let base = m.kld(&["--reference", "a.kld", "--json"]).ok().json();
    let mean = |d: &Value| d["paths"][0]["mean_kld"].as_f64().unwrap();
    assert_eq!((&stored["paths"][0]["kl"], &base["paths"][0]["kl"]), (&"top_k".into(), &"cut_16".into()));
    assert!(mean(&stored) <= mean(&live) && mean(&stored) > 0.9 * mean(&live));
    assert_eq!(stored["paths"][0]["top1"], live["paths"][0]["top1"]);
    // Two files need no model: none is found here.
    let files = m.run("kld", ["--reference", "a.ref", "--test", "a.ref", "--json"]).ok().json();
    assert_eq!(mean(&files), 0.0);
    let printed = m.run("kld", ["--reference", "a.kld", "--against", "a.kld", "--llama-compat"]).ok().stdout;
    assert!(printed.starts_with("====== Perplexity statistics ======"), "{printed}");

    m.kld(&["--ctx", "128", "--reference", "a.ref"]).fails(1, &["a.ref", "context"]);
    fs::write(m.at("text.txt"), "Another text. ".repeat(200)).unwrap();
    m.kld(&["--ctx", "64", "--reference", "a.ref", "--corpus", "text.txt"])
        .fails(1, &["a.ref", "digest of the tokens"]);
    m.kld(&[&args[..], &["--save-base", "a.kld"]].concat()).fails(1, &["a.kld", "exists"]);
    m.kld(&["--llama-compat", "--honest-rounding"]).fails(2, &["yardstick"]);
    m.kld(&["--ctx", "100000"]).fails(2, &["--ctx", "4096"]);
    m.kld(&["-o", "a.txt"]).fails(2, &[".html"]);
    m.kld(&["--with", "--nonsense"]).fails(2, &["--with"]);
}

#[test]
fn another_engine_writes_its_logits_for_exported_tokens() {
    let m = Model::new();
    m.kld(&["--ctx", "64", "--chunks", "1", "--export-tokens", "tokens.json"]).ok();
    let lists: Vec<Vec<u32>> = serde_json::from_slice(&fs::read(m.at("tokens.json")).unwrap()).unwrap();
    fs::write(m.at("one.json"), serde_json::to_vec(&lists[0]).unwrap()).unwrap();
    let model = m.artifact.to_str().unwrap();
    m.run("logits", [model, "--tokens", "one.json", "-o", "cpu.safetensors", "--positions", "32..63"]).ok();
    let args = ["--ctx", "64", "--chunks", "1", "--against", "cpu.safetensors", "--json"];
    let d = m.kld(&args).ok().json();
    assert_eq!(d["paths"][1]["engine"], "cpu.safetensors");
    // A saved reference holds no tokens: without a model these logits cannot be scored, which must be said.
    m.kld(&["--ctx", "64", "--chunks", "1", "--save-reference", "saved.ref"]).ok();
    let files = ["--reference", "saved.ref", "--test", "cpu.safetensors"];
    m.run("kld", files).fails(1, &["saved.ref holds no tokens", "give the model"]);
    assert_eq!(
        d["paths"][0]["mean_kld"], d["paths"][1]["mean_kld"],
        "the same engine, live and from its file"
    );
}

#[test]
fn an_interrupted_comparison_goes_on_with_resume() {
    let m = Model::new();
    let args = [
        "--ctx",
        "128",
        "--chunks",
        "12",
        "--group",
        "1",
        "--progress",
        "json",
        "--state",
        "run.state",
        "--json",
    ];
    let mut command = program();
    command.current_dir(m.folder.path()).arg("kld").arg(&m.artifact).args(args);
    let mut child = command
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the program starts");
    // After its first chunk, as a line of progress says.
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    assert!(lines.any(|l| l.is_ok_and(|l| l.contains("\"chunks\""))));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("the signal arrives");
    lines.for_each(drop);
    let code = child.wait().expect("it ends").code();
    if code == Some(0) {
        // It was faster than the signal.
        return;
    }
    assert_eq!(code, Some(130));
    m.kld(&args).fails(1, &["run.state", "resume it"]);
    let resumed = m.kld(&[&args[..], &["--resume"]].concat()).ok().json();
    let whole = m.kld(&args).ok().json();
    assert_eq!(without_times(resumed), without_times(whole));
    assert!(!m.at("run.state").exists());
}

#[test]
fn perplexity_is_the_same_from_run_to_run_and_by_domain() {
    let m = Model::new();
    fs::write(m.at("a.txt"), "One stream of text, long enough for two windows. ".repeat(12)).unwrap();
    fs::write(m.at("b.txt"), "fn main() { println!(\"another domain\"); }\n".repeat(8)).unwrap();
    let manifest = r#"{"corpus_id":"two","streams":[{"id":"a","domain":"prose","path":"a.txt"},
        {"id":"b","domain":"code","path":"b.txt"}],"modes":{"full":["a","b"],"quick":["b"]}}"#;
    fs::write(m.at("two.json"), manifest).unwrap();
    let model = m.artifact.to_str().unwrap();
    let args = [model, "--corpus", "two.json", "--context", "64", "--stride", "32", "--json"];
    let one = m.run("ppl", args).ok().json();
    assert_eq!(without_times(one.clone()), without_times(m.run("ppl", args).ok().json()));
    let domains: Vec<&str> =
        one["domains"].as_array().unwrap().iter().map(|d| d["domain"].as_str().unwrap()).collect();
    assert_eq!(domains, ["code", "prose"]);
    // Chunks of the prompt do not change a bit on this backend.
    let chunked = m.run("ppl", args.iter().chain(&["--prefill-chunk", "17"])).ok().json();
    assert_eq!(one["overall"], chunked["overall"]);
    let quick = m.run("ppl", args.iter().chain(&["--quick"])).ok().json();
    assert_eq!(quick["streams"].as_array().unwrap().len(), 1);
    m.run("ppl", [model, "--context", "64", "--stride", "64"]).fails(2, &["--stride"]);
    m.run("ppl", [model, "--text", "nothing.txt"]).fails(1, &["nothing.txt"]);
}

/// Hours of work must not end at a folder that does not exist, or in one file written over another.
#[test]
fn outputs_that_cannot_be_written_are_refused_before_anything_is_measured() {
    let m = Model::new();
    for (outputs, words) in [
        (["-o", "none/x.json", "--save-reference", "x.ref"], "there is no folder none"),
        (["--save-base", "x.base", "--save-reference", "x.base"], "two outputs are named x.base"),
        (["-o", "same.json", "-o", "same.json"], "two outputs are named same.json"),
    ] {
        m.kld(&outputs).fails(2, &[words]);
        assert!(!m.at("x.ref").exists() && !m.at("x.base").exists() && !m.at("cache/kld").exists());
    }
    let model = m.artifact.to_str().expect("UTF-8");
    m.run("ppl", [model, "-o", "none/x.json"]).fails(2, &["there is no folder none"]);
}

/// Figures of the committed cards come from the committed measurements: the card made anew is the committed one.
#[test]
fn the_committed_card_of_the_bundled_model_is_what_its_measurements_give() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let m = Model::new();
    let figures = root.join("bench/results/2026-11-30-kld-flash-demo-nvfp4.json");
    let report = common::verify_words(&m.artifact).ok().stdout;
    fs::write(m.at("verify.json"), report).unwrap();
    let args: [&OsStr; 5] =
        ["demo.infernix", "--verify-report", "verify.json", "--measurements", ""].map(OsStr::new);
    let card = m.run("card", [args[0], args[1], args[2], args[3], figures.as_os_str()]).ok().stdout;
    let committed = fs::read_to_string(root.join("model-cards/flash-demo-nvfp4.md")).unwrap();
    let quality = |t: &str| {
        let from = t.find("## Quality").expect("a section");
        t[from..].split("\n## ").next().map(str::to_owned)
    };
    assert_eq!(quality(&card), quality(&committed));
}

/// llama.cpp's own F32 log-probabilities of the GGUF demos, through its base file.
#[test]
fn the_lossless_backend_with_fp32_boundaries_is_llama_cpp_s_f32_run() {
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/models");
    for (folder, gguf) in [
        ("dense-demo-gguf", "dense-demo-Q4_K_M.gguf"),
        ("flash-demo-gguf", "flash-demo-IQ3_S-00001-of-00002.gguf"),
    ] {
        let folder = shared.join(folder);
        if !folder.exists() {
            common::skipped(&folder);
            return;
        }
        let m = scratch();
        let out = m.path().join("model.infernix");
        finish(program().args(["convert", "--recipe", "auto"]).arg(folder.join(gguf)).arg("-o").arg(&out))
            .ok();
        let base = folder.join("llamacpp-f32-c128.kld");
        let args =
            ["--backend", "lossless", "--boundaries", "fp32", "--llama-compat", "--json", "--reference"];
        let mut command = program();
        command.env("INFERNIX_CACHE", m.path()).arg("kld").arg(&out).args(args).arg(&base);
        let d = finish(&mut command).ok().json();
        let p = &d["paths"][0];
        assert!(p["mean_kld"].as_f64().unwrap().abs() <= 1e-5, "{d:#}");
        // The file's own step is 2.4e-4.
        assert!(p["kld_percentiles"]["max"].as_f64().unwrap() <= 1e-4, "{d:#}");
        assert_eq!(p["engine"], "lossless, a16, FP32 boundaries");
    }
}
