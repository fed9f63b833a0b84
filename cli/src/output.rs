//! Where text goes: results to stdout, everything else to stderr; and the few shapes that results have.

use crate::target::Target;
use infernix_measure::redact;
use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write as _};

/// Wrong usage that clap cannot see, such as two flags whose values contradict each other. Ends with exit code 2.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

pub(crate) fn usage(message: impl Into<String>) -> anyhow::Error {
    Usage(message.into()).into()
}

/// Writes text to stdout as it is. A reader that closes early, like `head`, ends the output, not the command: a
/// mismatch still ends with exit code 1.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// An error with its causes, each said once: most messages quote their cause already.
pub(crate) fn error_text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// `1 file`, `2 files`.
pub(crate) fn counted(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(n), if n == 1 { "" } else { "s" })
}

/// Writes one JSON document to stdout.
pub(crate) fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    Ok(print(&format!("{}\n", serde_json::to_string_pretty(value)?))?)
}

/// Writes a report to a file, replacing an older one only when the new one is whole, or into a stream.
pub(crate) fn write_report(path: &std::path::Path, text: &str) -> anyhow::Result<()> {
    use anyhow::Context as _;
    crate::target::write(path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    note(&format!("wrote {}", path.display()));
    Ok(())
}

/// Bytes of a number of MiB that a flag gives: up to 16 PiB, far more than any machine has, so that sums of a few stay in 64
/// bits.
pub(crate) fn mib(flag: &str, n: u64) -> anyhow::Result<u64> {
    const MOST: u64 = 1 << 34;
    if n > MOST {
        return Err(usage(format!("{flag} {n}: at most {MOST} MiB are possible")));
    }
    Ok(n << 20)
}

/// Refuses, before hours of work, files that could not be written at its end, or that would be written over each other.
pub(crate) fn check_places(files: &[&std::path::Path]) -> anyhow::Result<()> {
    for (i, path) in files.iter().enumerate() {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|p| !p.is_dir()) {
            return Err(usage(format!("{}: there is no folder {}", path.display(), folder.display())));
        }
        if path.is_dir() {
            return Err(usage(format!("{} is a folder", path.display())));
        }
        // A stream may be written to twice.
        let file = |p: &std::path::Path| Target::of(p).ok().filter(|t| matches!(t, Target::File(_)));
        if file(path).is_some() && files[..i].iter().any(|other| file(other) == file(path)) {
            return Err(usage(format!("two outputs are named {}", path.display())));
        }
    }
    Ok(())
}

/// Writes a line to stderr. A closed stderr is no reason to stop.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

pub(crate) fn warn(text: &str) {
    note(&format!("{} {text}", styled("warning:", "33")));
}

pub(crate) fn error(text: &str) {
    note(&format!("{} {text}", styled("error:", "31")));
}

/// ANSI style for stderr, if it is a terminal and `NO_COLOR` is unset. Colour never carries meaning alone.
pub(crate) fn styled(text: &str, code: &str) -> String {
    if io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

/// Columns of text, the first left-aligned and the others right-aligned unless marked.
pub(crate) struct Table {
    head: Vec<&'static str>,
    left: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A head cell that starts with `<` is left-aligned.
    pub(crate) fn new(head: &[&'static str]) -> Self {
        let left = head.iter().enumerate().map(|(i, h)| i == 0 || h.starts_with('<')).collect();
        let head = head.iter().map(|h| h.trim_start_matches('<')).collect();
        Self { head, left, rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |s: &str| s.chars().count();
        let widths: Vec<usize> = (0..self.head.len())
            .map(|c| {
                let cells = self.rows.iter().filter_map(|r| r.get(c)).map(|s| width(s));
                cells.chain([width(self.head[c])]).max().unwrap_or(0)
            })
            .collect();
        let line = |cells: &[String]| {
            let mut text = String::new();
            for (c, cell) in cells.iter().enumerate() {
                let pad = " ".repeat(widths[c].saturating_sub(width(cell)));
                let separator = if c == 0 { "" } else { "  " };
                let _ = if self.left[c] {
                    write!(text, "{separator}{cell}{pad}")
                } else {
                    write!(text, "{separator}{pad}{cell}")
                };
            }
            text.trim_end().to_owned()
        };
        let head: Vec<String> = self.head.iter().map(|&h| h.to_owned()).collect();
        if head.iter().any(|h| !h.is_empty()) {
            writeln!(f, "{}", line(&head))?;
        }
        for row in &self.rows {
            writeln!(f, "{}", line(row))?;
        }
        Ok(())
    }
}

/// An integer with thousands separators.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A byte count in the largest binary unit that keeps it above one.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

/// What was typed, without secrets and with the names of files instead of their places: where they lie on this machine is
/// nobody's business.
pub(crate) fn command_line() -> String {
    shown(std::env::args())
}

fn shown(arguments: impl Iterator<Item = String>) -> String {
    let quoted = |text: String| {
        let quote = if text.contains('\'') { '"' } else { '\'' };
        if text.contains(' ') { format!("{quote}{text}{quote}") } else { text }
    };
    // Secrets first: one with a slash in it is no path.
    let text = redact::command(&arguments.map(quoted).collect::<Vec<_>>().join(" "));
    text.split(' ').map(bare).collect::<Vec<_>>().join(" ")
}

/// A word whose path is cut to its last part; an address, and what stands before a path (`NAME=`, a quote), stay.
fn bare(word: &str) -> String {
    let (Some(first), Some(last)) = (word.find('/'), word.rfind('/')) else { return word.to_owned() };
    if word.contains("://") {
        return word.to_owned();
    }
    let head = word[..first].rfind(['=', '\'', '"']).map_or(0, |i| i + 1);
    format!("{}{}", &word[..head], &word[last + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_keep_names_and_addresses_and_lose_folders() {
        assert_eq!(bare("/a/b/c.gguf"), "c.gguf");
        assert_eq!(bare("./infernix"), "infernix");
        assert_eq!(bare("ours=/x/y"), "ours=y");
        assert_eq!(bare("'/x/y'"), "'y'");
        assert_eq!(bare("a=http://h:1/v1"), "a=http://h:1/v1");
        assert_eq!(bare("--scale"), "--scale");
    }

    #[test]
    fn a_command_line_keeps_no_secret_and_no_folder() {
        let typed =
            ["/bin/infernix", "replay", "--arms", "x=/opt/serve '/m/a b' --api-key a/b= --port {port}"];
        let text = shown(typed.iter().map(ToString::to_string));
        assert_eq!(text, "infernix replay --arms \"x=serve 'a b' --api-key *** --port {port}\"");
    }

    #[test]
    fn numbers_group_by_three() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(24_576), "24,576");
        assert_eq!(grouped(320_001_536), "320,001,536");
    }

    #[test]
    fn causes_that_a_message_quotes_are_not_repeated() {
        let quoted = anyhow::anyhow!("disk on fire").context("a.bin: cannot read: disk on fire");
        assert_eq!(error_text(&quoted), "a.bin: cannot read: disk on fire");
        let told = anyhow::anyhow!("disk on fire").context("a.bin cannot be read");
        assert_eq!(error_text(&told), "a.bin cannot be read: disk on fire");
    }

    #[test]
    fn bytes_keep_two_digits() {
        assert_eq!(bytes(4096), "4.00 KiB");
        assert_eq!(bytes(67_948_019_712), "63.28 GiB");
    }

    #[test]
    fn tables_align_by_column() {
        let mut t = Table::new(&["class", "count", "<format"]);
        t.row(["a".into(), "1".into(), "bf16".into()]);
        t.row(["long".into(), "1,000".into(), "q8".into()]);
        assert_eq!(t.to_string(), "class  count  format\na          1  bf16\nlong   1,000  q8\n");
    }
}
