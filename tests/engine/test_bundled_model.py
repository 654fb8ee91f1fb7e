"""The bundled model through the real engine process, through LLM, and through death in the middle of streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock import LLM
from penstock.config.errors import CheckpointError, ConfigError, MemoryPlanError
from penstock.config.options import EngineOptions
from penstock.core.request import FinishReason, GenerationRequest
from penstock.core.sampling import SamplingParams
from penstock.engine.api import EngineState
from penstock.engine.frontend import Frontend
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


async def test_sixteen_streams_survive_a_kill_with_a_clean_end(frontend: Frontend) -> None:
    client = frontend.client
    assert isinstance(client, ProcessClient)
    answers = await asyncio.gather(*(frontend.generate(story(str(index))) for index in range(16)))

    async def last(index: int) -> tuple[int, FinishReason | None, str | None]:
        tokens = 0
        async for delta in answers[index]:
            tokens += len(delta.token_ids)
        return tokens, delta.finish_reason, delta.error

    readers = [asyncio.create_task(last(index)) for index in range(16)]
    while not (await client.stats()).generated_tokens > 16:
        await asyncio.sleep(0.01)
    started = time.monotonic()
    os.kill(client.pid, signal.SIGKILL)
    ends = await asyncio.wait_for(asyncio.gather(*readers), 2)
    assert time.monotonic() - started < 2
    for tokens, reason, error in ends:
        assert 0 < tokens < 1500
        assert reason is FinishReason.ERROR
        assert error
        assert "/" not in error
    assert client.state is not EngineState.READY
    async with asyncio.timeout(30):
        while client.state is not EngineState.READY:  # type: ignore[comparison-overlap]
            await asyncio.sleep(0.02)
    answer = await frontend.generate(story("again", max_tokens=5))
    assert sum([len(delta.token_ids) async for delta in answer]) == 5
    stats = await client.stats()
    assert (stats.running, stats.blocks_used) == (0, 0)


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
