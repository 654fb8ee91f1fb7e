"""Prompts that are pooled: against transformers, and the same bits whatever the batch, the chunks and the cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.options import EngineOptions
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from tests.models import tiny

LENGTHS = (1, 5, 23, 40, 64)
PROMPTS = [tiny.prompt(length, seed=length) for length in LENGTHS]


def engine(folder: Path, **options: Any) -> Engine:
    settings = {"max_model_len": 64, "kv_blocks": 64, "kv_cache_dtype": "float32", "threads": 1, **options}
    return build_engine(EngineOptions(model=str(folder), **settings))[0]


def pooled(engine: Engine, prompts: Sequence[Sequence[int]], params: PoolingParams) -> list[list[float]]:
    """Results of prompts that run together."""
    for index, prompt in enumerate(prompts):
        engine.add(EngineRequest(f"p{index}", tuple(prompt), SamplingParams(max_tokens=1), pooling=params))
    found: dict[str, list[float]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            if output.finish_reason:
                assert output.pooled is not None and not output.tokens
                found[output.request_id] = array("f", output.pooled).tolist()
    engine.scheduler.check_integrity()
    return [found[f"p{index}"] for index in range(len(prompts))]


def reference_hidden(model: Any, prompt: Sequence[int]) -> Tensor:
    """transformers' final hidden states, [tokens, hidden_size]."""
    with torch.no_grad():
        return model(torch.tensor([list(prompt)]), output_hidden_states=True).hidden_states[-1][0]


def reduced(states: Tensor, kind: PoolingKind) -> Tensor:
    if kind is PoolingKind.MEAN:
        return states.mean(0)
    return {PoolingKind.LAST: states[-1], PoolingKind.CLS: states[0], PoolingKind.ALL: states.flatten()}[kind]


@pytest.mark.parametrize("kind", PoolingKind)
def test_decoders_pool_like_transformers(tmp_path: Path, kind: PoolingKind) -> None:
    model = tiny.save("qwen3", tmp_path, dtype=torch.float32)
    for prompt, result in zip(PROMPTS, pooled(engine(tmp_path), PROMPTS, PoolingParams(kind)), strict=True):
        theirs = reduced(reference_hidden(model, prompt), kind)
        torch.testing.assert_close(torch.tensor(result), theirs, rtol=1e-4, atol=1e-4)
        assert torch.cosine_similarity(torch.tensor(result), theirs, dim=0) >= 0.9999


@pytest.mark.parametrize("kind", PoolingKind)
def test_results_depend_on_nothing_but_the_prompt(tmp_path: Path, kind: PoolingKind) -> None:
    tiny.save("qwen3", tmp_path, dtype=torch.float32)
    params = PoolingParams(kind, normalize=kind is not PoolingKind.ALL)
    alone = [pooled(engine(tmp_path), [prompt], params)[0] for prompt in PROMPTS]
    for options in ({}, {"max_chunk_tokens": 7}, {"max_num_batched_tokens": 16, "depth": 1}, {"kv_blocks": 6}):
        used = engine(tmp_path, **options)
        assert pooled(used, PROMPTS, params) == alone
        hits = used.stats().prefix_hits
        assert pooled(used, PROMPTS, params) == alone
        assert (used.stats().prefix_hits > hits) == (kind is PoolingKind.LAST)


def test_dimensions_are_cut_before_the_length_becomes_one(tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path, dtype=torch.float32)
    used = engine(tmp_path)
    (whole,) = pooled(used, PROMPTS[2:3], PoolingParams())
    (short,) = pooled(used, PROMPTS[2:3], PoolingParams(dimensions=10, normalize=True))
    cut = torch.tensor(whole[:10])
    assert len(whole) == tiny.SIZES["hidden_size"]
    torch.testing.assert_close(torch.tensor(short), cut / cut.norm())


def test_models_saved_without_a_head_embed(tmp_path: Path) -> None:
    model = tiny.make("qwen3", dtype=torch.float32)
    model.model.save_pretrained(tmp_path)
    prompt = PROMPTS[2]
    (result,) = pooled(engine(tmp_path), [prompt], PoolingParams())
    torch.testing.assert_close(torch.tensor(result), reference_hidden(model, prompt)[-1], rtol=1e-4, atol=1e-4)


def test_choices_are_a_softmax_over_their_logits(tmp_path: Path) -> None:
    model = tiny.save("qwen3", tmp_path, dtype=torch.float32)
    params = PoolingParams(choices=(17, 5), activation="softmax")
    for prompt, result in zip(PROMPTS, pooled(engine(tmp_path), PROMPTS, params), strict=True):
        theirs = tiny.reference_logits(model, prompt)[-1][[17, 5]].softmax(0)
        torch.testing.assert_close(torch.tensor(result), theirs, rtol=1e-4, atol=1e-5)
