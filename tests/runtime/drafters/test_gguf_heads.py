"""EAGLE-3 heads in GGUF files, as llama.cpp's converter writes them, are the folders they were made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.kernels.cpu import native
from tests.engine.test_drafts import run
from tests.runtime.drafters.test_heads import MODEL, changed, golden, made, watched

LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "input_norm": "enc.output_norm",
    **{f"midlayer.{theirs}": f"blk.0.{ours}" for theirs, ours in LAYER.items()},
}
HEADS = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}


def converted(folder: Path, path: Path, metadata: Mapping[str, Any] = {}, without: str = "") -> Path:
    """The head as a GGUF file: rows of queries and keys in pairs, ids of the target's own vocabulary."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "eagle3")
    keys = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": 1,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
        "target_hidden_size": config["target_hidden_size"],
        "target_layers": config["eagle_aux_hidden_state_layer_ids"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_before_fc": bool(config.get("norm_before_fc")),
        **metadata,
    }
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array,
    }  # fmt: skip
    for key, value in keys.items():
        if value is not None:
            add[type(value)](f"eagle3.{key}", value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "d2t":
            writer.add_tensor("d2t", tensor.numpy() + np.arange(len(tensor)))
        elif name not in ("t2d", without):
            stem = name.removesuffix(".weight")
            rows = tensor.float()
            for part, key in HEADS.items():
                if stem.endswith(part):
                    rows = rows.reshape(config[key], 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
            kept = np.ascontiguousarray(rows.numpy())
            writer.add_tensor(f"{NAMES[stem]}.weight", kept if kept.ndim < 2 else kept.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def models(shared_data: Path) -> Path:
    return shared_data / "models"


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
def test_proposals_are_those_of_the_folder(models: Path, tmp_path: Path) -> None:
    """All of its bfloat16 weights are float16 too, but for a few that are smaller than those have."""
    file = converted(models / f"{MODEL}-eagle3", tmp_path / "head.gguf")
    isa = "avx2" if "avx2" in native.usable_isas() else "generic"
    engine = made(models, {"model": str(file), "num_speculative_tokens": 5}, isa=isa)
    watch = watched(engine, told=False)
    items = golden(models, "eagle3")[:6]
    for number, item in enumerate(items):
        params = SamplingParams(temperature=0.0, max_tokens=len(item["greedy"]))
        run(engine, EngineRequest(f"{number}", tuple(item["prompt"]), params, speculate=5))
    engine.close()
    compared = 0
    for number, item in enumerate(items):
        for start, proposal in enumerate(item["proposals"]):
            drafts = watch.made.get((f"{number}", len(item["prompt"]) + 1 + start), ())
            assert list(drafts) == proposal[: len(drafts)], (number, start)
            compared += len(drafts)
    assert compared > 300


def test_states_are_normed_before_they_are_joined(models: Path, tmp_path: Path) -> None:
    """`norm_before_fc`: the same from a folder and from a file, and what torch says."""

    def norm(tensors: dict[str, Tensor]) -> None:
        tensors["input_norm.weight"] = torch.rand(768, generator=torch.Generator().manual_seed(1)) + 0.5

    folder = changed(models / f"{MODEL}-eagle3", tmp_path / "head", {"norm_before_fc": True}, norm)
    file = converted(folder, tmp_path / "head.gguf")
    tensors = load_file(folder / "model.safetensors")
    states = torch.randn(5, 768, generator=torch.Generator().manual_seed(2))
    normed = torch.nn.functional.rms_norm(states, (768,), tensors["input_norm.weight"], 1e-6)
    wanted = normed @ tensors["fc.weight"].float().T
    for path in (folder, file):
        engine = made(models, {"model": str(path), "num_speculative_tokens": 3})
        drafter: Any = engine.runner._drafting._drafter  # type: ignore[attr-defined]
        found = drafter._fused(states)
        engine.close()
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.02)


@pytest.mark.parametrize(
    ("metadata", "without", "told"),
    [
        ({"target_layers": None}, "", "eagle3.target_layers is 'None'; the numbers of the target's layers"),
        ({"target_layers": [1, 3, 50]}, "", "reads what layers 1, 3, 50 .* no layer 50"),
        ({"vocab_size": 32000}, "", "a vocabulary of 32000 tokens, the target has one of 4096"),
        ({"target_hidden_size": 512}, "", "of 512 elements .target_hidden_size., the target's have 256"),
        ({"vocab_size": None}, "", "metadata key eagle3.vocab_size is missing"),
        ({}, "lm_head.weight", "a draft vocabulary .d2t., but no lm_head.weight for it"),
        ({}, "midlayer.self_attn.k_proj.weight", "missing: model.layers.0.self_attn.k_proj.weight"),
    ],
)
def test_what_does_not_fit_is_told(
    models: Path, tmp_path: Path, metadata: Mapping[str, Any], without: str, told: str
) -> None:
    file = converted(models / f"{MODEL}-eagle3", tmp_path / "head.gguf", metadata, without)
    with pytest.raises(Exception, match=told) as refusal:
        made(models, {"method": "eagle3", "model": str(file)})
    assert type(refusal.value).__name__ in ("ConfigError", "CheckpointError")


def test_it_is_no_model_by_itself(models: Path, tmp_path: Path) -> None:
    file = converted(models / f"{MODEL}-eagle3", tmp_path / "head.gguf")
    with pytest.raises(ConfigError, match="is a head for method eagle3, and method medusa was asked for"):
        made(models, {"method": "medusa", "model": str(file)})
