"""From a model's name to what an engine opens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.errors import ConfigError, quoted
from penstock.config.names import BUNDLED_MODEL
from penstock.config.speculation import speculation
from penstock.library.names import SPELLINGS, Name, NoSuchModelError, PathName, parse_name
from penstock.library.store import Store, open_store


class UnknownModelError(NoSuchModelError):
    """A model that is not here.

    Attributes:
        name: as it was read; None if it cannot be pulled.
    """

    def __init__(self, message: str, name: Name | None = None) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class Found:
    """A model that is here.

    Attributes:
        path: for `EngineOptions.model`.
        name: of the library; None for a path, and for the bundled model, which has its own.
        options: engine options that its maker asked for.
    """

    path: Path
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def is_path(text: str) -> bool:
    """Whether something lies at a path."""
    return os.path.exists(os.path.expanduser(text))


def resolve(name: str) -> Path:
    """The path of a model: of this machine's files where there is one, else of the library.

    Raises:
        ConfigError: there is none; the message tells the nearest ones and what to type.
        CheckpointError: a part of it is missing or damaged.
    """
    return find(name).path


def find(text: str, store: Store | None = None) -> Found:
    """As `resolve`, with what else is known.

    Raises:
        UnknownModelError: there is none. Others as `resolve`.
    """
    if text == BUNDLED_MODEL or is_path(text):
        return Found(Path(text))
    store = store or open_store()
    try:
        name = parse_name(text, store.places.registry)
    except ConfigError as error:
        raise UnknownModelError(_unknown(store, text, str(error))) from None
    entry = store.find(text)
    if entry is not None:
        return Found(entry.path, entry.name, entry.options)
    if isinstance(name, PathName):
        raise UnknownModelError(f"there is no model at {quoted(text, 200)}. A name is {SPELLINGS}, or {BUNDLED_MODEL}.")
    if store.places.offline:
        raise UnknownModelError(_unknown(store, text, "HF_HUB_OFFLINE is set, so none is loaded."))
    raise UnknownModelError(_unknown(store, text, f"To load it: penstock pull {text}"), name)


def with_draft_path(config: str | None, named: Callable[[str], Found] = find) -> str | None:
    """A `--speculative-config` whose draft model, where it has one, is a path.

    Args:
        config: as `config.speculation` reads it.
        named: finds a model by its name.

    Raises:
        ConfigError: it cannot be read, or there is no such model. Others as `resolve`.
    """
    asked = speculation(config)
    if config is None or asked is None or asked.model is None:
        return config
    try:
        found = named(asked.model)
    except UnknownModelError as error:  # the model that was asked for may well be here
        raise ConfigError(f"--speculative-config: {error}") from None
    return json.dumps({**json.loads(config), "model": str(found.path)})


def _unknown(store: Store, text: str, then: str) -> str:
    near = store.nearest(text)
    meant = f" Nearest here: {', '.join(near)}." if near else ""
    return f"there is no model {quoted(text, 200)} here.{meant} {then}"
