"""Implementations of every op in plain torch (sampling: numpy): the oracle of all others, and the last resort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.kernels.reference import attention, dense, experts, latent, recurrent
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.kernels.registry import Implementation, KernelContext


def _serves_all(_: KernelContext) -> str | None:
    return None


def _multiplies(context: KernelContext) -> str | None:
    return "torch's products may round differently with the number of rows" if context.batch_invariant else None


def _serves_cache(context: KernelContext) -> str | None:
    if context.kv_type in ("float32", "bfloat16", "float16"):
        return None
    return f"keeps keys and values in float32, bfloat16 or float16, not {context.kv_type}"


def implementations() -> tuple[Implementation, ...]:
    """The reference of every op; attention's scratch memory is new with each call."""
    functions: dict[str, Callable[..., Any]] = {
        "embedding": dense.embedding,
        "rms_norm": dense.rms_norm,
        "layer_norm": dense.layer_norm,
        "rope_tables": dense.rope_tables,
        "packable": dense.packable,
        "pack_table": dense.stack,
        "pack_linear": dense.stack,
        "activate": dense.activate,
        "add": dense.add,
        "multiply": dense.multiply,
        "weighted_sum": dense.weighted_sum,
        "match_rms": dense.match_rms,
        "statistical_topk": dense.statistical_topk,
        "rotate_heads": dense.rotate_heads,
        "sigmoid_gate": dense.sigmoid_gate,
        "soft_cap": dense.soft_cap,
        "scale_rows": dense.scale_rows,
        "position_scales": dense.position_scales,
        "take_rows": dense.take_rows,
        "route_experts": experts.route_experts,
        "pack_experts": experts.pack_experts,
        "pack_heads": experts.pack_experts,
        "split": recurrent.split,
        "short_conv": recurrent.short_conv,
        "selective_scan": recurrent.selective_scan,
        "gated_delta_rule": recurrent.gated_delta_rule,
        "gated_rms_norm": recurrent.gated_rms_norm,
        "make_adapters": recurrent.make_adapters,
        "sampling": ReferenceSampling,
    }
    products: dict[str, Callable[..., Any]] = {
        "linear": dense.linear,
        "gated_linear": dense.gated_linear,
        "grouped_experts": experts.grouped_experts,
        "head_linear": latent.head_linear,
        "adapter": recurrent.adapter,
    }
    cached: dict[str, Callable[..., Any]] = {
        "rope_and_cache_write": dense.rope_and_cache_write,
        "latent_cache_write": latent.latent_cache_write,
        "make_cache": dense.make_cache,
        "cache_block_bytes": dense.cache_block_bytes,
        "plan_attention": attention.plan_attention,
        "paged_attention": attention.PagedAttention(),
    }
    return (
        *(Implementation(op, "reference", run, _serves_all) for op, run in functions.items()),
        *(Implementation(op, "reference", run, _multiplies) for op, run in products.items()),
        *(Implementation(op, "reference", run, _serves_cache) for op, run in cached.items()),
    )
