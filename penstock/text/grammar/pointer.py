"""What a `$ref` points at within its schema."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def target(pointer: str, root: Any) -> Any:
    """What a `$ref` within the schema points at, None for any other."""
    value = root
    for part in pointer.removeprefix("#").split("/")[1:] if pointer.startswith("#") else ():
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, dict) else None
    return value if pointer.startswith("#") else None
