"""Adapters in PEFT's layout: what is read of them, and what is refused with a sentence."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.config.errors import CheckpointError
from penstock.weights.adapters.open import adapter_digest, open_adapter

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "base"}
NAME = "model.layers.0.self_attn.q_proj"


def matrices(rank: int = 4, inputs: int = 16, outputs: int = 12, name: str = NAME) -> dict[str, np.ndarray]:
    random = np.random.default_rng(rank)
    stem = f"base_model.model.{name}"
    return {
        f"{stem}.lora_A.weight": random.standard_normal((rank, inputs), np.float32),
        f"{stem}.lora_B.weight": random.standard_normal((outputs, rank), np.float32),
    }


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(matrices() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"init_lora_weights": "gaussian"}, 2.0),
        ({"init_lora_weights": True}, 2.0),
        ({"alpha_pattern": {"q_proj": 16}}, 4.0),
        ({"alpha_pattern": {"self_attn.q_proj": 12, "q_proj": 16}}, 3.0),
        ({"alpha_pattern": {"k_proj": 16, "proj": 20}}, 2.0),
        ({"alpha_pattern": {"q_proj": 16, "self_attn.q_proj": 12}}, 4.0),
    ],
)
def test_what_is_read(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    adapter = open_adapter(write(tmp_path / "a", **config))
    change = adapter.changes[NAME]
    assert (adapter.base, adapter.rank, list(adapter.changes)) == ("base", 4, [NAME])
    assert (change.down.info.shape, change.up.info.shape, change.scale) == ((4, 16), (12, 4), scale)


def test_content_names_an_adapter(tmp_path: Path) -> None:
    one, same = write(tmp_path / "a"), write(tmp_path / "b")
    other = write(tmp_path / "c", lora_alpha=9)
    assert adapter_digest(one) == adapter_digest(same) != adapter_digest(other)
    assert len(adapter_digest(one)) == 64


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": None}, "None"),
        ({"modules_to_save": ["lm_head"]}, "whole layers"),
        ({"trainable_token_indices": [1]}, "rows of the embedding"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "stacked parameters"),
        ({"lora_bias": True}, "biases"),
        ({"bias": "all"}, "biases"),
        ({"use_qalora": True}, "QALoRA"),
        ({"alora_invocation_tokens": [1, -2]}, "invocation is no list"),
        ({"alora_invocation_tokens": [1] * 257}, "invocation is no list"),
        ({"alora_invocation_tokens": "hello"}, "invocation is no list"),
        ({"init_lora_weights": "pissa_niter_16"}, "weights were changed"),
        ({"init_lora_weights": "olora"}, "weights were changed"),
        ({"lora_alpha": "much"}, "no number"),
        ({"lora_alpha": float("inf")}, "number|JSON"),
        ({"lora_alpha": 10**400}, "no number"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "other patterns"),
        ({"alpha_pattern": [1]}, "no object"),
        ({"alpha_pattern": {"q_proj": None}}, "no number"),
    ],
)
def test_kinds_that_are_not_read(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_adapter(write(tmp_path / "a", **config))


def one_missing() -> dict[str, np.ndarray]:
    return dict(list(matrices().items())[:1])


def of_other_rank() -> dict[str, np.ndarray]:
    return matrices() | {f"base_model.model.{NAME}.lora_B.weight": np.zeros((12, 5), np.float32)}


def of_three_axes() -> dict[str, np.ndarray]:
    return {name: tensor[None] for name, tensor in matrices().items()}


def with_lengths() -> dict[str, np.ndarray]:
    return matrices() | {f"base_model.model.{NAME}.lora_magnitude_vector": np.ones(11, np.float32)}


def of_a_convolution() -> dict[str, np.ndarray]:
    return matrices() | {f"base_model.model.{NAME}.lora_A.bias": np.ones(4, np.float32)}


def of_half_an_embedding() -> dict[str, np.ndarray]:
    return matrices() | {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 9), np.float32)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (dict, "changes nothing"),
        (one_missing, "no fitting pair"),
        (of_other_rank, "no fitting pair"),
        (of_three_axes, "no fitting pair"),
        (with_lengths, "lengths"),
        (of_half_an_embedding, "no fitting pair"),
        (of_a_convolution, "lora_A.bias"),
    ],
)
def test_matrices_that_do_not_fit(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_adapter(write(tmp_path / "a", make()))


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no adapter at"):
        open_adapter(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        open_adapter(tmp_path)
    folder = write(tmp_path / "a")
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError):
        open_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="Pickled"):
        open_adapter(folder)


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "x" * 4000, "/dev/zero", "\0"])
def test_places_that_cannot_be_read(path: str) -> None:
    for reads in (open_adapter, adapter_digest):
        with pytest.raises(CheckpointError, match="adapter"):
            reads(path)


def test_files_that_are_cut_or_changed(tmp_path: Path) -> None:
    """Every cut, and every byte of the header turned: an adapter, or a sentence."""
    folder = write(tmp_path / "a")
    whole = (folder / "adapter_model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = [whole[:end] for end in range(0, len(whole), 7)]
    damaged += [whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :] for place in range(header)]
    opened = 0
    for data in damaged:
        (folder / "adapter_model.safetensors").write_bytes(data)
        with contextlib.suppress(CheckpointError):
            open_adapter(folder)
            opened += 1
    assert opened < len(damaged) // 2
