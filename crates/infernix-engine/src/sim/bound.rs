//! The most that any prefix cache of a size could have given a trace.
//!
//! To save a request the first k blocks of its prompt, a cache must have kept each of them since the request before that passed
//! through it, and a state since the last of them was passed through. So a saving costs bytes times requests; a cache has
//! no more of those than its size times the length of the trace. The most tokens that this buys, taken in fractions where
//! it helps, is a bound for every policy, whatever it knows and wherever it takes snapshots (the relaxation of Berger,
//! Beckmann and Harchol-Balter, "Practical bounds on optimal caching with variable object sizes", 2018, for prefixes).

use super::{ReplayOptions, Trace};
use crate::cache::chains;
use crate::state::PAGE_TOKENS;
use std::collections::HashMap;

/// An upper bound of the prompt tokens that come from the cache, device and RAM together.
pub fn most_cached(trace: &Trace, options: &ReplayOptions) -> u64 {
    let m = &options.model;
    let size = m.pages as f64 * m.page_bytes as f64 + options.device_bytes as f64 + options.host_bytes as f64;
    let (page, state) = (m.page_bytes as f64, m.state_bytes as f64);
    let mut last: HashMap<u64, usize> = HashMap::new();
    // Savings by (bytes times requests, tokens), of falling worth within a request.
    let mut savings: Vec<(f64, f64)> = Vec::new();
    for (r, request) in trace.requests.iter().enumerate() {
        if request.bypass {
            continue;
        }
        let (mut own, mut waited): (Vec<(f64, f64)>, f64) = (Vec::new(), 0.0);
        let usable = if request.reread { 0 } else { request.prompt.len().saturating_sub(1) };
        // A salt's root is no block.
        for chain in chains(&request.salt, &request.prompt[..usable]).into_iter().skip(1) {
            let Some(since) = last.get(&chain).map(|t| (r - t) as f64) else { break };
            // A snapshot may stand up to 63 tokens past its block: the first block's saving has them for all.
            let tokens = if own.is_empty() { 2 * PAGE_TOKENS - 1 } else { PAGE_TOKENS } as f64;
            let mut step = (page * since + state * (since - waited).max(0.0), tokens);
            waited = waited.max(since);
            // Blocks come in order: one that is worth more than those before it is bought with them.
            while let Some(before) = own.last().filter(|b| b.1 * step.0 <= step.1 * b.0).copied() {
                step = (step.0 + before.0, step.1 + before.1);
                own.pop();
            }
            own.push(step);
        }
        savings.extend(own);
        let text = [&request.prompt[..], &request.output].concat();
        last.extend(chains(&request.salt, &text).into_iter().map(|c| (c, r)));
    }
    savings.sort_by(|a, b| (a.0 * b.1).total_cmp(&(b.0 * a.1)));
    let mut left = size * trace.requests.len() as f64;
    let mut tokens = 0.0;
    for (cost, gain) in savings {
        if cost > left {
            tokens += gain * left / cost;
            break;
        }
        left -= cost;
        tokens += gain;
    }
    tokens.ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{SimOptions, TraceRequest};

    fn options(pages: usize, host_bytes: u64) -> ReplayOptions {
        let model = SimOptions { pages, page_bytes: 10, state_bytes: 100, ..SimOptions::default() };
        ReplayOptions { model, prefill_chunk: 64, device_bytes: 0, host_bytes }
    }

    #[test]
    fn what_a_cache_can_give_is_bounded_by_its_bytes_over_time() {
        let text = |seed: u32| -> Vec<u32> { (0..129).map(|i| seed * 1000 + i).collect() };
        let request = |seed| TraceRequest { prompt: text(seed), ..TraceRequest::default() };
        // Two texts in turn: to serve one, 2 pages and a state must wait for 2 requests.
        let trace = Trace { requests: [1, 2, 1, 2, 1, 2].map(request).to_vec(), ..Trace::default() };
        let full = 4 * 191;
        assert_eq!(most_cached(&trace, &options(0, 10_000)), full);
        assert_eq!(most_cached(&trace, &options(0, 0)), 0);
        // Half of the 4 x 240 that all cost, over 6 requests.
        assert_eq!(most_cached(&trace, &options(0, 80)), full / 2);
        assert_eq!(most_cached(&trace, &options(8, 0)), full / 2);
        // Of other salts, or past the cache, nothing can be had.
        let changes: [fn(&mut TraceRequest, usize); 3] =
            [|r, i| r.salt = i.to_string(), |r, _| r.bypass = true, |r, _| r.reread = true];
        for change in changes {
            let mut apart = trace.clone();
            apart.requests.iter_mut().enumerate().for_each(|(i, r)| change(r, i));
            assert_eq!(most_cached(&apart, &options(0, 10_000)), 0);
        }
    }
}
