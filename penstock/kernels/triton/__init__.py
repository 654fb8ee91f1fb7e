"""Ops in Triton (Tillet et al. 2019, MAPL), for the registry.

The modules that FAMILIES names have a function for each op that they serve, with its name and signature, and
`refuse(context)`, which tells why they cannot serve one. Triton is imported when a device first needs it: "cuda",
"rocm" and "xpu" (both untested), or "interpreter", on which Triton's interpreter runs the same kernels on the CPU,
slowly, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from penstock.config.environment import interpret_triton
from penstock.kernels.registry import Implementation, KernelContext, functions_of

DEVICES = ("cuda", "rocm", "xpu", "interpreter")
FIXED_ORDER = "fixed order"  # ends the names of products that are torch's unless results must not depend on rows
FAMILIES = (
    *("norms", "recurrent", "streams", "pointwise", "activations", "experts", "sampling", "adapters"),
    *("linear", "rope", "cache", "attention", "latent", "heads"),
)


@functools.cache
def unavailable_reason(device: str) -> str | None:
    """Why a kind of device cannot run kernels of Triton, or None if it can."""
    if device not in DEVICES:
        return f"Triton does not compile for {device}"
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'penstock-llm[gpu]' brings it"
    if device == "interpreter":
        interpret_triton()
    interpreted = bool(import_module("penstock.kernels.triton.numbers").INTERPRETED)
    if device == "interpreter" and not interpreted:
        return "Triton was loaded for GPUs before; start a new process with TRITON_INTERPRET=1"
    if device != "interpreter" and interpreted:
        return "TRITON_INTERPRET is set, so that kernels would run on the CPU; unset it"
    return None if interpreted or not torch.accelerator.is_available() else _driver_failure()


def _driver_failure() -> str | None:
    """Triton builds its driver with the system's C compiler when it first needs it: why that fails, or None."""
    try:
        import_module("triton.runtime").driver.active.get_current_target()
    except Exception as error:  # of the compiler, the driver or the loader: each has its own
        first = str(error).strip().splitlines()
        return f"Triton cannot compile here ({first[0] if first else type(error).__name__})"
    return None


def implementations(device: str, declared: Sequence[str]) -> tuple[Implementation, ...]:
    """What Triton offers a device: nothing, without loading Triton, if it is none of DEVICES."""
    if device not in DEVICES:
        return ()
    name = "triton (interpreted)" if device == "interpreter" else "triton"
    reason = unavailable_reason(device)
    if reason is not None:
        return tuple(Implementation(op, name, _absent, lambda _: reason) for op in declared)
    found: list[Implementation] = []
    for module in FAMILIES:
        family = import_module(f"penstock.kernels.triton.{module}")
        functions = functions_of((family,), declared)
        found += getattr(family, "variants", _none)(name)
        found += (Implementation(op, name, run, family.refuse) for op, run in functions.items())
    return tuple(replace(item, refuse=_unless_preferred(item.refuse)) for item in found)


def _none(_: str) -> tuple[Implementation, ...]:
    return ()


def _absent(*_: Any) -> None:
    """Stands for a function that cannot be loaded, and is never chosen."""


def _unless_preferred(refuse: Callable[[KernelContext], str | None]) -> Callable[[KernelContext], str | None]:
    def refuse_all(context: KernelContext) -> str | None:
        return "the reference is preferred" if context.prefer_reference else refuse(context)

    return refuse_all
