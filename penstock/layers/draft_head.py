"""Heads that draft for a model from its hidden states: layers of the same kinds that read two things, not one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from penstock.kernels.api import KernelSet
from penstock.layers.decoder import Block, DecoderModel, FeedForward, Heads, ModelTraits, SelfAttention
from penstock.layers.embedding import Embedding, Head
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm, RmsNorm
from penstock.layers.part import FINAL, LayerStates, layer_output
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight


def _columns(matrix: Tensor, begin: int, count: int) -> Tensor:
    return matrix[:, begin : begin + count]


def _half(weight: Weight, begin: int, inputs: int) -> Weight:
    """The weight of these columns of matrices that have twice as many."""
    cut = partial(_columns, begin=begin, count=inputs)
    parts = tuple(replace(part, shape=(part.shape[0], 2 * inputs), transform=cut) for part in weight.parts)
    return replace(weight, parts=parts, alternatives=())


class PairedLinear(Linear):
    """y = [s, x] · Wᵀ + b, where s is the step's first stream: a sum of two products, so that no pair is laid together.

    s and x [T, inputs], W [outputs, 2 · inputs]; of [x, s] where they are `swapped`.
    """

    def __init__(
        self,
        kernels: KernelSet,
        parts: Sequence[tuple[str, int]],
        inputs: int,
        *,
        bias: bool,
        swapped: bool = False,
    ) -> None:
        super().__init__(kernels, parts, inputs, bias=bias)
        self.first = _half(self.weight, inputs if swapped else 0, inputs)
        self.weight = _half(self.weight, 0 if swapped else inputs, inputs)

    def __call__(self, x: Tensor, step: ForwardStep | None, residual: Tensor | None = None) -> Tensor:
        """x [T, inputs] → [T, outputs]."""
        assert step is not None and residual is None
        return super().__call__(x, step, self._linear(step.streams[0], self.first.value))


class PairedBlock(Layer):
    """EAGLE-3's first layer (arXiv:2503.01840): attention reads the token's embedding and a hidden state, each normed.

    What is added to attention's output is the hidden state, or its norm.
    """

    def __init__(
        self,
        norms: tuple[Norm, Norm],
        attention: SelfAttention,
        middle_norm: Norm,
        feed_forward: FeedForward,
        normed_residual: bool,
    ) -> None:
        self.input_norm, self.hidden_norm = norms
        self.attention = attention
        self.middle_norm = middle_norm
        self.feed_forward = feed_forward
        self._normed_residual = normed_residual

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size], the embedding in the step's first stream → hidden of all, or of `step.wanted`."""
        step.streams = (self.input_norm(step.streams[0])[0],)
        normed, hidden = self.hidden_norm(hidden)
        hidden = self.attention(normed, step, normed if self._normed_residual else hidden)
        normed, hidden = self.middle_norm(hidden)
        return self.feed_forward(normed, step, hidden)


Entry = Callable[[Tensor, Tensor, ForwardStep], Tensor]
"""Embeddings [T, hidden_size] and given hidden states [T, takes] → what the first layer takes."""


def beside(embedding: Tensor, given: Tensor, step: ForwardStep) -> Tensor:
    """The entry of a head whose first layer reads both."""
    step.streams = (embedding,)
    return given


class Merge(Layer):
    """The entry of heads that begin with one projection of both, normed where there are norms (DeepSeek-V3, EAGLE)."""

    def __init__(self, embedding_norm: Norm | None, hidden_norm: Norm | None, projection: PairedLinear) -> None:
        self.embedding_norm, self.hidden_norm = embedding_norm, hidden_norm
        self.projection = projection

    def __call__(self, embedding: Tensor, given: Tensor, step: ForwardStep) -> Tensor:
        """As Entry."""
        step.streams = (embedding if self.embedding_norm is None else self.embedding_norm(embedding)[0],)
        return self.projection(given if self.hidden_norm is None else self.hidden_norm(given)[0], step)


class Fusion(Layer):
    """The target's hidden states, side by side, as one that a head reads; normed first where there is a norm."""

    def __init__(self, norm: Norm | None, projection: Linear) -> None:
        self.norm, self.projection = norm, projection

    def __call__(self, states: Tensor) -> Tensor:
        """states [T, inputs] → [T, outputs]."""
        return self.projection(states if self.norm is None else self.norm(states)[0], None)


@dataclass(frozen=True, slots=True)
class Given:
    """What a head is given beside tokens.

    Attributes:
        takes: elements of it with each token.
        entry: what becomes of it.
        fusion: makes it of the target's hidden states, side by side; None where it is the state itself.
        after_norm: what is given with a draft is what its logits are made of, not what the head's norm is given.
        normed: there is a last norm, of the head or its target; else logits are made of what the last layer gives.
    """

    takes: int
    entry: Entry
    fusion: Fusion | None = None
    after_norm: bool = False
    normed: bool = True


class DraftHead(DecoderModel):
    """A head: as a model, but that it is given hidden states beside tokens, and may use its target's tables.

    Attributes:
        takes, fusion: as in Given.
        chained: the tap of what is given with the token that it drafts.
    """

    def __init__(
        self,
        kernels: KernelSet,
        tables: tuple[Weight, Weight],
        shares: tuple[bool, bool],
        blocks: Sequence[Block],
        norm: Norm | None,
        traits: ModelTraits,
        given: Given,
    ) -> None:
        """`tables`: of tokens, and of logits; `shares`: which of them are its target's, so that they are not loaded, as
        the last norm where it is None."""
        head = Head(kernels, tables[1])
        super().__init__(kernels, Embedding(kernels, tables[0]), blocks, norm, Heads(head), traits)
        self._entry = given.entry
        self._shares = shares
        self._shared = tuple(table for table, shared in zip(tables, shares, strict=True) if shared)
        self.takes, self.fusion = given.takes, given.fusion
        self._normed = given.normed
        self.chained = FINAL if given.after_norm else layer_output(len(self.blocks) - 1)

    def share(self, target: DecoderModel) -> None:
        """Takes those tables of its target that it has not itself, and the last norm."""
        assert target.head is not None
        embedding, logits = self._shares
        if embedding:
            self.embedding.weight = target.embedding.weight
        if logits:
            self.head = target.head
        self._shared = (target.embedding.weight, *([target.head.weight] if logits else []))
        if logits and target.head.bias is not None:
            self._shared = (*self._shared, target.head.bias)
        if self.norm is None and self._normed and isinstance(target.norm, RmsNorm):
            self.norm = target.norm
            self._shared = (*self._shared, *target.norm.weights())

    def weights(self) -> Iterator[Weight]:
        """Those that are its own."""
        shared = {id(weight) for weight in self._shared}
        return (weight for weight in super().weights() if id(weight) not in shared)

    def _begin(self, step: ForwardStep, given: LayerStates | None) -> Tensor:
        assert given is not None
        return self._entry(self.embedding(step.batch), given.hidden, step)
