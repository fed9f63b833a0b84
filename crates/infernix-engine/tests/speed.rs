//! Time of the lossless backend on 512-token chunks; run with `--ignored --nocapture`.

#![expect(clippy::print_stdout, reason = "figures and reasons of skipping for whoever runs it")]

mod common;

use common::*;
use infernix_engine::backend::lossless::LosslessOptions;
use infernix_engine::driver::{DriverOptions, Want};
use infernix_engine::numerics::round::Rounding;
use std::time::Instant;

#[test]
#[ignore = "a measurement"]
fn lossless_chunks() {
    for name in ["models/flash-demo-bf16", "models/dense-demo-bf16"] {
        let Some(path) = shared(name) else { return };
        for rounding in [Rounding::Nearest, Rounding::Stochastic(1)] {
            let (source, table) = plain_checkpoint(&path);
            let mut d = lossless(
                &source,
                table,
                LosslessOptions { rounding, ..Default::default() },
                DriverOptions::default(),
            );
            let ids: Vec<u32> = (0..512u32).map(|i| ((i * 2_654_435_761u32) >> 7) % 4000).collect();
            for _ in 0..3 {
                let mut s = d.open(0).unwrap();
                let t = Instant::now();
                d.prefill(&mut s, &ids, Want::All).unwrap();
                println!("{name} {rounding:?}: {:.3} s", t.elapsed().as_secs_f64());
                d.close(s);
            }
        }
    }
}
