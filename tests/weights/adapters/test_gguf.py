"""Adapters in GGUF files: the same change as PEFT's folder that they were made of, rows permuted as the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.config.errors import CheckpointError
from penstock.quant.formats import decode_to_float32
from penstock.quant.tensor import StoredTensor
from penstock.weights.adapters.open import adapter_digest, open_adapter
from tests.weights.adapters.test_peft import matrices, write

HEADS, KV_HEADS, SIZE = 4, 2, 8
CONFIG: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE}
NAMES = {
    "self_attn.q_proj": ("attn_q", HEADS * SIZE, HEADS),
    "self_attn.k_proj": ("attn_k", KV_HEADS * SIZE, KV_HEADS),
    "self_attn.v_proj": ("attn_v", KV_HEADS * SIZE, 0),
    "mlp.down_proj": ("ffn_down", 16, 0),
}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter permutes queries and keys of Llama."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def written(path: Path, tensors: dict[str, np.ndarray], arch: str = "llama", **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("general.type", fields.get("type", "adapter"))
    writer.add_string("adapter.type", fields.get("kind", "lora"))
    writer.add_float32("adapter.lora.alpha", fields.get("alpha", 8.0))
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(stored: StoredTensor) -> np.ndarray:
    return np.asarray(decode_to_float32(stored.info.format, stored.data).reshape(stored.info.shape))


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_it_is_the_folder_that_it_was_made_of(tmp_path: Path, arch: str, kind: Any) -> None:
    folder_tensors: dict[str, np.ndarray] = {}
    for name, (_, outputs, _) in NAMES.items():
        folder_tensors |= matrices(4, 16, outputs, f"model.layers.1.{name}")
    folder = open_adapter(write(tmp_path / "folder", folder_tensors))
    stored = load_file(tmp_path / "folder" / "adapter_model.safetensors")
    tensors = {}
    for name, (short, _, heads) in NAMES.items():
        stem = f"base_model.model.model.layers.1.{name}"
        up = stored[f"{stem}.lora_B.weight"]
        up = permuted(up, heads) if heads and arch == "llama" else up
        tensors[f"blk.1.{short}.weight.lora_a"] = stored[f"{stem}.lora_A.weight"].astype(kind)
        tensors[f"blk.1.{short}.weight.lora_b"] = up.astype(kind)
    path = written(tmp_path / "lora.gguf", tensors, arch)
    found = open_adapter(path, CONFIG)
    assert found.changes.keys() == folder.changes.keys() and found.rank == 4
    for name, theirs in folder.changes.items():
        ours = found.changes[name]
        assert ours.scale == theirs.scale == 2.0
        for one, other in ((ours.down, theirs.down), (ours.up, theirs.up)):
            assert np.array_equal(values(one), values(other).astype(kind).astype(np.float32)), name
    assert list(open_adapter(path).changes) == [f"blk.1.{short}" for short, _, _ in NAMES.values()]
    assert len(adapter_digest(path)) == 64


def pair(**other: np.ndarray) -> dict[str, np.ndarray]:
    found = {"blk.0.attn_v.weight.lora_a": np.ones((4, 16), np.float32)}
    return found | {"blk.0.attn_v.weight.lora_b": np.ones((16, 4), np.float32)} | other


@pytest.mark.parametrize(
    ("tensors", "fields", "said"),
    [
        (pair(), {"type": "model"}, "no LoRA adapter"),
        (pair(), {"kind": "control"}, "no LoRA adapter"),
        (pair(), {"alpha": float("nan")}, "no number"),
        ({"blk.0.attn_v.weight": np.ones((4, 4), np.float32)}, {}, "no part of"),
        (dict(list(pair().items())[:1]), {}, "no fitting pair"),
        (pair() | {"blk.0.attn_v.weight.lora_b": np.ones((16, 3), np.float32)}, {}, "no fitting pair"),
    ],
)
def test_what_is_refused(tmp_path: Path, tensors: Any, fields: Any, said: str) -> None:
    path = written(tmp_path / "lora.gguf", tensors, **fields)
    with pytest.raises(CheckpointError, match=said):
        open_adapter(path, CONFIG)


def test_files_that_are_cut(tmp_path: Path) -> None:
    whole = written(tmp_path / "lora.gguf", pair()).read_bytes()
    path = tmp_path / "cut.gguf"
    for end in range(0, len(whole) - 1, 11):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            open_adapter(path, CONFIG)


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    tensors = {
        "blk.0.attn_q.weight.lora_a": np.ones((4, 16), np.float32),
        "blk.0.attn_q.weight.lora_b": np.ones((13, 4), np.float32),
    }
    with pytest.raises(CheckpointError, match="13 rows"):
        open_adapter(written(tmp_path / "lora.gguf", tensors), CONFIG)


def test_embedding_and_head(tmp_path: Path) -> None:
    """llama.cpp keeps an embedding's matrices turned: [vocab, rank] and [hidden, rank]."""
    random = np.random.default_rng(3)
    shapes = {
        "token_embd.weight.lora_a": (50, 4),
        "token_embd.weight.lora_b": (16, 4),
        "output.weight.lora_a": (3, 16),
        "output.weight.lora_b": (50, 3),
    }
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    found = open_adapter(written(tmp_path / "lora.gguf", tensors, alpha=8.0), CONFIG).changes
    table, head = found["model.embed_tokens"], found["lm_head"]
    assert (table.looked_up, table.scale, head.looked_up, head.scale) == (True, 2.0, False, 8 / 3)
    assert np.array_equal(values(table.down), tensors["token_embd.weight.lora_a"].T)
    assert np.array_equal(values(table.up), tensors["token_embd.weight.lora_b"])
    assert np.array_equal(values(head.down), tensors["output.weight.lora_a"])
