"""GPT-2 (Radford et al. 2019) and GPT-BigCode, StarCoder's first (arXiv:2305.06161): learned positions."""

from __future__ import annotations

from dataclasses import replace

from penstock.layers.decoder import DecoderModel
from penstock.layers.embedding import learned
from penstock.models.blueprint import NO_ROPE, Blueprint

# Names that other families of the time share.
TRANSFORMER = (
    (r"^(transformer\.)?(wte|word_embeddings)\.", "model.embed_tokens."),
    (r"^(transformer\.)?ln_f\.", "model.norm."),
    (r"^(transformer\.)?(wpe|h|word_embeddings_layernorm)\.", r"model.\2."),
    (r"^model\.h\.", "model.layers."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
)
RENAMES = (
    *TRANSFORMER,
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
TRANSPOSED = (r"\.(c_attn|c_proj|c_fc)\.weight$", r".\1.transposed")  # stored as [inputs, outputs]
MASKS = (r".*\.attn\.(masked_)?bias",)


def build(blueprint: Blueprint) -> DecoderModel:
    return _build(blueprint, (TRANSPOSED, *RENAMES), "gelu_new")


def build_bigcode(blueprint: Blueprint) -> DecoderModel:
    """GPT-2 whose queries share one key and value, or have them in turn."""
    shared = blueprint.fields.flag("multi_query", True)
    blueprint = replace(blueprint, num_kv_heads=1 if shared else blueprint.num_heads)
    return _build(blueprint, RENAMES, "gelu_pytorch_tanh", grouped=not shared)


def _build(blueprint: Blueprint, renames: tuple[tuple[str, str], ...], act: str, grouped: bool = False) -> DecoderModel:
    fields = blueprint.fields
    scale = blueprint.head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    places = fields.integer("max_position_embeddings")
    return blueprint.decoder(
        rotary=NO_ROPE,
        self_attention=lambda index: blueprint.attention(
            index,
            NO_ROPE,
            scale=scale / (index + 1) if by_layer else scale,
            qkv_bias=True,
            output_bias=True,
            grouped=grouped,
        ),
        norm=blueprint.layer_norm,
        activation=blueprint.activation("activation_function", act),
        gated=False,
        mlp_bias=True,
        model={
            "tie_default": True,
            "renames": renames,
            "positions": learned(blueprint.kernels, "model.wpe.weight", places, blueprint.hidden_size),
        },
        ignorable=MASKS,
    )
