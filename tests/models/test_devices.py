"""Models on the reference compute where their tensors lie: what a GPU without kernels needs.

There is no second device here. So forward passes run with "meta" as the place where tensors are made that state none:
one that an op or layer makes so cannot be mixed with the step's, as it could not on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.api import resolve_kernels
from penstock.kernels.reference import attention
from penstock.kernels.registry import KernelContext
from penstock.models.registry import build_model
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny
from tests.models.harness import Harness

FAMILIES = (
    "llama", "gemma2", "gpt-oss", "mixtral", "deepseek-v2", "qwen3-moe", "mamba2", "mamba", "qwen3-next", "lfm2",
    "llama4", "gemma3n", "mpt",
)  # fmt: skip


def within(device: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch.device(device):
            return run(*args)

    return call


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_is_made_elsewhere(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save(family, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    kernels = resolve_kernels(KernelContext("cpu", "float32", prefer_reference=True))
    model = build_model(checkpoint.config, kernels, dtype=torch.float32)
    load_weights(model, checkpoint, plan_weights(model, checkpoint, LoadTarget(torch.float32)))
    steps = {"a": tiny.prompt(12), "b": tiny.prompt(3)}, {"a": [1], "b": [2, 3]}
    harness = Harness(model)
    wanted = [harness.step(step) for step in steps]
    monkeypatch.setattr(attention, "visible", within("cpu", attention.visible))  # made on the host, then brought over
    monkeypatch.setattr(model, "forward", within("meta", model.forward))
    monkeypatch.setattr(model, "logits", within("meta", model.logits))
    harness = Harness(model)
    for step, expected in zip(steps, wanted, strict=True):
        found = harness.step(step)
        assert all(torch.equal(found[row], expected[row]) for row in step)
