"""What torch.save writes, read without torch; and what only looks like it, refused in counted work."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.server.torch_archive import MOST_PICKLE, ArchiveError, Tensor, read_tensor


def saved(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def as_torch(found: Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(found.data), dtype=getattr(torch, found.dtype)).reshape(found.shape)


def remade(data: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with other files; None leaves one out."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w", method) as after:
        for name in before.namelist():
            content = change(name, before.read(name))
            if content is not None:
                after.writestr(name, content)
    return file.getvalue()


PLAIN = saved(torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_read_as_torch_reads_them(dtype: torch.dtype, protocol: int) -> None:
    values = torch.randn(40, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
    for tensor in (values, values[3:, ::2], values.T, torch.nn.Parameter(values), values[None], values[:0]):
        found = read_tensor(saved(tensor, pickle_protocol=protocol))
        if tensor.numel():
            assert torch.equal(as_torch(found), tensor.data)
        assert found.shape == tuple(tensor.shape)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.eye(3).to_sparse(), "sparse tensor"),
        (torch.eye(3).to_sparse_csr(), "sparse tensor"),
        (torch.ones(2, dtype=torch.int64), "type Long"),
        (torch.ones(2).double(), "type Double"),
        ({"rows": torch.ones(2)}, "something else"),
        ([torch.ones(2), torch.ones(2)], "something else"),
        ("text", "something else"),
        (torch.nn.Linear(2, 2), "something else"),
        (torch.ones(1, 3).expand(1000, 3), "contiguous"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_all_else_is_refused(value: Any, told: str) -> None:
    with pytest.raises(ArchiveError, match=told):
        read_tensor(saved(value))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no archive"),
        (b"PK\x03\x04", "does not end"),
        (saved(torch.ones(2), _use_new_zipfile_serialization=False), "no archive"),
        (PLAIN[:-1], "does not end"),
        (remade(PLAIN, lambda name, data: data, zipfile.ZIP_DEFLATED), "compressed"),
        (remade(PLAIN, lambda name, data: None if name.endswith("pkl") else data), "no data.pkl"),
        (remade(PLAIN, lambda name, data: None if "/data/" in name else data), "says that it has 6 values"),
        (remade(PLAIN, lambda name, data: data[:-4] if "/data/" in name else data), "says that it has 6 values"),
        (remade(PLAIN, lambda name, data: b"big" if "order" in name else data), "another byte order"),
        (remade(PLAIN, lambda name, data: b"(" * MOST_PICKLE * 2 if name.endswith("pkl") else data), "bytes what it"),
        (remade(PLAIN, lambda name, data: b"cos\nsystem\n(X\1\0\0\0atR." if "pkl" in name else data), "something else"),
        (remade(PLAIN, lambda name, data: data.replace(b"K\6t", b"K\7t") if "pkl" in name else data), "has 7 values"),
        (remade(PLAIN, lambda name, data: data.replace(b"K\2K\3\x86", b"K\3K\3\x86")), "9 values over a storage of 6"),
    ],
)
def test_damaged_and_hostile_archives_are_refused(data: bytes, told: str) -> None:
    with pytest.raises(ArchiveError, match=told):
        read_tensor(data)


def test_archives_of_many_files_are_not_listed() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(5000):
            archive.writestr(str(number), b"")
    with pytest.raises(ArchiveError, match="5000 files"):
        read_tensor(file.getvalue())


def test_nothing_but_an_archive_error_comes_of_changed_bytes() -> None:
    """Each byte of its descriptions and lists changed; what is read all the same has the values that are there."""
    draw = np.random.default_rng(7)
    read = 0
    for _ in range(4000):
        data = bytearray(PLAIN)
        for place in draw.integers(0, len(data), draw.integers(1, 5)).tolist():
            data[place] = int(draw.integers(0, 256))
        try:
            found = read_tensor(bytes(data))
        except ArchiveError:
            continue
        read += 1
        assert len(found.data) == {"float32": 4}.get(found.dtype, 2) * int(np.prod(found.shape)) <= 24
    assert 0 < read < 4000


def test_pickles_of_random_opcodes_run_nothing() -> None:
    draw = np.random.default_rng(8)
    codes = [bytes([code]) for code in b"\x80\x95cqr\x94hj(X\x8cJKM\x8aN\x88\x89)\x85\x86\x87tQR\x93.0}]u\x81b"]
    pieces = [*codes, b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"X\1\0\0\0a", b"K\1", b"h\0"]
    pieces += [b"X\7\0\0\0storage", b"cos\nsystem\n", struct.pack("<cI", b"X", 2**31)]
    for _ in range(3000):
        body = b"".join(pieces[index] for index in draw.integers(0, len(pieces), draw.integers(1, 40)).tolist())
        with pytest.raises(ArchiveError):
            read_tensor(remade(PLAIN, lambda name, data, body=body: body if "pkl" in name else data))  # type: ignore[misc]


def test_torch_is_not_imported_and_nothing_is_unpickled() -> None:
    code = """
import sys
from penstock.server.torch_archive import read_tensor
sys.addaudithook(lambda event, arguments: print(event) if event in ("pickle.find_class", "exec", "compile") else None)
print(len(read_tensor(sys.stdin.buffer.read()).data), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], input=PLAIN, capture_output=True, check=True)
    assert done.stdout.split() == [b"24", b"False"]
