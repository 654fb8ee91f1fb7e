"""Sampling of Triton against the reference: the same tokens, not only the same distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.config.samplers import Step
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.kernels.sampling import RowSettings
from penstock.runtime.logits_processors import load_processors
from penstock.runtime.sampler import Draw, RowSample, Sampler
from tests.engine.processors import ALL
from tests.kernels.triton.compare import sides

VOCAB = 1500
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 5},
    {"top_k": 1200, "min_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"top_k": 40, "typical_p": 0.7, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.3, "prompt_ids": (1, 2, 3), "generated_ids": (4, 4, 9), "temperature": 0.0},
    {"presence_penalty": 0.5, "frequency_penalty": -0.2, "generated_ids": (7, 7), "top_p": 0.99},
    {"logit_bias": ((3, 2.5), (7, -100.0), (9, float("-inf")), (11, 3.4e38))},
    {"allowed_ids": (3, 4, 5, 1400), "temperature": 1e-40},
    {"bad_words": ((3,), (4, 5)), "min_tokens": 4, "stop_ids": (9, 10), "temperature": 100.0, "top_k": 3},
)


def logits_of(rng: np.random.Generator, kind: str, vocab: int) -> np.ndarray:
    logits = (rng.normal(size=(len(SETTINGS), vocab)) * 3).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "flat":
        logits[:] = -0.0
        logits[:, 700:] = 0.0
    return logits


def compare_sampling(device: str, kind: str, steps: int, vocab: int = VOCAB) -> None:
    """Rows of all settings for some steps, under random masks at every second one."""
    both = sides(device, torch.float32, "sampling")
    ours, reference, rng = both.ours.sampling(), ReferenceSampling(), np.random.default_rng(steps)
    settings = [RowSettings(vocab, 2**63 + at, at % 3, **given) for at, given in enumerate(SETTINGS)]
    rows, others = [ours.row(one) for one in settings], [reference.row(one) for one in settings]
    for step in range(steps):
        logits = logits_of(rng, kind, vocab)
        positions = np.arange(len(rows), dtype=np.int64) + step + 2**33
        masks = rng.integers(0, 2**32, (len(rows), -(-vocab // 32)), dtype=np.uint32) if step % 2 else None
        tokens, errors = ours.sample(both.here(torch.from_numpy(logits)), rows, positions, masks)
        expected, codes = reference.sample(logits, others, positions, masks)
        assert (tokens.tolist(), errors.tolist()) == (expected.tolist(), codes.tolist())


def compare_errors(device: str) -> None:
    both = sides(device, torch.float32, "sampling")
    logits = torch.zeros(5, 40)
    logits[0, 3], logits[1, 39], logits[2], logits[3, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    masks = np.full((5, 2), 0xFFFFFFFF, np.uint32)
    masks[4] = 0
    found = []
    for kernel, given in ((both.ours.sampling(), both.here(logits)), (ReferenceSampling(), logits.numpy())):
        rows = [kernel.row(RowSettings(40, top_p=0.5 if at % 2 else 1.0)) for at in range(5)]
        found.append([part.tolist() for part in kernel.sample(given, rows, np.arange(5), masks)])
        assert kernel.logprobs(given, np.zeros(5, np.int64), 3).errors.tolist() == [1, 1, 1, 0, 0]
    assert found[0] == found[1] and found[0][1] == [1, 1, 1, 0, 2]


def compare_logprobs(device: str, ties: bool, vocab: int = VOCAB) -> None:
    both, rng = sides(device, torch.float32, "sampling"), np.random.default_rng(3)
    logits = (rng.normal(size=(7, vocab)) * 4).astype(np.float32)
    logits = np.round(logits) if ties else logits
    targets = rng.integers(0, vocab, 7)
    for top in (0, 9):
        ours = both.ours.sampling().logprobs(both.here(torch.from_numpy(logits)), targets, top)
        expected = ReferenceSampling().logprobs(logits, targets, top)
        assert ours.ranks.tolist() == expected.ranks.tolist() and ours.top_ids.tolist() == expected.top_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, expected.logprobs, rtol=0, atol=1e-11)
        np.testing.assert_allclose(ours.top_logprobs, expected.top_logprobs, rtol=0, atol=1e-11)
        assert ours.top_logprobs.dtype == np.float64 and ours.top_ids.dtype == np.int32


def compare_tokens_left_on_the_device(device: str) -> None:
    """Steps drawn before the tokens of the step before came back count them all the same."""
    both, rng = sides(device, torch.float32, "sampling"), np.random.default_rng(9)
    settings = RowSettings(VOCAB, 3, frequency_penalty=1.5, min_tokens=3, stop_ids=(5,), temperature=0.3)
    ours, reference = both.ours.sampling(), ReferenceSampling()
    row, other = ours.row(settings), reference.row(settings)
    logits = [(rng.normal(size=(1, VOCAB)) * 2).astype(np.float32) for _ in range(5)]
    for one in logits:
        one[0, 5] = 20
    drawn = [ours.draw(both.here(torch.from_numpy(one)), [row], np.array([at])) for at, one in enumerate(logits)]  # type: ignore[attr-defined]
    expected = [int(reference.sample(one, [other], np.array([at]))[0][0]) for at, one in enumerate(logits)]
    assert [int(each.take()[0][0]) for each in drawn] == expected and expected[3] == 5
    assert row.generated == other.generated


def compare_samplers(device: str) -> None:
    """The runtime's sampler hands logits over where they lie, in whatever float type; log-probabilities too."""
    both, results = sides(device, torch.bfloat16, "sampling"), []
    torch.manual_seed(2)
    logits = (torch.randn(3, VOCAB) * 3).to(torch.bfloat16)
    for kernel, given in ((both.ours.sampling(), both.here(logits)), (ReferenceSampling(), logits)):
        sampler = Sampler(VOCAB, 3, kernel)
        for row, wanted in enumerate((2, None, 0)):
            params = SamplingParams(top_p=0.9, logprobs=wanted)
            sampler.add_row(NewSequence(row, "request", 0, (1,), (), 7, (), params))
        drawn = sampler.sample(given, [Draw(row, 5) for row in range(3)])
        tokens = [sample.tokens for sample in drawn]
        results.append((tokens, [*drawn[0].logprobs, *sampler.prompt_logprobs(given, [3, 4, VOCAB], 1)]))
    (ours, entries), (expected, others) = results
    assert ours == expected
    for one, other in zip(entries, others, strict=True):
        assert (one.rank, [token for token, _ in one.top]) == (other.rank, [token for token, _ in other.top])
        assert one.logprob == other.logprob or abs(one.logprob - other.logprob) < 1e-11


def compare_followers(device: str) -> None:
    """A row that takes another's tokens, accepted drafts among them, has them counted before they come back."""
    both, rng = sides(device, torch.float32, "sampling"), np.random.default_rng(5)
    params = SamplingParams(
        temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0, min_tokens=7, bad_words_ids=((3, 4), (4, 3))
    )
    logits = torch.from_numpy((rng.normal(size=(12, VOCAB))).astype(np.float32))
    logits[:, 3], logits[:, 4], logits[:, 9] = 9.0, 8.5, 11.0
    results = []
    for kernel, given in ((both.ours.sampling(), both.here(logits)), (ReferenceSampling(), logits)):
        sampler = Sampler(VOCAB, 3, kernel)
        for row in range(3):
            sampler.add_row(NewSequence(row, "request", 0, (1,), (), 0, (), params, (9,)))
        handles = [
            sampler.begin(given[:2], [Draw(2, 1), Draw(0, 1)], None, [(1, 1)]),
            sampler.begin(given[2:5], [Draw(0, 2, (3, 4))], None, [(1, 0)]),
            sampler.begin(given[5:7], [Draw(2, 2), Draw(0, 3)], None, [(1, 1)]),
        ]
        alone = [sampler.begin(given[place : place + 1], [Draw(1, place)]) for place in range(7, 12)]
        results.append([sample.tokens for handle in (*handles, *alone) for sample in handle.wait()])
    assert results[0] == results[1] and (9,) in results[0][-5:]
    accepted = results[0][2]
    assert len(accepted) > 1, "a draft was right"


def compare_verified(device: str, steps: int, vocab: int = VOCAB) -> None:
    """Rows of all settings with right drafts, wrong ones and none, under masks: the reference's, place by place."""
    both, rng = sides(device, torch.float32, "sampling"), np.random.default_rng(steps)
    ours, reference = both.ours.sampling(), ReferenceSampling()
    words = {"bad_words": ((3,), (4, 5), (6, 7, 8)), "min_tokens": 6, "stop_ids": (9, 10), "temperature": 0.0}
    settings = [RowSettings(vocab, 2**63 + at, at % 3, **given) for at, given in enumerate((*SETTINGS, words))]
    rows, others = [ours.row(one) for one in settings], [reference.row(one) for one in settings]
    accepted = 0
    for step in range(steps):
        lengths = rng.integers(0, 4, len(rows))
        logits = (rng.normal(size=(int((lengths + 1).sum()), vocab)) * 3).astype(np.float32)
        logits[:, :12] += 6  # few tokens, which penalties and bad words are about
        masks = rng.integers(0, 2**32, (len(logits), -(-vocab // 32)), dtype=np.uint32) if step % 2 else None
        positions = np.arange(len(rows), dtype=np.int64) + 10 * step
        drafts = drafts_for(reference, others, logits, lengths, positions, masks, rng)
        expected = reference.verify(logits, others, drafts, positions, masks)
        found = ours.verify(both.here(torch.from_numpy(logits)), rows, drafts, positions, masks)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]
        accepted += int((expected[0] >= 0).sum()) - len(rows)
    assert accepted > 5 * steps
    assert [row.generated for row in rows] == [row.generated for row in others]


def compare_chains(device: str) -> None:
    """Rows with chains beside others without, with drafts and masks: the reference's tokens, and what they learn."""
    both, rng = sides(device, torch.float32, "sampling"), np.random.default_rng(8)
    ours, reference = both.ours.sampling(), ReferenceSampling()
    chains: tuple[tuple[Step, ...], ...] = (
        (Step("dry", (0.8, 1.75, 1.0, -1.0)), Step("temperature", (0.7, 0.0, 1.0))),
        (),
        (Step("mirostat", (2.0, 3.0, 0.2)),),
        (Step("xtc", (0.5, 0.01)), Step("adaptive_p", (0.3, 0.9))),
    )
    settings = [RowSettings(VOCAB, at, at, chain=chain, prompt_ids=(1, 2, 1)) for at, chain in enumerate(chains)]
    rows, others = [ours.row(one) for one in settings], [reference.row(one) for one in settings]
    for step in range(3):
        drafts = [(1, 2), (), (3,), ()] if step == 1 else [()] * 4
        logits = (rng.normal(size=(sum(len(ahead) + 1 for ahead in drafts), VOCAB)) * 3).astype(np.float32)
        logits[:, 1:4] += 9
        masks = rng.integers(0, 2**32, (len(logits), -(-VOCAB // 32)), dtype=np.uint32) if step == 2 else None
        positions = np.arange(4, dtype=np.int64) + 10 * step
        expected = reference.verify(logits, others, drafts, positions, masks)
        found = ours.verify(both.here(torch.from_numpy(logits)), rows, drafts, positions, masks)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]
        for row, other in zip(rows, others, strict=True):
            row.extend(5)
            other.extend(5)
            np.testing.assert_allclose(row.state, other.state, rtol=1e-9)
    assert [row.generated for row in rows] == [row.generated for row in others]


def compare_processors(device: str) -> None:
    """Rows with logits processors, with and without drafts: the host's tokens, log-probabilities and failures."""
    both, rng = sides(device, torch.float32, "sampling"), np.random.default_rng(9)
    registered = load_processors(ALL)
    samplers = [
        Sampler(VOCAB, 4, kernel, "processed_logprobs", processors=registered)
        for kernel in (both.ours.sampling(), ReferenceSampling())
    ]
    calls: tuple[list[Any], ...] = (
        ["history"],
        [],
        [{"name": "Odd", "args": [3]}, "history"],
        [{"name": "failing", "args": [3]}],
    )
    for sampler in samplers:
        for slot, call in enumerate(calls):
            params = SamplingParams(logits_processors=call, logprobs=2, top_k=30 * (slot % 2))  # type: ignore[arg-type]
            sampler.add_row(NewSequence(slot, "r", 0, (1, 2, 1), (), 0, (), params, seed=slot))
    found: list[list[RowSample]] = []
    for step in range(4):
        drafts = [(1, 2), (), (), (3,)] if step == 1 else [()] * 4
        values = (rng.normal(size=(sum(len(ahead) + 1 for ahead in drafts), VOCAB)) * 3).astype(np.float32)
        values[:, 1:4] += 9
        draws = [Draw(slot, 10 * step, ahead) for slot, ahead in enumerate(drafts)]
        found = []
        for sampler in samplers:
            here = both.here(torch.from_numpy(values)) if sampler.on_device else values
            found.append(sampler.sample(here, draws))
            np.testing.assert_array_equal(values, here.cpu().numpy() if sampler.on_device else here)
        for one, other in zip(*found, strict=True):
            assert (one.tokens, one.error) == (other.tokens, other.error)
            assert [entry.rank for entry in one.logprobs] == [entry.rank for entry in other.logprobs]
    errors = [sample.error for sample in found[0]]
    assert errors[:3] == [None] * 3 and "RuntimeError" in str(errors[3])


def drafts_for(
    kernel: ReferenceSampling, rows: list[Any], logits: np.ndarray, lengths: np.ndarray, positions: np.ndarray,
    masks: np.ndarray | None, rng: np.random.Generator,
) -> list[tuple[int, ...]]:  # fmt: skip
    """So many drafts a row, most of them what will be drawn."""
    drafts, place = [], 0
    for row, length, position in zip(rows, lengths.tolist(), positions.tolist(), strict=True):
        trial = kernel.row(replace(row.settings, generated_ids=tuple(row.generated)))
        wanted: list[int] = []
        for index in range(length):
            at = slice(place + index, place + index + 1)
            mask = None if masks is None else masks[at]
            token = int(kernel.sample(logits[at], [trial], np.array([position + index]), mask)[0][0])
            wanted.append(token if rng.random() < 0.8 else int(rng.integers(0, row.settings.vocab_size + 9)))
        drafts.append(tuple(wanted))
        place += length + 1
    return drafts
