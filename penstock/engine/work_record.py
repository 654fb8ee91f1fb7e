"""Which requests an engine process works on, in a file: what is known of a process that was killed within a step."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

_HEAD = struct.Struct("<II")  # length and checksum of what follows


class WorkRecord:
    """Writes the record. A write is the kernel's when it returns: unlike a message it is not lost with the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.note(())

    def note(self, request_ids: Iterable[str]) -> None:
        """These are worked on from now on."""
        body = msgspec.msgpack.encode(list(request_ids))
        try:
            os.pwrite(self._file, _HEAD.pack(len(body), zlib.crc32(body)) + body, 0)
        except OSError:  # no room on disk: what stands there is not true any more
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)

    def close(self) -> None:
        os.close(self._file)


def read_record(path: Path) -> frozenset[str] | None:
    """What was noted last; None where the record is damaged, or could not be written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        length, checksum = _HEAD.unpack_from(data)
        body = data[_HEAD.size : _HEAD.size + length]
        if len(body) != length or zlib.crc32(body) != checksum:
            return None
        return frozenset(msgspec.msgpack.decode(body, type=list[str]))
    except (struct.error, msgspec.MsgspecError):
        return None
