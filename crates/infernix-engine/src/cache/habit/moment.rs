//! Clocks and dates in a text.

use super::words;

/// What a word says of a time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// A moment by itself: a clock, a date, seconds since 1970.
    Whole,
    /// `9:05`, which may be a verse as well.
    Hour,
    Month,
    Weekday,
    /// A day of a month or a year.
    Number,
    /// AM, PM, a zone.
    Zone,
}

/// Whether a clock or date stands at the given byte of a text.
pub(super) fn is_at(text: &str, at: usize) -> bool {
    // Of words that follow each other on a line: where they begin and end, and what they are.
    let mut run: (usize, usize, Vec<Part>) = (0, 0, Vec::new());
    for (start, word) in words(text) {
        let Some(part) = part(word) else {
            run.2.clear();
            continue;
        };
        if run.2.is_empty() || text[run.1..start].contains('\n') {
            run = (start, start, Vec::new());
        }
        run.1 = start + word.len();
        run.2.push(part);
        // Longer runs are found as they grow.
        if (run.0..=run.1).contains(&at) && is_moment(&run.2) {
            return true;
        }
    }
    false
}

fn is_moment(parts: &[Part]) -> bool {
    let has = |part| parts.contains(&part);
    has(Part::Whole)
        || has(Part::Month) && (has(Part::Number) || has(Part::Hour))
        || has(Part::Hour) && has(Part::Zone)
}

fn part(word: &str) -> Option<Part> {
    let mut w = word.trim_matches(|c: char| !c.is_alphanumeric() && c != '+');
    if let Some((name, value)) = w.split_once(':')
        && !name.is_empty()
        && name.chars().all(char::is_alphabetic)
    {
        w = value;
    }
    if let Some(hour) = clock(w) {
        return Some(hour);
    }
    if is_date(w) || is_compact(w) || is_epoch(w) {
        return Some(Part::Whole);
    }
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
    let named = |names: &[&str]| w.is_ascii() && names.iter().any(|n| w == *n || w == &n[..3]);
    if named(&MONTHS) || w == "Sept" {
        return Some(Part::Month);
    }
    if named(&DAYS) {
        return Some(Part::Weekday);
    }
    if matches!(w, "AM" | "PM" | "am" | "pm" | "a.m" | "p.m" | "UTC" | "GMT" | "Z" | "CET" | "CEST") {
        return Some(Part::Zone);
    }
    let figures = w.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let ordinal = matches!(&w[figures.len()..], "" | "st" | "nd" | "rd" | "th");
    match figures.parse::<u32>() {
        Ok(1..=31) if ordinal => Some(Part::Number),
        Ok(1900..=2199) if figures.len() == w.len() => Some(Part::Number),
        _ => None,
    }
}

/// The figures that a text begins with, and the rest.
fn figures(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// `09:05`, `9:05`, `23:59:59.123Z`, `12:30pm`.
fn clock(w: &str) -> Option<Part> {
    let (hour, rest) = figures(w);
    let (minute, rest) = figures(rest.strip_prefix(':')?);
    let below = |text: &str, n: u32| text.parse::<u32>().is_ok_and(|v| v < n);
    if hour.len() > 2 || !below(hour, 24) || minute.len() != 2 || !below(minute, 60) {
        return None;
    }
    let (second, rest) = rest.strip_prefix(':').map_or(("", rest), figures);
    if !second.is_empty() && (second.len() != 2 || !below(second, 61)) {
        return None;
    }
    let rest = rest.strip_prefix(['.', ',']).map_or(rest, |r| figures(r).1);
    let offset =
        rest.strip_prefix(['+', '-']).is_some_and(|r| r.bytes().all(|b| b.is_ascii_digit() || b == b':'));
    let known = matches!(rest, "" | "Z" | "am" | "pm" | "AM" | "PM" | "a.m" | "p.m") || offset;
    let sure = hour.len() == 2 || !second.is_empty() || !rest.is_empty();
    known.then_some(if sure { Part::Whole } else { Part::Hour })
}

/// `2026-11-30`, also with a time after it, `30.11.2026`, `11/30/26`.
fn is_date(w: &str) -> bool {
    let (a, rest) = figures(w);
    let Some(separator) = rest.chars().next().filter(|c| matches!(c, '-' | '/' | '.')) else { return false };
    let (b, rest) = figures(&rest[1..]);
    let Some(rest) = rest.strip_prefix(separator) else { return false };
    let (c, rest) = figures(rest);
    let within = |text: &str, low: u32, high: u32| text.parse().is_ok_and(|v: u32| (low..=high).contains(&v));
    let year = |text: &str| text.len() == 4 && within(text, 1900, 2199);
    let (day, month) =
        (|t: &str| t.len() <= 2 && within(t, 1, 31), |t: &str| t.len() <= 2 && within(t, 1, 12));
    let both = day(a) && day(b) && (month(a) || month(b));
    let date = year(a) && month(b) && day(c) || both && (year(c) || separator == '/' && c.len() == 2);
    date && (rest.is_empty()
        || rest.starts_with(['T', 't', '_']) && rest[1..].starts_with(|c: char| c.is_ascii_digit()))
}

/// `20261130`, also with a time after it.
fn is_compact(w: &str) -> bool {
    let (date, rest) = figures(w);
    let within = |range: std::ops::Range<usize>, low: u32, high: u32| {
        date.get(range).and_then(|t| t.parse().ok()).is_some_and(|v: u32| (low..=high).contains(&v))
    };
    date.len() == 8
        && within(0..4, 1900, 2199)
        && within(4..6, 1, 12)
        && within(6..8, 1, 31)
        && (rest.is_empty()
            || rest.starts_with(['T', '_', '-']) && rest[1..].starts_with(|c: char| c.is_ascii_digit()))
}

/// Seconds since 1970 from 2014 to 2039, also their thousandths and smaller parts.
fn is_epoch(w: &str) -> bool {
    let (whole, rest) = figures(w);
    let second = whole.get(..10).and_then(|t| t.parse().ok());
    matches!(whole.len(), 10 | 13 | 16 | 19)
        && second.is_some_and(|s: u64| (1_400_000_000..2_200_000_000).contains(&s))
        && rest.strip_prefix('.').map_or(rest, |r| figures(r).1).is_empty()
}
