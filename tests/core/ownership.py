"""Which blocks the plans in flight may read or write, and that nobody else gets them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.protocol import NULL_BLOCK, ScheduledTokens, StepPlan
from penstock.core.scheduler import Scheduler

Block = tuple[int, int]
"""A cache group and a block in it."""


class Ownership:
    """Follows the plans of one scheduler. A plan is in flight from `note` until it is committed or given up."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tables: dict[int, list[list[int]]] = {}
        self._touched: dict[int, set[Block]] = {}
        self._spans: dict[int, dict[int, bool]] = {}  # by step, slots and whether they draw
        self.overlapped = 0  # plans that were made while another was in flight
        self.staged = 0  # those of them that had no token in common with it
        self.pieces = 0  # pieces of prompts that were given to a plan while the one before was in flight

    def note(self, plan: StepPlan) -> None:
        """Takes a plan that is submitted; what it takes into use must not be touched by one in flight."""
        self._forget()
        fresh = set(self._fresh(plan))
        for step, touched in self._touched.items():
            assert not fresh & touched, f"step {plan.step} takes {fresh & touched}, which step {step} still uses"
        self.overlapped += bool(self._touched)
        if self._scheduler.options.stages > 1:
            self._check_staged(plan)
        self._touched[plan.step] = {block for span in plan.scheduled for block in self._seen(span)} | fresh
        groups = len(self._scheduler.cache.pools)
        self._touched[plan.step] |= {(op.group, op.source) for op in plan.cache_ops if op.group < groups and op.source}

    def check(self) -> None:
        """No block that a plan in flight uses is free."""
        self._forget()
        pools = self._scheduler.cache.pools
        for step, touched in self._touched.items():
            free = {(g, block) for g, block in touched if not pools[g].refs[block]}
            assert not free, f"step {step} uses {free}, which are free"

    def _forget(self) -> None:
        outstanding = self._scheduler._outstanding
        self._touched = {step: touched for step, touched in self._touched.items() if step in outstanding}
        self._spans = {step: spans for step, spans in self._spans.items() if step in outstanding}

    def _check_staged(self, plan: StepPlan) -> None:
        """No token of a plan depends on what one in flight draws."""
        slots = {span.slot for span in plan.scheduled}
        drawing = {slot for spans in self._spans.values() for slot, draws in spans.items() if draws}
        assert not slots & drawing, f"step {plan.step} has slots {slots & drawing}, whose draw is in flight"
        assert all(token >= 0 for span in plan.scheduled for token in span.tokens)
        self.staged += bool(self._touched)
        self.pieces += len(slots & {slot for spans in self._spans.values() for slot in spans})
        self._spans[plan.step] = {span.slot: span.sample for span in plan.scheduled}

    def _fresh(self, plan: StepPlan) -> Iterator[Block]:
        """Blocks that rows get to write to: those appended, and of new rows those behind what is computed."""
        size, groups = self._scheduler.cache.block_size, len(self._scheduler.cache.pools)
        for new in plan.new_sequences:
            self._tables[new.slot] = [list(table) for table in new.blocks]
            for g, table in enumerate(new.blocks):
                if not self._scheduler.cache.groups[g].blocks_for(1):
                    continue  # an encoder's entries, which all who attend to them share
                yield from ((g, block) for block in table[-(-new.computed // size) :])
        for span in plan.scheduled:
            for g, blocks in enumerate(span.new_blocks):
                self._tables[span.slot][g] += blocks
                yield from ((g, block) for block in blocks)
        yield from ((op.group, op.target) for op in plan.cache_ops if op.group < groups and op.target)

    def _seen(self, span: ScheduledTokens) -> Iterator[Block]:
        """Blocks with positions that a span's queries see, its own among them."""
        cache = self._scheduler.cache
        end = span.start + len(span.tokens)
        for g, (table, group) in enumerate(zip(self._tables[span.slot], cache.groups, strict=True)):
            first = group.first_seen(span.start)
            blocks = table[first // cache.block_size : -(-end // cache.block_size)]
            assert group.first_needed(end) == end or NULL_BLOCK not in blocks, "only optional groups have gaps"
            yield from ((g, block) for block in blocks if block != NULL_BLOCK)
