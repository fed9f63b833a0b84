//! Client habits that break prefixes, recognised from the texts around a divergence.

mod moment;
mod token;

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
    let line = |(text, at): (&str, usize)| -> String {
        let start = text.get(..at).and_then(|t| t.rfind('\n')).map_or(0, |i| i + 1);
        let rest = text.get(start..).unwrap_or("");
        rest.lines().next().unwrap_or("").to_owned()
    };
    if line(cached).contains("billing-header") && line(prompt).contains("billing-header") {
        return Some(Habit::BillingHeader);
    }
    if lost_reasoning(cached, prompt) {
        return Some(Habit::StrippedReasoning);
    }
    // Other tokens may have the same characters for a while yet.
    let (a, b) = (cached.0.get(cached.1..)?, prompt.0.get(prompt.1..)?);
    let same: usize = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    let sides = [(cached.0, cached.1 + same), (prompt.0, prompt.1 + same)];
    // What differs must be the clock itself, in both: a line may have one beside an edit.
    if sides.iter().all(|(text, at)| moment::is_at(text, *at)) {
        return Some(Habit::Clock);
    }
    sides.iter().all(|(text, at)| token::is_at(text, *at)).then_some(Habit::RandomId)
}

/// Whether the texts part in an answer of which only the cached text has the reasoning.
fn lost_reasoning(cached: (&str, usize), prompt: (&str, usize)) -> bool {
    let (Some(before), Some(now)) = (answer(cached), answer(prompt)) else { return false };
    let reasoning = |turn: &str| turn.strip_prefix("<think>")?.split("</think>").next().map(str::len);
    let empty = || now.strip_prefix("<think>").and_then(|t| t.trim_start().strip_prefix("</think>"));
    // The template writes an empty reasoning part, or none, where there was one. An empty one that nothing follows opens an
    // answer that is to have none.
    reasoning(before).is_some_and(|n| before["<think>".len()..][..n].trim() != "")
        && if now.starts_with("<think>") {
            empty().is_some_and(|after| !after.trim().is_empty())
        } else {
            !now.is_empty()
        }
}

/// The last turn begun before the parting, if it is an answer.
fn answer((text, at): (&str, usize)) -> Option<&str> {
    let start = text.get(..at)?.rfind(TURN)? + TURN.len();
    let turn = text[start..].split(TURN).next()?;
    Some(turn.strip_prefix("assistant")?.trim_start())
}

/// How a turn begins.
const TURN: &str = "<|im_start|>";

/// The words of a text and the bytes where they begin: what white space, quotes, brackets and separators leave.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let apart = |c: char| c.is_whitespace() || "\"'`()[]{}<>=,;|".contains(c);
    let place = move |word: &str| word.as_ptr().addr() - text.as_ptr().addr();
    text.split(apart).filter(|w| !w.is_empty()).map(move |w| (place(w), w))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(cached: &str, prompt: &str) -> Option<Habit> {
        let same = cached.chars().zip(prompt.chars()).take_while(|(a, b)| a == b);
        let at = same.map(|(c, _)| c.len_utf8()).sum();
        habit((cached, at), (prompt, at))
    }

    #[test]
    fn known_habits_are_named() {
        let a = "x-anthropic-billing-header: cc_version=1; cch=00a1;\nYou are";
        assert_eq!(of(a, &a.replace("00a1", "ff02")), Some(Habit::BillingHeader));
        for (a, b) in [
            ("<|im_start|>assistant\n<think>\nLet me see.\n</think>\n\nYes", "<|im_start|>assistant\nYes"),
            (
                "<|im_start|>assistant\n<think>\nLet me\n</think>\n\nYes",
                "<|im_start|>assistant\n<think>\n\n</think>\n\nYes",
            ),
            (
                "go<|im_end|>\n<|im_start|>assistant\n<think>\nLet me",
                "go<|im_end|>\n<|im_start|>assistant\nYes",
            ),
        ] {
            assert_eq!(of(a, b), Some(Habit::StrippedReasoning), "{a} against {b}");
        }
    }

    #[test]
    fn clocks_and_dates_are_recognised_in_every_common_form() {
        for (a, b) in [
            ("Now it is 12:34:56.", "Now it is 12:35:01."),
            ("Date: 2026-11-30\n", "Date: 2026-12-01\n"),
            ("Today is May 3.", "Today is June 3."),
            ("ts 1796070001. Go", "ts 1796070002. Go"),
            ("ms=1796070001123", "ms=1796070001989"),
            ("Today is Nov 30 2026.", "Today is Dec 1 2026."),
            ("Dec 1 2026", "Dec 2 2026"),
            ("Mon Nov 30", "Tue Dec 1"),
            ("Mon Nov 30 23:59:59 UTC 2026", "Tue Dec  1 00:00:00 UTC 2026"),
            ("Date: Mon, 30 Nov 2026 12:00:00 GMT", "Date: Tue, 01 Dec 2026 12:00:00 GMT"),
            ("Monday, November 30th, 2026", "Tuesday, December 1st, 2026"),
            (r#"{"now":"2026-11-30T23:59:59.123Z"}"#, r#"{"now":"2026-12-01T00:00:00.001Z"}"#),
            ("on 30.11.2026 at", "on 01.12.2026 at"),
            ("at 11/30/26, we", "at 12/01/26, we"),
            ("build 20261130T235959Z", "build 20261201T000000Z"),
            ("at 9:05 AM", "at 9:06 AM"),
            ("time:09:05", "time:09:06"),
        ] {
            assert_eq!(of(a, b), Some(Habit::Clock), "{a} against {b}");
        }
    }

    #[test]
    fn random_identifiers_are_recognised_in_every_common_form() {
        for (a, b) in [
            ("session 5f0e2b7a-11c4-4f6e-9b1e-000000000001", "session 77aa2b7a-11c4-4f6e-9b1e-000000000001"),
            ("id 01JDQ8ZK3M4N5P6R7S8T9VWXYZ.", "id 01JDQ8ZM77AN5P6R7S8T9VWQQA."),
            ("nonce: q83vEjRWeJq7zN3u/xIjRQ==", "nonce: f9XzWmK2b+L7sYqT4eRv1A=="),
            ("nonce=Zk3vEjRW_Jq7zN3u-xIjRQ", "nonce=a93vEjRWeJq7zX3u_xI8RQ"),
            ("toolu_01T1x1fJ34qAmk2tNTrN7Up6", "toolu_01A09q90qw90lq917835lq9A"),
            ("call_a8f3k2p1", "call_b8f3k2p1"),
            ("cd /tmp/tmp.aB3dE9xQ1z && ls", "cd /tmp/tmp.Zq8Wm2LsK0 && ls"),
            ("/tmp/tmpx8k2p9qa/out.txt", "/tmp/tmpb3_k29qz/out.txt"),
            ("commit 29f53759e154", "commit 77aa3759e154"),
        ] {
            assert_eq!(of(a, b), Some(Habit::RandomId), "{a} against {b}");
        }
    }

    /// Seen: a first answer that only counted, then an unrelated question, was blamed on reasoning left out.
    #[test]
    fn another_question_is_no_reasoning_left_out() {
        let cached = "<|im_start|>user\ncount 0<|im_end|>\n<|im_start|>assistant\n<think>\nLet me count.";
        let prompt = "<|im_start|>user\nWhat is rust?<|im_end|>\n<|im_start|>assistant\n<think>\n";
        assert_eq!(of(cached, prompt), None);
        assert_eq!(of(cached, &prompt.replace("<think>\n", "")), None);
        // The same question, asked with reasoning and then without.
        let opener = "<|im_start|>assistant\n<think>\n";
        assert_eq!(of(&format!("{opener}Let me"), &format!("{opener}\n</think>\n\n")), None);
        // Answers that part in their words.
        let answer = "<|im_start|>assistant\n<think>\nSo.\n</think>\n\nYes";
        assert_eq!(of(answer, &answer.replace("Yes", "No")), None);
        assert_eq!(of(answer, &answer.replace("So", "Well")), None);
    }

    #[test]
    fn ordinary_edits_are_no_habit() {
        for (a, b) in [
            ("Write a poem about cats.", "Write a poem about dogs."),
            ("", "Hello"),
            ("At 12:30 we saw a cat", "At 12:30 we saw a dog"),
            ("On Nov 30 2026 a cat came", "On Nov 30 2026 the dog came"),
            ("You may do 3 of them", "You may do 5 of them"),
            ("Come on Monday", "Come on Tuesday"),
            ("John 3:16 says", "John 3:17 says"),
            ("Mark went to Decatur 3 times", "Mark went to Janesville 3 times"),
            ("rust 1.22.3 is", "rust 1.23.0 is"),
            ("screens of 16:9 are", "screens of 16:10 are"),
            ("error at main.rs:12:34 again", "error at main.rs:13:35 again"),
            ("call getUserById(5)", "call getOrderByName(5)"),
            ("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"),
            ("read /usr/lib/x86_64-linux-gnu/a.so", "read /usr/lib/x86_64-linux-gnu/b.so"),
            ("/tmp/tmp.aB3dE9xQ1z/a.txt", "/tmp/tmp.aB3dE9xQ1z/b.txt"),
            ("internationalization", "internationalisation"),
            ("HELLO_WORLD_CONSTANT_NAME", "HELLO_WORLD_CONSTANT_VALUE"),
            ("phone 5551234567", "phone 5551234568"),
        ] {
            assert_eq!(of(a, b), None, "{a} against {b}");
        }
        assert_eq!(habit(("äöü", 1), ("äöü", 99)), None, "odd offsets do not panic");
        assert_eq!(habit(("äöü 2026-11-30", 1), ("äöü 2026-11-30", 1)), None);
    }
}
