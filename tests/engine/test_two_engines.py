"""Engines of one process share threads and an instruction set: a later one agrees with the first, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.config.errors import CheckpointError, ConfigError
from penstock.kernels.cpu import native

PROMPT = "Good evening, a table for"
needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")
SETTINGS: dict[str, Any] = {"max_model_len": 128, "kv_blocks": 32}


def answered(llm: LLM) -> Any:
    """Tokens and log-probabilities, bit by bit."""
    given = {"max_tokens": 16, "temperature": 1.0, "seed": 3, "logprobs": 4}
    completion = llm.generate(PROMPT, **given)[0].outputs[0]
    return completion.token_ids, completion.logprobs


@needs_native
@pytest.mark.parametrize("other", [{"threads": 3}, {"isa": "generic"}, {"isa": "generic", "threads": 3}], ids=str)
def test_an_engine_that_would_change_anothers_answers_is_refused(other: dict[str, Any]) -> None:
    isa = native.usable_isas()[0]
    with LLM(threads=2, isa=isa, **SETTINGS) as first:
        before = answered(first)
        name = next(iter(other))
        with pytest.raises(ConfigError, match=f"{name} is {other[name]!r}, but another engine of this process"):
            LLM(**other, **SETTINGS)
        assert native.isa() == isa
        assert answered(first) == before


@needs_native
def test_an_engine_that_leaves_it_open_agrees_with_the_first() -> None:
    with LLM(threads=1, isa="generic", **SETTINGS) as first:
        before = answered(first)
        with LLM(**SETTINGS) as second, LLM(threads=1, isa="generic", **SETTINGS) as third:
            assert native.isa() == "generic"
            assert answered(second) == answered(third) == before
            with ThreadPoolExecutor(3) as pool:
                together = list(pool.map(answered, (first, second, third) * 2))
            assert together == [before] * 6
        assert answered(first) == before


@needs_native
@pytest.mark.parametrize("end", [LLM.close, lambda llm: None], ids=["closed", "dropped"])
def test_when_the_first_is_gone_another_may_choose(end: Callable[[LLM], None]) -> None:
    first = LLM(threads=1, isa="generic", **SETTINGS)
    end(first)
    del first
    with LLM(threads=2, isa=native.usable_isas()[0], **SETTINGS) as second:
        assert native.isa() == native.usable_isas()[0]
        assert answered(second)


def test_an_engine_that_cannot_start_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path), threads=3, **SETTINGS)
    with LLM(threads=1, **SETTINGS) as llm:
        assert answered(llm)
