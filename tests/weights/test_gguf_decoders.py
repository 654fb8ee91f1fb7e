"""GGUF files of further decoder families, laid out as converters do, compute what the Hugging Face folder computes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.config.errors import CheckpointError
from penstock.models.gguf.configuration import gguf_config
from penstock.models.gguf.decoders import DECODERS
from penstock.quant.formats import decode_to_float32
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint
from penstock.weights.readers.gguf_file import read_gguf_file
from tests.models import tiny
from tests.models.harness import Harness, check_logits, load
from tests.runtime.drafters.test_mtp_layouts import LAYOUTS, compare, publish

Arrays = dict[str, np.ndarray]
A = gguf.MODEL_ARCH
LATENT = (A.DEEPSEEK2, A.MISTRAL4)
LLAMA3 = {**tiny.LLAMA3, "original_max_position_embeddings": 64}
LLAMA4 = {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192}
# family of tiny.py → (architecture of GGUF, fields that a GGUF file cannot say otherwise)
CASES: dict[str, tuple[gguf.MODEL_ARCH, dict[str, Any]]] = {
    "deepseek-v2": (A.DEEPSEEK2, {}),
    "deepseek-v2-groups": (A.DEEPSEEK2, {"attention_bias": False}),
    "deepseek-v3": (A.DEEPSEEK2, {"rope_parameters": {**tiny.YARN, "mscale": 0.8, "mscale_all_dim": 0.8}}),
    "glm4-moe-lite": (A.DEEPSEEK2, {}),
    "gemma": (A.GEMMA, {}),
    "gemma2": (A.GEMMA2, {"query_pre_attn_scalar": 10}),
    "phi": (A.PHI2, {}),
    "phi3": (A.PHI3, {}),
    "phi3-longrope": (A.PHI3, {}),
    "phi-moe": (A.PHIMOE, {"router_jitter_noise": 0.01}),
    "glm": (A.CHATGLM, {}),
    "glm4": (A.GLM4, {}),
    "glm4-moe": (A.GLM4_MOE, {}),
    "glm4-moe-normed": (A.GLM4_MOE, {}),
    "dots1": (A.DOTS1, {}),
    "llama4": (A.LLAMA4, {**LLAMA4, "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}),
    "llama4-plain": (A.LLAMA4, {**LLAMA4, "use_qk_norm": True, "rope_parameters": LLAMA3}),
    "ministral3": (A.MISTRAL3, {}),
    "mistral4": (A.MISTRAL4, {}),
    "llama": (A.INTERNLM2, {}),
    "llama-plain-heads": (A.BAICHUAN, {}),
    "cohere": (A.COMMAND_R, {}),
    "cohere-norms": (A.COMMAND_R, {"attention_bias": False}),
    "cohere2": (A.COHERE2, {}),
    "granite": (A.GRANITE, {}),
    "granite-moe": (A.GRANITE_MOE, {}),
    "granite-moe-shared": (A.GRANITE_MOE, {}),
    "olmo": (A.OLMO, {}),
    "olmo2": (A.OLMO2, {}),
    "olmo3": (A.OLMO2, {}),
    "olmoe": (A.OLMOE, {}),
    "stablelm": (A.STABLELM, {}),
    "stablelm-parallel": (A.STABLELM, {}),
    "starcoder2": (A.STARCODER2, {"sliding_window": None}),
    "gpt-neox": (A.GPTNEOX, {}),
    "gpt-neox-serial": (A.GPTNEOX, {}),
    "exaone4": (A.EXAONE4, {}),
    "exaone-moe": (A.EXAONE_MOE, {}),
    "exaone4-full": (A.EXAONE4, {}),
    "ernie4_5": (A.ERNIE4_5, {}),
    "ernie4_5-biases": (A.ERNIE4_5, {}),
    "ernie4_5-moe": (A.ERNIE4_5_MOE, {}),
    "hunyuan": (A.HUNYUAN_DENSE, {}),
    "hunyuan-alpha": (A.HUNYUAN_DENSE, {}),
    "hunyuan-moe": (A.HUNYUAN_MOE, {}),
    "seed-oss": (A.SEED_OSS, {}),
    "smollm3": (A.SMOLLM3, {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "nemotron": (A.NEMOTRON, {}),
    "arcee": (A.ARCEE, {}),
    "jais2": (A.JAIS2, {}),
    "minimax-m2": (A.MINIMAXM2, {}),
    "qwen2-moe": (A.QWEN2MOE, {}),
}
SIZES = {  # key → names of the field, of which the first there is counts
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",),
    "attention.scale": ("attention_multiplier",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "use_parallel_residual": ("use_parallel_residual",),
}


def metadata(arch: gguf.MODEL_ARCH, config: Any) -> dict[str, Any]:
    def first(*names: str, default: Any = None) -> Any:
        return next((found for name in names if (found := getattr(config, name, None)) is not None), default)

    hidden, heads = config.hidden_size, config.num_attention_heads
    dim = first("head_dim", default=hidden // heads)
    inner = first("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_hidden_size", default=4 * hidden)
    pairs = {key: first(*names) for key, names in SIZES.items()} | {
        "feed_forward_length": inner,
        "attention.head_count_kv": first("num_key_value_heads", default=heads),
        "attention.key_length": dim,
        "attention.value_length": dim,
    }
    rms = first("rms_norm_eps")
    if rms is None or arch in (A.COMMAND_R, A.COHERE2, A.STABLELM, A.STARCODER2, A.NEMOTRON, A.JAIS2, A.OLMO):
        other = first("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", default=1e-5)
        pairs["attention.layer_norm_epsilon"] = 1e-5 if arch == A.OLMO else other
    else:
        pairs["attention.layer_norm_rms_epsilon"] = rms
    if arch in (A.GEMMA2, A.PHI3, A.PHIMOE, A.COHERE2, A.OLMO2, A.EXAONE4, A.EXAONE_MOE):
        pairs["attention.sliding_window"] = first("sliding_window", default=0 if arch == A.PHI3 else None)
    if arch in (A.OLMO2, A.EXAONE4, A.EXAONE_MOE) and pairs["attention.sliding_window"]:
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        pairs["attention.sliding_window_pattern"] = slides
    if arch == A.LLAMA4:
        pairs["expert_feed_forward_length"] = config.intermediate_size
    if arch in LATENT:
        sigmoid = type(config).__name__ not in ("DeepseekV2Config", "Mistral4Config")
        pairs |= {
            "expert_gating_func": 2 if sigmoid else 1,
            "attention.head_count_kv": 1,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length_mla": config.v_head_dim,
        }
    if getattr(config, "norm_topk_prob", True) is False:
        del pairs["expert_weights_norm"]
    pairs |= rope(arch, config, config.qk_rope_head_dim if arch in LATENT else dim)
    name = gguf.MODEL_ARCH_NAMES[arch]
    return {f"{name}.{key}": value for key, value in pairs.items() if value is not None}


def rope(arch: gguf.MODEL_ARCH, config: Any, dim: int) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    theta, kind = parameters.get("rope_theta", 10000.0), parameters.get("rope_type", "default")
    rotated = int(dim * parameters.get("partial_rotary_factor", 1.0))
    if parameters.get("alpha"):
        theta *= parameters["alpha"] ** (dim / (dim - 2))
    found: dict[str, Any] = {"rope.freq_base": float(theta), "rope.dimension_count": dim if arch in LATENT else rotated}
    if kind == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": parameters["factor"]}
        if parameters.get("mscale_all_dim"):
            factor = 0.1 if arch in LATENT else 1.0
            found["rope.scaling.yarn_log_multiplier"] = factor * parameters["mscale_all_dim"]
        found["attention.temperature_scale"] = parameters.get("llama_4_scaling_beta")
    if kind in ("yarn", "longrope"):
        original = parameters["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = original
        if kind == "longrope":
            scale = config.max_position_embeddings / original
            found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return found


def regrouped(array: np.ndarray, kv_heads: int, dim: int) -> np.ndarray:
    """The queries of each KV head, its key and its value in turn → all queries, all keys, all values."""
    groups = array.reshape(kv_heads, -1, dim, *array.shape[1:])
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def changed(arch: gguf.MODEL_ARCH, key: str, array: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """What a converter makes of a tensor, under Hugging Face's names or the file's."""
    heads, dim = config.num_attention_heads, getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // heads
    layer = match[1] if (match := re.search(r"\.(\d+)\.", key)) else ""
    if DECODERS[gguf.MODEL_ARCH_NAMES[arch]].permuted and re.search(r"\.[qk]_proj\.", key):
        count = heads if "q_proj" in key else config.num_key_value_heads
        array = array.reshape(count, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if arch in (A.GEMMA, A.GEMMA2, A.NEMOTRON) and key.endswith("norm.weight"):
        array = array + 1
    if arch == A.GPTNEOX and "query_key_value" in key:
        array = regrouped(array, heads, dim)
    if "kv_b_proj" in key:
        each = array.reshape(heads, -1, array.shape[1])
        keys, values = np.split(each, [config.qk_nope_head_dim], axis=1)
        return {f"blk.{layer}.attn_k_b.weight": keys.swapaxes(1, 2), f"blk.{layer}.attn_v_b.weight": values}
    if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        array = array.swapaxes(1, 2) if arch == A.LLAMA4 else array
        if "down" in key:
            return {f"blk.{layer}.ffn_down_exps.weight": array}
        return halves(array, layer, "_exps", 1)
    if "input_linear" in key:
        ending = "_shexp" if "shared" in key else "_exps"
        return halves(array, layer, ending, array.ndim - 2)
    if "output_linear" in key:
        return {f"blk.{layer}.ffn_down_{'shexp' if 'shared' in key else 'exps'}.weight": array}
    key = key.replace("e_score_correction_bias", "e_score_correction.bias")
    return {key: array.squeeze() if "shared_expert_gate" in key or "moe_statics" in key else array}


def halves(array: np.ndarray, layer: str, ending: str, axis: int) -> dict[str, np.ndarray]:
    gate, up = np.split(array, 2, axis=axis)
    return {f"blk.{layer}.ffn_gate{ending}.weight": gate, f"blk.{layer}.ffn_up{ending}.weight": up}


def stacked(arrays: Arrays) -> Arrays:
    """Experts, and norms of one head each, one below the other."""
    found, lists = {}, dict[str, list[np.ndarray]]()
    parts = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
    for key, array in arrays.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\..*\.experts\.\d+\.(\w+)\.weight", key):
            lists.setdefault(f"blk.{match[1]}.ffn_{parts[match[2]]}_exps.weight", []).append(array)
        elif match := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.\d+\.weight", key):
            lists.setdefault(f"blk.{match[1]}.attn_{match[2]}_norm.weight", []).append(array)
        else:
            found[key] = array
    return found | {key: np.stack(arrays) for key, arrays in lists.items()}


def tensors(arch: gguf.MODEL_ARCH, arrays: Arrays, config: Any) -> Arrays:
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: Arrays = {}
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "llama3":
        turns = parameters["original_max_position_embeddings"] / 2 / np.pi
        turns = turns * parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        width = parameters["high_freq_factor"] - 1
        smooth = np.clip((turns - 1) / width, 0, 1) if width else turns > 1
        found["rope_freqs.weight"] = 1 / ((1 - smooth) / parameters["factor"] + smooth)
    for length in ("long", "short"):
        if f"{length}_factor" in parameters:
            found[f"rope_factors_{length}.weight"] = np.array(parameters[f"{length}_factor"])
    for original, array in stacked(arrays).items():
        if original == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for key, part in changed(arch, original, array, config).items():
            renamed = key if key.startswith("blk.") else table.get_name(key, (".weight", ".bias"))
            assert renamed is not None, key
            found[renamed] = part
    return found


def stored_arrays(folder: Path) -> Arrays:
    source = open_checkpoint(folder)
    arrays = {}
    for name, info in source.tensors.items():
        stored = source.read(name)
        arrays[name] = decode_to_float32(info.format, stored.data).reshape(info.shape)
    return arrays


def twin(family: str, tmp_path: Path, write_gguf: Callable[..., Path], **fields: Any) -> tuple[Any, Path]:
    """transformers' model, saved, and its GGUF file."""
    arch, conventional = CASES[family]
    theirs = tiny.save(family, tmp_path / "hf", **{**conventional, **fields})
    config, arrays = theirs.config, stored_arrays(tmp_path / "hf")
    name = gguf.MODEL_ARCH_NAMES[arch]
    return theirs, write_gguf(tmp_path / "m.gguf", name, metadata(arch, config), tensors(arch, arrays, config))


@pytest.mark.parametrize("family", CASES)
def test_logits(family: str, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    theirs, file = twin(family, tmp_path, write_gguf)
    ours, source = open_checkpoint(file), open_checkpoint(tmp_path / "hf")
    planned, expected = model_facts(ours), model_facts(source)
    assert (planned.layers, planned.parameters) == (expected.layers, expected.parameters)
    check_logits(file, theirs)


def test_projections_that_older_files_have_whole(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """Keys and values expanded from latents by one matrix, heads counted whole, routing known by its bias."""
    theirs = tiny.save("deepseek-v3", tmp_path / "hf", **CASES["deepseek-v3"][1])
    config, arrays = theirs.config, stored_arrays(tmp_path / "hf")
    found = {
        key: part for key, part in tensors(A.DEEPSEEK2, arrays, config).items() if not re.search("attn_[kv]_b", key)
    }
    for layer in range(3):
        found[f"blk.{layer}.attn_kv_b.weight"] = arrays[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
    pairs = metadata(A.DEEPSEEK2, config)
    for key in ("attention.key_length_mla", "attention.value_length_mla", "expert_gating_func"):
        del pairs[f"deepseek2.{key}"]
    whole = {"attention.key_length": 18, "attention.value_length": 7, "attention.head_count_kv": 6}
    pairs |= {f"deepseek2.{key}": value for key, value in whole.items()}
    file = write_gguf(tmp_path / "m.gguf", "deepseek2", pairs, found)
    assert open_checkpoint(file).config["architectures"] == ["DeepseekV3ForCausalLM"]
    check_logits(file, theirs)


def test_fused_projections(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """Phi 2 as its first converter had it; experts whose gates and ups are one tensor."""
    theirs = tiny.save("phi", tmp_path / "hf")
    found = tensors(A.PHI2, stored_arrays(tmp_path / "hf"), theirs.config)
    for layer in range(3):
        for ending in ("weight", "bias"):
            parts = [found.pop(f"blk.{layer}.attn_{part}.{ending}") for part in "qkv"]
            found[f"blk.{layer}.attn_qkv.{ending}"] = np.concatenate(parts)
    check_logits(write_gguf(tmp_path / "m.gguf", "phi2", metadata(A.PHI2, theirs.config), found), theirs)
    theirs = tiny.save("dots1", tmp_path / "hf2")
    found = tensors(A.DOTS1, stored_arrays(tmp_path / "hf2"), theirs.config)
    for layer in (1, 2):
        parts = [found.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        found[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    check_logits(write_gguf(tmp_path / "n.gguf", "dots1", metadata(A.DOTS1, theirs.config), found), theirs)


def test_a_layer_that_predicts_further_tokens_drafts(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """The model goes without it; a further one behind it is left out."""
    reference = publish(LAYOUTS["glm4-moe"], tmp_path / "hf")
    config = copy.deepcopy(reference.target.config)
    config.num_hidden_layers = 4
    found = tensors(A.GLM4_MOE, stored_arrays(tmp_path / "hf"), config)
    assert {key for key in found if "nextn" in key} >= {"blk.3.nextn.eh_proj.weight", "blk.3.nextn.enorm.weight"}
    found["blk.4.nextn.eh_proj.weight"] = np.ones((36, 72), np.float32)
    further = {"glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 2}
    file = write_gguf(tmp_path / "m.gguf", "glm4moe", metadata(A.GLM4_MOE, reference.target.config) | further, found)
    check_logits(file, reference.target)
    compare(file, reference.drafts, "mtp")


BLOCKS = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
BLOCKS |= {"num_hidden_layers": 2, "moe_intermediate_size": 32, "shared_intermediate_size": 32}
QUANTISED: dict[str, dict[str, Any]] = {
    "deepseek-v3": {**BLOCKS, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "granite-moe-shared": BLOCKS,
    "phi3": {**BLOCKS, "head_dim": None},
    "gpt-neox": {**BLOCKS, "head_dim": None, "num_key_value_heads": None, "moe_intermediate_size": None},
    "minimax-m2": {**BLOCKS, "head_dim": 32},
}


@pytest.mark.parametrize("family", QUANTISED)
def test_quantised(family: str, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """Parted, permuted and stacked matrices stay quantised: logits are those of the file's own values."""
    arch, name = CASES[family][0], gguf.MODEL_ARCH_NAMES[CASES[family][0]]
    theirs = tiny.save(family, tmp_path / "hf", **{**CASES[family][1], **QUANTISED[family]})
    found = tensors(arch, stored_arrays(tmp_path / "hf"), theirs.config)
    kinds = {key: "Q8_0" for key, array in found.items() if array.ndim > 1 and array.shape[-1] % 32 == 0}
    assert len(kinds) > 8
    kind = gguf.GGMLQuantizationType.Q8_0
    plain = {
        key: gguf.dequantize(gguf.quantize(np.ascontiguousarray(array, np.float32), kind), kind).reshape(array.shape)
        if key in kinds
        else array
        for key, array in found.items()
    }
    pairs, tokens = metadata(arch, theirs.config), tiny.prompt(30)
    files = (
        write_gguf(tmp_path / "q.gguf", name, pairs, found, kinds),
        write_gguf(tmp_path / "p.gguf", name, pairs, plain),
    )
    quantised, expected = (Harness(load(file)).step({"row": tokens})["row"] for file in files)
    assert float((quantised - expected).norm() / expected.norm()) < 0.1  # activations are rounded to eight bits
    formats = {info.format for name, info in open_checkpoint(tmp_path / "q.gguf").tensors.items() if "_proj" in name}
    assert "q8_0" in formats


@pytest.mark.parametrize("arch", DECODERS)
def test_impossible_metadata_is_named(arch: str, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """Whatever one key says, the file opens or an error names the key."""
    sizes = ["context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"]
    sizes += ["attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"]
    sizes += ["attention.kv_lora_rank", "attention.key_length_mla", "expert_count", "expert_used_count"]
    sizes += ["expert_feed_forward_length", "nextn_predict_layers", "attention.sliding_window", "expert_gating_func"]
    sound: dict[str, float | str] = {"general.architecture": arch, **{f"{arch}.{key}": 8 for key in sizes}}
    sound |= {f"{arch}.{key}": 1 for key in ("rope.dimension_count", "nextn_predict_layers", "expert_used_count")}
    for key in ("attention.layer_norm_rms_epsilon", "logit_scale", "attention.max_alibi_bias", "attention.clamp_kqv"):
        sound[f"{arch}.{key}"] = 0.5
    stored = {"token_embd.weight": np.zeros((9, 8)), "blk.0.attn_qkv.weight": np.zeros((24, 8))}
    file = read_gguf_file(write_gguf(tmp_path / "m.gguf", arch, {}, stored))
    assert gguf_config(sound, file.tensors)["model_type"]
    refused = []
    for key in set(sound) - {"general.architecture"}:
        for value in (None, -1, 0, 2**40, float("nan"), "x", [1, 2], [], True):
            try:
                gguf_config({**sound, key: value}, file.tensors)
            except CheckpointError as error:
                refused.append((key, str(error)))
    assert len(refused) > 20
    related = "of a head's 8 elements|nextn_predict_layers|rotated; fewer|expert_used_count"  # two keys that contradict
    assert [pair for pair in refused if pair[0] not in pair[1] and not re.search(related, pair[1])] == []
