"""Experts change places between steps, and no answer changes by a bit: threads as ranks, then the decision itself."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.errors import EngineDeadError
from penstock.kernels.cpu import native
from penstock.kernels.cpu.rank_group import make_memory
from penstock.parallel.experts import Holdings, Move, after, moves_to, placed, rank_loads
from penstock.parallel.ranks import ALONE, Ranks
from penstock.runtime.executor import make_executor
from penstock.runtime.ranks import balance, messages
from penstock.runtime.ranks.balance import ExpertBalancer
from penstock.runtime.ranks.experts import ExpertShelf
from tests.layers.test_sharding import SIZES, OneRank
from tests.models import tiny
from tests.models.harness import Harness
from tests.runtime.test_executor import WORK, Through

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
MOE: dict[str, Any] = {**SIZES, "moe_intermediate_size": 40}
Between = Callable[[], None]


def steps(one: OneRank, between: Between, times: int) -> list[Tensor]:
    """The logits of every step of WORK, so many times from the beginning."""
    harness = Harness(one.model, seed=1)
    harness.model = Through(make_executor(one.model, harness.caches, 48, 7), one.model)  # type: ignore[assignment]
    found, free = [], [[*blocks] for blocks in harness.free]
    with torch.inference_mode():
        for _ in range(times):
            harness.free = [[*blocks] for blocks in free]
            harness.tables.clear()
            harness.lengths.clear()
            for work in WORK:
                between()
                found += harness.step(work).values()
    return found


def compute(folder: Path, count: int, copies: int, make: Callable[[ExpertShelf, int], Between], times: int) -> Any:
    """What each of so many ranks says, which do what `make` gives between steps."""
    memory = make_memory(count)
    found: dict[int, Any] = {}

    def rank_thread(rank: int) -> None:
        one = OneRank(folder, Ranks(rank, count), memory, None, copies)
        try:
            found[rank] = steps(one, make(ExpertShelf(one.model, one.group), rank), times)
        except BaseException as error:
            found[rank] = error
            one.group.stop()

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(memory)
    for said in found.values():
        if isinstance(said, BaseException):
            raise said
    return [found[rank] for rank in range(count)]


class Anywhere:
    """Has a few experts of a layer change places, as chance says, which is the same in every rank; then another's."""

    def __init__(self, shelf: ExpertShelf, part: int = 3 << 10) -> None:
        self._shelf, self._part = shelf, part
        self._dice = random.Random(5)
        self.moved = 0

    def __call__(self) -> None:
        for index, layer in enumerate(self._shelf.layers):
            holdings: Holdings = layer.table.holdings
            loads = [self._dice.random() ** 4 for _ in layer.table.counts]
            for moves in [*moves_to(holdings, placed(loads, len(holdings), len(holdings[0])))]:
                for piece, size in enumerate(layer.pieces):
                    for begin in range(0, size, self._part):
                        end = min(size, begin + self._part)
                        self._shelf.obey(messages.PassExperts(index, piece, begin, end, moves))
                self._shelf.obey(messages.PutExperts(index, moves))
                self.moved += len(moves)


@pytest.mark.parametrize(("family", "count", "copies"), [("qwen3-moe", 2, 0), ("gpt-oss", 2, 1), ("qwen3-moe", 3, 4)])
def test_experts_that_move_between_steps_change_no_bit(family: str, count: int, copies: int, tmp_path: Path) -> None:
    tiny.save(family, tmp_path, **(MOE if family == "qwen3-moe" else SIZES))
    expected = steps(OneRank(tmp_path, ALONE, -1, None), lambda: None, 4)
    movers: list[Anywhere] = []

    def make(shelf: ExpertShelf, rank: int) -> Between:
        assert len(shelf.layers) >= 2
        movers.append(Anywhere(shelf))
        return movers[-1]

    for said in compute(tmp_path, count, copies, make, 4):
        assert all(map(torch.equal, said, expected))
    assert all(mover.moved > 20 for mover in movers)


class Told:
    """The lead's only follower, which a thread is: what it is told, in order with steps."""

    def __init__(self) -> None:
        self.commands: queue.Queue[Any] = queue.Queue()
        self.told: list[Any] = []

    def tell(self, command: Any) -> None:
        self.told.append(command)
        self.commands.put(command)

    def failed(self, error: Exception) -> EngineDeadError:
        raise error


@pytest.mark.parametrize("copies", [0, 2])
def test_the_lead_evens_out_what_ranks_compute(copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that has all tokens go to experts of one rank; steps are as short as a part of an expert's move."""
    monkeypatch.setattr(balance, "PART", 8 << 10)
    tiny.save("qwen3-moe", tmp_path, **MOE)
    expected = steps(OneRank(tmp_path, ALONE, -1, None), lambda: None, 30)
    followers, kept = Told(), list[ExpertShelf]()

    def make(shelf: ExpertShelf, rank: int) -> Between:
        count = len(shelf.layers[0].table.counts)
        if rank == 0:
            kept.append(shelf)
            for layer in shelf.layers:  # as if it had been so up to now
                layer.table.counts[: count // 2] = 1 << 60  # which is halved at each look
            balancer = ExpertBalancer(followers, shelf, 2)

            def lead() -> None:
                balancer.between_steps()
                followers.commands.put(None)

            return lead

        def follow() -> None:
            while (command := followers.commands.get(timeout=60)) is not None:
                shelf.obey(command)

        return follow

    for said in compute(tmp_path, 2, copies, make, 30):
        assert all(map(torch.equal, said, expected))
    passed = [one for one in followers.told if isinstance(one, messages.PassExperts)]
    assert max(one.end - one.begin for one in passed) <= 8 << 10
    for layer in kept[0].layers:
        loads = [100.0 if expert < len(layer.table.counts) // 2 else 0.0 for expert in range(len(layer.table.counts))]
        busy = rank_loads(layer.table.holdings, loads)
        assert max(busy) <= 1.1 * sum(busy) / 2


def test_ranks_that_have_moved_differently_are_told(tmp_path: Path) -> None:
    tiny.save("qwen3-moe", tmp_path, **MOE)

    def make(shelf: ExpertShelf, rank: int) -> Between:
        return lambda: shelf.layers[0].table.apply(()) if rank else None

    with pytest.raises(RuntimeError, match=r"all ranks have to run the same steps|another rank has ended"):
        compute(tmp_path, 2, 0, make, 1)


def test_what_is_exchanged_is_read_before_it_is_written() -> None:
    swap = (Move(0, 1, 1, 0), Move(1, 0, 0, 1))
    assert after([[0, 1], [2, 3]], swap) == [[0, 2], [1, 3]]
