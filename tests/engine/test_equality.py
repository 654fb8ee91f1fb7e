"""Same request, same answer: whatever the chunk size, cache hit, preemption, company or plan depth (fp32, greedy)."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from penstock.config.options import EngineOptions
from penstock.core.request import EngineRequest, FinishReason
from penstock.core.sampling import SamplingParams
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine

NEW_TOKENS = 20
CHUNKS, HITS, PREEMPTIONS, COMPANY, DEPTHS = (1, 7, 16, 512), ("miss", "partial", "full"), (0, 1, 2, 3), (0, 3), (0, 1)


def make_engine(model: Path, chunk: int, depth: int) -> Engine:
    engine, _ = build_engine(
        EngineOptions(
            model=str(model),
            dtype="float32",
            threads=1,
            max_chunk_tokens=chunk,
            max_num_seqs=8,
            kv_blocks=200,
            depth=depth,
        )
    )
    return engine


def ask(name: str, prompt: tuple[int, ...], tokens: int = NEW_TOKENS) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=tokens))


def finish(engine: Engine, between: Callable[[], None] = lambda: None) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
            assert output.finish_reason in (None, FinishReason.LENGTH)
        between()
        engine.scheduler.check_integrity()
    return tokens


class Watch:
    """Called after every step: forces preemptions of request "it" and notes what happened."""

    def __init__(self, engine: Engine, preemptions: int) -> None:
        self.engine, self.wanted = engine, preemptions
        self.steps = self.forced = self.together = self.ahead = 0

    def __call__(self) -> None:
        scheduler = self.engine.scheduler
        self.steps += 1
        self.together = max(self.together, len(scheduler.running))
        self.ahead = max(self.ahead, scheduler.outstanding)
        generated = [branch.generated for branch in scheduler.running if branch.request.request_id == "it"]
        if self.forced < self.wanted and generated and generated[0] > 4 * self.forced:
            scheduler.preempt("it")
            self.forced += 1
            if self.forced % 2:
                scheduler.cache.tree.clear()  # resume from nothing, else from what is still cached


@pytest.fixture(scope="module")
def story(shared_data: Path) -> tuple[Path, tuple[int, ...], list[int]]:
    """The model, a prompt of 37 tokens and the 20 greedy tokens that follow, by the reference library."""
    folder = shared_data / "models" / "stories260K"
    golden = json.loads((folder / "greedy.json").read_text())
    whole = golden["prompt_ids"] + golden["greedy_ids"]
    return folder / "hf", tuple(whole[:37]), whole[37 : 37 + NEW_TOKENS]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_greedy_answers_are_identical_on_every_axis(
    story: tuple[Path, tuple[int, ...], list[int]], chunk: int, depth: int
) -> None:
    model, prompt, truth = story
    engine = make_engine(model, chunk, depth)
    for hit, preemptions, others in product(HITS, PREEMPTIONS, COMPANY):
        engine.scheduler.cache.tree.clear()
        warm = {"miss": (), "partial": (*prompt[:21], 5, 6, 7), "full": prompt}[hit]
        if warm:
            engine.add(ask("warm", warm, 1))
            finish(engine)
        before = engine.stats()
        engine.add(ask("it", prompt))
        for i in range(others):
            engine.add(ask(f"other{i}", tuple(reversed(prompt[: 9 + i]))))
        watch = Watch(engine, preemptions)
        answer = finish(engine, watch)["it"]
        stats = engine.stats()
        assert answer == truth, (hit, preemptions, others)
        assert watch.forced == preemptions == stats.preemptions - before.preemptions
        assert watch.together > 1 if others else watch.together == 1
        assert watch.ahead == depth
        hits = stats.prefix_hits - before.prefix_hits
        assert hits == {"miss": 0, "partial": 21, "full": 36}[hit]
        assert watch.steps >= -(-(len(prompt) - hits) // chunk) + NEW_TOKENS - 1
    engine.close()


def test_running_out_of_memory_changes_no_answer(story: tuple[Path, tuple[int, ...], list[int]]) -> None:
    model, prompt, truth = story
    engine, _ = build_engine(EngineOptions(model=str(model), dtype="float32", threads=1, max_num_seqs=6, kv_blocks=15))
    for i in range(6):
        engine.add(ask(f"r{i}", prompt))
    for i in range(6):
        engine.add(ask(f"o{i}", (prompt[0], 400 + i, *prompt[2:30]), 60))
    answers = finish(engine)
    assert all(answers[f"r{i}"] == truth for i in range(6))
    assert engine.stats().preemptions > 0
    engine.close()


def test_the_concierge_gives_its_reference_answers_in_one_batch(shared_data: Path) -> None:
    golden = json.loads((shared_data / "models" / "penstock-concierge" / "greedy.json").read_text())
    engine, _ = build_engine(EngineOptions(dtype="float32", threads=1))
    for i, case in enumerate(golden):
        request = ask(str(i), tuple(case["prompt_ids"]), 64)
        engine.add(EngineRequest(request.request_id, request.prompt_ids, request.sampling, stop_ids=(2, 0)))
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.tokens)
    assert [answers[str(i)] for i in range(len(golden))] == [case["greedy_ids"] for case in golden]
    engine.close()
