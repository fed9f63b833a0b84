//! Client habits that break prefixes, recognised from the texts around a divergence.

/// Something a client does that makes the same prompt a new text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// A time or date near the start of the prompt.
    Clock,
    /// A per-request accounting header in front of everything.
    BillingHeader,
    /// The reasoning of an earlier answer was left out when it was sent back.
    StrippedReasoning,
    /// A random identifier that changes with every request.
    RandomId,
}

impl std::fmt::Display for Habit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Habit::Clock => "a clock or date in the prompt changes with every request",
            Habit::BillingHeader => "an accounting header at the start changes with every request",
            Habit::StrippedReasoning => "the reasoning of an earlier answer is not in the prompt any more",
            Habit::RandomId => "a random identifier in the prompt changes with every request",
        })
    }
}

impl Habit {
    /// One word.
    pub fn name(self) -> &'static str {
        match self {
            Habit::Clock => "clock",
            Habit::BillingHeader => "billing_header",
            Habit::StrippedReasoning => "stripped_reasoning",
            Habit::RandomId => "random_id",
        }
    }
}

/// The habit behind a divergence: `cached` and `prompt` are the texts around it, which begins at the given byte of each.
pub fn habit(cached: (&str, usize), prompt: (&str, usize)) -> Option<Habit> {
    let before = |(text, at): (&str, usize)| text.get(..at).unwrap_or(text).to_owned();
    let line = |(text, at): (&str, usize)| -> String {
        let start = text.get(..at).and_then(|t| t.rfind('\n')).map_or(0, |i| i + 1);
        let rest = text.get(start..).unwrap_or("");
        rest.lines().next().unwrap_or("").to_owned()
    };
    let (a, b) = (line(cached), line(prompt));
    if a.contains("billing-header") && b.contains("billing-header") {
        return Some(Habit::BillingHeader);
    }
    let thinks = |(text, at): (&str, usize)| {
        let near = text.get(at.saturating_sub(12)..).or_else(|| text.get(at..)).unwrap_or("");
        near.contains("<think>") || before((text, at)).trim_end().ends_with("<think>")
    };
    // The template writes an empty reasoning part, or none, where there was one.
    let after = prompt.0.get(prompt.1..).unwrap_or("").trim_start();
    if thinks(cached) && (!thinks(prompt) || after.starts_with("</think>")) {
        return Some(Habit::StrippedReasoning);
    }
    if is_time(&a) && is_time(&b) {
        return Some(Habit::Clock);
    }
    if has_id(&a) && has_id(&b) {
        return Some(Habit::RandomId);
    }
    None
}

/// Whether a line holds `12:34`, `2026-11-30`, `30/11/2026`, a month's name with a day, or seconds or milliseconds since 1970.
fn is_time(line: &str) -> bool {
    let bytes = line.as_bytes();
    let digit = |i: usize| bytes.get(i).is_some_and(u8::is_ascii_digit);
    let clock = |i: usize| digit(i) && bytes.get(i + 1) == Some(&b':') && digit(i + 2) && digit(i + 3);
    let date = |i: usize| {
        let separator = |j: usize| matches!(bytes.get(j), Some(b'-' | b'/' | b'.'));
        digit(i) && separator(i + 1) && digit(i + 2) && digit(i + 3) && separator(i + 4) && digit(i + 5)
    };
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May ",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let named = MONTHS.iter().any(|m| line.contains(m)) && line.bytes().any(|b| b.is_ascii_digit());
    // From 2001 to 2286 seconds have ten figures, milliseconds thirteen.
    let epoch = line.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| {
        matches!(word.len(), 10 | 13) && word.starts_with('1') && word.bytes().all(|b| b.is_ascii_digit())
    });
    named || epoch || (0..bytes.len()).any(|i| clock(i) || date(i))
}

/// Whether a line holds 12 or more hexadecimal digits, hyphens aside, letters and figures mixed.
fn has_id(line: &str) -> bool {
    line.split(|c: char| !c.is_ascii_hexdigit() && c != '-').any(|word| {
        let figures = word.bytes().filter(u8::is_ascii_digit).count();
        let letters = word.bytes().filter(u8::is_ascii_alphabetic).count();
        figures + letters >= 12 && figures >= 2 && letters >= 2
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cached: &str, prompt: &str) -> Option<Habit> {
        let at = cached.bytes().zip(prompt.bytes()).take_while(|(a, b)| a == b).count();
        habit((cached, at), (prompt, at))
    }

    #[test]
    fn known_habits_are_named() {
        let a = "x-anthropic-billing-header: cc_version=1; cch=00a1;\nYou are";
        assert_eq!(of(a, &a.replace("00a1", "ff02")), Some(Habit::BillingHeader));
        assert_eq!(of("Now it is 12:34:56.", "Now it is 12:35:01."), Some(Habit::Clock));
        assert_eq!(of("Date: 2026-11-30\n", "Date: 2026-12-01\n"), Some(Habit::Clock));
        assert_eq!(of("Today is May 3.", "Today is June 3."), Some(Habit::Clock));
        assert_eq!(of("ts 1796070001. Go", "ts 1796070002. Go"), Some(Habit::Clock));
        assert_eq!(
            of("assistant\n<think>\nLet me see.\n</think>\n\nYes", "assistant\nYes"),
            Some(Habit::StrippedReasoning)
        );
        assert_eq!(
            of("assistant\n<think>\nLet me\n</think>\n\nYes", "assistant\n<think>\n\n</think>\n\nYes"),
            Some(Habit::StrippedReasoning)
        );
        let a = "session 5f0e2b7a-11c4-4f6e-9b1e-000000000001";
        assert_eq!(of(a, &a.replace("5f0e", "77aa")), Some(Habit::RandomId));
    }

    #[test]
    fn ordinary_edits_are_no_habit() {
        assert_eq!(of("Write a poem about cats.", "Write a poem about dogs."), None);
        assert_eq!(of("", "Hello"), None);
        assert_eq!(habit(("äöü", 1), ("äöü", 99)), None, "odd offsets do not panic");
    }
}
