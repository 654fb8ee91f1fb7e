"""Guided answers: those of transformers; the same bits alone, in company, in chunks, preempted, under a grammar."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from tests.engine.test_drafts import check, made, run
from tests.models import tiny

PROMPT, NEGATIVE = tuple(tiny.prompt(23, 1)), tuple(tiny.prompt(9, 2))
KINDS: tuple[dict[str, Any], ...] = (
    {"guidance_scale": 1.5, "temperature": 0.0, "logprobs": 2},
    {"guidance_scale": 3.0, "n": 2, "top_p": 0.9, "repetition_penalty": 1.2},
    {"guidance_scale": 0.0, "negative_prompt_ids": (5,), "min_p": 0.02},
    {"guidance_scale": 2.0, "mirostat": 2, "mirostat_tau": 3.0, "prompt_logprobs": 0},
    {"temperature": 0.0},
    {"guidance_scale": 1.2, "dry_multiplier": 0.8, "dry_allowed_length": 1, "bad_words_ids": ((3,),), "min_tokens": 9},
)


def asked() -> list[EngineRequest]:
    return [
        EngineRequest(
            f"r{number}",
            tuple(tiny.prompt(11 + 9 * (number % 3), number % 3)),
            SamplingParams(**{"max_tokens": 20, "negative_prompt_ids": NEGATIVE, **options}),
            stop_ids=(7,) if number == 1 else (),
            seed=number,
        )
        for number, options in enumerate(KINDS)
    ]


def later(turn: int) -> list[EngineRequest]:
    return [replace(one, request_id=f"{one.request_id}#{turn}") for one in asked()]


@pytest.mark.parametrize("scale", [1.5, 4.0, 0.5])
def test_the_answer_is_that_of_transformers(tmp_path: Path, scale: float) -> None:
    model = tiny.save("llama", tmp_path)
    with torch.inference_mode():
        truth = model.generate(
            torch.tensor([PROMPT]), guidance_scale=scale, negative_prompt_ids=torch.tensor([NEGATIVE]),
            max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0,
        )[0, len(PROMPT) :].tolist()  # fmt: skip
    engine = made(tmp_path)
    params = SamplingParams(max_tokens=20, temperature=0.0, guidance_scale=scale, negative_prompt_ids=NEGATIVE)
    assert run(engine, EngineRequest("g", PROMPT, params))["g", 0].tokens == truth
    plain = run(engine, EngineRequest("p", PROMPT, replace(params, guidance_scale=1.0)))["p", 0].tokens
    assert plain != truth or scale == 0.5
    engine.close()


def test_a_scale_of_one_is_no_guidance(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    engine = made(tmp_path)
    params = SamplingParams(max_tokens=20, logprobs=3)
    bare = run(engine, EngineRequest("g", PROMPT, params, seed=4))
    named = replace(params, guidance_scale=1.0, negative_prompt_ids=NEGATIVE)
    assert run(engine, EngineRequest("g", PROMPT, named, seed=4)) == bare
    engine.close()


@pytest.mark.parametrize("family", ["llama", "qwen3-next", "gpt-oss"])
def test_the_same_bits_in_any_company(tmp_path: Path, family: str) -> None:
    tiny.save(family, tmp_path)
    engine = made(tmp_path)
    truth: dict[tuple[str, int], Any] = {}
    for one in asked():
        truth |= run(engine, one)
    engine.close()
    for number in range(3):
        engine = made(tmp_path, max_chunk_tokens=(64, 7, 16)[number], kv_blocks=70, depth=number % 2)
        check(run(engine, *later(0)), truth)
        check(run(engine, *later(1), dice=random.Random(number)), truth)
        assert engine.stats().preemptions > 0
        engine.close()
