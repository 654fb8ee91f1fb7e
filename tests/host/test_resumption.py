"""Requests outlive their engine: they go on in the next one, and the one that engines die of ends alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.constraint import Thinking
from penstock.config.errors import EngineDeadError, OverloadedError, RequestError
from penstock.config.media import MediaSpan
from penstock.config.options import EngineOptions
from penstock.core.policies.pace import Pace
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.engine import messages
from penstock.engine import streams as streams_module
from penstock.engine.api import EngineState
from penstock.engine.streams import OutputStream, StreamTable
from penstock.host import process_client as client_module
from penstock.host import resumption
from penstock.host.engine_line import EngineLine
from penstock.host.process_client import ProcessClient
from penstock.host.resumption import CANNOT_GO_ON, ENDED_ENGINES, MOST_UNSEEN, TRIAL_TOKENS, Resumption
from tests.engine.support import POISON, read, request, tokens_of


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts do not wait."""
    monkeypatch.setattr(client_module, "FIRST_RESTART_DELAY_S", 0.01)


def test_reasoning_that_is_ended_ends_in_the_next_engine_too() -> None:
    line, frames = EngineLine("c"), list[bytes]()
    line.open(frames.append)
    line.submit(replace(asked(1), thinking=Thinking((5,), budget=90)))
    line.submit(asked(2))
    for name in ("it1", "it2", "nobody"):
        line.end_reasoning(name)
    (sent,) = [told for told in map(messages.decode_command, frames) if isinstance(told, messages.EndReasoning)]
    stream = line.streams.get(sent.request_id)
    assert stream is not None and stream.request.thinking == Thinking((5,), budget=0)
    line.cut(frozenset())
    frames.clear()
    line.end_reasoning("it1")
    assert not frames
    line.open(frames.append)
    again = [told for told in map(messages.decode_command, frames) if isinstance(told, messages.Submit)]
    assert again[0].request.thinking == Thinking((5,), budget=0)


async def until(condition: Callable[[], object]) -> None:
    """Waits until it is true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def kill(client: ProcessClient) -> None:
    """Ends the engine's process as a crash would; nothing if it has ended already."""
    if client._child is not None:
        client._child._kill()


def serves(client: ProcessClient) -> bool:
    """Whether there is an engine, in which all requests have gone on."""
    return client.state is EngineState.READY and not client._line.resumption.goes_on


async def further(client: ProcessClient, streams: list[OutputStream], tokens: int) -> None:
    """Returns when each has so many tokens more than now, or its end."""
    before = [stream.tokens for stream in streams]
    await until(
        lambda: all(
            stream.tokens > so_far + tokens or not client._line.streams.is_live(stream)
            for stream, so_far in zip(streams, before, strict=True)
        )
    )


def whole(outputs: list[EngineOutput], sequence: int) -> tuple[list[int], list[object], list[object], object]:
    """All that a reader was told of a sequence."""
    own = [output for output in outputs if output.sequence == sequence]
    assert sum(output.cached_tokens is not None for output in own) == 1
    return (
        [token for output in own for token in output.tokens],
        [entry for output in own for entry in output.logprobs],
        [entry for output in own for entry in output.prompt_logprobs],
        own[-1].finish_reason,
    )


def asked(number: int, **sampling: object) -> EngineRequest:
    scored = {"prompt_logprobs": 0} if number % 3 == 0 else {}
    given = {"n": 1 + number % 2, "max_tokens": 120, "temperature": 0.8, "logprobs": 1, **scored, **sampling}
    return replace(request(40 + number, **given), request_id=f"it{number}", seed=number)  # type: ignore[arg-type]


async def test_readers_see_a_pause_and_nothing_else(client: ProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far they are when engines die: even those that have their answer by then."""
    requests = [asked(number, max_tokens=800) for number in range(8)]
    truth = await asyncio.gather(*(read(client.submit(one)) for one in requests))
    resumption, back = client._line.resumption, list[int]()
    died = resumption.died

    def counted(worked_on: Set[str] | None, *, alone: bool = True) -> None:
        died(worked_on, alone=alone)
        back.append(sum(stream.admitted for stream in resumption._held.values()))

    monkeypatch.setattr(resumption, "died", counted)
    streams = [client.submit(one) for one in requests]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    for restarts in (1, 2):
        await further(client, streams, 10)
        kill(client)
        await until(lambda restarts=restarts: serves(client) and client._line.restarts == restarts)
    again = await asyncio.gather(*readers)
    for number, one in enumerate(requests):
        for sequence in range(one.sampling.n):
            assert whole(again[number], sequence) == whole(truth[number], sequence)
    stats = await client.stats()
    assert (stats.restarts, stats.resumed, len(back)) == (2, sum(back), 2)
    line = client._line.streams
    assert (stats.running, stats.waiting, len(line), line.waiting.requests) == (0, 0, 0, 0)


async def test_what_was_not_admitted_and_what_waits_is_sent_again(client: ProcessClient) -> None:
    """Of a hundred sequences 64 have a slot; some requests may not even have been read when the engine dies."""
    requests = [asked(number, n=1, max_tokens=60) for number in range(100)]
    truth = await asyncio.gather(*(read(client.submit(one)) for one in requests))
    streams = [client.submit(one) for one in requests[:90]]
    await until(lambda: sum(stream.tokens > 0 for stream in streams) > 30)
    streams += [client.submit(one) for one in requests[90:]]
    kill(client)
    again = await asyncio.gather(*map(read, streams))
    assert [whole(one, 0) for one in again] == [whole(one, 0) for one in truth]


@pytest.mark.parametrize("position", [0, 60])
async def test_a_request_that_kills_engines_ends_alone(folder: Path, position: int) -> None:
    """In its prompt, before it says anything, or after some tokens; the others, begun or waiting, are not blamed."""
    client = ProcessClient(EngineOptions(model="deadly"))
    await client.start()
    requests = [asked(number) for number in range(60)]
    truth = await asyncio.gather(*(read(client.submit(one)) for one in requests))
    poisonous = replace(asked(1), request_id="poison", prompt_ids=(POISON, position, *range(40)))
    streams = [client.submit(one) for one in (*requests[:8], poisonous, *requests[8:])]
    again = await asyncio.gather(*map(read, streams))
    poisoned = again.pop(8)
    ends = [output for output in poisoned if output.finish_reason is not None]
    assert [(end.finish_reason, end.error) for end in ends] == [(FinishReason.ERROR, ENDED_ENGINES)] * 2
    assert (len(tokens_of(poisoned)) > 10) == (position > 0)
    for number, one in enumerate(requests):
        for sequence in range(one.sampling.n):
            assert whole(again[number], sequence) == whole(truth[number], sequence)
    assert (await client.stats()).restarts == 2
    await client.close()


async def test_a_device_that_fails_ends_no_request_that_gets_on(folder: Path) -> None:
    """Each engine's device fails after 20 steps: three requests of 45 tokens are done by several of them."""
    client = ProcessClient(EngineOptions(model="lost"))
    await client.start()
    ends = await asyncio.gather(*(read(client.submit(request(max_tokens=45))) for _ in range(3)))
    assert {outputs[-1].finish_reason for outputs in ends} == {FinishReason.LENGTH}
    assert [len(tokens_of(outputs)) for outputs in ends] == [45] * 3
    assert (await client.stats()).restarts >= 2
    await client.close()


async def test_no_request_outlives_engines_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "MOST_DEATHS", 3)
    client = ProcessClient(EngineOptions(model="lost"))
    await client.start()
    outputs = await read(client.submit(request(max_tokens=1000)))
    assert (outputs[-1].finish_reason, outputs[-1].error) == (FinishReason.ERROR, ENDED_ENGINES)
    assert len(tokens_of(outputs)) > 3 * 15
    await until(lambda: client.state is EngineState.READY)
    assert (await client.stats()).restarts == 3
    await client.close()


async def test_who_leaves_meanwhile_does_not_come_back(client: ProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_RESTART_DELAY_S", 1.0)
    streams = [client.submit(asked(number, n=1, max_tokens=1900)) for number in range(8)]
    await until(lambda: min(stream.tokens for stream in streams) > 5)
    await streams[0].aclose()
    kill(client)
    await streams[1].aclose()
    await until(lambda: client.state is EngineState.RESTARTING)
    await streams[2].aclose()
    client.cancel("it3")
    cancelled = await read(streams[3])
    assert cancelled[-1].finish_reason is FinishReason.CANCELLED
    assert {stream.request.request_id for stream in client._line.streams.live()} == {"it4", "it5", "it6", "it7"}
    await until(lambda: client.state is EngineState.READY)
    for stream in streams[4:6]:  # of which one at least is held back yet
        await stream.aclose()
    first = client.submit(asked(0, n=1, max_tokens=4))
    assert len(tokens_of(await read(first))) == 4  # nobody has this id any more
    stats = await client.stats()
    assert stats.cancelled <= 2
    for stream in streams[6:]:
        await stream.aclose()
    await until(lambda: not len(client._line.streams))
    assert client._line.resumption._held == {}


async def test_no_engine_any_more_ends_all(
    client: ProcessClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_START_FAILURES", 2)
    streams = [client.submit(asked(number, n=1, max_tokens=1900)) for number in range(4)]
    await until(lambda: min(stream.tokens for stream in streams) > 5)
    (folder / "broken").touch()
    kill(client)
    for outputs in await asyncio.gather(*map(read, streams)):
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert outputs[-1].error == "The engine stopped and could not be started again; its log says why."
    assert client.state is EngineState.STOPPED


async def test_nobody_waits_for_an_engine_that_nobody_watches(
    client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(worked_on: object) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr(client._line.resumption, "died", broken)
    stream = client.submit(asked(1, max_tokens=1900))
    await until(lambda: stream.tokens > 5)
    kill(client)
    assert "could not be started again" in str(await client.given_up())
    assert [output.error is not None for output in await read(stream)][-1]
    assert client.state is EngineState.STOPPED


async def test_closing_meanwhile_ends_all(client: ProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = client.submit(asked(1, max_tokens=1900))
    await until(lambda: stream.tokens > 5)
    monkeypatch.setattr(client_module, "FIRST_RESTART_DELAY_S", 60.0)
    kill(client)
    await until(lambda: client.state is EngineState.RESTARTING)
    with pytest.raises(EngineDeadError, match="restarted"):
        client.submit(request())
    await client.close()
    assert [output.error for output in await read(stream) if output.error] == ["The engine was closed."] * 2


# -- the order in which they come back, without engines --------------------------------------------------------------


class Table:
    """A table of streams, and what was sent of it."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.streams = StreamTable(lambda request_id: None)
        self.resumption = Resumption(self.streams, lambda stream: self.sent.append(stream.request.request_id))

    def open(self, name: str) -> OutputStream:
        stream = self.streams.open(request(request_id=name, max_tokens=100))
        if not self.resumption.hold(stream):
            self.sent.append(name)
        return stream

    def tell(self, name: str, tokens: int, reason: FinishReason | None = None) -> None:
        self.streams.deliver([EngineOutput(name, 0, tuple(range(tokens)), finish_reason=reason, cached_tokens=0)])
        self.resumption.go_on()

    def die(self, *worked_on: str) -> list[str]:
        """The engine dies and another is there; what is sent to it at once."""
        self.sent.clear()
        self.resumption.died(set(worked_on))
        assert self.sent == []
        self.resumption.go_on()
        return self.sent


async def test_they_come_back_one_at_a_time_and_the_others_behind_them() -> None:
    table = Table()
    for name in "abcdef":
        table.open(name)
    for name in "bd":
        table.tell(name, 5)
    assert table.die("b", "d", "e") == ["b"]
    table.open("new")
    table.tell("b", TRIAL_TOKENS - 1)
    assert table.sent == ["b"]
    table.tell("b", 1)
    assert table.sent == ["b", "d"]
    table.tell("d", 0, FinishReason.STOP)
    assert table.sent == ["b", "d", "e"]
    table.tell("e", TRIAL_TOKENS)
    assert table.sent == ["b", "d", "e", "a", "c", "f", "new"]
    table.open("last")
    assert table.sent[-1] == "last"


async def test_only_the_one_on_trial_is_blamed() -> None:
    table = Table()
    streams = {name: table.open(name) for name in "abcd"}
    assert table.die("a", "b", "c") == ["a"]
    table.tell("a", TRIAL_TOKENS)
    assert table.sent == ["a", "b"]
    assert table.die("a", "b") == ["a"]
    assert [output.error for output in await read(streams["b"])] == [ENDED_ENGINES]
    assert sorted(stream.request.request_id for stream in table.streams.live()) == ["a", "c", "d"]


async def test_one_on_trial_that_was_not_begun_is_not_blamed() -> None:
    table = Table()
    table.open("a")
    table.open("b")
    table.die("a")
    assert table.die() == ["a"]
    assert len(table.streams) == 2


async def test_a_damaged_record_accuses_all_and_ends_none() -> None:
    table = Table()
    for name in "abc":
        table.open(name)
    table.resumption.died(None)
    table.resumption.go_on()
    assert table.sent == ["a", "b", "c", "a"]
    assert len(table.streams) == 3
    table.resumption.died(None)
    assert len(table.streams) == 3


async def test_one_that_engines_die_of_before_they_begin_it_is_ended() -> None:
    table = Table()
    innocent, deadly = table.open("a"), table.open("b")
    for _ in range(MOST_UNSEEN):
        assert "a" in table.die("a")
        table.tell("a", TRIAL_TOKENS)
    assert table.sent[-1] == "b"  # by itself, for that is what it is tried for now
    table.die("a")
    assert [output.error for output in await read(deadly)][-1] == ENDED_ENGINES
    assert table.streams.is_live(innocent)


async def test_one_that_cannot_be_sent_does_not_keep_the_others() -> None:
    table = Table()
    table.open("a")
    table.open("b")
    send = table.resumption._send

    def refusing(stream: OutputStream) -> None:
        if stream.request.request_id == "a":
            table.streams.end(stream, FinishReason.ERROR, CANNOT_GO_ON)
        else:
            send(stream)

    table.resumption._send = refusing
    assert table.die("a") == ["b"]
    table.open("new")
    assert table.sent[-1] == "new"


async def test_what_has_arrays_beside_it_cannot_go_on() -> None:
    table = Table()
    medium = replace(request(request_id="m"), media=(MediaSpan("digest", 1, 2),))
    stream = table.streams.open(medium)
    assert table.die("m") == []
    assert [output.error for output in await read(stream)] == [CANNOT_GO_ON]


async def test_a_refusal_of_what_had_been_admitted_is_an_error_of_its_stream() -> None:
    table = Table()
    stream, fresh = table.open("a"), table.open("b")
    table.tell("a", 5)
    for name in "ab":
        table.streams.refuse(name, RequestError("no."))
    assert [output.error for output in await read(stream)] == [None, "no."]
    with pytest.raises(RequestError, match="no"):
        await read(fresh)


async def test_what_comes_back_waits_again_and_counts_once() -> None:
    """Its work is in the way of new calls, as that of requests that have not begun is."""
    table = Table()
    waiting = table.streams.waiting
    for name in "abc":
        table.open(name)
    prompt = waiting.tokens // 3
    for name in "ab":
        table.tell(name, 5)
    assert (waiting.requests, waiting.tokens) == (1, prompt)
    table.die("a", "b")
    assert (waiting.requests, waiting.tokens) == (3, 3 * prompt)
    table.resumption.died(None)  # again, before any has begun: nothing is counted twice
    table.resumption.go_on()
    assert (waiting.requests, waiting.tokens) == (3, 3 * prompt)
    table.tell("a", TRIAL_TOKENS)
    assert waiting.requests == 2
    table.tell("b", TRIAL_TOKENS, FinishReason.STOP)
    table.streams.fail_all("no.")
    assert (waiting.requests, waiting.tokens, waiting.seconds()) == (0, 0, 0.0)


async def test_new_calls_are_refused_while_too_much_comes_back() -> None:
    table = Table()
    table.streams = StreamTable(lambda request_id: None, max_queue_seconds=1.0)
    table.resumption = Resumption(table.streams, lambda stream: table.sent.append(stream.request.request_id))
    table.streams.waiting.pace = Pace(step=0.0, prompt=0.001, output=0.1, rows=1.0, budget=1000)
    table.open("a")
    table.tell("a", 5)
    table.streams.waiting.check_room("")
    table.die("a")
    with pytest.raises(OverloadedError, match="s of work wait already, at most 1 s may"):
        table.streams.waiting.check_room("")
    table.tell("a", TRIAL_TOKENS)
    table.streams.waiting.check_room("")


async def test_time_in_the_queue_is_from_the_first_arrival_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(streams_module, "monotonic", lambda: now[0])
    table = Table()
    stream, undisturbed = table.open("a"), table.open("b")
    told = EngineOutput("b", 0, (1,), finish_reason=FinishReason.STOP, cached_tokens=0, queue_seconds=0.25)
    table.streams.deliver([told])
    assert (await read(undisturbed))[0].queue_seconds == 0.25
    now[0] = 107.0
    table.die("a")
    table.streams.deliver([told._replace(request_id="a")])
    assert (await read(stream))[0].queue_seconds == 7.25


async def test_what_was_cancelled_as_its_engine_died_does_not_come_back() -> None:
    """Whether that engine had read it or not."""
    line, sent = EngineLine(), list[bytes]()
    line.open(sent.append)
    streams = [line.submit(request(request_id=name)) for name in "ab"]
    line.cancel("a")
    line.cut(frozenset("ab"))
    assert [output.finish_reason for output in await read(streams[0])] == [FinishReason.CANCELLED]
    sent.clear()
    line.open(sent.append)
    assert [messages.decode_command(frame).request.request_id for frame in sent] == ["b"]  # type: ignore[union-attr]
    line.end("no.")
