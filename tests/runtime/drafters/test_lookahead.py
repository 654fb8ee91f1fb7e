"""Lookahead: guesses that become right by being read, and what became of them, kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence, ScheduledTokens, StepPlan
from penstock.runtime.drafters.hidden_states import Tapped
from penstock.runtime.drafters.lookahead import _GRAMS, LookaheadDrafter

Model = Callable[[list[int]], int]


def answered(model: Model, prompt: list[int], count: int, drafter: LookaheadDrafter) -> tuple[list[int], int]:
    """At least so many tokens that the model says, and the steps they took."""
    tokens, steps = list(prompt), 0
    drafter.begin(NewSequence(3, "", 0, tuple(prompt), (), 0, ((),), SamplingParams()))
    while len(tokens) < len(prompt) + count:
        [draft] = drafter.propose({3: drafter.most})
        assert len(draft.tokens) == drafter.most
        said = [model([*tokens, *draft.tokens[:ahead]]) for ahead in range(drafter.most + 1)]
        span = ScheduledTokens(3, len(tokens) - 1, (tokens[-1], *draft.tokens), 0, drafter.most, True, ())
        right = next((at for at, one in enumerate(draft.tokens) if one != said[at]), drafter.most)
        drafter.see(StepPlan(steps, scheduled=(span,)), Tapped({}, None, {3: np.array(said)}))
        drafter.take(3, said[: right + 1])
        tokens += said[: right + 1]
        steps += 1
    drafter.release(3)
    return tokens[len(prompt) :], steps


def test_guesses_become_right_where_nothing_was_said_before() -> None:
    """Two of three tokens follow from their place alone, and none is said twice: nothing could be copied."""

    def model(tokens: list[int]) -> int:
        place = len(tokens)
        return 10 * place + (tokens[-1] % 7 if place % 3 == 0 else 8)

    said, steps = answered(model, [1, 2, 3, 4], 120, LookaheadDrafter(6, 4))
    plain = [1, 2, 3, 4]
    for _ in said:
        plain.append(model(plain))
    assert said == plain[4:]
    assert len(set(said)) == len(said)
    assert len(said) / steps > 2.0


@pytest.mark.parametrize("gram", [2, 5])
def test_what_the_model_made_is_drafted_when_it_begins_again(gram: int) -> None:
    def model(tokens: list[int]) -> int:
        return (tokens[-1] * 5 + 3) % 37

    drafter = LookaheadDrafter(gram - 1, gram)
    _, steps = answered(model, [1], 36 * 3, drafter)
    assert steps <= 36 + 2 * 36 / gram + gram  # the second round is that of the first, n-gram after n-gram


def test_memory_is_bounded() -> None:
    dice = random.Random(1)
    drafter = LookaheadDrafter(4, 3)
    prompt = tuple(dice.randrange(1 << 20) for _ in range(20_000))
    drafter.begin(NewSequence(0, "", 0, prompt, (), 0, ((),), SamplingParams()))
    for _ in range(5_000):
        drafter.take(0, [dice.randrange(1 << 20)])
    row = drafter._rows[0]
    assert len(row.grams) == _GRAMS
    assert len(row.last) == 3
    assert row.known == 25_000
