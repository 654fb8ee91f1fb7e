"""Hugging Face folders written with quantised weights: by their published layouts, and as our own reader sees them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from penstock.config.options import EngineOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.evaluate.scoring import Scorer, Window
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.encode import quantize_matrix
from penstock.quant.formats import decode_to_float32
from penstock.weights.open import open_checkpoint
from penstock.weights.writers.quantize import quantize_model
from penstock.weights.writers.safetensors import OutputGroup, StoredOutput, write_safetensors

STEM = "model.layers.1.mlp.down_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def original() -> np.ndarray:
    stored = open_checkpoint("penstock-concierge").read(f"{STEM}.weight")
    return decode_to_float32(stored.info.format, stored.data).reshape(stored.info.shape)


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [N, W] → [N, W · 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    return ((words[:, :, None] >> shifts) & (2**bits - 1)).reshape(len(words), -1)


def by_the_layout(folder: Path, format: str) -> torch.Tensor:
    """The weight by the arithmetic that compressed-tensors and the FP8 checkpoints publish."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        got = {key.removeprefix(STEM): file.get_tensor(key) for key in file.keys() if key.startswith(STEM)}  # noqa: SIM118
    if format in ("int8", "int4"):
        bits = 8 if format == "int8" else 4
        codes = fields(got[".weight_packed"], bits)[:, : got[".weight_shape"][1]] - 2 ** (bits - 1)
        scales = got[".weight_scale"].float()
        return codes.float() * scales.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)
    if format == "fp8":
        return got[".weight"].float() * got[".weight_scale"]
    if format == "fp8_block":
        scales = got[".weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return got[".weight"].float() * scales[: got[".weight"].shape[0], : got[".weight"].shape[1]]
    packed = got[".weight_packed"]
    values = E2M1[torch.stack([packed & 15, packed >> 4], dim=-1).long()].reshape(len(packed), -1)
    scales = got[".weight_scale"].float() / got[".weight_global_scale"]
    return values * scales.repeat_interleave(16, dim=1)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp8_block", "nvfp4"])
def test_layout_decodes_to_the_quantised_matrix(format: str, tmp_path: Path) -> None:
    folder = tmp_path / format
    report = quantize_model("penstock-concierge", format, folder)
    values = original()
    expected = decode_canonical(quantize_matrix(format, values))
    found = by_the_layout(folder, format).numpy()
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(values).max()
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == ("fp8" if format == "fp8_block" else "compressed-tensors")
    assert report.nbytes < 0.75 * report.source_bytes
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {p.name for p in folder.iterdir()}
    assert TextPipeline.load(str(folder)).tokenizer.encode("Hello there") == TextPipeline.load(
        "penstock-concierge"
    ).tokenizer.encode("Hello there")


def test_what_is_no_linear_layer_stays(tmp_path: Path) -> None:
    quantize_model("penstock-concierge", "int8", tmp_path / "m")
    before, after = open_checkpoint("penstock-concierge"), open_checkpoint(tmp_path / "m")
    kept = [name for name in before.tensors if "norm" in name or "embed" in name]
    assert len(kept) > 20
    for name in kept:
        assert before.read(name).data.tobytes() == after.read(name).data.tobytes()
    ignored = after.config["quantization_config"]["ignore"]
    assert "lm_head" in ignored and "model.embed_tokens" in ignored
    assert not any("proj" in name for name in ignored)


@pytest.mark.parametrize(("format", "bound"), [("int8", 0.02), ("fp8", 0.05), ("int4", 0.5)])
def test_our_engine_runs_them(format: str, bound: float, tmp_path: Path) -> None:
    quantize_model("penstock-concierge", format, tmp_path / "m")
    ids = TextPipeline.load("penstock-concierge").tokenizer.encode("I need a hotel in Paris for two nights, please.")
    logs = []
    for model in ("penstock-concierge", str(tmp_path / "m")):
        scorer = Scorer(EngineOptions(model=model, dtype="float32"), 32)
        logs.append(torch.cat([part.clone() for part, _ in scorer.logits(Window(tuple(ids), 1))]).log_softmax(-1))
        scorer.close()
    divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    assert 0 < divergence < bound


def test_shards_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.writers.safetensors._SHARD_BYTES", 100)
    arrays = {f"t{index}": np.full(16, index, np.float32) for index in range(3)}
    groups = [
        OutputGroup((StoredOutput(name, "f32", (16,), 64),), lambda array=array: iter((array.view(np.uint8),)))
        for name, array in arrays.items()
    ]
    write_safetensors(tmp_path, groups)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["t2"] == "model-00003-of-00003.safetensors"
    for name, array in arrays.items():
        with safe_open(tmp_path / index["weight_map"][name], "np") as file:
            assert np.array_equal(file.get_tensor(name), array)
