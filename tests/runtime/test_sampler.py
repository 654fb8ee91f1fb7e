"""The sampler's rows: reproducible draws, state over a run, resumption, log-probabilities, errors."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import limits
from penstock.config.samplers import SAMPLERS, SamplerParams
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.evaluate.watermark import detect
from penstock.kernels.cpu import native
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.kernels.sampling import SamplingKernel
from penstock.runtime.row_settings import row_settings
from penstock.runtime.sampler import Draw, RowSample, Sampler

VOCAB = 300


@pytest.fixture(params=["native", "reference"])
def kernel(request: pytest.FixtureRequest) -> SamplingKernel:
    return native.NativeSampling() if request.param == "native" else ReferenceSampling()


def new_row(row: int, params: SamplingParams, generated: tuple[int, ...] = (), **more: Any) -> NewSequence:
    return NewSequence(
        row, "request", more.pop("sequence", 0), more.pop("prompt", (1, 2, 3)), generated, 0, (), params, **more
    )


def logits_at(position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(position)
    return torch.randn(1, VOCAB, generator=generator) * 3


def run(sampler: Sampler, row: int, start: int, steps: int) -> list[int]:
    out = []
    for position in range(start, start + steps):
        out += [
            token for sample in sampler.sample(logits_at(position), [Draw(row, position)]) for token in sample.tokens
        ]
    return out


RICH = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    top_k=50,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    min_tokens=10,
    bad_words_ids=((7,), (8, 9)),
)


def test_every_parameter_of_a_sampler_is_documented() -> None:
    documented = set(re.findall(r"\w+", SamplerParams.__doc__ or ""))
    assert {name for sampler in SAMPLERS for name in sampler.parameters} <= documented


def test_same_seed_same_tokens_whatever_row_or_mates(kernel: SamplingKernel) -> None:
    alone = Sampler(VOCAB, 1, kernel)
    alone.add_row(new_row(0, RICH, seed=42))
    expected = run(alone, 0, 3, 40)
    crowd = Sampler(VOCAB, 8, kernel)
    for row in range(8):
        crowd.add_row(new_row(row, RICH if row == 5 else SamplingParams(), seed=42 if row == 5 else row))
    got = []
    for position in range(3, 43):
        others = [row for row in range(8) if row == 5 or (row + position) % 3]
        samples = crowd.sample(logits_at(position).repeat(len(others), 1), [Draw(row, position) for row in others])
        got.append(samples[others.index(5)].tokens[0])
    assert got == expected
    other = Sampler(VOCAB, 1, kernel)
    other.add_row(new_row(0, RICH, seed=43))
    assert run(other, 0, 3, 40) != expected
    other.add_row(new_row(0, RICH, seed=42, sequence=1))
    assert run(other, 0, 3, 40) != expected


@pytest.mark.parametrize("cut", [1, 11, 39])
def test_preempted_and_resumed_rows_go_on_as_if_nothing_happened(kernel: SamplingKernel, cut: int) -> None:
    sampler = Sampler(VOCAB, 2, kernel)
    sampler.add_row(new_row(0, RICH, seed=9, stop_ids=(4, 5)))
    expected = run(sampler, 0, 3, 40)
    sampler.add_row(new_row(1, RICH, seed=9, stop_ids=(4, 5)))
    begun = run(sampler, 1, 3, cut)
    sampler.release_row(1)
    sampler.add_row(new_row(1, RICH, tuple(begun), seed=9, stop_ids=(4, 5)))
    assert begun + run(sampler, 1, 3 + cut, 40 - cut) == expected


def test_forced_tokens_count_like_sampled_ones(kernel: SamplingKernel) -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, bad_words_ids=((20, 21, 22),))
    logits = torch.zeros(1, VOCAB)
    logits[0, 22], logits[0, 20], logits[0, 30] = 3.0, 2.0, 1.9
    sampler = Sampler(VOCAB, 1, kernel)
    sampler.add_row(new_row(0, params))
    sampler.extend(0, [20, 21])
    assert sampler.sample(logits, [Draw(0, 5)])[0].tokens == (30,)


def test_min_tokens_masks_stop_ids_until_reached(kernel: SamplingKernel) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 6] = 9.0, 5.0
    sampler = Sampler(VOCAB, 1, kernel)
    sampler.add_row(new_row(0, SamplingParams(temperature=0.0, min_tokens=3), (8,), stop_ids=(4, VOCAB + 7)))
    tokens = [sampler.sample(logits, [Draw(0, position)])[0].tokens[0] for position in range(3)]
    assert tokens == [6, 6, 4]


def test_ids_beyond_the_vocabulary_are_harmless(kernel: SamplingKernel) -> None:
    params = SamplingParams(
        temperature=0.0,
        logit_bias=((10**9, 5.0), (3, 50.0)),
        bad_words_ids=((VOCAB, 3), (2**31 - 1,)),
        stop_token_ids=(VOCAB,),
        allowed_token_ids=(3, 4, VOCAB),
        repetition_penalty=1.5,
    )
    sampler = Sampler(VOCAB, 2, kernel)
    sampler.add_row(new_row(0, params, (VOCAB,), prompt=(VOCAB + 1, 2)))
    sampler.add_row(new_row(1, SamplingParams(allowed_token_ids=(VOCAB,))))
    good, impossible = sampler.sample(torch.zeros(2, VOCAB), [Draw(0, 0), Draw(1, 0)])
    assert good.tokens == (3,)
    assert impossible.tokens == ()
    assert "allowed_token_ids" in (impossible.error or "")


def test_bad_logits_end_one_row_only(kernel: SamplingKernel) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 250] = math.nan
    sampler = Sampler(VOCAB, 3, kernel)
    for row in range(3):
        sampler.add_row(new_row(row, SamplingParams(temperature=0.0, logprobs=2)))
    samples = sampler.sample(logits, [Draw(row, 0) for row in range(3)])
    assert [sample.tokens for sample in samples] == [(0,), (), (0,)]
    assert [sample.error is None for sample in samples] == [True, False, True]
    assert "finite" in (samples[1].error or "")
    assert samples[1].logprobs == ()
    assert len(samples[2].logprobs) == 1


def test_logprobs_are_of_the_unmodified_distribution(kernel: SamplingKernel) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    expected = torch.log_softmax(logits.double(), -1)
    sampler = Sampler(VOCAB, 3, kernel)
    for row, count in enumerate((5, None, 0)):
        sampler.add_row(new_row(row, SamplingParams(temperature=0.0, logprobs=count, logit_bias=((17, 100.0),))))
    samples = sampler.sample(logits, [Draw(row, 0) for row in range(3)])
    assert [sample.tokens for sample in samples] == [(17,)] * 3
    assert samples[1].logprobs == ()
    for row, count in ((0, 5), (2, 0)):
        (entry,) = samples[row].logprobs
        assert entry.token == 17
        assert entry.logprob == pytest.approx(float(expected[row, 17]), abs=1e-11)
        assert entry.rank == 1 + int((logits[row] > logits[row, 17]).sum())
        values, ids = expected[row].sort(descending=True, stable=True)
        assert [token for token, _ in entry.top] == ids[:count].tolist()
        assert [value for _, value in entry.top] == pytest.approx(values[:count].tolist(), abs=1e-11)


def test_prompt_logprobs(kernel: SamplingKernel) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = torch.log_softmax(logits.double(), -1)
    sampler = Sampler(VOCAB, 1, kernel)
    targets = [0, 5, VOCAB - 1, 7, 7, VOCAB]
    entries = sampler.prompt_logprobs(logits, targets, 3)
    for at, (target, entry) in enumerate(zip(targets[:-1], entries[:-1], strict=True)):
        assert entry.token == target
        assert entry.logprob == pytest.approx(float(expected[at, target]), abs=1e-11)
        assert len(entry.top) == 3
        assert entry.top[0][1] == pytest.approx(float(expected[at].max()), abs=1e-11)
    assert entries[-1].logprob == -math.inf
    assert sampler.prompt_logprobs(logits[:0], [], 3) == []


def test_any_float_layout_is_accepted(kernel: SamplingKernel) -> None:
    logits = torch.randn(VOCAB, 2, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).T
    sampler = Sampler(VOCAB, 2, kernel)
    for row in range(2):
        sampler.add_row(new_row(row, SamplingParams(temperature=0.0)))
    tokens = [sample.tokens[0] for sample in sampler.sample(logits, [Draw(0, 0), Draw(1, 0)])]
    assert tokens == logits.float().argmax(-1).tolist()


def test_misuse_is_refused(kernel: SamplingKernel) -> None:
    sampler = Sampler(VOCAB, 2, kernel)
    sampler.add_row(new_row(0, SamplingParams()))
    logits = torch.zeros(2, VOCAB)
    for draws in ([Draw(0, 0)], [Draw(0, 0), Draw(0, 1)], [Draw(0, 0), Draw(1, 0)]):
        with pytest.raises(ValueError, match=r"row|draws"):
            sampler.sample(logits, draws)
    with pytest.raises(ValueError, match="logits"):
        sampler.sample(torch.zeros(1, VOCAB + 1), [Draw(0, 0)])
    with pytest.raises(ValueError, match="logits"):
        sampler.prompt_logprobs(logits, [1], 0)
    sampler.release_row(0)
    sampler.release_row(0)
    with pytest.raises(ValueError, match="row 0"):
        sampler.extend(0, [1])


def test_rows_take_the_prompt_only_for_the_penalty_that_reads_it() -> None:
    prompt = (1, 2, 1)
    for params in (SamplingParams(), SamplingParams(presence_penalty=1.0, frequency_penalty=1.0, top_p=0.5)):
        assert row_settings(new_row(0, params, prompt=prompt), VOCAB).prompt_ids == ()
    assert row_settings(new_row(0, RICH, prompt=prompt), VOCAB).prompt_ids == prompt


def test_masks_of_several_words(kernel: SamplingKernel) -> None:
    mask = np.zeros((2, (VOCAB + 31) // 32), np.uint32)
    mask[0, 299 // 32] = 1 << 299 % 32
    mask[1] = 0xFFFFFFFF
    sampler = Sampler(VOCAB, 2, kernel)
    for row in range(2):
        sampler.add_row(new_row(row, SamplingParams(temperature=0.0)))
    samples = sampler.sample(torch.zeros(2, VOCAB), [Draw(0, 0), Draw(1, 0)], mask)
    assert [sample.tokens for sample in samples] == [(299,), (0,)]


def draft_for(dice: random.Random, answer: list[int]) -> tuple[int, ...]:
    """What follows, with a wrong token here and there."""
    length = dice.randrange(5)
    return tuple(token if dice.random() < 0.8 else dice.randrange(VOCAB + 9) for token in answer[:length])


@pytest.mark.parametrize("seed", range(6))
def test_drafts_change_neither_tokens_nor_log_probabilities(kernel: SamplingKernel, seed: int) -> None:
    """Rows with right drafts, wrong ones and none, under masks, against the same rows without drafts."""
    settings = (
        replace(RICH, logprobs=2),
        SamplingParams(temperature=0.7, logprobs=3),
        SamplingParams(temperature=0.0, frequency_penalty=2),
    )
    steps, dice = 60, random.Random(seed)
    words = np.random.default_rng(seed).integers(0, 2**32, (steps + 9, 10), dtype=np.uint32) if seed % 2 else None
    plain, drafted = Sampler(VOCAB, 3, kernel), Sampler(VOCAB, 3, kernel)
    for row, params in enumerate(settings):
        for sampler in (plain, drafted):
            sampler.add_row(new_row(row, params, seed=seed + row, stop_ids=(4, 5)))
    expected: list[list[RowSample]] = [[], [], []]
    for position in range(steps + 9):
        masks = None if words is None else words[[position] * 3]
        samples = plain.sample(logits_at(position).repeat(3, 1), [Draw(row, position) for row in range(3)], masks)
        for row, sample in enumerate(samples):
            expected[row].append(sample)
    done, accepted = [0, 0, 0], 0
    while min(done) < steps:
        rows = [row for row in dice.sample(range(3), 3) if done[row] < steps]
        draws = [
            Draw(row, done[row], draft_for(dice, [s.tokens[0] for s in expected[row][done[row] :]])) for row in rows
        ]
        places = [draw.position + i for draw in draws for i in range(len(draw.drafts) + 1)]
        logits = torch.cat([logits_at(place) for place in places])
        for draw, sample in zip(
            draws, drafted.sample(logits, draws, None if words is None else words[places]), strict=True
        ):
            at = slice(draw.position, draw.position + len(sample.tokens))
            assert sample.tokens == tuple(one.tokens[0] for one in expected[draw.slot][at])
            assert sample.logprobs == tuple(entry for one in expected[draw.slot][at] for entry in one.logprobs)
            assert sample.tokens[:-1] == draw.drafts[: len(sample.tokens) - 1]
            assert len(sample.tokens) > len(draw.drafts) or sample.tokens[-1] != draw.drafts[len(sample.tokens) - 1]
            accepted += len(sample.tokens) - 1
            done[draw.slot] += len(sample.tokens)
    assert accepted > 60


def test_an_error_behind_a_draft_leaves_what_was_accepted(kernel: SamplingKernel) -> None:
    sampler = Sampler(VOCAB, 2, kernel)
    for row in range(2):
        sampler.add_row(new_row(row, SamplingParams(temperature=0.0, logprobs=0)))
    logits = torch.zeros(6, VOCAB)
    logits[:, 7] = 1
    logits[1], logits[4] = math.nan, math.nan
    found, wrong = sampler.sample(logits[[0, 1, 2, 3, 4, 5]], [Draw(0, 5, (7, 7)), Draw(1, 5, (8, 7))])
    assert found.tokens == (7,) and found.error is None and len(found.logprobs) == 1
    assert wrong.tokens == (7,) and wrong.error is None
    assert sampler.sample(logits[[1, 0]], [Draw(0, 6), Draw(1, 6)])[0].error is not None


def test_places_that_do_not_fit_the_drafts_are_refused(kernel: SamplingKernel) -> None:
    sampler = Sampler(VOCAB, 2, kernel)
    row = kernel.row(row_settings(new_row(0, SamplingParams()), VOCAB))
    sampler.add_row(new_row(0, SamplingParams()))
    with pytest.raises(ValueError, match="3 draws"):
        sampler.sample(torch.zeros(2, VOCAB), [Draw(0, 0, (1, 2))])
    logits = np.zeros((3, VOCAB), np.float32)
    with pytest.raises(ValueError, match="length"):
        kernel.verify(logits, [row], [(1, 2, 3)], np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="more than once"):
        kernel.verify(logits, [row, row], [(1,), ()], np.zeros(2, np.int64))


@pytest.mark.parametrize("ties", [False, True])
def test_one_draw_over_a_group_takes_the_best_of_all(kernel: SamplingKernel, ties: bool) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(7)) * 3
    logits = logits.round() if ties else logits
    logits[3] = math.nan
    totals = [-1.5, -0.25, -4.0, 0.0]
    found = Sampler(VOCAB, 1, kernel).best_of_group(logits, totals, 12)
    whole = torch.log_softmax(logits[:3].double(), -1) + torch.tensor(totals[:3]).double().unsqueeze(1)
    pairs = sorted((-float(whole[i, t]), i, t) for i in range(3) for t in range(VOCAB))[:12]
    if ties:  # rounding may tell equal ones of different sequences apart
        assert [one.total for one in found] == pytest.approx([-pair[0] for pair in pairs], abs=1e-11)
    else:
        assert [(one.sequence, one.token) for one in found] == [pair[1:] for pair in pairs]
    assert len({one.sequence for one in found}) > 1
    for one in found:
        assert one.total == totals[one.sequence] + one.logprob
        assert one.total == pytest.approx(float(whole[one.sequence, one.token]), abs=1e-11)
    with pytest.raises(ValueError, match="group of 2"):
        Sampler(VOCAB, 1, kernel).best_of_group(logits, totals[:2], 3)


def test_the_samplers_key_marks_rows_without_one_of_their_own(kernel: SamplingKernel) -> None:
    marked = SamplingParams(watermark=True, watermark_delta=8.0, seed=1)
    own = Sampler(VOCAB, 1, kernel, watermark_key=42)
    told = {}
    for name, sampler, params in (
        ("server", own, marked),
        ("request", Sampler(VOCAB, 1, kernel), replace(marked, watermark_key=42)),
        ("default", Sampler(VOCAB, 1, kernel), marked),
        ("other", own, replace(marked, watermark_key=7)),
    ):
        sampler.add_row(new_row(0, params))
        told[name] = run(sampler, 0, 3, 60)
    assert told["server"] == told["request"]
    assert len({tuple(tokens) for tokens in told.values()}) == 3
    assert detect(told["server"], 0.5, 42).z > 4 > detect(told["server"], 0.5, limits.WATERMARK_KEY).z
