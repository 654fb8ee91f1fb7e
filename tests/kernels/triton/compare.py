"""Kernels of Triton beside the reference, on whichever device: what tests and checks on real GPUs share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.registry import KernelContext

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Sides:
    """The ops of one device and type, and the reference's on the CPU."""

    ours: KernelSet
    reference: KernelSet
    device: str
    dtype: torch.dtype

    @property
    def torch_device(self) -> str:
        return "cpu" if self.device == "interpreter" else self.device

    def here(self, x: Tensor) -> Tensor:
        """A copy of x on the device."""
        return x.to(self.torch_device, copy=True)

    def close(self, ours: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        """Asserts equality, but for a share of the expected values' size and spread."""
        assert ours.dtype == expected.dtype and ours.shape == expected.shape
        limit = TOLERANCE[self.dtype] if tolerance is None else tolerance
        torch.testing.assert_close(ours.cpu().float(), expected.float(), rtol=limit, atol=limit)


def sides(device: str, dtype: torch.dtype, *ops: str, kv_type: str = "float32") -> Sides:
    """Asserts that `ops` got kernels of Triton."""
    name = str(dtype).removeprefix("torch.")
    ours = resolve_kernels(KernelContext(device, name, kv_type=kv_type))
    chosen = {choice.op: choice.chosen.name for choice in ours.choices}
    wanted = "triton" if device == "cuda" else "triton (interpreted)"
    assert {op: chosen[op] for op in ops} == dict.fromkeys(ops, wanted)
    kept = kv_type if kv_type in ("float32", "bfloat16", "float16") else "float32"
    reference = resolve_kernels(KernelContext("cpu", name, kv_type=kept, prefer_reference=True))
    return Sides(ours, reference, device, dtype)
