"""What people write to name a model, read strictly: whatever passes here may become part of a path.

owner/repo, owner/repo@revision                  Hugging Face
owner/repo:QUANT, hf.co/owner/repo:QUANT         a GGUF file there, by its quantisation or its name
name, name:tag, host/name:tag, host/space/name:tag   an OCI registry, as Ollama speaks to them
https://…                                        a file
./folder, file.gguf                              what lies here
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config.environment import HUB_HOSTS, REGISTRY
from penstock.config.errors import ConfigError, quoted
from penstock.config.limits import MAX_NAME_CHARS

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")
_SELECTOR = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?")
_DEFAULT_TAG, _DEFAULT_SPACE = "latest", "library"
SPELLINGS = (
    "owner/repo or owner/repo@revision (Hugging Face), hf.co/owner/repo:QUANT (GGUF there), name:tag or "
    "host/space/name:tag (a registry), an https:// address, a folder or a .gguf file"
)


class NoSuchModelError(ConfigError):
    """A name under which there is nothing, here or where it would be pulled from."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository on Hugging Face: its safetensors, or with a selector a GGUF file."""

    owner: str
    repo: str
    revision: str = "main"
    selector: str = ""

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repo}" if self.owner else self.repo

    def __str__(self) -> str:
        text = f"hf.co/{self.repo_id}:{self.selector}" if self.selector else self.repo_id
        return text if self.revision == "main" else f"{text}@{self.revision}"


@dataclass(frozen=True, slots=True)
class RegistryName:
    """A manifest in an OCI registry, or one made here."""

    model: str
    tag: str = _DEFAULT_TAG
    space: str = _DEFAULT_SPACE
    host: str = REGISTRY

    @property
    def parts(self) -> tuple[str, ...]:
        """As folders below a store's manifests."""
        return (self.host, self.space, self.model, self.tag)

    @property
    def repository(self) -> str:
        """As the registry's paths have it."""
        return f"{self.space}/{self.model}"

    def __str__(self) -> str:
        short = f"{self.model}:{self.tag}"
        if self.space != _DEFAULT_SPACE:
            return f"{self.host}/{self.space}/{short}"
        return short if self.host == REGISTRY else f"{self.host}/{short}"


@dataclass(frozen=True, slots=True)
class UrlName:
    """A file on a web server."""

    url: str

    @property
    def file(self) -> str:
        """The last part of its path."""
        return urlsplit(self.url).path.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class PathName:
    """A folder or file of this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Name = HubName | RegistryName | UrlName | PathName


def parse_name(text: str, registry: str = REGISTRY) -> Name:
    """Reads a name; nothing is looked up.

    Args:
        text: as people write it.
        registry: the host of names that have none.

    Raises:
        ConfigError: it is no name; the message lists the spellings there are.
    """
    if not text or len(text) > MAX_NAME_CHARS or not text.isprintable():
        raise _refuse(text, f"it must be printable and have 1 to {MAX_NAME_CHARS} characters")
    if "://" in text:
        return _url(text)
    if text.startswith(("/", "./", "../", "~")) or text in (".", "..") or text.lower().endswith(".gguf"):
        found = _hub_file(text)
        return found or PathName(Path(os.path.expanduser(text)))
    first, _, rest = text.partition("/")
    if first in HUB_HOSTS:
        return _hub(text, rest)
    if rest and ("." in first or ":" in first or first == "localhost"):
        return _registry(text, first, rest)
    if rest:
        return _hub(text, text)
    return _registry(text, registry, text)


def registry_name(text: str, registry: str = REGISTRY) -> RegistryName:
    """A name for something that is made here: as a registry's, also "space/name:tag".

    Raises:
        ConfigError: it is none.
    """
    first, _, rest = text.partition("/")
    if rest and "." not in first and ":" not in first and first != "localhost":
        return _registry(text, registry, text)
    found = parse_name(text, registry)
    if not isinstance(found, RegistryName):
        raise ConfigError(f"{quoted(text)} cannot name a model that is made here; write for example my-model:latest.")
    return found


def _refuse(text: str, why: str) -> ConfigError:
    return ConfigError(f"{quoted(text)} is no model's name: {why}. A name is {SPELLINGS}.")


def _part(text: str, part: str, what: str) -> str:
    if not _PART.fullmatch(part) or part.endswith((".lock", ".partial")):
        raise _refuse(text, f"its {what} is {quoted(part, 40)}")
    return part


def _hub_file(text: str) -> HubName | None:
    """hf.co/owner/repo:file.gguf ends like a path, but is none."""
    first, _, rest = text.partition("/")
    return _hub(text, rest) if first in HUB_HOSTS and ":" in rest else None


def _hub(text: str, rest: str) -> HubName:
    body, _, revision = rest.partition("@")
    path, _, selector = body.partition(":")
    parts = path.split("/")
    if len(parts) != 2:
        raise _refuse(text, "a repository on Hugging Face has an owner and a name")
    if "@" in rest and (not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision):
        raise _refuse(text, f"its revision is {quoted(revision, 40)}")
    if ":" in body and (not _SELECTOR.fullmatch(selector) or ".." in selector or "//" in selector):
        raise _refuse(text, f"its quantisation is {quoted(selector, 40)}")
    owner, repo = _part(text, parts[0], "owner"), _part(text, parts[1], "repository")
    if "--" in owner or "--" in repo:
        raise _refuse(text, "-- has a meaning of its own in the Hugging Face cache")
    return HubName(owner, repo, revision or "main", selector)


def _registry(text: str, host: str, rest: str) -> RegistryName:
    if not _HOST.fullmatch(host) or ".." in host:
        raise _refuse(text, f"its host is {quoted(host, 40)}")
    path, _, tag = rest.partition(":")
    parts = path.split("/")
    if len(parts) > 2:
        raise _refuse(text, "below the host there are a space and a name at most")
    if ":" in rest and not tag:
        raise _refuse(text, "the tag after its colon is missing")
    space = _part(text, parts[0], "space") if len(parts) == 2 else _DEFAULT_SPACE
    return RegistryName(_part(text, parts[-1], "name"), _part(text, tag or _DEFAULT_TAG, "tag"), space, host)


def _url(text: str) -> UrlName:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _refuse(text, "the address cannot be read") from None
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise _refuse(text, "an address starts with https:// or http:// and a host")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an address with a user or password in it is not taken, since it would be shown and kept.")
    name = UrlName(parts._replace(fragment="").geturl())
    _part(text, name.file or "?", "file")
    return name
