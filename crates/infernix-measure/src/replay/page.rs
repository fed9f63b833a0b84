//! One self-contained HTML page of a replay: the table and the plots, no script, readable in dark mode.

use super::plots::{drawn, plots};
use super::report::Report;
use crate::page::svg::escape;
use std::fmt::Write as _;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;background:#fff}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #ccc}\
th:first-child,td:first-child{text-align:left}svg{width:100%;height:auto}figure{margin:1rem 0}\
.invalid{color:#b00020;font-weight:600}.scroll{overflow-x:auto}@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#161616}th,td{border-color:#444}.invalid{color:#ff8a80}}";

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
    for (_, svg) in plots(&drawn(&report.to_json(), str::to_owned)) {
        let _ = write!(out, "<figure>{svg}</figure>");
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
            if !line.is_empty() && !line.starts_with("**Invalid") && !line.starts_with("Command: ") {
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
