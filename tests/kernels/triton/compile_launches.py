"""Compiles for a Hopper card, without one, every kernel that ops launch: run as a program, prints what would not run.

What the interpreter takes is not always what the compiler takes, nor does it know limits of shared memory. Launches are
recorded on CPU tensors instead of run, so that shapes, stages and warps are those of real ones. Prints a line of JSON:
every launch's kernel, its bytes of shared memory and the units it multiplies in; and problems. With the word "all"
behind it more sizes and types, which takes a minute longer.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
import torch
import triton
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from penstock.kernels.adapters import Adapted, PlacedAdapters, TokenAdapters
from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.cache import StateRows
from penstock.kernels.registry import KernelContext
from penstock.kernels.sampling import RowSettings
from penstock.kernels.triton import adapters, experts, linear, norms, packing, recurrent, sampling, streams
from tests.kernels.triton import matrices
from tests.kernels.triton.compare_adapters import fill

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448  # bytes a program may have there


class Launches:
    """Stands for the launching of kernels: compiles each combination of types and constants once."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.made: list[tuple[str, int, str]] = []
        self.seen: set[str] = set()
        self.backend = make_backend(HOPPER)
        self.binders: dict[Any, Any] = {}

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        """As Triton binds a launch's arguments, tuples of them too."""
        if kernel not in self.binders:
            self.binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, specialization, _ = self.binders[kernel](*args, **more)
        key = f"{kernel.__name__} {specialization} {more}"
        if key in self.seen:
            return
        self.seen.add(key)
        try:
            made = self.compiled(kernel, more, bound, specialization)
        except Exception as error:
            while error.__cause__ is not None:  # the compiler tells each call on the way to what it refuses
                error = error.__cause__  # type: ignore[assignment]
            self.problems.append(f"{key}: {error!r}")
            return
        code = made.asm["ptx"]
        units = "wgmma" if "wgmma" in code else "mma" if "mma.sync" in code else ""
        self.made.append((kernel.__name__, made.metadata.shared, units))
        codes = bound.get("CODES")
        apart = codes is not None and codes.kind == "fp8" and not codes.tiled
        if apart and "maxNumImpreciseAcc = 128 " not in made.asm["ttgir"]:
            self.problems.append(f"{key}: sums of FP8 stay in the matrix unit, which keeps 14 bits of them")
        if made.metadata.shared > SHARED_MEMORY:
            self.problems.append(f"{key}: {made.metadata.shared} bytes of shared memory")

    def compiled(self, kernel: Any, more: dict[str, Any], bound: Any, specialization: Any) -> Any:
        """As JITFunction.run does from a binder's result, which has other names for it in other versions."""
        types = [kind for kind, _ in specialization]
        hints = ["" if kind == "constexpr" else hint for kind, hint in specialization]
        constant = find_paths_if(types, lambda _, kind: kind == "constexpr")
        hinted = find_paths_if(hints, lambda _, hint: isinstance(hint, str))
        source = ASTSource(
            kernel,
            {parameter.name: kind for parameter, kind in zip(kernel.params, types, strict=True)},
            {path: get_iterable_path(list(bound.values()), path) for path in constant},
            {path: self.backend.parse_attr(get_iterable_path(hints, path)) for path in hinted},
        )
        return triton.compile(source, target=HOPPER, options=more)


def products() -> None:
    """Steps of one row and of many over every kind of packing; little of float32, which nobody serves on a card."""
    found = matrices.coded() | matrices.eights()
    rows_of = dict.fromkeys(("q4_k", "q6_k", "mxfp4", "nf4", "fp8, channel", "int8"), (1,))
    for name, counts in (rows_of | dict.fromkeys(("q4_0", "fp8, blocks"), (1, 300))).items():
        weight = linear.pack_linear([found[name]])
        for rows in counts:
            linear.linear(bf16(rows, found[name].shape[1]), weight)
    linear.linear(torch.zeros(1, found["q4_0"].shape[1]), linear.pack_linear([found["q4_0"]]))
    cases: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ((torch.bfloat16, (1, 300, 4096)), (torch.float32, (1,)))
    for dtype, sizes in cases:
        plain = linear.pack_linear([torch.zeros(4096, 4096, dtype=dtype)])
        for rows in sizes:
            linear.gated_linear(torch.zeros(rows, 4096, dtype=dtype), plain, "silu", fixed=True)
    linear.embedding(torch.zeros(3, dtype=torch.int64), linear.pack_table([found["q6_k"]]), dtype=torch.bfloat16)  # type: ignore[attr-defined]


def mixtures(dtype: torch.dtype) -> None:
    weights, ids = experts.route_experts(torch.zeros(9, 8, dtype=dtype), 2, "sigmoid_topk", True, groups=(4, 2))
    for part in (torch.zeros(8 * 64, 64, dtype=dtype), matrices.codebook(matrices.E2M1, 32, 8 * 64, 64)):
        down = experts.pack_experts([part], 8)
        gate_up = experts.pack_experts([part, part], 8)
        experts.grouped_experts(torch.zeros(9, 64, dtype=dtype), weights, ids, gate_up, down, "swigluoai")


def drawing() -> None:
    kernel = sampling.sampling()
    settings = ({}, {"top_p": 0.9, "typical_p": 0.5}, {"logit_bias": ((3, 1.0),), "presence_penalty": 1.0})
    rows = [kernel.row(RowSettings(150_000, **given)) for given in settings]
    masks = np.zeros((3, 150_000 // 32 + 1), np.uint32)
    kernel.draw(torch.zeros(3, 150_000), rows, np.zeros(3, np.int64), masks)
    kernel.draw_drafted(torch.zeros(6, 150_000), rows, [(1, 2), (), (3,)], np.zeros(3, np.int64))


def adapting(dtype: torch.dtype) -> None:
    slots = fill(adapters.make_adapters(5, 1100, 70), dtype)
    has = TokenAdapters(torch.zeros(9, 1).long(), torch.ones(9, 1), torch.arange(0))
    adapted = Adapted((PlacedAdapters(slots),), has)
    adapters.adapter(torch.zeros(9, 1100, dtype=dtype), torch.zeros(9, 70, dtype=dtype), adapted)


def on_rows(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 2048, dtype=dtype)
    streams.weighted_sum(x, [x, x, x, x], torch.zeros(3, 4, dtype=dtype))
    streams.match_rms(x, x, 1e-5)
    streams.statistical_topk(x, 1.6)
    streams.position_scales(torch.zeros(3, dtype=torch.int64), 8192.0, 0.1)
    norms.gated_rms_norm(x, x, torch.zeros(2048), 1e-6, 128)
    norms.gated_rms_norm(x, x, torch.zeros(2048), 1e-6, None, gate_first=True)


def recurrences(dtype: torch.dtype, after: torch.Tensor | None = None) -> None:
    """The sizes of Mamba-2 2.7B, Mamba 2.8B and Qwen3-Next; `after`: where states go behind each token."""
    starts = torch.tensor([0, 1, 5], dtype=torch.int32)
    rows = StateRows(torch.zeros(2).long(), starts, torch.zeros(2).int(), after)

    def part(width: int) -> torch.Tensor:
        return torch.zeros(5, 2 * width, dtype=dtype)[:, width:]

    taps, state = torch.zeros(4, 5376), torch.zeros(2, 3, 5376)
    recurrent.short_conv(part(5376), taps, taps[0], state, rows, "silu")
    recurrent.short_conv(part(2048), taps[:3, :2048], None, state, rows, None, part(2048), part(2048))
    rates, memory = torch.zeros(80), torch.zeros(2, 80, 128, 64)
    recurrent.selective_scan(
        part(5120), part(80), rates, part(128), part(128), memory, rows, rates, rates, part(5120), (0.0, math.inf)
    )
    rates, memory = torch.zeros(16, 5120), torch.zeros(2, 1, 16, 5120)
    recurrent.selective_scan(part(5120), part(5120), rates, part(16), part(16), memory, rows, rates[0], rates[0])
    q, k, v, small = part(2048), part(2048), part(4096), part(32)
    recurrent.gated_delta_rule(q, k, v, small, small, rates[0], torch.zeros(2, 32, 128, 128), rows, rates[0])


def ops_for(kv_type: str = "bfloat16", fixed: bool = False) -> KernelSet:
    return resolve_kernels(KernelContext("cuda", "bfloat16", kv_type=kv_type, batch_invariant=fixed))


def attention(ops: KernelSet, kv_type: str, heads: tuple[int, int], dims: tuple[int, int], **changes: Any) -> None:
    """A step with a decoding row of several parts and a prompt; a latent cache where there is one KV head."""
    rows, block, (key_dim, value_dim) = ((1, 900), (100, 100)), changes.pop("block_size", 64), dims
    window, latent = changes.pop("window", None), key_dim == 576
    cache = ops.make_cache(kv_type, 4, block, heads[1], key_dim, value_dim, "cpu", latent)
    lens, contexts = zip(*rows, strict=True)
    starts = torch.tensor([0, 1, 101], dtype=torch.int32)
    tables = starts, torch.tensor(contexts, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    plan = ops.plan_attention(cache, *tables, lens, contexts, window)
    ops.paged_attention(bf16(101, heads[0] * key_dim), cache, plan, 0.1, **changes)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def rotation(ops: KernelSet, kv_type: str) -> None:
    cache = ops.make_cache(kv_type, 4, 64, 8, 128, 128, "cpu")
    slot, norm = torch.zeros(4, dtype=torch.int64), torch.zeros(40, 128)
    tables = ops.rope_tables(slot, torch.zeros(64))
    ops.rope_and_cache_write(bf16(4, 56 * 128), *tables, slot, cache, norm, 1e-6)
    ops.rotate_heads(bf16(4, 4096), *tables, 32)
    latent = ops.make_cache(kv_type, 4, 64, 1, 576, 512, "cpu", True)
    ops.latent_cache_write(bf16(4, 576), torch.zeros(512), 1e-6, *ops.rope_tables(slot, torch.zeros(32)), slot, latent)


def small(ops: KernelSet) -> None:
    x, weight = bf16(4, 4096), torch.zeros(4096)
    ops.rms_norm(x, weight, 1e-6, x)
    ops.layer_norm(x, weight, weight, 1e-6)
    for op in (ops.add, ops.multiply, ops.sigmoid_gate):
        op(x, x)
    ops.soft_cap(x.float(), 30.0)
    ops.scale_rows(x, torch.zeros(4, 1))
    ops.take_rows(x, torch.zeros(3, dtype=torch.int64))


def in_order(more: bool = False) -> None:
    """Attention of which a token gets the same in any chunk."""
    fixed = ops_for(fixed=True)
    attention(fixed, "bfloat16", (32, 8), (128, 128))
    if more:
        attention(fixed, "bfloat16", (16, 1), (576, 512))
        attention(fixed, "bfloat16", (8, 4), (256, 256), window=512, soft_cap=50.0)
        attention(fixed, "bfloat16", (64, 8), (64, 64), window=128, sinks=torch.zeros(64))


def other_sizes(brain: KernelSet, eight: KernelSet) -> None:
    rotation(eight, "fp8")
    in_order(more=True)
    attention(eight, "fp8", (32, 8), (128, 128))
    attention(brain, "bfloat16", (16, 1), (576, 512))
    attention(brain, "bfloat16", (32, 32), (96, 96), block_size=16)
    attention(brain, "bfloat16", (8, 4), (256, 256), window=512, soft_cap=50.0)
    attention(brain, "bfloat16", (64, 8), (64, 64), window=128, sinks=torch.zeros(64))


def main(more: bool) -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    launches = Launches()
    triton.runtime.jit.JITFunction.run = lambda kernel, *args, **more: launches.run(kernel, *args, **more)
    for module in (packing, sampling, adapters):
        module.HOME = "cpu"  # type: ignore[attr-defined]
    brain, eight = ops_for(), ops_for("fp8")
    rotation(brain, "bfloat16")
    attention(brain, "bfloat16", (32, 8), (128, 128))
    attention(eight, "fp8", (16, 1), (576, 512))
    in_order()
    small(brain)
    products()
    mixtures(torch.bfloat16)
    drawing()
    adapting(torch.bfloat16)
    on_rows(torch.bfloat16)
    recurrences(torch.bfloat16)
    recurrences(torch.bfloat16, torch.zeros(5).long())
    if more:
        other_sizes(brain, eight)
    print(json.dumps({"made": launches.made, "problems": launches.problems}))


if __name__ == "__main__":
    main("all" in sys.argv[1:])
