//! Random identifiers in a text.

use super::words;

/// Names that programs put before a random part.
const NAMES: [&str; 11] =
    ["toolu", "call", "msg", "req", "resp", "chatcmpl", "run", "sess", "session", "trace", "tmp"];

/// Whether a random identifier stands at the given byte of a text.
pub(super) fn is_at(text: &str, at: usize) -> bool {
    words(text).any(|(start, word)| {
        // Runs of what identifiers consist of, from the widest to the plainest.
        let here = |keep: fn(char) -> bool, random: fn(&str) -> bool| {
            let pieces = word
                .split(move |c| !keep(c))
                .map(move |p| (start + p.as_ptr().addr() - word.as_ptr().addr(), p));
            pieces.into_iter().any(|(from, p)| (from..=from + p.len()).contains(&at) && random(p))
        };
        at >= start
            && at <= start + word.len()
            && (here(|c| c.is_ascii_alphanumeric() || "+/_-".contains(c), is_base64)
                || here(|c| c.is_ascii_alphanumeric() || c == '-', is_hex)
                || here(|c| c.is_ascii_alphanumeric() || "_.-".contains(c), is_named)
                || here(|c| c.is_ascii_alphanumeric() || c == '_', is_named)
                || here(|c| c.is_ascii_alphanumeric(), |p| is_ulid(p) || p.len() >= 10 && is_mixed(p)))
    })
}

/// Figures and letters.
fn count(piece: &str) -> (usize, usize) {
    let figures = piece.bytes().filter(u8::is_ascii_digit).count();
    (figures, piece.bytes().filter(u8::is_ascii_alphabetic).count())
}

/// 12 or more hexadecimal digits, hyphens aside, letters and figures mixed.
fn is_hex(piece: &str) -> bool {
    let (figures, letters) = count(piece);
    figures + letters >= 12
        && figures >= 2
        && letters >= 2
        && piece.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
}

/// 26 of Crockford's digits, of which the first has three bits.
fn is_ulid(piece: &str) -> bool {
    let (figures, letters) = count(piece);
    let digit = |b: u8| b.is_ascii_digit() || b.is_ascii_uppercase() && !b"ILOU".contains(&b);
    piece.len() == 26
        && figures >= 2
        && letters >= 2
        && piece.bytes().all(digit)
        && piece.as_bytes()[0] <= b'7'
}

/// 20 or more characters of base 64 that change their kind often.
fn is_base64(piece: &str) -> bool {
    let plain: String = piece.chars().filter(char::is_ascii_alphanumeric).collect();
    plain.len() >= 20 && count(&plain).0 >= 2 && is_mixed(&plain)
}

/// A known name and 6 or more letters and figures, mixed.
fn is_named(piece: &str) -> bool {
    NAMES.iter().any(|name| {
        let Some(rest) = piece.strip_prefix(name) else { return false };
        let rest = if *name == "tmp" { rest } else { rest.strip_prefix(['_', '-']).unwrap_or("") };
        let rest = rest.trim_start_matches(['_', '.', '-']);
        let (figures, letters) = count(rest);
        let plain = figures + letters == rest.bytes().filter(|b| *b != b'_').count();
        figures + letters >= 6 && figures >= 1 && letters >= 1 && plain && changes(rest) >= 3
    })
}

/// Places where small letters, capitals and figures take turns, but for the beginnings of Words.
fn changes(piece: &str) -> usize {
    let kind = |b: u8| match b {
        b'a'..=b'z' => 0,
        b'A'..=b'Z' => 1,
        _ => 2,
    };
    let pairs = piece.as_bytes().windows(2).map(|p| (kind(p[0]), kind(p[1])));
    pairs.filter(|(a, b)| a != b && (*a, *b) != (1, 0)).count()
}

/// Whether kinds change as often as chance has it: at 0.45 of the places in base 62 and 0.40 in base 36, against one in three
/// and less in names of words, fewer yet where there are figures.
fn is_mixed(piece: &str) -> bool {
    let tenths = if count(piece).0 >= 2 { 3 } else { 4 };
    changes(piece) * 10 >= tenths * (piece.len() - 1)
}
