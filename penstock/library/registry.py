"""OCI registries as Ollama speaks to them: manifests and blobs (OCI distribution specification 1.1), to and fro."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode, urljoin, urlsplit

from penstock.config.errors import CheckpointError
from penstock.config.limits import MAX_MANIFEST_BYTES
from penstock.library.authority import checked_realm, gets_login, is_loopback
from penstock.library.digests import digest_of
from penstock.library.manifest import DOCKER, OCI, Layer, Manifest, parse_manifest
from penstock.library.names import NoSuchModelError, RegistryName
from penstock.library.store import Store
from penstock.library.transfer import Manner, Source, fetch_all
from penstock.library.web import Answer, Web, WebError, origin

_CHALLENGE = re.compile(r'\b(\w+)="([^"]*)"')
_CHUNK: Final = 1 << 20
_PUSHING: Final = "pull,push"
_MOST_TOKEN: Final = 256 << 10  # of the answer with it
_MOST_READ: Final = 4 << 10  # of an answer that only its headers matter of


@dataclass(slots=True)
class Registry:
    """A registry at a host. Loopback hosts are spoken to in plain HTTP, as Docker does; others in HTTPS.

    Attributes:
        web: the way there.
        name: of the model.
        insecure: plain HTTP for any host.
        login: "user:password", base64, from Docker's configuration; "" for nobody.
        token: what the registry's authority gave, once it was asked.
    """

    web: Web
    name: RegistryName
    insecure: bool = False
    login: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    _renewing: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def url(self, path: str) -> str:
        """An address of this repository."""
        scheme = "http" if self.insecure or is_loopback(self.name.host) else "https"
        return f"{scheme}://{self.name.host}/v2/{self.name.repository}/{path}"

    def headers(self) -> dict[str, str]:
        """Credentials, if there are any."""
        return {"Authorization": self.token} if self.token else {}

    def manifest(self) -> Manifest:
        """The model's manifest.

        Raises:
            ConfigError: there is no such model; WebError: the registry refuses; CheckpointError: it is damaged.
        """
        try:
            data, headers = self.authorised(
                lambda: self.web.read(
                    self.url(f"manifests/{self.name.tag}"),
                    {**self.headers(), "Accept": f"{DOCKER}, {OCI}"},
                    MAX_MANIFEST_BYTES,
                )
            )
        except WebError as error:
            if error.status in (401, 403, 404):
                told = f"{self.name.host} has no model {self.name} that is open to you ({error})"
                raise NoSuchModelError(told) from None
            raise
        stated = headers.get("docker-content-digest", "")
        if stated and stated.startswith("sha256:") and stated != str(digest_of(data)):
            raise CheckpointError(f"the manifest of {self.name} came with other bytes than its digest {stated[:80]}.")
        return parse_manifest(data, str(self.name))

    def source(self, part: Layer) -> Source:
        """Where a blob's bytes are."""
        return Source(self.url(f"blobs/{part.digest}"), part.size, part.digest, self.headers(), renew=self._renew)

    def _renew(self, refused: Mapping[str, str], challenge: str) -> Mapping[str, str]:
        """A token for one that has expired; of several threads the first asks for it."""
        with self._renewing:
            if self.headers() == refused:
                self._authorise(challenge, "pull")
            return self.headers()

    def authorised(self, once: Callable[[], Answer], actions: str = "pull") -> Answer:
        """What `once` gives; where the registry asks for a token, or for another one, that is fetched."""
        try:
            return once()
        except WebError as error:
            if error.status != 401:
                raise
            self._authorise(error.challenge, actions)
            return once()

    def _authorise(self, challenge: str, actions: str) -> None:
        kind, _, rest = challenge.partition(" ")
        found = dict(_CHALLENGE.findall(rest))
        if kind.lower() == "basic" and self.login:
            self.token = f"Basic {self.login}"
            return
        realm = found.get("realm", "")
        if kind.lower() != "bearer" or not realm:
            raise WebError(f"{self.name.host} asks for a login; `docker login {self.name.host}` keeps one.", 401)
        host = checked_realm(realm, self.name.host, secure=self.url("").startswith("https:"))
        scope = f"repository:{self.name.repository}:{actions}"
        query = urlencode({"service": found.get("service", ""), "scope": scope})
        with_login = self.login and realm.startswith("https:") and gets_login(host, self.name.host)
        headers = {"Authorization": f"Basic {self.login}"} if with_login else {}
        answer = self.web.read_json(f"{realm}{'&' if '?' in realm else '?'}{query}", headers, _MOST_TOKEN, redirects=0)
        token = answer.get("token") or answer.get("access_token") if isinstance(answer, dict) else None
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise WebError(f"{host} gives no token for {self.name}.", 401)
        self.token = f"Bearer {token}"


def pull(store: Store, registry: Registry, manifest: Manifest, manner: Manner) -> None:
    """Brings a model's blobs, then its name.

    Raises:
        WebError, CheckpointError, ConfigError: as `transfer.fetch`.
    """
    manner = replace(manner, partials=store.root / "partial")
    with store.loading():
        there = store.blobs(manifest)
        for part in manifest.blobs:
            if part.digest in there:
                store.take(there[part.digest], part.digest)
                manner.told(part.size)
        files = [
            (registry.source(part), store.root / "blobs" / part.digest.file_name)
            for part in manifest.blobs
            if part.digest not in there
        ]
        fetch_all(registry.web, files, manner)
        store.put(registry.name, manifest)


def push(store: Store, registry: Registry, manifest: Manifest, manner: Manner) -> None:
    """Sends what the registry lacks of a model, then its manifest.

    Raises:
        WebError: the registry refuses; CheckpointError: a blob is missing here.
    """
    blobs = store.blobs(manifest)
    for part in manifest.blobs:
        if part.digest not in blobs:
            raise CheckpointError(f"{registry.name} lacks the blob {part.digest}; pull or make it again.")
        if registry.authorised(partial(_has, registry, part), _PUSHING):
            manner.told(part.size)
        else:
            _send(registry, part, blobs[part.digest], manner)
    place = registry.url(f"manifests/{registry.name.tag}")
    registry.authorised(partial(_put, registry, place, {"Content-Type": manifest.media_type}, manifest.data), _PUSHING)


def _has(registry: Registry, part: Layer) -> bool:
    try:
        with registry.web.stream(registry.url(f"blobs/{part.digest}"), registry.headers(), "HEAD"):
            return True
    except WebError as error:
        if error.status == 404:
            return False
        raise


def _send(registry: Registry, part: Layer, path: Path, manner: Manner) -> None:
    """One blob in one request; the registry holds it against its digest."""
    begin = registry.url("blobs/uploads/")
    begun = registry.authorised(lambda: _answer(registry.web, "POST", begin, registry.headers(), b""), _PUSHING)
    place = _upload_place(registry, begun.get("location", ""))
    place += f"{'&' if '?' in place else '?'}digest={quote(str(part.digest))}"

    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        with path.open("rb") as file:
            while piece := file.read(_CHUNK):
                sent += len(piece)
                manner.told(len(piece))
                yield piece

    def put() -> None:
        nonlocal sent
        manner.told(-sent)  # of an attempt whose token had expired
        sent = 0
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(part.size)}
        _put(registry, place, headers, pieces())

    registry.authorised(put, _PUSHING)


def _put(registry: Registry, place: str, headers: Mapping[str, str], content: bytes | Iterator[bytes]) -> None:
    _answer(registry.web, "PUT", place, {**registry.headers(), **headers}, content)


def _upload_place(registry: Registry, location: str) -> str:
    """Where an upload goes: the registry's own scheme, host and port, whatever way it names them.

    A registry behind a proxy may not know that it is spoken to in HTTPS; its http:// becomes that.
    """
    own = registry.url("blobs/uploads/")
    try:
        place = urlsplit(urljoin(own, location))
        if place.scheme == "http":
            place = place._replace(scheme=urlsplit(own).scheme)
        if origin(place.geturl()) == origin(own):
            return place._replace(netloc=urlsplit(own).netloc, fragment="").geturl()
    except ValueError:
        pass
    raise WebError(f"{registry.name.host} wants the upload to go to another host; it is not sent there.")


def _answer(
    web: Web, method: str, url: str, headers: Mapping[str, str], content: bytes | Iterator[bytes]
) -> Mapping[str, str]:
    """The headers of an answer; of its body a little is read, so that the connection can be used again."""
    with web.stream(url, headers, method, content) as response:
        size = 0
        for piece in response.iter_raw(1024):
            size += len(piece)
            if size >= _MOST_READ:
                break
        return response.headers


def docker_login(host: str, config: Path) -> str:
    """What `docker login` keeps for a host, base64 of "user:password"; "" if nothing, or a helper keeps it."""
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        kept = json.loads(config.read_bytes())["auths"][host]["auth"]
        base64.b64decode(kept, validate=True)
        return str(kept)
    return ""
