"""The adapters of an engine: read once where there is room, and nobody waits for ever where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.adapters import AdapterUse
from penstock.config.errors import CheckpointError
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.runtime.adapters import AdapterRoom

SIZE = 90  # bytes of an adapter; a room of 200 has two of them


class Slots:
    """A projection's slots: what was put into them."""

    def __init__(self, room: int = 100) -> None:
        self.held: dict[int, Any] = {}
        self.room = room

    def put(self, slot: int, entry: Any) -> None:
        self.room -= 1
        if self.room < 0:
            raise MemoryError
        self.held[slot] = entry

    def clear(self, slot: int) -> None:
        self.held.pop(slot, None)


def use(digest: str) -> AdapterUse:
    return AdapterUse(digest, f"/adapters/{digest}")


def ask(name: str, *digests: str) -> EngineRequest:
    return EngineRequest(name, (1,), SamplingParams(max_tokens=1), adapters=tuple(map(use, digests)))


class Rooms:
    """Makes rooms of two adapters and notes what they read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.made: list[AdapterRoom] = []

    def __call__(self, load: Callable[[AdapterUse], Any] | None = None) -> AdapterRoom:
        room = AdapterRoom(load or self.load, 2, 200)
        self.made.append(room)
        return room

    def load(self, asked: AdapterUse) -> Any:
        self.read.append(asked.digest)
        return ((Slots(), SimpleNamespace(nbytes=SIZE)),)


@pytest.fixture
def rooms() -> Iterator[Rooms]:
    made = Rooms()
    yield made
    for room in made.made:
        room.close()


def placed(room: AdapterRoom, *wanted: tuple[int, AdapterUse]) -> None:
    """Reads what is not in memory, as the gate does, and has slots hold it."""
    uses = tuple(one for _, one in wanted)
    if not room.here(uses):
        room.read(uses)
    for _ in range(100):
        if room.here(uses):
            break
        room.wait(60.0)
        room.ready()
    room.lend(wanted)
    room.place(wanted)


def until_ready(room: AdapterRoom) -> list[tuple[EngineRequest, Any]]:
    """What a room has ready, once there is something."""
    for _ in range(100):
        if found := room.ready():
            return found
        room.wait(60.0)
    raise AssertionError("nothing was ready")


def test_two_adapters_of_a_request_come_together_where_all_slots_are_full(rooms: Rooms) -> None:
    room = rooms()
    placed(room, (1, use("a")), (2, use("b")))
    assert room.add(both := ask("both", "x", "y"))
    assert until_ready(room) == [(both, None)]
    assert not room.add(both), "they are here"
    assert rooms.read == ["a", "b", "x", "y"]
    room.place(((1, use("x")), (2, use("y"))))
    assert rooms.read == ["a", "b", "x", "y"], "none of them was read twice"


@pytest.mark.parametrize("error", [OSError("stale"), OverflowError("too large"), MemoryError(), RuntimeError("no")])
def test_whatever_reading_raises_is_a_refusal(rooms: Rooms, error: Exception) -> None:
    def fail(asked: AdapterUse) -> Any:
        raise error

    room = rooms(fail)
    assert room.add(bad := ask("bad", "x"))
    ((request, refusal),) = until_ready(room)
    assert request is bad and "the adapter x cannot be read" in str(refusal)
    with pytest.raises(CheckpointError, match="the adapter x cannot be read"):
        placed(room, (1, use("x")))
    with pytest.raises(CheckpointError, match="the adapter y is not in memory"):
        room.place(((1, use("y")),))


@pytest.mark.parametrize("path", ["/adapters/secret/x", "/adapters/secret/x/", "/adapters//secret/./x"])
def test_no_path_is_told(rooms: Rooms, path: str) -> None:
    def fail(asked: AdapterUse) -> Any:
        raise CheckpointError(f"{Path(asked.path) / 'adapter_config.json'} of {asked.path} is damaged.")

    room = rooms(fail)
    assert room.add(replace(ask("bad"), adapters=(AdapterUse("x", path),)))
    ((_, refusal),) = until_ready(room)
    assert refusal is not None and "secret" not in str(refusal), str(refusal)


def test_what_nobody_waits_for_any_more_is_not_read(rooms: Rooms) -> None:
    """Nor does it stay in memory beyond what there is room for."""
    begun, go = Event(), Event()

    def held(asked: AdapterUse) -> Any:
        begun.set()
        assert go.wait(60.0)
        return rooms.load(asked)

    room = rooms(held)
    for number in range(50):
        assert room.add(ask(str(number), f"x{number}"))
    assert room.add(ask("stays", "x7"))
    assert begun.wait(60.0)
    assert all(room.cancel(str(number)) for number in range(50)) and not room.cancel("7")
    assert room.ready() == []
    go.set()
    ((request, refusal),) = until_ready(room)
    assert (request.request_id, refusal) == ("stays", None)
    assert rooms.read == ["x0", "x7"] and not room.pending


def test_a_room_works_until_what_was_read_for_somebody_who_left_is_put_away(rooms: Rooms) -> None:
    room = rooms()
    assert room.add(ask("left", "x"))
    assert room.cancel("left")
    for _ in range(100):
        if not room.pending:
            break
        room.wait(60.0)
        assert room.ready() == []
    assert not room.pending


def test_a_slot_that_was_half_filled_holds_no_adapter(rooms: Rooms) -> None:
    """Whoever has it next gets all of its own adapter, and nothing of those two."""
    queries, keys, values = Slots(), Slots(room=1), Slots()
    parts = {"old": (queries, values), "new": (queries, keys), "fails": (queries, keys), "last": (values,)}

    def load(asked: AdapterUse) -> Any:
        return tuple((slots, SimpleNamespace(nbytes=1, of=asked.digest)) for slots in parts[asked.digest])

    room = rooms(load)
    placed(room, (1, use("old")))
    placed(room, (1, use("new")))
    assert (queries.held[1].of, keys.held[1].of, values.held) == ("new", "new", {})
    placed(room, (1, use("old")))
    with pytest.raises(MemoryError):
        placed(room, (1, use("fails")))
    assert queries.held[1].of == "fails"
    placed(room, (1, use("old")))
    assert (queries.held[1].of, keys.held, values.held[1].of) == ("old", {}, "old")
    with pytest.raises(MemoryError):
        placed(room, (1, use("fails")))
    placed(room, (1, use("last")))
    assert (queries.held, keys.held, values.held[1].of) == ({}, {}, "last")


def test_what_a_slot_was_lent_for_stays(rooms: Rooms) -> None:
    """However many others come before the step that fills it."""
    room = rooms()
    room.read((use("a"),))
    while not room.here((use("a"),)):
        room.wait(60.0)
        room.ready()
    room.lend(((1, use("a")),))
    for number in range(5):
        assert room.add(ask(f"{number}", f"x{number}"))
        until_ready(room)
    room.place(((1, use("a")),))
    assert rooms.read.count("a") == 1
