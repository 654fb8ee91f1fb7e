"""Which format each tensor gets: as llama-quantize chose it for the model in data/recipe_goldens.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.quantisation import GGUF_FILE_TYPES
from penstock.quant.recipes import ModelShape, tensor_format

GOLDENS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data/recipe_goldens.json").read_text())
CASES = [(label, recipe) for label, golden in GOLDENS.items() for recipe in golden["formats"]]


def shape_of(golden: dict[str, Any]) -> ModelShape:
    return ModelShape(golden["layers"], golden["experts"], golden["query_groups"], golden["tied"])


@pytest.mark.parametrize(("label", "recipe"), CASES)
def test_formats_are_those_of_llama_quantize(label: str, recipe: str) -> None:
    golden = GOLDENS[label]
    for pattern, formats in golden["formats"][recipe].items():
        by_layer = {formats: range(golden["layers"])} if isinstance(formats, str) else formats
        for wanted, layers in by_layer.items():
            for layer in layers:
                name = pattern.replace("*", str(layer))
                found, _ = tensor_format(recipe, name, tuple(golden["shapes"][pattern]), shape_of(golden))
                assert found == wanted, name


@pytest.mark.parametrize("recipe", GGUF_FILE_TYPES)
def test_norms_biases_and_routers_stay_whole(recipe: str) -> None:
    model = ModelShape(4, 8, 4, False)
    for name, shape in (("blk.0.attn_norm.weight", (256,)), ("blk.1.attn_q.bias", (256,)),
                        ("blk.2.ffn_gate_inp.weight", (8, 256))):  # fmt: skip
        assert tensor_format(recipe, name, shape, model) == ("f32", None)


def test_an_importance_matrix_changes_some_choices() -> None:
    plain, informed = ModelShape(16, 0, 1, True), ModelShape(16, 0, 1, True, has_importance=True)
    name, shape = "blk.1.ffn_down.weight", (256, 512)
    assert [tensor_format("iq4_xs", name, shape, model)[0] for model in (plain, informed)] == ["q5_k", "iq4_xs"]
    assert [tensor_format("q4_0", name, shape, model)[0] for model in (plain, informed)] == ["q4_0", "q4_1"]


def test_mxfp4_is_for_experts_where_there_are_any() -> None:
    dense, sparse = ModelShape(4, 0, 2, False), ModelShape(4, 8, 2, False)
    assert tensor_format("mxfp4", "blk.0.attn_q.weight", (256, 256), dense)[0] == "mxfp4"
    assert tensor_format("mxfp4", "blk.0.attn_q.weight", (256, 256), sparse)[0] == "q8_0"
    assert tensor_format("mxfp4", "blk.0.ffn_up_exps.weight", (8, 256, 256), sparse)[0] == "mxfp4"
    assert tensor_format("mxfp4", "output.weight", (512, 256), dense)[0] == "q8_0"
