"""Tiny random heads beside the tiny random models, in the layouts in which heads are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.tiny import SIZES

HIDDEN, VOCAB, DRAFTED = int(SIZES["hidden_size"]), int(SIZES["vocab_size"]), 60
HEADS, KEYS, SIZE, WIDE = 6, 2, 10, 44
LAYER = {
    "self_attn.k_proj.weight": (KEYS * SIZE, HIDDEN),
    "self_attn.v_proj.weight": (KEYS * SIZE, HIDDEN),
    "self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
    "mlp.gate_proj.weight": (WIDE, HIDDEN),
    "mlp.up_proj.weight": (WIDE, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, WIDE),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}


def save(kind: str, folder: Path, layers: int = 3, **more: Any) -> None:
    """A head for a model of so many layers; of kind "mtp", its tensors for `join`."""
    torch.manual_seed(7)
    config = {
        **SIZES, "num_hidden_layers": 1, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"],
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [0, layers // 2, layers - 1],
    }  # fmt: skip
    if kind == "medusa":
        tensors = _medusa(3)
        config = {"architectures": ["MedusaModel"], "medusa_num_heads": 3, "medusa_num_layers": 2}
    else:
        tensors = _eagle3(config)
    if kind == "p-eagle":
        config |= {"parallel_drafting": True, "ptd_token_id": 1}
        tensors["mask_hidden"] = torch.randn(1, 3 * HIDDEN)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **more}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def join(folder: Path) -> None:
    """Gives a tiny llama layers for multi-token prediction in its own files."""
    torch.manual_seed(8)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"mtp.layers.0.{name}": _drawn(*shape) for name, shape in LAYER.items()}
    tensors["mtp.fc.weight"] = _drawn(HIDDEN, 2 * HIDDEN)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}), encoding="utf-8")


def _drawn(*shape: int) -> Tensor:
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape) / shape[-1] ** 0.5


def _eagle3(config: dict[str, Any]) -> dict[str, Tensor]:
    """With a second layer where the configuration says so, which reads no pairs."""
    tensors = {f"midlayer.{name}": _drawn(*shape) for name, shape in LAYER.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = len(tensors[f"midlayer.self_attn.{name}.weight"])
        tensors[f"midlayer.self_attn.{name}.weight"] = _drawn(rows, 2 * HIDDEN)
    allowed = [3, 8, 10, 11, 60]  # by tests whose drafts are to be right now and then
    others = [token for token in range(VOCAB) if token not in allowed]
    ids = torch.tensor((allowed + others)[:DRAFTED])
    return tensors | {
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "fc.weight": _drawn(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _drawn(DRAFTED, HIDDEN),
        "d2t": ids - torch.arange(DRAFTED),
    }


def _medusa(heads: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for head in range(heads):
        for layer in range(2):
            found[f"{head}.{layer}.linear.weight"] = _drawn(HIDDEN, HIDDEN)
            found[f"{head}.{layer}.linear.bias"] = 0.1 * torch.randn(HIDDEN)
        found[f"{head}.2.weight"] = _drawn(VOCAB, HIDDEN)
    return found


def as_speculators(folder: Path) -> None:
    """Writes an EAGLE-3 head again as speculators does, with a second layer."""
    torch.manual_seed(9)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = {name: config.pop(name) for name in (*SIZES, "rms_norm_eps", "rope_theta", "hidden_act", "model_type")}
    config |= {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "transformer_layer_config": {**inner, "num_hidden_layers": 2},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        name.replace("midlayer.", "layers.0."): one for name, one in load_file(folder / "model.safetensors").items()
    }
    tensors |= {f"layers.1.{name}": _drawn(*shape) for name, shape in LAYER.items()}
    tensors["embed_tokens.weight"] = _drawn(VOCAB, HIDDEN)
    save_file(tensors, folder / "model.safetensors")
