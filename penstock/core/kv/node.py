"""What the prefix tree is made of and gives: nodes, the namespaces they are seen from, and matches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.config.retention import USUAL
from penstock.core.protocol import NULL_BLOCK

Key = tuple[int, ...]


class Namespace(NamedTuple):
    """Who finds a prefix again.

    Attributes:
        space: within which equal tokens have equal entries.
        owner: who may know of it: only equal ones share; None for everybody, whoever else the space has.
    """

    space: Hashable
    owner: Hashable | None = ""

    @property
    def portal(self) -> Hashable:
        """Its place among a public node's children, which no tokens have."""
        return (None, self.owner)


class Node:
    """A block of a prefix, or a portal: where what an owner has to itself leaves the public prefix.

    Attributes:
        parent, key, children: the tree; `key` are this block's tokens, none of a portal.
        name: what its parent's children have it under: its key, or a namespace's portal.
        public: whether every owner finds it.
        depth: tokens up to and with this block.
        path: hash of the whole prefix; explains misses, proves nothing.
        order: keys of filled children, sorted.
        blocks: block id per cache group, NULL_BLOCK where evicted.
        below: by cache group, the place of the copy that a lower tier has.
        digest: names it by content in a tier that outlives the process; b"" until it is asked for.
        saving: copies to a lower tier that have not finished; it stays in the tree until they have.
        owner: the sequence that announced it and has not yet filled it, else None.
        filled: whether its entries are computed.
        state: slot with the recurrent state at its end, None if there is none.
        users: sequences whose computed tokens end here; it stays in the tree until they move on.
        uses: requests that matched it, plus one.
        told: what an observer keeps of it.
        pins: prefixes that owners keep for a time and that it is part of.
        priority, until: how long it is to stay (`config.retention`), and until when on the monotonic clock.
        stamps: per group, number of its newest entry in the eviction queue.
    """

    __slots__ = (
        "below", "blocks", "children", "depth", "digest", "filled", "key", "name", "order", "owner", "parent", "path",
        "pins", "priority", "public", "saving", "stamps", "state", "told", "until", "users", "uses",
    )  # fmt: skip

    def __init__(self, parent: Node | None, name: Hashable, key: Key, groups: int, owner: Any = None) -> None:
        self.parent = parent
        self.name, self.key = name, key
        self.public: bool = parent is None or (parent.public and bool(key))
        self.depth: int = 0 if parent is None else parent.depth + len(key)
        self.path: int = hash(name) if parent is None else hash((parent.path, name))
        self.children: dict[Hashable, Node] = {}
        self.order: list[Key] = []
        self.blocks: list[int] = [NULL_BLOCK] * groups
        self.below: dict[int, int] = {}
        self.digest = b""
        self.saving = 0
        self.owner = owner
        self.filled = False
        self.state: int | None = None
        self.users = 0
        self.uses = 1
        self.priority, self.until = USUAL, float("inf")
        self.stamps = [0] * groups
        self.told: Any = None
        self.pins = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree holds of a token sequence.

    Attributes:
        nodes: whole blocks that can be shared, from the start.
        tail, tail_tokens: a node whose first tail_tokens entries continue the match and must be copied, or None, 0.
        pending, owner: tokens that would match once sequences now computing them are done, and the one that computes
            the last of them; 0, None if nobody does.
        reason: why not more matched; "" if all did. What is below counts as matched.
        whole: how many of the nodes can be had without the tail.
        forks: where states are kept, tokens of whole blocks the tree has, whether or not there is a state there.
        below: nodes after `nodes`, instead of a tail, whose blocks can be loaded from a lower tier.
    """

    nodes: tuple[Node, ...]
    tail: Node | None
    tail_tokens: int
    pending: int
    owner: Any
    reason: str
    whole: int = 0
    forks: int = 0
    below: tuple[Node, ...] = ()

    def without_tail(self) -> Match:
        return replace(self, nodes=self.nodes[: self.whole], tail=None, tail_tokens=0, below=())

    @property
    def tokens(self) -> int:
        return (self.nodes[-1].depth if self.nodes else 0) + self.tail_tokens

    @property
    def reach(self) -> int:
        """Tokens that need not be computed: those there, and those that can be loaded."""
        return self.below[-1].depth if self.below else self.tokens
