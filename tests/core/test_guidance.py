"""Guided requests: answers are those of the mixture, whatever room there is, whoever is beside or sent back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.config.errors import ContextLengthError, RequestError
from penstock.config.media import EncoderInput
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.loop import Engine
from penstock.engine.so_far import SoFar
from tests.core.harness import CROSS, Collector, expected_tokens, null_engine, request, run


def guided(name: str, dice: random.Random, most: int = 30, **more: object) -> EngineRequest:
    prompt = [dice.randrange(3) for _ in range(dice.randrange(1, most))]
    negative = [dice.randrange(3) for _ in range(dice.choice((1, dice.randrange(1, most))))]
    scale = dice.choice((1.5, 0.0, 3.0))
    sampling = {
        "max_tokens": dice.randrange(1, 20),
        "n": dice.choice((1, 1, 3)),
        "temperature": dice.choice((0.0, 1.0)),
    }
    return request(name, prompt, guidance_scale=scale, negative_prompt_ids=tuple(negative), **{**sampling, **more})


def life(seed: int) -> int:
    """One engine's; how many sequences were sent back in it."""
    dice = random.Random(seed)
    size, windows = dice.choice((1, 2, 4, 8)), dice.choice(((None,), (None, 5), (4, 6)))
    longest = 2 * (30 + 20)
    engine = null_engine(
        windows, blocks=-(-longest // size) + 6 + dice.choice((0, 2, 9, 40)), block_size=size,
        rows=dice.choice((2, 3, 8)), budget=dice.choice((2, 3, 16, 64)), vocab_size=3,
        caching=dice.random() < 0.7, depth=dice.randrange(2),
        policy=dice.choice(("fcfs", "priority")), checkpoints=dice.choice((None, None, 0, 3)),
    )  # fmt: skip
    asked = [
        guided(f"g{number}", dice, stop_ids=dice.choice(((), (2,))))
        if dice.random() < 0.6
        else request(f"p{number}", [dice.randrange(3) for _ in range(dice.randrange(1, 20))], max_tokens=9)
        for number in range(8)
    ]
    found = Collector()
    for one in asked:
        engine.add(one)
    for _ in range(6_000):
        found.take(engine.step())
        engine.scheduler.check_integrity()
        if dice.random() < 0.03:
            engine.scheduler.preempt(dice.choice(asked).request_id)
        if not engine.has_work:
            break
    assert not engine.has_work
    for one in asked:
        for index in range(one.sampling.n):
            assert found.tokens[one.request_id, index] == expected_tokens(one, index, 3), (one, index)
    assert {name for name, _ in found.tokens} == {one.request_id for one in asked}
    assert engine.scheduler.cache.usage(engine.scheduler.running)["blocks_used"] == 0
    return engine.scheduler.stats().preemptions


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_of_the_mixture_in_any_company(seed: int) -> None:
    """In pools that hold just two sequences, budgets of two tokens, with recurrent states; some preempted by hand."""
    assert sum(life(25 * seed + number) for number in range(25)) > 9


def test_alone_and_in_company_the_same_draws() -> None:
    dice = random.Random(3)
    asked = guided("g", dice, max_tokens=12, n=2, temperature=1.0)
    alone = run(null_engine(), asked).tokens
    others = [guided(f"o{number}", dice, max_tokens=9) for number in range(5)]
    engine = null_engine(budget=7, rows=4, blocks=40)
    beside = run(engine, *others, asked).tokens
    assert {key: beside[key] for key in alone} == alone
    plain = run(null_engine(), request("g", asked.prompt_ids, max_tokens=12, n=2, temperature=1.0)).tokens
    assert plain != alone


def test_who_follows_is_told_of_nowhere_and_ends_with_the_first() -> None:
    engine = null_engine()
    asked = guided("g", random.Random(1), n=3, max_tokens=20)
    engine.add(asked)
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.running) == 6
    engine.cancel("g")
    found = Collector()
    while engine.has_work:
        found.take(engine.step())
    assert found.finished == {("g", index): FinishReason.CANCELLED for index in range(3)}
    assert not engine.scheduler.running and not engine.scheduler.waiting
    engine.scheduler.check_integrity()


def test_negative_prompts_are_found_again() -> None:
    engine = null_engine(block_size=4)
    negative = tuple(range(30))
    first = request("a", [1, 2, 3], guidance_scale=2.0, negative_prompt_ids=negative)
    second = request("b", [4, 5], guidance_scale=3.0, negative_prompt_ids=negative)
    run(engine, first)
    before = engine.scheduler.stats().cached_tokens
    run(engine, second)
    assert engine.scheduler.stats().cached_tokens - before >= 28


def test_goes_on_in_another_engine() -> None:
    asked = guided("g", random.Random(5), n=2, max_tokens=15)
    whole = run(null_engine(), asked)
    engine, found = null_engine(), Collector()
    begun = whole.tokens["g", 0][:6]
    engine.add(asked, SoFar((tuple(begun), None)))
    while engine.has_work:
        found.take(engine.step())
    assert begun + found.tokens["g", 0] == whole.tokens["g", 0]
    assert found.finished["g", 1] is FinishReason.CANCELLED


def test_a_failure_of_a_step_ends_both() -> None:
    engine = null_engine()
    engine.add(guided("g", random.Random(1), max_tokens=20, n=1))
    engine.step()

    def fails(step: int) -> None:
        raise RuntimeError("told to fail")

    engine.runner.sample = fails  # type: ignore[method-assign, assignment]
    found = Collector()
    found.take(engine.step())
    assert found.finished["g", 0] is FinishReason.ERROR and not engine.has_work
    engine.scheduler.check_integrity()


def refused(engine: Engine, asked: EngineRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        engine.add(asked)
    assert not engine.has_work
    return caught.value


def test_what_cannot_be_guided_is_refused() -> None:
    def asked(negative: int, most: int = 4) -> EngineRequest:
        ids = (1,) * negative
        return request("g", [1, 2], guidance_scale=1.5, negative_prompt_ids=ids, max_tokens=most)

    assert isinstance(refused(null_engine(), asked(255)), ContextLengthError)
    assert "frontend" in str(refused(null_engine(), asked(0)))
    assert "--max-num-seqs" in str(refused(null_engine(rows=1), asked(3)))
    small = null_engine(blocks=9, block_size=4)
    told = refused(small, asked(18, 10))
    assert "negative prompt's 18" in str(told) and told.code == "kv_cache_too_small"
    run(small, request("alone", [1] * 18, max_tokens=10))
    engine = null_engine()
    engine.add(asked(3))
    engine.step()
    with pytest.raises(ValueError, match="do not fork"):
        engine.scheduler.fork("g", 0)
    with pytest.raises(ValueError, match="no drafts"):
        EngineRequest("g", (1,), asked(3).sampling, speculate=True)


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_failed_step_was_to_encode_is_encoded_by_another(ended: bool) -> None:
    """It is of sequences that have no tokens in that step, and of those that ended meanwhile, too."""
    engine = null_engine(vocab_size=3, more_groups=(CROSS,), depth=1)
    heard = replace(request("first", [1], max_tokens=3), encoder=EncoderInput("x", 4))
    both = replace(heard, sampling=replace(heard.sampling, guidance_scale=1.5, negative_prompt_ids=(1,), n=3))
    scheduler = engine.scheduler
    engine.add(heard if ended else replace(both, request_id="both"))
    plan = scheduler.plan()
    assert plan is not None and plan.encoder_work
    if ended:
        engine.cancel("first")
    scheduler.fail_outstanding("told to fail")
    scheduler.check_integrity()
    engine.runner.abort()
    engine.add(replace(heard, request_id="again"))
    found = run(engine)
    assert found.tokens["again", 0] == expected_tokens(heard, 0, 3)
    if not ended:
        for index in range(3):
            assert found.tokens["both", index] == expected_tokens(both, index, 3)
