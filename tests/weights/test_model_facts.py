"""Facts read from headers, and that reading them needs no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import CheckpointError
from penstock.config.resolve import LayerFacts
from penstock.quant.tensor import StoredTensor, TensorInfo
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@dataclass
class Headers:
    """A checkpoint of headers only."""

    config: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    path: Path = Path("some/folder")
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> StoredTensor:
        raise CheckpointError(name)


def info(name: str, shape: tuple[int, ...], fmt: str, nbytes: int) -> TensorInfo:
    return TensorInfo(name, shape, fmt, nbytes)


def test_latent_attention() -> None:
    """DeepSeek-V2-Lite keeps 512 + 64 numbers of a token and layer, once."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    facts = model_facts(Headers({**CONFIG, "architectures": ["DeepseekV2ForCausalLM"], **sizes}))
    assert facts.layers == (LayerFacts(576),) * 3
    assert 4 * facts.attention_size == 4 * (192 + 576 + 512 + 128)


def test_concierge() -> None:
    facts = model_facts(open_checkpoint("penstock-concierge"))
    assert facts.parameters == 6_950_912
    assert facts.file_bytes == 2 * 6_950_912
    assert (facts.name, facts.checkpoint_dtype, facts.context_length) == ("penstock-concierge", "bfloat16", 2048)
    assert facts.layers == (LayerFacts(2 * 2 * 64),) * 6
    assert (facts.vocab_size, facts.hidden_size, facts.intermediate_size, facts.attention_size) == (
        4096,
        256,
        1024,
        256,
    )


def test_packed_matrices_count_as_the_values_they_hold() -> None:
    infos = [
        info("e.gate_up_proj_blocks", (2, 8, 3, 16), "u8", 768),
        info("e.gate_up_proj_scales", (2, 8, 3), "u8", 48),
        info("w", (3, 256), "q4_k", 432),
    ]
    tensors = {one.name: one for one in infos}
    config = CONFIG | {"quantization_config": {"quant_method": "mxfp4"}}
    facts = model_facts(Headers(config, tensors))
    assert facts.parameters == 2 * 8 * 3 * 32 + 768
    assert (facts.float_values, facts.float_bytes, facts.decoded) == (0, 0, False)
    facts = model_facts(Headers(config, tensors | {"v": info("v", (3, 256), "bf16", 1536)}))
    assert (facts.float_values, facts.float_bytes) == (768, 1536)
    unknown = CONFIG | {"quantization_config": {"quant_method": "sixbit"}}
    with pytest.raises(CheckpointError, match=r"'sixbit'; supported: .*gptq"):
        model_facts(Headers(unknown, tensors))


def test_what_is_not_loaded_does_not_count() -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight", "vision_tower.x", "model.multi_modal_projector.y")
    tensors = {name: info(name, (10,), "bf16", 20) for name in names}
    assert model_facts(Headers(CONFIG | {"tie_word_embeddings": True}, tensors)).parameters == 10
    assert model_facts(Headers(CONFIG, tensors)).parameters == 20


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, [None, None, None]),
        ({"sliding_window": 8}, [8, 8, 8]),
        ({"sliding_window": 8, "use_sliding_window": False}, [None, None, None]),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}, None),
        ({"sliding_window": 8, "layer_types": ["full_attention"] + ["sliding_attention"] * 2}, [None, 8, 8]),
        ({"sliding_window": 8, "architectures": ["LlamaForCausalLM"]}, [None, None, None]),
        ({"sliding_window": 8, "sliding_window_pattern": 3, "architectures": ["Cohere2ForCausalLM"]}, [8, 8, None]),
        ({"sliding_window": 8, "architectures": ["GptOssForCausalLM"]}, [8, None, 8]),
        ({"sliding_window": 8, "architectures": ["Gemma2ForCausalLM"]}, [8, None, 8]),
        ({"sliding_window": 8, "architectures": ["Dots1ForCausalLM"], "max_window_layers": 1}, [None, 8, 8]),
        ({"sliding_window": 8, "architectures": ["Dots1ForCausalLM"]}, [None, None, None]),
    ],
)
def test_windows(change: dict[str, Any], windows: list[int | None] | None) -> None:
    headers = Headers(CONFIG | change)
    if windows is None:
        with pytest.raises(CheckpointError, match="layer_types has 4 entries where num_hidden_layers is 3"):
            model_facts(headers)
    else:
        assert [layer.window for layer in model_facts(headers).layers] == windows


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 512),
        ({"rope_type": "linear", "factor": 1e300}, 512),
        ({"rope_type": "linear", "factor": float("nan")}, 512),
    ],
)
def test_context_length(scaling: dict[str, Any] | None, length: int) -> None:
    assert model_facts(Headers(CONFIG | {"rope_scaling": scaling})).context_length == length


@pytest.mark.parametrize(
    ("scaling", "longest", "note"),
    [
        ({"rope_type": "dynamic", "factor": 2}, 1024, "dynamic scaling, for up to 1024 tokens"),
        ({"rope_type": "dynamic", "factor": 2, "alpha": 9.0}, 512, ""),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, 512, "--max-model-len 64"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 512}, 512, ""),
    ],
)
def test_what_the_served_length_changes(scaling: dict[str, Any], longest: int, note: str) -> None:
    facts = model_facts(Headers(CONFIG | {"rope_scaling": scaling}))
    assert facts.longest_context == longest
    assert note in facts.context_note and bool(note) == bool(facts.context_note)


def test_a_width_for_every_layer() -> None:
    assert model_facts(Headers(CONFIG | {"intermediate_size": [16, 48, 32]})).intermediate_size == 48
    with pytest.raises(CheckpointError, match="intermediate_size is 'wide'"):
        model_facts(Headers(CONFIG | {"intermediate_size": [16, "wide"]}))


def test_context_length_is_what_the_model_builder_allows(shared_data: Path) -> None:
    from tests.models.harness import load

    for folder in ("penstock-concierge", "stories260K/hf"):
        path = shared_data / "models" / folder
        assert model_facts(open_checkpoint(path)).context_length == load(path).max_positions


def test_multimodal_config_with_defaults_left_out() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 12, "sliding_window": 1024}
    text["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    names = ["Gemma3ForConditionalGeneration"]
    facts = model_facts(Headers({"model_type": "gemma3", "architectures": names, "text_config": text}))
    assert facts.context_length == 131_072
    assert facts.vocab_size == 262_208
    assert [layer.window for layer in facts.layers] == ([1024] * 5 + [None]) * 2
    assert facts.layers[0].elements_per_token == 2 * 4 * 256


def test_defaults_are_those_the_model_is_built_with() -> None:
    qwen3 = model_facts(Headers(CONFIG | {"architectures": ["Qwen3ForCausalLM"], "head_dim": None}))
    gpt_oss = model_facts(Headers(CONFIG | {"architectures": ["GptOssForCausalLM"], "head_dim": None}))
    assert qwen3.attention_size == 128 * CONFIG["num_attention_heads"]
    assert gpt_oss.attention_size == 64 * CONFIG["num_attention_heads"]
    assert gpt_oss.layers[0].window == 128 and gpt_oss.layers[1].window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 4096"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
    ],
)
def test_bad_sizes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        model_facts(Headers(CONFIG | change))


def test_planning_needs_no_torch() -> None:
    program = """
import sys
from penstock.config.machine import read_machine
from penstock.config.options import EngineOptions
from penstock.config.resolve import resolve
from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.startup.memory_plan import MemoryLimits, plan_memory
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint
facts = model_facts(open_checkpoint("penstock-concierge"))
options = resolve(EngineOptions(), facts, read_machine()).options
limits = MemoryLimits(2**33, options.max_model_len, options.max_num_seqs, options.max_num_batched_tokens)
elements = sum(layer.elements_per_token for layer in facts.layers)
groups = (CacheGroup(CacheKind.FULL, None, tuple(range(len(facts.layers))), elements),)
plan_memory(model=facts, groups=groups, dtype_bytes=4, limits=limits)
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"
