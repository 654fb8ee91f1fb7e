"""What memory and speed the machines have whose processes compute one model's stages, and what all of them allow."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

_PIECE: Final = 32 << 20  # bytes a thread reads and writes at a time: more than a core's caches
_MOVERS: Final = 8
_TURNS: Final = 5
_LEAST: Final = 0.7  # of a machine's speed that counts as the same


class Room(NamedTuple):
    """What a machine has for the stages it computes.

    Attributes:
        memory: bytes that are free.
        speed: bytes a second that its threads move together; machines are compared by it.
    """

    memory: int
    speed: float = 1.0


class Share(NamedTuple):
    """What one machine's stages hold of a model.

    Attributes:
        room: of the machine.
        weights: bytes.
        kept: the part of all that layers keep of a token, 0 to 1.
        own: bytes of what is there alone, as a draft model.
    """

    room: Room
    weights: int
    kept: float
    own: int = 0


def measured_speed(threads: int) -> float:
    """Bytes a second that so many threads, but no more than _MOVERS, move in memory: the best of a few turns, of some
    20 ms each.
    """
    threads = min(threads, _MOVERS)  # which memory is seldom faster than
    pieces = [(np.zeros(_PIECE, np.uint8), np.ones(_PIECE, np.uint8)) for _ in range(threads)]
    best = 0.0
    for _ in range(_TURNS):
        movers = [threading.Thread(target=np.copyto, args=piece) for piece in pieces]
        began = time.perf_counter()
        for mover in movers:
            mover.start()
        for mover in movers:
            mover.join()
        best = max(best, threads * _PIECE / (time.perf_counter() - began))
    return best


def compared(here: Room, others: Sequence[Room]) -> tuple[Room, ...]:
    """All of them, those about as fast as this machine taken to be so: what is measured once, beside whatever else
    runs, differs by a quarter, and layers that are dealt anew at each start find no copies of blocks on disk.
    """
    alike = (
        room._replace(speed=here.speed) if _LEAST < room.speed / here.speed < 1 / _LEAST else room for room in others
    )
    return (here, *alike)


def rooms_of_stages(machines: Sequence[Room], stages: int) -> tuple[Room, ...]:
    """Each stage's: the first ones share the first machine evenly, the last ones have one each; () of none."""
    if not machines:
        return ()
    here, *remote = machines
    local = stages - len(remote)
    return (*(Room(here.memory // local, here.speed / local),) * local, *remote)


def common_room(shares: Sequence[Share], weights: int, step: int) -> int:
    """The memory that a model may be planned to take in all, so that each machine has room for its share of that.

    Args:
        shares: of all machines.
        weights: bytes of all weights.
        step: bytes that a step takes, on each machine.
    """
    bounds = [sum(share.room.memory for share in shares)]
    taken = weights + step + sum(share.own for share in shares)
    for share in shares:
        left = share.room.memory - share.weights - step - share.own  # for what layers keep
        if left < 0:
            bounds.append(taken + left)
        elif share.kept:
            bounds.append(taken + int(left / share.kept))
    return max(0, min(bounds))
