"""Empirical draws against exact distributions, worked out here from the definitions alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.kernels.cpu import native
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.runtime.sampler import Draw, Sampler

LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 0.25, 1.75, -2.0, 0.75, 1.25]
PROMPT, OUTPUT, STOPS = (0, 1, 1), (1, 2, 2, 2), (3, 8)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 4},
    "top_k_1": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "top_p_tiny": {"top_p": 0.01},
    "min_p": {"min_p": 0.3},
    "typical": {"typical_p": 0.6},
    "typical_narrow": {"typical_p": 0.2},
    "repetition": {"repetition_penalty": 1.7},
    "repetition_below_one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "presence_negative": {"presence_penalty": -1.0},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": ((5, 3.0), (0, -2.0), (9, 100.0), (9, -97.0))},
    "allowed": {"allowed_token_ids": (1, 4, 6, 11)},
    "bad_words": {"bad_words_ids": ((4,), (2, 2, 8), (1, 2, 10), (2, 11))},
    "min_tokens": {"min_tokens": 5},
    "min_tokens_reached": {"min_tokens": 4},
    "cold_nucleus": {"temperature": 0.6, "top_p": 0.8},
    "top_k_then_top_p": {"top_k": 6, "top_p": 0.8, "temperature": 1.4},
    "all_filters": {"top_k": 9, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.2},
    "all_penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2, "top_p": 0.9},
    "everything": {
        "temperature": 0.8, "top_k": 8, "typical_p": 0.95, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.3, "frequency_penalty": -0.1, "logit_bias": ((6, 3.5),), "min_tokens": 9,
        "bad_words_ids": ((0,),), "allowed_token_ids": (0, 1, 2, 3, 5, 6, 8, 10, 11),
    },
}  # fmt: skip


def normalised(weights: dict[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def shortest(order: list[int], p: dict[int, float], mass: float) -> dict[int, float]:
    kept: dict[int, float] = {}
    for token in order:
        kept[token] = p[token]
        if math.fsum(kept.values()) >= mass:
            break
    return normalised(kept)


def exact(s: SamplingParams) -> dict[int, float]:
    """Token → probability, by the definitions in SamplingParams' documentation."""
    z = dict(enumerate(LOGITS))
    for token, bias in s.logit_bias:
        z[token] += bias
    if s.allowed_token_ids is not None:
        z = {token: value for token, value in z.items() if token in s.allowed_token_ids}
    for *before, last in s.bad_words_ids:
        if tuple(before) == OUTPUT[len(OUTPUT) - len(before) :]:
            z.pop(last, None)
    if len(OUTPUT) < s.min_tokens:
        z = {token: value for token, value in z.items() if token not in STOPS}
    for token in z:
        if token in PROMPT + OUTPUT:
            z[token] = z[token] / s.repetition_penalty if z[token] > 0 else z[token] * s.repetition_penalty
        if token in OUTPUT:
            z[token] -= s.presence_penalty + s.frequency_penalty * OUTPUT.count(token)
    by_rank = sorted(z, key=lambda token: (-z[token], token))
    if s.top_k > 0:
        by_rank = by_rank[: s.top_k]
    p = normalised({token: math.exp(z[token] / s.temperature) for token in by_rank})
    if s.typical_p < 1.0:
        entropy = -math.fsum(x * math.log(x) for x in p.values())
        p = shortest(sorted(p, key=lambda token: abs(-math.log(p[token]) - entropy)), p, s.typical_p)
    if s.top_p < 1.0:
        p = shortest([token for token in by_rank if token in p], p, s.top_p)
    return normalised({token: x for token, x in p.items() if x >= s.min_p * max(p.values())})


def draw_many(sampler: Sampler, params: SamplingParams, calls: int, rows: int) -> Counter[int]:
    logits = torch.tensor(LOGITS).repeat(rows, 1)
    counts: Counter[int] = Counter()
    for call in range(calls):
        for row in range(rows):
            new = NewSequence(row, "r", row, PROMPT, OUTPUT, 0, (), params, stop_ids=STOPS, seed=1234)
            sampler.add_row(new)
        counts.update(
            sample.tokens[0] for sample in sampler.sample(logits, [Draw(row, 100 + call) for row in range(rows)])
        )
    return counts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", ["native", "reference"])
def test_draws_follow_the_exact_distribution(name: str, which: str) -> None:
    rows, calls = (512, 40) if which == "native" else (128, 20)
    params = SamplingParams(**CASES[name])
    sampler = Sampler(len(LOGITS), rows, ReferenceSampling() if which == "reference" else native.NativeSampling())
    counts = draw_many(sampler, params, calls, rows)
    expected = exact(params)
    total = rows * calls
    assert set(counts) <= set(expected)
    assert all(counts[token] > 0 for token, p in expected.items() if p * total > 25)
    if len(expected) > 1:
        order = sorted(expected)
        result = stats.chisquare([counts[t] for t in order], [expected[t] * total for t in order])
        assert result.pvalue > 1e-4 / (2 * len(CASES))


def test_cases_change_the_distribution() -> None:
    """Each parameter's case differs from the plain one, so that ignoring the parameter would be seen."""
    plain = exact(SamplingParams())
    for name, options in CASES.items():
        if name not in ("plain", "min_tokens_reached"):
            changed = exact(SamplingParams(**options))
            assert max(abs(changed.get(t, 0.0) - plain[t]) for t in plain) > 0.01, name


def test_grammar_mask_renormalises() -> None:
    sampler = Sampler(len(LOGITS), 512, native.NativeSampling())
    mask = np.full((512, 1), 0b110000000101, np.uint32)
    counts: Counter[int] = Counter()
    for row in range(512):
        sampler.add_row(NewSequence(row, "r", row, PROMPT, (), 0, (), SamplingParams(), seed=7))
    for call in range(20):
        draws = [Draw(row, call) for row in range(512)]
        counts.update(s.tokens[0] for s in sampler.sample(torch.tensor(LOGITS).repeat(512, 1), draws, mask))
    expected = normalised({token: math.exp(LOGITS[token]) for token in (0, 2, 10, 11)})
    assert set(counts) == set(expected)
    order = sorted(expected)
    assert stats.chisquare([counts[t] for t in order], [expected[t] * 10240 for t in order]).pvalue > 1e-4


def test_sequences_and_positions_are_independent() -> None:
    """Pairs of draws of neighbouring sequences, positions and seeds: the joint distribution is the product."""
    logits = torch.zeros(1, 4).repeat(1024, 1)
    sampler = Sampler(4, 1024, native.NativeSampling())
    tokens = {}
    for seed in (0, 1):
        for row in range(1024):
            sampler.add_row(NewSequence(row, "r", row, (0,), (), 0, (), SamplingParams(), seed=seed))
        for position in (0, 1):
            tokens[seed, position] = [
                s.tokens[0] for s in sampler.sample(logits, [Draw(row, position) for row in range(1024)])
            ]
    first = tokens[0, 0]
    for other in (tokens[0, 1], tokens[1, 0], first[1:] + first[:1]):
        table = np.zeros((4, 4))
        np.add.at(table, (first, other), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-4
