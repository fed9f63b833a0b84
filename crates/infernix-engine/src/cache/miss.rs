//! Why a prompt did not come from the cache, in words a user can act on.

/// What kept (more of) a prompt from being reused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Prompt tokens that a cached text has in common with the prompt.
    pub shared: usize,
    /// Prompt tokens reused. Less than `shared` where no snapshot of the state lies at the point of divergence.
    pub reused: usize,
    /// The cause.
    pub cause: MissCause,
    /// Ids of the nearest cached text around the divergence, and how many of them lie before it.
    pub cached: Excerpt,
    /// Ids of the prompt around the divergence.
    pub prompt: Excerpt,
}

/// Cause of a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissCause {
    /// Nothing cached begins like the prompt.
    Cold,
    /// A cached text begins like the prompt and then differs.
    Diverged,
    /// The text is known, or was, but no state was ever kept as deep as the text agrees.
    NoSnapshot,
    /// A state deeper in this text was kept once and dropped to make room.
    Evicted,
    /// The request asked for it (cache bypass, prompt log-probabilities).
    Bypassed,
}

/// Ids around a divergence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Excerpt {
    /// Ids.
    pub ids: Vec<u32>,
    /// How many of them come before the divergence.
    pub before: usize,
}

impl Excerpt {
    /// The texts before the divergence and from there on, given the bytes of a token. They begin, part and end at whole
    /// characters: tokens may part in the middle of one, which then belongs to what differs.
    pub fn texts<'a>(&self, bytes: impl Fn(u32) -> &'a [u8]) -> (String, String) {
        let mut all = Vec::new();
        let mut parting = 0;
        for (i, id) in self.ids.iter().enumerate() {
            if i == self.before {
                parting = all.len();
            }
            all.extend_from_slice(bytes(*id));
        }
        if self.before >= self.ids.len() {
            parting = all.len();
        }
        let inner = |b: &u8| b & 0xC0 == 0x80;
        let start = all[..parting].iter().take(3).take_while(|b| inner(b)).count();
        // The character that the parting would cut, by the bytes before it alone, so that both texts part alike.
        let back = 1 + all[start..parting].iter().rev().take(3).take_while(|b| inner(b)).count();
        let length = match parting.checked_sub(back).filter(|at| *at >= start).map(|at| all[at]) {
            Some(0xF0..=0xF4) => 4,
            Some(0xE0..=0xEF) => 3,
            Some(0xC2..=0xDF) => 2,
            _ => 0,
        };
        if length > back {
            parting -= back;
        }
        let end = match std::str::from_utf8(&all[parting..]) {
            Err(e) if e.error_len().is_none() => parting + e.valid_up_to(),
            _ => all.len(),
        };
        let text = |part: &[u8]| String::from_utf8_lossy(part).into_owned();
        (text(&all[start..parting]), text(&all[parting..end]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of single bytes, as byte-level vocabularies have them for rare characters.
    #[test]
    fn texts_that_part_inside_a_character_show_both_characters() {
        let every: Vec<u8> = (0..=255).collect();
        let texts = |text: &str, skip: usize, before: usize, cut: usize| {
            let ids = text.bytes().map(u32::from).collect::<Vec<_>>();
            let e = Excerpt { ids: ids[skip..ids.len() - cut].to_vec(), before };
            e.texts(|id| &every[id as usize..=id as usize])
        };
        let own = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        for (a, b) in [("😀", "😁"), ("ж", "з"), ("中", "丰")] {
            let shared = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
            for side in [a, b] {
                let text = format!("so {side}!");
                assert_eq!(texts(&text, 0, 3 + shared, 0), own("so ", &format!("{side}!")));
                // Cut at its beginning and at its end.
                assert_eq!(texts(&format!("{side}so {side}"), 1, side.len() + 2, 0), own("so ", side));
                assert_eq!(texts(&format!("so {side}{side}"), 0, 3, 1), own("so ", side));
            }
        }
        assert_eq!(texts("so 中 x", 0, 6, 0), own("so 中", " x"), "a whole one stays where it is");
        assert_eq!(texts("plain", 0, 2, 0), own("pl", "ain"));
        assert_eq!(texts("plain", 0, 9, 0), own("plain", ""));
        assert_eq!(texts("", 0, 0, 0), own("", ""));
    }
}
