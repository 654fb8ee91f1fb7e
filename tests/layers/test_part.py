"""Parts of a model and taps: what is seen on the way is what the layers saw, and two parts are the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.layers.batch import Batch
from penstock.layers.part import FINAL, WHOLE, LayerStates, ModelPart, layer_input, layer_output
from penstock.models.registry import Model
from penstock.runtime.executor import EagerExecutor, Executor, RecordedExecutor
from tests.models import tiny
from tests.models.harness import Harness, load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
WORK: tuple[Mapping[str, Sequence[int]], ...] = (  # prompts, a chunk beside decoding, and a late row
    {"a": tiny.prompt(37, 1), "b": tiny.prompt(5, 2)},
    {"a": [3], "b": tiny.prompt(26, 3), "c": [9]},
)
Make = Callable[[Model, Any, ModelPart], Executor]


def eager(model: Model, caches: Any, part: ModelPart = WHOLE) -> Executor:
    return EagerExecutor(model, caches, "a test", part)


def recorded(model: Model, caches: Any, part: ModelPart = WHOLE) -> Executor:
    return RecordedExecutor(model, caches, 48, 7, part=part)


MAKERS: dict[str, Make] = {"eager": eager, "recorded": recorded}


def model_of(family: str, folder: Path) -> Model:
    tiny.save(family, folder)
    return load(folder)


class Ways:
    """Takes the place of a model in a harness: executors compute, one after the other."""

    def __init__(self, *executors: Executor) -> None:
        self._executors = executors

    def forward(self, batch: Batch, caches: Any) -> None:
        given: LayerStates | None = None
        for executor in self._executors:
            executor.forward(batch, given)
            if executor is not self._executors[-1]:
                given = executor.states()

    def logits(self, hidden: None, rows: Tensor) -> Tensor:
        return self._executors[-1].logits(rows).clone()


def logits_of(model: Model, *parts: ModelPart, make: Make) -> list[Tensor]:
    harness = Harness(model, seed=1)
    harness.model = Ways(*(make(model, harness.caches, part) for part in parts))  # type: ignore[assignment]
    with torch.inference_mode():
        return [logits for work in WORK for logits in harness.step(work).values()]


class Hooked:
    """A block that remembers what it was given and what it gave."""

    def __init__(self, block: Any, index: int, seen: dict[str, list[Tensor]]) -> None:
        self.block = block
        self.attention = block.attention
        self.index = index
        self.seen = seen

    def __call__(self, hidden: Tensor, step: Any) -> Tensor:
        self.seen.setdefault(layer_input(self.index), []).append(hidden.clone())
        out: Tensor = self.block(hidden, step)
        self.seen.setdefault(layer_output(self.index), []).append(out.clone())
        return out


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mamba2", "gemma3n"])
def test_taps_are_what_hooks_on_the_layers_see(family: str, make: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    blocks, seen = model.blocks, dict[str, list[Tensor]]()
    model.blocks = tuple(Hooked(block, index, seen) for index, block in enumerate(blocks))
    harness = Harness(model, seed=1)
    finals: list[Tensor] = []
    with torch.inference_mode():
        for work in WORK:
            finals.append(model.forward(harness.next_batch(work), harness.caches))
    model.blocks = blocks
    names = tuple(seen)
    assert len(names) == 2 * len(blocks)
    harness = Harness(model, seed=1)
    executor = MAKERS[make](model, harness.caches, ModelPart(taps=(*names, FINAL)))
    for turn, work in enumerate(WORK):
        executor.forward(harness.next_batch(work))
        for name in names:
            assert torch.equal(executor.tap(name), seen[name][turn]), (name, turn)
        assert torch.equal(executor.tap(FINAL), finals[turn])
        assert torch.equal(executor.hidden(), finals[turn])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral", "mamba2", "gemma3n", "deepseek-v2"])
def test_two_parts_are_the_whole(family: str, make: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    layers = len(model.blocks)
    whole = logits_of(model, WHOLE, make=MAKERS[make])
    for cut in range(1, layers):
        parts = ModelPart(0, cut), ModelPart(cut)
        both = logits_of(model, *parts, make=MAKERS[make])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(both, whole, strict=True)), cut
    assert layers > 1


def test_one_part_may_be_recorded_and_the_other_not(tmp_path: Path) -> None:
    model = model_of("qwen3", tmp_path)
    whole = logits_of(model, WHOLE, make=recorded)

    def mixed(model: Model, caches: Any, part: ModelPart) -> Executor:
        return (recorded if part.first else eager)(model, caches, part)

    both = logits_of(model, ModelPart(0, 1), ModelPart(1), make=mixed)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(both, whole, strict=True))


def test_a_part_computes_its_own_layers_alone(tmp_path: Path) -> None:
    model = model_of("qwen3", tmp_path)
    harness = Harness(model)
    whole = RecordedExecutor(model, harness.caches, 48, 7)
    first = RecordedExecutor(model, harness.caches, 48, 7, part=ModelPart(0, 1))
    assert first._body.num_ops < whole._body.num_ops - 5


@pytest.mark.parametrize("make", MAKERS)
def test_a_part_that_ends_early_has_no_final_states(make: str, tmp_path: Path) -> None:
    """What it gives is for the next part, not for the head."""
    model = model_of("qwen3", tmp_path)
    harness = Harness(model)
    executor = MAKERS[make](model, harness.caches, ModelPart(0, 1))
    with torch.inference_mode():
        executor.forward(harness.next_batch({"a": [1, 2, 3]}))
        for asked in (executor.hidden, executor.logits):
            with pytest.raises(AssertionError):
                asked()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (ModelPart(2, 2), "layers 2 to 2 are no part of a model"),
        (ModelPart(0, 99), "layers 0 to 99 are no part of a model"),
        (ModelPart(0, 1, (layer_output(1),)), r"tap 'layers\.1\.output' is none of layers 0 to 0"),
        (ModelPart(0, 1, (FINAL,)), "tap 'final' is none of"),
        (ModelPart(1), "layers from 1 on take what those before give"),
    ],
)
def test_what_a_model_does_not_have_is_refused(part: ModelPart, message: str, tmp_path: Path) -> None:
    model = model_of("qwen3", tmp_path)
    harness = Harness(model)
    batch = harness.next_batch({"a": [1, 2, 3]})
    with pytest.raises(ValueError, match=message):
        model.run(batch, harness.caches, part)
