"""Quantised Hugging Face folders, loaded and run: logits are those of transformers with the decoded weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config.errors import CheckpointError
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint
from tests.models import tiny
from tests.models.harness import Harness, load
from tests.quant.test_methods_gptq import pack

Encoded = tuple[dict[str, Tensor], Tensor]  # tensors by suffix of the module's name, and the weight they stand for
Encode = Callable[[Tensor], Encoded]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def quantise(folder: Path, config: Mapping[str, Any], encode: Encode, architecture: str = "llama") -> None:
    """Saves a tiny model whose projections are quantised; checks what penstock then computes."""
    theirs = tiny.save(architecture, folder, **SIZES)
    state, decoded = {}, {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            tensors, decoded[key] = encode(tensor)
            stem = key.removesuffix(".weight")
            state |= {stem + suffix: value.contiguous() for suffix, value in tensors.items()}
        else:
            state[key] = tensor
    save_file(state, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(config)}))
    theirs.load_state_dict(decoded, strict=False)
    prompt = tiny.prompt(20)
    assert decoded
    assert tiny.distance(Harness(load(folder)).step({"r": prompt})["r"], tiny.reference_logits(theirs, prompt)) < 1e-4
    assert model_facts(open_checkpoint(folder)).parameters == sum(p.numel() for p in theirs.parameters())


def encode_gptq(weight: Tensor) -> Encoded:
    outputs, inputs = weight.shape
    rng = np.random.default_rng(outputs)
    groups = rng.permutation(np.arange(inputs) // 32)
    codes, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(1, 16, (inputs // 32, outputs))
    scales = (rng.uniform(0.5, 1.0, zeros.shape) * 0.2 * inputs**-0.5).astype(np.float16)
    stored = {
        ".qweight": pack(codes, 4),
        ".qzeros": pack(zeros.T - 1, 4).T,
        ".scales": scales,
        ".g_idx": groups.astype(np.int32),
    }
    decoded = scales.astype(np.float32)[groups] * (codes - zeros[groups])
    tensors = {suffix: torch.from_numpy(np.ascontiguousarray(value)) for suffix, value in stored.items()}
    return tensors, torch.from_numpy(decoded.T.astype(np.float32))


def test_gptq(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    quantise(tmp_path, config, encode_gptq)


def test_missing_and_left_over_tensors_are_named(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    quantise(tmp_path, config, encode_gptq)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.self_attn.q_proj.scales"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.self_attn\.q_proj\.weight; 3 unknown"):
        load(tmp_path)
