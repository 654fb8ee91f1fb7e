"""Chooses, once per engine, the implementation of every op, and remembers why the others were refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from penstock.config.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KernelContext:
    """What a choice depends on.

    Attributes:
        device: "cpu", a kind of GPU as in EngineOptions without its number, or "interpreter", which is the CPU running
            kernels made for "cuda".
        dtype: compute type, "float32", "bfloat16" or "float16".
        isa: instruction set of the native library in use ("none" if it could not be loaded).
        kv_type: type of the KV cache, as in `kernels.cache.KV_TYPES`.
        batch_invariant: a row's results must not depend on how many rows there are, not even in their last bits.
        prefer_reference: take the plain reference everywhere (oracle runs).
        heads: elements of keys and of values of the model's heads, as far as they are known; 0 for values that are part
            of the keys.
        shared_memory: bytes a program on the GPU may share; 0 where there is no such limit.
    """

    device: str
    dtype: str
    isa: str = "none"
    kv_type: str = "float32"
    prefer_reference: bool = False
    batch_invariant: bool = False
    heads: tuple[tuple[int, int], ...] = ()
    shared_memory: int = 0


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an op.

    Attributes:
        op: the op's name in `kernels.api`.
        name: for people, for example "reference (torch)" or "native (avx512)".
        function: the callable, with the op's signature.
        refuse: returns why this one cannot serve a context, or None if it can.
    """

    op: str
    name: str
    function: Callable[..., Any]
    refuse: Callable[[KernelContext], str | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation an op got; `refused` lists (name, reason) of better ones that were not possible."""

    op: str
    chosen: Implementation
    refused: tuple[tuple[str, str], ...]


def functions_of(modules: Iterable[ModuleType], ops: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Op → the function of that name that a module defines, or says that it offers where it has an `__all__`."""
    found: dict[str, Callable[..., Any]] = {}
    for module in modules:
        offered = vars(module).get("__all__")
        for op in ops:
            function = vars(module).get(op)
            own = op in offered if offered else getattr(function, "__module__", None) == module.__name__
            if own and callable(function):
                found[op] = function
    return found


def choose(op: str, candidates: Iterable[Implementation], context: KernelContext) -> Choice:
    """Takes the first candidate (best first, reference last) that does not refuse.

    Raises:
        ConfigError: none is possible; the message lists every reason.
    """
    refused: list[tuple[str, str]] = []
    for candidate in candidates:
        reason = candidate.refuse(context)
        if reason is None:
            return Choice(op, candidate, tuple(refused))
        refused.append((candidate.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused) or "no implementation is registered"
    asked = f"device {context.device}, dtype {context.dtype}, isa {context.isa}, KV cache {context.kv_type}"
    invariant = ", and --batch-invariant out" if context.batch_invariant else ""
    raise ConfigError(
        f"nothing here can compute {op} for {asked}: {reasons}. Leave --dtype, --isa and --kv-cache-dtype at auto"
        f"{invariant}."
    )
