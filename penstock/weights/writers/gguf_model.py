"""Models as GGUF files in a chosen recipe, from a Hugging Face folder or an unquantised GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.config.errors import CheckpointError, ConfigError
from penstock.config.quantisation import GGUF_FILE_TYPES
from penstock.models.gguf.layouts import LAYER_NAMES, TOP_NAMES, layout_of
from penstock.models.gguf.written import architecture_of, llama3_divisors
from penstock.quant.formats.record import Bytes, Floats
from penstock.quant.recipes import ModelShape, tensor_format
from penstock.quant.tensor import StoredTensor, TensorInfo
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.imatrix import ImportanceMatrix
from penstock.weights.readers.gguf import shard_paths
from penstock.weights.readers.gguf_file import GgufTensor, read_gguf_file
from penstock.weights.writers.gguf import RawValue, TensorToWrite
from penstock.weights.writers.gguf_metadata import file_metadata, resolved_config
from penstock.weights.writers.rows import MatrixToWrite, encoded, rows_of

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(\d+)\.(\w+)")
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_SKIPPED = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
_LEFT = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
_DROPPED_KEYS = ("split.no", "split.count", "split.tensors.count", "general.alignment", "general.file_type")
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True, slots=True)
class Source:
    """A model as GGUF names its parts, before formats are chosen.

    Attributes:
        metadata: keys and values, without file type.
        tensors: name → shape and the matrices it consists of (several for a stack of experts).
        model: what recipes depend on.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], tuple[MatrixToWrite, ...]]]
    model: ModelShape


@dataclass(frozen=True, slots=True)
class GgufPlan:
    """What will be written.

    Attributes:
        metadata, tensors: of the file.
        remarks: a sentence for every tensor that could not take the format its recipe asks for.
    """

    metadata: Mapping[str, Any]
    tensors: tuple[TensorToWrite, ...]
    remarks: tuple[str, ...]


def _interleaving(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Llama's rows of a head are stored as (half, pair) and written as (pair, half)."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


class GgufNames:
    """Hugging Face names → GGUF names of one architecture."""

    def __init__(self, arch: str, config: Mapping[str, Any]) -> None:
        layout = layout_of(arch, config)
        self._top = {theirs: ours for ours, theirs in TOP_NAMES.items()}
        self._stems = {theirs: ours for ours, theirs in {**LAYER_NAMES, **layout.layer}.items()}
        self._prefix, names = layout.experts or ("", {})
        self._experts = {theirs: f"ffn_{ours}_exps" for ours, theirs in names.items()}

    def find(self, name: str) -> tuple[str, int | None] | None:
        """(GGUF name, index of the expert or None), or None for a name nobody knows."""
        if name in self._top:
            return self._top[name], None
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        layer, stem, suffix = match.groups()
        if stem in self._stems:
            return f"blk.{layer}.{self._stems[stem]}.{suffix}", None
        expert = _EXPERT.fullmatch(stem.removeprefix(f"{self._prefix}.")) if self._prefix else None
        if expert and expert[2] in self._experts:
            return f"blk.{layer}.{self._experts[expert[2]]}.{suffix}", int(expert[1])
        return None


def source_of(checkpoint: Checkpoint, has_importance: bool = False) -> Source:
    """Finds the parts of an opened model.

    Raises:
        CheckpointError: a family or a tensor that cannot be written.
        ConfigError: it is quantised already.
    """
    if checkpoint.metadata:
        return _gguf_source(checkpoint, has_importance)
    if checkpoint.config.get("quantization_config"):
        raise ConfigError(f"{checkpoint.path} is quantised already; name the original model.")
    arch, config = architecture_of(checkpoint.config), resolved_config(checkpoint)
    names = GgufNames(arch, config)
    tied = bool(config.get("tie_word_embeddings"))
    found: dict[str, dict[int | None, MatrixToWrite]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, info in checkpoint.tensors.items():
        plain = _plain_name(name)
        if name.startswith(_SKIPPED) or name.endswith(_LEFT) or (tied and plain == "lm_head.weight"):
            continue
        target = names.find(plain)
        if target is None:
            raise CheckpointError(f"tensor {name} of {checkpoint.path} has no place in a GGUF file of {arch}.")
        rows = rows_of(partial(checkpoint.read, name), info.shape, info.format)
        found.setdefault(target[0], {})[target[1]] = _changed(arch, target[0], rows, config)
        shapes[target[0]] = info.shape
    tensors = {name: _stacked(name, shapes[name], parts) for name, parts in _in_order(found)}
    divisors = llama3_divisors(config)
    if divisors is not None:
        data = divisors.view(np.uint8)
        tensors["rope_freqs.weight"] = divisors.shape, (MatrixToWrite((1, divisors.size), "f32", lambda: data),)
    return Source(file_metadata(checkpoint, arch, config), tensors, _model_shape(config, tensors, has_importance))


def gguf_name(checkpoint: Checkpoint, name: str) -> str | None:
    """The GGUF name of a Hugging Face tensor (of the whole stack, for an expert); None where there is none."""
    found = GgufNames(architecture_of(checkpoint.config), resolved_config(checkpoint)).find(_plain_name(name))
    return None if found is None else found[0]


def _plain_name(name: str) -> str:
    for theirs, ours in _PREFIXES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _changed(arch: str, name: str, rows: MatrixToWrite, config: Mapping[str, Any]) -> MatrixToWrite:
    """What GGUF stores differently: some families' query and key rows, and norms."""
    layout = layout_of(arch, config)
    if layout.permuted and (".attn_q." in name or ".attn_k." in name):
        heads = config["num_attention_heads"]
        if ".attn_k." in name:
            heads = config.get("num_key_value_heads", heads)
        if rows.shape[0] == 1:  # a bias: its values are the rows
            rows = replace(rows, shape=(rows.shape[1], 1))
        return replace(rows, order=_interleaving(rows.shape[0], heads))
    if layout.around_one and name.endswith("norm.weight"):
        return replace(rows, plus=1.0)
    return rows


def _in_order(
    found: Mapping[str, Mapping[int | None, MatrixToWrite]],
) -> Iterator[tuple[str, Mapping[int | None, MatrixToWrite]]]:
    """The embedding first, then layer by layer, the output last."""

    def key(name: str) -> tuple[int, int, str]:
        part = name.split(".")
        return (1, int(part[1]), name) if part[0] == "blk" else (0 if part[0] == "token_embd" else 2, 0, name)

    for name in sorted(found, key=key):
        yield name, found[name]


def _stacked(
    name: str, shape: tuple[int, ...], parts: Mapping[int | None, MatrixToWrite]
) -> tuple[tuple[int, ...], tuple[MatrixToWrite, ...]]:
    if None in parts:
        return shape, (parts[None],)
    count = len(parts)
    if sorted(parts, key=lambda index: index or 0) != list(range(count)):
        raise CheckpointError(f"the experts of {name} are not numbered 0 to {count - 1}; download the model again.")
    return (count, *shape), tuple(parts[index] for index in range(count))


def _model_shape(config: Mapping[str, Any], tensors: Mapping[str, object], has_importance: bool) -> ModelShape:
    heads = config["num_attention_heads"]
    return ModelShape(
        layers=config["num_hidden_layers"],
        experts=config.get("num_local_experts") or config.get("num_experts") or 0,
        query_groups=heads // (config.get("num_key_value_heads") or heads),
        tied="output.weight" not in tensors,
        has_importance=has_importance,
    )


def _gguf_source(checkpoint: Checkpoint, has_importance: bool) -> Source:
    files = [read_gguf_file(shard) for shard in shard_paths(checkpoint.path)]
    first = files[0]
    metadata: dict[str, Any] = {
        key: RawValue(first.data[start:stop].tobytes())
        for key, (start, stop) in first.spans.items()
        if key not in _DROPPED_KEYS
    }
    tensors = {tensor.name: (tensor.shape, (_gguf_rows(tensor),)) for file in files for tensor in file.tensors.values()}
    return Source(metadata, tensors, _model_shape(checkpoint.config, tensors, has_importance))


def _gguf_rows(tensor: GgufTensor) -> MatrixToWrite:
    info = TensorInfo(tensor.name, tensor.shape, tensor.format, tensor.data.size)
    return rows_of(lambda: StoredTensor(info, tensor.data), tensor.shape, tensor.format)


def plan_gguf(source: Source, recipe: str, importance: ImportanceMatrix | None = None) -> GgufPlan:
    """Chooses every tensor's format.

    Args:
        source: from `source_of`.
        recipe: a key of GGUF_FILE_TYPES.
        importance: what squared errors of inputs weigh, or None.

    Raises:
        ConfigError: the importance matrix belongs to another model.
    """
    metadata = dict(source.metadata)
    metadata["general.quantization_version"] = _QUANTIZATION_VERSION
    metadata["general.file_type"] = GGUF_FILE_TYPES[recipe]
    if importance is not None:
        metadata |= {
            "quantize.imatrix.file": importance.path.name,
            "quantize.imatrix.dataset": ", ".join(importance.datasets),
            "quantize.imatrix.entries_count": len(importance.entries),
            "quantize.imatrix.chunks_count": importance.chunks,
        }
    tensors: list[TensorToWrite] = []
    remarks: list[str] = []
    for name, (shape, parts) in source.tensors.items():
        chosen, wanted = tensor_format(recipe, name, shape, source.model)
        if wanted is not None:
            remarks.append(f"{name}: rows of {shape[-1]} are not whole {wanted} blocks; written as {chosen}")
        weights = [None] * len(parts) if importance is None else importance.rows_of(name, shape)
        tensors.append(TensorToWrite(name, shape, chosen, partial(_pieces, name, parts, chosen, weights)))
    return GgufPlan(metadata, tuple(tensors), tuple(remarks))


def _pieces(
    name: str, parts: Sequence[MatrixToWrite], format: str, weights: Sequence[Floats | None]
) -> Iterator[Bytes]:
    try:
        if len(weights) > len(parts):  # a stack that is one tensor in its file
            rows = parts[0]
            count, each = len(weights), rows.shape[0] // len(weights)
            for index in range(count):
                yield from encoded(_section(rows, index * each, each), format, weights[index])
        else:
            for rows, weight in zip(parts, weights, strict=True):
                yield from encoded(rows, format, weight)
    except ConfigError as error:
        raise ConfigError(f"tensor {name}: {error}") from None


def _section(rows: MatrixToWrite, start: int, count: int) -> MatrixToWrite:
    """`count` rows from `start` of a matrix in its stored order."""

    def read() -> Bytes:
        data = rows.read()
        size = data.size // rows.shape[0]
        return data[start * size : (start + count) * size]

    return replace(rows, shape=(count, rows.shape[1]), read=read)
