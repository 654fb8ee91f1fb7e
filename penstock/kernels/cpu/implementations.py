"""Native CPU implementations of ops, for the registry."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kernels.cpu import key_scores, low_rank, native, ops, parts, recurrent, shared
from penstock.kernels.registry import Implementation, KernelContext, functions_of


def _refuse(context: KernelContext) -> str | None:
    if context.prefer_reference:
        return "the reference is preferred"
    if context.device != "cpu":
        return f"runs on cpu, not {context.device}"
    return native.unavailable_reason()


def _refuse_model(context: KernelContext) -> str | None:
    if context.dtype != "float32":
        return f"computes in float32 (weights stay as stored), not {context.dtype}"
    return _refuse(context)


def implementations(declared: Sequence[str]) -> tuple[Implementation, ...]:
    """The ops of those declared that the native library implements; each refuses where it cannot be loaded."""
    name = f"native ({native.isa()})"
    functions = functions_of((key_scores, low_rank, ops, parts, recurrent, shared), declared)
    return (
        *(Implementation(op, name, run, _refuse_model) for op, run in functions.items()),
        Implementation("sampling", name, native.NativeSampling, _refuse),
    )
