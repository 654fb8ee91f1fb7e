"""How many drafts are verified: as many as bring the batch the most tokens a second, none where none do.

A draft is worth the probability that it and all before it are right, and costs what a step takes longer by one token.
The best are taken while tokens over time rises. Both sides are learned while the engine works: acceptance by kind of
draft, place in it and sequence; the price by `core.policies.step_cost`. Of what is not
verified the first token is judged too, by what came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple, Protocol

from penstock.core.policies.step_cost import StepCost, StepShape
from penstock.core.protocol import NewSequence, StepPlan
from penstock.runtime.drafters.drafter import Draft

_PRIOR: Final = 0.5  # acceptance of a first draft of which nothing is known
_TRIALS: Final = 4.0  # drafts that an estimate counts for beside a sequence's own
_MEMORY: Final = 256.0  # judged drafts of a kind and place after which one counts 1/e
_OWN_MEMORY: Final = 32.0  # the same of a sequence
_FIXED: Final = 0.8  # share of a one-token step that is taken not to grow with its tokens, before that is known
_LEAST_GAIN: Final = 1.02  # tokens a second with drafts over without, below which it is not worth the trouble
_TRIED_EVERY: Final = 64  # refused drafts that would be right more often than not, of which one is tried
_TIMED: Final = 9  # proposals whose median time is believed
_TIMED_LEAST: Final = 3  # and how many of them, before which all that may be is drafted
_LONGEST_REST: Final = 32  # steps that a slot without useful drafts is not looked at, where there are many


class Depths(Protocol):
    """Decides how many drafts are asked for, and which are verified."""

    def begin(self, new: NewSequence) -> None:
        """A sequence takes a slot."""

    def release(self, slot: int) -> None:
        """It has left it."""

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """What its last drafts are judged by: the tokens that came."""

    def step(self, plan: StepPlan) -> None:
        """What the last step was like, which the next is taken to be like."""

    def wanted(self, most: Mapping[int, int]) -> Mapping[int, int]:
        """For which of these slots the drafter is asked, and for how many drafts, where it may be for so many."""

    def took(self, seconds: float, longest: int) -> None:
        """What the drafter took for a proposal of so many drafts at most."""

    def chosen(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """Those that are verified, cut to the length that pays."""


class FixedDepths:
    """All that a drafter makes, always."""

    def begin(self, new: NewSequence) -> None:
        """As Depths."""

    def release(self, slot: int) -> None:
        """As Depths."""

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Depths."""

    def step(self, plan: StepPlan) -> None:
        """As Depths."""

    def wanted(self, most: Mapping[int, int]) -> Mapping[int, int]:
        """As Depths."""
        return most

    def took(self, seconds: float, longest: int) -> None:
        """As Depths."""

    def chosen(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """As Depths."""
        return drafts


@dataclass(slots=True)
class _Rate:
    """How often something came true, late ones counting more."""

    right: float = 0.0
    trials: float = 0.0

    def add(self, right: bool, memory: float) -> None:
        keep = 1.0 - 1.0 / memory
        self.right = keep * self.right + right
        self.trials = keep * self.trials + 1.0

    def beside(self, prior: float) -> float:
        """The rate, where few trials count less than what is thought without them."""
        return (self.right + _TRIALS * prior) / (self.trials + _TRIALS)


@dataclass(slots=True)
class _Slot:
    """What is known of a slot's drafts.

    Attributes:
        own: by kind, how often they were right.
        judged: its last draft, verified or not.
        resting, rest: steps in which it is not looked at, and how many there will be the next time.
    """

    own: dict[int, _Rate] = field(default_factory=dict)
    judged: Draft | None = None
    resting: int = 0
    rest: int = 0


class _Price(NamedTuple):
    """Seconds of a step without drafts, and what each draft adds."""

    step: float
    each: float


class PricedDepths:
    """Learns what drafts bring and cost, and chooses by it."""

    def __init__(self, cost: StepCost, drafting_costs: bool = False) -> None:
        """`drafting_costs`: each draft is a step of a model, so that no more are made than are worth that too."""
        self._drafting: deque[float] | None = deque(maxlen=_TIMED) if drafting_costs else None  # seconds a draft
        self._cost = cost
        self._slots: dict[int, _Slot] = {}
        self._rates: dict[tuple[int, int], _Rate] = {}  # by kind and place
        self._shape = StepShape(0, 1, 1, 1)
        self._refused = 0
        self._asked = frozenset[int]()  # slots for which a model is run

    def begin(self, new: NewSequence) -> None:
        """As Depths."""
        self._slots[new.slot] = _Slot()

    def release(self, slot: int) -> None:
        """As Depths."""
        del self._slots[slot]

    def step(self, plan: StepPlan) -> None:
        """As Depths."""
        self._shape = StepShape.of(plan)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Depths."""
        known = self._slots[slot]
        draft, known.judged = known.judged, None
        if draft is None:
            return
        own = known.own.setdefault(draft.kind, _Rate())
        for place, (drafted, token) in enumerate(zip(draft.tokens, tokens, strict=False)):
            right = drafted == token
            own.add(right, _OWN_MEMORY)
            self._rates.setdefault((draft.kind, place), _Rate()).add(right, _MEMORY)
            if not right:
                break

    def wanted(self, most: Mapping[int, int]) -> Mapping[int, int]:
        """As Depths."""
        found = {}
        for slot, length in most.items():
            known = self._slots[slot]
            if known.resting:
                known.resting -= 1
            else:
                found[slot] = length
                # A look takes a fraction of what a step takes for a row: of few rows each is looked at in every step.
                known.rest = min(max(1, 2 * known.rest), self._shape.rows // 4, _LONGEST_REST)
                known.resting = known.rest  # taken back where a draft is chosen
        if self._drafting is None:
            return found
        if found and len(self._drafting) >= _TIMED_LEAST:
            depth = self._worth_making(found, median(self._drafting))
            found = {slot: min(length, depth) for slot, length in found.items()} if depth else {}
        self._asked = frozenset(found)
        return found

    def took(self, seconds: float, longest: int) -> None:
        """As Depths."""
        if self._drafting is not None and self._asked:
            self._drafting.append(seconds / max(1, longest))

    def chosen(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """As Depths."""
        for slot in self._asked - {draft.slot for draft in drafts}:  # a model was run for nothing
            self._slots[slot].own.setdefault(0, _Rate()).add(False, _OWN_MEMORY)
            self._rates.setdefault((0, 0), _Rate()).add(False, _MEMORY)
        worth: list[tuple[float, int]] = []  # of each draft, and which it is of
        for number, draft in enumerate(drafts):
            known = self._slots[draft.slot]
            known.judged = draft
            worth += ((one, number) for one in self._probabilities(known, draft.kind, len(draft.tokens)))
        worth.sort(key=lambda one: -one[0])
        lengths = [0] * len(drafts)
        for _, number in worth[: self._paying([probability for probability, _ in worth])]:
            lengths[number] += 1
        found = []
        for draft, length in zip(drafts, lengths, strict=True):
            if length:
                known = self._slots[draft.slot]
                known.resting = known.rest = 0
                found.append(draft._replace(tokens=draft.tokens[:length]))
        return found

    def _probabilities(self, known: _Slot, kind: int, length: int) -> Iterator[float]:
        """Of so many drafts of a slot, in order, that each and all before it are right."""
        probability, prior = 1.0, _PRIOR
        own = known.own.get(kind, _Rate())
        for place in range(length):
            prior = self._rates.get((kind, place), _Rate()).beside(prior)
            probability *= own.beside(prior)
            yield probability

    def _worth_making(self, most: Mapping[int, int], each: float) -> int:
        """How many drafts of these slots, each of which takes so many seconds for all together, bring the most tokens a
        second; 0 where none is worth it."""
        price, rows = self._price(), max(1, self._shape.rows)
        chances = [[*self._probabilities(self._slots[slot], 0, length)] for slot, length in most.items()]
        tokens, seconds = float(rows), price.step
        best, depth = _LEAST_GAIN * rows / price.step, 0
        for place in range(max(most.values())):
            deep = [one[place] for one in chances if place < len(one)]
            tokens += sum(deep)
            seconds += price.each * len(deep) + each
            if tokens / seconds > best:
                best, depth = tokens / seconds, place + 1
        if not depth:
            self._refused += 1
            return 1 if self._refused % _TRIED_EVERY == 0 else 0
        return depth

    def _paying(self, worth: Sequence[float]) -> int:
        """How many of these drafts, the best first, bring the most tokens a second; 0 where none is worth it."""
        price, rows = self._price(), max(1, self._shape.rows)
        tokens, seconds = float(rows), price.step
        best, count = 0.0, 0
        for probability in worth:
            tokens += probability
            seconds += price.each
            if tokens / seconds <= best:
                break
            best = tokens / seconds
            count += 1
        if best >= _LEAST_GAIN * rows / price.step:
            return count
        if not worth or worth[0] < _PRIOR:
            return 0
        self._refused += 1  # a price that was learned under another load is put right by trying now and then
        return min(2, len(worth)) if self._refused % _TRIED_EVERY == 0 else 0

    def _price(self) -> _Price:
        """As it was learned; as long as no draft's price is known, most of a step is taken to be the same for any."""
        shape = self._shape._replace(drafts=0)
        estimate, many = self._cost.estimate(shape), self._cost.estimate(shape._replace(drafts=8))
        step = 1.0 if estimate is None or estimate.seconds <= 0.0 else estimate.seconds
        each = 0.0 if estimate is None or many is None else (many.seconds - estimate.seconds) / 8
        if each <= 0.0:
            each = step * (1.0 - _FIXED) / (_FIXED + (1.0 - _FIXED) * max(1, shape.rows))
        return _Price(step, each)
