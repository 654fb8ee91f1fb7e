"""Same request, same answer to the bit: whatever the chunks, cache hit, preemption, company, threads or plan depth."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.options import EngineOptions
from penstock.config.resolve import Decision
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.api import EngineInfo
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from tests.models import tiny

NEW_TOKENS = 20
CHUNKS, HITS, PREEMPTIONS, COMPANY, DEPTHS = (1, 7, 16, 512), ("miss", "partial", "full"), (0, 1, 2, 3), (0, 3), (0, 1)


native_only = pytest.mark.skipif(not native.available(), reason="the native library is not built")
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=5)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, top_k=60, max_tokens=NEW_TOKENS, logprobs=5)


def make_engine(model: Path, chunk: int, depth: int, **more: Any) -> tuple[Engine, EngineInfo]:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_num_seqs": 8, "kv_blocks": 200, **more}
    return build_engine(EngineOptions(model=str(model), max_chunk_tokens=chunk, depth=depth, **options))


def ask(name: str, prompt: tuple[int, ...], tokens: int = NEW_TOKENS, how: SamplingParams = GREEDY) -> EngineRequest:
    return EngineRequest(name, prompt, replace(how, max_tokens=tokens), seed=2**63 + 11)


@dataclass
class Answer:
    """Everything a request got back; two are equal if every log-probability is, to the bit."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def finish(engine: Engine, between: Callable[[], None] = lambda: None) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    while engine.has_work:
        for output in engine.step():
            answer = answers.setdefault(output.request_id, Answer())
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            assert output.finish_reason in (None, FinishReason.LENGTH), output.error
        between()
        engine.scheduler.check_integrity()
    return answers


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
        generated = [
            sequence.known - sequence.num_prompt
            for sequence in scheduler.running
            if sequence.request.request_id == "it"
        ]
        if self.forced < self.wanted and generated and generated[0] > 4 * self.forced:
            scheduler.preempt("it")
            self.forced += 1
            if self.forced % 2:
                scheduler.cache.clear()  # resume from nothing, else from what is still cached


def ask_amid(
    engine: Engine, it: EngineRequest, hit: str, preemptions: int, others: int, chunk: int, depth: int
) -> Answer:
    """The answer to a request while all that is asked for happens to it, which is asserted."""
    prompt, tokens = it.prompt_ids, it.sampling.max_tokens or 0
    engine.scheduler.cache.clear()
    part = len(prompt) // 2 + 3
    warm = {"miss": (), "partial": (*prompt[:part], 5, 6, 7), "full": prompt}[hit]
    if warm:
        engine.add(ask("warm", warm, 1))
        finish(engine)
    before = engine.stats()
    engine.add(it)
    for i in range(others):
        engine.add(ask(f"other{i}", tuple(reversed(prompt[: 9 + i]))))
    watch = Watch(engine, preemptions)
    answer = finish(engine, watch)["it"]
    stats = engine.stats()
    assert watch.forced == preemptions == stats.preemptions - before.preemptions
    assert watch.together > 1 if others else watch.together == 1
    assert watch.ahead == depth
    hits = stats.prefix_hits - before.prefix_hits
    assert hits == {"miss": 0, "partial": part, "full": len(prompt) - 1}[hit]
    assert watch.steps >= -(-(len(prompt) - hits) // chunk) + tokens - 1
    assert len(answer.tokens) == len(answer.logprobs) == tokens
    assert all(len(entry.top) >= 5 for entry in answer.logprobs)
    return answer


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
    engine, _ = make_engine(model, chunk, depth)
    for hit, preemptions, others in product(HITS, PREEMPTIONS, COMPANY):
        assert ask_amid(engine, ask("it", prompt), hit, preemptions, others, chunk, depth).tokens == truth
    engine.close()


def test_running_out_of_memory_changes_no_answer(story: tuple[Path, tuple[int, ...], list[int]]) -> None:
    model, prompt, truth = story
    engine, _ = build_engine(EngineOptions(model=str(model), dtype="float32", threads=1, max_num_seqs=6, kv_blocks=15))
    for i in range(6):
        engine.add(ask(f"r{i}", prompt))
    for i in range(6):
        engine.add(ask(f"o{i}", (prompt[0], 400 + i, *prompt[2:30]), 60))
    answers = finish(engine)
    assert all(answers[f"r{i}"].tokens == truth for i in range(6))
    assert engine.stats().preemptions > 0
    engine.close()


def test_the_concierge_gives_its_reference_answers_in_one_batch(shared_data: Path) -> None:
    golden = json.loads((shared_data / "models" / "penstock-concierge" / "greedy.json").read_text())
    engine, _ = build_engine(EngineOptions(dtype="float32", threads=1))
    for i, case in enumerate(golden):
        engine.add(replace(ask(str(i), tuple(case["prompt_ids"]), 64), stop_ids=(2, 0)))
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.tokens)
    assert [answers[str(i)] for i in range(len(golden))] == [case["greedy_ids"] for case in golden]
    engine.close()


KV_TYPES, WEIGHTS = ("float32", "float16", "int8"), (None, "q4_0", "q8_0")
# Every pair of values of two axes: chunk, KV type, weights, threads, depth.
PAIRS = [
    (chunk, KV_TYPES[j], WEIGHTS[(i + j) % 3], 1 + (i + j) % 2, (i // 2 + j) % 2)
    for i, chunk in enumerate(CHUNKS)
    for j in range(3)
]
TASK = Path("/proc/self/task")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Leaves the process as other tests want it."""
    yield
    native.set_num_threads(1)
    torch.set_num_threads(1)


def helper_ns() -> int:
    """Nanoseconds that threads other than this one have run."""
    own = str(threading.get_native_id())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in TASK.iterdir() if task.name != own)


@pytest.fixture(scope="module")
def alone(story: tuple[Path, tuple[int, ...], list[int]]) -> Callable[[str, str | None], tuple[Answer, Answer]]:
    """(KV type, weights) → the greedy and the sampled answer, each by itself, in one chunk, with one thread."""
    model, prompt, _ = story

    @cache
    def answers(kv_type: str, weights: str | None) -> tuple[Answer, Answer]:
        engine, info = make_engine(model, 512, 0, kv_cache_dtype=kv_type, quantize=weights)
        assert kv_type == "float32" or kv_type == "float16" or setting(info, "KV cache types").value == kv_type
        assert setting(info, "step").value == "recorded"
        greedy, sampled = (
            ask_amid(engine, ask("it", prompt, how=how), "miss", 0, 0, 512, 0) for how in (GREEDY, SAMPLED)
        )
        engine.close()
        return greedy, sampled

    return answers


def setting(info: EngineInfo, name: str) -> Decision:
    return next(decision for decision in info.settings if decision.name == name)


@native_only
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("chunk", "kv_type", "weights", "threads", "depth"), PAIRS)
def test_log_probabilities_are_identical_on_every_axis(
    story: tuple[Path, tuple[int, ...], list[int]],
    alone: Callable[[str, str | None], tuple[Answer, Answer]],
    chunk: int,
    kv_type: str,
    weights: str | None,
    threads: int,
    depth: int,
) -> None:
    model, prompt, _ = story
    truth = alone(kv_type, weights)
    engine, info = make_engine(model, chunk, depth, kv_cache_dtype=kv_type, quantize=weights, threads=threads)
    assert info.determinism.startswith("strict")
    assert native.library().num_threads() == threads
    before = helper_ns()
    for hit, preemptions, others in product(HITS, PREEMPTIONS, COMPANY):
        sampled = (HITS.index(hit) + preemptions + others) % 2
        it = ask("it", prompt, how=(GREEDY, SAMPLED)[sampled])
        assert ask_amid(engine, it, hit, preemptions, others, chunk, depth) == truth[sampled], (
            hit,
            preemptions,
            others,
        )
    assert threads == 1 or helper_ns() - before > 1e6  # helpers have computed; with one thread there are none
    engine.close()


@native_only
def test_answers_differ_where_they_should(alone: Callable[[str, str | None], tuple[Answer, Answer]]) -> None:
    """KV types, weights and sampling reach the arithmetic: else equality would say nothing of them."""
    answers = [alone(kv_type, weights) for kv_type, weights in product(KV_TYPES, WEIGHTS)]
    for kind in (0, 1):
        assert all(answers[i][kind] != answers[j][kind] for i in range(len(answers)) for j in range(i))
    assert all(greedy != sampled for greedy, sampled in answers)
    assert all(answer.logprobs[0].rank == 1 for answer, _ in answers)
    assert any(entry.rank > 1 for _, answer in answers for entry in answer.logprobs)


@native_only
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "fp8", "int8", "int4"])
def test_long_prompts_are_scored_alike_in_any_chunks(kv_type: str) -> None:
    """Over several of attention's partitions, with K-quants, scores of the prompt included."""
    prompt = tuple(3 + 37 * i * i % 4000 for i in range(600))
    whole: Answer | None = None
    for chunk, threads, hit in ((512, 1, "miss"), (600, 2, "partial"), (16, 1, "full"), (57, 2, "miss")):
        options = {"kv_cache_dtype": kv_type, "quantize": "q4_k_m", "threads": threads, "max_num_batched_tokens": 600}
        engine, _ = build_engine(EngineOptions(max_chunk_tokens=chunk, max_num_seqs=4, kv_blocks=120, **options))
        engine.add(ask("scored", prompt, 4, replace(SAMPLED, prompt_logprobs=5)))
        scored = finish(engine)["scored"]
        assert len(scored.prompt_logprobs) == len(prompt) - 1
        again = ask_amid(engine, ask("it", prompt, 4, SAMPLED), hit, 0, 3, chunk, 0)
        assert (again.tokens, again.logprobs) == (scored.tokens, scored.logprobs)
        whole = whole or scored
        assert scored == whole
        engine.close()


@native_only
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "gemma3", "mixtral-sliding", "deepseek-v3"])
@pytest.mark.parametrize("kv_type", ["float32", "int8"])
def test_experts_windows_and_latents_are_alike_in_any_company(family: str, kv_type: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    prompt = tuple(tiny.prompt(43))
    truth: dict[bool, Answer] = {}
    for chunk, threads, depth in ((512, 1, 0), (1, 2, 0), (7, 3, 1)):
        engine, info = make_engine(
            tmp_path, chunk, depth, kv_cache_dtype=kv_type, threads=threads, max_model_len=100, block_size=4
        )
        assert setting(info, "step").value == "recorded"
        for hit, preemptions, others in product(HITS, (0, 2), COMPANY):
            if hit != "miss" and preemptions:
                continue
            sampled = bool(others)
            answer = ask_amid(
                engine, ask("it", prompt, how=(GREEDY, SAMPLED)[sampled]), hit, preemptions, others, chunk, depth
            )
            assert answer == truth.setdefault(sampled, answer), (chunk, hit, preemptions, others)
        engine.close()


@native_only
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("weights", [None, "q4_0"])
@pytest.mark.parametrize("arithmetic", ["strict", "fast"])
def test_matrix_units_give_identical_answers_on_every_axis(
    story: tuple[Path, tuple[int, ...], list[int]], arithmetic: str, weights: str | None
) -> None:
    """Emulated. At level fast too: what is hit or recomputed here keeps its kind."""
    if "amx_emulated" not in native.usable_isas():
        pytest.skip("the emulation of matrix units needs AVX-512")
    model, prompt, greedy = story
    settings = {"isa": "amx_emulated", "quantize": weights, "arithmetic": arithmetic}
    truth: Answer | None = None
    for chunk, threads, depth in ((512, 1, 0), (1, 1, 1), (7, 2, 0)):
        engine, info = make_engine(model, chunk, depth, threads=threads, **settings)
        assert info.determinism.startswith(arithmetic)
        assert info.numbers.endswith("products in matrix units")
        for hit, preemptions, others in product(HITS, (0, 3), (0, 3)):
            answer = ask_amid(engine, ask("it", prompt), hit, preemptions, others, chunk, depth)
            truth = truth or answer
            assert answer == truth, (chunk, hit, preemptions, others)
        engine.close()
    assert truth is not None
    assert weights is not None or truth.tokens == greedy


@native_only
def test_levels_differ_only_where_there_are_matrix_units(story: tuple[Path, tuple[int, ...], list[int]]) -> None:
    model, prompt, _ = story
    answers = {}
    for isa, arithmetic in product(("generic", "amx_emulated"), ("strict", "fast")):
        if isa not in native.usable_isas():
            pytest.skip("the emulation of matrix units needs AVX-512")
        engine, info = make_engine(model, 512, 0, isa=isa, quantize="q8_0", arithmetic=arithmetic)
        answers[isa, arithmetic] = ask_amid(engine, ask("it", prompt), "miss", 0, 0, 512, 0)
        if (isa, arithmetic) == ("generic", "fast"):
            assert info.determinism.startswith("strict")
            assert "no matrix units" in setting(info, "arithmetic").reason
        engine.close()
    assert answers["generic", "strict"] == answers["generic", "fast"]
    assert answers["amx_emulated", "strict"] != answers["amx_emulated", "fast"]
