"""Medusa's heads (Cai et al. 2024, arXiv:2401.10774): residual layers and a table each, over the last state."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor

from penstock.config.errors import CheckpointError
from penstock.layers.decoder import ModelTraits
from penstock.layers.embedding import Head, table
from penstock.layers.linear import Linear
from penstock.layers.ops import KernelSet
from penstock.layers.state_heads import StateHeads
from penstock.layers.weight import Layer
from penstock.models.blueprint import Blueprint
from penstock.models.draft_heads import TargetFacts

MOST_HEADS, MOST_LAYERS = 32, 16


class MedusaHead(Layer):
    """Logits of the token so many places on: table · z, where each layer adds silu(linear(z)) to z."""

    def __init__(
        self, kernels: KernelSet, number: int, layers: int, target: TargetFacts, names: Container[str]
    ) -> None:
        size = target.hidden_size
        self._activate, self._add = kernels.activate, kernels.add
        self.layers = tuple(
            Linear(kernels, ((f"{number}.{layer}.linear", size),), size, bias=f"{number}.{layer}.linear.bias" in names)
            for layer in range(layers)
        )
        self.logits = Head(kernels, table(kernels, f"{number}.{layers}.weight", target.vocab_size, size))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] → [n, vocab] float32."""
        for layer in self.layers:
            hidden = self._add(hidden, self._activate(layer(hidden, None), "silu"))
        return self.logits(hidden)


class MedusaHeads(StateHeads):
    """All of them."""

    def __init__(self, kernels: KernelSet, heads: tuple[MedusaHead, ...], traits: ModelTraits) -> None:
        super().__init__(kernels, heads[0].logits.weight, traits)
        self.heads, self.count = heads, len(heads)

    def guess(self, number: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As StateHeads: each reads the target's state."""
        return self.heads[number](state), state


def build(blueprint: Blueprint, target: TargetFacts, names: Container[str]) -> MedusaHeads:
    """The heads.

    Raises:
        CheckpointError: they were made for another model.
    """
    fields, kernels = blueprint.fields, blueprint.kernels
    count, layers = fields.integer("medusa_num_heads"), fields.integer("medusa_num_layers", 1)
    if count > MOST_HEADS or layers > MOST_LAYERS:
        raise CheckpointError(f"it has {count} heads of {layers} layers; allowed: {MOST_HEADS} of {MOST_LAYERS}.")
    hidden = fields.integer("hidden_size", target.hidden_size)
    vocab = fields.integer("vocab_size", target.vocab_size)
    if (hidden, vocab) != (target.hidden_size, target.vocab_size):
        raise CheckpointError(f"the heads read hidden states of {hidden} elements and guess {vocab} tokens.")
    heads = tuple(MedusaHead(kernels, number, layers, target, names) for number in range(count))
    others = (r"\d+\..*",)  # heads beyond those that the configuration counts
    traits = ModelTraits(fields.integer("max_position_embeddings"), blueprint.dtype, others)
    return MedusaHeads(kernels, heads, traits)
