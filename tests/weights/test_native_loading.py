"""Loading for native kernels: what cannot be packed is an error that names the tensor, never a wrong answer."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.errors import CheckpointError
from penstock.config.options import EngineOptions
from penstock.engine.build import build_engine
from penstock.kernels.cpu import native
from penstock.models.registry import Model
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny
from tests.models.harness import load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
KEY = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.save("llama", tmp_path, hidden_size=96, intermediate_size=96)
    return tmp_path


def test_a_packing_that_is_refused_names_the_tensor(folder: Path) -> None:
    model: Model = load(folder)
    weight = next(weight for weight in model.weights() if weight.parts[0].key == KEY)
    pack = weight.pack
    assert pack is not None

    def refuse(parts: object) -> None:
        raise ValueError("a scale is nan: it must be finite. The weights are damaged.")

    weight.pack = refuse
    checkpoint = open_checkpoint(folder)
    plans = plan_weights(model, checkpoint, LoadTarget(torch.float32))
    with pytest.raises(CheckpointError) as refused:
        load_weights(model, checkpoint, plans)
    assert str(refused.value) == (
        f"the weights of {KEY} cannot be used: a scale is nan: it must be finite. The weights are damaged. "
        "Download the model again, or take another quantisation of it."
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_scale_of_a_gguf_file_that_is_no_number(kind: str, tmp_path: Path, write_gguf, base_metadata, dense_tensors):
    import gguf

    from tests.weights.test_gguf_models import gguf_names

    metadata = base_metadata("llama") | {"llama.feed_forward_length": 32}
    wide = dict(dense_tensors)
    rng = np.random.default_rng(0)
    for layer in range(2):
        wide[f"model.layers.{layer}.mlp.gate_proj.weight"] = rng.normal(size=(32, 16)).astype(np.float32)
        wide[f"model.layers.{layer}.mlp.up_proj.weight"] = rng.normal(size=(32, 16)).astype(np.float32)
        wide[f"model.layers.{layer}.mlp.down_proj.weight"] = rng.normal(size=(16, 32)).astype(np.float32)
    stored = gguf_names(gguf.MODEL_ARCH.LLAMA, wide, 2)
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, stored, {"blk.1.ffn_down.weight": kind})
    load(path)
    block = gguf.quantize(wide[KEY], gguf.GGMLQuantizationType[kind]).tobytes()
    data = bytearray(path.read_bytes())
    at = data.index(block)
    data[at : at + 2] = np.array([np.nan], dtype=np.float16).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{KEY}.*finite"):
        load(path)


@pytest.mark.parametrize("quantize", ["q8_0", "int8", "q4_k_m"])
def test_a_weight_that_is_no_number_is_not_quantised(quantize: str, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[KEY][3, 4] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{KEY} cannot be quantised to {quantize}: a weight is infinite"):
        build_engine(EngineOptions(model=str(folder), quantize=quantize, threads=1))


def test_the_log_and_the_settings_say_how_steps_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        engine, info = build_engine(
            EngineOptions(model=str(folder), kv_cache_dtype="int8", threads=1, max_num_seqs=2, kv_blocks=20)
        )
    engine.close()
    settings = {decision.name: decision for decision in info.settings}
    assert settings["step"].value == "recorded"
    assert "native ops in an arena of" in settings["step"].reason
    assert settings["KV cache types"].value == "int8"
    assert settings["packed weights"].value == "not kept"
    assert info.numbers == "weights as stored, KV cache int8 int8 int8"
    for name in ("step", "KV cache types", "packed weights"):
        assert any(line.startswith(f"{name} ") and settings[name].value in line for line in caplog.messages), name
