"""Models of random weights, of which only a configuration is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config.errors import CheckpointError
from penstock.config.options import EngineOptions
from penstock.engine.build import build_engine
from penstock.weights.dummy import open_dummy
from tests.engine.test_equality import ask, finish
from tests.models import tiny

FAMILIES = ("llama", "deepseek-v2", "gpt-oss", "mamba2")  # merged, latent, stacked, transformed weights


def described(family: str, folder: Path) -> Path:
    """A folder with a family's config.json and nothing else."""
    model = tiny.make(family)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answer(folder: Path, **more: object) -> list[int]:
    given = {"max_num_seqs": 2, "kv_blocks": 20, "threads": 1, **more}
    engine, _ = build_engine(EngineOptions(model=str(folder), load_format="dummy", **given))  # type: ignore[arg-type]
    engine.add(ask("it", tuple(range(3, 10)), 6))
    tokens = finish(engine)["it"].tokens
    engine.close()
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_it_answers_alike_each_time(family: str, quantize: str | None, tmp_path: Path) -> None:
    folder = described(family, tmp_path)
    tokens = answer(folder, quantize=quantize)
    assert len(tokens) == 6
    assert answer(folder, quantize=quantize) == tokens


def test_every_declared_tensor_is_counted(tmp_path: Path) -> None:
    checkpoint = open_dummy(described("llama", tmp_path))
    names = set(tiny.make("llama").state_dict())
    assert set(checkpoint.tensors) == names
    norm = checkpoint.read("model.norm.weight")
    assert norm.data.nbytes == norm.info.nbytes


def test_stated_quantisation_is_left_aside(tmp_path: Path) -> None:
    folder = described("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    assert len(answer(folder)) == 6


def test_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_dummy(tmp_path)
