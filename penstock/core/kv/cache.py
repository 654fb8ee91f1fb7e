"""The KV cache as the scheduler sees it: block tables of sequences over pools and the prefix tree. Ids, no memory."""

from __future__ import annotations

from collections import abc
from dataclasses import replace

from penstock.core.kv.block_pool import BlockPool
from penstock.core.kv.cache_spec import CacheGroup, CacheKind
from penstock.core.kv.checkpoints import Checkpoints
from penstock.core.kv.node import Match, Node
from penstock.core.kv.radix_tree import RadixTree
from penstock.core.protocol import NULL_BLOCK, CacheOp, CacheOpKind
from penstock.core.sequence import CacheHold, Sequence

_SERVED = (CacheKind.FULL, CacheKind.LATENT, CacheKind.SLIDING)


class KVCache:
    """Gives sequences blocks, shares what is already computed, and takes blocks back no earlier than is safe.

    A block is released only after the last step that touches it has committed: releases of a sequence with a step in
    flight wait in `_deferred`, keyed by that step. `releases` grows whenever blocks may have become available.
    Where layers keep recurrent states, blocks alone are of no use to another sequence: prefixes are shared up to where
    a checkpoint of the state is kept (`states`). `ops` are the cache operations decided on since the last plan.
    """

    def __init__(
        self,
        groups: abc.Sequence[CacheGroup],
        num_blocks: abc.Sequence[int],
        block_size: int,
        states: Checkpoints | None = None,
    ) -> None:
        for group in groups:
            if group.kind not in _SERVED:
                raise ValueError(f"cache kind {group.kind.value} is not served; served: {[k.value for k in _SERVED]}")
        self.block_size, self.states = block_size, states
        self.windows = tuple(group.window for group in groups)
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self.tree = RadixTree(self.pools, self.windows, block_size, states.drop if states else None)
        self.ops: list[CacheOp] = []
        self._nothing: tuple[tuple[int, ...], ...] = ((),) * len(groups)
        self._deferred: dict[int, list[tuple[int, int]]] = {}
        self.committed_step = -1
        self.releases = 0

    # -- arithmetic ---------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens the whole cache holds; sliding groups bound it only where there is nothing else."""
        kept = [g for g, window in enumerate(self.windows) if window is None] or range(len(self.pools))
        return min(self._room(g) for g in kept) * self.block_size

    def _room(self, group: int) -> int:
        """Blocks of a group that requests can have: all but those of pinned prefixes."""
        return self.pools[group].num_blocks - 1 - len(self.tree.pinned[group])

    def available(self, group: int) -> int:
        """Blocks that can be had now, by eviction if need be."""
        return self.pools[group].num_free + self.tree.idle[group]

    def can_hold(self, tokens: int, chunk: int) -> bool:
        """Whether a sequence of that many tokens fits into pools that hold nothing but pinned prefixes."""
        return all(self.peak_blocks(g, tokens, chunk) <= self._room(g) for g in range(len(self.pools)))

    def will_fit(self, sequence: Sequence, tokens: int) -> bool:
        """Whether `extend` can succeed once the steps in flight have committed."""
        hold = sequence.hold
        assert hold is not None
        for g, table in enumerate(hold.tables):
            coming = {block for blocks in self._deferred.values() for group, block in blocks if group == g}
            if -(-tokens // self.block_size) - len(table) > self.available(g) + len(coming):
                return False
        return True

    def coming(self) -> int:
        """References whose release waits for a step in flight."""
        return sum(map(len, self._deferred.values()))

    def admission_need(self, group: int, tokens: int, chunk: int, match: Match) -> int:
        """Blocks of `available` that admitting a sequence of that many tokens would take, by its end."""
        shared = match.nodes
        window = self.windows[group]
        if window is not None:
            shared = shared[max(0, match.tokens - window + 1) // self.block_size :]
        in_use = sum(self.pools[group].refs[node.blocks[group]] > 1 for node in shared)
        return max(0, self.peak_blocks(group, tokens, min(chunk, max(1, tokens - match.tokens))) - in_use)

    def growth(self, sequence: Sequence, chunk: int) -> tuple[int, ...]:
        """Per group, blocks a running sequence still needs for the tokens it knows."""
        hold = sequence.hold
        assert hold is not None
        chunk = min(chunk, max(1, sequence.known - sequence.computed))
        return tuple(
            max(0, self.peak_blocks(g, sequence.known, chunk) - (len(table) - hold.live_from[g]))
            for g, table in enumerate(hold.tables)
        )

    def peak_blocks(self, group: int, tokens: int, chunk: int) -> int:
        """Most blocks a sequence of that many tokens holds at once, when computed at most `chunk` tokens a step."""
        total = -(-tokens // self.block_size)
        window = self.windows[group]
        if window is None:
            return total
        return min(total, -(-(window - 1 + chunk) // self.block_size) + 1)

    # -- a sequence's life --------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence, limit: int) -> Match:
        match = self.tree.match(sequence.namespace, sequence.tokens, limit)
        if self.states is None or match.owner is None:
            return match
        hold: CacheHold = match.owner.hold  # its blocks are of use only up to where it will keep its state
        return replace(match, pending=max((count for count in hold.marks if count <= match.pending), default=0))

    def attach(self, sequence: Sequence, match: Match) -> None:
        """Pins the matched blocks and starts the sequence's tables with them; announces what it will compute."""
        cursor = self.tree.enter(sequence.namespace)
        if match.nodes:
            self.tree.move(cursor, match.nodes[-1])
            cursor = match.nodes[-1]
        tables: list[list[int]] = []
        live_from: list[int] = []
        for g, window in enumerate(self.windows):
            first = 0 if window is None else max(0, match.tokens - window + 1) // self.block_size
            first = min(first, len(match.nodes))
            table = [NULL_BLOCK] * first + [node.blocks[g] for node in match.nodes[first:]]
            for block in table[first:]:
                self.tree.retain(g, block)
            tables.append(table)
            live_from.append(first)
        hold = sequence.hold = CacheHold(tables, live_from, cursor)
        for g, block in enumerate(match.tail.blocks if match.tail else ()):
            if block != NULL_BLOCK:
                self.tree.retain(g, block)
                hold.pins.append((g, block))
        sequence.computed = sequence.committed = len(match.nodes) * self.block_size
        if self.states and self.states.slots:  # another sequence may go on from where this one leaves what is known
            last = (len(sequence.tokens) - (not sequence.public)) // self.block_size * self.block_size
            hold.marks = [count for count in {match.forks, last} if count > match.tokens]

    def copy_match(self, sequence: Sequence, match: Match, step: int) -> None:
        """Copies the matched part of a partial block into the sequence's own block, and a state into its row's slot.

        The source, pinned since `attach`, stays so until `step`, which runs the copy, has committed. `extend` must have
        covered the copied tokens.
        """
        hold = sequence.hold
        assert hold is not None
        if match.tail is not None:
            target, count = len(match.nodes), match.tail_tokens
            self.ops += [CacheOp(CacheOpKind.COPY, g, block, hold.tables[g][target], count) for g, block in hold.pins]
            self._deferred.setdefault(step, []).extend(hold.pins)
            hold.pins = []
            sequence.computed = sequence.committed = match.tokens
        if self.states and match.tokens:
            slot = (match.tail or match.nodes[-1]).state
            assert slot is not None
            self.states.touch(slot)
            self.ops.append(CacheOp(CacheOpKind.COPY, len(self.pools), slot, sequence.row, match.tokens))

    def cut(self, sequence: Sequence, start: int, length: int) -> int:
        """How many of the tokens may be computed now: spans end where a state is to be kept, and wait for that."""
        assert sequence.hold is not None
        return min(length, *(count - start for count in sequence.hold.marks)) if sequence.hold.marks else length

    def _keep_state(self, sequence: Sequence, node: Node) -> None:
        """Has the state of the sequence's row copied for the node where it ends, unless a step in flight goes beyond.

        Not for a public node, where others would see that somebody's prompt left it there.
        """
        at_rest = node.depth == sequence.committed and sequence.last_step <= self.committed_step
        if node.public and not sequence.public:
            return
        free = self.states if at_rest and node.filled and node.state is None else None
        if free and (slot := free.give(node)) is not None:
            self.ops.append(CacheOp(CacheOpKind.CHECKPOINT, len(self.pools), sequence.row, slot, node.depth))

    def forget_states(self) -> None:
        """Drops all checkpoints: a step failed, and what it copied is unknown."""
        self.ops.clear()
        if self.states:
            self.states.clear()

    def announce(self, sequence: Sequence) -> None:
        """Tells the tree which prefix the sequence is about to compute, so that others can wait for it."""
        hold = sequence.hold
        assert hold is not None
        if sequence.computed < sequence.num_prompt:
            hold.announced = self.tree.announce(
                hold.cursor, sequence.namespace, sequence.tokens[: sequence.num_prompt], sequence
            )

    def extend(self, sequence: Sequence, tokens: int) -> tuple[tuple[int, ...], ...] | None:
        """Grows the tables to hold that many tokens; returns new blocks per group, or None and changes nothing."""
        hold = sequence.hold
        assert hold is not None
        needs = [max(0, -(-tokens // self.block_size) - len(table)) for table in hold.tables]
        if not any(needs):
            return self._nothing
        if any(need > self.available(g) for g, need in enumerate(needs)):
            return None
        added = tuple(tuple(self._allocate(g) for _ in range(need)) for g, need in enumerate(needs))
        for table, blocks in zip(hold.tables, added, strict=True):
            table.extend(blocks)
        return added

    def _allocate(self, group: int) -> int:
        pool = self.pools[group]
        while not pool.num_free and self.tree.evict(group):
            pass
        return pool.allocate()

    def commit(self, sequence: Sequence, committed: int) -> None:
        """Entries up to `committed` tokens now exist: whole blocks go into the tree, passed windows are dropped."""
        hold = sequence.hold
        assert hold is not None
        size = self.block_size
        reached_prompt_end = sequence.committed < sequence.num_prompt <= committed
        sequence.committed = committed
        if hold.cursor.depth + size <= committed:
            self._drop_tail(hold)
        while hold.cursor.depth + size <= committed:
            start = hold.cursor.depth
            self._fill(sequence, hold, tuple(sequence.tokens[start : start + size]), start // size)
        if committed in hold.marks:
            hold.marks.remove(committed)
            self._keep_state(sequence, hold.cursor)
        if reached_prompt_end:
            if committed > hold.cursor.depth:
                self._fill_tail(sequence, committed)
            self.tree.withdraw(hold.announced, sequence)  # whatever is not filled by now never will be
            hold.announced = []
            if sequence.public:
                self._pin(hold.cursor)
        for g, window in enumerate(self.windows):
            if window is not None:
                self._drop_passed(g, hold, max(0, committed - window + 1) // size)

    def _pin(self, node: Node) -> None:
        self.tree.pin(node)
        if self.states:
            self.states.pin(node)

    def _fill(self, sequence: Sequence, hold: CacheHold, key: tuple[int, ...], index: int) -> None:
        node, taken = self.tree.fill(hold.cursor, sequence.namespace, key, [table[index] for table in hold.tables])
        if not taken:  # somebody computed the same block: hold theirs too, so that the path stays pinned
            for g, block in enumerate(node.blocks):
                if block != NULL_BLOCK and self.windows[g] is None:  # sliding blocks may go one by one
                    self.tree.retain(g, block)
                    hold.pins.append((g, block))
        self.tree.move(hold.cursor, node)
        hold.cursor = node

    def _fill_tail(self, sequence: Sequence, committed: int) -> None:
        """Offers the entries of a partial last block: those written so far never change."""
        hold = sequence.hold
        assert hold is not None
        start = hold.cursor.depth
        key = tuple(sequence.tokens[start:committed])
        if not key or sequence.public or self.tree.has_longer(hold.cursor, sequence.namespace, key):
            return
        index = start // self.block_size
        self._drop_tail(hold)
        node, taken = self.tree.fill(hold.cursor, sequence.namespace, key, [table[index] for table in hold.tables])
        hold.tail = node if taken else None

    def _drop_tail(self, hold: CacheHold) -> None:
        if hold.tail is not None:
            self.tree.discard(hold.tail)
            hold.tail = None

    def _drop_passed(self, group: int, hold: CacheHold, first: int) -> None:
        table = hold.tables[group]
        for index in range(hold.live_from[group], min(first, len(table))):
            self.tree.release(group, table[index])
            table[index] = NULL_BLOCK
            self.releases += 1
        hold.live_from[group] = max(hold.live_from[group], min(first, len(table)))

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Ends the sequence's hold; with `keep`, its partial last block stays in the tree as well."""
        hold = sequence.hold
        assert hold is not None
        self.tree.withdraw(hold.announced, sequence)
        if keep and sequence.committed > hold.cursor.depth:
            self._fill_tail(sequence, sequence.committed)
        if keep:
            self._keep_state(sequence, hold.tail or hold.cursor)
        held = [(g, block) for g, table in enumerate(hold.tables) for block in table if block != NULL_BLOCK]
        held += hold.pins
        self.tree.move(hold.cursor, None)
        sequence.hold = None
        sequence.computed = 0
        sequence.committed = 0
        if sequence.last_step > self.committed_step:
            self._deferred.setdefault(sequence.last_step, []).extend(held)
        else:
            self._release_all(held)

    def step_committed(self, step: int) -> None:
        """The step is over: what waited for it is released."""
        self.committed_step = step
        self._release_all(self._deferred.pop(step, []))

    def _release_all(self, held: list[tuple[int, int]]) -> None:
        self.releases += bool(held)
        for g, block in held:
            self.tree.release(g, block)

    def check_integrity(self, sequences: abc.Sequence[Sequence]) -> None:
        """Raises AssertionError unless every reference is accounted for."""
        self.tree.check_integrity()
        if self.states:
            self.states.check_integrity()
        for g, pool in enumerate(self.pools):
            pool.check_integrity()
            expected = [0] * pool.num_blocks
            references = [*self.tree.held(g), *self.tree.pinned[g]]
            for sequence in sequences:
                if sequence.hold is not None:
                    references += [block for block in sequence.hold.tables[g] if block != NULL_BLOCK]
                    references += [block for group, block in sequence.hold.pins if group == g]
            for held in self._deferred.values():
                references += [block for group, block in held if group == g]
            for block in references:
                expected[block] += 1
            assert expected == pool.refs, f"group {g}: reference counts are wrong"
