"""Who enters the batch: waiting sequences in order, as long as slots, tokens and gates allow."""

from __future__ import annotations

from collections import abc
from time import monotonic

from penstock.config.options import SchedulerOptions
from penstock.core.kv.cache import KVCache
from penstock.core.kv.node import Match
from penstock.core.ledger import FAILED_LOADS, Ledger
from penstock.core.plan_builder import PlanBuilder
from penstock.core.policies.need import growth
from penstock.core.policies.order import Admission, Gate, MemoryGate
from penstock.core.policies.preloading import Preloading
from penstock.core.protocol import EncoderWork
from penstock.core.request_queues import RequestQueues
from penstock.core.sequence import Sequence, SequenceState


class AdmissionControl:
    """Admits sequences from the queue, each as a transaction: all it needs, or nothing is changed."""

    def __init__(
        self,
        options: SchedulerOptions,
        queues: RequestQueues,
        cache: KVCache,
        ledger: Ledger,
        gates: abc.Sequence[Gate],
    ) -> None:
        self._options = options
        self._queues = queues
        self._cache = cache
        self._ledger = ledger
        self._gates = tuple(gates)
        self._chunk = options.most_chunk
        self._blocked: tuple[Sequence, int] | None = None
        self._preloading = Preloading(cache)

    def admit(self, builder: PlanBuilder) -> None:
        """Admits waiting sequences in order as long as slots, tokens and gates allow."""
        if not self._queues.waiting:
            return
        if not self._queues.free_slots or builder.budget <= 0:
            self._preloading.begin(self._queues.waiting, self._fits)
            return
        reserved = self._reserved()
        index = 0
        while index < len(self._queues.waiting) and self._queues.free_slots and builder.budget > 0:
            sequence = self._queues.waiting[index]
            if self._options.whole_prompts and sequence.known > builder.budget:
                break
            if sequence.last_step > self._cache.committed_step or self._still_waits(sequence):
                index += 1
                continue
            if self._blocked == (sequence, self._cache.releases) and self._queues.running:
                break  # it lacks memory and nothing was released since: no need to match it again
            match = self._cache.match(sequence, sequence.reusable)
            gate = self._held_by(sequence, match, reserved)
            if gate is not None:
                self._ledger.counters.held_back[gate.name] += 1
                sequence.awaits = (match.owner, match.pending) if match.pending > match.tokens else None
                if not gate.passable:
                    if gate.until_release:
                        self._blocked = (sequence, self._cache.releases)
                    break
                index += 1
                continue
            if not self._start(sequence, match, builder):
                break
            self._reserve(sequence, reserved)
            self._queues.waiting.pop(index)

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Whether there is memory for it; other gates may give what they let through."""
        return not MemoryGate().holds(self._candidate(sequence, match, self._reserved()))

    def _reserved(self) -> list[int]:
        """Per group, blocks that sequences in the batch will still take."""
        reserved = [0] * len(self._cache.pools)
        for sequence in self._queues.running:
            self._reserve(sequence, reserved)
        return reserved

    def _reserve(self, sequence: Sequence, reserved: list[int]) -> None:
        """Adds what a running sequence will still need, one block of growth included, where there is growth."""
        for g, blocks in enumerate(growth(self._cache, sequence, self._chunk)):
            reserved[g] += blocks + (g != self._cache.cross_group)

    def _candidate(self, sequence: Sequence, match: Match, reserved: abc.Sequence[int]) -> Admission:
        return Admission(
            sequence=sequence,
            match=match,
            reserved=reserved,
            idle_engine=not self._queues.running and not self._cache.coming(),
            free_slots=len(self._queues.free_slots),
            chunk=self._chunk,
            cache=self._cache,
        )

    def _held_by(self, sequence: Sequence, match: Match, reserved: abc.Sequence[int]) -> Gate | None:
        admission = self._candidate(sequence, match, reserved)
        return next((gate for gate in self._gates if gate.holds(admission)), None)

    def _still_waits(self, sequence: Sequence) -> bool:
        """Whether the prefix the sequence waits for is still being computed (saves matching again in every step)."""
        if sequence.awaits is None:
            return False
        owner, until = sequence.awaits
        if owner.state is SequenceState.RUNNING and owner.committed < until:
            return True
        sequence.awaits = None
        return False

    def _start(self, sequence: Sequence, match: Match, builder: PlanBuilder) -> bool:
        """Admission as a transaction: pin the match, take a slot and blocks, or undo everything."""
        added = self._take_blocks(sequence, match, builder)
        if added is None and (match.tail is not None or match.below):  # which take room besides: do without them
            match = match.without_tail()
            added = self._take_blocks(sequence, match, builder)
        if added is None:
            return False
        self._queues.assign_slot(sequence)
        self._cache.start(sequence, match)
        self._count_admission(sequence, match)
        self._encode(sequence, builder)
        length = self._first_length(sequence, match, builder)
        if length > 0 and not sequence.loading:
            builder.schedule(sequence, length, added)
        return True

    def _first_length(self, sequence: Sequence, match: Match, builder: PlanBuilder) -> int:
        paired = sequence.partner is not None  # whose last token is computed when both are there
        length = min(sequence.known - match.tokens - paired, builder.budget, self._chunk)
        return self._cache.cut(sequence, match.tokens, length)

    def _take_blocks(
        self, sequence: Sequence, match: Match, builder: PlanBuilder
    ) -> tuple[tuple[int, ...], ...] | None:
        """Pins the match and takes blocks for what is computed or loaded first; holds nothing if they cannot be had."""
        added = None
        if self._cache.attach(sequence, match):
            length = self._first_length(sequence, match, builder)
            if match.below:
                added = self._cache.extend_for_loads(sequence, match)
            elif length > 0 or sequence.partner is not None:
                added = self._cache.extend(sequence, match.tokens + length)
        if added is None:
            self._cache.release(sequence, keep=False)
        return added

    def _encode(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Has the encoder compute what the sequence attends to, and nobody has yet."""
        allocation = sequence.allocation
        entry = allocation.cross if allocation else None
        if entry is not None and entry.filled < 0:
            entry.filled = builder.step
            work = EncoderWork(sequence.slot, entry.key[1], 0, entry.tokens, self._cache.cross_group, entry.blocks)
            builder.encoder_work.append(work)

    def _count_admission(self, sequence: Sequence, match: Match) -> None:
        if sequence.cached_tokens is not None:  # resumed
            if sequence.missed in FAILED_LOADS and not sequence.reported:
                sequence.cached_tokens = match.reach
            return
        sequence.cached_tokens = match.reach
        sequence.missed = self._why_missed(sequence, match)
        sequence.queue_seconds = monotonic() - sequence.arrived
        if not sequence.request.counted:
            return
        counters = self._ledger.counters
        counters.cached_tokens += match.reach
        counters.prompt_tokens += sequence.num_prompt
        if sequence.index == 0:
            for node in (*match.nodes, *((match.tail,) if match.tail else ())):
                node.uses += 1
            counters.prefix_queries += sequence.num_prompt - 1
            counters.prefix_hits += match.reach
            if sequence.missed:
                counters.miss_reasons[sequence.missed] += 1

    def _why_missed(self, sequence: Sequence, match: Match) -> str:
        """Why not all of a prompt was found; "" if it was, as far as its last token, which is always computed."""
        if not self._options.enable_prefix_caching:
            return "off"
        if not sequence.reusable:
            return "not_reusable" if sequence.num_prompt > 1 else ""
        return match.reason or ("no_room" if match.reach < sequence.reusable else "")
