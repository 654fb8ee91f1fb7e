"""A runner's drafter: which slots it drafts for, and which of its drafts the next step verifies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from time import perf_counter
from typing import Protocol, TypeVar

from penstock.config.errors import EngineDeadError
from penstock.config.limits import MAX_TOKENS
from penstock.core.policies.speculation import DraftFigures
from penstock.core.policies.step_cost import StepCost, UnknownStepCost
from penstock.core.protocol import NewSequence, Proposal, SlotResult, StepPlan, StepResult, StepTimings
from penstock.runtime.drafters.depths import SOON, Depths, FixedDepths
from penstock.runtime.drafters.drafter import Drafter, NoDrafter
from penstock.runtime.drafters.drift import Drift
from penstock.runtime.drafters.hidden_states import NO_TAPS, Tapped, Taps

log = logging.getLogger(__name__)
Found = TypeVar("Found")


class TappedDrafter(Drafter, Protocol):
    """A drafter that reads its target's hidden states.

    Attributes:
        taps: which.
    """

    taps: Taps

    def see(self, plan: StepPlan, tapped: Tapped) -> None:
        """What a step's taps hold, before `step` is told of it."""


class Drafting:
    """Drafts for those sequences whose requests allow it. A drafter that fails is switched off: no step fails with it.

    Attributes:
        cost: learns what steps cost, by which depths are chosen.
        most: drafts of a proposal; 0 once the drafter has failed.
        taps: the hidden states that the drafter wants of each step.
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        depths: Depths | None = None,
        cost: StepCost | None = None,
        most: int | None = None,
    ) -> None:
        """`most` drafts there will be of a drafter that `use` brings, once its model is loaded."""
        self.cost = cost or UnknownStepCost()
        self._drafter: Drafter = drafter or NoDrafter()
        self._depths: Depths = depths or FixedDepths()
        self.most = self._drafter.most if most is None else most
        self._slots: dict[int, int] = {}  # most drafts of each at a time
        self._longest = MAX_TOKENS
        self._quiet = 0  # steps for which nobody asks for drafts
        self._unheard: list[tuple[StepPlan, Tapped | None, Iterable[SlotResult]]] = []  # those
        self._seen: Tapped | None = None  # of the last of them
        self._failures = 0
        self._drift = Drift()
        self._ended = perf_counter()  # when the last step's drafts were made
        self.taps = NO_TAPS
        self._tapped: TappedDrafter | None = None

    def keep_to(self, most: int) -> None:
        """Of one sequence so many drafts a step: more of them cost much more than these."""
        self._longest = most

    def use(self, drafter: Drafter) -> None:
        """Takes a drafter, before there are sequences."""
        self._drafter = drafter

    def use_tapped(self, drafter: TappedDrafter) -> None:
        """As `use`, of one that reads hidden states."""
        self._drafter = self._tapped = drafter
        self.taps = drafter.taps

    def add_row(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        self._hear()
        if new.speculate and new.pooling is None and self._drafter.most:
            self._quiet = self._depths.newcomer(self._quiet)
            self._slots[new.slot] = min(new.speculate, self._drafter.most, self._longest)
            self._depths.begin(new)
            self._guarded(None, self._drafter.begin, new)

    def release_row(self, slot: int) -> None:
        """A slot is free again."""
        self._hear()
        if self._slots.pop(slot, None) is not None:
            self._depths.release(slot)
            self._guarded(None, self._drafter.release, slot)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens of a slot that are known, drawn or not."""
        self._hear()
        self._take(slot, tokens)

    def _take(self, slot: int, tokens: Sequence[int]) -> None:
        if slot in self._slots:
            self._depths.take(slot, tokens)
            self._guarded(None, self._drafter.take, slot, tokens)

    @property
    def looked_at(self) -> Taps:
        """The hidden states that the drafter wants of the next step. While no drafts are wanted nobody looks: what is
        missing then is left out of later ones."""
        return NO_TAPS if self._quiet > SOON or self._depths.paused else self.taps

    def see(self, plan: StepPlan, tapped: Tapped | None) -> None:
        """What a step's taps hold, before `propose` is asked behind it; None where nobody wants any."""
        if self._quiet:
            self._seen = tapped
        else:
            self._hear()
            self._see(plan, tapped)

    def _see(self, plan: StepPlan, tapped: Tapped | None) -> None:
        if self._tapped is not None and tapped is not None and self._slots:
            self._guarded(None, self._tapped.see, plan, tapped)

    def follow(self, plan: StepPlan) -> None:
        """A step without tokens, which may move blocks."""
        if self.most:
            self._hear()
            self._guarded(None, self._drafter.step, plan)

    def propose(self, plan: StepPlan, result: StepResult, drawn: Iterable[SlotResult]) -> StepResult:
        """A step's result with what may follow what it has drawn."""
        if not self.most and not self._failures:
            return result
        if self._quiet:
            self._quiet -= 1
            self._unheard.append((plan, self._seen, drawn))
            self._seen = None
            self._ended = perf_counter()
            return result
        nothing: tuple[Proposal, ...] = ()
        proposals = self._guarded(nothing, self._proposed, plan, result, drawn)
        self._ended = perf_counter()
        return result._replace(proposals=proposals) if proposals else result

    def figures(self) -> DraftFigures:
        """What is told of all this."""
        decisions = tuple(self._depths.decisions.items())
        drift = self._drift
        return DraftFigures(self._failures, decisions, drift.now, drift.usually, tuple(enumerate(drift.by_position)))

    def _hear(self) -> None:
        """Tells of the steps behind which nobody asked; what was drawn, once for each slot."""
        if not self._unheard:
            return
        unheard, self._unheard = self._unheard, []
        said: dict[int, list[int]] = {}
        for plan, tapped, _ in unheard:
            self._see(plan, tapped)
            self._guarded(None, self._drafter.step, plan)
        for one in chain.from_iterable(drawn for _, _, drawn in unheard):
            if one.tokens and one.slot in self._slots:
                said.setdefault(one.slot, []).extend(one.tokens)
                self._depths.decisions["resting"] += 1
            else:
                self._depths.decisions["request"] += bool(one.tokens)
        for slot, tokens in said.items():
            self._take(slot, tokens)

    def _proposed(self, plan: StepPlan, result: StepResult, drawn: Iterable[SlotResult]) -> tuple[Proposal, ...]:
        self._hear()
        started = perf_counter()
        seconds = self._whole(plan, result.timings, started)
        self._drafter.step(plan)
        self._depths.took(perf_counter() - started, 0)
        asking: dict[int, int] = {}
        verified = {span.slot for span in plan.scheduled if span.draft_tokens}
        others = 0
        for one in drawn:
            if one.tokens and one.slot in self._slots:
                if one.slot in verified:
                    self._drift.add(len(one.tokens) - 1)
                self._take(one.slot, one.tokens)
                asking[one.slot] = self._slots.get(one.slot, 0)
            else:
                others += bool(one.tokens)
        if others:
            self._depths.decisions["failed" if self._failures else "request"] += others
        self.cost.learn(plan, StepTimings(forward=seconds))
        self._depths.step(plan, seconds)
        if not self._slots or not (wanted := self._depths.wanted(asking)):
            self._quiet = self._depths.rest()
            return ()
        started = perf_counter()
        drafts = self._drafter.propose(wanted)
        chosen = self._depths.chosen(drafts)
        self._depths.took(perf_counter() - started, max((len(draft.tokens) for draft in drafts), default=0))
        return tuple(Proposal(draft.slot, draft.tokens, draft.parents) for draft in chosen)

    def _whole(self, plan: StepPlan, timings: StepTimings, now: float) -> float:
        """Seconds of a step with all that is done for it, planning and commitment too: of a small model they are a good
        part, and drafts make them longer. Before a step that brings sequences there may have been nothing to do."""
        computed = timings.build + timings.forward + timings.sample
        return max(computed, computed if plan.new_sequences else now - self._ended)

    def _guarded(self, otherwise: Found, call: Callable[..., Found], *arguments: object) -> Found:
        """What a call of the drafter gives; if it raises, there are no drafts from now on."""
        try:
            return call(*arguments)
        except EngineDeadError:
            raise
        except Exception:
            log.exception("the drafter failed and is switched off: requests go on without drafts")
            for slot in self._slots:
                self._depths.release(slot)
            self._slots.clear()
            self._drafter, self._tapped = NoDrafter(), None
            self.taps = NO_TAPS
            self.most = 0
            self._failures += 1
            return otherwise
