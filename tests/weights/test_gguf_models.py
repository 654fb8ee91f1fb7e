"""GGUF models under Hugging Face names: converted here as the usual converters do, read back, compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.config.errors import CheckpointError
from penstock.engine.text_pipeline import TextPipeline
from penstock.quant.formats import decode_to_float32, mxfp4
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.open import bundled_model_path, open_checkpoint
from penstock.weights.readers.safetensors import read_safetensors_file

Arrays = dict[str, np.ndarray]
WriteGguf = Callable[..., Path]
Metadata = Callable[..., dict[str, Any]]
SIZE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act", "tie_word_embeddings"),
    *("architectures", "model_type"),
)


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    stored = checkpoint.read(name)
    assert stored.info.nbytes == stored.data.size
    return decode_to_float32(stored.info.format, stored.data).reshape(stored.info.shape)


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """(half, pair) → (pair, half) within each head, as converters store Llama's query and key rows."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
    return split.swapaxes(1, 2).reshape(array.shape)


def gguf_names(arch: gguf.MODEL_ARCH, tensors: Mapping[str, np.ndarray], layers: int) -> Arrays:
    """Renames with the gguf package's own table."""
    table = gguf.get_tensor_name_map(arch, layers)
    renamed = {table.get_name(name, (".weight", ".bias")) or "": array for name, array in tensors.items()}
    assert "" not in renamed
    return renamed


def hugging_face_arrays(file: Path) -> Arrays:
    return {
        name: decode_to_float32(stored.info.format, stored.data).reshape(stored.info.shape)
        for name, stored in read_safetensors_file(file).items()
    }


def metadata_of(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    pairs = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if "head_dim" in config:
        pairs |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    found = {f"{arch}.{key}": value for key, value in pairs.items()}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if config.get(f"{ours}_token_id") is not None:
            found[f"tokenizer.ggml.{theirs}_token_id"] = config[f"{ours}_token_id"]
    return found


def stories(shared_data: Path) -> tuple[dict[str, Any], Arrays, Arrays]:
    """Config, tensors, and the tensors as a GGUF file holds them."""
    source = shared_data / "models/stories260K/hf"
    config = json.loads((source / "config.json").read_text())
    arrays = hugging_face_arrays(source / "model.safetensors")
    arrays.pop("lm_head.weight", None)
    stored = dict(arrays)
    for name, array in arrays.items():
        if "q_proj" in name or "k_proj" in name:
            stored[name] = permuted(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    return config, arrays, gguf_names(gguf.MODEL_ARCH.LLAMA, stored, config["num_hidden_layers"])


def test_llama_in_float32_equals_its_twin(shared_data: Path, tmp_path: Path, write_gguf: WriteGguf) -> None:
    config, arrays, stored = stories(shared_data)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama", config), stored))
    assert set(checkpoint.tensors) == set(arrays)
    assert any((permuted(a, 8) != a).any() for n, a in arrays.items() if "q_proj" in n)
    for name, array in arrays.items():
        assert np.array_equal(values(checkpoint, name), array), name
    for key in (*SIZE_KEYS, "bos_token_id", "eos_token_id", "torch_dtype"):
        assert checkpoint.config[key] == config[key], key
    assert checkpoint.generation_config["eos_token_id"] == [2]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_llama_quantised_equals_the_oracle(shared_data: Path, tmp_path: Path, write_gguf: WriteGguf, kind: str) -> None:
    config, arrays, stored = stories(shared_data)
    kinds = {name: kind for name, array in stored.items() if array.ndim == 2 and array.shape[1] % 32 == 0}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama", config), stored, kinds)
    checkpoint = open_checkpoint(path)
    oracle = gguf.GGMLQuantizationType[kind]
    checked = 0
    for name, array in arrays.items():
        if checkpoint.tensors[name].format == kind.lower():
            expected = gguf.dequantize(gguf.quantize(array, oracle), oracle)
            assert np.array_equal(values(checkpoint, name), expected.reshape(array.shape)), name
            checked += 1
    assert checked > 20


def test_qwen3_concierge_equals_its_twin(tmp_path: Path, write_gguf: WriteGguf) -> None:
    source = bundled_model_path()
    config = json.loads((source / "config.json").read_text())
    arrays = hugging_face_arrays(source / "model.safetensors")
    arrays.pop("lm_head.weight", None)
    stored = gguf_names(gguf.MODEL_ARCH.QWEN3, arrays, config["num_hidden_layers"])
    kinds = {name: "BF16" for name, array in stored.items() if array.ndim == 2}
    metadata = metadata_of("qwen3", config) | {
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "tokenizer.ggml.tokens": ["<|endoftext|>", "x", "<|im_end|>"],
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen3", metadata, stored, kinds))
    twin = open_checkpoint(source)
    assert set(checkpoint.tensors) == set(twin.tensors) - {"lm_head.weight"}
    for name, array in arrays.items():
        assert np.array_equal(values(checkpoint, name), array), name
    for key in (*SIZE_KEYS, "head_dim", "attention_bias", "eos_token_id", "bos_token_id", "torch_dtype"):
        assert checkpoint.config[key] == config[key], key
    assert checkpoint.generation_config == {"eos_token_id": [2, 0], "temperature": 0.6, "top_k": 20}
    both = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert checkpoint.tokenizer_config["chat_template"] == both
    assert checkpoint.tokenizer_config["eos_token"] == "<|im_end|>"
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["<|endoftext|>", "x", "<|im_end|>"]


def test_text_side_of_the_concierge_is_the_same_from_gguf(tmp_path: Path, write_gguf: WriteGguf) -> None:
    source = bundled_model_path()
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    special = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()} | special
    metadata = metadata_of("qwen3", config) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [tokens[index] for index in sorted(tokens)],
        "tokenizer.ggml.token_type": [3 if index in special else 1 for index in sorted(tokens)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.chat_template": (source / "chat_template.jinja").read_text(),
        "general.sampling.temp": 0.6,
        "general.sampling.top_p": 0.95,
    }
    embedding = {"token_embd.weight": np.zeros((4096, 256), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "qwen3", metadata, embedding)
    ours, twin = TextPipeline.load(str(path)), TextPipeline.load("penstock-concierge")
    messages = [{"role": "user", "content": "A table for two in San José, at 7:30 pm — for 2 people?"}]
    assert ours.template is not None
    assert twin.template is not None
    prompt = ours.template.render(messages)
    assert prompt == twin.template.render(messages)
    assert ours.tokenizer.encode(prompt) == twin.tokenizer.encode(prompt)
    assert (ours.eos_ids, ours.vocab_size) == (twin.eos_ids, twin.vocab_size)
    assert ours.sampling() == twin.sampling()


def test_untied_output_and_qwen2_biases(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays
) -> None:
    rng = np.random.default_rng(1)
    arrays = dense_tensors | {
        "lm_head.weight": rng.normal(size=(32, 16)).astype(np.float32),
        "model.layers.1.self_attn.q_proj.bias": rng.normal(size=16).astype(np.float32),
    }
    stored = gguf_names(gguf.MODEL_ARCH.QWEN2, arrays, 2)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen2", base_metadata("qwen2"), stored))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["head_dim"] == 4
    assert set(checkpoint.tensors) == set(arrays)
    for name, array in arrays.items():
        assert np.array_equal(values(checkpoint, name), array), name


def test_llama_bias_rows_are_unpermuted_too(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays
) -> None:
    bias = np.arange(16, dtype=np.float32)
    stored = gguf_names(gguf.MODEL_ARCH.LLAMA, dense_tensors, 2) | {"blk.0.attn_q.bias": permuted(bias, 4)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", base_metadata("llama"), stored))
    assert np.array_equal(values(checkpoint, "model.layers.0.self_attn.q_proj.bias"), bias)
    assert checkpoint.config["attention_bias"] is True


def experts(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(4, rows, columns)).astype(np.float32)


@pytest.mark.parametrize(
    ("arch", "prefix", "names", "router"),
    [
        ("llama", "block_sparse_moe.experts", ("w1", "w3", "w2"), "block_sparse_moe.gate"),
        ("qwen3moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj"), "mlp.gate"),
    ],
)
def test_stacked_experts_become_one_tensor_each(
    tmp_path: Path,
    write_gguf: WriteGguf,
    base_metadata: Metadata,
    dense_tensors: Arrays,
    arch: str,
    prefix: str,
    names: tuple[str, str, str],
    router: str,
) -> None:
    dense = {name: array for name, array in dense_tensors.items() if ".mlp." not in name}
    kind = gguf.MODEL_ARCH.LLAMA if arch == "llama" else gguf.MODEL_ARCH.QWEN3MOE
    stored = gguf_names(kind, dense, 2) | {"blk.0.ffn_gate_inp.weight": np.ones((4, 16), np.float32)}
    stacks = {"gate": experts(32, 64, 1), "up": experts(32, 64, 2), "down": experts(64, 32, 3)}
    stored |= {f"blk.0.ffn_{which}_exps.weight": array for which, array in stacks.items()}
    kinds = {f"blk.0.ffn_{which}_exps.weight": "Q8_0" for which in stacks}
    more = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    path = write_gguf(tmp_path / "m.gguf", arch, base_metadata(arch, **more), stored, kinds)
    checkpoint = open_checkpoint(path)
    assert f"model.layers.0.{router}.weight" in checkpoint.tensors
    q8 = gguf.GGMLQuantizationType.Q8_0
    for which, name in zip(("gate", "up", "down"), names, strict=True):
        for expert in range(4):
            full = f"model.layers.0.{prefix}.{expert}.{name}.weight"
            expected = gguf.dequantize(gguf.quantize(stacks[which][expert], q8), q8)
            assert np.array_equal(values(checkpoint, full), expected)
            assert np.shares_memory(checkpoint.read(full).data, checkpoint.read(full).data)
    counts = {"llama": "num_local_experts", "qwen3moe": "num_experts"}
    assert checkpoint.config[counts[arch]] == 4
    assert checkpoint.config["num_experts_per_tok"] == 2
    if arch == "qwen3moe":
        assert checkpoint.config["moe_intermediate_size"] == 32


def test_old_mixtral_files_with_one_tensor_an_expert(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays
) -> None:
    stored = gguf_names(gguf.MODEL_ARCH.LLAMA, {n: a for n, a in dense_tensors.items() if ".mlp." not in n}, 2)
    stored["blk.1.ffn_up.3.weight"] = experts(24, 16, 0)[0]
    path = write_gguf(tmp_path / "m.gguf", "llama", base_metadata("llama", expert_count=4, expert_used_count=2), stored)
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    assert np.array_equal(values(open_checkpoint(path), name), stored["blk.1.ffn_up.3.weight"])


def test_gemma3_norms_layers_and_config(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays
) -> None:
    arrays = dict(dense_tensors)
    for layer in range(2):
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            width = 4 if "self_attn" in name else 16
            arrays[f"model.layers.{layer}.{name}.weight"] = np.linspace(-1, 1, width, dtype=np.float32)
    stored = gguf_names(gguf.MODEL_ARCH.GEMMA3, arrays, 2)
    stored = {name: array + 1 if name.endswith("norm.weight") else array for name, array in stored.items()}
    more = {"attention.key_length": 4, "attention.sliding_window": 8, "rope.freq_base": 1e6, "block_count": 7}
    more |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "gemma3", base_metadata("gemma3", **more), stored))
    assert set(checkpoint.tensors) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_allclose(values(checkpoint, name), array, atol=2e-7, err_msg=name)
    config = checkpoint.config
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]
    assert (config["rope_theta"], config["rope_local_base_freq"], config["query_pre_attn_scalar"]) == (1e6, 1e4, 4)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["sliding_window"] == 8


@pytest.mark.parametrize("kind", ["MXFP4", "F16", "Q8_0"])
def test_gpt_oss_experts_are_rejoined(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays, kind: str
) -> None:
    dense = {name: array for name, array in dense_tensors.items() if ".mlp." not in name}
    stored = gguf_names(gguf.MODEL_ARCH.GPT_OSS, dense, 2)
    stored["blk.0.attn_sinks.weight"] = np.arange(4, dtype=np.float32)
    stored["blk.0.ffn_gate_inp.weight"] = np.ones((4, 16), np.float32)
    gate, up, down = experts(32, 64, 1), experts(32, 64, 2), experts(64, 32, 3)
    stored |= {"blk.0.ffn_gate_exps.weight": gate, "blk.0.ffn_up_exps.weight": up, "blk.0.ffn_down_exps.weight": down}
    stored |= {"blk.0.ffn_gate_exps.bias": gate[:, :, 0], "blk.0.ffn_up_exps.bias": up[:, :, 0]}
    stored["blk.0.ffn_down_exps.bias"] = down[:, :, 0]
    kinds = {name: kind for name in stored if name.endswith("_exps.weight")}
    more = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "attention.sliding_window": 8}
    more |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096}
    metadata = base_metadata("gpt-oss", **more)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "gpt-oss", metadata, stored, kinds))
    prefix = "model.layers.0.mlp.experts."
    oracle = gguf.GGMLQuantizationType[kind]
    decoded = [gguf.dequantize(gguf.quantize(array, oracle), oracle).reshape(array.shape) for array in (gate, up, down)]
    joint = np.empty((4, 64, 64), np.float32)
    joint[:, 0::2], joint[:, 1::2] = decoded[0], decoded[1]
    for name, expected in (("gate_up_proj", joint), ("down_proj", decoded[2])):
        if kind == "MXFP4":
            blocks, scales = (checkpoint.read(f"{prefix}{name}_{part}") for part in ("blocks", "scales"))
            assert blocks.info.shape == (*expected.shape[:2], expected.shape[2] // 32, 16)
            pair = blocks.data.reshape(blocks.info.shape), scales.data.reshape(scales.info.shape)
            assert np.array_equal(mxfp4.decode_pair(*pair), expected)
        else:
            assert np.array_equal(values(checkpoint, prefix + name), expected.swapaxes(1, 2))
    bias = values(checkpoint, prefix + "gate_up_proj_bias")
    assert np.array_equal(bias[:, 0::2], gate[:, :, 0])
    assert np.array_equal(bias[:, 1::2], up[:, :, 0])
    assert np.array_equal(values(checkpoint, prefix + "down_proj_bias"), down[:, :, 0])
    assert np.array_equal(values(checkpoint, "model.layers.0.self_attn.sinks"), np.arange(4))
    assert "model.layers.0.mlp.router.weight" in checkpoint.tensors
    assert ("quantization_config" in checkpoint.config) == (kind == "MXFP4")
    assert checkpoint.config["layer_types"] == ["sliding_attention", "full_attention"]
    assert checkpoint.config["rope_scaling"]["truncate"] is False


def llama3_factors(dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """Written as transformers' `_compute_llama3_parameters` defines the scaled frequencies, then divided out."""
    out = []
    for index in range(0, dim, 2):
        frequency = theta ** (-index / dim)
        wavelength = 2 * np.pi / frequency
        if wavelength < original / 4:
            out.append(1.0)
        elif wavelength > original:
            out.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def test_llama3_rope_divisors_become_rope_scaling(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays
) -> None:
    metadata = base_metadata("llama", **{"rope.freq_base": 500000.0, "attention.key_length": 128})
    stored = {"token_embd.weight": dense_tensors["model.embed_tokens.weight"]}
    stored["rope_freqs.weight"] = llama3_factors(128, 500000.0, 32.0, 8192)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", metadata, stored))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.tensors
    stored["rope_freqs.weight"] = np.linspace(1, 9, 64)
    odd = open_checkpoint(write_gguf(tmp_path / "b.gguf", "llama", metadata, stored))
    assert odd.config["rope_scaling"] is None
    assert "rope_freqs.weight" in odd.tensors
    stored["rope_freqs.weight"] = np.ones(64)
    assert (
        "rope_freqs.weight" not in open_checkpoint(write_gguf(tmp_path / "c.gguf", "llama", metadata, stored)).tensors
    )


def test_configs_are_accepted_by_transformers(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays
) -> None:
    from transformers import AutoConfig

    more = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "attention.sliding_window": 8}
    stored = {"token_embd.weight": dense_tensors["model.embed_tokens.weight"]}
    expected = {"qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "qwen3moe": "Qwen3MoeConfig"}
    expected |= {"gemma3": "Gemma3TextConfig", "gpt-oss": "GptOssConfig", "llama": "MixtralConfig"}
    for arch, name in expected.items():
        checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", arch, base_metadata(arch, **more), stored))
        config = dict(checkpoint.config)
        parsed = AutoConfig.for_model(config.pop("model_type"), **config)
        assert type(parsed).__name__ == name
        assert (parsed.hidden_size, parsed.num_key_value_heads, parsed.vocab_size) == (16, 2, 32)


def test_split_files(tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays) -> None:
    stored = list(gguf_names(gguf.MODEL_ARCH.QWEN2, dense_tensors, 2).items())
    parts = [dict(stored[:7]), dict(stored[7:12]), dict(stored[12:])]
    for number, part in enumerate(parts):
        metadata = {"split.no": number, "split.count": 3, "split.tensors.count": len(stored)}
        metadata |= base_metadata("qwen2") if number == 0 else {}
        write_gguf(tmp_path / f"m-{number + 1:05d}-of-00003.gguf", "qwen2", metadata, part)
    for path in (tmp_path / "m-00001-of-00003.gguf", tmp_path / "m-00003-of-00003.gguf", tmp_path):
        checkpoint = open_checkpoint(path)
        assert set(checkpoint.tensors) == set(dense_tensors)
        for name, array in dense_tensors.items():
            assert np.array_equal(values(checkpoint, name), array)
    (tmp_path / "m-00002-of-00003.gguf").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"missing beside it: m-00002-of-00003\.gguf"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").rename(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "away").rename(tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(CheckpointError, match=r"split\.no"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


def test_undecodable_type_names_the_nearest(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays
) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in base_metadata("qwen2").items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_tensor("token_embd.weight", dense_tensors["model.embed_tokens.weight"])
    kind = gguf.GGMLQuantizationType.Q8_1
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, 40), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].format == "q8_1"
    with pytest.raises(CheckpointError, match=r"Q8_1 is a type for intermediate results.*take a file in Q8_0"):
        checkpoint.read("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 2**31, "qwen2.block_count is '2147483648'; an integer from 1 to 4096"),
        ("attention.head_count", 0, "head_count is '0'"),
        ("attention.layer_norm_rms_epsilon", "x", "a number above 0"),
        ("rope.scaling.type", "longrope", "rope scaling of type 'longrope'"),
        ("attention.head_count_kv", [1, 2], "head_count_kv"),
    ],
)
def test_bad_metadata_is_named(
    tmp_path: Path,
    write_gguf: WriteGguf,
    base_metadata: Metadata,
    dense_tensors: Arrays,
    key: str,
    value: Any,
    message: str,
) -> None:
    stored = {"token_embd.weight": dense_tensors["model.embed_tokens.weight"]}
    path = write_gguf(tmp_path / "m.gguf", "qwen2", base_metadata("qwen2", **{key: value}), stored)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(("arch", "near"), [("glm5moe", "glm4moe"), ("qwen4", "qwen3")])
def test_unsupported_architecture_names_the_nearest(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays, arch: str, near: str
) -> None:
    stored = {"token_embd.weight": dense_tensors["model.embed_tokens.weight"]}
    path = write_gguf(tmp_path / "m.gguf", arch, base_metadata(arch), stored)
    with pytest.raises(
        CheckpointError, match=rf"'{arch}', which is not supported; the nearest that is: {near}. All: llama"
    ):
        open_checkpoint(path)


def test_vocabulary_files(shared_data: Path) -> None:
    with pytest.raises(CheckpointError, match="it is a vocabulary, not a model"):
        open_checkpoint(shared_data / "tokenizers/ggml-vocab-llama-bpe.gguf")


def test_unknown_tensors_keep_their_names(
    tmp_path: Path, write_gguf: WriteGguf, base_metadata: Metadata, dense_tensors: Arrays
) -> None:
    stored = gguf_names(gguf.MODEL_ARCH.QWEN2, dense_tensors, 2) | {"blk.0.mystery.weight": np.ones(3, np.float32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen2", base_metadata("qwen2"), stored))
    assert "blk.0.mystery.weight" in checkpoint.tensors
    with pytest.raises(CheckpointError, match="has no tensor 'nothing'"):
        checkpoint.read("nothing")
