//! Plots as SVG text: lines over a scale or over categories, and bars with whiskers.
//!
//! Colours are those of Okabe and Ito, told apart by people with any colour vision; lines differ in dashes too, so that
//! equal ones (prompt and decode of a backend that does not tell them apart) show both.

use std::fmt::Write as _;

pub(crate) const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
pub(crate) const LEFT: f64 = 76.0;
const RIGHT: f64 = 16.0;
pub(crate) const TOP: f64 = 34.0;
const BOTTOM: f64 = 48.0;
pub(crate) const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a"];
const DASHES: [&str; 4] = ["", "7 3", "2 3", "9 3 2 3"];
const STYLE: &str = "<style>.p{font:13px system-ui,sans-serif}.p text{fill:#222}.p .a{stroke:#888}.p .g{stroke:#ddd}\
@media(prefers-color-scheme:dark){.p text{fill:#ddd}.p .a{stroke:#888}.p .g{stroke:#444}}</style>";

/// One line of a plot.
pub(super) struct Line {
    /// Legend.
    pub name: String,
    /// Points, left to right.
    pub points: Vec<(f64, f64)>,
}

/// One bar.
pub(super) struct Bar {
    /// Its label.
    pub name: String,
    /// Its length.
    pub value: f64,
    /// Its whisker.
    pub interval: Option<[f64; 2]>,
}

/// Text made safe for XML and HTML.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // No other control character is legal in XML.
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// The start of a plot with its title above.
pub(crate) fn open(title: &str, height: f64) -> String {
    format!(
        "<svg class=\"p\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"{0}\">{STYLE}<text x=\"{1}\" y=\"18\" text-anchor=\"middle\" font-weight=\"600\">{0}</text>",
        escape(title),
        WIDTH / 2.0
    )
}

/// Steps of 1, 2 or 5 times a power of ten, about five of them.
fn step(range: f64) -> f64 {
    let rough = range / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough * 0.999).unwrap_or(rough)
}

fn number(v: f64) -> String {
    if v == 0.0 {
        "0".into()
    } else if v.abs() < 1e-3 || v.abs() >= 1e5 {
        format!("{v:.0e}")
    } else {
        trimmed(v, 6)
    }
}

/// A number with at most `decimals` digits behind the point, no zeros at their end.
pub(crate) fn trimmed(v: f64, decimals: usize) -> String {
    let text = format!("{v:.decimals$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A scale from values to pixels, with its ticks.
struct Scale {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

impl Scale {
    fn at(&self, v: f64) -> f64 {
        let t = if self.log {
            (v.max(self.low).log10() - self.low.log10()) / (self.high.log10() - self.low.log10())
        } else {
            (v - self.low) / (self.high - self.low)
        };
        self.from + t.clamp(0.0, 1.0) * (self.to - self.from)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let (a, b) = (self.low.log10().round() as i32, self.high.log10().round() as i32);
            return (a..=b).map(|e| 10f64.powi(e)).collect();
        }
        let s = step(self.high - self.low);
        let first = (self.low / s).ceil() as i64;
        (first..first + 12).map(|i| i as f64 * s).take_while(|v| *v <= self.high * (1.0 + 1e-9)).collect()
    }
}

fn legend(out: &mut String, names: &[&str], from: f64) -> f64 {
    for (i, name) in names.iter().enumerate() {
        let y = from + 18.0 * i as f64;
        let _ = write!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{0:.1}\" x2=\"{1}\" y2=\"{0:.1}\" stroke=\"{2}\" stroke-width=\"2\" \
             stroke-dasharray=\"{3}\"/><text x=\"{4}\" y=\"{5:.1}\">{6}</text>",
            y - 4.0,
            LEFT + 28.0,
            COLOURS[i % COLOURS.len()],
            DASHES[i % DASHES.len()],
            LEFT + 36.0,
            y,
            escape(name)
        );
    }
    from + 18.0 * names.len() as f64
}

/// Lines over a linear x; y linear from 0, or logarithmic. `categories`: labels of x = 0, 1, 2, ... instead of a scale.
pub(super) fn lines(
    title: &str,
    x_name: &str,
    y_name: &str,
    categories: &[String],
    log: bool,
    all: &[Line],
) -> String {
    let finite = |v: &f64| v.is_finite() && (!log || *v > 0.0);
    let xs: Vec<f64> =
        all.iter().flat_map(|l| l.points.iter().map(|p| p.0)).filter(|v| v.is_finite()).collect();
    let ys: Vec<f64> = all.iter().flat_map(|l| l.points.iter().map(|p| p.1)).filter(finite).collect();
    let max = |v: &[f64], or: f64| v.iter().copied().fold(f64::NEG_INFINITY, f64::max).max(or);
    let min = |v: &[f64], or: f64| v.iter().copied().fold(f64::INFINITY, f64::min).min(or);
    let x = if categories.is_empty() {
        let (a, b) = (min(&xs, f64::INFINITY), max(&xs, f64::NEG_INFINITY));
        let (a, b) = if a < b { (a, b) } else { (0.0, 1.0) };
        Scale { low: a, high: b, log: false, from: LEFT, to: WIDTH - RIGHT }
    } else {
        let last = (categories.len() - 1).max(1) as f64;
        Scale { low: 0.0, high: last, log: false, from: LEFT + 8.0, to: WIDTH - RIGHT - 8.0 }
    };
    let y = if log {
        let high = max(&ys, 1e-12);
        // Eight decades show all that matters; smaller values lie on the lower edge.
        let low = min(&ys, high).max(high * 1e-8);
        let (a, b) = (low.log10().floor(), high.log10().ceil());
        let b = if b > a { b } else { a + 1.0 };
        Scale { low: 10f64.powf(a), high: 10f64.powf(b), log, from: HEIGHT - BOTTOM, to: TOP }
    } else {
        let high = max(&ys, 0.0);
        let high = if high > 0.0 { high * 1.08 } else { 1.0 };
        Scale { low: 0.0, high, log, from: HEIGHT - BOTTOM, to: TOP }
    };
    let names: Vec<&str> = all.iter().map(|l| l.name.as_str()).collect();
    let mut out = open(title, HEIGHT + 8.0 + 18.0 * names.len() as f64);
    for t in y.ticks() {
        let at = y.at(t);
        let _ = write!(
            out,
            "<line class=\"g\" x1=\"{LEFT}\" x2=\"{0}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text x=\"{1}\" y=\"{2:.1}\" \
             text-anchor=\"end\">{3}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0,
            number(t)
        );
    }
    let tick = |out: &mut String, at: f64, label: &str| {
        let _ = write!(
            out,
            "<line class=\"a\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{0}\" y2=\"{1}\"/><text x=\"{at:.1}\" y=\"{2}\" \
             text-anchor=\"middle\">{3}</text>",
            HEIGHT - BOTTOM,
            HEIGHT - BOTTOM + 4.0,
            HEIGHT - BOTTOM + 17.0,
            escape(label)
        );
    };
    if categories.is_empty() {
        x.ticks().into_iter().for_each(|t| tick(&mut out, x.at(t), &number(t)));
    } else {
        categories.iter().enumerate().for_each(|(i, c)| tick(&mut out, x.at(i as f64), c));
    }
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let _ = write!(
        out,
        "<path class=\"a\" fill=\"none\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/><text x=\"{0}\" y=\"{1}\" \
         text-anchor=\"middle\">{2}</text><text transform=\"translate(14 {3}) rotate(-90)\" \
         text-anchor=\"middle\">{4}</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 12.0,
        escape(x_name),
        (TOP + bottom) / 2.0,
        escape(y_name)
    );
    for (i, line) in all.iter().enumerate() {
        let mut path = String::new();
        for (px, py) in line.points.iter().filter(|p| p.0.is_finite() && p.1.is_finite()) {
            let _ =
                write!(path, "{}{:.1} {:.1}", if path.is_empty() { "M" } else { "L" }, x.at(*px), y.at(*py));
        }
        let _ = write!(
            out,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{}\"/>",
            COLOURS[i % COLOURS.len()],
            DASHES[i % DASHES.len()]
        );
        // Few points are measurements to be seen, and one alone has no line.
        if line.points.len() <= 12 {
            for (px, py) in line.points.iter().filter(|p| p.0.is_finite() && p.1.is_finite()) {
                let _ = write!(
                    out,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{}\"><title>{}</title></circle>",
                    x.at(*px),
                    y.at(*py),
                    COLOURS[i % COLOURS.len()],
                    number(*py)
                );
            }
        }
    }
    legend(&mut out, &names, HEIGHT + 10.0);
    out.push_str("</svg>");
    out
}

/// Horizontal bars with whiskers and a line at 1.
pub(super) fn bars(title: &str, x_name: &str, all: &[Bar]) -> String {
    const ROW: f64 = 26.0;
    let left = 300.0;
    let bottom = TOP + ROW * all.len() as f64;
    let reach = |b: &Bar| b.interval.map_or(b.value, |i| i[1].max(b.value));
    let high = all.iter().map(reach).filter(|v| v.is_finite()).fold(1.2, f64::max) * 1.05;
    let x = Scale { low: 0.0, high, log: false, from: left, to: WIDTH - 56.0 };
    let mut out = open(title, bottom + BOTTOM);
    for t in x.ticks() {
        let at = x.at(t);
        let _ = write!(
            out,
            "<line class=\"g\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/><text x=\"{at:.1}\" \
             y=\"{0}\" text-anchor=\"middle\">{1}</text>",
            bottom + 17.0,
            number(t)
        );
    }
    for (i, bar) in all.iter().enumerate() {
        let y = TOP + ROW * i as f64 + 4.0;
        let middle = y + (ROW - 8.0) / 2.0;
        let end = if bar.value.is_finite() { x.at(bar.value) } else { left };
        let _ = write!(
            out,
            "<text x=\"{0}\" y=\"{1:.1}\" text-anchor=\"end\">{2}</text><rect x=\"{left}\" y=\"{y:.1}\" \
             width=\"{3:.1}\" height=\"{4}\" fill=\"{5}\"/>",
            left - 8.0,
            middle + 4.0,
            escape(&bar.name),
            end - left,
            ROW - 8.0,
            COLOURS[0]
        );
        let mut text_at = end;
        if let Some([a, b]) = bar.interval.filter(|i| i.iter().all(|v| v.is_finite())) {
            let (a, b) = (x.at(a), x.at(b));
            text_at = text_at.max(b);
            let (low, high) = (middle - 4.0, middle + 4.0);
            let _ = write!(
                out,
                "<path d=\"M{a:.1} {low:.1}V{high:.1}M{b:.1} {low:.1}V{high:.1}M{a:.1} {middle:.1}H{b:.1}\" \
                 stroke=\"{}\" stroke-width=\"2\" fill=\"none\"/>",
                COLOURS[1]
            );
        }
        let _ = write!(
            out,
            "<text x=\"{0:.1}\" y=\"{1:.1}\">{2:.2}</text>",
            text_at + 6.0,
            middle + 4.0,
            bar.value
        );
    }
    let one = x.at(1.0);
    let _ = write!(
        out,
        "<path class=\"a\" d=\"M{one:.1} {TOP}V{bottom}\" stroke-dasharray=\"4 3\" stroke-width=\"1.5\"/><text x=\"{0}\" \
         y=\"{1}\" text-anchor=\"middle\">{2}</text></svg>",
        (left + WIDTH - 56.0) / 2.0,
        bottom + 38.0,
        escape(x_name)
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn well_formed(svg: &str) {
        // Every tag closed, in order; attributes quoted.
        let mut open = Vec::new();
        let mut rest = svg;
        while let Some(at) = rest.find('<') {
            let end = at + rest[at..].find('>').expect("a tag ends");
            let tag = &rest[at + 1..end];
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(tag.split_whitespace().next().expect("a name"));
            }
            rest = &rest[end + 1..];
        }
        assert!(open.is_empty(), "{open:?}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn plots_are_well_formed_whatever_they_show() {
        let line = |name: &str, ys: &[f64]| Line {
            name: name.into(),
            points: ys.iter().enumerate().map(|(i, y)| (i as f64, *y)).collect(),
        };
        let hostile = "</svg><script>alert('x')</script>\u{1b}";
        for log in [false, true] {
            for ys in [&[][..], &[0.0, 0.0], &[1e-9, 3.0], &[f64::NAN, 1.0], &[f64::INFINITY, -1.0], &[2.0]] {
                let svg = lines(hostile, "x", "y", &[], log, &[line(hostile, ys), line("b", &[0.1, 0.2])]);
                well_formed(&svg);
                assert!(!svg.contains("<script"));
                let named = ["a".to_owned(), "b".to_owned()];
                well_formed(&lines("t", "x", "y", &named, log, &[line("a", ys)]));
            }
        }
        let bar = |value, interval| Bar { name: hostile.into(), value, interval };
        well_formed(&bars("t", "x", &[]));
        well_formed(&bars(
            "t",
            "x",
            &[bar(0.0, None), bar(14.2, Some([1.0, 20.0])), bar(1.0, Some([f64::NAN, 1.0]))],
        ));
    }

    #[test]
    fn ticks_are_round_numbers() {
        let scale = Scale { low: 0.0, high: 0.0123, log: false, from: 0.0, to: 1.0 };
        let labels: Vec<String> = scale.ticks().into_iter().map(number).collect();
        assert_eq!(labels, ["0", "0.005", "0.01"]);
        let log = Scale { low: 1e-6, high: 1e-2, log: true, from: 0.0, to: 4.0 };
        assert_eq!(log.ticks().len(), 5);
        assert!((log.at(1e-3) - 3.0).abs() < 1e-12 && log.at(0.0) == 0.0);
    }
}
