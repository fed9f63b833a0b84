//! `perf`: the speed of two commits beside each other. Their programs run in turns (A B B A), so that what the machine
//! does besides falls on both, and each pair gives a ratio.

use crate::synth::Failure;
use infernix_measure::bench::machine::Machine;
use infernix_measure::paired::{Change, MIN_SHOWN, change};
use serde_json::{Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const HELP: &str = "\
usage: cargo xtask perf A B [--rounds N] [--json] [-- BENCH ARGUMENTS]

A and B are commits, or programs (a path with a slash). Commits are built in release, one after the other in one worktree under
target/perf, so that of the second only what differs is built; their programs stay there for the next time. `rm -r target/perf`
and `git worktree prune` remove all. Both run `infernix bench BENCH ARGUMENTS` once uncounted, then N times in turns, A B B A
and so on; for each test the ratio of B's rate to A's is printed: geometric mean over the pairs with its 95 % bootstrap
interval, after each round what is known so far. Fewer than 6 rounds show no change; the same commit twice shows the
machine's noise. Defaults: 8 rounds, -p 256 -n 64 -r 1 on the demo of this tree ($INFERNIX_MODEL names another model).";

/// One of the two.
struct Side {
    name: String,
    program: PathBuf,
}

/// What an argument names.
enum Named {
    Program(PathBuf),
    /// Its full hash.
    Commit(String),
}

/// Parses the arguments, builds, measures and prints.
pub(crate) fn run(args: &[String]) -> Result<(), Failure> {
    let (own, bench) = match args.iter().position(|a| a == "--") {
        Some(at) => (&args[..at], args[at + 1..].to_vec()),
        None => (args, ["-p", "256", "-n", "64", "-r", "1"].map(String::from).to_vec()),
    };
    let (mut sides, mut rounds, mut as_json) = (Vec::new(), 8, false);
    let mut rest = own.iter();
    while let Some(arg) = rest.next() {
        match arg.as_str() {
            "--help" | "-h" => {
                println!("{HELP}");
                return Ok(());
            }
            "--json" => as_json = true,
            "--rounds" => {
                let n = rest.next().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
                rounds = n.ok_or_else(|| Failure::Usage("--rounds takes a number above 0".into()))?;
            }
            flag if flag.starts_with('-') => return Err(Failure::Usage(HELP.into())),
            name => sides.push(name.to_owned()),
        }
    }
    let Ok([a, b]) = <[String; 2]>::try_from(sides) else { return Err(Failure::Usage(HELP.into())) };
    // Both are looked up before the first is built, which takes minutes.
    let named = [find(&a)?, find(&b)?];
    let home = root().join("target/perf");
    std::fs::create_dir_all(&home).map_err(|e| format!("{}: {e}", home.display()))?;
    let home = home.canonicalize().map_err(|e| format!("{}: {e}", home.display()))?;
    let lock = home.join("lock");
    let lock = File::create(&lock).map_err(|e| format!("{}: {e}", lock.display()))?;
    if lock.try_lock().is_err() {
        return Err(Failure::Failed(
            "another comparison runs in target/perf; both would be disturbed".into(),
        ));
    }
    let [first, second] = named;
    let sides = [side(&a, first, &home)?, side(&b, second, &home)?];
    let tests = measure(&sides, rounds, &bench)?;
    if as_json {
        let rows = tests.iter().map(|t| {
            json!({
                "test": t.label, "a_tok_s": t.rates[0], "b_tok_s": t.rates[1], "ratio": t.change.map(|c| c.ratio),
                "interval": t.change.and_then(|c| c.interval),
            })
        });
        let document = json!({
            "schema_version": 1, "kind": "perf", "machine": Machine::this().to_json(), "a": sides[0].name,
            "b": sides[1].name, "rounds": rounds, "bench_arguments": bench, "tests": rows.collect::<Vec<_>>(),
        });
        println!("{document:#}");
    } else {
        print!("{}", table(&sides, &tests));
    }
    Ok(())
}

/// The rates of one test on both sides, pair by pair.
struct Test {
    label: String,
    rates: [Vec<f64>; 2],
    change: Option<Change>,
}

fn measure(sides: &[Side; 2], rounds: usize, bench: &[String]) -> Result<Vec<Test>, Failure> {
    let mut tests: Vec<Test> = Vec::new();
    // What cannot run fails here, and what a first run has to make or read is there for the others.
    for side in sides {
        bench_once(side, bench)?;
    }
    for round in 0..rounds {
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for which in order {
            for (label, rate) in bench_once(&sides[which], bench)? {
                let at = tests.iter().position(|t| t.label == label).unwrap_or_else(|| {
                    tests.push(Test { label, rates: [Vec::new(), Vec::new()], change: None });
                    tests.len() - 1
                });
                tests[at].rates[which].push(rate);
            }
        }
        for t in &mut tests {
            t.change = change(&t.rates[0], &t.rates[1]);
        }
        // An interruption loses the rounds to come, not those that were.
        eprintln!("round {} of {rounds}\n{}", round + 1, table(sides, &tests));
    }
    Ok(tests)
}

fn bench_once(side: &Side, bench: &[String]) -> Result<Vec<(String, f64)>, Failure> {
    let mut command = Command::new(&side.program);
    if std::env::var_os("INFERNIX_MODEL").is_none_or(|v| v.is_empty()) {
        // One model for both, whatever lies in this folder and in the tree of the last build.
        command.env("INFERNIX_MODEL", root().join("models/flash-demo-nvfp4"));
    }
    let output =
        command.arg("bench").args(bench).args(["--no-limit", "--json"]).stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("{}: {e}", side.program.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Failure::Failed(format!("{}: bench ended with {}: {said}", side.name, output.status)));
    }
    let document: Value =
        serde_json::from_slice(&output.stdout).map_err(|e| format!("{}: {e}", side.name))?;
    let tests = document["tests"].as_array().into_iter().flatten();
    let rate = |t: &Value| Some((t["label"].as_str()?.to_owned(), t["tok_s_mean"].as_f64()?));
    let found: Vec<_> = tests.filter_map(rate).collect();
    if found.is_empty() {
        return Err(Failure::Failed(format!("{}: bench printed no test", side.name)));
    }
    Ok(found)
}

fn table(sides: &[Side; 2], tests: &[Test]) -> String {
    let mut out = format!(
        "A {}, B {}\n\n| test | A tok/s | B tok/s | B / A | 95 % interval | |\n|---|---:|---:|---:|---:|---|\n",
        sides[0].name, sides[1].name
    );
    for t in tests {
        let mean = |v: &[f64]| match v.len() {
            0 => "-".into(),
            n => format!("{:.1}", v.iter().sum::<f64>() / n as f64),
        };
        let (ratio, interval, verdict) = t.change.map_or(("-".into(), "-".into(), ""), |c| {
            let interval = c.interval.map_or("-".into(), |[a, b]| format!("{a:.3} to {b:.3}"));
            let verdict = match (c.shown(), c.ratio > 1.0) {
                (false, _) if c.pairs < MIN_SHOWN => "too few rounds",
                (false, _) => "level",
                (true, true) => "B faster",
                (true, false) => "B slower",
            };
            (format!("{:.3}", c.ratio), interval, verdict)
        });
        out.push_str(&format!(
            "| {} | {} | {} | {ratio} | {interval} | {verdict} |\n",
            t.label,
            mean(&t.rates[0]),
            mean(&t.rates[1])
        ));
    }
    out
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn git(args: &[&str]) -> Result<String, Failure> {
    let output = Command::new("git").args(args).current_dir(root()).output();
    let output = output.map_err(|e| format!("git: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::Failed(format!("git {}: {}", args.join(" "), said.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A program, or else a commit: branches have slashes, too.
fn find(name: &str) -> Result<Named, Failure> {
    if name.contains('/') && Path::new(name).is_file() {
        return Ok(Named::Program(name.into()));
    }
    let commit = git(&["rev-parse", "--verify", "--quiet", &format!("{name}^{{commit}}")]);
    let commit = commit.map_err(|_| format!("{name}: neither a commit of this repository nor a program"))?;
    Ok(Named::Commit(commit))
}

/// A program as it is, or a commit built.
fn side(name: &str, named: Named, home: &Path) -> Result<Side, Failure> {
    let commit = match named {
        Named::Program(program) => {
            return Ok(Side { name: name.rsplit('/').next().unwrap_or(name).to_owned(), program });
        }
        Named::Commit(commit) => commit,
    };
    let short = &commit[..12];
    let program = home.join(format!("infernix-{short}"));
    if !program.is_file() {
        eprintln!("building {name} ({short})");
        // One place for every commit: a crate elsewhere is another crate to cargo, and would be built anew with all that needs it.
        let tree = home.join("tree");
        let tree_name = tree.display().to_string();
        let is_ours =
            git(&["-C", &tree_name, "rev-parse", "--show-toplevel"]).is_ok_and(|top| Path::new(&top) == tree);
        let checkout = ["-C", &tree_name, "checkout", "--quiet", "--force", "--detach", &commit];
        if !is_ours || git(&checkout).is_err() {
            // What a run that was killed left there is half a worktree or locked, and git adds none over it.
            if tree.exists() {
                std::fs::remove_dir_all(&tree).map_err(|e| format!("{}: {e}", tree.display()))?;
            }
            git(&["worktree", "prune"])?;
            git(&["worktree", "add", "--detach", "--force", "--force", &tree_name, &commit])?;
        }
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let target = home.join("build");
        let status = Command::new(cargo)
            .args(["build", "--release", "--locked", "--package", "infernix"])
            .env("CARGO_TARGET_DIR", &target)
            .current_dir(&tree)
            .status()
            .map_err(|e| format!("cargo: {e}"))?;
        if !status.success() {
            return Err(Failure::Failed(format!("{name} ({short}) does not build: {status}")));
        }
        // Under another name first: half a program must not pass for one the next time.
        let half = home.join(format!("infernix-{short}.half"));
        std::fs::copy(target.join("release/infernix"), &half)
            .and_then(|_| std::fs::rename(&half, &program))
            .map_err(|e| format!("{}: {e}", program.display()))?;
    }
    Ok(Side { name: format!("{name} ({short})"), program })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    /// A program that says the same rates every time, and notes that it ran.
    fn program(folder: &Path, name: &str, rate: f64) -> Side {
        let path = folder.join(name);
        let log = folder.join("log");
        let text = format!(
            "#!/bin/sh\necho {name} \"$@\" >> '{}'\necho '{{\"tests\":[{{\"label\":\"tg4\",\"tok_s_mean\":{rate}}}]}}'\n",
            log.display()
        );
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let name = path.display().to_string();
        side(&name, find(&name).unwrap(), folder).unwrap()
    }

    #[test]
    fn programs_run_in_turns_and_their_ratio_has_an_interval() {
        let folder = tempfile::tempdir().unwrap();
        let sides = [program(folder.path(), "a", 100.0), program(folder.path(), "b", 120.0)];
        let tests = measure(&sides, 6, &["-n".to_owned(), "4".to_owned()]).unwrap();
        let c = tests[0].change.unwrap();
        assert!((c.ratio - 1.2).abs() < 1e-12 && c.pairs == 6 && c.shown());
        let text = table(&sides, &tests);
        assert!(text.contains("| tg4 | 100.0 | 120.0 | 1.200 | 1.200 to 1.200 | B faster |"), "{text}");
        let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
        let order: String = log.lines().map(|l| &l[..1]).collect();
        assert_eq!(order, "ababbaabbaabba");
        assert!(log.lines().all(|l| l.ends_with("bench -n 4 --no-limit --json")), "{log}");
    }

    #[test]
    fn few_rounds_claim_no_change_and_a_test_of_one_side_alone_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let sides = [program(folder.path(), "a", 100.0), program(folder.path(), "b", 120.0)];
        let tests = measure(&sides, 5, &[]).unwrap();
        assert!(table(&sides, &tests).contains("| 1.200 | 1.200 to 1.200 | too few rounds |"));
        let lone = Test { label: "pp8".into(), rates: [vec![1.0], Vec::new()], change: None };
        assert!(table(&sides, &[lone]).contains("| pp8 | 1.0 | - | - | - |  |"));
    }

    #[test]
    fn wrong_arguments_and_programs_that_fail_are_said() {
        let args = |list: &[&str]| list.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>();
        for wrong in [&["a"][..], &["a", "b", "c"], &["a", "b", "--rounds", "0"], &["a", "b", "--fast"]] {
            assert!(matches!(run(&args(wrong)), Err(Failure::Usage(_))), "{wrong:?}");
        }
        // Found before anything is built.
        for unknown in [["HEAD", "no-such-commit"], ["no/such/branch", "HEAD"]] {
            let said = run(&args(&unknown));
            assert!(matches!(said, Err(Failure::Failed(t)) if t.contains("neither a commit")), "{unknown:?}");
        }
        let none = Side { name: "x".into(), program: "/nonexistent/x".into() };
        assert!(bench_once(&none, &[]).is_err());
        let fails = Side { name: "x".into(), program: "/bin/false".into() };
        assert!(matches!(bench_once(&fails, &[]), Err(Failure::Failed(t)) if t.contains("x: bench ended")));
    }
}
