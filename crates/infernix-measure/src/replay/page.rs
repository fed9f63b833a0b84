//! One self-contained HTML page of a replay: the table and four plots, no script, readable in dark mode.

use super::report::{Played, Report};
use std::fmt::Write as _;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 60.0;
/// Distinguishable with any colour vision (Okabe and Ito).
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;background:#fff}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #ccc}\
th:first-child,td:first-child{text-align:left}svg{width:100%;height:auto}svg text{font-size:12px;fill:currentColor}.axis{stroke:currentColor;opacity:.4}\
.invalid{color:#b00020;font-weight:600}.scroll{overflow-x:auto}@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#161616}th,td{border-color:#444}.invalid{color:#ff8a80}}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page.
pub fn html(report: &Report) -> String {
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>Replay</title><style>{STYLE}</style><h1>Agent replay</h1>"
    );
    for reason in report.invalid() {
        let _ = write!(out, "<p class=\"invalid\">Invalid: {}</p>", escape(&reason));
    }
    out.push_str("<div class=\"scroll\">");
    table(&report.to_markdown(), &mut out);
    out.push_str("</div>");
    let arms = report.arms();
    let colour = |arm: &str| COLOURS[arms.iter().position(|a| *a == arm).unwrap_or(0) % COLOURS.len()];
    out.push_str("<p>");
    for arm in &arms {
        let _ = write!(out, "<span style=\"color:{}\">&#9632;</span> {} &nbsp; ", colour(arm), escape(arm));
    }
    out.push_str("</p><h2>Time to first token over the run, seconds</h2>");
    first_tokens(&report.played, &colour, &mut out);
    out.push_str("<h2>Prompt tokens from cache by kind of turn, percent</h2>");
    cache_shares(&report.played, &arms, &colour, &mut out);
    out.push_str("<h2>Output by requests in flight, tokens a second</h2>");
    rates(&report.played, &arms, &colour, &mut out);
    for p in &report.played {
        let _ = write!(out, "<h2>Timeline: {}, seed {}</h2>", escape(&p.arm), p.seed);
        timeline(p, colour(&p.arm), &mut out);
    }
    let _ = write!(out, "<p><code>{}</code></p></html>", escape(&report.command));
    out
}

/// A Markdown table and the paragraphs around it.
fn table(markdown: &str, out: &mut String) {
    let mut open = false;
    for line in markdown.lines() {
        let Some(row) = line.strip_prefix('|') else {
            if open {
                out.push_str("</table>");
                open = false;
            }
            if !line.is_empty() && !line.starts_with("**Invalid") {
                let _ = write!(out, "<p>{}</p>", escape(line));
            }
            continue;
        };
        if row.starts_with("---") {
            continue;
        }
        let cell = if open { "td" } else { "th" };
        if !open {
            out.push_str("<table>");
            open = true;
        }
        out.push_str("<tr>");
        for text in row.trim_end_matches('|').split('|') {
            let _ = write!(out, "<{cell}>{}</{cell}>", escape(text.trim()));
        }
        out.push_str("</tr>");
    }
    if open {
        out.push_str("</table>");
    }
}

/// A round number at or above a value.
fn nice(v: f64) -> f64 {
    if v <= 0.0 || !v.is_finite() {
        return 1.0;
    }
    let power = 10f64.powf(v.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|x| *x >= v).unwrap_or(10.0 * power)
}

struct Plot<'a> {
    out: &'a mut String,
    height: f64,
    x_max: f64,
    y_max: f64,
}

impl<'a> Plot<'a> {
    fn open(out: &'a mut String, height: f64, (x_max, y_max): (f64, f64), x_name: &str, label: &str) -> Self {
        let _ = write!(
            out,
            "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"{}\">",
            height + 40.0,
            escape(label)
        );
        let mut plot = Self { out, height, x_max: nice(x_max), y_max: nice(y_max) };
        for i in 0..=4 {
            let share = f64::from(i) / 4.0;
            let (x, y) = (plot.x(share * plot.x_max), plot.y(share * plot.y_max));
            let _ =
                write!(plot.out, "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{y}\" y2=\"{y}\"/>");
            let _ = write!(
                plot.out,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                trim(share * plot.y_max)
            );
            if !x_name.is_empty() {
                let anchor = if i == 4 { "end" } else { "middle" };
                let _ = write!(
                    plot.out,
                    "<text x=\"{x}\" y=\"{}\" text-anchor=\"{anchor}\">{}</text>",
                    height + 18.0,
                    trim(share * plot.x_max)
                );
            }
        }
        let _ = write!(
            plot.out,
            "<text x=\"{WIDTH}\" y=\"{}\" text-anchor=\"end\">{x_name}</text>",
            height + 34.0
        );
        plot.height = height;
        plot
    }

    fn x(&self, v: f64) -> f64 {
        LEFT + (WIDTH - LEFT - 8.0) * v / self.x_max
    }

    fn y(&self, v: f64) -> f64 {
        // The top leaves room for the label of a bar that reaches it.
        18.0 + (self.height - 18.0) * (1.0 - v / self.y_max)
    }

    fn close(self) {
        self.out.push_str("</svg>");
    }
}

fn trim(v: f64) -> String {
    let text = format!("{v:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn first_tokens(played: &[Played], colour: &dyn Fn(&str) -> &'static str, out: &mut String) {
    let rows = || played.iter().flat_map(|p| p.run.rows.iter().map(move |r| (p, r)));
    let x = rows().map(|(_, r)| r.sent).fold(0.0, f64::max);
    let y = rows().filter_map(|(_, r)| Some(r.first? - r.sent)).fold(0.0, f64::max);
    let plot =
        Plot::open(out, 260.0, (x, y), "seconds into the run", "Time to first token in seconds over the run");
    for (p, r) in rows() {
        let Some(first) = r.first else { continue };
        let (cx, cy) = (plot.x(r.sent), plot.y(first - r.sent));
        let title = format!("{} {}#{} {}: {:.2} s", p.arm, r.actor, r.index, r.class.name(), first - r.sent);
        let _ = write!(
            plot.out,
            "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3.5\" fill=\"{}\" fill-opacity=\".7\"><title>{}</title></circle>",
            colour(&p.arm),
            escape(&title)
        );
    }
    plot.close();
}

/// Widest slot of a group of bars: a single group must not fill the page.
const SLOT: f64 = 160.0;

/// A bar an arm in each group, with its value above it. Groups without a value of any arm stay empty.
fn groups(
    plot: &mut Plot<'_>,
    names: &[String],
    arms: &[&str],
    colour: &dyn Fn(&str) -> &'static str,
    digits: usize,
    value: &dyn Fn(usize, usize) -> Option<f64>,
) {
    let slot = ((WIDTH - LEFT - 8.0) / names.len().max(1) as f64).min(SLOT);
    let width = slot * 0.8 / arms.len().max(1) as f64;
    for (i, name) in names.iter().enumerate() {
        for (k, arm) in arms.iter().enumerate() {
            let Some(v) = value(i, k) else { continue };
            let (x, y) = (LEFT + slot * (i as f64 + 0.1) + width * k as f64, plot.y(v));
            let _ = write!(
                plot.out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}, {}: {v:.1}</title></rect>",
                plot.y(0.0) - y,
                colour(arm),
                escape(arm),
                escape(name)
            );
            // A label wider than its bar would run into the next one.
            if width >= 24.0 {
                let _ = write!(
                    plot.out,
                    "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{v:.digits$}</text>",
                    x + width / 2.0,
                    y - 4.0
                );
            }
        }
        let x = LEFT + slot * (i as f64 + 0.5);
        // Every second one a line lower, where names are longer than their slots.
        let low = if i % 2 == 1 && slot < 90.0 { 14.0 } else { 0.0 };
        let y = plot.height + 16.0 + low;
        let _ =
            write!(plot.out, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", escape(name));
    }
}

fn cache_shares(played: &[Played], arms: &[&str], colour: &dyn Fn(&str) -> &'static str, out: &mut String) {
    let mut classes: Vec<_> = played.iter().flat_map(|p| p.run.rows.iter().map(|r| r.class)).collect();
    classes.sort_unstable();
    classes.dedup();
    let names: Vec<String> = classes.iter().map(|c| c.name().to_owned()).collect();
    let mut plot = Plot::open(out, 220.0, (1.0, 100.0), "", "Share of prompt tokens from cache in percent");
    let share = |i: usize, k: usize| {
        let own = played.iter().filter(|p| p.arm == arms[k]).flat_map(|p| &p.run.rows);
        let (mut cached, mut prompt) = (0, 0);
        for u in own.filter(|r| r.class == classes[i]).filter_map(|r| r.exchange.answer.usage) {
            cached += u.cached;
            prompt += u.prompt;
        }
        (prompt > 0).then(|| 100.0 * cached as f64 / prompt as f64)
    };
    groups(&mut plot, &names, arms, colour, 0, &share);
    plot.close();
}

/// Tokens a second over all streams, by how many requests were in flight.
fn rates(played: &[Played], arms: &[&str], colour: &dyn Fn(&str) -> &'static str, out: &mut String) {
    let by_arm: Vec<Vec<(usize, f64)>> = arms.iter().map(|arm| by_flight(played, arm)).collect();
    let most = by_arm.iter().flatten().map(|p| p.0).max().unwrap_or(1);
    let fastest = by_arm.iter().flatten().map(|p| p.1).fold(0.0, f64::max);
    let names: Vec<String> =
        (1..=most).map(|n| format!("{n} request{}", if n == 1 { "" } else { "s" })).collect();
    let label = "Output tokens per second by requests in flight";
    // Room above the highest bar for its label.
    let mut plot = Plot::open(out, 220.0, (1.0, fastest * 1.05), "", label);
    let rate = |i: usize, k: usize| by_arm[k].iter().find(|p| p.0 == i + 1).map(|p| p.1);
    let digits = usize::from(fastest < 100.0);
    groups(&mut plot, &names, arms, colour, digits, &rate);
    plot.close();
}

/// Time is cut at every start and end of a stream; within a piece each stream gives its mean rate.
fn by_flight(played: &[Played], arm: &str) -> Vec<(usize, f64)> {
    let mut sums: std::collections::BTreeMap<usize, (f64, f64)> = std::collections::BTreeMap::new();
    for p in played.iter().filter(|p| p.arm == arm) {
        let streams: Vec<(f64, f64, f64)> = p
            .run
            .rows
            .iter()
            .filter_map(|r| {
                let first = r.first?;
                let tokens = r.exchange.output_tokens().saturating_sub(1) as f64;
                (r.done > first).then(|| (first, r.done, tokens / (r.done - first)))
            })
            .collect();
        let mut edges: Vec<f64> = streams.iter().flat_map(|s| [s.0, s.1]).collect();
        edges.sort_by(f64::total_cmp);
        for w in edges.windows(2) {
            let open: Vec<f64> = streams.iter().filter(|s| s.0 <= w[0] && s.1 >= w[1]).map(|s| s.2).collect();
            if !open.is_empty() && w[1] > w[0] {
                let sum = sums.entry(open.len()).or_default();
                sum.0 += open.iter().sum::<f64>() * (w[1] - w[0]);
                sum.1 += w[1] - w[0];
            }
        }
    }
    sums.into_iter().map(|(n, (tokens, seconds))| (n, tokens / seconds)).collect()
}

/// A lane a session: waiting pale, streaming full.
fn timeline(played: &Played, colour: &str, out: &mut String) {
    let mut actors: Vec<&str> = Vec::new();
    for r in &played.run.rows {
        if !actors.contains(&r.actor.as_str()) {
            actors.push(&r.actor);
        }
    }
    actors.sort_unstable();
    let height = 18.0 * actors.len() as f64 + 10.0;
    let end = nice(played.run.rows.iter().map(|r| r.done).fold(0.0, f64::max));
    let x = |t: f64| 80.0 + (WIDTH - 90.0) * t / end;
    let _ = write!(
        out,
        "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"Requests by session over time\">",
        height + 24.0
    );
    for (i, actor) in actors.iter().enumerate() {
        let y = 4.0 + 18.0 * i as f64;
        let _ = write!(out, "<text x=\"74\" y=\"{}\" text-anchor=\"end\">{}</text>", y + 12.0, escape(actor));
        for r in played.run.rows.iter().filter(|r| r.actor == *actor) {
            let first = r.first.unwrap_or(r.done);
            let fill = if r.failure().is_some() { "#b00020" } else { colour };
            for (a, b, opacity) in [(r.sent, first, 0.35), (first, r.done, 0.95)] {
                let _ = write!(
                    out,
                    "<rect x=\"{:.1}\" y=\"{y}\" width=\"{:.1}\" height=\"14\" fill=\"{fill}\" fill-opacity=\"{opacity}\"><title>{}#{} {}: {:.2} s to the first token, {:.2} s in all</title></rect>",
                    x(a),
                    (x(b) - x(a)).max(0.5),
                    escape(actor),
                    r.index,
                    r.class.name(),
                    first - r.sent,
                    r.done - r.sent
                );
            }
        }
    }
    for i in 0..=4 {
        let t = end * f64::from(i) / 4.0;
        let anchor = if i == 4 { "end" } else { "middle" };
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{} s</text>",
            x(t),
            height + 16.0,
            trim(t)
        );
    }
    out.push_str("</svg>");
}
