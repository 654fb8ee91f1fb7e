"""The blocks of one cache group, counted by references."""

from __future__ import annotations

from penstock.core.protocol import NULL_BLOCK


class BlockPool:
    """Hands out block ids 1 … num_blocks - 1; block 0 is the null block.

    A block's references are held by sequences, by the prefix tree (one), and by copies in flight. It returns to the
    free list when the last is released.
    """

    __slots__ = ("_free", "num_blocks", "refs")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks cannot hold a token; it needs at least 2")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Takes a free block with one reference.

        Raises:
            IndexError: none is free.
        """
        block = self._free.pop()
        self.refs[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Adds a reference to a block in use."""
        if self.refs[block] <= 0:
            raise ValueError(f"block {block} is not in use")
        self.refs[block] += 1

    def release(self, block: int) -> int:
        """Drops a reference; returns how many are left (0: the block is free now)."""
        left = self.refs[block] - 1
        if left < 0 or block == NULL_BLOCK:
            raise ValueError(f"block {block} was released more often than retained")
        self.refs[block] = left
        if left == 0:
            self._free.append(block)
        return left

    def check_integrity(self) -> None:
        """Raises AssertionError if the free list and the counts disagree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert NULL_BLOCK not in free, "the null block is on the free list"
        for block in range(1, self.num_blocks):
            assert (self.refs[block] == 0) == (block in free), f"block {block}: {self.refs[block]} references"
