"""How weights come into memory: decided from headers, counted by the memory plan, carried out by the loader."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.canonical import Affine
from penstock.kernels.cpu import native
from penstock.kernels.registry import KernelContext
from penstock.layers.draft_head import PairedLinear
from penstock.layers.weight import Weight, WeightPart
from penstock.models.registry import build_model
from penstock.quant.tensor import TensorInfo
from penstock.weights import loader
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.sources import Source
from penstock.weights.weight_plan import (
    Form,
    LoadTarget,
    WeightPlan,
    decide,
    decoded_formats,
    plan_weights,
    planned_bytes,
)
from tests.models import tiny

BFLOAT16 = LoadTarget(torch.bfloat16)


@pytest.fixture(scope="module")
def kernels() -> KernelSet:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return resolve_kernels(KernelContext("interpreter", "bfloat16"))


def plan(kernels: KernelSet, info: TensorInfo, target: LoadTarget = BFLOAT16, **declared: Any) -> WeightPlan:
    """Of a matrix that is stored as one tensor, as `plan_weights` makes it."""
    part = WeightPart(info.name, info.shape)
    weight = Weight(info.shape, (part,), pack=kernels.pack_linear, packable=kernels.packable, **declared)
    return WeightPlan(weight, (Source(part, info.name, {"": info}),), (), target).quantized(target.quantize)


def test_what_kernels_keep_coded_stays_so(kernels: KernelSet) -> None:
    coded, lattice = TensorInfo("a", (1000, 1024), "q4_k", 576_000), TensorInfo("b", (1000, 1024), "iq2_xxs", 264_000)
    plain = TensorInfo("c", (1000, 1024), "f32", 4_096_000)
    plans = [plan(kernels, info) for info in (coded, lattice, plain)]
    assert [item.nbytes for item in plans] == [int(1.05 * 576_000), 2 * 1_024_000, 2 * 1_024_000]
    assert decoded_formats(plans) == {"iq2_xxs": "no kernel reads iq2_xxs"}


def test_fp8_is_decoded_where_a_card_lacks_it(kernels: KernelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = TensorInfo("a", (1000, 1000), "f8_e4m3", 10**6)
    assert plan(kernels, stored).nbytes == int(1.05 * 10**6)
    monkeypatch.setattr("penstock.kernels.devices.lacks_fp8", lambda *_: "this GPU has no FP8")
    decoded = plan(kernels, stored)
    assert decoded.nbytes == 2 * 10**6
    assert decoded_formats([decoded]) == {"f8_e4m3": "this GPU has no FP8"}


def test_only_floats_that_may_be_are_quantised(kernels: KernelSet) -> None:
    target = LoadTarget(torch.bfloat16, quantize="int4")
    floats, coded = TensorInfo("a", (64, 256), "bf16", 32768), TensorInfo("b", (64, 256), "q4_k", 9216)
    assert plan(kernels, floats, target).forms == (Form("int4"),)
    assert plan(kernels, coded, target).forms == (Form(),)
    assert plan(kernels, floats, target, quantize_policy="eight bits").forms == (Form("q8_0"),)
    kept = plan(kernels, floats, target, quantize_policy="kept")
    assert kept.forms[0].encoded == "" and kept.nbytes == 2 * 64 * 256
    assert plan(kernels, floats).nbytes > plan(kernels, floats, target).nbytes == int(64 * 256 * 4.5 / 8)


def test_two_weights_that_share_a_tensor_count_it_once(kernels: KernelSet) -> None:
    """A head's first layer multiplies each half of its matrices by itself."""
    info, layer = (
        TensorInfo("a.weight", (24, 512), "bf16", 24_576),
        PairedLinear(kernels, (("a", 24),), 256, bias=False),
    )
    plans = []
    for weight in (layer.first, layer.weight):
        source = Source(weight.parts[0], info.name, {"": info})
        plans.append(WeightPlan(weight, (source,), (), BFLOAT16).quantized(None))
    assert planned_bytes(plans) == 24_576


@pytest.mark.parametrize("quantize", [None, "q8_0"])
@pytest.mark.parametrize("prefer_reference", [True, False])
def test_plans_count_what_the_loader_makes(
    quantize: str | None, prefer_reference: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is decided again while a model of plain tensors is read, and the bytes are those that were planned."""
    if not (prefer_reference or native.available()):
        pytest.skip("the native library is not built")
    tiny.save("llama", tmp_path, hidden_size=384, intermediate_size=512, vocab_size=512)
    checkpoint = open_checkpoint(tmp_path)
    kernels = resolve_kernels(KernelContext("cpu", "float32", prefer_reference=prefer_reference))
    model = build_model(checkpoint.config, kernels, dtype=torch.float32)
    plans = plan_weights(model, checkpoint, LoadTarget(torch.float32, quantize=quantize))
    monkeypatch.setattr(loader, "decide", _never)
    load_weights(model, checkpoint, plans)
    for item in plans:
        value = item.weight.value
        taken = value.nbytes if hasattr(value, "nbytes") else prod(value.shape) * value.itemsize
        padding = 0.0 if prefer_reference else 0.3  # rows of such small matrices fill the library's panels badly
        assert taken == pytest.approx(item.nbytes, rel=padding), item.weight.parts[0].key


def _never(*_: object) -> Form:
    raise AssertionError("decided while loading")


def test_what_a_method_stores_is_decided_by_the_same_rule() -> None:
    part = WeightPart("w", (16, 64))
    weight = Weight((16, 64), (part,), pack=tuple, packable=lambda _: "groups of 8 inputs")
    packed = {".qweight": TensorInfo("q", (8, 16), "i32", 512), ".scales": TensorInfo("s", (8, 16), "f16", 256)}
    made = WeightPlan(weight, (Source(part, "w", packed),), (None,), BFLOAT16)
    assert made.nbytes == int(768 * 1.05)
    assert WeightPlan(weight, made.sources, (None,), BFLOAT16, converted=True).nbytes == 2 * 16 * 64
    codes = Affine(np.zeros((16, 64), np.uint8), 4, 8, np.ones((16, 8), np.float32))
    assert decide(weight, codes, BFLOAT16) == Form(decoded="groups of 8 inputs")


def test_plans_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    kernels = resolve_kernels(KernelContext("cpu", "float32", prefer_reference=True))
    model, other = (build_model(checkpoint.config, kernels, dtype=torch.float32) for _ in range(2))
    with pytest.raises(ValueError, match="another model"):
        load_weights(other, checkpoint, plan_weights(model, checkpoint, LoadTarget(torch.float32)))
