"""Recurrent drafters (ReDrafter, arXiv:2403.09919): a state over what was drafted, beside the target's state."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from penstock.config.errors import CheckpointError
from penstock.config.speculation import MOST_DRAFTS
from penstock.layers.decoder import DecoderModel, ModelTraits
from penstock.layers.embedding import Head, table
from penstock.layers.linear import Linear
from penstock.layers.ops import KernelSet
from penstock.layers.state_heads import StateHeads
from penstock.layers.weight import Weight
from penstock.models.blueprint import Blueprint
from penstock.models.draft_heads import TargetFacts

MOST_LAYERS = 16


class ReDrafter(StateHeads):
    """Logits of residual layers over both states; embeddings are the target's.

    The recurrent state is silu(W · embedding + U · state + b), or the sum of embeddings where it is not trained.
    """

    count = MOST_DRAFTS

    def __init__(
        self, kernels: KernelSet, target: TargetFacts, exit_size: int, layers: int, recurrent: bool, traits: ModelTraits
    ) -> None:
        logits, size = table(kernels, f"lm_head.{layers}.weight", target.vocab_size, exit_size), target.hidden_size
        super().__init__(kernels, logits, traits)
        self._kernels = kernels
        entry = None if 2 * size == exit_size else Linear(kernels, (("input_proj", exit_size),), 2 * size, bias=True)
        self.entry = entry
        self.layers = tuple(
            Linear(kernels, ((f"lm_head.{layer}.linear", exit_size),), exit_size, bias=True) for layer in range(layers)
        )
        self.last = Head(kernels, logits)
        self.moves = Linear(kernels, (("rnn_u", size),), size, bias=True) if recurrent else None
        self.reads = Linear(kernels, (("rnn_w", size),), size, bias=False) if recurrent else None

    def share(self, target: DecoderModel) -> None:
        """As StateHeads: its embeddings."""
        self._embed = partial(_rows, self._kernels, target.embedding.weight)

    def guess(self, number: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As StateHeads: what goes on is the target's state and the recurrent one, side by side."""
        size = state.shape[1] if not number else state.shape[1] // 2
        context = state[:, :size].contiguous()
        before = state[:, size:].contiguous() if number else torch.zeros_like(context)
        read = self._embed(tokens)
        if self.moves is None or self.reads is None:
            after = read + before
        else:
            after = self._kernels.activate(self.reads(read, None, self.moves(before, None)), "silu")
        both = torch.cat((context, after), dim=1)
        hidden = both if self.entry is None else self.entry(both, None)
        for layer in self.layers:
            hidden = self._kernels.add(hidden, self._kernels.activate(layer(hidden, None), "silu"))
        return self.last(hidden), both


def build(blueprint: Blueprint, target: TargetFacts) -> ReDrafter:
    """The drafter.

    Raises:
        CheckpointError: it was made for another model.
    """
    fields = blueprint.fields
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    if (hidden, vocab) != (target.hidden_size, target.vocab_size):
        raise CheckpointError(f"it reads hidden states of {hidden} elements and guesses {vocab} tokens.")
    if (layers := fields.integer("num_draft_layers", minimum=0)) > MOST_LAYERS:
        raise CheckpointError(f"it has {layers} layers (num_draft_layers); allowed: {MOST_LAYERS}.")
    traits = ModelTraits(fields.integer("max_position_embeddings"), blueprint.dtype)
    size = fields.integer("exit_dim")
    return ReDrafter(blueprint.kernels, target, size, layers, fields.flag("rnn", False), traits)


def _rows(kernels: KernelSet, weight: Weight, tokens: Tensor) -> Tensor:
    return kernels.embedding(tokens, weight.value, 1.0)
