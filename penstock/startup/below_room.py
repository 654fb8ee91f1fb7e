"""How many copies of blocks lie below the device, and the memory of this machine that goes with them. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.config.options import EngineOptions
from penstock.transfer.places import place_bytes
from penstock.transfer.shared import MOST_QUEUED

# What a place on disk takes in memory, where it is written what it is a copy of (measured: 2.5 KB of 16 tokens).
_NODE_BYTES: Final = 1200
_TOKEN_BYTES: Final = 36
_COPY_BYTES: Final = 700
_SHARE_BYTES: Final = 400  # of a copy, in each further process that has a share of it
_SHARED: Final = 65_536  # blocks of a shared store that an engine without a disk knows of
_MOST_INDEX_SHARE: Final = 1 / 4  # of the memory that is there


@dataclass(frozen=True, slots=True)
class BelowRoom:
    """Room for copies.

    Attributes:
        places: blocks of tokens, each in all cache groups.
        index_bytes: what naming them takes in memory, once all are in use, in all processes.
        memory_bytes: that, the copies in memory, and what waits to be sent to a shared store.
    """

    places: int
    index_bytes: int
    memory_bytes: int


def below_room(
    options: EngineOptions,
    sizes: Sequence[int],
    memory: int | None = None,
    overhead: int = 0,
    shares: Sequence[Sequence[int]] = (),
) -> BelowRoom:
    """The room that an engine's options give.

    Args:
        options: resolved.
        sizes: bytes of a block, by cache group; of a recurrent state behind them.
        memory: bytes of memory that are there; None asks for no more than the options do.
        overhead: bytes that encryption adds to a block on disk.
        shares: sizes in each further process that has a share of every block; what the options say is of all together.
    """
    whole = [*sizes, *(size for share in shares for size in share)]
    if options.kv_disk:
        places = options.kv_disk // sum(place_bytes(size + overhead) for size in whole)
    elif options.kv_store:
        places = _SHARED
    else:
        places = (options.kv_ram or 0) // sum(whole)
    each = _NODE_BYTES + _TOKEN_BYTES * options.block_size + _COPY_BYTES * len(sizes)
    each += _SHARE_BYTES * sum(map(len, shares))
    if memory is not None:
        places = min(places, int(memory * _MOST_INDEX_SHARE) // each)
    copies = (options.kv_ram or 0) + (MOST_QUEUED if options.kv_store else 0)
    return BelowRoom(places, places * each, places * each + copies)
