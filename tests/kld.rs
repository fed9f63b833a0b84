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

    /// Starts `kld` with `--progress json` among `args` and waits for its first chunk.
    fn begin(&self, args: &[&str]) -> Begun {
        let mut command = program();
        command.env("INFERNIX_CACHE", self.at("cache")).current_dir(self.folder.path());
        command.arg("kld").arg(&self.artifact).args(args);
        let mut child = command
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
        assert!(lines.any(|l| l.is_ok_and(|l| l.contains("\"chunks\""))));
        Begun { child, lines }
    }

    fn kld(&self, args: &[&str]) -> common::Run {
        self.run("kld", [self.artifact.to_str().expect("UTF-8")].iter().chain(args))
    }
}

/// A comparison that has finished its first chunk.
struct Begun {
    child: std::process::Child,
    lines: std::io::Lines<std::io::BufReader<std::process::ChildStderr>>,
}

impl Begun {
    /// Ctrl-C; false if it was done before.
    fn interrupted(mut self) -> bool {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("the signal arrives");
        self.lines.for_each(drop);
        let code = self.child.wait().expect("it ends").code();
        assert!(matches!(code, Some(0 | 130)), "{code:?}");
        code == Some(130)
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
    // llama.cpp's running table first, a line a chunk, then its statistics.
    let lines: Vec<&str> = printed.lines().collect();
    assert!(lines[0].starts_with("chunk             PPL   ") && lines[4].starts_with("   4  "), "{printed}");
    assert_eq!((lines[5], lines[6]), ("", "====== Perplexity statistics ======"));
    // Of fewer than 100 rows it prints the table alone.
    let few = ["--reference", "a.kld", "--against", "a.kld", "--llama-compat", "--chunks", "2"];
    assert_eq!(m.run("kld", few).ok().stdout.lines().count(), 4);

    m.kld(&["--ctx", "128", "--reference", "a.ref"]).fails(1, &["a.ref", "context"]);
    fs::write(m.at("text.txt"), "Another text. ".repeat(200)).unwrap();
    m.kld(&["--ctx", "64", "--reference", "a.ref", "--corpus", "text.txt"])
        .fails(1, &["a.ref", "digest of the tokens"]);
    m.kld(&[&args[..], &["--save-base", "a.kld"]].concat()).fails(1, &["a.kld", "exists"]);
    m.kld(&["--llama-compat", "--honest-rounding"]).fails(2, &["yardstick"]);
    m.kld(&["--ctx", "100000"]).fails(2, &["--ctx", "4096"]);
    m.kld(&["-o", "a.txt"]).fails(2, &[".json or .md or .html"]);
    m.kld(&["--with", "--nonsense"]).fails(2, &["--with"]);
}

#[test]
fn another_engine_writes_its_logits_for_exported_tokens() {
    let m = Model::new();
    let export = ["--ctx", "64", "--chunks", "3", "--export-tokens", "tokens.json"];
    m.kld(&export).ok();
    m.kld(&export).fails(2, &["tokens.json exists; nothing is overwritten"]);
    let model = m.artifact.to_str().unwrap();
    // The exported lists as they are, each from an empty state.
    m.run("logits", [model, "--tokens", "tokens.json", "-o", "cpu.safetensors", "--positions", "32..63"])
        .ok();
    m.run("logits", [model, "--tokens", "tokens.json", "-o", "x.safetensors", "--positions", "32..65"])
        .fails(2, &["0..64", "tokens.json: list 0"]);
    let args = ["--ctx", "64", "--chunks", "3", "--against", "cpu.safetensors", "--json"];
    let d = m.kld(&args).ok().json();
    assert_eq!((&d["paths"][1]["engine"], &d["paths"][1]["kl"]), (&"cpu.safetensors".into(), &"full".into()));
    // One list is a text of its own.
    let lists: Vec<Vec<u32>> = serde_json::from_slice(&fs::read(m.at("tokens.json")).unwrap()).unwrap();
    fs::write(m.at("one.json"), serde_json::to_vec(&lists[0]).unwrap()).unwrap();
    m.run("logits", [model, "--tokens", "one.json", "-o", "one.safetensors", "--positions", "32..63"]).ok();
    let one = ["--ctx", "64", "--chunks", "1", "--against", "one.safetensors", "--json"];
    let one = m.kld(&one).ok().json();
    assert_eq!(one["paths"][0]["mean_kld"], one["paths"][1]["mean_kld"]);
    fs::write(m.at("bad.json"), "[[1], 2]").unwrap();
    m.run("logits", [model, "--tokens", "bad.json", "-o", "x.safetensors"]).fails(1, &["list of such lists"]);
    // A saved reference holds no tokens: without a model these logits cannot be scored, which must be said.
    m.kld(&["--ctx", "64", "--chunks", "3", "--save-reference", "saved.ref"]).ok();
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
    if !m.begin(&args).interrupted() {
        return;
    }
    m.kld(&args).fails(1, &["run.state", "resume it"]);
    let resumed = m.kld(&[&args[..], &["--resume"]].concat()).ok().json();
    let whole = m.kld(&args).ok().json();
    assert_eq!(without_times(resumed), without_times(whole));
    assert!(!m.at("run.state").exists());
}

/// An unfinished file may hold hours of work: who resumes with other options is told which, and destroys nothing.
#[test]
fn resuming_with_other_options_names_them_and_spares_the_unfinished_file() {
    let m = Model::new();
    let run = ["--group", "1", "--progress", "json", "--save-reference", "a.ref", "--ctx", "128"];
    for state in [&["--state", "run.state"][..], &[]] {
        let first = [&run[..], state, &["--chunks", "12"]].concat();
        let begun = m.begin(&first);
        // While it runs, the same run is refused at once.
        m.kld(&first).fails(1, &["in use by process", "--state"]);
        if !begun.interrupted() {
            return;
        }
        let partial = fs::read(m.at("a.ref.partial")).unwrap();
        let other = [&run[..], state, &["--chunks", "5", "--kv-dtype", "int8"]].concat();
        let resumed = m.kld(&[&other[..], &["--resume"]].concat());
        let resumed = resumed.fails(1, &["--chunks 12 -> 5", "--kv-dtype bf16 -> int8", ".state"]);
        let error = resumed.stderr.lines().find(|l| l.starts_with("error:")).unwrap();
        assert!(error.len() < 500, "one line a reader can take in: {error}");
        m.kld(&other).fails(1, &[if state.is_empty() { "a.ref.partial" } else { "--chunks 12 -> 5" }]);
        assert_eq!(fs::read(m.at("a.ref.partial")).unwrap(), partial);
        m.kld(&[&first[..], &["--resume"]].concat()).ok();
        assert!(!m.at("a.ref.partial").exists() && !m.at("run.state").exists());
        assert!(!m.at("cache/kld").exists() || names(&m.at("cache/kld")).is_empty());
        fs::remove_file(m.at("a.ref")).unwrap();
    }
}

/// A file that is no state is the user's: refused by name, kept, and never called superfluous.
#[test]
fn a_state_that_is_another_file_is_left_alone() {
    let m = Model::new();
    let args = ["--ctx", "64", "--chunks", "2"];
    m.kld(&[&args[..], &["--save-reference", "d.ref"]].concat()).ok();
    let before = fs::read(m.at("d.ref")).unwrap();
    for more in [&["--state", "d.ref"][..], &["--state", "d.ref", "--resume"]] {
        let run = m.kld(&[&args[..], more].concat()).fails(1, &["d.ref is another file", "stays as it is"]);
        assert!(!run.stderr.contains("remove"), "{}", run.stderr);
    }
    assert_eq!(fs::read(m.at("d.ref")).unwrap(), before);
    assert!(!m.at("d.ref.lock").exists());
    // A refused run leaves no state that would block the next one.
    m.kld(&[&args[..], &["--save-reference", "d.ref", "--state", "s"]].concat()).fails(1, &["d.ref exists"]);
    assert!(!m.at("s").exists() && !m.at("s.lock").exists() && names(&m.at("cache/kld")).is_empty());
    m.kld(&[&args[..], &["--state", "s"]].concat()).ok();
}

/// What is typed has an effect, or is refused by name.
#[test]
fn options_without_effect_are_refused_and_stored_files_are_cut_to_chunks() {
    let m = Model::new();
    m.kld(&["--ctx", "64", "--chunks", "6", "--save-reference", "a.ref", "--save-base", "a.kld"]).ok();
    for reference in ["a.ref", "a.kld"] {
        let files = ["--reference", reference, "--test", reference];
        // Without --ctx the file's own, and of its chunks the first ones.
        let rows =
            |more: &[&str]| m.run("kld", files.iter().chain(more)).ok().json()["rows"].as_u64().unwrap();
        assert_eq!((rows(&["--json"]), rows(&["--json", "--chunks", "2"])), (6 * 31, 2 * 31));
        let d = m.kld(&["--reference", reference, "--chunks", "4", "--json"]).ok().json();
        assert_eq!((d["ctx"].as_u64(), d["rows"].as_u64()), (Some(64), Some(4 * 31)));
        m.run("kld", files.iter().chain(&["--ctx", "128"])).fails(1, &[reference, "context", "128", "64"]);
        let none = [
            &["--path", "decode"][..],
            &["--corpus", "a.txt"],
            &["--kv-dtype", "int8"],
            &["--threads", "2", "--group", "2"],
            &["--state", "s"],
            &["--resume"],
            &["--boundaries", "fp32"],
        ];
        for options in none {
            m.run("kld", files.iter().chain(options)).fails(2, &[options[0], "no effect", "without a model"]);
        }
    }
    for (options, words) in [
        (&["--draft-tokens", "2"][..], &["--draft-tokens has no effect", "--path decode"][..]),
        (&["--spec", "off", "--draft-tokens", "2", "--path", "decode"], &["--spec off"]),
        (&["--rounding-seeds", "2"], &["--honest-rounding"]),
        (&["--top-k", "9"], &["--save-reference"]),
        (&["--vram-budget-mib", "100"], &["--vram-budget-mib", "CUDA"]),
        (&["--lossless", "--threads", "2"], &["--threads has no effect"]),
        (&["--with", "--expert-ram-mib 5"], &["--expert-ram-mib", "CUDA"]),
        (&["--reference", "a.ref", "--group", "2"], &["--group"]),
        (&["--reference", "a.ref", "--boundaries", "fp32"], &["--boundaries"]),
        (&["--export-tokens", "t.json", "--json", "--path", "decode"], &["--path, --json have no effect"]),
        (&["--path", "prompt,prompt"], &["--path names prompt twice"]),
        (&["--honest-rounding", "--boundaries", "fp32"], &["--honest-rounding", "fp32"]),
        (&["--bootstrap", "1"], &["--bootstrap 1", "at least 100"]),
    ] {
        m.kld(options).fails(2, words);
    }
    let model = m.artifact.to_str().unwrap();
    m.run("ppl", [model, "--expert-ram-mib", "5"]).fails(2, &["--expert-ram-mib", "CUDA"]);
    m.run("ppl", [model, "--context", "1"]).fails(2, &["--context"]);
}

/// A report replaces an older report; anything else stays.
#[test]
fn reports_are_not_written_over_other_files() {
    let m = Model::new();
    let args = ["--ctx", "64", "--chunks", "2"];
    for name in ["mine.json", "mine.md", "mine.html"] {
        fs::write(m.at(name), "{\"mine\": 1}").unwrap();
        m.kld(&[&args[..], &["-o", name]].concat()).fails(2, &[name, "no report"]);
        assert_eq!(fs::read_to_string(m.at(name)).unwrap(), "{\"mine\": 1}");
    }
    let outputs = ["-o", "a.json", "-o", "a.md", "-o", "a.html"];
    for _ in 0..2 {
        m.kld(&[&args[..], &outputs].concat()).ok();
    }
    m.kld(&[&args[..], &["-o", "a.json", "-o", "./a.json"]].concat()).fails(2, &["two outputs"]);
    m.run("report", ["a.json", "-o", "mine.html"]).fails(2, &["mine.html"]);
    for _ in 0..2 {
        m.run("report", ["a.json", "-o", "page.html", "--plots", "plots"]).ok();
    }
    fs::write(m.at("empty.json"), r#"{"schema_version":1,"command":"kld","paths":[]}"#).unwrap();
    m.run("report", ["empty.json", "-o", "page.html"]).fails(1, &["empty.json", "nothing was measured"]);
    fs::write(m.at("other.json"), r#"{"schema_version":null}"#).unwrap();
    let run =
        m.run("report", ["other.json", "-o", "page.html"]).fails(1, &["other.json", "no schema version"]);
    assert!(!run.stderr.contains("None"), "{}", run.stderr);
}

/// Progress says of every figure whose it is.
#[test]
fn progress_names_every_engine_with_its_path() {
    let m = Model::new();
    let args = ["--ctx", "64", "--chunks", "2", "--path", "prompt,decode", "--with", "--a8-activations"];
    let args = [&args[..], &["--honest-rounding", "--rounding-seeds", "2", "--progress", "plain"]].concat();
    let run = m.kld(&args).ok();
    let line = run.stderr.lines().find(|l| l.starts_with("2 of 2")).expect("a line of progress");
    for words in
        ["honest rounding 0.", "cpu, a4 (prompt)", "cpu, a4 (decode)", "cpu, a8 (prompt)", "cpu, a8 (decode)"]
    {
        assert!(line.contains(words), "{words}: {line}");
    }
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
    // Half a window is the default: small windows need no second option.
    let half = m.run("ppl", [model, "--corpus", "two.json", "-c", "64", "--json"]).ok().json();
    assert_eq!(without_times(half), without_times(one.clone()));
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
