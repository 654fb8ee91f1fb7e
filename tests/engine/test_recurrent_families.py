"""Engines of recurrent families, from folder to answers: prefixes are had, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from tests.models import tiny

FAMILIES = ("lfm2-moe", "qwen3-next", "qwen3_5", "falcon-mamba", "mamba2", "granite-hybrid", "falcon-h1", "jamba")
PROMPT = tuple(tiny.prompt(50))


def answer(engine: Engine, name: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    engine.add(EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=8)))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens += output.tokens
        engine.scheduler.check_integrity()
    return tuple(tokens)


def made(folder: Path, *, caching: bool) -> Engine:
    options = EngineOptions(
        model=str(folder), max_num_seqs=4, kv_cache_memory=10_000_000, enable_prefix_caching=caching
    )
    return build_engine(options)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hits(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    plain = made(tmp_path, caching=False)
    first = answer(plain, "alone", PROMPT)
    turn = (*PROMPT, *first, *tiny.prompt(5, 1))
    second = answer(plain, "turn alone", turn)
    assert plain.stats().prefix_hits == 0
    plain.close()
    engine = made(tmp_path, caching=True)
    assert [answer(engine, name, PROMPT) for name in ("a", "b")] == [first, first]
    assert engine.stats().prefix_hits == 48
    assert answer(engine, "turn", turn) == second
    assert engine.stats().prefix_hits == 48 + len(PROMPT) + len(first) - 1
    engine.close()
