"""How each architecture's tensors are named and changed in GGUF files, as one entry of a table.

Converters write a Hugging Face model's tensors under short names, and change some. An entry says what is particular
about an architecture; `gguf_names` undoes it, the same way for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.models.gguf import draft_heads
from penstock.models.gguf.decoders import DECODERS, GATED, NAMES, NUMBERED, shared
from penstock.models.gguf.decoders import TOP_NAMES as DECODER_TOP_NAMES
from penstock.models.gguf.metadata import Tensors
from penstock.models.gguf.recurrent import NEMOTRON_H

TOP_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "nextn.eh_proj": "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.shared_head_norm": "shared_head.norm",
        "nextn.shared_head_head": "shared_head.head",
    }
)
PREDICTS = ("glm4moe",)
"""Architectures whose layer behind the last drafts as it does in Hugging Face's files (models.mtp_layouts)."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """What is particular about an architecture's tensors.

    Attributes:
        top: names of tensors outside of layers, without their endings, that differ from TOP_NAMES or are not there.
        layer: names of a layer's tensors that differ from LAYER_NAMES; a key with its ending stands for the whole name.
        layer_with: further such names, where the first layer has the tensor that is the key.
        experts: where single experts lie, and the names of their parts; None without experts.
        joint_experts: gates and ups of all experts are one tensor in Hugging Face's layout, taken in turn.
        permuted: rows of queries and keys lie in (pair, half) order within a head.
        around_one: 1 was added to the norms' scales.
        fused: queries, keys and values may be one tensor.
        mixer: where recurrent layers keep their constants; None without recurrent layers.
        step_bias: the name there of the time step's bias.
        stacks: names, without numbers and endings, of the matrices that were stacked into one tensor.
    """

    top: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    layer_with: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    experts: tuple[str, Mapping[str, str]] | None = None
    joint_experts: bool = False
    permuted: bool = False
    around_one: bool = False
    fused: bool = False
    mixer: str | None = None
    step_bias: str = "dt_bias"
    stacks: Mapping[str, str] = field(default_factory=dict)

    def top_name(self, name: str) -> str:
        """The name of a tensor outside of layers; as it is where nobody knows it."""
        whole, _, ending = name.rpartition(".")
        own = self.top.get(whole)
        return TOP_NAMES.get(name, name) if own is None else f"{own}.{ending}"

    def layer_names(self, tensors: Tensors) -> Mapping[str, str]:
        """Names of a layer's tensors in a file."""
        joint = {"ffn_gate_up_exps.weight": f"{self.experts[0]}.gate_up_proj"} if self.experts else {}
        present = [names for tensor, names in self.layer_with.items() if f"blk.0.{tensor}" in tensors]
        return {**LAYER_NAMES, **joint, **self.layer, **{key: name for names in present for key, name in names.items()}}


def _feed_forward(prefix: str) -> dict[str, str]:
    return {f"ffn_{part}": f"{prefix}.{part}_proj" for part in ("gate", "up", "down")}


def _mixer(prefix: str) -> dict[str, str]:
    parts = {"in": "in_proj", "conv1d": "conv1d", "x": "x_proj", "dt": "dt_proj", "out": "out_proj"}
    norms = {f"{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}
    return {f"ssm_{ours}": f"{prefix}.{theirs}" for ours, theirs in (parts | norms).items()}


_QWEN = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_out": "linear_attn.out_proj",
        "ffn_gate_inp": "mlp.gate",
        **shared("mlp.shared_expert"),
    }
)
_LFM2 = MappingProxyType({f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")})
_GEMMA3 = MappingProxyType(
    {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_BERT = MappingProxyType(
    {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output_norm": "post_attention_layernorm",
        "layer_output_norm": "post_feedforward_layernorm",
    }
)
_NEMOTRON = MappingProxyType({**_mixer("mixer"), **NEMOTRON_H})
_MAMBA = MappingProxyType({**_mixer("mixer"), "attn_norm": "norm"})
_LAST_NORM = MappingProxyType({"token_embd_norm": "model.norm"})  # the name says otherwise
_STREAMS = MappingProxyType(
    {
        "altup_proj.weight": "model.altup_projections",
        "altup_unembd_proj.weight": "model.altup_unembed_projections",
    }
)
_DECODERS = MappingProxyType(
    {
        arch: TensorLayout(
            DECODER_TOP_NAMES,
            {**NAMES, **decoder.names},
            decoder.names_with,
            decoder.experts,
            permuted=decoder.permuted,
            around_one=decoder.around_one,
            fused=True,
            stacks=_STREAMS if arch == "gemma3n" else {},
        )
        for arch, decoder in DECODERS.items()
    }
)
_PLAIN = TensorLayout()
LAYOUTS: Mapping[str, TensorLayout] = MappingProxyType(
    {
        **_DECODERS,
        "llama": TensorLayout(permuted=True),
        draft_heads.EAGLE3: TensorLayout(draft_heads.TOP_NAMES, draft_heads.NAMES, permuted=True),
        "mixtral": TensorLayout(
            layer={"ffn_gate_inp": "block_sparse_moe.gate"},
            experts=("block_sparse_moe.experts", NUMBERED),
            permuted=True,
        ),
        "qwen3moe": TensorLayout(layer={"ffn_gate_inp": "mlp.gate"}, experts=("mlp.experts", GATED)),
        "gemma3": TensorLayout(layer=_GEMMA3, around_one=True),
        "gemma-embedding": TensorLayout(
            {"dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"}, _GEMMA3, around_one=True
        ),
        "gpt-oss": TensorLayout(
            layer={
                "ffn_gate_inp": "mlp.router",
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks.weight": "self_attn.sinks",
            },
            joint_experts=True,
        ),
        "bert": TensorLayout(
            {
                "position_embd": "model.embed_positions",
                "token_types": "model.embed_types",
                "token_embd_norm": "model.embed_norm",
                "cls": "classifier.dense",
                "cls.output": "classifier.out_proj",
            },
            _BERT,
        ),
        "nomic-bert": TensorLayout({"token_types": "model.embed_types", "token_embd_norm": "model.embed_norm"}, _BERT),
        "modern-bert": TensorLayout(
            {
                "token_embd_norm": "embeddings.norm",
                "output_norm": "final_norm",
                "cls": "head.dense",
                "cls.norm": "head.norm",
                "cls.output": "classifier",
            },
            {
                "attn_norm": "attn_norm",
                "attn_qkv": "self_attn.qkv_proj",
                "ffn_norm": "mlp_norm",
                "ffn_up": "mlp.gate_up_proj",
            },
        ),
        "lfm2": TensorLayout(_LAST_NORM, _LFM2, mixer="conv"),
        "lfm2moe": TensorLayout(
            _LAST_NORM, _LFM2 | {"ffn_gate_inp": "mlp.gate"}, experts=("mlp.experts", GATED), mixer="conv"
        ),
        "qwen3next": TensorLayout(layer=_QWEN, experts=("mlp.experts", GATED), around_one=True, mixer="linear_attn"),
        "qwen35": TensorLayout(layer=_QWEN, around_one=True, mixer="linear_attn"),
        "qwen35moe": TensorLayout(layer=_QWEN, experts=("mlp.experts", GATED), around_one=True, mixer="linear_attn"),
        "mamba": TensorLayout(layer=_MAMBA, mixer="mixer", step_bias="dt_proj.bias"),
        "mamba2": TensorLayout(layer=_MAMBA, mixer="mixer"),
        "nemotron_h": TensorLayout(layer=_NEMOTRON, mixer="mixer"),
        "nemotron_h_moe": TensorLayout(layer=_NEMOTRON, experts=("mixer.experts", GATED), mixer="mixer"),
        "granitehybrid": TensorLayout(
            layer={
                **_mixer("mamba"),
                **_feed_forward("shared_mlp"),
                "ffn_gate_inp": "block_sparse_moe.gate",
                **shared("shared_mlp"),
            },
            experts=("block_sparse_moe.experts", GATED),
            permuted=True,
            mixer="mamba",
        ),
        "falcon-h1": TensorLayout(
            layer={**_mixer("mamba"), **_feed_forward("feed_forward"), "ffn_norm": "pre_ff_layernorm"}, mixer="mamba"
        ),
        "jamba": TensorLayout(
            layer={
                **_mixer("mamba"),
                **_feed_forward("feed_forward"),
                "ffn_norm": "pre_ff_layernorm",
                "ffn_gate_inp": "feed_forward.router",
            },
            experts=("feed_forward.experts", GATED),
            mixer="mamba",
            step_bias="dt_proj.bias",
        ),
    }
)


def layout_of(arch: str, config: Mapping[str, Any]) -> TensorLayout:
    """The layout of an architecture, where one without an entry has nothing particular.

    Files of "llama" with experts are Mixtral's.
    """
    return LAYOUTS.get("mixtral" if arch == "llama" and config.get("num_local_experts") else arch, _PLAIN)
