"""What is told of blocks beyond this process: which came and went, named by content. Notes are taken within steps.

Blocks are told by content alone: of equal blocks that several owners have, the first is stored and the last removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from penstock.config.adapters import AdapterUse, adapters_key, key_parts
from penstock.core.kv.node import Key, Node
from penstock.core.kv.observer import Observer
from penstock.core.policies.naming import medium_of
from penstock.core.sequence import Sequence
from penstock.transfer.block_hashes import Extra

_MOST_NAMES: Final = 65_536  # of sets of adapters that are remembered


class Place(NamedTuple):
    """Where blocks lie: a cache group, on the device or below."""

    group: int
    below: bool


class Told:
    """A block by content.

    Attributes:
        before: the block before it, None for the first of a prefix.
        tokens: its tokens; 0 in the places of media.
        extra: what tells it from others of these tokens behind that block.
        space: of the prefix tree.
        lora: the names of its adapters.
        digest: its hash, b"" until it is asked for.
        found: how many nodes have it at each place.
    """

    __slots__ = ("__weakref__", "before", "digest", "extra", "found", "lora", "space", "tokens")

    def __init__(self, before: Told | None, space: Hashable, tokens: Key, extra: Extra, lora: str | None) -> None:
        self.before = before
        self.space = space
        self.tokens = tokens
        self.extra = extra
        self.lora = lora
        self.digest = b""
        self.found: dict[Place, int] = {}


class Note(NamedTuple):
    """A block came, or went; no block: there are none any more."""

    told: Told | None
    place: Place
    stored: bool


NOTHING_LEFT: Final = Note(None, Place(0, False), False)


class ToldBlocks(Observer):
    """Takes notes of blocks of tokens that come and go, at most so many until they are taken.

    Recurrent states and blocks that are not full are not told of.

    Attributes:
        notes: what was not taken yet, in order.
        lost: notes for which there was no room.
        published: batches that were sent, as who takes the notes counts them.
    """

    def __init__(self, block_size: int, groups: int, most: int, wake: Callable[[], None]) -> None:
        """`wake` is called whenever there are notes; it must not wait for anything."""
        self.notes: deque[Note] = deque([NOTHING_LEFT])  # of what a process before this one told
        self.lost = self.published = 0
        self._size = block_size
        self._groups = groups
        self._most = most
        self._wake = wake
        self._known: WeakValueDictionary[Hashable, Told] = WeakValueDictionary()
        self._names: dict[Hashable, tuple[str, ...]] = {}  # of adapters, by the key that they have together
        self._found = 0

    def begins(self, sequence: Sequence) -> None:
        uses = sequence.request.adapters
        if uses and len(self._names) < _MOST_NAMES:
            names = tuple(_name(use) for use in uses if not use.invocation)
            self._names.setdefault(adapters_key(use for use in uses if not use.invocation), names)
            active = [use for use in uses if use.invocation]
            for count in range(1, len(active) + 1):
                some = sorted(active, key=lambda use: use.first)[:count]
                key = adapters_key(use for use in active if use in some)
                self._names.setdefault(key, tuple(_name(use) for use in active if use in some))

    def stored(self, node: Node, group: int, *, below: bool = False) -> None:
        if group >= self._groups or len(node.key) != self._size:
            return
        told = node.told = node.told or self._told(node)
        place = Place(group, below)
        count = told.found[place] = told.found.get(place, 0) + 1
        if count == 1:
            self._found += 1
            self._note(Note(told, place, True))

    def removed(self, node: Node, group: int, *, below: bool = False) -> None:
        told: Told | None = node.told
        place = Place(group, below)
        if told is None or not told.found.get(place):
            return
        told.found[place] -= 1
        if not told.found[place]:
            del told.found[place]
            self._found -= 1
            self._note(Note(told, place, False))

    def cleared(self) -> None:
        if not self._found:
            self.notes.clear()
            self._note(NOTHING_LEFT)

    def figures(self) -> Mapping[str, Any]:
        return {"kv_events": (("published", self.published), ("dropped", self.lost))}

    def _note(self, note: Note) -> None:
        if len(self.notes) < self._most:
            self.notes.append(note)
        else:
            self.lost += 1
        self._wake()

    # -- content ------------------------------------------------------------------------------------------------------

    def _told(self, node: Node) -> Told:
        """A node's block by content: its path is walked up as far as it was not told of."""
        path: list[Node] = []
        up, salt = node, ""
        while up.parent is not None and (salt or up.told is None):
            if up.key:
                path.append(up)
            elif isinstance(up.name, tuple) and isinstance(up.name[1], tuple):  # a portal, whose name is (None, owner)
                salt = up.name[1][0]  # from where on what is public is told as this salt's
            up = up.parent
        told: Told | None = up.told
        space = up.name if told is None else told.space
        for one in reversed(path):
            told = self._known_or_new(told, one.key, space, salt)
            if not (salt and one.public):
                one.told = told
        assert told is not None
        return told

    def _known_or_new(self, before: Told | None, key: Key, space: Hashable, salt: str) -> Told:
        name = (id(before), key, (space, salt) if before is None else None)  # `before` lives as long as what follows it
        told = self._known.get(name)
        if told is None:
            tokens, extra, lora = self._content(key, space, salt if before is None else "")
            told = self._known[name] = Told(before, space, tokens, extra, lora)
        return told

    def _content(self, key: Key, space: Hashable, salt: str) -> tuple[Key, Extra, str | None]:
        """A block's tokens, what else is in its hash as vLLM has it, and the names of its adapters."""
        adapters, encoder = space if isinstance(space, tuple) else (space, None)
        names = list(self._names_of(adapters))
        media: dict[tuple[str, int], None] = {} if encoder is None else {(str(encoder), 0): None}
        tokens: list[int] = []
        for index, one in enumerate(key):
            active, token = key_parts(one)
            names += [name for name in self._names_of(active) if name not in names]
            medium = medium_of(token)
            tokens.append(token if medium is None else 0)
            if medium is not None:
                media[medium[0], index - medium[1]] = None
        extra = (*names, *media, *((salt,) if salt else ()))
        return tuple(tokens), extra or None, "+".join(names) or None

    def _names_of(self, adapters: Hashable) -> tuple[str, ...]:
        """The names of these adapters; what they are by content, where no request has named them yet."""
        return self._names.get(adapters, (str(adapters),)) if adapters else ()


def _name(use: AdapterUse) -> str:
    name = use.name or use.digest
    return name if use.weight == 1 else f"{name}*{use.weight!r}"


def chain(told: Told) -> Iterator[Told]:
    """A block and those before it that have no hash yet, the first of the prefix first."""
    unnamed: list[Told] = []
    up: Told | None = told
    while up is not None and not up.digest:
        unnamed.append(up)
        up = up.before
    return reversed(unnamed)
