"""Engines that are told to hold still: what there is ends, waits or stays, what comes waits, answers are the same."""

from __future__ import annotations

import pytest

from penstock.core.policies.pause import Control
from penstock.core.request import EngineOutput, FinishReason
from penstock.engine.driver import EngineDriver
from tests.core.harness import Collector, expected_tokens, null_engine, request


class Heard:
    def __init__(self) -> None:
        self.found = Collector()

    def outputs(self, outputs: list[EngineOutput]) -> None:
        self.found.take(outputs)

    def refused(self, request_id: str, error: object) -> None:
        raise AssertionError(error)

    def paced(self, pace: object) -> None: ...


def rested(driver: EngineDriver, most: int = 500) -> None:
    """Steps until there is nothing to do."""
    while driver.has_work:
        most -= 1
        assert most, "an engine that is paused goes on for ever"
        driver.step()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("control", [Control.ABORT, Control.WAIT, Control.KEEP, Control.RETRACT])
def test_paused_and_gone_on(control: Control, depth: int) -> None:
    engine, heard = null_engine(rows=2, depth=depth), Heard()
    driver = EngineDriver(engine, heard)
    before = [request(f"b{number}", [number, 2, 3], max_tokens=30) for number in range(3)]  # one of them waits
    for one in before:
        driver.submit(one)
    for _ in range(6):
        driver.step()
    assert len(engine.scheduler.running) == 2 and len(engine.scheduler.waiting) == 1
    driver.control(control)
    told = {Control.ABORT: 1, Control.WAIT: 3}.get(control, 2)  # with WAIT the third has its turn before the rest
    assert driver.stats().paused == told
    after = request("after", [9, 8], max_tokens=5)
    driver.submit(after)
    said = {key: list(tokens) for key, tokens in heard.found.tokens.items()}
    rested(driver)
    found = heard.found
    assert not found.tokens.get(("after", 0))
    if control is Control.ABORT:
        assert {found.finished[one.request_id, 0] for one in before} == {FinishReason.CANCELLED}
    elif control is Control.WAIT:
        assert all(found.tokens[one.request_id, 0] == expected_tokens(one) for one in before)
    else:
        assert {key: tokens for key, tokens in found.tokens.items() if tokens} == {k: v for k, v in said.items() if v}
        assert len(engine.scheduler.running) == (2 if control is Control.KEEP else 0)
    engine.scheduler.check_integrity()
    driver.control(Control.RESUME)
    rested(driver)
    assert driver.stats().paused == 0 and found.tokens["after", 0] == expected_tokens(after)
    if control is not Control.ABORT:
        assert all(found.tokens[one.request_id, 0] == expected_tokens(one) for one in before)


def test_one_that_waits_for_its_turn_is_not_forgotten() -> None:
    """Between the step that ends one request and the plan that admits the next nothing runs, and the engine owes it."""
    engine, heard = null_engine(rows=1), Heard()
    driver = EngineDriver(engine, heard)
    asked = [request(f"b{number}", [number, 2], max_tokens=4) for number in range(3)]
    for one in asked:
        driver.submit(one)
    driver.step()
    driver.control(Control.WAIT)
    between = 0
    while driver.has_work:
        stats = driver.stats()
        finished = all((one.request_id, 0) in heard.found.finished for one in asked)
        assert (stats.paused == 1 and not stats.running) == finished
        between += not stats.running and not finished
        driver.step()
    assert between and driver.stats().paused == 1


@pytest.mark.parametrize("between", [Control.KEEP, Control.RETRACT])
@pytest.mark.parametrize("first", [Control.WAIT, Control.ABORT, None])
def test_who_waits_goes_on_waiting_whatever_pause_follows(first: Control | None, between: Control) -> None:
    engine, heard = null_engine(), Heard()
    driver = EngineDriver(engine, heard)
    if first is not None:
        driver.submit(before := request("before", [1, 2], max_tokens=20))
        driver.step()
        driver.control(first)
    else:
        driver.control(between)
    driver.submit(after := request("after", [3, 4], max_tokens=5))
    driver.control(between)
    rested(driver)
    driver.control(Control.WAIT)
    rested(driver)
    assert driver.stats().paused == 1 and not heard.found.tokens.get(("after", 0))
    if first is Control.WAIT:
        assert heard.found.tokens["before", 0] == expected_tokens(before)
    driver.control(Control.RESUME)
    rested(driver)
    assert heard.found.tokens["after", 0] == expected_tokens(after)
    engine.scheduler.check_integrity()


def test_a_client_that_leaves_a_paused_engine_is_forgotten() -> None:
    engine, heard = null_engine(), Heard()
    driver = EngineDriver(engine, heard)
    driver.submit(request("a", [1, 2], max_tokens=20))
    driver.step()
    driver.control(Control.KEEP)
    driver.cancel("a")
    rested(driver)
    assert not engine.scheduler.running
    driver.control(Control.RESUME)
    rested(driver)
    assert heard.found.finished["a", 0] is FinishReason.CANCELLED


def test_flushed_prefixes_are_computed_again() -> None:
    engine, heard = null_engine(), Heard()
    driver = EngineDriver(engine, heard)
    for number, flush in enumerate((False, False, True)):
        if flush:
            driver.control(Control.FLUSH)
        driver.submit(request(f"r{number}", list(range(20)), max_tokens=2))
        rested(driver)
    assert [heard.found.cached(f"r{number}") for number in range(3)] == [0, 19, 0]
