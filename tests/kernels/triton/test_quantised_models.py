"""Whole models quantised while they load: packings, routing and products together, against the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.models.registry import Model, build_model
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny
from tests.models.harness import Harness

FAMILIES = {
    "qwen3": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3-moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "gpt-oss": {"hidden_size": 64, "intermediate_size": 32},
}


def load(folder: Path, context: KernelContext, quantize: str) -> Model:
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config, resolve_kernels(context), dtype=torch.float32)
    target = LoadTarget(torch.float32, quantize=quantize)
    load_weights(model, checkpoint, plan_weights(model, checkpoint, target))
    return model


@pytest.mark.parametrize(("family", "quantize"), [("qwen3", "q8_0"), ("qwen3-moe", "q4_0"), ("gpt-oss", "q4_0")])
def test_logits(device, tmp_path, family, quantize):
    if device != "interpreter":
        pytest.skip("the harness computes on the CPU")
    tiny.save(family, tmp_path, **FAMILIES[family])
    ours = load(tmp_path, KernelContext(device, "float32"), quantize)
    reference = load(tmp_path, KernelContext("cpu", "float32", prefer_reference=True), quantize)
    from penstock.kernels.triton.packing import Packed, Planes  # loaded by now

    parts = [part for weight in ours.weights() if isinstance(weight.tensor, Packed) for part in weight.tensor.parts]
    assert sum(isinstance(part, Planes) for part in parts) >= 4
    tokens = tiny.prompt(9)
    found, expected = (Harness(model).step({"row": tokens})["row"] for model in (ours, reference))
    assert tiny.distance(found, expected) < 1e-4
