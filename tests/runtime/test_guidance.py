"""Slots that share one draw: what is drawn is that of the logits mixed by hand, and both slots go on with it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence, ScheduledTokens, SlotResult, StepPlan
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.guidance import share
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.runner import ModelRunner
from penstock.runtime.sampler import Draw, Sampler
from penstock.startup.build_runner import load, make_runner
from penstock.startup.engine_spec import EngineSpec, make_engine_spec
from penstock.startup.scheduling import scheduler_options
from tests.models import tiny

BLOCK, WEIGHT, TOKENS = 8, 1.5, 9
PROMPTS = {0: tuple(tiny.prompt(13, 1)), 1: tuple(tiny.prompt(5, 2)), 2: tuple(tiny.prompt(7, 3))}
PARAMS = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=TOKENS, logprobs=2, presence_penalty=0.3)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = tmp_path_factory.mktemp("llama")
    tiny.save("llama", folder, num_hidden_layers=1)
    options = EngineOptions(
        model=str(folder), dtype="float32", threads=1, max_num_seqs=4, block_size=BLOCK, kv_blocks=40, max_model_len=64
    )
    return load(make_engine_spec(options))[0]


def runner_of(spec: EngineSpec) -> ModelRunner:
    limits = scheduler_options(spec.options, spec.plan, whole_prompts=spec.model.whole_prompts)
    return make_runner(spec, ("float32",) * len(spec.model.cache_specs), limits.max_num_seqs)[0]


def new(slot: int) -> NewSequence:
    blocks = (tuple(range(1 + 8 * slot, 9 + 8 * slot)),)
    return NewSequence(slot, f"r{slot}", 0, PROMPTS[slot], (), 0, blocks, PARAMS, seed=7 + slot)


def span(slot: int, start: int, tokens: tuple[int, ...], prompt: int, drafts: int = 0) -> ScheduledTokens:
    return ScheduledTokens(slot, start, tokens, prompt, drafts, True, ())


def run(
    runner: ModelRunner,
    slots: tuple[int, ...],
    guidance: tuple[tuple[int, int, float], ...] = (),
    dice: random.Random | None = None,
    known: list[int] | None = None,
    *,
    alike: bool = True,
) -> list[dict[int, SlotResult]]:
    """Results of every step; with dice, slots 0 and 1 have drafts, `known` or wrong, the same ones where `alike`."""
    said: dict[int, list[int]] = {slot: [] for slot in slots}
    results = []
    while min(len(tokens) for tokens in said.values()) < TOKENS:
        step, spans = len(results), []
        drafts = {slot: drafted(dice, known, said[slot]) for slot in slots if slot < 2}
        for slot in slots:
            prompt, tokens = PROMPTS[slot], said[slot]
            more = drafts[0 if alike else slot] if tokens and slot < 2 else ()
            if not tokens:
                spans.append(span(slot, 0, prompt, len(prompt)))
            else:
                spans.append(span(slot, len(prompt) + len(tokens) - 1, (tokens[-1], *more), 0, len(more)))
        added = tuple(new(slot) for slot in slots) if not step else ()
        runner.submit(StepPlan(step, new_sequences=added, scheduled=tuple(spans), guidance=guidance))
        found = {result.slot: result for result in runner.sample(step).results}
        for slot in slots:
            assert found[slot].error is None
            said[slot] += found[slot].tokens
        results.append(found)
    return results


def drafted(dice: random.Random | None, known: list[int] | None, said: list[int]) -> tuple[int, ...]:
    if dice is None:
        return ()
    if known and dice.random() < 0.7:
        return tuple(known[len(said) : len(said) + dice.randrange(4)])
    return tuple(dice.randrange(101) for _ in range(dice.randrange(3)))


def test_the_same_as_logits_mixed_by_hand(spec: EngineSpec) -> None:
    """The slow way: every step a whole forward pass of either sequence, its logits mixed, one row of a sampler."""
    model, device = spec.model, torch.device("cpu")
    sampler, said, logprobs = Sampler(model.vocab_size, 1, spec.kernels.sampling()), list[int](), []
    sampler.add_row(new(0))
    for _ in range(TOKENS):
        logits = []
        for slot in (0, 1):
            memory = KVMemory(spec.kernels, model.cache_specs, (40,), BLOCK)
            builder = BatchBuilder(1, 4, 8, BLOCK, device)
            builder.add_row(new(slot))
            tokens = (*PROMPTS[slot], *said)
            with torch.inference_mode():
                batch = builder.build([span(slot, 0, tokens, len(PROMPTS[slot]))], [len(tokens) - 1])
                logits.append(model.logits(model.forward(batch, memory.caches), torch.arange(1)).clone())
        mixed = (1 + WEIGHT) * logits[0] - WEIGHT * logits[1]
        sample = sampler.sample(mixed, [Draw(0, len(PROMPTS[0]) + len(said))])[0]
        said += sample.tokens
        logprobs += sample.logprobs
    runner = runner_of(spec)
    results = run(runner, (2, 1, 0), ((0, 1, WEIGHT),))
    assert [token for found in results for token in found[0].tokens] == said
    assert [entry for found in results for entry in found[0].logprobs] == logprobs
    assert all(found[1].tokens == found[0].tokens for found in results)
    alone = run(runner_of(spec), (2,))
    assert [found[2] for found in results] == [found[2] for found in alone]
    plain = run(runner_of(spec), (0,))
    assert [token for found in plain for token in found[0].tokens] != said
    accepted = []
    for seed in range(10):
        ahead = run(runner_of(spec), (1, 2, 0), ((0, 1, WEIGHT),), random.Random(seed), said, alike=seed < 5)
        assert [token for found in ahead for token in found[0].tokens][:TOKENS] == said
        assert [entry for found in ahead for entry in found[0].logprobs][:TOKENS] == logprobs
        assert all(found[1].tokens == found[0].tokens for found in ahead)
        accepted.append(sum(len(found[0].tokens) - 1 for found in ahead))
    assert sum(accepted[:5]) > 9 and sum(accepted[5:]) > 3, accepted


def test_what_is_scored_is_told_of_the_slot_that_draws(spec: EngineSpec) -> None:
    """Of the mixture, to which no log-probabilities of the other sequence belong, although its request asks."""
    results = run(runner_of(spec), (0, 1), ((0, 1, WEIGHT),))
    assert PARAMS.logprobs is not None
    assert all(len(found[0].logprobs) == 1 and found[1].logprobs == () for found in results)


@pytest.mark.parametrize("seed", range(4))
def test_who_follows_counts_what_it_takes(spec: EngineSpec, seed: int) -> None:
    """Where it draws later, penalties, bad words and min_tokens know of all its tokens, accepted drafts among them."""
    params = SamplingParams(
        temperature=0.9, max_tokens=2 * TOKENS, presence_penalty=0.9, frequency_penalty=0.7, repetition_penalty=1.3,
        bad_words_ids=tuple((word, other) for word in range(101) for other in (word, word + 1) if other < 101),
        min_tokens=TOKENS + 2,
    )  # fmt: skip
    runner, dice, said = runner_of(spec), random.Random(seed), list[int]()
    both = tuple(replace(new(slot), sampling=params, stop_ids=tuple(range(0, 101, 2))) for slot in (0, 1))
    steps = 0
    while len(said) < TOKENS:
        drafts = (*said[-1:], 5)[: dice.randrange(3)] if said else ()
        spans = [
            span(slot, len(PROMPTS[slot]) + len(said) - 1, (said[-1], *drafts), 0, len(drafts))
            if said
            else span(slot, 0, PROMPTS[slot], len(PROMPTS[slot]))
            for slot in (0, 1)
        ]
        added = () if said else both
        runner.submit(StepPlan(steps, (), added, scheduled=tuple(spans), guidance=((0, 1, WEIGHT),)))
        results = runner.sample(steps).results
        assert results[0].tokens == results[1].tokens
        said += results[0].tokens
        steps += 1
    alone = runner_of(spec)  # which the second sequence comes to with what was said so far
    resumed = replace(both[1], generated_ids=tuple(said))
    tokens = (*PROMPTS[1], *said)
    answers: list[list[int]] = []
    for other, first, plan in ((runner, (said[-1],), ()), (alone, tokens, (resumed,))):
        mine = list(said)
        for step in range(steps, steps + 6):
            given = first if len(mine) == len(said) else mine[-1:]
            start = len(PROMPTS[1]) + len(mine) - len(given)
            added = plan if step == steps else ()
            scheduled = (span(1, start, tuple(given), max(0, len(PROMPTS[1]) - start)),)
            other.submit(StepPlan(step, (), added, scheduled=scheduled))
            mine += other.sample(step).results[0].tokens
        answers.append(mine)
    assert answers[0] == answers[1]


def test_slots_that_cannot_share_are_refused() -> None:
    logits, draws = torch.zeros(3, 5), [Draw(4, 0), Draw(6, 0), Draw(7, 0)]
    assert share(logits, draws, ()).logits is logits
    for guidance in (
        ((4, 9, 1.0),),
        ((4, 4, 1.0),),
        ((4, 6, 1.0), (7, 6, 1.0)),
        ((4, 6, 1.0), (6, 7, 1.0)),
        ((4, 6, 1.0), (4, 7, 1.0)),
    ):
        with pytest.raises(ValueError, match="cannot share draws"):
            share(logits, draws, guidance)


def test_drafts_count_as_far_as_both_slots_have_them() -> None:
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    draws = [Draw(4, 0, (1, 2, 3)), Draw(6, 0, (1, 4)), Draw(7, 0, (2,))]
    shared = share(logits, draws, ((6, 4, 1.0),))
    assert shared.draws == [Draw(6, 0, (1,)), draws[2]] and shared.followers == ((4, 0),)
    assert torch.equal(shared.logits, torch.cat((2 * logits[4:6] - logits[:2], logits[7:])))


def test_pairs_have_weights_of_their_own() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    draws = [Draw(slot, 3) for slot in (5, 2, 8, 1)]
    shared = share(logits, draws, ((2, 5, 0.5), (1, 8, 2.0)))
    assert [draw.slot for draw in shared.draws] == [2, 1] and shared.followers == ((5, 0), (8, 1))
    assert torch.equal(shared.logits[0], 1.5 * logits[1] - 0.5 * logits[0])
    assert torch.equal(shared.logits[1], 3.0 * logits[3] - 2.0 * logits[2])
    sampler = Sampler(9, 9, ReferenceSampling())
    for slot in (1, 2):
        sampler.add_row(NewSequence(slot, "r", 0, (1,), (), 0, (), SamplingParams(temperature=0.0)))
    tokens = [sample.tokens[0] for sample in sampler.sample(shared.logits, shared.draws)]
    assert tokens == shared.logits.argmax(1).tolist()
