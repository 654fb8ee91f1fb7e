"""Ranks that follow compute what the one that leads computes, to the bit, from what crosses between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.errors import EngineDeadError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine import build
from penstock.engine.loop import Engine
from penstock.layers.batch import Batch, GroupTables, Injection, MaskKind
from penstock.parallel.ranks import Ranks
from penstock.runtime.executor import Executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.ranks import messages
from penstock.runtime.ranks.alarm import Alarm
from penstock.runtime.ranks.follower import Follower
from penstock.runtime.ranks.group import NullGroup
from penstock.runtime.ranks.lead import LeadExecutor, told
from penstock.runtime.ranks.step_sizes import StepSizes
from penstock.startup import build_runner, engine_spec
from penstock.startup.engine_spec import EngineSpec, declare_rank
from tests.models import tiny

SHARED = tuple(tiny.prompt(37))


def kept(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).clone()


class Kept:
    """An executor, what it gave last, and how often its calls were made."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.given: dict[str, Any] = {}

    def forward(self, batch: Batch) -> None:
        self._executor.forward(batch)
        self.given["hidden"] = kept(self._executor.hidden())

    def logits(self, rows: Any = None) -> Any:
        found = self._executor.logits(rows)
        self.given["logits"] = kept(found)
        return found

    def decoding(self, builder: Any) -> Any:
        program = self._executor.decoding(builder)
        if program is not None:
            run = program.run

            def kept_run() -> Any:
                found = run()
                self.given["decoded"] = kept(found)
                return found

            program.run = kept_run  # type: ignore[method-assign]
        return program


class InProcess:
    """The other rank of an engine, in this process: what it is told is encoded and decoded, and obeyed at once.

    After each call that gives anything, what both ranks have is compared.
    """

    def __init__(self) -> None:
        self.group = NullGroup()
        self.alarm = Alarm()
        self.counts: Counter[str] = Counter()
        self.compared: Counter[str] = Counter()
        self.failing = False

    def rooms(self) -> tuple[Any, ...]:
        return ()

    def load(self, spec: EngineSpec, progress: Any = None) -> Any:
        self._spec = declare_rank(spec.options, spec.plan.max_model_len, Ranks(1, 2), self.group)
        build_runner.fill(self._spec)
        return build_runner.load(spec, progress)

    def make(self, sizes: StepSizes) -> None:
        memory, builder, executor = build_runner.rank_parts(self._spec, sizes)
        self._kept = Kept(executor)
        self._follower = Follower(self._kept, memory, builder)  # type: ignore[arg-type]

    def share(self, adapters: Any) -> None:
        """There are none."""

    def join(self, executor: Executor, memory: KVMemory, experts: object, interval: int) -> Executor:
        memory.told = told(self)
        lead = LeadExecutor(executor, self, 2)
        self._compare(lead, "forward", "hidden", lambda given: executor.hidden())
        self._compare(lead, "logits", "logits", lambda given: given)
        decoding = lead.decoding

        def compared(builder: Any) -> Any:
            program = decoding(builder)
            if program is not None:
                self._compare(program, "run", "decoded", lambda given: given)
            return program

        lead.decoding = compared  # type: ignore[method-assign]
        return lead

    def _compare(self, owner: Any, call: str, name: str, ours: Callable[[Any], Any]) -> None:
        original = getattr(owner, call)

        def compared(*arguments: Any) -> Any:
            given = original(*arguments)
            assert torch.equal(kept(ours(given)), self._kept.given[name]), name
            self.compared[name] += 1
            return given

        setattr(owner, call, compared)

    @torch.inference_mode()
    def tell(self, command: messages.Command) -> None:
        if self.failing:
            raise EngineDeadError("rank 1 of 2 was killed by signal 9.")
        self.counts[type(command).__name__] += 1
        self._follower.obey(messages.command(messages.encode(command)))

    def failed(self, error: Exception) -> EngineDeadError:
        raise error


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    made = InProcess()
    monkeypatch.setattr(build, "start_workers", lambda claim: made)
    monkeypatch.setattr(engine_spec, "shard", lambda *_, **__: None)  # each computes all, one after the other
    return made


def engine_of(folder: Path, **more: Any) -> Engine:
    options: dict[str, Any] = {"max_num_seqs": 4, "kv_blocks": 40, "threads": 1, "device": "cpu", **more}
    return build.build_engine(EngineOptions(model=str(folder), **options))[0]


def answers(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """Of prompts that share a prefix, come in turn, fork within a block and are preempted."""
    prompts = {"a": SHARED, "b": (*SHARED[:30], 7, 8), "c": tuple(tiny.prompt(5, 2)), "d": SHARED, "e": SHARED[:21]}
    found: dict[tuple[str, int], list[int]] = {}
    preempted = False
    for turn in ("abc", "de"):
        for name in turn:
            how = SamplingParams(temperature=0.9, max_tokens=14, n=2 if name == "d" else 1, logprobs=2)
            engine.add(EngineRequest(name, prompts[name], how, seed=11))
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                found.setdefault((output.request_id, output.sequence), []).extend(output.tokens)
            if not preempted and len(found.get(("a", 0), ())) > 3:
                engine.scheduler.preempt("a")
                preempted = True
            engine.scheduler.check_integrity()
    assert preempted and engine.stats().prefix_hits > 0
    engine.close()
    return found


FAMILIES = ("llama", "mistral-sliding", "qwen3-moe", "gemma3", "deepseek-v3", "qwen3-next", "falcon-h1")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_computes_the_same(family: str, tmp_path: Path, other: InProcess) -> None:
    tiny.save(family, tmp_path)
    together = answers(engine_of(tmp_path, max_chunk_tokens=9))
    assert all(other.counts[name] for name in ("Forward", "Logits", "Decode", "Blocks", "Apply")), other.counts
    assert other.compared["decoded"] == other.counts["Decode"] > 10
    assert other.compared["hidden"] == other.counts["Forward"] > 5
    assert other.compared["logits"] == other.counts["Logits"] > 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "start_workers", lambda claim: None)
        assert answers(engine_of(tmp_path)) == together


@pytest.mark.parametrize("more", [{"depth": 1}, {"speculative_config": '{"method": "ngram"}'}, {"dtype": "bfloat16"}])
def test_ways_to_run_steps(more: dict[str, Any], tmp_path: Path, other: InProcess) -> None:
    """Planned ahead, with drafts that are verified, layer by layer."""
    tiny.save("llama", tmp_path)
    answers(engine_of(tmp_path, **more))
    assert other.compared["logits"] + other.compared["decoded"] > 10


def test_the_end_of_a_rank_is_the_end_of_the_engine(tmp_path: Path, other: InProcess) -> None:
    tiny.save("llama", tmp_path)
    engine = engine_of(tmp_path)
    engine.add(EngineRequest("a", SHARED, SamplingParams(temperature=0.0, max_tokens=9)))
    engine.step()
    other.failing = True
    engine.step()
    assert engine.dead is not None and "rank 1 of 2 was killed by signal 9" in str(engine.dead)
    engine.close()


def test_every_field_of_a_batch_crosses() -> None:
    def numbers(*shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.arange(int(np.prod(shape))).reshape(shape).to(kind)

    group = GroupTables(numbers(2, 3, kind=torch.int32), numbers(5)[::2], numbers(2, kind=torch.int32), (4, 1))
    batch = Batch(
        token_ids=numbers(5),
        positions=numbers(3, 5).expand(3, -1),
        query_start=numbers(3, kind=torch.int32),
        context_len=numbers(2, kind=torch.int32),
        groups=(group, group),
        prompt_tokens=numbers(2),
        draft_tokens=numbers(2),
        logit_rows=numbers(0),
        query_lens=(2, 3),
        context_lens=(9, 8),
        state_slot=numbers(4, 2)[:, 1],
        state_after=numbers(5),
        adapter_slot=numbers(5, 2),
        adapter_scale=numbers(5, 2, kind=torch.float32),
        masks=(MaskKind.SPANS, MaskKind.CAUSAL),
        spans=numbers(5, 2, kind=torch.int32),
        token_types=numbers(5),
        injected=Injection(numbers(2), numbers(1, 2, 4, kind=torch.bfloat16)),
    )
    sent = messages.command(messages.encode(messages.forward(batch)))
    assert isinstance(sent, messages.Forward)
    came = messages.batch_of(sent)

    def equal(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, torch.Tensor):
            return theirs.dtype == ours.dtype and torch.equal(ours, theirs)
        if isinstance(ours, GroupTables | Injection):
            return all(equal(getattr(ours, name), getattr(theirs, name)) for name in ours.__slots__)
        if isinstance(ours, tuple):
            return len(ours) == len(theirs) and all(map(equal, ours, theirs))
        return bool(ours == theirs)

    assert [name for name in Batch.__slots__ if not equal(getattr(batch, name), getattr(came, name))] == []
    assert all(getattr(batch, name) is not None for name in Batch.__slots__ if name != "plans")


@pytest.mark.parametrize(
    "sent",
    [
        messages.Array("object", (1,), b"\0"),
        messages.Array("int64", (3,), b"\0" * 23),
        messages.Array("int8", (2,), b""),
    ],
)
def test_what_is_no_array_is_refused(sent: messages.Array) -> None:
    with pytest.raises(ValueError, match="an array of"):
        messages.tensor(sent)
