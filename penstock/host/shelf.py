"""The library, as a server's clients change it: pull, push, create, copy, delete. What is told comes from a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config.errors import ConfigError, ModelNotFoundError, PenstockError, quoted
from penstock.host.quantizing import quantize_apart
from penstock.library.create import create
from penstock.library.digests import Digest, sha256
from penstock.library.make import copy_model
from penstock.library.modelfile import Modelfile
from penstock.library.names import NoSuchModelError, PathName, parse_name, registry_name
from penstock.library.outlook import Outlook
from penstock.library.pull import pull
from penstock.library.push import push
from penstock.library.store import Store, open_store
from penstock.library.uploads import Upload as Upload
from penstock.library.uploads import laid_out, there
from penstock.library.wish import Wish
from penstock.startup.forecast import refusal

Told = Callable[[int, int], None]
"""(bytes that are there, bytes in all)"""


class GivenUpError(PenstockError):
    """Who asked for a model has left before it had come."""


@contextmanager
def _named() -> Iterator[None]:
    """What a client named and is nowhere is the client's to mend."""
    try:
        yield
    except NoSuchModelError as error:
        raise ModelNotFoundError(str(error), code="model_not_found") from None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a model is made of.

    Attributes:
        base: another model of the library; None for `files`.
        files, adapters: digests of files that were sent, by their names.
        quantize: a format of .gguf files that weights get on the way; None keeps them.
    """

    base: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    quantize: str | None = None


class Shelf:
    """A store's models, for several clients at once; each call works in its caller's thread until it is done.

    `stop`, where it is taken, is set by who waits no longer: what came by then is kept for the next time.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def pull(self, name: str, insecure: bool, told: Told, stop: threading.Event) -> str:
        """Brings a model here; the name that finds it.

        Raises:
            PenstockError: as `library.pull.pull`; GivenUpError.
        """
        if isinstance(parse_name(name, self._store.places.registry), PathName):
            raise ConfigError(f"{quoted(name)} is no model's name but a path, of which clients name none.")
        with _named():
            return pull(self._store, name, Wish(_stopped_by(stop, told), judge=_judge, insecure=insecure))

    def push(self, name: str, insecure: bool, told: Told, stop: threading.Event) -> None:
        """Sends a model to its registry.

        Raises:
            PenstockError: as `library.push.push`; GivenUpError.
        """
        with _named():
            push(self._store, name, Wish(_stopped_by(stop, told), insecure=insecure))

    def create(
        self, name: str, parts: Parts, texts: Mapping[str, Any], told: Told, stop: threading.Event | None = None
    ) -> str:
        """Makes a model of another one of the library, or of files that a client sent; its name.

        Args:
            name: of the new model.
            parts: what it is made of.
            texts: template, system, params, licenses and messages, as `Modelfile` has them.
            told: progress.

        Raises:
            PenstockError: as `library.create.create`, `library.uploads.laid_out` and `host.quantizing.quantize_apart`;
                GivenUpError.
        """
        stop = stop or threading.Event()
        target, told = registry_name(name, self._store.places.registry), _stopped_by(stop, told)
        files, adapters = _digests(parts.files), _digests(parts.adapters)
        with self._store.loading(), ExitStack() as folders:
            if parts.base is not None:
                base = parts.base
                with _named():
                    if self._store.find(base) is None:
                        raise self._store.unknown(base)
            else:
                base = str(folders.enter_context(laid_out(self._store, files)))
            changes = [str(folders.enter_context(laid_out(self._store, adapters)))] if adapters else []

            def smaller(model: Path, output: Path) -> None:
                quantize_apart(model, parts.quantize or "", output, told, partial(_check_wanted, stop))

            made = Modelfile(base, adapters=changes, **texts)
            quantize = smaller if parts.quantize else None
            create(self._store, target, made, Path("/nonexistent"), quantize=quantize, told=told)
        for digest in (*files.values(), *adapters.values()):
            (self._store.uploads / digest.file_name).unlink(missing_ok=True)
        return str(target)

    def has_file(self, digest: str) -> bool:
        """Whether a file of that digest is here: a client need not send it. Raises CheckpointError for no digest."""
        return there(self._store, sha256(digest)) is not None

    def upload(self, digest: str, size: int | None) -> Upload:
        """Begins a file that a client sends. Raises as `library.uploads.Upload`; CheckpointError for no digest."""
        return Upload(self._store, sha256(digest), size)

    def copy(self, source: str, target: str) -> None:
        """Gives a model a second name. Raises PenstockError as `library.make.copy_model`."""
        with _named():
            copy_model(self._store, source, target)

    def remove(self, name: str) -> int:
        """Removes a model; bytes that became free. Raises PenstockError as `Store.remove`."""
        with _named():
            return self._store.remove(name)

    def canonical(self, name: str) -> str | None:
        """The name under which the library lists a model; None if it has none of that name."""
        entry = self._store.find(name)
        return None if entry is None else entry.name


def _digests(files: Mapping[str, str]) -> dict[str, Digest]:
    return {name: sha256(text) for name, text in files.items()}


def open_shelf() -> Shelf:
    """The library of this machine."""
    return Shelf(open_store())


def _stopped_by(stop: threading.Event, told: Told) -> Told:
    def telling(done: int, total: int) -> None:
        _check_wanted(stop)
        told(done, total)

    return telling


def _check_wanted(stop: threading.Event) -> None:
    if stop.is_set():
        raise GivenUpError("the client has left; what came is kept.")


def _judge(outlook: Outlook) -> str | None:
    return refusal(outlook).why
