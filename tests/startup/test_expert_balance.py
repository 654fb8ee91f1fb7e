"""Experts change places between real processes while they answer, and nothing that is answered changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.kernels.cpu import native
from tests.models import tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
SIZES: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_model_len": 128, "kv_blocks": 64, "dtype": "float32"}
MOVING: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "num_redundant_experts": 2,
    "eplb_step_interval": 8,
}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose router sends nearly every token to the first rank's experts."""
    folder = tmp_path_factory.mktemp("biased")
    tiny.save("glm4-moe", folder, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        tensors[name] = torch.where(torch.arange(8) < 4, 0.9, 0.0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def answers(folder: Path, **options: Any) -> dict[str, list[int]]:
    """Tokens of a few requests, of which some sample."""
    engine, _ = build_engine(EngineOptions(model=str(folder), **SETTINGS, **options))
    found: dict[str, list[int]] = {}
    for name in "abcd":
        how = SamplingParams(temperature=0.9 if name > "b" else 0.0, max_tokens=60, ignore_eos=True)
        engine.add(EngineRequest(name, tuple(tiny.prompt(20, ord(name))), how, seed=7))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault(output.request_id, []).extend(output.tokens)
    assert engine.dead is None
    engine.close()
    return found


def test_answers_while_experts_move_are_those_of_one_process(biased: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = answers(biased)
    with caplog.at_level(logging.INFO, "penstock.runtime.ranks.balance"):
        assert answers(biased, **MOVING) == expected
    assert "experts have changed places" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_expert_parallel": True}, "Take --tensor-parallel-size"),
        ({"enable_eplb": True, "tensor_parallel_size": 2}, "Take --enable-expert-parallel"),
        ({**MOVING, "pipeline_parallel_size": 2}, "Leave --pipeline-parallel-size out"),
        ({**MOVING, "enable_lora": True}, "with --enable-lora all processes have all"),
        ({**MOVING, "num_redundant_experts": -1}, "--num-redundant-experts is -1; allowed: an integer from 0"),
        ({**MOVING, "eplb_step_interval": 0}, "--eplb-step-interval is 0; allowed: an integer of at least 1"),
        ({"num_redundant_experts": 1}, "needs --enable-eplb"),
        (MOVING, "no layer has experts that processes share"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str, shared_data: Path) -> None:
    model = str(shared_data / "models" / "stories260K" / "hf")
    with pytest.raises(ConfigError, match=said):
        build_engine(EngineOptions(model=model, **{**SETTINGS, **options}))
