"""GGUF files, single or split, as a Checkpoint with Hugging Face's names and config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.config.errors import CheckpointError, quoted
from penstock.models.gguf.configuration import gguf_config
from penstock.quant.tensor import StoredTensor, TensorInfo
from penstock.weights.readers.gguf_companions import gguf_generation_config, gguf_tokenizer_config, read_overlay
from penstock.weights.readers.gguf_file import GgufFile, GgufTensor, read_gguf_file
from penstock.weights.readers.gguf_names import VirtualTensor, hugging_face_tensors

SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_SHARDS = 4096


@dataclass(slots=True)
class GgufCheckpoint:
    """Implements `weights.checkpoint.Checkpoint`."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    _sources: Mapping[str, VirtualTensor] = field(repr=False)

    def read(self, name: str) -> StoredTensor:
        """The tensor's bytes: a view of the file where its layout is Hugging Face's, else a converted copy.

        Raises:
            CheckpointError: no such tensor, or its format cannot be decoded.
        """
        source = self._sources.get(name)
        if source is None:
            raise CheckpointError(f"{self.path} has no tensor {quoted(name)}.")
        return StoredTensor(source.info, source.load())


def shard_paths(path: Path) -> list[Path]:
    """All files of a split model, given any of them; [path] for a name that is no shard's.

    Raises:
        CheckpointError: shards are missing.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= count <= _MAX_SHARDS:
        raise CheckpointError(f"{path} says it is one of {count} shards; 1 to {_MAX_SHARDS} are allowed.")
    paths = [path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        raise CheckpointError(
            f"{path} is one of {count} shards; missing beside it: {', '.join(missing[:20])}. Download them as well."
        )
    return paths


def _check_split(files: list[GgufFile]) -> None:
    for number, file in enumerate(files):
        expected = {"split.no": number, "split.count": len(files)}
        for key, want in expected.items():
            have = file.metadata.get(key)
            if have != want and (len(files) > 1 or have is not None):
                raise CheckpointError(f"{file.path}: {key} is {quoted(str(have), 40)}, but {want} belongs there.")


def _join(files: list[GgufFile]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{file.path}: tensor {quoted(name)} is in another shard as well.")
            tensors[name] = tensor
    claimed = files[0].metadata.get("split.tensors.count")
    if claimed is not None and claimed != len(tensors):
        raise CheckpointError(f"{files[0].path}: split.tensors.count is {claimed}, but the shards hold {len(tensors)}.")
    return tensors


def open_gguf(path: Path) -> GgufCheckpoint:
    """Opens a GGUF model; of a split one, any shard.

    Raises:
        CheckpointError: damaged, incomplete, of an unsupported architecture, or a vocabulary without weights.
    """
    files = [read_gguf_file(shard) for shard in shard_paths(path)]
    _check_split(files)
    tensors, metadata = _join(files), files[0].metadata
    config, told = gguf_config(metadata, tensors), read_overlay(path)
    sources = hugging_face_tensors(metadata["general.architecture"], tensors, config)
    return GgufCheckpoint(
        path=path,
        config=config,
        generation_config=gguf_generation_config(metadata, config) | told["generation_config"],
        tokenizer_config=gguf_tokenizer_config(metadata, config["vocab_size"]) | told["tokenizer_config"],
        metadata=MappingProxyType(dict(metadata)),
        tensors=MappingProxyType({name: source.info for name, source in sources.items()}),
        _sources=sources,
    )
