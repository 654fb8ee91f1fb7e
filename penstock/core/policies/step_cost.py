"""What a step will cost, learned from what steps have cost. Drafters, tiers, routers and time budgets ask it."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from operator import mul
from typing import NamedTuple, Protocol

from penstock.core.policies.least_squares import ForgettingFit
from penstock.core.protocol import StepPlan, StepTimings

_MEMORY = 512  # steps after which a measure counts 1/e
_LEAST_STEPS = 32  # before a fit is believed
_EVERY = 16  # steps between two fits at first, _SELDOM later
_SELDOM = 128
_FRESH = 512  # steps after which a number of tokens that was not met again counts as not seen
_FIXED = 0.8  # share of a one-token step that is taken not to grow with its tokens, before that is known
_EXACT = 32  # tokens of a step up to which each number of them has a factor of its own; beyond, each eighth part
_SMOOTH = 24.0  # steps of a number of tokens after which one counts 1/e in its factor
_LEAP = 1.6  # a step is taken to have been at most so many times slower than was told
_TRUSTED = 0.5  # steps of that number that the fit counts for beside them


class StepShape(NamedTuple):
    """What makes a step's cost.

    Attributes:
        prompt, generated: tokens of either kind.
        context: positions that the step's tokens attend to, summed over sequences.
        rows: sequences.
        drafts: tokens that are verified.
    """

    prompt: int
    generated: int
    context: int
    rows: int
    drafts: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """That of a plan."""
        prompt = tokens = context = drafts = 0
        for span in plan.scheduled:
            prompt += span.prompt_tokens
            tokens += len(span.tokens)
            context += span.start + len(span.tokens)
            drafts += span.draft_tokens
        return cls(prompt, tokens - prompt - drafts, context, len(plan.scheduled), drafts)

    @property
    def columns(self) -> tuple[float, ...]:
        """1, and what is counted."""
        return (1.0, *map(float, self))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, and by how many the estimates of late steps were wrong (root of the mean square)."""

    seconds: float
    error: float


class DraftPrices(NamedTuple):
    """Seconds of a step with 0, 1 … drafts.

    Attributes:
        expected: as far as is known.
        least: where no step of as many tokens was seen lately, no more than one of fewer tokens takes.
        seen: whether one without drafts was.
    """

    expected: Sequence[float]
    least: Sequence[float]
    seen: bool


class StepCost(Protocol):
    """Tells what steps cost."""

    def learn(self, plan: StepPlan, timings: StepTimings) -> None:
        """Takes a step's time in the runner."""

    def estimate(self, shape: StepShape) -> Estimate | None:
        """What a step of that shape takes; None as long as nobody knows."""

    def with_drafts(self, shape: StepShape, most: int) -> DraftPrices | None:
        """What a step of that shape takes if it verifies 0, 1 … `most` drafts besides; None as for `estimate`."""


class UnknownStepCost:
    """The null form: nothing is known."""

    def learn(self, plan: StepPlan, timings: StepTimings) -> None:
        pass

    def estimate(self, shape: StepShape) -> Estimate | None:
        return None

    def with_drafts(self, shape: StepShape, most: int) -> DraftPrices | None:
        return None


@dataclass(slots=True)
class _Factor:
    """By how much steps of so many tokens take longer than the fit says; late ones count more."""

    ratios: float = 0.0
    weight: float = 0.0
    met: int = 0  # the last step of so many tokens

    def add(self, ratio: float) -> None:
        keep = 1.0 - 1.0 / _SMOOTH
        self.ratios = keep * self.ratios + ratio
        self.weight = keep * self.weight + 1.0

    @property
    def value(self) -> float:
        return (self.ratios + _TRUSTED) / (self.weight + _TRUSTED)


class _Factors:
    """Factors by number of tokens; between numbers that were met they are interpolated."""

    def __init__(self) -> None:
        self._by_place: dict[int, _Factor] = {}
        self._places: list[int] = []  # those there are, rising

    def __bool__(self) -> bool:
        return bool(self._places)

    def items(self) -> Iterable[tuple[int, _Factor]]:
        """Places and factors."""
        return self._by_place.items()

    def seen(self, place: int, now: int) -> bool:
        """Whether a step of so many tokens was met lately."""
        factor = self._by_place.get(place)
        return factor is not None and now - factor.met < _FRESH

    def learn(self, place: int, seconds: float, told: float, now: int) -> float:
        """Takes a step, which the fit says takes `told`; the factor as it was."""
        factor = self._by_place.get(place)
        before = 1.0 if factor is None else factor.value
        if factor is None:
            factor = self._by_place[place] = _Factor()
            insort(self._places, place)
        if now - factor.met >= _FRESH:
            factor.ratios = factor.weight = 0.0
        factor.met = now
        if told > 0.0:  # a step that something else held up is no price
            factor.add(min(seconds / told, before * _LEAP))
        return before

    def of(self, place: int) -> float:
        """That of a place, between those that were met; 1 where none was."""
        found = self._by_place.get(place)
        if found is not None:
            return found.value
        if not self._places:
            return 1.0
        above = bisect(self._places, place)
        if above in (0, len(self._places)):
            return self._by_place[self._places[min(above, len(self._places) - 1)]].value
        low, high = self._places[above - 1], self._places[above]
        share = (place - low) / (high - low)
        return (1.0 - share) * self._by_place[low].value + share * self._by_place[high].value


class LearnedStepCost:
    """Seconds as a sum over a step's tokens by kind, contexts and rows, fitted to the steps there were, times a factor
    for the number of tokens.

    Kernels take tokens by fours or eights, so that a fifth may cost what three did not: the sum alone cannot say so.
    Steps that verify drafts have factors of their own, since others may be run in a shorter way. Before there is a fit,
    a step is taken to cost what the last ones did, most of it whatever its tokens are.
    """

    def __init__(self) -> None:
        self._fit = ForgettingFit(len(StepShape(0, 0, 0, 0).columns), _MEMORY)
        self._costs: list[float] | None = None
        self._square = 0.0
        self._weight = 0.0
        self._steps = 0
        self._next_fit = _LEAST_STEPS
        self._early: list[tuple[StepShape, float]] = []  # steps without prompts, before there is a fit
        self._plain, self._drafted = _Factors(), _Factors()  # of steps without prompts, with drafts or without

    def learn(self, plan: StepPlan, timings: StepTimings) -> None:
        seconds = timings.build + timings.forward + timings.sample
        if not plan.scheduled or seconds <= 0.0:
            return
        shape = StepShape.of(plan)
        columns = shape.columns
        costs = self._costs
        if costs is None:
            if not shape.prompt:
                self._early.append((shape, seconds))
        else:
            told = sum(map(mul, costs, columns))
            if not shape.prompt:
                told *= self._learn_factor(shape, seconds, told)
            keep = 1.0 - 1.0 / _MEMORY
            wrong = seconds - told
            self._square = keep * self._square + wrong * wrong
            self._weight = keep * self._weight + 1.0
        self._fit.add(columns, seconds)
        self._steps += 1
        if self._steps >= self._next_fit:
            self._next_fit += _EVERY if self._steps < _MEMORY else _SELDOM
            self._refit(shape)

    def estimate(self, shape: StepShape) -> Estimate | None:
        found = self._told(shape)
        if found is None:
            return None
        if not shape.prompt:
            found *= self._factor(_place(shape.generated + shape.drafts), shape.drafts > 0)
        return Estimate(found, sqrt(self._square / self._weight) if self._weight else found)

    def with_drafts(self, shape: StepShape, most: int) -> DraftPrices | None:
        base, tokens = self._told(shape), shape.generated + shape.drafts
        if base is None:
            return None
        more = self._told(shape._replace(drafts=shape.drafts + 1))
        assert more is not None
        each = more - base
        told = [base + each * drafts for drafts in range(most + 1)]
        if shape.prompt:
            return DraftPrices(told, told, True)
        plain = told[0] * self._factor(_place(tokens), drafts=False)
        expected, least = [plain], [plain]
        low = plain  # what the last step takes of those whose number of tokens was seen
        for place, group in groupby(range(1, most + 1), key=lambda drafts: _place(tokens + drafts)):
            factor, seen = self._factor(place, drafts=True), self._drafted.seen(place, self._steps)
            for drafts in group:
                seconds = told[drafts] * factor
                low = seconds if seen else min(low, seconds)
                expected.append(seconds)
                least.append(low)
        return DraftPrices(expected, least, self._plain.seen(_place(tokens), self._steps))

    def _factor(self, place: int, drafts: bool) -> float:
        """Of steps of either kind; as those of the other as long as none was met."""
        own, others = (self._drafted, self._plain) if drafts else (self._plain, self._drafted)
        return (own or others).of(place)

    def _learn_factor(self, shape: StepShape, seconds: float, told: float) -> float:
        """Takes a step; the factor as it was."""
        place, own = _place(shape.generated + shape.drafts), self._drafted if shape.drafts else self._plain
        before = self._factor(place, shape.drafts > 0)
        own.learn(place, seconds, told, self._steps)
        return before

    def _told(self, shape: StepShape) -> float | None:
        """What the fit says of a shape, or before there is one the last step."""
        if self._costs is not None:
            return max(float(sum(map(mul, self._costs, shape.columns))), 1e-9)
        if not self._early:
            return None
        seconds, tokens, each = self._early_price()
        return max(seconds + each * (shape.prompt + shape.generated + shape.drafts - tokens), 0.2 * seconds)

    def _early_price(self) -> tuple[float, float, float]:
        """Of the steps before there is a fit: mean seconds, mean tokens, and what a token more costs."""
        steps = [(float(shape.generated + shape.drafts), seconds) for shape, seconds in self._early]
        tokens, mean = (sum(values) / len(steps) for values in zip(*steps, strict=True))
        spread = sum((one - tokens) ** 2 for one, _ in steps)
        if spread > 0.0:
            return mean, tokens, max(0.0, sum((one - tokens) * seconds for one, seconds in steps) / spread)
        return mean, tokens, mean * (1.0 - _FIXED) / (_FIXED + (1.0 - _FIXED) * tokens)

    def _refit(self, last: StepShape) -> None:
        """Fits anew; of steps like the last one, factors and fit together say the same as before."""
        before, self._costs = self._costs, self._fit.costs()
        if before is None:
            for shape, seconds in self._early:
                self._learn_factor(shape, seconds, sum(map(mul, self._costs, shape.columns)))
            self._early.clear()
            return
        rows = max(1, last.rows)
        for place, factor in self._plain.items():
            like = last._replace(generated=place, rows=place, context=last.context * place // rows, drafts=0)
            _keep(factor, sum(map(mul, before, like.columns)), sum(map(mul, self._costs, like.columns)))
        for place, factor in self._drafted.items():
            like = last._replace(generated=min(place, last.generated), drafts=max(0, place - last.generated))
            _keep(factor, sum(map(mul, before, like.columns)), sum(map(mul, self._costs, like.columns)))


def _keep(factor: _Factor, old: float, new: float) -> None:
    """Lets a factor and a fit that changed say together what they said before."""
    if old > 0.0 and new > 0.0:
        factor.ratios = max(0.0, factor.value * old / new * (factor.weight + _TRUSTED) - _TRUSTED)


def _place(tokens: int) -> int:
    """Which numbers of tokens have one factor."""
    if tokens <= _EXACT:
        return tokens
    shift = tokens.bit_length() - 4
    return tokens >> shift << shift
