"""Products of one order: engines give the same bits alone and in company; what is said where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.startup.levels import ROUNDING, STRICT, guarantee
from tests.engine.test_equality import Answer, ask, finish, make_engine
from tests.models import tiny


def test_a_request_has_the_same_bits_in_any_company_and_chunks(device: str, tmp_path: Path) -> None:
    tiny.save("mixtral", tmp_path, num_hidden_layers=1)
    prompts = [tuple(tiny.prompt(length, length)) for length in (22, 14, 20)]
    answers: list[Answer] = []
    for chunk, company in ((64, (0, 2)), (7, (0,))):
        settings = {"device": device, "kv_cache_dtype": "float32", "batch_invariant": True, "block_size": 8}
        engine, info = make_engine(tmp_path, chunk, 0, **settings)
        assert info.determinism == STRICT
        for mates in company:
            engine.scheduler.cache.clear()
            for number, prompt in enumerate(prompts[: 1 + mates]):
                engine.add(ask(str(number), prompt, 3))
            answers.append(finish(engine)["0"])
        engine.add(ask("0", prompts[0], 3))  # what is cached leaves few tokens to compute
        answers.append(finish(engine)["0"])
        engine.close()
    assert len(answers[0].logprobs) == 3 and all(answer == answers[0] for answer in answers)


def test_the_level_is_told_as_it_is(device: str) -> None:
    for asked, level in ((False, ROUNDING), (True, STRICT)):
        assert guarantee(resolve_kernels(KernelContext(device, "float32", batch_invariant=asked))) == level


def test_products_of_torch_are_refused() -> None:
    context = KernelContext("cpu", "bfloat16", prefer_reference=True, batch_invariant=True)
    with pytest.raises(ConfigError, match=r"round differently with the number of rows\. .*--batch-invariant out"):
        resolve_kernels(context)
