"""Hugging Face folders with safetensors files: one `model.safetensors`, or shards under an index.

A file is: header length u64, header JSON (name → dtype, shape, data_offsets), tensor data. The safetensors library
validates the header; the views are made here, so that bfloat16 and 8-bit floats need no torch.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from safetensors import SafetensorError, safe_open

from penstock.config import limits
from penstock.config.errors import CheckpointError, quoted
from penstock.quant.formats import FORMATS
from penstock.quant.formats.record import Bytes
from penstock.quant.tensor import StoredTensor, TensorInfo
from penstock.weights.readers.files import map_file, parse_object, read_object
from penstock.weights.readers.modules import dense_layers, read_modules
from penstock.weights.readers.tied import untie

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_FORMAT_NAMES = {"F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2", "BOOL": "bool"}
_LISTED = 20


@dataclass(slots=True)
class SafetensorsCheckpoint:
    """Implements `weights.checkpoint.Checkpoint`."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    _data: Mapping[str, Bytes] = field(repr=False)

    def read(self, name: str) -> StoredTensor:
        """The tensor's bytes, a view of the file.

        Raises:
            CheckpointError: no such tensor, or its dtype cannot be decoded.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} has no tensor {quoted(name)}.")
        if info.format not in FORMATS:
            raise CheckpointError(
                f"tensor {quoted(name)} is stored as {info.format.upper()}, which has no decoder; "
                f"there are: {', '.join(FORMATS)}."
            )
        return StoredTensor(info, self._data[name])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(quoted(name) for name in names[:_LISTED]) + more


def _validate(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no sound safetensors file: {error}. Download it again.") from error


def _whole(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _entry(path: Path, name: str, entry: Any, data_size: int) -> tuple[TensorInfo, int, int]:
    """One header entry, checked independently of the library: (info, first byte, last byte) within the data."""
    fields = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    offsets = fields.get("data_offsets")
    if not isinstance(dtype, str) or not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: the header of tensor {quoted(name)} lacks dtype, shape or data_offsets.")
    if len(name) > limits.MAX_TENSOR_NAME_CHARS:
        raise CheckpointError(
            f"{path}: the tensor {quoted(name)} has a name of {len(name)} characters; at most "
            f"{limits.MAX_TENSOR_NAME_CHARS} are allowed."
        )
    if len(shape) > limits.MAX_TENSOR_DIMS:
        raise CheckpointError(
            f"{path}: tensor {quoted(name)} has {len(shape)} dimensions; at most {limits.MAX_TENSOR_DIMS} are allowed."
        )
    fmt = _FORMAT_NAMES.get(dtype, dtype.lower())
    elements = 1
    for size in shape:
        elements *= size
    first, last = offsets
    if not first <= last <= data_size:
        raise CheckpointError(f"{path}: tensor {quoted(name)} lies at {first} to {last} of {data_size} data bytes.")
    if fmt in FORMATS and elements * FORMATS[fmt].block_bytes != last - first:
        raise CheckpointError(f"{path}: tensor {quoted(name)}, {dtype} of shape {shape}, has {last - first} bytes.")
    return TensorInfo(name, tuple(shape), fmt, last - first), first, last


def read_safetensors_file(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one file, as views of its memory map.

    Raises:
        CheckpointError: the file is damaged; the message names the tensor and the numbers.
    """
    _, data = map_file(path)
    header_size = struct.unpack("<Q", data[:8].tobytes())[0] if data.size >= 8 else data.size
    if header_size > min(data.size - 8, limits.MAX_HEADER_JSON_BYTES):
        raise CheckpointError(
            f"{path} claims a header of {header_size} bytes; the file has {data.size}, "
            f"and at most {limits.MAX_HEADER_JSON_BYTES} are read. Download it again."
        )
    _validate(path)
    start = 8 + header_size
    header = parse_object(data[8:start].tobytes(), f"the header of {path}")
    header.pop("__metadata__", None)
    if len(header) > limits.MAX_TENSORS:
        raise CheckpointError(f"{path} holds {len(header)} tensors; at most {limits.MAX_TENSORS} are allowed.")
    found: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        info, first, last = _entry(path, name, entry, data.size - start)
        found[name] = StoredTensor(info, data[start + first : start + last])
        spans.append((first, last, name))
    spans.sort()
    for (_, last, before), (first, _, after) in itertools.pairwise(spans):
        if last > first:
            raise CheckpointError(f"{path}: tensors {quoted(before)} and {quoted(after)} overlap at byte {first}.")
    return found


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / _INDEX
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensor names to files.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\\" in file:
            raise CheckpointError(
                f"{index} maps {quoted(name)} to {quoted(str(file))}; a .safetensors file name without folders "
                "is needed."
            )
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(f"{index} names files that are not there: {_listed(missing)}. Download them as well.")
    promised: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        promised.setdefault(file, []).append(name)
    found: dict[str, StoredTensor] = {}
    for file in files:
        shard = read_safetensors_file(folder / file)
        twice = [name for name in shard if name in found]
        if twice:
            raise CheckpointError(f"{folder / file} holds tensors another shard holds as well: {_listed(twice)}.")
        absent = [name for name in promised[file] if name not in shard]
        if absent:
            raise CheckpointError(f"{folder / file} lacks tensors the index promises: {_listed(absent)}.")
        found.update(shard)
    return found


def _weight_files(folder: Path) -> dict[str, StoredTensor]:
    if (folder / _SINGLE).is_file():
        return read_safetensors_file(folder / _SINGLE)
    if (folder / _INDEX).is_file():
        return _read_shards(folder)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return read_safetensors_file(others[0])
    if others:
        raise CheckpointError(f"{folder} holds {len(others)} safetensors files but no {_INDEX}; download it as well.")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} holds only pickled weights ({_listed(pickles)}), which can run code when they are read. "
            'Convert them once, in a sandbox: python -c "from transformers import AutoModelForCausalLM as M; '
            "M.from_pretrained('FOLDER').save_pretrained('NEW_FOLDER')\""
        )
    raise CheckpointError(f"{folder} holds no weights; looked for {_SINGLE}, {_INDEX} and other .safetensors files.")


def _read_template(path: Path) -> str:
    try:
        if path.stat().st_size > 4 * limits.MAX_TEMPLATE_SOURCE_CHARS:
            raise CheckpointError(f"{path} has more than {limits.MAX_TEMPLATE_SOURCE_CHARS} characters.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as UTF-8 text: {error}.") from error


def _chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> None:
    """Fills `chat_template`: text, or a mapping by name where there are several. Files of their own win."""
    inline = tokenizer_config.pop("chat_template", None)
    inline = read_object(folder / "chat_template.json", missing_ok=True).get("chat_template", inline)
    pairs = inline if isinstance(inline, list) else [{"name": "default", "template": inline}]
    entries = [(one.get("name"), one.get("template")) for one in pairs if isinstance(one, dict)]
    named = {name: text for name, text in entries if isinstance(name, str) and isinstance(text, str)}
    if (folder / "chat_template.jinja").is_file():
        named["default"] = _read_template(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = _read_template(path)
    if named:
        tokenizer_config["chat_template"] = named["default"] if set(named) == {"default"} else named


def _quantisation(folder: Path, config: dict[str, Any]) -> None:
    """Fills `quantization_config` from the file of its own in which some quantisers keep it."""
    if any(isinstance(config.get(name), dict) for name in ("quantization_config", "quantization")):
        return
    nvidia = read_object(folder / "hf_quant_config.json", missing_ok=True).get("quantization")
    if isinstance(nvidia, dict) and nvidia.get("quant_algo") is not None:
        config["quantization_config"] = {"quant_method": "modelopt", **nvidia}
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        found = read_object(folder / name, missing_ok=True)
        if found and "quantization_config" not in config:
            config["quantization_config"] = {"quant_method": method, **found}


def _dense_modules(folder: Path, config: dict[str, Any], stored: dict[str, StoredTensor]) -> None:
    """Adds the dense layers that sentence embeddings pass: their tensors below their folder's name, their sizes."""
    layers = dense_layers(read_modules(folder) or ())
    for layer in layers:
        for name, tensor in _weight_files(folder / layer["name"]).items():
            stored[f"{layer['name']}.{name}"] = tensor
    if layers:
        config["dense_layers"] = layers


def describe_folder(folder: Path) -> SafetensorsCheckpoint:
    """What a Hugging Face folder says beside its weights: of tensors there are none.

    Raises:
        CheckpointError: no config.json, or a damaged file.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, which says what model it is. Download it as well.")
    config = read_object(folder / "config.json")
    _quantisation(folder, config)
    tokenizer_config = read_object(folder / "tokenizer_config.json", missing_ok=True)
    _chat_templates(folder, tokenizer_config)
    return SafetensorsCheckpoint(
        path=folder,
        config=config,
        generation_config=read_object(folder / "generation_config.json", missing_ok=True),
        tokenizer_config=tokenizer_config,
        metadata=MappingProxyType({}),
        tensors=MappingProxyType({}),
        _data={},
    )


def open_safetensors(folder: Path) -> SafetensorsCheckpoint:
    """Opens a Hugging Face folder.

    Raises:
        CheckpointError: no config.json, no safetensors weights, or any of the files is damaged.
    """
    described = describe_folder(folder)
    config = dict(described.config)
    stored = _weight_files(folder)
    _dense_modules(folder, config, stored)
    untie(config, stored)
    return replace(
        described,
        config=config,
        tensors=MappingProxyType({name: tensor.info for name, tensor in stored.items()}),
        _data={name: tensor.data for name, tensor in stored.items()},
    )
