"""A model's own first layers draft what they would say alone, in the memory that they have already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.errors import ConfigError
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.runtime.runner import ModelRunner
from tests.engine.test_drafts import run
from tests.models import tiny
from tests.runtime.drafters.test_heads import Watched
from tests.runtime.drafters.test_mtp_layouts import DRAFTS, made

BLOCK = 4


def early_exit(target: Any, layers: int, tokens: Sequence[int]) -> list[int]:
    """What transformers' model says with so many of its layers."""
    kept = target.model.layers
    target.model.layers, found = kept[:layers], list(tokens)
    with torch.no_grad():
        for _ in range(DRAFTS):
            found.append(int(target(torch.tensor(found)[None], use_cache=False).logits[0, -1].argmax()))
    target.model.layers = kept
    return found[len(tokens) :]


@pytest.mark.parametrize("layers", [1, 2])
def test_drafts_are_those_of_the_first_layers(layers: int, tmp_path: Path) -> None:
    """As many as the sequence's last block has places for: the last draft is not computed."""
    target = tiny.save("llama", tmp_path)
    engine = made(tmp_path, "self", layers=layers)
    assert isinstance(engine.runner, ModelRunner)
    drafting = engine.runner._drafting
    watch = Watched(drafting._drafter, told=False)
    drafting.use(watch)  # type: ignore[arg-type]  # the rest is the drafter's
    params = SamplingParams(temperature=0.0, max_tokens=20)
    requests = [EngineRequest(f"r{one}", tuple(range(3, 12 + 3 * one)), params, speculate=DRAFTS) for one in range(3)]
    answers = run(engine, *requests)
    stats = engine.stats()
    engine.close()
    assert stats.drafter_failures == 0
    compared = 0
    for request in requests:
        tokens = [*request.prompt_ids, *answers[request.request_id, 0].tokens]
        for known in range(len(request.prompt_ids) + 1, len(tokens)):
            places = -known % BLOCK + 1 if known % BLOCK != 1 else 0  # a new block comes with the next step
            drafts = watch.made.get((request.request_id, known), ())
            assert list(drafts) == early_exit(target, layers, tokens[:known])[:places], known
            compared += len(drafts)
    assert compared > 80


@pytest.mark.parametrize(
    ("family", "layers", "told"),
    [
        ("llama", 3, "has 3 layers, of which 3 were asked for"),
        ("gemma3", 2, "among the first 2 that do not keep every position"),
        ("falcon-mamba", 1, "among the first 1 that do not keep every position"),
    ],
)
def test_what_cannot_is_told(family: str, layers: int, told: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(told)):
        made(tmp_path, "self", layers=layers)
