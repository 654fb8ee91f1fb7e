"""Policies (order and victims) and gates (reasons not to admit a sequence now). Each is one small object."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Protocol

from penstock.config.errors import ConfigError
from penstock.core.kv.cache import KVCache
from penstock.core.kv.node import Match
from penstock.core.policies.need import admission_need, recompute_cost
from penstock.core.sequence import Sequence


class Policy(Protocol):
    """Orders sequences and names the victim when memory runs out."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Smaller is served first and preempted last. Constant from when a sequence was first queued."""

    def victim(self, candidates: abc.Sequence[Sequence], cache: KVCache) -> Sequence:
        """Which of the (non-empty) candidates, all later in order than the one in need, is preempted."""


class FirstComeFirstServed:
    """Arrival order, owners in turn; the victim is the one cheapest to recompute."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        return (sequence.turn, sequence.order, sequence.index, sequence.follows)

    def victim(self, candidates: abc.Sequence[Sequence], cache: KVCache) -> Sequence:
        return min(candidates, key=lambda b: (recompute_cost(b, cache), -b.turn, -b.order, -b.index))


class PriorityOrder:
    """Lower priority value first, then owners in turn; the victim is the cheapest of the last priority."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        return (sequence.request.priority, sequence.turn, sequence.order, sequence.index, sequence.follows)

    def victim(self, candidates: abc.Sequence[Sequence], cache: KVCache) -> Sequence:
        def worth(sequence: Sequence) -> tuple[int, ...]:
            cost = recompute_cost(sequence, cache)
            return (-sequence.request.priority, cost, -sequence.turn, -sequence.order, -sequence.index)

        return min(candidates, key=worth)


def policy_named(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if name == "fcfs":
        return FirstComeFirstServed()
    if name == "priority":
        return PriorityOrder()
    raise ConfigError(f"scheduling policy is {name!r}; allowed: fcfs, priority.")


@dataclass(frozen=True, slots=True)
class Admission:
    """What a gate may look at.

    Attributes:
        sequence: the candidate.
        match: what the prefix tree holds of it.
        reserved: per group, blocks that sequences in the batch will still take.
        idle_engine: nothing runs and no release is due, so that waiting would not help.
        free_slots: request slots left.
        chunk: most tokens of one sequence in a step.
        cache: the KV cache.
    """

    sequence: Sequence
    match: Match
    reserved: abc.Sequence[int]
    idle_engine: bool
    free_slots: int
    chunk: int
    cache: KVCache


class Gate(Protocol):
    """A limit on admission.

    Attributes:
        name: the reason shown in metrics.
        passable: whether sequences behind a held one may go ahead of it.
        until_release: whether a held one stays so until blocks are released, so that it need not be asked for before.
    """

    name: str
    passable: bool
    until_release: bool

    def holds(self, admission: Admission) -> bool:
        """Whether the candidate must wait."""


class PrefixInFlightGate:
    """A prefix that another sequence is computing is waited for, not computed twice."""

    name = "prefix_in_flight"
    passable = True
    until_release = False

    def holds(self, admission: Admission) -> bool:
        return admission.match.pending > admission.match.tokens


class LookupGate:
    """What others have put into a store that engines share is asked for, not computed again."""

    name = "kv_lookup"
    passable = True
    until_release = False

    def holds(self, admission: Admission) -> bool:
        return admission.cache.transfers.tier.sought(admission)


class MemoryGate:
    """All known tokens must fit beside what running sequences still need, plus a block of growth for each of those."""

    name = "memory"
    passable = False
    until_release = True

    def holds(self, admission: Admission) -> bool:
        cache = admission.cache
        return not admission.idle_engine and any(
            admission_need(cache, g, admission.sequence.known, admission.chunk, admission.match) + reserved
            > cache.available(g)
            for g, reserved in enumerate(admission.reserved)
        )


def default_gates() -> tuple[Gate, ...]:
    return (PrefixInFlightGate(), LookupGate(), MemoryGate())
