//! llama.cpp's printout of a comparison, label by label: what people paste and scripts grep.

use crate::stats::{Estimate, Stats};
use std::fmt;

/// Prints [`Stats`] the way `llama-perplexity --kl-divergence` does.
#[derive(Clone, Copy, Debug)]
pub struct Printout<'a>(pub &'a Stats);

impl fmt::Display for Printout<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0;
        let line = |f: &mut fmt::Formatter<'_>, label: &str, e: Estimate| {
            writeln!(f, "{label:<30}: {:>10.6} ± {:>10.6}", e.value, e.pm)
        };
        writeln!(f, "====== Perplexity statistics ======")?;
        line(f, "Mean PPL(Q)", s.ppl_test)?;
        line(f, "Mean PPL(base)", s.ppl_reference)?;
        writeln!(f, "Cor(ln(PPL(Q)), ln(PPL(base))): {:>6.2}%", 100.0 * s.correlation)?;
        line(f, "Mean ln(PPL(Q)/PPL(base))", s.ln_ratio)?;
        line(f, "Mean PPL(Q)/PPL(base)", s.ratio)?;
        line(f, "Mean PPL(Q)-PPL(base)", s.difference)?;
        writeln!(f, "\n====== KL divergence statistics ======")?;
        writeln!(f, "Mean    KLD: {:>10.6} ± {:>10.6}", s.kld.value, s.kld.pm)?;
        for (name, value) in &s.kld_percentiles {
            writeln!(f, "{:<7} KLD: {value:>10.6}", label(name))?;
        }
        writeln!(f, "\n====== Token probability statistics ======")?;
        writeln!(f, "Mean    Δp: {:>6.3} ± {:>5.3} %", 100.0 * s.p_diff.value, 100.0 * s.p_diff.pm)?;
        for (name, value) in &s.p_diff_percentiles {
            writeln!(f, "{:<7} Δp: {:>6.3}%", label(name), 100.0 * value)?;
        }
        writeln!(f, "RMS Δp    : {:>6.3} ± {:>5.3} %", 100.0 * s.p_diff_rms.value, 100.0 * s.p_diff_rms.pm)?;
        writeln!(f, "Same top p: {:>6.3} ± {:>5.3} %", 100.0 * s.same_top.value, 100.0 * s.same_top.pm)
    }
}

fn label(name: &str) -> String {
    match name {
        "max" => "Maximum".into(),
        "min" => "Minimum".into(),
        "50" => "Median".into(),
        other => match other.parse::<f64>() {
            Ok(p) => format!("{p:>4.1}%"),
            Err(_) => other.into(),
        },
    }
}
