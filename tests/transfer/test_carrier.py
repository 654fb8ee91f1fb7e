"""Who carries blocks: each transfer ends once, whole or not, and nothing is written that nobody wants any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.core.kv.node import Namespace
from penstock.core.policies.bounded_tier import Entry
from penstock.core.protocol import CacheOp, CacheOpKind
from penstock.runtime.kv_memory import KVMemory
from penstock.startup.restart import ArrayCaches
from penstock.transfer.carrier import Carrier
from penstock.transfer.disk import DiskStore
from penstock.transfer.pieces import Bytes, DevicePieces, Pieces, pieces_of
from penstock.transfer.store import RamBefore, RamStore, StoreError, always

DEADLINE_S = 60.0
SPECS = (
    CacheSpec(CacheKind.FULL, 2, 16, 16), CacheSpec(CacheKind.SLIDING, 1, 16, 16, window=9),
    CacheSpec(CacheKind.STATE, state=((3, 4), (5,))), CacheSpec(CacheKind.LATENT, 1, 32, 16),
)  # fmt: skip


class GatedStore(RamStore):
    """A store that waits, or fails, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()
        self.gate.set()
        self.reached = Event()
        self.fails: type[Exception] | None = None

    def _pass(self) -> None:
        self.reached.set()
        assert self.gate.wait(DEADLINE_S)
        if self.fails is not None:
            raise self.fails("told to fail")

    def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Callable[[], bool] = always) -> None:
        self._pass()
        super().write(place, entry, parts, settled)

    def read(self, place: int, entry: Entry) -> Bytes:
        self._pass()
        return super().read(place, entry)


def memory_of(seed: int) -> KVMemory:
    memory = KVMemory(ArrayCaches(), SPECS, (6, 6, 6), 8, kv_types=("float32",) * 4, device=None, state_slots=6)
    rng = np.random.default_rng(seed)
    for group in range(memory.num_groups):
        for index in range(6):
            for piece in (array[index] for array in memory.arrays(group)):
                piece.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, piece.nbytes, np.uint8)
    return memory


def of_tensors(memory: KVMemory) -> Pieces:
    """As those of a device, of the same bytes."""
    groups = [[torch.from_numpy(array) for array in memory.arrays(group)] for group in range(memory.num_groups)]
    return DevicePieces(groups, memory.num_groups - 1)


def content(memory: KVMemory, group: int, index: int) -> bytes:
    return b"".join(array[index].tobytes() for array in memory.arrays(group))


def save(transfer: int, group: int, block: int, place: int) -> CacheOp:
    return CacheOp(CacheOpKind.SAVE, group, block, 0, 8, transfer, place)


def load(transfer: int, group: int, block: int, place: int) -> CacheOp:
    return CacheOp(CacheOpKind.LOAD, group, 0, block, 8, transfer, place)


def ended(carrier: Carrier, count: int) -> dict[int, bool]:
    """Transfers as they end, and whether each did what it should."""
    found: dict[int, bool] = {}
    until = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < until
        now = carrier.ended(0.01)
        assert not found.keys() & set(now.finished) and set(now.failed) <= set(now.finished)
        found |= {transfer: transfer not in now.failed for transfer in now.finished}
    return found


def described(store: Any, count: int = 20, digest: bytes = b"") -> None:
    for place in range(count):
        store.describe(place, Entry(place % 4, digest or bytes([place] * 16), b"", Namespace("", None), ()))


Carried = tuple[KVMemory, GatedStore, Carrier]


@pytest.fixture(params=[False, True], ids=["host", "device"])
def carried(request: pytest.FixtureRequest) -> Iterator[Carried]:
    """Memory, a store that knows of twenty places, and a thread between them."""
    memory, store = memory_of(1), GatedStore()
    described(store)
    carrier = Carrier(of_tensors(memory) if request.param else pieces_of(memory, None), store, threads=1)
    yield memory, store, carrier
    store.gate.set()
    carrier.close()


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("layered", [False, True])
def test_blocks_of_every_group_come_back_as_they_went(layered: bool, tensors: bool) -> None:
    memory = memory_of(1)
    store = RamBefore(RamStore(), 5000) if layered else RamStore()
    described(store)
    pieces = of_tensors(memory) if tensors else pieces_of(memory, None)
    assert pieces.sizes == pieces_of(memory, None).sizes
    carrier = Carrier(pieces, store)
    before = [content(memory, place % 4, 1 + place // 4) for place in range(8)]
    for place in range(8):
        carrier.start(save(place, place % 4, 1 + place // 4, place))
    assert ended(carrier, 8) == dict.fromkeys(range(8), True)
    for place in range(8):
        carrier.start(load(10 + place, place % 4, 4 + place // 4, place))
    assert ended(carrier, 8) == dict.fromkeys(range(10, 18), True)
    assert [content(memory, place % 4, 4 + place // 4) for place in range(8)] == before
    assert not carrier.ended().finished
    carrier.close()


def test_blocks_that_are_moved_together_fail_one_by_one() -> None:
    """Of a device, which gets what is whole of a batch; what was given up meanwhile stays as it is."""
    memory, store = memory_of(11), GatedStore()
    described(store)
    carrier = Carrier(of_tensors(memory), store, threads=1)
    for place in (0, 4, 8):
        carrier.start(save(place, 0, place // 4 + 1, place))
    ended(carrier, 3)
    before = [content(memory, 0, block) for block in range(6)]
    store.gate.clear()
    for transfer, (place, block) in enumerate(((0, 3), (12, 4), (4, 5), (8, 0))):  # nothing was kept at 12
        carrier.start(load(transfer, 0, block, place))
    until = time.monotonic() + DEADLINE_S
    while 0 in vars(carrier)["_waiting"]:
        assert time.monotonic() < until
    carrier.start(CacheOp(CacheOpKind.CANCEL, 0, 0, 3, 0, 3))
    store.gate.set()
    assert ended(carrier, 4) == {0: True, 1: False, 2: True, 3: True}
    after = [before[0], before[1], before[2], before[1], before[4], before[2]]
    assert [content(memory, 0, block) for block in range(6)] == after
    carrier.close()


def test_a_state_is_copied_as_it_was_when_it_was_asked_for(carried: Carried) -> None:
    memory, store, carrier = carried
    before = content(memory, 3, 1)
    store.gate.clear()
    carrier.start(save(1, 3, 1, 3))
    for array in memory.arrays(3):
        array[1] = 0
    store.gate.set()
    ended(carrier, 1)
    carrier.start(load(2, 3, 2, 3))
    ended(carrier, 1)
    assert content(memory, 3, 2) == before


@pytest.mark.parametrize("error", [StoreError, OSError, ValueError])
def test_what_fails_is_told_and_changes_nothing(error: type[Exception], carried: Carried) -> None:
    memory, store, carrier = carried
    carrier.start(save(1, 0, 1, 0))
    ended(carrier, 1)
    store.fails = error
    before = content(memory, 0, 2)
    carrier.start(load(2, 0, 2, 0))
    carrier.start(save(3, 0, 1, 4))
    assert ended(carrier, 2) == {2: False, 3: False}
    assert content(memory, 0, 2) == before
    store.fails = None
    carrier.start(load(4, 0, 2, 0))
    assert ended(carrier, 1) == {4: True}


def test_another_block_at_a_place_is_not_taken() -> None:
    memory, store = memory_of(4), RamStore()
    described(store)
    carrier = Carrier(pieces_of(memory, None), store)
    carrier.start(save(1, 0, 1, 0))
    ended(carrier, 1)
    described(store, digest=b"another")
    carrier.start(load(2, 0, 2, 0))
    assert ended(carrier, 1) == {2: False}
    carrier.close()


def test_after_all_was_ended_nothing_is_written_and_nothing_told(carried: Carried) -> None:
    memory, store, carrier = carried
    carrier.start(save(1, 0, 1, 0))
    ended(carrier, 1)
    store.gate.clear()
    before = content(memory, 0, 2)
    carrier.start(load(2, 0, 2, 0))
    carrier.start(load(3, 0, 3, 0))
    carrier.abort()
    store.gate.set()
    carrier.start(load(4, 0, 4, 0))
    assert ended(carrier, 1) == {4: True}
    assert content(memory, 0, 2) == before and content(memory, 0, 4) == content(memory, 0, 1)


def test_a_load_that_has_not_begun_can_be_cancelled(carried: Carried) -> None:
    memory, store, carrier = carried
    carrier.start(save(1, 0, 1, 0))
    ended(carrier, 1)
    store.gate.clear()
    before = content(memory, 0, 3)
    for transfer in (2, 3):
        carrier.start(load(transfer, 0, transfer, 0))
    until = time.monotonic() + DEADLINE_S
    while 2 in vars(carrier)["_waiting"]:
        assert time.monotonic() < until
    for transfer in (2, 3, 77):
        carrier.start(CacheOp(CacheOpKind.CANCEL, 0, 0, transfer, 0, transfer))
    assert ended(carrier, 1) == {3: True}, "it did not fail"
    store.gate.set()
    assert ended(carrier, 1) == {2: True}, "it had begun"
    carrier.start(load(4, 0, 4, 0))
    assert ended(carrier, 1) == {4: True}
    assert content(memory, 0, 3) == before


def test_a_save_that_was_given_up_and_fails_ends_once(carried: Carried) -> None:
    _, store, carrier = carried
    store.gate.clear()
    carrier.start(save(1, 0, 1, 0))
    assert store.reached.wait(DEADLINE_S)
    carrier.start(CacheOp(CacheOpKind.CANCEL, 0, 0, 0, 0, 1))
    assert ended(carrier, 1) == {1: True}
    store.fails = StoreError
    store.gate.set()
    carrier.start(save(2, 0, 2, 4))
    assert ended(carrier, 1) == {2: False}
    assert not carrier.ended(0.01).finished


@pytest.mark.parametrize("ended_by", ["cancel", "abort", "close"])
@pytest.mark.parametrize("kept_in", ["disk", "memory before it"])
def test_a_save_that_was_given_up_keeps_nothing_of_what_came_after(ended_by: str, kept_in: str, tmp_path: Path) -> None:
    """Its block is another's by then: whoever finds the copy after a restart would take that for its own."""
    memory = memory_of(8)
    pieces = pieces_of(memory, None)
    begun, gate = Event(), Event()

    class Gated(DiskStore):
        def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Any = always) -> None:
            begun.set()
            assert gate.wait(DEADLINE_S)
            super().write(place, entry, parts, settled)

    def opened() -> DiskStore:
        return Gated(tmp_path / "kept", pieces.sizes, [range(1 + 4 * group, 5 + 4 * group) for group in range(4)])

    disk = opened()
    store = RamBefore(disk, 1 << 20) if kept_in != "disk" else disk
    store.describe(1, Entry(0, bytes(16), b"", Namespace("", None), (1,)))
    carrier = Carrier(pieces, store, threads=1)
    carrier.start(save(1, 0, 1, 1))
    assert begun.wait(DEADLINE_S)
    if ended_by == "cancel":
        carrier.start(CacheOp(CacheOpKind.CANCEL, 0, 0, 0, 0, 1))
        assert ended(carrier, 1) == {1: True}
    elif ended_by == "abort":
        carrier.abort()
    else:
        closing = threading.Thread(target=carrier.close)
        closing.start()
        until = time.monotonic() + DEADLINE_S
        while vars(carrier)["_under_way"]:
            assert time.monotonic() < until
    for array in memory.arrays(0):
        array[1] = 0  # another's
    gate.set()
    if ended_by == "close":
        closing.join()
    else:
        carrier.close()
    assert not carrier.ended().finished
    again = opened()
    assert dict(again.found()) == {} and (tmp_path / "kept" / "blocks").stat().st_size == 0
    again.close()


def test_a_store_that_hangs_at_the_end_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a file that is closed may be another file's, where the thread would go on to write."""
    monkeypatch.setattr("penstock.transfer.carrier._CLOSING_S", 0.01)
    memory, store = memory_of(9), GatedStore()
    described(store)
    closed = Event()
    monkeypatch.setattr(store, "close", closed.set)
    carrier = Carrier(pieces_of(memory, None), store, threads=1)
    store.gate.clear()
    carrier.start(save(1, 0, 1, 0))
    while vars(carrier)["_jobs"].qsize():
        pass
    carrier.close()
    assert not closed.is_set()
    store.gate.set()


def test_what_was_begun_before_a_place_was_anothers_is_not_kept_there() -> None:
    """A step failed meanwhile: nobody waits for such a write, which may come last."""
    store = RamStore()
    old, new = (Entry(0, bytes([number] * 16), b"", Namespace("", None), ()) for number in range(2))
    store.describe(1, old)

    def meanwhile() -> bool:
        store.forget(1)
        store.describe(1, new)
        store.write(1, new, (b"new",))
        return True

    store.write(1, old, (b"old",), meanwhile)
    assert store.read(1, new) == b"new"
    store.write(1, old, (b"old",), lambda: not store.forget(1))
    assert not vars(store)["_kept"]


def test_two_may_read_the_same_copy_at_once() -> None:
    store = RamBefore(GatedStore(), 150)
    one = Entry(0, bytes(16), b"", Namespace("", None), ())
    other = Entry(0, bytes([1] * 16), b"", Namespace("", None), ())
    for place, entry in enumerate((one, other)):
        store.describe(place, entry)
        store.write(place, entry, (bytes([place] * 100),))
    keep = vars(RamBefore)["_keep"]
    for _ in range(3):
        keep(store, 0, one, bytes(100))
        assert vars(store)["_size"] == 100
    assert store.read(1, other) == bytes([1] * 100)


def test_a_copy_that_was_forgotten_before_its_load_began_is_a_load_that_failed(carried: Carried) -> None:
    _, store, carrier = carried
    store.forget(3)
    carrier.start(load(1, 3, 2, 3))
    assert ended(carrier, 1) == {1: False}


def test_loads_come_before_saves(carried: Carried) -> None:
    _, store, carrier = carried
    carrier.start(save(1, 0, 1, 0))
    ended(carrier, 1)
    store.gate.clear()
    for number in range(2, 6):
        carrier.start(save(number, 0, 1, 4))
    carrier.start(load(9, 0, 2, 0))
    store.gate.set()
    order = list(ended(carrier, 5))
    assert order.index(9) <= 1, "one save had begun"


def test_memory_before_a_store_is_bounded() -> None:
    behind = RamStore()
    store = RamBefore(behind, 250)
    for place in range(5):
        one = Entry(0, bytes([place] * 16), b"", Namespace("", None), ())
        store.describe(place, one)
        store.write(place, one, (bytes([place] * 60), bytes([place] * 40)))
    assert [len(data) for _, data in vars(store)["_kept"].values()] == [100, 100]
    for place in range(5):
        assert store.read(place, store.entry(place)) == bytes([place] * 100)
    store.forget(4)
    assert vars(store)["_size"] == 100
    with pytest.raises(KeyError):
        store.entry(4)
