"""Files that clients send to make models of: each under its digest, beside the blobs until a model needs it."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.config.errors import CheckpointError, ConfigError
from penstock.library.digests import Digest
from penstock.library.files import check_room, disk_error, inside, remove_file
from penstock.library.store import Store

_LOOK_BYTES: Final = 64 << 20  # between two looks at what is free on the disk
_KEPT_S: Final = 24 * 3600.0  # for which a file waits for its model
_GGUF: Final = b"GGUF"


class Upload:
    """A file that is on its way; it appears under its digest when all its bytes have come."""

    def __init__(self, store: Store, digest: Digest, size: int | None) -> None:
        """Begins one; what others sent and no model was made of is removed after a day.

        Args:
            size: bytes that are announced; None where nobody says.

        Raises:
            ConfigError: the disk has no room for them, or cannot be written to.
        """
        self._store, self._digest = store, digest
        self._hash, self._written = hashlib.sha256(), 0
        folder = store.uploads
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sweep(store, _KEPT_S)
            check_room(folder, max(size or 0, _LOOK_BYTES), "a file of a model")
            number, name = tempfile.mkstemp(prefix="coming-", dir=folder)
        except OSError as error:
            raise disk_error(error, folder) from None
        self._path, self._file = Path(name), os.fdopen(number, "wb")

    def write(self, data: bytes) -> None:
        """Takes the next bytes.

        Raises:
            ConfigError: the disk is full.
        """
        before, self._written = self._written, self._written + len(data)
        try:
            if before // _LOOK_BYTES != self._written // _LOOK_BYTES:
                check_room(self._path.parent, _LOOK_BYTES, "a file of a model")
            self._hash.update(data)
            self._file.write(data)
        except OSError as error:
            raise disk_error(error, self._path) from None

    def finish(self) -> None:
        """Gives the file its name.

        Raises:
            CheckpointError: its bytes have another digest.
            ConfigError: the disk is full.
        """
        found = Digest("sha256", self._hash.hexdigest())
        if found != self._digest:
            raise CheckpointError(f"digest mismatch, expected {self._digest}, got {found}; send the file again.")
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._path.replace(self._store.uploads / self._digest.file_name)
        except OSError as error:
            raise disk_error(error, self._path) from None

    def discard(self) -> None:
        """Forgets what came; does nothing after `finish`."""
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


def there(store: Store, digest: Digest) -> Path | None:
    """Where a file of that digest lies, as a model's blob or as one that was sent; None if it is not here."""
    for path in (store.blob(digest), store.uploads / digest.file_name):
        if path.is_file():
            return path
    return None


def sweep(store: Store, age_s: float) -> int:
    """Removes files that were sent so long ago and of which no model was made; bytes that became free."""
    freed, now = 0, time.time()
    for path in store.uploads.glob("*"):
        with suppress(OSError):
            if now - path.stat().st_mtime >= age_s:
                freed += remove_file(path)
    return freed


@contextmanager
def laid_out(store: Store, files: Mapping[str, Digest]) -> Iterator[Path]:
    """A folder in which files that were sent have their names, or the one .gguf file there; gone afterwards.

    Raises:
        CheckpointError: a name could lie anywhere. ConfigError: a file was not sent, or none is named.
    """
    if not files:
        raise ConfigError("no files are named; send each to /api/blobs/ first, then name it with its digest.")
    with tempfile.TemporaryDirectory(prefix="create-", dir=store.temporary()) as temporary:
        folder = Path(temporary)
        for name, digest in files.items():
            source = there(store, digest)
            if source is None:
                raise ConfigError(f"the file {digest} is not here; send it to /api/blobs/{digest} first.")
            target = inside(folder, _gguf_name(name, source))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
        single = sorted(folder.glob("*.gguf"))
        yield single[0] if single and len(single) == len(files) else folder


def _gguf_name(name: str, source: Path) -> str:
    """A name that says what a file is: clients may send a GGUF file under any."""
    with source.open("rb") as file:
        is_gguf = file.read(len(_GGUF)) == _GGUF
    return f"{name}.gguf" if is_gguf and not name.endswith(".gguf") else name
