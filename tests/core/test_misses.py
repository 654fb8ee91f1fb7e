"""Every request is told why no more of its prompt was found, by what its own owner had and nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.core.kv.node import Namespace
from penstock.core.kv.radix_tree import RadixTree
from penstock.core.request import EngineRequest
from penstock.engine.loop import Engine
from tests.core.harness import SlowMover, null_engine, request, run

PROMPT = [1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2, 1, 1]  # three blocks of four, and one token


def told(engine: Engine, prompt: list[int], salt: str = "", owner: str = "", **more: Any) -> tuple[str, int | None]:
    """Why a prompt missed, and how many tokens were found."""
    asked: EngineRequest = replace(request("a", prompt, cache_salt=salt, max_tokens=2, **more), owner=owner)
    outputs = run(engine, asked).outputs
    first = next(output for output in outputs if output.cached_tokens is not None)
    assert not any(output.missed for output in outputs if output is not first)
    return first.missed, first.cached_tokens


def filled(engine: Engine) -> None:
    """Other prompts fill the device."""
    for index in range(9):
        told(engine, [10 + index, *PROMPT])


def test_what_was_not_there_before() -> None:
    engine = null_engine(blocks=16)
    assert told(engine, PROMPT) == ("first_seen", 0)
    assert told(engine, PROMPT) == ("", 12)
    assert told(engine, [*PROMPT[:6], 7, 7, 7]) == ("diverged", 6)
    assert told(engine, PROMPT, prompt_logprobs=1) == ("not_reusable", 0)
    assert told(engine, [3]) == ("", 0)  # its last token is computed in any case
    filled(engine)
    assert told(engine, PROMPT)[0] == "evicted"
    assert dict(engine.stats().miss_reasons)["not_reusable"] == 1
    assert told(null_engine(caching=False), PROMPT) == ("off", 0)


def test_what_others_had_is_nobodys_business() -> None:
    engine = null_engine(blocks=64)
    told(engine, PROMPT, "salt", "key")
    for salt, owner in (("", "key"), ("salt", ""), ("salt", "another"), ("tlas", "key")):
        assert told(engine, PROMPT, salt, owner) == ("first_seen", 0)
    assert told(engine, PROMPT, "salt", "key") == ("", 12)


def test_an_owner_hears_that_it_had_a_prompt_with_other_adapters() -> None:
    engine = null_engine(blocks=64)
    tree: RadixTree = engine.scheduler.cache.tree
    told(engine, PROMPT, "salt", "key")
    mine, other = Namespace("adapter*1.0", ("salt", "key")), Namespace("adapter*1.0", ("salt", "another"))
    assert tree.match(mine, PROMPT, 12).reason == "other_adapters"
    assert tree.match(other, PROMPT, 12).reason == "first_seen"
    uncached = null_engine(caching=False, blocks=64)
    uncached.add(request("r1", PROMPT))
    uncached.step()
    assert told(uncached, PROMPT) == ("off", 0)


@pytest.mark.parametrize(("fate", "reason", "found"), [((0, 0, 0), "partial_block", 8), ((16, 0, 0), "load_failed", 0)])
def test_what_lies_below(fate: tuple[int, int, int], reason: str, found: int) -> None:
    mover = SlowMover()
    engine = null_engine(blocks=16, mover=mover, places=160)
    prompt = PROMPT[:11]  # two blocks and three tokens, the last of which is always computed
    told(engine, prompt)
    filled(engine)
    mover.fates = fate
    assert told(engine, prompt) == (reason, found)
    assert dict(engine.stats().miss_reasons)[reason] == 1


def test_computing_may_be_sooner_done_than_loading() -> None:
    engine = null_engine(blocks=16, mover=SlowMover(), places=160)
    told(engine, PROMPT)
    filled(engine)
    assert told(engine, PROMPT) == ("", 12)  # a load, by which its cost is known
    filled(engine)
    engine.scheduler.cache.transfers.tier.seconds_for = lambda tokens: 0.0
    assert told(engine, PROMPT)[0] == "declined"
