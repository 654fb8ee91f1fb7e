"""Native CPU implementations of ops, for the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.kernels.cpu import native, ops, packing, parts, recurrent
from penstock.kernels.registry import Implementation, KernelContext


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


def implementations() -> tuple[Implementation, ...]:
    """Every op the native library implements; each refuses where the library cannot be loaded."""
    name = f"native ({native.isa()})"
    model: dict[str, Callable[..., Any]] = {
        "embedding": ops.embedding,
        "rms_norm": ops.rms_norm,
        "layer_norm": ops.layer_norm,
        "rope_tables": ops.rope_tables,
        "rope_and_cache_write": ops.rope_and_cache_write,
        "latent_cache_write": ops.latent_cache_write,
        "head_linear": ops.head_linear,
        "packable": packing.packable,
        "pack_table": ops.pack_linear,
        "pack_linear": ops.pack_linear,
        "linear": ops.linear,
        "gated_linear": ops.gated_linear,
        "activate": ops.activate,
        "add": ops.add,
        "multiply": parts.multiply,
        "weighted_sum": parts.weighted_sum,
        "match_rms": parts.match_rms,
        "statistical_topk": parts.statistical_topk,
        "rotate_heads": parts.rotate_heads,
        "sigmoid_gate": ops.sigmoid_gate,
        "soft_cap": ops.soft_cap,
        "scale_rows": ops.scale_rows,
        "position_scales": ops.position_scales,
        "take_rows": ops.take_rows,
        "route_experts": ops.route_experts,
        "pack_experts": ops.pack_experts,
        "pack_heads": ops.pack_experts,
        "grouped_experts": ops.grouped_experts,
        "make_cache": ops.make_cache,
        "cache_block_bytes": ops.cache_block_bytes,
        "plan_attention": ops.plan_attention,
        "paged_attention": ops.paged_attention,
        "split": recurrent.split,
        "short_conv": recurrent.short_conv,
        "selective_scan": recurrent.selective_scan,
        "gated_delta_rule": recurrent.gated_delta_rule,
        "gated_rms_norm": recurrent.gated_rms_norm,
        "make_adapters": recurrent.make_adapters,
        "adapter": recurrent.adapter,
    }
    return (
        *(Implementation(op, name, run, _refuse_model) for op, run in model.items()),
        Implementation("sampling", name, native.NativeSampling, _refuse),
    )
