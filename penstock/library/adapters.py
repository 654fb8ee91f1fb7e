"""Adapters by name: a path, or one that was pulled."""

from __future__ import annotations

from pathlib import Path

from penstock.config.errors import CheckpointError, ConfigError, quoted
from penstock.library.names import HubName, parse_name
from penstock.library.resolve import is_path
from penstock.library.store import open_store


def adapter_path(text: str) -> str:
    """Where an adapter lies: a path as it is, else what was pulled under that name.

    Raises:
        CheckpointError: a name as the hub has them, of which nothing is here.
    """
    if _there(text):
        return str(Path(text).expanduser())
    store = open_store()
    try:
        name = parse_name(text, store.places.registry)
    except ConfigError:
        return text
    if not isinstance(name, HubName) or text.startswith(("/", ".", "~")):
        return text
    found = store.adapter(name)
    if found is None:
        told = quoted(text, 200)
        raise CheckpointError(
            f"there is no adapter at {told}, nor one of that name here; to load it: penstock pull {text}"
        )
    return str(found.path)


def _there(text: str) -> bool:
    try:
        return is_path(text)
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte: who reads it tells
        return True
