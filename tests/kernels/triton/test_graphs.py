"""Recorded decode steps give the bits of steps run layer by layer, whatever lay in their buffers before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.errors import EngineDeadError
from penstock.core.protocol import NewSequence, ScheduledTokens, StepPlan
from penstock.engine.loop import Engine
from penstock.kernels.copies import Event
from penstock.layers.part import FINAL, ModelPart, layer_input, layer_output
from penstock.runtime.executor import EagerExecutor
from penstock.runtime.graph_captures import DryRun, InterpretedCapture
from penstock.runtime.graphs import DecodeGraphs, Recordable, padded_sizes
from penstock.runtime.runner import ModelRunner
from tests.engine.test_equality import GREEDY, SAMPLED, ask, finish, make_engine
from tests.models import tiny

TOKENS = 2
ABOUT: dict[str, Any] = {
    "block_size": 4, "kv_cache_dtype": "float32", "kv_blocks": 40, "max_num_seqs": 3, "batch_invariant": True,
}  # fmt: skip


def test_sizes() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(5) == (1, 2, 4, 5)
    assert padded_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert padded_sizes(256)[-3:] == (224, 240, 256)
    assert padded_sizes(300)[-2:] == (288, 300)


def graphs_of(engine: Engine) -> DecodeGraphs:
    runner = engine.runner
    assert isinstance(runner, ModelRunner) and runner._graphs is not None
    return runner._graphs


def record_all(engine: Engine) -> DecodeGraphs:
    graphs = graphs_of(engine)
    graphs.note_answer()
    while engine.runner.prepare():
        pass
    assert not graphs.failed
    return graphs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full attention and sliding windows."""
    folder = tmp_path_factory.mktemp("gemma2")
    tiny.save("gemma2", folder, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def engines(device: str, model: Path) -> Iterator[tuple[Engine, Engine]]:
    """Layer by layer, and recorded with a plan ahead."""
    plain, _ = make_engine(model, 16, 0, device=device, enforce_eager=True, **ABOUT)
    recorded, info = make_engine(model, 16, 1, device=device, enforce_eager=False, **ABOUT)
    assert {decision.name: decision.value for decision in info.settings}["step"] == "graphs"
    yield plain, recorded
    plain.close()
    recorded.close()


class Replays:
    """Counts replays, and spoils every buffer that is to be filled before one."""

    def __init__(self, graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.queries: set[int] = set()
        self._graphs, self._run = graphs, graphs.run
        self._find = graphs._find
        self._found: Any = None
        monkeypatch.setattr(graphs, "run", self)
        monkeypatch.setattr(graphs, "_find", self._noted)

    def _noted(self, *given: Any) -> Any:
        self._found = self._find(*given)
        return self._found

    def __call__(self, spans: Any) -> Any:
        for graph in self._graphs._graphs.values():
            graph.inputs.fill_(0x7B)
        for taken in self._graphs._taken:
            taken.fill_(1 << 20)
        self._graphs._logits.fill_(float("nan"))
        logits = self._run(spans)
        if logits is not None:
            assert self._found is not None
            self.sizes.append(self._found.rows)
            self.queries.add(self._found.queries)
        return logits


def test_the_same_bits(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log-probabilities, of prompts that end at different times: every size is replayed, filled or not."""
    plain, recorded = engines
    replays = Replays(record_all(recorded), monkeypatch)
    asked = [
        ask(str(n), tuple(tiny.prompt(length, n)), TOKENS + n, SAMPLED if n == 1 else GREEDY)
        for n, length in enumerate((3, 10, 2))
    ]
    answers = []
    for engine in (plain, recorded):
        for request in asked:
            engine.add(request)
        answers.append(finish(engine))
    assert answers[0] == answers[1]
    assert set(replays.sizes) == {1, 2, 3}


def test_what_a_recording_cannot_do_runs_layer_by_layer(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, recorded = engines
    graphs = record_all(recorded)
    replays = Replays(graphs, monkeypatch)
    prompt = tuple(tiny.prompt(3, 5))
    scored = replace(GREEDY, prompt_logprobs=1)
    answers = []
    for engine in (plain, recorded):
        engine.scheduler.cache.clear()
        engine.add(ask("scored", prompt, 3, scored))
        answers.append(finish(engine))
    assert answers[0] == answers[1] and answers[0]["scored"].prompt_logprobs
    assert replays.sizes == [1, 1]  # the prompt is no decode step
    for graph in graphs._graphs.values():  # and contexts longer together than there is room for
        for plan in graph.plans.values():
            monkeypatch.setattr(plan, "fill", lambda *_: False)
    recorded.add(ask("long", prompt, 3))
    assert len(finish(recorded)["long"].tokens) == 3
    assert replays.sizes == [1, 1]


def test_rows_of_several_tokens(engines: tuple[Engine, Engine]) -> None:
    """As where drafts are verified: the logits of all tokens."""
    runner = engines[1].runner
    assert isinstance(runner, ModelRunner) and isinstance(runner._executor, EagerExecutor)
    ours, builder, executor = graphs_of(engines[1]), runner._builder, runner._executor
    taps = (layer_input(0), layer_output(0), FINAL)
    graphs = DecodeGraphs(
        ours._model, ours._caches, builder, InterpretedCapture(), Recordable((3,), ours._capacity, (2,)), taps
    )
    spans = []
    for row in range(2):
        blocks = (tuple(range(5 * row + 1, 5 * row + 4)),) * len(builder.tables)
        builder.add_row(NewSequence(row, str(row), 0, (1,), (), 0, blocks, GREEDY))
        spans.append(ScheduledTokens(row, 7 * row, (5 + row, 9), 0, 1, True, ((),) * len(builder.tables)))
    with torch.inference_mode():
        graphs.note_answer()
        assert not graphs.capture_next() and not graphs.failed
        replayed = graphs.run(spans)
        executor.forward(builder.build(spans, range(4)))
        assert replayed is not None and torch.equal(replayed, executor.logits())
        seen = ours._model.run(builder.build(spans, range(4)), ours._caches, ModelPart(taps=taps)).taps
        assert [graphs.tap(name).shape for name in taps] == [seen[name].shape for name in taps]
        assert all(torch.equal(graphs.tap(name), seen[name]) for name in taps)
        assert graphs.run([spans[0], spans[1]._replace(tokens=(5,))]) is None


def test_what_recordings_take_is_seen_of_the_most_rows_and_of_the_most_tokens(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, ours = engines[1].runner, graphs_of(engines[1])
    assert isinstance(runner, ModelRunner)
    recordable = Recordable((1, 2, 3), ours._capacity, (1, 200))  # 3 x 200 are more than are recorded
    graphs = DecodeGraphs(ours._model, ours._caches, runner._builder, DryRun(), recordable)
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(graphs, "_make", made.append)
    graphs.dry_run()
    assert made == [(3, 1), (1, 200)]


def test_rows_of_fewer_tokens_among_others(engines: tuple[Engine, Engine]) -> None:
    """A row that has fewer than are recorded has its own bits, and changes nothing that lies before them."""
    runner = engines[1].runner
    assert isinstance(runner, ModelRunner) and isinstance(runner._executor, EagerExecutor)
    ours, builder, executor = graphs_of(engines[1]), runner._builder, runner._executor
    taps, none = (layer_output(0), FINAL), ((),) * len(builder.tables)
    graphs = DecodeGraphs(
        ours._model, ours._caches, builder, InterpretedCapture(), Recordable((3,), ours._capacity, (1, 3), True), taps
    )
    spans = []
    for row, count in enumerate((2, 3, 1)):
        blocks = (tuple(range(5 * row + 1, 5 * row + 4)),) * len(builder.tables)
        builder.add_row(NewSequence(row, str(row), 0, (1,), (), 0, blocks, GREEDY))
        spans.append(ScheduledTokens(row, 3 + row, (5 + row, 9, 11)[:count], 0, count - 1, True, none))
    with torch.inference_mode():
        executor.forward(builder.build([one._replace(start=0, tokens=(4,) * one.start) for one in spans], ()))
        graphs.note_answer()
        while graphs.capture_next():
            pass
        assert {(size.rows, size.queries) for size in graphs._graphs} == {(3, 1), (3, 3)}
        before = [array.clone() for group in range(runner.memory.num_groups) for array in runner.memory.arrays(group)]
        batch = builder.build(spans, range(6))
        executor.forward(batch)
        truth = executor.logits()
        seen = ours._model.run(batch, ours._caches, ModelPart(taps=taps)).taps
        after = [array.clone() for group in range(runner.memory.num_groups) for array in runner.memory.arrays(group)]
        arrays = [array for group in range(runner.memory.num_groups) for array in runner.memory.arrays(group)]
        for array, old in zip(arrays, before, strict=True):
            array.copy_(old)
        replayed = graphs.run(spans)
        assert replayed is not None and torch.equal(replayed, truth)
        assert all(torch.equal(graphs.tap(name), seen[name]) for name in taps)
        assert all(torch.equal(one[1:], other[1:]) for one, other in zip(arrays, after, strict=True))
        assert graphs.run([spans[0]._replace(start=0), spans[1]]) is None, "fewer tokens lie before than are recorded"
        assert graphs.run([spans[0]._replace(parents=(-1,)), *spans[1:]]) is None, "a tree"
        graphs._padded = False
        assert graphs.run(spans) is None and graphs.run(spans[1:2]) is not None


def test_rows_that_want_some_of_their_logits_run_layer_by_layer(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows with drafts, all of as many tokens as are recorded: a replay would give logits of the others too."""
    ours, runner = graphs_of(engines[1]), engines[1].runner
    assert isinstance(runner, ModelRunner)
    graphs = DecodeGraphs(
        ours._model, ours._caches, runner._builder, InterpretedCapture(), Recordable((2,), ours._capacity, (2,))
    )
    graphs.note_answer()
    with torch.inference_mode():
        assert not graphs.capture_next() and not graphs.failed
    monkeypatch.setattr(runner, "_graphs", graphs)
    replays = Replays(graphs, monkeypatch)
    assert two_prompts(runner) == two_prompts(engines[0].runner)
    assert replays.sizes == [2], "the last step alone"
    for engine in engines:
        engine.scheduler.cache.clear()  # whose blocks were written


def two_prompts(runner: Any) -> list[Any]:
    """Results of four steps: a prompt; twice a chunk of another beside a draft, once without a draw; two drafts."""
    prompts = [tuple(tiny.prompt(length, length)) for length in (3, 5)]
    nothing = ((),) * len(runner._builder.tables)
    blocks = [(tuple(range(6 * slot + 1, 6 * slot + 6)),) * len(nothing) for slot in range(2)]
    said: list[list[int]] = [[], []]

    def chunk(slot: int, first: int, end: int) -> ScheduledTokens:
        tokens, length = prompts[slot][first:end], len(prompts[slot])
        return ScheduledTokens(slot, first, tokens, len(tokens), 0, end == length, nothing)

    def drafted(slot: int) -> ScheduledTokens:
        last = len(prompts[slot]) + len(said[slot]) - 1
        return ScheduledTokens(slot, last, (said[slot][-1], 9), 0, 1, True, nothing)

    steps = (
        lambda: (chunk(0, 0, 3), chunk(1, 0, 1)),
        lambda: (drafted(0), chunk(1, 1, 3)),
        lambda: (drafted(0), chunk(1, 3, 5)),
        lambda: (drafted(0), drafted(1)),
    )
    results = []
    for number, spans in enumerate(steps):
        new = tuple(
            NewSequence(slot, str(slot), 0, prompts[slot], (), 0, blocks[slot], SAMPLED)
            for slot in range(0 if number else 2)
        )
        runner.submit(StepPlan(number, new_sequences=new, scheduled=spans()))
        found = runner.sample(number).results
        for result in found:
            said[result.slot] += result.tokens
        results.append(found)
    return results


def test_recordings_are_made_after_the_first_answer_and_between_steps(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.save("llama", tmp_path, num_hidden_layers=1)
    engine, _ = make_engine(tmp_path, 16, 1, device=device, enforce_eager=False, **{**ABOUT, "batch_invariant": False})
    graphs = graphs_of(engine)
    made: list[tuple[int, int]] = []
    make = graphs._make

    def counted(size: Any) -> Any:
        made.append(size)
        if size.rows == 2:
            raise RuntimeError("out of memory")
        return make(size)

    monkeypatch.setattr(graphs, "_make", counted)
    assert not engine.runner.prepare() and not made
    prompt = tuple(tiny.prompt(2, 5))
    engine.add(ask("first", prompt, 3))
    answer = finish(engine)
    assert not made and not graphs._graphs  # all of it ran layer by layer
    engine.add(ask("second", prompt, 1))
    engine.add(ask("third", prompt, 3))
    finish(engine)
    assert made == [(1, 1)]  # asked for by a step, with one row, once there had been an answer
    while engine.runner.prepare():
        pass
    assert made == [(1, 1), (3, 1), (2, 1)]  # the others while nothing runs, the largest first
    again, _ = make_engine(tmp_path, 16, 1, device=device, enforce_eager=False, **{**ABOUT, "max_num_seqs": 1})
    again.add(ask("only", prompt, 1))
    finish(again)
    assert not again.runner.prepare() and set(graphs_of(again)._graphs) == {(1, 1)}  # one answer is enough
    again.close()
    assert graphs.failed == {(2, 1)} and sum("cannot be recorded" in line for line in caplog.messages) == 1
    engine.scheduler.cache.clear()
    engine.add(ask("again", prompt, 2))
    assert finish(engine)["again"].tokens == answer["first"].tokens[:2]
    engine.close()


@pytest.mark.parametrize("broken", [True, False])
def test_a_device_that_fails_while_nothing_runs_ends_the_engine(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """What says so again once the recording is given up; other errors are the recording's own."""

    class Fails:
        def record(self, _: Any) -> Any:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def mark(_: Event) -> None:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner, ours = engines[1].runner, graphs_of(engines[1])
    assert isinstance(runner, ModelRunner)
    graphs = DecodeGraphs(ours._model, ours._caches, runner._builder, Fails(), Recordable((1,), ours._capacity))
    graphs.note_answer()
    monkeypatch.setattr(runner, "_graphs", graphs)
    monkeypatch.setattr(Event, "wait", mark)
    if broken:
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            runner.prepare()
    else:
        assert not runner.prepare() and graphs.failed == {(1, 1)}


def test_recurrent_layers(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are left over touch no state of others, nor checkpoints of prefixes, which come next behind them."""
    tiny.save("mamba2", tmp_path, num_hidden_layers=1)
    answers, states = [], []
    about = {"device": device, "kv_cache_dtype": "float32", "max_num_seqs": 4, "batch_invariant": True}
    for eager in (True, False):
        engine, _ = make_engine(tmp_path, 16, 0, enforce_eager=eager, **about)
        replays = None if eager else Replays(record_all(engine), monkeypatch)
        for n, length in enumerate((9, 4, 6)):
            engine.add(ask(str(n), tuple(tiny.prompt(length, n)), 3 + n))
        answers.append(finish(engine))
        states.append([state[:-1] for cache in engine.runner.memory.caches for state in cache.state])  # type: ignore[attr-defined]
        assert replays is None or set(replays.sizes) == {1, 2, 4}
        engine.close()
    assert answers[0] == answers[1]
    assert states[0] and all(torch.equal(*pair) for pair in zip(*states, strict=True))


def test_the_settings_say_why_no_step_is_recorded(device: str, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path, num_hidden_layers=1)
    engine, info = make_engine(tmp_path, 16, 1, device=device, enforce_eager=True, kv_cache_dtype="float32")
    step = next(decision for decision in info.settings if decision.name == "step")
    assert step.value == "layer by layer" and step.reason.startswith("--enforce-eager")
    engine.add(ask("it", (5, 6), 2))
    assert len(finish(engine)["it"].tokens) == 2 and not engine.runner.prepare()
    engine.close()


def test_reads_from_the_device_are_refused() -> None:
    """Where there is no GPU, as where there is one."""
    one = torch.ones(3)
    for read in (lambda: one.sum().item(), lambda: one.nonzero()):
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            InterpretedCapture().capture(read)  # type: ignore[arg-type]
