"""What GGUF metadata says of rope, windows, caps and biases reaches the logits and the plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.quant.formats import decode_to_float32
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint
from tests.models import tiny
from tests.models.harness import check_logits

Arrays = dict[str, np.ndarray]
LLAMA3 = {**tiny.LLAMA3, "original_max_position_embeddings": 64}
GEMMA3 = {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 10,
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama-biases", {}),
    ("llama", "llama-plain-heads", {}),
    ("llama", "llama-linear", {}),
    ("llama", "llama-yarn", {}),
    ("llama", "llama-llama3", {"rope_parameters": LLAMA3}),
    ("llama", "mistral-sliding", {}),
    ("gemma3", "gemma3", GEMMA3),
    ("gemma3", "gemma3-cap", GEMMA3),
]


def rope_metadata(parameters: Mapping[str, Any], head_dim: int) -> tuple[dict[str, Any], Arrays]:
    kind, theta = parameters["rope_type"], float(parameters["rope_theta"])
    found: dict[str, Any] = {"rope.freq_base": theta}
    if kind == "llama3":
        wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((parameters["original_max_position_embeddings"] / wavelength - 1) / 3, 0, 1)
        return found, {"rope_freqs.weight": 1 / ((1 - smooth) / parameters["factor"] + smooth)}
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": parameters["factor"]}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
    return found, {}


def metadata_and_extras(arch: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], Arrays]:
    dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    parameters = config["rope_parameters"]
    rope, extras = rope_metadata(parameters.get("full_attention", parameters), dim)
    found = rope | {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": dim,
    }
    if config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    if config.get("final_logit_softcapping"):
        found["final_logit_softcapping"] = config["final_logit_softcapping"]
    if "sliding_attention" in parameters:
        found["rope.freq_base_swa"] = parameters["sliding_attention"]["rope_theta"]
    return {f"{arch}.{key}": value for key, value in found.items()}, extras


def to_gguf(arch: str, arrays: Arrays, config: Mapping[str, Any]) -> Arrays:
    kind = {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3": gguf.MODEL_ARCH.GEMMA3}[arch]
    table = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    out: Arrays = {}
    for name, array in arrays.items():
        if arch == "llama" and re.search(r"[qk]_proj", name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        target = table.get_name(name, (".weight", ".bias"))
        assert target is not None, name
        out[target] = array
    return out


@pytest.mark.parametrize(("arch", "family", "fields"), CASES, ids=[case[1] for case in CASES])
def test_logits_equal_transformers(
    tmp_path: Path, write_gguf: Callable[..., Path], arch: str, family: str, fields: dict[str, Any]
) -> None:
    theirs = tiny.save(family, tmp_path / "hf", **fields)
    source = open_checkpoint(tmp_path / "hf")
    arrays = {}
    for name, info in source.tensors.items():
        stored = source.read(name)
        arrays[name] = decode_to_float32(info.format, stored.data).reshape(info.shape)
    if source.config.get("tie_word_embeddings"):
        arrays.pop("lm_head.weight", None)
    config = {"head_dim": None, **source.config}
    metadata, extras = metadata_and_extras(arch, config)
    path = write_gguf(tmp_path / "m.gguf", arch, metadata, to_gguf(arch, arrays, config) | extras)
    twin = open_checkpoint(path)
    assert set(twin.tensors) == set(arrays)
    assert twin.config["architectures"] == source.config["architectures"]
    planned, expected = model_facts(twin), model_facts(source)
    assert (planned.layers, planned.parameters) == (expected.layers, expected.parameters)
    check_logits(path, theirs, 43)
