"""Adapters in PEFT's layout of every family: what a model makes of their names is the merged checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from penstock.config.adapters import AdapterUse
from penstock.config.errors import CheckpointError
from penstock.kernels.cpu import native
from penstock.layers.adapters import add_adapters
from penstock.layers.batch import Batch
from penstock.runtime.adapter_loading import AdapterLoader
from penstock.weights.adapters.open import adapter_digest
from penstock.weights.loader import StoredMatrices
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from penstock.weights.writers.merge import Merged, merge_adapters
from tests.layers.test_adapters import WORK
from tests.models import tiny
from tests.models.harness import Harness, load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
UNCHANGED = re.compile(
    r"embed|wte|wpe|lm_head|norm|\.gate$|_gate$|gate\.wg|router|gate_weight|conv|A_log|\.D$|altup|laurel|per_layer|project_"
)
FAMILIES = (
    *("llama", "qwen3", "phi3", "mixtral", "qwen2-moe", "gpt-oss", "llama4", "deepseek-v2", "deepseek-v3-halves"),
    *("gemma2", "gemma3n", "gemma4-moe", "falcon-groups", "gpt-neox", "mpt", "bloom", "opt-projected", "glm4", "phi"),
    *("mamba", "mamba2", "jamba", "falcon-h1", "lfm2", "qwen3-next", "qwen3_5", "nemotron-h-latent", "flex-olmo"),
)
DORA = ("mixtral", "qwen2-moe", "llama", "phi3", "glm4", "falcon-groups", "jamba", "qwen3_5", "gemma3n")
SCALE = 0.3  # alpha by rank


class Adapted(Harness):
    """Every token has the adapter of slot 1."""

    def _batch(self, work: Mapping[str, Sequence[int]]) -> Batch:
        batch = super()._batch(work)
        slots = torch.ones(len(batch.token_ids), 1, dtype=torch.int64)
        return replace(batch, adapter_slot=slots, adapter_scale=torch.ones(slots.shape))


def linear_layers(folder: Path) -> dict[str, tuple[int, int]]:
    """The matrices of a checkpoint that PEFT's "all-linear" would change."""
    found = {}
    for name, info in open_checkpoint(folder).tensors.items():
        stem = name.removesuffix(".weight")
        if stem != name and len(info.shape) == 2 and not UNCHANGED.search(stem):
            found[stem] = (info.shape[0], info.shape[1])
    return found


def write_adapter(folder: Path, layers: dict[str, tuple[int, int]], *, dora: bool) -> AdapterUse:
    folder.mkdir()
    tensors = {}
    for number, (name, (outputs, inputs)) in enumerate(layers.items()):
        random, rank, stem = np.random.default_rng(number), 2 + number % 3, f"base_model.model.{name}"
        tensors[f"{stem}.lora_A.weight"] = random.standard_normal((rank, inputs), np.float32) * inputs**-0.5
        tensors[f"{stem}.lora_B.weight"] = random.standard_normal((outputs, rank), np.float32) * 0.3
        if dora:
            tensors[f"{stem}.lora_magnitude_vector"] = random.random(outputs, np.float32) + 0.5
    alphas = {name: SCALE * (2 + number % 3) for number, name in enumerate(layers)}
    config = {"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": alphas, "use_dora": dora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return AdapterUse(adapter_digest(folder), str(folder))


@pytest.mark.parametrize(("family", "dora"), [(family, False) for family in FAMILIES] + [(one, True) for one in DORA])
def test_it_is_the_merged_checkpoint(family: str, dora: bool, tmp_path: Path) -> None:
    tiny.save(family, tmp_path / "model")
    layers = linear_layers(tmp_path / "model")
    use = write_adapter(tmp_path / "adapter", layers, dora=dora)
    merge_adapters(tmp_path / "model", [Merged(tmp_path / "adapter")], tmp_path / "merged")
    model = load(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    targets = add_adapters(model, model.kernels, 2, 8)
    stored = StoredMatrices(checkpoint, plan_weights(model, checkpoint, LoadTarget(torch.float32)))
    for slots, entry in AdapterLoader(targets, model.renames, stored.pieces).load(use):
        slots.put(1, entry)
    whole = Harness(load(tmp_path / "merged"), seed=1)
    adapted = Adapted(model, seed=1)
    with torch.inference_mode():
        for work in WORK:
            only = {row: tokens for row, tokens in work.items() if row == "a"}
            (ours,), (theirs,) = adapted.step(only).values(), whole.step(only).values()
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize(("most", "said"), [((3, 2**30), "has rank 4; at most 3"), ((4, 1000), "room for 1,000")])
def test_what_is_too_large_is_not_decoded(
    most: tuple[int, int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save("llama", tmp_path / "model")
    use = write_adapter(tmp_path / "adapter", linear_layers(tmp_path / "model"), dora=False)
    monkeypatch.setattr("penstock.runtime.adapter_loading.dequantize", lambda *_: pytest.fail("it is decoded"))
    with pytest.raises(CheckpointError, match=said):
        AdapterLoader({}, (), lambda _: (), most=most).load(use)
