//! Plots of replays, from their JSON documents: first tokens over the run, cache shares, rates by requests in flight, and a
//! timeline a run. Runs of several documents share a plot, a colour an arm.

use super::plan::Class;
use crate::page::svg::{COLOURS, LEFT, TOP, WIDTH, escape, open, trimmed};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A run as plots show it.
pub(crate) struct Drawn {
    /// The arm, and its file where there are several.
    pub(crate) arm: String,
    /// The plan's seed.
    pub(crate) seed: u64,
    /// Cached and all prompt tokens by kind of turn.
    classes: BTreeMap<Class, (u64, u64)>,
    /// Its requests, where the document lists them.
    requests: Vec<Request>,
}

/// Times are seconds into the run.
struct Request {
    actor: String,
    tag: String,
    class: Class,
    sent: f64,
    first: Option<f64>,
    done: f64,
    tokens: u64,
    failed: bool,
}

/// The runs of a replay's document; `name` gives an arm's name on the plots. What cannot be read is left out.
pub(crate) fn drawn(document: &Value, name: impl Fn(&str) -> String) -> Vec<Drawn> {
    let list = |v: &'_ Value| v.as_array().cloned().unwrap_or_default();
    let class = |v: &Value| serde_json::from_value::<Class>(v.clone()).ok();
    let mut runs = Vec::new();
    for arm in list(&document["arms"]) {
        for run in list(&arm["runs"]) {
            let counts = list(&run["classes"]).into_iter().filter_map(|c| {
                Some((class(&c["class"])?, (c["cached_tokens"].as_u64()?, c["prompt_tokens"].as_u64()?)))
            });
            let requests = list(&run["timeline"]).into_iter().filter_map(|r| {
                let tag = r["tag"].as_str()?.to_owned();
                Some(Request {
                    actor: tag.rsplit_once('#')?.0.to_owned(),
                    tag,
                    class: class(&r["cls"])?,
                    sent: r["t_send"].as_f64()?,
                    first: r["t_first"].as_f64(),
                    done: r["t_done"].as_f64()?,
                    tokens: r["output_tokens"].as_u64()?,
                    failed: r["failed"].as_bool()?,
                })
            });
            runs.push(Drawn {
                arm: name(arm["name"].as_str().unwrap_or("?")),
                seed: run["seed"].as_u64().unwrap_or_default(),
                classes: counts.collect(),
                requests: requests.collect(),
            });
        }
    }
    runs
}

/// All plots that the runs have something for: name of the file without its ending, and SVG text.
pub(crate) fn plots(runs: &[Drawn]) -> Vec<(String, String)> {
    let mut arms: Vec<&str> = Vec::new();
    for run in runs {
        if !arms.contains(&run.arm.as_str()) {
            arms.push(&run.arm);
        }
    }
    let mut out = Vec::new();
    let mut put = |name: &str, svg: Option<String>| out.extend(svg.map(|svg| (name.to_owned(), svg)));
    put("first-tokens", first_tokens(runs, &arms));
    put("cache-shares", cache_shares(runs, &arms));
    put("rates", rates(runs, &arms));
    for (i, run) in runs.iter().enumerate() {
        put(&format!("timeline-{}", i + 1), timeline(run, colour(&arms, &run.arm)));
    }
    out
}

fn colour(arms: &[&str], arm: &str) -> &'static str {
    COLOURS[arms.iter().position(|a| *a == arm).unwrap_or(0) % COLOURS.len()]
}

/// A round number at or above a value.
fn nice(v: f64) -> f64 {
    if v <= 0.0 || !v.is_finite() {
        return 1.0;
    }
    let power = 10f64.powf(v.log10().floor());
    // Quarters of each are short numbers, too.
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0]
        .into_iter()
        .map(|m| m * power)
        .find(|x| *x >= v && x.is_finite())
        .unwrap_or(v)
}

struct Plot {
    out: String,
    bottom: f64,
    x_max: f64,
    y_max: f64,
}

/// Width of the area of a plot.
const AREA: f64 = WIDTH - LEFT - 16.0;

impl Plot {
    /// A frame with the scale of y, that of x where it has a name, and what the colours are.
    fn open(title: &str, height: f64, (x_max, y_max): (f64, f64), x_name: &str, arms: &[&str]) -> Self {
        let bottom = TOP + height;
        let mut plot = Self {
            out: open(title, bottom + 48.0 + 18.0 * arms.len() as f64),
            bottom,
            x_max: nice(x_max),
            y_max: nice(y_max),
        };
        for i in 0..=4 {
            let share = f64::from(i) / 4.0;
            let (x, y) = (plot.x(share * plot.x_max), plot.y(share * plot.y_max));
            let _ = write!(
                plot.out,
                "<line class=\"g\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT + AREA,
                LEFT - 6.0,
                y + 4.0,
                trimmed(share * plot.y_max, 2)
            );
            if !x_name.is_empty() {
                plot.text(x, bottom + 17.0, &trimmed(share * plot.x_max, 2));
            }
        }
        plot.text(LEFT + AREA / 2.0, bottom + 34.0, x_name);
        for (i, arm) in arms.iter().enumerate() {
            let y = bottom + 50.0 + 18.0 * i as f64;
            let _ = write!(
                plot.out,
                "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{}\" y=\"{y:.1}\">{}</text>",
                y - 11.0,
                colour(arms, arm),
                LEFT + 20.0,
                escape(arm)
            );
        }
        plot
    }

    fn x(&self, v: f64) -> f64 {
        LEFT + AREA * (v / self.x_max).clamp(0.0, 1.0)
    }

    fn y(&self, v: f64) -> f64 {
        // The top leaves room for the label of a bar that reaches it.
        let top = TOP + 14.0;
        top + (self.bottom - top) * (1.0 - (v / self.y_max).clamp(0.0, 1.0))
    }

    /// Text around a point.
    fn text(&mut self, x: f64, y: f64, text: &str) {
        let _ = write!(
            self.out,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>",
            escape(text)
        );
    }

    fn close(mut self) -> String {
        self.out.push_str("</svg>");
        self.out
    }
}

fn first_tokens(runs: &[Drawn], arms: &[&str]) -> Option<String> {
    let points = || {
        let of = |run| move |r: &'_ Request| Some((run, r.tag.clone(), r.class, r.sent, r.first? - r.sent));
        runs.iter().flat_map(move |run: &Drawn| run.requests.iter().filter_map(of(run)))
    };
    let x = points().map(|p| p.3).reduce(f64::max)?;
    let y = points().map(|p| p.4).fold(0.0, f64::max);
    let title = "Time to first token over the run, seconds";
    let mut plot = Plot::open(title, 260.0, (x, y), "seconds into the run", arms);
    for (run, tag, class, sent, waited) in points() {
        let (cx, cy) = (plot.x(sent), plot.y(waited));
        let title = format!("{}, seed {}: {tag} {}: {waited:.2} s", run.arm, run.seed, class.name());
        let _ = write!(
            plot.out,
            "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3.5\" fill=\"{}\" fill-opacity=\".7\"><title>{}</title></circle>",
            colour(arms, &run.arm),
            escape(&title)
        );
    }
    Some(plot.close())
}

/// Widest slot of a group of bars: a single group must not fill the page.
const SLOT: f64 = 160.0;

/// A bar an arm in each group, with its value above it. Groups without a value of any arm stay empty.
fn groups(
    plot: &mut Plot,
    names: &[String],
    arms: &[&str],
    digits: usize,
    value: &dyn Fn(usize, usize) -> Option<f64>,
) {
    let slot = (AREA / names.len().max(1) as f64).min(SLOT);
    let width = slot * 0.8 / arms.len().max(1) as f64;
    for (i, name) in names.iter().enumerate() {
        for (k, arm) in arms.iter().enumerate() {
            let Some(v) = value(i, k) else { continue };
            let (x, y) = (LEFT + slot * (i as f64 + 0.1) + width * k as f64, plot.y(v));
            let height = plot.bottom - y;
            let _ = write!(
                plot.out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{}\">\
                 <title>{}, {}: {v:.1}</title></rect>",
                colour(arms, arm),
                escape(arm),
                escape(name)
            );
            // A label wider than its bar would run into the next one.
            if width >= 24.0 {
                plot.text(x + width / 2.0, y - 4.0, &format!("{v:.digits$}"));
            }
        }
        // Every second one a line lower, where names are longer than their slots.
        let low = if i % 2 == 1 && slot < 90.0 { 14.0 } else { 0.0 };
        plot.text(LEFT + slot * (i as f64 + 0.5), plot.bottom + 16.0 + low, name);
    }
}

fn cache_shares(runs: &[Drawn], arms: &[&str]) -> Option<String> {
    let mut classes: Vec<Class> = runs.iter().flat_map(|r| r.classes.keys().copied()).collect();
    classes.sort_unstable();
    classes.dedup();
    if classes.is_empty() {
        return None;
    }
    let names: Vec<String> = classes.iter().map(|c| c.name().to_owned()).collect();
    let title = "Prompt tokens from cache by kind of turn, percent";
    let mut plot = Plot::open(title, 220.0, (1.0, 100.0), "", arms);
    let share = |i: usize, k: usize| {
        let own = runs.iter().filter(|r| r.arm == arms[k]).filter_map(|r| r.classes.get(&classes[i]));
        let (cached, prompt) =
            own.fold((0.0, 0.0), |(c, p), (cached, prompt)| (c + *cached as f64, p + *prompt as f64));
        (prompt > 0.0).then(|| 100.0 * cached / prompt)
    };
    groups(&mut plot, &names, arms, 0, &share);
    Some(plot.close())
}

/// Tokens a second over all streams, by how many requests were in flight.
fn rates(runs: &[Drawn], arms: &[&str]) -> Option<String> {
    let by_arm: Vec<BTreeMap<usize, f64>> = arms.iter().map(|arm| by_flight(runs, arm)).collect();
    let most = by_arm.iter().flat_map(BTreeMap::keys).copied().max()?;
    let fastest = by_arm.iter().flat_map(BTreeMap::values).copied().fold(0.0, f64::max);
    let names: Vec<String> =
        (1..=most).map(|n| format!("{n} request{}", if n == 1 { "" } else { "s" })).collect();
    let title = "Output by requests in flight, tokens a second";
    // Room above the highest bar for its label.
    let mut plot = Plot::open(title, 220.0, (1.0, fastest * 1.05), "", arms);
    groups(&mut plot, &names, arms, usize::from(fastest < 100.0), &|i, k| by_arm[k].get(&(i + 1)).copied());
    Some(plot.close())
}

/// Time is cut at every start and end of a stream; within a piece each stream gives its mean rate.
fn by_flight(runs: &[Drawn], arm: &str) -> BTreeMap<usize, f64> {
    let mut sums: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
    for run in runs.iter().filter(|r| r.arm == arm) {
        let stream = |r: &Request| {
            let first = r.first.filter(|first| r.done > *first)?;
            Some((first, r.done, r.tokens.saturating_sub(1) as f64 / (r.done - first)))
        };
        let streams: Vec<(f64, f64, f64)> = run.requests.iter().filter_map(stream).collect();
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
fn timeline(run: &Drawn, colour: &str) -> Option<String> {
    let mut actors: Vec<&str> = run.requests.iter().map(|r| r.actor.as_str()).collect();
    actors.sort_unstable();
    actors.dedup();
    let end = nice(run.requests.iter().map(|r| r.done).reduce(f64::max)?);
    let x = |t: f64| LEFT + AREA * (t / end).clamp(0.0, 1.0);
    let bottom = TOP + 18.0 * actors.len() as f64;
    let mut out = open(&format!("Timeline: {}, seed {}", run.arm, run.seed), bottom + 28.0);
    for (i, actor) in actors.iter().enumerate() {
        let y = TOP + 18.0 * i as f64;
        let _ = write!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y + 12.0,
            escape(actor)
        );
        for r in run.requests.iter().filter(|r| r.actor == *actor) {
            let first = r.first.unwrap_or(r.done);
            let fill = if r.failed { "#b00020" } else { colour };
            let title = format!(
                "{} {}: {:.2} s to the first token, {:.2} s in all",
                r.tag,
                r.class.name(),
                first - r.sent,
                r.done - r.sent
            );
            for (a, b, opacity) in [(r.sent, first, 0.35), (first, r.done, 0.95)] {
                let _ = write!(
                    out,
                    "<rect x=\"{:.1}\" y=\"{y}\" width=\"{:.1}\" height=\"14\" fill=\"{fill}\" fill-opacity=\"{opacity}\">\
                     <title>{}</title></rect>",
                    x(a),
                    (x(b) - x(a)).max(0.5),
                    escape(&title)
                );
            }
        }
    }
    for i in 0..=4 {
        let t = end * f64::from(i) / 4.0;
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"{}\">{} s</text>",
            x(t),
            bottom + 18.0,
            if i == 4 { "end" } else { "middle" },
            trimmed(t, 2)
        );
    }
    out.push_str("</svg>");
    Some(out)
}
