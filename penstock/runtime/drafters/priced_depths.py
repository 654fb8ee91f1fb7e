"""How many drafts are verified: as many as bring the batch the most tokens a second, none where none do.

A draft is worth the probability that it and all before it are right, and costs what a step takes longer by one token.
Both are learned while the engine works: acceptance by kind of draft, place in it and sequence; the price by
`core.policies.step_cost`. Of what is not verified the first token is judged too, by what came. What is tried although
it does not seem to pay is paid from a small share of the time that steps take, and never more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from math import ceil
from typing import Final

from penstock.core.policies.step_cost import DraftPrices, StepCost, StepShape
from penstock.core.protocol import NewSequence, StepPlan
from penstock.runtime.drafters.depths import SOON
from penstock.runtime.drafters.drafter import Draft

_PRIOR: Final = 0.5  # acceptance of a first draft of which nothing is known
_TRIALS: Final = 4.0  # drafts that an estimate counts for beside a sequence's own
_MEMORY: Final = 256.0  # judged drafts of a kind and place after which one counts 1/e
_OWN_MEMORY: Final = 32.0  # the same of a sequence
_FIXED: Final = 0.8  # share of a one-token step that is taken not to grow with its tokens, where nobody knows
_LEAST_GAIN: Final = 1.02  # tokens a second with drafts over without, below which it is not worth the trouble
_HOPELESS: Final = 0.02  # probability of a draft below which it is not thought about
_TIMED: Final = 9  # proposals whose median time is believed
_LOOKS: Final = 0.005  # of a step's time, for looking at slots that had nothing of it lately
_MOST_LOOKS: Final = 4.0  # steps, for the time of which looks may go on before they have brought anything
_QUIET: Final = 64  # steps at most that nothing is asked nor learned at a time, where there is no time for it
_LONGEST_REST: Final = 32  # steps that a slot without useful drafts is not looked at, where there are many
_TIMED_LEAST: Final = 3  # and how many of them, before which one draft of each sequence is made
_TRIES: Final = 0.008  # of the time of steps, for trying what does not seem to pay
_MOST_TRIES: Final = 2.0  # for which time is saved
_BETTER: Final = 1.04  # tokens a second that there may be where a price is not known, over the best known, to be tried
_PLAIN_EVERY: Final = 8  # steps with drafts, of which one is left without them while that price is not known
_LOSS: Final = 0.01  # of the time of steps, by which drafts may lose before there are none for a while
_LOSS_STEPS: Final = 4.0  # and the time of so many steps besides
_ACCOUNT: Final = 512  # steps after which gains and losses count 1/e
_PAUSE: Final = 64  # steps without drafts after a loss, twice as many after each further one
_LONGEST_PAUSE: Final = 8192


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
        rest: of how many steps it is looked at in one, a power of two; 0 for in each.
        verified, token_s: drafts that its next step verifies, and the seconds that a token takes without.
    """

    own: dict[int, _Rate] = field(default_factory=dict)
    judged: Draft | None = None
    rest: int = 0
    verified: tuple[int, ...] = ()
    token_s: float = 0.0


_UNKNOWN: Final = _Rate()


@dataclass(slots=True)
class _Account:
    """What drafts have brought and taken, in seconds, whatever was expected of them; late steps count more.

    Attributes:
        saved: time of the steps that accepted drafts made needless, less what was spent on drafts.
        steps: time of all steps.
        pause: steps for which there are no more drafts, now; `longest` the next time.
    """

    saved: float = 0.0
    steps: float = 0.0
    pause: int = 0
    longest: int = _PAUSE

    def step(self, seconds: float) -> None:
        keep = 1.0 - 1.0 / _ACCOUNT
        self.saved *= keep
        self.steps = keep * self.steps + seconds
        if self.pause:
            self.pause -= 1
        elif self.saved < -(_LOSS * self.steps + _LOSS_STEPS * seconds):
            self.saved, self.pause = 0.0, self.longest
            self.longest = min(2 * self.longest, _LONGEST_PAUSE)
        elif self.saved > _LOSS * self.steps + _LOSS_STEPS * seconds:
            self.longest = _PAUSE


class PricedDepths:
    """Learns what drafts bring and cost, and chooses by it."""

    def __init__(self, cost: StepCost, drafting_costs: bool = False) -> None:
        """`drafting_costs`: each draft is a step of a model, so that no more are made than are worth that too."""
        self.decisions = Counter[str]()
        self._drafting: deque[float] | None = deque(maxlen=_TIMED) if drafting_costs else None  # seconds a draft
        self._cost = cost
        self._slots: dict[int, _Slot] = {}
        self._rates: dict[tuple[int, int], _Rate] = {}  # by kind and place
        self._shape = StepShape(0, 1, 1, 1)
        self._step_s = 1.0
        self._plain_s = 0.0  # what the step that verifies drafts would take without
        self._account = _Account()
        self._saved = 0.0  # seconds there are for tries
        self._try_s = 0.0  # what a try takes
        self._asked = frozenset[int]()  # slots for which a model is run
        self._trying = False  # whether that is a try
        self._hopeless = False  # whether no draft was worth it, and no try could be paid
        self._clock = self._most_drafts = 0
        self._looked, self._look_s = 0, 0.0  # slots that the drafter looks at, and what it takes for one
        self._looking: float | None = None  # seconds there are for looks: a share of steps, and what drafts have saved
        self._drafted = 0  # steps since one without drafts

    def begin(self, new: NewSequence) -> None:
        """As Depths."""
        self._slots[new.slot] = _Slot()

    def release(self, slot: int) -> None:
        """As Depths."""
        del self._slots[slot]

    def step(self, plan: StepPlan, seconds: float) -> None:
        """As Depths."""
        self._shape = StepShape.of(plan)
        self._step_s = seconds or self._step_s
        self._most_drafts = max(self._most_drafts, 2 * self._shape.drafts)
        self._drafted = self._drafted + 1 if self._shape.drafts else 0
        if self._shape.drafts and not self._shape.prompt:
            self._earn(self._plain_s - seconds)
        if not self._shape.prompt:
            most = _MOST_LOOKS * seconds
            self._looking = most if self._looking is None else min(self._looking + _LOOKS * seconds, most)
        self._account.step(seconds)
        self._saved = min(self._saved + _TRIES * seconds, _MOST_TRIES * self._try_s)

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
        accepted = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(known.verified, tokens, strict=False)))
        self._earn(accepted * known.token_s)
        known.verified = ()

    def _earn(self, seconds: float) -> None:
        """Time that drafts have saved, or taken."""
        self._account.saved += seconds
        self._looking = (self._looking or 0.0) + seconds

    def rest(self) -> int:
        """As Depths: while there is a pause, or no time for looks; of a model's drafts, none for a try."""
        lacking = -(self._looking or 0.0) / (_LOOKS * self._step_s)
        if self._drafting is not None:
            lacking = (self._try_s - self._saved) / (_TRIES * self._step_s) if self._hopeless else 0.0
        steps = min(max(self._account.pause, ceil(max(0.0, lacking))), _QUIET)
        self._account.pause = max(0, self._account.pause - steps)
        self._looking = (self._looking or 0.0) + steps * _LOOKS * self._step_s
        self._saved += steps * _TRIES * self._step_s
        return steps

    def newcomer(self, rest: int) -> int:
        """As Depths: a model's drafts may be right more often in its answer than in others."""
        return rest if self._drafting is None or self._account.pause else 0

    @property
    def paused(self) -> bool:
        """As Depths."""
        return self._account.pause > SOON

    def wanted(self, most: Mapping[int, int]) -> Mapping[int, int]:
        """As Depths."""
        self._asked, self._trying = frozenset(), False
        self._hopeless = False
        if self._account.pause:
            self.decisions["loss"] += len(most)
            return {}
        if self._drafting is None and (self._looking or 0.0) < 0.0:
            self.decisions["resting"] += len(most)
            return {}
        if self._drafted >= _PLAIN_EVERY and not self._prices(0).seen:
            self.decisions["tried"] += len(most)
            return {}
        found, self._clock = {}, self._clock + 1
        # Where a look takes a good part of a step, who had nothing of it lately rests. All wake together: a price may
        # fall once there are enough of them.
        longest = self._longest_rest(len(most))
        for slot, length in most.items():
            known = self._slots[slot]
            if self._clock % max(1, min(known.rest, longest)):
                self.decisions["resting"] += 1
            else:
                found[slot] = length
                known.rest = min(max(1, 2 * known.rest), _LONGEST_REST)  # taken back where a draft is chosen
        if self._drafting is None or not found:
            self._looked = len(found)
            return found
        if len(self._drafting) < _TIMED_LEAST:
            found = dict.fromkeys(found, 1)
        else:  # what was read of a prompt besides is no part of the price
            found = self._worth_making(found, sorted(self._drafting)[len(self._drafting) // 4])
        self._asked = frozenset(found)
        return found

    def took(self, seconds: float, longest: int) -> None:
        """As Depths."""
        if self._drafting is None:
            self._earn(-seconds)
            if self._looked:
                each = seconds / self._looked  # the first of a sequence takes longer, and may be all there was
                self._look_s = min(each, self._look_s + (each - self._look_s) / _TIMED)
                self._looked = 0
            return
        self._account.saved -= seconds
        if not self._asked:
            self._saved -= seconds
        if self._asked and longest:
            self._drafting.append(seconds / longest)

    def _longest_rest(self, slots: int) -> int:
        """Steps of which one is looked at, so that looks of so many slots take no more than a small share of them."""
        if self._drafting is not None:
            return min(self._shape.rows // 4, _LONGEST_REST)
        return min(int(self._look_s * slots / (_LOOKS * self._step_s)), _LONGEST_REST)

    def chosen(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """As Depths."""
        nothing = len(self._asked) - sum(draft.slot in self._asked for draft in drafts)
        if nothing:
            for slot in self._asked - {draft.slot for draft in drafts}:  # a model was run for nothing
                self._slots[slot].own.setdefault(0, _Rate()).add(False, _OWN_MEMORY)
                self._rates.setdefault((0, 0), _Rate()).add(False, _MEMORY)
            self.decisions["nothing"] += nothing
        if not drafts:
            return []
        worth: list[tuple[float, int]] = []  # of each draft, and which it is of
        for number, draft in enumerate(drafts):
            known = self._slots[draft.slot]
            known.judged = draft
            chances = self._probabilities(known, draft.kind, len(draft.tokens))
            worth += ((one, number) for one in takewhile(lambda one: one >= _HOPELESS, chances))
        worth.sort(key=lambda one: -one[0])
        prices = self._prices(len(worth))
        seconds = prices.expected
        count, why = self._paying([probability for probability, _ in worth], prices)
        lengths = [0] * len(drafts)
        for _, number in worth[:count]:
            lengths[number] += 1
        self._plain_s = seconds[0]
        return self._cut(drafts, lengths, why, seconds[0] / max(1, self._shape.rows))

    def _cut(self, drafts: Sequence[Draft], lengths: Sequence[int], why: str, token_s: float) -> Sequence[Draft]:
        """Drafts of these lengths; a token takes so many seconds without them."""
        found, refused = [], ""
        for draft, length in zip(drafts, lengths, strict=True):
            if not length:
                refused = refused or ("acceptance" if why == "verified" else why)
                self.decisions[refused] += 1
                continue
            known = self._slots[draft.slot]
            known.rest = 0
            known.verified, known.token_s = draft.tokens[:length], token_s
            self.decisions["tried" if why != "verified" or self._trying else "verified"] += 1
            found.append(draft._replace(tokens=known.verified))
        return found

    def _probabilities(self, known: _Slot, kind: int, length: int) -> Iterator[float]:
        """Of so many drafts of a slot, in order, that each and all before it are right."""
        probability, prior = 1.0, _PRIOR
        own = known.own.get(kind, _UNKNOWN)
        for place in range(length):
            prior = self._rates.get((kind, place), _UNKNOWN).beside(prior)
            probability *= own.beside(prior)
            yield probability

    def _worth_making(self, most: Mapping[int, int], each: float) -> dict[int, int]:
        """How many drafts to make of these slots, each of which takes so many seconds for all together, so that they
        bring the most tokens a second; of none where none is worth it."""
        rows = max(1, self._shape.rows)
        chances = {slot: [*self._probabilities(self._slots[slot], 0, length)] for slot, length in most.items()}
        prices = self._prices(sum(most.values()))
        ways = [(float(rows), 0, 0)]  # tokens, drafts and the depth of each
        for place in range(max(most.values())):
            deep = [one[place] for one in chances.values() if place < len(one)]
            if place and ways[-1][1] + len(deep) > self._near:
                break
            ways.append((ways[-1][0] + sum(deep), ways[-1][1] + len(deep), place + 1))
        known = [prices.expected[made] + each * depth for _, made, depth in ways]
        least = [prices.least[made] + each * depth for _, made, depth in ways]
        depth, self._trying = self._best([tokens for tokens, _, _ in ways], known, least)
        if depth:
            return {slot: min(length, depth) for slot, length in most.items()}
        likely = max(chances, key=lambda slot: chances[slot][0])
        cost = self._charge(known[0] + each + prices.expected[1] - prices.expected[0], rows + 0.0, rows / known[0])
        self._trying = self._pays_try(cost)
        self._hopeless = not self._trying
        self.decisions[self._why_not(chances[likely], each)] += len(most) - self._trying
        return {likely: 1} if self._trying else {}

    def _paying(self, worth: Sequence[float], prices: DraftPrices) -> tuple[int, str]:
        """How many of these drafts, the best first, bring the most tokens a second, and why so many."""
        if self._trying:  # that has been paid for
            return len(worth), "tried"
        sums = [*accumulate(worth, initial=float(max(1, self._shape.rows)))]
        near = 1 + min(len(worth), self._near)
        count, tried = self._best(sums[:near], prices.expected[:near], prices.least[:near])
        if count:
            return count, "tried" if tried else "verified"
        return 0, self._why_not(worth, 0.0)

    def _best(self, tokens: Sequence[float], known: Sequence[float], least: Sequence[float]) -> tuple[int, bool]:
        """Which of several ways to go on brings the most tokens a second, the first where none is worth the trouble;
        and whether it is one that is tried, as it may be better than the best that is known.

        Args:
            tokens: that each is expected to give.
            known: seconds that each is expected to take.
            least: that each takes, where its price is not known.
        """
        rates = [token / took for token, took in zip(tokens, known, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] < _LEAST_GAIN * rates[0]:
            best = 0
        may = [token / took for token, took in zip(tokens, least, strict=True)]
        hope = max(range(len(may)), key=may.__getitem__)
        better = hope != best and may[hope] > _BETTER * rates[best]
        if better and self._pays_try(self._charge(known[hope], tokens[hope], rates[best])):
            return hope, True
        return best, False

    def _charge(self, seconds: float, tokens: float, rate: float) -> float:
        """What a try loses beside what brings so many tokens a second."""
        return max(seconds - tokens / rate, 0.0)

    def _pays_try(self, cost: float) -> bool:
        """Whether there is time for a try that loses so many seconds, which are taken."""
        self._try_s = cost
        if self._saved < cost:
            return False
        self._saved -= cost
        return True

    @property
    def _near(self) -> int:
        """Drafts of a step that are thought about: twice as many as there were, so that no price is far from known."""
        return max(self._most_drafts, 2, self._shape.rows // 2)

    def _why_not(self, chances: Sequence[float], each: float) -> str:
        """Whether drafts that are not worth it would be if there were no other sequences."""
        if self._shape.rows > 1:
            alone = StepShape(0, 1, self._shape.context // self._shape.rows, 1)
            prices = self._cost.with_drafts(alone, min(8, len(chances)))
            sums = accumulate(chances[:8], initial=1.0)
            if prices is not None and any(
                tokens / (took + each * drafts) > _LEAST_GAIN / prices.expected[0]
                for drafts, (tokens, took) in enumerate(zip(sums, prices.expected, strict=True))
                if drafts
            ):
                return "load"
        return "acceptance"

    def _prices(self, most: int) -> DraftPrices:
        """What the next step takes with 0, 1 … `most` drafts; as long as nobody knows, most of it is the same for any.

        Where the price of a draft is not known, since none was verified yet, it is taken to be what a row's is.
        """
        shape = self._shape._replace(drafts=0)
        found = self._cost.with_drafts(shape, most)
        expected = () if found is None else found.expected
        if found is not None and expected[0] > 0.0 and (not most or expected[-1] > expected[0]):
            return found
        base = expected[0] if expected and expected[0] > 0.0 else self._step_s
        each = base * (1.0 - _FIXED) / (_FIXED + (1.0 - _FIXED) * max(1, shape.rows))
        prior = [base + each * drafts for drafts in range(most + 1)]
        return DraftPrices(prior, [base] * (most + 1), True)
