"""What a draw from 152,000 tokens costs with each sampler alone, beside plain draws and those of the usual filters.

One row on one thread; the median of many draws, each at another position, in milliseconds. Samplers that look back have
a history of 4,096 tokens. Each is measured behind min_p too, as recipes have it, where it sees few tokens.
"""

from __future__ import annotations

import statistics
import time
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.report import arguments, report
from penstock.config.samplers import SAMPLERS
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.kernels.cpu import native
from penstock.runtime.row_settings import row_settings

VOCABULARY = 151_936
HISTORY = 4096
COLUMNS = ("request", "ms", "times a plain draw", "behind min_p 0.05 (ms)", "times min_p alone")
FIRST = "min_p"
REQUESTS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "plain": {},
        "top_k 40, top_p 0.95, min_p 0.05": {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
        "top_p 0.95": {"top_p": 0.95},
        "penalties": {"samplers": ("penalties",), "repetition_penalty": 1.1},
        "no_repeat_ngram": {"no_repeat_ngram_size": 3},
        "dry": {"dry_multiplier": 0.8},
        "watermark": {"watermark": True},
        "top_n_sigma": {"top_n_sigma": 1.0},
        "temperature": {"samplers": ("temperature",), "temperature": 0.7},
        "temperature, dynamic": {"dynatemp_range": 0.5},
        "smoothing": {"smoothing_factor": 0.3},
        "top_k": {"samplers": ("top_k",), "top_k": 40},
        "top_a": {"top_a": 0.2},
        "typical_p": {"samplers": ("typical_p",), "typical_p": 0.9},
        "tfs": {"tfs": 0.95},
        "top_p": {"samplers": ("top_p",), "top_p": 0.95},
        "epsilon_cutoff": {"epsilon_cutoff": 3},
        "eta_cutoff": {"eta_cutoff": 3},
        "min_p": {"samplers": ("min_p",), "min_p": 0.05},
        "xtc": {"xtc_probability": 1.0},
        "adaptive_p": {"adaptive_target": 0.3},
        "mirostat": {"mirostat": 1},
        "mirostat, version 2": {"mirostat": 2},
        "min_p, dry, xtc, temperature": {
            "samplers": ("min_p", "dry", "xtc", "temperature"), "min_p": 0.05, "dry_multiplier": 0.8,
            "xtc_probability": 0.5, "temperature": 0.8,
        },
    }
)  # fmt: skip


def behind(options: dict[str, Any]) -> dict[str, Any]:
    """The same samplers where min_p has run before them."""
    named = SamplingParams(**options).chain() or ()
    order = [FIRST, *(step.name for step in named if step.name != FIRST)]
    return {"min_p": 0.05, **options, "samplers": tuple(order)}


def milliseconds(options: dict[str, Any], draws: int) -> float:
    """The median time of a draw."""
    rng = np.random.default_rng(1)
    history = tuple(rng.integers(0, 500, HISTORY).tolist())
    kernel = native.NativeSampling()
    settings = row_settings(NewSequence(0, "r", 0, history, (), 0, (), SamplingParams(**options)), VOCABULARY)
    row = kernel.row(settings)
    logits = (rng.standard_normal((1, VOCABULARY)) * 2.5).astype(np.float32)
    times = []
    for position in range(draws):
        started = time.perf_counter()
        kernel.drawn(logits, [row], [position])
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--draws", type=int, default=60)
    options = parser.parse_args()
    native.set_num_threads(1)
    milliseconds({}, options.draws)
    measured = {name: milliseconds(given, options.draws) for name, given in REQUESTS.items()}
    assert {sampler.name for sampler in SAMPLERS} <= {name.split(",")[0] for name in REQUESTS}
    shared = {name: milliseconds(behind(given), options.draws) for name, given in REQUESTS.items() if "," not in name}
    table = [
        (
            name,
            ms,
            ms / measured["plain"],
            *((shared[name], shared[name] / shared[FIRST]) if name in shared else ("", "")),
        )
        for name, ms in measured.items()
    ]
    report("samplers", options.results, {"milliseconds": measured, "behind min_p": shared}, COLUMNS, table)


if __name__ == "__main__":
    main()
