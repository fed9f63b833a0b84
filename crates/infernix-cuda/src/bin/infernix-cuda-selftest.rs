//! Runs the self-test and prints one JSON document.
//!
//! Each family runs in a process of its own, so that a fault or a hang of one kernel does not hide the others.

use infernix_cuda::selftest::{FAMILIES, Options, selftest};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const USAGE: &str = "usage: infernix-cuda-selftest [--no-bench] [--seed N] [--device N] [--limit SECONDS] [--out FILE] [--in-process] [FAMILY...]";

fn emit(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn main() -> ExitCode {
    let mut options = Options::default();
    let (mut in_process, mut limit, mut out) = (false, 90u64, None);
    let mut args = std::env::args().skip(1);
    while let Some(a) = args.next() {
        let mut value = || args.next().and_then(|v| v.parse::<u64>().ok());
        match a.as_str() {
            "--no-bench" => options.bench = false,
            "--in-process" => in_process = true,
            "--seed" => options.seed = value().unwrap_or(1),
            "--device" => options.device = value().unwrap_or(0) as i32,
            "--limit" => limit = value().unwrap_or(90),
            "--out" => out = args.next(),
            f if FAMILIES.contains(&f) => options.families.push(a),
            _ => {
                let _ = writeln!(std::io::stderr(), "{USAGE}\nfamilies: {}", FAMILIES.join(" "));
                return ExitCode::from(2);
            }
        }
    }
    if in_process {
        return match selftest(&options) {
            Ok(v) => {
                emit(&v.to_string());
                ExitCode::from(u8::from(v["ok"] != true))
            }
            Err(e) => {
                emit(&json!({"ok": false, "error": e.to_string()}).to_string());
                ExitCode::from(1)
            }
        };
    }
    let mut doc = json!({"schema_version": 1, "ok": true, "families": {}});
    // Kernels that no family ran.
    let mut missed: Option<Vec<String>> = None;
    let families: Vec<&str> = FAMILIES
        .iter()
        .copied()
        .filter(|f| options.families.is_empty() || options.families.iter().any(|g| g == f))
        .collect();
    for family in families.iter().copied() {
        let v = child(family, &options, Duration::from_secs(limit));
        if v["ok"] != true {
            doc["ok"] = json!(false);
        }
        summarise(family, &v);
        if let Ok(here) = serde_json::from_value::<Vec<String>>(v["not_launched"].clone()) {
            missed = Some(match missed.take() {
                Some(m) => m.into_iter().filter(|k| here.contains(k)).collect(),
                None => here,
            });
        }
        doc["families"][family] = v;
        // Written after each family: a run that is cut off keeps what it has.
        if let Some(path) = &out {
            let _ = std::fs::write(path, serde_json::to_string_pretty(&doc).unwrap_or_default());
        }
    }
    let missed = missed.unwrap_or_default();
    if families.len() == FAMILIES.len() && !missed.is_empty() {
        let _ = writeln!(std::io::stderr(), "== kernels that no family ran: {}", missed.join(", "));
        doc["ok"] = json!(false);
    }
    doc["not_launched"] = json!(missed);
    if let Some(path) = &out {
        let _ = std::fs::write(path, serde_json::to_string_pretty(&doc).unwrap_or_default());
    }
    if out.is_none() {
        emit(&doc.to_string());
    }
    ExitCode::from(u8::from(doc["ok"] != true))
}

fn child(family: &str, o: &Options, limit: Duration) -> Value {
    let fail = |why: String| json!({"ok": false, "error": why});
    let Ok(exe) = std::env::current_exe() else { return fail("own path unknown".into()) };
    let mut cmd = Command::new(exe);
    cmd.args(["--in-process", family, "--seed", &o.seed.to_string(), "--device", &o.device.to_string()]);
    if !o.bench {
        cmd.arg("--no-bench");
    }
    let mut p = match cmd.stdout(Stdio::piped()).spawn() {
        Ok(p) => p,
        Err(e) => return fail(e.to_string()),
    };
    let Some(mut pipe) = p.stdout.take() else { return fail("no output".into()) };
    let reader = std::thread::spawn(move || {
        let mut s = String::new();
        let _ = pipe.read_to_string(&mut s);
        s
    });
    let start = Instant::now();
    let status = loop {
        match p.try_wait() {
            Ok(Some(s)) => break s.to_string(),
            Ok(None) if start.elapsed() > limit => {
                let _ = p.kill();
                let _ = p.wait();
                break format!("killed after {} s: a kernel hangs or the limit is short", limit.as_secs());
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(20)),
            Err(e) => break e.to_string(),
        }
    };
    let text = reader.join().unwrap_or_default();
    serde_json::from_str(text.trim())
        .unwrap_or_else(|_| fail(format!("{status}; output: {}", text.chars().take(500).collect::<String>())))
}

fn summarise(family: &str, v: &Value) {
    let mut err = std::io::stderr();
    let _ = writeln!(
        err,
        "== {family}: ok {} in {} s{}",
        v["ok"],
        v["seconds"],
        v["error"].as_str().map(|e| format!(", {e}")).unwrap_or_default()
    );
    for e in v["errors"].as_array().into_iter().flatten() {
        let _ = writeln!(err, "   ERROR {e}");
    }
    let mut shown = 0;
    let results = v["results"].as_array().map(Vec::as_slice).unwrap_or_default();
    let checks = results.iter().filter(|r| r.get("ok").is_some()).count();
    let bad = results.iter().filter(|r| r["ok"] == false).count();
    let _ = writeln!(err, "   {checks} checks, {bad} failed");
    for r in results {
        if r["ok"] == false && shown < 40 {
            shown += 1;
            let _ = writeln!(err, "   FAIL {r}");
        }
        if let Some(us) = r["us"].as_f64() {
            let _ = writeln!(
                err,
                "   {:>9.2} us {:>5} {} {}",
                us,
                r["floor_share"],
                r["kernel"].as_str().unwrap_or(""),
                r["case"].as_str().unwrap_or("")
            );
        }
    }
}
