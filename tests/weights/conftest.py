"""Writers of tiny GGUF and safetensors models for the reader tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

Arrays = Mapping[str, np.ndarray]
WriteGguf = Callable[..., Path]


def _add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))


def _write_gguf(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Arrays, kinds: Mapping[str, str] | None = None
) -> Path:
    """Writes tensors (GGUF names) as float32, or quantised to the type `kinds` names for them."""
    writer = gguf.GGUFWriter(path, arch)
    _add_metadata(writer, metadata)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        if kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values, np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def write_gguf() -> WriteGguf:
    """(path, arch, metadata, tensors, kinds) → path."""
    return _write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """(tensors by file, further files as JSON values) → a Hugging Face folder."""
    from safetensors.numpy import save_file

    def make(files: Mapping[str, Arrays], **extra: Any) -> Path:
        path = tmp_path / "model"
        path.mkdir()
        for name, tensors in files.items():
            save_file(dict(tensors), path / name)
        for stem, value in {"config": {"model_type": "llama"}, **extra}.items():
            (path / f"{stem.replace('__', '.')}.json").write_text(json.dumps(value))
        return path

    return make


@pytest.fixture(scope="session")
def base_metadata() -> Callable[..., dict[str, Any]]:
    """(arch, further keys) → the metadata every decoder has: hidden 16, 2 layers, 4 heads over 2 KV heads of 4."""

    def make(arch: str, **more: Any) -> dict[str, Any]:
        own = {
            "context_length": 128,
            "embedding_length": 16,
            "block_count": 2,
            "feed_forward_length": 24,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10000.0,
        }
        return {f"{arch}.{key}": value for key, value in (own | more).items()}

    return make


@pytest.fixture(scope="session")
def dense_tensors() -> dict[str, np.ndarray]:
    """A dense decoder of the base metadata's sizes, Hugging Face names and layouts, vocabulary 32, tied."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (16,),
            prefix + "self_attn.q_proj.weight": (16, 16),
            prefix + "self_attn.k_proj.weight": (8, 16),
            prefix + "self_attn.v_proj.weight": (8, 16),
            prefix + "self_attn.o_proj.weight": (16, 16),
            prefix + "post_attention_layernorm.weight": (16,),
            prefix + "mlp.gate_proj.weight": (24, 16),
            prefix + "mlp.up_proj.weight": (24, 16),
            prefix + "mlp.down_proj.weight": (16, 24),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
