"""The probe at start: small KV types stay where they lose little, and layers that lose much fall back, alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.cache_spec import group_layers
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.api import EngineInfo
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.startup import build_runner, kv_probe
from penstock.startup.kv_probe import KvTypes, choose_kv_types
from tests.engine.test_equality import SAMPLED, ask, finish
from tests.models import tiny
from tests.models.harness import load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
LAYERS, HEAD_DIM = 3, 10


def with_outliers(folder: Path, layers: Sequence[int], factor: float = 3000.0) -> Path:
    """A tiny model of which some layers' keys have two inputs, rotated into each other, that are `factor` times larger.

    The queries' are that much smaller, so that what the model computes stays the same.
    """
    tiny.save("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in layers:
        for name, by in (("k_proj", factor), ("q_proj", 1 / factor)):
            weight = tensors[f"model.layers.{layer}.self_attn.{name}.weight"]
            heads = weight.view(-1, HEAD_DIM, weight.shape[1])
            heads[:, [0, HEAD_DIM // 2]] *= by
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def choose(folder: Path, wanted: str) -> KvTypes:
    model = load(folder)
    with torch.inference_mode():
        return choose_kv_types(model, group_layers(model.cache_specs), wanted, 16)


@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_the_finest_types_are_taken_as_they_are(wanted: str, tmp_path: Path) -> None:
    assert choose(with_outliers(tmp_path, [1]), wanted) == KvTypes((wanted,) * LAYERS, "")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt-oss"])
def test_small_types_are_kept_where_they_lose_little(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    found = choose(tmp_path, "int8")
    assert set(found.of_layer) == {"int8"}
    told = re.fullmatch(r"a probe of 64 tokens loses (\d\.\d{4}) nats against float32", found.reason)
    assert told
    assert float(told[1]) <= kv_probe.LARGEST_LOSS


@pytest.mark.parametrize("wanted", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("layers", [(0,), (1,), (2,)])
def test_the_layer_with_outliers_falls_back(wanted: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    found = choose(with_outliers(tmp_path, layers), wanted)
    fallen = {layer for layer, kind in enumerate(found.of_layer) if kind == "float16"}
    if wanted == "int8":  # four bits, and eight with a mantissa of three, lose much in every layer of so small a model
        assert fallen == set(layers)
    assert set(layers) <= fallen or wanted == "fp8"
    assert all(found.of_layer[layer] == wanted for layer in range(LAYERS) if layer not in fallen)
    if fallen:
        named = "all layers" if len(fallen) == LAYERS else "layers " + ", ".join(map(str, sorted(fallen)))
        assert found.reason.endswith(f"float16 is kept in {named}")
        assert f"with {wanted} in all layers, more than 0.05" in found.reason


def test_two_layers_fall_back(tmp_path: Path) -> None:
    found = choose(with_outliers(tmp_path, (0, 2)), "int8")
    assert found.of_layer == ("float16", "int8", "float16")
    assert found.reason.endswith("float16 is kept in layers 0, 2")


def test_a_model_that_is_no_number_falls_back_everywhere(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][:] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert set(choose(tmp_path, "int8").of_layer) == {"float16"}


def engine_of(folder: Path, kv_type: str) -> tuple[Engine, EngineInfo]:
    return build_engine(
        EngineOptions(
            model=str(folder), kv_cache_dtype=kv_type, kv_cache_memory=2**19, block_size=16, threads=1, max_num_seqs=4
        )
    )


def test_after_a_fallback_the_plan_has_fewer_blocks_and_says_so(tmp_path: Path) -> None:
    normal, odd = with_outliers(tmp_path / "normal", ()), with_outliers(tmp_path / "odd", (1,))
    blocks: dict[str, int] = {}
    for name, folder, kv_type in (
        ("int8", normal, "int8"),
        ("fallen", odd, "int8"),
        ("float16", normal, "float16"),
    ):
        engine, info = engine_of(folder, kv_type)
        blocks[name] = info.num_blocks
        assert engine.scheduler.options.num_blocks == (info.num_blocks,)
        memory = {row.name: row for row in info.memory}
        assert memory["KV cache"].reason.startswith(f"{info.num_blocks:,} blocks")
        told = [row for row in info.settings if row.name == "KV cache types"]
        if kv_type == "int8":
            assert told[0].value == {"int8": "int8", "fallen": "int8, float16"}[name]
            assert "probe" in told[0].reason
        else:
            assert not told
        engine.add(ask("it", tuple(tiny.prompt(20)), how=SAMPLED))
        assert len(finish(engine)["it"].tokens) == 20
        engine.close()
    assert blocks["int8"] > blocks["fallen"] > blocks["float16"]


@pytest.mark.parametrize("kinds", [("float32", "int4"), ("int4", "int8")])
def test_layers_of_several_types_share_a_plan(
    kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of 16 elements, of which int4 keeps 32: what rows that share a prefix leave of it has room for either."""
    tiny.save("deepseek-v2", tmp_path, num_hidden_layers=2, max_position_embeddings=512)
    monkeypatch.setattr(build_runner, "choose_kv_types", lambda *_: KvTypes(kinds, "by hand"))
    beginning = tiny.prompt(300, 1)
    prompts = {"a": [*beginning, 5], "b": [*beginning[:260], *tiny.prompt(20, 2)]}

    def answers(caching: bool) -> dict[str, list[int]]:
        options = EngineOptions(
            str(tmp_path), device="cpu", dtype="float32", kv_blocks=90, enable_prefix_caching=caching
        )
        engine, _ = build_engine(options)
        found: dict[str, list[int]] = {name: [] for name in prompts}
        for name, prompt in prompts.items():
            engine.add(
                EngineRequest(name, tuple(prompt), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            )
        while engine.has_work:
            for output in engine.step():
                found[output.request_id] += output.tokens
        engine.close()
        return found

    assert answers(True) == answers(False)
