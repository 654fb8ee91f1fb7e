"""Products of one order: engines give the same bits alone and in company; what is said where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.runtime.levels import BATCH_INVARIANT, ROUNDING, guarantee
from tests.engine.test_equality import ask, finish, make_engine
from tests.models import tiny


def test_a_request_has_the_same_bits_alone_and_in_company(device: str, tmp_path: Path) -> None:
    tiny.save("mixtral", tmp_path, num_hidden_layers=1)
    engine, info = make_engine(tmp_path, 64, 0, device=device, kv_cache_dtype="float32", batch_invariant=True)
    assert info.determinism == BATCH_INVARIANT
    prompts = [tuple(tiny.prompt(length, length)) for length in (11, 14, 20)]
    engine.add(ask("0", prompts[0], 3))
    alone = finish(engine)["0"]
    engine.scheduler.cache.tree.clear()
    for number, prompt in enumerate(prompts):
        engine.add(ask(str(number), prompt, 3))
    assert finish(engine)["0"] == alone and len(alone.logprobs) == 3
    engine.close()


def test_the_level_is_told_as_it_is(device: str) -> None:
    for asked, level in ((False, ROUNDING), (True, BATCH_INVARIANT)):
        assert guarantee(resolve_kernels(KernelContext(device, "float32", batch_invariant=asked))) == level


def test_products_of_torch_are_refused() -> None:
    context = KernelContext("cpu", "bfloat16", prefer_reference=True, batch_invariant=True)
    with pytest.raises(ConfigError, match=r"round differently with the number of rows\. .*--batch-invariant out"):
        resolve_kernels(context)
