"""Manifests: what a model in an OCI registry, or in a store, is made of (OCI image specification 1.1, and the media
types of Ollama's layers)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.config.errors import CheckpointError, quoted
from penstock.config.limits import (
    MAX_LAYER_TEXT_BYTES,
    MAX_LAYER_TEXTS,
    MAX_LAYER_TEXTS_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_MANIFEST_LAYERS,
    MAX_MODEL_FILE_BYTES,
)
from penstock.library.digests import Digest, digest_of, sha256

DOCKER: Final = "application/vnd.docker.distribution.manifest.v2+json"
OCI: Final = "application/vnd.oci.image.manifest.v1+json"
CONFIG: Final = "application/vnd.docker.container.image.v1+json"
_OLLAMA: Final = "application/vnd.ollama.image."
FILE: Final = "application/vnd.penstock.file.v1"  # of a folder; its name stands in the title
TITLE: Final = "org.opencontainers.image.title"
CHOSEN: Final = "io.penstock.chosen"  # the person who made the model wrote this layer
_MAX_TITLE: Final = 2048
_MAX_FOLDERS: Final = 7
TEXTS: Final = ("template", "system", "params", "messages", "license")


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob of a model.

    Attributes:
        media_type: as the manifest has it.
        digest, size: of the blob.
        annotations: by name.
    """

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The media type's last word for Ollama's: model, template, system, params, license, adapter, …; "file" for a
        file of a folder.
        """
        return "file" if self.media_type == FILE else self.media_type.removeprefix(_OLLAMA)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"mediaType": self.media_type, "digest": str(self.digest), "size": self.size}
        return found | ({"annotations": dict(self.annotations)} if self.annotations else {})


def layer(kind: str, digest: Digest, size: int, **annotations: str) -> Layer:
    """A layer of one of Ollama's kinds, or a "file"."""
    return Layer(FILE if kind == "file" else _OLLAMA + kind, digest, size, annotations)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model's parts.

    Attributes:
        data: as it was sent, or will be: its digest is that of these bytes.
        config: the blob that describes the model.
        layers: the others.
        media_type: of the manifest.
    """

    data: bytes = field(repr=False)
    config: Layer
    layers: tuple[Layer, ...]
    media_type: str = DOCKER

    @property
    def digest(self) -> Digest:
        return digest_of(self.data)

    @property
    def blobs(self) -> tuple[Layer, ...]:
        """All, each once."""
        return tuple({part.digest: part for part in (self.config, *self.layers)}.values())

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(part.size for part in self.blobs)

    def of(self, kind: str) -> tuple[Layer, ...]:
        """The layers of a kind."""
        return tuple(part for part in self.layers if part.kind == kind)


def make_manifest(config: Layer, layers: Iterable[Layer]) -> Manifest:
    """A manifest of these parts."""
    parts = tuple(layers)
    found = {
        "schemaVersion": 2,
        "mediaType": DOCKER,
        "config": config.as_json(),
        "layers": [part.as_json() for part in parts],
    }
    return Manifest(json.dumps(found, separators=(",", ":")).encode(), config, parts)


def parse_manifest(data: bytes, what: str) -> Manifest:
    """Reads a manifest.

    Raises:
        CheckpointError: it is none, or none of one model; `what` says in the message where it comes from.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"the manifest of {what} has {len(data)} bytes; {MAX_MANIFEST_BYTES} are read.")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise CheckpointError(f"the manifest of {what} is not JSON.") from None
    if not isinstance(found, dict) or found.get("schemaVersion") != 2 or "config" not in found:
        kind = found.get("mediaType") if isinstance(found, dict) else None
        raise CheckpointError(f"{what} has no manifest of one model (its type is {quoted(str(kind), 80)}).")
    listed = found.get("layers")
    if not isinstance(listed, list) or len(listed) > MAX_MANIFEST_LAYERS:
        raise CheckpointError(f"the manifest of {what} lists no layers, or more than {MAX_MANIFEST_LAYERS}.")
    kind = found.get("mediaType")
    config, layers = _layer(found["config"], what), tuple(_layer(part, what) for part in listed)
    _check_titles([part.annotations.get(TITLE, "") for part in layers if part.kind == "file"], what)
    return Manifest(data, config, layers, kind if kind == OCI else DOCKER)


def _check_titles(titles: Sequence[str], what: str) -> None:
    """Raises CheckpointError unless the files can lie in one folder."""
    known = set(titles)
    if len(known) < len(titles):
        raise CheckpointError(f"the manifest of {what} has a file twice.")
    folders: set[str] = set()
    for title in titles:
        if len(title) > _MAX_TITLE or title.count("/") > _MAX_FOLDERS or title.startswith(".complete"):
            raise CheckpointError(f"the manifest of {what} has a file {quoted(title)}; that name is not taken.")
        parts = title.split("/")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    if both := known & folders:
        raise CheckpointError(f"the manifest of {what} has {quoted(min(both))} as a file and as a folder.")


def _layer(found: Any, what: str) -> Layer:
    if not isinstance(found, dict):
        raise CheckpointError(f"the manifest of {what} has a layer that is no object.")
    size, kind = found.get("size"), found.get("mediaType")
    notes = found.get("annotations") or {}
    if type(size) is not int or not 0 <= size <= MAX_MODEL_FILE_BYTES:
        raise CheckpointError(f"the manifest of {what} has a layer of {quoted(str(size), 40)} bytes.")
    if not isinstance(kind, str) or not isinstance(notes, dict):
        raise CheckpointError(f"the manifest of {what} has a layer without a media type.")
    annotations = {str(name): str(value) for name, value in notes.items()}
    _check_unicode([kind, *annotations, *annotations.values()], f"the manifest of {what}")
    return Layer(kind, sha256(str(found.get("digest"))), size, annotations)


def _check_unicode(texts: Iterable[str], what: str) -> None:
    """Raises CheckpointError for halves of characters, which JSON can hold and no file or answer can."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{what} has text that is no Unicode (a surrogate alone); make the model again."
        ) from None


@dataclass(frozen=True, slots=True)
class Texts:
    """What a model says of itself beside its weights.

    Attributes:
        template: Go's, as Ollama has them, or Jinja.
        chosen: the template was written for this model, and comes before that of its file.
        system: the system message where a conversation has none.
        params: by name, as Ollama's PARAMETER has them.
        messages: turns that come before a conversation.
        licenses: texts.
        config: the manifest's description.
    """

    template: str = ""
    chosen: bool = False
    system: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] = ()
    licenses: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


def read_texts(manifest: Manifest, path: Mapping[Digest, Path]) -> Texts:
    """Reads the small blobs of a model; of each kind but licences the last counts.

    Raises:
        CheckpointError: one is missing, too long, or not what its type says, or there are too many.
    """
    last = {kind: manifest.of(kind)[-1:] for kind in TEXTS if kind != "license"}
    licenses = {part.digest: part for part in manifest.of("license")}
    wanted = [part for parts in last.values() for part in parts] + list(licenses.values())
    size = sum(part.size for part in wanted)
    if len(wanted) > MAX_LAYER_TEXTS or size > MAX_LAYER_TEXTS_BYTES:
        raise CheckpointError(
            f"a model has {len(wanted)} texts of {size} bytes; {MAX_LAYER_TEXTS} of {MAX_LAYER_TEXTS_BYTES} are read."
        )
    read = {kind: [_text(part, path) for part in parts] for kind, parts in last.items() if kind != "params"}
    messages = _json(read["messages"], [])
    known = ("system", "user", "assistant", "tool")
    if not all(isinstance(turn, dict) and turn.get("role") in known for turn in messages):
        raise CheckpointError("a model's messages are no list of turns with roles; make the model again.")
    return Texts(
        "".join(read["template"]),
        any(part.annotations.get(CHOSEN) for part in last["template"]),
        "".join(read["system"]),
        read_params(manifest, path),
        [{"role": turn["role"], "content": str(turn.get("content", ""))} for turn in messages],
        tuple(_text(part, path) for part in licenses.values()),
        read_config(manifest, path),
    )


def read_config(manifest: Manifest, path: Mapping[Digest, Path]) -> Mapping[str, Any]:
    """The manifest's description.

    Raises:
        CheckpointError: as `read_texts`
    """
    found: Mapping[str, Any] = _json([_text(manifest.config, path)] if manifest.config.size else [], {})
    return found


def read_params(manifest: Manifest, path: Mapping[Digest, Path]) -> Mapping[str, Any]:
    """The model's parameters.

    Raises:
        CheckpointError: as `read_texts`
    """
    found: Mapping[str, Any] = _json([_text(part, path) for part in manifest.of("params")[-1:]], {})
    return found


def _text(part: Layer, path: Mapping[Digest, Path]) -> str:
    try:
        if part.size > MAX_LAYER_TEXT_BYTES:
            raise CheckpointError(f"a {part.kind} of {part.size} bytes is too long; {MAX_LAYER_TEXT_BYTES} are read.")
        return path[part.digest].read_bytes().decode("utf-8")
    except (OSError, KeyError, UnicodeDecodeError):
        raise CheckpointError(
            f"the {part.kind} {part.digest} of a model cannot be read; pull the model again."
        ) from None


def _json(texts: Sequence[str], empty: Any) -> Any:
    if not texts:
        return empty
    try:
        found = json.loads(texts[-1])
        plain = json.dumps(found, ensure_ascii=False)
    except (ValueError, RecursionError):
        found, plain = None, ""
    if type(found) is not type(empty):
        raise CheckpointError("a model's parameters or messages are no JSON of the right kind; make the model again.")
    _check_unicode([plain], "a model's description, parameters or messages")
    return found
