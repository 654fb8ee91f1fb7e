"""Addresses of stores that engines share: which there are, and who may use them. No client is imported here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlsplit

from penstock.config.errors import ConfigError

REDIS: Final = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
"""Schemes of Redis and Valkey, as their client has them."""
STORE_SECONDS: Final = 86_400
"""After which a value in Redis that nobody has read is gone, unless told otherwise."""
_LMCACHE_PORT: Final = 65432
_MOONCAKE_PORT: Final = 50051
_EXAMPLES: Final = (
    "redis://HOST:6379/0, rediss://HOST:6379/0, valkey://HOST:6379/0, s3://BUCKET/PREFIX, lm://HOST:65432 "
    "and mooncake://HOST:50051"
)
_PLACES: Final[Mapping[str, tuple[str, int]]] = {
    "lm": ("lmcache", _LMCACHE_PORT),
    "mooncake": ("mooncake", _MOONCAKE_PORT),
    "mooncakestore": ("mooncake", _MOONCAKE_PORT),
}
"""Schemes of stores that have a host and a port: the kind, and the usual port."""
# Others' stores, and what to do instead.
_OTHERS: Final[Mapping[str, str]] = {
    "nixl": "NIXL's plug-ins are not spoken here",
    "sagemaker-hyperpod": "it is not spoken here",
    "redis-sentinel": "name one server",
    "http": "an object store is s3://BUCKET/PREFIX, with this address in AWS_ENDPOINT_URL",
    "https": "an object store is s3://BUCKET/PREFIX, with this address in AWS_ENDPOINT_URL",
    "hf3fs": "3FS is a file system: mount it and name a folder of it with --kv-disk-path",
    "fs": "a folder is --kv-disk SIZE with --kv-disk-path FOLDER",
    "file": "a folder is --kv-disk SIZE with --kv-disk-path FOLDER",
}


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a shared store is; as text without its password.

    Attributes:
        kind: "redis", "s3", "lmcache" or "mooncake".
        shown: the address as it may be told.
        url: of Redis, with the password.
        bucket, prefix: of an object store; the prefix is "" or ends in a slash.
        host, port: of an LMCache server, or of Mooncake's master.
    """

    kind: str
    shown: str
    url: str = field(default="", repr=False)
    bucket: str = ""
    prefix: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return self.shown


@dataclass(frozen=True, slots=True)
class MooncakeMember:
    """How this process joins a Mooncake store.

    Attributes:
        host: by which other members reach it.
        bytes: of its memory that it gives.
        metadata: where members find each other; P2PHANDSHAKE for each by itself.
        protocol, devices: how values go: "tcp", or "rdma" over these.
    """

    host: str = "127.0.0.1"
    bytes: int = 0
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Who may use a store, as the environment says.

    Attributes:
        password: of Redis; None for what the address has.
        endpoint, region: of an object store.
        key, secret, token: its credentials.
        mooncake: of a Mooncake store.
    """

    password: str | None = field(default=None, repr=False)
    endpoint: str = "https://s3.amazonaws.com"
    region: str = "us-east-1"
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    mooncake: MooncakeMember = MooncakeMember()


def check_store(text: Any, seconds: int | None) -> None:
    """Raises ConfigError for what is no address of a store, or for a time that it does not take."""
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"kv_store is of type {type(text).__name__}; allowed: {_EXAMPLES}.")
    kind = store_address(text).kind if text is not None else ""
    if seconds is not None and kind != "redis":
        raise ConfigError(
            "--kv-store-seconds is for a --kv-store in Redis; in an object store the bucket's lifecycle rules remove "
            "what is old, and the others have no such rule. Leave it out."
        )


def store_address(text: str, access: StoreAccess | None = None) -> StoreAddress:
    """Reads an address, into which the password of `access` is put.

    Raises:
        ConfigError: it is none of a store there is; no password is shown.
    """
    scheme, mark, rest = text.strip().partition("://")
    scheme = scheme.lower()
    secret, at, place = rest.rpartition("@")
    shown = f"{scheme}{mark}{'…' if secret else ''}{at}{place.partition('?')[0][:200]}"
    if not mark or (scheme not in REDIS and scheme not in ("s3", *_PLACES)):
        why = f" ({_OTHERS[scheme]})" if scheme in _OTHERS else ""
        raise ConfigError(f"--kv-store is {shown!r}{why}; allowed: {_EXAMPLES}.")
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--kv-store is {shown!r}: {error}; allowed: {_EXAMPLES}.") from None
    if parts.query or parts.fragment or not host or not text.isprintable() or " " in text.strip():
        raise ConfigError(f"--kv-store is {shown!r}, an address with no more than a path; allowed: {_EXAMPLES}.")
    path = parts.path.strip("/")
    if scheme in _PLACES:
        kind, usual = _PLACES[scheme]
        if path or parts.username or parts.password:
            raise ConfigError(f"--kv-store is {shown!r}; it has a host and a port alone: {scheme}://HOST:{usual}.")
        return StoreAddress(kind, shown, host=host, port=port or usual)
    if scheme == "s3":
        if (
            parts.username
            or parts.password
            or parts.port
            or not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc)
        ):
            raise ConfigError(
                f"--kv-store is {shown!r}, which names no bucket; allowed: s3://BUCKET/PREFIX, with the endpoint in "
                "AWS_ENDPOINT_URL and credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            )
        return StoreAddress("s3", shown, bucket=parts.netloc, prefix=f"{path}/" if path else "")
    if path and not (path.isascii() and path.isdigit() and len(path) < 6):
        raise ConfigError(
            f"--kv-store is {shown!r}; the path of a Redis address is the number of a database, such as /0."
        )
    server = parts.netloc.rpartition("@")[2]
    user, password = parts.username or "", parts.password
    if access is not None and access.password is not None:
        password = quote(access.password, safe="")
    login = "" if not user and password is None else f"{user}:{password or ''}@"
    return StoreAddress("redis", shown, url=f"{REDIS[scheme]}://{login}{server}/{path or 0}")
