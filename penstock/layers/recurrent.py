"""What recurrent mixers share: their convolution, their constants and their gated norm; and the gated convolution."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.kernels.api import KernelSet
from penstock.kernels.cache import StateRows
from penstock.layers.linear import Linear
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight, WeightPart


def constants(
    key: str,
    *shape: int,
    stored: tuple[int, ...] | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
) -> Weight:
    """A tensor that stays in float32, in the checkpoint of shape `stored` where that differs."""
    return Weight(shape, (WeightPart(key, stored or shape, transform=transform),), keep_float32=True)


def decay_rates(stored: Tensor) -> Tensor:
    """The rates whose logarithms checkpoints keep, negative; those of channels [C, N] as [N, C]."""
    rates = -stored.float().exp()
    return rates if rates.dim() == 1 else rates.t().contiguous()


class CausalConv(Layer):
    """A depthwise convolution over the last `taps` tokens, with weights `<prefix>.weight` and perhaps `<prefix>.bias`.

    `factors` [channels] multiply what it reads.
    """

    def __init__(
        self,
        kernels: KernelSet,
        prefix: str,
        channels: int,
        taps: int,
        *,
        bias: bool,
        silu: bool = True,
        factors: Tensor | None = None,
    ) -> None:
        self._conv, self._silu = kernels.short_conv, silu
        self.state = (taps - 1, channels)

        def by_token(stored: Tensor) -> Tensor:
            """[C, 1, W] → [W, C]."""
            weight = stored.reshape(channels, taps).t().float()
            return (weight if factors is None else weight * factors.to(weight.device)).contiguous()

        self.weight = constants(f"{prefix}.weight", taps, channels, stored=(channels, 1, taps), transform=by_token)
        self.bias = constants(f"{prefix}.bias", channels) if bias else None

    def __call__(
        self, x: Tensor, state: Tensor, rows: StateRows, before: Tensor | None = None, after: Tensor | None = None
    ) -> Tensor:
        """x [T, channels] → the same shape; `before` and `after` as in kernels.api.ShortConv."""
        bias = None if self.bias is None else self.bias.value
        return self._conv(x, self.weight.value, bias, state, rows, "silu" if self._silu else None, before, after)


class GatedNorm(Layer):
    """RMS norm of every `group` elements with a SiLU gate; a scale of fewer than `size` elements is used repeatedly."""

    def __init__(
        self,
        kernels: KernelSet,
        key: str,
        size: int,
        group: int,
        eps: float,
        *,
        gate_first: bool,
        shared: bool = False,
        segment: int = 0,
    ) -> None:
        """`segment`: as in kernels.api.GatedRmsNorm."""
        self._norm, self._segment = kernels.gated_rms_norm, segment
        self._group = group
        self._eps = eps
        self._gate_first = gate_first
        stored = (group if shared else size,)
        self.weight = constants(key, size, stored=stored, transform=lambda scale: scale.repeat(size // stored[0]))

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, size] → the same shape."""
        return self._norm(x, gate, self.weight.value, self._eps, self._group, self._gate_first, self._segment)


class ShortConvMixer(Layer):
    """LFM2's gated short convolution (arXiv:2511.23404), layer `index` of a model, with weights under `prefix`."""

    def __init__(
        self, kernels: KernelSet, prefix: str, index: int, hidden_size: int, taps: int, *, bias: bool = False
    ) -> None:
        self._split = kernels.split
        self.index = index
        self._size = hidden_size
        self.input = Linear(kernels, ((f"{prefix}.in_proj", 3 * hidden_size),), hidden_size, bias=bias)
        self.conv = CausalConv(kernels, f"{prefix}.conv", hidden_size, taps, bias=bias, silu=False)
        self.output = Linear(kernels, ((f"{prefix}.out_proj", hidden_size),), hidden_size, bias=bias)
        self.spec = CacheSpec(CacheKind.STATE, state=(self.conv.state,))

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size], normalised → the layer's output (+ residual), of all tokens or of `step.wanted`."""
        before, after, x = self._split(self.input(hidden, step), (self._size,) * 3)
        mixed = self.conv(x, step.caches[self.index].state[0], step.state_rows, before, after)
        return self.output(step.wanted(mixed), step, None if residual is None else step.wanted(residual))
