"""Gated delta networks (arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.kernels.api import KernelSet
from penstock.layers.linear import Linear, StoredRows
from penstock.layers.recurrent import CausalConv, GatedNorm, constants, decay_rates
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """What distinguishes one family's delta network from another's.

    Attributes:
        hidden_size: of the model.
        key_heads, value_heads: heads of queries and keys; of values, a multiple of them.
        key_dim, value_dim: elements of a head's query and key, and of its value.
        taps: tokens the convolution reads.
        eps: of the norm.
        tiled: value heads that read one key head lie apart, not side by side.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    eps: float = 1e-6
    tiled: bool = False


class DeltaNet(Layer):
    """Layer `index` of a model, with weights under `prefix`.

    On disk the projections are `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, or `in_proj_qkvz` and
    `in_proj_ba`, which have what belongs to each key head in turn.
    """

    def __init__(self, kernels: KernelSet, prefix: str, index: int, options: DeltaOptions) -> None:
        keys, heads = options.key_heads * options.key_dim, options.value_heads
        values = heads * options.value_dim
        self._kernels = kernels
        self.index = index
        self._tiled = options.tiled
        self._mixed, self._parts = (keys, keys, values), (2 * keys + values, values, heads, heads)
        named = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
        parts = tuple(StoredRows(f"{prefix}.in_proj_{name}", count) for name, count in named.items())
        self.input = Linear(kernels, parts, options.hidden_size, bias=False, fused=_by_head(prefix, options))
        self.conv = CausalConv(kernels, f"{prefix}.conv1d", 2 * keys + values, options.taps, bias=False)
        self.step_bias = constants(f"{prefix}.dt_bias", heads)
        self.rates = constants(f"{prefix}.A_log", heads, transform=decay_rates)
        norm, size = f"{prefix}.norm.weight", options.value_dim
        self.norm = GatedNorm(kernels, norm, values, size, options.eps, gate_first=False, shared=True)
        self.output = Linear(kernels, ((f"{prefix}.out_proj", options.hidden_size),), values, bias=False)
        self.spec = CacheSpec(CacheKind.STATE, state=(self.conv.state, (heads, options.key_dim, options.value_dim)))

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size], normalised → the layer's output (+ residual), of all tokens or of `step.wanted`."""
        ops, rows = self._kernels, step.state_rows
        tail, memory = step.caches[self.index].state
        mixed, gate, weight, steps = ops.split(self.input(hidden, step), self._parts)
        q, k, v = ops.split(self.conv(mixed, tail, rows), self._mixed)
        out = ops.gated_delta_rule(
            q, k, v, steps, weight, self.rates.value, memory, rows, self.step_bias.value, tiled=self._tiled
        )
        out = step.wanted(self.norm(out, gate))
        return self.output(out, step, None if residual is None else step.wanted(residual))


def _by_head(prefix: str, options: DeltaOptions) -> tuple[StoredRows, ...]:
    """The same rows where they are stored head by head."""
    heads, share = options.key_heads, options.value_heads // options.key_heads

    def ordered(*sizes: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Parts of these sizes in each head: how many rows there are, and where each part's lie."""
        stored = np.arange(heads * sum(sizes), dtype=np.int64).reshape(heads, -1)
        parts = np.split(stored, np.cumsum(sizes)[:-1], axis=1)
        return stored.size, np.concatenate([part.reshape(-1) for part in parts])

    wide = share * options.value_dim
    return (
        StoredRows(f"{prefix}.in_proj_qkvz", *ordered(options.key_dim, options.key_dim, wide, wide)),
        StoredRows(f"{prefix}.in_proj_ba", *ordered(share, share)),
    )
