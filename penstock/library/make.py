"""Models that are made here: from files of this machine, or from another model."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.config.errors import CheckpointError, ConfigError
from penstock.library.digests import Digest, digest_of_file
from penstock.library.files import check_room
from penstock.library.hub import SMALL_FILES
from penstock.library.manifest import CONFIG, TITLE, Layer, Manifest, layer, make_manifest
from penstock.library.names import RegistryName, parse_name, registry_name
from penstock.library.store import Store
from penstock.weights.open import open_checkpoint
from penstock.weights.readers.gguf import shard_paths

Told = Callable[[int, int], None]


def copy_model(store: Store, source: str, target: str) -> RegistryName:
    """Gives a model of the library a second name.

    Raises:
        ConfigError: there is no such model, or the new name is none.
    """
    name = registry_name(target, store.places.registry)
    parsed = parse_name(source, store.places.registry)
    with store.loading():
        if isinstance(parsed, RegistryName) and store.manifest(parsed) is not None:
            store.copy(parsed, name)
            return name
        entry = store.find(source)
        if entry is None:
            raise store.unknown(source)
        return add_path(store, entry.path, name)


def add_path(store: Store, path: Path, name: RegistryName, told: Told = lambda done, total: None) -> RegistryName:
    """Makes a folder or file of this machine a model of the store; its bytes are linked where that is possible.

    Raises:
        CheckpointError: it is no model Penstock reads; ConfigError: it cannot be written.
    """
    with store.loading():
        store.put(name, manifest_of(store, path, told))
    return name


def manifest_of(store: Store, path: Path, told: Told = lambda done, total: None) -> Manifest:
    """The manifest of a folder or file, whose bytes become blobs of the store.

    Raises:
        CheckpointError: it is no model Penstock reads; ConfigError: it cannot be written.
    """
    checkpoint = open_checkpoint(path)
    opened = checkpoint.path
    files = [(file.name, file) for file in shard_paths(opened)] if opened.is_file() else _files(opened)
    total = sum(file.stat().st_size for _, file in files)
    done = 0
    layers: list[Layer] = []

    def read(count: int) -> None:
        nonlocal done
        done += count
        told(done, total)

    for title, file in files:
        size = file.stat().st_size
        digest = _known_digest(file)
        if digest is None:
            digest = digest_of_file(file, read)
        else:
            read(size)
        if not store.blob(digest).is_file() and file.stat().st_dev != _device(store.root):
            check_room(store.root, size, title)
        store.take(file, digest)
        single = opened.is_file() and len(files) == 1
        layers.append(layer("model", digest, size) if single else layer("file", digest, size, **{TITLE: title}))
    family = str(checkpoint.config.get("model_type") or "")
    config: dict[str, Any] = {"model_format": "gguf" if opened.is_file() else "safetensors", "model_family": family}
    return make_manifest(store.add(json.dumps(config | {"model_families": [family]}).encode(), CONFIG), layers)


def _files(folder: Path) -> Sequence[tuple[str, Path]]:
    """What a Hugging Face folder needs to be run, by the names of the hub."""
    found = []
    for path in sorted(folder.rglob("*")):
        title = path.relative_to(folder).as_posix()
        wanted = any(fnmatch.fnmatchcase(title, form) and title.count("/") == form.count("/") for form in SMALL_FILES)
        if path.is_file() and (wanted or (path.suffix == ".safetensors" and "/" not in title)):
            found.append((title, path))
    if not any(title == "config.json" for title, _ in found):
        raise CheckpointError(f"{folder} has no config.json; it is no model.")
    return found


def _known_digest(file: Path) -> Digest | None:
    """The digest of a blob of a cache, which is named by it."""
    blob = file.resolve()
    match = re.fullmatch(r"(?:sha256-)?([0-9a-f]{64})", blob.name) if blob.parent.name == "blobs" else None
    return Digest("sha256", match[1]) if match else None


def _device(folder: Path) -> int:
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is None:
        raise ConfigError(f"{folder} cannot be made.")
    return there.stat().st_dev
