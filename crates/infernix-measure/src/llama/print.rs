//! llama.cpp's printout of a comparison, label by label: what people paste and scripts grep.

use crate::row::RowScore;
use crate::stats::{Estimate, Precision, Stats, Sums};
use std::fmt;

/// Rows below which llama.cpp prints its running table alone.
const MIN_ROWS: usize = 100;

/// The head of the running table.
const HEAD: &str = "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            \
                    Same top p";

/// Lines of llama.cpp's running table, one a chunk of `per_chunk` rows: each over all rows up to there.
pub fn running(rows: &[RowScore], per_chunk: usize) -> Vec<String> {
    let mut sums = Sums::new(Precision::Llama);
    let mut line = |(chunk, own): (usize, &[RowScore])| {
        own.iter().for_each(|r| sums.add(r));
        let s = sums.stats();
        // It has this one for few rows too.
        let (share, n) = (s.same_top.value, s.rows as f64);
        let same = (share * (1.0 - share) / (n - 1.0)).max(0.0).sqrt();
        let (rms, pm) = (100.0 * s.p_diff_rms.value, 100.0 * pm(s.p_diff_rms));
        format!(
            "{:>4}    {:>9.4} ± {:>9.4}    {:>10.5} ± {:>10.5}    {:>10.5} ± {:>10.5}    {rms:>6.3} ± {pm:>6.3} %    \
             {:>6.3} ± {:>6.3} %",
            chunk + 1,
            s.ppl_test.value,
            self::pm(s.ppl_test),
            s.ln_ratio.value,
            self::pm(s.ln_ratio),
            s.kld.value,
            self::pm(s.kld),
            100.0 * share,
            100.0 * same,
        )
    };
    rows.chunks(per_chunk.max(1)).enumerate().map(&mut line).collect()
}

/// Its ± of too few rows, or of equal models, is 0.
fn pm(e: Estimate) -> f64 {
    e.pm.unwrap_or(0.0)
}

/// Prints the running table and [`Stats`] the way `llama-perplexity --kl-divergence` does: of fewer than 100 rows the
/// table alone.
#[derive(Clone, Copy, Debug)]
pub struct Printout<'a> {
    /// What [`running`] gives.
    pub running: &'a [String],
    /// Statistics of all rows.
    pub stats: &'a Stats,
}

impl fmt::Display for Printout<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}")?;
        self.running.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        writeln!(f)?;
        let s = self.stats;
        if s.rows < MIN_ROWS {
            return Ok(());
        }
        let line = |f: &mut fmt::Formatter<'_>, label: &str, e: Estimate| {
            writeln!(f, "{label:<30}: {:>10.6} ± {:>10.6}", e.value, pm(e))
        };
        writeln!(f, "====== Perplexity statistics ======")?;
        line(f, "Mean PPL(Q)", s.ppl_test)?;
        line(f, "Mean PPL(base)", s.ppl_reference)?;
        let correlation = 100.0 * s.correlation.unwrap_or(0.0);
        writeln!(f, "Cor(ln(PPL(Q)), ln(PPL(base))): {correlation:>6.2}%")?;
        line(f, "Mean ln(PPL(Q)/PPL(base))", s.ln_ratio)?;
        line(f, "Mean PPL(Q)/PPL(base)", s.ratio)?;
        line(f, "Mean PPL(Q)-PPL(base)", s.difference)?;
        writeln!(f, "\n====== KL divergence statistics ======")?;
        writeln!(f, "Mean    KLD: {:>10.6} ± {:>10.6}", s.kld.value, pm(s.kld))?;
        for (name, value) in &s.kld_percentiles {
            writeln!(f, "{:<7} KLD: {value:>10.6}", label(name))?;
        }
        let percent = |e: Estimate| (100.0 * e.value, 100.0 * pm(e));
        writeln!(f, "\n====== Token probability statistics ======")?;
        let (value, error) = percent(s.p_diff);
        writeln!(f, "Mean    Δp: {value:>6.3} ± {error:>5.3} %")?;
        for (name, value) in &s.p_diff_percentiles {
            writeln!(f, "{:<7} Δp: {:>6.3}%", label(name), 100.0 * value)?;
        }
        let (value, error) = percent(s.p_diff_rms);
        writeln!(f, "RMS Δp    : {value:>6.3} ± {error:>5.3} %")?;
        let (value, error) = percent(s.same_top);
        writeln!(f, "Same top p: {value:>6.3} ± {error:>5.3} %")
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
