"""Quantised Hugging Face folders, loaded and run: logits are those of transformers with the decoded weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.config.errors import CheckpointError
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.models.registry import build_model
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.methods import method_of
from penstock.weights.facts import model_facts
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny
from tests.models.harness import Harness, load
from tests.quant.stored import stored
from tests.quant.test_methods_gptq import pack

Encoded = tuple[dict[str, Tensor], Tensor]  # tensors by suffix of the module's name, and the weight they stand for
Encode = Callable[[Tensor], Encoded]
Stored = dict[str, Any]  # arrays or tensors by suffix
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}


def logits(folder: Path, context: KernelContext) -> Tensor:
    """Of the prompt, by this project's model under the context's kernels."""
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config, resolve_kernels(context), dtype=torch.float32)
    load_weights(model, checkpoint, plan_weights(model, checkpoint, LoadTarget(torch.float32)))
    return Harness(model).step({"row": tiny.prompt(20)})["row"]


def quantise(
    folder: Path, config: Mapping[str, Any], encode: Encode, architecture: str = "llama", **sizes: Any
) -> None:
    """Saves a tiny model whose projections are quantised; checks what penstock then computes."""
    plain = folder / "decoded"
    tiny.save(architecture, plain, **{**SIZES, **sizes})
    state, decoded = {}, {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        decoded[key] = tensor
        if key.endswith("_proj.weight"):
            tensors, weight = encode(tensor)
            decoded[key] = weight.contiguous()
            stem = key.removesuffix(".weight")
            state |= {stem + suffix: value.contiguous() for suffix, value in tensors.items()}
        else:
            state[key] = tensor
    assert len(state) > len(decoded)
    save_file(decoded, plain / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager", experts_implementation="eager")
    save_file(state, folder / "model.safetensors")
    stated = {**json.loads((plain / "config.json").read_text()), "quantization_config": dict(config)}
    (folder / "config.json").write_text(json.dumps(stated))
    expected = tiny.reference_logits(theirs, tiny.prompt(20))
    assert tiny.distance(logits(folder, KernelContext("cpu", "float32", prefer_reference=True)), expected) < 1e-4
    assert tiny.distance(logits(folder, KernelContext("cpu", "float32")), expected) < 0.25  # may round activations
    assert model_facts(open_checkpoint(folder)).parameters == sum(p.numel() for p in theirs.parameters())


def encode_gptq(weight: Tensor, ordered: bool = False) -> Encoded:
    outputs, inputs = weight.shape
    rng = np.random.default_rng(outputs)
    groups = np.arange(inputs) // 32
    if not ordered:
        groups = rng.permutation(groups)
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


def signed(generator: np.random.Generator, low: int, high: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return generator.integers(low, high, shape).astype(dtype)


def encode_by_method(config: Mapping[str, Any], make: Callable[[np.random.Generator, int, int], Stored]) -> Encode:
    """Random tensors of a format; what they stand for is tested with the methods."""

    def encode(weight: Tensor) -> Encoded:
        rows, inputs = weight.shape
        tensors = make(np.random.default_rng(rows + inputs), rows, inputs)
        held = {suffix: stored(suffix, value) for suffix, value in tensors.items()}
        method = method_of(config, {f"w{suffix}": tensor.info for suffix, tensor in held.items()})
        sources = method.sources("w.weight", {f"w{suffix}": suffix for suffix in held}) or {}
        used = {suffix: held[name] for suffix, name in sources.items()}
        decoded = torch.from_numpy(decode_canonical(method.canonical("w.weight", used, (rows, inputs))))
        scale = float(decoded.std()) * inputs**0.5
        assert 0.05 < scale < 20  # random codes make a model whose logits say something
        kept = {
            suffix: value if isinstance(value, Tensor) else torch.from_numpy(value) for suffix, value in tensors.items()
        }
        return kept, decoded

    return encode


def scales(generator: np.random.Generator, shape: tuple[int, ...], size: float, dtype: str = "f4") -> np.ndarray:
    return (generator.uniform(0.5, 1.0, shape) * size).astype(dtype)


def awq(r: np.random.Generator, n: int, k: int) -> Stored:
    words = signed(r, -(2**31), 2**31, (k, n // 8), "i4"), signed(r, -(2**31), 2**31, (k // 32, n // 8), "i4")
    return {".qweight": words[0], ".qzeros": words[1], ".scales": scales(r, (k // 32, n), 0.01, "f2")}


def packed_integers(r: np.random.Generator, n: int, k: int) -> Stored:
    return {
        ".weight_packed": signed(r, -(2**31), 2**31, (n, k // 8), "i4"),
        ".weight_scale": scales(r, (n, k // 32), 0.02),
        ".weight_zero_point": signed(r, -(2**31), 2**31, (n // 8, k // 32), "i4"),
        ".weight_shape": np.array([n, k]),
    }


def whole_integers(r: np.random.Generator, n: int, k: int) -> Stored:
    return {".weight": signed(r, -128, 128, (n, k), "i1"), ".weight_scale": scales(r, (n, 1), 0.002)}


def floats(r: np.random.Generator, shape: tuple[int, ...], size: float) -> Tensor:
    return torch.from_numpy(r.normal(size=shape) * size).to(torch.float8_e4m3fn)


def static_floats(r: np.random.Generator, n: int, k: int) -> Stored:
    return {
        ".weight": floats(r, (n, k), 40),
        ".weight_scale": scales(r, (1,), 0.004),
        ".input_scale": scales(r, (1,), 0.1),
    }


def block_floats(r: np.random.Generator, n: int, k: int) -> Stored:
    return {".weight": floats(r, (n, k), 40), ".weight_scale_inv": scales(r, (-(-n // 128), -(-k // 128)), 0.004)}


def nvfp4(r: np.random.Generator, n: int, k: int) -> Stored:
    return {
        ".weight": signed(r, 0, 256, (n, k // 2), "u1"),
        ".weight_scale": torch.from_numpy(scales(r, (n, k // 16), 1.0)).to(torch.float8_e4m3fn),
        ".weight_scale_2": scales(r, (1,), 0.05),
    }


def nf4(r: np.random.Generator, n: int, k: int) -> Stored:
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [n, k]}).encode()
    return {
        ".weight": signed(r, 0, 256, (n * k // 2, 1), "u1"),
        ".weight.absmax": scales(r, (n * k // 64,), 0.3),
        ".weight.quant_map": np.linspace(-1, 1, 16, dtype="f4"),
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(state, dtype=np.uint8).copy(),
    }


def int8(r: np.random.Generator, n: int, k: int) -> Stored:
    return {
        ".weight": signed(r, -127, 128, (n, k), "i1"),
        ".SCB": scales(r, (n,), 0.3),
        ".weight_format": np.zeros((), dtype=np.uint8),
    }


def hqq(r: np.random.Generator, n: int, k: int) -> Stored:
    name = np.frombuffer(b"4bit_u8", dtype=np.uint8).copy()
    return {
        ".W_q": signed(r, 0, 256, (n * k // 64, 32), "u1"),
        ".scale": scales(r, (n * k // 32, 1), 0.03, "f2"),
        ".zero": (r.normal(size=(n * k // 32, 1)) + 8).astype("f2"),
        ".packing": name,
        ".axis": np.array(1, dtype="i4"),
        ".shape": np.array([n, k]),
    }


def eetq(r: np.random.Generator, n: int, k: int) -> Stored:
    return {".weight": signed(r, -128, 128, (k, n), "i1"), ".weight_scales": scales(r, (n,), 0.003, "f2")}


def mlx(r: np.random.Generator, n: int, k: int) -> Stored:
    return {
        ".weight": r.integers(0, 2**32, (n, k * 6 // 32), dtype=np.uint32),
        ".scales": scales(r, (n, k // 32), 0.006),
        ".biases": scales(r, (n, k // 32), -0.25),
    }


def bitnet(r: np.random.Generator, n: int, k: int) -> Stored:
    fields = r.integers(0, 3, (4, n // 4, k))
    packed = sum(fields[index] << 2 * index for index in range(4)).astype("u1")
    return {".weight": packed, ".weight_scale": scales(r, (1,), 10.0)}


def aqlm(r: np.random.Generator, n: int, k: int) -> Stored:
    return {
        ".codes": signed(r, -128, 128, (n, k // 8, 2), "i1"),
        ".codebooks": (r.normal(size=(2, 256, 1, 8)) * 0.1).astype("f2"),
        ".scales": scales(r, (n, 1, 1, 1), 1.0, "f2"),
    }


def exl2(r: np.random.Generator, n: int, k: int) -> Stored:
    half = k // 2
    return {
        ".q_weight": signed(r, -(2**31), 2**31, (half * 4 // 32 + half * 3 // 32, n), "i4"),
        ".q_scale": signed(r, -(2**31), 2**31, (2, n // 8), "i4"),
        ".q_scale_max": scales(r, (2,), 0.1, "f2"),
        ".q_groups": np.array([4, 0, 3, half * 4 // 32], dtype="i2"),
        ".q_invperm": r.permutation(k).astype("i4"),
    }


def exl3(r: np.random.Generator, n: int, k: int) -> Stored:
    return {
        ".trellis": signed(r, -(2**15), 2**15, (k // 16, n // 16, 48), "i2"),
        ".suh": scales(r, (k,), 0.2, "f2"),
        ".svh": scales(r, (n,), 1.0, "f2"),
        ".mcg": np.zeros((), dtype="i4"),
    }


COMPRESSED = {"quant_method": "compressed-tensors"}
INTEGERS = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}}}
FOLDERS: dict[str, tuple[dict[str, Any], Callable[[np.random.Generator, int, int], Stored]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "auto-round": ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "group_size": 32}, awq),
    "w4a16": ({**COMPRESSED, "format": "pack-quantized", **INTEGERS}, packed_integers),
    "w8a8": ({**COMPRESSED, "format": "int-quantized"}, whole_integers),
    "fp8-static": ({**COMPRESSED, "format": "float-quantized"}, static_floats),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, block_floats),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8),
    "hqq": ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"group_size": 32}}}, hqq),
    "eetq": ({"quant_method": "eetq"}, eetq),
    "mlx": ({"bits": 6, "group_size": 32}, mlx),
    "bitnet": ({"quant_method": "bitnet"}, bitnet),
    "aqlm": ({"quant_method": "aqlm"}, aqlm),
    "exl2": ({"quant_method": "exl2"}, exl2),
    "exl3": ({"quant_method": "exl3"}, exl3),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_quantised_folder_runs(name: str, tmp_path: Path) -> None:
    config, make = FOLDERS[name]
    quantise(tmp_path, config, encode_by_method(config, make))


def test_gptq(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    quantise(tmp_path, config, encode_gptq)


@pytest.mark.parametrize("name", ["awq", "fp8", "nf4", "mlx"])
def test_experts_stored_one_by_one(name: str, tmp_path: Path) -> None:
    config, make = FOLDERS[name]
    sizes = {"moe_intermediate_size": 64, "mlp_only_layers": [1]}
    quantise(tmp_path, config, encode_by_method(config, make), "qwen3-moe", **sizes)


def test_settings_in_files_of_their_own(tmp_path: Path) -> None:
    """What NVIDIA, AutoGPTQ and AutoAWQ write beside config.json; config.json wins."""
    tiny.save("llama", tmp_path)
    assert "quantization_config" not in open_checkpoint(tmp_path).config
    for file, fields, method in (
        ("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4}, "awq"),
        ("quantize_config.json", {"bits": 4, "group_size": 32}, "gptq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "modelopt"),
    ):
        (tmp_path / file).write_text(json.dumps(fields))
        assert open_checkpoint(tmp_path).config["quantization_config"]["quant_method"] == method
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    assert open_checkpoint(tmp_path).config["quantization_config"] == {"quant_method": "fp8"}


def test_missing_and_left_over_tensors_are_named(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    quantise(tmp_path, config, encode_gptq)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.self_attn.q_proj.scales"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.self_attn\.q_proj\.weight; 3 unknown"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": "x"}, "num_bits 'x' cannot be read; allowed: 1, 2, 3"),
        ({"num_bits": 4, "group_size": "all"}, "group_size 'all' cannot be read"),
        ("W4", "config_groups 'W4' cannot be read"),
    ],
)
def test_settings_of_compressed_tensors_are_checked(weights: Any, message: str) -> None:
    groups = {"group_0": {"weights": weights}} if isinstance(weights, dict) else weights
    with pytest.raises(CheckpointError, match=re.escape(message)):
        method_of({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}, {})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 5, "group_size": 32}, "has 4 bits a weight where num_bits is 5"),
        ({"num_bits": 4, "group_size": 16}, "has groups of 32 inputs where group_size is 16"),
    ],
)
def test_settings_that_contradict_the_tensors_are_refused(weights: dict[str, int], message: str) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    tensors = {
        ".weight_packed": stored(".weight_packed", np.zeros((8, 8), np.int32)),
        ".weight_scale": stored(".weight_scale", np.ones((8, 2), np.float32)),
    }
    with pytest.raises(CheckpointError, match=message):
        method_of(config, {}).canonical("w.weight", tensors, (8, 64))
