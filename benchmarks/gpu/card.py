"""The card's own limits: what it reads a second, and what its matrix units multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.measure import Figure, Setting


@triton.jit  # type: ignore[untyped-decorator]
def _read(x, sums, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up what lies in steps of all programs; each writes one number."""
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total += tl.load(x + begin + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def card(setting: Setting) -> Iterator[Figure]:
    """Bandwidth and matrix peaks; later sections are measured against the best of them."""
    if setting.on_gpu:
        facts = torch.cuda.get_device_properties(0)
        yield Figure("memory", facts.total_memory / 2**30, "GiB", note=facts.name)
        yield Figure("multiprocessors", facts.multi_processor_count, "", note=f"{facts.major}.{facts.minor}")
    yield from _bandwidth(setting)
    size = 64 if setting.tiny else 8192
    yield from _peak(setting, "bf16", size)
    if setting.on_gpu:
        yield from _peak(setting, "fp8", size)
        yield from _peak(setting, "int8", size)


def _bandwidth(setting: Setting) -> Iterator[Figure]:
    count = 1 << 14 if setting.tiny else 1 << 30  # four bytes each
    x = torch.ones(count, dtype=torch.int32, device=setting.torch_device)
    programs = 2 if setting.tiny else 132 * 8
    sums, other = torch.empty(programs, dtype=torch.int32, device=x.device), torch.empty_like(x)
    best = 0.0
    ways = {
        "read, by a kernel": (lambda: _read[(programs,)](x, sums, count, 8192, num_warps=8), 1),
        "read, by torch's sum": (lambda: x.view(torch.float32).sum(), 1),
        "copy, bytes read and written": (lambda: other.copy_(x), 2),
    }
    for name, (run, times) in ways.items():
        rate = times * x.nbytes / setting.seconds([run])
        best = max(best, rate) if times == 1 else best
        yield Figure(name, rate / 1e9, "GB/s")
    setting.limits["read"] = best


def _peak(setting: Setting, kind: str, size: int) -> Iterator[Figure]:
    a, b = (torch.randn(size, size, device=setting.torch_device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / setting.seconds([_product(kind, a, b)])
    setting.limits[kind] = rate
    yield Figure(f"matrix product of {size}³, {kind}", rate / 1e12, "TFLOP/s")


def _product(kind: str, a: Tensor, b: Tensor) -> Callable[[], object]:
    if kind == "bf16":
        return lambda: torch.mm(a, b)
    if kind == "int8":
        first, second = (x.clamp(-3, 3).mul(40).to(torch.int8) for x in (a, b))
        return lambda: torch._int_mm(first, second.t())
    first, second = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(first, second.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
