"""What sentence-transformers' files say: pooling, dense layers, normalisation; against its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.config.errors import CheckpointError, ParameterError, RequestError
from penstock.config.pooling import PoolingKind
from penstock.weights.open import open_checkpoint
from penstock.weights.pooling import Pooling, read_pooling
from tests.engine.test_pooling import engine, pooled
from tests.models import encoders

PROMPTS = [encoders.prompt(length, seed=length) for length in (3, 17, 40)]
TYPES = {
    "Transformer": "sentence_transformers.models.Transformer",
    "Pooling": "sentence_transformers.models.Pooling",
    "Dense": "sentence_transformers.models.Dense",
    "Normalize": "sentence_transformers.models.Normalize",
}


def write_modules(folder: Path, *modules: tuple[str, str, dict[str, Any] | None]) -> None:
    """modules.json and the modules' configurations; (kind, path, settings)."""
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": TYPES.get(kind, kind)}
        for index, (kind, path, _) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for _, path, settings in modules:
        if path and settings is not None:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(settings))


def write_dense(folder: Path, path: str, inputs: int, outputs: int, bias: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(outputs)
    tensors = {"linear.weight": torch.randn(outputs, inputs) * inputs**-0.5}
    if bias:
        tensors["linear.bias"] = torch.randn(outputs)
    (folder / path).mkdir(exist_ok=True)
    save_file(tensors, folder / path / "model.safetensors")
    return tensors


def pooling_of(folder: Path) -> Pooling:
    return read_pooling(open_checkpoint(folder), {"no": 7, "yes": 9}.get)


def dense_settings(inputs: int, outputs: int, bias: bool, activation: str) -> dict[str, Any]:
    named = f"torch.nn.modules.{activation}"
    return {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": named}


def test_dense_layers(tmp_path: Path) -> None:
    """As EmbeddingGemma has them: mean, two projections, normalised; shorter vectors on request."""
    model = encoders.save("gemma-embedding", tmp_path)
    first, second = write_dense(tmp_path, "2_Dense", 36, 60, True), write_dense(tmp_path, "3_Dense", 60, 24, False)
    write_modules(
        tmp_path,
        ("Transformer", "", None),
        ("Pooling", "1_Pooling", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}),
        ("Dense", "2_Dense", dense_settings(36, 60, True, "activation.Tanh")),
        ("Dense", "3_Dense", dense_settings(60, 24, False, "linear.Identity")),
        ("Normalize", "4_Normalize", None),
    )
    found = pooling_of(tmp_path)
    assert (found.kind, found.normalize, found.size) == (PoolingKind.MEAN, True, 24)
    used = engine(tmp_path)
    for params, cut in ((found.embedding(), 24), (found.embedding(dimensions=10), 10)):
        for prompt, result in zip(PROMPTS, pooled(used, PROMPTS, params), strict=True):
            mean = encoders.reference(model, "gemma-embedding", prompt).mean(0)
            hidden = torch.tanh(first["linear.weight"] @ mean + first["linear.bias"])
            theirs = (second["linear.weight"] @ hidden)[:cut]
            torch.testing.assert_close(torch.tensor(result), theirs / theirs.norm(), rtol=1e-4, atol=1e-5)
    (states,) = pooled(used, PROMPTS[:1], found.embedding(each_token=True, normalize=False))
    theirs = encoders.reference(model, "gemma-embedding", PROMPTS[0])
    torch.testing.assert_close(torch.tensor(states).view(3, 36), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, PoolingKind.CLS),
        ({"pooling_mode_mean_tokens": True}, PoolingKind.MEAN),
        ({"pooling_mode_lasttoken": True}, PoolingKind.LAST),
        ({"pooling_mode": "cls"}, PoolingKind.CLS),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, PoolingKind.LAST),
    ],
)
def test_pooling_modes(tmp_path: Path, settings: dict[str, Any], kind: PoolingKind) -> None:
    encoders.save("bert", tmp_path)
    assert pooling_of(tmp_path).kind is PoolingKind.MEAN  # sentence-transformers' default for a plain encoder
    write_modules(tmp_path, ("Transformer", "", None), ("Pooling", "1_Pooling", settings))
    found = pooling_of(tmp_path)
    assert (found.kind, found.normalize, found.size) == (kind, False, 36)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([("Pooling", "1_Pooling", {"pooling_mode_max_tokens": True})], "pooling_mode_max_tokens"),
        (
            [("Pooling", "1_P", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True})],
            "mean_tokens, .*cls",
        ),
        ([("sentence_transformers.models.LSTM", "1_LSTM", {})], "'LSTM'; served: Transformer, Pooling"),
        ([("Pooling", "../elsewhere", None)], "'../elsewhere'; a folder below"),
        ([("Normalize", "", None), ("Pooling", "", None)], "normalises before Pooling"),
        ([("Dense", "2_Dense", dense_settings(36, 8, False, "linear.Identity"))], "2_Dense holds no weights"),
    ],
)
def test_modules_that_are_not_served(tmp_path: Path, modules: list[Any], named: str) -> None:
    encoders.save("bert", tmp_path)
    write_modules(tmp_path, *modules)
    with pytest.raises(CheckpointError, match=named):
        pooling_of(tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dense_settings(30, 8, False, "linear.Identity"), "inputs is 30, but 36 elements reach it"),
        (dense_settings(36, 8, False, "activation.Mish"), "activation is 'Mish'; allowed: GELU"),
        ({"in_features": 36}, "outputs is missing"),
        (dense_settings(36, 9, False, "linear.Identity"), r"2_Dense.linear.weight \(is \[8, 36\], must be \[9, 36\]\)"),
        (dense_settings(36, 8, True, "linear.Identity"), "missing: 2_Dense.linear.bias"),
    ],
)
def test_dense_layers_that_contradict_the_model(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    encoders.save("bert", tmp_path)
    write_dense(tmp_path, "2_Dense", 36, 8, False)
    write_modules(tmp_path, ("Pooling", "1_P", {"pooling_mode_mean_tokens": True}), ("Dense", "2_Dense", settings))
    with pytest.raises(CheckpointError, match=named):
        engine(tmp_path)


def test_damaged_module_lists(tmp_path: Path) -> None:
    encoders.save("bert", tmp_path)
    for text, named in (("{", "cannot be read"), ("{}", "must be a list"), ("[1]", "must be a list of objects")):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(CheckpointError, match=named):
            open_checkpoint(tmp_path)


def test_tasks_a_model_lacks(tmp_path: Path) -> None:
    encoders.save("bert", tmp_path)
    found = pooling_of(tmp_path)
    with pytest.raises(RequestError, match=r"BertModel.*cannot generate text"):
        found.check_generates()
    with pytest.raises(RequestError, match="cannot classify"):
        found.classification()
    with pytest.raises(ParameterError, match=r"dimensions.*from 1 to 36"):
        found.embedding(dimensions=37)
    assert found.ranking() is None
