"""An adapter as its files hold it, whatever their kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.config.adapters import MOST_INVOCATION
from penstock.config.errors import CheckpointError, quoted
from penstock.quant.tensor import StoredTensor

MOST_TOKEN_ID: Final = 0x10FFFF


@dataclass(frozen=True, slots=True)
class LowRankTensors:
    """What changes one projection W [M, K]: W + scale · up · down, whose rows DoRA scales to given lengths.

    Attributes:
        down: [rank, K].
        up: [M, rank].
        scale: what their product is multiplied by.
        magnitude: [M], DoRA's lengths; None without.
        looked_up: it changes a table [K, M] whose rows are looked up, the transpose of W.
    """

    down: StoredTensor
    up: StoredTensor
    scale: float
    magnitude: StoredTensor | None = None
    looked_up: bool = False

    @property
    def rank(self) -> int:
        return self.down.info.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An opened adapter; its tensors are views of its file.

    Attributes:
        path: the folder or file.
        changes: by the checkpoint's name of a projection, without `.weight`.
        base: the model it says that it was made for, "" where it does not.
        invocation: tokens behind whose begin alone it counts; () for all.
        tables: weights of the model that were saved with it, by their names, which are to be the model's own.
    """

    path: Path
    changes: Mapping[str, LowRankTensors]
    base: str = ""
    invocation: tuple[int, ...] = ()
    tables: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        return max(change.rank for change in self.changes.values())


def invocation_of(path: Path, tokens: Any) -> tuple[int, ...]:
    """The invocation that an activated adapter states; raises CheckpointError where it is none."""
    if not tokens:
        return ()
    listed = isinstance(tokens, list | tuple) and len(tokens) <= MOST_INVOCATION
    if not listed or not all(type(token) is int and 0 <= token <= MOST_TOKEN_ID for token in tokens):
        raise CheckpointError(
            f"{path} is not read: its invocation is no list of at most {MOST_INVOCATION} token ids. Save it again."
        )
    return tuple(tokens)


def check_pair(path: Path, name: str, down: StoredTensor | None, up: StoredTensor | None) -> None:
    """Raises CheckpointError unless both matrices of a projection are there and fit each other."""
    shapes = [list(tensor.info.shape) if tensor else "missing" for tensor in (down, up)]
    if down is None or up is None or not _fit(down.info.shape, up.info.shape):
        raise CheckpointError(
            f"{path} has no fitting pair of matrices for {quoted(name)}: (rank, inputs) is {shapes[0]} and "
            f"(outputs, rank) is {shapes[1]}. Save the adapter again."
        )


def _fit(down: tuple[int, ...], up: tuple[int, ...]) -> bool:
    return len(down) == len(up) == 2 and down[0] == up[1] and min(*down, *up) > 0
