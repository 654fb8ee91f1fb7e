"""Tool calls as the dialects tell them: whole, in pieces, or with their arguments as objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from penstock.engine.api import ToolCallDelta


def arguments_of(text: str) -> dict[str, Any]:
    """The object that a call's arguments write out; as much of it as there is of one cut short, {} where there is none.

    Of a name that comes twice the last counts.
    """
    try:
        arguments = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def call_piece(piece: ToolCallDelta) -> dict[str, Any]:
    """A piece of a call in OpenAI's form."""
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def whole_calls(pieces: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, from all their pieces."""
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return [
        {
            "id": piece.id,
            "type": "function",
            "function": {"name": piece.name, "arguments": "".join(arguments[piece.index])},
        }
        for piece in pieces
        if piece.id is not None
    ]
