"""Token ids that do not exist never reach kernels, whichever way a request comes in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.config.constraint import Thinking
from penstock.config.errors import ParameterError, RequestError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineOutput, EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.driver import EngineDriver
from penstock.engine.loop import Engine
from penstock.engine.so_far import SoFar
from tests.models import tiny

SAMPLING = SamplingParams(max_tokens=3, temperature=0.0)
BEYOND = (-1, -(2**63), 2**31, 2**62)  # beside the first id that there is not


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[tuple[Engine, int]]:
    options = EngineOptions(
        model=str(model), threads=1, max_num_seqs=4, kv_blocks=40, max_num_batched_tokens=16, pack_cache="off"
    )
    made, info = build_engine(options)
    yield made, info.vocab_size
    made.close()


def asked(*ids: int, **fields: Any) -> EngineRequest:
    return EngineRequest("asked", ids, SAMPLING, **fields)


def test_an_engine_refuses_prompts_with_ids_beyond_the_vocabulary(engine: tuple[Engine, int]) -> None:
    made, size = engine
    for wrong in (size, *BEYOND):
        for prompt in ((wrong,), (1, wrong, 2), (*range(5), wrong)):
            with pytest.raises(ParameterError, match=f"allowed: token ids from 0 to {size - 1}"):
                made.add(asked(*prompt))
            assert not made.has_work


def test_the_first_and_the_last_id_are_served(engine: tuple[Engine, int]) -> None:
    made, size = engine
    made.add(asked(0, size - 1))
    said: list[EngineOutput] = []
    while made.has_work:
        said += made.step()
    assert sum(len(output.tokens) for output in said) == 3
    assert not any(output.error for output in said)


def test_an_engine_refuses_answers_so_far_and_forced_tokens_beyond_it(engine: tuple[Engine, int]) -> None:
    made, size = engine
    for wrong in (size, *BEYOND):
        with pytest.raises(ParameterError):
            made.add(asked(1, 2), SoFar(((3, wrong),)))
        with pytest.raises(ParameterError):
            made.add(asked(1, 2, thinking=Thinking((3, wrong), budget=1)))
        assert not made.has_work
    made.add(replace(asked(1, 2), sampling=replace(SAMPLING, n=2)), SoFar((None, (size - 1,))))
    while made.has_work:
        assert not any(output.error for output in made.step())


def test_a_driver_tells_its_sink_and_goes_on(engine: tuple[Engine, int]) -> None:
    made, size = engine
    refused: list[RequestError] = []

    class Kept:
        def outputs(self, outputs: list[EngineOutput]) -> None: ...

        def paced(self, pace: Any) -> None: ...

        def refused(self, request_id: str, error: RequestError) -> None:
            refused.append(error)

    EngineDriver(made, Kept()).submit(asked(size))
    assert [error.code for error in refused] == ["invalid_value"]
    assert not made.has_work


def test_llm_refuses_them() -> None:
    with LLM(threads=1, max_num_seqs=4, kv_blocks=200) as llm:
        size = llm.info.vocab_size
        for wrong in (size, *BEYOND):
            with pytest.raises(ParameterError, match="token ids from 0 to"):
                llm.generate([[1, wrong]], max_tokens=2)
        (answer,) = llm.generate([[0, size - 1]], max_tokens=2, ignore_eos=True)
        assert answer.outputs[0].token_ids
