"""One prefix tree over all cache groups: token-exact matching, nodes in flight, eviction, miss reasons.

A node stands for one block of tokens (fewer for the last block of a finished sequence) and holds, per cache group, the
block with their entries. Keys are the tokens themselves, compared exactly, never hashes of them, so that no two
prefixes can be confused. What may be known to one owner alone hangs below a node of its own, a portal, where the
public prefix ends. Prefix sharing as a tree: Zheng et al., SGLang, 2312.07104 (RadixAttention).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

from penstock.core.kv.groups import FullGroup
from penstock.core.kv.node import Key, Match, Namespace, Node
from penstock.core.kv.observer import Observer
from penstock.core.kv.serving import Serving
from penstock.core.kv.states import States
from penstock.core.policies import misses
from penstock.core.policies.eviction import Evicted, EvictionOrder
from penstock.core.policies.retention import Retained
from penstock.core.protocol import NULL_BLOCK


class RadixTree:
    """Prefixes of all namespaces, over the blocks of these groups and the recurrent states."""

    def __init__(
        self,
        groups: Sequence[FullGroup],
        block_size: int,
        states: States | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._pools = tuple(group.pool for group in groups)
        self._states = states or States()
        self._single = tuple(g for g, group in enumerate(groups) if not group.essential)  # blocks that go one by one
        self._essential = tuple(g for g, group in enumerate(groups) if group.essential)
        self._serving = Serving(self._groups, self._single, self._states)
        self._block_size = block_size
        self._roots: dict[Hashable, Node] = {}  # of each space
        pools = self._pools
        self.pinned: list[list[int]] = [[] for _ in pools]  # per group: blocks of public prefixes that always stay
        self._holder: list[dict[int, Node]] = [{} for _ in pools]
        self._eviction = [
            EvictionOrder(g, block_size, 4 * pool.num_blocks + 64, partial(self._evictable, g))
            for g, pool in enumerate(pools)
        ]
        self._evicted = Evicted(4 * max(pool.num_blocks for pool in pools))
        self.retained = Retained(min(pools[g].num_blocks - 1 for g in self._essential or range(len(pools))))
        self.idle = [0] * len(pools)  # per group: blocks only the tree refers to, all of which eviction can free
        self.observer = Observer()

    # -- matching ---------------------------------------------------------------------------------------------------

    def enter(self, namespace: Namespace) -> Node:
        """The root of a namespace's space, with one more user; the user moves on with `move`."""
        root = self._root(namespace)
        root.users += 1
        return root

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace.space)
        if root is None:
            root = self._roots[namespace.space] = Node(None, namespace.space, (), len(self._pools))
        return root

    @staticmethod
    def child(node: Node, namespace: Namespace, key: Key) -> Node | None:
        """What follows a node, as a namespace sees it."""
        child = node.children.get(key)
        if child is None and node.public and (portal := node.children.get(namespace.portal)) is not None:
            child = portal.children.get(key)
        return child

    def _parent(self, node: Node, namespace: Namespace, key: Key) -> Node:
        """Where a namespace keeps what follows a node: there if that is public, else below its portal."""
        if not node.public or namespace.owner is None or key in node.children:
            return node
        portal = node.children.get(namespace.portal)
        if portal is None:
            portal = node.children[namespace.portal] = Node(node, namespace.portal, (), len(self._pools))
        return portal

    def move(self, user_at: Node, to: Node | None) -> None:
        """A user of one node goes on to another, or leaves."""
        if to is not None:
            to.users += 1
        user_at.users -= 1
        self._unlink_if_empty(user_at)

    def match(self, namespace: Namespace, tokens: Sequence[int], limit: int, *, lower: bool = True) -> Match:
        """Finds the longest prefix, at most `limit` tokens long, that every cache group can serve.

        With `lower`, what a lower tier has may go on from it.
        """
        root = self._roots.get(namespace.space)
        if root is None:
            first = tuple(tokens[: self._block_size])
            return Match((), None, 0, 0, None, misses.unseen(namespace, first, self._roots.values()) if limit else "")
        size = self._block_size
        node, position = root, 0
        nodes: list[Node] = []
        while position + size <= limit:
            child = self.child(node, namespace, tuple(tokens[position : position + size]))
            if child is None or not child.filled:
                break
            nodes.append(child)
            node, position = child, position + size
        found = position
        portal = node.children.get(namespace.portal) if node.public else None
        valid = self._serving.whole(nodes)
        served, (tail, tail_tokens) = valid, (None, 0)
        if valid == len(nodes) or not self._states.divisible:
            rest = tuple(tokens[position : min(limit, position + size)])
            tails = [self._serving.tail(parent, nodes, rest) for parent in (node, portal) if parent is not None]
            tail, tail_tokens = max(tails, key=lambda found: found[1])
            found += tail_tokens
            served = len(nodes) if tail else valid
        total = (nodes[served - 1].depth if served else 0) + tail_tokens
        pending, owner = self._pending(node, namespace, tokens, position)
        pending = min(pending, limit)
        below = self._below(nodes[:valid], namespace, tokens, limit) if lower and pending <= found else ()
        if below and below[-1].depth > total:
            tail, tail_tokens = None, 0
            served = valid
            end = below[-1].depth
            reason = misses.below_ends(below[-1], tuple(tokens[end : min(limit, end + size)]), size, self._evicted)
        else:
            below = ()
            at = node if portal is None else portal
            reason = "" if total >= limit else self._miss_reason(at, namespace, tokens, position)
            if reason and found > total:
                reason = self._states.miss_reason
            elif reason and pending > found:
                reason = "in_flight"
        forks = self._states.forks(position)
        return Match(tuple(nodes[:served]), tail, tail_tokens, pending, owner, reason, valid, forks, below)

    def _below(self, nodes: list[Node], namespace: Namespace, tokens: Sequence[int], limit: int) -> tuple[Node, ...]:
        """Nodes that go on where these end and can be loaded, as far as every group can serve the last of them.

        Some of what they need may be on the device too; it is loaded all the same.
        """
        node = nodes[-1] if nodes else self._roots[namespace.space]
        gaps = {g: next((n.depth for n in reversed(nodes) if n.blocks[g] == NULL_BLOCK), 0) for g in self._single}
        chain: list[Node] = []
        best = 0
        while node.depth + self._block_size <= limit:
            key = tuple(tokens[node.depth : node.depth + self._block_size])
            child = self.child(node, namespace, key)
            if child is None or not all(g in child.below for g in self._essential):
                break
            chain.append(child)
            node = child
            gaps |= {g: node.depth for g in self._single if g not in node.below}
            if self._states.kept_below(node) and self._serving.holds(gaps, node.depth):
                best = len(chain)
        return tuple(chain[:best])

    def _pending(self, node: Node, namespace: Namespace, tokens: Sequence[int], position: int) -> tuple[int, Any]:
        """Where the last block that another sequence is now computing for this prefix ends, and that sequence; 0, None.

        A partial last block must be equal as a whole.
        """
        size = self._block_size
        end, owner = 0, None
        while position < len(tokens):
            child = self.child(node, namespace, tuple(tokens[position : position + size]))
            if child is None or not (child.filled or child.owner is not None):
                break
            node, position = child, child.depth
            if not child.filled:
                end, owner = position, child.owner
        return end, owner

    def _miss_reason(self, node: Node, namespace: Namespace, tokens: Sequence[int], position: int) -> str:
        key = tuple(tokens[position : position + self._block_size])
        why = misses.diverged(node, key, self._evicted)
        return why if node.depth or why == "evicted" else misses.unseen(namespace, key, self._roots.values())

    # -- growing ----------------------------------------------------------------------------------------------------

    def announce(self, node: Node, namespace: Namespace, tokens: Sequence[int], owner: Any) -> list[Node]:
        """Adds nodes, without blocks, for tokens after `node` that `owner` is about to compute."""
        announced = []
        size = self._block_size
        for position in range(node.depth, len(tokens), size):
            key = tuple(tokens[position : position + size])
            node = self._parent(node, namespace, key)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, key, len(self._pools), owner)
                announced.append(child)
            elif child.below and not child.filled and child.owner is None:
                child.owner = owner
                announced.append(child)
            node = child
        return announced

    def withdraw(self, nodes: Sequence[Node], owner: Any) -> None:
        """Removes announced nodes that are still unfilled, deepest first."""
        for node in reversed(nodes):
            if node.owner is owner:
                node.owner = None
                self._unlink_if_empty(node)

    def fill(self, parent: Node, namespace: Namespace, key: Key, blocks: Sequence[int]) -> tuple[Node, bool]:
        """Puts computed blocks under `parent`; returns the node and whether the blocks were taken.

        They are not taken if the node is already filled and in use, or public, which no owner changes; then the caller
        keeps its own copy. Idle blocks with the same content are freed in favour of the caller's.
        """
        parent = self._parent(parent, namespace, key)
        node = parent.children.get(key)
        if node is not None and node.filled:
            if node.public or not self._all_idle(node):
                return node, False
            self._drop_blocks(node)
            self._unfill(node)
        if node is None:
            node = parent.children[key] = Node(parent, key, key, len(self._pools))
        node.owner, node.filled = None, True
        at = bisect_left(parent.order, key)
        if at and len(parent.order[at - 1]) < len(key) and key[: len(parent.order[at - 1])] == parent.order[at - 1]:
            self._drop_subsumed(parent.children[parent.order[at - 1]])
        insort(parent.order, key)
        for g, block in enumerate(blocks):
            if block != NULL_BLOCK:
                self._pools[g].retain(block)
                node.blocks[g] = block
                self._holder[g][block] = node
                self.observer.stored(node, g)
        return node, True

    def restore(self, parent: Node | None, namespace: Namespace, key: Key) -> Node:
        """A node after `parent`, None for the root of a space, whose blocks lie below: the caller says where."""
        above = self._parent(self._root(namespace) if parent is None else parent, namespace, key)
        return above.children.setdefault(key, Node(above, key, key, len(self._pools)))

    def has_longer(self, parent: Node, namespace: Namespace, key: Key) -> bool:
        """Whether what a namespace sees after `parent` starts with `key`."""
        portal = parent.children.get(namespace.portal) if parent.public else None
        orders = [node.order for node in (parent, portal) if node is not None]
        return any(order[at][: len(key)] == key for order in orders if (at := bisect_left(order, key)) < len(order))

    def pin(self, node: Node) -> None:
        """Keeps a public prefix for good: all it needs to be had up to that node."""
        for g, block in self.needed(node):
            if block not in self.pinned[g]:
                self.retain(g, block)
                self.pinned[g].append(block)

    def needed(self, node: Node) -> Iterator[tuple[int, int]]:
        """(group, block) of all that a prefix needs to be had up to that node."""
        seen_from = [group.first_needed(node.depth) for group in self._groups]
        up: Node | None = node
        while up is not None:
            for g, block in enumerate(up.blocks):
                if block != NULL_BLOCK and up.depth > seen_from[g]:
                    yield g, block
            up = up.parent

    def retain_for(self, node: Node, owner: str, priority: int, seconds: float | None) -> None:
        """An owner wants a node's blocks kept longer, or less long, than others."""
        if node.filled and self.retained.mark(node, owner, priority, seconds):
            self._offer_all(node)

    def _offer_all(self, node: Node) -> None:
        for g in range(len(self._pools)):
            self._offer(g, node)

    def discard(self, node: Node) -> None:
        """Takes a leaf out of the tree; sequences that hold its blocks keep them."""
        if node.parent is not None and not node.children:
            self._remove(node)

    def _drop_subsumed(self, node: Node) -> None:
        if self._all_idle(node) and node.state is None:
            self.discard(node)

    def _all_idle(self, node: Node) -> bool:
        return all(block == NULL_BLOCK or self._pools[g].refs[block] == 1 for g, block in enumerate(node.blocks))

    # -- references and eviction --------------------------------------------------------------------------------------

    def retain(self, group: int, block: int) -> None:
        """A sequence takes a block that may be idle in the tree."""
        if self._pools[group].refs[block] == 1 and block in self._holder[group]:
            self.idle[group] -= 1
        self._pools[group].retain(block)

    def release(self, group: int, block: int) -> None:
        """A sequence lets go of a block; if only the tree holds it now, it becomes a candidate for eviction."""
        if self._pools[group].release(block) == 1 and block in self._holder[group]:
            self.idle[group] += 1
            self._offer(group, self._holder[group][block])

    def _offer(self, group: int, node: Node) -> None:
        """Queues a node for eviction from a group, if it may be evicted now."""
        if self._evictable(group, node):
            self._eviction[group].push(node)

    def _evictable(self, group: int, node: Node) -> bool:
        """Whether only the tree holds the node's block and no longer prefix depends on it."""
        block = node.blocks[group]
        if block == NULL_BLOCK or self._pools[group].refs[block] != 1:
            return False
        return not self._groups[group].essential or not node.order

    def evict(self, group: int) -> bool:
        """Frees an idle block of a group, and what becomes useless with it; False if there is none."""
        for ended in self.retained.ended():
            self._offer_all(ended)
        node = self._eviction[group].pop()
        if node is None:
            return False
        self._evicted.add(node.path)
        if self._groups[group].essential:
            self._remove(node)
        else:
            self._drop_block(group, node)
            self._unlink_if_empty(node)
        return True

    def next_victims(self, group: int, most: int) -> list[Node]:
        """Nodes whose blocks of a group would be evicted next, in that order, the prefixes of each after it."""
        found: list[Node] = []
        for node in self._eviction[group].first(most):
            found.append(node)
            up = node.parent
            while self._groups[group].essential and up is not None and len(up.order) == 1 and len(found) < most:
                found.append(up)
                up = up.parent
        return found[:most]

    def _drop_block(self, group: int, node: Node) -> None:
        """Ends the tree's reference to one block of a node."""
        block = node.blocks[group]
        node.blocks[group] = NULL_BLOCK
        del self._holder[group][block]
        self.observer.removed(node, group)
        if self._pools[group].release(block) == 0:
            self.idle[group] -= 1

    def _remove(self, node: Node) -> None:
        """Takes a node's blocks away, and the node itself once nothing needs it."""
        self._drop_blocks(node)
        self._unfill(node)
        self._unlink_if_empty(node)

    def _drop_blocks(self, node: Node) -> None:
        for g, block in enumerate(node.blocks):
            if block != NULL_BLOCK:
                self._drop_block(g, node)

    def _unfill(self, node: Node) -> None:
        """Stops offering a node for matches; its parent may become a leaf by that."""
        parent = node.parent
        if node.filled and parent is not None:
            node.filled = False
            self._states.drop(node)
            self.retained.forget(node)
            del parent.order[bisect_left(parent.order, node.key)]
            for g in self._essential:
                self._offer(g, parent)

    def _unlink_if_empty(self, node: Node) -> None:
        """Takes a node that holds nothing, leads to nothing and has no user out of the tree; then its parent."""
        while not (
            node.children or node.users or node.owner is not None or any(node.blocks) or node.below or node.saving
        ):
            parent = node.parent
            if parent is None:
                if self._roots.get(node.name) is node:
                    del self._roots[node.name]
                return
            self._unfill(node)
            del parent.children[node.name]
            node.parent = None
            node = parent

    def forget_below(self, node: Node, group: int) -> None:
        """The lower tier has no copy of a node's block any more."""
        if node.below.pop(group, None) is not None:
            self.observer.removed(node, group, below=True)
        self._unlink_if_empty(node)

    def saved(self, node: Node, group: int, place: int | None) -> None:
        """A copy to the lower tier has ended; `place` is where it lies, None if it failed."""
        node.saving -= 1
        if place is not None:
            node.below[group] = place
            self.observer.stored(node, group, below=True)
        self._unlink_if_empty(node)

    def copies_below(self) -> Iterator[tuple[Node, int, int]]:
        """(node, group, place) of every copy in a lower tier."""
        for root in self._roots.values():
            for node in self._walk(root):
                yield from ((node, group, place) for group, place in node.below.items())

    def drop_space(self, space: Hashable) -> None:
        """Forgets a space that no sequence uses any more."""
        for node in reversed(list(self._walk(self._roots.get(space)))):
            self._remove(node)

    def clear(self) -> None:
        """Forgets every prefix that no sequence uses."""
        for g in range(len(self._pools)):
            while self.evict(g):
                pass

    def check_integrity(self) -> None:
        """Raises AssertionError if counts, links or orders disagree."""
        self.retained.check_integrity()
        held: list[dict[int, Node]] = [{} for _ in self._pools]
        for space, root in self._roots.items():
            assert root.name == space and root.public
            for node in self._walk(root):
                if node.children:
                    assert node.order == sorted(child.key for child in node.children.values() if child.filled)
                else:
                    assert not node.order
                    reasons = node.filled or node.users or node.below or node.saving or node.owner is not None
                    assert reasons or node is root, "a node is of no use"
                if node.filled:
                    assert all(node.blocks[g] for g in self._essential), "a block is missing"
                for name, child in node.children.items():
                    assert (child.parent, child.name, child.depth) == (node, name, node.depth + len(child.key))
                    assert child.public == (node.public and name == child.key)
                for g, block in enumerate(node.blocks):
                    if block != NULL_BLOCK:
                        assert block not in held[g], f"block {block} of group {g} is in two nodes"
                        held[g][block] = node
        for g, pool in enumerate(self._pools):
            assert held[g] == self._holder[g], f"group {g}: the block index disagrees with the tree"
            assert self.idle[g] == sum(pool.refs[block] == 1 for block in held[g]), f"group {g}: idle count"

    def holds(self, group: int, block: int) -> bool:
        """Whether the tree refers to a block of a group."""
        return block in self._holder[group]

    def held(self, group: int) -> frozenset[int]:
        """Blocks of a group the tree refers to."""
        return frozenset(self._holder[group])

    def _walk(self, root: Node | None) -> Iterator[Node]:
        stack = [root] if root else []
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
