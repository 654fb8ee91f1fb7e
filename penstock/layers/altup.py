"""Several versions of the hidden states; a layer computes one and predicts the others (AltUp, arXiv:2301.13310)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.api import KernelSet
from penstock.layers.decoder import FeedForward, SelfAttention
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.layers.per_layer_embeddings import PerLayerInput
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight

LEAST_SQUARE = 1e-5  # what a stream's mean square counts for at least where its size is matched


class AltUpInput(Layer):
    """Streams from the embedding: itself and projections of it, brought to its size; the `active` one is returned."""

    def __init__(self, kernels: KernelSet, count: int, active: int, hidden_size: int) -> None:
        self._match, self.active = kernels.match_rms, active
        names = (f"model.altup_projections.{index}" for index in range(count - 1))
        self.projections = tuple(Linear(kernels, ((name, hidden_size),), hidden_size, bias=False) for name in names)

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size] → the active stream; the step has the others."""
        streams = [hidden, *(self._match(project(hidden, step), hidden, LEAST_SQUARE) for project in self.projections)]
        active = streams.pop(self.active)
        step.streams = tuple(streams)
        return active


class AltUpOutput(Layer):
    """The sum of the first stream and of projections of the others, brought to its size."""

    def __init__(self, kernels: KernelSet, count: int, active: int, hidden_size: int) -> None:
        self._match = kernels.match_rms
        self._add = kernels.add
        self.active = active
        names = (f"model.altup_unembed_projections.{index}" for index in range(count - 1))
        self.projections = tuple(Linear(kernels, ((name, hidden_size),), hidden_size, bias=False) for name in names)

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [L, hidden_size], the active stream → the sum."""
        streams = list(step.streams)
        streams.insert(self.active, hidden)
        total = streams[0]
        for project, stream in zip(self.projections, streams[1:], strict=True):
            total = self._add(total, self._match(project(stream, step), streams[0], LEAST_SQUARE))
        return total


class AltUpCoefficients(Layer):
    """How streams are mixed at a token: a linear function of a squashed one of the active stream."""

    def __init__(self, kernels: KernelSet, norm: Norm, router: Linear, mix: Linear, shift: Tensor | None) -> None:
        """`shift` is added to the coefficients."""
        self._squash, self._linear = kernels.soft_cap, kernels.linear
        self.norm = norm
        self.router = router
        self.mix = mix
        self._shift = shift
        for linear in (router, mix):
            linear.weight.quantize_policy = "kept"
        mix.knows_tokens = False  # its product is made without it

    def __call__(self, active: Tensor, step: ForwardStep) -> Tensor:
        """active [T, hidden_size] → [T, coefficients]."""
        routed = self._squash(self.router(self.norm(active)[0], step), 1.0)
        return self._linear(routed, self.mix.weight.value, self._shift)


@dataclass(frozen=True, slots=True)
class AroundNorms:
    """The norms before and after attention and the feed-forward layer."""

    before_attention: Norm
    after_attention: Norm
    before_feed_forward: Norm
    after_feed_forward: Norm


class Laurel(Layer):
    """A learned low-rank residual: the norm of x · left · right."""

    def __init__(self, left: Linear, right: Linear, norm: Norm) -> None:
        self.left = left
        self.right = right
        self.norm = norm

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """x [T, hidden_size] → the same shape."""
        return self.norm(self.right(self.left(x, step), step))[0]


class LaurelBlock(Layer):
    """Residual block with norms around its parts and a learned low-rank residual (LAuReL, arXiv:2411.07501).

    (x + attention + laurel) / √2, then the feed-forward layer; laurel is norm(x) + the norm of its low-rank product.
    The norms after attention and of that product divide by √2.
    """

    def __init__(
        self,
        kernels: KernelSet,
        norms: AroundNorms,
        attention: SelfAttention,
        feed_forward: FeedForward,
        laurel: Laurel,
        hidden_size: int,
    ) -> None:
        self._kernels = kernels
        self.before_attention = norms.before_attention
        self.after_attention = norms.after_attention
        self.before_feed_forward = norms.before_feed_forward
        self.after_feed_forward = norms.after_feed_forward
        self.attention, self.feed_forward = attention, feed_forward
        self.laurel = laurel
        self._half = torch.full((hidden_size,), 0.5**0.5)

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size] → the same shape; in the last layer the rows of `step.wanted`."""
        add = self._kernels.add
        normed = self.before_attention(hidden)[0]
        attended = self.after_attention(self.attention(normed, step))[0]
        normed, hidden = step.wanted(normed), step.wanted(hidden)
        attended = add(attended, self.laurel(normed, step))
        normed, hidden = self.before_feed_forward(attended, self._kernels.multiply(add(hidden, normed), self._half))
        return add(hidden, self.after_feed_forward(self.feed_forward(normed, step))[0])


class AltUpBlock(Layer):
    """A block that computes the active stream; the others follow by what it changed.

    Each stream is first predicted from all; then it gets its share of the difference between the active one as
    predicted and as computed. All but the first get the layer's per-layer input.
    """

    def __init__(
        self,
        kernels: KernelSet,
        block: LaurelBlock,
        mixing: tuple[AltUpCoefficients, AltUpCoefficients],
        per_layer_input: PerLayerInput,
        *,
        count: int,
        active: int,
        scale: Weight | None,
    ) -> None:
        """mixing: what streams are predicted and corrected with.

        scale: [hidden_size] multiplies what the per-layer input is made of; None for none.
        """
        self._kernels = kernels
        self.block, self.attention = block, block.attention
        self.predict, self.correct = mixing
        self.per_layer_input, self.scale = per_layer_input, scale
        self.count, self.active = count, active

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size], the active stream → the same; in the last layer, streams of `step.wanted` rows."""
        kernels = self._kernels
        count = self.count
        active = self.active
        streams = list(step.streams)
        streams.insert(active, hidden)
        shares = kernels.split(self.predict(hidden, step), (count,) * count)
        mixed = [kernels.weighted_sum(stream, streams, share) for stream, share in zip(streams, shares, strict=True)]
        computed = self.block(mixed[active], step)
        predicted = [step.wanted(stream) for stream in mixed]
        shares = kernels.split(self.correct(computed, step), (2,) * count)
        both = (computed, predicted[active])
        streams = [kernels.weighted_sum(stream, both, share) for stream, share in zip(predicted, shares, strict=True)]
        first = streams[active] if self.scale is None else kernels.multiply(streams[active], self.scale.value)
        more = self.per_layer_input(first, step)
        streams[1:] = [kernels.add(stream, more) for stream in streams[1:]]
        hidden = streams.pop(active)
        step.streams = tuple(streams)
        return hidden
