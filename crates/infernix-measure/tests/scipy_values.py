"""Prints tests/scipy_values.json: what numpy and scipy make of the same data. Not run by the tests.

python -m venv v && v/bin/pip install numpy scipy && v/bin/python scipy_values.py > scipy_values.json
"""
import json
import numpy as np
import scipy
from scipy import stats

MASK = (1 << 64) - 1


def splitmix(seed):
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def draws(n, resamples, seed):
    """Index lists of the resamples that the Rust code draws."""
    random = splitmix(seed)
    return [[(next(random) * n) >> 64 for _ in range(n)] for _ in range(resamples)]


rng = np.random.default_rng(20261130)
before = np.round(rng.lognormal(3.0, 0.3, 12), 4)
after = np.round(before * rng.lognormal(0.08, 0.05, 12), 4)
values = np.round(rng.exponential(2.0, 37), 4)
quantiles = [0.0, 0.01, 0.1, 0.25, 0.5, 0.9, 0.99, 1.0]

logs = np.log(after / before)
log_means = np.array([np.mean(logs[i]) for i in draws(len(logs), 2000, 20261105)])
chunks = np.round(rng.normal(1.0, 0.2, 25), 4)
chunk_means = np.array([np.mean(chunks[i]) for i in draws(len(chunks), 2000, 20261105)])
other = np.round(chunks * rng.normal(1.1, 0.05, 25), 4)
chunk_ratios = np.array([np.mean(other[i]) / np.mean(chunks[i]) for i in draws(len(chunks), 2000, 20261105)])


def scipy_interval(data, statistic, paired=False):
    found = stats.bootstrap(data, statistic, n_resamples=200_000, method="percentile", paired=paired,
                            vectorized=False, rng=np.random.default_rng(1), batch=20_000)
    ci = found.confidence_interval
    return [float(ci.low), float(ci.high)], float(found.standard_error)


geometric, geometric_se = scipy_interval((before, after), lambda a, b: stats.gmean(b / a), paired=True)
mean, mean_se = scipy_interval((chunks,), np.mean)
print(json.dumps({
    "numpy": np.__version__,
    "scipy": scipy.__version__,
    "values": values.tolist(),
    "quantiles": quantiles,
    "percentiles": np.quantile(values, quantiles).tolist(),
    "mean": float(np.mean(values)),
    "std": float(np.std(values)),
    "sample_std": float(np.std(values, ddof=1)),
    "before": before.tolist(),
    "after": after.tolist(),
    "change": float(stats.gmean(after / before)),
    "change_interval_same_draws": np.exp(np.quantile(log_means, [0.025, 0.975])).tolist(),
    "change_interval_scipy": geometric,
    "change_se_scipy": geometric_se,
    "mean_relative_change_pct": float(np.mean(100 * (after / before - 1))),
    "chunks": chunks.tolist(),
    "other": other.tolist(),
    "chunk_mean_interval_same_draws": np.quantile(chunk_means, [0.025, 0.975]).tolist(),
    "chunk_mean_interval_scipy": mean,
    "chunk_mean_se_scipy": mean_se,
    "chunk_ratio_interval_same_draws": np.quantile(chunk_ratios, [0.025, 0.975]).tolist(),
}, indent=1))
