"""Arguments of tool calls as objects, for the dialects that tell them so."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json


def arguments_of(text: str) -> dict[str, Any]:
    """The object that a call's arguments write out; as much of it as there is of one cut short, {} where there is none.

    Of a name that comes twice the last counts.
    """
    try:
        arguments = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
