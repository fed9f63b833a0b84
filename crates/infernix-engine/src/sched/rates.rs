//! Tokens a second over the last seconds.

use super::Rates;
use std::time::Duration;

/// Seconds that count.
const WINDOW: u64 = 10;

/// Counts by second.
#[derive(Clone, Debug, Default)]
pub(super) struct RateMeter {
    /// (second, prompt tokens, answer tokens), oldest first.
    seconds: std::collections::VecDeque<(u64, usize, usize)>,
}

impl RateMeter {
    pub(super) fn add(&mut self, now: Duration, prefill: usize, decode: usize) {
        let second = now.as_secs();
        match self.seconds.back_mut() {
            Some(last) if last.0 == second => {
                last.1 += prefill;
                last.2 += decode;
            }
            _ => self.seconds.push_back((second, prefill, decode)),
        }
        while self.seconds.front().is_some_and(|s| s.0 + WINDOW <= second) {
            self.seconds.pop_front();
        }
    }

    pub(super) fn rates(&self, now: Duration) -> Rates {
        let live = self.seconds.iter().filter(|s| s.0 + WINDOW > now.as_secs());
        let (mut prefill, mut decode) = (0, 0);
        live.for_each(|s| {
            prefill += s.1;
            decode += s.2;
        });
        let span = now.as_secs_f32().clamp(1.0, WINDOW as f32);
        Rates { prefill: prefill as f32 / span, decode: decode as f32 / span }
    }
}
