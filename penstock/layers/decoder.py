"""Transformer blocks and the model they form: a causal language model, or an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.config.cache_spec import CacheSpec
from penstock.kernels.adapters import TokenAdapters
from penstock.kernels.api import KernelSet
from penstock.layers.batch import Batch, LayerCache, MaskKind
from penstock.layers.classifier import Classifier, Projection
from penstock.layers.embedding import Embedding, Head
from penstock.layers.norm import Norm
from penstock.layers.part import FINAL, WHOLE, LayerStates, ModelPart, PartOutput, layer_input, layer_output
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight


class FeedForward(Protocol):
    """GatedMlp, SparseMoe or another layer without memory."""

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor: ...


class SelfAttention(Protocol):
    """Attention, LatentAttention or another layer that keeps something of every token."""

    @property
    def spec(self) -> CacheSpec | None:
        """What it keeps; None for one that reads another's memory."""

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor: ...


class Block(Protocol):
    """One layer of a model."""

    attention: SelfAttention

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor: ...


class DecoderHook(Protocol):
    """Called with the hidden states before the first block, or after the last."""

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor: ...


class DecoderBlock(Layer):
    """Pre-norm residual block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    The first norm is None where something before the block has normalised already.
    """

    def __init__(
        self, input_norm: Norm | None, attention: SelfAttention, middle_norm: Norm, feed_forward: FeedForward
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.middle_norm = middle_norm
        self.feed_forward = feed_forward

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size] → the same shape; in the last layer the rows of `step.wanted`."""
        normed, hidden = (hidden, hidden) if self.input_norm is None else self.input_norm(hidden)
        hidden = self.attention(normed, step, hidden)
        normed, hidden = self.middle_norm(hidden)
        return self.feed_forward(normed, step, hidden)


class MixerBlock(Layer):
    """x + mixer(norm(x)), nothing else (Mamba, arXiv:2312.00752)."""

    def __init__(self, norm: Norm, attention: SelfAttention) -> None:
        self.norm = norm
        self.attention = attention

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size] → the same shape; in the last layer the rows of `step.wanted`."""
        normed, hidden = self.norm(hidden)
        return self.attention(normed, step, hidden)


class NoMixer(Layer):
    """A feed-forward layer in the place of one that mixes tokens: it keeps nothing."""

    spec: CacheSpec | None = None

    def __init__(self, feed_forward: FeedForward) -> None:
        self.feed_forward = feed_forward

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] → the layer's output (+ residual), of all tokens or of `step.wanted`."""
        return self.feed_forward(step.wanted(hidden), step, None if residual is None else step.wanted(residual))


class ParallelMixers(Layer):
    """The sum of an attention and a recurrent layer that read the same (Falcon-H1, arXiv:2507.22448)."""

    def __init__(self, kernels: KernelSet, first: SelfAttention, second: SelfAttention) -> None:
        self._add = kernels.add
        self.first, self.second = first, second
        self.spec = first.spec

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size], normalised → the layers' sum (+ residual), of all tokens or of `step.wanted`."""
        return self._add(self.first(hidden, step, residual), self.second(hidden, step))


def _specs(mixer: SelfAttention) -> tuple[CacheSpec, ...]:
    specs = (mixer.first.spec, mixer.second.spec) if isinstance(mixer, ParallelMixers) else (mixer.spec,)
    return tuple(spec for spec in specs if spec is not None)


class SandwichBlock(Layer):
    """Residual block with a norm after each part (OLMo 2, arXiv:2501.00656), and before it (Gemma 2, arXiv:2408.00118).

    Norms are those before and after a part; None for one that is not there.
    """

    def __init__(
        self,
        kernels: KernelSet,
        attention_norms: tuple[Norm | None, Norm],
        attention: SelfAttention,
        feed_forward_norms: tuple[Norm | None, Norm],
        feed_forward: FeedForward,
    ) -> None:
        self._add = kernels.add
        self.before_attention, self.after_attention = attention_norms
        self.attention = attention
        self.before_feed_forward, self.after_feed_forward = feed_forward_norms
        self.feed_forward = feed_forward

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size] → the same shape; in the last layer the rows of `step.wanted`."""
        normed = hidden if self.before_attention is None else self.before_attention(hidden)[0]
        attended, _ = self.after_attention(self.attention(normed, step))
        hidden = step.wanted(hidden)
        if self.before_feed_forward is None:
            normed = hidden = self._add(hidden, attended)
        else:
            normed, hidden = self.before_feed_forward(attended, hidden)
        fed, _ = self.after_feed_forward(self.feed_forward(normed, step))
        return self._add(hidden, fed)


class PostNormBlock(Layer):
    """norm(x + attention(x)), then norm(x + feed_forward(x)), as at first (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(
        self, attention: SelfAttention, attention_norm: Norm, feed_forward: FeedForward, feed_forward_norm: Norm
    ) -> None:
        self.attention = attention
        self.attention_norm = attention_norm
        self.feed_forward = feed_forward
        self.feed_forward_norm = feed_forward_norm

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size] → the same shape; in the last layer the rows of `step.wanted`."""
        hidden, _ = self.attention_norm(self.attention(hidden, step, hidden))
        return self.feed_forward_norm(self.feed_forward(hidden, step, hidden))[0]


class ParallelBlock(Layer):
    """x + attention(norm(x)) + feed_forward(norm(x)) (GPT-J); the feed-forward layer may have a norm of its own."""

    def __init__(
        self, norm: Norm, attention: SelfAttention, feed_forward_norm: Norm | None, feed_forward: FeedForward
    ) -> None:
        self.norm = norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size] → the same shape; in the last layer the rows of `step.wanted`."""
        normed, _ = self.norm(hidden)
        attended = self.attention(normed, step, hidden)
        if self.feed_forward_norm is None:
            return self.feed_forward(step.wanted(normed), step, attended)
        return self.feed_forward(self.feed_forward_norm(step.wanted(hidden))[0], step, attended)


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What is known of a model besides its layers.

    Attributes:
        max_positions: longest sequence the configuration supports.
        dtype: compute dtype.
        ignorable: regular expressions of checkpoint tensors that are rightly left over.
        renames: (regular expression for part of a checkpoint's name, what stands here instead), applied one by one.
        mask: which tokens a row's queries see.
        position_axes: P of the batch's positions.
        media_levels: of hidden states that media give: the first replaces placeholders' embeddings, others are added
            behind the first layers; 0 for models that take no media.
    """

    max_positions: int
    dtype: torch.dtype
    ignorable: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    mask: MaskKind = MaskKind.CAUSAL
    position_axes: int = 1
    media_levels: int = 0


@dataclass(frozen=True, slots=True)
class Heads:
    """What stands above the last layer.

    Attributes:
        logits: None for models that only embed or classify.
        classifier: the classification head, None for models without.
        projection: what sentence embeddings pass once they are pooled, None for nothing.
    """

    logits: Head | None = None
    classifier: Classifier | None = None
    projection: Projection | None = None


@dataclass(frozen=True, slots=True)
class DecoderHooks:
    """Hooks called in order: `opening` after the embedding, `closing` after the last block."""

    opening: tuple[DecoderHook, ...] = ()
    closing: tuple[DecoderHook, ...] = ()


NO_HOOKS = DecoderHooks()


class DecoderModel(Layer):
    """A causal language model, or an encoder.

    Attributes:
        cache_specs: one per layer that keeps something, in order; two of those that mix in two ways.
        norm: what follows the last block and its hooks; None where the last block's own norm does.
        head, classifier, projection: as in Heads.
        mask, max_positions, dtype, ignorable, renames, position_axes, media_levels: as in ModelTraits.
        opening, closing: as in DecoderHooks.
        directions: what is added to the hidden states behind blocks, [hidden_size] float32 by number; none unless
            control vectors are asked for.
        kept_whole: kinds of layers that every rank computes, of those that compute the model, and why.
        vocab_size: rows of the embedding, and of the logits.
        part: what of it is loaded, where the rest is computed elsewhere.
        runs: what computes it, for people, where layers of this package do not.
        takes: elements of the hidden states that it is given with each token, of heads that draft; else 0.
    """

    runs: str = ""
    takes: int = 0
    part: ModelPart = WHOLE

    def __init__(
        self,
        kernels: KernelSet,
        embedding: Embedding,
        blocks: Sequence[Block],
        norm: Norm | None,
        heads: Heads,
        traits: ModelTraits,
        hooks: DecoderHooks = NO_HOOKS,
    ) -> None:
        self.kernels = kernels
        self.embedding = embedding
        self.opening, self.closing = hooks.opening, hooks.closing
        self.blocks = tuple(blocks)
        self.directions: dict[int, Tensor] = {}
        self.kept_whole: dict[str, str] = {}
        self.norm = norm
        self.head = heads.logits
        self.declare_caches()
        self.classifier = heads.classifier
        self.projection = heads.projection
        self.mask = traits.mask
        self.position_axes, self.media_levels = traits.position_axes, traits.media_levels
        self.vocab_size = embedding.weight.shape[0]
        self.max_positions = traits.max_positions
        self.dtype = traits.dtype
        self.ignorable = traits.ignorable
        self.renames = traits.renames

    def declare_caches(self) -> None:
        """Collects what the layers keep."""
        self.cache_specs: tuple[CacheSpec, ...] = tuple(
            spec for block in self.blocks for spec in _specs(block.attention)
        )

    def weights(self) -> Iterator[Weight]:
        """Those of its part."""
        yield from self.weights_of(self.part)

    def weights_of(self, part: ModelPart) -> Iterator[Weight]:
        """Those of a part: embedding and what pools belong to the first layer, the norm to the last."""
        if part is WHOLE:
            yield from super().weights()
            return
        held = {id(weight) for layer in self._layers_of(part) for weight in layer.weights()}
        yield from (weight for weight in super().weights() if id(weight) in held)

    def held(self) -> Iterator[Layer]:
        """The layers of its part, without those below them."""
        return self._layers_of(self.part)

    def _layers_of(self, part: ModelPart) -> Iterator[Layer]:
        layers: list[object] = list(self.blocks[part.first : part.end])
        if part.first == 0:
            layers += (self.embedding, *self.opening, self.classifier, self.projection)
        if part.end is None:
            layers += (*self.closing, self.norm)
        if part.with_head:
            layers.append(self.head)
        yield from (layer for layer in layers if isinstance(layer, Layer))

    def load_from(self, folder: Path) -> bool:
        """Whether the model reads its weights itself, and has done so now."""
        return False

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt is computed in one step: its tokens see those after them."""
        return self.mask is not MaskKind.CAUSAL

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """Runs the step and writes its keys and values to `caches` (one an attention layer).

        Returns:
            [L, hidden_size] of the tokens `batch.logit_rows`.
        """
        return self.run(batch, caches).states.hidden

    @torch.inference_mode()
    def run(
        self, batch: Batch, caches: Sequence[LayerCache], part: ModelPart = WHOLE, given: LayerStates | None = None
    ) -> PartOutput:
        """Runs a part of the model on a step; `given` is what its first layer takes, None where that is layer 0.

        Raises:
            ValueError: the model has no such part.
        """
        part.check(len(self.blocks))
        if (given is None) != (part.first == 0 and not self.takes):
            raise ValueError(f"layers from {part.first} on take {'the tokens' if given else 'what those before give'}")
        step, taps = ForwardStep(batch, caches, self.kernels, scored=part.scored), dict[str, Tensor]()

        def tap(name: str, hidden: Tensor) -> None:
            if name in part.taps:
                taps[name] = hidden

        hidden = self._begin(step, given)
        end = len(self.blocks) if part.end is None else part.end
        for index in range(part.first, end):
            if part.taps:
                tap(layer_input(index), hidden)
            step.last = index == len(self.blocks) - 1
            hidden = self.blocks[index](hidden, step)
            if index in self.directions:
                hidden = self.kernels.add(hidden, self.directions[index])
            if index + 1 < self.media_levels:
                hidden = step.inject(hidden, index + 1)
            if part.taps:
                tap(layer_output(index), hidden)
        if part.end is not None:
            return PartOutput(LayerStates(hidden, step.streams, step.per_layer_embeddings), taps, step.scores)
        for layer in self.closing:
            hidden = layer(hidden, step)
        hidden = hidden if self.norm is None else self.norm(hidden)[0]
        tap(FINAL, hidden)
        return PartOutput(LayerStates(hidden), taps, step.scores)

    def _begin(self, step: ForwardStep, given: LayerStates | None) -> Tensor:
        """What the first layer of a part takes: what is given, or the embedding's."""
        if given is not None:
            step.streams, step.per_layer_embeddings = given.streams, given.per_layer_embeddings
            return given.hidden
        hidden = self.embedding(step.batch)
        if self.media_levels:
            hidden = step.inject(hidden, 0)
        for layer in self.opening:
            hidden = layer(hidden, step)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Rows int64 of `forward`'s hidden [L, hidden_size] → [rows, vocab_size] float32; `adapters` of these rows."""
        assert self.head is not None  # models without one are asked for hidden states
        return self.head(self.kernels.take_rows(hidden, rows), adapters)
