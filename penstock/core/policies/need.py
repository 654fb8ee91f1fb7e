"""How many blocks sequences will need, and what losing theirs would cost. Bounds, gates and policies count with it."""

from __future__ import annotations

from collections import abc

from penstock.core.kv.cache import KVCache
from penstock.core.kv.node import Match
from penstock.core.sequence import Sequence


def can_hold(cache: KVCache, lengths: abc.Sequence[int], chunk: int) -> bool:
    """Whether sequences of so many tokens, which go on together, fit where nothing but pinned prefixes is."""
    growth = len(lengths) - 1  # what the memory gate keeps free for those that run
    return all(
        sum(group.peak_blocks(tokens, chunk) for tokens in lengths) + growth <= cache.room(g)
        for g, group in enumerate(cache.groups)
    )


def admission_need(cache: KVCache, group: int, tokens: int, chunk: int, match: Match) -> int:
    """Blocks of `available` that admitting a sequence of that many tokens would take, by its end."""
    manager = cache.groups[group]
    shared = match.nodes[manager.first_needed(match.tokens) // cache.block_size :]
    refs = cache.pools[group].refs
    in_use = sum(refs[node.blocks[group]] > 1 for node in shared)
    return max(0, manager.peak_blocks(tokens, min(chunk, max(1, tokens - match.tokens))) - in_use)


def growth(cache: KVCache, sequence: Sequence, chunk: int) -> tuple[int, ...]:
    """Per group, blocks a running sequence still needs for the tokens it knows."""
    allocation, known = sequence.allocation, sequence.known
    assert allocation is not None, "the sequence is not running"
    chunk = min(chunk, max(1, known - sequence.computed))
    return tuple(
        max(0, group.peak_blocks(known, chunk) - table.held)
        for group, table in zip(cache.groups, allocation.tables, strict=True)
    )


def recompute_cost(sequence: Sequence, cache: KVCache) -> int:
    """Tokens that would have to be computed again if the sequence lost the blocks that are its alone."""
    if sequence.allocation is None:
        return 0
    group = next((g for g, manager in enumerate(cache.groups) if manager.essential), 0)
    refs = cache.pools[group].refs
    blocks = sequence.allocation.tables[group].blocks
    own = sum(refs[block] <= 1 + cache.tree.holds(group, block) for block in blocks if block)
    return min(sequence.computed, own * cache.block_size)
