"""What a body's schema does not allow, in words that name the field, its value and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from penstock.config.errors import RequestError, format_value
from penstock.server.shapes import PATTERNS


def _entries(least: str, key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda found: f"{least} {found[key]} {'entry' if found[key] == 1 else 'entries'}"


def _bound(side: str, key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda found: f"{side} {found[key]:g}" if isinstance(found[key], float) else f"{side} {found[key]}"


def _tagged(context: Mapping[str, Any]) -> str:
    """Of an object whose other fields depend on one of them."""
    field, kinds = context["discriminator"].strip("'"), context.get("expected_tags", "").replace("'", '"')
    return f"an object whose {field} is one of {kinds}" if kinds else f"an object with a {field}"


def _fixed(words: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda found: words


_ALLOWED: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {
        "string_type": _fixed("a string"),
        "int_type": _fixed("an integer"),
        "int_from_float": _fixed("an integer"),
        "float_type": _fixed("a number"),
        "finite_number": _fixed("a finite number"),
        "bool_type": _fixed("true or false"),
        "list_type": _fixed("a list"),
        "dict_type": _fixed("an object"),
        "model_type": _fixed("an object"),
        "model_attributes_type": _fixed("an object"),
        "union_tag_invalid": _tagged,
        "union_tag_not_found": _tagged,
        "too_short": _entries("at least", "min_length"),
        "too_long": _entries("at most", "max_length"),
        "string_too_short": _fixed("a string that is not empty"),
        "string_too_long": lambda found: f"a string of at most {found['max_length']} characters",
        "string_pattern_mismatch": lambda found: PATTERNS[found["pattern"]],
        "literal_error": lambda found: str(found["expected"]).replace("'", '"'),
        "greater_than": _bound("more than", "gt"),
        "greater_than_equal": _bound("at least", "ge"),
        "less_than": _bound("less than", "lt"),
        "less_than_equal": _bound("at most", "le"),
    }
)
"""What is allowed, in plain words, by pydantic's type of error."""


def refusal(error: ValidationError, data: Mapping[str, Any], known: Sequence[str]) -> RequestError:
    """The first offence of a body; `known` are the fields its schema has."""
    found = error.errors(include_url=False)
    first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        param = field[:64] if len(first["loc"]) == 1 else _spell(first["loc"], data)
        near = difflib.get_close_matches(param, known, n=1) if len(first["loc"]) == 1 else []
        hint = f" Did you mean {format_value(near[0])}?" if near else ""
        return RequestError(f"Unknown parameter: {format_value(param)}.{hint}", param=param, code="unknown_parameter")
    same = [item for item in found if item["loc"][0] == field]
    if len(same) > 1:  # of a union's members, the one that got furthest is the one that was meant
        first = max(same, key=lambda item: len(item["loc"]))
        same = [item for item in same if item["loc"] == first["loc"]] if len(first["loc"]) > 2 else same
    param = _spell(first["loc"], data)
    if first["type"] == "missing":
        return RequestError(f"{param} is required.", param=param, code="missing_required_parameter")
    allowed = " or ".join(dict.fromkeys(_allowed(item) for item in same[:4]))
    said = f"{param} is {format_value(first['input'])}"
    if first["loc"][-1] == "[key]":
        param = _spell(first["loc"][:-2], data)
        said = f"{param} has the key {format_value(first['input'])}"
    return RequestError(f"{said}; allowed: {allowed}.", param=param, code="invalid_value")


def _allowed(item: Mapping[str, Any]) -> str:
    words = _ALLOWED.get(item["type"])
    return words(item.get("ctx", {})) if words else str(item["msg"]).removeprefix("Input should be ")[:120]


def _spell(loc: Sequence[int | str], data: Mapping[str, Any]) -> str:
    """`stop[2]` for ("stop", "list[str]", 2): of pydantic's path only the parts that the client wrote or left out."""
    text, value = str(loc[0])[:64], data.get(str(loc[0]))
    for place, part in enumerate(loc[1:], 1):
        if isinstance(value, dict) and part not in value and place < len(loc) - 1:
            continue  # which member of a union it is
        if isinstance(part, int):
            text += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif isinstance(value, dict):
            text += f".{part[:64]}" if part.isidentifier() else f"[{format_value(part)}]"
            value = value.get(part)
    return text
