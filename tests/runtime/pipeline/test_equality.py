"""Stages give the bits of one process: every kind of layer, under everything that happens to a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.constraint import Thinking
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from tests.models import tiny
from tests.runtime.pipeline.support import staged_engine

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
FAMILIES = ("qwen3", "gemma3", "mamba2", "qwen3-next", "deepseek-v2", "mixtral", "gemma3n")


@dataclass
class Answer:
    """Everything a sequence got back; two are equal if every log-probability is, to the bit."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: bytes | None = None
    reason: FinishReason | None = None


Answers = dict[tuple[str, int], Answer]


def answers(
    engine: Engine,
    requests: Sequence[EngineRequest],
    between: Callable[[Engine, int], None] = lambda engine, step: None,
) -> Answers:
    """What these are answered, the second half of them once the first are under way."""
    found: Answers = {}
    waiting = list(requests)
    step = 0
    try:
        while waiting or engine.has_work:
            for _ in range(len(requests) // 2 if step % 7 == 0 else 0):
                if waiting:
                    engine.add(waiting.pop(0))
            for output in engine.step():
                answer = found.setdefault((output.request_id, output.sequence), Answer())
                answer.tokens += output.tokens
                answer.logprobs += output.logprobs
                answer.prompt_logprobs += output.prompt_logprobs
                answer.pooled = output.pooled or answer.pooled
                answer.reason = output.finish_reason or answer.reason
                assert output.error is None, output.error
            between(engine, step)
            engine.scheduler.check_integrity()
            step += 1
        assert engine.stats().blocks_used == 0
    finally:
        engine.close()
    return found


def asked(name: str, prompt: tuple[int, ...], **sampling: Any) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 9, "logprobs": 3, **sampling})
    return EngineRequest(name, prompt, params, seed=2**63 + 11)


def mixture() -> list[EngineRequest]:
    """Long and short prompts, shared beginnings, several answers, draws, scores, stops and pooling."""
    long = tuple(tiny.prompt(37, 1))
    return [
        asked("greedy", long),
        asked("drawn", tuple(tiny.prompt(11, 2)), temperature=1.1, top_p=0.9, n=3),
        asked("scored", tuple(tiny.prompt(19, 3)), prompt_logprobs=2),
        asked("again", (*long[:32], 7, 9), temperature=0.8),
        asked("penalised", tuple(tiny.prompt(5, 4)), presence_penalty=0.7, repetition_penalty=1.2, max_tokens=16),
        replace(asked("stopped", tuple(tiny.prompt(6, 5)), max_tokens=20), stop_ids=tuple(range(0, 101, 4))),
        replace(asked("thinks", tuple(tiny.prompt(4, 6)), max_tokens=14), thinking=Thinking((3, 5), budget=4)),
        replace(asked("pooled", long[:21], max_tokens=1, logprobs=None), pooling=PoolingParams(PoolingKind.MEAN)),
        replace(asked("chosen", long[:9], max_tokens=1, logprobs=None), pooling=PoolingParams(choices=(3, 8))),
        asked("guided", tuple(tiny.prompt(8, 7)), negative_prompt_ids=(5, 6), guidance_scale=1.7),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_give_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    one = answers(staged_engine(tmp_path, 1), mixture())
    assert len(one) == 12 and all(answer.reason is not None for answer in one.values())
    for stages in (2, 3):
        assert answers(staged_engine(tmp_path, stages), mixture()) == one, stages
