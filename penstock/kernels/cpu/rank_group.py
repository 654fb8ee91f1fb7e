"""Ranks of one machine that compute one model together, over memory they share. No torch here."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from penstock.config.errors import ConfigError
from penstock.kernels.cpu import native
from penstock.kernels.cpu.step_program import address

WATCHER = -1  # the rank of who takes part in nothing, and may stop the others
SLOT_BYTES = 4 << 20  # of each of a rank's four slots: what it leaves for others at a time


def make_memory(count: int, slot_bytes: int = SLOT_BYTES) -> int:
    """The file descriptor of memory for a group of `count` ranks, which this process is to close.

    It lives as long as somebody has it open or has joined the group. Processes inherit it where it is passed on
    (`subprocess.Popen(pass_fds=…)`). Pages take memory when their rank joins: four times `slot_bytes` a rank.

    Raises:
        ConfigError: the native library or the system has no such memory.
        ValueError: fewer than 1 or more than 64 ranks, or slots of less than 1 MiB or no whole pages.
    """
    library = native.library()
    if not hasattr(os, "memfd_create"):
        raise ConfigError("ranks share memory as Linux has it (memfd_create), which this system lacks.")
    descriptor = os.memfd_create("penstock-ranks", os.MFD_CLOEXEC)
    try:
        library.RankGroup.make(descriptor, count, slot_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class RankGroup:
    """One rank's place in a group, which ops over several ranks are called with.

    All ranks call the same such ops in the same order, one at a time; each waits for the others. An op of a group that
    was stopped, and one that waits while it is stopped, raises RuntimeError. So does one that finds another rank at
    something else; the group is stopped then, as it is where a recorded step of any rank raises an error.

    Attributes:
        rank: of this one, below `count`; -1 of who only watches, and may stop the others.
        count: of ranks.
        native: what the native library knows the group by.
    """

    def __init__(self, descriptor: int, rank: int) -> None:
        """Joins the group whose memory `make_memory` made; the descriptor may be closed afterwards.

        Raises:
            OSError: the memory cannot be mapped.
            ValueError: the descriptor is of something else, there is no such rank, or somebody has it.
        """
        self.native: Any = native.library().RankGroup(descriptor, rank)
        self.rank = int(self.native.rank)
        self.count = int(self.native.count)

    @property
    def stopped(self) -> bool:
        """Whether the group was stopped, by whomever."""
        return bool(self.native.stopped)

    @property
    def exchanged_seconds(self) -> float:
        """Time in which ops passed something between ranks so far: waiting, and taking what the others gave."""
        return float(self.native.exchanged_seconds)

    def stop(self) -> None:
        """Ends all waits of all ranks, now and later, from any thread or process."""
        self.native.stop()

    def barrier(self) -> None:
        """Waits until all ranks have come here.

        Raises:
            RuntimeError: the group was stopped.
        """
        self.native.gather(0, 0, 0)

    def pass_on(self, own: int, size: int, source: int, out: int) -> None:
        """Gives `size` bytes at the address `own` to all who want them (0: none), and takes those of rank `source` to
        the address `out` (0: none). All ranks call it, with one size of at least 1.

        Raises:
            RuntimeError: the group was stopped, or ranks bring different sizes.
        """
        self.native.pass_on(own, size, source, out)

    def all_gather(self, tensor: Any) -> list[Any]:
        """Every rank's tensor (or array), each of the shape and type of this one, which is contiguous.

        Raises:
            RuntimeError: the group was stopped, or ranks bring different sizes.
        """
        shape = (self.count, *tensor.shape)
        found = np.empty(shape, tensor.dtype) if isinstance(tensor, np.ndarray) else tensor.new_empty(shape)
        self.native.gather(address(tensor), tensor.nbytes, address(found))
        return list(found)
