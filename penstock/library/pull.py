"""Brings a model here by its name, from wherever the name says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from penstock.config.errors import CheckpointError, ConfigError
from penstock.config.resolve import ModelFacts
from penstock.library import address, hub, registry
from penstock.library.hub_cache import INDEX, is_adapter, is_whole, quantisation, selected
from penstock.library.names import HubName, PathName, RegistryName, UrlName, parse_name
from penstock.library.outlook import Announced, Outlook, check_architecture, folder_facts
from penstock.library.store import Store
from penstock.library.web import Web, open_web
from penstock.library.wish import Wish


def pull(store: Store, text: str, wish: Wish) -> str:
    """Brings a model; gives the name that finds it.

    Raises:
        ConfigError: no such model, offline, no room, or it cannot run here.
        CheckpointError: what came is damaged, or of a kind that is not read.
        WebError: a server refuses.
    """
    name = parse_name(text, store.places.registry)
    if isinstance(name, PathName):
        if not name.path.exists():
            raise ConfigError(f"there is nothing at {name}.")
        wish.say(f"{name} is a path, which is used as it is; `penstock import {name} NAME` gives it a name.")
        return str(name.path)
    if store.places.offline:
        raise ConfigError(f"HF_HUB_OFFLINE is set, so {name} is not loaded; unset it, or name a model that is here.")
    with open_web() as web:
        if isinstance(name, HubName):
            return _from_hub(store, web, name, wish)
        if isinstance(name, UrlName):
            return _from_address(store, web, name, wish)
        return _from_registry(store, web, name, wish)


def _from_hub(store: Store, web: Web, name: HubName, wish: Wish) -> str:
    with store.loading():
        way, repository = hub.Hub(web, store.places), hub.describe(store.places, name)
        index = way.read_json(repository, INDEX) if not name.selector else None
        choice = hub.choose(repository, index)
        if choice.name.selector:
            _check_gguf(way, choice, wish)
        elif is_adapter(repository.files):
            wish.say(f"{name} is an adapter: serve its model with --lora-modules NAME={name}.")
        elif wish.judge is not None:
            config = way.read_json(repository, "config.json") or {}
            check_architecture(config, str(name), has_fallback=find_spec("transformers") is not None)
            facts = folder_facts(config, str(name), choice.weight_bytes)
            wish.check(Outlook(str(choice.name), choice.size, facts, {}))
        if choice.name != name:
            wish.say(f"{name}: {choice.name.selector} of {_listed(repository)}.")
        way.load(repository, choice.files, wish.manner_for(choice.size))
    return str(choice.name)


def _listed(repository: hub.Repository) -> str:
    quants = {quantisation(shards[0]) or shards[0] for shards in selected(list(repository.files), "")}
    return ", ".join(sorted(quants))


def _check_gguf(way: hub.Hub, choice: hub.Choice, wish: Wish) -> None:
    """Reads the header of a GGUF file, and asks whether it can run here; else which of the others can."""
    repository, first = choice.repository, choice.files[0]
    manner, target = way.manner(repository, wish.manner_for(choice.size)), way.blob(repository, first)
    file = Announced(str(choice.name), way.source(repository, first), target, manner, choice.weight_bytes)
    wish.check_gguf(way.web, file, choice.size, partial(_others, choice))


def _others(choice: hub.Choice, facts: ModelFacts) -> Mapping[str, ModelFacts]:
    """The other quantisations of the same model, the largest first, with their weights' bytes."""
    files = choice.repository.files
    found: dict[str, ModelFacts] = {}
    for shards in selected(list(files), ""):
        size = sum(files[shard].size for shard in shards)
        quant = quantisation(shards[0])
        if quant and is_whole(shards) and size < facts.file_bytes:
            found[str(replace(choice.name, selector=quant))] = replace(facts, file_bytes=size)
    return dict(sorted(found.items(), key=lambda item: -item[1].file_bytes))


def _from_registry(store: Store, web: Web, name: RegistryName, wish: Wish) -> str:
    login = registry.docker_login(name.host, store.places.docker)
    way = registry.Registry(web, name, wish.insecure, login)
    manifest = way.manifest()
    models = manifest.of("model")
    if not models and not manifest.of("file"):
        kinds = ", ".join(sorted({part.kind for part in manifest.layers})) or "none"
        raise CheckpointError(f"{name} has no weights in GGUF or safetensors; its layers are: {kinds[:200]}.")
    if models and models[0].digest not in store.blobs(manifest):
        manner = replace(wish.manner_for(manifest.size), partials=store.root / "partial")
        target = store.root / "blobs" / models[0].digest.file_name
        file = Announced(str(name), way.source(models[0]), target, manner, models[0].size)
        with store.loading():
            wish.check_gguf(web, file, manifest.size)
    registry.pull(store, way, manifest, wish.manner_for(manifest.size))
    return str(name)


def _from_address(store: Store, web: Web, name: UrlName, wish: Wish) -> str:
    given = address.name_of(name)
    address.pull(store, web, name, given, wish)
    return str(given)
