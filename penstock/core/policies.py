"""Policies (order and victims) and gates (reasons not to admit a branch now). Each is one small object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.config.errors import ConfigError
from penstock.core.branch import Branch
from penstock.core.kv_cache import KVCache
from penstock.core.prefix import Match


def recompute_cost(branch: Branch, cache: KVCache) -> int:
    """Tokens that would have to be computed again if the branch lost the blocks that are its alone."""
    if branch.hold is None:
        return 0
    group = next((g for g, window in enumerate(cache.windows) if window is None), 0)
    refs = cache.pools[group].refs
    own = sum(refs[block] <= 1 + cache.tree.holds(group, block) for block in branch.hold.tables[group] if block)
    return min(branch.computed, own * cache.block_size)


class Policy(Protocol):
    """Orders branches and names the victim when memory runs out."""

    def key(self, branch: Branch) -> tuple[int, ...]:
        """Smaller is served first and preempted last. Constant from when a branch was first queued."""

    def victim(self, candidates: Sequence[Branch], cache: KVCache) -> Branch:
        """Which of the (non-empty) candidates, all later in order than the one in need, is preempted."""


class FirstComeFirstServed:
    """Arrival order, owners in turn; the victim is the one cheapest to recompute."""

    def key(self, branch: Branch) -> tuple[int, ...]:
        return (branch.turn, branch.order, branch.index)

    def victim(self, candidates: Sequence[Branch], cache: KVCache) -> Branch:
        return min(candidates, key=lambda b: (recompute_cost(b, cache), -b.turn, -b.order, -b.index))


class PriorityOrder:
    """Lower priority value first, then owners in turn; the victim is the cheapest of the last priority."""

    def key(self, branch: Branch) -> tuple[int, ...]:
        return (branch.request.priority, branch.turn, branch.order, branch.index)

    def victim(self, candidates: Sequence[Branch], cache: KVCache) -> Branch:
        def worth(branch: Branch) -> tuple[int, ...]:
            cost = recompute_cost(branch, cache)
            return (-branch.request.priority, cost, -branch.turn, -branch.order, -branch.index)

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
        branch: the candidate.
        match: what the prefix tree holds of it.
        reserved: per group, blocks that branches in the batch will still take.
        idle_engine: nothing runs and no release is due, so that waiting would not help.
        free_rows: rows left.
        chunk: most tokens of one branch in a step.
        cache: the KV cache.
    """

    branch: Branch
    match: Match
    reserved: Sequence[int]
    idle_engine: bool
    free_rows: int
    chunk: int
    cache: KVCache


class Gate(Protocol):
    """A limit on admission.

    Attributes:
        name: the reason shown in metrics.
        passable: whether branches behind a held one may go ahead of it.
    """

    name: str
    passable: bool

    def holds(self, admission: Admission) -> bool:
        """Whether the candidate must wait."""


class PrefixInFlightGate:
    """A prefix that another branch is computing is waited for, not computed twice."""

    name = "prefix_in_flight"
    passable = True

    def holds(self, admission: Admission) -> bool:
        return admission.match.pending > admission.match.tokens


class MemoryGate:
    """All known tokens must fit beside what running branches still need, plus a block of growth for each of those."""

    name = "memory"
    passable = False

    def holds(self, admission: Admission) -> bool:
        cache = admission.cache
        return not admission.idle_engine and any(
            cache.admission_need(g, admission.branch.known, admission.chunk, admission.match) + reserved
            > cache.available(g)
            for g, reserved in enumerate(admission.reserved)
        )


def default_gates() -> tuple[Gate, ...]:
    return (PrefixInFlightGate(), MemoryGate())
