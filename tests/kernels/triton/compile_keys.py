"""What a server would compile: run as a program, serves steps of many sizes and prints how often each kernel is made.

Behind that it prints how often requests would wait for it: after the steps that are run ahead.
Launches are not run. Triton makes a kernel anew for types, constants and, unless told not to, for whether a number is 1
or a multiple of 16: one that changes with every step would hold up requests long after the start.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.kernels.sampling import RowSettings
from penstock.kernels.triton import adapters, packing, sampling
from penstock.startup import warm_up
from penstock.startup.peak import largest_step
from tests.kernels.triton import matrices

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, EXPERTS = 512, 8, 2, 64, 1088, 2048, 8
ROWS, TOKENS, LONGEST = 64, 2048, 4000  # most of a step


def catch_keys() -> dict[str, set[str]]:
    """From now on launches only leave what they would be compiled for, by kernel."""
    found: dict[str, set[str]] = defaultdict(set)
    backend, binders = make_backend(GPUTarget("cuda", 90, 32)), {}

    def run(self: Any, *values: Any, grid: Any = None, warmup: bool = False, **named: Any) -> None:
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, backend)
        found[self.__name__].add(str(binders[self](*values, **named)[1:]))

    JITFunction.run = run
    return found


class Layer:
    """One layer with a plain projection, coded ones and experts, an embedding before it and logits behind."""

    def __init__(self, ops: KernelSet) -> None:
        self.ops, self.cache = ops, ops.make_cache("bfloat16", 64, 16, KV_HEADS, DIM, DIM, "cpu")
        self.table = ops.pack_table([plain(VOCAB, HIDDEN)])
        self.qkv = ops.pack_linear([plain((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)])
        self.out = ops.pack_linear([matrices.affine(4, 64, rows=HIDDEN, inputs=HEADS * DIM)])
        self.up = ops.pack_linear([matrices.fp8((128, 128), 2 * INNER, HIDDEN)])
        self.down = ops.pack_linear([plain(HIDDEN, INNER)])
        self.experts_up = ops.pack_experts([plain(EXPERTS * 128, HIDDEN)] * 2, EXPERTS)
        self.experts_down = ops.pack_experts([plain(EXPERTS * HIDDEN, 128)], EXPERTS)
        self.sampler, self.norm = ops.sampling(), torch.ones(HIDDEN)

    def step(self, lens: Sequence[int], contexts: Sequence[int], masked: bool = False) -> Tensor:
        """Its logits."""
        ops, tokens, rows = self.ops, sum(lens), len(lens)
        packed = torch.zeros(3 * tokens + rows + 1, dtype=torch.int64)  # one upload, whose parts lie as they happen to
        ids, slot, positions, last = packed.split((tokens, tokens, tokens, rows + 1))
        starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
        tables = torch.zeros(rows, -(-max(contexts) // 16), dtype=torch.int32)
        x = ops.embedding(ids, self.table)
        normed, x = ops.rms_norm(x, self.norm, 1e-6)
        cos, sin = ops.rope_tables(positions, torch.ones(DIM // 2))
        query = ops.rope_and_cache_write(ops.linear(normed, self.qkv), cos, sin, slot, self.cache)
        plan = ops.plan_attention(
            self.cache, starts, torch.tensor(contexts, dtype=torch.int32), tables, lens, contexts, None
        )
        attended = ops.paged_attention(query, self.cache, plan, 0.125)
        x = ops.linear(attended, self.out, None, x)
        normed, x = ops.rms_norm(x, self.norm, 1e-6, x)
        x = ops.linear(ops.gated_linear(normed, self.up, "silu"), self.down, None, x)
        weights, chosen = ops.route_experts(plain(tokens, EXPERTS), 2, "softmax_topk", True)
        x = ops.grouped_experts(x, weights, chosen, self.experts_up, self.experts_down, "silu", residual=x)
        logits = ops.linear(ops.take_rows(x, last[:rows]), self.table).float()
        drawing = [self.sampler.row(RowSettings(VOCAB, temperature=row % 2, top_p=0.9)) for row in range(rows)]
        masks = np.zeros((rows, VOCAB // 32), np.uint32) if masked else None
        self.sampler.draw(logits, drawing, np.zeros(rows, np.int64), masks)  # type: ignore[attr-defined]
        return logits


def plain(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def main() -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    for module in (packing, sampling, adapters):
        module.HOME = "cpu"  # type: ignore[attr-defined]
    found, dice = catch_keys(), random.Random(1)
    layer = Layer(resolve_kernels(KernelContext("cuda", "bfloat16", kv_type="bfloat16", batch_invariant=True)))
    for shape in (largest_step(ROWS, TOKENS, LONGEST, LONGEST), *warm_up.steps(ROWS, TOKENS, LONGEST)):
        logits = layer.step(shape.queries, shape.contexts)
    warm_up.draw(layer.ops, logits)
    ahead = {name: set(keys) for name, keys in found.items()}
    for _ in range(60):
        decoding, prompts = dice.choice((0, 1, 5, 16, 61)), dice.choice((0, 0, 1, 3))
        lens = [dice.choice((1, 1, 2, 5)) for _ in range(decoding)] + [dice.randrange(9, 700) for _ in range(prompts)]
        if lens:
            contexts = [length + dice.choice((0, 0, 15, 1000, 3001)) for length in lens]
            layer.step(lens, contexts, masked=dice.random() < 0.3)
    for name, keys in sorted(found.items()):
        print(name, len(keys), len(keys - ahead.get(name, set())))


if __name__ == "__main__":
    main()
