"""Packed weights kept in a file, so that the next start maps them instead of reading and packing the checkpoint.

Layout: one page of 4,096 bytes with an eight-byte magic, the offset and length of the index, and its SHA-256; the data
of the matrices, each on a page of its own; the index (JSON). A file is written under a name of its own, locked, and
renamed when complete; what writers that died left is removed by the next one.

The data's CRC-32 are checked before a file is mapped (0.7 s a GB), unless it is known to be as it was when it was last
written or checked. A small file beside it, `.checked`, says so: the run of the system, and the file's number, size and
times of change, of which the system sets the last at every write, and nobody else can. Its own time
of change tells when a start last used the file.

Whoever maps a file has a shared lock on it as long as the map lives, who writes one has it alone: `weights.kept_files`
removes no file that is locked.

Deleting or replacing a file is always safe, also while it is mapped. Cutting or overwriting it in place is not: the
system ends a process with SIGBUS that reads a mapped page which is no longer there. Its size is checked when it is
opened; nothing but a copy of the weights could guard against what comes later.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import logging
import mmap
import os
import re
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from penstock.config.arithmetic import ARITHMETIC_VERSION
from penstock.kernels.cpu.packed import Packed

if TYPE_CHECKING:
    from penstock.layers.weight import Weight

log = logging.getLogger(__name__)

MAGIC = b"PNSTPK04"
PAGE = 4096
_HEAD = struct.Struct("<8sQQ32s")
_TRIES, _PAUSE_S = 20, 0.005
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PackCacheError(Exception):
    """A cache file cannot be used; the message is a clause that says why."""


def file_name(model: Path, name: str) -> str:
    """One name for each place a model lies at, so that a changed model replaces its old file."""
    place = hashlib.sha256(str(model.resolve()).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:80]}-{place[:16]}.packed"


def fingerprint(model: Path, packing: str) -> str:
    """What packed weights depend on: the files of a checkpoint (name, size, time of change), how they are packed and
    for which arithmetic.
    """
    files = sorted(model.iterdir()) if model.is_dir() else parts_of(model)
    facts: list[object] = [ARITHMETIC_VERSION, packing, str(model.resolve())]
    for file in files:
        if file.suffix in (".safetensors", ".gguf", ".json"):
            stat = file.stat()
            facts.append((file.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def parts_of(file: Path) -> list[Path]:
    """The files of a model in one file, or split over several, and what lies beside it (`gguf_companions`)."""
    overlay = file.with_suffix(".overlay.json")
    pattern = re.sub(r"-\d{5}-of-(\d{5})\.", r"-[0-9][0-9][0-9][0-9][0-9]-of-\1.", glob.escape(file.name))
    return [*sorted(file.parent.glob(pattern)), *([overlay] if overlay.exists() else [])]


def _most_maps() -> int:
    """Maps a writer may make: half the files this process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit // 2


def _boot_id() -> str:
    """Names this run of the system; "" where it has no name."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def _marker(path: Path) -> Path:
    """Where it is written which state of a file is known to be good."""
    return path.with_name(f"{path.name}.checked")


def _state(file: os.stat_result) -> str:
    """What changes whenever a file does."""
    return json.dumps([_boot_id(), file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns])


def _mark(path: Path, file: os.stat_result) -> None:
    """Notes that a file in this state is good; where that cannot be written, it is checked at every start."""
    with suppress(OSError):
        _marker(path).write_text(_state(file), encoding="ascii")


def _is_marked(path: Path, file: os.stat_result) -> bool:
    try:
        return bool(_boot_id()) and _marker(path).read_text(encoding="ascii") == _state(file)
    except (OSError, UnicodeError):
        return False


def _share(file: BinaryIO) -> None:
    """Locks a file for readers; a map of it, which has the same description of the file, keeps the lock."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # somebody looks whether it is in use, which takes a moment, or removes it
            time.sleep(_PAUSE_S)
        except OSError:  # a file system without locks
            return


def _mapped(path: Path) -> tuple[mmap.mmap, os.stat_result]:
    """A file's data, locked as long as they are mapped, and what is known of the file they are in."""
    try:
        with path.open("rb") as file:
            _share(file)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), os.fstat(file.fileno())
    except (OSError, ValueError) as error:
        reason = "there is none yet" if isinstance(error, FileNotFoundError) else f"it cannot be read ({error})"
        raise PackCacheError(reason) from error


def _index(data: mmap.mmap) -> Mapping[str, Any]:
    """A whole file's index."""
    if len(data) < PAGE:
        raise PackCacheError(f"it is truncated to {len(data)} bytes")
    magic, offset, length, digest = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise PackCacheError("it is of another version")
    if offset + length != len(data):
        raise PackCacheError(f"it has {len(data)} bytes of {offset + length}")
    text = data[offset:]
    if hashlib.sha256(text).digest() != digest:
        raise PackCacheError("its index is damaged")
    index: Mapping[str, Any] = json.loads(text)
    return index


def damage(path: Path) -> str | None:
    """Why a file will be left and written anew, a clause; None if nothing but its data would have to be looked at."""
    try:
        _index(_mapped(path)[0])
    except PackCacheError as reason:
        return str(reason)
    return None


def model_of(path: Path) -> str:
    """Where the model lies of which a file is; "" where that cannot be read."""
    try:
        return str(_index(_mapped(path)[0]).get("model", ""))
    except PackCacheError:
        return ""


class PackCache:
    """An opened cache file."""

    def __init__(self, path: Path, identity: str) -> None:
        """Maps the file.

        Raises:
            PackCacheError: it is not there, of another checkpoint or packing, truncated or damaged.
        """
        self._map, state = _mapped(path)
        self.path = path
        self.entries = self._read_index(identity, state)
        self._array = np.frombuffer(self._map, np.uint8)

    def _read_index(self, identity: str, state: os.stat_result) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        index = _index(self._map)
        if index["identity"] != identity:
            raise PackCacheError("the model's files, or how they are packed, have changed since it was written")
        weights: Mapping[str, Sequence[Mapping[str, Any]]] = index["weights"]
        if not _is_marked(self.path, state):
            self._check_data(weights)
            _mark(self.path, state)
        with suppress(OSError):
            os.utime(_marker(self.path))
        return weights

    def _check_data(self, weights: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        with memoryview(self._map) as view:
            for key, parts in weights.items():
                for part in parts:
                    if zlib.crc32(view[part["offset"] : part["offset"] + part["nbytes"]]) != part["crc32"]:
                        raise PackCacheError(f"the data of {key} are damaged")

    def data(self, key: str) -> memoryview:
        """The data of a weight's only matrix, or of what else was put there, in the mapped file.

        Raises:
            PackCacheError: it is not there.
        """
        parts = self.entries.get(key)
        if not parts:
            raise PackCacheError(f"it lacks {key}")
        offset, nbytes = parts[0]["offset"], parts[0]["nbytes"]
        return memoryview(self._map)[offset : offset + nbytes]

    def get(self, key: str) -> Packed | None:
        """A packed weight, whose matrices lie in the mapped file; None if it is not there.

        Raises:
            ValueError: a header is of another version.
        """
        parts = self.entries.get(key)
        if parts is None:
            return None
        base = self._array.ctypes.data
        return Packed.of_memory((bytes.fromhex(p["header"]), base + p["offset"], self._array) for p in parts)


class PackWriter:
    """Writes a cache file, matrix by matrix; it appears under its name when `finish` is called."""

    def __init__(self, path: Path, identity: str, model: str = "") -> None:
        """Begins a file, and removes those of `path` that others began and did not live to finish.

        `model` tells people where the model lies.

        Raises:
            OSError: the folder cannot be made or written to.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
            with suppress(OSError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
                left.unlink()
        self._path = path
        self._identity = identity
        self._model = model
        self._data = self._create()
        self._weights: dict[str, list[dict[str, Any]]] = {}
        self._maps = 0  # each of which has a file descriptor
        self._data.seek(PAGE)

    def _create(self) -> BinaryIO:
        """A new, locked file; another writer may take one for a dead writer's until it is locked, and remove it."""
        while True:
            number, name = tempfile.mkstemp(prefix=f"{self._path.name}.", suffix=".partial", dir=self._path.parent)
            self._partial = Path(name)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(number, fcntl.LOCK_EX)
            if os.fstat(number).st_nlink:
                return os.fdopen(number, "wb")
            os.close(number)

    def put(self, key: str, matrices: Sequence[tuple[bytes, memoryview]]) -> None:
        """Appends the (header, data) of a weight's matrices.

        Raises:
            OSError: the disk is full.
        """
        self._weights[key] = []
        for header, data in matrices:
            offset = -(-self._data.tell() // PAGE) * PAGE
            self._data.seek(offset)
            self._data.write(data)
            entry = {"header": header.hex(), "offset": offset, "nbytes": data.nbytes, "crc32": zlib.crc32(data)}
            self._weights[key].append(entry)
        self._data.flush()

    def mapped(self, key: str) -> Packed | None:
        """A weight that was put, in the file's memory instead of its own; None where the system cannot map it.

        It stays there whatever becomes of the file's name.
        """
        parts = self._weights[key]
        if not all(part["nbytes"] for part in parts) or PAGE % mmap.ALLOCATIONGRANULARITY or self._maps >= _most_maps():
            return None
        first, last = parts[0], parts[-1]
        size = last["offset"] + last["nbytes"] - first["offset"]
        try:
            data = mmap.mmap(self._data.fileno(), size, access=mmap.ACCESS_READ, offset=first["offset"])
        except OSError:
            return None
        self._maps += 1
        memory = np.frombuffer(data, np.uint8)
        base = memory.ctypes.data - first["offset"]
        return Packed.of_memory((bytes.fromhex(part["header"]), base + part["offset"], memory) for part in parts)

    def finish(self) -> None:
        """Adds the index and gives the file its name.

        Raises:
            OSError: the disk is full, or the file system does not let it.
        """
        offset = self._data.tell()
        text = json.dumps({"identity": self._identity, "model": self._model, "weights": self._weights}).encode()
        self._data.write(text)
        self._data.seek(0)
        self._data.write(_HEAD.pack(MAGIC, offset, len(text), hashlib.sha256(text).digest()))
        self._data.flush()
        _share(self._data)  # its maps are readers' from now on
        os.replace(self._partial, self._path)
        _mark(self._path, os.fstat(self._data.fileno()))
        self._data.close()

    def discard(self) -> None:
        """Forgets what was written; does nothing after `finish`."""
        self._partial.unlink(missing_ok=True)
        with suppress(OSError):  # what is left in its buffer does not fit either
            self._data.close()


class PackedFile:
    """The packed weights of one model from one start to the next: read where they are there, else written.

    Attributes:
        describe: what was done and why, for people.
        name: of every weight there, which is asked for in the order of the model's packed weights.
    """

    def __init__(self, path: Path, identity: str, model: str = "") -> None:
        self._path, self._identity = path, identity
        self._model = model
        self.name = WeightNames()
        self._reader: PackCache | None = None
        self._writer: PackWriter | None = None
        self._written: list[Weight] = []
        try:
            self._reader = PackCache(path, identity)
            self.describe = f"mapped from {path}"
        except PackCacheError as reason:
            self.describe = f"packed and written to {path}: {reason}"
            self._begin()

    def restore(self, weight: Weight) -> bool:
        """Fills a weight from the file, if it is there."""
        name = self.name(weight)
        if self._reader is None:
            return False
        try:
            weight.tensor = self._reader.get(name)
        except ValueError as error:
            self._stop_reading(f"its packing is of another version ({error})")
        else:
            if weight.tensor is None:
                self._stop_reading("it lacks a weight of this model")
        return weight.tensor is not None

    def keep(self, weight: Weight) -> None:
        """Takes a weight that has just been packed, and lets it lie in the file: memory need not hold it twice."""
        if self._writer is None or not isinstance(weight.tensor, Packed):
            return
        name = self.name(weight)
        try:
            self._writer.put(name, weight.tensor.matrices())
            weight.tensor = self._writer.mapped(name) or weight.tensor
            self._written.append(weight)
        except OSError as error:
            self._fail(error)

    def finish(self) -> None:
        """Completes a file that was written and maps it, so that memory holds one copy."""
        if self._writer is None:
            return
        try:
            self._writer.finish()
            reader = PackCache(self._path, self._identity)
            for weight in self._written:
                weight.tensor = reader.get(self.name(weight))
        except OSError as error:
            self._fail(error)
        except PackCacheError as error:
            self.describe = f"packed; {self._path} was written, but {error}"
        self._written.clear()

    def _begin(self) -> None:
        try:
            self._writer = PackWriter(self._path, self._identity, self._model)
        except OSError as error:
            self._fail(error)

    def _stop_reading(self, why: str) -> None:
        """The rest is packed, and not written: weights that were restored lie in the old file."""
        self._reader = None
        self.describe = f"packed: {self._path} was left because {why}; delete it to have it written anew"
        log.warning("weights are %s", self.describe)

    def _fail(self, error: OSError) -> None:
        if self._writer is not None:
            self._writer.discard()
        self._writer = None
        self.describe = f"packed, and not kept: {self._path} cannot be written ({error.strerror or error})"
        log.warning("weights are %s", self.describe)


class WeightNames:
    """Names of weights: their first tensor's, and a number where several are made of that one."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[Weight, str]] = {}
        self._counts: dict[str, int] = {}

    def __call__(self, weight: Weight) -> str:
        """A weight's name, the same whenever it is asked for; others get theirs in the order of first calls."""
        if id(weight) not in self._named:
            key = weight.parts[0].key
            count = self._counts[key] = self._counts.get(key, 0) + 1
            self._named[id(weight)] = weight, key if count == 1 else f"{key} #{count}"
        return self._named[id(weight)][1]
