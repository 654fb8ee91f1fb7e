"""Random chains of samplers and, by chi-square, how well their draws fit the exact distribution.

`python -m tests.runtime.random_chains` draws 20,480 times from each of 200, by both kernels; the tests fewer.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

from penstock.config.samplers import BY_NAME
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.kernels.cpu import native
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.kernels.sampling import SamplingKernel
from penstock.runtime.sampler import Draw, Sampler
from tests.runtime.exact_samplers import Weights, exact

VOCAB, CHAINS, LEAST = 24, 200, 1e-4
ENDS = ("adaptive_p", "mirostat")
FILTERS = (
    *("top_n_sigma", "top_k", "top_a", "typical_p", "tfs", "top_p", "epsilon_cutoff", "eta_cutoff", "min_p", "xtc"),
    "adaptive_p",
)
"""What Mirostat stands in the place of."""
Dice = random.Random
DRAWN: dict[str, Callable[[Dice], dict[str, Any]]] = {
    "penalties": lambda r: {
        "repetition_penalty": r.uniform(0.8, 1.6), "presence_penalty": r.uniform(-0.5, 1),
        "frequency_penalty": r.uniform(-0.2, 0.5), "repeat_last_n": r.choice((-1, 3, 8)),
        "repetition_decay": r.choice((0, 0, 4)),
    },
    "no_repeat_ngram": lambda r: {"no_repeat_ngram_size": r.choice((1, 2, 3))},
    "dry": lambda r: {
        "dry_multiplier": r.uniform(0.2, 1.5), "dry_base": r.uniform(1.1, 2), "dry_allowed_length": r.choice((1, 2, 3)),
    },
    "watermark": lambda r: {
        "watermark": True, "watermark_gamma": r.uniform(0.2, 0.7), "watermark_delta": r.uniform(0.3, 2),
        "watermark_key": r.randrange(1000),
    },
    "top_n_sigma": lambda r: {"top_n_sigma": r.uniform(0.7, 2.5)},
    "temperature": lambda r: {
        "temperature": r.uniform(0.5, 1.8),
        "dynatemp_range": r.choice((0.0, 0.0, 0.6)), "dynatemp_exponent": r.uniform(0.5, 2),
    },
    "smoothing": lambda r: {"smoothing_factor": r.uniform(0.1, 0.8), "smoothing_curve": r.choice((1.0, 1.7, 2.5))},
    "top_k": lambda r: {"top_k": r.randrange(2, VOCAB)},
    "top_a": lambda r: {"top_a": r.uniform(0.05, 0.6)},
    "typical_p": lambda r: {"typical_p": r.uniform(0.5, 0.98)},
    "tfs": lambda r: {"tfs": r.uniform(0.5, 0.99)},
    "top_p": lambda r: {"top_p": r.uniform(0.4, 0.99)},
    "epsilon_cutoff": lambda r: {"epsilon_cutoff": r.uniform(20, 800)},
    "eta_cutoff": lambda r: {"eta_cutoff": r.uniform(20, 2000)},
    "min_p": lambda r: {"min_p": r.uniform(0.01, 0.3)},
    "xtc": lambda r: {"xtc_probability": r.choice((1.0, 0.5, 0.3)), "xtc_threshold": r.uniform(0.03, 0.2)},
    "adaptive_p": lambda r: {"adaptive_target": r.uniform(0.05, 0.4)},
    "mirostat": lambda r: {"mirostat": r.choice((1, 2)), "mirostat_tau": r.uniform(0.7, 2.0)},
}  # fmt: skip


def drawn(number: int) -> tuple[tuple[str, ...], dict[str, Any], Weights, list[int], list[int]]:
    """Chain `number`: its samplers in the order in which they run, all parameters, logits, prompt and answer so far.

    The first are each sampler alone.
    """
    dice = random.Random(f"chain {number}")
    logits = np.array([dice.gauss(0, 1.6) for _ in range(VOCAB)], np.float32)
    prompt, output = ([dice.randrange(6) for _ in range(dice.randrange(2, 12))] for _ in range(2))
    if number < len(DRAWN):
        named = [list(DRAWN)[number]]
    else:
        named = dice.sample(list(DRAWN), dice.randrange(2, 9))
        if set(ENDS) <= set(named):
            named.remove(dice.choice(ENDS))
    options = {name: value for one in named for name, value in DRAWN[one](dice).items()}
    options |= {"dry_sequence_breakers": ()}
    runs = named
    if dice.random() < 0.2:  # in the usual order, which is nowhere said
        runs = sorted(named, key=list(BY_NAME).index)
    else:
        options["samplers"] = tuple(named)
    if "mirostat" in named:
        runs = [name for name in runs if name not in FILTERS]
        if "penalties" in runs:
            runs = ["penalties", *(name for name in runs if name != "penalties")]
    runs = sorted(runs, key=lambda name: name in ENDS)
    return tuple(runs), options, dict(enumerate(logits.tolist())), prompt, output


def p_value(number: int, kernel: SamplingKernel, rows: int, calls: int) -> float:
    """Of the draws of a chain, whose tokens are all possible ones and no other."""
    chain, options, z, prompt, output = drawn(number)
    expected = exact(chain, options, z, prompt, output)
    sampler = Sampler(VOCAB, rows, kernel)
    params = SamplingParams(**options)
    logits = np.tile(np.array(list(z.values()), np.float32), (rows, 1))
    counts: Counter[int] = Counter()
    for call in range(calls):
        for row in range(rows):
            new = NewSequence(row, "r", row, tuple(prompt), tuple(output), 0, (), params, seed=number)
            sampler.add_row(new)
        counts.update(one.tokens[0] for one in sampler.sample(logits, [Draw(row, 50 + call) for row in range(rows)]))
    total = counts.total()
    assert set(counts) <= {token for token, p in expected.items() if p > 0}, (number, chain)
    rare = [token for token, p in expected.items() if p * total < 8]  # too few for the test: together
    groups = [[token] for token in expected if token not in rare] + ([rare] if rare else [])
    seen = np.array([sum(counts[token] for token in group) for group in groups], float)
    wanted = np.array([sum(expected[token] for token in group) * total for group in groups])
    if rare and wanted[-1] < 8 and len(groups) > 1:
        seen[-2:], wanted[-2:] = (seen[-2:].sum(), 0), (wanted[-2:].sum(), 1)
        seen, wanted = seen[:-1], wanted[:-1]
    return 1.0 if len(wanted) == 1 else float(stats.chisquare(seen, wanted / wanted.sum() * total).pvalue)


def main() -> int:
    """The long version: 200 chains and so many draws of each that small differences show."""
    failed = 0
    for name, kernel, calls in (("native", native.NativeSampling(), 40), ("reference", ReferenceSampling(), 4)):
        found = [p_value(number, kernel, 512, calls) for number in range(CHAINS)]
        worst = min(range(CHAINS), key=found.__getitem__)
        uniform = stats.kstest([p for p in found if p < 1.0], "uniform").pvalue
        print(f"{name}: {CHAINS} chains, {512 * calls} draws each; least p {found[worst]:.3g} (chain {worst}, allowed")
        print(f"{LEAST / (2 * CHAINS):.3g}), all p-values against the uniform distribution {uniform:.3g}", flush=True)
        failed += found[worst] <= LEAST / (2 * CHAINS) or uniform <= LEAST
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
