"""Entries of encoder outputs: found again by what was encoded, shared by all who attend to it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock.core.kv.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class CrossEntry:
    """One encoder output.

    Attributes:
        key: who may find it, and the digest of what was encoded.
        blocks: where its entries lie.
        tokens: how many entries.
        users: sequences that attend to it.
        filled: the step that computes its entries, or did; -1 as long as none is to.
    """

    key: tuple[object, str]
    blocks: tuple[int, ...]
    tokens: int
    users: int = 0
    filled: int = -1


class CrossStore:
    """All entries of a cross group. Those nobody uses are given up when room is needed, the least recently used first.

    The null form is a store over no pool, which no sequence asks for anything.
    """

    def __init__(self, pool: BlockPool | None, block_size: int) -> None:
        self._pool = pool
        self._size = block_size
        self._entries: OrderedDict[tuple[object, str], CrossEntry] = OrderedDict()
        self._forgotten: list[CrossEntry] = []  # which go with their last users

    @property
    def idle(self) -> int:
        """Blocks of entries that nobody uses."""
        return sum(len(entry.blocks) for entry in self._entries.values() if not entry.users)

    def can_hold(self, tokens: int) -> bool:
        """Whether so many entries fit into an empty store."""
        return self._pool is None or -(-tokens // self._size) <= self._pool.num_blocks - 1

    def take(self, key: tuple[object, str], tokens: int) -> CrossEntry | None:
        """The entry of that key, made if need be, with one more user; None where there is no room."""
        entry = self._entries.get(key)
        if entry is None:
            need = -(-tokens // self._size)
            if self._pool is None or need > self._pool.num_free + self.idle:
                return None
            while need > self._pool.num_free:
                self._drop(next(entry for entry in self._entries.values() if not entry.users))
            entry = CrossEntry(key, tuple(self._pool.allocate() for _ in range(need)), tokens)
            self._entries[key] = entry
        self._entries.move_to_end(key)
        entry.users += 1
        return entry

    def release(self, entry: CrossEntry) -> None:
        """One user less; an entry that was never filled goes with its last."""
        entry.users -= 1
        if not entry.users and entry.filled < 0:
            self._drop(entry)

    def forget(self, entry: CrossEntry) -> None:
        """It may not have been filled: nobody finds it again."""
        entry.filled = -1
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            if entry.users:
                self._forgotten.append(entry)
            else:
                self._free(entry)

    def forget_since(self, step: int) -> None:
        """No step behind that one was done: what they were to fill is not, whoever asked for it."""
        for entry in [entry for entry in self._entries.values() if entry.filled > step]:
            self.forget(entry)

    def clear(self) -> None:
        """Gives up what nobody uses."""
        for entry in [entry for entry in self._entries.values() if not entry.users]:
            self._drop(entry)

    def _drop(self, entry: CrossEntry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        else:
            self._forgotten.remove(entry)
        self._free(entry)

    def _free(self, entry: CrossEntry) -> None:
        assert self._pool is not None
        for block in entry.blocks:
            self._pool.release(block)

    def blocks(self) -> list[int]:
        """Every block it holds a reference to."""
        return [block for entry in (*self._entries.values(), *self._forgotten) for block in entry.blocks]
