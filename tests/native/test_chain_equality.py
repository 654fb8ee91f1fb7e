"""Native chains of samplers give the reference's tokens, in any order and with any parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from penstock.config.samplers import RANGES, SAMPLERS, SamplerParams, Step
from penstock.config.token_mask import token_mask
from penstock.kernels.cpu import native
from penstock.kernels.reference import chain as reference_chain
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.kernels.sampling import RowSettings
from tests.native.test_sampler_equality import make_logits

CHOICES: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 0.3, 0.8, 1.7),
    "dynatemp_range": (0.0, 0.5, 3.0),
    "dynatemp_exponent": (0.5, 1.0, 2.0),
    "top_k": (1, 2, 40, 200, 10**6),
    "top_p": (1e-6, 0.3, 0.9, 0.999),
    "min_p": (1e-6, 0.05, 0.5, 1.0),
    "typical_p": (0.05, 0.5, 0.95),
    "repetition_penalty": (0.5, 1.0, 1.3),
    "presence_penalty": (-1.0, 0.0, 0.7),
    "frequency_penalty": (-0.3, 0.0, 0.4),
    "repeat_last_n": (-1, 0, 5, 30),
    "repetition_decay": (0, 4, 100),
    "no_repeat_ngram_size": (1, 2, 3, 5),
    "dry_multiplier": (0.8, 5.0),
    "dry_base": (1.0, 1.75, 3.0),
    "dry_allowed_length": (0, 1, 2, 5),
    "dry_penalty_last_n": (-1, 6, 40),
    "watermark_gamma": (0.25, 0.5),
    "watermark_delta": (1.0, 4.0),
    "watermark_key": (1, 2**40 + 7),
    "top_n_sigma": (0.5, 1.0, 3.0),
    "smoothing_factor": (0.1, 1.5),
    "smoothing_curve": (1.0, 2.0, 4.0),
    "top_a": (0.01, 0.3, 1.0),
    "tfs": (0.0, 0.5, 0.95),
    "epsilon_cutoff": (3.0, 90.0, 10_000.0),
    "eta_cutoff": (3.0, 90.0, 10_000.0),
    "xtc_probability": (0.3, 1.0),
    "xtc_threshold": (0.0, 0.02, 0.2),
    "adaptive_target": (0.0, 0.3, 0.9),
    "adaptive_decay": (0.0, 0.9),
    "mirostat": (1, 2),
    "mirostat_tau": (0.5, 3.0, 8.0),
    "mirostat_eta": (0.1, 1.0),
}


def random_chain(rng: np.random.Generator) -> tuple[Step, ...]:
    chosen = rng.permutation(len(SAMPLERS))[: rng.integers(1, 7)]
    samplers = sorted((SAMPLERS[i] for i in chosen), key=lambda sampler: sampler.ends)
    samplers = [sampler for sampler in samplers[:-1] if not sampler.ends] + samplers[-1:]  # one at most learns
    return tuple(Step(s.name, tuple(float(rng.choice(CHOICES[name])) for name in s.parameters)) for s in samplers)


def random_settings(rng: np.random.Generator, vocab: int) -> RowSettings:
    words = int(rng.integers(2, 8))  # few different tokens, so that much is repeated
    few = rng.integers(0, vocab, words)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.choice(few, rng.integers(0, most + 1)).tolist())

    return RowSettings(
        vocab,
        seed=int(rng.integers(2**63)),
        sequence=int(rng.integers(2**32)),
        prompt_ids=ids(60),
        generated_ids=ids(30),
        chain=random_chain(rng),
        breaker_mask=token_mask(ids(1)),
        breaker_sequences=tuple(sequence for sequence in (ids(3), ids(2)) if sequence),
        protected_ids=ids(2),
        allowed_ids=tuple(range(0, vocab, 2)) if rng.random() < 0.2 else None,
    )


def test_every_parameter_has_choices_within_its_range() -> None:
    named = {name for sampler in SAMPLERS for name in sampler.parameters}
    assert named == set(CHOICES) == set(RANGES)
    for name, (low, high, _, _) in RANGES.items():
        assert all(low <= value <= high for value in CHOICES[name]), name
    assert named <= {field.name for field in dataclasses.fields(SamplerParams)}


def test_every_sampler_has_a_reference() -> None:
    assert set(reference_chain.SAMPLERS) == {sampler.name for sampler in SAMPLERS}
    for sampler in SAMPLERS:
        values = tuple(float(CHOICES[name][0]) for name in sampler.parameters)
        native.NativeSampling().row(RowSettings(10, chain=(Step(sampler.name, values),)))
    with pytest.raises(ValueError, match="no sampler is called top_x"):
        native.NativeSampling().row(RowSettings(10, chain=(Step("top_x", (1.0,)),)))


@pytest.mark.parametrize("vocab", [2, 100, 4096])
def test_random_chains_give_the_tokens_of_the_reference(isa: str, vocab: int) -> None:
    """200 chains for each vocabulary, four steps each, with state, history and drafts."""
    rng = np.random.default_rng(vocab)
    kernels: tuple[Any, ...] = (native.NativeSampling(), ReferenceSampling())
    used: set[str] = set()
    for number in range(200):
        settings = random_settings(rng, vocab)
        used.update(step.name for step in settings.chain)
        rows = [kernel.row(settings) for kernel in kernels]
        for step in range(4):
            logits = make_logits(rng, 1, vocab)
            position = rng.integers(0, 2**40, 1)
            got, expected = (k.sample(logits, [row], position) for k, row in zip(kernels, rows, strict=True))
            assert (got[0][0], got[1][0]) == (expected[0][0], expected[1][0]), (number, step, settings)
            np.testing.assert_allclose(rows[0].state, rows[1].state, rtol=1e-9, atol=1e-9, err_msg=str(settings))
            if step == 2:
                for row in rows:
                    row.extend(1)
    assert used == {sampler.name for sampler in SAMPLERS}


def test_large_rows(isa: str) -> None:
    rng = np.random.default_rng(3)
    kernels: tuple[Any, ...] = (native.NativeSampling(), ReferenceSampling())
    for sampler in SAMPLERS:
        step = Step(sampler.name, tuple(float(CHOICES[name][-1]) for name in sampler.parameters))
        settings = dataclasses.replace(random_settings(rng, 151_936), chain=(step,), allowed_ids=None)
        rows = [kernel.row(settings) for kernel in kernels]
        logits = make_logits(rng, 1, 151_936)
        got, expected = (k.sample(logits, [row], np.array([7]))[0][0] for k, row in zip(kernels, rows, strict=True))
        assert got == expected, step


def test_rows_go_on_from_the_state_they_told() -> None:
    """A row that is made again with its tokens and what it had learned draws as if it had stayed."""
    rng = np.random.default_rng(0)
    logits = make_logits(rng, 40, 1000)
    for kernel in (native.NativeSampling(), ReferenceSampling()):
        for chain in ((Step("mirostat", (2.0, 3.0, 0.5)),), (Step("adaptive_p", (0.3, 0.9)),)):
            settings = RowSettings(1000, seed=5, chain=chain)
            stays, leaves = kernel.row(settings), kernel.row(settings)
            said: list[int] = []
            for position in range(40):
                row = logits[position : position + 1]
                said += kernel.sample(row, [stays], np.array([position]))[0].tolist()
                again = kernel.sample(row, [leaves], np.array([position]))[0].tolist()
                assert again == said[-1:]
                state = tuple(leaves.state)
                assert len(state) == (1 if chain[0].name == "mirostat" else 2)
                leaves = kernel.row(dataclasses.replace(settings, generated_ids=tuple(said), state=state))
            forgetful = kernel.row(dataclasses.replace(settings, generated_ids=tuple(said)))
            assert tuple(forgetful.state) != tuple(stays.state)


@pytest.mark.parametrize("number", range(20))
def test_drafts_change_no_token_and_no_state(number: int) -> None:
    """Some drafts right, some wrong: what is drawn, and what is learned, is as without."""
    rng = np.random.default_rng(number)
    kernel = native.NativeSampling()
    settings = random_settings(rng, 200)
    logits = make_logits(rng, 8, 200)
    plain = kernel.row(settings)
    expected = [int(kernel.sample(logits[i : i + 1], [plain], np.array([i]))[0][0]) for i in range(8)]
    row = kernel.row(settings)
    at = 0
    while at < 8:
        ahead = expected[at : min(at + 3, 7)]
        if rng.random() < 0.5 and ahead:
            ahead[-1] = (ahead[-1] + 1) % 200
        places = logits[at : at + len(ahead) + 1]
        drawn = [int(t) for t in kernel.verify(places, [row], [tuple(ahead)], np.array([at]))[0] if t >= 0]
        assert drawn == expected[at : at + len(drawn)]
        at += len(drawn)
    assert tuple(row.state) == tuple(plain.state)


def test_chains_in_the_usual_order_are_the_usual_samplers() -> None:
    """The two ways in which rows are sampled agree."""
    rng = np.random.default_rng(9)
    kernel = native.NativeSampling()
    for number in range(200):
        options = {"temperature": 0.7, "top_k": 40, "typical_p": 0.9, "top_p": 0.95, "min_p": 0.01}
        for name in list(options):
            if rng.random() < 0.4:
                del options[name]
        settings = RowSettings(500, seed=number, **options)  # type: ignore[arg-type]
        params = SamplerParams(**options, samplers=tuple(sampler.name for sampler in SAMPLERS))  # type: ignore[arg-type]
        chain = params.chain()
        assert chain is not None
        assert {step.name for step in chain} == set(options)
        logits = make_logits(rng, 1, 500)
        rows = [kernel.row(settings), kernel.row(RowSettings(500, seed=number, chain=chain))]
        drawn = [kernel.sample(logits, [row], np.array([3]))[0][0] for row in rows]
        assert drawn[0] == drawn[1]
