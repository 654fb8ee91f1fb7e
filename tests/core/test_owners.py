"""What owners share: nothing but pinned public prefixes, whatever the cache is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.config.adapters import AdapterUse
from penstock.config.errors import RequestError
from penstock.core.request import PUBLIC, EngineRequest
from penstock.engine.loop import Engine
from penstock.runtime.adapters import AdapterRoom
from tests.core.harness import expected_tokens, null_engine, request, run

SYSTEM = tuple(range(16))
CACHES = [((None,), None), ((None, 6), None), ((5,), None), ((None,), 6), ((None, 6), 6)]  # windows, checkpoints


def owned(name: str, prompt: Sequence[int], owner: str, **fields: int) -> EngineRequest:
    return replace(request(name, prompt, **fields), owner=owner)


def cached(engine: Engine, asked: EngineRequest) -> int:
    """Runs a request alone; what it found in the cache."""
    collector = run(engine, asked)
    assert collector.tokens[asked.request_id, 0] == expected_tokens(asked)
    return collector.cached(asked.request_id)


def pinned_engine(*prompts: Sequence[int], windows: tuple[int | None, ...] = (None,), checkpoints: int | None = None,
                  **options: int) -> Engine:  # fmt: skip
    engine = null_engine(windows, checkpoints=checkpoints, **options)
    for number, prompt in enumerate(prompts):
        run(engine, owned(f"pinned {number}", prompt, PUBLIC, max_tokens=2))
    return engine


@pytest.mark.parametrize(("windows", "checkpoints"), CACHES)
def test_owners_share_nothing(windows: tuple[int | None, ...], checkpoints: int | None) -> None:
    engine = null_engine(windows, checkpoints=checkpoints)
    prompt = (*SYSTEM, 30, 31, 32)
    assert cached(engine, owned("a", prompt, "one")) == 0
    assert cached(engine, owned("b", prompt, "one")) >= 16
    assert cached(engine, owned("c", prompt, "two")) == 0
    assert engine.stats().miss_reasons == (("first_seen", 2),) or checkpoints is not None


def test_owners_do_not_wait_for_each_other() -> None:
    engine = null_engine()
    run(engine, owned("a", SYSTEM, "one"), owned("b", SYSTEM, "two"))
    assert engine.stats().held_back == ()
    run(engine, owned("c", (*SYSTEM, 40), "three"), owned("d", (*SYSTEM, 40), "three"))
    assert dict(engine.stats().held_back)["prefix_in_flight"] > 0


@pytest.mark.parametrize(("windows", "checkpoints"), CACHES)
def test_a_pinned_prompt_is_everybodys_and_what_follows_is_not(
    windows: tuple[int | None, ...], checkpoints: int | None
) -> None:
    engine = pinned_engine(SYSTEM, windows=windows, checkpoints=checkpoints)
    mine = (*SYSTEM, 30, 31, 32, 33, 34)
    for owner in ("one", "two", ""):
        assert cached(engine, owned(f"{owner} first", mine, owner)) == 16
        assert cached(engine, owned(f"{owner} again", mine, owner)) == 20
        assert cached(engine, owned(f"{owner} other", (*SYSTEM, 30, 31, 40), owner)) == (16 if checkpoints else 18)
    assert cached(engine, owned("elsewhere", (40, *SYSTEM), "one")) == 0


@pytest.mark.parametrize(("windows", "checkpoints"), CACHES)
def test_a_pinned_prompt_outlives_all_pressure(windows: tuple[int | None, ...], checkpoints: int | None) -> None:
    engine = pinned_engine(SYSTEM, windows=windows, checkpoints=checkpoints, blocks=16)
    for turn in range(12):
        other = [owned(f"{turn}/{i}", [20 + turn, i, *range(20)], f"owner {i}") for i in range(3)]
        run(engine, *other)
        engine.scheduler.cache.clear()
        engine.scheduler.check_integrity()
        assert cached(engine, owned(f"{turn}", (*SYSTEM, turn), f"owner {turn}")) == 16


def test_what_leaves_a_pinned_prompt_early_finds_its_beginning() -> None:
    engine = pinned_engine(SYSTEM)
    assert cached(engine, owned("a", (*SYSTEM[:10], 40, 41), "one")) == 10
    assert cached(engine, owned("b", (*SYSTEM[:10], 40, 41), "two")) == 10
    assert cached(engine, owned("c", (*SYSTEM[:10], 40, 41), "two")) == 11
    assert cached(engine, owned("d", SYSTEM, "one")) == 15


@pytest.mark.parametrize("windows", [(None, 6), (5,)])
def test_no_owner_changes_what_others_find_of_a_pinned_prompt(windows: tuple[int | None, ...]) -> None:
    """Beginnings of it that a sliding window has passed are gone, and come back for who computes them alone."""
    engine = pinned_engine(SYSTEM, windows=windows)
    engine.scheduler.cache.clear()
    early = (*SYSTEM[:8], 40, 41, 42)
    found = cached(engine, owned("a", early, "one"))
    assert [cached(engine, owned(owner, early, owner)) for owner in ("two", "three")] == [found, found]


def test_no_owner_leaves_a_state_at_a_public_node() -> None:
    engine = pinned_engine(SYSTEM, checkpoints=6)
    early = (*SYSTEM[:8], 40, 41, 42)
    assert [cached(engine, owned(owner, early, owner)) for owner in ("one", "two", "three")] == [0, 0, 0]


def test_a_pinned_state_outlives_a_failure() -> None:
    engine = pinned_engine(SYSTEM, checkpoints=4)
    engine.scheduler.cache.forget_unfinished()
    engine.scheduler.check_integrity()
    assert cached(engine, owned("a", (*SYSTEM, 40), "one")) == 16


def test_several_pinned_prompts_that_begin_alike() -> None:
    engine = pinned_engine(SYSTEM, (*SYSTEM[:8], 30, 31, 32, 33), (*SYSTEM, *range(20, 24)))
    assert cached(engine, owned("a", (*SYSTEM, 40), "one")) == 16
    assert cached(engine, owned("b", (*SYSTEM[:8], 30, 31, 32, 33, 5), "one")) == 12
    assert cached(engine, owned("c", (*SYSTEM, *range(20, 24), 9), "two")) == 20
    assert engine.stats().blocks_used == 4 + 1 + 1


def test_adapters_have_public_prefixes_of_their_own() -> None:
    engine = pinned_engine(SYSTEM)
    engine.adapters = AdapterRoom(lambda use: (), 1, 1)
    engine.adapters.read(uses := (AdapterUse("d", "here"),))
    while not engine.adapters.here(uses):
        engine.adapters.wait(60.0)
        engine.adapters.ready()
    engine.adapters.place(((1, uses[0]),))
    assert cached(engine, replace(owned("a", (*SYSTEM, 40), "one"), adapters=(AdapterUse("d", "here"),))) == 0
    assert cached(engine, replace(owned("b", (*SYSTEM, 40), "one"), cache_salt="s")) == 16
    moved = replace(owned("c", (*SYSTEM, 40), "one"), adapters=(AdapterUse("d", "there"),))
    assert cached(engine, moved) == 16, "the adapter's content names the space, not where it lies"
    half = replace(moved, request_id="d", adapters=(AdapterUse("d", "here", 0.5),))
    assert cached(engine, half) == 0, "how much of it counts is a part of that"


def test_what_pinned_prompts_leave_no_room_for_is_refused_and_not_queued_for_ever() -> None:
    engine = pinned_engine(SYSTEM, blocks=9)
    engine.add(request("fits", range(20, 30), max_tokens=6))
    with pytest.raises(RequestError, match="the KV cache holds 16 tokens"):
        engine.add(request("too long", range(20, 30), max_tokens=8))


def test_without_a_prefix_cache_owners_are_no_matter() -> None:
    engine = null_engine(caching=False)
    assert cached(engine, owned("a", SYSTEM, "one")) == cached(engine, owned("b", SYSTEM, "one")) == 0
    assert engine.stats().blocks_cached == 0
