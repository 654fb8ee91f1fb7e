"""Chains of samplers against exact distributions, worked out here from the definitions alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.kernels.cpu import native
from penstock.kernels.reference.chain import is_green
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.runtime.sampler import Draw, Sampler
from tests.runtime.exact_samplers import (
    Weights,
    adapted,
    dynamic,
    eta,
    excluded,
    kept,
    smooth,
    softmax,
    surprising,
    tail_free,
    top_a,
    top_n_sigma,
    top_p,
    zipf,
)

LOGITS = (2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 0.25, 1.75, -2.0, 0.75, 1.25)
PROMPT, OUTPUT = (0, 1, 2, 8, 0, 3), (1, 4, 0, 1, 2)
Z: Weights = dict(enumerate(LOGITS))


def penalised_by(strength: dict[int, float], times: dict[int, float], rep: float, pres: float, freq: float) -> Weights:
    out = dict(Z)
    for t, part in strength.items():
        factor = 1 + (rep - 1) * part
        out[t] = out[t] / factor if out[t] > 0 else out[t] * factor
    for t, count in times.items():
        out[t] -= freq * count + pres * min(count, 1.0)
    return out


CASES: dict[str, tuple[dict[str, Any], Weights]] = {
    "top_n_sigma": ({"top_n_sigma": 1.0}, top_n_sigma(Z, 1.0)),
    "top_a": ({"top_a": 0.4}, top_a(Z, 0.4)),
    "tfs": ({"tfs": 0.6}, tail_free(Z, 0.6)),
    "tfs_almost_all": ({"tfs": 0.999999}, tail_free(Z, 0.999999)),
    "epsilon": ({"epsilon_cutoff": 500}, kept(Z, lambda t: softmax(Z)[t] >= 0.05)),
    "epsilon_above_all": ({"epsilon_cutoff": 9000}, {0: 2.0}),
    "eta": ({"eta_cutoff": 2000}, eta(Z, 0.2)),
    "dynatemp": ({"dynatemp_range": 0.7, "temperature": 0.9}, dynamic(Z, 0.2, 1.6, 1.0)),
    "dynatemp_below_zero": (
        {"dynatemp_range": 2.0, "temperature": 1.5, "dynatemp_exponent": 3.0},
        dynamic(Z, 0.0, 3.5, 3.0),
    ),
    "smoothing": ({"smoothing_factor": 0.4}, smooth(Z, 0.4, 1.0)),
    "smoothing_curve": ({"smoothing_factor": 0.2, "smoothing_curve": 2.5}, smooth(Z, 0.2, 2.5)),
    "xtc": ({"xtc_probability": 1.0, "xtc_threshold": 0.1}, excluded(Z, 0.1)),
    "xtc_of_one": ({"xtc_probability": 1.0, "xtc_threshold": 0.4}, Z),
    "xtc_protected": ({"xtc_probability": 1.0, "xtc_threshold": 0.1, "xtc_protected_ids": (8,)}, Z),
    "xtc_last_protected": (
        {"xtc_probability": 1.0, "xtc_threshold": 0.1, "xtc_protected_ids": (11,)},
        excluded(Z, 0.1),
    ),
    "adaptive_p": ({"adaptive_target": 0.15}, adapted(Z, 0.15)),
    "mirostat_1": ({"mirostat": 1, "mirostat_tau": 1.0}, zipf(Z, 2.0, len(LOGITS))),
    "mirostat_2": ({"mirostat": 2, "mirostat_tau": 1.6}, surprising(Z, 3.2)),
    "mirostat_2_tight": ({"mirostat": 2, "mirostat_tau": 0.1}, {0: 0.0}),
    "mirostat_without_filters": ({"mirostat": 2, "mirostat_tau": 1.6, "top_k": 1}, surprising(Z, 3.2)),
    "greedy_in_a_chain": ({"temperature": 0.0, "top_n_sigma": 2.0}, {0: 0.0}),
    "greedy_without_the_best": ({"temperature": 0.0, "samplers": ("xtc", "temperature"), "xtc_probability": 1.0,
                                 "xtc_threshold": 0.1}, {11: 0.0}),
    "temperature_first": ({"temperature": 2.0, "top_p": 0.6, "samplers": ("temperature", "top_p")},
                          top_p({t: v / 2 for t, v in Z.items()}, 0.6)),
    "temperature_last": ({"temperature": 2.0, "top_p": 0.6, "temperature_last": True},
                         {t: v / 2 for t, v in top_p(Z, 0.6).items()}),
    "what_is_not_named_does_not_run": ({"temperature": 2.0, "top_k": 4, "samplers": "k"},
                                       {t: v for t, v in Z.items() if t in (0, 8, 1, 11)}),
    "nothing_named": ({"temperature": 2.0, "samplers": ()}, Z),
    "one_gram": ({"no_repeat_ngram_size": 1}, kept(Z, lambda t: t not in {0, 1, 2, 3, 4, 8})),
    # ends with 0 1 2: "1 2" was followed by 8, "2" by 8
    "bigram": ({"no_repeat_ngram_size": 2}, kept(Z, lambda t: t != 8)),
    "trigram": ({"no_repeat_ngram_size": 3}, kept(Z, lambda t: t != 8)),
    "five_gram": ({"no_repeat_ngram_size": 5}, Z),
    "dry": ({"dry_multiplier": 0.7, "dry_base": 1.5}, {**Z, 8: Z[8] - 0.7 * 1.5}),
    "dry_allows_it": ({"dry_multiplier": 0.7, "dry_allowed_length": 4}, Z),
    "dry_broken": ({"dry_multiplier": 0.7, "dry_allowed_length": 1, "dry_breaker_ids": (0,)},
                   {**Z, 8: Z[8] - 0.7 * 1.75}),
    "dry_breakers_are_free": ({"dry_multiplier": 0.7, "dry_breaker_ids": (8,)}, Z),
    "dry_broken_by_two": ({"dry_multiplier": 0.7, "dry_breaker_sequences": ((0, 1),)}, Z),
    "dry_broken_by_a_sequence_of_one": (
        {"dry_multiplier": 0.7, "dry_allowed_length": 1, "dry_breaker_sequences": ((0,), ())},
        {**Z, 8: Z[8] - 0.7 * 1.75}),
    "dry_sequences_of_one_are_free": ({"dry_multiplier": 0.7, "dry_breaker_sequences": ((8,),)}, Z),
    "dry_mask": ({"dry_multiplier": 0.7, "dry_allowed_length": 1, "dry_breaker_mask": b"\x01", "dry_breaker_ids": (9,)},
                 {**Z, 8: Z[8] - 0.7 * 1.75}),
    "dry_range": ({"dry_multiplier": 0.7, "dry_penalty_last_n": 5}, Z),
    "range": ({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "repeat_last_n": 3},
              penalised_by({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, 1.5, 0.0, 0.5)),
    "range_into_the_prompt": ({"repetition_penalty": 1.5, "presence_penalty": 0.5, "repeat_last_n": 6},
                              penalised_by({0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, {0: 1, 1: 1, 2: 1, 4: 1}, 1.5, 0.5, 0.0)),
    "no_range": ({"repetition_penalty": 1.5, "repeat_last_n": 0}, Z),
    # strengths of the last tokens, 2 1 0 4 1: 1, 1, 1/2 … the fourth has none
    "decay": ({"repetition_penalty": 1.5, "frequency_penalty": 0.8, "repeat_last_n": 1, "repetition_decay": 2},
              penalised_by({2: 1, 1: 1, 0: 0.5}, {2: 1, 1: 1, 0: 0.5}, 1.5, 0.0, 0.8)),
}  # fmt: skip


def draw_many(sampler: Sampler, params: SamplingParams, calls: int, rows: int) -> Counter[int]:
    logits = np.tile(np.array(LOGITS, np.float32), (rows, 1))
    counts: Counter[int] = Counter()
    for call in range(calls):
        for row in range(rows):
            sampler.add_row(NewSequence(row, "r", row, PROMPT, OUTPUT, 0, (), params, seed=99))
        counts.update(s.tokens[0] for s in sampler.sample(logits, [Draw(row, 100 + call) for row in range(rows)]))
    return counts


def check(counts: Counter[int], expected: Weights, tests: int) -> None:
    total = sum(counts.values())
    assert set(counts) <= set(expected)
    assert all(counts[token] > 0 for token, p in expected.items() if p * total > 25)
    if len(expected) > 1:
        order = sorted(expected)
        result = stats.chisquare([counts[t] for t in order], [expected[t] * total for t in order])
        assert result.pvalue > 1e-4 / tests


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", ["native", "reference"])
def test_draws_follow_the_exact_distribution(name: str, which: str) -> None:
    rows, calls = (512, 20) if which == "native" else (64, 10)
    sampler = Sampler(len(LOGITS), rows, ReferenceSampling() if which == "reference" else native.NativeSampling())
    options, left = CASES[name]
    check(draw_many(sampler, SamplingParams(**options), calls, rows), softmax(left), 2 * len(CASES))


def test_cases_change_the_distribution() -> None:
    """Where a case is expected to leave everything as it is, another with its sampler is not."""
    changed = {name for name, (_, left) in CASES.items() if left != Z}
    unchanged = CASES.keys() - changed
    assert unchanged == {
        "xtc_of_one", "xtc_protected", "nothing_named", "five_gram", "dry_allows_it", "dry_breakers_are_free",
        "dry_broken_by_two", "dry_sequences_of_one_are_free", "dry_range", "no_range",
    }  # fmt: skip


def test_xtc_acts_as_often_as_it_is_asked_to() -> None:
    sampler = Sampler(len(LOGITS), 512, native.NativeSampling())
    counts = draw_many(sampler, SamplingParams(xtc_probability=0.3, xtc_threshold=0.1), 20, 512)
    plain, without = softmax(Z), softmax(excluded(Z, 0.1))
    check(counts, {t: 0.7 * plain[t] + 0.3 * without.get(t, 0.0) for t in Z}, 1)


def test_a_watermark_raises_the_tokens_of_its_list_alone() -> None:
    sampler = Sampler(len(LOGITS), 512, native.NativeSampling())
    params = SamplingParams(watermark=True, watermark_gamma=0.4, watermark_delta=1.5, watermark_key=3)
    counts = draw_many(sampler, params, 20, 512)
    green = is_green(np.arange(len(LOGITS)), OUTPUT[-1], 0.4, 3)
    assert 0 < green.sum() < len(LOGITS)
    check(counts, softmax({t: v + 1.5 * bool(green[t]) for t, v in Z.items()}), 1)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise(version: int) -> None:
    """Over 2,000 draws from Zipf's distribution the average surprise is the one asked for."""
    logits = (-1.1 * np.log(np.arange(1, 5001))).astype(np.float32)[None]
    logprobs = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    sampler = Sampler(5000, 1, native.NativeSampling())
    params = SamplingParams(mirostat=version, mirostat_tau=4.0, mirostat_eta=0.1)
    sampler.add_row(NewSequence(0, "r", 0, (0,), (), 0, (), params, seed=4))
    said = [sampler.sample(logits, [Draw(0, position)])[0] for position in range(2000)]
    assert all(len(sample.state) == 1 for sample in said)
    within = [-float(logprobs[sample.tokens[0]]) / math.log(2) for sample in said[200:]]
    assert abs(float(np.mean(within)) - 4.0) < 1.2  # of the whole distribution; Mirostat steers that of those kept


def test_adaptive_p_learns_from_the_probabilities_it_drew() -> None:
    """Its state is the average that the definition names, and a higher target draws likelier tokens."""
    averages = {}
    for target in (0.1, 0.6):
        rng = np.random.default_rng(1)
        sampler = Sampler(200, 1, native.NativeSampling())
        params = SamplingParams(adaptive_target=target, min_p=0.02)
        sampler.add_row(NewSequence(0, "r", 0, (0,), (), 0, (), params, seed=4))
        total, weight, drawn = target / (1 - 0.9), 1 / (1 - 0.9), []
        for position in range(400):
            logits = (rng.standard_normal(200) * 2.5).astype(np.float32)
            sample = sampler.sample(logits[None], [Draw(0, position)])[0]
            left = dict(enumerate(logits.tolist()))
            left = kept(left, lambda t, z=left: z[t] - max(z.values()) >= math.log(0.02))
            drawn.append(softmax(left)[sample.tokens[0]])
            total, weight = drawn[-1] + 0.9 * total, 1 + 0.9 * weight
            assert sample.state == pytest.approx((total, weight), rel=1e-9)
        averages[target] = float(np.mean(drawn))
    assert averages[0.1] + 0.1 < averages[0.6]
