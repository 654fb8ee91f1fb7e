"""Tensors that clients send as `torch.save` writes them, read without torch, and without running what a pickle says.

The format (torch/serialization.py; its archive is a ZIP file without compression): `data.pkl` says how the tensor is
put together, `data/0` holds its values. The pickle is taken apart by the few opcodes that such a tensor takes: objects
it names are compared with a list, none is looked up, and whatever else it says is refused.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from types import MappingProxyType
from typing import Any, Final

import numpy as np

_PIECE: Final = 1 << 18  # bytes
MOST_ENTRIES: Final = 64  # files of an archive; torch writes seven
MOST_DIRECTORY: Final = 16 << 10  # bytes of their list
MOST_PICKLE: Final = 16 << 10  # bytes; one tensor takes 200
# The last records of a ZIP file (APPNOTE.TXT 4.3.14 to 4.3.16): counts for large files, where these lie, and the end.
_LARGE = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_BROKEN = (zipfile.BadZipFile, RuntimeError, EOFError, OSError, struct.error, OverflowError)
_STORAGES: Final = MappingProxyType(
    {"torch FloatStorage": "float32", "torch BFloat16Storage": "bfloat16", "torch HalfStorage": "float16"}
)
_TENSOR: Final = "torch._utils _rebuild_tensor_v2"
_PARAMETER: Final = "torch._utils _rebuild_parameter"
_DICT: Final = "collections OrderedDict"
_ITEM: Final = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


class ArchiveError(Exception):
    """What is wrong with an archive, a clause that goes on from "it"."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense tensor of floats.

    Attributes:
        dtype: "float32", "bfloat16" or "float16".
        shape: its sizes.
        data: its values in order, little endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class _Named:
    """What a pickle would import, "module name"."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """Where values lie: the archive's file of this key."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _View:
    """How a tensor lies in its storage, in values."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_tensor(data: bytes) -> Tensor:
    """The one tensor of an archive. Takes time by its length, and no more memory than twice that.

    Raises:
        ArchiveError: it is none, or holds something else.
    """
    files = _files(data)
    roots = [name.removesuffix("data.pkl") for name in files if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise ArchiveError("has no data.pkl, by which torch.save says what it holds")
    if files.get(f"{roots[0]}byteorder", b"little") != b"little":
        raise ArchiveError("was written on a machine of another byte order")
    view = _Pickle(files[f"{roots[0]}data.pkl"]).tensor()
    stored = files.get(f"{roots[0]}data/{view.storage.key}")
    size = _ITEM[view.storage.dtype]
    if stored is None or len(stored) != view.storage.count * size:
        raise ArchiveError(f"says that it has {view.storage.count} values, and has others")
    return Tensor(view.storage.dtype, view.shape, _values(view, stored, size))


def _values(view: _View, stored: bytes, size: int) -> bytes:
    """A tensor's values in order."""
    count = 1
    for length in view.shape:
        count *= length
    if count == 0:
        return b""
    last = view.offset + sum((length - 1) * step for length, step in zip(view.shape, view.strides, strict=True))
    if count > view.storage.count or last >= view.storage.count:
        raise ArchiveError(
            f"is a tensor of {count} values over a storage of {view.storage.count}; send a .contiguous()"
        )
    flat = np.frombuffer(stored, f"<u{size}")
    if count == view.storage.count and view.strides == _rows_first(view.shape):
        return stored
    strides = [step * size for step in view.strides]
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, strides, writeable=False).tobytes()


def _rows_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose values lie in order."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _files(data: bytes) -> dict[str, bytes]:
    """The files of an archive. How many there are, and that they are as large as they say, is looked at first."""
    if data[:4] != b"PK\x03\x04":
        raise ArchiveError("is no archive of torch.save (torch 1.6 and later write one)")
    entries, directory = _counted(data)
    if entries > MOST_ENTRIES or directory > MOST_DIRECTORY:
        raise ArchiveError(f"has {entries} files; a tensor has at most {MOST_ENTRIES}")
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            listed = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in listed):
                raise ArchiveError("is compressed, which torch.save does not do")
            if sum(entry.file_size for entry in listed) > len(data):
                raise ArchiveError("has files that lie in each other")
            return {entry.filename: _read(archive, entry) for entry in listed}
    except (*_BROKEN, ValueError) as error:
        raise ArchiveError(f"is damaged: {error}") from error


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """A file of an archive, piece by piece: an event loop waits for the interpreter's lock meanwhile."""
    whole = BytesIO()
    with archive.open(entry) as file:
        while piece := file.read(_PIECE):
            whole.write(piece)
    return whole.getvalue()


def _counted(data: bytes) -> tuple[int, int]:
    """How many files an archive lists, and bytes of the list: where a reader takes them from."""
    try:
        end = _END.unpack(data[-_END.size :])
        counts, well = (end[4], end[5]), end[0] == b"PK\x05\x06" and end[7] == 0  # without a comment
        before = data[-_END.size - _LOCATOR.size - _LARGE.size : -_END.size]
        if before[_LARGE.size :][:4] == b"PK\x06\x07":
            large = _LARGE.unpack(before[: _LARGE.size])
            counts, well = (large[7], large[8]), well and large[0] == b"PK\x06\x06"
    except struct.error:
        well = False
    if not well:
        raise ArchiveError("does not end as an archive of torch.save does")
    return counts


class _Pickle:
    """Takes a pickle of one tensor apart; all else is refused."""

    def __init__(self, data: bytes) -> None:
        if len(data) > MOST_PICKLE:
            raise ArchiveError(f"says in {len(data)} bytes what it holds; a tensor takes at most {MOST_PICKLE}")
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def tensor(self) -> _View:
        """What the pickle makes."""
        if b"sparse" in self._data:
            raise ArchiveError("is a sparse tensor; send a dense one (.to_dense())")
        try:
            while (code := self._bytes(1)) != b".":
                step = _OPCODES.get(code)
                if step is None:
                    raise ArchiveError("holds something else than one tensor; send torch.save of a tensor alone")
                step(self)
            found = self._stack.pop()
        except (IndexError, KeyError, ValueError, TypeError, struct.error, RecursionError) as error:
            raise ArchiveError("says in no pickle what it holds") from error
        if not isinstance(found, _View):
            raise ArchiveError("holds something else than one tensor; send torch.save of a tensor alone")
        return found

    def _bytes(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise IndexError
        self._at += count
        return self._data[self._at - count : self._at]

    def _pass(self, count: int) -> None:
        self._at += count

    def _number(self, form: str) -> int:
        found: int = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return found

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._bytes(end + 1 - self._at)[:-1].decode()

    def _long(self) -> int:
        return int.from_bytes(self._bytes(min(self._number("<B"), 8)), "little", signed=True)

    def _keep(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _tuple(self, count: int) -> None:
        begin = len(self._stack) - count
        if begin < 0:
            raise IndexError
        self._stack[begin:] = [tuple(self._stack[begin:])]

    def _marked(self) -> None:
        self._tuple(len(self._stack) - self._marks.pop())

    def _join(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push(_Named(f"{module} {name}"))

    def _storage(self) -> None:
        """What a persistent id stands for: ("storage", type, key, device, values)."""
        kind, named, key, _, count = self._stack.pop()
        name = named.name if isinstance(named, _Named) else ""
        if kind != "storage" or not isinstance(key, str):
            raise ValueError
        if name not in _STORAGES:
            told = name.removeprefix("torch ").removesuffix("Storage") or "unknown values"
            raise ArchiveError(f"is a tensor of type {told[:64]}; allowed are float32, bfloat16 and float16")
        self._push(_Storage(_STORAGES[name], key, _size(count)))

    def _reduce(self) -> None:
        arguments, made = self._stack.pop(), self._stack.pop()
        name = made.name if isinstance(made, _Named) else ""
        if name == _DICT and arguments == ():
            self._push(())
        elif name == _PARAMETER and isinstance(arguments[0], _View):
            self._push(arguments[0])
        elif name == _TENSOR and isinstance(arguments[0], _Storage):
            shape, strides = (tuple(map(_size, sizes)) for sizes in arguments[2:4])
            if len(shape) != len(strides) or not 1 <= len(shape) <= 8:
                raise ValueError
            self._push(_View(arguments[0], _size(arguments[1]), shape, strides))
        else:
            raise ArchiveError("holds something else than one tensor; send torch.save of a tensor alone")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**40:
        raise ValueError
    return value


_OPCODES: Mapping[bytes, Callable[[_Pickle], None]] = MappingProxyType(
    {
        b"\x80": lambda p: p._pass(1),  # PROTO
        b"\x95": lambda p: p._pass(8),  # FRAME
        b"c": lambda p: p._push(_Named(f"{p._line()} {p._line()}")),
        b"\x93": lambda p: p._join(),
        b"q": lambda p: p._keep(p._number("<B")),
        b"r": lambda p: p._keep(p._number("<I")),
        b"\x94": lambda p: p._keep(len(p._memo)),
        b"h": lambda p: p._push(p._memo[p._number("<B")]),
        b"j": lambda p: p._push(p._memo[p._number("<I")]),
        b"(": lambda p: p._marks.append(len(p._stack)),
        b"X": lambda p: p._push(p._bytes(p._number("<I")).decode()),
        b"\x8c": lambda p: p._push(p._bytes(p._number("<B")).decode()),
        b"J": lambda p: p._push(p._number("<i")),
        b"K": lambda p: p._push(p._number("<B")),
        b"M": lambda p: p._push(p._number("<H")),
        b"\x8a": lambda p: p._push(p._long()),
        b"N": lambda p: p._push(None),
        b"\x88": lambda p: p._push(True),
        b"\x89": lambda p: p._push(False),
        b")": lambda p: p._push(()),
        b"\x85": lambda p: p._tuple(1),
        b"\x86": lambda p: p._tuple(2),
        b"\x87": lambda p: p._tuple(3),
        b"t": lambda p: p._marked(),
        b"Q": lambda p: p._storage(),
        b"R": lambda p: p._reduce(),
    }
)
