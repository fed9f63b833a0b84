//! Servers on the page: load, context lengths, replays. Runs of the same work share a table, whatever machine and file
//! they come from; others stand apart, because their figures do not compare.

use super::svg::{self, Line, escape};
use super::{figure, notes, row, text_of};
use crate::replay::metrics::{FIGURES, Kind};
use crate::replay::plots::{self, drawn};
use crate::replay::report::show;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;

type Named<'a> = (&'a str, &'a Value);

/// Documents of servers, by the work they did.
#[derive(Default)]
pub(super) struct Documents<'a> {
    loads: BTreeMap<String, Vec<Named<'a>>>,
    contexts: Vec<Named<'a>>,
    replays: BTreeMap<String, Vec<Named<'a>>>,
}

/// What one engine did, from whichever file.
struct Column<'a> {
    head: String,
    arm: &'a Value,
}

impl<'a> Documents<'a> {
    /// Takes a document of one of the commands; says whether it is one.
    pub(super) fn take(&mut self, command: &str, name: &'a str, d: &'a Value) -> bool {
        match command {
            "bench serve" => {
                let key = ["endpoint", "dataset", "num_prompts", "seed"].map(|k| d[k].to_string()).join(" ");
                let key = format!("{key} {}", fields(d).unwrap_or_default());
                self.loads.entry(key).or_default().push((name, d));
            }
            "bench context" => self.contexts.push((name, d)),
            "replay" => {
                let key = ["plan_hash", "context", "scale"].map(|k| d[k].to_string()).join(" ");
                let key = format!("{key} {}", omitted(d));
                self.replays.entry(key).or_default().push((name, d));
            }
            _ => return false,
        }
        true
    }

    /// Tables and plots of all.
    pub(super) fn write(&self, out: &mut String, plots: &mut Vec<(String, String)>) {
        for (number, group) in self.loads.values().enumerate() {
            load(out, plots, group, number + 1);
        }
        contexts(out, &self.contexts);
        for (number, group) in self.replays.values().enumerate() {
            replay(out, plots, group, number + 1);
        }
    }
}

/// What a run is called: its label, else the model's name, with the file where several ran the same.
fn name(file: &str, d: &Value) -> String {
    let known = d["label"].as_str().or_else(|| d["model_id"].as_str()).unwrap_or("?");
    format!("{known} ({file})")
}

/// When the requests of a load were sent.
fn arrivals(d: &Value) -> String {
    let per_second = |k: &str| d[k].as_f64().map_or("?".into(), |v| v.to_string());
    let rate = match (d["ramp_up_strategy"].as_str(), d["request_rate"].as_f64()) {
        _ if d["dataset"]["name"] == "trace" => return "as in the trace".into(),
        (Some(ramp), _) => {
            format!("{}-{}/s, {ramp}", per_second("ramp_up_start_rps"), per_second("ramp_up_end_rps"))
        }
        (None, Some(rate)) => format!("{rate}/s"),
        (None, None) => return "at once".into(),
    };
    let shape = d["burstiness"].as_f64().filter(|b| *b != 1.0);
    shape.map_or(rate.clone(), |b| format!("{rate}, burstiness {b}"))
}

/// What was merged into each request of a load, by name; `None` of reports that do not say it.
fn fields(d: &Value) -> Option<String> {
    let by_name: BTreeMap<_, _> = d["extra_body"].as_object()?.iter().collect();
    serde_json::to_string(&by_name).ok()
}

/// Fields that a replay left out of its requests.
fn omitted(d: &Value) -> String {
    let fields = d["omitted_fields"].as_array().into_iter().flatten().filter_map(Value::as_str);
    fields.collect::<Vec<_>>().join(", ")
}

fn load(out: &mut String, plots: &mut Vec<(String, String)>, group: &[Named<'_>], number: usize) {
    let first = group[0].1;
    let _ = write!(
        out,
        "<h2>Load on servers</h2>\n<p>{} requests to <code>{}</code>, {}, seed {}{}.</p>\n<div class=\"t\"><table>\n",
        first["num_prompts"],
        text_of(&first["endpoint"]),
        escape(&dataset(&first["dataset"])),
        escape(&first["seed"].to_string()),
        match fields(first).as_deref() {
            None => ", other fields of the requests not recorded".to_owned(),
            Some("{}") => String::new(),
            Some(fields) => format!(", each with <code>{}</code>", escape(fields)),
        }
    );
    let head = [
        "server",
        "rate",
        "in flight",
        "failed",
        "req/s",
        "output tok/s",
        "cached",
        "TTFT mean",
        "median",
        "TPOT mean",
        "E2EL mean",
    ];
    row(out, "th", 1, &head.map(String::from));
    // Reports of before have 0 where nothing was measured.
    let ms = |v: &Value| v.as_f64().filter(|v| *v > 0.0).map_or("—".to_owned(), |v| format!("{v:.1} ms"));
    let mut lines: Vec<Line> = Vec::new();
    for (file, d) in group {
        let rate = arrivals(d);
        let prompts = d["total_input_tokens"].as_f64().filter(|n| *n > 0.0);
        let cached = d["total_cached_tokens"].as_f64().zip(prompts);
        row(
            out,
            "td",
            1,
            &[
                escape(&name(file, d)) + if d["interrupted"] == true { " (interrupted)" } else { "" },
                escape(&rate),
                figure(&d["max_concurrency"], |v| format!("{v:.0}")),
                figure(&d["failed"], |v| format!("{v:.0}")),
                figure(&d["request_throughput"], |v| format!("{v:.2}")),
                figure(&d["output_throughput"], |v| format!("{v:.1}")),
                cached.map_or("—".into(), |(c, n)| format!("{:.0} %", 100.0 * c / n)),
                ms(&d["mean_ttft_ms"]),
                ms(&d["median_ttft_ms"]),
                ms(&d["mean_tpot_ms"]),
                ms(&d["mean_e2el_ms"]),
            ],
        );
        let mut known = d["label"].as_str().or_else(|| d["model_id"].as_str()).unwrap_or("?").to_owned();
        // A curve is of one kind of arrivals.
        if rate != "at once" {
            known = format!("{known}, {rate}");
        }
        if let Some(point) = d["max_concurrency"].as_f64().zip(d["output_throughput"].as_f64()) {
            match lines.iter_mut().find(|l| l.name == known) {
                Some(line) => line.points.push(point),
                None => lines.push(Line { name: known, points: vec![point] }),
            }
        }
    }
    out.push_str("</table></div>\n");
    notes(out, group);
    for line in &mut lines {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    // A curve needs two loads; one is in the table.
    if lines.iter().any(|l| l.points.len() > 1) {
        let svg =
            svg::lines("Output by requests in flight", "requests in flight", "tok/s", &[], false, &lines);
        let _ = writeln!(out, "<figure>{svg}</figure>");
        plots.push((format!("{number}-load.svg"), svg));
    }
}

/// A dataset in words.
fn dataset(d: &Value) -> String {
    let Some(map) = d.as_object() else { return "an unnamed dataset".into() };
    let plain = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    map.iter()
        .filter(|(_, v)| !v.is_null())
        .map(|(k, v)| format!("{k} {}", plain(v)))
        .collect::<Vec<_>>()
        .join(", ")
}

fn contexts(out: &mut String, documents: &[Named<'_>]) {
    if documents.is_empty() {
        return;
    }
    out.push_str("<h2>Context lengths</h2>\n<div class=\"t\"><table>\n");
    let head = ["server", "prompt tokens", "TTFT", "output tokens", "decode tok/s", "rounds/s"];
    row(out, "th", 1, &head.map(String::from));
    for (file, d) in documents {
        for p in d["prompts"].as_array().into_iter().flatten() {
            let cells = [
                escape(&name(file, d)),
                figure(&p["prompt_tokens"], |v| format!("{v:.0}")),
                figure(&p["ttft_s"], |v| format!("{v:.2} s")),
                figure(&p["output_tokens"], |v| format!("{v:.0}")),
                figure(&p["decode_tok_s"], |v| format!("{v:.1}")),
                figure(&p["rounds_per_s"], |v| format!("{v:.1}")),
            ];
            row(out, "td", 1, &cells);
        }
    }
    out.push_str("</table></div>\n");
    for (file, d) in documents {
        let mut prompts = d["prompts"].as_array().into_iter().flatten();
        if prompts.all(|p| p["cached_tokens"].is_null()) {
            let _ = writeln!(
                out,
                "<p>{}: no cached tokens are counted, so that prompts may come from a cache.</p>",
                escape(&name(file, d))
            );
        }
    }
    notes(out, documents);
}

fn replay(out: &mut String, files: &mut Vec<(String, String)>, group: &[Named<'_>], number: usize) {
    let first = group[0].1;
    let plan = first["plan_hash"].as_str().unwrap_or("?");
    let seeds = first["seeds"].as_array().map_or(0, Vec::len);
    let _ = write!(
        out,
        "<h2>Agent replay</h2>\n<p>{} at scale {}, context {}, {seeds} seed{}, plan <code>{}</code>. Cells: mean over \
         runs (least-greatest).</p>\n",
        text_of(&first["scenario"]),
        first["scale"],
        first["context"],
        if seeds == 1 { "" } else { "s" },
        escape(plan.get(..16).unwrap_or(plan))
    );
    for (file, d) in group {
        for reason in d["invalid_reasons"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let _ = writeln!(out, "<p><b>Invalid</b> ({}): {}</p>", escape(file), escape(reason));
        }
    }
    let several = group.len() > 1;
    let mut columns: Vec<Column<'_>> = Vec::new();
    for (file, d) in group {
        for arm in d["arms"].as_array().into_iter().flatten() {
            let mut head = text_of(&arm["name"]);
            if arm["valid"] == false {
                head.push_str("<br><b>(invalid)</b>");
            }
            if several {
                let _ = write!(head, "<br><small>{}</small>", escape(file));
            }
            columns.push(Column { head, arm });
        }
    }
    out.push_str("<div class=\"t\"><table>\n");
    let mut head = vec!["figure".to_owned()];
    head.extend(columns.iter().map(|c| c.head.clone()));
    row(out, "th", 1, &head);
    let counts = |label: &str, key: &str, out: &mut String| {
        let mut cells = vec![label.to_owned()];
        cells.extend(columns.iter().map(|c| figure(&c.arm[key], |v| format!("{v:.0}"))));
        row(out, "td", 1, &cells);
    };
    counts("Requests", "requests", out);
    counts("Failed", "failed", out);
    let mut model = vec!["Model".to_owned()];
    model.extend(columns.iter().map(|c| text_of(&c.arm["model"])));
    row(out, "td", 1, &model);
    for (key, label, unit, kind) in FIGURES {
        let cells: Vec<Option<String>> =
            columns.iter().map(|c| cell(&c.arm["metrics"][key], unit, kind)).collect();
        if cells.iter().any(Option::is_some) {
            let mut line = vec![escape(label)];
            line.extend(cells.into_iter().map(|c| c.unwrap_or("—".into())));
            row(out, "td", 1, &line);
        }
    }
    out.push_str("</table></div>\n");
    if !omitted(first).is_empty() {
        let _ = writeln!(out, "<p>Left out of every request: {}.</p>", escape(&omitted(first)));
    }
    notes(out, group);
    let runs: Vec<_> = group
        .iter()
        .flat_map(|(file, d)| {
            drawn(d, |arm| if several { format!("{arm} ({file})") } else { arm.to_owned() })
        })
        .collect();
    out.push_str("<div class=\"g\">\n");
    for (name, svg) in plots::plots(&runs) {
        let _ = writeln!(out, "<figure>{svg}</figure>");
        files.push((format!("{number}-replay-{name}.svg"), svg));
    }
    out.push_str("</div>\n");
}

fn cell(v: &Value, unit: &str, kind: Kind) -> Option<String> {
    let n = |k: &str| v[k].as_f64();
    Some(show((n("mean")?, n("min")?, n("max")?), unit, kind))
}

#[cfg(test)]
mod tests {
    use super::super::page;
    use serde_json::{Value, json};

    fn replay(hash: &str, arm: &str, cpu: &str) -> Value {
        let ttft = json!({ "mean": 1.25, "min": 1.0, "max": 1.5, "runs": [1.0, 1.5] });
        json!({
            "schema_version": 1, "command": "replay", "valid": false, "invalid_reasons": ["<b> failed"], "plan_hash": hash,
            "scenario": "agentic_ab", "scale": 0.1, "context": 4096, "seeds": [42, 43], "machine": { "cpu": cpu, "cores": 2 },
            "arms": [{ "name": arm, "valid": arm != "theirs", "model": "m", "requests": 49, "failed": 1, "metrics": { "ttft_mean_s": ttft, "wall_min": null } }],
        })
    }

    #[test]
    fn replays_of_one_plan_from_two_machines_share_a_table_and_others_do_not() {
        let documents = [
            ("a.json".to_owned(), replay("0123456789abcdef0", "ours", "EPYC")),
            ("b.json".to_owned(), replay("0123456789abcdef0", "theirs", "Xeon")),
            ("c.json".to_owned(), replay("fedcba9876543210f", "ours", "EPYC")),
        ];
        let html = page("t", &documents).unwrap().html;
        assert_eq!(html.matches("<h2>Agent replay</h2>").count(), 2);
        let first = html.split("<h2>Agent replay</h2>").nth(1).unwrap();
        for words in ["ours", "theirs", "a.json", "b.json", "1.25 s (1.00-1.50)", "Xeon", "EPYC", "2 seeds"] {
            assert!(first.contains(words), "{words}");
        }
        assert!(first.contains("<th>theirs<br><b>(invalid)</b><br><small>b.json</small></th>"), "{first}");
        assert!(first.contains("<th>ours<br><small>a.json</small></th>"), "{first}");
        assert!(html.contains("&lt;b&gt; failed") && !html.contains("<b> failed"));
        assert!(!html.contains("Wall time"), "a figure that nobody has takes no row");
    }

    #[test]
    fn replays_that_left_fields_out_stand_apart_and_say_so() {
        let mut without = replay("0123456789abcdef0", "theirs", "EPYC");
        without["omitted_fields"] = json!(["top_k", "seed"]);
        let mut all = replay("0123456789abcdef0", "ours", "EPYC");
        all["omitted_fields"] = json!([]);
        let files = [all, without, replay("0123456789abcdef0", "before", "EPYC")];
        let files = files.map(|d| (d["arms"][0]["name"].as_str().unwrap_or_default().to_owned(), d));
        let html = page("t", &files).unwrap().html;
        assert_eq!(html.matches("<h2>Agent replay</h2>").count(), 2);
        assert_eq!(html.matches("Left out of every request: top_k, seed.").count(), 1);
    }

    #[test]
    fn joined_replays_share_plots_and_each_run_has_its_timeline() {
        let with_runs = |arm: &str| {
            let mut d = replay("0123456789abcdef0", arm, "EPYC");
            d["arms"][0]["runs"] = json!([{
                "seed": 42,
                "classes": [{ "class": "loop", "prompt_tokens": 100, "cached_tokens": 40 }, { "class": "?" }],
                "timeline": [
                    { "tag": "A#0", "cls": "loop", "t_send": 0.0, "t_first": 1.5, "t_done": 2.0, "output_tokens": 6,
                      "failed": false },
                    { "tag": "<b>#1", "cls": "retry", "t_send": 2.0, "t_first": null, "t_done": 3.0, "output_tokens": 0,
                      "failed": true },
                    { "tag": 3 }, null,
                ],
            }]);
            d
        };
        let documents =
            [("a.json".to_owned(), with_runs("ours")), ("b.json".to_owned(), with_runs("<i>theirs"))];
        let page = page("t", &documents).unwrap();
        let names: Vec<&str> = page.plots.iter().map(|p| p.0.as_str()).collect();
        let own = ["first-tokens", "cache-shares", "rates", "timeline-1", "timeline-2"];
        assert_eq!(names, own.map(|n| format!("1-replay-{n}.svg")));
        for (name, svg) in &page.plots {
            assert!(svg.starts_with("<svg ") && svg.contains("xmlns="), "{name} stands alone");
            assert!(svg.ends_with("</svg>") && !svg.contains("NaN") && !svg.contains("<i>"), "{name}: {svg}");
            assert!(page.html.contains(svg.as_str()), "{name} is on the page");
        }
        let shared = &page.plots[0].1;
        assert!(shared.contains("ours (a.json)") && shared.contains("theirs (b.json)"));
        assert_eq!(shared.matches("<circle").count(), 2);
        assert!(page.plots[2].1.contains("1 request: 10.0"), "5 tokens after the first in half a second");
        assert!(page.plots[3].1.contains("&lt;b&gt;") && page.plots[3].1.contains("#b00020"));
        // A document of before has no timeline.
        let mut before = with_runs("ours");
        before["arms"][0]["runs"][0]["timeline"] = Value::Null;
        let page = super::super::page("t", &[("a.json".into(), before)]).unwrap();
        assert_eq!(page.plots.len(), 1);
    }

    fn one_load(changes: Value) -> Value {
        let mut d = json!({
            "schema_version": 1, "command": "bench serve", "label": "x", "endpoint": "/v1/chat/completions",
            "dataset": { "name": "random", "input_len": 128 }, "num_prompts": 8, "seed": 7, "request_rate": "inf",
            "burstiness": 1.0, "extra_body": {}, "max_concurrency": 2, "failed": 0, "output_throughput": 10.0,
            "mean_ttft_ms": 12.5, "total_input_tokens": 100, "total_cached_tokens": 25,
        });
        for (key, value) in changes.as_object().unwrap() {
            d[key] = value.clone();
        }
        d
    }

    #[test]
    fn arrivals_are_those_of_the_run_and_unlike_ones_share_no_curve() {
        let ramp = json!({ "ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 9.5 });
        let of = |changes: Value| super::arrivals(&one_load(changes));
        assert_eq!(of(ramp.clone()), "1-9.5/s, linear");
        assert_eq!(of(json!({})), "at once");
        assert_eq!(of(json!({ "request_rate": 2.5, "burstiness": 0.5 })), "2.5/s, burstiness 0.5");
        let trace = json!({ "dataset": { "name": "trace", "file": "t" }, "request_rate": 20.0 });
        assert_eq!(of(trace), "as in the trace");
        let loads = [json!({}), json!({ "max_concurrency": 4 }), ramp];
        let loads = loads.map(|c| ("f".to_owned(), one_load(c)));
        let page = page("t", &loads).unwrap();
        assert!(page.html.contains("<td>1-9.5/s, linear</td>"), "{}", page.html);
        assert!(page.plots[0].1.contains("x, 1-9.5/s, linear"), "{}", page.plots[0].1);
    }

    #[test]
    fn loads_with_other_fields_in_their_requests_stand_apart_and_show_them() {
        let loads = [
            json!({}),
            json!({ "extra_body": { "temperature": 0, "stop": "<b>" } }),
            json!({ "extra_body": { "stop": "<b>", "temperature": 0 } }),
        ];
        let html = page("t", &loads.map(|c| ("f".to_owned(), one_load(c)))).unwrap().html;
        assert_eq!(html.matches("<h2>Load on servers</h2>").count(), 2);
        assert!(
            html.contains(
                "each with <code>{&quot;stop&quot;:&quot;&lt;b&gt;&quot;,&quot;temperature&quot;:0}</code>"
            ),
            "{html}"
        );
    }

    #[test]
    fn a_load_of_which_nothing_was_measured_shows_no_best_value() {
        for none in [json!(0.0), Value::Null] {
            let failed = json!({
                "failed": 8, "mean_ttft_ms": none, "mean_tpot_ms": none, "total_input_tokens": 0, "total_cached_tokens": 0,
            });
            let html = page("t", &[("f".to_owned(), one_load(failed))]).unwrap().html;
            assert!(!html.contains(" ms</td>") && !html.contains(" %</td>"), "{html}");
        }
        let uncounted = one_load(json!({ "total_cached_tokens": null }));
        assert!(!page("t", &[("f".to_owned(), uncounted)]).unwrap().html.contains(" %</td>"));
    }

    #[test]
    fn a_context_table_says_whose_prompts_may_come_from_a_cache() {
        let of = |label: &str, cached: Value| {
            let prompts = json!([{ "prompt_tokens": 100, "ttft_s": 1.0, "cached_tokens": cached }]);
            (
                label.to_owned(),
                json!({ "schema_version": 1, "command": "bench context", "label": label, "prompts": prompts }),
            )
        };
        let html = page("t", &[of("a", json!(0)), of("b", Value::Null)]).unwrap().html;
        assert!(html.contains("<p>b (b): no cached") && !html.contains("<p>a (a): no cached"), "{html}");
    }

    #[test]
    fn loads_of_the_same_work_share_a_table_and_make_a_curve() {
        let run = |label: &str, n: u64, rate: f64| {
            json!({
                "schema_version": 1, "command": "bench serve", "label": label, "model_id": "m", "endpoint": "/v1/chat/completions",
                "dataset": { "name": "random", "input_len": 128 }, "num_prompts": 8, "seed": 0, "request_rate": "inf",
                "max_concurrency": n, "failed": 0, "request_throughput": 1.0, "output_throughput": rate, "mean_ttft_ms": 12.5,
                "total_input_tokens": 100, "total_cached_tokens": 25, "machine": { "cpu": "EPYC", "cores": 2 },
            })
        };
        let documents: Vec<(String, Value)> = [("ours", 1, 10.0), ("ours", 4, 30.0), ("theirs", 1, 9.0)]
            .iter()
            .enumerate()
            .map(|(i, (l, n, r))| (format!("{i}.json"), run(l, *n, *r)))
            .collect();
        let page = page("t", &documents).unwrap();
        assert_eq!(page.html.matches("<h2>Load on servers</h2>").count(), 1);
        assert!(
            page.html.contains("input_len 128")
                && page.html.contains("25 %")
                && page.html.contains("at once")
        );
        let plot = &page.plots[0];
        assert_eq!(plot.0, "1-load.svg");
        assert_eq!(plot.1.matches("<circle").count(), 3, "one point alone is seen too");
        // A single load of each server needs no curve.
        assert!(super::super::page("t", &documents[1..]).unwrap().plots.is_empty());
    }
}
