"""One manager a kind of cache group: how many blocks so many tokens take, what a query still sees, what a prefix needs.

Layers of one group keep the same positions; each group has a length, a block table and a pool of its own. Recurrent
states, which have no blocks, are managed in `states`, entries of an encoder's output in `cross`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.core.kv.allocation import BlockTable
from penstock.core.kv.block_pool import BlockPool
from penstock.core.kv.node import Node
from penstock.core.protocol import NULL_BLOCK


class FullGroup:
    """Every position is kept; of latent attention as well. Other kinds are told by what differs.

    Attributes:
        pool: its blocks.
        essential: whether a node without this group's block is of no use at all; else its blocks may go one by one.
        bounds_capacity: whether the number of tokens that fit is limited by this group's blocks.
    """

    essential = True
    bounds_capacity = True

    def __init__(self, index: int, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self._index = index
        self._size = block_size

    def blocks_for(self, tokens: int) -> int:
        """Length of the block table that holds so many tokens."""
        return -(-tokens // self._size)

    def peak_blocks(self, tokens: int, chunk: int) -> int:
        """Most blocks a sequence of that many tokens holds at once, when computed at most `chunk` tokens a step."""
        return self.blocks_for(tokens)

    def first_needed(self, tokens: int) -> int:
        """The first position whose entries a prefix of so many tokens needs to be continued."""
        return 0

    def first_seen(self, tokens: int) -> int:
        """The first position that a query behind so many committed tokens sees: what lies before is given up."""
        return 0

    def attach(self, nodes: Sequence[Node], tokens: int) -> BlockTable:
        """The table of a sequence that starts with these nodes' blocks, which it does not hold yet."""
        return BlockTable([node.blocks[self._index] for node in nodes])


class SlidingGroup(FullGroup):
    """The last `window` positions are kept, counted from what has committed: refused drafts take nothing away."""

    essential = False
    bounds_capacity = False

    def __init__(self, index: int, pool: BlockPool, block_size: int, window: int) -> None:
        super().__init__(index, pool, block_size)
        self._window = window

    def peak_blocks(self, tokens: int, chunk: int) -> int:
        return min(self.blocks_for(tokens), -(-(self._window - 1 + chunk) // self._size) + 1)

    def first_needed(self, tokens: int) -> int:
        return max(0, tokens - self._window + 1)

    def first_seen(self, tokens: int) -> int:
        return self.first_needed(tokens)

    def attach(self, nodes: Sequence[Node], tokens: int) -> BlockTable:
        first = min(self.first_needed(tokens) // self._size, len(nodes))
        return BlockTable([NULL_BLOCK] * first + [node.blocks[self._index] for node in nodes[first:]], first)


class OptionalGroup(FullGroup):
    """Every position is kept, if it was computed: entries that some requests have and others do not miss, a drafter's.

    A prefix needs none of them. Where blocks are missing the table has null blocks, up to the last gap.
    """

    essential = False

    def first_needed(self, tokens: int) -> int:
        return tokens

    def attach(self, nodes: Sequence[Node], tokens: int) -> BlockTable:
        blocks = [node.blocks[self._index] for node in nodes]
        gap = max((index + 1 for index, block in enumerate(blocks) if block == NULL_BLOCK), default=0)
        return BlockTable([NULL_BLOCK] * gap + blocks[gap:], gap, gap * self._size)


class CrossGroup(FullGroup):
    """Entries of an encoder's output, as many as the encoder gave, whatever the sequence's own length: see `cross`."""

    essential = False
    bounds_capacity = False

    def blocks_for(self, tokens: int) -> int:
        return 0

    def first_needed(self, tokens: int) -> int:
        return tokens

    def attach(self, nodes: Sequence[Node], tokens: int) -> BlockTable:
        return BlockTable([])


def manager_of(group: CacheGroup, index: int, pool: BlockPool, block_size: int) -> FullGroup:
    """The manager of a group's kind.

    Raises:
        ValueError: the kind has no blocks.
    """
    if group.kind is CacheKind.SLIDING and group.window is not None:
        return SlidingGroup(index, pool, block_size, group.window)
    if group.kind is CacheKind.CROSS:
        return CrossGroup(index, pool, block_size)
    if group.kind in (CacheKind.FULL, CacheKind.LATENT):
        return OptionalGroup(index, pool, block_size) if group.optional else FullGroup(index, pool, block_size)
    raise ValueError(f"cache kind {group.kind.value} has no blocks; those that have: full, latent, sliding, cross")
