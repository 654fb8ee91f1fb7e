"""What decoder families share: sizes from the configuration, and the layers built from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from penstock.layers.attention import Attention
from penstock.layers.attention_options import AttentionFields, AttentionOptions, grouped_options
from penstock.layers.batch import MaskKind
from penstock.layers.classifier import Classifier, Dense, Projection
from penstock.layers.decoder import (
    Block,
    DecoderBlock,
    DecoderHooks,
    DecoderModel,
    FeedForward,
    Heads,
    MixerBlock,
    ModelTraits,
    ParallelBlock,
    PostNormBlock,
    SandwichBlock,
    SelfAttention,
)
from penstock.layers.embedding import Embedding, Head, table
from penstock.layers.mlp import USUAL, GatedMlp, MlpVariant, PlainMlp
from penstock.layers.norm import LayerNorm, Norm, RmsNorm
from penstock.layers.ops import Activation, KernelSet
from penstock.layers.rotary import RopeParameters, Rotary, Temperature
from penstock.layers.weight import Weight, WeightPart
from penstock.models.block_norms import MIXER_ALONE, PRE_NORM, BlockNorms
from penstock.models.family_facts import PLAIN, FamilyFacts, rope_layers
from penstock.models.fields import Fields
from penstock.models.options import DecoderFields, ModelFields, attention_fields, model_fields
from penstock.models.rope import context_length, read_rope

ACTIVATIONS: MappingProxyType[str, Activation] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu2",
    }
)
DENSE_ACTIVATIONS: MappingProxyType[str, Callable[[Tensor], Tensor] | None] = MappingProxyType(
    {"Identity": None, "Tanh": torch.tanh, "GELU": functional.gelu, "ReLU": torch.relu, "SiLU": functional.silu}
)
MOST_HEAD_DIM, MOST_INTERMEDIATE = 1 << 16, 1 << 24  # constants of these sizes are made before weights are looked at
BARE = ((r"^(embed_tokens|layers|norm)\.", r"model.\1."),)  # saved without a head
NESTED = (  # the text model inside a vision-language one, in an old and a new spelling
    (r"^language_model\.(model|lm_head)\.", r"\1."),
    (r"^model\.language_model\.", "model."),
)
LEFT_OVER = (
    r".*\.rotary_emb\.inv_freq",
    r"mtp\..*",  # layers that draft (models.mtp)
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector|mm_projector)\..*",
)
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
NO_ROPE = Rotary(RopeParameters("none", 1.0, 2, 1), 1)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A configuration that becomes a model.

    Attributes:
        fields: the configuration of the text model.
        kernels, dtype: what the model computes with.
        max_model_len: longest sequence that will be served, if known (only "dynamic" rope depends on it).
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, norm_eps: of the configuration, checked.
        head: what stands above the last layer: "logits", "labels" (a classifier) or "none".
        facts: what the family's configurations say of layers.
    """

    fields: Fields
    kernels: KernelSet
    dtype: torch.dtype
    max_model_len: int | None
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    head: str = "logits"
    facts: FamilyFacts = PLAIN

    @classmethod
    def read(
        cls,
        fields: Fields,
        kernels: KernelSet,
        dtype: torch.dtype,
        max_model_len: int | None = None,
        head: str = "logits",
        facts: FamilyFacts = PLAIN,
    ) -> Blueprint:
        """Reads the sizes.

        Raises:
            CheckpointError: one is missing or contradicts another.
        """
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} attention heads")
        if not fields.has("head_dim") and hidden % heads:
            raise fields.error("hidden_size", f"is {hidden}, which {heads} attention heads do not divide")
        head_dim = fields.integer("head_dim", hidden // heads, most=MOST_HEAD_DIM)
        layers = fields.integer("num_hidden_layers")
        if fields.has("layer_types"):  # also where the family has no use for them
            fields.texts("layer_types", layers)
        eps = fields.number(next((name for name in EPSILONS if fields.has(name)), EPSILONS[0]), 1e-6)
        return cls(fields, kernels, dtype, max_model_len, hidden, layers, heads, kv_heads, head_dim, eps, head, facts)

    def with_defaults(self, **values: Any) -> Blueprint:
        """The same with these fields where the configuration has none, or null."""
        stated = {name: value for name, value in self.fields.values.items() if value is not None}
        return replace(self, fields=Fields({**values, **stated}, self.fields.where))

    def rotary(self, **settings: Any) -> Rotary:
        """The rotation, read with `models.rope.read_rope`."""
        rope = read_rope(self.fields, self.head_dim, **settings)
        longest = context_length(self.fields, rope, self.max_model_len)
        return Rotary(rope, longest if self.max_model_len is None else min(longest, self.max_model_len))

    def activation(self, field: str = "hidden_act", default: str = "silu") -> Activation:
        return self.fields.choice(field, ACTIVATIONS, default)

    def temperature(self) -> Temperature | None:
        """How queries grow beyond the original length (Ministral 3), None where the configuration does not say."""
        rope = self.fields.below("rope_parameters")
        if rope is None or not rope.has("llama_4_scaling_beta"):
            return None
        return Temperature(rope.integer("original_max_position_embeddings"), rope.number("llama_4_scaling_beta"))

    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window, None for full attention."""
        return self.facts.windows(self.fields, self.num_layers)

    def slots(self, windows: Sequence[int | None]) -> tuple[int, ...]:
        """Each layer's memory: its own; for the last `num_kv_shared_layers`, of the last before them with their window.

        Raises:
            CheckpointError: there is no such layer.
        """
        count = self.fields.integer("num_kv_shared_layers", 0, minimum=0)
        own = self.num_layers - count
        last = {window: index for index, window in enumerate(windows[: max(own, 0)])}
        if missing := [index for index in range(max(own, 0), self.num_layers) if windows[index] not in last]:
            problem = (
                f"is {count}, but before the last {count} of {self.num_layers} layers none is of the kind of layer"
            )
            raise self.fields.error("num_kv_shared_layers", f"{problem} {missing[0]}")
        return tuple(index if index < own else last[windows[index]] for index in range(self.num_layers))

    def recurrent(self) -> tuple[bool, ...]:
        """Whether each layer is recurrent instead of attending."""
        return tuple(not attends for attends in self.facts.attends(self.fields, self.num_layers))

    def rope_layers(self) -> tuple[bool, ...]:
        """Per layer whether it rotates."""
        return rope_layers(self.fields, self.num_layers)

    def norm(self, key: str, **options: Any) -> RmsNorm:
        return RmsNorm(self.kernels, f"{key}.weight", self.hidden_size, self.norm_eps, **options)

    def layer_norm(self, key: str, **options: Any) -> LayerNorm:
        return LayerNorm(self.kernels, key, self.hidden_size, self.norm_eps, **options)

    def attention(
        self, index: int, rotary: Rotary, slot: int | None = None, **options: Unpack[AttentionFields]
    ) -> Attention:
        """Layer `index`'s attention, its keys and values in memory `slot`.

        The configuration's `attention_bias` tells of biases that no option tells of.
        """
        bias = self.fields.flag("attention_bias", False)
        usual: AttentionFields = {"norm_eps": self.norm_eps, "qkv_bias": bias, "output_bias": bias}
        settings = AttentionOptions(
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            rotary,
            **grouped_options({**usual, **options}),
        )
        return Attention(self.kernels, f"model.layers.{index}.self_attn", index if slot is None else slot, settings)

    def mlp(
        self,
        index: int,
        *,
        activation: Activation | None = None,
        bias: bool | None = None,
        gated: bool = True,
        size: int | None = None,
        name: str = "mlp",
        variant: MlpVariant = USUAL,
    ) -> FeedForward:
        """Layer `index`'s MLP, of the configuration's size and biases unless told; `variant` of one that is gated."""
        key, size = (
            f"model.layers.{index}.{name}",
            size or self.fields.integer("intermediate_size", most=MOST_INTERMEDIATE),
        )
        activation = activation or self.activation()
        bias = self.fields.flag("mlp_bias", False) if bias is None else bias
        if not gated:
            return PlainMlp(self.kernels, key, self.hidden_size, size, activation=activation, bias=bias)
        return GatedMlp(self.kernels, key, self.hidden_size, size, activation=activation, bias=bias, variant=variant)

    def decoder(self, **options: Unpack[DecoderFields]) -> DecoderModel:
        """A model of blocks that differ only in rotation, window and feed-forward layer."""
        rotaries, windows = options.get("rotaries"), options.get("windows")
        rotary = options.get("rotary") or (rotaries[0] if rotaries else self.rotary())
        make = options.get("norm") or self.norm
        norms = options.get("norms", PRE_NORM)
        own, around = options.get("self_attention"), options.get("around")
        blocks: list[Block] = []
        for index in range(self.num_layers):
            mixer = own(index) if own else None
            if mixer is None:
                settings = attention_fields(options)
                settings["window"] = windows[index] if windows else None
                mixer = self.attention(index, rotaries[index] if rotaries else rotary, **settings)
            if norms == MIXER_ALONE:
                blocks.append(MixerBlock(make(f"model.layers.{index}.{norms.before_attention}"), mixer))
                continue
            block = self._block(index, norms, make, mixer, self._feed_forward(index, options))
            blocks.append(around(index, block) if around else block)
        model = options.get("model", {})
        factor = model.get("logit_scale", 1.0)
        scaled = {} if factor == 1.0 else {"factor": factor}
        last = make("model.norm", **scaled) if options.get("final_norm", True) else None
        stated = model_fields(model)
        stated["ignorable"] = (*stated.get("ignorable", ()), *options.get("ignorable", ()))
        return self.model(blocks, rotary.rope, model.get("norm", last), **stated)

    def _feed_forward(self, index: int, options: DecoderFields) -> FeedForward:
        if make := options.get("feed_forward"):
            return make(index)
        gated, bias = options.get("gated", True), options.get("mlp_bias")
        return self.mlp(index, activation=options.get("activation"), bias=bias, gated=gated)

    def _block(
        self,
        index: int,
        norms: BlockNorms,
        make: Callable[..., Norm],
        attention: SelfAttention,
        feed_forward: FeedForward,
    ) -> Block:
        def named(name: str | None) -> Norm | None:
            return None if name is None else make(f"model.layers.{index}.{name}")

        before = named(norms.before_attention) if index or norms.first else None
        after = named(norms.after_attention)
        before_mlp, after_mlp = named(norms.before_mlp), named(norms.after_mlp)
        if after is not None and after_mlp is not None:
            if norms.sums:
                return PostNormBlock(attention, after, feed_forward, after_mlp)
            return SandwichBlock(self.kernels, (before, after), attention, (before_mlp, after_mlp), feed_forward)
        if norms.parallel:
            assert before is not None
            return ParallelBlock(before, attention, before_mlp, feed_forward)
        assert before_mlp is not None
        return DecoderBlock(before, attention, before_mlp, feed_forward)

    def model(
        self, blocks: Sequence[Block], rope: RopeParameters, norm: Norm | None, **options: Unpack[ModelFields]
    ) -> DecoderModel:
        """Puts embedding, blocks, final norm and head together."""
        vocab = self.fields.integer("vocab_size")
        tied = self.fields.flag("tie_word_embeddings", options.get("tie_default", False))
        width = options.get("embedding_size") or self.hidden_size
        rows = weight = table(self.kernels, "model.embed_tokens.weight", vocab, width)
        speaks = self.head == "logits"
        if speaks and not tied:
            weight = table(self.kernels, "lm_head.weight", vocab, width)
        embedding = Embedding(
            self.kernels,
            rows,
            options.get("embedding_scale", 1.0),
            positions=options.get("positions"),
            types=options.get("types"),
            projection=options.get("projection"),
            norm=options.get("embedding_norm"),
            multiplies=options.get("embedding_multiplies", False),
        )
        ignorable = LEFT_OVER + options.get("ignorable", ())
        traits = ModelTraits(
            max_positions=options.get("max_positions") or context_length(self.fields, rope, self.max_model_len),
            dtype=self.dtype,
            ignorable=ignorable + ((r"lm_head\.weight",) if tied or not speaks else ()),
            renames=(*NESTED, *options.get("renames", ()), *BARE),
            mask=options.get("mask", MaskKind.CAUSAL),
            position_axes=1 + max(rope.axes, default=0),
        )
        heads = self._heads(weight, options)
        hooks = DecoderHooks(tuple(options.get("opening", ())), tuple(options.get("closing", ())))
        return DecoderModel(self.kernels, embedding, blocks, norm, heads, traits, hooks)

    def _heads(self, weight: Weight, options: ModelFields) -> Heads:
        if self.head == "labels":
            return Heads(classifier=(options.get("classifier") or self.classifier)())
        projection = self.projection()
        if self.head != "logits":
            return Heads(projection=projection)
        bias = Weight(weight.shape[:1], (WeightPart("lm_head.bias", weight.shape[:1]),))
        logits = Head(self.kernels, weight, options.get("soft_cap"), bias if options.get("head_bias") else None)
        return Heads(logits, projection=projection)

    def classifier(self) -> Classifier:
        """The head of causal models that classify: one projection of the last token's state."""
        return Classifier(Dense("score", self.hidden_size, self.num_labels(), bias=False))

    def projection(self) -> Projection | None:
        """The dense layers behind a sentence embedding's pooling, where the files have such."""
        listed = self.fields.values.get("dense_layers") or ()
        layers, size = [], self.hidden_size
        for number, entry in enumerate(listed):
            layer = Fields(entry, f"{self.fields.where}: dense layer {number}")
            inputs, outputs = layer.integer("inputs"), layer.integer("outputs")
            if inputs != size:
                raise layer.error("inputs", f"is {inputs}, but {size} elements reach it")
            dense = Dense(f"{entry['name']}.linear", inputs, outputs, bias=layer.flag("bias", True))
            layers.append((dense, layer.choice("activation", DENSE_ACTIVATIONS, "Tanh")))
            size = outputs
        return Projection(layers) if layers else None

    def num_labels(self) -> int:
        """Scores a classifier gives: `id2label`'s entries, else `num_labels`, else two."""
        names = self.fields.values.get("id2label")
        return len(names) if isinstance(names, Mapping) and names else self.fields.integer("num_labels", 2)
