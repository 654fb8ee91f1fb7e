"""What drafts bring on a GPU: a drafter that knows the model's answers is right as often as is said."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.gpu.engines import ask, running
from benchmarks.gpu.measure import Figure, Setting
from benchmarks.gpu.shapes import config
from benchmarks.speculation_replayed import Replayed, Switched
from penstock.core.policies.step_cost import LearnedStepCost, UnknownStepCost
from penstock.engine.loop import Engine

MODEL = "Llama-3.1-8B"
RIGHT = (0.6, 0.8, 0.9)
MOST = 8
PROMPT = 64
TURNS = 3


class Answers:
    """Answers of an engine, and what they take."""

    def __init__(self, setting: Setting, engine: Engine, drafter: Replayed) -> None:
        self._engine, self._drafter, self._count = engine, drafter, 0
        self._tokens = 6 if setting.tiny else 16 if setting.compiling else 192
        self._vocabulary = config(MODEL, setting.tiny)["vocab_size"]
        runner: Any = engine.runner
        self._drafting = runner._drafting
        self._cost = LearnedStepCost()
        self._depths = self._drafting._depths = Switched(self._cost)
        self._truth: dict[int, list[int]] = {}

    def measure(self, turn: int, right: float, depth: int, *, fixed: bool) -> tuple[float, float]:
        """Tokens a second, and seconds a step, of one prompt's answer, which must be that without drafts."""
        self._drafting.cost = UnknownStepCost() if fixed else self._cost
        self._depths.fixed = fixed
        self._drafter.right, self._drafter.depth = right, depth
        self._count += 1
        name = f"answer {self._count}"
        self._drafter.answers[name] = self._truth.get(turn, ())
        request = ask(f"turn {turn}", PROMPT if self._tokens > 6 else 5, self._tokens, self._vocabulary)
        self._engine.add(replace(request, request_id=name, speculate=depth))
        said: list[int] = []
        begun, steps = 0.0, 0
        while self._engine.has_work:
            steps += bool(said)
            for output in self._engine.step():
                begun = begun or time.perf_counter()
                said += output.tokens
        seconds = time.perf_counter() - begun
        if said != self._truth.setdefault(turn, said):
            raise RuntimeError("drafts changed an answer")
        return (self._tokens - 1) / seconds, seconds / steps


def speculation(setting: Setting) -> Iterator[Figure]:
    """One sequence: what steps of drafts cost, and what the controller makes of drafts that are right so often."""
    drafter = Replayed(MOST)
    with running(setting, MODEL, 1, PROMPT + 192 + 16, batch_invariant=True, drafter=drafter) as engine:
        answers = Answers(setting, engine, drafter)
        turns = range(1 if setting.tiny or setting.compiling else TURNS)
        for turn in turns:
            answers.measure(turn, 1.0, 0, fixed=True)  # what is drafted from then on
            answers.measure(turn, 0.8, MOST, fixed=False)
        depths = range(MOST + 1)
        took = {d: [answers.measure(turn, 1.0, d, fixed=True)[1] for turn in turns] for d in depths}
        step = {depth: statistics.median(seconds) for depth, seconds in took.items()}
        for depth in (0, 1, 3, MOST):
            yield Figure(f"step of {depth + 1} tokens of a row", step[depth] * 1e3, "ms")
        for right in RIGHT:
            speed = statistics.median(answers.measure(turn, right, MOST, fixed=False)[0] for turn in turns)
            allowed = max(sum(right**place for place in range(depth + 1)) / step[depth] for depth in depths)
            gain = f"{allowed * step[0]:.2f} allowed"
            yield Figure(f"drafts right {right:.0%}, over none", speed * step[0], "times", note=gain)
            yield Figure(f"drafts right {right:.0%}, of what steps allow", speed / allowed, "", least=0.9)
