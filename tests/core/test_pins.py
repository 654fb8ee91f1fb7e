"""Pinned prefixes stay for their time, on the device and below, within their share, and belong to who pinned them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.config.cache_asks import Ask, Pin
from penstock.config.errors import RequestError
from penstock.core.policies import pins
from penstock.core.request import PUBLIC, EngineRequest, FinishReason
from penstock.engine.loop import Engine
from tests.core.harness import SlowMover, expected_tokens, null_engine, request, run

PROMPT = [1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2, 1, 1]  # three blocks of four, and one token


def pinned(engine: Engine, prompt: list[int], name: str = "p", owner: str = "", seconds: float = 60.0) -> None:
    run(engine, replace(request(f"pin {name} {owner}", prompt, max_tokens=1), owner=owner, pin=Pin(name, seconds)))
    engine.scheduler.check_integrity()


def found(engine: Engine, prompt: list[int], owner: str = "", salt: str = "") -> int | None:
    """Tokens that a request finds; its answer is the right one."""
    asked = replace(request("a", prompt, max_tokens=3, cache_salt=salt), owner=owner)
    outputs = run(engine, asked).outputs
    assert [token for output in outputs for token in output.tokens] == expected_tokens(asked, 0)
    engine.scheduler.check_integrity()
    return next(output.cached_tokens for output in outputs if output.cached_tokens is not None)


def filled(engine: Engine, owner: str = "") -> None:
    """Other prompts fill the device several times."""
    for index in range(24):
        found(engine, [10 + index, *PROMPT], owner)


def asked(engine: Engine, kind: str, prompt: list[int] | None = None, owner: str = "", **more: Any) -> dict[str, Any]:
    ask = EngineRequest("q", tuple(prompt or [0]), request("q", [0]).sampling, owner=owner, ask=Ask(kind, **more))
    output = engine.answer(ask)
    assert output.finish_reason is FinishReason.STOP and output.answer is not None
    return output.answer


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
@pytest.mark.parametrize("checkpoints", [None, 8])
def test_what_is_pinned_is_not_evicted(windows: tuple[int | None, ...], checkpoints: int | None) -> None:
    engine = null_engine(windows, blocks=20, checkpoints=checkpoints)
    pinned(engine, PROMPT)
    filled(engine)
    assert found(engine, PROMPT) == 12
    assert asked(engine, "match", PROMPT)["device"] == 12
    engine.scheduler.cache.clear()
    assert found(engine, PROMPT) == 12  # a flush leaves it
    assert asked(engine, "unpin", name="p") == {"deleted": True}
    assert asked(engine, "unpin", name="p") == {"deleted": False}
    engine.scheduler.cache.clear()
    assert found(engine, PROMPT) == 0
    assert engine.stats().blocks_used == 0


def test_a_pin_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(pins, "monotonic", lambda: now[0])
    monkeypatch.setattr("penstock.core.scheduler.monotonic", lambda: now[0])
    monkeypatch.setattr("penstock.core.policies.cache_answers.monotonic", lambda: now[0])
    engine = null_engine(blocks=20)
    pinned(engine, PROMPT, seconds=60.0)
    pinned(engine, [7, *PROMPT], "longer", seconds=90.0)
    now[0] += 59.0
    assert [one["name"] for one in asked(engine, "pins")["pins"]] == ["p", "longer"]
    now[0] += 1.0
    (left,) = asked(engine, "pins")["pins"]
    assert left == {"name": "longer", "tokens": 12, "seconds": 30.0}
    filled(engine)
    assert (found(engine, PROMPT), found(engine, [7, *PROMPT])) == (0, 12)


def test_pins_have_a_share_and_owners_a_share_of_that() -> None:
    engine = null_engine(blocks=33, max_model_len=64)  # 16 may be pinned, 8 by a key
    pinned(engine, PROMPT, "a", "one")
    pinned(engine, [7, *PROMPT], "b", "one")
    for name, prompt, code in (
        ("a", PROMPT, "pin_exists"), ("c", [8, *PROMPT], "pins_full"), ("d", [1, 2], "pin_too_short"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as refused:
            pinned(engine, prompt, name, "one")
        assert refused.value.code == code
    pinned(engine, [8, *PROMPT], "a", "another")
    assert [one["name"] for one in asked(engine, "pins", owner="another")["pins"]] == ["a"]
    assert asked(engine, "pins", owner="nobody") == {"pins": []}
    assert asked(engine, "unpin", owner="nobody", name="a") == {"deleted": False}
    assert found(engine, PROMPT, "another") == 0
    engine.cancel("none")
    with pytest.raises(RequestError, match="nothing can be pinned"):
        pinned(null_engine(caching=False), PROMPT)


def test_two_that_come_at_once_have_not_one_name() -> None:
    engine = null_engine(blocks=60, max_model_len=64)
    engine.add(replace(request("one", PROMPT, max_tokens=1), pin=Pin("p", 60.0)))
    with pytest.raises(RequestError) as refused:
        engine.add(replace(request("two", [7, *PROMPT], max_tokens=1), pin=Pin("p", 90.0)))
    assert refused.value.code == "pin_exists"
    run(engine)
    assert asked(engine, "unpin", name="p") == {"deleted": True}
    engine.scheduler.cache.clear()
    assert engine.stats().blocks_used == 0


def test_what_is_answered_still_fits_beside_a_pin() -> None:
    engine = null_engine(blocks=20, max_model_len=72)
    engine.add(request("long", list(range(1, 33)), max_tokens=36))  # 17 of 19 blocks
    for _ in range(3):
        engine.step()
    with pytest.raises(RequestError, match="would not fit any more") as refused:
        engine.add(replace(request("pin", PROMPT, max_tokens=1), pin=Pin("p", 60.0)))
    assert refused.value.code == "pins_full"
    run(engine)
    pinned(engine, PROMPT)
    with pytest.raises(RequestError):
        engine.add(request("long", list(range(1, 33)), max_tokens=36))
    engine.add(replace(request("gone", [9, *PROMPT], max_tokens=1), pin=Pin("q", 60.0)))
    engine.cancel("gone")
    assert engine.scheduler.cache.pins.reserved(0) == 3


def test_copies_below_stay_too() -> None:
    mover = SlowMover()
    engine = null_engine(blocks=20, mover=mover, places=12)
    pinned(engine, PROMPT)
    for _ in range(4):
        filled(engine)
        while engine.prepare():
            pass
    kept = {node.depth for node, _, _ in engine.scheduler.cache.tree.copies_below() if node.pins}
    assert kept == {4, 8, 12}
    asked(engine, "unpin", name="p")
    for _ in range(4):
        filled(engine)
        while engine.prepare():
            pass
    assert not any(node.pins for node, _, _ in engine.scheduler.cache.tree.copies_below())
    engine.scheduler.cache.transfers.tier.check_integrity()  # type: ignore[attr-defined]


def test_pins_within_each_other_leave_nothing_behind() -> None:
    """What a recurrent layer needs at the end of the shorter one goes with it, whichever ends first."""
    for order in (("short", "long"), ("long", "short")):
        engine = null_engine(blocks=40, checkpoints=8)
        pinned(engine, PROMPT, "short")
        pinned(engine, [*PROMPT, 2, 2, 1, 0, 0, 1, 2], "long")
        for name in order:
            asked(engine, "unpin", name=name)
        filled(engine)
        engine.scheduler.cache.clear()
        engine.scheduler.check_integrity()
        assert engine.stats().blocks_used == 0


def test_a_pinned_state_that_a_failed_step_was_to_keep_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(blocks=40, checkpoints=8)
    engine.add(replace(request("pin", PROMPT, max_tokens=3), pin=Pin("p", 60.0)))
    while not asked(engine, "pins")["pins"]:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "sample", None)
        engine.step()
    assert (found(engine, PROMPT), found(engine, PROMPT)) == (0, 12)
    assert asked(engine, "unpin", name="p") == {"deleted": True}
    engine.scheduler.check_integrity()


def test_a_pin_of_what_everybody_keeps_ends_without_it() -> None:
    engine = null_engine(blocks=40, checkpoints=4)
    run(engine, replace(request("shared", PROMPT[:12], max_tokens=2), owner=PUBLIC))
    pinned(engine, PROMPT)
    assert asked(engine, "unpin", name="p") == {"deleted": True}
    filled(engine)
    assert found(engine, [*PROMPT[:12], 9]) == 12


def test_a_question_changes_nothing() -> None:
    engine = null_engine(blocks=20)
    found(engine, PROMPT, "one", "salt")
    before = engine.stats()
    told = asked(engine, "match", [*PROMPT, 9, 9], owner="one")
    assert (told["device"], told["missed"]) == (0, "first_seen")  # without its salt
    whole = EngineRequest(
        "q", (*PROMPT, 9, 9), request("q", [0]).sampling, cache_salt="salt", owner="one", ask=Ask("match")
    )
    answer = engine.answer(whole).answer
    assert answer is not None
    told = {name: answer[name] for name in ("prompt_tokens", "device", "below", "computed", "missed")}
    assert told == {"prompt_tokens": 15, "device": 13, "below": 0, "computed": 2, "missed": "diverged"}
    assert replace(engine.stats(), plan_seconds=0.0) == replace(before, plan_seconds=0.0)


def test_a_pin_counts_what_a_guided_request_needs_for_both_of_its_sequences() -> None:
    engine = null_engine(blocks=20, vocab_size=3)
    guided = request("g", [1, 2, 0, 1], max_tokens=24, guidance_scale=1.5, negative_prompt_ids=(1,))
    engine.add(guided)
    with pytest.raises(RequestError, match="being answered would not fit"):
        engine.add(replace(request("pin", PROMPT * 2, max_tokens=1), pin=Pin("p", 60.0)))
    collector = run(engine)
    assert collector.tokens["g", 0] == expected_tokens(guided, 0, 3)


@pytest.mark.parametrize("checkpoints", [None, 12])
def test_one_key_leaves_others_room_for_pins(checkpoints: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MOST_PINS", 8)
    engine = null_engine(blocks=40, checkpoints=checkpoints)
    cache = engine.scheduler.cache
    most = 4 if checkpoints is None else int(int((cache.states.pinnable or 0) * pins.SHARE) / 2)
    for index in range(most):
        pinned(engine, PROMPT, str(index), "greedy")
    with pytest.raises(RequestError, match=f"You have {most} .* that a key may have"):
        pinned(engine, PROMPT, "more", "greedy")
    pinned(engine, PROMPT, "p", "other")
    before = cache.pins.reserved(0)
    assert before == len(set(cache.pins.blocks())) == 6, "pins of one prefix share its blocks"
    for index in range(most):
        assert cache.pins.drop("greedy", str(index))
    assert cache.pins.reserved(0) == 3
    assert cache.pins.drop("other", "p") and not cache.pins.reserved(0)
