"""Steps in flight on a device: what is launched a step ahead changes no answer, and nothing waits where it need not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.constraint import Thinking
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.loop import Engine
from penstock.kernels.copies import AsyncCopy, Event
from penstock.runtime.runner import ModelRunner
from tests.engine.test_equality import GREEDY, SAMPLED, Answer, ask, make_engine
from tests.models import tiny

PROMPT = tuple(tiny.prompt(13, 3))
TOKENS = 6
Answers = dict[str, tuple[Answer, FinishReason | None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny.save("llama", folder, num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def engines(device: str, model: Path) -> Iterator[dict[str, Engine]]:
    """On the device with plans made ahead, and the CPU's, without."""
    about: dict[str, Any] = {"block_size": 8, "kv_cache_dtype": "float32", "kv_blocks": 24}
    made = {
        "ahead": make_engine(model, 16, 1, device=device, **about)[0],
        "cpu": make_engine(model, 16, 0, device="cpu", **about)[0],
    }
    yield made
    for engine in made.values():
        engine.close()


def run(engine: Engine, *requests: EngineRequest, preempt: str = "") -> Answers:
    """All answers; request `preempt` is sent back to the queue once it has said two tokens."""
    engine.scheduler.cache.clear()
    for request in requests:
        engine.add(request)
    answers: Answers = {}
    while engine.has_work:
        for output in engine.step():
            answer, _ = answers.get(output.request_id, (Answer(), None))
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answers[output.request_id] = answer, output.finish_reason
        engine.scheduler.check_integrity()
        if preempt and preempt in answers and len(answers[preempt][0].tokens) >= 2:
            assert engine.scheduler.preempt(preempt)
            preempt = ""
    assert not preempt
    return answers


def tokens(answers: Answers) -> dict[str, list[int]]:
    return {name: answer.tokens for name, (answer, _) in answers.items()}


def test_the_same_answers_with_plans_ahead(engines: dict[str, Engine]) -> None:
    """Penalties, forbidden ends, words of several tokens, stops, budgets of reasoning, scores, preemption."""
    plain = run(engines["cpu"], ask("it", PROMPT, TOKENS))["it"][0].tokens
    penalties = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, prompt_logprobs=2)
    words = replace(SAMPLED, temperature=0.0, bad_words_ids=(tuple(plain[1:3]), (plain[4],)))
    early = replace(GREEDY, min_tokens=4)
    requests = [
        ask("plain", PROMPT, TOKENS),
        ask("sampled", PROMPT[:9], TOKENS, SAMPLED),
        ask("penalties", PROMPT[2:], TOKENS, penalties),
        ask("words", PROMPT, TOKENS, words),
        replace(ask("stopped", PROMPT, TOKENS), stop_ids=(plain[2],)),
        replace(ask("late", PROMPT, TOKENS, early), stop_ids=(plain[2],)),
        replace(ask("thinks", PROMPT, TOKENS), thinking=Thinking((5, 6), budget=2)),
    ]
    found = {name: run(engine, *requests, preempt="plain") for name, engine in engines.items()}
    assert tokens(found["ahead"]) == tokens(found["cpu"])
    assert engines["ahead"].stats().preemptions and not engines["ahead"].has_work
    ahead = found["ahead"]
    assert ahead["plain"][0].tokens == plain and len(plain) == TOKENS
    assert ahead["stopped"] == (ahead["stopped"][0], FinishReason.STOP)
    assert ahead["stopped"][0].tokens == plain[: plain.index(plain[2]) + 1]  # and none after it
    assert ahead["words"][0].tokens[:2] == plain[:2] and ahead["words"][0].tokens[2] != plain[2]
    assert ahead["thinks"][0].tokens[:4] == [*plain[:2], 5, 6]
    assert len(ahead["late"][0].tokens) >= 4
    for name in ahead:
        ours, theirs = ahead[name][0], found["cpu"][name][0]
        for one, other in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
            assert [entry.token for entry in one] == [entry.token for entry in other]
            assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-4)
    assert len(ahead["penalties"][0].prompt_logprobs) == len(PROMPT) - 3


def test_a_launch_does_not_wait(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read back while a step is launched, but what words of several tokens need."""
    launching, waits = False, 0
    submit, wait = ModelRunner.submit, AsyncCopy.wait

    def launch(self: ModelRunner, plan: Any, masks: Any = None) -> None:
        nonlocal launching
        launching = True
        submit(self, plan, masks)
        launching = False

    def count(self: AsyncCopy) -> tuple[torch.Tensor, ...]:
        nonlocal waits
        waits += launching
        return wait(self)

    monkeypatch.setattr(ModelRunner, "submit", launch)
    monkeypatch.setattr(AsyncCopy, "wait", count)
    scored = replace(GREEDY, prompt_logprobs=1)
    run(engines["ahead"], ask("it", PROMPT, 3), ask("scored", PROMPT, 3, scored))
    assert not waits
    run(engines["ahead"], ask("it", PROMPT, 4, replace(GREEDY, bad_words_ids=((1, 2),))))
    assert waits == 3


def test_every_step_is_waited_for(
    engines: dict[str, Engine], model: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a long prompt, which give nothing back: no more steps are queued than are planned ahead."""
    about: dict[str, Any] = {"block_size": 8, "kv_cache_dtype": "float32", "kv_blocks": 24}
    engine, _ = make_engine(model, 4, 1, device=device, **about)
    waited: list[str] = []
    for kind in (AsyncCopy, Event):

        def wait(self: Any, kind: Any = kind, real: Any = kind.wait) -> Any:
            waited.append(kind.__name__)
            return real(self)

        monkeypatch.setattr(kind, "wait", wait)
    engine.add(ask("it", PROMPT, 2))
    while engine.has_work:
        before, steps = len(waited), engine.stats().steps
        engine.step()
        assert len(waited) > before or engine.stats().steps == steps
    assert waited.count("Event") == -(-len(PROMPT) // 4) - 1
    engine.close()


def test_a_row_of_numbers_that_are_none_fails_alone(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in flight behind it looks up no token where there is none."""
    engine = engines["ahead"]
    executor = engine.runner._executor  # type: ignore[attr-defined]
    logits, calls = executor.logits, 0

    def broken(rows: Any = None) -> torch.Tensor:
        nonlocal calls
        found: torch.Tensor = logits(rows).clone()
        calls += 1
        if calls == 3:
            found[0] = float("nan")
        return found

    monkeypatch.setattr(executor, "logits", broken)
    whole = run(engines["cpu"], ask("b", PROMPT[3:], TOKENS))["b"][0].tokens
    answers = run(engine, ask("a", PROMPT, TOKENS), ask("b", PROMPT[3:], TOKENS))
    reasons = {name: reason for name, (_, reason) in answers.items()}
    assert reasons == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    assert len(answers["a"][0].tokens) <= 2 and answers["b"][0].tokens == whole


@pytest.mark.parametrize(
    ("text", "final"),
    [("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA", True), ("no", False)],
)
def test_errors_of_the_device_are_final(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, text: str, final: bool
) -> None:
    """They show while a step is waited for."""

    def fails(_: AsyncCopy) -> None:
        raise RuntimeError(text)

    engine = engines["ahead"]
    engine.add(ask("it", PROMPT, 3))
    with monkeypatch.context() as patch:
        patch.setattr(AsyncCopy, "wait", fails)
        outputs = engine.step()
    assert [output.error for output in outputs] == ["the engine failed while computing this request; send it again."]
    assert not engine.has_work
    if final:
        assert str(engine.dead) == "The device failed: CUDA error: an illegal memory access was encountered"
    else:
        assert engine.dead is None


def test_a_launch_that_fails_beside_a_step_in_flight(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both steps are given up; rows, tables and samples of requests to come are none of theirs."""
    engine = engines["ahead"]
    executor = engine.runner._executor  # type: ignore[attr-defined]
    forward, calls = executor.forward, 0

    def fails(batch: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("no")
        forward(batch)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "forward", fails)
        answers = run(engine, ask("a", PROMPT, TOKENS), ask("b", PROMPT[4:], TOKENS))
    assert {reason for _, reason in answers.values()} == {FinishReason.ERROR} and engine.dead is None
    assert engine.stats().blocks_used == 0 and not engine.scheduler.outstanding
    asked = ask("c", PROMPT[1:], 3), ask("d", PROMPT[5:], 3)
    assert tokens(run(engine, *asked)) == tokens(run(engines["cpu"], *asked))


def test_heads_of_pooled_states_are_launched_with_their_step(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a row that is classified would wait for the step behind its own."""
    runner = engines["ahead"].runner
    assert isinstance(runner, ModelRunner)
    heads: list[torch.Size] = []
    in_submit = False

    def head(state: torch.Tensor) -> torch.Tensor:
        assert in_submit
        heads.append(state.shape)
        return state[:, :2]

    submit = runner.submit

    def launch(plan: Any, masks: Any = None) -> None:
        nonlocal in_submit
        in_submit = True
        submit(plan, masks)
        in_submit = False

    monkeypatch.setattr(runner, "submit", launch)
    monkeypatch.setattr(runner._pooler, "_classifier", head)
    for kind in (PoolingKind.LAST, PoolingKind.MEAN, PoolingKind.CLS, PoolingKind.ALL):
        pooling = PoolingParams(kind, classify=True, activation="softmax")
        engines["ahead"].add(replace(ask(kind.name, PROMPT, 1), pooling=pooling))
    found: dict[str, bytes] = {}
    while engines["ahead"].has_work:
        found |= {output.request_id: output.pooled for output in engines["ahead"].step() if output.pooled}
    assert {name: len(result) for name, result in found.items()} == {"LAST": 8, "MEAN": 8, "CLS": 8, "ALL": 8 * 13}
    assert len(heads) == 3 + 13 and set(heads) == {torch.Size([1, tiny.SIZES["hidden_size"]])}


def test_pooled_states_are_those_of_their_step(engines: dict[str, Engine]) -> None:
    asked = [
        replace(ask(str(n), tuple(tiny.prompt(20 - n, n)), 1), pooling=PoolingParams(normalize=True)) for n in range(3)
    ]
    found: dict[str, list[bytes]] = {}
    for name, engine in engines.items():
        for request in asked:
            engine.add(request)
        pooled: dict[str, bytes] = {}
        while engine.has_work:
            pooled |= {output.request_id: output.pooled for output in engine.step() if output.pooled}
        found[name] = [pooled[request.request_id] for request in asked]
    for ours, theirs in zip(found["ahead"], found["cpu"], strict=True):
        vectors = [torch.frombuffer(bytearray(one), dtype=torch.float32) for one in (ours, theirs)]
        assert torch.allclose(*vectors, atol=1e-4)
