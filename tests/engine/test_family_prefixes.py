"""Every family answers to the bit alike where its prompt is found in the cache, whole or in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.kernels.cpu import native
from tests.engine.test_equality import ask, finish, make_engine
from tests.models import tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
PROMPT = tuple(tiny.prompt(44, 5))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_prefix_hits(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    engine, _ = make_engine(tmp_path, 16, 0, block_size=8)
    answers = []
    for warm in ((), (*PROMPT[:35], 5, 6, 7), PROMPT):
        engine.scheduler.cache.clear()
        if warm:
            engine.add(ask("warm", warm, 1))
            finish(engine)
        before = engine.stats().prefix_hits
        engine.add(ask("it", PROMPT, 4))
        answers.append(finish(engine)["it"])
        assert (engine.stats().prefix_hits > before) == bool(warm)
    assert answers[0] == answers[1] == answers[2]
    engine.close()
