"""Names of cached prefixes within one server: quick to compute, and told by each engine to who deals requests to it.

A block's name is a hash of the name before it and of its keys, under a seed that the server draws when it starts.
Nobody outside can compute it, and nothing is proved by it: it says where a prefix is likely to be found.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from penstock.core.kv.node import Key, Node
from penstock.core.kv.observer import Observer
from penstock.core.sequence import Sequence as Answer

_BYTES: Final = 8
_NUMBER: Final = (1 << 63) - 1  # so that a name may have a sign


class PrefixNames:
    """Names blocks; equal seeds give equal names."""

    def __init__(self, seed: str) -> None:
        self._seed = seed.encode()

    def first(self, space: Hashable, owner: Hashable) -> bytes:
        """What stands before the first block of a namespace (`core.kv.node.Namespace`)."""
        return self._hash(repr((space, owner)).encode())

    def next(self, before: bytes, key: Key) -> bytes:
        """A block's hash; `before` is that of the block before it."""
        try:
            return self._hash(before + array("q", key).tobytes())
        except OverflowError:  # keys of media and of activated adapters
            return self._hash(before + repr(tuple(key)).encode())

    def chain(self, keys: Sequence[int], size: int, space: Hashable, owner: Hashable) -> Iterator[int]:
        """Names of the whole blocks of a prefix, of `size` keys each, as they are asked for."""
        before = self.first(space, owner)
        for end in range(size, len(keys) + 1, size):
            before = self.next(before, tuple(keys[end - size : end]))
            yield number_of(before)

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_BYTES, key=self._seed).digest()


def number_of(digest: bytes) -> int:
    """A block's name, above 0."""
    return (int.from_bytes(digest, "big") & _NUMBER) or 1


class PrefixNews(Observer):
    """Takes notes of whole blocks that can be found, and that cannot any more.

    What is public is named apart from what owners have to themselves; in an owner's prefixes all blocks have the
    owner's names, also those before that are public.

    Attributes:
        notes: names of blocks that came, and less than 0 of those that went, in order, until they are taken.
    """

    def __init__(self, names: PrefixNames, block_size: int) -> None:
        self.notes: list[int] = []
        self._names = names
        self._size = block_size
        self._known: dict[Node, bytes] = {}
        self._found: dict[Node, int] = {}  # at how many places: groups, on the device and below

    def stored(self, node: Node, group: int, *, below: bool = False) -> None:
        if len(node.key) != self._size:
            return
        found = self._found[node] = self._found.get(node, 0) + 1
        if found == 1:
            self._known[node] = digest = self._digest(node)
            self.notes.append(number_of(digest))

    def removed(self, node: Node, group: int, *, below: bool = False) -> None:
        found = self._found.get(node)
        if found is None:
            return
        if found > 1:
            self._found[node] = found - 1
            return
        del self._found[node]
        self.notes.append(-number_of(self._known.pop(node)))

    def _digest(self, node: Node) -> bytes:
        """A node's hash: its path is walked up to the first one whose hash of the same kind is known."""
        path: list[Key] = []
        up, before = node, b""
        owner: Hashable = None
        while up.parent is not None:
            if up is not node and up.public == node.public and (before := self._known.get(up, b"")):
                break
            if up.key:
                path.append(up.key)
            elif isinstance(up.name, tuple):  # a portal, whose name is (None, owner)
                owner = up.name[1]
            up = up.parent
        before = before or self._names.first(up.name, owner)
        for key in reversed(path):
            before = self._names.next(before, key)
        return before


class Observers(Observer):
    """Several, each told of everything."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def begins(self, sequence: Answer) -> None:
        for observer in self._observers:
            observer.begins(sequence)

    def stored(self, node: Node, group: int, *, below: bool = False) -> None:
        for observer in self._observers:
            observer.stored(node, group, below=below)

    def removed(self, node: Node, group: int, *, below: bool = False) -> None:
        for observer in self._observers:
            observer.removed(node, group, below=below)

    def cleared(self) -> None:
        for observer in self._observers:
            observer.cleared()

    def figures(self) -> Mapping[str, Any]:
        return {name: value for observer in self._observers for name, value in observer.figures().items()}
