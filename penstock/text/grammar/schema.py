"""JSON schemas: bounded, made compact, and with what only looks like a demand taken out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.config import limits
from penstock.config.errors import RequestError

OPTIONS: Final = "x-guidance"
"""Where a schema says how its documents are laid out (llguidance's name)."""
_LAYOUT: Final = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern")


def compact_schema(schema: Any) -> dict[str, Any]:
    """A schema whose documents have no whitespace between their parts, unless it asks for it under "x-guidance".

    Raises:
        RequestError: it is no schema, or larger than allowed.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refused(f"grammar is {str(schema)[:40]!r}; allowed: a JSON schema, which is an object.")
    _check_size(schema)
    asked = schema.get(OPTIONS)
    asked = asked if isinstance(asked, Mapping) else {}
    layout = {name: asked[name] for name in _LAYOUT if isinstance(asked.get(name), (str, bool))}
    return {**schema, OPTIONS: {"whitespace_flexible": False, **layout}}


def _refused(message: str) -> RequestError:
    return RequestError(message, param="grammar", code="invalid_grammar")


def _check_size(schema: dict[str, Any]) -> None:
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > limits.MAX_GRAMMAR_DEPTH:
            raise _refused(f"the JSON schema is nested deeper than {limits.MAX_GRAMMAR_DEPTH} levels.")
        if isinstance(value, list):
            stack += ((item, depth + 1) for item in value)
        if not isinstance(value, dict):
            continue
        _check_values(value)
        stack += ((item, depth + 1) for item in value.values())


def _check_values(schema: dict[str, Any]) -> None:
    values, pattern = schema.get("enum"), schema.get("pattern")
    if isinstance(values, list) and len(values) > limits.MAX_CHOICES:
        raise _refused(f"enum lists {len(values)} values; allowed: at most {limits.MAX_CHOICES}.")
    if isinstance(pattern, str) and len(pattern) > limits.MAX_REGEX_CHARS:
        raise _refused(f"pattern has {len(pattern)} characters; allowed: at most {limits.MAX_REGEX_CHARS}.")
