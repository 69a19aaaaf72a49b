"""Compute the figures of `medha_sim.lengths` from their sources, and the goodness of fit.

    python benchmarks/fit_lengths.py --data sharegpt_8k_filtered.csv

* ShareGPT-like lengths: the quantile functions of a public trace (project-etalon/etalon,
  `data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv`, columns `num_prefill_tokens` and
  `num_decode_tokens`) at the committed probabilities, linear in between. They reproduce the many tiny prompts and the
  cut at 8K. Families with one mode, fitted by maximum likelihood, do not: the best of Weibull, log-normal and
  Kumaraswamy has a Kolmogorov-Smirnov distance of 0.030.
* Medha-SWE-like lengths: the log-normal whose median and 90th percentile are the paper's *after* it is truncated to
  the paper's range of lengths. Only these two figures are published, so no goodness of fit can be stated.
"""

from __future__ import annotations

import hashlib
from math import exp, log
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from harness import exit_with, parser

PROBABILITIES = (0, .01, .025, .05, .1, .15, .2, .3, .4, .5, .6, .7, .8, .9, .95, .975, .99, 1)  # fmt: skip
SWE_TOKENS = (100_000, 1_000_000)
SWE_MEDIAN, SWE_P90 = 393_000, 839_000  # prompt, paper B §6.1
SWE_OUTPUT_MEDIAN, SWE_OUTPUT_P90 = 518, 808

_NORMAL = NormalDist()


def distance(sample: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> float:
    """Return the Kolmogorov-Smirnov distance between a sample and the quantile function through `values`."""
    at, counts = np.unique(sample, return_counts=True)
    fitted = np.interp(at + 0.5, values, PROBABILITIES)
    return float(np.max(np.abs(fitted - np.cumsum(counts) / len(sample))))


def truncated_quantile(mu: float, sigma: float, probability: float) -> float:
    """Return a quantile of the log-normal truncated to `SWE_TOKENS`."""
    low, high = (_NORMAL.cdf((log(tokens) - mu) / sigma) for tokens in SWE_TOKENS)
    return exp(mu + sigma * _NORMAL.inv_cdf(low + probability * (high - low)))


def location_with_median(sigma: float) -> float:
    """Return the mu with which the truncated log-normal has the paper's median, by bisection."""
    low, high = log(SWE_TOKENS[0]), log(SWE_TOKENS[1]) + 2 * sigma
    for _ in range(100):
        middle = (low + high) / 2
        if truncated_quantile(middle, sigma, 0.5) < SWE_MEDIAN:
            low = middle
        else:
            high = middle
    return low


def fit_swe() -> tuple[float, float]:
    """Return (mu, sigma), by bisection over sigma: the larger it is, the higher is the 90th percentile."""
    low, high = 0.3, 3.0
    for _ in range(60):
        middle = (low + high) / 2
        if truncated_quantile(location_with_median(middle), middle, 0.9) < SWE_P90:
            low = middle
        else:
            high = middle
    return location_with_median(low), low


def main() -> None:
    options = parser(__doc__, json=False)
    options.add_argument("--data", type=Path, required=True, metavar="FILE", help="the ShareGPT trace")
    data = options.parse_args().data
    table = np.genfromtxt(data, delimiter=",", names=True)
    print(f"# {data.name}: {len(table)} rows, sha256 {hashlib.sha256(data.read_bytes()).hexdigest()}")
    print(f"PROBABILITIES = {PROBABILITIES}")
    for column in ("num_prefill_tokens", "num_decode_tokens"):
        sample = table[column].astype(np.int64)
        values = np.quantile(sample, PROBABILITIES, method="inverted_cdf").astype(np.int64)
        print(f"{column} = {tuple(values.tolist())}  # distance {distance(sample, values):.4f}")
    logs = np.log(table["num_prefill_tokens"]), np.log(table["num_decode_tokens"])
    print(f"# correlation of the logarithms of prompt and output: {np.corrcoef(*logs)[0, 1]:.3f}")
    mu, sigma = fit_swe()
    p50, p90 = (truncated_quantile(mu, sigma, probability) for probability in (0.5, 0.9))
    print(f"SWE prompt: mu={mu:.4f} sigma={sigma:.4f}  # P50 {p50:.0f}, P90 {p90:.0f}")
    spread = log(SWE_OUTPUT_P90 / SWE_OUTPUT_MEDIAN) / _NORMAL.inv_cdf(0.9)
    print(f"SWE output: mu={log(SWE_OUTPUT_MEDIAN):.4f} sigma={spread:.4f}")


if __name__ == "__main__":
    exit_with(main)
