"""Importance matrices: how strongly each input of every weight is used, in llama.cpp's GGUF layout.

For a weight `name` the file holds `name.in_sum2` [E, K], sums of squared inputs, and `name.counts` [E, 1], how many
rows were summed; E is the number of experts, 1 for a dense weight. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.config.errors import CheckpointError, ConfigError
from penstock.quant.formats import decode_to_float32
from penstock.quant.formats.record import Bytes, Floats
from penstock.weights.readers.gguf_file import GgufFile, read_gguf_file
from penstock.weights.writers.gguf import TensorToWrite, Value, write_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight's inputs.

    Attributes:
        sums: [E, K] float32 sums of squares.
        counts: [E] float32 rows summed; 0 for an expert that no token reached.
    """

    sums: Floats
    counts: Floats


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """A whole model's inputs.

    Attributes:
        path: its file.
        entries: by GGUF tensor name.
        datasets: the texts it was collected over.
        chunks, chunk_size: how many stretches of how many tokens.
    """

    path: Path
    entries: Mapping[str, Entry]
    datasets: tuple[str, ...]
    chunks: int
    chunk_size: int

    def rows_of(self, name: str, shape: tuple[int, ...]) -> list[Floats | None]:
        """Mean squares for each matrix of a tensor: one, or one an expert; None where nothing was seen.

        Raises:
            ConfigError: the sizes are another model's.
        """
        count = shape[0] if len(shape) > 2 else 1
        entry = self.entries.get(name)
        if entry is None or len(shape) < 2:
            return [None] * count
        if entry.sums.shape[1] != shape[-1] or len(entry.sums) not in (1, count):
            raise ConfigError(
                f"{self.path} has {list(entry.sums.shape)} values for {name} of shape {list(shape)}; "
                "it was collected from another model. Collect one with `penstock imatrix`."
            )
        means: list[Floats | None] = [
            sums / seen if seen > 0 else None for sums, seen in zip(entry.sums, entry.counts, strict=True)
        ]
        return means if len(means) == count else means * count


def _array(file: GgufFile, name: str) -> Floats:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.format != "f32" or len(tensor.shape) > 2:
        raise CheckpointError(f"{file.path} holds no float32 matrix {name}; collect it again with `penstock imatrix`.")
    values = decode_to_float32("f32", tensor.data).reshape(-1, tensor.shape[-1])
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise CheckpointError(f"{file.path}: {name} holds negative or infinite values; collect it again.")
    return values


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Reads a file written by `penstock imatrix` or by llama-imatrix in its GGUF layout.

    Raises:
        CheckpointError: it is no such file, or damaged.
    """
    file = read_gguf_file(path)
    if file.metadata.get("general.type") != "imatrix":
        raise CheckpointError(f"{path} is no importance matrix; collect one with `penstock imatrix`.")
    entries: dict[str, Entry] = {}
    for name in file.tensors:
        if name.endswith(_SUMS):
            weight = name.removesuffix(_SUMS)
            sums, counts = _array(file, name), _array(file, weight + _COUNTS).reshape(-1)
            if len(sums) != len(counts):
                raise CheckpointError(
                    f"{path}: {name} has {len(sums)} rows and {len(counts)} counts; collect it again."
                )
            entries[weight] = Entry(sums, counts)
    if not entries:
        raise CheckpointError(f"{path} holds no entries; collect it again with `penstock imatrix`.")
    datasets = file.metadata.get("imatrix.datasets", [])
    chunks, size = file.metadata.get("imatrix.chunk_count", 0), file.metadata.get("imatrix.chunk_size", 0)
    return ImportanceMatrix(path, entries, tuple(map(str, datasets)), int(chunks), int(size))


def write_imatrix(matrix: ImportanceMatrix) -> int:
    """Writes `matrix` to its path; returns the file's size.

    Raises:
        ConfigError: the file cannot be written.
    """
    tensors: list[TensorToWrite] = []
    for name, entry in sorted(matrix.entries.items()):
        for suffix, values in ((_SUMS, entry.sums), (_COUNTS, entry.counts.reshape(-1, 1))):
            data: Bytes = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
            shape = (values.shape[0], values.shape[1])
            tensors.append(TensorToWrite(name + suffix, shape, "f32", lambda data=data: iter((data,))))  # type: ignore[misc]
    metadata: dict[str, Value] = {
        "general.type": "imatrix",
        "imatrix.datasets": list(matrix.datasets),
        "imatrix.chunk_count": matrix.chunks,
        "imatrix.chunk_size": matrix.chunk_size,
    }
    return write_gguf(matrix.path, metadata, tensors)
