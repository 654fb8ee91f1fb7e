"""The library, as a server's clients change it: pull, push, create, copy, delete. What is told comes from a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.config.errors import ConfigError, ModelNotFoundError, PenstockError, quoted
from penstock.library.create import create
from penstock.library.make import copy_model
from penstock.library.modelfile import Modelfile
from penstock.library.names import NoSuchModelError, PathName, parse_name, registry_name
from penstock.library.outlook import Outlook
from penstock.library.pull import pull
from penstock.library.push import push
from penstock.library.store import Store, open_store
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

    def create(self, name: str, base: str, texts: Mapping[str, Any], told: Told) -> str:
        """Makes a model of another one of the library; its name.

        Args:
            name: of the new model.
            base: of the other.
            texts: template, system, params, licenses and messages, as `Modelfile` has them.
            told: progress.

        Raises:
            PenstockError: as `library.create.create`.
        """
        target = registry_name(name, self._store.places.registry)
        with _named():
            if self._store.find(base) is None:
                raise self._store.unknown(base)
        create(self._store, target, Modelfile(base, **texts), Path("/nonexistent"), told=told)
        return str(target)

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


def open_shelf() -> Shelf:
    """The library of this machine."""
    return Shelf(open_store())


def _stopped_by(stop: threading.Event, told: Told) -> Told:
    def telling(done: int, total: int) -> None:
        if stop.is_set():
            raise GivenUpError("the client has left; what came is kept.")
        told(done, total)

    return telling


def _judge(outlook: Outlook) -> str | None:
    return refusal(outlook).why
