"""Sizes that no model has are told of by the field's name, before memory is taken for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config.errors import CheckpointError
from penstock.config.options import EngineOptions
from penstock.startup.engine_spec import make_engine_spec

SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 36, "intermediate_size": 44,
    "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 101,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("size", [1 << 31, 1 << 63, 10**30])
@pytest.mark.parametrize("field", ["intermediate_size", "head_dim"])
def test_sizes_that_no_model_has(field: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, field: size}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"{field} is {str(size)[:8]}.*; allowed: at most \d+"):
        make_engine_spec(EngineOptions(str(tmp_path), load_format="dummy", device="cpu", dtype="float32"))


def test_a_type_that_is_none(tmp_path: Path) -> None:
    """It is told by the weights then."""
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "dtype": [0]}), encoding="utf-8")
    spec = make_engine_spec(EngineOptions(str(tmp_path), load_format="dummy", device="cpu"))
    assert spec.options.dtype in ("bfloat16", "float32")
