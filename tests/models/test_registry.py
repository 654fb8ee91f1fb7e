"""Configurations that cannot be built are refused by name; model files stay small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock.models
from penstock.config.errors import CheckpointError
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.models.families import ARCHITECTURES
from penstock.models.registry import Model, build_model
from tests.models import tiny
from tests.models.harness import load

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


THREE_N = {"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 0}
THREE_N |= {"layer_types": ["sliding_attention", "full_attention"]}
FOUR = {"architectures": ["Gemma4ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]}
LETTERS = {"architectures": ["NemotronHForCausalLM"], "mamba_num_heads": 2, "mamba_head_dim": 6, "n_groups": 1}
LETTERS |= {"num_key_value_heads": 2}
NARROW = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}


def build(**fields: Any) -> Model:
    config = {name: value for name, value in {**LLAMA, **fields}.items() if value != "absent"}
    return build_model(config, resolve_kernels(KernelContext("cpu", "float32")), dtype=torch.float32)


def test_defaults():
    model = build()
    assert model.cache_specs[0].num_kv_heads == 4
    assert model.cache_specs[0].key_dim == 6
    assert (model.max_positions, model.vocab_size) == (64, 50)
    assert build(rope_theta=None, num_key_value_heads=None).cache_specs == model.cache_specs


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM.*LlamaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "absent"}, "architectures"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3.*4 attention heads"),
        ({"hidden_size": 25}, "hidden_size is 25"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'.*silu"),
        ({"hidden_act": "gelu_newer"}, "hidden_act is 'gelu_newer'.*nearest: gelu_new"),
        ({"hidden_size": "absent", "hidden_sizes": 24}, "hidden_size is missing, though there is hidden_sizes, 24"),
        ({"architectures": ["LamaForCausalLM"]}, "LamaForCausalLM.*nearest that is known: LlamaForCausalLM"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"rope_parameters": 5}, "rope_parameters is 5"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "type is 'spiral'.*yarn"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "rope_type is 'yarm'.*nearest: yarn"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "moe_intermediate_size is missing"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": "0"}, "mlp_only_layers"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"architectures": ["OlmoeForCausalLM"], "num_experts": 2, "num_experts_per_tok": 3}, "per_tok is 3.*2"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 5, **NARROW, "num_experts_per_tok": 9},
            "num_experts_per_tok is 9; allowed: at most n_routed_experts, 5",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 6, "n_group": 4, **NARROW},
            "n_group is 4: 2 of 6 experts",
        ),
        (
            {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": [1, 2]},
            "moe_topk differs.*one number",
        ),
        (
            {"architectures": ["Llama4ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
            "num_experts_per_tok is 2; allowed: 1",
        ),
        ({"architectures": ["Llama4ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers has 1"),
        (
            {
                "architectures": ["Glm4MoeForCausalLM"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "mlp_layer_types": ["dense", "moe"],
            },
            "mlp_layer_types has .'moe'.*dense, sparse",
        ),
        ({"architectures": ["GptOssForCausalLM"], "num_local_experts": 2}, "experts_per_token is missing"),
        ({"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1"),
        ({"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention", "chunked"]}, "chunked"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window is missing",
        ),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1000000.0, but 10000.0 in rope_p"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "factor is 2.0, but None in rope_parameters",
        ),
        (
            {"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_type is linear, but default in rope_parameters",
        ),
        ({"model_type": "qwen2"}, "model_type is 'qwen2', which goes with Qwen2ForCausalLM, but .* LlamaForCausalLM"),
        ({"model_type": "xlm-roberta"}, "model_type is 'xlm-roberta', which goes with XLMRobertaModel"),
        ({"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "hyena"]}, "'hyena'.*conv, full_attention"),
        ({"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv"]}, "layer_types has 1"),
        ({"architectures": ["Mamba2ForCausalLM"], "num_heads": 5}, "num_heads is 5.*allowed: 48 in all"),
        ({"architectures": ["Mamba2ForCausalLM"], "num_heads": 6, "head_dim": 7}, "num_heads is 6, of 7 elements"),
        (
            {"architectures": ["Mamba2ForCausalLM"], "num_heads": 6, "time_step_limit": [0.5, 0.1]},
            "time_step_limit is .*the lower one first",
        ),
        ({"architectures": ["MambaForCausalLM"], "time_step_rank": "some"}, "time_step_rank is 'some'"),
        (
            {
                "architectures": ["FalconH1ForCausalLM"],
                "mamba_n_heads": 4,
                "attention_bias": True,
                "attention_in_multiplier": 0.5,
            },
            "attention_bias is true; allowed where attention_in_multiplier is 0.5: false",
        ),
        (
            {"architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 4, "mlp_multipliers": [0.5]},
            "mlp_multipliers has 1 entries; allowed: 2, the gate's and the output's",
        ),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 4, "linear_num_value_heads": 6},
            "linear_num_value_heads is 6; allowed: a multiple of linear_num_key_heads, 4",
        ),
        ({**THREE_N, "num_kv_shared_layers": 1}, "num_kv_shared_layers is 1, but before .* kind of layer 1"),
        ({**THREE_N, "num_kv_shared_layers": 3}, "num_kv_shared_layers is 3"),
        ({**THREE_N, "altup_active_idx": 4}, "altup_num_inputs is 4.*more than altup_active_idx, 4"),
        ({**THREE_N, "intermediate_size": [20]}, "intermediate_size has 1 entries; num_hidden_layers is 2"),
        ({**THREE_N, "activation_sparsity_pattern": [0.5, 1.0]}, "activation_sparsity_pattern is .*but not, 1"),
        ({**THREE_N, "activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 entries"),
        ({**FOUR, "use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'.*'vision'"),
        ({**FOUR, "per_layer_config": {"1": {"num_key_value_heads": 3}}}, "num_key_value_heads is 3.*divide 4 heads"),
        ({**FOUR, "enable_moe_block": True, "num_experts": 4}, "top_k_experts is missing"),
        (
            {
                **FOUR,
                "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
            },
            "partial_rotary_factor is 1.5; allowed: at most 1",
        ),
        ({**LETTERS, "hybrid_override_pattern": "MX"}, "layers_block_type is missing"),
        ({**LETTERS, "layers_block_type": ["mamba", "hyena"]}, "layers_block_type has .'hyena'.*moe"),
        ({**LETTERS, "layers_block_type": ["mamba", "moe"]}, "moe_intermediate_size is missing"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], named: str):
    with pytest.raises(CheckpointError, match=named):
        build(**fields)


def test_several_spellings_that_agree():
    scaling = {"type": "linear", "factor": 2}
    both = {"rope_theta": 5, "rope_scaling": scaling, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    assert build(**both, model_type="llama").max_positions == 128
    assert build(rope_theta=5, rope_scaling={}, rope_parameters={"rope_theta": 5.0}).max_positions == 64
    assert build(architectures=["DeepseekUnknown", "MistralForCausalLM"], model_type="ministral3").vocab_size == 50
    assert build(model_type="yi").vocab_size == 50


def test_a_second_architecture_name_is_tried():
    assert build(architectures=["Unknown", "MistralForCausalLM"]).vocab_size == 50


def test_gemma_3_files_that_state_little():
    """Published vision-language files leave the text model's head counts and vocabulary out."""
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7, "sliding_window": 1024}
    text = {**sizes, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    model = build_model(config, resolve_kernels(KernelContext("cpu", "float32")), dtype=torch.float32)
    assert [spec.window for spec in model.cache_specs] == [1024] * 5 + [None, 1024]
    assert (model.vocab_size, model.max_positions) == (262_208, 131_072)
    assert model.cache_specs[0].elements_per_token == 2 * 4 * 256


def test_model_files_stay_small():
    folder = Path(penstock.models.__file__).parent
    lines = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    families = {
        "llama.py",
        "mistral.py",
        "qwen2.py",
        "qwen3.py",
        "qwen3_moe.py",
        "mixtral.py",
        "gemma3.py",
        "gpt_oss.py",
    }
    assert families <= set(lines)
    assert {name: count for name, count in lines.items() if name in families and count > 150} == {}
    assert lines["mistral.py"] <= 40
    assert len(ARCHITECTURES) >= len(families)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"vocab_size": 96}, r"embed_tokens.weight \(is \[101, 36\], must be \[96, 36\]: vocab_size is 96\)"),
        ({"vocab_size": 140}, r"embed_tokens.weight \(is \[101, 36\], must be \[140, 36\]: vocab_size is 140\)"),
        ({"intermediate_size": 45}, r"up_proj.weight \(is \[44, 36\], must be \[45, 36\]: intermediate_size is 45\)"),
        (
            {"num_key_value_heads": 3},
            r"k_proj.weight \(is \[20, 36\], must be \[30, 36\]: num_key_value_heads × head_dim is 3 × 10\)",
        ),
        (
            {"head_dim": 12},
            r"q_proj.weight \(is \[60, 36\], must be \[72, 36\]: num_attention_heads × head_dim is 6 × 12\)",
        ),
        ({"num_hidden_layers": 4}, "missing: model.layers.3"),
        ({"num_hidden_layers": 2}, "unknown to this architecture: model.layers.2"),
    ],
)
def test_weights_that_disagree_with_the_configuration(changed: dict[str, int], named: str, tmp_path: Path):
    """One error names the tensor, its shape, the one asked for, and the field that asks for it."""
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)
