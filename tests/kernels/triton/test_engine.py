"""Whole engines on kernels of Triton: their greedy tokens are those of the CPU's engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.engine.loop import Engine
from tests.engine.test_equality import Answer, ask, finish, make_engine
from tests.kernels.triton.test_device import OF_RANKS
from tests.models import tiny

# Soft caps, windows, sinks, chunks, head norms, biases, slopes, latent attention, experts: a pair of runs each.
FAMILIES = {
    "llama": 1, "gemma2": 2, "gpt-oss": 2, "qwen3": 1, "olmo2": 1, "qwen2": 1, "mpt": 1, "deepseek-v2": 2, "mixtral": 1,
    "gpt-neox": 1,
}  # fmt: skip
"""Each with so many layers, as few as have all its kinds."""
RECURRENT = {"qwen3-next": 1, "mamba2": 1}
NEW_TOKENS = 4


def answers(engine: Engine, prompts: list[tuple[int, ...]]) -> tuple[list[list[int]], int]:
    """Greedy tokens of all prompts together, and how often one was preempted."""
    engine.scheduler.cache.clear()
    before = engine.stats().preemptions
    for number, prompt in enumerate(prompts):
        engine.add(ask(str(number), prompt, NEW_TOKENS))
    found: dict[str, Answer] = finish(engine)
    return [found[str(number)].tokens for number in range(len(prompts))], engine.stats().preemptions - before


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_greedy_tokens(device: str, family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path, num_hidden_layers=(FAMILIES | RECURRENT)[family])
    dice = random.Random(family)
    chunk, block = dice.choice((7, 16, 64)), dice.choice((4, 8, 16))
    about = {"block_size": block, "kv_cache_dtype": "float32"}
    ours, info = make_engine(tmp_path, chunk, 1, device=device, **about)
    served = {decision.name: decision.value for decision in info.kernels}
    assert {name for name, value in served.items() if not value.startswith("triton")} == {
        "dequantize (at load)"
    } | OF_RANKS
    theirs, _ = make_engine(tmp_path, chunk, 0, device="cpu", **about)
    for run in range(2 if family in FAMILIES else 1):
        prompts = [tuple(tiny.prompt(dice.randrange(1, 24), 10 * run + n)) for n in range(2)]
        assert answers(ours, prompts)[0] == answers(theirs, prompts)[0]
    ours.close()
    theirs.close()
