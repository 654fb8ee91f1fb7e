"""Selective state spaces: Mamba (arXiv:2312.00752) and Mamba-2 (arXiv:2405.21060)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.kernels.api import KernelSet
from penstock.layers.linear import Linear, StoredRows
from penstock.layers.recurrent import CausalConv, GatedNorm, constants, decay_rates
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight


@dataclass(frozen=True, slots=True)
class MambaOptions:
    """What distinguishes one family's Mamba from another's.

    Attributes:
        hidden_size: of the model.
        channels: inner size.
        states: N, elements of a channel's state.
        rank: size of the compressed steps.
        taps: tokens the convolution reads.
        bias, conv_bias: of the projections of input and output, of the convolution.
        norms: steps, inputs' and outputs' weights have RMS norms: with scales ("scaled"), without ("plain").
        eps: of those.
    """

    hidden_size: int
    channels: int
    states: int
    rank: int
    taps: int = 4
    bias: bool = False
    conv_bias: bool = True
    norms: Literal["scaled", "plain"] | None = None
    eps: float = 1e-6


class MambaMixer(Layer):
    """Mamba, layer `index` of a model, with weights under `prefix`: every channel has a step of its own."""

    def __init__(self, kernels: KernelSet, prefix: str, index: int, options: MambaOptions) -> None:
        channels = options.channels
        states = options.states
        rank = options.rank
        self._kernels = kernels
        self.index = index
        self.options = options
        self.input = Linear(kernels, ((f"{prefix}.in_proj", 2 * channels),), options.hidden_size, bias=options.bias)
        self.conv = CausalConv(kernels, f"{prefix}.conv1d", channels, options.taps, bias=options.conv_bias)
        rows = np.split(np.arange(rank + 2 * states, dtype=np.int64), (rank,))
        self.low, self.weights_of_states = (
            Linear(kernels, (StoredRows(f"{prefix}.x_proj", rank + 2 * states, part),), channels, bias=False)
            for part in rows
        )
        self.norms: list[Weight | Tensor] = []
        for name, size in (("dt", rank), ("b", states), ("c", states)) if options.norms else ():
            scaled = options.norms == "scaled"
            self.norms.append(constants(f"{prefix}.{name}_layernorm.weight", size) if scaled else torch.ones(size))
        self.steps = Linear(kernels, ((f"{prefix}.dt_proj", channels),), rank, bias=False)
        self.step_bias = constants(f"{prefix}.dt_proj.bias", channels)
        self.rates = constants(f"{prefix}.A_log", states, channels, stored=(channels, states), transform=decay_rates)
        self.skip = constants(f"{prefix}.D", channels)
        self.output = Linear(kernels, ((f"{prefix}.out_proj", options.hidden_size),), channels, bias=options.bias)
        self.spec = CacheSpec(CacheKind.STATE, state=(self.conv.state, (1, states, channels)))

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size], normalised → the layer's output (+ residual), of all tokens or of `step.wanted`."""
        ops = self._kernels
        options = self.options
        rows = step.state_rows
        tail, memory = step.caches[self.index].state
        x, gate = ops.split(self.input(hidden, step), (options.channels,) * 2)
        x = self.conv(x, tail, rows)
        low = self.low(x, step)
        b, c = ops.split(self.weights_of_states(x, step), (options.states,) * 2)
        if self.norms:
            scales = [scale.value if isinstance(scale, Weight) else scale for scale in self.norms]
            low = ops.gated_rms_norm(low, None, scales[0], options.eps)
            b = ops.gated_rms_norm(b, None, scales[1], options.eps)
            c = ops.gated_rms_norm(c, None, scales[2], options.eps)
        mixed = ops.selective_scan(
            x, self.steps(low, step), self.rates.value, b, c, memory, rows, self.step_bias.value, self.skip.value, gate
        )
        return self.output(step.wanted(mixed), step, None if residual is None else step.wanted(residual))


@dataclass(frozen=True, slots=True)
class ProjectionFactors:
    """What the gate, the inputs, what states are written and read with (B and C), and the steps are multiplied by."""

    gate: float = 1.0
    inputs: float = 1.0
    write: float = 1.0
    read: float = 1.0
    steps: float = 1.0


@dataclass(frozen=True, slots=True)
class Mamba2Options:
    """What distinguishes one family's Mamba-2 from another's.

    Attributes:
        hidden_size: of the model.
        heads, head_dim: of the states.
        states: N, elements of a head's state for each of its own.
        groups: of heads that share what they read and write with.
        taps: tokens the convolution reads.
        bias, conv_bias, output_bias: of the input's projection, the convolution, the output's projection.
        norm: "gated" (the gate first), "norm first", or None for a gate alone.
        eps: of that.
        step_limits: bounds of the steps.
        factors: of the parts of the merged projection.
        output_factor: of the layer's output.
    """

    hidden_size: int
    heads: int
    head_dim: int
    states: int
    groups: int = 1
    taps: int = 4
    bias: bool = False
    conv_bias: bool = True
    output_bias: bool = False
    norm: Literal["gated", "norm first"] | None = "gated"
    eps: float = 1e-6
    step_limits: tuple[float, float] = (0.0, float("inf"))
    factors: ProjectionFactors = ProjectionFactors()
    output_factor: float = 1.0


class Mamba2Mixer(Layer):
    """Mamba-2, layer `index` of a model, with weights under `prefix`: a head's channels share a step and a rate."""

    def __init__(self, kernels: KernelSet, prefix: str, index: int, options: Mamba2Options) -> None:
        heads = options.heads
        inner = options.heads * options.head_dim
        shared = options.groups * options.states
        self._kernels = kernels
        self.index = index
        self.options = options
        self._parts, self._mixed = (inner, inner + 2 * shared, heads), (inner, shared, shared)
        factors = options.factors
        outward = np.repeat(np.array([factors.gate, 1.0, factors.steps], np.float32), self._parts)
        rows = StoredRows(f"{prefix}.in_proj", sum(self._parts), factor=outward)
        self.input = Linear(kernels, (rows,), options.hidden_size, bias=options.bias)
        inward = torch.tensor([factors.inputs, factors.write, factors.read]).repeat_interleave(
            torch.tensor(self._mixed)
        )
        self.conv = CausalConv(
            kernels, f"{prefix}.conv1d", self._parts[1], options.taps, bias=options.conv_bias, factors=inward
        )
        self.step_bias = constants(f"{prefix}.dt_bias", heads)
        self.rates = constants(f"{prefix}.A_log", heads, transform=decay_rates)
        self.skip = constants(f"{prefix}.D", heads)
        group, first = inner // options.groups, options.norm == "gated"
        key = f"{prefix}.norm.weight"
        self.norm = None
        if options.norm:
            dim = options.head_dim
            self.norm = GatedNorm(kernels, key, inner, group, options.eps, gate_first=first, segment=dim)
        rows = StoredRows(f"{prefix}.out_proj", options.hidden_size, factor=options.output_factor)
        self.output = Linear(kernels, (rows,), inner, bias=options.output_bias)
        memory = (heads, options.states, options.head_dim)
        self.spec = CacheSpec(CacheKind.STATE, state=(self.conv.state, memory))

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size], normalised → the layer's output (+ residual), of all tokens or of `step.wanted`."""
        ops, rows = self._kernels, step.state_rows
        tail, memory = step.caches[self.index].state
        gate, mixed, steps = ops.split(self.input(hidden, step), self._parts)
        x, b, c = ops.split(self.conv(mixed, tail, rows), self._mixed)
        mixed = ops.selective_scan(
            x,
            steps,
            self.rates.value,
            b,
            c,
            memory,
            rows,
            self.step_bias.value,
            self.skip.value,
            gate if self.norm is None else None,
            self.options.step_limits,
        )
        mixed = mixed if self.norm is None else self.norm(mixed, gate)
        return self.output(step.wanted(mixed), step, None if residual is None else step.wanted(residual))
