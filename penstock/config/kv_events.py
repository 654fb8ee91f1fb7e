"""What `--kv-events-config` says: who is told which blocks the KV cache has, and how blocks are named to them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from penstock.config.errors import ConfigError, format_value

HASH_ALGORITHMS: Final = ("sha256_cbor", "sha256")
LAYOUTS: Final = ("map", "array")
HASHES: Final = ("int", "bytes")
_MOST: Final = 10_000_000
_PUBLISHERS: Final = ("zmq", "null")


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Where events go, under vLLM's names.

    Attributes:
        endpoint: of the PUB socket, which listens where it names no host (`*`) or a file, and else connects.
        replay_endpoint: of the ROUTER socket that gives batches again; None for none.
        buffer_steps: batches that are kept for it.
        hwm: batches that wait for one subscriber before it loses some.
        max_queue_size: events that wait to be published; more are lost.
        topic: what every message begins with.
        layout: one of LAYOUTS: events as maps, or as arrays, as vLLM and SGLang had them before.
        block_hashes: one of HASHES: the last 64 bits as a number, or all 32 bytes; None as
            VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES says.
        data_parallel_rank: number of the engine among those of the model, which every batch tells.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    layout: str = "map"
    block_hashes: str | None = None
    data_parallel_rank: int = 0


def kv_events(text: str | None) -> KVEvents | None:
    """Reads the option, an object in JSON; None where nobody is told.

    Raises:
        ConfigError: names what was found, and what is allowed.
    """
    if text is None:
        return None
    given: dict[str, Any] = dict(json.loads(text))
    enabled = given.pop("enable_kv_cache_events", None)
    publisher = given.pop("publisher", None)
    if enabled is not None and type(enabled) is not bool:
        raise _refused("enable_kv_cache_events", enabled, "true or false")
    if publisher is not None and publisher not in _PUBLISHERS:
        raise _refused("publisher", publisher, ", ".join(_PUBLISHERS))
    for name, value in given.items():
        if name not in KVEvents.__dataclass_fields__:
            known = ", ".join(("enable_kv_cache_events", "publisher", *KVEvents.__dataclass_fields__))
            raise ConfigError(f"--kv-events-config has no {format_value(name)}; there are: {known}.")
        _check(name, value)
    wanted = publisher == "zmq" if enabled is None else enabled and publisher != "null"
    return KVEvents(**given) if wanted else None


def _check(name: str, value: Any) -> None:
    if name in ("endpoint", "replay_endpoint"):
        if value is None and name == "replay_endpoint":
            return
        if not (isinstance(value, str) and _is_endpoint(value)):
            raise _refused(name, value, "tcp://HOST:PORT (* for every address of this machine) or ipc:///path")
    elif name in ("buffer_steps", "hwm", "max_queue_size", "data_parallel_rank"):
        least = 0 if name in ("buffer_steps", "data_parallel_rank") else 1
        if not (type(value) is int and least <= value <= _MOST):
            raise _refused(name, value, f"an integer from {least} to {_MOST}")
    elif name == "topic":
        if not isinstance(value, str):
            raise _refused(name, value, "a text")
    elif value not in (allowed := LAYOUTS if name == "layout" else HASHES):
        raise _refused(name, value, ", ".join(allowed))


def _is_endpoint(text: str) -> bool:
    scheme, separator, rest = text.partition("://")
    if not separator or not rest or len(text) > 512 or not text.isprintable():
        return False
    host, colon, port = rest.rpartition(":")
    return scheme == "ipc" or (scheme == "tcp" and bool(host and colon) and (port == "*" or _is_port(port)))


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65_535


def _refused(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"--kv-events-config: {name} is {format_value(value)}; allowed: {allowed}.")
