"""Answers under chains of samplers: the same whatever drafts, preemptions and company there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from tests.engine.test_drafts import Rehearsed, again, check, made, run
from tests.models import tiny

KINDS: tuple[dict[str, Any], ...] = (
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5, "logprobs": 1},
    {"mirostat": 1, "mirostat_tau": 2.0, "repetition_penalty": 1.2, "repeat_last_n": 8},
    {"adaptive_target": 0.2, "min_p": 0.05, "n": 2},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1, "xtc_probability": 0.5, "xtc_threshold": 0.02, "temperature": 0.8},
    {"no_repeat_ngram_size": 2, "temperature": 0.0},
    {"samplers": ("top_n_sigma", "temperature"), "top_n_sigma": 1.5, "temperature": 3.0, "watermark": True},
)


def asked(kinds: Sequence[dict[str, Any]], *, speculate: bool) -> list[EngineRequest]:
    """A request of each kind of sampling."""
    return [
        EngineRequest(
            f"r{number}",
            tuple(tiny.prompt(11 + 9 * (number % 3), number % 3)),
            SamplingParams(**{"max_tokens": 24, **options}),
            seed=number,
            speculate=speculate,
        )
        for number, options in enumerate(kinds)
    ]


def test_random_lives(tmp_path: Path) -> None:
    """With drafts and preemption what a sampler learned and what it looked back at are those of the answer alone."""
    tiny.save("llama", tmp_path)
    plain = made(tmp_path)
    truth = {}
    for request in asked(KINDS, speculate=False):
        truth |= run(plain, request)
    together = run(plain, *asked(KINDS, speculate=False))
    plain.close()
    assert together == truth
    known = {key: answer.tokens for key, answer in truth.items()}
    for number, right in enumerate((8, 6, 0)):
        engine = made(tmp_path, Rehearsed(known, right), max_chunk_tokens=(64, 7, 16)[number], kv_blocks=60)
        for turn in range(3):
            check(run(engine, *again(asked(KINDS, speculate=False), turn), dice=random.Random(f"{right}{turn}")), truth)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.drafted_tokens > 60
        engine.close()


def test_steps_ahead_and_preemption_change_nothing(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    truth = {}
    for depth in (0, 1):
        engine = made(tmp_path, depth=depth, kv_blocks=60)
        for turn in range(3):
            answers = run(engine, *asked(KINDS, speculate=False), dice=random.Random(turn) if turn else None)
            truth = truth or answers
            check(answers, truth)
        assert engine.stats().preemptions > 0
        engine.close()


def test_no_two_tokens_appear_twice_together(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    engine = made(tmp_path)
    request = asked(KINDS, speculate=False)[4]
    said = [*request.prompt_ids, *run(engine, request)["r4", 0].tokens]
    pairs = list(itertools.pairwise(said))[len(request.prompt_ids) - 1 :]
    before = list(zip(request.prompt_ids, request.prompt_ids[1:], strict=False))
    assert len(set(pairs)) == len(pairs) and not set(pairs) & set(before)
    engine.close()
