"""Who gives out a registry's tokens: which addresses a registry may name, and which of them see the person's login."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from penstock.config.environment import DOCKER_AUTHORITY, DOCKER_REGISTRIES
from penstock.config.errors import quoted
from penstock.library.web import WebError


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine by its name or number."""
    name = _bare(host)
    address = _address(name)
    return _is_local(name) if address is None else address.is_loopback


def checked_realm(realm: str, registry: str, *, secure: bool) -> str:
    """The host of the address that a registry sends to for a token.

    Args:
        realm: the address.
        registry: the registry's host, with its port if it has one.
        secure: the registry is spoken to in HTTPS.

    Raises:
        WebError: nothing is to be asked there.
    """
    try:
        parts = urlsplit(realm)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", 0
    schemes = ("https",) if secure else ("https", "http")
    if not host or port == 0 or "@" in parts.netloc or parts.scheme not in schemes:
        told = " or ".join(f"{scheme}://" for scheme in schemes)
        raise WebError(f"{registry} sends to {quoted(realm)} for a token, which is no {told} address.", 401)
    if _is_private(host) and not _is_private(_bare(registry)):
        raise WebError(f"{registry} sends to {quoted(host)} for a token, an address of this machine or network.", 401)
    return host


def gets_login(host: str, registry: str) -> bool:
    """Whether an authority is the registry's own: its host, or one under the same domain that somebody registered."""
    own = _bare(registry)
    if host == own or (own in DOCKER_REGISTRIES and host == DOCKER_AUTHORITY):
        return True
    domain = own.partition(".")[2]
    return _address(own) is None and _is_registered(domain) and (host == domain or host.endswith(f".{domain}"))


def _is_registered(domain: str) -> bool:
    """False for what many share, such as com and co.uk."""
    labels = domain.split(".")
    return len(labels) > 2 or (len(labels) == 2 and not (len(labels[0]) <= 3 and len(labels[1]) == 2))


def _bare(host: str) -> str:
    return re.sub(r":[0-9]+$", "", host).strip("[]").lower()


def _is_local(name: str) -> bool:
    plain = name.rstrip(".")
    return plain == "localhost" or plain.endswith(".localhost")


def _is_private(name: str) -> bool:
    address = _address(name)
    return _is_local(name) if address is None else not address.is_global


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """A host's number in any of its spellings (127.1, 0x7f000001), as a resolver reads them."""
    with suppress(ValueError):
        found = ip_address(name)
        return getattr(found, "ipv4_mapped", None) or found
    with suppress(OSError, ValueError):
        return IPv4Address(socket.inet_aton(name.rstrip(".")))
    return None
