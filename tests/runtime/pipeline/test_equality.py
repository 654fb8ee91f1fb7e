"""Stages give the bits of one process: every kind of layer, under everything that happens to a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.constraint import Thinking
from penstock.config.errors import ConfigError
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from tests.engine.test_drafts import Rehearsed
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
    for stages in (2, 3) if family != "gemma3n" else (2,):
        engine = staged_engine(tmp_path, stages)
        assert answers(engine, mixture()) == one, stages
        times = engine.runner._stages.times  # type: ignore[attr-defined]
        assert times.seconds > 0 and all(seconds > 0 for seconds in times.computing) and 0 < times.waiting < 1


def test_layers_that_read_what_others_keep_stay_with_them(tmp_path: Path) -> None:
    tiny.save("gemma3n", tmp_path)
    with pytest.raises(ConfigError, match="3 pipeline stages for 2 parts of 6 layers that can be told apart"):
        staged_engine(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"no stage can begin at layer 5, as '5,1' says: .* Allowed beginnings: 1"):
        staged_engine(tmp_path, 2, pipeline_layer_split="5,1")


@pytest.mark.parametrize("split", ["1,2", "2,1"])
def test_layers_dealt_by_hand(split: str, tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path)
    one = answers(staged_engine(tmp_path, 1), mixture())
    assert answers(staged_engine(tmp_path, 2, pipeline_layer_split=split), mixture()) == one


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3-next"])
def test_memory_that_runs_out_sends_sequences_back(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    one = answers(staged_engine(tmp_path, 1), mixture())

    def between(engine: Engine, step: int) -> None:
        running = engine.scheduler.running
        if step % 4 == 3 and step < 48 and running:  # else nobody gets to the end of a long prompt
            engine.scheduler.preempt(running[step % len(running)].request.request_id)

    for stages in (2, 3):
        engine = staged_engine(tmp_path, stages, kv_blocks=12, max_model_len=128)
        assert answers(engine, mixture(), between) == one, stages
        assert engine.stats().preemptions >= 8 and engine.stats().prefix_hits > 0


@pytest.mark.parametrize("stages", [2, 3])
def test_drafts_are_verified_in_stages(stages: int, tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path)
    requests = [replace(one, speculate=0 if one.guided else 4) for one in mixture()]
    one = answers(staged_engine(tmp_path, 1), requests)
    said = {key: answer.tokens for key, answer in one.items()}
    engine = staged_engine(tmp_path, stages, drafter=Rehearsed(said, right=6))

    def between(engine: Engine, step: int) -> None:
        if step == 11:
            engine.scheduler.preempt("drawn")

    assert answers(engine, requests, between) == one
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.parametrize("stages", [2, 3])
def test_who_leaves_while_a_step_is_in_the_stages_disturbs_nobody(stages: int, tmp_path: Path) -> None:
    """Its slot is another's as soon as what it draws there is drawn."""
    tiny.save("qwen3", tmp_path)
    requests = [asked(f"r{number}", tuple(tiny.prompt(3 + number, number)), temperature=0.9) for number in range(12)]
    one = answers(staged_engine(tmp_path, 1), requests)
    cancelled = ("r1", "r4", "r6", "r9")
    engine = staged_engine(tmp_path, stages, max_num_seqs=3)

    def between(engine: Engine, step: int) -> None:
        running = [sequence for sequence in engine.scheduler.running if sequence.in_flight]
        for sequence in running:
            if sequence.request.request_id in cancelled:
                engine.cancel(sequence.request.request_id)

    found = answers(engine, requests, between)
    left = {key for key, answer in found.items() if answer.reason is FinishReason.CANCELLED}
    assert left == {(name, 0) for name in cancelled}
    assert {key: answer for key, answer in found.items() if key not in left} == {
        key: answer for key, answer in one.items() if key not in left
    }
