"""Weights that go to a device in pieces: the same as those made on the host, with one weight at a time in between."""

from __future__ import annotations

import gc
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.models.registry import build_model
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny
from tests.tracking import Tracker


def loaded(folder: Path, kernels: str, dtype: torch.dtype, staged: bool, quantize: str | None = None) -> list[Any]:
    """The model's weights, packed for kernels in Triton, or by the reference."""
    if kernels == "interpreter" and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    checkpoint = open_checkpoint(folder)
    name = str(dtype).removeprefix("torch.")
    context = KernelContext("interpreter", name, kv_type=name, prefer_reference=kernels == "reference")
    model = build_model(checkpoint.config, resolve_kernels(context), dtype=dtype)
    target = LoadTarget(dtype, staged=staged, quantize=quantize)
    load_weights(model, checkpoint, plan_weights(model, checkpoint, target))
    return [weight.value for weight in model.weights()]


def tensors(packed: Any) -> list[Tensor]:
    if isinstance(packed, Tensor):
        return [packed]
    slots = [getattr(part, "__slots__", ()) for part in packed.parts]
    found = [
        [part] if isinstance(part, Tensor) else [getattr(part, name) for name in names]
        for part, names in zip(packed.parts, slots, strict=True)
    ]
    return [value for part in found for value in part if isinstance(value, Tensor)]


@pytest.mark.parametrize("kernels", ["interpreter", "reference"])
@pytest.mark.parametrize(
    ("family", "quantize"), [("llama", None), ("mixtral", None), ("gpt2", None), ("phi3", None), ("llama", "fp8")]
)
def test_they_are_the_same(family: str, quantize: str | None, kernels: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in state.items()}, tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours, theirs = (loaded(tmp_path, kernels, dtype, staged, quantize) for staged in (True, False))
        for one, other in zip(ours, theirs, strict=True):
            pairs = list(zip(tensors(one), tensors(other), strict=True))
            assert pairs
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_memory_holds_one_weight_besides_the_model(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path, hidden_size=120, intermediate_size=512, num_hidden_layers=8)
    state = load_file(tmp_path / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in state.items()}, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    del state
    gc.collect()
    tracker = Tracker()
    with tracker:
        weights = loaded(tmp_path, "interpreter", torch.bfloat16, staged=True)
        tracker.collect()
        held = sum(tensor.nbytes for weight in weights for tensor in tensors(weight))
        largest = max(sum(tensor.nbytes for tensor in tensors(weight)) for weight in weights)
    assert largest == 2 * 512 * 120 * 2
    assert held > 10 * largest
    assert held <= tracker.allocated <= held + 4096
    assert tracker.peak <= held + largest
