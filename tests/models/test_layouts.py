"""Checkpoints that keep the same model under other names or with its projections fused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.models.blueprint import Blueprint
from penstock.models.fields import Fields
from tests.models import tiny
from tests.models.harness import Harness, load

Tensors = dict[str, Tensor]
KV_HEADS, HEAD_DIM = 2, 10


def internlm2(tensors: Tensors) -> Tensors:
    """Queries of each KV head, its key and its value in turn; names of its own."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if ".q_proj" in name:
            others = [tensors[name.replace("q_proj", which)] for which in ("k_proj", "v_proj")]
            heads = [part.view(KV_HEADS, -1, tensor.shape[1]) for part in (tensor, *others)]
            fused = torch.cat(heads, dim=1).reshape(-1, tensor.shape[1])
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = fused
        elif ".k_proj" not in name and ".v_proj" not in name:
            for ours, theirs in (
                ("model.embed_tokens", "model.tok_embeddings"),
                ("lm_head", "output"),
                ("input_layernorm", "attention_norm"),
                ("post_attention_layernorm", "ffn_norm"),
                ("self_attn.o_proj", "attention.wo"),
                ("mlp.gate_proj", "feed_forward.w1"),
                ("mlp.up_proj", "feed_forward.w3"),
                ("mlp.down_proj", "feed_forward.w2"),
            ):
                name = name.replace(ours, theirs)
            found[name] = tensor
    return found


def baichuan(tensors: Tensors) -> Tensors:
    """All queries, all keys, all values."""
    found = {name: tensor for name, tensor in tensors.items() if not any(f".{w}_proj" in name for w in "qkv")}
    for name in tensors:
        if ".q_proj" in name:
            parts = [tensors[name.replace("q_proj", which)] for which in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("q_proj", "W_pack")] = torch.cat(parts)
    return found


@pytest.mark.parametrize(
    ("architecture", "change"),
    [("InternLM2ForCausalLM", internlm2), ("BaichuanForCausalLM", baichuan), ("IQuestCoderForCausalLM", dict)],
)
def test_fused_projections(architecture: str, change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    theirs = tiny.save("llama", tmp_path)
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture], "model_type": "own"}))
    tokens = tiny.prompt(21)
    logits = Harness(load(tmp_path)).step({"row": tokens})["row"]
    assert tiny.distance(logits, tiny.reference_logits(theirs, tokens)) < 1e-4


def test_internlm3(tmp_path: Path) -> None:
    """A Llama whose biases are said in fields of its own."""
    theirs = tiny.save("llama-biases", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["attention_bias"], config["mlp_bias"]
    own = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": True, "bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    tokens = tiny.prompt(21)
    logits = Harness(load(tmp_path)).step({"row": tokens})["row"]
    assert tiny.distance(logits, tiny.reference_logits(theirs, tokens)) < 1e-4


def test_baichuan_13b(tmp_path: Path) -> None:
    """A Llama without rotation whose mask falls with distance, by ALiBi's published slopes of 40 heads."""
    sizes = {"hidden_size": 80, "num_attention_heads": 40, "num_key_value_heads": None, "head_dim": None}
    theirs = tiny.save("llama", tmp_path, **sizes)
    save_file(baichuan(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"], config["num_key_value_heads"], config["head_dim"]
    own = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "model_max_length": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    slopes = [2.0 ** (-8 * k / 32) for k in range(1, 33)] + [2.0 ** (-4 * k / 32) for k in range(1, 17, 2)]
    tokens = tiny.prompt(43)
    place = torch.arange(len(tokens))
    distance = (place - place[:, None]).float()
    mask = torch.tensor(slopes).view(1, -1, 1, 1) * distance
    mask = mask.masked_fill(distance > 0, float("-inf"))
    theirs.model.rotary_emb.inv_freq.zero_()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]
    harness = Harness(load(tmp_path))
    logits = torch.cat([harness.step({"row": tokens[start : start + 9]})["row"] for start in range(0, 43, 9)])
    assert tiny.distance(logits, expected) < 1e-4
    assert harness.model.max_positions == 128


def test_rows_put_in_order_stay_as_they_are_stored() -> None:
    """Interleaved pairs of a quantised checkpoint cost no precision and no memory."""
    blueprint = Fields({**tiny.SIZES, "hidden_size": 64, "head_dim": 8})
    made = Blueprint.read(blueprint, resolve_kernels(KernelContext("cpu", "float32")), torch.float32)
    attention = made.attention(0, made.rotary(), interleaved=True)
    query, key, value = attention.qkv.weight.parts
    assert all(part.transform is None for part in (query, key, value))
    assert query.rows is not None and key.rows is not None and value.rows is None
    assert query.rows[:16].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert sorted(key.rows.tolist()) == list(range(16))


@pytest.mark.parametrize(("old", "new"), [("model.", "language_model.model."), ("model.", "model.language_model.")])
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("ministral3", "Mistral3ForConditionalGeneration"),
        ("mistral4", "Mistral3ForConditionalGeneration"),
        ("deepseek-v3", "KimiK25ForConditionalGeneration"),
        ("gemma3n", "Gemma3nForConditionalGeneration"),
        ("gemma4", "Gemma4ForConditionalGeneration"),
    ],
)
def test_a_text_model_inside_one_that_sees(name: str, architecture: str, old: str, new: str, tmp_path: Path) -> None:
    theirs = tiny.save(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {key.replace(old, new, 1) if key.startswith(old) else key: tensor for key, tensor in tensors.items()}
    named["vision_tower.patch_embed.weight"] = torch.ones(3)
    save_file(named, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    config = {"architectures": [architecture], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = tiny.prompt(21)
    logits = Harness(load(tmp_path)).step({"row": tokens})["row"]
    assert tiny.distance(logits, tiny.reference_logits(theirs, tokens)) < 1e-4


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_what_files_have_of_layers_without_keys_is_left_over(name: str, tmp_path: Path) -> None:
    theirs = tiny.save(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own, others = (f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (2, 5))
    assert own in tensors and others not in tensors
    tensors[others] = torch.ones(3)
    tensors["model.embed_audio.embedding.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    ours = load(tmp_path)
    assert len(ours.cache_specs) == 3 and len(ours.blocks) == 6  # nor do they cost memory
    logits = Harness(ours).step({"row": tiny.prompt(21)})["row"]
    assert tiny.distance(logits, tiny.reference_logits(theirs, tiny.prompt(21))) < 1e-4


def test_layers_named_by_letters(tmp_path: Path) -> None:
    """Nemotron-H's files, and names of NVIDIA's own."""
    theirs = tiny.save("nemotron-h", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    types = config.pop("layers_block_type", None) or config.pop("layer_types")
    config.pop("num_hidden_layers", None)
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in types)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    named = {f"backbone.{key.split('.', 1)[1]}" if "lm_head" not in key else key: t for key, t in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    logits = Harness(load(tmp_path)).step({"row": tiny.prompt(21)})["row"]
    assert tiny.distance(logits, tiny.reference_logits(theirs, tiny.prompt(21))) < 1e-4
