"""Per-layer embeddings: every layer is given a small vector of its own for each token (Gemma 3n, Google 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.kernels.api import Activation, KernelSet
from penstock.layers.decoder import Block
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm, scale_weight
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight, WeightPart


class PerLayerEmbeddings(Layer):
    """The vectors of all layers, [T, layers · size]: a table's rows plus a normalised projection of the embedding.

    Tokens beyond the table have its first row.
    """

    def __init__(
        self, kernels: KernelSet, layers: int, size: int, *, hidden_size: int, vocab: int, stored: int, eps: float
    ) -> None:
        """`stored` rows are in the checkpoint's table, `vocab` tokens look them up."""
        self._kernels = kernels
        self.size, self.layers = size, layers
        half = 0.5**0.5
        self.scale, self.eps = half * size**0.5, eps * hidden_size  # the projection is scaled by hidden_size ** -0.5
        order = None if stored == vocab else np.where(np.arange(vocab) < stored, np.arange(vocab), 0)
        part = WeightPart("model.embed_tokens_per_layer.weight", (stored, layers * size), rows=order)
        pack, packable = kernels.pack_table, kernels.packable
        self.table = Weight((vocab, layers * size), (part,), pack=pack, packable=packable, quantize_policy="eight bits")
        parts = (("model.per_layer_model_projection", layers * size),)
        self.projection = Linear(kernels, parts, hidden_size, bias=False)
        key = "model.per_layer_projection_norm.weight"
        scales = scale_weight(key, size, around_one=False, repeat=layers, factor=half)
        self.norm = Weight((layers, size), (scales,), keep_float32=True)

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size], the embedding → the same; the step has the vectors."""
        kernels = self._kernels
        rows = kernels.embedding(step.batch.token_ids, self.table.value, self.scale)
        scales = self.norm.value.view(-1)
        projected = kernels.gated_rms_norm(self.projection(hidden, step), None, scales, self.eps, self.size)
        step.per_layer_embeddings = kernels.add(projected, rows)
        return hidden


@dataclass(frozen=True, slots=True)
class PerLayerSizes:
    """Elements of the hidden states, of one vector, and how many layers have one."""

    hidden: int
    size: int
    layers: int


class PerLayerInput(Layer):
    """What layer `index` makes of its vector and the hidden states: norm(projection(activation(gate(x)) · vector))."""

    def __init__(
        self, kernels: KernelSet, index: int, sizes: PerLayerSizes, activation: Activation, norm: Norm
    ) -> None:
        self._kernels = kernels
        self.index, self.activation = index, activation
        hidden = sizes.hidden
        self.size = sizes.size
        self.layers = sizes.layers
        prefix = f"model.layers.{index}"
        self.gate = Linear(kernels, ((f"{prefix}.per_layer_input_gate", self.size),), hidden, bias=False)
        self.projection = Linear(kernels, ((f"{prefix}.per_layer_projection", hidden),), self.size, bias=False)
        self.norm = norm

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size] → what is added to it; in the last layer both of `step.wanted` rows."""
        assert step.per_layer_embeddings is not None
        kernels = self._kernels
        own = kernels.split(step.wanted(step.per_layer_embeddings), (self.size,) * self.layers)[self.index]
        gate = kernels.activate(self.gate(hidden, step), self.activation)
        return self.norm(self.projection(kernels.multiply(gate, own), step))[0]


class PerLayerInputBlock(Layer):
    """A block, then its per-layer input is added, if there is one, then all is multiplied by a learned number."""

    def __init__(self, kernels: KernelSet, block: Block, per_layer_input: PerLayerInput | None, scale: Weight) -> None:
        """scale: [hidden_size], all equal."""
        self._kernels = kernels
        self.block, self.attention = block, block.attention
        self.per_layer_input, self.scale = per_layer_input, scale

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size] → the same shape; in the last layer the rows of `step.wanted`."""
        hidden = self.block(hidden, step)
        if self.per_layer_input is not None:
            hidden = self._kernels.add(hidden, self.per_layer_input(hidden, step))
        return self._kernels.multiply(hidden, self.scale.value)
