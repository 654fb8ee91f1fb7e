"""The prefix tree and the pools under it, by themselves."""

from __future__ import annotations

import pytest

from penstock.core.kv.block_pool import BlockPool
from penstock.core.kv.groups import FullGroup, SlidingGroup
from penstock.core.kv.node import Namespace
from penstock.core.kv.radix_tree import RadixTree
from penstock.core.protocol import NULL_BLOCK

MINE = Namespace("")


def group_of(pool: BlockPool, size: int, window: int | None) -> FullGroup:
    return FullGroup(0, pool, size) if window is None else SlidingGroup(0, pool, size, window)


def tree_of(blocks: int = 32, size: int = 4, window: int | None = None) -> tuple[RadixTree, BlockPool]:
    pool = BlockPool(blocks)
    return RadixTree((group_of(pool, size, window),), size), pool


def put(tree: RadixTree, pool: BlockPool, tokens: list[int], namespace: Namespace = MINE) -> list[int]:
    """Inserts a finished sequence; returns its blocks, referred to by the tree alone."""
    node = tree.enter(namespace)
    blocks = []
    for start in range(0, len(tokens), 4):
        child, taken = tree.fill(node, namespace, tuple(tokens[start : start + 4]), [block := pool.allocate()])
        tree.release(0, block)
        blocks.append(child.blocks[0])
        assert taken
        tree.move(node, child)
        node = child
    tree.move(node, None)
    tree.check_integrity()
    return blocks


def test_pool_counts_references() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    assert {first, second} == {1, 2} and NULL_BLOCK not in (first, second)
    with pytest.raises(IndexError):
        pool.allocate()
    pool.retain(first)
    assert pool.release(first) == 1 and pool.release(first) == 0 and pool.num_free == 1
    with pytest.raises(ValueError, match="more often"):
        pool.release(first)
    with pytest.raises(ValueError, match="not in use"):
        pool.retain(first)
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)
    pool.check_integrity()


def test_matches_are_exact_to_the_token() -> None:
    tree, pool = tree_of()
    put(tree, pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    for length in range(10):
        match = tree.match(MINE, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9], length)
        assert match.tokens == length and match.reason == ""
    match = tree.match(MINE, [1, 2, 3, 4, 5, 9, 9, 9, 9], 8)
    assert (len(match.nodes), match.tail_tokens, match.tokens, match.reason) == (1, 1, 5, "diverged")
    assert tree.match(MINE, [2, 2], 2).reason == "first_seen"
    assert tree.match(Namespace("other"), [1, 2, 3, 4], 4).tokens == 0


def test_the_longest_common_tail_wins() -> None:
    tree, pool = tree_of()
    for last in ([1, 1, 1, 1], [1, 2, 3, 4], [1, 2, 9, 9], [5, 5, 5, 5]):
        put(tree, pool, last)
    assert tree.match(MINE, [1, 2, 3, 9], 4).tail_tokens == 3
    assert tree.match(MINE, [1, 2, 9, 0], 4).tail_tokens == 3
    assert tree.match(MINE, [1, 0, 0, 0], 4).tail_tokens == 1
    assert tree.match(MINE, [7, 0, 0, 0], 4).tail_tokens == 0


def test_a_longer_block_replaces_its_own_beginning() -> None:
    tree, pool = tree_of()
    put(tree, pool, [1, 2])
    free = pool.num_free
    put(tree, pool, [1, 2, 3, 4])
    assert pool.num_free == free and tree.idle == [1]


def test_eviction_takes_leaves_first_and_prefers_what_was_used_less() -> None:
    tree, pool = tree_of()
    put(tree, pool, [1, 2, 3, 4, 5, 6, 7, 8])
    put(tree, pool, [9, 9, 9, 9])
    for node in tree.match(MINE, [1, 2, 3, 4, 5, 6, 7, 8], 8).nodes:
        node.uses += 3
        block = node.blocks[0]
        tree.retain(0, block)
        tree.release(0, block)
    assert tree.evict(0) and tree.match(MINE, [9, 9, 9, 9], 4).reason == "evicted"
    assert tree.match(MINE, [1, 2, 3, 4, 5, 6, 7, 8], 8).tokens == 8
    assert tree.evict(0) and tree.match(MINE, [1, 2, 3, 4, 5, 6, 7, 8], 8).tokens == 4
    assert tree.evict(0) and not tree.evict(0)
    assert pool.num_free == 31 and tree.idle == [0]
    tree.check_integrity()


def test_a_block_in_use_is_not_evicted() -> None:
    tree, pool = tree_of()
    (block,) = put(tree, pool, [1, 2, 3, 4])
    tree.retain(0, block)
    assert tree.idle == [0] and not tree.evict(0)
    tree.release(0, block)
    assert tree.idle == [1] and tree.evict(0)


def test_sliding_blocks_go_alone_and_limit_the_hit() -> None:
    full, sliding = BlockPool(16), BlockPool(16)
    tree = RadixTree((FullGroup(0, full, 4), SlidingGroup(1, sliding, 4, 5)), 4)
    node = tree.enter(MINE)
    for start in range(0, 16, 4):
        pair = [full.allocate(), sliding.allocate()]
        node_after, _ = tree.fill(node, MINE, tuple(range(start, start + 4)), pair)
        for g, block in enumerate(pair):
            tree.release(g, block)
        tree.move(node, node_after)
        node = node_after
    tree.move(node, None)
    assert tree.match(MINE, list(range(16)), 16).tokens == 16
    assert tree.evict(1)  # the first block's: no longer needed at 16 tokens, needed at 4 to 8
    assert tree.match(MINE, list(range(16)), 16).tokens == 16
    assert tree.match(MINE, list(range(8)), 8).tokens == 8  # sees positions 4 … 7
    short = tree.match(MINE, [*range(7), 99], 8)
    assert short.tokens == 0 and short.reason == "window_evicted"
    tree.check_integrity()


def test_announced_nodes_are_seen_as_pending_until_filled_or_withdrawn() -> None:
    tree, pool = tree_of()
    owner = object()
    root = tree.enter(MINE)
    nodes = tree.announce(root, MINE, [1, 2, 3, 4, 5, 6], owner)
    match = tree.match(MINE, [1, 2, 3, 4, 5, 6], 5)
    assert (match.tokens, match.pending, match.owner, match.reason) == (0, 5, owner, "in_flight")
    assert tree.match(MINE, [1, 2, 3, 4, 5, 7], 5).pending == 4
    filled, taken = tree.fill(root, MINE, (1, 2, 3, 4), [block := pool.allocate()])
    tree.release(0, block)
    assert taken and filled is nodes[0]
    assert tree.match(MINE, [1, 2, 3, 4, 5, 6], 5).tokens == 4
    tree.withdraw(nodes, owner)
    assert tree.match(MINE, [1, 2, 3, 4, 5, 6], 5).pending == 0
    tree.move(root, None)
    tree.check_integrity()


def test_namespaces_vanish_with_their_last_node() -> None:
    tree, pool = tree_of()
    for i in range(200):
        put(tree, pool, [1, 2, 3, 4], namespace=Namespace(f"tenant{i}"))
        if not pool.num_free:
            assert tree.evict(0)
    tree.clear()
    assert pool.num_free == 31 and not tree._roots
