"""Whether the controller finds the depth that pays: drafts are right as often as is said, steps are a real shape's.

python -m benchmarks.speculation_replayed MODEL --acceptance 0.6 0.8 0.9 --depths 1 2 4 8

Answers are random tokens that a scripted sampler says (`benchmarks.speculation`); a drafter that knows them is right
with the given probability, draft by draft. Steps of 1, 2 … tokens are measured in turns with the rest, in the same
engine. From these and the acceptance follows what each fixed depth would bring; beside the best of them, none included,
stands what the controller brings, which learns both while it decodes, and nothing from those steps.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, report
from benchmarks.speculation import Script, answer, made
from penstock.core.policies.step_cost import LearnedStepCost, UnknownStepCost
from penstock.core.protocol import NewSequence, StepPlan
from penstock.runtime.drafters.drafter import Draft, NoDrafter
from penstock.runtime.drafters.priced_depths import PricedDepths

_VOCABULARY = 4_000  # of answers
_PROMPT = 48


class Replayed(NoDrafter):
    """Knows the answers, and says another token where it is to be wrong.

    Attributes:
        right: how often a draft is right.
        depth: drafts of a proposal.
    """

    def __init__(self, most: int) -> None:
        self.most = self.depth = most
        self.right = 1.0
        self.answers: dict[str, Sequence[int]] = {}
        self._known: dict[int, tuple[Sequence[int], int]] = {}
        self._dice = random.Random(1)

    def begin(self, new: NewSequence) -> None:
        self._known[new.slot] = self.answers[new.request_id], len(new.generated_ids)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        said, count = self._known[slot]
        self._known[slot] = said, count + len(tokens)

    def release(self, slot: int) -> None:
        del self._known[slot]

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        found = []
        for slot, most in wanted.items():
            said, count = self._known[slot]
            coming = said[count : count + min(most, self.depth)]
            drafts = tuple(one if self._dice.random() < self.right else one + 1 for one in coming)
            if drafts:  # of one kind are those that are right as often
                found.append(Draft(slot, drafts, round(100 * self.right)))
        return found


class Switched(PricedDepths):
    """Chooses, or takes all that is drafted, and learns nothing of that."""

    fixed = False

    def step(self, plan: StepPlan, seconds: float) -> None:
        if not self.fixed:
            super().step(plan, seconds)

    def took(self, seconds: float, longest: int) -> None:
        if not self.fixed:
            super().took(seconds, longest)

    def wanted(self, most: Mapping[int, int]) -> Mapping[int, int]:
        return most if self.fixed else super().wanted(most)

    def rest(self) -> int:
        return 0 if self.fixed else super().rest()

    def chosen(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        return drafts if self.fixed else super().chosen(drafts)


def script(dice: random.Random, tokens: int) -> Script:
    """Random tokens, which nothing can be copied from."""
    ids = [dice.randrange(_VOCABULARY) for _ in range(_PROMPT + tokens)]
    return ids[:_PROMPT], ids[_PROMPT:]


class Bench:
    """An engine whose drafter and depths are set for each answer."""

    def __init__(self, model: str, most: int, sequences: int, tokens: int) -> None:
        self.drafter = Replayed(most)
        self._dice, self._count, self._sequences = random.Random(2), 0, sequences
        self.engine, self._scripted = made(model, None, sequences, _PROMPT + tokens + 16, self.drafter)
        self._cost = LearnedStepCost()
        self.depths = Switched(self._cost)
        runner: Any = self.engine.runner
        self._drafting = runner._drafting
        self._drafting._depths = self.depths

    def measure(self, right: float, depth: int, tokens: int, *, fixed: bool) -> tuple[float, float]:
        """Tokens a second of all sequences, and seconds a step."""
        self._drafting.cost = UnknownStepCost() if fixed else self._cost
        self.depths.fixed = fixed
        self.drafter.right, self.drafter.depth = right, depth
        self._count += 1
        scripts = [script(self._dice, tokens) for _ in range(self._sequences)]
        for number, (_, said) in enumerate(scripts):
            self.drafter.answers[f"{self._count}.{number}"] = said
        before = self.engine.stats().steps
        seconds = answer(self.engine, self._scripted, scripts, f"{self._count}.", depth)
        steps = self.engine.stats().steps - before - 1
        return (tokens - 1) * self._sequences / seconds, seconds / steps


def measured(args: Any) -> tuple[dict[str, Any], list[list[object]]]:
    """Figures, and rows of a table."""
    deepest = max(args.depths)
    bench = Bench(args.model, deepest, args.sequences, args.tokens)
    costs: dict[int, list[float]] = {depth: [] for depth in range(deepest + 1)}
    gains: dict[tuple[float, int], list[float]] = {
        (right, most): [] for right in args.acceptance for most in args.depths
    }
    works: list[int | tuple[float, int]] = [*costs, *gains]
    dice = random.Random(3)
    for turn in range(args.rounds + 1):  # the first is warm-up
        dice.shuffle(works)  # so that what else the machine does falls on all alike
        for work in works:
            if isinstance(work, int):
                _, seconds = bench.measure(1.0, work, args.tokens // 2, fixed=True)
                costs[work] += [seconds] if turn else []
            else:
                speed, _ = bench.measure(*work, args.tokens, fixed=False)
                gains[work] += [speed] if turn else []
    bench.engine.close()
    step = {depth: statistics.median(took) for depth, took in costs.items()}
    figures: dict[str, Any] = {"step_seconds_by_drafts": step, "decisions": dict(bench.depths.decisions), "found": []}
    rows: list[list[object]] = []
    for (right, most), speeds in gains.items():
        fixed = [
            args.sequences * sum(right**place for place in range(depth + 1)) / step[depth] for depth in range(most + 1)
        ]
        best = max(range(most + 1), key=fixed.__getitem__)
        found = statistics.median(speeds)
        row = {"acceptance": right, "most": most, "tokens_per_s": speeds, "allowed": fixed[best], "best_depth": best}
        figures["found"].append({**row, "share": found / fixed[best], "over_off": found / fixed[0]})
        rows.append([right, most, found, best, fixed[best] / fixed[0], found / fixed[0], found / fixed[best]])
    return figures, rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", help="a model, such as those of benchmarks.cpu.peers")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.8, 0.9])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160, help="of an answer; half where costs are measured")
    args = parser.parse_args()
    figures, rows = measured(args)
    columns = ["acceptance", "K", "tokens/s", "best depth", "allowed, over off", "found, over off", "share of allowed"]
    shape = f"{Path(args.model).stem}_{args.sequences}"
    report(f"speculation_replayed_{shape}", args.results, {"model": Path(args.model).stem, **figures}, columns, rows)


if __name__ == "__main__":
    main()
