"""Writes Hugging Face folders: safetensors files streamed tensor by tensor, an index where there are several."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.errors import ConfigError
from penstock.quant.formats.record import Bytes

Progress = Callable[[int, int], None]
_SHARD_BYTES = 4 * 2**30
DTYPES = {"f8_e4m3": "F8_E4M3", "f8_e5m2": "F8_E5M2", "bool": "BOOL"}


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """One tensor of the output.

    Attributes:
        name: its key.
        format: storage format, as in `quant.tensor`.
        shape: its shape.
        nbytes: bytes of data.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutputGroup:
    """Tensors that are made together, such as a weight's codes and scales.

    Attributes:
        tensors: in the order in which `make` gives their bytes.
        make: gives each tensor's bytes.
    """

    tensors: tuple[StoredOutput, ...]
    make: Callable[[], Iterator[Bytes]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def _shards(groups: Sequence[OutputGroup]) -> list[list[OutputGroup]]:
    shards: list[list[OutputGroup]] = [[]]
    size = 0
    for group in groups:
        if shards[-1] and size + group.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.nbytes
    return shards


def _header(groups: Sequence[OutputGroup]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for group in groups:
        for tensor in group.tensors:
            dtype = DTYPES.get(tensor.format, tensor.format.upper())
            span = [offset, offset + tensor.nbytes]
            entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": span}
            offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_safetensors(folder: Path, groups: Sequence[OutputGroup], progress: Progress | None = None) -> int:
    """Writes `model.safetensors`, or shards of at most 4 GiB and their index, into an existing folder.

    Returns:
        Bytes of all files written.

    Raises:
        ConfigError: a tensor cannot be made.
    """
    shards = _shards(groups)
    total = sum(group.nbytes for group in groups)
    done = written = 0
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = len(shards) > 1
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if several else "model.safetensors"
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for group in shard:
                for tensor, data in zip(group.tensors, group.make(), strict=True):
                    if data.size != tensor.nbytes:
                        raise RuntimeError(f"tensor {tensor.name} gave {data.size} bytes, not {tensor.nbytes}")
                    file.write(np.ascontiguousarray(data).data)
                    done += data.size
                    if progress is not None:
                        progress(done, total)
                places |= {tensor.name: name for tensor in group.tensors}
            written += file.tell()
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return written


def copy_side_files(source: Path, target: Path) -> None:
    """Copies everything small a model folder holds beside its weights and config.json: tokenizer, templates, licence.

    Raises:
        ConfigError: a file cannot be read.
    """
    kept = (".json", ".jinja", ".txt", ".model", ".md")
    try:
        for path in sorted(source.iterdir()):
            skipped = path.name in ("config.json", "model.safetensors.index.json")
            if path.is_file() and path.suffix in kept and not skipped:
                (target / path.name).write_bytes(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"a file beside the weights cannot be copied: {error}.") from error
