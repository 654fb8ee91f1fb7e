"""An engine in a thread: round trips, refusals, cancellation, stalls, failures, residue."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from penstock.config import limits
from penstock.config.errors import ConfigError, EngineDeadError, OverloadedError, RequestError
from penstock.core.protocol import Runner, SlotResult, StepResult
from penstock.core.request import FinishReason
from penstock.engine.api import EngineState
from penstock.engine.thread_client import ThreadClient
from tests.engine.checks import check_refusal, check_residue, until_empty
from tests.engine.support import Slow, Wrapped, null_engine, read, request, tokens_of


async def test_round_trip(null_client: ThreadClient) -> None:
    assert null_client.state is EngineState.READY
    assert null_client.info.vocab_size == 4096
    outputs = await read(null_client.submit(request(max_tokens=20)))
    assert outputs[0].tokens == ()
    assert outputs[0].finish_reason is None
    assert len(tokens_of(outputs)) == 20
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert [output.cached_tokens for output in outputs if output.cached_tokens is not None] == [0]
    assert (await null_client.stats()).generated_tokens == 20


async def test_same_tokens_alone_and_among_others(null_client: ThreadClient) -> None:
    wanted = request(prompt=40, max_tokens=30)
    alone = tokens_of(await read(null_client.submit(wanted)))
    others = [read(null_client.submit(request(max_tokens=25))) for _ in range(20)]
    again, *_ = await asyncio.gather(read(null_client.submit(wanted)), *others)
    assert tokens_of(again) == alone


async def test_sequences_end_one_by_one(null_client: ThreadClient) -> None:
    outputs = await read(null_client.submit(request(n=4, max_tokens=6, temperature=1.0)))
    assert sorted(output.sequence for output in outputs if output.finish_reason) == [0, 1, 2, 3]
    assert len({tuple(tokens_of(outputs, sequence)) for sequence in range(4)}) == 4


async def test_refusal_carries_kind_param_and_code(null_client: ThreadClient) -> None:
    await check_refusal(null_client)


async def test_cancel_ends_sequences_and_frees_blocks(slow_client: ThreadClient) -> None:
    running = request(n=3, max_tokens=1000)
    stream = slow_client.submit(running)
    assert (await anext(stream)).tokens == ()
    slow_client.cancel(running.request_id)
    outputs = await read(stream)
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.CANCELLED] * 3
    assert (await slow_client.stats()).blocks_used == 0
    slow_client.cancel("nobody")


async def test_aclose_cancels(slow_client: ThreadClient) -> None:
    stream = slow_client.submit(request(max_tokens=2000))
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await until_empty(slow_client)
    stats = await slow_client.stats()
    assert (stats.running, stats.blocks_used, stats.cancelled) == (0, 0, 1)


async def test_aclose_wakes_a_waiting_reader(slow_client: ThreadClient) -> None:
    stream = slow_client.submit(request(max_tokens=2000))
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0.01)
    await stream.aclose()
    await asyncio.wait_for(reader, 60)


async def test_cancelled_reader_loses_nothing(null_client: ThreadClient) -> None:
    stream = null_client.submit(request(max_tokens=1500))
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        step.cancel()
        try:
            outputs.append(await step)
        except asyncio.CancelledError:
            outputs.append(await anext(stream))
    assert len(tokens_of(outputs)) == 1500


async def test_id_in_use_is_refused(slow_client: ThreadClient) -> None:
    stream = slow_client.submit(request(request_id="twin", max_tokens=1000))
    with pytest.raises(RequestError, match="twin") as refused:
        slow_client.submit(request(request_id="twin"))
    assert refused.value.param == "request_id"
    await stream.aclose()
    await until_empty(slow_client)
    assert len(tokens_of(await read(slow_client.submit(request(request_id="twin"))))) == 8


async def test_queue_limits(null_client: ThreadClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_REQUESTS", 3)
    streams = [null_client.submit(request(max_tokens=4)) for _ in range(3)]
    with pytest.raises(OverloadedError, match="3 requests"):
        null_client.submit(request())
    for stream in streams:
        await read(stream)
    monkeypatch.setattr(limits, "MAX_QUEUED_TOKENS", 20)
    first = null_client.submit(request(prompt=15))
    with pytest.raises(OverloadedError, match="15 prompt tokens") as refused:
        null_client.submit(request(prompt=6))
    assert refused.value.status == 429
    await read(first)
    await read(null_client.submit(request(prompt=6)))


async def test_unread_outputs_are_compacted_without_loss(
    null_client: ThreadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STREAM_BUFFER_EVENTS", 16)
    wanted = request(n=2, max_tokens=300, temperature=1.0)
    expected = await read(null_client.submit(wanted))
    stream = null_client.submit(wanted)
    while stream.open:
        await asyncio.sleep(0.01)
        assert len(stream._events) <= 16
    outputs = await read(stream)
    assert len(outputs) <= 16
    for sequence in (0, 1):
        assert tokens_of(outputs, sequence) == tokens_of(expected, sequence)
    assert next(output.cached_tokens for output in outputs if output.sequence == 0) is not None


async def test_reader_that_stalls_is_cancelled(slow_client: ThreadClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_STALL_TIMEOUT_S", 0.0)
    stream = slow_client.submit(request(max_tokens=2000))
    while stream.open:
        await asyncio.sleep(0.01)
    outputs = await read(stream)
    assert outputs[-1].finish_reason is FinishReason.CANCELLED
    assert len(tokens_of(outputs)) < 2000


async def test_a_thousand_requests_leave_no_residue(null_client: ThreadClient) -> None:
    await check_residue(null_client)


async def test_idle_costs_nothing(null_client: ThreadClient) -> None:
    await read(null_client.submit(request()))
    before = time.process_time()
    await asyncio.sleep(1)
    assert time.process_time() - before < 0.5


class Faulty(Wrapped):
    """A runner that raises in chosen samples."""

    def __init__(self, runner: Runner, bad: frozenset[int]) -> None:
        super().__init__(runner)
        self._bad = bad

    def sample(self, step: int) -> StepResult:
        result = super().sample(step)
        if step in self._bad:
            raise ArithmeticError("/secret/path")
        return result


class FaultyRows(Wrapped):
    """A runner whose every row fails."""

    def sample(self, step: int) -> StepResult:
        rows = super().sample(step).results
        return StepResult(step, tuple(SlotResult(row.slot, error="logits are not finite") for row in rows))


async def test_failed_step_ends_its_requests_only() -> None:
    client = ThreadClient(lambda: null_engine(wrap=lambda runner: Faulty(runner, frozenset({5}))))
    await client.start()
    outputs = await read(client.submit(request(max_tokens=50)))
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert outputs[-1].error
    assert "secret" not in outputs[-1].error
    assert len(tokens_of(await read(client.submit(request(max_tokens=50))))) == 50
    assert (await client.stats()).blocks_used == 0
    await client.close()


class Prepares(Wrapped):
    """A runner that prepares in three pieces, and notes before which steps."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.steps, self.pieces = 0, list[int]()

    def sample(self, step: int) -> StepResult:
        self.steps += 1
        return super().sample(step)

    def prepare(self) -> bool:
        self.pieces.append(self.steps)
        return len(self.pieces) < 3


async def test_a_runner_prepares_while_nothing_runs() -> None:
    made: list[Prepares] = []

    def wrap(runner: Runner) -> Runner:
        made.append(Prepares(runner))
        return made[0]

    client = ThreadClient(lambda: null_engine(wrap=wrap))
    await client.start()
    assert not made[0].pieces
    await read(client.submit(request(max_tokens=9)))
    async with asyncio.timeout(60):
        while len(made[0].pieces) < 3:
            await asyncio.sleep(0.001)
    await client.stats()
    await client.stats()
    assert made[0].pieces == [9, 9, 9]
    await client.close()


async def test_runner_that_always_fails_is_the_end() -> None:
    client = ThreadClient(lambda: null_engine(wrap=lambda runner: Faulty(runner, frozenset(range(2, 1000)))))
    await client.start()
    for _ in range(3):
        assert client.state is EngineState.READY
        outputs = await read(client.submit(request(max_tokens=50)))
        assert outputs[-1].finish_reason is FinishReason.ERROR
    async with asyncio.timeout(60):
        while client.state is not EngineState.STOPPED:
            await asyncio.sleep(0.01)
    await client.close()


async def test_failed_rows_are_not_the_end() -> None:
    client = ThreadClient(lambda: null_engine(wrap=FaultyRows))
    await client.start()
    for _ in range(5):
        outputs = await read(client.submit(request(max_tokens=50)))
        assert outputs[-1].error == "logits are not finite"
    assert client.state is EngineState.READY
    await client.close()


async def test_engine_that_raises_ends_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, info = null_engine(wrap=lambda runner: Slow(runner, 0.001))
    client = ThreadClient(lambda: (engine, info))
    await client.start()
    stream = client.submit(request(n=2, max_tokens=2000))
    await anext(stream)
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    outputs = await read(stream)
    assert sorted(output.sequence for output in outputs if output.finish_reason is FinishReason.ERROR) == [0, 1]
    assert client.state is EngineState.STOPPED
    with pytest.raises(EngineDeadError):
        client.submit(request())
    await client.stats()
    await client.close()


async def test_factory_error_is_raised_from_start() -> None:
    def factory() -> Any:
        raise ConfigError("no such thing")

    client = ThreadClient(factory)
    with pytest.raises(ConfigError, match="no such thing"):
        await client.start()
    assert client.state is EngineState.STOPPED
    with pytest.raises(EngineDeadError):
        _ = client.info
    await client.close()


async def test_close_while_starting() -> None:
    client = ThreadClient(null_engine)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0)
    await client.close()
    await starting
    assert client.state is EngineState.STOPPED
    with pytest.raises(EngineDeadError):
        client.submit(request())


async def test_close_ends_streams_and_thread() -> None:
    client = ThreadClient(lambda: null_engine(wrap=lambda runner: Slow(runner, 0.002)))
    await client.start()
    stream = client.submit(request(max_tokens=2000))
    await anext(stream)
    await client.close()
    outputs = await read(stream)
    assert outputs[-1].finish_reason is FinishReason.ERROR
    await client.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-engine"]
    with pytest.raises(EngineDeadError):
        client.submit(request())


def test_needs_no_server_dependency() -> None:
    code = (
        "import sys, penstock.engine.thread_client, penstock.llm;"
        "print([m for m in ('zmq','fastapi','typer','torch','uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
