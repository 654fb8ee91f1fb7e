"""What one running sequence holds of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.core.kv.cross import CrossEntry
from penstock.core.kv.node import Node
from penstock.core.protocol import NULL_BLOCK


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks in one cache group.

    Attributes:
        blocks: ids by logical block; NULL_BLOCK where there is none (any more).
        live_from: first logical block that was not given up.
        valid_from: first position whose entries are there; later than needed in optional groups alone.
    """

    blocks: list[int]
    live_from: int = 0
    valid_from: int = 0

    @property
    def held(self) -> int:
        """Blocks from the first that was not given up."""
        return len(self.blocks) - self.live_from


@dataclass(slots=True)
class Allocation:
    """What a sequence holds.

    Attributes:
        tables: one a cache group of blocks.
        cursor: tree node where the sequence's computed whole blocks end.
        tail: the node made for its partial last block, if any.
        announced: nodes it promised to fill.
        pins: (group, block) of nodes on its path whose content it holds in blocks of its own, or copies from.
        state_marks: token counts still to come at which its recurrent state is to be kept.
        draft_states: slots for the states after the last known token and after each draft, while drafts are verified;
            or for one that is loaded.
        cross: the encoder's entries it attends to, if any.
        transfers: loads from a lower tier that have not finished.
    """

    tables: list[BlockTable]
    cursor: Node
    tail: Node | None = None
    announced: list[Node] = field(default_factory=list)
    pins: list[tuple[int, int]] = field(default_factory=list)
    state_marks: list[int] = field(default_factory=list)
    draft_states: tuple[int, ...] = ()
    cross: CrossEntry | None = None
    transfers: set[int] = field(default_factory=set)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(group, block) of every reference it has."""
        for g, table in enumerate(self.tables):
            for block in table.blocks:
                if block != NULL_BLOCK:
                    yield g, block
        yield from self.pins
