"""Writes a trained draft head as vLLM, SGLang and this engine read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.models.draft_heads import WRITTEN
from penstock.quant.formats.record import Bytes
from penstock.train.build import MASK_TOKEN
from penstock.train.nets import DraftNet, EagleNet, MedusaNet
from penstock.train.target import Target
from penstock.weights.writers.safetensors import OutputGroup, StoredOutput, write_safetensors

_FORMATS = {torch.bfloat16: "bf16", torch.int64: "i64", torch.bool: "bool"}


def rounded(net: DraftNet) -> None:
    """Makes weights what they are once they are written: bfloat16."""
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(weight.bfloat16())


def write_head(path: Path, net: DraftNet, target: Target, drafted: Tensor | None, longest: int) -> int:
    """Writes config.json and the weights into an existing folder; gives the bytes of the weights.

    Args:
        path: the folder.
        net: the head.
        target: the model it was trained for.
        drafted: as in Training.
        longest: positions of the target.
    """
    if isinstance(net, MedusaNet):
        config, tensors = _medusa(net, target), _medusa_tensors(net)
    else:
        assert isinstance(net, EagleNet)
        config = _eagle(net, target, longest)
        tensors = _eagle_tensors(net, drafted, target.facts.vocab_size)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="ascii")
    groups = [_group(key, value) for key, value in tensors.items()]
    written = write_safetensors(path, groups)
    if isinstance(net, MedusaNet) and (path / "model.safetensors").exists():
        (path / "model.safetensors").replace(path / "medusa_lm_head.safetensors")
    return written


def _group(name: str, value: Tensor) -> OutputGroup:
    stored = value.detach().cpu().contiguous()
    format = _FORMATS[stored.dtype]
    return OutputGroup((StoredOutput(name, format, tuple(stored.shape), stored.nbytes),), partial(_bytes, stored))


def _bytes(value: Tensor) -> Iterator[Bytes]:
    yield np.asarray(value.view(torch.uint8).numpy()).reshape(-1)


def _eagle(net: EagleNet, target: Target, longest: int) -> dict[str, Any]:
    shape, facts = net.shape, target.facts
    config = {
        **WRITTEN["eagle3"],
        "hidden_size": facts.hidden_size,
        "target_hidden_size": facts.hidden_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": shape.drafted,
        "max_position_embeddings": longest,
        "eagle_aux_hidden_state_layer_ids": list(target.layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in target.layers],
            "use_aux_hidden_state": True,
        },
    }
    if net.mask_hidden is not None:
        config |= {"parallel_drafting": True, "ptd_token_id": MASK_TOKEN, "num_parallel_tokens": net.drafts}
    return config


def _eagle_tensors(net: EagleNet, drafted: Tensor | None, vocab: int) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for name, weight in net.named_parameters():
        key = name
        if name.endswith("_proj.weight"):
            key = f"midlayer.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
        elif name.endswith(("layernorm.weight", "hidden_norm.weight")):
            key = f"midlayer.{name}"
        found[key] = weight.bfloat16()
    if drafted is not None:
        found["d2t"] = drafted.cpu() - torch.arange(len(drafted))
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, drafted.cpu(), True)
    return found


def _medusa(net: MedusaNet, target: Target) -> dict[str, Any]:
    sizes = {"hidden_size": target.facts.hidden_size, "vocab_size": target.facts.vocab_size}
    return {**WRITTEN["medusa"], "medusa_num_heads": net.drafts, **sizes}


def _medusa_tensors(net: MedusaNet) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for number, guess in enumerate(net.guesses):
        found[f"{number}.0.linear.weight"] = guess.linear.weight.bfloat16()
        found[f"{number}.0.linear.bias"] = guess.linear.bias.bfloat16()
        found[f"{number}.1.weight"] = guess.table.weight.bfloat16()
    return found
