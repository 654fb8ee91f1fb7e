"""Walking values of JSON without recursion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects within a value, itself included, in no order that matters."""
    stack = [value]
    while stack:
        found = stack.pop()
        if isinstance(found, dict):
            yield found
            stack += found.values()
        elif isinstance(found, list):
            stack += found
