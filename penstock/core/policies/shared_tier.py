"""A tier whose store others write to as well: before a prompt is computed it is asked what they have put there.

The step loop never waits for an answer: a sequence does, beside others that are computed, and no longer than its
deadline. What is found becomes nodes of the tree that lie below, as after a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.core.kv.node import Namespace, Node
from penstock.core.policies.bounded_tier import BoundedTier, Catalog, digest_after, digest_of

if TYPE_CHECKING:
    from penstock.core.kv.cache import KVCache
    from penstock.core.policies.order import Admission
    from penstock.core.sequence import Sequence as TokenSequence

_LEAST_PATIENCE = 0.1  # seconds that a sequence waits for an answer,
_MOST_PATIENCE = 2.0  # or as long as computing takes
_QUIET = 10.0  # seconds in which nothing is asked for after one came too late
_AGAIN = 2.0  # seconds after which what was not there is asked for again
_IDLE = 0.002  # seconds that the loop waits for an answer where nothing else is to be done
_MOST_ADOPTED = 256  # blocks in a step
_SHARE = 0.25  # of what computing takes, which an answer may
_TRIED_AGAIN = 30.0  # seconds after which a store whose answers take longer is asked again
_REMEMBERED = 16_384  # blocks that were asked for


class Chain(NamedTuple):
    """Blocks of a prompt that nobody here knows.

    Attributes:
        before: the digest of what they go on from.
        tokens: whole blocks of them.
        block_size: tokens of a block.
    """

    before: bytes
    tokens: tuple[int, ...]
    block_size: int

    @property
    def first(self) -> bytes:
        """The digest of the first block."""
        return digest_after(self.before, self.block(0))

    def block(self, number: int) -> tuple[int, ...]:
        """The tokens of one of the blocks."""
        return self.tokens[number * self.block_size : (number + 1) * self.block_size]

    def digests(self) -> list[bytes]:
        """That of each block, which takes long for many."""
        found, digest = [], self.before
        for number in range(len(self.tokens) // self.block_size):
            digest = digest_after(digest, self.block(number))
            found.append(digest)
        return found


@dataclass(slots=True, eq=False)
class Search:
    """A question to the store, and its answer once that is there.

    Attributes:
        chain: what was asked for.
        begun: when it was asked.
        answered: set when the answer is there.
        seconds: that took so long.
        digests: of all blocks of the chain.
        groups: of its first blocks, as far as there are all they need, of which cache groups there are copies.
    """

    chain: Chain
    begun: float
    answered: Event = field(default_factory=Event)
    digests: Sequence[bytes] = ()
    groups: Sequence[tuple[int, ...]] = ()
    seconds: float = 0.0

    def end(self) -> None:
        """The answer is there, or there is none."""
        self.seconds = monotonic() - self.begun
        self.answered.set()


class Seeker(Protocol):
    """Who asks the store, in threads of its own."""

    def seek(self, search: Search) -> bool:
        """Begins a search; False where the store cannot be asked now."""


@dataclass(slots=True)
class _Open:
    search: Search
    until: float
    taken: int = 0  # blocks that are in the tree
    closed: float | None = None  # since when nothing is to be done about it


class SharedTier(BoundedTier):
    """Copies in a store that others share."""

    def __init__(
        self,
        places: Sequence[int],
        most_saving: int,
        dropped: Callable[[Node, int], None],
        *,
        seeker: Seeker,
        catalog: Catalog | None = None,
    ) -> None:
        """As a BoundedTier's, all of which is copied; `seeker` asks what others have put there."""
        super().__init__(places, most_saving, dropped, catalog=catalog)
        self._seeker = seeker
        self._searches: OrderedDict[bytes, _Open] = OrderedDict()  # by the digest of the first block asked for
        self._quiet_until = float("-inf")
        self._answer_seconds = 0.0  # that answers take, newer ones counting more
        self._asked = float("-inf")

    def sought(self, admission: Admission) -> bool:
        cache, sequence = admission.cache, admission.sequence
        limit = sequence.reusable // cache.block_size * cache.block_size
        if admission.match.reach >= limit:
            return False
        nodes = admission.match.nodes
        node, coming = _last_known(cache, sequence, limit, nodes[-1] if nodes else None)
        depth = 0 if node is None else node.depth
        if coming or depth >= limit:
            return False
        before = _digest_before(node, sequence.namespace)
        now = monotonic()
        one = self._searches.get(digest_after(before, tuple(sequence.keys[depth : depth + cache.block_size])))
        if one is None or (one.closed is not None and now - one.closed > _AGAIN):
            one = self._ask(Chain(before, tuple(sequence.keys[depth:limit]), cache.block_size), now)
        if one is None or one.closed is not None:
            return False
        if one.search.answered.wait(_IDLE if admission.idle_engine else 0):
            return self._take(one, cache, sequence.namespace, node)
        if now < one.until:
            return True
        self._quiet_until = now + _QUIET
        one.closed = now
        return False

    def _ask(self, chain: Chain, now: float) -> _Open | None:
        """Has the store asked for a chain, unless computing it is sooner done."""
        tokens = len(chain.tokens)
        blocks = tokens // chain.block_size * len(self.places)
        computed = self.seconds_for(tokens)
        if now < self._quiet_until or not self._is_worth(blocks, tokens):
            return None
        if computed is not None and self._answer_seconds > _SHARE * computed and now - self._asked < _TRIED_AGAIN:
            return None
        search = Search(chain, now)
        if not self._seeker.seek(search):
            return None
        self._asked = now
        patience = _MOST_PATIENCE if computed is None else min(_MOST_PATIENCE, max(_LEAST_PATIENCE, computed))
        one = _Open(search, now + patience)
        self._remember(chain.first, one)
        return one

    def _remember(self, first: bytes, one: _Open) -> None:
        self._searches[first] = one
        self._searches.move_to_end(first)
        while len(self._searches) > _REMEMBERED:
            self._searches.popitem(last=False)

    def _take(self, one: _Open, cache: KVCache, namespace: Namespace, node: Node | None) -> bool:
        """Puts what was found behind a node, some of it at a time; whether the tree knows more by that."""
        begun, found = one.taken, one.search.groups
        if not begun:
            self._answer_seconds += (one.search.seconds - self._answer_seconds) / 2
        cursor = cache.tree.enter(namespace)  # a user, so that what is put there stays while places are given up for it
        if node is not None:
            cache.tree.move(cursor, node)
            cursor = node
        for number in range(begun, min(len(found), begun + _MOST_ADOPTED)):
            child = cache.tree.restore(cursor, namespace, one.search.chain.block(number))
            cache.tree.move(cursor, child)
            cursor = child
            same = digest_of(child) == one.search.digests[number]
            if not (same and all(g in child.below or self.adopt(child, g) for g in found[number])):
                one.closed = monotonic()
                break
            one.taken += 1
            # Where it is given up for what comes behind it, it is not asked for again.
            self._remember(child.digest, one)
        cache.tree.move(cursor, None)
        if one.taken == len(found):
            one.closed = monotonic()
        if one.taken < len(one.search.digests):  # where it is gone on with, or is not asked for again soon
            self._remember(one.search.digests[one.taken], one)
        return one.taken > begun


def _last_known(cache: KVCache, sequence: TokenSequence, limit: int, last: Node | None) -> tuple[Node | None, bool]:
    """Of a sequence's first `limit` tokens the last node that is here or lies below, None for none; and whether what
    follows it is being computed."""
    namespace = sequence.namespace
    tree, size = cache.tree, cache.block_size
    essential = [g for g, group in enumerate(cache.groups) if group.essential]
    root = tree.enter(namespace)
    node, coming = last or root, False
    while node.depth + size <= limit:
        child = tree.child(node, namespace, tuple(sequence.keys[node.depth : node.depth + size]))
        if child is None or not (child.filled or all(g in child.below for g in essential)):
            coming = child is not None and child.owner is not None
            break
        node = child
    tree.move(root, None)
    return (node if node.depth else None), coming


def _digest_before(node: Node | None, namespace: Namespace) -> bytes:
    """What a namespace's next node after one goes on from."""
    digest = digest_after(b"", namespace.space) if node is None else digest_of(node)
    if namespace.owner is not None and (node is None or node.public):
        return digest_after(digest, namespace.portal)
    return digest
