"""The native sampler equals the numpy reference token for token, on every instruction set."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
import pytest

from penstock.kernels.cpu import native
from penstock.kernels.reference import sampling as reference
from penstock.kernels.sampling import NOT_FINITE, NOTHING_ALLOWED, RowSettings

VOCABULARIES = (2, 100, 4096, 8193, 151_936)


def test_the_library_is_there() -> None:
    assert native.available(), native.unavailable_reason()
    assert "generic" in native.usable_isas()


def make_logits(rng: np.random.Generator, rows: int, vocab: int) -> npt.NDArray[np.float32]:
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * np.float32(rng.choice([0.5, 2.0, 8.0]))
    style = rng.integers(4)
    if style == 1:  # many ties, on both sides of zero
        logits = np.round(logits)
    if style == 2:  # some tokens impossible, some zeros of both signs
        logits[rng.random(logits.shape) < 0.2] = -np.inf
        logits[rng.random(logits.shape) < 0.1] = -0.0
        logits[rng.random(logits.shape) < 0.1] = 0.0
        logits[:, rng.integers(vocab)] = 1.0
    return logits


def random_settings(rng: np.random.Generator, vocab: int) -> RowSettings:
    def ids(most: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(0, vocab, rng.integers(1, most + 1)))

    def maybe(chance: float, value: object, otherwise: object) -> object:
        return value if rng.random() < chance else otherwise

    options = {
        "temperature": rng.choice([0.0, 0.05, 0.7, 1.0, 1.0, 1.7]),
        "top_k": maybe(0.3, int(rng.choice([1, 2, 5, 40, 128, 129, 1000, vocab, 10**9])), 0),
        "top_p": maybe(0.4, float(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9])), 1.0),
        "min_p": maybe(0.3, float(rng.choice([1e-9, 0.01, 0.3, 1.0])), 0.0),
        "typical_p": maybe(0.3, float(rng.choice([0.05, 0.5, 0.95])), 1.0),
        "repetition_penalty": maybe(0.3, float(rng.choice([0.5, 1.3, 10.0])), 1.0),
        "presence_penalty": maybe(0.3, float(rng.uniform(-2, 2)), 0.0),
        "frequency_penalty": maybe(0.3, float(rng.uniform(-2, 2)), 0.0),
        "min_tokens": maybe(0.3, 4, 0),
        "logit_bias": maybe(0.3, tuple((i, float(rng.uniform(-100, 100))) for i in ids(8)), ()),
        "allowed_ids": maybe(0.2, ids(vocab), None),
        "bad_words": maybe(0.3, tuple(ids(3) for _ in range(8)), ()),
        "stop_ids": ids(2),
        "prompt_ids": ids(50),
        "generated_ids": maybe(0.7, ids(8), ()),
    }
    return RowSettings(vocab, seed=int(rng.integers(2**63)), sequence=int(rng.integers(2**32)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_equal_the_reference(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    kernels = (native.NativeSampling(), reference.ReferenceSampling())
    steps = 3
    compared = errors = 0
    for _ in range(4 if vocab > 100_000 else 40):
        count = int(rng.integers(1, 9))
        settings = [random_settings(rng, vocab) for _ in range(count)]
        fast, plain = ([kernel.row(s) for s in settings] for kernel in kernels)
        for step in range(steps):
            logits = make_logits(rng, count, vocab)
            positions = rng.integers(0, 2**40, count)
            masks = None
            if step == 2:
                masks = rng.integers(0, 2**32, (count, (vocab + 31) // 32), dtype=np.uint32)
            got, got_errors = kernels[0].sample(logits, fast, positions, masks)
            expected, expected_errors = kernels[1].sample(logits, plain, positions, masks)
            np.testing.assert_array_equal(got_errors, expected_errors)
            np.testing.assert_array_equal(got, expected)
            compared += count
            errors += int((expected_errors != 0).sum())
    assert compared - errors > compared // 4


@pytest.mark.parametrize("vocab", [100, 8193])
def test_long_runs_keep_state_as_the_reference_does(isa: str, vocab: int) -> None:
    """Penalties, bad words and min_tokens over 200 steps on a few likely tokens."""
    rng = np.random.default_rng(5)
    settings = RowSettings(
        vocab,
        seed=11,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.05,
        min_tokens=30,
        bad_words=((1, 2), (3, 4, 5), (6,), (7, 7)),
        stop_ids=(8, 9),
        prompt_ids=(1, 1, 4),
    )
    kernels = (native.NativeSampling(), reference.ReferenceSampling())
    fast, plain = (kernel.row(settings) for kernel in kernels)
    base = np.where(np.arange(vocab) < 12, 14.0, 0.0).astype(np.float32)
    history: list[int] = []
    for position in range(200):
        logits = (base + rng.standard_normal(vocab).astype(np.float32))[None]
        got = kernels[0].sample(logits, [fast], np.array([position]))[0]
        expected = kernels[1].sample(logits, [plain], np.array([position]))[0]
        assert got == expected
        history.append(int(got[0]))
        if position % 17 == 0:
            for row in (fast, plain):
                row.extend(3)
            history.append(3)
    assert fast.num_generated == len(history)
    assert not {8, 9} & set(history[:30])
    assert {8, 9} & set(history[30:])
    assert 6 not in history
    pairs = set(itertools.pairwise(history))
    assert not {(1, 2), (7, 7)} & pairs
    assert {(1, 3), (3, 4)} & pairs


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logprobs_equal_the_reference(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for top in (0, 1, 2, 20):
        top = min(top, vocab)
        logits = make_logits(rng, 4, vocab)
        targets = rng.integers(0, vocab, 4)
        got = native.NativeSampling().logprobs(logits, targets, top)
        expected = reference.ReferenceSampling().logprobs(logits, targets, top)
        np.testing.assert_array_equal(got.ranks, expected.ranks)
        np.testing.assert_array_equal(got.top_ids, expected.top_ids)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=0, atol=1e-11)
        np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, rtol=0, atol=1e-11)
        assert (got.ranks >= 1).all()


def test_all_instruction_sets_give_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    logits = make_logits(rng, 6, 50_001)
    targets = rng.integers(0, 50_001, 6)
    results = []
    for name in native.usable_isas():
        native.select_isa(name)
        table = native.NativeSampling().logprobs(logits, targets, 5)
        results.append((name, table.logprobs.tobytes(), table.top_logprobs.tobytes()))
    native.select_isa("auto")
    assert len({result[1:] for result in results}) == 1


def test_draws_do_not_depend_on_batch_or_threads(isa: str) -> None:
    rng = np.random.default_rng(8)
    vocab, count = 8193, 24
    settings = [dataclasses.replace(random_settings(rng, vocab), temperature=1.0) for _ in range(count)]
    logits = make_logits(rng, count, vocab)
    positions = np.arange(count)
    kernel = native.NativeSampling()
    alone = [
        int(kernel.sample(logits[i : i + 1], [kernel.row(settings[i])], positions[i : i + 1])[0][0])
        for i in range(count)
    ]
    before = native.library().num_threads()
    for threads in (1, 2, 5):
        native.set_num_threads(threads)
        together = kernel.sample(logits, [kernel.row(s) for s in settings], positions)[0]
        assert together.tolist() == alone
    native.set_num_threads(before)
    order = rng.permutation(count)
    shuffled = kernel.sample(logits[order], [kernel.row(settings[i]) for i in order], positions[order])[0]
    assert shuffled.tolist() == [alone[i] for i in order]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 7, 99, 100])
def test_non_finite_logits_fail_one_row(isa: str, bad: float, at: int) -> None:
    logits = np.zeros((3, 101), np.float32)
    logits[1, at] = bad
    for kernel in (native.NativeSampling(), reference.ReferenceSampling()):
        rows = [kernel.row(RowSettings(101, temperature=0.0)) for _ in range(3)]
        tokens, errors = kernel.sample(logits, rows, np.zeros(3, np.int64))
        assert tokens.tolist() == [0, -1, 0]
        assert errors.tolist() == [0, NOT_FINITE, 0]
        assert kernel.logprobs(logits, np.zeros(3, np.int64), 2).errors.tolist() == [0, NOT_FINITE, 0]


def test_impossible_rows_have_their_own_error(isa: str) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[0] = -np.inf
    for kernel in (native.NativeSampling(), reference.ReferenceSampling()):
        rows = [
            kernel.row(RowSettings(40)),
            kernel.row(RowSettings(40, allowed_ids=(3,), bad_words=((3,),))),
            kernel.row(RowSettings(40, allowed_ids=())),
        ]
        assert kernel.sample(logits, rows, np.zeros(3, np.int64))[1].tolist() == [
            NOT_FINITE,
            NOTHING_ALLOWED,
            NOTHING_ALLOWED,
        ]


def test_extreme_values_stay_finite(isa: str) -> None:
    """The largest floats, tiny temperatures and penalties that overflow."""
    largest = np.finfo(np.float32).max
    logits = np.array([[largest, -largest, 0.0, 1.0, largest, -np.inf]], np.float32)
    for temperature in (0.0, 5e-324, 1e-30, 1.0, 100.0):
        for penalty in (5e-324, 1.0, 100.0):
            settings = RowSettings(
                6, temperature=temperature, repetition_penalty=penalty, prompt_ids=(0, 1, 2), logit_bias=((4, 100.0),)
            )
            drawn = []
            for kernel in (native.NativeSampling(), reference.ReferenceSampling()):
                tokens, errors = kernel.sample(logits, [kernel.row(settings)], np.array([9]))
                assert errors[0] == 0
                drawn.append(int(tokens[0]))
            assert drawn[0] == drawn[1]
            assert drawn[0] in (0, 4)


def test_equal_logits_prefer_the_lower_id(isa: str) -> None:
    logits = np.zeros((1, 1000), np.float32)
    for kernel in (native.NativeSampling(), reference.ReferenceSampling()):
        for settings, expected in (
            (RowSettings(1000, temperature=0.0), range(1)),
            (RowSettings(1000, top_k=1), range(1)),
            (RowSettings(1000, top_k=7), range(7)),
            (RowSettings(1000, top_k=300), range(300)),
            (RowSettings(1000, top_p=0.25), range(250)),
            (RowSettings(1000, typical_p=0.1), range(100)),
            (RowSettings(1000, min_p=1.0), range(1000)),
        ):
            seen = set()
            row = kernel.row(settings)
            for position in range(60):
                seen.add(int(kernel.sample(logits, [row], np.array([position]))[0][0]))
            assert seen <= set(expected)
            assert max(seen) >= expected.stop * 0.8 - 1
        assert kernel.logprobs(logits, np.array([5]), 3).top_ids.tolist() == [[0, 1, 2]]
        assert kernel.logprobs(logits, np.array([5]), 3).ranks.tolist() == [6]
