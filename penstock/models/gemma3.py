"""Gemma 3 text models (arXiv:2503.19786): five sliding layers to one full layer, each kind with its own rope."""

from __future__ import annotations

from typing import Any

from penstock.layers.decoder import Block, DecoderModel, SandwichBlock
from penstock.models.blueprint import Blueprint

# Checkpoints of the vision-language model hold this text model under another prefix, in an old and a new spelling.
RENAMES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
VISION = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")


def build(blueprint: Blueprint) -> DecoderModel:
    """Norms around both parts of a block, scales stored less one, embeddings times sqrt(hidden_size)."""
    fields = blueprint.fields
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "is true; only causal Gemma 3 models are supported")
    every = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    windows = blueprint.windows(lambda index: (index + 1) % every != 0)
    full = blueprint.rotary(theta=1_000_000.0, layer_type="full_attention")
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    local = blueprint.rotary(theta=local_theta, layer_type="sliding_attention", local=True)
    activation = blueprint.activation("hidden_activation", "gelu_pytorch_tanh")
    settings: dict[str, Any] = {
        "scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "qkv_bias": fields.flag("attention_bias", False),
        "output_bias": fields.flag("attention_bias", False),
        "qk_norm": True,
        "around_one": True,
    }
    blocks: list[Block] = []
    for index, window in enumerate(windows):
        prefix = f"model.layers.{index}"
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        before, after, before_mlp, after_mlp = (
            blueprint.norm(f"{prefix}.{name}_layernorm", around_one=True) for name in names
        )
        attention = blueprint.attention(index, full if window is None else local, window=window, **settings)
        mlp = blueprint.mlp(index, activation=activation)
        blocks.append(SandwichBlock(blueprint.kernels, (before, after), attention, (before_mlp, after_mlp), mlp))
    return blueprint.model(
        blocks,
        full.rope,
        blueprint.norm("model.norm", around_one=True),
        tie_default=True,
        embedding_scale=blueprint.hidden_size**0.5,
        soft_cap=fields.optional_number("final_logit_softcapping"),
        max_positions=fields.integer("max_position_embeddings"),  # stated after stretching
        ignorable=VISION,
        renames=RENAMES,
    )
