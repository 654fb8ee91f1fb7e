"""What families may state of a model and its blocks, by name and type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict, cast

from penstock.layers.attention_options import AttentionFields
from penstock.layers.batch import MaskKind
from penstock.layers.classifier import Classifier
from penstock.layers.decoder import Block, DecoderHook, FeedForward, SelfAttention
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.layers.ops import Activation
from penstock.layers.rotary import Rotary
from penstock.layers.weight import Weight
from penstock.models.block_norms import BlockNorms


class ModelFields(TypedDict, total=False):
    """What stands around the blocks.

    tie_default: whether the head is the embedding's table where the configuration does not say; no by default.
    embedding_size, embedding_scale, embedding_norm, embedding_multiplies: of the token embedding.
    positions, types, projection: of Embedding.
    soft_cap, head_bias: of the head.
    max_positions: longest sequence; by default what the configuration and the rotation say.
    ignorable, renames, mask, opening, closing: as in DecoderModel.
    classifier: makes the head of a model that classifies; by default that of causal models.
    """

    tie_default: bool
    embedding_size: int | None
    embedding_scale: float
    embedding_multiplies: bool
    embedding_norm: Norm | None
    positions: Weight | None
    types: Weight | None
    projection: Linear | None
    soft_cap: float | None
    head_bias: bool
    max_positions: int | None
    ignorable: tuple[str, ...]
    renames: tuple[tuple[str, str], ...]
    mask: MaskKind
    opening: Sequence[DecoderHook]
    closing: Sequence[DecoderHook]
    classifier: Callable[[], Classifier] | None


class LastFields(ModelFields, total=False):
    """Those, and what stands behind the blocks of a decoder.

    norm: the last one instead of the usual; logit_scale: of the logits, a factor of the usual one.
    """

    norm: Norm | None
    logit_scale: float


class DecoderFields(AttentionFields, total=False):
    """A decoder's blocks, which differ in rotation, window and feed-forward layer only; and attention's options.

    rotary: by default the configuration's; rotaries: each layer's, where they differ.
    windows: each layer's; by default full attention everywhere.
    norm: makes a norm of a key, as Blueprint's `norm` (the default) and `layer_norm` do.
    norms: where a block has norms.
    feed_forward: makes layer `index`'s; by default an MLP of this `activation`, `gated` or not, with biases if
        `mlp_bias`, or the configuration's.
    self_attention: makes layer `index`'s; the usual one where it gives None, and by default.
    around: makes what stands in the place of block `index`, of the block.
    final_norm: whether a norm follows the last block.
    model: what stands around the blocks; ignorable: as in DecoderModel.
    """

    rotary: Rotary | None
    rotaries: Sequence[Rotary] | None
    windows: Sequence[int | None] | None
    norm: Callable[..., Norm]
    norms: BlockNorms
    feed_forward: Callable[[int], FeedForward] | None
    self_attention: Callable[[int], SelfAttention | None] | None
    around: Callable[[int, Block], Block] | None
    activation: Activation | None
    gated: bool
    mlp_bias: bool | None
    final_norm: bool
    model: LastFields
    ignorable: tuple[str, ...]


def attention_fields(given: DecoderFields) -> AttentionFields:
    """Attention's among the options."""
    names = AttentionFields.__annotations__
    return cast(AttentionFields, {name: value for name, value in given.items() if name in names})


def model_fields(given: LastFields) -> ModelFields:
    """Those of the model, without what stands behind the blocks."""
    names = ModelFields.__annotations__
    return cast(ModelFields, {name: value for name, value in given.items() if name in names})
