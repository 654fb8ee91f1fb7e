"""Log-probabilities in other ways than the usual: many, named ones, what samplers leave, logits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.config.logprobs import LOGPROBS_MODES, packed, unpacked
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence, TokenLogprobs
from penstock.kernels.cpu import native
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.kernels.sampling import SamplingKernel
from penstock.runtime.sampler import Draw, RowSample, Sampler
from penstock.runtime.scoring import likeliest

VOCAB = 300
PLAIN = SamplingParams(temperature=0.8, logprobs=20)


@pytest.fixture(params=["native", "reference"])
def kernel(request: pytest.FixtureRequest) -> SamplingKernel:
    return native.NativeSampling() if request.param == "native" else ReferenceSampling()


def logits_at(position: int, rows: int = 1) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    drawn = np.random.default_rng(position).normal(0, 3, (rows, VOCAB))
    return np.round(drawn, 1).astype(np.float32)  # so that some are equal


def answers(
    kernel: SamplingKernel, params: SamplingParams, mode: str = "raw_logprobs", steps: int = 6
) -> list[RowSample]:
    sampler = Sampler(VOCAB, 2, kernel, mode)
    sampler.add_row(NewSequence(0, "request", 0, (1, 2, 3), (), 0, (), params))
    return [sampler.sample(logits_at(at), [Draw(0, at)])[0] for at in range(3, 3 + steps)]


def entries(samples: list[RowSample]) -> list[TokenLogprobs]:
    found = [entry for sample in samples for entry in sample.logprobs]
    assert len(found) == len(samples)
    return [replace(one, top=unpacked(one.packed), packed=b"") if one.packed else one for one in found]


def test_packed_and_back() -> None:
    pairs = ((3, -0.5), (0, -math.inf), (2**31 - 1, 1e300))
    assert unpacked(packed(*zip(*pairs, strict=True))) == pairs
    assert unpacked(b"") == ()


def test_the_likeliest_in_order() -> None:
    logits = np.array([1, 3, 3, 0, 5, 3], np.float32)
    assert likeliest(logits, 3).tolist() == [4, 1, 2]
    assert likeliest(logits, 6).tolist() == likeliest(logits, 9).tolist() == [4, 1, 2, 5, 0, 3]
    assert likeliest(logits, 0).tolist() == []


def test_the_whole_vocabulary_begins_with_the_likeliest(kernel: SamplingKernel) -> None:
    """The same tokens, values (but for rounding) and ranks as are told of twenty, and all others behind them."""
    few, all_of_them = (entries(answers(kernel, replace(PLAIN, logprobs=count))) for count in (20, VOCAB))
    for short, long in zip(few, all_of_them, strict=True):
        assert (long.token, long.rank) == (short.token, short.rank)
        assert [token for token, _ in long.top[:20]] == [token for token, _ in short.top]
        assert [value for _, value in long.top[:20]] == pytest.approx([value for _, value in short.top], abs=1e-12)
        assert sorted(token for token, _ in long.top) == list(range(VOCAB))
        assert math.fsum(math.exp(value) for _, value in long.top) == pytest.approx(1, abs=1e-9)


def test_named_tokens_are_told_in_their_order(kernel: SamplingKernel) -> None:
    named = (250, 3, 250, 0)
    whole = entries(answers(kernel, replace(PLAIN, logprobs=VOCAB)))
    told = entries(answers(kernel, replace(PLAIN, logprob_token_ids=named)))
    for entry, known in zip(told, (dict(one.top) for one in whole), strict=True):
        assert entry.top == tuple((token, known[token]) for token in named)


def test_what_is_told_changes_no_token(kernel: SamplingKernel) -> None:
    truth = [sample.tokens for sample in answers(kernel, PLAIN)]
    for mode in LOGPROBS_MODES:
        for params in (PLAIN, replace(PLAIN, logprobs=VOCAB), replace(PLAIN, logprob_token_ids=(5,))):
            assert [sample.tokens for sample in answers(kernel, params, mode)] == truth


def test_logits_are_the_models(kernel: SamplingKernel) -> None:
    for at, entry in enumerate(entries(answers(kernel, PLAIN, "raw_logits")), 3):
        row = logits_at(at)[0]
        assert [(token, value) for token, value in entry.top] == [(t, float(row[t])) for t, _ in entry.top]
        assert entry.logprob == float(row[entry.token]) and len(entry.top) == 20


FILTERED = (
    replace(PLAIN, top_k=5, logprobs=8),
    replace(PLAIN, top_p=0.7, repetition_penalty=1.5, logprobs=8),
    replace(PLAIN, samplers=("top_n_sigma", "temperature"), top_n_sigma=1.5, logprobs=8),
    replace(PLAIN, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5, logprobs=8),
    replace(PLAIN, temperature=0.0, presence_penalty=2.0, logprobs=8),
)


@pytest.mark.parametrize("params", FILTERED)
def test_what_samplers_leave(kernel: SamplingKernel, params: SamplingParams) -> None:
    """What is told sums to one over what can be drawn, and the token that is drawn is among it at every step."""
    samples = answers(kernel, replace(params, logprobs=VOCAB), "processed_logprobs", steps=20)
    tokens = {sample.tokens[0] for sample in samples}
    for entry in entries(samples):
        left = {token: value for token, value in entry.top if value > -math.inf}
        assert entry.token in left and left[entry.token] == entry.logprob
        assert math.fsum(map(math.exp, left.values())) == pytest.approx(1, abs=1e-6)
        assert params.top_k <= 0 or len(left) == params.top_k
    assert len(tokens) > 1


def test_processed_logits_are_divided_by_the_temperature(kernel: SamplingKernel) -> None:
    params = replace(PLAIN, temperature=0.5, logit_bias=((7, 3.0),), logprob_token_ids=(7, 8))
    for at, entry in enumerate(entries(answers(kernel, params, "processed_logits")), 3):
        row = logits_at(at)[0]
        assert dict(entry.top) == {7: pytest.approx((row[7] + 3) / 0.5), 8: pytest.approx(row[8] / 0.5)}


def test_masks_count_where_processed_is_told(kernel: SamplingKernel) -> None:
    sampler = Sampler(VOCAB, 2, kernel, "processed_logprobs")
    sampler.add_row(NewSequence(0, "request", 0, (1, 2, 3), (), 0, (), replace(PLAIN, logprobs=3)))
    mask = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    mask[0, 1] = 0b110
    (sample,) = sampler.sample(logits_at(3), [Draw(0, 3)], mask)
    told = dict(sample.logprobs[0].top)
    assert {token for token, value in told.items() if value > -math.inf} == {33, 34}


def test_drafts_are_told_as_tokens_one_by_one(kernel: SamplingKernel) -> None:
    params = replace(PLAIN, repetition_penalty=1.4, logprobs=30)
    truth = answers(kernel, params, "processed_logprobs", steps=3)
    known = [sample.tokens[0] for sample in truth]
    sampler = Sampler(VOCAB, 2, kernel, "processed_logprobs")
    sampler.add_row(NewSequence(0, "request", 0, (1, 2, 3), (), 0, (), params))
    logits = np.concatenate([logits_at(at) for at in range(3, 6)])
    (together,) = sampler.sample(logits, [Draw(0, 3, (known[0], known[1]))])
    assert together.tokens == tuple(known)
    assert together.logprobs == tuple(entry for sample in truth for entry in sample.logprobs)


def test_prompts_in_logits(kernel: SamplingKernel) -> None:
    logits, targets = logits_at(1, 5), [3, 299, 0, 7, 7]
    told = Sampler(VOCAB, 2, kernel, "processed_logits").prompt_logprobs(logits, targets, 25)
    usual = Sampler(VOCAB, 2, kernel).prompt_logprobs(logits, targets, 25)
    for row, (entry, other) in enumerate(zip(told, usual, strict=True)):
        assert entry.logprob == float(logits[row, targets[row]]) and entry.rank == other.rank
        ids = [token for token, _ in unpacked(other.packed)]
        assert unpacked(entry.packed) == tuple((token, float(logits[row, token])) for token in ids)
