"""Blocks on their way between the device and the tier below: who holds them meanwhile, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

from penstock.core.kv.allocation import Allocation
from penstock.core.kv.node import Node
from penstock.core.kv.tier import Tier
from penstock.core.protocol import NULL_BLOCK, CacheOp, CacheOpKind

if TYPE_CHECKING:
    from penstock.core.kv.cache import KVCache
    from penstock.core.sequence import Sequence as TokenSequence

_HANGS_S = 5.0  # without a save that ends: nothing waits for those on their way any more


@dataclass(slots=True)
class _Save:
    node: Node
    group: int
    block: int
    place: int
    step: int
    held: bool = True  # whether the block is still kept for it


@dataclass(slots=True)
class _Load:
    node: Node
    group: int
    block: int
    place: int
    sequence: TokenSequence | None  # None once it has been released
    end: int
    begun: float
    patience: float  # seconds that the sequence waits


class Transfers:
    """What is being saved and loaded. A transfer may finish late, fail, or never finish.

    A block that is being saved is kept until it is needed: a save that is then abandoned frees the block at once, while
    its place stays taken until the worker has said that it writes there no more. A block that is being loaded is kept
    until the load has finished, whoever has given it up meanwhile.

    Attributes:
        tier: where blocks go.
    """

    def __init__(self, cache: KVCache) -> None:
        self.tier = Tier()
        self._cache = cache
        self._numbers = count(1)
        self._saves: dict[int, _Save] = {}
        self._loads: dict[int, _Load] = {}
        self._saving: set[tuple[Node, int]] = set()
        self._moved = 0.0  # when a save began or ended last

    @property
    def loading(self) -> bool:
        """Whether loads are on their way."""
        return bool(self._loads)

    @property
    def owed(self) -> bool:
        """Whether copies to the tier are due, or on their way and not hanging."""
        return self.tier.waiting or bool(self._saves and monotonic() - self._moved < _HANGS_S)

    def save_due(self, step: int) -> None:
        """Has plan `step` begin the copies that the tier wants.

        Blocks that are being saved stay in the tree. What is evicted before it was saved is gone.
        """
        for node in self.tier.due(self._cache):
            self._save(node, step)

    def _save(self, node: Node, step: int) -> None:
        size = self._cache.block_size
        if len(node.key) < size:
            return
        state = node.state or NULL_BLOCK  # which the runner copies at once: its slot is not kept for it
        for g, block in (*enumerate(node.blocks), (self._cache.states.group, state)):
            if block == NULL_BLOCK or g in node.below or (node, g) in self._saving:
                continue
            place = self.tier.offer(node, g)
            if place is None:
                return
            transfer = next(self._numbers)
            self._moved = monotonic()
            if g != self._cache.states.group:
                self._cache.tree.retain(g, block)
            node.saving += 1
            self._saving.add((node, g))
            self._saves[transfer] = _Save(node, g, block, place, step)
            self._cache.ops.append(CacheOp(CacheOpKind.SAVE, g, block, NULL_BLOCK, size, transfer, place))

    def saving(self, group: int) -> int:
        """Blocks of a group that can be had by giving up their saves."""
        return sum(save.group == group for _, save in self._abandonable()) if self._saves else 0

    def abandon_saves(self) -> bool:
        """Gives up saves that no plan in flight names, so that their blocks can be evicted; whether there were any."""
        saves = list(self._abandonable())
        for transfer, save in saves:
            save.held = False
            self._cancel(transfer, save.group)
            self._cache.tree.release(save.group, save.block)
        return bool(saves)

    def _cancel(self, transfer: int, group: int) -> None:
        self._cache.ops.append(CacheOp(CacheOpKind.CANCEL, group, NULL_BLOCK, NULL_BLOCK, 0, transfer))

    def _abandonable(self) -> Iterator[tuple[int, _Save]]:
        pools, state = self._cache.pools, self._cache.states.group
        for transfer, save in self._saves.items():
            told = save.group != state and save.step <= self._cache.committed_step
            if save.held and told and pools[save.group].refs[save.block] == 2:  # the tree's and this one
                yield transfer, save

    def load(self, sequence: TokenSequence, allocation: Allocation, nodes: Sequence[Node]) -> None:
        """Has the nodes' blocks loaded into the sequence's, which `extend` has given it."""
        cache = self._cache
        sequence.loading = True
        end, now = nodes[-1].depth, monotonic()
        for node in nodes:
            index = node.depth // cache.block_size - 1
            for g, table in enumerate(allocation.tables):
                block = table.blocks[index] if index < len(table.blocks) else NULL_BLOCK
                place = node.below.get(g)
                if block != NULL_BLOCK and place is not None:
                    load = _Load(node, g, block, place, sequence, end, now, self.tier.open(place))
                    self._load(load, allocation)
                elif block != NULL_BLOCK:
                    table.valid_from = node.depth  # an optional group's, which has no copy
        for slot in allocation.draft_states:  # of a recurrent state, which goes to the request slot's from there
            group, place = cache.states.group, nodes[-1].below[cache.states.group]
            self._load(_Load(nodes[-1], group, slot, place, sequence, end, now, self.tier.open(place)), allocation)
        allocation.draft_states = ()

    def _load(self, load: _Load, allocation: Allocation) -> None:
        transfer = next(self._numbers)
        cache = self._cache
        self._loads[transfer] = load
        allocation.transfers.add(transfer)
        cache.ops.append(
            CacheOp(CacheOpKind.LOAD, load.group, NULL_BLOCK, load.block, cache.block_size, transfer, load.place)
        )

    def detach(self, allocation: Allocation) -> list[tuple[int, int]]:
        """References a sequence gives up that no load keeps: the others go when their loads have finished."""
        coming = set()
        for transfer in allocation.transfers:
            load = self._loads[transfer]
            load.sequence = None
            self._cancel(transfer, load.group)
            coming.add((load.group, load.block))
        allocation.transfers.clear()
        return [held for held in allocation.blocks() if held not in coming]

    def finish(self, transfer: int, *, failed: bool) -> TokenSequence | None:
        """A transfer is over. Returns a sequence that must start anew, since what it was to go on from is not there."""
        save = self._saves.pop(transfer, None)
        if save is not None:
            self._finish_save(save, failed)
            return None
        load = self._loads.pop(transfer, None)
        return None if load is None else self._finish_load(transfer, load, failed)

    def overdue(self) -> set[TokenSequence]:
        """Sequences that have waited too long for a load: they start anew, and the load ends when it may."""
        now = monotonic() if self._loads else 0.0
        return {load.sequence for load in self._loads.values() if load.sequence and now - load.begun > load.patience}

    def fail_all(self) -> Iterator[TokenSequence]:
        """Nothing is on its way any more, since a step failed. Gives the sequences that must start anew."""
        for transfer in [*self._saves, *self._loads]:
            sequence = self.finish(transfer, failed=True)
            if sequence is not None:
                yield sequence

    def _finish_save(self, save: _Save, failed: bool) -> None:
        self._saving.remove((save.node, save.group))
        self._moved = monotonic()
        whole = save.held and not failed
        if save.held and save.group != self._cache.states.group:
            self._cache.release_all([(save.group, save.block)])
        if whole:
            self.tier.stored(save.place, save.node, save.group)
        else:
            self.tier.free(save.place)
        self._cache.tree.saved(save.node, save.group, save.place if whole else None)

    def _finish_load(self, transfer: int, load: _Load, failed: bool) -> TokenSequence | None:
        self.tier.close(load.place, failed=failed)
        if failed and load.node.below.get(load.group) == load.place:
            self.tier.free(load.place)
            self._cache.tree.forget_below(load.node, load.group)
        sequence = load.sequence
        recurrent = load.group == self._cache.states.group
        if sequence is None or sequence.allocation is None:
            if recurrent:
                self._cache.states.adopt(load.block, None)  # it may have been cancelled
            else:
                self._cache.release_all([(load.group, load.block)])
            return None
        sequence.allocation.transfers.remove(transfer)
        sequence.allocation.draft_states += (load.block,) * recurrent
        if failed:
            return sequence
        if not sequence.allocation.transfers:
            sequence.loading = False
            self._cache.fill_loaded(sequence, load.end)
        return None

    def ahead(self) -> set[TokenSequence]:
        """Sequences that load for others."""
        return {load.sequence for load in self._loads.values() if load.sequence and load.sequence.slot < 0}

    def clear(self) -> None:
        """Forgets the copies below that nobody is reading, but those of pinned prefixes."""
        busy = {load.place for load in self._loads.values()}
        for node, group, place in list(self._cache.tree.copies_below()):
            if place not in busy and not node.pins:
                self.tier.free(place)
                self._cache.tree.forget_below(node, group)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(group, block) of every reference that transfers alone keep."""
        state = self._cache.states.group
        yield from ((save.group, save.block) for save in self._saves.values() if save.held and save.group != state)
        ended = (load for load in self._loads.values() if load.sequence is None and load.group != state)
        yield from ((load.group, load.block) for load in ended)
