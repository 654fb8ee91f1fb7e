"""Sessions that clients had saved: a file of tokens each, in a folder that only this user may enter.

A file is a magic, the length of a JSON object, that object (which model the tokens are of, and how many they are), the
tokens as 32-bit numbers, and a CRC-32 of all that; numbers are little-endian. It holds no keys and values: those are
found in the cache or its lower tiers, or are computed again, so that a file can bring nothing but a prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.config.errors import ConfigError, RequestError
from penstock.server.errors import HttpError, bad_value

MAGIC: Final = b"PNSTSS01"
MOST_FILES: Final = 1024  # of one owner
_MOST_HEAD: Final = 4096
_COUNT: Final = struct.Struct("<I")
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}(?<!\.)")
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ALLOWED: Final = "letters, digits, '.', '_' and '-', at most 127, with no '.' first or last"


class SlotFiles:
    """The files of a folder; those of an API key lie in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder where it is not there; raises ConfigError where that fails."""
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
        except OSError as error:
            raise ConfigError(f"--slot-save-path {folder} cannot be used: {error.strerror or error}.") from None

    def write(self, owner: str, name: str, facts: Mapping[str, Any], tokens: Sequence[int]) -> int:
        """Keeps tokens under a name, in the place of what was there; returns the bytes of the file.

        Raises:
            RequestError: the name is none, the owner has too many files, or the disk refuses.
        """
        path = self._path(owner, name)
        head = json.dumps({**facts, "tokens": len(tokens)}).encode()
        data = MAGIC + _COUNT.pack(len(head)) + head + struct.pack(f"<{len(tokens)}I", *tokens)
        data += _COUNT.pack(zlib.crc32(data))
        fresh = path.with_name(f".{os.getpid()}.{os.urandom(8).hex()}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if not path.exists() and sum(1 for _ in os.scandir(path.parent)) >= MOST_FILES:
                raise HttpError(
                    507, f"{MOST_FILES} sessions are saved already, the most there may be; use a name again.",
                    param="filename", code="too_many_sessions",
                )  # fmt: skip
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600), "wb") as file:
                file.write(data)
            os.replace(fresh, path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            told = f"The session cannot be saved as {name!r}: {error.strerror or 'the disk refuses'}."
            raise HttpError(507, told, param="filename", code="not_saved") from None
        return len(data)

    def read(self, owner: str, name: str, facts: Mapping[str, Any], most: int) -> tuple[list[int], int]:
        """The tokens under a name, at most so many, of a model with these facts; and the bytes of the file.

        Raises:
            RequestError: there is no such file of this owner, it is of another model or too long, or it is none.
        """
        path = self._path(owner, name)
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | _OPEN), "rb") as file:
                told = os.fstat(file.fileno())
                if not stat.S_ISREG(told.st_mode) or told.st_size > 4 * most + _MOST_HEAD:
                    raise _unreadable(name, f"it is no file of at most {most} tokens, which the context has room for")
                data = file.read(told.st_size)
        except OSError:
            message = f"There is no saved session {name!r} of yours."
            raise HttpError(404, message, param="filename", code="session_not_found") from None
        return _tokens(name, data, facts, most), len(data)

    def _path(self, owner: str, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise bad_value("filename", name, _ALLOWED)
        folder = self._folder / hashlib.sha256(owner.encode()).hexdigest()[:32] if owner else self._folder
        return folder / name


def _tokens(name: str, data: bytes, facts: Mapping[str, Any], most: int) -> list[int]:
    """What a file holds; raises RequestError for any other bytes."""
    body, start = data[:-4], len(MAGIC) + 4
    if not data.startswith(MAGIC) or len(data) < start + 4 or _COUNT.unpack(data[-4:])[0] != zlib.crc32(body):
        raise _unreadable(name, "it is not one, or is damaged")
    length = _COUNT.unpack_from(data, len(MAGIC))[0]
    try:
        head = json.loads(body[start : start + length])
        count = head.pop("tokens")
        tokens = [token for (token,) in _COUNT.iter_unpack(body[start + length :])]
    except (ValueError, RecursionError, AttributeError, KeyError, struct.error):
        raise _unreadable(name, "it is not one, or is damaged") from None
    if head != dict(facts):
        raise _unreadable(name, "it is of another model")
    if count != len(tokens) or count > most or not tokens or max(tokens) >= facts["vocab_size"]:
        raise _unreadable(name, f"it has no tokens that fit into this model's context, which has room for {most}")
    return tokens


def _unreadable(name: str, why: str) -> RequestError:
    return HttpError(400, f"{name!r} cannot be restored: {why}.", param="filename", code="invalid_session")
