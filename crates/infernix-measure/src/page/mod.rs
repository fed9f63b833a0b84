//! One self-contained page from reports of several engines and machines: tables, notes and plots, no script, nothing
//! loaded from elsewhere.
//!
//! Comparisons against the same reference on the same text share a table and plots; others stand apart, because their
//! figures do not compare.

mod speed;
pub(crate) mod svg;

use crate::error::{MeasureError, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use svg::{Bar, Line, escape};

/// A page with its plots.
#[derive(Clone, Debug)]
pub struct Page {
    /// The document.
    pub html: String,
    /// Each plot as a file: name and SVG text.
    pub plots: Vec<(String, String)>,
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:78rem;margin:2rem auto;padding:0 1rem;color:#222;\
background:#fff}table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}td,th{padding:.25rem .7rem;\
border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}td.l,th.l{text-align:left}th{font-weight:600}small{color:#666}\
.t{overflow-x:auto}.g{display:grid;grid-template-columns:repeat(auto-fit,minmax(30rem,1fr));gap:1rem}svg{width:100%;height:auto}\
li{margin:.2rem 0}figure{margin:0}code{font-size:.9em;overflow-wrap:anywhere}\
@media(prefers-color-scheme:dark){body{background:#16181b;color:#ddd}td,th{border-color:#444}small{color:#aaa}}";

/// Joins documents of `kld`, `ppl`, `bench`, `bench serve`, `bench context` and `replay`, each with its file name.
///
/// # Errors
/// A document that is none of these, or of another schema version; the message names the file.
pub fn page(title: &str, documents: &[(String, Value)]) -> Result<Page> {
    let mut comparisons: BTreeMap<String, Vec<(&str, &Value)>> = BTreeMap::new();
    let (mut perplexities, mut benches) = (Vec::new(), Vec::new());
    let mut speed = speed::Documents::default();
    for (name, document) in documents {
        let version = document["schema_version"].as_u64();
        if version != Some(u64::from(crate::SCHEMA_VERSION)) {
            let found = match &document["schema_version"] {
                Value::Null => "no schema version: no report of this program".to_owned(),
                other => format!("schema version {other}, this program reads {}", crate::SCHEMA_VERSION),
            };
            return Err(MeasureError::Options(format!("{name}: {found}")));
        }
        let measured = match document["command"].as_str() {
            Some("kld") => "paths",
            Some("ppl") => "domains",
            _ => "tests",
        };
        if document[measured].as_array().is_some_and(Vec::is_empty) {
            return Err(MeasureError::Options(format!("{name}: {measured} is empty: nothing was measured")));
        }
        match (document["command"].as_str(), document["kind"].as_str()) {
            (Some("kld"), _) => comparisons.entry(key(document)).or_default().push((name, document)),
            (Some("ppl"), _) => perplexities.push((name.as_str(), document)),
            (_, Some("infernix_bench")) => benches.push((name.as_str(), document)),
            (Some(command), _) if speed.take(command, name, document) => {}
            _ => {
                let what = format!("{name}: no JSON report of kld, ppl, bench or replay");
                return Err(MeasureError::Options(what));
            }
        }
    }
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
         style-src 'unsafe-inline'\"><title>{0}</title><style>{STYLE}</style></head><body>\n<h1>{0}</h1>\n",
        escape(title)
    );
    let mut plots = Vec::new();
    for (number, group) in comparisons.values().enumerate() {
        comparison(&mut out, &mut plots, group, number + 1);
    }
    perplexity(&mut out, &perplexities);
    bench(&mut out, &benches);
    speed.write(&mut out, &mut plots);
    out.push_str("</body></html>\n");
    Ok(Page { html: out, plots })
}

/// What must agree for figures to compare.
fn key(d: &Value) -> String {
    let reference = &d["reference"];
    let made_of = [&reference["artifact_id"], &reference["model"]["artifact_id"], reference];
    let made_of = made_of.into_iter().find(|v| !v.is_null()).unwrap_or(&Value::Null);
    format!(
        "{made_of} {} {} {} {} {}",
        d["corpus"]["tokens_blake3"], d["ctx"], d["chunks"], d["valid_vocab"], d["llama_compat"]
    )
}

/// What the KLD of a report's figures covers: only like is divided by like.
fn covers(d: &Value, kl: &Value) -> String {
    let kl = kl.as_str().unwrap_or("full");
    if kl == "top_k" { format!("{kl} {}", d["reference"]["top_k"]) } else { kl.to_owned() }
}

/// The mean KLD of a report's honest rounding, and what it covers.
fn yardstick(d: &Value) -> Option<(f64, String)> {
    let mean = d["rounding"]["mean_kld"].as_f64().filter(|v| *v > 0.0)?;
    // It is scored as the engines that run are; reports of before say only of those how.
    let live = d["paths"].as_array().into_iter().flatten().find(|p| p["path"] != "file");
    let kl = match &d["rounding"]["kl"] {
        Value::Null => live.map_or(&Value::Null, |p| &p["kl"]),
        kl => kl,
    };
    Some((mean, covers(d, kl)))
}

fn figure(v: &Value, text: impl Fn(f64) -> String) -> String {
    v.as_f64().map_or("—".into(), text)
}

/// A value with its interval below it in small print.
fn ranged(v: &Value, interval: &Value, text: impl Fn(f64) -> String) -> String {
    let bound = |i: usize| interval[i].as_f64();
    match (bound(0), bound(1)) {
        (Some(a), Some(b)) => {
            // The unit once, behind the value.
            let bare = |v: f64| text(v).trim_end_matches(" %").to_owned();
            format!("{} <small>[{}, {}]</small>", figure(v, &text), bare(a), bare(b))
        }
        _ => figure(v, text),
    }
}

fn row(out: &mut String, tag: &str, left: usize, cells: &[String]) {
    out.push_str("<tr>");
    for (i, cell) in cells.iter().enumerate() {
        let class = if i < left { " class=\"l\"" } else { "" };
        let _ = write!(out, "<{tag}{class}>{cell}</{tag}>");
    }
    out.push_str("</tr>\n");
}

fn text_of(v: &Value) -> String {
    escape(v.as_str().unwrap_or("?"))
}

fn curve(v: &Value) -> Vec<(f64, f64)> {
    let point = |p: &Value| Some((p[0].as_f64()?, p[1].as_f64()?));
    v.as_array().into_iter().flatten().filter_map(point).collect()
}

fn comparison(out: &mut String, plots: &mut Vec<(String, String)>, group: &[(&str, &Value)], number: usize) {
    let first = group[0].1;
    let count = |k: &str| first[k].as_u64().unwrap_or(0);
    let _ = write!(
        out,
        "<h2>Distance from the exact model</h2>\n<p>Text <b>{}</b>: {} chunks of {} tokens, {} rows scored. Reference: {}. \
         Intervals: 95 %, by chunks.</p>\n<div class=\"t\"><table>\n",
        text_of(&first["corpus"]["name"]),
        count("chunks"),
        count("ctx"),
        count("rows"),
        reference_text(&first["reference"])
    );
    let several = group.len() > 1;
    // The last column says which file; one file needs none.
    let columns = if several { 8 } else { 7 };
    let head =
        ["path", "engine", "mean KLD", "× rounding", "KLD 99.9 %", "top-1", "PPL vs reference", "file"];
    row(out, "th", 2, &head.map(String::from)[..columns]);
    let plain = |v: f64| format!("{v:.6}");
    let share = |v: f64| format!("{:.2} %", 100.0 * v);
    let yardsticks: Vec<(f64, String)> = group.iter().filter_map(|(_, d)| yardstick(d)).collect();
    let mut unlike: Vec<String> = Vec::new();
    let (mut by_position, mut by_quantile, mut bars) = (Vec::new(), Vec::new(), Vec::new());
    let mut line = |name: &str, curves: &Value| {
        by_position.push(Line { name: name.into(), points: curve(&curves["position"]) });
        by_quantile.push((name.to_owned(), curve(&curves["quantile"])));
    };
    for (file, d) in group {
        let r = &d["rounding"];
        if !r.is_null() {
            let seeds = crate::report::seeds(r["seeds"].as_array().map_or(0, Vec::len));
            let name = format!("honest rounding, {seeds}");
            let cells = [
                "—".into(),
                name.clone(),
                ranged(&r["mean_kld"], &r["mean_kld_ci"], plain),
                "1".into(),
                figure(&r["kld_percentiles"]["99.9"], |v| format!("{v:.4}")),
                figure(&r["top1"], share),
                "—".into(),
                escape(file),
            ];
            row(out, "td", 2, &cells[..columns]);
            line(&name, &r["curves"]);
        }
    }
    for (file, d) in group {
        for p in d["paths"].as_array().into_iter().flatten() {
            let engine = p["engine"].as_str().unwrap_or("?");
            let path = p["path"].as_str().unwrap_or("?");
            let covered = covers(d, &p["kl"]);
            let like = |y: &(f64, String)| y.1 == covered;
            let own = p["times_rounding"].as_f64().filter(|_| yardstick(d).as_ref().is_some_and(like));
            let other = yardsticks.iter().find(|y| like(y));
            let times = own.or_else(|| Some(p["mean_kld"].as_f64()? / other?.0));
            if times.is_none() && !yardsticks.is_empty() {
                unlike.push(format!("{} ({}, {})", escape(engine), escape(path), escape(&covered)));
            }
            let interval = if own.is_some() { &p["times_rounding_ci"] } else { &Value::Null };
            let cells = [
                escape(path),
                escape(engine),
                ranged(&p["mean_kld"], &p["mean_kld_ci"], plain),
                ranged(&times.map_or(Value::Null, Value::from), interval, |v| format!("{v:.2}")),
                figure(&p["kld_percentiles"]["99.9"], |v| format!("{v:.4}")),
                ranged(&p["top1"], &p["top1_ci"], share),
                ranged(&p["ppl_ratio_pct"], &p["ppl_ratio_ci"], |v| format!("{v:+.3} %")),
                escape(file),
            ];
            row(out, "td", 2, &cells[..columns]);
            let mut name = format!("{engine} ({path})");
            if several {
                let _ = write!(name, ", {file}");
            }
            line(&name, &p["curves"]);
            if let Some(value) = times {
                let bound = |i: usize| interval[i].as_f64();
                let interval = bound(0).zip(bound(1)).map(|(a, b)| [a, b]);
                bars.push(Bar { name: format!("{engine} ({path})"), value, interval });
            }
        }
    }
    out.push_str("</table></div>\n");
    notes(out, group);
    if !unlike.is_empty() {
        let _ = writeln!(
            out,
            "<p>No × rounding for {}: their KLD covers other ids than that of honest rounding.</p>",
            unlike.join("; ")
        );
    }
    let fractions: Vec<f64> = by_quantile
        .iter()
        .map(|q| &q.1)
        .max_by_key(|q| q.len())
        .map_or(Vec::new(), |q| q.iter().map(|p| p.0).collect());
    let labels: Vec<String> = fractions.iter().map(|f| label(*f)).collect();
    let index = |points: Vec<(f64, f64)>| {
        let at = |f: f64| fractions.iter().position(|g| *g == f).map(|i| i as f64);
        points.into_iter().filter_map(|(f, v)| Some((at(f)?, v))).collect()
    };
    let quantiles: Vec<Line> =
        by_quantile.into_iter().map(|(name, points)| Line { name, points: index(points) }).collect();
    out.push_str("<div class=\"g\">\n");
    let mut show = |name: &str, svg: String| {
        let _ = writeln!(out, "<figure>{svg}</figure>");
        plots.push((format!("{number}-{name}.svg"), svg));
    };
    if !bars.is_empty() {
        show("times-rounding", svg::bars("Mean KLD over that of honest rounding", "× rounding", &bars));
    }
    if by_position.iter().any(|l| !l.points.is_empty()) {
        let title = "Mean KLD by position in context";
        show(
            "kld-by-position",
            svg::lines(title, "tokens of context", "mean KLD, nats", &[], false, &by_position),
        );
    }
    if !labels.is_empty() {
        let title = "KLD by percentile of rows";
        show(
            "kld-by-percentile",
            svg::lines(title, "rows at or below", "KLD, nats", &labels, true, &quantiles),
        );
    }
    out.push_str("</div>\n");
}

fn label(fraction: f64) -> String {
    if fraction >= 1.0 {
        return "max".into();
    }
    let text = format!("{:.1}", 100.0 * fraction);
    text.trim_end_matches(".0").to_owned()
}

fn reference_text(reference: &Value) -> String {
    let model = if reference["model"].is_object() { &reference["model"] } else { reference };
    let part = |(key, noun): &(&str, &str)| {
        let value = reference[*key].as_str().or_else(|| model[*key].as_str())?;
        Some(format!("{}{noun}", escape(value)))
    };
    let keys = [
        ("kind", ""),
        ("backend", ""),
        ("artifact", ""),
        ("activations", " activations"),
        ("kv", " KV"),
        ("boundaries", " boundaries"),
    ];
    let parts: Vec<String> = keys.iter().filter_map(part).collect();
    if parts.is_empty() { "not described".into() } else { parts.join(", ") }
}

/// Where each figure comes from, and what its report says a reader must know.
fn notes(out: &mut String, documents: &[(&str, &Value)]) {
    out.push_str("<ul>\n");
    for (file, d) in documents {
        let machine = &d["machine"];
        let mut text = format!("<code>{}</code>", escape(file));
        if let Some(cpu) = machine["cpu"].as_str() {
            let _ = write!(text, ": {}, {} cores", escape(cpu), machine["cores"].as_u64().unwrap_or(0));
        }
        let cards = machine["gpus"].as_array().into_iter().flatten().filter_map(|g| g["name"].as_str());
        for gpu in machine["gpu"].as_str().into_iter().chain(cards) {
            let _ = write!(text, ", {}", escape(gpu));
        }
        if let Some(seconds) = d["seconds"].as_f64().or_else(|| d["timing"]["score_seconds"].as_f64()) {
            let _ = write!(text, ", {seconds:.0} s");
        }
        let _ = writeln!(out, "<li>{text}</li>");
        for p in d["paths"].as_array().into_iter().flatten() {
            let n = |k: &str| p["drafting"][k].as_u64();
            if let (Some(rounds), Some(drafted), Some(accepted)) = (n("rounds"), n("drafted"), n("accepted"))
            {
                let per_round = (rounds + accepted) as f64 / rounds.max(1) as f64;
                let engine = text_of(&p["engine"]);
                let _ = writeln!(
                    out,
                    "<li>{engine}, decode rounds: {accepted} of {drafted} drafts accepted, {per_round:.2} tokens a round</li>"
                );
            }
        }
        for note in d["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let _ = writeln!(out, "<li>{}</li>", escape(note));
        }
    }
    out.push_str("</ul>\n");
}

fn perplexity(out: &mut String, documents: &[(&str, &Value)]) {
    if documents.is_empty() {
        return;
    }
    out.push_str("<h2>Perplexity</h2>\n<div class=\"t\"><table>\n");
    let head = ["file", "engine", "corpus", "domain", "tokens", "mean NLL", "PPL"];
    row(out, "th", 4, &head.map(String::from));
    for (file, d) in documents {
        let e = &d["execution"];
        let corpus = format!(
            "{} ({}), {}/{}",
            text_of(&d["corpus"]["id"]),
            text_of(&d["corpus"]["mode"]),
            e["context_tokens"],
            e["stride_tokens"]
        );
        let domains = d["domains"].as_array().into_iter().flatten().map(|t| (text_of(&t["domain"]), t));
        for (domain, t) in domains.chain([("<b>overall</b>".to_owned(), &d["overall"])]) {
            let cells = [
                escape(file),
                reference_text(&d["engine"]),
                corpus.clone(),
                domain,
                figure(&t["scored_tokens"], |v| format!("{v:.0}")),
                figure(&t["mean_nll"], |v| format!("{v:.6}")),
                figure(&t["perplexity"], |v| format!("{v:.6}")),
            ];
            row(out, "td", 4, &cells);
        }
    }
    out.push_str("</table></div>\n");
    notes(out, documents);
}

fn bench(out: &mut String, documents: &[(&str, &Value)]) {
    if documents.is_empty() {
        return;
    }
    out.push_str("<h2>Throughput</h2>\n<div class=\"t\"><table>\n");
    let head = [
        "file",
        "model",
        "backend",
        "test",
        "streams",
        "spec",
        "tok/s",
        "±",
        "best",
        "rounds/s",
        "tok/round",
    ];
    row(out, "th", 4, &head.map(String::from));
    for (file, d) in documents {
        for t in d["tests"].as_array().into_iter().flatten() {
            let rate = |v: f64| format!("{v:.2}");
            let mut model = text_of(&d["model"]["name"]);
            if d["model"]["synthetic"] == true {
                model.push_str(" (synthetic)");
            }
            let cells = [
                escape(file),
                model,
                text_of(&d["config"]["backend"]),
                text_of(&t["label"]),
                figure(&d["config"]["concurrency"], |v| format!("{v:.0}")),
                d["config"]["spec"].as_str().map_or("—".into(), escape),
                figure(&t["tok_s_mean"], rate),
                figure(&t["tok_s_stddev"], rate),
                figure(&t["tok_s_best"], rate),
                figure(&t["rounds_per_s_mean"], rate),
                figure(&t["tokens_per_round"], rate),
            ];
            row(out, "td", 4, &cells);
        }
    }
    out.push_str("</table></div>\n");
    notes(out, documents);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn document(engine: &str, rounding: bool, text: &str) -> Value {
        json!({
            "schema_version": 1, "command": "kld", "chunks": 3, "ctx": 512, "rows": 765,
            "corpus": { "name": "<b>", "tokens_blake3": text }, "reference": { "artifact_id": "x" },
            "paths": [{
                "path": "prompt", "engine": engine, "mean_kld": 0.002, "mean_kld_ci": [0.001, 0.003],
                "times_rounding": if rounding { json!(2.0) } else { Value::Null },
                "top1": 0.98, "curves": { "position": [[300.0, 0.1], [400.0, 0.2]], "quantile": [[0.5, 1e-3], [1.0, 0.5]] },
            }],
            "rounding": if rounding { json!({ "seeds": [1, 2], "mean_kld": 0.001, "curves": { "position": [], "quantile": [] } }) } else { Value::Null },
            "notes": ["<script>"],
        })
    }

    #[test]
    fn an_engine_from_another_machine_is_held_to_the_same_yardstick() {
        let files = [
            ("a.json".to_owned(), document("cpu", true, "t")),
            ("b.json".to_owned(), document("cuda", false, "t")),
        ];
        let p = page("<title>", &files).unwrap();
        assert_eq!(p.html.matches("<table>").count(), 1);
        assert!(p.html.contains("<td>2.00</td>"), "0.002 over 0.001 of the other file: {}", p.html);
        assert_eq!(p.plots.len(), 3);
        assert!(!p.html.contains("<script") && !p.html.contains("http-equiv=\"refresh"));
        // Nothing is loaded from elsewhere: the only address is the SVG name space.
        assert_eq!(p.html.matches("http://").count(), p.html.matches("http://www.w3.org/2000/svg").count());
        assert!(!p.html.contains("https://") && !p.html.contains("src="));
    }

    #[test]
    fn a_lower_bound_is_not_divided_by_the_full_yardstick() {
        let mut bound = document("cuda", false, "t");
        bound["paths"][0]["kl"] = json!("top_k");
        bound["reference"]["top_k"] = json!(256);
        let mut cut = document("other.kld", true, "t");
        cut["paths"][0]["kl"] = json!("cut_16");
        cut["rounding"]["kl"] = json!("full");
        let files = [
            ("a.json".to_owned(), document("cpu", true, "t")),
            ("b.json".to_owned(), bound),
            ("c.json".into(), cut),
        ];
        let p = page("t", &files).unwrap();
        assert_eq!(p.html.matches("<td>2.00</td>").count(), 1, "{}", p.html);
        assert!(
            p.html.contains("No × rounding for cuda (prompt, top_k 256); other.kld (prompt, cut_16)"),
            "{}",
            p.html
        );
    }

    #[test]
    fn reports_without_a_measurement_are_refused_in_plain_words() {
        for (command, list) in [("kld", "paths"), ("ppl", "domains")] {
            let empty = json!({ "schema_version": 1, "command": command, list: [] });
            let e = page("t", &[("x.json".into(), empty)]).unwrap_err().to_string();
            assert_eq!(e, format!("x.json: {list} is empty: nothing was measured"));
        }
        for (version, words) in
            [(json!({}), "no schema version"), (json!({ "schema_version": 99 }), "schema version 99")]
        {
            let e = page("t", &[("x.json".into(), version)]).unwrap_err().to_string();
            assert!(e.contains(words) && !e.contains("Some") && !e.contains("None"), "{e}");
        }
    }

    #[test]
    fn figures_of_other_texts_stand_apart() {
        let files = [
            ("a.json".to_owned(), document("cpu", true, "t")),
            ("b.json".to_owned(), document("cpu", false, "u")),
        ];
        let p = page("t", &files).unwrap();
        assert_eq!(p.html.matches("<table>").count(), 2);
        assert!(p.html.contains("<td>—</td>"), "no yardstick of another text");
    }

    #[test]
    fn other_documents_are_refused_by_name() {
        let e = page("t", &[("x.json".into(), json!({ "schema_version": 1 }))]).unwrap_err().to_string();
        assert!(e.contains("x.json") && e.contains("kld, ppl, bench or replay"), "{e}");
        assert!(page("t", &[("x.json".into(), json!({ "command": "kld" }))]).is_err());
    }
}
