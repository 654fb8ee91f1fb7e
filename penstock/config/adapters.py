"""Which low-rank adapters a request's tokens have. Named by content; what a slot holds is the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_ADAPTERS: Final = 4  # of one token, whoever computes; `AdapterArgs::most` in csrc/ops/model_ops.h

MOST_WEIGHT: Final = 1e30  # of an adapter: what float32 holds, and some more of its product


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter of a request.

    Attributes:
        digest: names its content.
        path: folder or file it is read from.
        weight: how much of it counts, 1 for all.
    """

    digest: str
    path: str
    weight: float = 1.0


def adapters_key(adapters: tuple[AdapterUse, ...]) -> str:
    """What names the content of these adapters together, "" for none: prefixes are told apart by it."""
    return "+".join(f"{adapter.digest}*{adapter.weight!r}" for adapter in adapters)
