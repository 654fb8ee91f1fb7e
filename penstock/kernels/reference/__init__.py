"""Implementations of every op in plain torch (sampling: numpy): the oracle of all others, and the last resort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.kernels.reference import attention, dense, experts
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.kernels.registry import Implementation, KernelContext


def _serves_all(_: KernelContext) -> str | None:
    return None


def implementations() -> tuple[Implementation, ...]:
    """The reference of every op; attention's scratch memory is new with each call."""
    functions: dict[str, Callable[..., Any]] = {
        "embedding": dense.embedding,
        "rms_norm": dense.rms_norm,
        "layer_norm": dense.layer_norm,
        "rope_and_cache_write": dense.rope_and_cache_write,
        "pack_linear": dense.pack_linear,
        "linear": dense.linear,
        "gate_up": dense.gate_up,
        "route_experts": experts.route_experts,
        "pack_experts": experts.pack_experts,
        "grouped_experts": experts.grouped_experts,
        "plan_attention": attention.plan_attention,
        "paged_attention": attention.PagedAttention(),
        "sampling": ReferenceSampling,
    }
    return tuple(Implementation(op, "reference", run, _serves_all) for op, run in functions.items())
