"""Native CPU implementations of ops, for the registry."""

from __future__ import annotations

from penstock.kernels.cpu import native
from penstock.kernels.registry import Implementation, KernelContext


def _refuse(context: KernelContext) -> str | None:
    if context.prefer_reference:
        return "the reference is preferred"
    if context.device != "cpu":
        return f"runs on cpu, not {context.device}"
    return native.unavailable_reason()


def implementations() -> tuple[Implementation, ...]:
    """Every op the native library implements; each refuses where the library cannot be loaded."""
    name = f"native ({native.isa()})"
    return (Implementation("sampling", name, native.NativeSampling, _refuse),)
