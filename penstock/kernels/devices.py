"""GPUs through torch's device abstraction: which there are, what they can do, what memory is in use.

NVIDIA's are what kernels are compiled for. AMD's are "rocm" here and "cuda" to torch, Intel's are "xpu", Apple's "mps".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.config.machine import Accelerator

BFLOAT16_SINCE, FP8_SINCE = (8, 0), (8, 9)  # NVIDIA's compute capabilities: Ampere; Ada and Hopper


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one device.

    Attributes:
        allocated: held by tensors of this process.
        peak: the most that was since the last reset.
        reserved: held by torch, for tensors and in store.
        free: nobody's.
        total: the device's.
    """

    allocated: int
    peak: int
    reserved: int
    free: int
    total: int

    @property
    def others(self) -> int:
        """What is neither torch's, here, nor free: other processes, contexts, compiled kernels, libraries."""
        return max(0, self.total - self.free - self.reserved)


class MemoryMeter(Protocol):
    """Tells what memory a device has in use."""

    def reset(self) -> None:
        """Gives back what torch holds in store, and lets the peak begin anew."""

    def read(self) -> MemoryUse:
        """The use once all that was launched has run."""


def kind() -> str | None:
    """The kind of GPU that this build of torch runs on, as in Accelerator, if there is one."""
    found = torch.accelerator.current_accelerator(True)
    if found is None or found.type not in ("cuda", "xpu", "mps"):
        return None
    return "rocm" if found.type == "cuda" and torch.version.hip else found.type


def accelerators(no_kernels: Callable[[str], str | None], measured: int = 0) -> tuple[Accelerator, ...]:
    """All GPUs of that kind.

    Args:
        no_kernels: why Triton's kernels cannot run on a kind, or None.
        measured: the GPU whose free memory is asked for, which makes a context there and so takes memory itself.
    """
    found = kind()
    if found is None:
        return ()
    why_not, count = no_kernels(found) or "", torch.accelerator.device_count()
    return tuple(_described(found, index, why_not, index == measured) for index in range(count))


def _described(kind: str, index: int, why_not: str, measured: bool) -> Accelerator:
    if kind == "mps":
        total = torch.mps.recommended_max_memory()
        free = total - torch.mps.driver_allocated_memory() if measured else total
        return Accelerator(kind, index, "Apple GPU", total, free, None, 0, "", lacks_fp8(kind) or "", why_not)
    module = torch.get_device_module("xpu" if kind == "xpu" else "cuda")
    facts = module.get_device_properties(index)
    total = int(facts.total_memory)
    capability = (int(facts.major), int(facts.minor)) if kind == "cuda" else None
    processors = int(getattr(facts, "multi_processor_count", getattr(facts, "gpu_subslice_count", 0)))
    return Accelerator(
        kind=kind,
        index=index,
        name=str(facts.name),
        memory_total=total,
        memory_free=_free(module, index) if measured else total,
        capability=capability,
        processors=processors,
        no_bfloat16=_older("bfloat16", capability, BFLOAT16_SINCE),
        no_fp8=lacks_fp8(kind, index) or "",
        no_kernels=why_not,
    )


def _free(module: Any, index: int) -> int:
    """Bytes that nobody uses, those that torch has in store included."""
    return int(module.mem_get_info(index)[0] + module.memory_reserved(index) - module.memory_allocated(index))


def _older(what: str, capability: tuple[int, int] | None, since: tuple[int, int]) -> str:
    if capability is None or capability >= since:
        return ""
    own, first = ".".join(map(str, capability)), ".".join(map(str, since))
    return f"this GPU, of compute capability {own}, has no {what}; {first} and newer have"


@functools.cache
def lacks_fp8(kind: str, index: int | None = None) -> str | None:
    """Why kernels cannot have FP8 on a kind of device, or None; of NVIDIA's without one at hand, they can.

    `index` names another GPU than the one in use.
    """
    if kind == "interpreter":
        return None
    if kind != "cuda":
        return f"FP8 kernels are made for NVIDIA's GPUs, not for {kind}"
    if not torch.cuda.is_available():
        return None
    return _older("FP8", torch.cuda.get_device_capability(index), FP8_SINCE) or None


@functools.cache
def shared_memory(kind: str) -> int:
    """Bytes that the threads of a program share at most, on the GPU in use; 0 where that is not known, or unlimited."""
    if kind not in ("cuda", "rocm") or not torch.cuda.is_available():
        return 0
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    per_processor = int(getattr(facts, "shared_memory_per_multiprocessor", 0))
    reserved = 1024 if kind == "cuda" and facts.major >= 8 else 0  # by the driver, for each program (CUDA C++ guide)
    return max(0, per_processor - reserved)


def home() -> str:
    """Where kernels that are not interpreted run, for torch: the GPU in use, "cuda" where there is none."""
    found = kind()
    return "cuda" if found in (None, "rocm") else str(found)


def multiply_exactly() -> None:
    """From now on torch's products on GPUs keep float32 operands, and sums of narrower ones, in float32.

    By itself it adds parts of sums in the narrower type, and takes TF32 where a variable says so: in NVIDIA's images.
    """
    torch.set_float32_matmul_precision("highest")
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_fp16_accumulation = False


def use(device: str) -> None:
    """Makes a device such as "cuda:1" the one in use in this thread; one without a number, or a CPU, needs nothing."""
    if (index := torch.device(device).index) is not None:
        torch.accelerator.set_device_index(index)


class _TorchMeter:
    """What torch's caching allocator and the driver count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def reset(self) -> None:
        self._module.synchronize(self._device)
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryUse:
        module, device = self._module, self._device
        module.synchronize(device)
        free, total = module.mem_get_info(device)
        allocated = int(module.memory_allocated(device))
        peak = int(module.max_memory_allocated(device))
        reserved = int(module.memory_reserved(device))
        return MemoryUse(allocated, peak, reserved, int(free), int(total))


def memory_meter(device: str) -> MemoryMeter | None:
    """Of a torch device; None where torch counts no peak: CPUs, "mps"."""
    place = torch.device(device)
    return _TorchMeter(place) if place.type in ("cuda", "xpu") else None
