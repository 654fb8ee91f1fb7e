"""Adapters in whole models: they are the merged weights; who has none does not notice; recorded as by layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.api import resolve_kernels
from penstock.kernels.cpu import native
from penstock.kernels.registry import KernelContext
from penstock.layers.adapters import add_adapters
from penstock.layers.batch import Batch
from penstock.layers.linear import Linear, ProjectionAdapters
from penstock.models.registry import Model, build_model
from penstock.runtime.executor import EagerExecutor, RecordedExecutor
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny
from tests.models.harness import Harness, load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
WORK: tuple[Mapping[str, Sequence[int]], ...] = (
    {"a": tiny.prompt(19, 1), "b": tiny.prompt(7, 2)},
    {"a": [3], "b": tiny.prompt(11, 3), "c": [9]},
)
SLOTS: Mapping[str, tuple[int, int]] = {"a": (1, 0), "b": (0, 0), "c": (2, 1)}
TABLES = ("model.embed_tokens", "lm_head", "backbone.embeddings")
FAMILIES = ["qwen3", "mixtral", "gpt-oss", "deepseek-v2", "mamba2", "lfm2", "gemma3n", "qwen3-next", "phi", "gemma2"]


class AdaptedHarness(Harness):
    """Rows have the adapters of their names, if `adapts`."""

    adapts = True

    def _batch(self, work: Mapping[str, Sequence[int]]) -> Batch:
        batch = super()._batch(work)
        if not self.adapts:
            return batch
        slots = torch.tensor([SLOTS[row] for row, tokens in work.items() for _ in tokens])
        return replace(batch, adapter_slot=slots, adapter_scale=torch.full(slots.shape, 0.5))


class Through:
    """Takes the place of a model in a harness: an executor computes."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def forward(self, batch: Batch, caches: Any) -> None:
        self.executor.forward(batch)

    def logits(self, hidden: None, rows: Tensor, adapters: Any = None) -> Tensor:
        found: Tensor = self.executor.logits(rows).clone()
        return found


def model_of(family: str, folder: Path) -> tuple[Model, Mapping[str, ProjectionAdapters]]:
    tiny.save(family, folder)
    model = load(folder)
    found = add_adapters(model, model.kernels, 3, 8)
    return model, {name: target for name, target in found.items() if isinstance(target, ProjectionAdapters)}


def fill(found: Mapping[str, ProjectionAdapters], which: Sequence[int] = (1, 2), *, columns: bool = False) -> None:
    for number, adapters in enumerate(found.values()):
        for slot in which:
            generator = torch.Generator().manual_seed(10 * number + slot)
            slots, rank = adapters.slots, 2 * slot + 1
            first = () if slots.experts == 1 else (slots.experts,)
            rows = slots.outputs if adapters.order is None else int(adapters.order.max()) + 1
            down = torch.randn(*first, rank, slots.inputs, generator=generator) * slots.inputs**-0.5
            up = torch.randn(*first, rows, rank, generator=generator) * 0.3
            factors = torch.rand(*first, rows, generator=generator) + 0.5 if columns else None
            adapters.fill(slot, down, up, 0.5, factors)


def run(model: Model, *, adapts: bool, recorded: bool) -> list[dict[str, Tensor]]:
    harness = AdaptedHarness(model, seed=1)
    harness.adapts = adapts
    executor = (
        RecordedExecutor(model, harness.caches, 48, 48) if recorded else EagerExecutor(model, harness.caches, "a test")
    )
    harness.model = Through(executor)  # type: ignore[assignment]
    with torch.inference_mode():
        return [harness.step(work) for work in WORK]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_as_by_layers_and_unnoticed_by_others(family: str, columns: bool, tmp_path: Path) -> None:
    model, found = model_of(family, tmp_path)
    assert found
    plain = run(model, adapts=False, recorded=True)
    fill(found, columns=columns)
    eager, recorded = (run(model, adapts=True, recorded=way) for way in (False, True))
    without = run(model, adapts=False, recorded=True)
    for step, (ours, theirs) in enumerate(zip(recorded, eager, strict=True)):
        for row in ours:
            assert torch.isfinite(ours[row]).all()
            assert torch.equal(ours[row], theirs[row]), (step, row)
            assert torch.equal(without[step][row], plain[step][row])
            assert torch.equal(ours[row], plain[step][row]) == (row == "b"), (step, row)


@pytest.mark.parametrize("recorded", [True, False])
def test_only_some_tokens_logits_are_wanted(recorded: bool, tmp_path: Path) -> None:
    model, found = model_of("qwen3", tmp_path)
    fill(found)
    every = run(model, adapts=True, recorded=recorded)
    harness = AdaptedHarness(model, seed=1)
    if recorded:
        harness.model = Through(RecordedExecutor(model, harness.caches, 48, 48))  # type: ignore[assignment]
    with torch.inference_mode():
        some = harness.wanted(WORK[0], (18, 3, 25))
    expected = torch.stack([every[0]["a"][18], every[0]["a"][3], every[0]["b"][6]])
    assert torch.equal(some, expected)


def plain_weights(folder: Path) -> dict[str, Tensor]:
    """The matrices of a checkpoint as layers have them, merged and ordered."""
    checkpoint = open_checkpoint(folder)
    kernels = resolve_kernels(KernelContext("cpu", "float32", prefer_reference=True))
    model = build_model(checkpoint.config, kernels, dtype=torch.float32)
    load_weights(model, checkpoint, plan_weights(model, checkpoint, LoadTarget(torch.float32)))
    return {layer.weight.parts[0].key: layer.weight.value for layer in model.walk() if isinstance(layer, Linear)}


@pytest.mark.parametrize("family", ["qwen3", "phi", "gemma2", "mamba2"])
def test_an_adapter_is_the_merged_weight(family: str, tmp_path: Path) -> None:
    model, found = model_of(family, tmp_path)
    found = {
        name: target for name, target in found.items() if name not in TABLES
    }  # tests/layers/test_peft.py has these
    fill(found, (1,))
    other = load(tmp_path)
    stored = plain_weights(tmp_path)
    weights = {layer.weight.parts[0].key: layer for layer in other.walk() if isinstance(layer, Linear)}
    merged = 0
    for layer in model.walk():
        if isinstance(layer, Linear):
            weight = weights[layer.weight.parts[0].key].weight
            values = stored[weight.parts[0].key].clone()
            for part in layer.adapters:
                entry = part.slots.entries[1]
                assert entry is not None
                rows = slice(part.offset, part.offset + part.slots.outputs)
                values[rows] += 0.5 * entry.scale * entry.up.T @ entry.down  # tokens take half of it
                merged += 1
            weight.fill(values.chunk(2) if weight.gate_up else (values,))
    assert merged == len(found)
    prompt = {"a": tiny.prompt(19, 1)}
    with torch.inference_mode():
        ours = AdaptedHarness(model, seed=1).step(prompt)["a"]
        theirs = Harness(other, seed=1).step(prompt)["a"]
        plain = Harness(load(tmp_path), seed=1).step(prompt)["a"]
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4 * float(theirs.std()))
    assert float((ours - plain).abs().max()) > 100 * float((ours - theirs).abs().max())
