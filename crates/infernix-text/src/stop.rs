//! Stop strings over a stream of text.

/// Finds the first of several stop strings in streamed text, holding back only what may still become
/// one. Texts never leave in part of a match and are never lost: what [`push`](Self::push) and
/// [`finish`](Self::finish) return is the stream up to the match, or all of it.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    held: String,
    matched: Option<usize>,
}

#[derive(Debug, Clone)]
struct Stop {
    /// Index in the caller's list.
    index: usize,
    text: Box<[u8]>,
    /// For each length of a partial match, the longest shorter one that is also its end.
    fallback: Box<[u32]>,
    /// Bytes of `text` that the stream ends with.
    state: usize,
}

impl StopMatcher {
    /// A matcher for `stops`; empty strings never match and keep their index.
    #[must_use]
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Self {
        Self {
            stops: stops
                .iter()
                .enumerate()
                .filter(|(_, s)| !s.as_ref().is_empty())
                .map(|(index, s)| Stop::new(index, s.as_ref()))
                .collect(),
            held: String::new(),
            matched: None,
        }
    }

    /// Takes text in, returns what can leave. After a match everything further is dropped.
    ///
    /// The match that completes first wins; of those that complete together the longest, which begins
    /// first. Text before it is returned.
    pub fn push(&mut self, text: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        if self.stops.is_empty() {
            return text.to_owned();
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            let mut won: Option<(usize, usize)> = None;
            for stop in &mut self.stops {
                if stop.step(byte) && won.is_none_or(|(len, _)| len < stop.text.len()) {
                    won = Some((stop.text.len(), stop.index));
                }
            }
            if let Some((len, index)) = won {
                self.matched = Some(index);
                let mut out = std::mem::take(&mut self.held);
                out.truncate(before + at + 1 - len);
                return out;
            }
        }
        let keep = self.stops.iter().map(|s| s.state).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// Index of the stop string that was found.
    #[must_use]
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }

    /// Ends the stream: returns what was held back.
    pub fn finish(&mut self) -> String {
        for stop in &mut self.stops {
            stop.state = 0;
        }
        std::mem::take(&mut self.held)
    }
}

impl Stop {
    fn new(index: usize, text: &str) -> Self {
        let text = text.as_bytes();
        let mut fallback = vec![0u32; text.len() + 1];
        let mut len = 0;
        for at in 1..text.len() {
            while len > 0 && text[at] != text[len] {
                len = fallback[len] as usize;
            }
            if text[at] == text[len] {
                len += 1;
            }
            fallback[at + 1] = len as u32;
        }
        Self { index, text: text.into(), fallback: fallback.into(), state: 0 }
    }

    /// Whether `byte` completes the string.
    fn step(&mut self, byte: u8) -> bool {
        while self.state > 0 && self.text[self.state] != byte {
            self.state = self.fallback[self.state] as usize;
        }
        if self.text[self.state] == byte {
            self.state += 1;
        }
        if self.state == self.text.len() {
            self.state = self.fallback[self.state] as usize;
            return true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition: the occurrence that ends first, the longest of those.
    fn reference(text: &str, stops: &[String]) -> (String, Option<usize>) {
        let mut best: Option<(usize, std::cmp::Reverse<usize>, usize)> = None;
        for (index, stop) in stops.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
            if let Some(start) = text.find(stop.as_str()) {
                let key = (start + stop.len(), std::cmp::Reverse(stop.len()), index);
                if best.is_none_or(|b| key < b) {
                    best = Some(key);
                }
            }
        }
        match best {
            Some((end, len, index)) => (text[..end - len.0].to_owned(), Some(index)),
            None => (text.to_owned(), None),
        }
    }

    proptest! {
        #[test]
        fn any_chunking_finds_what_the_whole_text_has(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
            cuts in prop::collection::vec(0usize..4, 0..40),
        ) {
            let expected = reference(&text, &stops);
            let mut matcher = StopMatcher::new(&stops);
            let mut out = String::new();
            let mut rest = text.as_str();
            for cut in cuts {
                let at = rest.char_indices().nth(cut).map_or(rest.len(), |(i, _)| i);
                out += &matcher.push(&rest[..at]);
                rest = &rest[at..];
            }
            out += &matcher.push(rest);
            out += &matcher.finish();
            prop_assert_eq!((out, matcher.matched()), expected);
        }
    }

    #[test]
    fn only_a_possible_beginning_is_held() {
        let mut m = StopMatcher::new(&["\n\nUser:"]);
        assert_eq!(m.push("Hello\n"), "Hello");
        assert_eq!(m.push("\nUs"), "");
        assert_eq!(m.push("ing it"), "\n\nUsing it");
        assert_eq!(m.push("\n\nUser: x"), "");
        assert_eq!(m.matched(), Some(0));
        assert_eq!(m.push("lost on purpose"), "");
        assert_eq!(m.finish(), "");
    }
}
