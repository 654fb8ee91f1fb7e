"""Adapters in GGUF files, as llama.cpp's convert_lora_to_gguf writes them.

`general.type` is "adapter" and `adapter.type` "lora"; a tensor `NAME.lora_a` [rank, inputs] and `NAME.lora_b` [outputs,
rank] change the tensor NAME by `adapter.lora.alpha` / rank times their product. Rows are permuted as the model's are.
Of `token_embd.weight` they are [vocab, rank] and [hidden, rank].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.config.errors import CheckpointError, quoted
from penstock.quant.formats import decode_to_float32
from penstock.quant.tensor import StoredTensor, TensorInfo
from penstock.weights.adapters.adapter import Adapter, LowRankTensors, check_pair, invocation_of
from penstock.weights.readers.gguf_file import GgufFile, GgufTensor, read_gguf_file
from penstock.weights.readers.gguf_names import named_rows

_DOWN: Final = ".lora_a"
_UP: Final = ".lora_b"
_EMBEDDING: Final = "token_embd.weight"


def open_gguf_adapter(path: Path, config: Mapping[str, Any] | None = None) -> Adapter:
    """Opens an adapter; its projections have the names of the model with this `config`, or the file's own.

    Raises:
        CheckpointError: it is damaged, or no LoRA adapter.
    """
    file = read_gguf_file(path)
    metadata = file.metadata
    kind = metadata.get("general.type"), metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise CheckpointError(f"{path} is no LoRA adapter: general.type and adapter.type are {quoted(str(kind))}.")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise CheckpointError(f"{path}: adapter.lora.alpha is no number.")
    odd = next((name for name in file.tensors if not name.endswith((_DOWN, _UP))), None)
    if odd is not None:
        raise CheckpointError(f"{path} holds {quoted(odd)}, which is no part of a LoRA adapter.")
    changes = dict(_change(file, name, float(alpha), config) for name in _names(file))
    if not changes:
        raise CheckpointError(f"{path} changes nothing: it holds no matrices.")
    told = metadata.get("adapter.alora.invocation_tokens")
    return Adapter(path, changes, invocation=invocation_of(path, None if told is None else list(told)))


def _names(file: GgufFile) -> list[str]:
    """The tensors that are changed."""
    return list(dict.fromkeys(name[: -len(_DOWN)] for name in file.tensors))


def _change(file: GgufFile, name: str, alpha: float, config: Mapping[str, Any] | None) -> tuple[str, LowRankTensors]:
    """What one tensor is changed by, under its name."""
    down, up = file.tensors.get(name + _DOWN), file.tensors.get(name + _UP)
    looked_up = name == _EMBEDDING
    stored = [None if tensor is None else _stored(name, tensor) for tensor in (down, up)]
    if looked_up and stored[0] is not None and len(stored[0].info.shape) == 2:
        stored[0] = _turned(stored[0])
    check_pair(file.path, name, *stored)
    assert stored[0] is not None and stored[1] is not None and up is not None
    rank = stored[0].info.shape[0]
    scale = alpha / rank if alpha else 1.0
    if config is None:
        return name.removesuffix(".weight"), LowRankTensors(stored[0], stored[1], scale, looked_up=looked_up)
    arch = str(file.metadata.get("general.architecture"))
    rows = named_rows(arch, GgufTensor(name, up.shape, up.format, up.data), config)
    own = StoredTensor(TensorInfo(rows.info.name, up.shape, rows.info.format, up.data.size), rows.load())
    return rows.info.name.removesuffix(".weight"), LowRankTensors(stored[0], own, scale, looked_up=looked_up)


def _turned(tensor: StoredTensor) -> StoredTensor:
    """A matrix with its axes the other way round, in float32: of an embedding rank is the last."""
    rows, columns = tensor.info.shape
    values = decode_to_float32(tensor.info.format, tensor.data).reshape(rows, columns)
    turned = np.ascontiguousarray(values.T).view(np.uint8).reshape(-1)
    return StoredTensor(TensorInfo(tensor.info.name, (columns, rows), "f32", turned.size), turned)


def _stored(name: str, tensor: GgufTensor) -> StoredTensor:
    return StoredTensor(TensorInfo(name, tensor.shape, tensor.format, tensor.data.size), tensor.data)
