"""What memory and speed the machines have whose processes compute one model's stages, and what all of them allow."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

_PIECE: Final = 48 << 20  # bytes a thread reads and writes at a time: more than a core's caches
_TURNS: Final = 3


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
    """

    room: Room
    weights: int
    kept: float


def measured_speed(threads: int) -> float:
    """Bytes a second that so many threads move in memory: the best of a few turns, of some 30 ms each."""
    pieces = [(np.zeros(_PIECE, np.uint8), np.zeros(_PIECE, np.uint8)) for _ in range(threads)]
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
    for share in shares:
        left = share.room.memory - share.weights - step  # for what layers keep
        if left < 0:
            bounds.append(weights + step + left)
        elif share.kept:
            bounds.append(weights + step + int(left / share.kept))
    return max(0, min(bounds))
