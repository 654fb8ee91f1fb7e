"""Heads that draft from the target's last state alone: they keep nothing of other tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from penstock.kernels.api import KernelSet
from penstock.layers.decoder import DecoderModel, Heads, ModelTraits
from penstock.layers.embedding import Embedding
from penstock.layers.weight import Weight


class StateHeads(DecoderModel, ABC):
    """One draft after the other; of a model they have nothing else.

    Attributes:
        count: drafts that there are at most.
    """

    count: int

    def __init__(self, kernels: KernelSet, vocab: Weight, traits: ModelTraits) -> None:
        """`vocab`: a table with a row for each token."""
        super().__init__(kernels, Embedding(kernels, vocab), (), None, Heads(), traits)
        del self.embedding  # made of `vocab` to know its size

    def share(self, target: DecoderModel) -> None:
        """Takes what of its target it computes with: nothing."""

    @abstractmethod
    def guess(self, number: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Draft `number` of several sequences.

        Args:
            number: 0 for the first.
            state: what the draft before gave, [n, any]; for the first the target's, [n, hidden_size].
            tokens: the last ones, int64 [n].

        Returns:
            Logits [n, vocab] float32, and what the next draft is made of.
        """
