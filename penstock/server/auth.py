"""Who may ask: API keys, and the Host header of a server that listens on loopback only."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request

from penstock.config.errors import ConfigError, format_value
from penstock.config.options import ServerOptions
from penstock.server.errors import HttpError

NO_ORIGIN, LOCALHOST = "none", "localhost"
OWNER = "penstock.owner"
"""Where an ASGI scope tells whose request it is; see `owner_of`."""
_MAX_PORT = 65535
PUBLIC_PATHS = frozenset(
    {"/livez", "/readyz", "/health", "/v1/health", "/ping", "/v2/health/live", "/v2/health/ready", "/", "/docs"}
)
_PUBLIC_FILES = "/web/"  # of the page, which are the same everywhere; it asks for the key itself
_PORT = r"(?::(?P<port>[0-9]{1,5}))?"
_HOST = re.compile(rf"(?:\[(?P<v6>[0-9A-Fa-f:.]{{2,45}})\]|(?P<name>[A-Za-z0-9._-]{{1,253}})){_PORT}")
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]{{2,45}}\]|[a-z0-9._-]{{1,253}}){_PORT}")
LOCAL_ORIGINS = (
    r"https?://(?:localhost|[a-z0-9-]+\.localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[::1\])(?::\d{1,5})?"
    r"|(?:app|tauri|vscode-webview|vscode-file)://[A-Za-z0-9._-]{1,253}"
)
"""Origins of pages on this machine and of desktop programs, which Ollama lets in too."""
_PORTS = {"http": 80, "https": 443}  # which browsers leave out


class ApiKeys:
    """The accepted keys, kept and compared as SHA-256 digests in time that does not depend on them."""

    def __init__(self, keys: Iterable[str]) -> None:
        keys = tuple(keys)
        if not all(key.strip() == key != "" and key.isprintable() for key in keys):
            raise ConfigError("An API key is empty or has spaces around it; give a printable one, or leave it out.")
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, path: str, headers: Headers, method: str = "GET") -> None:
        """Raises HttpError 401 unless the routed path is public, no keys are set, or the request carries one."""
        public = path in PUBLIC_PATHS and method != "POST"  # what is sent to / is TGI's, and costs work
        if not self._digests or public or path.startswith(_PUBLIC_FILES):
            return
        presented = _presented(headers)
        digest = _digest(presented.encode("latin-1"))  # the bytes that were sent
        # Every key is compared, so that the time taken does not tell which one came close.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            given = "The API key is not valid." if presented else "This server needs an API key."
            message = f"{given} Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def owner(self, headers: Headers) -> str:
        """Names who sends a request that was let in, without telling the key; of an open server all are one."""
        return _digest(b"owner:" + _presented(headers).encode("latin-1")).hex()[:32] if self._digests else ""


class AdminKeys(ApiKeys):
    """The keys of those who may load and unload models: without any, whoever may ask may do that too."""

    def holds_one(self, headers: Headers) -> bool:
        """Whether the request carries one of these."""
        digest = _digest(_presented(headers).encode("latin-1"))
        return bool(sum(hmac.compare_digest(digest, known) for known in self._digests))

    def check_admin(self, headers: Headers) -> None:
        """Raises HttpError 403 unless the request carries one of these."""
        if self._digests and not self.holds_one(headers):
            message = "This needs an administrator's key; send it as 'x-admin-key: KEY' or 'Authorization: Bearer KEY'."
            raise HttpError(403, message, code="admin_key_required")


def owner_of(request: Request) -> str:
    """Who sends a request that has passed the gate."""
    return str(request.scope[OWNER])


def _presented(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-admin-key") or headers.get("x-api-key", "")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class HostRule:
    """Which Host headers are answered.

    A server on loopback answers loopback names only, so that a web page whose name was re-bound to 127.0.0.1 cannot
    use a visitor's browser to reach it. Elsewhere the header must just be well formed.
    """

    def __init__(self, bound_host: str) -> None:
        self._bound = bound_host.strip("[]").lower()
        self._loopback = is_loopback(bound_host)

    def check(self, http_version: str, hosts: list[str]) -> None:
        """Raises HttpError 400 for a missing, repeated or malformed header, 403 for a name that is not ours."""
        if not hosts and http_version == "1.0":
            return
        match = _HOST.fullmatch(hosts[0].strip()) if len(hosts) == 1 else None
        if match is None or int(match["port"] or 0) > _MAX_PORT:
            raise HttpError(400, "The request needs exactly one well-formed Host header.", code="invalid_host")
        name = (match["v6"] or match["name"]).lower().rstrip(".")
        if self._loopback and name != self._bound and not _names_loopback(name):
            message = f"The Host header is {format_value(name)}; allowed: localhost and loopback addresses."
            raise HttpError(403, message, code="host_not_allowed")


def _names_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether every address of a host to bind is a loopback address."""
    host = host.strip("[]")
    if _names_loopback(host.lower()):
        return True
    try:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(host) and all(ipaddress.ip_address(str(item[4][0]).split("%")[0]).is_loopback for item in found)


def check_exposure(options: ServerOptions) -> None:
    """Raises ConfigError when others could reach the server without a key."""
    if not options.api_keys and not is_loopback(options.host):
        raise ConfigError(
            f"host {options.host!r} can be reached from other machines, and no API key is set. "
            "Set one (--api-key, or PENSTOCK_API_KEY), or bind to 127.0.0.1."
        )


def check_origins(origins: Iterable[str]) -> None:
    """Raises ConfigError for an origin that no browser sends, so that allowing it would do nothing."""
    origins = tuple(origins)
    for origin in () if origins == (NO_ORIGIN,) else origins:
        match = _ORIGIN.fullmatch(origin)
        port = int(match["port"] or -1) if match else -1
        own_port = port == _PORTS.get(origin.partition(":")[0], 0)
        if origin in ("*", LOCALHOST) or (match and port <= _MAX_PORT and not own_port):
            continue
        raise ConfigError(
            f"--allowed-origins has {origin!r}, which no browser sends; allowed: scheme://host[:port], in small "
            "letters, without a path or the scheme's own port (https://app.example, http://localhost:3000); "
            "* for all; localhost for those of this machine, which may call anyway; or none, alone, for not even those."
        )
