"""The KV cache as the scheduler sees it: what sequences hold of pools, prefix tree and tier. Ids, no memory."""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from typing import Any

from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.config.retention import NO_RETENTION
from penstock.core.kv.allocation import Allocation, BlockTable
from penstock.core.kv.block_pool import BlockPool
from penstock.core.kv.cross import CrossStore
from penstock.core.kv.groups import SlidingGroup, manager_of
from penstock.core.kv.node import Match, Node
from penstock.core.kv.radix_tree import RadixTree
from penstock.core.kv.states import StateGroup, States
from penstock.core.kv.transfers import Transfers
from penstock.core.policies.checkpoints import Checkpoints
from penstock.core.policies.pins import Pins
from penstock.core.protocol import NULL_BLOCK, CacheOp, CacheOpKind
from penstock.core.sequence import Sequence, SequenceState


class KVCache:
    """Gives sequences blocks, shares what is already computed, and takes blocks back no earlier than is safe.

    A block is released only after the last step that touches it has committed, and after the last transfer has: what
    a sequence gives up with a step in flight waits in `_deferred`, keyed by that step. `releases` grows whenever blocks
    may have become available. `ops` are the cache operations decided on since the last plan.
    """

    def __init__(
        self,
        groups: abc.Sequence[CacheGroup],
        num_blocks: abc.Sequence[int],
        block_size: int,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`checkpoints` are the slots for recurrent states, None for a model without."""
        self.block_size = block_size
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        pools = enumerate(zip(groups, self.pools, strict=True))
        self.groups = tuple(manager_of(group, g, pool, block_size) for g, (group, pool) in pools)
        crossing = [g for g, group in enumerate(groups) if group.kind is CacheKind.CROSS]
        self.cross_group = crossing[0] if crossing else -1
        self.cross = CrossStore(self.pools[crossing[0]] if crossing else None, block_size)
        self.states: States = StateGroup(checkpoints, len(self.pools), block_size) if checkpoints else States()
        self.ops: list[CacheOp] = []
        self.transfers = Transfers(self)
        self.tree = RadixTree(self.groups, block_size, self.states)
        self.pins = Pins(self)
        self._copied: list[tuple[int, int]] = []  # blocks that operations of the next plan read
        self._nothing: tuple[tuple[int, ...], ...] = ((),) * len(groups)
        self._deferred: dict[int, list[tuple[int, int]]] = {}
        self._passing = tuple(g for g, group in enumerate(self.groups) if isinstance(group, SlidingGroup))
        self.committed_step = -1
        self.releases = 0

    # -- arithmetic ---------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens the whole cache holds; sliding groups bound it only where there is nothing else."""
        kept = [g for g, group in enumerate(self.groups) if group.bounds_capacity] or range(len(self.pools))
        return min(self.room(g) for g in kept) * self.block_size

    def room(self, group: int) -> int:
        """Blocks of a group that requests can have: all but those of pinned prefixes."""
        return self.pools[group].num_blocks - 1 - len(self.tree.pinned[group]) - self.pins.reserved(group)

    def available(self, group: int) -> int:
        """Blocks that can be had now, by eviction if need be."""
        return self.pools[group].num_free + self.tree.idle[group]

    def will_fit(self, sequence: Sequence, tokens: int) -> bool:
        """Whether `extend` can succeed once the steps in flight have committed."""
        for g, table in enumerate(_held(sequence).tables):
            coming = {block for blocks in self._deferred.values() for group, block in blocks if group == g}
            if self.groups[g].blocks_for(tokens) - len(table.blocks) > self.available(g) + len(coming):
                return False
        return True

    def coming(self) -> int:
        """References whose release waits for a step in flight."""
        return sum(map(len, self._deferred.values()))

    def usage(self, running: abc.Sequence[Sequence]) -> dict[str, Any]:
        """What is taken, by the names of EngineStats; `running` are the sequences in the batch."""
        cached = sum(self.tree.idle) + self.cross.idle
        total = sum(pool.num_blocks - 1 for pool in self.pools)
        free = sum(pool.num_free for pool in self.pools)
        tables = [(sequence.computed, _held(sequence).tables[0]) for sequence in running]
        return {
            "blocks_used": total - free - cached,
            "blocks_cached": cached,
            "blocks_total": total,
            **self.transfers.tier.figures(),
            **self.tree.observer.figures(),
            "slots_used": sum(computed - table.live_from * self.block_size for computed, table in tables),
            "slots_allocated": sum(table.held for _, table in tables) * self.block_size,
        }

    # -- admission ----------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence, limit: int) -> Match:
        """What of the sequence's first `limit` tokens can be had; media are had whole or not at all."""
        match = self._found(sequence, limit)
        if match.below and not self.transfers.tier.worth(match.tokens, match.below):
            match = replace(self._found(sequence, limit, lower=False), reason="declined")
        if match.owner is None:
            return match
        return replace(match, pending=self.states.awaited(match.owner, match.pending))

    def _found(self, sequence: Sequence, limit: int, *, lower: bool = True) -> Match:
        match = self.tree.match(sequence.namespace, sequence.keys, limit, lower=lower)
        for span in reversed(sequence.request.media):
            if span.start < match.reach < span.end:
                match = self.tree.match(sequence.namespace, sequence.keys, span.start, lower=lower)
        return match

    def attach(self, sequence: Sequence, match: Match) -> bool:
        """Pins the matched blocks and starts the sequence's tables with them; False where its encoder has no room."""
        self.tree.observer.begins(sequence)
        cursor = self.tree.enter(sequence.namespace)
        if match.nodes:
            self.tree.move(cursor, match.nodes[-1])
            cursor = match.nodes[-1]
        allocation = Allocation([group.attach(match.nodes, match.tokens) for group in self.groups], cursor)
        sequence.allocation = allocation
        for g, block in allocation.blocks():
            self.tree.retain(g, block)
        for g, block in enumerate(match.tail.blocks if match.tail else ()):
            if block != NULL_BLOCK:
                self.tree.retain(g, block)
                allocation.pins.append((g, block))
        sequence.place(len(match.nodes) * self.block_size)
        allocation.state_marks = [
            count
            for count in self.states.begin(sequence, match)
            if not any(span.start < count < span.end for span in sequence.request.media)
        ]
        return sequence.request.encoder is None or self._attach_encoder(sequence, allocation)

    def _attach_encoder(self, sequence: Sequence, allocation: Allocation) -> bool:
        encoder = sequence.request.encoder
        assert encoder is not None
        entry = self.cross.take((sequence.namespace, encoder.digest), encoder.length)
        if entry is None:
            return False
        allocation.cross = entry
        allocation.tables[self.cross_group] = BlockTable(list(entry.blocks))
        for block in entry.blocks:
            self.pools[self.cross_group].retain(block)
        return True

    def start(self, sequence: Sequence, match: Match) -> None:
        """Copies the matched part of a partial block into the sequence's own, a state into its slot; starts loads.

        `extend` must have covered the copied tokens.
        """
        allocation = _held(sequence)
        self._hint(sequence, match.nodes)
        if match.tail is not None:
            index = len(match.nodes)
            for g, block in allocation.pins:
                self._copy(g, block, allocation.tables[g].blocks[index], match.tail_tokens)
            for g, block in enumerate(match.tail.blocks):
                if block == NULL_BLOCK and g != self.cross_group:  # an optional group's
                    allocation.tables[g].valid_from = match.tokens
            allocation.pins = []
            sequence.place(match.tokens)
        self.ops += self.states.restore(match, sequence.slot)
        if sequence.computed < sequence.num_prompt:
            keys = sequence.keys[: sequence.num_prompt - (sequence.partner is not None)]  # what waits for nobody
            allocation.announced = self.tree.announce(allocation.cursor, sequence.namespace, keys, sequence)
        if match.below:
            self.transfers.load(sequence, allocation, match.below)
        elif match.reason == "declined":
            self.transfers.tier.declined()

    def end_preload(self, ahead: Sequence) -> None:
        """What came up is anybody's now, or did not come."""
        self.release(ahead, keep=False)
        ahead.state = SequenceState.FINISHED

    def _copy(self, group: int, source: int, target: int, count: int) -> None:
        """Has entries copied by the next plan. The reference to the source becomes the cache's own until then."""
        self.ops.append(CacheOp(CacheOpKind.COPY, group, source, target, count))
        self._copied.append((group, source))

    def take_ops(self, step: int) -> tuple[CacheOp, ...]:
        """The operations of plan `step`; what they read stays until that has committed."""
        self.transfers.save_due(step)
        ops = tuple(self.ops)
        self.ops.clear()
        if self._copied:
            self._deferred.setdefault(step, []).extend(self._copied)
            self._copied = []
        return ops

    # -- a running sequence -------------------------------------------------------------------------------------------

    def cut(self, sequence: Sequence, start: int, length: int) -> int:
        """How many of the tokens may be computed now: up to where a state is to be kept, and no part of a medium."""
        marks = sequence.allocation.state_marks if sequence.allocation else ()
        media = sequence.request.media if start < sequence.num_prompt else ()
        if not marks and not media:
            return length
        end = min(start + length, *marks) if marks else start + length
        for span in media:
            if span.start < end < span.end:
                end = max(start, span.start)
        return end - start

    def extend(self, sequence: Sequence, tokens: int) -> tuple[tuple[int, ...], ...] | None:
        """Grows the tables to hold that many tokens; returns new blocks per group, or None and changes nothing."""
        assert sequence.allocation is not None
        tables = sequence.allocation.tables
        size = self.block_size
        for table in tables:
            if tokens > len(table.blocks) * size:
                break
        else:
            return self._nothing
        needs = [
            max(0, group.blocks_for(tokens) - len(table.blocks))
            for group, table in zip(self.groups, tables, strict=True)
        ]
        if not self._make_room(needs):
            return None
        added = tuple(tuple(pool.allocate() for _ in range(need)) for pool, need in zip(self.pools, needs, strict=True))
        for table, blocks in zip(tables, added, strict=True):
            table.blocks.extend(blocks)
        return added

    def extend_for_loads(self, sequence: Sequence, match: Match) -> tuple[tuple[int, ...], ...] | None:
        """As `extend`, up to what a match has below; what a query behind that does not see gets no blocks."""
        tables = _held(sequence).tables
        for g in self._passing:
            first = self.groups[g].first_seen(match.reach) // self.block_size
            self._drop_passed(g, tables[g], first)
            tables[g].blocks += [NULL_BLOCK] * (first - len(tables[g].blocks))
            tables[g].live_from = max(tables[g].live_from, first)
        slots = self.states.borrow(1)
        added = None if slots is None else self.extend(sequence, match.reach)
        if slots is not None:
            _held(sequence).draft_states = slots
        return added

    def _make_room(self, needs: abc.Sequence[int]) -> bool:
        """Evicts until so many blocks per group are free; False where they cannot be had now."""
        for g, need in enumerate(needs):
            missing = need - self.available(g) if need else 0
            if missing > 0 and missing > self.transfers.saving(g):
                return False
        for g, need in enumerate(needs):
            while self.pools[g].num_free < need:
                if not self.tree.evict(g) and not self.transfers.abandon_saves():
                    return False
        return True

    def commit(self, sequence: Sequence, committed: int) -> None:
        """Entries up to `committed` tokens now exist: whole blocks go into the tree, passed windows are dropped."""
        allocation = sequence.allocation
        assert allocation is not None
        reached_prompt_end = sequence.committed < sequence.num_prompt <= committed
        sequence.commit(committed)
        while allocation.cursor.depth + self.block_size <= committed:
            self._drop_tail(allocation)
            self._fill(sequence, allocation)
        if allocation.state_marks:
            if committed in allocation.state_marks:
                self._keep_state(sequence, allocation.cursor)
            marks = [mark for mark in allocation.state_marks if mark > committed]  # drafts may pass one
            allocation.state_marks = marks
        if reached_prompt_end:
            if committed > allocation.cursor.depth:
                self._fill_tail(sequence)
            self.tree.withdraw(allocation.announced, sequence)  # whatever is not filled by now never will be
            allocation.announced = []
            if sequence.public:
                self.tree.pin(allocation.cursor)
                self.states.pin(allocation.cursor)
            self.pins.hold(sequence)
        for g in self._passing:
            self._drop_passed(g, allocation.tables[g], self.groups[g].first_seen(committed) // self.block_size)

    def _blocks_at(self, allocation: Allocation, index: int) -> list[int]:
        """Per group, the block that holds a logical block's tokens, all of them."""
        start = index * self.block_size
        return [
            NULL_BLOCK if g == self.cross_group or table.valid_from > start else table.blocks[index]
            for g, table in enumerate(allocation.tables)
        ]

    def _hint(self, sequence: Sequence, nodes: abc.Iterable[Node]) -> None:
        """Keeps nodes as long as the sequence's request wants them kept; everybody's as long as everybody does."""
        request = sequence.request
        for node in nodes if request.retention is not NO_RETENTION else ():
            if not node.public or sequence.public:
                start = node.depth - len(node.key)
                self.tree.retain_for(node, request.owner, *request.retention.of(start, node.depth, sequence.num_prompt))

    def _fill(self, sequence: Sequence, allocation: Allocation) -> None:
        """Puts the block behind the cursor into the tree."""
        start = allocation.cursor.depth
        key = tuple(sequence.keys[start : start + self.block_size])
        blocks = self._blocks_at(allocation, start // self.block_size)
        node, taken = self.tree.fill(allocation.cursor, sequence.namespace, key, blocks)
        if not taken:  # somebody computed the same block: hold theirs too, so that the path stays pinned
            for g, block in enumerate(node.blocks):
                if block != NULL_BLOCK and self.groups[g].essential:
                    self.tree.retain(g, block)
                    allocation.pins.append((g, block))
        self._hint(sequence, (node,))
        self.transfers.tier.filled(node)
        self.tree.move(allocation.cursor, node)
        allocation.cursor = node

    def fill_loaded(self, sequence: Sequence, end: int) -> None:
        """Entries up to `end` were loaded: they count as computed."""
        allocation = _held(sequence)
        while allocation.cursor.depth + self.block_size <= end:
            self._fill(sequence, allocation)
        for slot in allocation.draft_states:
            if sequence.slot >= 0:
                self.ops.append(CacheOp(CacheOpKind.COPY, self.states.group, slot, sequence.slot, end))
            self.states.adopt(slot, allocation.cursor)
        allocation.draft_states = ()
        sequence.place(end)
        if sequence.slot < 0:
            self.end_preload(sequence)

    def _keep_state(self, sequence: Sequence, node: Node) -> None:
        at_rest = node.depth == sequence.committed and sequence.last_step <= self.committed_step
        kept = self.states.keep(sequence, node, at_rest)
        self.ops += kept
        if kept:
            self.transfers.tier.filled(node)

    def _fill_tail(self, sequence: Sequence) -> None:
        """Offers the entries of a partial last block: those written so far never change."""
        allocation = _held(sequence)
        start = allocation.cursor.depth
        key = tuple(sequence.keys[start : sequence.committed])
        if not key or sequence.public or self.tree.has_longer(allocation.cursor, sequence.namespace, key):
            return
        blocks = self._blocks_at(allocation, start // self.block_size)
        self._drop_tail(allocation)
        node, taken = self.tree.fill(allocation.cursor, sequence.namespace, key, blocks)
        allocation.tail = node if taken else None

    def _drop_tail(self, allocation: Allocation) -> None:
        if allocation.tail is not None:
            self.tree.discard(allocation.tail)
            allocation.tail = None

    def _drop_passed(self, group: int, table: BlockTable, first: int) -> None:
        first = min(first, len(table.blocks))
        for index in range(table.live_from, first):
            self.tree.release(group, table.blocks[index])
            table.blocks[index] = NULL_BLOCK
            self.releases += 1
        table.live_from = max(table.live_from, first)

    def offer(self, sequence: Sequence) -> None:
        """Lets others go on from where a running sequence is: its partial block and its state."""
        allocation = _held(sequence)
        if sequence.committed > allocation.cursor.depth:
            self._fill_tail(sequence)
        self._keep_state(sequence, allocation.tail or allocation.cursor)

    # -- taking back --------------------------------------------------------------------------------------------------

    def rewind(self, sequence: Sequence, tokens: int) -> bool:
        """Takes back the entries behind the first `tokens` of a sequence without steps in flight.

        A block that others share is copied as far as it stays. False, and nothing is changed, where what the sequence
        would see is gone: a window has passed, or its state has.
        """
        allocation = _held(sequence)
        if tokens >= sequence.committed:
            return True
        index, kept = divmod(tokens, self.block_size)
        needs = [int(kept > 0 and self._is_shared(g, table, index)) for g, table in enumerate(allocation.tables)]
        seen = all(
            table.live_from * self.block_size <= group.first_seen(tokens) or not table.live_from
            for group, table in zip(self.groups, allocation.tables, strict=True)
        )
        if not (seen and self.states.divisible and self._make_room(needs)):
            return False
        self._drop_tail(allocation)
        self._move_up(allocation, tokens)
        for g, table in enumerate(allocation.tables):
            if g != self.cross_group:
                self._shorten(g, table, index, kept, copied=needs[g] > 0)
        return True

    def _is_shared(self, group: int, table: BlockTable, index: int) -> bool:
        return index < len(table.blocks) and self.pools[group].refs[table.blocks[index]] > 1

    def _move_up(self, allocation: Allocation, tokens: int) -> None:
        """Moves the cursor to the last whole block of the first `tokens`."""
        node = allocation.cursor
        while node.parent is not None and (node.depth > tokens or not node.key):
            node = node.parent
        self.tree.move(allocation.cursor, node)
        allocation.cursor = node

    def _shorten(self, group: int, table: BlockTable, index: int, kept: int, *, copied: bool) -> None:
        """Cuts a table behind `kept` tokens of logical block `index`; `copied`, that block becomes its own."""
        if copied:
            source = table.blocks[index]
            table.blocks[index] = self.pools[group].allocate()
            self._copy(group, source, table.blocks[index], kept)
        for block in table.blocks[index + bool(kept) :]:
            if block != NULL_BLOCK:
                self.tree.release(group, block)
                self.releases += 1
        del table.blocks[index + bool(kept) :]
        table.live_from = min(table.live_from, len(table.blocks))

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Ends what the sequence holds; with `keep`, its partial last block stays in the tree as well."""
        allocation = _held(sequence)
        self.tree.withdraw(allocation.announced, sequence)
        if keep and not sequence.loading:  # whose state is not there yet
            self.offer(sequence)
        held = self.transfers.detach(allocation)
        self.tree.move(allocation.cursor, None)
        if allocation.cross is not None:
            self.cross.release(allocation.cross)
        self.states.return_slots(allocation)
        sequence.allocation = None
        sequence.loading = False
        sequence.place(0)
        if sequence.last_step > self.committed_step:
            self._deferred.setdefault(sequence.last_step, []).extend(held)
        else:
            self.release_all(held)

    def step_committed(self, step: int) -> None:
        """The step is over: what waited for it is released."""
        self.committed_step = step
        self.release_all(self._deferred.pop(step, []))

    def release_all(self, held: list[tuple[int, int]]) -> None:
        """Drops references to blocks."""
        self.releases += bool(held)
        for g, block in held:
            self.tree.release(g, block)

    def forget_unfinished(self) -> None:
        """All steps in flight failed, and what they copied and encoded is unknown."""
        self.ops.clear()
        self.release_all(self._copied)
        self._copied = []
        self.states.forget()
        self.cross.forget_since(self.committed_step)

    def clear(self) -> None:
        """Forgets every prefix and encoder output that no sequence uses, in lower tiers too."""
        self.tree.clear()
        self.cross.clear()
        self.transfers.clear()
        self.tree.observer.cleared()

    def check_integrity(self, sequences: abc.Sequence[Sequence]) -> None:
        """Raises AssertionError unless every reference is accounted for."""
        self.tree.check_integrity()
        self.states.check_integrity()
        references = [[*self.tree.held(g), *self.tree.pinned[g]] for g in range(len(self.pools))]
        if self.cross_group >= 0:
            references[self.cross_group] += self.cross.blocks()
        running = {*sequences, *self.transfers.ahead()}
        counted = [sequence.allocation.blocks() for sequence in running if sequence.allocation is not None]
        for held in (*counted, *self._deferred.values(), self._copied, self.transfers.blocks(), self.pins.blocks()):
            for g, block in held:
                references[g].append(block)
        for g, pool in enumerate(self.pools):
            pool.check_integrity()
            expected = [0] * pool.num_blocks
            for block in references[g]:
                expected[block] += 1
            assert expected == pool.refs, f"group {g}: reference counts are wrong"


def _held(sequence: Sequence) -> Allocation:
    assert sequence.allocation is not None, "the sequence is not running"
    return sequence.allocation
