"""Importance matrices on disk, and their use."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.config.errors import CheckpointError, ConfigError
from penstock.kernels.cpu import native
from penstock.quant.formats import decode_to_float32
from penstock.weights.imatrix import Entry, ImportanceMatrix, read_imatrix, write_imatrix
from penstock.weights.open import open_checkpoint
from penstock.weights.writers.quantize import quantize_model


def matrix(path: Path, **entries: Entry) -> ImportanceMatrix:
    named = {name.replace("__", "."): entry for name, entry in entries.items()}
    return ImportanceMatrix(path, named, ("text.txt",), 3, 512)


def entry(experts: int, inputs: int) -> Entry:
    rng = np.random.default_rng(experts)
    return Entry(rng.random((experts, inputs), np.float32), np.arange(experts, dtype=np.float32) * 7)


def test_round_trip_and_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    original = matrix(path, a__weight=entry(1, 64), b__weight=entry(4, 96))
    assert write_imatrix(original) == path.stat().st_size
    found = read_imatrix(path)
    assert (found.datasets, found.chunks, found.chunk_size) == (("text.txt",), 3, 512)
    for name, wanted in original.entries.items():
        assert np.array_equal(found.entries[name].sums, wanted.sums)
        assert np.array_equal(found.entries[name].counts, wanted.counts)
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.type"].contents() == "imatrix"
    shapes = {tensor.name: tuple(tensor.shape) for tensor in reader.tensors}
    assert shapes["b.weight.in_sum2"] == (96, 4)
    assert shapes["b.weight.counts"] == (1, 4)


def test_means_by_expert(tmp_path: Path) -> None:
    found = matrix(tmp_path / "i.gguf", e__weight=entry(3, 32), d__weight=entry(1, 32))
    rows = found.rows_of("e.weight", (3, 8, 32))
    assert rows[0] is None  # no token reached it
    assert rows[2] is not None and np.allclose(rows[2], found.entries["e.weight"].sums[2] / 14)
    assert found.rows_of("unknown.weight", (8, 32)) == [None]
    assert len(found.rows_of("d.weight", (3, 8, 32))) == 3
    with pytest.raises(ConfigError, match="collected from another model"):
        found.rows_of("e.weight", (3, 8, 64))


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    with pytest.raises(CheckpointError, match="is not a file"):
        read_imatrix(path)
    quantize_model("penstock-concierge", "q8_0", path)
    with pytest.raises(CheckpointError, match="is no importance matrix; collect one with `penstock imatrix`"):
        read_imatrix(path)
    write_imatrix(matrix(path))
    with pytest.raises(CheckpointError, match="holds no entries"):
        read_imatrix(path)
    bad = Entry(np.full((1, 32), np.nan, np.float32), np.ones(1, np.float32))
    write_imatrix(matrix(path, a__weight=bad))
    with pytest.raises(CheckpointError, match="negative or infinite"):
        read_imatrix(path)


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
def test_quantising_spends_precision_where_it_says(tmp_path: Path) -> None:
    name, hf = "blk.2.ffn_down.weight", "model.layers.2.mlp.down_proj.weight"
    path = tmp_path / "i.gguf"
    strong = np.where(np.arange(1024) % 8 == 0, 100.0, 0.01).astype(np.float32)[None]
    write_imatrix(ImportanceMatrix(path, {name: Entry(strong, np.ones(1, np.float32))}, ("t",), 1, 512))
    errors = []
    original = _values("penstock-concierge", hf)
    for given in (None, path):
        out = tmp_path / f"{given is None}.gguf"
        quantize_model("penstock-concierge", "q2_k", out, imatrix=given)
        difference = (_values(str(out), hf) - original)[:, ::8]
        errors.append(float((difference**2).sum()))
    assert errors[1] < 0.5 * errors[0]
    metadata = open_checkpoint(tmp_path / "False.gguf").metadata
    assert metadata["quantize.imatrix.file"] == "i.gguf"
    assert metadata["quantize.imatrix.entries_count"] == 1


def _values(model: str, name: str) -> np.ndarray:
    stored = open_checkpoint(model).read(name)
    return decode_to_float32(stored.info.format, stored.data).reshape(stored.info.shape)
