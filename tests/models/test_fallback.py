"""Architectures that transformers alone has run through it, on our caches; those that cannot are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.config.errors import CheckpointError, ConfigError
from penstock.config.options import EngineOptions
from penstock.models.families import named
from penstock.models.not_run import NOT_RUN
from penstock.models.registry import check_architecture
from penstock.startup import build_runner
from penstock.startup.engine_spec import make_engine_spec
from tests.models import tiny
from tests.models.harness import Harness, load

SPECIAL: dict[str, dict[str, Any]] = {
    "BitNet": {},
    "Apertus": {"hidden_act": "xielu"},
    "HyperCLOVAX": {},
    "NanoChat": {},
    "Afmoe": {"sliding_window": 7, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2},
}


def save(name: str, folder: Path, **fields: Any) -> transformers.PreTrainedModel:
    settings = {**tiny.SIZES, "head_dim": 6, **SPECIAL.get(name, {}), **fields}
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=SPECIAL)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save(request.param, folder)
    assert named(type(theirs).__name__) is None
    return load(folder), theirs


def test_whole_prompts_chunks_and_decoding(pair):
    ours, theirs = pair
    tokens = tiny.prompt(43)
    expected = tiny.reference_logits(theirs, tokens)
    for chunk in (43, 7, 1):
        harness = Harness(ours)
        parts = [harness.step({"row": tokens[start : start + chunk]})["row"] for start in range(0, 43, chunk)]
        assert tiny.distance(torch.cat(parts), expected) < 1e-4


def test_ragged_batches_and_wanted_rows(pair):
    ours, theirs = pair
    texts = {"a": tiny.prompt(31, 1), "b": tiny.prompt(12, 2), "c": tiny.prompt(20, 3)}
    harness = Harness(ours, seed=2)
    harness.step({"a": texts["a"][:30], "b": texts["b"][:5]})
    logits = harness.wanted({"a": texts["a"][30:], "b": texts["b"][5:], "c": texts["c"]}, (0, 7, 27))
    expected = [tiny.reference_logits(theirs, text)[-1] for text in texts.values()]
    assert tiny.distance(logits, torch.stack(expected)) < 1e-4


def test_it_says_so(pair):
    ours, _ = pair
    assert "no implementation of its own here" in ours.runs and transformers.__version__ in ours.runs


def test_what_masks_in_its_own_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model whose logits differ once its attention reads caches never serves."""
    save("BitNet", tmp_path)
    attention = transformers.models.bitnet.modeling_bitnet.BitNetAttention
    forward = attention.forward

    def with_memory(self, hidden_states, *args, **kwargs):
        return forward(self, hidden_states.cumsum(1), *args, **kwargs)

    monkeypatch.setattr(attention, "forward", with_memory)
    with pytest.raises(CheckpointError, match="gives other logits than transformers alone"):
        load(tmp_path)


@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_architectures_that_are_known_not_to_run_are_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}, which cannot run here: .*docs/models.md"):
        check_architecture({"architectures": [name], "model_type": "x"})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "RwkvForCausalLM.*cannot"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic' turns tokens by the length",
        ),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 7},
            "ask for",
        ),
        ({"attention_chunk_size": 8}, "attends in chunks"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5.*6 attention heads"),
    ],
)
def test_refusals(fields: dict[str, Any], reason: str, tmp_path: Path):
    save("BitNet", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda tensors: {key: tensor for key, tensor in tensors.items() if "norm" not in key}, "missing.*norm"),
        (lambda tensors: tensors | {"model.extra.weight": torch.ones(3)}, "unexpected.*model.extra.weight"),
    ],
)
def test_weights_that_do_not_fit(change: Callable[[Any], Any], fault: str, tmp_path: Path):
    save("BitNet", tmp_path)
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=fault):
        load(tmp_path)


def test_code_in_the_folder_is_never_imported(tmp_path: Path):
    """Neither for an architecture that is known, nor one that transformers has, nor one that nobody has."""
    mark = tmp_path / "imported"
    code = f"open({str(mark)!r}, 'w').write('x')\n"
    own = {"auto_map": {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}}
    for name, architecture in (("BitNet", None), ("Llama", None), ("BitNet", "OwnForCausalLM")):
        folder = tmp_path / f"{name}-{architecture}"
        save(name, folder)
        config = json.loads((folder / "config.json").read_text()) | own
        if architecture:
            config |= {"architectures": [architecture], "model_type": "own"}
        (folder / "config.json").write_text(json.dumps(config))
        for module in ("modeling_own", "configuration_own", "custom_generate/generate", "__init__"):
            (folder / module).parent.mkdir(exist_ok=True)
            (folder / f"{module}.py").write_text(code)
        if architecture is None:
            assert Harness(load(folder)).step({"row": tiny.prompt(5)})["row"].shape == (5, 101)
        else:
            with pytest.raises(CheckpointError, match="OwnForCausalLM"):
                load(folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["RecurrentGemma", "OlmoHybrid"])
def test_what_cannot_run_is_said_before_its_sizes_are_asked_for(name: str, tmp_path: Path):
    """Configurations whose sizes are not where other models have them."""
    save("BitNet", tmp_path)
    config = getattr(transformers, f"{name}Config")().to_dict() | {"architectures": [f"{name}ForCausalLM"]}
    for field in ("num_hidden_layers", "intermediate_size"):
        config.pop(field, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{name}ForCausalLM.*cannot run (here|through transformers)"):
        make_engine_spec(EngineOptions(model=str(tmp_path), kv_blocks=64))


def test_an_engine_says_so(tmp_path: Path):
    """The notes of its start name transformers."""
    save("BitNet", tmp_path)
    options = EngineOptions(model=str(tmp_path), dtype="float32", max_model_len=64, kv_blocks=64, pack_cache="off")
    spec = make_engine_spec(options)
    (note,) = [note for note in spec.settings if note.name == "layers"]
    assert note.value == f"transformers {transformers.__version__}" and "BitNetForCausalLM" in note.reason
    spec, kv_types, _ = build_runner.load(spec)
    _, executor = build_runner.make_runner(spec, kv_types, 4)
    assert executor.describe.startswith("layer by layer")
    with pytest.raises(ConfigError, match=r"--quantize q8_0.*transformers"):
        build_runner.load(make_engine_spec(replace(options, quantize="q8_0")))
