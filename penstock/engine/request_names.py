"""Ids of requests where an engine has several clients: each has its client's name before it."""

from __future__ import annotations

_PREFIX = "\x01"


def prefix(client: str) -> str:
    """What the ids of a client's requests begin with."""
    return f"{_PREFIX}{client}/"


def named(client: str, request_id: str) -> str:
    """A request's id among those of all clients: as it is, for the client that started the engine."""
    return prefix(client) + request_id if client or request_id.startswith(_PREFIX) else request_id


def client_of(request_id: str) -> str:
    """Whose request it is."""
    return request_id[1:].partition("/")[0] if request_id.startswith(_PREFIX) else ""


def unnamed(request_id: str) -> str:
    """A request's id as its client knows it."""
    return request_id[len(prefix(client_of(request_id))) :] if request_id.startswith(_PREFIX) else request_id
