"""What a `$ref` points at within its schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Pointers:
    """What references of a schema point at; each is read once, however often it is followed.

    Args:
        root: the schema, which stays as it is.
    """

    root: Any
    _found: dict[str, Any] = field(default_factory=dict)

    def target(self, pointer: str) -> Any:
        """What a `$ref` by place within the schema points at, None for any other, as of an `$anchor`."""
        if pointer not in self._found:
            self._found[pointer] = self._follow(pointer)
        return self._found[pointer]

    def _follow(self, pointer: str) -> Any:
        if pointer != "#" and not pointer.startswith("#/"):
            return None
        value = self.root
        for part in pointer.split("/")[1:]:
            if not isinstance(value, dict):
                return None
            value = value.get(unquote(part).replace("~1", "/").replace("~0", "~"))
        return value
