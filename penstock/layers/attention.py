"""Self-attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from penstock.core.cache_spec import CacheKind, CacheSpec
from penstock.kernels.api import KernelSet
from penstock.layers.batch import LayerCache
from penstock.layers.linear import Linear
from penstock.layers.norm import scale_weight
from penstock.layers.rotary import Rotary
from penstock.layers.step import Step
from penstock.layers.weight import Layer, Weight, WeightPart


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What distinguishes one family's attention from another's.

    Attributes:
        hidden_size, num_heads, num_kv_heads, head_dim: sizes.
        rotary: the positions' rotation.
        window: positions a query sees, its own included; None for all.
        scale: of the scores; None for head_dim ** -0.5.
        qkv_bias, output_bias: biases of the projections.
        qk_norm: RMS norm of each query and key head; `around_one` as in RmsNorm.
        sinks: a learned score per head in the softmax.
        soft_cap: scores are squashed to ±soft_cap.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary
    window: int | None = None
    scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    around_one: bool = False
    norm_eps: float = 1e-6
    sinks: bool = False
    soft_cap: float | None = None


class Attention(Layer):
    """Attention number `index` of a model, with weights under `prefix`."""

    def __init__(self, kernels: KernelSet, prefix: str, index: int, options: AttentionOptions) -> None:
        heads, kv_heads, dim = options.num_heads, options.num_kv_heads, options.head_dim
        self._write = kernels.rope_and_cache_write
        self._attend = kernels.paged_attention
        self.index = index
        self.rotary = options.rotary
        self.scale = dim**-0.5 if options.scale is None else options.scale
        self.soft_cap = options.soft_cap
        self.norm_eps = options.norm_eps
        kind = CacheKind.FULL if options.window is None else CacheKind.SLIDING
        self.spec = CacheSpec(kind, kv_heads, dim, dim, options.window)
        parts = ((f"{prefix}.q_proj", heads * dim), (f"{prefix}.k_proj", kv_heads * dim))
        value = (f"{prefix}.v_proj", kv_heads * dim)
        self.qkv = Linear(kernels, (*parts, value), options.hidden_size, bias=options.qkv_bias)
        self.output = Linear(
            kernels, ((f"{prefix}.o_proj", options.hidden_size),), heads * dim, bias=options.output_bias
        )
        self.qk_norm = _head_norms(prefix, options) if options.qk_norm else None
        self.sinks = (
            Weight((heads,), (WeightPart(f"{prefix}.sinks", (heads,)),), keep_float32=True) if options.sinks else None
        )

    def __call__(self, hidden: Tensor, step: Step, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size], normalised → the layer's output (+ residual), of all tokens or of `step.wanted`."""
        cache: LayerCache = step.caches[self.index]
        cos, sin = step.rotation(self.rotary)
        query = self._write(
            self.qkv(hidden),
            cos,
            sin,
            step.batch.groups[cache.group].slot,
            cache.kv,
            None if self.qk_norm is None else self.qk_norm.value,
            self.norm_eps,
        )
        attended = self._attend(
            query,
            cache.kv,
            step.plan(cache, self.spec.window),
            self.scale,
            None if self.sinks is None else self.sinks.value,
            self.soft_cap,
        )
        return self.output(step.wanted(attended), None if residual is None else step.wanted(residual))


def _head_norms(prefix: str, options: AttentionOptions) -> Weight:
    """The scales of all query heads, then of all key heads, [H + K, D]."""
    heads, kv_heads, dim, near = options.num_heads, options.num_kv_heads, options.head_dim, options.around_one
    query = scale_weight(f"{prefix}.q_norm.weight", dim, around_one=near, repeat=heads)
    key = scale_weight(f"{prefix}.k_norm.weight", dim, around_one=near, repeat=kv_heads)
    return Weight((heads + kv_heads, dim), (query, replace(key, offset=heads)), keep_float32=True)
