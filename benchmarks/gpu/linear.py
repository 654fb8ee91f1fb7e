"""Products of every packing in the shapes of an 8B model's layer, for decode and for prompts, and its head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.measure import COLD_BYTES, Figure, Setting
from penstock.kernels.api import KernelSet
from penstock.kernels.canonical import Blocks, Canonical
from penstock.quant.formats import FORMATS
from penstock.weights.dummy import random_canonical, random_tensor

LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TINY = {"qkv": (16, 256), "gate_up": (32, 256)}
VOCABULARY = 128_256
FIXED = "bf16, fixed order"
TARGETS = {"bf16": 0.85, FIXED: 0.85, "fp8": 0.80, "fp8_block": 0.80, "int4": 0.70}
"""Of bandwidth in decode, as whole models are asked for."""
KINDS = ("bf16", FIXED, "fp8", "fp8_block", "int8", "int4", "q4_k", "mxfp4", "iq4_nl")
EIGHTS = {"fp8": "fp8", "fp8_block": "fp8", "int8": "int8"}
PROMPT = 4096


def random_blocks(format: str, shape: tuple[int, int]) -> Blocks:
    """Bytes below 40: scales are small then."""
    kind = FORMATS[format]
    size = shape[0] * shape[1] // kind.block_size * kind.block_bytes
    return Blocks(format, shape, np.random.default_rng(0).integers(0, 40, size, dtype=np.uint8))


def matrix(setting: Setting, kind: str, shape: tuple[int, int]) -> Any:
    if kind in ("bf16", FIXED):
        return random_tensor(shape, setting.dtype, setting.torch_device, 1)
    made: Canonical = random_blocks(kind, shape) if kind in ("q4_k", "iq4_nl") else random_canonical(kind, shape, 1)
    return made


def linear(setting: Setting) -> Iterator[Figure]:
    shapes = TINY if setting.tiny else LAYER
    counts = (2,) if setting.tiny else (1, 64) if setting.quick else (1, 4, 16, 64)
    kinds = ("fp8_block", "q4_k") if setting.tiny else KINDS
    ops = {False: setting.kernels(), True: setting.kernels(batch_invariant=True)}
    for kind in kinds:
        chosen = ops[kind == FIXED]
        packed = {name: chosen.pack_linear([matrix(setting, kind, shape)]) for name, shape in shapes.items()}
        size = sum(weight.nbytes for weight in packed.values())
        layers = [packed] if setting.tiny else repeated(packed)
        for rows in counts:
            seconds = setting.seconds([run for layer in layers for run in calls(setting, chosen, layer, rows)])
            rate = len(layers) * size / seconds
            least = TARGETS.get(kind) if rows == 1 else None
            yield Figure(f"{kind}, {rows} rows", rate / 1e9, "GB/s", setting.share(rate, "read"), "bandwidth", least)
        rows = 3 if setting.tiny else PROMPT
        work = 2 * rows * sum(weight.rows * shapes[name][1] for name, weight in packed.items())
        rate = work / setting.seconds(calls(setting, chosen, packed, rows))
        limit = EIGHTS.get(kind, "bf16")
        yield Figure(f"{kind}, {rows} rows", rate / 1e12, "TFLOP/s", setting.share(rate, limit), f"{limit} peak")
        del packed, layers


def repeated(layer: dict[str, Any]) -> list[dict[str, Any]]:
    """A layer's weights as often as no cache holds them."""
    copies = -(-COLD_BYTES // sum(weight.nbytes for weight in layer.values()))
    return [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]


def head(setting: Setting) -> Iterator[Figure]:
    """The product that makes logits."""
    shape = (100, 64) if setting.tiny else (VOCABULARY, 4096)
    ops = setting.kernels()
    for kind in ("int8",) if setting.tiny else ("bf16", "fp8", "int4"):
        weight = ops.pack_linear([matrix(setting, kind, shape)])
        for rows in (2,) if setting.tiny else (1, 64):
            x = setting.random(rows, shape[1])
            rate = weight.nbytes / setting.seconds([partial(ops.linear, x, weight)])
            name = f"{shape[0]} logits, {kind}, {rows} rows"
            yield Figure(name, rate / 1e9, "GB/s", setting.share(rate, "read"), "bandwidth")


def calls(setting: Setting, ops: KernelSet, layer: dict[str, Any], rows: int) -> list[Callable[[], object]]:
    """The layer's products, with the activation of its gates."""
    found: list[Callable[[], object]] = []
    for name, weight in layer.items():
        x = setting.random(rows, (TINY if setting.tiny else LAYER)[name][1])
        if name == "gate_up":
            found.append(partial(ops.gated_linear, x, weight, "silu"))
        else:
            found.append(partial(ops.linear, x, weight))
    return found
