"""Compiles for a Hopper card, without one, every kernel that ops launch: run as a program, prints what would not run.

What the interpreter takes is not always what the compiler takes, nor does it know limits of shared memory. Launches are
recorded on CPU tensors instead of run, so that shapes, stages and warps are those of real ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.kernels.cache import StateRows
from penstock.kernels.sampling import RowSettings
from penstock.kernels.triton import adapters, experts, linear, norms, packing, recurrent, sampling, streams
from tests.kernels.triton import matrices
from tests.kernels.triton.compare_adapters import START, fill

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448  # bytes a program may have there
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


class Launches:
    """Stands for the launching of kernels: compiles each combination of types and constants once."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.seen: set[str] = set()

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        options = {name: value for name, value in more.items() if name not in kernel.arg_names}
        given |= {name: value for name, value in more.items() if name in kernel.arg_names}
        signature, constants, hints = {}, {}, {}
        for at, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            signature[parameter.name] = "constexpr" if parameter.is_constexpr else _type_of(value)
            if parameter.is_constexpr:
                constants[(at,)] = value
            elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                hints[(at,)] = [["tt.divisibility", 16]]
        key = f"{kernel.__name__} {signature} {constants} {hints} {options}"
        if key in self.seen:
            return
        self.seen.add(key)
        try:
            made = triton.compile(ASTSource(kernel, signature, constants, hints), target=HOPPER, options=options)
        except Exception as error:
            self.problems.append(f"{key}: {error}")
            return
        if made.metadata.shared > SHARED_MEMORY:
            self.problems.append(f"{key}: {made.metadata.shared} bytes of shared memory")


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def products(dtype: torch.dtype) -> None:
    """Steps of one row and of many over every kind of packing."""
    found = matrices.coded() | matrices.eights()
    for name in ("q4_0", "q4_k", "q6_k", "mxfp4", "nf4", "fp8, channel", "fp8, blocks", "int8"):
        weight = linear.pack_linear([found[name]])
        for rows in (1, 300) if name in ("q4_0", "fp8, blocks") else (1,):
            linear.linear(torch.zeros(rows, found[name].shape[1], dtype=dtype), weight)
    plain = linear.pack_linear([torch.zeros(4096, 4096, dtype=dtype)])
    for rows in (1, 300, 4096):
        linear.gated_linear(torch.zeros(rows, 4096, dtype=dtype), plain, "silu", fixed=True)
    numbers = torch.zeros(3, dtype=torch.int64)
    linear.embedding(numbers, linear.pack_table([found["q6_k"]]), dtype=dtype)


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


def adapting(dtype: torch.dtype) -> None:
    slots = fill(adapters.make_adapters(5, 1100, 70), dtype)
    adapters.adapter(
        torch.zeros(9, 1100, dtype=dtype), torch.zeros(9, 70, dtype=dtype), slots, torch.zeros(6).long(), START
    )


def on_rows(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 2048, dtype=dtype)
    streams.weighted_sum(x, [x, x, x, x], torch.zeros(3, 4, dtype=dtype))
    streams.match_rms(x, x, 1e-5)
    streams.statistical_topk(x, 1.6)
    streams.position_scales(torch.zeros(3, dtype=torch.int64), 8192.0, 0.1)
    norms.gated_rms_norm(x, x, torch.zeros(2048), 1e-6, 128)
    norms.gated_rms_norm(x, x, torch.zeros(2048), 1e-6, None, gate_first=True)


def recurrences(dtype: torch.dtype) -> None:
    """The sizes of Mamba-2 2.7B, Mamba 2.8B and Qwen3-Next."""
    rows = StateRows(torch.zeros(2).long(), torch.tensor([0, 1, 5], dtype=torch.int32), torch.zeros(2).int())

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


def main() -> None:
    launches = Launches()
    triton.runtime.jit.JITFunction.run = lambda kernel, *args, **more: launches.run(kernel, *args, **more)
    for module in (packing, sampling, adapters):
        module.HOME = "cpu"
    products(torch.bfloat16)
    products(torch.float32)
    mixtures(torch.bfloat16)
    drawing()
    adapting(torch.bfloat16)
    on_rows(torch.bfloat16)
    recurrences(torch.bfloat16)
    print(f"{len(launches.seen)} compiled", *launches.problems, sep="\n")


if __name__ == "__main__":
    main()
