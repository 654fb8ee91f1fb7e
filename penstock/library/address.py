"""Pulls a GGUF file from a web server: it becomes a model of the store, named after the file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config.errors import ConfigError
from penstock.library.digests import digest_of, digest_of_file
from penstock.library.manifest import CONFIG, layer, make_manifest
from penstock.library.names import RegistryName, UrlName
from penstock.library.outlook import Announced
from penstock.library.store import Store
from penstock.library.transfer import fetch, probe
from penstock.library.web import Web
from penstock.library.wish import Wish


def name_of(address: UrlName) -> RegistryName:
    """The name that a file gets: its host, then its own name without the ending.

    Raises:
        ConfigError: it is no .gguf file.
    """
    if not address.file.lower().endswith(".gguf"):
        raise ConfigError(f"{address} is no .gguf file; of addresses only these are pulled.")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", address.file):
        raise ConfigError(f"{address} is one file of a split model; pull them by hand into one folder.")
    host = (urlsplit(address.url).netloc or "").lower()
    return RegistryName(address.file[:-5], host=host)


def pull(store: Store, web: Web, address: UrlName, name: RegistryName, wish: Wish) -> None:
    """Loads the file, and gives it its name in the store.

    Raises:
        WebError, CheckpointError, ConfigError: as `transfer.fetch`, or it cannot run here.
    """
    with store.loading():
        source = probe(web, address.url, {})
        place = store.root / "partial" / f"url-{digest_of(address.url.encode()).hex}"
        manner = replace(wish.manner_for(source.size), partials=store.root / "partial")
        place.unlink(missing_ok=True)  # of an earlier time, which may be of another version
        try:
            wish.check_gguf(web, Announced(str(name), source, place, manner, source.size), source.size)
            fetch(web, source, place, manner)
            add_gguf(store, place, name)
        finally:
            place.unlink(missing_ok=True)


def add_gguf(store: Store, file: Path, name: RegistryName) -> None:
    """Makes a file of this machine a model of the store.

    Raises:
        CheckpointError: it is no GGUF file; ConfigError: it cannot be written.
    """
    from penstock.weights.readers.gguf_file import read_gguf_file

    arch = str(read_gguf_file(file).metadata.get("general.architecture", ""))
    digest = digest_of_file(file)
    store.take(file, digest)
    config = json.dumps({"model_format": "gguf", "model_family": arch, "model_families": [arch]}).encode()
    store.put(name, make_manifest(store.add(config, CONFIG), [layer("model", digest, file.stat().st_size)]))
