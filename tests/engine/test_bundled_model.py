"""The bundled model through the real engine process, through LLM, and through death in the middle of streams."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import LLM
from penstock.completions import collect
from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.errors import CheckpointError, ConfigError, MemoryPlanError
from penstock.config.generation import GenerationRequest
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.engine.api import Delta, EngineState
from penstock.engine.frontend import Frontend
from penstock.engine.generation import TextGeneration
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.process_client import ProcessClient

MODEL = "penstock-concierge"


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    client = ProcessClient(EngineOptions(threads=1))
    await client.start()
    yield Frontend(client, TextPipeline.load(MODEL), served_name=MODEL)
    await client.close()


def story(request_id: str, **sampling: object) -> GenerationRequest:
    params = {"max_tokens": 1500, "ignore_eos": True, **sampling}
    return GenerationRequest(request_id, SamplingParams(**params), prompt=f"Story {request_id}:")  # type: ignore[arg-type]


async def answered(answer: TextGeneration) -> list[tuple[str, tuple[int, ...], object]]:
    """Of each sequence: its text, its tokens, and why it ended."""
    said: dict[int, list[Delta]] = {}
    async for delta in answer:
        said.setdefault(delta.index, []).append(delta)
    return [
        (
            "".join(delta.text for delta in deltas),
            tuple(token for delta in deltas for token in delta.token_ids),
            (deltas[-1].finish_reason, deltas[-1].stop_reason, deltas[-1].error),
        )
        for _, deltas in sorted(said.items())
    ]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
async def test_the_whole_vocabulary_comes_from_the_process(mode: str) -> None:
    """Told with each token of the answer and of the prompt: probabilities that are one together."""
    client = ProcessClient(EngineOptions(threads=1, max_model_len=256, max_logprobs=-1, logprobs_mode=mode))
    await client.start()
    try:
        frontend = Frontend(client, TextPipeline.load(MODEL), served_name=MODEL)
        params = SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1, top_k=3, ignore_eos=True)
        told = await collect(await frontend.generate(GenerationRequest("one", params, prompt="Hello you")), 1)
        named = replace(params, prompt_logprobs=None, logprob_token_ids=(7, 5))
        other = await collect(await frontend.generate(GenerationRequest("one", named, prompt="Hello you")), 1)
    finally:
        await client.close()
    entries, prompt = told.outputs[0].logprobs, told.prompt_logprobs
    assert len(entries) == 2 and len(prompt) == len(told.prompt_ids) - 1 > 0
    for entry in (*entries, *prompt):
        assert len(entry.top) == client.info.vocab_size and not entry.packed
        assert math.fsum(math.exp(value) for _, value in entry.top) == pytest.approx(1, abs=1e-6)
        assert dict(entry.top)[entry.token] == pytest.approx(entry.logprob, abs=1e-9)
    left = [sum(value > -math.inf for _, value in entry.top) for entry in entries]
    assert left == ([3, 3] if mode == "processed_logprobs" else [client.info.vocab_size] * 2)
    for entry, known in zip(other.outputs[0].logprobs, entries, strict=True):
        assert entry.top == tuple((token, dict(known.top)[token]) for token in (7, 5))


async def test_sixteen_streams_do_not_notice_that_their_engine_was_killed(frontend: Frontend) -> None:
    """Greedy and drawn, with n, penalties, stop strings and grammars: every text is that of an undisturbed run."""
    client = frontend.client
    assert isinstance(client, ProcessClient)
    held = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 40}))
    kinds: tuple[dict[str, object], ...] = (
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "n": 2, "seed": 5},
        {"temperature": 0.8, "presence_penalty": 0.6, "stop": ("\nqq",)},
        {"temperature": 1.0, "ignore_eos": False},
    )
    asked = [
        replace(story(str(number), max_tokens=100, **kinds[number % 4]), grammar=held if number % 4 == 3 else None)
        for number in range(16)
    ]
    truth = [await answered(answer) for answer in await asyncio.gather(*map(frontend.generate, asked))]
    answers = await asyncio.gather(*map(frontend.generate, asked))
    readers = [asyncio.create_task(answered(answer)) for answer in answers]
    for tokens in (10, 40):
        async with asyncio.timeout(60):
            while min((stream.tokens for stream in client._line.streams.live()), default=tokens) < tokens:
                await asyncio.sleep(0.01)
        killed = client.pid
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(60):
            while client.pid == killed or client.state is not EngineState.READY:
                await asyncio.sleep(0.01)
    assert await asyncio.gather(*readers) == truth
    stats = await client.stats()
    assert (stats.restarts, stats.running, stats.blocks_used) == (2, 0, 0)
    assert stats.resumed >= 16


async def test_current_directory_is_never_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "numpy", "typing", "penstock", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("import os; os.mkdir('imported')")
    monkeypatch.chdir(tmp_path)
    client = ProcessClient(EngineOptions(model="/nowhere/model"))
    with pytest.raises(CheckpointError, match="/nowhere/model"):
        await client.start()
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (EngineOptions(model="/nowhere/model"), CheckpointError, "/nowhere/model"),
        (EngineOptions(kv_cache_memory=1024), MemoryPlanError, "kv-cache-memory"),
        (EngineOptions(dtype="int3"), ConfigError, "int3"),
    ],
)
async def test_start_errors_keep_their_kind_and_text(options: EngineOptions, kind: type[Exception], words: str) -> None:
    client = ProcessClient(options)
    with pytest.raises(kind) as refused:
        await client.start()
    assert words in str(refused.value)


def test_llm_answers_as_the_reference_does(shared_data: Path) -> None:
    cases = json.loads((shared_data / "models" / MODEL / "greedy.json").read_text())
    with LLM(threads=1) as llm:
        answers = llm.generate(
            [case["prompt_ids"] for case in cases], temperature=0, max_tokens=64, skip_special_tokens=False
        )
        for case, answer in zip(cases, answers, strict=True):
            assert list(answer.outputs[0].token_ids) == case["greedy_ids"]
            assert answer.text == case["text"].removesuffix("<|im_end|>")
        chats = [case for case in cases if case["messages"]]
        for case in chats:
            (answer,) = llm.chat(case["messages"], tools=case["tools"], temperature=0, max_tokens=64)
            assert list(answer.prompt_ids) == case["prompt_ids"]
            assert list(answer.outputs[0].token_ids) == case["greedy_ids"]
            assert answer.cached_tokens > 0
            assert answer.text == case["text"].removesuffix("<|im_end|>")
        assert chats


def test_llm_continues_a_story(shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K"
    golden = json.loads((folder / "greedy.json").read_text())
    seen: list[tuple[int, int]] = []
    with LLM(folder / "hf", threads=1, progress=lambda done, total: seen.append((done, total))) as llm:
        assert seen
        assert seen[-1][0] == seen[-1][1] > 0
        (answer,) = llm.generate(golden["prompt"], temperature=0, max_tokens=len(golden["greedy_ids"]))
        assert list(answer.prompt_ids) == golden["prompt_ids"]
        assert list(answer.outputs[0].token_ids) == golden["greedy_ids"]
        assert answer.text.startswith(", there was")
