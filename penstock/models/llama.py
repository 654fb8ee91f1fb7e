"""Llama 2 and 3.x (arXiv:2307.09288, arXiv:2407.21783), and those that differ from it in biases and names only."""

from __future__ import annotations

from torch.nn import functional

from penstock.layers.batch import MaskKind
from penstock.layers.decoder import DecoderModel
from penstock.models.alibi import slopes
from penstock.models.bert import classifier
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.options import LastFields

# InternLM2 (arXiv:2403.17297) and Baichuan (arXiv:2309.10305), whose projections are fused.
INTERNLM2 = (
    (r"^model\.tok_embeddings\.", "model.embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attention\.wo\.", ".self_attn.o_proj."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
)
BAICHUAN = ((r"\.self_attn\.W_pack\.", ".self_attn.qkv_proj."),)


def build(blueprint: Blueprint) -> DecoderModel:
    """The plain pre-norm decoder; biases are optional."""
    told = "attention_out_bias" if blueprint.fields.has("attention_out_bias") else "attention_bias"
    return blueprint.decoder(output_bias=blueprint.fields.flag(told, False))


def build_eurobert(blueprint: Blueprint) -> DecoderModel:
    """EuroBERT (arXiv:2503.05500): the same, attending both ways."""
    if blueprint.head == "labels":
        blueprint.fields.choice("classifier_pooling", {"bos": None, "mean": None}, "late")
    gelu = functional.gelu
    head: LastFields = {"classifier": lambda: classifier(blueprint, "dense", "classifier", gelu)}
    return blueprint.decoder(model={"mask": MaskKind.BIDIRECTIONAL, **head})


def build_helium(blueprint: Blueprint) -> DecoderModel:
    """Helium (Kyutai, 2025): rotated pairs lie side by side."""
    return blueprint.decoder(output_bias=False, interleaved=True)


def build_cwm(blueprint: Blueprint) -> DecoderModel:
    """CWM (Meta, 2025): three sliding layers to one full layer, which comes first."""
    return blueprint.decoder(windows=blueprint.windows())


def build_internlm2(blueprint: Blueprint) -> DecoderModel:
    bias = blueprint.fields.flag("bias", False)
    return blueprint.decoder(model={"renames": INTERNLM2}, grouped=True, qkv_bias=bias, output_bias=bias)


def build_internlm3(blueprint: Blueprint) -> DecoderModel:
    """Biases of queries, keys and values are set apart from all others."""
    fields = blueprint.fields
    bias = fields.flag("bias", fields.flag("mlp_bias", False))
    qkv_bias = fields.flag("qkv_bias", fields.flag("attention_bias", False))
    return blueprint.decoder(qkv_bias=qkv_bias, output_bias=bias, mlp_bias=bias)


def build_baichuan(blueprint: Blueprint) -> DecoderModel:
    """The models of 13B, with 40 heads, have scores that fall with distance in the place of a rotation."""
    if blueprint.num_heads == 40:
        return blueprint.decoder(rotary=NO_ROPE, model={"renames": BAICHUAN}, slopes=slopes(40))
    return blueprint.decoder(model={"renames": BAICHUAN})
