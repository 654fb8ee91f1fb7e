"""The models of this machine under one roof: Penstock's own store, Ollama's, and the Hugging Face cache.

    manifests/HOST/SPACE/NAME/TAG   what a model is made of
    blobs/sha256-…                  its parts, each under the digest that its bytes were held against
    partial/                        parts that are on their way
    uploads/blobs/sha256-…          files that clients sent, until a model is made of them
    views/                          what engines open (`library.views`)

Ollama lays its store out in the same way, so it is read in place; nothing is ever written there.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.config.environment import ModelPlaces, model_places
from penstock.config.errors import CheckpointError, ConfigError, PenstockError
from penstock.config.names import BUNDLED_MODEL
from penstock.library.digests import Digest, digest_of
from penstock.library.files import link, locked, remove_all, remove_file, shared_lock, write_whole
from penstock.library.hub_cache import (
    CachedModel,
    adapters_of,
    cached_adapters,
    cached_models,
    models_of,
    remove_model,
    repo_folder,
    selected,
)
from penstock.library.manifest import Layer, Manifest, Texts, parse_manifest, read_config, read_params, read_texts
from penstock.library.names import HubName, NoSuchModelError, RegistryName, parse_name
from penstock.library.views import engine_options, sweep_views, view
from penstock.weights.open import bundled_model_path

_COMPARED_CHARS = 96  # of a name that is looked for, with those there are
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the library, or an adapter.

    Attributes:
        name: which finds it again.
        bytes: on the disk.
        digest: of its manifest, or the commit of its repository; "" for the bundled model.
        modified: seconds since 1970.
        where: "penstock", "ollama", "hugging face" or "bundled".
        details: what its manifest says of it, by Ollama's names: format, family, parameter_size, quantization_level.
        options: engine options that its maker asked for.
        made: gives the path.
    """

    name: str
    bytes: int
    digest: str
    modified: float
    where: str
    made: Callable[[], Path] = field(repr=False, compare=False)
    details: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """What to give an engine as its model.

        Raises:
            CheckpointError: a part of it is missing or damaged.
        """
        return self.made()


class Store:
    """All models that have names; `places` says where they lie."""

    def __init__(self, places: ModelPlaces) -> None:
        self.places = places
        self.root = places.store

    # -- finding ------------------------------------------------------------------------------------------------------

    def list(self) -> Sequence[Entry]:
        """Every whole model, the bundled one last, else by name; of one name the first place's."""
        found: dict[str, Entry] = {}
        for entry in (*self._made(), *map(self._cached, cached_models(self.places.hub)), *_bundled()):
            found.setdefault(entry.name, entry)
        return sorted(found.values(), key=lambda entry: (entry.where == "bundled", entry.name.lower()))

    def adapters(self) -> Sequence[Entry]:
        """Every adapter that was pulled, by name."""
        found = [self._cached(adapter, "adapter") for adapter in cached_adapters(self.places.hub)]
        return sorted(found, key=lambda entry: entry.name.lower())

    def find(self, name: str) -> Entry | None:
        """The model of a name, in any of its spellings; None if there is none.

        Raises:
            ConfigError: it is no name.
        """
        if name == BUNDLED_MODEL:
            return next(_bundled(), None)
        parsed = parse_name(name, self.places.registry)
        if isinstance(parsed, RegistryName):
            found = self.manifest(parsed)
            return None if found is None else self._entry(parsed, *found)
        if isinstance(parsed, HubName):
            cached = self.cached(parsed)
            return None if cached is None else self._cached(cached)
        return None

    def nearest(self, name: str) -> Sequence[str]:
        """Names of the library that a name may have been meant as, the nearest first."""
        names = [entry.name for entry in self.list()]
        bare = {other.rpartition("/")[2].removesuffix(":latest").lower(): other for other in reversed(names)}
        wanted = name.rpartition("/")[2].removesuffix(":latest").lower()
        close = [bare[key] for key in difflib.get_close_matches(wanted[:_COMPARED_CHARS], bare, 3, 0.5)]
        close += [other for key, other in bare.items() if wanted and (key.startswith(wanted) or wanted in key)]
        return list(dict.fromkeys(close))[:3]

    def cached(self, name: HubName) -> CachedModel | None:
        """A model of the Hugging Face cache."""
        folder = repo_folder(self.places.hub, name)
        commit = _commit(folder, name.revision)
        models = [model for model in models_of(folder, name) if model.commit.startswith(commit)]
        snapshot = folder / "snapshots"
        if name.selector:
            chosen = [m for m in models if m.name.selector and _selects(name.selector, m, snapshot / m.commit)]
        else:
            chosen = [m for m in models if not m.name.selector] or (models if len(models) == 1 else [])
        return chosen[0] if chosen else None

    def adapter(self, name: HubName) -> CachedModel | None:
        """An adapter of the Hugging Face cache."""
        folder = repo_folder(self.places.hub, name)
        commit = _commit(folder, name.revision)
        found = (adapter for adapter in adapters_of(folder, name) if adapter.commit.startswith(commit))
        return None if name.selector else next(found, None)

    def manifest(self, name: RegistryName) -> tuple[Manifest, Path] | None:
        """A model's manifest, and the store that it lies in; None if there is none.

        Raises:
            CheckpointError: it is damaged.
        """
        for root in (self.root, *self.places.ollama):
            path = root.joinpath("manifests", *name.parts)
            with suppress(OSError):
                return parse_manifest(path.read_bytes(), str(name)), root
        return None

    def blob(self, digest: Digest) -> Path:
        """Where a blob lies, or would lie in the store."""
        paths = [root / "blobs" / digest.file_name for root in (self.root, *self.places.ollama)]
        return next((path for path in paths if path.is_file()), paths[0])

    def blobs(self, manifest: Manifest) -> Mapping[Digest, Path]:
        """The blobs of a manifest that are there with all their bytes."""
        paths = {part.digest: (self.blob(part.digest), part.size) for part in manifest.blobs}
        return {key: path for key, (path, size) in paths.items() if path.is_file() and path.stat().st_size == size}

    def texts(self, name: RegistryName) -> Texts:
        """What a model's manifest says beside its weights; nothing for an unknown one.

        Raises:
            CheckpointError: a blob is missing or damaged.
        """
        found = self.manifest(name)
        return Texts() if found is None else read_texts(found[0], self.blobs(found[0]))

    @property
    def uploads(self) -> Path:
        """Where files lie that clients sent (`library.uploads`)."""
        return self.root / "uploads" / "blobs"

    def temporary(self) -> Path:
        """Where folders are made that go again.

        Raises:
            ConfigError: there can be none.
        """
        place = self.root / "partial"
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{place} cannot be made: {error.strerror or error}.") from None
        return place

    def _made(self) -> Iterator[Entry]:
        for root in (self.root, *self.places.ollama):
            base = root / "manifests"
            for path in sorted(base.glob("*/*/*/*")):
                with suppress(PenstockError, OSError, ValueError):
                    folder = path.relative_to(base).parent.as_posix()
                    name = parse_name(f"{folder}:{path.name}", self.places.registry)
                    if isinstance(name, RegistryName) and path.is_file():
                        yield self._entry(name, parse_manifest(path.read_bytes(), str(name)), root)

    def _entry(self, name: RegistryName, manifest: Manifest, root: Path) -> Entry:
        blobs = self.blobs(manifest)
        details: dict[str, str] = {}
        options: dict[str, Any] = {}
        with suppress(CheckpointError):
            details = _details(read_config(manifest, blobs))
            options = engine_options(read_params(manifest, blobs))

        def made() -> Path:
            with locked(self.root / "views" / manifest.digest.hex[:32]):
                return view(self.root / "views", name, manifest, blobs)

        modified = root.joinpath("manifests", *name.parts).stat().st_mtime
        where = "penstock" if root == self.root else "ollama"
        return Entry(str(name), manifest.size, manifest.digest.hex, modified, where, made, details, options)

    def _cached(self, model: CachedModel, format: str = "safetensors") -> Entry:
        details = {"format": format}
        if model.name.selector:
            details = {"format": "gguf", "quantization_level": model.name.selector}
        return Entry(
            str(model.name), model.bytes, model.commit, model.modified, "hugging face", lambda: model.path, details
        )

    # -- changing -----------------------------------------------------------------------------------------------------

    def put(self, name: RegistryName, manifest: Manifest) -> None:
        """Gives a model its name, once all its blobs are there.

        Raises:
            CheckpointError: a blob is missing.
            ConfigError: it cannot be written.
        """
        there = self.blobs(manifest)
        missing = [str(part.digest) for part in manifest.blobs if part.digest not in there]
        if missing:
            raise CheckpointError(f"{name} lacks the blobs {', '.join(missing[:5])}.")
        path = self.root.joinpath("manifests", *name.parts)
        try:
            write_whole(path, manifest.data)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None

    def add(self, data: bytes, media_type: str) -> Layer:
        """Makes bytes a blob."""
        digest = digest_of(data)
        path = self.root / "blobs" / digest.file_name
        if not path.is_file():
            write_whole(path, data)
        return Layer(media_type, digest, len(data))

    def take(self, source: Path, digest: Digest) -> None:
        """Gives a file whose digest is known a place among the blobs, without a second copy where that is possible."""
        target = self.root / "blobs" / digest.file_name
        if not target.is_file():
            link(source, target)

    def copy(self, source: RegistryName, target: RegistryName) -> None:
        """Gives a model of a store a second name.

        Raises:
            ConfigError: there is no such model.
        """
        found = self.manifest(source)
        if found is None:
            raise self.unknown(str(source))
        manifest, root = found
        if root != self.root:
            for part in manifest.blobs:
                self.take(root / "blobs" / part.digest.file_name, part.digest)
        self.put(target, manifest)

    def remove(self, name: str) -> int:
        """Removes a model or a pulled adapter, and what only it needed; the bytes that became free.

        Raises:
            ConfigError: there is no such model, or it is not Penstock's to remove.
        """
        if name == BUNDLED_MODEL:
            raise ConfigError(f"{name} ships with Penstock and stays.")
        parsed = parse_name(name, self.places.registry)
        if isinstance(parsed, HubName) and (cached := self.cached(parsed) or self.adapter(parsed)) is not None:
            return remove_model(self.places.hub, cached)
        if not isinstance(parsed, RegistryName) or (found := self.manifest(parsed)) is None:
            raise self.unknown(name)
        if found[1] != self.root:
            raise ConfigError(f"{parsed} is in Ollama's store at {found[1]}; remove it with: ollama rm {parsed}")
        path = self.root.joinpath("manifests", *parsed.parts)
        path.unlink(missing_ok=True)
        for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
            with suppress(OSError):
                os.rmdir(folder)
        with suppress(CheckpointError):  # of another model, whose blobs nobody knows
            return self.prune(partials=False)
        return 0

    def prune(self, *, partials: bool = True) -> int:
        """Removes blobs that no model needs, with `partials` also what came of loads that were given up; bytes freed.

        While anything is being loaded, blobs stay, since a manifest comes after its blobs.
        """
        try:
            with self.loading(alone=True):
                manifests = list(self._manifests())
                used = {part.digest.file_name for manifest in manifests for part in manifest.blobs}
                blobs = [path for path in (self.root / "blobs").glob("sha256-*") if _BLOB.fullmatch(path.name)]
                freed = sum(remove_file(path) for path in blobs if path.name not in used)
                if partials:
                    freed += sum(remove_all(path) for path in (*self.root.glob("partial/*"), self.root / "uploads"))
                sweep_views(self.root / "views", {manifest.digest.hex for manifest in manifests})
                return freed
        except BlockingIOError:
            return 0

    def _manifests(self) -> Iterator[Manifest]:
        for path in self.root.glob("manifests/*/*/*/*"):
            if path.is_file() and not path.name.startswith("."):
                yield parse_manifest(path.read_bytes(), path.name)

    def loading(self, *, alone: bool = False) -> AbstractContextManager[None]:
        """Held while blobs come; with `alone` nobody else may hold it, else BlockingIOError."""
        return shared_lock(self.root / "store.lock", alone=alone)

    def unknown(self, name: str) -> NoSuchModelError:
        """What to say where a name finds nothing."""
        near = self.nearest(name)
        meant = f" Nearest here: {', '.join(near)}." if near else ""
        return NoSuchModelError(f"there is no model {name!r} here.{meant} `penstock list` shows all.")


def open_store(folder: Path | None = None) -> Store:
    """The library; in `folder` instead of where the environment says."""
    places = model_places()
    return Store(places if folder is None else replace(places, store=folder))


def _bundled() -> Iterator[Entry]:
    with suppress(CheckpointError, OSError):
        folder = bundled_model_path()
        stats = [path.stat() for path in folder.iterdir() if path.is_file()]
        size, modified = sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)
        yield Entry(BUNDLED_MODEL, size, "", modified, "bundled", lambda: folder, {"format": "safetensors"})


def _details(config: Mapping[str, Any]) -> dict[str, str]:
    names = {"model_format": "format", "model_family": "family", "model_type": "parameter_size"}
    names["file_type"] = "quantization_level"
    return {theirs: str(config[ours]) for ours, theirs in names.items() if isinstance(config.get(ours), str)}


def _commit(folder: Path, revision: str) -> str:
    """The commit that a revision stands for, or the revision where it is a commit (or begins one) itself."""
    with suppress(OSError, UnicodeError):
        return (folder / "refs" / revision).read_text(encoding="ascii").strip()
    return revision if re.fullmatch(r"[0-9a-f]{7,40}", revision) else "none"


def _selects(selector: str, model: CachedModel, snapshot: Path) -> bool:
    return bool(selected([model.path.relative_to(snapshot).as_posix()], selector))
