"""Gemma 1 and 2 (arXiv:2403.08295, arXiv:2408.00118): scales stored less one, embeddings times sqrt(hidden_size)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from penstock.layers.attention import Attention
from penstock.layers.attention_options import AttentionFields
from penstock.layers.batch import MaskKind
from penstock.layers.decoder import DecoderModel
from penstock.layers.rotary import Rotary
from penstock.models.block_norms import PRE_NORM, BlockNorms
from penstock.models.blueprint import Blueprint
from penstock.models.options import DecoderFields, LastFields

AROUND = BlockNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def build(blueprint: Blueprint) -> DecoderModel:
    """Gemma 1; its activation is the tanh form whatever an old file's `hidden_act` says."""
    return assemble(blueprint, norms=PRE_NORM)


def build_vault(blueprint: Blueprint) -> DecoderModel:
    """VaultGemma (Google, 2025): Gemma 2 without norms behind the parts of a block."""
    return build_gemma2(blueprint, BlockNorms(before_mlp="pre_feedforward_layernorm"))


def build_gemma2(blueprint: Blueprint, norms: BlockNorms = AROUND) -> DecoderModel:
    """Norms around both parts of a block, every other layer slides, scores and logits are capped."""
    return assemble(
        blueprint,
        norms=norms,
        windows=blueprint.windows(),
        scale=blueprint.fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        soft_cap=blueprint.fields.optional_number("attn_logit_softcapping"),
    )


def both_rotations(blueprint: Blueprint) -> tuple[Rotary, Rotary]:
    """Those of full and of sliding layers, each under its name in `rope_parameters`."""
    full = blueprint.rotary(theta=1_000_000.0, layer_type="full_attention")
    theta = blueprint.fields.number("rope_local_base_freq", 10_000.0)
    return full, blueprint.rotary(theta=theta, layer_type="sliding_attention", local=True)


def attention_of(
    blueprint: Blueprint, index: int, rotary: Rotary, slot: int, **more: Unpack[AttentionFields]
) -> Attention:
    """Attention with normalised queries, keys and values and unscaled scores; of a `slot` not its own, without keys."""
    usual: AttentionFields = {"scale": 1.0, "qk_norm": True, "value_norm": True, "shared": slot != index}
    return blueprint.attention(index, rotary, slot, **(usual | more))


def shared_leftovers(slots: Sequence[int]) -> tuple[str, ...]:
    """Names of tensors that files may have of layers without keys and values of their own."""
    layers = (index for index, slot in enumerate(slots) if slot != index)
    return tuple(rf"model\.layers\.{index}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*" for index in layers)


def assemble(blueprint: Blueprint, **more: Unpack[DecoderFields]) -> DecoderModel:
    """What all Gemma models share."""
    fields = blueprint.fields
    both_ways = fields.flag("use_bidirectional_attention", False)  # EmbeddingGemma, arXiv:2509.20354
    around: LastFields = {
        "mask": MaskKind.BIDIRECTIONAL if both_ways else MaskKind.CAUSAL,
        "tie_default": True,
        "embedding_scale": blueprint.hidden_size**0.5,
        "soft_cap": fields.optional_number("final_logit_softcapping"),
    }
    usual: DecoderFields = {
        "norm": partial(blueprint.norm, around_one=True),
        "activation": blueprint.activation("hidden_activation", "gelu_pytorch_tanh"),
    }
    more["model"] = around | more.get("model", {})
    return blueprint.decoder(**(usual | more))
