"""Mixtures of experts: routing and grouped products, in the shapes of published models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.measure import Figure, Setting
from penstock.kernels.api import Matrix
from penstock.weights.dummy import random_canonical, random_tensor

MODELS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "DeepSeek-V2-Lite": (64, 6, 2048, 1408)}
TINY = {"tiny": (4, 2, 128, 128)}
SETS = 8  # steps whose tokens go to other experts, so that no cache holds the next one's


def _matrix(setting: Setting, kind: str, rows: int, inputs: int) -> Matrix:
    if kind == "bf16":
        return random_tensor((rows, inputs), setting.dtype, setting.torch_device, 3)
    return random_canonical(kind, (rows, inputs), 3)


def experts(setting: Setting) -> Iterator[Figure]:
    """Experts' weights read a second, of those that some token goes to."""
    ops = setting.kernels()
    models = TINY if setting.tiny else MODELS
    kinds = ("int4",) if setting.tiny else ("bf16", "int4") if setting.quick else ("bf16", "fp8_block", "int4", "mxfp4")
    for model, (count, top_k, hidden, size) in models.items():
        for kind in kinds:
            if kind == "mxfp4" and model != "Qwen3-30B-A3B":
                continue

            gate_up = ops.pack_experts([_matrix(setting, kind, count * size, hidden) for _ in range(2)], count)
            down = ops.pack_experts([_matrix(setting, kind, count * hidden, size)], count)
            one = (gate_up.nbytes + down.nbytes) / count
            for tokens in (2,) if setting.tiny else (1, 64) if setting.quick else (1, 16, 64):
                runs: list[Callable[[], object]] = []
                active = 0
                for _ in range(1 if setting.tiny else SETS):
                    x, logits = setting.random(tokens, hidden), setting.random(tokens, count)
                    weights, ids = ops.route_experts(logits, top_k, "softmax_topk", True)
                    active += len(torch.unique(ids))
                    runs.append(partial(ops.grouped_experts, x, weights, ids, gate_up, down, "silu"))
                rate = active * one / setting.seconds(runs)
                name = f"{model}, {kind}, {tokens} tokens"
                yield Figure(name, rate / 1e9, "GB/s", setting.share(rate, "read"), "bandwidth")
            tokens = 3 if setting.tiny else 4096
            x, logits = setting.random(tokens, hidden), setting.random(tokens, count)
            weights, ids = ops.route_experts(logits, top_k, "softmax_topk", True)
            run = [partial(ops.grouped_experts, x, weights, ids, gate_up, down, "silu")]
            rate = 2.0 * tokens * top_k * 3 * hidden * size / setting.seconds(run)
            limit = "fp8" if kind == "fp8_block" else "bf16"
            share = setting.share(rate, limit)
            yield Figure(f"{model}, {kind}, {tokens} tokens", rate / 1e12, "TFLOP/s", share, f"{limit} peak")
            del gate_up, down, run
        logits = setting.random(3 if setting.tiny else 64, count)
        seconds = setting.seconds([partial(ops.route_experts, logits, top_k, "softmax_topk", True)] * 4)
        yield Figure(f"{model}, routing, {len(logits)} tokens", seconds / 4 * 1e6, "µs")
