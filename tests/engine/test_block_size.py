"""An answer does not depend on `--block-size`: tokens and log-probabilities are the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.kernels.cpu import native
from tests.engine.test_equality import GREEDY, SAMPLED, Answer, ask, finish, make_engine
from tests.models import tiny

SIZES = (8, 16, 24, 32, 64)

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def answers(model: Path, prompt: tuple[int, ...], size: int, kv_type: str) -> dict[str, Answer]:
    """A long prompt, cut into chunks, and a short one beside it, of which one is sampled."""
    engine, _ = make_engine(model, 100, 0, kv_cache_dtype=kv_type, block_size=size, kv_blocks=1600 // size)
    engine.add(ask("long", prompt, how=GREEDY))
    engine.add(ask("short", prompt[:19], how=SAMPLED))
    found = finish(engine)
    engine.close()
    return found


@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "int8"])
def test_full_attention(shared_data: Path, kv_type: str) -> None:
    prompt = tuple(1 + (7 * place * place) % 500 for place in range(300))
    model = shared_data / "models" / "stories260K" / "hf"
    found = {size: answers(model, prompt, size, kv_type) for size in SIZES}
    assert all(other == found[16] for other in found.values())
    assert len(found[16]["long"].logprobs) == GREEDY.max_tokens


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3"])
def test_windows_and_latents(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    found = {size: answers(tmp_path, tiny.prompt(90), size, "float32") for size in SIZES}
    assert all(other == found[16] for other in found.values())
