"""IBM's MLP speculators (arXiv:2404.19124): a layer for each draft, or one for all."""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch import Tensor

from penstock.config.errors import CheckpointError
from penstock.layers.decoder import ModelTraits
from penstock.layers.embedding import Head, table
from penstock.layers.linear import Linear
from penstock.layers.norm import RmsNorm
from penstock.layers.ops import KernelSet
from penstock.layers.state_heads import StateHeads
from penstock.layers.weight import Layer, Weight, WeightPart
from penstock.models.blueprint import Blueprint
from penstock.models.draft_heads import TargetFacts

MOST_HEADS = 32
_EPS = 1e-6


class MlpStage(Layer):
    """gelu(norm(projected state + factor · embedding) + bias), and the logits of that."""

    def __init__(
        self, kernels: KernelSet, numbers: tuple[int, int], sizes: tuple[int, int, int], factor: float
    ) -> None:
        """`numbers` of the stage's tensors, the projection's last; `sizes` of state, stage and vocabulary."""
        number, projection = numbers
        size, vocab = sizes[1:]
        self._embedding, self._activate = kernels.embedding, kernels.activate
        self._factor = factor
        self.tokens = table(kernels, f"emb.{number}.weight", vocab, size)
        self.projection = Linear(kernels, ((f"proj.{projection}", size),), sizes[0], bias=False)
        self.norm = RmsNorm(kernels, f"ln.{number}.weight", size, _EPS)
        self.bias = Weight((size,), (WeightPart(f"ln.{number}.bias", (size,)),), keep_float32=True)
        self.logits = Head(kernels, table(kernels, f"head.{number}.weight", vocab, size))

    def __call__(self, state: Tensor, tokens: Tensor) -> Tensor:
        """state [n, taken], tokens int64 [n] → [n, size]."""
        mixed = self.projection(state, None) + self._embedding(tokens, self.tokens.value, self._factor)
        normed = (self.norm(mixed)[0].float() + self.bias.value).to(mixed.dtype)
        return self._activate(normed, "gelu")


class MlpSpeculator(StateHeads):
    """All stages; the last one stands for those behind it where they are tied."""

    def __init__(
        self, kernels: KernelSet, stages: tuple[MlpStage, ...], count: int, scaled: bool, traits: ModelTraits
    ) -> None:
        """`scaled`: the target's state is normed first."""
        super().__init__(kernels, stages[0].logits.weight, traits)
        self.stages, self.count = stages, count
        self._scaled = scaled

    def guess(self, number: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As StateHeads."""
        if self._scaled and not number:
            wide = state.float()
            state = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS) / math.sqrt(2.0)).to(state.dtype)
        stage = self.stages[min(number, len(self.stages) - 1)]
        state = stage(state, tokens)
        return stage.logits(state), state


def build(blueprint: Blueprint, target: TargetFacts, names: Container[str]) -> MlpSpeculator:
    """The speculator.

    Raises:
        CheckpointError: it was made for another model.
    """
    fields, kernels = blueprint.fields, blueprint.kernels
    count, hidden = fields.integer("n_predict"), fields.integer("emb_dim")
    vocab, size = fields.integer("vocab_size"), fields.integer("inner_dim", hidden, minimum=0) or hidden
    if count > MOST_HEADS:
        raise CheckpointError(f"it has {count} stages (n_predict); allowed: {MOST_HEADS}.")
    if (hidden, vocab) != (target.hidden_size, target.vocab_size):
        raise CheckpointError(f"it reads hidden states of {hidden} elements and guesses {vocab} tokens.")
    weight = 0.5 ** (0.5 / count)
    factor = math.sqrt((1.0 - weight**2) * size / 2.0) / weight
    tied = fields.flag("tie_weights", False)
    stages: list[MlpStage] = []
    for number in range(min(count, 2) if tied else count):  # of tied tensors a file may have any
        own = number if not tied else _stored(names, "emb", 0, count)
        projection = number if not tied or not number else _stored(names, "proj", 1, count)
        stages.append(MlpStage(kernels, (own, projection), (size if number else hidden, size, vocab), factor))
    if tied and len(stages) > 1:
        first, last = stages
        last.tokens, last.logits = first.tokens, first.logits
        last.norm, last.bias = first.norm, first.bias
    others = (r"(emb|proj|ln|head)\.\d+\..*",) if tied else ()
    traits = ModelTraits(fields.integer("max_position_embeddings"), blueprint.dtype, others, ((r"^speculator\.", ""),))
    return MlpSpeculator(kernels, tuple(stages), count, fields.flag("scale_input", False), traits)


def _stored(names: Container[str], part: str, first: int, count: int) -> int:
    """Which of several tensors that are one is in the file."""
    return next((number for number in range(first, count) if f"speculator.{part}.{number}.weight" in names), first)
