"""How long values are that end up in a prompt."""

from __future__ import annotations

from collections.abc import Mapping


def characters(root: object) -> int:
    """The characters of all strings in a tree of objects and lists, names of members included."""
    total, level = 0, [root]
    while level:
        inner: list[object] = []
        for item in level:
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, Mapping):
                total += sum(map(len, item))
                inner += item.values()
            elif isinstance(item, (list, tuple)):
                inner += item
        level = inner
    return total
