"""How running sequences and prompts are dealt to plans that are in flight together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.core.policies.dealing import LEAST_PIECE, Staged
from penstock.core.protocol import StepPlan
from penstock.core.request import EngineRequest
from penstock.engine.loop import Engine
from tests.core.harness import expected_tokens, null_engine, request, run


def staged(stages: int, least: int = LEAST_PIECE, **options: int) -> Engine:
    engine = null_engine(
        depth=stages - 1,
        stages=stages,
        **{"rows": 16, "blocks": 2_000, "budget": 2_048, "max_model_len": 4_096} | options,
    )  # type: ignore[arg-type]
    engine.scheduler._dealing = Staged(engine.scheduler.options, least)
    return engine


def plans_of(engine: Engine, *requests: EngineRequest) -> Iterator[tuple[StepPlan, int]]:
    """Every plan, and how many were in flight when it was made."""
    made: list[tuple[StepPlan, int]] = []
    submit = engine.runner.submit

    def noting(plan: StepPlan, masks: object = None) -> None:
        made.append((plan, engine.scheduler.outstanding - 1))
        submit(plan, masks)

    engine.runner.submit = noting  # type: ignore[method-assign]
    answers = run(engine, *requests)
    for asked in requests:
        assert answers.tokens[asked.request_id, 0] == expected_tokens(asked)
    return iter(made)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_decoding_sequences_are_dealt_equally(stages: int, rows: int) -> None:
    asked = [request(f"r{index}", (index, 1), max_tokens=40) for index in range(rows)]
    plans = [plan for plan, _ in plans_of(staged(stages), *asked)]
    together = min(stages, rows)
    sizes = [len(plan.scheduled) for plan in plans[4 * together : -4 * together]]
    rounds = {sum(sizes[index : index + together]) for index in range(len(sizes) - together)}
    assert rounds == {rows} and max(sizes) == -(-rows // stages)


@pytest.mark.parametrize("stages", [2, 3])
def test_all_stages_have_a_plan(stages: int) -> None:
    asked = [request(f"r{index}", (index, 1), max_tokens=40) for index in range(9)]
    beside = [others for _, others in plans_of(staged(stages), *asked)]
    assert set(beside[stages : -8 * stages]) == {stages - 1}


def test_pieces_of_one_prompt_follow_each_other() -> None:
    (long,) = (request("long", [index % 50 for index in range(2_000)], max_tokens=3),)
    plans = list(plans_of(staged(2), long))
    pieces = [plan.scheduled[0] for plan, _ in plans if plan.scheduled[0].prompt_tokens]
    lengths = [len(piece.tokens) for piece in pieces]
    assert sum(lengths) == 2_000 and lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 250 and lengths[-2] - 1 <= LEAST_PIECE
    assert [others for _, others in plans[1 : len(pieces)]] == [1] * (len(pieces) - 1)


def test_short_prompts_are_dealt_to_several_plans() -> None:
    asked = [request(f"r{index}", [index] * 40, max_tokens=2) for index in range(16)]
    plans = list(plans_of(staged(2), *asked))
    first = [plan.num_tokens for plan, _ in plans if any(span.prompt_tokens for span in plan.scheduled)]
    assert len(first) == 5 and max(first) <= 16 + LEAST_PIECE


def test_one_sequence_alone_is_as_it_was_without_stages() -> None:
    plans = list(plans_of(staged(3), request("one", (4, 2, 7), max_tokens=12)))
    assert [others for _, others in plans] == [0] * 12


def test_pairs_are_dealt_together() -> None:
    asked = [
        request(f"r{index}", (index, 1), max_tokens=20, negative_prompt_ids=(3,), guidance_scale=1.5)
        for index in range(5)
    ]
    plans = [plan for plan, _ in plans_of(staged(2), *asked)]
    assert all(len(plan.guidance) * 2 == len(plan.scheduled) for plan in plans[4:])
    assert max(len(plan.guidance) for plan in plans[4:-8]) <= 3


def test_a_budget_of_one_token_and_little_memory_make_progress() -> None:
    asked = [request(f"r{index}", [index] * 30, max_tokens=30) for index in range(6)]
    list(plans_of(staged(3, 1, budget=1, blocks=20, max_model_len=64), *asked))
