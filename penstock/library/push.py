"""Sends a model of the store to a registry."""

from __future__ import annotations

from penstock.config.errors import ConfigError
from penstock.library import registry
from penstock.library.names import RegistryName, parse_name
from penstock.library.store import Store
from penstock.library.web import open_web
from penstock.library.wish import Wish


def push(store: Store, text: str, wish: Wish) -> None:
    """Sends what the registry of a name lacks of its model.

    Raises:
        ConfigError: there is no such model, its name is of no registry, or nothing is to be sent (offline).
        WebError: the registry refuses. CheckpointError: a part is missing here.
    """
    name = parse_name(text, store.places.registry)
    if not isinstance(name, RegistryName):
        raise ConfigError(
            f"{text} is pushed under a registry's name: penstock cp {text} HOST/SPACE/NAME:TAG, then that."
        )
    found = store.manifest(name)
    if found is None:
        raise store.unknown(text)
    if store.places.offline:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing is sent; unset it.")
    with open_web() as web:
        way = registry.Registry(web, name, wish.insecure, registry.docker_login(name.host, store.places.docker))
        registry.push(store, way, found[0], wish.manner_for(found[0].size))
