"""What targets' files call their layer for multi-token prediction. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """How a target's files call the layer for multi-token prediction, and what it does that others do not.

    Here all get Qwen3-Next's names: `fc`, `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `layers.0`, `norm`, and
    `embed_tokens` and `lm_head` where they are the layer's own.

    Attributes:
        names: what its tensors' names begin with, and what stands in its place here, tried in order; `{layers}` is how
            many layers the target has.
        hidden_first: the projection reads the hidden state and then the token's embedding.
        after_norm: what is given with a draft is what its logits are made of, not what the last norm is given.
        shares_norm: the last norm is the target's.
    """

    names: tuple[tuple[str, str], ...]
    hidden_first: bool = False
    after_norm: bool = False
    shares_norm: bool = False


_QWEN: Final = MtpLayout((("mtp.", ""), ("model.mtp.", "")), after_norm=True)
_DEEPSEEK: Final = MtpLayout(  # GLM too; arXiv:2412.19437
    (
        ("model.layers.{layers}.eh_proj.", "fc."),
        ("model.layers.{layers}.enorm.", "pre_fc_norm_embedding."),
        ("model.layers.{layers}.hnorm.", "pre_fc_norm_hidden."),
        ("model.layers.{layers}.shared_head.norm.", "norm."),
        ("model.layers.{layers}.shared_head.head.", "lm_head."),
        ("model.layers.{layers}.embed_tokens.", "embed_tokens."),
        ("model.layers.{layers}.", "layers.0."),
    )
)
_MIMO: Final = MtpLayout(  # arXiv:2505.07608
    (
        ("model.mtp_layers.0.input_proj.", "fc."),
        ("model.mtp_layers.0.token_layernorm.", "pre_fc_norm_embedding."),
        ("model.mtp_layers.0.hidden_layernorm.", "pre_fc_norm_hidden."),
        ("model.mtp_layers.0.final_layernorm.", "norm."),
        ("model.mtp_layers.0.", "layers.0."),
    ),
    hidden_first=True,
    after_norm=True,
)
_ERNIE: Final = MtpLayout(  # as FastDeploy has it
    (
        ("model.mtp_linear_proj.0.", "fc."),
        ("model.mtp_emb_norm.0.", "pre_fc_norm_embedding."),
        ("model.mtp_hidden_norm.0.", "pre_fc_norm_hidden."),
        ("model.mtp_block.0.", "layers.0."),
    ),
    shares_norm=True,
)
_LAYOUTS: Final = (_QWEN, _DEEPSEEK, _MIMO, _ERNIE)


def mtp_names(config: Mapping[str, Any], names: Iterable[str]) -> tuple[MtpLayout, dict[str, str]] | None:
    """The layout of a target's layer for multi-token prediction, and of its tensors the name here → in the files.

    None where there is no such layer.
    """
    listed, layers = list(names), str(config.get("num_hidden_layers"))
    for layout in _LAYOUTS:
        begins = [(theirs.replace("{layers}", layers), ours) for theirs, ours in layout.names]
        found = dict[str, str]()
        for name in listed:
            for theirs, ours in begins:
                if name.startswith(theirs):
                    found[ours + name.removeprefix(theirs)] = name
                    break
        if any(name.startswith("fc.") for name in found):
            return layout, found
    return None


def of_one_layer(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The configuration, of whose kinds of layer the one that is there has the right one: it attends, to everything."""
    dense = any(name.startswith(("layers.0.mlp.gate_proj.", "layers.0.mlp.gate_up_proj.")) for name in names)
    kinds = {"layer_types": ["full_attention"]} if config.get("layer_types") is not None else {}
    return {
        **config,
        **kinds,
        "num_hidden_layers": 1,
        "full_attention_interval": 1,
        "mlp_only_layers": [0] if dense else [],
        "decoder_sparse_step": 1,
        "mlp_layer_types": ["dense" if dense else "sparse"],
        "first_k_dense_replace": int(dense),
        "moe_layer_freq": 1,
        "moe_layer_start_index": int(dense),
        "moe_layer_interval": 1,
    }
