"""Recorded steps: every family is recorded and gives the bits of its layers; what cannot be recorded says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.recording import Handle, NotRecordableError
from penstock.layers.batch import Batch, MaskKind
from penstock.models.registry import Model
from penstock.runtime.executor import EagerExecutor, Executor, RecordedExecutor, make_executor
from tests.models import tiny
from tests.models.harness import Harness, load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
MAX_TOKENS, MAX_LOGIT_ROWS = 48, 7  # more rows than that are computed in several turns
WORK: tuple[dict[str, Sequence[int]], ...] = (  # prompts, a chunk and decoding in one batch, and a late row
    {"a": tiny.prompt(37, 1), "b": tiny.prompt(5, 2)},
    {"a": [3], "b": tiny.prompt(26, 3), "c": [9]},
    {"c": [17], "a": [4], "b": [5]},
)


class Through:
    """Takes the place of a model in a harness: an executor computes."""

    def __init__(self, executor: Executor, model: Model) -> None:
        self._executor = executor
        self.position_axes = model.position_axes

    def forward(self, batch: Batch, caches: Any) -> None:
        self._executor.forward(batch)

    def logits(self, hidden: None, rows: Tensor) -> Tensor:
        return self._executor.logits(rows).clone()


def run(model: Model, executor: Callable[[Harness], Executor] | None = None) -> tuple[list[Tensor], str]:
    """The logits of every step of WORK, and how the executor says it ran."""
    harness = Harness(model, seed=1)
    describe = ""
    if executor is not None:
        chosen = executor(harness)
        describe = chosen.describe
        harness.model = Through(chosen, model)  # type: ignore[assignment]
    with torch.inference_mode():
        return [logits for work in WORK for logits in harness.step(work).values()], describe


def best(harness: Harness) -> Executor:
    return make_executor(harness.model, harness.caches, MAX_TOKENS, MAX_LOGIT_ROWS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.save("qwen3", tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_is_recorded_and_equals_its_layers_to_the_bit(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    model = load(tmp_path)
    by_layer, _ = run(model)
    recorded, describe = run(model, best)
    assert describe.startswith("recorded: ")
    assert " native ops in an arena of " in describe
    assert len(recorded) == sum(map(len, WORK))
    for ours, theirs in zip(recorded, by_layer, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("recorded", [False, True])
def test_tokens_whose_logits_are_not_wanted_change_nothing(family: str, recorded: bool, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    model = load(tmp_path)
    every, _ = run(model, best if recorded else None)
    harness = Harness(model, seed=1)
    if recorded:
        harness.model = Through(best(harness), model)  # type: ignore[assignment]
    with torch.inference_mode():
        none, some, last = (
            harness.wanted(work, tokens) for work, tokens in zip(WORK, ((), (0, 26, 27), (2, 0)), strict=True)
        )
    _, _, a, b, c, _, _, last_b = every
    assert none.shape == (0, model.vocab_size)
    assert torch.equal(some, torch.stack([a[0], b[25], c[0]]))
    assert torch.equal(last, torch.stack([last_b[0], every[5][0]]))


def calls_torch(x: Any) -> Any:
    return torch.tanh(x)


def slices(x: Any) -> Any:
    return x[..., :5]


def multiplies(x: Any) -> Any:
    return x * 2.0


def reshapes(x: Any) -> Any:
    return x.reshape(1, -1)


UNRECORDABLE = {
    calls_torch: "the model calls torch's tanh on an activation",
    slices: "the model uses the operator getitem on an activation, which is no op",
    multiplies: "the model uses the operator mul on an activation, which is no op",
    reshapes: "the model uses reshape of an activation, which is no op",
}


@pytest.mark.parametrize("what", UNRECORDABLE, ids=lambda what: what.__name__)
def test_a_model_that_does_more_than_ops_runs_layer_by_layer_and_says_what(
    what: Callable[[Any], Any], folder: Path
) -> None:
    model = load(folder)
    plain, _ = run(model)
    seen: list[type] = []

    def norm(hidden: Any, residual: Any = None, inner: Any = model.norm) -> Any:
        seen.append(type(hidden))
        what(hidden)
        return inner(hidden, residual)

    model.norm = norm  # type: ignore[assignment]
    logits, describe = run(model, best)
    assert describe == f"layer by layer: {UNRECORDABLE[what]}"
    assert seen == [Handle, *[Tensor] * len(WORK)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits, plain, strict=True))


@pytest.mark.parametrize("operation", ["reads a number", "branches", "iterates", "compares", "powers", "converts"])
def test_nothing_of_an_activations_value_can_be_read_while_recording(operation: str, folder: Path) -> None:
    """Else a recording would keep for ever what was true of no step at all."""
    model = load(folder)
    does: dict[str, Callable[[Any], Any]] = {
        "reads a number": lambda x: int(x.max()),
        "branches": lambda x: 1 if x else 2,
        "iterates": lambda x: list(x),
        "compares": lambda x: x == x + 0 if isinstance(x, Tensor) else x > 0,
        "powers": lambda x: x**2,
        "converts": lambda x: float(x[0, 0]) if isinstance(x, Tensor) else float(x),
    }

    def norm(hidden: Any, residual: Any = None, inner: Any = model.norm) -> Any:
        if not isinstance(hidden, Tensor):
            does[operation](hidden)
        return inner(hidden, residual)

    model.norm = norm  # type: ignore[assignment]
    _, describe = run(model, best)
    assert describe.startswith("layer by layer: the model "), describe


def test_a_weight_that_is_not_contiguous_is_not_recorded(folder: Path) -> None:
    model = load(folder)
    weight = next(weight for weight in model.weights() if weight.parts[0].key == "model.norm.weight")
    weight.tensor = torch.stack([weight.tensor, weight.tensor], dim=1)[:, 0]
    harness = Harness(model)
    executor = best(harness)
    assert isinstance(executor, EagerExecutor)
    assert "not contiguous" in executor.describe


def test_a_step_larger_than_the_arena_is_refused(folder: Path) -> None:
    model = load(folder)
    harness = Harness(model)
    executor = best(harness)
    assert isinstance(executor, RecordedExecutor)
    harness.model = Through(executor, model)  # type: ignore[assignment]
    with torch.inference_mode():
        with pytest.raises(ValueError, match=r"a step of 49 tokens does not fit a program made for 48\."):
            harness.step({"row": tiny.prompt(MAX_TOKENS + 1)})
        fits = harness.step({"other": tiny.prompt(MAX_TOKENS)})["other"]
    assert torch.equal(fits, Harness(model).step({"row": tiny.prompt(MAX_TOKENS)})["row"])


def test_activations_of_two_programs_do_not_mix(folder: Path) -> None:
    model = load(folder)
    kernels = model.kernels
    from penstock.kernels.cpu.recording import Recording

    first, second = Recording(), Recording()
    with pytest.raises(NotRecordableError, match="of another program"):
        kernels.add(first.new(8), second.new(8))


def test_recorded_steps_follow_the_threads_and_the_instruction_set(folder: Path) -> None:
    model = load(folder)
    truth: dict[bool, list[torch.Tensor]] = {}
    try:
        for isa in native.usable_isas():
            for threads in (1, 3):
                native.select_isa(isa)
                native.set_num_threads(threads)
                logits, describe = run(model, best)
                assert describe.startswith("recorded")
                expected = truth.setdefault(native.two_ways(), logits)
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits, expected, strict=True))
    finally:
        native.select_isa("auto")
        native.set_num_threads(1)


class Masked(Harness):
    """Row b is read both ways in its first step, and row a has a span that is."""

    def _batch(self, work: Any) -> Batch:
        batch = super()._batch(work)
        if "c" in work:
            return batch
        spans = torch.stack((batch.positions[0], batch.positions[0] + 1), dim=1).int()
        spans[5:20] = torch.tensor([5, 20])
        return replace(batch, masks=(MaskKind.SPANS, MaskKind.BIDIRECTIONAL), spans=spans)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3", "deepseek-v2"])
def test_masks_reach_a_recording(family: str, tmp_path: Path) -> None:
    """And are forgotten with the step."""
    tiny.save(family, tmp_path)
    model = load(tmp_path)

    def steps(kind: type[Harness], executor: Callable[[Harness], Executor] | None) -> list[list[Tensor]]:
        harness = kind(model, seed=1)
        if executor is not None:
            harness.model = Through(executor(harness), model)  # type: ignore[assignment]
        with torch.inference_mode():
            return [list(harness.step(work).values()) for work in (WORK[0], {"c": tiny.prompt(30)})]

    plain, by_layer, recorded = steps(Harness, None), steps(Masked, None), steps(Masked, best)
    for ours, theirs in zip(recorded, by_layer, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for masked, causal in zip(recorded[0], plain[0], strict=True):
        assert not torch.equal(masked, causal)
    assert torch.equal(recorded[0][0][:5], plain[0][0][:5])
    assert torch.equal(recorded[1][0], plain[1][0])
