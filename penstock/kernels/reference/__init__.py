"""Implementations of every op in plain torch (sampling: numpy): the oracle of all others, and the last resort."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from penstock.kernels.reference import attention, dense, experts, latent, low_rank, recurrent, shared
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.kernels.registry import Implementation, KernelContext, functions_of


def _serves_all(_: KernelContext) -> str | None:
    return None


def _multiplies(context: KernelContext) -> str | None:
    return "torch's products may round differently with the number of rows" if context.batch_invariant else None


def _serves_cache(context: KernelContext) -> str | None:
    if context.kv_type in ("float32", "bfloat16", "float16"):
        return None
    return f"keeps keys and values in float32, bfloat16 or float16, not {context.kv_type}"


_REFUSALS: Mapping[str, Callable[[KernelContext], str | None]] = MappingProxyType(
    dict.fromkeys(
        ("linear", "gated_linear", "grouped_experts", "head_linear", "adapter"),
        _multiplies,
    )
    | dict.fromkeys(("rope_and_cache_write", "latent_cache_write"), _serves_cache)
    | dict.fromkeys(
        ("make_cache", "cache_block_bytes", "plan_attention", "paged_attention", "key_scores"), _serves_cache
    )
)


def implementations(declared: Sequence[str]) -> tuple[Implementation, ...]:
    """The reference of every op; attention's scratch memory is new with each call."""
    functions = functions_of((attention, dense, experts, latent, low_rank, recurrent, shared), declared) | {
        "paged_attention": attention.PagedAttention(),
        "sampling": ReferenceSampling,
    }
    return tuple(Implementation(op, "reference", run, _REFUSALS.get(op, _serves_all)) for op, run in functions.items())
